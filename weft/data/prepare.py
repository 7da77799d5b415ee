"""Prepare a token store: tokenize a source once, crash-safely.

Every source takes the same steps.  `weft.data.source` *detects* its kind, a *corpus* reads it once
(which finds every error), and the corpus *builds* the shards of a store.  ``store.json`` is written
last, so preparation may be killed at any time: the next attempt reuses the completed shards
(`weft.data.token_shards`) and builds the rest.

There are four corpora.  Each *text file* (`weft.data.text_files`) is a document; weft hashes a file
when it seems changed, and the tokenizer's own threads encode it.  Files with many documents,
*records* (`weft.data.documents`), may be large and remote: name, size and time identify them, and
processes build their shards.  *Tokens* of other software (`weft.data.foreign_tokens`) are validated
and used in place.  *Conversations* (`weft.data.conversations`) are the lines or rows of such files.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

from weft.config.errors import ConfigError, ConfigErrors, InvalidConfig, truncate_list
from weft.config.escaping import escape_controls
from weft.config.files import expand_path, user_cache_dir, write_durably
from weft.config.schema import DataSection
from weft.config.storage import is_bucket_url, is_remote, open_directory
from weft.data.chat import ChatEncoder, make_chat_encoder
from weft.data.chat_template import ChatTemplate, load_chat_template
from weft.data.conversations import read_conversation_corpus
from weft.data.dataset import Dataset, dataset_from_store
from weft.data.document_tokens import RECORD_FILE, describe_ignored_flags, format_record
from weft.data.documents import read_record_corpus
from weft.data.foreign_tokens import TokenCorpus, read_headers
from weft.data.mixture import write_dataset
from weft.data.prepared_cache import (
    WAITING_MESSAGE,
    Progress,
    Report,
    build_once,
    collect_errors,
    convert_cache_errors,
    format_manifest,
    lock_prepared,
    open_verified_store,
    raise_errors,
)
from weft.data.remote_tokens import CacheLocation
from weft.data.shared_preparation import SharedWork, make_together, map_units, put_object
from weft.data.source import SourceRef, detect_source, path_error
from weft.data.text_files import read_text_corpus
from weft.data.token_shards import (
    CHUNK_BYTES,
    BuiltSplits,
    Corpus,
    Encoder,
    finish_shared_text,
    load_encoder,
    unigram_entropy_nats,
    write_document_ends,
)
from weft.data.token_store import (
    FORMAT,
    STORE_FILE,
    TOKENIZER_FILE,
    Manifest,
    Store,
    copy_small_files,
    hash_json,
    is_store,
    open_store,
)
from weft.data.tokenizer import read_tokenizer
from weft.data.tokenizer_training import train_tokenizer
from weft.data.workers import Advance, ignore_progress
from weft.planning.tokenizer_conversion import fetch_data_files
from weft.planning.vocabulary import add_tokens, new_tokens

if TYPE_CHECKING:
    from rich.console import Console

SHARD_BYTES = 32 << 20  # of text; about 20 MB of tokens, which memory must hold
TOKENIZER_TRAIN_BYTES = 64 << 20  # of train text for a new tokenizer
LOG_SECONDS = 30.0  # between lines of one stage, if the output is not a terminal


def prepare_data(section: DataSection, cache: Path, progress: Report | None = None) -> Dataset:
    """Return the dataset that ``section`` selects; prepare it if it does not exist.

    Arguments and errors, also of ``data.mixture`` and ``data.chat_template``: see `prepare_store`.
    Sources of a mixture may be prepared stores of one tokenizer, and text beside conversations.
    """
    report, local = progress or (lambda _: None), local_cache(section, cache)
    section = fetch_data_files(section)
    training = section.for_training
    if section.is_mixture:
        stores = _prepare_mixture(training, cache, report)
    else:
        stores = [prepare_store(training, cache, report)]
    if training.validation_fraction == 0:
        for source, store in zip(section.sources, stores, strict=True):
            if unused := store.manifest.validation.documents:
                text = f"{source}: the validation set of this store, {unused:,} documents, is not"
                report(Progress(f"{text} used: neither trained nor evaluated"))
    if section.validation_path:
        validation = _prepare_validation(section, stores, cache, report)
        with convert_cache_errors(local):
            return write_dataset(section.weights, stores, local / "mixtures", validation, report)
    if not section.is_mixture:
        return dataset_from_store(stores[0])
    with convert_cache_errors(local):
        return write_dataset(section.weights, stores, local / "mixtures")


def _prepare_validation(
    section: DataSection, stores: Sequence[Store], cache: Path, report: Report
) -> Store:
    """Return the store of ``data.validation_path``, all of it in the train split.

    Raises:
        InvalidConfig: the data cannot be read, or their tokens mean other text than those of
            ``stores``.
    """
    tokenizer = section.tokenizer
    if section.trains_tokenizer:
        tokenizer = str(stores[0].path / TOKENIZER_FILE)
    path, errors, training = section.validation_path, ConfigErrors(), stores[0].manifest
    with collect_errors(errors, "data.validation_path"):
        store = prepare_store(section.for_validation(tokenizer), cache, report)
        manifest = store.manifest
        if count := manifest.validation.documents:
            rule = f"is a store whose documents are split: {count:,} are a validation set of their"
            remedy = "prepare it from its text with data.validation_fraction=0"
            raise path_error(path, f"{rule} own", remedy)
        starts = [s.manifest.start_tokens for s in stores if s.manifest.kind == "text"]
        rule = ""
        if manifest.separator != training.separator:
            rule = f"ends documents with token {manifest.separator}; the training data end them "
            rule += f"with token {training.separator}"
        elif manifest.kind == "text" and starts and manifest.start_tokens != starts[0]:
            rule = f"begins documents with tokens {manifest.start_tokens}; the training data begin "
            rule += f"them with tokens {starts[0]}"
        if rule:
            raise path_error(path, rule, "prepare both with the same tokenizer and start token")
    raise_errors(errors)
    return store


def _prepare_mixture(section: DataSection, cache: Path, report: Report) -> list[Store]:
    """Return the stores of ``data.mixture``; prepare them if necessary."""
    sections = [section.model_copy(update={"path": path}) for path in section.mixture]
    errors = ConfigErrors()
    encoder: Encoder | None = None
    corpora: list[Corpus | None] = []
    for source_section in sections:
        with collect_errors(errors, "data.mixture"):
            inputs = _detect_inputs(source_section)
            encoder = inputs.encoder
            corpora.append(_read_corpus(source_section, inputs, cache, report))
    raise_errors(errors)
    if encoder is None:
        encoder = _load_shared_tokenizer(section, corpora, cache, report)
        update = {"tokenizer": str(encoder.file)}
        sections = [source_section.model_copy(update=update) for source_section in sections]
    stores = []
    for source_section, corpus in zip(sections, corpora, strict=True):
        with collect_errors(errors, "data.mixture"):
            stores.append(_prepare_corpus(source_section, corpus, encoder, cache, report))
    raise_errors(errors)
    for path, store in zip(section.mixture, stores, strict=True):
        if store.manifest.separator != encoder.separator:
            rule = (
                f"is a store whose documents end with token {store.manifest.separator}; those of "
                f"the other sources end with token {encoder.separator}"
            )
            errors.add("data.mixture", rule, "prepare it again from its text", value=path)
    texts = [
        (path, store.manifest.start_tokens)
        for path, store in zip(section.mixture, stores, strict=True)
        if store.manifest.kind == "text"
    ]
    for path, start in texts:
        if start != texts[0][1]:
            rule = f"is text whose documents begin with tokens {start}; those of {texts[0][0]} "
            rule += f"begin with tokens {texts[0][1]}"
            remedy = "prepare one of them again, with the same data.start_token"
            errors.add("data.mixture", rule, remedy, value=path)
    raise_errors(errors)
    return stores


def prepare_store(
    section: DataSection,
    cache: Path,
    progress: Report | None = None,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> Store:
    """Return the store of the data at ``section.path``; prepare it if necessary.

    Any number of processes may call this at once, on all machines that share ``cache``: one
    prepares the store, the others wait.

    Args:
        section: the user's choices.  If its path is a prepared store, that store is opened.
        cache: directory of the cache.
        progress: is called with progress reports.
        shard_bytes: approximate text per shard; documents in records are not split.

    Raises:
        InvalidConfig: errors of ``data.path``, ``data.tokenizer``, ``data.chat_template`` or
            ``data.cache_dir``.
        WeftError: a worker process was killed.
    """
    report = progress or (lambda _: None)
    inputs = _detect_inputs(section)
    corpus = _read_corpus(section, inputs, cache, report, shard_bytes)
    return _prepare_corpus(section, corpus, inputs.encoder, cache, report, shard_bytes)


def check_chat(section: DataSection) -> list[ConfigError]:
    """Return the errors of tokenizer, template and files, without reading lines."""
    errors = ConfigErrors()
    key = "data.mixture" if section.is_mixture else "data.path"
    paths = [(key, path) for path in section.sources]
    paths += [("data.validation_path", path) for path in filter(None, [section.validation_path])]
    for key, path in () if section.is_text else paths:
        with collect_errors(errors, key):
            _detect_inputs(section.model_copy(update={"path": path}))
    return list({str(error): error for error in errors}.values())


# --------------------------------------------------------------------------- steps


class _Inputs(NamedTuple):
    """Inputs of a preparation, which exist but are not read yet.

    ``source`` is None for a prepared store; ``encoder`` is the user's tokenizer, if weft does not
    train one; ``chat`` encodes conversations.
    """

    source: SourceRef | None
    encoder: Encoder | None
    chat: ChatEncoder | None


def _detect_inputs(section: DataSection) -> _Inputs:
    """Return the inputs that ``section`` names.

    Raises:
        InvalidConfig: all errors of source, tokenizer and chat template.
    """
    source: SourceRef | None = None
    encoder: Encoder | None = None
    chat: ChatEncoder | None = None
    template: ChatTemplate | None = None
    errors = ConfigErrors()
    with collect_errors(errors):
        source = None if is_store(section.path) else detect_source(section.path)
    kind = source and source.kind
    if kind in ("text", "tokens") and not section.is_text:
        rule = "holds no conversations, or also other files"
        remedy = "give .jsonl, .jsonl.gz, .jsonl.zst, .parquet or .arrow, a glob of these, or hf://"
        errors += path_error(section.path, rule, remedy).errors
    if not section.trains_tokenizer:
        if not section.is_text:
            with collect_errors(errors):
                template = load_chat_template(section)
        with collect_errors(errors):
            encoder = load_encoder(section.tokenizer, section.start_token, new_tokens(section))
            chat = None if template is None else make_chat_encoder(section, template)
    elif not section.is_text:
        rule = "is only for text; conversations need the tokens of a chat template"
        remedy = "give the tokenizer.json of a model, with its chat template in the same directory"
        errors.add("data.tokenizer", rule, remedy, value="train")
    elif kind == "tokens":
        rule = f"cannot be trained: {section.path} already holds tokens"
        remedy = "give the tokenizer.json that encoded them"
        errors.add("data.tokenizer", rule, remedy, value="train")
    raise_errors(errors)
    return _Inputs(source, encoder, chat)


def _read_corpus(
    section: DataSection,
    inputs: _Inputs,
    cache: Path,
    report: Report,
    shard_bytes: int = SHARD_BYTES,
) -> Corpus | None:
    """Read a source once, and find all its errors; None: it is a prepared store."""
    source, _, chat = inputs
    if source is None:
        return None
    if source.repeated:
        names = truncate_list(source.repeated)
        report(Progress(f"{section.path}: read once, and not again by their links: {names}"))
    if chat is not None:
        return read_conversation_corpus(section, source, chat, cache, report)
    if source.kind == "text":
        return read_text_corpus(section, source.files, cache, shard_bytes, report)
    if source.kind == "tokens":
        return TokenCorpus(section, read_headers(source.files))
    return read_record_corpus(section, source, cache, shard_bytes, report)


def _prepare_corpus(
    section: DataSection,
    corpus: Corpus | None,
    given: Encoder | None,
    cache: Path,
    report: Report,
    shard_bytes: int = SHARD_BYTES,
) -> Store:
    """Build the store of a corpus, unless it exists; None: open the given store."""
    if corpus is None:
        return _open_given_store(section, given, cache, report)
    settings: list[object] = [
        *(FORMAT, CHUNK_BYTES, shard_bytes, section.validation_fraction, section.invalid_utf8)
    ]
    tokenizer_key: list[object] = [
        *("train", section.vocab_size, TOKENIZER_TRAIN_BYTES, section.start_token),
        *filter(any, [new_tokens(section)]),  # none: the key of stores without
    ]
    notes: list[str] = []
    if given is not None:
        if section.is_text and section.start_token == "auto":
            notes = list(filter(None, [describe_ignored_flags(given.tokenizer, given.file)]))
        tokenizer_key = [given.hash, given.separator, given.affixes, notes]
    content: object = [settings, tokenizer_key, corpus.cache_key]
    if not section.is_text:
        content = corpus.cache_key  # conversations have other settings

    def build(directory: Path, shared: SharedWork | None = None) -> Manifest:
        file = directory / TOKENIZER_FILE
        if given is None:
            _train_tokenizer(file, [corpus], section, report, shared)
        else:
            write_durably(file, read_tokenizer(given.file, given.new_tokens))
        encoder = given or load_encoder(file, section.start_token)
        if not isinstance(corpus, TokenCorpus):  # which reads the files beside the user's
            encoder = encoder._replace(file=file)
        # Processes that tokenize, and users of the store, read its separator and start tokens.
        start = encoder.affixes.start if section.is_text else None
        write_durably(directory / RECORD_FILE, format_record(encoder.separator, start).encode())
        if shared is None:
            built = corpus.build(directory, encoder, report)
        else:
            built = _build_together(corpus, encoder, report, shared)
        if built.start_tokens is not None:
            start = tuple(built.start_tokens)
            write_durably(directory / RECORD_FILE, format_record(encoder.separator, start).encode())
        if section.is_text and shared is None:
            built = write_document_ends(directory, built, encoder.separator)
        entropy = built.entropy_nats
        if entropy is None:
            entropy = unigram_entropy_nats(directory, built, encoder.vocab_size)
        return Manifest(
            format=FORMAT,
            key=directory.name,
            source=section.path,
            dtype=built.dtype,
            vocab_size=encoder.vocab_size,
            separator=encoder.separator,
            tokenizer_hash=encoder.hash,
            unigram_entropy_nats=entropy,
            skipped_files=corpus.skip_counts.skipped,
            replaced_files=corpus.skip_counts.replaced,
            train=built.train,
            validation=built.validation,
            empty_documents=corpus.skip_counts.empty,
            kind=section.format,
            files=list(built.files),
            start_tokens=list(start or ()),
            notes=[*notes, *built.notes],
        )

    if not is_remote(cache):
        return build_once(cache, content, report, build)
    name = hash_json(content)
    store = cache / "stores" / name

    def make(shared: SharedWork) -> bytes:
        with TemporaryDirectory(prefix="weft-prepare-") as scratch:
            directory = Path(scratch, name)
            directory.mkdir()
            manifest = build(directory, shared)
            for file in (TOKENIZER_FILE, RECORD_FILE):
                put_object(store / file, (directory / file).read_bytes())
        return format_manifest(manifest)

    make_together(cache, name, store / STORE_FILE, section.path, report, make)
    return open_bucket_store(str(store), section, report)


def _build_together(
    corpus: Corpus, encoder: Encoder, report: Report, shared: SharedWork
) -> BuiltSplits:
    """Put the files of a store, with other workers."""

    def finish(splits: BuiltSplits, advance: Advance) -> BuiltSplits:
        return finish_shared_text(splits, encoder, shared)

    splits = corpus.build(shared.final.parent, encoder, report, shared)
    if splits.entropy_nats is not None:  # of conversations
        return splits
    return map_units(shared, "manifest", finish, [splits], [0], BuiltSplits, ignore_progress, 1)[0]


def _open_given_store(
    section: DataSection, given: Encoder | None, cache: Path, report: Report
) -> Store:
    """Open the store at ``data.path``, and compare its tokenizer and kind."""
    if is_bucket_url(section.path):
        store = open_bucket_store(section.path, section, report)
    else:
        store = open_verified_store(section.path, local_cache(section, cache), report)
    kind = store.manifest.kind
    if given is not None and given.hash != store.manifest.tokenizer_hash:
        rule = f"does not match the store {section.path}, which was prepared with another tokenizer"
        remedy = f"use {store.path / TOKENIZER_FILE}"
        raise InvalidConfig([ConfigError("data.tokenizer", section.tokenizer, rule, remedy)])
    start = store.manifest.start_tokens
    if kind == "text" and section.start_token != "auto" and section.start_token != bool(start):
        rule = f"does not match the store {section.path}, whose documents begin "
        rule += f"with tokens {start}" if start else "with their text"
        remedy = "use auto, or prepare the store again from its text"
        raise InvalidConfig([ConfigError("data.start_token", section.start_token, rule, remedy)])
    comparing = ("preferences", "unpaired")
    if not section.is_text and kind != section.format and {kind, section.format} & {*comparing}:
        rule = f"is a store of {kind}, not of {section.format}"
        raise path_error(section.path, rule, f"set data.format={kind}")
    return store


# --------------------------------------------------------------------------- tokenizers


def _load_shared_tokenizer(
    section: DataSection, corpora: Sequence[Corpus | None], cache: Path, report: Report
) -> Encoder:
    """Return the tokenizer of a store in the mixture, or train one on all texts."""
    stores = [path for path in section.mixture if is_store(path)]
    if stores:
        file = expand_path(stores[0]) / TOKENIZER_FILE
    else:
        text_corpora = [corpus for corpus in corpora if corpus is not None]
        # The last two determine the train text.
        settings = [
            section.vocab_size,
            TOKENIZER_TRAIN_BYTES,
            section.validation_fraction,
            section.invalid_utf8,
            *filter(any, [new_tokens(section)]),
        ]
        key = hash_json([settings, [corpus.cache_key for corpus in text_corpora]])
        local = local_cache(section, cache)
        file = local / "tokenizers" / key / TOKENIZER_FILE

        def make(shared: SharedWork) -> bytes:
            _train_tokenizer(file, text_corpora, section, report, shared)
            return file.read_bytes()

        with convert_cache_errors(local), lock_prepared(file.parent, report, WAITING_MESSAGE):
            if is_remote(cache):
                final = cache / "tokenizers" / key / TOKENIZER_FILE
                name = f"tokenizer-{key}"
                make_together(cache, name, final, ", ".join(section.mixture), report, make)
                write_durably(file, final.read_bytes())
            else:
                _train_tokenizer(file, text_corpora, section, report)
    return load_encoder(file, section.start_token)


def _train_tokenizer(
    file: Path,
    corpora: Sequence[Corpus],
    section: DataSection,
    report: Report,
    shared: SharedWork | None = None,
) -> None:
    """Train and write a tokenizer, unless the file exists.

    Of ``shared`` work, one worker trains it.
    It is trained on at most ``TOKENIZER_TRAIN_BYTES`` of the train texts, the same fraction of
    each.
    """
    if file.exists():
        return
    report(Progress("training the tokenizer"))

    def train(_: None, advance: Advance) -> str:
        total = max(1, sum(corpus.text_bytes for corpus in corpora))
        texts = (
            text
            for corpus in corpora
            for text in corpus.sample_texts(TOKENIZER_TRAIN_BYTES * corpus.text_bytes // total)
        )
        trained = train_tokenizer(texts, section.vocab_size).to_str(pretty=True).encode()
        return add_tokens(trained, new_tokens(section)).decode()

    [text] = map_units(shared, "tokenizer", train, [None], [0], str, ignore_progress, 1)
    write_durably(file, text.encode())


# --------------------------------------------------------------------------- commands


def cache_dir(section: DataSection) -> Path:
    """Return the directory that ``data.cache_dir`` names: local, or in a store."""
    if "://" in section.cache_dir:
        try:
            return open_directory(section.cache_dir)
        except InvalidConfig as invalid:
            errors = [replace(error, key="data.cache_dir") for error in invalid.errors]
            raise InvalidConfig(errors) from None
    if section.cache_dir != "auto":
        return expand_path(section.cache_dir)
    return user_cache_dir()


def local_cache(section: DataSection, cache: Path) -> Path:
    """Return ``cache`` if it is on this machine, or else ``data.node_cache_dir``."""
    return node_cache_dir(section) if is_remote(cache) else cache


def node_cache_dir(section: DataSection) -> Path:
    """Return the directory that ``data.node_cache_dir`` names."""
    is_auto = section.node_cache_dir == "auto"
    return user_cache_dir() if is_auto else expand_path(section.node_cache_dir)


def open_bucket_store(url: str, section: DataSection, report: Report = lambda _: None) -> Store:
    """Open a store in a bucket, whose parts are read when they are needed.

    Args:
        url: directory of ``store.json``.
        section: where and how much this node caches.
        report: receives a warning if the node cannot cache what the order of the data needs.

    Raises:
        InvalidConfig: it does not exist or cannot be read, or ``data.node_cache_dir`` cannot be
            written.
    """
    cache, limit = node_cache_dir(section).absolute(), section.node_cache_gib
    location = CacheLocation(str(cache), 0 if limit == "auto" else int(limit * (1 << 30)))
    with convert_cache_errors(cache, "data.node_cache_dir"):
        store = open_store(copy_small_files(url, cache / "remote", location))
        size = sum(shard.size_bytes for shard in store.manifest.train.content)
        space = location.limit_bytes or shutil.disk_usage(cache).free
    if size > space and not section.shuffle_span_gib:
        report(
            Progress(
                f"warning: {url} has {size / (1 << 30):,.1f} GiB, and this node caches "
                f"{space / (1 << 30):,.1f} GiB of it: it reads most of them again and again. Set "
                "data.shuffle_span_gib, or a larger data.node_cache_gib"
            )
        )
    return store


@contextmanager
def show_progress(console: Console) -> Iterator[Report]:
    """Yield a callback that shows progress: a transient bar on a terminal, else lines.

    Without a terminal it prints one line per stage, and the time left every `LOG_SECONDS`.
    """
    import rich.progress

    stage, stage_start, last_log = "", 0.0, 0.0

    def log(progress: Progress) -> None:
        nonlocal stage, stage_start, last_log
        now = time.monotonic()
        if progress.message != stage:
            stage, stage_start, last_log = progress.message, now, now
            console.print(stage, soft_wrap=True)
        elif progress.total and progress.done and now - last_log > LOG_SECONDS:
            last_log = now
            fraction = progress.done / progress.total
            left = (now - stage_start) * (1 - fraction) / fraction
            console.print(f"{stage}: {fraction:.0%}, {left / 60:.1f} min left", soft_wrap=True)

    if not console.is_terminal:
        yield log
        return
    columns = (
        rich.progress.TextColumn("{task.description}", markup=False),
        rich.progress.BarColumn(bar_width=20),
        rich.progress.TextColumn("{task.percentage:3.0f}%"),
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(progress: Progress) -> None:
            nonlocal stage
            if stage != progress.message:
                stage = progress.message
                bar.reset(task)  # the time left is that of this stage
            text = escape_controls(progress.message)
            bar.update(
                task, description=text, completed=progress.done, total=progress.total or None
            )

        yield show
