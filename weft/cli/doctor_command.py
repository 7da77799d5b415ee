"""Check that this machine is fit to train, and as fast as it should be.

The checks take some seconds and change nothing: devices, drivers, links, network adapters,
environment variables, limits, directories.

  weft doctor
  weft doctor --checkpoint.dir s3://bucket/run-7 --checkpoint.local_dir /dev/shm/$USER
  srun --nodes 2 --ntasks-per-node=1 weft doctor               also clocks and versions of all nodes

'weft train RECIPE --preflight' runs the checks on every node before its ranks start.  These keys
change what is checked: run.dir, run.nodes, run.rendezvous, run.device, checkpoint.dir,
checkpoint.local_dir, data.cache_dir.  docs/doctor.md lists the checks.

exit status: 0 nothing bad; 1 a bad finding; 2 a mistake in the arguments
"""

from __future__ import annotations

import argparse
import json
import time

from weft.cli.command_parser import Commands, add_command
from weft.cluster import FAILED
from weft.config.reader import read_job


def add_doctor(commands: Commands) -> None:
    """Add ``weft doctor``."""
    add = add_command(commands, "doctor", run_doctor, __doc__).add_argument
    text = "recipe whose directories, object store and nodes are checked"
    add("recipe", metavar="RECIPE", nargs="?", default="demo", help=text)
    add("--full", action="store_true", help="also test every pair of GPUs, and larger files")
    add("--json", action="store_true", help="print one JSON object instead")


def run_doctor(options: argparse.Namespace) -> int:
    """Print the findings about this machine."""
    from weft.cluster.doctor import collect_job_facts, format_report, to_json
    from weft.cluster.node_checks import run_checks

    began = time.monotonic()
    job, _, errors = read_job(options.recipe, options.overrides, options.errors)
    errors.raise_any()
    facts = collect_job_facts(job, options.full)
    findings = run_checks(facts)
    result = (facts, findings, time.monotonic() - began)
    print(json.dumps(to_json(*result), indent=2) if options.json else format_report(*result))
    return FAILED if any(finding.severity == "bad" for finding in findings) else 0
