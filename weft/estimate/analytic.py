"""What a decoder's training step does and holds, by arithmetic from its sizes and layout.

The quick twin of a trace: milliseconds for a layout, where a trace takes seconds.  A search prunes
with it, and published runs of other systems, which nobody can trace here, are priced by it.  Its
`Step` and a trace's are priced by the same `weft.estimate.cost`.

Ranks are numbered with tensor parallelism inside, then context, shards, replicas, and the pipeline
outside.  Tokens are those of a rank after context parallelism; with sequence parallelism what lies
between tensor-parallel products is divided by ``tp``, too.

Memory-bound work is counted in bytes for each token, forward, by the tensors that pass through
memory; backward reads and writes about twice as much.  Per element of width

* hidden: eager RMSNorm goes up to float32, squares, takes a mean, scales, goes down and multiplies
  by its weight: 36 bytes, against 4 fused; a residual sum 6; compiled, the sum and the norm after
  it are one kernel of 8;
* queries and keys: rotary embedding 20 eager by way of float32, 4 fused;
* feed-forward: gate, product 10 eager, 6 fused; GELU 4.

What autograd saves for backward, and what remains of it with recomputation, is listed likewise in
`_saved`.  The caching allocator keeps more than what lives: see `RESERVED`.
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
    Works,
)
from weft.estimate.decoder import Layout, Sizes, layers_of, timetable_of
from weft.plan.pipeline_schedule import Action, stage_indices

# Reserved by the caching allocator over what lives: blocks of freed temporaries that nothing of
# later size fits in.  Measured by replays of traced steps: 1.12 to 1.24.
RESERVED = 1.20
# Bytes of a logit at the loss: log-softmax in float32, its gradient, and the logits' own; where
# fused, logits in bfloat16 and in float32, and the gradient in place; in chunks, logits and
# gradient in bfloat16.
LOSS = {"eager": 12, "norms": 12, "compiled": 12, "fused": 8, "chunked": 4}

# Launches that wait for a device before its host has to wait, too.
QUEUE = 1024

# Bytes by element for casting one operand of a float8 product: amax, scaled copy, transposed copy;
# fused with what comes before it, compiled, and one kernel for each of some ten operations.  Four
# bits take a rotation and a second scale: twice as much.
CAST = {"fused": 4.0, "compiled": 6.0, "norms": 34.0, "eager": 34.0}
# Per element of hidden, of queries and keys, of feed-forward (gated, plain): see above.
# "norms": norms and rotation are kernels of their own, the rest is eager; queries, keys and values
# are copied to be batch-first, and keys and values once more to lie beside each other.
SWEPT = {
    "eager": (84.0, 20.0, 10.0, 4.0),
    "norms": (20.0, 18.0, 10.0, 4.0),
    "fused": (20.0, 4.0, 6.0, 4.0),
    "compiled": (16.0, 4.0, 6.0, 4.0),
}
# Kernels of a layer's forward that the host launches, hooks of sharding counted as kernels.
KERNELS = {"eager": 70, "norms": 55, "fused": 45, "compiled": 25}


# --------------------------------------------------------------------------- work


def _products(sizes: Sizes, lay: Layout) -> list[Matmul]:
    """A layer's linears, forward: q, k and v, output, up (and gate), down."""
    t, p = lay.tokens, lay.precision
    up = (2 if sizes.gated else 1) * sizes.ffn
    return [
        Matmul(t, sizes.hidden, (sizes.q + 2 * sizes.kv) / lay.tp, 1, p),
        Matmul(t, sizes.q / lay.tp, sizes.hidden, 1, p),
        Matmul(t, sizes.hidden, up / lay.tp, 1, p),
        Matmul(t, sizes.ffn / lay.tp, sizes.hidden, 1, p),
    ]


def _casts(products: list[Matmul], fusion: str) -> tuple[float, float]:
    """Bytes to bring operands to the products' precision, forward and backward.

    Fused stacks keep weights cast over a step, and inputs in both orders from forward on; others
    cast inputs and weights again in backward.
    """
    low = [op for op in products if op.precision != "bf16"]
    inputs, weights = sum(op.m * op.k for op in low), sum(op.k * op.n for op in low)
    gradients = sum(op.m * op.n for op in low)
    each = CAST[fusion] * (2 if any(op.precision == "float4" for op in low) else 1)
    if fusion == "fused":
        return each * inputs, each * gradients
    return each * (inputs + weights), each * (gradients + inputs + weights)


def _attention(sizes: Sizes, lay: Layout) -> tuple[Work, Work]:
    """Forward and backward of the two products of attention."""
    rows, head_dim = lay.tokens / lay.seq_len, sizes.q // sizes.heads
    flops = 2 * rows * lay.seq_len**2 * sizes.q / lay.tp  # causal: half of the square
    keys = lay.seq_len / lay.cp
    if lay.kernel == "unfused":
        # The whole square, materialised: scores, softmax, dropout; heads x S x S of two bytes.
        square = rows * lay.seq_len**2 * sizes.heads / lay.tp
        pair = [
            Matmul(lay.seq_len, head_dim, lay.seq_len, 1),
            Matmul(lay.seq_len, lay.seq_len, head_dim, 1),
        ]
        # Batched over heads: as one product with as many rows.
        many = rows * sizes.heads / lay.tp
        pair = [op._replace(m=op.m * many) for op in pair]
        back = [op._replace(times=2) for op in pair]
        return (
            Work(tuple(pair), swept_bytes=11 * square, kernels=6),
            Work(tuple(back), swept_bytes=14 * square, kernels=8),
        )
    steps = lay.cp - 1
    # Keys and values go round; the parts' outputs are merged in float32.
    ring = Collective(
        "send", 2 * 2 * lay.tokens * sizes.kv / lay.tp, "cp", 2, lay.tp * lay.cp // 2 or 1, "ring"
    )
    merge = 24 * lay.tokens * sizes.q / lay.tp * steps
    forward = Work(
        attention=(Attention(flops, keys, head_dim, False, lay.kernel),),
        swept_bytes=merge,
        kernels=3 + 12 * steps,
        collectives=(ring._replace(times=steps),) if steps else (),
    )
    backward = Work(
        attention=(Attention(2.5 * flops, keys, head_dim, True, lay.kernel),),
        swept_bytes=2 * merge,
        kernels=4 + 16 * steps,
        collectives=(ring._replace(times=2 * steps),) if steps else (),
    )
    return forward, backward


def _layer(sizes: Sizes, lay: Layout) -> tuple[Work, Work, Work]:
    """A layer's forward, backward, and what recomputation adds to the latter."""
    products = _products(sizes, lay)
    local = lay.tokens / (lay.tp if lay.sequence_parallel else 1)
    hidden, turn, gate, plain = SWEPT[lay.fusion]
    swept = local * sizes.hidden * hidden + lay.tokens / lay.tp * (
        (sizes.q + sizes.kv) * turn + sizes.ffn * (gate if sizes.gated else plain)
    )
    attention, attention_back = _attention(sizes, lay)
    kernels = KERNELS[lay.fusion]
    sends: tuple[Collective, ...] = ()
    if lay.tp > 1:
        whole = lay.tokens * sizes.hidden
        kinds = {"all_gather": lay.gathered_bytes, "reduce_scatter": 2}
        if not lay.sequence_parallel:
            kinds = {"all_reduce": 2}
        sends = tuple(
            Collective(kind, width * whole, "tp", lay.tp, 1, lay.tp_overlap, 2)  # type: ignore[arg-type]
            for kind, width in kinds.items()
        )
    cast, cast_back = _casts(products, lay.fusion)
    forward = attention + Work(tuple(products), (), swept + cast, kernels, sends)
    grads = [op._replace(k=op.n, n=op.k) for op in products]
    weights = [op._replace(m=op.k, k=op.m) for op in products]
    backward = attention_back + Work(
        (*grads, *weights), (), 2 * swept + cast_back, 2 * kernels, sends
    )
    return forward, backward, _again(lay, products, attention, swept, kernels, sends)


def _again(
    lay: Layout,
    products: list[Matmul],
    attention: Work,
    swept: float,
    kernels: float,
    sends: tuple[Collective, ...],
) -> Work:
    if lay.activation_checkpoint == "none":
        return Work()
    if (
        lay.activation_checkpoint == "attention"
    ):  # with a flash kernel nothing is left to compute again
        return attention if lay.kernel == "unfused" else Work()
    casts = _casts(products, lay.fusion)[0]
    if lay.activation_checkpoint == "selective":
        # Every second product, and all that is no product; TorchTitan's policy keeps the scattered.
        half = tuple(op._replace(n=op.n / 2) for op in products)
        return Work(half, (), swept + casts / 2, kernels, sends[:1])
    whole = attention + Work(tuple(products), (), swept + casts, kernels, sends)
    if lay.activation_checkpoint == "block":
        part = lay.activation_checkpoint_part
        share = tuple(op._replace(n=op.n * part) for op in whole.matmuls)
        flash = tuple(op._replace(flops=op.flops * part) for op in whole.attention)
        some = tuple(op._replace(times=op.times * part) for op in whole.collectives)
        return Work(share, flash, whole.swept_bytes * part, whole.kernels * part, some)
    return whole


def _shard(
    lay: Layout, kind: Literal["all_gather", "reduce_scatter"], params: float
) -> tuple[Work, ...]:
    """Gathering weights or reducing gradients of ``params`` parameters of a rank's stage."""
    width = 2 if kind == "all_gather" else lay.gradient_bytes
    group = lay.dp_shard * lay.cp
    overlap: Overlap = "prefetch" if lay.hide_sync else "exposed"
    ops: list[Collective] = []
    if group > 1:
        ops.append(Collective(kind, width * params, "dp", group, lay.tp, overlap))
    if kind == "reduce_scatter" and lay.dp_replicate > 1:
        part = width * params / group
        stride = lay.tp * group
        ops.append(Collective("all_reduce", part, "dp", lay.dp_replicate, stride, overlap))
    # Copies into and out of the buffers that collectives use.
    return (Work((), (), 2 * width * params, 8, tuple(ops)),) if ops else ()


def step_of(sizes: Sizes, lay: Layout) -> Step:
    """What a step does.

    Raises:
        ValueError: where the schedule does not allow the numbers.
    """
    counts = layers_of(sizes, lay)
    passes = _passes(sizes, lay)
    works = tuple(_stage(sizes, lay, stage, counts, *passes) for stage in range(len(counts)))
    table_of = timetable_of(lay)
    held = [stage_indices(order) for order in table_of.values()]
    table = sizes.vocab * sizes.hidden / lay.tp
    owned = max(sum(counts[s] for s in mine) for mine in held) * sizes.layer_params / lay.tp
    owned += table * max((0 in mine) + (len(counts) - 1 in mine) for mine in held)
    owned /= lay.owners
    # Clipping reads gradients twice; AdamW reads and writes the weight and both moments.
    once = Work(swept_bytes=40 * owned, kernels=60)
    tokens = lay.global_batch * lay.seq_len
    if lay.pp == 1:
        return Step(works, lay.microbatches, tokens, once)
    stride = lay.tp * lay.cp * lay.dp
    parts = lay.tp if lay.sequence_parallel or lay.scattered_hops else 1
    hop = Collective("send", 2 * lay.tokens * sizes.hidden / parts, "pp", 2, stride)
    return Step(works, lay.microbatches, tokens, once, table_of, hop)


def _passes(sizes: Sizes, lay: Layout) -> tuple[Work, Work]:
    """A layer's forward and backward, with recomputation, and what sharding and offload add."""
    forward, backward, again = _layer(sizes, lay)
    layer_params = sizes.layer_params / lay.tp
    if lay.zero == 3:  # gathers and reduces in every microbatch
        gather = _shard(lay, "all_gather", layer_params)
        forward = sum(gather, forward)
        backward = sum((*gather, *_shard(lay, "reduce_scatter", layer_params)), backward)
    else:  # gradients of weights add up: one read, one written
        backward += Work(swept_bytes=2 * lay.gradient_bytes * layer_params)
    backward += again
    if lay.offload_part:
        there = lay.offload_part * lay.tokens * _saved(sizes, lay)
        move = Work(collectives=(Collective("send", there, "offload", 2, 1, "prefetch"),))
        forward, backward = forward + move, backward + move
    return forward, backward


def _stage(
    sizes: Sizes, lay: Layout, stage: int, counts: Sequence[int], forward: Work, backward: Work
) -> StageWork:
    """One of the stages whose numbers of layers are ``counts``, from a layer's passes."""
    first, last = stage == 0, stage == len(counts) - 1
    ahead: Works = ((forward, counts[stage]),)
    back: Works = ((backward, counts[stage]),)
    table = sizes.vocab * sizes.hidden / lay.tp
    tables = first + (last and not (sizes.tied and len(counts) == 1))
    if first:
        look = Work(swept_bytes=12 * lay.tokens * sizes.hidden / lay.tp, kernels=10)
        ahead, back = ((look, 1), *ahead), (*back, (look, 1))
    if last:
        head, head_back = _head(sizes, lay)
        ahead, back = (*ahead, (head, 1)), ((head_back, 1), *back)
    if lay.zero == 3:
        loose = (*_shard(lay, "all_gather", table), *_shard(lay, "reduce_scatter", table))
        return StageWork((*ahead, *((work, tables) for work in loose if tables)), back)
    params = counts[stage] * sizes.layer_params / lay.tp + tables * table
    group = lay.dp * lay.cp
    if lay.zero == 0 and group > 1:
        overlap: Overlap = "prefetch" if lay.hide_sync else "exposed"
        op = Collective("all_reduce", lay.gradient_bytes * params, "dp", group, lay.tp, overlap)
        return StageWork(
            ahead, back, after=((Work(collectives=(op,), swept_bytes=2 * op.bytes), 1),)
        )
    gather, reduce = (_shard(lay, kind, params) for kind in ("all_gather", "reduce_scatter"))
    return StageWork(
        ahead, back, tuple((work, 1) for work in gather), tuple((work, 1) for work in reduce)
    )


def _head(sizes: Sizes, lay: Layout) -> tuple[Work, Work]:
    """The last norm, the product with the vocabulary and the loss."""
    t, vocab = lay.tokens, sizes.vocab / lay.tp
    product = Matmul(t, sizes.hidden, vocab)
    # Logits go up to float32, through log-softmax, and come back as gradients.
    swept = t * vocab * (4 if lay.chunked_loss else 14)
    back = (product._replace(k=product.n, n=product.k), product._replace(m=product.k, k=product.m))
    return Work((product,), (), swept, 15), Work(back, (), swept, 25)


# --------------------------------------------------------------------------- memory


def _saved(sizes: Sizes, lay: Layout) -> float:
    """Bytes that a layer keeps for a token of one microbatch, on one rank."""
    local = 1 / (lay.tp if lay.sequence_parallel else 1)
    h, q, kv, f = sizes.hidden * local, sizes.q / lay.tp, sizes.kv / lay.tp, sizes.ffn / lay.tp
    width = {"bf16": 2.0, "float8": 1.0, "float4": 0.5}[lay.precision]
    width = width if lay.fusion == "fused" else 2.0
    if lay.activation_checkpoint == "full":
        return 2 * h
    if lay.activation_checkpoint == "selective":
        # The down product's output only makes the next layer's input, which a compiler sees.
        kept = 2 * (h + q + kv + q + f * sizes.gated + h * (lay.fusion == "eager"))
        if lay.precision != "bf16" and lay.fusion == "eager":
            # Every linear's operator keeps its own input in float8 and its magnitude.
            kept += 3 * (3 * h + q + (1 + sizes.gated) * h + f)
        return kept
    ups = 2 if sizes.gated else 1
    eager = 12 * h if lay.fusion == "eager" else 0  # norms: float32 copies of input and output
    whole = eager + 4 * h + width * 2 * h + 2 * (2 * q + 2 * kv)
    apart = lay.fusion in ("eager", "norms")
    whole += ups * 2 * f + width * f + (2 * f if sizes.gated and apart else 0)
    if lay.fusion == "norms":  # rotated in place in the product's output, keys and values beside it
        whole += 4 * kv
    if lay.kernel == "unfused" and lay.activation_checkpoint == "none":
        whole += 5 * sizes.heads / lay.tp * lay.seq_len
    if lay.activation_checkpoint == "block":
        return whole + lay.activation_checkpoint_part * (2 * h - whole)
    return whole


def _fullest(
    order: list[Action], kept: Sequence[float], unreduced: Sequence[float]
) -> tuple[float, float]:
    """Activations and gradients when a rank has most of both.

    Args:
        kept: of a microbatch, by stage, from its forward to its backward.
        unreduced: gradients of a stage, from its first backward to its last.
    """
    done = "W" if any(action.kind == "W" for action in order) else "B"
    all_of = Counter(stage for stage, kind, _ in order if kind == done)
    left = all_of.copy()
    most, now = (0.0, 0.0), (0.0, 0.0)
    for stage, kind, _ in order:
        if kind == "F":
            now = (now[0] + kept[stage], now[1])
        elif kind == done:
            gradients = (left[stage] == all_of[stage]) - (left[stage] == 1)
            left[stage] -= 1
            now = (now[0] - kept[stage], now[1] + gradients * unreduced[stage])
        most = max(most, now, key=sum)
    return most


def memory_of(sizes: Sizes, lay: Layout, only: int | None = None) -> dict[str, float]:
    """Bytes by category, and ``allocator``: what it reserves beyond them.

    Args:
        only: this rank of the pipeline; None: the fullest.
    """
    table_of = timetable_of(lay)
    ranks = table_of if only is None else (only,)
    every = (_memory_of_rank(sizes, lay, table_of[rank]) for rank in ranks)
    return max(every, key=lambda held: sum(held.values()))


def _memory_of_rank(sizes: Sizes, lay: Layout, order: list[Action]) -> dict[str, float]:
    """`memory_of` the rank of the pipeline that does what ``order`` says."""
    counts, mine = layers_of(sizes, lay), stage_indices(order)
    stages = len(counts)
    first, last = 0 in mine, stages - 1 in mine
    table, layer = sizes.vocab * sizes.hidden / lay.tp, sizes.layer_params / lay.tp
    shards = lay.owners
    params = sum(counts[s] for s in mine) * layer
    params += table * (first + (last and not (sizes.tied and lay.pp == 1)))
    held = {"state": lay.state_bytes * params / shards + lay.kept_bytes * params}
    tables = [table * ((s == 0) + (s == stages - 1)) for s in range(stages)]
    unreduced = [0.0] * stages
    if lay.zero == 2 and shards > 1 and lay.microbatches > 1:
        unreduced = [4 * (n * layer + t) for n, t in zip(counts, tables, strict=True)]
    here = lay.tokens * _saved(sizes, lay) * (1 - lay.offload_part)
    kept, gradients = _fullest(order, [here * n for n in counts], unreduced)
    held["gathered"] = 0.0
    if lay.zero >= 2 and shards > 1 and lay.microbatches == 1:
        held["state"] -= 4 * params / shards  # no gradients yet, where memory is fullest
    if lay.zero == 2 and shards > 1:  # weights stay, and gradients add up unreduced
        held["gathered"] = 2 * params + gradients
    elif lay.zero == 3 and shards > 1:  # this layer, the next one, and gradients under way
        held["gathered"] = layer * (2 * 2 + 2 + lay.gradient_bytes)
    held["activations"] = kept
    if lay.late_frees and lay.tp > 1:
        # The host runs ahead of the device, through a stage's forward or as far as the queue
        # lets it: of each layer two whole outputs wait, that were reduced and scattered.
        ahead = min(max(counts[s] for s in mine), QUEUE / KERNELS[lay.fusion])
        held["late"] = ahead * 2 * 2 * lay.tokens * sizes.hidden
    if lay.pp > 1 and lay.recv_buffers:
        # Of inputs, where they are not saved anyway, and of gradients; the first stage gets no
        # input, the last no gradient.
        saved_anyway, _ = _fullest(order, [float(s > 0) for s in range(stages)], [0.0] * stages)
        each = lay.microbatches * (2 * len(mine) - first - last) - saved_anyway
        parts = lay.tp if lay.sequence_parallel else 1
        held["buffers"] = each * lay.tokens * 2 * sizes.hidden / parts
    held["temporaries"] = lay.tokens * _temporaries(sizes, lay, last)
    if lay.pp > 1 and last and lay.output_bytes:
        kept = lay.output_bytes * lay.microbatches * lay.tokens * sizes.vocab / lay.tp
        held["outputs"] = kept
        if kept > held["activations"] + held["temporaries"]:  # then the worst is to join them
            held |= {"outputs": 2 * kept, "activations": 0.0, "temporaries": 0.0}
    if lay.reserved:
        # What is there from the start, or comes and goes as a whole, leaves no holes.
        growing = sum(held.values()) - held["gathered"] - held.get("buffers", 0.0)
        held["allocator"] = (RESERVED - 1) * growing
    return held


def _temporaries(sizes: Sizes, lay: Layout, last: bool) -> float:
    """Bytes for a token of either the loss, on the ``last`` stage, or a layer in the making: what
    it saves, and gradients of its widest."""
    making = _saved(sizes, replace(lay, activation_checkpoint="none"))
    wide = 6 * sizes.hidden * (lay.tp > 1)  # gathered from the sequence, and its gradient
    layers = (
        making * (lay.activation_checkpoint != "none")
        + wide
        + 4 * (sizes.ffn + sizes.hidden) / lay.tp
    )
    each = LOSS["chunked" if lay.chunked_loss else lay.fusion]
    return max(layers, last * (sizes.vocab / lay.tp * each + wide))
