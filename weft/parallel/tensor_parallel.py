"""Tensor parallelism of the model and of the cross-entropy loss.

Two matmuls in a row need one collective, not two (Megatron-LM, arXiv:1909.08053).  The first weight
is sharded by its outputs (*column*), the second by its inputs (*row*), and the heads or
feed-forward units between them stay on their rank.  The first matmul needs the full input; after
the second, the partial outputs of all ranks are summed.  With sequence parallelism
(arXiv:2205.05198) each rank holds a slice of the sequence outside of the matmuls.  Then the input
is *gathered*, the partial outputs are *scattered* (summed and sliced), and norms and residuals cost
1/tp of the memory.  Without sequence parallelism, the two collectives are an identity and an
all-reduce.

The model's table says where (`weft.models.llama.SHARDING`); this module applies it from outside:

* Every parameter becomes a DTensor on the axis ``tp``.  So checkpoints, gradient norm and FSDP know
  each rank's shard, and names and shapes remain those of the full model.
* Forward computes with plain local tensors: `LocalWeight` is mixed into a module's class, as
  `fully_shard` does with its own, and ``weight`` is the local shard after FSDP has gathered it.  So
  forward never enters DTensor's dispatch, which is costly per operator.  ``weight`` also sets the
  gradient's placement: a norm whose rank saw only a slice of the sequence has a *partial* gradient,
  which FSDP sums over the ranks of ``tp`` before it reduces it over the other ranks.
* Collectives are forward hooks on the modules that the table names.

If there are more ranks than key/value heads, tp / num_kv_heads ranks share a head.  Then its weight
is replicated, each rank computes with its own head's rows, and gradients are partial sums.

Shapes in names: B sequences, T tokens of a sequence on this context-parallel rank, D model width, V
vocabulary, N = B T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from weft.models.family import TensorParallelSpec
from weft.models.layers import multiply
from weft.parallel.collectives import (
    Collective,
    copy_to_ranks,
    gather_sequence,
    scatter_sequence,
    sum_over_ranks,
)
from weft.parallel.dtensor import from_local

# FSDP gathers a weight over all axes but these.
LOCAL_AXES = {"ep", "tp"}


def apply_tensor_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    sharding: Mapping[str, TensorParallelSpec],
    num_kv_heads: int,
    sequence_parallel: bool,
    *,
    gathers_float8: bool = False,
    joint_products: bool = False,
) -> None:
    """Shard ``model`` (on the meta device) over the one axis of ``mesh``.

    Args:
        model: changed in place.
        mesh: one-dimensional; its ranks hold the shards.
        sharding: specs by module name pattern.
        num_kv_heads: of the full model; a divisor or a multiple of the number of ranks.
        sequence_parallel: keep only a slice of the sequence between matmuls.
        gathers_float8: float8 layers have one scale per tensor, and gather float8.
        joint_products: compute one product for layers with the same input; see
            `_find_joint_product`.

    Raises:
        ValueError: if a module with parameters has no entry in ``sharding``.
    """
    group = mesh.get_group()
    modules = dict(model.named_modules())
    specs = {name: _find_spec(name, module, sharding) for name, module in modules.items()}
    for name, module in modules.items():
        spec = specs[name]
        if spec is None:
            continue
        if spec.weight is not None:
            _shard_weight(module, spec, mesh, num_kv_heads, sequence_parallel)
        has_multiply = spec.input_comm == "gather" and _calls_multiply(module)
        layers = [module]  # next to the exchange
        if has_multiply:
            children = module.named_modules(prefix=name)
            layers = [child for child_name, child in children if _is_column(specs[child_name])]
        gather, scatter = _choose_exchanges(layers, group, sequence_parallel, gathers_float8)
        if has_multiply:
            product = _find_joint_product(layers, gathers_float8) if joint_products else None
            module.multiply = partial(_gather_and_multiply, gather, group, product)
        elif spec.input_comm == "gather":
            module.register_forward_pre_hook(_CollectiveHook(gather, group))
        if spec.output_comm == "gather":
            module.register_forward_hook(_CollectiveHook(gather, group))
        if spec.output_comm == "scatter":
            module.register_forward_hook(_CollectiveHook(scatter, group))


def _find_spec(
    name: str, module: nn.Module, sharding: Mapping[str, TensorParallelSpec]
) -> TensorParallelSpec | None:
    spec = next((s for pattern, s in sharding.items() if fnmatchcase(name, pattern)), None)
    if spec is None and any(True for _ in module.parameters(recurse=False)):
        raise ValueError(f"no pattern of SHARDING matches {name!r}, which has parameters")
    return spec


def _calls_multiply(module: nn.Module) -> bool:
    """Return True if the module's forward is weft's; a user's may not call `multiply`."""
    methods = (getattr(type(module), name, None) for name in ("forward", "project"))
    own = [method for method in methods if method is not None]
    return hasattr(module, "multiply") and all(m.__module__ == multiply.__module__ for m in own)


def _is_column(spec: TensorParallelSpec | None) -> bool:
    return spec is not None and spec.weight in ("column", "heads")


def _choose_exchanges(
    layers: Sequence[nn.Module],
    group: dist.ProcessGroup,
    sequence_parallel: bool,
    gathers_float8: bool = False,
) -> tuple[Collective, Collective]:
    """Return the collectives before and after the matmuls of ``layers``."""
    if not sequence_parallel:
        return copy_to_ranks, sum_over_ranks
    if gathers_float8 and layers:
        from weft.parallel.float8_tensor_parallel import are_float8, float8_exchanges

        if are_float8(layers):
            return float8_exchanges(layers[0], group)
    return gather_sequence, scatter_sequence


JointProduct = Callable[..., Sequence[Tensor]]


def _find_joint_product(layers: Sequence[Any], gathers_float8: bool) -> JointProduct | None:
    """Return a function that multiplies an input with all layers at once, or None.

    Then the gradient of the input is one product too, and not a sum of several.  Only so can
    asynchronous tensor parallelism overlap it with the reduce-scatter that follows.  The price is
    a copy of the weights, which are concatenated.
    """
    if all(type(layer).forward is nn.Linear.forward and layer.bias is None for layer in layers):
        return _joint_product
    if not gathers_float8:
        return None
    from weft.parallel.float8_tensor_parallel import are_float8, joint_float8_product

    if not are_float8(layers):
        return None
    for layer in layers:
        vars(layer)["scale_group"] = id(layers[0])  # see `weft.parallel.float8.Float8AllGather`
    return joint_float8_product(layers[0])


def _joint_product(x_BTD: Tensor, *weights: Tensor) -> Sequence[Tensor]:
    out = F.linear(x_BTD, torch.cat(weights))
    return torch.split(out, [len(weight) for weight in weights], dim=-1)


def _gather_and_multiply(
    gather: Collective,
    group: dist.ProcessGroup,
    product: JointProduct | None,
    x_BTD: Tensor,
    *layers: nn.Module,
) -> Sequence[Tensor]:
    """Replace `weft.models.layers.multiply`: gather the input first.

    Not a hook of the module: if the compiled graph breaks in its forward, a hook is a separate
    graph, and the gather could not be fused with the product.
    """
    x_BSD = gather(x_BTD, group)
    if product is None:
        return multiply(x_BSD, *layers)
    return product(x_BSD, *(layer.weight for layer in layers))


def _shard_weight(
    module: nn.Module,
    spec: TensorParallelSpec,
    mesh: DeviceMesh,
    num_kv_heads: int,
    sequence_parallel: bool,
) -> None:
    tp, rank = mesh.size(), mesh.get_local_rank()
    head_rows: slice | None = None
    grad_placement: Placement | None = None
    full = module.weight
    assert isinstance(full, nn.Parameter), f"{type(module).__name__} has no parameter `weight`"
    kind = spec.weight
    if kind == "heads" and tp > num_kv_heads:
        head_dim = full.shape[0] // num_kv_heads
        head = rank * num_kv_heads // tp
        head_rows = slice(head * head_dim, (head + 1) * head_dim)
        grad_placement, kind = Partial(), "replicated"
    elif kind == "partial_grad" or (kind == "replicated" and sequence_parallel):
        grad_placement, kind = Partial(), "replicated"
    # The first dims are outputs and inputs (or blocks of inputs: `weft.parallel.lora`).  The
    # stacked weight of experts has one more dim before them.
    output_dim = int(full.dim() == 3 and full.is_floating_point())
    outputs, inputs = Shard(output_dim), Shard(output_dim + 1)
    placement: Placement = {"replicated": Replicate(), "row": inputs}.get(str(kind), outputs)
    local = full.data
    if isinstance(placement, Shard):
        local = local.chunk(tp, dim=placement.dim)[rank].contiguous()
    use_local_weight(module, local, mesh, [placement], full.shape)
    vars(module).update(grad_placement=grad_placement, head_rows=head_rows)
    if spec.weight == "vocabulary":
        module.forward = partial(_vocab_parallel_forward, module, rank * local.shape[0])


def use_local_weight(
    module: nn.Module,
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
) -> None:
    """Replace a module's weight by a DTensor; forward uses the local shard."""
    full = module._parameters["weight"]
    assert full is not None
    sharded = from_local(local, mesh, placements, shape)
    module.register_parameter("weight", nn.Parameter(sharded, requires_grad=full.requires_grad))
    if not isinstance(module, LocalWeight):
        module_class: Any = type(module)
        module.__class__ = _with_local_weight(module_class)


class LocalWeight:
    """Mixin of a module: ``weight`` is this rank's shard of the parameter."""

    local_weight: Tensor | None = None  # see `materialize_local_weights`
    grad_placement: Placement | None = None  # None: as the parameter
    head_rows: slice | None = None  # of the rank's own head; None: all

    @property
    def weight(self: Any) -> Tensor:
        """Return the local shard, or the parameter if FSDP has not gathered it."""
        if self.local_weight is not None:
            return cast(Tensor, self.local_weight)
        param: Tensor = self._parameters["weight"]
        if (
            not isinstance(param, DTensor)
            or not set(param.device_mesh.mesh_dim_names or ()) <= LOCAL_AXES
        ):
            return param
        placements = None if self.grad_placement is None else [self.grad_placement]
        local: Tensor = param.to_local(grad_placements=placements)
        return local if self.head_rows is None else local[self.head_rows]


@cache  # one subclass per class, so that the compiler sees that blocks are alike
def _with_local_weight(module_class: Any) -> Any:
    return type(module_class.__name__, (LocalWeight, module_class), {})


def materialize_local_weights(block: nn.Module) -> None:
    """Convert a compiled block's weights to local tensors before its forward.

    So the compiled forward sees plain tensors.  With a DTensor it would also save the mesh, which
    fails with full recomputation in torch 2.13 ("to be Tensors, got types: DeviceMesh").
    """
    sharded: list[Any] = [m for m in block.modules() if isinstance(m, LocalWeight)]
    compiled_forward = block.forward

    def forward(*args: Any) -> Any:
        for module in sharded:
            vars(module)["local_weight"] = module.weight  # setattr would register a parameter
        try:
            return compiled_forward(*args)
        finally:
            for module in sharded:
                vars(module).pop("local_weight", None)

    block.forward = forward


def _vocab_parallel_forward(embedding: nn.Module, first: int, tokens_BT: Tensor) -> Tensor:
    """Look up ids in a shard that starts at id ``first``; zeros for other ids."""
    table = embedding.weight
    assert isinstance(table, Tensor)
    rows_BT = tokens_BT - first
    outside_BT = (rows_BT < 0) | (rows_BT >= table.shape[0])
    x_BTD = F.embedding(rows_BT.masked_fill(outside_BT, 0), table)
    return x_BTD.masked_fill(outside_BT.unsqueeze(-1), 0)


class _CollectiveHook:
    """A hook that applies a collective to a module's output, or first argument."""

    def __init__(self, collective: Collective, group: dist.ProcessGroup) -> None:
        self.collective, self.group = collective, group

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any = None) -> Any:
        if output is None:
            return (self.collective(args[0], self.group), *args[1:])
        return self.collective(output, self.group)
