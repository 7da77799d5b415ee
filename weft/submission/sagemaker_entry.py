"""Entry point of a SageMaker job: run ``weft train`` with SageMaker's settings.

There are two ways to use it.  Amazon's training toolkit starts ``torchrun ... train.py --key
value ...``, where train.py is

    from weft.submission.sagemaker_entry import main

    if __name__ == "__main__":
        main()

and every process is a rank.  Or a container has ``python -m weft.submission.sagemaker_entry`` as
its entrypoint, as ``weft launch`` configures it.  It is then the first process of each host, reads
SageMaker's configuration files, and ``weft train`` starts the ranks.

In both cases this process only supervises a child process, so that it can report a killed child:

*hyperparameters*: ``recipe`` names the recipe, and ``program`` another command than ``train``
(``data prepare``); all others are ``--section.key value``.
*data*: ``data.path`` is the channel ``training`` or ``train``, if one exists.
*mounts*: the directories of ``launch.mounts`` become links to their channels; ``/fsx`` and ``/efs``
to the channels ``fsx`` and ``efs``.
*run directory*: ``/opt/ml/checkpoints``, which SageMaker copies to S3 while a job runs, and back
when it restarts the job, so that the run resumes.
*success*: the first rank exports the model into ``/opt/ml/model``.
*failure*: the root cause goes to ``/opt/ml/output/failure``.
*stop signals*: forwarded to the child, which saves a checkpoint.

Recipe and hyperparameters override these defaults, but a channel overrides a recipe's
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

from weft.config.errors import MISSING, ConfigError, InvalidConfig, WeftError
from weft.config.exit_statuses import FAILED, REQUEUE, UNHEALTHY, USAGE_ERROR
from weft.config.files import read_optional_text
from weft.config.reader import read_job
from weft.config.schema import Job
from weft.doctor.doctor import UNHEALTHY_NODES_DIR
from weft.monitor.process import PYTHON, die_with_parent
from weft.monitor.signals import STOP_SIGNALS
from weft.preparation.environment import detect_environment
from weft.submission.sagemaker_storage import check_mounts, decode_mounts, link_mounts
from weft.supervision.rank_exit import read_error_reports

CHANNELS = ("training", "train")
# The toolkit always exports these harmful variables: NCCL_IB_DISABLE disables InfiniBand,
# NCCL_PROTO disables NCCL's fastest protocols, and RDMAV_FORK_SAFE can break libfabric's memory
# registration, by Amazon's own advice for EFA.
HARMFUL_VARIABLES = {"NCCL_IB_DISABLE": "1", "NCCL_PROTO": "simple", "RDMAV_FORK_SAFE": "1"}
# Lines of the child's stderr to keep, and characters of the failure text; SageMaker shows the first
# 1,024.
TAIL_LINES, FAILURE_CHARS = 40, 4000
# A supervisor whose child failed waits this long, so that the supervisor of a killed child, which
# is the root cause, writes the failure text first.
PATIENCE_SECONDS = 1.0

Overrides = list[tuple[str, str]]


@dataclass(frozen=True)
class Container:
    """SageMaker's settings for a host.

    Args:
        hosts: names of the job's hosts, sorted.
        host: name of this host.
        channels: input directories, by name in lower case.
        base: ``/opt/ml``.
        model: output directory of the model.
        failure: file for the failure text.
    """

    hosts: tuple[str, ...]
    host: str
    channels: Mapping[str, Path]
    base: Path
    model: Path
    failure: Path


def detect_container(environment: Mapping[str, str]) -> Container:
    """Read the settings from the toolkit's variables, or from SageMaker's files.

    Raises:
        WeftError: if this is not a SageMaker training job.
    """
    base = Path(environment.get("SAGEMAKER_BASE_DIR", "/opt/ml"))
    if "SM_HOSTS" in environment:
        hosts, host = json.loads(environment["SM_HOSTS"]), environment["SM_CURRENT_HOST"]
        prefix = "SM_CHANNEL_"
        channels = {
            name.removeprefix(prefix).lower(): Path(directory)
            for name, directory in environment.items()
            if name.startswith(prefix)
        }
    else:
        resources = read_config(base, "resourceconfig")
        if not resources:
            rule = f"neither SM_HOSTS nor {base}/input/config/resourceconfig.json exists"
            raise WeftError(f"this is not a SageMaker training job: {rule}")
        hosts, host = resources["hosts"], resources["current_host"]
        names = read_config(base, "inputdataconfig")
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


def read_config(base: Path, name: str) -> dict[str, Any]:
    """Read one of SageMaker's configuration files; empty if it does not exist."""
    path = base / "input" / "config" / f"{name}.json"
    return dict(json.loads(path.read_text("utf-8"))) if path.exists() else {}


# --------------------------------------------------------------------------- arguments


def read_hyperparameters(base: Path) -> Overrides:
    """Read the hyperparameters, which are strings, or JSON strings from an SDK.

    The JSON string null means the default.
    """
    pairs = []
    for name, value in read_config(base, "hyperparameters").items():
        if name.startswith("sagemaker_"):
            continue  # for the toolkit
        with suppress(ValueError, TypeError):
            value = json.loads(value)
        if value is not None:
            pairs.append((name, to_text(value)))
    return pairs


def parse_arguments(arguments: Sequence[str]) -> Overrides:
    """Parse the hyperparameters from the toolkit's ``--key value --key value``.

    The toolkit passes None as an empty value, which means the default here.

    Raises:
        InvalidConfig: if the arguments do not have this form.
    """
    keys, values = arguments[::2], arguments[1::2]
    invalid = [key for key in keys if not key.startswith("--")]
    if invalid or len(keys) != len(values):
        rule, remedy = "is not --key value", "give every hyperparameter a value"
        raise InvalidConfig([ConfigError((invalid or [keys[-1]])[0], MISSING, rule, remedy)])
    pairs = zip(keys, values, strict=True)
    return [(key.removeprefix("--"), parse_toolkit_value(value)) for key, value in pairs if value]


def parse_toolkit_value(text: str) -> str:
    """Convert a value that the toolkit formatted with str(): True, ['a', 'b']."""
    if text in ("True", "False") or text.startswith(("[", "{", "(")):
        with suppress(ValueError, SyntaxError):
            return to_text(ast.literal_eval(text))
    return text


def to_text(value: object) -> str:
    """Format a value for weft's command line: a string, or TOML in one line."""
    return value if isinstance(value, str) else to_toml(value)


def to_toml(value: object) -> str:
    """Format a JSON value as TOML in one line."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(k)} = {to_toml(v)}' for k, v in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(to_toml, value))}]"
    return json.dumps(value)


def take_recipe(pairs: Overrides, container: Container) -> tuple[str, Overrides]:
    """Return the recipe, and the other hyperparameters as overrides.

    Raises:
        InvalidConfig: if there is no recipe, or it cannot be read.
    """
    given = [(key.replace("-", "_"), value) for key, value in pairs if key != "recipe"]
    recipe = next((value for key, value in pairs if key == "recipe"), None)
    if recipe is None:
        remedy = "set the hyperparameter recipe to the name of a shipped recipe, or to a path"
        raise InvalidConfig([ConfigError("recipe", MISSING, "is missing", remedy)])
    path, inputs = Path(recipe), container.base / "input" / "data"
    if path.is_relative_to(inputs) and path != inputs and not path.exists():
        name = path.relative_to(inputs).parts[0]
        rule = f"does not exist: the channel {name} has no such file"
        remedy = f"upload it to the channel's prefix in S3, which is the input {name} of the job"
        if name.lower() not in container.channels:
            channels = ", ".join(sorted(container.channels)) or "none"
            rule = f"does not exist: the job has no channel {name} (its channels: {channels})"
            remedy = f"add {name} to InputDataConfig, with the S3 prefix of the file"
        raise InvalidConfig([ConfigError("recipe", recipe, rule, remedy)])
    unreadable = [e for e in read_job(recipe, given)[2] if e.key in ("recipe", "extends")]
    if unreadable:  # the job would have defaults, and other errors would only follow
        raise InvalidConfig(unreadable)
    return recipe, given


def prepare_arguments(pairs: Overrides, container: Container) -> tuple[list[str], Job]:
    """Return the arguments of ``weft data prepare``, and the job that they make."""
    recipe, given = take_recipe(pairs, container)
    words = (word for key, value in given for word in (f"--{key}", value))
    return [recipe, *words], read_job(recipe, given)[0]


def train_arguments(pairs: Overrides, container: Container) -> tuple[list[str], Job]:
    """Return the arguments of ``weft train``, and the job that they make.

    SageMaker's settings are the defaults.

    Raises:
        InvalidConfig: if the recipe cannot be read, or no directory is shared for checkpoints.
    """
    recipe, given = take_recipe(pairs, container)
    job, _, _ = read_job(recipe, given)  # weft train reports the errors
    defaults = []
    channel = next((name for name in CHANNELS if name in container.channels), None)
    chosen = {key for key, _ in given} & {"data.path", "data.mixture"}
    if channel and not chosen and not job.data.is_mixture:
        defaults.append(("data.path", str(container.channels[channel])))
    if job.run.dir == "auto":
        run_dir = str(container.base / "checkpoints")
        defaults.append(("run.dir", run_dir))
        if job.checkpoint.is_in_run_dir and len(container.hosts) > 1:
            rule = f"is not possible: {run_dir} is not shared by the "
            rule += f"{len(container.hosts)} hosts, which all write parts of a checkpoint"
            remedy = "set the hyperparameter checkpoint.dir to s3://bucket/prefix, or to a path "
            remedy += "below /fsx with a channel fsx"
            raise InvalidConfig([ConfigError("checkpoint.dir", "auto", rule, remedy)])
    words = (word for key, value in given + defaults for word in (f"--{key}", value))
    return [recipe, *words], read_job(recipe, given + defaults)[0]


def clean_environment(environment: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the environment without the toolkit's harmful variables, and their names."""
    harmful: list[str] = []
    if "SM_TRAINING_ENV" in environment:
        harmful = [
            name for name, value in HARMFUL_VARIABLES.items() if environment.get(name) == value
        ]
    return {k: v for k, v in environment.items() if k not in harmful}, harmful


# --------------------------------------------------------------------------- the child


def run_weft(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[int, list[str]]:
    """Run weft with these arguments, and forward stop signals to it.

    Returns:
        The exit status (negative if a signal ended weft), and the last lines of stderr.
    """
    process = subprocess.Popen(
        [*PYTHON, "weft", *arguments],
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
    reader = threading.Thread(target=tee_lines, args=(process.stderr, tail))
    reader.start()
    try:
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    reader.join(timeout=5)  # a grandchild may keep the pipe open
    return status, list(tail)


def tee_lines(lines: Iterable[str], tail: deque[str]) -> None:
    """Print lines on stderr, and append them to ``tail``."""
    for line in lines:
        tail.append(line)
        sys.stderr.write(line)
        sys.stderr.flush()


def describe_root_cause(run_dir: Path, status: int, tail: Sequence[str], start_time: float) -> str:
    """Return a message on why the run ended: the root cause first, then the details.

    Args:
        run_dir: run directory with the error reports of the ranks.
        status: exit status of the child.
        tail: last lines of the child's stderr.
        start_time: seconds since the epoch; older reports belong to an earlier attempt.
    """
    if status == REQUEUE:
        return "saved a checkpoint and stopped; run the same job to resume"
    paths = sorted((run_dir / UNHEALTHY_NODES_DIR).glob("*"))
    if status == UNHEALTHY and paths:  # the findings are on stdout
        return "\n".join(
            f"unhealthy node {path.name}: {read_optional_text(path).strip()}" for path in paths
        )
    if status < 0:
        name = signal.Signals(-status).name
        cause = ", possibly because the node ran out of memory" if name == "SIGKILL" else ""
        process = f"rank {os.environ['RANK']}" if "RANK" in os.environ else "weft train"
        return f"{process}: killed by {name}{cause}"
    messages = [number for number, line in enumerate(tail) if line.startswith("weft: ")]
    if messages:
        return "".join(tail[messages[-1] :]).strip()
    # Ranks that torchrun started print nothing on stderr.
    if reports := read_error_reports(run_dir, start_time):
        first = reports[0]
        head = f"rank {first['rank']}: {first['kind']}: {first['message']}"
        return f"{head}\n\n{first['traceback']}"
    return "".join(tail).strip() or f"weft train exited with status {status}"


def write_failure(path: Path, text: str) -> None:
    """Write the failure text, unless another process of this host has written it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
        file.write(text[:FAILURE_CHARS])


def export_model(
    run_dir: Path, model: Path, environment: Mapping[str, str]
) -> tuple[int, list[str]]:
    """Export the newest checkpoint in Hugging Face format into the model directory."""
    temporary = model / ".export"
    shutil.rmtree(temporary, ignore_errors=True)  # of an earlier job that was interrupted here
    model.mkdir(parents=True, exist_ok=True)
    rank_variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    single = {k: v for k, v in environment.items() if k not in rank_variables}
    status, tail = run_weft(["export", str(run_dir), str(temporary)], single)
    if status == 0:
        for path in temporary.iterdir():
            path.replace(model / path.name)
        temporary.rmdir()
    return status, tail


def main() -> None:
    """Run the job on this host, or as one of its ranks, and end the process."""
    start_time = time.time()
    environment, harmful = clean_environment(os.environ)
    try:
        container = detect_container(environment)
    except WeftError as error:
        sys.exit(f"weft: {error}")
    try:
        arguments = sys.argv[1:]
        pairs = parse_arguments(arguments) if arguments else read_hyperparameters(container.base)
        mounts, table = decode_mounts(environment), read_optional_text(Path("/proc/self/mountinfo"))
        link_mounts(mounts, container.channels, table, Path("/")).raise_any()
        program = next((value for key, value in pairs if key == "program"), "train").split()
        pairs = [pair for pair in pairs if pair[0] != "program"]
        trains = program == ["train"]
        make_arguments = train_arguments if trains else prepare_arguments
        arguments, job = make_arguments(pairs, container)
        check_mounts(mounts, job, table, Path("/")).raise_any()
        environment |= {
            "SM_HOSTS": json.dumps(container.hosts),
            "SM_CURRENT_HOST": container.host,
        }
        rank = detect_environment(environment).rank  # None: weft train starts this host's ranks
    except InvalidConfig as error:
        print(f"weft: {error}", file=sys.stderr)
        write_failure(container.failure, str(error))
        sys.exit(USAGE_ERROR)
    is_first = container.host == container.hosts[0] if rank is None else rank["RANK"] == "0"
    if harmful and is_first:
        print(f"weft: removed the toolkit's {', '.join(harmful)}", file=sys.stderr)
    run_dir = Path(job.run.dir)
    status, tail = run_weft([*program, *arguments], environment)
    if status == 0 and is_first and trains:
        status, tail = export_model(run_dir, container.model, environment)
    if status:
        if status > 0:
            time.sleep(PATIENCE_SECONDS)
        cause = describe_root_cause(run_dir, status, tail, start_time)
        write_failure(container.failure, cause)
    sys.exit(status if status >= 0 else FAILED)


if __name__ == "__main__":
    main()
