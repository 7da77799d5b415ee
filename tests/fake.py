"""Count the collectives of a rank's step, with real or fake tensors, by kind and axis."""

from __future__ import annotations

from collections import Counter

from weft.config.schema import Job
from weft.estimate.op_recorder import OpRecorder
from weft.estimate.trace import axis_groups, record_step
from weft.planning.plan import Plan
from weft.training.setup import Built


def counted_step(
    built: Built, job: Job, plan: Plan, recorder: OpRecorder | None = None
) -> list[dict[str, int]]:
    """Run one step and count its collectives: microbatches, clipping, optimizer.

    Args:
        recorder: of fake tensors; None: tensors are real.

    Returns:
        Counts such as ``{"all_gather tp": 20}`` for each of the three parts.

    Raises:
        KeyError: a collective uses a group that is not an axis of the mesh.
    """
    axes = {str(group.group_name): axis for axis, group in axis_groups(built.mesh).items()}
    parts = {"clip": 1, "optimizer": 2}
    counts: list[Counter[str]] = [Counter(), Counter(), Counter()]
    first = len(recorder.events) if recorder is not None else 0
    for location, _, _, call in record_step(built, plan, recorder).events[first:]:
        if call is not None and call.group:
            counts[parts.get(location.kind, 0)][f"{call.name} {axes[call.group]}"] += 1
    return [dict(count) for count in counts]
