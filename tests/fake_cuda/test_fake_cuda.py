"""Steps on fake CUDA tensors: what is captured, fused and waited for, and planted faults."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from benchmarks.fake_cuda import PAGE, RESULTS, gpu_recipes, page
from tests import fake_cuda

pytestmark = [pytest.mark.system, pytest.mark.timeout(700)]


def count(recipe: str, *overrides: str, fault: str = "") -> dict[str, Any]:
    """Count a step; skip the test where nothing can compile the fake device."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++ for the fake device")
    return fake_cuda.count(recipe, *overrides, fault=fault)


def fused(counts: dict[str, Any]) -> tuple[int, int]:
    """Return the exchanges of tensor parallelism that are fused, and all of them."""
    graphs = counts["graphs"]
    return (
        sum(graph["fused_gathers"] + graph["fused_scatters"] for graph in graphs),
        sum(graph["gathers"] + graph["scatters"] for graph in graphs),
    )


def test_blocks_with_broken_graphs_are_captured_in_recomputation() -> None:
    """Context parallelism breaks a block's graph; all of its parts are compiled nevertheless."""
    counts = count("llama3-405b-4d-65k", "model.num_layers=8")
    assert counts["host_waits"] == {}
    assert len(counts["graphs"]) >= 5
    assert counts["compiled_operators"] > 500
    assert counts["float8_casts"]["compiled"] > counts["float8_casts"].get("eager", 0)


SMALL = ("llama3-70b-async-tp", "model.num_layers=2")
BFLOAT16 = (*SMALL, "precision.float8=none")


@pytest.mark.slow
def test_asynchronous_tensor_parallelism_fuses_exchanges() -> None:
    assert fused(count(*BFLOAT16)) == (9, 11)
    # The casts to float8 come after the gathers, so these are not fused.
    assert fused(count(*SMALL)) == (3, 11)


CAST_AFTER_GATHER = """
from weft.parallel import tensor_parallel
gather = tensor_parallel.gather_sequence
tensor_parallel.gather_sequence = lambda x, group: gather(x, group).float().sin().to(x.dtype)
"""
SYNCHRONIZE = """
import torch
from weft.train import step
normalize = step.TrainStep.forward_backward
def forward_backward(self, batches):
    torch.cuda.synchronize()
    return normalize(self, batches)
step.TrainStep.forward_backward = forward_backward
"""
ITEM = """
from weft.models import layers
norm = layers.RMSNorm.forward
layers.RMSNorm.forward = lambda self, x: norm(self, x) * x.sum().item()
"""
GRAPH_BREAK = """
import torch
from weft.models import layers
norm = layers.RMSNorm.forward
def forward(self, x):
    torch._dynamo.graph_break()
    return norm(self, x)
layers.RMSNorm.forward = forward
"""


@pytest.mark.slow
def test_fault_cast_between_gather_and_product_is_found() -> None:
    assert fused(count(*BFLOAT16, fault=CAST_AFTER_GATHER)) != fused(count(*BFLOAT16))


@pytest.mark.slow
def test_fault_host_wait_is_found() -> None:
    (line,) = count("stories-30m", fault=SYNCHRONIZE)["host_waits"]
    assert line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [(ITEM, "_local_scalar_dense"), (GRAPH_BREAK, "graph_break")],
    ids=["item", "break"],
)
def test_fault_that_stops_the_compiler_is_found(fault: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        count("stories-30m", fault=fault)


def test_page_is_of_the_recorded_counts() -> None:
    results = json.loads(RESULTS.read_text("utf-8"))
    assert list(results["steps"]) == gpu_recipes()
    assert PAGE.read_text("utf-8") == page(results)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", gpu_recipes())
def test_recipe_does_what_is_recorded(recipe: str) -> None:
    """A change shows here; ``python benchmarks/fake_cuda.py --write`` records it for review."""
    counts = count(recipe)
    assert counts["host_waits"] == {}
    assert counts == json.loads(RESULTS.read_text("utf-8"))["steps"][recipe]
