"""Prepare a token store: tokenize text once, crash-safely.

Preparation may be killed at any time: the next attempt reuses the completed shards
(`weft.data.token_shards`) and builds the rest.  ``store.json`` is written last.

Text has three forms.  Each *text file* (`weft.data.text_files`) is a document; weft hashes a file
when it seems changed, and the tokenizer's own threads encode it.  Files with many documents,
*records* (`weft.data.documents`), may be large and remote: name, size and time identify them, and
processes build their shards.  *Tokens* of other software (`weft.data.foreign_tokens`) are validated
and used in place.  `weft.data.conversations` prepares *conversations*.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from weft.config.errors import ConfigError
from weft.config.files import write_durably
from weft.config.schema import DataSection
from weft.data.conversations import prepare_conversations
from weft.data.dataset import Dataset, dataset_from_store, write_mixture
from weft.data.document_tokens import RECORD_FILE, format_record
from weft.data.documents import read_record_corpus
from weft.data.foreign_tokens import TokenCorpus, read_headers
from weft.data.prepared_cache import (
    WAITING_MESSAGE,
    Progress,
    Report,
    build_once,
    collect_errors,
    convert_cache_errors,
    lock_directory,
    open_given_store,
    raise_errors,
)
from weft.data.source import SourceRef, detect_source
from weft.data.text_files import read_text_corpus
from weft.data.token_shards import CHUNK_BYTES, Corpus, load_encoder, unigram_entropy_nats
from weft.data.token_store import FORMAT, TOKENIZER_FILE, Manifest, Store, hash_json, is_store
from weft.data.tokenizer import find_separator, load_tokenizer, train_tokenizer

SHARD_BYTES = 32 << 20  # of text; about 20 MB of tokens, which memory must hold
TOKENIZER_TRAIN_BYTES = 64 << 20  # of train text for a new tokenizer


def prepare_data(section: DataSection, cache: Path, progress: Report | None = None) -> Dataset:
    """Return the dataset that ``section`` selects; prepare it if it does not exist.

    Arguments and errors, also of ``data.mixture`` and ``data.chat_template``: see `prepare_store`
    and `weft.data.conversations.prepare_conversations`.
    """
    if not section.is_text:
        return prepare_conversations(section, cache, progress)
    if not section.is_mixture:
        return dataset_from_store(prepare_store(section, cache, progress))
    report = progress or (lambda _: None)
    sections = [section.model_copy(update={"path": path}) for path in section.mixture]
    problems: list[ConfigError] = []
    tokenizer: _GivenTokenizer | None = None
    corpora: list[Corpus | None] = []
    for source_section in sections:
        with collect_errors(problems, mixture=True):
            source, tokenizer = _detect_inputs(source_section)
            corpora.append(
                None
                if source is None
                else _read_corpus(source_section, source, cache, SHARD_BYTES, report)
            )
    raise_errors(problems)
    if tokenizer is None:
        tokenizer = _load_shared_tokenizer(section, corpora, cache, report)
        sections = [
            source_section.model_copy(update={"tokenizer": str(tokenizer.file)})
            for source_section in sections
        ]
    stores = []
    for source_section, corpus in zip(sections, corpora, strict=True):
        with collect_errors(problems, mixture=True):
            stores.append(
                open_given_store(source_section, tokenizer.hash, cache, report)
                if corpus is None
                else _prepare_corpus(source_section, corpus, tokenizer, cache, SHARD_BYTES, report)
            )
    raise_errors(problems)
    for path, store in zip(section.mixture, stores, strict=True):
        if store.manifest.separator != tokenizer.separator:
            rule = (
                f"is a store whose documents end with token {store.manifest.separator}; those of "
                f"the other sources end with token {tokenizer.separator}"
            )
            problems.append(
                ConfigError("data.mixture", path, rule, "prepare it again from its text")
            )
    raise_errors(problems)
    with convert_cache_errors(cache):
        return write_mixture(section.mixture, stores, cache / "mixtures")


def prepare_store(
    section: DataSection,
    cache: Path,
    progress: Report | None = None,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> Store:
    """Return the store of the text at ``section.path``; prepare it if necessary.

    Any number of processes may call this at once, on all machines that share ``cache``: one
    prepares the store, the others wait.

    Args:
        section: the user's choices.  If its path is a prepared store, that store is opened.
        cache: directory of the cache.
        progress: is called with progress reports.
        shard_bytes: approximate text per shard; documents in records are not split.

    Raises:
        InvalidConfig: errors of ``data.path``, ``data.tokenizer`` or ``data.cache_dir``.
        WeftError: a worker process was killed.
    """
    report = progress or (lambda _: None)
    source, tokenizer = _detect_inputs(section)
    if source is None:
        return open_given_store(section, tokenizer and tokenizer.hash, cache, report)
    corpus = _read_corpus(section, source, cache, shard_bytes, report)
    return _prepare_corpus(section, corpus, tokenizer, cache, shard_bytes, report)


class _GivenTokenizer(NamedTuple):
    """Tokenizer that is not trained on the text."""

    file: Path
    hash: str
    separator: int


def _detect_inputs(section: DataSection) -> tuple[SourceRef | None, _GivenTokenizer | None]:
    """Return the source (None: a prepared store), and the user's tokenizer.

    Raises:
        InvalidConfig: all errors of both.
    """
    source: SourceRef | None = None
    given_tokenizer: _GivenTokenizer | None = None
    problems: list[ConfigError] = []
    with collect_errors(problems):
        source = None if is_store(section.path) else detect_source(section.path)
    if section.trains_tokenizer:
        if source is not None and source.kind == "tokens":
            rule = f"cannot be trained: {section.path} already holds tokens"
            problems.append(
                ConfigError(
                    "data.tokenizer", "train", rule, "give the tokenizer.json that encoded them"
                )
            )
    else:
        with collect_errors(problems):
            tokenizer, digest = load_tokenizer(section.tokenizer)
            separator = find_separator(tokenizer, section.tokenizer)
            given_tokenizer = _GivenTokenizer(section.tokenizer_path, digest, separator)
    raise_errors(problems)
    return source, given_tokenizer


def _read_corpus(
    section: DataSection, source: SourceRef, cache: Path, shard_bytes: int, report: Report
) -> Corpus:
    if source.kind == "text":
        return read_text_corpus(section, source.files, cache, shard_bytes, report)
    if source.kind == "tokens":
        return TokenCorpus(section, read_headers(source.files))
    return read_record_corpus(section, source, cache, shard_bytes, report)


def _prepare_corpus(
    section: DataSection,
    corpus: Corpus,
    tokenizer: _GivenTokenizer | None,
    cache: Path,
    shard_bytes: int,
    report: Report,
) -> Store:
    settings = [FORMAT, CHUNK_BYTES, shard_bytes, section.validation_fraction, section.invalid_utf8]
    tokenizer_key = (
        [tokenizer.hash, tokenizer.separator]
        if tokenizer
        else ["train", section.vocab_size, TOKENIZER_TRAIN_BYTES]
    )
    cache_key = [settings, tokenizer_key, corpus.cache_key]

    def build(directory: Path) -> Manifest:
        file = directory / TOKENIZER_FILE
        if tokenizer:
            write_durably(file, tokenizer.file.read_bytes())
            write_durably(
                directory / RECORD_FILE, format_record(tokenizer.separator, True).encode()
            )
        else:
            _train_tokenizer(file, [corpus], section.vocab_size, report)
        encoder = load_encoder(file)
        built = corpus.build(directory, encoder, report)
        return Manifest(
            format=FORMAT,
            key=directory.name,
            source=section.path,
            dtype=built.dtype,
            vocab_size=encoder.vocab_size,
            separator=encoder.separator,
            tokenizer_hash=encoder.hash,
            unigram_entropy_nats=unigram_entropy_nats(directory, built, encoder.vocab_size),
            skipped_files=corpus.skip_counts.skipped,
            replaced_files=corpus.skip_counts.replaced,
            train=built.train,
            validation=built.validation,
            empty_documents=corpus.skip_counts.empty,
        )

    return build_once(cache, cache_key, report, build)


# --------------------------------------------------------------------------- tokenizers


def _load_shared_tokenizer(
    section: DataSection, corpora: Sequence[Corpus | None], cache: Path, report: Report
) -> _GivenTokenizer:
    """Return the tokenizer of a store in the mixture, or train one on all texts."""
    stores = [path for path in section.mixture if is_store(path)]
    if stores:
        file = Path(stores[0]).expanduser() / TOKENIZER_FILE
    else:
        text_corpora = [corpus for corpus in corpora if corpus is not None]
        # The last two determine the train text.
        settings = [
            section.vocab_size,
            TOKENIZER_TRAIN_BYTES,
            section.validation_fraction,
            section.invalid_utf8,
        ]
        key = hash_json([settings, [corpus.cache_key for corpus in text_corpora]])
        file = cache / "tokenizers" / key / TOKENIZER_FILE
        with convert_cache_errors(cache), lock_directory(file.parent, report, WAITING_MESSAGE):
            _train_tokenizer(file, text_corpora, section.vocab_size, report)
    tokenizer, digest = load_tokenizer(file)
    return _GivenTokenizer(file, digest, find_separator(tokenizer, file))


def _train_tokenizer(
    file: Path, corpora: Sequence[Corpus], vocab_size: int, report: Report
) -> None:
    """Train and write a tokenizer, unless the file exists.

    It is trained on at most ``TOKENIZER_TRAIN_BYTES`` of the train texts, the same fraction of
    each.
    """
    if file.exists():
        return
    report(Progress("training the tokenizer"))
    total = max(1, sum(corpus.text_bytes for corpus in corpora))
    texts = (
        text
        for corpus in corpora
        for text in corpus.sample_texts(TOKENIZER_TRAIN_BYTES * corpus.text_bytes // total)
    )
    write_durably(file, train_tokenizer(texts, vocab_size).to_str(pretty=True).encode())
