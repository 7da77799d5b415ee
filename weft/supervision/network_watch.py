"""Report the network that NCCL uses, in the first steps of a run on several nodes.

NCCL falls back to TCP without an error.  On several nodes with GPUs weft therefore makes NCCL log
its network to ``logs/nccl-HOST-PID.log``, one file per rank.  The launcher of each node, or the
first rank of a node that another launcher started, reads these files in a thread.  The first node
prints the network.  A node that has RDMA adapters and does not use them, or not fully, prints a
warning, which is also an event of the run.
"""

from __future__ import annotations

import glob
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from weft.config.accelerators import GPU, supports
from weft.doctor.failure_signatures import explain_failure_logs, find_signatures, read_log
from weft.doctor.nccl_log import merge_logs, parse_nccl_log
from weft.doctor.network_checks import judge_network
from weft.doctor.network_probes import ADAPTERS_DIR, list_adapters, probe_efa
from weft.doctor.node_facts import Facts, Finding
from weft.monitor.event_log import note_event
from weft.monitor.jsonl import last_logged_step

THREAD_NAME, POLL_SECONDS = "network watch", 0.5
# NCCL connects while the first step runs; then the log stays the same for this long.
QUIET_SECONDS = 2.0
MAX_LOGS = 64  # of NCCL, to search after a failure


def enable_nccl_log(run_dir: Path, environment: MutableMapping[str, str]) -> None:
    """Make NCCL log its network to files, unless the user has set NCCL_DEBUG."""
    if not {"NCCL_DEBUG", "NCCL_DEBUG_FILE"} & environment.keys():
        directory = str(run_dir.absolute() / "logs").replace("%", "%%")
        environment["NCCL_DEBUG"] = "INFO"
        environment["NCCL_DEBUG_FILE"] = f"{directory}/nccl-%h-%p.log"
        environment.setdefault("NCCL_DEBUG_SUBSYS", "INIT,NET")


def nccl_log_pattern(environment: Mapping[str, str]) -> str:
    """Return a glob pattern for the logs of this node's ranks; empty: no logs."""
    level, file = environment.get("NCCL_DEBUG", ""), environment.get("NCCL_DEBUG_FILE", "")
    if level.upper() not in ("INFO", "TRACE") or not file:
        return ""
    host = socket.gethostname().partition(".")[0]  # as NCCL does
    parts = glob.escape(file).split("%%")
    return "%".join(part.replace("%h", glob.escape(host)).replace("%p", "*") for part in parts)


def print_warning(text: str) -> None:
    """Print a warning to the launcher's stderr."""
    print(f"weft: {text}", file=sys.stderr, flush=True)


def watch_network(
    run_dir: Path,
    ranks: int,
    log: Callable[[str], object],
    warn: Callable[[str], object] = print_warning,
) -> AbstractContextManager[None]:
    """Return a context in which a thread reports the network of this node's ranks.

    Args:
        run_dir: its event log gets warnings.
        ranks: number of ranks of this node.
        log: receives the network if there is nothing to warn of.
        warn: receives warnings, on every node.
    """
    pattern = nccl_log_pattern(os.environ)
    return NetworkWatch(run_dir, pattern, ranks, log, warn).run() if pattern else nullcontext()


def watch_launched_ranks(
    run_dir: Path, device: str, log: Callable[[str], object], warn: Callable[[str], object]
) -> AbstractContextManager[None]:
    """Watch the network in a rank that another launcher started, before NCCL starts.

    Only the first rank of each node reports, as `watch_network` does.
    """
    size = int(os.environ["WORLD_SIZE"])
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE") or size)
    if local_size == size:
        return nullcontext()
    if supports(device, "NCCL"):
        enable_nccl_log(run_dir, os.environ)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return nullcontext()
    return watch_network(run_dir, local_size, log, warn)


def collect_network_facts() -> Facts:
    """Collect the facts of this node that matter to the network."""
    return Facts(device=GPU, adapters=tuple(list_adapters(ADAPTERS_DIR)), **probe_efa(os.environ))


@dataclass
class NetworkWatch:
    """A reader of the logs that match a pattern, and that NCCL writes from now on.

    The other arguments are those of `watch_network`.
    """

    run_dir: Path
    pattern: str
    ranks: int
    log: Callable[[str], object]
    warn: Callable[[str], object]

    def __post_init__(self) -> None:
        self._old = self._stamps()  # logs of earlier starts
        self._texts: dict[str, str] = {}
        self._current: dict[str, int] = {}

    def _stamps(self) -> dict[str, int]:
        stamps = {}
        for path in glob.glob(self.pattern):
            with suppress(OSError):
                stamps[path] = os.stat(path).st_mtime_ns
        return stamps

    def read(self) -> bool:
        """Read what NCCL has written; return True if it is more than before."""
        stamps = {p: time for p, time in self._stamps().items() if self._old.get(p) != time}
        changed = [path for path, time in stamps.items() if self._current.get(path) != time]
        self._texts |= {path: read_log(Path(path)) for path in changed}
        self._current = stamps
        return bool(changed)

    def judge(self, facts: Facts, is_quiet: bool) -> Finding | None:
        """Return a finding about the network; None: NCCL has not logged enough."""
        logs = [log for log in map(parse_nccl_log, self._texts.values()) if log.network]
        if not logs:
            return None
        merged = merge_logs(logs)
        finding = judge_network(merged, facts)
        is_connected = bool(merged.gpudirect_channels or merged.host_channels)
        is_complete = len(logs) >= self.ranks and is_connected and is_quiet
        return finding if finding.severity == "bad" or is_complete else None

    def report(self, finding: Finding, facts: Facts) -> None:
        """Print a finding, and add it to the events if it is a warning."""
        if finding.severity in ("ok", "note"):
            self.log(finding.observation)
            return
        text = f"node {socket.gethostname()}: {finding.observation}"
        found = [*find_signatures("\n".join(self._texts.values()), facts)]
        text += f". {found[0].cause[0].upper()}{found[0].cause[1:]}" if found else ""
        text += f". Remedy: {found[0].remedy if found else finding.remedy}"
        note_event(self.run_dir, "warning", last_logged_step(self.run_dir), text)
        self.warn(f"warning: {text}")

    @contextmanager
    def run(self) -> Iterator[None]:
        """Watch in a thread, until the network is reported or the context ends."""
        is_over = threading.Event()

        def watch() -> None:
            facts, quiet = collect_network_facts(), 0.0
            while not is_over.wait(POLL_SECONDS):
                quiet = 0.0 if self.read() else quiet + POLL_SECONDS
                if finding := self.judge(facts, quiet >= QUIET_SECONDS):
                    self.report(finding, facts)
                    return

        thread = threading.Thread(target=watch, daemon=True, name=THREAD_NAME)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join(2 * POLL_SECONDS)


def name_known_failures(log: Path, message: str) -> list[str]:
    """Return lines that name the known failures which explain a rank's failure.

    Args:
        log: log of the rank that failed.
        message: its error.
    """
    pattern = nccl_log_pattern(os.environ)
    paths = [log, *map(Path, sorted(glob.glob(pattern), key=_mtime)[-MAX_LOGS:])]
    return explain_failure_logs([message, *map(read_log, paths)], collect_network_facts())


def _mtime(path: str) -> float:
    with suppress(OSError):
        return os.stat(path).st_mtime
    return 0.0
