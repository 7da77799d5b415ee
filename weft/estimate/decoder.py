"""A decoder and a layout in numbers alone, for `weft.estimate.analytic`: weft's own, and others'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from weft.estimate.cost import Overlap, Precision
from weft.plan.pipeline_schedule import PipelineSchedule, single_stage_schedule, build_schedule


@dataclass(frozen=True)
class Sizes:
    """Of a decoder: ``gated`` feed-forward has three matrices, else two."""

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
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def kv(self) -> int:
        return self.kv_heads * (self.head_dim or self.hidden // self.heads)

    @property
    def layer_params(self) -> int:
        matrices = (3 if self.gated else 2) * self.hidden * self.ffn
        return matrices + 2 * self.hidden * (self.q + self.kv) + 2 * self.hidden

    @property
    def params(self) -> int:
        tables = (1 if self.tied else 2) * self.vocab + self.learned_positions
        return self.layers * self.layer_params + tables * self.hidden + self.hidden


@dataclass(frozen=True)
class Layout:
    """How a model is trained.  ``zero``: 0 replicas, 1 sharded optimizer, 2 and 3 sharded gradients
    and weights, gathered once a step or in every microbatch.

    ``activation_checkpoint``: ``none``; ``selective``: attention and half the products are kept; ``block``: a part
    of the layers, ``activation_checkpoint_part``, is computed again; ``attention``: only scores are; ``full``:
    every layer is.
    ``tp_overlap``: of tensor-parallel collectives; ``hide_sync``: of gradients' and weights'.
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
    activation_checkpoint_part: float = 0.5
    fusion: Literal["eager", "norms", "fused", "compiled"] = "eager"
    kernel: Literal["flash1", "flash", "attention", "unfused"] = "flash"
    zero: int = 3
    sequence_parallel: bool = True
    tp_overlap: Overlap = "exposed"
    hide_sync: bool = True
    gradient_bytes: int = 4  # as reduced
    state_bytes: float = 16.0  # of a parameter, over its shards: weight, gradient, moments
    kept_bytes: float = 0.0  # of a parameter, on every rank
    chunked_loss: bool = False
    reserved: bool = True  # memory as the allocator reserves it, or as it lives
    stage_layers: tuple[int, ...] = ()  # of each stage; empty: as `layers_of_stages` deals them
    offload_part: float = 0.0  # of the layers: their activations wait in the host's memory
    scattered_hops: bool = False  # of whole hidden states each tensor-parallel rank sends a part
    recv_buffers: bool = True  # for every microbatch, as torch.distributed.pipelining keeps them
    output_bytes: int = 0  # of a logit that the last stage keeps until the step's end
    # What a collective has read is free for reuse only when the device has come to it.
    late_frees: bool = False
    gathered_bytes: int = 2  # of an element that tensor parallelism gathers

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def owners(self) -> int:
        """Ranks that a parameter's optimizer state is divided among."""
        return {0: 1, 1: self.dp * self.cp}.get(self.zero, self.dp_shard * self.cp)

    @property
    def microbatches(self) -> int:
        return max(1, round(self.global_batch / (self.dp * self.microbatch)))

    @property
    def tokens(self) -> float:
        """Of one microbatch on one rank."""
        return self.microbatch * self.seq_len / self.cp


def layers_of_stages(layers: int, stages: int) -> list[int]:
    """Even; where only that makes it so, the first and last give a layer for embedding and head."""
    if layers % stages and (layers + 2) % stages == 0 and stages > 1:
        each = (layers + 2) // stages
        return [each - 1, *[each] * (stages - 2), each - 1]
    # The middle ones take what is left over, for the ends have the tables.
    counts = [layers // stages] * stages
    first = (stages - layers % stages + 1) // 2
    for stage in range(first, first + layers % stages):
        counts[stage] += 1
    return counts


def layers_of(sizes: Sizes, lay: Layout) -> Sequence[int]:
    """Layers of each stage."""
    return lay.stage_layers or layers_of_stages(sizes.layers, lay.pp * lay.stages_per_rank)


def timetable_of(lay: Layout) -> PipelineSchedule:
    """What each rank of the pipeline does; without one in two microbatches, which tell all.

    Raises:
        ValueError: where the schedule does not allow the numbers.
    """
    if lay.pp == 1:
        return single_stage_schedule(min(2, lay.microbatches))
    return build_schedule(lay.schedule, lay.pp, lay.stages_per_rank, lay.microbatches)
