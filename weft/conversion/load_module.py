"""Load a weft checkpoint or a Hugging Face model as a plain PyTorch module."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from weft.config.errors import ConfigError, ConfigErrors, InvalidConfig
from weft.config.files import expand_path
from weft.config.storage import open_directory
from weft.conversion.adapter_path import locate_import
from weft.conversion.hf_import import open_hf_model, store_errors
from weft.conversion.peft_import import open_adapter
from weft.inference.inference_model import find_checkpoint, load_unsharded
from weft.parallel.lora import apply_lora
from weft.planning.model_config import locate_model


def load_module(
    path: str, dtype: torch.dtype | None, device: torch.device, step: int | str | None = None
) -> nn.Module:
    """Load a model in this process.

    Args:
        path: a run or checkpoint of weft, a Hugging Face directory or an adapter, which may be in
            an object store, or org/name on the Hub.
        dtype: dtype of the parameters; None: float32.
        device: where they are allocated.
        step: of a run: see `find_checkpoint`.

    Returns:
        The module in evaluation mode: token ids ``[B, T]`` to logits ``[B, T, V]``.

    Raises:
        InvalidConfig: if there is no model, or weft does not support it.
    """
    local = expand_path(path)
    is_weft = any((directory / "job.toml").is_file() for directory in (local, *local.parents[:2]))
    if local.exists() and is_weft and not (local / "config.json").is_file():
        module = load_unsharded(find_checkpoint(local, step), device)
        return module.to(dtype or torch.float32).eval()
    if step is not None:
        rule = "is for a run of weft, and path is another model"
        raise InvalidConfig([ConfigError("step", step, rule, "leave it out")])
    if "://" in path and not path.startswith("hf://"):
        remote = open_directory(path)
        with store_errors(remote):
            return _load_hf(*locate_import(remote, ""), dtype, device)
    directory = locate_model(path, with_weights=True, key="path")
    return _load_hf(*locate_import(directory, ""), dtype, device)


def _load_hf(
    directory: Path, adapter: Path | None, dtype: torch.dtype | None, device: torch.device
) -> nn.Module:
    """Load a Hugging Face directory, maybe with an adapter, one weight at a time."""
    errors = ConfigErrors()
    opened = open_hf_model(directory, errors)
    errors.raise_any()
    assert opened is not None
    family, config, weights = opened
    lora = None
    if adapter is not None:
        read = open_adapter(adapter, family, config, errors)
        errors.raise_any()
        assert read is not None
        lora = read.lora_section()
        weights = read.apply(weights, lora, family, config)
    with torch.device("meta"):
        module = family.build(config)
        if lora is not None:
            apply_lora(module, family.blocks(module), lora, torch.float32)
        module.to(dtype or torch.float32)
    module.to_empty(device=device)
    # Parameters, and the buffers that a checkpoint has.
    for name, target in module.state_dict().items():
        start = 0
        flat = target.view(-1)
        for chunk in weights[name].read():
            flat[start : start + chunk.numel()].copy_(chunk.reshape(-1))
            start += chunk.numel()
    return module.eval()
