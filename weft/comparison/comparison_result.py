"""Summarize a comparison in text and tables for terminal, JSON and report."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import expm1
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from weft.comparison.trials import (
    TrialLosses,
    TrialResult,
    describe_log,
    measure_losses,
    measure_trial,
    trial_dir,
    trial_seed,
)
from weft.comparison.variants import TRIAL_KEYS, Variant
from weft.comparison.verdict import (
    Claim,
    compare_variants,
    loss_sentence,
    mean_loss,
    percent,
    percents,
    speed_sentence,
    to_dict,
)
from weft.config.formatting import format_columns
from weft.config.keys import parse_condition
from weft.config.schema import difference, flatten
from weft.planning.needs import key_facts
from weft.reporting.report_charts import loss_unit


@dataclass(frozen=True)
class ComparisonSettings:
    """Settings of a comparison's statistics and prices."""

    repeats: int
    margin: float = 0.005  # of equivalent losses
    relative: bool = True  # the margin is a fraction of the loss; False: nats
    price: float | None = None  # of a device-hour


class ComparisonSummary:
    """Results of a comparison: verdict, table, changes, failures and notes.

    Args:
        directory: directory of the comparison.
        variants: all variants, also those that cannot run.
        results: of the trials so far.
        settings: number of repeats, margin of equivalence, and price.
        looks: numbers of trials after which a verdict was given.
        unfinished: a line for each trial that has not ended.
    """

    def __init__(
        self,
        directory: Path,
        variants: Sequence[Variant],
        results: Sequence[TrialResult],
        settings: ComparisonSettings,
        looks: Sequence[int] = (),
        unfinished: Sequence[str] = (),
    ) -> None:
        self._directory, self._variants, self._results = directory, variants, results
        self._settings, self._unfinished = settings, unfinished
        self.labels = [variant.label for variant in variants]
        self.title = f"comparison of {'; '.join(self.labels)}"
        trials = sorted(
            (
                measure_trial(
                    result.variant,
                    result.repeat,
                    trial_seed(variants, result.variant, result.repeat),
                    _run_dir(directory, variants, result),
                )
                for result in completed_trials(directory, variants, results)
            ),
            key=lambda trial: (trial.variant, trial.repeat),
        )
        self._losses: TrialLosses | None = None
        if trials:
            trials, self._losses = measure_losses(trials)
        self._trials = [[t for t in trials if t.variant == v] for v in range(len(variants))]
        self._base = trials[0].variant if trials else 0
        self.baseline_loss = mean_loss(self._trials[self._base])
        # Validation losses have no label smoothing.
        is_smoothed = self._losses is not None and self._losses.kind == "train"
        loss_configs = [
            [*_loss_config(variant), is_smoothed * variant.job.train.label_smoothing]
            for variant in variants
        ]
        others = [v for v, c in enumerate(loss_configs) if c != loss_configs[self._base]]
        self.comparisons = compare_variants(trials, settings.margin, settings.relative, others)
        self._other_losses = others
        self.runs = [Path(trials[0].run_dir) for trials in self._trials if trials]
        self.verdict = self._make_verdict()
        self.head, self.rows = self._make_table()
        self.changes = self._format_changes()
        self.failures = self._format_failures()
        self.notes = self._make_notes(looks)

    def text(self) -> str:
        """Format for a terminal."""
        lines = [*self.verdict, ""]
        lines += format_columns(self.head, self.rows, left={0, 2}) if self.rows else []
        for title, items in (("", self.failures), ("changes", self.changes)):
            lines += ["", *([f"{title}:"] if title else []), *items] if items else []
        return "\n".join([*lines, "", *self.notes])

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON record."""
        return {
            "verdict": self.verdict,
            "variants": [self._variant_record(v) for v in range(len(self._variants))],
            "failures": self.failures,
            "comparisons": [to_dict(comparison, self.labels) for comparison in self.comparisons],
            "losses": None if self._losses is None else self._loss_curves(self._losses),
            "settings": asdict(self._settings),
            "notes": self.notes,
        }

    def _variant_record(self, v: int) -> dict[str, Any]:
        variant = self._variants[v]
        return {
            "label": variant.label,
            "recipe": variant.recipe,
            "errors": [*variant.errors],
            "changes": self._changed_keys(variant),
            "trials": [
                asdict(trial) | {"device_hours_per_billion_tokens": trial.device_hours}
                for trial in self._trials[v]
            ],
        }

    def _loss_curves(self, losses: TrialLosses) -> dict[str, Any]:
        """Return train losses, averaged over each variant's trials."""
        owners = [trial.variant for trials in self._trials for trial in trials]
        curve = []
        for tokens, values in losses.curve:
            by_label: dict[str, list[float]] = {}
            for v, loss in zip(owners, values, strict=True):
                if loss is not None:
                    by_label.setdefault(self.labels[v], []).append(loss)
            means = {label: fmean(values) for label, values in by_label.items()}
            curve.append({"tokens": tokens, "train_loss": means})
        return {"tokens": losses.tokens, "kind": losses.kind, "curve": curve}

    def _changed_keys(self, variant: Variant) -> dict[str, list[Any]]:
        """Return the keys that differ from the baseline, with both values."""
        return {
            key: json.loads(json.dumps([before, after], default=str))
            for key, (after, before) in difference(
                variant.job, self._variants[self._base].job
            ).items()
            if key not in TRIAL_KEYS
        }

    def _format_changes(self) -> list[str]:
        lines = []
        for v, variant in enumerate(self._variants):
            if v != self._base and variant.is_valid:
                keys = [
                    f"{key} {_truncate(before)} -> {_truncate(after)}"
                    for key, (before, after) in self._changed_keys(variant).items()
                ]
                lines.append(f"  {variant.label}: {', '.join(keys) or 'nothing'}")
        return lines

    def _format_failures(self) -> list[str]:
        lines = [
            f"{variant.label}: cannot be run: {'; '.join(variant.errors)}"
            for variant in self._variants
            if not variant.is_valid
        ]
        for result in self._results:
            if result.status:
                label = self.labels[result.variant]
                log = describe_log(_run_dir(self._directory, self._variants, result))
                lines.append(f"{label}: repeat {result.repeat} failed: {result.reason}; {log}")
        return [*lines, *self._unfinished]

    def _make_verdict(self) -> list[str]:
        if self._losses is None:
            return ["no trial has finished, so there is nothing to compare"]
        if not self.comparisons:
            label = self.labels[self._base]
            return [f"only {label} has finished trials, so nothing is compared"]
        changes = [{*self._changed_keys(self._variants[c.variant])} for c in self.comparisons]
        affects_speed = any(
            not keys or not all(key_facts(key).same_speed for key in keys) for keys in changes
        )
        lines = [] if affects_speed else self._rank_losses()
        num_tests = _count_tests([comparison.speed for comparison in self.comparisons])
        num_device_tests = _count_tests([comparison.per_device for comparison in self.comparisons])
        for comparison in self.comparisons:
            pair = (comparison.variant, comparison.baseline)
            names = (self.labels[comparison.variant], self.labels[comparison.baseline])
            spreads = [t.spread for v in pair for t in self._trials[v] if t.spread is not None]
            steps = ""
            if spreads:
                spread = percent(max(spreads))
                steps = f" (half of a run's steps were within {spread} of its median)"
            sentences = []
            if affects_speed:
                sentences = [speed_sentence(comparison.speed, *names, "", num_tests, steps)]
            if affects_speed and (claim := comparison.per_device) is not None:
                sentence = speed_sentence(claim, *names, " per device", num_device_tests, steps)
                sentences.append(sentence)
            kind = self._losses.kind
            sentences.append(loss_sentence(comparison, kind, *names, self.baseline_loss))
            lines.append("; ".join(sentences))
        if len(self.comparisons) > 1:
            lines.append(
                f"{len(self.comparisons)} variants were compared with {self.labels[self._base]}, "
                "not with each other; Holm's procedure corrects the p-values for their number"
            )
        return lines

    def _rank_losses(self) -> list[str]:
        """Return the order of the losses, and the best one compared with the next.

        Empty if fewer than three variants have comparable losses: then one comparison says it.
        """
        assert self._losses is not None
        means = {
            v: mean
            for v, trials in enumerate(self._trials)
            if v not in self._other_losses and (mean := mean_loss(trials)) is not None
        }
        if len(means) < 3:
            return []
        order = sorted(means, key=lambda v: means[v])
        ranking = ", ".join(f"{self.labels[v]} ({means[v]:.4f})" for v in order)
        lines = [f"lowest {self._losses.kind} loss first: {ranking}"]
        best, second = order[:2]
        settings = self._settings
        pair = [*self._trials[best], *self._trials[second]]
        for result in compare_variants(pair, settings.margin, settings.relative):
            names = (self.labels[result.variant], self.labels[result.baseline])
            sentence = loss_sentence(result, self._losses.kind, *names, means[result.baseline])
            lines.append(
                f"the best two, {self.labels[best]} and {self.labels[second]}: {sentence}; "
                f"relative to {names[1]}"
            )
        return lines

    def _make_table(self) -> tuple[list[str], list[list[str]]]:
        """Return a row per variant: means over its trials, geometric ones for speeds."""
        speedups = {c.variant: _format_speedup(c.speed) for c in self.comparisons}
        head = ["variant", "runs", "layout", "parameters", "s/step", "tokens/s", "MFU", "GiB"]
        head += [f"{self._losses.kind} loss" if self._losses else "loss", "speed"]
        head.append("device-h/1e9 tokens")
        price = self._settings.price
        if price is not None:
            head.append("cost/1e9 tokens")
        rows = []
        for v, (label, trials) in enumerate(zip(self.labels, self._trials, strict=True)):
            if not trials:
                rows.append([label, "0", *["-"] * (len(head) - 2)])
                continue
            hours = [t.device_hours for t in trials if t.device_hours is not None]
            cells = [
                label,
                str(len(trials)),
                trials[0].layout,
                f"{trials[0].num_params:,}",
                _format_mean([t.step_seconds for t in trials], ".4g", geometric_mean),
                _format_mean([t.tokens_per_second for t in trials], ",.0f", geometric_mean),
                _format_mean([t.mfu for t in trials], ".1%"),
                _format_mean([t.memory_peak_gib for t in trials], ".2f"),
                _format_mean([t.loss for t in trials], ".4f"),
                speedups.get(v, "baseline"),
                _format_mean(hours, ",.1f", geometric_mean),
            ]
            if price is not None:
                cells.append(_format_mean([price * h for h in hours], ",.2f", geometric_mean))
            rows.append(cells)
        if all(row[6] == "-" for row in rows):
            for row in [head, *rows]:
                del row[6]
        return head, rows

    def _make_notes(self, looks: Sequence[int]) -> list[str]:
        """Describe how speed and loss were measured."""
        notes = []
        if self._losses is not None:
            trials = [trial for trials in self._trials for trial in trials]
            num_variants = sum(variant.is_valid for variant in self._variants)
            num_trials = num_variants * self._settings.repeats
            if len(trials) < num_trials:
                notes.append(f"{len(trials)} of {num_trials} trials have finished so far")
            warm_up_counts = sorted({trial.warm_up for trial in trials})
            notes.append(
                "speed: median step of each run, without the warm-up (first "
                f"{' or '.join(map(str, warm_up_counts))} record{'s' * (warm_up_counts != [1])}); "
                "pairs are runs of one repeat"
            )
            window = (
                "" if self._losses.kind == "validation" else ", mean over the last tenth of them"
            )
            objectives = [self._variants[t.variant].job.train.objective for t in trials]
            notes.append(
                f"loss: {self._losses.kind}, {loss_unit(objectives)} after "
                f"{self._losses.tokens:,} tokens{window}"
            )
            if len({t.tokens for t in trials}) > 1:
                notes.append(
                    "runs trained on different numbers of tokens; losses are compared at the "
                    "smallest"
                )
        if len(looks) > 1:
            notes.append(
                f"{len(looks)} verdicts were given, after {', '.join(map(str, looks))} "
                "trials: adding runs until a difference is found makes false claims likelier"
            )
        return notes


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


def _loss_config(variant: Variant) -> list[Any]:
    """Return the values that give the loss its meaning: they must be equal."""
    flat = flatten(variant.job) | {"train.preference_beta": variant.job.train.beta}
    meaning = []
    for name, value in flat.items():
        if (facts := key_facts(name)).other_loss:
            terms = [term for term in parse_condition(facts.needs) if term.sign]
            meaning.append(value if all(term.holds(flat[term.name]) for term in terms) else None)
    return meaning


def _truncate(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _count_tests(claims: Sequence[Claim | None]) -> int:
    """Count the p-values that were corrected together."""
    return sum(claim is not None and claim.interval is not None for claim in claims)


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
