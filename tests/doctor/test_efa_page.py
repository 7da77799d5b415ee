"""docs/efa.md: its tables are those of the code.

``python -m tests.doctor.test_efa_page`` writes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from weft.doctor.failure_signatures import Signature, load_signatures
from weft.doctor.variable_checks import ANY_PATTERN, SET_PATTERN, VARIABLES
from weft.planning.instance_types import load_instance_types

PAGE = Path(__file__).parents[2] / "docs" / "efa.md"
VALUES = {SET_PATTERN: "set, except 0", ANY_PATTERN: "set"}
NETWORKS = {"": "any", "efa": "EFA", "new efa": "EFA, new", "infiniband": "InfiniBand"}


def format_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def known_failures() -> str:
    rows = [
        [f"*{s.name}*", symptom(s), s.cause, s.remedy, s.source]
        for s in {s.name: s for s in reversed(load_signatures())}.values()
    ][::-1]
    return format_table(("name", "symptom", "cause", "remedy", "source"), rows)


def symptom(signature: Signature) -> str:
    """Return how a failure shows."""
    parts = [f"`{word}`" for word in signature.pattern.split("|") if word]
    versions = ("nccl", "NCCL"), ("plugin", "aws-ofi-nccl"), ("installer", "EFA installer")
    parts += [
        f"{name} {getattr(signature, key)}" for key, name in versions if getattr(signature, key)
    ]
    parts += [f"network {signature.network}"] if signature.network else []
    parts += [f"instance `{signature.instance}`"] if signature.instance else []
    parts += [f"fact *{fact}*" for fact in signature.facts]
    return ", ".join(parts)


def variables() -> str:
    rows = [
        [
            f"`{v.name}`",
            VALUES.get(v.values, f"`{v.values}`"),
            NETWORKS[v.network],
            v.severity,
            v.why,
        ]
        for v in VARIABLES
    ]
    return format_table(("variable", "value", "network", "severity", "reason"), rows)


def instances() -> str:
    rows = [
        [name, f"{t.efa}", f"{t.gbps:g}", "required" if t.gpudirect else "", t.protocol]
        for name, t in load_instance_types().items()
    ]
    return format_table(("type", "EFA devices", "Gbit/s", "GPUDirect", "protocol"), rows)


TABLES = {"failures": known_failures, "variables": variables, "instances": instances}


def with_tables(text: str) -> str:
    for name, table in TABLES.items():
        pattern = rf"(<!-- {name}: begin .*-->\n)(?:.*\n)*?(<!-- {name}: end -->)"
        match = re.search(pattern, text)
        assert match, name
        text = f"{text[: match.start()]}{match[1]}{table()}\n{match[2]}{text[match.end() :]}"
    return text


def test_page_has_the_tables_of_the_code() -> None:
    text = PAGE.read_text("utf-8")
    assert text == with_tables(text), "run python -m tests.doctor.test_efa_page"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text("utf-8")), "utf-8")
