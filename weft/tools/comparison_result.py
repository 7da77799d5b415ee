"""Summarize a comparison in text and tables for terminal, JSON and report."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import expm1
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from weft.config.escaping import format_columns
from weft.config.files import read_json
from weft.config.schema import difference, flatten
from weft.monitor.terminal import display_path
from weft.plan.placement import AXES
from weft.tools.comparison_dir import TrialResult, log_path, trial_dir, trial_seed
from weft.tools.report.report_charts import loss_unit
from weft.tools.trials import Trial, TrialLosses, collect_losses, mean_loss, measure_trial
from weft.tools.variants import TRIAL_KEYS, Variant
from weft.tools.verdict import (
    Claim,
    ComparisonResult,
    compare_variants,
    loss_sentence,
    percent,
    percents,
    speed_sentence,
    to_dict,
)
from weft.tools.verify import format_layout

# Keys that change the meaning of a loss; runs that differ in one cannot be compared.
LOSS_KEYS = (
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
class ComparisonSettings:
    """Settings of a comparison's statistics and prices."""

    repeats: int
    margin: float = 0.005  # of equivalent losses
    relative: bool = True  # the margin is a fraction of the loss; False: nats
    price: float | None = None  # of a device-hour


@dataclass(frozen=True)
class ComparisonSummary:
    """Results of a comparison, the most important first."""

    title: str
    verdict: list[str]
    head: list[str]
    rows: list[list[str]]
    changes: list[str]
    failures: list[str]
    notes: list[str]
    runs: list[Path]  # one of each variant
    comparisons: list[ComparisonResult]
    labels: list[str]
    baseline_loss: float | None
    document: dict[str, Any]

    def text(self) -> str:
        """Format for a terminal."""
        lines = [*self.verdict, ""]
        lines += format_columns(self.head, self.rows, left={0, 2}) if self.rows else []
        for title, items in (("", self.failures), ("changes", self.changes)):
            lines += ["", *([f"{title}:"] if title else []), *items] if items else []
        return "\n".join([*lines, "", *self.notes])


def completed_trials(
    directory: Path, variants: Sequence[Variant], results: Sequence[TrialResult]
) -> list[TrialResult]:
    """Return the trials that succeeded and whose files still exist."""
    return [
        result
        for result in results
        if result.status == 0
        and (_run_dir(directory, variants, result) / "metrics.jsonl").is_file()
    ]


def _run_dir(directory: Path, variants: Sequence[Variant], trial: TrialResult) -> Path:
    return trial_dir(directory, trial.variant, variants[trial.variant].label, trial.repeat)


def summarize_comparison(
    directory: Path,
    variants: Sequence[Variant],
    results: Sequence[TrialResult],
    settings: ComparisonSettings,
) -> ComparisonSummary:
    """Measure the completed trials and compare the variants."""
    trials = []
    for result in completed_trials(directory, variants, results):
        run = _run_dir(directory, variants, result)
        plan = read_json(run / "plan.json")
        seed = trial_seed(variants, result.variant, result.repeat)
        trials.append(measure_trial(result.variant, result.repeat, seed, run, plan))
    trials.sort(key=lambda trial: (trial.variant, trial.repeat))
    labels = [variant.label for variant in variants]
    losses = collect_losses(trials) if trials else None
    base = trials[0].variant if trials else 0
    other_losses = [
        v for v in range(len(variants)) if _loss_config(variants[v]) != _loss_config(variants[base])
    ]
    comparisons = compare_variants(trials, losses, settings.margin, settings.relative, other_losses)
    baseline_loss = None if losses is None else mean_loss(losses, base)
    verdict = _make_verdict(comparisons, losses, labels, trials, baseline_loss)
    head, rows = _make_table(trials, losses, labels, comparisons, settings)
    failures = _format_failures(directory, variants, results)
    notes = _make_notes(variants, trials, losses, settings)
    first = {trial.variant: Path(trial.run_dir) for trial in reversed(trials)}
    return ComparisonSummary(
        title=f"comparison of {'; '.join(labels)}",
        verdict=verdict,
        head=head,
        rows=rows,
        changes=_format_changes(variants, base),
        failures=failures,
        notes=notes,
        runs=[first[v] for v in sorted(first)],
        comparisons=comparisons,
        labels=labels,
        baseline_loss=baseline_loss,
        document={
            "verdict": verdict,
            "variants": [
                _variant_record(
                    variant, variants[base], losses, [t for t in trials if t.variant == v]
                )
                for v, variant in enumerate(variants)
            ],
            "failures": failures,
            "comparisons": [to_dict(comparison, labels) for comparison in comparisons],
            "losses": None if losses is None else _loss_curves(losses, labels),
            "settings": asdict(settings),
            "notes": notes,
        },
    )


def _variant_record(
    variant: Variant, base: Variant, losses: TrialLosses | None, trials: Sequence[Trial]
) -> dict[str, Any]:
    """Return the JSON record of a variant and its trials."""
    return {
        "label": variant.label,
        "recipe": variant.recipe,
        "problems": [str(problem) for problem in variant.problems],
        "changes": _changed_keys(variant, base),
        "trials": [
            asdict(trial)
            | {
                "device_hours_per_billion_tokens": trial.device_hours,
                "loss": losses.final.get((trial.variant, trial.repeat)) if losses else None,
            }
            for trial in trials
        ],
    }


def _loss_curves(losses: TrialLosses, labels: Sequence[str]) -> dict[str, Any]:
    """Return the JSON record of train losses, averaged over each variant's trials."""
    curve = []
    for tokens, by_trial in losses.curve:
        values = {
            v: [loss for (w, _), loss in by_trial.items() if w == v] for v in range(len(labels))
        }
        means = {labels[v]: fmean(losses_v) for v, losses_v in values.items() if losses_v}
        curve.append({"tokens": tokens, "train_loss": means})
    return {"tokens": losses.tokens, "kind": losses.kind, "curve": curve}


def _loss_config(variant: Variant) -> list[Any]:
    flat, train = flatten(variant.job), variant.job.train
    return [*(flat[key] for key in LOSS_KEYS), train.dpo_beta * (train.objective == "dpo")]


def _changed_keys(variant: Variant, base: Variant) -> dict[str, list[Any]]:
    return {
        key: json.loads(json.dumps([before, after], default=str))
        for key, (after, before) in difference(variant.job, base.job).items()
        if key not in TRIAL_KEYS
    }


def _format_changes(variants: Sequence[Variant], base: int) -> list[str]:
    """List the keys in which each variant differs from the baseline."""
    lines = []
    for variant in (*variants[:base], *variants[base + 1 :]):
        keys = [
            f"{key} {_truncate(before)} -> {_truncate(after)}"
            for key, (before, after) in _changed_keys(variant, variants[base]).items()
        ]
        lines.append(f"  {variant.label}: {', '.join(keys) or 'nothing'}")
    return lines


def _truncate(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _format_failures(
    directory: Path, variants: Sequence[Variant], results: Sequence[TrialResult]
) -> list[str]:
    lines = [
        f"{variant.label}: cannot be run: {'; '.join(str(p) for p in variant.problems)}"
        for variant in variants
        if variant.plan is None
    ]
    for result in results:
        if result.status:
            label = variants[result.variant].label
            log = display_path(log_path(_run_dir(directory, variants, result)))
            lines.append(f"{label}: repeat {result.repeat} failed: {result.reason}; log: {log}")
    return lines


def _make_verdict(
    comparisons: Sequence[ComparisonResult],
    losses: TrialLosses | None,
    labels: Sequence[str],
    trials: Sequence[Trial],
    baseline_loss: float | None,
) -> list[str]:
    if losses is None:
        return ["no trial has finished, so there is nothing to compare"]
    if not comparisons:
        return [f"only {labels[trials[0].variant]} has finished trials, so nothing is compared"]
    lines = []
    num_tests = _count_tests([comparison.speed for comparison in comparisons])
    num_device_tests = _count_tests([comparison.per_device for comparison in comparisons])
    for comparison in comparisons:
        pair = (comparison.variant, comparison.baseline)
        names = (labels[comparison.variant], labels[comparison.baseline])
        spreads = [t.spread for t in trials if t.variant in pair and t.spread is not None]
        steps = ""
        if spreads:
            steps = f" (half of a run's steps were within {percent(max(spreads))} of its median)"
        sentences = [speed_sentence(comparison.speed, *names, "", num_tests, steps)]
        if (claim := comparison.per_device) is not None:
            sentences.append(speed_sentence(claim, *names, " per device", num_device_tests, steps))
        sentences.append(loss_sentence(comparison, losses.kind, *names, baseline_loss))
        lines.append("; ".join(sentences))
    if len(comparisons) > 1:
        lines.append(
            f"{len(comparisons)} variants were compared with {labels[comparisons[0].baseline]}, "
            "not with each other; Holm's procedure corrects the p-values for their number"
        )
    return lines


def _count_tests(claims: Sequence[Claim | None]) -> int:
    """Count the p-values that were corrected together."""
    return sum(claim is not None and claim.interval is not None for claim in claims)


def _make_table(
    trials: Sequence[Trial],
    losses: TrialLosses | None,
    labels: Sequence[str],
    comparisons: Sequence[ComparisonResult],
    settings: ComparisonSettings,
) -> tuple[list[str], list[list[str]]]:
    """Return a row per variant: means over its trials, geometric ones for speeds."""
    by_variant = {comparison.variant: comparison for comparison in comparisons}
    head = ["variant", "runs", "layout", "parameters", "s/step", "tokens/s", "MFU", "GiB"]
    head += [f"{losses.kind} loss" if losses else "loss", "speed", "device-h/1e9 tokens"]
    if settings.price is not None:
        head.append("cost/1e9 tokens")
    rows = []
    for v, label in enumerate(labels):
        variant_trials = [trial for trial in trials if trial.variant == v]
        if not variant_trials or losses is None:
            rows.append([label, "0", *["-"] * (len(head) - 2)])
            continue
        hours = [t.device_hours for t in variant_trials if t.device_hours is not None]
        final = [loss for (w, _), loss in losses.final.items() if w == v]
        plan = read_json(Path(variant_trials[0].run_dir) / "plan.json")
        cells = [
            label,
            str(len(variant_trials)),
            format_layout({axis: plan[axis] for axis in AXES}),
            f"{variant_trials[0].num_params:,}",
            _format_mean([t.step_seconds for t in variant_trials], ".4g", geometric_mean),
            _format_mean([t.tokens_per_second for t in variant_trials], ",.0f", geometric_mean),
            _format_mean([t.mfu for t in variant_trials], ".1%"),
            _format_mean([t.memory_peak_gib for t in variant_trials], ".2f"),
            _format_mean(final, ".4f"),
            _format_speedup(by_variant[v].speed) if v in by_variant else "baseline",
            _format_mean(hours, ",.1f", geometric_mean),
        ]
        if settings.price is not None:
            cells.append(_format_mean([settings.price * h for h in hours], ",.2f", geometric_mean))
        rows.append(cells)
    if all(row[6] == "-" for row in rows):
        for row in [head, *rows]:
            del row[6]
    return head, rows


def _format_mean(
    values: Sequence[float | None], form: str, mean: Callable[[list[float]], float] = fmean
) -> str:
    known = [value for value in values if value is not None]
    return format(mean(known), form) if known else "-"


def _format_speedup(claim: Claim) -> str:
    """Format as ``+5.1 % (+3.9 to +6.3)``."""
    if claim.interval is None:
        return f"{100 * expm1(claim.differences[0]):+.1f} %" if claim.differences else "-"
    low, mean, high = percents(claim.interval)
    return f"{mean:+.1f} % ({low:+.1f} to {high:+.1f})"


def _make_notes(
    variants: Sequence[Variant],
    trials: Sequence[Trial],
    losses: TrialLosses | None,
    settings: ComparisonSettings,
) -> list[str]:
    """Describe how speed and loss were measured."""
    if losses is None:
        return []
    num_variants = sum(variant.plan is not None for variant in variants)
    notes = []
    if len(trials) < num_variants * settings.repeats:
        notes.append(
            f"{len(trials)} of {num_variants * settings.repeats} trials have finished so far"
        )
    warm_up_counts = sorted({trial.warm_up for trial in trials})
    notes.append(
        "speed: median step of each run, without the warm-up (first "
        f"{' or '.join(map(str, warm_up_counts))} record{'s' * (warm_up_counts != [1])}); "
        "pairs are runs of one repeat"
    )
    window = "" if losses.kind == "validation" else ", mean over the last tenth of them"
    objectives = dict.fromkeys(variants[t.variant].job.train.objective for t in trials)
    unit = loss_unit(objectives)
    notes.append(f"loss: {losses.kind}, {unit} after {losses.tokens:,} tokens{window}")
    if len({t.tokens for t in trials}) > 1:
        notes.append(
            "runs trained on different numbers of tokens; losses are compared at the smallest"
        )
    return notes
