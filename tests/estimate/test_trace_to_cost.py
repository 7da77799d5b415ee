"""Prices of traced operations."""

from __future__ import annotations

from collections import Counter

import pytest

from weft.config.reader import read_job
from weft.estimate.analytic import DecoderFormulas
from weft.estimate.cost import Matmul, device_spec
from weft.estimate.forecast import forecast, price_traces
from weft.estimate.op_recorder import OpCall
from weft.estimate.trace import trace_ranks
from weft.estimate.trace_to_cost import TracePricer, find_fused_exchanges, to_matmul
from weft.planning.devices import get_device, parse_cluster
from weft.planning.plan_text import cluster_machine, plan_recipe
from weft.planning.resolve import resolve
from weft.training.machine import detect_machine

# Bytes per parameter of both moments of matrices in blocks. 8bit also has two bytes per 32 numbers;
# with it, moments of other parameters are float32.
MOMENT_BYTES = {"float32": 8.0, "bfloat16": 4.0, "8bit": 2 + 2 / 32}


@pytest.mark.parametrize("states", ["float32", "bfloat16", "8bit"])
def test_pricer_optimizer_reads_and_writes_each_state_once(states: str) -> None:
    """Memory traffic of update and clipping equals a formula, for any number of operators."""
    keys = [("model.num_layers", "8"), ("train.seq_len", "1024"), ("optim.state_dtype", states)]
    job, _, errors = read_job("paper/llama3-8b", [*keys, ("train.global_batch_size", "2")])
    cluster = parse_cluster("1x2xH100")
    assert not errors
    plan = resolve(job, cluster_machine(cluster))
    pricer = TracePricer(trace_ranks(plan)[0], plan, get_device("H100"))
    matrices = 8 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) / plan.num_params
    moments = matrices * MOMENT_BYTES[states] + (1 - matrices) * (
        4.0 if states == "bfloat16" else 8
    )
    norm = 4  # reads the gradient
    # The update reads weight, gradient and moments, and writes all but the gradient.  Only torch's
    # fused kernel also writes the clipped gradient.
    update = 4 + 4 + moments + 4 + moments + (4 if states == "float32" else 0)
    swept = pricer.price_optimizer().traffic_bytes / (plan.num_params / 2)
    assert swept == pytest.approx(norm + update, rel=1e-3)


def test_step_of_kto_has_a_second_forward_pass() -> None:
    """By the trace and by the formulas; its memory is that of DPO."""
    forward, seconds, memory = [], [], []
    for name, data in (("dpo", "preferences"), ("kto", "unpaired")):
        keys = [("model.num_layers", "4"), ("train.seq_len", "1024"), ("train.objective", name)]
        keys += [("train.global_batch_size", "2"), ("data.format", data)]
        job, _, errors = read_job("paper/llama3-8b", keys)
        assert not errors
        machine = cluster_machine(parse_cluster("1x2xH100"))
        plan, device = resolve(job, machine), get_device("H100")
        traces = trace_ranks(plan)
        stage = TracePricer(traces[0], plan, device).price_stage(0)
        forward.append(sum(work.flops * count for work, count in stage.forward))
        prediction = price_traces(plan, machine, device, traces)
        memory.append(prediction.needed_bytes)
        formulas = DecoderFormulas(plan, device).estimate_step().stages[0]
        seconds.append(sum(work.flops * count for work, count in formulas.forward))
    assert forward[1] == pytest.approx(2 * forward[0])
    assert seconds[1] == pytest.approx(2 * seconds[0])
    assert memory[1] == pytest.approx(memory[0], rel=1e-3)


def test_compiled_loss_has_no_float32_logits() -> None:
    """The trace has the tensors that a compiled step allocates."""
    sizes = {}
    for enable in ("false", "true"):
        # No other tensor has so many bytes.
        keys = [("model.num_layers", "4"), ("train.seq_len", "768"), ("compile.enable", enable)]
        job, _, errors = read_job("paper/llama3-8b", [*keys, ("train.global_batch_size", "2")])
        cluster = parse_cluster("1x2xH100")
        assert not errors
        plan = resolve(job, cluster_machine(cluster))
        logits = plan.microbatch_size * plan.seq_len * plan.model.vocab_size
        sizes[enable] = {event.bytes / logits for event in trace_ranks(plan)[0].op_trace.events}
    assert {2.0, 4.0} <= sizes["false"]
    assert 2.0 in sizes["true"]
    assert 4.0 not in sizes["true"]


# Gathers and scatters in a block's forward and backward pass: fused, and all.  Counted in graphs by
# inductor's own pass: `python -m tests.fake_cuda RECIPE KEY=VALUE`.  With graph breaks, backward
# runs the forward graphs again.
FUSED = {
    ("paper/llama3-70b-async-tp", ""): ((4, 4), (7, 7)),
    ("paper/llama3-70b-async-tp", "precision.float8=none"): ((4, 4), (7, 7)),
    # Scales per row: gate and up are cast after the gather; keys and values are too small for it.
    ("paper/llama3-70b-async-tp", "precision.float8=rowwise"): ((3, 4), (4, 7)),
    ("paper/llama3-405b-4d-65k", ""): ((4, 4), (8, 8)),
}


@pytest.mark.parametrize(
    ("recipe", "override"),
    [pytest.param(*key, marks=[pytest.mark.slow] if i else []) for i, key in enumerate(FUSED)],
)
def test_pricer_overlaps_the_exchanges_that_inductor_fuses(recipe: str, override: str) -> None:
    key, _, value = override.partition("=")
    job, _, errors = read_job(recipe, [(key, value)] if key else [])
    errors.raise_any()
    plan = resolve(job, cluster_machine(parse_cluster(job.run.cluster)), recipe)
    trace = trace_ranks(plan)[0]
    fused = find_fused_exchanges(trace.op_trace.events)
    counts: dict[str, Counter[bool]] = {"F": Counter(), "B": Counter()}
    blocks = set()
    for event in trace.op_trace.events:
        call, location = event.call, event.location
        if call is None or call.name not in ("all_gather", "reduce_scatter"):
            continue
        if location.is_in_block and trace.comm_groups[call.group][0] == "tp":
            counts[location.kind][id(call) in fused] += 1
            blocks.add((location.ordinal, location.block))
    per_block = {kind: count[True] / len(blocks) for kind, count in counts.items()}
    totals = {kind: count.total() / len(blocks) for kind, count in counts.items()}
    expected = FUSED[recipe, override]
    assert [(per_block[kind], totals[kind]) for kind in "FB"] == list(expected)


def test_grouped_products_have_the_speed_of_their_dtype() -> None:
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {
        "_grouped_mm": ((1040, 64), (4, 64, 96), (4,)),
        "scaled_grouped_mm": ((1040, 64), (4, 64, 96), (1040,), (4, 96), (4,)),
    }
    for (name, inputs), precision in zip(shapes.items(), ("bf16", "float8"), strict=True):
        expected = Matmul(260, 64, 96, 1, precision, 4)
        assert to_matmul(OpCall(name, 0.0, inputs, (), ())) == expected
        columns = ((96, 1040), (1040, 64), *inputs[2:])
        expected = Matmul(96, 260, 64, 1, precision, 4)
        assert to_matmul(OpCall(name, 0.0, columns, (), ())) == expected
        # Half of the experts compute, and half of the rows are none.
        chunk = to_matmul(OpCall(name, 0.0, inputs, (), ()), num_chunks=2, padding=2.0)
        assert chunk == Matmul(260, 64, 96, 1, precision, 2)


def test_products_of_emulated_float8_have_the_speed_of_float32() -> None:
    shapes, results = ((64, 32), (32, 16)), ((1, 64 * 16 * 4),)
    expected = Matmul(64, 32, 16)
    call = OpCall("mm", 0.0, shapes, (), results)
    assert to_matmul(call) == expected
    assert to_matmul(call, in_float32=True) == expected._replace(precision="float32")
    half = call._replace(writes=((1, 64 * 16 * 2),))
    assert to_matmul(half, in_float32=True) == expected
    seconds = []
    for float8 in ("none", "tensorwise"):
        keys = [("model.num_layers", "2"), ("precision.float8", float8)]
        keys += [("train.global_batch_size", "16")]  # one microbatch
        plan, machine = plan_recipe("llama3-8b", keys, [], "1x8xA100-80GB", detect_machine)
        device = device_spec(plan, machine)
        assert device is not None
        seconds.append(forecast(plan, machine, device).step_seconds or 0.0)
    assert 4 < seconds[1] / seconds[0] < 16  # 312 over 19.5 TFLOP/s is 16


@pytest.mark.slow
def test_trace_of_float8_experts_has_float8_products_only() -> None:
    keys = [
        ("model.num_layers", "2"),
        ("model.dense_layers", "0"),
        ("precision.float8", "tensorwise"),
        ("precision.float8_small", "true"),
        ("precision.compute_dtype", "bfloat16"),
        ("activation_checkpoint.mode", "full"),
        ("run.device", "auto"),
    ]
    job, _, errors = read_job("moe-demo", keys)
    errors.raise_any()
    plan = resolve(job, cluster_machine(parse_cluster("1x1xH100")))
    calls = [event.call for event in trace_ranks(plan)[0].op_trace.events if event.call]
    products = Counter(call.name for call in calls if "grouped" in call.name)
    # Of each layer: gate, up and down; forward, recomputation and two gradients.
    assert set(products) == {"scaled_grouped_mm"}
    assert products["scaled_grouped_mm"] % (2 * 3 * 4) == 0


@pytest.mark.slow
def test_pricer_dispatch_of_experts_moves_and_hides_what_it_should() -> None:
    """Padding multiplies what travels, chunks hide half of it; products compute the same rows."""
    totals = []
    for keys in ({}, {"ep_dispatch": "padded", "ep_capacity_factor": "1.5"}, {"ep_chunks": "2"}):
        overrides = [("parallel.ep", "2"), ("train.seq_len", "1024"), ("model.num_layers", "4")]
        overrides += [(f"parallel.{name}", value) for name, value in keys.items()]
        moe = [("model.kind", "moe"), ("model.preset", "toy-moe"), ("model.max_seq_len", "1024")]
        moe.append(("model.num_experts", "16"))
        job, _, errors = read_job("demo", [*moe, *overrides])
        errors.raise_any()
        plan = resolve(job, cluster_machine(parse_cluster("1x4xH100")))
        pricer = TracePricer(trace_ranks(plan)[0], plan, get_device("H100"))
        exchanged, flops = Counter[str](), 0.0
        for work, times in pricer.price_stage(0).forward:
            for op in work.collectives:
                if op.axis == "ep":
                    exchanged[op.overlap] += op.bytes * op.times * times
            for matmul in work.matmuls:
                if matmul.groups > 1:
                    flops += matmul.m * matmul.k * matmul.n * matmul.groups * times
        totals.append((exchanged, flops))
    (plain, flops), (padded, padded_flops), (chunks, chunk_flops) = totals
    assert plain.keys() == padded.keys() == {"exposed"}
    assert padded["exposed"] == pytest.approx(1.5 * plain["exposed"], rel=0.01)
    # The counts of rows, which are in no chunk, are exposed.
    assert 0 < chunks["exposed"] - chunks["prefetch"] < 0.01 * chunks["exposed"]
    assert chunks.total() == pytest.approx(plain.total(), rel=0.01)
    assert flops == pytest.approx(padded_flops, rel=0.01) == pytest.approx(chunk_flops, rel=0.01)


# Milliseconds of a step on an H100, from docs/results.md: layers of Llama 3.1 8B, compiled.
MEASURED_STEPS = {
    4: {"none": 323, "tensorwise": 288, "rowwise": 322},
    6: {"none": 437, "tensorwise": 384, "rowwise": 435},
}


@pytest.mark.slow
@pytest.mark.parametrize("layers", [4, 6])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_gain_of_float8_is_near_the_measured_one(recipe: str, layers: int) -> None:
    """Casts with a transposed store and the rescaled products of rowwise take most of the gain."""
    seconds = {}
    for name in ("none", recipe):
        keys = {
            "model.preset": "8b",
            "data.vocab_size": "128256",
            "train.seq_len": "8192",
            "model.num_layers": str(layers),
            "train.microbatch_size": "1",
            "train.global_batch_size": "2",
            "compile.enable": "true",
            "activation_checkpoint.mode": "none",
            "precision.float8": name,
        }
        job, _, errors = read_job("demo", list(keys.items()))
        assert not errors
        machine, device = cluster_machine(parse_cluster("1x1xH100")), get_device("H100")
        plan = resolve(job, machine)
        seconds[name] = price_traces(plan, machine, device, trace_ranks(plan)).step_seconds
    measured = MEASURED_STEPS[layers]
    assert seconds[recipe] / seconds["none"] == pytest.approx(
        measured[recipe] / measured["none"], rel=0.04
    )
