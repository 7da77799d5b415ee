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
    # One kernel for the rank's own keys, and one for those of the other rank.
    assert set(counts["attention"]) == {CUDNN, f"{CUDNN}_backward"}


CUDNN, FLASH = "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention"
LARGE_TENSORS = """
from torch.utils._pytree import tree_leaves
from tests.fake_cuda import step
count = step.StepCounter._count
def check_size(self, func, args, kwargs, out):
    for leaf in tree_leaves(out):
        shape = getattr(leaf, 'shape', ())
        assert len(shape) < 2 or min(shape[-2:]) < 32768, f'{func} returns {tuple(shape)}'
    return count(self, func, args, kwargs, out)
step.StepCounter._count = check_size
"""
LARGE_MASK = """
from weft.models import layers
from torch.nn.attention.flex_attention import create_block_mask
def document_mask(ids):
    visible = lambda b, h, q, k: (q >= k) & (ids[b, q] == ids[b, k])
    return create_block_mask(visible, len(ids), None, ids.shape[1], ids.shape[1], ids.device)
from weft.models import llama
llama.document_mask = document_mask
"""
LONG_DOCUMENTS = ("llama3-405b-4d-65k", "model.num_layers=8", "data.packing=documents")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses"])
def test_documents_under_context_parallelism_wait_for_nothing(method: str) -> None:
    """No wait, no exchange of document ids, and no tensor of all pairs of tokens."""
    counts = count(*LONG_DOCUMENTS, f"parallel.cp_method={method}", fault=LARGE_TENSORS)
    assert counts["host_waits"] == {}
    # In each of 8 microbatches: forward, recomputation and backward of the stage's one layer.
    gathers = {"all_gather cp": 24} if method == "allgather" else {}
    assert {k: v for k, v in counts["collectives"].items() if k == "all_gather cp"} == gathers
    if method == "ulysses":
        assert counts["attention"] == {"flex_attention": 16, "flex_attention_backward": 8}
    else:
        # Six documents in each of two chunks, of which one began before its chunk.
        assert counts["attention"] == {FLASH: 16 * 13, f"{FLASH}_backward": 8 * 13}


@pytest.mark.slow
def test_fault_mask_of_all_pairs_is_found() -> None:
    with pytest.raises(RuntimeError, match="65536, 65536"):
        count(*LONG_DOCUMENTS, "parallel.cp_method=ulysses", fault=f"{LARGE_TENSORS}\n{LARGE_MASK}")


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
