"""Rotary positions (arXiv:2104.09864) and their scaling to longer contexts.

Shapes in names: B batch, T tokens of a sequence, S maximum sequence length, K head dimension, R
rotated part of it, J = R / 2 rotated pairs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from weft.models.decoder_config import DecoderConfig

Device = torch.device | str | None


def rope_frequencies(
    config: DecoderConfig, is_local: bool = False, seq_len: int = 0, device: Device = None
) -> Tensor:
    """Return the angle per token of each rotated pair, in radians.

    Without scaling the angle is ``theta ** (-2j / R)`` for pair j.  The kinds of scaling are those
    of transformers: llama3 (``apply_scaling`` of Meta's llama-models), yarn (arXiv:2309.00071),
    longrope (arXiv:2402.13753), linear and dynamic (NTK-aware).

    Args:
        config: of the model.
        is_local: of the layers with a window or chunks.
        seq_len: tokens of a full sequence, which dynamic and longrope depend on.
        device: of the result.

    Returns:
        float32 ``[J]``, highest frequency first.
    """
    width, theta, kind = config.rope_dim, config.rope_theta, config.rope_scaling
    if is_local and config.rope_local_theta:
        theta, kind = config.rope_local_theta, "none"
    factor, context = config.rope_factor, config.rope_original_context
    if kind == "dynamic" and seq_len > context:
        theta *= (factor * seq_len / context - (factor - 1)) ** (width / (width - 2))
    exponents_J = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    frequencies_J = 1.0 / theta**exponents_J
    if kind == "linear":
        return frequencies_J / factor
    if kind == "llama3":
        rotations_J = context * frequencies_J / (2 * math.pi)
        span = max(config.rope_high_freq_factor - config.rope_low_freq_factor, 1e-12)
        smooth_J = ((rotations_J - config.rope_low_freq_factor) / span).clamp(0, 1)
        return frequencies_J * (smooth_J + (1 - smooth_J) / factor)
    if kind == "yarn":
        return frequencies_J * _yarn_scale(config, device)
    if kind == "longrope":
        is_long = seq_len > context
        factors = config.rope_long_factors if is_long else config.rope_short_factors
        factors_J = torch.tensor(factors, dtype=torch.float32, device=device)
        return 1.0 / (factors_J * theta**exponents_J)
    return frequencies_J


def _yarn_scale(config: DecoderConfig, device: Device) -> Tensor:
    """Return the factor of each frequency, from 1 (high) to 1 / rope_factor (low)."""
    width = config.rope_dim

    def pair_with(rotations: float) -> float:
        """Return the index of the pair that rotates so often in the original context."""
        ratio = config.rope_original_context / (rotations * 2 * math.pi)
        return width * math.log(ratio) / (2 * math.log(config.rope_theta))

    low, high = pair_with(config.rope_beta_fast), pair_with(config.rope_beta_slow)
    if config.rope_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    span = high - low or 0.001
    indices_J = torch.arange(width // 2, dtype=torch.float32, device=device)
    scaled_J = ((indices_J - low) / span).clamp(0, 1)
    return scaled_J / config.rope_factor + (1 - scaled_J)


def rope_tables(
    config: DecoderConfig, is_local: bool = False, seq_len: int = 0, device: Device = None
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of positions 0 to S - 1, float32 ``[S, J]``.

    See `rope_frequencies` for the arguments.
    """
    frequencies_J = rope_frequencies(config, is_local, seq_len, device)
    positions_S = torch.arange(config.max_seq_len, dtype=torch.float32, device=device)
    angles_SJ = torch.outer(positions_S, frequencies_J)
    magnitude = 1.0 if is_local and config.rope_local_theta else config.rope_magnitude
    return angles_SJ.cos() * magnitude, angles_SJ.sin() * magnitude


def apply_rope(
    x_BTHK: Tensor, cos_BTR: Tensor, sin_BTR: Tensor, interleaved: bool = False
) -> Tensor:
    """Rotate the first R elements of queries or keys by their positions.

    Element j is paired with element ``j + R / 2``, the convention of most Hugging Face checkpoints;
    if ``interleaved``, 2j with 2j + 1, that of Meta's own.

    Args:
        x_BTHK: queries or keys, ``[B, T, heads, K]``.
        cos_BTR: cosines of the angles, ``[1 or B, T, R]`` in the dtype of ``x_BTHK``; the two
            elements of a pair are equal.
        sin_BTR: sines of the same angles.
        interleaved: see above.

    Returns:
        The shape and dtype of ``x_BTHK``.
    """
    width = cos_BTR.shape[-1]
    if width < x_BTHK.shape[-1]:
        rotated = apply_rope(x_BTHK[..., :width], cos_BTR, sin_BTR, interleaved)
        return torch.cat((rotated, x_BTHK[..., width:]), dim=-1)
    if interleaved:
        first_BTHJ, second_BTHJ = x_BTHK.reshape(*x_BTHK.shape[:-1], -1, 2).unbind(-1)
        turned = torch.stack((-second_BTHJ, first_BTHJ), dim=-1).flatten(-2)
    else:
        first_BTHJ, second_BTHJ = x_BTHK.chunk(2, dim=-1)
        turned = torch.cat((-second_BTHJ, first_BTHJ), dim=-1)
    return x_BTHK * cos_BTR.unsqueeze(-2) + turned * sin_BTR.unsqueeze(-2)
