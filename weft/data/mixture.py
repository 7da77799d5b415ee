"""Write the mixture of several prepared stores."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from xxhash import xxh3_128_hexdigest

from weft.config.files import write_durably
from weft.data.dataset import MIXTURE_FILE, Dataset, open_dataset
from weft.data.token_store import TOKENIZER_FILE, Store


def write_mixture(
    weights: Mapping[str, float], stores: Sequence[Store], parent_dir: Path
) -> Dataset:
    """Write the mixture of prepared stores below ``parent_dir``.

    Args:
        weights: positive weights by path, of any sum.
        stores: in the order of ``weights``, all of one tokenizer.
        parent_dir: the mixture gets a directory in it, named by its content.
    """
    total = sum(weights.values())
    entries = [
        {"name": name, "share": weight / total, "store": str(store.path.absolute())}
        for name, weight, store in zip(
            derive_source_names(list(weights)), weights.values(), stores, strict=True
        )
    ]
    data = json.dumps(entries, indent=1).encode()
    directory = parent_dir / xxh3_128_hexdigest(data)
    if not (directory / MIXTURE_FILE).exists():
        directory.mkdir(parents=True, exist_ok=True)
        write_durably(directory / TOKENIZER_FILE, (stores[0].path / TOKENIZER_FILE).read_bytes())
        write_durably(directory / MIXTURE_FILE, data)
    return open_dataset(directory)


def derive_source_names(paths: Sequence[str]) -> list[str]:
    """Return a short name per path: its stem, or the full path if ambiguous."""
    short = [Path(path.rstrip("/")).name.partition(".")[0] or path for path in paths]
    return [
        name if short.count(name) == 1 else path for name, path in zip(short, paths, strict=True)
    ]
