"""A comparison as it stands, in words and tables: for the terminal, JSON and the report."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import expm1
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from weft.config.files import read_json
from weft.config.schema import difference, flatten
from weft.monitor.report_charts import loss_unit
from weft.monitor.terminal import shown
from weft.plan.placement import AXES
from weft.plan.stages import format_columns
from weft.tools.comparison_dir import TrialResult, log_of, seed_of, trial_folder
from weft.tools.trials import Losses, Trial, losses_of, measure_trial, usual_loss
from weft.tools.variants import OWN, Variant
from weft.tools.verdict import (
    Claim,
    ComparisonResult,
    judge,
    loss_sentence,
    percent,
    percents,
    speed_sentence,
    to_dict,
)
from weft.tools.verify import layout

# What a loss is of: between other tokens or objectives, the same number means something else.
OF_THE_LOSS = (
    "data.path",
    "data.text_field",
    "data.format",
    "data.mixture",
    "data.tokenizer",
    "data.chat_template",
    "data.vocab_size",
    "data.validation_fraction",
    "data.invalid_utf8",
    "data.packing",
    "data.overlong",
    "train.objective",
)


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
    judged: list[ComparisonResult]
    labels: list[str]
    usual_loss: float | None  # of the baseline
    document: dict[str, Any]

    def text(self) -> str:
        """For a terminal."""
        lines = [*self.verdict, ""]
        lines += format_columns(self.head, self.rows, left={0, 2}) if self.rows else []
        for name, some in (("", self.failures), ("what changed", self.changes)):
            lines += ["", *([f"{name}:"] if name else []), *some] if some else []
        return "\n".join([*lines, "", *self.notes])


def finished(
    folder: Path, variants: Sequence[Variant], ended: Sequence[TrialResult]
) -> list[TrialResult]:
    """Trials that ended well and are still there."""
    return [
        each
        for each in ended
        if each.status == 0 and (_run_of(folder, variants, each) / "metrics.jsonl").is_file()
    ]


def _run_of(folder: Path, variants: Sequence[Variant], trial: TrialResult) -> Path:
    return trial_folder(folder, trial.variant, variants[trial.variant].label, trial.repeat)


def result_of(
    folder: Path, variants: Sequence[Variant], ended: Sequence[TrialResult], settings: Settings
) -> Result:
    """Measure and judge what there is."""
    trials = []
    for each in finished(folder, variants, ended):
        run = _run_of(folder, variants, each)
        plan = read_json(run / "plan.json")
        seed = seed_of(variants, each.variant, each.repeat)
        trials.append(measure_trial(each.variant, each.repeat, seed, run, plan))
    trials.sort(key=lambda trial: (trial.variant, trial.repeat))
    labels = [variant.label for variant in variants]
    losses = losses_of(trials) if trials else None
    base = trials[0].variant if trials else 0
    apart = [v for v in range(len(variants)) if _loss_of(variants[v]) != _loss_of(variants[base])]
    judged = judge(trials, losses, settings.margin, settings.relative, apart)
    usual = None if losses is None else usual_loss(losses, base)
    verdict = _verdict(judged, losses, labels, trials, usual)
    head, rows = _table(trials, losses, labels, judged, settings)
    failures = _failures(folder, variants, ended)
    notes = _notes(variants, trials, losses, settings)
    first = {trial.variant: Path(trial.folder) for trial in reversed(trials)}
    return Result(
        title=f"comparison of {'; '.join(labels)}",
        verdict=verdict,
        head=head,
        rows=rows,
        changes=_changes(variants, base),
        failures=failures,
        notes=notes,
        runs=[first[v] for v in sorted(first)],
        judged=judged,
        labels=labels,
        usual_loss=usual,
        document={
            "verdict": verdict,
            "variants": [
                _told(variant, variants[base], losses, [t for t in trials if t.variant == v])
                for v, variant in enumerate(variants)
            ],
            "failures": failures,
            "comparisons": [to_dict(each, labels) for each in judged],
            "losses": None if losses is None else _curves(losses, labels),
            "settings": asdict(settings),
            "notes": notes,
        },
    )


def _told(
    variant: Variant, base: Variant, losses: Losses | None, trials: Sequence[Trial]
) -> dict[str, Any]:
    """A variant and its trials, for machines."""
    return {
        "label": variant.label,
        "recipe": variant.recipe,
        "problems": [str(problem) for problem in variant.problems],
        "changes": _changed(variant, base),
        "trials": [
            asdict(trial)
            | {
                "device_hours_per_billion_tokens": trial.device_hours,
                "loss": losses.final.get((trial.variant, trial.repeat)) if losses else None,
            }
            for trial in trials
        ],
    }


def _curves(losses: Losses, labels: Sequence[str]) -> dict[str, Any]:
    """Train losses, means over each variant's trials, for machines."""
    curve = []
    for tokens, found in losses.curve:
        of = {v: [loss for (w, _), loss in found.items() if w == v] for v in range(len(labels))}
        means = {labels[v]: fmean(some) for v, some in of.items() if some}
        curve.append({"tokens": tokens, "train_loss": means})
    return {"tokens": losses.tokens, "kind": losses.kind, "curve": curve}


def _loss_of(variant: Variant) -> list[Any]:
    flat, train = flatten(variant.job), variant.job.train
    return [*(flat[key] for key in OF_THE_LOSS), train.dpo_beta * (train.objective == "dpo")]


def _changed(variant: Variant, base: Variant) -> dict[str, list[Any]]:
    found = difference(variant.job, base.job)
    return {
        key: json.loads(json.dumps([theirs, ours], default=str))
        for key, (ours, theirs) in found.items()
        if key not in OWN
    }


def _changes(variants: Sequence[Variant], base: int) -> list[str]:
    """Of each variant the keys that differ from the baseline's."""
    lines = []
    for variant in (*variants[:base], *variants[base + 1 :]):
        keys = [
            f"{key} {_short(then)} -> {_short(now)}"
            for key, (then, now) in _changed(variant, variants[base]).items()
        ]
        lines.append(f"  {variant.label}: {', '.join(keys) or 'nothing'}")
    return lines


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _failures(folder: Path, variants: Sequence[Variant], ended: Sequence[TrialResult]) -> list[str]:
    lines = [
        f"{variant.label}: cannot be run: {'; '.join(str(p) for p in variant.problems)}"
        for variant in variants
        if variant.plan is None
    ]
    for each in ended:
        if each.status:
            what = f"{variants[each.variant].label}: repeat {each.repeat} failed: {each.reason}"
            lines.append(f"{what}; log: {shown(log_of(_run_of(folder, variants, each)))}")
    return lines


def _verdict(
    judged: Sequence[ComparisonResult],
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
    tested = _tested([each.speed for each in judged])
    tested_per_device = _tested([each.per_device for each in judged])
    for each in judged:
        ours, base = labels[each.variant], labels[each.baseline]
        spreads = [t.spread for t in trials if t.variant in (each.variant, each.baseline)]
        known = [spread for spread in spreads if spread is not None]
        steps = ""
        if known:
            steps = f" (half of a run's steps were within {percent(max(known))} of its median)"
        parts = [speed_sentence(each.speed, ours, base, "", tested, steps)]
        if (claim := each.per_device) is not None:
            what = " per device"
            parts.append(speed_sentence(claim, ours, base, what, tested_per_device, steps))
        parts.append(loss_sentence(each, losses.kind, ours, base, usual))
        lines.append("; ".join(parts))
    if len(judged) > 1:
        lines.append(
            f"{len(judged)} variants were compared with {labels[judged[0].baseline]}, by Holm's "
            "correction for so many; not with each other"
        )
    return lines


def _tested(claims: Sequence[Claim | None]) -> int:
    """How many p-values were corrected together."""
    return sum(claim is not None and claim.interval is not None for claim in claims)


def _table(
    trials: Sequence[Trial],
    losses: Losses | None,
    labels: Sequence[str],
    judged: Sequence[ComparisonResult],
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
        hours = [t.device_hours for t in mine if t.device_hours is not None]
        final = [loss for (w, _), loss in losses.final.items() if w == v]
        plan = read_json(Path(mine[0].folder) / "plan.json")
        cells = [
            label,
            str(len(mine)),
            layout({axis: plan[axis] for axis in AXES}),
            f"{mine[0].num_params:,}",
            _mean([t.step_seconds for t in mine], ".4g", geometric_mean),
            _mean([t.tokens_per_second for t in mine], ",.0f", geometric_mean),
            _mean([t.mfu for t in mine], ".1%"),
            _mean([t.memory_peak_gib for t in mine], ".2f"),
            _mean(final, ".4f"),
            _ratio(against[v].speed) if v in against else "baseline",
            _mean(hours, ",.1f", geometric_mean),
        ]
        if settings.price is not None:
            cells.append(_mean([settings.price * h for h in hours], ",.2f", geometric_mean))
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
    low, mean, high = percents(claim.interval)
    return f"{mean:+.1f} % ({low:+.1f} to {high:+.1f})"


def _notes(
    variants: Sequence[Variant],
    trials: Sequence[Trial],
    losses: Losses | None,
    settings: Settings,
) -> list[str]:
    """How it was measured, and what is to be known of that."""
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
    objectives = dict.fromkeys(variants[t.variant].job.train.objective for t in trials)
    unit = loss_unit(objectives)
    notes.append(f"loss: {losses.kind}, {unit} after {losses.tokens:,} tokens{window}")
    if len({t.tokens for t in trials}) > 1:
        notes.append("some trained on more tokens; losses are taken where all have seen as many")
    return notes
