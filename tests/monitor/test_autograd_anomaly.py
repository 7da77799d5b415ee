"""A NaN from the backward pass is reported with operator, layer and source line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.harness import RankError, run_ranks
from tests.layouts import parse
from tests.small import Overrides, train_rank
from weft.monitor.autograd_anomaly import BackwardNaN, trace_backward_nan

MODEL: Overrides = [
    ("model.num_layers", "4"),
    ("model.tied_embeddings", "false"),
    ("train.microbatch_size", "2"),
    ("train.steps", "3"),
    ("debug.autograd_anomaly", "true"),
]
# The root has an infinite derivative at zero: backward computes 0 times infinity.
LOCAL = """
from dataclasses import replace
from weft.models import FAMILIES

def build(config):
    model = FAMILIES["llama"].build(config)
    model.layers["2"].register_forward_hook(lambda block, args, x: x + (x * 0).sqrt())
    return model

FAMILY = replace(FAMILIES["llama"], build=build)
"""


@pytest.mark.parametrize(
    "layout",
    [
        "dp_shard2",
        pytest.param("dp_shard2 cp2 activation_checkpoint.mode=full", marks=pytest.mark.slow),
        pytest.param("pp2 pipeline.schedule=1F1B", marks=pytest.mark.slow),
    ],
)
def test_nan_in_backward_names_operator_and_layer(
    layout: str, store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_nan.py").write_text(LOCAL)
    monkeypatch.syspath_prepend(str(tmp_path))
    ranks, overrides = parse(f"{layout} model.kind=own_nan:FAMILY")
    with pytest.raises(RankError) as caught:
        run_ranks(
            train_rank,
            ranks,
            MODEL + overrides + [("run.dir", str(tmp_path))],
            str(store_path),
        )
    message = str(caught.value)
    path = f"{tmp_path}/own_nan.py:7"
    assert (
        "BackwardNaN: MulBackward0 of layers.2 produces NaN in the backward pass; "
        f"its forward call is at {path}" in message
    ), message


class Root(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sqrt()


@pytest.mark.filterwarnings("ignore:Error detected")
def test_nan_in_backward_names_the_first_nonfinite_output() -> None:
    layers = {"first": nn.Linear(2, 2), "second": Root(), "third": nn.Linear(2, 2)}

    def step() -> None:
        out = torch.full((2, 2), -1e6)
        for layer in layers.values():
            out = layer(out)
        out.sum().backward()

    for layer in (layers["first"], layers["third"]):
        nn.init.ones_(layer.weight)
    with pytest.raises(BackwardNaN) as caught, trace_backward_nan(layers, [2]):
        step()
    message = str(caught.value)
    assert message.startswith("AddmmBackward0 of third produces NaN")
    assert message.endswith("in the forward pass the output of second has NaN or Inf")


def test_trace_backward_nan_other_errors_are_unchanged() -> None:
    with pytest.raises(RuntimeError, match="another"), trace_backward_nan({}, []):
        raise RuntimeError("another")
    x = torch.tensor(2.0, requires_grad=True)
    with trace_backward_nan({}, []):
        (x * 3).backward()
    assert not torch.is_anomaly_enabled()
