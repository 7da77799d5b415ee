"""``weft doctor``, and the same before the ranks of a run start.

`weft.cluster.probes` and `weft.cluster.device_benchmark` gather facts, `weft.cluster.node_checks` judges them.  The
process itself uses no device: what hangs or dies there is a process of its own.
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

from weft.cluster import SICK
from weft.cluster.device_benchmark import measure
from weft.cluster.finding import SEVERITIES, Finding
from weft.cluster.node_checks import examine
from weft.cluster.node_facts import WAIT_SECONDS, Facts, gpus_in
from weft.cluster.probes import collect_facts, meet, try_endpoint, try_folder, try_store, versions
from weft.config.errors import ConfigError, InvalidConfig, WeftError
from weft.config.files import replace_text, write_json
from weft.config.schema import Job
from weft.config.schema import replace as changed
from weft.train.environment import PORT, detect_environment, reachable
from weft.train.run_dir import unwritable

MOST_RANKS = 4  # on a CPU, as `weft train` starts them
QUICK, FULL = 32 << 20, 1 << 30  # bytes that a folder or a store is tried with
WIDTH = 100  # of the screen
SICK_NODES = "sick"  # folder of a run


def gather(job: Job, full: bool = False, together: bool = True) -> Facts:
    """The facts of this node, for a job.

    Args:
        full: take more time: every pair of GPUs, larger files.
        together: with the other nodes of the job, if it has some; they must ask at the same time.

    Raises:
        InvalidConfig: if run.nodes cannot be read, or the environment contradicts itself.
    """
    counts, endpoint = nodes_of(job)
    facts = replace(collect_facts(), nodes=counts[-1], least_nodes=counts[0], endpoint=endpoint)
    gpus = visible_gpus(facts)
    on_gpu = job.run.device == "cuda" or (gpus > 0 and job.run.device == "auto")
    ranks = max(1, gpus if on_gpu else min(facts.usable, MOST_RANKS))
    device, size = "cuda" if on_gpu else "cpu", FULL if full else QUICK
    home = job.checkpoint.dir
    facts = replace(
        facts,
        device=device,
        measured=measure(device, ranks, max(1, facts.usable // ranks), full, WAIT_SECONDS),
        folders=tuple(try_folder(key, path, size) for key, path in folders(job)),
        stores=(try_store("checkpoint.dir", home, size),) if "://" in home else (),
    )
    if not endpoint or not together:
        return facts
    facts = replace(facts, meeting=try_endpoint(endpoint))
    if facts.meeting in ("free", "answers"):
        try:
            others = meet(endpoint, facts.nodes, versions(), WAIT_SECONDS)
        except WeftError:
            return replace(facts, meeting="nobody answers there as a launcher does")
        facts = replace(facts, others=tuple(others))
    return facts


def nodes_of(job: Job) -> tuple[Sequence[int], str]:
    """How many nodes a job may have, from the fewest to the most, and where they meet.

    Raises:
        InvalidConfig: see `gather`.
    """
    here = detect_environment(os.environ, str(job.run.nodes), job.run.rendezvous)
    if here.nodes == "1":
        return (1,), ""
    from weft.plan.resolve import node_range  # imports torch, which may be what is broken

    counts = node_range(changed(job, run={"nodes": here.nodes}))
    if not counts:
        rule, remedy = "is neither a number of nodes nor MIN:MAX", "use 4, or 1:4"
        raise InvalidConfig([ConfigError("run.nodes", here.nodes, rule, remedy)])
    if counts[-1] == 1 or not here.rendezvous:
        return counts, ""
    host, _, port = here.rendezvous.rpartition(":")
    return counts, f"{reachable(host)}:{port}" if host else f"{reachable(port)}:{PORT}"


def visible_gpus(facts: Facts) -> int:
    """How many of the GPUs there are a process may use: all, or those of CUDA_VISIBLE_DEVICES up to
    the first word that is none (Slurm's 'NoDevFiles', -1)."""
    there = len(gpus_in(facts.gpus)) or facts.device_files
    words = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(there)))).split(",")
    named = list(takewhile(re.compile(r"\s*(\d+|GPU-|MIG-)").match, words))
    return min(there, len(named))


def folders(job: Job) -> list[tuple[str, Path]]:
    """The folders that a job names, and where its run will be."""
    run = "runs" if job.run.dir == "auto" else job.run.dir
    named = {"run.dir": run, "checkpoint.dir": job.checkpoint.dir}
    named |= {
        "checkpoint.local_dir": job.checkpoint.local_dir,
        "data.cache_dir": job.data.cache_dir,
    }
    return [
        (key, Path(value).expanduser().absolute())
        for key, value in named.items()
        if value not in ("auto", "off") and "://" not in value
    ]


def to_json(facts: Facts, findings: Sequence[Finding], seconds: float) -> dict[str, Any]:
    """Everything, for programs."""
    found = [asdict(finding) for finding in findings]
    return {
        "host": facts.host,
        "time": time.time(),
        "seconds": round(seconds, 1),
        "bad": sum(finding.severity == "bad" for finding in findings),
        "findings": found,
        "facts": asdict(facts),
    }


def screen(facts: Facts, findings: Sequence[Finding], seconds: float) -> str:
    """Everything, for people: a finding a line, with its remedy below it."""
    width = max(len(finding.check) for finding in findings)
    lines = [
        f"{facts.host}, {time.strftime('%Y-%m-%d %H:%M:%S')}, looked at in {seconds:.1f} s",
        "",
    ]
    for one in findings:
        head = f"{one.severity:<8} {one.check:<{width}}  "
        for start, text in ((head, one.seen), (f"{'':{len(head)}}-> ", one.remedy)):
            after = " " * (len(head) + 3 * (start != head))
            lines += textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=after)
    return "\n".join([*lines, "", counted(findings)])


def counted(findings: Sequence[Finding]) -> str:
    """'1 bad, 2 warning, 17 ok'."""
    counts = {s: sum(one.severity == s for one in findings) for s in SEVERITIES[::-1]}
    return ", ".join(f"{count} {severity}" for severity, count in counts.items() if count)


# --------------------------------------------------------------------------- before a run


def preflight(job: Job, folder: Path, say: Callable[[str], object]) -> bool:
    """Whether this node may train; what was found is in the run's ``logs/doctor-HOST.json``.

    A node that may not is noted in the run's folder ``sick``, by the name that Slurm has for it,
    until a check of it finds nothing bad.

    Raises:
        WeftError: if nothing can be written there.
    """
    began = time.monotonic()
    facts = gather(job, together=False)
    findings = examine(facts)
    seconds = time.monotonic() - began
    log = folder / "logs" / f"doctor-{facts.host}.json"
    mark = folder / SICK_NODES / os.environ.get("SLURMD_NODENAME", facts.host)
    bad = [one for one in findings if one.severity == "bad"]
    try:
        for path in (log, mark):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_json(log, to_json(facts, findings, seconds))
        if bad:
            replace_text(mark, "".join(f"{one.check}: {one.seen}\n" for one in bad))
        else:
            mark.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error
    if not bad:
        say(f"{facts.host} was checked in {seconds:.0f} s: {counted(findings)}; {log}")
        return True
    say(f"{facts.host} does not take part (exit status {SICK}):")
    for one in bad:
        say(f"  {one.check}: {one.seen}; {one.remedy}")
    say(f"  everything that was seen: {log}")
    return False
