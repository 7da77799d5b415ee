"""Models with a score head: transformers' classes, and their files in both directions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tests.chat import LLAMA, write_tokenizer
from tests.models.family_draws import draw_config
from tests.models.test_families import EAGER, KINDS, LENGTH, load_tensors, save_tokenizer
from weft.config.errors import InvalidConfig
from weft.config.reader import read_job
from weft.conversion.hf_convert import export_checkpoint
from weft.conversion.hf_import import import_model
from weft.inference.inference_model import find_checkpoint, load_local_model, load_unsharded
from weft.models import FAMILIES
from weft.models.hf_mapping import from_hf_config, get_hf_mapping

SCORED = [kind for kind in KINDS if get_hf_mapping(FAMILIES[kind]).score_architecture]


@pytest.mark.parametrize("kind", KINDS)
def test_score_class_exists_in_transformers_if_the_family_names_one(kind: str) -> None:
    import transformers

    mapping = get_hf_mapping(FAMILIES[kind])
    usual = mapping.architecture.replace("ForCausalLM", "ForSequenceClassification")
    assert hasattr(transformers, mapping.score_architecture or usual) == (kind in SCORED)


def build_scored(kind: str, directory: Path, **sizes: int) -> Any:
    """Save a model with a score head and large random weights, and a tokenizer."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    mapping = get_hf_mapping(FAMILIES[kind])
    fields = draw_config(kind, 1) | {"num_labels": 1, "pad_token_id": 1} | sizes
    config = AutoConfig.for_model(mapping.model_type, **fields)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config, **EAGER, dtype=torch.float32)
    assert type(model).__name__ == mapping.score_architecture
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.normal_(float("norm" in name and not mapping.constants.get("norm_offset")), 0.2)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return model.eval()


@pytest.mark.parametrize(
    "kind",
    [
        kind
        if kind in ("llama", "gemma2", "qwen3_moe")
        else pytest.param(kind, marks=pytest.mark.slow)
        for kind in SCORED
    ],
)
def test_score_head_of_transformers_is_imported_and_exported(kind: str, tmp_path: Path) -> None:
    """Scores equal, and the exported files have the same tensors and labels."""
    from transformers import AutoModelForSequenceClassification

    source, run, out = (tmp_path / name for name in ("source", "run", "out"))
    theirs = build_scored(kind, source)
    import_model(source, run, lambda progress: None, force=True)
    checkpoint = find_checkpoint(run)
    assert checkpoint.has_score_head
    job = read_job(str(run / "job.toml"))[0]
    assert (job.train.objective, job.data.format) == ("reward", "preferences")
    ours = load_unsharded(checkpoint, torch.device("cpu"))
    tokens = torch.randint(2, checkpoint.config.vocab_size, (2, LENGTH))
    expected = theirs(tokens).logits
    error = ((ours(tokens)[:, -1] - expected).abs().max() / expected.abs().max()).detach()
    assert expected.std() > 1e-3
    assert float(error) < 2e-5
    with pytest.raises(InvalidConfig, match="is a reward model"):
        load_local_model(checkpoint)

    export_checkpoint(run, out, "float32", "5GB", lambda progress: None)
    again = AutoModelForSequenceClassification.from_pretrained(out, **EAGER).eval()
    assert torch.equal(again(tokens).logits, expected)
    before, after = load_tensors(source), load_tensors(out)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    tree = json.loads((out / "config.json").read_text())
    assert tree["id2label"] == {"0": "LABEL_0"}
    assert not (out / "generation_config.json").exists()


@pytest.mark.parametrize(
    ("source_pad", "named", "expected"),
    [
        (1, "", "kept"),  # of config.json
        ("</s>", "[INST]", "[INST]"),  # of tokenizer_config.json, as the other ends an answer
        ("</s>", "</s>", "<|endoftext|>"),  # the first special token that ends none
    ],
)
def test_exported_padding_never_ends_an_answer(
    source_pad: int | str, named: str, expected: str, tmp_path: Path
) -> None:
    """transformers reads the score before trailing padding, and so not before an end token."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    source, run, out = (tmp_path / name for name in ("source", "run", "out"))
    theirs = build_scored("llama", source, vocab_size=288)
    write_tokenizer(source, LLAMA, **({"pad_token": named} if named else {}))
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tree = json.loads((source / "config.json").read_text())
    is_id = isinstance(source_pad, int)
    tree["pad_token_id"] = source_pad if is_id else tokenizer.token_to_id(source_pad)
    tree["eos_token_id"] = tokenizer.token_to_id("</s>")
    (source / "config.json").write_text(json.dumps(tree))
    message = import_model(source, run, lambda progress: None, force=True)
    assert ("is an end token: transformers reads the score" in message) == (not is_id)
    export_checkpoint(run, out, "float32", "5GB", lambda progress: None)
    written = json.loads((out / "config.json").read_text())["pad_token_id"]
    assert written == (source_pad if is_id else tokenizer.token_to_id(expected))
    # A word of the vocabulary does not become a special token, which would split texts.
    assert AutoTokenizer.from_pretrained(out).pad_token_id == (None if is_id else written)
    model = AutoModelForSequenceClassification.from_pretrained(out, **EAGER).eval()
    end = tokenizer.token_to_id("</s>")
    rows = [[3, 4, end], [5, 6, 7, 8, end]]
    padded = torch.tensor([row + [written] * (5 - len(row)) for row in rows])
    scores = model(padded).logits[:, 0]
    theirs.config.pad_token_id = None  # its last token counts
    alone = torch.cat([theirs(torch.tensor([row])).logits[0] for row in rows])
    torch.testing.assert_close(scores, alone)


def test_score_head_with_several_labels_is_refused(tmp_path: Path) -> None:
    tree = json.loads(json.dumps(LLAMA_SCORE))
    config, errors = from_hf_config(FAMILIES["llama"], tree)
    assert not errors
    assert config.score_head
    assert not config.tied_embeddings
    for labels in ({"id2label": {"0": "a", "1": "b"}}, {"id2label": None}, {"num_labels": 3}):
        fields = {k: v for k, v in tree.items() if k != "id2label"} | labels
        _, [error] = from_hf_config(FAMILIES["llama"], fields)
        assert error.key == "config.json id2label"
        assert error.rule == "must have one label"


LLAMA_SCORE = {
    "architectures": ["LlamaForSequenceClassification"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "id2label": {"0": "LABEL_0"},
}
