"""Resolve a job into a plan: degrees, batch arithmetic, and every error."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from weft.config.errors import InvalidConfig
from weft.config.reader import read_job
from weft.config.schema import Job
from weft.planning.degrees import divisors, format_choices
from weft.planning.devices import peak_flops
from weft.planning.plan import Machine, Plan
from weft.planning.resolve import resolve
from weft.training.machine import detect_machine

CPU = Machine("cpu", devices=8)
H100 = Machine("cuda", devices=8, device_name="NVIDIA H100 80GB HBM3")


def job(*overrides: tuple[str, str]) -> Job:
    created, _, errors = read_job("demo", [("train.global_batch_size", "16"), *overrides])
    assert errors == []
    return created


def test_resolve_degrees_and_batches_multiply_up() -> None:
    """Degrees multiply to the world size, batch sizes to the global batch, or it is an error."""
    plans = 0
    for world, replicate, batch, micro in itertools.product(
        (1, 2, 3, 4, 6, 8), (1, 2, 3), (6, 8, 24), ("auto", "1", "2")
    ):
        chosen = job(
            ("parallel.dp_replicate", str(replicate)),
            ("train.global_batch_size", str(batch)),
            ("train.microbatch_size", micro),
        )
        if world % replicate or batch % world:
            with pytest.raises(InvalidConfig) as caught:
                resolve(chosen, Machine("cpu", 8, world_size=world))
            assert all(error.remedy for error in caught.value.errors)
            continue
        plan = resolve(chosen, Machine("cpu", 8, world_size=world))
        plans += 1
        assert plan.dp_replicate * plan.dp_shard == plan.world_size == world
        assert plan.dp_size * plan.local_batch_size == batch
        assert (
            0
            <= plan.microbatch_size * plan.num_microbatches - plan.local_batch_size
            < plan.microbatch_size
        )
        assert plan.microbatch_size == min(plan.local_batch_size, int(micro.replace("auto", "99")))
        assert plan.tokens_per_step == batch * 256
    assert plans > 30


@pytest.mark.parametrize(
    ("machine", "overrides", "workers"),
    [
        (CPU, [], 4),  # at most four ranks on a CPU: threads use the other cores
        (Machine("cpu", 1), [], 1),
        (Machine("cpu", 2), [], 2),
        (Machine("cpu", 3), [], 2),  # 16 is not divisible by 3
        (H100, [], 8),
        (Machine("cuda", 6), [], 4),
        (H100, [("train.microbatch_size", "4")], 4),
        (CPU, [("parallel.dp_shard", "2"), ("parallel.dp_replicate", "4")], 8),
        (CPU, [("run.nproc_per_node", "16")], 16),
    ],
)
def test_resolve_local_workers_follow_the_machine(
    machine: Machine, overrides: list[tuple[str, str]], workers: int
) -> None:
    plan = resolve(job(*overrides), machine)
    assert plan.world_size == workers
    assert plan.num_threads == max(1, machine.devices // workers)


GIB = 1 << 30


@pytest.mark.parametrize(
    ("machine", "overrides", "degrees"),
    [
        (Machine("cpu", 4, memory_bytes=64 * GIB), [], (4, 1)),
        # A rank of the launcher resolves the same job, and must get the same layout.
        (Machine("cpu", 4, world_size=4, memory_bytes=64 * GIB), [], (4, 1)),
        (Machine("cpu", 4, memory_bytes=768 << 20), [], (2, 2)),  # four copies do not fit
        (Machine("cpu", 4, memory_bytes=1 << 20), [], (1, 4)),  # nothing fits
        (Machine("cpu", 4), [], (1, 4)),  # unknown memory
        (Machine("cpu", 4, memory_bytes=64 * GIB), [("run.nproc_per_node", "4")], (1, 4)),
        (Machine("cpu", 4, memory_bytes=64 * GIB), [("parallel.fsdp_prefetch", "2")], (1, 4)),
        (Machine("cuda", 4, memory_bytes=64 * GIB), [], (1, 4)),
    ],
)
def test_resolve_cpu_without_a_layout_replicates_what_fits(
    machine: Machine, overrides: list[tuple[str, str]], degrees: tuple[int, int]
) -> None:
    plan = resolve(job(*overrides), machine)
    assert (plan.dp_replicate, plan.dp_shard) == degrees


def test_resolve_threads_follow_the_environment() -> None:
    machine = Machine("cpu", devices=8, num_threads=3)
    assert resolve(job(), machine).num_threads == 3
    invariant = resolve(job(("train.world_size_invariant", "true")), machine)
    assert invariant.num_threads == 1


@pytest.mark.parametrize(
    ("text", "threads"), [("", None), ("3", 3), ("4,2", 4), ("0", None), ("all", None)]
)
def test_detect_machine_reads_omp_num_threads(
    text: str, threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert detect_machine(job().run).num_threads == threads


def test_resolve_launcher_sets_the_world_size() -> None:
    machine = Machine("cpu", devices=8, world_size=16, local_world_size=4)
    plan = resolve(job(("run.nproc_per_node", "2")), machine)
    assert (plan.world_size, plan.dp_shard, plan.num_threads) == (16, 16, 2)


def test_precision_and_peak_follow_the_device() -> None:
    on_cpu, on_gpu = resolve(job(), CPU), resolve(job(), H100)
    assert (on_cpu.compute_dtype, on_cpu.peak_flops) == ("float32", None)
    assert (on_gpu.compute_dtype, on_gpu.peak_flops) == ("bfloat16", 989e12)
    # The table has bfloat16 only.
    assert resolve(job(("precision.compute_dtype", "float32")), H100).peak_flops is None


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10G", 70),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA H200", 989),
        ("NVIDIA GeForce RTX 4090", 165),
        ("AMD EPYC", None),
        ("NVIDIA A10", None),
        ("NVIDIA L40", None),
    ],
)
def test_peak_flops_follows_the_driver_name(name: str, tera: float | None) -> None:
    assert peak_flops(name) == (None if tera is None else tera * 1e12)


def test_run_dir_follows_the_keys_that_change_training() -> None:
    """Equal training has the same directory; other training has another one."""

    def directory(*overrides: tuple[str, str]) -> str:
        changed, base, _ = read_job("demo", overrides)
        return resolve(changed, CPU, "demo", base).run_dir

    assert directory().endswith("/runs/demo")
    for same in (
        ("run.nproc_per_node", "2"),
        ("train.steps", "5"),
        ("checkpoint.interval", "7"),
        ("activation_checkpoint.mode", "full"),
        ("resilience.step_timeout", "99"),
        ("data.cache_dir", "elsewhere"),
    ):
        assert directory(same) == directory(), same
    names = {
        directory(("optim.lr", "1e-4")),
        directory(("data.path", "x")),
        directory(("train.seed", "1")),
        directory(("resilience.on_anomaly", "skip")),
    }
    assert len(names | {directory()}) == 5
    assert directory(("optim.lr", "1e-4")) == directory(("optim.lr", "0.0001"))
    assert directory(("run.dir", "/a/b"), ("optim.lr", "1")) == "/a/b"


def test_run_dir_of_user_recipes_is_not_shared(tmp_path: Path) -> None:
    def directory(recipe: Path, lr: str) -> str:
        recipe.parent.mkdir(exist_ok=True)
        recipe.write_text(f'extends = "demo"\n[optim]\nlr = {lr}\n')
        created, base, _ = read_job(str(recipe))
        return resolve(created, CPU, str(recipe), base).run_dir

    first = directory(tmp_path / "a/mine.toml", "1e-3")
    assert directory(tmp_path / "b/mine.toml", "2e-3") != first
    assert directory(tmp_path / "a/mine.toml", "3e-3") != first
    assert directory(tmp_path / "a/mine.toml", "1e-3") == first


def test_plans_of_equal_jobs_are_equal() -> None:
    first, second = resolve(job(), CPU), resolve(job(), CPU)
    assert first == second
    tree = json.loads(first.to_json())
    assert tree["model"]["num_layers"] == first.model.num_layers
    assert {*tree, "job"} == set(Plan.__dataclass_fields__)


def test_divisors_and_choices_are_short_lists() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(12, at_most=5) == [1, 2, 3, 4]
    assert format_choices([3]) == "3"
    assert format_choices([1, 2, 4]) == "1, 2 or 4"
    assert format_choices(divisors(5040)).count(",") < 9


@pytest.mark.parametrize(
    ("overrides", "key", "rule"),
    [
        ([("debug.layer_stats_steps", "2,2000-3000")], "", ""),
        (
            [("debug.layer_stats_steps", "2000")],
            "debug.layer_stats_steps",
            "begins after the last step",
        ),
        (
            [("run.nodes", "1:4")],
            "debug.deterministic",
            "needs a fixed number of ranks, but run.nodes=1:4",
        ),
        ([("compile.enable", "true")], "debug.autograd_anomaly", "compiled backward pass"),
        ([("parallel.tp", "2")], "debug.autograd_anomaly", "gradients that parallel.tp shards"),
    ],
)
def test_debug_incompatible_keys_are_refused(
    overrides: list[tuple[str, str]], key: str, rule: str
) -> None:
    chosen = [*overrides, ("train.steps", "100")]
    if key not in ("", "debug.layer_stats_steps"):
        chosen.append((key, "true"))
    if not key:
        resolve(job(*chosen), CPU)
        return
    with pytest.raises(InvalidConfig, match=rule) as caught:
        resolve(job(*chosen), CPU)
    assert [error.key for error in caught.value.errors] == [key]
    assert caught.value.errors[0].remedy


@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        ([("model.qk_norm", "head")], "a norm of queries and keys undoes"),
        ([("model.qk_norm", "unit")], "a norm of queries and keys undoes"),
        ([("lora.rank", "2")], "which LoRA freezes"),
        ([("model.attention_softcap", "50")], ""),  # a warning
        ([("model.attention_softcap", "101")], ""),
    ],
)
def test_qk_clip_without_effect_is_refused(overrides: list[tuple[str, str]], rule: str) -> None:
    """Logging the logits needs none of this."""
    resolve(job(*overrides, ("monitor.attention_logits", "true")), CPU)
    clipped = job(*overrides, ("optim.qk_clip_threshold", "100"))
    if not rule:
        resolve(clipped, CPU)
        return
    with pytest.raises(InvalidConfig, match=rule) as caught:
        resolve(clipped, CPU)
    (error,) = caught.value.errors
    assert error.key == "optim.qk_clip_threshold"
    assert error.depends == (overrides[0][0],)
