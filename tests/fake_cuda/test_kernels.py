"""The kernels that torch.compile generates for shipped recipes build for Hopper and Blackwell."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from benchmarks.gpu_kernels import ARCHITECTURES, PAGE, RUNS, failures
from tests import fake_cuda

pytestmark = [pytest.mark.system, pytest.mark.timeout(700)]

BLOCK = {("DecoderBlock.forward", "forward"), ("DecoderBlock.forward", "backward")}
LOSS = {("_sum_exponentials", "forward"), ("_logits_gradient", "forward")}
EXPERTS = {("Experts.forward", "forward"), ("Experts.forward", "backward")}
UPDATE = {("update_all", "forward")}
UPDATES = {"optim.state_dtype=bfloat16": UPDATE, "optim.state_dtype=8bit": UPDATE}
SOFTCAP = "model.attention_softcap=50"  # of FlexAttention


def build_kernels(*run: str, architecture: int, fault: str = "") -> list[dict[str, Any]]:
    """Build kernels; skip the test where something for it is not installed."""
    pytest.importorskip("triton", reason="needs Triton; docs/gpu-kernels.md installs it")
    if shutil.which("g++") is None:
        pytest.skip("needs g++ for the fake device")
    return fake_cuda.build_kernels(*run, architecture=architecture, fault=fault)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("run", RUNS, ids=[" ".join((run[0], run[-1])) for run in RUNS])
def test_kernels_build(run: tuple[str, ...], architecture: int) -> None:
    functions = build_kernels(*run, architecture=architecture)
    assert failures({architecture: functions}) == []
    expected = BLOCK.union(LOSS, *(UPDATES.get(override, set()) for override in run))
    expected |= EXPERTS if run[0] == "qwen3-30b-a3b" else set()
    assert {(f["function"], f["direction"]) for f in functions} == expected
    for function in functions:
        names = [kernel["name"] for kernel in function["kernels"]]
        assert names
        # FlexAttention's kernels come from templates; no other template is chosen.
        is_flex = SOFTCAP in run and (function["function"], function["direction"]) in BLOCK
        assert sum(name.startswith("triton_tem_") for name in names) == is_flex


OWN_OPTIONS = """
from weft.models import attention
attention.FLEX_OPTIONS = {}
"""


@pytest.mark.slow
def test_options_of_flex_attention_spill_less_than_those_of_pytorch_on_blackwell() -> None:
    spilled = []
    for fault in ("", OWN_OPTIONS):
        run = ("llama3-8b-finetune", "model.num_layers=1", SOFTCAP)
        functions = build_kernels(*run, architecture=100, fault=fault)
        spilled.append(max(k["spilled_bytes"] for f in functions for k in f["kernels"]))
    assert 10 * spilled[0] < spilled[1]


NO_SUCH_FUNCTION = """
from torch._inductor.codegen.triton import TritonOverrides
TritonOverrides.sigmoid = staticmethod(lambda x: f"tl.no_such_function({x})")
"""


@pytest.mark.slow
def test_fault_kernel_that_does_not_build_is_found() -> None:
    run = ("paper/llama3-8b-8gpu-compile", "model.num_layers=1")
    (text,) = failures({90: build_kernels(*run, architecture=90, fault=NO_SUCH_FUNCTION)})
    assert text.startswith("sm_90: DecoderBlock.forward, backward: triton_poi_fused_")
    assert "no_such_function" in text


NO_LOWERING = """
from torch._inductor import lowering
import torch
lowering.lowerings[torch.ops.aten.mm.default] = lambda *args, **options: 1 / 0
"""


@pytest.mark.slow
def test_fault_function_without_code_is_found() -> None:
    run = ("paper/llama3-8b-8gpu-compile", "model.num_layers=1")
    with pytest.raises(RuntimeError, match=r"DecoderBlock\.forward forward: .*ZeroDivisionError"):
        build_kernels(*run, architecture=90, fault=NO_LOWERING)


def test_page_has_all_runs() -> None:
    """``python benchmarks/gpu_kernels.py --write`` makes the page."""
    page = PAGE.read_text("utf-8")
    for run in RUNS:
        assert f"| {'<br>'.join(run)} |" in page
