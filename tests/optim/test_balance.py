"""Expert load balancing: updates of the biases, and the counted tokens."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from weft.models.decoder import Decoder
from weft.models.decoder_config import DecoderConfig
from weft.models.moe import moe_layers
from weft.optim.balance import ExpertBalancer


class OneRank:
    """A mesh with one rank."""

    router_axes = ()

    def get_group(self, axis: str) -> OneRank:
        return self

    def size(self) -> int:
        return 1

    def all_reduce_dp_cp(self, value: torch.Tensor) -> torch.Tensor:
        return value


def model(
    rate: float = 0.01, scope: Literal["sequence", "global"] = "sequence"
) -> tuple[Decoder, ExpertBalancer]:
    torch.manual_seed(0)
    config = DecoderConfig(
        num_layers=3,
        dim=16,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        num_experts=8,
        active_experts=2,
        expert_dim=8,
        dense_layers=1,
        ffn_dim=16,
        vocab_size=64,
        max_seq_len=64,
        router_aux_loss_coef=0.1,
        router_aux_loss_scope=scope,
    )
    created = Decoder(config)
    return created, ExpertBalancer([created], moe_layers, rate, OneRank(), torch.device("cpu"))  # type: ignore[arg-type]


ONE = torch.tensor(1.0)
APPLIED = torch.tensor(False)
TOKENS = torch.arange(64).view(2, 32)


def test_balance_biases_move_against_the_error_by_the_rate() -> None:
    created, balance = model()
    created(TOKENS)
    loads_LE, _ = balance.reduce()
    assert loads_LE.sum(1).tolist() == [128, 128]  # 64 tokens, two experts each
    balance.update(APPLIED)
    for loads_E, layer in zip(loads_LE, moe_layers(created), strict=True):
        wanted_E = 0.01 * (16 - loads_E).sign()
        torch.testing.assert_close(layer.router.expert_bias, wanted_E.float())
    worst = balance.measure()[:, 0].max().item()
    assert worst == pytest.approx(loads_LE.max().item() / 16)
    assert balance.layers == ["layers.1", "layers.2"]


def test_balance_loads_of_a_step_are_those_of_the_next_global_loss() -> None:
    created, balance = model(scope="global")
    created(TOKENS)
    loads_LE, _ = balance.reduce()
    balance.update(torch.tensor(False))
    for loads_E, layer in zip(loads_LE, moe_layers(created), strict=True):
        torch.testing.assert_close(1 + layer.router.excess_load, loads_E / 16)
    before = [layer.router.excess_load.clone() for layer in moe_layers(created)]
    loads_LE.fill_(1)
    balance.update(torch.tensor(True))
    assert all(map(torch.equal, before, [r.router.excess_load for r in moe_layers(created)]))
    balance.update(APPLIED)
    assert not any(layer.router.excess_load.any() for layer in moe_layers(created))
    created.to(torch.bfloat16)
    assert all(layer.router.excess_load.dtype == torch.float32 for layer in moe_layers(created))


def test_balance_bad_step_moves_nothing() -> None:
    created, balance = model()
    created(TOKENS)
    balance.update(torch.tensor(True))
    assert not any(layer.router.expert_bias.any() for layer in moe_layers(created))


def test_balance_recomputed_and_evaluated_tokens_are_not_counted() -> None:
    """Evaluation, recomputation and the previous batch do not count."""
    created, balance = model()
    with torch.no_grad():
        created(TOKENS)
    assert balance.reduce()[0].sum() == 0
    layer = moe_layers(created)[0]
    x = torch.randn(1, 10, 16, requires_grad=True)
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert balance.reduce()[0].sum(1).tolist() == [20, 0]
    balance.begin_passes(ONE)
    assert balance.reduce()[0].sum() == 0


def test_balance_experts_become_balanced() -> None:
    """Frozen routers prefer two experts; only the biases change."""
    created, balance = model(rate=0.01)
    x_ND = torch.randn(256, 16) + 1  # tokens have a common component
    layers = moe_layers(created)
    with torch.no_grad():
        for layer in layers:
            layer.router.weight[:2] += 0.1
    worst = []
    for _ in range(40):
        balance.begin_passes(ONE)
        for layer in layers:
            layer(x_ND.unsqueeze(0))
        worst.append(balance.measure()[:, 0].max().item())
        balance.update(APPLIED)
    assert worst[0] > 2
    assert worst[-1] < 1.3


def test_balance_without_experts_does_nothing() -> None:
    balance = ExpertBalancer([torch.nn.Linear(2, 2)], None, 0.0, OneRank(), torch.device("cpu"))  # type: ignore[arg-type]
    balance.begin_passes(ONE)
    balance.update(APPLIED)
    assert balance.reduce() == balance.measure().tolist() == []
