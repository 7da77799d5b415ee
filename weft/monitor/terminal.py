"""Progress of a run on a terminal, and a console whose failures never end a run."""

from __future__ import annotations

import time
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from weft.config.escaping import escape_controls, raw_stream
from weft.monitor.step_record import StepRecord

# Lines of a step and of a validation, by the fields of `StepRecord`.  The numbers are plain, in the
# units of metrics.jsonl, because log collectors read them: see `weft.monitor.cloudwatch`.
STEP_LINE = (
    "loss {loss:.4f}  {tokens_per_second:.0f} tokens/s  MFU {mfu:.3f}  grad norm {grad_norm:.3f}  "
    "lr {lr:.2e}  memory {memory_peak_gib:.2f} GiB  goodput {goodput:.3f}"
)
EVAL_LINE = "step {step}: validation loss {eval_loss:.4f}"


class _QuietConsole(Console):
    def on_broken_pipe(self) -> None:
        self.quiet = True  # the base class ends the process

    def print(self, *objects: Any, **options: Any) -> None:
        is_text = all(isinstance(item, str) for item in objects)
        options.setdefault("soft_wrap", is_text)  # people copy paths and commands from lines
        escaped = (escape_controls(item) if isinstance(item, str) else item for item in objects)
        try:
            super().print(*escaped, **options)
        except OSError:
            self.quiet = True  # such as a full disk; the run's files have the same numbers


def quiet_console(file: TextIO, quiet: bool = False) -> Console:
    """Return a console that escapes control characters, and is silent after a failure."""
    return _QuietConsole(file=raw_stream(file), highlight=False, markup=False, quiet=quiet)


class Terminal:
    """Live progress line on a terminal; elsewhere one line of text per record.

    Args:
        console: receives the lines.
        steps: steps of the run.
        resumed_step: step at which this start begins.
        is_first: False: not rank 0, which alone knows the goodput of earlier starts.
    """

    def __init__(
        self, console: Console, steps: int, resumed_step: int, is_first: bool = True
    ) -> None:
        self._console = console
        self._hidden = () if is_first else ("{goodput:",)
        self._steps = steps
        self._start_time = time.monotonic()
        self._resumed_step = resumed_step
        self._progress: Progress | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._progress = Progress(
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[text]}", markup=False),
                TimeRemainingColumn(elapsed_when_finished=True),
                console=console,
            )
            self._task: TaskID = self._progress.add_task(
                "train", total=steps, completed=resumed_step, text="first step ..."
            )
            self._progress.start()

    def write(self, record: StepRecord) -> None:
        """Show a record."""
        hidden = self._hidden if record.mfu else (*self._hidden, "{mfu:")
        parts = [part for part in STEP_LINE.split("  ") if not any(h in part for h in hidden)]
        shown = parts if self._progress is None else parts[:3]
        text = "  ".join(shown).format(**vars(record)) + format_means(record.metrics)
        if self._progress is not None:
            self._progress.update(self._task, completed=record.step, text=escape_controls(text))
        else:
            steps = max(1, record.step - self._resumed_step)
            seconds = (time.monotonic() - self._start_time) / steps
            left = format_duration((self._steps - record.step) * seconds)
            self._console.print(f"step {record.step}/{self._steps}  {text}  {left} left")
        if record.eval_loss is not None:
            means = format_means(record.eval_metrics) or " nats/token"
            self._console.print(EVAL_LINE.format(**vars(record)) + means)

    def close(self) -> None:
        """Remove the progress line."""
        if self._progress is not None:
            self._progress.stop()


def format_means(means: dict[str, float] | None) -> str:
    """Format the metrics of an objective, each after two spaces."""
    return "".join(f"  {name} {mean:.3f}" for name, mean in (means or {}).items())


def format_duration(seconds: float) -> str:
    """Format seconds: ``3725`` is ``'1:02:05'``."""
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"
