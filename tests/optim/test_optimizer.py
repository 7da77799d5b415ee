"""Parameter groups, the fused AdamW, and schedules."""

from __future__ import annotations

import itertools
import re
from fnmatch import fnmatchcase
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.harness import run_ranks
from tests.small import full_tensor, small_job
from weft.config.errors import InvalidConfig
from weft.config.reader import read_job
from weft.config.schema import OptimGroup, OptimSection
from weft.config.writer import to_toml
from weft.models import decoder
from weft.models.families.llama import PRESETS
from weft.optim.optimizer import (
    OPTIMIZERS,
    SCHEDULES,
    build_adamw,
    build_muon,
    build_optimizer,
    clip_scale,
    compute_grad_norm,
    learning_rate,
    masked_step,
    set_learning_rate,
)
from weft.parallel.private import set_grad_scaling
from weft.planning.optim_rules import WEFT_OPTIMIZERS
from weft.planning.plan import Machine
from weft.planning.resolve import resolve

OPTIM = OptimSection(lr=1e-2, warmup_steps=10, min_lr_ratio=0.1, decay_fraction=0.25)


def test_optimizer_gains_and_embeddings_have_no_weight_decay() -> None:
    model = decoder.Decoder(PRESETS["toy"].model_copy(update={"tied_embeddings": False}))
    inside = {param for block in decoder.blocks(model) for param in block.parameters()}
    optimizer = build_optimizer(
        model.named_parameters(), OPTIM, build_adamw, decoder.has_weight_decay, inside
    )
    names = {param: name for name, param in model.named_parameters()}
    result = {
        (group["weight_decay"], group["matrices"]): {names[param] for param in group["params"]}
        for group in optimizer.param_groups
    }
    assert len(result) == len(optimizer.param_groups) == 3
    assert sum(len(group) for group in result.values()) == len(names)
    assert all(name.endswith("_proj.weight") for name in result[0.1, True])
    assert result[0.1, False] == {"lm_head.weight"}
    assert "embed_tokens.weight" in result[0.0, False]


def random_groups(random: Random, names: list[str], is_muon: bool) -> list[dict[str, Any]]:
    """Return tables of ``optim.groups`` with patterns of some of the names."""
    groups = []
    for _ in range(random.randint(1, 4)):
        parts = random.choice(names).split(".")
        patterns = [".".join("*" if random.random() < 0.4 else part for part in parts)]
        if random.random() < 0.3:
            patterns.append(random.choice(names))
        group: dict[str, Any] = {"params": patterns}
        ranges = {"lr_mult": 9.0, "weight_decay": 1.0, "beta1": 0.9, "beta2": 0.9, "eps": 1e-3}
        for key in random.sample(list(ranges), random.randint(0, 5)):
            group[key] = random.uniform(0.01, 1.0) * ranges[key]
        if is_muon and random.random() < 0.3:
            group["optimizer"] = "adamw"
        groups.append(group)
    return groups


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_optimizer_groups_equal_optimizers_of_single_parameters(name: str) -> None:
    """Each parameter moves as with torch's AdamW, or Muon, of its options alone."""
    for seed in range(12):
        random = Random(seed)
        torch.manual_seed(seed)
        config = PRESETS["toy"].model_copy(update={"num_layers": 2, "dim": 16, "vocab_size": 40})
        model = decoder.Decoder(config)
        names = [each for each, _ in model.named_parameters()]
        tables = random_groups(random, names, name == "muon")
        optim = OptimSection(name=name, lr=0.01, groups=tuple(OptimGroup(**t) for t in tables))
        inside = {param for block in decoder.blocks(model) for param in block.parameters()}
        build_it = build_muon if name == "muon" else build_adamw
        optimizer = build_optimizer(
            model.named_parameters(), optim, build_it, decoder.has_weight_decay, inside
        )
        expected: dict[str, tuple[nn.Parameter, Any, float]] = {}
        for full_name, param in model.named_parameters():
            own: dict[str, Any] = next(
                (t for t in tables if any(fnmatchcase(full_name, p) for p in t["params"])), {}
            )
            copy = nn.Parameter(param.detach().clone())
            decays = full_name.endswith("_proj.weight") or full_name == "lm_head.weight"
            options = {
                "betas": (own.get("beta1", 0.9), own.get("beta2", 0.95)),
                "eps": own.get("eps", 1e-8),
                "weight_decay": own.get("weight_decay", 0.1 if decays else 0.0),
            }
            reference: Any = torch.optim.AdamW([copy], **options)
            if name == "muon" and "_proj" in full_name and "optimizer" not in own:
                group = {"params": [copy], "matrices": True} | options
                reference = build_muon([group], OptimSection(name="muon"))
            expected[full_name] = copy, reference, own.get("lr_mult", 1.0)
        for step in range(3):
            lr = 0.01 / (1 + step)
            set_learning_rate(optimizer, lr)
            for full_name, param in model.named_parameters():
                copy, reference, lr_mult = expected[full_name]
                param.grad = torch.randn_like(param)
                copy.grad = param.grad.clone()
                reference.param_groups[0]["lr"] = lr * lr_mult
                reference.step()
            optimizer.step()
        for full_name, param in model.named_parameters():
            torch.testing.assert_close(param, expected[full_name][0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("groups", "keys", "message"),
    [
        (
            '{params=["*nrm*"]}',
            "",
            r'optim.groups="\*nrm\*" matches no trainable parameter.* Use one',
        ),
        (
            '{params=["embed_token.*"]}',
            "",
            r"optim.groups=.* matches no .* Use one of embed_tokens.weight",
        ),
        (
            '{params=["*"]}, {params=["embed*", "*.k_proj.*"]}',
            "",
            r'optim.groups="\*.k_proj.\*" matches only parameters of earlier groups. Move its',
        ),
        ('{params=["*.q_proj.*"]}', "lora.rank=4 lora.targets=k_proj", r"matches no trainable"),
    ],
)
def test_groups_without_parameters_are_refused(groups: str, keys: str, message: str) -> None:
    overrides = [(key, value) for key, _, value in (each.partition("=") for each in keys.split())]
    job = small_job(("optim.groups", f"[{groups}]"), *overrides)
    with pytest.raises(InvalidConfig, match=message):
        resolve(job, Machine("cpu", devices=1, world_size=1))


def test_optimizer_groups_are_read_from_toml_and_written_back(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'extends = "demo"\n[[optim.groups]]\nparams = ["embed*"]\nlr_mult = 0.1\n'
        '[[optim.groups]]\nparams = ["*.norm*"]\nweight_decay = 0.2\nbeta2 = 0.5\n'
    )
    job, base, errors = read_job(str(path))
    assert not errors
    assert [group.options(job.optim) for group in job.optim.groups] == [
        {"lr_mult": 0.1},
        {"lr_mult": 1.0, "weight_decay": 0.2, "betas": (0.9, 0.5)},
    ]
    again = tmp_path / "again.toml"
    again.write_text(to_toml(job, "mine", base))
    assert read_job(str(again))[0] == job
    for groups, rule in (
        ('[{params=["*"], lr_mult=-1}]', r"\[0\].lr_mult must be .*0"),
        (
            '[{params=["*"]}, {lrmult=1}]',
            r"\[1\].params is missing or \[1\].lrmult is not one of params, lr_mult",
        ),
    ):
        _, _, errors = read_job("demo", [("optim.groups", groups)])
        assert re.search(rule, str(errors[0]))


def test_optimizer_step_equals_adamw() -> None:
    """The formula has decoupled weight decay and bias correction."""
    model = nn.Linear(5, 7, bias=False)
    optimizer = build_optimizer(model.named_parameters(), OPTIM, build_adamw, lambda name: True, ())
    w = model.weight.detach().double().clone()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for step in range(1, 6):
        lr = learning_rate(step, 20, OPTIM, SCHEDULES["wsd"])
        grad = torch.randn(7, 5)
        model.weight.grad = grad.clone()
        set_learning_rate(optimizer, lr)
        optimizer.step()
        m = OPTIM.beta1 * m + (1 - OPTIM.beta1) * grad
        v = OPTIM.beta2 * v + (1 - OPTIM.beta2) * grad.double() ** 2
        update = (m / (1 - OPTIM.beta1**step)) / ((v / (1 - OPTIM.beta2**step)).sqrt() + OPTIM.eps)
        w = w - lr * OPTIM.weight_decay * w - lr * update
    torch.testing.assert_close(model.weight.detach().double(), w, rtol=1e-5, atol=1e-6)


def test_clip_scale_is_one_up_to_the_limit() -> None:
    assert clip_scale(torch.tensor(1e9), 0.0) is None
    scales = [clip_scale(torch.tensor(norm), 2.0) for norm in (0.0, 1.0, 1.99999, 2.5, torch.inf)]
    assert [scale.item() for scale in scales if scale is not None] == [
        1.0,
        1.0,
        1.0,
        pytest.approx(1.25, rel=1e-6),
        torch.inf,
    ]


CLIPPED = ["adamw", "bfloat16", "8bit", "muon", "sgd", "fused sgd"]


def clipped_optimizer(kind: str, params: list[nn.Parameter], lr: float, decay: float) -> Any:
    """Build an optimizer of weft, or of torch, that `masked_step` clips."""
    if "sgd" in kind:
        fused = kind == "fused sgd"
        return torch.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=decay, fused=fused)
    dtype = kind if kind in ("bfloat16", "8bit") else "float32"
    section = OptimSection(lr=lr, state_dtype=dtype)
    group = {
        "params": params,
        "weight_decay": decay,
        "matrices": True,
        "names": ["a", "b", "c"][: len(params)],
    }
    return (build_muon if kind == "muon" else build_adamw)([group], section)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", CLIPPED)
def test_masked_step_clips_as_torch_does(kind: str, seed: int) -> None:
    """Six steps with gradients of any size and some skipped ones equal torch's clipping."""
    random = torch.Generator().manual_seed(seed)
    max_norm = [0.0, 1e-3, 1.0, 50.0][seed]
    ours, plain = (
        [nn.Parameter(torch.linspace(-1, 1, 32 * rows).view(rows, 32)) for rows in (3, 8, 1)]
        for _ in range(2)
    )
    optimizer = clipped_optimizer(kind, ours, 0.02, 0.1)
    expected = clipped_optimizer(kind, plain, 0.02, 0.1)
    if kind == "adamw":  # independent of weft's
        expected = torch.optim.AdamW(plain, lr=0.02, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(6):
        size = 10.0 ** (6 * torch.rand((), generator=random) - 4) if step != 2 else 0.0
        for param, other in zip(ours, plain, strict=True):
            param.grad = size * torch.randn(param.shape, generator=random)
            other.grad = param.grad.clone()
        bad = [torch.nan, torch.inf, 3.0][seed % 3] if step in (1, 4) else None
        if bad is not None:
            ours[1].grad[2, 3] = bad
        else:
            if max_norm:
                nn.utils.clip_grad_norm_(plain, max_norm)
            expected.step()
        norm, _ = compute_grad_norm(ours)
        masked_step(optimizer, torch.tensor(bad is not None), clip_scale(norm, max_norm))
        for param, other in zip(ours, plain, strict=True):
            # A rounded moment may differ by its last place.
            atol = {"bfloat16": 2e-4, "8bit": 1e-3}.get(kind, 2e-6)
            torch.testing.assert_close(param, other, rtol=2e-5, atol=atol)


def masked_steps_when_sharded(kind: str) -> list[Tensor]:
    """Return weights after clipped steps of parameters that are sharded over all ranks."""
    model = nn.Sequential(nn.Linear(32, 6, bias=False), nn.Linear(6, 32, bias=False))
    for param in model.parameters():
        nn.init.constant_(param, 0.5)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    params = list(model.parameters())
    optimizer = clipped_optimizer(kind, params, 0.1, 0.1)
    for step in range(3):
        optimizer.zero_grad()
        rows = torch.arange(64.0).view(2, 32).sin() * 10**step
        model(rows).square().sum().backward()
        norm, _ = compute_grad_norm(params)
        masked_step(optimizer, torch.tensor(step == 1), clip_scale(norm, 0.3))
    return [full_tensor(param.detach()) for param in params]


@pytest.mark.parametrize("kind", ["adamw", "bfloat16", "sgd"])
def test_masked_step_clips_shards_as_full_parameters(kind: str) -> None:
    (one,) = run_ranks(masked_steps_when_sharded, 1, kind)
    for many in run_ranks(masked_steps_when_sharded, 2, kind):
        torch.testing.assert_close(many, one, rtol=1e-4, atol=1e-6)


def test_grad_scale_moves_to_the_device_of_offloaded_parameters() -> None:
    """torch would copy it without a wait, and read the copy too early."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], fused=True)
    elsewhere = torch.zeros((), device="meta", dtype=torch.bool)
    with pytest.raises(NotImplementedError, match="meta"):  # the values are needed at once
        set_grad_scaling(optimizer, elsewhere, None)
    assert set_grad_scaling(optimizer, torch.tensor(True), torch.tensor(2.0))
    values: Any = optimizer
    assert (values.found_inf.item(), values.grad_scale.item()) == (1.0, 2.0)


@pytest.mark.parametrize(("steps", "warmup"), [(5, 0), (60, 6), (1000, 100), (9000, 100)])
def test_learning_rate_auto_warmup_is_a_tenth_of_the_steps(steps: int, warmup: int) -> None:
    auto = OptimSection(schedule="linear")
    fixed = OptimSection(schedule="linear", warmup_steps=warmup)
    for step in (1, max(1, warmup), steps):
        rates = [learning_rate(step, steps, optim, SCHEDULES["linear"]) for optim in (auto, fixed)]
        assert rates[0] == rates[1]


def test_grad_norm_of_frozen_part_is_on_its_device() -> None:
    """Else the reduction over stages would use another backend, or hang."""
    frozen = nn.Parameter(torch.empty(4, device="meta"), requires_grad=False)
    assert [norm.device.type for norm in compute_grad_norm([frozen])] == ["meta", "meta"]
    assert [norm.item() for norm in compute_grad_norm([])] == [0.0, 0.0]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("fused", [True, False], ids=["on the device", "by the host"])
def test_optimizer_bad_step_changes_no_bit(kind: Any, fused: bool) -> None:
    param = nn.Parameter(torch.randn(50))
    optimizer = kind([param], lr=0.1, fused=fused, weight_decay=0.1)
    no, yes = torch.tensor(False), torch.tensor(True)
    assert set_grad_scaling(optimizer, no, None) == fused
    param.grad = torch.randn(50)
    masked_step(optimizer, no)
    everything = {"param": param.detach(), **optimizer.state[param]}
    before = {name: value.clone() for name, value in everything.items() if value is not None}
    param.grad = torch.full((50,), torch.nan)
    masked_step(optimizer, yes)
    assert all(everything[name].equal(value) for name, value in before.items())
    param.grad = torch.randn(50)
    masked_step(optimizer, no)
    assert not param.equal(before["param"])


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("warmup", "steps"), [(0, 100), (10, 100), (10, 11), (50, 20), (0, 1)])
def test_learning_rate_rises_then_falls(name: str, warmup: int, steps: int) -> None:
    optim = OPTIM.model_copy(update={"warmup_steps": warmup})
    rates = [learning_rate(step, steps, optim, SCHEDULES[name]) for step in range(1, steps + 1)]
    assert all(0 < rate <= optim.lr * (1 + 1e-12) for rate in rates)
    rising, falling = rates[:warmup], rates[max(0, warmup - 1) :]
    assert all(a < b for a, b in itertools.pairwise(rising))
    assert all(a >= b for a, b in itertools.pairwise(falling))
    if steps > warmup:
        assert rates[-1] == pytest.approx(optim.lr * optim.min_lr_ratio)
    if 0 < warmup <= steps:
        assert rates[warmup - 1] == pytest.approx(optim.lr)


def test_learning_rate_schedules_have_their_shapes() -> None:
    def middle(name: str) -> float:
        optim = OPTIM.model_copy(update={"min_lr_ratio": 0.0})
        return learning_rate(10 + 45, 100, optim, SCHEDULES[name]) / optim.lr

    assert middle("wsd") == 1.0
    assert middle("linear") == pytest.approx(0.5)
    assert middle("cosine") == pytest.approx(0.5)
    quarter = learning_rate(10 + 22, 98, OPTIM, SCHEDULES["cosine"]) / OPTIM.lr
    assert quarter == pytest.approx(0.1 + 0.9 * 0.85355, rel=1e-4)
    late = learning_rate(100 - 9, 100, OPTIM, SCHEDULES["wsd"]) / OPTIM.lr
    assert late == pytest.approx(0.1 + 0.9 * 0.1 / 0.25)


def test_the_rules_know_the_built_in_optimizers() -> None:
    assert set(WEFT_OPTIMIZERS) == set(OPTIMIZERS)
