"""Float8 across tensor-parallel ranks: cast before the gather, not after it.

Under sequence parallelism the ranks gather the input of *column* matmuls, and in backward the
gradient of a *row* matmul's output.  If the matmuls have one scale per tensor, each rank casts its
slice, and the ranks gather 8-bit numbers.  This halves the bytes.  And the matmul reads what the
gather returns, so asynchronous tensor parallelism can overlap the two; a gather whose result is
cast first is not fused.

The ranks agree on the scale by a max-reduction of one number, so the numbers equal those of a cast
after the gather.  torchao's layers accept a tensor that is already cast (`Float8TrainingTensor`).
The gradient of a *column* matmul's input is a sum over ranks, and stays in high precision.

torchao's types are opaque to Dynamo, so the functions here enter its graphs as they are
(``allow_in_graph``), which requires the group's name instead of the group.

Shapes in names: B sequences, T tokens of a sequence on this rank, S tokens of all ranks, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchao.float8.distributed_utils import tensor_already_casted_to_fp8
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
from torchao.float8.float8_training_tensor import (
    Float8TrainingTensor,
    GemmInputRole,
    hp_tensor_and_scale_to_float8,
)
from torchao.float8.float8_utils import amax_to_scale

from weft.models.layers import run_function
from weft.parallel.collectives import Collective, c10d_functional, reduce_scatter_sequence


def find_exchanges(
    layers: Sequence[Any], group: dist.ProcessGroup
) -> tuple[Collective, Collective] | None:
    """Return the collectives before and after the matmuls of float8 layers.

    None if a layer is not in float8.  The first gathers ``[B, T, D]`` to a `Float8TrainingTensor`
    ``[B, S, D]``; its backward reduce-scatters.  The second scatters partial sums; its backward
    gathers float8.
    """
    if not _are_float8(layers):
        return None
    layer = layers[0]
    config = layer.config
    names = (group.group_name, group.size())
    gather = (*names, config.cast_config_input.target_dtype, layer.linear_mm_config)
    scatter = (*names, config.cast_config_grad_output.target_dtype, layer.linear_mm_config)
    return (
        lambda x_BTD, _: run_function(_GatherSequence, x_BTD, *gather),
        lambda x_BSD, _: run_function(_ScatterSequence, x_BSD, *scatter),
    )


def _are_float8(layers: Sequence[nn.Module]) -> bool:
    return all(isinstance(layer, Float8Linear) for layer in layers)


@torch._dynamo.allow_in_graph
class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BTD: Tensor, name: str, size: int, dtype: torch.dtype, mm_config: Any
    ) -> Any:
        ctx.name, ctx.size = name, size
        return _gather(x_BTD, GemmInputRole.INPUT, name, size, dtype, mm_config)

    @staticmethod
    def backward(ctx: Any, grad_BSD: Tensor) -> tuple[Tensor | None, ...]:
        return reduce_scatter_sequence(grad_BSD, ctx.name, ctx.size), None, None, None, None


@torch._dynamo.allow_in_graph
class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BSD: Tensor, name: str, size: int, dtype: torch.dtype, mm_config: Any
    ) -> Tensor:
        ctx.options = name, size, dtype, mm_config
        return reduce_scatter_sequence(x_BSD, name, size)

    @staticmethod
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor | None, ...]:
        grad_BSD = _gather(grad_BTD, GemmInputRole.GRAD_OUTPUT, *ctx.options)
        return grad_BSD, None, None, None, None


def _gather(
    x_BTD: Tensor, role: GemmInputRole, name: str, size: int, dtype: torch.dtype, mm_config: Any
) -> Any:
    """Cast with the scale of all ranks, and gather."""
    amax = c10d_functional.all_reduce(x_BTD.abs().max(), "max", name)
    local = _cast(x_BTD, c10d_functional.wait_tensor(amax), dtype, mm_config, role)
    data_BTD = local._data.contiguous()
    if data_BTD.device.type == "cpu":  # gloo has no float8
        data_BTD = data_BTD.view(torch.uint8)
    gathered = c10d_functional.all_gather_into_tensor(data_BTD, size, name)
    # torch cannot concatenate float8.  Inductor's pass for async TP expects these operators.
    chunks = [x.view(torch.uint8) for x in c10d_functional.wait_tensor(gathered).chunk(size)]
    data_BSD = torch.cat(chunks, dim=1).view(dtype)
    return Float8TrainingTensor(data_BSD, local._scale, x_BTD.dtype, mm_config, role)


def _cast(x: Tensor, amax: Tensor, dtype: torch.dtype, mm_config: Any, role: GemmInputRole) -> Any:
    scale = amax_to_scale(amax, dtype, round_scales_to_power_of_2=True)
    return hp_tensor_and_scale_to_float8(x, scale, dtype, mm_config, role)


def find_joint_product(layers: Sequence[Any]) -> Callable[..., Sequence[Tensor]] | None:
    """Return a function that multiplies one input with the weights of float8 layers.

    None if a layer is not in float8.  The weights are concatenated.  If FSDP has gathered them in
    float8, they must share a scale: ``scale_group`` of `weft.parallel.float8.weight_gather`.
    """
    if not _are_float8(layers):
        return None
    layer = layers[0]
    for each in layers:
        vars(each)["scale_group"] = id(layer)
    config, mm_config = layer.config, layer.linear_mm_config
    grad_dtype = config.cast_config_grad_output.target_dtype

    def multiply(x_BSD: Tensor, *weights: Tensor) -> Sequence[Tensor]:
        if len({tensor_already_casted_to_fp8(weight) for weight in weights}) == 2:
            # FSDP gathers weights that do not shard evenly in high precision.
            return [_multiply(x_BSD, weight) for weight in weights]
        out = _multiply(x_BSD, run_function(_ConcatWeights, *weights))
        return torch.split(out, [len(weight) for weight in weights], dim=-1)

    def _multiply(x_BSD: Tensor, weight: Tensor) -> Tensor:
        out = run_function(matmul_with_hp_or_float8_args, x_BSD, weight.t(), mm_config, config)
        return run_function(_CastGradient, out, grad_dtype, mm_config)

    allow_in_graph: Any = torch._dynamo.allow_in_graph
    return allow_in_graph(multiply)  # type: ignore[no-any-return]


class _CastGradient(torch.autograd.Function):
    """Cast the gradient while it has the shape of the output.

    torchao flattens the gradient, then casts it.  Inductor's pass for async TP fuses a float8
    matmul with a reduce-scatter only if its input is flattened last.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, dtype: torch.dtype, mm_config: Any) -> Tensor:
        ctx.options = dtype, mm_config
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dtype, mm_config = ctx.options
        return (
            _cast(grad, grad.abs().max(), dtype, mm_config, GemmInputRole.GRAD_OUTPUT),
            None,
            None,
        )


class _ConcatWeights(torch.autograd.Function):
    """Concatenate weights by outputs, all cast to float8 or none."""

    @staticmethod
    def forward(ctx: Any, *weights: Any) -> Any:
        ctx.sizes = [len(weight) for weight in weights]
        if not tensor_already_casted_to_fp8(weights[0]):
            return torch.cat(weights)
        first = weights[0]
        data = torch.cat([weight._data.view(torch.uint8) for weight in weights])
        return Float8TrainingTensor(
            data.view(first._data.dtype),
            first._scale,
            first._orig_dtype,
            first._linear_mm_config,
            GemmInputRole.WEIGHT,
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return torch.split(grad, ctx.sizes)
