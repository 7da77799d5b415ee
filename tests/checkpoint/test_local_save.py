"""Local checkpoints: a crashed run resumes from them, nodes that lost theirs get copies.

A run never loads a local checkpoint of another run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

from tests.harness import RankError, run_ranks
from tests.monitor.test_anomaly import faults
from tests.small import Overrides, newest_state, plan_here, small_job, this_rank, train_rank
from weft.checkpoint.load import load_checkpoint
from weft.checkpoint.local_save import local_run_dir
from weft.checkpoint.manager import CheckpointManager
from weft.checkpoint.manifest import acquire_lease, checkpoint_step, list_checkpoints
from weft.training.setup import build

# Shared saves after steps 4 and 8, local saves after every step; killed before step 7.
STEPS: Overrides = [
    ("model.num_layers", "1"),
    ("train.steps", "9"),
    ("checkpoint.interval", "4"),
    ("checkpoint.local_interval", "1"),
    ("checkpoint.async_save", "false"),
]
KILLED = faults({"site": "step", "passing": 7, "kind": "kill"})
TWO: Overrides = [("parallel.dp_replicate", "2")]


def train_on_node(overrides: Overrides, store: str, nodes: str, ranks_per_node: int) -> None:
    """Train with a separate directory for each node."""
    own = Path(nodes) / f"node{dist.get_rank() // ranks_per_node}"
    own.mkdir(parents=True, exist_ok=True)
    train_rank([*overrides, ("checkpoint.local_dir", str(own))], store)


class Cluster:
    """A run on nodes of some ranks each."""

    crashed: ClassVar[dict[str, Path]] = {}  # copies of crashed runs

    def __init__(self, directory: Path, store: Path, ranks_per_node: int = 1) -> None:
        self.run, self.nodes = directory / "run", directory / "nodes"
        self._store, self._ranks_per_node = store, ranks_per_node

    def train(self, ranks: int, *overrides: tuple[str, str]) -> None:
        job = [("run.dir", str(self.run)), *STEPS, *overrides]
        shared = (str(self._store), str(self.nodes), self._ranks_per_node)
        run_ranks(train_on_node, ranks, job, *shared, timeout=120)

    def crash(self, ranks: int, *overrides: tuple[str, str]) -> None:
        """Train until rank 1 dies; copy the files of an earlier equal crash."""
        key = repr((self._store, self._ranks_per_node, ranks, overrides))
        if key in self.crashed:
            for name in ("run", "nodes"):
                shutil.copytree(self.crashed[key] / name, self.run.with_name(name))
            identity = local_run_dir(str(self.nodes), self.run / "checkpoints")
            assert identity is not None
            for path in list(self.nodes.glob("*/*")):  # the path of the run is in its identity
                path.rename(path.with_name(identity.name))
            return
        with pytest.raises(RankError, match="SIGKILL"):
            self.train(ranks, *KILLED, *overrides)
        copy = self.run.with_name("copy")
        for name in ("run", "nodes"):
            shutil.copytree(self.run.with_name(name), copy / name)
        self.crashed[key] = copy

    def resumed_step(self) -> int:
        """Return the step from which the last start has resumed."""
        lease = max((self.run / "checkpoints").glob("lease-*.json"))
        return int(json.loads(lease.read_text())["step"])

    def local_checkpoints(self) -> list[Path]:
        return sorted(path for path in self.nodes.rglob("*") if path.is_file())


@pytest.fixture
def cluster(tmp_path: Path, store_path: Path) -> Cluster:
    return Cluster(tmp_path, store_path)


@pytest.fixture(scope="module")
def reference_run(
    store_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, torch.Tensor]:
    """Return the final state of an undisturbed run on two replicas."""
    directory = tmp_path_factory.mktemp("undisturbed")
    job = [("run.dir", str(directory)), *STEPS, *TWO]
    run_ranks(train_rank, 2, job, str(store_path), timeout=120)
    return newest_state(directory)


def assert_same(result: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert result.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(result[name], tensor), name


def test_resume_lost_node_takes_the_copy_of_its_replica(
    cluster: Cluster, reference_run: dict[str, torch.Tensor]
) -> None:
    cluster.crash(2, *TWO)
    assert [checkpoint_step(p) for p in list_checkpoints(cluster.run / "checkpoints")] == [4]
    shutil.rmtree(cluster.nodes / "node1")
    for path in (cluster.run / "checkpoints" / "step-00000004").glob("shard-*"):
        path.unlink()  # the shared checkpoint is not needed
    cluster.train(2, *TWO)
    assert cluster.resumed_step() == 6
    assert_same(newest_state(cluster.run), reference_run)
    assert cluster.local_checkpoints() == []  # a shared checkpoint has replaced them


def test_resume_lost_part_without_replica_falls_back_to_the_store(cluster: Cluster) -> None:
    cluster.crash(2)
    shutil.rmtree(cluster.nodes / "node1")
    cluster.train(2)
    assert cluster.resumed_step() == 4


def test_resume_local_copy_in_another_layout_is_used(tmp_path: Path, store_path: Path) -> None:
    one_node = Cluster(tmp_path, store_path, ranks_per_node=2)
    one_node.crash(2)
    one_node.train(1)
    assert one_node.resumed_step() == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "lost", "step"),
    [
        ([*TWO, ("parallel.dp_shard", "2")], (0, 1), 6),
        ([*TWO, ("parallel.tp", "2")], (2, 3), 6),
        (
            [
                *TWO,
                ("parallel.pp", "2"),
                ("model.tied_embeddings", "false"),
                ("model.num_layers", "2"),
            ],
            (1, 3),
            6,
        ),
        ([*TWO, ("parallel.tp", "2")], (0, 2), 4),  # one shard of all replicas
        ([("parallel.dp_shard", "2"), ("parallel.tp", "2")], (3,), 4),
    ],
)
def test_resume_lost_nodes_of_four_use_the_remaining_copies(
    layout: Overrides, lost: tuple[int, ...], step: int, cluster: Cluster
) -> None:
    cluster.crash(4, *layout)
    for node in lost:
        shutil.rmtree(cluster.nodes / f"node{node}")
    cluster.train(4, *layout)
    assert cluster.resumed_step() == step


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize(
    "pattern", ["shard-*.safetensors", pytest.param("rank-*.json", marks=pytest.mark.slow)]
)
def test_resume_damaged_local_copy_falls_back_to_the_store(cluster: Cluster, pattern: str) -> None:
    cluster.crash(2)
    # Rank 0 may have been killed before it deleted step 5, so damage the newest file of rank 1.
    damage([path for path in cluster.local_checkpoints() if path.match(pattern)][-1])
    cluster.train(2)
    assert cluster.resumed_step() == 4


def test_resume_abandoned_local_copy_is_not_used(cluster: Cluster) -> None:
    cluster.crash(2, *TWO)
    acquire_lease(cluster.run / "checkpoints", 4)  # as after `weft rollback`
    cluster.train(2, *TWO)
    assert cluster.resumed_step() == 4


@pytest.mark.slow
def test_resume_local_copy_of_an_earlier_run_is_not_used(cluster: Cluster) -> None:
    cluster.crash(2, *TWO)
    shutil.rmtree(cluster.run)
    sooner = faults({"site": "step", "passing": 6, "kind": "kill"})
    with pytest.raises(RankError, match="SIGKILL"):
        cluster.train(2, *TWO, ("train.seed", "7"), *sooner)
    cluster.train(2, *TWO, ("train.seed", "7"))
    assert cluster.resumed_step() == 5


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_save_local_copy_killed_midway_resumes_bit_for_bit(
    cluster: Cluster, rank: int, reference_run: dict[str, torch.Tensor]
) -> None:
    killed = faults({"site": "local", "passing": 6, "kind": "kill", "rank": rank})
    with pytest.raises(RankError, match="SIGKILL"):
        cluster.train(2, *TWO, *killed)
    cluster.train(2, *TWO)
    # The other rank may have finished: step 6 is valid if every rank has written its bytes.
    assert cluster.resumed_step() in (5, 6)
    assert_same(newest_state(cluster.run), reference_run)


def test_save_local_copy_without_space_keeps_the_previous_one(cluster: Cluster) -> None:
    full = faults({"site": "local", "passing": 6, "kind": "error", "error": "ENOSPC"})
    both = [(full[0][0], f"{full[0][1][:-1]}, {KILLED[0][1][1:]}")]
    with pytest.raises(RankError, match="SIGKILL"):
        cluster.train(2, *TWO, *both)
    assert {path.parent.name for path in cluster.local_checkpoints()} == {
        "000001-00000005"
    }  # on both
    cluster.train(2, *TWO)
    assert cluster.resumed_step() == 5


def bytes_read(directory: str) -> tuple[int, int]:
    """Return the bytes that this rank reads to load a checkpoint, and the checkpoint's size."""
    job = small_job(("parallel.dp_replicate", "2"), ("model.dim", "256"))
    built = build(plan_here(job), this_rank())
    saver = CheckpointManager(Path(directory), keep_latest=1)
    for param in (p for part in built.model_parts for p in part.parameters()):
        param.grad = torch.ones_like(param)
    built.optimizer.step()
    saver.save(built.model_parts, built.optimizer, {"step": 1, "samples": 8})
    saver.wait()

    def counted() -> int:
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(dict(line.split(": ") for line in lines)["rchar"])

    before = counted()
    load_checkpoint(list_checkpoints(Path(directory))[0], built.model_parts, built.optimizer)
    read = counted() - before
    size = sum(path.stat().st_size for path in Path(directory).rglob("shard-*"))
    return read, size


def test_load_by_replicas_reads_a_checkpoint_once(tmp_path: Path) -> None:
    ranks: Sequence[tuple[int, int]] = run_ranks(bytes_read, 2, str(tmp_path), timeout=60)
    size = ranks[0][1]
    assert size > 1 << 20
    assert size <= sum(read for read, _ in ranks) < 1.1 * size
    assert max(read for read, _ in ranks) < 0.9 * size
