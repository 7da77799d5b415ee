"""Qwen3 and Mistral: equal to transformers, published sizes, equal in any layout."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.parallel.test_layouts import MODEL, check
from weft.config.schema import RunSection
from weft.models import FAMILIES
from weft.models.hf_mapping import from_hf_config, get_hf_mapping, param_shapes, to_hf_config
from weft.models.llama import INIT, num_matmul_params
from weft.plan.model_config import resolve_model
from weft.plan.plan import Machine

# Grouped heads, wider than dim / num_heads as in Qwen3 0.6B.
SHAPE: dict[str, Any] = {
    "num_layers": 2,
    "dim": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 24,
    "ffn_dim": 96,
    "vocab_size": 128,
    "max_seq_len": 64,
}
OTHER_CASES = ["qwen3", "mistral"]
EACH = [(kind, tied) for kind in OTHER_CASES for tied in (False, True)]
TOLERANCE: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}


def config_of(kind: str, **changes: Any) -> Any:
    config, errors = resolve_model(kind, "toy", SHAPE | changes)
    assert not errors
    return config


def build_filled(kind: str, config: Any) -> nn.Module:
    """Build a model with large random weights, so that attention is far from uniform."""
    torch.manual_seed(0)
    model = FAMILIES[kind].build(config)
    for name, parameter in model.named_parameters():
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        nn.init.normal_(parameter, mean, 0.2)
    return model


def transformers_twin(kind: str, config: Any) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    tree = to_hf_config(FAMILIES[kind], config, "float32")
    created = AutoConfig.for_model(tree.pop("model_type"), **tree)
    return AutoModelForCausalLM.from_config(created)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("kind", "tied"), EACH)
def test_logits_and_gradients_equal_transformers(kind: str, tied: bool) -> None:
    config = config_of(kind, tied_embeddings=tied)
    model, twin = build_filled(kind, config), transformers_twin(kind, config)
    named = get_hf_mapping(FAMILIES[kind]).hf_name
    theirs = dict(twin.named_parameters())
    assert {n: p.shape for n, p in theirs.items()} == {
        named(name): shape for name, shape in param_shapes(FAMILIES[kind], config).items()
    }
    for name, parameter in model.named_parameters():
        theirs[named(name)].data.copy_(parameter.data)
    tokens = torch.randint(128, (2, 65), generator=torch.Generator().manual_seed(1))
    inputs, labels = tokens[:, :-1], tokens[:, 1:].flatten()

    ours, expected = model(inputs), twin(inputs).logits
    torch.testing.assert_close(ours, expected, **TOLERANCE)
    F.cross_entropy(ours.flatten(0, 1), labels).backward()
    F.cross_entropy(expected.flatten(0, 1), labels).backward()
    for name, parameter in model.named_parameters():
        gradient = theirs[named(name)].grad
        assert gradient is not None
        assert gradient.abs().max() > 1e-4
        torch.testing.assert_close(parameter.grad, gradient, **TOLERANCE)


@pytest.mark.parametrize("kind", OTHER_CASES)
def test_from_config_written_by_transformers_is_understood(kind: str) -> None:
    config = config_of(kind)
    written = json.loads(transformers_twin(kind, config).config.to_json_string())  # type: ignore[union-attr,operator]
    assert from_hf_config(FAMILIES[kind], written) == (config, [])


def test_qk_norm_changes_the_logits() -> None:
    config = config_of("qwen3")
    model = build_filled("qwen3", config)
    tokens = torch.arange(32).unsqueeze(0)
    with torch.no_grad():
        before: Tensor = model(tokens)
        model.get_parameter("layers.0.self_attn.k_norm.weight").mul_(0.1)
        assert (model(tokens) - before).abs().max() > 0.1


# --------------------------------------------------------------------------- tables


@pytest.mark.parametrize(
    ("kind", "preset", "count"),
    [
        # A tied embedding counts once in the weights on the Hub.
        ("qwen3", "0.6b", 596_049_920),
        ("qwen3", "1.7b", 1_720_574_976),
        ("qwen3", "4b", 4_022_468_096),
        ("qwen3", "8b", 8_190_735_360),
        ("qwen3", "14b", 14_768_307_200),
        ("qwen3", "32b", 32_762_123_264),
        ("mistral", "7b-v0.3", 7_248_023_552),
    ],
)
def test_parameter_counts_of_presets_equal_the_published_weights(
    kind: str, preset: str, count: int
) -> None:
    family = FAMILIES[kind]
    config = family.presets[preset]
    assert family.num_params(config) == count
    with torch.device("meta"):
        built = family.build(config)
        theirs = transformers_twin(kind, config)
    assert sum(p.numel() for p in built.parameters()) == count
    assert sum(p.numel() for p in theirs.parameters()) == count
    assert family.unit_costs is not None
    assert sum(unit.params for unit in family.unit_costs(config, 4096)) == count


def test_parameter_counts_without_embeddings_equal_the_model_cards() -> None:
    """The published counts are those of Qwen3's model cards, in billions."""
    published = {"0.6b": 0.44, "1.7b": 1.4, "4b": 3.6, "8b": 6.95, "14b": 13.2, "32b": 31.2}
    for preset, billions in published.items():
        config: Any = FAMILIES["qwen3"].presets[preset]
        table = config.vocab_size * config.dim
        result = FAMILIES["qwen3"].num_params(config) - table * (2 - config.tied_embeddings)
        assert result / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(("kind", "tied"), EACH)
def test_flops_equal_the_flop_counter(kind: str, tied: bool) -> None:
    config = config_of(kind, tied_embeddings=tied)
    tokens = torch.arange(32).expand(3, 32)
    # The counter does not support flash attention on CPU; the math kernel consists of matmuls.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        build_filled(kind, config)(tokens).sum().backward()
    assert counter.get_total_flops() == (
        FAMILIES[kind].flops_per_token(config, 32) * tokens.numel()
    )
    assert num_matmul_params(config) > 0


@pytest.mark.parametrize("kind", OTHER_CASES)
def test_tables_cover_every_parameter_exactly_once(kind: str) -> None:
    family = FAMILIES[kind]
    with torch.device("meta"):
        model = family.build(config_of(kind))
    for name, _ in model.named_parameters():
        assert len([p for p in INIT if fnmatchcase(name, p)]) == 1, name
        module = name.removesuffix(".weight")
        assert len([p for p in family.sharding if fnmatchcase(module, p)]) == 1, name
    assert not family.has_weight_decay("layers.0.self_attn.q_norm.weight")


# --------------------------------------------------------------------------- layouts

LAYOUTS = ["pp2", "tp2 sequence_parallel=false", "tp4"]


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("qwen3", layout) for layout in LAYOUTS]
    + [("mistral", "dp_shard2 cp2")]
    + [pytest.param("mistral", "tp2", marks=pytest.mark.slow)]
    + [
        pytest.param("qwen3", layout, marks=pytest.mark.slow)
        for layout in (
            *("dp_shard2", "tp2", "cp2", "dp_shard2 tp2", "tp2 pp2"),
            *("tp2 cp2 cp_method=ulysses", "dp_replicate2 tp2"),
        )
    ],
)
def test_every_layout_computes_the_same_gradients(kind: str, layout: str, store_path: Path) -> None:
    own = [("model.kind", kind), ("model.head_dim", "12")]
    check(layout, store_path, model=MODEL + own)


def test_forecast_of_another_family_has_step_seconds() -> None:
    from weft.estimate.cost import device_spec
    from weft.estimate.forecast import forecast
    from weft.plan.plan_text import plan_recipe

    overrides = [
        ("model.kind", "qwen3"),
        ("model.preset", "8b"),
        ("parallel.tp", "2"),
        ("train.seq_len", "4096"),
        ("train.global_batch_size", "4"),
    ]

    def local_machine(section: RunSection) -> Machine:
        return Machine("cpu", devices=2)

    recipe = "llama3-8b"
    plan, machine = plan_recipe(recipe, overrides, [], "1x8xh100", local_machine)
    prediction = forecast(plan, machine, device_spec(plan, machine))
    assert plan.num_params == 8_190_735_360
    assert prediction.step_seconds
