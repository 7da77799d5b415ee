"""A run on one host listens on the loopback interface only."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.commands import Started, free_port, processes_in

LISTENING = "0A"


def sockets_of(process: int) -> set[str]:
    """Return the hexadecimal addresses on which a process listens."""
    inodes = set()
    for handle in Path(f"/proc/{process}/fd").iterdir():
        try:
            inodes.add(handle.readlink().name.removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue  # the descriptor is closed
    results = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and fields[9] in inodes:
                results.add(fields[1].partition(":")[0])
    return results


@pytest.mark.timeout(300, method="signal")
def test_train_on_one_host_listens_on_loopback_only(arguments: list[str], tmp_path: Path) -> None:
    """Prometheus can read the metrics there."""
    address = f"127.0.0.1:{free_port()}"
    command = [*arguments, "--train.steps", "100000", "--monitor.log_interval", "1"]
    command += ["--monitor.prometheus", address]
    visited: set[str] = set()
    run = Started(command, tmp_path)
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            for process in processes_in(tmp_path):
                try:
                    visited |= sockets_of(process)
                except OSError:
                    continue  # the process has ended
            log = tmp_path / "run/metrics.jsonl"
            if log.exists() and len(log.read_text().splitlines()) > 5:
                with urlopen(f"http://{address}/metrics") as answer:
                    page = answer.read().decode()
                break
            time.sleep(0.2)
    finally:
        run.send_signal(signal.SIGKILL)
    assert log.exists(), "it did not train"
    assert 'weft_step{run="run"} ' in page
    assert "weft_node_cpu_ratio" in page
    assert visited, "nothing was seen to listen: the test sees nothing"
    assert visited == {"0100007F"}, f"listens beyond the loopback interface: {visited}"
