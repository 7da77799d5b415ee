"""Which operator of which layer makes NaN in the backward pass (``debug.autograd_anomaly``).

torch's anomaly mode looks at what every operator gives in backward, and says which one it was and
where its forward call stands in the code.  All blocks have the same code, so that does not tell
which layer.  That is told by the gradients of the layers' outputs: backward goes through a layer
from when that of its output has come until that of the layer before has.
"""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from weft.config.errors import WeftError
from weft.monitor.layer_stats import watching

NAN = re.compile(r"Function '(\w+)' returned nan values")
CALL = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')  # in the trace of a forward call
HEAD = "the head and the loss"


class BackwardNaN(WeftError):
    """The run cannot go on; the message says which operator of which layer it was."""


@contextmanager
def naming_backward(layers: Mapping[str, nn.Module], rows: Sequence[int]) -> Iterator[None]:
    """Inside, backward stops at the first operator that makes NaN.

    Args:
        layers: by name, as `watching` takes them.
        rows: of each microbatch.

    Raises:
        BackwardNaN: which it was.
    """
    backward_of, forward_bad, traces = [HEAD], [""], [""]

    def told(name: str, rows: int, before: Any, after: Tensor) -> None:
        if not forward_bad[0] and not after.isfinite().all():
            forward_bad[0] = name
        if after.requires_grad:
            after.register_hook(  # type: ignore[no-untyped-call]
                lambda grad: backward_of.__setitem__(0, name)
            )

    show = warnings.showwarning

    def listen(message: Any, *args: Any, **kwargs: Any) -> None:
        if "Traceback of forward call" in str(message):
            traces[0] = str(message)
        show(message, *args, **kwargs)

    with warnings.catch_warnings(), watching(layers, rows, told):
        warnings.showwarning = listen
        try:
            with torch.autograd.set_detect_anomaly(True, check_nan=True):
                yield
        except RuntimeError as error:
            cause: BaseException | None = error  # a pipeline wraps it
            while cause is not None and not NAN.search(str(cause)):
                cause = cause.__cause__
            match = NAN.search(str(cause))
            if cause is None or match is None:
                raise
            frames = traceback.extract_tb(cause.__traceback__)
            # A pipeline may compute weights' gradients later, in an order of their own.
            later = any(frame.name == "stage_backward_weight" for frame in frames)
            layer = "a weight" if later else backward_of[0]
            said = f"{match[1]} of {layer} makes NaN in the backward pass{_place(traces[0])}"
            if forward_bad[0]:
                said += f"; in forward the output of {forward_bad[0]} is not finite already"
            raise BackwardNaN(said) from error


def _place(trace: str) -> str:
    """Where the forward call stands: the innermost frame that is not torch's own."""
    calls = [call for call in CALL.findall(trace) if "/torch/" not in call[0]]
    return f"; its forward call is at {calls[-1][0]}:{calls[-1][1]}" if calls else ""
