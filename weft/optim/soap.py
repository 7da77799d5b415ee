"""SOAP: Adam in the eigenbasis of Shampoo's statistics.

Adam divides each element of the momentum by the root of its second moment.  That works best if the
elements are independent.  SOAP (Vyas et al., arXiv:2409.11321, algorithm 3) first rotates a matrix
G of a block into a basis in which they nearly are: the eigenvectors Q of the running means of G G'
(rows) and of G' G (columns).  There it does Adam's step, and rotates the result back.  The bases
change slowly.  So they are renewed every ``optim.precondition_interval`` updates only, with one
orthogonal iteration: Q becomes the orthogonal factor of (the mean of G G') Q.

*State of a matrix.*  The momentum is in the parameter's basis and has ``optim.state_dtype``.  All
else is float32: the second moment, in the rotated basis, and the two means and bases, which are
flat tensors.  All ranks that hold the matrix share each of them evenly, in memory and checkpoints.
Sides above ``optim.max_precondition_dim`` are not rotated, and have neither.

*Sharding.*  Each matrix has an owner, which computes the step: `weft.optim.matrix_exchange`.  A
step sends gradient, momentum, second moment and bases to it, and returns update, second moment, and
what the means gain.

*Two differences from the paper.*  It begins with the eigenvectors of the first gradient's factors.
Those of small eigenvalues are noise, which differs between layouts, and Adam would make it as large
as the signal.  Here the bases begin as the identity, which is Adam, and the means have `DAMPING` on
the diagonal, so that directions without a signal stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.models.host_reads import define_host_read
from weft.optim.low_precision_adamw import MUON_MOMENTS, LowPrecisionAdamW
from weft.optim.matrix_exchange import (
    MatrixExchange,
    PartExchange,
    build_exchanges,
    flat_zeros,
    shard_group,
)
from weft.parallel.dtensor import is_quantized, shard_bounds, to_local
from weft.parallel.mesh import Groups

# Added to the diagonal of a mean of squares, as a fraction of its average.
DAMPING = 1e-3

SQUARE = "rotated_exp_avg_sq"
SIDES = ("row", "column")
FLAT_STATE = tuple(f"{side}_{kind}" for side in SIDES for kind in ("mean", "basis"))

# The host waits for the number of updates, which a skipped step does not change.
is_basis_due = define_host_read(
    "is_basis_due(Tensor step, int interval) -> bool",
    lambda step, interval: (int(step.item()) - 1) % interval == 0,
)


class SOAP(LowPrecisionAdamW):
    """SOAP for groups with ``matrices`` true, AdamW for the others.

    Args:
        groups: parameter groups; those with ``matrices`` have matrices and stacks of them.
        interval: updates between two changes of the bases; the first is after the first update.
        max_dim: maximum size of a side that is rotated.
        **adamw: options of `LowPrecisionAdamW`, which also hold for the rotated matrices.
    """

    flat_state = FLAT_STATE  # see `weft.checkpoint.state_dict.allocate_optimizer_state`

    def __init__(
        self, groups: list[dict[str, Any]], *, interval: int, max_dim: int, **adamw: Any
    ) -> None:
        super().__init__(groups, **adamw)
        self.interval, self.max_dim = interval, max_dim
        self._exchanges: list[_SoapExchange] | None = None
        # Process groups are created collectively, also by ranks that hold no shard.
        self._groups: Groups = {}
        for group in self.param_groups:
            if group["matrices"]:
                group["moments"] = MUON_MOMENTS
            for param in group["params"]:
                shard_group(param, self._groups)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters; closures are not supported."""
        super().step(closure)  # of matrices it only changes the momentum
        params = list(self.directions)
        self.directions.clear()
        for param in params:
            self._allocate_flat(param)
        if self._exchanges is None:
            self._exchanges = [
                _SoapExchange(exchange, self) for exchange in build_exchanges(params, self._groups)
            ]
        for exchange in self._exchanges:
            exchange.update()

    def _allocate_flat(self, param: Tensor) -> None:
        """Allocate the state of a matrix that only SOAP has, unless it was loaded."""
        state = self.state[param]
        if SQUARE in state:
            return
        state[SQUARE] = torch.zeros_like(param.detach())
        items = param.shape[0] if param.dim() == 3 else 1
        for side, size in zip(SIDES, param.shape[-2:], strict=True):
            size = size if size <= self.max_dim else 0
            for kind in ("mean", "basis"):
                state[f"{side}_{kind}"] = flat_zeros(param, items * size * size)
            basis = state[f"{side}_basis"]
            local, (first, *_) = to_local(basis), shard_bounds(basis)[0]
            if local.numel():  # the identity: every (size + 1)-th element of a matrix
                index = torch.arange(first, first + len(local), device=local.device)
                local.copy_(index % (size * size) % (size + 1) == 0)

    def convert_loaded_state(self) -> None:
        """Convert loaded moments from the saved dtype and device, in place."""
        for param, state in self.state.items():
            if SQUARE in state:
                state[SQUARE] = state[SQUARE].to(to_local(param).device)
        super().convert_loaded_state()


class _SoapExchange:
    """Matrices of one group of ranks, and the tensors that their owners need."""

    def __init__(self, exchange: MatrixExchange, optimizer: SOAP) -> None:
        self.exchange, self.optimizer = exchange, optimizer
        self.params, self.parts = exchange.params, exchange.parts
        groups = [group for group in optimizer.param_groups if group["matrices"]]
        self.group_of = {param: group for group in groups for param in group["params"]}
        self.flat: dict[str, PartExchange] = {}
        for side in SIDES:  # the two tensors of a side have one layout
            states = [optimizer.state[param][f"{side}_mean"] for param in self.params]
            self.flat[side] = exchange.flat_parts(states)

    def update(self) -> None:
        """Do a step of all matrices; with ``found_inf`` all bits stay the same."""
        states = [self.optimizer.state[param] for param in self.params]
        found_inf, scale = self.optimizer.found_inf, self.optimizer.grad_scale
        device = self.exchange.device or to_local(self.params[0]).device
        skip = (torch.zeros(()) if found_inf is None else found_inf).to(device) > 0
        scale = (torch.ones(()) if scale is None else scale).to(device)
        grads = [to_local(param.grad).to(device).float() / scale for param in self.params]
        grads = [grad.masked_fill(skip, 0.0) for grad in grads]
        momenta = [_float(to_local(state[MUON_MOMENTS[0]])).to(device) for state in states]
        squares = [to_local(state[SQUARE]).to(device) for state in states]
        grad_of, momentum_of, square_of = (
            self.parts.views_of(self.exchange.unshard(shards))
            for shards in (grads, momenta, squares)
        )
        bases = {side: self._unshard_flat(side, "basis") for side in SIDES}
        gains: dict[str, list[Tensor]] = {side: [] for side in SIDES}
        for i, matrix in enumerate(self.parts.owned):
            key, group = (matrix.param, matrix.item), self.group_of[self.params[matrix.param]]
            step = states[matrix.param]["step"].to(device)
            rows, columns = (bases[side].get(key) for side in SIDES)
            (beta1, beta2), eps = group["betas"], group["eps"]
            grad, square = grad_of[i], square_of[i]
            rotated = _rotate(grad, rows, columns)
            new_square = square.lerp(rotated.square(), 1 - beta2)
            square.copy_(torch.where(skip, square, new_square))
            direction = _rotate(momentum_of[i], rows, columns) / (1 - beta1**step)
            direction /= (square / (1 - beta2**step)).sqrt() + eps
            # A skipped first step divides zero by zero.
            momentum_of[i].copy_(_rotate_back(direction, rows, columns).masked_fill(skip, 0.0))
            if rows is not None:
                gains["row"].append(grad @ grad.mT)
            if columns is not None:
                gains["column"].append(grad.mT @ grad)
        updates = momenta
        self.parts.shard(momentum_of, updates)
        self.parts.shard(square_of, squares)
        for state, square in zip(states, squares, strict=True):
            to_local(state[SQUARE]).copy_(square)
        for side in SIDES:
            self._move_means(side, gains[side], skip)
        for param, update in zip(self.params, updates, strict=True):
            group, local = self.group_of[param], to_local(param).detach()
            lr = (group["lr"] * ~skip).to(local.device)
            local.mul_(1 - lr * group["weight_decay"])
            local.sub_(update.to(local.device) * lr)
        if is_basis_due(states[0]["step"], self.optimizer.interval):
            for side in SIDES:
                self._renew_bases(side, bases[side], skip)

    def _flat(self, side: str, kind: str) -> list[Tensor]:
        """Return this rank's shards of a flat state on the device of the exchange."""
        shards = [to_local(self.optimizer.state[param][f"{side}_{kind}"]) for param in self.params]
        return [shard.to(self.exchange.device or shard.device) for shard in shards]

    def _unshard_flat(self, side: str, kind: str) -> dict[tuple[int, int], Tensor]:
        """Return a square matrix of each owned matrix, by parameter and item."""
        parts, shards = self.flat[side], self._flat(side, kind)
        owned = [shards[0].new_empty(matrix.numel) for matrix in parts.owned]
        parts.unshard(shards, owned)
        squares = [flat.view(round(flat.numel() ** 0.5), -1) for flat in owned]
        return {(m.param, m.item): square for m, square in zip(parts.owned, squares, strict=True)}

    def _shard_flat(self, side: str, owned: list[Tensor]) -> list[Tensor]:
        """Return this rank's shards of a square matrix of each owned matrix."""
        shards = [torch.empty_like(shard) for shard in self._flat(side, "mean")]
        self.flat[side].shard([matrix.flatten() for matrix in owned], shards)
        return shards

    def _move_means(self, side: str, gains: list[Tensor], skip: Tensor) -> None:
        """Move the mean of each matrix's squares towards those of this step."""
        for param, gain in zip(self.params, self._shard_flat(side, gains), strict=True):
            mean = to_local(self.optimizer.state[param][f"{side}_mean"])
            share = (1 - self.group_of[param]["betas"][1]) * (~skip).float()
            mean.lerp_(gain.to(mean.device), share.to(mean.device))

    def _renew_bases(self, side: str, bases: dict[tuple[int, int], Tensor], skip: Tensor) -> None:
        """Turn the bases towards the eigenvectors of the means."""
        new = []
        for key, mean in self._unshard_flat(side, "mean").items():
            scale = mean.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny)
            damped = mean / scale + DAMPING * torch.eye(len(mean), device=mean.device)
            new.append(torch.where(skip, bases[key], torch.linalg.qr(damped @ bases[key]).Q))
        for param, basis in zip(self.params, self._shard_flat(side, new), strict=True):
            to_local(self.optimizer.state[param][f"{side}_basis"]).copy_(basis)


def _float(moment: Tensor) -> Tensor:
    """Return the float32 values of a momentum of any state dtype, in new memory."""
    return moment.dequantize() if is_quantized(moment) else moment.to(torch.float32, copy=True)


def _rotate(matrix: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    """Return a matrix in the bases; None: the identity."""
    matrix = matrix if rows is None else rows.mT @ matrix
    return matrix if columns is None else matrix @ columns


def _rotate_back(matrix: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    matrix = matrix if rows is None else rows @ matrix
    return matrix if columns is None else matrix @ columns.mT
