"""Attention within packed documents: the operators, without a GPU, against the mask."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.fake_cuda import gpu_recipes
from tests.flash_reference import FlashReference
from weft.config.reader import read_job
from weft.config.schema import ActivationCheckpointSection
from weft.models import varlen_attention
from weft.models.attention import AttentionOptions, attend, document_mask
from weft.models.decoder import build_mask
from weft.models.decoder_config import DecoderConfig
from weft.models.varlen_attention import (
    OBSTACLES,
    AttentionNeeds,
    DocumentOffsets,
    PackedDocuments,
    find_obstacles,
    find_offsets,
)
from weft.parallel.activation_checkpoint import apply_activation_checkpoint
from weft.parallel.block_attention import document_boundaries
from weft.planning.devices import parse_cluster
from weft.planning.plan_text import cluster_machine
from weft.planning.resolve import resolve

CPU = torch.device("cpu")


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> FlashReference:
    reference = FlashReference()
    monkeypatch.setattr(varlen_attention, "aten", reference)
    return reference


def random_ids(rng: random.Random, batch_size: int, num_tokens: int) -> Tensor:
    rows = []
    for _ in range(batch_size):
        count = min(rng.choice([0, 1, 3, num_tokens]), num_tokens - 1)
        cuts = sorted(rng.sample(range(1, num_tokens), count))
        rows.append([sum(position >= cut for cut in cuts) % 2 for position in range(num_tokens)])
    return torch.tensor(rows)


def pack(ids_BT: Tensor, chunk: int = 0) -> PackedDocuments:
    return PackedDocuments(ids_BT, document_boundaries(ids_BT), chunk)


@pytest.mark.parametrize(
    ("options", "key_heads", "value_dim"),
    [
        (AttentionOptions(), 4, 8),
        (AttentionOptions(), 2, 8),
        (AttentionOptions(0.3), 1, 6),
        (AttentionOptions(window=1), 2, 8),
        (AttentionOptions(window=4), 2, 8),
        (AttentionOptions(window=30), 2, 8),
        (AttentionOptions(chunk=5), 2, 8),
        (AttentionOptions(window=3, sinks_H=torch.tensor([0.5, -1.0, 2.0, 0.0])), 2, 6),
    ],
)
def test_varlen_attention_and_gradients_equal_those_of_the_mask(
    flash: FlashReference, options: AttentionOptions, key_heads: int, value_dim: int
) -> None:
    rng = random.Random(str(options))
    for batch_size, num_tokens in ((1, 2), (1, 24), (3, 17), (2, 24)):
        ids_BT = random_ids(rng, batch_size, num_tokens)
        leaves = [
            torch.randn(batch_size, num_tokens, *heads, dtype=torch.float64, requires_grad=True)
            for heads in ((4, 8), (key_heads, 8), (key_heads, value_dim))
        ]
        used = options
        if options.sinks_H is not None:
            sinks_H = options.sinks_H.double().requires_grad_()
            leaves, used = [*leaves, sinks_H], options._replace(sinks_H=sinks_H)
        limits = options.window, options.chunk
        offsets = build_mask(pack(ids_BT, options.chunk), ids_BT, *limits)
        assert isinstance(offsets, DocumentOffsets)
        q, k, v = leaves[:3]
        outputs = [attend(q, k, v, m, used) for m in (offsets, document_mask(ids_BT, *limits))]
        # With sinks, the reference computes its scores in float32.
        torch.testing.assert_close(*outputs, atol=1e-6, rtol=1e-5)
        upstream = torch.randn_like(outputs[0])
        grads = [torch.autograd.grad(out, leaves, upstream) for out in outputs]
        torch.testing.assert_close(*grads, atol=1e-6, rtol=1e-5)
    assert flash.calls == {"forward": 4, "backward": 4}  # one for all documents


def test_offsets_have_one_shape_for_any_documents() -> None:
    several, single = (find_offsets(b, 0, CPU) for b in ([[0, 2, 6], [0, 5, 6]], [[0, 6]] * 2))
    assert several.offsets_M.tolist() == [0, 2, 6, 11, *[12] * 9]
    assert several.sizes_2.tolist() == [4, 5]
    assert single.offsets_M.tolist() == [0, 6, *[12] * 11]
    assert single.sizes_2.tolist() == [2, 6]
    chunks = find_offsets([[0, 2, 6], [0, 5, 6]], 3, CPU)
    assert chunks.offsets_M[: chunks.sizes_2[0]].tolist() == [0, 2, 5, 6, 9, 11]
    # The kernel has another path if the longest document has one token.
    assert find_offsets([[0, 1, 2]], 0, CPU).sizes_2.tolist() == [2, 2]


def small_block(q: Tensor, weight: Tensor, mask: DocumentOffsets) -> Tensor:
    return attend(q * weight, q[:, :, :2], q[:, :, 2:], mask, AttentionOptions(window=5)) * weight


def test_other_documents_compile_nothing_again_and_break_no_graph(flash: FlashReference) -> None:
    rng = random.Random(0)
    counter = CompileCounterWithBackend("aot_eager")
    compiled: Any = torch.compile(small_block, backend=counter, fullgraph=True)
    q, weight = torch.randn(2, 24, 4, 8), torch.ones(8, requires_grad=True)
    for ids_BT in (torch.zeros(2, 24), *(random_ids(rng, 2, 24) for _ in range(6))):
        mask = pack(ids_BT).select(0)
        outputs = [function(q, weight, mask) for function in (small_block, compiled)]
        torch.testing.assert_close(*outputs)
        torch.testing.assert_close(
            *(torch.autograd.grad(out.square().sum(), weight)[0] for out in outputs)
        )
    assert counter.frame_count == 1
    assert len(set(flash.num_documents)) > 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, q: Tensor, mask: DocumentOffsets) -> Tensor:
        return small_block(q, self.weight, mask)


@pytest.mark.parametrize(("mode", "calls"), [("selective", 1), ("full", 2), ("budget", 1)])
def test_selective_and_budget_checkpointing_do_not_repeat_the_kernel(
    flash: FlashReference, mode: Any, calls: int
) -> None:
    block = Block()
    section = ActivationCheckpointSection(mode=mode, memory_budget=0.9)
    apply_activation_checkpoint([block], section, compiled=False)
    for _ in range(2):  # budget chooses in the first pass
        flash.calls["forward"] = 0
        block(torch.randn(2, 24, 4, 8), pack(torch.zeros(2, 24)).select(0)).sum().backward()
    assert flash.calls["forward"] == calls


def test_operators_give_pytorch_the_arguments_of_its_schemas() -> None:
    """PyTorch's shape functions take what the operators pass, and return what they declare."""
    mask = find_offsets([[0, 5, 24]], 0, CPU)
    forward, backward = (
        operator._init_fn
        for operator in (
            varlen_attention.varlen_attention,
            varlen_attention.varlen_attention_backward,
        )
    )
    q, k, v = (
        torch.empty(24, heads, 64, dtype=torch.bfloat16, device="meta") for heads in (8, 2, 2)
    )
    limits = mask.offsets_M.to("meta"), mask.sizes_2, 0.125, 7
    out, lse = forward(q, k, v, None, *limits)
    grads = backward(out, q, k, v, out, lse, *limits)
    operators = torch.ops.weft
    with FakeTensorMode(allow_non_fake_inputs=True):
        declared = operators.varlen_attention(q, k, v, None, *limits)
        declared_grads = operators.varlen_attention_backward(out, q, k, v, out, lse, *limits)
    for real, fake in zip((out, lse, *grads), (*declared, *declared_grads), strict=True):
        assert (real.shape, real.dtype, real.stride()) == (fake.shape, fake.dtype, fake.stride())


PLAIN = AttentionNeeds(DecoderConfig(), "bfloat16", (9, 0))


def model(**keys: Any) -> AttentionNeeds:
    return PLAIN._replace(config=DecoderConfig(**keys))


@pytest.mark.parametrize(
    "needs",
    [
        PLAIN,
        PLAIN._replace(capability=(8, 0)),
        PLAIN._replace(capability=(12, 0), dtype="float16"),
        model(head_dim=256),
        model(sliding_window=1024, layer_pattern="LLG"),
        model(attention_chunk=8192, layer_pattern="LLG"),
        model(attention_sinks=True),
        model(kv_rank=512, rope_head_dim=64, head_dim=192, value_head_dim=128, num_kv_heads=32),
    ],
)
def test_rule_takes_the_kernel(needs: AttentionNeeds) -> None:
    assert find_obstacles(needs) == []


@pytest.mark.parametrize(
    "needs",
    [
        PLAIN._replace(capability=(0, 0)),
        PLAIN._replace(dtype="float32"),
        model(attention_softcap=50.0),
        model(head_dim=264),
        model(head_dim=60),
        model(value_head_dim=192),
        PLAIN._replace(records_logits=True),
    ],
)
def test_rule_names_the_obstacle(needs: AttentionNeeds) -> None:
    """One case for each entry of the rule."""
    (reason,) = find_obstacles(needs)
    assert reason in dict(OBSTACLES)


def test_rule_takes_no_gpu_whose_kernel_was_never_tried() -> None:
    for capability in ((7, 5), (9, 4), (9, 5)):
        assert len(find_obstacles(PLAIN._replace(capability=capability))) == 1


@pytest.mark.slow
def test_rule_takes_the_kernel_for_all_recipes_with_documents() -> None:
    names = []
    for name in gpu_recipes():
        job = read_job(name)[0]
        if job.data.keeps_documents:
            machine = cluster_machine(parse_cluster(job.run.cluster))
            assert resolve(job, machine, name).varlen_documents, name
            names.append(name)
    assert {"deepseek-v3-671b-lora", "gemma3-27b-lora", "gpt-oss-120b-lora"} <= set(names)
