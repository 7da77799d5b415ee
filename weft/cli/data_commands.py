"""Tokenize data before a run, inspect or verify it.

  weft data prepare my-recipe.toml --data.path 'web/*.jsonl.zst'
  weft data prepare s3://bucket/web --data.tokenizer tokenizer.json
  weft data prepare my-recipe.toml --data.cache_dir s3://bucket/tokens --on slurm --workers 8
  weft data inspect hf://org/name:config@train --data.text_field content
  weft data inspect lora --model.path MODEL --data.path chats.jsonl --html chats.html

Override the keys of [data] as --data.key value; 'weft train --help' lists them.  docs/data.md
describes the kinds of data.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.command_parser import Commands, add_command
from weft.cli.option_values import check_file, count, local_path, positive, write_file
from weft.config.errors import ConfigError, InvalidConfig
from weft.config.exit_statuses import FAILED, REQUEUE
from weft.config.reader import read_job, recipe_names
from weft.config.run_paths import JOB_FILE
from weft.config.storage import is_bucket_url

if TYPE_CHECKING:
    from weft.config.schema import Job
    from weft.data.dataset import Dataset

SUMMARY, _, EXAMPLES = (__doc__ or "").partition("\n\n")
PREPARE_CLUSTERS = ("ray", "slurm", "kubernetes", "sagemaker")
ON_HELP = "start workers on a cluster, which prepare the data together in data.cache_dir=s3://..."
WORKERS_HELP = "number of workers of --on (default: one per node of Ray's cluster; else 1)"
VERIFY_HELP = """\
Read prepared stores in full and compare them with their manifests.

A run checks a store when it first opens it, and again when the size or modification time of a file
changes.  This command reads every byte again.  It finds damage that changes neither, such as that
of a failing disk.  It compares content hashes, and token ids with the vocabulary.  'weft data
prepare' prints the directory of a store.

  weft data verify /data/store
  weft data verify ~/.cache/weft/stores/*

weft remembers a good result in data.cache_dir (--data.cache_dir DIR).  After a bad one, the next
run checks the store, too.

exit status: 0 every store equals what was prepared; 1 a store is damaged; 2 a mistake in the
arguments"""


def add_data(commands: Commands) -> None:
    """Add ``weft data prepare``, ``weft data inspect`` and ``weft data verify``."""
    group = commands.add_parser("data", help=SUMMARY, description=SUMMARY).add_commands()
    text = f"{run_data_prepare.__doc__}\n\n{EXAMPLES}"
    prepare = add_command(group, "prepare", run_data_prepare, text)
    text = f"{run_data_inspect.__doc__}\n\n{EXAMPLES}"
    inspect = add_command(group, "inspect", run_data_inspect, text)
    inspect.add_argument("--samples", type=count, default=3, help="documents to print (default: 3)")
    help_text = "also write the documents as a page, with the trained text marked"
    inspect.add_argument("--html", metavar="FILE", type=local_path, help=help_text)
    prepare.add_argument("--on", choices=PREPARE_CLUSTERS, help=ON_HELP)
    prepare.add_argument("--workers", type=positive, metavar="N", help=WORKERS_HELP)
    text = "print the script or manifest of --on; submit nothing"
    prepare.add_argument("--dry-run", action="store_true", help=text)
    for parser in (prepare, inspect):
        parser.add_argument(
            "what", metavar="PATH|RECIPE", help="data, or a recipe or run that names it"
        )
    verify = add_command(group, "verify", run_data_verify, VERIFY_HELP)
    text = "prepared store, also at s3://, or directory of a mixture of stores"
    verify.add_argument("stores", metavar="STORE", type=store_location, nargs="+", help=text)


def store_location(text: str) -> str | Path:
    """Parse the location of a token store: a path, or a URL of a bucket."""
    return text if is_bucket_url(text) else local_path(text)


def run_data_prepare(options: argparse.Namespace) -> None:
    """Tokenize data once for all runs; resumes where it was interrupted."""
    from weft.data.inspect import summarize_dataset

    if options.workers and not options.on:
        remedy = "add --on, or start the same command on several machines"
        options.errors.add("--workers", "needs a cluster", remedy, value=options.workers)
    if options.dry_run and options.on not in ("slurm", "kubernetes"):
        remedy = "add --on slurm or --on kubernetes, or remove it"
        options.errors.add("--dry-run", "has nothing to print", remedy)
    if options.on:
        prepare_on_cluster(options)
        return
    # Another worker then continues at once.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(REQUEUE))
    print("\n".join(summarize_dataset(prepare_named_data(options))))


def prepare_on_cluster(options: argparse.Namespace) -> None:
    """Start the workers of ``--on``."""
    from weft.data.ray_preparation import check_shared_cache, prepare_on_ray
    from weft.preparation.job_checks import absolute_paths
    from weft.submission.submit import build_preparation, check_text, get_cluster, submit

    job, recipe, overrides = read_data_job(options)
    check_shared_cache(job.data)
    if options.on == "ray":
        data = absolute_paths(with_tokenizer_of_model(job)).data
        print("\n".join(prepare_on_ray(data, options.workers)))
        return
    request = build_preparation(options.on, recipe, overrides, job, options.workers or 1)
    text = get_cluster(options.on).render(request)
    print(text)
    check_text(options.on, text)
    if not options.dry_run:
        run = submit(options.on, request, text)
        next = f"weft job status {shlex.quote(str(run.run_dir))}"
        print(f"submitted {run.on} job {run.id}: {next}")


def run_data_inspect(options: argparse.Namespace) -> None:
    """Show the size of data, the lengths of its documents, and some of them.

    The trained text of conversations is between [[ and ]].
    """
    from weft.data.inspect import inspect_dataset, make_page

    if options.html is not None:
        check_file("--html", options.html, options.errors)
    dataset = prepare_named_data(options)
    for line in inspect_dataset(dataset, options.samples):
        print(line)
    if options.html is not None:
        write_file(options.html, make_page(dataset, options.samples))
        print(f"{options.html} shows these documents")


def prepare_named_data(options: argparse.Namespace) -> Dataset:
    """Prepare the data of a recipe or path."""
    from weft.checkpoint.lustre import hydrate_when_reading
    from weft.data.prepare import cache_dir, prepare_data, show_progress
    from weft.monitor.terminal import quiet_console

    job = with_tokenizer_of_model(read_data_job(options)[0])
    console = quiet_console(sys.stderr)
    with show_progress(console) as show:
        report = hydrate_when_reading(job.data, show, console.print)
        return prepare_data(job.data, cache_dir(job.data), report)


def read_data_job(options: argparse.Namespace) -> tuple[Job, str, list[tuple[str, str]]]:
    """Read the recipe, or the default one of a path; return name and overrides, too."""
    is_recipe = options.what in recipe_names() or options.what.endswith(".toml")
    is_recipe = is_recipe or (Path(options.what) / JOB_FILE).is_file()
    recipe = options.what if is_recipe else "demo"
    path = [] if is_recipe else [("data.path", options.what)]
    overrides = [*path, *options.overrides]
    job, _, errors = read_job(recipe, overrides, options.errors)
    errors.raise_any()
    return job, recipe, overrides


def with_tokenizer_of_model(job: Job) -> Job:
    """Return a job with the tokenizer of ``model.path``, unless it names one.

    Raises:
        InvalidConfig: if there is no such model, or the tokenizer's run is damaged.
    """
    from weft.planning.model_config import take_tokenizer
    from weft.preparation.job_checks import check_tokenizer_run

    job = take_tokenizer(job)
    if found := check_tokenizer_run(job.data.tokenizer):
        raise InvalidConfig(found)
    return job


def run_data_verify(options: argparse.Namespace) -> int:
    """Compare prepared stores with their manifests, byte by byte."""
    from rich.console import Console

    from weft.data.dataset import MIXTURE_FILE, list_mixture_stores
    from weft.data.prepare import cache_dir, open_bucket_store, show_progress
    from weft.data.prepared_cache import open_verified_store
    from weft.data.token_store import STORE_FILE

    job, _, errors = read_job("demo", options.overrides, options.errors)
    rule, remedy = "has no effect on weft data verify", "remove it; it reads data.cache_dir only"
    kept = ("data.cache_dir", "data.node_cache_dir", "data.node_cache_gib")
    others = {name: value for name, value in options.overrides if name not in kept}
    errors.add_independent([ConfigError(*other, rule, remedy) for other in others.items()])
    stores: list[Path] = []
    named: list[str | Path] = []
    for path in options.stores:
        with errors.collect():
            if isinstance(path, str):
                stores.append(open_bucket_store(path, job.data).path)
                named.append(path)
                continue
            found = list_mixture_stores(path) if (path / MIXTURE_FILE).is_file() else [path]
            stores += found
            named += found
    for path in stores:
        if not (path / STORE_FILE).is_file():
            rule = f"is not a prepared store, because it has no {STORE_FILE}"
            remedy = "create one with weft data prepare"
            errors.add("STORE", rule, remedy, value=str(path))
    errors.raise_any()
    damaged = 0
    with show_progress(Console(stderr=True)) as show:
        for path, name in zip(stores, named, strict=True):
            try:
                store = open_verified_store(path, cache_dir(job.data), show, force=True)
            except InvalidConfig as error:
                damaged += 1
                print(error, flush=True)
                continue
            files = [file for split in store.splits for file in split.files]
            size = sum(file.size_bytes for file in files)
            what = f"{len(files):,} files, {size:,} bytes, unchanged since they were prepared"
            print(f"{name}: {what}", flush=True)
    if damaged:
        print(f"weft: {damaged} of {len(stores)} stores are damaged", file=sys.stderr)
    return FAILED if damaged else 0
