"""Data parallelism computes one process's gradients, with the collectives that it promises."""

from __future__ import annotations

from collections import Counter
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.harness import run_ranks
from weft.job import ParallelSection
from weft.models.llama import Llama, LlamaConfig, blocks, keep
from weft.parallel.shard import reshard, set_gradient_sync, shard

# No size but the norms' is a multiple of every group's, so that shards are padded.
CONFIG = LlamaConfig(
    num_layers=3,
    dim=24,
    num_heads=4,
    num_kv_heads=2,
    ffn_dim=42,
    vocab_size=61,
    max_seq_len=16,
    rope_scaling=False,
)
UNITS = 4  # three blocks and the root
ROWS, TOKENS = 16, 12
AXES = ("dp_replicate", "dp_shard")


class Layout(NamedTuple):
    replicas: int = 1
    shards: int = 2
    reshard_after_forward: bool | int = True
    sync: str = "step"
    node_size: int | None = None
    remat: bool = False
    microbatches: int = 2
    compute: torch.dtype = torch.float32
    keys: dict[str, Any] = {}  # of ParallelSection  # noqa: RUF012 - never changed

    @property
    def ranks(self) -> int:
        return self.replicas * self.shards


# --------------------------------------------------------------------------- in a rank


def build_model() -> Llama:
    """The same model everywhere, with gains that matter."""
    torch.manual_seed(1)
    model = Llama(CONFIG)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("norm.weight"):
                param.uniform_(0.5, 1.5)
    return model


def data() -> tuple[Tensor, Tensor]:
    """Tokens and targets, ``[ROWS, TOKENS]`` each."""
    generator = torch.Generator().manual_seed(2)
    shape = (2, ROWS, TOKENS)
    tokens_BT, targets_BT = torch.randint(CONFIG.vocab_size, shape, generator=generator)
    return tokens_BT, targets_BT


def loss_of(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """This part's share of the mean over the whole batch."""
    flat = logits_BTV.flatten(0, 1).float()
    return F.cross_entropy(flat, targets_BT.flatten(), reduction="sum") / (ROWS * TOKENS)


def recompute(module: nn.Module) -> None:
    """Checkpoint a module's activations, without a wrapper in its parameters' names."""
    module.forward = partial(checkpoint, module.forward, use_reentrant=False)


def build(layout: Layout, mesh: DeviceMesh | None = None, model: Llama | None = None) -> Llama:
    """The model, sharded."""
    if mesh is None:
        mesh = init_device_mesh("cpu", (layout.replicas, layout.shards), mesh_dim_names=AXES)
    model = model or build_model()
    if layout.remat:
        for block in blocks(model):
            recompute(block)
    shard(
        model,
        blocks(model),
        mesh,
        ParallelSection(**layout.keys),
        compute_dtype=layout.compute,
        reduce_dtype=torch.float32,
        reshard_after_forward=layout.reshard_after_forward,
        node_size=layout.node_size,
    )
    return model


def step(model: Llama, layout: Layout) -> Tensor:
    """Forward and backward of this rank's rows; its share of the loss."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokens_BT, targets_BT = (x[rank::ranks].chunk(layout.microbatches) for x in data())
    total = torch.zeros(())
    for i, (tokens, targets) in enumerate(zip(tokens_BT, targets_BT, strict=True)):
        set_gradient_sync(model, i == layout.microbatches - 1, layout.sync)  # type: ignore[arg-type]
        loss = loss_of(model(tokens), targets)
        loss.backward()
        total += loss.detach()
    return total


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    grads = {}
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor), f"{name} is still gathered"
        assert isinstance(param.grad, DTensor), f"{name} has no gradient"
        grads[name] = param.grad.full_tensor()
    return grads


class Seen(NamedTuple):
    """A collective."""

    kind: str
    ranks: tuple[int, ...]  # of its group
    numel: int  # that it was given
    dtype: torch.dtype


class Collectives(TorchDispatchMode):
    """Records every collective while it is entered."""

    KINDS = ("reduce_scatter", "allgather", "allreduce")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Seen] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            kind = next(kind for kind in self.KINDS if kind in func.__name__)
            group = next(a for a in args if isinstance(a, torch.ScriptObject))
            ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)))
            # all_reduce and the all_gather of lists take lists of tensors.
            given = args[0] if kind == "allreduce" else args[1]
            tensor = given[0] if isinstance(given, list) else given
            self.seen.append(Seen(kind, ranks, tensor.numel(), tensor.dtype))
        return func(*args, **(kwargs or {}))


# --------------------------------------------------------------------------- one process


def one_process() -> dict[str, Any]:
    model = build_model()
    tokens_BT, targets_BT = data()
    loss = loss_of(model(tokens_BT), targets_BT)
    loss.backward()
    grads = {name: param.grad for name, param in model.named_parameters()}
    return {"loss": loss.item(), "grads": grads}


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    return one_process()


def assert_equal(many: dict[str, Any], one: dict[str, Any], tolerance: float = 2e-6) -> None:
    """Gradients within ``tolerance`` of each one's largest element."""
    assert many["grads"].keys() == one["grads"].keys()
    for name, grad in one["grads"].items():
        scale = grad.abs().max()
        torch.testing.assert_close(
            many["grads"][name] / scale,
            grad / scale,
            rtol=0,
            atol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    if "loss" in many:
        assert many["loss"] == pytest.approx(one["loss"], rel=tolerance)


# --------------------------------------------------------------------------- gradients


def gradients(layouts: list[Layout]) -> list[dict[str, Any]]:
    """Of each layout, one step's loss and gradients, and its collectives."""
    found = []
    for layout in layouts:
        model = build(layout)
        with Collectives() as collectives:
            loss = step(model, layout)
        dist.all_reduce(loss)
        grads = whole_gradients(model)
        found.append({"loss": loss.item(), "grads": grads, "seen": collectives.seen})
    return found


PERSIST = {"persist_below": 100}  # the norms' gains have 24 elements, the matrices 288 or more
TWO_HOPS = Layout(replicas=2, shards=2, sync="microbatch")

LAYOUTS = {
    "one rank": Layout(shards=1),
    "one rank, 2 hops": Layout(shards=1, sync="microbatch"),
    "shards": Layout(shards=4),
    "replicas": Layout(replicas=4, shards=1),
    "replicas, 2 hops": Layout(replicas=4, shards=1, sync="microbatch"),
    "2 hops": TWO_HOPS,
    "to 2, each microbatch": Layout(shards=4, reshard_after_forward=2, sync="microbatch"),
    "to 2, one microbatch": Layout(shards=4, reshard_after_forward=2, microbatches=1),
    "to 1": Layout(shards=2, reshard_after_forward=1),
    "to all": Layout(shards=2, reshard_after_forward=2),
    "no prefetch": Layout(keys={"prefetch": 0}),
    "prefetch 2, 2 hops": TWO_HOPS._replace(keys={"prefetch": 2}),
    "prefetch more than there is": Layout(keys={"prefetch": 9}),
    "one microbatch": Layout(microbatches=1),
    "persist nothing, one microbatch": Layout(keys={"persist_below": CONFIG.dim}, microbatches=1),
    "persist, one microbatch": Layout(keys=PERSIST, microbatches=1),
    "persist, remat": Layout(keys=PERSIST, remat=True),
    "persist, remat, 2 hops": TWO_HOPS._replace(keys=PERSIST, remat=True),
    "persist all": Layout(keys={"persist_below": 10**6}, sync="microbatch"),
    "offload": Layout(keys={"cpu_offload": True}),
    "offload, 2 hops": TWO_HOPS._replace(keys={"cpu_offload": True}),
    "offload, persist, to 2": Layout(
        shards=4, keys={"cpu_offload": True, **PERSIST}, reshard_after_forward=2
    ),
    "hierarchical": Layout(shards=4, node_size=2, keys={"hierarchical_gather": True}),
    "hierarchical, to 2": Layout(
        shards=4, node_size=2, reshard_after_forward=2, keys={"hierarchical_gather": True}
    ),
}
M = 4  # microbatches of these, whose collectives are counted
LAYOUTS |= {
    f"{reshard}, {sync}": Layout(2, 2, reshard == "always", sync, microbatches=M)
    for reshard in ("always", "never")
    for sync in ("step", "microbatch")
}
LAYOUTS["always, microbatch, persist"] = LAYOUTS["always, microbatch"]._replace(keys=PERSIST)
ALL = {"hierarchical_gather": True, "prefetch": 2, "cpu_offload": True, **PERSIST}
LAYOUTS |= {
    "hierarchical, 4 nodes": Layout(shards=8, node_size=2, keys={"hierarchical_gather": True}),
    "hierarchical, 2 nodes": Layout(shards=8, node_size=4, keys={"hierarchical_gather": True}),
    "hierarchical, 2 hops": Layout(
        2, 4, node_size=2, sync="microbatch", keys={"hierarchical_gather": True}
    ),
    "to 2, 2 hops": Layout(2, 4, reshard_after_forward=2, sync="microbatch"),
    "everything": Layout(2, 4, 2, "microbatch", node_size=2, remat=True, keys=ALL),
    "everything, never": Layout(2, 4, False, "microbatch", node_size=2, keys=ALL),
}


@cache
def results(names: tuple[str, ...]) -> dict[str, list[dict[str, Any]]]:
    """What every rank has of each layout.  They share a world, which takes as long as several."""
    layouts = [LAYOUTS[name] for name in names]
    ranks = run_ranks(gradients, layouts[0].ranks, layouts, timeout=110)
    return dict(zip(names, zip(*ranks, strict=True), strict=True))


def result(name: str) -> list[dict[str, Any]]:
    ranks = LAYOUTS[name].ranks
    return results(tuple(n for n, layout in LAYOUTS.items() if layout.ranks == ranks))[name]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if layout.ranks > 4 else [])
        for name, layout in LAYOUTS.items()
    ],
)
def test_gradients_equal_one_process(name: str, one: dict[str, Any]) -> None:
    for many in result(name):
        assert_equal(many, one)


# --------------------------------------------------------------------------- collectives

BLOCKS = UNITS - 1
COUNTS = [
    # gathers, reduce-scatters, all-reduces; the root is gathered once.
    ("never, step", UNITS, UNITS, UNITS),
    ("never, microbatch", UNITS, M * UNITS, UNITS),
    ("always, microbatch", 2 * M * BLOCKS + 1, M * UNITS, UNITS),
    ("always, microbatch, persist", 2 * M * BLOCKS + 1, M * UNITS, UNITS),
    ("always, step", 2 * M * BLOCKS + 1, UNITS, UNITS),
]


@pytest.mark.parametrize(("name", "gathers", "scatters", "all_reduces"), COUNTS)
def test_a_step_has_as_many_collectives_as_promised(
    name: str, gathers: int, scatters: int, all_reduces: int
) -> None:
    """Were replicas synchronised with every microbatch, there would be M all-reduces a unit."""
    for many in result(name):
        found = Counter(kind for kind, *_ in many["seen"])
        assert found == {
            "allgather": gathers,
            "reduce_scatter": scatters,
            "allreduce": all_reduces,
        }


def test_two_hops_stay_inside_the_group_until_the_last_one() -> None:
    seen = result("2 hops")[3]["seen"]
    assert {ranks for kind, ranks, *_ in seen if kind == "allreduce"} == {(1, 3)}
    assert {ranks for kind, ranks, *_ in seen if kind != "allreduce"} == {(2, 3)}
    # The first of two microbatches is over before any all-reduce.
    kinds = [kind for kind, *_ in seen if kind != "allgather"]
    assert kinds == ["reduce_scatter"] * UNITS + ["reduce_scatter", "allreduce"] * UNITS


def test_backward_gathers_among_fewer_ranks() -> None:
    seen = result("to 2, one microbatch")[3]["seen"]
    gathers = [ranks for kind, ranks, *_ in seen if kind == "allgather"]
    # The root and the blocks forward, the blocks backward.
    assert gathers == [(0, 1, 2, 3)] * UNITS + [(2, 3)] * BLOCKS


def test_small_parameters_are_gathered_with_the_root() -> None:
    sizes = [
        [numel for kind, _, numel, _ in result(name)[0]["seen"] if kind == "allgather"]
        for name in (
            "one microbatch",
            "persist nothing, one microbatch",
            "persist, one microbatch",
        )
    ]
    gain = CONFIG.dim // 2  # on each of two ranks
    (root, *others), nothing, (root_with_gains, *others_without) = sizes
    assert nothing == [root, *others]
    assert root_with_gains == root + 2 * BLOCKS * gain  # two norms a block
    assert others_without == [size - 2 * gain for size in others]


def order(depth: int) -> str:
    """What follows what in a step: g gathers, f computes forward, r reduces gradients; of a block
    its number, of the root nothing."""
    model = build(Layout(microbatches=1, keys={"prefetch": depth}))

    def mark(name: str, *_: Any) -> None:
        with torch.profiler.record_function(f"f{name}"):
            pass

    for name, block in model.layers.items():
        block.self_attn.register_forward_pre_hook(partial(mark, name))
    with torch.profiler.profile() as profile:
        step(model, Layout(microbatches=1))
    letters = {"FSDP::all_gather": "g", "FSDP::post_backward_reduce": "r", "f0": "f0"}
    letters |= {f"f{i}": f"f{i}" for i in range(BLOCKS)}
    found = []
    for event in sorted(profile.events(), key=lambda event: event.time_range.start):
        what, _, unit = event.name.partition(" ")
        if what in letters:
            found.append(letters[what] + unit.strip("()").removeprefix("layers."))
    return " ".join(found)


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        (0, "g g0 f0 g1 f1 g2 f2  g2 r2 g1 r1 g0 r0 r"),
        (1, "g g0 g1 f0 g2 f1 f2  g2 g1 r2 g0 r1 r0 r"),
        (2, "g g0 g1 g2 f0 f1 f2  g2 g1 g0 r2 r1 r0 r"),
    ],
)
def test_prefetch_gathers_so_many_blocks_ahead(depth: int, expected: str) -> None:
    assert run_ranks(order, 2, depth)[0].split() == expected.split()


def dtypes() -> list[dict[str, Any]]:
    found = []
    for sync in ("step", "microbatch"):
        layout = Layout(2, 2, sync=sync, compute=torch.bfloat16)
        model = build(layout)
        computed: list[torch.dtype] = []
        model.layers["0"].register_forward_hook(
            lambda *a, computed=computed: computed.append(a[2].dtype)
        )
        with Collectives() as collectives:
            step(model, layout)
        grads = whole_gradients(model)
        found.append(
            {
                "computed": set(computed),
                "collectives": {(kind, dtype) for kind, _, _, dtype in collectives.seen},
                "kept": {tensor.dtype for tensor in [*model.parameters(), *grads.values()]},
                "grads": grads,
            }
        )
    return found


def test_bfloat16_computes_low_and_reduces_high(one: dict[str, Any]) -> None:
    for many in run_ranks(dtypes, 4)[0]:
        assert many["computed"] == {torch.bfloat16}
        assert many["kept"] == {torch.float32}
        assert many["collectives"] == {
            ("allgather", torch.bfloat16),
            ("reduce_scatter", torch.float32),
            ("allreduce", torch.float32),
        }
        assert_equal(many, one, 0.05)


class Table(nn.Module):
    """Takes a float32 table, like one of rotations."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.inner.forward = lambda table: table  # type: ignore[method-assign]

    def forward(self, table: Tensor) -> Tensor:
        inner: Tensor = self.inner(table)
        return inner


def table_dtype() -> torch.dtype:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=AXES)
    model = Table()
    shard(
        model,
        [model.inner],
        mesh,
        ParallelSection(),
        compute_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        reshard_after_forward=True,
        node_size=None,
    )
    return model(torch.ones(2)).dtype


def test_inputs_keep_their_dtype() -> None:
    assert run_ranks(table_dtype, 1) == [torch.float32]


# --------------------------------------------------------------------------- between steps


def evaluated(layout: Layout) -> dict[str, Any]:
    """Evaluation before and between steps, and parameters that move."""
    model = build(layout)
    tokens_BT, _ = data()

    def evaluate() -> Tensor:
        with torch.no_grad():
            logits_BTV = model(tokens_BT[:2])
        assert any(not isinstance(param, DTensor) for param in model.parameters())
        reshard(model)
        assert all(isinstance(param, DTensor) for param in model.parameters())
        return logits_BTV

    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    doubled = evaluate()
    step(model, layout)
    model.zero_grad()
    with torch.no_grad():
        for param in model.parameters():
            param.div_(2)
    logits = evaluate()
    step(model, layout)
    return {"doubled": doubled, "logits": logits, "grads": whole_gradients(model)}


@pytest.mark.parametrize(
    "layout",
    [Layout(keys=PERSIST), Layout(reshard_after_forward=False, sync="microbatch")],
    ids=["always", "never"],
)
def test_evaluation_leaves_nothing_gathered(layout: Layout, one: dict[str, Any]) -> None:
    tokens_BT, _ = data()
    alone = build_model()
    with torch.no_grad():
        logits = alone(tokens_BT[:2])
        for param in alone.parameters():
            param.mul_(2)
        doubled = alone(tokens_BT[:2])
    for many in run_ranks(evaluated, layout.ranks, layout):
        assert_equal(many, one)
        torch.testing.assert_close(many["logits"], logits)
        torch.testing.assert_close(many["doubled"], doubled)


def from_meta(layout: Layout) -> dict[str, Any]:
    """A model that is filled after it has been sharded."""
    filled = build_model()
    with torch.device("meta"):
        model = Llama(CONFIG)
    build(layout, model=model)
    model.to_empty(device="cpu")
    mesh = next(model.parameters()).device_mesh  # type: ignore[attr-defined]
    with torch.no_grad():
        for name, param in model.named_parameters():
            local = param.to_local()  # type: ignore[attr-defined]
            rows = filled.get_parameter(name).split(-(-len(param) // mesh.size()))
            if mesh.get_local_rank() < len(rows):
                local.copy_(rows[mesh.get_local_rank()])
    step(model, layout)
    return {"grads": whole_gradients(model)}


def test_from_the_meta_device(one: dict[str, Any]) -> None:
    layout = Layout(keys={**PERSIST, "cpu_offload": True})
    for many in run_ranks(from_meta, 2, layout):
        assert_equal(many, one)


def offloading() -> list[tuple[bool, bool]]:
    """Of each unit, whether its policy is to offload, and whether it pins memory."""
    model = build(Layout(keys={"cpu_offload": True}))
    policies = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            policy = module._get_fsdp_state()._fsdp_param_group.offload_policy  # type: ignore[union-attr]
            policies.append((isinstance(policy, CPUOffloadPolicy), policy.pin_memory))  # type: ignore[attr-defined]
    return policies


def test_offload_is_asked_of_every_unit() -> None:
    """On CPU it can be seen in no other way."""
    assert run_ranks(offloading, 2)[0] == [(True, False)] * UNITS


def plain_model() -> None:
    model = build_model()
    set_gradient_sync(model, False, "step")
    reshard(model)


def test_an_unsharded_model_is_left_alone() -> None:
    plain_model()


# --------------------------------------------------------------------------- larger meshes


# Units: the embedding, three blocks, the head.
TWO_STAGES = [range(0, 2), range(2, 5)]
FOUR_STAGES = [range(0, 1), range(1, 2), range(2, 3), range(3, 5)]


def pipeline(name: str, layout: Layout) -> dict[str, Any]:
    """Two pipeline ranks; the others share the rows and the parameters."""
    mesh = init_device_mesh("cpu", (2, *layout[:2]), mesh_dim_names=("pp", *AXES))
    kind: Any = get_schedule_class(name)
    ranges = TWO_STAGES if issubclass(kind, PipelineScheduleSingle) else FOUR_STAGES
    mine, group = mesh.get_local_rank("pp"), mesh.get_group("pp")
    stages = []
    for i in range(mine, len(ranges), 2):
        model = build_model()
        keep(model, ranges[i])
        build(layout, mesh[AXES], model)
        device = torch.device("cpu")
        stages.append(PipelineStage(model, i, len(ranges), device, group=group))
    schedule = kind(stages if len(stages) > 1 else stages[0], 4, loss_fn=loss_of, scale_grads=False)
    at = mesh[AXES].get_coordinate()
    index, ranks = at[0] * layout.shards + at[1], layout.ranks
    tokens_BT, targets_BT = (x[index::ranks].contiguous() for x in data())
    for _ in range(2):  # the second step finds what the first one left
        for stage in stages:
            stage.submod.zero_grad()
        schedule.step(*([tokens_BT] if mine == 0 else []), target=targets_BT)
    grads = {}
    for stage in stages:
        grads |= whole_gradients(stage.submod)
    return {"grads": grads}


PIPELINES = [
    ("1F1B", Layout(shards=2, reshard_after_forward=False)),
    ("1F1B", Layout(shards=2, keys={"prefetch": 2, **PERSIST})),
    ("1F1B", Layout(shards=4, reshard_after_forward=2)),
    ("Interleaved1F1B", Layout(shards=2, reshard_after_forward=False, keys=PERSIST)),
    pytest.param("Interleaved1F1B", Layout(shards=2, keys=PERSIST), marks=pytest.mark.slow),
    pytest.param(
        "InterleavedZeroBubble",
        Layout(shards=2, reshard_after_forward=False, keys=PERSIST),
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "Interleaved1F1B",
        Layout(2, 2, False, keys={"cpu_offload": True, **PERSIST}),
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "Interleaved1F1B",
        Layout(1, 4, False, node_size=2, keys={"hierarchical_gather": True}),
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("name", "layout"), PIPELINES)
def test_pipeline_stages(name: str, layout: Layout, one: dict[str, Any]) -> None:
    parts = run_ranks(pipeline, 2 * layout.ranks, name, layout)
    for first, last in zip(parts[: layout.ranks], parts[layout.ranks :], strict=True):
        assert_equal({"grads": first["grads"] | last["grads"]}, one)


def middle_stage() -> None:
    """A part with neither embedding nor head: the root has nothing of its own."""
    rows_BTD = torch.randn(ROWS, TOKENS, CONFIG.dim, requires_grad=True)
    alone = build_model()
    keep(alone, range(2, 3))
    alone(rows_BTD).square().sum().backward()
    for keys in ({}, PERSIST):
        model = build_model()
        keep(model, range(2, 3))
        layout = Layout(keys=keys, microbatches=1)
        build(layout, model=model)
        mine_BTD = rows_BTD.detach()[dist.get_rank() :: 2].requires_grad_()
        set_gradient_sync(model, True, "step")
        model(mine_BTD).square().sum().backward()
        assert_equal(
            {"grads": whole_gradients(model)},
            {"grads": {name: param.grad for name, param in alone.named_parameters()}},
        )
        torch.testing.assert_close(mine_BTD.grad, rows_BTD.grad[dist.get_rank() :: 2])  # type: ignore[index]


def test_a_stage_without_embedding_and_head() -> None:
    run_ranks(middle_stage, 2)


# --------------------------------------------------------------------------- refusals


def refused() -> None:
    def refuse(layout: Layout, message: str, ranks: list[int], tensor_parallel: bool) -> None:
        shape = torch.tensor(ranks).view(1, 4, 1)
        mesh = DeviceMesh("cpu", shape, mesh_dim_names=(*AXES, "tp"))
        model = build_model()
        if tensor_parallel:
            plan = {f"layers.{i}.mlp.gate_proj": ColwiseParallel() for i in range(BLOCKS)}
            parallelize_module(model, mesh["tp"], plan)
        with pytest.raises(ValueError, match=message):
            build(layout, mesh[AXES], model)

    hierarchical = Layout(node_size=3, keys={"hierarchical_gather": True})
    divide = "= 3: does not divide the 4"
    ordered = [0, 1, 2, 3]
    refuse(Layout(reshard_after_forward=3), f"reshard_after_forward {divide}", ordered, False)
    refuse(hierarchical, f"node_size {divide}", ordered, False)
    refuse(Layout(reshard_after_forward=2), "tensor-parallel", ordered, True)
    refuse(Layout(), "must ascend", [0, 2, 1, 3], False)


def test_impossible_groups_are_refused() -> None:
    run_ranks(refused, 4)
