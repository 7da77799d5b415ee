"""Every shipped recipe can be submitted to every kind of cluster, and started on its nodes."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.preparation.test_environment import NODE
from tests.submission.requests import format_errors
from weft.config.errors import InvalidConfig
from weft.config.files import write_json
from weft.config.reader import read_job, recipe_names
from weft.config.schema import replace
from weft.models import FAMILIES
from weft.models.hf_mapping import to_hf_config
from weft.planning.devices import parse_cluster
from weft.planning.model_config import REQUIRED, resolve_model
from weft.planning.plan import Machine, Plan
from weft.planning.plan_text import cluster_machine
from weft.planning.resolve import resolve_nodes
from weft.preparation.environment import apply_environment
from weft.submission.job_placement import check_job_paths
from weft.submission.submit import CLUSTERS, JobRequest, build_request, get_cluster

PODS = {
    "image": "registry/weft:1",
    "instance_type": "p5.48xlarge",
    "mounts": {"/runs": "pvc:runs", "/shared": "pvc:shared"},
}
# What a user adds to a recipe for each kind of cluster; the first word is the cluster.
LAUNCH: dict[str, dict[str, object]] = {
    "slurm": {},
    "slurm pyxis": {"image": "nvcr.io/team/weft:1", "mounts": {"/shared": "host:/shared"}},
    "slurm apptainer": {
        "image": "nvcr.io/team/weft:1",
        "container": "apptainer",
        "mounts": {"/shared": "host:/shared"},
    },
    "kubernetes trainjob": PODS,
    "kubernetes jobset": PODS | {"kind": "jobset", "queue": "team", "priority": "high"},
    "kubernetes hyperpod": PODS | {"kind": "hyperpod", "queue": "team"},
    "sagemaker": {
        "image": "1.dkr.ecr.us-east-1.amazonaws.com/weft:1",
        "role": "arn:aws:iam::123456789012:role/trainer",
        "instance_type": "ml.p5.48xlarge",
        "bucket": "s3://my-bucket",
        "subnets": ["subnet-a1"],
        "security_groups": ["sg-1"],
        "mounts": {"/shared": "fsx:fs-0123456789abcdef0:/abc"},
    },
    "skypilot": {
        "image": "registry/weft:1",
        "bucket": "s3://my-bucket",
        "mounts": {"/shared": "s3://my-models/llama"},
    },
}
# These recipes set all degrees, so they have a fixed number of ranks.
ALL_DEGREES = [name for name in recipe_names() if read_job(name)[0].parallel.num_ranks is not None]


def overrides(recipe: str, directory: Path) -> list[tuple[str, str]]:
    """Return what a recipe leaves to its user: data, a model, and the hardware."""
    job, _, _ = read_job(recipe)
    chosen = [("data.path", "s3://texts/web/"), ("run.dir", "/shared/run")]
    if job.model.path == REQUIRED:
        config, _ = resolve_model("llama", "toy", {})
        write_json(directory / "config.json", to_hf_config(FAMILIES["llama"], config, "float32"))
        chosen.append(("model.path", str(directory)))
    elif job.data.tokenizer == "train":
        chosen.append(("data.tokenizer", "/shared/tokenizer.json"))
    if job.run.cluster == "local":
        chosen.append(("run.cluster", f"{max(1, (job.parallel.num_ranks or 1) // 8)}x8xH100"))
    return chosen


def no_machine(_: object) -> Machine:
    raise AssertionError("the cluster describes the nodes")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@cache
def slurm_request(recipe: str, directory: Path) -> JobRequest:
    return build_request("slurm", recipe, overrides(recipe, directory), (), no_machine)


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(name, marks=[pytest.mark.slow] if number % 4 else [])
        for number, name in enumerate(recipe_names())
    ],
)
def test_launch_every_recipe_renders_on_every_cluster(recipe: str, directory: Path) -> None:
    """Also with a model that only the nodes have, and no path that they do not have."""
    request = slurm_request(recipe, directory)
    assert {name.split()[0] for name in LAUNCH} == set(CLUSTERS)
    for kind, launch in LAUNCH.items():
        on, job = kind.split()[0], replace(request.job, launch=launch)
        if job.model.path:
            job = replace(job, model={"path": "/shared/model"})
        changed, cluster = dataclasses.replace(request, job=job), get_cluster(on)
        assert format_errors(cluster.find_errors(changed)) == ""
        assert format_errors(check_job_paths(on, job)) == ""
        text = cluster.render(changed)
        assert "weft" in text
        if on in ("kubernetes", "sagemaker"):  # SkyPilot's schemas need its own environment
            assert cluster.check(text) == []


# --------------------------------------------------------------------------- on the nodes


def node(cluster: str) -> Machine:
    """Return the machine that a node of a cluster detects: it does not know the other nodes."""
    machine = cluster_machine(parse_cluster(cluster))
    return dataclasses.replace(machine, world_size=None, local_world_size=None)


@pytest.mark.parametrize("recipe", ALL_DEGREES)
def test_srun_every_layout_has_one_rank_per_gpu(
    recipe: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, _, _ = read_job(recipe, overrides(recipe, directory))
    num_nodes, per_node = (int(n) for n in job.run.cluster.split("x")[:2])
    nodes = f"n[1-{num_nodes}]"
    slurm = NODE | {
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_STEP_NODELIST": nodes,
        **dict.fromkeys(("SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SLURM_NTASKS"), str(num_nodes)),
        **dict.fromkeys(("SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS"), str(num_nodes)),
        **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), f"1(x{num_nodes})"),
    }
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    plan = resolve_nodes(apply_environment(job), node(job.run.cluster), recipe)
    assert plan.node_counts == (num_nodes,)
    assert (plan.local_world_size, plan.world_size) == (per_node, job.parallel.num_ranks)


GPUS, CPUS = Machine("cuda", 8, "H100", peer_access=True, capability=(9, 0)), Machine("cpu", 2)


def plan_nodes(nodes: str, words: str, machine: Machine) -> Plan:
    keys = [("run.nodes", nodes), ("run.rendezvous", "a:1"), ("train.global_batch_size", "64")]
    keys += [tuple(word.split("=")) for word in words.split()]
    job, _, errors = read_job("demo", [("model.preset", "1b"), ("model.num_heads", "16"), *keys])
    assert not errors
    return resolve_nodes(job, machine)


@pytest.mark.parametrize(
    ("nodes", "words", "machine", "expected"),
    [
        ("2", "parallel.dp_shard=2", CPUS, ((2,), 1)),
        ("2", "parallel.dp_shard=16", GPUS, ((2,), 8)),
        ("1", "parallel.dp_shard=2", GPUS, ((1,), 2)),
        # Two nodes hold one group of tp x pp.
        ("2", "parallel.tp=8 parallel.pp=2", GPUS, ((2,), 8)),
        ("4", "parallel.tp=8 parallel.pp=2", GPUS, ((4,), 8)),
        ("2", "parallel.pp=2", CPUS, ((2,), 2)),
        # The batch is divided among the ranks of all nodes.
        ("2", "train.global_batch_size=4", dataclasses.replace(CPUS, devices=4), ((2,), 2)),
        ("1:4", "parallel.dp_shard=16", GPUS, ((2,), 8)),
        ("1:4", "parallel.tp=8 parallel.pp=2", GPUS, ((2, 4), 8)),
    ],
)
def test_nproc_auto_divides_the_layout_among_the_nodes(
    nodes: str, words: str, machine: Machine, expected: tuple[tuple[int, ...], int]
) -> None:
    plan = plan_nodes(nodes, words, machine)
    assert (plan.node_counts, plan.local_world_size) == expected


@pytest.mark.parametrize(
    ("nodes", "words", "machine", "message"),
    [
        (
            "1",
            "parallel.dp_shard=32 parallel.tp=8",
            GPUS,
            "parallel.dp_shard=32 times tp=8 needs 256 ranks, but 1 node with at most 8 GPUs can "
            "have only 8. Use auto, or run.nodes=32.",
        ),
        (
            "4",
            "parallel.dp_shard=2 parallel.tp=8",
            GPUS,
            "parallel.dp_shard=2 times tp=8 needs 16 ranks, but 4 nodes with 8 GPUs have 32. Use "
            "auto, or run.nodes=2, or run.nproc_per_node=4.",
        ),
        (
            "3",
            "parallel.dp_shard=2 parallel.tp=8",
            GPUS,
            "parallel.dp_shard=2 times tp=8 needs 16 ranks, but 3 nodes cannot have equal shares "
            "of them. Use auto, or run.nodes=2.",
        ),
        (
            "1",
            "parallel.tp=8 parallel.pp=2",
            GPUS,
            "parallel.tp=8 times pp=2 needs 16 ranks, but 1 node with at most 8 GPUs can have "
            "only 8. Use run.nodes=2.",
        ),
        (
            "2",
            "parallel.dp_shard=2 run.nproc_per_node=2",
            CPUS,
            "parallel.dp_shard=2 is not equal to the 4 ranks. Use 4, or auto, or run.nodes times "
            "run.nproc_per_node = 2.",
        ),
    ],
)
def test_layout_that_does_not_fit_the_nodes_is_refused_with_a_remedy(
    nodes: str, words: str, machine: Machine, message: str
) -> None:
    with pytest.raises(InvalidConfig) as refusal:
        plan_nodes(nodes, words, machine)
    assert message in str(refusal.value)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["run.nodes", "torchrun"])
def test_train_a_layout_of_two_nodes_runs_one_rank_on_each(start: str, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    words = ["demo", "--parallel.dp_shard", "2", "--run.dir", str(tmp_path / "run")]
    words += ["--train.steps", "2", "--train.seq_len", "64", "--run.device", "cpu"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    torchrun += ["--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    weft = [sys.executable, "-m", "weft", "train", *words]
    command = [*weft, "--run.nodes", "2", "--run.rendezvous", endpoint]
    if start == "torchrun":
        command = [*torchrun, "-m", "weft", "train", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    nodes = [
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in nodes]
    finally:
        for process in nodes:
            process.terminate()  # weft ends its ranks
    assert [process.returncode for process in nodes] == [0, 0], "\n".join(outputs)
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert (plan["world_size"], plan["local_world_size"]) == (2, 1)
