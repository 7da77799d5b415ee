"""A run directory from Python: metrics, job, plan, checkpoints and report."""

from __future__ import annotations

import html
import importlib.util
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.config.errors import InvalidConfig
from weft.config.schema import Job
from weft.records.run_reader import RunEvent, RunReader, is_run_dir, read_run_job, run_dir_error

if TYPE_CHECKING:
    from pandas import DataFrame

# Kinds of events after which a run has ended.
END_KINDS = ("end", "stop", "failure", "hang")
COUNTS = {"step", "tokens"}  # integers in every record
FRAME_HEIGHT = 700  # pixels of a page in a notebook


class HtmlPage:
    """A self-contained HTML page; a notebook shows it inline."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def __repr__(self) -> str:
        return f"<HTML page of {len(self.content) / 1024:.0f} KiB; save it with .save(path)>"

    def _repr_html_(self) -> str:
        source = html.escape(self.content.decode("utf-8"))
        style = f"width:100%;height:{FRAME_HEIGHT}px;border:0"
        return f'<iframe srcdoc="{source}" style="{style}"></iframe>'

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page to a file, and return its path."""
        path = Path(path)
        path.write_bytes(self.content)
        return path


class RunHandle:
    """A run directory; reads its files anew at every access.

    Args:
        directory: the run directory.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.path = Path(directory)
        if not is_run_dir(self.path):
            raise InvalidConfig([run_dir_error(self.path)])

    def __repr__(self) -> str:
        reader = RunReader(self.path)
        loss = reader.last("loss")
        state = f"{self.state} at step {self.step:,} of {reader.steps:,}"
        return f"<run {self.path}: {state}{'' if loss is None else f', loss {loss:.4f}'}>"

    @property
    def job(self) -> Job:
        """The complete configuration: ``run.job.optim.lr``."""
        return read_run_job(self.path)

    @property
    def plan(self) -> dict[str, Any]:
        """The plan that the run recorded: layout, batch, stages, warnings."""
        return RunReader(self.path).plan

    @property
    def metrics(self) -> DataFrame | list[dict[str, float]]:
        """The logged steps, one row each.

        With pandas a DataFrame, NaN where a step has no value; else a list of dicts without it.
        """
        columns: dict[str, Any] = dict(RunReader(self.path).columns)
        for name in columns.keys() & COUNTS:
            columns[name] = columns[name].astype("int64")
        if importlib.util.find_spec("pandas") is not None:
            return importlib.import_module("pandas").DataFrame(columns)
        rows = zip(*(column.tolist() for column in columns.values()), strict=True)
        named = (zip(columns, row, strict=True) for row in rows)
        return [{name: value for name, value in row if not math.isnan(value)} for row in named]

    @property
    def events(self) -> list[RunEvent]:
        """Starts, evaluations, checkpoints, warnings and failures, by time."""
        return RunReader(self.path).read_events()

    @property
    def checkpoints(self) -> list[Path]:
        """The checkpoints, oldest first; `weft.load_text_model` accepts each."""
        from weft.checkpoint.manifest import list_checkpoints
        from weft.training.state import checkpoint_dir

        return list_checkpoints(checkpoint_dir(self.job.checkpoint, self.path))

    @property
    def step(self) -> int:
        """The last logged step; 0 before the first."""
        return int(RunReader(self.path).last("step") or 0)

    @property
    def loss(self) -> float | None:
        """The last training loss."""
        return RunReader(self.path).last("loss")

    @property
    def eval_loss(self) -> float | None:
        """The last validation loss; None without an evaluation."""
        return RunReader(self.path).last("eval_loss")

    @property
    def state(self) -> str:
        """One of finished, running, failed, stopped, not started."""
        return RunReader(self.path).state(time.time())[0]

    @property
    def exit_reason(self) -> str:
        """The reason why the run ended; empty while it runs."""
        ends = [event.text for event in self.events if event.kind in END_KINDS]
        return ends[-1] if ends and self.state != "running" else ""

    def report(self) -> HtmlPage:
        """Render the page of ``weft report``."""
        from weft.reporting.report_sections import prediction_sections
        from weft.reporting.run_report import report_page

        readers = [RunReader(self.path)]
        return HtmlPage(report_page(readers, appendix=prediction_sections(readers)))
