"""Dimensions and layout of a decoder as numbers, for `weft.estimate.analytic`.

They describe weft's own models and those of published runs of other systems.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from weft.estimate.cost import Overlap, Precision
from weft.plan.pipeline_schedule import PipelineSchedule, build_schedule, single_stage_schedule


@dataclass(frozen=True)
class DecoderDims:
    """Dimensions of a decoder.

    ``gated``: the feed-forward has three matrices, else two.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    gated: bool = True
    tied: bool = False
    head_dim: int = 0
    learned_positions: int = 0

    @property
    def q(self) -> int:
        """Width of all query heads together."""
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def kv(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.kv_heads * (self.head_dim or self.hidden // self.heads)

    @property
    def layer_params(self) -> int:
        """Parameters of one layer."""
        matrices = (3 if self.gated else 2) * self.hidden * self.ffn
        return matrices + 2 * self.hidden * (self.q + self.kv) + 2 * self.hidden

    @property
    def params(self) -> int:
        """Parameters of the model."""
        tables = (1 if self.tied else 2) * self.vocab + self.learned_positions
        return self.layers * self.layer_params + tables * self.hidden + self.hidden


@dataclass(frozen=True)
class Layout:
    """Parallelism, precision and memory options of a run.

    ``zero``: 0 replicates; 1 shards optimizer states; 2 also shards gradients and gathers weights
    once per step; 3 gathers weights in every microbatch.
    ``activation_checkpoint``: ``none``; ``selective``: save attention and half of the matmuls;
    ``block``: recompute ``activation_checkpoint_fraction`` of the layers; ``attention``: recompute
    attention scores; ``full``: recompute every layer.
    ``tp_overlap``: overlap of tensor-parallel collectives; ``overlap_dp_comm``: hide gathers of
    weights and reductions of gradients behind compute.
    """

    seq_len: int
    microbatch: int
    global_batch: int
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    stages_per_rank: int = 1
    schedule: str = "1F1B"
    precision: Precision = "bf16"
    activation_checkpoint: Literal["none", "selective", "block", "attention", "full"] = "none"
    activation_checkpoint_fraction: float = 0.5
    fusion: Literal["eager", "norms", "fused", "compiled"] = "eager"
    kernel: Literal["flash1", "flash", "attention", "unfused"] = "flash"
    zero: int = 3
    sequence_parallel: bool = True
    tp_overlap: Overlap = "exposed"
    overlap_dp_comm: bool = True
    gradient_bytes: int = 4  # as reduced
    state_bytes: float = 16.0  # per parameter, sharded: weight, gradient, moments
    unsharded_bytes: float = 0.0  # per parameter, on every rank
    chunked_loss: bool = False
    include_reserved: bool = True  # count memory that the allocator reserves, not only live bytes
    stage_layers: tuple[int, ...] = ()  # per stage; empty: `split_layers`
    offload_fraction: float = 0.0  # of the layers whose activations are in host memory
    scatter_p2p: bool = False  # each tensor-parallel rank sends a shard of the hidden states
    recv_buffers: bool = True  # one per microbatch, as in torch.distributed.pipelining
    output_bytes: int = 0  # per logit that the last stage keeps until the end of the step
    # A collective's input is reusable only once the device has reached the collective.
    uses_record_stream: bool = False
    tp_gather_bytes: int = 2  # per element that tensor parallelism gathers

    @property
    def dp(self) -> int:
        """Number of data-parallel ranks."""
        return self.dp_replicate * self.dp_shard

    @property
    def optimizer_shards(self) -> int:
        """Number of ranks that share a parameter's optimizer state."""
        return {0: 1, 1: self.dp * self.cp}.get(self.zero, self.dp_shard * self.cp)

    @property
    def microbatches(self) -> int:
        """Microbatches of one rank in a step."""
        return max(1, round(self.global_batch / (self.dp * self.microbatch)))

    @property
    def tokens(self) -> float:
        """Tokens of one microbatch on one rank."""
        return self.microbatch * self.seq_len / self.cp


def split_layers(layers: int, stages: int) -> list[int]:
    """Return the number of layers of each stage, as even as possible.

    The first and last stages give up one layer each, for embedding and head, if that makes the
    split even.
    """
    if layers % stages and (layers + 2) % stages == 0 and stages > 1:
        per_stage = (layers + 2) // stages
        return [per_stage - 1, *[per_stage] * (stages - 2), per_stage - 1]
    # The middle stages take the remainder, because the ends have embedding and head.
    counts = [layers // stages] * stages
    first = (stages - layers % stages + 1) // 2
    for stage in range(first, first + layers % stages):
        counts[stage] += 1
    return counts


def layers_per_stage(dims: DecoderDims, layout: Layout) -> Sequence[int]:
    """Return the number of layers of each stage."""
    return layout.stage_layers or split_layers(dims.layers, layout.pp * layout.stages_per_rank)


def layout_schedule(layout: Layout) -> PipelineSchedule:
    """Return the pipeline schedule; without a pipeline, of at most two microbatches.

    Raises:
        ValueError: if the schedule does not allow the numbers.
    """
    if layout.pp == 1:
        return single_stage_schedule(min(2, layout.microbatches))
    return build_schedule(layout.schedule, layout.pp, layout.stages_per_rank, layout.microbatches)
