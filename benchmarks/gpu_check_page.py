"""The page of the GPU check: Markdown that is readable as text, and its data.

`build_document` returns the data as JSON values, and `format_page` formats nothing else, so that a
page can be made again from the data.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from benchmarks.gpu_check_results import Row, StageResult, divide
from weft.config.files import only_finite
from weft.doctor.node_facts import Facts, Finding
from weft.planning.devices import GIB
from weft.training.run_dir import git_commit
from weft.version import __version__

SPEED = ("tokens/s per device", "MFU, %", "memory, GiB")  # quantities with a table of their own
SPEED_NOTES = """\
Values are medians of the steps after the first two. *Planned* is the prediction of `weft plan` for
this machine, and *ratio* the measured value relative to it: a speed with a ratio below 1 is slower
than planned. MFU is relative to the bfloat16 peak. A dash means that there is no such value: time
on a CPU has no prediction."""
EFFECTS_NOTES = """\
A row A / B has the first result of A relative to that of B, of the same model and batch: a speed of
1.2 means that A is 20 % faster."""
NOTES = """\
*ms* are those of one profiled step, the mean over ranks. *Planned* is the prediction of `weft
plan`, but for some quantities another value. For the machine it is that of the planner's table of
devices, for tests the number that ran, for a save its bytes at the measured speed of the disk, and
for a relative difference of losses its limit, above which the stage fails."""
NOT_INSTALLED = "not installed"


def build_document(
    command: str,
    facts: Facts,
    findings: Sequence[Finding],
    results: Sequence[StageResult],
    seconds: float,
    effects: Iterable[tuple[str, str]] = (),
) -> dict[str, Any]:
    """Return everything that the page has, as JSON values.

    Names of hosts, addresses and users are not in it, except where an error message has them.
    """
    document: dict[str, Any] = only_finite(
        {
            "command": command,
            "time": time.strftime("%Y-%m-%d %H:%M:%S"),
            "seconds": seconds,
            "machine": describe_machine(facts),
            "findings": [asdict(finding) for finding in findings if finding.severity != "ok"],
            "stages": [asdict(result) for result in results],
            "effects": compute_effects(results, effects),
        }
    )
    return document


def describe_machine(facts: Facts) -> dict[str, str]:
    """Return hardware and software by name, without what is unknown."""
    gpus = facts.gpus
    kinds = Counter(gpu.name for gpu in gpus)
    between = {link for gpu in gpus for link in gpu.links}
    disk, commit = facts.directories[0], git_commit()
    speeds = f"writes {disk.write / 1e6:,.0f} and reads {disk.read / 1e6:,.0f} MB/s"
    rows = {
        "GPUs": ", ".join(f"{count} x {name}" for name, count in kinds.items()) or "none",
        "GPU memory": f"{gpus[0].memory / GIB:.0f} GiB each" if gpus else "",
        "driver": facts.gpu_state.driver,
        "links between GPUs": ", ".join(sorted(between - {"X", ""})),
        "NCCL": ".".join(map(str, facts.measured.nccl)),
        "torch": f"{facts.torch}, for {'CUDA ' + facts.cuda if facts.cuda else 'CPUs'}",
        "torchao": package_version("torchao"),
        "triton": package_version("triton"),
        "TorchTitan": package_version("torchtitan").replace(NOT_INSTALLED, ""),
        "weft": f"{__version__}, commit {commit or 'unknown'}",
        "Python, kernel": f"{facts.python}, {facts.kernel}",
        "CPU": f"{facts.usable} of {facts.cores} cores, {facts.memory / GIB:.0f} GiB of memory",
        "disk": f"{disk.kind}, {speeds}, {disk.free / GIB:.0f} GiB free",
        "variables": ", ".join(f"{name}={value}" for name, value in facts.variables.items()),
    }
    return {name: text for name, text in rows.items() if text}


def package_version(name: str) -> str:
    """Return the version of an installed package, or that there is none."""
    with suppress(PackageNotFoundError):
        return version(name)
    return NOT_INSTALLED


def compute_effects(
    results: Iterable[StageResult], pairs: Iterable[tuple[str, str]]
) -> list[dict[str, Any]]:
    """Return the ratios of stages to the stages that lack their technique."""
    found = {result.name: result for result in results if result.rows}
    effects = []
    for name, base in pairs:
        if {name, base} <= found.keys() and found[name].size == found[base].size:
            new, old = found[name].rows[0], found[base].rows[0]
            measured, planned = divide(new.measured, old.measured), divide(new.planned, old.planned)
            row = asdict(Row(f"{name} / {base}: {new.quantity}", measured, planned))
            effects += [row] if measured is not None else []
    return effects


# --------------------------------------------------------------------------- Markdown


def format_page(document: Mapping[str, Any]) -> str:
    """Return the page of `build_document`."""
    machine, stages = document["machine"], document["stages"]
    rows = [
        [stage["name"], *format_row(Row(**row))]
        for stage in stages
        for row in stage["rows"]
        if row["quantity"] not in SPEED and (row["measured"], row["planned"]) != (None, None)
    ]
    columns = ["measured", "planned", "ratio"]
    speed, mfu, memory = SPEED
    speed_columns = [speed, "planned", "ratio", mfu, memory, "planned", "ratio"]
    speeds = format_table("Speed and memory", ["stage", *speed_columns], format_speeds(stages))
    effects = format_table(
        "Effects of techniques",
        ["stages", *columns],
        (format_row(Row(**effect)) for effect in document["effects"]),
    )
    sections = [
        f"# weft on {machine['GPUs'] if machine['GPUs'] != 'none' else 'a CPU'}",
        f"{document['time']}, {document['seconds'] / 60:.1f} minutes. {summarize(stages)}",
        f"    {document['command']}",
        "`docs/gpu-check.md` of weft's repository says what each stage is for.",
        *(speeds and [*speeds, SPEED_NOTES]),
        *(effects and [*effects, EFFECTS_NOTES]),
        *format_table("Other results", ["stage", "quantity", *columns], rows),
        NOTES,
        *format_table(
            "Stages",
            ["stage", "result", "seconds", "reason"],
            ([s["name"], s["status"], f"{s['seconds']:.0f}", s["reason"]] for s in stages),
        ),
        *format_table("Machine", ["", ""], machine.items()),
        *format_table(
            "Findings of weft doctor",
            ["severity", "check", "finding", "remedy"],
            (
                [f["severity"], f["check"], f["observation"], f["remedy"]]
                for f in document["findings"]
            ),
        ),
        *format_table(
            "Commands",
            ["stage", "command"],
            ([s["name"], format_command(s)] for s in stages if s["command"]),
        ),
        "A key here is an option there: `--key=value`. All runs have some more keys; the data file "
        "beside this page has the complete commands.",
    ]
    for stage in stages:
        if stage["output"]:
            lines = (f"    {line}" for line in stage["output"].splitlines())
            sections += [f"## Last lines of {stage['name']}", "\n".join(lines)]
    return "\n\n".join(sections) + "\n"


def summarize(stages: Iterable[Mapping[str, Any]]) -> str:
    """Return the number of stages by status, with the names of those that failed."""
    names: dict[str, list[str]] = {}
    for stage in stages:
        names.setdefault(stage["status"], []).append(stage["name"])
    counts = []
    for status, found in names.items():
        text = f" ({'; '.join(found)})" if status in ("failed", "timed out") else ""
        counts.append(f"{len(found)} {status}{text}")
    return f"Stages: {', '.join(counts)}."


def format_speeds(stages: Iterable[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yield the cells of each stage that has a speed."""
    for stage in stages:
        found = {row["quantity"]: Row(**row) for row in stage["rows"]}
        if SPEED[0] in found:
            speed, mfu, memory = (format_row(found.get(name, Row(name, None))) for name in SPEED)
            yield [stage["name"], *speed[1:], mfu[1], *memory[1:]]


def format_command(stage: Mapping[str, Any]) -> str:
    """Return the command of a stage, without the keys that all runs have."""
    if stage["keys"]:
        start = " ".join(stage["command"].split()[:3])  # weft train RECIPE
        return f"{start} {stage['size']} {stage['keys']}"
    return str(stage["command"])


def format_table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a title and a table with aligned columns; [] without rows."""
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in (head, *rows)]
    if len(cells) == 1:
        return []
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    lines = (
        " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    )
    return [f"## {title}", "\n".join(f"| {line} |" for line in lines)]


def format_row(row: Row) -> list[str]:
    """Return quantity, measured and planned value, and their ratio."""
    values = (row.measured, row.planned, divide(row.measured, row.planned))
    return [row.quantity, *map(format_number, values)]


def format_number(value: float | None) -> str:
    """Return at least three digits of a number; a dash if it is unknown."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
