"""Test weft with other versions of PyTorch and Python, each in an environment that pip builds.

    python3 scripts/test_versions.py [--keep] [TORCH/PYTHON ...]      such as 2.15.0/3.13

Without arguments it tests the pairs of `MATRIX`.  It needs those interpreters on the path, 8 GB of
disk for one environment at a time, and about 15 minutes for each.  pip's settings apply: for builds
without CUDA set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu, and for a nightly set
PIP_PRE=1 and PIP_EXTRA_INDEX_URL to its index.  The result is a table, also in
build/versions/table.md, beside the logs.  The exit status is 1 if a check failed or an environment
could not be built.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

CLONE = Path(__file__).resolve().parent.parent
BUILD = CLONE / "build" / "versions"

# Each release of PyTorch once, and each Python once.  docs/supported-versions.md has the results.
MATRIX = (
    ("2.11.0", "3.12"),
    ("2.12.1", "3.12"),
    ("2.13.0", "3.11"),
    ("2.14.1", "3.13"),
    ("2.15.0", "3.13"),
)

# What the checks need beside weft: versions of constraints.txt, but for PyTorch.
TEST_PACKAGES = ("pytest", "pytest-timeout", "safetensors", "torchao")

PYTEST = "-m pytest -q -p no:cacheprovider --timeout 900 -m not_slow"
TRAIN = "-m weft train demo --run.device cpu --run.nproc_per_node 2 --train.eval_interval 0"
VERIFY = "-m weft verify"
CHECKS = {
    "private APIs": (f"{PYTEST} tests/parallel/test_private.py",),
    "FSDP": (f"{VERIFY} demo --ranks 2 --parallel.dp_shard 2",),
    "tensor parallel": (f"{VERIFY} demo --ranks 2 --parallel.tp 2",),
    "context parallel": (
        f"{VERIFY} demo --ranks 2 --parallel.cp 2",
        f"{VERIFY} demo --ranks 2 --parallel.cp 2 --data.packing documents",
    ),
    "pipeline": (
        f"{VERIFY} demo --ranks 2 --parallel.pp 2 --pipeline.schedule Interleaved1F1B",
        f"{VERIFY} demo --ranks 2 --parallel.pp 2 --pipeline.schedule ZBVZeroBubble",
        f"{VERIFY} moe-demo --ranks 4 --parallel.pp 2 --parallel.ep 2 "
        "--pipeline.schedule DualPipeV",
        f"{PYTEST} tests/parallel/test_pipeline_messages.py tests/parallel/test_pass_overlap.py",
    ),
    "experts": (f"{VERIFY} moe-demo --ranks 2 --parallel.ep 2",),
    "four axes": (f"{VERIFY} llama3-405b --ranks 4",),
    "documents": (
        f"{PYTEST} tests/models/test_varlen_attention.py tests/parallel/test_varlen_blocks.py "
        "tests/training/test_varlen_layouts.py",
    ),
    "CUDA graphs": (f"{PYTEST} tests/parallel/test_cuda_graphs.py",),
    "compile": (
        f"{VERIFY} demo --ranks 2 --parallel.tp 2 --compile.enable true",
        f"{TRAIN} --run.dir {{dir}}/compiled --train.steps 10 --compile.enable true",
    ),
    "float8": (
        f"{VERIFY} demo --ranks 2 --parallel.tp 2 --precision.float8 tensorwise "
        "--precision.float8_small true",
    ),
    "LoRA": (f"{VERIFY} demo --ranks 2 --parallel.dp_shard 2 --lora.rank 4",),
    "recomputation": (f"{VERIFY} demo --ranks 2 --activation_checkpoint.mode selective",),
    "random layouts": ("-m tests.fuzz 12 --seed 1 --ranks 4 --log {dir}/fuzz.jsonl",),
    "checkpoints": (
        f"{VERIFY} demo --ranks 4 --parallel.tp 2 --resume-layout parallel.dp_shard=2",
        f"{TRAIN} --run.dir {{dir}}/run --train.steps 4 --checkpoint.interval 2",
        f"{TRAIN} --run.dir {{dir}}/run --train.steps 8 --parallel.tp 2",
        "-m weft export {dir}/run {dir}/exported",
    ),
    "trace and plan": (
        f"{PYTEST} tests/estimate/test_trace.py",
        "-m weft plan llama3-8b-8gpu",
        "-m weft plan llama3-405b",
    ),
    "demo": (
        "-m weft train demo --run.dir {dir}/demo",
        "-m weft generate {dir}/demo --prompt Once",
        "-m weft report {dir}/demo",
    ),
}
SECONDS = 1200.0  # for one command


def main() -> int:
    """Test the environments that the command line names; print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="TORCH/PYTHON", help="default: the matrix")
    parser.add_argument("--keep", action="store_true", help="do not delete the environments")
    options = parser.parse_args()
    pairs = [tuple(name.split("/")) for name in options.names] or list(MATRIX)
    if wrong := [name for name in options.names if name.count("/") != 1]:
        parser.error(f"{wrong[0]} is not TORCH/PYTHON, such as 2.15.0/3.13")
    rows: list[dict[str, str]] = []
    for torch, python in pairs:
        rows.append(test_environment(torch, python, options.keep))
        table = format_table(rows)
        BUILD.mkdir(parents=True, exist_ok=True)
        (BUILD / "table.md").write_text(table, "utf-8")
    print(table, end="")
    return int(any("failed" in text for row in rows for text in row.values()))


def test_environment(torch: str, python: str, keep: bool) -> dict[str, str]:
    """Build an environment, run all checks in it, and return the results by name."""
    directory = BUILD / f"torch-{torch}-python-{python}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    row = {"environment": f"torch {torch}, Python {python}"}
    print(f"{row['environment']}: {directory}", flush=True)
    start = time.monotonic()
    failure = build_environment(directory, torch, python)
    row["installation"] = failure or f"{time.monotonic() - start:.0f} s"
    print(f"  installation: {row['installation']}", flush=True)
    if not failure:
        interpreter = directory / "venv/bin/python"
        facts = "import platform, torch; print(torch.__version__, platform.python_version())"
        found = subprocess.run([interpreter, "-c", facts], capture_output=True, text=True)
        row["environment"] = "torch {}, Python {}".format(*found.stdout.split() or (torch, python))
        for name, commands in CHECKS.items():
            row[name] = run_check(directory, name, commands)
            print(f"  {name}: {row[name]}", flush=True)
    if not keep:
        shutil.rmtree(directory / "venv", ignore_errors=True)
    return row


def build_environment(directory: Path, torch: str, python: str) -> str:
    """Install PyTorch, weft and the test packages; return the reason if that failed."""
    program = f"python{python}"
    version = [program, "-c", "import sys; print('{}.{}'.format(*sys.version_info))"]
    try:
        answer = subprocess.run(version, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        answer = ""
    if answer != python:
        return f"failed: {program} is not on the path"
    project = tomllib.loads((CLONE / "pyproject.toml").read_text("utf-8"))["project"]
    pins = (CLONE / "constraints.txt").read_text("utf-8").splitlines()
    constraints = directory / "constraints.txt"
    text = "".join(f"{pin}\n" for pin in pins if not pin.startswith("torch=="))
    constraints.write_text(text, "utf-8")
    others = [name for name in project["dependencies"] if not name.startswith("torch>")]
    pip = [str(directory / "venv/bin/python"), "-m", "pip", "install"]
    pip += ["--constraint", str(constraints)]
    commands = (
        [program, "-m", "venv", str(directory / "venv")],
        [*pip, f"torch=={torch}", *others, *TEST_PACKAGES],
        [*pip, "--no-deps", "--editable", str(CLONE)],  # whose bounds a nightly is outside of
    )
    log = directory / "installation.log"
    if any(run_command(command, log, {}) for command in commands):
        return f"failed: see {log}"
    return ""


def run_check(directory: Path, name: str, commands: tuple[str, ...]) -> str:
    """Run the commands of a check up to the first that fails; return the seconds."""
    log = directory / f"{name.replace(' ', '-')}.log"
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(CLONE)}
    start = time.monotonic()
    for command in commands:
        words = command.format(dir=directory).split()
        words = ["not slow" if word == "not_slow" else word for word in words]
        program = [str(directory / "venv/bin/python"), *words]
        if run_command(program, log, environment):
            return f"failed: {command}"
    return f"{time.monotonic() - start:.0f} s"


def run_command(command: list[str], log: Path, environment: dict[str, str]) -> int:
    """Run a command in the clone, and end it with its children after `SECONDS`."""
    with log.open("a", encoding="utf-8") as file:
        print("$", *command, file=file, flush=True)
        process = subprocess.Popen(
            command,
            cwd=CLONE,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(SECONDS)
        except BaseException as error:  # also Ctrl-C, which the new session does not get
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            print(f"ended after {SECONDS:.0f} s", file=file)
            return 1


def format_table(rows: list[dict[str, str]]) -> str:
    """Format the results as a Markdown table, one column for each environment."""
    names = ["installation", *CHECKS]
    heads = [row["environment"] for row in rows]
    lines = [["check", *heads], ["---"] * (len(rows) + 1)]
    lines += [[name, *(row.get(name, "not run") for row in rows)] for name in names]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
