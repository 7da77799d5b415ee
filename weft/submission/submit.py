"""Submit a recipe to a cluster: render, check and submit a script or manifest.

Each cluster is a module (`CLUSTERS`) with the functions of `weft.submission.job_request.Cluster`.
A script or manifest is short and only runs the same ``weft train`` command on every node;
`weft.preparation.environment` detects the rank of each process there.  Users can therefore read,
edit, and submit the file without weft.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.config.errors import MISSING, ConfigError, ConfigErrors, InvalidConfig, WeftError, suggest
from weft.config.escaping import is_one_line
from weft.config.files import expand_path, replace_text, write_json
from weft.config.reader import read_job, recipe_slug
from weft.config.schema import Job, RunSection
from weft.config.schema import replace as changed
from weft.config.storage import open_directory
from weft.conversion.adapter_path import adopt_paths
from weft.planning.devices import CPU_DEVICE, parse_cluster
from weft.planning.plan import Machine
from weft.planning.plan_text import cluster_machine
from weft.planning.resolve import node_range, resolve_nodes
from weft.preparation.job_checks import check_data_is_named
from weft.records.run_cost import LAUNCH_FILE
from weft.submission.job_placement import check_job_paths, find_uploads
from weft.submission.job_request import RUN_DIR, Cluster, JobRequest, is_active


def _load_slurm() -> Cluster:
    from weft.submission import slurm

    return slurm


def _load_kubernetes() -> Cluster:
    from weft.submission import kubernetes

    return kubernetes


def _load_sagemaker() -> Cluster:
    from weft.submission import sagemaker

    return sagemaker


def _load_skypilot() -> Cluster:
    from weft.submission import skypilot

    return skypilot


# Imported when it is used: most commands submit nothing.
CLUSTERS: dict[str, Callable[[], Cluster]] = {
    "slurm": _load_slurm,
    "kubernetes": _load_kubernetes,
    "sagemaker": _load_sagemaker,
    "skypilot": _load_skypilot,
}


def get_cluster(name: str) -> Cluster:
    """Return the module of a cluster."""
    return CLUSTERS[name]()


# --------------------------------------------------------------------------- submission


def build_request(
    on: str | None,
    recipe: str,
    overrides: Sequence[tuple[str, str]],
    cli_errors: Sequence[ConfigError],
    detect_machine: Callable[[RunSection], Machine],
) -> JobRequest:
    """Build and check a request, as far as that is possible on this machine.

    Args:
        on: the name of the cluster.
        recipe: see `read_job`.
        overrides: see `read_job`.
        cli_errors: errors that the command line already has.
        detect_machine: returns this machine, by ``run.device``.

    Raises:
        InvalidConfig: with every error.
    """
    job, base, errors = read_job(recipe, overrides, cli_errors)
    if on not in CLUSTERS:
        rule = "is not a known cluster" if on else "is missing"
        errors.add("--on", rule, suggest(on or "", CLUSTERS), value=on or MISSING)
    errors.raise_any("recipe", "extends")  # without a recipe there are only defaults to check
    name, run_dir, nodes, devices = "", Path(), job.run.nodes_text, 0
    plan = machine = None
    try:
        nodes, devices, machine = describe_nodes(job.run, detect_machine)
        endpoint = "the-first-node:0" if job.run.rendezvous == "auto" else job.run.rendezvous
        planned = changed(job, run={"nodes": nodes, "rendezvous": endpoint})
        plan = resolve_nodes(planned, machine, recipe, base, adopt_paths)
        run_dir = expand_path(plan.run_dir).absolute()
        errors += check_data_is_named(plan)
        name = format_name(run_dir.name, "run")
    except InvalidConfig as error:
        errors.add_independent(map(explain_absent_model, error.errors))
    sent, uploads = find_uploads(on, job, name) if on in CLUSTERS else ({}, {})
    job = _with_urls(job, sent)
    counts = node_range(changed(job, run={"nodes": nodes})) or range(1, 2)
    request = JobRequest(
        name,
        recipe,
        node_overrides([*overrides, *sent.items()], run_dir, nodes, base.run.nodes_text),
        job,
        (counts[0], counts[-1]),
        devices,
        run_dir,
        plan,
        machine,
        uploads,
    )
    if on in CLUSTERS:
        errors += check_paths(request)
        errors += check_job_paths(on, job)
        errors += get_cluster(on).find_errors(request)
    errors.raise_any()
    return request


def format_name(text: str, default: str) -> str:
    """Return a text as the name of a job: see `JobRequest`."""
    return re.sub("[^a-z0-9]+", "-", text.lower())[:40].strip("-") or default


def explain_absent_model(error: ConfigError) -> ConfigError:
    """Return the error of a model that only the nodes have with the remedy for that."""
    is_absent = error.key == "model.path" and error.rule == "does not exist"
    if not is_absent or not str(error.value).startswith("/"):
        return error
    remedy = "for a path of the nodes, give --model.config VALUE: a copy of its config.json"
    return replace(error, rule="does not exist on this machine", remedy=remedy)


def upload_files(request: JobRequest) -> None:
    """Upload the files of a request.

    Raises:
        WeftError: if the bucket cannot be written.
    """
    for url, file in request.uploads.items():
        try:
            open_directory(url).write_bytes(file.read_bytes())
        except Exception as error:  # of the store's client
            if isinstance(error, WeftError):
                raise
            raise WeftError(f"{file} cannot be uploaded to {url}: {error}") from error


def _with_urls(job: Job, urls: Mapping[str, str]) -> Job:
    """Return a job with URLs in place of files of this machine."""
    for key, url in urls.items():
        section, _, field = key.partition(".")
        job = changed(job, **{section: {field: url}})
    return job


def build_preparation(
    on: str, recipe: str, overrides: Sequence[tuple[str, str]], job: Job, num_workers: int
) -> JobRequest:
    """Build and check the request of a job whose nodes prepare the data together.

    Args:
        on: the name of the cluster.
        recipe: see `read_job`.
        overrides: the keys of the command line.
        job: the recipe with all overrides.
        num_workers: number of nodes.

    Raises:
        InvalidConfig: with every error.
    """
    run = {"device": "cpu", "cluster": "local", "nodes": str(num_workers)}
    job = changed(job, run=run, resilience={"preflight": False})
    run_dir = expand_path(
        f"runs/prepare-{recipe_slug(recipe)}" if job.run.dir == "auto" else job.run.dir
    )
    run_dir = run_dir.absolute()
    name = format_name(run_dir.name, "prepare")
    pairs = {key: value for key, value in overrides if not key.startswith(("launch.", "run."))}
    sent, uploads = find_uploads(on, job, name)
    job, pairs = _with_urls(job, sent), pairs | sent
    nodes, program = (num_workers, num_workers), ("data", "prepare")
    request = JobRequest(
        *(name, recipe, pairs, job, nodes, 0, run_dir), uploads=uploads, program=program
    )
    errors = ConfigErrors(check_paths(request))
    errors += check_job_paths(on, job)
    errors += get_cluster(on).find_errors(request)
    errors.raise_any()
    return request


def describe_nodes(
    run: RunSection, detect_machine: Callable[[RunSection], Machine]
) -> tuple[str, int, Machine]:
    """Return the number of nodes, the GPUs per node, and the hardware of a node.

    Raises:
        InvalidConfig: if the section does not describe the nodes.
    """
    if run.cluster != "local":
        cluster = parse_cluster(run.cluster)
        nodes = str(cluster.num_nodes) if run.nodes_text == "auto" else run.nodes_text
        devices = 0 if cluster.device_name == CPU_DEVICE else cluster.devices_per_node
        machine = replace(cluster_machine(cluster), world_size=None, local_world_size=None)
        return nodes, devices, machine
    if run.device != "cpu":
        rule = "does not describe the nodes"
        remedy = "use --run.cluster 2x8xH100 (nodes x GPUs per node), or --run.device cpu"
        raise InvalidConfig([ConfigError("run.cluster", "local", rule, remedy)])
    return run.nodes_text, 0, detect_machine(run)


def check_paths(request: JobRequest) -> ConfigErrors:
    """Check that paths outside the job fit into a script or manifest.

    The keys of a job never have control characters, but these paths may.
    """
    paths = {
        "working directory": str(Path.cwd()),
        "recipe": request.recipe,
        "run.dir": str(request.run_dir),
    }
    errors = ConfigErrors()
    for key, value in paths.items():
        if not is_one_line(value):
            rule = "has control characters or bytes that are not UTF-8, which a shell could run"
            errors.add(key, rule, "use another path", value=value)
    return errors


def node_overrides(
    overrides: Sequence[tuple[str, str]], run_dir: Path, nodes: str, recipe_nodes: str
) -> dict[str, str]:
    """Return the overrides in the command that every node runs.

    They name the number of nodes only if they must (an elastic range, or a number in the recipe).
    Otherwise each node detects the number, so that users can change it in one place.
    """
    pairs = {
        key: value
        for key, value in overrides
        if not key.startswith("launch.") and key not in ("run.nodes", "model.config")
    }
    pairs[RUN_DIR] = str(run_dir)
    if ":" in nodes or recipe_nodes != "auto":
        pairs["run.nodes"] = nodes
    return pairs


def check_text(on: str, text: str) -> None:
    """Check a script or manifest with the cluster's tools or its published schema.

    Raises:
        InvalidConfig: with every rule that it breaks.
    """
    if rules := get_cluster(on).check(text):
        raise InvalidConfig(
            ConfigError(f"--on {on}", MISSING, f"rejects the job: {rule}") for rule in rules
        )


def submit(on: str, request: JobRequest, text: str) -> SubmittedJob:
    """Save the script or manifest in the run directory, submit it, return the job.

    Raises:
        InvalidConfig: if an earlier job of the run is still active.
        WeftError: if the cluster refuses the job, in which case nothing remains but a recipe in
            SageMaker's bucket; or if the record of a submitted job cannot be written.
    """
    module, run_dir = get_cluster(on), request.run_dir
    if (run_dir / LAUNCH_FILE).is_file() and _find_original(run_dir) is None:
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
        upload_files(request)
        id = module.submit(path, request)
    except BaseException:
        path.unlink()
        for directory in new:
            with suppress(OSError):  # another process has written there
                directory.rmdir()
        raise
    write_record(run_dir, on, id, path.name, request.job.launch.price_per_gpu_hour)
    return SubmittedJob(run_dir, on, id)


def write_record(
    run_dir: Path, on: str, id: str, file: str, price: float, **more: str | float
) -> None:
    """Write the record of a submitted job.

    Raises:
        WeftError: if it cannot be written.
    """
    record = {
        "on": on,
        "id": id,
        "file": file,
        "time": time.time(),
        "run_dir": str(run_dir.resolve()),  # only to recognize a copy
        "price_per_gpu_hour": price,
        **more,
    }
    try:
        write_json(run_dir / LAUNCH_FILE, record)
    except OSError as error:
        cause = f"{run_dir / LAUNCH_FILE} cannot be written: {error.strerror}"
        raise WeftError(f"{on} accepted job {id}, but {cause}") from error


# --------------------------------------------------------------------------- submitted jobs


def _find_original(run_dir: Path) -> Path | None:
    """Return the submitted directory of which this one is a copy; None if it is none.

    A moved directory is no copy: its job is its own.
    """
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        original = Path(json.loads((run_dir / LAUNCH_FILE).read_text("utf-8"))["run_dir"])
        if (original / LAUNCH_FILE).is_file() and not original.samefile(run_dir):
            return original
    return None


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
            record: dict[str, Any] = json.loads((run_dir / LAUNCH_FILE).read_text("utf-8"))
            if record["on"] not in CLUSTERS:
                raise ValueError(record["on"])
            if original := _find_original(run_dir):
                rule = f"is a copy of {original}, whose job {LAUNCH_FILE} names"
                command = f"weft launch {shlex.quote(str(run_dir))} --on {record['on']}"
                remedy = f"name {original}, or submit the copy: {command}"
                raise InvalidConfig([ConfigError("RUN", str(run_dir), rule, remedy)])
            return cls(run_dir.absolute(), record["on"], record["id"])
        except OSError as error:
            rule = f"has no {LAUNCH_FILE}: {error.strerror}"
            remedy = "name the directory of a run that weft launch has submitted"
            raise InvalidConfig([ConfigError("RUN", str(run_dir), rule, remedy)]) from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            rule = f"has a damaged {LAUNCH_FILE}"
            remedy = "use the cluster's own commands for this job, or submit the run again"
            raise InvalidConfig([ConfigError("RUN", str(run_dir), rule, remedy)]) from error

    def status(self) -> str:
        """See `Cluster.status`."""
        return get_cluster(self.on).status(self.id)

    def is_active(self) -> bool:
        """Return True if the job has not ended."""
        return is_active(self.status())

    def resume(self) -> SubmittedJob:
        """Submit the job again after it has ended; the run resumes from its checkpoint.

        The file of the job is submitted as it is in the run directory, with the user's changes.

        Raises:
            InvalidConfig: if the job has not ended, or its file is gone.
        """
        record = json.loads((self.run_dir / LAUNCH_FILE).read_text("utf-8"))
        module = get_cluster(self.on)
        path = self.run_dir / record.get("file", f"launch{module.FILE_SUFFIX}")
        path = Path(os.path.normpath(path))  # an array's is in the directory of its comparison
        rule = remedy = ""
        if is_active(status := module.status(self.id)):
            rule, remedy = f"has an active job {self.id}: {status}", "wait, or run weft job cancel"
        elif re.fullmatch("(ended: )?(complete|completed|succeeded)(:.*)?", status.lower()):
            rule = f"has a job that has completed, {self.id}: there is nothing to resume"
            remedy = "to train longer, use weft launch with more train.steps"
        elif not path.is_file():
            rule, remedy = f"has no {path.name} to submit again", "use weft launch"
        if rule:
            raise InvalidConfig([ConfigError("RUN", str(self.run_dir), rule, remedy)])
        id = module.resubmit(path, self.id)
        price, more = float(record.get("price_per_gpu_hour", 0.0)), {}
        if "log" in record:
            more["log"] = record["log"].replace(self.id, id)
        write_record(self.run_dir, self.on, id, record.get("file", path.name), price, **more)
        return SubmittedJob(self.run_dir, self.on, id)

    def cancel(self) -> str:
        """See `Cluster.cancel`."""
        return get_cluster(self.on).cancel(self.id)

    def logs(self, follow: bool) -> Iterator[str]:
        """See `Cluster.logs`."""
        return get_cluster(self.on).logs(self.id, self.run_dir, follow)
