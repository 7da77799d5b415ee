"""Dataset of a run: one prepared store, a mixture, or both with a validation set.

A dataset of more than one store is a directory like a store::

    tokenizer.json          the tokenizer of all its stores
    mixture.json            names, shares and stores of the sources and of data.validation_path
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from weft.config.errors import InvalidConfig
from weft.data.token_store import (
    SplitName,
    Store,
    damaged_store_error,
    hash_json,
    open_store,
)

MIXTURE_FILE = "mixture.json"


@dataclass(frozen=True)
class Source:
    """Source of a run, and its share of the samples that the run trains on."""

    name: str
    share: float
    store: Store


@dataclass(frozen=True)
class Dataset:
    """Sources of a run, all of one tokenizer; `open_dataset` accepts ``path``.

    ``validation`` is the source of ``data.validation_path``, in the train split of its store; None:
    the validation splits of the sources.  ``notes`` are sentences for the user.
    """

    path: Path
    sources: tuple[Source, ...]
    validation: Source | None = None
    notes: tuple[str, ...] = ()

    def parts(self, split: SplitName) -> list[tuple[Source, SplitName]]:
        """Return the sources of a split, each with the name of the split of its store."""
        if split == "validation" and self.validation is not None:
            return [(self.validation, "train")]
        return [(source, split) for source in self.sources]

    @property
    def has_validation(self) -> bool:
        """Return True if there is a validation set."""
        return any(source.store.split(name).tokens for source, name in self.parts("validation"))

    @property
    def stores(self) -> list[Store]:
        """Return the stores of the sources and of the validation set."""
        validation = [self.validation] if self.validation else []
        return [source.store for source in (*self.sources, *validation)]

    @property
    def shares(self) -> dict[str, float]:
        """Return the shares of a mixture by name; empty for a single source."""
        sources = self.sources if len(self.sources) > 1 else ()
        return {source.name: source.share for source in sources}

    @property
    def separator(self) -> int:
        """Return the id of the token that ends a document."""
        return self.sources[0].store.manifest.separator

    @property
    def start_tokens(self) -> list[int] | None:
        """Return the tokens that begin a document of text; None without text."""
        manifests = [source.store.manifest for source in self.sources]
        return next((each.start_tokens for each in manifests if each.kind == "text"), None)

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary, which all sources share."""
        return self.sources[0].store.manifest.vocab_size

    @property
    def unigram_entropy_nats(self) -> float:
        """Return the loss of a unigram model (in a mixture, one per source)."""
        return sum(s.share * s.store.manifest.unigram_entropy_nats for s in self.sources)

    @property
    def fingerprint(self) -> str:
        """Return a hash of content and shares that does not depend on the path.

        It covers the validation set if that is a part of the data.
        """
        if len(self.sources) == 1:
            return self.sources[0].store.fingerprint
        return hash_json([[source.store.fingerprint, source.share] for source in self.sources])


def dataset_from_store(store: Store) -> Dataset:
    """Return the dataset of one store."""
    return Dataset(store.path, (Source(store.path.name, 1.0, store),))


def open_dataset(path: str | Path) -> Dataset:
    """Open a prepared store or mixture.

    Raises:
        InvalidConfig: one error for each file that is missing, damaged or replaced.
    """
    directory = Path(path)
    if not (directory / MIXTURE_FILE).exists():
        return dataset_from_store(open_store(directory))
    content = _read_mixture(directory)
    return Dataset(
        directory,
        tuple(entry.open() for entry in content.sources),
        content.validation.open() if content.validation else None,
        tuple(content.notes),
    )


def list_mixture_stores(directory: Path) -> list[Path]:
    """Return the store directories of a mixture.

    Raises:
        InvalidConfig: ``mixture.json`` is damaged.
    """
    content = _read_mixture(directory)
    entries = [*content.sources, *filter(None, [content.validation])]
    return [Path(entry.store) for entry in entries]


@dataclass(frozen=True)
class _MixtureEntry:
    """Entry of ``mixture.json``."""

    name: str
    share: Annotated[float, Field(gt=0, le=1)]
    store: str

    def open(self) -> Source:
        return Source(self.name, self.share, open_store(self.store))


@dataclass(frozen=True)
class _MixtureContent:
    """Content of ``mixture.json``."""

    sources: Annotated[list[_MixtureEntry], Field(min_length=1)]
    validation: _MixtureEntry | None = None
    notes: list[str] = field(default_factory=list)


def _read_mixture(directory: Path) -> _MixtureContent:
    try:
        data = (directory / MIXTURE_FILE).read_bytes()
        return TypeAdapter(_MixtureContent).validate_json(data)
    except OSError as error:
        rule = f"{MIXTURE_FILE} cannot be read: {error.strerror}"
    except (ValidationError, RecursionError):
        rule = f"{MIXTURE_FILE} was not written by weft, or is damaged"
    raise InvalidConfig([damaged_store_error(directory, rule)])
