"""Submit the trials of a comparison to a cluster.

The directory of the comparison is that of `weft.comparison.experiment`: the recipe of each variant,
``comparison.json``, and a run directory per trial.  ``launch.json`` in a trial's directory is the
record of its job, so ``weft job`` works with each trial as with any run.

On Slurm the trials are tasks of a job array: one array for all variants that need the same
resources.  A job that depends on the arrays runs ``weft compare DIR``.  On other clusters each
trial is a job, and the user runs that command.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path

from weft.comparison.comparison_result import ComparisonSettings, completed_trials
from weft.comparison.experiment import (
    default_dir,
    is_finished,
    load_comparison,
    open_comparison,
    save_comparison,
    trial_order,
    write_recipes,
)
from weft.comparison.trials import recipe_path, trial_dir, trial_seed
from weft.comparison.variants import Overrides, Variant, read_variants
from weft.comparison.verdict import import_student_t
from weft.config.accelerators import unit_of
from weft.config.errors import ConfigError, InvalidConfig, WeftError
from weft.config.files import replace_text
from weft.config.locks import unwritable_error
from weft.config.schema import RunSection
from weft.config.schema import replace as changed
from weft.planning.plan import Machine, Plan
from weft.records.run_cost import LAUNCH_FILE, Cost
from weft.submission import slurm
from weft.submission.job_request import JobRequest, TrialTask
from weft.submission.submit import (
    SubmittedJob,
    build_request,
    check_text,
    format_name,
    get_cluster,
    submit,
    write_record,
)

SUMMARY_FILE = "compare.sh"  # batch script of the job that summarizes the comparison
SUMMARY_TIME_LIMIT = "00:30:00"
# sbatch's options that say who pays and where, which the summary needs, too.
ACCOUNT_OPTIONS = ("account", "partition", "qos", "reservation", "constraint", "clusters")


@dataclass(frozen=True)
class TrialJobs:
    """Trials that one file submits: a job array, or one trial."""

    path: Path
    request: JobRequest
    trials: tuple[TrialTask, ...]


@dataclass(frozen=True)
class LaunchedComparison:
    """A comparison whose trials are jobs of a cluster.

    Args:
        on: the name of the cluster.
        directory: directory of the comparison.
        variants: variants to compare; the first one is the baseline.
        requests: the request of each variant.
        repeats: number of runs of each variant.
        max_running: trials of an array that run at the same time; 0: no limit.
    """

    on: str
    directory: Path
    variants: Sequence[Variant]
    requests: Sequence[JobRequest]
    repeats: int
    max_running: int = 0

    @property
    def name(self) -> str:
        """Name of the comparison for the scheduler."""
        return self.requests[0].name

    def trials(self) -> Iterator[tuple[int, TrialTask]]:
        """Yield variant and task of each trial, in the order of `trial_order`."""
        order = trial_order(range(len(self.variants)), self.repeats)
        for number, (repeat, index) in enumerate(order, 1):
            label = self.variants[index].label
            run = trial_dir(self.directory, index, label, repeat)
            recipe = recipe_path(self.directory, index, label)
            seed = trial_seed(self.variants, index, repeat)
            yield index, TrialTask(number, f"{self.name}-{index + 1}-{repeat}", run, recipe, seed)

    def jobs(self) -> list[TrialJobs]:
        """Return the files to submit with their trials."""
        suffix = get_cluster(self.on).FILE_SUFFIX
        if self.on != "slurm":
            return [
                TrialJobs(task.run / f"launch{suffix}", self._trial_request(index, task), (task,))
                for index, task in self.trials()
            ]
        groups: dict[str, tuple[JobRequest, list[TrialTask]]] = {}
        for index, task in self.trials():
            request = self.requests[index]
            same = slurm.render(replace(request, trials=(TrialTask(1, "", Path(), Path(), 0),)))
            groups.setdefault(same, (request, []))[1].append(task)
        names = ["launch", *(f"launch-{number}" for number in range(2, len(groups) + 1))]
        return [
            TrialJobs(
                self.directory / f"{name}{suffix}",
                replace(request, trials=tuple(tasks), max_running=self.max_running),
                tuple(tasks),
            )
            for name, (request, tasks) in zip(names, groups.values(), strict=True)
        ]

    def _trial_request(self, index: int, task: TrialTask) -> JobRequest:
        request, seed = self.requests[index], {"seed": task.seed}
        job = changed(request.job, run={"dir": str(task.run)}, train=seed)
        pairs = {**request.overrides, "run.dir": str(task.run), "train.seed": str(task.seed)}
        return replace(request, name=task.name, run_dir=task.run, job=job, overrides=pairs)


def build_comparison(
    on: str | None,
    recipe: str,
    vary: Sequence[tuple[str, Sequence[str]]],
    overrides: Overrides,
    cli_errors: Sequence[ConfigError],
    detect_machine: Callable[[RunSection], Machine],
    out: str | None,
    repeats: int,
    max_running: int,
) -> LaunchedComparison:
    """Build and check the requests of all trials, as `build_request` does for one run.

    Raises:
        InvalidConfig: with every error of every variant.
        WeftError: if SciPy is not installed where ``weft compare`` will run.
    """
    requests: list[JobRequest] = []

    def read(recipe: str, pairs: Overrides) -> Plan:
        own = [("checkpoint.dir", "auto"), ("run.dir", out or "runs/compare")]
        try:
            request = build_request(on, recipe, [*pairs, *own], [], detect_machine)
        except InvalidConfig as error:
            raise InvalidConfig(
                replace(each, key="--out", remedy=each.remedy.replace("--run.dir", "--out"))
                if each.key == "run.dir"
                else each
                for each in error.errors
            ) from error
        assert request.plan is not None
        pairs = [(key, value) for key, value in request.overrides.items()]
        given = {key: value for key, value in pairs if key != "checkpoint.dir"}
        requests.append(replace(request, overrides=given))
        return request.plan

    pairs = [("monitor.report", "false"), *overrides]  # the comparison has one report
    variants = read_variants([recipe], vary, pairs, cli_errors, read, launches=True)
    if out is None:  # its name is in the URLs of uploaded files
        name = default_dir(_node_variants(variants, requests)).name
        out = f"runs/{format_name(name, 'compare')}"
        return build_comparison(
            on, recipe, vary, overrides, cli_errors, detect_machine, out, repeats, max_running
        )
    assert on is not None
    if on != "slurm" or requests[0].job.launch.image == "auto":
        import_student_t()  # fail before the first trial, not after the last
    variants = _node_variants(variants, requests)
    directory = requests[0].run_dir
    previous, _ = open_comparison(directory, variants)  # check before anything is written
    completed = completed_trials(directory, variants, previous)
    repeats = max([repeats, *(result.repeat for result in completed)])
    return LaunchedComparison(on, directory, variants, requests, repeats, max_running)


def _node_variants(variants: Sequence[Variant], requests: Sequence[JobRequest]) -> list[Variant]:
    """Return the variants with the jobs that the nodes run: see `node_overrides`."""
    return [
        replace(
            variant,
            job=changed(
                request.job,
                run={"dir": "auto", "nodes": request.overrides.get("run.nodes", "auto")},
                model={"config": ""},
            ),
        )
        for variant, request in zip(variants, requests, strict=True)
    ]


# --------------------------------------------------------------------------- what is shown


def describe_use(comparison: LaunchedComparison) -> str:
    """Return the predicted hours and cost of all trials, without starts."""
    from weft.estimate.run_time import estimate_run_seconds  # imports torch

    num_trials = comparison.repeats * len(comparison.variants)
    hours, methods, unit, price = 0.0, dict[str, None](), "", 0.0
    for request in comparison.requests:
        plan, machine = request.plan, request.machine
        assert plan is not None  # `build_request` raises otherwise
        assert machine is not None
        estimate = estimate_run_seconds(plan, machine)
        if estimate is None:
            return f"{num_trials} trials; the time of a step on these nodes is unknown"
        hours += comparison.repeats * estimate[0] * plan.world_size / 3600
        methods[estimate[1]] = None
        unit, price = f"{unit_of(plan.device)}-hours", request.job.launch.price_per_gpu_hour
    use = Cost(hours, unit, price)
    return f"{num_trials} trials: about {use}, {' and '.join(methods)}, without starts and saves"


def find_remote_runs(comparison: LaunchedComparison) -> list[str]:
    """Return what to do before ``weft compare`` if the runs are elsewhere."""
    lines, directory = [], shlex.quote(str(comparison.directory))
    for jobs in comparison.jobs():
        request, bucket = jobs.request, jobs.request.job.launch.bucket.rstrip("/")
        if comparison.on in ("sagemaker", "skypilot"):
            folder = "/weft" if comparison.on == "sagemaker" else ""
            source, run = f"{bucket}{folder}/{request.name}", shlex.quote(str(request.run_dir))
            command = f"aws s3 sync {shlex.quote(source)} {run} --exclude 'checkpoints/*'"
            lines.append(command)
        elif comparison.on == "kubernetes" and request.node_run_dir != str(request.run_dir):
            parent = request.run_dir.parent.parent
            return [
                f"The pods write the runs to {Path(request.node_run_dir).parent}, where this "
                f"machine cannot read them. Give --launch.mounts {parent}=pvc:CLAIM, a volume "
                f"that this machine mounts at {parent}, too. Or run 'weft compare' in a pod that "
                "has the runs under the names of their directories."
            ]
    if lines:
        lines.insert(0, f"The nodes write the runs to {bucket}. To compare, copy them first:")
        lines.append(f"weft compare {directory}")
    return lines


# --------------------------------------------------------------------------- submission


def render_summary(comparison: LaunchedComparison) -> str:
    """Return the batch script of the job that runs ``weft compare DIR`` on one core."""
    base = comparison.requests[0]
    options = {k: v for k, v in base.job.launch.options.items() if k in ACCOUNT_OPTIONS}
    job = changed(
        base.job,
        run={"cluster": "local", "device": "cpu"},
        resilience={"preflight": False, "max_restarts_per_hour": 0},
        launch={
            "time_limit": SUMMARY_TIME_LIMIT,
            "cpus": "1",
            "memory": "",
            "topology": "",
            "options": options,
        },
    )
    name, directory = f"{comparison.name}-compare", str(comparison.directory)
    request = JobRequest(name, directory, {}, job, (1, 1), 0, base.run_dir, program=("compare",))
    return slurm.render(request)


def check_jobs(comparison: LaunchedComparison, texts: Sequence[str]) -> None:
    """Check all scripts and manifests with the cluster's tools.

    Raises:
        InvalidConfig: with every rule that they break.
    """
    errors: dict[str, ConfigError] = {}
    with redirect_stderr(StringIO()) as warnings:  # the same ones for each text
        for text in texts:
            try:
                check_text(comparison.on, text)
            except InvalidConfig as invalid:
                errors |= {str(error): error for error in invalid.errors}
    for line in dict.fromkeys(warnings.getvalue().splitlines()):
        print(line, file=sys.stderr)
    if errors:
        raise InvalidConfig(errors.values())


def find_missing(comparison: LaunchedComparison) -> list[TrialTask]:
    """Return the trials that have neither finished nor an active job."""
    return [
        task
        for _, task in comparison.trials()
        if not is_finished(task.run)
        and not ((task.run / LAUNCH_FILE).is_file() and SubmittedJob.load(task.run).is_active())
    ]


def submit_comparison(
    comparison: LaunchedComparison, missing: Sequence[TrialTask], log: Callable[[str], object]
) -> None:
    """Describe the comparison in its directory, and submit the missing trials.

    Raises:
        WeftError: if the directory cannot be written, or the cluster refuses a job.  The message
            has the number of trials that were submitted.
    """
    on, directory = comparison.on, comparison.directory
    launch = comparison.requests[0].job.launch
    settings = ComparisonSettings(comparison.repeats, price=launch.price_per_gpu_hour or None)
    previous, looks = open_comparison(directory, comparison.variants)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_recipes(directory, comparison.variants)
        save_comparison(directory, comparison.variants, previous, settings, looks)
    except OSError as error:
        raise unwritable_error(directory, error) from error
    count = 0
    try:
        for jobs in comparison.jobs():
            tasks = [task for task in jobs.trials if task in missing]
            if tasks and on == "slurm":
                id = _submit_array(jobs, tasks)
            elif tasks:
                id = submit(on, jobs.request, get_cluster(on).render(jobs.request)).id
            if tasks:
                count += len(tasks)
                log(f"submitted {on} job {id}: {', '.join(task.run.name for task in tasks)}")
        if on == "slurm":
            id = submit_summary(directory, render_summary(comparison))
            log(f"submitted {on} job {id}: weft compare after all trials")
    except WeftError as error:
        raise WeftError(
            f"{error}\n{count} of {len(missing)} trials were submitted. Run the same command again "
            f"to submit the others, or 'weft job cancel {shlex.quote(str(directory))}'."
        ) from error


def _submit_array(jobs: TrialJobs, tasks: Sequence[TrialTask]) -> str:
    """Submit tasks of an array, and record the job of each; return the array's id."""
    replace_text(jobs.path, slurm.render(jobs.request))
    numbers = slurm.format_tasks([task.number for task in tasks], jobs.request.max_running)
    array = slurm.run_sbatch(jobs.path, f"--array={numbers}")
    price = jobs.request.job.launch.price_per_gpu_hour
    for task in tasks:
        _record_task(task.run, f"{array}_{task.number}", f"../{jobs.path.name}", price)
    return array


def _record_task(run: Path, id: str, file: str, price: float) -> None:
    run.mkdir(exist_ok=True)
    write_record(run, "slurm", id, file, price, log=f"../slurm-{id}.out")


def submit_summary(directory: Path, text: str) -> str:
    """Submit ``weft compare`` after all active trials; cancel an earlier one."""
    for job in load_jobs(directory):
        if job.run_dir == directory and job.is_active():
            job.cancel()
    jobs = [job for job in load_jobs(directory) if job.run_dir != directory and job.is_active()]
    arrays = dict.fromkeys(job.id.partition("_")[0] for job in jobs)
    replace_text(directory / SUMMARY_FILE, text)
    options = [f"--dependency=afterany:{':'.join(arrays)}"] if arrays else []
    id = slurm.run_sbatch(directory / SUMMARY_FILE, *options)
    write_record(directory, "slurm", id, SUMMARY_FILE, 0.0)
    return id


# --------------------------------------------------------------------------- submitted jobs


def load_jobs(directory: Path) -> list[SubmittedJob]:
    """Return the jobs of a comparison's trials, then that of its summary.

    Raises:
        InvalidConfig: if the directory has no comparison, or no trial was submitted.
    """
    directory = directory.absolute()
    variants, _, settings, _ = load_comparison(directory)
    runs = [
        trial_dir(directory, index, variants[index].label, repeat)
        for repeat, index in trial_order(range(len(variants)), settings.repeats)
    ]
    jobs = [SubmittedJob.load(run) for run in [*runs, directory] if (run / LAUNCH_FILE).is_file()]
    if not jobs:
        rule = "is a comparison whose trials were not submitted to a cluster"
        remedy = f"run 'weft compare {shlex.quote(str(directory))}' to summarize it"
        raise InvalidConfig([ConfigError("RUN", str(directory), rule, remedy)])
    return jobs


def resume_trials(directory: Path) -> Iterator[SubmittedJob]:
    """Submit the trials again that have ended unfinished, then the summary.

    Yields:
        Each submitted job.

    Raises:
        InvalidConfig: if there is no such trial.
    """
    directory = directory.absolute()
    jobs = [job for job in load_jobs(directory) if job.run_dir != directory]
    ended = [job for job in jobs if not is_finished(job.run_dir) and not job.is_active()]
    if not ended:
        rule = "has no trial that has ended before its last step"
        remedy = "wait for the others: weft job status"
        raise InvalidConfig([ConfigError("RUN", str(directory), rule, remedy)])
    for job in ended:
        yield job.resume()
    if (directory / SUMMARY_FILE).is_file():
        submit_summary(directory, (directory / SUMMARY_FILE).read_text("utf-8"))
        yield SubmittedJob.load(directory)
