"""Job: everything that the user chose for a run, and nothing else.

A Job is a tree of frozen sections.  It is read from a TOML recipe (which may
``extends`` another one), overridden from the command line as
``--section.key value``, and written back whole as ``job.toml``.  Nothing that
can be derived is stored here: degrees, batch arithmetic and sizes live in the
Plan, which ``weft.plan.resolve`` makes from a Job.

Two rules keep mistakes cheap for the user:

* Reading never stops at the first mistake.  A bad value is set aside, with a
  Problem that says so, and the rest is still read and planned, so that one
  attempt shows every mistake.
* Values in TOML have their own types and are taken strictly (``steps = "100"``
  is a mistake); values on the command line are text and are read by the type of
  the key they go to.  No key is ever null, since TOML cannot write that.

This module imports neither torch nor anything else of weft.
"""

from __future__ import annotations

import difflib
import importlib
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

T = TypeVar("T")

RECIPES = resources.files("weft") / "recipes"
SHOWN = 10  # of many things that one problem is about


# --------------------------------------------------------------------------- problems


class _Missing:
    def __repr__(self) -> str:
        return "(missing)"


MISSING = _Missing()


@dataclass(frozen=True)
class Problem:
    """One mistake of the user's: key, value, rule, remedy.

    ``depends`` names the other keys that the rule read.  When one of those is
    itself wrong, this problem may be only its echo and is not shown.
    """

    key: str
    value: object
    rule: str
    remedy: str = ""
    depends: tuple[str, ...] = ()

    def __str__(self) -> str:
        shown = json.dumps(self.value) if isinstance(self.value, bool | str) else str(self.value)
        head = self.key if self.value is MISSING else f"{self.key} = {shown}"
        return f"{head}: {self.rule}" + (f"; {self.remedy}" if self.remedy else "")


class WeftError(Exception):
    """A failure that was foreseen: its message is for people, and needs no traceback."""


class InvalidJob(WeftError):
    """The run cannot start; ``problems`` lists every reason that was found."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def suggest(name: str, known: Iterable[str]) -> str:
    """'did you mean X?' for the nearest of ``known``, or the whole list if none is near."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"


def nearest_key(name: str, beside: Iterable[str] = ()) -> str:
    """The remedy for an unknown ``section.key`` (or bare key): the nearest valid one.

    ``beside``: keys that are valid there and not among ``keys()``.
    """
    every = [*keys(), *beside]
    section, dot, rest = name.partition(".")
    if dot and section not in SECTIONS:
        for other in difflib.get_close_matches(section, SECTIONS, n=1, cutoff=0.6):
            open_to_all = SECTIONS[other].model_config["extra"] == "allow"
            if open_to_all or f"{other}.{rest}" in every:
                return f"did you mean '{other}.{rest}'?"
    near = difflib.get_close_matches(name, every, n=1, cutoff=0.7)
    if not near:
        last = name.rsplit(".", 1)[-1]
        by_last = {key.rsplit(".", 1)[-1]: key for key in every}
        near = [by_last[k] for k in difflib.get_close_matches(last, by_last, n=1, cutoff=0.7)]
    return f"did you mean {near[0]!r}?" if near else "see 'weft train --help' for every key"


def some(lines: Sequence[str], separator: str = ", ", count: int | None = None) -> str:
    """The first `SHOWN`, and how many more there are (of ``count``, if not all are listed)."""
    more = (len(lines) if count is None else count) - len(lines[:SHOWN])
    return separator.join([*lines[:SHOWN], *([f"and {more:,} more"] if more else [])])


def lookup(name: str, table: Mapping[str, T]) -> T:
    """``table[name]``, or the attribute that ``module:attribute`` names.

    Raises:
        LookupError: saying what is not there.
    """
    if name in table:
        return table[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise LookupError("unknown name, and not of the form module:attribute")
    try:
        found: T = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever the user's module raises
        raise LookupError(f"cannot be imported: {type(error).__name__}: {error}") from error
    return found


# --------------------------------------------------------------------------- sections


class Section(BaseModel):
    """A frozen group of keys.  Unknown keys are refused; NaN and infinity are no values."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


Auto = Literal["auto"]
# Bounded, so that no arithmetic on them takes long.
MOST = 2**31 - 1
Positive = Annotated[int, Field(ge=1, le=MOST)]
NonNegative = Annotated[int, Field(ge=0, le=MOST)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
# Paths, names and options enter scripts, manifests and messages, where a newline would begin
# another command.  Lines of shell are the user's own script, and may have several.
ONE_LINE = r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$"
NO_NUL = r"^[^\x00]*$"
Text = Annotated[str, Field(min_length=1, pattern=ONE_LINE)]
Name = Annotated[str, Field(pattern=ONE_LINE)]
ShellLines = Annotated[str, Field(min_length=1, pattern=NO_NUL)]


def steps_of(text: str) -> list[range]:
    """The steps that a key names: ``"7,20-30"`` are the seventh, and 20 to 30; "" are none.

    Raises:
        ValueError: if it is no such text.
    """
    found = []
    for part in text.split(",") if text else []:
        first, _, last = part.partition("-")
        bounds = [first, last or first] if "-" not in part or last else []
        if not bounds or not all(re.fullmatch(r"\s*[0-9]{1,9}\s*", bound) for bound in bounds):
            raise ValueError("must be steps such as 7 or 7,20-30")
        steps = range(int(bounds[0]), int(bounds[1]) + 1)
        if not steps or steps[0] < 1:
            raise ValueError("must be steps from 1, the smaller of a range first")
        found.append(steps)
    return found


def _check_steps(text: str) -> str:
    steps_of(text)
    return text


Steps = Annotated[str, AfterValidator(_check_steps)]


def key(default: Any, description: str, **rules: Any) -> Any:
    """A key with its default and the sentence that help text and schema show."""
    return Field(default, description=description, **rules)


class RunSection(Section):
    """Where a run lies, and what it runs on."""

    dir: Text = key(
        "auto", "folder of the run; auto: runs/<recipe>, plus a short hash of what was overridden"
    )
    workers: Positive | Auto = key(
        "auto",
        "processes of each node; auto: one per GPU, or up to 4 on CPU sharing its cores",
    )
    nodes: Positive | Text = key(
        "auto",
        "nodes that start this command, or MIN:MAX that may come and go; auto: as torchrun's "
        "or the scheduler's environment says, or 1",
    )
    rendezvous: Text = key(
        "auto",
        "HOST:PORT where several nodes meet, on one of them; auto: as the environment says",
    )
    device: Literal["auto", "cpu", "cuda"] = key("auto", "where to compute; auto: cuda if present")
    cluster: Text = key(
        "local",
        "what weft plan plans for: NODESxDEVICESxNAME, such as 64x8xH100; local: this machine",
    )


class ModelSection(Section):
    """The model family and preset; further keys override fields of its configuration."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    kind: Text = key("llama", "model family: a name of weft's, or module:attribute of your own")
    preset: Name = key("toy", "named size of the family")

    def overrides(self) -> dict[str, Any]:
        """The keys that are fields of the family's configuration."""
        return dict(self.__pydantic_extra__ or {})


class DataSection(Section):
    """What is trained on, and how it becomes rows of tokens; see docs/data.md."""

    path: Text = key(
        "python-stdlib",
        "data to train on: a file, a folder or a glob of text, JSONL, Parquet or Arrow, also at "
        "s3://; hf://org/name[:config][@split]; module:function of yours that gives documents; a "
        "store of tokens, prepared or of others; or python-stdlib",
    )
    mixture: dict[Text, Annotated[float, Field(gt=0)]] = key(
        {},
        "instead of data.path several texts, each with its weight in the tokens trained on: "
        '{"web/" = 0.7, "code/" = 0.3}; on the command line web/=0.7,code/=0.3',
    )
    field: Text = key("text", "where a file has many documents: the field or column with the text")
    format: Literal["text", "chat", "preferences"] = key(
        "text",
        "what data.path holds: text; chat: JSONL lines with messages, or with prompt and response; "
        "preferences: lines with prompt, chosen and rejected, for train.objective dpo",
    )
    tokenizer: Text = key("train", "path of a tokenizer.json; train: make one from the text")
    chat_template: Text = key(
        "auto",
        "file that writes conversations as text, in Jinja; auto: chat_template.jinja, or what "
        "tokenizer_config.json has, beside the tokenizer",
    )
    vocab_size: Annotated[int, Field(ge=257, le=MOST)] = key(
        4096, "entries of the tokenizer that is trained from the text"
    )
    holdout: Annotated[float, Field(gt=0, lt=0.5)] = key(
        0.05, "share of the text held out for evaluation"
    )
    packing: Literal["windows", "documents", "best_fit"] = key(
        "windows",
        "of text: rows cut from the token stream; documents: attention and loss stay inside a "
        "document; best_fit: so, too, and what fits into a row is not cut; of conversations: "
        "always whole ones, by best fit",
    )
    too_long: Literal["error", "skip", "truncate"] = key(
        "error", "for a conversation that is longer than a row: stop, leave it out, or cut its end"
    )
    invalid_utf8: Literal["error", "replace", "skip"] = key(
        "error",
        "for a file (or one of its documents) that is not UTF-8: stop, replace the bad bytes, or "
        "leave it out",
    )
    cache: Text = key("auto", "folder for prepared text; auto: the user's cache folder")

    @property
    def keeps_documents(self) -> bool:
        """Whether rows have several documents that do not see each other."""
        return self.format != "text" or self.packing != "windows"


class TrainSection(Section):
    """How much of what is trained for how long, and what is minimised."""

    steps: Positive = key(1000, "optimizer steps of the whole run")
    seed: Seed = key(0, "decides the initial weights and the order of the data")
    seq_len: Positive = key(1024, "tokens per sequence")
    global_batch: Positive = key(64, "sequences per optimizer step, over all ranks")
    microbatch: Positive | Auto = key(
        "auto",
        "sequences per rank and forward pass; auto: the rank's whole share, but several in a "
        "pipeline",
    )
    canonical: bool = key(
        False,
        "add up gradients row by row in the order of the global batch: the same weights, bit for "
        "bit, on any number of ranks; slower, and each rank holds the whole model",
    )
    objective: Text = key(
        "next_token",
        "what is minimised: next_token, dpo (of data.format preferences), or module:function of "
        "your own",
    )
    dpo_beta: Annotated[float, Field(gt=0)] = key(
        0.1, "dpo: what a reward is worth against leaving the initial model"
    )
    eval_interval: NonNegative = key(0, "steps between evaluations; 0: only at the end")
    eval_sequences: Positive = key(64, "held-out sequences per evaluation")


class LoraSection(Section):
    """Adapters beside frozen matrices (LoRA, QLoRA); see docs/fine-tuning.md."""

    rank: NonNegative = key(0, "width of the adapters; 0: all weights are trained")
    alpha: Annotated[float, Field(gt=0)] = key(16.0, "adapters count alpha / rank")
    rank_stabilized: bool = key(False, "they count alpha / sqrt(rank) (rsLoRA)")
    targets: tuple[Text, ...] = key(
        (), "linear layers that get one: q_proj, v_proj, ...; none named: all of the blocks"
    )
    quantize: Literal["none", "int8", "nf4"] = key(
        "none",
        "what the blocks' frozen matrices are kept in, 64 numbers to a scale (nf4: QLoRA); none: "
        "in the dtype that they are computed in",
    )


class OptimSection(Section):
    """The optimizer and its learning rate."""

    kind: Name = key("adamw", "optimizer: adamw, muon, or module:function of your own")
    states: Literal["float32", "bfloat16", "8bit"] = key(
        "float32",
        "adamw: what its moments are kept in; 8bit: those of the blocks' matrices, all others stay "
        "float32",
    )
    momentum: Annotated[float, Field(ge=0, lt=1)] = key(0.95, "muon: decay of the momentum")
    lr: Annotated[float, Field(gt=0)] = key(3e-4, "peak learning rate")
    beta1: Annotated[float, Field(ge=0, lt=1)] = key(0.9, "decay of the first moment")
    beta2: Annotated[float, Field(ge=0, lt=1)] = key(0.95, "decay of the second moment")
    eps: Annotated[float, Field(gt=0)] = key(1e-8, "added to the denominator")
    weight_decay: Annotated[float, Field(ge=0)] = key(
        0.1, "decoupled decay of matrices; gains and embeddings have none"
    )
    max_grad_norm: Annotated[float, Field(gt=0)] = key(
        1.0, "global gradient norm above which gradients are scaled down"
    )
    schedule: Name = key(
        "wsd", "learning rate after warm-up: wsd, cosine, linear, or module:function of your own"
    )
    warmup_steps: NonNegative = key(100, "steps of linear warm-up")
    decay_fraction: Annotated[float, Field(ge=0, le=1)] = key(
        0.2, "wsd: share of the steps after warm-up spent decaying, at the end"
    )
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = key(
        0.1, "learning rate at the end of its decay, as a share of the peak"
    )


class ParallelSection(Section):
    """Degrees of each kind of parallelism; their product, without ep, is the number of ranks."""

    dp_replicate: Positive = key(1, "replicas of the sharded model")
    dp_shard: Positive | Literal["auto", "fit"] = key(
        "auto",
        "ranks that share one copy of the parameters; auto: all that remain; "
        "fit: the fewest whose memory suffices, the rest being replicas (MiCS)",
    )
    tp: Positive = key(1, "tensor parallel: ranks that share each matrix")
    pp: Positive = key(1, "pipeline parallel: ranks that share the layers")
    cp: Positive = key(1, "context parallel: ranks that share each sequence")
    ep: Positive = key(
        1, "expert parallel: of the dp_shard x cp ranks, how many share out the experts"
    )
    schedule: Text = key(
        "1F1B",
        "order of the pipeline's microbatches: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, "
        "InterleavedZeroBubble, ZBVZeroBubble, DualPipeV, or the path of a .csv file",
    )
    sequence_parallel: bool = key(
        True, "tp: activations between the matrices are split along the sequence"
    )
    async_tp: bool = key(
        False, "tp: overlap its communication with the matrix products (SymmetricMemory)"
    )
    context: Literal["ring", "allgather", "ulysses"] = key(
        "ring", "cp: pass keys and values round, gather them, or exchange heads for tokens"
    )
    context_balance: bool = key(
        True, "cp: each rank takes a piece of the head and of the tail of a sequence"
    )
    placement: Literal["pipeline-outer", "replica-outer"] = key(
        "pipeline-outer",
        "which ranks are neighbours: those of a pipeline stage, or those of a whole replica",
    )
    reshard_after_forward: Literal["auto", "always", "never"] | Positive = key(
        "auto",
        "free gathered parameters after forward (always: ZeRO-3), keep them (never: ZeRO-2), or "
        "reshard over that many ranks only; auto: never in a pipeline, else always",
    )
    gradient_sync: Literal["auto", "microbatch", "step"] = key(
        "auto",
        "microbatch: reduce-scatter gradients with each one, and all-reduce replicas once a step; "
        "step: add them up whole and do both once; auto: step where weights are kept whole, too, "
        "or gradients take less than 2 GiB",
    )
    hierarchical_gather: bool = key(
        False, "gather parameters across nodes first, then inside each node"
    )
    symmetric_memory: bool = key(
        False, "exchange parameters and gradients through memory that GPUs of a node share"
    )
    prefetch: NonNegative = key(1, "blocks whose parameters are gathered ahead of their use")
    persist_below: NonNegative = key(
        0, "parameters of fewer elements stay gathered from their first use to the end of a step"
    )
    cpu_offload: bool = key(False, "keep parameters, gradients and optimizer states in host memory")


class PipelineSection(Section):
    """How the layers are cut into stages."""

    stages_per_rank: Positive | Auto = key(
        "auto", "stages of one rank; auto: as many as the schedule needs, 2 if it may have several"
    )
    optimize: Literal["speed", "memory"] = key(
        "speed", "cut so that the slowest stage is fastest, or the largest smallest"
    )
    layers: tuple[NonNegative, ...] = key(
        (), "blocks of each stage, first to last, instead of cutting by cost"
    )


class PrecisionSection(Section):
    """Dtypes of what is computed; weights that are trained are kept in float32."""

    compute: Literal["auto", "float32", "bfloat16"] = key(
        "auto", "dtype of forward and backward; auto: bfloat16 on cuda, float32 on cpu"
    )
    reduce: Literal["float32", "bfloat16"] = key("float32", "dtype of the gradient reduction")
    float8: Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"] = key(
        "none",
        "the blocks' matrix products in float8, by what shares a scale: a whole matrix; a row; a "
        "row, and gradients of weights in high precision; 32 numbers; needs weft[torchao]",
    )
    float8_skip: tuple[Text, ...] = key(
        (), "float8: matrices that stay in high precision, by patterns of names: *.o_proj"
    )
    float8_small: bool = key(False, "float8: also matrices that are too small to gain by it")


class RematSection(Section):
    """Activations that are computed again, or offloaded, instead of kept; see docs/speed.md."""

    kind: Literal["none", "full", "selective", "budget"] = key(
        "none",
        "what blocks compute again in backward: nothing; all; what is cheap; what a budget leaves",
    )
    every: Positive = key(1, "only every n-th block does so")
    products: NonNegative = key(
        2, "selective: every n-th matrix product is computed again; 0: none of them"
    )
    budget: Annotated[float, Field(ge=0, le=1)] = key(
        0.5, "budget: share of the activations that may be kept"
    )
    offload: bool = key(
        False, "what autograd keeps waits in the host's memory; of selective and budget the inputs"
    )
    ahead: Positive = key(1, "offload: blocks whose activations come back, or stay, ahead of use")


class CompileSection(Section):
    """torch.compile, block by block; see docs/speed.md."""

    enable: bool = key(False, "compile each block with torch.compile")
    cache: Text = key("~/.cache/weft/compile", "folder for what is compiled, for the next start")


class CheckpointSection(Section):
    """When and where the state of the run is saved; see docs/reliability.md."""

    interval: NonNegative | Auto = key(
        100,
        "steps between checkpoints; 0: only at the end; auto: what loses least time, given the "
        "measured cost of a checkpoint and mtbf_hours",
    )
    mtbf_hours: Annotated[float, Field(gt=0)] = key(
        24.0, "interval auto: mean time between failures of the whole job"
    )
    background: bool = key(True, "copy the state, and write it while training goes on")
    dir: Text = key(
        "auto", "folder or s3://bucket/prefix of the checkpoints; auto: checkpoints in run.dir"
    )
    keep: Positive = key(2, "newest checkpoints that are kept")
    local: Text = key(
        "off",
        "folder of each node itself, where its ranks leave the newest state: /dev/shm (its memory, "
        "twice the state) or a disk of its own; off",
    )
    local_interval: Positive = key(10, "steps after which they do, if the last time is over")


class Fault(Section):
    """One fault of a drill; see `weft.resilience.faults`, which lists the sites."""

    site: Text = key("step", "where: one of the sites of weft.resilience.faults")
    kind: Literal["kill", "stop", "slow", "lock", "raise", "error", "corrupt", "nan", "flip"] = key(
        "kill",
        "kill or stop the process, sleep, sleep and keep the interpreter lock, raise an exception "
        "or an error of the disk, multiply what is there by factor or by NaN, or flip a bit of it",
    )
    rank: NonNegative = key(0, "on which rank")
    passing: Positive = key(1, "the how manieth time that the rank comes by")
    times: Positive = key(1, "on so many passings in a row")
    seconds: Annotated[float, Field(ge=0)] = key(1.0, "of slow and lock")
    error: Literal["EIO", "ENOSPC", "EDQUOT", "EACCES"] = key("ENOSPC", "of error")
    factor: float = key(1e4, "of corrupt")


class ResilienceSection(Section):
    """What happens when something goes wrong; see docs/reliability.md."""

    time_limit: Annotated[float, Field(ge=0)] = key(
        0.0, "seconds of training after which to save and stop, with exit status 75; 0: none"
    )
    anomaly: Literal["stop", "skip", "rewind"] = key(
        "stop",
        "when loss or gradient norm is no number: stop; skip the update and go on; or rewind to "
        "the last checkpoint and leave out the samples since; the last two watch for spikes, too",
    )
    anomaly_limit: Positive = key(
        10, "steps skipped in a row, or rewinds to the same checkpoint, before the run stops"
    )
    spike_threshold: Annotated[float, Field(gt=0)] = key(
        10.0, "robust standard deviations above the median that make a spike"
    )
    spike_window: Annotated[int, Field(ge=4, le=10_000)] = key(
        128, "accepted steps that say what is usual; judged as soon as half of it is filled"
    )
    replica_check: NonNegative = key(
        100, "steps between comparisons of replicas, also made before each save; 0: never"
    )
    step_timeout: Annotated[float, Field(ge=0)] | Auto = key(
        "auto",
        "seconds without progress in a step after which the run is ended as hung, with exit status "
        "3; elsewhere ten times that, at least 600; auto: 60, or (10 + observe.log_interval) times "
        "the median step; 0: never",
    )
    preflight: bool = key(
        False,
        "check each node before its ranks start, as weft doctor does; one with something bad does "
        "not take part, and ends with status 69",
    )
    restarts: NonNegative = key(
        3, "times an hour that ranks start again from the newest checkpoint after a failure"
    )
    lighthouse: Text = key(
        "none",
        "HOST:PORT of torchft's lighthouse, where replica groups meet: runs of their own, of which "
        "any may die in any step; needs weft[torchft]",
    )
    faults: tuple[Fault, ...] = key((), "faults to inject, for a drill: [[resilience.faults]]")


class ObserveSection(Section):
    """What is recorded, and where it goes; see docs/observing.md."""

    log_interval: Positive = key(10, "steps between records")
    sinks: tuple[Text, ...] = key(
        ("tensorboard",),
        "where records go beside metrics.jsonl: tensorboard, wandb, mlflow, or module:function of "
        "your own",
    )
    grad_norms: bool = key(False, "record the gradient norm of each layer, too")
    report: bool = key(True, "keep report.html up to date while training; needs weft[report]")
    spans: bool = key(True, "write when each rank did what, for Perfetto, into the folder spans")


class ProfileSection(Section):
    """What torch.profiler sees of some steps; see docs/observing.md."""

    steps: Steps = key("", "steps to profile into the folder traces: 10, or 10-12; empty: none")
    memory: bool = key(False, "profile.steps: also where memory is taken")


class DebugSection(Section):
    """To find what is wrong with a run; docs/debugging.md."""

    statistics: Steps = key(
        "",
        "steps (7,20-30) of which statistics.jsonl gets mean, size and what is no number of every "
        "block's output, gradient and parameter; empty: none",
    )
    deterministic: bool = key(
        False,
        "the same bits whenever the run is repeated on the same layout and devices; slower on GPUs",
    )
    autograd_anomaly: bool = key(
        False, "name the operator and the layer whose backward pass makes NaN; slow"
    )


class LaunchSection(Section):
    """What ``weft launch`` asks a cluster for; a run itself reads none of it."""

    time: Text = key("1-00:00:00", "wall-clock limit of one submission: D-HH:MM:SS or HH:MM:SS")
    image: Text = key("auto", "container image that has weft in it; auto: the cluster's default")
    setup: tuple[ShellLines, ...] = key(
        (), "shell lines that every node runs first, such as 'source ~/venv/bin/activate'"
    )
    options: dict[Text, Text] = key(
        {}, "what else the scheduler is asked for, by its own names: partition=gpu,account=mine"
    )


class Job(Section):
    """What the user chose.  One field per section; see each section for its keys."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    lora: LoraSection = LoraSection()
    optim: OptimSection = OptimSection()
    parallel: ParallelSection = ParallelSection()
    pipeline: PipelineSection = PipelineSection()
    precision: PrecisionSection = PrecisionSection()
    remat: RematSection = RematSection()
    compile: CompileSection = CompileSection()
    checkpoint: CheckpointSection = CheckpointSection()
    resilience: ResilienceSection = ResilienceSection()
    observe: ObserveSection = ObserveSection()
    profile: ProfileSection = ProfileSection()
    debug: DebugSection = DebugSection()
    launch: LaunchSection = LaunchSection()


SECTIONS: dict[str, type[Section]] = {
    name: field.annotation  # type: ignore[misc]
    for name, field in Job.model_fields.items()
}


def keys() -> Iterator[str]:
    """Every ``section.key``, in order."""
    for name, section in SECTIONS.items():
        yield from (f"{name}.{key}" for key in section.model_fields)


# --------------------------------------------------------------------------- reading

Tree = dict[str, dict[str, Any]]
MAX_RECIPE_BYTES = 16 << 20


def recipe_names() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(
        f.name.removesuffix(".toml") for f in RECIPES.iterdir() if f.name.endswith(".toml")
    )


def read_job(
    recipe: str, overrides: Sequence[tuple[str, str]] = ()
) -> tuple[Job, Job, list[Problem]]:
    """Read a recipe and apply command-line overrides.

    Args:
        recipe: a shipped name, or the path of a TOML file.
        overrides: ``("section.key", "text")`` pairs; a later one wins.

    Returns:
        The job, the recipe without the overrides (to tell the differences), and every
        problem found.  Where a value was bad, the jobs hold the default instead.
    """
    problems: list[Problem] = []
    tree = _load_recipe(recipe, problems)
    base = _validate(tree, problems)
    for name, text in overrides:
        _override(tree, name, text, problems)
    return _validate(tree, problems), base, problems


def _load_recipe(recipe: str, problems: list[Problem], seen: tuple[str, ...] = ()) -> Tree:
    """The recipe's tree with everything that it extends underneath."""
    path = _find_recipe(recipe, Path(seen[-1]).parent if seen else None)
    if path is None:
        remedy = suggest(recipe, recipe_names()) + " or the path of a .toml file"
        problems.append(Problem("extends" if seen else "recipe", recipe, "no such recipe", remedy))
        return {}
    if str(path) in seen:
        chain = " -> ".join(Path(p).name for p in (*seen, str(path)))
        problems.append(Problem("extends", recipe, f"recipes extend each other: {chain}"))
        return {}
    try:
        if path.stat().st_size > MAX_RECIPE_BYTES:
            raise ValueError(f"it is larger than {MAX_RECIPE_BYTES >> 20} MiB")
        tree = tomllib.loads(path.read_text("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        problems.append(Problem("recipe", str(path), f"cannot be read as TOML: {error}"))
        return {}
    parent = tree.pop("extends", None)
    for name in [name for name, section in tree.items() if not isinstance(section, dict)]:
        rule = "is not a section" if name in SECTIONS else "unknown key outside a section"
        problems.append(
            Problem(name, tree.pop(name), rule, f"write [section] first; {nearest_key(name)}")
        )
    if parent is None:
        return tree
    if not isinstance(parent, str):
        problems.append(Problem("extends", parent, "must be the name or path of a recipe"))
        return tree
    below = _load_recipe(parent, problems, (*seen, str(path)))
    return {
        name: below.get(name, {}) | tree.get(name, {}) for name in dict.fromkeys([*below, *tree])
    }


def _find_recipe(recipe: str, beside: Path | None) -> Path | None:
    shipped = Path(str(RECIPES / f"{recipe}.toml"))
    candidates = [Path(recipe)] if beside is None else [beside / recipe, Path(recipe)]
    if recipe in recipe_names():
        return shipped
    try:
        return next((path.resolve() for path in candidates if path.is_file()), None)
    except (OSError, ValueError):  # no path at all: too long, or with a NUL in it
        return None


def _override(tree: Tree, name: str, text: str, problems: list[Problem]) -> None:
    if any("\ud800" <= letter <= "\udfff" for letter in name + text):
        problems.append(Problem(ascii(name)[1:-1], ascii(text), "is not UTF-8 text"))
        return
    section, _, last = name.partition(".")
    model = SECTIONS.get(section)
    if model is None or (
        last not in model.model_fields and model.model_config["extra"] == "forbid"
    ):
        problems.append(Problem(name, _literal(text), "unknown key", nearest_key(name)))
        return
    if last not in model.model_fields:
        tree.setdefault(section, {})[last] = _literal(text)
        return
    literal = _literal(text)
    parts = [part.strip() for part in text.split(",") if part.strip()]
    origin = get_origin(model.model_fields[last].annotation)
    if origin is tuple and not isinstance(literal, list):
        literal = [_literal(part) for part in parts]
    elif origin is dict and not isinstance(literal, dict):
        pairs = [part.rpartition("=") for part in parts]
        text_only = get_args(model.model_fields[last].annotation)[1] == Text
        literal = {
            name or value: value if text_only else _literal(value) for name, _, value in pairs
        }
    try:
        if isinstance(literal, list | dict):
            model.model_validate_json(json.dumps({last: literal}, default=_no_json), strict=True)
            value: Any = literal
        else:
            value = getattr(model.model_validate_strings({last: text}), last)
    except ValidationError as error:
        problems += _translate(error, model, section, {last: literal})
        value = None
    if value is None:
        tree.get(section, {}).pop(last, None)
    else:
        tree.setdefault(section, {})[last] = value


def _literal(text: str) -> Any:
    """Command-line text for a key whose type is not known here: a TOML value, or a string."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except (ValueError, RecursionError):
        return text


def _validate(tree: Tree, problems: list[Problem]) -> Job:
    """The Job of ``tree``; bad entries are reported once, removed from ``tree``, and defaulted."""
    for name in [name for name in tree if name not in SECTIONS]:
        shown = f"[{name}]"
        problems.append(Problem(shown, MISSING, "unknown section", suggest(name, SECTIONS)))
        del tree[name]
    for name, section in tree.items():
        found = check_section(SECTIONS[name], name, section)
        problems += found
        for problem in found:
            section.pop(problem.key.partition(".")[2], None)
    return Job.model_validate_json(json.dumps(tree, default=_no_json), strict=True)


def _no_json(value: object) -> dict[str, str]:
    """TOML's dates, as something that no key accepts."""
    return {"date": str(value)}


def check_section(kind: type[Section], name: str, values: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with the ``values`` of section ``name``, taken strictly.

    They are read as JSON, in which an array may become a tuple, but "8" is not 8.
    """
    try:
        kind.model_validate_json(json.dumps(values, default=_no_json), strict=True)
    except ValidationError as error:
        return _translate(error, kind, name, values)
    return []


def _translate(
    error: ValidationError, kind: type[Section], name: str, values: Mapping[str, Any]
) -> list[Problem]:
    """Pydantic's errors as Problems, one for each key however many alternatives it has."""
    rules: dict[str, list[str]] = {}
    for entry in error.errors(include_url=False):
        # What is nested too deeply has no place: it is in one of the lists.
        nested = [last for last, value in values.items() if isinstance(value, list | dict)]
        for last in entry["loc"][:1] or nested:
            rules.setdefault(str(last), []).append(_rule(entry["type"], entry))
    problems = []
    for last, rule in rules.items():
        field = kind.model_fields.get(last)
        if field is None:
            remedy = nearest_key(
                f"{name}.{last}", [f"{name}.{known}" for known in kind.model_fields]
            )
        else:
            usual = json.dumps(field.get_default(call_default_factory=True), default=str)
            default = "" if field.is_required() else f" (default {usual})"
            remedy = f"{field.description or kind.__name__}{default}"
        shown = " or ".join(dict.fromkeys(rule))
        problems.append(Problem(f"{name}.{last}", values.get(last, MISSING), shown, remedy))
    return problems


_RULES = {
    "extra_forbidden": "unknown key",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a whole number of fewer digits",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be a string",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "literal_error": "must be {expected}",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "string_too_short": "must not be empty",
    "tuple_type": "must be a list: [1, 2]",
    "string_pattern_mismatch": "must match {pattern}",
    "value_error": "{error}",
}


def _rule(kind: str, entry: Mapping[str, Any]) -> str:
    broken = {
        NO_NUL: "must not contain a NUL character",
        ONE_LINE: "must not contain control characters, such as a newline",
    }.get(entry.get("ctx", {}).get("pattern", ""))
    if broken:
        return broken
    template = _RULES.get(kind)
    if template is None:
        return str(entry["msg"][0].lower() + entry["msg"][1:])
    return template.format(**entry.get("ctx", {}))


# --------------------------------------------------------------------------- using


def flatten(job: Job) -> dict[str, Any]:
    """``{"section.key": value}`` of every key, in order."""
    return {
        f"{name}.{key}": value
        for name, section in job.model_dump(mode="json").items()
        for key, value in section.items()
    }


def difference(job: Job, base: Job) -> dict[str, tuple[Any, Any]]:
    """``{"section.key": (value in job, value in base)}`` where the two differ."""
    ours, theirs = flatten(job), flatten(base)
    every = dict.fromkeys([*ours, *theirs])
    return {
        name: (ours.get(name, MISSING), theirs.get(name, MISSING))
        for name in every
        if ours.get(name, MISSING) != theirs.get(name, MISSING)
    }


def replace(job: Job, **sections: Mapping[str, Any]) -> Job:
    """A copy with some keys changed: ``replace(job, run={"dir": "x"})``, validated again."""
    tree = job.model_dump()
    for name, changes in sections.items():
        tree[name] |= changes
    return Job.model_validate(tree)


def to_toml(job: Job, recipe: str, base: Job) -> str:
    """The complete job as TOML, headed by its differences from the recipe."""
    import tomli_w

    lines = [
        f"# {name}: {theirs!r} -> {ours!r}"
        for name, (ours, theirs) in difference(job, base).items()
    ]
    head = [f"# Complete job of a weft run, started from the recipe {recipe!r}."]
    head += (
        ["# What differs from the recipe:", *lines]
        if lines
        else ["# Nothing differs from the recipe."]
    )
    return "\n".join(head) + "\n\n" + tomli_w.dumps(job.model_dump(mode="json"))


def schema() -> dict[str, Any]:
    """JSON Schema of a recipe file (``extends`` included), for editors."""
    tree = Job.model_json_schema()
    tree["title"] = "weft recipe"
    tree["properties"] = {
        "extends": {
            "type": "string",
            "description": "a shipped recipe's name, or a path beside this file",
        }
    } | tree["properties"]
    return tree
