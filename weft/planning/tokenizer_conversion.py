"""Convert the SentencePiece or tiktoken file of a model to a ``tokenizer.json``.

Some models are published with only ``tokenizer.model``.  transformers' own converters make a fast
tokenizer of it, whose ids are compared with those of the original library.  The result is in the
user's cache, in a directory of links to the model's files, and an import copies it into the run.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers
from xxhash import xxh3_128

from weft.config.errors import ConfigError, ConfigErrors, InvalidConfig
from weft.config.files import user_cache_dir
from weft.config.remote_files import fetch_beside
from weft.config.schema import DataSection
from weft.config.storage import is_bucket_url

TOKENIZER_FILE = "tokenizer.json"
# Names of the files, in the order in which weft looks for them.
ORIGINALS = ("tokenizer.model", "spiece.model", "tiktoken.model", "*.tiktoken")
# Files of a model that a tokenizer needs, and its configuration.
SMALL_FILES = ("*.json", "*.jinja", "merges.txt", *ORIGINALS)
TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/=]+ \d+\r?\n")
PACKAGES = {
    "SentencePiece": {"transformers": "transformers", "sentencepiece": "sentencepiece",
                      "google.protobuf": "protobuf"},
    "tiktoken": {"transformers": "transformers", "tiktoken": "tiktoken"},
}  # fmt: skip
# Texts whose ids must be those of the original library.
SAMPLES = (
    *("The quick brown fox jumps over 13 lazy dogs.", "it's 3.14, isn't it?", " two  spaces "),
    *("def f(x):\n    return x ** 2\n", "tab\tand\r\nnew line", "Zürich, naïve, œuvre, ß"),
    *("你好,世界", "こんにちは", "Привет, мир", "🙂 👩‍👩‍👧", "a", ""),
)


def with_tokenizer(directory: Path, key: str, value: str) -> Path:
    """Return the model's directory, or one of links with a ``tokenizer.json``.

    Args:
        directory: of the model; returned as it is if it needs no conversion.
        key: names the model, for errors.
        value: of the key.

    Raises:
        InvalidConfig: packages are missing, or the tokenizer cannot be converted.
    """
    original = None if (directory / TOKENIZER_FILE).exists() else find_original(directory)
    if original is None or not (directory / "config.json").is_file():
        return directory
    kind = "tiktoken" if TIKTOKEN_LINE.match(original.read_bytes()[:256]) else "SentencePiece"
    rule = f"has {original.name} ({kind}), and no {TOKENIZER_FILE}"
    missing = [pip for name, pip in PACKAGES[kind].items() if not _is_installed(name)]
    if missing:
        remedy = f"run pip install {' '.join(missing)}, with which weft converts it"
        raise InvalidConfig([ConfigError(key, value, rule, remedy)])
    remedy = f"write a {TOKENIZER_FILE} into the directory"
    if code := _find_code(directory):
        rule += f"; its tokenizer is a program of the model ({code}), which weft does not run"
        raise InvalidConfig([ConfigError(key, value, rule, remedy)])
    target = user_cache_dir() / "converted" / _hash(directory) / directory.absolute().name
    if not target.exists():
        try:
            _convert(directory, original, kind, target)
        except Exception as error:  # transformers raises any
            reason = str(error).strip().partition("\n")[0]
            rule += f", and cannot be converted: {reason}"
            raise InvalidConfig([ConfigError(key, value, rule, remedy)]) from error
    return target


def find_original(directory: Path) -> Path | None:
    """Return the tokenizer's file of a model, other than ``tokenizer.json``."""
    found = (path for name in ORIGINALS for path in sorted(directory.glob(name)))
    return next((path for path in found if path.is_file()), None)


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package of a submodule
        return False


def _find_code(directory: Path) -> str:
    """Return the module of a tokenizer that is a program; empty if it is none."""
    try:
        settings = json.loads((directory / "tokenizer_config.json").read_text("utf-8"))
        code = settings.get("auto_map", {}).get("AutoTokenizer")
    except (OSError, ValueError, AttributeError):
        return ""
    names = code if isinstance(code, list) else [code]
    return next((str(name).partition(".")[0] + ".py" for name in names if name), "")


def _hash(directory: Path) -> str:
    """Return a hash of the directory and its small files."""
    hasher = xxh3_128(str(directory.absolute()).encode())
    for path in sorted(directory.iterdir()):
        hasher.update(path.name.encode())
        if path.suffix in (".json", ".model", ".tiktoken", ".jinja"):
            hasher.update(path.read_bytes())
    return hasher.hexdigest()


def _convert(directory: Path, original: Path, kind: str, target: Path) -> None:
    """Write the directory of links and the converted tokenizer, all or nothing.

    Raises:
        ValueError: its ids are not those of the original library.
    """
    from transformers import AutoTokenizer

    load: Any = AutoTokenizer.from_pretrained
    fast = load(directory, local_files_only=True, trust_remote_code=False)
    difference = ""
    for tokenizer in _list_conversions(fast.backend_tokenizer, original, kind):
        found = _find_difference(tokenizer, original, kind)
        difference = found and (difference or found)
        if not found:
            break
    else:
        raise ValueError(f"the ids of transformers' {type(fast).__name__} differ: {difference}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        made = Path(temporary) / "made"
        made.mkdir()
        for path in directory.absolute().iterdir():
            (made / path.name).symlink_to(path)
        tokenizer.save(str(made / TOKENIZER_FILE))
        try:
            made.rename(target)
        except OSError:  # another process was faster
            if not target.exists():
                raise
            shutil.rmtree(made)


def _list_conversions(tokenizer: Tokenizer, original: Path, kind: str) -> Iterator[Tokenizer]:
    """Yield the conversion of transformers, and what it may lack.

    SentencePiece puts a blank before every text, also before one that begins with a blank, and
    merges pieces by their scores, which are not always in the order of the ids.
    """
    yield tokenizer
    if kind != "SentencePiece":
        return
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    prefix = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Sequence(prefix), None
    yield tokenizer
    if isinstance(tokenizer.model, models.BPE):
        from sentencepiece import SentencePieceProcessor
        from transformers.tokenization_utils_base import generate_merges

        pieces: Any = SentencePieceProcessor(model_file=str(original))
        names = [pieces.id_to_piece(number) for number in range(pieces.get_piece_size())]
        scores = {name: pieces.get_score(number) for number, name in enumerate(names)}
        vocab = {name: number for number, name in enumerate(names)}
        unknown = pieces.id_to_piece(pieces.unk_id())
        tokenizer.model = models.BPE(
            *(vocab, generate_merges(vocab, scores)),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
        yield tokenizer


def _find_difference(tokenizer: Tokenizer, original: Path, kind: str) -> str:
    """Return the first text whose ids are not those of the original library, if any."""
    encode: Any
    if kind == "SentencePiece":
        from sentencepiece import SentencePieceProcessor

        encode = SentencePieceProcessor(model_file=str(original)).encode
    else:
        from tiktoken import Encoding
        from tiktoken.load import load_tiktoken_bpe
        from transformers.convert_slow_tokenizer import TikTokenConverter

        ranks = load_tiktoken_bpe(str(original))
        pattern = TikTokenConverter(str(original)).pattern
        encode = Encoding("", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}).encode
    for text in SAMPLES:
        expected = list(encode(text))
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if ids != expected:
            return f"{text!r} would be {ids[:8]}, and is {expected[:8]} in {kind}"
    return ""


def fetch_data_files(data: DataSection) -> DataSection:
    """Return a section whose tokenizer and chat template are files of this machine.

    Those of an object store are copied: see `weft.config.remote_files`.

    Raises:
        InvalidConfig: if one cannot be read.
    """
    errors, changes = ConfigErrors(), dict[str, str]()
    for name in ("tokenizer", "chat_template"):
        url = getattr(data, name)
        if is_bucket_url(url):
            with errors.collect():
                changes[name] = str(fetch_beside(url, SMALL_FILES, f"data.{name}"))
    errors.raise_any()
    return data.model_copy(update=changes)
