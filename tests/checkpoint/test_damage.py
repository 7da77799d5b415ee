"""Any damage to a checkpoint is detected, and the previous one is loaded."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.test_manager import full_state, save, stepped
from tests.harness import RankError, run_ranks
from tests.small import read_state
from weft.checkpoint import manifest, safetensors
from weft.checkpoint import shard_files as shards
from weft.checkpoint.fingerprint import fingerprint, wrap_int64
from weft.checkpoint.load import load_checkpoint
from weft.checkpoint.manifest import (
    CheckpointError,
    DamagedCheckpoint,
    list_checkpoints,
    manifest_text,
    read_manifest,
)
from weft.checkpoint.state_dict import trainable_parameters
from weft.training.state import resume

SHAPE = (5, 6, 7)


# --------------------------------------------------------------------------- fingerprints


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_fingerprint_of_shards_sums_to_the_whole(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (1000 * torch.randn(SHAPE, dtype=torch.float64)).to(dtype)
    single = int(fingerprint(x, (0, 0, 0), SHAPE))
    for dim, size in enumerate(SHAPE):
        for at in range(size + 1):
            parts = [x.narrow(dim, 0, at), x.narrow(dim, at, size - at)]
            begins = [[0, 0, 0], [at if d == dim else 0 for d in range(3)]]
            sums = [int(fingerprint(p, b, SHAPE)) for p, b in zip(parts, begins, strict=True)]
            assert wrap_int64(sum(sums)) == single


@pytest.mark.parametrize("shape", [(), (5,), (5, 6), (4, 5, 3)])
def test_fingerprint_of_chunks_is_the_weighted_sum(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensor has several chunks, of which the last is shorter."""
    monkeypatch.setattr("weft.checkpoint.fingerprint.CPU_CHUNK", 7)
    x = torch.randn(shape)
    words = x.view(torch.int32).flatten().tolist()
    expected = wrap_int64(sum(word * (2 * position + 1) for position, word in enumerate(words)))
    assert int(fingerprint(x, [0] * x.dim(), shape)) == expected


def test_fingerprint_one_bit_or_an_exchange_changes_it() -> None:
    torch.manual_seed(0)
    x = torch.randn(64)
    before = int(fingerprint(x, (0,), (64,)))
    visited = {before}
    for i in range(64):
        for bit in range(32):
            y = x.clone()
            y.view(torch.int32)[i] ^= -(1 << 31) if bit == 31 else 1 << bit
            visited.add(int(fingerprint(y, (0,), (64,))))
    assert len(visited) == 1 + 64 * 32
    for i in range(63):
        y = x.clone()
        y[[i, i + 1]] = x[[i + 1, i]]
        assert int(fingerprint(y, (0,), (64,))) != before
    scalar = torch.tensor(3.0)
    assert int(fingerprint(scalar, (), ())) == int(scalar.view(torch.int32))


# --------------------------------------------------------------------------- corruption


def save_two(directory: str) -> dict[str, torch.Tensor]:
    """Save steps 1 and 2; return the state of step 1."""
    parts, optimizer = stepped(1e-3)
    save(Path(directory), parts, optimizer, {"step": 1, "samples": 8}, keep=9)
    first = full_state(parts, optimizer)
    for _, param in trainable_parameters(parts):
        param.grad = torch.randn_like(param.data)
    optimizer.step()
    save(Path(directory), parts, optimizer, {"step": 2, "samples": 16}, keep=9)
    return first


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    run_ranks(save_two, 2, str(directory))
    return directory


@pytest.fixture
def saved(saved_once: Path, tmp_path: Path) -> Path:
    """Copy a run with steps 1 and 2 of two ranks, for a test that damages it."""
    return Path(shutil.copytree(saved_once, tmp_path / "checkpoints"))


def flip(path: Path, source: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[source.randrange(len(content))] ^= 1 << source.randrange(8)
    path.write_bytes(content)


def blank(path: Path, source: random.Random) -> None:
    """Overwrite a page that is not zero with zeros."""
    content = bytearray(path.read_bytes())
    while True:
        at = source.randrange(len(content))
        end = min(at + 4096, len(content))
        if any(content[at:end]):
            content[at:end] = bytes(end - at)
            return change_nothing(path.write_bytes(content))


def cut(path: Path, source: random.Random) -> None:
    os.truncate(path, source.randrange(path.stat().st_size))


def append(path: Path, source: random.Random) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def lengthen(path: Path, source: random.Random) -> None:
    content = path.read_bytes()
    at = source.randrange(len(content))
    path.write_bytes(content[:at] + source.randbytes(8) + content[at:])


def restore_old_version(path: Path, source: random.Random) -> None:
    shutil.copy(path.parent.parent / "step-00000001" / path.name, path)


def swap(path: Path, source: random.Random) -> None:
    other = next(p for p in path.parent.glob("shard-*.safetensors") if p != path)
    path.rename(path.with_suffix(".old"))
    other.rename(path)
    path.with_suffix(".old").rename(other)


def remove(path: Path, source: random.Random) -> None:
    path.unlink()


def change_nothing(unused: object) -> None:
    pass


OF_SHARDS = [
    (flip, 250),
    (blank, 120),
    (cut, 60),
    (lengthen, 40),
    (append, 2),
    (restore_old_version, 4),
    (swap, 2),
    (remove, 4),
]
OF_MANIFEST = [
    (flip, 200),
    (blank, 10),
    (cut, 40),
    (lengthen, 20),
    (restore_old_version, 1),
    (remove, 1),
]


def corrupt(directory: str, times: float) -> tuple[int, list[str]]:
    """Corrupt step 2 in every way and resume; return (count, undetected corruptions)."""
    home = Path(directory)
    parts, optimizer = stepped(1.0)
    source = random.Random(0)
    spare = home.parent / "spare"
    shutil.copytree(home / "step-00000002", spare)
    expected = torch.load(home.parent / "first.pt")
    completed, unnoticed = 0, []
    files = [f"shard-0000{rank}.safetensors" for rank in range(2)]
    kinds: list[tuple[Callable[..., None], int, list[str]]] = [
        *((kind, count, files) for kind, count in OF_SHARDS),
        *((kind, count, ["manifest.json"]) for kind, count in OF_MANIFEST),
    ]
    for kind, count, names in kinds:
        for _ in range(max(1, int(count * times))):
            name = source.choice(names)
            kind(home / "step-00000002" / name, source)
            messages: list[str] = []
            at = resume(home, "off", parts, optimizer, messages.append)
            state = full_state(parts, optimizer)
            exact = all(state[key].equal(value) for key, value in expected.items())
            if at.step != 1 or not exact or "step-00000002" not in "".join(messages):
                unnoticed.append(f"{kind.__name__} of {name}: step {at.step}, {messages}")
            completed += 1
            for aside in home.glob("damaged-*"):
                shutil.rmtree(aside)
            shutil.rmtree(home / "step-00000002", ignore_errors=True)
            shutil.copytree(spare, home / "step-00000002")
    # The undamaged checkpoint is loaded.
    assert resume(home, "off", parts, optimizer, unnoticed.append).step == 2
    return completed, unnoticed


def corruptions(tmp_path: Path, times: float) -> int:
    home = tmp_path / "checkpoints"
    torch.save(run_ranks(save_two, 2, str(home))[0], tmp_path / "first.pt")
    ((completed, unnoticed),) = run_ranks(corrupt, 1, str(home), times, timeout=280)
    assert unnoticed == []
    return completed


def test_resume_corrupted_checkpoint_falls_back_exactly(tmp_path: Path) -> None:
    assert corruptions(tmp_path, 0.05) >= 38


@pytest.mark.slow
def test_resume_corrupted_checkpoint_falls_back_seven_hundred_times(tmp_path: Path) -> None:
    assert corruptions(tmp_path, 1.0) >= 700


def resume_all(directory: str) -> tuple[int, list[str], dict[str, torch.Tensor]]:
    parts, optimizer = stepped(1.0)
    messages: list[str] = []
    at = resume(Path(directory), "off", parts, optimizer, messages.append)
    return at.step, messages, full_state(parts, optimizer)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_resume_damaged_shard_all_ranks_fall_back(ranks: int, tmp_path: Path) -> None:
    """Ranks whose own shard is intact also fall back."""
    first = run_ranks(save_two, 2, str(tmp_path))[0]
    flip(tmp_path / "step-00000002/shard-00001.safetensors", random.Random(1))
    for step, messages, state in run_ranks(resume_all, ranks, str(tmp_path)):
        assert step == 1
        assert all(state[name].equal(tensor) for name, tensor in first.items())
        assert "shard-00001.safetensors differs from what was written" in messages[0]
        assert messages[1] == "resuming from step 1, not 2"
    names = sorted(os.listdir(tmp_path))
    assert names[0].startswith("damaged-step-00000002")
    assert names[1:] == ["step-00000001"]


def test_resume_all_damaged_is_refused(tmp_path: Path) -> None:
    run_ranks(save_two, 2, str(tmp_path))
    for path in list_checkpoints(tmp_path):
        flip(path / "shard-00000.safetensors", random.Random(2))
    with pytest.raises(RankError, match="none of the run's checkpoints is intact"):
        run_ranks(resume_all, 2, str(tmp_path))


def test_load_tensor_changed_before_writing_is_refused(tmp_path: Path) -> None:
    """Files and hashes agree with each other but not with the saved tensor."""
    run_ranks(save_otherwise, 1, str(tmp_path))
    with pytest.raises(RankError, match="differs from what was saved, but its file is intact"):
        run_ranks(load_newest, 1, str(tmp_path))


def save_otherwise(directory: str) -> None:
    raw = safetensors.tensor_bytes

    def changed(tensor: torch.Tensor) -> memoryview:
        return raw(tensor + (tensor.dim() == 1))

    safetensors.tensor_bytes = changed
    parts, optimizer = stepped(1e-3)
    save(Path(directory), parts, optimizer, {"step": 1, "samples": 8}, keep=9)


def load_newest(directory: str) -> None:
    parts, optimizer = stepped(1.0)
    load_checkpoint(list_checkpoints(Path(directory))[-1], parts, optimizer)


# --------------------------------------------------------------------------- hostile manifests


def change_of(manifest: dict[str, Any], name: str, value: Any) -> None:
    tensor = next(iter(manifest["tensors"].values()))
    if name == "file":
        manifest["files"][0]["name"] = value
    elif name.startswith("header"):
        manifest["files"][0][name] = value
    elif name == "position":
        tensor["shards"][0][3] = value
    elif name == "sizes":
        tensor["shards"][0][1] = value
    elif name == "shards":
        tensor["shards"] = value
    else:
        tensor[name] = value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("file", "../../outside.safetensors"),
        ("file", "/etc/passwd"),
        ("file", "shard-00000.safetensors/../../x"),
        ("file", None),
        ("header_bytes", -8),
        ("header_bytes", 10**15),
        ("header_bytes", "8"),
        ("header_xxh3", "?"),
        ("position", -4),
        ("position", 8),
        ("position", 10**15),
        ("position", 0.5),
        ("sizes", [10**9, 10**9]),
        ("sizes", [True, 1]),
        ("shards", []),
        ("shards", "all"),
        ("dtype", "object"),
        ("dtype", "__class__"),
        ("shape", [-1, 32]),
        ("shape", [10**12, 10**12]),
        ("fingerprint", "0"),
        ("fingerprint", 1 << 64),
    ],
)
def test_parse_contents_hostile_table_is_refused(name: str, value: Any, saved: Path) -> None:
    """The manifest has a valid hash, which anybody can compute."""
    path = list_checkpoints(saved)[-1]
    rewrite_manifest(path, lambda content: change_of(content, name, value))
    with pytest.raises(shards.CorruptData):
        shards.parse_contents(read_manifest(path), path)
    if name == "file":
        with pytest.raises(RankError, match="step-00000002: its table of contents"):
            run_ranks(load_newest, 1, str(saved))


def rewrite_manifest(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest, and give it a valid hash."""
    content = read_manifest(path)
    del content["hash"]
    change(content)
    (path / "manifest.json").write_text(manifest_text(content))


def test_load_exchanged_tensors_in_the_table_are_refused(saved: Path) -> None:
    """Shape and fingerprint fit the other tensor; only the header of the file names them."""

    def exchange(content: dict[str, Any]) -> None:
        table = content["tensors"]
        first, second = (f"optim.embed_tokens.weight.exp_avg{end}" for end in ("", "_sq"))
        table[first], table[second] = table[second], table[first]

    rewrite_manifest(list_checkpoints(saved)[-1], exchange)
    with pytest.raises(RankError, match="has other tensors than its table of contents"):
        run_ranks(load_newest, 1, str(saved))


def test_load_deeply_nested_table_is_refused(saved: Path) -> None:
    nested: list[Any] = []
    for _ in range(900):
        nested = [nested]
    rewrite_manifest(list_checkpoints(saved)[-1], lambda content: content["files"].append(nested))
    with pytest.raises(RankError, match=r"DamagedCheckpoint: .*nested too deeply"):
        run_ranks(load_newest, 1, str(saved))


def test_load_damaged_header_is_refused(saved: Path) -> None:
    """weft reads positions from the manifest, other tools from the header."""
    path = list_checkpoints(saved)[-1]
    file = path / "shard-00001.safetensors"
    content = file.read_bytes()
    file.write_bytes(content.replace(b'"saved_offsets', b'"saved_offsetz', 1))
    assert file.read_bytes() != content
    with pytest.raises(RankError, match=r"shard-00001\.safetensors.*hash of its header"):
        run_ranks(load_newest, 2, str(saved))


def test_save_writes_safetensors_that_other_tools_read(saved_once: Path) -> None:
    """No file of a checkpoint is a pickle; the library and torch find all parts."""
    from safetensors import safe_open
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    (_, path) = list_checkpoints(saved_once)
    names = sorted(file.name for file in path.iterdir())
    assert names == ["manifest.json", "shard-00000.safetensors", "shard-00001.safetensors"]
    expected = read_state(path)
    seen = {name: torch.full_like(tensor, torch.nan) for name, tensor in expected.items()}
    for name in names[1:]:
        with safe_open(path / name, "pt") as file:
            boxes = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for key in file.keys():  # noqa: SIM118  # it is not a dict
                assert boxes[key]["global_shape"] == list(expected[key].shape)
                part = file.get_tensor(key)
                box = zip(boxes[key]["saved_offsets"], part.shape, strict=True)
                seen[key][tuple(slice(begin, begin + size) for begin, size in box)] = part
    by_torch = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    load(by_torch, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    for name, tensor in expected.items():
        assert seen[name].equal(tensor), name
        assert by_torch[name].equal(tensor), name


@pytest.mark.parametrize("dtype", safetensors.NAMES)
def test_write_shards_of_any_dtype_round_trip(dtype: torch.dtype, tmp_path: Path) -> None:
    """Odd sizes of narrow dtypes follow wide ones, so that all of them are aligned."""
    from safetensors.torch import load_file

    values = torch.arange(35).view(5, 7).to(dtype)
    scalar, empty = torch.tensor(1).to(dtype), torch.empty(0, 3).to(dtype)
    tensors = {"matrix": values, "scalar": scalar, "empty": empty, "wide": torch.ones(3).double()}
    staged = [
        shards.StagedShard(n, t.dtype, t.shape, (0,) * t.dim(), t.shape, [t])
        for n, t in sorted(tensors.items(), key=lambda pair: -pair[1].itemsize)
    ]
    entries = shards.write_shards(tmp_path / "shard-00000.safetensors", staged)
    contents = shards.parse_contents(shards.build_contents([entries]), tmp_path)
    shards.check_files(contents)
    ours = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    overlaps = {
        name: [*shards.find_overlaps(contents.tensors[name], [0] * tensor.dim(), tensor)]
        for name, tensor in ours.items()
        if tensor.numel()
    }
    shards.read_shards(contents, overlaps)
    theirs = load_file(tmp_path / "shard-00000.safetensors")
    for name, tensor in tensors.items():
        for read in (ours[name], theirs[name]):
            assert read.dtype == tensor.dtype
            assert safetensors.tensor_bytes(read) == safetensors.tensor_bytes(tensor), name


def test_resume_disk_error_is_not_reported_as_damage(saved: Path) -> None:
    run_ranks(refuse_reading, 2, str(saved))
    run_ranks(refuse_a_manifest, 1, str(saved))
    assert sorted(os.listdir(saved)) == ["step-00000001", "step-00000002"]


def refuse_a_manifest(directory: str) -> None:
    def refused(path: Path, most: int) -> bytes:
        raise OSError(5, "Input/output error", str(path))

    manifest.read_regular_file = refused  # type: ignore[attr-defined]
    parts, optimizer = stepped(1.0)
    with pytest.raises(CheckpointError, match=r"manifest.json cannot be read.*error") as caught:
        resume(Path(directory), "off", parts, optimizer, print)
    assert not isinstance(caught.value, DamagedCheckpoint)


def refuse_reading(directory: str) -> None:
    def refused(*args: Any) -> torch.Tensor:
        raise OSError(5, "Input/output error")

    if dist.get_rank() == 1:
        shards.read_chunks = refused
    parts, optimizer = stepped(1.0)
    with pytest.raises(CheckpointError, match=r"rank 1: OSError.*Input/output error") as caught:
        resume(Path(directory), "off", parts, optimizer, print)
    assert not isinstance(caught.value, DamagedCheckpoint)
