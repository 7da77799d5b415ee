"""List matrices with their local sizes under tp; choose and refuse those for float8."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor, nn

from tests.small import Overrides, small_job
from weft.config.errors import InvalidConfig
from weft.config.reader import read_job
from weft.config.schema import Job, PrecisionSection
from weft.models import load_family
from weft.models.families.llama import PRESETS
from weft.planning.devices import parse_cluster
from weft.planning.matrices import (
    Matrix,
    convertible_matrices,
    find_float8_matrices,
    find_linear_layers,
    list_matrices,
)
from weft.planning.plan import Machine, Plan
from weft.planning.plan_text import cluster_machine, describe_plan
from weft.planning.resolve import resolve
from weft.preparation.job_checks import check_names


def planned(*overrides: tuple[str, str], cluster: str = "1x8xH100", recipe: str = "demo") -> Plan:
    job, machine = read_plan_job(*overrides, cluster=cluster, recipe=recipe)
    return resolve(job, machine)


def read_plan_job(*overrides: tuple[str, str], cluster: str, recipe: str) -> tuple[Job, Machine]:
    job, _, errors = read_job(recipe, [*overrides])
    assert not errors, errors
    return job, cluster_machine(parse_cluster(cluster))


LARGE: Overrides = [
    ("model.preset", "8b"),
    ("train.seq_len", "8192"),
    ("precision.float8", "tensorwise"),
    ("compile.enable", "true"),
]


def test_plan_of_float8_has_its_peak_and_matrices() -> None:
    plan = planned(*LARGE)
    plain = planned(*LARGE, ("precision.float8", "none"))
    assert plan.flops_per_token == plain.flops_per_token
    assert (
        (plan.peak_flops, plan.peak_dtype) == (plain.peak_flops, "bfloat16") == (989e12, "bfloat16")
    )
    # 5 matrices in each of 32 blocks; k_proj and v_proj, 4096 to 1024, are too small.
    assert (plan.num_float8_matrices, plan.float8_all_gather, plan.float8_emulated) == (
        160,
        True,
        False,
    )
    assert not plan.warnings
    _job, machine = read_plan_job(*LARGE, cluster="1x8xH100", recipe="demo")
    screen = describe_plan(plan, machine, "demo")
    assert "tensorwise, 160 matrices, gathered in float8" in screen
    assert "989 TFLOP/s per device, dense bfloat16: the basis of MFU, also with float8" in screen
    (warning,) = planned(*LARGE, ("compile.enable", "false")).warnings
    assert "separate kernels" in warning
    for recipe, cluster, emulated in (
        ("tensorwise", "1x8xA100-80GB", True),
        ("rowwise", "1x8xMI300X", False),
        ("mxfp8", "1x8xH100", True),
        ("mxfp8", "1x8xB200", False),
    ):
        result = planned(*LARGE, ("precision.float8", recipe), cluster=cluster)
        assert result.float8_emulated == emulated
        assert any("emulated" in warning for warning in result.warnings) == emulated
    for key, value in (("cpu_offload", "true"), ("reshard_after_forward", "2")):
        assert not planned(*LARGE, (f"parallel.{key}", value)).float8_all_gather
    pipeline = [("parallel.pp", "2"), ("pipeline.schedule", "ZBVZeroBubble")]
    (warning,) = planned(*LARGE, *pipeline, ("compile.enable", "false")).warnings[1:]
    assert "fills few gaps" in warning


def test_float8_matrices_follow_the_local_shapes() -> None:
    family = load_family("llama")

    def names(tp: int = 1, recipe: str = "tensorwise", **section: Any) -> set[str]:
        config = PRESETS["8b"].model_copy(update={"num_layers": 2, **section.pop("model", {})})
        chosen = find_float8_matrices(
            PrecisionSection(float8=recipe, **section),
            config,
            family,
            tp,  # type: ignore[arg-type]
        )
        return {matrix.name.removeprefix("layers.") for matrix in chosen}

    all_names = {f"{i}.{m}_proj" for i in "01" for m in SITES}
    subset = {name for name in all_names if not name.endswith(("k_proj", "v_proj"))}
    assert names(float8_small=True) == all_names
    assert names() == subset
    assert names(float8_exclude=("layers.0.*", "*.o_proj")) == {
        name for name in subset if name[0] == "1" and "o_proj" not in name
    }
    # A rank has 4096 to 512 of q_proj, and 4096 to 1792 of up_proj.
    assert names(tp=8) == {n for n in subset if "q_proj" not in n}
    assert names(tp=8, recipe="rowwise") == set()
    assert names(tp=4, recipe="rowwise") == {n for n in all_names if "mlp" in n}
    odd = names(float8_small=True, model={"ffn_dim": 1000})  # not a multiple of 16
    assert odd == {name for name in all_names if "attn" in name}
    assert names(float8_small=True, model={"ffn_dim": 1008}, recipe="mxfp8") == odd


def test_float8_matrices_of_experts_follow_the_same_rules() -> None:
    """Names, sizes and limits apply to the matrices of experts; never to the router."""
    keys: Overrides = [
        ("model.kind", "moe"),
        ("model.preset", "v3-like"),
        ("model.num_layers", "5"),
        ("train.seq_len", "1024"),
        ("train.global_batch_size", "64"),
        ("precision.float8", "rowwise"),
        ("parallel.ep", "8"),
    ]
    # The experts' down_proj is 2048 to 7168; gate_proj and up_proj, 7168 to 2048, are too small.
    plan = planned(*keys, cluster="8x8xH100")
    assert plan.num_float8_stacks == 2
    small: Overrides = [*keys, ("precision.float8_small", "true")]
    plan = planned(*small, cluster="8x8xH100")
    assert plan.num_float8_stacks == 6
    _job, machine = read_plan_job(*small, cluster="8x8xH100", recipe="demo")
    assert "matrices (6 stacks of experts)" in describe_plan(plan, machine, "demo")
    matrices = find_float8_matrices(plan.job.precision, plan.model, plan.family, 1)
    assert not any("router" in matrix.name for matrix in matrices)
    plan = planned(*small, ("precision.float8_exclude", "*.experts.*"), cluster="8x8xH100")
    assert plan.num_float8_stacks == 0
    assert any("converts no matrix of the experts" in warning for warning in plan.warnings)
    odd = planned(*small, ("model.expert_dim", "2056"), cluster="8x8xH100")  # 8 mod 16
    assert odd.num_float8_stacks == 0


SITES = (
    "self_attn.q",
    "self_attn.k",
    "self_attn.v",
    "self_attn.o",
    "mlp.gate",
    "mlp.up",
    "mlp.down",
)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([("precision.compute_dtype", "float32")], "produces bfloat16"),
        (
            [("model.ffn_dim", "1000"), ("model.dim", "120")],
            "needs a matrix whose sizes are multiples of 16",
        ),
        ([("model.dim", "512"), ("model.ffn_dim", "1024")], "too small to gain"),
        ([("precision.float8_exclude", '["*.*_proj"]')], "in precision.float8_exclude"),
        ([("precision.float8_exclude", '["*.ffn"]')], "Use one of q_proj, k_proj"),
        ([("train.seq_len", "8200")], "not a multiple of 16 (float8). Use a multiple of 16"),
    ],
)
def test_float8_incompatible_keys_are_refused(keys: Overrides, expected: str) -> None:
    heads = [("model.num_heads", "4"), ("model.num_kv_heads", "2")] * ("dim" in str(keys))
    with pytest.raises(InvalidConfig) as caught:
        planned(*LARGE, *heads, *keys, ("train.microbatch_size", "auto"))
    assert expected in str(caught.value)


def test_float8_without_torchao_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    job = small_job(("precision.float8", "rowwise"))
    assert not list(check_names(job))
    monkeypatch.setitem(sys.modules, "torchao", None)
    (error,) = check_names(job)
    assert "pip install 'weft[torchao]'" in str(error)
    assert not list(check_names(small_job()))


# --------------------------------------------------------------------------- linear layers


TOY = PRESETS["toy"].model_copy(update={"num_layers": 1})


def test_list_matrices_sizes_are_those_of_a_rank() -> None:
    kinds = ("q", "k", "v", "o", "gate", "up", "down")
    unsharded, half = (list_matrices(TOY, load_family("llama"), tp) for tp in (1, 2))
    assert [m.name.rpartition(".")[2] for m in unsharded] == [f"{kind}_proj" for kind in kinds]
    for kind, full, cut in zip(kinds, unsharded, half, strict=True):
        row = kind in ("o", "down")
        outputs, inputs = (
            full.out_features // (1 if row else 2),
            full.in_features // (2 if row else 1),
        )
        assert cut == Matrix(full.name, outputs, inputs)
    # Six ranks share two key heads.
    assert (TOY.num_heads, TOY.num_kv_heads) == (6, 2)
    shared = list_matrices(TOY, load_family("llama"), 6)
    assert [m.out_features for m in shared[:3]] == [
        unsharded[0].out_features // 6,
        unsharded[1].out_features // 2,
        unsharded[2].out_features // 2,
    ]


def test_list_matrices_builds_a_model_once() -> None:
    """A configuration with a list cannot be remembered, and is built again."""
    built = []

    def build(model: object) -> nn.Module:
        built.append(model)
        return nn.ModuleList([nn.Linear(16, 32)])

    family = replace(load_family("llama"), build=build, blocks=list)
    for model, count in ((TOY, 1), ([TOY], 3)):
        for tp in (1, 2):
            (matrix,) = list_matrices(model, family, tp)
            assert matrix == ("0", 32, 16, 0, 0)
        assert len(built) == count


def test_list_matrices_uneven_sizes_are_the_largest() -> None:
    sizes = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 16, "ffn_dim": 100}
    config, family = TOY.model_copy(update=sizes), load_family("llama")
    q, k, v, o, gate, up, down = list_matrices(config, family, 4)
    # Two query heads at most, which read both key heads on one rank.
    assert (q.out_features, k.out_features, v.out_features, o.in_features) == (32, 32, 32, 32)
    assert (gate.out_features, up.out_features, down.in_features) == (25, 25, 25)


def test_float8_excludes_layers_of_which_ranks_have_different_sizes() -> None:
    sizes = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 16, "ffn_dim": 192, "dim": 96}
    config, family = TOY.model_copy(update=sizes), load_family("llama")
    names = [matrix.name for matrix in convertible_matrices("rowwise", config, family, 4)]
    assert [name.rpartition(".")[2] for name in names] == ["gate_proj", "up_proj", "down_proj"]


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_linear_layers_layer_with_a_custom_forward_is_left_out() -> None:
    """Neither float8 nor an adapter may replace it."""
    block = nn.Sequential(nn.Linear(4, 4), Doubled(4, 4))
    model = nn.ModuleDict({"block": block, "head": nn.Linear(4, 4)})
    assert find_linear_layers(model, [block]).keys() == {"block.0"}
