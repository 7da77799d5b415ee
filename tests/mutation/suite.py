"""Checks of the battery that are tests of the suite.

pytest runs the tests in the process that has imported weft with the fault.  Ranks are forked from
this process, so they have the fault, too; the server of `tests.harness` would not have it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
RANK_SECONDS = 60.0  # time limit of the ranks of a test on a busy machine

# Name of a check: the module of weft that is faulty if a test fails, and the tests.
SUITE: dict[str, tuple[str, str]] = {
    "unit: targets of multi-token prediction": (
        "data/loader.py",
        "training/test_mtp.py::test_later_targets_are_masked_in_other_documents_and_the_end",
    ),
    "unit: stages of multi-token prediction": (
        "planning/plan.py",
        "training/test_mtp.py::test_last_stage_counts_the_layers_and_the_embedding",
    ),
    "run: losses of multi-token prediction": (
        "training/step.py",
        "training/test_mtp.py::test_gradients_equal_a_plain_implementation",
    ),
    "unit: losses of routers": (
        "models/moe.py",
        "optim/test_balance.py::test_balance_loads_of_a_step_are_those_of_the_next_global_loss"
        " models/test_moe.py::test_router_losses_gradients_equal_the_published_formulas"
        " models/test_moe.py::test_router_metrics_are_entropy_and_effect_of_the_bias",
    ),
    "run: blocks of documents": (
        "parallel/block_attention.py",
        "parallel/test_context_parallel.py::test_document_blocks_cover_the_document_mask_once",
    ),
    "unit: tokens of documents": (
        "parallel/token_split.py",
        "parallel/test_context_parallel.py -k shard_sequence",
    ),
    "unit: masks of dropout": ("parallel/lora/dropout.py", "parallel/lora/test_dropout.py -k mask"),
    "run: masks of dropout": ("parallel/lora/dropout.py", "parallel/lora/test_dropout.py -k steps"),
    "unit: products of experts": (
        "models/layers.py",
        "models/test_moe.py::test_grouped_linear_equals_a_loop_over_experts",
    ),
    "run: learning rates of adapters": ("planning/lora_plan.py", "optim/test_lora_plus.py"),
    "run: adapters of embedding and head": (
        "parallel/lora/embedding.py",
        "parallel/lora/test_embedding.py -k changed_table",
    ),
    "unit: float8 experts": ("parallel/float8/experts.py", "parallel/float8/test_experts.py"),
    "unit: frozen float8 matrices": (
        "parallel/float8/frozen_linear.py",
        "parallel/float8/test_frozen_linear.py -k product",
    ),
    "unit: network of NCCL": ("doctor/nccl_log.py", "doctor/test_nccl_log.py"),
    "unit: known failures": (
        "doctor/failure_signatures.py",
        "doctor/test_failure_signatures.py",
    ),
    "unit: watch of the network": (
        "supervision/network_watch.py",
        "supervision/test_network_watch.py",
    ),
    "unit: Lustre": ("checkpoint/lustre.py", "checkpoint/test_lustre.py"),
    "unit: HyperPod": ("submission/hyperpod.py", "submission/test_hyperpod.py"),
    "unit: requests of SageMaker": (
        "submission/sagemaker_request.py",
        "submission/test_sagemaker.py",
    ),
    "unit: file systems of SageMaker": (
        "submission/sagemaker_storage.py",
        "submission/test_sagemaker_entry.py",
    ),
    "ranks: adapters of a tied table": (
        "parallel/tied_parameters.py",
        "parallel/lora/test_embedding.py -k layouts",
    ),
    "ranks: float8 scales": (
        "parallel/float8/weight_gather.py",
        "parallel/float8/test_linear_layers.py -k scales",
    ),
    "ranks: passes that defer gradients": (
        "parallel/private.py",
        "parallel/test_weight_gradients.py -k second_half",
    ),
    "ranks: budgets of recomputation": (
        "parallel/activation_checkpoint.py",
        "parallel/test_activation_checkpoint.py -k budget",
    ),
}


class _Failures:
    """pytest plugin that keeps the first failure."""

    text = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.text:
            self.text = f"{report.nodeid}\n{report.longreprtext}"


def read_source(words: str) -> str:
    """Return the text on which the result of the tests depends, without weft."""
    files = [ROOT / "tests" / word.partition("::")[0] for word in words.split() if ".py" in word]
    return "".join([words, *(file.read_text("utf-8") for file in files)])


def run_tests(words: str) -> str:
    """Run tests without the slow ones; return the text of the first failure, or nothing.

    Args:
        words: files or node IDs below ``tests``, and options of pytest.
    """
    from tests import harness

    paths = [f"{ROOT}/tests/{word}" if ".py" in word else word for word in words.split()]
    failures = _Failures()
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "run_ranks", _run_ranks)
        patch.chdir(ROOT)
        options = ["-x", "-q", "-m", "not slow", "-o", "timeout=0", f"--basetemp={directory}/t"]
        status = pytest.main([*options, "-p", "no:cacheprovider", *paths], plugins=[failures])
    return failures.text or ("" if status == 0 else f"pytest ended with {status}")


def _run_ranks(
    function: Callable[..., Any], size: int, *args: Any, timeout: float = 60, **keys: Any
) -> list[Any]:
    from weft.supervision.local_ranks import run_ranks

    return run_ranks(partial(function, *args, **keys), size, timeout=min(timeout, RANK_SECONDS))
