"""A command that asks a model, on as many ranks of this machine as its layout has."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence

from weft.plan.resolve import Plan
from weft.train.setup import Rank, connect, joined


def on_every_rank(plan: Plan, arguments: Sequence[str], run: Callable[[Rank], None]) -> int:
    """Call ``run`` as one rank: this process if it is the only one or a launcher has started it.

    Else torchrun starts ``weft ARGUMENTS``, the command that is running, as the plan's ranks.

    Returns:
        The exit status.
    """
    if plan.world_size == 1 or joined():
        with connect(plan) as rank:
            run(rank)
        return 0
    environment = {"OMP_NUM_THREADS": str(plan.threads), **os.environ}
    if plan.device == "cpu" and sys.platform == "linux":
        # One host: do not depend on what its name resolves to.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # -P: a file of the user's that is called like a module must not come before that module.
    python = [sys.executable, "-P", "-m"]
    agent = [*python, "torch.distributed.run", "--standalone", "--no-python"]
    command = [*agent, "--nproc-per-node", str(plan.world_size), *python, "weft.cli", *arguments]
    return subprocess.run(command, env=environment, check=False).returncode
