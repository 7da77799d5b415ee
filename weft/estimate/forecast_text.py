"""Render a forecast, its advice, and search results as text for ``weft plan``."""

from __future__ import annotations

from collections.abc import Sequence

from weft.config.accelerators import unit_of
from weft.config.formatting import format_columns, format_count
from weft.estimate.advice import Advice
from weft.estimate.forecast import Forecast, cause_label
from weft.estimate.op_recorder import OpLocation
from weft.estimate.pieces import supports_pieces
from weft.estimate.search import SearchResult, describe_layout, summarize_rejections
from weft.estimate.whole_run import RESTART_SECONDS, Bounds, Failures, predict_whole_run
from weft.planning.devices import GIB
from weft.planning.plan import Machine, Plan
from weft.planning.plan_text import describe_plan

# Fraction of the capacity left free below which a plan fits only narrowly.
NARROW_MARGIN = 0.05
TIME_UNITS = (("days", 86400), ("hours", 3600), ("minutes", 60))


def render_plan(
    plan: Plan,
    machine: Machine,
    recipe: str,
    prediction: Forecast,
    advice: Sequence[Advice] | None = None,
    price: float | None = None,
    mtbf: float | None = None,
) -> str:
    """Render verdict, plan, memory, step time, communication, warnings and advice.

    For ``price`` and ``mtbf`` see `verdict`.  ``advice``: None leaves it out.
    """
    title, *plan_lines = describe_plan(plan, machine, recipe).splitlines()
    warnings = [line for line in plan_lines if line.startswith("warning:")]
    plan_lines = [line for line in plan_lines if line not in warnings]
    memory, speed, *duration = verdict(prediction, price, mtbf)
    peak = f"rank {prediction.rank:,}, {peak_label(prediction.memory.peak_location)}"
    rows = [memory, ("", peak), speed, *duration]
    lines = [title, *(f"  {name:<10} {text}" for name, text in rows)]
    lines += [*plan_lines, ""]
    lines += side_by_side(memory_table(prediction), time_table(prediction))
    if len(prediction.live_peaks) > 1:
        sizes = "  ".join(f"{size / GIB:.1f}" for size in prediction.live_peaks)
        lines += ["", f"peak live GiB per pipeline rank: {sizes}"]
    if prediction.communication:
        lines += ["", *communication_table(prediction)]
    warnings = [*(f"warning: {caveat}" for caveat in prediction.caveats), *warnings]
    lines += [""] * bool(warnings) + warnings
    lines += [] if advice is None else advice_lines(prediction, advice)
    return "\n".join(lines)


def verdict(
    prediction: Forecast, price: float | None = None, mtbf: float | None = None
) -> list[list[str]]:
    """Return memory, speed and the whole run as rows of a name and a text.

    Args:
        prediction: of the plan.
        price: of a device hour, for the cost of the run.
        mtbf: mean seconds between failures of the whole job.
    """
    needed = f"{_format_bytes(prediction.needed_bytes)} on the fullest rank"
    if prediction.capacity_bytes is None:
        text = f"needs {needed}; the device's memory is unknown"
    else:
        margin = 1 - prediction.needed_bytes / prediction.capacity_bytes
        word = (
            "does not fit" if margin < 0 else "fits, narrowly" if margin < NARROW_MARGIN else "fits"
        )
        text = f"{word}: {needed}, of {_format_bytes(prediction.capacity_bytes)}"
    speed = "not predicted: the speed of this device is unknown"
    if prediction.step_seconds is not None:
        step = format_seconds(prediction.step_seconds)
        tokens = prediction.tokens_per_second_per_device or 0.0
        slow, fast = sorted(tokens / factor for factor in prediction.error_range)
        speed = f"{tokens:,.0f} tokens/s per device ({slow:,.0f} to {fast:,.0f}), {step} per step"
        speed += "" if prediction.mfu is None else f", MFU {prediction.mfu:.1%}"
    rows = [["memory", text], ["speed", speed]]
    return rows + run_rows(prediction, price, mtbf)


def run_rows(
    prediction: Forecast, price: float | None = None, mtbf: float | None = None
) -> list[list[str]]:
    """Return the whole run as rows of a name and a text; for arguments see `verdict`."""
    plan = prediction.plan
    run = predict_whole_run(plan, prediction.step_seconds, prediction.error_range, mtbf)
    if not plan.num_steps:
        return []
    tokens = format_count(plan.num_steps * plan.tokens_per_step)
    length = f"{plan.num_steps:,} steps, {tokens} tokens"
    if run is None:
        is_asked = price is not None or mtbf is not None
        return [["whole run", f"{length}; how long they take is unknown"]] if is_asked else []

    def describe(seconds: Bounds) -> str:
        hours = run.device_hours(seconds)
        unit = f"{unit_of(plan.device)}-hours"
        text = f"{describe_times(seconds)}, {_format_amount(hours.expected, 10)} {unit}"
        if price is None:
            return text
        cost = [_format_amount(price * value, 1000, 2) for value in hours]
        return f"{text}, cost {cost[0]} ({cost[1]} to {cost[2]}) at {price:g} per hour"

    rows = [["whole run", f"{length}: {describe(run.seconds)}"]]
    if run.failures is None:
        return rows
    if not run.failures.goodput.expected:
        text = f"one every {describe_time(run.failures.mtbf)}, sooner than a restart: no progress"
        return [*rows, ["failures", text]]
    return [*rows, *_failure_rows(run.failures, describe(run.failures.seconds), plan)]


def _failure_rows(failures: Failures, whole_run: str, plan: Plan) -> list[list[str]]:
    """Return rows about failures; ``whole_run``: time and cost with them."""
    goodput, costs = failures.goodput, failures.costs
    text = f"one every {describe_time(failures.mtbf)}, {failures.count:,.0f} in all: goodput "
    text += f"{goodput.expected:.1%} ({goodput.low:.1%} to {goodput.high:.1%})"
    causes = ", ".join(
        f"{part:.1%} {'repeated steps' if name == 'repeated' else name}"
        for name, part in failures.lost.items()
    )
    restart = f"a restart takes {describe_time(costs.restart)}, "
    restart += f"{describe_time(RESTART_SECONDS)} of it assumed"
    rows = [["failures", text], ["", f"with them {whole_run}"], ["", f"lost: {causes}; {restart}"]]
    step_seconds = failures.seconds.expected * goodput.expected / plan.num_steps
    if failures.interval < plan.num_steps:
        text = f"best every {failures.interval:,} steps ("
        text += f"{describe_time(failures.interval * step_seconds)}): "
        text += f"--checkpoint.interval {failures.interval}"
    else:
        text = "best only at the end: --checkpoint.interval 0"
    own = failures.own_interval
    if own is not None and own != failures.interval:
        where = f"every {own:,} steps" if own < plan.num_steps else "only at the end"
        text += f"; {where}, as now, goodput {failures.own_goodput:.1%}"
    rows.append(["saves", text])
    text = f"a save blocks training for {costs.blocking:.1f} s, and is complete after another "
    rows.append(["", text + f"{costs.write:.1f} s"])
    count, nodes = failures.spare_nodes, failures.num_nodes
    text = f"{count:,} node{'s' * (count != 1)} beside {nodes:,}, if a broken node is back after "
    rows.append(["spares", text + "a day"])
    return rows


def _format_amount(value: float, limit: float, digits: int = 1) -> str:
    """Format a number, from ``limit`` on without decimals."""
    return f"{value:,.{0 if value >= limit else digits}f}"


def describe_times(seconds: Bounds) -> str:
    """Format a long time with its range: ``45.1 days (36.1 to 56.4)``."""
    for unit, size in TIME_UNITS:
        if seconds.expected >= 2 * size:
            expected, low, high = (value / size for value in seconds)
            return f"{expected:,.1f} {unit} ({low:,.1f} to {high:,.1f})"
    return f"{seconds.expected:.0f} seconds ({seconds.low:.0f} to {seconds.high:.0f})"


def describe_time(seconds: float) -> str:
    """Format a long time: ``12.0 minutes``, ``3.4 hours``, ``45.1 days``."""
    for unit, size in TIME_UNITS:
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.0f} seconds"


def peak_label(location: OpLocation) -> str:
    """Describe the moment of peak memory."""
    passes = {
        "F": "forward",
        "B": "backward",
        "I": "input-gradient",
        "W": "weight-gradient",
    }
    if location.kind not in passes:
        labels = {"start": "between steps", "clip": "during gradient clipping"}
        return labels.get(location.kind, f"in the {location.kind}")
    text = f"in the {passes[location.kind]} pass of its microbatch {location.ordinal + 1}"
    if location.block is not None and location.is_in_block:
        return f"{text}, block {location.block[1]}"
    return f"{text}, outside the blocks"


def memory_table(prediction: Forecast) -> list[str]:
    """Return a table of GiB by category."""
    rows = [[name, f"{size:.2f}"] for name, size in prediction.gib_by_category().items()]
    rows.append(["total", f"{prediction.needed_bytes / GIB:.2f}"])
    return format_columns(["memory", "GiB"], rows, left={0})


def time_table(prediction: Forecast) -> list[str]:
    """Return a table of milliseconds by cause; empty for an unknown device."""
    if prediction.time_breakdown is None:
        return []
    total = prediction.time_breakdown.total()
    causes = sorted(prediction.time_breakdown.items(), key=lambda item: -item[1])
    rows = [
        [cause_label(name), f"{1000 * seconds:,.1f}", f"{seconds / total:.1%}"]
        for name, seconds in causes
        if seconds >= 0.0005 * total
    ]
    rows.append(["total", f"{1000 * total:,.1f}", ""])
    return format_columns(["step time", "ms", ""], rows, left={0})


def communication_table(prediction: Forecast) -> list[str]:
    """Return a table of a rank's communication per step by axis."""
    rows = [
        [
            axis,
            f"{traffic.collectives:,}",
            f"{traffic.bytes / GIB:,.2f}",
            f"{1000 * traffic.exposed_seconds:,.1f}",
        ]
        for axis, traffic in prediction.communication.items()
    ]
    header = ["communication per rank", "collectives", "GiB", "exposed ms"]
    return format_columns(header, rows, left={0})


def side_by_side(left: Sequence[str], right: Sequence[str]) -> list[str]:
    """Join two blocks of lines horizontally."""
    width = max(map(len, left), default=0)
    height = max(len(left), len(right))
    padded = [[*block, *[""] * (height - len(block))] for block in (left, right)]
    return [
        f"{left_line:<{width}}    {right_line}".rstrip()
        for left_line, right_line in zip(*padded, strict=True)
    ]


def advice_lines(prediction: Forecast, advice: Sequence[Advice]) -> list[str]:
    """Return the table of advice after an empty line; nothing without advice."""
    table = advice_table(prediction, advice)
    return ["", *table] if table else []


def advice_table(prediction: Forecast, advice: Sequence[Advice]) -> list[str]:
    """Return a table of the effects of changes on speed and memory."""
    if not advice:
        if prediction.fits is False:
            text = "no usual change, and no pair of them, makes it fit"
            is_searchable = prediction.step_seconds is not None and supports_pieces(prediction.plan)
            return [f"{text}; use --search to try all layouts" if is_searchable else text]
        return []
    head = f"changes that make it {'fit' if prediction.fits is False else 'faster'}"
    rows = [
        [str(change), f"{change.speedup:+.0%}", _format_bytes(change.memory_bytes)]
        for change in advice
    ]
    return format_columns([head, "speed", "memory"], rows, left={0})


def render_search(result: SearchResult) -> str:
    """Render the best layouts, and the reasons for rejecting the others."""
    rows = [
        [
            str(position) + "*" * (each is result.winner),
            f"{each.prediction.step_seconds:,.3f}",
            "" if each.prediction.mfu is None else f"{each.prediction.mfu:.1%}",
            f"{each.prediction.needed_bytes / GIB:.1f}",
            describe_layout(each.candidate.plan),
        ]
        for position, each in enumerate(result.best, 1)
    ]
    lines = [f"{result.num_considered:,} layouts considered, the best {len(rows)} traced", ""]
    if rows:
        lines += format_columns(["", "s/step", "MFU", "GiB", "layout"], rows, left={0, 4})
        if any(each.candidate.precision != result.precision for each in result.best):
            precision = f"precision.float8={result.precision}"
            lines.append(f"* the fastest in the precision of the recipe, {precision}")
    else:
        lines.append("no layout fits")
    return "\n".join([*lines, "", *summarize_rejections(result.rejected)])


def format_seconds(value: float) -> str:
    """Format seconds; below one as milliseconds."""
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.1f} ms"


def _format_bytes(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{1024 * count / GIB:.1f} MiB"
