"""The figures of README's table of measurements, measured again by the commands beside them.

A ratio may differ from README's by its tolerance.  A tolerance covers a machine whose cores other
processes use; a change of the code that halves a speed is outside of it.  Absolute times are not
compared.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
COMMAND = re.compile(r"`((?:benchmarks|scripts|weft)\b[^`]*)`")


class Figure(NamedTuple):
    """A figure of a row: its place in README and in the output of the row's command."""

    in_readme: str
    in_output: str
    at_least: float  # the smallest ratio of the new figure to README's
    at_most: float
    requires: tuple[str, ...] = ()


# By a part of the command.
FIGURES = {
    "benchmarks/peers.py": [
        # Processor time: README's row is about it.
        Figure(r"\| ([\d.]+) \(", r"weft +[\d.]+  [\d.]+ \([\d.-]+\) +([\d.]+) \(", 0.9, 1.05)
    ],
    "weft verify paper/llama3-405b": [
        Figure(r"difference ([\d.e-]+)", r"largest relative error is ([\d.e-]+),", 0.1, 2.0)
    ],
    "benchmarks/checkpoint.py": [
        Figure(r"\| ([\d.]+) of a step", r"stall, background +[\d.]+ s +([\d.]+) steps", 0, 4)
    ],
    "benchmarks/data.py": [
        Figure(r"\| ([\d.]+) \(", r"weft / datasets: ([\d.]+)x", 0.75, 2, ("datasets",))
    ],
    "benchmarks/tuning.py": [
        Figure(
            r"\| ([\d.]+) \(", r"processor time over its: +([\d.]+)", 0.8, 1.1, ("transformers",)
        ),
        Figure(r"at most ([\d.e-]+)", r", ([\d.e-]+) at most", 0, 10),
    ],
}
NOT_REPEATED = {
    "scripts/soak.sh": "counts of random kills in a quarter of an hour",
    "benchmarks.plan_trace": "its first run takes hours; the row is compared with docs/planner.md",
}


def readme_rows() -> list[str]:
    section = (ROOT / "README.md").read_text().split("\n## Measurements\n")[1].split("\n## ")[0]
    return [row for row in section.splitlines() if row.startswith("| ")][1:]


def test_every_row_of_the_table_has_a_command_or_a_reason() -> None:
    rows = readme_rows()
    assert len(rows) >= len(FIGURES)
    for row in rows:
        assert sum(name in row for name in (*FIGURES, *NOT_REPEATED)) == 1, row
        for figure in next((f for name, f in FIGURES.items() if name in row), []):
            assert re.search(figure.in_readme, row), (figure.in_readme, row)
    assert all(any(name in row for row in rows) for name in (*FIGURES, *NOT_REPEATED))


def test_errors_of_the_planner_are_those_of_its_page() -> None:
    (row,) = (row for row in readme_rows() if "benchmarks.plan_trace" in row)
    page = (ROOT / "docs/planner.md").read_text()
    table = {
        cells[1].strip(" *"): [cell.strip() for cell in cells[2:-1]]
        for cells in (line.split("|") for line in page.splitlines())
        if len(cells) == 10
    }
    count, median, percentile, *_ = table["all"]
    assert f"{count} published runs" in row
    rounded = f"{float(percentile.split()[0]):.0f} %"
    assert f"median {median}, 90th percentile {rounded}" in row
    assert f"dense {table['dense, FSDP2 programs'][1]} (FSDP2)" in row
    assert f"and {table['dense, other programs'][1]}, experts" in row
    assert f"experts {float(table['experts'][1].split()[0]):.0f} %" in row


@pytest.mark.slow
@pytest.mark.timeout(2400, method="signal")
@pytest.mark.parametrize("name", FIGURES)
def test_command_gives_the_figure_of_readme(name: str, tmp_path: Path) -> None:
    (row,) = (row for row in readme_rows() if name in row)
    for package in {package for figure in FIGURES[name] for package in figure.requires}:
        pytest.importorskip(package)
    command = COMMAND.findall(row)[-1]
    words = shlex.split(command)
    words = ["-m", *words] if words[0] == "weft" else [str(ROOT / words[0]), *words[1:]]
    completed = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    output = completed.stdout
    assert completed.returncode == 0, output + completed.stderr
    for figure in FIGURES[name]:
        stated, found = re.search(figure.in_readme, row), re.search(figure.in_output, output)
        assert stated is not None
        assert found is not None, output
        ratio = float(found[1]) / float(stated[1])
        is_near = figure.at_least <= ratio <= figure.at_most
        assert is_near, f"README: {stated[1]}; now: {found[1]}\n{output}"
