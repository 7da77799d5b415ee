"""Translate configurations of other programs into recipes.

``weft recipe from FILE`` calls this module.

Most of it is data: ``peer_names.toml`` has the names, ``peer_configs.toml`` the values, and the
names that weft ignores or lacks.  This module has what follows from several names: the batch, the
schedule, the model and the layout.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import tomli_w

from weft.checkpoint.best import get_best_metric
from weft.config.errors import MISSING, ConfigError, InvalidConfig
from weft.config.files import expand_path
from weft.config.peer_configs import (
    PeerConfig,
    load_peer_configs,
    parse_literal,
    read_peer_config,
)
from weft.config.peer_names import load_peer_answers, load_peer_names
from weft.config.reader import check_section
from weft.config.schema import PAIR_OBJECTIVES, SECTIONS, CheckpointSection
from weft.conversion.dataset_info import INFO_FILE, convert_entry, read_dataset_info
from weft.data.chat_rows import FIELDS, MESSAGE_FIELDS, ROLE_NAMES

Json = dict[str, Any]

# Names by the type of their values, of all programs; the translation computes with them.
POSITIVE = (
    *("parallelism.*_parallel_degree", "parallelism.*_replicate_degree"),
    *("training.local_batch_size", "training.steps", "parallelism.*_microbatch*"),
    *("--*-parallel-size", "--micro-batch-size", "--global-batch-size", "--seq-length"),
    *("--max-position-embeddings", "--num-layers", "--hidden-size", "--num-attention-heads"),
    *("--vocab-size", "--train-iters", "--train-samples", "--moe-ffn-hidden-size"),
    *("--ffn-hidden-size", "per_device_train_batch_size", "micro_batch_size"),
    *("*accumulation_steps", "parallelism_config.*_size", "profiling.profile_freq", "vocab_size"),
    *("early_stopping_patience", "train_batch_size", "train_micro_batch_size_per_gpu"),
    *("steps_per_print", "scheduler.params.total_num_steps", "activation_loading_horizon"),
    *("tensor_parallel_degree", "context_parallel_degree", "expert_parallel_degree"),
)
NUMBERS = (
    *("parallelism.data_parallel_shard_degree", "training.global_batch_size"),
    *("lr_scheduler.warmup_steps", "lr_scheduler.decay_ratio", "validation.steps"),
    *("validation.local_batch_size", "validation.freq", "checkpoint.interval"),
    *("--num-virtual-*", "--num-layers-per-*", "--rotary-*", "--yarn-*-factor", "--rope-*-factor"),
    *("--kv-channels", "--*-head-dim", "--kv-lora-rank", "--moe-router-num-groups", "--min-lr"),
    *("--moe-router-group-topk", "--moe-shared-*-size", "--num-experts", "--eval-iters"),
    *("--lr", "learning_rate", "--exit-duration-in-mins", "--lr-*-iters", "--lr-*-fraction"),
    *(
        "--muon-*-factor",
        "training.seq_len",
        "--lr-*-samples",
        "--profile-step-*",
        "--recompute-num-layers",
    ),
    *("warmup_steps", "warmup_ratio", "save_steps", "eval_steps", "logging_steps"),
    *("num_train_epochs", "num_epochs", "cosine_min_lr_ratio", "batch_size"),
    *("lr_scheduler_kwargs.min_lr*", "lr_scheduler_kwargs.num_*_steps", "gradient_clipping"),
    *("zero_optimization.stage", "zero_optimization.*_size", "tensor_parallel.autotp_size"),
    *("zero_optimization.*_threshold", "optimizer.params.lr", "optimizer.params.eps"),
    *("optimizer.params.weight_decay", "scheduler.params.warmup_*lr", "hybrid_shard_degree"),
    *("scheduler.params.*_ratio", "scheduler.params.warmup_num_steps", "sequence_parallel_size"),
)
TEXTS = (
    *("training.dataset*", "model.name", "model.flavor", "model.hf_assets_path", "dataset_name"),
    *("dataset_config", "dataset_train_split", "optimizer.name", "optimizer.type"),
    *("scheduler.type", "scheduler.params.warmup_type", "zero_optimization.offload_*.device"),
)
LISTS = (
    *("model.converters", "*.filter_fqns", "plugins", "*datasets", "report_to"),
    *("pretraining_dataset", "*target_modules", "*modules_to_save", "tokens", "*special_tokens"),
)
KTO_NAMES = ("desirable_weight", "undesirable_weight")
# Names of TRL's trainers of preferences.
PREFERENCE_NAMES = (
    *("beta", "precompute_ref_log_probs", "ref_model_sync_steps", "rpo_alpha", "cpo_alpha"),
    *("simpo_gamma", *KTO_NAMES),
)
KTO_NOTE = (
    "TRL estimates KTO's divergence on the rows of a device, weft on the global batch: a large "
    "train.global_batch_size estimates it well."
)
OBJECTIVE_NAMES = ("next_token", *PAIR_OBJECTIVES, "kto")
DEVICES_PER_NODE = 8
DEVICE = "H100"
SHELL_VARIABLE = "$"
AUTO = "auto"  # DeepSpeed: an argument of the Trainer decides


@dataclass
class Translation:
    """A recipe in the making.

    Attributes:
        config: what is translated.
        cluster: nodes, devices per node and device that the user named; None: from the file.
        recipe: value by weft's key.
        sources: names of the file from which a key comes.
        ignored: name -> why it changes nothing.
        unsupported: name and value -> what to use instead.
        notes: remarks for the user.
    """

    config: PeerConfig
    cluster: tuple[int, int, str] | None
    recipe: Json = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    unsupported: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Spell names as in the tables, and add the defaults of the program."""
        program, given = self.config.program, self.config.values
        self.tables: Json = load_peer_configs().get(program, {})
        aliases = self.tables.get("aliases", {})
        self.values: Json = {}
        for name, value in given.items():
            self.values.setdefault(aliases.get(name, name), value)
        self.given = set(self.values)
        for name in self.given:
            self._check_type(name)
        for name in [n for n, v in self.values.items() if _is_variable(v)]:
            value = self.values.pop(name)
            self.unsupported[f"{name} = {_show(value)}"] = "a shell variable without a value"
        defaults = self.tables.get("defaults", {})
        # An empty value is one that the file does not set.
        unset = {n: v for n, v in defaults.items() if self.values.get(n, "") == ""}
        self.values |= unset
        self.given -= unset.keys()
        self.notes += self.config.notes

    def _check_type(self, name: str) -> None:
        """Take out a value of a wrong type; read numbers in quotes."""
        value = self.values[name]
        rule = ""
        if value == "" and self.config.program in ("torchtitan", "megatron"):
            self.skip(name, "it is not set")
        elif _is_variable(value) or value == "":
            pass
        elif value == AUTO and self.config.program == "deepspeed":
            pass  # an argument of the Trainer
        elif _matches(name, POSITIVE + NUMBERS):
            number = parse_literal(value) if isinstance(value, str) else value
            least = 1 if _matches(name, POSITIVE) else -math.inf
            if isinstance(number, bool) or not isinstance(number, int | float):
                rule = "it is not a number"
            elif not (least <= number < 2**63 and number > -(2**63)):
                rule = "it is out of the range of this number"
            else:
                # DeepSpeed's files write whole numbers as 1e5.
                is_whole = self.config.program == "deepspeed" and number == int(number)
                self.values[name] = int(number) if is_whole else number
        elif _matches(name, TEXTS) and not isinstance(value, str):
            rule = "it is not a text"
        elif _matches(name, LISTS):
            items = value if isinstance(value, list) else [value]
            if not all(isinstance(item, str | dict) for item in items):
                rule = "it is not a list of names"
        if rule:
            self.lack(name, self.values.pop(name), rule)

    def take(self, name: str, default: Any = None) -> Any:
        """Return and remove the value of a name."""
        return self.values.pop(name, default)

    def set(self, key: str, value: Any, *names: str, note: str = "") -> None:
        """Set a key of weft, which comes from the names of the file."""
        self.recipe[key] = value
        given = [name for name in names if name in self.given]
        source = ", ".join(given) if given else f"default of {self.config.title}"
        self.sources[key] = f"{source}: {note}" if note else source

    def skip(self, name: str, reason: str) -> None:
        """Ignore a name, if the file has it."""
        if name in self.values:
            self.take(name)
            if name in self.given:
                self.ignored[name] = reason

    def lack(self, name: str, value: Any, remedy: str) -> None:
        """Record a value that weft cannot take."""
        self.unsupported[f"{name} = {_show(value)}"] = remedy

    def choose(self, key: str, name: str) -> None:
        """Set a key by the table of its values."""
        if name not in self.values:
            return
        value = self.take(name)
        table = self.tables["values"].get(key)
        if table is None:
            self.set(key, value, name)
        elif _text(value) in table:
            self.set(key, table[_text(value)], name)
        else:
            self.lack(name, value, f"{key} is one of {', '.join(map(_show, table.values()))}")

    @property
    def num_devices(self) -> int | None:
        """The number of ranks that the user named."""
        return self.cluster[0] * self.cluster[1] if self.cluster else None


def translate_file(path: Path, cluster: tuple[int, int, str] | None = None) -> Translation:
    """Translate a configuration of another program.

    Args:
        path: the file.
        cluster: nodes, devices per node and device of the run; None: those of the file.

    Raises:
        InvalidConfig: the file is of no known program.
    """
    translation = Translation(read_peer_config(path), cluster)
    PROGRAMS[translation.config.program](translation)
    _take_same(translation)
    vocabulary = translation.recipe.get("model.vocab_size", 1 << 30)
    if vocabulary < SECTIONS["data"].model_fields["vocab_size"].default:
        translation.set("data.vocab_size", vocabulary, note="of a tokenizer that weft trains")
    _take_rest(translation)
    _check_values(translation)
    originals = {other: name for name, other in translation.tables.get("names", {}).items()}
    for table in (translation.sources, translation.unsupported, translation.ignored):
        for key, text in [*table.items()] if originals else ():
            renamed = key if table is translation.sources else _rename(key, originals)
            del table[key]
            table[renamed] = _rename(text, originals)
    return translation


def _rename(text: str, names: dict[str, str]) -> str:
    """Replace whole words of a text."""
    return re.sub(r"\w+", lambda word: names.get(word[0], word[0]), text)


# ----------------------------------------------------------------------- what all programs share


def _take_same(t: Translation) -> None:
    """Set the keys whose value is the same in the file."""
    for name in t.tables.get("same", []):
        if t.values.get(name) == "":
            t.skip(name, "it is not set")
        elif name in t.values:
            t.choose(_key_of(t.tables.get("extends", t.config.program), name), name)
    for name, key in t.tables.get("keys", {}).items():
        t.choose(key, name)


def _key_of(program: str, name: str) -> str:
    return next(key for key, names in load_peer_names().items() if names.get(program) == name)


def _take_rest(t: Translation) -> None:
    """List the names that are left: ignored, unsupported or unknown."""
    for name, value in t.values.items():
        if name not in t.given:
            remedy = t.tables.get("unsupported", {}).get(name)
            if remedy is not None and value not in t.tables["harmless"].get(name, []):
                answer = load_peer_answers().get(name.lstrip("-").replace("-", "_"))
                t.lack(f"{name} (default)", value, remedy or answer or "weft has no counterpart")
            continue
        answer = load_peer_answers().get(name.lstrip("-").replace("-", "_").rpartition(".")[2])
        reason = _match(t.tables.get("unsupported", {}), name)
        if reason is not None:
            harmless = _match(t.tables.get("harmless", {}), name) or []
            if value in harmless and value is not True:
                t.ignored[name] = f"{_show(value)} is what weft does"
            elif value == "" or (value is False and True not in harmless):
                t.ignored[name] = "it is off"
            elif value in harmless:
                t.ignored[name] = f"{_show(value)} is what weft does"
            else:
                t.lack(name, value, reason or answer or "weft has no counterpart")
        elif (reason := _match(t.tables.get("ignored", {}), name)) is not None:
            t.ignored[name] = reason
        elif value in ("", False) or value == []:
            t.ignored[name] = "it is off"
        else:
            t.lack(name, value, answer or "weft does not know it; see weft help keys")


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _match(table: Json, name: str) -> Any:
    """Return the entry of a name, or of the first pattern that fits."""
    if name in table:
        return table[name]
    return next((table[p] for p in table if "*" in p and fnmatchcase(name, p)), None)


def _check_values(t: Translation) -> None:
    """Take out the values that weft's keys do not accept."""
    by_section: dict[str, Json] = {}
    for key, value in t.recipe.items():
        section, _, last = key.partition(".")
        by_section.setdefault(section, {})[last] = value
    for section, values in by_section.items():
        for error in check_section(SECTIONS[section], section, values):
            key = error.key
            if key in t.recipe:
                value = t.recipe.pop(key)
                t.lack(t.sources.pop(key), value, f"{key} {error.rule}")


def _set_cluster(t: Translation, ranks: int, is_known: bool) -> None:
    """Set ``run.cluster`` to nodes for this number of ranks."""
    if t.cluster:
        nodes, devices, device = t.cluster
    else:
        nodes, devices, device = 1, ranks, DEVICE
        if ranks > DEVICES_PER_NODE and ranks % DEVICES_PER_NODE == 0:
            nodes, devices = ranks // DEVICES_PER_NODE, DEVICES_PER_NODE
    source = "--cluster" if t.cluster else "the number of ranks in the file"
    if not t.cluster and not is_known:
        source = "assumed"
    t.recipe["run.cluster"] = f"{nodes}x{devices}x{device}"
    t.sources["run.cluster"] = source


def _ranks(t: Translation, per_replica: int, known: int | None, fallback: int) -> tuple[int, bool]:
    """Return the number of ranks, and whether the user or the file names it.

    Args:
        t: the translation.
        per_replica: ranks that compute one share of the global batch.
        known: the number in the file; None: it has none.
        fallback: the number without one.
    """
    if t.num_devices or known:
        return int(t.num_devices or known or 0), True
    return max(fallback, per_replica), False


def _note_assumed_ranks(t: Translation, ranks: int, batch: int, per_rank: str, names: str) -> None:
    t.notes.append(
        f"The global batch of {t.config.title} follows from the number of GPUs, which the file "
        f"does not name. {batch} sequences are for {ranks} GPU{'s' * (ranks > 1)} ({per_rank}). "
        f"Translate again with --cluster NODESxGPUSx{DEVICE}, or set train.global_batch_size "
        f"({names} x data-parallel ranks)."
    )


def _set_length(t: Translation, key: str, value: Any, name: str) -> None:
    """Set a number of steps that may be a fraction of all."""
    steps = t.recipe.get("train.steps")
    if isinstance(value, float) and 0 < value < 1:
        if not isinstance(steps, int):
            t.lack(name, value, f"{key} is a number of steps; weft train prints their total")
            return
        value = round(value * steps)
    t.set(key, int(value), name)


def _set_path(t: Translation, key: str, path: str, name: str, what: str) -> None:
    """Set the path of a file; if there is none here, ask for it."""
    if path and os.path.exists(expand_path(path)):
        t.set(key, path, name)
    else:
        t.lack(name, path, f"no such {what} here: set {key} on the machine that has it")


def _show(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _is_variable(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return any(isinstance(v, str) and SHELL_VARIABLE in v for v in values)


def _set_decay(t: Translation, params: str, name: str) -> None:
    """Decay further parameters: weft decays neither norms nor embeddings by itself."""
    decay = t.values.get(name)
    if isinstance(decay, int | float) and decay:
        group = {"params": [params], "weight_decay": decay}
        note = f"{t.config.title} decays {'all weights' if params == '*' else 'embeddings'}"
        t.set("optim.groups", [group], name, note=note)


def _hub_data(name: str, config: str = "", split: str = "") -> str:
    """Return ``data.path`` of a data set: a file here, or one of the Hub."""
    if "://" in name or name.startswith((".", "/", "~")) or os.path.exists(name):
        return name
    return f"hf://{name}" + (f":{config}" if config else "") + (f"@{split}" if split else "")


# ----------------------------------------------------------------------- TorchTitan


def _from_torchtitan(t: Translation) -> None:
    degree = {
        name: int(t.values.get(f"parallelism.{long}_degree", 1))
        for name, long in (
            ("dp_replicate", "data_parallel_replicate"),
            ("tp", "tensor_parallel"),
            ("pp", "pipeline_parallel"),
            ("cp", "context_parallel"),
        )
    }
    shard = int(t.take("parallelism.data_parallel_shard_degree"))
    others = degree["tp"] * degree["pp"] * degree["cp"] * degree["dp_replicate"]
    known = others * shard if shard > 0 else None
    ranks, is_known = _ranks(t, others, known, DEVICES_PER_NODE)
    experts = int(t.values.get("parallelism.expert_parallel_degree", 1))
    # The ranks of one replica and stage hold all experts.
    whole = int(t.values.get("parallelism.expert_tensor_parallel_degree", 1)) < degree["tp"]
    unit = degree["dp_replicate"] * degree["pp"] * (1 if whole else degree["tp"])
    if not is_known:
        ranks = math.lcm(others, experts * unit) * max(1, ranks // math.lcm(others, experts * unit))
    if ranks % others:
        value = f"{ranks} GPUs"
        rule = f"is not divisible by the file's other degrees, {others}"
        raise InvalidConfig([ConfigError("--cluster", value, rule, "name a multiple")])
    name = "parallelism.data_parallel_shard_degree"
    t.set("parallel.dp_shard", shard if shard > 0 else "auto", name)
    data_ranks = ranks // (degree["tp"] * degree["pp"] * degree["cp"])
    _torchtitan_batch(t, ranks, data_ranks, degree["pp"], is_known)
    _set_cluster(t, ranks, is_known)
    _torchtitan_model(t)
    _torchtitan_data(t)
    _torchtitan_schedule(t)
    _torchtitan_speed(t, degree)
    _torchtitan_outputs(t, data_ranks)
    _set_decay(t, "*", "optimizer.weight_decay")
    if t.values.get("optimizer.name", "AdamW") == "Adam":
        t.lack("optimizer.name", t.take("optimizer.name"), "optim.name = adamw")


def _torchtitan_batch(t: Translation, ranks: int, data_ranks: int, pp: int, known: bool) -> None:
    local, total = t.take("training.local_batch_size"), t.take("training.global_batch_size", -1)
    per_stage = t.take("parallelism.pipeline_parallel_microbatch_size", 1)
    number = t.take("parallelism.pipeline_parallel_microbatches")
    if total > 0:
        t.set("train.global_batch_size", total, "training.global_batch_size")
    else:
        note = f"{local} x {data_ranks} data-parallel ranks"
        t.set("train.global_batch_size", local * data_ranks, "training.local_batch_size", note=note)
        if not known:
            name = "training.local_batch_size"
            _note_assumed_ranks(t, ranks, local * data_ranks, note, name)
    if pp > 1:
        name = "parallelism.pipeline_parallel_microbatch_size"
        if number:
            name, per_stage = (
                "parallelism.pipeline_parallel_microbatches",
                max(1, int(local // number)),
            )
        t.set("train.microbatch_size", per_stage, name)
    else:
        t.set("train.microbatch_size", local, "training.local_batch_size")


def _torchtitan_model(t: Translation) -> None:
    name, flavor = t.take("model.name"), t.take("model.flavor")
    for suffix in ("_flex_attn", "_flex", "_varlen_attn", "_varlen"):
        if str(flavor).endswith(suffix):
            flavor = str(flavor).removesuffix(suffix)
            t.set("data.packing", "documents", "model.flavor", note="attention inside a document")
    if name in t.tables["other_models"]:
        rule = "is the configuration of a model that is not a language model"
        raise InvalidConfig([ConfigError("model.name", name, rule, "weft trains decoders of text")])
    if f"{name}/{flavor}" in t.tables["block_causal"]:
        t.set("data.packing", "documents", "model.flavor", note="attention inside a document")
    models = t.tables["models"]
    found = models.get(name, {}).get(str(flavor))
    fields = models["fields"].get(f"{name}/{flavor}")
    if found:
        kind, _, preset = found.partition("/")
        fields = {"kind": kind, "preset": preset}
    if fields is None:
        remedy = "set model.kind, model.preset and model.FIELD (weft help model), or model.path"
        t.lack("model.name, model.flavor", f"{name} {flavor}", remedy)
        t.recipe["model.path"] = "required"
        t.sources["model.path"] = "weft has no preset of this model"
        return
    for key, value in fields.items():
        t.set(f"model.{key}", value, "model.flavor" if key != "kind" else "model.name")
    if fields["kind"] == "deepseek_v3" and t.values["training.seq_len"] <= 4096:
        note = "TorchTitan scales in sequences above 4096 only"
        t.set("model.rope_scaling", "none", "training.seq_len", note=note)
        t.set("model.attention_scale", 0.0, "training.seq_len", note=note)
    if fields["kind"] in ("qwen3_moe", "gpt_oss", "llama4"):
        t.set("model.balance_rate", 0.001, "model.flavor", note="load_balance_coeff")
    t.notes.append(
        "The initial weights differ: TorchTitan draws embeddings with a standard deviation of 1, "
        "and weft with 0.02; TorchTitan shrinks the last matrices of a block by its depth, and "
        "weft by the number of blocks."
    )
    if fields["kind"] == "llama":
        t.notes.append(
            "TorchTitan scales the rotary frequencies as Llama 3.1 does since late 2025; before, "
            "it did not: model.rope_scaling = none."
        )


def _torchtitan_data(t: Translation) -> None:
    dataset, path = t.take("training.dataset"), t.take("training.dataset_path", "")
    known = t.tables["datasets"].get(dataset)
    if path:
        t.set("data.path", _hub_data(path), "training.dataset_path")
    elif known:
        t.set("data.path", known, "training.dataset")
    else:
        t.lack("training.dataset", dataset, "set data.path: a file, a directory, or hf://NAME")
    assets = t.take("model.hf_assets_path", "")
    if assets:
        file = Path(assets)
        file = file if file.suffix == ".json" else file / "tokenizer.json"
        _set_path(t, "data.tokenizer", str(file), "model.hf_assets_path", "tokenizer.json")


def _torchtitan_schedule(t: Translation) -> None:
    steps, warmup = t.values["training.steps"], t.values["lr_scheduler.warmup_steps"]
    ratio, kind = t.take("lr_scheduler.decay_ratio", ""), t.take("lr_scheduler.decay_type")
    if warmup > steps:
        t.lack(
            "lr_scheduler.warmup_steps", t.take("lr_scheduler.warmup_steps"), "at most the steps"
        )
        warmup = 0
    left = max(1, steps - warmup)
    decay = left if ratio == "" else min(left, round(steps * float(ratio)))
    names = ("lr_scheduler.decay_type", "lr_scheduler.decay_ratio")
    if decay == left and kind in ("linear", "cosine"):
        t.set("optim.schedule", kind, *names)
    elif decay == 0:
        t.set("optim.schedule", "wsd", *names)
        t.set("optim.decay_fraction", 0.0, names[1])
    else:
        t.set("optim.schedule", "wsd", *names)
        t.set(
            "optim.decay_fraction",
            round(decay / left, 6),
            names[1],
            note="of the steps after warmup",
        )
        if kind != "linear":
            t.lack(names[0], kind, "wsd decays linearly; optim.schedule = module:function")


def _torchtitan_speed(t: Translation, degree: dict[str, int]) -> None:
    mode = t.take("activation_checkpoint.mode")
    option = str(t.take("activation_checkpoint.selective_ac_option", "op"))
    name, key = "activation_checkpoint.mode", "activation_checkpoint.mode"
    if mode == "selective" and option.isdecimal():
        note = f"selective_ac_option = {option} recomputes every {option}th block fully"
        t.set(key, "full", name, note=note)
        t.set(
            "activation_checkpoint.every_n_layers",
            int(option),
            "activation_checkpoint.selective_ac_option",
        )
    elif mode == "memory_budget":
        t.set(key, "budget", name)
    else:
        t.set(key, mode, name)
    _torchtitan_float8(t)
    schedule = t.take("parallelism.pipeline_parallel_schedule", "1F1B")
    csv = t.take("parallelism.pipeline_parallel_schedule_csv", "")
    if degree["pp"] > 1:
        name = "parallelism.pipeline_parallel_schedule"
        t.set("pipeline.schedule", csv or schedule, name)
    else:
        t.skip("parallelism.pipeline_parallel_schedule", "there is no pipeline")
    experts = int(t.values.get("parallelism.expert_parallel_degree", 1))
    expert_tp = int(t.take("parallelism.expert_tensor_parallel_degree", 1))
    if experts > 1 and degree["tp"] > 1:
        value: Any = "tp" if expert_tp == degree["tp"] else expert_tp
        t.set("parallel.etp", value, "parallelism.expert_tensor_parallel_degree")
    else:
        t.skip("parallelism.expert_tensor_parallel_degree", "there is no tp with ep")
    for each in ("rotate_method", "load_balancer"):
        if degree["cp"] == 1:
            t.take(f"parallelism.context_parallel_{each}")
    if degree["tp"] == 1:
        t.skip("parallelism.enable_async_tensor_parallel", "there is no tensor parallelism")


def _torchtitan_float8(t: Translation) -> None:
    converters = t.take("model.converters", [])
    prefix = "quantize.linear.float8"
    recipe = t.take(f"{prefix}.recipe_name", "") or "tensorwise"
    filters = t.take(f"{prefix}.filter_fqns", [])
    if any("float8" in each for each in converters):
        t.set("precision.float8", recipe, "model.converters", f"{prefix}.recipe_name")
    elif any("mx" in each for each in converters):
        t.set("precision.float8", "mxfp8", "model.converters")
        t.take("quantize.linear.mx.recipe_name")
        filters = t.take("quantize.linear.mx.filter_fqns", ["output"])
    else:
        return
    # The head and the routers are never in float8.
    patterns = [f for f in filters if f not in ("output", "router.gate", "auto_filter_small_kn")]
    modules = t.tables["modules"]
    renamed = [".".join(modules.get(part, part) for part in f.split(".")) for f in patterns]
    if renamed:
        t.set(
            "precision.float8_exclude", [f"*{name}*" for name in renamed], f"{prefix}.filter_fqns"
        )


def _torchtitan_outputs(t: Translation, data_ranks: int) -> None:
    saves = t.take("checkpoint.enable")
    interval, keep = t.take("checkpoint.interval"), t.take("checkpoint.keep_latest_k")
    mode = t.take("checkpoint.async_mode")
    if saves:
        t.set("checkpoint.interval", interval, "checkpoint.interval")
        t.set("checkpoint.async_save", mode != "disabled", "checkpoint.async_mode")
        if keep:
            t.set("checkpoint.keep_latest", keep, "checkpoint.keep_latest_k")
        else:
            t.lack("checkpoint.keep_latest_k", keep, "checkpoint.keep_latest counts them")
    else:
        note = "TorchTitan saves nothing; weft saves the last step"
        t.set("checkpoint.interval", 0, "checkpoint.enable", note=note)
    trackers = {"tensorboard": "metrics.enable_tensorboard", "wandb": "metrics.enable_wandb"}
    used = [each for each, name in trackers.items() if t.take(name, False)]
    t.set("monitor.trackers", used, *trackers.values())
    enabled, every = (
        t.take("profiling.enable_profiling", False),
        t.take("profiling.profile_freq", 10),
    )
    if enabled and every <= t.values["training.steps"]:
        note = f"TorchTitan profiles every {every} steps"
        t.set("profile.steps", str(every), "profiling.profile_freq", note=note)
    elif not enabled:
        t.take("profiling.enable_memory_snapshot")
    if t.take("validation.enable", False):
        t.set("train.eval_interval", t.take("validation.freq", 10), "validation.freq")
        t.take("validation.dataset")
        if path := t.take("validation.dataset_path", ""):
            t.set("data.validation_path", _hub_data(path), "validation.dataset_path")
        steps, batch = t.take("validation.steps", -1), t.take("validation.local_batch_size", 8)
        if steps > 0:
            note = f"{steps} steps x {batch} x {data_ranks} ranks"
            t.set("train.eval_sequences", steps * batch * data_ranks, "validation.steps", note=note)
        else:
            t.lack("validation.steps", steps, "train.eval_sequences counts sequences")
    else:
        for name in [n for n in t.values if n.startswith("validation.")]:
            t.skip(name, "validation is off in the file")


# ----------------------------------------------------------------------- Megatron-LM


def _from_megatron(t: Translation) -> None:
    tp, pp, cp = (
        int(t.values.get(f"--{name}-parallel-size", 1))
        for name in ("tensor-model", "pipeline-model", "context")
    )
    known = None
    if isinstance(t.values.get("--nproc-per-node"), int):
        nodes = t.values.get("--nnodes", 1)
        known = t.values["--nproc-per-node"] * (nodes if isinstance(nodes, int) else 1)
    experts = int(t.values.get("--expert-model-parallel-size", 1))
    expert_tp = int(t.values.get("--expert-tensor-parallel-size") or tp)
    least = math.lcm(tp * pp * cp, experts * expert_tp * pp if experts > 1 else 1)
    if known and known % least:
        t.notes.append(
            f"The file starts {known} processes, but its degrees of parallelism need a multiple of "
            f"{least}: the layout is for {least}."
        )
        known = None
    ranks, is_known = _ranks(t, least, known, DEVICES_PER_NODE)
    if not is_known:
        ranks -= ranks % least
    if ranks % (tp * pp * cp):
        if t.num_devices:
            rule = f"is not divisible by the file's degrees, {tp * pp * cp}"
            raise InvalidConfig(
                [ConfigError("--cluster", f"{ranks} GPUs", rule, "name a multiple")]
            )
        ranks = tp * pp * cp
    data_ranks = ranks // (tp * pp * cp)
    _set_cluster(t, ranks, is_known)
    micro = t.values.get("--micro-batch-size", 1)
    if "--global-batch-size" not in t.values and "--micro-batch-size" in t.values:
        note = f"{micro} x {data_ranks} data-parallel ranks"
        t.set("train.global_batch_size", micro * data_ranks, "--micro-batch-size", note=note)
        if not is_known:
            _note_assumed_ranks(t, ranks, micro * data_ranks, note, "--micro-batch-size")
    _megatron_length(t)
    _megatron_schedule(t)
    _megatron_muon(t)
    _megatron_layout(t, tp, pp, cp)
    _megatron_precision(t)
    _megatron_model(t)
    if t.values.get("--mtp-num-layers"):
        t.values.setdefault("--mtp-loss-scaling-factor", 0.1)
    _set_decay(t, "embed_tokens.*", "--weight-decay")
    _megatron_data(t)
    _megatron_outputs(t)


def _megatron_length(t: Translation) -> None:
    batch = t.values.get("--global-batch-size", t.recipe.get("train.global_batch_size"))
    samples = t.take("--train-samples")
    if samples and batch and "--train-iters" not in t.values:
        note = f"{samples:,} samples / {batch}"
        t.set("train.steps", max(1, samples // batch), "--train-samples", note=note)
    elif samples and "--train-iters" not in t.values:
        t.lack("--train-samples", samples, "train.steps: the samples / the global batch")
    elif "--train-iters" in t.values:
        t.set("train.steps", t.take("--train-iters"), "--train-iters")
    for name in ("lr-decay", "lr-warmup", "lr-wsd-decay"):
        value = t.take(f"--{name}-samples")
        if value and batch:
            t.values[f"--{name}-iters"] = value // batch
            t.given.add(f"--{name}-iters")
        elif value:
            t.lack(f"--{name}-samples", value, "the file names no --global-batch-size")


def _megatron_schedule(t: Translation) -> None:
    steps = t.recipe.get("train.steps")
    decay = t.take("--lr-decay-iters") or steps
    style = t.values.get("--lr-decay-style")
    fraction, warmup = t.take("--lr-warmup-fraction"), t.take("--lr-warmup-iters", 0)
    if fraction is not None and decay:
        note = f"{fraction} x {decay} steps"
        warmup = round(fraction * decay)
        t.set("optim.warmup_steps", warmup, "--lr-warmup-fraction", note=note)
    else:
        if fraction:
            t.lack("--lr-warmup-fraction", fraction, "optim.warmup_steps is a number of steps")
        t.set("optim.warmup_steps", warmup, "--lr-warmup-iters")
    if steps and decay and decay != steps and style in ("linear", "cosine", "WSD"):
        t.lack(
            "--lr-decay-iters", decay,
            f"weft's {style} ends with train.steps ({steps}); optim.schedule = module:function "
            "takes another form",
        )  # fmt: skip
    peak, least = t.values.get("--lr"), t.take("--min-lr")
    if peak:
        note = f"{least} / {peak}"
        t.set("optim.min_lr_ratio", round(least / peak, 9), "--min-lr", note=note)
    elif not least:
        t.set("optim.min_lr_ratio", 0.0, "--min-lr")
    else:
        t.lack("--min-lr", least, "optim.min_lr_ratio is a fraction of --lr")
    wsd = t.take("--lr-wsd-decay-iters")
    if style == "WSD":
        t.values.setdefault("--lr-wsd-decay-style", "exponential")
    if style == "constant":
        t.set("optim.decay_fraction", 0.0, "--lr-decay-style")
    elif style == "WSD" and wsd and steps:
        value = min(1.0, round(wsd / max(1, steps - warmup), 6))
        t.set(
            "optim.decay_fraction", value, "--lr-wsd-decay-iters", note="of the steps after warmup"
        )


def _megatron_muon(t: Translation) -> None:
    """List in what Muon differs: the size of its update, and the momentum."""
    if t.values.get("--optimizer", "adam") not in ("muon", "dist_muon"):
        return
    t.values.setdefault("--muon-momentum", 0.9)
    mode, factor = t.take("--muon-scale-mode", "spectral"), t.take("--muon-extra-scale-factor", 1)
    if (mode, factor) != ("spectral", 0.2):
        remedy = "weft scales an update by 0.2 sqrt(max(rows, columns)), as spectral with 0.2 does"
        if mode == "spectral":
            remedy += f": multiply the learning rate of the blocks' matrices by {5 * factor:g}, "
            remedy += 'with [[optim.groups]], params = ["layers.*_proj*"] and lr_mult'
        t.lack("--muon-extra-scale-factor, --muon-scale-mode", f"{factor}, {mode}", remedy)
    if not t.take("--muon-nesterov", False):
        t.lack("--muon-nesterov", False, "weft's momentum is Nesterov's")


def _megatron_layout(t: Translation, tp: int, pp: int, cp: int) -> None:
    stages = t.take("--num-virtual-stages-per-pipeline-rank")
    per_stage = t.take("--num-layers-per-virtual-pipeline-stage")
    layers = t.values.get("--num-layers")
    if per_stage and layers and pp > 1:
        stages = layers // pp // per_stage
    if stages and stages > 1 and pp > 1:
        name = "--num-layers-per-virtual-pipeline-stage"
        name = name if per_stage else "--num-virtual-stages-per-pipeline-rank"
        t.set("pipeline.schedule", "Interleaved1F1B", name)
        t.set("pipeline.stages_per_rank", stages, name)
    if tp == 1:
        t.take("--sequence-parallel")
    expert_tp = t.take("--expert-tensor-parallel-size")
    if expert_tp is not None and tp > 1 and t.values.get("--num-experts"):
        t.set(
            "parallel.etp", "tp" if expert_tp == tp else expert_tp, "--expert-tensor-parallel-size"
        )
    if not t.values.get("--num-experts"):
        t.take("--moe-token-dispatcher-type")
    if cp == 1:
        t.take("--cp-comm-type")
    strategy = t.take("--data-parallel-sharding-strategy", "no_shard")
    fsdp = t.take("--use-torch-fsdp2", False) or (
        (t.take("--use-megatron-fsdp", False) or t.take("--use-custom-fsdp", False))
        and strategy in ("optim_grads_params", "no_shard")
    )
    if not fsdp:
        name, note = (
            "--use-distributed-optimizer",
            "weights stay unsharded, optimizer state is sharded",
        )
        if not t.take(name, False):
            note = "Megatron-LM replicates the optimizer state; weft always shards it"
        t.set("parallel.reshard_after_forward", "never", name, note=note)
    else:
        name = "--data-parallel-sharding-strategy"
        t.set("parallel.reshard_after_forward", "always", name, "--use-torch-fsdp2")
    granularity = t.take("--recompute-granularity")
    method, number = t.take("--recompute-method", ""), t.take("--recompute-num-layers", 1)
    modules = t.take("--recompute-modules", "core_attn")
    selective = t.take("--recompute-activations", False) or granularity == "selective"
    key = "activation_checkpoint.mode"
    if granularity == "full":
        t.set(key, "full", "--recompute-granularity")
        if number != 1 or method == "block":
            t.lack(
                "--recompute-num-layers",
                f"{number} ({method})",
                "weft recomputes every block, or every n-th: activation_checkpoint.every_n_layers",
            )
    elif selective and modules == "core_attn":
        t.set(
            key, "none", "--recompute-granularity", note="attention kernels recompute scores anyway"
        )
    elif selective:
        t.set(key, "selective", "--recompute-modules", note="cheap operators")
        t.set("activation_checkpoint.recompute_every_n_matmuls", 0, "--recompute-modules")


def _megatron_precision(t: Translation) -> None:
    half = t.take("--bf16", False) or t.values.get("--fp16", False)
    t.set("precision.compute_dtype", "bfloat16" if half else "float32", "--bf16")
    if t.take("--grad-reduce-in-bf16", False):
        t.set("precision.reduce_dtype", "bfloat16", "--grad-reduce-in-bf16")
    form, recipe = t.take("--fp8-format"), t.take("--fp8-recipe", "delayed")
    if form:
        table = {
            "delayed": "tensorwise",
            "tensorwise": "tensorwise",
            "mxfp8": "mxfp8",
            "blockwise": "rowwise",
        }
        t.set("precision.float8", table.get(recipe, "tensorwise"), "--fp8-format", "--fp8-recipe")
        if recipe != "mxfp8":
            t.notes.append(
                f"--fp8-recipe {recipe}: weft computes the scale of a matrix from its values, "
                "without a history of maxima, and without blocks of 128 x 128."
            )


MEGATRON_DEFAULT_VOCABULARY = 128256


def _megatron_model(t: Translation) -> None:
    layers, dim = t.values.get("--num-layers"), t.values.get("--hidden-size")
    if not (layers and dim and t.values.get("--num-attention-heads")):
        missing = "--num-layers, --hidden-size or --num-attention-heads"
        t.lack("model", "", f"the file lacks {missing}: set model.path, or kind and preset")
        t.recipe["model.path"] = "required"
        t.sources["model.path"] = f"the file lacks {missing}"
        for name in t.tables["model"]:
            t.skip(name, "a field of the model, which is not complete in the file")
        return
    heads = t.values["--num-attention-heads"]
    grouped, groups = t.take("--group-query-attention", False), t.take("--num-query-groups", 1)
    t.set("model.num_kv_heads", groups if grouped else heads, "--num-query-groups")
    width = t.take("--kv-channels")
    if width and not t.values.get("--multi-latent-attention"):
        t.set("model.head_dim", width, "--kv-channels")
    gated = bool(t.take("--swiglu", False) or t.values.get("--quick-geglu", False))
    ffn = t.take("--ffn-hidden-size")
    default = int(dim * 4 * 2 / 3) // 64 * 64 if gated else 4 * dim
    t.set("model.ffn_dim", ffn or default, "--ffn-hidden-size", note="" if ffn else f"from {dim}")
    squared = t.take("--squared-relu", False)
    bias = not t.take("--disable-bias-linear", False)
    # The fused kernel of bias and GELU, the default with biases, is the tanh approximation.
    gelu = "gelu_tanh" if bias and not t.values.get("--no-bias-gelu-fusion") else "gelu"
    activation = "relu2" if squared else "silu" if gated else gelu
    t.set("model.activation", activation, "--swiglu")
    t.set("model.gated", gated, "--swiglu")
    qkv = t.take("--add-qkv-bias", False)
    for key, value in (("qkv_bias", bias or qkv), ("out_bias", bias), ("ffn_bias", bias)):
        t.set(f"model.{key}", value, "--disable-bias-linear")
    rms = t.take("--normalization", "LayerNorm") == "RMSNorm"
    t.set("model.norm", "rms" if rms else "layer", "--normalization")
    t.set("model.norm_bias", not rms, "--normalization")
    if t.take("--apply-layernorm-1p", False):
        t.set("model.norm_offset", True, "--apply-layernorm-1p")
    qk_norm = t.take("--qk-layernorm", False)
    t.set("model.qk_norm", "head" if qk_norm else "none", "--qk-layernorm")
    name = "--untie-embeddings-and-output-weights"
    t.set("model.tied_embeddings", not t.take(name, False), name)
    _megatron_positions(t)
    _megatron_vocabulary(t)
    has_latent = _megatron_latent(t, width)
    if has_latent and not qk_norm:
        remedy = "weft always normalizes the latent vectors of MLA, as --qk-layernorm does"
        t.lack("--qk-layernorm", False, remedy)
    experts = _megatron_experts(t, ffn or default)
    if experts:
        t.set("model.expert_biases", bias, "--disable-bias-linear")
        if not gated:
            t.lack("--swiglu", False, "experts are always gated in weft, as with --swiglu")
    kind = "llama"
    if has_latent:
        kind = "deepseek_v3"
    elif experts:
        kind = "qwen3_moe" if qk_norm else "mixtral"
    elif qk_norm:
        kind = "qwen3"
    elif not rms:
        kind = "nemotron" if squared else "starcoder2"
    t.recipe = {"model.kind": kind, "model.preset": "toy"} | t.recipe
    t.sources |= {"model.kind": "the nearest family", "model.preset": "every size is set below"}
    _megatron_window(t)
    softmax = t.take("--softmax-type", "vanilla")
    if softmax == "learnable":
        t.set("model.attention_sinks", True, "--softmax-type")
    elif softmax != "vanilla":
        t.lack("--softmax-type", softmax, "model.attention_sinks = true has learned logits")
    _megatron_plain(t, kind)


def _megatron_window(t: Translation) -> None:
    given, every = t.take("--window-size"), t.take("--window-attn-skip-freq")
    if given is None:
        return
    window = re.match(r"[(\[ ]*(-?\d+)", str(given))
    if not window or (every is not None and not isinstance(every, int)):
        rule = "model.sliding_window counts tokens, and model.layer_pattern lists layers"
        t.lack("--window-size, --window-attn-skip-freq", f"{given}, {every}", rule)
    elif int(window[1]) >= 0:
        t.set("model.sliding_window", int(window[1]) + 1, "--window-size")
        pattern = "L" * (every - 1) + "G" if every else "L"
        t.set("model.layer_pattern", pattern, "--window-attn-skip-freq")


def _megatron_plain(t: Translation, kind: str) -> None:
    """Reset what only the preset of the family has."""
    from weft.models import FAMILIES

    plain = FAMILIES["llama"].presets["toy"].model_dump()
    for name, value in FAMILIES[kind].presets["toy"].model_dump().items():
        if value != plain[name] and f"model.{name}" not in t.recipe:
            t.set(f"model.{name}", plain[name])


def _megatron_positions(t: Translation) -> None:
    kind = t.values.get("--position-embedding-type", "learned_absolute")
    if t.take("--use-rotary-position-embeddings", False):
        kind = "rope"
    if kind in ("none", "nope"):
        t.set("model.rope_pattern", "N", "--position-embedding-type")
    elif kind not in ("rope", "yarn"):
        remedy = "positions are rotary in weft (model.rope_theta)"
        t.lack("--position-embedding-type", kind, remedy)
    if t.take("--use-rope-scaling", False):
        t.set("model.rope_scaling", "llama3", "--use-rope-scaling")
        t.set(
            "model.rope_factor", float(t.take("--rope-scaling-factor", 8)), "--rope-scaling-factor"
        )
    elif factor := t.take("--rotary-seq-len-interpolation-factor"):
        t.set("model.rope_scaling", "linear", "--rotary-seq-len-interpolation-factor")
        t.set("model.rope_factor", float(factor), "--rotary-seq-len-interpolation-factor")
    elif kind == "yarn" or t.values.get("--multi-latent-attention"):
        factor = float(t.take("--rotary-scaling-factor", t.take("--yarn-rotary-scaling-factor", 1)))
        if factor > 1:
            remedy = (
                "set model.rope_scaling = yarn, rope_factor, rope_original_context and "
                "attention_scale as in the model's config.json"
            )
            t.lack("--rotary-scaling-factor", factor, remedy)
        t.set("model.rope_scaling", "none", "--position-embedding-type")
    else:
        t.set("model.rope_scaling", "none", "--use-rope-scaling")
    if "--seq-length" not in t.values and "--max-position-embeddings" in t.values:
        t.set("train.seq_len", t.values["--max-position-embeddings"], "--max-position-embeddings")
    longest = max(t.values.get("--max-position-embeddings", 1), t.values.get("--seq-length", 1))
    t.set("model.max_seq_len", longest, "--max-position-embeddings")
    t.take("--max-position-embeddings")
    for name, key in (("--rotary-base", "rope_theta"), ("--rotary-percent", "rope_fraction")):
        if name in t.values:
            t.set(f"model.{key}", float(t.take(name)), name)


def _megatron_vocabulary(t: Translation) -> None:
    size = t.take("--vocab-size")
    if not size:
        size = MEGATRON_DEFAULT_VOCABULARY
        t.notes.append(
            f"The file does not name the size of the vocabulary, which its tokenizer has: set "
            f"model.vocab_size ({size} is only a guess)."
        )
    t.set("model.vocab_size", size, "--vocab-size")


def _megatron_latent(t: Translation, kv_channels: int | None) -> bool:
    if not t.take("--multi-latent-attention", False):
        return False
    nope, rope = t.take("--qk-head-dim", 128), t.take("--qk-pos-emb-head-dim", 64)
    t.set("model.head_dim", nope + rope, "--qk-head-dim", "--qk-pos-emb-head-dim")
    t.set("model.rope_head_dim", rope, "--qk-pos-emb-head-dim")
    t.set("model.value_head_dim", t.take("--v-head-dim", kv_channels or 128), "--v-head-dim")
    t.set("model.kv_rank", t.take("--kv-lora-rank", 32), "--kv-lora-rank")
    q_rank = t.take("--q-lora-rank", 0)
    t.set("model.q_rank", q_rank if isinstance(q_rank, int) else 0, "--q-lora-rank")
    t.set("model.qk_norm", "none", "--qk-layernorm", note="latent attention has its norms")
    t.set("model.rope_interleaved", True, "--multi-latent-attention")
    return True


def _megatron_experts(t: Translation, ffn: int) -> int:
    experts = int(t.values.get("--num-experts", 0))
    if not experts:
        for name in [n for n in t.values if n.startswith("--moe-")]:
            t.skip(name, "there are no experts")
        return 0
    width = t.take("--moe-ffn-hidden-size", ffn)
    t.set("model.expert_dim", width, "--moe-ffn-hidden-size")
    t.values.setdefault("--moe-router-topk", 2)
    shared = t.take("--moe-shared-expert-intermediate-size", 0)
    t.set("model.shared_experts", shared // width, "--moe-shared-expert-intermediate-size")
    if shared % width:
        rule = f"it is no multiple of the width of an expert ({width}): model.shared_experts"
        t.lack("--moe-shared-expert-intermediate-size", shared, rule)
    score = t.take("--moe-router-score-function", "softmax")
    t.set("model.score", score, "--moe-router-score-function")
    before = t.take("--moe-router-pre-softmax", False)
    t.set("model.renormalize", score == "sigmoid" or not before, "--moe-router-pre-softmax")
    bias = t.take("--moe-router-enable-expert-bias", False)
    rate = t.take("--moe-router-bias-update-rate", 1e-3)
    t.set("model.balance_rate", rate if bias else 0.0, "--moe-router-enable-expert-bias")
    groups, active = t.take("--moe-router-num-groups", 1), t.take("--moe-router-group-topk", 1)
    if groups > 1:
        t.set("model.expert_groups", groups, "--moe-router-num-groups")
        t.set("model.active_groups", active, "--moe-router-group-topk")
    kind = t.take("--moe-router-load-balancing-type", "aux_loss")
    if kind == "none":
        t.take("--moe-aux-loss-coeff")
    elif kind in ("aux_loss", "global_aux_loss", "seq_aux_loss"):
        scope = "sequence" if kind == "seq_aux_loss" else "global"
        if t.values.get("--moe-aux-loss-coeff"):
            name = "--moe-router-load-balancing-type"
            note = "Megatron-LM balances a microbatch" if kind == "aux_loss" else ""
            t.set("model.router_aux_loss_scope", scope, name, note=note)
    else:
        t.lack(
            "--moe-router-load-balancing-type",
            kind,
            "model.router_aux_loss_coef, or model.balance_rate",
        )
    frequency = str(t.take("--moe-layer-freq", 1)).replace(" ", "").strip("()")
    dense = re.fullmatch(r"(?:\[0\]\*(\d+)\+)?\[1\]\*\d+", frequency)
    if dense or frequency == "1":
        t.set("model.dense_layers", int((dense and dense[1]) or 0), "--moe-layer-freq")
    else:
        rule = "experts are in the first layer of each n in Megatron-LM, in the last in weft "
        rule += "(model.expert_interval)"
        t.lack("--moe-layer-freq", frequency, rule)
    return experts


def _megatron_data(t: Translation) -> None:
    paths = t.take("--data-path")
    if paths is not None:
        words = [str(path) for path in (paths if isinstance(paths, list) else [paths])]
        if len(words) == 1:
            file = words[0] if os.path.exists(words[0]) else f"{words[0]}.bin"
            _set_path(t, "data.path", file, "--data-path", "file of tokens")
        else:
            weights = words[::2]
            total = sum(float(w) for w in weights) or 1.0
            pairs = zip(words[1::2], weights, strict=False)
            mixture = {f"{name}.bin": round(float(w) / total, 6) for name, w in pairs}
            t.set("data.mixture", mixture, "--data-path")
    split = t.take("--split", None if paths is None else "969, 30, 1")
    if split is not None:
        text = " ".join(map(str, split)) if isinstance(split, list) else str(split)
        parts = [parse_literal(part) for part in re.split("[,/ ]+", text.strip("'\"[]")) if part]
        shares = [part for part in parts if isinstance(part, int | float)]
        fraction = shares[1] / (sum(shares) or 1.0) if len(shares) > 1 else 0.0
        if 0 <= fraction < 0.5:
            t.set(
                "data.validation_fraction",
                round(fraction, 9),
                "--split",
                note="weft has no test set",
            )
        else:
            t.lack("--split", text, "data.validation_fraction is below 0.5")
    if (valid := t.take("--valid-data-path")) is not None:
        names = [str(name) for name in (valid if isinstance(valid, list) else [valid])]
        if len(names) == 1:
            _set_path(
                *(t, "data.validation_path", f"{names[0].removesuffix('.bin')}.bin"),
                *("--valid-data-path", "file of tokens"),
            )
        else:
            t.lack("--valid-data-path", " ".join(names), "data.validation_path is one path")
    tokenizer = t.take("--tokenizer-model")
    if tokenizer is not None:
        path = Path(str(tokenizer))
        path = path if path.suffix == ".json" else path / "tokenizer.json"
        _set_path(t, "data.tokenizer", str(path), "--tokenizer-model", "tokenizer.json")


def _megatron_outputs(t: Translation) -> None:
    for name, key in (("--exit-duration-in-mins", "resilience.time_limit"),):
        if minutes := t.take(name):
            t.set(key, 60.0 * minutes, name, note=f"{minutes} minutes")
    iters, batch = t.take("--eval-iters"), t.recipe.get("train.global_batch_size")
    batch = t.values.get("--global-batch-size", batch)
    if iters and batch:
        t.set("train.eval_sequences", iters * batch, "--eval-iters", note=f"{iters} x {batch}")
    elif not iters:
        t.take("--eval-interval")
    load = t.take("--load")
    if load and load != t.values.get("--save"):
        remedy = "a run resumes from its own run.dir; model.path takes a Hugging Face directory"
        t.lack("--load", load, remedy)
    elif load:
        t.ignored["--load"] = "a run resumes from its newest checkpoint"
    first, last = t.take("--profile-step-start"), t.take("--profile-step-end")
    if t.take("--profile", False):
        first, last = int(first or 10), int(last or 12)
        text = str(first) if last <= first else f"{max(1, first)}-{last}"
        t.set("profile.steps", text, "--profile-step-start", "--profile-step-end")
    used = ["tensorboard"] * bool(t.values.get("--tensorboard-dir"))
    used += ["wandb"] * bool(t.values.get("--wandb-project"))
    t.set("monitor.trackers", used, "--tensorboard-dir", "--wandb-project")


# ----------------------------------------------------------------------- Hugging Face

OPTIMIZERS = {
    "adamw_torch": "float32",
    "adamw_torch_fused": "float32",
    "adamw_hf": "float32",
    "adamw_apex_fused": "float32",
    "adamw": "float32",
    "adamw_8bit": "8bit",
    "adamw_bnb_8bit": "8bit",
    "adamw_torch_8bit": "8bit",
    "paged_adamw_8bit": "8bit",
    "paged_adamw_32bit": "float32",
    "paged_adamw": "float32",
}
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "wsd",
    "constant": "constant",
    "constant_with_warmup": "constant",
}


def _trainer_optimizer(t: Translation, optimizer: str, schedule: str, has_adapter: bool) -> None:
    """Translate optimizer and schedule of the Trainer, which axolotl uses, too."""
    name = str(t.take(optimizer, "") or "adamw_torch")
    if name in OPTIMIZERS:
        t.set("optim.name", "adamw", optimizer)
        t.set("optim.state_dtype", OPTIMIZERS[name], optimizer)
    elif name in ("muon", "dist_muon"):
        t.set("optim.name", "muon", optimizer)
    else:
        t.lack(optimizer, name, "optim.name = adamw, muon, soap, or module:function")
    kind = str(t.take(schedule) or "linear").removeprefix("SchedulerType.").lower()
    options = {n: t.take(n) for n in list(t.values) if n.startswith("lr_scheduler_kwargs.")}
    options = {n.rpartition(".")[2]: v for n, v in options.items() if v not in ("", None)}
    peak, steps = t.values.get("learning_rate"), t.recipe.get("train.steps")
    ratio = options.pop("min_lr_rate", options.pop("min_lr_ratio", 0.0))
    least = options.pop("min_lr", 0.0)
    if least and peak:
        ratio = float(least) / float(peak)
    least = t.take("cosine_min_lr_ratio")
    if kind.startswith("cosine"):
        ratio = least or ratio
    warmup = _trainer_warmup(t, kind, steps)
    if kind not in SCHEDULES:
        t.lack(schedule, kind, "optim.schedule = linear, cosine, wsd, or module:function")
    elif SCHEDULES[kind] == "constant":
        t.set("optim.schedule", "wsd", schedule, note="with decay_fraction = 0: constant")
        t.set("optim.decay_fraction", 0.0, schedule)
    else:
        t.set("optim.schedule", SCHEDULES[kind], schedule)
    t.set("optim.min_lr_ratio", float(ratio), schedule)
    if kind == "warmup_stable_decay":
        # transformers decays by a cosine unless told otherwise.
        form = options.setdefault("decay_type", "cosine")
        decay, stable = options.pop("num_decay_steps", None), options.pop("num_stable_steps", None)
        options = {n: v for n, v in options.items() if v != "linear" or not n.endswith("_type")}
        if form == "linear":
            options.pop("num_cycles", None)
        if isinstance(steps, int) and isinstance(warmup, int):
            decay = steps - warmup - stable if stable is not None and decay is None else decay
            share = round(min(1.0, (decay or 0) / max(1, steps - warmup)), 6)
            note = "of the steps after warmup"
            t.set("optim.decay_fraction", share, f"{schedule}_kwargs", note=note)
            if stable is not None and warmup + stable + decay != steps:
                options["num_stable_steps"] = stable
        elif decay:
            options["num_decay_steps"] = decay
    elif options.get("num_cycles") == 0.5:
        del options["num_cycles"]
    for name, value in options.items():
        remedy = "wsd decays linearly; optim.schedule = module:function takes another form"
        t.lack(f"lr_scheduler_kwargs.{name}", value, remedy)
    if not has_adapter:
        _set_decay(t, "embed_tokens.*", "weight_decay")


def _trainer_warmup(t: Translation, kind: str, steps: Any) -> Any:
    """Set the steps of warm-up, and return them."""
    is_axolotl = t.config.program == "axolotl"
    warmup, share = t.take("warmup_steps", ""), t.take("warmup_ratio", "")
    if kind == "constant":
        t.set("optim.warmup_steps", 0, "warmup_steps", note="constant has none")
        return 0
    if isinstance(warmup, float) and 0 < warmup < 1:
        warmup, share = "", warmup
    if is_axolotl and warmup == share == "":
        share = 0.03  # the default
    # Zero steps are "not set" in transformers, and a number in axolotl.
    if warmup or not share or (is_axolotl and warmup == 0):
        number = int(warmup or 0)
        t.set("optim.warmup_steps", number, "warmup_steps")
        return number
    if isinstance(steps, int):
        number = int(share * steps) if is_axolotl else math.ceil(share * steps)
        if is_axolotl and "warmup_ratio" not in t.given:
            number = min(number, 100)
        t.set("optim.warmup_steps", number, "warmup_ratio", note=f"{share} x {steps}")
        return number
    t.set("optim.warmup_steps", "auto", "warmup_ratio", note="a tenth of the steps, at most 100")
    if share == 0.1:
        remedy = "above 1,000 steps set optim.warmup_steps to a tenth of the steps"
    else:
        remedy = "set optim.warmup_steps to this share of the steps, which weft train prints"
    t.lack("warmup_ratio", share, remedy)
    return None


def _trainer_length(t: Translation, epochs: str) -> None:
    steps, number = t.take("max_steps", -1), t.take(epochs, 0)
    if isinstance(steps, int) and steps > 0:
        t.set("train.steps", steps, "max_steps")
    else:
        t.set("train.epochs", float(number or 1), epochs)


def _trainer_precision(t: Translation) -> None:
    bf16, half = t.take("bf16", False), t.values.get("fp16", False)
    if bf16 in (True, "auto", "true", "full") or half in (True, "auto", "true"):
        dtype = "auto" if "auto" in (bf16, half) else "bfloat16"
        t.set("precision.compute_dtype", dtype, "bf16")
        if half and t.config.program == "axolotl" and not bf16:
            t.lack("fp16", t.take("fp16"), "precision.compute_dtype is bfloat16 or float32")
    else:
        t.set("precision.compute_dtype", "float32", "bf16")
    recompute = t.take("gradient_checkpointing", False)
    mode = "full" if recompute not in (False, "", None) else "none"
    t.set("activation_checkpoint.mode", mode, "gradient_checkpointing")
    if recompute in ("offload", "offload_disk"):
        t.set("activation_checkpoint.offload", True, "gradient_checkpointing")


def _trainer_lora(t: Translation, has_adapter: bool) -> None:
    four, eight = t.take("load_in_4bit", False), t.take("load_in_8bit", False)
    if not has_adapter:
        for name in [
            n for n in t.values if n.startswith(("lora_", "use_dora", "use_rslora", "peft"))
        ]:
            t.skip(name, "there is no adapter")
        return
    if four or eight:
        name = "load_in_4bit" if four else "load_in_8bit"
        t.set("lora.quantize", "nf4" if four else "int8", name)
    targets = t.take("lora_target_modules", "")
    linear = t.take("lora_target_linear", False)
    if targets in ("", []) and t.config.program == "huggingface":
        t.set("lora.targets", ["q_proj", "v_proj"], note="of PEFT, for most families")
    elif targets in ("all-linear", "", []) or linear:
        targets = [] if linear or targets == "all-linear" else targets or []
        note = "all linear layers of the blocks"
        t.set("lora.targets", targets, "lora_target_modules", note="" if targets else note)
    else:
        names = [targets] if isinstance(targets, str) else list(targets)
        if any("(" in each or "|" in each for each in names):
            t.lack(
                "lora_target_modules", targets, "lora.targets are the ends of names, such as q_proj"
            )
        else:
            t.set("lora.targets", names, "lora_target_modules")
    t.values.setdefault("lora_r", 16 if t.config.program == "huggingface" else 8)
    if t.config.program == "huggingface":
        t.values.setdefault("lora_dropout", 0.05)
    if t.values.get("lora_alpha", "") == "":
        t.take("lora_alpha")
        t.set("lora.alpha", 32 if t.config.program == "huggingface" else 16, "lora_alpha")


def _trainer_batch(t: Translation, per_device: str, fallback: int) -> None:
    """Set the global batch: per device x accumulation x data-parallel ranks."""
    batch = int(t.take(per_device) or 1)
    accumulate = int(t.take("gradient_accumulation_steps") or 1)
    sizes = {
        n: int(t.recipe.get(f"parallel.{n}") or 1) for n in ("dp_replicate", "dp_shard", "tp", "cp")
    }
    product = sizes["dp_replicate"] * sizes["dp_shard"] * sizes["tp"] * sizes["cp"]
    is_named = any(f"parallel.{name}" in t.recipe for name in sizes)
    known = product if is_named and "parallel.dp_shard" in t.recipe else None
    ranks, is_known = _ranks(t, sizes["tp"] * sizes["cp"], known, fallback)
    data_ranks = max(1, ranks // (sizes["tp"] * sizes["cp"]))
    _set_cluster(t, ranks, is_known)
    note = f"{batch} x {accumulate} x {data_ranks} data-parallel ranks"
    names = f"{per_device} x gradient_accumulation_steps"
    total = batch * accumulate * data_ranks
    t.set("train.global_batch_size", total, per_device, "gradient_accumulation_steps", note=note)
    t.set("train.microbatch_size", batch, per_device)
    if not is_known:
        _note_assumed_ranks(t, ranks, total, note, names)


def _trainer_saves(t: Translation) -> None:
    strategy = str(t.take("save_strategy", "steps") or "steps").lower().rpartition(".")[2]
    every = t.take("save_steps")
    if strategy == "no":
        t.set("checkpoint.interval", 0, "save_strategy", note="weft saves the last step")
    elif strategy == "epoch" or (every is None and t.config.program == "axolotl"):
        per = t.take("saves_per_epoch")
        value = per if per is not None else "epoch"
        t.lack("saves_per_epoch", value, "checkpoint.interval is a number of steps (100)")
    elif every:
        _set_length(t, "checkpoint.interval", every, "save_steps")
    strategy = str(t.take("eval_strategy", "no") or "no").lower().rpartition(".")[2]
    every = t.take("eval_steps", t.values.get("logging_steps"))
    per = t.take("evals_per_epoch")
    if strategy == "steps" and every:
        _set_length(t, "train.eval_interval", every, "eval_steps")
    elif strategy == "epoch" or per:
        value = per if per else "epoch"
        t.lack("evals_per_epoch", value, "train.eval_interval is a number of steps (0: at the end)")
    logs = t.take("logging_steps")
    if logs:
        _set_length(t, "monitor.log_interval", max(1, logs) if logs >= 1 else logs, "logging_steps")
    _trainer_best(t)


# Metrics of the validation set, by transformers' and TRL's names.
BEST_METRICS = {
    "loss": "eval_loss",
    "rewards/accuracies": "reward_accuracy",
    "rewards/margins": "reward_margin",
    "rewards/chosen": "reward_chosen",
    "rewards/rejected": "reward_rejected",
}


def _trainer_best(t: Translation) -> None:
    patience, keeps_best = t.take("early_stopping_patience"), t.take("load_best_model_at_end")
    name, is_greater = t.take("metric_for_best_model"), t.take("greater_is_better")
    if patience:
        t.set("train.early_stopping", patience, "early_stopping_patience")
    if not patience and not keeps_best:
        return  # then the others have no effect
    name = str(name or "loss").removeprefix("eval_")
    if (metric := BEST_METRICS.get(name)) is None:
        known = ", ".join(dict.fromkeys(BEST_METRICS.values()))
        t.lack("metric_for_best_model", name, f"checkpoint.best is one of {known}")
        return
    # Early stopping uses this metric, too.
    if keeps_best or metric != "eval_loss":
        names = ("load_best_model_at_end", "metric_for_best_model")
        t.set("checkpoint.best", metric, *names, note="weft export RUN OUT --step best")
    if not isinstance(is_greater, bool):
        is_greater = name != "loss"
    if is_greater != get_best_metric(CheckpointSection(best=metric)).is_higher_better:
        t.set("checkpoint.best", metric, "metric_for_best_model")
        t.set("checkpoint.best_mode", "max" if is_greater else "min", "greater_is_better")


def _note_holdout(t: Translation) -> None:
    fraction = SECTIONS["data"].model_fields["validation_fraction"].default
    t.notes.append(
        f"The file trains on all data; weft holds out {fraction:.0%} of them for validation: "
        "data.validation_fraction (0: no validation), or data.validation_path."
    )


def _note_packing(t: Translation) -> None:
    t.notes.append(
        f"Without packing, {t.config.title} counts conversations. A sequence of weft is packed "
        "with several; train.global_batch_size counts sequences. Divide it by the conversations "
        "that fit into train.seq_len to keep the batch."
    )


def _from_huggingface(t: Translation) -> None:
    v = t.values
    if other := sorted(t.given & set(t.tables["other_trainers"])):
        rule = "is a name of a trainer whose loss weft does not have"
        remedy = "files of SFT, DPO, ORPO, SimPO, KTO and reward models are translated; "
        remedy += "train.objective=module:function"
        raise InvalidConfig([ConfigError(other[0], v[other[0]], rule, remedy)])
    is_dpo = any(n in v for n in PREFERENCE_NAMES)
    is_reward = "center_rewards_coefficient" in v
    is_sft = any(n in v for n in ("max_length", "packing", "assistant_only_loss"))
    if is_dpo or is_sft or is_reward:
        for name, value in t.tables["trl_defaults"].items():
            if name not in t.given:
                v[name] = value
        v["bf16"] = not v.get("fp16") if v.get("bf16", "") == "" else v["bf16"]
        if "learning_rate" not in t.given:
            v["learning_rate"] = 1e-4 if is_reward else 1e-6 if is_dpo else 2e-5
    if not v.get("test_split_size"):
        _note_holdout(t)
    if "model_name_or_path" not in v:
        t.set("model.path", "required", note="a script names the model; set model.path")
    dataset = t.take("dataset_name", "")
    config, split = t.take("dataset_config", ""), t.take("dataset_train_split", "")
    mixture = t.take("dataset_mixture.datasets", None) or t.take("datasets", None)
    t.take("dataset_mixture.test_split_size")
    if isinstance(mixture, list) and mixture:
        paths = {}
        known = {"id", "path", "config", "name", "split", "weight", "columns"}
        for entry in [each for each in mixture if isinstance(each, dict)]:
            for option in [each for each in entry if each not in known and entry[each]]:
                t.lack(f"datasets.{option}", entry[option], "data.mixture lists paths with weights")
            name = str(entry.get("id") or entry.get("path") or "")
            part = str(entry.get("split") or "")
            part = "" if part == "train" else part
            settings = str(entry.get("config") or entry.get("name") or "")
            paths[_hub_data(name, settings, part)] = float(entry.get("weight") or 1.0)
        if len(paths) == 1:
            t.set("data.path", next(iter(paths)), "datasets")
        else:
            t.set("data.mixture", paths, "datasets")
            t.notes.append(
                "TRL takes a fraction of each data set and concatenates them. A weight of "
                "data.mixture is a share of the sequences: change them to the sizes of the sets."
            )
    elif dataset:
        split = "" if split == "train" else split
        t.set("data.path", _hub_data(dataset, config, split), "dataset_name")
    else:
        t.notes.append("The file names no data, which a script loads: set data.path.")
    if is_reward:
        t.set("data.format", "preferences", "center_rewards_coefficient")
        t.set("train.objective", "reward", "center_rewards_coefficient")
        t.set("data.overlong", "skip", note="TRL drops longer pairs")
        t.notes.append("max_length is for one answer; train.seq_len covers both of a pair.")
        if v["center_rewards_coefficient"] in (None, ""):
            t.take("center_rewards_coefficient")
    elif is_dpo:
        t.skip("label_smoothing_factor", "DPO of TRL does not read it")
        _trl_preferences(t)
    elif is_sft and "dataset_text_field" not in v:
        t.set("data.format", "chat", "max_length", note="text for plain documents")
    elif is_sft:
        wrapped = bool(v.get("packing")) and v.get("packing_strategy") == "wrapped"
        t.set("data.packing", "windows" if wrapped else "best_fit", "packing_strategy")
    if is_dpo or is_sft or is_reward:
        t.values.setdefault("max_length", 1024)
        if not v.get("max_length"):
            t.take("max_length")
            t.lack("max_length", "null", "train.seq_len is a number of tokens")
        if is_dpo:
            t.take("truncation_mode")
            note = f"{t.config.title} cuts answers at max_length, weft compares no cut answers"
            t.set("data.overlong", "skip", "truncation_mode", note=note)
        elif "truncation_mode" not in v and not is_reward:
            note = f"{t.config.title} cuts sequences at max_length"
            t.set("data.overlong", "truncate", note=note)
    else:
        t.notes.append("TrainingArguments have no sequence length: set train.seq_len.")
    if is_sft and not (is_dpo or is_reward) and not v.get("packing"):
        _note_packing(t)
    if t.recipe.get("data.format") == "chat" and not v.get("assistant_only_loss"):
        t.notes.append(
            "Without assistant_only_loss, TRL trains all turns of messages; weft the assistant's "
            "only. Of prompt and completion both train the completion."
        )
    for name, key in (("dp_replicate_size", "dp_replicate"), ("dp_shard_size", "dp_shard")):
        if (value := t.take(f"parallelism_config.{name}")) is not None:
            t.set(f"parallel.{key}", value, f"parallelism_config.{name}")
    for name, key in (("tp", "tp"), ("cp", "cp"), ("sp", "cp")):
        value = t.take(f"parallelism_config.{name}_size")
        if value is not None and (name != "sp" or value > 1):
            t.set(f"parallel.{key}", value, f"parallelism_config.{name}_size")
            if name == "sp":
                t.set("parallel.cp_method", "ulysses", "parallelism_config.sp_size")
    _trainer_length(t, "num_train_epochs")
    _trainer_batch(t, "per_device_train_batch_size", 1)
    has_adapter = bool(t.take("use_peft", "lora_r" in v))
    _trainer_optimizer(t, "optim", "lr_scheduler_type", has_adapter)
    _trainer_precision(t)
    _trainer_saves(t)
    _trainer_lora(t, has_adapter)
    used = t.take("report_to", "")
    names = [used] if isinstance(used, str) else list(used)
    if "all" in names:
        names = ["tensorboard", "wandb"]
    t.set(
        "monitor.trackers",
        [n for n in names if n in ("tensorboard", "wandb", "mlflow")],
        "report_to",
    )


def _trl_preferences(t: Translation) -> None:
    """Set the objective of DPOTrainer, ORPOTrainer, CPOTrainer or KTOTrainer."""
    v = t.values
    t.set("data.format", "preferences", *PREFERENCE_NAMES)
    v.setdefault("beta", 0.1)
    given = v.get("loss_type") or ("kto" if t.given & {*KTO_NAMES} else "sigmoid")
    losses = given if isinstance(given, list) else [given]
    if losses == ["kto"]:
        t.take("loss_type")
        t.set("train.objective", "kto", "loss_type", *KTO_NAMES)
        t.set("data.format", "unpaired", "loss_type", *KTO_NAMES)
        t.notes.append(KTO_NOTE)
    elif v.keys() & {*KTO_NAMES}:
        rule, remedy = (
            "is a loss of KTOTrainer that weft does not have",
            "loss_type=kto is translated",
        )
        raise InvalidConfig([ConfigError("loss_type", given, rule, remedy)])
    elif "cpo_alpha" in v or "simpo_gamma" in v:
        if losses != ["simpo"]:
            rule = "is a loss of CPO, which weft does not have"
            remedy = "loss_type=simpo is translated; train.objective=module:function"
            raise InvalidConfig([ConfigError("loss_type", given, rule, remedy)])
        t.take("loss_type")
        t.set("train.objective", "simpo", "loss_type")
        t.set("train.sft_weight", t.take("cpo_alpha", 1.0), "cpo_alpha")
    elif "loss_type" not in v and ("padding_value" in v or "is_encoder_decoder" in v):
        t.set("train.objective", "orpo", "beta", note="names of ORPOConfig")
        t.notes.append("TRL's ORPO also trains the prompt of the chosen answer; weft its answer.")
    else:
        weights = t.take("loss_weights") or [1.0] * len(losses)
        by_loss = dict(zip(map(str, losses), weights, strict=False))
        sft_weight = by_loss.pop("sft", None)
        objective = {"sigmoid": "dpo", "ipo": "ipo"}.get("+".join(by_loss))
        if objective and [*by_loss.values()] == [1.0]:
            t.take("loss_type")
        t.set("train.objective", objective or "dpo", "loss_type", "beta")
        if sft_weight is not None:
            t.set("train.sft_weight", sft_weight, "loss_weights", "loss_type")
        if not t.given & {"loss_type", "loss_weights", "rpo_alpha", "precompute_ref_log_probs"}:
            t.notes.append(
                "DPOConfig, ORPOConfig and KTOConfig have the same names. The file is taken as "
                "DPO's: of a script with ORPOTrainer set train.objective = orpo, with KTOTrainer "
                "train.objective = kto and data.format = unpaired."
            )
    if smoothing := t.take("label_smoothing"):
        note = "conservative DPO; with sigmoid, new versions of TRL ignore it"
        t.set("train.preference_label_smoothing", smoothing, "label_smoothing", note=note)


def _axolotl_preferences(t: Translation, rl: str) -> None:
    """Set the objective of axolotl's ``rl``, whose defaults are TRL's."""
    t.set("data.format", "unpaired" if rl == "kto" else "preferences", "rl")
    t.set("train.objective", rl, "rl")
    if rl == "kto":
        t.notes.append(KTO_NOTE)
    if rl == "orpo":
        t.values["rl_beta"] = t.take("orpo_alpha") or t.values.get("rl_beta") or 0.1
        t.notes.append("TRL's ORPO also trains the prompt of the chosen answer; weft its answer.")
    if rl == "simpo":
        t.values["rl_beta"] = t.values.get("rl_beta") or 0.1
        weight = t.take("cpo_alpha")
        t.set("train.sft_weight", 1.0 if weight in (None, "") else weight, "cpo_alpha")


# ----------------------------------------------------------------------- LLaMA-Factory


# Notes on files of TRL that do not apply.
LLAMAFACTORY_OMITTED = ("The file names no", "The file trains", "DPOConfig, ORPOConfig")


def _from_llamafactory(t: Translation) -> None:
    """Translate to the names of transformers and TRL, and then as a file of theirs."""
    v = t.values
    stage, kind = t.take("stage", "sft"), t.take("finetuning_type", "lora")
    if stage not in ("pt", "sft", "dpo", "rm", "kto"):
        rule = "is a stage whose loss weft does not have"
        remedy = "pt, sft, dpo, rm and kto are read"
        raise InvalidConfig([ConfigError("stage", stage, rule, remedy)])
    loss = t.take("pref_loss", "sigmoid")
    if stage == "dpo" and loss not in ("sigmoid", "ipo", "orpo", "simpo"):
        t.lack("pref_loss", loss, f"train.objective: {', '.join(OBJECTIVE_NAMES)}")
    sft_weight = t.take("pref_ftx", 0.0)
    if stage == "kto":
        v["loss_type"] = "kto"
        if sft_weight:
            t.lack("pref_ftx", sft_weight, "train.objective=kto has no such term")
    elif stage == "dpo" and loss == "simpo":
        v |= {"loss_type": "simpo", "cpo_alpha": sft_weight}
    if kind not in ("lora", "full"):
        remedy = "lora or full; a table [[optim.groups]] with lr_mult = 0 freezes parameters"
        t.lack("finetuning_type", kind, remedy)
    bits = t.take("quantization_bit", "")
    if bits:
        v["load_in_4bit" if bits == 4 else "load_in_8bit"] = True
    if kind == "lora":
        rank = int(v.get("lora_r") or 8)
        defaults = {"lora_r": rank, "lora_alpha": 2 * rank, "lora_dropout": 0.0}
        for name, value in {**defaults, "lora_target": "all"}.items():
            v[name] = value if v.get(name, "") == "" else v[name]
        targets = v["lora_target"]
        targets = targets.split(",") if isinstance(targets, str) else list(targets)
        names = [str(target).strip() for target in targets]
        v["lora_target"] = "all-linear" if names == ["all"] else names
        v["use_peft"] = True
    if adapter := t.take("adapter_name_or_path", ""):
        t.set("lora.path", adapter, "adapter_name_or_path")
    for name in ("additional_target", "add_tokens", "add_special_tokens"):  # with commas
        if isinstance(text := v.get(name), str):
            v[name] = [part.strip() for part in text.split(",") if part.strip()]
    for name in ("add_tokens", "add_special_tokens"):
        if tokens := t.take(name):
            t.set(f"data.{name}", tokens, name)
    defaults = {"cutoff_len": 2048, "learning_rate": 5e-5, "val_size": 0.0}
    defaults |= {"pref_beta": 0.1} if stage in ("dpo", "kto") else {}
    for name, value in defaults.items():
        v[name] = value if v.get(name, "") == "" else v[name]
    v["gradient_checkpointing"] = not t.take("disable_gradient_checkpointing", False)
    v["packing"] = bool(v.get("packing") or t.take("neat_packing", False) or stage == "pt")
    if t.take("mask_history", False):
        t.set("data.train_turns", "last", "mask_history")
    thinking = t.take("enable_thinking", "")
    if thinking != "":
        t.set("data.chat_template_args", {"enable_thinking": thinking}, "enable_thinking")
    size = v["val_size"]
    _llamafactory_data(t, stage, size)
    if isinstance(size, int | float) and size >= 0.5:
        remedy = "data.validation_fraction is below 0.5; data.validation_path names a set"
        t.lack("val_size", t.take("val_size"), remedy)
        v["test_split_size"] = 0.05
    v["assistant_only_loss"] = True
    for name, other in t.tables["names"].items():
        if name in v:
            v[other] = v.pop(name)
            t.given |= {other} if name in t.given else set()
    v.setdefault("test_split_size", 0.0)
    if "data.validation_path" in t.recipe:
        t.take("test_split_size")
    given = t.given
    t.given = given | {"learning_rate"}  # not TRL's default
    data = {key: value for key, value in t.recipe.items() if key.startswith("data.")}
    sources = {key: t.sources[key] for key in data}
    notes = len(t.notes)
    _from_huggingface(t)
    if stage == "dpo":
        t.set("train.objective", "dpo" if loss == "sigmoid" else loss, "pref_loss")
        if sft_weight:
            t.set("train.sft_weight", sft_weight, "pref_ftx")
        if sft_weight or loss == "orpo":
            t.notes.append(
                "LLaMA-Factory averages the loss of the chosen answers over the tokens of each "
                "pair, and then over pairs; weft over the tokens of the global batch."
            )
    if stage in ("rm", "kto"):
        t.set("train.objective", "reward" if stage == "rm" else stage, "stage")
        t.set("data.overlong", "skip", note="weft compares no cut answers")
    # The file names data and their format itself.
    t.recipe |= data
    t.sources |= sources
    t.notes[notes:] = [
        note for note in t.notes[notes:] if not note.startswith(LLAMAFACTORY_OMITTED)
    ]
    if t.recipe.get("data.format") == "text":
        t.recipe.pop("data.overlong", None)
    t.given = given


def _llamafactory_data(t: Translation, stage: str, validation_size: Any) -> None:
    """Set the keys of the data, by the entries of ``dataset_info.json``."""
    names, others = (
        [name.strip() for name in value.split(",")] if isinstance(value, str) else list(value)
        for value in (t.take("dataset", ""), t.take("eval_dataset", ""))
    )
    names, others = list(filter(None, names)), list(filter(None, others))
    directory = _find_dataset_dir(t, str(t.take("dataset_dir", "data") or "data"))
    if not names:
        t.notes.append("The file names no data: set data.path.")
        return
    info = read_dataset_info(directory)
    entries = [convert_entry(info, name, directory, stage) for name in [*names, *others]]
    for entry in entries:
        t.unsupported |= entry.unsupported
    first, trained = entries[0], entries[: len(names)]
    t.set("data.format", first.format, "dataset", note=f"of {directory / INFO_FILE}")
    if first.format == "text":
        t.set("data.packing", "best_fit" if t.values.get("packing") else "documents", "packing")
    for key, attribute in (("fields", "fields"), ("roles", "roles"), ("text_field", "text_field")):
        values = [getattr(entry, attribute) for entry in entries]
        if any(value != values[0] for value in values):
            t.lack(f"columns of {', '.join(names)}", json.dumps(values), f"all have one data.{key}")
        if values[0]:
            t.set(f"data.{key}", values[0], "dataset")
    if any(entry.format != first.format for entry in entries):
        formats = ", ".join(dict.fromkeys(entry.format for entry in entries))
        t.lack("ranking of the data sets", formats, "all sources have one data.format")
    paths = {entry.path: 1.0 for entry in trained if entry.path}
    if len(paths) == 1:
        t.set("data.path", next(iter(paths)), "dataset")
    elif paths:
        probabilities = t.take("interleave_probs", "")
        parts = str(probabilities).split(",") if probabilities else []
        if len(parts) == len(paths):
            paths = dict(zip(paths, map(float, parts), strict=True))
        else:
            t.notes.append(
                "LLaMA-Factory concatenates its data sets. A weight of data.mixture is a share of "
                "the sequences: change them to the sizes of the sets."
            )
        t.set("data.mixture", paths, "dataset")
    if len(others) == 1 and entries[-1].path:
        t.set("data.validation_path", entries[-1].path, "eval_dataset")
    elif others:
        t.lack("eval_dataset", ", ".join(others), "data.validation_path is one file or directory")
    if any(entry.format == "chat" and "input" in entry.fields for entry in trained):
        t.notes.append("weft puts an empty line between instruction and input.")


def _find_dataset_dir(t: Translation, name: str) -> Path:
    """Return ``dataset_dir``, as seen from here, or from a directory above the file."""
    own = t.config.path.absolute().parents if t.config.path else []
    places = [expand_path(name), *(parent / name for parent in own)]
    return next((place for place in places if (place / INFO_FILE).is_file()), places[0]).absolute()


# ----------------------------------------------------------------------- axolotl


def _from_axolotl(t: Translation) -> None:
    v = t.values
    for name in ("rl", "process_reward_model"):
        if v.get(name) and v[name] not in OBJECTIVE_NAMES[1:]:
            rule = "names a loss that weft does not have"
            remedy = f"train.objective is {', '.join(OBJECTIVE_NAMES)}, or module:function"
            raise InvalidConfig([ConfigError(name, v[name], rule, remedy)])
    adapter = t.take("adapter", "")
    if adapter not in ("", "lora", "qlora", "none"):
        t.lack("adapter", adapter, "lora and qlora")
    _axolotl_data(t)
    for name, key in (("dp_shard_size", "dp_shard"), ("dp_replicate_size", "dp_replicate"),
                      ("tensor_parallel_size", "tp"), ("context_parallel_size", "cp"),
                      ("expert_parallel_size", "ep")):  # fmt: skip
        value = t.take(name)
        if isinstance(value, int) and value > 0:
            t.set(f"parallel.{key}", value, name)
    v.setdefault("bf16", "" if v.get("fp16") else "auto")
    _trainer_length(t, "num_epochs")
    many = bool(v.get("deepspeed") or any(n.startswith("fsdp") for n in v))
    _axolotl_batch(t)
    _trainer_batch(t, "micro_batch_size", DEVICES_PER_NODE if many else 1)
    _trainer_optimizer(t, "optimizer", "lr_scheduler", adapter in ("lora", "qlora"))
    _trainer_precision(t)
    _trainer_saves(t)
    t.values.setdefault(
        "lora_target_linear", adapter == "qlora" and not v.get("lora_target_modules")
    )
    if adapter == "qlora":
        t.values["load_in_4bit"] = True
    _trainer_lora(t, adapter in ("lora", "qlora"))
    if t.take("fp8", False):
        t.set("precision.float8", "tensorwise", "fp8")
    used = ["wandb"] * bool(v.get("wandb_project") or v.get("use_wandb"))
    used += ["mlflow"] * bool(v.get("use_mlflow")) + ["tensorboard"] * bool(
        v.get("use_tensorboard")
    )
    t.set("monitor.trackers", used, "wandb_project")
    fraction, tests = t.values.get("val_set_size"), t.values.get("test_datasets") or []
    if tests and len(tests) == 1 and isinstance(tests[0], dict):
        t.set("data.validation_path", _axolotl_path(t, t.take("test_datasets")[0]), "test_datasets")
    elif tests:
        remedy = "data.validation_path is one file, directory or pattern"
        t.lack("test_datasets", t.take("test_datasets"), remedy)
    elif not fraction and fraction != 0:
        _note_holdout(t)
    if tests or (fraction is not None and not 0 <= fraction < 0.5):
        value = t.take("val_set_size")
        if fraction:
            remedy = "data.validation_fraction is below 0.5, and not for data.validation_path"
            t.lack("val_set_size", value, remedy)
    for name in ("train_on_inputs",):
        if t.values.get(name):
            t.lack(name, t.take(name), "weft trains on the assistant's turns; data.format = text")
    for name in [
        n
        for n in ("lora_model_dir", "dataset_prepared_path", "chat_template_jinja")
        if not t.values.get(n)
    ]:
        t.take(name)
    if str(t.values.get("dataset_prepared_path", "")):
        t.skip("dataset_prepared_path", "prepared data are in data.cache_dir")
    plugins = t.values.get("plugins") or []
    foreign = [
        p
        for p in plugins
        if not any(k in str(p) for k in ("liger", "cut_cross_entropy", "kernels"))
    ]
    if foreign:
        t.lack("plugins", t.take("plugins"), "a function of your own: docs/reference/extending.md")


def _axolotl_batch(t: Translation) -> None:
    total = t.take("batch_size")
    micro = t.values.get("micro_batch_size") or 1
    if total and "gradient_accumulation_steps" not in t.given:
        t.values["gradient_accumulation_steps"] = max(1, total // micro)


def _axolotl_fields(entry: dict[str, Any]) -> dict[str, str]:
    """Return ``data.fields`` of a data set, where weft would not find its names."""
    kind = entry.get("type")
    options = {**entry, **(kind if isinstance(kind, dict) else {})}
    mappings = options.get("message_property_mappings")
    mappings = mappings if isinstance(mappings, dict) else {}
    given = {
        "messages": options.get("field_messages"),
        "role": mappings.get("role") or options.get("message_field_role"),
        "content": mappings.get("content") or options.get("message_field_content"),
        "prompt": options.get("field_instruction"),
        "response": options.get("field_output"),
        "input": options.get("field_input"),
        "system": options.get("field_system"),
        "tools": options.get("field_tools"),
    }
    known = FIELDS | MESSAGE_FIELDS
    # A pair of prompt and response has its own names: instruction and output.
    usual = {"prompt": ("instruction",), "response": ("output",)}
    return {
        name: value
        for name, value in given.items()
        if isinstance(value, str) and value not in (*known[name], *usual.get(name, ()))
    }


def _axolotl_path(t: Translation, entry: dict[str, Any]) -> str:
    """Return the path of a data set of one file, or on the Hub."""
    path, files = str(entry.get("path", "")), entry.get("data_files")
    if files and path.count("/"):
        t.lack("datasets.data_files", files, "data.path and data.mixture take paths of files")
    elif files:  # path: json, data_files: the files
        names = [files] if isinstance(files, str) else list(map(str, files))
        if len(names) > 1:
            t.lack("test_datasets.data_files", files, "data.validation_path is one path")
        return names[0]
    split = entry.get("split") or ""
    if "[" in str(split):
        t.lack("datasets.split", split, "cut the data first")
        split = ""
    return _hub_data(path, entry.get("name") or "", "" if split == "train" else split)


def _axolotl_data(t: Translation) -> None:
    rl = t.take("rl", "")
    if t.take("reward_model"):
        rl = "reward"
        t.skip("model_type", "the recipe trains a reward model")
    datasets = t.take("datasets", "") or []
    texts = t.take("pretraining_dataset", "") or []
    if isinstance(texts, str):
        texts = [{"path": texts}]
    entries = [d for d in [*datasets, *texts] if isinstance(d, dict)]
    paths: list[str] = []
    fields_of_rows: list[dict[str, str]] = []
    roles: dict[str, str] = {}
    for entry in entries:
        fields_of_rows.append(_axolotl_fields(entry))
        given = entry.get("roles")
        for role, names in given.items() if isinstance(given, dict) else ():
            roles |= dict.fromkeys(
                map(str, names if isinstance(names, list) else [names]), str(role)
            )
        for option, value in entry.items():
            if isinstance(value, dict) and option == "type":
                continue  # of fields
            default = t.tables["dataset_defaults"].get(option)
            known = option in t.tables["dataset_options"] or value in ("", None, default)
            if not known:
                remedy = "weft reads messages, prompt and response: see docs/fine-tuning.md"
                t.lack(f"datasets.{option}", value, remedy)
        files = entry.get("data_files")
        if isinstance(files, list) and not str(entry.get("path", "")).count("/"):
            paths += map(str, files)
        else:
            paths.append(_axolotl_path(t, entry))
    types = [e["type"] for e in entries if e.get("type") and not isinstance(e["type"], dict)]
    kinds, kind = set(map(str, types)), str(types[0]) if types else ""
    if any(fields_of_rows):
        if any(each != fields_of_rows[0] for each in fields_of_rows):
            rule = "all sources have one data.fields"
            t.lack("datasets.field_messages", json.dumps(fields_of_rows), rule)
        t.set("data.fields", fields_of_rows[0], "datasets.message_property_mappings")
    if roles := {name: role for name, role in roles.items() if ROLE_NAMES.get(name, name) != role}:
        t.set("data.roles", roles, "datasets.roles")
    if len(kinds) > 1 and any(k.startswith(("completion", "pretrain")) for k in kinds):
        t.lack("datasets.type", ", ".join(sorted(kinds)), "all sources have one data.format")
    fields = [entry.get("field") or entry.get("text_column") for entry in entries]
    if any(fields):
        t.set("data.text_field", next(filter(None, fields)), "datasets.field")
    if len(set(map(str, fields))) > 1:
        t.lack("datasets.field", ", ".join(map(str, fields)), "all sources have one text_field")
    if rl == "reward":
        t.set("data.format", "preferences", "reward_model")
        t.set("train.objective", "reward", "reward_model")
        if not t.values.get("center_rewards_coefficient"):
            t.take("center_rewards_coefficient")
    elif rl:
        _axolotl_preferences(t, rl)
    elif texts or kind.startswith(("completion", "pretrain")):
        t.set("data.format", "text", "datasets.type")
        t.set(
            "data.packing",
            "best_fit" if t.values.get("sample_packing") else "documents",
            "sample_packing",
        )
    else:
        t.set("data.format", "chat", "datasets.type")
    if len(set(paths)) > 1:
        mixture = dict.fromkeys(dict.fromkeys(paths), 1.0)
        t.set("data.mixture", mixture, "datasets")
        t.notes.append(
            "axolotl concatenates its data sets. A weight of data.mixture is a share of the "
            "sequences: change them to the sizes of the sets."
        )
    elif paths:
        t.set("data.path", paths[0], "datasets")
    else:
        t.notes.append("The file names no data: set data.path.")
    if (
        not rl
        and kind
        and not kind.startswith(("chat_template", "sharegpt", "alpaca", "completion", "pretrain"))
    ):
        t.notes.append(
            f"datasets.type is {kind}. weft reads messages, prompt and response, or instruction "
            "and output: see docs/fine-tuning.md."
        )
    if not rl and any(k.startswith("alpaca") for k in kinds):
        t.notes.append(
            "axolotl writes alpaca data as text with headings such as ### Instruction; weft as a "
            "conversation, by the chat template. data.chat_template takes another template."
        )
    if not texts and not t.values.get("sample_packing"):
        _note_packing(t)
    t.set("data.overlong", "skip", note="axolotl drops longer samples")


# ----------------------------------------------------------------------- DeepSpeed

# parallel.reshard_after_forward and parallel.gradient_sync by the stage of ZeRO.
ZERO = {1: ("never", "step"), 2: ("never", "microbatch"), 3: ("always", "microbatch")}


def _from_deepspeed(t: Translation) -> None:
    t.set("model.path", "required", note="the script names the model; set model.path")
    automatic = sorted(name for name, value in t.values.items() if value == AUTO)
    for name in automatic:
        t.skip(name, "auto: an argument of the Trainer")
    if automatic:
        t.notes.append(
            f'{len(automatic)} values are "auto", so they are arguments of the Trainer. Translate '
            "these, too (training_args.to_json_string()), and join the two recipes."
        )
    ranks = _deepspeed_batch(t)
    _deepspeed_layout(t, ranks)
    _deepspeed_precision(t)
    _deepspeed_optimizer(t)
    _deepspeed_schedule(t)
    memory = [n for n in t.given if n.startswith("activation_checkpointing.")]
    if any(t.values.get(name) not in (False, None, "") for name in memory):
        note = "the section is for a model that calls deepspeed.checkpointing"
        t.set("activation_checkpoint.mode", "full", *sorted(memory), note=note)
        if t.take("activation_checkpointing.cpu_checkpointing", False):
            name = "activation_checkpointing.cpu_checkpointing"
            t.set("activation_checkpoint.offload", True, name)
    used = [name for name in ("tensorboard", "wandb") if t.take(f"{name}.enabled", False) is True]
    if used:
        t.set("monitor.trackers", used, *(f"{name}.enabled" for name in used))
    t.notes.append("The file names neither data nor sequence length: set data.path, train.seq_len.")
    if "train.steps" not in t.recipe and "scheduler.params.total_num_steps" not in t.values:
        t.notes.append("The file names no number of steps: set train.steps or train.epochs.")


def _deepspeed_batch(t: Translation) -> int:
    """Set the batch and the cluster; return the number of ranks."""
    total, micro = t.take("train_batch_size"), t.take("train_micro_batch_size_per_gpu")
    steps = t.take("gradient_accumulation_steps")
    tp = int(t.values.get("tensor_parallel.autotp_size") or 1)
    cp = int(t.values.get("sequence_parallel_size") or 1)
    parts = max(1, tp) * max(1, cp)
    known = None
    if total and micro and steps and total % (micro * steps) == 0:
        known = int(total // (micro * steps)) * parts
    ranks, is_known = _ranks(t, parts, known, DEVICES_PER_NODE)
    if ranks % parts:
        rule = f"is not divisible by the file's other degrees, {parts}"
        raise InvalidConfig([ConfigError("--cluster", f"{ranks} GPUs", rule, "name a multiple")])
    _set_cluster(t, ranks, is_known)
    data_ranks = ranks // parts
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    if total:
        t.set("train.global_batch_size", int(total), "train_batch_size")
    elif micro:
        note = f"{int(micro)} x {int(steps or 1)} x {data_ranks} data-parallel ranks"
        total = int(micro) * int(steps or 1) * data_ranks
        t.set("train.global_batch_size", total, *names, note=note)
        if not is_known:
            _note_assumed_ranks(t, ranks, total, note, " x ".join(names))
    elif steps:
        t.lack(names[1], steps, "train.global_batch_size, in sequences of all ranks")
    if total and steps and not micro and is_known:
        micro = total // (steps * data_ranks)
    if micro:
        t.set("train.microbatch_size", max(1, int(micro)), *names)
    return ranks


def _deepspeed_layout(t: Translation, ranks: int) -> None:
    stage = int(t.take("zero_optimization.stage", 0))
    for name in ("tensor_parallel.autotp_size", "sequence_parallel_size"):
        if t.values.get(name, 1) < 2:
            t.skip(name, "it is off")
    tp = int(t.values.get("tensor_parallel.autotp_size", 1))
    cp = int(t.values.get("sequence_parallel_size", 1))
    if cp > 1:
        t.set("parallel.cp_method", "ulysses", "sequence_parallel_size")
    shards = int(t.take("zero_optimization.mics_shard_size", -1))
    inner = int(t.take("zero_optimization.zero_hpz_partition_size", 1))
    group = ranks // tp
    name = "zero_optimization.stage"
    if stage == 0 and group > 1:
        t.set("parallel.dp_replicate", group // cp, name, note="no sharding")
        t.set("parallel.dp_shard", 1, name)
    elif shards > 0 and (shards % cp or group % shards):
        t.lack("zero_optimization.mics_shard_size", shards, "parallel.dp_shard divides the ranks")
    elif shards > 0:
        t.set("parallel.dp_shard", shards // cp, "zero_optimization.mics_shard_size")
        note = f"{group} ranks / {shards}"
        t.set("parallel.dp_replicate", group // shards, note=note)
    if stage in ZERO and group > 1:
        reshard, sync = ZERO[stage]
        t.set("parallel.reshard_after_forward", reshard, name)
        t.set("parallel.gradient_sync", sync, name)
        if inner > 1 and stage == 3:
            name = "zero_optimization.zero_hpz_partition_size"
            t.set("parallel.reshard_after_forward", inner, name)
    elif stage and stage not in ZERO:
        t.lack(name, stage, "0, 1, 2 or 3")
    devices = {
        part: t.take(f"zero_optimization.offload_{part}.device", "none")
        for part in ("param", "optimizer")
    }
    if t.take("zero_optimization.cpu_offload", False) is True:
        devices["optimizer"] = "cpu"
    for part, device in devices.items():
        given = f"zero_optimization.offload_{part}.device"
        if device == "cpu":
            note = "parameters, gradients and optimizer state"
            t.set("parallel.cpu_offload", True, given, note=note)
        elif device not in ("none", ""):
            t.lack(given, device, "parallel.cpu_offload keeps the state in host memory")


def _deepspeed_precision(t: Translation) -> None:
    enabled = {
        name: t.take(f"{name}.enabled", False) is True
        for name in ("bf16", "torch_autocast", "amp", "fp16")
    }
    used = [name for name, on in enabled.items() if on]
    if used:
        t.set("precision.compute_dtype", "bfloat16", f"{used[0]}.enabled")
        if used[0] in ("fp16", "amp"):
            t.lack(f"{used[0]}.enabled", True, load_peer_answers()["fp16"])
    elif AUTO not in (t.config.values.get("bf16.enabled"), t.config.values.get("fp16.enabled")):
        t.set("precision.compute_dtype", "float32", note="neither bf16 nor fp16 is enabled")
    if not enabled["fp16"]:
        for name in [n for n in t.values if n.startswith("fp16.")]:
            t.skip(name, "fp16 is off")
    else:
        for name in [n for n in t.values if n.startswith("fp16.")]:
            t.skip(name, "bfloat16 needs no loss scale")
    for name in [n for n in t.values if n.startswith("amp.")]:
        t.skip(name, "see precision.compute_dtype")


def _deepspeed_optimizer(t: Translation) -> None:
    kind = str(t.take("optimizer.type", ""))
    prefix = "optimizer.params"
    if not kind:
        t.notes.append("The script has the optimizer: set optim.lr, optim.weight_decay, and so on.")
        return
    name = kind.lower()
    is_plain = t.take(f"{prefix}.adam_w_mode", True) is False
    if name == "muon":
        t.set("optim.name", "muon", "optimizer.type")
    elif name not in ("adam", "adamw") or is_plain:
        remedy = "optim.name = adamw (decoupled weight decay), muon, soap, or module:function"
        t.lack("optimizer.type", f"{kind}, adam_w_mode=false" if is_plain else kind, remedy)
    else:
        t.set("optim.name", "adamw", "optimizer.type")
    betas = t.take(f"{prefix}.betas", [0.9, 0.999])
    if t.config.values.get(f"{prefix}.betas") != AUTO:
        if isinstance(betas, list) and len(betas) == 2:
            t.set("optim.beta1", betas[0], f"{prefix}.betas")
            t.set("optim.beta2", betas[1], f"{prefix}.betas")
        else:
            t.lack(f"{prefix}.betas", betas, "optim.beta1 and optim.beta2")
    for last, value in (("lr", 1e-3), ("weight_decay", 0.0)):
        if f"{prefix}.{last}" not in t.config.values:
            t.set(f"optim.{last}", value)
    t.notes.append(
        "Which parameters have weight decay is in the script. In weft matrices have it; a table "
        "[[optim.groups]] adds embeddings and norms."
    )


def _deepspeed_schedule(t: Translation) -> None:
    prefix = "scheduler.params"
    kind = str(t.take("scheduler.type", ""))
    if not kind:
        if not any(name.startswith("scheduler") for name in t.config.values):
            t.notes.append("The script has the schedule: set optim.schedule, optim.warmup_steps.")
        return
    forms = {"WarmupLR": "wsd", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    if kind not in forms:
        remedy = "optim.schedule = linear, cosine, wsd, or module:function"
        t.lack("scheduler.type", kind, remedy)
        return
    t.set("optim.schedule", forms[kind], "scheduler.type")
    if kind == "WarmupLR":
        t.set("optim.decay_fraction", 0.0, "scheduler.type", note="constant after warm-up")
    ratio = t.take(f"{prefix}.cos_min_ratio", 0.0001) if kind == "WarmupCosineLR" else 0.0
    if kind != "WarmupLR":
        t.set("optim.min_lr_ratio", ratio, f"{prefix}.cos_min_ratio")
    auto = {name for name, value in t.config.values.items() if value == AUTO}
    warmup = t.take(f"{prefix}.warmup_num_steps", 1000)
    if f"{prefix}.warmup_num_steps" not in auto:
        t.set("optim.warmup_steps", int(warmup), f"{prefix}.warmup_num_steps")
    peak = t.take(f"{prefix}.warmup_max_lr", 1e-3)
    if kind != "WarmupCosineLR" and f"{prefix}.warmup_max_lr" not in auto:
        t.skip("optimizer.params.lr", "the schedule's warmup_max_lr replaces it")
        t.set("optim.lr", peak, f"{prefix}.warmup_max_lr")
    form = t.take(f"{prefix}.warmup_type", "log")
    if form != "linear" and warmup and f"{prefix}.warmup_type" not in auto:
        t.lack(f"{prefix}.warmup_type", form, "warm-up of weft is linear")
    for last in ("warmup_min_lr", "warmup_min_ratio"):
        value = t.take(f"{prefix}.{last}", 0)
        if value:
            remedy = "warm-up begins at optim.lr / optim.warmup_steps"
            t.lack(f"{prefix}.{last}", value, remedy)


# ----------------------------------------------------------------------- SageMaker SMP


def _from_smp(t: Translation) -> None:
    """Translate the parameters of the model parallelism library, version 2."""
    t.set("model.path", "required", note="the script names the model; set model.path")
    tp = int(t.values.get("tensor_parallel_degree", 1))
    cp = int(t.values.get("context_parallel_degree", 1))
    shards = int(t.take("hybrid_shard_degree", 0))
    ranks, is_known = _ranks(t, tp * max(cp, shards), None, DEVICES_PER_NODE)
    parts = tp * (shards or cp)
    if ranks % parts and is_known:
        rule = f"is not divisible by the file's degrees, {parts}"
        raise InvalidConfig([ConfigError("--cluster", f"{ranks} GPUs", rule, "name a multiple")])
    ranks = parts * max(1, ranks // parts)
    if shards % cp:
        t.lack("hybrid_shard_degree", shards, "a multiple of context_parallel_degree")
    elif shards:
        # Both shard the parameters over the context-parallel ranks, too.
        note = f"{shards} / context_parallel_degree" if cp > 1 else ""
        t.set("parallel.dp_shard", shards // cp, "hybrid_shard_degree", note=note)
        note = f"{ranks} GPUs / {parts} of a replica"
        t.set("parallel.dp_replicate", ranks // parts, note=note)
    else:
        t.set("parallel.dp_shard", "auto", "hybrid_shard_degree", note="FULL_SHARD: all ranks")
    _set_cluster(t, ranks, is_known)
    if not is_known:
        t.notes.append(
            f"The file does not name the number of GPUs. The recipe is for {ranks}. Translate "
            f"again with --cluster NODESxGPUSx{DEVICE}."
        )
    horizon = t.take("activation_loading_horizon")
    if t.values.get("sm_activation_offloading") is True:
        note = "SMP offloads the inputs of checkpointed layers"
        t.set("activation_checkpoint.mode", "full", "sm_activation_offloading", note=note)
        if horizon:
            note = "in weft without the layer that computes"
            value = max(1, int(horizon) - 1)
            name = "activation_loading_horizon"
            t.set("activation_checkpoint.offload_prefetch", value, name, note=note)
    elif horizon:
        t.ignored["activation_loading_horizon"] = "offloading is off"
    t.notes.append(
        "SMP's parameters are the layout only. Batch, model, data, optimizer, precision and "
        "sharding_strategy are in the script: set train.global_batch_size, data.path and optim.lr."
    )


# ----------------------------------------------------------------------- config.json


def _from_model(t: Translation) -> None:
    """Translate the ``config.json`` of a model to section ``model``."""
    from weft.models import FAMILIES
    from weft.models.hf_mapping import detect_family, from_hf_config, text_config

    tree = text_config(t.config.values, FAMILIES)
    kind, errors = detect_family(tree, FAMILIES)
    if kind is not None:
        config, errors = from_hf_config(FAMILIES[kind], tree)
    if kind is None or errors:
        raise InvalidConfig(errors)
    t.values.clear()
    preset = next(iter(FAMILIES[kind].presets))
    t.set("model.kind", kind, "model_type")
    t.set("model.preset", preset, note="every size is set below")
    given = FAMILIES[kind].presets[preset].model_dump(mode="json")
    for name, value in config.model_dump(mode="json").items():
        if value != given[name]:
            t.set(f"model.{name}", value, "config.json")
    t.notes.append("A config.json has no training keys; set data.path, train.steps and optim.lr.")


PROGRAMS: dict[str, Callable[[Translation], None]] = {
    "torchtitan": _from_torchtitan,
    "megatron": _from_megatron,
    "huggingface": _from_huggingface,
    "axolotl": _from_axolotl,
    "llamafactory": _from_llamafactory,
    "deepspeed": _from_deepspeed,
    "smp": _from_smp,
    "model": _from_model,
}


# ----------------------------------------------------------------------- output


def write_recipe(t: Translation, name: str) -> str:
    """Return the recipe as TOML; comments say what was ignored and what weft lacks."""
    lines = [f"# Translated by weft recipe from {_one_line(name)} ({t.config.title}).", "#"]
    for title, entries in (
        ("Check these points", [*t.notes]),
        ("Not translated", [f"{k}: {v}" for k, v in t.unsupported.items()]),
        ("Ignored", [f"{k}: {v}" for k, v in t.ignored.items()]),
    ):
        if entries:
            lines += [f"# {title}:", *(f"#   {_one_line(entry)}" for entry in entries), "#"]
    lines.pop()
    for section in SECTIONS:
        keys = [key for key in t.recipe if key.partition(".")[0] == section]
        if keys:
            lines += ["", f"[{section}]"]
        # A table inside a section must come last.
        for key in sorted(keys, key=lambda key: isinstance(t.recipe[key], dict)):
            last, value = key.partition(".")[2], t.recipe[key]
            if isinstance(value, dict):
                inner = ", ".join(f"{_toml({k: v})}" for k, v in value.items())
                text = f"{last} = {{ {inner} }}"
            else:
                text = _toml({last: value})
            lines.append(f"{text} # {_one_line(t.sources.get(key, ''))}")
    return "\n".join(lines) + "\n"


def _toml(entry: Json) -> str:
    """Return an entry in one line."""
    (name, value), *_ = entry.items()
    key = tomli_w.dumps({name: 0}).rpartition(" = ")[0]
    items = value if isinstance(value, list | tuple) else [value]
    texts = [
        f"{{ {', '.join(_toml({k: v}) for k, v in item.items())} }}"
        if isinstance(item, dict)
        else tomli_w.dumps({"x": item}).strip().partition(" = ")[2]
        for item in items
    ]
    is_list = isinstance(value, list | tuple)
    return f"{key} = [{', '.join(texts)}]" if is_list else f"{key} = {texts[0]}"


def _one_line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def summarize(t: Translation) -> Iterator[str]:
    """Yield lines for the terminal: the counts, and everything that needs attention."""
    counts = f"{len(t.recipe)} keys set, {len(t.ignored)} names ignored"
    yield f"{t.config.title}: {counts}, {len(t.unsupported)} not translated"
    for entry in t.notes:
        yield f"  check: {_one_line(entry)}"
    for name, remedy in t.unsupported.items():
        yield f"  not translated: {_one_line(name)}: {_one_line(remedy)}"


def parse_cluster_size(text: str) -> tuple[int, int, str]:
    """Return nodes, devices per node and device of NODESxDEVICESxNAME.

    Raises:
        InvalidConfig: the text has another form, or names an unknown device.
    """
    from weft.planning.devices import parse_cluster

    parse_cluster(text, "--cluster")
    parts = text.split("x", 2)
    if len(parts) == 2 or not parts[1].isdecimal():
        parts = ["1", parts[0], text.partition("x")[2]]
    if not (parts[0].isdecimal() and parts[1].isdecimal()):
        rule = "must be NODESxDEVICESxNAME, such as 8x8xH100"
        raise InvalidConfig([ConfigError("--cluster", text or MISSING, rule)])
    return int(parts[0]), int(parts[1]), parts[2]
