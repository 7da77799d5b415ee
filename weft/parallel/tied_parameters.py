"""Tied embeddings in a pipeline: two equal copies of one parameter.

The embedding looks rows up in a table, and the head multiplies by the same table.  A pipeline
has these two uses on two stages.  Each of these stages holds a copy of the table, as in Megatron-LM
(arXiv:1909.08053), under the one name of the full model.  The gradient of the table is the sum of
the gradients of its uses.  There are two cases:

*Two ranks.*  Each rank trains its copy.  Both copies begin equal, because initial values and
checkpoints go by name.  After the backward passes of a step, an all-reduce over the two ranks of a
pipeline sums the shards of the two gradients.  a + b = b + a in floating point, so both ranks get
the same bits, and so does every later value: optimizers are functions of gradient, name and index.
The copies are sharded alike over the other axes of the mesh, so shards suffice.  The copies are
replicas (`tied_group`): the gradient norm counts one of them, a checkpoint holds it once, loading
fills both, and `weft.checkpoint.fingerprint.compare_replicas` compares them.

*One rank*, on which a V schedule puts the first and the last stage.  FSDP cannot share a parameter
between two modules that it shards separately.  So the second copy is not trained: it receives the
values of the first before the forward passes, and its gradient is added to that of the first.
Lists of parameters by name omit it, and it has no optimizer state.

The sum is not overlapped with backward, because the first stage's gradient is the last to be
complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.parallel.dtensor import to_local
from weft.parallel.mesh import Mesh
from weft.parallel.private import to_group_device
from weft.parallel.step_hook import StepHook
from weft.planning.plan import Plan


class TiedParameters(StepHook):
    """This rank's copies of the tied parameter: none, one, or two."""

    def __init__(self, model_parts: Sequence[nn.Module], plan: Plan, mesh: Mesh) -> None:
        """Find the copies, after the parameters are allocated."""
        tied_name = (plan.family.tied_parameter or "") if plan.tied_ranks else ""
        adapters = f"{tied_name.rpartition('.')[0]}.lora_"  # of the table
        self._copies: dict[str, list[nn.Parameter]] = {}
        for name, param in (pair for part in model_parts for pair in part.named_parameters()):
            if name == tied_name or (tied_name and name.startswith(adapters)):
                self._copies.setdefault(name, []).append(param)
        self._group: dist.ProcessGroup | None = None
        if len(set(plan.tied_ranks or ())) == 2:
            self._group = mesh.groups.get("tied", mesh.groups["pp"])
        for param in chain(*self._copies.values()):
            vars(param)["tied_group"] = self._group

    @torch.no_grad()
    def begin_step(self) -> None:
        """Copy the first copy on this rank to the second."""
        for first, *others in self._copies.values():
            for param in others:
                to_local(param).copy_(to_local(first))

    @torch.no_grad()
    def end_passes(self) -> bool:
        """Sum the gradients of both copies."""
        for copies in self._copies.values():
            grads = [to_local(param.grad) for param in copies if param.grad is not None]
            if not grads or not grads[0].numel():
                continue  # frozen (LoRA), or a shard without elements
            for param, grad in zip(copies[1:], grads[1:], strict=True):
                grads[0] += grad
                param.grad = None
            if self._group is not None:
                total = to_group_device(grads[0], self._group)
                dist.all_reduce(total, group=self._group)
                if total is not grads[0]:
                    grads[0].copy_(total)
        return False


def tied_group(param: Tensor | None) -> dist.ProcessGroup | None:
    """Return the group of two ranks that each have a copy of a parameter."""
    group: dist.ProcessGroup | None = getattr(param, "tied_group", None)
    return group


def is_second_copy(param: Tensor) -> bool:
    """Return True if an earlier rank has the first copy of ``param``."""
    group = tied_group(param)
    return group is not None and group.rank() > 0
