"""Each configuration key is read in a few files: the others read the plan."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import weft
from weft.config.schema import SECTIONS, keys

ROOT = Path(weft.__file__).parent
MAX_FILES = 4
SECTION_OF_CLASS = {section.__name__: name for name, section in SECTIONS.items()}

# Keys that more files may read, and why.
EXCEPTIONS = {
    "data.path": "each kind of data source gets the section and names its path in messages",
    "run.cluster": "each tool that plans for a cluster, and the list of recipes",
    "parallel.dp_replicate": "laid out, checked and advised on; a launcher warns without replicas",
    "parallel.dp_shard": "auto and fit are resolved, laid out anew, checked and advised on",
    "launch.options": "each scheduler has other options",
    "model.path": "names the run, and the model in messages of the import",
    "lora.path": "as model.path",
    "run.dir": "the run itself, and commands that write into a directory of their own choice",
    "lora.rank": "planned, checked, applied and exported; the rules are outside of the core",
    "lora.dora": "as lora.rank",
    "lora.dropout": "applied, traced, verified, and refused with a dispatcher",
    "parallel.ep_dispatch": "a class: checked, planned, found by name, and replaced by verify",
    "parallel.cp_method": "decides which heads a rank has; QK-clip is outside of the core",
    "model.kind": "the name of the family, in messages of several rules and tools",
}


def assigned_values(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the targets and values of an assignment; ``a, b = x, y`` has two of each."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from zip(target.elts, node.value.elts, strict=True)
            else:
                yield target, node.value


def find_section_variables(tree: ast.Module) -> dict[str, set[str]]:
    """Map the variables of a file that may hold a section to the names of the sections.

    A variable holds a section if it is assigned from an attribute with the section's name, such as
    ``job.train``, or is a parameter with the section's class.
    """
    variables = defaultdict(set, {name: {name} for name in SECTIONS})
    for node in ast.walk(tree):
        for target, value in assigned_values(node):
            if isinstance(target, ast.Name) and isinstance(value, ast.Attribute):
                variables[target.id].add(value.attr)
        if isinstance(node, ast.arg) and node.annotation is not None:
            section = SECTION_OF_CLASS.get(ast.unparse(node.annotation))
            if section is not None:
                variables[node.arg].add(section)
    return variables


def find_reads(tree: ast.Module) -> set[str]:
    """Return the names ``section.key`` of all attributes of sections that a file reads."""
    variables = find_section_variables(tree)
    reads = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
            reads.add(f"{node.value.attr}.{node.attr}")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            reads |= {f"{name}.{node.attr}" for name in variables.get(node.value.id, ())}
    return reads


def files_by_key() -> dict[str, list[str]]:
    """Return the files outside of ``config`` that read each key."""
    files = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT)
        if name.parts[0] != "config":
            for key in find_reads(ast.parse(path.read_text("utf-8"))):
                files[key].append(str(name))
    return {key: files[key] for key in keys()}


def test_reads_are_found() -> None:
    source = """
def f(section: TrainSection, job: Job) -> None:
    precision, other = job.precision, 1
    section.steps, precision.float8, job.optim.lr, job.parallel.ranks_per_shard, job.run
"""
    found = find_reads(ast.parse(source)) & set(keys())
    assert found == {"train.steps", "precision.float8", "optim.lr"}


def test_keys_are_read_in_few_files() -> None:
    """A value that more files need is a field of the plan, or a property of the section."""
    files = files_by_key()
    often = {key: names for key, names in files.items() if len(names) > MAX_FILES}
    assert {key: names for key, names in often.items() if key not in EXCEPTIONS} == {}
    assert set(often) == set(EXCEPTIONS), "an exception is not needed any more"
