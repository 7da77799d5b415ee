"""All-gather of float8 weights.

With one scale per weight, FSDP can gather shards that are already cast, which halves the bytes, if
all ranks agree on the scale.  FSDP asks a shard for gather hooks.  torchao provides the hooks by a
tensor subclass, which all code that saves, compares, initializes or updates parameters would see.
Here the shard stays a plain tensor, and torchao's hooks are attributes of it.  They gather uint8,
because gloo has no float8.  `Float8AllGather.begin_step` computes all scales with one
max-reduction, before the first gather of each pass through the model.  It does not run after the
optimizer step, so code that changes weights (a skipped step, a checkpoint, a replica) needs no
call.  Weights that do not shard evenly are gathered in high precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.parallel.float8.linear_layers import is_float8_expert
from weft.parallel.private import iter_sharded_parameters, set_all_gather_hooks
from weft.parallel.step_hook import StepHook


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

    It is the module itself, or if the weight is frozen: see `weft.parallel.float8.frozen_linear`.
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
