"""What a run trains on: one prepared store, or several in a mixture.

A mixture is a folder like a store::

    tokenizer.json          the tokenizer of all its sources
    mixture.json            their names, shares and stores
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError
from xxhash import xxh3_128_hexdigest

from weft.config.errors import InvalidConfig
from weft.config.files import write_durably
from weft.data.token_store import TOKENIZER_FILE, Store, damaged, hash_json, open_store

MIXTURE_FILE = "mixture.json"


@dataclass(frozen=True)
class Source:
    """One text of a run, and its share of the samples that the run sees."""

    name: str
    share: float
    store: Store


@dataclass(frozen=True)
class Dataset:
    """The sources of a run, all of one tokenizer; ``path`` is a folder for `open_text`."""

    path: Path
    sources: tuple[Source, ...]

    @property
    def shares(self) -> dict[str, float]:
        """Of the sources of a mixture, by name; none of a single text."""
        sources = self.sources if len(self.sources) > 1 else ()
        return {source.name: source.share for source in sources}

    @property
    def separator(self) -> int:
        """Id of the token that ends a document."""
        return self.sources[0].store.manifest.separator

    @property
    def vocab_size(self) -> int:
        return self.sources[0].store.manifest.vocab_size

    @property
    def unigram_entropy_nats(self) -> float:
        """The loss of knowing only the frequencies of tokens (in a mixture, in each source)."""
        return sum(s.share * s.store.manifest.unigram_entropy_nats for s in self.sources)

    @property
    def fingerprint(self) -> str:
        """Identifies the content, wherever it lies, and the shares."""
        if len(self.sources) == 1:
            return self.sources[0].store.fingerprint
        return hash_json([[source.store.fingerprint, source.share] for source in self.sources])


def single(store: Store) -> Dataset:
    """One store by itself."""
    return Dataset(store.path, (Source(store.path.name, 1.0, store),))


def open_text(path: str | Path) -> Dataset:
    """Open a prepared store or mixture.

    Raises:
        InvalidConfig: one problem for each file that is missing, damaged or replaced.
    """
    folder = Path(path)
    if not (folder / MIXTURE_FILE).exists():
        return single(open_store(folder))
    listed = _read_mixture(folder)
    return Dataset(
        folder, tuple(Source(each.name, each.share, open_store(each.store)) for each in listed)
    )


def mixture_stores(folder: Path) -> list[Path]:
    """Return the directories of a mixture's stores.

    Raises:
        InvalidConfig: ``mixture.json`` is damaged.
    """
    return [Path(each.store) for each in _read_mixture(folder)]


@dataclass(frozen=True)
class _Listed:
    """One entry of ``mixture.json``."""

    name: str
    share: Annotated[float, Field(gt=0, le=1)]
    store: str


def _read_mixture(folder: Path) -> list[_Listed]:
    try:
        data = (folder / MIXTURE_FILE).read_bytes()
        return TypeAdapter(Annotated[list[_Listed], Field(min_length=1)]).validate_json(data)
    except OSError as error:
        rule = f"{MIXTURE_FILE} cannot be read: {error.strerror}"
    except (ValidationError, RecursionError):
        rule = f"{MIXTURE_FILE} is not what weft wrote"
    raise InvalidConfig([damaged(folder, rule)])


def write_mixture(weights: Mapping[str, float], stores: Sequence[Store], folder: Path) -> Dataset:
    """The mixture of prepared texts, kept below ``folder``.

    Args:
        weights: of each text, by its path, in any unit.
        stores: of the texts, in the same order, all of one tokenizer.
    """
    whole = sum(weights.values())
    listed = [
        {"name": name, "share": weight / whole, "store": str(store.path.absolute())}
        for name, weight, store in zip(
            source_names(list(weights)), weights.values(), stores, strict=True
        )
    ]
    data = json.dumps(listed, indent=1).encode()
    place = folder / xxh3_128_hexdigest(data)
    if not (place / MIXTURE_FILE).exists():
        place.mkdir(parents=True, exist_ok=True)
        write_durably(place / TOKENIZER_FILE, (stores[0].path / TOKENIZER_FILE).read_bytes())
        write_durably(place / MIXTURE_FILE, data)
    return open_text(place)


def source_names(paths: Sequence[str]) -> list[str]:
    """A short name for each path: its last part without endings, or else the whole path."""
    short = [Path(path.rstrip("/")).name.partition(".")[0] or path for path in paths]
    return [
        name if short.count(name) == 1 else path for name, path in zip(short, paths, strict=True)
    ]
