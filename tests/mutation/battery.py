"""The checks that try to find a planted fault; the same checks for every fault.

The name of a check begins with its stage, and the stages are tried in the order of `STAGES`:

    unit     one module against a formula or another library (`tests.mutation.formulas`)
    oracle   one process against the oracle
    run      whole runs of one process
    layout   the comparison of `weft verify`, with one technique
    ranks    one feature in several ranks; then layouts with several techniques
    saved    checkpoints saved in one layout and loaded in another; damage; records of ranks
    resumed  runs that resume from a checkpoint

Some checks are tests of the suite (`tests.mutation.suite`); a failure names the module they test.

A check runs in forked ranks of a process that has imported weft with the fault.  A check returns a
`Finding`, which names the faulty module of weft.  These rules choose the module.  They assume that
earlier checks found nothing:

* A difference belongs to the first quantity that differs: data, forward pass, loss, gradients,
  norm, update, evaluation, checkpoint.
* An exception belongs to the innermost function of weft in its first cause.  Functions that
  compare or report are skipped (`REPORTING`).
* If a case or layout adds one technique to a plain model, that technique causes the difference.
  With several techniques, the layout runs without each of them (`TECHNIQUES`): the technique
  without which the difference vanishes is the cause.  If the difference vanishes without any one
  of several parallel axes, the mesh is the cause, because it combines the axes.
* With an equal forward pass, only a module that computes a loss can change the loss.
"""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import weft
from tests import oracle as oracle_module
from tests import oracle_models
from tests.oracle import Case, departures, make_case
from weft.config.errors import InvalidConfig, WeftError
from weft.supervision.local_ranks import RanksFailed, run_ranks
from weft.verification.verify import read_recipe, verify

Overrides = list[tuple[str, str]]
# In the order of execution.
STAGES = ("unit", "oracle", "run", "layout", "ranks", "saved", "resumed")
WEFT = Path(weft.__file__).parent


class Finding(NamedTuple):
    """The finding of a check."""

    text: str
    module: str  # the faulty module of weft, as the check infers it


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: begins with the stage.
        find: called in the process that forks ranks; returns a finding or None.
        source: code of the check, which identifies its version.
        precisions: keys of `LOW` with which the check is useful.
    """

    name: str
    find: Callable[[str, float], Finding | None]
    source: str  # code of the check, without weft
    precisions: tuple[str, ...] = ("",)

    def run(self, precision: str, timeout: float) -> Finding | None:
        """Run the check; a rank's exception has its full stack as text."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("weft.supervision.local_ranks._format_error", format_error)
            patch.setattr("weft.supervision.local_ranks.MAX_LOG_LINES", 200)
            return self.find(precision, timeout)


# --------------------------------------------------------------------------- exceptions

# Modules, or "module:function", that are never the cause: they compare, report, or forward the
# error of another rank.
REPORTING = (
    "checkpoint/manifest.py:gather_to_rank_0",
    "checkpoint/manifest.py:raise_first",
    "checkpoint/manifest.py:run_on_rank_0",
    "config/",
    "parallel/private.py",
    "supervision/local_ranks.py",
    "verification/shrink.py",
    "verification/verify",
)


def format_error(error: BaseException) -> str:
    """Format an exception, then the calls that led to it and to its causes."""
    chain = [error]
    while (cause := _cause_of(chain[-1])) and cause not in chain:
        chain.append(cause)
    head = f"{type(error).__name__}: {error} {' '.join(getattr(error, '__notes__', []))}"
    return "\n".join([head, *("".join(traceback.format_tb(e.__traceback__)) for e in chain)])


def _cause_of(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def read_failure(error: Exception) -> Finding:
    """Return the finding of failed ranks: unexpected value, or weft's exception."""
    lines = str(error).strip().splitlines() or [repr(error)]
    if match := re.search(r"(.*) <([\w/]+\.py)>", str(error)):
        return Finding(match[1].rpartition("Unexpected: ")[2], match[2])
    return Finding(f"raised: {lines[0]} ... {lines[-1]}"[:300], frame_of(str(error)))


def frame_of(text: str) -> str:
    """Return the module of weft that raised an exception, from its text; else empty."""
    calls = re.findall(rf'File "{re.escape(str(WEFT))}/([\w/]+\.py)", line \d+,? in (\w+)', text)
    files = [file for file, name in calls if not f"{file}:{name}".startswith(REPORTING)]
    if not files:
        return ""
    return files[0] if "innermost call first" in text else files[-1]


# --------------------------------------------------------------------------- the oracle

PATCHES: dict[str, dict[str, Any]] = {
    # With the usual constants, the small tensors of a check would not be split or moved.
    "chunks": {"weft.training.loss.CHUNK_BYTES": 4 * 288 * 8},
    "offload": {"weft.parallel.activation_offload.MIN_OFFLOAD_BYTES": 1},
}

DENSE = {"model__tied_embeddings": False, "data__packing": "documents"}
MOE = {
    "model__kind": "moe",
    "model__preset": "toy-moe",
    "model__num_experts": 5,
    "model__active_experts": 2,
    "model__expert_dim": 20,
    "model__head_dim": 8,
}
LORA = {"lora__rank": 3, "lora__alpha": 8.0, "model__dim": 64, "model__ffn_dim": 64}
YARN_MAGNITUDE = 0.1 * math.log(4.0) + 1
# Two of eight pairs keep their frequency, four are scaled fully; the bounds are 1.6 and 3.4.
YARN = {
    "model__rope_scaling": "yarn",
    "model__rope_factor": 4.0,
    "model__rope_theta": 500.0,
    "model__rope_original_context": 64,
    "model__rope_beta_fast": 3.0,
    "model__rope_beta_slow": 0.7,
}
# The scores and logits of initial weights are small, so that their limits are too.
GEMMA = {
    "model__tied_embeddings": True,
    "model__head_dim": 8,
    "model__norm_offset": True,
    "model__norm_position": "both",
    "model__activation": "gelu_tanh",
    "model__attention_scale": 1 / math.sqrt(20),
    "model__embedding_scale": math.sqrt(24),
    "model__sliding_window": 5,
}
GRANITE = {
    "model__embedding_scale": 3.0,
    "model__residual_scale": 0.4,
    "model__attention_scale": 0.7,
    "model__logit_scale": 0.25,
}
LOW = {
    "": {},
    "bf16": {"precision.compute_dtype": "bfloat16"},
    "float8": {"precision.float8": "tensorwise", "precision.float8_small": "true"},
}
# name -> (keys, text)
ORACLE: dict[str, tuple[dict[str, object], str]] = {
    "llama, windows, accumulation": (
        {
            "train__global_batch_size": 5,
            "model__tied_embeddings": True,
            "optim__max_grad_norm": 0.05,
            "optim__weight_decay": 1.0,
            "optim__schedule": "wsd",
            "optim__decay_fraction": 0.5,
            "optim__min_lr_ratio": 0.1,
            "optim__warmup_steps": 2,
            "optim__beta2": 0.9,
            "train__steps": 4,
        },
        "text",
    ),
    "llama3, documents, cosine": (
        {
            **DENSE,
            "model__rope_scaling": "llama3",
            "model__rope_original_context": 16,
            "model__rope_theta": 500.0,
            "model__rope_factor": 4.0,
            "optim__schedule": "cosine",
            "optim__eps": 1e-3,
            "optim__beta1": 0.8,
            "optim__min_lr_ratio": 0.2,
        },
        "text",
    ),
    "qwen3, best fit, linear": (
        {
            "model__kind": "qwen3",
            "model__head_dim": 10,
            "model__norm_eps": 0.01,
            "data__packing": "best_fit",
            "optim__schedule": "linear",
        },
        "text",
    ),
    "mistral, conversations": (
        {"model__kind": "mistral", "model__head_dim": 6, "model__tied_embeddings": False},
        "chat",
    ),
    "deepseek-moe, documents": (
        {
            **MOE,
            **DENSE,
            "model__qk_norm": "none",
            "model__shared_experts": 2,
            "model__dense_layers": 1,
            "model__score": "sigmoid",
            "model__route_scale": 2.5,
            "model__balance_rate": 0.05,
        },
        "text",
    ),
    "qwen3-moe, preferences": (
        {
            **MOE,
            "model__shared_experts": 0,
            "model__dense_layers": 0,
            "model__balance_rate": 0,
            "train__objective": "dpo",
            "train__preference_beta": 0.3,
            "model__renormalize": False,
        },
        "preferences",
    ),
    "gpt-oss, documents": (
        {
            **MOE,
            **DENSE,
            "model__head_dim": 16,
            "model__shared_experts": 0,
            "model__dense_layers": 0,
            "model__balance_rate": 0,
            "model__qk_norm": "none",
            "model__qkv_bias": True,
            "model__out_bias": True,
            "model__attention_sinks": True,
            "model__layer_pattern": "LG",
            "model__sliding_window": 5,
            "model__score_selected": True,
            "model__router_bias": True,
            "model__expert_biases": True,
            "model__expert_limit": 0.05,
            "model__rope_truncate": False,
            **YARN,
            "model__rope_magnitude": YARN_MAGNITUDE,
        },
        "text",
    ),
    "deepseek-v3, documents": (
        {
            **MOE,
            **DENSE,
            "model__num_kv_heads": 4,
            "model__head_dim": 22,
            "model__rope_head_dim": 16,
            "model__value_head_dim": 10,
            "model__kv_rank": 12,
            "model__q_rank": 14,
            "model__qkv_bias": True,
            "model__out_bias": True,
            "model__rope_interleaved": True,
            **YARN,
            "model__attention_scale": YARN_MAGNITUDE**2 / math.sqrt(22),
            "model__qk_norm": "none",
            "model__num_experts": 9,
            "model__active_experts": 2,
            "model__expert_groups": 3,
            "model__active_groups": 2,
            "model__shared_experts": 1,
            "model__dense_layers": 1,
            "model__score": "sigmoid",
            "model__route_scale": 2.5,
            "model__balance_rate": 0.05,
        },
        "text",
    ),
    "llama4, windows": (
        {
            **MOE,
            "model__tied_embeddings": False,
            "model__qk_norm": "unit",
            "model__layer_pattern": "LG",
            "model__attention_chunk": 6,
            "model__rope_interleaved": True,
            "model__rope_pattern": "RN",
            "model__temperature_interval": 4,
            "model__temperature_scale": 0.5,
            "model__expert_interval": 2,
            "model__dense_layers": 0,
            "model__shared_experts": 1,
            "model__score": "sigmoid",
            "model__renormalize": False,
            "model__scaled_expert_inputs": True,
            "model__balance_rate": 0,
        },
        "text",
    ),
    "gemma2, conversations": (
        {
            **GEMMA,
            "model__layer_pattern": "LG",
            "model__attention_softcap": 0.02,
            "model__logit_softcap": 0.1,
        },
        "chat",
    ),
    "gemma2, chunks of logits": (
        {
            **GEMMA,
            "train__seq_len": 32,
            "model__layer_pattern": "LG",
            "model__attention_softcap": 0.02,
            "model__logit_softcap": 0.1,
        },
        "text",
    ),
    "gemma3, best fit": (
        {
            **GEMMA,
            "data__packing": "best_fit",
            "model__layer_pattern": "LG",
            "model__qk_norm": "head",
            "model__rope_local_theta": 10.0,
            "model__rope_theta": 500.0,
            "model__rope_scaling": "linear",
            "model__rope_factor": 4.0,
        },
        "text",
    ),
    "granite, documents": ({**DENSE, **GRANITE}, "text"),
    "granite, chunks of logits": ({**DENSE, **GRANITE, "train__seq_len": 32}, "text"),
    "nemotron, documents": (
        {
            **DENSE,
            "model__head_dim": 8,
            "model__dim": 32,
            "model__norm": "layer",
            "model__norm_offset": True,
            "model__norm_bias": True,
            "model__rope_fraction": 0.5,
            "model__activation": "relu2",
            "model__gated": False,
            "model__ffn_bias": True,
            "model__qkv_bias": True,
            "model__out_bias": True,
        },
        "text",
    ),
    "cohere, documents": (
        {
            "data__packing": "documents",
            "model__tied_embeddings": True,
            "model__norm": "layer",
            "model__parallel_block": True,
            "model__rope_interleaved": True,
            "model__logit_scale": 0.25,
        },
        "text",
    ),
    "olmo2, documents": (
        {**DENSE, "model__norm_position": "post", "model__qk_norm": "all_heads"},
        "text",
    ),
    "mistral, windows of attention": (
        {
            "model__kind": "mistral",
            "model__head_dim": 6,
            "model__tied_embeddings": False,
            "model__layer_pattern": "L",
            "model__sliding_window": 5,
        },
        "text",
    ),
    "llama, preferences": (
        {**DENSE, "train__objective": "dpo", "train__preference_beta": 0.3},
        "preferences",
    ),
    "lora": ({**DENSE, **LORA}, "text"),
    "qlora nf4, rslora": (
        {
            **DENSE,
            **LORA,
            "lora__quantize": "nf4",
            "lora__rank_stabilized": True,
            "lora__targets": '["q_proj", "down_proj"]',
        },
        "text",
    ),
    "qlora int8": ({**DENSE, **LORA, "lora__quantize": "int8"}, "text"),
    "muon": ({**DENSE, "optim__name": "muon", "optim__weight_decay": 0.5}, "text"),
    "bfloat16 moments": ({**DENSE, "optim__state_dtype": "bfloat16"}, "text"),
    "moments of eight bits": (
        {**DENSE, "optim__state_dtype": "8bit", "model__dim": 64, "model__ffn_dim": 64},
        "text",
    ),
    "chunks of logits": ({**DENSE, "train__seq_len": 32}, "text"),
    "chunks of logits, tied": ({"train__seq_len": 32, "model__tied_embeddings": True}, "text"),
    "full activation_checkpoint": ({**DENSE, "activation_checkpoint__mode": "full"}, "text"),
    "offload": ({**DENSE, "activation_checkpoint__offload": True, "model__num_layers": 4}, "text"),
    "selective activation_checkpoint": (
        {
            **DENSE,
            "activation_checkpoint__mode": "selective",
            "activation_checkpoint__every_n_layers": 2,
        },
        "text",
    ),
    "budget activation_checkpoint": (
        {
            **DENSE,
            "activation_checkpoint__mode": "budget",
            "activation_checkpoint__memory_budget": 0.5,
        },
        "text",
    ),
    "full activation_checkpoint, offload": (
        {**DENSE, "activation_checkpoint__mode": "full", "activation_checkpoint__offload": True},
        "text",
    ),
    "canonical order": (
        {**DENSE, "train__world_size_invariant": True, "train__microbatch_size": 1},
        "text",
    ),
}
# The module that a case tests in addition to the model.  Plain cases test the model first, so a
# difference in the forward pass or the gradients belongs to this module.
BESIDE = {
    "activation_checkpoint": "parallel/activation_checkpoint.py",
    "offload": "parallel/activation_offload.py",
    "chunks": "training/loss.py",
    "canonical": "parallel/data_parallel.py",
}


def oracle_case(name: str, precision: str) -> Case:
    """Return a case of `ORACLE` in a precision."""
    keys, text = ORACLE[name]
    keys = keys | {k.replace(".", "__"): v for k, v in LOW[precision].items()}
    if precision == "float8":
        keys |= {"model__dim": 64, "model__ffn_dim": 64, "train__seq_len": 32}
        if "model__head_dim" in keys:
            keys |= {"model__head_dim": 16}
    return make_case(name, 5, text, **keys)


def patches(name: str) -> list[tuple[str, Any]]:
    """Return the constants that a check replaces by small values."""
    return [pair for word, values in PATCHES.items() if word in name for pair in values.items()]


def _first_departure(name: str, precision: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for path, value in patches(name):
            patch.setattr(path, value)
        found_departures = departures(oracle_case(name, precision))
        result = next(found_departures, None)
        if result is not None and result.where == "references":
            # References are results of the forward pass, which is the cause if it differs too.
            result = next((item for item in found_departures if item.where == "forward"), result)
    return None if result is None else tuple(result)


def find_by_oracle(name: str, precision: str, timeout: float) -> Finding | None:
    """Run a case of `ORACLE`."""
    try:
        [result] = run_ranks(_first_departure, 1, name, precision, timeout=timeout)
    except WeftError as error:
        return read_failure(error)
    if result is None:
        return None
    location, text, module = result
    if module == "parallel/float8/linear_layers.py":
        # float8 does not cause a difference that exists without it.
        [plain] = run_ranks(_first_departure, 1, name, "", timeout=timeout)
        location, text, module = plain or result
    if location in ("forward", "gradients"):
        module = next((m for word, m in BESIDE.items() if word in name), module)
    return Finding(f"{location}: {text}", module)


# --------------------------------------------------------------------------- layouts


class Technique(NamedTuple):
    """A key or axis of a layout, and the module that implements it."""

    keys: dict[str, str]
    module: str
    ranks: int = 1


def _pp(schedule: str, **extra: str) -> Technique:
    keys = {"parallel.pp": "2", "pipeline.schedule": schedule, "model.tied_embeddings": "false"}
    return Technique(keys | extra, "parallel/pipeline_parallel.py", 2)


def _cp(method: str, balance: bool | str = True, **extra: str) -> Technique:
    keys = {"parallel.cp": "2", "parallel.cp_method": method, **extra}
    keys["parallel.cp_load_balance"] = str(balance).lower()
    return Technique(keys, "parallel/context_parallel.py", 2)


def _key(module: str, **keys: str) -> Technique:
    return Technique({k.replace("__", "."): v for k, v in keys.items()}, module)


TECHNIQUES: dict[str, Technique] = {
    "dp_shard": Technique({"parallel.dp_shard": "2"}, "parallel/data_parallel.py", 2),
    "dp_shard4": Technique({"parallel.dp_shard": "4"}, "parallel/data_parallel.py", 4),
    "dp_replicate": Technique({"parallel.dp_replicate": "2"}, "parallel/data_parallel.py", 2),
    "tp": Technique({"parallel.tp": "2"}, "parallel/tensor_parallel.py", 2),
    "tp4": Technique(
        {"parallel.tp": "4", "model.num_heads": "8"}, "parallel/tensor_parallel.py", 4
    ),
    "odd vocabulary": _key("parallel/tensor_parallel.py", model__vocab_size="4097"),
    "biases": _key("parallel/tensor_parallel.py", model__out_bias="true", model__qkv_bias="true"),
    "whole rows": _key("parallel/tensor_parallel.py", parallel__sequence_parallel="false"),
    "gpipe": _pp("GPipe"),
    "1f1b": _pp("1F1B"),
    "interleaved": _pp("Interleaved1F1B"),
    "looped": _pp("LoopedBFS"),
    "zero bubble": _pp("InterleavedZeroBubble"),
    "zbv": _pp("ZBVZeroBubble"),
    "dualpipe": _pp("DualPipeV", **{"train.microbatch_size": "1"}),
    "tied": _key("parallel/tied_parameters.py", model__tied_embeddings="true"),
    "short": _key("training/step.py", train__microbatch_size="3", train__global_batch_size="8"),
    "ring": _cp("ring"),
    "ring in order": _cp("ring", False),
    "allgather": _cp("allgather"),
    "allgather in order": _cp("allgather", False),
    "ring by documents": _cp("ring", "documents", **{"data.packing": "documents"}),
    "allgather by documents": _cp("allgather", "documents", **{"data.packing": "documents"}),
    "ulysses": _cp("ulysses"),
    "documents": _key("parallel/block_attention.py", data__packing="documents"),
    "windows": _key(
        "parallel/block_attention.py", model__sliding_window="16", model__layer_pattern="LG"
    ),
    "never": _key("parallel/data_parallel.py", parallel__reshard_after_forward="never"),
    "always": _key("parallel/data_parallel.py", parallel__reshard_after_forward="always"),
    "over two": _key("parallel/data_parallel.py", parallel__reshard_after_forward="2"),
    "each microbatch": _key("parallel/data_parallel.py", parallel__gradient_sync="microbatch"),
    "at the step's end": _key("parallel/data_parallel.py", parallel__gradient_sync="step"),
    "persist": _key("parallel/data_parallel.py", parallel__param_persistence_threshold="300"),
    "prefetch": _key("parallel/data_parallel.py", parallel__fsdp_prefetch="2"),
    "two stages": _key("parallel/hierarchical_gather.py", parallel__hierarchical_gather="true"),
    "replica outer": _key("planning/placement.py", parallel__mesh_order="replica-outer"),
    "cpu offload": _key("parallel/data_parallel.py", parallel__cpu_offload="true"),
    "full": _key("parallel/activation_checkpoint.py", activation_checkpoint__mode="full"),
    "selective": _key("parallel/activation_checkpoint.py", activation_checkpoint__mode="selective"),
    "budget": _key(
        "parallel/activation_checkpoint.py",
        activation_checkpoint__mode="budget",
        activation_checkpoint__memory_budget="0.5",
    ),
    "offload": _key("parallel/activation_offload.py", activation_checkpoint__offload="true"),
    "chunks": _key("training/loss.py"),
    "lora": _key("parallel/lora/adapters.py", lora__rank="4"),
    "nf4": _key(
        "parallel/lora/adapters.py",
        lora__rank="4",
        lora__quantize="nf4",
        model__dim="256",
        model__num_heads="4",
        model__num_kv_heads="2",
        model__ffn_dim="256",
    ),
    "dpo": _key(
        "training/loss.py",
        data__format="preferences",
        data__tokenizer="none",
        train__objective="dpo",
    ),
    "canonical": _key(
        "parallel/data_parallel.py",
        train__world_size_invariant="true",
        train__microbatch_size="1",
        run__device="cpu",
    ),
    "muon": _key("optim/muon.py", optim__name="muon"),
    "bfloat16 states": _key("optim/low_precision_adamw.py", optim__state_dtype="bfloat16"),
    "8bit states": _key("optim/low_precision_adamw.py", optim__state_dtype="8bit"),
    "moe": _key("models/moe.py", model__kind="moe", model__preset="toy-moe"),
    "qwen3": _key("models/layers.py", model__kind="qwen3", model__preset="toy"),
    "ep": _key("parallel/expert_parallel.py", parallel__ep="2"),
    "padded": _key("parallel/expert_dispatch.py", parallel__ep_dispatch="padded"),
    "small buffers": _key("parallel/expert_dispatch.py", parallel__ep_capacity_factor="1"),
    "parts of experts": _key("parallel/expert_dispatch.py", parallel__ep_chunks="2"),
    "experts without TP": _key(
        "parallel/experts_without_tp.py", parallel__etp="1", model__router_aux_loss_coef="1"
    ),
    "float8": _key(
        "parallel/float8/linear_layers.py",
        precision__float8="tensorwise",
        precision__float8_small="true",
    ),
    "bfloat16": _key("parallel/data_parallel.py", precision__compute_dtype="bfloat16"),
}

LAYOUTS: list[str] = [
    "dp_shard",
    "dp_replicate",
    "tp",
    "ring",
    "allgather",
    "1f1b",
    "dp_shard, documents",
    "tp, dp_shard",
    "dp_replicate, each microbatch, dp_shard",
    "1f1b, dp_shard",
    "1f1b, tied",
    "zbv, tied, dp_shard",
    "tp, odd vocabulary",
    "tp, biases",
    "ring, windows",
    "ring, documents, tp",
    "allgather, documents, dp_replicate",
    "ulysses, documents, gpipe",
    "ring in order, interleaved",
    "allgather in order, dp_shard, never",
    "tp4, whole rows",
    "tp4, documents",
    "qwen3, tp, whole rows",
    "lora, tp, whole rows",
    "moe, tp, whole rows",
    "zero bubble, tp, short",
    "zero bubble, dp_replicate, each microbatch",
    "zbv, dp_shard, at the step's end",
    "dualpipe, ring",
    "looped, dp_replicate, replica outer",
    "1f1b, short, dp_replicate, each microbatch",
    "moe, dp_shard, ep, tp",
    "moe, dp_shard, ep, padded",
    "moe, dp_shard, ep, padded, small buffers",
    "moe, dp_shard, ep, parts of experts",
    "moe, 1f1b, ep, dp_shard",
    "moe, dualpipe, ep, dp_shard",
    "moe, tp, experts without TP, whole rows",
    "moe, tp, experts without TP, ep, ring",
    "moe, tp, experts without TP, over two, dp_shard4",
    "lora, tp, dp_shard",
    "lora, moe, dp_shard, ep",
    "lora, moe, tp, dp_shard",
    "nf4, tp, 1f1b",
    "dpo, tp, dp_shard",
    "dpo, 1f1b",
    "dpo, ring, dp_shard",
    "canonical, dp_replicate, dp_shard",
    "selective, tp, persist, dp_shard",
    "full, ring, always",
    "budget, dp_shard, prefetch",
    "offload, full, dp_shard",
    "offload, 1f1b",
    "cpu offload, dp_shard, tp",
    "muon, dp_shard, tp",
    "muon, 1f1b",
    "moe, muon, dp_shard, ep",
    "two stages, dp_shard4",
    "over two, dp_shard4",
    "chunks, tp, dp_shard",
    "chunks, zero bubble",
    "bfloat16 states, dp_shard",
    "8bit states, tp, dp_shard",
    "8bit states, 1f1b",
    "float8, dp_shard, always",
    "float8, tp",
    "bfloat16, dp_shard, tp",
]


def keys_of(techniques: Sequence[str], precision: str) -> Overrides | None:
    """Return the overrides of a layout."""
    keys: dict[str, str] = {"train.global_batch_size": "8", "train.microbatch_size": "2"}
    world = 1
    for name in techniques:
        technique = TECHNIQUES[name]
        keys |= technique.keys
        world *= technique.ranks
    keys = keys | LOW[precision] | {"run.nproc_per_node": str(world)}
    if keys.get("data.tokenizer") == "none":  # the case itself reads no text
        keys["data.tokenizer"] = "train"
    return list(keys.items())


def run_layout(techniques: Sequence[str], precision: str, timeout: float) -> str:
    """Return the difference that a layout has, or its error; empty if none.

    Raises:
        InvalidConfig: weft refuses the layout.
    """
    overrides = keys_of(techniques, precision)
    assert overrides is not None
    job = read_recipe("demo", overrides)
    keep = [key for key, _ in overrides if key.startswith("precision.")]
    with pytest.MonkeyPatch.context() as patch:  # the ranks are forked from this process
        for path, value in patches(", ".join(techniques)):
            patch.setattr(path, value)
        try:
            report = verify(job, ranks=4, steps=2, keep=keep, timeout=timeout)
        except RanksFailed as error:
            return f"raised: {error}"
    return "" if report.holds else report.reason


# Phrases of a report and the module that causes them, most specific first.
BLAMED = (
    (r"the gradient norm differs", "optim/optimizer.py"),
    (r"updates first differ in \S*expert_bias", "optim/balance.py"),
    (r"updates first differ", "optim/optimizer.py"),
    (r"initial weights differ", "parallel/initialization.py"),
    (r"the loss's normalization", "training/step.py"),
    # A loss that is an integer multiple was summed over too many ranks.
    (r"the loss differs \(\d\.0e\+\d\d, .*and no gradient does", "training/step.py"),
    (r"validation loss differs", "training/step.py"),
)
# With an equal forward pass, a technique changes the local loss only in these modules: tensor
# parallelism in the vocabulary-parallel loss.  training/step.py sums over ranks.
COMPUTES_LOSS = {
    "parallel/tensor_parallel.py": "training/loss.py",
    "training/loss.py": "training/loss.py",
}


def find_by_layout(techniques: Sequence[str], precision: str, timeout: float) -> Finding | None:
    """Run a layout; if it is wrong, find the technique that causes it."""
    try:
        text = run_layout(techniques, precision, timeout)
    except InvalidConfig as error:
        return Finding(f"refused: {str(error)[:300]}", "planning/resolve.py")
    if not text:
        return None
    return Finding(text[:400], blame(techniques, text, precision, timeout))


def blame(techniques: Sequence[str], text: str, precision: str, timeout: float) -> str:
    """Return the faulty module, from the report or by removing techniques."""
    raised = frame_of(text)
    if raised in [TECHNIQUES[name].module for name in techniques]:
        return raised
    for pattern, module in BLAMED:
        if re.search(pattern, text):
            if module == "optim/optimizer.py" and "updates first differ" in text:
                special = [t for t in techniques if TECHNIQUES[t].module.startswith("optim/")]
                return TECHNIQUES[special[0]].module if special else module
            return module
    vanishes = [t for t in techniques if not _still_wrong(t, techniques, precision, timeout)]
    if not vanishes:
        if raised:
            return raised
        vanishes = list(techniques)
    # Prefer the most specific technique: one that only modifies another.
    vanishes.sort(key=lambda t: TECHNIQUES[t].ranks)
    module = TECHNIQUES[vanishes[0]].module
    if len(vanishes) > 1 and TECHNIQUES[vanishes[0]].ranks > 1:
        module = "parallel/mesh.py"  # the axes are wrong only in combination
    return COMPUTES_LOSS.get(module, "training/step.py") if "the loss differs" in text else module


def _still_wrong(without: str, techniques: Sequence[str], precision: str, timeout: float) -> bool:
    rest = [name for name in techniques if name != without]
    if without in ("tp4", "dp_shard4") and len(techniques) < 3:
        return False
    if all(TECHNIQUES[name].ranks == 1 for name in rest):
        return False  # no parallel technique remains
    try:
        return bool(run_layout(rest, precision, timeout))
    except InvalidConfig:
        return False  # the layout needs the technique


# --------------------------------------------------------------------------- battery


def find_by_tests(tests: tuple[str, str], precision: str, timeout: float) -> Finding | None:
    """Return the finding of failed tests: weft's exception, or the module that they test."""
    from tests.mutation.suite import run_tests

    module, words = tests
    text = run_tests(words)
    if not text:
        return None
    return Finding(text[-300:], module if "AssertionError" in text else frame_of(text) or module)


def battery() -> list[Check]:
    """Return all checks in the order of execution."""
    from tests.mutation import formulas, suite

    oracle = "".join(
        Path(module.__file__ or "").read_text("utf-8") for module in (oracle_module, oracle_models)
    )
    checks = [
        Check(
            f"oracle: {name}",
            _bound(find_by_oracle, name),
            f"{oracle}{ORACLE[name]}",
            _precisions(name),
        )
        for name in ORACLE
    ]
    checks += [Check(name, run, formulas.SOURCES[name]) for name, run in formulas.CHECKS.items()]
    for name, (module, words) in suite.SUITE.items():
        find_failure = _bound(find_by_tests, (module, words))
        checks.append(Check(name, find_failure, suite.read_source(words)))
    for layout in LAYOUTS:
        techniques = tuple(layout.split(", "))
        source = str([TECHNIQUES[name] for name in techniques])
        find = _bound(find_by_layout, techniques)
        checks.append(Check(f"layout: {layout}", find, source, _precisions(layout)))
    return sorted(checks, key=_order)


def _order(check: Check) -> tuple[int, int]:
    stage = check.name.partition(":")[0]
    others = check.name.count(",") if stage == "layout" else 0
    # With one technique the cause is known, so these layouts run first.
    return STAGES.index("ranks" if others else stage), others


# Techniques with special rounding, a router in bfloat16, and those that weft has not in float8.
ONLY_FLOAT32 = ("canonical", "moments", "states", "qlora", "float8", "bfloat16", "llama4")
OTHERS = ("gpt-oss", "deepseek-v3", "gemma", "granite", "nemotron", "cohere", "olmo2")
NOT_FLOAT8 = ("moe", "lora", "nf4", *OTHERS)


def _precisions(name: str) -> tuple[str, ...]:
    if any(word in name for word in ONLY_FLOAT32):
        return ("",)
    return ("", "bf16") if any(word in name for word in NOT_FLOAT8) else ("", "bf16", "float8")


def _bound(find: Callable[..., Finding | None], first: Any) -> Callable[..., Finding | None]:
    def run(precision: str, timeout: float) -> Finding | None:
        return find(first, precision, timeout)

    return run


def names() -> Iterator[str]:
    """Return the names of all checks."""
    return (check.name for check in battery())
