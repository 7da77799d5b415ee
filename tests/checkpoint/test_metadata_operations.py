"""Metadata operations of steps and checkpoints, which a metadata server does for all nodes.

A file system such as FSx for Lustre has a rate of them for the whole cluster, which does not grow
with its size.  So directories and renames must not be more with more ranks.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_ranks
from tests.small import before_each_step, this_rank, train_rank

KINDS = {
    "os.mkdir": "mkdir",
    "os.rename": "rename",
    "os.link": "link",
    "os.remove": "unlink",
    "os.rmdir": "rmdir",
    "os.listdir": "list",
    "os.scandir": "list",
}


def train_and_count(run_dir: str, store: str, results: str) -> None:
    """Train; write the operations of this process before, and in, each step."""
    counts: list[Counter[str]] = [Counter()]

    def note(event: str, args: tuple[Any, ...]) -> None:
        if (event != "open" and event not in KINDS) or not isinstance(args[0], str | Path):
            return
        path, is_in_open_directory = (
            str(args[0]),
            event == "os.remove" and args[-1] not in (-1, None),
        )
        if not (path.startswith(run_dir) or is_in_open_directory):
            return
        kind = KINDS.get(event, "open")
        exists = os.path.lexists(path)
        if kind == "mkdir" and exists:
            return  # the client knows, without the server
        if kind == "open" and not exists and args[2] & os.O_CREAT:
            kind = "create"
        counts[-1][kind] += 1

    before_each_step(lambda step: counts.append(Counter()))
    sys.addaudithook(note)
    overrides = [
        *(("run.dir", run_dir), ("train.steps", "8"), ("train.global_batch_size", "4")),
        *(("checkpoint.interval", "3"), ("checkpoint.keep_latest", "1")),
        *(("checkpoint.async_save", "false"), ("monitor.log_interval", "1")),
    ]
    train_rank(overrides, store)
    Path(results, f"{this_rank().rank}.json").write_text(json.dumps(counts))


@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_operations_do_not_grow_with_the_ranks(
    ranks: int, store_path: Path, tmp_path: Path
) -> None:
    results = tmp_path / "results"
    results.mkdir()
    run_ranks(train_and_count, ranks, str(tmp_path / "run"), str(store_path), str(results))
    counts = [json.loads(file.read_text()) for file in sorted(results.iterdir())]
    start, step, save = (
        sum((Counter(rank[index]) for rank in counts), Counter()) for index in (0, 5, 6)
    )
    # Step 6 saves: a new directory, a file of each rank and the manifest, the rename that commits,
    # and the deletion of the checkpoint of step 3, which another rename hides first.
    assert {kind: save[kind] for kind in ("mkdir", "rename", "rmdir", "link")} == {
        "mkdir": 1,
        "rename": 2,
        "rmdir": 1,
        "link": 0,
    }
    assert save["create"] == save["unlink"] == ranks + 1
    # An ordinary step appends to metrics.jsonl, on rank 0, and opens nothing else.
    assert step == {"open": 1}
    assert (start["rename"], start["link"]) == (2, 1)
