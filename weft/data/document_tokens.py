"""Tokens that begin and end documents: found in a model's files, or recorded by weft.

*The end.*  Files beside ``tokenizer.json`` (or in the directory ``huggingface`` there, where an
imported run keeps them) name end tokens.  The first file of `SOURCES` that names one decides where
generation stops, as in transformers.  The separator of documents in training is one token: of the
files in the same order, the first that names a special token; of several, one of the well-known
names before others.  Where no file names one, a special token with a well-known name is taken.

*The start.*  Text that weft trains on has a separator before every document, so a model that weft
has trained from random weights is asked with a separator before the prompt.  `RECORD` in a run's
directory says so, and the exported tokenizer adds that token.  An imported model is asked with
what its own tokenizer adds, which is what transformers does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer, processors

from weft.config.errors import ConfigError, InvalidConfig

RECORD = "document_tokens.json"  # {"separator": ID, "starts_documents": BOOL}
IMPORTED = "huggingface"  # directory of an imported run: the files of its source
MOST_BYTES = 100_000_000  # of a file that names tokens
# Files that name end tokens, in the order in which they decide, and the field that does.
SOURCES = {
    "generation_config.json": "eos_token_id",
    "config.json": "eos_token_id",
    "tokenizer_config.json": "eos_token",
    "special_tokens_map.json": "eos_token",
}

END_OF_TEXT = "<|endoftext|>"
# Well-known names of the token between documents.
SEPARATORS = (
    END_OF_TEXT,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<|im_end|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "[EOS]",
    "[SEP]",
)


@dataclass(frozen=True)
class DocumentTokens:
    """Token ids: the separator of documents, and every one that ends a generated text."""

    separator: int
    ends: frozenset[int]
    starts_documents: bool | None  # is the separator put before a prompt?  None: not recorded
    note: str = ""  # what the files say differently, for people


class _Named(NamedTuple):
    file: str
    ids: list[int]


def find_document_tokens(
    tokenizer: Tokenizer, directories: Sequence[Path], shown: str
) -> DocumentTokens:
    """Return the tokens that end a document, by the files in ``directories``.

    Args:
        directories: the first that has a file of a name counts; empty: the tokenizer alone.
        shown: path of the tokenizer, for messages.

    Raises:
        InvalidConfig: a file names a token that does not exist, or nothing names one.
    """
    problems: list[ConfigError] = []
    record = _read_record(tokenizer, directories, problems)
    named = list(_read_sources(tokenizer, directories, problems))
    if problems:
        raise InvalidConfig(problems)
    special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    # transformers makes the token of these two files a special one.
    special |= {id for file, ids in named if SOURCES[file] == "eos_token" for id in ids}
    separators = [id for _, ids in named for id in _by_name(tokenizer, ids) if id in special]
    separators += _by_name(tokenizer, special & set(_ids(tokenizer, SEPARATORS)))
    if record is not None:
        separators.insert(0, record[0])
    if not separators:
        names = " or ".join(SOURCES)
        rule = "has no special token that ends a document"
        if named:
            rule += (
                f"; {named[0].file} names {_show(tokenizer, named[0].ids)}, which is not special"
            )
        remedy = (
            f'put "eos_token": "..." into a tokenizer_config.json beside it (read are {names}), '
            f"or add one of {' '.join(SEPARATORS)} to it as a special token"
        )
        raise InvalidConfig([ConfigError("data.tokenizer", shown, rule, remedy)])
    decided = set(named[0].ids) if named else set()
    others = [each for each in named[1:] if decided.isdisjoint(each.ids)]
    note = ""
    if others:
        told = ", ".join(f"{each.file} says {_show(tokenizer, each.ids)}" for each in others)
        note = f"a text ends with {_show(tokenizer, named[0].ids)} by {named[0].file}; {told}"
    ends = frozenset(decided | {separators[0]})
    return DocumentTokens(separators[0], ends, None if record is None else record[1], note)


def tokens_beside(tokenizer: Tokenizer, path: str | Path) -> DocumentTokens:
    """Return `find_document_tokens` for the files beside a ``tokenizer.json``."""
    beside = Path(path).expanduser().parent if isinstance(path, str) else path.parent
    directories = [beside, beside / IMPORTED] if str(path) else []
    return find_document_tokens(tokenizer, directories, str(path))


def record_of(separator: int, starts_documents: bool) -> str:
    """Return the text of a `RECORD`."""
    return json.dumps({"separator": separator, "starts_documents": starts_documents}) + "\n"


def add_start(tokenizer: Tokenizer, token: int) -> None:
    """Have a tokenizer put a token before every text, and add nothing else."""
    content = tokenizer.id_to_token(token)
    # By an alias: a name may have signs that mean something in a template.
    start: Any = {"id": "start", "ids": [token], "tokens": [content]}
    tokenizer.post_processor = processors.TemplateProcessing(
        single="start $A", pair="start $A $B", special_tokens=[start]
    )


def with_start(data: bytes, tokenizer: Tokenizer, token: int) -> bytes:
    """Return the bytes of a ``tokenizer.json`` whose tokenizer puts a token before every text."""
    if tokenizer.encode("a").ids == [token, *tokenizer.encode("a", add_special_tokens=False).ids]:
        return data
    add_start(tokenizer, token)
    tree = json.loads(data)
    tree["post_processor"] = json.loads(tokenizer.to_str())["post_processor"]
    return json.dumps(tree, indent=2, ensure_ascii=False).encode()


def first_token(tokenizer: Tokenizer, directory: Path) -> int | None:
    """Return the token that an imported model begins an empty text with, if its files say one.

    Raises:
        InvalidConfig: a file names a token that does not exist.
    """
    problems: list[ConfigError] = []
    named = list(_read_sources(tokenizer, [directory], problems, "bos"))
    if problems:
        raise InvalidConfig(problems)
    return named[0].ids[0] if named else None


# --------------------------------------------------------------------------- files


def _read_sources(
    tokenizer: Tokenizer,
    directories: Sequence[Path],
    problems: list[ConfigError],
    kind: str = "eos",
) -> Iterator[_Named]:
    for name, field in SOURCES.items():
        field = field.replace("eos", kind)
        tree = _read(name, directories, problems)
        value = tree.get(field)
        if value is None or value == "" or value == []:
            continue
        values = value if isinstance(value, list) and field == f"{kind}_token_id" else [value]
        ids = []
        for one in values:
            content = one.get("content") if isinstance(one, dict) else one
            id = None
            if field == f"{kind}_token_id":
                in_range = type(one) is int and 0 <= one < 1 << 31
                id = one if in_range and tokenizer.id_to_token(one) is not None else None
            elif isinstance(content, str):
                id = tokenizer.token_to_id(content)
            if id is None:
                rule = "is not a token of the tokenizer.json"
                remedy = "put the model's own files together: they are of two models"
                text = json.dumps(one)
                text = text if len(text) <= 60 else text[:60] + "..."
                problems.append(ConfigError(f"{name} {field}", text, rule, remedy))
            else:
                ids.append(id)
        if ids:
            yield _Named(name, list(dict.fromkeys(ids)))


def _read_record(
    tokenizer: Tokenizer, directories: Sequence[Path], problems: list[ConfigError]
) -> tuple[int, bool] | None:
    tree = _read(RECORD, directories, problems)
    if not tree:
        return None
    separator, starts = tree.get("separator"), tree.get("starts_documents")
    if (
        type(separator) is int
        and 0 <= separator < 1 << 31
        and tokenizer.id_to_token(separator) is not None
        and isinstance(starts, bool)
    ):
        return separator, starts
    rule, remedy = "is not what weft wrote", "remove it; the end token is then found by name"
    problems.append(ConfigError(RECORD, str(directories[0]), rule, remedy))
    return None


def _read(name: str, directories: Sequence[Path], problems: list[ConfigError]) -> dict[str, Any]:
    """Return the object in the first file of that name; empty if there is none."""
    for directory in directories:
        file = directory / name
        try:
            if not file.is_file():
                continue
            if file.stat().st_size > MOST_BYTES:
                raise ValueError(f"has more than {MOST_BYTES:,} bytes")
            tree = json.loads(file.read_bytes().decode("utf-8"))
            if not isinstance(tree, dict):
                raise ValueError("is no JSON object")
            return tree
        except (OSError, ValueError, RecursionError) as error:
            rule = f"cannot be read: {str(error)[:200]}"
            problems.append(ConfigError(name, str(file), rule, "fetch it again, or remove it"))
            return {}
    return {}


# --------------------------------------------------------------------------- names


def _by_name(tokenizer: Tokenizer, ids: Sequence[int] | set[int]) -> list[int]:
    """Sort token ids: well-known names first, in their order; the others as they were."""

    def rank(id: int) -> int:
        name = tokenizer.id_to_token(id)
        return SEPARATORS.index(name) if name in SEPARATORS else len(SEPARATORS)

    return sorted(ids, key=rank)


def _ids(tokenizer: Tokenizer, names: Sequence[str]) -> list[int]:
    return [id for id in map(tokenizer.token_to_id, names) if id is not None]


def _show(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return " and ".join(json.dumps(tokenizer.id_to_token(id), ensure_ascii=False) for id in ids)
