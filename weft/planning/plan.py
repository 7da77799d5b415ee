"""Machine and Plan: the hardware of a run, and all that weft derives for it.

The trainer consumes the Plan, ``weft plan`` prints it, and tests assert on it; no other code
computes a degree or a batch size.  `weft.planning.resolve` makes it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from weft.config.axes import AXES, BATCH_AXES, SEQUENCE_AXES, SHARD_AXES
from weft.config.schema import (
    ActivationCheckpointSection,
    CompileSection,
    Job,
    LoraSection,
    ParallelSection,
    PrecisionSection,
)
from weft.models import Family, load_family
from weft.planning.cuda_graph_rules import uses_cuda_graphs
from weft.planning.placement import MESH_ORDERS, count_ranks, rank_groups, ranks_per_node


@dataclass(frozen=True)
class Machine:
    """The hardware that a run uses.

    Attributes:
        device: its type.
        devices: accelerators of this host, or its cores on CPU.
        world_size, local_world_size: ranks of the job and of this host, if a launcher has set
            them; None if weft chooses them.
        memory_bytes: memory of one GPU, or of this host on CPU; None if unknown.
        peer_access: True if the GPUs of a host can read each other's memory.
        capability: compute capability of a GPU; (0, 0) if unknown.
        num_threads: CPU threads per rank that the environment requests (OMP_NUM_THREADS); None if
            weft chooses them.
    """

    device: str
    devices: int
    device_name: str = ""
    world_size: int | None = None
    local_world_size: int | None = None
    memory_bytes: int | None = None
    peer_access: bool = False
    capability: tuple[int, int] = (0, 0)
    num_threads: int | None = None

    def memory_per_rank(self, local_world_size: int) -> int | None:
        """Return the bytes of memory of each rank; CPU ranks share their host's memory."""
        if self.memory_bytes is None:
            return None
        return self.memory_bytes // (local_world_size if self.device == "cpu" else 1)


@dataclass(frozen=True)
class Stage:
    """Consecutive units of a model that one rank computes.

    Attributes:
        first_unit, end_unit: index of the first unit, and one past the last.
        name: its units, for people.
        time_fraction: fraction of the time of all stages.
        activation_bytes: bytes saved for backward per microbatch.
        in_flight: peak number of microbatches whose activations it keeps.
    """

    first_unit: int
    end_unit: int
    name: str
    num_blocks: int
    time_fraction: float
    state_bytes: float
    activation_bytes: float
    in_flight: int

    @property
    def units(self) -> range:
        """Indices of its units, as the family's ``prune_to_stage`` takes them."""
        return range(self.first_unit, self.end_unit)

    @property
    def memory_bytes(self) -> float:
        """Peak bytes of state and activations."""
        return self.state_bytes + self.in_flight * self.activation_bytes


def is_schedule_file(schedule: str) -> bool:
    """Return True if ``pipeline.schedule`` names a CSV file."""
    return schedule.lower().endswith(".csv")


@dataclass(frozen=True)
class PipelinePlan:
    """The schedule of a pipeline and its stages.

    Attributes:
        schedule: a name of `weft.planning.pipeline_schedule`, or the path of a CSV file.
        stage_ranks: pipeline rank of each stage.
        in_flight: peak number of microbatches whose activations each stage keeps.
        splits_backward: True if the schedule defers weight gradients.
    """

    schedule: str
    stages: tuple[Stage, ...]
    stage_ranks: tuple[int, ...]
    in_flight: tuple[int, ...]
    splits_backward: bool = False

    @property
    def has_schedule_file(self) -> bool:
        """Return True if a CSV file has the schedule."""
        return is_schedule_file(self.schedule)

    def stages_on_rank(self, rank: int) -> list[int]:
        """Return the stage indices of one pipeline rank, in order."""
        return [stage for stage, owner in enumerate(self.stage_ranks) if owner == rank]

    @property
    def stages_by_rank(self) -> list[list[Stage]]:
        """The stages of each pipeline rank."""
        ranks = range(max(self.stage_ranks) + 1)
        return [[self.stages[stage] for stage in self.stages_on_rank(rank)] for rank in ranks]

    @property
    def stage_names(self) -> list[str]:
        """The units of each pipeline rank, such as ``layers 0-3; layers 16-19``."""
        return ["; ".join(stage.name for stage in stages) for stages in self.stages_by_rank]


def uses_embedding_twice(model: Any) -> bool:
    """Return True if the last stage of a pipeline needs a copy of the embedding."""
    return getattr(model, "tied_embeddings", False) or getattr(model, "mtp_layers", 0) > 0


@dataclass(frozen=True)
class Plan:
    """A Job and everything derived from it.

    Counts of sequences are per optimizer step.
    """

    job: Job
    run_dir: str
    device: str
    world_size: int
    local_world_size: int  # ranks per node
    node_counts: tuple[int, ...]  # node counts that the run can use; this plan is for the last
    rendezvous: str  # HOST:PORT
    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int  # splits the dp_shard x cp ranks; also those of tp if etp is 1
    mesh_order: str  # a key of `MESH_ORDERS`
    num_threads: int  # CPU threads per rank
    seq_len: int  # tokens of a sequence
    num_steps: int  # optimizer steps of the run; 0: train.epochs and the data decide
    global_batch_size: int  # sequences
    local_batch_size: int  # sequences per rank
    microbatch_size: int  # sequences per forward pass; the last may have fewer
    world_size_invariant: bool  # one sequence per forward pass; see `fsdp_size`
    num_microbatches: int  # forward passes per rank
    pipeline: PipelinePlan | None  # None if pp is 1
    reshard_after_forward: bool | int  # as fully_shard takes it
    gradient_sync: Literal["microbatch", "step"]
    tokens_per_step: int
    compute_dtype: Literal["float32", "bfloat16"]
    reduce_dtype: Literal["float32", "bfloat16"]
    model: Any  # the family's frozen configuration
    num_params: int  # includes adapters
    num_active_params: int  # parameters that process a token; fewer in a mixture of experts
    num_trainable_params: int  # frozen parameters have no gradient and no optimizer state
    frozen_params: tuple[str, ...]  # names of those that optim.groups freezes
    flops_per_token: float  # forward and backward, without recomputation
    causal_flops_per_token: float  # counts only the attention scores below the causal mask
    # FLOP/s of one device; None if unknown.  bfloat16 also with float8
    # (`weft.planning.devices`).
    peak_flops: float | None
    peak_dtype: str | None
    float8: str  # the scaling recipe, or none
    num_float8_matrices: int  # of the unsharded model; those of all experts of a layer are one
    num_float8_stacks: int  # those of experts
    float8_all_gather: bool  # FSDP gathers the float8 matrices in float8
    float8_emulated: bool  # float8 rounding without float8 speed
    varlen_documents: bool  # attention within documents: see `weft.models.varlen_attention`
    warnings: tuple[str, ...]

    # Sections of the keys that techniques read; code in parallel/, optim/ and monitor/ reads no
    # others, and not the job.

    @property
    def parallel(self) -> ParallelSection:
        """The section ``[parallel]``."""
        return self.job.parallel

    @property
    def activation_checkpoint(self) -> ActivationCheckpointSection:
        """The section ``[activation_checkpoint]``."""
        return self.job.activation_checkpoint

    @property
    def compile(self) -> CompileSection:
        """The section ``[compile]``."""
        return self.job.compile

    @property
    def precision(self) -> PrecisionSection:
        """The section ``[precision]``."""
        return self.job.precision

    @property
    def lora(self) -> LoraSection:
        """The section ``[lora]``."""
        return self.job.lora

    @property
    def family(self) -> Family:
        """The model family."""
        is_whole = self.parallel.has_experts_without_tp
        return load_family(self.job.model.kind).of(self.model, is_whole)

    @property
    def seed(self) -> int:
        """Seed of weights and data order."""
        return self.job.train.seed

    @property
    def numbers_tokens(self) -> bool:
        """Return True if training draws random bits by the number of a token in the run."""
        return (self.lora_rank > 0 and self.lora.dropout > 0) or self.neftune_alpha > 0

    @property
    def neftune_alpha(self) -> float:
        """Size of the noise of embeddings; 0: none."""
        return self.job.train.neftune_alpha

    @property
    def objective(self) -> str:
        """Training objective."""
        return self.job.train.objective

    @property
    def has_score_head(self) -> bool:
        """True if the model computes scores, not logits."""
        return getattr(self.model, "score_head", False)

    @property
    def optimizer(self) -> str:
        """Name of the optimizer."""
        return self.job.optim.name

    @property
    def state_dtype(self) -> str:
        """Dtype of AdamW's moments."""
        return self.job.optim.state_dtype

    @property
    def sequence_parallel(self) -> bool:
        """Return True if tensor parallelism splits activations by tokens outside matrices."""
        return self.parallel.sequence_parallel

    @property
    def etp(self) -> int:
        """Ranks that split an expert: ``tp``, or 1 if experts are whole."""
        is_whole = self.parallel.has_experts_without_tp and self.family.moe_layers is not None
        return 1 if is_whole else self.tp

    @property
    def async_tp(self) -> bool:
        """Return True if tensor-parallel collectives overlap their matrix products."""
        return self.parallel.async_tp and self.tp > 1

    @property
    def cpu_offload(self) -> bool:
        """Return True if parameters, gradients and optimizer state are in host memory."""
        return self.parallel.cpu_offload

    @property
    def is_compiled(self) -> bool:
        """Return True if torch.compile compiles the blocks."""
        return self.compile.enable

    @property
    def cuda_graphs(self) -> bool:
        """Return True if microbatches are replayed from CUDA graphs."""
        return uses_cuda_graphs(self.job, self.device)

    @property
    def has_graph_breaks(self) -> bool:
        """Return True if torch.compile captures a block in parts.

        Dynamo cannot trace the collectives of context parallelism, nor an exchange of rows whose
        number depends on the tokens, nor experts if `compiles_experts` is False.
        """
        has_experts = self.family.moe_layers is not None
        return self.cp > 1 or self.ep > 1 or (has_experts and not self.compiles_experts)

    @property
    def compiles_experts(self) -> bool:
        """Return True if torch.compile captures experts, in bfloat16.

        PyTorch cannot trace grouped GEMMs of other dtypes.  Taps need the shapes of inputs (see
        `weft.parallel.weight_gradients`), which for experts depend on the tokens.
        """
        return self.is_compiled and self.compute_dtype == "bfloat16" and not self.splits_backward

    @property
    def lora_rank(self) -> int:
        """Rank of the adapters; 0: all parameters are trained."""
        return self.lora.rank

    @property
    def run_path(self) -> Path:
        """The run directory."""
        return Path(self.run_dir)

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks, which read different data."""
        return count_ranks(self.axis_sizes, BATCH_AXES)

    @property
    def sequence_shards(self) -> int:
        """Ranks that share the tokens of a sequence through the whole model."""
        return count_ranks(self.axis_sizes, SEQUENCE_AXES)

    @property
    def dp_cp_size(self) -> int:
        """Data- and context-parallel ranks, over which gradients are summed."""
        return self.dp_size * self.sequence_shards

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Ranks along each axis of the mesh."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def axis_order(self) -> tuple[str, ...]:
        """Axes of the mesh, outermost (slowest-varying) first."""
        return MESH_ORDERS[self.mesh_order]

    @property
    def uses_fsdp(self) -> bool:
        """Return True if FSDP gathers parameters and reduces gradients."""
        return self.world_size > 1 or self.cpu_offload

    @property
    def fsdp_size(self) -> int:
        """Ranks that FSDP shards a parameter over; 1 with ``train.world_size_invariant``."""
        return 1 if self.world_size_invariant else count_ranks(self.axis_sizes, SHARD_AXES)

    @property
    def schedule_name(self) -> str:
        """Name or CSV file of the pipeline schedule; 1F1B without a pipeline."""
        return "1F1B" if self.pipeline is None else self.pipeline.schedule

    @property
    def stages_per_rank(self) -> int:
        """Pipeline stages of each rank; 1 without a pipeline."""
        return 1 if self.pipeline is None else len(self.pipeline.stages) // self.pp

    @property
    def splits_backward(self) -> bool:
        """Return True if a pipeline schedule defers weight gradients."""
        has_halves = self.pipeline is not None and self.pipeline.splits_backward
        defers = self.job.pipeline.defer_weight_gradients
        return has_halves and defers and not self.world_size_invariant

    @property
    def overlaps_dispatch(self) -> bool:
        """Return True if a pass computes while another exchanges tokens with experts."""
        return self.can_overlap_dispatch and self.job.pipeline.overlap_dispatch

    @property
    def can_overlap_dispatch(self) -> bool:
        """Return True if ``pipeline.overlap_dispatch`` has an effect."""
        has_turns = self.parallel.ep_dispatch in ("alltoall", "padded")
        return self.schedule_name == "DualPipeV" and self.ep > 1 and has_turns

    @property
    def tied_ranks(self) -> tuple[int, int] | None:
        """Pipeline ranks of the two copies of an embedding; None without copies."""
        if self.pipeline is None or not uses_embedding_twice(self.model):
            return None
        return self.pipeline.stage_ranks[0], self.pipeline.stage_ranks[-1]

    @property
    def shard_ranks_per_node(self) -> int | None:
        """Ranks per node of each FSDP shard group; None if nodes differ."""
        group = rank_groups(SHARD_AXES, self.axis_sizes, self.axis_order)[0]
        counts = set(ranks_per_node(group, self.local_world_size).values())
        return counts.pop() if len(counts) == 1 else None

    def to_json(self) -> str:
        """Return the content of ``plan.json``, which leaves the job to ``job.toml``."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "job"}
        values["pipeline"] = None if self.pipeline is None else asdict(self.pipeline)
        return json.dumps(values | {"model": self.model.model_dump()}, indent=2)
