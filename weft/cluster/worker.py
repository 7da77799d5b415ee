"""Entry point of one rank: ``python -m weft.cluster.worker RUN_DIR DATASET_DIR``.

All output of the process, including C++ code, goes to ``logs/rank-N.log``; only the progress of
rank 0 reaches the terminal.  A crash writes ``logs/rank-N.error.json``, from which the launcher
finds the root cause.  The redirection happens before any heavy import.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from weft.cluster import FAILED, REQUEUE
from weft.cluster.rank_exit import exit_process, redirect_output, write_error
from weft.monitor.process import die_with_parent
from weft.monitor.signals import listen


def main() -> None:
    """Train as one rank, configured by the arguments and the launcher's environment."""
    run_dir, dataset_dir = Path(sys.argv[1]), Path(sys.argv[2])
    rank = int(os.environ["RANK"])
    die_with_parent()
    listen()
    sys.path.append(os.getcwd())  # for module:attribute names in the user's code
    terminal = redirect_output(run_dir, rank)
    try:
        import torch.distributed as dist

        from weft.cluster.watchdog import start_watchdog
        from weft.config.reader import read_job
        from weft.data.dataset import open_dataset
        from weft.monitor.terminal import quiet_console
        from weft.plan.resolve import resolve
        from weft.tools.eval_text import prompt_generator
        from weft.train.job_checks import plan_with_data
        from weft.train.loop import train
        from weft.train.machine import detect_machine
        from weft.train.setup import connect

        job, _, _ = read_job(str(run_dir / "job.toml"))
        dataset = open_dataset(dataset_dir)
        plan = plan_with_data(resolve(job, detect_machine(job.run)), dataset)
        with connect(plan, job.debug.deterministic) as ranks:
            start_watchdog(job, run_dir, ranks)
            generate = prompt_generator(plan)
            console = quiet_console(terminal, quiet=rank != 0)
            is_complete = train(plan, dataset, ranks, console, generate)
            # The launcher kills all ranks as soon as one exits early.
            dist.barrier()
    except BaseException as error:
        write_error(run_dir, rank, error, terminal)
        exit_process(FAILED)
    exit_process(0 if is_complete else REQUEUE)


if __name__ == "__main__":
    main()
