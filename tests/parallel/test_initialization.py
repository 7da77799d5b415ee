"""Initial weights are equal in every layout, and have the documented distribution."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.harness import run_ranks
from weft.models.family import Init
from weft.parallel import initialization as init_module
from weft.parallel.initialization import init_params

NORMAL = Init("truncated_normal", 0.02)


class Matrix(nn.Module):
    """A module with one parameter, a DTensor if there is a mesh."""

    def __init__(self, shape: tuple[int, ...], mesh=None, placements=()) -> None:
        super().__init__()
        weight = torch.full(shape, float("nan"))
        if mesh is not None:
            weight = distribute_tensor(weight, mesh, placements)
        self.weight = nn.Parameter(weight)


def fill(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    model = Matrix(shape)
    init_params(model.named_parameters(), seed, lambda _: NORMAL)
    return model.weight.data


def shards(shape: tuple[int, ...], sizes: tuple[int, ...], dims: tuple[int | None, ...]):
    mesh = init_device_mesh("cpu", sizes)
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    model = Matrix(shape, mesh, placements)
    init_params(model.named_parameters(), 0, lambda _: NORMAL)
    assert isinstance(model.weight, DTensor)
    return model.weight.full_tensor()


@pytest.mark.parametrize(
    ("shape", "sizes", "dims"),
    [
        ((7, 5), (2,), (0,)),
        ((7, 5), (4,), (0,)),
        ((3, 5), (4,), (0,)),  # a rank that holds nothing
        ((7, 6), (2, 2), (0, 1)),
        ((8, 5), (2, 2), (None, 0)),
        ((9,), (4,), (0,)),
        ((3, 4, 5), (2,), (2,)),
    ],
)
def test_init_shards_equal_the_full_tensor(shape, sizes, dims) -> None:
    expected = fill(shape)
    for full in run_ranks(shards, math.prod(sizes), shape, sizes, dims):
        assert torch.equal(full, expected)


def test_init_is_independent_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = fill((50, 7))
    monkeypatch.setattr(init_module, "CHUNK_ELEMENTS", 20)
    assert torch.equal(fill((50, 7)), expected)


def test_init_has_the_given_distribution() -> None:
    values = fill((1000, 1000)).double() / 0.02
    # A normal distribution cut at 3 sigma has variance 1 - 2 * 3 * pdf(3) / (2 cdf(3) - 1).
    pdf = math.exp(-4.5) / math.sqrt(2 * math.pi)
    std = math.sqrt(1 - 6 * pdf / math.erf(3 / math.sqrt(2)))
    assert abs(values.mean()) < 5e-3
    assert values.std().item() == pytest.approx(std, rel=3e-3)
    assert values.abs().max() <= 3.0 + 1e-4
    assert values.abs().max() > 2.98
    # Neighbors in rows and columns are uncorrelated.
    for shifted in (values[:, 1:] * values[:, :-1], values[1:] * values[:-1]):
        assert abs(shifted.mean()) < 5e-3
    inside = (values.abs() < 1).double().mean().item()
    assert inside == pytest.approx(
        math.erf(1 / math.sqrt(2)) / math.erf(3 / math.sqrt(2)), abs=2e-3
    )


def test_init_depends_on_seed_and_name() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(99)), nn.Parameter(torch.zeros(99))

    model = Two()
    init_params(model.named_parameters(), 0, lambda _: NORMAL)
    assert not torch.isclose(model.a, model.b).any()
    assert not torch.isclose(fill((99,), seed=0), fill((99,), seed=1)).any()
    init_params(model.named_parameters(), 0, lambda _: Init("ones"))
    assert (model.a == 1).all()
