"""Detect rank, world size and rendezvous endpoint from environment variables.

A launcher starts one process per rank (torchrun, mpirun, ``srun`` with one task per GPU):
`ClusterEnvironment.rank` then has torchrun's variables.  Or it starts one process per node, which
starts the ranks of its node: `ClusterEnvironment.nodes` and `ClusterEnvironment.rendezvous` then
have the number of nodes and the rendezvous endpoint.  A process without any of these variables is a
separate run on one node.

The first source in this order decides:

=============  ===================================================================================
flags          ``run.nodes``, with ``run.rendezvous`` or the endpoint of a source below
torchrun       ``RANK`` and ``WORLD_SIZE``; ``PET_*``, the variables of torchrun's own options
mpi            ``OMPI_COMM_WORLD_*``: only mpirun sets them, inside any of the following
sagemaker      ``SM_HOSTS``
slurm          ``SLURM_STEP_*``, which srun sets; ``SLURM_JOB_ID`` alone is a script or a shell
skypilot       ``SKYPILOT_NODE_IPS``
mpi            ``PMI_*``, set by MPICH and Intel MPI, but also by srun
host           nothing: one node
=============  ===================================================================================

``PET_*`` in a pod of Kubernetes (Kubeflow's TrainJob) are reported as kubernetes.  A child of
torchrun, which has ``LOCAL_RANK``, is a rank for any ``run.nodes``; HyperPod's elastic agent sets
the same variables.  Without ``LOCAL_RANK``,
``RANK`` may be the number of a pod (Kubeflow's PyTorchJob, which also sets ``PET_*``), and flags
have priority.

Only `apply_environment` reads ``os.environ``; the other functions read the mapping that they get.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from dataclasses import replace as changed
from itertools import product
from math import prod
from typing import TypeVar

from weft.config.errors import MISSING, ConfigError, ConfigErrors, InvalidConfig
from weft.config.schema import Job, replace

T = TypeVar("T")

Environment = Mapping[str, str]

PORT = 29400  # torch's default port of a rendezvous
MPI_PORT = 29500  # torch's default MASTER_PORT
SAGEMAKER_PORT = 7777  # open between the hosts of SageMaker
MAX_HOSTS = 100_000
RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
SLURM_VARIABLES = (
    "SLURM_JOB_ID",
    "SLURM_JOB_NUM_NODES",
    "SLURM_JOB_NODELIST",
    "SLURM_RESTART_COUNT",
    "SLURM_STEP_ID",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
)


@dataclass(frozen=True)
class ClusterEnvironment:
    """The place of this process in a run.

    Args:
        source: the source that decided; see above.
        rank: torchrun's variables, if this process is a rank; None: it starts ranks.
        nodes: number of nodes, N or MIN:MAX.
        rendezvous: HOST:PORT; empty for one node and for ranks.
    """

    source: str
    rank: Mapping[str, str] | None = None
    nodes: str = "1"
    rendezvous: str = ""


def detect_environment(
    environment: Environment, nodes: str = "auto", rendezvous: str = "auto"
) -> ClusterEnvironment:
    """Detect the place of this process in a run.

    Args:
        environment: environment variables.
        nodes: ``run.nodes``.
        rendezvous: ``run.rendezvous``.

    Raises:
        InvalidConfig: names the variables that are missing or contradict each other.
    """
    if "LOCAL_RANK" in environment and (found := _torchrun(environment)):
        return found
    one_node, has_endpoint = nodes == "1", rendezvous != "auto"
    if nodes != "auto" and (one_node or has_endpoint):
        return ClusterEnvironment("flags", nodes=nodes, rendezvous="" if one_node else rendezvous)
    readers: tuple[Callable[[Environment], ClusterEnvironment | None], ...] = (
        *((_torchrun,) if nodes == "auto" else ()),
        lambda variables: _torchrun_options(variables, has_endpoint),
        _mpirun,
        _sagemaker,
        _slurm,
        _skypilot,
        _pmi,
    )
    found = next(filter(None, (read(environment) for read in readers)), ClusterEnvironment("host"))
    if nodes != "auto":
        if found.rank is not None:
            rule = (
                f"needs one process per node, but {found.source} has started one process per rank"
            )
            remedy = "remove run.nodes, or start one process per node"
            raise InvalidConfig([ConfigError("run.nodes", nodes, rule, remedy)])
        return ClusterEnvironment("flags", nodes=nodes, rendezvous=found.rendezvous)
    if found.rank is None:
        several = found.nodes != "1"
        endpoint = rendezvous if has_endpoint else found.rendezvous
        return changed(found, rendezvous=endpoint if several else "")
    return found


def is_loopback(endpoint: str) -> bool:
    """Return True if an endpoint can only be reached from this host."""
    return endpoint.rpartition(":")[0] in ("localhost", "127.0.0.1", "[::1]")


def is_agent_rank(environment: Environment) -> bool:
    """Return True if HyperPod's elastic agent, ``hyperpodrun``, started this rank.

    The operator of the cluster then decides on restarts and on the number of nodes.
    """
    return "HYPERPOD_ELASTICAGENT_SOCKET_SERVER_PATH" in environment


def is_log_node(environment: Environment) -> bool:
    """Return True if this node prints what all nodes of its run would print.

    Only the nodes of Slurm share one output, and its job ends with its first node.
    """
    return "SLURM_STEP_ID" not in environment or environment.get("SLURM_NODEID", "0") == "0"


# --------------------------------------------------------------------------- this process


def apply_environment(job: Job) -> Job:
    """Return the job with ``run.nodes`` and ``run.rendezvous`` of the environment.

    The result is for the plan only; job.toml keeps the user's values, because the next start may be
    elsewhere.  In a process that is a rank, this function sets torchrun's variables; in a process
    that starts ranks, it removes them.

    Raises:
        InvalidConfig: if the environment contradicts itself; see `detect_environment`.
    """
    here = detect_environment(os.environ, job.run.nodes_text, job.run.rendezvous)
    if here.rank is not None:
        os.environ.update(here.rank)
        os.environ["MASTER_ADDR"] = reachable(here.rank["MASTER_ADDR"])
        return job
    for name in RANK_VARIABLES[:4]:
        os.environ.pop(name, None)
    if here.source == "host":
        return job
    host, colon, port = here.rendezvous.rpartition(":")
    rendezvous = reachable(host) + colon + port if host else here.rendezvous or "auto"
    return replace(job, run={"nodes": here.nodes, "rendezvous": rendezvous})


def reachable(host: str) -> str:
    """Return the host, or its address from Slurm if its name cannot be resolved."""
    if "SLURM_JOB_ID" in os.environ:
        try:
            socket.getaddrinfo(host, None)
        except OSError:
            command = ["scontrol", "show", "node", host, "--oneliner"]
            with suppress(OSError):
                shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout
                if found := re.search(r"NodeAddr=(\S+)", shown):
                    return found[1]
    return host


# --------------------------------------------------------------------------- one launcher each


def _torchrun(environment: Environment) -> ClusterEnvironment | None:
    if not {"RANK", "WORLD_SIZE"}.intersection(environment):
        return None
    if "PET_NNODES" in environment and "LOCAL_RANK" not in environment:
        return None
    required = [name for name in RANK_VARIABLES if not name.startswith("LOCAL_")]
    _check_complete(environment, required, RANK_VARIABLES)
    variables = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    variables |= {name: environment[name] for name in RANK_VARIABLES if name in environment}
    return _as_rank("torchrun", variables, dict.fromkeys(RANK_VARIABLES, ""))


def _torchrun_options(environment: Environment, has_endpoint: bool) -> ClusterEnvironment | None:
    if not {"PET_NNODES", "PET_RDZV_ENDPOINT", "PET_MASTER_ADDR"}.intersection(environment):
        return None
    source = "kubernetes" if "KUBERNETES_SERVICE_HOST" in environment else "torchrun"
    nodes = environment.get("PET_NNODES", "1")
    least, colon, most = nodes.partition(":")
    counts = [least, most] if colon else [least]
    if not all(re.fullmatch("[1-9][0-9]*", count) for count in counts):
        rule = "is not a number of nodes or MIN:MAX"
        raise InvalidConfig([ConfigError("PET_NNODES", nodes, rule, "use 4, or 1:4")])
    if int(counts[0]) > int(counts[-1]):
        raise InvalidConfig(
            [ConfigError("PET_NNODES", nodes, "has a minimum above its maximum", "use MIN:MAX")]
        )
    nodes = counts[0] if counts[0] == counts[-1] else nodes
    if nodes == "1":
        return ClusterEnvironment(source)
    endpoint = environment.get("PET_RDZV_ENDPOINT", "")
    if not endpoint and (host := environment.get("PET_MASTER_ADDR")):
        errors = ConfigErrors(environment)
        port = _integer(errors, environment, "PET_MASTER_PORT", 1, 65535, PORT)
        errors.raise_any()
        endpoint = f"{host}:{port}"
    if not endpoint and not has_endpoint:
        rule = f"is missing, but PET_NNODES={nodes} nodes need a rendezvous endpoint"
        remedy = "set it to HOST:PORT of one node, or set PET_MASTER_ADDR and PET_MASTER_PORT"
        raise InvalidConfig([ConfigError("PET_RDZV_ENDPOINT", MISSING, rule, remedy)])
    return ClusterEnvironment(source, nodes=nodes, rendezvous=endpoint)


def _sagemaker(environment: Environment) -> ClusterEnvironment | None:
    text = environment.get("SM_HOSTS")
    if text is None:
        return None
    hosts = _sagemaker_hosts(text)
    here = environment.get("SM_CURRENT_HOST")
    if here not in hosts:
        rule = f"is not in SM_HOSTS={text}"
        raise InvalidConfig([ConfigError("SM_CURRENT_HOST", here or MISSING, rule)])
    port = environment.get("SM_MASTER_PORT", SAGEMAKER_PORT)
    return _as_nodes("sagemaker", environment, len(hosts), hosts[0], port)


def _sagemaker_hosts(text: str) -> list[str]:
    try:
        hosts = json.loads(text)
    except ValueError:
        hosts = None
    if not isinstance(hosts, list) or not hosts or not all(isinstance(h, str) for h in hosts):
        raise InvalidConfig(
            [ConfigError("SM_HOSTS", text, 'is not a list of names such as ["algo-1"]')]
        )
    return sorted(hosts)


def _slurm(environment: Environment) -> ClusterEnvironment | None:
    if "SLURM_JOB_ID" not in environment:
        return None
    errors = ConfigErrors(environment)
    if "SLURM_STEP_ID" not in environment:  # in the batch script, or in the shell of salloc
        nodes = _integer(errors, environment, "SLURM_JOB_NUM_NODES", 1, MAX_HOSTS, 1)
        if nodes > 1:
            rule = "needs srun: without it, only one node would train"
            remedy = "use srun --ntasks-per-node=1 weft ..., or --nodes 1 to train on this node"
            errors.add("SLURM_JOB_NUM_NODES", rule, remedy)
        errors.raise_any()
        return ClusterEnvironment("slurm")
    step_variables = ["SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"]
    _check_complete(environment, step_variables, SLURM_VARIABLES)
    hosts = _expand(errors, environment, "SLURM_STEP_NODELIST", expand_hosts)
    tasks = _expand(errors, environment, "SLURM_STEP_TASKS_PER_NODE", expand_counts)
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    job, step, restarts = (_integer(errors, environment, name, 0, default=0) for name in names)
    if hosts and tasks and len(hosts) != len(tasks):
        rule = f"lists {len(tasks)} nodes, but SLURM_STEP_NODELIST lists {len(hosts)}"
        errors.add("SLURM_STEP_TASKS_PER_NODE", rule)
    errors.raise_any()
    # Two jobs, or two steps of one job, may share a node, and processes of a requeued job may
    # remain.  Each gets its own port, below the range of ephemeral ports.
    port = 10_000 + (job + 997 * step + 331 * restarts) % 20_000
    if set(tasks) == {1}:
        return _as_nodes("slurm", environment, len(hosts), hosts[0], port)
    if len(set(tasks)) > 1:
        rule, remedy = "has unequal numbers of tasks per node", "use srun --ntasks-per-node"
        errors.add("SLURM_STEP_TASKS_PER_NODE", rule, remedy)
        errors.raise_any()
    variables = {
        "RANK": "SLURM_PROCID",
        "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
        "LOCAL_RANK": "SLURM_LOCALID",
    }
    _check_complete(environment, [*variables.values(), "SLURM_NODEID"], SLURM_VARIABLES)
    values = {ours: environment[name] for ours, name in variables.items()}
    values |= {"LOCAL_WORLD_SIZE": str(tasks[0])} | _master(environment, hosts[0], port)
    found = _as_rank("slurm", values, variables)
    node = _integer(errors, environment, "SLURM_NODEID", 0, len(hosts) - 1)
    if int(values["WORLD_SIZE"]) != sum(tasks):
        rule = f"is not {sum(tasks)}, the sum of SLURM_STEP_TASKS_PER_NODE"
        errors.add("SLURM_STEP_NUM_TASKS", rule)
    elif not errors and int(values["RANK"]) != node * tasks[0] + int(values["LOCAL_RANK"]):
        rule = "does not give consecutive ranks to a node"
        errors.add("SLURM_DISTRIBUTION", rule, "use srun -m block:block")
    errors.raise_any()
    return found


def _skypilot(environment: Environment) -> ClusterEnvironment | None:
    text = environment.get("SKYPILOT_NODE_IPS")
    if text is None:
        return None
    addresses, errors = text.split(), ConfigErrors(environment)
    count = _integer(errors, environment, "SKYPILOT_NUM_NODES", 1, default=len(addresses))
    _integer(errors, environment, "SKYPILOT_NODE_RANK", 0, max(0, count - 1))
    if len(addresses) != count:
        rule = f"has {len(addresses)} addresses, but SKYPILOT_NUM_NODES is {count}"
        errors.add("SKYPILOT_NODE_IPS", rule)
    errors.raise_any()
    return _as_nodes("skypilot", environment, count, addresses[0], PORT)


def _mpirun(environment: Environment) -> ClusterEnvironment | None:
    return _mpi(
        environment,
        {
            "RANK": "OMPI_COMM_WORLD_RANK",
            "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
            "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
            "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
        },
    )


def _pmi(environment: Environment) -> ClusterEnvironment | None:
    return _mpi(
        environment,
        {
            "RANK": "PMI_RANK",
            "WORLD_SIZE": "PMI_SIZE",
            "LOCAL_RANK": "MPI_LOCALRANKID",
            "LOCAL_WORLD_SIZE": "MPI_LOCALNRANKS",
        },
    )


def _mpi(environment: Environment, variables: Mapping[str, str]) -> ClusterEnvironment | None:
    if not {variables["RANK"], variables["WORLD_SIZE"]}.intersection(environment):
        return None
    values = {ours: environment[name] for ours, name in variables.items() if name in environment}
    head = ""
    if (size := values.get("WORLD_SIZE")) in ("1", values.get("LOCAL_WORLD_SIZE")):
        if size == "1":
            values = {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} | values
        head = "localhost"
    elif "SLURM_JOB_NODELIST" in environment:
        errors = ConfigErrors(environment)
        hosts = _expand(errors, environment, "SLURM_JOB_NODELIST", expand_hosts)
        errors.raise_any()
        head = hosts[0]
    elif "SM_HOSTS" in environment:
        head = _sagemaker_hosts(environment["SM_HOSTS"])[0]
    required = [name for ours, name in variables.items() if ours not in values]
    _check_complete(environment, required, tuple(variables.values()))
    values |= _master(environment, head, MPI_PORT)
    return _as_rank("mpi", values, {**variables, "MASTER_ADDR": ""})


# --------------------------------------------------------------------------- shared helpers


def _master(environment: Environment, host: str, port: int | str) -> dict[str, str]:
    """Return MASTER_ADDR and MASTER_PORT; values of the environment have priority."""
    found = {"MASTER_ADDR": host} if host else {}
    found["MASTER_PORT"] = str(port)
    return found | {name: environment[name] for name in RANK_VARIABLES[4:] if name in environment}


def _as_nodes(
    source: str, environment: Environment, count: int, host: str, port: int | str
) -> ClusterEnvironment:
    master = _master(environment, host, port)
    errors = ConfigErrors(master)
    _integer(errors, master, "MASTER_PORT", 1, 65535)
    errors.raise_any()
    return ClusterEnvironment(
        source, None, str(count), "{MASTER_ADDR}:{MASTER_PORT}".format(**master)
    )


def _as_rank(source: str, values: Environment, names: Mapping[str, str]) -> ClusterEnvironment:
    """Return the environment of a rank, after a check of its variables.

    Args:
        source: the source of the variables; see above.
        values: values by torchrun's names.
        names: names of these variables in the environment, for errors; empty: the same.

    Raises:
        InvalidConfig: if a variable is missing, not an integer, or out of range.
    """
    original = {name: names.get(name) or name for name in RANK_VARIABLES}
    variables = {original[name]: value for name, value in values.items()}
    errors = ConfigErrors(variables)

    def read(name: str, low: int, high: int | None) -> int:
        return _integer(errors, variables, original[name], low, high)

    size = read("WORLD_SIZE", 1, None)
    read("RANK", 0, size - 1 if size else None)
    local_size = read("LOCAL_WORLD_SIZE", 1, size or None)
    read("LOCAL_RANK", 0, local_size - 1 if local_size else None)
    read("MASTER_PORT", 1, 65535)
    if not values.get("MASTER_ADDR"):
        rule = "is missing: every rank needs the host of rank 0"
        remedy = ""
        if source == "mpi":
            given = " ".join(name for name in variables if name not in RANK_VARIABLES)
            remedy = "set it, as in mpirun -x MASTER_ADDR=$(hostname); without mpirun, run unset "
            remedy += given
        errors.add("MASTER_ADDR", rule, remedy, value=MISSING)
    errors.raise_any()
    return ClusterEnvironment(source, {name: values[name] for name in RANK_VARIABLES})


def _check_complete(
    environment: Environment, required: Sequence[str], names: Sequence[str]
) -> None:
    """Check that the variables of a launcher are not leftovers of a shell.

    Raises:
        InvalidConfig: if a required variable is missing; it says how to remove ``names``.
    """
    missing = [name for name in required if name not in environment]
    if missing:
        present = [name for name in names if name in environment]
        listed = " and ".join(filter(None, [", ".join(missing[:-1]), missing[-1]]))
        rule = f"is set, but {listed} {'are' if missing[1:] else 'is'} not, so no launcher has "
        rule += "started this process"
        remedy = f"run unset {' '.join(present)}"
        raise InvalidConfig([ConfigError(present[0], environment[present[0]], rule, remedy)])


def _integer(
    errors: ConfigErrors,
    environment: Environment,
    name: str,
    low: int,
    high: int | None = None,
    default: int | None = None,
) -> int:
    """Return an integer variable; if it is not in [low, high], add an error, return 0."""
    text = environment.get(name)
    if text is None:
        if default is None:
            errors.add(name, "is missing, but related variables are set")
        return default or 0
    limits = f"at least {low}" if high is None else f"between {low} and {high}"
    if not re.fullmatch("[0-9]{1,18}", text):
        errors.add(name, f"is not an integer ({limits})")
        return 0
    number = int(text)
    if number < low or (high is not None and number > high):
        errors.add(name, f"is not {limits}")
        return 0
    return number


def _expand(
    errors: ConfigErrors, environment: Environment, name: str, expand: Callable[[str], list[T]]
) -> list[T]:
    text = environment.get(name)
    if text is None:
        errors.add(name, "is missing, but related variables are set")
        return []
    try:
        return expand(text)
    except ValueError as error:
        errors.add(name, str(error))
        return []


def expand_hosts(text: str) -> list[str]:
    """Expand Slurm's host list: ``n[01-03,7],gpu-a`` is n01, n02, n03, n7, gpu-a.

    Raises:
        ValueError: if the text is not a host list.
    """
    parts = re.findall(r"(?:[^\[\],\s]|\[[0-9,-]+\])+", text)
    if not parts or ",".join(parts) != text:
        raise ValueError("is not a host list such as n[01-03,7],gpu-a")
    hosts: list[str] = []
    for part in parts:
        fields = re.split(r"\[([^\]]+)\]", part)
        choices = [
            _numbers(text) if is_range else [text]
            for text, is_range in zip(fields, [False, True] * len(fields), strict=False)
        ]
        if len(hosts) + prod(map(len, choices)) > MAX_HOSTS:
            raise ValueError(f"names more than {MAX_HOSTS:,} hosts")
        hosts += ["".join(names) for names in product(*choices)]
    return hosts


def _numbers(text: str) -> list[str]:
    """Expand ``01-03,7`` to 01, 02, 03, 7."""
    numbers: list[str] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not all(re.fullmatch("[0-9]{1,18}", number) for number in (first, last)):
            raise ValueError(f"has [{text}], which is not a list of numbers")
        end = int(last)
        if not 0 <= end - int(first) < MAX_HOSTS:
            raise ValueError(f"has {part}, which is not a range of hosts")
        numbers += [f"{number:0{len(first)}}" for number in range(int(first), end + 1)]
    return numbers


def expand_counts(text: str) -> list[int]:
    """Expand Slurm's counts per node: ``2(x3),1`` is 2, 2, 2, 1.

    Raises:
        ValueError: if the text is not such a list.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([1-9][0-9]{0,6})(?:\(x([1-9][0-9]{0,5})\))?", part)
        if match is None:
            raise ValueError("is not a list of counts such as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    if len(counts) > MAX_HOSTS:
        raise ValueError(f"lists more than {MAX_HOSTS:,} nodes")
    return counts
