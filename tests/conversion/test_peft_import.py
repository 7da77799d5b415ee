"""Adapters of PEFT and of weft's exports are imported: functions, gradients, files, refusals."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.conversion.test_peft_export import export, ignore, load_in_peft, logits, write_run
from tests.harness import run_ranks
from tests.layouts import parse
from tests.models.family_draws import draw_config
from tests.models.test_families import EAGER, KINDS, save_tokenizer, transformers_model
from tests.small import losses, newest_state, small_job, train_rank
from weft.checkpoint.manifest import read_manifest
from weft.config.errors import ConfigErrors, InvalidConfig
from weft.config.files import write_json
from weft.config.schema import LoraSection
from weft.conversion.adapter_path import adopt_paths
from weft.conversion.hf_import import import_model
from weft.conversion.load_module import load_module
from weft.conversion.model_import import import_source, open_source
from weft.conversion.peft_config import read_peft_config
from weft.conversion.peft_import import Adapter, open_adapter
from weft.inference.inference_model import find_checkpoint
from weft.models import FAMILIES
from weft.models.hf_mapping import from_hf_config, get_hf_mapping, param_shapes, to_hf_config
from weft.monitor.terminal import quiet_console
from weft.planning.lora_plan import is_target
from weft.planning.model_config import resolve_section
from weft.preparation.job_checks import prepare_job

CPU = torch.device("cpu")


# --------------------------------------------------------------------------- files of a small model


PLAIN = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 4,
    "lora_alpha": 6,
    "bias": "none",
    "target_modules": "all-linear",  # no list of names: the tensors decide
    "lora_dropout": 0.1,
    "runtime_config": {"ephemeral_gpu_offload": False},
    "eva_config": None,
    "use_dora": False,
}
ROWS = {"q_proj": 32, "k_proj": 16, "v_proj": 16, "o_proj": 32, "down_proj": 32}
INPUTS = {"down_proj": 64}


def write_model(directory: Path, store: Path) -> Path:
    """Write a Hugging Face directory of a small llama."""
    config: Any
    config, _ = resolve_section(small_job(("model.tied_embeddings", "false")).model)
    family = FAMILIES["llama"]
    torch.manual_seed(7)
    weights = {
        get_hf_mapping(family).hf_name(name): torch.randn(shape) * 0.2
        for name, shape in param_shapes(family, config).items()
    }
    directory.mkdir()
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    write_json(directory / "config.json", to_hf_config(family, config, "float32"))
    shutil.copy(store / "tokenizer.json", directory)
    return directory


def adapter_tensors(
    layers: tuple[int, ...] = (0, 1), names: tuple[str, ...] = ("q_proj", "down_proj")
) -> dict[str, Tensor]:
    tensors = {}
    torch.manual_seed(3)
    for layer in layers:
        for name in names:
            parent = "mlp" if name == "down_proj" else "self_attn"
            path = f"base_model.model.model.layers.{layer}.{parent}.{name}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(4, INPUTS.get(name, 32)) * 0.3
            tensors[f"{path}.lora_B.weight"] = torch.randn(ROWS[name], 4) * 0.3
    return tensors


def write_adapter(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})
    return directory


def open_small(directory: Path, source: Path) -> tuple[Adapter | None, ConfigErrors]:
    family, errors = FAMILIES["llama"], ConfigErrors()
    config, _ = from_hf_config(family, json.loads((source / "config.json").read_text()))
    return open_adapter(directory, family.of(config), config, errors), errors


@pytest.fixture(scope="module")
def source(store_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "Tiny", store_path)


def prepare(source: Path, adapter: Path | str, run: Path, *more: tuple[str, str]) -> Any:
    (run.parent / "text.txt").write_text("one two three. " * 2000)
    overrides = [
        ("lora.path", str(adapter)),
        ("data.path", str(run.parent / "text.txt")),
        ("data.format", "text"),
        ("run.dir", str(run)),
        ("run.nproc_per_node", "1"),
        *more,
    ]
    return prepare_job("lora", overrides, adopt=adopt_paths)


def test_run_starts_with_the_adapter_and_exports_it_bit_equal(source: Path, tmp_path: Path) -> None:
    """``lora.path`` alone is enough: the adapter names its base model."""
    tensors = adapter_tensors((1,))  # layers_to_transform
    head = torch.randn(512, 32)
    saved = {"base_model.model.lm_head.weight": head}  # modules_to_save
    config = PLAIN | {"base_model_name_or_path": str(source), "modules_to_save": ["lm_head"]}
    config |= {"layers_to_transform": [1], "use_rslora": True}
    adapter = write_adapter(tmp_path / "adapter", config, tensors | saved)
    run = tmp_path / "run"
    _, plan = prepare(source, adapter, run)
    lora = plan.job.lora
    assert (lora.rank, lora.alpha, lora.rank_stabilized, lora.dora) == (4, 6.0, True, False)
    layers = ("layers.1.self_attn.q_proj", "layers.1.mlp.down_proj")
    assert [is_target(f"layers.{i}.{n}", lora) for i in (0, 1) for n in ("self_attn.q_proj",)] == [
        False,
        True,
    ]
    assert plan.job.model.path == str(source)
    console = io.StringIO()
    plan = import_source(plan, open_source(plan), quiet_console(console))
    text = " ".join(console.getvalue().split())
    assert "4 tensors of the adapter" in text
    assert "also replaces lm_head.weight (trained further)" in text
    checkpoint = find_checkpoint(run)
    assert read_manifest(checkpoint.path)["base"] == checkpoint.path.name
    state = newest_state(run)
    for layer in layers:
        for which in "AB":
            theirs = tensors[f"base_model.model.model.{layer}.lora_{which}.weight"]
            assert state[f"model.{layer}.lora_{which}.weight"].equal(theirs)
    assert state["model.lm_head.weight"].equal(head)
    # The run, the adapter alone, and the export compute and contain the same.
    out = export(checkpoint, tmp_path / "out", True)
    again = load_file(out / "adapter_model.safetensors")
    assert again.keys() == (tensors | saved).keys()
    assert all(again[name].equal(value) for name, value in (tensors | saved).items())
    written = json.loads((out / "adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"], written["use_rslora"]) == (4, 6.0, True)
    assert (written["modules_to_save"], written["base_model_name_or_path"]) == (
        ["lm_head"],
        str(source),
    )
    tokens_BT = torch.arange(20).view(1, 20) * 7 % 512
    expected = logits(load_module(str(run), None, CPU), tokens_BT)
    assert logits(load_module(str(adapter), None, CPU), tokens_BT).equal(expected)
    plain = logits(load_module(str(source), None, CPU), tokens_BT)
    assert (plain - expected).abs().max() > 0.1
    # A run that has started does not read the adapter again, and keeps its keys.
    shutil.rmtree(adapter)
    _, resumed = prepare(source, adapter, run, ("lora.dropout", "0.2"))
    assert (resumed.job.lora.rank, resumed.job.lora.dropout) == (4, 0.2)
    assert open_source(resumed) is None
    with pytest.raises(InvalidConfig, match=r'^lora\.path="" differs from the run') as caught:
        prepare(source, "", run, ("model.path", str(source)))
    assert len(caught.value.errors) == 1
    with pytest.raises(InvalidConfig, match=r"lora\.rank=8 cannot be set beside lora\.path"):
        prepare(source, adapter, run, ("lora.rank", "8"))


def test_adapter_for_a_model_that_is_already_imported_is_refused(
    source: Path, tmp_path: Path
) -> None:
    """The run would train other adapters, because it does not import anything again."""
    adapter = write_adapter(tmp_path / "adapter", PLAIN, adapter_tensors((0, 1)))
    _, plan = prepare(source, "", tmp_path / "run", ("model.path", str(source)))
    import_source(plan, open_source(plan), quiet_console(io.StringIO()))
    with pytest.raises(InvalidConfig, match=r"^lora\.path=.*differs from the run in") as caught:
        prepare(source, adapter, tmp_path / "run", ("model.path", str(source)))
    assert len(caught.value.errors) == 1


BAD_CONFIGS: dict[str, Any] = {
    "bias": "all",
    "lora_bias": True,
    "peft_type": "LOHA",
    "task_type": "SEQ_CLS",
    "init_lora_weights": "pissa",
    "alora_invocation_tokens": [1, 2],
    "layer_replication": [[0, 1], [0, 1]],
    "fan_in_fan_out": True,
    "use_bdlora": {"a": 1},
    "a_later_field": 1,
    "r": 0,
    "lora_alpha": "large",
    "use_rslora": "yes",
    "rank_pattern": {"(a+)+$": 8},
    "alpha_pattern": {"q_proj": -1},
    "target_parameters": "experts",
}


def test_every_unsupported_field_is_named(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(PLAIN | BAD_CONFIGS))
    errors = ConfigErrors()
    assert read_peft_config(tmp_path, errors) is None
    assert {error.key for error in errors} == {f"adapter_config.json {n}" for n in BAD_CONFIGS}
    (tmp_path / "adapter_config.json").write_text(json.dumps(PLAIN))
    assert read_peft_config(tmp_path, errors := ConfigErrors()) is not None
    assert not errors


def rename(tensors: dict[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    return {name.replace(old, new): value for name, value in tensors.items()}


Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
WRONG: dict[str, tuple[dict[str, Any], Callable[[dict[str, Tensor]], Any], str]] = {
    "rank": ({"r": 8}, lambda t: t, r"lora_A.*has shape \[4, 32\], not \[8, 32\]"),
    "ranks": (
        {"rank_pattern": {"down_proj": 2}},
        lambda t: {
            n: (v[:2] if "_A" in n else v[:, :2]) if "down" in n else v for n, v in t.items()
        },
        r"rank_pattern.*several ranks \(2, 4\)",
    ),
    "scales": ({"alpha_pattern": {"q_proj": 1}}, lambda t: t, "alpha_pattern.*several scales"),
    "layer": ({}, lambda t: rename(t, "layers.1", "layers.2"), "layers.2.*is not a layer"),
    "module": ({}, lambda t: rename(t, "self_attn.q_proj", "mlp.gate"), "is not a layer that"),
    "half": ({}, lambda t: {n: v for n, v in t.items() if "A" in n}, "has no tensor lora_B"),
    "columns": ({}, lambda t: t | {f"{Q0}.lora_A.weight": torch.ones(4, 16)}, r"not \[4, 32\]"),
    "dora": ({"use_dora": True}, lambda t: t, "has no tensor lora_magnitude"),
    "plain": (
        {},
        lambda t: t | {f"{Q0}.lora_magnitude_vector": torch.ones(32)},
        r"magnitudes \(DoRA\), but use_dora is false",
    ),
    "vocabulary": (
        {},
        lambda t: t | {"base_model.model.lm_head.weight": torch.ones(600, 32)},
        r"lm_head.weight has shape \[600, 32\]",
    ),
    "foreign": ({}, lambda t: t | {"base_model.model.score.weight": torch.ones(2, 2)}, "neither"),
    "dtype": ({}, lambda t: t | {f"{Q0}.lora_A.weight": torch.ones(4, 32).long()}, "is I64"),
    "none": ({}, lambda t: {}, "has no adapters"),
}


@pytest.mark.parametrize("case", WRONG)
def test_adapter_that_does_not_fit_is_refused(case: str, source: Path, tmp_path: Path) -> None:
    config, change, message = WRONG[case]
    directory = write_adapter(tmp_path / "adapter", PLAIN | config, change(adapter_tensors()))
    adapter, errors = open_small(directory, source)
    assert adapter is None
    assert re.search(message, "\n".join(map(str, errors))), errors


def test_damaged_adapter_is_refused_and_nothing_is_written(source: Path, tmp_path: Path) -> None:
    config = PLAIN | {"base_model_name_or_path": str(source)}
    directory = write_adapter(tmp_path / "adapter", config, adapter_tensors())
    file, run = directory / "adapter_model.safetensors", tmp_path / "run"
    content = file.read_bytes()
    for damaged in (content[:-1], content[:100], b"", b"\xff" * 16, content + b"x"):
        file.write_bytes(damaged)
        with pytest.raises(InvalidConfig, match=r"adapter_model\.safetensors"):
            prepare(source, directory, run)
        with pytest.raises(InvalidConfig, match=r"adapter_model\.safetensors"):
            import_model(source, run, ignore, adapter=directory)
    tensors = adapter_tensors()
    tensors[f"{Q0}.lora_B.weight"][0, 0] = math.nan
    save_file(tensors, file)
    with pytest.raises(InvalidConfig, match=r"lora\.path=.*cannot be imported.*NaN"):
        import_model(source, run, ignore, adapter=directory)
    file.unlink()
    (directory / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(InvalidConfig, match="pickle"):
        prepare(source, directory, run)
    (directory / "adapter_config.json").write_text('{"r": NaN}')
    with pytest.raises(InvalidConfig, match=r"adapter_config\.json"):
        prepare(source, directory, run)
    assert not run.exists()
    with pytest.raises(InvalidConfig, match=r"lora\.path=.*has no adapter_config\.json"):
        prepare(source, source, run)


def test_only_the_base_model_of_the_adapter_is_missing(source: Path, tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "adapter", PLAIN, adapter_tensors())
    with pytest.raises(InvalidConfig, match=r"model\.path.*names no base model"):
        prepare(source, directory, tmp_path / "run")
    _, plan = prepare(source, directory, tmp_path / "run", ("model.path", str(source)))
    assert {*plan.job.lora.targets} == {"q_proj", "down_proj"}


# --------------------------------------------------------------------------- weft's exports


def reimport(checkpoint: Any, adapter: Path, directory: Path) -> Path:
    """Import an exported adapter, export it again, and compare the files."""
    import_model(directory / "source", directory / "again", ignore, True, True, adapter)
    again = find_checkpoint(directory / "again")
    out = export(again, directory / "adapter2", True)
    ours, theirs = (load_file(path / "adapter_model.safetensors") for path in (out, adapter))
    assert ours.keys() == theirs.keys()
    has_lengths = checkpoint.job.lora.dora
    for name, value in theirs.items():
        if has_lengths and "magnitude" in name:  # W's lengths are subtracted and added
            torch.testing.assert_close(ours[name], value, rtol=1e-6, atol=1e-6)
        else:
            assert ours[name].equal(value), name
    configs = [json.loads((path / "adapter_config.json").read_text()) for path in (out, adapter)]
    configs[0]["base_model_name_or_path"] = configs[1]["base_model_name_or_path"]
    assert configs[0] == configs[1]
    before, after = (newest_state(path) for path in (checkpoint.run_dir, again.run_dir))
    for name, value in before.items():
        if ".lora_" in name and "magnitude" not in name:
            assert after[name].equal(value), name
    return again.run_dir


EXPERT_KINDS = [k for k in KINDS if next(iter(FAMILIES[k].presets.values())).num_experts]
SOME: dict[str, dict[str, Any]] = {
    "all": {"rank": 3, "alpha": 5.0},
    "some": {"rank": 2, "rank_stabilized": True, "targets": ["up_proj", "q_proj"]},
    "down": {"rank": 2, "alpha": 3.0, "targets": ["experts.down_proj", "k_proj"]},
    "dora": {"rank": 3, "dora": True},
    "outer": {"rank": 2, "targets": ["embed_tokens", "lm_head", "o_proj"]},
    "embedding": {"rank": 2, "targets": ["embed_tokens", "o_proj"], "dora": True},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "case"),
    [
        *((kind, "all") for kind in KINDS),
        *((kind, case) for kind in EXPERT_KINDS for case in ("some", "down")),
        *((kind, "some") for kind in ("phi3", "glm4")),
        *(("llama", case) for case in ("dora", "outer", "embedding")),
        *((kind, "dora") for kind in ("phi3", "glm4")),
    ],
)
def test_exported_adapter_imports_bit_equal(kind: str, case: str, tmp_path: Path) -> None:
    fields = {"tie_word_embeddings": False} if kind == "llama" else {}
    checkpoint = write_run(kind, tmp_path, SOME[case], **fields)
    adapter = export(checkpoint, tmp_path / "adapter", True)
    reimport(checkpoint, adapter, tmp_path)


@pytest.mark.slow
def test_exported_adapter_of_twelve_experts_imports_bit_equal(tmp_path: Path) -> None:
    """As texts, expert 10 precedes expert 2."""
    checkpoint = write_run("mixtral", tmp_path, SOME["all"], num_local_experts=12)
    adapter = export(checkpoint, tmp_path / "adapter", True)
    reimport(checkpoint, adapter, tmp_path)
    file = adapter / "adapter_model.safetensors"
    kept = {n: v for n, v in load_file(file).items() if ".experts.10." not in n}
    save_file(kept, file)
    errors = ConfigErrors()
    assert open_adapter(adapter, checkpoint.family, checkpoint.config, errors) is None
    assert "has 11 adapters for 12 experts" in str(errors[0])


@pytest.mark.slow
def test_exported_adapter_of_a_tied_embedding_imports_bit_equal(tmp_path: Path) -> None:
    lora = {"rank": 2, "targets": ["embed_tokens", "o_proj"]}
    checkpoint = write_run("llama", tmp_path, lora, tie_word_embeddings=True)
    reimport(checkpoint, export(checkpoint, tmp_path / "adapter", True), tmp_path)


# --------------------------------------------------------------------------- PEFT's adapters


def write_peft(
    kind: str, directory: Path, options: dict[str, Any], fields: dict[str, Any]
) -> tuple[Path, Path, Any]:
    """Write a model and an adapter of PEFT with random values; return both and PEFT's model."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    source, adapter = directory / "source", directory / "adapter"
    transformers_model(kind, draw_config(kind, 0) | fields).save_pretrained(source)
    save_tokenizer(source)
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **EAGER)
    model = get_peft_model(plain, LoraConfig(task_type="CAUSAL_LM", **options)).eval()
    torch.manual_seed(5)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.requires_grad and "magnitude" in name:
                param.mul_(1 + 0.3 * torch.rand_like(param))
            elif param.requires_grad:
                param.normal_(0, 0.4 * param.shape[-1] ** -0.5)
    model.save_pretrained(adapter)
    return source, adapter, model


def loss_of(model: Any, tokens_BT: Tensor) -> Tensor:
    out = model(tokens_BT)
    logits_BTV = out if isinstance(out, Tensor) else out.logits
    return F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten())


DENSE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
STACKED = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
PEFT_CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {"r": 3, "lora_alpha": 5, "target_modules": DENSE}, {}),
    ("qwen3", {"r": 2, "use_rslora": True, "target_modules": ["q_proj", "up_proj"]}, {}),
    ("gemma3", {"r": 2, "target_modules": r".*\.(q_proj|down_proj)"}, {}),
    ("llama", {"r": 2, "target_modules": ["v_proj"], "layers_to_transform": [1]}, {}),
    (
        "llama",
        {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"tie_word_embeddings": False},
    ),
    ("qwen2", {"r": 3, "target_modules": DENSE, "use_dora": True}, {}),
    ("phi3", {"r": 3, "target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]}, {}),
    ("phi3", {"r": 3, "target_modules": ["qkv_proj", "down_proj"], "use_dora": True}, {}),
    (
        "llama",
        {"r": 2, "target_modules": ["embed_tokens", "lm_head", "q_proj"]},
        {"tie_word_embeddings": False},
    ),
    (
        "llama",
        {"r": 2, "target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
        {"tie_word_embeddings": True},
    ),
    ("mixtral", {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj"], **STACKED}, {}),
    ("qwen3_moe", {"r": 2, "target_modules": ["q_proj"], **STACKED}, {}),
    ("gpt_oss", {"r": 2, "target_modules": ["q_proj"], **STACKED}, {}),
    ("llama4", {"r": 2, "target_modules": ["q_proj"], **STACKED}, {}),
    (
        "gpt_oss",
        {"r": 2, "target_modules": ["o_proj"], "target_parameters": ["experts.down_proj"]},
        {},
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options", "fields"), PEFT_CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(PEFT_CASES)]
)
def test_adapter_of_peft_has_equal_logits_and_gradients(
    kind: str, options: dict[str, Any], fields: dict[str, Any], tmp_path: Path
) -> None:
    if kind not in KINDS:
        pytest.skip(f"no family {kind}")
    source, adapter, theirs = write_peft(kind, tmp_path, options, fields)
    ours = load_module(str(adapter), None, CPU)
    vocab_size = json.loads((source / "config.json").read_text())["vocab_size"]
    tokens_BT = torch.arange(40).view(2, 20) * 7 % vocab_size
    expected = logits(theirs, tokens_BT)
    torch.testing.assert_close(
        logits(ours, tokens_BT), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item()
    )
    loss_of(theirs, tokens_BT).backward()
    loss_of(ours, tokens_BT).backward()
    grads = {n: p.grad for n, p in ours.named_parameters() if p.grad is not None and "lora_" in n}
    # PEFT's gradients, in a file with the names of the adapter, are read like the adapter.
    trained = {n: p for n, p in theirs.named_parameters() if p.requires_grad and "lora" in n}
    found: dict[str, Any] = {name: param.grad for name, param in trained.items()}
    if options.get("ensure_weight_tying"):  # parameters that share memory, each with a gradient
        for embedding, head in (("embedding_A", "lora_B"), ("embedding_B", "lora_A")):
            (ours_name,) = (name for name in found if embedding in name)
            (head_name,) = (name for name in found if f"lm_head.{head}" in name)
            found[ours_name] = found[ours_name] + found[head_name].T
            found[head_name] = found[ours_name].T
    with torch.no_grad():
        for name, param in trained.items():
            param.copy_(found[name])
    theirs.save_pretrained(tmp_path / "grads")
    family, errors = FAMILIES[kind], ConfigErrors()
    config: Any = ours.config
    read = open_adapter(tmp_path / "grads", family.of(config), config, errors)
    assert read is not None, errors
    expected_grads = {n: torch.cat([*w.read()]) for n, w in read.weights.items()}
    expected_grads |= {
        f"{n}.lora_magnitude.weight": torch.cat([*w.read()]) for n, w in read.lengths.items()
    }
    assert grads.keys() == expected_grads.keys()
    mapping = get_hf_mapping(family)
    groups = [*mapping.fused.values()]
    if "target_parameters" in options:
        groups += [("mlp.experts.gate_proj", "mlp.experts.up_proj")]
    for name, expected_grad in expected_grads.items():
        layer = name.partition(".lora_")[0].split(".", 2)[-1]
        parts = next((g for g in groups if layer in g), (layer,))
        grad = grads[name]
        if "lora_A" in name:  # one A in PEFT, a copy for each layer in weft
            grad = sum((grads[name.replace(layer, part)] for part in parts), torch.tensor(0.0))
        limit = expected_grad.abs().max()
        assert limit > 0, name
        assert (grad - expected_grad).abs().max() < 1e-4 * limit, name
    # The export of what was imported computes the same in PEFT.
    import_model(source, tmp_path / "run", ignore, True, True, adapter)
    checkpoint = find_checkpoint(tmp_path / "run")
    out = export(checkpoint, tmp_path / "out", True)
    torch.testing.assert_close(
        logits(load_in_peft(source, out), tokens_BT),
        expected,
        rtol=1e-5,
        atol=1e-5 * expected.abs().max().item(),
    )
    if len(groups) == 0:  # the file is the same, too
        first, second = (load_file(path / "adapter_model.safetensors") for path in (adapter, out))
        assert first.keys() == second.keys()
        for name, value in first.items():
            if "magnitude" in name:
                torch.testing.assert_close(second[name], value, rtol=1e-6, atol=1e-6)
            else:
                assert second[name].equal(value), name


@pytest.mark.parametrize("saved", ["embed_tokens", "lm_head"])
def test_a_saved_table_must_be_that_of_both_uses(saved: str, tmp_path: Path) -> None:
    """PEFT trains a copy of one use of a tied table, unless ``ensure_weight_tying`` is set."""
    options = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": [saved]}
    for is_tied, directory in ((False, tmp_path / "apart"), (True, tmp_path / "tied")):
        directory.mkdir()
        fields = {"tie_word_embeddings": True}
        given = options | {"ensure_weight_tying": is_tied}
        _, adapter, theirs = write_peft("llama", directory, given, fields)
        if is_tied:
            tokens_BT = torch.arange(16).view(2, 8)
            ours = load_module(str(adapter), None, CPU)(tokens_BT)
            torch.testing.assert_close(ours, logits(theirs, tokens_BT), rtol=1e-4, atol=1e-4)
        else:
            with pytest.raises(InvalidConfig, match="only one use of the table"):
                load_module(str(adapter), None, CPU)


# --------------------------------------------------------------------------- runs in layouts


LAYOUTS = ["dp_shard2 ep=2", "tp2", "pp2", "dp_shard2 tp2 ep=2"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_imported_adapters_train_equally_in_layouts(store_path: Path, tmp_path: Path) -> None:
    """Losses of two steps, and the adapters after them, are those of one process."""
    kind, fields = "qwen3_moe", draw_config("qwen3_moe", 0) | {"vocab_size": 512}
    fields |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    fields |= {"num_experts": 4, "num_experts_per_tok": 2}
    options = {"r": 2, "target_modules": ["q_proj", "o_proj"], **STACKED}
    source, adapter, _ = write_peft(kind, tmp_path, options, fields)
    shutil.copy(store_path / "tokenizer.json", source)
    import_model(source, tmp_path / "base", ignore, True, True, adapter)
    checkpoint = find_checkpoint(tmp_path / "base")
    results = []
    for layout in ["dp_shard1", *LAYOUTS]:
        run = tmp_path / layout.replace(" ", "-")
        shutil.copytree(tmp_path / "base", run)
        ranks, overrides = parse(layout)
        model = {f"model.{n}": json.dumps(x) for n, x in checkpoint.config.model_dump().items()}
        keys = {"model.kind": kind} | {name: text.strip('"') for name, text in model.items()}
        lora = checkpoint.job.lora
        keys |= {"lora.rank": "2", "lora.alpha": "8", "lora.targets": ",".join(lora.targets)}
        keys |= {"run.dir": str(run), "train.steps": "2", "optim.lr": "0.01"}
        keys |= {"optim.warmup_steps": "0", "monitor.log_interval": "1"} | dict(overrides)
        run_ranks(train_rank, ranks, list(keys.items()), str(store_path), timeout=200)
        results.append((losses(run), newest_state(run)))
    (expected_losses, expected), *others = results
    for found_losses, found in others:
        assert found_losses == pytest.approx(expected_losses, rel=1e-5)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if name.startswith("model.") and ".lora_" in name:
                assert (found[name] - value).norm() < 1e-2 * value.norm(), name


def test_targets_select_exactly_the_adapted_layers(source: Path, tmp_path: Path) -> None:
    for layers, names in (
        ((0, 1), ("q_proj",)),
        ((0,), ("q_proj", "down_proj")),
        ((0, 1), ("k_proj", "o_proj")),
    ):
        tensors = adapter_tensors(layers, names)
        adapter, errors = open_small(write_adapter(tmp_path / "a", PLAIN, tensors), source)
        assert adapter is not None, errors
        section = LoraSection.model_validate(adapter.section)
        chosen = {
            (i, name)
            for i in (0, 1)
            for name in DENSE
            for parent in ("mlp" if name[0] in "gud" else "self_attn",)
            if is_target(f"layers.{i}.{parent}.{name}", section)
        }
        assert chosen == {(layer, name) for layer in layers for name in names}
