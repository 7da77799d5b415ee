"""Linear layers in float8.

torchao does the matmuls: its `Float8Linear`, or for mxfp8 `MXLinear`, replaces a linear layer and
keeps the weight and its name.  `weft.planning.matrices` chooses the layers.

*Emulation.*  On devices without float8 matmuls, factors are cast and then multiplied in float32.
The rounding is the same, but it is slower than no float8.

*Compiled*, float8 needs three settings of the compiler; see `prepare_compiler`.

torchao is imported only when a layer is converted, because the import takes seconds.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.models.layers import add_bias, grouped_linear
from weft.models.moe import ExpertLinear
from weft.planning.matrices import MX_BLOCK_SIZE


def apply_float8(model: nn.Module, recipe: str, names: Collection[str], emulate: bool) -> None:
    """Convert linear layers to float8 in place, before tensor parallelism.

    Args:
        model: changed in place.
        recipe: see `weft.parallel.float8`.
        names: module names in the full model; a pipeline stage may lack some.
        emulate: multiply in float32 after the cast.
    """
    selected = set(names)
    convert = get_converter(recipe, emulate)
    for name, module in list(model.named_modules()):
        if name in selected and isinstance(module, ExpertLinear):
            with without_warnings():
                from weft.parallel.float8.experts import float8_grouped_linear
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
