"""Random damage to a checkpoint: the load is exact, falls back or is refused.

Mutated manifests get a valid hash, which anybody can compute.  Positions and shapes in them are
compared with the headers of the files.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.test_manager import full_state, stepped
from tests.harness import run_ranks
from weft.checkpoint.manager import CheckpointManager
from weft.checkpoint.manifest import CheckpointError, manifest_text
from weft.checkpoint.state_dict import trainable_parameters
from weft.config.schema import ResilienceSection
from weft.monitor.anomaly import AnomalyDetector
from weft.training.state import TrainState, resume

MEMORY_BYTES = 2 << 30  # limit of additional memory for one load
SECONDS = 5.0  # limit of processor time for one load


def nest(levels: int) -> Any:
    tree: Any = []
    for _ in range(levels):
        tree = [tree]
    return tree


VALUES: list[Any] = [
    *(None, True, False, -1, 0, 1, 3, 2**31, 2**53, 2**63 - 1, 2**63, 2**70, -(2**63), 10**400),
    *(0.5, 1e308, -0.0, "", "x", "2", "../../etc/passwd", "/dev/zero", "A" * 10_000, "\ud800"),
    *([], {}, [[]], {"a": 1}, [0] * 1000, nest(50), nest(900), "int32", "float64", "bfloat16"),
]


def mutate_tree(tree: Any, source: random.Random) -> Any:
    """Change, remove, repeat or exchange one value of a JSON tree, at any depth."""
    tree = json.loads(json.dumps(tree))
    node = tree
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = source.choice(keys)
        inner = node[key]
        if not (isinstance(inner, dict | list) and inner and source.random() < 0.8):
            break
        node = inner
    match source.randrange(6):
        case 0:
            del node[key]
        case 1 if isinstance(node, list):
            node.append(inner)
        case 2:
            other = source.choice(keys)
            node[key], node[other] = node[other], node[key]
        case 3 if isinstance(inner, int | float):
            node[key] = inner + source.choice((-1, 1, 0.5, -inner * 2 - 1, 10**6))
        case _:
            node[key] = source.choice(VALUES)
    return tree


def rehashed(path: Path, source: random.Random) -> None:
    manifest = json.loads(path.read_text())
    del manifest["hash"]
    tree = manifest
    for _ in range(source.choice((1, 1, 1, 2, 3))):
        tree = mutate_tree(tree, source)
        if not tree:
            return
    path.write_text(manifest_text(tree))


def nested(path: Path, source: random.Random) -> None:
    path.write_text(source.choice(("[", '{"a":', '{"step": [')) * source.randrange(500, 200_000))


def flip(path: Path, source: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(source.choice((1, 1, 8))):
        content[source.randrange(len(content))] ^= 1 << source.randrange(8)
    path.write_bytes(content)


def overwrite_randomly(path: Path, source: random.Random) -> None:
    path.write_bytes(source.randbytes(source.randrange(3000)))


def cut(path: Path, source: random.Random) -> None:
    os.truncate(path, source.randrange(path.stat().st_size))


def append_bytes(path: Path, source: random.Random) -> None:
    os.truncate(path, path.stat().st_size + source.choice((1, 4096, 1 << 40)))


def insert(path: Path, source: random.Random) -> None:
    content = path.read_bytes()
    at = source.randrange(len(content))
    path.write_bytes(content[:at] + source.randbytes(source.randrange(1, 9)) + content[at:])


def relink(path: Path, source: random.Random) -> None:
    """Replace a file by something that is not a regular file, such as a link to its content."""
    aside = path.parent.parent / "outside"
    path.rename(aside)
    match source.randrange(6):
        case 0:
            path.symlink_to(aside)
        case 1:
            path.symlink_to("/dev/zero")
        case 2:
            path.symlink_to(path.name)
        case 3:
            os.mkfifo(path)
        case 4:
            path.mkdir()


ANY_FILE = [flip, cut, append_bytes, insert, overwrite_randomly, relink]
OF_JSON = [rehashed] * 12 + [nested]


def next_step(parts: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    for _, param in trainable_parameters(parts):
        param.grad = torch.randn_like(param.data)
    optimizer.step()
    return full_state(parts, optimizer)


def is_sound(at: TrainState, step: int) -> bool:
    AnomalyDetector(ResilienceSection(on_anomaly="skip"), at.anomaly_state)
    is_integer = type(at.step) is type(at.samples) is int
    return is_integer and at.step == step and step <= at.samples < 2**53


def is_elsewhere(newest: Path) -> bool:
    """Return True if a node lost its manifest, or its branch was abandoned."""
    try:
        (manifest,) = [json.loads(path.read_text()) for path in newest.glob("*.json")]
    except (OSError, ValueError):
        return not any(newest.glob("*.json"))
    return manifest.get("epoch", 0) != 1


def fuzz(directory: str, seed: int, count: int, local: bool) -> tuple[list[str], dict[str, int]]:
    """Damage the newest shared or local checkpoint and resume, many times.

    Returns:
        The failures, and the number of times of each outcome.
    """
    home, nodes = Path(directory) / "checkpoints", Path(directory) / "nodes"
    parts, optimizer = stepped(1e-3)
    saver = CheckpointManager(home, 9, local_dir=str(nodes) if local else "off")
    saver.acquire_lease(0)
    states, watch = {}, {"loss": [5.0, 4.5], "gradient norm": [1.0, 0.9], "in_a_row": 0}
    for step in (1, 2):
        states[step] = next_step(parts, optimizer)
        manifest = {"step": step, "samples": 8 * step, "anomaly_state": watch, "mesh": {"pp": 1}}
        saver.save(parts, optimizer, manifest, persistent=step == 1 or not local)
        saver.close()
    newest = home / "step-00000002"
    if local:
        (newest,) = nodes.glob("*/*-00000002")
    spare = Path(directory) / "spare"
    shutil.copytree(newest, spare)
    at = resume(home, str(nodes) if local else "off", parts, optimizer, print)
    assert is_sound(at, 2)

    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, resource.RLIM_INFINITY))
    source, wrong, outcomes = random.Random(seed), [], {"exact": 0, "before": 0, "refused": 0}
    files = sorted(path.name for path in newest.iterdir())
    for number in range(count):
        name = source.choice(files)
        kinds: list[Callable[[Path, random.Random], None]] = [*ANY_FILE]
        kinds += OF_JSON if name.endswith(".json") else []
        kind = source.choice(kinds)
        kind(newest / name, source)
        messages: list[str] = []
        start_time, problem = time.process_time(), ""
        try:
            at = resume(home, str(nodes) if local else "off", parts, optimizer, messages.append)
        except CheckpointError as error:
            outcomes["refused"] += 1
            problem = "" if len(str(error)) < 5000 else "a message without end"
        except BaseException:
            problem = traceback.format_exc()
        else:
            state = full_state(parts, optimizer)
            expected = states.get(at.step, {})
            exact = bool(expected) and all(state[k].equal(v) for k, v in expected.items())
            silent = at.step == 2 or bool(messages) or is_elsewhere(newest)
            if not (exact and is_sound(at, at.step) and silent):
                problem = f"resumed at step {at.step}, exact: {exact}, said: {messages}"
            outcomes["exact" if at.step == 2 else "before"] += 1
        if time.process_time() - start_time > SECONDS:
            problem += " it took too long"
        if problem:
            wrong.append(f"mutation {number}, {kind.__name__} of {name}: {problem}")
        for path in (*home.glob("damaged-*"), home / "outside", newest.parent / "outside"):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        shutil.rmtree(newest, ignore_errors=True)
        shutil.copytree(spare, newest)
    return wrong, outcomes


def run_fuzz(directory: Path, seed: int, count: int, local: bool) -> dict[str, int]:
    ((wrong, outcomes),) = run_ranks(fuzz, 1, str(directory), seed, count, local, timeout=800)
    assert wrong == []
    assert sum(outcomes.values()) == count
    return outcomes


@pytest.mark.parametrize(("local", "count"), [(False, 50), (True, 40)])
def test_resume_fuzzed_checkpoint_is_exact_or_falls_back(
    local: bool, count: int, tmp_path: Path
) -> None:
    outcomes = run_fuzz(tmp_path, 0, count, local)
    assert outcomes["before"] > count / 2, outcomes


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(1, 9))
def test_resume_fuzzed_checkpoint_many_seeds(seed: int, tmp_path: Path) -> None:
    run_fuzz(tmp_path, seed, 1000, bool(seed % 2))
