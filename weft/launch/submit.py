"""Ask a cluster for nodes that run a recipe: write what it takes, check it, show it, hand it in.

A cluster is a module beside this one (`CLUSTERS`) with the functions of `Cluster`.  What they write
is short and starts nothing but ``weft train`` with the same words on every node: who a process is
among the others, `weft.train.where` finds out there.  So what is written can be read, kept, changed
by hand and handed in without weft.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from weft.job import Job, Problem

CLUSTERS = {
    "slurm": "weft.launch.slurm",
    "kubernetes": "weft.launch.kubernetes",
    "sagemaker": "weft.launch.sagemaker",
    "skypilot": "weft.launch.skypilot",
}


@dataclass(frozen=True)
class Request:
    """What is to run, and on what.

    Args:
        name: of the run, as every scheduler takes it: a to z, digits and '-', at most 40.
        words: of the command: ``("weft", "train", recipe, "--section.key", "value", ...)``.
        nodes: the fewest and the most.
        devices: GPUs of a node; 0: none are asked for.
        run_dir: on a file system that all nodes share.
    """

    name: str
    words: tuple[str, ...]
    job: Job
    nodes: tuple[int, int]
    devices: int
    run_dir: Path


class Cluster(Protocol):
    """A module of `CLUSTERS`."""

    ENDING: str  # of the file that is written: '.sh', '.yaml', '.json'

    def problems(self, request: Request) -> list[Problem]:
        """What cannot be asked for here."""

    def render(self, request: Request) -> str:
        """The script or manifest."""

    def check(self, text: str) -> list[str]:
        """What is wrong with it, by the cluster's own tools or its published schema."""

    def submit(self, path: Path, request: Request) -> str:
        """Hand the file in; the job's id."""

    def status(self, id: str) -> str:
        """One line: waiting, running on which nodes, or how it ended."""

    def logs(self, id: str, follow: bool) -> Iterator[str]:
        """Lines that the job has printed."""

    def stop(self, id: str) -> str:
        """Have it save and end; what was done, for people."""


def cluster(name: str) -> Cluster:
    """The module of a cluster."""
    return cast(Cluster, importlib.import_module(CLUSTERS[name]))
