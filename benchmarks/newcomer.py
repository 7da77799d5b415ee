"""Do fifteen tasks as a newcomer would, with the commands of the docs, and check their results.

    python benchmarks/newcomer.py [--clone DIRECTORY] [TASK ...]

Every task has at most two commands and an empty directory with only the newcomer's own files:
texts, conversations, pairs, and tiny models in place of the Hub's.  ``--clone`` takes weft of
another clone, such as of an older commit.  The result is a line per task: the number of commands,
seconds, and the reason if it failed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from tests import pages

SHORT = "--train.steps 20"
MODEL = "--model.path Qwen/Qwen3-0.6B"

MODEL_FILE = """
from dataclasses import replace

from weft.models.decoder import Decoder
from weft.models.families import llama


class Model(Decoder):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


FAMILY = replace(llama.FAMILY, build=Model, hf_mapping=None)
"""
TRACKER_FILE = """
class Lines:
    def __init__(self, path):
        self.path = path

    def write(self, record):
        with self.path.open("a") as file:
            file.write(f"{record.step} {record.loss}\\n")

    def close(self):
        pass


def tracker(directory, job, resumed_step):
    return Lines(directory / "lines.txt")
"""
PYTHON_FILE = """
import weft

run = weft.train("demo", {"train.steps": 5, "run.dir": "runs/mine", "data.path": "my-book.txt"})
model = weft.load_text_model("runs/mine")
print(run.loss, weft.generate(model, "Once", max_tokens=5))
"""
LOAD_FILE = """
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("out")
ids = AutoTokenizer.from_pretrained("out")("Once", return_tensors="pt")
print(model.generate(**ids, max_new_tokens=5).shape)
"""


def records(directory: Path) -> list[dict[str, float]]:
    lines = (directory / "runs/mine/metrics.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def has_learned(directory: Path, output: str) -> str:
    losses = [record["loss"] for record in records(directory)]
    if losses[-1] >= losses[0]:
        return f"the loss rose from {losses[0]} to {losses[-1]}"
    return "" if (directory / "runs/mine/report.html").is_file() else "no report"


def has_lost_nothing(directory: Path, output: str) -> str:
    steps = [record["step"] for record in records(directory)]
    return "" if steps == list(range(1, 31)) else f"steps {steps}"


def has_outputs(directory: Path, output: str) -> str:
    cells = json.loads((directory / "notebook.ipynb").read_text("utf-8"))["cells"]
    empty = sum(not cell["outputs"] for cell in cells if cell["cell_type"] == "code")
    return f"{empty} cells without an output" if empty > 2 else ""


def prints(*texts: str) -> Callable[[Path, str], str]:
    def check(directory: Path, output: str) -> str:
        missing = [text for text in texts if text not in output]
        return f"does not print {missing}: {output[-300:]}" if missing else ""

    return check


def has_file(name: str) -> Callable[[Path, str], str]:
    def check(directory: Path, output: str) -> str:
        return "" if (directory / name).is_file() else f"no {name}"

    return check


class Task(NamedTuple):
    """A task: its commands, and a function that returns the error of their result, if any."""

    commands: list[str]
    check: Callable[[Path, str], str]
    files: Mapping[str, str] = MappingProxyType({})
    interrupt: bool = False  # Ctrl-C in the first command, after its fifth step


TRAIN = f"weft train demo --data.path my-book.txt --run.dir runs/mine {SHORT}"
TASKS = {
    "own text": Task([TRAIN], has_learned),
    "resume after Ctrl-C": Task([TRAIN.replace("20", "30")] * 2, has_lost_nothing, interrupt=True),
    "chat LoRA": Task(
        [f"weft train lora {MODEL} --data.path chats.jsonl --run.dir runs/mine --optim.lr 1e-2"],
        has_learned,
    ),
    "DPO": Task(
        [
            f"weft train dpo {MODEL} --data.path pairs.jsonl --run.dir runs/mine --optim.lr 1e-3 "
            "--train.epochs 8"
        ],
        has_learned,
    ),
    "Hugging Face in and out": Task(
        [
            f"weft train pretrain {MODEL} --data.path my-book.txt --run.dir runs/mine "
            "--train.epochs 1 && weft export runs/mine out",
            "python load.py",
        ],
        prints("torch.Size"),
        {"load.py": LOAD_FILE},
    ),
    "plan": Task(
        ["weft plan llama3-70b --cluster 4x8xH100"], prints("GPU-hours", "per step", "GiB")
    ),
    "search": Task(
        ["weft plan llama3-8b --cluster 8xH100 --search --write best.toml"], has_file("best.toml")
    ),
    "verify": Task(["weft verify llama3-8b --ranks 2 --parallel.tp 2"], prints("passed")),
    "compare": Task(
        ["weft compare demo --vary optim.lr=1e-3,3e-3 --repeat 2 --train.steps 10 --out runs/lr"],
        has_file("runs/lr/report.html"),
    ),
    "diverging run": Task(
        [f"{TRAIN.replace('20', '40')} --optim.lr 0.5 --optim.warmup_steps 1"], prints("diverged")
    ),
    "Slurm dry run": Task(
        [
            "weft launch llama3-8b --on slurm --run.nodes 4 --run.cluster 4x8xH100 --dry-run "
            "--data.path texts --data.tokenizer tokenizer.json --run.dir runs/mine"
        ],
        prints("#SBATCH --nodes=4", "srun"),
        {"tokenizer.json": "{}"},
    ),
    "Python": Task(["python own.py"], has_file("runs/mine/report.html"), {"own.py": PYTHON_FILE}),
    "notebook": Task(["jupyter execute notebook.ipynb --inplace"], has_outputs),
    "own model": Task(
        [f"{TRAIN} --model.kind mine:FAMILY --parallel.tp 2"], has_learned, {"mine.py": MODEL_FILE}
    ),
    "own tracker": Task(
        [f"{TRAIN} --monitor.trackers mine:tracker"],
        has_file("runs/mine/lines.txt"),
        {"mine.py": TRACKER_FILE},
    ),
}


def interrupt(command: str, directory: Path, variables: dict[str, str]) -> None:
    """Run a training command, and send Ctrl-C after its fifth step."""
    metrics = directory / "runs" / "mine" / "metrics.jsonl"
    with pages.start(f"exec {command}", directory, variables) as process:
        while process.poll() is None:
            if metrics.is_file() and metrics.read_bytes().count(b"\n") >= 5:
                process.send_signal(signal.SIGINT)
                break
            time.sleep(0.1)
        output, _ = process.communicate(timeout=600)
    # 75: saved a checkpoint and stopped.
    assert process.returncode == 75, f"status {process.returncode}: {output[-600:]}"


def try_task(name: str, clone: Path) -> tuple[float, str]:
    """Do a task in an empty directory; return its seconds, and what is wrong if anything."""
    task = TASKS[name]
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary).resolve()
        hub = directory / ".hub"
        pages.write_inputs(directory, hub)
        for file, text in task.files.items():
            (directory / file).write_text(text, "utf-8")
        if (clone / "docs" / "notebook.ipynb").is_file():
            shutil.copy(clone / "docs" / "notebook.ipynb", directory)
        variables = pages.environment(directory, hub) | {"PYTHONPATH": str(clone)}
        begin = time.monotonic()
        try:
            first, *rest = task.commands
            if task.interrupt:
                interrupt(first, directory, variables)
            else:
                rest = task.commands
            output = "".join(pages.run(command, directory, variables) for command in rest)
            wrong = task.check(directory, output)
        except (AssertionError, OSError, ValueError, subprocess.TimeoutExpired) as error:
            wrong = str(error)
        return time.monotonic() - begin, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(TASKS)}")
    parser.add_argument("--clone", type=Path, default=pages.ROOT, help="directory of a clone")
    options = parser.parse_args()
    names = options.tasks or list(TASKS)
    done = 0
    for name in names:
        seconds, wrong = try_task(name, options.clone.resolve())
        done += not wrong
        commands = len(TASKS[name].commands)
        print(f"{name:26} {commands} {seconds:6.1f} s  {wrong or 'done'}", flush=True)
    print(f"{done} of {len(names)} tasks; {date.today()}, torch {version('torch')}")


if __name__ == "__main__":
    main()
