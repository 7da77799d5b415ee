"""A planted bug in what must not be wrong fails a test: loss, clipping, order of data, commits.

Each is put into a copy of the tree, where the tests that should notice it are run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent


class Bug(NamedTuple):
    """``right`` in a file becomes ``wrong``; ``tests`` are to notice."""

    file: str
    right: str
    wrong: str
    tests: str


BUGS = {
    # ---- the loss is a sum, divided once
    "a rank divides by its own tokens": Bug(
        "train/step.py",
        "count = self.mesh.sum_over_tokens(count)",
        "count = count * self.plan.dp_size",
        "tests/parallel/test_layouts.py",
    ),
    "a microbatch is divided by its own tokens": Bug(
        "train/step.py",
        "[self.objective.counts(batch).sum() for batch in batches]",
        "[self.objective.counts(batches[0]).sum() for batch in batches]",
        "tests/parallel/test_layouts.py",
    ),
    "what is left out counts": Bug(
        "train/loss.py",
        "ignore_index=IGNORE,",
        "ignore_index=0,",
        "tests/train/test_loss.py",
    ),
    # ---- one gradient norm over every axis
    "a shard's norm is taken for the whole": Bug(
        "optim/optimizer.py",
        "            dist.all_reduce(square, group=group)",
        "            pass",
        "tests/parallel/test_layouts.py",
    ),
    "a replicated gradient counts twice": Bug(
        "optim/optimizer.py",
        "if not placement.is_replicate() and mesh.size(axis) > 1",
        "if mesh.size(axis) > 1",
        "tests/parallel/test_layouts.py",
    ),
    "stages clip by their own norms": Bug(
        "optim/optimizer.py",
        "        dist.all_reduce(total, group=pipeline)",
        "        pass",
        "tests/parallel/test_layouts.py",
    ),
    # ---- which sample comes when
    "every epoch is in the same order": Bug(
        "data/order.py",
        "keys = _mix(_mix(start) + epoch.astype(np.uint64) * _GOLDEN)",
        "keys = _mix(_mix(start) + np.zeros_like(epoch).astype(np.uint64) * _GOLDEN)",
        "tests/data/test_loader.py",
    ),
    "ranks overlap": Bug(
        "data/loader.py",
        "first = consumed + begin * self.dp_size + self.dp_rank * share",
        "first = consumed + begin * self.dp_size + self.dp_rank * (share - 1)",
        "tests/data/test_loader.py",
    ),
    "a resumed run reads the same again": Bug(
        "train/loop.py",
        "rows = ahead.batch(at.samples, groups.place, groups.count)",
        "rows = ahead.batch(at.samples - first * job.train.global_batch, 0, 1)",
        "tests/train/test_loop.py tests/checkpoint/test_saver.py",
    ),
    # ---- a checkpoint counts when it is whole
    "a checkpoint is written in its place": Bug(
        "checkpoint/store.py",
        'temporary = final.with_name(f".tmp-{final.name}-{unique}")',
        "temporary = final",
        "tests/checkpoint/test_saver.py tests/checkpoint/test_store.py",
    ),
    "nobody looks at the hash of a file": Bug(
        "checkpoint/shards.py",
        'return f"{name} is not what was written: its hash is another"',
        "pass",
        "tests/checkpoint/test_damage.py tests/checkpoint/test_store.py",
    ),
    "the newest is deleted instead of the oldest": Bug(
        "checkpoint/store.py",
        "kept = checkpoints(folder)[-keep:]",
        "kept = checkpoints(folder)[:keep]",
        "tests/checkpoint/test_store.py tests/checkpoint/test_saver.py",
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_noticed(name: str, tmp_path: Path) -> None:
    bug = BUGS[name]
    for folder in ("weft", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    path = tmp_path / "weft" / bug.file
    source = path.read_text("utf-8")
    assert source.count(bug.right) == 1, "the code is another: plant the bug where it is now"
    path.write_text(source.replace(bug.right, bug.wrong), "utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", *bug.tests.split()],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr
    assert "1 failed" in done.stdout
