"""Float8 training: linear layers multiply 8-bit numbers, at twice the speed.

Float8 has 3 mantissa bits (e4m3, up to 448) or 2 (e5m2, up to 57344, for gradients).  This suffices
for the factors of a matmul with high-precision accumulation, if they are *scaled* to the narrow
range first (Micikevicius et al., arXiv:2209.05433).  A linear layer has three matmuls: output,
input gradient and weight gradient.  Before each, both factors are multiplied by the format's
maximum over their largest magnitude, and cast.  Weights, gradients, optimizer states and
activations keep their dtypes, and checkpoints are the same as without float8.  The recipe defines
the numbers that share a scale:

    tensorwise          a full matrix; the fastest
    rowwise             a row (or column); an outlier affects only its row
    rowwise_with_gw_hp  like rowwise, with weight gradients in high precision
    mxfp8               32 numbers, a power-of-two scale (OCP Microscaling Formats, v1.0); SM100

torchao does the matmuls: its `Float8Linear`, or for mxfp8 `MXLinear`, replaces a linear layer and
keeps the weight and its name.  `weft.planning.matrices` chooses the layers.

*Float8 all-gather.*  With one scale per weight, FSDP can gather shards that are already cast, which
halves the bytes, if all ranks agree on the scale.  FSDP asks a shard for gather hooks.  torchao
provides the hooks by a tensor subclass, which all code that saves, compares, initializes or updates
parameters would see.  Here the shard stays a plain tensor, and torchao's hooks are attributes of
it.  They gather uint8, because gloo has no float8.  `Float8AllGather.begin_step` computes all
scales with one max-reduction, before the first gather of each pass through the model.  It does not
run after the optimizer step, so code that changes weights (a skipped step, a checkpoint, a replica)
needs no call.  Weights that do not shard evenly are gathered in high precision.

*Any layout, same numbers.*  Scales differ between layouts: a tensor-parallel rank scales its shard,
and a microbatch its own numbers.  Results do not differ, because all scales are rounded down to
powers of two, which change a number's exponent but not its mantissa.  The exception are numbers so
much smaller than the largest (about 2**-14 for e4m3) that they become subnormal.

*Emulation.*  On devices without float8 matmuls, factors are cast and then multiplied in float32.
The rounding is the same, but it is slower than no float8.

*Compiled*, float8 needs three settings of the compiler; see `prepare_compiler`.

torchao is imported only when a layer is converted, because the import takes seconds.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.models.layers import add_bias, grouped_linear
from weft.models.moe import ExpertLinear
from weft.parallel.private import iter_sharded_parameters, set_all_gather_hooks
from weft.parallel.step_hook import StepHook

MX_BLOCK_SIZE = 32


def apply_float8(model: nn.Module, recipe: str, names: Collection[str], emulate: bool) -> None:
    """Convert linear layers to float8 in place, before tensor parallelism.

    Args:
        model: changed in place.
        recipe: see the module docstring.
        names: module names in the full model; a pipeline stage may lack some.
        emulate: multiply in float32 after the cast.
    """
    selected = set(names)
    convert = get_converter(recipe, emulate)
    for name, module in list(model.named_modules()):
        if name in selected and isinstance(module, ExpertLinear):
            with without_warnings():
                from weft.parallel.float8_experts import float8_grouped_linear
            module.product = partial(float8_grouped_linear, recipe=recipe, emulate=emulate)
        elif name in selected:
            model.set_submodule(name, convert(module))


def prepare_compiler(recipe: str) -> None:
    """Set what torch.compile needs for float8; call it before the first compilation.

    Inductor keeps fused values in float32 where the eager operators round them to bfloat16.  With a
    scale per row, the recomputed input of a layer then differs from the one of the forward pass,
    and training ends in NaN after some 40 steps (pytorch/pytorch#150859).  So these recipes round
    as the eager operators do.

    Triton 3.8 stores transposed float8 numbers wrongly beside some maxima
    (triton-lang/triton#11111).  torchao avoids them when it converts a linear layer, but MXFP8's
    layers and experts are not converted by torchao.

    Graphs for any number of rows, such as those of experts, take Python floats as inputs.  Dynamo
    fails if two functions of autograd in one graph read the same float, as torchao's smallest
    maximum, so floats are constants.  None of weft's changes from step to step.
    """
    from torch._dynamo import config as dynamo_config
    from torch._inductor import config

    dynamo_config.specialize_float = True
    if recipe.startswith("rowwise"):
        config.emulate_precision_casts = True
    patch = import_quietly("torchao.float8._inductor_patch")
    patch._patch_inductor_min_max_codegen()


def is_float8_expert(module: nn.Module) -> bool:
    """Return True for a linear layer of experts in float8."""
    return getattr(module, "product", grouped_linear) is not grouped_linear


def get_converter(recipe: str, emulate: bool) -> Callable[[Any], nn.Module]:
    """Return a function that converts a linear layer and keeps its weight."""
    if recipe == "mxfp8":
        return partial(MXLinear, emulate=emulate)
    float8 = import_quietly("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    config = replace(config, emulate=emulate, round_scales_to_power_of_2=True)
    return partial(float8.convert_to_float8_training, config=config)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Log no warning: importing torchao warns about other hardware."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def import_quietly(module: str) -> Any:
    """Import a module of another package `without_warnings`."""
    with without_warnings():
        return importlib.import_module(module)


class MXLinear(nn.Linear):
    """A linear layer in MXFP8, with the weight and bias of ``module``.

    It uses torchao's prototype, whose interface is not stable.  torchao's own module cannot be
    emulated, because it always casts for the weight gradient with a CUDA kernel.  So this one calls
    the matmul with an explicit choice of kernels.
    """

    def __init__(self, module: nn.Linear, emulate: bool) -> None:
        prototype = import_quietly("torchao.prototype.moe_training.mxfp8_linear")
        config = import_quietly("torchao.prototype.mx_formats.config")
        preference = import_quietly(
            "torchao.quantization.quantize_.common.kernel_preference"
        ).KernelPreference
        nn.Module.__init__(self)
        self.in_features, self.out_features = module.in_features, module.out_features
        self.weight, self.bias = module.weight, module.bias
        self.function = prototype.mx_mm
        dim0, dim1 = config.MXFP8Dim0CastKernelChoice, config.MXFP8Dim1CastKernelChoice
        kernels = (
            (preference.EMULATED, dim0.TORCH, dim1.TORCH)
            if emulate
            else (preference.AUTO, dim0.TRITON, dim1.CUDA)
        )
        # e4m3 also for gradients: one scale per 32 numbers leaves enough range.
        dtypes = (torch.float8_e4m3fn,) * 3
        rounding = config.ScaleCalculationMode.RCEIL  # rounds scales up, so nothing saturates
        self.options = (*dtypes, MX_BLOCK_SIZE, *kernels, rounding, False)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply in MXFP8, and add the bias."""
        # torchao's cast refuses strided rows, which attention over chunks may return.
        return add_bias(self.function.apply(x.contiguous(), self.weight, *self.options), self.bias)


class Float8AllGather(StepHook):
    """FSDP's all-gather of float8 weights; create it after parameters are allocated.

    FSDP's groups may differ: with expert parallelism, fewer ranks share experts.
    """

    def __init__(self, model_parts: Sequence[nn.Module]) -> None:
        self._shards: dict[dist.ProcessGroup, list[_Float8Shard]] = {}
        for param in iter_sharded_parameters(model_parts):
            is_expert = is_float8_expert(param.module)
            # Biases of experts are matrices, too.
            is_weight = param.name == "weight" and param.local.dim() == (3 if is_expert else 2)
            is_float8 = is_expert or float8_layer(param.module) is not None
            if is_weight and is_float8 and param.is_even:
                shard = _Float8Shard(param.local, param.module, param.group)
                set_all_gather_hooks(param, shard.pre_all_gather, shard.post_all_gather)
                self._shards.setdefault(param.group, []).append(shard)
        self._indices: dict[dist.ProcessGroup, Tensor] = {}  # of this rank's matrices
        self._scales: dict[dist.ProcessGroup, Tensor] = {}  # of all matrices
        for group, shards in self._shards.items():
            numbers: dict[Any, int] = {}
            for shard in shards:
                indices = [numbers.setdefault(key, len(numbers)) for key in shard.keys]
                shard.scales = slice(indices[0], indices[-1] + 1)
            own = [numbers[key] for shard in shards for key in shard.own_keys]
            device = shards[0].local.device
            self._indices[group] = torch.tensor(own, device=device)
            # In place in each step, because a CUDA graph reads them where they are.
            self._scales[group] = torch.ones(len(numbers), device=device)
            for shard in shards:
                shard.scale = self._scales[group][shard.scales].view(shard.scale_shape)

    @torch.no_grad()
    def begin_step(self) -> None:
        """Compute the scales of all weights."""
        from torchao.float8.float8_utils import amax_to_scale

        for group, shards in self._shards.items():
            matrices = [matrix for shard in shards for matrix in shard.matrices]
            own = torch.stack(torch._foreach_norm(matrices, math.inf))
            amax = own.new_zeros(len(self._scales[group]))
            amax.scatter_reduce_(0, self._indices[group], own, "amax")
            dist.all_reduce(amax, dist.ReduceOp.MAX, group)
            scales = amax_to_scale(amax, shards[0].dtype, round_scales_to_power_of_2=True)
            self._scales[group].copy_(scales)


def float8_layer(module: Any) -> Any:
    """Return torchao's layer that defines a module's products in float8, or None.

    It is the module itself, or if the weight is frozen: see `weft.parallel.float8_frozen`.
    """
    layer = getattr(getattr(module, "linear", None), "layer", module)
    return layer if hasattr(layer, "linear_mm_config") else None


class _Float8Shard:
    """This rank's shard of a float8 weight or of a stack, with its gather hooks."""

    scales: slice  # of the weight, in those of its FSDP group
    scale: Tensor  # one, or ``[E]`` for all experts of the group

    def __init__(self, local: Tensor, module: Any, group: dist.ProcessGroup) -> None:
        from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

        self.local, self.matrices, self.dtype = local, [local], torch.float8_e4m3fn
        # Matrices that are multiplied as one share a scale.
        self.keys = self.own_keys = [vars(module).get("scale_group", id(module))]
        self.scale_shape: tuple[int, ...] = ()
        self.own_scale: Any = ...  # index in ``scale``
        if is_float8_expert(module):
            own = slice(len(local) * group.rank(), len(local) * (group.rank() + 1))
            self.keys = [(id(module), expert) for expert in range(len(local) * group.size())]
            self.matrices, self.own_keys, self.scale_shape = list(local), self.keys[own], (-1,)
            self.own_scale = (own, None, None)
        config = getattr(float8_layer(module), "linear_mm_config", None)
        self.weight: Any = WeightWithDynamicFloat8CastTensor(local, config, self.dtype)

    def pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor], Any]:
        """Return the bytes to gather, and the scale."""
        self.weight._precomputed_scale = self.scale[self.own_scale]
        (data,), _ = self.weight.fsdp_pre_all_gather(mesh)
        return (data.view(torch.uint8),), (self.scale,)

    def post_all_gather(
        self, gathered: tuple[Tensor], scale: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """Return the weight, of nominal ``dtype``, and the tensors to free."""
        data = tuple(bytes_.view(self.dtype) for bytes_ in gathered)
        return self.weight.fsdp_post_all_gather(data, scale, dtype, out=out)
