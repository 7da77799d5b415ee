"""Find the tokens that begin and end documents.

*End.*  Files beside ``tokenizer.json`` (or in its directory ``huggingface``, where an imported run
stores them) name end tokens.  The first file of `END_TOKEN_FIELDS` that names one decides where
generation stops, as in transformers.  The separator of documents in training is one token: the
first special token that the files name, in the same order; among several, a well-known name comes
first.  If no file names one, the separator is a special token with a well-known name.

*Start.*  In training, weft puts a separator before every document.  So a model that weft trained
from random weights gets a separator before the prompt: `RECORD_FILE` in the run directory says so,
and the exported tokenizer adds that token.  An imported model gets what its own tokenizer adds, as
in transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer, processors

from weft.config.errors import ConfigError, ConfigErrors, InvalidConfig
from weft.data.tokenizer import END_OF_TEXT

RECORD_FILE = "document_tokens.json"  # {"separator": ID, "starts_documents": BOOL}
IMPORTED_DIR = "huggingface"  # directory in an imported run: files of the source
MAX_BYTES = 100_000_000  # limit of a file that names tokens
# Files that name end tokens, in order of precedence, and the field.
END_TOKEN_FIELDS = {
    "generation_config.json": "eos_token_id",
    "config.json": "eos_token_id",
    "tokenizer_config.json": "eos_token",
    "special_tokens_map.json": "eos_token",
}

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


def find_separator(tokenizer: Tokenizer, path: str | Path) -> int:
    """Return the id of the separator, from the files beside a ``tokenizer.json``.

    Text that looks like a special token is not encoded to it, unless the ordinary vocabulary also
    has that text (possible with Unigram, not with byte-level BPE).

    Raises:
        InvalidConfig: no file names a separator, or a file names one that does not exist; the
            message contains ``path``.
    """
    return load_document_tokens(tokenizer, path).separator


@dataclass(frozen=True)
class DocumentTokens:
    """Token ids: the separator of documents, and all that end a generated text."""

    separator: int
    end_tokens: frozenset[int]
    starts_documents: bool | None  # separator before a prompt; None: not recorded
    note: str = ""  # contradictions between the files


class _NamedTokens(NamedTuple):
    file: str
    ids: list[int]


def find_document_tokens(
    tokenizer: Tokenizer, directories: Sequence[Path], display_path: str
) -> DocumentTokens:
    """Return the document tokens that the files in ``directories`` name.

    Args:
        tokenizer: ids are looked up in its vocabulary.
        directories: for each file name, the first directory that has it; empty: use the
            tokenizer alone.
        display_path: path of the tokenizer, for messages.

    Raises:
        InvalidConfig: a file names a token that does not exist, or no separator was found.
    """
    errors = ConfigErrors()
    record = _read_record(tokenizer, directories, errors)
    named = list(_read_named_tokens(tokenizer, directories, errors))
    errors.raise_any()
    special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    # transformers makes the tokens of these two files special.
    special |= {id for file, ids in named if END_TOKEN_FIELDS[file] == "eos_token" for id in ids}
    separators = [id for _, ids in named for id in _sort_by_name(tokenizer, ids) if id in special]
    separators += _sort_by_name(tokenizer, special & set(_find_ids(tokenizer, SEPARATORS)))
    if record is not None:
        separators.insert(0, record[0])
    if not separators:
        names = " or ".join(END_TOKEN_FIELDS)
        rule = "has no special token that ends a document"
        if named:
            tokens = _format_tokens(tokenizer, named[0].ids)
            rule += f"; {named[0].file} names {tokens}, which is not special"
        remedy = (
            f'set "eos_token": "..." in a tokenizer_config.json beside it (weft reads {names}), '
            f"or add one of {' '.join(SEPARATORS)} to it as a special token"
        )
        raise InvalidConfig([ConfigError("data.tokenizer", display_path, rule, remedy)])
    end_tokens = set(named[0].ids) if named else set()
    others = [entry for entry in named[1:] if end_tokens.isdisjoint(entry.ids)]
    note = ""
    if others:
        contradictions = ", ".join(
            f"{entry.file} names {_format_tokens(tokenizer, entry.ids)}" for entry in others
        )
        tokens = _format_tokens(tokenizer, named[0].ids)
        note = f"{named[0].file} ends a text with {tokens}; {contradictions}"
    ends = frozenset(end_tokens | {separators[0]})
    return DocumentTokens(separators[0], ends, None if record is None else record[1], note)


def load_document_tokens(tokenizer: Tokenizer, path: str | Path) -> DocumentTokens:
    """Return the document tokens that files beside a ``tokenizer.json`` name."""
    directory = Path(path).expanduser().parent if isinstance(path, str) else path.parent
    directories = [directory, directory / IMPORTED_DIR] if str(path) else []
    return find_document_tokens(tokenizer, directories, str(path))


def format_record(separator: int, starts_documents: bool) -> str:
    """Return the content of a `RECORD_FILE`."""
    return json.dumps({"separator": separator, "starts_documents": starts_documents}) + "\n"


def json_with_start_token(data: bytes, tokenizer: Tokenizer, token: int) -> bytes:
    """Return a ``tokenizer.json`` changed to put a token before every text."""
    if tokenizer.encode("a").ids == [token, *tokenizer.encode("a", add_special_tokens=False).ids]:
        return data
    add_start_token(tokenizer, token)
    tree = json.loads(data)
    tree["post_processor"] = json.loads(tokenizer.to_str())["post_processor"]
    return json.dumps(tree, indent=2, ensure_ascii=False).encode()


def find_start_token(tokenizer: Tokenizer, directory: Path) -> int | None:
    """Return the token that begins a text for an imported model, if files name one.

    Raises:
        InvalidConfig: a file names a token that does not exist.
    """
    errors = ConfigErrors()
    named = list(_read_named_tokens(tokenizer, [directory], errors, "bos"))
    errors.raise_any()
    return named[0].ids[0] if named else None


# --------------------------------------------------------------------------- files


def _read_named_tokens(
    tokenizer: Tokenizer,
    directories: Sequence[Path],
    errors: ConfigErrors,
    kind: str = "eos",
) -> Iterator[_NamedTokens]:
    for name, field in END_TOKEN_FIELDS.items():
        field = field.replace("eos", kind)
        tree = _read_json(name, directories, errors)
        value = tree.get(field)
        if value is None or value == "" or value == []:
            continue
        values = value if isinstance(value, list) and field == f"{kind}_token_id" else [value]
        ids = []
        for item in values:
            content = item.get("content") if isinstance(item, dict) else item
            id = None
            if field == f"{kind}_token_id":
                in_range = type(item) is int and 0 <= item < 1 << 31
                id = item if in_range and tokenizer.id_to_token(item) is not None else None
            elif isinstance(content, str):
                id = tokenizer.token_to_id(content)
            if id is None:
                rule = "is not a token of the tokenizer.json"
                remedy = "use files of one model: these are of different models"
                text = json.dumps(item)
                text = text if len(text) <= 60 else text[:60] + "..."
                errors.add(f"{name} {field}", rule, remedy, value=text)
            else:
                ids.append(id)
        if ids:
            yield _NamedTokens(name, list(dict.fromkeys(ids)))


def _read_record(
    tokenizer: Tokenizer, directories: Sequence[Path], errors: ConfigErrors
) -> tuple[int, bool] | None:
    tree = _read_json(RECORD_FILE, directories, errors)
    if not tree:
        return None
    separator, starts_documents = tree.get("separator"), tree.get("starts_documents")
    if (
        type(separator) is int
        and 0 <= separator < 1 << 31
        and tokenizer.id_to_token(separator) is not None
        and isinstance(starts_documents, bool)
    ):
        return separator, starts_documents
    rule, remedy = "was not written by weft", "remove it; weft then finds the end token by name"
    errors.add(RECORD_FILE, rule, remedy, value=str(directories[0]))
    return None


def _read_json(name: str, directories: Sequence[Path], errors: ConfigErrors) -> dict[str, Any]:
    """Return the JSON object in the first file of that name; empty if there is none."""
    for directory in directories:
        file = directory / name
        try:
            if not file.is_file():
                continue
            if file.stat().st_size > MAX_BYTES:
                raise ValueError(f"has more than {MAX_BYTES:,} bytes")
            tree = json.loads(file.read_bytes().decode("utf-8"))
            if not isinstance(tree, dict):
                raise ValueError("is not a JSON object")
            return tree
        except (OSError, ValueError, RecursionError) as error:
            rule = f"cannot be read: {str(error)[:200]}"
            errors.add(name, rule, "download it again, or remove it", value=str(file))
            return {}
    return {}


# --------------------------------------------------------------------------- names


def _sort_by_name(tokenizer: Tokenizer, ids: Sequence[int] | set[int]) -> list[int]:
    """Sort token ids: well-known names first, in their order; the rest unchanged."""

    def rank(id: int) -> int:
        name = tokenizer.id_to_token(id)
        return SEPARATORS.index(name) if name in SEPARATORS else len(SEPARATORS)

    return sorted(ids, key=rank)


def _find_ids(tokenizer: Tokenizer, names: Sequence[str]) -> list[int]:
    return [id for id in map(tokenizer.token_to_id, names) if id is not None]


def _format_tokens(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return " and ".join(json.dumps(tokenizer.id_to_token(id), ensure_ascii=False) for id in ids)


def add_start_token(tokenizer: Tokenizer, token: int) -> None:
    """Make a tokenizer put a token before every text, and add nothing else."""
    content = tokenizer.id_to_token(token)
    # An alias: the name may contain characters with a meaning in templates.
    start: Any = {"id": "start", "ids": [token], "tokens": [content]}
    tokenizer.post_processor = processors.TemplateProcessing(
        single="start $A", pair="start $A $B", special_tokens=[start]
    )
