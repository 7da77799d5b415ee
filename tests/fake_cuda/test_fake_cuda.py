"""Steps on fake CUDA tensors: what is captured, fused and waited for, and planted faults."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fake_cuda import PAGE, RESULTS, gpu_recipes, page

ROOT = Path(__file__).parent.parent.parent
pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(700),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ for the fake device"),
]

SCRIPT = """
from tests.fake_cuda.device import load_guard
load_guard()
import json, sys, torch
from tests.fake_cuda.step import count_step, plan_recipe
{fault}
recipe, *pairs = sys.argv[1:]
plan = plan_recipe(recipe, [tuple(pair.split("=", 1)) for pair in pairs])
print(json.dumps(count_step(plan).to_dict()))
"""


def count(recipe: str, *overrides: str, fault: str = "") -> dict[str, Any]:
    """Count a step in a separate process, with a fault that is planted by code.

    Raises:
        RuntimeError: if the step fails.
    """
    command = [sys.executable, "-c", SCRIPT.format(fault=fault), recipe, *overrides]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    counts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return counts


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
    # Products run in graphs, except those of the loss.
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
    assert list(results) == gpu_recipes()
    assert PAGE.read_text("utf-8") == page(results)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", gpu_recipes())
def test_recipe_does_what_is_recorded(recipe: str) -> None:
    """A change shows here; ``python benchmarks/fake_cuda.py --write`` records it for review."""
    counts = count(recipe)
    assert counts["host_waits"] == {}
    assert counts == json.loads(RESULTS.read_text("utf-8"))[recipe]
