"""A run to submit, and what the modules of clusters share to render and submit it."""

from __future__ import annotations

import math
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from weft.config.errors import ConfigError, ConfigErrors, WeftError
from weft.config.exit_statuses import FAILED, INTERRUPTED, REQUEUE, UNHEALTHY, USAGE_ERROR
from weft.config.reader import recipe_names
from weft.config.schema import Job, flatten
from weft.planning.instance_types import find_instance_type
from weft.planning.plan import Machine, Plan
from weft.preparation.secrets import REFERENCES_VARIABLE, encode_references
from weft.submission.job_placement import RUNS, Placement, make_placement, merge_documents

RUN_DIR = "run.dir"


class TrialTask(NamedTuple):
    """A trial of a comparison: its number in a job array, name, files and seed."""

    number: int
    name: str
    run: Path
    recipe: Path
    seed: int


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
        plan: the plan of the run, if it has no error.
        machine: the hardware of the nodes.
        uploads: files of this machine that the nodes read in ``launch.bucket``, by their URLs.
        program: command of weft that every node runs.
        trials: the tasks of a job array; ``run_dir`` is then the directory of the comparison.
        max_running: tasks that run at the same time; 0: no limit.
    """

    name: str
    recipe: str
    overrides: Mapping[str, str]
    job: Job
    nodes: tuple[int, int]
    devices: int
    run_dir: Path
    plan: Plan | None = None
    machine: Machine | None = None
    uploads: Mapping[str, Path] = field(default_factory=dict)
    program: Sequence[str] = ("train",)
    trials: Sequence[TrialTask] = ()
    max_running: int = 0

    @property
    def trains(self) -> bool:
        """Return True if the nodes train, and do not only prepare the data."""
        return tuple(self.program) == ("train",)

    @property
    def compares(self) -> bool:
        """Return True if the job summarizes a comparison."""
        return tuple(self.program) == ("compare",)

    @property
    def time_limit_seconds(self) -> int:
        """``launch.time_limit``, if `check_duration` finds no error."""
        return parse_duration(self.job.launch.time_limit)

    @cached_property
    def placement(self) -> Placement:
        """The parsed keys of ``[launch]``."""
        return make_placement(self.job.launch)

    @cached_property
    def environment(self) -> dict[str, str]:
        """The job's variables, with references for the secrets that the node reads."""
        references = self.placement.references("secretsmanager")
        encoded = {REFERENCES_VARIABLE: encode_references(references)} if references else {}
        return {**self.job.launch.env, **encoded}

    @property
    def node_run_dir(self) -> str:
        """Run directory in the containers: ``run.dir`` if a mount has it, else in /runs."""
        mount = self.placement.find_mount(str(self.run_dir))
        is_mounted = mount is not None and mount.kind != "image"
        return str(self.run_dir) if is_mounted else f"{RUNS}/{self.name}"

    def command(self, recipe: str, **changes: str) -> list[str]:
        """Return the words of the command, with this recipe and with changed keys."""
        pairs = {**self.overrides, **changes}
        words = (word for key, value in pairs.items() for word in (f"--{key}", value))
        return ["weft", *self.program, recipe, *words]


class Cluster(Protocol):
    """The functions of the module of a cluster: see `weft.submission.submit.CLUSTERS`."""

    FILE_SUFFIX: str  # of the script or manifest: '.sh', '.yaml', '-request.json'

    def find_errors(self, request: JobRequest) -> list[ConfigError]:
        """Return the configuration errors of a request."""

    def render(self, request: JobRequest) -> str:
        """Return the script or manifest."""

    def check(self, text: str) -> list[str]:
        """Return the errors that the cluster's tools or its published schema find."""

    def submit(self, path: Path, request: JobRequest) -> str:
        """Submit the file; return the job id."""

    def resubmit(self, path: Path, id: str) -> str:
        """Submit the file of an ended job again to resume; return the job id."""

    def status(self, id: str) -> str:
        """Return one line: 'waiting...', 'running...' with nodes, or how the job ended."""

    def logs(self, id: str, run_dir: Path, follow: bool) -> Iterator[str]:
        """Yield the lines that the job has printed."""

    def cancel(self, id: str) -> str:
        """End the job, with time to save if the cluster has any; return a message."""


def is_active(status: str) -> bool:
    """Return True if a status of `Cluster.status` is that of a job that has not ended."""
    return status.startswith(("waiting", "running"))


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
    remedy = "use a duration such as 12:00:00"
    return [ConfigError(key, text, rule, remedy)] if rule else []


def check_fixed_nodes(request: JobRequest, rule: str) -> list[ConfigError]:
    """Return an error with this rule if the request has a range of nodes."""
    minimum, maximum = request.nodes
    if minimum == maximum:
        return []
    return [ConfigError("run.nodes", f"{minimum}:{maximum}", rule, f"use {maximum}")]


def check_instance_types(request: JobRequest) -> ConfigErrors:
    """Check that the nodes of ``launch.instance_type`` have enough GPUs."""
    errors = ConfigErrors(request.job)
    for name in request.job.launch.instance_type.split("+"):
        instance = find_instance_type(name)
        if instance is not None and 0 < instance.gpus < request.devices:
            rule = f"has {instance.gpus} GPUs, and run.cluster={request.job.run.cluster} needs "
            rule += f"{request.devices} per node"
            remedy = "use another instance type, or another run.cluster"
            errors.add("launch.instance_type", rule, remedy, value=name)
    return errors


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
    count = next((n for n, word in enumerate(words) if word.startswith("--")), len(words))
    pairs = zip(words[count::2], words[count + 1 :: 2], strict=True)
    return f" \\\n{indent}".join(shlex.join(part) for part in (words[:count], *pairs))


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
        is_excluded = section == "launch" or key in (RUN_DIR, "run.nodes", "model.config")
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
    text: str = _environment(quote).get_template(template).render(values)
    return text


@lru_cache(maxsize=8)  # compiling a template takes longer than rendering it
def _environment(quote: Callable[[Any], str]) -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        autoescape=True,  # makes macros return Markup
        finalize=lambda value: value if isinstance(value, Markup) else Markup(quote(value)),
        keep_trailing_newline=True,
        loader=PackageLoader("weft.submission"),
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    environment.globals |= {"FAILED": FAILED, "REQUEUE": REQUEUE, "INTERRUPTED": INTERRUPTED}
    environment.globals |= {"UNHEALTHY": UNHEALTHY, "USAGE_ERROR": USAGE_ERROR}
    return environment


def quote_shell(value: object) -> str:
    """Return a value as one word of a shell."""
    return shlex.quote(str(value))


def quote_yaml(value: object) -> str:
    """Return a value as a YAML document of one line."""
    import yaml

    return str(
        yaml.safe_dump(value, default_style='"', default_flow_style=True, width=math.inf)
    ).strip()


def render_manifest(
    template: str, request: JobRequest, location: str, submit_line: str, **values: object
) -> str:
    """Render a template of a YAML manifest; return its documents under a comment.

    Args:
        template: see `render_template`.
        request: its name, section ``launch`` and placement are variables of the template.
        location: where the nodes store the run, for the comment.
        submit_line: shell command that submits the manifest, for the comment.
        **values: further variables.
    """
    import yaml

    launch = request.job.launch
    variables = {"name": request.name, "launch": launch, "placement": request.placement} | values
    text = render_template(template, quote_yaml, **variables)
    noun = "run" if request.trains else "preparation"
    head = f"Nodes of the {noun} {request.name}; its directory is {location}.\n"
    head += f"{request.run_dir} on the submitting machine only has the record of this launch."
    documents = merge_documents(list(yaml.safe_load_all(text)), launch.patch)
    return to_yaml(documents, f"{head}\n{submit_line}")


def to_yaml(documents: Sequence[Mapping[str, Any]], comment: str) -> str:
    """Return YAML documents under a comment, with the given order of keys."""
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        """Dumper that writes multi-line strings as blocks, and equal values twice."""

        ignore_aliases = staticmethod(lambda data: True)

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
