"""What a SageMaker training job starts on its hosts: ``weft train``, told what SageMaker says.

It is used in either of two ways.  Amazon's training toolkit starts ``torchrun ... train.py --key
value ...``, where train.py is

    from weft.cluster.sagemaker_entry import main

    if __name__ == "__main__":
        main()

and every process is a rank.  Or a container has ``python -m weft.cluster.sagemaker_entry`` as its
entrypoint, as ``weft launch`` asks for: then it is the first process of each host, reads the files
from which the toolkit makes its variables, and starts ranks as ``weft train`` does everywhere.

Either way it only supervises a child process, so that it can tell what even a killed one died of:

*hyperparameters*: ``recipe`` is the recipe, all others are ``--section.key value``.
*data*: ``data.path`` is the channel ``training`` or ``train``, if there is one.
*the run's folder* is ``/opt/ml/checkpoints``, which SageMaker copies to S3 while a job runs and
back when it starts again: job.toml and checkpoints are there together, and the run goes on.
*the end*: the first rank exports the model into ``/opt/ml/model``.
*a failure*: its first cause is the text of ``/opt/ml/output/failure``.
*stop signals* go on to the child, which saves.

What a recipe or a hyperparameter says goes before these defaults, but a channel before a recipe's
``data.path``.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.cluster import FAILED, MISTAKE, REQUEUE
from weft.cluster.rank_exit import read_reports
from weft.config.errors import MISSING, ConfigError, InvalidConfig, WeftError
from weft.config.reader import read_job
from weft.monitor.process import PYTHON, die_with_parent
from weft.monitor.signals import STOP_SIGNALS
from weft.train.environment import detect_environment

CHANNELS = ("training", "train")
# What the toolkit exports whatever the job says, and what does harm: NCCL_IB_DISABLE keeps NCCL
# from InfiniBand, NCCL_PROTO from its fastest protocols, and with RDMAV_FORK_SAFE libfabric's
# memory registration can break, by Amazon's own advice for EFA.
HARMFUL = {"NCCL_IB_DISABLE": "1", "NCCL_PROTO": "simple", "RDMAV_FORK_SAFE": "1"}
# Lines of the child's that may be the only word on why it ended, and characters of the failure's
# text; SageMaker shows the first 1,024.
TAIL_LINES, FAILURE_CHARS = 40, 4000
# That long whoever has seen a failure lets others speak first: a killed process leaves no word
# except that its supervisor speaks at once, and its peers' errors are only what follows.
PATIENCE_SECONDS = 1.0

Pairs = list[tuple[str, str]]


@dataclass(frozen=True)
class Container:
    """What SageMaker says to a host.

    Args:
        hosts: of the job, sorted.
        host: this one.
        channels: folder by name in lower case.
        base: ``/opt/ml``.
    """

    hosts: tuple[str, ...]
    host: str
    channels: Mapping[str, Path]
    base: Path
    model: Path
    failure: Path


def container_of(environment: Mapping[str, str]) -> Container:
    """From the toolkit's variables, or from the files that it takes them from."""
    base = Path(environment.get("SAGEMAKER_BASE_DIR", "/opt/ml"))
    if "SM_HOSTS" in environment:
        hosts, host = json.loads(environment["SM_HOSTS"]), environment["SM_CURRENT_HOST"]
        prefix = "SM_CHANNEL_"
        channels = {
            name.removeprefix(prefix).lower(): Path(folder)
            for name, folder in environment.items()
            if name.startswith(prefix)
        }
    else:
        resources = configuration(base, "resourceconfig")
        if not resources:
            rule = f"neither SM_HOSTS nor {base}/input/config/resourceconfig.json is there"
            raise WeftError(f"this is no SageMaker training job: {rule}")
        hosts, host = resources["hosts"], resources["current_host"]
        names = configuration(base, "inputdataconfig")
        channels = {name.lower(): base / "input" / "data" / name for name in names}
    output = Path(environment.get("SM_OUTPUT_DIR", base / "output"))
    return Container(
        hosts=tuple(sorted(hosts)),
        host=host,
        channels=channels,
        base=base,
        model=Path(environment.get("SM_MODEL_DIR", base / "model")),
        failure=Path(environment.get("SM_OUTPUT_FAILURE", output / "failure")),
    )


def configuration(base: Path, name: str) -> dict[str, Any]:
    """A file that SageMaker writes before it starts a container; empty: it is not there."""
    try:
        text = (base / "input" / "config" / f"{name}.json").read_text("utf-8")
    except FileNotFoundError:
        return {}
    found: dict[str, Any] = json.loads(text)
    return found


# --------------------------------------------------------------------------- words


def hyperparameters(base: Path) -> Pairs:
    """Those in SageMaker's file, whose values are strings: JSON, if an SDK has written them."""
    pairs = []
    for name, value in configuration(base, "hyperparameters").items():
        if name.startswith("sagemaker_"):
            continue  # of the toolkit
        with suppress(ValueError, TypeError):
            value = json.loads(value)
        pairs.append((name, "" if value is None else as_text(value)))
    return pairs


def pairs_of(arguments: Sequence[str]) -> Pairs:
    """``--key value --key value``, as the toolkit writes hyperparameters.

    Raises:
        InvalidConfig: if it is something else.
    """
    keys, values = arguments[::2], arguments[1::2]
    wrong = [key for key in keys if not key.startswith("--")]
    if wrong or len(keys) != len(values):
        rule, remedy = "is not --key value", "give every hyperparameter a value"
        raise InvalidConfig([ConfigError((wrong or [keys[-1]])[0], MISSING, rule, remedy)])
    named = zip(keys, values, strict=True)
    return [(key.removeprefix("--"), as_weft_has_it(value)) for key, value in named]


def as_weft_has_it(text: str) -> str:
    """A value that the toolkit has made text of by Python's str(): True, ['a', 'b']."""
    if text in ("True", "False") or text.startswith(("[", "{", "(")):
        with suppress(ValueError, SyntaxError):
            return as_text(ast.literal_eval(text))
    return text


def as_text(value: object) -> str:
    """A value as weft reads it on its command line: text as it is, all else as TOML in a line."""
    return value if isinstance(value, str) else as_toml(value)


def as_toml(value: object) -> str:
    """A JSON value as TOML in a line."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(k)} = {as_toml(v)}' for k, v in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_toml, value))}]"
    return json.dumps(value)


def train_words(pairs: Pairs, container: Container) -> list[str]:
    """What follows ``weft train``, with what SageMaker decides where nobody else has.

    Raises:
        InvalidConfig: if there is no recipe, or no place for the checkpoints of several hosts.
    """
    given = [(key.replace("-", "_"), value) for key, value in pairs if value != ""]
    recipe = next((value for key, value in given if key == "recipe"), None)
    given = [(key, value) for key, value in given if key != "recipe"]
    if recipe is None:
        remedy = "give the hyperparameter recipe: a shipped one's name, or a path"
        raise InvalidConfig([ConfigError("recipe", MISSING, "is missing", remedy)])
    job, _, _ = read_job(recipe, given)  # mistakes in it weft train will show
    defaults = []
    channel = next((name for name in CHANNELS if name in container.channels), None)
    chosen = {key for key, _ in given}
    if channel and not chosen.intersection(("data.path", "data.mixture")) and not job.data.mixture:
        defaults.append(("data.path", str(container.channels[channel])))
    if job.run.dir == "auto":
        defaults.append(("run.dir", str(container.base / "checkpoints")))
    if job.checkpoint.dir == "auto" and job.run.dir == "auto" and len(container.hosts) > 1:
        rule = f"each of the {len(container.hosts)} hosts has a {container.base}/checkpoints of its"
        rule += " own, and a checkpoint is written by all of them"
        remedy = "give the hyperparameter checkpoint.dir: s3://bucket/prefix, or a folder on FSx"
        raise InvalidConfig([ConfigError("checkpoint.dir", "auto", rule, remedy)])
    return [recipe, *(word for key, value in given + defaults for word in (f"--{key}", value))]


def cleaned(environment: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The environment for weft, and the names of what the toolkit has put there to its harm."""
    harmful: list[str] = []
    if "SM_TRAINING_ENV" in environment:
        harmful = [name for name, value in HARMFUL.items() if environment.get(name) == value]
    return {k: v for k, v in environment.items() if k not in harmful}, harmful


# --------------------------------------------------------------------------- the child


def run(words: Sequence[str], environment: Mapping[str, str]) -> tuple[int, list[str]]:
    """Run weft with these words; stop signals that come meanwhile are its own.

    Returns:
        Its exit status, negative if a signal ended it, and the last lines of its stderr.
    """
    process = subprocess.Popen(
        [*PYTHON, "weft.cli", *words],
        env=dict(environment),
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        preexec_fn=die_with_parent,
    )
    before = {
        number: signal.signal(number, lambda number, frame: process.send_signal(number))
        for number in STOP_SIGNALS
    }
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    assert process.stderr is not None
    reader = threading.Thread(target=pass_through, args=(process.stderr, tail))
    reader.start()
    try:
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    reader.join(timeout=5)  # somebody whom it has started may hold on to it
    return status, list(tail)


def pass_through(lines: Iterable[str], tail: deque[str]) -> None:
    """Print what comes on stderr, and keep the last of it."""
    for line in lines:
        tail.append(line)
        sys.stderr.write(line)
        sys.stderr.flush()


def first_cause(run_dir: Path, status: int, tail: Sequence[str], began: float) -> str:
    """Why the run ended, for people, the cause before its details.

    Args:
        run_dir: where ranks leave their errors.
        tail: last lines of the child's stderr.
        began: seconds since the epoch; errors from before are of an earlier attempt.
    """
    if status == REQUEUE:
        return "stopped and saved; the same job goes on from its newest checkpoint"
    if status < 0:
        killed = signal.Signals(-status).name
        said = ", perhaps for want of memory" if killed == "SIGKILL" else ""
        who = f"rank {os.environ['RANK']}" if "RANK" in os.environ else "weft train"
        return f"{who}: killed by {killed}{said}"
    own = [number for number, line in enumerate(tail) if line.startswith("weft: ")]
    if own:
        return "".join(tail[own[-1] :]).strip()
    # Of ranks that torchrun has started: on stderr they say nothing.
    if reports := read_reports(run_dir, began):
        first = reports[0]
        head = f"rank {first['rank']}: {first['kind']}: {first['message']}"
        return f"{head}\n\n{first['traceback']}"
    return "".join(tail).strip() or f"weft train ended with status {status}"


def write_failure(path: Path, text: str) -> None:
    """Leave the text for SageMaker, unless another process of this host has spoken already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
        file.write(text[:FAILURE_CHARS])


def export(run_dir: str, model: Path, environment: Mapping[str, str]) -> tuple[int, list[str]]:
    """The run's newest checkpoint as Hugging Face has it, right in the model's folder."""
    hidden = model / ".export"
    shutil.rmtree(hidden, ignore_errors=True)  # of a job that was interrupted here
    model.mkdir(parents=True, exist_ok=True)
    alone = {k: v for k, v in environment.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    status, tail = run(["export", run_dir, str(hidden)], alone)
    if status == 0:
        for path in hidden.iterdir():
            path.replace(model / path.name)
        hidden.rmdir()
    return status, tail


def main() -> None:
    """Run the job on this host, or as one rank of it, and end the process."""
    began = time.time()
    environment, harmful = cleaned(os.environ)
    try:
        container = container_of(environment)
    except WeftError as error:
        sys.exit(f"weft: {error}")
    try:
        arguments = sys.argv[1:]
        pairs = pairs_of(arguments) if arguments else hyperparameters(container.base)
        words = train_words(pairs, container)
        environment |= {
            "SM_HOSTS": json.dumps(container.hosts),
            "SM_CURRENT_HOST": container.host,
        }
        rank = detect_environment(environment).rank  # None: weft train starts this host's ranks
    except InvalidConfig as error:
        print(f"weft: {error}", file=sys.stderr)
        write_failure(container.failure, str(error))
        sys.exit(MISTAKE)
    first = container.host == container.hosts[0] if rank is None else rank["RANK"] == "0"
    if harmful and first:
        print(f"weft: without the toolkit's {', '.join(harmful)}", file=sys.stderr)
    run_dir = run_dir_of(words)
    status, tail = run(["train", *words], environment)
    if status == 0 and first:
        status, tail = export(run_dir, container.model, environment)
    if status:
        if status > 0:
            time.sleep(PATIENCE_SECONDS)
        write_failure(container.failure, first_cause(Path(run_dir), status, tail, began))
    sys.exit(status if status >= 0 else FAILED)


def run_dir_of(words: Sequence[str]) -> str:
    """Where the run that `train_words` names lies."""
    pairs = [(k.removeprefix("--"), v) for k, v in zip(words[1::2], words[2::2], strict=True)]
    job, _, _ = read_job(words[0], pairs)
    return job.run.dir


if __name__ == "__main__":
    main()
