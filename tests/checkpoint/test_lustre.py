"""Lustre: layouts, hydration, and what weft says where a file system lacks something.

The outputs of ``lfs`` are recorded ones: those of an FSx file system with Lustre 2.15, of Polaris,
and of the Lustre manual.  The ``lfs`` here is a program that prints them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lustre_mount import DF, ONE_STRIPE, lfs_calls, make_lfs, missing, mounted
from tests.small import small_job
from weft.checkpoint import lustre
from weft.checkpoint.lustre import (
    count_osts,
    count_released,
    create_checkpoint_dir,
    describe_layout,
    has_one_stripe,
    hydrate,
    hydrate_when_reading,
    layout_arguments,
    parse_layout,
    parse_released,
)
from weft.config.errors import ConfigError, InvalidConfig
from weft.config.locks import lock_directory
from weft.config.mounts import find_mount
from weft.data.prepare import prepare_data
from weft.doctor.node_checks import check_directories
from weft.doctor.node_facts import Facts
from weft.doctor.probes import probe_directory
from weft.preparation.job_checks import check_writable

# Components of a directory's layout, with start, end, stripes and pattern.
COMPONENT = """\
    lcme_id:             N/A
    lcme_mirror_id:      N/A
    lcme_flags:          0
    lcme_extent.e_start: {}
    lcme_extent.e_end:   {}
      stripe_count:  {}       stripe_size:   1048576       pattern:       {}       stripe_offset: -1

"""
HEAD = "  lcm_layout_gen:    0\n  lcm_mirror_count:  1\n  lcm_entry_count:   {}\n"
FSX = HEAD.format(4) + "".join(
    COMPONENT.format(*fields, "raid0")
    for fields in (
        (0, 104857600, 1),
        (104857600, 10737418240, 8),
        (10737418240, 107374182400, 16),
        (107374182400, "EOF", 32),
    )
)
DATA_ON_MDT = "testdir1\n" + HEAD.format(2)
DATA_ON_MDT += COMPONENT.format(0, 65536, 0, "mdt") + COMPONENT.format(65536, "EOF", -1, "raid0")
OLD = "/mnt/x\nstripe_count:   4 stripe_size:    1048576 stripe_offset:  -1\n"
FILE = """\
/mnt/testfs/domdir/normfile
lmm_stripe_count:  2
lmm_stripe_size:   1048576
lmm_pattern:       raid0
lmm_layout_gen:    0
lmm_stripe_offset: 1
  obdidx   objid   objid   group
       1              3           0x3              0
       0              3           0x3              0
"""


@pytest.fixture
def lfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a stand-in of ``lfs`` on PATH, with ``tmp_path`` on Lustre; return its directory."""
    here = make_lfs(tmp_path / "lfs-bin")
    (here / "getstripe").unlink()
    monkeypatch.setenv("PATH", f"{here}:{os.environ['PATH']}")
    mounts = tmp_path / "mountinfo"
    line = f"41 22 0:36 / {tmp_path} rw,relatime - lustre fs@tcp:/x rw,flock\n"
    mounts.write_text("22 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard\n" + line)
    monkeypatch.setattr("weft.config.mounts.MOUNTS_FILE", mounts)
    return here


# --------------------------------------------------------------------------- stripes


@pytest.mark.parametrize(
    ("text", "layout", "description"),
    [
        (FSX, [1, 8, 16, 32], "progressive: 1, 8, 16, 32 stripes"),
        (DATA_ON_MDT, [0, -1], "progressive: 0, all stripes"),
        (ONE_STRIPE, [1], "1 stripe"),
        (OLD, [4], "4 stripes"),
        (FILE, [2], "2 stripes"),
        ("/mnt/x has no stripe info\n", [], ""),
    ],
)
def test_layout_of_recorded_output(text: str, layout: list[int], description: str) -> None:
    assert parse_layout(text) == layout
    assert has_one_stripe(layout) == (text == ONE_STRIPE)
    assert not layout or describe_layout(layout) == description
    assert has_one_stripe([0])  # the default, which is one stripe


@pytest.mark.parametrize(
    ("osts", "arguments"),
    [
        (2, "-E 100M -c 1 -E -1 -c 2"),
        (8, "-E 100M -c 1 -E -1 -c 8"),
        (12, "-E 100M -c 1 -E 10G -c 8 -E -1 -c 12"),
        (100, "-E 100M -c 1 -E 10G -c 8 -E 100G -c 16 -E -1 -c 32"),
    ],
)
def test_layout_has_at_most_all_osts(osts: int, arguments: str) -> None:
    assert " ".join(layout_arguments(osts)) == arguments
    assert count_osts(DF) == 5


@pytest.mark.system
def test_new_directory_with_one_stripe_gets_a_progressive_layout(lfs: Path, tmp_path: Path) -> None:
    (lfs / "getstripe").write_text(ONE_STRIPE)
    lines: list[str] = []
    home = tmp_path / "run/checkpoints"
    create_checkpoint_dir(home, lines.append)
    assert lfs_calls(lfs) == [
        f"getstripe -d {home}",
        f"df {home}",
        f"setstripe -E 100M -c 1 -E -1 -c 5 {home}",
    ]
    assert len(lines) == 1
    assert "is on Lustre: set a progressive layout of 1 to 5 stripes" in lines[0]
    create_checkpoint_dir(home, lines.append)  # it may be the user's own layout
    assert len(lines) == 1
    assert len(lfs_calls(lfs)) == 3


@pytest.mark.system
@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda lfs: (lfs / "getstripe").write_text(FSX), "keeps its default layout (progressive"),
        (lambda lfs: (lfs / "getstripe").write_text(OLD), "keeps its default layout (4 stripes)"),
        (lambda lfs: (lfs / "lfs").unlink(), "lfs is not installed"),
        (lambda lfs: None, "does not show its layout"),
    ],
)
def test_new_directory_keeps_another_layout(
    prepare: Callable[[Path], Any], words: str, lfs: Path, tmp_path: Path
) -> None:
    prepare(lfs)
    lines: list[str] = []
    create_checkpoint_dir(tmp_path / "checkpoints", lines.append)
    assert len(lines) == 1
    assert words in lines[0]
    assert not lfs_calls(lfs, "setstripe")
    assert (tmp_path / "checkpoints").is_dir()


def test_directory_elsewhere_is_not_created(tmp_path: Path) -> None:
    lines: list[str] = []
    create_checkpoint_dir(tmp_path / "checkpoints", lines.append)
    assert not (tmp_path / "checkpoints").exists()
    assert lines == []


# --------------------------------------------------------------------------- hydration


def test_released_files_of_recorded_output() -> None:
    text = (
        "a: b: (0x0000000d) released exists archived, archive_id:1\n"
        "here: (0x00000009) exists archived, archive_id:1\n"
        "new: (0x00000000)\n"
        "other: (0x0000000d) released exists archived, archive_id:1\n"
    )
    assert parse_released(text, ["a: b", "here", "new"]) == ["a: b"]


@pytest.mark.system
def test_hydrate_requests_released_files_in_batches(
    lfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lustre, "FILES_PER_CALL", 2)
    data = tmp_path / "data"
    data.mkdir()
    for name in ("a.s3", "b.s3", "c.txt", "d.txt", "e.s3"):
        (data / name).write_text("word " * 10)
    lines: list[str] = []
    locations = [str(data), f"{data}/*.txt", "s3://bucket/x", str(data / "missing"), "/etc/hosts"]
    hydrate(locations, lines.append)
    assert lfs_calls(lfs, "hsm_restore") == [
        f"hsm_restore {data}/a.s3 {data}/b.s3",
        f"hsm_restore {data}/e.s3",
    ]
    assert not [call for call in lfs_calls(lfs, "hsm_state") if "/etc" in call]
    assert lines == ["asked Lustre to load 3 files (150 bytes) from S3, ahead of reading them"]
    assert count_released([str(data)], 4) == (2, 4)
    hydrate([str(data / "c.txt")], lines.append)
    assert len(lines) == 1


def test_prepared_data_are_not_requested_again(
    lfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a preparation reads the data; the tokens of a prepared source are elsewhere."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {n} of a small text\n" for n in range(2000)))
    data = small_job(("data.path", str(text))).data
    wanted: list[list[str]] = []
    monkeypatch.setattr(lustre, "hydrate_ahead", lambda paths, log: wanted.append(list(paths)))
    for _ in range(2):
        report = hydrate_when_reading(data, lambda progress: None, print)
        prepare_data(data, tmp_path / "cache", report)
    assert wanted == [[str(text)]]


# --------------------------------------------------------------------------- doctor and refusals


@pytest.mark.system
def test_doctor_reports_layout_and_released_files(lfs: Path, tmp_path: Path) -> None:
    (lfs / "getstripe").write_text(ONE_STRIPE)
    directory = probe_directory("checkpoint.dir", tmp_path, 1 << 20)
    assert (directory.kind, directory.layout) == ("lustre", (1,))
    assert directory.renames > 0
    (tmp_path / "x.s3").write_text("text")
    released = count_released([str(tmp_path / "x.s3")], 10)
    facts = Facts(directories=(directory,), released=released)
    findings = {finding.observation: finding for finding in check_directories(facts)}
    (stripe,) = (text for text in findings if "one stripe" in text)
    assert findings[stripe].severity == "note"
    assert findings["1 of 1 files have their contents only in S3"].check == "data.path (lustre)"


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Path]:
    if reason := missing():
        pytest.skip(reason)
    with mounted(tmp_path / "backing", tmp_path / "bucket", "--type", "mountpoint-s3"):
        yield tmp_path / "bucket"


@pytest.mark.system
def test_mounted_bucket_is_refused_with_a_remedy(bucket: Path) -> None:
    assert find_mount(bucket / "new")[:2] == ("fuse", "mountpoint-s3")
    (bucket / "new").write_text("x")
    with pytest.raises(OSError, match="not implemented"):
        (bucket / "new").rename(bucket / "other")
    for key, remedy in (
        ("run.dir", "use a directory of a shared file system"),
        ("checkpoint.dir", "use s3://bucket/prefix"),
        ("data.cache_dir", "data.path may stay there"),
    ):
        (error,) = check_writable(key, str(bucket / "run"))
        assert (error.key, error.value) == (key, str(bucket / "run"))
        assert "is in a bucket mounted by Mountpoint for Amazon S3" in error.rule
        assert remedy in error.remedy
    assert "Mountpoint" in probe_directory("run.dir", bucket, 1 << 20).error


@pytest.fixture
def lockless(tmp_path: Path) -> Iterator[Path]:
    if reason := missing():
        pytest.skip(reason)
    with mounted(tmp_path / "backing", tmp_path / "lustre", "--no-flock"):
        yield tmp_path / "lustre"


@pytest.mark.system
def test_directory_without_flock_is_refused_with_a_remedy(lockless: Path, tmp_path: Path) -> None:
    for key in ("run.dir", "data.cache_dir"):
        (error,) = check_writable(key, str(lockless / "new"))
        assert error.rule == "has no file locks (flock: Function not implemented)"
        assert "Lustre: option flock" in error.remedy
    assert check_writable("checkpoint.dir", str(lockless / "new")) == []
    in_use = ConfigError("run.dir", "run", "is in use", "wait")
    words = r"run\.dir=.*has no file locks.*option flock"
    with pytest.raises(InvalidConfig, match=words), lock_directory(lockless / "run", in_use):
        pass
    (tmp_path / "text.txt").write_text("a text\n" * 1000)
    data = small_job(("data.path", str(tmp_path / "text.txt"))).data
    with pytest.raises(InvalidConfig, match=r"data\.cache_dir=.*has no file locks"):
        prepare_data(data, lockless / "cache")
    assert not probe_directory("run.dir", lockless, 1 << 20).locks
