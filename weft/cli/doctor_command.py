"""Check that this machine is fit to train, and as fast as it should be.

The checks take some seconds and change nothing: devices, drivers, links, network adapters,
environment variables, limits, directories.

  weft doctor
  weft doctor --checkpoint.dir s3://bucket/run-7 --checkpoint.local_dir /dev/shm/$USER
  srun --nodes 2 --ntasks-per-node=1 weft doctor               also clocks and versions of all nodes
  srun --nodes 4 --ntasks-per-node=1 weft doctor --network     and the network between them
  weft doctor --logs runs/7                                    known failures in a run's logs
  weft doctor --image                                          the software of a container image

'weft train RECIPE --preflight' runs the checks on every node before its ranks start.  These keys
change what is checked: run.dir, run.nodes, run.rendezvous, run.device, checkpoint.dir,
checkpoint.local_dir, data.cache_dir.  docs/doctor.md lists the checks.

--network starts the ranks of all nodes, and measures each pair of nodes and an all-reduce.  It
names the network that NCCL uses, and slow nodes.  docs/efa.md explains the findings.

--logs reads logs, or all logs of a run directory, and names known failures of NCCL and EFA with
their remedies.  It checks nothing else.

--image checks only software: torch, NCCL's plug-in for EFA, extras, a compiler, and that every user
can start weft.  It needs neither a GPU nor a network, so an image can run it as its last step.

exit status: 0 nothing bad; 1 a bad finding; 2 a mistake in the arguments
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from weft.cli.command_parser import Commands, add_command
from weft.config.errors import MISSING, ConfigErrors
from weft.config.exit_statuses import FAILED
from weft.config.reader import read_job
from weft.config.schema import Job

DEFAULT_RECIPE = "demo"


def add_doctor(commands: Commands) -> None:
    """Add ``weft doctor``."""
    add = add_command(commands, "doctor", run_doctor, __doc__).add_argument
    text = "recipe whose directories, object store and nodes are checked"
    add("recipe", metavar="RECIPE", nargs="?", default=DEFAULT_RECIPE, help=text)
    text = "also test every pair of GPUs and larger files, and run DCGM's diagnostic of GPUs"
    add("--full", action="store_true", help=text)
    add("--json", action="store_true", help="print one JSON object instead")
    text = "with several nodes, also measure the network between them"
    add("--network", action="store_true", help=text)
    text = "find known failures of NCCL and EFA in a log or in the logs of a run directory"
    add("--logs", metavar="PATH", action="append", default=[], help=text)
    text = "check the software of a container image, without a GPU and a network"
    add("--image", action="store_true", help=text)


def run_doctor(options: argparse.Namespace) -> int:
    """Print the findings about this machine."""
    from weft.doctor.doctor import collect_job_facts, format_report, to_json
    from weft.doctor.network_checks import check_logs
    from weft.doctor.node_checks import run_checks
    from weft.doctor.probes import collect_facts

    began = time.monotonic()
    job, _, errors = read_job(options.recipe, options.overrides, options.errors)
    check_network_options(options, job, errors)
    if options.image:
        check_image_options(options, errors)
    errors.raise_any()
    if options.image:
        from weft.doctor.image_checks import check_image, collect_image

        facts = collect_facts()
        findings = check_image(facts, collect_image(os.environ))
    elif options.logs:
        facts = collect_facts()
        findings = list(check_logs(map(Path, options.logs), facts))
    else:
        facts = collect_job_facts(job, options.full, with_network=options.network)
        findings = run_checks(facts)
    result = (facts, findings, time.monotonic() - began)
    print(json.dumps(to_json(*result), indent=2) if options.json else format_report(*result))
    return FAILED if any(finding.severity == "bad" for finding in findings) else 0


def check_network_options(options: argparse.Namespace, job: Job, errors: ConfigErrors) -> None:
    """Add an error for a log that is not a file, and for --network on one node."""
    for path in options.logs:
        if not (Path(path).is_file() or Path(path).is_dir()):
            rule = "is not a file" if os.path.lexists(path) else "does not exist"
            errors.add("--logs", rule, "name a log file or a run directory", value=path)
    if options.network and not errors:
        from weft.doctor.doctor import resolve_rendezvous

        if not resolve_rendezvous(job)[1]:
            rule = "needs several nodes"
            remedy = "start weft doctor on each of them (srun), or set run.nodes and run.rendezvous"
            errors.add("--network", rule, remedy, value=MISSING)


def check_image_options(options: argparse.Namespace, errors: ConfigErrors) -> None:
    """Add an error for each option or key that --image would ignore."""
    ignored = [f"--{name}" for name in ("full", "network", "logs") if getattr(options, name)]
    ignored += [f"--{key}" for key, _ in options.overrides]
    ignored += [options.recipe] if options.recipe != DEFAULT_RECIPE else []
    for word in ignored:
        errors.add(word, "has no effect on --image", "remove it", value=MISSING)
