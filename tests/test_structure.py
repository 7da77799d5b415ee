"""Structure of the code: arguments that no function has."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import weft

ROOT = Path(weft.__file__).parent


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield every function of the package with its name and file."""
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef):
                yield f"{path.relative_to(ROOT)}: {node.name}", node


def test_functions_take_a_plan_without_its_job() -> None:
    """A plan has its job; a second one could be another job than the plan was derived from."""
    both = [
        name
        for name, node in functions()
        if {"job", "plan"} <= {arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)}
    ]
    assert both == []


def test_techniques_optimizers_and_monitors_do_not_read_the_job() -> None:
    """They receive their section of it, values, and the layout, which a plan has."""
    wrong = {
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for package in ("parallel", "optim", "monitor")
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if (isinstance(node, ast.Attribute) and node.attr == "job")
        or (isinstance(node, ast.ImportFrom) and "Job" in {alias.name for alias in node.names})
    }
    assert wrong == set()


# Always outside of what Dynamo traces.
OPAQUE_FUNCTIONS = {"_ConcatWeights", "_KnownGradients"}


def test_autograd_functions_have_a_fixed_number_of_arguments() -> None:
    """Dynamo without gradients drops the context if it counts as many arguments as parameters.

    It counts ``*rest`` as one parameter, so with two arguments there the first tensor becomes the
    context.
    """
    found = {
        node.name
        for path in sorted(ROOT.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ClassDef)
        and any("autograd.Function" in ast.unparse(base) for base in node.bases)
        for function in node.body
        if isinstance(function, ast.FunctionDef)
        and function.name == "forward"
        and function.args.vararg is not None
    }
    assert found == OPAQUE_FUNCTIONS


def imported_modules(path: Path) -> set[str]:
    """Return the modules that a file imports, also in functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_code_that_trains_knows_neither_mocks_nor_fake_tensors() -> None:
    """A planner passes a `weft.parallel.backend.Backend`; it patches nothing."""
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted(ROOT.rglob("*.py"))
        for name in imported_modules(path)
        if name.startswith("unittest")
        or (name.startswith("torch._subclasses") and not path.name.startswith("private"))
    ]
    assert wrong == []


def test_models_import_nothing_private_of_torch() -> None:
    wrong = [
        f"{path.name}: {name}"
        for path in sorted((ROOT / "models").rglob("*.py"))
        for name in imported_modules(path)
        if name.startswith("torch._")
    ]
    assert wrong == []
