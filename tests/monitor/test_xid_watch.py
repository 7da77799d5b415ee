"""Errors of the driver during a run, by the real pynvml on a fake NVML library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import fake_nvml
from tests.commands import processes_in
from weft.monitor import nvml
from weft.monitor.xid_watch import describe_xid, watch_xids

# NVML must be found when the process starts; the directory is that of the processes.
PROGRAM = """
import sys, time
from pathlib import Path
from weft.monitor.xid_watch import watch_xids
warnings = []
with watch_xids(Path("run"), warnings.append):
    print("watching", flush=True)
    deadline = time.monotonic() + float(sys.argv[2])
    while len(warnings) < int(sys.argv[1]) and time.monotonic() < deadline:
        time.sleep(0.05)
print(*warnings, sep="\\n")
"""


def start(directory: Path, nvml_dir: Path, values: str, *arguments: str) -> subprocess.Popen[str]:
    (directory / "run").mkdir()
    variables = os.environ | fake_nvml.environment(nvml_dir, values)
    command = [sys.executable, "-c", PROGRAM, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=directory, env=variables, stdout=pipe, text=True)


@pytest.mark.system
def test_xids_during_a_run_are_warnings_and_events_of_the_run(
    tmp_path: Path, nvml_dir: Path
) -> None:
    process = start(tmp_path, nvml_dir, "lost.2 15\n", "2", "60")
    assert process.stdout is not None
    assert process.stdout.readline() == "watching\n"
    fake_nvml.environment(nvml_dir, "xid.3 79\nxid.5 31\n")
    output, _ = process.communicate(timeout=90)
    first, second = output.splitlines()
    assert first.startswith("warning: node ")
    assert first.endswith(": GPU 3: the driver reported Xid 79, fell off the bus")
    assert second.endswith(": GPU 5: the driver reported Xid 31, see NVIDIA's catalog")
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").open()]
    assert [(event["kind"], f"warning: {event['text']}") for event in events] == [
        ("warning", first),
        ("warning", second),
    ]
    assert not processes_in(tmp_path)


@pytest.mark.system
@pytest.mark.parametrize("values", ["", "init 18\n", "hang 1\n", "count 0\n"])
def test_xid_watch_without_errors_or_with_a_broken_driver_does_not_disturb(
    values: str, tmp_path: Path, nvml_dir: Path
) -> None:
    process = start(tmp_path, nvml_dir, values, "1", "1")
    assert process.communicate(timeout=60)[0] == "watching\n\n"
    assert process.returncode == 0
    assert not processes_in(tmp_path)


def test_xid_watch_without_nvml_starts_nothing(tmp_path: Path) -> None:
    if nvml.has_nvml():
        pytest.skip("this machine has NVML")
    with watch_xids(tmp_path, print):
        pass
    assert [*tmp_path.iterdir()] == []


def test_describe_xid_names_the_fatal_ones() -> None:
    assert describe_xid(48) == "the driver reported Xid 48, double-bit memory error"
