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

  weft launch demo --vary optim.lr=1e-3,3e-3 --on slurm --run.device cpu
  weft job status runs/compare-demo-0d6f8a51

--vary submits the trials of a comparison.  On Slurm they are a job array, and a job after them
writes the verdict; elsewhere run 'weft compare DIR' after the trials.  The same command submits
only trials that have neither finished nor an active job.  'weft job' takes the directory of the
comparison for all its trials, or that of a trial.

--nodes N requests N nodes, MIN:MAX as many as are available.  run.cluster names the devices of a
node (--run.device cpu: no GPUs).  The keys of [launch] place the job: image, mounts, secrets,
queue, ...
Override any key as --section.key value; 'weft train --help' lists the keys.
"""

from __future__ import annotations

import argparse
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.command_parser import RECIPE_HELP, Commands, add_command
from weft.cli.option_values import parse_integer, run_path
from weft.config.errors import ConfigError, ConfigErrors, InvalidConfig, WeftError

if TYPE_CHECKING:
    from weft.submission.submit import SubmittedJob


def add_launch(commands: Commands) -> None:
    """Add ``weft launch``."""
    add = add_command(commands, "launch", run_launch, __doc__).add_argument
    add("recipe", metavar="RECIPE", help=RECIPE_HELP)
    add("--on", help="kind of cluster: slurm, kubernetes, sagemaker or skypilot")
    add("--dry-run", action="store_true", help="print the script or manifest; submit nothing")
    text = "values of a key, as of weft compare: submit a trial for each value and repeat"
    add("--vary", action="append", default=[], metavar="KEY=A,B", help=text)
    add("--repeat", help="with --vary: trials of each variant (default: 3)")
    text = "with --vary: directory of the comparison (default: runs/compare-...)"
    add("--out", metavar="DIR", help=text)
    text = "with --vary on Slurm: trials of an array that run at the same time (default: no limit)"
    add("--max-running", metavar="N", help=text)


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
        parser.add_argument(
            "run", metavar="RUN", type=run_path, help="run directory, or that of a comparison"
        )
    logs.add_argument("--follow", action="store_true", help="keep printing until the job ends")


def run_launch(options: argparse.Namespace) -> None:
    """Submit a recipe to a cluster."""
    from weft.submission.launch_warnings import print_warnings
    from weft.submission.submit import build_request, check_text, get_cluster, submit
    from weft.training.machine import detect_machine

    if options.vary:
        return launch_comparison(options)
    for name in ("repeat", "out", "max_running"):
        if value := getattr(options, name):
            rule, option = "is for trials of a comparison", f"--{name.replace('_', '-')}"
            options.errors.add(
                option, rule, "add --vary KEY=VALUE,VALUE, or remove it", value=value
            )
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


def launch_comparison(options: argparse.Namespace) -> None:
    """Submit the trials of a comparison."""
    from weft.comparison.variants import parse_vary
    from weft.submission import comparison_jobs
    from weft.submission.launch_warnings import print_warnings
    from weft.submission.submit import get_cluster
    from weft.training.machine import detect_machine

    errors: ConfigErrors = options.errors
    repeats = parse_integer("--repeat", options.repeat or "3", 1, 1000, errors)
    max_running = parse_integer("--max-running", options.max_running or "0", 0, 10_000, errors)
    if max_running and options.on != "slurm":
        rule = "is for job arrays, which only Slurm has"
        errors.add("--max-running", rule, "remove it", value=max_running)
    vary = [pair for text in options.vary for pair in parse_vary(text, errors)]
    request = (options.on, options.recipe, vary, options.overrides, errors, detect_machine)
    comparison = comparison_jobs.build_comparison(*request, options.out, repeats, max_running)
    jobs = comparison.jobs()
    texts = [get_cluster(options.on).render(each.request) for each in jobs]
    if options.on == "slurm":
        texts.append(comparison_jobs.render_summary(comparison))
    separator = "---\n" if get_cluster(options.on).FILE_SUFFIX == ".yaml" else "\n"
    print(separator.join(texts))
    print_warnings(options.on, *comparison.requests)
    comparison_jobs.check_jobs(comparison, texts)
    print(comparison_jobs.describe_use(comparison))
    remote = comparison_jobs.find_remote_runs(comparison)
    print("\n".join(remote), end="\n" * bool(remote))
    missing = comparison_jobs.find_missing(comparison)
    if len(missing) < (total := sum(len(each.trials) for each in jobs)):
        print(f"{total - len(missing)} of {total} trials have finished, or have an active job")
    if not options.dry_run and missing:
        comparison_jobs.submit_comparison(comparison, missing, print)
    directory = shlex.quote(str(comparison.directory))
    if not options.dry_run:
        print(f"next: weft job status {directory}, weft compare {directory}")


def find_jobs(run: Path) -> list[SubmittedJob]:
    """Return the job of a run, or those of a comparison."""
    from weft.comparison.experiment import COMPARISON
    from weft.submission.submit import SubmittedJob

    if (run / COMPARISON).is_file():
        from weft.submission.comparison_jobs import load_jobs

        return load_jobs(run)
    return [SubmittedJob.load(run)]


def run_job_status(options: argparse.Namespace) -> None:
    """Show the status of a submitted run, and its cost so far if its records are here."""
    from weft.records.run_cost import compute_cost
    from weft.records.run_reader import RunReader, is_run_dir

    costs, jobs = [], find_jobs(options.run)
    for job in jobs:
        name = f"{job.run_dir.name}: " if len(jobs) > 1 else ""
        if job.run_dir == options.run.absolute() and len(jobs) > 1:
            name = "weft compare, after all trials: "
        print(f"{name}{job.on} job {job.id}: {job.status()}")
        if is_run_dir(job.run_dir):
            costs.append(compute_cost(RunReader(job.run_dir), time.time()))
    hours = sum(cost.hours for cost in costs)
    if hours:
        cost = costs[0]._replace(hours=hours)
        print(f"{'cost' if cost.price else 'use'} so far: {cost}")


def run_job_logs(options: argparse.Namespace) -> None:
    """Print the output of a submitted run."""
    jobs = find_jobs(options.run)
    if len(jobs) > 1 and options.follow:
        rule, remedy = "has several jobs", f"name the directory of one: {jobs[0].run_dir}"
        raise InvalidConfig([ConfigError("--follow", str(options.run), rule, remedy)])
    for job in jobs:
        if len(jobs) > 1:
            print(f"==> {job.run_dir.name} <==", flush=True)
        try:
            for line in job.logs(options.follow):
                print(line, flush=True)
        except WeftError as error:
            if len(jobs) == 1:
                raise
            print(error)


def run_job_resume(options: argparse.Namespace) -> None:
    """Submit an ended job again, so that its run resumes from the newest checkpoint."""
    from weft.comparison.experiment import COMPARISON
    from weft.submission.submit import SubmittedJob

    if (options.run / COMPARISON).is_file():
        from weft.submission.comparison_jobs import resume_trials

        jobs = resume_trials(options.run)
    else:
        jobs = iter([SubmittedJob.load(options.run).resume()])
    for job in jobs:
        print(f"submitted {job.on} job {job.id}: weft job status {shlex.quote(str(job.run_dir))}")


def run_job_cancel(options: argparse.Namespace) -> None:
    """Cancel a submitted run, or the trials of a comparison and its summary."""
    jobs = find_jobs(options.run)
    for job in reversed(jobs):  # the summary first: it would start when the trials have ended
        if len(jobs) == 1 or job.is_active():
            print(job.cancel())


def run_job_dashboard(options: argparse.Namespace) -> None:
    """Print a CloudWatch dashboard of a SageMaker job as JSON.

    aws cloudwatch put-dashboard --dashboard-name NAME --dashboard-body file://FILE creates it.
    """
    from weft.monitor.cloudwatch import read_dashboard
    from weft.submission import sagemaker
    from weft.submission.submit import SubmittedJob

    job = SubmittedJob.load(options.run)
    if job.on != "sagemaker":
        rule = f"is a job of {job.on}, whose metrics are not in CloudWatch"
        remedy = "serve them to Prometheus with --monitor.prometheus"
        raise InvalidConfig([ConfigError("RUN", str(job.run_dir), rule, remedy)])
    path = job.run_dir / f"launch{sagemaker.FILE_SUFFIX}"
    print(read_dashboard(path, *sagemaker.parse_id(job.id)))
