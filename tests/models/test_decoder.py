"""Decoder: Llama equal to transformers, correct with packing, with complete parameter tables."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.harness import run_ranks
from weft.config.errors import ConfigError, InvalidConfig
from weft.models import FAMILIES, Family, load_family
from weft.models.decoder import (
    INIT,
    NO_DECAY,
    Decoder,
    DecoderBlock,
    blocks,
    get_init,
    has_weight_decay,
)
from weft.models.decoder_config import DecoderConfig
from weft.models.decoder_costs import flops_per_token, num_matmul_params, num_params
from weft.models.decoder_rules import check
from weft.models.families.llama import PRESETS
from weft.models.hf_fields import hf_name
from weft.models.hf_mapping import to_hf_config
from weft.models.rotary import rope_frequencies
from weft.planning.model_config import resolve_model

SMALL = DecoderConfig(
    num_layers=2,
    dim=64,
    num_heads=4,
    num_kv_heads=2,
    ffn_dim=96,
    vocab_size=128,
    max_seq_len=64,
    rope_theta=10000.0,
    rope_scaling="none",
)
TIED = SMALL.model_copy(update={"tied_embeddings": True})
# Scaling keeps, blends or stretches the eight frequencies within 64 tokens.
SCALED = SMALL.model_copy(update={"rope_scaling": "llama3", "rope_original_context": 32})
# Modules that Llama lacks.
RICH = SMALL.model_copy(
    update={
        "qkv_bias": True,
        "attention_sinks": True,
        "num_experts": 4,
        "expert_dim": 32,
        "dense_layers": 1,
    }
)
TOLERANCE: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}


def build_filled(config: DecoderConfig) -> Decoder:
    """Build a model with large random weights, so that attention is far from uniform."""
    torch.manual_seed(0)
    model = Decoder(config)
    for name, parameter in model.named_parameters():
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        nn.init.normal_(parameter, mean, 0.2)
    return model


def random_tokens(*shape: int) -> Tensor:
    return torch.randint(SMALL.vocab_size, shape, generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# --------------------------------------------------------------------------- transformers


def transformers_twin(model: Decoder) -> nn.Module:
    from transformers import LlamaConfig as TheirConfig
    from transformers import LlamaForCausalLM

    twin = LlamaForCausalLM(TheirConfig(**to_hf_config(FAMILIES["llama"], model.config, "float32")))
    theirs = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        theirs.pop(hf_name(name)).data.copy_(parameter.data)
    assert not theirs, "parameters that only transformers has"
    return twin


@pytest.mark.parametrize("config", [SMALL, TIED, SCALED], ids=["plain", "tied", "scaled"])
def test_logits_and_gradients_equal_transformers(config: DecoderConfig) -> None:
    model = build_filled(config)
    twin = transformers_twin(model)
    tokens = random_tokens(2, 65)
    inputs, labels = tokens[:, :-1], tokens[:, 1:].flatten()

    ours = model(inputs)
    theirs = twin(inputs).logits
    torch.testing.assert_close(ours, theirs, **TOLERANCE)

    F.cross_entropy(ours.flatten(0, 1), labels).backward()
    F.cross_entropy(theirs.flatten(0, 1), labels).backward()
    their_gradients = gradients(twin)
    our_gradients = gradients(model)
    assert {hf_name(name) for name in our_gradients} == set(their_gradients)
    for name, gradient in our_gradients.items():
        torch.testing.assert_close(gradient, their_gradients[hf_name(name)], **TOLERANCE)


def test_rope_scaling_changes_the_logits() -> None:
    tokens = random_tokens(1, 64)
    with torch.no_grad():
        difference = (build_filled(SCALED)(tokens) - build_filled(SMALL)(tokens)).abs().max()
    assert difference > 0.1


# --------------------------------------------------------------------------- documents


@pytest.mark.parametrize("restart", [True, False], ids=["restarting", "running"])
def test_packed_row_equals_its_separate_documents(restart: bool) -> None:
    lengths = [5, 1, 17, 9]
    row = random_tokens(1, sum(lengths))
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)]).unsqueeze(0)
    positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0) if restart else None

    packed = build_filled(SMALL)
    logits = packed(row, documents, positions)
    logits.square().sum().backward()

    single = build_filled(SMALL)
    parts = [single(part) for part in row.split(lengths, dim=1)]
    torch.testing.assert_close(logits, torch.cat(parts, dim=1), **TOLERANCE)
    sum(part.square().sum() for part in parts).backward()
    expected = gradients(single)
    for name, gradient in gradients(packed).items():
        scale = expected[name].abs().max()
        torch.testing.assert_close(gradient / scale, expected[name] / scale, **TOLERANCE)


def test_rows_of_a_batch_have_their_own_documents_and_positions() -> None:
    tokens = random_tokens(2, 12)
    documents = torch.tensor([[0] * 12, [0] * 4 + [1] * 8])
    positions = torch.stack([torch.arange(12), torch.cat([torch.arange(4), torch.arange(8)])])
    model = build_filled(SMALL)
    with torch.no_grad():
        logits = model(tokens, documents, positions)
        torch.testing.assert_close(logits[:1], model(tokens[:1]), **TOLERANCE)
        torch.testing.assert_close(logits[1:, 4:], model(tokens[1:, 4:]), **TOLERANCE)


def test_positions_select_the_rope_angles() -> None:
    model = build_filled(SCALED)
    positions = torch.tensor([[0, 5, 9], [3, 4, 60]])
    frequencies = rope_frequencies(SCALED)
    angles = positions[..., None] * frequencies
    cos, sin = model.rope(3, positions, torch.float32)
    assert torch.equal(cos, torch.cat((angles.cos(), angles.cos()), -1))
    assert torch.equal(sin, torch.cat((angles.sin(), angles.sin()), -1))
    with torch.no_grad():
        tokens = random_tokens(2, 3)
        distant = (model(tokens, positions_BT=positions) - model(tokens)).abs().max()
    assert distant > 0.01


def test_later_tokens_do_not_change_earlier_logits() -> None:
    tokens = random_tokens(1, 16)
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % SMALL.vocab_size
    model = build_filled(SMALL)
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10], **TOLERANCE)
    assert not torch.allclose(before[:, 10], after[:, 10], atol=1e-2)


def test_row_longer_than_the_tables_is_refused() -> None:
    with pytest.raises(ValueError, match=r"65 tokens, which exceeds model\.max_seq_len=64"):
        build_filled(SMALL)(random_tokens(1, 65))


# --------------------------------------------------------------------------- devices, dtypes


def test_rope_tables_after_meta_and_to_empty_are_correct() -> None:
    expected = Decoder(SCALED)
    with torch.device("meta"):
        model = Decoder(SCALED)
    assert model.rope_cos_SJ.is_meta
    model.to_empty(device="cpu")
    assert torch.equal(model.rope_cos_SJ, expected.rope_cos_SJ)
    assert torch.equal(model.rope_sin_SJ, expected.rope_sin_SJ)
    model.rope_cos_SJ.zero_()
    model.init_buffers("cpu")
    assert torch.equal(model.rope_cos_SJ, expected.rope_cos_SJ)


def test_rope_tables_are_not_saved() -> None:
    model = Decoder(SMALL)
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def test_bfloat16_keeps_float32_tables_and_is_near_float32() -> None:
    tokens = random_tokens(2, 64)
    expected = build_filled(SCALED)
    model = build_filled(SCALED).to(torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.rope_cos_SJ.dtype == torch.float32
    assert torch.equal(model.rope_cos_SJ, expected.rope_cos_SJ)
    logits = model(tokens, torch.zeros_like(tokens))
    assert logits.dtype == torch.bfloat16
    logits.float().square().mean().backward()
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())
    with torch.no_grad():
        reference = expected(tokens)
    assert (logits - reference).norm() / reference.norm() < 0.05


# --------------------------------------------------------------------------- sharding


def sharded_step(config: DecoderConfig) -> tuple[Tensor, dict[str, Tensor]]:
    with torch.device("meta"):
        model = Decoder(config)
    for block in blocks(model):
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device="cpu")
    values = dict(build_filled(config).named_parameters())
    for name, parameter in model.named_parameters():
        shards = values[name].detach().chunk(dist.get_world_size())
        parameter.data.to_local().copy_(shards[dist.get_rank()])  # type: ignore[attr-defined]
    tokens = random_tokens(2, 33)[dist.get_rank()].unsqueeze(0)
    logits = model(tokens[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    full = {name: grad.full_tensor() for name, grad in gradients(model).items()}  # type: ignore[attr-defined]
    return logits.detach(), full


@pytest.mark.parametrize("config", [SCALED, TIED], ids=["untied", "tied"])
def test_fully_sharded_equals_one_process(config: DecoderConfig) -> None:
    results = run_ranks(sharded_step, 2, config)
    model = build_filled(config)
    tokens = random_tokens(2, 33)
    logits = model(tokens[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    torch.testing.assert_close(torch.cat([r[0] for r in results]), logits.detach(), **TOLERANCE)
    for _, sharded in results:
        assert set(sharded) == {name for name, _ in model.named_parameters()}
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(sharded[name], gradient, **TOLERANCE)


# --------------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize(
    ("preset", "count"),
    [
        ("toy", None),
        ("30m", None),
        ("124m", None),
        ("350m", None),
        ("1b", 1_235_814_400),  # the published counts of Llama 3.2 and 3.1
        ("3b", 3_212_749_824),
        ("8b", 8_030_261_248),
        ("70b", 70_553_706_496),
        ("405b", 405_853_388_800),
    ],
)
def test_parameter_counts(preset: str, count: int | None) -> None:
    config = PRESETS[preset]
    with torch.device("meta"):
        model = Decoder(config)
    built = sum(p.numel() for p in model.parameters())
    assert num_params(config) == built
    assert count in (None, built)
    assert check(config) == []


def test_tied_embeddings_are_one_parameter_and_count_once() -> None:
    names = [name for name, _ in Decoder(TIED).named_parameters(remove_duplicate=False)]
    assert "lm_head.weight" not in names
    assert num_params(SMALL) - num_params(TIED) == SMALL.vocab_size * SMALL.dim
    assert num_matmul_params(SMALL) == num_matmul_params(TIED)


@pytest.mark.parametrize("config", [SMALL, TIED], ids=["untied", "tied"])
def test_flops_equal_the_flop_counter(config: DecoderConfig) -> None:
    model = build_filled(config)
    tokens = random_tokens(3, 32)
    # The counter does not support flash attention on CPU; the math kernel consists of matmuls.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens).sum().backward()
    assert counter.get_total_flops() == flops_per_token(config, 32) * tokens.numel()


def test_flops_of_8b_at_8192() -> None:
    # 6 * (8.03e9 - 0.53e9 embedding - norms) + 12 * 32 * 4096 * 8192
    assert flops_per_token(PRESETS["8b"], 8192) == 6 * 7_504_658_432 + 12_884_901_888


# --------------------------------------------------------------------------- tables


def test_init_covers_every_parameter_exactly_once() -> None:
    used = set()
    variants = ({"mtp_layers": 1}, {"score_head": True})
    for config in (SMALL, TIED, RICH, *(SMALL.model_copy(update=each) for each in variants)):
        for name in Decoder(config).state_dict():
            matching = [pattern for pattern in INIT if fnmatchcase(name, pattern)]
            assert len(matching) == 1, f"{name}: {matching}"
            used.update(matching)
    assert used == set(INIT)


@pytest.mark.parametrize(
    ("name", "kind", "std"),
    [
        ("norm.weight", "ones", 0.0),
        ("layers.1.input_layernorm.weight", "ones", 0.0),
        ("layers.1.post_attention_layernorm.weight", "ones", 0.0),
        ("embed_tokens.weight", "truncated_normal", 0.02),
        ("lm_head.weight", "truncated_normal", 0.02),
        ("layers.0.self_attn.k_proj.weight", "truncated_normal", 0.02),
        ("layers.1.self_attn.o_proj.weight", "truncated_normal", 0.01),
        ("layers.1.mlp.down_proj.weight", "truncated_normal", 0.01),
        ("layers.1.mlp.up_proj.weight", "truncated_normal", 0.02),
    ],
)
def test_init_of_a_parameter_follows_its_name(name: str, kind: str, std: float) -> None:
    init = get_init(name, SMALL)  # two layers: residual outputs are divided by 2
    assert (init.kind, init.std) == (kind, std)


def test_init_of_an_unknown_parameter_is_an_error() -> None:
    with pytest.raises(KeyError, match=r"layers\.0\.router"):
        get_init("layers.0.router.weight", SMALL)


def test_only_vectors_and_embeddings_have_no_weight_decay() -> None:
    parameters = dict(Decoder(RICH).named_parameters())
    for pattern in NO_DECAY:
        assert any(fnmatchcase(name, pattern) for name in parameters)
    remaining = {name for name in parameters if not has_weight_decay(name)}
    vectors = {name for name, parameter in parameters.items() if parameter.ndim == 1}
    assert remaining == vectors | {"embed_tokens.weight"}


def test_blocks_are_the_layers_in_order() -> None:
    config = SMALL.model_copy(update={"num_layers": 12})  # "10" sorts before "2"
    model = Decoder(config)
    result = blocks(model)
    assert all(isinstance(block, DecoderBlock) for block in result)
    assert result == [model.get_submodule(f"layers.{i}") for i in range(12)]


# --------------------------------------------------------------------------- model section


def messages_by_key(errors: list[ConfigError]) -> dict[str, str]:
    assert len({error.key for error in errors}) == len(errors)
    return {error.key: str(error) for error in errors}


def test_resolve_model_overrides_change_the_preset() -> None:
    config, errors = resolve_model("llama", "toy", {"num_layers": 6, "rope_theta": 500000})
    assert errors == []
    expected = PRESETS["toy"].model_copy(update={"num_layers": 6, "rope_theta": 500000.0})
    assert config == expected


def test_every_bad_override_is_reported_at_once() -> None:
    overrides = {
        "num_layer": 6,
        "dim": "256",
        "ffn_dim": 0,
        "norm_eps": float("inf"),
        "tied_embeddings": 1,
        "num_heads": 8,
        "num_kv_heads": 3,
        "rope_scaling": "llama3",
        "rope_high_freq_factor": 0.5,
        "vocab_size": 100.5,
    }
    config, errors = resolve_model("llama", "toy", overrides)
    assert config is None
    text = messages_by_key(errors)
    fine = {"model.num_heads", "model.rope_scaling"}
    assert set(text) == {f"model.{name}" for name in overrides} - fine
    assert text["model.num_layer"].endswith("is not a known key. Did you mean 'model.num_layers'?")
    assert text["model.dim"].startswith('model.dim="256" must be a whole number. ')
    assert "must be at least 1" in text["model.ffn_dim"]
    assert "must be a finite number" in text["model.norm_eps"]
    assert "must be true or false" in text["model.tied_embeddings"]
    assert text["model.num_kv_heads"] == (
        "model.num_kv_heads=3 does not divide model.num_heads=8. Use 1, 2, 4 or 8."
    )
    assert "is less than model.rope_low_freq_factor=1" in text["model.rope_high_freq_factor"]
    assert "whole number" in text["model.vocab_size"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            {"num_heads": 24},
            "model.num_heads=24 does not divide model.dim=256. "
            "Use 4, 8, 16, 32, 64 or 128, or make model.dim a multiple of 48, or set "
            "model.head_dim.",
        ),
        (
            {"num_heads": 256},
            "model.num_heads=256 makes head_dim=1 odd, and rotary positions rotate "
            "pairs. Use 4, 8, 16, 32, 64 or 128, or make model.dim a multiple of 512, or set "
            "model.head_dim.",
        ),
        (
            {"dim": 257},
            "model.num_heads=8 does not divide model.dim=257. Make model.dim a multiple of 16, or "
            "set model.head_dim.",
        ),
    ],
)
def test_impossible_head_counts_are_refused_with_valid_ones(
    overrides: dict[str, Any], expected: str
) -> None:
    shape = {"dim": 256, "num_heads": 8, "num_kv_heads": 4}
    _, errors = resolve_model("llama", "toy", shape | overrides)
    assert [str(error) for error in errors] == [expected]


def test_consequence_of_a_problem_is_not_reported() -> None:
    _, errors = resolve_model("llama", "8b", {"num_heads": 7})
    assert set(messages_by_key(errors)) == {"model.num_heads"}  # 8 key heads do not divide 7 either
    _, errors = resolve_model("llama", "8b", {"num_heads": "7", "num_kv_heads": 5})
    assert set(messages_by_key(errors)) == {"model.num_heads"}


def test_resolve_model_unknown_preset_does_not_hide_bad_fields() -> None:
    config, errors = resolve_model("llama", "toys", {"dimm": 1, "ffn_dim": 128})
    assert config is None
    assert "Did you mean 'toy'?" in messages_by_key(errors)["model.preset"]
    assert set(messages_by_key(errors)) == {"model.preset", "model.dimm"}


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("lama", "Did you mean 'llama'?"),
        ("no_such_module.x:FAMILY", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("json:FAMILY", "json has no 'FAMILY'"),
        ("json:loads", "is not a weft.models.Family"),
        ("models/mine.py:FAMILY", "is not a module name before the colon"),
        (":FAMILY", "is not a module name before the colon"),
    ],
)
def test_load_family_unknown_name_is_refused(kind: str, rule: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        load_family(kind)
    (error,) = caught.value.errors
    assert error.key == "model.kind"
    assert rule in str(error)
    assert resolve_model(kind, "toy", {}) == (None, [error])


@pytest.fixture
def own_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_load_family_of_the_user_is_built(own_dir: Path) -> None:
    (own_dir / "my_llama.py").write_text(
        "from dataclasses import replace\n"
        "from weft.models import FAMILIES\n"
        "from weft.models.families.llama import PRESETS\n"
        "small = PRESETS['toy'].model_copy(update={'num_layers': 1})\n"
        "FAMILY = replace(FAMILIES['llama'], presets={'small': small})\n"
    )
    family = load_family("my_llama:FAMILY")
    assert isinstance(family, Family)
    config, errors = resolve_model("my_llama:FAMILY", "small", {"ffn_dim": 64})
    assert errors == []
    assert isinstance(family.build(config), Decoder)
    with pytest.raises(InvalidConfig, match="Did you mean 'FAMILY'"):
        load_family("my_llama:FAMLY")


def test_resolve_model_wrong_preset_does_not_report_missing_fields(own_dir: Path) -> None:
    (own_dir / "my_required.py").write_text(
        "from dataclasses import replace\n"
        "from weft.config.keys import Section\n"
        "from weft.models import FAMILIES\n"
        "class Config(Section):\n"
        "    width: int\n"
        "    depth: int = 1\n"
        "presets = {'small': Config(width=2)}\n"
        "FAMILY = replace(FAMILIES['llama'], config=Config, presets=presets)\n"
    )
    _, errors = resolve_model("my_required:FAMILY", "smal", {"depth": "1"})
    assert set(messages_by_key(errors)) == {"model.preset", "model.depth"}


@pytest.mark.parametrize("line", ["import surely_not_installed", "1 / 0", "def broken(:"])
def test_load_family_error_of_the_user_is_reported(own_dir: Path, line: str) -> None:
    (own_dir / "my_broken.py").write_text(line + "\n")
    with pytest.raises(InvalidConfig, match=r"cannot be imported: (Module|ZeroDiv|Syntax)"):
        load_family("my_broken:FAMILY")


def test_builtin_families_are_complete() -> None:
    for family in FAMILIES.values():
        for preset in family.presets.values():
            assert isinstance(preset, family.config)
            assert family.check(preset) == []


def test_build_impossible_config_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.num_kv_heads=3"):
        FAMILIES["llama"].build(SMALL.model_copy(update={"num_kv_heads": 3}))
