"""The kernel of attention is the one that PyTorch's conditions leave."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend

from tests.fake_cuda.attention import Capability, Shapes, choose_backend

A100, ADA, H100, B200, RTX_5090 = (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)
LLAMA = Shapes((32, 8), (128, 128), (4096, 4096))
GEMMA = LLAMA._replace(head_dims=(256, 256))
DEEPSEEK = Shapes((128, 128), (192, 128), (4096, 4096))
CUDNN, FLASH = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
EFFICIENT, MATH = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH


@pytest.mark.parametrize(
    ("shapes", "capability", "expected"),
    [
        (LLAMA, A100, FLASH),
        (LLAMA, ADA, FLASH),
        (LLAMA, H100, CUDNN),
        (LLAMA, B200, CUDNN),
        (GEMMA, H100, CUDNN),
        (GEMMA, B200, FLASH),
        (DEEPSEEK, H100, CUDNN),
        (DEEPSEEK, B200, CUDNN),
        (DEEPSEEK._replace(head_dims=(192, 192)), B200, FLASH),
        (DEEPSEEK, RTX_5090, EFFICIENT),
        (DEEPSEEK, A100, EFFICIENT),
        (DEEPSEEK._replace(heads=(128, 64)), A100, MATH),
        (LLAMA._replace(head_dims=(208, 208)), ADA, MATH),  # not trained, with shared keys
        (LLAMA._replace(head_dims=(208, 208)), A100, FLASH),
        (LLAMA._replace(dtype=torch.float32), H100, MATH),
        (DEEPSEEK._replace(dtype=torch.float32), H100, EFFICIENT),
        (LLAMA._replace(head_dims=(512, 512)), H100, MATH),
        (LLAMA._replace(tokens=(1, 1)), H100, FLASH),
    ],
)
def test_choose_backend_follows_the_conditions_of_pytorch(
    shapes: Shapes, capability: Capability, expected: SDPBackend
) -> None:
    assert choose_backend(shapes, capability) == expected
