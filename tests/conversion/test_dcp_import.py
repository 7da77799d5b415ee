"""Import of directories that torch.distributed.checkpoint wrote on two ranks."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.functional import rms_norm, silu

from tests.harness import run_ranks
from tests.random_runs import random_run
from weft.checkpoint.distributed_checkpoint import DistributedCheckpoint
from weft.cli.main import main
from weft.config.reader import read_job
from weft.config.storage import CorruptData
from weft.conversion.dcp_import import rename
from weft.conversion.hf_convert import export_checkpoint
from weft.inference.inference_model import find_checkpoint, load_local_model

DIM, HEADS, KV_HEADS, LAYERS, FFN, VOCAB, THETA = 32, 4, 2, 2, 64, 300, 5000.0


def meta_weights() -> dict[str, torch.Tensor]:
    """Return random weights of a Llama with Meta's names."""
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    width = DIM // HEADS
    weights = {"tok_embeddings.weight": weight(VOCAB, DIM), "output.weight": weight(VOCAB, DIM)}
    weights["norm.weight"] = 1 + weight(1, DIM)[0]
    for i in range(LAYERS):
        shapes = {"attention.wq": (DIM, DIM), "attention.wk": (KV_HEADS * width, DIM)}
        shapes |= {"attention.wv": (KV_HEADS * width, DIM), "attention.wo": (DIM, DIM)}
        shapes |= {"feed_forward.w1": (FFN, DIM), "feed_forward.w2": (DIM, FFN)}
        shapes["feed_forward.w3"] = (FFN, DIM)
        weights |= {f"layers.{i}.{name}.weight": weight(*s) for name, s in shapes.items()}
        for name in ("attention_norm", "ffn_norm"):
            weights[f"layers.{i}.{name}.weight"] = 1 + weight(1, DIM)[0]
    return weights


def meta_logits(weights: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Compute Llama as Meta's code does: complex rotations of neighboring elements."""
    width, length = DIM // HEADS, len(tokens)
    frequencies = 1.0 / THETA ** (torch.arange(0, width, 2).float() / width)
    angles = torch.outer(torch.arange(length).float(), frequencies)
    rotation = torch.polar(torch.ones_like(angles), angles)[:, None, :]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.reshape(length, -1, width // 2, 2))
        return torch.view_as_real(pairs * rotation).flatten(2)

    mask = torch.full((length, length), float("-inf")).triu(1)
    h = weights["tok_embeddings.weight"][tokens]
    for i in range(LAYERS):
        w = {n.removeprefix(f"layers.{i}."): t for n, t in weights.items()}
        x = rms_norm(h, (DIM,), w["attention_norm.weight"], 1e-5)
        q, k, v = (
            (x @ w[f"attention.w{n}.weight"].T).view(length, -1, width) for n in ("q", "k", "v")
        )
        q, k = rotate(q), rotate(k)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / width**0.5 + mask
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(length, DIM)
        h = h + mixed @ w["attention.wo.weight"].T
        x = rms_norm(h, (DIM,), w["ffn_norm.weight"], 1e-5)
        gate = silu(x @ w["feed_forward.w1.weight"].T) * (x @ w["feed_forward.w3.weight"].T)
        h = h + gate @ w["feed_forward.w2.weight"].T
    return rms_norm(h, (DIM,), weights["norm.weight"], 1e-5) @ weights["output.weight"].T


def save_on_rank(directory: str, weights: dict[str, torch.Tensor]) -> None:
    """Save as TorchTitan does: sharded weights beside the state of training."""
    mesh = init_device_mesh("cpu", (2,))
    state: dict[str, Any] = {
        name: distribute_tensor(tensor, mesh, [Replicate() if "norm" in name else Shard(0)])
        for name, tensor in weights.items()
    }
    state |= {f"optimizer.state.{name}.exp_avg": torch.zeros(2) for name in weights}
    state |= {"train_state": {"step": 3}, "lr_scheduler": {"last_epoch": 3}}
    dcp.save(state, checkpoint_id=directory)


@pytest.fixture
def assets(tmp_path: Path, store_path: Path) -> Path:
    """Return a directory with config.json and tokenizer.json of the small Llama."""
    run = random_run(tmp_path / "random", store_path)
    export_checkpoint(run, tmp_path / "assets", "float32", "5GB", lambda progress: None)
    path = tmp_path / "assets" / "config.json"
    tree = json.loads(path.read_text())
    tree |= {"hidden_size": DIM, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    tree |= {"num_hidden_layers": LAYERS, "intermediate_size": FFN, "rope_theta": THETA}
    tree |= {"head_dim": DIM // HEADS, "tie_word_embeddings": False, "rms_norm_eps": 1e-5}
    tree.pop("rope_parameters", None)
    tree["rope_scaling"] = None
    path.write_text(json.dumps(tree))
    for file in (tmp_path / "assets").glob("*.safetensors"):
        file.unlink()
    return tmp_path / "assets"


def sized(weights: dict[str, torch.Tensor], assets: Path) -> dict[str, torch.Tensor]:
    """Return the weights with the vocabulary of the tokenizer."""
    size = json.loads((assets / "config.json").read_text())["vocab_size"]
    names = ("tok_embeddings.weight", "output.weight")
    repeats = -(-size // VOCAB)
    return weights | {n: weights[n].repeat(repeats, 1)[:size].clone() for n in names}


@pytest.mark.parametrize("prefix", ["", pytest.param("model.", marks=pytest.mark.slow)])
def test_import_of_torchtitan_checkpoint_computes_the_same_logits(
    tmp_path: Path, assets: Path, prefix: str
) -> None:
    weights = sized(meta_weights(), assets)
    saved = {prefix + name: tensor for name, tensor in weights.items()}
    run_ranks(save_on_rank, 2, str(tmp_path / "dcp"), saved)
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 2
    words = [
        "import",
        str(tmp_path / "dcp"),
        str(tmp_path / "new" / "run"),
        "--assets",
        str(assets),
    ]
    assert main(words) == 0
    model = load_local_model(find_checkpoint(tmp_path / "new" / "run"), torch.device("cpu"))
    tokens = torch.arange(5, 45) * 7 % VOCAB
    expected = meta_logits(weights, tokens)
    where = torch.zeros(len(tokens), dtype=torch.long), torch.arange(len(tokens))
    logits = model.logits(tokens[None], *where, None)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert not list(tmp_path.glob(".import-*"))
    assert read_job(str(tmp_path / "new" / "run"))[0].model.path == str(tmp_path / "dcp")


def test_import_without_assets_names_the_remedy(
    tmp_path: Path, assets: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dcp.save(
        {"tok_embeddings.weight": torch.zeros(4, 2)}, checkpoint_id=tmp_path / "dcp", no_dist=True
    )
    assert main(["import", str(tmp_path / "dcp"), str(tmp_path / "run")]) == 2
    assert "--assets DIRECTORY" in capsys.readouterr().err
    command = ["train", "chat", "--model.path", str(tmp_path / "dcp"), "--dry-run"]
    assert main(command) == 2
    text = capsys.readouterr().err
    assert "is a directory of torch.distributed.checkpoint. Import it once: weft import" in text


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["linear.weight"], "no weights of a language model that weft knows: it has linear.weight"),
        (["tok_embeddings.weight", "layers.0.moe.router.gate.weight"], "layers.0.moe.router.gate"),
    ],
)
def test_import_of_another_model_names_what_was_found(
    tmp_path: Path,
    assets: Path,
    capsys: pytest.CaptureFixture[str],
    names: list[str],
    reason: str,
) -> None:
    dcp.save(
        {name: torch.zeros(4, 2) for name in names}, checkpoint_id=tmp_path / "dcp", no_dist=True
    )
    words = ["import", str(tmp_path / "dcp"), str(tmp_path / "run"), "--assets", str(assets)]
    assert main(words) == 2
    shown = capsys.readouterr().err
    assert reason in shown
    assert "checkpoint.last_save_in_hf" in shown


def test_rename_hugging_face_names_are_kept_without_their_prefix(tmp_path: Path) -> None:
    names = ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"]
    state: dict[str, Any] = {f"app.{name}": torch.zeros(2) for name in names}
    dcp.save(state | {"app.optim.step": torch.zeros(1)}, checkpoint_id=tmp_path, no_dist=True)
    found = rename(DistributedCheckpoint(tmp_path), {"model_type": "qwen3"}, tmp_path)
    assert found == {f"app.{name}": name for name in names}


class Hostile:
    def __reduce__(self) -> Any:
        return print, ("executed",)


def test_metadata_that_names_code_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(CorruptData, match=r"builtins\.print"):
        DistributedCheckpoint(tmp_path)
    assert "executed" not in capsys.readouterr().out


def test_distributed_checkpoint_tensors_equal_what_was_saved(tmp_path: Path) -> None:
    weights = meta_weights()
    weights["norm.weight"] = weights["norm.weight"].to(torch.bfloat16)
    run_ranks(save_on_rank, 2, str(tmp_path), weights)
    checkpoint = DistributedCheckpoint(tmp_path)
    assert set(weights) < set(checkpoint)
    for name, tensor in weights.items():
        assert checkpoint[name].dtype == tensor.dtype
        assert torch.equal(checkpoint[name], tensor), name
    shard = max(tmp_path.glob("*.distcp"), key=lambda path: path.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(CorruptData, match="cannot be read"):
        [checkpoint[name] for name in weights]
