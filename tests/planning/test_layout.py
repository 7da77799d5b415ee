"""Every invalid layout is refused before launch, with key, rule and a working remedy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from weft.config.errors import ConfigError, InvalidConfig
from weft.config.reader import read_job
from weft.config.schema import Job
from weft.planning.plan import Machine, Plan
from weft.planning.resolve import resolve

Overrides = list[tuple[str, str]]

# 8 layers, 8 heads, 4 key/value heads.
MODEL: Overrides = [
    ("model.num_layers", "8"),
    ("model.dim", "64"),
    ("model.num_heads", "8"),
    ("model.num_kv_heads", "4"),
    ("model.ffn_dim", "192"),
    ("model.vocab_size", "512"),
    ("model.max_seq_len", "512"),
    ("model.tied_embeddings", "false"),
    ("data.vocab_size", "512"),
    ("train.seq_len", "64"),
    ("train.global_batch_size", "16"),
]
BATCH: Overrides = [("train.global_batch_size", "128"), ("model.tied_embeddings", "false")]
CUDA = Machine("cuda", 8, "NVIDIA H100 80GB HBM3", memory_bytes=80 * 10**9, peer_access=True)


def planned(layout: str, world: int | None = None, machine: Machine | None = None) -> Plan:
    job = job_of(layout)
    return resolve(job, machine or Machine("cpu", 8, world_size=world))


def job_of(layout: str) -> Job:
    job, _, errors = read_job("demo", MODEL + [pair(word) for word in layout.split()])
    assert errors == []
    return job


def pair(word: str) -> tuple[str, str]:
    name, _, value = word.partition("=")
    return (name if "." in name else f"parallel.{name}"), value


def refused(
    layout: str, world: int | None = None, machine: Machine | None = None
) -> list[ConfigError]:
    with pytest.raises(InvalidConfig) as caught:
        planned(layout, world, machine)
    return caught.value.errors


# layout, ranks, the wrong key, words of the rule, words of the remedy, and a layout that follows
# the remedy.
REFUSALS = [
    # Degrees and world size.
    ("tp=3", 8, "tp", "does not divide the 8 ranks", "1, 2, 4 or 8", "tp=2"),
    ("tp=2 pp=3", 8, "tp", "times pp=3 (6 in all)", "run.nproc_per_node=6", "tp=2 pp=2"),
    ("dp_shard=3", 8, "dp_shard", "is not equal to the 8 ranks", "use 8, or auto", "dp_shard=8"),
    ("dp_shard=2 tp=2", 8, "dp_shard", "times tp=2", "use 4", "dp_shard=4 tp=2"),
    # Batch size.
    ("train.global_batch_size=6", 4, "train.global_batch_size",
     "is not divisible by 4 data-parallel", "4 or 8",
     "train.global_batch_size=8"),
    # Tensor parallel: heads, feed-forward, vocabulary, sequence.
    ("tp=16", 16, "tp", "leaves a rank without a part of num_heads=8", "1, 2, 4 or 8", "tp=8"),
    ("tp=4 model.ffn_dim=2", 4, "tp", "ffn_dim=2", "1 or 2", "tp=2 model.ffn_dim=2"),
    ("tp=4 train.seq_len=62", 4, "train.seq_len", "is not divisible by tp=4", "60 or 64",
     "tp=4 train.seq_len=60"),
    ("tp=4 train.seq_len=62", 4, "train.seq_len", "tp=4", "sequence_parallel=false",
     "tp=4 train.seq_len=62 sequence_parallel=false"),
    # Asynchronous tensor parallel.
    ("tp=2 async_tp=true", 2, "async_tp", "torch.compile", "compile.enable=true", None),
    ("tp=2 async_tp=true compile.enable=true", 2, "async_tp", "read each other's memory",
     "use false", "tp=2 compile.enable=true"),
    ("tp=2 async_tp=true compile.enable=true sequence_parallel=false", 2, "async_tp",
     "sequence parallelism, which is off", "sequence_parallel=true", None),
    # Symmetric memory.
    ("symmetric_memory=true", 2, "symmetric_memory", "read each other's memory", "use false",
     "dp_shard=2"),
    # Context parallel: sequence, heads.
    ("cp=4 train.seq_len=62", 4, "train.seq_len", "by cp=4 ranks", "60 or 64",
     "cp=4 train.seq_len=60"),
    ("cp=4 train.seq_len=62 cp_load_balance=false", 4, "train.seq_len", "by cp=4 ranks",
     "60 or 64",
     "cp=4 train.seq_len=60 cp_load_balance=false"),
    ("cp=8 tp=2 cp_method=ulysses train.global_batch_size=1", 16, "cp", "num_heads=8 / tp=2",
     "1, 2 or 4", "cp=4 tp=2 cp_method=ulysses dp_shard=2"),
    ("cp=8 tp=2 cp_method=ulysses train.global_batch_size=1", 16, "cp", "(ulysses)", "ring",
     "cp=8 tp=2 cp_method=ring train.global_batch_size=1"),
    # Pipelines: layers, microbatches, schedules.
    ("pp=12 train.microbatch_size=1", 12, "pp", "12 stages, but the model has only 8",
     "1, 2, 3, 4 or 6", "pp=6 train.microbatch_size=1"),
    ("pp=8 pipeline.schedule=Interleaved1F1B train.global_batch_size=32 train.microbatch_size=1",
     8, "pp",
     "16 stages, but the model has only 8", "1, 2 or 4",
     "pp=4 pipeline.schedule=Interleaved1F1B train.global_batch_size=32 train.microbatch_size=1 "
     "dp_shard=2"),
    ("pp=4 train.microbatch_size=8", 4, "train.microbatch_size",
     "2 microbatches, but 1F1B needs at least as many", "use 1, 2, 3, 4 or 5",
     "pp=4 train.microbatch_size=3"),
    ("pp=8 train.global_batch_size=4", 8, "train.microbatch_size", "1F1B needs",
     "train.global_batch_size=8",
     "pp=8 train.global_batch_size=8"),
    ("pp=2 pipeline.schedule=DualPipeV train.microbatch_size=8", 2, "train.microbatch_size",
     "stages, 4", "use 1",
     "pp=2 pipeline.schedule=DualPipeV train.microbatch_size=4"),
    ("pp=4 pipeline.schedule=Interleaved1F1B train.microbatch_size=1 train.global_batch_size=9", 4,
     "train.microbatch_size", "a number m that", "use 2",
     "pp=4 pipeline.schedule=Interleaved1F1B train.microbatch_size=2"),
    ("pp=2 pipeline.schedule=1F2B", 2, "pipeline.schedule", "is not a known schedule", "1F1B",
     "pp=2"),
    ("pp=2 pipeline.stages_per_rank=2", 2, "pipeline.stages_per_rank", "1F1B, which has 1", "auto",
     "pp=2"),
    ("pp=2 pipeline.layers_per_stage=[4,5]", 2, "pipeline.layers_per_stage", "9", "",
     "pp=2 pipeline.layers_per_stage=[4,4]"),
    ("pp=2 pipeline.layers_per_stage=[8]", 2, "pipeline.layers_per_stage", "1", "",
     "pp=2 pipeline.layers_per_stage=[8,0]"),
    ("pp=2 pipeline.schedule=/nowhere.csv", 2, "pipeline.schedule", "cannot be read", "0F3",
     "pp=2"),
    # Sharding.
    ("reshard_after_forward=3", 8, "reshard_after_forward", "does not divide the 8", "1, 2, 4 or 8",
     "reshard_after_forward=4"),
    ("dp_shard=fit dp_replicate=2", 8, "dp_replicate", "conflicts with parallel.dp_shard=fit",
     "remove the key", None),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "world", "key", "rule", "remedy", "good"), REFUSALS)
def test_layout_impossible_keys_are_refused_with_a_remedy_that_works(
    layout: str, world: int, key: str, rule: str, remedy: str, good: str | None
) -> None:
    errors = refused(layout, world)
    key = key if "." in key else f"parallel.{key}"
    result = [p for p in errors if p.key == key and rule in p.rule and remedy in p.remedy]
    assert result, [str(error) for error in errors]
    if good is not None:
        degrees = [int(n) for k, n in map(pair, good.split()) if k[9:] in ("tp", "pp", "cp")]
        unit = 1
        for degree in degrees:
            unit *= degree
        shards = [int(n) for k, n in map(pair, good.split()) if k == "parallel.dp_shard"]
        planned(good, unit * shards[0] if shards else max(world // unit, 1) * unit)


@pytest.mark.parametrize(
    ("layout", "remedies"),
    [
        ("tp=9", {"num_heads=8": "use at most 8"}),
        ("pp=12 train.microbatch_size=1", {"only 8 layers": "use at most 10"}),
        (
            "tp=8 cp=8 dp_replicate=1000000",
            {"needs 64000000 ranks": "use smaller degrees"},
        ),
    ],
)
def test_layout_remedy_with_automatic_ranks_names_all_valid_values(
    layout: str, remedies: dict[str, str]
) -> None:
    errors = refused(layout, machine=Machine("cpu", 8))
    for rule, remedy in remedies.items():
        assert [error.remedy for error in errors if rule in error.rule] == [remedy]


def test_layout_expert_parallel_without_experts_does_not_advise_the_kind_that_is_set() -> None:
    job, _, _ = read_job("qwen3-30b-a3b", [("model.num_experts", "0")])
    with pytest.raises(InvalidConfig) as caught:
        resolve(job, CUDA)
    remedies = [error.remedy for error in caught.value.errors if error.key == "parallel.ep"]
    assert remedies == ["use 1, or model.num_experts above 0"]


def test_layout_remedy_names_only_values_that_the_other_degrees_allow() -> None:
    [error] = refused("tp=12 dp_replicate=2 train.global_batch_size=2 train.seq_len=60", 24)
    assert error.remedy == "use 1, 2, 3, 4 or 6"  # not 8, which is a divisor of 24
    errors = refused("tp=100 dp_replicate=6 train.seq_len=200", 16)
    assert "use smaller degrees, and tp of at most 8" in [error.remedy for error in errors]


def test_ulysses_replicates_keys_if_ranks_do_not_divide_groups() -> None:
    """`tests/parallel/test_context_parallel.py` computes with these heads and ranks."""
    heads = "model.num_heads=6 model.num_kv_heads=2 model.dim=96 train.seq_len=60"
    plan = planned(f"cp=3 cp_method=ulysses train.global_batch_size=4 {heads}", 3)
    assert plan.cp == 3


def test_layout_every_mistake_is_reported_at_once() -> None:
    """The report has the errors of all keys."""
    keys = {
        p.key for p in refused("tp=16 pp=2 pipeline.schedule=Nonsense cp=2 train.seq_len=63", 64)
    }
    assert keys >= {"parallel.tp", "pipeline.schedule", "train.seq_len"}
    # A wrong number of ranks does not hide errors of heads and sequence length.
    rules = [p.rule for p in refused("dp_shard=2 tp=16 cp=2 train.seq_len=63", 8)]
    for part in ("is not equal to the 8 ranks", "num_heads=8", "by cp=2 ranks"):
        assert any(part in rule for rule in rules), rules


def test_async_tensor_parallel_where_the_hardware_has_it() -> None:
    layout = "tp=2 async_tp=true compile.enable=true"
    assert planned(layout, machine=CUDA).tp == 2
    difference = Machine("cuda", 8, "NVIDIA A10G", peer_access=False)
    (error,) = refused(layout, machine=difference)
    assert "read each other's memory" in error.rule
    across = Machine("cuda", 8, "NVIDIA H100", world_size=32, local_world_size=4, peer_access=True)
    crossing = refused("tp=8 async_tp=true compile.enable=true", machine=across)
    assert [p.key for p in crossing] == ["parallel.async_tp"]
    assert "inside a node" in crossing[0].rule


def test_symmetric_memory_where_the_hardware_has_it() -> None:
    assert planned("symmetric_memory=true", machine=CUDA)
    (error,) = refused("symmetric_memory=true hierarchical_gather=true", machine=CUDA)
    assert "does not support parallel.hierarchical_gather" in error.rule


def test_documents_on_cuda_need_the_compiler_where_flex_attention_computes_them() -> None:
    documents = "data.packing=documents compile.enable"
    hopper = replace(CUDA, capability=(9, 0))
    for kind in ("selective", "budget"):
        eager = f"{documents}=false activation_checkpoint.mode={kind}"
        assert planned(eager, machine=hopper)
        (error,) = refused(f"{eager} model.attention_softcap=30", machine=hopper)
        assert error.key == "activation_checkpoint.mode"
    for kind in ("selective", "budget"):
        (error,) = refused(f"{documents}=false activation_checkpoint.mode={kind}", machine=CUDA)
        assert error.key == "activation_checkpoint.mode"
        assert planned(f"{documents}=true activation_checkpoint.mode={kind}", machine=CUDA)
        assert planned(f"{documents}=false activation_checkpoint.mode={kind}", 1)
    assert planned(f"{documents}=false activation_checkpoint.mode=full", machine=CUDA)


@pytest.mark.parametrize(
    ("masked", "plain"),
    [
        (
            "model.sliding_window=60 model.layer_pattern=L",
            "model.sliding_window=64 model.layer_pattern=L",
        ),
        (
            "model.attention_chunk=16 model.layer_pattern=GL",
            "model.attention_chunk=64 model.layer_pattern=GL",
        ),
        ("model.attention_sinks=true", ""),
        ("model.attention_softcap=30", "model.attention_softcap=30 cp=2"),
        ("model.attention_softcap=30 cp=2 cp_method=ulysses", "cp=2 cp_method=ulysses"),
    ],
)
def test_masks_and_options_on_cuda_need_the_compiler_where_operators_are_chosen(
    masked: str, plain: str
) -> None:
    selective = "train.seq_len=64 activation_checkpoint.mode=selective"
    (error,) = refused(f"{selective} {masked}", machine=CUDA)
    assert error.key == "activation_checkpoint.mode"
    assert "all attention scores" in error.rule
    assert planned(f"{selective} {plain}", machine=CUDA)
    if "cp" not in masked:
        assert planned(f"{selective} compile.enable=true {masked}", machine=CUDA)


def test_layout_hundreds_of_processes_on_a_cpu_are_refused() -> None:
    (error,) = refused(
        "dp_shard=8 tp=8 pp=8 train.global_batch_size=512", machine=Machine("cpu", 2)
    )
    assert error.key == "parallel.dp_shard"
    assert "needs 512 ranks, but 1 node with at most 64 processes" in str(error)


def test_layout_degrees_fill_the_world() -> None:
    plan = planned("tp=2 cp=2 pp=2 dp_replicate=2", 32)
    assert plan.axis_sizes == {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2}
    # 16 sequences over four data-parallel ranks; each sequence is a microbatch.
    assert (plan.local_batch_size, plan.microbatch_size, plan.num_microbatches) == (4, 1, 4)
    assert planned("tp=4", machine=Machine("cpu", 2)).world_size == 4
    assert planned("tp=2", machine=Machine("cpu", 8)).world_size == 4


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("", True),
        ("reshard_after_forward=never", False),
        ("reshard_after_forward=always", True),
        ("reshard_after_forward=2", 2),
        ("reshard_after_forward=8", True),  # all ranks: the same as always
        ("reshard_after_forward=1", False),
        ("tp=2 reshard_after_forward=2", 2),
        ("reshard_after_forward=2 train.world_size_invariant=true", False),
        ("reshard_after_forward=8 train.world_size_invariant=true", False),
        ("pp=2", False),
        ("pp=2 reshard_after_forward=always", True),
        ("dp_replicate=8", False),  # weights are not sharded
    ],
)
def test_reshard_after_forward_auto_follows_the_layout(layout: str, expected: bool | int) -> None:
    assert planned(layout, 8).reshard_after_forward is expected


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("", "step"),  # a small model: one reduction, and unsharded gradients fit
        ("model.preset=8b", "microbatch"),  # unsharded gradients: 4 bytes for each of 8 billion
        ("model.preset=8b tp=8 pp=8", "step"),
        ("model.preset=8b reshard_after_forward=never", "step"),
        ("model.preset=8b reshard_after_forward=never gradient_sync=microbatch", "microbatch"),
        ("gradient_sync=microbatch", "microbatch"),
    ],
)
def test_gradient_sync_auto_follows_the_memory_of_gradients(layout: str, expected: str) -> None:
    job, _, errors = read_job("demo", [*BATCH, *(pair(word) for word in layout.split())])
    assert errors == []
    machine = Machine("cpu", 64, world_size=64)
    assert resolve(job, machine).gradient_sync == expected


def test_microbatches_of_a_pipeline_fill_it() -> None:
    """auto: the largest microbatches that leave four per pipeline rank, if possible."""
    assert planned("pp=2 train.global_batch_size=32", 2).num_microbatches == 8
    assert planned("pp=2 train.global_batch_size=4", 2).num_microbatches == 4
    interleaved = planned("pp=2 pipeline.schedule=Interleaved1F1B train.global_batch_size=15", 2)
    # Of 15 sequences' divisors, torch's schedule takes 3 and 1: rounds of at least two, all equal.
    assert interleaved.num_microbatches == 3


def test_dp_shard_fit_is_the_smallest_group_that_fits() -> None:
    """MiCS: shard over as few ranks as memory allows, and replicate over the others."""

    def fitted(gib: float, layout: str = "", model: str = "8b") -> tuple[int, int]:
        job, _, errors = read_job(
            "demo",
            [
                ("model.preset", model),
                ("train.seq_len", "8192"),
                ("train.global_batch_size", "64"),
                ("train.microbatch_size", "1"),
                ("parallel.dp_shard", "fit"),
                *(pair(word) for word in layout.split()),
            ],
        )
        assert errors == []
        machine = Machine(
            "cuda", 8, "NVIDIA H100", world_size=64, local_world_size=8,
            memory_bytes=int(gib * 2**30),
        )  # fmt: skip
        plan = resolve(job, machine)
        assert plan.dp_shard * plan.dp_replicate * plan.tp * plan.pp * plan.cp == 64
        return plan.dp_shard, plan.dp_replicate

    # 8.03 G parameters of 16 bytes each, and 77 GiB of activations without recomputation.
    roomy, tight = fitted(400)[0], fitted(140)[0]
    assert roomy == 1
    assert 1 < tight < 64
    assert fitted(140, "tp=2")[0] < tight
    assert fitted(140, "pp=2 gradient_sync=step")[0] <= tight
    with pytest.raises(InvalidConfig, match="even over 64 ranks"):
        fitted(20)


def test_layout_groups_that_cross_nodes_are_warned_of() -> None:
    inside = Machine("cpu", 8, world_size=16, local_world_size=8)
    assert planned("tp=8", machine=inside).warnings == ()
    across = Machine("cpu", 4, world_size=16, local_world_size=4)
    (warning,) = planned("tp=8", machine=across).warnings
    assert "tp" in warning


@pytest.mark.parametrize(
    ("layout", "message", "better"),
    [
        (
            "activation_checkpoint.offload=true activation_checkpoint.offload_prefetch=8",
            "activation_checkpoint.offload_prefetch=7 or less",
            "activation_checkpoint.offload_prefetch=7",
        ),
        (
            "pp=4 activation_checkpoint.offload=true activation_checkpoint.offload_prefetch=2",
            "activation_checkpoint.offload_prefetch=1 or less",
            "activation_checkpoint.offload_prefetch=1",
        ),
        (
            "pp=8 activation_checkpoint.offload=true activation_checkpoint.offload_prefetch=1",
            "activation_checkpoint.offload=false",
            "activation_checkpoint.offload=false",
        ),
    ],
)
def test_layout_useless_or_expensive_recomputation_is_warned_of(
    layout: str, message: str, better: str
) -> None:
    key = better.partition("=")[0]
    (warning,) = planned(layout).warnings
    assert message in warning
    remaining = [word for word in layout.split() if not word.startswith(f"{key}=")]
    assert planned(" ".join([*remaining, better])).warnings == ()


def test_layout_schedule_without_deferred_gradients_is_warned_of() -> None:
    layout = "pp=2 pipeline.schedule=ZBVZeroBubble"
    (warning,) = planned(f"{layout} train.world_size_invariant=true", 2).warnings
    assert "fills no gaps of the schedule" in warning
    assert planned(layout, 2).warnings == ()


def test_layout_schedule_file_sets_the_number_of_microbatches(tmp_path: Path) -> None:
    file = tmp_path / "two.csv"
    file.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    plan = planned(f"pp=2 pipeline.schedule={file}", 2)
    assert (plan.microbatch_size, plan.num_microbatches) == (8, 2)
    assert plan.pipeline is not None
    assert plan.pipeline.stage_ranks == (0, 1)
    (error,) = refused(f"pp=2 pipeline.schedule={file} train.microbatch_size=2", 2)
    assert error.key == "train.microbatch_size"
    assert "has 2" in error.rule
    (error,) = refused(f"pp=4 pipeline.schedule={file}", 4)
    assert "2 lines for parallel.pp=4" in error.rule
