"""Measure on a GPU what decides between two ways to compute the same.

    python benchmarks/gpu_choices.py [--small] [gemms products optimizer loss attention graphs]

- ``gemms``: one matmul of 8B in bfloat16 and float8, with a scale per tensor and per row.
- ``products``: queries, keys and values of a block, and gate and up, as separate matmuls or as one.
- ``optimizer``: a step of AdamW on the shards of Llama 3.1 8B over eight ranks, by its moments.
- ``loss``: cross-entropy of a chunked output layer, eager or compiled.
- ``attention``: kernels of causal attention, forward and backward.
- ``graphs``: a compiled block of a small and of a large model, launched or replayed as a CUDA
  graph.

``--small`` runs tiny shapes, also on a CPU, as a test of this file.  Shapes are those of Llama 3.1
8B with a microbatch of one sequence of 8,192 tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from weft.config.schema import OptimSection
from weft.models.decoder import Decoder
from weft.models.families.llama import PRESETS
from weft.optim.optimizer import build_adamw
from weft.parallel.float8 import apply_float8
from weft.planning.devices import GIB
from weft.training.loss import chunk_tokens, cross_entropy, linear_cross_entropy
from weft.training.setup import fastest_attention

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
MIN_SECONDS = 0.5


def measure(run: Callable[[], object]) -> tuple[float, float]:
    """Return the median milliseconds of a call to its end, and until it returns to the host."""
    for _ in range(3):
        run()
    ends: list[float] = []
    returns: list[float] = []
    synchronize()
    stop = time.perf_counter() + MIN_SECONDS
    while time.perf_counter() < stop or len(ends) < 5:
        start = time.perf_counter()
        run()
        returns.append(time.perf_counter() - start)
        synchronize()
        ends.append(time.perf_counter() - start)
    return 1e3 * statistics.median(ends), 1e3 * statistics.median(returns)


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def forward_backward(function: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], object]:
    """Return a function that computes outputs and the gradients of all inputs."""
    upstream = torch.randn_like(function(*inputs))
    return lambda: torch.autograd.grad(function(*inputs), inputs, upstream)


def show(name: str, run: Callable[[], object], flops: float = 0.0) -> None:
    milliseconds, host = measure(run)
    rate = f"{flops / milliseconds / 1e9:8,.0f} TFLOP/s" if flops else ""
    print(f"{name:<58} {milliseconds:9.3f} ms  host {host:8.3f} ms {rate}", flush=True)


def bfloat16(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)


# --------------------------------------------------------------------------- choices


def gemms(is_small: bool) -> None:
    """Time the forward matmuls of a block, without casts."""
    tokens, dim = (64, 64) if is_small else (8192, 4096)
    for name, k, n in (
        ("output", dim, dim),
        ("up", dim, 7 * dim // 2),
        ("down", 7 * dim // 2, dim),
    ):
        a, b, flops = bfloat16(tokens, k).detach(), bfloat16(n, k).detach(), 2 * tokens * k * n
        show(f"{name}, bfloat16", partial(torch.matmul, a, b.t()), flops)
        if not ON_GPU:
            continue
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        for kind, rows, columns in (("tensor", (), ()), ("row", (tokens, 1), (1, n))):
            for fast in (True, False):
                multiply = partial(
                    torch._scaled_mm,
                    a8,
                    b8,
                    torch.ones(rows, device=DEVICE),
                    torch.ones(columns, device=DEVICE),
                    out_dtype=torch.bfloat16,
                    use_fast_accum=fast,
                )
                accumulation = "fast" if fast else "precise"
                show(f"{name}, float8, a scale per {kind}, {accumulation} sums", multiply, flops)


class Products(nn.Module):
    """Products of one input, by matrices of which each is a module, or all are one."""

    def __init__(self, dim: int, widths: tuple[int, ...], is_joint: bool) -> None:
        super().__init__()
        sizes = (sum(widths),) if is_joint else widths
        self.widths = widths
        self.layers = nn.ModuleList(
            nn.Linear(dim, n, bias=False, device=DEVICE, dtype=torch.bfloat16) for n in sizes
        )

    def forward(self, x: Tensor) -> Tensor:
        outs = [layer(x) for layer in self.layers]
        if len(outs) == 1:
            outs = list(outs[0].split(self.widths, -1))
        # An elementwise consumer, as rotation and the gate are, so that a split costs what it does.
        return sum((F.silu(out).sum(-1) for out in outs), torch.zeros((), device=DEVICE))


def products(is_small: bool) -> None:
    tokens, dim = (64, 64) if is_small else (8192, 4096)
    cases = {"q, k, v": (dim, dim // 4, dim // 4), "gate, up": (dim * 7 // 2, dim * 7 // 2)}
    for name, widths in cases.items():
        for float8 in (False, True) if ON_GPU and not is_small else (False,):
            for is_joint in (False, True):
                model = Products(dim, widths, is_joint)
                if float8:
                    apply_float8(
                        model, "tensorwise", [n for n, _ in model.named_modules()][2:], False
                    )
                compiled: Any = torch.compile(model, dynamic=False)
                x = bfloat16(1, tokens, dim)
                weights: list[Tensor] = list(model.parameters())
                run = partial(_gradients, compiled, x, weights)
                kind = "float8" if float8 else "bfloat16"
                label = f"{name} {kind}, {'one product' if is_joint else 'separate'}"
                show(label, run, 6 * tokens * dim * sum(widths))


def _gradients(model: Any, x: Tensor, weights: list[Tensor]) -> object:
    return torch.autograd.grad(model(x).sum(), [x, *weights])


def shards_of_8b(is_small: bool) -> Iterator[Tensor]:
    """Yield the parameters' shards of one of eight ranks."""
    config = PRESETS["8b"].model_copy(update={"num_layers": 2} if is_small else {})
    with torch.device("meta"):
        model = Decoder(config)
    for param in model.parameters():
        rows = max(1, param.shape[0] // (4096 if is_small else 8))
        yield torch.zeros((rows, *param.shape[1:]), device=DEVICE)


def optimizer(is_small: bool) -> None:
    for dtype in ("float32", "bfloat16", "8bit"):
        params = [nn.Parameter(shard) for shard in shards_of_8b(is_small)]
        group: dict[str, Any] = {"params": params, "weight_decay": 0.1}
        section = OptimSection(state_dtype=dtype)  # type: ignore[arg-type]
        adamw = build_adamw([group], section)
        for param in params:
            param.grad = torch.randn_like(param)
        start = time.perf_counter()
        adamw.step()
        synchronize()
        first = time.perf_counter() - start
        show(f"AdamW {dtype}, {len(params)} shards (first step {first:.1f} s)", adamw.step)


def loss(is_small: bool) -> None:
    tokens, dim, vocab = (64, 64, 512) if is_small else (8192, 4096, 128256)
    x, weight = bfloat16(1, tokens, dim), bfloat16(vocab, dim)
    targets = torch.randint(0, vocab, (1, tokens), device=DEVICE)
    for compiled in (False, True):
        loss_fn = partial(cross_entropy, compiled=compiled)
        chunk = chunk_tokens(tokens, vocab, compiled)

        def run(loss_fn: Any = loss_fn, chunk: int = chunk) -> object:
            total, _ = linear_cross_entropy(x, weight, targets, loss_fn, chunk)
            return torch.autograd.grad(total, (x, weight))

        run()
        memory = ""
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run()
            memory = f", {(torch.cuda.max_memory_allocated() - before) / GIB:.2f} GiB"
        name = f"output layer and loss, {'compiled' if compiled else 'eager'}{memory}"
        show(name, run, 6 * tokens * dim * vocab)


def attention(is_small: bool) -> None:
    for tokens in (64,) if is_small else (8192, 32768):
        q, k, v = (bfloat16(1, heads, tokens, 128) for heads in (32, 8, 8))
        call = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
        for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
            if not ON_GPU:
                continue
            with sdpa_kernel(SDPBackend.__members__[name]):
                run = forward_backward(call, q, k, v)
                show(f"attention of {tokens}, {name}", run, 7 * tokens**2 * 32 * 128)
        with fastest_attention(DEVICE):
            run = forward_backward(call, q, k, v)
            show(f"attention of {tokens}, as a run", run, 7 * tokens**2 * 32 * 128)


def graphs(is_small: bool) -> None:
    """Time a block's forward and backward, launched by the host and replayed as a CUDA graph."""
    sizes = {"toy": 64} if is_small else {"30m": 512, "350m": 1024, "8b": 8192}
    for preset, tokens in sizes.items():
        config = PRESETS[preset].model_copy(update={"num_layers": 1, "vocab_size": 512})
        with torch.device(DEVICE):
            model = Decoder(config).to(torch.bfloat16)
            cos, sin = model.rope(tokens, None, torch.bfloat16)
        block: Any = torch.compile(model.layers["0"], dynamic=False)
        x = bfloat16(1, tokens, config.dim)
        with fastest_attention(DEVICE):
            run = forward_backward(lambda x, b=block, c=cos, s=sin: b(x, c, s, None), x)
            show(f"block of {preset}, {tokens} tokens, launched", run)
            if not ON_GPU:
                continue
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            show(f"block of {preset}, {tokens} tokens, CUDA graph", graph.replay)


CHOICES = {f.__name__: f for f in (gemms, products, optimizer, loss, attention, graphs)}


def main() -> None:
    global MIN_SECONDS
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("choices", nargs="*", choices=[*CHOICES, []], default=[])
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    MIN_SECONDS = 0.05 if options.small else MIN_SECONDS
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if ON_GPU else 'CPU'}")
    for name in options.choices or CHOICES:
        CHOICES[name](options.small)


if __name__ == "__main__":
    main()
