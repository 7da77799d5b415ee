"""Plant faults one by one, each in a forked process, and run the battery.

    this process (torch and transformers, not weft) --fork--> one fault: weft is imported with the
    source of one module changed --fork--> the ranks of a check

So a fault needs neither a copy of the tree nor an import of torch. The battery also runs once
without a fault. That run must find nothing; it measures the time of each check and the lines of
weft that the check executes. A fault in a line that no check executes is missed. For other faults,
the checks that execute the line run in the order of the battery.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tests.mutation.catalogue import Fault

ROOT = Path(__file__).resolve().parent.parent.parent
WEFT = ROOT / "weft"
# Modules that are imported once for all faults.
HEAVY = (
    "numpy",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torchao.float8",
    "torchao.optim.subclass_8bit",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mistral.modeling_mistral",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "peft",
    "pydantic",
    "rich.console",
    "tokenizers",
    "jinja2",
    "pytest",
)
CHECK_SECONDS = 150.0  # time limit of a check on a busy machine


class Outcome(NamedTuple):
    """The outcome of one fault."""

    name: str
    kind: str
    file: str
    precision: str
    check: str  # the check that found it; empty: not found
    text: str
    module: str  # the module that the check named
    named: bool  # the module is the faulty one, or near it
    seconds: float


class Baseline(NamedTuple):
    """Results of the battery without a fault, by check."""

    seconds: dict[str, float]
    lines: dict[str, dict[str, list[int]]]  # executed lines by file


# --------------------------------------------------------------------------- planting


class _Planted(importlib.abc.MetaPathFinder):
    """Import hook that replaces the source of one module of weft."""

    def __init__(self, fault: Fault) -> None:
        path = WEFT / fault.file
        name = "weft." + fault.file.removesuffix(".py").replace("/", ".")
        self.name, self.path = name.removesuffix(".__init__"), path
        source = path.read_text("utf-8")
        assert source.count(fault.right) == 1, f"{fault.name}: the code is another"
        self.code = compile(source.replace(fault.right, fault.wrong), str(path), "exec")

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self.name:
            return None
        loader = _Loader(name, str(self.path))
        loader.code = self.code
        return importlib.util.spec_from_file_location(name, self.path, loader=loader)


class _Loader(importlib.machinery.SourceFileLoader):
    code: Any

    def get_code(self, fullname: str) -> Any:
        return self.code


def import_heavy() -> None:
    """Import the modules that all faults need, except weft."""
    import logging

    logging.disable(logging.WARNING)
    for name in HEAVY:
        importlib.import_module(name)
    logging.disable(logging.NOTSET)
    import torch

    torch.set_num_threads(1)
    assert "weft" not in sys.modules


def forked(function: Callable[..., Any], *args: Any, timeout: float) -> Any:
    """Return the result of a function in a forked process, or its exception as text.

    Raises:
        TimeoutError: the function takes too long; its processes are killed.
    """
    ours, theirs = multiprocessing.Pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
            for stream in (1, 2):
                os.dup2(sys.stdout.fileno(), stream)
            try:
                theirs.send(("done", function(*args)))
            except BaseException as error:
                import traceback

                theirs.send(("raised", "".join(traceback.format_exception(error))[-4000:]))
        finally:
            os._exit(0)
    theirs.close()
    try:
        if not ours.poll(timeout):
            raise TimeoutError
        return ours.recv()
    except EOFError:
        return "raised", "it died"
    finally:
        for group in (os.killpg, os.kill):
            with suppress(ProcessLookupError):
                group(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        ours.close()


# --------------------------------------------------------------------------- baseline


def tree_hash() -> str:
    """Return the hash of all sources of weft."""
    digest = hashlib.sha256()
    for path in sorted(WEFT.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _run_one(name: str, precision: str, timeout: float) -> Any:
    """Run a check; return its result, executed lines and processor time."""
    from tests.mutation.battery import battery

    check = next(check for check in battery() if check.name == name)
    with tempfile.TemporaryDirectory(prefix="weft-coverage-") as directory:
        _trace_into(directory)
        start_time = _processor_seconds()
        result = check.run(precision, timeout)
        _dump(directory)
        executed: dict[str, set[int]] = {}
        for file in Path(directory).glob("*.json"):
            for name, lines in json.loads(file.read_text()).items():
                executed.setdefault(name, set()).update(lines)
        lines = {name: sorted(lines) for name, lines in executed.items()}
        # As text: the parent must not import weft, or no fault could be planted in it.
        text = None if result is None else str(result)
        return text, lines, _processor_seconds() - start_time


def _processor_seconds() -> float:
    import resource

    used = [resource.getrusage(owner) for owner in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(item.ru_utime + item.ru_stime for item in used)


_LINES: dict[str, set[int]] = {}
_CODES: dict[Any, tuple[set[int], set[int]]] = {}  # executed lines and all lines, by function


def _trace_into(directory: str) -> None:
    """Record the executed lines of weft, in this process and its ranks."""
    root = f"{WEFT}{os.sep}"

    def note_line(frame: Any, event: str, arg: Any) -> Any:
        executed, _ = _CODES[frame.f_code]
        executed.add(frame.f_lineno)
        return note_line

    def note_call(frame: Any, event: str, arg: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(root):
            return None
        if code not in _CODES:
            executed = _LINES.setdefault(code.co_filename.removeprefix(root), set())
            _CODES[code] = executed, {line for *_, line in code.co_lines() if line}
        executed, all_lines = _CODES[code]
        return None if all_lines <= executed else note_line

    sys.settrace(note_call)
    threading.settrace(note_call)
    # A rank ends with os._exit after sending its result, so write the lines before the result.
    from weft.supervision import local_ranks as ranks

    pickle: Any = ranks.pickle

    class Dumps:
        loads = staticmethod(pickle.loads)

        @staticmethod
        def dumps(value: Any) -> bytes:
            _dump(directory)
            result: bytes = pickle.dumps(value)
            return result

    ranks.pickle = Dumps  # type: ignore[attr-defined]


def _dump(directory: str) -> None:
    lines = {name: sorted(executed) for name, executed in _LINES.items()}
    (Path(directory) / f"{os.getpid()}.json").write_text(json.dumps(lines))


def baseline(
    precision: str, checks: dict[str, str], directory: Path, say: Callable[[str], None]
) -> Baseline:
    """Run each check without a fault, or read this tree's results.

    Args:
        checks: names, with the sources on which the checks depend.

    A check that finds a difference without a fault is reported and left out.
    """
    file = directory / f"baseline-{precision or 'float32'}-{tree_hash()}.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    unsound = []
    for name, source in checks.items():
        key = hashlib.sha256(source.encode()).hexdigest()[:16]
        if known.get(name, [""])[0] == key:
            continue
        state, result = forked(_run_one, name, precision, 600.0, timeout=700)
        actual, lines, seconds = result if state == "done" else (result, {}, 0.0)
        number = sum(map(len, lines.values()))
        say(f"baseline {name}: {seconds:.1f} s, {number:,} lines, {actual or 'sound'}")
        if actual is not None:
            unsound.append(name)
            continue
        known[name] = [key, seconds, lines]
        directory.mkdir(parents=True, exist_ok=True)
        if file.exists():  # another process may have added to it
            known |= json.loads(file.read_text()) | {name: known[name]}
        file.write_text(json.dumps(known))
    valid = [name for name in checks if name not in unsound]
    if unsound:
        say(f"WITHOUT A FAULT these find something, and are left out: {unsound}")
    return Baseline(
        {name: known[name][1] for name in valid}, {name: known[name][2] for name in valid}
    )


def is_executed(fault: Fault, lines: dict[str, list[int]]) -> bool:
    """Return True if a check that executes these lines executes the faulty statement.

    Module-level code counts as executed if any function of the module is executed.
    """
    executed = set(lines.get(fault.file, ()))
    statement = _statement_of(fault)
    return bool(executed) if statement is None else not executed.isdisjoint(statement)


@cache
def _statement_of(fault: Fault) -> range | None:
    """Return the lines of the innermost statement with the fault, or None outside one."""
    source = (WEFT / fault.file).read_text("utf-8")
    # Find the first differing line; the equal beginning may only locate the fault.
    pairs = zip(fault.right, fault.wrong, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(fault.wrong))
    start = source.index(fault.right)
    line = source[: start + min(same, len(fault.right) - 1)].count("\n") + 1
    best = None
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            if not isinstance(node, ast.stmt) or node is function:
                continue
            body = getattr(node, "body", None)  # use only the head of a compound statement
            end = body[0].lineno if body else (node.end_lineno or node.lineno) + 1
            if line in range(node.lineno, end) and (best is None or node.lineno >= best.start):
                best = range(node.lineno, end)
    return best


# --------------------------------------------------------------------------- faults


def _try_fault(fault: Fault, checks: Sequence[str], precision: str, timeout: float) -> Any:
    """Return the first check that finds a fault: name, text and module of the finding."""
    sys.meta_path.insert(0, _Planted(fault))
    try:
        from tests.mutation.battery import battery
    except Exception as error:
        return "import", repr(error)[:200], fault.file
    by_name = {check.name: check for check in battery()}
    for name in checks:
        result = by_name[name].run(precision, timeout)
        if result is not None:
            return name, result.text, result.module
    return "", "", ""


def run_fault(fault: Fault, precision: str, base: Baseline) -> Outcome:
    """Plant a fault, and run the checks that execute it."""
    start_time = time.monotonic()
    checks = [name for name in base.seconds if is_executed(fault, base.lines[name])]
    check = text = module = ""
    if checks:
        try:
            state, result = forked(
                _try_fault,
                fault,
                checks,
                precision,
                CHECK_SECONDS,
                timeout=CHECK_SECONDS * (3 + len(checks)),
            )
            check, text, module = result if state == "done" else ("crash", result[-300:], "")
        except TimeoutError:
            check, text = "time", "it did not end"
    named = bool(check) and module in (fault.file, *fault.near)
    seconds = time.monotonic() - start_time
    return Outcome(
        fault.name, fault.kind, fault.file, precision, check, text, module, named, seconds
    )
