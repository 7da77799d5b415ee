"""Ask a cluster for nodes that run a recipe: write what it takes, check it, show it, hand it in.

A cluster is a module beside this one (`CLUSTERS`) with the functions of `Cluster`.  What they write
is short and starts nothing but ``weft train`` with the same words on every node: who a process is
among the others, `weft.train.environment` finds out there.  So what is written can be read, kept, changed
by hand and handed in without weft.
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
from weft.config.schema import Job
from weft.config.schema import replace as changed
from weft.plan.devices import CPU_DEVICE, parse_cluster
from weft.plan.plan_text import cluster_machine
from weft.plan.resolve import Machine, node_range, resolve_nodes

CLUSTERS = {
    "slurm": "weft.cluster.slurm",
    "kubernetes": "weft.cluster.kubernetes",
    "sagemaker": "weft.cluster.sagemaker",
    "skypilot": "weft.cluster.skypilot",
}


@dataclass(frozen=True)
class Request:
    """What is to run, and on what.

    Args:
        name: of the run, as every scheduler takes it: a to z, digits and '-', at most 40; empty
            where a mistake leaves the run without a directory.
        words: of the command: ``("weft", "train", recipe, "--section.key", "value", ...)``.
        nodes: the fewest and the most.
        devices: GPUs of a node; 0: none are asked for.
        run_dir: on a file system that all nodes share.
    """

    name: str
    words: tuple[str, ...]
    job: Job
    nodes: tuple[int, int]
    devices: int
    run_dir: Path


class Cluster(Protocol):
    """A module of `CLUSTERS`."""

    ENDING: str  # of the file that is written: '.sh', '.yaml', '.json'

    def problems(self, request: Request) -> list[ConfigError]:
        """What cannot be asked for here."""

    def render(self, request: Request) -> str:
        """The script or manifest."""

    def check(self, text: str) -> list[str]:
        """What is wrong with it, by the cluster's own tools or its published schema."""

    def submit(self, path: Path, request: Request) -> str:
        """Hand the file in; the job's id."""

    def status(self, id: str) -> str:
        """One line that begins with 'waiting' or 'running' (on which nodes), or how it ended."""

    def logs(self, id: str, follow: bool) -> Iterator[str]:
        """Lines that the job has printed."""

    def stop(self, id: str) -> str:
        """Have it save, where the cluster gives time for it, and end; what was done, for people."""


def cluster(name: str) -> Cluster:
    """The module of a cluster."""
    return cast(Cluster, importlib.import_module(CLUSTERS[name]))


# --------------------------------------------------------------------------- asking


def request(
    on: str | None,
    recipe: str,
    overrides: Sequence[tuple[str, str]],
    problems: Sequence[ConfigError],
    here: Callable[[str], Machine],
) -> Request:
    """What is to be asked of a cluster; all that can be known of it here has been checked.

    Args:
        on: the name of the cluster.
        recipe, overrides: see `read_job`.
        problems: what was wrong with the command line already.
        here: this machine, from the value of ``run.device``.

    Raises:
        InvalidConfig: with every mistake.
    """
    found = list(problems)
    if on not in CLUSTERS:
        rule = "is no kind of cluster" if on else "is missing"
        remedy = suggest(on or "", CLUSTERS)
        found.append(ConfigError("--on", on or MISSING, rule, remedy))
    job, base, wrong = read_job(recipe, overrides)
    found += wrong
    if any(problem.key in ("recipe", "extends") for problem in found):
        raise InvalidConfig(found)  # the rest would judge defaults that nobody chose
    bad = {problem.key for problem in found}
    nodes, machine, devices = str(job.run.nodes), None, 0
    if job.run.cluster != "local":
        parsed = parse_cluster(job.run.cluster)
        if isinstance(parsed, ConfigError):
            found.append(parsed)
        else:
            nodes = str(parsed.nodes) if nodes == "auto" else nodes
            devices = 0 if parsed.device_name == CPU_DEVICE else parsed.devices
            machine = replace(cluster_machine(parsed), world_size=None, local_world_size=None)
    elif job.run.device == "cpu":
        machine = here("cpu")
    else:
        rule = "does not tell what a node has"
        remedy = "use --run.cluster 2x8xH100 (nodes, GPUs of each), or --run.device cpu"
        found.append(ConfigError("run.cluster", "local", rule, remedy))
    name, folder = "", Path()
    if machine is not None:
        place = "the-first-node:0" if job.run.rendezvous == "auto" else job.run.rendezvous
        planned = changed(job, run={"nodes": nodes, "rendezvous": place})
        try:
            folder = Path(resolve_nodes(planned, machine, recipe, base).run_dir)
            folder = folder.expanduser().absolute()
            name = re.sub("[^a-z0-9]+", "-", folder.name.lower())[:40].strip("-") or "run"
        except InvalidConfig as error:
            found += (
                p for p in error.problems if p.key not in bad and not bad.intersection(p.depends)
            )
    counts = node_range(changed(job, run={"nodes": nodes})) or range(1, 2)
    asked = Request(
        name,
        words_of(recipe, overrides, folder, nodes, str(base.run.nodes)),
        job,
        (counts[0], counts[-1]),
        devices,
        folder,
    )
    if on in CLUSTERS:
        found += check_outside(asked)
        found += cluster(on).problems(asked)
    if found:
        raise InvalidConfig(found)
    return asked


def check_outside(asked: Request) -> Iterator[ConfigError]:
    """What cannot be written into a script or manifest of what the job itself does not choose: the
    keys of a job have no control characters."""
    outside = {
        "working directory": str(Path.cwd()),
        "recipe": asked.words[2],
        "run.dir": str(asked.run_dir),
    }
    for key, value in outside.items():
        if not is_one_line(value):
            rule = "has control characters, or bytes that are not UTF-8: the rest of a line would"
            yield ConfigError(key, value, f"{rule} be taken for a command", "use another path")


def words_of(
    recipe: str, overrides: Sequence[tuple[str, str]], folder: Path, nodes: str, usual: str
) -> tuple[str, ...]:
    """The command of every node.

    How many nodes there are it finds out there, so that the number can be changed in one place;
    but not how few may do.
    """
    pairs = {
        key: value
        for key, value in overrides
        if not key.startswith("launch.") and key != "run.nodes"
    }
    pairs["run.dir"] = str(folder)
    if ":" in nodes or usual != "auto":
        pairs["run.nodes"] = nodes
    words = (word for key, value in pairs.items() for word in (f"--{key}", value))
    return ("weft", "train", recipe, *words)


def submit(on: str, asked: Request, text: str) -> str:
    """Keep the script or manifest in the run's folder and hand it in; the job's id.

    Raises:
        InvalidConfig: if an earlier job of the run has not ended.
        WeftError: if it was not taken, and nothing is left behind then but a recipe in SageMaker's
            bucket; or if it was, and that cannot be noted.
    """
    module, folder = cluster(on), asked.run_dir
    if (folder / RECORD).is_file():
        earlier = Launched.of(folder)
        said = earlier.status()
        if alive(said):
            rule = f"job {earlier.id} ({earlier.on}) is already there for this run: {said}"
            remedy = f"weft launch stop {shlex.quote(str(folder))}, or use another --run.dir"
            raise InvalidConfig([ConfigError("run.dir", str(folder), rule, remedy)])
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    path = folder / f"launch{module.ENDING}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(path, text)
    except OSError as error:
        raise WeftError(f"{folder}: cannot be written: {error.strerror}") from error
    try:
        id = module.submit(path, asked)
    except BaseException:
        path.unlink()
        for made in new:
            with suppress(OSError):  # somebody has put something there
                made.rmdir()
        raise
    record = {"on": on, "id": id, "file": path.name, "time": time.time()}
    try:
        write_json(folder / RECORD, record)
    except OSError as error:
        rule = f"{folder / RECORD} cannot be written: {error.strerror}"
        raise WeftError(f"{on} has taken it, as job {id}, but {rule}") from error
    return id


# --------------------------------------------------------------------------- afterwards

RECORD = "launch.json"


def alive(status: str) -> bool:
    """Whether what `Cluster.status` says is of a job that has not ended."""
    return status.startswith(("waiting", "running"))


@dataclass(frozen=True)
class Launched:
    """A run that was handed to a cluster, by the record in its folder."""

    folder: Path
    on: str
    id: str

    @classmethod
    def of(cls, folder: Path) -> Launched:
        """Raises InvalidConfig if ``folder`` has no such record."""
        try:
            record: dict[str, Any] = json.loads((folder / RECORD).read_text("utf-8"))
            if record["on"] not in CLUSTERS:
                raise ValueError(record["on"])
            return cls(folder.absolute(), record["on"], record["id"])
        except OSError as error:
            rule = f"has no {RECORD}: {error.strerror}"
            remedy = "name the folder of a run that weft launch has handed in"
            raise InvalidConfig([ConfigError("RUN", str(folder), rule, remedy)]) from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InvalidConfig(
                [ConfigError("RUN", str(folder), f"{RECORD} is damaged")]
            ) from error

    def status(self) -> str:
        """See `Cluster.status`."""
        return cluster(self.on).status(self.id)

    def stop(self) -> str:
        """See `Cluster.stop`."""
        return cluster(self.on).stop(self.id)

    def logs(self, follow: bool) -> Iterator[str]:
        """What a job writes into the run's folder outlives what the cluster knows of it."""
        kept = self.folder / f"{self.on}-{self.id}.out"
        if kept.is_file() and not (follow and alive(self.status())):
            with kept.open(encoding="utf-8", errors="replace") as lines:
                yield from (line.rstrip("\n") for line in lines)
        else:
            yield from cluster(self.on).logs(self.id, follow)
