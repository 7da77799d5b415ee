"""Steps on fake CUDA tensors: what is captured, fused and waited for, and planted faults."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fake_cuda import PAGE, RESULTS, gpu_recipes, page
from tests import fake_cuda
from tests.fake_cuda.capture import StreamClock

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


VARLEN = "varlen_attention"
CUDNN, FLASH = "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention"


@pytest.mark.parametrize(
    # Fused exchanges: of the graphs of a block's forward, and of its backward with recomputation,
    # or of the parts of both; and all of them.
    ("recipe", "layers", "is_compiled", "exchanges", "attention"),
    [
        ("paper/llama3-405b-4d-65k", 8, True, (8, 8), CUDNN),
        ("qwen3-0.6b-finetune", 2, True, (0, 0), VARLEN),
        ("qwen3-30b-a3b", 2, True, (0, 0), CUDNN),
        ("paper/llama3-8b-8gpu-float8", 2, True, (0, 0), CUDNN),
        ("paper/llama3-70b-async-tp", 2, True, (11, 11), CUDNN),
    ],
)
@pytest.mark.slow
def test_step_is_captured_and_fused_and_waits_for_nothing(
    recipe: str, layers: int, is_compiled: bool, exchanges: tuple[int, int], attention: str
) -> None:
    counts = count(recipe, f"model.num_layers={layers}")
    assert counts["host_waits"] == {}
    # The 405B keeps its parameters gathered for all microbatches; one GPU gathers nothing.
    assert (counts["prefetched"] > 0) == (
        recipe not in ("paper/llama3-405b-4d-65k", "qwen3-0.6b-finetune")
    )
    assert fused(counts) == exchanges
    assert (counts["compiled_operators"] > 500) == is_compiled
    # Under context parallelism: the rank's own keys, and those of the other rank.
    assert set(counts["attention"]) == {attention, f"{attention}_backward"}


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
from weft.models import decoder
from torch.nn.attention.flex_attention import create_block_mask
def document_mask(ids, window, chunk, kernels):
    visible = lambda b, h, q, k: (q >= k) & (ids[b, q] == ids[b, k])
    return create_block_mask(visible, len(ids), None, ids.shape[1], ids.shape[1], ids.device)
decoder.document_mask = document_mask
"""
LONG_DOCUMENTS = ("paper/llama3-405b-4d-65k", "model.num_layers=8", "data.packing=documents")


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
        assert counts["attention"] == {VARLEN: 16, f"{VARLEN}_backward": 8}
    else:
        # Of a rank with six documents in each of two chunks, one of which began before its chunk:
        # the ring has its keys in another step.
        calls = 2 if method == "ring" else 1
        assert counts["attention"] == {
            "_flash_attention_forward": 16 * calls,
            "_flash_attention_backward": 8 * calls,
        }


@pytest.mark.slow
def test_documents_without_the_kernel_have_one_for_each_document() -> None:
    """A run that records logits has no kernel for many lengths."""
    counts = count(*LONG_DOCUMENTS, "monitor.attention_logits=true")
    assert counts["host_waits"] == {}
    kernels = [counts["attention"][name] for name in (FLASH, f"{FLASH}_backward")]
    assert kernels == [16 * 13, 8 * 13]


@pytest.mark.slow
def test_fault_mask_of_all_pairs_is_found() -> None:
    keys = "parallel.cp_method=ulysses", "model.attention_softcap=30"  # FlexAttention has a mask
    with pytest.raises(RuntimeError, match="65536, 65536"):
        count(*LONG_DOCUMENTS, *keys, fault=f"{LARGE_TENSORS}\n{LARGE_MASK}")


SMALL = ("paper/llama3-70b-async-tp", "model.num_layers=2")
BFLOAT16 = (*SMALL, "precision.float8=none")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "override"),
    [
        ("stories-30m", "optim.state_dtype=bfloat16"),
        ("stories-30m", "optim.state_dtype=8bit"),
        ("llama3-8b-qlora", "lora.quantize=nf4"),
    ],
)
def test_constants_are_not_copied_to_the_device_in_a_step(recipe: str, override: str) -> None:
    """The seed of a parameter's random bits, and the table of nf4."""
    assert count(recipe, "model.num_layers=2", override)["host_waits"] == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "cluster"),
    [("tensorwise", "8x8xH100"), ("rowwise", "8x8xH100"), ("mxfp8", "8x8xB200")],
)
def test_float8_experts_wait_for_nothing(recipe: str, cluster: str) -> None:
    """Kernels get shapes, dtypes and strides that they accept."""
    counts = count(
        *("qwen3-30b-a3b", "model.num_layers=2", f"run.cluster={cluster}"),
        *(f"precision.float8={recipe}", "precision.float8_small=true"),
        *("activation_checkpoint.mode=full", "parallel.ep_chunks=1"),
        "precision.float8_exclude=*attn*",  # a CPU build lacks MXFP8's kernels of layers
    )
    assert counts["host_waits"] == {}
    # Two layers and microbatches, three projections: forward, recomputation, two gradients.
    assert counts["matmuls"]["float8"] == 2 * 2 * 3 * 4


ONE_ROOT = """
from dataclasses import replace
from weft.parallel import apply
parallelize = apply.parallelize_model
def parallelize_model(model, plan, mesh, family, backend):
    parallelize(model, plan, mesh, replace(family, fsdp_units=None), backend)
apply.parallelize_model = parallelize_model
"""


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "num_ends"), [("", 1), (ONE_ROOT, 2)], ids=["units", "one root"])
def test_head_is_gathered_and_reduced_beside_blocks(fault: str, num_ends: int) -> None:
    """Exposed are the embedding, block 0 at both ends of a microbatch, and backward's first."""
    counts = count("paper/llama3-8b", "model.num_layers=2", fault=fault)
    microbatches, table, block = counts["microbatches"], 128256 * 4096 / 1e6, 218.112
    exposed = counts["exposed_megabytes"]
    gathered = 2 * (num_ends * table + 2 * microbatches * block)
    reduced = 4 * microbatches * (num_ends * table + block)
    assert exposed["all_gather dp_shard"] == pytest.approx(gathered, abs=1)
    assert exposed["reduce_scatter dp_shard"] == pytest.approx(reduced, abs=1)


SHARED = (
    *("deepseek-v3-671b", "run.cluster=1x8xH200", "parallel.pp=1", "parallel.ep=8"),
    *("model.num_layers=4", "train.microbatch_size=1", "train.global_batch_size=16"),
)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_shared_experts_run_while_rows_travel(compiled: str) -> None:
    """The one layer with experts overlaps in forward, recomputation and backward."""
    counts = count(*SHARED, f"compile.enable={compiled}")
    assert counts["overlapped_exchanges"] == 3 * counts["microbatches"]


PADDED = ("qwen3-30b-a3b", "model.num_layers=2", "parallel.ep_dispatch=padded")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_padded_exchange_of_experts_waits_in_no_layer(mode: str) -> None:
    counts = count(*PADDED, f"activation_checkpoint.mode={mode}", "compile.enable=true")
    assert counts["host_waits"] == {}
    assert counts["row_reads"] == 0
    # Of each microbatch and layer: counts; and for each of the recipe's two chunks, rows there and
    # back, and gradients of rows, twice.  Full recomputation repeats what is not a gradient.
    exchanges = counts["collectives"]["all_to_all ep"] / counts["microbatches"]
    assert exchanges == 2 * {"full": 14, "selective": 9}[mode]


@pytest.mark.slow
def test_fault_exact_sizes_of_experts_are_found() -> None:
    assert count(*PADDED, "parallel.ep_dispatch=alltoall")["row_reads"] > 0


GRAPHS = "compile.cuda_graphs=true"
REPLICAS = (
    *("parallel.dp_replicate=2", "parallel.gradient_sync=microbatch"),
    "parallel.reshard_after_forward=always",
)
TP_AND_CP = ("parallel.tp=2", "parallel.cp=2", "train.microbatch_size=1")


@pytest.mark.parametrize(
    # Of two microbatches in two steps.  With FSDP each has a graph; the last recipe has only one.
    ("recipe", "overrides", "captures", "replays"),
    [
        ("stories-30m", ("model.num_layers=1",), 1, 3),
        pytest.param("stories-30m", ("data.packing=windows",), 1, 3, marks=pytest.mark.slow),
        pytest.param("llama-124m", ("run.cluster=1x1xH100",), 1, 3, marks=pytest.mark.slow),
        pytest.param("llama-124m", ("run.cluster=1x8xH100",), 2, 2, marks=pytest.mark.slow),
        pytest.param(
            *("llama-124m", ("run.cluster=1x8xH100", "model.num_layers=2", *REPLICAS), 2, 2),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("paper/llama3-8b-8gpu-compile", ("model.num_layers=2", *TP_AND_CP), 2, 2),
            marks=pytest.mark.slow,
        ),
        pytest.param(PADDED[0], PADDED[1:], 2, 2, marks=pytest.mark.slow),
        pytest.param(
            "paper/llama3-8b-8gpu-float8", ("model.num_layers=2",), 1, 1, marks=pytest.mark.slow
        ),
    ],
)
def test_microbatch_can_be_captured(
    recipe: str, overrides: tuple[str, ...], captures: int, replays: int
) -> None:
    counts = count(recipe, *overrides, GRAPHS)
    assert counts["capture"] == {"captures": captures, "replays": replays, "obstacles": {}}
    assert counts["host_waits"] == {}


# Each of these would fail on a GPU, or compute with old values.
OBSTACLES = """
import torch
from weft.training.step import TrainStep
step, forward = TrainStep.forward_backward, TrainStep._forward
calls = []
def forward_backward(self, batches):
    self.factor = torch.ones((), device='cuda')
    return step(self, batches)
def forward_(self, microbatch):
    calls.append(None)
    torch.cuda.synchronize()
    loss = forward(self, microbatch) * self.factor
    loss = loss + torch.ones(1).pin_memory().to('cuda', non_blocking=True).sum()
    return loss + (loss.sin() if len(calls) % 2 else loss.cos())
TrainStep.forward_backward, TrainStep._forward = forward_backward, forward_
"""


@pytest.mark.slow
def test_fault_obstacles_to_a_capture_are_found() -> None:
    capture = count("stories-30m", "model.num_layers=1", GRAPHS, fault=OBSTACLES)["capture"]
    found = sorted(kind.partition(":")[0].partition(" (")[0] for kind in capture["obstacles"])
    assert found == [
        "another operator",
        "another tensor from outside",
        "copy from cpu to cuda",
        "wait of the host",
    ]


def test_order_of_streams_in_a_capture_is_checked() -> None:
    """What a capture may not do: wait for work outside of it, and leave work that nobody awaits."""
    obstacles: list[str] = []
    clock, main, side = StreamClock(obstacles.append), object(), object()
    clock.current = [main]

    def capture(waits: bool, joins: bool) -> list[str]:
        obstacles.clear()
        before = clock.record(side)
        clock.begin()
        if waits:
            clock.wait(main, before)
        clock.wait(side, clock.record(main))
        clock.current.append(side)
        clock.launch()
        clock.current.pop()
        if joins:
            clock.wait(main, clock.record(side))
        clock.end()
        return list(obstacles)

    assert capture(waits=False, joins=True) == []
    assert capture(waits=True, joins=True) == ["wait for an event from before the capture"]
    assert capture(waits=False, joins=False) == ["work on a stream that nothing waits for"]


# Gives the thread of a backward pass the modes of the main thread, and checks who hands over: on a
# GPU autograd runs in its own thread, which this thread waits for.
PAIRED_PASSES = """
import threading
import torch
from tests.fake_cuda import step
from weft.parallel.expert_dispatch import during_exchange

def run(main, other, run_in_turns=step.run_in_turns):
    threads = []
    during_exchange.append(lambda: threads.append(threading.current_thread().name))
    run_in_turns(main, other)
    assert threads[0::2] == ["MainThread"] * 2, threads
    assert threads[1] == threads[3] != "backward", threads
    during_exchange.pop()
    with open("PATH", "a") as file:
        file.write("pair ")

step.run_in_turns = run
torch.cuda.set_stream = lambda stream: None
"""


@pytest.mark.slow
def test_paired_passes_take_turns_with_the_thread_of_autograd(tmp_path: Path) -> None:
    keys = ["model.num_layers=4", "pipeline.layers_per_stage=[1,1,1,1]", "compile.enable=false"]
    keys += ["run.cluster=1x4xH100", "parallel.pp=2", "parallel.dp_shard=2", "parallel.ep=2"]
    keys += ["train.microbatch_size=1", "train.global_batch_size=64", "parallel.ep_chunks=1"]
    keys += ["pipeline.schedule=DualPipeV", "activation_checkpoint.mode=none"]
    fault = PAIRED_PASSES.replace("PATH", str(tmp_path / "pairs"))
    counts = count("qwen3-30b-a3b", *keys, fault=fault)
    assert (tmp_path / "pairs").read_text() == "pair " * 3
    assert counts["microbatches"] == 4
    # Of each microbatch in two stages: counts of rows, and rows there and back in both passes.
    assert counts["collectives"]["all_to_all ep"] == 4 * 2 * 5


@pytest.mark.slow
def test_bfloat16_exchanges_are_fused() -> None:
    assert fused(count(*BFLOAT16)) == (11, 11)


CAST_AFTER_GATHER = """
from weft.parallel import tensor_parallel
gather = tensor_parallel.gather_sequence
tensor_parallel.gather_sequence = lambda x, group: gather(x, group).float().sin().to(x.dtype)
"""
SYNCHRONIZE = """
import torch
from weft.training import step
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


VIEWS = """
from weft.models import layers
norm = layers.RMSNorm.forward
def forward(self, x):
    x.new_empty(x.shape)
    return norm(self, x.detach().view_as(x) if x.device.type == 'cpu' else x.view_as(x))
layers.RMSNorm.forward = forward
"""
ONE_MORE_KERNEL = """
from weft.models import layers
norm = layers.RMSNorm.forward
layers.RMSNorm.forward = lambda self, x: norm(self, x + 1)
"""


@pytest.mark.slow
def test_eager_kernels_are_no_views_and_no_new_memory() -> None:
    step = ("paper/llama3-8b", "model.num_layers=1", "activation_checkpoint.mode=none")
    kernels = count(*step)["eager_kernels"]
    assert count(*step, fault=VIEWS)["eager_kernels"] == kernels
    # Three norms in each of two microbatches.
    assert count(*step, fault=ONE_MORE_KERNEL)["eager_kernels"] == kernels + 3 * 2


DROPPED_PREFETCH = """
from weft.parallel import data_parallel
data_parallel._set_prefetch = lambda *args: None
"""


@pytest.mark.slow
def test_fault_dropped_prefetch_is_found() -> None:
    step = ("paper/llama3-8b-8gpu-compile", "model.num_layers=6")
    # All but the gathers of the embedding, of the first block and of the first one in backward.
    assert (counts := count(*step))["prefetched"] == counts["fsdp_gathers"] - 3 == 11
    assert count(*step, fault=DROPPED_PREFETCH)["prefetched"] == 5


CAST_AFTER_CAST = """
from weft.parallel.float8 import sequence_gather
gather = sequence_gather._gather
def gather_and_copy(*args):
    x = gather(*args)
    x._data = x._data.float().to(x._data.dtype)
    return x
sequence_gather._gather = gather_and_copy
"""


@pytest.mark.slow
def test_fault_cast_between_float8_gather_and_product_is_found() -> None:
    assert fused(count(*SMALL, fault=CAST_AFTER_CAST)) == (5, 11)


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
