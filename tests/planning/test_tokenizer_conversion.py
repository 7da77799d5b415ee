"""Models with only a SentencePiece or tiktoken file: converted, or refused with the remedy.

The tests of conversions need sentencepiece and tiktoken (the extra tokenizers).
"""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path

import pytest

from weft.cli.main import main
from weft.config.errors import InvalidConfig
from weft.data.tokenizer import load_tokenizer
from weft.planning import tokenizer_conversion
from weft.planning.model_config import locate_model

WORDS = [
    "the",
    "fox",
    "key",
    "river",
    "stone",
    "moon",
    "cloud",
    "it's",
    "12",
    "345",
    "Zürich",
    "你好",
    "hello",
]
CONFIG = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32},
    **{"num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 64},
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weft" / "converted"


def write_model(directory: Path, content: bytes, name: str = "tokenizer.model") -> Path:
    directory.mkdir(exist_ok=True)
    (directory / name).write_bytes(content)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def sentencepiece_model(directory: Path, kind: str = "bpe") -> bytes:
    """Train a model as those of Llama: its normalizer changes nothing."""
    trainer = pytest.importorskip("sentencepiece").SentencePieceTrainer
    rng = random.Random(0)
    text = directory / "text.txt"
    text.write_text("\n".join(" ".join(rng.choices(WORDS, k=12)) for _ in range(300)))
    trainer.train(
        **{"input": str(text), "model_prefix": str(directory / "m"), "model_type": kind},
        **{"vocab_size": 340, "byte_fallback": True, "hard_vocab_limit": False},
        **{"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
        minloglevel=2,
    )
    return (directory / "m.model").read_bytes()


def test_sentencepiece_model_is_converted_with_equal_ids(tmp_path: Path, cache: Path) -> None:
    content = sentencepiece_model(tmp_path)
    from sentencepiece import SentencePieceProcessor

    directory = write_model(tmp_path / "model", content)
    (directory / "model.safetensors").write_bytes(b"x" * 100)
    found = locate_model(str(directory))
    assert found.is_relative_to(cache)
    assert found.name == "model"
    assert (found / "model.safetensors").is_symlink()
    tokenizer, _ = load_tokenizer(found / "tokenizer.json")
    original = SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))
    for text in ("the fox", "  river\n\nstone 12", "你好 🙂", "\tZürich's"):
        assert tokenizer.encode(text, add_special_tokens=False).ids == original.encode(text)
    assert locate_model(str(directory)) == found
    assert not (directory / "tokenizer.json").exists()
    (directory / "tokenizer_config.json").write_text("{}")  # other files, another conversion
    assert not (directory / "tokenizer.json").exists()


def test_scores_that_are_not_in_the_order_of_ids_decide_the_merges(tmp_path: Path) -> None:
    """As in Mistral's tokenizers, where a double blank has the lowest score."""
    content = sentencepiece_model(tmp_path)
    from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(content)
    merged = [piece for piece in proto.pieces if piece.type == 1 and len(piece.piece) > 1]
    scores = [piece.score for piece in merged]
    for piece, score in zip(merged, reversed(scores), strict=True):
        piece.score = score
    directory = write_model(tmp_path / "model", proto.SerializeToString())
    changed = SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))
    before = SentencePieceProcessor(model_proto=content)
    assert changed.encode("the fox and the key") != before.encode("the fox and the key")
    tokenizer, _ = load_tokenizer(locate_model(str(directory)) / "tokenizer.json")
    for text in ("the fox and the key", "  it's the river\n 12"):
        assert tokenizer.encode(text, add_special_tokens=False).ids == changed.encode(text)


def test_ids_that_differ_from_the_original_are_refused(tmp_path: Path) -> None:
    """transformers reads the class LlamaTokenizer as BPE; this model is a unigram model."""
    directory = write_model(tmp_path / "model", sentencepiece_model(tmp_path, "unigram"))
    with pytest.raises(InvalidConfig, match=r"ids of transformers' LlamaTokenizer differ"):
        locate_model(str(directory))


def test_tiktoken_model_is_converted_with_equal_ids(tmp_path: Path) -> None:
    pytest.importorskip("tiktoken")
    pieces = [bytes([byte]) for byte in range(256)]
    for word in (b"th", b"the", b" th", b" the", b"fo", b"fox", b" fo", b" fox"):
        pieces.append(word)
    lines = b"".join(
        base64.b64encode(piece) + f" {rank}\n".encode() for rank, piece in enumerate(pieces)
    )
    directory = write_model(tmp_path / "model", lines)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    found = locate_model(str(directory))
    tokenizer, _ = load_tokenizer(found / "tokenizer.json")
    ids = tokenizer.encode("the fox the", add_special_tokens=False).ids
    assert ids == [pieces.index(piece) for piece in (b"the", b" fox", b" the")]


@pytest.mark.slow
def test_run_of_a_converted_model_has_its_tokenizer(tmp_path: Path) -> None:
    content = sentencepiece_model(tmp_path)
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = write_model(tmp_path / "model", content)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, vocab_size=340))
    model.save_pretrained(directory)
    assert main(["import", str(directory), str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "tokenizer.json").is_file()
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(tmp_path / "out")("the fox 12")["input_ids"]
    original = pytest.importorskip("sentencepiece").SentencePieceProcessor(model_proto=content)
    assert ids[-len(original.encode("the fox 12")) :] == original.encode("the fox 12")


@pytest.mark.parametrize(
    ("content", "kind", "package"),
    [
        (b"\x0a\x0e\x0a\x05<unk>", "SentencePiece", "sentencepiece"),
        (b"IQ== 0\n", "tiktoken", "tiktoken"),
    ],
)
def test_missing_packages_are_named_in_the_remedy(
    content: bytes, kind: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = {kind: {"no_such_package": package}}
    monkeypatch.setattr(tokenizer_conversion, "PACKAGES", packages)
    directory = write_model(tmp_path / "model", content)
    with pytest.raises(InvalidConfig) as refusal:
        locate_model(str(directory))
    [error] = refusal.value.errors
    assert error.key == "model.path"
    assert f"has tokenizer.model ({kind}), and no tokenizer.json" in error.rule
    assert error.remedy.startswith(f"run pip install {package}")


def test_tokenizer_that_is_a_program_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_conversion, "PACKAGES", {"tiktoken": {}})
    directory = write_model(tmp_path / "model", b"IQ== 0\n", "tiktoken.model")
    settings = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(InvalidConfig, match=r"tokenization_kimi\.py.*which weft does not run"):
        locate_model(str(directory))


def test_model_with_a_tokenizer_json_needs_no_conversion(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", b"anything")
    (directory / "tokenizer.json").write_text("{}")
    assert locate_model(str(directory)) == directory
