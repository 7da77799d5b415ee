"""Forward and backward over one global batch, and evaluation, in any layout.

The loss is a sum over targets, divided once by the number of targets in the global batch.  It
therefore does not depend on how tokens are spread over ranks and microbatches: a loss travels as a
sum and a count until that division.  An objective may add several such terms.

Shapes: B sequences of a microbatch, T tokens of a sequence on this rank, V vocabulary on this rank,
M metrics and C terms of the objective, S sources of a mixture, K layers of multi-token prediction
(`weft.training.multi_token`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.checkpoint.state_dict import trainable_parameters
from weft.data.loader import IGNORE_INDEX, Batch, Mixture, evaluation_batches
from weft.models import Family
from weft.models.varlen_attention import PackedDocuments
from weft.monitor.faults import fault_point
from weft.monitor.spans import action, span
from weft.parallel.compile import RunCompiled, run_compiled
from weft.parallel.context_parallel import TokenShards, gather_values
from weft.parallel.cuda_graphs import CudaDevice, MicrobatchGraphs
from weft.parallel.data_parallel import reshard, set_gradient_sync
from weft.parallel.lora import TokenRows, find_head_with_rows
from weft.parallel.mesh import Mesh
from weft.parallel.pipeline_parallel import build_pipeline_schedule
from weft.parallel.private import run_schedule, use_forward_only_order, wrap_pipeline_actions
from weft.parallel.step_hook import StepHook
from weft.parallel.token_split import Split
from weft.planning.plan import Plan
from weft.planning.shard_sizes import chunk_range
from weft.training.loss import (
    AddedRows,
    SequenceLosses,
    build_objective,
    chunk_tokens,
    cross_entropy,
    linear_cross_entropy,
)
from weft.training.multi_token import MultiTokenPrediction

MAX_STOP_CHECKS = 8  # in a step, because each is a reduction over all ranks
# What the model takes by name; see `weft.parallel.token_keys`.
RANDOM_COLUMNS = ("token_ids_BT", "lengths_BT")


class Microbatch(NamedTuple):
    """Input of one forward pass on this rank.

    Attributes:
        batch: this rank's tokens.
        divisors: of the summed losses: of the objective's terms, or of its only term and of
            multi-token prediction.
        sequences: what the objective takes: ``batch``, or its full sequences, with document ids.
        split: tokens of each context-parallel rank; empty: this rank has all.
    """

    batch: Batch
    divisors: Tensor
    sequences: Batch
    split: Split


class TrainStep:
    """Forward and backward of this rank's model parts.

    Attributes:
        owns_loss: True on the ranks whose loss is part of the sum over ranks.  Ranks without the
            last stage have no loss; tensor-parallel ranks compute the same loss, so the first
            owns it.  So do context-parallel ranks, if the objective needs full sequences.
        loss_by_source: float32 (S, C, 2): summed loss in nats and its count (tokens, or pairs) for
            each source, on this rank, of the last global batch.  None without a mixture.
        metric_names: the metrics of the objective, or the losses of multi-token prediction.
        metrics: float32 (M or K, 2): sum and count of each of them.  None without any.
        logits_at_targets: receives the targets, int64 (N,), and their logits, (N, V), of each
            cross-entropy on this rank.  None, except while prompts are continued.
        hooks: what the techniques of the run do around the passes; see `StepHook`.
        graphs: CUDA graphs of microbatches; None: there are none.
    """

    def __init__(
        self,
        model_parts: list[nn.Module],
        family: Family,
        plan: Plan,
        mesh: Mesh,
        device: torch.device,
        hooks: Iterable[StepHook],
        run_compiled: RunCompiled = run_compiled,
    ) -> None:
        job = plan.job
        self.hooks = list(hooks)
        self._run_compiled = run_compiled
        self.model_parts, self.plan, self.mesh, self.device = model_parts, plan, mesh, device
        self.objective = build_objective(plan.objective, job.train)
        cp_rank = mesh.coordinates["cp"]
        self._token_shards = TokenShards(
            job.parallel, cp_rank, plan.cp, device, plan.model, plan.varlen_documents
        )
        num_later = getattr(plan.model, "mtp_layers", 0)
        self._later: MultiTokenPrediction | None = None
        if num_later:
            self._later = MultiTokenPrediction(num_later, job.train.mtp_weight)
        self._ones = torch.ones(1 + num_later, device=device)
        tokens = plan.microbatch_size * plan.seq_len // plan.sequence_shards * (1 + num_later)
        vocab_size = len(chunk_range(plan.model.vocab_size, plan.tp, 0))  # the largest of all ranks
        self.vocab_range = chunk_range(plan.model.vocab_size, plan.tp, mesh.coordinates["tp"])
        self._chunk_tokens = chunk_tokens(tokens, vocab_size, plan.is_compiled)
        self._gathers_losses = plan.cp > 1 and not self.objective.is_token_sum
        can_fuse = family.enable_fused_loss is not None and self.objective.is_token_sum
        fused_loss = can_fuse and self._chunk_tokens < tokens
        self.schedule: Any = None
        last_part: nn.Module | None = model_parts[-1]  # None without the last stage
        if plan.pipeline is not None:
            width = plan.model.dim if fused_loss else len(self.vocab_range)
            width = 1 if plan.has_score_head else width
            self.schedule = self._build_schedule(width)
            stages, last_stage = self._stages, len(plan.pipeline.stages) - 1
            last_part = model_parts[stages.index(last_stage)] if last_stage in stages else None
        self._head_weight: Callable[[], Tensor] | None = None
        self._head_rows: TokenRows | None = None
        if fused_loss and last_part is not None:
            assert family.enable_fused_loss is not None
            self._head_weight = family.enable_fused_loss(last_part)
            if (head := find_head_with_rows(last_part)) is not None:
                self._head_weight, self._head_rows = lambda: head.weight, head.lora_rows
        self._owns_targets = cp_rank == 0 or not self._gathers_losses
        is_first = mesh.coordinates["tp"] == 0 and self._owns_targets
        self.owns_loss = last_part is not None and is_first
        self.loss_by_source: Tensor | None = None
        if (num_sources := len(job.data.sources)) > 1:
            self.loss_by_source = torch.zeros(num_sources, self.objective.terms, 2, device=device)
        names = self._later.metric_names if self._later is not None else ()
        self.metric_names = (*self.objective.metrics, *names)
        self.metrics: Tensor | None = None
        if self.metric_names:
            self.metrics = torch.zeros(len(self.metric_names), 2, device=device)
        self.logits_at_targets: list[tuple[Tensor, Tensor]] | None = None
        self.graphs: MicrobatchGraphs | None = None
        if plan.cuda_graphs:
            trained = [param for _, param in trainable_parameters(model_parts)]
            self.graphs = MicrobatchGraphs(self._forward_backward, trained, CudaDevice())

    @property
    def _stages(self) -> list[int]:
        """Indices of this rank's pipeline stages."""
        assert self.plan.pipeline is not None
        return self.plan.pipeline.stages_on_rank(self.mesh.coordinates["pp"])

    def _build_schedule(self, output_width: int) -> Any:
        plan, stages = self.plan, self._stages
        schedule = build_pipeline_schedule(
            self.model_parts,
            plan,
            self.mesh.get_group("pp"),
            self.device,
            plan.seq_len,
            plan.sequence_parallel,
            self._loss,
            output_width,
        )
        wrap_pipeline_actions(
            schedule,
            lambda index, kind, microbatch: (
                action(stages[index], kind, microbatch)
                if torch.is_grad_enabled()
                else nullcontext()
            ),
        )
        return schedule

    def forward_backward(
        self,
        batches: Sequence[Batch],
        sum_over_replicas: Callable[[list[Tensor]], None] = lambda tensors: None,
        check_stop: Callable[[], None] | None = None,
    ) -> Tensor:
        """Add the gradients of the global batch's mean loss to the parameters' ``.grad``.

        Every rank calls this function.

        Args:
            batches: this rank's microbatches, from `batch_to`.
            sum_over_replicas: sums tensors in place over the replica groups.
            check_stop: called between forward and backward of at most `MAX_STOP_CHECKS`
                microbatches, but not in a pipeline.  Its exception abandons the step: the
                parameters are unchanged, and the gradients incomplete.

        Returns:
            This rank's share of the loss; the sum over ranks is the mean loss in nats per token
            (DPO: per pair).  A float32 scalar on the device; the host has not waited for it.
        """
        for hook in self.hooks:
            hook.begin_step()
        if self.objective.baseline is not None and batches[0].baseline_B is None:
            batches = self._with_baseline(batches)
        microbatches = [self._shard_sequence(batch) for batch in batches]
        count = self.mesh.all_reduce_dp_cp(self._count(microbatches))
        num_sequences = sum(len(batch.tokens_BT) for batch in batches) * self.plan.dp_size
        sequences = torch.full_like(count[0], num_sequences)
        sum_over_replicas([count, sequences])
        divisors = count + (count == 0)  # without targets, loss and gradients are zero
        if divisors.is_floating_point():
            divisors = divisors.float()  # as the losses
        microbatches = [microbatch._replace(divisors=divisors) for microbatch in microbatches]
        losses, must_repeat = self._compute_gradients(microbatches, sequences, check_stop)
        if must_repeat:
            for part in self.model_parts:
                part.zero_grad()
            losses, must_repeat = self._compute_gradients(
                microbatches, sequences, check_stop, is_repeated=True
            )
            assert not must_repeat, "a hook asks twice for the passes of a step"
        if self.plan.world_size_invariant and losses:
            return self._sum_in_order([loss.detach() for loss in losses])
        return self._local_loss(losses)

    def _compute_gradients(
        self,
        microbatches: list[Microbatch],
        num_sequences: Tensor,
        check_stop: Callable[[], None] | None = None,
        is_repeated: bool = False,
    ) -> tuple[list[Tensor], bool]:
        """Run forward and backward of all microbatches.

        Returns:
            Their losses on this rank, and True if a hook wants the passes to be repeated.
        """
        self._reset_metrics()
        for hook in self.hooks:
            hook.begin_passes(num_sequences)
        if self.schedule is not None:
            losses = self._run_schedule(microbatches)
        else:
            losses = self._accumulate_gradients(microbatches, check_stop, is_repeated)
        wishes = [hook.end_passes() for hook in self.hooks]  # of all, for they are collectives
        return losses, any(wishes)

    def _accumulate_gradients(
        self,
        microbatches: Sequence[Microbatch],
        check_stop: Callable[[], None] | None,
        is_repeated: bool,
    ) -> list[Tensor]:
        losses, last = [], len(microbatches) - 1
        interval = -(-len(microbatches) // MAX_STOP_CHECKS)
        if self.graphs is not None:
            # FSDP gathers parameters in the first microbatch, and frees them in the last.
            ends = [(i == 0, i == last) if self.plan.uses_fsdp else () for i in range(last + 1)]
            self.graphs.begin_passes(microbatches, ends, can_replay=not is_repeated)
        for index, microbatch in enumerate(microbatches):
            for part in self.model_parts:
                set_gradient_sync(part, index == last, self.plan.gradient_sync)
            fault_point("microbatch")
            check_now = check_stop if index % interval == 0 else None
            if self.graphs is not None:
                if check_now is not None:
                    check_now()
                with action(0, "FB", index):
                    losses.append(self.graphs(index))
                continue
            with action(0, "F", index):
                loss = self._forward(microbatch)
            if check_now is not None:
                check_now()
            with action(0, "B", index):
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return losses

    def _forward_backward(self, microbatch: Microbatch) -> Tensor:
        """Add the gradients of a microbatch; return its loss."""
        loss = self._forward(microbatch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def close(self) -> None:
        """Free the graphs, which must not outlive the process groups."""
        self.graphs = None

    def abandon(self) -> None:
        """Free the parameters that an abandoned pass has gathered; see `reshard`."""
        for hook in self.hooks:
            hook.abandon()
        for part in self.model_parts:
            part.train()
            reshard(part)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Return the mean loss in nats per token (DPO: per pair).

        Every rank calls this function, with equally many batches.  After an exception of the
        iterator, on all ranks at the same batch, call `abandon`.
        """
        if self.objective.baseline is not None:
            batches = self._with_baseline(batches)
        return self._evaluate(batches).item()

    def _evaluate(self, batches: Iterable[Batch]) -> Tensor:
        """Return the result of `evaluate`; the host has not waited for it."""
        for part in self.model_parts:
            part.eval()
        for hook in self.hooks:
            hook.begin_step()
        self._reset_metrics()
        terms = self.objective.terms
        loss_and_count = torch.zeros(2, terms, dtype=torch.float64, device=self.device)
        # A pipeline takes as many microbatches at once as in training.
        count_at_once = self.plan.num_microbatches if self.schedule is not None else 1
        remaining = iter(batches)
        while some := list(islice(remaining, count_at_once)):
            microbatches = [self._shard_sequence(batch_to(b, self.device)) for b in some]
            if self.schedule is not None:
                with use_forward_only_order(self.schedule):
                    losses = self._run_schedule(microbatches)
            else:
                fault_point("microbatch")
                losses = [self._forward(microbatches[0])]
            loss_and_count[0] += self._local_loss(losses)
            if self.owns_loss:
                loss_and_count[1] += self._count(microbatches)[:terms]
        if dist.get_world_size() > 1:
            dist.all_reduce(loss_and_count)
        for part in self.model_parts:
            part.train()
            reshard(part)
        count = loss_and_count[1]
        return (loss_and_count[0] / (count + (count == 0))).sum()

    @torch.no_grad()
    def _with_baseline(self, batches: Iterable[Batch]) -> list[Batch]:
        """Return the batches with the baseline of the global batch, from swapped answers.

        Each rank writes its sequences into their places of the global batch.  So the sum does not
        depend on the layout.
        """
        objective, sums, kept = self.objective, list[Tensor](), list[Batch]()
        assert objective.baseline is not None

        def record(losses_BT: Tensor, batch: Batch) -> SequenceLosses:
            sums.append(cast(Any, objective.baseline)(losses_BT, batch))
            loss_B = losses_BT.sum(1)
            return SequenceLosses(loss_B, loss_B.new_zeros(len(loss_B), len(objective.metrics)))

        def swap() -> Iterator[Batch]:
            for batch in batches:
                kept.append(batch)
                yield batch.with_swapped_answers()

        by_source, self.loss_by_source = self.loss_by_source, None
        self.objective = objective._replace(losses=record, baseline=None)
        try:
            self._evaluate(swap())
        finally:
            self.objective, self.loss_by_source = objective, by_source
        sizes = [len(batch.tokens_BT) for batch in kept]
        count, dp_size, dp_rank = sum(sizes), self.plan.dp_size, self.mesh.dp_rank
        sums_N2 = torch.zeros(count * dp_size, 2, device=self.device)
        if self.owns_loss:
            places = slice(dp_rank * count, (dp_rank + 1) * count)
            if self.plan.world_size_invariant:
                places = slice(dp_rank, None, dp_size)
            # A pipeline pads microbatches, and appends some.
            rows = [part[:size] for part, size in zip(sums, sizes, strict=False)]
            sums_N2[places] = torch.cat(rows)
        if dist.get_world_size() > 1:
            dist.all_reduce(sums_N2)
        total, num = sums_N2.sum(0)
        baseline = total / (num + (num == 0))
        return [
            batch._replace(baseline_B=baseline.expand(size), swapped_B4T=None)
            for batch, size in zip(kept, sizes, strict=True)
        ]

    def _forward(self, microbatch: Microbatch) -> Tensor:
        (model,) = self.model_parts
        batch = microbatch.batch
        later = () if batch.later_BTK is None else (batch.later_BTK,)
        named = _columns(batch, RANDOM_COLUMNS)
        output = model(batch.tokens_BT, batch.documents_BT, batch.positions_BT, *later, **named)
        return self._loss(output, microbatch)

    def _loss(self, output: Tensor, microbatch: Microbatch) -> Tensor:
        """Return the loss of a microbatch, a sum of terms divided by their divisors.

        Args:
            output: logits ((1 + K) B, T, V), or scores (B, T, 1); with the fused loss the hidden
                states before the head.
            microbatch: its targets and divisors.

        Returns:
            A scalar; in an evaluation each term, (C,).
        """
        batch, divisors, sequences, split = microbatch
        weights_BT, scales_B1 = batch.weights_BT, None
        num_sequences = len(batch.tokens_BT)
        if self._later is not None:
            scales_B1 = self._later.scale(divisors, num_sequences)
        with span("loss"):
            if self._head_weight is None:
                losses_BT = (
                    output[..., 0].float()
                    if self.plan.has_score_head
                    else _multiply(self._cross_entropy(output, batch.targets_BT), weights_BT)
                )
                if self._gathers_losses:
                    losses_BT = gather_values(losses_BT, cast(Any, self.mesh.cp_group), split)
                losses = self.objective.losses(losses_BT, sequences)
                loss_BC = losses.loss_B.view(len(losses.loss_B), -1)
                total = (loss_BC if scales_B1 is None else loss_BC * scales_B1).sum(0)
            else:
                rows = self._head_rows
                total, losses_BT = linear_cross_entropy(
                    output,
                    self._head_weight(),
                    batch.targets_BT,
                    self._cross_entropy,
                    self._chunk_tokens,
                    weights_BT if scales_B1 is None else _multiply(scales_B1, weights_BT),
                    None if rows is None else AddedRows(rows.local_rows(), rows.columns_M),
                )
                losses = self.objective.losses(_multiply(losses_BT, weights_BT), sequences)
            if self.owns_loss:
                self._add_metrics(losses, sequences)
            if self._later is not None:
                total = self._later.keep_value(total, losses.loss_B, num_sequences)
            terms_C = total / divisors[: self.objective.terms]
            return terms_C.sum() if torch.is_grad_enabled() else terms_C

    def _cross_entropy(self, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        if self.logits_at_targets is not None:
            has_target_BT = targets_BT != IGNORE_INDEX
            self.logits_at_targets.append((targets_BT[has_target_BT], logits_BTV[has_target_BT]))
        group = self.mesh.get_group("tp") if self.plan.tp > 1 else None
        # An evaluation has no label smoothing, so that its losses compare.
        is_training = self.model_parts[-1].training
        label_smoothing = self.plan.job.train.label_smoothing if is_training else 0.0
        return cross_entropy(
            logits_BTV,
            targets_BT,
            group,
            self.plan.is_compiled,
            self.vocab_range.start,
            label_smoothing,
            self.plan.model.vocab_size,
            self._run_compiled,
            self.plan.job.train.z_loss_coef,
        )

    def _count(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Return how much this rank's sequences count, together, (C,) or (1 + K,)."""
        shape = len(self._ones), -1, self.objective.terms
        counts = [self.objective.counts(m.sequences).view(shape).sum(1) for m in microbatches]
        count = _sum(counts).flatten()
        return count if self._owns_targets else torch.zeros_like(count)

    def _reset_metrics(self) -> None:
        for sums in (self.loss_by_source, self.metrics):
            if sums is not None:
                sums.zero_()

    @torch.no_grad()
    def _add_metrics(self, losses: SequenceLosses, batch: Batch) -> None:
        """Add a microbatch to ``loss_by_source`` and ``metrics``."""
        if self.loss_by_source is None and self.metrics is None:
            return
        counts = self.objective.counts(batch)
        shape = len(counts), self.objective.terms
        sums_BC2 = torch.stack((losses.loss_B.view(shape), counts.view(shape)), dim=2)
        if self.metrics is not None and self._later is not None:
            self.metrics += self._later.sum_by_layer(sums_BC2)
        elif self.metrics is not None:
            self.metrics[:, 0] += losses.metrics_BM.sum(0)
            counts_BM = losses.metric_counts_BM
            self.metrics[:, 1] += sums_BC2[:, 0, 1].sum() if counts_BM is None else counts_BM.sum(0)
        # The samples of data.validation_path are of no source of the mixture.
        if self.loss_by_source is not None and batch.sources_B is not None:
            source_B1 = batch.sources_B.unsqueeze(1)
            sources_S = torch.arange(len(self.loss_by_source), device=self.device)
            is_source_BS = (source_B1 == sources_S).to(sums_BC2.dtype)
            sums_BC2 = sums_BC2[: len(source_B1)]
            self.loss_by_source += torch.einsum("bs,bcn->scn", is_source_BS, sums_BC2)

    def _local_loss(self, losses: list[Tensor]) -> Tensor:
        """Return the sum of the losses on a rank that owns them, else zero."""
        if not (losses and self.owns_loss):
            return torch.zeros((), device=self.device)
        return _sum([loss.detach() for loss in losses])

    def _sum_in_order(self, losses: list[Tensor]) -> Tensor:
        """Return the sum of losses in the order of the global batch; zero on most ranks.

        Every rank with the last stage calls this function.
        """
        group, share = self.mesh.get_group("dp_replicate"), torch.stack(losses) * self.owns_loss
        shares = [torch.empty_like(share) for _ in range(group.size())]
        dist.all_gather(shares, share, group)
        return torch.stack(shares, dim=1).flatten().sum() * (group.rank() == 0)

    def _run_schedule(self, microbatches: list[Microbatch]) -> list[Tensor]:
        """Run the pipeline schedule; return the losses, if this rank has the last stage.

        Every microbatch of a pipeline has the same shape, and a schedule has a fixed number of
        them, so sequences without targets are appended.
        """
        plan = self.plan
        first = microbatches[0]
        empty = first._replace(
            batch=_without_targets(first.batch), sequences=_without_targets(first.sequences)
        )
        padded = microbatches + [empty] * (plan.num_microbatches - len(microbatches))
        has_first = 0 in self._stages
        losses: list[Tensor] = []
        run_schedule(
            self.schedule,
            args=[(m.batch.tokens_BT,) if has_first else () for m in padded],
            kwargs=[
                _columns(m.batch, ("positions_BT", "documents_BT", "later_BTK", *RANDOM_COLUMNS))
                for m in padded
            ],
            targets=padded,
            losses=losses,
        )
        return losses

    def _shard_sequence(self, batch: Batch) -> Microbatch:
        """Return a microbatch of this rank's tokens, with positions if they need them.

        Document ids become what `shard_documents` returns.  The divisors are 1.
        """
        if self.schedule is not None:
            batch = _pad(batch, self.plan.microbatch_size)
        if self._later is not None:
            batch = self._later.add_targets(batch, self.logits_at_targets is None)
        full = batch
        if batch.positions_BT is None and (self.plan.cp > 1 or self.schedule is not None):
            positions_T = torch.arange(batch.tokens_BT.shape[1], device=batch.tokens_BT.device)
            batch = batch._replace(positions_BT=positions_T.expand_as(batch.tokens_BT))
        batch, split = self._token_shards.shard(batch)
        # The objective takes ids of documents, on the device.
        local: Any = batch.documents_BT
        if self._gathers_losses:
            if full.documents_BT is not None:
                full = full._replace(
                    documents_BT=full.documents_BT.to(self.device, non_blocking=True)
                )
            return Microbatch(batch, self._ones, full, split)
        is_packed = isinstance(local, PackedDocuments)
        sequences = batch._replace(documents_BT=local.ids_BT) if is_packed else batch
        return Microbatch(batch, self._ones, sequences, split)


def _multiply(values: Tensor, weights: Tensor | None) -> Tensor:
    return values if weights is None else values * weights


def _sum(scalars: list[Tensor]) -> Tensor:
    return scalars[0] if len(scalars) == 1 else torch.stack(scalars).sum(0)


def _pad(batch: Batch, num_sequences: int) -> Batch:
    """Append copies of the first sequence, without targets."""
    missing = num_sequences - len(batch.tokens_BT)
    if not missing:
        return batch
    padded = batch.map(
        lambda column: torch.cat((column, column[:1].expand(missing, *column.shape[1:])))
    )
    padded.targets_BT[-missing:] = IGNORE_INDEX
    return padded


def _columns(batch: Batch, names: Sequence[str]) -> dict[str, Any]:
    """Return the columns of a batch that it has."""
    columns = ((name, getattr(batch, name)) for name in names)
    return {name: column for name, column in columns if column is not None}


def _without_targets(batch: Batch) -> Batch:
    return batch._replace(targets_BT=torch.full_like(batch.targets_BT, IGNORE_INDEX))


def validation_batches(
    plan: Plan, samples: Mixture, mesh: Mesh, num_sequences: int
) -> Iterator[Batch]:
    """Yield this rank's part of ``num_sequences`` samples, always the same."""
    return evaluation_batches(
        samples,
        num_sequences=num_sequences,
        dp_rank=mesh.dp_rank,
        dp_size=plan.dp_size,
        microbatch_size=plan.microbatch_size,
    )


def batch_to(batch: Batch, device: torch.device) -> Batch:
    """Return the batch on ``device``; the copy to a GPU overlaps with its work.

    Document ids stay on the host, where `shard_documents` reads them without waiting for the GPU;
    so do sequences with swapped answers, which have some.
    """
    if device.type == "cpu":
        return batch

    def move(name: str, column: Tensor) -> Tensor:
        pinned = column.pin_memory()
        is_read_here = name in ("documents_BT", "swapped_B4T")
        return pinned if is_read_here else pinned.to(device, non_blocking=True)

    columns = batch._asdict().items()
    return batch._replace(**{name: move(name, x) for name, x in columns if x is not None})
