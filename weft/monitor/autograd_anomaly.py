"""Find the operator and the layer that produce NaN in backward.

``debug.autograd_anomaly`` enables it.  torch's anomaly mode checks the output of every operator in
backward, and reports the first one with NaN and the source line of its forward call.  All blocks
share their code, so that line does not identify the layer.  Hooks on the gradients of the layers'
outputs do: backward is in a layer from the gradient of its output until the gradient of the
previous layer's output.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from weft.config.errors import WeftError
from weft.monitor.layer_stats import hook_forward

NAN = re.compile(r"Function '(\w+)' returned nan values")
FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')  # in the traceback of a forward call
HEAD = "the head or the loss"


class BackwardNaN(WeftError):
    """Backward produced NaN; the message names the operator and the layer."""


@contextmanager
def trace_backward_nan(
    layers: Mapping[str, nn.Module], batch_sizes: Sequence[int]
) -> Iterator[None]:
    """Stop backward at the first operator that produces NaN, in this context.

    The arguments are those of `hook_forward`.

    Raises:
        BackwardNaN: with the operator, the layer and the forward call.
    """
    current_layer, first_nonfinite, traces = [HEAD], [""], [""]

    def observe(name: str, batch_size: int, input_: Any, output: Tensor) -> None:
        if not first_nonfinite[0] and not output.isfinite().all():
            first_nonfinite[0] = name
        if output.requires_grad:
            output.register_hook(  # type: ignore[no-untyped-call]
                lambda grad: current_layer.__setitem__(0, name)
            )

    show = warnings.showwarning

    def listen(message: Any, *args: Any, **kwargs: Any) -> None:
        if "Traceback of forward call" in str(message):
            traces[0] = str(message)
        show(message, *args, **kwargs)

    with warnings.catch_warnings(), hook_forward(layers, batch_sizes, observe):
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
            call = _describe_call(traces[0])
            message = f"{match[1]} of {current_layer[0]} produces NaN in the backward pass{call}"
            if first_nonfinite[0]:
                message += (
                    f"; in the forward pass the output of {first_nonfinite[0]} has NaN or Inf"
                )
            raise BackwardNaN(message) from error


def _describe_call(trace: str) -> str:
    """Return the location of a forward call: the innermost frame outside torch."""
    calls = [call for call in FRAME.findall(trace) if "/torch/" not in call[0]]
    return f"; its forward call is at {calls[-1][0]}:{calls[-1][1]}" if calls else ""
