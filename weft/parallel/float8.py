"""Float8: the blocks' matrix products with 8-bit numbers, twice as fast where tensor cores can.

The problem.  Float8 has 3 bits of mantissa (e4m3, up to 448) or 2 (e5m2, up to 57344, for
gradients).  That is enough for the factors of a product, whose sums are kept in more, as long as
they are *scaled* into the narrow range first (Micikevicius et al., arXiv:2209.05433).  So before
each of the three products of a linear layer (output, gradient of the input, gradient of the weight)
both factors are multiplied by 448 over their largest magnitude and cast.  Weights, gradients,
optimizer states and all activations between products stay what they were: nothing in a checkpoint
shows how it was trained.  What shares a scale is the recipe:

    tensorwise          a whole matrix; the fastest
    rowwise             a row (or column) of it; an outlier spoils its row alone
    rowwise_with_gw_hp  the same, and gradients of weights multiplied in high precision
    mxfp8               32 numbers, with a power of two (OCP Microscaling Formats, v1.0); SM100

The products are torchao's: `Float8Linear` in place of a linear layer, with the same weight under
the same name; and its prototype of MXFP8.  Which layers, `weft.plan.float8_rules` says.

*Gathering in float8.*  With one scale for a whole weight, its shards can be cast before FSDP
gathers them, if all ranks agree on the scale: half of the bytes.  FSDP asks a shard how it wants to
be gathered: torchao answers with a tensor subclass that is then every rank's parameter, and that
whoever saves, compares, fills or updates parameters has to reckon with.  Here the shard stays a
plain tensor, and its answers, which are torchao's, hang on it.  They are given as bytes
(uint8), since gloo has no float8.  Scales need the largest magnitude over all shards: one maximum
for all weights (`Float8AllGather`), before the first gather of each pass through the model and not after
the optimizer's step, so that whatever has changed the weights (a step, a skipped one, a
checkpoint, a replica) needs not tell.  A weight that does not divide evenly is gathered as ever.

*Any layout, same numbers.*  A tensor-parallel rank scales its part of a matrix by what is in that
part, and a microbatch by what is in it: there is no exchange for scales, and they differ between
layouts.  Results need not: all scales are rounded down to powers of two, and those move a number's
exponent and leave its mantissa alone.  So a number is rounded to the same one under any scale,
unless it is so much smaller than the largest (about 2**-14 for e4m3) that it leaves the range of
normal numbers.

*Emulation.*  Where the device has no such products, factors are cast all the same and multiplied in
float32: the same rounding, for tests and for seeing what float8 does to a loss; slower than none.

Imported are torchao's modules only where a layer is converted: importing takes seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.parallel.private import set_all_gather_hooks, import_quietly, iter_sharded_parameters


def apply_float8(model: nn.Module, recipe: str, names: Collection[str], emulate: bool) -> None:
    """Let linear layers multiply in float8, in place; before tensor parallelism cuts them.

    Args:
        recipe: see above.
        names: of the modules, in the whole model; a pipeline stage has only some.
    """
    chosen = set(names)
    convert = _converter(recipe, emulate)
    for name, module in list(model.named_modules()):
        if name in chosen:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, convert(module))


def _converter(recipe: str, emulate: bool) -> Callable[[Any], nn.Module]:
    """What makes of a linear layer one that multiplies in float8, with the same weight."""
    if recipe == "mxfp8":
        return partial(import_quietly("weft.parallel.mxfp8").MXLinear, emulate=emulate)
    float8 = import_quietly("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    config = replace(config, emulate=emulate, round_scales_to_power_of_2=True)
    return partial(float8.convert_to_float8_training, config=config)


class Float8AllGather:
    """How FSDP gathers the float8 weights of a model's parts, from when parameters have memory."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        from torchao.float8.float8_linear import Float8Linear

        self._shards: list[Any] = []
        self._group: dist.ProcessGroup | None = None
        for param in iter_sharded_parameters(parts):
            if isinstance(param.module, Float8Linear) and param.even:
                shard = _Float8Shard(param.local, param.module)
                set_all_gather_hooks(param, shard.before, shard.after)
                self._shards.append(shard)
                self._group = param.group

    @torch.no_grad()
    def scale(self) -> None:
        """Find the scales of all weights, on all ranks, before the first gather of a pass."""
        if not self._shards:
            return
        from torchao.float8.float8_utils import amax_to_scale

        largest = torch._foreach_norm([shard.local for shard in self._shards], math.inf)
        amax = torch.stack(largest)
        dist.all_reduce(amax, dist.ReduceOp.MAX, self._group)
        scales = amax_to_scale(amax, self._shards[0].dtype, round_scales_to_power_of_2=True)
        for shard, scale in zip(self._shards, scales, strict=True):
            shard.weight._precomputed_scale = scale


class _Float8Shard:
    """How this rank's shard of a weight is gathered."""

    def __init__(self, local: Tensor, module: Any) -> None:
        from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

        self.local, self.dtype = local, module.config.cast_config_weight.target_dtype
        self.weight: Any = WeightWithDynamicFloat8CastTensor(
            local, module.linear_mm_config, self.dtype
        )

    def before(self, mesh: Any) -> tuple[tuple[Tensor], Any]:
        """What is gathered, and what is needed to make a weight of it."""
        (data,), scale = self.weight.fsdp_pre_all_gather(mesh)
        return (data.view(torch.uint8),), scale

    def after(
        self, gathered: tuple[Tensor], scale: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """The weight, which computes as ``dtype``, and what of it can be freed."""
        data = tuple(part.view(self.dtype) for part in gathered)
        return self.weight.fsdp_post_all_gather(data, scale, dtype, out=out)
