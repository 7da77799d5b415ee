"""Who this process is among the others of a run, by what it finds in its environment.

There are two styles.  In one every process is a *rank* already, as under torchrun, mpirun or
``srun`` with a task for each GPU: `Where.rank` has what torchrun would have set.  In the other each
node has one process, which is to start that node's ranks: `Where.nodes` tells how many there are,
and `Where.rendezvous` where they meet.  A process for which nobody says anything is alone.

The first that says something decides, from what was meant most to what may only be around it:

=============  ===================================================================================
flags          ``run.nodes``, with ``run.rendezvous`` or where the rest below says
torchrun       ``RANK`` and ``WORLD_SIZE``; ``PET_*``, which stand for torchrun's own options
mpi            ``OMPI_COMM_WORLD_*``: only mpirun sets them, inside any of the following
sagemaker      ``SM_HOSTS``
slurm          ``SLURM_STEP_*``, as srun sets them; ``SLURM_JOB_ID`` alone is a script or a shell
skypilot       ``SKYPILOT_NODE_IPS``
mpi            ``PMI_*``: of MPICH and Intel MPI, but of srun, too
host           nothing: one node
=============  ===================================================================================

``PET_*`` set in a pod of Kubernetes (Kubeflow's TrainJob) are called kubernetes.  A child of
torchrun, which ``LOCAL_RANK`` tells, is its rank whatever ``run.nodes`` says: it cannot be anything
else.  Without it ``RANK`` may be the number of a pod (Kubeflow's PyTorchJob, which sets ``PET_*``
as well), and what was asked for by flags goes first.

Nothing but `apply_environment` looks anywhere else than into the mapping that it is given.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from dataclasses import replace as changed
from itertools import product
from math import prod
from typing import TypeVar

from weft.config.errors import MISSING, ConfigError, InvalidConfig
from weft.config.schema import Job, replace

T = TypeVar("T")

Environment = Mapping[str, str]

PORT = 29400  # torch's own default for launchers that meet
MPI_PORT = 29500  # and for ranks
SAGEMAKER_PORT = 7777  # SageMaker's for both: open between its hosts
MOST_HOSTS = 100_000
RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@dataclass(frozen=True)
class ClusterEnvironment:
    """What `detect_environment` has found.

    Args:
        source: who decided; see above.
        rank: of a process that is a rank, torchrun's variables; None: it starts ranks.
        nodes: whose launchers meet: N or MIN:MAX.
        rendezvous: HOST:PORT; empty for a single node and for ranks.
    """

    source: str
    rank: Mapping[str, str] | None = None
    nodes: str = "1"
    rendezvous: str = ""


def detect_environment(
    environment: Environment, nodes: str = "auto", rendezvous: str = "auto"
) -> ClusterEnvironment:
    """Who this process is.

    Args:
        nodes, rendezvous: ``run.nodes`` and ``run.rendezvous``.

    Raises:
        InvalidConfig: naming the variables that contradict each other, or are missing.
    """
    if "LOCAL_RANK" in environment and (found := _torchrun(environment)):
        return found
    alone, told = nodes == "1", rendezvous != "auto"
    if nodes != "auto" and (alone or told):
        return ClusterEnvironment("flags", nodes=nodes, rendezvous="" if alone else rendezvous)
    readers: tuple[Callable[[Environment], ClusterEnvironment | None], ...] = (
        *((_torchrun,) if nodes == "auto" else ()),
        lambda around: _options_of_torchrun(around, told),
        _mpirun,
        _sagemaker,
        _slurm,
        _skypilot,
        _pmi,
    )
    found = next(filter(None, (read(environment) for read in readers)), ClusterEnvironment("host"))
    if nodes != "auto":
        if found.rank is not None:
            rule = f"is for one process a node that starts ranks, and {found.source} has started "
            remedy = "leave it out, or start one process a node"
            raise InvalidConfig(
                [ConfigError("run.nodes", nodes, rule + "the ranks already", remedy)]
            )
        return ClusterEnvironment("flags", nodes=nodes, rendezvous=found.rendezvous)
    if found.rank is None:
        several = found.nodes != "1"
        place = rendezvous if told else found.rendezvous
        return changed(found, rendezvous=place if several else "")
    return found


def is_loopback(endpoint: str) -> bool:
    """Whether all nodes that meet there are on this host."""
    return endpoint.rpartition(":")[0] in ("localhost", "127.0.0.1", "[::1]")


def is_log_node(environment: Environment) -> bool:
    """Whether this node is the one that says what all nodes of its run would say.

    Only Slurm's have one output together, and its job does not outlive its first node.
    """
    return "SLURM_STEP_ID" not in environment or environment.get("SLURM_NODEID", "0") == "0"


# --------------------------------------------------------------------------- this process


def apply_environment(job: Job) -> Job:
    """The job with the nodes and the meeting place that the environment says, to be planned.

    What was chosen goes into job.toml, not this: the next start may be elsewhere.  A process that
    was started as a rank gets torchrun's variables here, whatever they were called, and one that
    starts ranks has none.

    Raises:
        InvalidConfig: if the environment contradicts itself; see `detect_environment`.
    """
    here = detect_environment(os.environ, str(job.run.nodes), job.run.rendezvous)
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
    """The host, or Slurm's address of a node whose name says nothing to this one."""
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


# --------------------------------------------------------------------------- one system each


def _torchrun(environment: Environment) -> ClusterEnvironment | None:
    names = [name for name in ("RANK", "WORLD_SIZE") if name in environment]
    if not names or ("PET_NNODES" in environment and "LOCAL_RANK" not in environment):
        return None
    variables = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    variables |= {name: environment[name] for name in RANK_VARIABLES if name in environment}
    return _as_rank("torchrun", variables, dict.fromkeys(RANK_VARIABLES, ""))


def _options_of_torchrun(environment: Environment, told: bool) -> ClusterEnvironment | None:
    if not {"PET_NNODES", "PET_RDZV_ENDPOINT", "PET_MASTER_ADDR"}.intersection(environment):
        return None
    source = "kubernetes" if "KUBERNETES_SERVICE_HOST" in environment else "torchrun"
    nodes = environment.get("PET_NNODES", "1")
    least, colon, most = nodes.partition(":")
    counts = [least, most] if colon else [least]
    if not all(re.fullmatch("[1-9][0-9]*", count) for count in counts):
        rule = "is neither a number of nodes nor MIN:MAX"
        raise InvalidConfig([ConfigError("PET_NNODES", nodes, rule, "use 4, or 1:4")])
    if int(counts[0]) > int(counts[-1]):
        raise InvalidConfig([ConfigError("PET_NNODES", nodes, "has more at least than at most")])
    nodes = counts[0] if counts[0] == counts[-1] else nodes
    if nodes == "1":
        return ClusterEnvironment(source)
    place = environment.get("PET_RDZV_ENDPOINT", "")
    if not place and (host := environment.get("PET_MASTER_ADDR")):
        problems: list[ConfigError] = []
        port = _whole(environment, "PET_MASTER_PORT", problems, 1, 65535, PORT)
        if problems:
            raise InvalidConfig(problems)
        place = f"{host}:{port}"
    if not place and not told:
        rule = f"is missing, though PET_NNODES = {nodes}: the nodes must know where to meet"
        remedy = "set it to the HOST:PORT of one of them, or PET_MASTER_ADDR and PET_MASTER_PORT"
        raise InvalidConfig([ConfigError("PET_RDZV_ENDPOINT", MISSING, rule, remedy)])
    return ClusterEnvironment(source, nodes=nodes, rendezvous=place)


def _sagemaker(environment: Environment) -> ClusterEnvironment | None:
    text = environment.get("SM_HOSTS")
    if text is None:
        return None
    hosts = _sagemaker_hosts(text)
    here = environment.get("SM_CURRENT_HOST")
    if here not in hosts:
        rule = f"is not among SM_HOSTS = {text}"
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
            [ConfigError("SM_HOSTS", text, 'is no list of names such as ["algo-1"]')]
        )
    return sorted(hosts)


def _slurm(environment: Environment) -> ClusterEnvironment | None:
    if "SLURM_JOB_ID" not in environment:
        return None
    problems: list[ConfigError] = []
    if "SLURM_STEP_ID" not in environment:  # the batch script itself, or salloc's shell
        nodes = _whole(environment, "SLURM_JOB_NUM_NODES", problems, 1, MOST_HOSTS, 1)
        if problems:
            raise InvalidConfig(problems)
        if nodes == 1:
            return ClusterEnvironment("slurm")
        rule = "without srun only one of the nodes is used"
        remedy = "start it with srun --ntasks-per-node=1, or with --nodes 1 for this node alone"
        raise InvalidConfig([ConfigError("SLURM_JOB_NUM_NODES", nodes, rule, remedy)])
    hosts = _expanded(environment, "SLURM_STEP_NODELIST", expand_hosts, problems)
    tasks = _expanded(environment, "SLURM_STEP_TASKS_PER_NODE", expand_counts, problems)
    job = _whole(environment, "SLURM_JOB_ID", problems, 0)
    step = _whole(environment, "SLURM_STEP_ID", problems, 0)
    if hosts and tasks and len(hosts) != len(tasks):
        rule = f"is of {len(tasks)} nodes, and SLURM_STEP_NODELIST of {len(hosts)}"
        value = environment["SLURM_STEP_TASKS_PER_NODE"]
        problems.append(ConfigError("SLURM_STEP_TASKS_PER_NODE", value, rule))
    if problems:
        raise InvalidConfig(problems)
    # Two jobs, or two steps of one, may share a node: each has a port of its own, below those that
    # systems give to whoever asks for any.
    port = 10_000 + (job + 997 * step) % 20_000
    if set(tasks) == {1}:
        return _as_nodes("slurm", environment, len(hosts), hosts[0], port)
    if len(set(tasks)) > 1:
        rule, remedy = "every node must have as many", "give srun --ntasks-per-node"
        value = environment["SLURM_STEP_TASKS_PER_NODE"]
        raise InvalidConfig([ConfigError("SLURM_STEP_TASKS_PER_NODE", value, rule, remedy)])
    variables = {
        "RANK": "SLURM_PROCID",
        "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
        "LOCAL_RANK": "SLURM_LOCALID",
    }
    values = {ours: environment[name] for ours, name in variables.items() if name in environment}
    values |= {"LOCAL_WORLD_SIZE": str(tasks[0])} | _master(environment, hosts[0], port)
    found = _as_rank("slurm", values, variables)
    node = _whole(environment, "SLURM_NODEID", problems, 0, len(hosts) - 1)
    if int(values["WORLD_SIZE"]) != sum(tasks):
        rule = f"SLURM_STEP_TASKS_PER_NODE adds up to {sum(tasks)}"
        problems.append(ConfigError("SLURM_STEP_NUM_TASKS", values["WORLD_SIZE"], rule))
    elif not problems and int(values["RANK"]) != node * tasks[0] + int(values["LOCAL_RANK"]):
        dealt = environment.get("SLURM_DISTRIBUTION") or MISSING
        rule = "the ranks of a node must follow each other"
        problems.append(ConfigError("SLURM_DISTRIBUTION", dealt, rule, "give srun -m block:block"))
    if problems:
        raise InvalidConfig(problems)
    return found


def _skypilot(environment: Environment) -> ClusterEnvironment | None:
    text = environment.get("SKYPILOT_NODE_IPS")
    if text is None:
        return None
    addresses = text.split()
    problems: list[ConfigError] = []
    count = _whole(environment, "SKYPILOT_NUM_NODES", problems, 1, default=len(addresses))
    _whole(environment, "SKYPILOT_NODE_RANK", problems, 0, max(0, count - 1))
    if len(addresses) != count:
        rule = f"has {len(addresses)} addresses, and SKYPILOT_NUM_NODES is {count}"
        problems.append(ConfigError("SKYPILOT_NODE_IPS", text, rule))
    if problems:
        raise InvalidConfig(problems)
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
            values = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} | values
        head = "localhost"
    elif "SLURM_JOB_NODELIST" in environment:
        problems: list[ConfigError] = []
        hosts = _expanded(environment, "SLURM_JOB_NODELIST", expand_hosts, problems)
        if problems:
            raise InvalidConfig(problems)
        head = hosts[0]
    elif "SM_HOSTS" in environment:
        head = _sagemaker_hosts(environment["SM_HOSTS"])[0]
    values |= _master(environment, head, MPI_PORT)
    return _as_rank("mpi", values, {**variables, "MASTER_ADDR": ""})


# --------------------------------------------------------------------------- what they share


def _master(environment: Environment, host: str, port: int | str) -> dict[str, str]:
    """Where ranks meet; whoever has said so himself is right."""
    found = {"MASTER_ADDR": host} if host else {}
    found["MASTER_PORT"] = str(port)
    return found | {name: environment[name] for name in RANK_VARIABLES[4:] if name in environment}


def _as_nodes(
    source: str, environment: Environment, count: int, host: str, port: int | str
) -> ClusterEnvironment:
    master, problems = _master(environment, host, port), list[ConfigError]()
    _whole(master, "MASTER_PORT", problems, 1, 65535)
    if problems:
        raise InvalidConfig(problems)
    return ClusterEnvironment(
        source, None, str(count), "{MASTER_ADDR}:{MASTER_PORT}".format(**master)
    )


def _as_rank(source: str, values: Environment, names: Mapping[str, str]) -> ClusterEnvironment:
    """A rank with these of torchrun's variables.

    Args:
        names: what the variables are called in the environment, for problems; '' or none: the same.

    Raises:
        InvalidConfig: if one is missing, is no number, or is out of its range.
    """
    problems: list[ConfigError] = []
    called = {name: names.get(name) or name for name in RANK_VARIABLES}
    theirs = {called[name]: value for name, value in values.items()}

    def whole(name: str, least: int, most: int | None) -> int:
        return _whole(theirs, called[name], problems, least, most)

    size = whole("WORLD_SIZE", 1, None)
    whole("RANK", 0, size - 1 if size else None)
    local = whole("LOCAL_WORLD_SIZE", 1, size or None)
    whole("LOCAL_RANK", 0, local - 1 if local else None)
    whole("MASTER_PORT", 1, 65535)
    if not values.get("MASTER_ADDR"):
        rule = "is missing: the ranks must know on which host the first of them is"
        remedy = "pass it on, as with mpirun -x MASTER_ADDR=$(hostname)" if source == "mpi" else ""
        problems.append(ConfigError("MASTER_ADDR", MISSING, rule, remedy))
    if problems:
        raise InvalidConfig(problems)
    return ClusterEnvironment(source, {name: values[name] for name in RANK_VARIABLES})


def _whole(
    environment: Environment,
    name: str,
    problems: list[ConfigError],
    least: int,
    most: int | None = None,
    default: int | None = None,
) -> int:
    """A variable's number; 0, and a problem, if it has none from ``least`` to ``most``."""
    text = environment.get(name)
    if text is None:
        if default is None:
            problems.append(ConfigError(name, MISSING, "is missing beside the other variables"))
        return default or 0
    limits = f"from {least}" + (f" to {most}" if most is not None else "")
    if not re.fullmatch("[0-9]{1,18}", text):
        problems.append(ConfigError(name, text, f"is not a whole number {limits}"))
        return 0
    number = int(text)
    if number < least or (most is not None and number > most):
        problems.append(ConfigError(name, text, f"is not {limits}"))
        return 0
    return number


def _expanded(
    environment: Environment,
    name: str,
    expand: Callable[[str], list[T]],
    problems: list[ConfigError],
) -> list[T]:
    text = environment.get(name)
    if text is None:
        problems.append(ConfigError(name, MISSING, "is missing beside the other variables"))
        return []
    try:
        return expand(text)
    except ValueError as error:
        problems.append(ConfigError(name, text, str(error)))
        return []


def expand_hosts(text: str) -> list[str]:
    """Slurm's short form of names: ``n[01-03,7],gpu-a`` is n01, n02, n03, n7, gpu-a.

    Raises:
        ValueError: if it is none.
    """
    parts = re.findall(r"(?:[^\[\],\s]|\[[0-9,-]+\])+", text)
    if not parts or ",".join(parts) != text:
        raise ValueError("is no list of hosts such as n[01-03,7],gpu-a")
    hosts: list[str] = []
    for part in parts:
        pieces = re.split(r"\[([^\]]+)\]", part)
        choices = [
            _numbers(piece) if odd else [piece]
            for piece, odd in zip(pieces, [False, True] * len(pieces), strict=False)
        ]
        if len(hosts) + prod(map(len, choices)) > MOST_HOSTS:
            raise ValueError(f"names more than {MOST_HOSTS:,} hosts")
        hosts += ["".join(names) for names in product(*choices)]
    return hosts


def _numbers(text: str) -> list[str]:
    """``01-03,7``: 01, 02, 03, 7."""
    numbers: list[str] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not all(re.fullmatch("[0-9]{1,18}", number) for number in (first, last)):
            raise ValueError(f"[{text}] is no list of numbers")
        end = int(last)
        if not 0 <= end - int(first) < MOST_HOSTS:
            raise ValueError(f"{part} is no range of hosts")
        numbers += [f"{number:0{len(first)}}" for number in range(int(first), end + 1)]
    return numbers


def expand_counts(text: str) -> list[int]:
    """Slurm's short form of numbers, a node each: ``2(x3),1`` is 2, 2, 2, 1.

    Raises:
        ValueError: if it is none.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([1-9][0-9]{0,6})(?:\(x([1-9][0-9]{0,5})\))?", part)
        if match is None:
            raise ValueError("is no list of numbers such as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    if len(counts) > MOST_HOSTS:
        raise ValueError(f"is of more than {MOST_HOSTS:,} nodes")
    return counts
