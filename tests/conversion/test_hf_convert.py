"""Import from and export to Hugging Face: equal bits and models, from and into any layout."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from tests.harness import RankError, run_ranks
from tests.layouts import parse
from tests.small import (
    Overrides,
    loader_of,
    losses,
    newest_state,
    plan_here,
    small_job,
    this_rank,
    train_rank,
)
from weft.checkpoint import weight_files as export
from weft.checkpoint.manifest import CheckpointError, list_checkpoints, read_manifest
from weft.checkpoint.shard_files import group_by_size
from weft.checkpoint.weight_files import (
    INDEX,
    Weight,
    publish_directory,
    write_weights_checkpoint,
)
from weft.cli.main import main
from weft.config.errors import WeftError
from weft.config.schema import replace
from weft.config.storage import open_directory
from weft.config.writer import to_toml
from weft.conversion.hf_convert import export_checkpoint
from weft.conversion.hf_import import import_model
from weft.data.dataset import open_dataset
from weft.data.prepared_cache import Progress
from weft.inference.generate import ChatFormat, Sampling, generate, load_chat_format, make_sequences
from weft.inference.inference_model import find_checkpoint, load_local_model, load_unsharded
from weft.models import FAMILIES
from weft.models.decoder_config import DecoderConfig
from weft.models.hf_fields import hf_name
from weft.models.hf_mapping import param_shapes, to_hf_config
from weft.planning.model_config import resolve_model
from weft.preparation.job_checks import check_text, prepare_job
from weft.training.setup import build

LLAMA = FAMILIES["llama"]
# Grouped heads and RoPE scaling; with a large learning rate attention is far from uniform.
MODEL: Overrides = [
    ("model.tied_embeddings", "false"),
    ("model.rope_scaling", "llama3"),
    ("model.rope_original_context", "16"),
    ("train.steps", "8"),
    ("optim.lr", "0.03"),
]
# `test_export_has_shards_index_and_dtype` covers checkpoints of tensor-parallel ranks.
LAYOUTS = ["model.tied_embeddings=true pp2"]
EXTRA = [
    "",
    "pp2",
    "model.tied_embeddings=true dp_shard2",
    "tp2",
    "dp_shard2",
    "tp4",
    "dp_shard2 tp2 pp2",
    "pp2 pipeline.schedule=Interleaved1F1B model.num_layers=4",
    "cp2",
]


def load_checkpoint(run: Path) -> tuple[nn.Module, ChatFormat]:
    """Load an unsharded model and its chat format."""
    checkpoint = find_checkpoint(run)
    return load_unsharded(checkpoint, torch.device("cpu")), load_chat_format(checkpoint)


def ignore_progress(progress: Progress) -> None:
    pass


def trained(layout: str, directory: Path, store: Path, model: Overrides = MODEL) -> Path:
    """Train and return a run directory, as `weft train` leaves it."""
    ranks, overrides = parse(layout)
    all_overrides = model + overrides + [("run.dir", str(directory))]
    run_ranks(train_rank, ranks, all_overrides, str(store), timeout=180)
    job = small_job(*all_overrides)
    (directory / "job.toml").write_text(to_toml(job, "demo", job))
    shutil.copy(store / "tokenizer.json", directory)
    return directory


@pytest.fixture(scope="module")
def run(store_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train on four ranks; tests must not change the run."""
    return trained("dp_shard2 tp2", tmp_path_factory.mktemp("run"), store_path)


@pytest.fixture
def own_run(run: Path, tmp_path: Path) -> Path:
    """Copy the run for a test that damages it."""
    return Path(shutil.copytree(run, tmp_path / "run"))


def weights_in(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in directory.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def of_model(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a checkpoint's weights by their Hugging Face names."""
    weights = {n.removeprefix("model."): t for n, t in state.items() if n.startswith("model.")}
    return {hf_name(name): tensor for name, tensor in weights.items()}


def assert_same_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert tensor.view(torch.uint8).equal(theirs[name].view(torch.uint8)), name


# --------------------------------------------------------------------------- export


@pytest.mark.parametrize(
    "layout", [*LAYOUTS, *(pytest.param(m, marks=pytest.mark.slow) for m in EXTRA)]
)
def test_export_loaded_by_transformers_computes_the_same(
    layout: str, store_path: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = trained(layout, tmp_path / "run", store_path)
    out = tmp_path / "out"
    export_checkpoint(run, out, "float32", "5GB", ignore_progress)
    assert_same_bits(of_model(newest_state(run)), weights_in(out))
    assert sorted(os.listdir(tmp_path)) == ["out", "run"]

    twin, loaded = AutoModelForCausalLM.from_pretrained(
        out, local_files_only=True, output_loading_info=True
    )
    assert not any(loaded.values()), loaded
    assert twin.dtype == torch.float32
    theirs = AutoTokenizer.from_pretrained(out, local_files_only=True)
    model, chat_format = load_checkpoint(run)
    tokenizer = chat_format.tokenizer

    prompt = "def parse(text):\n    return  [Ünï, 'x'] # don't\n"
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    start = theirs.bos_token_id  # precedes every document in training
    assert theirs(prompt)["input_ids"] == tokenizer.encode(prompt).ids == [start, *ids]
    assert theirs.decode(ids) == prompt

    tokens = torch.tensor([[start, *ids]])[:, :33]
    inputs, labels = tokens[:, :-1], tokens[:, 1:].flatten()
    logits, expected = model(inputs), twin(inputs).logits
    assert expected.std() > 0.3  # logits are not trivially equal
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-5)
    F.cross_entropy(logits.flatten(0, 1), labels).backward()
    F.cross_entropy(expected.flatten(0, 1), labels).backward()
    gradients = {hf_name(n): p.grad for n, p in model.named_parameters()}
    for name, param in twin.named_parameters():
        assert param.grad is not None
        scale = param.grad.abs().max()
        assert scale > 1e-6
        torch.testing.assert_close(
            gradients[name] / scale, param.grad / scale, atol=2e-5, rtol=1e-4
        )

    language_model = load_local_model(find_checkpoint(run), torch.device("cpu"))
    sampling = Sampling(max_tokens=20, temperature=0)
    rows = make_sequences(["def "], chat_format, sampling)
    output = "".join(piece for _, piece in generate(language_model, chat_format, rows, sampling))
    begun = torch.tensor([theirs("def ")["input_ids"]])
    written = twin.generate(
        begun, max_new_tokens=20, do_sample=False, attention_mask=torch.ones_like(begun)
    )
    assert len(output) > 10
    assert theirs.decode(written[0, 1:], skip_special_tokens=True).startswith("def " + output)


@pytest.mark.slow  # tests/models/test_families.py imports and exports every family
@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
def test_export_and_import_other_families_keep_every_bit(
    kind: str, store_path: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    own = [("model.kind", kind), ("model.head_dim", "12"), ("model.tied_embeddings", "false")]
    run = trained("tp2", tmp_path / "run", store_path, [*own, *MODEL[3:]])
    out, second_run = tmp_path / "out", tmp_path / "again"
    export_checkpoint(run, out, "float32", "5GB", ignore_progress)
    twin, loaded = AutoModelForCausalLM.from_pretrained(
        out, local_files_only=True, output_loading_info=True
    )
    assert not any(loaded.values()), loaded
    assert twin.config.model_type == kind
    import_model(out, second_run, ignore_progress)
    assert_same_bits(of_model(newest_state(run)), of_model(newest_state(second_run)))
    tokens = torch.arange(32).unsqueeze(0)
    for directory in (run, second_run):
        model, _ = load_checkpoint(directory)
        torch.testing.assert_close(model(tokens), twin(tokens).logits, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
def test_export_has_shards_index_and_dtype(dtype: torch.dtype, run: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    kind = str(dtype).removeprefix("torch.")
    out = tmp_path / "out"
    assert main(["export", str(run), str(out), "--dtype", kind, "--max-shard", "30KB"]) == 0
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2
    assert [file.name for file in files] == [
        f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)
    ]
    index = json.loads((out / INDEX).read_text())
    assert index["weight_map"] == {name: f.name for f in files for name in load_file(f)}
    for file in files:
        tensors = load_file(file)
        size = sum(t.nbytes for t in tensors.values())
        assert size <= 30_000 or len(tensors) == 1
    expected = {name: t.to(dtype) for name, t in of_model(newest_state(run)).items()}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in expected.values())
    assert_same_bits(expected, weights_in(out))
    twin = AutoModelForCausalLM.from_pretrained(out, local_files_only=True)
    assert twin.dtype == dtype
    assert_same_bits(expected, dict(twin.state_dict()))


def test_consecutive_splits_by_size() -> None:
    sizes = {"a": 3, "b": 3, "c": 9, "d": 1, "e": 5, "f": 1}
    assert group_by_size(sizes, 6) == [["a", "b"], ["c"], ["d", "e"], ["f"]]
    assert group_by_size(sizes, 100) == [list("abcdef")]
    assert group_by_size(sizes, 1) == [[name] for name in sizes]


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)


def test_export_damaged_checkpoint_is_refused(own_run: Path, tmp_path: Path) -> None:
    path = list_checkpoints(own_run / "checkpoints")[-1]
    shards = read_manifest(path)["tensors"]["model.layers.1.mlp.up_proj.weight"]["shards"]
    assert len(shards) == 4
    name = read_manifest(path)["files"][shards[2][2]]["name"]
    flip(path / name, shards[2][3] + 5)
    with pytest.raises(CheckpointError, match=f"{name} differs from what was written"):
        export_checkpoint(own_run, tmp_path / "out", "float32", "5GB", ignore_progress)
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name}: No such file"):
        export_checkpoint(own_run, tmp_path / "out", "float32", "5GB", ignore_progress)
    flip(path / "manifest.json", 40)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        export_checkpoint(own_run, tmp_path / "out", "float32", "5GB", ignore_progress)
    assert os.listdir(tmp_path) == ["run"]


def test_export_every_mistake_is_reported_at_once(
    own_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    arguments = [str(tmp_path / "none"), str(tmp_path / "out")]
    assert main(["export", *arguments, "--dtype", "bfloat", "--max-shard", "5 apples"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("=")[0].strip() for line in lines[1:]] == [
        "--max-shard",
        "--dtype",
        "checkpoint",
        "out",
    ]
    assert "Use one of bfloat16, float16, float32." in lines[2]
    capsys.readouterr()
    for size in ("0", "-1", "5PB", "1e3", "", "\u0663GB"):
        assert main(["export", str(own_run), str(tmp_path / "new"), f"--max-shard={size}"]) == 2
        assert "is not a size" in capsys.readouterr().err
    (own_run / "tokenizer.json").write_text("{}")
    assert main(["export", str(own_run), str(tmp_path / "new")]) == 2
    assert "is not a tokenizer.json" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["export", str(own_run), str(tmp_path / "file/out")]) == 2
    assert sorted(os.listdir(tmp_path)) == ["file", "out", "run"]
    assert os.listdir(tmp_path / "out") == []


def test_export_values_beyond_the_dtype_are_refused(tmp_path: Path, store_path: Path) -> None:
    run = fabricate_run(
        tmp_path / "run", store_path, lambda name, t: t * 1e6 if "up_proj" in name else t
    )
    with pytest.raises(WeftError, match=r"layers.0.mlp.up_proj.weight has values that float16"):
        export_checkpoint(run, tmp_path / "out", "float16", "5GB", ignore_progress)
    assert os.listdir(tmp_path) == ["run"]
    export_checkpoint(run, tmp_path / "out", "bfloat16", "5GB", ignore_progress)


# --------------------------------------------------------------------------- interruption


def die_half_way(run: str, out: str) -> None:
    def report(progress: Progress) -> None:
        if progress.done > progress.total / 2:
            os.kill(os.getpid(), signal.SIGKILL)

    if run.endswith("hf"):
        import_model(Path(run), Path(out), report)
    else:
        export_checkpoint(Path(run), Path(out), "float32", "50KB", report)


def test_export_and_import_killed_leave_nothing_of_that_name(run: Path, tmp_path: Path) -> None:
    """The target does not appear; the next attempt removes temporary files."""
    out = tmp_path / "out"
    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(die_half_way, 1, str(run), str(out))
    (remaining,) = os.listdir(tmp_path)
    assert remaining.startswith(".tmp-out-")
    assert len(list((tmp_path / remaining).glob("*.safetensors"))) > 1
    export_checkpoint(run, out, "float32", "5GB", ignore_progress)
    assert os.listdir(tmp_path) == ["out"]

    out.rename(tmp_path / "hf")
    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(die_half_way, 1, str(tmp_path / "hf"), str(tmp_path / "new"))
    assert len(os.listdir(tmp_path)) == 2
    import_model(tmp_path / "hf", tmp_path / "new", ignore_progress)
    assert sorted(os.listdir(tmp_path)) == ["hf", "new"]


def test_export_interrupted_leaves_nothing(run: Path, tmp_path: Path) -> None:
    def report(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_checkpoint(run, tmp_path / "deep/er/out", "float32", "5GB", report)
    assert os.listdir(tmp_path) == []


def test_publish_does_not_change_a_concurrent_writer(tmp_path: Path) -> None:
    with publish_directory(tmp_path / "out") as first:
        (first / "file").touch()
        with pytest.raises(ZeroDivisionError), publish_directory(tmp_path / "out"):
            raise ZeroDivisionError
        assert (first / "file").exists()
    assert os.listdir(tmp_path) == ["out"]
    with (
        pytest.raises(WeftError, match="could not be written"),
        publish_directory(tmp_path / "out"),
    ):
        pass
    assert os.listdir(tmp_path) == ["out"]


def export_with_little_room(run: str, out: str) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    with pytest.raises(WeftError, match=r"out: could not be written: .*File too large"):
        export_checkpoint(Path(run), Path(out), "float32", "5GB", ignore_progress)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_export_on_a_full_disk_leaves_nothing(run: Path, tmp_path: Path) -> None:
    run_ranks(export_with_little_room, 1, str(run), str(tmp_path / "out"))
    assert os.listdir(tmp_path) == []


# --------------------------------------------------------------------------- import, round trip


def hf_dir(
    directory: Path,
    config: DecoderConfig,
    dtype: torch.dtype,
    tokenizer: Path,
    max_shard: str = "5GB",
) -> Path:
    """Save a model as transformers does."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    twin = LlamaForCausalLM(LlamaConfig(**to_hf_config(LLAMA, config, "float32"), bos_token_id=0))
    for name, param in twin.named_parameters():
        torch.nn.init.normal_(param, float("norm" in name), 0.2)
    twin.to(dtype).save_pretrained(directory, max_shard_size=max_shard)
    shutil.copy(tokenizer, directory / "tokenizer.json")
    return directory


def small_config(**changes: Any) -> DecoderConfig:
    job = small_job(*MODEL)
    overrides = job.model.overrides() | {"vocab_size": 512} | changes
    config, errors = resolve_model("llama", job.model.preset, overrides)
    assert not errors
    assert isinstance(config, DecoderConfig)
    return config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [False, True])
def test_import_and_export_reproduce_every_byte(
    dtype: torch.dtype, tied: bool, store_path: Path, tmp_path: Path
) -> None:
    """The safetensors files are equal to the byte, including their headers."""
    tokenizer = store_path / "tokenizer.json"
    source = hf_dir(tmp_path / "hf", small_config(tied_embeddings=tied), dtype, tokenizer)
    (source / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert main(["import", str(source), str(tmp_path / "run")]) == 0
    state = of_model(newest_state(tmp_path / "run"))
    assert_same_bits({name: t.float() for name, t in weights_in(source).items()}, state)
    kind = str(dtype).removeprefix("torch.")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", kind]) == 0
    for name in (
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    ):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes(), name
    ours, theirs = (json.loads((tmp_path / f / "config.json").read_text()) for f in ("out", "hf"))
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert ours[name] == theirs[name]


@pytest.mark.parametrize("elements", [export.ROW_CHUNK_ELEMENTS, 500])
def test_export_and_import_reproduce_every_bit(
    elements: int, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of a tensor need not match its shards."""
    monkeypatch.setattr(export, "ROW_CHUNK_ELEMENTS", elements)
    export_checkpoint(run, tmp_path / "out", "float32", "30KB", ignore_progress)
    import_model(tmp_path / "out", tmp_path / "again", ignore_progress)
    assert_same_bits(of_model(newest_state(run)), of_model(newest_state(tmp_path / "again")))


def first_loss(directory: str, store: str) -> float:
    """Return transformers' loss on the first global batch."""
    from transformers import AutoModelForCausalLM

    job = small_job(*MODEL)
    plan = plan_here(job)
    loader = loader_of(job, plan, store, build(plan, this_rank()).mesh)
    twin = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    loss, count = 0.0, 0
    for batch in loader.get_microbatches(0):
        logits = twin(batch.tokens_BT).logits.flatten(0, 1)
        loss += F.cross_entropy(logits, batch.targets_BT.flatten(), reduction="sum").item()
        count += batch.targets_BT.numel()
    return loss / count


def test_train_from_an_import_continues_in_any_layout(store_path: Path, tmp_path: Path) -> None:
    source = hf_dir(
        tmp_path / "hf", small_config(), torch.float32, store_path / "tokenizer.json", "30KB"
    )
    (expected,) = run_ranks(first_loss, 1, str(source), str(store_path))
    results = {}
    for layout in ("", "tp2"):
        directory = tmp_path / layout.replace(" ", "")
        directory = directory if layout else tmp_path / "one"
        import_model(source, directory, ignore_progress)
        ranks, overrides = parse(layout)
        steps = [("train.steps", "3"), ("monitor.log_interval", "1"), ("run.dir", str(directory))]
        run_ranks(train_rank, ranks, MODEL + overrides + steps, str(store_path), timeout=180)
        results[layout] = losses(directory)
        state = newest_state(directory)
        assert state["optim.norm.weight.step"] == 3  # the optimizer starts from step 0 and is saved
        assert [path.name for path in list_checkpoints(directory / "checkpoints")] == [
            "step-00000000",
            "step-00000003",
        ]
    # The run resumes from the new checkpoint.
    extra = [("train.steps", "4"), ("run.dir", str(directory))]
    run_ranks(train_rank, 1, MODEL + extra, str(store_path))
    assert newest_state(directory)["optim.norm.weight.step"] == 4
    assert results[""][0] == pytest.approx(expected, rel=1e-5)
    assert results[""][2] < results[""][0] - 0.1
    for layout, values in results.items():
        assert values == pytest.approx(results[""], rel=2e-5), layout


def test_import_run_can_be_trained_and_generates(
    store_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An imported run can generate and train; keys that weights do not fix may change."""
    source = hf_dir(tmp_path / "hf", small_config(), torch.bfloat16, store_path / "tokenizer.json")
    run = tmp_path / "run"
    assert main(["import", str(source), str(run)]) == 0
    assert "converted from BF16 to float32" in capsys.readouterr().out
    assert main(["generate", str(run), "--max-tokens", "3"]) == 0
    job = str(run / "job.toml")
    train = [
        "train",
        job,
        "--dry-run",
        "--run.nproc_per_node",
        "2",
        "--train.global_batch_size",
        "8",
    ]
    common_arguments = [
        "--data.path",
        str(store_path),
        "--train.seed",
        "7",
        "--train.seq_len",
        "32",
    ]
    assert main([*train, *common_arguments]) == 0
    changes = [
        ("run.nproc_per_node", "2"),
        ("train.global_batch_size", "8"),
        ("data.path", str(store_path)),
    ]
    _, plan = prepare_job(job, changes)
    check_text(plan, open_dataset(store_path))  # a new text
    capsys.readouterr()
    # The other directory has no checkpoint; a start from random weights is not intended.
    assert main([*train, "--checkpoint.dir", str(tmp_path / "elsewhere")]) == 2
    assert "has no checkpoint of the run; they are in" in capsys.readouterr().err
    # A preset with some fields is equal to all fields spelled out.
    subset = small_job(*MODEL).model.overrides() | {"vocab_size": 512}
    table = "\n".join(f"{name} = {json.dumps(value)}" for name, value in subset.items())
    recipe = tmp_path / "mine.toml"
    tokenizer = f"[data]\ntokenizer = {json.dumps(str(run / 'tokenizer.json'))}"
    recipe.write_text(f'extends = "demo"\n{tokenizer}\n[model]\n{table}\n')
    another = ["train", str(recipe), "--run.dir", str(run), *train[2:], *common_arguments]
    assert main(another) == 0
    assert main([*another, "--model.rope_theta", "99"]) == 2
    assert "model.rope_theta=99.0 differs from the run in" in capsys.readouterr().err
    other = ["--data.tokenizer", "train", "--data.vocab_size", "512"]
    assert main([*train, "--model.rope_theta", "99", *other]) == 2
    (line,) = capsys.readouterr().err.splitlines()[1:]
    assert line.strip().startswith("model.rope_theta=")
    # After the first step the seed cannot change either.
    for steps, seed in (("1", "7"), ("2", "7")):
        overrides = [("train.steps", steps), ("train.seed", seed), ("run.dir", str(run))]
        run_ranks(train_rank, 1, MODEL + overrides, str(store_path))
    assert main([*train, *common_arguments[:2], "--train.seed", "8"]) == 2
    assert "train.seed=8 differs from the run in" in capsys.readouterr().err


@pytest.mark.slow
def test_train_command_continues_from_an_import(store_path: Path, tmp_path: Path) -> None:
    source = hf_dir(tmp_path / "hf", small_config(), torch.bfloat16, store_path / "tokenizer.json")
    weft = [sys.executable, "-m", "weft"]
    subprocess.run([*weft, "import", str(source), "run"], cwd=tmp_path, check=True)
    keys = ["--run.dir", "run", "--data.path", str(store_path), "--train.steps", "2"]
    keys += ["--run.nproc_per_node", "2", "--train.global_batch_size", "4", "--parallel.tp", "2"]
    command = [*weft, "train", "run/job.toml", *keys]
    completed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    assert "starting from" in completed.stdout
    assert "step-00000000" in completed.stdout
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])["step"] == 1
    names = [path.name for path in list_checkpoints(tmp_path / "run/checkpoints")]
    assert names == ["step-00000000", "step-00000002"]


def test_import_from_a_store_reproduces_every_bit(store_path: Path, tmp_path: Path) -> None:
    source = tiny_dir(tmp_path / "hf", store_path / "tokenizer.json")
    remote = open_directory("memory://models/tiny")
    for path in source.iterdir():
        (remote / path.name).write_bytes(path.read_bytes())
    import_model(remote, tmp_path / "run", ignore_progress)
    assert_same_bits(tiny_weights(), of_model(newest_state(tmp_path / "run")))


# --------------------------------------------------------------------------- hostile files

TINY = DecoderConfig(
    num_layers=1,
    dim=16,
    num_heads=2,
    num_kv_heads=1,
    ffn_dim=24,
    vocab_size=512,
    max_seq_len=32,
    rope_scaling="none",
)


def tiny_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {hf_name(name): torch.randn(shape) for name, shape in param_shapes(LLAMA, TINY).items()}


def tiny_dir(directory: Path, tokenizer: Path) -> Path:
    directory.mkdir()
    save_file(tiny_weights(), directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(to_hf_config(LLAMA, TINY, "float32")))
    shutil.copy(tokenizer, directory / "tokenizer.json")
    return directory


def with_table(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Return a function that changes the header of the safetensors file."""

    def corrupt(directory: Path) -> None:
        path = directory / "model.safetensors"
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        table = json.loads(content[8 : 8 + length])
        text = change(table)
        text = text if isinstance(text, str) else json.dumps(table)
        path.write_bytes(struct.pack("<Q", len(text)) + text.encode() + content[8 + length :])

    return corrupt


def with_weights(**changes: torch.Tensor | None) -> Callable[[Path], object]:
    def corrupt(directory: Path) -> None:
        weights = tiny_weights()
        for name, tensor in changes.items():
            weights.pop(name.replace("__", "."), None)
            if tensor is not None:
                weights[name.replace("__", ".")] = tensor
        save_file(weights, directory / "model.safetensors")

    return corrupt


def with_json(name: str, **changes: Any) -> Callable[[Path], object]:
    def corrupt(directory: Path) -> None:
        path = directory / name
        tree = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(tree | changes))

    return corrupt


def with_bytes(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_bytes(content)


def with_index(tokenizer_field: dict[str, Any] | str) -> Callable[[Path], object]:
    """Return a function that adds an index: all tensors in one file, except the given ones."""

    def corrupt(directory: Path) -> None:
        (directory / "model.safetensors").rename(directory / "a.safetensors")
        names = dict.fromkeys(tiny_weights(), "a.safetensors")
        table: Any = (
            names | tokenizer_field if isinstance(tokenizer_field, dict) else tokenizer_field
        )
        (directory / INDEX).write_text(json.dumps({"weight_map": table}))

    return corrupt


def fifo(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    os.mkfifo(directory / "model.safetensors")


def truncated(directory: Path) -> None:
    os.truncate(directory / "model.safetensors", 5000)


def lengthened(directory: Path) -> None:
    with (directory / "model.safetensors").open("ab") as file:
        file.write(b"1234")


def export_twice(directory: Path) -> None:
    with_index({"lm_head.weight": "b.safetensors"})(directory)
    save_file({"lm_head.weight": torch.ones(512, 16)}, directory / "b.safetensors")


def only_a_pickle(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    torch.save(tiny_weights(), directory / "pytorch_model.bin")


def remove(name: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).unlink()


NORM, HEAD = "model.norm.weight", "lm_head.weight"
NORM_KEY = "model__norm__weight"
NAN = torch.tensor([float("nan")] * 16)


@pytest.mark.parametrize(
    ("corrupt", "expected"),
    [
        # The header of the file.
        (with_bytes("model.safetensors", b""), "too few for its header"),
        (with_bytes("model.safetensors", b"\xff" * 64), "too few for its header"),
        (with_bytes("model.safetensors", struct.pack("<Q", 8) + b"[1, 2  ]"), "not a JSON object"),
        (with_bytes("model.safetensors", struct.pack("<Q", 4) + b"\x80\x04\x95."), "is not JSON"),
        (with_table(lambda t: "{" + '"a":' * 10), "is not JSON"),
        (with_table(lambda t: "[" * 100_000), "is not JSON"),
        (with_table(lambda t: '{"a": 1, "a": 2}'), "an object repeats a name"),
        (with_table(lambda t: '{"a": NaN}'), "NaN is not a JSON number"),
        (with_table(lambda t: t.update({"a": 5})), "must have exactly dtype, shape and data"),
        (with_table(lambda t: t[NORM].update(dtype="F4")), "has an unknown dtype"),
        (with_table(lambda t: t[NORM].update(dtype=["F32"])), "has an unknown dtype"),
        (with_table(lambda t: t[NORM].update(shape=[-4, -4])), "an invalid shape"),
        (with_table(lambda t: t[NORM].update(shape=[True, 16])), "an invalid shape"),
        (with_table(lambda t: t[NORM].update(shape=[1.5])), "an invalid shape"),
        (with_table(lambda t: t[NORM].update(shape=[10**9, 10**9])), "needs 4,000,000,000,000"),
        (with_table(lambda t: t[NORM].update(data_offsets=[-64, 0])), "invalid data_offsets"),
        (with_table(lambda t: t[NORM].update(data_offsets=[64])), "invalid data_offsets"),
        (with_table(lambda t: t[NORM].update(data_offsets=[64, 0])), "needs 64 bytes and has -64"),
        (with_table(lambda t: t[NORM].update(data_offsets=[0, 64])), "overlaps the previous one"),
        (with_table(lambda t: t[NORM].update(data_offsets=[10**15, 10**15 + 64])), "follows a gap"),
        (with_table(lambda t: t.pop(NORM) and None), "its header says"),
        (with_table(lambda t: t.update(__metadata__=5)), "__metadata__ that is not an object"),
        (truncated, "has 5,000 bytes, but its header says"),
        (lengthened, "but its header says"),
        (fifo, "is not a regular file"),
        # The weights.
        (with_weights(**{NORM_KEY: None}), "model.norm.weight is in none of the files"),
        (
            with_weights(**{NORM_KEY: torch.ones(8)}),
            "has shape [8] in model.safetensors, not [16",
        ),
        (
            with_weights(**{NORM_KEY: torch.ones(16).double()}),
            "is F64, which is quantized or does not fit",
        ),
        (with_weights(**{NORM_KEY: torch.ones(16).to(torch.float8_e4m3fn)}), "is F8_E4M3, which"),
        (with_weights(**{NORM_KEY: NAN}), "norm.weight contains NaN or Inf"),
        (with_weights(bias=torch.ones(1)), "bias is not a weight of this Llama"),
        (with_weights(**{"\x1b[2J": torch.ones(1)}), "\\u001b[2J is not a weight"),
        # The index.
        (with_index({HEAD: "../a.safetensors"}), "is not the plain name"),
        (with_index({HEAD: "/etc/a.safetensors"}), "is not the plain name"),
        (with_index({HEAD: "a.safetensors/../../x.safetensors"}), "is not the plain name"),
        (with_index({HEAD: "..\\a.safetensors"}), "is not the plain name"),
        (with_index({HEAD: "pytorch_model.bin"}), "is not the plain name"),
        (with_index({HEAD: "a.safetensors\n"}), "is not the plain name"),
        (with_index({HEAD: None}), "must map every tensor to a file"),
        (with_index("all"), "must map every tensor to a file"),
        (with_index({HEAD: "b.safetensors"}), "b.safetensors does not exist"),
        (with_index({"more": "a.safetensors"}), "does not match the tensors in the files"),
        (export_twice, "has lm_head.weight, which is also in a.safetensors"),
        # Other formats, or no file.
        (only_a_pickle, "only the pickle pytorch_model.bin, which may run code"),
        (remove("model.safetensors"), "does not exist, nor does its index"),
        # The configuration; more in tests/models/test_hf_mapping.py.
        (remove("config.json"), "config.json does not exist"),
        (with_bytes("config.json", b"[" * 100_000), "config.json is not JSON"),
        (with_bytes("config.json", b"\xff\xfe"), "config.json is not JSON"),
        (
            with_json("config.json", auto_map={"AutoModel": "evil.Model"}),
            "weft never runs remote code",
        ),
        (with_json("config.json", num_hidden_layers=4000), "needs more tensors than"),
        (
            with_json("config.json", num_hidden_layers=2**31 - 1),
            "must be an integer from 1 to 10,000",
        ),
        (
            with_json("config.json", tie_word_embeddings=True),
            "lm_head.weight differs from model.embed_tokens.weight, but config.json ties them. Set "
            "tie_word_embeddings to false",
        ),
        (
            with_json("config.json", vocab_size=128),
            "has shape [512, 16] in model.safetensors, not [128",
        ),
        (with_json("config.json", vocab_size=600), "has 512 entries, but the model 600: more than"),
        # The tokenizer.
        (remove("tokenizer.json"), "save_pretrained(DIRECTORY) writes one"),
        (with_bytes("tokenizer.json", b"{}"), "is not a tokenizer.json"),
        (with_bytes("tokenizer.json", b"\x80\x04\x95"), "is not a tokenizer.json"),
        (
            with_json("tokenizer_config.json", auto_map={"AutoTokenizer": "evil.T"}),
            "nor exports",
        ),
        (
            with_bytes("generation_config.json", b"5"),
            "generation_config.json is not a JSON object",
        ),
        (
            lambda directory: (directory / "chat_template.jinja").mkdir(),
            "chat_template.jinja is not a file",
        ),
    ],
)
def test_import_hostile_directory_is_refused(
    corrupt: Callable[[Path], object],
    expected: str,
    store_path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory = tiny_dir(tmp_path / "hf", store_path / "tokenizer.json")
    corrupt(directory)
    before = sorted(os.listdir(directory))
    assert main(["import", str(directory), str(tmp_path / "new/run")]) == 2
    output = capsys.readouterr().err
    assert expected in output
    assert "Traceback" not in output
    assert "\x1b" not in output
    assert len(output) < 3000
    assert os.listdir(tmp_path) == ["hf"]
    assert sorted(os.listdir(directory)) == before


def test_import_undamaged_directory_is_accepted(store_path: Path, tmp_path: Path) -> None:
    directory = tiny_dir(tmp_path / "hf", store_path / "tokenizer.json")
    # Old checkpoints have buffers beside the weights; files in a hub cache are links.
    with_weights(model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))(directory)
    (directory / "model.safetensors").rename(tmp_path / "blob")
    (directory / "model.safetensors").symlink_to(tmp_path / "blob")
    import_model(directory, tmp_path / "run", ignore_progress)
    assert_same_bits(tiny_weights(), of_model(newest_state(tmp_path / "run")))


@pytest.mark.parametrize("has_head", [True, False])
def test_import_of_tied_files_follows_the_remedy(
    has_head: bool, store_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The head of a tied model may be in the files, as a copy, or not."""
    directory = tiny_dir(tmp_path / "hf", store_path / "tokenizer.json")
    embedding = tiny_weights()["model.embed_tokens.weight"]
    with_weights(lm_head__weight=embedding.clone() if has_head else None)(directory)
    if not has_head:
        assert main(["import", str(directory), str(tmp_path / "run")]) == 2
        message = capsys.readouterr().err
        assert "lm_head.weight is in none of the files. Set tie_word_embeddings to true" in message
    with_json("config.json", tie_word_embeddings=True)(directory)
    import_model(directory, tmp_path / "run", ignore_progress)
    weights = of_model(newest_state(tmp_path / "run"))
    torch.testing.assert_close(weights["model.embed_tokens.weight"], embedding, rtol=0, atol=0)
    assert "lm_head.weight" not in weights


def test_import_existing_directory_is_not_changed(store_path: Path, tmp_path: Path) -> None:
    directory = tiny_dir(tmp_path / "hf", store_path / "tokenizer.json")
    (tmp_path / "run").mkdir()
    for target in (tmp_path / "run", directory):
        assert main(["import", str(directory), str(target)]) == 2
    assert main(["import", str(tmp_path / "none"), str(tmp_path / "new")]) == 2
    assert os.listdir(tmp_path / "run") == []


# --------------------------------------------------------------------------- memory


def fabricate_run(
    directory: Path, store: Path, change: Callable[[str, torch.Tensor], torch.Tensor], **fields: Any
) -> Path:
    """Make a run directory with a checkpoint of random weights."""
    config = TINY.model_copy(update=fields)
    torch.manual_seed(0)

    def random_rows(name: str, shape: torch.Size) -> Iterator[torch.Tensor]:
        yield change(name, torch.randn(shape))

    weights = {
        name: Weight(shape, partial(random_rows, name, shape))
        for name, shape in param_shapes(LLAMA, config).items()
    }
    write_weights_checkpoint(
        directory / "checkpoints/step-00000001",
        weights,
        {"step": 1, "samples": 8},
        lambda completed: None,
    )
    job = replace(small_job(), model=config.model_dump(), run={"dir": str(directory)})
    (directory / "job.toml").write_text(to_toml(job, "demo", job))
    shutil.copy(store / "tokenizer.json", directory)
    return directory


def peak_growth(run: str, out: str, second_run: str) -> tuple[float, float]:
    """Return the growth of peak memory in MB: after the export, and after the import."""

    def peak() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000

    before = peak()
    export_checkpoint(Path(run), Path(out), "float32", "50MB", ignore_progress)
    between = peak()
    import_model(Path(out), Path(second_run), ignore_progress, force=True)
    return between - before, peak() - before


@pytest.mark.slow
def test_import_and_export_memory_does_not_grow_with_the_model(
    store_path: Path, tmp_path: Path
) -> None:
    """The model has 240 MB, of which one tensor has 200 MB."""
    sizes = {"vocab_size": 100_000, "dim": 512, "ffn_dim": 4096, "tied_embeddings": True}
    run = fabricate_run(tmp_path / "run", store_path, lambda name, t: t, **sizes)
    paths = [str(tmp_path / name) for name in ("run", "out", "again")]
    ((out, both),) = run_ranks(peak_growth, 1, *paths, timeout=100)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    print(f"peak memory grew by {out:.0f} MB in the export, {both:.0f} MB in both")
    assert out < 130
    assert both < 130
    assert_same_bits(of_model(newest_state(run)), weights_in(tmp_path / "out"))
