"""Work and memory of a decoder's training step, by arithmetic.

Arithmetic takes milliseconds per layout; a trace takes seconds.  A search prunes with arithmetic,
and published runs of other systems, which weft cannot trace, are priced with it.
`weft.estimate.cost` prices the `Step` from here and the one from a trace alike.

Rank order: tensor parallelism innermost, then context, shards, replicas, and the pipeline
outermost.  Tokens are those of a rank after context parallelism.  With sequence parallelism,
activations between tensor-parallel matmuls are divided by ``tp``, too.

Memory-bound work is counted in bytes per token and element of width, forward; backward moves about
twice as much:

* hidden: eager RMSNorm casts to float32, squares, averages, scales, casts back and multiplies by
  its weight: 36 bytes, against 4 fused; a residual sum 6; compiled, a sum and the norm after it
  are one kernel of 8;
* queries and keys: rotary embedding 20 eager, through float32, 4 fused;
* feed-forward: gate and product 10 eager, 6 fused; GELU 4.

`_saved_bytes` lists what autograd saves for backward under each kind of recomputation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from weft.estimate.cost import (
    Attention,
    Collective,
    Matmul,
    Overlap,
    StageWork,
    Step,
    Work,
    WorkList,
)
from weft.estimate.decoder import DecoderDims, Layout, layers_per_stage, layout_schedule
from weft.plan.pipeline_schedule import Action, stage_indices

# Reserved over live bytes: freed temporaries leave blocks that no later request fits.  Replays of
# traced steps measured 1.12 to 1.24.
RESERVED_RATIO = 1.20
# Bytes per logit at the loss.  Eager: log-softmax in float32, its gradient and the logits' own;
# fused: logits in bfloat16 and float32, gradient in place; chunked: both in bfloat16.
LOGIT_BYTES = {"eager": 12, "norms": 12, "compiled": 12, "fused": 8, "chunked": 4}

# Kernel launches that a device queues before the host blocks.
LAUNCH_QUEUE = 1024

# Bytes per element for casting one operand of a float8 matmul: amax, scaled copy, transposed copy.
# Fused with the operator before it, compiled, or about ten eager kernels.  Four bits also take a
# rotation and a second scale: twice as much.
CAST_BYTES = {"fused": 4.0, "compiled": 6.0, "norms": 34.0, "eager": 34.0}
# Per element of hidden, of queries and keys, of feed-forward (gated, plain): see above.
# "norms": fused kernels for norms and rotary embedding, the rest eager.  That stack copies QKV to
# batch-first order, and concatenates keys and values.
TRAFFIC_BYTES = {
    "eager": (84.0, 20.0, 10.0, 4.0),
    "norms": (20.0, 18.0, 10.0, 4.0),
    "fused": (20.0, 4.0, 6.0, 4.0),
    "compiled": (16.0, 4.0, 6.0, 4.0),
}
# Kernels per layer forward; FSDP hooks count as kernels.
KERNELS_PER_LAYER = {"eager": 70, "norms": 55, "fused": 45, "compiled": 25}


# --------------------------------------------------------------------------- work


def _matmuls(dims: DecoderDims, layout: Layout) -> list[Matmul]:
    """Return a layer's forward matmuls: QKV, output, up (and gate), down."""
    t, p = layout.tokens, layout.precision
    up = (2 if dims.gated else 1) * dims.ffn
    return [
        Matmul(t, dims.hidden, (dims.q + 2 * dims.kv) / layout.tp, 1, p),
        Matmul(t, dims.q / layout.tp, dims.hidden, 1, p),
        Matmul(t, dims.hidden, up / layout.tp, 1, p),
        Matmul(t, dims.ffn / layout.tp, dims.hidden, 1, p),
    ]


def _cast_bytes(matmuls: list[Matmul], fusion: str) -> tuple[float, float]:
    """Return the bytes of casting operands to low precision, forward and backward.

    Fused stacks cast a weight once per step, and an input once, in both layouts.  Others cast
    both again in backward.
    """
    quantized = [op for op in matmuls if op.precision != "bf16"]
    inputs, weights = sum(op.m * op.k for op in quantized), sum(op.k * op.n for op in quantized)
    gradients = sum(op.m * op.n for op in quantized)
    bytes_per_element = CAST_BYTES[fusion] * (
        2 if any(op.precision == "float4" for op in quantized) else 1
    )
    if fusion == "fused":
        return bytes_per_element * inputs, bytes_per_element * gradients
    return bytes_per_element * (inputs + weights), bytes_per_element * (
        gradients + inputs + weights
    )


def _attention_work(dims: DecoderDims, layout: Layout) -> tuple[Work, Work]:
    """Return the forward and backward work of attention."""
    sequences, head_dim = layout.tokens / layout.seq_len, dims.q // dims.heads
    flops = 2 * sequences * layout.seq_len**2 * dims.q / layout.tp  # causal: half of the square
    keys = layout.seq_len / layout.cp
    if layout.kernel == "unfused":
        # Scores, softmax and dropout are materialized: heads x S x S of two bytes.
        score_elements = sequences * layout.seq_len**2 * dims.heads / layout.tp
        matmuls = [
            Matmul(layout.seq_len, head_dim, layout.seq_len, 1),
            Matmul(layout.seq_len, layout.seq_len, head_dim, 1),
        ]
        # Batched over heads: one matmul with as many rows.
        batched_heads = sequences * dims.heads / layout.tp
        matmuls = [op._replace(m=op.m * batched_heads) for op in matmuls]
        backward_matmuls = [op._replace(times=2) for op in matmuls]
        return (
            Work(tuple(matmuls), traffic_bytes=11 * score_elements, kernels=6),
            Work(tuple(backward_matmuls), traffic_bytes=14 * score_elements, kernels=8),
        )
    ring_steps = layout.cp - 1
    # Keys and values travel around the ring; partial outputs are merged in float32.
    ring = Collective(
        "send",
        2 * 2 * layout.tokens * dims.kv / layout.tp,
        "cp",
        2,
        layout.tp * layout.cp // 2 or 1,
        "ring",
    )
    merge = 24 * layout.tokens * dims.q / layout.tp * ring_steps
    forward = Work(
        attention=(Attention(flops, keys, head_dim, False, layout.kernel),),
        traffic_bytes=merge,
        kernels=3 + 12 * ring_steps,
        collectives=(ring._replace(times=ring_steps),) if ring_steps else (),
    )
    backward = Work(
        attention=(Attention(2.5 * flops, keys, head_dim, True, layout.kernel),),
        traffic_bytes=2 * merge,
        kernels=4 + 16 * ring_steps,
        collectives=(ring._replace(times=2 * ring_steps),) if ring_steps else (),
    )
    return forward, backward


def _layer_work(dims: DecoderDims, layout: Layout) -> tuple[Work, Work, Work]:
    """Return a layer's forward, backward and recomputation."""
    matmuls = _matmuls(dims, layout)
    local = layout.tokens / (layout.tp if layout.sequence_parallel else 1)
    hidden, rotary, gate, plain = TRAFFIC_BYTES[layout.fusion]
    traffic = local * dims.hidden * hidden + layout.tokens / layout.tp * (
        (dims.q + dims.kv) * rotary + dims.ffn * (gate if dims.gated else plain)
    )
    attention, attention_backward = _attention_work(dims, layout)
    kernels = KERNELS_PER_LAYER[layout.fusion]
    collectives: tuple[Collective, ...] = ()
    if layout.tp > 1:
        elements = layout.tokens * dims.hidden
        bytes_by_kind = {"all_gather": layout.tp_gather_bytes, "reduce_scatter": 2}
        if not layout.sequence_parallel:
            bytes_by_kind = {"all_reduce": 2}
        collectives = tuple(
            Collective(kind, width * elements, "tp", layout.tp, 1, layout.tp_overlap, 2)  # type: ignore[arg-type]
            for kind, width in bytes_by_kind.items()
        )
    cast, cast_backward = _cast_bytes(matmuls, layout.fusion)
    forward = attention + Work(tuple(matmuls), (), traffic + cast, kernels, collectives)
    grads = [op._replace(k=op.n, n=op.k) for op in matmuls]
    weights = [op._replace(m=op.k, k=op.m) for op in matmuls]
    backward = attention_backward + Work(
        (*grads, *weights), (), 2 * traffic + cast_backward, 2 * kernels, collectives
    )
    return (
        forward,
        backward,
        _recompute_work(layout, matmuls, attention, traffic, kernels, collectives),
    )


def _recompute_work(
    layout: Layout,
    matmuls: list[Matmul],
    attention: Work,
    traffic: float,
    kernels: float,
    collectives: tuple[Collective, ...],
) -> Work:
    if layout.activation_checkpoint == "none":
        return Work()
    if (
        layout.activation_checkpoint == "attention"
    ):  # with a flash kernel nothing is left to compute again
        return attention if layout.kernel == "unfused" else Work()
    casts = _cast_bytes(matmuls, layout.fusion)[0]
    if layout.activation_checkpoint == "selective":
        # Every second matmul, and all other operators; TorchTitan's policy saves reduce-scatters.
        half = tuple(op._replace(n=op.n / 2) for op in matmuls)
        return Work(half, (), traffic + casts / 2, kernels, collectives[:1])
    full = attention + Work(tuple(matmuls), (), traffic + casts, kernels, collectives)
    if layout.activation_checkpoint == "block":
        fraction = layout.activation_checkpoint_fraction
        matmuls_share = tuple(op._replace(n=op.n * fraction) for op in full.matmuls)
        flash = tuple(op._replace(flops=op.flops * fraction) for op in full.attention)
        collectives_share = tuple(op._replace(times=op.times * fraction) for op in full.collectives)
        return Work(
            matmuls_share,
            flash,
            full.traffic_bytes * fraction,
            full.kernels * fraction,
            collectives_share,
        )
    return full


def _shard_work(
    layout: Layout, kind: Literal["all_gather", "reduce_scatter"], params: float
) -> tuple[Work, ...]:
    """Return the work of gathering weights or reducing gradients.

    ``params`` is the number of parameters of a rank's stage.
    """
    width = 2 if kind == "all_gather" else layout.gradient_bytes
    group = layout.dp_shard * layout.cp
    overlap: Overlap = "prefetch" if layout.overlap_dp_comm else "exposed"
    ops: list[Collective] = []
    if group > 1:
        ops.append(Collective(kind, width * params, "dp", group, layout.tp, overlap))
    if kind == "reduce_scatter" and layout.dp_replicate > 1:
        shard = width * params / group
        stride = layout.tp * group
        ops.append(Collective("all_reduce", shard, "dp", layout.dp_replicate, stride, overlap))
    # Copies into and out of the communication buffers.
    return (Work((), (), 2 * width * params, 8, tuple(ops)),) if ops else ()


def estimate_step(dims: DecoderDims, layout: Layout) -> Step:
    """Return the work of a training step.

    Raises:
        ValueError: if the schedule does not allow the numbers.
    """
    counts = layers_per_stage(dims, layout)
    layer_passes = _layer_passes(dims, layout)
    works = tuple(
        _stage_work(dims, layout, stage, counts, *layer_passes) for stage in range(len(counts))
    )
    schedule = layout_schedule(layout)
    stages_by_rank = [stage_indices(order) for order in schedule.values()]
    vocab_params = dims.vocab * dims.hidden / layout.tp
    local_params = (
        max(sum(counts[s] for s in stages) for stages in stages_by_rank)
        * dims.layer_params
        / layout.tp
    )
    local_params += vocab_params * max(
        (0 in stages) + (len(counts) - 1 in stages) for stages in stages_by_rank
    )
    local_params /= layout.optimizer_shards
    # Clipping reads gradients twice; AdamW reads and writes the weight and both moments.
    optimizer_work = Work(traffic_bytes=40 * local_params, kernels=60)
    tokens = layout.global_batch * layout.seq_len
    if layout.pp == 1:
        return Step(works, layout.microbatches, tokens, optimizer_work)
    stride = layout.tp * layout.cp * layout.dp
    p2p_shards = layout.tp if layout.sequence_parallel or layout.scatter_p2p else 1
    p2p = Collective("send", 2 * layout.tokens * dims.hidden / p2p_shards, "pp", 2, stride)
    return Step(works, layout.microbatches, tokens, optimizer_work, schedule, p2p)


def _layer_passes(dims: DecoderDims, layout: Layout) -> tuple[Work, Work]:
    """Return a layer's forward and backward with recomputation, sharding and offload."""
    forward, backward, recompute = _layer_work(dims, layout)
    layer_params = dims.layer_params / layout.tp
    if layout.zero == 3:  # every microbatch gathers and reduces
        gather = _shard_work(layout, "all_gather", layer_params)
        forward = sum(gather, forward)
        backward = sum((*gather, *_shard_work(layout, "reduce_scatter", layer_params)), backward)
    else:  # weight gradients accumulate: one read, one write
        backward += Work(traffic_bytes=2 * layout.gradient_bytes * layer_params)
    backward += recompute
    if layout.offload_fraction:
        offloaded = layout.offload_fraction * layout.tokens * _saved_bytes(dims, layout)
        transfer = Work(collectives=(Collective("send", offloaded, "offload", 2, 1, "prefetch"),))
        forward, backward = forward + transfer, backward + transfer
    return forward, backward


def _stage_work(
    dims: DecoderDims,
    layout: Layout,
    stage: int,
    counts: Sequence[int],
    forward: Work,
    backward: Work,
) -> StageWork:
    """Return the work of a stage, from the passes of one layer.

    Args:
        dims: dimensions of the model.
        layout: degrees and options of the run.
        stage: index of the stage.
        counts: layers of each stage.
        forward: forward pass of one layer for one microbatch.
        backward: backward pass of one layer for one microbatch.
    """
    first, last = stage == 0, stage == len(counts) - 1
    forward_works: WorkList = ((forward, counts[stage]),)
    backward_works: WorkList = ((backward, counts[stage]),)
    vocab_params = dims.vocab * dims.hidden / layout.tp
    num_tables = first + (last and not (dims.tied and len(counts) == 1))
    if first:
        embedding = Work(traffic_bytes=12 * layout.tokens * dims.hidden / layout.tp, kernels=10)
        forward_works, backward_works = (
            ((embedding, 1), *forward_works),
            (*backward_works, (embedding, 1)),
        )
    if last:
        head, head_backward = _head_work(dims, layout)
        forward_works, backward_works = (
            (*forward_works, (head, 1)),
            ((head_backward, 1), *backward_works),
        )
    if layout.zero == 3:
        table_sync = (
            *_shard_work(layout, "all_gather", vocab_params),
            *_shard_work(layout, "reduce_scatter", vocab_params),
        )
        return StageWork(
            (*forward_works, *((work, num_tables) for work in table_sync if num_tables)),
            backward_works,
        )
    params = counts[stage] * dims.layer_params / layout.tp + num_tables * vocab_params
    group = layout.dp * layout.cp
    if layout.zero == 0 and group > 1:
        overlap: Overlap = "prefetch" if layout.overlap_dp_comm else "exposed"
        op = Collective(
            "all_reduce", layout.gradient_bytes * params, "dp", group, layout.tp, overlap
        )
        return StageWork(
            forward_works,
            backward_works,
            grad_reduce=((Work(collectives=(op,), traffic_bytes=2 * op.bytes), 1),),
        )
    gather, reduce = (
        _shard_work(layout, kind, params) for kind in ("all_gather", "reduce_scatter")
    )
    return StageWork(
        forward_works,
        backward_works,
        tuple((work, 1) for work in gather),
        tuple((work, 1) for work in reduce),
    )


def _head_work(dims: DecoderDims, layout: Layout) -> tuple[Work, Work]:
    """Return forward and backward of the final norm, the output layer and the loss."""
    t, vocab = layout.tokens, dims.vocab / layout.tp
    matmul = Matmul(t, dims.hidden, vocab)
    # Logits are cast to float32, pass log-softmax, and return as gradients.
    traffic = t * vocab * (4 if layout.chunked_loss else 14)
    backward_matmuls = (
        matmul._replace(k=matmul.n, n=matmul.k),
        matmul._replace(m=matmul.k, k=matmul.m),
    )
    return Work((matmul,), (), traffic, 15), Work(backward_matmuls, (), traffic, 25)


# --------------------------------------------------------------------------- memory


def _saved_bytes(dims: DecoderDims, layout: Layout) -> float:
    """Return the bytes that a layer saves per token of one microbatch on one rank."""
    local = 1 / (layout.tp if layout.sequence_parallel else 1)
    h, q, kv, f = dims.hidden * local, dims.q / layout.tp, dims.kv / layout.tp, dims.ffn / layout.tp
    width = {"bf16": 2.0, "float8": 1.0, "float4": 0.5}[layout.precision]
    width = width if layout.fusion == "fused" else 2.0
    if layout.activation_checkpoint == "full":
        return 2 * h
    if layout.activation_checkpoint == "selective":
        # Only the next layer's input needs the down projection's output; a compiler sees that.
        saved = 2 * (h + q + kv + q + f * dims.gated + h * (layout.fusion == "eager"))
        if layout.precision != "bf16" and layout.fusion == "eager":
            # Every linear saves its own input in float8, and its amax.
            saved += 3 * (3 * h + q + (1 + dims.gated) * h + f)
        return saved
    num_up = 2 if dims.gated else 1
    eager = 12 * h if layout.fusion == "eager" else 0  # norms: float32 copies of input and output
    saved = eager + 4 * h + width * 2 * h + 2 * (2 * q + 2 * kv)
    is_unfused = layout.fusion in ("eager", "norms")
    saved += num_up * 2 * f + width * f + (2 * f if dims.gated and is_unfused else 0)
    if (
        layout.fusion == "norms"
    ):  # rotated in place in the product's output, keys and values beside it
        saved += 4 * kv
    if layout.kernel == "unfused" and layout.activation_checkpoint == "none":
        saved += 5 * dims.heads / layout.tp * layout.seq_len
    if layout.activation_checkpoint == "block":
        return saved + layout.activation_checkpoint_fraction * (2 * h - saved)
    return saved


def _peak_activations(
    order: list[Action], saved: Sequence[float], unreduced: Sequence[float]
) -> tuple[float, float]:
    """Return activations and gradients at the peak of their sum.

    Args:
        order: actions of one rank, in the order of their execution.
        saved: bytes of a microbatch by stage, from its forward to its backward.
        unreduced: gradients of a stage, from its first backward to its last.
    """
    freeing_kind = "W" if any(action.kind == "W" for action in order) else "B"
    total = Counter(stage for stage, kind, _ in order if kind == freeing_kind)
    remaining = total.copy()
    peak, current = (0.0, 0.0), (0.0, 0.0)
    for stage, kind, _ in order:
        if kind == "F":
            current = (current[0] + saved[stage], current[1])
        elif kind == freeing_kind:
            gradients = (remaining[stage] == total[stage]) - (remaining[stage] == 1)
            remaining[stage] -= 1
            current = (current[0] - saved[stage], current[1] + gradients * unreduced[stage])
        peak = max(peak, current, key=sum)
    return peak


def estimate_memory(
    dims: DecoderDims, layout: Layout, pp_rank: int | None = None
) -> dict[str, float]:
    """Return bytes by category; ``allocator``: reserved beyond the live bytes.

    ``pp_rank`` None means the fullest pipeline rank.
    """
    schedule = layout_schedule(layout)
    ranks = schedule if pp_rank is None else (pp_rank,)
    estimates = (_estimate_rank_memory(dims, layout, schedule[rank]) for rank in ranks)
    return max(estimates, key=lambda memory: sum(memory.values()))


def _estimate_rank_memory(
    dims: DecoderDims, layout: Layout, order: list[Action]
) -> dict[str, float]:
    """Return `estimate_memory` of the pipeline rank that runs ``order``."""
    counts, local_stages = layers_per_stage(dims, layout), stage_indices(order)
    num_stages = len(counts)
    first, last = 0 in local_stages, num_stages - 1 in local_stages
    vocab_params, layer_params = dims.vocab * dims.hidden / layout.tp, dims.layer_params / layout.tp
    shards = layout.optimizer_shards
    params = sum(counts[s] for s in local_stages) * layer_params
    params += vocab_params * (first + (last and not (dims.tied and layout.pp == 1)))
    memory = {"state": layout.state_bytes * params / shards + layout.unsharded_bytes * params}
    table_params = [vocab_params * ((s == 0) + (s == num_stages - 1)) for s in range(num_stages)]
    unreduced = [0.0] * num_stages
    if layout.zero == 2 and shards > 1 and layout.microbatches > 1:
        unreduced = [4 * (n * layer_params + t) for n, t in zip(counts, table_params, strict=True)]
    saved_per_layer = layout.tokens * _saved_bytes(dims, layout) * (1 - layout.offload_fraction)
    activations, gradients = _peak_activations(
        order, [saved_per_layer * n for n in counts], unreduced
    )
    memory["gathered"] = 0.0
    if layout.zero >= 2 and shards > 1 and layout.microbatches == 1:
        memory["state"] -= 4 * params / shards  # no gradients exist yet at the peak
    if layout.zero == 2 and shards > 1:  # weights stay gathered; gradients accumulate unreduced
        memory["gathered"] = 2 * params + gradients
    elif layout.zero == 3 and shards > 1:  # this layer, the next one, gradients being reduced
        memory["gathered"] = layer_params * (2 * 2 + 2 + layout.gradient_bytes)
    memory["activations"] = activations
    if layout.uses_record_stream and layout.tp > 1:
        # The host runs ahead by a stage's forward or by the launch queue.  Two unsharded outputs
        # of each layer, inputs of reduce-scatters, stay allocated meanwhile.
        pending_layers = min(
            max(counts[s] for s in local_stages), LAUNCH_QUEUE / KERNELS_PER_LAYER[layout.fusion]
        )
        memory["late"] = pending_layers * 2 * 2 * layout.tokens * dims.hidden
    if layout.pp > 1 and layout.recv_buffers:
        # Buffers for inputs that autograd does not save anyway, and for gradients.  The first
        # stage receives no input, the last no gradient.
        saved_anyway, _ = _peak_activations(
            order, [float(s > 0) for s in range(num_stages)], [0.0] * num_stages
        )
        num_buffers = layout.microbatches * (2 * len(local_stages) - first - last) - saved_anyway
        shards_p2p = layout.tp if layout.sequence_parallel else 1
        memory["buffers"] = num_buffers * layout.tokens * 2 * dims.hidden / shards_p2p
    memory["temporaries"] = layout.tokens * _temporary_bytes(dims, layout, last)
    if layout.pp > 1 and last and layout.output_bytes:
        outputs = layout.output_bytes * layout.microbatches * layout.tokens * dims.vocab / layout.tp
        memory["outputs"] = outputs
        if outputs > memory["activations"] + memory["temporaries"]:  # the peak is joining them
            memory |= {"outputs": 2 * outputs, "activations": 0.0, "temporaries": 0.0}
    if layout.include_reserved:
        # Bytes that live from the start, or that come and go together, cause no fragmentation.
        growing = sum(memory.values()) - memory["gathered"] - memory.get("buffers", 0.0)
        memory["allocator"] = (RESERVED_RATIO - 1) * growing
    return memory


def _temporary_bytes(dims: DecoderDims, layout: Layout, last: bool) -> float:
    """Return the bytes per token of the loss or a running layer, whichever is larger.

    A layer needs its saved activations and the gradients of its widest tensors.
    """
    saved = _saved_bytes(dims, replace(layout, activation_checkpoint="none"))
    gathered = 6 * dims.hidden * (layout.tp > 1)  # gathered from the sequence, and its gradient
    layers = (
        saved * (layout.activation_checkpoint != "none")
        + gathered
        + 4 * (dims.ffn + dims.hidden) / layout.tp
    )
    logit_bytes = LOGIT_BYTES["chunked" if layout.chunked_loss else layout.fusion]
    return max(layers, last * (dims.vocab / layout.tp * logit_bytes + gathered))
