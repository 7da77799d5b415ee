"""torch.compile, block by block.

All blocks are alike, so torch.compile compiles one and reuses the result for all others: 126 blocks
compile as fast as one, while a graph of the full model would grow with depth.  A block's forward
pass, with its recomputation (`weft.parallel.activation_checkpoint`), becomes one graph without
breaks.  FSDP's hooks stay outside.  `compile.cache_dir` keeps compiled code for the next start.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from weft.parallel.private import (
    collect_recompile_reasons,
    num_captured_graphs,
    register_compile_callbacks,
)


def apply_compile(blocks: Sequence[nn.Module], cache_dir: str, fullgraph: bool = True) -> None:
    """Compile each block's forward in place; the compiler runs at its first call.

    Args:
        blocks: modules of one class, which share the compiled code.
        cache_dir: directory for compiled code.
        fullgraph: fail at a graph break.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(cache_dir).expanduser())
    for block in blocks:
        block.forward = torch.compile(block.forward, fullgraph=fullgraph)


NO_GRAPH_CAPTURED = (
    "compile.enable=true has no effect: torch.compile captured no graph of any block in the first "
    "step, so the blocks run uncompiled. Set compile.enable=false, or remove the cause of the "
    "graph breaks: parallel.cp, activation_checkpoint.mode, or operators of the model"
)


def log_compilation(log: Callable[[str], None]) -> Callable[[], int]:
    """Log the duration of every compilation from now on, and why it was repeated.

    Returns:
        A function that returns the number of block graphs captured since this call.
    """
    started, reasons, num_graphs, num_before = 0.0, collect_recompile_reasons(), 0, 0

    def on_start() -> None:
        nonlocal started, num_before
        started, num_before = time.monotonic(), num_captured_graphs()

    def on_end(backward: bool) -> None:
        nonlocal num_graphs
        num_graphs += 0 if _labels[-1] else num_captured_graphs() - num_before
        block_pass = f"the {'backward' if backward else 'forward'} pass of a block"
        reason = f", again: {reasons[-1]}" if reasons else ""
        if reason.endswith("grad_mode"):
            reason = " for evaluation"
        reasons.clear()
        log(f"compiled {_labels[-1] or block_pass} in {time.monotonic() - started:.1f} s{reason}")

    register_compile_callbacks(on_start, on_end)
    return lambda: num_graphs


_labels = [""]


@contextmanager
def compile_label(label: str) -> Iterator[None]:
    """Log compilations in this context as those of ``label``, not of a block."""
    _labels.append(label)
    try:
        yield
    finally:
        _labels.pop()


def describe_graph_break(error: BaseException) -> str:
    """Return the reason and source line of a graph break; "" for other errors."""
    if type(error).__module__ != "torch._dynamo.exc":  # importing it takes a second
        return ""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    source = [line for line in lines if line.startswith("File ")][-1:]
    return "; ".join([*lines[:2], *source])
