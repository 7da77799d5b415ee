"""LoRA: the same adapters, gradients and frozen weights under every layout, and PEFT's."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.layouts import parse
from tests.small import Overrides, gradients, merged
from weft.models.llama import Init
from weft.parallel import lora

MODEL: Overrides = [
    ("model.num_layers", "4"),
    ("model.tied_embeddings", "false"),
    ("data.packing", "documents"),
    ("train.microbatch", "1"),
    ("lora.rank", "4"),
]
TOLERANCE = 1e-5
EXPERIMENT = 1


def adapter_gradients(overrides: Overrides, store: str) -> dict[str, Any]:
    """`gradients`, with adapters whose B is not zero, so that A has gradients."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(lora.INIT, "lora_B", Init("fan_in"))
        return gradients(overrides, store)
