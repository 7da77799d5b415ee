"""From a Plan to live objects: ranks, devices, model and optimizer.

Apart from the launchers this is the only place that looks at the environment.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import importlib.util
import json
import os
import platform
import random
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from dataclasses import replace as changed
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

import weft
from weft.checkpoint.local import kept_steps, local_folder
from weft.checkpoint.manifest import (
    CheckpointError,
    DamagedCheckpoint,
    checkpoint_step,
    checkpoints,
    read_manifest,
)
from weft.checkpoint.state import frozen_parameters, named_buffers, named_parameters
from weft.checkpoint.storage import open_folder
from weft.checkpoint.store import Saver, load, load_frozen, load_local, set_aside
from weft.data.conversations import check_chat
from weft.data.loader import check_length
from weft.data.own import is_own
from weft.data.packing import check_conversations
from weft.data.source import STDLIB, check_path
from weft.data.text import Text
from weft.data.tokenizer import load_tokenizer, vocab_entries
from weft.job import (
    InvalidJob,
    Job,
    Problem,
    WeftError,
    difference,
    lookup,
    read_job,
    replace,
    suggest,
)
from weft.models import load_family
from weft.models.family import Init
from weft.observe.sinks import SINKS
from weft.observe.statistics import Statistics, layers_of
from weft.optim.optimizer import OPTIMIZERS, build_optimizer
from weft.optim.schedule import SCHEDULES, Decay
from weft.parallel.apply import build_parts
from weft.parallel.init import init_params
from weft.parallel.lora import init_with_adapters
from weft.parallel.mesh import Mesh, axes_of_groups, build_mesh
from weft.parallel.private import listening_store, record_flights
from weft.plan.devices import GIB
from weft.plan.resolve import Machine, Plan, resolve_nodes
from weft.plan.timetable import is_file
from weft.resilience.faults import SITES
from weft.resilience.heartbeat import name_groups
from weft.train.objective import OBJECTIVES
from weft.train.step import Engine
from weft.train.where import RANK_VARIABLES, find

# Keys that a run cannot change half-way: its weights, or its place in the data, hang on them.
FIXED = (
    "model.",
    "lora.",
    "train.seed",
    "train.seq_len",
    "train.objective",
    "data.format",
    "data.packing",
    "data.too_long",
    "optim.kind",
)
# What sinks need that weft does not bring.
TRACKERS = ("wandb", "mlflow")
# Before the first step of a run on imported weights, only what those hang on.
FIXED_AT_0 = ("model.", "data.tokenizer")


# --------------------------------------------------------------------------- before anything starts


def joined() -> bool:
    """Whether a launcher (torchrun and its like) has already made this process a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def placed(job: Job) -> Job:
    """The job with the nodes and the meeting place that the environment says, to be planned.

    What was chosen goes into job.toml, not this: the next start may be elsewhere.  A process that
    was started as a rank gets torchrun's variables here, whatever they were called, and one that
    starts ranks has none.

    Raises:
        InvalidJob: if the environment contradicts itself; see `weft.train.where`.
    """
    here = find(os.environ, str(job.run.nodes), job.run.rendezvous)
    if here.rank is not None:
        os.environ.update(here.rank)
        os.environ["MASTER_ADDR"] = reachable(here.rank["MASTER_ADDR"])
        return job
    for name in RANK_VARIABLES[:4]:
        os.environ.pop(name, None)
    if here.source == "host":
        return job
    host, colon, port = here.rendezvous.rpartition(":")
    rendezvous = reachable(host) + colon + port if host else here.rendezvous or "auto"
    return replace(job, run={"nodes": here.nodes, "rendezvous": rendezvous})


def reachable(host: str) -> str:
    """The host, or Slurm's address of a node whose name says nothing to this one."""
    if "SLURM_JOB_ID" in os.environ:
        try:
            socket.getaddrinfo(host, None)
        except OSError:
            command = ["scontrol", "show", "node", host, "--oneliner"]
            with suppress(OSError):
                shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout
                if found := re.search(r"NodeAddr=(\S+)", shown):
                    return found[1]
    return host


def detect_machine(device: str) -> Machine:
    """What there is to run on; ``device`` is the value of ``run.device``.

    Raises:
        InvalidJob: if cuda is asked for and there is none.
    """
    gpus = torch.cuda.device_count()
    if device == "cuda" and gpus == 0:
        rule = "no CUDA device is visible"
        raise InvalidJob([Problem("run.device", device, rule, "use cpu, or auto")])
    use_cuda = gpus > 0 and device != "cpu"
    return Machine(
        device="cuda" if use_cuda else "cpu",
        devices=gpus if use_cuda else len(os.sched_getaffinity(0)),
        device_name=torch.cuda.get_device_name(0) if use_cuda else platform.processor(),
        world_size=int(os.environ["WORLD_SIZE"]) if joined() else None,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if joined() else None,
        memory_bytes=torch.cuda.get_device_properties(0).total_memory
        if use_cuda
        else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        peer_access=use_cuda
        and all(torch.cuda.can_device_access_peer(0, other) for other in range(1, gpus)),
        capability=_capability() if use_cuda else (0, 0),
    )


def _capability() -> tuple[int, int]:
    found = torch.cuda.get_device_capability(0)
    # AMD counts otherwise: its 9.4 (MI300) is the first with float8.
    return (0, 0) if torch.version.hip and found < (9, 4) else found


def prepare_job(
    recipe: str, overrides: list[tuple[str, str]], problems: Iterable[Problem] = ()
) -> tuple[Job, Job, Plan]:
    """Read, check and plan a job.

    Args:
        recipe, overrides: see `read_job`.
        problems: what was wrong with the command line already.

    Returns:
        The job with absolute paths and its final ``run.dir``; the recipe without the overrides;
        the plan.

    Raises:
        InvalidJob: with every mistake in the recipe, the overrides, the plan and the files.
    """
    job, base, found = read_job(recipe, overrides)
    problems = [*problems, *found]
    if any(problem.key in ("recipe", "extends") for problem in problems):
        raise InvalidJob(problems)  # the rest would judge defaults that nobody chose
    job, base = _complete(job), _complete(base)
    bad = {problem.key for problem in problems}
    plan = None
    later: list[Problem] = []
    try:
        plan = resolve_nodes(placed(job), detect_machine(job.run.device), recipe, base)
    except InvalidJob as error:
        later += error.problems
    later += {str(found): found for found in _check_files(job, plan)}.values()
    if plan is not None:
        job = replace(job, run={"dir": plan.run_dir})
    later += _check_restarts(job.resilience.time_limit)
    unreachable = list(_check_home(job.checkpoint.dir))
    later += unreachable
    if job.run.dir != "auto" and "://" not in job.run.dir:
        later += _check_run_dir(job, bool(unreachable))
    # What only echoes a mistake that is already listed is left out.
    problems += [p for p in later if p.key not in bad and not bad.intersection(p.depends)]
    if problems or plan is None:
        raise InvalidJob(problems)
    return job, base, plan


def _complete(job: Job) -> Job:
    """Paths made absolute, so that job.toml means the same from any folder."""

    def full(value: str, word: str) -> str:
        if value == word or "://" in value:
            return value
        try:
            return str(Path(value).expanduser().absolute())
        except RuntimeError:  # ~name of nobody: an ordinary name, then
            return str(Path(value).absolute())

    def data(value: str) -> str:
        return value if is_own(value) else full(value, STDLIB)

    schedule = job.parallel.schedule
    return replace(
        job,
        run={"dir": full(job.run.dir, "auto")},
        data={
            "path": data(job.data.path),
            "mixture": {data(path): weight for path, weight in job.data.mixture.items()},
            "tokenizer": full(job.data.tokenizer, "train"),
            "chat_template": full(job.data.chat_template, "auto"),
            "cache": full(job.data.cache, "auto"),
        },
        checkpoint={
            "dir": full(job.checkpoint.dir, "auto"),
            "local": full(job.checkpoint.local, "off"),
        },
        parallel={"schedule": full(schedule, "" if is_file(schedule) else schedule)},
    )


def _check_files(job: Job, plan: Plan | None) -> Iterator[Problem]:
    if not job.data.mixture:
        yield from check_path(job.data.path)
    elif job.data.path != STDLIB:
        remedy = "name all texts in data.mixture, or one in data.path"
        yield Problem("data.path", job.data.path, "is not read beside data.mixture", remedy)
    for path in job.data.mixture:
        yield from (changed(p, key="data.mixture") for p in check_path(path))
    yield from check_chat(job.data)
    if job.data.cache != "auto":
        yield from check_writable("data.cache", job.data.cache)
    if job.compile.enable:
        yield from check_writable("compile.cache", str(Path(job.compile.cache).expanduser()))
    if job.checkpoint.local != "off":
        yield from check_writable("checkpoint.local", job.checkpoint.local)
    for key, value in (
        ("run.dir", job.run.dir),
        ("data.cache", job.data.cache),
        ("checkpoint.local", job.checkpoint.local),
    ):
        if "://" in value:
            remedy = "use a folder; only checkpoint.dir may be s3://bucket/prefix"
            yield Problem(key, value, "is no folder", remedy)
    if job.data.tokenizer != "train":
        try:
            tokenizer, _ = load_tokenizer(job.data.tokenizer)
        except InvalidJob as error:
            yield from error.problems
        else:
            if plan is not None:
                yield from _check_vocabulary(job, plan, vocab_entries(tokenizer))
    yield from check_names(job)


def _check_restarts(limit: float) -> Iterator[Problem]:
    """For torchrun every status but 0 is a failure, and 'saved' must not be 0, which means done."""
    if limit and joined() and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        rule = "torchrun would start the ranks again as soon as they have saved and ended"
        remedy = "use torchrun --max-restarts 0, or let weft train start the ranks"
        yield Problem("resilience.time_limit", limit, rule, remedy)


def _check_home(value: str) -> Iterator[Problem]:
    key = "checkpoint.dir"
    if "://" not in value:
        if value != "auto":
            yield from check_writable(key, value)
    elif "@" in value:
        rule, remedy = (
            "has credentials in it",
            "put them into ~/.aws/credentials or AWS_* variables",
        )
        yield Problem(key, f"{value.split('://')[0]}://...", rule, remedy)
    else:
        try:
            open_folder(value).exists()
        except Exception as error:  # whatever the client of the store raises
            rule = f"cannot be reached: {type(error).__name__}: {error}"
            yield Problem(key, value, rule, "see AWS_ENDPOINT_URL, AWS_PROFILE, ~/.aws")


def check_names(job: Job) -> Iterator[Problem]:
    """Does everything exist that the job calls by name?  Of files only modules are looked at."""
    if job.resilience.lighthouse != "none" and importlib.util.find_spec("torchft") is None:
        rule, remedy = "needs torchft", "pip install 'weft[torchft]'"
        yield Problem("resilience.lighthouse", job.resilience.lighthouse, rule, remedy)
    if importlib.util.find_spec("torchao") is None:
        rule, remedy = "needs torchao", "pip install 'weft[torchao]'"
        if (recipe := job.precision.float8) != "none":
            yield Problem("precision.float8", recipe, rule, remedy)
        if (states := job.optim.states) == "8bit":
            yield Problem("optim.states", states, rule, remedy)
    for name in TRACKERS:
        if name in job.observe.sinks and importlib.util.find_spec(name) is None:
            yield Problem("observe.sinks", name, f"needs {name}", f"pip install 'weft[{name}]'")
    for fault in job.resilience.faults:
        if fault.site not in SITES:
            rule, remedy = f"no site is called {fault.site!r}", suggest(fault.site, SITES)
            yield Problem("resilience.faults", fault.site, rule, remedy)
    named: list[tuple[str, str, Mapping[str, object]]] = [
        ("optim.kind", job.optim.kind, OPTIMIZERS),
        ("optim.schedule", job.optim.schedule, SCHEDULES),
        ("train.objective", job.train.objective, OBJECTIVES),
        *(("observe.sinks", sink, SINKS) for sink in job.observe.sinks),
    ]
    for name, value, table in named:
        try:
            lookup(value, table)
        except LookupError as error:
            yield Problem(name, value, str(error), suggest(value, table))


def _check_vocabulary(job: Job, plan: Plan, entries: int) -> Iterator[Problem]:
    if entries > plan.model.vocab_size:
        rule = f"has {entries} entries, more than vocab_size = {plan.model.vocab_size} of the model"
        remedy = f"use --model.vocab_size {-(-entries // 128) * 128}, or another tokenizer"
        yield Problem("data.tokenizer", job.data.tokenizer, rule, remedy)


def check_writable(key: str, value: str) -> Iterator[Problem]:
    """Nothing is made: the probe, which is never visible, goes into the folder above."""
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(value)  # a name that is too long is seen here
        above = next(path for path in (Path(value), *Path(value).parents) if os.path.lexists(path))
        tempfile.TemporaryFile(dir=above).close()
    except OSError as error:
        rule = f"cannot be written: {error.strerror}: {error.filename or value}"
        yield Problem(key, value, rule, "use another folder")


def _check_run_dir(job: Job, unreachable: bool) -> Iterator[Problem]:
    """Is the run's folder writable, and is the run in it, whose checkpoints may be, the same?"""
    folder = Path(job.run.dir)
    wrong = list(check_writable("run.dir", job.run.dir))
    yield from wrong
    before = folder / "job.toml"
    if wrong or unreachable:
        return
    if not (found := checkpoints(home_of(job.checkpoint.dir, folder))):
        here = checkpoints(home_of("auto", folder))
        if here and before.is_file():  # imported, or moved: it would start from random weights
            rule = f"has none of the run's checkpoints, which are in {here[0].parent}"
            remedy = "copy them there first, or leave checkpoint.dir out"
            yield Problem("checkpoint.dir", job.checkpoint.dir, rule, remedy)
        return
    if not before.is_file() and job.resilience.lighthouse != "none":
        return  # they are another replica group's
    if not before.is_file():
        rule = "holds checkpoints but no job.toml: whether they are this run's cannot be told"
        yield Problem("run.dir", job.run.dir, rule, "use another --run.dir, or put the file back")
        return
    old, _, problems = read_job(str(before))
    if problems:
        rule = f"holds a run whose job.toml is damaged ({problems[0]})"
        yield Problem("run.dir", job.run.dir, rule, "use another --run.dir, or mend the file")
        return
    fixed = FIXED if checkpoint_step(found[-1]) else FIXED_AT_0
    for name, (ours, theirs) in difference(job, old).items():
        if name.startswith(fixed):
            rule = f"the run in {folder} was started with {theirs}"
            remedy = "use another --run.dir, or the value that it was started with"
            yield Problem(name, ours, rule, remedy)


def check_text(job: Job, plan: Plan, text: Text) -> None:
    """The text must fit the model, and be the one that the run has been trained on so far.

    Raises:
        InvalidJob: if the text has no whole sequence, the model too few entries, or the newest
            checkpoint another text.
    """
    problems = list(_check_vocabulary(job, plan, text.vocab_size))
    for source in text.sources:
        what = f"the train text of {source.name}" if job.data.mixture else "the train text"
        tokens = source.store.manifest.train.tokens
        if source.store.manifest.kind == "text":
            problems += check_length(tokens, job.train.seq_len, what)
        problems += check_conversations(source.store, job.train.seq_len, job.data)
    for path in reversed(checkpoints(home_of(job.checkpoint.dir, Path(plan.run_dir)))):
        try:
            data = read_manifest(path).get("data")
        except DamagedCheckpoint:
            continue  # loading will tell
        if data not in (None, text.fingerprint):  # imported weights have seen no text of ours
            rule = f"is not, or no longer, the text that {path} was trained on"
            key = "mixture" if job.data.mixture else "path"
            value = getattr(job.data, key)
            problems.append(Problem(f"data.{key}", value, rule, "use another --run.dir"))
        break
    if problems:
        raise InvalidJob(problems)


# --------------------------------------------------------------------------- the ranks


@dataclass(frozen=True)
class Rank:
    """This process among the others."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device


def _meeting() -> dict[str, Any]:
    """Where the ranks meet, as arguments of init_process_group; empty: as torch does it."""
    if not joined():
        alone: Any = dist
        return {"store": alone.HashStore(), "rank": 0, "world_size": 1}
    host, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
    if not port or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return {}  # the launcher has a store
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = listening_store(host, port, rank == 0, size)
    return {"store": store, "rank": rank, "world_size": size}


@contextmanager
def connect(plan: Plan, deterministic: bool = False) -> Iterator[Rank]:
    """Join the process group (of one, if need be) and leave it at the end.

    Args:
        deterministic: whether all that is computed inside is the same to the bit every time.
    """
    if deterministic:
        be_deterministic()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    meeting = _meeting()
    record_flights(str(Path(plan.run_dir).absolute() / "logs" / "flight-rank-"))
    if plan.device == "cuda":
        # A scheduler may show each rank nothing but its own GPU.
        device = torch.device("cuda", local_rank if torch.cuda.device_count() > 1 else 0)
        torch.cuda.set_device(device)
        # gloo beside NCCL: what ranks tell each other about checkpoints needs no GPU.
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, **meeting)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(plan.threads)
        keep_freed_memory()
        dist.init_process_group("gloo", **meeting)
    try:
        with fastest_attention(device, deterministic):
            yield Rank(dist.get_rank(), local_rank, dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()


def be_deterministic() -> None:
    """Let operators give the same bits every time, or raise where they cannot; before CUDA starts.

    What is not initialised is not filled: nothing of weft's reads it, and it costs time.
    """
    # Two buffers of a size that does not depend on timing: NVIDIA's cuBLAS documentation, 'Results
    # reproducibility'.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


def fastest_attention(
    device: torch.device, deterministic: bool = False
) -> AbstractContextManager[None]:
    """In this context attention without a mask takes the fastest kernel that is there.

    By itself PyTorch prefers FlashAttention 2, which was written for Ampere; from Hopper on
    cuDNN's is faster.  What a kernel cannot do goes to the next.  Of those with a backward pass
    that gives the same bits every time, FlashAttention is.
    """
    if deterministic and device.type == "cuda":
        return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return nullcontext()
    kernels = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
    order = [SDPBackend.__members__[name] for name in kernels]
    return sdpa_kernel(order, set_priority=True)


def keep_freed_memory() -> None:
    """Let the C library keep what a step frees: the next one needs it again.

    glibc gives blocks of some MiB, and the end of its heap, back to the system as soon as they are
    free, and to have them again costs a page fault for every 4 KiB: with FSDP up to a tenth of a
    step.  Only the kernel's count of what is resident is larger for it, not its peak.  CUDA has an
    allocator of torch's own, which does so anyway; other C libraries have no such switch.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        trim_threshold, mmap_threshold = -1, -3  # of <malloc.h>
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 32 << 20)  # the most that it takes


# --------------------------------------------------------------------------- what is trained


class Built(NamedTuple):
    """What this rank trains."""

    parts: list[nn.Module]  # of the model: one, or one for each of its pipeline stages
    mesh: Mesh
    engine: Engine
    optimizer: Optimizer
    decay: Decay


def build(job: Job, plan: Plan, rank: Rank) -> Built:
    """Model, optimizer and learning-rate decay of this rank.

    The initial weights are the same in every layout.
    """
    random.seed(job.train.seed)
    torch.manual_seed(job.train.seed)
    family = load_family(job.model.kind)
    mesh = build_mesh(plan)
    name_groups(axes_of_groups(mesh))
    parts = build_parts(job, plan, mesh, family)
    for part in parts:
        allocate(part, rank.device, job.parallel.cpu_offload)

    def own(name: str) -> Init:
        return family.init_of(name, plan.model)

    init_params(
        chain(named_parameters(parts), frozen_parameters(parts), named_buffers(parts)),
        job.train.seed,
        lambda name: init_with_adapters(name, own),
    )
    optimizer = build_optimizer(
        named_parameters(parts),
        job.optim,
        lookup(job.optim.kind, OPTIMIZERS),
        family.decays,
        {param for part in parts for block in family.blocks(part) for param in block.parameters()},
    )
    engine = Engine(parts, family, job, plan, mesh, rank.device)
    return Built(parts, mesh, engine, optimizer, lookup(job.optim.schedule, SCHEDULES))


def allocate(part: nn.Module, device: torch.device, cpu_offload: bool) -> None:
    """Give the parameters of a part on the meta device their memory, uninitialised."""
    part.to_empty(device="cpu" if cpu_offload else device)
    if cpu_offload:  # parameters travel to the device when they are used, buffers stay there
        for module in part.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))


@dataclass(frozen=True)
class Position:
    """How far a run is: optimizer steps done, and sequences consumed.

    ``samples`` alone decides which data comes next, whatever the batch and the layout become.
    ``watch`` is what the watch for anomalies knows: see `weft.resilience.anomaly`.  ``base`` is the
    name of the checkpoint beside the run's own that has the weights which are not trained; empty if
    there are none, or if they follow from the seed.
    """

    step: int
    samples: int
    watch: Mapping[str, Any] = field(default_factory=dict)
    base: str = ""

    def manifest(self, plan: Plan, text: Text) -> dict[str, Any]:
        """What a checkpoint says of itself, as JSON values."""
        return {
            "step": self.step,
            "samples": self.samples,
            "watch": self.watch,
            **({"base": self.base} if self.base else {}),
            "data": text.fingerprint,
            "mesh": plan.sizes,
            "weft": weft.__version__,
            "torch": torch.__version__,
        }


def open_statistics(job: Job, plan: Plan, mesh: Mesh, parts: list[nn.Module]) -> Statistics:
    """This rank's statistics of the steps of ``debug.statistics``."""
    blocks = load_family(job.model.kind).blocks
    stages = plan.pipeline.stages_of(mesh.at["pp"]) if plan.pipeline is not None else [0]
    layers = [
        (stage, layers_of(part, set(blocks(part))))
        for stage, part in zip(stages, parts, strict=True)
    ]
    path = Path(plan.run_dir) / "statistics.jsonl"
    params = dict(named_parameters(parts))
    return Statistics(job.debug.statistics, path, layers, params, plan.tokens_per_step)


@contextmanager
def owning(folder: Path, taken: Problem, shared: bool = False) -> Iterator[None]:
    """Hold a folder's lock: two processes that write into it would undo each other's work.

    The kernel frees it when the process ends, however that happens.

    Args:
        taken: what to say if another process holds it.
        shared: with others that hold it shared.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("a+")
    except OSError as error:
        raise unwritable(folder, error) from error
    with file:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InvalidJob([taken]) from error
        yield


def unwritable(folder: Path, error: OSError) -> WeftError:
    """What to say of a folder that turned out not to take what was written."""
    return WeftError(f"{error.filename or folder}: cannot be written: {error.strerror}")


def home_of(value: str, run: Path) -> Path:
    """Where the checkpoints of the run in folder ``run`` lie, by the value of checkpoint.dir."""
    return run / "checkpoints" if value == "auto" else open_folder(value)


def resume(
    folder: Path,
    local: str,
    parts: list[nn.Module],
    optimizer: Optimizer,
    warn: Callable[[str], None],
    frozen: bool = True,
) -> Position:
    """Load the newest sound checkpoint in ``folder``; the start of the run if there is none at all.

    A damaged one is renamed, so that it is out of the way and not lost.  Weights that are not
    trained come from that of step 0, which has all.

    Args:
        frozen: whether they are to be loaded, too.
        local: the value of checkpoint.local; what lies there is taken if it is as new or newer.
        warn: told what is damaged, on every rank.

    Raises:
        CheckpointError: if all are damaged: to start from scratch is not for weft to decide.
    """
    # One decision for all ranks, each of which might see the folder at another moment.
    found = [checkpoints(folder)[::-1] if dist.get_rank() == 0 else []]
    dist.broadcast_object_list(found, src=0)
    at_home = found[0]
    base = base_of(at_home, parts)
    if frozen and base is None and any(True for _ in frozen_parameters(parts)):
        rule = "the weights that adapters are trained to are random: there is no checkpoint"
        warn(f"{rule} of step 0, as weft import makes one")
    if base is not None:
        at_home = [path for path in at_home if path != base]
        if frozen:
            load_frozen(base, parts)
    # Before the first one it is not known whether what lies there is of the same model and text.
    on_nodes = local_folder(local, folder) if at_home else None
    kept = [(on_nodes, *each) for each in kept_steps(on_nodes, folder)] if on_nodes else []
    for path in at_home:
        while kept and kept[-1][1] >= checkpoint_step(path):
            try:
                manifest = load_local(*kept.pop(), parts, optimizer)
            except CheckpointError as error:
                warn(f"{error}; taking the one before")
            else:
                return _position(manifest, base)
        try:
            manifest = load(path, parts, optimizer)
        except DamagedCheckpoint as error:
            dist.barrier()  # nobody reads it any more
            if dist.get_rank() == 0:
                set_aside(path, "damaged")
            warn(f"damaged: {error}; taking the one before")
        else:
            return _position(manifest, base)
    if at_home:
        rule = "every checkpoint is damaged; nothing was started"
        raise CheckpointError(f"{folder}: {rule}: move the folder away to start from scratch")
    return Position(0, 0, base="" if base is None else base.name)


def base_of(found: Sequence[Path], parts: Sequence[nn.Module]) -> Path | None:
    """Of a run's checkpoints the one of step 0, if this model has weights that are not trained."""
    if not any(True for _ in frozen_parameters(parts)):
        return None
    return next((path for path in found if checkpoint_step(path) == 0), None)


def _position(manifest: Mapping[str, Any], base: Path | None) -> Position:
    name, there = manifest.get("base", ""), "" if base is None else base.name
    if name != there:
        rule = f"step {manifest['step']} has adapters to the weights of {name or 'the seed'}"
        remedy = "put it back" if name else "take it away"
        raise CheckpointError(
            f"{rule}, and {name or there} is {'not ' * bool(name)}there; {remedy}"
        )
    return Position(manifest["step"], manifest["samples"], manifest.get("watch", {}), name)


def rewind(
    folder: Path,
    local: str,
    saver: Saver,
    parts: list[nn.Module],
    optimizer: Optimizer,
    warn: Callable[[str], None],
) -> Position:
    """`resume` in the middle of a run, which goes on from there on a branch of its own.

    Raises:
        CheckpointError: if there is no checkpoint yet: early trouble has a cause that samples do
            not cure.
    """
    saver.close()
    at = resume(folder, local, parts, optimizer, warn, frozen=False)
    if at.step == 0:
        rule = "there is no checkpoint to rewind to yet"
        raise CheckpointError(
            f"{folder}: {rule}; try a lower --optim.lr, or --resilience.anomaly skip"
        )
    saver.take(at.step)
    return at


# --------------------------------------------------------------------------- the run's folder


def write_plan(folder: Path, plan: Plan) -> None:
    """``plan.json`` and ``environment.json``: what was derived, and what it ran on."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(plan.to_json() + "\n", "utf-8")
    environment: dict[str, Any] = {
        "weft": weft.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "memory_gib": _memory_gib(plan.device),
        "command": sys.argv,
        "git": _git_commit(),
    }
    (folder / "environment.json").write_text(json.dumps(environment, indent=2) + "\n", "utf-8")


def _memory_gib(device: str) -> float | None:
    """Of one GPU, or of the host; None if there is no GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        return None
    return (detect_machine(device).memory_bytes or 0) / GIB


def _git_commit() -> str | None:
    """The commit of weft's own checkout ('-dirty' with changes), None where it is installed."""
    folder = Path(weft.__file__).parent.parent
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
