"""Find the tokens that begin and end documents.

*End.*  Files beside ``tokenizer.json`` (or in its directory ``huggingface``, where an imported run
stores them) name end tokens.  The first file of `END_TOKEN_FIELDS` that names one decides where
generation stops, as in transformers.  The separator of documents in training is one token: the
first special token that the files name, in the same order; among several, a well-known name comes
first.  If no file names one, the separator is a special token with a well-known name.

*Start.*  A document begins with the tokens that the tokenizer itself puts before a text, as in
transformers: its post-processor decides, such as the template ``<s> $A``.  `find_affixes` is that
rule, and ``data.start_token`` changes it.  If it adds the separator, that of the document before
serves, so there are never two in a row.  A model that weft trains from random weights, with a
tokenizer that adds nothing, learns that a separator precedes a document.  `RECORD_FILE` in the run
directory has the start tokens of the run's training: prompts begin with them, and the exported
tokenizer adds them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tokenizers import Tokenizer, processors

from weft.config.errors import ConfigError, ConfigErrors, InvalidConfig
from weft.config.files import expand_path
from weft.data.tokenizer import END_OF_TEXT

# {"separator": ID, "start_tokens": [ID, ...]}; null: those that the tokenizer adds.
RECORD_FILE = "document_tokens.json"
StartToken = Literal["auto", True, False]  # data.start_token
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
    """Token ids: the separator of documents, and all that end a generated text.

    ``start_tokens`` are those that training put before a document; None: not recorded.
    """

    separator: int
    end_tokens: frozenset[int]
    start_tokens: tuple[int, ...] | None
    note: str = ""  # contradictions between the files


class Affixes(NamedTuple):
    """Tokens before and after a text."""

    start: tuple[int, ...] = ()
    end: tuple[int, ...] = ()


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
            tokens = format_tokens(tokenizer, named[0].ids)
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
            f"{entry.file} names {format_tokens(tokenizer, entry.ids)}" for entry in others
        )
        tokens = format_tokens(tokenizer, named[0].ids)
        note = f"{named[0].file} ends a text with {tokens}; {contradictions}"
    ends = frozenset(end_tokens | {separators[0]})
    return DocumentTokens(separators[0], ends, None if record is None else record[1], note)


def load_document_tokens(tokenizer: Tokenizer, path: str | Path) -> DocumentTokens:
    """Return the document tokens that files beside a ``tokenizer.json`` name."""
    return find_document_tokens(tokenizer, _directories(path), str(path))


def _directories(path: str | Path) -> list[Path]:
    """Return where files may be that name the tokens of a ``tokenizer.json``."""
    directory = expand_path(path).parent if isinstance(path, str) else path.parent
    return [directory, directory / IMPORTED_DIR] if str(path) else []


def format_record(separator: int, start_tokens: Sequence[int] | None) -> str:
    """Return the content of a `RECORD_FILE`; None: start tokens are the tokenizer's."""
    start = None if start_tokens is None else list(start_tokens)
    return json.dumps({"separator": separator, "start_tokens": start}) + "\n"


def read_start_tokens(run_dir: Path) -> list[int] | None:
    """Return the start tokens that a run has recorded; None without a record or text.

    Earlier versions of weft put none before a document.
    """
    tree = _read_json(RECORD_FILE, [run_dir], ConfigErrors())
    start = tree.get("start_tokens", [] if "starts_documents" in tree else None)
    return start if isinstance(start, list) else None


# --------------------------------------------------------------------------- start tokens


def find_affixes(tokenizer: Tokenizer) -> Affixes:
    """Return the tokens that a tokenizer itself adds to a text."""
    plain, full = tokenizer.encode("a", add_special_tokens=False).ids, tokenizer.encode("a").ids
    for begin in range(len(full) - len(plain) + 1):
        end = begin + len(plain)
        if full[begin:end] == plain:
            return Affixes(tuple(full[:begin]), tuple(full[end:]))
    return Affixes()


def find_document_affixes(
    tokenizer: Tokenizer, path: str | Path, start_token: StartToken, tokens: DocumentTokens
) -> Affixes:
    """Return the tokens around a document in training.

    The end is what the tokenizer adds, and always ends with one separator.  The start may begin
    with the separator, which the document before ends with.

    Args:
        tokenizer: its own rule is used for ``auto``, unless a run has recorded its start tokens.
        path: the ``tokenizer.json``; files beside it name the start token.
        start_token: ``data.start_token``.
        tokens: what the files beside the tokenizer name.

    Raises:
        InvalidConfig: ``start_token`` is True, and no file names a start token.
    """
    own = find_affixes(tokenizer)
    end = own.end if own.end[-1:] == (tokens.separator,) else (*own.end, tokens.separator)
    if start_token is False:
        return Affixes((), end)
    start = own.start if tokens.start_tokens is None else tokens.start_tokens
    if start_token is True and not start:
        start = find_named_start(tokenizer, path)
        if not start:
            rule = f"needs a start token, but no file beside {path} names one (bos_token)"
            remedy = "use auto or false, or name it in tokenizer_config.json"
            raise InvalidConfig([ConfigError("data.start_token", True, rule, remedy)])
    return Affixes(start, end)


def find_named_start(tokenizer: Tokenizer, path: str | Path) -> tuple[int, ...]:
    """Return the tokens that a tokenizer adds first, or else the one that files name."""
    if start := find_affixes(tokenizer).start:
        return start
    named = (find_start_token(tokenizer, directory) for directory in _directories(path))
    return next(((token,) for token in named if token is not None), ())


def describe_ignored_flags(tokenizer: Tokenizer, path: str | Path) -> str:
    """Return a sentence if ``add_bos_token`` contradicts ``tokenizer.json``; else ''.

    Versions of transformers before 5 follow ``add_bos_token`` for some classes of tokenizers.
    """
    own, errors = find_affixes(tokenizer), ConfigErrors()
    tree = _read_json("tokenizer_config.json", _directories(path), errors)
    flag = tree.get("add_bos_token")
    errors.raise_any()
    if not isinstance(flag, bool) or flag == bool(own.start) or not tree.get("bos_token"):
        return ""
    adds = f"adds {format_tokens(tokenizer, own.start)}" if own.start else "adds no start token"
    change = "false" if own.start else "true"
    return (
        f"tokenizer_config.json has add_bos_token={json.dumps(flag)}, but tokenizer.json {adds}, "
        f"which decides, as in transformers 5; for the other, set data.start_token={change}"
    )


def json_with_start_tokens(data: bytes, tokenizer: Tokenizer, start: Sequence[int]) -> bytes:
    """Return a ``tokenizer.json`` that adds ``start`` to every text, and nothing else."""
    set_start_tokens(tokenizer, start)
    tree = json.loads(data)
    tree["post_processor"] = json.loads(tokenizer.to_str())["post_processor"]
    return json.dumps(tree, indent=2, ensure_ascii=False).encode()


def set_start_tokens(tokenizer: Tokenizer, start: Sequence[int]) -> None:
    """Make a tokenizer put tokens before every text, and add nothing else."""
    # Aliases: the names may contain characters with a meaning in templates.
    special: list[Any] = [
        {"id": f"start{n or ''}", "ids": [token], "tokens": [tokenizer.id_to_token(token)]}
        for n, token in enumerate(start)
    ]
    prefix = "".join(f"{each['id']} " for each in special)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{prefix}$A", pair=f"{prefix}$A $B", special_tokens=special
    )


def find_start_token(tokenizer: Tokenizer, directory: Path) -> int | None:
    """Return the token that begins a text, if files in a directory name one.

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
) -> tuple[int, tuple[int, ...] | None] | None:
    tree = _read_json(RECORD_FILE, directories, errors)
    if not tree:
        return None
    separator = tree.get("separator")
    start = tree.get("start_tokens", ())
    if isinstance(tree.get("starts_documents"), bool):  # of an older version
        start = [separator] if tree["starts_documents"] else None
    ids = [separator, *(start if isinstance(start, list) else [])]
    if (start is None or isinstance(start, list)) and all(
        type(id) is int and 0 <= id < 1 << 31 and tokenizer.id_to_token(id) is not None
        for id in ids
    ):
        return ids[0], None if start is None else tuple(ids[1:])
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


def format_tokens(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the names of tokens in quotes, for messages."""
    return " and ".join(json.dumps(tokenizer.id_to_token(id), ensure_ascii=False) for id in ids)
