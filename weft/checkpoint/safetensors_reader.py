"""Open a safetensors file that need not be weft's, for an import."""

from __future__ import annotations

from pathlib import Path

from weft.checkpoint.safetensors import MAX_HEADER_BYTES, StoredTensor, parse_header
from weft.checkpoint.shard_files import Contents, Shard, StoredFile, TensorEntry
from weft.config.storage import CorruptData, read_range


def read_file_contents(path: Path) -> Contents:
    """Return the contents of a safetensors file that need not be weft's.

    Raises:
        CorruptData: if the file is missing or invalid, or cannot be read.
    """
    try:
        if not path.is_file():  # opening a FIFO would block
            raise CorruptData("is not a regular file" if path.exists() else "does not exist")
        file = StoredFile(path.resolve(), path.stat().st_size)  # the Hub's cache has links
        stored = _read_header(file.path, file.num_bytes)
    except OSError as error:
        raise CorruptData(f"cannot be read: {error.strerror}") from error
    tensors = {}
    for name, (dtype, shape, begin) in stored.items():
        shard = Shard((0,) * len(shape), shape, dtype, path.name, begin)
        tensors[name] = TensorEntry(dtype, shape, None, [shard])
    return Contents(path, tensors, {path.name: file})


def _read_header(path: Path, size: int) -> dict[str, StoredTensor]:
    """Read the header of a file of ``size`` bytes.

    Raises:
        CorruptData: unless the tensors fill the file exactly, each with the bytes it needs.
        OSError: if the file cannot be read.
    """
    length = int.from_bytes(read_range(path, 0, 8), "little")
    if length > size - 8:
        raise CorruptData(f"has {size:,} bytes, too few for its header of {length:,}")
    if length > MAX_HEADER_BYTES:
        raise CorruptData(f"has a header of {length:,} bytes, more than {MAX_HEADER_BYTES:,}")
    return parse_header(bytes(read_range(path, 8, 8 + length)), size)
