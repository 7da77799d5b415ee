"""Submit a recipe to a cluster: render, check and submit a script or manifest.

Each cluster is a module (`CLUSTERS`) with the functions of `Cluster`.  Its script or manifest is
short and only runs the same ``weft train`` command on every node; `weft.train.environment` detects
the rank of each process there.  Users can therefore read, edit, and submit the file without weft.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

from weft.config.errors import MISSING, ConfigError, InvalidConfig, WeftError, suggest
from weft.config.escaping import is_one_line
from weft.config.files import replace_text, write_json
from weft.config.reader import read_job
from weft.config.schema import Job, RunSection
from weft.config.schema import replace as changed
from weft.plan.devices import CPU_DEVICE, parse_cluster
from weft.plan.plan import Machine
from weft.plan.plan_text import cluster_machine
from weft.plan.resolve import node_range, resolve_nodes

CLUSTERS = {
    "slurm": "weft.cluster.slurm",
    "kubernetes": "weft.cluster.kubernetes",
    "sagemaker": "weft.cluster.sagemaker",
    "skypilot": "weft.cluster.skypilot",
}


@dataclass(frozen=True)
class JobRequest:
    """A run to submit, and the resources that it needs.

    Args:
        name: name of the run for the scheduler: a to z, digits and '-', at most 40 characters;
            empty if a configuration error leaves the run without a directory.
        words: the command, ``("weft", "train", recipe, "--section.key", "value", ...)``.
        nodes: minimum and maximum number of nodes.
        devices: GPUs per node; 0: request none.
        run_dir: directory on a file system that all nodes share.
    """

    name: str
    words: tuple[str, ...]
    job: Job
    nodes: tuple[int, int]
    devices: int
    run_dir: Path


class Cluster(Protocol):
    """The functions of a module in `CLUSTERS`."""

    FILE_SUFFIX: str  # of the script or manifest: '.sh', '.yaml', '.json'

    def find_problems(self, request: JobRequest) -> list[ConfigError]:
        """Return the configuration errors of a request."""

    def render(self, request: JobRequest) -> str:
        """Return the script or manifest."""

    def check(self, text: str) -> list[str]:
        """Return the errors that the cluster's tools or its published schema find."""

    def submit(self, path: Path, request: JobRequest) -> str:
        """Submit the file; return the job id."""

    def status(self, id: str) -> str:
        """Return one line: 'waiting...', 'running...' with nodes, or how the job ended."""

    def logs(self, id: str, follow: bool) -> Iterator[str]:
        """Yield the lines that the job has printed."""

    def cancel(self, id: str) -> str:
        """End the job, with time to save if the cluster has any; return a message."""


def get_cluster(name: str) -> Cluster:
    """Return the module of a cluster."""
    return cast(Cluster, importlib.import_module(CLUSTERS[name]))


# --------------------------------------------------------------------------- submission


def build_request(
    on: str | None,
    recipe: str,
    overrides: Sequence[tuple[str, str]],
    problems: Sequence[ConfigError],
    detect_machine: Callable[[RunSection], Machine],
) -> JobRequest:
    """Build and check a request, as far as that is possible on this machine.

    Args:
        on: the name of the cluster.
        recipe: see `read_job`.
        overrides: see `read_job`.
        problems: errors that the command line already has.
        detect_machine: returns this machine, by ``run.device``.

    Raises:
        InvalidConfig: with every error.
    """
    errors = list(problems)
    if on not in CLUSTERS:
        rule = "is not a known cluster" if on else "is missing"
        remedy = suggest(on or "", CLUSTERS)
        errors.append(ConfigError("--on", on or MISSING, rule, remedy))
    job, base, recipe_errors = read_job(recipe, overrides)
    errors += recipe_errors
    if any(error.key in ("recipe", "extends") for error in errors):
        raise InvalidConfig(errors)  # further checks would only see defaults
    bad_keys = {error.key for error in errors}
    nodes, machine, devices = job.run.nodes_text, None, 0
    if job.run.cluster != "local":
        parsed = parse_cluster(job.run.cluster)
        if isinstance(parsed, ConfigError):
            errors.append(parsed)
        else:
            nodes = str(parsed.num_nodes) if nodes == "auto" else nodes
            devices = 0 if parsed.device_name == CPU_DEVICE else parsed.devices_per_node
            machine = replace(cluster_machine(parsed), world_size=None, local_world_size=None)
    elif job.run.device == "cpu":
        machine = detect_machine(job.run)
    else:
        rule = "does not describe the nodes"
        remedy = "use --run.cluster 2x8xH100 (nodes x GPUs per node), or --run.device cpu"
        errors.append(ConfigError("run.cluster", "local", rule, remedy))
    name, run_dir = "", Path()
    if machine is not None:
        endpoint = "the-first-node:0" if job.run.rendezvous == "auto" else job.run.rendezvous
        planned = changed(job, run={"nodes": nodes, "rendezvous": endpoint})
        try:
            run_dir = Path(resolve_nodes(planned, machine, recipe, base).run_dir)
            run_dir = run_dir.expanduser().absolute()
            name = re.sub("[^a-z0-9]+", "-", run_dir.name.lower())[:40].strip("-") or "run"
        except InvalidConfig as error:
            errors += (
                p
                for p in error.problems
                if p.key not in bad_keys and not bad_keys.intersection(p.depends)
            )
    counts = node_range(changed(job, run={"nodes": nodes})) or range(1, 2)
    request = JobRequest(
        name,
        node_command(recipe, overrides, run_dir, nodes, base.run.nodes_text),
        job,
        (counts[0], counts[-1]),
        devices,
        run_dir,
    )
    if on in CLUSTERS:
        errors += check_paths(request)
        errors += get_cluster(on).find_problems(request)
    if errors:
        raise InvalidConfig(errors)
    return request


def check_paths(request: JobRequest) -> Iterator[ConfigError]:
    """Check that paths outside the job fit into a script or manifest.

    The keys of a job never have control characters, but these paths may.
    """
    paths = {
        "working directory": str(Path.cwd()),
        "recipe": request.words[2],
        "run.dir": str(request.run_dir),
    }
    for key, value in paths.items():
        if not is_one_line(value):
            rule = "has control characters or bytes that are not UTF-8, which a shell could run"
            yield ConfigError(key, value, rule, "use another path")


def node_command(
    recipe: str,
    overrides: Sequence[tuple[str, str]],
    run_dir: Path,
    nodes: str,
    recipe_nodes: str,
) -> tuple[str, ...]:
    """Return the command that every node runs.

    It names the number of nodes only if it must (an elastic range, or a number in the recipe).
    Otherwise each node detects the number, so that users can change it in one place.
    """
    pairs = {
        key: value
        for key, value in overrides
        if not key.startswith("launch.") and key != "run.nodes"
    }
    pairs["run.dir"] = str(run_dir)
    if ":" in nodes or recipe_nodes != "auto":
        pairs["run.nodes"] = nodes
    words = (word for key, value in pairs.items() for word in (f"--{key}", value))
    return ("weft", "train", recipe, *words)


def submit(on: str, request: JobRequest, text: str) -> str:
    """Save the script or manifest in the run directory, submit it, return the job id.

    Raises:
        InvalidConfig: if an earlier job of the run is still active.
        WeftError: if the cluster refuses the job, in which case nothing remains but a recipe in
            SageMaker's bucket; or if the record of a submitted job cannot be written.
    """
    module, run_dir = get_cluster(on), request.run_dir
    if (run_dir / RECORD).is_file():
        earlier = SubmittedJob.load(run_dir)
        status = earlier.status()
        if is_active(status):
            rule = f"already has an active job {earlier.id} ({earlier.on}): {status}"
            remedy = f"run 'weft job cancel {shlex.quote(str(run_dir))}', or use another --run.dir"
            raise InvalidConfig([ConfigError("run.dir", str(run_dir), rule, remedy)])
    new = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    path = run_dir / f"launch{module.FILE_SUFFIX}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        replace_text(path, text)
    except OSError as error:
        raise WeftError(f"{run_dir} cannot be written: {error.strerror}") from error
    try:
        id = module.submit(path, request)
    except BaseException:
        path.unlink()
        for directory in new:
            with suppress(OSError):  # another process has written there
                directory.rmdir()
        raise
    record = {"on": on, "id": id, "file": path.name, "time": time.time()}
    try:
        write_json(run_dir / RECORD, record)
    except OSError as error:
        cause = f"{run_dir / RECORD} cannot be written: {error.strerror}"
        raise WeftError(f"{on} accepted job {id}, but {cause}") from error
    return id


# --------------------------------------------------------------------------- submitted jobs

RECORD = "launch.json"


def is_active(status: str) -> bool:
    """Return True if a status of `Cluster.status` is that of a job that has not ended."""
    return status.startswith(("waiting", "running"))


@dataclass(frozen=True)
class SubmittedJob:
    """A submitted run, as recorded in its directory."""

    run_dir: Path
    on: str
    id: str

    @classmethod
    def load(cls, run_dir: Path) -> SubmittedJob:
        """Read the record of a submitted run.

        Raises:
            InvalidConfig: if the record is missing or damaged.
        """
        try:
            record: dict[str, Any] = json.loads((run_dir / RECORD).read_text("utf-8"))
            if record["on"] not in CLUSTERS:
                raise ValueError(record["on"])
            return cls(run_dir.absolute(), record["on"], record["id"])
        except OSError as error:
            rule = f"has no {RECORD}: {error.strerror}"
            remedy = "name the directory of a run that weft launch has submitted"
            raise InvalidConfig([ConfigError("RUN", str(run_dir), rule, remedy)]) from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            rule = f"has a damaged {RECORD}"
            raise InvalidConfig([ConfigError("RUN", str(run_dir), rule)]) from error

    def status(self) -> str:
        """See `Cluster.status`."""
        return get_cluster(self.on).status(self.id)

    def cancel(self) -> str:
        """See `Cluster.cancel`."""
        return get_cluster(self.on).cancel(self.id)

    def logs(self, follow: bool) -> Iterator[str]:
        """Yield the lines of the job's log, from the run directory or from the cluster.

        The file in the run directory remains when the cluster has forgotten the job.
        """
        path = self.run_dir / f"{self.on}-{self.id}.out"
        if path.is_file() and not (follow and is_active(self.status())):
            with path.open(encoding="utf-8", errors="replace") as lines:
                yield from (line.rstrip("\n") for line in lines)
        else:
            yield from get_cluster(self.on).logs(self.id, follow)
