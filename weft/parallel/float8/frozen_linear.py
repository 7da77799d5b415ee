"""Float8 products of frozen matrices: forward and input gradient only.

torchao's layers always compute the gradient of the weight, and save the input for it.  A matrix
with a LoRA adapter is frozen, so a third of that work, and the memory, would be for nothing.  The
functions here round as torchao's layers do (`weft.parallel.float8`), and save only the weight.  A
quantized matrix (`weft.parallel.quantized`) is dequantized to the dtype of the activations first:
it is stored in 4 or 8 bits per number, and multiplied in float8.

The adapters stay in the compute dtype.  Their products have a short side, the rank, so that casting
would cost more than float8 saves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from weft.models.layers import add_bias, run_function
from weft.parallel.float8.linear_layers import get_converter, import_quietly, without_warnings
from weft.parallel.quantized import dequantize_matrix

# (values [..., K], matrix [N, K]) -> [..., N]
Product = Callable[[Tensor, Any], Tensor]


@cache  # one function for all layers, so that the compiler sees that blocks are alike
def frozen_float8_linear(recipe: str, emulate: bool) -> Callable[..., Tensor]:
    """Return a function like `weft.models.layers.linear`, in float8.

    Its attribute ``layer`` is a float8 layer with the configuration of the products.

    Args:
        recipe: see `weft.parallel.float8`.
        emulate: multiply in float32 after the cast.
    """
    layer: Any = get_converter(recipe, emulate)(nn.Linear(32, 32, bias=False, device="meta"))
    products = _mx_products(layer) if recipe == "mxfp8" else _float8_products(layer)
    function = _make_function(*products)
    with without_warnings():
        from weft.parallel.float8.experts import float8_grouped_linear

    def linear(
        x: Tensor, weight: Tensor, bias: Tensor | None = None, counts_E: Tensor | None = None
    ) -> Tensor:
        if counts_E is None:
            return add_bias(run_function(function, x, weight), bias)
        return add_bias(float8_grouped_linear(x, weight, counts_E, recipe, emulate), bias, counts_E)

    vars(linear)["layer"] = layer
    return linear


def _make_function(forward_product: Product, backward_product: Product) -> Any:
    """Return an autograd function of an input and a frozen matrix."""

    class FrozenProduct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(weight)
            return forward_product(x, _unpack(weight, x.dtype))

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            (weight,) = ctx.saved_tensors
            return backward_product(grad, _unpack(weight, grad.dtype).t()), None

    # torchao's types are opaque to Dynamo.
    allow_in_graph: Any = torch._dynamo.allow_in_graph
    return allow_in_graph(FrozenProduct)


def _unpack(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return dequantize_matrix(weight, dtype) if weight.dtype == torch.uint8 else weight


def _float8_products(layer: Any) -> tuple[Product, Product]:
    """Return the products of torchao's `Float8Linear`, for output and input gradient."""
    scaling = import_quietly("torchao.float8.float8_scaling_utils")
    training = import_quietly("torchao.float8.float8_training_tensor")
    is_cast = import_quietly("torchao.float8.distributed_utils").tensor_already_casted_to_fp8
    config, roles = layer.config, training.GemmInputRole

    def cast(x: Tensor, cast_config: Any, role: Any, dim: int) -> Any:
        if is_cast(x):  # FSDP has gathered it in float8
            return x
        granularity = cast_config.scaling_granularity
        return scaling.hp_tensor_to_float8_dynamic(
            x,
            cast_config.target_dtype,
            layer.linear_mm_config,
            gemm_input_role=role,
            scaling_granularity=granularity,
            axiswise_dim=scaling.get_maybe_axiswise_dim(dim, granularity),
            round_scales_to_power_of_2=config.round_scales_to_power_of_2,
        )

    def make_product(values_config: Any, role: Any, matrix_config: Any) -> Product:
        def multiply(x: Tensor, matrix_NK: Tensor) -> Tensor:
            rows_RK = cast(x.reshape(-1, x.shape[-1]), values_config, role, -1)
            out_RN = torch.mm(rows_RK, cast(matrix_NK.t(), matrix_config, roles.WEIGHT, 0))
            return out_RN.reshape(*x.shape[:-1], -1)

        return multiply

    return (
        make_product(config.cast_config_input, roles.INPUT, config.cast_config_weight),
        make_product(
            config.cast_config_grad_output,
            roles.GRAD_OUTPUT,
            config.cast_config_weight_for_grad_input,
        ),
    )


def _mx_products(layer: Any) -> tuple[Product, Product]:
    """Return the product of MXFP8, which also serves the input gradient."""

    def multiply(x: Tensor, matrix_NK: Tensor) -> Tensor:
        out: Tensor = layer.function.apply(x.contiguous(), matrix_NK.contiguous(), *layer.options)
        return out

    return multiply, multiply
