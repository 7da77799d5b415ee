"""``weft doctor``, and the preflight check of a node before its ranks start.

`weft.doctor.probes` and `weft.doctor.device_benchmark` collect facts, and
`weft.doctor.node_checks` checks them.  This process never uses a device: the benchmark runs in
separate processes, which may hang or die.
"""

from __future__ import annotations

import os
import re
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from weft.checkpoint.lustre import count_released
from weft.config.accelerators import GPU
from weft.config.errors import ConfigError, InvalidConfig, WeftError
from weft.config.exit_statuses import UNHEALTHY
from weft.config.files import expand_path, replace_text, write_json
from weft.config.locks import unwritable_error
from weft.config.schema import Job
from weft.config.schema import replace as changed
from weft.doctor.device_benchmark import measure_devices
from weft.doctor.node_checks import run_checks
from weft.doctor.node_facts import SEVERITIES, WAIT_SECONDS, Facts, Finding, NetworkMeasurements
from weft.doctor.nvidia_tests import run_dcgm
from weft.doctor.probes import (
    collect_facts,
    exchange_with_nodes,
    package_versions,
    probe_directory,
    probe_endpoint,
    probe_store,
)
from weft.monitor.event_log import note_event
from weft.monitor.jsonl import last_logged_step
from weft.preparation.environment import PORT, detect_environment, reachable

RELEASED_SAMPLE = 1000  # files of data.path to examine

MAX_CPU_RANKS = 4  # the same limit as that of `weft train` on a CPU
QUICK_BYTES, FULL_BYTES = 32 << 20, 1 << 30  # bytes to write to each directory and store
LINGER_SECONDS = 1.0  # this process may host the store, and others still read it
WIDTH = 100  # characters per line of the report
UNHEALTHY_NODES_DIR = "unhealthy-nodes"  # in the run directory; Slurm scripts read it


def collect_job_facts(
    job: Job, full: bool = False, with_nodes: bool = True, with_network: bool = False
) -> Facts:
    """Collect the facts of this node that matter to a job.

    Args:
        job: decides device, number of nodes, and directories.
        full: run DCGM's diagnostic, measure every pair of GPUs, and use larger files.
        with_nodes: exchange facts with the job's other nodes, which must run this concurrently.
        with_network: also measure the network between the nodes, with the job's ranks.

    Raises:
        InvalidConfig: if run.nodes is invalid, or the environment contradicts itself.
    """
    counts, endpoint = resolve_rendezvous(job)
    facts = replace(collect_facts(), nodes=counts[-1], min_nodes=counts[0], endpoint=endpoint)
    gpus = count_visible_gpus(facts)
    uses_gpu = job.run.device == GPU or (gpus > 0 and job.run.device == "auto")
    ranks = max(1, gpus if uses_gpu else min(facts.usable, MAX_CPU_RANKS))
    device, size = GPU if uses_gpu else "cpu", FULL_BYTES if full else QUICK_BYTES
    home = job.checkpoint.dir
    dcgm, dcgm_error = run_dcgm() if full and uses_gpu and has_all_gpus(facts) else ((), "")
    facts = replace(
        facts,
        device=device,
        dcgm=dcgm,
        dcgm_error=dcgm_error,
        measured=measure_devices(device, ranks, max(1, facts.usable // ranks), full, WAIT_SECONDS),
        directories=tuple(probe_directory(key, path, size) for key, path in job_directories(job)),
        released=count_released(job.data.sources, RELEASED_SAMPLE) if with_nodes else (0, 0),
        stores=(probe_store("checkpoint.dir", home, size),) if "://" in home else (),
    )
    if not endpoint or not with_nodes:
        return facts
    facts = replace(facts, rendezvous_status=probe_endpoint(endpoint))
    if facts.rendezvous_status in ("free", "answers"):
        try:
            return _exchange_facts(facts, ranks, with_network)
        except WeftError:
            return replace(facts, rendezvous_status="no weft launcher answers there")
    return facts


def _exchange_facts(facts: Facts, ranks: int, with_network: bool) -> Facts:
    """Exchange facts with the other nodes; measure the network if all came.

    Raises:
        WeftError: if no host answers at the endpoint.
    """
    from weft.doctor.network_benchmark import measure_network
    from weft.preparation.rendezvous_store import connect_store

    store = connect_store(facts.endpoint, "doctor", (1, facts.nodes), WAIT_SECONDS)
    nodes = exchange_with_nodes(store, facts.nodes, package_versions(), WAIT_SECONDS)
    facts = replace(facts, joined_nodes=tuple(nodes))
    if with_network and len(nodes) == facts.nodes:
        ranks = ranks if facts.device == GPU else 1
        try:
            network = measure_network(store, facts.endpoint, facts.nodes, facts.device, ranks)
        except RuntimeError as error:  # torch's errors of a store whose host has ended
            text = f"the rendezvous endpoint {facts.endpoint} was lost: {type(error).__name__}"
            network = NetworkMeasurements(errors=(text,))
        facts = replace(facts, network=network)
    time.sleep(LINGER_SECONDS)
    return facts


def resolve_rendezvous(job: Job) -> tuple[Sequence[int], str]:
    """Return the numbers of nodes of a job, ascending, and its rendezvous endpoint.

    Raises:
        InvalidConfig: see `collect_job_facts`.
    """
    environment = detect_environment(os.environ, job.run.nodes_text, job.run.rendezvous)
    if environment.nodes == "1":
        return (1,), ""
    from weft.planning.resolve import (  # imports torch, whose installation may be broken
        MAX_NODES,
        node_range,
    )

    counts = node_range(changed(job, run={"nodes": environment.nodes}))
    if not counts:
        rule = f"is neither a number of nodes nor MIN:MAX (at most {MAX_NODES:,} nodes)"
        remedy = "use 4, or 1:4"
        raise InvalidConfig([ConfigError("run.nodes", environment.nodes, rule, remedy)])
    if counts[-1] == 1 or not environment.rendezvous:
        return counts, ""
    host, _, port = environment.rendezvous.rpartition(":")
    return counts, f"{reachable(host)}:{port}" if host else f"{reachable(port)}:{PORT}"


def count_visible_gpus(facts: Facts) -> int:
    """Return the number of GPUs that this process may use.

    As in CUDA, the first entry of CUDA_VISIBLE_DEVICES that is not a device (-1, or Slurm's
    'NoDevFiles') ends the list.
    """
    total = len(facts.gpus) or facts.device_files
    words = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(total)))).split(",")
    visible = list(takewhile(re.compile(r"\s*(\d+|GPU-|MIG-)").match, words))
    return min(total, len(visible))


def has_all_gpus(facts: Facts) -> bool:
    """Return True if this process may use all GPUs of the node, as DCGM does."""
    return count_visible_gpus(facts) == len(facts.gpus) == facts.device_files > 0


def job_directories(job: Job) -> list[tuple[str, Path]]:
    """Return the local directories of a job, with their configuration keys."""
    directories = {
        "run.dir": "runs" if job.run.dir == "auto" else job.run.dir,
        "checkpoint.dir": job.checkpoint.dir,
        "checkpoint.local_dir": job.checkpoint.local_dir,
        "data.cache_dir": job.data.cache_dir,
    }
    return [
        (key, expand_path(value).absolute())
        for key, value in directories.items()
        if value not in ("auto", "off") and "://" not in value
    ]


def to_json(facts: Facts, findings: Sequence[Finding], seconds: float) -> dict[str, Any]:
    """Return the facts and the findings as JSON values."""
    return {
        "host": facts.host,
        "time": time.time(),
        "seconds": round(seconds, 1),
        "bad": sum(finding.severity == "bad" for finding in findings),
        "findings": [asdict(finding) for finding in findings],
        "facts": asdict(facts),
    }


def format_report(facts: Facts, findings: Sequence[Finding], seconds: float) -> str:
    """Format the findings for the terminal: one per line, with its remedy below it."""
    width = max(len(finding.check) for finding in findings)
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    lines = [f"{facts.host}, {now}, checked in {seconds:.1f} s", ""]
    for finding in findings:
        head = f"{finding.severity:<8} {finding.check:<{width}}  "
        for start, text in ((head, finding.observation), (f"{'':{len(head)}}-> ", finding.remedy)):
            indent = " " * (len(head) + 3 * (start != head))
            lines += textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=indent)
    return "\n".join([*lines, "", count_by_severity(findings)])


def count_by_severity(findings: Sequence[Finding]) -> str:
    """Count the findings of each severity: '1 bad, 2 warning, 17 ok'."""
    counts = {s: sum(finding.severity == s for finding in findings) for s in SEVERITIES[::-1]}
    return ", ".join(f"{count} {severity}" for severity, count in counts.items() if count)


# --------------------------------------------------------------------------- before a run


def preflight(job: Job, run_dir: Path, log: Callable[[str], object]) -> bool:
    """Check this node; return True if it may train.

    All facts and findings go to ``logs/doctor-HOST.json`` of the run.  An unhealthy node gets a
    file in the run's `UNHEALTHY_NODES_DIR`, under Slurm's name for the node, until a later check
    has no bad finding.

    Raises:
        WeftError: if the run directory is not writable.
    """
    start = time.monotonic()
    facts = collect_job_facts(job, with_nodes=False)
    findings = run_checks(facts)
    seconds = time.monotonic() - start
    report = run_dir / "logs" / f"doctor-{facts.host}.json"
    marker = run_dir / UNHEALTHY_NODES_DIR / os.environ.get("SLURMD_NODENAME", facts.host)
    bad = [finding for finding in findings if finding.severity == "bad"]
    try:
        for path in (report, marker):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_json(report, to_json(facts, findings, seconds))
        if bad:
            replace_text(marker, "".join(f"{f.check}: {f.observation}\n" for f in bad))
        else:
            marker.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable_error(run_dir, error) from error
    if not bad:
        counts = count_by_severity(findings)
        log(f"checked node {facts.host} in {seconds:.0f} s: {counts}; report: {report}")
        return True
    observations = "; ".join(f"{finding.check}: {finding.observation}" for finding in bad)
    text = f"node {facts.host}: {observations}"
    note_event(run_dir, "unhealthy node", last_logged_step(run_dir), text)
    log(f"node {facts.host} is unhealthy and does not train (exit status {UNHEALTHY}):")
    for finding in bad:
        log(f"  {finding.check}: {finding.observation}; {finding.remedy}")
    log(f"  report: {report}")
    return False
