"""torch.compile, block by block.

All blocks are alike, so one of them is compiled and the others use what came of it: compiling takes
as long for 126 blocks as for one, where a graph of the whole model would grow with its depth.  What
is compiled is a block's forward pass, with what it computes again (`weft.parallel.activation_checkpoint`), as one
graph without breaks; FSDP's hooks stay outside.  What was compiled once is kept on the disk for the
next start, `compile.cache_dir`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from weft.parallel.private import num_captured_graphs, register_compile_callbacks, collect_recompile_reasons


def apply_compile(blocks: Sequence[nn.Module], cache: str, whole: bool = True) -> None:
    """Compile the forward pass of each block when it is first called, in place.

    Args:
        cache: folder for what is compiled.
        whole: whether it must be one graph.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(cache).expanduser())
    for block in blocks:
        block.forward = torch.compile(block.forward, fullgraph=whole)


NO_GRAPH_CAPTURED = (
    "compile.enable=true has no effect: torch.compile captured no graph of any block in the first "
    "step, so the blocks run as they are. Set compile.enable to false, or leave out what breaks "
    "the graph: parallel.cp, activation_checkpoint.mode, or operators of the model's own"
)


def log_compilation(say: Callable[[str], None]) -> Callable[[], int]:
    """From now on tell whenever something is compiled: how long it took, and why it was again.

    Returns:
        How many graphs of blocks were captured since.
    """
    began, reasons, graphs, before = 0.0, collect_recompile_reasons(), 0, 0

    def start() -> None:
        nonlocal began, before
        began, before = time.monotonic(), num_captured_graphs()

    def end(backward: bool) -> None:
        nonlocal graphs
        graphs += 0 if _labels[-1] else num_captured_graphs() - before
        what = f"the {'backward' if backward else 'forward'} pass of a block"
        why = f", again: {reasons[-1]}" if reasons else ""
        if why.endswith("grad_mode"):
            why = " for evaluation"
        reasons.clear()
        say(f"compiled {_labels[-1] or what} in {time.monotonic() - began:.1f} s{why}")

    register_compile_callbacks(start, end)
    return lambda: graphs


_labels = [""]


@contextmanager
def compile_label(what: str) -> Iterator[None]:
    """What is compiled in this context is no block, but ``what``."""
    _labels.append(what)
    try:
        yield
    finally:
        _labels.pop()


def describe_graph_break(error: BaseException) -> str:
    """Why a block is not one graph, if that is what an error says; else nothing."""
    if type(error).__module__ != "torch._dynamo.exc":  # which takes a second to import
        return ""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    where = [line for line in lines if line.startswith("File ")][-1:]
    return "; ".join([*lines[:2], *where])
