"""Work and memory of a decoder's training step, by formulas.

Formulas take milliseconds per plan; a trace takes seconds.  A search and advice rank layouts by
formulas; weft reports traced numbers.  `weft.estimate.cost` prices the `Step` from here and the one
from a trace alike.  `benchmarks/plan_accuracy.py` compares the formulas with published runs; a
subclass there has the properties of other training systems.

Rank order: tensor parallelism innermost, then context, shards, replicas, and the pipeline
outermost.  Tokens are those of a rank after context parallelism.  With sequence parallelism,
activations between tensor-parallel matmuls are divided by ``tp``, too.

Memory-bound work is counted in bytes per token and element of width, forward; backward moves about
twice as much:

* hidden: eager RMSNorm casts to float32, squares, averages, scales, casts back and multiplies by
  its weight: 36 bytes; a residual sum 6; compiled, a sum and the norm after it are one kernel of 8;
* queries and keys: rotary embedding 20 eager, through float32, 4 compiled;
* feed-forward: gate and product 10 eager, 6 compiled.

`DecoderFormulas.saved_bytes` lists what autograd saves for backward under each kind of
recomputation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Literal

from weft.estimate.cost import (
    Attention,
    AttentionKernel,
    Collective,
    Hardware,
    Matmul,
    Overlap,
    Precision,
    Seconds,
    StageWork,
    Step,
    Work,
    WorkList,
    attention_kernel,
    forward_passes,
    step_seconds,
)
from weft.models.decoder_config import DecoderConfig
from weft.planning.devices import Device
from weft.planning.lora_plan import plan_cost
from weft.planning.pipeline_schedule import (
    Action,
    PipelineSchedule,
    build_schedule,
    join_halves,
    single_stage_schedule,
    stage_indices,
)
from weft.planning.plan import Plan
from weft.planning.sharding import moment_bytes_per_param
from weft.training.loss import chunk_tokens

# Reserved over live bytes: freed temporaries leave blocks that no later request fits.  Replays of
# traced steps measured 1.12 to 1.24.
RESERVED_RATIO = 1.20
# Bytes per logit at the loss, eager and compiled: logits and their gradient in bfloat16, and
# exponentials in float32; chunked: without exponentials.
LOGIT_BYTES, CHUNKED_LOGIT_BYTES = (8, 4), 4

# Eager and compiled.  Bytes per element for casting one operand of a float8 matmul: amax, scaled
# copy, transposed copy; about ten eager kernels.
CAST_BYTES = (34.0, 6.0)
# Per element of hidden, of queries and keys, of feed-forward: see above.
TRAFFIC_BYTES = ((84.0, 20.0, 10.0), (16.0, 4.0, 6.0))
# Kernels per layer forward; FSDP hooks count as kernels.
KERNELS_PER_LAYER = (70, 25)


def supports_formulas(plan: Plan) -> bool:
    """Return True if the formulas describe the model and the pipeline schedule.

    The model is a Llama-like decoder with all parameters trained; a file of a schedule and
    ``train.world_size_invariant`` are not supported.  The formulas leave out norms of queries and
    keys, those after attention and feed-forward, multi-token prediction, and score heads.
    """
    model = plan.model
    is_dense = (
        isinstance(model, DecoderConfig)
        and not (model.num_experts or model.kv_rank or model.mtp_layers or model.score_head)
        and model.gated
        and model.has_plain_attention(plan.seq_len)
    )
    is_trained = plan.num_trainable_params == plan.num_params
    has_schedule_file = plan.pipeline is not None and plan.pipeline.has_schedule_file
    return is_dense and is_trained and not has_schedule_file and not plan.world_size_invariant


class DecoderFormulas:
    """Work and memory of a rank of a plan.

    Sizes are those of one tensor-parallel rank.

    Attributes:
        zero: 0 replicates; 2 shards optimizer states and gradients, and gathers weights once per
            step; 3 gathers weights in every microbatch.
        recomputed_fraction: of the layers that backward computes again.
        gradient_bytes: of a gradient as reduced.
        state_bytes: per parameter, sharded: weight, gradient, moments.
        unsharded_bytes: per parameter, on every rank.
    """

    dp_overlap: Overlap = "prefetch"  # of weights' gathers and gradients' reductions
    num_up = 2  # matmuls before the feed-forward's activation: gate and up
    measures_logits = False  # of attention, in forward

    def __init__(self, plan: Plan, device: Device) -> None:
        """Read the sizes of a plan that `supports_formulas`."""
        config, section = plan.model, plan.activation_checkpoint
        self.plan, self.layers = plan, config.num_layers
        self.hidden: int = config.dim
        self.num_microbatches = plan.num_microbatches
        self.tokens = plan.microbatch_size * plan.seq_len / plan.cp  # of a microbatch on a rank
        self.q: float = config.num_heads * config.key_dim / plan.tp  # width of the query heads
        self.kv: float = config.num_kv_heads * config.key_dim / plan.tp
        self.head_dim = config.key_dim
        self.ffn: float = config.ffn_dim / plan.tp
        self.vocab: float = config.vocab_size / plan.tp
        self.is_tied = config.tied_embeddings
        self.shards = plan.fsdp_size
        self.zero = 0 if self.shards == 1 else 2 if plan.reshard_after_forward is False else 3
        self.sequence_parallel = plan.sequence_parallel
        self.tp_overlap: Overlap = "async" if plan.async_tp else "exposed"
        self.precision: Precision = "bf16" if plan.float8 == "none" else "float8"
        if plan.float8_emulated and device.float32:
            self.precision = "float32"
        # Ranks gather float8 if a tensor has one scale.  Else they cast what they gathered, and a
        # cast between gather and matmul prevents the overlap.
        self.tp_gather_bytes = 1 if plan.float8 == "tensorwise" else 2  # per element
        is_cast_later = self.precision == "float8" and self.tp_gather_bytes == 2
        self.tp_gather_overlap: Overlap = "exposed" if is_cast_later else self.tp_overlap
        compiled = plan.is_compiled
        self.is_eager = not compiled
        self.cast_bytes, self.traffic_bytes = CAST_BYTES[compiled], TRAFFIC_BYTES[compiled]
        self.layer_kernels = KERNELS_PER_LAYER[compiled]
        self.kernel: AttentionKernel = attention_kernel(plan, device)
        self.recomputes = plan.activation_checkpoint.mode != "none"
        self.is_selective = plan.activation_checkpoint.mode == "selective"
        self.recomputed_fraction = {
            "full": 1 / section.period,
            "budget": 1 - section.memory_budget,
        }.get(plan.activation_checkpoint.mode, 0.0)
        self.gradient_bytes = 4 if plan.reduce_dtype == "float32" else 2
        self.state_bytes = 8 + moment_bytes_per_param(plan.job.optim, plan_cost(plan))
        self.measures_logits = bool(
            plan.job.optim.qk_clip_threshold or plan.job.monitor.attention_logits
        )
        accumulates = plan.gradient_sync == "step" and plan.num_microbatches > 1
        self.unsharded_bytes = 4.0 if accumulates and self.zero == 3 else 0.0
        chunk = chunk_tokens(int(self.tokens), int(self.vocab), compiled)
        is_chunked = chunk < self.tokens and plan.objective == "next_token"
        self.logit_bytes = CHUNKED_LOGIT_BYTES if is_chunked else LOGIT_BYTES[compiled]
        self.head_traffic_bytes = 4 if is_chunked else 14  # per logit

    @cached_property
    def schedule(self) -> PipelineSchedule:
        """The pipeline schedule; without a pipeline, of at most two microbatches."""
        plan = self.plan
        if plan.pp == 1:
            return single_stage_schedule(min(2, self.num_microbatches))
        name, stages = plan.schedule_name, plan.stages_per_rank
        schedule = build_schedule(name, plan.pp, stages, self.num_microbatches)
        return schedule if plan.splits_backward else join_halves(schedule)

    @cached_property
    def layers_per_stage(self) -> Sequence[int]:
        """Layers of each stage."""
        return split_layers(self.layers, self.plan.pp * self.plan.stages_per_rank)

    @property
    def layer_params(self) -> float:
        """Parameters of one layer."""
        matrices = (self.num_up + 1) * self.hidden * self.ffn
        return matrices + 2 * self.hidden * (self.q + self.kv) + 2 * self.hidden / self.plan.tp

    @property
    def table_params(self) -> float:
        """Parameters of the embedding, and of the head."""
        return self.vocab * self.hidden

    @property
    def optimizer_shards(self) -> int:
        """Number of ranks that share a parameter's optimizer state."""
        return self.shards if self.zero else 1

    @property
    def pp_stride(self) -> int:
        """Distance between neighbors of a pipeline, in ranks."""
        return self.plan.tp * self.plan.dp_cp_size

    def step_seconds(self, hardware: Hardware) -> Seconds:
        """Return the seconds of a step by cause.

        Raises:
            ValueError: if the schedule does not allow the numbers.
        """
        return step_seconds(self.estimate_step(), hardware)

    # ------------------------------------------------------------------- work

    def matmuls(self) -> list[Matmul]:
        """Return a layer's forward matmuls: QKV, output, gate and up, down."""
        t, h, p = self.tokens, self.hidden, self.precision
        return [
            Matmul(t, h, self.q + 2 * self.kv, 1, p),
            Matmul(t, self.q, h, 1, p),
            Matmul(t, h, self.num_up * self.ffn, 1, p),
            Matmul(t, self.ffn, h, 1, p),
        ]

    def cast_traffic(self, matmuls: list[Matmul]) -> tuple[float, float]:
        """Return the bytes of casting operands to low precision, forward and backward."""
        quantized = [op for op in matmuls if op.precision != "bf16"]
        inputs, weights = sum(op.m * op.k for op in quantized), sum(op.k * op.n for op in quantized)
        gradients = sum(op.m * op.n for op in quantized)
        forward = self.cast_bytes * (inputs + weights)
        return forward, self.cast_bytes * (gradients + inputs + weights)

    def attention_work(self) -> tuple[Work, Work]:
        """Return the forward and backward work of attention."""
        plan = self.plan
        sequences, keys = self.tokens / plan.seq_len, plan.seq_len / plan.cp
        flops = 2 * sequences * plan.seq_len**2 * self.q  # causal: half of the square
        steps = plan.cp - 1
        # Keys and values travel around the ring; partial outputs are merged in float32.
        stride = plan.tp * plan.cp // 2 or 1
        ring = Collective("send", 2 * 2 * self.tokens * self.kv, "cp", 2, stride, "ring")
        merge = 24 * self.tokens * self.q * steps
        forward = Work(
            attention=(Attention(flops, keys, self.head_dim, False, self.kernel),),
            traffic_bytes=merge,
            kernels=3 + 12 * steps,
            collectives=(ring._replace(times=steps),) if steps else (),
        )
        backward = Work(
            attention=(Attention(2.5 * flops, keys, self.head_dim, True, self.kernel),),
            traffic_bytes=2 * merge,
            kernels=4 + 16 * steps,
            collectives=(ring._replace(times=2 * steps),) if steps else (),
        )
        return forward, backward

    def logits_work(self) -> Work:
        """Return the work of measuring the largest attention logit, in forward."""
        if not self.measures_logits:
            return Work()
        (op,) = self.attention_work()[0].attention  # one of its two products
        return Work(attention=(op._replace(flops=op.flops / 2, kernel="flash"),), kernels=3)

    def _layer_work(self) -> tuple[Work, Work]:
        """Return a layer's forward, and its backward with recomputation."""
        plan, matmuls, kernels = self.plan, self.matmuls(), self.layer_kernels
        local = self.tokens / (plan.tp if self.sequence_parallel else 1)
        hidden, rotary, activation = self.traffic_bytes
        traffic = local * self.hidden * hidden
        traffic += self.tokens * ((self.q + self.kv) * rotary + self.ffn * activation)
        attention, attention_backward = self.attention_work()
        collectives: tuple[Collective, ...] = ()
        if plan.tp > 1:
            collectives = self._tp_collectives(2 * self.tokens * self.hidden)
        cast, cast_backward = self.cast_traffic(matmuls)
        forward = attention + Work(tuple(matmuls), (), traffic + cast, kernels, collectives)
        grads = [op._replace(k=op.n, n=op.k) for op in matmuls]
        weights = [op._replace(m=op.k, k=op.m) for op in matmuls]
        backward = attention_backward + Work(
            (*grads, *weights), (), 2 * traffic + cast_backward, 2 * kernels, collectives
        )
        # TorchTitan's selective policy saves every second matmul, and reduce-scatters.
        selected = Work(
            tuple(op._replace(n=op.n / 2) for op in matmuls),
            (),
            traffic + cast / 2,
            kernels,
            collectives[:1],
        )
        backward += self.recompute_work(forward, selected, attention)
        return forward + self.logits_work(), backward

    def _tp_collectives(self, size: float) -> tuple[Collective, ...]:
        """Return the collectives of a layer's pass, for a sequence of ``size`` bytes."""
        make = partial(Collective, axis="tp", ranks=self.plan.tp, times=2)
        if not self.sequence_parallel:
            return (make("all_reduce", size),)
        gathered = self.tp_gather_bytes / 2 * size
        gather = make("all_gather", gathered, overlap=self.tp_gather_overlap)
        scatter = make("reduce_scatter", size, overlap=self.tp_overlap)
        scale = make("all_reduce", 4)  # agreed before float8 is gathered
        return (gather, scatter, scale) if self.tp_gather_bytes == 1 else (gather, scatter)

    def recompute_work(self, forward: Work, selected: Work, attention: Work) -> Work:
        """Return the work that backward computes again.

        Args:
            forward: of a layer.
            selected: part of it that selective recomputation runs.
            attention: part of it in attention.
        """
        if self.is_selective:
            return selected
        return _scale(forward, self.recomputed_fraction) if self.recomputed_fraction else Work()

    def _shard_work(
        self, kind: Literal["all_gather", "reduce_scatter"], params: float
    ) -> tuple[Work, ...]:
        """Return the work of gathering weights, or reducing gradients, of parameters."""
        plan, overlap = self.plan, self.dp_overlap
        width = 2 if kind == "all_gather" else self.gradient_bytes
        ops: list[Collective] = []
        if self.shards > 1:
            ops.append(Collective(kind, width * params, "dp", self.shards, plan.tp, overlap))
        if kind == "reduce_scatter" and plan.dp_replicate > 1:
            shard, stride = width * params / self.shards, plan.tp * self.shards
            ops.append(Collective("all_reduce", shard, "dp", plan.dp_replicate, stride, overlap))
        # Copies into and out of the communication buffers.
        return (Work((), (), 2 * width * params, 8, tuple(ops)),) if ops else ()

    def estimate_step(self) -> Step:
        """Return the work of a training step.

        Raises:
            ValueError: if the schedule does not allow the numbers.
        """
        plan, counts = self.plan, self.layers_per_stage
        layer_passes = self.layer_passes()
        works = tuple(self._stage_work(stage, *layer_passes) for stage in range(len(counts)))
        works = tuple(replace(w, forward=w.forward * forward_passes(plan)) for w in works)
        stages_by_rank = [stage_indices(order) for order in self.schedule.values()]
        local_params = self.layer_params * max(
            sum(counts[s] for s in stages) for stages in stages_by_rank
        )
        ends = [(0 in stages, len(counts) - 1 in stages) for stages in stages_by_rank]
        # A second copy of a tied embedding on one rank has no optimizer state; one on another rank
        # is trained there, and the ranks sum their gradients.
        is_copied = self.is_tied and plan.pp > 1
        local_params += self.table_params * max(
            first + (last and not (is_copied and first)) for first, last in ends
        )
        tied_sum: tuple[Collective, ...] = ()
        if is_copied and (True, True) not in ends:
            size, stride = (
                4 * self.table_params / self.optimizer_shards,
                (plan.pp - 1) * self.pp_stride,
            )
            tied_sum = (Collective("all_reduce", size, "pp", 2, stride),)
        # The norm reads gradients; AdamW reads and writes gradient, weight and both moments.
        traffic = 36 * (local_params / self.optimizer_shards)
        optimizer_work = Work((), (), traffic, 60, tied_sum)
        num_microbatches, tokens = self.num_microbatches, plan.tokens_per_step
        if plan.pp == 1:
            return Step(works, num_microbatches, tokens, optimizer_work)
        return Step(works, num_microbatches, tokens, optimizer_work, self.schedule, self.p2p())

    def p2p(self) -> Collective:
        """Return the message that a stage sends to the next."""
        shards = self.plan.tp if self.sequence_parallel else 1
        return Collective("send", 2 * self.tokens * self.hidden / shards, "pp", 2, self.pp_stride)

    def layer_passes(self) -> tuple[Work, Work]:
        """Return a layer's forward and backward with recomputation and sharding."""
        forward, backward = self._layer_work()
        if self.zero == 3:  # every microbatch gathers and reduces
            gather = self._shard_work("all_gather", self.layer_params)
            reduce = self._shard_work("reduce_scatter", self.layer_params)
            return sum(gather, forward), sum((*gather, *reduce), backward)
        # Weight gradients accumulate: one read, one write.
        accumulation = Work(traffic_bytes=2 * self.gradient_bytes * self.layer_params)
        return forward, backward + accumulation

    def _stage_work(self, stage: int, forward: Work, backward: Work) -> StageWork:
        """Return the work of a stage, from the passes of one layer for one microbatch."""
        plan, counts = self.plan, self.layers_per_stage
        first, last = stage == 0, stage == len(counts) - 1
        forward_works: WorkList = ((forward, counts[stage]),)
        backward_works: WorkList = ((backward, counts[stage]),)
        num_tables = first + (last and not (self.is_tied and len(counts) == 1))
        if first:
            traffic = 12 * self.tokens * self.hidden / plan.tp
            embedding = Work(traffic_bytes=traffic, kernels=10)
            forward_works = ((embedding, 1), *forward_works)
            backward_works = (*backward_works, (embedding, 1))
        if last:
            head, head_backward = self._head_work()
            forward_works = (*forward_works, (head, 1))
            backward_works = ((head_backward, 1), *backward_works)
        if self.zero == 3:
            table_sync = (
                *self._shard_work("all_gather", self.table_params),
                *self._shard_work("reduce_scatter", self.table_params),
            )
            syncs = tuple((work, num_tables) for work in table_sync if num_tables)
            return StageWork((*forward_works, *syncs), backward_works)
        params = counts[stage] * self.layer_params + num_tables * self.table_params
        group = plan.dp_cp_size
        if self.zero == 0 and group > 1:
            size = self.gradient_bytes * params
            op = Collective("all_reduce", size, "dp", group, plan.tp, self.dp_overlap)
            reduction = Work(collectives=(op,), traffic_bytes=2 * op.bytes)
            return StageWork(forward_works, backward_works, grad_reduce=((reduction, 1),))
        return StageWork(
            forward_works,
            backward_works,
            tuple((work, 1) for work in self._shard_work("all_gather", params)),
            tuple((work, 1) for work in self._shard_work("reduce_scatter", params)),
        )

    def _head_work(self) -> tuple[Work, Work]:
        """Return forward and backward of the final norm, the output layer and the loss."""
        matmul = Matmul(self.tokens, self.hidden, self.vocab)
        # Logits are cast to float32, pass log-softmax, and return as gradients.
        traffic = self.tokens * self.vocab * self.head_traffic_bytes
        backward_matmuls = (
            matmul._replace(k=matmul.n, n=matmul.k),
            matmul._replace(m=matmul.k, k=matmul.m),
        )
        return Work((matmul,), (), traffic, 15), Work(backward_matmuls, (), traffic, 25)

    # ------------------------------------------------------------------- memory

    def estimate_memory(self) -> dict[str, float]:
        """Return the bytes of the fullest pipeline rank by category.

        ``allocator``: reserved beyond the live bytes.

        Raises:
            ValueError: if the schedule does not allow the numbers.
        """
        estimates = map(self.rank_memory, self.schedule.values())
        return max(estimates, key=lambda memory: sum(memory.values()))

    def layer_bytes(self) -> float:
        """Return the bytes that a layer without recomputation saves per token."""
        h = self.hidden / (self.plan.tp if self.sequence_parallel else 1)
        # Eager norms save float32 copies of input and output, and the gate its product.
        eager = 12 * h + 2 * (self.num_up - 1) * self.ffn if self.is_eager else 0
        linear = 8 * h + 4 * self.q + 4 * self.kv + 2 * (self.num_up + 1) * self.ffn
        return eager + linear

    def saved_bytes(self) -> float:
        """Return the bytes that a layer saves per token of one microbatch."""
        h = self.hidden / (self.plan.tp if self.sequence_parallel else 1)
        q, f, num_gates = self.q, self.ffn, self.num_up - 1
        if not self.is_selective:
            saved = self.layer_bytes()
            return saved + self.recomputed_fraction * (2 * h - saved)
        # Only the next layer's input needs the down projection's output; a compiler sees that.
        saved = 2 * (h + q + self.kv + q + f * num_gates + h * self.is_eager)
        if self.precision != "bf16" and self.is_eager:
            # Every linear saves its own input in float8, and its amax.
            saved += 3 * (3 * h + q + (1 + num_gates) * h + f)
        return saved

    def rank_memory(self, order: list[Action]) -> dict[str, float]:
        """Return `estimate_memory` of the pipeline rank that runs ``order``."""
        memory = self.live_memory(order)
        if self.plan.device != "cpu":
            # Bytes that live from the start, or come and go together, cause no fragmentation.
            growing = sum(memory.values()) - memory["gathered"]
            memory["allocator"] = (RESERVED_RATIO - 1) * growing
        return memory

    def live_memory(self, order: list[Action]) -> dict[str, float]:
        """Return the live bytes of the pipeline rank that runs ``order``."""
        counts, local_stages = self.layers_per_stage, stage_indices(order)
        num_stages, plan = len(counts), self.plan
        first, last = 0 in local_stages, num_stages - 1 in local_stages
        params = sum(counts[s] for s in local_stages) * self.layer_params
        params += self.table_params * (first + (last and not (self.is_tied and plan.pp == 1)))
        shards = self.optimizer_shards
        state = self.state_bytes * params / shards + self.unsharded_bytes * params
        if self.is_tied and plan.pp > 1 and first and last:  # see `estimate_step`
            state -= max(0, self.state_bytes - 8) * self.table_params / shards
        unreduced = [0.0] * num_stages
        if self.zero == 2 and self.num_microbatches > 1:
            tables = [
                self.table_params * ((s == 0) + (s == num_stages - 1)) for s in range(num_stages)
            ]
            unreduced = [
                4 * (n * self.layer_params + t) for n, t in zip(counts, tables, strict=True)
            ]
        per_layer = self.tokens * self.saved_bytes()
        activations, gradients = peak_activations(order, [per_layer * n for n in counts], unreduced)
        if self.zero >= 2 and self.num_microbatches == 1:
            state -= 4 * params / shards  # no gradients exist yet at the peak
        gathered = 0.0
        if self.zero == 2:  # weights stay gathered; gradients accumulate unreduced
            gathered = 2 * params + gradients
        elif self.zero == 3:  # this layer, the next one, gradients being reduced
            gathered = self.layer_params * (2 * 2 + 2 + self.gradient_bytes)
        memory = {"state": state, "gathered": gathered, "activations": activations}
        memory["temporaries"] = self.tokens * self._temporary_bytes(last)
        return memory

    def _temporary_bytes(self, last: bool) -> float:
        """Return the bytes per token of the loss or a running layer, whichever is larger.

        A layer needs its saved activations and the gradients of its widest tensors.
        """
        # Gathered from the sequence, and its gradient.
        gathered = 6 * self.hidden * (self.plan.tp > 1)
        layer = gathered + 4 * (self.ffn + self.hidden / self.plan.tp)
        if self.recomputes:
            layer += self.layer_bytes()
        return max(layer, last * (self.vocab * self.logit_bytes + gathered))


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


def _scale(work: Work, fraction: float) -> Work:
    """Return a fraction of a work."""
    return Work(
        tuple(op._replace(n=op.n * fraction) for op in work.matmuls),
        tuple(op._replace(flops=op.flops * fraction) for op in work.attention),
        work.traffic_bytes * fraction,
        work.kernels * fraction,
        tuple(op._replace(times=op.times * fraction) for op in work.collectives),
    )


def peak_activations(
    order: list[Action], saved: Sequence[float], unreduced: Sequence[float]
) -> tuple[float, float]:
    """Return activations and gradients at the peak of their sum.

    Args:
        order: actions of one rank, in the order of their execution.
        saved: bytes of a microbatch by stage, from its forward to its backward.
        unreduced: gradients of a stage, from its first backward to its last.
    """
    total = Counter(stage for stage, kind, _ in order if kind in ("B", "W"))
    remaining = total.copy()
    peak, current = (0.0, 0.0), (0.0, 0.0)
    for stage, kind, _ in order:
        if kind == "F":
            current = (current[0] + saved[stage], current[1])
        elif kind in ("B", "W"):  # an entire backward pass, or its second half
            gradients = (remaining[stage] == total[stage]) - (remaining[stage] == 1)
            remaining[stage] -= 1
            current = (current[0] - saved[stage], current[1] + gradients * unreduced[stage])
        peak = max(peak, current, key=sum)
    return peak
