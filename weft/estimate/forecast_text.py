"""What ``weft plan`` tells of a plan, on one screen."""

from __future__ import annotations

from collections.abc import Sequence

from weft.config.schema import Job
from weft.estimate.advice import Advice
from weft.estimate.forecast import Forecast, name_of
from weft.estimate.op_recorder import Where
from weft.estimate.plan_to_analytic import sizes_of
from weft.estimate.search import SearchResult, named, reasons
from weft.plan.devices import GIB
from weft.plan.plan_text import describe_plan
from weft.plan.resolve import Machine, Plan
from weft.plan.stages import format_columns

# Below this part of the capacity left over, "fits" is a close call.
CLOSE = 0.05


def screen(
    job: Job, plan: Plan, machine: Machine, recipe: str, seen: Forecast, advice: Sequence[Advice]
) -> str:
    """The verdict, what the plan is, what memory and time are spent on, and what to change."""
    title, *rows = describe_plan(job, plan, machine, recipe).splitlines()
    warnings = [row for row in rows if row.startswith("warning:")]
    rows = [row for row in rows if row not in warnings]
    lines = [title, *verdict(seen), *rows, ""]
    lines += beside(memory_table(seen), time_table(seen))
    if len(seen.live) > 1:
        each = "  ".join(f"{size / GIB:.1f}" for size in seen.live)
        lines += ["", f"GiB that live on each rank of the pipeline: {each}"]
    if seen.exchanges:
        lines += ["", *exchange_table(seen)]
    lines += ["", *advised(seen, advice)]
    return "\n".join([*lines, *(f"warning: {doubt}" for doubt in seen.doubts), *warnings])


def verdict(seen: Forecast) -> list[str]:
    """Does it fit, and how fast is it?"""
    need = f"{_size(seen.needed)} on the fullest rank"
    if seen.capacity is None:
        fits = f"needs {need}; how much there is, is unknown"
    else:
        left = 1 - seen.needed / seen.capacity
        word = "does not fit" if left < 0 else "fits, narrowly" if left < CLOSE else "fits"
        fits = f"{word}: {need}, of {_size(seen.capacity)}"
    lines = [f"  {'memory':<10} {fits}", f"  {'':<10} rank {seen.rank:,}, {moment(seen.memory.at)}"]
    if seen.step_seconds is None:
        return [*lines, f"  {'speed':<10} not predicted: nothing is known of this device"]
    assert seen.tokens_per_second_per_device is not None
    speed = f"{seen.tokens_per_second_per_device:,.0f} tokens/s a device (within {seen.error:.0%})"
    speed += f", {seconds(seen.step_seconds)} a step"
    if seen.mfu is not None:
        speed += f", MFU {seen.mfu:.1%}"
    return [*lines, f"  {'speed':<10} {speed}"]


def moment(where: Where) -> str:
    """When memory is fullest."""
    passes = {
        "F": "forward",
        "B": "backward",
        "I": "backward to inputs",
        "W": "backward to weights",
    }
    if where.kind not in passes:
        return {"start": "between steps"}.get(where.kind, f"in the {where.kind}")
    text = f"in the {passes[where.kind]} pass of its microbatch {where.turn + 1}"
    if where.block is not None and where.running:
        return f"{text}, block {where.block[1]}"
    return f"{text}, outside of the blocks"


def memory_table(seen: Forecast) -> list[str]:
    """GiB by category, as lines of text."""
    rows = [[name, f"{size:.2f}"] for name, size in seen.by_category().items()]
    rows.append(["together", f"{seen.needed / GIB:.2f}"])
    return format_columns(["memory", "GiB"], rows, left={0})


def time_table(seen: Forecast) -> list[str]:
    """Milliseconds of a step by what they go into, as lines; none if the device is not known."""
    if seen.seconds is None:
        return []
    total = seen.seconds.total()
    spent = sorted(seen.seconds.items(), key=lambda item: -item[1])
    rows = [
        [name_of(name), f"{1000 * part:,.1f}", f"{part / total:.1%}"]
        for name, part in spent
        if part >= 0.0005 * total
    ]
    rows.append(["together", f"{1000 * total:,.1f}", ""])
    return format_columns(["time of a step", "ms", ""], rows, left={0})


def exchange_table(seen: Forecast) -> list[str]:
    """A rank's collectives of a step by axis, their GiB, and the milliseconds not hidden."""
    rows = [
        [
            axis,
            f"{each.collectives:,}",
            f"{each.bytes / GIB:,.2f}",
            f"{1000 * each.exposed_seconds:,.1f}",
        ]
        for axis, each in seen.exchanges.items()
    ]
    return format_columns(["a rank's exchanges", "collectives", "GiB", "exposed ms"], rows, left={0})


def beside(left: Sequence[str], right: Sequence[str]) -> list[str]:
    """Two blocks of lines next to each other."""
    width = max(map(len, left), default=0)
    count = max(len(left), len(right))
    padded = [[*block, *[""] * (count - len(block))] for block in (left, right)]
    return [f"{a:<{width}}    {b}".rstrip() for a, b in zip(*padded, strict=True)]


def advised(seen: Forecast, advice: Sequence[Advice]) -> list[str]:
    """What each change would do to speed and memory, as lines; none if there is nothing to tell."""
    if not advice:
        if seen.fits is False:
            text = "no one or two of the usual changes make it fit"
            searchable = seen.step_seconds is not None and sizes_of(seen.plan) is not None
            return [f"{text}: --search looks among all layouts" if searchable else text]
        return []
    head = "what would make it fit" if seen.fits is False else "what would make it faster"
    rows = [[str(each), f"{each.faster:+.0%}", _size(each.bytes)] for each in advice]
    return format_columns([head, "speed", "memory"], rows, left={0})


def search_screen(found: SearchResult) -> str:
    """The best layouts, and why the others lost."""
    rows = [
        [
            str(place) + "*" * (each is found.winner),
            f"{each.seen.step_seconds:,.3f}",
            "" if each.seen.mfu is None else f"{each.seen.mfu:.1%}",
            f"{each.seen.needed / GIB:.1f}",
            named(each.candidate.layout),
        ]
        for place, each in enumerate(found.best, 1)
    ]
    lines = [f"{found.considered:,} layouts considered, the best {len(rows)} traced", ""]
    if rows:
        lines += format_columns(["", "s a step", "MFU", "GiB", "layout"], rows, left={0, 4})
        if any(each.candidate.precision != found.precision for each in found.best):
            own = f"precision.float8 = {found.precision}"
            lines.append(f"* the best that computes in the recipe's own precision, {own}")
    else:
        lines.append("none fits")
    return "\n".join([*lines, "", *reasons(found.losers)])


def seconds(value: float) -> str:
    """Seconds, in milliseconds below one."""
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.1f} ms"


def _size(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{1024 * count / GIB:.1f} MiB"
