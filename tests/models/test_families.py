"""Every family equals transformers; its tables, published sizes and files."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.models.family_draws import DRAWS, draw_config
from tests.models.published import CONFIGS, COUNTS, ROUNDED
from tests.parallel.test_layouts import MODEL, check
from weft.checkpoint.manifest import CheckpointError, read_manifest
from weft.checkpoint.safetensors_reader import read_file_contents
from weft.checkpoint.weight_files import Weight
from weft.config.errors import InvalidConfig
from weft.config.schema import RunSection
from weft.conversion.hf_convert import export_checkpoint
from weft.conversion.hf_import import import_model
from weft.conversion.hf_weights import (
    decode_mxfp4,
    find_dropped_bias,
    list_hf_tensors,
    open_hf_weights,
    to_hf_weights,
)
from weft.inference.inference_model import find_checkpoint, load_unsharded
from weft.models import FAMILIES
from weft.models.decoder_costs import num_active_params, num_matmul_params
from weft.models.hf_fields import DEFAULTS
from weft.models.hf_mapping import (
    check_hf_config,
    detect_family,
    from_hf_config,
    get_hf_mapping,
    simplify,
    to_hf_config,
)
from weft.planning.model_config import resolve_model
from weft.planning.plan import Machine

KINDS = [kind for kind, family in FAMILIES.items() if family.hf_mapping]
SEEDS = range(1, 9)  # of the draws beyond the first
LENGTH = 24
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
NOISE = 3e-7  # largest entry of a gradient that is 0 but for rounding, as of a key's bias


def test_every_family_has_draws() -> None:
    assert sorted(DRAWS) == sorted(KINDS)


# --------------------------------------------------------------------------- transformers


def transformers_model(kind: str, fields: dict[str, Any]) -> Any:
    """Build transformers' model with large random weights, in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    mapping = get_hf_mapping(FAMILIES[kind])
    config = AutoConfig.for_model(mapping.model_type, **fields)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, **EAGER, dtype=torch.float32)
    mean = 0.0 if mapping.constants.get("norm_offset") else 1.0
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("norm.weight") or "layernorm" in name:
                tensor.normal_(mean, 0.2)
            elif "score_correction" in name or tensor.requires_grad:
                tensor.normal_(0, 0.2)
    return model.eval()


def save_tokenizer(directory: Path) -> None:
    tokenizer = Tokenizer(WordLevel({"<|endoftext|>": 0, "a": 1, "b": 2}, "a"))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(directory / "tokenizer.json"))


def load_tensors(directory: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for file in directory.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def to_weft(kind: str, config: Any, tensors: dict[str, Tensor], directory: Path) -> Any:
    """Convert tensors with Hugging Face's names to weft's names."""
    directory.mkdir()
    path = directory / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    weights = open_hf_weights(FAMILIES[kind], config, read_file_contents(path))
    return {name: torch.cat([*weight.read()]) for name, weight in weights.items()}


def gradient_files(model: Any, directory: Path) -> dict[str, Tensor]:
    """Return the gradients of transformers' model, with the names and layout of its files."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "score_correction" not in name:
                assert parameter.grad is not None, name
                parameter.copy_(parameter.grad)
    model.save_pretrained(directory)
    return load_tensors(directory)


def run_draw(kind: str, seed: int, tmp_path: Path) -> tuple[float, float]:
    """Import, compare and export one draw; return the largest differences."""
    from transformers import AutoConfig

    family = FAMILIES[kind]
    source, run, out = (tmp_path / name for name in ("source", "run", "out"))
    twin = transformers_model(kind, draw_config(kind, seed))
    twin.save_pretrained(source)
    save_tokenizer(source)
    import_model(source, run, lambda progress: None, force=True)
    checkpoint = find_checkpoint(run)
    model, config = load_unsharded(checkpoint, torch.device("cpu")), checkpoint.config

    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocab_size, (2, LENGTH + 1), generator=generator)
    inputs, labels = tokens[:, :-1], tokens[:, 1:].flatten()
    logits, expected = model(inputs), twin(inputs).logits
    logit_error = float((logits - expected).abs().max() / expected.abs().max())
    assert expected.std() > 1e-3
    F.cross_entropy(logits.flatten(0, 1), labels).backward()
    F.cross_entropy(expected.flatten(0, 1), labels).backward()

    export_checkpoint(run, out, "float32", "5GB", lambda progress: None)
    before, after = load_tensors(source), load_tensors(out)
    assert {n: t.shape for n, t in after.items()} == {n: t.shape for n, t in before.items()}
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name]), name

    theirs = to_weft(kind, config, gradient_files(twin, tmp_path / "grads"), tmp_path / "weft")
    gradient_error = 0.0
    for name, parameter in model.named_parameters():
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        scale = float(theirs[name].abs().max())
        if scale < NOISE:
            assert gradient.abs().max() < NOISE, name
            continue
        error = float((gradient - theirs[name]).abs().max()) / scale
        assert error <= 1e-4, f"gradient of {name} differs by {error} of {scale}"
        gradient_error = max(gradient_error, error)

    # The exported config.json means the same in transformers, and in weft.
    again = AutoConfig.from_pretrained(out)
    written = json.loads(again.to_json_string())
    for tree in (json.loads((out / "config.json").read_text()), written):
        tree["architectures"] = [get_hf_mapping(family).architecture]
        read, errors = from_hf_config(family, tree)
        assert not errors, [str(error) for error in errors]
        assert read == simplify(config)
    exported = type(twin).from_pretrained(out, **EAGER)
    with torch.no_grad():
        torch.testing.assert_close(exported(inputs).logits, expected, atol=1e-5, rtol=1e-5)
    assert logit_error <= 1e-5
    return logit_error, gradient_error


@pytest.mark.parametrize("kind", KINDS)
def test_family_equals_transformers(kind: str, tmp_path: Path) -> None:
    run_draw(kind, 0, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_missing_fields_have_the_defaults_of_transformers(kind: str) -> None:
    from transformers import AutoConfig

    family, mapping = FAMILIES[kind], get_hf_mapping(FAMILIES[kind])
    fields = {"num_hidden_layers": 70, "num_attention_heads": 128, "hidden_size": 8192}
    required = {name for name, entry in mapping.all_fields.items() if not entry.optional}
    required -= {*DEFAULTS, *mapping.defaults, *fields, "num_key_value_heads", "head_dim"}
    least = {"architectures": [mapping.architecture], "model_type": mapping.model_type}
    least |= fields | dict.fromkeys(required, 128)
    config, errors = from_hf_config(family, least)
    assert not errors, [str(error) for error in errors]
    created = AutoConfig.for_model(**{n: v for n, v in least.items() if n != "architectures"})
    result, errors = from_hf_config(family, json.loads(created.to_json_string()) | least)
    assert not errors, [str(error) for error in errors]
    assert result == config


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_family_equals_transformers_in_more_draws(kind: str, seed: int, tmp_path: Path) -> None:
    run_draw(kind, seed, tmp_path)


@pytest.mark.parametrize("is_tuned", [False, True])
@pytest.mark.parametrize("has_rope", [0, 1])
def test_temperature_without_effect_in_a_config_is_accepted(has_rope: int, is_tuned: bool) -> None:
    """Published files have values of a switch that is off, or of layers that the model lacks."""
    tree = draw_config("llama4", 0)
    layers = [has_rope] * tree["num_hidden_layers"]
    tree |= {"floor_scale": 7, "attn_scale": 0.2, "attn_temperature_tuning": is_tuned}
    tree |= {"no_rope_layers": layers, "architectures": ["Llama4ForCausalLM"]}
    config, errors = from_hf_config(FAMILIES["llama4"], tree | {"model_type": "llama4_text"})
    assert not errors, [str(error) for error in errors]
    expected = (7, 0.2) if is_tuned and not has_rope else (0, 0.1)
    assert (config.temperature_interval, config.temperature_scale) == expected


# --------------------------------------------------------------------------- files


def draw_files(kind: str, tmp_path: Path, **changes: Any) -> tuple[Path, Any]:
    """Save a draw as transformers does; return the directory and transformers' model."""
    model = transformers_model(kind, draw_config(kind, 0) | changes)
    model.save_pretrained(tmp_path / "source")
    save_tokenizer(tmp_path / "source")
    return tmp_path / "source", model


def rewrite(directory: Path, change: dict[str, Tensor | None], **fields: Any) -> None:
    """Add, replace or (None) remove tensors of a directory, and fields of its config.json."""
    path = directory / "model.safetensors"
    tensors = {n: t for n, t in (load_file(path) | change).items() if t is not None}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    tree = json.loads((directory / "config.json").read_text()) | fields
    (directory / "config.json").write_text(json.dumps(tree))


def import_errors(source: Path, run: Path) -> list[str]:
    with pytest.raises(InvalidConfig) as caught:
        import_model(source, run, lambda progress: None, force=True)
    return [str(error) for error in caught.value.errors]


def test_mxfp4_is_decoded() -> None:
    """A byte has two values of FP4, the first one in its low bits; 128 is a scale of 2."""
    blocks = torch.tensor([[[[0x21, 0xF7] + [0] * 14]]], dtype=torch.uint8)
    scales = torch.tensor([[[128]]], dtype=torch.uint8)
    decoded = decode_mxfp4(blocks, scales)
    assert decoded.shape == (1, 1, 32)
    assert decoded[0, 0, :5].tolist() == [1.0, 2.0, 12.0, -12.0, 0.0]


def test_import_of_mxfp4_experts_equals_that_of_their_values(tmp_path: Path) -> None:
    source, twin = draw_files("gpt_oss", tmp_path, hidden_size=32, intermediate_size=64)
    generator = torch.Generator().manual_seed(0)
    change: dict[str, Tensor | None] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = tensor.shape
            groups = (experts, outputs, inputs // 32)
            blocks = torch.randint(256, (*groups, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(122, 128, groups, generator=generator, dtype=torch.uint8)
            change |= {name: None, f"{name}_blocks": blocks, f"{name}_scales": scales}
            values = decode_mxfp4(blocks, scales).transpose(1, 2)
            twin.get_parameter(name).data.copy_(values)
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    rewrite(source, change, quantization_config=method)
    import_model(source, tmp_path / "run", lambda progress: None, force=True)
    model = load_unsharded(find_checkpoint(tmp_path / "run"), torch.device("cpu"))
    tokens = torch.arange(LENGTH).unsqueeze(0)
    expected = twin(tokens).logits
    atol = 1e-5 * float(expected.detach().abs().max())
    torch.testing.assert_close(model(tokens), expected, atol=atol, rtol=1e-5)

    name = next(name for name in change if name.endswith("_scales"))
    rewrite(source, {name: change[name].float()})  # type: ignore[union-attr]
    (error,) = import_errors(source, tmp_path / "again")
    assert "is F32, not U8" in error


def test_import_of_other_quantized_files_is_refused(tmp_path: Path) -> None:
    for kind, method in (("gpt_oss", "awq"), ("deepseek_v3", "gptq"), ("llama", "mxfp4")):
        tree = to_hf_config(FAMILIES[kind], FAMILIES[kind].presets["toy"], "float32")
        tree["quantization_config"] = {"quant_method": method}
        (error,) = from_hf_config(FAMILIES[kind], tree)[1]
        assert error.key == "config.json quantization_config"
        assert "dequantized" in error.remedy


def test_import_refuses_weights_of_another_layer(tmp_path: Path) -> None:
    source, _ = draw_files("glm4_moe", tmp_path, num_hidden_layers=2)
    rewrite(source, {"model.layers.3.other.weight": torch.ones(3)})
    (error,) = import_errors(source, tmp_path / "again")
    assert "model.layers.3.other.weight is not a weight of this GLM-4.5" in error


def test_export_refuses_a_load_balance_bias_that_the_model_lacks(tmp_path: Path) -> None:
    source, _ = draw_files("mixtral", tmp_path)
    import_model(source, tmp_path / "run", lambda progress: None, force=True)
    checkpoint = find_checkpoint(tmp_path / "run")
    weights = {
        name: Weight(tensor.shape, lambda tensor=tensor: iter([tensor]))
        for name, tensor in load_unsharded(checkpoint, torch.device("cpu")).state_dict().items()
    }
    family = checkpoint.family
    assert find_dropped_bias(family, checkpoint.config, weights) is None
    name = "layers.1.mlp.router.expert_bias"
    bias = torch.tensor([0.0, 0.1])
    weights[name] = Weight(bias.shape, lambda: iter([bias]))
    assert find_dropped_bias(family, checkpoint.config, weights) == name


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if get_hf_mapping(FAMILIES[kind]).expert_bias]
)
def test_export_in_bfloat16_has_the_dtypes_of_transformers(kind: str, tmp_path: Path) -> None:
    """Load-balance biases stay float32, and so do routers of ERNIE 4.5."""
    source, twin = draw_files(kind, tmp_path)
    import_model(source, tmp_path / "run", lambda progress: None, force=True)
    out = tmp_path / "out"
    message = export_checkpoint(tmp_path / "run", out, "bfloat16", "9KB", lambda progress: None)
    before, after = load_tensors(source), load_tensors(out)
    bias = [name for name in after if name.endswith("e_score_correction_bias")]
    assert bias
    assert all(torch.equal(after[name], before[name]) for name in bias)
    type(twin).from_pretrained(source, dtype=torch.bfloat16).save_pretrained(tmp_path / "theirs")
    theirs = load_tensors(tmp_path / "theirs")
    assert {n: t.dtype for n, t in after.items()} == {n: t.dtype for n, t in theirs.items()}
    index = json.loads((out / "model.safetensors.index.json").read_text())["metadata"]
    assert index["total_size"] == sum(tensor.nbytes for tensor in after.values())
    assert index["total_parameters"] == sum(tensor.numel() for tensor in after.values())
    assert f"{index['total_size']:,} bytes" in message


def test_export_of_damaged_experts_is_refused(tmp_path: Path) -> None:
    """Matrices are read alone, and verified together."""
    source, _ = draw_files("mixtral", tmp_path)
    import_model(source, tmp_path / "run", lambda progress: None, force=True)
    path = find_checkpoint(tmp_path / "run").path
    manifest = read_manifest(path)
    _, _, file, begin, *_ = manifest["tensors"]["model.layers.1.mlp.experts.up_proj.weight"][
        "shards"
    ][0]
    damaged = path / manifest["files"][file]["name"]
    content = bytearray(damaged.read_bytes())
    content[begin + 5] ^= 4
    damaged.write_bytes(content)
    with pytest.raises(CheckpointError, match="differs from what was written"):
        export_checkpoint(tmp_path / "run", tmp_path / "out", "float32", "5GB", lambda p: None)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "changes", "keys"),
    [
        ("llama", {"norm": "layer"}, ["norm"]),
        ("llama", {"num_experts": 4, "active_experts": 2}, ["num_experts"]),
        ("llama", {"qkv_bias": True}, ["out_bias"]),
        ("mistral", {"sliding_window": 8, "layer_pattern": "LG"}, ["layer_pattern"]),
        ("cohere2", {"rope_pattern": "R"}, ["rope_pattern"]),
        ("gemma2", {"embedding_scale": 2.0}, ["embedding_scale"]),
        ("glm4", {"rope_interleaved": False}, ["rope_interleaved"]),
        ("mixtral", {"balance_rate": 0.001}, []),
        ("llama", {"layer_pattern": "GL", "sliding_window": 9}, ["layer_pattern"]),
    ],
)
def test_configuration_that_transformers_lacks_is_refused(
    kind: str, changes: dict[str, Any], keys: list[str]
) -> None:
    family = FAMILIES[kind]
    config: Any = family.presets["toy"].model_copy(update=changes)
    found = [error.key.removeprefix("model.") for error in check_hf_config(family, config)]
    assert set(keys) <= set(found)
    assert bool(found) == bool(keys)


def test_files_have_every_tensor_of_the_model_once() -> None:
    for kind in KINDS:
        family = FAMILIES[kind]
        config: Any = family.presets["toy"]
        tensors = list_hf_tensors(family, config)
        with torch.device("meta"):
            state = family.build(config).state_dict()
        elements = sum(tensor.shape.numel() for tensor in tensors.values())
        used = {name for tensor in tensors.values() for name in tensor.names}
        assert elements == sum(state[name].numel() for name in used), kind
        left = state.keys() - used
        assert all(name.endswith("expert_bias") for name in left), kind
        assert bool(left) == bool(config.num_experts and not get_hf_mapping(family).expert_bias)


def test_export_reads_each_row_of_stacked_experts_once(tmp_path: Path) -> None:
    """An expert's matrices are read alone; all others are not."""
    family, reads = FAMILIES["qwen3_moe"], []
    config: Any = family.presets["toy"]

    def read(name: str, first: int = 0, stop: int | None = None) -> Any:
        reads.append((name, first, stop))
        yield torch.zeros((stop or 0) - first, 1)

    with torch.device("meta"):
        state = family.build(config).state_dict()
    weights = {
        name: Weight(tensor.shape, lambda *args, name=name: read(name, *args))
        for name, tensor in state.items()
    }
    converted = to_hf_weights(family, config, weights)
    [*converted["model.layers.1.mlp.experts.5.up_proj.weight"].read()]
    assert reads == [("layers.1.mlp.experts.up_proj.weight", 5, 6)]


# --------------------------------------------------------------------------- tables

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


def test_qk_norm_changes_the_logits() -> None:
    model = build_filled("qwen3", config_of("qwen3"))
    tokens = torch.arange(32).unsqueeze(0)
    with torch.no_grad():
        before: Tensor = model(tokens)
        model.get_parameter("layers.0.self_attn.k_norm.weight").mul_(0.1)
        assert (model(tokens) - before).abs().max() > 0.1


@pytest.mark.parametrize(("kind", "preset"), COUNTS)
def test_parameter_counts_of_presets_equal_the_published_weights(kind: str, preset: str) -> None:
    family, count = FAMILIES[kind], COUNTS[kind, preset]
    config: Any = family.presets[preset]
    assert family.num_params(config) == count
    assert family.unit_costs is not None
    assert sum(unit.params for unit in family.unit_costs(config, 4096)) == count


@pytest.mark.parametrize(("kind", "preset", "part", "published"), ROUNDED)
def test_parameter_counts_of_presets_round_to_the_published(
    kind: str, preset: str, part: str, published: str
) -> None:
    """Publishers round numbers, or cut them off."""
    config: Any = FAMILIES[kind].presets[preset]
    count = num_active_params(config) if part == "A" else FAMILIES[kind].num_params(config)
    if part == "E":
        count -= config.vocab_size * config.dim * (2 - config.tied_embeddings)
    number, unit = published[:-1], {"B": 1e9, "M": 1e6}[published[-1]]
    digits = len(number.partition(".")[2])
    scaled = count / unit * 10**digits
    assert float(number) * 10**digits in (pytest.approx(round(scaled)), pytest.approx(int(scaled)))


@pytest.mark.parametrize(("kind", "preset"), CONFIGS)
def test_published_config_equals_the_preset(kind: str, preset: str) -> None:
    """The recipes can continue from the published weights."""
    family = FAMILIES[kind]
    tree = {"architectures": [get_hf_mapping(family).architecture], **CONFIGS[kind, preset]}
    assert detect_family(tree, FAMILIES) == (kind, [])
    config, errors = from_hf_config(family, tree)
    assert not errors, [str(error) for error in errors]
    assert config == family.presets[preset]


@pytest.mark.parametrize("kind", KINDS)
def test_presets_are_those_of_transformers(kind: str) -> None:
    """Transformers builds a model with as many parameters from the config.json of a preset."""
    from transformers import AutoConfig, AutoModelForCausalLM

    family = FAMILIES[kind]
    for config in family.presets.values():
        if config.num_layers > 50:  # type: ignore[attr-defined]
            continue
        tree = to_hf_config(family, config, "float32")
        created = AutoConfig.for_model(tree.pop("model_type"), **tree)
        with torch.device("meta"):
            theirs = AutoModelForCausalLM.from_config(created)
        parameters = {n: p for n, p in theirs.named_parameters() if "score_correction" not in n}
        assert sum(p.numel() for p in parameters.values()) == family.num_params(config)


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "nemotron", "glm4"])
@pytest.mark.parametrize("tied", [False, True])
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


@pytest.mark.parametrize("kind", KINDS)
def test_tables_cover_every_parameter_exactly_once(kind: str) -> None:
    family = FAMILIES[kind]
    config: Any = family.presets["toy"]
    entries = family.choose_entries(config) if family.choose_entries else {}
    sharding = entries.get("sharding", family.sharding)
    with torch.device("meta"):
        model = family.build(config)
    for name, parameter in model.named_parameters():
        assert family.get_init(name, config), name
        module = name.rsplit(".", 1)[0]
        assert any(fnmatchcase(module, pattern) for pattern in sharding), name
        is_matrix = parameter.dim() > 1 and name.endswith(".weight")
        assert family.has_weight_decay(name) == (is_matrix and "embed" not in name), name


# --------------------------------------------------------------------------- layouts

LAYOUTS = ["tp2 sequence_parallel=false", "tp4"]


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("qwen3", layout) for layout in LAYOUTS]
    + [pytest.param("mistral", name, marks=pytest.mark.slow) for name in ("tp2", "dp_shard2 cp2")]
    + [
        pytest.param("qwen3", layout, marks=pytest.mark.slow)
        for layout in (
            *("dp_shard2", "tp2", "cp2", "pp2", "dp_shard2 tp2", "tp2 pp2"),
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
    from weft.planning.plan_text import plan_recipe

    overrides = [
        ("model.kind", "qwen3"),
        ("model.preset", "8b"),
        ("parallel.tp", "2"),
        ("train.seq_len", "4096"),
        ("train.global_batch_size", "4"),
    ]

    def local_machine(section: RunSection) -> Machine:
        return Machine("cpu", devices=2)

    recipe = "paper/llama3-8b"
    plan, machine = plan_recipe(recipe, overrides, [], "1x8xh100", local_machine)
    prediction = forecast(plan, machine, device_spec(plan, machine))
    assert plan.num_params == 8_190_735_360
    assert prediction.step_seconds
