"""RESULT: a comparison as it stands, in words and tables: for the terminal, JSON and the report."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from math import expm1
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from weft.compare.experiment import (
    COMPARISON,
    Ended,
    Stopping,
    Variant,
    log_of,
    open_comparison,
    run_trials,
    seed_of,
    stored,
    trial_folder,
)
from weft.compare.judge import (
    OF_THE_TEXT,
    Claim,
    Judged,
    Losses,
    Trial,
    judge,
    loss_sentence,
    losses_of,
    measure,
    percent,
    speed_sentence,
    to_dict,
    usual_loss,
)
from weft.compare.verify import layout
from weft.job import Problem, WeftError, difference, flatten
from weft.observe.files import replace_bytes, replace_text
from weft.observe.report import FILE, Section, report_page
from weft.observe.report import table as html_table
from weft.observe.terminal import shown
from weft.plan.placement import AXES
from weft.plan.stages import align
from weft.train.folder import owning


@dataclass(frozen=True)
class Settings:
    """How a comparison is judged and priced."""

    repeats: int
    margin: float = 0.005  # of equivalent losses
    relative: bool = True  # the margin is a part of the loss, else nats
    price: float | None = None  # of a device's hour


@dataclass(frozen=True)
class Result:
    """What there is to say, the most important first."""

    title: str
    verdict: list[str]
    head: list[str]
    rows: list[list[str]]
    changes: list[str]
    failures: list[str]
    notes: list[str]
    runs: list[Path]  # one of each variant
    judged: list[Judged]
    labels: list[str]
    usual_loss: float | None  # of the baseline
    document: dict[str, Any]

    def text(self) -> str:
        """For a terminal."""
        lines = [*self.verdict, ""]
        lines += align(self.head, self.rows, left={0, 2}) if self.rows else []
        for name, some in (("", self.failures), ("what changed", self.changes)):
            lines += ["", *([f"{name}:"] if name else []), *some] if some else []
        return "\n".join([*lines, "", *self.notes])


def finished(folder: Path, variants: Sequence[Variant], ended: Sequence[Ended]) -> list[Ended]:
    """Trials that ended well and are still there."""
    return [
        each
        for each in ended
        if each.status == 0
        and (
            trial_folder(folder, each.variant, variants[each.variant].label, each.repeat)
            / "metrics.jsonl"
        ).is_file()
    ]


def result_of(
    folder: Path, variants: Sequence[Variant], ended: Sequence[Ended], settings: Settings
) -> Result:
    """Measure and judge what there is."""
    trials = []
    for each in finished(folder, variants, ended):
        run = trial_folder(folder, each.variant, variants[each.variant].label, each.repeat)
        plan = json.loads((run / "plan.json").read_text("utf-8"))
        seed = seed_of(variants, each.variant, each.repeat)
        trials.append(measure(each.variant, each.repeat, seed, run, plan))
    trials.sort(key=lambda trial: (trial.variant, trial.repeat))
    labels = [variant.label for variant in variants]
    losses = losses_of(trials) if trials else None
    base = trials[0].variant if trials else 0
    apart = [v for v in range(len(variants)) if _text_of(variants[v]) != _text_of(variants[base])]
    judged = judge(trials, losses, settings.margin, settings.relative, apart)
    usual = None if losses is None else usual_loss(losses, base)
    failures = _failures(folder, variants, ended)
    changes = _changes(variants, base)
    verdict = _verdict(judged, losses, labels, trials, usual)
    head, rows = _table(trials, losses, labels, judged, settings)
    notes = _notes(variants, trials, losses, judged, labels, settings)
    return Result(
        title=f"comparison of {'; '.join(labels)}",
        verdict=verdict,
        head=head,
        rows=rows,
        changes=changes,
        failures=failures,
        notes=notes,
        runs=[Path(t.folder) for t in trials if t.repeat == min(_repeats(trials, t.variant))],
        judged=judged,
        labels=labels,
        usual_loss=usual,
        document={
            "verdict": verdict,
            "variants": [
                {
                    "label": label,
                    "recipe": variants[v].recipe,
                    "problems": [str(problem) for problem in variants[v].problems],
                    "changes": _changed(variants[v], variants[base]),
                    "trials": [
                        asdict(t)
                        | {
                            "device_hours_per_billion_tokens": t.device_hours,
                            "loss": losses.final.get((t.variant, t.repeat)) if losses else None,
                        }
                        for t in trials
                        if t.variant == v
                    ],
                }
                for v, label in enumerate(labels)
            ],
            "failures": failures,
            "comparisons": [to_dict(each, labels) for each in judged],
            "losses": None
            if losses is None
            else {
                "tokens": losses.tokens,
                "kind": losses.kind,
                "curve": [
                    {
                        "tokens": tokens,
                        "train_loss": {
                            labels[v]: fmean(some)
                            for v in range(len(labels))
                            if (some := [x for (w, _), x in found.items() if w == v])
                        },
                    }
                    for tokens, found in losses.curve
                ],
            },
            "settings": asdict(settings),
            "notes": notes,
        },
    )


def _repeats(trials: Sequence[Trial], variant: int) -> list[int]:
    return [trial.repeat for trial in trials if trial.variant == variant]


def _text_of(variant: Variant) -> list[Any]:
    flat = flatten(variant.job)
    return [flat[key] for key in OF_THE_TEXT]


def _changed(variant: Variant, base: Variant) -> dict[str, list[Any]]:
    found = difference(variant.job, base.job)
    return {
        key: json.loads(json.dumps([theirs, ours], default=str))
        for key, (ours, theirs) in found.items()
        if key not in ("run.dir", "checkpoint.dir")
    }


def _changes(variants: Sequence[Variant], base: int) -> list[str]:
    """Keys that differ from the baseline's, and what the layouts are."""
    lines = []
    for place, variant in enumerate(variants):
        keys = [
            f"{key} {_short(then)} -> {_short(now)}"
            for key, (then, now) in _changed(variant, variants[base]).items()
        ]
        if place != base:
            lines.append(f"  {variant.label}: {', '.join(keys) or 'nothing'}")
    return lines


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _failures(folder: Path, variants: Sequence[Variant], ended: Sequence[Ended]) -> list[str]:
    lines = [
        f"{variant.label}: cannot be run: {'; '.join(str(p) for p in variant.problems)}"
        for variant in variants
        if variant.plan is None
    ]
    for each in ended:
        if each.status:
            label = variants[each.variant].label
            log = log_of(trial_folder(folder, each.variant, label, each.repeat))
            lines.append(f"{label}: repeat {each.repeat} failed: {each.reason}; log: {shown(log)}")
    return lines


def _verdict(
    judged: Sequence[Judged],
    losses: Losses | None,
    labels: Sequence[str],
    trials: Sequence[Trial],
    usual: float | None,
) -> list[str]:
    if losses is None:
        return ["no trial has finished: there is nothing to compare"]
    if not judged:
        return [f"only {labels[trials[0].variant]} has finished trials: nothing to compare it with"]
    lines = []
    comparisons = len(judged)
    for each in judged:
        ours, base = labels[each.variant], labels[each.baseline]
        spreads = [t.spread for t in trials if t.variant in (each.variant, each.baseline)]
        known = [spread for spread in spreads if spread is not None]
        steps = (
            f" (half of a run's steps were within {percent(max(known))} of its median)"
            if known
            else ""
        )
        parts = [speed_sentence(each.speed, ours, base, "", comparisons, steps)]
        if each.per_device is not None:
            parts.append(
                speed_sentence(each.per_device, ours, base, " per device", comparisons, steps)
            )
        parts.append(loss_sentence(each, losses.kind, ours, base, usual))
        lines.append("; ".join(parts))
    if comparisons > 1:
        base = labels[judged[0].baseline]
        lines.append(
            f"{comparisons} variants were compared with {base}, by Holm's correction for so many; "
            "not with each other"
        )
    return lines


def _table(
    trials: Sequence[Trial],
    losses: Losses | None,
    labels: Sequence[str],
    judged: Sequence[Judged],
    settings: Settings,
) -> tuple[list[str], list[list[str]]]:
    """A line for each variant: means over its trials, of speeds the geometric, as of ratios."""
    against = {each.variant: each for each in judged}
    head = ["variant", "runs", "layout", "parameters", "s/step", "tokens/s", "MFU", "GiB"]
    head += [f"{losses.kind} loss" if losses else "loss", "speed", "device-h/1e9 tokens"]
    if settings.price is not None:
        head.append("cost/1e9 tokens")
    rows = []
    for v, label in enumerate(labels):
        mine = [trial for trial in trials if trial.variant == v]
        if not mine or losses is None:
            rows.append([label, "0", *["-"] * (len(head) - 2)])
            continue
        rates = [t.mfu for t in mine if t.mfu is not None]
        hours = [t.device_hours for t in mine if t.device_hours is not None]
        final = [loss for (w, _), loss in losses.final.items() if w == v]
        plan = json.loads((Path(mine[0].folder) / "plan.json").read_text("utf-8"))
        cells = [
            label,
            str(len(mine)),
            layout({axis: plan[axis] for axis in AXES}),
            f"{mine[0].num_params:,}",
            _mean([t.step_seconds for t in mine], ".4g", geometric_mean),
            _mean([t.tokens_per_second for t in mine], ",.0f", geometric_mean),
            f"{fmean(rates):.1%}" if rates else "-",
            _mean([t.memory_peak_gib for t in mine], ".2f"),
            _mean(final, ".4f"),
            _ratio(against[v].speed) if v in against else "baseline",
            _mean(hours, ",.1f", geometric_mean),
        ]
        if settings.price is not None:
            cells.append(f"{settings.price * geometric_mean(hours):,.2f}" if hours else "-")
        rows.append(cells)
    if all(row[6] == "-" for row in rows):
        for row in [head, *rows]:
            del row[6]
    return head, rows


def _mean(
    values: Sequence[float | None], form: str, mean: Callable[[list[float]], float] = fmean
) -> str:
    known = [value for value in values if value is not None]
    return format(mean(known), form) if known else "-"


def _ratio(claim: Claim) -> str:
    """``+5.1 % (3.9 to 6.3)``."""
    if claim.interval is None:
        return f"{100 * expm1(claim.differences[0]):+.1f} %" if claim.differences else "-"
    low, mean, high = (
        100 * expm1(end) for end in (claim.interval.low, claim.interval.mean, claim.interval.high)
    )
    return f"{mean:+.1f} % ({low:+.1f} to {high:+.1f})"


def _notes(
    variants: Sequence[Variant],
    trials: Sequence[Trial],
    losses: Losses | None,
    judged: Sequence[Judged],
    labels: Sequence[str],
    settings: Settings,
) -> list[str]:
    if losses is None:
        return []
    able = sum(variant.plan is not None for variant in variants)
    notes = []
    if len(trials) < able * settings.repeats:
        notes.append(f"so far {len(trials)} of {able * settings.repeats} trials have finished")
    cold = sorted({trial.warm_up for trial in trials})
    notes.append(
        f"speed: median step of each run, without its first {' or '.join(map(str, cold))} "
        f"record{'s' * (cold != [1])} (warm-up); pairs are runs of one repeat"
    )
    window = "" if losses.kind == "held-out" else ", mean over the last tenth of them"
    notes.append(f"loss: {losses.kind}, nats per token after {losses.tokens:,} tokens{window}")
    if len({t.tokens for t in trials}) > 1:
        notes.append("some trained on more tokens; losses are taken where all have seen as many")
    return notes


def compare(
    folder: Path,
    variants: Sequence[Variant],
    settings: Settings,
    say: Callable[[str], object],
) -> tuple[Result, int]:
    """Run what is missing of a comparison, and judge all of it.

    Args:
        say: told what is going on, in lines.

    Returns:
        What there is to say, which is in the folder, too, and how many stop signals came.
    """
    open_comparison(folder, variants)  # before anything is written into a folder of others
    taken = Problem(
        "--out", str(folder), "another process is comparing in this folder", "wait for it"
    )
    with owning(folder, taken), Stopping() as stopping:
        before, looks = open_comparison(folder, variants)
        ended = finished(folder, variants, before)  # what failed is tried again
        most = max((each.repeat for each in ended), default=0)
        settings = replace(settings, repeats=max(most, settings.repeats))

        def note(looks: Sequence[int]) -> Result:
            result = result_of(folder, variants, ended, settings)
            if len(looks) > 1:
                result.notes.append(
                    f"the verdict was looked at {len(looks)} times, after "
                    f"{', '.join(map(str, looks))} trials: to add runs until something is found "
                    "makes false claims likelier"
                )
            document = result.document | stored(variants, ended, looks)
            replace_text(folder / COMPARISON, json.dumps(document, indent=2) + "\n")
            return result

        note(looks)
        run_trials(folder, variants, ended, settings.repeats, say, lambda: note(looks), stopping)
        if ended and len(ended) not in looks:  # nothing new is learnt from looking twice
            looks.append(len(ended))
        result = note(looks)
        write_page(folder, result, say)
        return result, stopping.came


def to_json(result: Result) -> str:
    """What is in the folder's ``comparison.json``, but for what only `compare` reads."""
    return json.dumps(result.document, indent=2)


# --------------------------------------------------------------------------- the page


def write_page(folder: Path, result: Result, say: Callable[[str], object]) -> None:
    """``report.html``: `sections`, then the first run of each variant beside each other."""
    if not result.runs:
        return
    try:
        page = report_page(result.runs, title=result.title, sections=sections(result))
        replace_bytes(folder / FILE, page)
    except WeftError as error:  # plotly is not there: the rest of it is
        say(f"no {FILE}: {error}")


def sections(result: Result) -> list[Section]:
    """For the report, the verdict first."""
    found = [("Verdict", "".join(f"<p>{escape(line)}</p>" for line in result.verdict))]
    if plot := forest(result):
        found.append(("Intervals", plot))
    if result.rows:
        numbers = [1, *range(3, len(result.head))]
        found.append(("Variants", html_table(result.head, result.rows, numbers=numbers)))
    if result.failures:
        found.append(("Not compared", _list(result.failures)))
    if result.changes:
        found.append(("What changed", _list(result.changes)))
    if result.notes:
        found.append(("How it was measured", _list(result.notes)))
    return found


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line.strip())}</li>" for line in lines) + "</ul>"


def forest(result: Result) -> str:
    """Intervals of every variant against the baseline: speed, and loss with its margin."""
    plots = []
    speeds = [
        (result.labels[each.variant], [100 * expm1(end) for end in _ends(each.speed)])
        for each in result.judged
        if each.speed.interval is not None
    ]
    if speeds:
        plots.append(_plot("tokens/s against the baseline, %", speeds, None))
    part = 100 / (result.usual_loss or 1.0)
    compared = [each for each in result.judged if each.loss is not None and each.loss.interval]
    losses = [
        (result.labels[each.variant], [part * end for end in _ends(each.loss)])
        for each in compared
        if each.loss is not None
    ]
    if losses:
        margin = compared[0].margin_nats
        assert margin is not None
        plots.append(
            _plot("loss against the baseline's, % (shaded: margin)", losses, part * margin)
        )
    return "".join(plots)


def _ends(claim: Claim) -> tuple[float, float, float]:
    assert claim.interval is not None
    return claim.interval.low, claim.interval.mean, claim.interval.high


def _plot(title: str, rows: Sequence[tuple[str, list[float]]], margin: float | None) -> str:
    """Horizontal intervals over one scale, as SVG in the page's own colours."""
    width, line, left, right = 600, 40, 20, 580
    numbers = [
        0.0,
        *(end for _, ends in rows for end in ends),
        *([margin, -margin] if margin else []),
    ]
    low, high = min(numbers), max(numbers)
    room = (high - low) * 0.08 or 1.0
    low, high = low - room, high + room

    def x(value: float) -> float:
        return round(left + (right - left) * (value - low) / (high - low), 1)

    height = 30 + line * len(rows) + 24
    parts = [f'<text x="{left}" y="16">{escape(title)}</text>']
    if margin:
        wide = x(margin) - x(-margin)
        parts.append(
            f'<rect x="{x(-margin)}" y="24" width="{wide:.1f}" height="{line * len(rows)}" '
            'fill="currentColor" fill-opacity="0.1"/>'
        )
    parts.append(
        f'<line x1="{x(0)}" x2="{x(0)}" y1="24" y2="{24 + line * len(rows)}" '
        'stroke="currentColor" stroke-dasharray="4 3"/>'
    )
    for place, (label, (a, mean, b)) in enumerate(rows):
        y = 24 + line * place
        told = f"{label}: {mean:+.2g} ({a:+.2g} to {b:+.2g})"
        parts.append(f'<text x="{left}" y="{y + 15}">{escape(told)}</text>')
        parts.append(
            f'<line x1="{x(a)}" x2="{x(b)}" y1="{y + 26}" y2="{y + 26}" stroke="currentColor" '
            'stroke-width="2"/>'
        )
        parts.append(f'<circle cx="{x(mean)}" cy="{y + 26}" r="4" fill="currentColor"/>')
    bottom = 24 + line * len(rows) + 18
    ends = [(low + room, "start"), (0.0, "middle"), (high - room, "end")]
    for value, anchor in ends if low + room < 0 < high - room else ends[::2]:
        parts.append(
            f'<text x="{x(value)}" y="{bottom}" text-anchor="{anchor}">{value:+.3g}</text>'
        )
    return (
        f'<svg viewBox="0 0 {width} {height}" width="100%" style="max-width:{width}px;'
        f'display:block" role="img" aria-label="{escape(title)}" font-size="13" '
        f'fill="currentColor">{"".join(parts)}</svg>'
    )
