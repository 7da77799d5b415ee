"""Tables and rows that are trained beside adapters: PEFT's numbers, both ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.parallel.test_dora import check_gradients_with_peft
from tests.tools.test_peft_export import check, export, ignore, load_in_peft, logits, write_run
from weft.tools.hf_import import import_model
from weft.tools.inference_model import find_checkpoint, load_unsharded

IDS = [60, 3, 17]
ROWS = {"rank": 3, "alpha": 5.0, "targets": ["q_proj"], "trainable_tokens": IDS}


def saved(*tables: str) -> dict[str, Any]:
    return {"rank": 3, "alpha": 5.0, "targets": ["q_proj"], "modules_to_save": list(tables)}


@pytest.mark.parametrize(
    ("kind", "tied", "keys"),
    [
        ("llama", True, ROWS),
        ("llama", False, ROWS),
        ("llama", True, saved("embed_tokens")),
        ("llama", False, saved("embed_tokens", "lm_head")),
        pytest.param("llama", False, saved("lm_head"), marks=pytest.mark.slow),
        pytest.param("llama", False, ROWS | saved("lm_head"), marks=pytest.mark.slow),
        pytest.param("gemma3", True, ROWS, marks=pytest.mark.slow),  # scales its embedding
        pytest.param("qwen3_moe", False, ROWS, marks=pytest.mark.slow),
    ],
)
def test_trained_tables_and_rows_equal_those_of_peft(
    kind: str, tied: bool, keys: dict[str, Any], tmp_path: Path
) -> None:
    """Compare logits, also of the merged model, gradients, and the adapter after an import."""
    checkpoint = write_run(kind, tmp_path, keys, tie_word_embeddings=tied)
    check(checkpoint, tmp_path)
    if not tied:
        check_gradients_with_peft(checkpoint, tmp_path)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    if "trainable_tokens" in keys:
        config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
        names = [*config["trainable_token_indices"]]
        assert names == [
            n
            for n in ("embed_tokens", "lm_head")
            if n not in keys.get("modules_to_save", ()) and not (tied and n == "lm_head")
        ]
        assert all(ids == sorted(IDS) for ids in config["trainable_token_indices"].values())

    import_model(
        tmp_path / "source", tmp_path / "again", ignore, force=True, adapter=tmp_path / "adapter"
    )
    again = find_checkpoint(tmp_path / "again")
    assert again.job.lora.modules_to_save == tuple(keys.get("modules_to_save", ()))
    assert again.job.lora.token_ids == tuple(sorted(keys.get("trainable_tokens", ())))
    tokens_BT = torch.arange(40).view(2, 20) * 7 % checkpoint.config.vocab_size
    theirs = logits(load_in_peft(tmp_path / "source", tmp_path / "adapter"), tokens_BT)
    ours = logits(load_unsharded(again, torch.device("cpu")), tokens_BT)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    exported = load_file(export(again, tmp_path / "third", True) / "adapter_model.safetensors")
    assert exported.keys() == tensors.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(exported[name], tensor, atol=1e-6, rtol=1e-6)
