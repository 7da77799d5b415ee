"""Forward and backward over one global batch, and the same without gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from weft.data.loader import Batch, evaluation_batches
from weft.data.store import Store
from weft.job import Job
from weft.parallel.apply import reshard, set_gradient_sync
from weft.plan.resolve import Plan
from weft.train.loss import cross_entropy_sum, valid_tokens
from weft.train.setup import Rank


def forward_backward(model: nn.Module, batches: Sequence[Batch]) -> torch.Tensor:
    """Add the gradient of the mean loss of the global batch to the parameters' ``.grad``.

    Args:
        batches: this rank's microbatches, on its device.

    Returns:
        This rank's share of the mean loss: summed over ranks it is the loss in nats per token.
        A float32 scalar that has not been waited for.
    """
    count = torch.stack([valid_tokens(batch.targets_BT) for batch in batches]).sum()
    if dist.get_world_size() > 1:
        dist.all_reduce(count)
    count = count.clamp(min=1)  # a batch without a valid target has no loss and no gradient
    losses = []
    for index, batch in enumerate(batches):
        # Gradients add up locally; they cross the network once, with the last microbatch.
        set_gradient_sync(model, index == len(batches) - 1)
        logits_BTV = model(batch.tokens_BT, batch.documents_BT, batch.positions_BT)
        loss = cross_entropy_sum(logits_BTV, batch.targets_BT) / count
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
    return torch.stack(losses).sum()


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], device: torch.device) -> float:
    """Mean loss of held-out text, in nats per token.

    Every rank calls it, with equally many batches.
    """
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in batches:
        batch = batch_to(batch, device)
        logits_BTV = model(batch.tokens_BT, batch.documents_BT, batch.positions_BT)
        total[0] += cross_entropy_sum(logits_BTV, batch.targets_BT)
        total[1] += valid_tokens(batch.targets_BT)
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    model.train()
    reshard(model)
    return (total[0] / total[1].clamp(min=1)).item()


def held_out(job: Job, plan: Plan, store: Store, rank: Rank) -> Iterator[Batch]:
    """This rank's part of the held-out sequences, the same ones every time."""
    return evaluation_batches(
        store.tokens("validation"),
        seq_len=job.train.seq_len,
        packing=job.data.packing,
        separator=store.manifest.separator,
        sequences=job.train.eval_sequences,
        dp_rank=rank.rank,
        dp_size=plan.dp_size,
        microbatch=plan.microbatch,
    )


def batch_to(batch: Batch, device: torch.device) -> Batch:
    """The batch on ``device``; the copy to a GPU overlaps with what runs there."""
    if device.type == "cpu":
        return batch

    def move(part: torch.Tensor) -> torch.Tensor:
        return part.pin_memory().to(device, non_blocking=True)

    tokens_BT, targets_BT, documents_BT, positions_BT = batch
    return Batch(
        move(tokens_BT),
        move(targets_BT),
        None if documents_BT is None else move(documents_BT),
        None if positions_BT is None else move(positions_BT),
    )
