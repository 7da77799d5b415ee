"""Tables and rows that are trained beside adapters: PEFT's numbers, both ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conversion.test_peft_export import check, export, ignore, load_in_peft, logits, write_run
from tests.conversion.test_vocabulary_growth import CONSOLE, NEW, chat_file, write_model
from tests.parallel.lora.test_dora import check_gradients_with_peft
from weft.conversion.adapter_path import adopt_paths
from weft.conversion.export_proof import make_language_model
from weft.conversion.hf_import import import_model
from weft.conversion.model_import import import_source, open_source
from weft.inference.inference_model import find_checkpoint, load_unsharded
from weft.preparation.job_checks import prepare_job

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
    # Generation computes the logits of the last tokens only.
    model = make_language_model(load_unsharded(again, torch.device("cpu")), again)
    where_N = torch.arange(2), torch.tensor([19, 5])
    last_NV = model.logits(tokens_BT, *where_N, None)
    torch.testing.assert_close(last_NV, theirs[where_N], atol=1e-4, rtol=1e-4)
    exported = load_file(export(again, tmp_path / "third", True) / "adapter_model.safetensors")
    assert exported.keys() == tensors.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(exported[name], tensor, atol=1e-6, rtol=1e-6)


CHANGES = {
    "rows": {"trainable_token_indices": True},
    "saved": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "frozen": {},
}


@pytest.mark.parametrize(
    ("change", "tied"),
    [
        ("rows", False),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (("saved", False), ("frozen", False), ("rows", True))
        ),
    ],
)
def test_adapter_of_a_resized_model_is_trained_further(
    change: str, tied: bool, tmp_path: Path
) -> None:
    """PEFT saves the tables of such a model, also those that it does not train."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = write_model(tmp_path, tied)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_special_tokens({"additional_special_tokens": list(NEW)})
    base = AutoModelForCausalLM.from_pretrained(source)
    old = base.config.vocab_size
    base.resize_token_embeddings(len(tokenizer))
    keys: dict[str, Any] = dict(CHANGES[change])
    if change == "rows":
        tables = ["embed_tokens", *([] if tied else ["lm_head"])]
        keys["trainable_token_indices"] = {table: [old + 1, old] for table in tables}
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **keys)
    model = get_peft_model(base, config)
    torch.manual_seed(5)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(torch.randn(param.shape) * 0.05)
    model.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")

    plan = prepare_job(
        "lora",
        [
            ("lora.path", str(tmp_path / "adapter")),
            ("data.path", str(chat_file(tmp_path))),
            ("run.dir", str(tmp_path / "run")),
            ("run.nproc_per_node", "1"),
        ],
        adopt=adopt_paths,
    )[1]
    assert plan.model.vocab_size == len(tokenizer)
    plan = import_source(plan, open_source(plan), CONSOLE)
    assert plan.job.data.tokenizer == str(tmp_path / "run" / "tokenizer.json")
    import_model(source, tmp_path / "again", ignore, adapter=tmp_path / "adapter")
    ids = torch.tensor([tokenizer.encode(f"call 3{NEW[0]}x{NEW[1]}")])
    theirs = logits(model.eval(), ids)
    for run in ("run", "again"):
        checkpoint = find_checkpoint(tmp_path / run)
        assert checkpoint.job.lora.token_ids == ((old, old + 1) if change == "rows" else ())
        assert checkpoint.job.lora.modules_to_save == tuple(keys.get("modules_to_save", ()))
        ours = logits(load_unsharded(checkpoint, torch.device("cpu")), ids)
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        own = AutoTokenizer.from_pretrained(export(checkpoint, tmp_path / f"{run}-merged", False))
        assert own.get_vocab() == tokenizer.get_vocab()
