"""Grouped GEMMs in float8 equal a formula in float64; kernels get what they can read."""

from __future__ import annotations

import inspect
import math
import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torchao.prototype.mx_formats.utils import from_blocked

from weft.parallel import private
from weft.parallel.float8 import prepare_compiler
from weft.parallel.float8.experts import _PaddedRows, float8_grouped_linear

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")
E4M3 = torch.float8_e4m3fn


# --------------------------------------------------------------------------- the formula


def rounded(x: Tensor, dims: Any) -> Tensor:
    """Round to e4m3 with one power-of-two scale, rounded down, for all numbers along ``dims``."""
    amax = x.abs().amax(dims, keepdim=True).clamp(min=1e-12)
    scale = (448 / amax).log2().floor().exp2()
    return (x * scale).to(E4M3).double() / scale


def rounded_blocks(x: Tensor) -> Tensor:
    """Round to MXFP8: 32 neighbors of the last dim share a scale; the last block may be short."""
    if not x.numel():
        return x
    blocks = []
    for block in x.split(32, -1):
        amax = block.abs().amax(-1, keepdim=True)
        scale = (amax / 448).log2().ceil().clamp(min=-127).exp2()
        blocks.append((block / scale).to(E4M3).double() * scale)
    return torch.cat(blocks, -1)


def formula(
    recipe: str, x: Tensor, w: Tensor, g: Tensor, counts: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, input gradient and weight gradient, expert by expert, in float64."""
    x, w, g = x.double(), w.double(), g.double()
    outs, grads_x, grads_w = [], [], []
    if recipe == "tensorwise":
        x, g = rounded(x, (0, 1)), rounded(g, (0, 1))
    for xe, ge, we in zip(x.split(counts), g.split(counts), w, strict=True):
        if recipe == "tensorwise":
            w8 = rounded(we, (0, 1))
            terms = (xe, w8), (ge, w8), (ge, xe)
        elif recipe == "mxfp8":
            terms = (
                (rounded_blocks(xe), rounded_blocks(we)),
                (rounded_blocks(ge), rounded_blocks(we.T).T),
                (rounded_blocks(ge.T).T, rounded_blocks(xe.T).T),
            )
        else:
            high = recipe == "rowwise_with_gw_hp"
            columns = (ge, xe) if high or not len(xe) else (rounded(ge, 0), rounded(xe, 0))
            terms = (
                (rounded(xe, 1), rounded(we, 1)),
                (rounded(ge, 1), rounded(we, (0, 1) if high else 0)),
                columns,
            )
        outs.append(terms[0][0] @ terms[0][1].T)
        grads_x.append(terms[1][0] @ terms[1][1])
        grads_w.append(terms[2][0].T @ terms[2][1])
    return torch.cat(outs), torch.cat(grads_x), torch.stack(grads_w)


def draw(recipe: str, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Draw an input, weights and an output gradient whose magnitudes differ by row and column."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    unit = 32 if recipe == "mxfp8" else 16
    inputs, outputs = unit * rng.randint(1, 5), unit * rng.randint(1, 5)
    counts = [rng.choice((0, 0, 1, 2, 15, 16, 17, 31, 33, 70)) for _ in range(rng.randint(1, 7))]
    # One scale covers a ratio of about 2**14.
    width = 1.0 if recipe == "tensorwise" else 3.0

    def values(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=generator)
        for dim, size in enumerate(shape):
            sizes = [1] * len(shape)
            sizes[dim] = size
            x = x * torch.randn(sizes, generator=generator).mul(width / len(shape)).exp()
        return x.to(dtype)

    rows = sum(counts)
    return (
        values(rows, inputs),
        values(len(counts), outputs, inputs),
        values(rows, outputs),
        counts,
    )


def compute(recipe: str, x: Tensor, w: Tensor, g: Tensor, counts: list[int], emulate: bool) -> Any:
    """Return output, input gradient and weight gradient."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    out = float8_grouped_linear(x, w, torch.tensor(counts), recipe, emulate)
    return (out.detach(), *torch.autograd.grad(out, (x, w), g))


def check_equal(ours: Any, theirs: Any, dtype: torch.dtype) -> None:
    """Compare each row of each matrix, because magnitudes differ."""
    bound = 1e-5 if dtype == torch.float32 else 6e-3  # bfloat16 rounds a result by 2**-9
    for name, our, their in zip(("output", "grad_x", "grad_w"), ours, theirs, strict=True):
        assert our.dtype == dtype
        assert our.shape == their.shape
        limit = bound * their.norm(dim=-1) + 1e-9 * their.norm()
        assert ((our.double() - their).norm(dim=-1) <= limit).all(), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_expert_products_equal_the_formula(recipe: str) -> None:
    for seed in range(8):
        dtype = (torch.float32, torch.bfloat16)[seed % 2]
        x, w, g, counts = draw(recipe, seed, dtype)
        ours = compute(recipe, x, w, g, counts, emulate=True)
        check_equal(ours, formula(recipe, x, w, g, counts), dtype)


# --------------------------------------------------------------------------- the kernels


def read_tiles(flat: Tensor, rows: int, columns: int) -> Tensor:
    """Return scales from the tiles that kernels of SM100 read: 128 rows by 4 columns each."""
    scales = from_blocked(flat.view(torch.uint8).flatten(), rows, columns)
    return scales.contiguous().view(torch.float8_e8m0fnu).double()


def dequantize(x8: Tensor, scale: Tensor) -> Tensor:
    return x8.double() * scale.repeat_interleave(x8.shape[-1] // scale.shape[-1], -1)


def reference_kernel(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, ends: Tensor, fast: bool
) -> Tensor:
    """Compute ``torch._scaled_grouped_mm`` in float64 from the arguments of the kernel.

    Rows that the kernel does not write are NaN.
    """
    meta = [x.to("meta") for x in (a, b, a_scale, b_scale, ends)]
    strides = [x.stride() for x in (a, b)]
    meta[:2] = [x.as_strided(x.shape, stride) for x, stride in zip(meta[:2], strides, strict=True)]
    checked = torch._scaled_grouped_mm(*meta, out_dtype=torch.bfloat16, use_fast_accum=fast)
    is_mx = a_scale.dtype == torch.float8_e8m0fnu
    out = torch.full(checked.shape, math.nan, dtype=torch.float64)
    starts = [0, *ends.tolist()[:-1]]
    for e, (start, end) in enumerate(zip(starts, ends.tolist(), strict=True)):
        assert end > start
        assert (end - start) % (128 if is_mx else 16) == 0
        if b.dim() == 3:
            rows, matrix = a[start:end], b[e].t()
            if is_mx:
                columns = rows.shape[1] // 32
                row_scale = read_tiles(a_scale[start:end], len(rows), columns)
                matrix_scale = read_tiles(b_scale[e], len(matrix), columns)
            else:
                row_scale, matrix_scale = a_scale[start:end, None], b_scale[e][:, None]
            out[start:end] = dequantize(rows, row_scale) @ dequantize(matrix, matrix_scale).t()
            continue
        factors = []
        for x8, scale in ((a, a_scale), (b.t(), b_scale)):
            if is_mx:
                height = -(-len(x8) // 128) * 128  # of the tiles
                own = scale.flatten()[height * start // 32 : height * end // 32]
                own = read_tiles(own, len(x8), (end - start) // 32)
            else:
                own = scale[e * len(x8) : (e + 1) * len(x8), None]
            factors.append(dequantize(x8[:, start:end], own))
        out[e] = factors[0] @ factors[1].t()
    return out.to(torch.bfloat16)


@pytest.mark.parametrize("recipe", RECIPES)
def test_kernels_read_the_emulated_numbers(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels run on GPUs only, so a reading of their arguments computes their results."""
    monkeypatch.setattr(torch.ops.weft, "scaled_grouped_mm", reference_kernel)
    for seed in range(4):
        x, w, g, counts = draw(recipe, seed, torch.bfloat16)
        if sum(counts):
            ours = compute(recipe, x, w, g, counts, emulate=False)
            check_equal(ours, formula(recipe, x, w, g, counts), torch.bfloat16)


@pytest.mark.parametrize("recipe", RECIPES)
def test_kernels_accept_fake_tensors_of_any_group_size(recipe: str) -> None:
    """Nothing reads a group size, so the host does not wait for the device."""
    with FakeTensorMode():
        counts = torch.tensor([3, 0, 5])
        x = torch.randn(8, 64, dtype=torch.bfloat16, requires_grad=True)
        w = torch.randn(3, 96, 64, dtype=torch.bfloat16, requires_grad=True)
        out = float8_grouped_linear(x, w, counts, recipe, False)
        grad_x, grad_w = torch.autograd.grad(out, (x, w), torch.empty_like(out))
    assert (out.shape, grad_x.shape, grad_w.shape) == ((8, 96), x.shape, w.shape)


def test_frozen_experts_have_no_weight_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, g, counts = draw("rowwise", 1, torch.float32)
    monkeypatch.setattr(_PaddedRows, "multiply_columns", None)
    x.requires_grad_()
    out = float8_grouped_linear(x, w, torch.tensor(counts), "rowwise", True)
    (grad_x,) = torch.autograd.grad(out, x, g)
    assert grad_x.equal(grad_x.nan_to_num())


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_expert_products_are_equal_bit_for_bit(recipe: str) -> None:
    """A graph break would be an error."""
    x, w, g, counts = draw(recipe, 3, torch.bfloat16)
    torch._dynamo.reset()
    product = torch.compile(
        partial(float8_grouped_linear, recipe=recipe, emulate=True),
        fullgraph=True,
        backend="aot_eager",  # inductor takes minutes
    )
    x, w = x.requires_grad_(), w.requires_grad_()
    out = product(x, w, torch.tensor(counts))
    ours = (out.detach(), *torch.autograd.grad(out, (x, w), g))
    for our, their in zip(ours, compute(recipe, x, w, g, counts, emulate=True), strict=True):
        assert our.equal(their)


def test_compiled_expert_products_without_gradients_are_equal_bit_for_bit() -> None:
    """As in an evaluation, where Dynamo calls the forward function itself."""
    x, w, _, counts = draw("tensorwise", 3, torch.bfloat16)
    torch._dynamo.reset()
    product = torch.compile(
        partial(float8_grouped_linear, recipe="tensorwise", emulate=True),
        fullgraph=True,
        backend="eager",
    )
    with torch.no_grad():
        w = w.requires_grad_()
        out = product(x, w, torch.tensor(counts))
        assert out.equal(float8_grouped_linear(x, w, torch.tensor(counts), "tensorwise", True))


@pytest.mark.parametrize(
    "recipe",
    ["tensorwise", *(pytest.param(name, marks=pytest.mark.slow) for name in RECIPES[1:])],
)
def test_compiled_experts_with_any_number_of_rows_are_equal_bit_for_bit(recipe: str) -> None:
    """Two products share a graph, as those of gate and up do, and all row counts share it."""
    torch._dynamo.reset()
    product = partial(float8_grouped_linear, recipe=recipe, emulate=True)
    graphs = []

    def multiply(x: Tensor, gate: Tensor, up: Tensor, counts: Tensor) -> Tensor:
        return product(x, gate, counts) * product(x, up, counts)

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    _, w, _, _ = draw(recipe, 7, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    with torch._dynamo.config.patch(specialize_float=False):
        prepare_compiler(recipe)
        compiled = torch.compile(multiply, dynamic=True, backend=count)
        for most in (40, 7, 90):
            counts = torch.randint(0, most, (len(w),), generator=generator)
            x = torch.randn(int(counts.sum()), w.shape[2], generator=generator).bfloat16()
            results = []
            for function in (compiled, multiply):
                # Parameters have one size in a graph, so only rows vary.
                leaves = [x.clone().requires_grad_(), *map(torch.nn.Parameter, (w, w.flip(0)))]
                out = function(*leaves, counts)
                results.append((out, *torch.autograd.grad(out.float().square().sum(), leaves)))
            assert all(a.equal(b) for a, b in zip(*results, strict=True))
    assert len(graphs) == 1


def test_private_names_are_as_expected() -> None:
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    schema = torch.ops.aten._scaled_grouped_mm.default._schema
    names = ["self", "mat2", "scale_a", "scale_b", "offs", "bias", "scale_result", "out_dtype"]
    assert [a.name for a in schema.arguments] == [*names, "use_fast_accum"]
    assert "scaled_grouped_mm" in inspect.getsource(private.scaled_grouped_mm)
    assert list(inspect.signature(to_mx).parameters)[:4] == [
        "data_hp",
        "elem_dtype",
        "block_size",
        "scaling_mode",
    ]
    assert ScaleCalculationMode.RCEIL.value == "rceil"
