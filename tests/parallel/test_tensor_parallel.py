"""Tensor parallelism: vocabulary-parallel loss, SHARDING table, async overlap."""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.harness import RankError, run_ranks
from tests.small import full_tensor, gradients, merged, newest_state, train_rank
from weft.models.decoder import SHARDING, Decoder, DecoderBlock
from weft.models.decoder_config import DecoderConfig
from weft.models.families.llama import FAMILY
from weft.models.family import Init, TensorParallelSpec
from weft.models.layers import FeedForward
from weft.parallel.private import enable_async_tp
from weft.parallel.tensor_parallel import apply_tensor_parallel
from weft.planning.shard_sizes import chunk_range, key_heads, query_heads
from weft.training.loss import cross_entropy


def loss_of_slices(
    dtype: torch.dtype, compiled: bool, smoothing: float
) -> tuple[float, torch.Tensor, list[int]]:
    """Return loss and gradient of this rank's vocabulary shard, and messages."""
    logits_BTV, targets_BT = example(dtype)
    ids = chunk_range(logits_BTV.shape[2], dist.get_world_size(), dist.get_rank())
    slice_BTV = logits_BTV[..., ids.start : ids.stop].clone().requires_grad_()
    with torch.profiler.profile(record_shapes=True) as profile:
        losses_BT = cross_entropy(
            *(slice_BTV, targets_BT, dist.group.WORLD, compiled, ids.start, smoothing, 24),
            z_loss_coef=smoothing,
        )
        loss = weighted(losses_BT)
        loss.backward()
    sent = [e.input_shapes for e in profile.events() if e.name == "c10d::allreduce_"]
    assert slice_BTV.grad is not None
    return loss.item(), slice_BTV.grad, [len(sent)]


def weighted(losses_BT: torch.Tensor) -> torch.Tensor:
    """Weight each token differently."""
    return (losses_BT * torch.arange(1.0, 1.0 + losses_BT.numel()).view_as(losses_BT)).sum()


def example(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    # Far from zero, so that a missing maximum would overflow.
    logits_BTV = 30 * torch.randn(2, 7, 24, generator=generator) + 100
    targets_BT = torch.randint(0, 24, (2, 7), generator=generator)
    targets_BT[0, :3] = -100
    return logits_BTV.to(dtype), targets_BT


@pytest.mark.parametrize(
    ("ranks", "compiled"),
    [(1, False), (2, False), (5, False), pytest.param(2, True, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_vocab_parallel_cross_entropy_equals_one_process(
    ranks: int, compiled: bool, dtype: torch.dtype, smoothing: float
) -> None:
    logits_BTV, targets_BT = example(dtype)
    exact_BTV = logits_BTV.double().requires_grad_()
    losses_N = F.cross_entropy(
        exact_BTV.flatten(0, 1),
        targets_BT.flatten(),
        reduction="none",
        label_smoothing=smoothing,
    )
    z_losses_N = smoothing * exact_BTV.flatten(0, 1).logsumexp(-1) ** 2
    z_losses_N = z_losses_N * (targets_BT.flatten() != -100)  # a gradient without a value
    losses_N = losses_N + z_losses_N - z_losses_N.detach()
    expected = weighted(losses_N.view_as(targets_BT))
    expected.backward()
    results = run_ranks(loss_of_slices, ranks, dtype, compiled, smoothing, timeout=200)
    for loss, _, exchanges in results:
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        assert exchanges == [2]  # of numbers per token, never of logits
    gradient = torch.cat([grad for _, grad, _ in results], dim=-1)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(gradient.double(), exact_BTV.grad, rtol=tolerance, atol=tolerance)


CONFIG = DecoderConfig(
    num_layers=2,
    dim=32,
    num_heads=8,
    num_kv_heads=2,
    ffn_dim=48,
    vocab_size=64,
    max_seq_len=64,
    rope_scaling="none",
)


def placements(sequence_parallel: bool) -> dict[str, tuple[str, tuple[int, ...]]]:
    model = Decoder(CONFIG)
    original = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    apply_tensor_parallel(model, mesh, SHARDING, CONFIG, sequence_parallel)
    results = {}
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        before = original.get_parameter(name)
        # Sharding does not change the values.
        dist.broadcast(before.data, 0)
        assert param.shape == before.shape
        if dist.get_rank() == 0:
            shard = param.to_local()
            assert shard.equal(before[tuple(slice(n) for n in shard.shape)])
        results[name] = (str(param.placements[0]), tuple(param.to_local().shape))
    return results


@pytest.mark.parametrize(("ranks", "kv"), [(2, ("S(0)", (4, 32))), (4, ("R", (8, 32)))])
def test_tensor_parallel_weights_have_expected_placements(
    ranks: int, kv: tuple[str, tuple[int, ...]]
) -> None:
    results = run_ranks(placements, ranks, True)[0]
    block = "layers.1."
    assert results["embed_tokens.weight"] == ("S(0)", (64 // ranks, 32))
    assert results[block + "input_layernorm.weight"] == ("R", (32,))
    assert results[block + "self_attn.q_proj.weight"] == ("S(0)", (32 // ranks, 32))
    assert results[block + "self_attn.k_proj.weight"] == kv
    assert results[block + "self_attn.v_proj.weight"] == kv
    assert results[block + "self_attn.o_proj.weight"] == ("S(1)", (32, 32 // ranks))
    assert results[block + "mlp.gate_proj.weight"] == ("S(0)", (48 // ranks, 32))
    assert results[block + "mlp.down_proj.weight"] == ("S(1)", (32, 48 // ranks))
    assert results["lm_head.weight"] == ("S(0)", (64 // ranks, 32))


class SquaredReLU(FeedForward):
    """A feed-forward layer of a user, whose forward does not call ``multiply``."""

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        gate_BTF = F.relu(self.gate_proj(x_BTD)).square()
        return self.down_proj(gate_BTF * self.up_proj(x_BTD))  # type: ignore[no-any-return]


class SquaredReLUBlock(DecoderBlock):
    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__(config, layer, mlp=SquaredReLU(config))


class SquaredReLUDecoder(Decoder):
    def build_block(self, layer: int) -> DecoderBlock:
        return SquaredReLUBlock(self.config, layer)


SQUARED_RELU = replace(FAMILY, build=SquaredReLUDecoder, hf_mapping=None)


@pytest.mark.parametrize("sequence_parallel", ["true", "false"])
def test_tensor_parallel_layer_of_a_user_gradients_equal_one_process(
    sequence_parallel: str, store_path: Path
) -> None:
    model = [("model.kind", f"{__name__}:SQUARED_RELU")]
    (one,) = run_ranks(gradients, 1, model, str(store_path))
    layout = [("parallel.tp", "2"), ("parallel.sequence_parallel", sequence_parallel)]
    for many in run_ranks(gradients, 2, model + layout, str(store_path)):
        for name, grad in one["grads"].items():
            scale = grad.abs().max()
            torch.testing.assert_close(
                many["grads"][name] / scale, grad / scale, rtol=0, atol=1e-5, msg=name
            )


# --------------------------------------------------------------------------- combinations of keys

# Biases, sinks and norm weights are not zeros or ones, which would hide a factor.
RANDOM = replace(FAMILY, get_init=lambda name, config: Init("truncated_normal", 0.2))
REPLICATED = "parallel.sequence_parallel=false"
UNEVEN = "head_dim=8 vocab_size=515 ffn_dim=101"
GPT_OSS = (
    "attention_sinks=true qkv_bias=true out_bias=true num_experts=4 expert_dim=25 "
    "expert_biases=true router_bias=true expert_limit=7 score_selected=true "
    "layer_pattern=LG sliding_window=8"
)
MLA = (
    "num_kv_heads=4 kv_rank=16 head_dim=16 rope_head_dim=8 value_head_dim=8 qkv_bias=true "
    "out_bias=true"
)
LAYER_NORM = (
    "norm=layer norm_bias=true gated=false activation=relu2 ffn_bias=true norm_position=both"
)
ALL_HEADS = "qk_norm=all_heads qkv_bias=true"
COMBINATIONS = {
    # Ranks share key heads, and a rank reads several of them.
    "uneven": (
        f"{ALL_HEADS} {UNEVEN} num_heads=6 num_kv_heads=2 attention_sinks=true",
        ["4", "2", f"3 {REPLICATED}"],
    ),
    "gpt-oss": (GPT_OSS, ["2", f"3 {REPLICATED}", "2 parallel.ep=2 parallel.dp_shard=2"]),
    "latent": (MLA, [f"2 {REPLICATED}"]),
    "latent_queries": (f"{MLA} q_rank=24", ["2", f"3 {REPLICATED}"]),
    "all_heads": (ALL_HEADS, ["2", "4", f"3 {REPLICATED}"]),
    # A rank needs one key head twice.
    "repeated": (f"{ALL_HEADS} {UNEVEN} num_heads=12 num_kv_heads=4", ["4", f"3 {REPLICATED}"]),
    "layer_norm": (
        f"{ALL_HEADS} {LAYER_NORM} head_dim=8 num_heads=10 norm_offset=true",
        ["2", "4", f"3 {REPLICATED}"],
    ),
    "experts": (
        f"{LAYER_NORM} qk_norm=head num_experts=6 expert_dim=25 shared_experts=1 dense_layers=1 "
        "scaled_expert_inputs=true expert_biases=true",
        ["2 parallel.dp_shard=2", "4"],
    ),
    "five": (
        f"{UNEVEN} num_heads=5 num_kv_heads=5 tied_embeddings=false ffn_bias=true",
        ["2", "4", "2 parallel.dp_shard=2", "2 parallel.dp_replicate=2", "2 parallel.pp=2"],
    ),
    "parallel_block": (
        "num_kv_heads=1 parallel_block=true norm=layer out_bias=true logit_softcap=5 "
        "vocab_size=515",
        ["2", f"3 {REPLICATED}"],
    ),
    # Masks of a stage without the embedding.
    "stages": (
        "num_layers=4 tied_embeddings=false layer_pattern=L sliding_window=8",
        ["2 parallel.pp=2"],
    ),
    "post": ("num_heads=6 num_kv_heads=2 head_dim=8 norm_position=post qk_norm=head", ["2", "4"]),
}
LAYOUTS = [
    pytest.param(keys, layout, id=f"{name}-tp{layout}")
    for name, (keys, layouts) in COMBINATIONS.items()
    for layout in layouts
]


def check_layout(keys: str, layout: str, store: Path) -> None:
    """Compare gradients of a layout, such as ``2 parallel.dp_shard=2``, with one process."""
    tp, *options = layout.split()
    pairs = [pair.split("=") for pair in [f"parallel.tp={tp}", *options]]
    ranks = math.prod(int(n) for key, n in pairs if n.isdigit() and key != "parallel.ep")
    model = [("model.kind", f"{__name__}:RANDOM")]
    model += [(f"model.{key}", value) for key, value in (pair.split("=") for pair in keys.split())]
    (one,) = run_ranks(gradients, 1, model, str(store))
    overrides = model + [(key, value) for key, value in pairs]
    for many in merged(run_ranks(gradients, ranks, overrides, str(store))):
        assert many["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert many["norm"] == pytest.approx(one["norm"], rel=1e-4)
        assert many["grads"].keys() == one["grads"].keys()
        for name, grad in one["grads"].items():
            scale = grad.abs().max()
            assert scale > 0, name
            torch.testing.assert_close(
                many["grads"][name] / scale, grad / scale, rtol=0, atol=2e-5, msg=name
            )


FAST = ("uneven-tp4", "gpt-oss-tp2")


@pytest.mark.parametrize(
    ("keys", "layout"),
    [
        each if each.id in FAST else pytest.param(*each.values, id=each.id, marks=pytest.mark.slow)
        for each in LAYOUTS
    ],
)
def test_tensor_parallel_gradients_equal_one_process(
    keys: str, layout: str, store_path: Path
) -> None:
    check_layout(keys, layout, store_path)


@pytest.mark.slow
def test_tensor_parallel_uneven_shards_resume_in_other_layouts(
    store_path: Path, tmp_path: Path
) -> None:
    keys = f"{ALL_HEADS} {UNEVEN} num_heads=5 num_kv_heads=5 attention_sinks=true out_bias=true"
    model = [(f"model.{key}", value) for key, value in (pair.split("=") for pair in keys.split())]
    model += [("model.kind", f"{__name__}:RANDOM"), ("checkpoint.interval", "2")]
    layouts = {"2": f"tp=3 {REPLICATED}", "4": "tp=2 parallel.dp_shard=2", "6": "tp=4"}
    for directory, ranks in (("one", (1, 1, 1)), ("many", (3, 4, 4))):
        for (steps, layout), world_size in zip(layouts.items(), ranks, strict=True):
            pairs = [pair.split("=") for pair in f"parallel.{layout}".split()]
            overrides = [(key, value) for key, value in pairs if world_size > 1]
            overrides += [("run.dir", str(tmp_path / directory)), ("train.steps", steps)]
            run_ranks(train_rank, world_size, model + overrides, str(store_path))
    expected = newest_state(tmp_path / "one")
    for name, tensor in newest_state(tmp_path / "many").items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=2e-6, msg=name)


def test_heads_of_ranks_each_query_head_reads_its_key_head() -> None:
    for num_kv_heads, group in itertools.product(range(1, 7), range(1, 7)):
        num_heads = num_kv_heads * group
        for ranks in range(1, num_heads + 1):
            all_heads = [query_heads(num_heads, ranks, rank) for rank in range(ranks)]
            assert [head for heads in all_heads for head in heads] == list(range(num_heads))
            assert max(map(len, all_heads)) - min(map(len, all_heads)) <= 1
            for rank, heads in enumerate(all_heads):
                keys = key_heads(num_heads, num_kv_heads, ranks, rank)
                assert len(heads) % len(keys) == 0
                for i, head in enumerate(heads):
                    assert keys[i // (len(heads) // len(keys))] == head // group


def forget_a_module() -> None:
    sharding: dict[str, TensorParallelSpec] = {k: v for k, v in SHARDING.items() if "norm" not in k}
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    apply_tensor_parallel(Decoder(CONFIG), mesh, sharding, CONFIG, True)


def test_tensor_parallel_weight_missing_in_the_table_raises() -> None:
    with pytest.raises(
        RankError, match=r"no pattern of SHARDING matches 'layers\.0\.input_layernorm'"
    ):
        run_ranks(forget_a_module, 1)


# --------------------------------------------------------------------------- overlap

# The compiler overlaps matmuls of at least 1024 columns.
WIDE = CONFIG.model_copy(update={"num_layers": 1, "dim": 1024, "ffn_dim": 2048, "num_kv_heads": 8})


def compiled_block() -> tuple[list[dict[str, int]], dict[str, float]]:
    """Run forward and backward of a compiled sequence-parallel block on the CPU.

    Returns:
        The collectives in each compiled graph, and the largest relative error of each gradient.
    """
    import torch._inductor.fx_passes.post_grad as passes
    import torch.distributed._symmetric_memory as symmetric
    from torch._inductor.utils import fresh_inductor_cache

    # torch has these operators for GPUs only, and fallbacks for its tests.
    library = torch.library.Library("symm_mem", "IMPL")
    gather, scatter = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
    library.impl(gather, symmetric._fused_all_gather_matmul_fallback, "CPU")
    library.impl(scatter, symmetric._fused_matmul_reduce_scatter_fallback, "CPU")
    # The pass requires NCCL.
    dist.is_nccl_available = lambda: True  # type: ignore[assignment]
    graphs: list[dict[str, int]] = []
    run_pass = passes.micro_pipeline_tp_pass

    def watched(graph: Any) -> None:
        run_pass(graph)
        names = [str(node.target).split(".")[:2] for node in graph.nodes]
        graphs.append(Counter(name for space, *(name,) in filter(exchanging, names)))

    def exchanging(name: list[str]) -> bool:
        return name[0] in ("symm_mem", "_c10d_functional") and name[1] != "wait_tensor"

    passes.micro_pipeline_tp_pass = watched  # type: ignore[assignment]

    model = Decoder(WIDE)
    plain = copy.deepcopy(model)
    for param in plain.parameters():
        dist.broadcast(param.data, 0)
    model.load_state_dict(plain.state_dict())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    apply_tensor_parallel(model, mesh, SHARDING, WIDE, sequence_parallel=True)
    enable_async_tp(mesh.get_group())
    block, expected = model.layers["0"], plain.layers["0"]
    block.compile(fullgraph=True)
    x_BTD = torch.randn(2, 32, WIDE.dim)
    dist.broadcast(x_BTD, 0)
    cos, sin = plain.rope(32, None, torch.float32)
    with symmetric._test_mode(), fresh_inductor_cache():
        local = x_BTD.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]
        block(local, cos, sin, None).square().sum().backward()
    expected(x_BTD, cos, sin, None).square().sum().backward()
    distant = {}
    for (name, param), (_, theirs) in zip(
        block.named_parameters(), expected.named_parameters(), strict=True
    ):
        difference = (full_tensor(param.grad) - theirs.grad).abs().max()  # type: ignore[arg-type,operator]
        distant[name] = (difference / theirs.grad.abs().max()).item()  # type: ignore[union-attr]
    return graphs, distant


@pytest.mark.slow  # a minute of compiling
def test_async_tensor_parallel_compiler_fuses_collectives() -> None:
    """Collectives before or after one matmul are fused, and gradients are correct."""
    for graphs, distant in run_ranks(compiled_block, 2, timeout=300):
        forward, backward = graphs
        fused = {"fused_all_gather_matmul": 2, "fused_matmul_reduce_scatter": 2}
        assert forward == fused
        # A sum of three products cannot be fused with the scatter.
        assert backward == {"fused_all_gather_matmul": 2, "reduce_scatter_tensor": 2}
        assert max(distant.values()) < 1e-5, distant
