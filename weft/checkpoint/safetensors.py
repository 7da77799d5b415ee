"""The safetensors format: a file's table, read and written, so that its bytes can be streamed.

    8 bytes, little-endian: the length of the table
    the table, JSON: {NAME: {"dtype": "BF16", "shape": [4, 8], "data_offsets": [0, 64]}, ...}
    the elements of each tensor, row by row, without gaps

The library of that name takes all of a file's tensors in memory to write it, and maps a local file
to read it.  Here neither is wanted: models are larger than memory, and stores need not be local.
The tests read what is written here with the library, and the other way round.

A table from elsewhere is data that nobody has vouched for: it is checked whole before it is used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple

import torch

MOST_BYTES = 100_000_000  # of a table, as in the library

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Malformed(Exception):
    """Not what it should be; the message says what."""


class Entry(NamedTuple):
    """A tensor in a file: ``begin`` is the first byte, counted from the file's beginning."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


def table(tensors: Mapping[str, torch.Size], dtype: torch.dtype) -> bytes:
    """The beginning of a file whose tensors follow in the order of ``tensors``."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        begin, end = end, end + shape.numel() * dtype.itemsize
        entries[name] = {
            "dtype": NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the elements are aligned
    return len(text).to_bytes(8, "little") + text


def read_table(file: BinaryIO, size: int) -> dict[str, Entry]:
    """The tensors of a file of ``size`` bytes.

    Raises:
        Malformed: unless they make up the file, each with the bytes that it needs.
    """
    length = int.from_bytes(file.read(8), "little")
    _check(length <= size - 8, f"has {size:,} bytes, which its table alone does not fit in")
    _check(length <= MOST_BYTES, f"its table of {length:,} bytes is too long")
    tree = parse_json(file.read(length))
    _check(isinstance(tree.pop("__metadata__", {}), dict), "its metadata is none")
    found: list[tuple[int, int, str, Entry]] = []
    for name, value in tree.items():
        what = f"tensor {json.dumps(name)[:100]}"
        right = isinstance(value, dict) and value.keys() == {"dtype", "shape", "data_offsets"}
        _check(right, f"{what} has not just dtype, shape and data_offsets")
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        _check(isinstance(dtype, str) and dtype in DTYPES, f"{what} is of an unknown dtype")
        _check(_is_list_of_sizes(shape) and len(shape) <= 8, f"{what} has a shape that is none")
        right = _is_list_of_sizes(offsets) and len(offsets) == 2
        _check(right, f"{what} has offsets that are none")
        begin, end = offsets
        needed = math.prod(shape) * DTYPES[dtype].itemsize
        _check(end - begin == needed, f"{what} needs {needed:,} bytes and has {end - begin:,}")
        found.append((begin, end, name, Entry(DTYPES[dtype], tuple(shape), 8 + length + begin)))
    at = 0
    for begin, end, name, _ in sorted(found):
        how = "overlaps the one before" if begin < at else "leaves a gap before it"
        _check(begin == at, f"tensor {json.dumps(name)[:100]} {how}")
        at = end
    _check(8 + length + at == size, f"has {size:,} bytes, and its table says {8 + length + at:,}")
    return {name: entry for _, _, name, entry in found}


def parse_json(text: bytes) -> dict[str, Any]:
    """A JSON object without repeated names.

    Raises:
        Malformed: if it is none.
    """
    try:
        tree = json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"is no JSON: {str(error)[:200]}") from error
    _check(isinstance(tree, dict), "is no JSON object")
    return dict(tree)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        raise ValueError("a name that comes twice in one object")
    return tree


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _is_list_of_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _check(right: bool, what: str) -> None:
    if not right:
        raise Malformed(what)
