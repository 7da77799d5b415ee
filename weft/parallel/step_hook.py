"""Calls of techniques in a training step, beside the model's forward and backward.

`weft.train.step_hooks` lists the hooks of a run.  The training step and the loop call them in its
order, and know no technique by name.  So do `weft verify` and the planner, which run the same step:

    begin_step                       the weights of the step are final; before an evaluation, too
      begin_passes(num_sequences)    all microbatches are about to run
      (forward and backward)
      end_passes -> repeat           True: the gradients are deleted, and the passes run again
    reduce -> tensors                sum what this rank counted over the ranks, before the update
    measure -> values                for the record of the step, if it is recorded
    update(skip)                     the optimizer has changed the weights

The loop may compute a step twice, so only `update` may change what outlives a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")


class StepHook:
    """Calls of a training step, which do nothing by default.

    A technique overrides what it needs.  Every rank calls every method at the same time, so all of
    them may be collectives.
    """

    def begin_step(self) -> None:
        """Prepare for the weights of a step, or of an evaluation."""

    def begin_passes(self, num_sequences: Tensor) -> None:
        """Forget earlier passes.

        Args:
            num_sequences: of the global batch, over all replica groups; a scalar on the device.
        """

    def end_passes(self) -> bool:
        """Return True, on all ranks, if forward and backward must run again."""
        return False

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
            values: those of `measure`, on the host.
        """
        return {}

    def update(self, skip: Tensor) -> None:
        """Follow the update of the weights.

        Args:
            skip: a bool on the device; true: the optimizer changed nothing.
        """


def find_hook(hooks: Iterable[StepHook], kind: type[T]) -> T | None:
    """Return the hook of a class; None if the run has no such technique."""
    return next((hook for hook in hooks if isinstance(hook, kind)), None)
