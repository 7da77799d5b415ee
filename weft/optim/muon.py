"""Muon: momentum whose matrices are orthogonalized before they are applied.

A step of SGD with momentum moves a matrix mostly along a few directions.  Muon (Jordan et al.,
2024, kellerjordan.github.io/posts/muon) gives all directions the same length: it replaces U S V' by
U V', with a few Newton-Schulz iterations, which are matrix products.  Muon needs unsharded matrices
and applies to the blocks' matrices only; AdamW updates all other parameters.

*Sharding.*  Each matrix has an owner, which orthogonalizes it: `weft.optim.matrix_exchange`.  So a
rank receives as many bytes as it holds of the model in bfloat16, and sends as many; to its owners
it sends only its replica's share.

The update is scaled to AdamW's usual size, 0.2 sqrt(max(rows, columns)), so that learning rate and
weight decay mean the same for both (Moonlight, arXiv:2502.16982, section 2.2).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from weft.optim.low_precision_adamw import MUON_MOMENTS, LowPrecisionAdamW
from weft.optim.matrix_exchange import MatrixExchange, build_exchanges, shard_group
from weft.parallel.dtensor import to_local
from weft.parallel.mesh import Groups

NEWTON_SCHULZ_STEPS = 5
# Quintic iteration with maximal slope at zero; singular values end between 0.68 and 1.21.
A, B, C = 3.4445, -4.7750, 2.0315


class Muon(LowPrecisionAdamW):
    """Muon for groups with ``matrices`` true, AdamW for the others.

    Args:
        groups: parameter groups; those with ``matrices`` have matrices and stacks of them, and may
            have another ``momentum``.
        momentum: Nesterov momentum of the matrices.
        **adamw: options of `LowPrecisionAdamW`; ``state_dtype`` is also that of the momentum.
    """

    def __init__(self, groups: list[dict[str, Any]], *, momentum: float, **adamw: Any) -> None:
        super().__init__(groups, **adamw)
        self._exchanges: list[MatrixExchange] | None = None
        # Process groups are created collectively, also by ranks that hold no shard.
        self._groups: Groups = {}
        for group in self.param_groups:
            if group["matrices"]:  # its momentum takes the place of beta1
                group["betas"] = (group.get("momentum", momentum), 0.0)
                group["moments"] = MUON_MOMENTS
            for param in group["params"]:
                shard_group(param, self._groups)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters; closures are not supported."""
        super().step(closure)  # for matrices it only writes the direction
        groups = [group for group in self.param_groups if group["matrices"]]
        group_by_param = {param: group for group in groups for param in group["params"]}
        if self._exchanges is None:
            self._exchanges = build_exchanges(list(self.directions), self._groups)
        for exchange in self._exchanges:
            directions = [self.directions[param] for param in exchange.params]
            for param, update in zip(
                exchange.params, orthogonalize_shards(exchange, directions), strict=True
            ):
                lr: Any = group_by_param[param]["lr"]
                local = to_local(param).detach()
                if self.found_inf is not None:
                    lr = lr * (1 - self.found_inf)
                local.mul_(1 - lr * group_by_param[param]["weight_decay"])
                local.sub_(update * (lr * 0.2 * math.sqrt(max(param.shape[-2:]))))
        self.directions.clear()


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return about U V' of each matrix U S V' ``[..., rows, columns]``, in its dtype.

    Singular values end between 0.68 and 1.21; those below 0.002 of the norm may stay smaller, and
    so do all of a matrix whose norm is below 1e-7, the eps of torch.optim.Muon.
    """
    is_wide = matrix.shape[-2] <= matrix.shape[-1]
    x = matrix.reshape(-1, *matrix.shape[-2:])
    x = x if is_wide else x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return (x if is_wide else x.mT).reshape(matrix.shape)


def orthogonalize_shards(exchange: MatrixExchange, shards: list[Tensor]) -> list[Tensor]:
    """Return this rank's shards of the orthogonalized matrices, in their dtype.

    Args:
        exchange: of the matrices.
        shards: of the matrices.
    """
    if exchange.group is None:
        return [orthogonalize(_to_compute_dtype(shard)).to(shard.dtype) for shard in shards]
    local = [_to_compute_dtype(shard.to(exchange.device)) for shard in shards]
    stacks = exchange.unshard(local)
    for stack in stacks.values():
        stack.copy_(orthogonalize(stack))
    exchange.shard(stacks, local)
    return [new.to(old) for new, old in zip(local, shards, strict=True)]


def _to_compute_dtype(shard: Tensor) -> Tensor:
    """Cast to bfloat16 on accelerators, where it suffices and is fast."""
    return shard if shard.device.type == "cpu" else shard.bfloat16()
