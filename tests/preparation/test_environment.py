"""Detection of rank, world size and rendezvous from the environment of a scheduler.

Slurm's variables are those of version 22.05; the others follow documentation or source code.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import pytest

from weft.config.errors import InvalidConfig
from weft.config.reader import read_job
from weft.preparation.environment import (
    ClusterEnvironment,
    apply_environment,
    detect_environment,
    expand_counts,
    expand_hosts,
    is_log_node,
)
from weft.training.machine import is_launched_rank

TORCHRUN = {
    "LOCAL_RANK": "1",
    "RANK": "3",
    "GROUP_RANK": "1",
    "ROLE_RANK": "3",
    "ROLE_NAME": "default",
    "LOCAL_WORLD_SIZE": "2",
    "WORLD_SIZE": "4",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_WORLD_SIZE": "4",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "43131",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
TRAIN_JOB = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "8",
    "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "run-node-0-0.run",
    "PET_MASTER_PORT": "29400",
}
PYTORCH_JOB = TRAIN_JOB | {  # version 1 of the operator, which numbers pods by RANK
    "PYTHONUNBUFFERED": "1",
    "MASTER_PORT": "23456",
    "MASTER_ADDR": "run-master-0",
    "WORLD_SIZE": "4",
    "RANK": "2",
}
SAGEMAKER = {
    "SM_HOSTS": '["algo-1","algo-2"]',
    "SM_CURRENT_HOST": "algo-2",
    "SM_NUM_GPUS": "8",
    "SM_CHANNELS": '["training"]',
    "SM_CHANNEL_TRAINING": "/opt/ml/input/data/training",
    "SM_MODEL_DIR": "/opt/ml/model",
    "TRAINING_JOB_NAME": "t",
}
BATCH = {
    "SLURMD_NODENAME": "n01",
    "SLURM_CLUSTER_NAME": "lab",
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "n[01-02]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "1(x2)",
}
SALLOC = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "n01",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_NNODES": "1",
    "SLURM_TASKS_PER_NODE": "1",
}
NODE = BATCH | {
    "SLURM_DISTRIBUTION": "cyclic",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[01-02]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
TASK = NODE | {
    "SLURM_DISTRIBUTION": "block",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
SKYPILOT = {
    "SKYPILOT_NODE_IPS": "172.31.1.1\n172.31.1.2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": "sky-2026-11-22-run-1",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
}
INTEL = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
HEAD = {"MASTER_ADDR": "head"}


def rank(
    source: str, rank: int, size: int, local: int, local_size: int, host: str, port: int
) -> ClusterEnvironment:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    values = (rank, size, local, local_size, host, port)
    return ClusterEnvironment(source, dict(zip(names, map(str, values), strict=True)))


def nodes(source: str, count: object, rendezvous: str = "") -> ClusterEnvironment:
    return ClusterEnvironment(source, nodes=str(count), rendezvous=rendezvous)


@dataclass
class Case:
    name: str
    environment: dict[str, str]
    expected: ClusterEnvironment
    nodes: str = "auto"
    rendezvous: str = "auto"


CASES = [
    Case("nothing", {}, nodes("host", 1)),
    Case("a laptop's", {"PATH": "/bin", "MASTER_PORT": "1"}, nodes("host", 1)),
    Case("flags", {}, nodes("flags", "1:4", "here:1"), "1:4", "here:1"),
    Case("flags without a place", {}, nodes("flags", 2), "2"),
    Case("torchrun", TORCHRUN, rank("torchrun", 3, 4, 1, 2, "node-0", 43131)),
    Case(
        "a rank by hand",
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "5"},
        rank("torchrun", 1, 2, 0, 1, "h", 5),
    ),
    Case(
        "torchrun's child, whatever flags say",
        TORCHRUN,
        rank("torchrun", 3, 4, 1, 2, "node-0", 43131),
        "4",
        "here:1",
    ),
    Case(
        "torchrun in a TrainJob",
        TRAIN_JOB | TORCHRUN,
        rank("torchrun", 3, 4, 1, 2, "node-0", 43131),
    ),
    Case("torchrun in Slurm", NODE | TORCHRUN, rank("torchrun", 3, 4, 1, 2, "node-0", 43131)),
    Case(
        "torchrun in SageMaker",
        SAGEMAKER | TORCHRUN,
        rank("torchrun", 3, 4, 1, 2, "node-0", 43131),
    ),
    Case(
        "torchrun's options",
        {"PET_NNODES": "1:4", "PET_RDZV_ENDPOINT": "h:29401"},
        nodes("torchrun", "1:4", "h:29401"),
    ),
    Case("a range of one", {"PET_NNODES": "1:1"}, nodes("torchrun", 1)),
    Case("TrainJob", TRAIN_JOB, nodes("kubernetes", 4, "run-node-0-0.run:29400")),
    Case("TrainJob, alone", TRAIN_JOB | {"PET_NNODES": "1"}, nodes("kubernetes", 1)),
    Case("PyTorchJob", PYTORCH_JOB, nodes("kubernetes", 4, "run-node-0-0.run:29400")),
    Case(
        "pods numbered by RANK, and flags",
        {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "23456"},
        nodes("flags", 4, "h:29400"),
        "4",
        "h:29400",
    ),
    Case(
        "elastic by flags, the place by a TrainJob",
        TRAIN_JOB,
        nodes("flags", "2:4", "run-node-0-0.run:29400"),
        "2:4",
    ),
    Case("SageMaker", SAGEMAKER, nodes("sagemaker", 2, "algo-1:7777")),
    Case(
        "SageMaker, in another order",
        SAGEMAKER | {"SM_HOSTS": '["algo-2","algo-1"]'},
        nodes("sagemaker", 2, "algo-1:7777"),
    ),
    Case(
        "one host of SageMaker",
        SAGEMAKER | {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"},
        nodes("sagemaker", 1),
    ),
    Case("mpirun in SageMaker", SAGEMAKER | MPIRUN, rank("mpi", 3, 4, 1, 2, "algo-1", 29500)),
    Case("srun, a node", NODE, nodes("slurm", 2, "n01:14711")),
    Case("another step's port", NODE | {"SLURM_STEP_ID": "2"}, nodes("slurm", 2, "n01:16705")),
    Case("a requeued job", NODE | {"SLURM_RESTART_COUNT": "2"}, nodes("slurm", 2, "n01:15373")),
    Case("the place by flags", NODE, nodes("slurm", 2, "n02:1"), rendezvous="n02:1"),
    Case("the place by habit", NODE | HEAD, nodes("slurm", 2, "head:14711")),
    Case("elastic in Slurm", NODE, nodes("flags", "1:2", "n01:14711"), "1:2"),
    Case(
        "elastic in Slurm, one node",
        NODE
        | {
            "SLURM_STEP_NODELIST": "n01",
            "SLURM_STEP_TASKS_PER_NODE": "1",
            "SLURM_STEP_NUM_TASKS": "1",
        },
        nodes("flags", "1:2", "n01:14711"),
        "1:2",
    ),
    Case("srun, a GPU", TASK, rank("slurm", 3, 4, 1, 2, "n01", 14711)),
    Case("srun, a GPU, the place by habit", TASK | HEAD, rank("slurm", 3, 4, 1, 2, "head", 14711)),
    Case(
        "srun --pty",
        NODE
        | {
            "SLURM_STEP_NODELIST": "n02",
            "SLURM_STEP_TASKS_PER_NODE": "1",
            "SLURM_STEP_NUM_TASKS": "1",
        },
        nodes("slurm", 1),
    ),
    Case("salloc's shell", SALLOC, nodes("slurm", 1)),
    Case("a script of one node", BATCH | {"SLURM_JOB_NUM_NODES": "1"}, nodes("slurm", 1)),
    Case("a script, for itself", BATCH, nodes("flags", 1), "1"),
    Case("mpirun in Slurm", BATCH | MPIRUN, rank("mpi", 3, 4, 1, 2, "n01", 29500)),
    Case("SkyPilot", SKYPILOT, nodes("skypilot", 2, "172.31.1.1:29400")),
    Case(
        "SkyPilot, alone",
        {"SKYPILOT_NODE_IPS": "172.31.1.1", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "1"},
        nodes("skypilot", 1),
    ),
    Case("mpirun", MPIRUN | HEAD, rank("mpi", 3, 4, 1, 2, "head", 29500)),
    Case("Intel MPI, one host", INTEL, rank("mpi", 1, 2, 1, 2, "localhost", 29500)),
    Case("PMI of srun", TASK | INTEL, rank("slurm", 3, 4, 1, 2, "n01", 14711)),
    Case(
        "mpirun -n 1",
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        rank("mpi", 0, 1, 0, 1, "localhost", 29500),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_detect_environment_gives_rank_and_world(case: Case) -> None:
    before = dict(case.environment)
    assert detect_environment(case.environment, case.nodes, case.rendezvous) == case.expected
    assert case.environment == before


@dataclass
class Mistake:
    name: str
    environment: dict[str, str]
    keys: list[str]
    rule: str
    without: list[str] = field(default_factory=list)
    nodes: str = "auto"


MISTAKES = [
    Mistake(
        "half a rank", {"RANK": "0"}, ["RANK"], "WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not"
    ),
    Mistake("no number", TORCHRUN | {"RANK": "x"}, ["RANK"], "between 0 and 3"),
    Mistake("too high", TORCHRUN | {"RANK": "4"}, ["RANK"], "between 0 and 3"),
    Mistake("too high here", TORCHRUN | {"LOCAL_RANK": "2"}, ["LOCAL_RANK"], "between 0 and 1"),
    Mistake("no place", TORCHRUN, ["RANK"], "MASTER_ADDR is not", ["MASTER_ADDR"]),
    Mistake(
        "everything", TORCHRUN | {"RANK": "9", "MASTER_PORT": "0"}, ["RANK", "MASTER_PORT"], ""
    ),
    Mistake("PET, no number", {"PET_NNODES": "two"}, ["PET_NNODES"], "MIN:MAX"),
    Mistake("PET, upside down", {"PET_NNODES": "4:2"}, ["PET_NNODES"], "minimum above"),
    Mistake("PET, no place", {"PET_NNODES": "2"}, ["PET_RDZV_ENDPOINT"], "rendezvous endpoint"),
    Mistake("PET, a port", TRAIN_JOB | {"PET_MASTER_PORT": "x"}, ["PET_MASTER_PORT"], "65535"),
    Mistake("hosts, no list", SAGEMAKER | {"SM_HOSTS": "algo-1"}, ["SM_HOSTS"], "list of names"),
    Mistake(
        "a stranger", SAGEMAKER | {"SM_CURRENT_HOST": "b"}, ["SM_CURRENT_HOST"], "not in SM_HOSTS"
    ),
    Mistake("nobody", SAGEMAKER, ["SM_CURRENT_HOST"], "not in SM_HOSTS", ["SM_CURRENT_HOST"]),
    Mistake("a script without srun", BATCH, ["SLURM_JOB_NUM_NODES"], "srun --ntasks-per-node=1"),
    Mistake(
        "hosts cut off",
        NODE | {"SLURM_STEP_NODELIST": "n[01-"},
        ["SLURM_STEP_NODELIST"],
        "host list",
    ),
    Mistake(
        "tasks, no list",
        NODE | {"SLURM_STEP_TASKS_PER_NODE": "1(x)"},
        ["SLURM_STEP_TASKS_PER_NODE"],
        "not a list",
    ),
    Mistake(
        "other nodes",
        NODE | {"SLURM_STEP_NODELIST": "n[01-03]"},
        ["SLURM_STEP_TASKS_PER_NODE"],
        "lists 2 nodes",
    ),
    Mistake(
        "uneven",
        TASK | {"SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_STEP_NUM_TASKS": "3"},
        ["SLURM_STEP_TASKS_PER_NODE"],
        "unequal",
    ),
    Mistake(
        "an export lost",
        TASK,
        ["SLURM_JOB_ID"],
        "SLURM_STEP_NODELIST and SLURM_STEP_TASKS_PER_NODE are not",
        ["SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"],
    ),
    Mistake(
        "ranks dealt out",
        TASK | {"SLURM_PROCID": "2", "SLURM_LOCALID": "1", "SLURM_DISTRIBUTION": "cyclic"},
        ["SLURM_DISTRIBUTION"],
        "block",
    ),
    Mistake(
        "ranks that do not add up",
        TASK | {"SLURM_STEP_NUM_TASKS": "5"},
        ["SLURM_STEP_NUM_TASKS"],
        "4",
    ),
    Mistake("no rank", TASK, ["SLURM_JOB_ID"], "SLURM_PROCID is not", ["SLURM_PROCID"]),
    Mistake("flags among ranks", TASK, ["run.nodes"], "slurm has started one process", nodes="2"),
    Mistake("fewer addresses", SKYPILOT | {"SKYPILOT_NUM_NODES": "3"}, ["SKYPILOT_NODE_IPS"], "2"),
    Mistake(
        "which one",
        SKYPILOT | {"SKYPILOT_NODE_RANK": "2"},
        ["SKYPILOT_NODE_RANK"],
        "between 0 and 1",
    ),
    Mistake("mpirun, no place", MPIRUN, ["MASTER_ADDR"], "mpirun -x MASTER_ADDR"),
    Mistake(
        "mpirun, no local rank",
        MPIRUN | HEAD,
        ["OMPI_COMM_WORLD_RANK"],
        "OMPI_COMM_WORLD_LOCAL_RANK is not",
        ["OMPI_COMM_WORLD_LOCAL_RANK"],
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_detect_environment_contradiction_is_refused(mistake: Mistake) -> None:
    environment = {k: v for k, v in mistake.environment.items() if k not in mistake.without}
    with pytest.raises(InvalidConfig) as caught:
        detect_environment(environment, mistake.nodes)
    errors = caught.value.errors
    assert {error.key for error in errors} == set(mistake.keys)
    assert all(mistake.rule in str(error) for error in errors)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu", ["gpu"]),
        ("n[01-03,7],gpu-a", ["n01", "n02", "n03", "n7", "gpu-a"]),
        ("r[1-2]n[8-10]x", ["r1n8x", "r1n9x", "r1n10x", "r2n8x", "r2n9x", "r2n10x"]),
        ("a.b-c_d,e[099-100]", ["a.b-c_d", "e099", "e100"]),
    ],
)
def test_host_list_is_expanded(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text",
    [
        ",,",
        "a,",
        "a,,b",
        "a b",
        "n[",
        "n[1",
        "n]1[",
        "n[]",
        "n[a]",
        "n[3-1]",
        "n[1-2-3]",
        "n[0-999999999]",
        "n[-1]",
        "n[0-99999][0-99999]",
        "n[1,]",
        "n[\u0661]",
        "",
    ],
)
def test_host_list_malformed_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"host|number"):
        expand_hosts(text)


def test_count_list_is_expanded() -> None:
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    assert expand_counts("8") == [8]
    for text in ("", "0", "2(x0)", "2(3)", "2x3", "1,", "1(x999999),1(x999999)"):
        with pytest.raises(ValueError, match=r"counts|nodes"):
            expand_counts(text)


def test_apply_environment_job_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank gets torchrun's variables; the job of a launcher gets the rendezvous endpoint."""
    job, _, _ = read_job("demo")
    monkeypatch.setattr(os, "environ", dict(TASK | {"SLURM_STEP_NODELIST": "localhost,n02"}))
    assert apply_environment(job) == job
    assert is_launched_rank()
    assert {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR")} == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "localhost",
    }
    monkeypatch.setattr(os, "environ", dict(PYTORCH_JOB))
    run = apply_environment(job).run
    assert (run.nodes, run.rendezvous) == ("4", "run-node-0-0.run:29400")
    assert not is_launched_rank()


@pytest.mark.parametrize(
    ("environment", "whether"),
    [
        ({}, True),
        (SALLOC, True),
        (BATCH, True),
        (NODE, False),
        (NODE | {"SLURM_NODEID": "0"}, True),
        (TRAIN_JOB, True),
        (SAGEMAKER, True),
        (SKYPILOT, True),
    ],
)
def test_is_log_node_shared_output_only_one_node_prints(
    environment: dict[str, str], whether: bool
) -> None:
    assert is_log_node(environment) is whether
