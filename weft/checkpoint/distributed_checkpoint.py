"""Read tensors of a directory that ``torch.distributed.checkpoint`` wrote.

The directory has ``.metadata``, which is a pickle, and ``*.distcp`` files with one saved tensor per
chunk.  PyTorch's reader unpickles ``.metadata`` without limits, which may run any code.  Here an
unpickler admits only the classes that describe tensors, and tensors load with ``weights_only``.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from weft.config.storage import CorruptData

METADATA = ".metadata"
# What describes tensors; other modules and names are refused.
NAMES = {
    "torch": {"Size", "device", "strided", "contiguous_format", "preserve_format", "memory_format"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
}


def is_distributed_checkpoint(directory: Path) -> bool:
    """Return True if ``torch.distributed.checkpoint`` wrote the directory."""
    return (directory / METADATA).is_file()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in NAMES.get(module, ()):
            return super().find_class(module, name)
        raise CorruptData(f"names {module}.{name}, which describes no tensor")


class DistributedCheckpoint(Mapping[str, torch.Tensor]):
    """Tensors by name, each read when it is used.

    Args:
        directory: of the checkpoint.

    Raises:
        CorruptData: ``.metadata`` cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            metadata = _Unpickler(io.BytesIO((directory / METADATA).read_bytes())).load()
            entries = metadata.state_dict_metadata.items()
            self._storage = metadata.storage_data or {}
        except CorruptData:
            raise
        except Exception as error:  # of any type, from a damaged pickle
            raise CorruptData(f"cannot be read: {type(error).__name__}: {error}") from error
        self.entries = {n: each for n, each in entries if isinstance(each, TensorStorageMetadata)}

    def __iter__(self) -> Any:
        """Return the names of the tensors."""
        return iter(self.entries)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self.entries)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Read one tensor from its chunks.

        Raises:
            CorruptData: a chunk is missing or damaged.
        """
        entry = self.entries[name]
        whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        covered = 0
        places = {
            (index.fqn, tuple(index.offset or ())): info for index, info in self._storage.items()
        }
        for chunk in entry.chunks:
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            info = places.get((name, offsets))
            if info is None:
                raise CorruptData(f"has no place for {name} at {offsets}")
            piece = self._read(info, name)
            if tuple(piece.shape) != sizes:
                raise CorruptData(f"has a chunk of {name} with the shape {tuple(piece.shape)}")
            ranges = (slice(start, start + n) for start, n in zip(offsets, sizes, strict=True))
            whole[tuple(ranges)] = piece
            covered += piece.numel()
        if covered < whole.numel():
            raise CorruptData(f"has only {covered:,} of the {whole.numel():,} numbers of {name}")
        return whole

    def _read(self, info: Any, name: str) -> torch.Tensor:
        path = (self.directory / info.relative_path).resolve()
        if path.parent != self.directory.resolve():
            raise CorruptData(f"has {name} outside of the directory")
        if getattr(info, "transform_descriptors", None):
            raise CorruptData(f"has {name} in a compressed form")
        try:
            with path.open("rb") as file:
                file.seek(info.offset)
                data = file.read(info.length)
            piece = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # of any type, from a damaged file
            reason = f"{type(error).__name__}: {error}"
            raise CorruptData(f"has {name}, which cannot be read: {reason}") from error
        assert isinstance(piece, torch.Tensor)
        return piece
