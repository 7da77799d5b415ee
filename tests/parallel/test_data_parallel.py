"""FSDP computes one process's gradients, with the documented collectives."""

from __future__ import annotations

from collections import Counter
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from tests.harness import run_ranks
from tests.parallel.sharded import (
    AXES,
    CONFIG,
    PERSIST,
    UNITS,
    Collectives,
    Layout,
    assert_equal,
    build,
    build_model,
    data,
    one_process,
    step,
    whole_gradients,
)
from weft.config.schema import ParallelSection
from weft.models.decoder import Decoder
from weft.parallel.data_parallel import apply_fsdp, reshard, set_gradient_sync
from weft.parallel.private import iter_fsdp_units


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Any]:
    return one_process()


# --------------------------------------------------------------------------- gradients


def gradients(layouts: list[Layout]) -> list[dict[str, Any]]:
    """Return each layout's loss, gradients and collectives of one step."""
    results = []
    for layout in layouts:
        model = build(layout)
        with Collectives() as collectives:
            loss = step(model, layout)
        dist.all_reduce(loss)
        grads = whole_gradients(model)
        results.append({"loss": loss.item(), "grads": grads, "seen": collectives.recorded})
    return results


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
    "no prefetch": Layout(keys={"fsdp_prefetch": 0}),
    "prefetch 2, 2 hops": TWO_HOPS._replace(keys={"fsdp_prefetch": 2}),
    "prefetch more than all": Layout(keys={"fsdp_prefetch": 9}),
    "one microbatch": Layout(microbatches=1),
    "persist none, one microbatch": Layout(
        keys={"param_persistence_threshold": CONFIG.dim}, microbatches=1
    ),
    "persist, one microbatch": Layout(keys=PERSIST, microbatches=1),
    "persist, activation_checkpoint": Layout(keys=PERSIST, activation_checkpoint=True),
    "persist, activation_checkpoint, 2 hops": TWO_HOPS._replace(
        keys=PERSIST, activation_checkpoint=True
    ),
    "persist all": Layout(keys={"param_persistence_threshold": 10**6}, sync="microbatch"),
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
M = 2  # microbatches of the layouts whose collectives are counted
LAYOUTS |= {
    f"{reshard}, {sync}": Layout(2, 2, reshard == "always", sync, microbatches=M)
    for reshard in ("always", "never")
    for sync in ("step", "microbatch")
}
LAYOUTS["always, microbatch, persist"] = LAYOUTS["always, microbatch"]._replace(keys=PERSIST)
ALL = {"hierarchical_gather": True, "fsdp_prefetch": 2, "cpu_offload": True, **PERSIST}
LAYOUTS |= {
    "hierarchical, 4 nodes": Layout(shards=8, node_size=2, keys={"hierarchical_gather": True}),
    "hierarchical, 2 nodes": Layout(shards=8, node_size=4, keys={"hierarchical_gather": True}),
    "hierarchical, 2 hops": Layout(
        2, 4, node_size=2, sync="microbatch", keys={"hierarchical_gather": True}
    ),
    "to 2, 2 hops": Layout(2, 4, reshard_after_forward=2, sync="microbatch"),
    "everything": Layout(2, 4, 2, "microbatch", node_size=2, activation_checkpoint=True, keys=ALL),
    "everything, never": Layout(2, 4, False, "microbatch", node_size=2, keys=ALL),
}


# Other layouts of the default suite, or `COVERED` in tests/layouts.py, include these techniques.
RARELY = {
    "shards",
    "replicas",
    "replicas, 2 hops",
    "to 2, each microbatch",
    "persist, activation_checkpoint, 2 hops",
    "offload, 2 hops",
    "hierarchical",
    "persist all",
    "prefetch 2, 2 hops",
    "one microbatch",
    "persist none, one microbatch",
    "to all",
    *(name for name, layout in LAYOUTS.items() if layout.ranks > 4),
}


@cache
def results(names: tuple[str, ...]) -> dict[str, list[dict[str, Any]]]:
    """Run layouts in one world, because creating a world is slow."""
    layouts = [LAYOUTS[name] for name in names]
    ranks = run_ranks(gradients, layouts[0].ranks, layouts, timeout=110)
    return dict(zip(names, zip(*ranks, strict=True), strict=True))


def result(name: str) -> list[dict[str, Any]]:
    kind = LAYOUTS[name].ranks, name in RARELY
    alike = (n for n, layout in LAYOUTS.items() if (layout.ranks, n in RARELY) == kind)
    return results(tuple(alike))[name]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in RARELY else []) for name in LAYOUTS],
)
def test_apply_fsdp_gradients_equal_one_process(name: str, one_rank: dict[str, Any]) -> None:
    for many in result(name):
        assert_equal(many, one_rank)


# --------------------------------------------------------------------------- collectives

BLOCKS, OTHERS = CONFIG.num_layers, UNITS - CONFIG.num_layers
COUNTS = [
    # All-gathers, reduce-scatters, all-reduces.  Embedding and head are gathered once.
    ("never, step", UNITS, UNITS, UNITS),
    ("never, microbatch", UNITS, M * UNITS, UNITS),
    ("always, microbatch", 2 * M * BLOCKS + OTHERS, M * UNITS, UNITS),
    # Small parameters of the blocks give the root parameters.
    ("always, microbatch, persist", 2 * M * BLOCKS + OTHERS + 1, M * (UNITS + 1), UNITS + 1),
    ("always, step", 2 * M * BLOCKS + OTHERS, UNITS, UNITS),
]


@pytest.mark.parametrize(("name", "gathers", "scatters", "all_reduces"), COUNTS)
def test_apply_fsdp_step_has_expected_number_of_collectives(
    name: str, gathers: int, scatters: int, all_reduces: int
) -> None:
    """Without reduction in two hops, each unit would need M all-reduces."""
    for many in result(name):
        actual = Counter(kind for kind, *_ in many["seen"])
        assert actual == {
            "allgather": gathers,
            "reduce_scatter": scatters,
            "allreduce": all_reduces,
        }


def test_apply_fsdp_two_hops_stay_in_the_group_until_the_last_microbatch() -> None:
    collectives = result("2 hops")[3]["seen"]
    assert {ranks for kind, ranks, *_ in collectives if kind == "allreduce"} == {(1, 3)}
    assert {ranks for kind, ranks, *_ in collectives if kind != "allreduce"} == {(2, 3)}
    # The first of two microbatches ends before any all-reduce.
    kinds = [kind for kind, *_ in collectives if kind != "allgather"]
    assert kinds == ["reduce_scatter"] * UNITS + ["reduce_scatter", "allreduce"] * UNITS


def test_apply_fsdp_backward_gathers_among_fewer_ranks() -> None:
    collectives = result("to 2, one microbatch")[3]["seen"]
    gathers = [ranks for kind, ranks, *_ in collectives if kind == "allgather"]
    # Forward gathers all units, backward gathers blocks.
    assert gathers == [(0, 1, 2, 3)] * UNITS + [(2, 3)] * BLOCKS


def test_apply_fsdp_small_parameters_of_blocks_are_gathered_with_the_root() -> None:
    sizes = [
        [numel for kind, _, numel, _ in result(name)[0]["seen"] if kind == "allgather"]
        for name in (
            "one microbatch",
            "persist none, one microbatch",
            "persist, one microbatch",
        )
    ]
    gain = CONFIG.dim // 2  # elements of a norm weight on each of two ranks
    one, nothing, (root, *others) = sizes
    assert nothing == one
    assert root == 2 * BLOCKS * gain  # two norms per block; without them it has no parameters
    assert len(others) == len(one) == 2 * BLOCKS + OTHERS
    lost = [a - b for a, b in zip(one, others, strict=True)]
    assert sorted(lost) == [0] * OTHERS + [2 * gain] * 2 * BLOCKS


def order(depth: int) -> str:
    """Return the order of a step: g gathers, f forwards, r reduces.

    A number is the block, e the embedding, h the head with its norm.
    """
    model = build(Layout(microbatches=1, keys={"fsdp_prefetch": depth}))

    def mark(name: str, *_: Any) -> None:
        with torch.profiler.record_function(f"f{name}"):
            pass

    for name, block in model.layers.items():
        block.self_attn.register_forward_pre_hook(partial(mark, name))
    model.lm_head.register_forward_pre_hook(partial(mark, "h"))
    with torch.profiler.profile() as profile:
        step(model, Layout(microbatches=1))
    letters = {"FSDP::all_gather": "g", "FSDP::post_backward_reduce": "r", "fh": "fh"}
    letters |= {f"f{i}": f"f{i}" for i in range(BLOCKS)}
    units = {"": "", "embed_tokens": "e", "norm, lm_head": "h"}
    units |= {f"layers.{i}": str(i) for i in range(BLOCKS)}
    results = []
    for event in sorted(profile.events(), key=lambda event: event.time_range.start):
        what, _, unit = event.name.partition(" ")
        if what in letters:
            results.append(letters[what] + units[unit.strip("()")])
    return " ".join(results)


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        (0, "ge g0 f0 g1 f1 g2 f2 gh fh  rh g2 r2 g1 r1 g0 r0 re"),
        (1, "ge g0 g1 f0 g2 f1 gh f2 fh  g2 rh g1 r2 g0 r1 r0 re"),
        (2, "ge g0 g1 g2 f0 gh f1 f2 fh  g2 g1 rh g0 r2 r1 r0 re"),
    ],
)
def test_apply_fsdp_prefetch_gathers_that_many_blocks_ahead(depth: int, expected: str) -> None:
    assert run_ranks(order, 2, depth)[0].split() == expected.split()


def dtypes() -> list[dict[str, Any]]:
    results = []
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
        results.append(
            {
                "computed": set(computed),
                "collectives": {(kind, dtype) for kind, _, _, dtype in collectives.recorded},
                "kept": {tensor.dtype for tensor in [*model.parameters(), *grads.values()]},
                "grads": grads,
            }
        )
    return results


def test_apply_fsdp_bfloat16_computes_low_and_reduces_in_float32(one_rank: dict[str, Any]) -> None:
    for many in run_ranks(dtypes, 4)[0]:
        assert many["computed"] == {torch.bfloat16}
        assert many["kept"] == {torch.float32}
        assert many["collectives"] == {
            ("allgather", torch.bfloat16),
            ("reduce_scatter", torch.float32),
            ("allreduce", torch.float32),
        }
        assert_equal(many, one_rank, 0.05)


class Table(nn.Module):
    """A block with a float32 table, such as rotary embeddings."""

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
    apply_fsdp(
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


def test_apply_fsdp_inputs_keep_their_dtype() -> None:
    assert run_ranks(table_dtype, 1) == [torch.float32]


# --------------------------------------------------------------------------- between steps


def train_and_evaluate(layout: Layout) -> dict[str, Any]:
    """Evaluate before and between steps that update parameters."""
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
def test_apply_fsdp_evaluation_leaves_nothing_gathered(
    layout: Layout, one_rank: dict[str, Any]
) -> None:
    tokens_BT, _ = data()
    single = build_model()
    with torch.no_grad():
        logits = single(tokens_BT[:2])
        for param in single.parameters():
            param.mul_(2)
        doubled = single(tokens_BT[:2])
    for many in run_ranks(train_and_evaluate, layout.ranks, layout):
        assert_equal(many, one_rank)
        torch.testing.assert_close(many["logits"], logits)
        torch.testing.assert_close(many["doubled"], doubled)


def from_meta(layout: Layout) -> dict[str, Any]:
    """Build a model that is initialized after it is sharded."""
    filled = build_model()
    with torch.device("meta"):
        model = Decoder(CONFIG)
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


def test_apply_fsdp_model_from_meta_device_gradients_equal_one_process(
    one_rank: dict[str, Any],
) -> None:
    layout = Layout(keys={**PERSIST, "cpu_offload": True})
    for many in run_ranks(from_meta, 2, layout):
        assert_equal(many, one_rank)


def offload_policies() -> list[tuple[bool, bool]]:
    """Return, per unit, whether it offloads and whether it pins memory."""
    model = build(Layout(keys={"cpu_offload": True}))
    policies = []
    for unit in iter_fsdp_units(model):
        group = unit._get_fsdp_state()._fsdp_param_group
        if group is not None:  # the root has no parameters
            policy = group.offload_policy
            policies.append((isinstance(policy, CPUOffloadPolicy), policy.pin_memory))  # type: ignore[attr-defined]
    return policies


def test_apply_fsdp_offload_policy_is_set_on_every_unit() -> None:
    """On a CPU, offload has no other visible effect."""
    assert run_ranks(offload_policies, 2)[0] == [(True, False)] * UNITS


def plain_model() -> None:
    model = build_model()
    set_gradient_sync(model, False, "step")
    reshard(model)


def test_reshard_unsharded_model_is_unchanged() -> None:
    plain_model()


# --------------------------------------------------------------------------- refusals


def try_impossible_groups() -> None:
    def refuse(layout: Layout, message: str, ranks: list[int]) -> None:
        mesh = DeviceMesh("cpu", torch.tensor(ranks).view(1, 4), mesh_dim_names=AXES)
        with pytest.raises(ValueError, match=message):
            build(layout, mesh, build_model())

    hierarchical = Layout(node_size=3, keys={"hierarchical_gather": True})
    divide = "=3 does not divide the 4"
    ordered = [0, 1, 2, 3]
    refuse(Layout(reshard_after_forward=3), f"reshard_after_forward{divide}", ordered)
    refuse(hierarchical, f"node_size{divide}", ordered)
    refuse(Layout(), "must ascend", [0, 2, 1, 3])


def test_apply_fsdp_impossible_groups_are_refused() -> None:
    run_ranks(try_impossible_groups, 4)
