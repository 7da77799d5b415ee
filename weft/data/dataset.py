"""Dataset of a run: one prepared store, or several in a mixture.

A mixture is a directory like a store::

    tokenizer.json          the tokenizer of all its sources
    mixture.json            their names, shares and stores
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from weft.config.errors import InvalidConfig
from weft.data.token_store import Store, damaged_store_error, hash_json, open_store

MIXTURE_FILE = "mixture.json"


@dataclass(frozen=True)
class Source:
    """Source of a run, and its share of the samples that the run trains on."""

    name: str
    share: float
    store: Store


@dataclass(frozen=True)
class Dataset:
    """Sources of a run, all of one tokenizer; `open_dataset` accepts ``path``."""

    path: Path
    sources: tuple[Source, ...]

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
        """Return a hash of content and shares that does not depend on the path."""
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
    entries = _read_mixture(directory)
    return Dataset(
        directory,
        tuple(Source(entry.name, entry.share, open_store(entry.store)) for entry in entries),
    )


def list_mixture_stores(directory: Path) -> list[Path]:
    """Return the store directories of a mixture.

    Raises:
        InvalidConfig: ``mixture.json`` is damaged.
    """
    return [Path(entry.store) for entry in _read_mixture(directory)]


@dataclass(frozen=True)
class _MixtureEntry:
    """Entry of ``mixture.json``."""

    name: str
    share: Annotated[float, Field(gt=0, le=1)]
    store: str


def _read_mixture(directory: Path) -> list[_MixtureEntry]:
    try:
        data = (directory / MIXTURE_FILE).read_bytes()
        return TypeAdapter(Annotated[list[_MixtureEntry], Field(min_length=1)]).validate_json(data)
    except OSError as error:
        rule = f"{MIXTURE_FILE} cannot be read: {error.strerror}"
    except (ValidationError, RecursionError):
        rule = f"{MIXTURE_FILE} was not written by weft, or is damaged"
    raise InvalidConfig([damaged_store_error(directory, rule)])
