"""Count what one rank's training step of a recipe does on fake CUDA tensors.

The rank is rank 0 of the recipe's own world.  `weft.training.setup` builds it and
`weft.training.step` runs its microbatches; the gradient norm, clipping and the update follow as in
`weft.training.loop`.

*torch.compile.*  Dynamo captures blocks, loss and updates, and AOTAutograd makes and splits their
graphs, as for inductor.  In place of inductor, `GraphCounter` counts the operators of each graph,
applies inductor's pass for asynchronous tensor parallelism to a copy, and lets the graph run
operator by operator.

*Attention.*  PyTorch chooses the kernel in code that a CPU build lacks.  `choose_attention` and
`choose_kernel` choose as `tests.fake_cuda.attention` says for the device of the plan.

*Eager kernels* are operators that run one by one and launch at least one kernel.  Views, new
memory, queries of a tensor, marks of the profiler, waits and work on the CPU launch none.

*Documents.*  Their ids have values, on the host: documents of `DOCUMENT_TOKENS`, in every second
microbatch of a few more.  Code that is compiled again for other documents shows as another graph.

*Exposed collectives.*  FSDP's gather overlaps with the matmuls between its start and its use, and
its reduction with those between its start and what waits for it: the next reduction, or the end of
the backward pass.  Without any, its bytes are exposed.

*Host waits.*  An operator that would read a value of a fake tensor fails.  Those that PyTorch
allows are counted, as are blocking copies between host and device, and waits for events, streams
and the device.  Numbers of rows that the host
reads for experts are counted on their own; the answers are those of a plan.
"""

from __future__ import annotations

import copy
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_leaves

import weft
from tests.fake_cuda import device as fake_device
from tests.fake_cuda.attention import Shapes, choose_backend
from tests.fake_cuda.capture import CaptureCounter
from tests.fake_cuda.device import fake_cuda
from weft.checkpoint.state_dict import trainable_parameters
from weft.config.reader import read_job
from weft.config.schema import replace
from weft.estimate import stand_ins
from weft.estimate.op_recorder import COLLECTIVE_NAMESPACES, COLLECTIVES
from weft.estimate.private_trace import fake_process_group, find_group_name
from weft.estimate.trace import empty_batches
from weft.models import attention
from weft.models.attention import DEVICE_KERNELS
from weft.models.host_reads import document_starts, read_counts
from weft.monitor.anomaly import reduce_result
from weft.optim.optimizer import clip_scale, compute_grad_norm, masked_step
from weft.parallel import (
    apply,
    cuda_graphs,
    pass_overlap,
    private_schedules,
)
from weft.parallel import compile as compiling
from weft.parallel.backend import DEVICE_BACKEND, Backend
from weft.parallel.mesh import axis_by_group_name
from weft.planning.devices import find_device, parse_cluster
from weft.planning.plan import Plan
from weft.planning.plan_text import cluster_machine
from weft.planning.resolve import resolve
from weft.training import step as train_step
from weft.training.setup import Rank, build
from weft.training.step import batch_to

PACKAGE = f"{Path(weft.__file__).parent}/"
MATMULS = {"mm", "bmm", "addmm", "baddbmm", "_scaled_mm", "_grouped_mm"}
MATMULS |= {"scaled_grouped_mm"}
# Operators without a kernel, beside views: they make or describe memory, or order streams.
NO_KERNELS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"}
NO_KERNELS |= {
    "_unsafe_view",
    "_reshape_alias",
    "set_",
    "lift_fresh",
    "is_same_size",
    "wait_tensor",
}
NO_KERNELS |= {
    "record_stream",
    "_wrap_tensor_autograd",
    "copy_metadata",
    "is_pinned",
    "_pin_memory",
}
HOST_READS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select"}
FUSED = ("fused_all_gather_matmul", "fused_all_gather_scaled_matmul")
FUSED_SCATTERS = ("fused_matmul_reduce_scatter", "fused_scaled_matmul_reduce_scatter")
DOCUMENT_TOKENS = 3000
AMPERE = (8, 0)  # clusters.toml has the capabilities of newer devices
FSDP_GATHERS = ("_allgather_base_", "allgather_")
FSDP_REDUCTIONS = ("_reduce_scatter_base_", "allreduce_")
END_OF_BACKWARD = "FSDP::root_post_backward_callback"
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


@dataclass
class Graph:
    """A graph that torch.compile captured: its pass, operators, and exchanges before fusion."""

    kind: str  # forward or backward
    operators: int
    gathers: int
    fused_gathers: int
    scatters: int
    fused_scatters: int


@dataclass
class Step:
    """Counts of one step of a rank."""

    microbatches: int = 0
    async_tp: bool = False  # only then exchanges can be fused
    eager_kernels: int = 0  # of operators that run one by one, without captured graphs
    compiled_operators: int = 0  # of captured graphs
    optimizer_kernels: int = 0  # of clipping and the update
    matmuls: Counter[str] = field(default_factory=Counter)  # by dtype
    attention: Counter[str] = field(default_factory=Counter)  # by operator
    float8_casts: Counter[str] = field(default_factory=Counter)  # eager and compiled
    collectives: Counter[str] = field(default_factory=Counter)  # by kind and axis
    megabytes: Counter[str] = field(default_factory=Counter)  # of collectives, unsharded
    exposed_megabytes: Counter[str] = field(default_factory=Counter)  # of FSDP's collectives
    overlapped_exchanges: int = 0  # of experts, with a matmul between their start and their wait
    prefetched: int = 0  # FSDP's gathers that a matmul overlaps
    fsdp_gathers: int = 0
    host_copies: Counter[str] = field(default_factory=Counter)  # by direction
    host_waits: Counter[str] = field(default_factory=Counter)  # by line of weft
    row_reads: int = 0  # of numbers of rows, by the host
    graphs: list[Graph] = field(default_factory=list)
    capture: dict[str, Any] | None = None  # of CUDA graphs, in the steps before this one

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, with sorted keys."""
        result: dict[str, Any] = {}
        for name, value in vars(self).items():
            if value is None:
                continue
            if isinstance(value, Counter):
                result[name] = {key: round(value[key]) for key in sorted(value)}
            else:
                result[name] = [asdict(g) for g in value] if name == "graphs" else value
        return result


def line_of_weft() -> str:
    """Return the innermost line of weft that is running."""
    frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(PACKAGE)]
    if not frames:
        return "outside of weft"
    return f"{frames[-1].filename.removeprefix(PACKAGE)}: {frames[-1].line}"


def launches_kernel(func: Any, tensors: Sequence[Tensor]) -> bool:
    """Return True if an operator launches a kernel on the device."""
    name = func.overloadpacket.__name__
    if func.namespace in ("prim", "profiler") or name in NO_KERNELS or func.is_view:
        return False
    return any(tensor.device.type == "cuda" for tensor in tensors)


def storage_of(tensor: Tensor) -> int:
    """Return a key of the memory of a fake tensor."""
    key: int = tensor.untyped_storage()._cdata
    return key


class Pending(NamedTuple):
    """A collective of FSDP that has started.

    Attributes:
        key: its kind and axis.
        megabytes: unsharded.
        matmuls: number of matmuls before its start.
    """

    key: str
    megabytes: float
    matmuls: int


class StepCounter(TorchDispatchMode):
    """Count operators while it is active."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.step = Step()
        self.axes: dict[str, str] = {}  # by group name
        self.depth = 0  # of running captured graphs
        self.is_compiling = False  # inductor's passes run operators
        self.in_optimizer = False
        self.gathers: deque[Pending] = deque()  # of FSDP, whose result is not yet used
        self.exchanges: dict[int, int] = {}  # matmuls before the start, by storage
        self.reductions: list[Pending] = []  # of FSDP, for which nothing has waited yet
        self.marks: list[str] = []  # names of the profiler's running marks
        self.capture = CaptureCounter(line_of_weft)

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Let dynamo capture code in this mode."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):
            if func.name() == "graphsafe_run_with_rng_state":  # attention with a random state
                inner, *rest = args
                with self:
                    return inner(*rest, **{k: v for k, v in kwargs.items() if k != "rng_state"})
            if func.name().startswith("flex_attention") and not self.is_compiling:
                self.step.attention[func.name()] += 1
            out = func(*args, **kwargs)
            if not self.is_compiling:
                self.capture.count_operator(func.name(), (args, kwargs), out, True)
            return out
        if func is document_starts:
            return read_documents(*args)
        if answer := stand_ins.HOST_READS.get(func):
            self.step.row_reads += func is read_counts
            return answer(*args)
        out = func(*args, **kwargs)
        if not self.is_compiling:
            self._count(func, args, kwargs, out)
        return out

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        step, name = self.step, func.overloadpacket.__name__
        if self.depth:
            step.compiled_operators += 1
        tensors = [leaf for leaf in tree_leaves((args, out)) if isinstance(leaf, Tensor)]
        launches = launches_kernel(func, tensors)
        step.eager_kernels += launches and not self.depth
        step.optimizer_kernels += launches and self.in_optimizer
        self.capture.count_operator(name, (args, kwargs), out, launches)
        self._count_overlap(name, args, out)
        if func.namespace in COLLECTIVE_NAMESPACES:
            if (kind := COLLECTIVES.get(name)) is not None:
                key = f"{kind} {self.axes.get(find_group_name(args), 'all ranks')}"
                step.collectives[key] += 1
                size = max((t.numel() * t.element_size() for t in tensors), default=0)
                step.megabytes.update({key: size / 1e6})  # type: ignore[dict-item]
                if name in FSDP_GATHERS:
                    step.fsdp_gathers += 1
                    self.gathers.append(Pending(key, size / 1e6, step.matmuls.total()))
                elif name in FSDP_REDUCTIONS:
                    self.wait_for_reductions(key)
                    self.reductions.append(Pending(key, size / 1e6, step.matmuls.total()))
            if name == "all_to_all_single":
                self.exchanges[storage_of(out)] = step.matmuls.total()
            elif name == "wait_tensor":
                num_matmuls = step.matmuls.total()
                started = self.exchanges.pop(storage_of(args[0]), num_matmuls)
                step.overlapped_exchanges += started < num_matmuls
        elif name in MATMULS:
            is_float8 = "Float8" in type(tensors[0]).__name__ or "scaled" in name
            dtype = "float8" if is_float8 else str(tensors[0].dtype).removeprefix("torch.")
            step.matmuls[dtype] += 1
        elif "attention" in name or name.startswith("flex"):
            step.attention[name] += 1
        elif name in HOST_READS:
            self.add_wait()
        elif name in ("_to_copy", "convert_element_type", "device_put"):
            target = kwargs.get("dtype", args[1] if len(args) > 1 else None)
            if str(target).removeprefix("torch.") in FLOAT8 and target != tensors[0].dtype:
                step.float8_casts["compiled" if self.depth else "eager"] += 1
            source, destination = tensors[0].device.type, tensors[-1].device.type
            if source != destination:
                step.host_copies[f"{source} to {destination}"] += 1
                self.capture.count_copy(f"{source} to {destination}")
                if True not in (kwargs.get("non_blocking"), *args[2:]):
                    self.add_wait()

    def add_wait(self) -> None:
        """Count a wait of the host."""
        self.step.host_waits[line_of_weft()] += 1
        self.capture.count_wait()

    def _count_overlap(self, name: str, args: tuple[Any, ...], out: Any) -> None:
        """Count collectives of FSDP that end before a matmul runs, and gathers that do not."""
        if name == "split_with_sizes_copy" and self.gathers:
            gather = self.gathers.popleft()
            self._add_exposed(gather)
            self.step.prefetched += gather.matmuls < self.step.matmuls.total()
        elif name == "_record_function_enter_new":
            self.marks.append(args[0])
        elif name == "_record_function_exit" and self.marks.pop() == END_OF_BACKWARD:
            self.wait_for_reductions()

    def wait_for_reductions(self, key: str = "") -> None:
        """Wait for the reductions of FSDP, or for those of a kind and axis."""
        for reduction in [r for r in self.reductions if r.key == (key or r.key)]:
            self.reductions.remove(reduction)
            self._add_exposed(reduction)

    def _add_exposed(self, pending: Pending) -> None:
        if pending.matmuls == self.step.matmuls.total():
            exposed: Any = {pending.key: pending.megabytes}
            self.step.exposed_megabytes.update(exposed)


class GraphCounter:
    """A backend of torch.compile that counts graphs and runs them operator by operator."""

    def __init__(self, counter: StepCounter, async_tp: bool) -> None:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch._inductor.decomposition import select_decomp_table

        self.counter, self.async_tp = counter, async_tp
        self.functions: dict[Any, Any] = {}
        self.backend = aot_autograd(
            fw_compiler=self._compiler("forward"),
            bw_compiler=self._compiler("backward"),
            decompositions=select_decomp_table(),
            partition_fn=min_cut_rematerialization_partition,
            keep_inference_input_mutations=True,
        )

    def _compiler(self, kind: str) -> Callable[..., Any]:
        from torch._functorch._aot_autograd.utils import make_boxed_func

        def compile_graph(graph: Any, inputs: Sequence[Any]) -> Any:
            self.counter.is_compiling = True
            self.counter.step.graphs.append(count_graph(kind, graph, inputs, self.async_tp))
            self.counter.is_compiling = False

            def run(*args: Any) -> Any:
                self.counter.depth += 1
                try:
                    return graph.forward(*args)
                finally:
                    self.counter.depth -= 1

            return make_boxed_func(run)

        return compile_graph

    def apply_compile(
        self, blocks: Sequence[nn.Module], _: str, options: Any = None, **shapes: Any
    ) -> None:
        """Stand in for `weft.parallel.compile.apply_compile`."""
        for block in blocks:
            own = options.get(block) if options else None
            block.forward = torch.compile(
                block.forward, **shapes, options=own, backend=self.backend
            )

    def compile_function(self, function: Callable[..., Any], dynamic: bool = False) -> Any:
        """Stand in for `weft.parallel.compile.compile_function`."""
        key = function, dynamic
        if key not in self.functions:
            self.functions[key] = torch.compile(
                function, dynamic=dynamic, fullgraph=True, backend=self.backend
            )
        return self.functions[key]


def count_graph(kind: str, graph: Any, inputs: Sequence[Any], async_tp: bool) -> Graph:
    """Count a captured graph; with ``async_tp`` also what inductor's pass fuses in it."""
    import torch._inductor.config as inductor_config
    from torch._guards import detect_fake_mode
    from torch._inductor.fx_passes import post_grad
    from torch._inductor.virtualized import V
    from torch.distributed import _symmetric_memory as symmetric_memory

    names = list(operator_names(graph))
    before, after = Counter(names), Counter(names)
    if async_tp:
        fused = copy.deepcopy(graph)
        with (
            symmetric_memory._test_mode(),
            inductor_config.patch(_micro_pipeline_tp=True),
            V.set_fake_mode(detect_fake_mode(inputs)),
        ):
            post_grad.view_to_reshape(fused)
            post_grad.post_grad_passes(fused, is_inference=False)
        after = Counter(operator_names(fused))
    return Graph(
        kind,
        len(names),
        before["all_gather_into_tensor"],
        sum(after[name] for name in FUSED),
        before["reduce_scatter_tensor"],
        sum(after[name] for name in FUSED_SCATTERS),
    )


def operator_names(graph: Any) -> Iterator[str]:
    """Yield the names of the operators of a graph, and of the graphs in it."""
    for module in graph.modules():
        for node in getattr(getattr(module, "graph", None), "nodes", ()):
            if node.op == "call_function":
                yield getattr(node.target, "overloadpacket", node.target).__name__


def choose_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, is_causal: bool = False, **options: Any
) -> Tensor:
    """Attend by the kernel that PyTorch would choose; with a mask, by its formula."""
    aten: Any = torch.ops.aten
    backend = None if attn_mask is not None else choose_constant(*list_shapes(q, k, v), is_causal)
    if backend == SDPBackend.CUDNN_ATTENTION.value:
        out = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, is_causal)[0]
    elif backend == SDPBackend.FLASH_ATTENTION.value:
        out = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]
    elif backend == SDPBackend.EFFICIENT_ATTENTION.value:
        out = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, is_causal)[0]
    else:
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, is_causal=is_causal, **options
        )
    result: Tensor = out
    return result


def choose_kernel(
    q: Tensor, k: Tensor, v: Tensor, *args: Any, is_causal: bool = False, **options: Any
) -> int:
    """Choose as ``torch._fused_sdp_choice`` does on the device."""
    choice: int = choose_constant(*list_shapes(q, k, v), is_causal)
    return choice


def list_shapes(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """Return the values of `Shapes` before the last."""
    heads, widths = (q.shape[1], k.shape[1]), (k.shape[3], v.shape[3])
    return heads, widths, (q.shape[2], k.shape[2]), q.dtype


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def choose_constant(*shapes: Any) -> int:
    """Choose for `Shapes`; dynamo does not trace it."""
    return int(choose_backend(Shapes(*shapes), torch.cuda.get_device_capability()).value)


def read_documents(documents_BT: Tensor) -> list[int]:
    """Read document ids on the host, which a fake tensor mode would make fake."""
    if isinstance(documents_BT, FakeTensor):
        return stand_ins.one_document(documents_BT)
    with _disable_current_modes():
        starts: list[int] = document_starts(documents_BT)
    return starts


def document_ids(plan: Plan, microbatch: int) -> Tensor | None:
    """Return document ids of a microbatch, with values; None without documents."""
    if not plan.job.data.keeps_documents:
        return None
    num_tokens = min(DOCUMENT_TOKENS, plan.seq_len // 3) + 50 * (microbatch % 2)
    ids_T = torch.arange(plan.seq_len) // num_tokens
    return ids_T.repeat(plan.microbatch_size, 1)


def plan_recipe(recipe: str, overrides: Sequence[tuple[str, str]]) -> Plan:
    """Return the plan of a recipe on its own cluster, with few microbatches.

    Two microbatches, or one for each pipeline rank, do everything that a step does.  DualPipeV
    needs one for each stage.
    """
    job, _, errors = read_job(recipe, list(overrides))
    errors.raise_any()
    machine = cluster_machine(parse_cluster(job.run.cluster))
    plan = resolve(job, machine, recipe)
    num_microbatches = max(2, plan.pp * (2 if plan.schedule_name == "DualPipeV" else 1))
    if plan.num_microbatches > num_microbatches:
        size = plan.dp_size * plan.microbatch_size * num_microbatches
        plan = resolve(replace(job, train={"global_batch_size": size}), machine, recipe)
    return plan


def find_capability(plan: Plan) -> tuple[int, int]:
    """Return the compute capability of the plan's devices."""
    found = find_device(cluster_machine(parse_cluster(plan.job.run.cluster)))
    assert found is not None
    return found.capability if any(found.capability) else AMPERE


def run_in_turns(main: Callable[[], None], other: Callable[[], None]) -> None:
    """Stand in for `weft.parallel.pass_overlap.run_in_turns`: both threads have the same modes."""
    modes = _get_current_dispatch_mode_stack()

    def other_with_modes() -> None:
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            other()

    pass_overlap.run_in_turns(main, other_with_modes)


@contextmanager
def build_on_fake_cuda(plan: Plan, counter: StepCounter) -> Iterator[tuple[Any, FakeTensorMode]]:
    """Build rank 0 of the plan; its step may run in the context."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    device = torch.device("cuda", 0)

    def allocate(*args: Any) -> None:
        with mode:
            DEVICE_BACKEND.allocate(*args)

    backend = Backend(
        allocate=allocate,
        init_params=lambda *args: None,
        attention=DEVICE_KERNELS._replace(plain=choose_attention),
    )
    graphs = GraphCounter(counter, plan.async_tp)
    replacements: list[tuple[Any, str, Any]] = [
        (apply, "apply_compile", graphs.apply_compile),
        (compiling, "compile_function", graphs.compile_function),
        (torch, "_fused_sdp_choice", choose_kernel),
        (Tensor, "pin_memory", lambda tensor: tensor),
        (apply, "enable_async_tp", lambda group: None),
        (
            attention,
            "_compiled_flex_attention",
            lambda: graphs.compile_function(flex_attention, True),
        ),
        (fake_device.Stream, "clock", counter.capture.clock),
        (train_step, "CudaDevice", lambda: counter.capture),
        (cuda_graphs, "WARMUP_STEPS", 1),
        (private_schedules, "run_in_turns", run_in_turns),
        (Tensor, "__deepcopy__", lambda tensor, memo: tensor),  # AOTAutograd copies constants
    ]
    with ExitStack() as stack:
        for owner, name, value in replacements:
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(fake_cuda(mode, counter.add_wait))
        stack.enter_context(fake_process_group(0, plan.world_size, keep_sent=True))
        built = build(plan, Rank(0, 0, plan.world_size, device), backend)
        counter.axes = axis_by_group_name(built.mesh)
        yield built, mode


def count_captures(built: Any, batches: Sequence[Any], counter: StepCounter) -> dict[str, Any]:
    """Capture the graphs of a step and replay them once; return what was counted."""
    counted, counter.step = counter.step, Step()
    for _ in range(3):  # without graphs; capture; replay
        with counter:
            built.train_step.forward_backward([each.map(torch.clone) for each in batches])
            counter.wait_for_reductions()
        for part in built.model_parts:
            part.zero_grad()
    counter.step, capture = counted, counter.capture
    numbers = {"captures": capture.num_captures, "replays": capture.num_replays}
    return numbers | {"obstacles": dict(capture.obstacles)}


def count_step(plan: Plan, capability: tuple[int, int] | None = None) -> Step:
    """Run one step of rank 0 of the plan, and count it.

    Args:
        plan: of the step.
        capability: of the device; None: of the plan's.
    """
    counter = StepCounter()
    counter.step.microbatches, counter.step.async_tp = plan.num_microbatches, plan.async_tp
    documents = [document_ids(plan, index) for index in range(plan.num_microbatches)]
    with (
        patch.object(fake_device, "CAPABILITY", capability or find_capability(plan)),
        build_on_fake_cuda(plan, counter) as (built, mode),
        mode,
    ):
        params = [param for _, param in trainable_parameters(built.model_parts)]
        device = torch.device("cuda", 0)
        batches = [
            batch_to(batch, device)._replace(documents_BT=ids_BT)
            for batch, ids_BT in zip(empty_batches(plan), documents, strict=True)
        ]
        if plan.cuda_graphs:
            counter.step.capture = count_captures(built, batches, counter)
        with counter:
            loss = built.train_step.forward_backward(batches)
            counter.wait_for_reductions()
            result = reduce_result(loss, *compute_grad_norm(params, built.pp_group))
            counter.in_optimizer = True
            is_bad = ~result.loss_and_norm.isfinite().all()
            scale = clip_scale(result.grad_norm, plan.job.optim.max_grad_norm)
            masked_step(built.optimizer, is_bad, scale)
            for hook in built.train_step.hooks:
                hook.update(is_bad)
    return counter.step
