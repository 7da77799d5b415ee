"""Build the GPU kernels that torch.compile generates for shipped recipes, without a GPU.

    python benchmarks/gpu_kernels.py [--json] [--write] [RECIPE [KEY=VALUE ...]]

Inductor generates the kernels of a step on fake CUDA tensors, and Triton compiles them
(`tests.fake_cuda.kernels`).  Without a recipe, the steps of `RUNS`; ``--write`` then writes the
table to docs/gpu-kernels.md, which says how to install Triton.  The exit status is 1 if a kernel
does not build.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

from tests.fake_cuda import build_kernels

PAGE = Path(__file__).parent.parent / "docs" / "gpu-kernels.md"
ARCHITECTURES = (90, 100)
AT_ONCE = 2
# One block, because all blocks share their code.
RUNS: tuple[tuple[str, ...], ...] = (
    ("paper/llama3-8b-8gpu-compile", "model.num_layers=1"),
    ("paper/llama3-8b-8gpu-float8", "model.num_layers=1"),
    ("paper/llama3-70b-async-tp", "model.num_layers=1"),
    ("qwen3-30b-a3b", "model.num_layers=1", "compile.enable=true"),
    ("llama3-8b-finetune", "model.num_layers=1", "optim.state_dtype=bfloat16"),
    # The kernel for many lengths takes no limit of the scores: FlexAttention.
    ("llama3-8b-finetune", "model.num_layers=1", "model.attention_softcap=50"),
    ("stories-30m", "model.num_layers=1", "optim.state_dtype=8bit"),
)

Function = Mapping[str, Any]  # of `tests.fake_cuda.kernels.CompiledFunction`
Result = Mapping[int, Sequence[Function]]  # by architecture


def build_all(runs: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], Result]:
    """Build the kernels of each run for each architecture."""

    def build(run: tuple[str, ...], architecture: int) -> Sequence[Function]:
        return build_kernels(*run, architecture=architecture)

    both = list(product(runs, ARCHITECTURES))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        built = dict(zip(both, pool.map(build, *zip(*both, strict=True)), strict=True))
    return {run: {arch: built[run, arch] for arch in ARCHITECTURES} for run in runs}


def failures(result: Result) -> list[str]:
    """Describe each kernel that does not build."""
    return [
        f"sm_{architecture}: {function['function']}, {function['direction']}: "
        f"{kernel['name']}: {kernel['error']}"
        for architecture, functions in result.items()
        for function in functions
        for kernel in function["kernels"]
        if kernel["error"]
    ]


def table(results: Mapping[tuple[str, ...], Result]) -> Iterator[str]:
    """Yield the lines of the table: for each architecture a line of each function and pass."""
    yield "| recipe | function | pass | GPU | kernels | built | registers | spilled bytes "
    yield "| shared KiB | seconds |\n|---|---|---|---|---|---|---|---|---|---|\n"
    for run, result in results.items():
        for architecture, functions in result.items():
            for function in functions:
                kernels = function["kernels"]
                cells = [
                    "<br>".join(run),
                    f"`{function['function']}`",
                    function["direction"],
                    f"sm_{architecture}",
                    str(len(kernels)),
                    str(sum(not kernel["error"] for kernel in kernels)),
                    f"{maximum(kernels, 'registers')}",
                    f"{maximum(kernels, 'spilled_bytes'):,}",
                    f"{maximum(kernels, 'shared_bytes') / 1024:.0f}",
                    f"{function['seconds']:.0f}",
                ]
                yield f"| {' | '.join(cells)} |\n"


def maximum(kernels: Sequence[Mapping[str, Any]], key: str) -> int:
    """Return the maximum of a figure over kernels."""
    return max((kernel[key] for kernel in kernels), default=0)


def main() -> None:
    """Build the kernels, and print or write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", nargs="*", metavar="RECIPE [KEY=VALUE]", help="default: RUNS")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    parser.add_argument("--write", action="store_true", help="write the page; not with a recipe")
    options = parser.parse_args()
    if options.run and options.write:
        parser.error("--write is for all runs")
    began = time.monotonic()
    results = build_all([tuple(options.run)] if options.run else RUNS)
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    failed = [text for result in results.values() for text in failures(result)]
    if options.write:
        head = HEAD.format(date=date.today(), torch=version("torch"), triton=version("triton"))
        PAGE.write_text(head + "".join(table(results)), "utf-8")
    if options.json:
        print(json.dumps({" ".join(run): result for run, result in results.items()}))
    else:
        print("".join(table(results)), "\n".join(failed), sep="\n")
    sys.exit(bool(failed))


HEAD = """# Kernels for a GPU

This table shows that the kernels of compiled code build for Hopper (sm_90) and Blackwell (sm_100).
Inductor generates these Triton kernels for the blocks of a model, the loss and the update of a
low-precision optimizer. The table is made without a GPU: rank 0 of the recipe's world runs a step
on fake CUDA tensors (`tests/fake_cuda`), and Triton and `ptxas` compile the kernels. No kernel
runs, so the table does not show speed or results. `python benchmarks/gpu_kernels.py --write` makes
the table ({date}, PyTorch {torch}, Triton {triton}).

A kernel of a library computes [packed documents](speed.md#packed-documents), as it does causal
attention. FlexAttention computes the rest, such as a limit of the scores
(`model.attention_softcap`). For its backward pass on sm_100 weft takes PyTorch's tiles with twice
the threads (`FLEX_OPTIONS` in `weft/models/attention.py`). With PyTorch's own options, built on
2026-11-30, a thread of the backward pass spills 30,872 bytes instead of 704 in the run with
`model.attention_softcap` below, 792 instead of 0 in `olmo3-7b`, and 2,548 instead of 0 in
`stories-30m` with such a limit. The speed was not measured on a GPU.

- *Recipe*: with its changed keys. One block is enough, because all blocks share their code.
- *Kernels*: the different ones of a function and pass, also for several shapes. Matmuls, cuDNN's
  attention and collectives are calls of libraries, and not among them.
- *Registers* of a thread (at most 255), *spilled bytes* of a thread, *shared KiB* of a block of
  threads (at most 227): the largest of the kernels, each in its first configuration. On a GPU,
  inductor times all configurations.
- *Seconds* of a processor, for generating and building.

The check needs Triton, which PyTorch for CUDA brings and PyTorch for CPUs lacks. Triton has no
extra of weft, because its version must be the one that PyTorch's version requires: 3.7.1 for
PyTorch 2.13, 3.7.0 for 2.12, 3.6.0 for 2.11. Install it outside of the environment:

```
pip install --no-deps --target ~/triton triton==3.7.1
PYTHONPATH=~/triton python benchmarks/gpu_kernels.py
PYTHONPATH=~/triton python -m pytest tests/fake_cuda/test_kernels.py
```

Without Triton, the tests are skipped. Building needs `g++`, and no driver or CUDA toolkit.

"""


if __name__ == "__main__":
    main()
