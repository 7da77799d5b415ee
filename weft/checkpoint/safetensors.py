"""Header of the safetensors format, so that the contents can be streamed.

    8 bytes, little-endian: the length of the header
    the header, JSON: {NAME: {"dtype": "BF16", "shape": [4, 8], "data_offsets": [0, 64]}, ...}
    the elements of each tensor, row-major, without gaps

The safetensors library needs all tensors of a file in memory to write it, and maps a local file to
read it.  weft does neither, because models can exceed memory and storage can be remote.  Tests
read weft's files with the library, and the other way round.

A file can come from an untrusted source: `read_header` validates all of the header before use.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple

import torch

MAX_HEADER_BYTES = 100_000_000  # as in the library

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


class InvalidSafetensors(Exception):
    """Invalid safetensors file; the message is a clause that follows the path."""


class SafetensorsEntry(NamedTuple):
    """Tensor in a file; ``begin`` is its first byte, from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


def format_header(tensors: Mapping[str, torch.Size], dtype: torch.dtype) -> bytes:
    """Return the header of a file whose tensors follow in the order of ``tensors``."""
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


def read_header(file: BinaryIO, size: int) -> dict[str, SafetensorsEntry]:
    """Read the header of a file of ``size`` bytes.

    Raises:
        InvalidSafetensors: unless the tensors fill the file exactly, each with the bytes it needs.
    """
    length = int.from_bytes(file.read(8), "little")
    _check(length <= size - 8, f"has {size:,} bytes, too few for its header of {length:,}")
    _check(
        length <= MAX_HEADER_BYTES,
        f"has a header of {length:,} bytes, more than {MAX_HEADER_BYTES:,}",
    )
    tree = parse_json(file.read(length))
    _check(isinstance(tree.pop("__metadata__", {}), dict), "has __metadata__ that is not an object")
    tensors: list[tuple[int, int, str, SafetensorsEntry]] = []
    for name, value in tree.items():
        label = f"tensor {json.dumps(name)[:100]}"
        is_valid = isinstance(value, dict) and value.keys() == {"dtype", "shape", "data_offsets"}
        _check(is_valid, f"{label} must have exactly dtype, shape and data_offsets")
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        _check(isinstance(dtype, str) and dtype in DTYPES, f"{label} has an unknown dtype")
        _check(_is_list_of_sizes(shape) and len(shape) <= 8, f"{label} has an invalid shape")
        is_valid = _is_list_of_sizes(offsets) and len(offsets) == 2
        _check(is_valid, f"{label} has invalid data_offsets")
        begin, end = offsets
        needed = math.prod(shape) * DTYPES[dtype].itemsize
        _check(end - begin == needed, f"{label} needs {needed:,} bytes and has {end - begin:,}")
        tensors.append(
            (begin, end, name, SafetensorsEntry(DTYPES[dtype], tuple(shape), 8 + length + begin))
        )
    position = 0
    for begin, end, name, _ in sorted(tensors):
        problem = "overlaps the previous one" if begin < position else "follows a gap"
        _check(begin == position, f"tensor {json.dumps(name)[:100]} {problem}")
        position = end
    _check(
        8 + length + position == size,
        f"has {size:,} bytes, but its header says {8 + length + position:,}",
    )
    return {name: entry for _, _, name, entry in tensors}


def parse_json(text: bytes) -> dict[str, Any]:
    """Parse a JSON object without repeated names.

    Raises:
        InvalidSafetensors: if the text is not such an object.
    """
    try:
        tree = json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidSafetensors(f"is not JSON: {str(error)[:200]}") from error
    _check(isinstance(tree, dict), "is not a JSON object")
    return dict(tree)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        raise ValueError("an object repeats a name")
    return tree


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _is_list_of_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _check(is_valid: bool, message: str) -> None:
    if not is_valid:
        raise InvalidSafetensors(message)
