"""What a check of a node says: `ok`, or what is wrong with it and what to do.

What is *bad* lets a run fail, hang, be wrong, or be less than half as fast as its hardware: a node
with a bad finding does not train (`weft.cluster.doctor.preflight`).  A *warning* may cost speed, or
a run some day; a *note* is worth knowing.  What is not known is not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from weft.cluster.node_facts import Facts

SEVERITIES = ("ok", "note", "warning", "bad")


@dataclass(frozen=True)
class Finding:
    """What a check has seen, and what to do about it (nothing, if it is ok).

    ``check``: the name that is shown; `weft.cluster.node_checks.examine` fills it in.
    """

    check: str = field(default="", kw_only=True)
    severity: str
    seen: str
    remedy: str = ""


ok, note, warning, bad = (partial(Finding, severity) for severity in SEVERITIES)

Check = Callable[[Facts], Iterator[Finding]]
