"""Tests of a GPU's kernels and compiled code.

python -m pytest tests/gpu

Tests that also make sense without a GPU run on the CPU there, so that their calls of weft are
checked everywhere.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh

from tests.flash_reference import FlashReference
from tests.small import SMALL, before_each_step, losses, small_job
from weft.checkpoint import commit
from weft.checkpoint.fingerprint import fingerprint
from weft.checkpoint.shard_files import write_shards
from weft.config.schema import OptimSection
from weft.data.dataset import open_dataset
from weft.models import varlen_attention
from weft.models.attention import AttentionOptions, attend, document_mask
from weft.models.decoder import SHARDING, Decoder
from weft.models.families.llama import PRESETS
from weft.models.moe import ExpertLinear
from weft.models.varlen_attention import PackedDocuments
from weft.monitor.step_timer import enter_phase
from weft.optim.optimizer import build_adamw
from weft.parallel import block_attention
from weft.parallel.block_attention import DocumentBlocks
from weft.parallel.cuda_graphs import CudaDevice
from weft.parallel.float8 import apply_float8, prepare_compiler
from weft.parallel.tensor_parallel import apply_tensor_parallel
from weft.parallel.token_split import shard_sequence, split_sequences, unshard_sequence
from weft.planning.plan import Machine
from weft.planning.resolve import resolve
from weft.training import loop
from weft.training.loop import train
from weft.training.setup import Rank, fastest_attention

HAS_GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA GPU")
DEVICE = torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")


def heads(tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    shapes = [(2, tokens, 8, 64), (2, tokens, 2, 64), (2, tokens, 2, 64)]
    return [torch.randn(s, device=DEVICE, dtype=dtype, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("documents", [False, True])
def test_attention_equals_float64_on_the_cpu(documents: bool) -> None:
    """Compare the bfloat16 kernels of a run with float64 on the CPU."""
    numbers = torch.tensor([[0] * 300 + [1] * 724, [0] * 3 + [1] * 1000 + [2] * 21])
    q, k, v = heads(1024, torch.bfloat16)
    with fastest_attention(DEVICE):
        out = attend(q, k, v, document_mask(numbers.to(DEVICE)) if documents else None)
        upstream = torch.randn_like(out)
        grads = torch.autograd.grad(out, (q, k, v), upstream)
    exact = [tensor.detach().double().cpu().requires_grad_() for tensor in (q, k, v)]
    exact_q, exact_k, exact_v = exact
    expected = attend(exact_q, exact_k, exact_v, document_mask(numbers) if documents else None)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=0.02, atol=0.02)
    theirs = torch.autograd.grad(expected, exact, upstream.double().cpu())
    for local, other in zip(grads, theirs, strict=True):
        assert (local.double().cpu() - other).norm() < 0.01 * other.norm()


@needs_gpu
@pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(),
        AttentionOptions(window=100),
        AttentionOptions(scale=0.3, window=300, sinks_H=torch.tensor([0.5, -1.0, 2.0, 0.0] * 2)),
    ],
)
@pytest.mark.parametrize("value_dim", [64, 48])
def test_varlen_attention_equals_float64_on_the_cpu(
    options: AttentionOptions, value_dim: int
) -> None:
    """One call takes all documents, eager and compiled, also after other documents."""
    compiled: Any = torch.compile(attend, fullgraph=True)
    for numbers in (
        torch.tensor([[0] * 300 + [1] * 724, [0] * 3 + [1] * 1000 + [2] * 21]),
        torch.arange(1024).expand(2, -1) // torch.tensor([[1], [100]]),
    ):
        q, k, v = heads(1024, torch.bfloat16)
        leaves = [q, k, v[..., :value_dim].detach().requires_grad_()]
        on_gpu = options
        if options.sinks_H is not None:
            leaves.append(options.sinks_H.to(DEVICE).requires_grad_())
            on_gpu = options._replace(sinks_H=leaves[-1])
        boundaries = block_attention.document_boundaries(numbers)
        mask = PackedDocuments(numbers.to(DEVICE), boundaries, 0).select(0)
        upstream = torch.randn(2, 1024, 8, value_dim, device=DEVICE, dtype=torch.bfloat16)
        exact = [tensor.detach().double().cpu().requires_grad_() for tensor in leaves]
        on_cpu = options._replace(sinks_H=exact[3] if len(exact) > 3 else None)
        expected = attend(
            exact[0], exact[1], exact[2], document_mask(numbers, options.window), on_cpu
        )
        theirs = torch.autograd.grad(expected, exact, upstream.double().cpu())
        for function in (attend, compiled):
            out = function(leaves[0], leaves[1], leaves[2], mask, on_gpu)
            torch.testing.assert_close(out.double().cpu(), expected, rtol=0.02, atol=0.02)
            for local, other in zip(
                torch.autograd.grad(out, leaves, upstream), theirs, strict=True
            ):
                assert (local.double().cpu() - other).norm() < 0.01 * other.norm()


@needs_gpu
def test_attention_uses_a_flash_kernel() -> None:
    """Attention with grouped queries stores no scores in memory."""
    q, k, v = heads(4096, torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with fastest_attention(DEVICE):
        attend(q, k, v, None).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 4096 * 4096 * 8  # a quarter of the scores


def attend_second_rank(
    documents: torch.Tensor | None,
    qkv: list[torch.Tensor],
    ring: bool = False,
    window: int = 0,
    varlen: bool = False,
) -> Any:
    """Return output and gradients of rank 1 of 2 from the blocks of attention, on one device.

    Keys and values are of full sequences; ``ring``: the blocks get the part of a rank.
    """
    q, k, v, upstream = qkv
    boundaries = [[0, k.shape[1]]]
    if documents is not None:
        boundaries = block_attention.document_boundaries(documents)
    split = split_sequences(boundaries, 2, True)
    device = q.device if varlen else None
    blocks = DocumentBlocks(boundaries, 1, split, ring, device).select(
        AttentionOptions(window=window)
    )
    kv = torch.cat((k, v))
    parts = shard_sequence(kv, split) if ring else kv.unsqueeze(0)
    rows, upstream = (x.flatten(0, 1).unsqueeze(0) if varlen else x for x in (q, upstream))
    out = block_attention.empty_float32(rows)
    lse = out.new_empty(rows.shape[0], rows.shape[2], rows.shape[1])
    sources = [1, 0] if ring else [0]
    for source in sources:
        for block in blocks[source]:
            block_attention.accumulate_block(
                rows, parts[source], block, out, lse, compiled=q.is_cuda
            )
    sums, dkv = (
        block_attention.empty_float32(rows).zero_(),
        torch.zeros_like(parts, dtype=out.dtype),
    )
    for source in sources:
        for block in blocks[source]:
            saved, results = (rows, out.to(q.dtype), lse), (sums, dkv[source])
            block_attention.accumulate_block_grad(
                upstream, saved, parts[source], block, results, compiled=q.is_cuda
            )
    dkv = unshard_sequence(dkv, split) if ring else dkv[0]
    return out.view(q.shape), sums.view(q.shape), dkv


# A sequence and its rank's queries: one document begins before the rank's tokens.
DOCUMENTS = torch.tensor([[0] * 300 + [1] * 724, [0] * 3 + [1] * 1000 + [2] * 21])


def rank_qkv(dtype: torch.dtype) -> list[torch.Tensor]:
    """Return queries of a rank, keys and values of all, and the gradient of the rank's output."""
    shapes = [(2, 512, 8, 64), (2, 1024, 2, 64), (2, 1024, 2, 64), (2, 512, 8, 64)]
    return [torch.randn(shape, device=DEVICE, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 0.01), (torch.float32, 0.001)])
def test_blocks_of_context_parallelism_equal_float64_on_the_cpu(
    dtype: torch.dtype, limit: float, documents: bool
) -> None:
    """cuDNN or FlashAttention, in 32 bit the memory-efficient kernel, and compiled sums."""
    qkv = rank_qkv(dtype)
    with fastest_attention(DEVICE):
        results = attend_second_rank(DOCUMENTS if documents else None, qkv)
    exact = [x.double().cpu() for x in qkv]
    for local, other in zip(
        results, attend_second_rank(DOCUMENTS if documents else None, exact), strict=True
    ):
        assert (local.double().cpu() - other).norm() < limit * other.norm()


@pytest.mark.parametrize("window", [0, 100, 700])
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize(
    "documents", [DOCUMENTS, torch.arange(1024).expand(2, -1) // torch.tensor([[1], [100]])]
)
def test_varlen_blocks_of_context_parallelism_equal_float64_on_the_cpu(
    documents: torch.Tensor, ring: bool, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel for many lengths gets parts without keys and without queries."""
    if not HAS_GPU:
        monkeypatch.setattr(varlen_attention, "aten", FlashReference())
    qkv = rank_qkv(torch.bfloat16)
    results = attend_second_rank(documents, qkv, ring, window, varlen=True)
    expected = attend_second_rank(documents, [x.double().cpu() for x in qkv], ring, window)
    for local, other in zip(results, expected, strict=True):
        assert (local.double().cpu() - other).norm() < 0.02 * other.norm()


@pytest.mark.parametrize("states", ["bfloat16", "8bit"])
def test_low_precision_adamw_compiled_equals_the_cpu(states: Any) -> None:
    """The compiled update kernel equals the eager operators on the CPU."""
    start = torch.randn(64, 128)
    params = [nn.Parameter(start.clone()), nn.Parameter(start.to(DEVICE))]
    section = OptimSection(lr=1e-2, state_dtype=states)
    optimizers = [
        build_adamw([{"params": [param], "weight_decay": 0.1, "matrices": True}], section)
        for param in params
    ]
    for _ in range(5):
        grad = torch.randn(64, 128)
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = grad.to(param.device)
            optimizer.step()
    torch.testing.assert_close(params[1].cpu(), params[0], rtol=1e-3, atol=1e-4)


FLOAT8_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")
CAPABILITY = torch.cuda.get_device_capability() if HAS_GPU else (0, 0)


def skip_without_kernels(recipe: str, experts: bool = False) -> None:
    """Skip a test on a GPU without kernels for a recipe; a CPU emulates."""
    needed = (10, 0) if recipe == "mxfp8" else (9, 0) if experts else (8, 9)
    if HAS_GPU and needed > CAPABILITY:
        version = ".".join(map(str, needed))
        pytest.skip(f"{recipe}{' experts' * experts} needs compute capability {version}")


@pytest.mark.parametrize("recipe", FLOAT8_RECIPES)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_gpu)])
def test_float8_on_cuda_equals_its_emulation(recipe: str, compiled: bool) -> None:
    """Tensor core matmuls equal high-precision matmuls of rounded inputs."""
    skip_without_kernels(recipe)
    prepare_compiler(recipe)
    linear = nn.Linear(512, 256, bias=False, device=DEVICE, dtype=torch.bfloat16)
    x = torch.randn(2, 64, 512, device=DEVICE, dtype=torch.bfloat16)
    upstream = torch.randn(2, 64, 256, device=DEVICE, dtype=torch.bfloat16)
    results = []
    for emulate in (not HAS_GPU, True):
        model = nn.Sequential(copy.deepcopy(linear))
        apply_float8(model, recipe, ["0"], emulate)
        inputs = x.clone().requires_grad_()
        run: Any = torch.compile(model, fullgraph=True) if compiled and not emulate else model
        out = run(inputs)
        results.append((out, *torch.autograd.grad(out, (inputs, *model.parameters()), upstream)))
    for real, emulated in zip(*results, strict=True):
        assert (real - emulated).norm() < 0.01 * emulated.norm()


@pytest.mark.parametrize("recipe", ["none", *FLOAT8_RECIPES])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_gpu)])
def test_experts_on_cuda_equal_a_loop_over_experts(recipe: str, compiled: bool) -> None:
    """Grouped matmuls of experts, one of them without tokens, equal one matmul per expert."""
    skip_without_kernels(recipe, experts=True)
    prepare_compiler(recipe)
    counts = torch.tensor([100, 0, 37, 119], device=DEVICE)
    model = nn.Module()
    model.experts = ExpertLinear(4, 256, 384).to(DEVICE, torch.bfloat16)
    x = torch.randn(256, 256, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(256, 384, device=DEVICE, dtype=torch.bfloat16)
    weight = model.experts.weight
    parts = zip(x.double().split(counts.tolist()), weight.double(), strict=True)
    exact = torch.cat([rows @ matrix.T for rows, matrix in parts])
    expected = (exact, *torch.autograd.grad(exact, (x, weight), upstream.double()))
    if recipe != "none":
        apply_float8(model, recipe, ["experts"], emulate=not HAS_GPU)
    run: Any = torch.compile(model.experts, fullgraph=True) if compiled else model.experts
    out = run(x, counts)
    limit = 0.01 if recipe == "none" else 0.06  # two factors with 3 bits of mantissa
    for real, value in zip(
        (out, *torch.autograd.grad(out, (x, weight), upstream)), expected, strict=True
    ):
        assert (real.double() - value.double()).norm() < limit * value.double().norm()


@needs_gpu
def test_async_tensor_parallel_compiler_fuses_collectives() -> None:
    """Compile a sequence-parallel block for 8 fake ranks."""
    import torch._inductor.fx_passes.micro_pipeline_tp as passes
    import torch.distributed._symmetric_memory as symmetric
    from torch._inductor import config
    from torch._inductor.utils import fresh_inductor_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    graphs: list[Counter[str]] = []
    run_pass = passes.micro_pipeline_tp_pass

    def watched(graph: Any) -> None:
        run_pass(graph)
        names = [str(node.target).split(".")[:2] for node in graph.nodes]
        spaces = ("symm_mem", "_c10d_functional")
        graphs.append(Counter(n[1] for n in names if n[0] in spaces and n[1] != "wait_tensor"))

    model_config = PRESETS["8b"].model_copy(update={"num_layers": 1, "vocab_size": 512})
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        with torch.device("meta"):
            model = Decoder(model_config)
        mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("tp",))
        apply_tensor_parallel(model, mesh, SHARDING, model_config, sequence_parallel=True)
        model.to_empty(device=DEVICE).to(torch.bfloat16)
        block = model.layers["0"]
        block.compile(fullgraph=True)
        x = torch.zeros(1, 256, model_config.dim, device=DEVICE, dtype=torch.bfloat16)
        cos, sin = model.rope(8 * 256, None, torch.bfloat16)
        with (
            patch.object(passes, "micro_pipeline_tp_pass", watched),
            patch.object(torch._inductor.fx_passes.post_grad, "micro_pipeline_tp_pass", watched),
            config.patch(_micro_pipeline_tp=True),
            symmetric._test_mode(),
            fresh_inductor_cache(),
        ):
            block(x.requires_grad_(), cos, sin, None).sum().backward()
    finally:
        dist.destroy_process_group()
    forward, backward = graphs
    assert forward == {"fused_all_gather_matmul": 2, "fused_matmul_reduce_scatter": 2}
    assert backward["fused_all_gather_matmul"] == 2


@needs_gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_run_on_the_gpu_equals_the_cpu(compiled: bool, tmp_path: Path, store_path: Path) -> None:
    import subprocess
    import sys

    from tests.small import losses

    results = {}
    for device in ("cpu", "cuda"):
        pairs = [
            *SMALL,
            ("run.dir", str(tmp_path / device)),
            ("run.nproc_per_node", "1"),
            ("run.device", device),
            ("data.path", str(store_path)),
            ("precision.compute_dtype", "float32"),
            ("compile.enable", str(compiled and device == "cuda").lower()),
        ]
        command = [sys.executable, "-m", "weft", "train", "demo"]
        command += [word for key, value in pairs for word in (f"--{key}", value)]
        subprocess.run(command, check=True, timeout=300)
        results[device] = losses(tmp_path / device)
    assert results["cuda"] == pytest.approx(results["cpu"], rel=2e-3)


def train_on_gpu(store_path: Path, *overrides: tuple[str, str]) -> None:
    """Train in this process."""
    job = small_job(("run.device", "cuda"), *overrides)
    plan = resolve(job, Machine("cuda", 1, torch.cuda.get_device_name(), world_size=1))
    backend, store = "cpu:gloo,cuda:nccl", HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=DEVICE)
    try:
        train(plan, open_dataset(store_path), Rank(0, 0, 1, DEVICE), Console(quiet=True))
    finally:
        torch.cuda.set_sync_debug_mode("default")
        dist.destroy_process_group()


@needs_gpu
def test_host_waits_once_per_recorded_step(
    tmp_path: Path, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits in recorded steps only; the first steps load kernels."""
    begun: list[int] = []  # number of waits before each step
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")

        def count_waits(step: int) -> None:
            begun.append(sum("synchronizing" in str(wait.message) for wait in waits))

        monkeypatch.setattr(loop, "enter_phase", enter_phase)  # restored at the end
        before_each_step(count_waits)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            train_on_gpu(
                store_path,
                ("run.dir", str(tmp_path)),
                ("train.steps", "17"),
                ("monitor.log_interval", "4"),
                ("monitor.layer_grad_norms", "true"),
            )
        finally:
            monkeypatch.undo()
    counts = [after - before for before, after in pairwise(begun)]
    assert counts[5:16] == [0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1]  # of steps 6 to 16


@needs_gpu
@pytest.mark.parametrize("packing", ["windows", "documents"])
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_graphs_replay_the_losses_of_ordinary_steps(
    packing: str, compiled: str, tmp_path: Path, store_path: Path
) -> None:
    """With accumulation, a smaller last microbatch, an evaluation between replays, and a resume."""
    keys = [
        ("train.global_batch_size", "5"),
        ("train.microbatch_size", "2"),
        ("train.eval_interval", "4"),
        ("monitor.log_interval", "1"),
        ("checkpoint.interval", "5"),
        ("data.packing", packing),
        ("compile.enable", compiled),
        ("optim.decay_fraction", "0"),  # the same learning rates for any number of steps
    ]
    graphs = ("compile.cuda_graphs", "true")
    ordinary, replayed = ("run.dir", str(tmp_path / "a")), ("run.dir", str(tmp_path / "b"))
    train_on_gpu(store_path, *keys, ordinary, ("train.steps", "10"))
    train_on_gpu(store_path, *keys, replayed, ("train.steps", "5"), graphs)
    train_on_gpu(store_path, *keys, replayed, ("train.steps", "10"), graphs)
    # Documents have another kernel with graphs.
    assert losses(tmp_path / "b") == pytest.approx(losses(tmp_path / "a"), rel=1e-3)


@needs_gpu
def test_capture_that_waits_for_the_host_names_the_key() -> None:
    x = torch.ones(1, device=DEVICE)
    with pytest.raises(RuntimeError, match=r"Set compile\.cuda_graphs=false"):
        CudaDevice().capture(lambda: x * x.item())


@needs_gpu
@pytest.mark.parametrize("async_save", ["false", "true"])
def test_save_does_not_wait_for_the_gpu_once_copied(
    async_save: str, tmp_path: Path, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that writes would wait for all kernels of training, for each tensor again."""
    is_copied = []

    def write_without_gpu(path: Path, shards: Any, durable: bool = True) -> Any:
        for shard in shards:
            assert not any(rows.is_cuda for rows in shard.rows)
            assert isinstance(shard.fingerprint, int)
            (rows,) = shard.rows
            is_copied.append(fingerprint(rows, shard.offsets, shard.shape))
            assert int(is_copied[-1]) == shard.fingerprint  # of the GPU
        return write_shards(path, shards, durable)

    monkeypatch.setattr(commit, "write_shards", write_without_gpu)
    train_on_gpu(
        store_path,
        ("run.dir", str(tmp_path)),
        ("train.steps", "4"),
        ("checkpoint.interval", "2"),
        ("checkpoint.async_save", async_save),
    )
    assert len(is_copied) > 20
    assert list((tmp_path / "checkpoints").glob("step-*4"))
