"""Plan: everything that follows from a Job on a given machine, by one pure function.

The trainer consumes the Plan, ``--dry-run`` prints it and the tests assert on it;
nobody computes a degree or a batch size a second time.  ``resolve`` reads no file,
asks no device and starts nothing: the same arguments give the same Plan, or the
same complete list of reasons why there is none.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from weft.job import InvalidJob, Job, Problem, difference, recipe_names
from weft.models import load_family, resolve_model
from weft.plan.devices import peak_flops

Device = Literal["cpu", "cuda"]

# On CPU the ranks of one machine share its cores; more than this many only add traffic.
MAX_AUTO_CPU_WORKERS = 4

# Changing one of these does not make another model: the run goes on in the same folder.
SAME_RUN = (
    "run.",
    "parallel.",
    "checkpoint.",
    "observe.",
    "train.steps",
    "train.microbatch",
    "train.eval",
)


@dataclass(frozen=True)
class Machine:
    """What there is to run on.

    ``devices`` counts this host's GPUs, or its cores on CPU.  The sizes are those of the job and
    of this host's part of it where a launcher has decided them, and None where weft decides.
    """

    device: Device
    devices: int
    device_name: str = ""
    world_size: int | None = None
    local_world_size: int | None = None


@dataclass(frozen=True)
class Plan:
    """What a run will do.  Counts of sequences are per optimizer step."""

    run_dir: str
    device: Device
    world_size: int
    dp_replicate: int
    dp_shard: int
    threads: int  # per rank, for CPU operators
    local_batch: int  # sequences of one rank
    microbatch: int  # sequences of one forward pass
    accumulation: int  # forward passes of one rank
    tokens_per_step: int
    compute_dtype: Literal["float32", "bfloat16"]
    reduce_dtype: Literal["float32", "bfloat16"]
    model: Any  # the family's frozen configuration
    num_params: int
    flops_per_token: float  # forward and backward, without recomputation
    peak_flops: float | None  # of one device in compute_dtype; None where unknown

    @property
    def dp_size(self) -> int:
        """Ranks that read different data."""
        return self.dp_replicate * self.dp_shard

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"model": self.model.model_dump()}, indent=2)


def resolve(job: Job, machine: Machine, recipe: str = "run", base: Job | None = None) -> Plan:
    """Derive the Plan.

    Args:
        job: what the user chose.
        machine: what there is to run on.
        recipe: the recipe's name, and ``base`` the recipe without overrides: they name the
            run's folder when ``run.dir`` is ``auto``.

    Raises:
        InvalidJob: with every reason why the job cannot run there.
    """
    problems: list[Problem] = []
    train, parallel = job.train, job.parallel

    model, found = resolve_model(job.model.kind, job.model.preset, job.model.overrides())
    problems += found
    if model is not None:
        problems += _check_model_against_data(job, model)

    world = machine.world_size or _workers(job, machine, problems)
    replicate = parallel.dp_replicate
    shard = max(1, world // replicate) if parallel.dp_shard == "auto" else parallel.dp_shard
    depends = ("run.workers", "parallel.dp_replicate", "parallel.dp_shard")
    if parallel.dp_shard == "auto" and world % replicate:
        problems.append(
            Problem(
                "parallel.dp_replicate",
                replicate,
                f"does not divide the {world} ranks",
                f"use {either(divisors(world))}",
                depends,
            )
        )
    elif replicate * shard != world:
        fits = f"use {world // replicate}, or auto" if world % replicate == 0 else "use auto"
        problems.append(
            Problem(
                "parallel.dp_shard",
                shard,
                f"times dp_replicate = {replicate} is not the number of ranks, {world}",
                f"{fits}, or run.workers = {replicate * shard}",
                depends,
            )
        )

    dp_size = world
    local, rest = divmod(train.global_batch, dp_size)
    if rest:
        near = [n for n in (local * dp_size, (local + 1) * dp_size) if n]
        unit = replicate * (1 if parallel.dp_shard == "auto" else parallel.dp_shard)
        worlds = [n for n in divisors(train.global_batch, dp_size) if n % unit == 0]
        problems.append(
            Problem(
                "train.global_batch",
                train.global_batch,
                f"does not divide over the {dp_size} data-parallel ranks",
                f"use {either(near)}" + (f", or run.workers = {either(worlds)}" if worlds else ""),
                depends,
            )
        )
    microbatch = max(1, local) if train.microbatch == "auto" else train.microbatch
    if not rest and local % microbatch:
        problems.append(
            Problem(
                "train.microbatch",
                microbatch,
                f"does not divide the {local} sequences of each rank",
                f"use {either(divisors(local))}, or auto",
                ("train.global_batch", *depends),
            )
        )
    if problems or model is None:
        raise InvalidJob(problems)

    family = load_family(job.model.kind)
    compute = job.precision.compute
    if compute == "auto":
        compute = "bfloat16" if machine.device == "cuda" else "float32"
    return Plan(
        run_dir=_run_dir(job, recipe, base or job),
        device=machine.device,
        world_size=world,
        dp_replicate=replicate,
        dp_shard=shard,
        threads=max(1, machine.devices // (machine.local_world_size or world)),
        local_batch=local,
        microbatch=microbatch,
        accumulation=local // microbatch,
        tokens_per_step=train.global_batch * train.seq_len,
        compute_dtype=compute,
        reduce_dtype=job.precision.reduce,
        model=model,
        num_params=family.num_params(model),
        flops_per_token=family.flops_per_token(model, train.seq_len),
        peak_flops=peak_flops(machine.device_name) if compute == "bfloat16" else None,
    )


def _check_model_against_data(job: Job, model: Any) -> Iterable[Problem]:
    if job.train.seq_len > model.max_seq_len:
        yield Problem(
            "train.seq_len",
            job.train.seq_len,
            f"exceeds max_seq_len = {model.max_seq_len} of {job.model.kind}-{job.model.preset}",
            f"use at most {model.max_seq_len}, or --model.max_seq_len {job.train.seq_len}",
            ("model.preset", "model.max_seq_len"),
        )
    if job.data.tokenizer == "train" and job.data.vocab_size > model.vocab_size:
        yield Problem(
            "data.vocab_size",
            job.data.vocab_size,
            f"exceeds vocab_size = {model.vocab_size} of {job.model.kind}-{job.model.preset}",
            f"use at most {model.vocab_size}, or --model.vocab_size {job.data.vocab_size}",
            ("model.preset", "model.vocab_size"),
        )


def _workers(job: Job, machine: Machine, problems: list[Problem]) -> int:
    """How many local processes weft starts."""
    asked = job.run.workers
    replicate, shard = job.parallel.dp_replicate, job.parallel.dp_shard
    limit = machine.devices
    if asked == "auto" and shard != "auto":
        asked = replicate * shard
    if asked != "auto":
        if machine.device == "cuda" and asked > limit:
            problems.append(
                Problem(
                    "run.workers",
                    asked,
                    f"exceeds the {limit} GPUs of this machine",
                    f"use at most {limit}, or --run.device cpu",
                    ("run.device", "parallel.dp_replicate", "parallel.dp_shard"),
                )
            )
        return asked
    if machine.device == "cpu":
        limit = min(limit, MAX_AUTO_CPU_WORKERS)
    step = job.train.microbatch if job.train.microbatch != "auto" else 1
    fitting = [
        n
        for n in range(1, limit + 1)
        if n % replicate == 0 and job.train.global_batch % (n * step) == 0
    ]
    return max(fitting, default=replicate)


def _run_dir(job: Job, recipe: str, base: Job) -> str:
    """``run.dir``, or ``runs/<recipe>`` with a hash of the overrides that make another model.

    So the same command goes on with the same run, and another one never lands in it.
    """
    if job.run.dir != "auto":
        return job.run.dir
    # A recipe of the user's may change, or have a namesake: all of it counts, not the overrides.
    whole = difference(job, base) if recipe in recipe_names() else difference(job, Job())
    changes = {name: ours for name, (ours, _) in whole.items() if not name.startswith(SAME_RUN)}
    text = json.dumps(changes, sort_keys=True, default=str)
    suffix = "-" + hashlib.sha256(text.encode()).hexdigest()[:8] if changes else ""
    return str(Path("runs").absolute() / f"{Path(recipe).stem}{suffix}")


def divisors(n: int, at_most: int | None = None) -> list[int]:
    """Divisors of ``n`` in order, none above ``at_most``."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    every = sorted({*small, *(n // d for d in small)})
    return [d for d in every if d <= (at_most or n)]


def either(values: list[int]) -> str:
    """``[1, 2, 4]`` -> ``'1, 2 or 4'``; a long list is cut in the middle."""
    words = [str(value) for value in values]
    if len(words) > 8:
        words = [*words[:4], "...", *words[-3:]]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
