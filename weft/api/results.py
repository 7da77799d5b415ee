"""Results of the Python interface; each prints as the command does."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.api.runs import HtmlPage
from weft.config.errors import WeftError

if TYPE_CHECKING:
    from weft.estimate.forecast import Forecast
    from weft.planning.plan import Machine, Plan


@dataclass(frozen=True, repr=False)
class PlanResult:
    """The plan of a recipe and its prediction: `weft.plan` returns it.

    Attributes:
        plan: everything derived from the job: layout, batch, pipeline stages.
        forecast: predicted memory and time: ``fits``, ``step_seconds``, ``mfu`` ...
        text: the page of ``weft plan``.
    """

    plan: Plan
    forecast: Forecast
    text: str
    _recipe: str
    _machine: Machine

    def __repr__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """Return plan and prediction as JSON types, as ``weft plan --json`` prints them."""
        from weft.estimate.forecast import forecast_to_json

        return dict(json.loads(forecast_to_json(self.plan, self.forecast)))

    def report(self) -> HtmlPage:
        """Render the prediction with charts, as ``weft plan --report`` does."""
        from weft.planning.plan_text import describe_machine
        from weft.reporting.forecast_charts import forecast_page

        machine = describe_machine(self.plan, self._machine)
        return HtmlPage(forecast_page(self.forecast, self._recipe, machine))


@dataclass(frozen=True, repr=False)
class VerifyResult:
    """The comparison of a layout with one process: `weft.verify` returns it.

    Attributes:
        holds: True if losses and gradients agree to rounding.
        reason: what differs first; or the largest difference.
        text: the report of ``weft verify``.
        record: all numbers, as ``weft verify --json`` prints them.
    """

    holds: bool
    reason: str
    text: str
    record: dict[str, Any]

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True, repr=False)
class Comparison:
    """The comparison of variants: `weft.compare` returns it.

    Attributes:
        text: verdict, table and notes, as ``weft compare`` prints them.
        record: all numbers, as ``weft compare --json`` prints them.
        path: directory with the runs; None for plans without ``out``.
    """

    text: str
    record: dict[str, Any]
    path: Path | None = None

    def __repr__(self) -> str:
        return self.text

    @property
    def verdict(self) -> list[str]:
        """The verdict, in sentences."""
        return list(self.record["verdict"])

    def report(self) -> HtmlPage:
        """Return the page of the comparison, with all runs."""
        if self.path is None:
            raise WeftError("a comparison of plans has a page only with out=DIRECTORY")
        return HtmlPage((self.path / "report.html").read_bytes())
