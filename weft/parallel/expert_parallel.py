"""Expert parallelism: ranks keep their experts, and tokens travel to them.

All data-parallel ranks need the same experts for different tokens.  FSDP alone gathers the experts
of each layer in full, though each token needs few of them.  Here, ``ep`` of the ranks that FSDP
shards over form a group, and each rank of the group *keeps* E / ep experts.  Tokens travel instead:
one all-to-all sends each token to the ranks of its experts, and another returns the results
(GShard, arXiv:2006.16668; DeepSpeed-MoE, arXiv:2201.05596).  No token is dropped: a rank receives
all rows routed to its experts, so a balanced router balances the ranks.

    ranks that shard parameters (dp_shard x cp) = efsdp x ep        e.g. 64 = 8 x 8
    attention, norms, router, shared experts     FSDP over all 64
    experts                                      sharded over ep, FSDP over the 8 of efsdp

The ranks of an ``ep`` group are neighbors, so tokens stay inside a node if ``ep`` fits into one.
Experts are FSDP units on the mesh axes ``dp_replicate, efsdp``.  Their parameters are DTensors on
``ep`` (and ``tp``), so checkpoints, gradient norm and initialization know each rank's shard.  An
expert's gradient needs no extra scale: the returning tokens of all ``ep`` ranks already sum it, and
FSDP sums over the other ranks.

`weft.models.moe.Experts.forward` takes rows sorted by expert and a count per expert.
`weft.parallel.expert_dispatch` exchanges tokens before and after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from weft.config.schema import ParallelSection
from weft.models.moe import Experts
from weft.parallel.tensor_parallel import use_local_parameter


def apply_expert_parallel(
    layers: Sequence[Experts], mesh: DeviceMesh, section: ParallelSection
) -> None:
    """Shard experts (on the meta device) over the axis ``ep``, in place.

    Args:
        layers: experts, after `apply_tensor_parallel` if there is tensor parallelism.
        mesh: has the axes ``ep`` and ``tp``.
        section: the section ``[parallel]``.
    """
    for experts in layers:
        for module in list(experts.modules()):
            for name, param in list(module.named_parameters(recurse=False)):
                _shard_expert_parameter(module, name, param, mesh)
    from weft.parallel.dispatchers import enable_dispatch

    enable_dispatch(layers, mesh.get_group("ep"), section)


def _shard_expert_parameter(module: nn.Module, name: str, full: Any, mesh: DeviceMesh) -> None:
    """Shard a parameter by experts over ``ep``; keep its sharding over ``tp``."""
    placements: list[Placement] = [Shard(0)]
    local, submesh = full.data, mesh["ep"]
    if isinstance(full, DTensor):
        placements += full.placements
        local, submesh = full.to_local().data, mesh["ep", "tp"]
    shard = local.chunk(mesh["ep"].size())[mesh.get_local_rank("ep")].contiguous()
    use_local_parameter(module, name, shard, submesh, placements, full.shape)
