"""Start the workers of ``weft data prepare`` on a Ray cluster.

A worker is a task that calls `weft.data.prepare.prepare_data`, as the command does on one machine.
The workers divide the work in the object store of ``data.cache_dir``, so Ray only starts them, and
starts those again that are killed.
"""

from __future__ import annotations

import math
from typing import Any

from weft.config.errors import ConfigError, InvalidConfig, WeftError
from weft.config.schema import DataSection
from weft.config.storage import is_remote
from weft.data.inspect import summarize_dataset
from weft.data.prepare import cache_dir, prepare_data, show_progress
from weft.data.workers import limit_cores

MAX_RETRIES = 100  # of a worker whose process or node dies


def prepare_on_ray(section: DataSection, num_workers: int | None) -> list[str]:
    """Prepare data with workers on a Ray cluster; return the lines of a summary.

    Args:
        section: the user's choices, with absolute paths that all nodes have.
        num_workers: number of workers; None: one per node.

    Raises:
        InvalidConfig: errors of the data, or ``data.cache_dir`` is not in an object store.
        WeftError: ray is not installed, or a worker died more than `MAX_RETRIES` times.
    """
    check_shared_cache(section)
    try:
        import ray
    except ImportError as error:
        raise WeftError(f"--on ray needs {error.name}: pip install 'weft[ray]'") from error
    if not ray.is_initialized():
        ray.init()  # RAY_ADDRESS, or a cluster that runs here, or else a new one on this machine
    nodes = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    count = num_workers or len(nodes)
    cores = max(1, math.floor(min(nodes) / math.ceil(count / len(nodes))))
    task = ray.remote(num_cpus=cores, max_retries=MAX_RETRIES)(run_worker)
    pending = [task.remote(section, cores, is_first=index == 0) for index in range(count)]
    result: Any = None
    try:
        while pending:
            done, pending = ray.wait(pending)
            result = ray.get(done[0])
            if isinstance(result, Exception):
                raise result
    except ray.exceptions.RayError as error:
        reason = str(error).splitlines()[0]
        raise WeftError(f"a worker on Ray failed: {reason}; run the same command to resume") from (
            error
        )
    finally:
        for each in pending:
            ray.cancel(each, force=True)
    return list(result)


def run_worker(section: DataSection, cores: int, is_first: bool) -> list[str] | Exception:
    """Prepare data as one of several workers; return a summary, or the user's error."""
    from rich.console import Console

    limit_cores(cores)
    try:
        with show_progress(Console(quiet=not is_first)) as report:
            return list(summarize_dataset(prepare_data(section, cache_dir(section), report)))
    except (InvalidConfig, WeftError) as error:
        return error


def check_shared_cache(section: DataSection) -> None:
    """Check that several workers can prepare the data together.

    Raises:
        InvalidConfig: they cannot.
    """
    if not is_remote(cache_dir(section)):
        rule = "is not in an object store: one worker would prepare the data, the others would wait"
        remedy = "use s3://BUCKET/PATH, or prepare the data on one machine, without --on"
        error = ConfigError("data.cache_dir", section.cache_dir, rule, remedy)
        raise InvalidConfig([error])
