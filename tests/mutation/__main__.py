"""``python -m tests.mutation``: plant every fault and run the checks.

--only A,B         faults whose kind, name or file contains one of these texts
--sample N         only N faults, drawn by today's date
--checks A,B       checks whose name contains one of these
--precision bf16   or float8: faults in numeric code that a check of the precision executes
--json FILE        write a line per fault; skip faults that the file has already
--seconds N        stop after N seconds; the same command resumes
--baseline         only run the battery without a fault
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from tests.mutation.catalogue import FAULTS, Fault
from tests.mutation.runner import (
    Baseline,
    Outcome,
    baseline,
    forked,
    import_heavy,
    is_executed,
    run_fault,
    tree_hash,
)
from tests.mutation.score import report

NUMERIC = ("models/", "parallel/", "optim/", "training/loss", "training/step")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("--only", default="")
    parser.add_argument("--sample", type=int)
    parser.add_argument("--precision", default="", choices=("", "bf16", "float8"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--checks", default="")
    parser.add_argument("--baseline", action="store_true")
    options = parser.parse_args()
    start_time = time.monotonic()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "HF_HUB_OFFLINE"):
        os.environ[name] = "1"
    import_heavy()
    work = Path(tempfile.gettempdir()) / "weft-mutation"
    work.mkdir(exist_ok=True)
    os.environ["WEFT_MUTATION_FIXTURES"] = str(work)

    state, result = forked(_prepare, options.precision, timeout=300)
    assert state == "done", result
    words = options.checks.split(",")
    checks = {n: source for n, source in result.items() if any(word in n for word in words)}
    base = baseline(options.precision, checks, work, print_now)
    if options.baseline:
        valid = len(base.seconds)
        seconds = sum(base.seconds.values())
        print_now(f"{valid} of {len(checks)} checks find nothing; {seconds:.0f} s")
        return int(valid < len(checks))
    completed = read_log(options.json)
    chosen = [
        fault
        for fault in FAULTS
        if any(w in f"{fault.kind} {fault.name} {fault.file}" for w in options.only.split(","))
        and (not options.precision or is_applicable(fault, base))
    ]
    if options.sample:
        chosen = random.Random(f"{datetime.now(UTC):%Y-%m-%d}").sample(chosen, options.sample)
    print_now(f"{len(chosen)} faults, {len(checks)} checks")
    for fault in chosen:
        completed |= read_log(options.json)  # several processes may write the file
        if fault.name in completed:
            continue
        if time.monotonic() - start_time > options.seconds:
            print_now(f"{len([f for f in chosen if f.name not in completed])} are left")
            break
        outcome = run_fault(fault, options.precision, base)
        completed[fault.name] = outcome
        print_now(
            f"{'found ' if outcome.check else 'MISSED'} {fault.name} ({fault.file}): "
            f"{outcome.check}: {outcome.text[:160]!r} -> {outcome.module}"
            f"{'' if outcome.named else ' (another)'} {outcome.seconds:.0f} s"
        )
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps(outcome._asdict()) + "\n")
    print_now(report([completed[f.name] for f in chosen if f.name in completed]))
    print_now(f"tree {tree_hash()}")
    return 0


def is_applicable(fault: Fault, base: Baseline) -> bool:
    """Return True if the fault differs in another precision, and a check executes it."""
    executed = any(is_executed(fault, lines) for lines in base.lines.values())
    return fault.file.startswith(NUMERIC) and fault.kind != "counters" and executed


def read_log(path: Path | None) -> dict[str, Outcome]:
    """Return earlier outcomes by fault."""
    if path is None or not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["name"]: Outcome(**line) for line in lines}


def _prepare(precision: str) -> dict[str, str]:
    from tests.mutation import formulas
    from tests.mutation.battery import battery

    formulas.fixtures(Path(os.environ["WEFT_MUTATION_FIXTURES"]))
    return {check.name: check.source for check in battery() if precision in check.precisions}


def print_now(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
