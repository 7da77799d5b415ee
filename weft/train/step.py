"""Forward and backward over one global batch, and the same without gradients, in any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.config.schema import Job
from weft.data.loader import IGNORE_INDEX, Batch, Mixture, evaluation_batches
from weft.models import Family
from weft.monitor.spans import action, span
from weft.optim.balance import ExpertBalancer
from weft.parallel.context_parallel import shard_sequence
from weft.parallel.data_parallel import reshard, set_gradient_sync
from weft.parallel.float8 import Float8AllGather
from weft.parallel.mesh import Mesh
from weft.parallel.pipeline_parallel import build_pipeline_schedule
from weft.parallel.private import use_forward_only_order
from weft.parallel.private_hooks import wrap_pipeline_actions
from weft.parallel.tensor_parallel import vocab_parallel_cross_entropy
from weft.plan.resolve import Plan
from weft.train.loss import chunk_tokens, cross_entropy, linear_cross_entropy
from weft.train.objectives import Losses, build_objective


class TrainStep:
    """This rank's parts of the model, and how a batch goes through them.

    The loss is a sum, divided once by what the whole global batch counts for (of next tokens, its
    valid targets): so it cannot depend on how tokens are spread over ranks and microbatches.
    """

    def __init__(
        self,
        parts: list[nn.Module],
        family: Family,
        job: Job,
        plan: Plan,
        mesh: Mesh,
        device: torch.device,
    ) -> None:
        self.parts, self.plan, self.mesh, self.device = parts, plan, mesh, device
        self.parallel = job.parallel
        self.objective = build_objective(job.train)
        self._divisor: Tensor | float = 1.0
        self.schedule: Any = None
        tokens = plan.microbatch_size * job.train.seq_len // plan.cp
        self._chunk = chunk_tokens(tokens, plan.model.vocab_size // plan.tp)
        headless = (
            self._chunk < tokens
            and family.enable_fused_loss is not None
            and self.objective.sums_tokens
        )
        has_last_stage, last_part = True, parts[-1]
        if plan.pipeline is not None:
            self.schedule = build_pipeline_schedule(
                parts,
                plan,
                mesh.get_group("pp"),
                device,
                job.train.seq_len,
                job.parallel.sequence_parallel,
                self._loss,
                headless,
            )
            mine = plan.pipeline.stages_on_rank(mesh.coordinates["pp"])

            def around(place: int, kind: str, microbatch: int) -> AbstractContextManager[Any]:
                if kind == "F":
                    self._microbatch = microbatch
                evaluating = not torch.is_grad_enabled()
                return nullcontext() if evaluating else action(mine[place], kind, microbatch)

            wrap_pipeline_actions(self.schedule, around)
            last = len(plan.pipeline.stages) - 1
            has_last_stage = last in mine
            last_part = parts[mine.index(last)] if has_last_stage else last_part
        self._weight: Callable[[], Tensor] | None = None
        if headless and has_last_stage:
            assert family.enable_fused_loss is not None
            self._weight = family.enable_fused_loss(last_part)
        self._gathers = Float8AllGather(parts) if plan.float8_all_gather else None
        # Ranks that share matrices compute the same loss: one of them tells it.
        self.tells = has_last_stage and mesh.coordinates["tp"] == 0
        # Of a mixture, for each source: the summed loss in nats of this rank's rows of the last
        # batch, and what they count for (tokens, if it is next tokens).
        self.loss_by_source: Tensor | None = None
        if len(job.data.mixture) > 1:
            self.loss_by_source = torch.zeros(len(job.data.mixture), 2, device=device)
        # The same of the objective's metrics.
        self.metrics: Tensor | None = None
        if self.objective.metrics:
            self.metrics = torch.zeros(len(self.objective.metrics), 2, device=device)
        self._batches: list[Batch] = []  # the microbatches that are computed
        self._microbatch = 0  # whose forward pass ran last
        rate = getattr(plan.model, "balance_rate", 0.0)
        self.balance = ExpertBalancer(parts, family.moe_layers, rate, mesh, device)

    def forward_backward(
        self,
        batches: Sequence[Batch],
        over_groups: Callable[[list[Tensor]], None] = lambda tensors: None,
    ) -> Tensor:
        """Add the gradient of the mean loss of the global batch to the parameters' ``.grad``, which
        is to be empty under ``train.world_size_invariant``.

        Args:
            batches: the microbatches of this rank's rows, on its device.
            over_groups: adds up in place over replica groups.

        Returns:
            This rank's share of the mean loss: summed over ranks it is the loss in nats per token
            (or what else the objective counts).
            A float32 scalar that has not been waited for.
        """
        if self._gathers is not None:
            self._gathers.update_scales()
        batches = self._begin(batches)
        self._forget()
        self.balance.reset()
        count = _sum([self.objective.counts(batch).sum() for batch in batches])
        count = self.mesh.all_reduce_dp_cp(count)
        over_groups([count])
        # A batch that counts for nothing has no loss and no gradient.
        self._divisor = count.clamp(min=1)
        if self.schedule is not None:
            losses = self._run_schedule(batches, self.schedule.step)
        elif self.plan.world_size_invariant:
            losses = self._in_order(batches)
        else:
            losses = []
            for index, batch in enumerate(batches):
                last = index == len(batches) - 1
                for part in self.parts:
                    set_gradient_sync(part, last, self.plan.gradient_sync)
                self._microbatch = index
                with action(0, "F", index):
                    loss = self._forward(batch)
                with action(0, "B", index):
                    loss.backward()  # type: ignore[no-untyped-call]
                losses.append(loss.detach())
        return self._told(losses)

    def _in_order(self, rows: Sequence[Batch]) -> list[Tensor]:
        """Losses and gradients of the global batch's rows, added up from its first to its last.

        Each row is computed by itself and each sum is the same chain of additions on every rank,
        so that the number of ranks has no part in the result.
        """
        (model,) = self.parts
        params = [param for param in model.parameters() if param.requires_grad]
        losses, grads = [], []
        for index, row in enumerate(rows):
            self._microbatch = index
            with action(0, "F", index):
                loss = self._forward(row)
            with action(0, "B", index):
                grads.append(torch.autograd.grad(loss, params))
            losses.append(loss.detach())
        everywhere = [torch.stack(losses), *(torch.stack(of) for of in zip(*grads, strict=True))]
        # The ranks' rows one after the other are the global batch.
        total, *sums = [_chain(_gathered(part)) for part in everywhere]
        for param, grad in zip(params, sums, strict=True):
            param.grad = grad
        return [total] if dist.get_rank() == 0 else []  # one of them tells it

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean loss of the validation set, in nats per token (of dpo, per pair).

        Every rank calls it, with equally many batches.
        """
        for part in self.parts:
            part.eval()
        if self._gathers is not None:
            self._gathers.update_scales()
        self._divisor = 1.0
        self._forget()
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        # A pipeline takes as many at a time as it does in training.
        at_a_time = self.plan.num_microbatches if self.schedule is not None else 1
        remaining = iter(batches)
        while some := list(islice(remaining, at_a_time)):
            here = [batch_to(batch, self.device) for batch in some]
            if self.schedule is not None:
                here += [_empty(here[0])] * (at_a_time - len(here))
            here = self._begin(here)
            if self.schedule is not None:
                with use_forward_only_order(self.schedule):
                    losses = self._run_schedule(here, self.schedule.eval)
            else:
                self._microbatch = 0
                losses = [self._forward(here[0])]
            total[0] += self._told(losses)
            if self.tells:
                total[1] += torch.stack(
                    [self.objective.counts(batch).sum() for batch in here]
                ).sum()
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        for part in self.parts:
            part.train()
            reshard(part)
        return (total[0] / total[1].clamp(min=1)).item()

    def _forward(self, batch: Batch) -> Tensor:
        (model,) = self.parts
        out = model(batch.tokens_BT, batch.documents_BT, batch.positions_BT)
        return self._loss(out, batch.targets_BT)

    def _loss(self, out: Tensor, targets_BT: Tensor) -> Tensor:
        """Of the model's output: logits, or what the product takes that makes them."""
        with span("loss"):
            batch = self._batches[self._microbatch]
            if self._weight is None:
                losses = self.objective.losses(self._cross_entropy(out, targets_BT), batch)
                total = losses.loss_B.sum()
            else:
                total, losses_BT = linear_cross_entropy(
                    out, self._weight(), targets_BT, self._cross_entropy, self._chunk
                )
                losses = self.objective.losses(losses_BT, batch)
            if self.tells:
                self._count(losses, batch)
            return total / self._divisor

    def _cross_entropy(self, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        if self.plan.tp > 1:
            group = self.mesh.get_group("tp")
            return vocab_parallel_cross_entropy(logits_BTV, targets_BT, IGNORE_INDEX, group)
        return cross_entropy(logits_BTV, targets_BT)

    def _forget(self) -> None:
        for sums in (self.loss_by_source, self.metrics):
            if sums is not None:
                sums.zero_()

    @torch.no_grad()
    def _count(self, losses: Losses, batch: Batch) -> None:
        """Add the rows of a microbatch to what is told of sources and metrics."""
        if self.loss_by_source is None and self.metrics is None:
            return
        count_B = self.objective.counts(batch)
        if self.metrics is not None:
            self.metrics[:, 0] += losses.metrics_BM.sum(0)
            self.metrics[:, 1] += count_B.sum()
        if self.loss_by_source is not None:
            rows_B2 = torch.stack((losses.loss_B.detach(), count_B), dim=1)
            numbers = torch.arange(len(self.loss_by_source), device=self.device)
            of_BS = cast(Tensor, batch.sources_B).unsqueeze(1) == numbers
            self.loss_by_source += (of_BS.unsqueeze(2) * rows_B2.unsqueeze(1)).sum(0)

    def _begin(self, batches: Sequence[Batch]) -> list[Batch]:
        """This rank's tokens of the microbatches that come next."""
        self._batches = [self._own_tokens(batch) for batch in batches]
        return self._batches

    def _told(self, losses: list[Tensor]) -> Tensor:
        """The sum of ``losses`` where it is this rank that tells it, else zero."""
        if not (losses and self.tells):
            return torch.zeros((), device=self.device)
        return _sum([loss.detach() for loss in losses])

    def _run_schedule(self, batches: list[Batch], run: Any) -> list[Tensor]:
        """The microbatches through the pipeline, by ``step`` or ``eval`` of its schedule."""
        assert self.plan.pipeline is not None
        self._batches = padded = [_pad(batch, self.plan.microbatch_size) for batch in batches]
        columns = {
            name: torch.cat(column)
            for name in ("tokens_BT", "targets_BT", "positions_BT", "documents_BT")
            if (column := [getattr(batch, name) for batch in padded])[0] is not None
        }
        tokens, targets = columns.pop("tokens_BT"), columns.pop("targets_BT")
        first = 0 in self.plan.pipeline.stages_on_rank(self.mesh.coordinates["pp"])
        losses: list[Tensor] = []
        run(
            *([tokens] if first else []),
            target=targets,
            losses=losses,
            return_outputs=False,
            **columns,
        )
        return losses

    def _own_tokens(self, batch: Batch) -> Batch:
        """This rank's tokens of the batch's rows, with their places where a slice hides them."""
        plan = self.plan
        if plan.cp == 1 and self.schedule is None:
            return batch
        if batch.positions_BT is None:
            places_T = torch.arange(batch.tokens_BT.shape[1], device=batch.tokens_BT.device)
            batch = batch._replace(positions_BT=places_T.expand_as(batch.tokens_BT))
        if plan.cp == 1:
            return batch
        place, balance = self.mesh.coordinates["cp"], self.parallel.cp_load_balance
        mine = {
            name: shard_sequence(column, place, plan.cp, balance)
            for name, column in batch._asdict().items()
            if column is not None and name.endswith("_BT")
        }
        return batch._replace(**mine)


def _sum(scalars: list[Tensor]) -> Tensor:
    return scalars[0] if len(scalars) == 1 else torch.stack(scalars).sum()


def _gathered(rows: Tensor) -> Tensor:
    """All ranks' rows, in the order of the ranks."""
    every = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(every, rows)
    return torch.cat(every)


def _chain(rows: Tensor) -> Tensor:
    """The sum of the rows, the second added to the first, the third to that, and so on."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def _pad(batch: Batch, rows: int) -> Batch:
    """The batch with ``rows`` rows, those that are added without a target."""
    missing = rows - len(batch.tokens_BT)
    padded = Batch._make(None if column is None else _filled(column, rows) for column in batch)
    if missing:
        padded.targets_BT[-missing:] = IGNORE_INDEX
    return padded


def _filled(column: Tensor, rows: int) -> Tensor:
    """With as many rows: any will do that is valid by itself, so the first one again."""
    missing = rows - len(column)
    return torch.cat((column, column[:1].expand(missing, *column.shape[1:]))) if missing else column


def _empty(batch: Batch) -> Batch:
    """A batch of that shape without a target."""
    return batch._replace(targets_BT=torch.full_like(batch.targets_BT, IGNORE_INDEX))


def validation_batches(job: Job, plan: Plan, samples: Mixture, mesh: Mesh) -> Iterator[Batch]:
    """This rank's part of the validation set, the same ones every time."""
    return evaluation_batches(
        samples,
        num_sequences=job.train.eval_sequences,
        dp_rank=mesh.dp_rank,
        dp_size=plan.dp_size,
        microbatch_size=plan.microbatch_size,
    )


def batch_to(batch: Batch, device: torch.device) -> Batch:
    """The batch on ``device``; the copy to a GPU overlaps with what runs there."""
    if device.type == "cpu":
        return batch

    def move(part: torch.Tensor) -> torch.Tensor:
        return part.pin_memory().to(device, non_blocking=True)

    return Batch._make(part if part is None else move(part) for part in batch)
