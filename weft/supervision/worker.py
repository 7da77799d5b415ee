"""Run one rank: ``python -m weft.supervision.worker RUN_DIR DATASET_DIR``.

All output of the process, including C++ code, goes to ``logs/rank-N.log``; only the progress of
rank 0 reaches the terminal.  A crash writes ``logs/rank-N.error.json``, from which the launcher
finds the root cause.  The redirection happens before any heavy import.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from weft.config.exit_statuses import FAILED, REQUEUE
from weft.monitor.process import die_with_parent, exit_process
from weft.monitor.signals import listen
from weft.supervision.rank_exit import redirect_output, write_error


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

        from weft.config.reader import read_job
        from weft.data.dataset import open_dataset
        from weft.inference.eval_text import prompt_generator
        from weft.monitor.terminal import quiet_console
        from weft.planning.resolve import resolve
        from weft.preparation.job_checks import plan_with_data
        from weft.supervision.watchdog import start_watchdog
        from weft.training.loop import train
        from weft.training.machine import detect_machine
        from weft.training.setup import connect

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
