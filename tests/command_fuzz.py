"""Random command lines from the parser of weft, each run in a forked process.

`draw` walks the argparse tree, so it covers new commands and options without a change here.  Half
of the values have the kind that an argument expects, such as a run directory; the others are empty,
huge, of another type, missing, damaged, or not readable.  `check` returns what is wrong:

- an exception, or a traceback in the output
- an exit status other than 0, 1 and 2
- an error without a message, or a usage error that names nothing of the command line
- a changed file after exit status 2, or an incomplete file after any
- a command that does not end, except those that serve or train until they are stopped
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import json
import os
import random
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import garbled
from tests.conversion.test_hf_convert import tiny_dir
from tests.harness import ROOT, _import_modules, run_ranks
from tests.monitor.test_garbled import STEPS, _train
from tests.small import SMALL
from weft.cli.command_parser import CommandParser
from weft.cli.main import build_parser, main
from weft.config.escaping import escape_controls
from weft.config.exit_statuses import INTERRUPTED, REQUEUE
from weft.config.reader import recipe_names
from weft.config.schema import keys
from weft.records.run_cost import LAUNCH_FILE

MEMORY_BYTES = 6 << 30  # of address space, beyond what the process has
MANY_FILES = 2000
PATHS_SEED = "paths"
STOP_SECONDS = 20.0  # for a command to end after an interrupt
TEMPORARY = re.compile(r"\.(part|tmp|incomplete)\b|^\.?tmp|~$")

# --------------------------------------------------------------------------- inputs

PROMPTS = '{"prompt": "Once"}\n"upon"\n'
CHATS = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
TASK = """
task: mine
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{begin}}"
doc_to_choice: "{{[first, second]}}"
doc_to_target: answer
metric_list: [{metric: acc}]
"""
QUESTION = '{"begin": "one", "first": "two", "second": "three", "answer": 0}\n'
RECIPE = (
    'extends = "demo"\n[run]\ndir = "runs/mine"\n[data]\npath = "text"\n[model]\nnum_layers = 2\n'
)
FILES = {
    "recipe.toml": RECIPE,
    "prompts.jsonl": PROMPTS,
    "prompts.txt": "Once\nupon\n",
    "chats.jsonl": CHATS,
    "task.yaml": TASK,
    "questions.jsonl": QUESTION,
    "train.log": "NCCL WARN something\n",
    "broken_module.py": "raise RuntimeError('broken at import')\n",
    "good_module.py": "constant = 3\ndef function(*args, **kwargs):\n    raise KeyError('own')\n",
    "text/a.txt": "A text of some words. " * 200,
    "text/b.txt": "Another text. " * 300,
    "secret.toml": RECIPE,
    "secret/a.txt": "hidden",
}


def make_inputs(directory: Path, store: Path) -> Path:
    """Make the files that commands get: a run, a model directory, a store, recipes, data."""
    directory.mkdir()
    run = directory / "run"
    overrides = [*STEPS, ("run.dir", str(run)), ("train.steps", "6"), ("checkpoint.interval", "3")]
    run_ranks(_train, 1, overrides, str(store), str(run))
    (run / LAUNCH_FILE).write_text(json.dumps({"on": "slurm", "id": "17", "time": 1.0}))
    tiny_dir(directory / "model", store / "tokenizer.json")
    shutil.copytree(store, directory / "store")
    for name, text in FILES.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text)
    (directory / "random.bin").write_bytes(random.Random(0).randbytes(5000))
    (directory / "empty").mkdir()
    (directory / "empty.toml").touch()
    for name in ("secret.toml", "secret"):
        (directory / name).chmod(0)
    return directory


# --------------------------------------------------------------------------- values

SPOIL: tuple[Callable[[Path, random.Random], None], ...] = (
    garbled.missing,
    garbled.truncate,
    garbled.flip,
    garbled.empty,
    garbled.binary,
    garbled.directory,
    garbled.dangling,
)
NUMBERS = ["0", "1", "2", "3", "-1", "9" * 30, "9" * 5000, "1e999", "nan", "inf", "-inf", "0x10"]
NUMBERS += ["1_000", "٣", "²", "1.5", "1e3", " 1", "1e-400", "-0", "+1", "2" + "0" * 18, "100000"]
TEXTS = ["", " ", "a b", "\t", "a\nb", "ünï漢", "caf\udce9", "\x1b]0;x\x07", "x" * 5000, "%s%n{0}"]
TEXTS += ["true", "none", "None", "[1,2]", "{}", '{"a":1}', "a=b", "a=b,c=d", "=", ",", "[", "'"]
TEXTS += ["good_module:function", "good_module:constant", "good_module:missing", "broken_module:x"]
TEXTS += ["no_module:x", ":", "a:", ":b", "\u202eabc", "🙂", "$(touch x)", "`touch x`"]
URLS = [
    "s3://bucket/x",
    "s3://",
    "gs://bucket/x",
    "abfs://a/b",
    "hf://org/name",
    "hf://",
    "hf://a/b:c@d",
]
URLS += [
    "http://127.0.0.1:9/x",
    "file:///nowhere",
    "nothing://x/y",
    "s3://b/\x00x".replace("\x00", "%00"),
]
PATHS = [
    "",
    ".",
    "..",
    "/proc/self",
    "null",
    "/nowhere/x",
    "nowhere",
    "~",
    "~nobody/x",
    "~no-such-user/x",
]
PATHS += [
    "run",
    "run/",
    "run/checkpoints",
    "run/job.toml",
    "run/metrics.jsonl",
    "model",
    "store",
    "text",
]
PATHS += ["run/checkpoints/step-00000003", "run/checkpoints/step-00000006", "empty", "random.bin"]
PATHS += ["empty.toml", "secret.toml", "secret", "recipe.toml", "prompts.jsonl", "prompts.txt"]
PATHS += ["chats.jsonl", "task.yaml", "questions.jsonl", "train.log", "new", "new/deep", "new.html"]
PATHS += ["recipe.toml/x", "x" * 300, "org/name", "a/b/c", "*.txt", "text/*.txt", "text/**", "fifo"]
RUNS = ["run", "run", "run/checkpoints/step-00000003", "damaged", "damaged"]
# Paths on which a careless program hangs, runs out of memory, or fails with an odd error.
HOSTILE = ["", ".", "..", "/", "-", "a\nb", "a\x00b", "caf\udce9", "x" * 300, "x/" * 3000, "fifo"]
HOSTILE += ["socket", "pipes", "many", "loop", "dangling", "secret", "secret.toml", "secret/x"]
HOSTILE += ["recipe.toml/x", "empty", "empty.toml", "random.bin", "new/", "zero", "full"]
HOSTILE += ["/proc/self/mem", "~no-such-user/x", "text", "run/metrics.jsonl", "s3://"]
HOSTILE += ["loop/x", "pipes/job.toml", "run/checkpoints", "nothing://x", "file:///x"]
# Names that commands look for in a directory: in "pipes" each is a FIFO.
PIPES = ["job.toml", "metrics.jsonl", "plan.json", "config.json", "tokenizer.json", "a.txt"]
PIPES += ["model.safetensors", "store.json", "index.json", "manifest.json", "events.jsonl"]
# Values of the kind that an argument expects, by its metavar or name.
KINDS: dict[str, list[str]] = {
    "RECIPE": ["demo", "demo", "moe-demo", "recipe.toml", "run", "run/job.toml", "lora", "damaged"],
    "RUN": RUNS,
    "run_a": RUNS,
    "run_b": RUNS,
    "checkpoint": RUNS,
    "MODEL": ["model", "org/name", "damaged", "run"],
    "RUN_DIR": ["new", "new/deep", "run", "empty"],
    "OUT": ["new", "new/deep", "model", "empty"],
    "PATH|RECIPE": ["text", "recipe.toml", "text/*.txt", "chats.jsonl", "store", "damaged"],
    "STORE": ["store", "damaged"],
    "FILE": ["prompts.jsonl", "prompts.txt", "task.yaml", "new.html", "damaged", "recipe.toml"],
    "DIR": ["new", "empty", "run"],
    "KEY=A,B": [
        "optim.lr=1e-3,3e-3",
        "train.seed=1,2",
        "model.num_layers=1,2",
        "optim.lr=1",
        "lr=1,2",
    ],
    "KEY=VALUE,...": ["parallel.tp=2", "parallel.dp_shard=2,activation_checkpoint.mode=full"],
    "NxMxNAME": ["8xH100", "2x8xH100", "local", "1x2xcpu", "0xH100", "8xNone", "999999999x8xH100"],
    "TOPIC": ["train", "optim.lr", "optim", "keys", "data", "prepare", "model.dim", "--lr"],
    "on": ["slurm", "kubernetes", "sagemaker", "skypilot"],
    "dtype": ["float32", "bfloat16", "float16", "float64"],
    "max_shard": ["1GB", "10KB", "0", "-1GB", "1XB", "1e99GB", "GB"],
    "margin": ["0.5%", "0.1", "-1%", "%", "1e999%"],
    "line": ["train", "weft", "--", "data", "demo", "--opt"],
}
DAMAGEABLE = ("run", "model", "store", "recipe.toml", "prompts.jsonl", "task.yaml", "text")
# Words without which a command would start jobs, serve, or train for minutes.
BOUNDS = {
    ("train",): ["--dry-run"],
    ("launch",): ["--dry-run"],
    ("compare",): ["--plan-only"],
    ("verify",): ["--steps", "1", "--ranks", "2"],
}
# Options of work that may take longer than the limit; then the command is interrupted.
PATH_KEYS = ("run.dir", "model.path", "data.path", "data.tokenizer", "data.chat_template")
PATH_KEYS += (
    "data.cache_dir",
    "lora.path",
    "checkpoint.dir",
    "checkpoint.local_dir",
    "data.mixture",
)
LONG = {"--serve", "--follow", "--search", "--network", "--full"}


@dataclass
class Case:
    """One command line, and the damage to its inputs."""

    words: list[str]
    damage: tuple[str, int] = ("", 0)  # input that is copied to "damaged", and seed of the damage
    may_take_long: bool = False


@functools.cache
def leaves() -> list[tuple[tuple[str, ...], CommandParser]]:
    """Return every command that has no commands of its own, with its path."""

    def walk(parser: CommandParser, path: tuple[str, ...]) -> Iterator[Any]:
        if not parser.subcommands():
            yield path, parser
        for name, inner in parser.subcommands().items():
            yield from walk(inner, (*path, name))

    return [*walk(build_parser(), ())]


def draw_value(action: argparse.Action, rng: random.Random) -> str:
    """Draw a value for a positional argument or an option."""
    name = str(action.metavar) if str(action.metavar) in KINDS else action.dest
    if rng.random() < 0.6:
        if name in KINDS:
            return rng.choice(KINDS[name])
        if action.choices:
            return str(rng.choice([*action.choices]))
        if action.type is Path:
            return rng.choice(PATHS)
        if action.type is not None or action.dest in ("ranks", "steps", "repeat", "price"):
            return rng.choice(["0", "1", "2", "3", "0.5"])
    return draw_any(rng)


def draw_any(rng: random.Random) -> str:
    return rng.choice(
        rng.choice((NUMBERS, TEXTS, URLS, PATHS, HOSTILE, ["damaged"], recipe_names()))
    )


def draw_override(rng: random.Random) -> list[str]:
    """Draw ``--section.key value`` with a value of any kind."""
    key = rng.choice(
        [*keys(), "model.dim", "model.num_layers", "model.rope_theta", "lr", "no.key", "tp"]
    )
    if rng.random() < 0.05:
        return [f"--{key}"]
    value = draw_any(rng)
    return [f"--{key}={value}"] if rng.random() < 0.3 else [f"--{key}", value]


def draw_count(action: argparse.Action, rng: random.Random) -> int:
    """Draw a number of values of a positional argument, now and then an impossible one."""
    if rng.random() < 0.04:
        return rng.choice((0, 2))
    counts = {None: (1,), "?": (1, 1, 0), "*": (0, 1, 1, 2), "+": (1, 1, 2)}
    return rng.choice(counts.get(action.nargs, (0, 1, 3)))  # type: ignore[call-overload]


def draw(seed: str, bounded: bool = True) -> Case:
    """Draw a command line.

    Args:
        seed: of all that is random.
        bounded: never start a job, a server or a training.
    """
    rng = random.Random(seed)
    path, parser = rng.choice(leaves())
    words: list[list[str]] = []
    probability = rng.choice((0.05, 0.15, 0.4))
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction) and rng.random() < 0.98:
            continue
        if not action.option_strings:
            words += [[draw_value(action, rng)] for _ in range(draw_count(action, rng))]
        elif rng.random() < probability:
            option = rng.choice(action.option_strings)
            if bounded and option in LONG:
                continue
            if action.nargs == 0:
                words.append([option])
            else:
                value = draw_value(action, rng)
                words.append([f"{option}={value}"] if rng.random() < 0.3 else [option, value])
    if parser.takes_keys:
        small = [[f"--{key}", value] for key, value in SMALL]
        words += small if path[0] in ("train", "compare") or rng.random() < 0.1 else []
        words += [draw_override(rng) for _ in range(rng.choice((0, 0, 1, 1, 2, 5)))]
    if bounded:
        words.append(BOUNDS.get(path, []))
    if rng.random() < 0.3:
        rng.shuffle(words)
    if rng.random() < 0.03:
        words.append([rng.choice(("--unknown", "-x", "--", "-", "--unknown=1"))])
    flat = [*path, *(word for group in words for word in group)]
    case = Case(flat, may_take_long=not bounded)
    if any("damaged" in word for word in flat):
        case.damage = (rng.choice(DAMAGEABLE), rng.randrange(10**6))
    return case


def path_cases() -> list[Case]:
    """Return a command line for each argument and key of free text, and each hostile path."""
    cases = []
    for path, parser in leaves():
        free = [a for a in parser._actions if a.nargs != 0 and not a.choices]
        required = [a for a in free if not a.option_strings and a.nargs not in ("?", "*")]
        for target in free:
            others = {
                a.dest: KINDS.get(str(a.metavar), KINDS.get(a.dest, ["1"]))[0]
                for a in required
                if a is not target
            }
            for value in HOSTILE:
                words = [value if a is target else others[a.dest] for a in required]
                if target.option_strings:
                    words += [f"{target.option_strings[0]}={value}"]
                elif target not in required:
                    words += [value]
                cases.append(Case([*path, *words, *BOUNDS.get(path, [])]))
    for key in PATH_KEYS:
        for command in (["train", "demo", "--dry-run"], ["data", "inspect", "demo"]):
            cases += [Case([*command, f"--{key}={value}"]) for value in HOSTILE]
    return cases


# --------------------------------------------------------------------------- run


def prepare(case: Case, inputs: Path, directory: Path) -> str:
    """Copy the inputs, damaged as the case says; return what the damage is."""
    shutil.copytree(inputs, directory, ignore=shutil.ignore_patterns("secret*"), symlinks=True)
    shutil.copy(inputs / "recipe.toml", directory / "secret.toml")
    (directory / "secret").mkdir(mode=0)
    (directory / "secret.toml").chmod(0)
    make_special_files(directory, MANY_FILES if "many" in " ".join(case.words) else 0)
    name, seed = case.damage
    if not name:
        return ""
    rng = random.Random(seed)
    source, damaged = directory / name, directory / "damaged"
    if source.is_dir():
        shutil.copytree(source, damaged)
        files = [p for p in damaged.rglob("*") if p.is_file() and p.stat().st_size]
        victim = rng.choice(sorted(files))
    else:
        damaged = shutil.copy(source, damaged)
        victim = damaged
    spoil = rng.choice(SPOIL)
    spoil(victim, rng)
    return f"damaged: {spoil.__name__} of {victim.relative_to(directory)} from {name}"


def make_special_files(directory: Path, count: int) -> None:
    """Make what cannot be copied: FIFOs, a socket, links, and a directory of many files."""
    os.mkfifo(directory / "fifo")
    (directory / "pipes").mkdir()
    for name in PIPES:
        os.mkfifo(directory / "pipes" / name)
    os.mknod(directory / "socket", stat.S_IFSOCK | 0o600)
    # Never the devices in /dev: a command with a fault could replace them.
    for name, minor in (("null", 3), ("zero", 5), ("full", 7)):
        try:
            os.mknod(directory / name, stat.S_IFCHR | 0o600, os.makedev(1, minor))
        except PermissionError:  # only root makes devices
            os.mkfifo(directory / name)
    (directory / "loop").symlink_to("loop")
    (directory / "dangling").symlink_to("nowhere")
    (directory / "many").mkdir()
    for number in range(count):
        (directory / "many" / f"{number}.txt").touch()


def give_up_privileges() -> None:
    """Let root, too, fail to read files without permission."""
    # linux/capability.h: version 3; effective, permitted, inheritable of two words each.
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.capget(header, data) == 0
    data[0] &= ~(1 << 1 | 1 << 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    assert libc.capset(header, data) == 0


def snapshot(directory: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of each file."""
    found: dict[str, tuple[int, int]] = {}
    for parent, _, files in os.walk(directory):
        for name in files:
            if name.endswith(".lock"):
                continue
            path = os.path.join(parent, name)
            status = os.lstat(path)
            found[os.path.relpath(path, directory)] = status.st_size, status.st_mtime_ns
    return found


def run_child(words: list[str], directory: Path, cache: Path) -> None:
    """Run the command in this forked process, and end it."""
    os.setsid()
    os.chdir(directory)
    for number, name in ((0, os.devnull), (1, "../stdout"), (2, "../stderr")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(0, "r"),
        os.fdopen(1, "w", encoding="utf-8", errors="surrogateescape"),
        os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace"),
    )
    nobody = "http://127.0.0.1:9"  # no network: the port of `discard` is closed
    os.environ |= {"http_proxy": nobody, "https_proxy": nobody, "HOME": str(directory.parent)}
    os.environ |= {"XDG_CACHE_HOME": str(cache), "AWS_EC2_METADATA_DISABLED": "true"}
    os.environ |= {"COLUMNS": "100", "TERM": "dumb", "GLOO_SOCKET_IFNAME": "lo"}
    for name in ("HF_HUB_OFFLINE", "AWS_ACCESS_KEY_ID", "AWS_PROFILE", "RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    sys.argv = ["weft", *words]
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, resource.RLIM_INFINITY))
    give_up_privileges()
    status = 99
    try:
        result = main(words)
        status = result if isinstance(result, int) else 98
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 97
    except BaseException:
        traceback.print_exc(file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def wait(pid: int, seconds: float) -> int | None:
    """Wait for a process; return its exit status, or None at the limit."""
    deadline = time.monotonic() + seconds
    pause = 0.001
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause)
        pause = min(pause * 1.3, 0.05)
    return None


def run_case(case: Case, inputs: Path, scratch: Path, limit: float) -> tuple[list[str], float]:
    """Run one command; return what is wrong, and its seconds."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    directory = scratch / "work"
    damage = prepare(case, inputs, directory)
    before = snapshot(directory)
    start = time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            run_child(case.words, directory, scratch.parent / "cache")
        finally:
            os._exit(96)
    status = wait(pid, limit)
    interrupted = status is None
    if interrupted:
        os.kill(pid, signal.SIGINT)
        status = wait(pid, STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if status is None:
            os.waitpid(pid, 0)
    seconds = time.monotonic() - start
    problems = check(case, directory, before, status, interrupted)
    if problems and damage:
        problems.append(damage)
    return problems, seconds


def check(
    case: Case,
    directory: Path,
    before: dict[str, tuple[int, int]],
    status: int | None,
    interrupted: bool,
) -> list[str]:
    """Return what is wrong with the outcome of a command."""
    out, err = (
        (directory.parent / name).read_text("utf-8", errors="replace")
        for name in ("stdout", "stderr")
    )
    shown = f"{out[-1500:]}\n{err[-5000:]}"
    problems = []
    if interrupted and not case.may_take_long:
        problems.append("it did not end")
    if status is None:
        problems.append("it did not end after SIGINT")
    allowed = (0, 1, 2, REQUEUE, INTERRUPTED) if interrupted else (0, 1, 2)
    if status is not None and status not in allowed:
        problems.append(f"exit status {status}")
    if "Traceback (most recent call last)" in out + err:
        problems.append("a traceback")
    # Completions are for a shell, and a file or pipe gets generated text as it is.
    if "\x1b" in (err if case.words[0] in ("completion", "generate", "chat") else out + err):
        problems.append("a control character")
    if status in (1, 2) and not (out + err).strip():
        problems.append("no message")
    if status == 2:
        if not re.search("^weft: ", err, re.MULTILINE):
            problems.append("a usage error without a line that begins with 'weft: '")
        if not any(word in err for word in named(case.words)):
            problems.append("a message that names nothing of the command line")
    after = snapshot(directory)
    if status == 2 and after != before and "data.cache_dir" not in " ".join(case.words):
        changed = sorted(set(before.items()) ^ set(after.items()))
        problems.append(f"changed files: {changed[:4]}")
    new = [
        name for name in after.keys() - before.keys() if TEMPORARY.search(os.path.basename(name))
    ]
    if new and not interrupted:
        problems.append(f"incomplete files: {new[:4]}")
    if len(err) > 20_000:
        problems.append(f"a message of {len(err):,} characters")
    return [*problems, shown] if problems else []


def named(words: list[str]) -> set[str]:
    """Return the words of a command line, and its arguments, that a message may name."""
    result = {*keys(), '"."', '"\\t"'}  # the path of an empty word; a tab
    for word in words:
        for part in (word, *word.partition("=")[::2]):
            name = part.removeprefix("--") or word
            part = escape_controls(name).strip()[:30]
            result |= {part, part.replace("-", "_"), json.dumps(name.rstrip("/"))[1:-1]}
    for path, parser in leaves():
        if tuple(words[: len(path)]) == path:
            for action in parser._actions:
                result |= {action.dest, *action.option_strings, str(action.metavar)}
    return result - {""}


def fuzz(
    inputs: Path, scratch: Path, seed: object, count: int, bounded: bool, limit: float
) -> list[str]:
    """Run random commands, forked from a fresh interpreter; return what is wrong with each.

    Args:
        inputs: from `make_inputs`.
        scratch: directory that this function creates.
        seed: of the command lines; `PATHS_SEED`: those of `path_cases`.
        count: number of command lines; 0: all of `path_cases`.
        bounded: see `draw`.
        limit: seconds of each command.
    """
    arguments = [str(inputs), str(scratch), str(seed), count, bounded, limit]
    command = [sys.executable, "-m", "tests.command_fuzz", json.dumps(arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    text = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        check=True,
    ).stdout
    problems: list[str] = json.loads(text)
    return problems


def _main() -> None:
    inputs, scratch, seed, count, bounded, limit = json.loads(sys.argv[1])
    _import_modules()
    problems, log = [], os.environ.get("FUZZ_LOG")
    paths = path_cases() if seed == PATHS_SEED else []
    for number in range(count or len(paths)):
        case = paths[number] if paths else draw(f"{seed} {number}", bounded)
        wrong, seconds = run_case(case, Path(inputs), Path(scratch) / "case", limit)
        if wrong:
            problems.append("\n".join([f"{seed} {number}: {case.words}", *wrong]))
        if log:
            with open(log, "a") as file:
                print(number, f"{seconds:.2f}", bool(wrong), case.words, file=file)
                file.write("\n".join([*wrong, ""]))
    print(json.dumps(problems))


if __name__ == "__main__":
    _main()
