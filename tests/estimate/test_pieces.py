"""Composed steps equal traced ones: time and memory, for families, layouts and techniques."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.estimate.cost import Collective, Matmul, Work, build_hardware, device_spec
from weft.estimate.forecast import forecast
from weft.estimate.pieces import HEAD, PieceEstimate, Pieces, UnitWork, interpolate, piece_plan
from weft.planning.plan import Machine, Plan
from weft.planning.plan_text import plan_recipe

SMALL = (
    ("model.num_layers", "9"),
    ("model.dim", "1024"),
    ("model.num_heads", "8"),
    ("model.num_kv_heads", "8"),
    ("model.ffn_dim", "2816"),
    ("model.vocab_size", "32000"),
    ("model.max_seq_len", "4096"),
    ("train.seq_len", "2048"),
    ("train.global_batch_size", "64"),
    ("train.microbatch_size", "2"),
    ("precision.float8", "none"),
)
EXPERTS = (
    ("model.num_layers", "9"),
    ("model.dim", "1024"),
    ("model.num_heads", "8"),
    ("model.head_dim", "128"),
    ("model.num_experts", "16"),
    ("model.vocab_size", "32000"),
    ("train.seq_len", "2048"),
    ("train.global_batch_size", "64"),
)


def plan_of(recipe: str, text: str, cluster: str = "1x8xH100") -> tuple[Plan, Machine]:
    keys = EXPERTS if recipe.startswith("qwen3-30b") else SMALL
    words = [word.partition("=") for word in text.split()]
    changed = [(key, value) for key, _, value in words]
    kept = [pair for pair in keys if pair[0] not in dict(changed)]
    return plan_recipe(recipe, [*kept, *changed], [], cluster, lambda device: Machine("cpu", 2))


OFTEN = (
    ("llama3-8b-8gpu", "parallel.tp=2 activation_checkpoint.mode=selective"),
    ("llama3-8b-8gpu", "parallel.pp=2 pipeline.schedule=Interleaved1F1B train.microbatch_size=4"),
    ("qwen3-30b-a3b", "parallel.ep=4"),
)
SELDOM = (
    ("llama3-8b-8gpu", "parallel.dp_replicate=2 parallel.dp_shard=4 train.microbatch_size=8"),
    ("llama3-8b-8gpu", "parallel.reshard_after_forward=never compile.enable=false"),
    ("llama3-8b-8gpu", "parallel.cp=2 activation_checkpoint.mode=full"),
    ("llama3-8b-8gpu", "parallel.pp=4 pipeline.schedule=ZBVZeroBubble"),
    ("llama3-8b-8gpu", "precision.float8=tensorwise precision.float8_small=true parallel.tp=4"),
    ("llama3-8b-8gpu", "model.layer_pattern=LLG model.sliding_window=512"),
    ("llama3-8b-8gpu", "lora.rank=16 optim.state_dtype=float32"),
    ("qwen3-30b-a3b", "parallel.ep=8 parallel.ep_dispatch=padded model.dense_layers=1"),
    ("qwen3-30b-a3b", "parallel.ep=4 parallel.tp=2 parallel.etp=1"),
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("recipe", "text"),
    [*OFTEN, *(pytest.param(*case, marks=pytest.mark.slow) for case in SELDOM)],
)
def test_pieces_compose_to_the_traced_step(recipe: str, text: str) -> None:
    plan, machine = plan_of(recipe, text)
    device = device_spec(plan, machine)
    assert device is not None
    traced = forecast(plan, machine, device)
    estimate = Pieces(device).estimate(plan)
    seconds = estimate.step_seconds(build_hardware(plan, device)).total()
    # In a step of some milliseconds the ends, which pieces leave out, are some percent.
    assert seconds == pytest.approx(traced.step_seconds, rel=0.05)
    live = sum(traced.memory.live_bytes.values())
    assert estimate.live_bytes() == pytest.approx(live, rel=0.15)


def test_layouts_share_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Degrees of data parallelism, stages and microbatches need no other piece."""
    sizes: list[object] = []
    plan, machine = plan_of("llama3-8b-8gpu", "")
    device = device_spec(plan, machine)
    assert device is not None
    pieces = Pieces(device)
    recorded = pieces._recorded

    def record(plan: Plan, size: int) -> object:
        sizes.append((pieces._key(plan), size))
        return recorded(plan, size)

    monkeypatch.setattr(pieces, "_recorded", record)
    for text in (
        "train.microbatch_size=1",
        "train.microbatch_size=1 parallel.dp_replicate=2 parallel.dp_shard=4",
        "train.microbatch_size=1 parallel.pp=2 pipeline.schedule=1F1B",
        "train.microbatch_size=1 train.global_batch_size=128",
        "train.microbatch_size=1 parallel.reshard_after_forward=never",
    ):
        pieces.estimate(plan_of("llama3-8b-8gpu", text)[0]).step()
    assert len(set(sizes)) == 1
    for text in ("parallel.tp=2", "train.seq_len=1024", "model.dim=512", "compile.enable=false"):
        assert pieces._key(plan) != pieces._key(plan_of("llama3-8b-8gpu", text)[0]), text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "parallel.tp=4 parallel.pp=2",
        "parallel.cp=2 parallel.dp_replicate=2 parallel.dp_shard=2",
        "model.num_layers=2",
    ],
)
def test_piece_plan_keeps_inner_axes_and_drops_the_others(text: str) -> None:
    plan, _ = plan_of("llama3-8b-8gpu", text)
    small = piece_plan(plan, 2)
    assert (small.tp, small.cp, small.pp, small.dp_replicate) == (plan.tp, plan.cp, 1, 1)
    assert small.world_size == small.tp * small.cp * small.dp_shard
    assert (small.fsdp_size > 1) == (plan.fsdp_size > 1)
    assert (small.num_microbatches, small.microbatch_size) == (1, 2)
    assert small.model.num_layers == min(3, plan.model.num_layers)


def test_piece_plan_has_two_shards_of_experts() -> None:
    for text in ("parallel.ep=8", "parallel.ep=4 parallel.tp=2 parallel.etp=1", "parallel.ep=2"):
        plan, _ = plan_of("qwen3-30b-a3b", text)
        small = piece_plan(plan, 1)
        split = small.dp_shard * small.cp * (small.tp if small.etp == 1 else 1)
        assert small.ep == plan.ep
        assert split % small.ep == 0
        assert split // small.ep >= 2


def test_microbatches_are_linear_in_their_sequences() -> None:
    def piece(size: int) -> UnitWork:
        matmul = Matmul(size * 100, 10, 20)
        exchange = Collective("all_to_all", size * 7.0, "ep", 8)
        chunks = (Matmul(50, 5, 5),) * (2 * size)
        works = Work((matmul,), (), 3.0 + size, 5, (exchange,)), Work(chunks, (), 2.0 * size, 4)
        return UnitWork(*works, 10.0 * size, 1.0, 2.0 + size)

    plan, machine = plan_of("llama3-8b-8gpu", "train.microbatch_size=1")
    device = device_spec(plan, machine)
    assert device is not None
    real = Pieces(device)._recorded(plan, 1)
    one, two = (replace(real, units={HEAD: piece(size)}) for size in (1, 2))
    unit = interpolate(one, two, 6).units[HEAD]
    assert unit.forward.matmuls == (Matmul(600, 10, 20),)
    assert unit.forward.traffic_bytes == 9.0
    assert unit.forward.collectives[0].bytes == 42.0
    # Chunks of the loss have one size, so there are more of them.
    assert sum(op.times for op in unit.backward.matmuls) == 12
    assert unit.backward.traffic_bytes == 12.0
    assert unit[2:] == (60.0, 1.0, 8.0)


@pytest.mark.parametrize("text", ["", "parallel.tp=2", "precision.float8=tensorwise"])
def test_full_recomputation_is_that_of_a_recording(text: str) -> None:
    """Its piece comes from one without recomputation."""
    text = f"activation_checkpoint.mode=full train.microbatch_size=1 {text}"
    plan, machine = plan_of("llama3-8b-8gpu", text)
    device = device_spec(plan, machine)
    assert device is not None
    pieces, hardware = Pieces(device), build_hardware(plan, device)
    composed = pieces.estimate(plan)
    recorded = PieceEstimate(plan, pieces._sized(plan), pieces.cost(plan))
    seconds = [each.step_seconds(hardware).total() for each in (composed, recorded)]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.07)
    assert composed.live_bytes() == pytest.approx(recorded.live_bytes(), rel=0.1)


def test_floors_are_below_estimates_and_near_that_of_the_plain_layout() -> None:
    layouts = (
        "train.microbatch_size=1",
        "train.microbatch_size=2 activation_checkpoint.mode=full",
        "train.microbatch_size=1 parallel.tp=2",
        "train.microbatch_size=1 parallel.pp=2 pipeline.schedule=1F1B",
        "train.microbatch_size=1 parallel.dp_replicate=4 parallel.dp_shard=2",
    )
    ratios = []
    pieces = None
    for text in layouts:
        plan, machine = plan_of("llama3-8b-8gpu", text)
        device = device_spec(plan, machine)
        assert device is not None
        pieces, hardware = pieces or Pieces(device), build_hardware(plan, device)
        seconds = pieces.estimate(plan).step_seconds(hardware).total()
        ratios.append(pieces.floor_seconds(plan, hardware) / seconds)
    assert max(ratios) < 1.02, ratios
    assert ratios[0] > 0.7, ratios
    assert pieces is not None
    assert len(pieces._floors) == 1  # two recordings are enough for all


def test_a_model_of_one_layer_has_estimates() -> None:
    plan, machine = plan_of("llama3-8b-8gpu", "model.num_layers=1 train.microbatch_size=1")
    device = device_spec(plan, machine)
    assert device is not None
    assert Pieces(device).estimate(plan).step_seconds(build_hardware(plan, device)).total() > 0
