"""Submit a recipe to a cluster: render, check and submit a script or manifest.

Each cluster is a module (`CLUSTERS`) with the functions of `Cluster`; this module has what they
share.  A script or manifest is short and only runs the same ``weft train`` command on every node;
`weft.train.environment` detects the rank of each process there.  Users can therefore read, edit,
and submit the file without weft.
"""

from __future__ import annotations

import importlib
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from weft.cluster import FAILED, INTERRUPTED, REQUEUE, UNHEALTHY, USAGE_ERROR
from weft.config.errors import MISSING, ConfigError, ConfigErrors, InvalidConfig, WeftError, suggest
from weft.config.escaping import is_one_line
from weft.config.files import replace_text, write_json
from weft.config.reader import read_job, recipe_names
from weft.config.schema import Job, RunSection, flatten
from weft.config.schema import replace as changed
from weft.plan.devices import CPU_DEVICE, parse_cluster
from weft.plan.plan import Machine
from weft.plan.plan_text import cluster_machine
from weft.plan.resolve import node_range, resolve_nodes
from weft.train.job_checks import check_data_is_named

CLUSTERS = {
    "slurm": "weft.cluster.slurm",
    "kubernetes": "weft.cluster.kubernetes",
    "sagemaker": "weft.cluster.sagemaker",
    "skypilot": "weft.cluster.skypilot",
}
RUN_DIR = "run.dir"


@dataclass(frozen=True)
class JobRequest:
    """A run to submit, and the resources that it needs.

    Args:
        name: name of the run for the scheduler: a to z, digits and '-', at most 40 characters;
            empty if a configuration error leaves the run without a directory.
        recipe: name or path of the recipe.
        overrides: the keys on the command line of every node, see `node_overrides`.
        job: the recipe with all overrides.
        nodes: minimum and maximum number of nodes.
        devices: GPUs per node; 0: request none.
        run_dir: directory on a file system that all nodes share.
    """

    name: str
    recipe: str
    overrides: Mapping[str, str]
    job: Job
    nodes: tuple[int, int]
    devices: int
    run_dir: Path

    @property
    def time_limit_seconds(self) -> int:
        """``launch.time_limit``, if `check_duration` finds no error."""
        return parse_duration(self.job.launch.time_limit)

    def command(self, recipe: str, **changes: str) -> list[str]:
        """Return the words of the command, with this recipe and with changed keys."""
        pairs = {**self.overrides, **changes}
        words = (word for key, value in pairs.items() for word in (f"--{key}", value))
        return ["weft", "train", recipe, *words]


class Cluster(Protocol):
    """The functions of a module in `CLUSTERS`."""

    FILE_SUFFIX: str  # of the script or manifest: '.sh', '.yaml', '.json'

    def find_errors(self, request: JobRequest) -> list[ConfigError]:
        """Return the configuration errors of a request."""

    def render(self, request: JobRequest) -> str:
        """Return the script or manifest."""

    def check(self, text: str) -> list[str]:
        """Return the errors that the cluster's tools or its published schema find."""

    def submit(self, path: Path, request: JobRequest) -> str:
        """Submit the file; return the job id."""

    def status(self, id: str) -> str:
        """Return one line: 'waiting...', 'running...' with nodes, or how the job ended."""

    def logs(self, id: str, run_dir: Path, follow: bool) -> Iterator[str]:
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
    try:
        nodes, devices, machine = describe_nodes(job.run, detect_machine)
        endpoint = "the-first-node:0" if job.run.rendezvous == "auto" else job.run.rendezvous
        planned = changed(job, run={"nodes": nodes, "rendezvous": endpoint})
        plan = resolve_nodes(planned, machine, recipe, base)
        run_dir = Path(plan.run_dir).expanduser().absolute()
        errors += check_data_is_named(plan)
        name = re.sub("[^a-z0-9]+", "-", run_dir.name.lower())[:40].strip("-") or "run"
    except InvalidConfig as error:
        errors.add_independent(error.errors)
    counts = node_range(changed(job, run={"nodes": nodes})) or range(1, 2)
    request = JobRequest(
        name,
        recipe,
        node_overrides(overrides, run_dir, nodes, base.run.nodes_text),
        job,
        (counts[0], counts[-1]),
        devices,
        run_dir,
    )
    if on in CLUSTERS:
        errors += check_paths(request)
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
        if not key.startswith("launch.") and key != "run.nodes"
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
    return SubmittedJob(run_dir, on, id)


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

    def is_active(self) -> bool:
        """Return True if the job has not ended."""
        return is_active(self.status())

    def cancel(self) -> str:
        """See `Cluster.cancel`."""
        return get_cluster(self.on).cancel(self.id)

    def logs(self, follow: bool) -> Iterator[str]:
        """See `Cluster.logs`."""
        return get_cluster(self.on).logs(self.id, self.run_dir, follow)


# --------------------------------------------------------------------------- launch section


def parse_duration(text: str) -> int:
    """Return the seconds of ``D-HH:MM:SS`` or ``HH:MM:SS``.

    Raises:
        ValueError: if the text has neither form.
    """
    match = re.fullmatch(r"(?:(\d{1,4})-)?(\d{1,4}):([0-5]\d):([0-5]\d)", text)
    if match is None:
        raise ValueError("must be D-HH:MM:SS or HH:MM:SS")
    days, hours, minutes, seconds = (int(group or 0) for group in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def check_duration(text: str, key: str = "launch.time_limit") -> list[ConfigError]:
    """Return the errors of a key that is a duration."""
    try:
        rule = "" if parse_duration(text) else "must be longer than 0 seconds"
    except ValueError as error:
        rule = str(error)
    return [ConfigError(key, text, rule)] if rule else []


class Option(NamedTuple):
    """One of ``launch.options``: its meaning, and the rule of its values."""

    meaning: str
    pattern: str = ""
    rule: str = ""
    remedy: str = ""


# For options that are integers, or booleans.
INTEGER_PATTERN, BOOLEAN_RULE = "[0-9]+", ("true|false", "must be true or false")


def check_options(
    request: JobRequest, known: Mapping[str, Option], required: Sequence[str], pattern: str
) -> ConfigErrors:
    """Return the errors of the launch section, for clusters with a manifest.

    Args:
        request: has the job whose launch section is checked.
        known: the options of the cluster.
        required: names of the required options.
        pattern: regular expression that all values must match.
    """
    launch, errors = request.job.launch, ConfigErrors(request.job)
    for name, value in launch.options.items():
        key = f"launch.options.{name}"
        if name not in known:
            rule = "is not an option of this cluster"
            errors.add(key, rule, suggest(name, known))
        elif not re.fullmatch(pattern, value):
            errors.add(key, f"has invalid characters; it must match {pattern}")
        elif known[name].pattern and not re.fullmatch(known[name].pattern, value):
            errors.add(key, known[name].rule, known[name].remedy)
    for name in required:
        if name not in launch.options:
            remedy = f"give --launch.options {name}=...: {known[name].meaning}"
            errors.add(f"launch.options.{name}", "is missing", remedy)
    errors += check_duration(launch.time_limit)
    return errors


def check_fixed_nodes(request: JobRequest, rule: str) -> list[ConfigError]:
    """Return an error with this rule if the request has a range of nodes."""
    minimum, maximum = request.nodes
    if minimum == maximum:
        return []
    return [ConfigError("run.nodes", f"{minimum}:{maximum}", rule, f"use {maximum}")]


def check_name(request: JobRequest, location: str) -> ConfigErrors:
    """Check that the cluster accepts the name of the run directory.

    The nodes store the run under this name, so two runs whose names the cluster maps to one name
    would overwrite each other.

    Args:
        request: has the run directory, and the name that the cluster accepts.
        location: where the nodes store the run, for the message.
    """
    errors = ConfigErrors()
    if request.name and request.run_dir.name != request.name:
        rule = f"ends in a name that the cluster does not accept: the run would be {location}"
        remedy = f"use another --run.dir, such as {request.run_dir.with_name(request.name)} "
        remedy += "(a to z, digits and single '-', at most 40 characters)"
        errors.add(RUN_DIR, rule, remedy, value=str(request.run_dir))
    return errors


# --------------------------------------------------------------------------- scripts and manifests


def format_command(words: Sequence[str], indent: str) -> str:
    """Return the command in shell syntax, with one option per line."""
    pairs = zip(words[3::2], words[4::2], strict=True)
    return f" \\\n{indent}".join(shlex.join(part) for part in (words[:3], *pairs))


def build_script(setup: Sequence[str], command: str) -> str:
    """Return a shell script that runs the lines of ``setup``, then the command."""
    return "\n".join(["set -e", *setup, f"exec {command}"])


def standalone_recipe(request: JobRequest) -> str | None:
    """Return the recipe with all overrides as TOML; None for a shipped recipe.

    The file has neither run.dir nor run.nodes, which are on the command line of each node.
    """
    if request.recipe in recipe_names():
        return None
    import tomli_w

    defaults, tree = flatten(Job()), dict[str, dict[str, Any]]()
    for key, value in flatten(request.job).items():
        section, _, name = key.partition(".")
        is_excluded = section == "launch" or key in (RUN_DIR, "run.nodes")
        if key not in defaults or (value != defaults[key] and not is_excluded):
            tree.setdefault(section, {})[name] = value
    return tomli_w.dumps(tree)


def render_template(template: str, quote: Callable[[Any], str], **values: object) -> str:
    """Render a template of this package.

    Args:
        template: file in ``templates/``.
        quote: makes each inserted value one word of the document's language.  Only ``Markup``
            is inserted as it is: what macros return, and what the caller has quoted.
        **values: variables of the template, which also has weft's exit statuses.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        autoescape=True,  # makes macros return Markup
        finalize=lambda value: value if isinstance(value, Markup) else Markup(quote(value)),
        keep_trailing_newline=True,
        loader=PackageLoader("weft.cluster"),
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    environment.globals |= {"FAILED": FAILED, "REQUEUE": REQUEUE, "INTERRUPTED": INTERRUPTED}
    environment.globals |= {"UNHEALTHY": UNHEALTHY, "USAGE_ERROR": USAGE_ERROR}
    return environment.get_template(template).render(values)


def render_manifest(
    template: str, request: JobRequest, location: str, submit_line: str, **values: object
) -> str:
    """Render a template of a YAML manifest; return its documents under a comment.

    Args:
        template: see `render_template`.
        request: its name and ``launch.options`` are variables of the template.
        location: where the nodes store the run, for the comment.
        submit_line: shell command that submits the manifest, for the comment.
        **values: further variables.
    """
    import yaml

    style: dict[str, Any] = {"default_style": '"', "default_flow_style": True, "width": math.inf}
    variables = {"name": request.name, "options": request.job.launch.options} | values
    text = render_template(
        template, lambda value: yaml.safe_dump(value, **style).strip(), **variables
    )
    head = f"Nodes of the run {request.name}; its directory is {location}.\n"
    head += f"{request.run_dir} on the submitting machine only has the record of this launch."
    return to_yaml(list(yaml.safe_load_all(text)), f"{head}\n{submit_line}")


def to_yaml(documents: Sequence[Mapping[str, Any]], comment: str) -> str:
    """Return YAML documents under a comment, with the given order of keys."""
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        """Dumper that writes multi-line strings as blocks."""

    def represent_string(dumper: Any, value: str) -> Any:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, represent_string)
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    body = yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=math.inf)
    return head + str(body)


def warn_unchecked(schema: str, remedy: str) -> list[str]:
    """Warn that a file was not checked against a schema; return no errors."""
    print(f"weft: not checked against {schema}; to enable the check: {remedy}", file=sys.stderr)
    return []


# --------------------------------------------------------------------------- command-line tools


class ToolError(WeftError):
    """A cluster's command-line tool failed; has the tool's own message."""


def run_cli(*words: str, remedy: str) -> str:
    """Run a cluster's command-line tool and return its output.

    Raises:
        ToolError: if the tool fails.
        WeftError: if the tool is not installed.
    """
    result = subprocess.run(
        _resolve_executable(words, remedy),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if result.returncode:
        raise ToolError(f"{shlex.join(words)}: {(result.stderr or result.stdout).strip()}")
    return result.stdout


def stream_cli(*words: str, remedy: str) -> Iterator[str]:
    """Run a command-line tool and yield its lines; closing the iterator ends it.

    Raises:
        WeftError: if the tool is not installed, or fails; its message is on stderr.
    """
    process = subprocess.Popen(
        _resolve_executable(words, remedy), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            yield line.rstrip("\n")
        if status := process.wait():
            raise WeftError(f"{shlex.join(words)}: exited with status {status}")
    finally:
        process.kill()
        process.wait()


def _resolve_executable(words: Sequence[str], remedy: str) -> list[str]:
    path = shutil.which(words[0])
    if path is None:
        raise WeftError(f"{words[0]} is not installed, or not in $PATH; {remedy}")
    return [path, *words[1:]]
