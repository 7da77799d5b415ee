"""Calls of techniques in a training step, beside the model's forward and backward.

`weft.training.step_hooks` lists the hooks of a run.  The training step and the loop call them in
the order of that list, and know no technique by name:

    begin_step                       the weights of the step are final; before an evaluation, too
      begin_passes(num_sequences)    all microbatches are about to run, perhaps for the second time
      (forward and backward)
      end_passes -> repeat           True: the gradients are deleted, and the passes run once more
    reduce -> tensors                sum over the ranks what this one has counted
    measure -> values                for the record of the step, if it is recorded
    update(skip)                     the optimizer has changed the weights

A stop abandons the passes: then `abandon` is called instead of `end_passes` and what follows.  The
loop may also compute a step twice, or not apply it: then `update` is not called.  So only `update`
may change weights for good.  `weft verify` does not call `measure` and `fields`, the planner's
trace neither these nor `reduce`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")


class StepHook:
    """Calls of a training step, which do nothing by default.

    A technique overrides what it needs.  All ranks have the same hooks and call them in the same
    order, so every method may be a collective.
    """

    def begin_step(self) -> None:
        """Prepare for the weights of a step, or of an evaluation."""

    def begin_passes(self, num_sequences: Tensor) -> None:
        """Prepare for the passes of all microbatches, and forget earlier ones.

        Args:
            num_sequences: of the global batch, over all replica groups; a scalar on the device.
        """

    def end_passes(self) -> bool:
        """Return True, on all ranks, if forward and backward must run again."""
        return False

    def abandon(self) -> None:
        """Undo `begin_passes`, in the middle of the passes; not a collective."""

    def reduce(self, replica: int = 0, num_replicas: int = 1) -> list[Tensor]:
        """Sum the counts of the passes over the ranks of this replica group, in place.

        Args:
            replica: index of this replica group.
            num_replicas: number of groups.

        Returns:
            The tensors that the caller sums over the replica groups, in place.
        """
        return []

    def measure(self) -> Tensor | None:
        """Return float32 values on the device for the record of the step, or None."""
        return None

    def fields(self, values: Sequence[float]) -> dict[str, Any]:
        """Return fields of a `weft.monitor.step_record.StepRecord`.

        Args:
            values: those of `measure`, on the host; empty if the step was not measured.
        """
        return {}

    def update(self, skip: Tensor) -> None:
        """Act after the optimizer's update of the weights.

        Args:
            skip: a bool on the device; true: the optimizer changed nothing.
        """


def find_hook(hooks: Iterable[StepHook], kind: type[T]) -> T | None:
    """Return the hook of a class; None if the run has no such technique."""
    return next((hook for hook in hooks if isinstance(hook, kind)), None)
