"""``weft report``, ``weft hang`` and ``weft diff``: commands that explain runs."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from weft.cli.command_parser import Commands, add_command
from weft.cli.option_values import check_file, count, local_path, not_negative, run_path, write_file
from weft.config.errors import ConfigErrors
from weft.config.exit_statuses import FAILED
from weft.config.files import MAX_PORT
from weft.config.run_paths import absolute_dir


def add_report(commands: Commands) -> None:
    """Add ``weft report``."""
    add = add_command(commands, "report", run_report, takes_keys=False).add_argument
    add("runs", metavar="RUN", type=run_path, nargs="+", help="run directory")
    text = "output file (default: report.html in the run directory, or here for several runs)"
    add("--out", metavar="FILE", type=local_path, help=text)
    text = "serve the page on this machine's loopback interface and update it while the run trains"
    add("--serve", action="store_true", help=text)
    add("--port", type=count, default=8899, help="port of --serve; 0: any free one (default: 8899)")


def add_hang(commands: Commands) -> None:
    """Add ``weft hang``."""
    add = add_command(commands, "hang", run_hang, takes_keys=False).add_argument
    add("run", metavar="RUN", type=run_path, help="run directory")
    add("--json", action="store_true", help="print one JSON object instead")


def add_diff(commands: Commands) -> None:
    """Add ``weft diff``."""
    add = add_command(commands, "diff", run_diff, takes_keys=False).add_argument
    add("run_a", type=run_path, help="run directory")
    add("run_b", type=run_path, help="another run directory")
    text = "relative difference that counts as rounding (default: 1e-4)"
    add("--tolerance", type=not_negative, default=1e-4, help=text)
    add("--json", action="store_true", help="print one JSON object instead")


def run_report(options: argparse.Namespace) -> None:
    """Render one or several runs as one self-contained HTML page."""
    from weft.records.run_reader import RunReader, is_run_dir, run_dir_error
    from weft.reporting.page import REPORT_FILE
    from weft.reporting.run_report import report_page

    run_dirs: list[Path] = options.runs
    errors = ConfigErrors()
    errors += [run_dir_error(run) for run in run_dirs if not is_run_dir(run)]
    if options.out and options.serve:
        errors.add("--serve", "writes no file", "omit --out, or omit --serve")
    elif options.out:
        check_file("--out", options.out, errors)
    if options.port > MAX_PORT:
        errors.add("--port", f"is above {MAX_PORT:,}", "use another port, or 0", value=options.port)
    errors.raise_any()
    if options.serve:
        from weft.reporting.report_server import serve

        serve(run_dirs, options.port, partial(print, flush=True))
        return
    from weft.reporting.report_sections import prediction_sections

    runs = [RunReader(run) for run in run_dirs]
    page = report_page(runs, appendix=prediction_sections(runs))
    out = options.out or (run_dirs[0] if len(run_dirs) == 1 else Path()) / REPORT_FILE
    write_file(out, page)
    print(out)


def run_hang(options: argparse.Namespace) -> None:
    """Find the hung rank, its stack, and the ranks blocked on it; ends no process."""
    from weft.supervision.hang import inspect_run

    result = inspect_run(absolute_dir(options.run))
    print(result.to_json() if options.json else result)


def run_diff(options: argparse.Namespace) -> int:
    """Find the first step and layer in which two runs differ.

    exit status: 0 the runs agree within the tolerance; 1 they differ; 2 not comparable
    """
    from weft.comparison.diff import compare_runs

    result = compare_runs(options.run_a, options.run_b, options.tolerance)
    print(result.to_json() if options.json else result)
    return FAILED if result.part else 0
