"""Tensor parallelism of the model and of the cross-entropy loss.

Two matmuls in a row need one collective, not two (Megatron-LM, arXiv:1909.08053).  The first weight
is sharded by its outputs (*column*), the second by its inputs (*row*), and the heads or
feed-forward units between them stay on their rank.  The first matmul needs the full input; after
the second, the partial outputs of all ranks are summed.  With sequence parallelism
(arXiv:2205.05198) each rank holds a slice of the sequence outside of the matmuls.  Then the input
is *gathered*, the partial outputs are *scattered* (summed and sliced), and norms and residuals cost
1/tp of the memory.  Without sequence parallelism, the two collectives are an identity and an
all-reduce.

The model's table says where (`weft.models.decoder.SHARDING`); this module applies it from outside:

* Every parameter becomes a DTensor on the axis ``tp``.  So checkpoints, gradient norm and FSDP know
  each rank's shard, and names and shapes remain those of the full model.
* Forward computes with plain local tensors: `LocalWeight` is mixed into a module's class, as
  `fully_shard` does with its own, and ``weight`` is the local shard after FSDP has gathered it.  So
  forward never enters DTensor's dispatch, which is costly per operator.  ``weight`` also sets the
  gradient's placement: a norm whose rank saw only a slice of the sequence has a *partial* gradient,
  which FSDP sums over the ranks of ``tp`` before it reduces it over the other ranks.  The same
  holds for ``bias``.  The outputs of a *row* product are summed, so only rank 0 adds its bias.
* Collectives are forward hooks on the modules that the table names.

*Uneven shards.*  The number of ranks need not divide a size.  A feed-forward layer or a vocabulary
is cut into chunks, as by `torch.chunk`.  Heads are not cut: a rank has the query heads of
`query_heads` and the key heads that they read (`key_heads`), which ranks may share.  If the ranks
do not divide the number of heads, a DTensor's chunks would cut heads.  Then the weight is
replicated, each rank computes with its own heads' part, and gradients are partial sums.  This
costs memory of attention's weights, but no computation.

Shapes in names: B sequences, T tokens of a sequence on this context-parallel rank, D model width, V
vocabulary, N = B T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from weft.config.axes import LOCAL_AXES
from weft.models.family import TensorParallelSpec
from weft.models.layers import LayerNorm, RMSNorm, multiply
from weft.parallel.collectives import (
    Collective,
    all_reduce,
    copy_to_ranks,
    gather_sequence,
    gather_sequence_values,
    scatter_sequence,
    sum_over_ranks,
)
from weft.parallel.dtensor import from_local
from weft.planning.shard_sizes import chunk_range, key_heads, query_heads


def apply_tensor_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    sharding: Mapping[str, TensorParallelSpec],
    config: Any,
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
        config: of the model; its numbers of heads are read if a spec has ``heads``.
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
            parent = modules[name.rpartition(".")[0]]
            _shard_parameters(module, parent, spec, mesh, config, sequence_parallel)
        if spec.weight in ("row", "vocabulary"):
            module.input_group = group  # see `weft.parallel.lora.dora`
        has_multiply = spec.input_comm == "gather" and _calls_multiply(module)
        layers = rows = [module]  # next to the exchanges before and after the matmuls
        if has_multiply:
            children = [*module.named_modules(prefix=name)]
            layers = [m for child, m in children if _is_linear(m, specs[child], "column")]
            rows = [m for child, m in children if _is_linear(m, specs[child], "row")]
        gather, _ = _choose_exchanges(layers, group, sequence_parallel, gathers_float8)
        _, scatter = _choose_exchanges(rows, group, sequence_parallel, gathers_float8)
        if has_multiply:
            product = _find_joint_product(layers, gathers_float8) if joint_products else None
            module.multiply = partial(_gather_and_multiply, gather, group, product)
        elif spec.input_comm == "gather":
            module.register_forward_pre_hook(_CollectiveHook(gather, group))
        if spec.output_comm == "gather":
            module.register_forward_hook(_CollectiveHook(gather, group))
        if spec.output_comm == "gather_values" and sequence_parallel:
            module.register_forward_hook(_CollectiveHook(gather_sequence_values, group))
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
    return hasattr(module, "multiply") and all(m.__module__.startswith("weft.models.") for m in own)


def _is_linear(module: nn.Module, spec: TensorParallelSpec | None, weight: str) -> bool:
    return isinstance(module, nn.Linear) and spec is not None and spec.weight == weight


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
        from weft.parallel.float8 import find_float8_exchanges

        if exchanges := find_float8_exchanges(layers, group):
            gather, scatter = exchanges
            # The gradient of a bias is a sum of what backward gathers.
            return gather, scatter if layers[0].bias is None else scatter_sequence
    return gather_sequence, scatter_sequence


JointProduct = Callable[..., Sequence[Tensor]]


def _find_joint_product(layers: Sequence[Any], gathers_float8: bool) -> JointProduct | None:
    """Return a function that multiplies an input with all layers at once, or None.

    Then the gradient of the input is one product too, and not a sum of several.  Only so can
    asynchronous tensor parallelism overlap it with the reduce-scatter that follows.  The price is
    a copy of the weights, which are concatenated.
    """
    if any(layer.bias is not None for layer in layers):
        return None
    if all(type(layer).forward is nn.Linear.forward for layer in layers):
        return _joint_product
    if not gathers_float8:
        return None
    from weft.parallel.float8 import find_joint_float8_product

    return find_joint_float8_product(layers)


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


class _Heads(NamedTuple):
    """Heads of a rank: their number in the full model, and indices."""

    total: int
    local: Sequence[int]
    num_earlier: int  # heads up to the last one of the previous rank

    def slices(self, width: int) -> list[slice]:
        """Return where the heads, of that width, are in a dim of the full model."""
        return [slice(head * width, (head + 1) * width) for head in self.local]

    def owned(self, width: int) -> list[slice]:
        """Return where this rank's dim has heads that are not on earlier ranks.

        A head that is repeated is returned once.
        """
        limits = [self.num_earlier - 1, *self.local]
        is_new = [head > max(limits[: i + 1]) for i, head in enumerate(self.local)]
        return [slice(i * width, (i + 1) * width) for i, new in enumerate(is_new) if new]


def _heads_of_rank(spec: TensorParallelSpec, mesh: DeviceMesh, config: Any) -> _Heads | None:
    if spec.heads is None:
        return None
    num_heads, tp, rank = config.num_heads, mesh.size(), mesh.get_local_rank()
    if spec.heads == "query":
        heads = query_heads(num_heads, tp, rank)
        return _Heads(num_heads, heads, heads.start)
    total = config.num_kv_heads
    earlier = key_heads(num_heads, total, tp, rank - 1) if rank else [-1]
    return _Heads(total, key_heads(num_heads, total, tp, rank), earlier[-1] + 1)


def _shard_parameters(
    module: nn.Module,
    parent: nn.Module,
    spec: TensorParallelSpec,
    mesh: DeviceMesh,
    config: Any,
    sequence_parallel: bool,
) -> None:
    """Shard weight and bias; replace forward if it needs to know the shard."""
    full = module.weight
    assert isinstance(full, nn.Parameter), f"{type(module).__name__} has no parameter `weight`"
    if spec.weight == "norm_of_heads" and getattr(parent, "qk_norm", None) != "all_heads":
        spec = TensorParallelSpec("partial_grad")
    heads = _heads_of_rank(spec, mesh, config)
    kind, tp, rank = spec.weight, mesh.size(), mesh.get_local_rank()
    # The last dims are outputs and inputs (or blocks of inputs, and their bytes:
    # `weft.parallel.lora`).  The stacked weight of experts has one more dim before them.
    dim = max(0, full.dim() - (2 if full.is_floating_point() else 3)) + (kind == "row")
    dim = vars(module).get("output_dim", dim)  # of `weft.parallel.lora.dora`
    for name, param in list(module.named_parameters(recurse=False)):
        placement: Placement = Replicate()
        part, local = _LocalPart(), param.data
        if kind == "row" and name == "bias":
            part = _LocalPart(Partial(), is_added=rank == 0)
        elif kind in ("partial_grad", "replicated"):
            is_partial = kind == "partial_grad" or sequence_parallel
            part = _LocalPart(Partial() if is_partial else None)
        elif heads is not None and heads.total % tp:
            part = _LocalPart(Partial(), dim, heads.slices(param.shape[dim] // heads.total))
        else:
            placement, chunk = Shard(dim), chunk_range(param.shape[dim], tp, rank)
            local = local.narrow(dim, chunk.start, len(chunk)).contiguous()
        use_local_parameter(module, name, local, mesh, [placement], param.shape)
        vars(module).setdefault("local_parts", {})[name] = part
    if kind == "vocabulary":
        first = chunk_range(full.shape[0], mesh.size(), mesh.get_local_rank()).start
        name = "lookup" if hasattr(module, "lookup") else "forward"  # with an adapter, or without
        setattr(module, name, partial(_vocab_parallel_forward, module, first))
    if kind == "norm_of_heads":
        assert heads is not None
        norm: Any = module
        owned = heads.owned(full.shape[0] // heads.total)
        norm.forward = partial(_normalize_all_heads, norm, mesh.get_group(), owned, full.shape[0])


def use_local_parameter(
    module: nn.Module,
    name: str,
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
) -> None:
    """Replace a module's weight or bias by a DTensor; forward uses the local shard."""
    full = module._parameters[name]
    assert full is not None
    sharded = from_local(local, mesh, placements, shape)
    module.register_parameter(name, nn.Parameter(sharded, requires_grad=full.requires_grad))
    if not isinstance(module, LocalWeight):
        module_class: Any = type(module)
        module.__class__ = _with_local_weight(module_class)


class _LocalPart(NamedTuple):
    """Part of a local shard that forward uses."""

    grad_placement: Placement | None = None  # on tp; None: as the parameter
    dim: int = 0
    slices: list[slice] | None = None  # of ``dim``; None: all
    is_added: bool = True  # False: a bias that another rank adds


class LocalWeight:
    """Mixin of a module: ``weight`` and ``bias`` are this rank's shards."""

    # See `materialize_local_weights`.
    local_weight: Tensor | None = None
    local_bias: Tensor | None = None
    local_parts: Mapping[str, _LocalPart] = {}

    @property
    def weight(self) -> Any:
        """Return the local shard, or the parameter if FSDP has not gathered it."""
        return self._read("weight") if self.local_weight is None else self.local_weight

    @property
    def bias(self) -> Any:
        """Return the local shard, the parameter as for ``weight``, or None."""
        return self._read("bias") if self.local_bias is None else self.local_bias

    def _read(self: Any, name: str) -> Any:
        param = self._parameters.get(name)
        if (
            not isinstance(param, DTensor)
            or not set(param.device_mesh.mesh_dim_names or ()) <= LOCAL_AXES
        ):
            return param
        part: _LocalPart | None = self.local_parts.get(name)
        if part is None or part.grad_placement is None:
            return param.to_local()
        placements = [*param.placements[:-1], part.grad_placement]
        local: Tensor = param.to_local(grad_placements=placements)
        if part.slices is not None:
            local = _concat_slices(local, part.dim, part.slices)
        return local if part.is_added else local * 0


def _concat_slices(x: Tensor, dim: int, slices: Sequence[slice]) -> Tensor:
    """Concatenate slices of a dim; those that follow each other are one view."""
    bounds: list[list[int]] = []
    for part in slices or [slice(0, 0)]:
        if bounds and bounds[-1][1] == part.start:
            bounds[-1][1] = part.stop
        else:
            bounds.append([part.start, part.stop])
    parts = [x.narrow(dim, start, stop - start) for start, stop in bounds]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


@cache  # one subclass per class, so that the compiler sees that blocks are alike
def _with_local_weight(module_class: Any) -> Any:
    return type(module_class.__name__, (LocalWeight, module_class), {})


def materialize_local_weights(block: nn.Module, uncompiled: Sequence[nn.Module] = ()) -> None:
    """Convert a compiled block's weights to local tensors before its forward.

    So the compiled forward sees plain tensors.  With a DTensor it would also save the mesh, which
    fails with full recomputation in torch 2.13 ("to be Tensors, got types: DeviceMesh").

    Args:
        block: changed in place.
        uncompiled: modules to leave as they are.
    """
    skipped = {module for each in uncompiled for module in each.modules()}
    modules = (module for module in block.modules() if module not in skipped)
    sharded: list[Any] = [module for module in modules if isinstance(module, LocalWeight)]
    compiled_forward = block.forward

    def forward(*args: Any) -> Any:
        for module in sharded:
            # setattr would register a parameter
            vars(module).update(local_weight=module.weight, local_bias=module.bias)
        try:
            return compiled_forward(*args)
        finally:
            for module in sharded:
                vars(module).update(local_weight=None, local_bias=None)

    block.forward = forward


def _vocab_parallel_forward(embedding: nn.Module, first: int, tokens_BT: Tensor) -> Tensor:
    """Look up ids in a shard that starts at id ``first``; zeros for other ids."""
    table = embedding.weight
    assert isinstance(table, Tensor)
    rows_BT = tokens_BT - first
    outside_BT = (rows_BT < 0) | (rows_BT >= table.shape[0])
    x_BTD = F.embedding(rows_BT.masked_fill(outside_BT, 0), table)
    return x_BTD.masked_fill(outside_BT.unsqueeze(-1), 0)


def _normalize_all_heads(
    norm: RMSNorm | LayerNorm,
    group: dist.ProcessGroup,
    owned: Sequence[slice],
    dim: int,
    x_BTD: Tensor,
) -> Tensor:
    """Normalize over the heads of all ranks, ``dim`` elements.

    ``owned`` are the slices of heads that this rank, and no other, adds to the sums.
    """

    def mean(values_BTD: Tensor) -> Tensor:
        sums_BT1 = _concat_slices(values_BTD, -1, owned).sum(-1, keepdim=True)
        return all_reduce(sums_BT1, group) / dim

    values_BTD = x_BTD.float()
    if isinstance(norm, LayerNorm):
        values_BTD = values_BTD - mean(values_BTD)
    values_BTD = values_BTD * torch.rsqrt(mean(values_BTD.square()) + norm.eps)
    if not isinstance(norm, LayerNorm):
        return norm.scale(values_BTD, x_BTD.dtype)
    values_BTD = values_BTD * (norm.offset + norm.weight.float())
    return (values_BTD if norm.bias is None else values_BTD + norm.bias.float()).to(x_BTD.dtype)


class _CollectiveHook:
    """A hook that applies a collective to a module's output, or first argument."""

    def __init__(self, collective: Collective, group: dist.ProcessGroup) -> None:
        self.collective, self.group = collective, group

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any = None) -> Any:
        if output is None:
            return (self.collective(args[0], self.group), *args[1:])
        return self.collective(output, self.group)
