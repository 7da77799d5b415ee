"""The safetensors format, for shards of checkpoints, exports and imports.

    8 bytes, little-endian: the length of the header
    the header, JSON: {NAME: {"dtype": "BF16", "shape": [4, 8], "data_offsets": [0, 64]}, ...}
    the elements of each tensor, row-major, without gaps

The safetensors library needs all tensors of a file in memory to write it, and maps a local file to
read it.  weft streams: models can exceed memory, storage can be remote, and the hash of a file is
computed while it is written, without another copy.  Tests read weft's files with the library, and
the other way round.

A file can come from an untrusted source: `parse_header` validates all of the header before use.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from weft.config.storage import CorruptData

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


class StoredTensor(NamedTuple):
    """Tensor in a file; ``begin`` is its first byte, from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return a CPU tensor's elements as bytes; shares memory if it is contiguous."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


# --------------------------------------------------------------------------- writing


class FileLayout(NamedTuple):
    """Header of a file, and the positions of its tensors, known before their elements."""

    header: bytes
    tensors: dict[str, StoredTensor]
    num_bytes: int  # of the file

    def write(self, file: IO[bytes], rows: Iterable[Tensor]) -> str:
        """Write header and elements; return the hash of the file.

        Args:
            file: file that was just created.
            rows: the tensors in the order of the layout, or consecutive rows of them.
        """
        file.write(self.header)
        digest, written = xxhash.xxh3_128(self.header), len(self.header)
        for tensor in rows:
            content = tensor_bytes(tensor)
            file.write(content)
            digest.update(content)
            written += len(content)
        assert written == self.num_bytes, f"wrote {written:,} of {self.num_bytes:,} bytes"
        return digest.hexdigest()


def lay_out_file(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str]
) -> FileLayout:
    """Return the layout of a file.

    Args:
        tensors: dtype and shape by name.  Other readers need aligned tensors, so wider dtypes must
            precede narrower ones.
        metadata: texts for readers, in addition to the usual ``format``.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        assert end % dtype.itemsize == 0, f"{name} is not aligned"
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the elements are aligned
    start = 8 + len(text)
    stored = {
        name: StoredTensor(dtype, tuple(shape), start + header[name]["data_offsets"][0])
        for name, (dtype, shape) in tensors.items()
    }
    return FileLayout(len(text).to_bytes(8, "little") + text, stored, start + end)


# --------------------------------------------------------------------------- reading


def parse_header(text: bytes, size: int) -> dict[str, StoredTensor]:
    """Parse the JSON of a header, without the length before it.

    ``size`` is that of the file.

    Raises:
        CorruptData: unless the tensors fill the file exactly, each with the bytes it needs.
    """
    length, tree = len(text), parse_json(text)
    _check(isinstance(tree.pop("__metadata__", {}), dict), "has __metadata__ that is not an object")
    tensors: list[tuple[int, int, str, StoredTensor]] = []
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
            (begin, end, name, StoredTensor(DTYPES[dtype], tuple(shape), 8 + length + begin))
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
    return {name: tensor for _, _, name, tensor in tensors}


def parse_json(text: bytes, allow_constants: bool = False) -> dict[str, Any]:
    """Parse a JSON object without repeated names.

    Args:
        text: the object.
        allow_constants: allow NaN, Infinity and -Infinity, which Python writes into configurations.

    Raises:
        CorruptData: if the text is not such an object.
    """
    try:
        parse_constant = float if allow_constants else _no_constant
        tree = json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=parse_constant)
    except (ValueError, RecursionError) as error:
        raise CorruptData(f"is not JSON: {str(error)[:200]}") from error
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
        raise CorruptData(message)
