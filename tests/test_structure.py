"""Structure of the code: a short loop, and no function that takes a plan and its job."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import weft
from tests.lines import lines_of_code, lines_of_functions

ROOT = Path(weft.__file__).parent


# Functions above 60 lines, and why each is one function.
LONG_FUNCTIONS = {
    "plan/resolve.py: resolve": "the rules in their order, then one line per field of the Plan",
    "train/run.py: open_run": "opens the services in their order; an exception closes them",
    "train/metric_logger.py: log": "one line per field of the record",
}


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield every function of the package with its name and file."""
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef):
                yield f"{path.relative_to(ROOT)}: {node.name}", node


def test_loop_functions_are_short() -> None:
    limits = {"train": 60, "forward_backward": 25, "optimizer_step": 25}
    tree = ast.parse((ROOT / "train" / "loop.py").read_text("utf-8"))
    lengths = {
        node.name: (node.end_lineno or 0) - node.lineno + 1
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }
    assert {name: lengths[name] for name in limits if lengths[name] > limits[name]} == {}
    assert max(lengths.values()) <= 60


def test_functions_above_60_lines_have_a_reason() -> None:
    long = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in ROOT.rglob("*.py")
        for name, lines in lines_of_functions(path)
        if lines > 60
    }
    assert long == {*LONG_FUNCTIONS}


def test_files_above_400_lines_have_a_reason() -> None:
    long = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if lines_of_code(path) > 400}
    assert long == {"config/schema.py"}  # data: one line per key, so that all keys are in one file


def test_functions_take_a_plan_without_its_job() -> None:
    """A plan has its job; a second one could be another job than the plan was derived from."""
    both = [
        name
        for name, node in functions()
        if {"job", "plan"} <= {arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)}
    ]
    assert both == []
