"""Job: the user's choices for a run, and nothing else.

A Job is a tree of frozen sections.  `weft.config.reader` reads it from a TOML recipe and from
command-line overrides, and a run writes it back as ``job.toml``.  A Job holds nothing that can be
derived: degrees, batch arithmetic and sizes are fields of the Plan, which `weft.planning.resolve`
makes from a Job.  No key is ever null, because TOML cannot write null.

This module does not import torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field

from weft.config.accelerators import GPU
from weft.config.axes import AXES
from weft.config.errors import MISSING
from weft.config.files import expand_path
from weft.config.keys import KeyFacts, Section, key

Auto = Literal["auto"]


# Bounded, so that no arithmetic on them takes long.
MOST = 2**31 - 1


MIN_VOCAB_SIZE = 257  # of a tokenizer that weft trains: every byte, and the end of a document


Positive = Annotated[int, Field(ge=1, le=MOST)]
MAX_SEQ_LEN = 1 << 24  # tokens; far above published models, so that a mistyped number is an error


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
    """Parse steps: ``"7,20-30"`` is step 7 and steps 20 to 30; "" is none.

    Raises:
        ValueError: the text has another form.
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


class RunSection(Section):
    """Directory, nodes, processes and devices of a run."""

    facts = KeyFacts(on_resume="free", tries={})

    dir: Text = key(
        "auto",
        "run directory; auto: runs/<recipe>, plus a short hash if overrides change what the run "
        "learns, and for a recipe of your own",
    )
    nproc_per_node: Positive | Auto = key(
        "auto",
        "processes per node; auto: the largest number that divides train.global_batch_size, up to "
        "the number of GPUs; on a CPU up to the number of cores, and up to 4",
        needs="sets_ranks_per_node",
    )
    nodes: Positive | Text = key(
        "auto",
        "number of nodes, or MIN:MAX for an elastic run; auto: from the environment (torchrun, "
        "Slurm, ...), else 1",
        needs="sets_nodes",
    )
    rendezvous: Text = key(
        "auto",
        "rendezvous endpoint HOST:PORT of a run on several nodes; auto: from the environment",
        needs="has_several_nodes",
    )
    device: Text = key(
        "auto",
        f"device type: cpu, or PyTorch's name of an accelerator, such as {GPU}, xpu or neuron; "
        "auto: the accelerator of this machine if it has one",
    )
    cluster: Text = key(
        "local",
        "cluster that weft plan plans for, as NODESxDEVICESxNAME (64x8xH100); local: this machine",
    )

    @property
    def nodes_text(self) -> str:
        """``nodes`` as text: auto, a number or MIN:MAX."""
        return str(self.nodes)


# Keys of a model that may be set beside ``model.path``: no weight depends on them.
POSITION_KEYS = (
    "max_seq_len",
    "rope_theta",
    "rope_local_theta",
    "rope_scaling",
    "rope_factor",
    "rope_low_freq_factor",
    "rope_high_freq_factor",
    "rope_original_context",
    "rope_beta_fast",
    "rope_beta_slow",
    "rope_magnitude",
)

# Keys of a model that an import may change: positions, and the rows of embedding and head.
CHANGEABLE_KEYS = (*POSITION_KEYS, "vocab_size")


class ModelSection(Section):
    """Model family and size; more keys override fields of the configuration."""

    facts = KeyFacts(on_resume="weights")

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    path: Name = key(
        "",
        "model to train further, in place of all other model keys but vocab_size and those of "
        "positions (max_seq_len, rope_theta, ...): a Hugging Face directory, also at s3://, "
        "org/name on the Hub, or a weft run; its weights are imported at the first start",
        tries=(),
    )
    config: Name = key(
        "",
        "config.json of model.path, for weft launch and weft plan on a machine that does not have "
        "model.path; the nodes read model.path itself",
        tries=(),
    )
    kind: Text = key("llama", "model family, or module:attribute of your own")
    preset: Name = key("toy", "named size of the family", tries=())

    @property
    def full_name(self) -> str:
        """The family and the preset, such as ``llama-toy``."""
        return f"{self.kind}-{self.preset}"

    def overrides(self) -> dict[str, Any]:
        """Return the keys that are fields of the family's configuration."""
        return dict(self.__pydantic_extra__ or {})


class DataSection(Section):
    """The training data and how it becomes sequences of tokens; see docs/data.md."""

    facts = KeyFacts(tries={}, other_loss=True)

    path: Text = key(
        "python-stdlib",
        "training data: a file, directory or glob of text, JSONL, Parquet or Arrow, also at "
        "s3://; hf://org/name[:config][@split]; module:function that yields documents; a prepared "
        "token store; or python-stdlib",
    )
    mixture: dict[Text, Annotated[float, Field(gt=0)]] = key(
        {},
        "weighted data sources, in place of data.path; a weight is the source's share of the "
        'sequences: {"web/" = 0.7, "code/" = 0.3}, or web/=0.7,code/=0.3 on the command line',
    )
    text_field: Text = key(
        "text",
        "field or column that holds the text of a document; a.b: the field b of the object or "
        "struct a",
        needs="data.format=text",
    )
    format: Literal["text", "chat", "preferences", "unpaired"] = key(
        "text",
        "content of data.path. text: documents; chat: JSONL lines with messages, or with prompt "
        "and response; preferences: JSONL lines with prompt, chosen and rejected, for "
        "train.objective=dpo or reward; unpaired: JSONL lines with prompt, completion and label, "
        "for train.objective=kto",
        on_resume="fixed",
        tries={"chat": "", "preferences": "train.objective=dpo", "unpaired": "train.objective=kto"},
    )
    tokenizer: Text = key(
        "train", "path of a tokenizer.json, also at s3://; train: train one on the data"
    )
    add_tokens: tuple[Text, ...] = key(
        (),
        "tokens to add to the tokenizer, found in any text; a model of model.path gets rows for "
        "them, see docs/fine-tuning.md",
        on_resume="weights",
    )
    add_special_tokens: tuple[Text, ...] = key(
        (),
        "the same for special tokens, which only a chat template writes: <|im_start|>,<|im_end|>",
        needs="data.format=chat|preferences|unpaired",
        on_resume="weights",
    )
    start_token: Auto | bool = key(
        "auto",
        "start token before each document of text, such as <s>. auto: as the tokenizer adds it; "
        "true: always, the one that the tokenizer's files name; false: never",
        needs="data.format=text",
        tries=("true", "false"),
    )
    chat_template: Text = key(
        "auto",
        "Jinja file that formats a conversation, also at s3://; auto: chat_template.jinja or "
        "tokenizer_config.json beside the tokenizer",
        needs="data.format=chat|preferences|unpaired",
    )
    chat_template_args: dict[Text, Any] = key(
        {},
        "other variables of the chat template, also in weft generate and weft chat: "
        "enable_thinking=false",
        needs="data.format=chat|preferences|unpaired",
    )
    train_turns: Literal["all", "last"] = key(
        "all",
        "turns of the assistant that are trained. all: each; last: only the last one of a "
        "conversation",
        needs="data.format=chat|preferences|unpaired",
    )
    train_empty_reasoning: bool = key(
        True,
        "train the empty reasoning, such as <think></think>, that a template writes before an "
        "answer without one; false: it has no loss",
        needs="data.format=chat|preferences|unpaired",
    )
    fields: dict[Text, Text] = key(
        {},
        "names of the fields of conversations, where rows have others: messages=dialog, "
        "prompt=q,response=a, role=speaker,content=text; a.b: the field b of the object a",
        needs="data.format=chat|preferences|unpaired",
    )
    roles: dict[Text, Literal["system", "developer", "user", "assistant", "tool"]] = key(
        {},
        "roles of messages, where rows have others than ShareGPT's: client=user,agent=assistant",
        needs="data.format=chat|preferences|unpaired",
    )
    vocab_size: Annotated[int, Field(ge=MIN_VOCAB_SIZE, le=MOST)] = key(
        4096,
        "vocabulary size of the tokenizer that data.tokenizer=train trains",
        needs="data.tokenizer=train",
    )
    validation_path: Name = key(
        "",
        "validation set, named as data.path names the training data, with the same format, fields, "
        "tokenizer and template; all of data.path or data.mixture is then training data. empty: a "
        "part of the data, data.validation_fraction",
    )
    validation_fraction: Annotated[float, Field(ge=0, lt=0.5)] = key(
        0.05,
        "fraction of the data in the validation set; 0: no validation set and no evaluation",
        needs="data.validation_path=",
    )
    packing: Literal["windows", "documents", "best_fit"] = key(
        "windows",
        "how text fills sequences. windows: slices of the token stream, which may hold several "
        "documents; documents: the same slices, with attention and loss only within a document; "
        "best_fit: like documents, but only a document longer than a sequence is split. "
        "Conversations always use best_fit and are never split: see data.overlong",
        needs="data.format=text",
        on_resume="fixed",
        tries=("documents", "best_fit"),
    )
    shuffle_span_gib: Annotated[float, Field(ge=0)] = key(
        0.0,
        "GiB of tokens of all nodes together within which the sequences of text are shuffled, for "
        "a store in a bucket that exceeds data.node_cache_gib; 0: all tokens",
        needs="data.format=text and data.packing!=best_fit",
        on_resume="fixed",
    )
    overlong: Literal["error", "skip", "truncate"] = key(
        "error",
        "action on a conversation longer than train.seq_len. error: stop; skip: drop it; "
        "truncate: cut its end",
        needs="data.format=chat|preferences|unpaired",
        on_resume="fixed",
    )
    invalid_utf8: Literal["error", "replace", "skip"] = key(
        "error",
        "action on a file or document that is not UTF-8. error: stop; replace: replace the bad "
        "bytes; skip: drop it",
    )
    cache_dir: Text = key(
        "auto",
        "directory of prepared data, or s3://bucket/prefix for nodes without a shared disk; auto: "
        "the user's cache directory",
        on_resume="free",
        other_loss=False,
    )
    node_cache_dir: Text = key(
        "auto",
        "directory of this node for the parts that it reads of a token store in a bucket; auto: "
        "the user's cache directory",
        needs="reads_bucket",
        on_resume="free",
        other_loss=False,
    )
    node_cache_gib: Annotated[float, Field(gt=0)] | Auto = key(
        "auto",
        "limit of data.node_cache_dir, in GiB; the parts that were not used for longest are "
        "deleted; auto: 80% of the free space",
        needs="reads_bucket",
        on_resume="free",
        other_loss=False,
    )

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources of the training data: those of the mixture, or the one path."""
        return tuple(self.mixture) or (self.path,)

    @property
    def has_validation(self) -> bool:
        """Return True if there is a validation set."""
        return bool(self.validation_path) or self.validation_fraction > 0

    @property
    def for_training(self) -> DataSection:
        """The section of the training data alone, where validation data are named apart."""
        update = {"validation_path": "", "validation_fraction": 0.0}
        return self.model_copy(update=update) if self.validation_path else self

    def for_validation(self, tokenizer: str) -> DataSection:
        """Return the section of ``validation_path``, with a tokenizer."""
        update = {"path": self.validation_path, "mixture": {}, "tokenizer": tokenizer}
        return self.for_training.model_copy(update=update)

    @property
    def weights(self) -> dict[str, float]:
        """The weights of the sources of the training data."""
        return self.mixture or {self.path: 1.0}

    @property
    def is_mixture(self) -> bool:
        """Return True if the data are a mixture, which replaces ``data.path``."""
        return bool(self.mixture)

    @property
    def is_text(self) -> bool:
        """Return True if the data are documents, not conversations."""
        return self.format == "text"

    @property
    def compares_answers(self) -> bool:
        """Return True if the data are answers that an objective compares as a whole."""
        return self.format in ("preferences", "unpaired")

    @property
    def has_preferences(self) -> bool:
        """Return True if the data are pairs of a chosen and a rejected answer."""
        return self.format == "preferences"

    @property
    def trains_tokenizer(self) -> bool:
        """Return True if weft trains a tokenizer on the data."""
        return self.tokenizer == "train"

    @property
    def tokenizer_path(self) -> Path:
        """The file of a tokenizer that is not trained."""
        return expand_path(self.tokenizer)

    @property
    def keeps_documents(self) -> bool:
        """Return True if a sequence may hold several documents that do not see each other."""
        return not self.is_text or self.packing != "windows"


Above0 = Annotated[float, Field(gt=0)]


PAIR_OBJECTIVES = ("dpo", "ipo", "orpo", "simpo")
REFERENCE_OBJECTIVES = ("dpo", "ipo", "kto")  # they need log-probabilities of the initial model


class TrainSection(Section):
    """The length of the run, its batches and its objective."""

    steps: Positive | Auto = key(
        "auto",
        "optimizer steps of the whole run; auto: those of train.epochs, or 1000",
        on_resume="free",
        tries=(),
        same_speed=True,
    )
    epochs: Annotated[float, Field(ge=0, le=MOST)] = key(
        0.0,
        "passes over the training data, in place of train.steps; 0: train.steps decides",
        on_resume="free",
        tries=(),
        same_speed=True,
    )
    seed: Seed = key(
        0, "seed of the initial weights and of the data order", on_resume="fixed", same_speed=True
    )
    seq_len: Annotated[int, Field(ge=1, le=MAX_SEQ_LEN)] = key(
        1024, "sequence length, in tokens", on_resume="fixed"
    )
    global_batch_size: Positive = key(64, "sequences per optimizer step, over all ranks")
    microbatch_size: Positive | Auto = key(
        "auto",
        "sequences per rank and forward pass; auto: the rank's share of the global batch; in a "
        "pipeline the largest size with at least 4 x parallel.pp microbatches",
        on_resume="layout",
    )
    world_size_invariant: bool = key(
        False,
        "add gradients sequence by sequence in the order of the global batch, so that any number "
        "of data-parallel ranks computes bitwise the same weights; slower, and dp_shard and cp "
        "shard no weights",
    )
    objective: Text = key(
        "next_token",
        "loss function: next_token; dpo, ipo, orpo, simpo or reward (with data.format="
        "preferences); kto (with data.format=unpaired); or module:function",
        on_resume="fixed",
        tries={
            "dpo": "data.format=preferences",
            "ipo": "data.format=preferences",
            "orpo": "data.format=preferences",
            "simpo": "data.format=preferences",
            "reward": "data.format=preferences",
            "kto": "data.format=unpaired",
        },
        other_loss=True,
    )
    preference_beta: Annotated[float, Field(gt=0)] | Auto = key(
        "auto",
        "dpo, ipo, kto: strength of the penalty for leaving the reference model; orpo: weight of "
        "the odds ratio; simpo: scale of the reward; auto: 0.1, simpo 2",
        needs="train.objective=dpo|ipo|orpo|simpo|kto|module:function",
        tries=("0.05", "0.5"),
        other_loss=True,
        same_speed=True,
    )
    preference_label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = key(
        0.0,
        "dpo, simpo: share of the pairs that count as labeled the wrong way round",
        needs="train.objective=dpo|simpo|module:function",
        tries=("0.1", "0.3"),
        other_loss=True,
        same_speed=True,
    )
    sft_weight: Annotated[float, Field(ge=0)] = key(
        0.0,
        "dpo, ipo, simpo: weight of the mean loss of the chosen answers' tokens, which is added; "
        "orpo has it with weight 1",
        needs="train.objective=dpo|ipo|simpo|module:function",
        tries=("0.3", "1"),
        other_loss=True,
        same_speed=True,
    )
    simpo_gamma: Annotated[float, Field(ge=0)] = key(
        0.5,
        "simpo: margin of the reward by which a chosen answer has to be better",
        needs="train.objective=simpo|module:function",
        other_loss=True,
        same_speed=True,
    )
    reward_center_coef: Annotated[float, Field(ge=0)] = key(
        0.0,
        "reward: coefficient of the square of the sum of a pair's scores; 0: no such term",
        needs="train.objective=reward|module:function",
        tries=("0.1",),
        other_loss=True,
        same_speed=True,
    )
    desirable_weight: Above0 = key(
        1.0,
        "kto: factor of the losses of good answers",
        needs="train.objective=kto|module:function",
        other_loss=True,
        same_speed=True,
    )
    undesirable_weight: Above0 = key(
        1.0,
        "kto: factor of the losses of bad answers",
        needs="train.objective=kto|module:function",
        other_loss=True,
        same_speed=True,
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = key(
        0.0,
        "next_token: part of the target's probability that is spread over the vocabulary, in "
        "training; losses of the validation set have none",
    )
    z_loss_coef: Annotated[float, Field(ge=0)] = key(
        0.0,
        "next_token: factor of the mean over targets of (log Z)^2, Z the sum of exponentials of "
        "the logits, which keeps logits small (PaLM: 1e-4); it adds a gradient, and is not part of "
        "the logged loss; 0: none",
        same_speed=True,
        tries=("0.01",),
    )
    neftune_alpha: Annotated[float, Field(ge=0)] = key(
        0.0,
        "scale of uniform noise of the embeddings in training (NEFTune): alpha / sqrt(tokens of "
        "the document x model.dim); 0: none",
    )
    mtp_weight: Annotated[float, Field(gt=0)] = key(
        0.3,
        "weight of the mean loss of the layers of multi-token prediction (model.mtp_layers)",
        needs="model.mtp_layers>0",
        same_speed=True,
    )
    eval_interval: NonNegative = key(
        0,
        "steps between evaluations; 0: only at the end",
        needs="has_validation",
        on_resume="free",
        tries=(),
    )
    eval_sequences: Positive = key(
        64,
        "validation sequences per evaluation",
        needs="has_validation",
        on_resume="free",
        tries=(),
    )
    early_stopping: NonNegative = key(
        0,
        "evaluations in a row without an improvement of the validation metric (checkpoint.best; "
        "without it the validation loss) after which the run ends; 0: train all steps",
        needs="train.eval_interval>0 and has_validation",
        on_resume="free",
        tries=(),
        same_speed=True,
    )
    early_stopping_delta: Annotated[float, Field(ge=0)] = key(
        0.0,
        "early_stopping: smallest change of the metric that counts as an improvement",
        needs="train.early_stopping>0",
        on_resume="free",
        tries=(),
        same_speed=True,
    )

    @property
    def beta(self) -> float:
        """``preference_beta``, or the usual value of the objective."""
        if self.preference_beta != "auto":
            return self.preference_beta
        return 2.0 if self.objective == "simpo" else 0.1

    @property
    def compares_pairs(self) -> bool:
        """Return True if the objective needs pairs of preferences."""
        return self.objective in (*PAIR_OBJECTIVES, "reward")

    @property
    def known_steps(self) -> int:
        """``steps``; 0 if ``epochs`` and the data decide."""
        return (0 if self.epochs else 1000) if self.steps == "auto" else self.steps


# Keys of [lora] that an adapter of ``lora.path`` decides.
ADAPTER_KEYS = ("rank", "alpha", "rank_stabilized", "targets", "dora")


class LoraSection(Section):
    """Low-rank adapters beside frozen weights (LoRA, QLoRA); see docs/fine-tuning.md."""

    facts = KeyFacts(on_resume="fixed")

    path: Name = key(
        "",
        "adapter of PEFT to train further, in place of rank, alpha, rank_stabilized, targets and "
        "dora: a directory, or org/name on the Hub; without model.path, its base model is trained",
        on_resume="weights",
        tries=(),
    )
    rank: NonNegative = key(0, "rank of the adapters; 0: train all weights", tries=("2", "3"))
    alpha: Annotated[float, Field(gt=0)] = key(
        16.0, "scale of the adapters: alpha / rank", needs="lora.rank>0", same_speed=True
    )
    rank_stabilized: bool = key(
        False,
        "scale the adapters by alpha / sqrt(rank) (rsLoRA)",
        needs="lora.rank>0",
        same_speed=True,
    )
    targets: tuple[Text, ...] = key(
        (),
        "layers with adapters, by the end of their names, such as q_proj, experts.up_proj, "
        "embed_tokens or lm_head; empty: all linear layers of blocks",
        needs="lora.rank>0",
        tries=(
            "q_proj,v_proj",
            "o_proj,down_proj",
            "k_proj",
            "gate_proj,up_proj",
            "experts.up_proj,o_proj",
            "embed_tokens,q_proj",
            "lm_head,up_proj",
        ),
    )
    modules_to_save: tuple[Literal["embed_tokens", "lm_head", "score"], ...] = key(
        (),
        "embedding and head that are trained in full, beside the adapters; the score head of a "
        "reward model always is",
        needs="lora.rank>0",
        tries=("embed_tokens", "lm_head", "embed_tokens,lm_head"),
    )
    trainable_tokens: tuple[NonNegative, ...] | Auto = key(
        "auto",
        "ids of tokens whose rows in embedding and head are trained, too, unless these have "
        "adapters or are in modules_to_save; auto: the tokens that the run adds to the model",
        needs="lora.rank>0 and has_frozen_tables",
        tries=("256", "3,17,101,200"),
    )
    quantize: Literal["none", "int8", "nf4"] = key(
        "none",
        "storage of the blocks' frozen weights, with one scale per 64 numbers (nf4: QLoRA); none: "
        "the compute dtype",
        needs="lora.rank>0",
    )
    lr_ratio: Annotated[float, Field(gt=0)] = key(
        1.0,
        "learning rate of the matrices B, as a multiple of optim.lr (LoRA+)",
        needs="lora.rank>0 and has_matrices_b",
        on_resume="branch",
        tries=("4",),
        same_speed=True,
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = key(
        0.0,
        "fraction of the adapters' inputs that training sets to 0; not those of the embedding",
        needs="lora.rank>0 and adapts_blocks",
        on_resume="branch",
        tries=("0.2",),
    )
    dora: bool = key(
        False,
        "also train the magnitude of each row of an adapted matrix (DoRA)",
        needs="lora.rank>0",
    )

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids of the tokens whose rows are trained, ascending."""
        return () if self.trainable_tokens == "auto" else tuple(sorted({*self.trainable_tokens}))

    @property
    def has_adapters(self) -> bool:
        """Return True if adapters are trained, not all weights."""
        return self.rank > 0


Fraction = Annotated[float, Field(ge=0, lt=1)]


class OptimGroup(Section):
    """Parameters with other options; auto: the value of section optim."""

    params: tuple[Text, ...] = key(..., "patterns of names of the full model", min_length=1)
    lr_mult: Annotated[float, Field(ge=0)] = key(
        1.0,
        "factor of the learning rate. 0: the parameters are frozen, without gradient or optimizer "
        "state",
    )
    weight_decay: Annotated[float, Field(ge=0)] | Auto = key("auto", "weight decay")
    beta1: Fraction | Auto = key("auto", "decay of the first moment")
    beta2: Fraction | Auto = key("auto", "decay of the second moment")
    eps: Above0 | Auto = key("auto", "term added to the denominator")
    momentum: Fraction | Auto = key("auto", "muon: momentum decay")
    optimizer: Literal["auto", "adamw"] = key(
        "auto", "muon and soap: adamw for these matrices, too"
    )

    def options(self, optim: OptimSection) -> dict[str, Any]:
        """Return the options of a torch parameter group that differ from the optimizer's."""
        values = {name: value for name, value in self if value != "auto"}
        betas = values.pop("beta1", optim.beta1), values.pop("beta2", optim.beta2)
        options = {} if betas == (optim.beta1, optim.beta2) else {"betas": betas}
        return options | {name: values[name] for name in values.keys() - {"params", "optimizer"}}


GROUPS_TO_TRY = {
    '[{params=["*_proj*"], lr_mult=3, weight_decay=0.3}]': "",
    '[{params=["layers.0.*"], lr_mult=0.3}, {params=["*"], lr_mult=2, weight_decay=0}]': "",
    '[{params=["*norm*", "embed*"], lr_mult=0.5, weight_decay=0.5, beta1=0.5, beta2=0.8}]': "",
    '[{params=["*norm*", "embed*", "*.k_proj*", "layers.0.*up_proj*"], lr_mult=0}]': "",
    '[{params=["*o_proj*"], optimizer="adamw", beta2=0.9}, {params=["*"], momentum=0.8}]': (
        "optim.name=muon"
    ),
}


class OptimSection(Section):
    """The optimizer and its learning rate."""

    name: Name = key(
        "adamw",
        "optimizer: adamw, muon, soap, or module:function",
        on_resume="fixed",
        tries=("muon", "soap"),
    )
    state_dtype: Literal["float32", "bfloat16", "8bit"] = key(
        "float32",
        "adamw and muon: dtype of the moments; soap: of the momentum. 8bit applies to the blocks' "
        "matrices, the rest stays float32",
    )
    ema_decay: Fraction = key(
        0.0,
        "decay per step of an exponential moving average of the weights, in float32, which "
        "generate, evaluate and export then read; 0: none",
        on_resume="fixed",
        same_speed=True,
        tries=("0.9",),
    )
    momentum: Fraction = key(
        0.95, "muon: momentum decay", needs="optim.name=muon|module:function", same_speed=True
    )
    precondition_interval: Annotated[int, Field(ge=1)] = key(
        10,
        "soap: updates between two changes of the bases",
        needs="optim.name=soap",
        tries=("1", "3"),
    )
    max_precondition_dim: Annotated[int, Field(ge=0)] = key(
        10000,
        "soap: maximum size of a side of a matrix that is rotated; each has 8 bytes per element of "
        "a square of that size",
        needs="optim.name=soap",
        on_resume="fixed",
        tries=("0", "40"),
    )
    lr: Above0 = key(3e-4, "peak learning rate", same_speed=True)
    beta1: Fraction = key(0.9, "decay of the first moment", same_speed=True)
    beta2: Fraction = key(0.95, "decay of the second moment", same_speed=True)
    eps: Above0 = key(1e-8, "term added to the denominator", same_speed=True)
    weight_decay: Annotated[float, Field(ge=0)] = key(
        0.1, "decoupled weight decay of matrices; norms and embeddings have none", same_speed=True
    )
    max_grad_norm: Annotated[float, Field(ge=0)] = key(
        1.0,
        "global gradient norm above which gradients are clipped; 0: no clipping",
        tries=("0", "0.5", "1.5"),
    )
    qk_clip_threshold: Annotated[float, Field(ge=0)] = key(
        0.0,
        "QK-clip: attention logit of a head above which its query and key weights are scaled down "
        "after the step (Kimi K2: 100); computes the logits once more in forward; 0: off",
        needs="can_clip_logits",
        tries=("0.003", "0.02"),
    )
    schedule: Name = key(
        "wsd",
        "learning-rate schedule after warmup: wsd, cosine, linear, or module:function",
        tries=("cosine", "linear"),
        same_speed=True,
    )
    warmup_steps: NonNegative | Auto = key(
        "auto",
        "steps of linear warmup; auto: a tenth of all steps, at most 100",
        tries=("0", "1"),
        same_speed=True,
    )
    decay_fraction: Annotated[float, Field(ge=0, le=1)] = key(
        0.2,
        "wsd: fraction of the steps after warmup in which the learning rate decays",
        needs="optim.schedule=wsd|module:function",
        same_speed=True,
    )
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = key(
        0.1,
        "final learning rate, as a fraction of the peak; a schedule module:function decides itself",
        needs="decays_lr",
        same_speed=True,
    )
    groups: tuple[OptimGroup, ...] = key(
        (),
        "parameters with other options, as tables [[optim.groups]]; the first match applies",
        tries=GROUPS_TO_TRY,
    )

    def group_of(self, name: str) -> int:
        """Return the index of a parameter's group in ``groups``; -1: none."""
        patterns = [(i, each) for i, group in enumerate(self.groups) for each in group.params]
        return next((i for i, pattern in patterns if fnmatchcase(name, pattern)), -1)

    def num_warmup_steps(self, steps: int) -> int:
        """Return the steps of warm-up in a run of ``steps``."""
        return min(100, steps // 10) if self.warmup_steps == "auto" else self.warmup_steps


class ParallelSection(Section):
    """Degrees of parallelism; the product of all but ep is the number of ranks."""

    facts = KeyFacts(on_resume="layout")

    dp_replicate: Positive = key(1, "replicas of the sharded model (HSDP)", tries=("2", "3"))
    dp_shard: Positive | Literal["auto", "fit"] = key(
        "auto",
        "data-parallel ranks that shard parameters, gradients and optimizer state (FSDP). fit: the "
        "fewest ranks whose memory holds the model, the rest replicate (MiCS); auto: all remaining "
        "ranks; on a CPU, if run.nproc_per_node and all keys of this section have their defaults, "
        "the same as fit",
        tries=("2", "3", "4"),
    )
    tp: Positive = key(1, "tensor-parallel degree", tries=("2", "3", "4"))
    pp: Positive = key(1, "pipeline-parallel degree", tries=("2", "3", "4"))
    cp: Positive = key(1, "context-parallel degree", tries=("2", "3", "4"))
    ep: Positive = key(
        1,
        "expert-parallel degree; divides dp_shard x cp, or with etp=1 dp_shard x cp x tp",
        tries={
            "2": "has_experts and parallel.dp_shard>1",
            "4": "has_experts and parallel.dp_shard>1",
        },
    )
    etp: Literal["tp"] | Positive = key(
        "tp",
        "tensor-parallel degree of experts. tp: split the width of each expert over the tp ranks; "
        "1: keep experts whole, and split the tokens of a sequence over the tp ranks instead",
        needs="splits_no_experts",
        tries={"1": "has_experts and parallel.tp>1"},
    )
    ep_dispatch: Text = key(
        "alltoall",
        "ep: exchange of tokens. alltoall: of exact numbers, which the host waits for once per "
        "layer; padded: of buffers of a fixed size, without a wait; or module:Name of your own",
        needs="has_experts and parallel.ep>1",
        tries=("padded",),
    )
    ep_capacity_factor: Annotated[float, Field(ge=1)] = key(
        2.0,
        "ep_dispatch=padded: size of the buffers, relative to perfectly balanced experts; a step "
        "that needs more is computed again with exact numbers",
        needs="has_experts and parallel.ep>1 and parallel.ep_dispatch=padded|module:function",
        tries=("1", "1.3", "9"),
    )
    ep_chunks: Positive = key(
        1,
        "ep: parts of a layer's experts; the tokens of one part travel while another computes",
        needs="has_experts and parallel.ep>1",
        tries=("2", "3"),
    )
    sequence_parallel: bool = key(
        True, "tp: shard activations between matmuls along the sequence", needs="parallel.tp>1"
    )
    async_tp: bool = key(
        False,
        "tp: overlap communication with matmuls (SymmetricMemory)",
        needs="parallel.tp>1",
        tries=(),
    )
    cp_method: Literal["ring", "allgather", "ulysses"] = key(
        "ring",
        "cp: attention across ranks. ring: pass keys and values around; allgather: gather keys "
        "and values; ulysses: exchange heads for tokens",
        needs="parallel.cp>1",
    )
    cp_load_balance: bool | Literal["documents"] = key(
        True,
        "cp: tokens of a rank. true: a chunk from the head and one from the tail of each sequence; "
        "documents: tokens with equal attention inside the documents; false: a contiguous slice",
        needs="parallel.cp>1 and balances_tokens",
        tries={"false": "", "documents": "data.packing=documents"},
    )
    mesh_order: Literal["pipeline-outer", "replica-outer"] = key(
        "pipeline-outer",
        "outermost axis of the device mesh. pipeline-outer: the ranks of a stage are neighbors; "
        "replica-outer: the ranks of a replica are neighbors",
        needs="parallel.pp>1 and parallel.dp_replicate>1",
    )
    reshard_after_forward: Literal["auto", "always", "never"] | Positive = key(
        "auto",
        "parameters after forward. always: reshard (ZeRO-3); never: keep unsharded (ZeRO-1 or "
        "ZeRO-2: see gradient_sync); a number: reshard over that many ranks; auto: never in a "
        "pipeline, else always",
        needs="gathers_params",
        tries={"always": "", "never": "", "2": "parallel.dp_shard=4"},
    )
    gradient_sync: Literal["auto", "microbatch", "step"] = key(
        "auto",
        "gradient reduction. microbatch: reduce-scatter each microbatch, all-reduce replicas once "
        "a step; step: accumulate unsharded gradients and reduce once; auto: step if parameters "
        "stay unsharded or a rank's unsharded gradients take less than 2 GiB, else microbatch",
        needs="reduces_often",
    )
    hierarchical_gather: bool = key(
        False,
        "all-gather parameters across nodes first, then inside each node",
        needs="gathers_over_nodes",
    )
    symmetric_memory: bool = key(
        False,
        "communicate parameters and gradients through memory that a node's GPUs share",
        needs="shards_params",
        tries=(),
    )
    fsdp_prefetch: NonNegative = key(
        1, "blocks whose parameters are gathered ahead of use", needs="shards_params"
    )
    param_persistence_threshold: NonNegative = key(
        0,
        "elements below which a parameter stays unsharded from its first use to the end of a step",
        needs="reshards_params",
        tries=("1", "70", "100000"),
    )
    cpu_offload: bool = key(False, "keep parameters, gradients and optimizer state in host memory")

    @property
    def ep_padding(self) -> float:
        """Size of the buffers of experts, relative to balance; 1: exact numbers of tokens."""
        return self.ep_capacity_factor if self.ep_dispatch == "padded" else 1.0

    @property
    def cp_split(self) -> bool | Literal["documents"]:
        """``cp_load_balance``; with ulysses true in place of documents."""
        is_ulysses = self.cp_method == "ulysses"
        return bool(self.cp_load_balance) if is_ulysses else self.cp_load_balance

    @property
    def has_experts_without_tp(self) -> bool:
        """Return True if tensor parallelism does not split experts."""
        return self.etp == 1

    @property
    def ranks_per_shard(self) -> int:
        """The product of all degrees except ``dp_shard``."""
        return math.prod(getattr(self, axis) for axis in AXES if axis != "dp_shard")

    @property
    def num_ranks(self) -> int | None:
        """The product of all degrees; None if weft chooses ``dp_shard``."""
        return None if isinstance(self.dp_shard, str) else self.ranks_per_shard * self.dp_shard


class PipelineSection(Section):
    """The pipeline schedule and the split into stages."""

    facts = KeyFacts(on_resume="layout")

    schedule: Text = key(
        "1F1B",
        "pipeline schedule: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, "
        "ZBVZeroBubble, DualPipeV, or the path of a .csv file",
        needs="parallel.pp>1",
        tries=(
            "GPipe",
            "Interleaved1F1B",
            "LoopedBFS",
            "InterleavedZeroBubble",
            "ZBVZeroBubble",
            "DualPipeV",
        ),
    )
    stages_per_rank: Positive | Auto = key(
        "auto",
        "stages per rank; auto: what the schedule needs, or 2 if it allows several",
        needs="allows_stages_per_rank and parallel.pp>1",
    )
    balance: Literal["speed", "memory"] = key(
        "speed",
        "objective of the split. speed: the slowest stage is as fast as possible; memory: the "
        "largest stage is as small as possible",
        needs="parallel.pp>1 and pipeline.layers_per_stage=",
    )
    layers_per_stage: tuple[NonNegative, ...] = key(
        (),
        "layers of each stage, first to last; empty: split by pipeline.balance",
        needs="parallel.pp>1",
        tries=("any",),
    )
    defer_weight_gradients: bool = key(
        True,
        "schedules with input and weight passes (zero bubble, DualPipeV): compute the gradients of "
        "weights later, in gaps of the schedule; false: at once, which keeps less memory",
        needs="defers_weight_gradients",
    )
    overlap_dispatch: bool = key(
        True,
        "DualPipeV: one microbatch computes while another exchanges tokens with experts",
        needs="has_experts and overlaps_dispatch",
    )


class PrecisionSection(Section):
    """Dtypes of computation; trained weights are stored in float32."""

    compute_dtype: Literal["auto", "float32", "bfloat16"] = key(
        "auto", "dtype of forward and backward; auto: bfloat16 on accelerators, float32 on cpu"
    )
    reduce_dtype: Literal["float32", "bfloat16"] = key(
        "float32", "dtype of the gradient reduction", needs="reduces_in_fsdp"
    )
    float8: Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"] = key(
        "none",
        "float8 matmuls of the blocks, by the elements that share a scale. tensorwise: a "
        "matrix; rowwise: a row; rowwise_with_gw_hp: a row, weight gradients in high precision; "
        "mxfp8: 32 elements; needs weft[torchao]",
        tries={
            "tensorwise": "precision.float8_small=true",
            "rowwise": "precision.float8_small=true",
            "rowwise_with_gw_hp": "precision.float8_small=true",
            "mxfp8": "precision.float8_small=true",
        },
    )
    float8_exclude: tuple[Text, ...] = key(
        (),
        "float8: name patterns of matrices that stay in high precision, such as *.o_proj",
        needs="precision.float8!=none",
        tries=("*.o_proj", "*.down_proj,*.q_proj"),
    )
    float8_small: bool = key(
        False,
        "float8: convert matrices that are too small to get faster",
        needs="precision.float8!=none",
        tries=(),
    )


class ActivationCheckpointSection(Section):
    """Recomputation and offload of activations; see docs/speed.md."""

    facts = KeyFacts(on_resume="layout")

    mode: Literal["none", "full", "selective", "budget"] = key(
        "none",
        "activation checkpointing of the blocks. full: recompute every block; selective: "
        "recompute cheap operators; budget: fit a memory budget",
    )
    every_n_layers: Positive = key(
        1,
        "checkpoint every n-th block only",
        needs="activation_checkpoint.mode=full|selective|budget",
    )
    recompute_every_n_matmuls: NonNegative = key(
        2,
        "selective: recompute every n-th matmul; 0: none",
        needs="activation_checkpoint.mode=selective",
    )
    memory_budget: Annotated[float, Field(ge=0, le=1)] = key(
        0.5,
        "budget: fraction of the activation memory that may be kept",
        needs="activation_checkpoint.mode=budget",
    )
    offload: bool = key(
        False,
        "keep saved activations in host memory until backward; with selective and budget the "
        "blocks' inputs",
    )
    offload_prefetch: Positive = key(
        1,
        "offload: blocks whose activations are loaded, or stay on the device, ahead of use",
        needs="activation_checkpoint.offload=true",
    )

    @property
    def period(self) -> int:
        """The number of blocks after which the pattern of recomputed blocks repeats."""
        return self.every_n_layers if self.mode != "none" else 1

    def describe(self) -> str:
        """Return what backward recomputes, as a phrase."""
        every_n, num_matmuls = self.every_n_layers, self.recompute_every_n_matmuls
        blocks = "every block" if every_n == 1 else f"1 of {every_n} blocks"
        matmuls = f" and 1 of {num_matmuls} matmuls" if num_matmuls else ""
        text = {
            "none": "nothing (no activation checkpointing)",
            "full": f"{blocks} (full)",
            "selective": f"cheap operators{matmuls} of {blocks} (selective)",
            "budget": f"until {self.memory_budget:.0%} of the activations of {blocks} are left",
        }[self.mode]
        return f"{text}; saved activations in host memory" if self.offload else text

    @property
    def recomputes_all_blocks(self) -> bool:
        """Return True if backward computes every block again, completely."""
        return self.mode == "full" and self.every_n_layers == 1


class CompileSection(Section):
    """Compilation of each block with torch.compile; see docs/speed.md."""

    facts = KeyFacts(on_resume="free", tries={})

    enable: bool = key(
        False, "compile each block with torch.compile", on_resume="layout", tries=("true",)
    )
    cache_dir: Text = key(
        "auto",
        "directory of compiled code, reused by the next start; auto: in the temporary directory of "
        "each node",
        needs="compile.enable=true",
    )
    cuda_graphs: bool = key(
        False,
        "replay forward and backward of a microbatch from a CUDA graph: small models do not wait "
        "for the host. Documents then need FlexAttention",
        needs="runs_on_gpu",
    )


class CheckpointSection(Section):
    """When and where a run saves its state; see docs/reliability.md."""

    facts = KeyFacts(on_resume="free", tries={})

    interval: NonNegative | Auto = key(
        100,
        "steps between checkpoints; 0: only at the end; auto: the interval that loses the least "
        "time, from the measured cost of a checkpoint and checkpoint.mtbf_hours",
    )
    mtbf_hours: Annotated[float, Field(gt=0)] = key(
        24.0,
        "interval=auto: mean time between failures of the whole job, in hours",
        needs="checkpoint.interval=auto",
    )
    async_save: bool = key(True, "write checkpoints in the background while training continues")
    dir: Text = key(
        "auto",
        "directory or s3://bucket/prefix of the checkpoints; auto: checkpoints in run.dir",
    )
    keep_latest: Positive = key(2, "checkpoints to keep, newest first")
    best: Text = key(
        "off",
        "metric of the validation set, such as eval_loss or reward_accuracy: the run also saves "
        "after an evaluation that improves it, and keeps the checkpoint with the best value in "
        "addition to keep_latest; off: none",
        needs="train.eval_interval>0 and has_validation",
    )
    best_mode: Literal["auto", "min", "max"] = key(
        "auto",
        "best value of the metric; auto: min for losses (mtp_loss/1 too), chosen_nll, kl and "
        "reward_rejected, else max",
        needs="checkpoint.best!=off",
    )
    local_dir: Text = key(
        "off",
        "node-local directory for the newest state, such as /dev/shm (takes twice the state in "
        "memory) or a local disk; off: none",
    )
    local_interval: Positive = key(
        10, "steps between node-local saves", needs="checkpoint.local_dir!=off"
    )
    final_save_timeout: Annotated[float, Field(ge=0)] = key(
        3600.0,
        "seconds for which a last save that fails is retried, before the state is saved in any "
        "other place that has room; after a stop signal that happens at once",
    )

    @property
    def is_in_run_dir(self) -> bool:
        """Return True if the run directory holds the checkpoints."""
        return self.dir == "auto"

    @property
    def saves_locally(self) -> bool:
        """Return True if nodes also save to a node-local directory."""
        return self.local_dir != "off"


class Fault(Section):
    """One injected fault; `weft.monitor.faults` lists the sites."""

    site: Text = key("step", "site: one of weft.monitor.faults")
    kind: Literal["kill", "stop", "slow", "lock", "raise", "error", "corrupt", "nan", "flip"] = key(
        "kill",
        "effect. kill: SIGKILL; stop: SIGSTOP; slow: sleep; lock: sleep and hold the GIL; raise: "
        "an exception; error: an OSError; corrupt: multiply the tensors by factor; nan: fill them "
        "with NaN; flip: flip one bit",
    )
    rank: NonNegative = key(0, "rank")
    passing: Positive = key(1, "fire at the n-th call of this site")
    times: Positive = key(1, "number of consecutive calls that fire")
    seconds: Annotated[float, Field(ge=0)] = key(1.0, "slow and lock: duration in seconds")
    error: Literal["EIO", "ENOSPC", "EDQUOT", "EACCES"] = key("ENOSPC", "error: its errno")
    factor: float = key(1e4, "corrupt: factor")


class ResilienceSection(Section):
    """Failures, hangs and restarts; see docs/reliability.md."""

    facts = KeyFacts(on_resume="free", tries={})

    time_limit: Annotated[float, Field(ge=0)] = key(
        0.0, "seconds of training after which the run saves and exits with status 75; 0: no limit"
    )
    on_anomaly: Literal["stop", "skip", "rewind"] = key(
        "stop",
        "action on a NaN or Inf loss or gradient norm. stop: end the run; skip: skip the update; "
        "rewind: load the last checkpoint and skip the samples since; skip and rewind also act "
        "on spikes",
        on_resume="branch",
    )
    max_anomalies: Positive = key(
        10,
        "skipped steps in a row, or rewinds to one checkpoint, before the run stops",
        needs="resilience.on_anomaly=skip|rewind",
        on_resume="branch",
    )
    spike_threshold: Annotated[float, Field(gt=0)] = key(
        10.0,
        "robust standard deviations above the median that count as a spike",
        needs="resilience.on_anomaly=skip|rewind",
        on_resume="branch",
    )
    spike_window: Annotated[int, Field(ge=4, le=10_000)] = key(
        128,
        "accepted steps that define the median; spikes are detected once half are there",
        needs="resilience.on_anomaly=skip|rewind",
        on_resume="branch",
    )
    replica_check: NonNegative = key(
        100,
        "steps between comparisons of the replicas, also made before each save; 0: never",
        needs="has_replicas",
    )
    step_timeout: Annotated[float, Field(ge=0)] | Auto = key(
        "auto",
        "seconds without progress in a step before the run is ended as hung, with exit status 3 "
        "(outside a step ten times as many, at least 600); auto: 60, or (10 + "
        "monitor.log_interval) times the median step time, whichever is more; 0: never",
    )
    preflight: bool = key(
        False,
        "run the checks of weft doctor on each node before its ranks start; a node that fails "
        "exits with status 69",
    )
    spot_notice: Literal["auto", "off"] = key(
        "auto",
        "on the notice of AWS, Google or Azure that a node ends, save and exit with status 75. "
        "auto: ask the metadata service of the node every 5 seconds where there is one; off: never",
    )
    max_restarts_per_hour: NonNegative = key(
        3, "restarts from the newest checkpoint within an hour; 0: none"
    )
    lighthouse: Text = key(
        "none",
        "HOST:PORT of torchft's lighthouse, for replica groups that fail independently; needs "
        "weft[torchft]; none: no replica groups",
    )
    faults: tuple[Fault, ...] = key(
        (), "faults to inject, as tables [[resilience.faults]]", on_resume="branch"
    )

    @property
    def has_replica_groups(self) -> bool:
        """Return True if the run is one of several replica groups."""
        return self.lighthouse != "none"


class MonitorSection(Section):
    """Metrics, trackers and reports; see docs/observing.md."""

    facts = KeyFacts(on_resume="free", tries={})

    log_interval: Positive = key(10, "steps between logged metrics")
    trackers: tuple[Text, ...] = key(
        ("tensorboard",),
        "trackers in addition to metrics.jsonl: tensorboard, wandb, mlflow, otlp (OpenTelemetry), "
        "or module:function",
    )
    layer_grad_norms: bool = key(False, "log the gradient norm of each layer")
    attention_logits: bool = key(
        False, "log the largest attention logit of each layer; computes the logits once more"
    )
    router_metrics: bool = key(
        False,
        "log load, entropy and effect of the load-balance bias of each router of experts",
        needs="has_experts",
    )
    eval_prompts: tuple[Name, ...] = key(
        (),
        "texts that the model continues by up to 64 tokens at every evaluation, for events.jsonl, "
        "the terminal and the report; with an empty text it begins a document",
        needs="has_validation",
    )
    prometheus: Text = key(
        "off",
        "HOST:PORT at which each node serves its metrics to Prometheus, such as 127.0.0.1:9400; "
        "off: no server",
    )
    webhook: Text = key(
        "off",
        "env:NAME: the environment variable with the secret URL to which the run posts its events "
        "as JSON, which a Slack webhook accepts; off: none",
    )
    report: bool = key(True, "render report.html during training")
    spans: bool = key(True, "write a timeline of each rank for Perfetto, into spans/")


class ProfileSection(Section):
    """Profiles by torch.profiler; see docs/observing.md."""

    facts = KeyFacts(on_resume="free", tries={})

    steps: Steps = key("", "steps to profile, into traces/: 10, or 10-12; empty: none")
    memory: bool = key(False, "record memory allocations, too", needs="profile.steps!=")


class DebugSection(Section):
    """Tools that find the cause of a wrong loss; see docs/debugging.md."""

    facts = KeyFacts(on_resume="free", tries={})

    layer_stats_steps: Steps = key(
        "",
        "steps, such as 7,20-30, whose layer statistics (mean, size, NaN count of each block's "
        "output, gradient and parameter) go into statistics.jsonl; empty: none",
    )
    deterministic: bool = key(
        False, "bitwise reproducible on the same layout and devices; slower on GPUs"
    )
    autograd_anomaly: bool = key(
        False, "name the operator and layer whose backward produces NaN; slow"
    )


SECRET_KINDS = ("env", "k8s-secret", "secretsmanager")  # of references to secrets


def _check_references(secrets: dict[str, str]) -> dict[str, str]:
    wrong = [name for name, text in secrets.items() if text.partition(":")[0] not in SECRET_KINDS]
    if wrong:
        # A text without NAME= would be the name.
        names = [name for name in wrong if re.fullmatch("[A-Z_][A-Z0-9_]*", name)]
        owner = f" for {', '.join(names)}" if len(names) == len(wrong) else ""
        raise ValueError(f"has a value{owner} that is not a reference; others could read it")
    return secrets


Secrets = Annotated[dict[Text, Text], AfterValidator(_check_references)]


class LaunchSection(Section):
    """Placement of the job that ``weft launch`` submits; the run ignores these keys.

    Keys that a kind of cluster cannot use are reported when the job is launched.  Other fields of a
    manifest or request come from the file of ``launch.patch``.
    """

    facts = KeyFacts(on_resume="free", tries={})

    time_limit: Text = key(
        "1-00:00:00", "wall-clock limit of one submission: D-HH:MM:SS or HH:MM:SS"
    )
    image: Text = key(
        "auto",
        "container image with weft; auto: none, the nodes have weft themselves (Slurm), or "
        "launch.setup installs it (SkyPilot)",
    )
    setup: tuple[ShellLines, ...] = key(
        (), "shell lines that each node runs first, such as 'source ~/venv/bin/activate'"
    )
    mounts: dict[Text, Text] = key(
        {},
        "directories of the job's containers: DIRECTORY=SOURCE; a source is pvc:CLAIM[/DIRECTORY] "
        "or host:/DIRECTORY (Kubernetes; Slurm with an image: host), fsx:fs-ID:/MOUNT_NAME, "
        "efs:fs-ID:/ (SageMaker), s3://BUCKET/PREFIX (SageMaker, SkyPilot), or image: it is in the "
        "image",
    )
    env: dict[Text, Name] = key({}, "environment variables of the job: NAME=VALUE; not for secrets")
    secrets: Secrets = key(
        {},
        "secret environment variables, by reference: NAME=k8s-secret:SECRET/KEY (Kubernetes), "
        "NAME=secretsmanager:ID[#FIELD] (AWS, read on the node), NAME=env:VARIABLE (Slurm, "
        "SkyPilot: of the shell that submits)",
    )
    bucket: Name = key(
        "",
        "s3://BUCKET[/PREFIX] for what the nodes and the submitting machine share: the run "
        "directory (SageMaker, SkyPilot) and uploaded files",
    )
    instance_type: Name = key(
        "",
        "instance type of the nodes, such as p5.48xlarge; SageMaker: several, joined by '+', in "
        "the order of preference",
    )
    region: Name = key("", "region, such as us-east-1; SkyPilot: also CLOUD/REGION")
    network: Text = key(
        "auto",
        "network between nodes. auto: EFA if launch.instance_type has it, else TCP or InfiniBand, "
        "as the nodes have it; efa:COUNT: so many EFA devices per node; tcp: no EFA",
    )
    queue: Name = key(
        "", "queue: Slurm's partition, Kueue's LocalQueue, the LocalQueue of HyperPod"
    )
    priority: Name = key("", "priority: Slurm's QOS, Kueue's WorkloadPriorityClass")
    reservation: Name = key(
        "", "reserved nodes: Slurm's reservation, the ARN of a SageMaker training plan"
    )
    topology: Positive | Name = key(
        "",
        "nearness of the nodes: Slurm: switches, COUNT[@TIME]; Kubernetes with Kueue: "
        "required:LABEL or preferred:LABEL, such as "
        "preferred:topology.k8s.aws/network-node-layer-3",
    )
    node_labels: dict[Text, Name] = key(
        {}, "labels that the nodes must have: LABEL=VALUE, or LABEL=VALUE|VALUE (Kubernetes)"
    )
    tolerations: tuple[Text, ...] = key(
        (), "taints of nodes that the pods tolerate: KEY[=VALUE][:EFFECT] (Kubernetes)"
    )
    exclude: tuple[Text, ...] = key(
        (),
        "nodes that the job must not use; @FILE: those that a file names, one per line (Slurm: the "
        "file is read again at every start)",
    )
    cpus: Positive | Name = key("", "cores per node, such as 96; SkyPilot: also 16+, at least")
    memory: Positive | Name = key(
        "", "memory per node in GiB, such as 512; SkyPilot: also 64+, at least"
    )
    disk: NonNegative = key(0, "disk per node in GB; 0: the cluster's default")
    spot: bool = key(False, "use spot nodes, which the cloud can reclaim (SageMaker, SkyPilot)")
    role: Name = key(
        "", "identity of the job: ARN of SageMaker's role, service account of the pods (Kubernetes)"
    )
    subnets: tuple[Text, ...] = key((), "subnets of the VPC of a SageMaker job")
    security_groups: tuple[Text, ...] = key((), "security groups of the VPC of a SageMaker job")
    namespace: Name = key("", "namespace of Kubernetes; empty: kubectl's own")
    kind: Literal["trainjob", "jobset", "hyperpod"] = key(
        "trainjob",
        "object of Kubernetes. trainjob: Kubeflow Trainer v2; jobset: a JobSet; hyperpod: a "
        "HyperPodPyTorchJob, for the training operator of SageMaker HyperPod",
    )
    pull_secrets: tuple[Text, ...] = key((), "secrets that pull the image (Kubernetes)")
    labels: dict[Text, Name] = key(
        {},
        "labels of the job, for the search of jobs and for cost allocation: Kubernetes labels, "
        "SageMaker tags, SkyPilot labels",
    )
    container: Literal["auto", "pyxis", "apptainer"] = key(
        "auto",
        "how Slurm starts launch.image. pyxis: srun --container-image (Pyxis and Enroot); "
        "apptainer: apptainer exec; auto: apptainer for a .sif file, else pyxis",
    )
    price_per_gpu_hour: Annotated[float, Field(ge=0)] = key(
        0.0, "price of a GPU (CPU job: node) per hour, for the cost of a job; 0: unknown"
    )
    options: dict[Text, Text] = key(
        {}, "further long options of sbatch, by their own names: gres-flags=none,comment=mine"
    )
    srun_options: dict[Text, Text] = key(
        {}, "further long options of srun, by their own names: mpi=none,container-workdir=/work"
    )
    patch: Name = key(
        "",
        "YAML or JSON file whose fields are merged into the manifest, task or request; null "
        "removes a field, and items of lists are matched by name",
    )


class Job(Section):
    """The user's choices, one field per section."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    lora: LoraSection = LoraSection()
    optim: OptimSection = OptimSection()
    parallel: ParallelSection = ParallelSection()
    pipeline: PipelineSection = PipelineSection()
    precision: PrecisionSection = PrecisionSection()
    activation_checkpoint: ActivationCheckpointSection = ActivationCheckpointSection()
    compile: CompileSection = CompileSection()
    checkpoint: CheckpointSection = CheckpointSection()
    resilience: ResilienceSection = ResilienceSection()
    monitor: MonitorSection = MonitorSection()
    profile: ProfileSection = ProfileSection()
    debug: DebugSection = DebugSection()
    launch: LaunchSection = LaunchSection()


SECTIONS: dict[str, type[Section]] = {
    name: field.annotation  # type: ignore[misc]
    for name, field in Job.model_fields.items()
}


def keys() -> Iterator[str]:
    """Yield every ``section.key``, in order."""
    for name, section in SECTIONS.items():
        yield from (f"{name}.{key}" for key in section.model_fields)


def flatten(job: Job) -> dict[str, Any]:
    """Return ``{"section.key": value}`` for every key, in order."""
    return {
        f"{name}.{key}": value
        for name, section in job.model_dump(mode="json").items()
        for key, value in section.items()
    }


def difference(job: Job, base: Job) -> dict[str, tuple[Any, Any]]:
    """Return ``{"section.key": (value in job, value in base)}`` where the two differ."""
    ours, theirs = flatten(job), flatten(base)
    every = dict.fromkeys([*ours, *theirs])
    return {
        name: (ours.get(name, MISSING), theirs.get(name, MISSING))
        for name in every
        if ours.get(name, MISSING) != theirs.get(name, MISSING)
    }


def replace(job: Job, **sections: Mapping[str, Any]) -> Job:
    """Return a validated copy with changes: ``replace(job, run={"dir": "x"})``."""
    tree = job.model_dump()
    for name, changes in sections.items():
        tree[name] |= changes
    return Job.model_validate(tree)
