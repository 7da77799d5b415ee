"""Findings of the node checks of weft doctor, and their severities.

A *bad* finding makes a run fail, hang, compute wrong numbers, or reach less than half the speed of
its hardware: such a node does not train (`weft.cluster.doctor.preflight`).  A *warning* may cost
speed, or a later run; a *note* is information.  Checks skip facts that are unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from weft.cluster.node_facts import Facts

SEVERITIES = ("ok", "note", "warning", "bad")


@dataclass(frozen=True)
class Finding:
    """Result of one check: an observation, and a remedy unless all is well.

    ``check``: displayed name of the check; `weft.cluster.node_checks.run_checks` sets it.
    """

    check: str = field(default="", kw_only=True)
    severity: str
    observation: str
    remedy: str = ""


ok, note, warning, bad = (partial(Finding, severity) for severity in SEVERITIES)

Check = Callable[[Facts], Iterator[Finding]]
