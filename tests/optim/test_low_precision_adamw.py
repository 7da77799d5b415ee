"""Low-precision AdamW compared with AdamW, over steps, checkpoints and layouts."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.harness import run_ranks
from tests.layouts import parse
from tests.small import (
    full_tensor,
    loader_of,
    newest_state,
    plan_here,
    small_job,
    this_rank,
    train_rank,
)
from weft.checkpoint.state_dict import trainable_parameters
from weft.config.errors import InvalidConfig
from weft.config.schema import OptimSection
from weft.optim import low_precision_adamw
from weft.optim.low_precision_adamw import (
    LowPrecisionAdamW,
    PackedMoment,
    pack_first,
    pack_second,
    round_stochastic,
    unpack_first,
    unpack_second,
)
from weft.optim.optimizer import build_adamw, masked_step
from weft.parallel.compile import run_compiled
from weft.planning.matrices import MOMENT_BLOCK_SIZE
from weft.planning.plan import Machine
from weft.planning.resolve import resolve
from weft.planning.sharding import MOMENT_BYTES
from weft.training.setup import build

STATES = ("bfloat16", "8bit")


def optimizer_of(
    states: str, param: nn.Parameter, beta2: float = 0.95, lr: float = 1e-2, decay: float = 0.1
) -> Any:
    section = OptimSection(lr=lr, beta2=beta2, state_dtype=states)
    return build_adamw([{"params": [param], "weight_decay": decay, "matrices": True}], section)


def trained(states: str, steps: int, beta2: float = 0.95) -> tuple[nn.Parameter, Any]:
    """Train a parameter towards a target, with noise; return it and its optimizer."""
    draw = torch.Generator().manual_seed(0)
    param = nn.Parameter(torch.randn(64, 128, generator=draw))
    target = torch.randn(64, 128, generator=draw)
    optimizer = optimizer_of(states, param, beta2)
    for _ in range(steps):
        param.grad = (param - target).detach() + 0.1 * torch.randn(64, 128, generator=draw)
        optimizer.step()
    return param, optimizer


@pytest.mark.parametrize("states", STATES)
def test_lean_adamw_equals_adamw_to_rounding(states: str) -> None:
    plain, _ = trained("float32", 30)
    lean, optimizer = trained(states, 30)
    assert isinstance(optimizer, LowPrecisionAdamW)
    start = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    moved = (plain - start).norm()
    assert 0 < (lean - plain).norm() < (0.01 if states == "bfloat16" else 0.05) * moved


def held_bytes(moment: Tensor) -> int:
    parts = [moment.codes, moment.ranges] if isinstance(moment, PackedMoment) else [moment]
    return sum(part.numel() * part.element_size() for part in parts)


def test_lean_moments_have_the_planned_bytes() -> None:
    """State size equals the planner's estimate; both moments share their ranges."""
    for states in STATES:
        param, optimizer = trained(states, 1)
        state = optimizer.state[param]
        held = held_bytes(state["exp_avg"]) + held_bytes(state["exp_avg_sq"])
        if states == "8bit":
            assert state["exp_avg"].ranges is state["exp_avg_sq"].ranges
            held -= state["exp_avg"].ranges.numel() * 2
        blocks = param.numel() / MOMENT_BLOCK_SIZE
        assert held == MOMENT_BYTES[states] * param.numel() + 2 * blocks * (states == "8bit")


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_8bit_small_gradient_beside_a_large_one_moves_as_adamw(states: str, beta2: float) -> None:
    """The second moment must not vanish where the first does not."""
    moved = {}
    for kind in ("float32", states):
        param = nn.Parameter(torch.zeros(4, 256))
        optimizer = optimizer_of(kind, param, beta2, lr=1e-3, decay=0.0)
        for step in range(3):
            param.grad = torch.zeros(4, 256)
            param.grad[:, 0] = 1e-1
            param.grad[:, 1] = 2e-5 if step == 0 else 0.0
            # Below the range of a block: the update may be smaller, not larger.
            param.grad[:, 2] = 1e-9
            optimizer.step()
        moved[kind] = param.detach()
    torch.testing.assert_close(moved[states][:, :2], moved["float32"][:, :2], rtol=0.12, atol=0)
    assert moved[states].abs().max() < 3.2e-3


def test_8bit_rare_gradients_never_move_further_than_adamw_can() -> None:
    """Gradients over 12 orders of magnitude, most of them rare, for 60 steps."""
    draw = torch.Generator().manual_seed(0)
    scale = 10.0 ** (-12 * torch.rand(64, 256, generator=draw))
    often = torch.rand(64, 256, generator=draw)
    params = {kind: nn.Parameter(torch.zeros(64, 256)) for kind in ("float32", "8bit")}
    optimizers = {
        kind: optimizer_of(kind, param, lr=1e-3, decay=0.0) for kind, param in params.items()
    }
    most = 0.0
    for _ in range(60):
        observed = torch.rand(64, 256, generator=draw) < often
        grad = scale * torch.randn(64, 256, generator=draw) * observed
        for kind, param in params.items():
            before = param.detach().clone()
            param.grad = grad
            optimizers[kind].step()
            if kind == "8bit":
                most = max(most, (param.detach() - before).abs().max().item() / 1e-3)
    assert most < 2.5
    exact, ours = params["float32"].detach(), params["8bit"].detach()
    spanned = scale > scale.amax() * 1e-5
    assert (ours - exact)[spanned].norm() < 0.1 * exact[spanned].norm()


def test_8bit_packing_of_unpacked_values_is_the_identity() -> None:
    draw = torch.Generator().manual_seed(0)
    second = 10.0 ** (-30 * torch.rand(64, 128, generator=draw))
    # Zeros, powers of two, and equal values.
    second[0], second[1, :40], second[2, :32] = 0.0, 4.0, 3.999
    first = second.sqrt() * torch.randn(64, 128, generator=draw)
    chance = torch.randint(0, 1 << 16, (64, 128), dtype=torch.int32, generator=draw)
    half = torch.full_like(chance, 1 << 15)
    codes, ranges = torch.zeros(64, 128, dtype=torch.uint8), torch.zeros(64, 4, dtype=torch.int16)
    signed = torch.zeros(64, 128, dtype=torch.int8)
    pack_second(second, chance, codes, ranges)
    values = unpack_second(codes, ranges)
    assert values[0].count_nonzero() == 0
    assert (values[1:] > 0).all()
    pack_first(first, values.sqrt(), 1.2, chance, signed)
    firsts = unpack_first(signed, values.sqrt(), 1.2)
    pack_second(values, half, codes, ranges)
    assert unpack_second(codes, ranges).equal(values)
    pack_first(firsts, values.sqrt(), 1.2, half, signed)
    assert unpack_first(signed, values.sqrt(), 1.2).equal(firsts)


def moved_under(layout: str, states: str, store: str, lr: str = "3e-3") -> dict[str, Tensor]:
    """Return this rank's unsharded weights after four steps from the initial weights."""
    _, overrides = parse(layout)
    wide = [("model.dim", "128"), ("model.ffn_dim", "192"), ("model.tied_embeddings", "false")]
    job = small_job(*wide, *overrides, ("optim.state_dtype", states), ("optim.lr", lr))
    plan = plan_here(job)
    built = build(plan, this_rank())
    loader = loader_of(job, plan, store, built.mesh)
    for step in range(4):
        built.optimizer.zero_grad()
        built.train_step.forward_backward(
            loader.get_microbatches(step * job.train.global_batch_size)
        )
        built.optimizer.step()
    return {
        name: full_tensor(param.detach()).clone()
        for name, param in trainable_parameters(built.model_parts)
    }


@functools.cache
def moved_on_one(states: str, lr: str, store: str) -> dict[str, Tensor]:
    return run_ranks(moved_under, 1, "dp_shard1", states, store, lr)[0]


@pytest.mark.parametrize(
    ("layout", "states"),
    [
        ("dp_shard2 tp2", "8bit"),
        pytest.param("tp2", "bfloat16", marks=pytest.mark.slow),
        pytest.param("pp2", "8bit", marks=pytest.mark.slow),
        pytest.param("dp_shard2", "8bit", marks=pytest.mark.slow),
        pytest.param("tp2", "8bit", marks=pytest.mark.slow),
        pytest.param("dp_shard4 tp2", "8bit", marks=pytest.mark.slow),
        pytest.param("dp_shard2 tp2", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_lean_moments_are_rounded_alike_on_every_layout(
    layout: str, states: str, store_path: Path
) -> None:
    """Blocks and random bits depend on the full parameter, not on the local shard."""
    one = moved_on_one(states, "3e-3", str(store_path))
    start = moved_on_one(states, "1e-30", str(store_path))
    results = {}
    for rank in run_ranks(moved_under, parse(layout)[0], layout, states, str(store_path)):
        results |= rank
    assert results.keys() == one.keys()
    off = sum((results[name] - one[name]).square().sum().item() for name in one)
    distance = sum((start[name] - one[name]).square().sum().item() for name in one)
    assert off**0.5 < 1e-3 * distance**0.5, off**0.5 / distance**0.5


def test_round_stochastic_mean_is_exact() -> None:
    values = torch.randn(100) * 10.0 ** torch.randint(-20, 20, (100,))
    chance = torch.arange(0, 1 << 16, 16, dtype=torch.int32)
    mean = (
        round_stochastic(values[:, None].expand(-1, len(chance)).contiguous(), chance)
        .double()
        .mean(1)
    )
    torch.testing.assert_close(mean, values.double(), rtol=2e-6, atol=0)
    exact = torch.tensor([0.0, -0.0, 1.5, -3.0, torch.inf, -torch.inf, torch.nan])
    remaining = round_stochastic(exact, torch.full((7,), 0xFFFF, dtype=torch.int32))
    every_bit = torch.tensor([2**31 - 1, -1], dtype=torch.int32)  # as CUDA writes NaN
    chance = torch.full((2,), 0xFFFF, dtype=torch.int32)
    assert round_stochastic(every_bit.view(torch.float32), chance).isnan().all()
    assert remaining.float().view(torch.int32).equal(exact.bfloat16().float().view(torch.int32))


def test_lean_second_moment_decays_where_nearest_rounding_would_not() -> None:
    """Stochastic rounding matters: large gradients long ago, small ones ever since."""
    param = nn.Parameter(torch.zeros(4096))
    optimizer = optimizer_of("bfloat16", param, beta2=0.9985)
    nearest = torch.tensor(0.0, dtype=torch.bfloat16)
    exact = 0.0
    for step in range(1400):
        grad = 1.0 if step < 100 else 0.0
        param.grad = torch.full((4096,), grad)
        optimizer.step()
        nearest = (nearest.float() * 0.9985 + grad * 0.0015).bfloat16()
        exact = exact * 0.9985 + grad * 0.0015
    mean = optimizer.state[param]["exp_avg_sq"].float().mean().item()
    assert mean == pytest.approx(exact, rel=0.02)
    assert nearest.item() > 5 * exact


@pytest.mark.parametrize("states", STATES)
def test_lean_bad_step_changes_no_bit(states: str) -> None:
    param, optimizer = trained(states, 3)

    def full_state() -> list[Tensor]:
        state = optimizer.state[param]
        held = [
            getattr(value, part, None) for value in state.values() for part in ("codes", "scale")
        ]
        plain = [value for value in state.values() if not hasattr(value, "codes")]
        return [tensor.clone() for tensor in (param.detach(), *held, *plain) if tensor is not None]

    before = full_state()
    param.grad = torch.full_like(param, torch.nan)
    masked_step(optimizer, torch.tensor(True))
    assert all(a.equal(b) for a, b in zip(full_state(), before, strict=True))
    param.grad = torch.ones_like(param)
    masked_step(optimizer, torch.tensor(False))
    assert not param.equal(before[0])


@pytest.mark.parametrize("states", [pytest.param("bfloat16", marks=pytest.mark.slow), "8bit"])
def test_lean_resumed_run_is_equal_bit_for_bit(
    states: str, tmp_path: Path, store_path: Path
) -> None:
    overrides = [
        ("optim.state_dtype", states),
        ("optim.decay_fraction", "0"),  # else the rate would depend on the number of steps
        ("model.dim", "64"),
        ("model.ffn_dim", "128"),
    ]

    def run(directory: Path, steps: int, ranks: int = 2) -> dict[str, Tensor]:
        all_overrides = [*overrides, ("train.steps", str(steps)), ("run.dir", str(directory))]
        run_ranks(train_rank, ranks, all_overrides, str(store_path))
        return newest_state(directory)

    full = run(tmp_path / "whole", 4)
    run(tmp_path / "parts", 2)
    parts = run(tmp_path / "parts", 4)
    assert all(parts[name].equal(value) for name, value in full.items())
    moments = [value for name, value in full.items() if "exp_avg" in name]
    saved = torch.bfloat16 if states == "bfloat16" else torch.float32
    assert all(moment.dtype == saved for moment in moments)
    run(tmp_path / "parts", 5, ranks=1)  # resumed in another layout


def packed_values(kind: str, shape: tuple[int, int], draw: torch.Generator) -> Any:
    """Return values of moments, their packed form after stochastic rounding, and its values."""
    values = [10.0 ** (-6 * torch.rand(shape, generator=draw)) for _ in range(2)]
    values[0] *= torch.randn(shape, generator=draw)
    values[1][:, -1] = 0.0
    rows, columns = shape
    blocks = rows, -(-columns // MOMENT_BLOCK_SIZE)
    codes = torch.zeros(shape, dtype=torch.int8)
    moments = [codes, torch.zeros(blocks, dtype=torch.bfloat16)]
    if kind == "adamw":
        second = torch.zeros(shape, dtype=torch.uint8)
        moments = [codes, second, torch.zeros(blocks, dtype=torch.int16)]
    values = values[: len(moments) - 1]
    bits = torch.randint(-(1 << 31), (1 << 31) - 1, shape, dtype=torch.int32, generator=draw)
    low_precision_adamw.pack(values, bits, 1.2, moments)
    return values, moments, low_precision_adamw.unpack(moments, 1.2)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_8bit_rows_of_any_length_are_packed_in_blocks(kind: str) -> None:
    """Packing is exact for unpacked values, and a short last block is packed like a long one."""
    draw = torch.Generator().manual_seed(0)
    for columns in (1, 31, 32, 33, 95, 96, 130):
        _, moments, unpacked = packed_values(kind, (7, columns), draw)
        again = [torch.zeros_like(moment) for moment in moments]
        nearest = torch.full((7, columns), low_precision_adamw.TO_NEAREST, dtype=torch.int32)
        low_precision_adamw.pack(unpacked, nearest, 1.2, again)
        for one, other in zip(unpacked, low_precision_adamw.unpack(again, 1.2), strict=True):
            assert one.equal(other), columns
            assert one.shape == (7, columns)


def test_8bit_momentum_is_rounded_without_bias() -> None:
    """The mean of many roundings is the value; one rounding is near it."""
    values = torch.randn(4, 50) * 10.0 ** (-2 * torch.rand(4, 50))
    largest = torch.cat([block.abs().amax(1, True) for block in values.split(32, 1)], 1)
    limit = largest.repeat_interleave(32, 1)[:, :50]
    total = torch.zeros(4, 50)
    for _ in range(2000):
        bits = torch.randint(-(1 << 31), (1 << 31) - 1, (4, 50), dtype=torch.int32)
        moments = [torch.zeros(4, 50, dtype=torch.int8), torch.zeros(4, 2, dtype=torch.bfloat16)]
        low_precision_adamw.pack([values], bits, 1.0, moments)
        (result,) = low_precision_adamw.unpack(moments, 1.0)
        # Steps of the codes, 2 / 127 of the largest at most, and the rounding of the scale.
        assert ((result - values).abs() <= 0.025 * limit).all()
        total += result
    assert ((total / 2000 - values).abs() <= 0.001 * limit).all()


@pytest.mark.slow
def test_8bit_shards_that_cut_blocks_are_near_one_process(store_path: Path) -> None:
    """A rank has 48 of the 144 inputs of down_proj: its blocks are 32 and 16 wide."""
    odd = "train.seq_len=30 model.ffn_dim=144 model.num_heads=3 model.num_kv_heads=3"
    single, many = f"dp_shard1 {odd} model.head_dim=40", f"tp3 {odd} model.head_dim=40"
    (one,) = run_ranks(moved_under, 1, single, "8bit", str(store_path))
    (start,) = run_ranks(moved_under, 1, single, "8bit", str(store_path), "1e-30")
    results = {}
    for rank in run_ranks(moved_under, 3, many, "8bit", str(store_path)):
        results |= rank
    off = sum((results[name] - one[name]).square().sum().item() for name in one)
    distance = sum((start[name] - one[name]).square().sum().item() for name in one)
    assert 0 < off**0.5 < 0.05 * distance**0.5


def test_8bit_keeps_embedding_head_gains_and_biases_in_float32(store_path: Path) -> None:
    experts = [("model.kind", "gpt_oss"), ("model.preset", "toy"), ("train.seq_len", "32")]
    mlp = {f"{kind}_proj.weight" for kind in ("gate", "up", "down")}
    attention = {f"{kind}_proj.weight" for kind in ("q", "k", "v", "o")}
    (packed,) = run_ranks(packed_names, 1, [], str(store_path))
    assert packed == attention | mlp
    (packed,) = run_ranks(packed_names, 1, experts, str(store_path))
    assert packed == attention | mlp | {"router.weight"}  # not the biases of each expert


def packed_names(overrides: list[tuple[str, str]], store: str) -> set[str]:
    """Return the kinds of parameters whose moments have 8 bits after a step."""
    job = small_job(("optim.state_dtype", "8bit"), *overrides)
    plan = plan_here(job)
    built = build(plan, this_rank())
    built.train_step.forward_backward(loader_of(job, plan, store, built.mesh).get_microbatches(0))
    built.optimizer.step()
    return {
        ".".join(name.split(".")[-2:])
        for name, param in trainable_parameters(built.model_parts)
        if isinstance(built.optimizer.state[param]["exp_avg_sq"], PackedMoment)
    }


def test_lean_with_an_optimizer_of_the_user_is_refused() -> None:
    job = small_job(("optim.state_dtype", "8bit"), ("optim.name", "mine:build"))
    with pytest.raises(
        InvalidConfig, match=r"optim.state_dtype=\"8bit\" is only for adamw, muon, soap, not mine"
    ):
        resolve(job, Machine("cpu", devices=2, world_size=1))


def several_trained(states: str) -> tuple[list[nn.Parameter], Any]:
    """Train parameters of which some are alike, for three steps, the second skipped."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(8, 64), (8, 64), (8, 96), (8, 64), (64,)]
    params = [nn.Parameter(torch.randn(shape, generator=draw)) for shape in shapes]
    section = OptimSection(lr=1e-2, state_dtype=states)
    optimizer = build_adamw([{"params": params, "weight_decay": 0.1}], section)
    for step in range(3):
        for param in params:
            param.grad = torch.randn(param.shape, generator=draw)
        masked_step(optimizer, torch.tensor(step == 1), torch.tensor(1.5))
    return params, optimizer


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("states", STATES)
def test_lean_compiled_step_is_equal(states: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, of_plain = several_trained(states)
    calls = []

    def run(label: str, enabled: bool, function: Any, params: Any, *args: Any) -> None:
        calls.append(len(params))
        run_compiled(label, True, function, params, *args)

    monkeypatch.setattr(low_precision_adamw, "run_compiled", run)
    monkeypatch.setattr(low_precision_adamw, "PARAMS_PER_CALL", 2)
    compiled, of_compiled = several_trained(states)
    assert calls == 3 * [2, 1, 1, 1]
    for one, other in zip(plain, compiled, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)
        states_of = of_plain.state[one], of_compiled.state[other]
        assert states_of[0]["step"] == states_of[1]["step"] == 2
        for key in ("exp_avg", "exp_avg_sq"):
            first, second = (getattr(state[key], "codes", state[key]) for state in states_of)
            if first.dtype == torch.float32:
                torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-7)
            else:  # a rounded value may differ by its last place
                assert (first == second).float().mean() > 0.97


def step_with_a_part_of_nothing(states: str) -> list[float]:
    """Make two steps with one row sharded over two ranks; return the step counts."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    part = nn.Linear(8, 1, bias=False)
    fully_shard(part, mesh=mesh)
    optimizer = optimizer_of(states, part.weight)
    part(torch.ones(1, 8)).sum().backward()
    masked_step(optimizer, torch.tensor(False))
    part.weight.grad = torch.full_like(part.weight, torch.nan)
    masked_step(optimizer, torch.tensor(True))
    return [float(state["step"]) for state in optimizer.state.values()]


@pytest.mark.parametrize("states", ["float32", *STATES])
def test_lean_rank_with_an_empty_shard_counts_steps(states: str) -> None:
    assert run_ranks(step_with_a_part_of_nothing, 2, states) == [[1.0], [1.0]]


@pytest.mark.parametrize("states", ["bfloat16", pytest.param("8bit", marks=pytest.mark.slow)])
def test_lean_resume_with_other_moments_continues(
    states: str, tmp_path: Path, store_path: Path
) -> None:
    overrides = [("run.dir", str(tmp_path)), ("model.dim", "64"), ("model.ffn_dim", "128")]
    for steps, kind in (("2", states), ("4", "float32"), ("6", states)):
        all_overrides = [*overrides, ("train.steps", steps), ("optim.state_dtype", kind)]
        run_ranks(train_rank, 2, all_overrides, str(store_path))
        moments = {v.dtype for n, v in newest_state(tmp_path).items() if "exp_avg" in n}
        assert moments == {torch.bfloat16 if kind == "bfloat16" else torch.float32}
