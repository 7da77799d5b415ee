"""Correct layouts agree with one process; each injected fault is detected and located."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.small import sized_recipes
from tests.test_extending import LOCAL
from weft.checkpoint.state_dict import trainable_parameters
from weft.cli.main import main
from weft.config.errors import InvalidConfig, WeftError
from weft.config.schema import Job
from weft.config.schema import replace as replace_sections
from weft.data.loader import Batch
from weft.optim.optimizer import compute_grad_norm
from weft.planning.plan import Plan
from weft.supervision.local_ranks import RanksFailed, run_ranks
from weft.training.setup import Built
from weft.verification import verify as verify_module
from weft.verification import verify_measure as measure
from weft.verification.shrink import Case, plan_for_recipe, shrink
from weft.verification.verify import (
    NOISE_RUNS,
    VerifyReport,
    compare_to_reference,
    format_report,
    read_recipe,
    scale_error,
    verify,
)

# Arguments of `weft verify`.
TP2 = ["--parallel.tp", "2", "--parallel.dp_shard", "1"]
UNTIED = ["--model.tied_embeddings", "false"]


def overrides(arguments: Iterable[str]) -> list[tuple[str, str]]:
    words = list(arguments)
    pairs = zip(words[::2], words[1::2], strict=True)
    return [(name.removeprefix("--"), value) for name, value in pairs]


@functools.cache
def read_and_plan(recipe: str, *arguments: str) -> tuple[Job, Plan]:
    job = read_recipe(recipe, overrides(arguments))
    return job, plan_for_recipe(job)


def case(*arguments: str, recipe: str = "demo", ranks: int = 8) -> Case:
    _job, plan = read_and_plan(recipe, *arguments)
    return shrink(plan, ranks, 3, [name for name, _ in overrides(arguments)])


# --------------------------------------------------------------------------- correct layouts

LAYOUTS = [
    TP2,
    ["--parallel.dp_shard", "2", "--parallel.tp", "2", "--train.microbatch_size", "1"],
    ["--parallel.cp", "2", "--parallel.dp_shard", "1", "--data.packing", "documents"],
    ["--parallel.dp_replicate", "2", "--parallel.dp_shard", "2", "--train.microbatch_size", "1"],
    ["--parallel.pp", "2", *UNTIED, "--pipeline.schedule", "1F1B", "--train.microbatch_size", "3"],
    ["--parallel.pp", "2", *UNTIED, "--pipeline.schedule", "ZBVZeroBubble"],
]
OTHER_CASES = [
    ["--parallel.dp_shard", "2", "--precision.compute_dtype", "bfloat16"],
    ["--parallel.dp_shard", "2", "--parallel.tp", "2", "--precision.compute_dtype", "bfloat16"],
    [*TP2, "--parallel.sequence_parallel", "false"],
    [*TP2, "--model.num_kv_heads", "1"],
    ["--parallel.dp_shard", "8", "--parallel.hierarchical_gather", "true"],
    [*TP2, "--parallel.cp", "2", "--parallel.cp_method", "ulysses", "--model.num_heads", "4"],
    ["--parallel.pp", "2", *UNTIED, "--pipeline.schedule", "DualPipeV"],
    ["--parallel.cpu_offload", "true", "--parallel.param_persistence_threshold", "512"],
]


def children() -> set[str]:
    """Return the ids of this process's children."""
    lists = Path("/proc/self/task").glob("*/children")
    return {number for item in lists for number in item.read_text().split()}


def check_holds(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    before = children()
    status = main(["verify", *arguments])
    assert children() == before
    captured = capsys.readouterr()
    assert status == 0, captured.out + captured.err
    assert captured.err == ""
    assert "\npassed: " in captured.out
    return captured.out


@pytest.mark.ranks
@pytest.mark.slow  # tests/test_fuzz.py covers random layouts
@pytest.mark.parametrize("arguments", LAYOUTS, ids=" ".join)
def test_verify_right_layout_holds(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    check_holds(capsys, "demo", "--parallel.dp_shard", "1", *arguments)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("arguments", OTHER_CASES, ids=" ".join)
def test_verify_other_right_layout_holds(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    check_holds(capsys, "demo", *arguments)


EXPERTS_BF16 = ["--model.kind", "moe", "--model.preset", "toy-moe"]
EXPERTS_BF16 += ["--precision.compute_dtype", "bfloat16"]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("objective", "data_format"),
    [
        ("kto", "unpaired"),
        *(
            pytest.param(name, "preferences", marks=pytest.mark.slow)
            for name in ("dpo", "ipo", "orpo", "simpo", "reward")
        ),
    ],
)
def test_verify_of_an_objective_has_gradients(objective: str, data_format: str) -> None:
    words = ["--train.objective", objective, "--data.format", data_format, "--parallel.dp_shard"]
    report = verify(read_recipe("demo", overrides([*words, "2"])), steps=1)
    assert report.holds
    norms = [step.grad_norm_one for step in report.steps]
    assert min(norms) > 0.01, norms


def verify_experts_in_bfloat16(corrupt: Corruption | None = None) -> VerifyReport:
    job = read_recipe("demo", overrides([*DP2, *EXPERTS_BF16]))
    return verify(job, steps=1, keep=["precision.compute_dtype"], corrupt=corrupt)


@pytest.mark.ranks
def test_verify_bfloat16_experts_are_measured_with_more_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two runs with noise may move no token to another expert, although a layout does."""
    monkeypatch.setattr(verify_module, "MORE_NOISE_RUNS", 2)
    first_noisy_seed = 100

    class LateNoise(measure.Noise):
        def perturb(self, x: Tensor, eps: float) -> Tensor:
            return super().perturb(x, eps * (self._generator.initial_seed() >= first_noisy_seed))

    monkeypatch.setattr(measure, "Noise", LateNoise)
    assert not verify_experts_in_bfloat16().holds
    first_noisy_seed = NOISE_RUNS + 1
    report = verify_experts_in_bfloat16()
    assert report.holds, report.reason
    assert report.reason.endswith("; the biases of experts are not compared in bfloat16")
    assert not verify_experts_in_bfloat16(corrupt=average_gradients).holds


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("recipe", sized_recipes())
def test_verify_shipped_recipe_holds(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    check_holds(capsys, recipe)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_verify_compiled_layout_holds(capsys: pytest.CaptureFixture[str]) -> None:
    check_holds(capsys, "demo", *TP2, "--compile.enable", "true", "--steps", "1")


@pytest.mark.ranks
def test_verify_report_names_layout_steps_and_verdict(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report has the layout, shrunk sizes, a line per step and the verdict, or is JSON."""
    # The second command has the report of the first one.
    monkeypatch.setattr(verify_module, "verify", partial(verify_once, []))
    arguments = ["demo", "--parallel.dp_shard", "64", "--train.global_batch_size", "128"]
    output = check_holds(capsys, *arguments, "--ranks", "2", "--steps", "1").splitlines()
    assert output[0] == "recipe: dp_shard 64 -> here: dp_shard 2"
    assert any(line.strip().startswith("model ") and "dim 192 -> " in line for line in output)
    assert sum(line.strip().startswith("1  ") for line in output) == 1

    assert main(["verify", *arguments, "--ranks=2", "--steps=1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["holds"]
    assert 0 < report["reached"] < 1e-5
    assert 0 < report["share"] < 1
    assert report["limits"]["gradients"]["norm.weight"] < 1e-5
    assert (report["recipe"]["dp_shard"], report["here"]["dp_shard"]) == (64, 2)
    (step,) = report["steps"]
    assert step["loss_one"] == pytest.approx(5.66, abs=0.05)  # log of 288 entries
    assert step["gradient"] in step["gradients"]
    assert list(step["forward"])[:3] == ["before layers.0", "in layers.0", "before layers.1"]


def verify_once(reports: list[VerifyReport], *args: Any, **keys: Any) -> VerifyReport:
    if not reports:
        reports.append(verify(*args, **keys))
    return reports[0]


@pytest.mark.ranks
def test_verify_custom_model_and_optimizer_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_model.py").write_text(LOCAL)
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = ["--model.kind", "own_model:FAMILY", "--model.preset", "small"]
    arguments += ["--optim.name", "own_model:sgd", "--data.vocab_size", "512"]
    output = check_holds(capsys, "demo", *arguments, "--train.seq_len", "32")
    assert "the model has no num_layers, dim" in output


# --------------------------------------------------------------------------- injected faults

Corruption = Callable[[Built, Plan], None]


def local(param: Tensor | None) -> Tensor:
    assert param is not None
    return param.to_local() if isinstance(param, DTensor) else param


@torch.no_grad()
def zero_a_shard(built: Built, plan: Plan) -> None:
    if dist.get_rank() == 1:
        local(
            dict(trainable_parameters(built.model_parts))["layers.1.self_attn.q_proj.weight"]
        ).zero_()


@torch.no_grad()
def take_the_wrong_slice(built: Built, plan: Plan) -> None:
    weight = local(dict(trainable_parameters(built.model_parts))["layers.2.mlp.up_proj.weight"])
    weight.copy_(weight.roll(1, dims=0))


@torch.no_grad()
def lose_rows_of_the_embedding(built: Built, plan: Plan) -> None:
    if dist.get_rank() == 1:
        local(dict(trainable_parameters(built.model_parts))["embed_tokens.weight"])[:3].zero_()


def pass_something_else_on(built: Built, plan: Plan) -> None:
    """Scale the input of a stage, so that it differs from the output of the previous one."""
    for part in built.model_parts:
        if block := dict(part.named_modules()).get("layers.2"):
            block.register_forward_pre_hook(lambda module, args: (args[0] * 1.01, *args[1:]))


class _OnlyBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 1.01


def break_backward_of_a_product(built: Built, plan: Plan) -> None:
    for part in built.model_parts:
        product = dict(part.named_modules())["layers.1.self_attn.k_proj"]
        product.register_forward_hook(lambda module, args, out: _OnlyBackward.apply(out))


def break_a_gradient_on_rank_1(built: Built, plan: Plan) -> None:
    forward_backward = built.train_step.forward_backward

    def broken(batches: list[Batch]) -> Tensor:
        loss = forward_backward(batches)
        if dist.get_rank() == 1:
            local(
                dict(trainable_parameters(built.model_parts))["layers.1.mlp.up_proj.weight"].grad
            ).mul_(1.01)
        return loss

    built.train_step.forward_backward = broken  # type: ignore[method-assign, assignment]


def skip_the_sum_of_a_gain(built: Built, plan: Plan) -> None:
    """Skip the reduction of a norm's gradient, which sequence parallelism needs."""

    def weight(module: nn.Module) -> Any:
        param = module._parameters["weight"]
        gathered = isinstance(param, DTensor) and param.device_mesh.ndim == 1
        return param.to_local() if gathered else param

    for part in built.model_parts:
        norm = part.get_submodule("layers.2.input_layernorm")
        norm.__class__ = type("Norm", (type(norm),), {"weight": property(weight)})


class _Sums:
    """A mesh with another sum over tokens."""

    def __init__(self, built: Built, total: Callable[[Tensor], Tensor]) -> None:
        self.mesh, self.all_reduce_dp_cp = built.mesh, total

    def __getattr__(self, name: str) -> Any:
        return getattr(self.mesh, name)


def count_tokens_twice(built: Built, plan: Plan) -> None:
    total = built.mesh.all_reduce_dp_cp
    built.train_step.mesh = _Sums(built, lambda count: total(count) * 2)  # type: ignore[assignment]


def take_the_mean_of_means(built: Built, plan: Plan) -> None:
    ranks = dist.get_world_size()
    built.train_step.mesh = _Sums(built, lambda count: count * ranks)  # type: ignore[assignment]


@torch.no_grad()
def corrupt_the_head(built: Built, plan: Plan) -> None:
    local(dict(trainable_parameters(built.model_parts))["norm.weight"]).mul_(1.01)


def average_gradients(built: Built, plan: Plan) -> None:
    for part in built.model_parts:
        for module in part.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(2.0)


def report_the_loss_twice(built: Built, plan: Plan) -> None:
    built.train_step.owns_loss = True


def leave_one_out_of_the_norm(built: Built, plan: Plan) -> None:
    def broken(params: Sequence[nn.Parameter], stages: Any) -> tuple[Tensor, Tensor]:
        return compute_grad_norm(params[1:], stages)

    measure.compute_grad_norm = broken  # type: ignore[assignment]  # in this rank's process only


def leave_one_out_of_the_update(built: Built, plan: Plan) -> None:
    if dist.get_rank() == 1:
        built.optimizer.param_groups[0]["params"].pop(3)


def evaluate_other_tokens(built: Built, plan: Plan) -> None:
    evaluate = built.train_step.evaluate

    def broken(batches: Iterable[Batch]) -> float:
        return evaluate([batch._replace(tokens_BT=batch.tokens_BT.flip(1)) for batch in batches])

    built.train_step.evaluate = broken  # type: ignore[method-assign]


def fail_on_rank_1(built: Built, plan: Plan) -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 cannot")


DP2 = ["--parallel.dp_shard", "2", "--train.microbatch_size", "1"]
HSDP = ["--parallel.dp_shard", "1", "--parallel.dp_replicate", "2"]
PP2 = ["--parallel.dp_shard", "1", "--parallel.pp", "2", *UNTIED]

AGREES = "step 1: the forward pass matches, block by block; "
BREAKS: list[tuple[list[str], Corruption, str]] = [
    (DP2, zero_a_shard, "step 1: the forward pass first differs in layers.1 ("),
    (TP2, zero_a_shard, "step 1: the forward pass first differs in layers.1 ("),
    (TP2, take_the_wrong_slice, "step 1: the forward pass first differs in layers.2 ("),
    (
        TP2,
        lose_rows_of_the_embedding,
        "step 1: the forward pass first differs before layers.0: in the em",
    ),
    (
        PP2,
        pass_something_else_on,
        "step 1: the forward pass first differs between layers.1 and layers.2 (",
    ),
    (
        DP2,
        break_backward_of_a_product,
        f"{AGREES}gradients first differ in layers.1.self_attn.k_proj.weight (1.0e-02)",
    ),
    (TP2, break_a_gradient_on_rank_1, f"{AGREES}gradients first differ in layers.1.mlp.up_proj"),
    (
        HSDP,
        break_a_gradient_on_rank_1,
        f"{AGREES}gradients first differ in layers.1.mlp.up_proj.weight on rank 1 only (1.0e-02)",
    ),
    (TP2, skip_the_sum_of_a_gain, f"{AGREES}gradients first differ in layers.2.input_layernorm"),
    (DP2, count_tokens_twice, f"{AGREES}the loss differs (5.0e-01), and every gradient is 0.5 ti"),
    (
        DP2,
        take_the_mean_of_means,
        f"{AGREES}the loss differs (4.9e-05), and every gradient differs, first norm.weight (",
    ),
    (
        TP2,
        corrupt_the_head,
        f"{AGREES}the loss differs (7.7e-05), and every gradient differs, first norm.weight (",
    ),
    (DP2, average_gradients, f"{AGREES}every gradient is 0.5 times one process's: check sums ov"),
    (TP2, report_the_loss_twice, f"{AGREES}the loss differs (1.0e+00), and no gradient"),
    (
        DP2,
        leave_one_out_of_the_norm,
        "step 1: the forward pass matches, block by block, and so do gradients; "
        "the gradient norm differs (",
    ),
    (
        DP2,
        leave_one_out_of_the_update,
        "step 1: gradients match; optimizer updates first differ in",
    ),
    (TP2, evaluate_other_tokens, "training matches; the validation loss differs ("),
]


# Tests below cover the others: in low precision, together, or by changed measurements.
OFTEN_ALONE = [(PP2, pass_something_else_on), (DP2, break_backward_of_a_product)]
OFTEN_ALONE += [(HSDP, break_a_gradient_on_rank_1)]


@pytest.mark.parametrize(
    ("layout", "corrupt", "reason"),
    [
        pytest.param(
            *each,
            marks=[] if each[:2] in OFTEN_ALONE else [pytest.mark.slow],
            id=f"{each[1].__name__} {' '.join(each[0])}",
        )
        for each in BREAKS
    ],
)
def test_verify_fault_is_found_and_located(
    layout: list[str], corrupt: Corruption, reason: str
) -> None:
    report = verify(read_recipe("demo", overrides(layout)), steps=1, corrupt=corrupt)
    assert not report.holds
    assert re.sub(", limit [^)]*", "", report.reason).startswith(reason), report.reason
    json.loads(report.to_json())


def spare_gradients(built: Built, plan: Plan) -> None:
    """Plant the faults that change no gradient."""
    report_the_loss_twice(built, plan)
    leave_one_out_of_the_norm(built, plan)
    leave_one_out_of_the_update(built, plan)
    evaluate_other_tokens(built, plan)


def test_verify_faults_that_spare_gradients_are_measured() -> None:
    report = verify(read_recipe("demo", overrides(TP2)), steps=1, corrupt=spare_gradients)
    assert "the loss differs (1.0e+00, limit " in report.reason
    assert "and no gradient does" in report.reason
    (step,) = report.steps
    errors = step.errors | {("eval_loss", ""): report.eval_loss_difference}
    kinds = {kind for (kind, name), error in errors.items() if error > report.limits[kind, name]}
    assert kinds == {"loss", "grad_norm", "updates", "eval_loss"}


Compared = tuple[Case, measure.RankMeasurement, list[measure.RankMeasurement], verify_module.Errors]


@pytest.fixture(scope="module")
def compared() -> Compared:
    """Return a case, measurements of one process and of two ranks that agree, and the limits."""
    calls: list[Any] = []

    def record(*args: Any) -> VerifyReport:
        calls.append(args)
        return compare_to_reference(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify_module, "compare_to_reference", record)
        assert verify(read_recipe("demo", overrides(DP2)), steps=1).holds
    result: Compared = calls[-1]
    return result


def change_rank(rank: measure.RankMeasurement, kind: str, change: Any) -> measure.RankMeasurement:
    """Return a measurement with another value of a kind.

    Args:
        rank: a measurement of a rank.
        kind: a field of the measurement or of its step.
        change: values by name, or the factor of a single number.
    """
    (step,) = rank.steps
    owner: Any = step if kind in step._fields else rank
    value = getattr(owner, kind)
    value = value | change if isinstance(change, dict) else value * change
    if owner is rank:
        return rank._replace(**{kind: value})
    return rank._replace(steps=[step._replace(**{kind: value})])


UP = "layers.1.mlp.up_proj.weight"
HALVED = measure.TensorError(0.5, 0.5)
MEASURED_REASONS = {
    "initial": "before step 1: initial weights differ, first norm.weight",
    "embedding": "step 1: the forward pass first differs before layers.0: in the embedding (",
    "stage": "step 1: the forward pass first differs between layers.0 and layers.1 (",
    "block": "step 1: the forward pass first differs in layers.1 (",
    "gradient": f"{AGREES}gradients first differ in {UP} (1.0e-02, limit ",
    "gradient of a rank": f"{AGREES}gradients first differ in {UP} on rank 1 only (1.0e-02, limit ",
    "scale": f"{AGREES}gradients first differ in {UP} (in scale, 1.0e-02, limit ",
    "factor": f"{AGREES}every gradient is 0.5 times one process's: check sums over ranks",
    "gradients": f"{AGREES}every gradient differs, first norm.weight (",
    "norm": "step 1: the forward pass matches, block by block, and so do gradients; the gradient n",
    "update": f"step 1: gradients match; optimizer updates first differ in {UP} (1.0e+00 of their",
    "eval": "training matches; the validation loss differs (1.0e+00, limit ",
}


@pytest.mark.parametrize("case_name", [*MEASURED_REASONS, "factor and loss"])
def test_reason_is_the_first_measurement_that_differs(case_name: str, compared: Compared) -> None:
    report = changed_report(case_name, compared)
    assert not report.holds
    if case_name == "factor and loss":
        assert report.reason.startswith(f"{AGREES}the loss differs (5.0e-01, limit ")
        assert ", and every gradient is 0.5 times one process's: check the loss's" in report.reason
    else:
        assert report.reason.startswith(MEASURED_REASONS[case_name])
    json.loads(report.to_json())


def changed_report(case_name: str, compared: Compared) -> VerifyReport:
    """Compare ranks, of which a measurement is changed, with one process."""
    case, reference, ranks, limits = compared
    (step,) = ranks[0].steps
    gradients = step.gradients

    def doubled(name: str) -> dict[str, Any]:
        sums = step.forward[name]
        return {name: sums._replace(values=2 * sums.values)}

    changes: dict[str, list[tuple[str, Any]]] = {
        "initial": [("initial", {"norm.weight": HALVED})],
        # Sums of activations differ only where the loss does.
        "embedding": [("forward", doubled("before layers.0")), ("loss", 2.0)],
        "stage": [("forward", doubled("before layers.1")), ("loss", 2.0)],
        "block": [("forward", doubled("in layers.1")), ("loss", 2.0)],
        "gradient": [("gradients", {UP: measure.TensorError(0.01, 1.0)})],
        "gradient of a rank": [("gradients", {UP: measure.TensorError(0.01, 1.0)})],
        "scale": [("gradients", {UP: gradients[UP]._replace(scale=1.01, scatter=0.0)})],
        "factor": [("gradients", dict.fromkeys(gradients, HALVED))],
        "factor and loss": [("gradients", dict.fromkeys(gradients, HALVED)), ("loss", 0.5)],
        "gradients": [
            (
                "gradients",
                {n: measure.TensorError(0.01, 1 + 0.01 * i) for i, n in enumerate(gradients)},
            )
        ],
        "norm": [("grad_norm", 2.0)],
        "update": [("updates", {UP: 1.0})],
        "eval": [("eval_loss", 2.0)],
    }
    changed = list(ranks)
    for rank in (1,) if case_name == "gradient of a rank" else (0, 1):
        for kind, change in changes[case_name]:
            changed[rank] = change_rank(changed[rank], kind, change)
    return compare_to_reference(case, reference, changed, limits)


PRECISIONS = {
    "bfloat16": ["--precision.compute_dtype", "bfloat16"],
    "bfloat16 sums": ["--precision.reduce_dtype", "bfloat16"],
    "float8": ["--precision.float8", "tensorwise", "--precision.float8_small", "true"],
}
COARSE: list[tuple[list[str], Corruption, str]] = [
    (DP2, count_tokens_twice, "every gradient is 0."),
    # Which gradient passes its limit first depends on the precision.
    (DP2, take_the_mean_of_means, "gradients first differ in "),
    (DP2, average_gradients, "every gradient is 0."),
    (TP2, skip_the_sum_of_a_gain, "gradients first differ in layers.2.input_layernorm"),
    (TP2, take_the_wrong_slice, "step 1: the forward pass first differs in layers.2 ("),
    (
        DP2,
        leave_one_out_of_the_norm,
        "step 1: the forward pass matches, block by block, and so do gradients",
    ),
    (
        DP2,
        leave_one_out_of_the_update,
        "step 1: gradients match; optimizer updates first differ in",
    ),
]


# The default suite has the smallest differences, and each precision.
OFTEN = {
    ("bfloat16", skip_the_sum_of_a_gain),
    ("bfloat16", leave_one_out_of_the_norm),
    ("bfloat16 sums", average_gradients),
    ("float8", take_the_mean_of_means),
}


@pytest.mark.parametrize(
    ("layout", "corrupt", "reason", "precision"),
    [
        pytest.param(
            layout,
            corrupt,
            reason,
            precision,
            marks=[] if (precision, corrupt) in OFTEN else pytest.mark.slow,
            id=f"{corrupt.__name__}-{precision}",
        )
        for layout, corrupt, reason in COARSE
        for precision in PRECISIONS
    ],
)
def test_verify_fault_in_few_bits_is_found(
    layout: list[str], corrupt: Corruption, reason: str, precision: str
) -> None:
    changes = overrides([*layout, *PRECISIONS[precision]])
    keep = [name for name, _ in changes]
    report = verify(read_recipe("demo", changes), steps=1, keep=keep, corrupt=corrupt)
    assert reason in report.reason


def test_verify_fault_exits_with_status_1(
    compared: Compared, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_it(*args: Any, log: Callable[[str], None], **kwargs: Any) -> VerifyReport:
        report = changed_report("block", compared)
        log(format_report(report))
        return report

    monkeypatch.setattr("weft.verification.verify.verify", break_it)
    assert main(["verify", "demo", *DP2, "--steps", "1"]) == 1
    assert "FAILED: step 1: the forward pass first differs in layers.1" in capsys.readouterr().out


def test_verify_fault_in_a_later_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    report = verify(read_recipe("demo", overrides(DP2)), steps=2, corrupt=break_the_second_step)
    assert report.reason.startswith(
        "step 2: the forward pass matches, block by block; gradients first differ "
    )
    assert report.reason.endswith("; step 1 matches")


def break_the_second_step(built: Built, plan: Plan) -> None:
    step = built.optimizer.step

    def break_after(*args: Any, **kwargs: Any) -> Any:
        break_a_gradient_on_rank_1(built, plan)
        return step(*args, **kwargs)

    built.optimizer.step = break_after  # type: ignore[method-assign]


# --------------------------------------------------------------------------- ranks


@pytest.mark.ranks
def test_verify_failing_rank_is_reported_with_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RanksFailed) as failed:
        verify(read_recipe("demo", overrides(DP2)), corrupt=fail_on_rank_1)
    assert str(failed.value).startswith("rank 1 of 2 failed: ValueError: rank 1 cannot\n")
    assert "in fail_on_rank_1" in str(failed.value)
    assert isinstance(failed.value, WeftError)


def die_or_wait(mode: str) -> None:
    if dist.get_rank() == 1:
        if mode == "hang":
            time.sleep(100)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_run_ranks_silent_death_is_the_cause() -> None:
    with pytest.raises(RanksFailed, match=r"^rank 1 of 3 was killed by SIGKILL"):
        run_ranks(die_or_wait, 3, "die")


def test_run_ranks_time_limit_reports_stacks() -> None:
    start_time = time.monotonic()
    with pytest.raises(RanksFailed) as failed:
        run_ranks(die_or_wait, 2, "hang", timeout=1)
    assert time.monotonic() - start_time < 10
    assert "2 ranks did not end within 1 s" in str(failed.value)
    assert "rank 0, innermost call first:" in str(failed.value)
    assert str(failed.value).count("in die_or_wait") == 2


def living_processes(mark: str) -> list[str]:
    """Return the ids of processes with a mark in their environment."""
    results = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                results.append(process.name)
        except OSError:
            continue
    return results


def has_ended(process: str) -> bool:
    """Return True if a process is gone, or remains as a zombie."""
    try:
        return not Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return True


def test_run_ranks_killed_parent_leaves_no_rank() -> None:
    context = multiprocessing.get_context("fork")
    parent = context.Process(target=run_ranks, args=(die_or_wait, 2, "hang"))
    parent.start()
    limit = time.monotonic() + 60
    ranks: list[str] = []
    while len(ranks) < 2 and time.monotonic() < limit:
        time.sleep(0.05)
        ranks = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    assert len(ranks) == 2
    parent.kill()
    parent.join()
    while not all(map(has_ended, ranks)) and time.monotonic() < limit:
        time.sleep(0.05)
    assert all(map(has_ended, ranks))


@pytest.mark.slow
def test_verify_command_leaves_no_process() -> None:
    mark = f"weft-{uuid.uuid4()}"
    command = [sys.executable, "-m", "weft", "verify", "demo", "--steps", "1"]
    completed = subprocess.run(
        command, env=os.environ | {"MARK": mark}, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert living_processes(mark) == []


# --------------------------------------------------------------------------- mistakes


def rejected(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["verify", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return [line.strip() for line in captured.err.splitlines()[1:]]


def test_verify_all_mistakes_are_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--ranks", "1", "--steps=no", "--train.step", "2", "--parallel.tp", "5"]
    lines = rejected(capsys, "demo", *arguments, "--optim.name", "adm")
    keys = [line.split("=")[0] for line in lines]
    assert keys[:3] == ["--ranks", "--steps", "train.step"]
    assert set(keys[3:]) == {"train.seq_len", "optim.name"}
    assert rejected(capsys, "dmeo")[0].startswith(
        'recipe="dmeo" is not a known recipe, the path of a .toml file, or a run directory. Did'
    )
    (line,) = rejected(capsys, "demo", "--run.cluster", "64x8")
    assert line.startswith('run.cluster="64x8" is not a cluster')


@pytest.mark.ranks
def test_shrink_schedule_file_keeps_its_ranks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "mine.csv"
    rows = [f"{s}F0,{s}F1,{s}B0,{s}B1" for s in range(4)]
    file.write_text("\n".join(rows) + "\n")
    layout = [
        "--parallel.pp",
        "4",
        "--pipeline.schedule",
        str(file),
        "--train.microbatch_size",
        "2",
    ]
    layout += ["--parallel.dp_shard", "2", *UNTIED]
    result = case(*layout, ranks=4)
    assert result.plan.axis_sizes == {"pp": 4, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1}
    assert result.plan.num_microbatches == 2
    with pytest.raises(InvalidConfig, match="--ranks=2 is fewer than the 4 pipeline ranks"):
        case(*layout, ranks=2)


# --------------------------------------------------------------------------- shrinking


@pytest.mark.parametrize("recipe", sized_recipes())
@pytest.mark.parametrize(
    "ranks", [8, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (2, 32))]
)
def test_shrink_shipped_recipe_keeps_its_techniques(recipe: str, ranks: int) -> None:
    """All sizes are reduced; each technique remains if there are enough ranks."""
    result = case(recipe=recipe, ranks=ranks)
    plan = result.plan
    job, theirs = read_and_plan(recipe)
    assert plan.world_size <= ranks
    notes = " ".join(result.notes)
    for axis, size in result.recipe_sizes.items():
        assert plan.axis_sizes[axis] > 1 or size == 1 or f"parallel.{axis}: not verified" in notes
        assert plan.axis_sizes[axis] <= size
    assert plan.model.dim <= 128
    assert plan.num_params < 1_000_000
    assert plan.model.vocab_size < 300
    assert plan.tokens_per_step < 5000
    for flag in ("tied_embeddings", "rope_scaling", "rope_theta"):
        assert getattr(plan.model, flag, None) == getattr(theirs.model, flag, None)
    grouped = theirs.model.num_heads > theirs.model.num_kv_heads
    assert (plan.model.num_heads > plan.model.num_kv_heads) == grouped
    assert (plan.num_microbatches > 1) == (theirs.num_microbatches > 1)
    if plan.pipeline and theirs.pipeline:
        assert plan.pipeline.schedule == theirs.pipeline.schedule
        several = len(theirs.pipeline.stages) > theirs.pp
        assert (len(plan.pipeline.stages) > plan.pp) == several
    assert result.reference_plan.world_size == result.reference_plan.num_microbatches == 1
    assert result.reference_plan.model == plan.model
    assert result.reference_plan.tokens_per_step == plan.tokens_per_step
    assert result.plan.job.parallel.mesh_order == job.parallel.mesh_order
    assert result.plan.job.parallel.cp_method == job.parallel.cp_method


def test_shrink_405b_equals_the_documentation() -> None:
    result = case(recipe="paper/llama3-405b")
    assert result.recipe_sizes == {"pp": 8, "dp_replicate": 1, "dp_shard": 8, "cp": 1, "tp": 8}
    assert result.plan.axis_sizes == {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2}
    assert result.shrunk["model.dim"] == (16384, result.plan.model.dim)
    assert result.shrunk["precision.compute_dtype"] == ("auto", "float32")
    assert result.notes == ()


def test_shrink_ranks_that_share_a_head_share_one_afterwards() -> None:
    layout = ["--parallel.tp", "8", "--model.num_heads", "16", "--model.num_kv_heads", "2"]
    layout += ["--model.dim", "256", "--parallel.dp_shard", "1"]
    for ranks, heads in ((8, 2), (4, 1), (2, 1)):
        plan = case(*layout, ranks=ranks).plan
        assert (plan.tp, plan.model.num_kv_heads) == (ranks, heads)
    several = case(*TP2, "--model.num_heads", "12", "--model.num_kv_heads", "12").plan
    assert several.model.num_kv_heads == several.model.num_heads == 4


def test_shrink_short_last_microbatch_stays_short() -> None:
    result = case(
        "--parallel.dp_shard", "1", "--train.microbatch_size", "3", "--run.nproc_per_node", "1"
    ).plan
    assert (result.local_batch_size, result.microbatch_size, result.num_microbatches) == (5, 2, 3)


def test_shrink_keys_that_depend_on_sizes_follow_them() -> None:
    wide = ["--parallel.dp_shard", "64", "--train.global_batch_size", "64"]
    result = case(*wide, "--parallel.reshard_after_forward", "8")
    assert (result.plan.dp_shard, result.plan.reshard_after_forward) == (8, 2)
    result = case(*wide, "--parallel.reshard_after_forward", "8", ranks=2)
    assert result.plan.reshard_after_forward is True
    assert "parallel.reshard_after_forward=8: 2 ranks have no subgroup" in result.notes[0]
    assert case(*wide, "--parallel.hierarchical_gather", "true").plan.shard_ranks_per_node == 4
    result = case(*wide, "--parallel.hierarchical_gather", "true", ranks=2)
    assert result.notes == ("parallel.hierarchical_gather: not verified; 2 shards fit on one node",)
    # The threshold covers gains (192 elements) but not the smallest matrix, or neither.
    result = case("--parallel.param_persistence_threshold", "1000")
    assert (
        result.plan.model.dim
        < result.plan.job.parallel.param_persistence_threshold
        < result.plan.model.dim * 8
    )
    assert (
        case(
            "--parallel.param_persistence_threshold", "100"
        ).plan.job.parallel.param_persistence_threshold
        == 1
    )


def test_shrink_manual_stages_are_unchanged() -> None:
    pipeline = ["--parallel.pp", "2", "--parallel.dp_shard", "1", *UNTIED]
    pipeline += ["--model.num_layers", "12", "--pipeline.layers_per_stage", "[7, 5]"]
    result = case(*pipeline)
    assert [stage.num_blocks for stage in result.plan.pipeline.stages] == [2, 1]  # type: ignore[union-attr]
    wide = [*pipeline, "--parallel.pp", "4", "--pipeline.layers_per_stage", "[3, 3, 3, 3]"]
    result = case(*wide, ranks=2)
    assert result.notes == ("pipeline.layers_per_stage: given for 4 stages, but verified with 2",)
    assert result.plan.pp == 2


def test_shrink_keys_that_need_hardware_are_off_and_noted() -> None:
    tp = [*TP2, "--parallel.async_tp", "true"]
    job = read_recipe("demo", overrides([*tp, "--compile.enable", "true"]))
    result = shrink(plan_for_recipe(job), 8, 3)
    assert not result.plan.job.parallel.async_tp
    assert not result.plan.job.compile.enable
    assert [note.partition(":")[0] for note in result.notes] == [
        "parallel.async_tp",
        "compile.enable",
    ]
    assert shrink(plan_for_recipe(job), 8, 3, ["compile.enable"]).plan.job.compile.enable


def test_shrink_precision_is_float32_unless_overridden() -> None:
    job = read_recipe("llama3-8b", [("precision.compute_dtype", "bfloat16")])
    plan = plan_for_recipe(job)
    assert shrink(plan, 2, 3).plan.compute_dtype == "float32"
    assert shrink(plan, 2, 3, ["precision.compute_dtype"]).plan.compute_dtype == "bfloat16"


def test_shrink_auto_axis_has_more_than_one_rank() -> None:
    assert case().plan.dp_shard == 2
    assert case("--parallel.tp", "2").plan.axis_sizes["dp_shard"] == 2


# --------------------------------------------------------------------------- measures


def test_difference_of_nan_zero_and_other_shapes_is_infinite() -> None:
    theirs = torch.tensor([1.0, -4.0])
    assert measure.tensor_error(theirs, theirs) == (0.0, 1.0, 0.0)
    assert measure.tensor_error(theirs * 2, theirs) == (1.0, 2.0, 0.0)
    assert measure.tensor_error(torch.tensor([1.0, float("nan")]), theirs).max_error == float("inf")
    zeros = torch.zeros(2)
    assert measure.tensor_error(zeros, zeros).max_error == 0
    assert measure.tensor_error(theirs, zeros).max_error == float("inf")
    assert measure.tensor_error(theirs[:1], theirs).max_error == float("inf")


def test_scale_of_few_entries_scatters_as_they_do() -> None:
    """A scale counts as wrong if all entries agree on it, not if errors of the entries make it."""
    torch.manual_seed(0)
    means = []
    for size in (6, 24, 2000):
        theirs = torch.randn(200, size)
        rounded = [measure.tensor_error(x * (1 + 1e-5 * torch.randn(size)), x) for x in theirs]
        means.append(sum(abs(error.scale - 1) / error.scatter for error in rounded) / len(rounded))
        counts = sum(scale_error(error) > 0 for error in rounded)
        assert counts < 0.2 * len(rounded)  # 5 % of a normal distribution
        scaled = measure.tensor_error(theirs[0] * 1.00002, theirs[0])
        assert scale_error(scaled) == pytest.approx(2e-5, rel=0.05)
    assert all(0.6 < mean < 1.4 for mean in means), means


def test_fingerprints_are_independent_of_the_split() -> None:
    x_BTD = torch.randn(4, 6, 5)

    def sums(*chunks: Tensor, rows: int = 99) -> measure.ActivationSums:
        block = nn.Module()
        block.block = nn.Identity()
        with measure.record_fingerprints({"block": block.block}, [rows] * len(chunks)) as result:
            for chunk in chunks:
                block.block(chunk)
        assert list(result) == ["before block", "in block"]
        return result["in block"]

    full = sums(x_BTD)
    remaining, right = sums(x_BTD[:, :2]), sums(x_BTD[:, 2:])
    assert measure.sums_distance(measure.merge_sums([remaining, right]), full) < 1e-12  # slices
    assert measure.sums_distance(sums(x_BTD[:1], x_BTD[1:]), full) < 1e-12  # microbatches
    assert measure.sums_distance(measure.merge_sums([full, full]), full) < 1e-12  # copies
    padded = torch.cat((x_BTD, x_BTD[:1]))
    assert measure.sums_distance(sums(padded, rows=4), full) < 1e-12
    assert measure.sums_distance(sums(padded), full) > 1e-3
    assert measure.sums_distance(sums(x_BTD[:, :5]), full) > 1e-3
    assert measure.sums_distance(sums(x_BTD.flip(2)), full) > 1e-3
    assert measure.sums_distance(sums(x_BTD[..., :4]), full) == float("inf")


def test_data_is_uneven_and_depends_on_the_seed() -> None:
    result = case("--data.packing", "documents", "--train.microbatch_size", "4").reference_plan

    class Mesh:
        dp_rank = 0

    def rows(seed: int) -> Batch:
        seeded = replace_sections(result.job, train={"seed": seed})
        (batch,) = measure._loader(replace(result, job=seeded), Mesh()).get_microbatches(0)  # type: ignore[arg-type]
        return measure._mask_targets(batch, result)

    batch = rows(0)
    assert torch.equal(batch.tokens_BT, rows(0).tokens_BT)
    assert not torch.equal(batch.tokens_BT, rows(1).tokens_BT)
    assert batch.documents_BT is not None
    assert batch.documents_BT.max() > 0
    counts = (batch.targets_BT >= 0).sum(1)
    assert counts.max() > 1.5 * counts.min() > 0


@pytest.mark.slow
def test_verify_matrix_with_a_shard_too_small_for_float8_stays_unquantized() -> None:
    """Tensor parallelism leaves 16 of 32 columns on a rank, half a block of MXFP8."""
    sizes = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 32, "vocab_size": 288}
    changes = {f"model.{name}": str(size) for name, size in sizes.items()}
    changes |= {"precision.float8": "mxfp8", "precision.float8_small": "true"}
    changes |= {"data.vocab_size": "257", "train.seq_len": "64", "train.global_batch_size": "2"}
    keep = [key for key in changes if key.startswith("precision.")]
    job = read_recipe("demo", [*changes.items(), ("parallel.tp", "2")])
    lines: list[str] = []
    assert verify(job, steps=1, keep=keep, log=lines.append).holds
    assert "down_proj" in "\n".join(lines)
    one = read_recipe("demo", list(changes.items()))
    resumed = verify(one, steps=2, keep=keep, resume=[("parallel.tp", "2")])
    assert resumed.holds
