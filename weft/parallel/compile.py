"""torch.compile, block by block.

All blocks are alike, so torch.compile compiles one and reuses the result for all others: 126 blocks
compile as fast as one, while a graph of the full model would grow with depth.  A block's forward
pass, with its recomputation (`weft.parallel.activation_checkpoint`), becomes one graph without
breaks.  Context parallelism, the exchange of expert parallelism and experts in float32 break it;
then each part is a graph.  *full* repeats the parts; *selective* and *budget* select what each part
saves.  FSDP's hooks stay outside.
`compile.cache_dir` keeps compiled code for the next start.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.config.files import expand_path, user_cache_dir
from weft.models.layers import allow_recompilation
from weft.parallel.private import (
    collect_recompile_reasons,
    disable_recompile_limit,
    num_captured_graphs,
    register_compile_callbacks,
)

RunCompiled = Callable[..., Any]  # see `run_compiled`
CompileOptions = Mapping[nn.Module, dict[str, Any]]  # of torch.compile, for some modules


def apply_compile(
    blocks: Sequence[nn.Module],
    cache_dir: str,
    fullgraph: bool = True,
    dynamic: bool | None = None,
    options: CompileOptions | None = None,
) -> None:
    """Compile each block's forward in place; the compiler runs at its first call.

    Args:
        blocks: modules of one class, which share the compiled code.
        cache_dir: see `find_cache_dir`.
        fullgraph: fail at a graph break.
        dynamic: compile for sizes that change; None: once one has changed.
        options: options of torch.compile for some of the blocks.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(find_cache_dir(cache_dir))
    allow_recompilation()
    for block in blocks:
        block.forward = torch.compile(
            block.forward,
            fullgraph=fullgraph,
            dynamic=dynamic,
            options=options.get(block) if options else None,
        )


def find_cache_dir(setting: str) -> Path:
    """Return the directory of ``compile.cache_dir``.

    *auto* is a directory of the user on this node: ranks of many nodes that compile into a shared
    home directory wait for its locks, and nodes may differ in their processors and GPUs.
    """
    if setting != "auto":
        return expand_path(setting)
    path = Path(tempfile.gettempdir()) / f"weft-compile-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    # Its files are executed, so they must not be another user's.
    return path if path.stat().st_uid == os.getuid() else user_cache_dir() / "compile"


NO_GRAPH_CAPTURED = (
    "compile.enable=true has no effect: torch.compile captured no graph of any block in the first "
    "step, so the blocks run uncompiled. Set compile.enable=false, or remove the cause: the "
    "variable TORCH_COMPILE_DISABLE, or operators of the model that break the graph"
)


class CompileLog:
    """Log the duration of every compilation of this process, and why it was repeated.

    Args:
        log: receives the messages.
        enabled: False if nothing is compiled.
    """

    def __init__(self, log: Callable[[str], None], enabled: bool) -> None:
        self._log, self._must_check = log, enabled
        self._num_graphs = self._num_before = 0  # captured graphs of blocks
        self._began = 0.0
        if enabled:
            self._reasons = collect_recompile_reasons()
            register_compile_callbacks(self._on_start, self._on_end)

    def _on_start(self) -> None:
        self._began, self._num_before = time.monotonic(), num_captured_graphs()

    def _on_end(self, is_backward: bool) -> None:
        self._num_graphs += 0 if _labels[-1] else num_captured_graphs() - self._num_before
        block_pass = f"the {'backward' if is_backward else 'forward'} pass of a block"
        reason = f", again: {self._reasons[-1]}" if self._reasons else ""
        if reason.endswith("grad_mode"):
            reason = " for evaluation"
        self._reasons.clear()
        seconds = time.monotonic() - self._began
        self._log(f"compiled {_labels[-1] or block_pass} in {seconds:.1f} s{reason}")

    def check(self, blocks: Sequence[nn.Module]) -> None:
        """Warn if no graph was captured; only the first call, after a step, checks."""
        if self._must_check and blocks and not self._num_graphs:
            self._log(f"warning: {NO_GRAPH_CAPTURED}")
        self._must_check = False


_labels = [""]


@contextmanager
def compile_label(label: str) -> Iterator[None]:
    """Log compilations in this context as those of ``label``, not of a block."""
    _labels.append(label)
    try:
        yield
    finally:
        _labels.pop()


def run_compiled(label: str, enable: bool, function: Any, *args: Any, dynamic: bool = False) -> Any:
    """Call a function, compiled as one graph for each shape of its arguments.

    Args:
        label: names the function in the log of compilations.
        enable: False: do not compile.
        function: of tensors and constants.
        *args: its arguments.
        dynamic: one graph for all shapes.
    """
    if not enable:
        return function(*args)
    with disable_recompile_limit(), compile_label(label):
        return compile_function(function, dynamic)(*args)


@cache
def compile_function(function: Callable[..., Any], dynamic: bool = False) -> Any:
    """Return the compiled function, the same for each call."""
    # Not with ``fullgraph``, which fails if the variable TORCH_COMPILE_DISABLE is set.
    return torch.compile(function, dynamic=dynamic)


def describe_graph_break(error: BaseException) -> str:
    """Return the reason and source line of a graph break; "" for other errors."""
    if type(error).__module__ != "torch._dynamo.exc":  # importing it takes a second
        return ""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    source = [line for line in lines if line.startswith("File ")][-1:]
    return "; ".join([*lines[:2], *source])
