"""PyTorch internals are as `weft.parallel.private` expects."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import (
    _fsdp_init,
    _fsdp_param,
    _fsdp_param_group,
    _fsdp_state,
)
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining import stage as torch_stage
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, placement_types
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from tests.fake import counted_step
from tests.harness import run_ranks
from tests.small import plan_here, small_job, this_rank
from weft.estimate import private_trace
from weft.parallel import dtensor, private, private_schedules
from weft.parallel.collectives import c10d_functional
from weft.parallel.private import disable_recompile_limit
from weft.training.setup import build


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_without_fake_tensors_creates_real_tensors() -> None:
    with FakeTensorMode():
        with private.without_fake_tensors():
            assert torch.arange(3).tolist() == [0, 1, 2]
        assert isinstance(torch.arange(3), FakeTensor)


def test_detach_with_version_sees_later_changes_of_the_tensor() -> None:
    class Saving(TorchDispatchMode):  # type: ignore[no-untyped-call]
        saved: list[torch.Tensor]

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            self.saved = [private.detach_with_version(out), out.detach()]
            return out

    with Saving() as mode:
        result = torch.ones(2, requires_grad=True) * 2
    versions = [tensor._version for tensor in mode.saved]
    result.detach().add_(1)
    assert [tensor._version for tensor in mode.saved] == [versions[0] + 1, versions[1]]


def test_private_attention_operators_have_expected_schemas() -> None:
    """If this fails, PyTorch changed: compare what `block_attention` passes."""
    name = "_scaled_dot_product_"
    qkv = "Tensor query, Tensor key, Tensor value, "
    seq = "Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, "
    expected = {
        "cudnn_attention": (
            f"({qkv}Tensor? attn_bias, bool compute_log_sumexp, float dropout_p=0., "
            "bool is_causal=False, bool return_debug_mask=False, *, float? scale=None) -> "
            f"(Tensor output, Tensor logsumexp, {seq}Tensor philox_seed, Tensor philox_offset, "
            "Tensor debug_attn_mask)"
        ),
        "cudnn_attention_backward": (
            f"(Tensor grad_out, {qkv}Tensor out, Tensor logsumexp, Tensor philox_seed, "
            f"Tensor philox_offset, Tensor attn_bias, {seq}float dropout_p, bool is_causal, *, "
            "float? scale=None) -> (Tensor, Tensor, Tensor)"
        ),
        "flash_attention_for_cpu": (
            f"({qkv}float dropout_p=0., bool is_causal=False, *, Tensor? attn_mask=None, "
            "float? scale=None) -> (Tensor output, Tensor logsumexp)"
        ),
        "flash_attention_for_cpu_backward": (
            f"(Tensor grad_out, {qkv}Tensor out, Tensor logsumexp, float dropout_p, "
            "bool is_causal, *, Tensor? attn_mask=None, float? scale=None) -> "
            "(Tensor grad_query, Tensor grad_key, Tensor grad_value)"
        ),
        "flash_attention": (
            f"({qkv}float dropout_p=0., bool is_causal=False, bool return_debug_mask=False, *, "
            f"float? scale=None) -> (Tensor output, Tensor logsumexp, {seq}"
            "Tensor rng_state, Tensor unused, Tensor debug_attn_mask)"
        ),
        "flash_attention_backward": (
            f"(Tensor grad_out, {qkv}Tensor out, Tensor logsumexp, {seq}float dropout_p, "
            "bool is_causal, Tensor philox_seed, Tensor philox_offset, *, float? scale=None) -> "
            "(Tensor grad_query, Tensor grad_key, Tensor grad_value)"
        ),
        "efficient_attention": (
            f"({qkv}Tensor? attn_bias, bool compute_log_sumexp, float dropout_p=0., "
            "bool is_causal=False, *, float? scale=None) -> (Tensor output, "
            "Tensor log_sumexp, Tensor philox_seed, Tensor philox_offset)"
        ),
        "efficient_attention_backward": (
            f"(Tensor grad_out_, {qkv}Tensor attn_bias, Tensor out, Tensor logsumexp, "
            "Tensor philox_seed, Tensor philox_offset, float dropout_p, "
            "bool[4] grad_input_mask, bool is_causal=False, *, float? scale=None) -> "
            "(Tensor, Tensor, Tensor, Tensor)"
        ),
    }
    for operator, schema in expected.items():
        result = getattr(torch.ops.aten, name + operator).default._schema
        assert str(result) == f"aten::{name}{operator}{schema}"
    assert str(torch.ops.aten._fused_sdp_choice.default._schema) == (
        f"aten::_fused_sdp_choice({qkv}Tensor? attn_mask=None, float dropout_p=0., "
        "bool is_causal=False, *, float? scale=None, bool enable_gqa=False) -> int"
    )


def test_private_varlen_operators_have_expected_schemas() -> None:
    """If this fails, PyTorch changed: compare what `weft.models.varlen_attention` passes."""
    lengths = ["Tensor cum_seq_q", "Tensor cum_seq_k", "SymInt max_q", "SymInt max_k"]
    qkv = ["Tensor query", "Tensor key", "Tensor value"]
    options = ["float dropout_p", "bool is_causal"]
    limits = [
        *("float? scale=None", "SymInt? window_size_left=None"),
        "SymInt? window_size_right=None",
    ]
    optional = [length.replace("Tensor ", "Tensor? ") for length in lengths]
    saved = ["Tensor out", "Tensor logsumexp"]
    forward = [*qkv, *optional, *options, "bool return_debug_mask", "*", *limits]
    random_state = ["Tensor rng_state", "Tensor unused"]
    backward = ["Tensor grad_out", *qkv, *saved, *lengths, *options, *random_state, "*", *limits]
    results = {
        "forward": "Tensor output, Tensor softmax_logsumexp, Tensor rng_state, Tensor unused, "
        "Tensor debug_attn_mask",
        "backward": "Tensor, Tensor, Tensor",
    }
    for direction, expected in (("forward", forward), ("backward", backward)):
        name = f"_flash_attention_{direction}"
        schema = str(getattr(torch.ops.aten, name).default._schema)
        arguments, result = schema.removeprefix(f"aten::{name}(")[:-1].split(") -> (")
        assert result == results[direction]
        listed = arguments.split(", ")
        assert listed[: len(expected)] == expected
        # Later versions may add more, which weft does not pass.
        assert all("? " in each and each.endswith("=None") for each in listed[len(expected) :])


def test_traceable_collectives_have_expected_arguments() -> None:
    arguments = {
        name: [a.name for a in getattr(c10d_functional, name).default._schema.arguments]
        for name in (
            "all_gather_into_tensor",
            "reduce_scatter_tensor",
            "all_reduce",
            "wait_tensor",
        )
    }
    assert arguments == {
        "all_gather_into_tensor": ["input", "group_size", "group_name"],
        "reduce_scatter_tensor": ["input", "reduce_op", "group_size", "group_name"],
        "all_reduce": ["input", "reduce_op", "group_name"],
        "wait_tensor": ["tensor"],
    }


def test_asynchronous_tensor_parallel_names_are_as_expected() -> None:
    from torch._inductor import config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    assert config._micro_pipeline_tp is False
    assert parameters(enable_symm_mem_for_group) == ["group_name"]


@pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_getAllocatorSettings"),
    reason="PyTorch 2.11 does not show the settings",
)
@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("", "expandable_segments:True"),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64"),
                ("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", ""),
            )
        ),
    ],
)
def test_segments_are_expandable_unless_the_user_configures_the_allocator(
    variable: str, expected: str
) -> None:
    """Each in a new process, because the setting is of a process."""
    code = """
import torch
from weft.parallel.private import enable_expandable_segments
enable_expandable_segments()
print(torch._C._accelerator_getAllocatorSettings())
"""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    value = "1" if "NCCL" in variable else "max_split_size_mb:64"
    environment |= {variable: value} if variable else {}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == expected


def test_mesh_and_placement_names_are_as_expected() -> None:
    assert dtensor._is_strided(placement_types._StridedShard(0, split_factor=2))
    assert not dtensor._is_strided(placement_types.Shard(0))
    # `fully_shard` creates the mesh to reshard over by this name, in this module, once.
    assert _fsdp_init.DeviceMesh is DeviceMesh
    assert inspect.getsource(_fsdp_init).count("DeviceMesh(\n") == 1


def describe_groups() -> list[Any]:
    """Return sizes, timeouts and kinds of devices of the world and of a group of it."""
    row = dist.get_rank() // 2 * 2 + torch.arange(2)
    groups: list[Any] = [dist.group.WORLD, private.create_group("cpu", row[None], "tp")]
    return [
        (
            group.size(),
            group._get_backend(torch.device("cpu")).options._timeout,
            group._device_types,
        )
        for group in groups
    ]


def test_create_group_has_the_timeout_of_the_world() -> None:
    """`tests.parallel.test_mesh` has more about groups."""
    for world, group in run_ranks(describe_groups, 4, timeout=40):
        assert (world[0], group[0]) == (4, 2)
        assert world[1] == group[1] == timedelta(seconds=100)  # of `weft.supervision.local_ranks`
        assert torch.device("cpu") in group[2]


def test_fsdp_gather_extension_names_are_as_expected() -> None:
    param: Any = _fsdp_param.FSDPParam
    source = inspect.getsource(param)
    for attribute in (
        "_orig_size",
        "shard_mesh",
        "fsdp_placement",
        "sharded_param",
        "_module_info",
    ):
        assert f"self.{attribute}" in source
    # Every gather looks up the hook on the shard, which takes one or five arguments.
    source = inspect.getsource(param.all_gather_inputs.fget)
    assert re.search(r'hasattr\(\s*self._sharded_local_tensor, "fsdp_pre_all_gather"', source)
    assert "num_fn_params not in (1, 5)" in source
    assert parameters(param.reset_sharded_param) == ["self"]
    # The first forward pass looks the hooks up again.
    lazy_init = inspect.getsource(_fsdp_param_group.FSDPParamGroup.lazy_init)
    assert "fsdp_param._init_extensions()" in lazy_init


def gather_inner_with_outer() -> dict[str, list[bool]]:
    """Record whether the inner unit is gathered: before and after it, and after the outer one."""
    mesh = init_device_mesh("cpu", (2,))
    inner = torch.nn.Linear(4, 4)
    outer = torch.nn.Sequential(torch.nn.Linear(4, 4), inner, torch.nn.Linear(4, 4))
    root = torch.nn.Sequential(outer, torch.nn.Linear(4, 4))
    for unit in (inner, outer, root):
        fully_shard(unit, mesh=mesh)
    private.move_fsdp_hooks(inner, outer)
    observed: dict[str, list[bool]] = {"before": [], "after": [], "done": []}
    for name, module in zip(observed, (outer[0], outer[2], root[1]), strict=True):
        module.register_forward_hook(
            lambda *_, name=name: observed[name].append(not isinstance(inner.weight, DTensor))
        )
    for _ in range(2):
        root(torch.ones(2, 4)).sum().backward()
    return observed | {"gradient": [inner.weight.grad is not None]}


def test_move_fsdp_hooks_inner_unit_follows_the_outer_one() -> None:
    for results in run_ranks(gather_inner_with_outer, 2, timeout=60):
        assert results == {
            "before": [True] * 2,
            "after": [True] * 2,
            "done": [False] * 2,
            "gradient": [True],
        }


def reshard_dtensors() -> dict[str, Any]:
    """Return sizes of a tensor-parallel weight between forward and backward, and its gradient."""
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    inner = torch.nn.Linear(6, 8, bias=False)
    full = inner.weight.detach().clone()
    inner.weight = torch.nn.Parameter(distribute_tensor(full, mesh["tp"], [Shard(0)]))
    inputs = (torch.arange(12.0) + dist.get_rank()).view(2, 6)
    sizes: list[int] = []

    def multiply(x: torch.Tensor) -> torch.Tensor:
        weight: Any = inner.weight
        return torch.nn.functional.linear(x, weight.to_local())

    inner.forward = multiply  # type: ignore[method-assign]
    root = torch.nn.Sequential(inner, torch.nn.Linear(8, 1))
    grid = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("copies", "shards"))
    with private.use_reshard_mesh(grid):
        fully_shard(inner, mesh=mesh["dp"], reshard_after_forward=2)
    fully_shard(root, mesh=mesh["dp"])
    private.allow_reshard_of_dtensors(inner)
    for _ in range(2):
        output = root(inputs).sum()
        weight: Any = inner.weight
        sizes.append(weight.to_local().numel())
        output.backward()
        sizes.append(inner.weight.to_local().numel())
    head: Any = root[1].weight
    expected = 2 * head.full_tensor().detach().T * torch.cat(all_inputs(inputs)).sum(0)
    return {"sizes": sizes, "grad": inner.weight.grad.full_tensor() * 4, "expected": expected}


def all_inputs(inputs: torch.Tensor) -> list[torch.Tensor]:
    gathered = [torch.empty_like(inputs) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, inputs)
    return gathered


def test_allow_reshard_of_dtensors_gathers_the_weight_among_fewer_ranks() -> None:
    """After forward a rank has 24 of 48 elements, and after backward 12."""
    for result in run_ranks(reshard_dtensors, 4, timeout=60):
        assert result["sizes"] == [24, 12] * 2
        torch.testing.assert_close(result["grad"], result["expected"])


def reduce_by_hand() -> dict[str, Any]:
    """Record the calls of a function that replaces the all-reduce, and the gradients."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    unit: Any = torch.nn.Linear(4, 6, bias=False)
    fully_shard(unit, mesh=mesh)
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)
    calls: list[tuple[bool, float]] = []
    groups: list[int] = []

    def reduce(gradients: torch.Tensor, is_last: bool) -> None:
        calls.append((is_last, gradients.sum().item()))
        gradients.fill_(7.0 if is_last else 0.0)

    private.replace_all_reduce(unit, lambda group: groups.append(group.size()) or reduce)
    for is_last in (False, True):
        unit.set_requires_all_reduce(is_last)
        unit(torch.full((1, 4), 1.0 + dist.get_rank())).sum().backward()
    placements = [type(placement).__name__ for placement in unit.weight.placements]
    return {"calls": calls, "grad": unit.weight.grad.to_local(), "placements": placements} | {
        "groups": groups
    }


def test_replace_all_reduce_is_called_after_every_backward_pass() -> None:
    """Before, the ranks of a shard group have added their 12 elements."""
    for rank, result in enumerate(run_ranks(reduce_by_hand, 4, timeout=60)):
        total = 12.0 * (3 if rank < 2 else 7)
        assert result["calls"] == [(False, total), (True, total)]
        assert result["groups"] == [2]
        assert result["grad"].eq(7.0).all()
        assert result["placements"] == ["Replicate", "Shard"]


def test_allow_integer_params_need_no_gradient() -> None:
    """torch 2.11 creates the parameters by this name, in this module."""
    assert _fsdp_param.nn is torch.nn
    with private.allow_integer_params():
        created = _fsdp_param.nn.Parameter(torch.zeros(2, dtype=torch.uint8))
        assert isinstance(created, torch.nn.Parameter)
        assert not created.requires_grad
        assert _fsdp_param.nn.Parameter(torch.zeros(2)).requires_grad
    assert _fsdp_param.nn is torch.nn


def test_pipeline_stage_infra_names_are_as_expected() -> None:
    """torch 2.11 allocates receive buffers in this method, which later versions have too."""
    assert parameters(PipelineStage._prepare_forward_infra)[:2] == ["self", "num_microbatches"]


def test_pipeline_message_names_are_as_expected() -> None:
    """What `free_received` (before torch 2.15), `free_evaluated` and `free_sent` replace."""
    stage: Any = PipelineStage
    if hasattr(torch_stage._RecvInfo, "take_buffer"):
        assert hasattr(schedules, "_add_wait_send")
        assert parameters(stage.release_fwd_send_outputs) == ["self", "fwd_chunk_id"]
        assert "self._forward_chunk_states.pop(bwd_chunk_id)" in inspect.getsource(
            stage.backward_one_chunk
        )
        return
    assert parameters(stage._prepare_backward_infra)[:2] == ["self", "num_microbatches"]
    # torch 2.14 has a group for each direction.
    assert parameters(stage._get_recv_ops) in (
        ["self", "recv_infos"],
        ["self", "recv_infos", "group"],
    )
    for name in ("_retrieve_recv_activations", "_retrieve_recv_grads"):
        assert len(parameters(getattr(stage, name))) == 2
    assert "self.device" in inspect.getsource(stage._create_grad_recv_info)
    source = inspect.getsource(schedules._PipelineScheduleRuntime._step_microbatches)
    assert "if action.computation_type in self._comp_type_to_function_map" in source
    assert "_batch_p2p(stage.get_fwd_send_ops(mb_index))" in source


def test_schedule_names_are_as_expected() -> None:
    runtime: Any = schedules._PipelineScheduleRuntime
    assert parameters(runtime._load_csv)[:2] == ["self", "filename"]
    names = ["compute_actions", "max_active_stages"]
    assert parameters(schedules._add_unshard_reshard)[:2] == names
    order = ["compute_actions", "stage_to_rank", "num_stages"]
    assert parameters(schedules._add_send_recv)[:3] == order
    fields = ("stage_index", "computation_type", "microbatch_index", "sub_actions")
    assert schedules._Action._fields == fields
    source = inspect.getsource(runtime)
    for attribute in ("pipeline_order_with_comms", "stage_index_to_group_rank"):
        assert f"self.{attribute}" in source
    # `set_max_active_stages` replaces this name in the module.
    assert "] = _add_unshard_reshard(" in source


def test_set_max_active_stages_replaces_the_number_of_the_schedule() -> None:
    """torch 2.15 gives its schedules' own number, of three by default."""
    actions = [schedules._Action(stage, schedules.FORWARD, 0) for stage in (0, 1, 2, 3)]
    actions += [schedules._Action(stage, schedules.FULL_BACKWARD, 0) for stage in (3, 2, 1, 0)]
    with private_schedules.set_max_active_stages(4):
        order = schedules._add_unshard_reshard(actions, max_active_stages=3)
    kinds = [action.computation_type for action in order]
    assert kinds.count(schedules.UNSHARD) == 4  # with three: stage 0 once more


def test_pipeline_stage_reduction_names_are_as_expected() -> None:
    stage: Any = PipelineStage
    backward = ["self", "backward_type", "bwd_kwargs", "last_backward"]
    assert parameters(stage.backward_maybe_with_nosync) == backward
    assert parameters(stage.perform_reduce_grad) == ["self", "grad_scale_factor"]
    # weft calls these after each microbatch, PyTorch after the last one.
    source = inspect.getsource(
        getattr(stage, "start_gradient_reduction", stage.perform_reduce_grad)
    )
    if "finalize_backward(" in source:  # torch 2.15
        source = inspect.getsource(_fsdp_state.FSDPState.finalize_backward)
        assert "self._validate_finalize_backward()" in source  # which weft replaces
    else:
        assert "_root_post_backward_final_callback" in source
    for step in ("_state_ctx.all_states", ".post_backward()"):
        assert step in source
    assert hasattr(_fsdp_param_group.FSDPParamGroup, "post_backward")
    assert hasattr(_fsdp_state.FSDPState, "_root_post_backward_final_callback")


# --------------------------------------------------------------------------- two hops


def reductions(cases: list[tuple[str, str]]) -> list[tuple[int, int, int]]:
    results = []
    for case in cases:
        private_trace.clear_mesh_cache()  # else DTensor uses the groups of the previous case
        results.append(count_reductions(*case))
    return results


def count_reductions(schedule: str, sync: str) -> tuple[int, int, int]:
    """Return reduce-scatters, all-reduces over replicas, and units of this rank's stages."""
    job = small_job(
        ("parallel.pp", "2"),
        ("parallel.dp_replicate", "2"),
        ("parallel.dp_shard", "2"),
        ("pipeline.schedule", schedule),
        ("parallel.gradient_sync", sync),
        ("model.num_layers", "4"),
        ("model.tied_embeddings", "false"),
        ("train.global_batch_size", "8"),
        ("train.microbatch_size", "1"),
    )
    plan = plan_here(job)
    built = build(plan, this_rank())
    counts = counted_step(built, job, plan)[0]
    units = sum(len(plan.family.fsdp_units(part)) for part in built.model_parts)
    # One more all-reduce over replicas counts the tokens of the step.
    return counts["reduce_scatter dp_shard"], counts["all_reduce dp_replicate"] - 1, units


def check_two_hops(result: tuple[int, int, int]) -> None:
    """Check one reduce-scatter for each of 2 microbatches, and one all-reduce over replicas."""
    scatters, sums, units = result
    assert (scatters, sums) == (2 * units, units)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["GPipe", "Interleaved1F1B"])
def test_other_schedule_reduces_over_replicas_once(schedule: str) -> None:
    for result in run_ranks(count_reductions, 8, schedule, "microbatch"):
        check_two_hops(result)


@pytest.mark.slow
def test_pipeline_gradient_sync_sets_the_number_of_reductions() -> None:
    cases = [("1F1B", "microbatch"), ("ZBVZeroBubble", "microbatch"), ("1F1B", "step")]
    for plain, shaped_as_a_v, (scatters, sums, units) in run_ranks(reductions, 8, cases):
        check_two_hops(plain)
        check_two_hops(shaped_as_a_v)
        assert scatters == sums == units


def test_collectives_new_names_are_those_of_torch_2_13() -> None:
    renamed = hasattr(dist, "all_gather_single")
    assert renamed == (torch.__version__ >= "2.13")


def leave_one_pending() -> list[private.CollectiveRecord]:
    """Rank 0 starts one collective more than rank 1."""
    dist.all_reduce(torch.zeros(2))
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.zeros(2), group=group)
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.zeros(3, 5), group=group, async_op=True)
    deadline = time.monotonic() + 10  # the recorder updates with a delay
    while len(result := [c for c in private.read_flight_recorder() if c.is_pending]) > (
        dist.get_rank() == 0
    ):
        assert time.monotonic() < deadline, result
        time.sleep(0.01)
    dist.barrier()
    if dist.get_rank() == 1:
        work = dist.all_reduce(torch.zeros(3, 5), group=group, async_op=True)
    work.wait()
    return result


def test_read_flight_recorder_has_the_pending_collective() -> None:
    first, second = run_ranks(leave_one_pending, 2)
    assert second == []
    assert [(call.group, call.seq_id, call.name, call.input_sizes) for call in first] == [
        ("1", 2, "all_reduce", [[3, 5]])
    ]


def record_wrapped_collectives() -> list[list[int]]:
    """Return the ranks of each collective that is started or waited for."""
    marked: list[list[int]] = []

    @contextmanager
    def mark(ranks: list[int]) -> Iterator[None]:
        marked.append(ranks)
        yield

    group_ranks = [dist.get_rank() // 2 * 2, dist.get_rank() // 2 * 2 + 1]
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[dist.get_rank() // 2]
    value = torch.ones(2)
    with private.wrap_collectives(mark):
        dist.all_reduce(value)
        later = dist.all_reduce(value, group=pair, async_op=True)
        dist.barrier()
        later.wait()
        private.all_gather(torch.empty(4), value, group=pair)
        private.reduce_scatter(torch.empty(1), value, group=pair)
        if dist.get_rank() % 2:
            dist.recv(value, group_ranks[0])
        else:
            dist.isend(value, group_ranks[1]).wait()
        assert value.tolist() == [8, 8]
    dist.all_reduce(value, group=pair)  # as before
    assert value.tolist() == [16, 16]
    everybody = [0, 1, 2, 3]
    both = [everybody, everybody]
    assert marked == [*both, group_ranks, *both, *[group_ranks] * 5, *both], marked
    return marked


def test_wrap_collectives_includes_calls_and_waits() -> None:
    run_ranks(record_wrapped_collectives, 4)


@pytest.mark.parametrize(
    ("owner", "name", "inside"),
    [
        (dist.Work, "wait", lambda: private_trace.observe_collective_waits(print)),
        (dist.Work, "wait", lambda: private.wrap_collectives(nullcontext)),
        (torch.UntypedStorage, "resize_", lambda: private_trace.observe_storage_resizes(print)),
    ],
)
def test_patched_method_is_restored(owner: Any, name: str, inside: Any) -> None:
    """The original is restored, bound or not."""
    before = inspect.getattr_static(owner, name)
    with inside():
        assert inspect.getattr_static(owner, name) is not before
    assert inspect.getattr_static(owner, name) is before


def test_cuda_memory_history_names_are_as_expected() -> None:
    assert parameters(torch.cuda.memory._record_memory_history)[0] == "enabled"
    assert parameters(torch.cuda.memory._dump_snapshot)[0] == "filename"


def create_two_gloo_groups() -> list[float]:
    """Create two groups of all ranks, one after the other."""
    store = private.create_tcp_store("127.0.0.1", 0, serve=True)
    ports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ports, store.port)
    sums = []
    for name in ("first", "second"):
        prefix = f"127.0.0.1:{ports[0]}/{name}"
        rank, size = dist.get_rank(), dist.get_world_size()
        group = private.create_gloo_group(prefix, rank, size, "127.0.0.1", timedelta(seconds=20))
        value = torch.tensor([1.0 + rank])
        group.allreduce([value], dist.AllreduceOptions()).wait()
        sums.append(value.item())
        dist.barrier()
        start_time = time.monotonic()
        if rank == 0:
            with pytest.raises(RuntimeError):
                group.allreduce([value], dist.AllreduceOptions()).wait()
            assert time.monotonic() - start_time < 10, "it was the timeout"
        del group
        dist.barrier()
    return sums


def test_create_gloo_group_deleted_fails_at_once_for_others() -> None:
    assert run_ranks(create_two_gloo_groups, 2) == [[3.0, 3.0]] * 2


def test_fsdp_symmetric_memory_method_exists() -> None:
    methods = ("set_symm_mem_for_comm", "set_allocate_memory_from_process_group_for_comm")
    remote = next(getattr(FSDPModule, name) for name in methods if hasattr(FSDPModule, name))
    assert len(inspect.signature(remote).parameters) == 2


def test_disable_recompile_limit_compiles_each_shape() -> None:
    calls = []
    num_shapes = torch._dynamo.config.recompile_limit + 4

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(1)
        return graph.forward

    double = torch.compile(lambda x: x * 2, backend=backend, dynamic=False)
    with disable_recompile_limit():
        for size in range(2, 2 + num_shapes):
            double(torch.ones(size))
    assert len(calls) == num_shapes


def test_register_compile_callbacks_reports_start_end_and_reason() -> None:
    events: list[str] = []
    reasons = private.collect_recompile_reasons()
    private.register_compile_callbacks(
        lambda: events.append("start"), lambda backward: events.append(f"end {backward}")
    )
    double = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    double(torch.ones(2))
    assert events == ["start", "end False"]
    assert reasons == []
    double(torch.ones(3))
    assert "size mismatch" in reasons[-1]


def test_set_activation_memory_budget_sets_the_compilers_option() -> None:
    from torch._functorch import config

    before = config.activation_memory_budget
    try:
        private.set_activation_memory_budget(0.25)
        assert config.activation_memory_budget == 0.25
    finally:
        private.set_activation_memory_budget(before)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_create_tcp_store_listens_on_one_interface(host: str) -> None:
    store = private.create_tcp_store(host, 0, serve=True)
    other = private.create_tcp_store(host, store.port, serve=False)
    other.set("key", "value")
    assert store.get("key") == b"value"
    # The listening addresses of the port, from /proc/net/tcp and tcp6.
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            local, _, state = line.split()[1:4]
            if state == "0A" and int(local.rpartition(":")[2], 16) == store.port:
                addresses.add(local.rpartition(":")[0])
    assert addresses == {"00000000000000000000000001000000" if host == "::1" else "0100007F"}


def test_selected_results_are_tagged_for_the_partitioner() -> None:
    """The compiler reads the tags of the forward pass, and caches code by the policy."""
    from torch._functorch.partitioners import must_recompute
    from torch._inductor import config

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    product = graph.call_function(torch.ops.aten.mm.default, (x, x))
    result = graph.call_function(torch.ops.aten.relu.default, (product,))
    grad = graph.call_function(torch.ops.aten.relu.default, (result,))
    grad.meta["partitioner_tag"] = "is_backward"
    options = private.select_saved_results(lambda: lambda name: name == "aten::mm", "a")
    (name,) = options
    assert hasattr(config, name)
    options[name](graph)
    assert [must_recompute(node) for node in (x, product, result, grad)] == [
        False,
        False,
        True,
        False,
    ]
    assert product.meta["recompute"] == CheckpointPolicy.MUST_SAVE
    other = private.select_saved_results(lambda: lambda name: False, "b")[name]
    assert options[name].uuid() != other.uuid()
