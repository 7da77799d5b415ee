r"""Submit a recipe to a cluster.

weft prints what it submits, and keeps it in the run directory.  The job starts 'weft train' with
the same arguments on every node.  A job that reaches its time limit saves, and resumes when it is
scheduled again.

  weft launch llama3-8b --on slurm --nodes 4 --run.cluster 4x8xH100 --launch.time_limit 12:00:00
  weft launch mine.toml --on slurm --nodes 2:8 --run.cluster 8x8xH100 --run.dir runs/mine \
    --launch.queue gpu --launch.options account=mine --dry-run
  weft job status runs/mine
  weft job logs runs/mine --follow
  weft job cancel runs/mine
  weft job resume runs/mine

--nodes N requests N nodes, MIN:MAX as many as are available.  run.cluster names the devices of a
node (--run.device cpu: no GPUs).  The keys of [launch] place the job: image, mounts, secrets,
queue, ...
Override any key as --section.key value; 'weft train --help' lists the keys.
"""

from __future__ import annotations

import argparse
import shlex
import time

from weft.cli.command_parser import RECIPE_HELP, Commands, add_command
from weft.cli.option_values import run_path


def add_launch(commands: Commands) -> None:
    """Add ``weft launch``."""
    add = add_command(commands, "launch", run_launch, __doc__).add_argument
    add("recipe", metavar="RECIPE", help=RECIPE_HELP)
    add("--on", help="kind of cluster: slurm, kubernetes, sagemaker or skypilot")
    add("--dry-run", action="store_true", help="print the script or manifest; submit nothing")


def add_job(commands: Commands) -> None:
    """Add ``weft job status``, ``logs``, ``cancel``, ``resume`` and ``dashboard``."""
    summary = "Show the status, logs or dashboard of a submitted run, cancel it, or resume it."
    group = commands.add_parser("job", help=summary, description=summary).add_commands()
    status = add_command(group, "status", run_job_status, takes_keys=False)
    logs = add_command(group, "logs", run_job_logs, takes_keys=False)
    cancel = add_command(group, "cancel", run_job_cancel, takes_keys=False)
    resume = add_command(group, "resume", run_job_resume, takes_keys=False)
    dashboard = add_command(group, "dashboard", run_job_dashboard, takes_keys=False)
    for parser in (status, logs, cancel, resume, dashboard):
        parser.add_argument("run", metavar="RUN", type=run_path, help="run directory")
    logs.add_argument("--follow", action="store_true", help="keep printing until the job ends")


def run_launch(options: argparse.Namespace) -> None:
    """Submit a recipe to a cluster."""
    from weft.cluster.launch_warnings import print_warnings
    from weft.cluster.submit import build_request, check_text, get_cluster, submit
    from weft.train.machine import detect_machine

    request = build_request(
        options.on, options.recipe, options.overrides, options.errors, detect_machine
    )
    text = get_cluster(options.on).render(request)
    print(text)
    print_warnings(options.on, request)
    check_text(options.on, text)
    if not options.dry_run:
        job = submit(options.on, request, text)
        next = f"weft job status {shlex.quote(str(job.run_dir))}"
        print(f"submitted {job.on} job {job.id}: {next}")


def run_job_status(options: argparse.Namespace) -> None:
    """Show the status of a submitted run, and its cost so far if its records are here."""
    from weft.cluster.submit import SubmittedJob
    from weft.monitor.run_cost import compute_cost
    from weft.monitor.run_reader import RunReader, is_run_dir

    job = SubmittedJob.load(options.run)
    print(f"{job.on} job {job.id}: {job.status()}")
    if is_run_dir(job.run_dir):
        cost = compute_cost(RunReader(job.run_dir), time.time())
        if cost.hours:
            print(f"{'cost' if cost.price else 'use'} so far: {cost}")


def run_job_logs(options: argparse.Namespace) -> None:
    """Print the output of a submitted run."""
    from weft.cluster.submit import SubmittedJob

    for line in SubmittedJob.load(options.run).logs(options.follow):
        print(line, flush=True)


def run_job_resume(options: argparse.Namespace) -> None:
    """Submit an ended job again, so that its run resumes from the newest checkpoint."""
    from weft.cluster.submit import SubmittedJob

    job = SubmittedJob.load(options.run).resume()
    print(f"submitted {job.on} job {job.id}: weft job status {shlex.quote(str(job.run_dir))}")


def run_job_cancel(options: argparse.Namespace) -> None:
    """Cancel a submitted run."""
    from weft.cluster.submit import SubmittedJob

    print(SubmittedJob.load(options.run).cancel())


def run_job_dashboard(options: argparse.Namespace) -> None:
    """Print a CloudWatch dashboard of a SageMaker job as JSON.

    aws cloudwatch put-dashboard --dashboard-name NAME --dashboard-body file://FILE creates it.
    """
    from weft.cluster import sagemaker
    from weft.cluster.submit import SubmittedJob
    from weft.config.errors import ConfigError, InvalidConfig
    from weft.monitor.cloudwatch import read_dashboard

    job = SubmittedJob.load(options.run)
    if job.on != "sagemaker":
        rule = f"is a job of {job.on}, whose metrics are not in CloudWatch"
        remedy = "serve them to Prometheus with --monitor.prometheus"
        raise InvalidConfig([ConfigError("RUN", str(job.run_dir), rule, remedy)])
    path = job.run_dir / f"launch{sagemaker.FILE_SUFFIX}"
    print(read_dashboard(path, *sagemaker.parse_id(job.id)))
