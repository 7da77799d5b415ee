"""The equivalence matrix: layouts that must compute one process's gradients.

A layout is a string of axes and overrides: ``"pp2 tp2"`` is two stages of two tensor-parallel
ranks. `COVERED` holds every pair of techniques in as few layouts as possible.
`tests/parallel/test_layouts.py` compares each with one process, on tensors.
`tests/estimate/test_trace.py` compares each of at most four ranks with its trace. A layout
added here is compared in both.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.covering import Case, cover_pairs
from tests.harness import run_ranks
from tests.small import Overrides, gradients, merged
from weft.config.axes import AXES
from weft.planning.pipeline_schedule import SCHEDULES

TWO_RANKS = ("dp_shard2", "dp_replicate2", "tp2", "pp2", "cp2")


def parse(layout: str) -> tuple[int, Overrides]:
    """Return the number of ranks and the overrides of a layout."""
    ranks, overrides = 1, []
    for word in layout.split():
        match = re.fullmatch(rf"({'|'.join(AXES)})(\d+)", word)
        if match:
            ranks *= int(match[2])
            overrides.append((f"parallel.{match[1]}", match[2]))
        else:
            name, _, value = word.partition("=")
            overrides.append((name if "." in name else f"parallel.{name}", value))
    return ranks, overrides


Compute = Callable[[list[Overrides], str], list[dict[str, Any]]]


def many_gradients(jobs: list[Overrides], store: str) -> list[dict[str, Any]]:
    """Return the results of `gradients` for several jobs, run in the same ranks."""
    results = []
    for job in jobs:
        try:
            results.append(gradients(job, store))
        except Exception as error:
            error.add_note(f"in the job {job}")
            raise
    return results


def many_fused_gradients(
    compute: Compute, overrides: Overrides, store: str
) -> list[dict[str, Any]]:
    """Return gradients with the fused loss, which never holds all logits, and without it."""
    from weft.training import step

    results = []
    for chunk in (8, 1 << 30):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step, "chunk_tokens", lambda *args, chunk=chunk: chunk)
            results += compute([overrides], store)
    return results


def check_fused_loss(compute: Compute, overrides: Overrides, store: Path) -> None:
    """Compare the gradients of two ranks with the fused loss, and without it."""
    for fused, plain in run_ranks(
        many_fused_gradients, 2, compute, overrides, str(store), timeout=200
    ):
        assert fused["loss"] == pytest.approx(plain["loss"], rel=1e-5)
        assert fused["grads"].keys() == plain["grads"].keys()
        for name, grad in plain["grads"].items():
            error = (fused["grads"][name] - grad).abs().max()
            assert error < 1e-4 * grad.abs().max(), name


_of_one_process: dict[Any, dict[str, Any]] = {}


def one_process(
    store: str, jobs: list[Overrides], compute: Compute = many_gradients
) -> list[dict[str, Any]]:
    """Return the results of ``compute`` in one process; each job is computed once."""
    keys = [(compute, store, tuple(job)) for job in jobs]
    missing = [key for key in dict.fromkeys(keys) if key not in _of_one_process]
    if missing:
        (result,) = run_ranks(compute, 1, [list(job) for *_, job in missing], store)
        _of_one_process.update(zip(missing, result, strict=True))
    return [_of_one_process[key] for key in keys]


def check_gradients(
    layout: str,
    store: Path,
    model: Overrides,
    tolerance: float,
    extra: Sequence[tuple[str, str]] = (),
) -> None:
    """Compare a layout, with overrides ``extra``, with one process on every rank."""
    check_many([layout], store, lambda layout: model, tolerance, extra)


def check_many(
    layouts: Sequence[str],
    store: Path,
    model_of: Callable[[str], Overrides],
    tolerance: float,
    extra: Sequence[tuple[str, str]] = (),
    compute: Compute = many_gradients,
) -> None:
    """Compare layouts of equal size with one process, on every rank of one world.

    Args:
        model_of: returns the overrides of the one-process job for a layout.
        compute: function called in the ranks, by default `many_gradients`.
    """
    models = [model_of(layout) for layout in layouts]
    ones = one_process(str(store), models, compute)
    (ranks,) = {parse(layout)[0] for layout in layouts}
    jobs = [
        [*model, *parse(layout)[1], *extra] for model, layout in zip(models, layouts, strict=True)
    ]
    results = run_ranks(compute, ranks, jobs, str(store), timeout=300)
    for layout, one, many in zip(layouts, ones, zip(*results, strict=True), strict=True):
        for rank in merged(list(many)):
            _compare(layout, rank, one, tolerance)


def _compare(layout: str, many: dict[str, Any], one: dict[str, Any], tolerance: float) -> None:
    assert many["loss"] == pytest.approx(one["loss"], rel=tolerance), layout
    assert many["norm"] == pytest.approx(one["norm"], rel=tolerance), layout
    assert many["grads"].keys() == one["grads"].keys(), layout
    for name, grad in one["grads"].items():
        scale = grad.abs().max()
        assert scale > 0, name
        torch.testing.assert_close(
            many["grads"][name] / scale,
            grad / scale,
            rtol=0,
            atol=tolerance,
            msg=lambda text, name=name: f"gradient of {name} in {layout}: {text}",
        )


def slow_layouts(layouts: Iterable[str]) -> list[Any]:
    """Return test parameters of layouts that are slow tests, each in its own world."""
    return [pytest.param([layout], marks=pytest.mark.slow, id=layout) for layout in layouts]


def group_by_ranks(layouts: Iterable[str], most: int = 6) -> list[Any]:
    """Group layouts of equal size, to run in one world, and return test parameters.

    Those of 8 ranks are slow tests.
    """
    by_ranks: dict[int, list[str]] = {}
    for layout in layouts:
        by_ranks.setdefault(parse(layout)[0], []).append(layout)
    return [
        pytest.param(
            group[start : start + most],
            id=f"{ranks} ranks, {start} on",
            marks=[pytest.mark.slow] if ranks == 8 else [],
        )
        for ranks, group in sorted(by_ranks.items())
        for start in range(0, len(group), most)
    ]


def keep_model_keys(layout: str) -> Overrides:
    """Return the overrides of a layout that one process has, too."""
    others = ("parallel.", "compile.", "activation_checkpoint.", "pipeline.")
    kept = [(key, text) for key, text in parse(layout)[1] if not key.startswith(others)]
    return [*size(layout), *kept]


def size(layout: str) -> Overrides:
    """Return the fewest sequences and blocks that show all effects of a layout.

    Collectives dominate the cost. Two microbatches show sums over them. Four fill a pipeline, in
    worlds of few ranks, and DualPipeV needs them. Three sequences give the last microbatch two.
    A pipeline has two blocks per rank, another layout three.
    """
    ranks, overrides = parse(layout)
    chosen = dict(overrides)
    rows, pipeline = ranks, "parallel.pp" in chosen
    for axis in ("pp", "tp", "cp"):
        rows //= int(chosen.get(f"parallel.{axis}", 1))
    both_ways = "DualPipeV" in layout
    subset = 4 if pipeline and (ranks < 8 or both_ways) else 2
    item = {"3": 11 if both_ways else 8 if pipeline else 5, "auto": 8, "2": 8}
    sequences = item.get(chosen.get("train.microbatch_size", "1"), subset)
    blocks = 8 if "stages_per_rank=4" in layout else 4 if pipeline else 3
    return [
        ("model.num_layers", str(blocks)),
        ("train.global_batch_size", str(rows * sequences)),
    ]


def combinations(count: int) -> list[str]:
    return [" ".join(axes) for axes in itertools.combinations(TWO_RANKS, count)]


SINGLE, PAIRS, THREE, FOUR = (combinations(count) for count in (1, 2, 3, 4))
EACH_SCHEDULE = [f"pp2 pipeline.schedule={schedule}" for schedule in SCHEDULES]


def cover(schedules: Iterable[str]) -> list[str]:
    """Return layouts that together hold every pair of these techniques."""
    axes = {
        "pp": ["", *(f"pp2 pipeline.schedule={schedule}" for schedule in schedules)],
        "cp": ["", *(f"cp2 cp_method={method}" for method in ("ring", "allgather", "ulysses"))],
        "dp": ["", "dp_shard2", "dp_replicate2"],
        "tp": ["", "tp2", "tp2 sequence_parallel=false"],
        "rows": ["data.packing=windows", "data.packing=documents"],
        "balance": ["cp_load_balance=true", "cp_load_balance=false"],
        "tied": ["model.tied_embeddings=false", "model.tied_embeddings=true"],
        "reshard": ["", "reshard_after_forward=always", "reshard_after_forward=never"],
        "sync": ["", "gradient_sync=step", "gradient_sync=microbatch"],
        "offload": ["", "cpu_offload=true"],
        "persist": ["", "param_persistence_threshold=100 fsdp_prefetch=2"],
        "microbatch": ["", "train.microbatch_size=3"],  # 8 sequences: the last one has 2
    }

    def is_valid(case: Case) -> bool:
        return sum(bool(case.get(axis)) for axis in ("pp", "cp", "dp", "tp")) <= 3

    texts = [" ".join(filter(None, case.values())) for case in cover_pairs(axes, is_valid)]
    return [text for text in texts if parse(text)[0] > 1]


# Schedules with one stage per rank, with several, and with stages in the shape of a V.
COVERED_SCHEDULES = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
COVERED = cover(COVERED_SCHEDULES)
COVERED_BY_ALL_SCHEDULES = cover(SCHEDULES)
PIPELINES = [
    "pp4 pipeline.schedule=GPipe",
    "pp3 mesh_order=replica-outer",
    "pp2 pipeline.schedule=Interleaved1F1B pipeline.stages_per_rank=3",
    "pp2 train.microbatch_size=auto",
    "pp2 pipeline.layers_per_stage=[1,3]",
    "pp2 dp_replicate2 mesh_order=replica-outer",
    "pp2 pipeline.schedule=ZBVZeroBubble reshard_after_forward=always",
]
TENSOR = [  # two key/value heads: two ranks share one
    "tp4 model.tied_embeddings=true",
    "tp4 sequence_parallel=false model.tied_embeddings=false",
]
MORE_TENSOR = [
    "tp4 model.tied_embeddings=false",
    "tp4 sequence_parallel=false model.tied_embeddings=true",
]


def rings(size: int) -> list[str]:
    """Return context-parallel layouts that cover every pair of values of its keys."""
    axes = {
        "method": [f"cp{size} cp_method={method}" for method in ("ring", "allgather", "ulysses")],
        "balance": ["cp_load_balance=true", "cp_load_balance=false"],
        "rows": ["data.packing=documents", "data.packing=windows"],
    }
    by_documents = "cp_load_balance=documents data.packing=documents"
    return [
        *(" ".join(case.values()) for case in cover_pairs(axes)),
        *(f"cp{size} cp_method={method} {by_documents}" for method in ("ring", "allgather")),
    ]


DATA = [
    "dp_shard2 dp_replicate2",
    "dp_shard4 reshard_after_forward=2",
    "dp_shard4 tp2 reshard_after_forward=2",
    "dp_shard2 dp_replicate2 gradient_sync=microbatch",
]
MORE_DATA = [
    "dp_shard2 pp2 pipeline.schedule=InterleavedZeroBubble reshard_after_forward=always",
    "dp_shard2 dp_replicate2 pp2 gradient_sync=microbatch",
    "dp_shard2 dp_replicate2 tp2 gradient_sync=step",
]
ZERO_BUBBLE = "pp2 pipeline.schedule=InterleavedZeroBubble gradient_sync=microbatch"
BFLOAT16 = [*SINGLE, f"{ZERO_BUBBLE} dp_shard2", "dp_shard2 tp2", f"{ZERO_BUBBLE} dp_replicate2"]
# Keys that change the work of a rank but not its result.
TRACED = [
    "dp_shard4",
    "dp_shard4 reshard_after_forward=never",
    "dp_shard4 activation_checkpoint.mode=full",
    "dp_shard4 activation_checkpoint.mode=selective",
    "dp_shard4 activation_checkpoint.mode=selective precision.compute_dtype=bfloat16",
    "dp_shard2 tp2 activation_checkpoint.mode=full",
    "tp2 pp2 activation_checkpoint.mode=selective",
    "dp_shard2 pp2 pipeline.schedule=Interleaved1F1B",
    "dp_shard2 pp2 pipeline.schedule=Interleaved1F1B pipeline.stages_per_rank=4 model.num_layers=8",
    "dp_shard2 pp2 pipeline.schedule=ZBVZeroBubble",
    "dp_shard4 optim.state_dtype=bfloat16",
    "dp_shard2 tp2 optim.state_dtype=8bit model.dim=128 model.ffn_dim=128",
    "dp_shard2 tp2 optim.name=muon",
    "dp_shard4 train.microbatch_size=2 train.global_batch_size=20",
    "dp_shard4 lora.rank=4",
    "dp_shard2 tp2 lora.rank=4 activation_checkpoint.mode=selective",
    "dp_shard2 pp2 lora.rank=4",
]
LARGER_RINGS = rings(4)
# The layouts of the default suite, and all layouts.
OFTEN = [*SINGLE, *EACH_SCHEDULE, *PIPELINES, *rings(2), *TENSOR, *DATA]
ALL = [
    *OFTEN,
    *COVERED,
    *PAIRS,
    *MORE_TENSOR,
    *MORE_DATA,
    *LARGER_RINGS,
    *(f"{layout} precision.compute_dtype=bfloat16" for layout in BFLOAT16),
    *TRACED,
]
MATRIX = list(dict.fromkeys(ALL))
