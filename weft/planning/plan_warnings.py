"""Warn about choices of a job that waste time or that users often mean otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.config.axes import AXES
from weft.config.schema import PrecisionSection
from weft.planning.degrees import divisors, format_choices
from weft.planning.lora_plan import plan_cost
from weft.planning.matrices import find_float8_matrices, list_matrices, tensor_parallel_spec
from weft.planning.placement import (
    Sizes,
    count_ranks,
    group_array,
    max_nodes_per_group,
    nodes_per_group,
)
from weft.planning.plan import Plan


def _is_user_defined(name: str) -> bool:
    """Return True for a user's ``module:function``."""
    return ":" in name


def warmup_warnings(plan: Plan) -> Iterator[str]:
    """Yield a warning if warm-up takes all steps."""
    steps, optim = plan.num_steps, plan.job.optim
    warmup = optim.num_warmup_steps(steps)
    problem = f"optim.warmup_steps={warmup} leaves no step of train.steps={steps} after warm-up"
    remedy = "Use optim.warmup_steps=auto, or more steps."
    if not steps:
        return  # train.epochs and the data decide
    if warmup > steps:
        last_lr = optim.lr * steps / warmup
        yield (
            f"{problem}: the learning rate ends at {last_lr:.3g}, below its peak of "
            f"optim.lr={optim.lr:g}, and never decays. {remedy}"
        )
    elif warmup == steps:
        yield (
            f"{problem}: the learning rate reaches its peak in the last step and never decays. "
            f"{remedy}"
        )


def microbatch_warnings(plan: Plan) -> Iterator[str]:
    """Yield a warning if a microbatch has fewer sequences than the job asks for."""
    size, local = plan.job.train.microbatch_size, plan.local_batch_size
    if size != "auto" and size > local:
        yield (
            f"train.microbatch_size={size} exceeds the {local} sequence{'s' * (local > 1)} of each "
            f"rank, so a microbatch has {local}. Use train.microbatch_size={local}, or auto."
        )


def component_warnings(plan: Plan) -> Iterator[str]:
    """Yield a sentence about the keys that act on a user's own optimizer or schedule."""
    optim = plan.job.optim
    warmup = optim.num_warmup_steps(plan.num_steps)
    if _is_user_defined(optim.schedule) and warmup:
        yield (
            f"optim.schedule={optim.schedule} decides the learning rate only after {warmup} steps "
            f"of linear warm-up (optim.warmup_steps={optim.warmup_steps}). Use "
            "optim.warmup_steps=0 to decide it in every step."
        )
    if not _is_user_defined(optim.name):
        return
    acting = []
    if optim.weight_decay:
        acting.append(f"weight_decay={optim.weight_decay:g} in its parameter groups")
    if optim.max_grad_norm:
        acting.append(f"gradients clipped to optim.max_grad_norm={optim.max_grad_norm:g}")
    if acting:
        yield (
            f"optim.name={optim.name} gets {' and '.join(acting)}, from the recipe or the "
            "defaults. Set these keys to 0 for none."
        )


def activation_checkpoint_warnings(plan: Plan) -> Iterator[str]:
    """Yield warnings about wasted recomputation and about offload that moves nothing."""
    section = plan.activation_checkpoint
    if section.offload:
        stages = plan.pipeline.stages if plan.pipeline else ()
        owner = "the largest stage" if stages else "the model"
        num_blocks = max((s.num_blocks for s in stages), default=len(plan_cost(plan).units) - 2)
        remedy = (
            f"Use activation_checkpoint.offload_prefetch={num_blocks - 1} or less"
            if num_blocks > 1
            else "Use activation_checkpoint.offload=false"
        )
        if 0 < num_blocks <= section.offload_prefetch:
            yield (
                "activation_checkpoint.offload=true offloads nothing: the last "
                f"activation_checkpoint.offload_prefetch={section.offload_prefetch} blocks stay on "
                f"the device, and {owner} has {num_blocks}. {remedy}."
            )


def pipeline_warnings(plan: Plan) -> Iterator[str]:
    """Yield a warning if a schedule with deferred weight gradients cannot defer them."""
    if plan.world_size_invariant and plan.pipeline is not None and plan.pipeline.splits_backward:
        yield (
            f"pipeline.schedule={plan.schedule_name} fills no gaps of the schedule: with "
            "train.world_size_invariant=true the gradients of a microbatch are complete before "
            "those of the next. Use 1F1B or Interleaved1F1B."
        )


def float8_warnings(plan: Plan) -> Iterator[str]:
    """Yield warnings about choices that cost the speed of float8."""
    if plan.float8 == "none":
        return
    key, section = f"precision.float8={plan.float8}", plan.precision
    if plan.device != "cpu" and plan.float8_emulated:
        yield (
            f"{key} is emulated on this GPU, which does not support it: its products run in "
            "float32, several times slower than in bfloat16. Set precision.float8=none, unless "
            "you measure the effect on the loss."
        )
    elif plan.device != "cpu" and not plan.is_compiled:
        yield (
            f"{key} without compile.enable runs scaling and casting as separate kernels, which "
            "may cost more than the products gain. Set compile.enable=true."
        )
    if plan.family.moe_layers is not None and not plan.num_float8_stacks:
        yield (
            f"{key} converts no matrix of the experts, which do most of the work: their sizes do "
            "not allow it, they are too small to gain, or precision.float8_exclude names them."
            + ("" if section.float8_small else " Set precision.float8_small=true for small ones.")
        )
    if plan.lora_rank:
        # The adapters read the input in high precision, and no weight has a gradient.
        if plan.float8 == "rowwise_with_gw_hp":
            yield (
                f"{key} keeps the gradients of weights in high precision, but with lora.rank the "
                "float8 matrices are frozen and have none. Use precision.float8=rowwise."
            )
        return
    if plan.async_tp and plan.float8 != "tensorwise":
        yield (
            f"{key} with parallel.async_tp=true does not overlap the gathers of tensor "
            "parallelism: only one scale per tensor can be applied before a gather. Use "
            "precision.float8=tensorwise."
        )
    elif plan.async_tp and (mixed := _mixed_neighbors(plan, section)):
        names = [name for name, is_converted in mixed.items() if not is_converted]
        others = [f"*.{name}" for name, is_converted in mixed.items() if is_converted]
        excluded = ",".join([*section.float8_exclude, *others])
        remedy = f"precision.float8_exclude={excluded}"
        small = section.model_copy(update={"float8_small": True})
        if not _mixed_neighbors(plan, small):
            remedy = f"precision.float8_small=true, or {remedy}"
        yield (
            f"{key} with parallel.async_tp=true does not overlap the gather before "
            f"{', '.join(names)}: of the layers with this input only some are in float8, so the "
            f"ranks gather it in high precision. Set {remedy}."
        )
    if plan.splits_backward:
        yield (
            f"{key} with pipeline.schedule={plan.schedule_name} fills few gaps of the schedule: a "
            "float8 layer computes the gradients of its input and its weight together, so only "
            "those of other layers can be deferred. Another schedule may be faster."
        )


def _mixed_neighbors(plan: Plan, section: PrecisionSection) -> dict[str, bool]:
    """Return the layers that share their input, if only some of them are in float8.

    Args:
        plan: has the model.
        section: decides which layers are in float8.

    Returns:
        The name of each layer, and whether it is in float8.
    """
    family = plan.family
    selected = {m.name for m in find_float8_matrices(section, plan.model, family, plan.tp)}
    readers: dict[str, dict[str, bool]] = {}  # of each input, by the name of the parent
    for matrix in list_matrices(plan.model, family, plan.tp):
        parent, _, name = matrix.name.rpartition(".")
        if tensor_parallel_spec(matrix.name, family).weight == "column":
            readers.setdefault(parent, {})[name] = matrix.name in selected
    mixed: dict[str, bool] = {}
    for names in readers.values():
        if len(set(names.values())) == 2:
            mixed |= names
    return mixed


def placement_warnings(
    sizes: Sizes, local_world_size: int, order: Sequence[str] = AXES, num_linked: int = 0
) -> list[str]:
    """Return warnings about a placement that is certain to be slow.

    Every axis except tp may cross nodes, and in a large run must.

    Args:
        sizes: ranks along each axis.
        local_world_size: ranks per node.
        order: axes, outermost first.
        num_linked: see `weft.planning.devices.linked_devices`, if more than a node's.
    """
    warnings = []
    world_size, tp = count_ranks(sizes), sizes.get("tp", 1)
    place = "rack" if num_linked > local_world_size else "node"
    size = max(num_linked, local_world_size)
    if (num_places := max_nodes_per_group("tp", sizes, size, order)) > 1:
        groups = group_array("tp", sizes, order)
        group = groups[nodes_per_group(groups, size).argmax()]
        warnings.append(
            f"parallel.tp={tp}: the group of ranks {group.min()}-{group.max()} spans {num_places} "
            f"{place}s of {size} ranks. Tensor parallelism communicates several times in "
            "every layer, with nothing to compute meanwhile. Use a degree that divides the ranks "
            f"of a {place}: {format_choices(divisors(size))}."
        )
    if world_size > local_world_size and (remainder := world_size % local_world_size):
        warnings.append(
            f"{world_size} ranks do not fill nodes of {local_world_size}: the last node has "
            f"{remainder}, and groups do not align with nodes. Use a multiple of "
            f"{local_world_size} ranks."
        )
    return warnings
