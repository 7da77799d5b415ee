"""Run every model family in every way, and write the matrix of docs/models.md.

    python benchmarks/models.py [--again] [FAMILY ...]
    python benchmarks/models.py --write             only write the page from recorded results

For each family, small and with random weights:

- *import*: the largest difference of logits and of gradients from transformers, in float32, of the
  draws of tests/models/test_families.py; *export*: all files equal bit for bit what was imported;
- *generate*: 20 greedy tokens of three prompts equal those of transformers;
- *planner*: ``weft plan`` traces the largest preset on 8 or more H100;
- a layout: the code of ``weft verify`` trains two steps on gloo ranks, and compares losses,
  gradient norms, every gradient and every update with one process.

benchmarks/models.json has the results.  An interrupted run continues from it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.composability import run_in_process, run_pair  # noqa: E402
from weft.config.axes import AXES  # noqa: E402
from weft.config.files import write_json  # noqa: E402
from weft.models import FAMILIES  # noqa: E402

RESULTS = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs" / "models.md"
DOCUMENTS = {"data.packing": "documents"}
LAYOUTS: dict[str, dict[str, str]] = {
    "tp": {"parallel.tp": "2"},
    "tp plain": {"parallel.tp": "2", "parallel.sequence_parallel": "false"},
    "pp": {"parallel.pp": "2"},
    "cp": {"parallel.cp": "2"} | DOCUMENTS,
    "cp ulysses": {"parallel.cp": "2", "parallel.cp_method": "ulysses"} | DOCUMENTS,
    "ep": {"parallel.dp_shard": "2", "parallel.ep": "2"},
    "HSDP": {"parallel.dp_replicate": "2", "parallel.dp_shard": "2"},
    "tp x pp": {"parallel.tp": "2", "parallel.pp": "2"},
    "tp x cp": {"parallel.tp": "2", "parallel.cp": "2"},
    "fsdp x cp": {"parallel.dp_shard": "2", "parallel.cp": "2", "parallel.cp_method": "allgather"},
    "LoRA": {"parallel.dp_shard": "2", "lora.rank": "4"},
    "float8": {"parallel.tp": "2", "precision.float8": "rowwise", "precision.float8_small": "true"},
}


def verify_layout(kind: str, layout: str) -> dict[str, Any]:
    """Verify one layout of a family."""
    family, overrides = FAMILIES[kind], LAYOUTS[layout]
    base: Any = next(iter(family.presets.values()))
    if layout == "ep" and not base.num_experts:
        return {"outcome": "none", "reason": "no experts"}
    ranks = 1
    for axis in AXES:
        ranks *= int(overrides.get(f"parallel.{axis}", "1"))
    return run_pair(
        {
            "run.device": "cpu",
            "run.nproc_per_node": str(ranks),
            "model.kind": kind,
            "model.preset": next(iter(family.presets)),
            "parallel.dp_shard": "1",
        }
        | overrides
    )


def import_and_export(kind: str, _: str) -> dict[str, Any]:
    """Compare import and export of a family with transformers."""
    from tests.models.test_families import KINDS, run_draw

    if kind not in KINDS:
        return {"outcome": "none", "reason": "no counterpart in transformers"}
    differences = []
    for seed in range(3):
        with tempfile.TemporaryDirectory() as directory:
            differences.append(run_draw(kind, seed, Path(directory)))
    logits, gradients = (max(values) for values in zip(*differences, strict=True))
    return {"outcome": "works", "reason": "", "logits": logits, "gradients": gradients}


def generate(kind: str, _: str) -> dict[str, Any]:
    """Compare greedy generation with transformers."""
    from tests.models.test_families import KINDS
    from tests.models.test_family_generation import run_generation

    if kind not in KINDS:
        return {"outcome": "none", "reason": "no counterpart in transformers"}
    with tempfile.TemporaryDirectory() as directory:
        run_generation(kind, Path(directory))
    return {"outcome": "works", "reason": ""}


def plan(kind: str, _: str) -> dict[str, Any]:
    """Trace a step of the largest preset on H100."""
    import weft

    family = FAMILIES[kind]
    preset = max(family.presets, key=lambda name: family.num_params(family.presets[name]))
    billions = family.num_params(family.presets[preset]) / 1e9
    nodes = 1 if billions < 20 else 8 if billions < 200 else 64
    result = weft.plan(
        "llama3-8b",
        {
            "model.kind": kind,
            "model.preset": preset,
            "train.seq_len": 1024 if preset == "toy" else 4096,
            "train.global_batch_size": 8 * nodes,
            "activation_checkpoint.mode": "full",
        },
        cluster=f"{nodes}x8xH100",
    )
    gib = result.forecast.needed_bytes / 2**30
    return {"outcome": "works", "reason": f"{preset} on {8 * nodes} H100: {gib:.1f} GiB"}


Run = Callable[[str, str], dict[str, Any]]
COLUMNS: dict[str, Run] = {
    "import": import_and_export,
    "generate": generate,
    "planner": plan,
    **dict.fromkeys(LAYOUTS, verify_layout),
}


def read_results() -> dict[str, Any]:
    """Return the record: date, versions, and the outcome of every cell by family and column."""
    record: dict[str, Any] = {"families": {}}
    if RESULTS.exists():
        record = json.loads(RESULTS.read_text("utf-8"))
    return record


def run(kinds: list[str], again: bool) -> None:
    """Run the cells without a result; with ``again`` also those that did not work."""
    record = read_results()
    today = datetime.date.today().isoformat()
    record["since"] = record.get("since", today)
    record |= {
        "date": today,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    for kind in kinds:
        cells = record["families"].setdefault(kind, {})
        for column in COLUMNS:
            known = cells.get(column, {}).get("outcome")
            if known is None or (again and known in ("failed", "wrong", "refused")):
                cells[column] = run_in_process(COLUMNS[column], kind, column)
                text = f"{cells[column]['outcome']:8} {cells[column]['reason'][:300]}"
                print(f"{kind:14} {column:10} {text}", flush=True)
                write_json(RESULTS, record, indent=1)


# --------------------------------------------------------------------------- the page

SIGNS = {"works": "✓", "refused": "✗", "none": "·", "wrong": "WRONG", "failed": "FAILED"}


def presets() -> str:
    """Return the table of families and presets of docs/models.md."""
    lines = ["| `model.kind` | in `transformers` | presets |", "|---|---|---|"]
    for kind, family in FAMILIES.items():
        mapping = family.hf_mapping
        architecture = f"`{mapping.architecture}`" if mapping else ""
        names = ", ".join(f"`{name}`" for name in family.presets)
        lines.append(f"| `{kind}` | {architecture} | {names} |")
    return "\n".join(lines)


def matrix(record: dict[str, Any]) -> str:
    """Return the table of docs/models.md, and the reasons of its refusals."""
    columns = ["import", "export", *list(COLUMNS)[1:]]
    lines = ["| `model.kind` | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    reasons: dict[str, list[str]] = {}
    for kind in FAMILIES:
        cells = record["families"].get(kind, {})
        if not COLUMNS.keys() <= cells.keys():
            continue  # interrupted
        texts = []
        for column in columns:
            cell = cells["import" if column == "export" else column]
            text = SIGNS[cell["outcome"]]
            if column == "import" and "logits" in cell:
                text = f"{cell['logits']:.0e}, {cell['gradients']:.0e}"
            texts.append(text)
            if cell["outcome"] == "refused":
                reasons.setdefault(cell["reason"], []).append(f"{kind} {column}")
        lines.append(f"| `{kind}` | " + " | ".join(texts) + " |")
    lines += ["", *(f"- ✗ {', '.join(cells)}: {reason}" for reason, cells in reasons.items())]
    return "\n".join(lines)


def write_page() -> None:
    """Replace the tables of docs/models.md."""
    record, text = read_results(), PAGE.read_text("utf-8")
    since, date = record["since"], record["date"]
    days = f"on {date}" if since == date else f"from {since} to {date}"
    head = (
        f"`python benchmarks/models.py` made this table {days} with PyTorch {record['torch']}, "
        f"Python {record['python']}, on CPU. It was not run on a GPU."
    )
    for name, table in (("presets", presets()), ("matrix", f"{head}\n\n{matrix(record)}")):
        before, rest = text.split(f"<!-- {name} -->\n")
        after = rest.split(f"<!-- end of {name} -->")[1]
        text = f"{before}<!-- {name} -->\n{table}\n<!-- end of {name} -->{after}"
    PAGE.write_text(text, "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--again", action="store_true", help="repeat cells that did not work")
    parser.add_argument("--write", action="store_true", help="only write the page")
    options = parser.parse_args()
    if not options.write:
        run(options.families, options.again)
    write_page()


if __name__ == "__main__":
    main()
