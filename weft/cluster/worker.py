"""One rank of a run: ``python -m weft.cluster.worker RUN_DIR STORE_DIR``, as weft starts it.

Everything that the process prints, from C++ too, goes to ``logs/rank-N.log``; only rank 0's
progress reaches the terminal.  A crash leaves ``logs/rank-N.error.json``, by which the launcher
tells the first cause from what followed.  All of that is set up before any heavy import.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from weft.cluster import FAILED, REQUEUE
from weft.cluster.rank_exit import leave, redirect, write_error
from weft.monitor.process import die_with_parent
from weft.monitor.signals import listen


def main() -> None:
    """Be one rank, from its arguments and the launcher's environment."""
    folder, text_folder = Path(sys.argv[1]), Path(sys.argv[2])
    rank = int(os.environ["RANK"])
    die_with_parent()
    listen()
    sys.path.append(os.getcwd())  # for module:attribute of the user's own
    terminal = redirect(folder, rank)
    try:
        import torch.distributed as dist

        from weft.cluster.watchdog import watch
        from weft.config.reader import read_job
        from weft.data.dataset import open_text
        from weft.monitor.terminal import quiet_console
        from weft.plan.resolve import resolve
        from weft.train.loop import train
        from weft.train.setup import connect, detect_machine

        job, _, _ = read_job(str(folder / "job.toml"))
        plan = resolve(job, detect_machine(job.run.device))
        with connect(plan, job.debug.deterministic) as ranks:
            watch(job, folder, ranks)
            whole = train(job, plan, open_text(text_folder), ranks, quiet_console(terminal))
            # The launcher kills the others as soon as one leaves before the end.
            dist.barrier()
    except BaseException as error:
        write_error(folder, rank, error, terminal)
        leave(FAILED)
    leave(0 if whole else REQUEUE)


if __name__ == "__main__":
    main()
