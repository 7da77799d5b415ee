"""Check that this machine is fit to train, and as fast as it should be.

The checks take some seconds and change nothing: devices, drivers, links, network adapters,
environment variables, limits, directories.

  weft doctor
  weft doctor --checkpoint.dir s3://bucket/run-7 --checkpoint.local_dir /dev/shm/$USER
  srun --nodes 2 --ntasks-per-node=1 weft doctor               also clocks and versions of all nodes
  weft doctor --gpu-tour                                       20 minutes of runs, and one page

'weft train RECIPE --preflight' runs the checks on every node before its ranks start.  These keys
change what is checked: run.dir, run.nodes, run.rendezvous, run.device, checkpoint.dir,
checkpoint.local_dir, data.cache_dir.  docs/doctor.md lists the checks.

--gpu-tour trains small models in short runs: eager and compiled, in float8, sharded, with tensor
parallelism, with checkpoints.  It compares them with the plan, and writes one page that you can
send to others.  docs/gpu-tour.md describes it.  It takes run.dir and run.device.

exit status: 0 nothing bad; 1 a bad finding; 2 a mistake in the arguments
"""

from __future__ import annotations

import argparse
import json
import shlex
import time

from weft.cli.command_parser import Commands, add_command
from weft.cluster import FAILED
from weft.config.errors import MISSING, ConfigErrors
from weft.config.reader import read_job

DEFAULT_RECIPE = "demo"
TOUR_KEYS = ("run.dir", "run.device")


def add_doctor(commands: Commands) -> None:
    """Add ``weft doctor``."""
    add = add_command(commands, "doctor", run_doctor, __doc__).add_argument
    text = "recipe whose directories, object store and nodes are checked"
    add("recipe", metavar="RECIPE", nargs="?", default=DEFAULT_RECIPE, help=text)
    add("--full", action="store_true", help="also test every pair of GPUs, and larger files")
    add("--json", action="store_true", help="print one JSON object instead")
    text = "measure short runs on the GPUs for up to 20 minutes, and write a page of the results"
    add("--gpu-tour", action="store_true", help=text)


def run_doctor(options: argparse.Namespace) -> int:
    """Print the findings about this machine."""
    from weft.cluster.doctor import collect_job_facts, format_report, to_json
    from weft.cluster.node_checks import run_checks

    began = time.monotonic()
    job, _, errors = read_job(options.recipe, options.overrides, options.errors)
    if options.gpu_tour:
        check_tour_options(options, errors)
    errors.raise_any()
    if options.gpu_tour:
        from weft.cluster.gpu_tour import run_tour

        return run_tour(job, shlex.join(["weft", *options.words]))
    facts = collect_job_facts(job, options.full)
    findings = run_checks(facts)
    result = (facts, findings, time.monotonic() - began)
    print(json.dumps(to_json(*result), indent=2) if options.json else format_report(*result))
    return FAILED if any(finding.severity == "bad" for finding in findings) else 0


def check_tour_options(options: argparse.Namespace, errors: ConfigErrors) -> None:
    """Add an error for each option or key that --gpu-tour would ignore."""
    ignored = [f"--{name}" for name in ("full", "json") if getattr(options, name)]
    ignored += [f"--{key}" for key, _ in options.overrides if key not in TOUR_KEYS]
    ignored += [options.recipe] if options.recipe != DEFAULT_RECIPE else []
    for word in ignored:
        errors.add(word, "has no effect on --gpu-tour", "remove it", value=MISSING)
