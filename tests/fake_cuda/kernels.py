"""Build the kernels that inductor generates for a GPU, on a machine without one.

A step of a recipe runs on fake CUDA tensors, as in `tests.fake_cuda.step`.  Every call of
torch.compile goes to inductor, with all its passes, and inductor generates CUDA code for one
architecture.  In place of the generated code, which nothing could run, the captured graph then runs
operator by operator.  Triton compiles each generated kernel in the first of the configurations that
inductor would time, and the ptxas of Triton's wheel assembles it.

This shows that the kernels build, not that they are right or fast.  Kernels of libraries, such as
matmuls and cuDNN's attention, are calls in the generated code and are not built here.
"""

from __future__ import annotations

import ast
import copy
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict, dataclass, field
from io import StringIO
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo.device_interface as device_interface
import torch._inductor.config as inductor_config
import triton
from torch._inductor import compile_fx
from torch._inductor.codecache import PyCodeCache
from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._subclasses import fake_tensor
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from triton.backends.compiler import GPUTarget

from tests.fake_cuda.step import count_step
from weft.planning.plan import Plan

NUM_MULTIPROCESSORS = {90: 132, 100: 148}  # of an H100 and a B200, by architecture
SHARED_BYTES = 227 * 1024  # that a block of threads can use, on both
USED = re.compile(r"Used (\d+) registers")
SPILLED = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass
class Kernel:
    """A Triton kernel, and what ptxas reports of it."""

    name: str
    registers: int = 0  # of a thread
    spilled_bytes: int = 0  # stores and loads of a thread
    shared_bytes: int = 0  # of a block of threads
    error: str = ""  # empty if it builds


@dataclass
class CompiledFunction:
    """A pass of a function that torch.compile compiled, once or for several shapes."""

    function: str
    direction: str  # forward or backward
    kernels: list[Kernel] = field(default_factory=list)  # different ones
    seconds: float = 0.0  # of generating and building, without capturing the graph


class KernelCollector:
    """A stand-in for torch.compile that collects what inductor generates."""

    def __init__(self) -> None:
        self.sources: dict[tuple[str, str], dict[str, str]] = {}  # of kernels, by their text
        self.seconds: dict[tuple[str, str], float] = {}
        self.code = ""  # the last that inductor generated
        self.torch_compile = torch.compile

    def compile(self, fn: Callable[..., Any], **options: Any) -> Any:
        """Stand in for torch.compile; a backend in the options is replaced."""
        owner = getattr(fn, "__self__", None)
        name = fn.__name__ if owner is None else f"{type(owner).__name__}.{fn.__name__}"

        def backend(graph: Any, inputs: Any, options: Any = None) -> Any:
            generate = self._inner_compile(name)
            return compile_fx.compile_fx(graph, inputs, generate, config_patches=options)

        return self.torch_compile(fn, **(options | {"backend": backend}))

    def _inner_compile(self, name: str) -> Callable[..., Any]:
        from torch._functorch._aot_autograd.utils import make_boxed_func

        def generate(graph: Any, inputs: Any, **options: Any) -> Any:
            key = (name, "backward" if options.get("is_backward") else "forward")
            began, self.code = processor_seconds(), ""
            # Inductor changes the graph, and reports the strides of its outputs.
            try:
                compile_fx.compile_fx_inner(copy.deepcopy(graph), inputs, **options)
            except Exception as error:
                reason = str(error).splitlines()[0]
                raise RuntimeError(f"inductor fails for {' '.join(key)}: {reason}") from error
            self.seconds[key] = self.seconds.get(key, 0.0) + processor_seconds() - began
            self.sources.setdefault(key, {}).update(find_kernels(self.code))
            return make_boxed_func(graph.forward)

        return generate

    def compile_to_module(self, graph: GraphLowering) -> Any:
        """Stand in for the method of inductor that loads the generated code."""
        self.code = graph.codegen()[0].value
        return SimpleNamespace(call=lambda inputs: None)


def find_kernels(code: str) -> Iterator[tuple[str, str]]:
    """Yield the text, without its own name, and the source of the kernels in generated code."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "async_compile.triton":
            name, source = (ast.literal_eval(argument) for argument in node.args[:2])
            yield source.replace(name, ""), source


def build_kernel(source: str) -> Kernel:
    """Compile a kernel in its first configuration that fits into shared memory."""
    (name,) = re.findall(r"^def (triton_\w+)\(", source, re.MULTILINE)
    kernel = Kernel(name)
    triton_compile = triton.compile

    def compile_logged(*args: Any, **options: Any) -> Any:
        with redirect_stdout(StringIO()) as log:
            binary = triton_compile(*args, **options)
        assert binary.asm["cubin"][:4] == b"\x7fELF"
        assert binary.metadata.target == triton.runtime.driver.active.get_current_target()
        used, spilled = USED.search(log.getvalue()), SPILLED.search(log.getvalue())
        assert used is not None, log.getvalue()
        assert spilled is not None, log.getvalue()
        kernel.registers, kernel.shared_bytes = int(used[1]), binary.metadata.shared
        kernel.spilled_bytes = sum(map(int, spilled.groups()))
        return binary

    try:
        autotuner = getattr(PyCodeCache.load(source), name)
        with patch.object(triton, "compile", compile_logged):
            for configuration in autotuner.configs:
                autotuner._precompile_config(configuration)
                if kernel.shared_bytes <= SHARED_BYTES:
                    return kernel
        kernel.error = f"every configuration needs more than {SHARED_BYTES} bytes of shared memory"
    except Exception as error:
        kernel.error = f"{type(error).__name__}: {error}".splitlines()[-1]
    return kernel


class ConstantsOnCpu(TorchDispatchMode):
    """Compute on a CPU the constants that inductor computes on the device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        cpu = torch.device("cpu")
        args, kwargs = tree_map_only(torch.device, lambda _: cpu, (args, kwargs or {}))
        return func(*args, **kwargs)


@contextmanager
def inductor_for(architecture: int, collector: KernelCollector) -> Iterator[None]:
    """Let inductor generate code for a GPU of the architecture, such as 90.

    The context changes Triton's driver for good.
    """
    capability = divmod(architecture, 10)
    properties = SimpleNamespace(
        name="fake",
        major=capability[0],
        minor=capability[1],
        multi_processor_count=NUM_MULTIPROCESSORS[architecture],
        total_memory=80 << 30,
        L2_cache_size=50 << 20,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=SHARED_BYTES,
        shared_memory_per_multiprocessor=228 << 10,
    )
    cuda = device_interface.CudaInterface
    run = UniformValueConstantFolder.run

    def run_on_cpu(folder: Any, *args: Any, **options: Any) -> Any:
        with ConstantsOnCpu():
            return run(folder, *args, **options)

    replacements: list[tuple[Any, str, Any]] = [
        (torch, "compile", collector.compile),
        (torch.version, "cuda", "13.0"),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "is_bf16_supported", lambda **options: True),
        (torch.cuda, "get_device_properties", lambda *args: properties),
        (torch.cuda, "_exchange_device", lambda index: 0),
        (torch.cuda, "_maybe_exchange_device", lambda index: 0),
        # Dynamo has its own references to functions of torch.cuda.
        (cuda, "current_device", staticmethod(lambda: 0)),
        (cuda, "get_device_properties", staticmethod(lambda *args: properties)),
        # Fake tensors do not initialize the device, although it is available.
        (fake_tensor, "init_gpu_context", lambda device: None),
        (fake_tensor.FakeTensorMode, "avoid_device_init", True),
        (UniformValueConstantFolder, "run", run_on_cpu),
        (GraphLowering, "compile_to_module", lambda graph: collector.compile_to_module(graph)),
        (triton_helpers, "set_driver_to_gpu", lambda: None),
    ]
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", architecture, 32),
            get_current_device=lambda: 0,
            get_active_torch_device=lambda: torch.device("cuda", 0),
            get_device_capability=lambda *args: capability,
        )
    )
    with ExitStack() as stack:
        for owner, name, value in replacements:
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(inductor_config.patch(compile_threads=1))
        yield


def build_kernels(plan: Plan, architecture: int) -> list[CompiledFunction]:
    """Run a step of rank 0 of the plan, and build the kernels of what it compiles."""
    collector = KernelCollector()
    is_async = plan.async_tp
    with (
        inductor_for(architecture, collector),
        inductor_config.patch(_micro_pipeline_tp=is_async),
        symmetric_memory._test_mode() if is_async else nullcontext(),
    ):
        count_step(plan, divmod(architecture, 10))
        built: dict[str, Kernel] = {}
        functions = []
        for (name, direction), sources in collector.sources.items():
            began = processor_seconds()
            built |= {text: build_kernel(sources[text]) for text in sources.keys() - built.keys()}
            seconds = collector.seconds[name, direction] + processor_seconds() - began
            kernels = [built[text] for text in sources]
            functions.append(CompiledFunction(name, direction, kernels, round(seconds, 1)))
    return functions


def to_list(functions: list[CompiledFunction]) -> list[dict[str, Any]]:
    """Return JSON values."""
    return [asdict(function) for function in functions]


def processor_seconds() -> float:
    """Return the processor time of this process and of those that it waited for."""
    return sum(os.times()[:4])
