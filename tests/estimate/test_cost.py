"""Cost model: identities, limits, monotonicity, and errors on published runs."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weft.estimate.analytic import DecoderFormulas, split_layers
from weft.estimate.cost import (
    COLLECTIVE_LAUNCH,
    CONTENTION,
    Collective,
    Hardware,
    Matmul,
    Step,
    Work,
    collective_seconds,
    matmul_seconds,
    simulate_pipeline,
    step_seconds,
    work_seconds,
)
from weft.models.decoder_costs import flops_per_token, num_matmul_params, num_params
from weft.models.families.llama import PRESETS
from weft.planning.devices import Network, find_device, get_device, load_clusters, read_clusters
from weft.planning.pipeline_schedule import Action, PipelineSchedule, build_schedule
from weft.planning.plan import Machine
from weft.planning.plan_text import plan_recipe

ROOT = Path(__file__).parent.parent.parent
# The formulas of a plan, with options of other training systems.
accuracy = runpy.run_path(str(ROOT / "benchmarks/plan_accuracy.py"))
DecoderDims, Layout, PublishedRun = (
    accuracy[name] for name in ("DecoderDims", "Layout", "PublishedRun")
)
LLAMA_8B = DecoderDims(32, 4096, 32, 8, 14336, 128256)
LAYOUT = Layout(seq_len=8192, microbatch_size=1, global_batch_size=256, dp_shard=8)
LAYOUTS = {
    "fsdp": LAYOUT,
    "tp": replace(LAYOUT, tp=8, dp_shard=4),
    "tp-async": replace(LAYOUT, tp=8, dp_shard=4, tp_overlap="async"),
    "cp": replace(LAYOUT, cp=4, dp_shard=8),
    "pp": replace(LAYOUT, pp=4, zero=2),
    "interleaved": replace(
        LAYOUT, pp=4, zero=2, stages_per_rank=2, schedule_name="Interleaved1F1B"
    ),
    "replicas": replace(LAYOUT, zero=0, dp_replicate=8, dp_shard=1),
    "float8": replace(LAYOUT, precision="float8", fusion="compiled", activation_checkpoint="full"),
}


def h100(**changes: float) -> Hardware:
    return Hardware(replace(get_device("H100"), **changes), 8)  # type: ignore[arg-type]


def estimate_step(layout: Any, dims: Any = LLAMA_8B) -> Step:
    step: Step = PublishedRun(dims, layout).estimate_step()
    return step


def estimate_memory(layout: Any, rank: int | None = None) -> dict[str, float]:
    """Return the memory of a pipeline rank, or of the fullest one."""
    run = PublishedRun(LLAMA_8B, layout)
    memory: dict[str, float] = (
        run.estimate_memory() if rank is None else run.rank_memory(run.schedule[rank])
    )
    return memory


def seconds(layout: Any, hardware: Hardware) -> float:
    return step_seconds(estimate_step(layout), hardware).total()


def flops(step: Step) -> float:
    """Return FLOPs of all microbatches of one rank of each stage."""
    works = [w for stage in step.stages for w in (*stage.forward, *stage.backward)]
    return step.microbatches * sum(work.flops * count for work, count in works)


# --------------------------------------------------------------------------- operations of a step


@pytest.mark.parametrize("preset", ["8b", "70b", "405b"])
def test_decoder_dims_sizes_equal_the_model(preset: str) -> None:
    config = PRESETS[preset]
    dims = DecoderDims(
        config.num_layers,
        config.dim,
        config.num_heads,
        config.num_kv_heads,
        config.ffn_dim,
        config.vocab_size,
    )
    assert dims.params == num_params(config)
    # FLOPs equal the model's, but a causal mask halves those of attention, and its backward takes
    # 2.5 times the forward instead of 2: the kernel recomputes the scores.
    layout = replace(LAYOUT, microbatch_size=2, dp_shard=4)
    weights = 6.0 * num_matmul_params(config)
    full = flops_per_token(config, layout.seq_len) - weights
    tokens = layout.global_batch_size * layout.seq_len / layout.dp_size
    assert flops(estimate_step(layout, dims)) / tokens == pytest.approx(
        weights + full / 2 * 3.5 / 3
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_flops_of_all_ranks_equal_one_rank(name: str) -> None:
    """All ranks together have the FLOPs of one rank."""
    layout = replace(LAYOUTS[name], activation_checkpoint="none")
    ranks = layout.tp * layout.cp * layout.dp_size
    one = flops(estimate_step(replace(LAYOUT, dp_shard=1)))
    assert ranks * flops(estimate_step(layout)) == pytest.approx(one)


def test_recomputation_is_another_forward() -> None:
    plain, full = (replace(LAYOUT, activation_checkpoint=kind) for kind in ("none", "full"))
    layers = [estimate_step(layout).stages[0] for layout in (plain, full)]
    forward = sum(work.flops * count for work, count in layers[0].forward[1:2])
    back = [sum(work.flops * count for work, count in stage.backward) for stage in layers]
    assert back[1] - back[0] == pytest.approx(forward)
    times = [
        seconds(replace(LAYOUT, activation_checkpoint=kind), h100())
        for kind in ("none", "selective", "full")
    ]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (126, 8, [15, 16, 16, 16, 16, 16, 16, 15]),
        (8, 4, [2, 2, 2, 2]),
        (9, 4, [2, 2, 3, 2]),
        (1, 1, [1]),
    ],
)
def test_layers_of_stages_sum_to_all_layers(layers: int, stages: int, expected: list[int]) -> None:
    assert split_layers(layers, stages) == expected


@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        ({}, {"dp_shard": 16}),
        (
            {"parallel.tp": "4", "activation_checkpoint.mode": "selective"},
            {"dp_shard": 4, "tp": 4, "activation_checkpoint": "selective"},
        ),
        (
            {"parallel.pp": "2", "compile.enable": "true", "train.microbatch_size": "1"},
            {
                "dp_shard": 8,
                "pp": 2,
                "zero": 2,
                "fusion": "compiled",
                "stages_per_rank": 2,
                "schedule_name": "Interleaved1F1B",
            },
        ),
    ],
)
def test_formulas_read_the_plan(changes: dict[str, str], layout: dict[str, Any]) -> None:
    """A plan, and the same layout written out, have equal work and memory."""
    overrides = {
        "train.global_batch_size": "64",
        "train.microbatch_size": "1",
        "activation_checkpoint.mode": "none",
        "compile.enable": "false",
        "pipeline.schedule": "Interleaved1F1B",
    } | changes
    plan, machine = plan_recipe(
        "paper/llama3-8b",
        list(overrides.items()),
        [],
        "2x8xH100",
        lambda section: Machine("cpu", 1),
    )
    device = find_device(machine)
    assert device is not None
    formulas = DecoderFormulas(plan, device)
    same = {"kernel": "attention", "chunked_loss": True, "recv_buffers": False}
    written = replace(LAYOUT, global_batch_size=64, **same, **layout)
    assert formulas.estimate_step() == estimate_step(written)
    assert formulas.estimate_memory() == estimate_memory(written)


# --------------------------------------------------------------------------- seconds of operations


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("better", ["bandwidth", "flops", "attention", "link", "network", "nodes"])
def test_better_hardware_is_never_slower(name: str, better: str) -> None:
    base = h100()
    device = base.device
    hardware = {
        "bandwidth": h100(bandwidth=2 * device.bandwidth),
        "flops": h100(achieved={k: 2 * v for k, v in device.achieved.items()}),  # type: ignore[arg-type]
        "attention": h100(flash=tuple(2 * rate for rate in device.flash)),  # type: ignore[arg-type]
        "link": h100(link=replace(device.link, bandwidth=2 * device.link.bandwidth)),  # type: ignore[arg-type]
        "network": h100(network=replace(device.network, bandwidth=100e9)),  # type: ignore[arg-type]
        "nodes": replace(base, devices=64),
    }[better]
    before, after = (seconds(LAYOUTS[name], h) for h in (base, hardware))
    assert after <= before * (1 + 1e-9)
    if better in ("bandwidth", "flops", "attention"):
        assert after < before


def test_matmul_seconds_follow_the_number_of_tiles() -> None:
    """A matmul of many tiles runs at the device's rate, one of few tiles is slower."""
    device = get_device("H100")
    rate = device.flops("bf16") * device.sustained
    big = Matmul(32768, 8192, 28672)
    assert 0.9 < 2 * big.m * big.k * big.n / rate / matmul_seconds(big, device) < 1
    small = Matmul(256, 256, 256)
    assert 2 * 256**3 / rate / matmul_seconds(small, device) < 0.1
    # A matmul of one row takes the time to read the weights.
    thin = Matmul(1, 8192, 8192)
    assert matmul_seconds(thin, device) >= 2 * 8192**2 / device.bandwidth


def test_all_reduce_costs_gather_plus_scatter() -> None:
    for ranks, stride in ((8, 1), (64, 1), (16, 8)):
        halves, full = (
            sum(
                collective_seconds(Collective(kind, 1e9, "dp", ranks, stride), h100()) for kind in k
            )  # type: ignore[arg-type]
            for k in (("all_gather", "reduce_scatter"), ("all_reduce",))
        )
        assert full == pytest.approx(halves - COLLECTIVE_LAUNCH)


def test_collective_seconds_follow_the_placement_of_a_group() -> None:
    def gather(ranks: int, stride: int) -> float:
        op = Collective("all_gather", 1e9, "tp", ranks, stride)
        return collective_seconds(op, h100())

    assert gather(1, 1) == 0
    inside, all_adapters, one_adapter = gather(8, 1), gather(64, 1), gather(8, 8)
    assert inside < all_adapters < one_adapter
    # The time is bytes over bus bandwidth, plus latency; one adapter has 1/8 of the bandwidth.
    network = get_device("H100").network
    assert one_adapter == pytest.approx(1e9 * 7 / 8 / network.busbw(8), rel=0.05)


def test_all_to_all_over_nodes_takes_the_time_of_one_adapter() -> None:
    """All other collectives of a node share its adapters (NVIDIA/nccl-tests#267)."""
    device, size = get_device("H100"), 1e9

    def seconds(kind: Any, ranks: int, stride: int = 1) -> float:
        return collective_seconds(Collective(kind, size, "ep", ranks, stride), h100())

    assert seconds("all_to_all", 8) == seconds("all_gather", 8)  # inside a node
    for ranks, stride in ((16, 1), (64, 1), (8, 8), (16, 4)):
        nodes = ranks * stride // 8
        local = ranks // nodes
        leaving = size * (ranks - local) / ranks
        expected = leaving / device.network.busbw(nodes)
        assert seconds("all_to_all", ranks, stride) == pytest.approx(expected, rel=0.02)
    assert seconds("all_to_all", 16) > 3 * seconds("all_gather", 16)
    # Few bytes leave a group that hardly leaves its node, so the link decides.
    slow_link = replace(device, link=replace(device.link, bandwidth=1e9))
    op = Collective("all_to_all", size, "ep", 16)
    inside = collective_seconds(op, Hardware(slow_link, 8))
    assert inside == pytest.approx(size * 7 / 16 / 1e9, rel=0.02)


def test_rack_has_no_network_between_its_nodes() -> None:
    device = get_device("GB200")
    for kind in ("all_gather", "all_to_all", "all_reduce"):
        op = Collective(kind, 1e9, "ep", 64)
        assert collective_seconds(op, Hardware(device, 4)) == collective_seconds(
            op, Hardware(device, 64)
        )
        beyond = op._replace(ranks=144)
        assert collective_seconds(beyond, Hardware(device, 4)) > collective_seconds(
            op, Hardware(device, 4)
        )


def test_prefetch_hides_up_to_the_compute_time() -> None:
    compute = Work((Matmul(8192, 8192, 8192),))
    compute_seconds = work_seconds(compute, h100()).total()
    for size in (1e6, 1e8, 1e10):
        op = Collective("all_gather", size, "dp", 8, 1, "prefetch")
        taken = collective_seconds(op, h100())
        both = work_seconds(compute + Work(collectives=(op,)), h100())
        assert both.total() == pytest.approx(max(compute_seconds + CONTENTION * taken, taken))
        exposed = work_seconds(
            compute + Work(collectives=(op._replace(overlap="exposed"),)), h100()
        )
        assert exposed.total() == pytest.approx(compute_seconds + taken)


def test_work_seconds_include_a_slow_host() -> None:
    elapsed = work_seconds(Work(kernels=1000), h100())
    assert elapsed["host"] > 0
    assert elapsed.total() == pytest.approx(1000 * 12e-6)


# --------------------------------------------------------------------------- pipelines


def makespan(
    table: PipelineSchedule, seconds: dict[tuple[int, str], float], hop: float = 0.0
) -> float:
    return max(span.end for span in simulate_pipeline(table, seconds, hop))


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
@pytest.mark.parametrize(("pp", "microbatches"), [(2, 2), (4, 4), (4, 16), (8, 12)])
def test_bubble_of_plain_schedules(schedule: str, pp: int, microbatches: int) -> None:
    """Both schedules take (m + pp - 1)(f + b)."""
    table = build_schedule(schedule, pp, 1, microbatches)
    item = {(s, kind): {"F": 1.0, "B": 2.0}[kind] for s in range(pp) for kind in "FB"}
    assert makespan(table, item) == 3 * (microbatches + pp - 1)


@pytest.mark.parametrize("stages_per_rank", [2, 4])
def test_interleaving_divides_the_bubble(stages_per_rank: int) -> None:
    pp, microbatches = 4, 8
    table = build_schedule("Interleaved1F1B", pp, stages_per_rank, microbatches)
    part = 1 / stages_per_rank
    item = {(s, kind): part for s in range(pp * stages_per_rank) for kind in "FB"}
    end = makespan(table, item)
    assert end == pytest.approx(2 * microbatches + 2 * (pp - 1) * part)


def test_pipeline_p2p_takes_time() -> None:
    table = build_schedule("1F1B", 4, 1, 4)
    item = {(s, kind): 1.0 for s in range(4) for kind in "FB"}
    ends = [makespan(table, item, hop) for hop in (0.0, 0.5)]
    # At least the first microbatch is sent there and back.
    assert ends[1] >= ends[0] + 2 * 3 * 0.5


def test_simulate_pipeline_schedule_with_a_deadlock_is_refused() -> None:
    table = {0: [Action(0, "B", 0), Action(0, "F", 0)]}
    with pytest.raises(ValueError, match="never ends"):
        simulate_pipeline(table, {(0, "F"): 1.0, (0, "B"): 1.0}, 0.0)


def test_step_with_a_pipeline_has_its_bubble() -> None:
    layout = replace(LAYOUTS["pp"], global_batch_size=64)
    elapsed = step_seconds(estimate_step(layout), h100())
    share = elapsed["bubble"] / elapsed.total()
    ideal = 3 / (layout.num_microbatches + 3)  # but the stage with the head is the slowest
    assert ideal / 2 < share < 1.5 * ideal
    gpus = [seconds(LAYOUTS[name], h100()) for name in ("pp", "interleaved")]
    assert gpus[1] < gpus[0]


# --------------------------------------------------------------------------- memory


def gib(**changes: object) -> float:
    held = estimate_memory(replace(LAYOUT, **changes))  # type: ignore[arg-type]
    return sum(held.values()) / 2**30


def test_memory_is_monotonic_in_the_layout() -> None:
    kinds = ("none", "block", "selective", "full")
    result = [gib(activation_checkpoint=kind) for kind in kinds]
    assert result == sorted(result, reverse=True)
    assert gib(dp_shard=64) < gib(dp_shard=8) < gib(dp_shard=2)
    assert gib(microbatch_size=2) > gib() > gib(tp=8)
    assert gib(zero=2) > gib()
    assert gib(chunked_loss=True) < gib()
    # With an interleaved schedule, the first rank holds activations of more microbatches.
    assert gib(pp=4, zero=2) < gib(pp=4, zero=2, stages_per_rank=2, schedule_name="Interleaved1F1B")


def test_memory_pipeline_has_logits_and_buffers() -> None:
    """A pipeline holds all logits, and a buffer for each receive of a stage."""
    layout = replace(LAYOUT, pp=4, zero=2, include_reserved=False)  # 32 microbatches of 8192 tokens
    full, plain = (estimate_memory(replace(layout, output_bytes=b), 3) for b in (2, 0))
    assert (
        full["outputs"] == 2 * 2 * 32 * 8192 * LLAMA_8B.vocab
    )  # all logits, and their concatenation
    assert full["activations"] == full["temporaries"] == 0 < plain["activations"]
    assert full["state"] == plain["state"]
    assert estimate_memory(replace(LAYOUT, output_bytes=2)) == estimate_memory(LAYOUT)
    hidden = 8192 * LLAMA_8B.hidden * 2
    buffers = [estimate_memory(layout, rank)["buffers"] / hidden for rank in range(4)]
    # 32 gradients and 32 inputs; the 4 - rank inputs in flight are counted as activations.
    assert buffers == [32, 64 - 3, 64 - 2, 32 - 1]
    assert "buffers" not in estimate_memory(replace(layout, recv_buffers=False))


def test_memory_v_schedule_has_both_tables_on_one_rank() -> None:
    """With a V schedule, rank 0 has the first and last stage: embedding, head, logits."""
    layout = replace(LAYOUTS["interleaved"], schedule_name="ZBVZeroBubble")
    first, *rest = (estimate_memory(layout, rank) for rank in range(4))
    tables = 2 * LLAMA_8B.vocab * LLAMA_8B.hidden
    for other in rest:
        assert first["state"] - other["state"] == pytest.approx(16 * tables / 8)
        assert first["temporaries"] > other["temporaries"]
        # The first stage receives no input, the last no gradient.
        assert first["buffers"] < other["buffers"]
    loop, v = (estimate_step(subset).optimizer_work for subset in (LAYOUTS["interleaved"], layout))
    assert v.traffic_bytes - loop.traffic_bytes == pytest.approx(36 * tables / 2 / 8)


def test_memory_gradients_of_a_finished_stage_are_reduced() -> None:
    """With as many microbatches as ranks, one stage ends before the other begins backward."""
    layout = replace(LAYOUT, pp=4, zero=2, global_batch_size=32, activation_checkpoint="full")
    twice = replace(layout, stages_per_rank=2, schedule_name="Interleaved1F1B")
    layer = LLAMA_8B.layer_params
    plain, interleaved = (estimate_memory(subset, 1)["gathered"] for subset in (layout, twice))
    assert plain == (2 + 4) * 8 * layer
    assert interleaved == (2 + 4 / 2) * 8 * layer
    # With many microbatches, both stages hold gradients.
    many = estimate_memory(replace(twice, global_batch_size=128), 1)["gathered"]
    assert many == plain
    unpiped = replace(layout, pp=1, dp_shard=8, global_batch_size=16)
    assert estimate_memory(unpiped)["gathered"] == pytest.approx(6 * LLAMA_8B.params, rel=1e-4)


def test_memory_inputs_of_collectives_are_freed_late() -> None:
    """Each layer of a stage holds two full outputs, up to the length of the queue."""
    late = replace(LAYOUTS["tp"], uses_record_stream=True)
    layer = 2 * 2 * 8192 * LLAMA_8B.hidden

    def waits(layout: Any) -> float:
        return estimate_memory(layout)["late"] / layer

    assert waits(replace(late, pp=4, zero=2)) == LLAMA_8B.layers / 4
    assert waits(late) == pytest.approx(1024 / 70)
    assert waits(replace(late, fusion="compiled")) == LLAMA_8B.layers
    assert "late" not in estimate_memory(LAYOUTS["tp"])
    assert "late" not in estimate_memory(replace(LAYOUT, uses_record_stream=True))


def test_stage_layers_set_memory_and_time() -> None:
    layout = replace(LAYOUTS["pp"], stage_layers=(14, 8, 6, 4))
    assert gib(pp=4, zero=2, stage_layers=(14, 8, 6, 4)) > gib(pp=4, zero=2)
    assert seconds(layout, h100()) > seconds(LAYOUTS["pp"], h100())
    assert flops(estimate_step(layout)) == pytest.approx(flops(estimate_step(LAYOUTS["pp"])))


def test_offloading_trades_memory_for_time() -> None:
    parts = (0.0, 0.5, 1.0)
    held = [estimate_memory(replace(LAYOUT, offload_fraction=part)) for part in parts]
    assert held[1]["activations"] == held[0]["activations"] / 2
    assert held[2]["activations"] == 0
    times = [seconds(replace(LAYOUT, offload_fraction=part), h100()) for part in parts]
    assert times == sorted(times)
    assert times[0] < times[2]


def test_p2p_scattered_has_a_fraction_of_the_bytes() -> None:
    layout = replace(LAYOUTS["pp"], tp=4, dp_shard=2, sequence_parallel=False)
    hops = [estimate_step(replace(layout, scatter_p2p=subset)).p2p for subset in (False, True)]
    assert hops[0]
    assert hops[1]
    assert hops[0].bytes == 4 * hops[1].bytes


def test_memory_state_is_16_bytes_a_parameter() -> None:
    held = estimate_memory(LAYOUT)
    assert held["state"] == pytest.approx(16 * LLAMA_8B.params / 8, rel=1e-3)


# --------------------------------------------------------------------------- hardware


def test_network_bandwidth_is_interpolated() -> None:
    network = Network(100.0, 1e-6, ((2, 1.0), (32, 0.25)))
    assert [network.busbw(n) for n in (1, 2, 8, 32, 1000)] == pytest.approx([100, 100, 50, 25, 25])


def test_users_add_and_change_devices(tmp_path: Path) -> None:
    clusters_file = tmp_path / "clusters.toml"
    clusters_file.write_text(
        '[devices."H100"]\nsustained = 0.7\n'
        '[devices."Lab H100"]\nlike = "H100"\nnetwork = "lab"\nmemory_gib = 64\n'
        "[networks.lab]\nbandwidth = 12e9\nlatency = 1e-5\nachieved = { 2 = 1.0 }\n"
    )
    shipped = Path(ROOT / "weft/planning/clusters.toml")
    devices, networks = read_clusters(shipped, clusters_file)
    assert devices["H100"].sustained == 0.7
    assert devices["H100"].bf16 == get_device("H100").bf16
    lab = devices["Lab H100"]
    assert (lab.memory_gib, lab.network, lab.sustained) == (64, networks["lab"], 0.7)


def test_every_device_can_be_priced() -> None:
    for device in load_clusters()[0].values():
        hardware = Hardware(device, 8)
        for name in ("fsdp", "float8"):
            assert 0 < seconds(LAYOUTS[name], hardware) < float("inf"), device.name


# --------------------------------------------------------------------------- published runs


PUBLISHED = (ROOT / "benchmarks/published_runs.csv").read_text().splitlines()


def figures(rows: list[str], file: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    """Return the benchmark's figures for rows of published runs."""
    file.write_text("\n".join([PUBLISHED[0], *rows]) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["plan_accuracy.py", str(file), "--json"])
        runpy.run_path(str(ROOT / "benchmarks/plan_accuracy.py"), run_name="__main__")
    report: dict[str, float] = json.loads(capsys.readouterr().out)
    return report


def test_published_runs_sample_is_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sample is predicted nearly as well as all rows; unreadable rows are left out."""
    odd = [PUBLISHED[1].split(",") for _ in range(4)]
    odd[0][9] = "Abacus-3000"
    odd[1][10] = "."
    odd[2][3] = "-1"
    odd[3] = ["torn"]
    subset = PUBLISHED[1::6]
    result = figures([*subset, *(",".join(row) for row in odd)], tmp_path / "runs.csv", capsys)
    assert set(result) == {
        "throughput_median_error",
        "throughput_p90_error",
        "throughput_median_error_calibrated",
        "throughput_p90_error_calibrated",
        "memory_median_error",
        "memory_worst_error",
        "rank_correlation",
        "top1_regret",
        "fits_accuracy",
        "rows",
        "skipped",
    }
    assert (result["rows"], result["skipped"]) == (len(subset), 4)
    assert result["throughput_median_error"] < 0.07
    assert result["throughput_p90_error"] < 0.2
    assert result["memory_median_error"] < 0.04
    assert result["fits_accuracy"] > 0.9


@pytest.mark.slow
def test_published_runs_have_the_figures_of_the_pages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = figures(PUBLISHED[1:], tmp_path / "runs.csv", capsys)
    assert (result["rows"], result["skipped"]) == (293, 1)
    prediction = {name: f"{100 * result[name]:.1f} %" for name in result if "error" in name}
    for page in ("docs/results.md", "docs/planner.md"):
        text = (ROOT / page).read_text()
        for name in ("throughput_median_error", "throughput_p90_error", "memory_median_error"):
            assert prediction[name] in text, (page, name, prediction[name])
    results = (ROOT / "docs/results.md").read_text()
    assert [value for value in prediction.values() if value not in results] == []
    assert f"rank correlation in nine choice sets {result['rank_correlation']:.2f}" in results
    assert f"loses {100 * result['top1_regret']:.1f} %" in results
    assert f"{100 * result['fits_accuracy']:.1f} %" in results
