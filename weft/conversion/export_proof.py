"""Prove that an export computes what the run computes.

Another process loads the directory with transformers, and PEFT for adapters
(`weft.conversion.exported_model`).  This one compares its answer with weft's own model.

*Bound.*  Both models compute in float32 on the CPU, with the weights as they are rounded in the
files, so that only the order of the operations differs.  A float32 operation has an error of at
most 2^-24 = 6e-8 of its result; layers add these up and amplify them, in tiny models with large
random weights to 3e-5 of the largest logit.  A wrong constant, a lost tensor or another template
changes logits by 1e-2 and more.  So `BOUND` of the largest logit is allowed.

A model may decide nearly equal cases by rounding, as a router between two experts.  So weft also
computes the logits with its embeddings changed by 2^-20, that is 16 float32 errors, at random.  A
position where this changes the logits by more than the bound decides nothing.

*Rounding* to the dtype of the files is not an error of an export.  The proof reports how far it
moves the logits from those of the run.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn

from weft.checkpoint.manifest import checkpoint_step, read_manifest
from weft.checkpoint.safetensors_reader import read_file_contents
from weft.checkpoint.weight_files import Weight, write_json
from weft.config.accelerators import WITHOUT_GPUS
from weft.config.errors import MISSING, ConfigErrors, WeftError
from weft.config.host_limits import read_memory_sizes
from weft.conversion.exported_model import LOGITS
from weft.conversion.hf_weights import list_hf_tensors
from weft.conversion.peft_export import open_merged
from weft.data.chat_rows import InvalidConversation
from weft.data.dataset import open_dataset
from weft.data.loader import IGNORE_INDEX, build_mixture, evaluation_batches
from weft.data.token_store import TEMPLATE_FILE
from weft.data.tokenizer import load_tokenizer, required_vocab_size
from weft.inference.evaluate import prepare_eval_data
from weft.inference.generate import (
    ChatFormat,
    Sampling,
    encode_prompt,
    generate,
    load_chat_format,
    make_sequence,
)
from weft.inference.inference_model import (
    CheckpointRef,
    LanguageModel,
    drop_mtp,
    find_base_checkpoint,
    load_unsharded,
)
from weft.models.hf_mapping import param_shapes
from weft.planning.model_config import HUB_NAME
from weft.version import __version__

PROOF_FILE = "weft-proof.json"  # in the exported directory
BOUND = 1e-4  # allowed difference, relative to the largest logit
PERTURBATION = 2.0**-20  # of the embeddings, relative
NUM_PERTURBED = 3
MIN_DECIDING = 0.5  # smallest part of the positions that must decide
NUM_SEQUENCES, MAX_LENGTH = 4, 256
NUM_PROMPTS, TEXT_PROMPT, MAX_NEW_TOKENS = 2, 16, 128
OVERHEAD_BYTES = 1 << 30  # of a process with torch and transformers

SAMPLE_TEXTS = (
    "The fox jumps over the lazy dog.",
    " leading and trailing blanks  ",
    "def f(x):\n\treturn 12345.678 * x\n\n\n",
    "Grüße, 你好, здравствуйте, 👋🏽",
)
USER, ANSWER = {"role": "user", "content": "What is it? "}, {"role": "assistant", "content": "It."}
SAMPLE_CONVERSATIONS: tuple[list[dict[str, str]], ...] = (
    [USER],
    [USER, ANSWER, USER],
    [{"role": "system", "content": "Be brief."}, USER, ANSWER, USER],
)


class ProofFailed(WeftError):
    """An export does not compute what the run computes."""


class Samples(NamedTuple):
    """Inputs of the comparison.

    Attributes:
        origin: where the sequences come from.
        sequences: token ids.
        prompts: token ids that both models continue.
        max_tokens: maximum number of tokens of a continuation.
    """

    origin: str
    sequences: list[list[int]]
    prompts: list[list[int]]
    max_tokens: int


# --------------------------------------------------------------------------- before the export


def check_proof(checkpoint: CheckpointRef, adapter: bool, errors: ConfigErrors) -> None:
    """Add an error for each reason why this machine cannot prove an export."""
    packages = ["transformers", *(["peft"] if adapter else [])]
    for name in packages:
        if importlib.util.find_spec(name) is None:
            rule, remedy = f"needs {name}, which is not installed", f"run pip install {name}"
            errors.add("--prove", rule, remedy, value=MISSING)
    needed, free = count_bytes(checkpoint), available_bytes()
    if free is not None and free < needed:
        rule = f"needs {needed:,} bytes of memory for the model in float32, but {free:,} are free"
        errors.add("--prove", rule, "prove the export on a larger machine", value=MISSING)
    if adapter and find_base_checkpoint(checkpoint) is not None:
        if checkpoint.job.lora.quantize != "none":
            rule = "compares in float32, but the adapter was trained with a quantized model"
            remedy = "prove the merged export: leave --adapter out"
            errors.add("--prove", rule, remedy, value=MISSING)
        base = find_adapter_base(checkpoint)
        is_named = HUB_NAME.fullmatch(base) and not Path(base).exists()
        if not is_named and not (Path(base) / "config.json").is_file():
            rule = f"needs the base model of the adapter, and {base or 'the run'} is not the "
            rule += "directory of a model in the format of transformers"
            remedy = "prove the merged export: leave --adapter out"
            errors.add("--prove", rule, remedy, value=MISSING)


def find_adapter_base(checkpoint: CheckpointRef) -> str:
    """Return the path or name of the model for which an adapter is exported."""
    base = find_base_checkpoint(checkpoint)
    return "" if base is None else str(read_manifest(base).get("imported") or "")


def count_bytes(checkpoint: CheckpointRef) -> int:
    """Return the memory of one model in float32, with a process around it."""
    shapes = param_shapes(checkpoint.family, checkpoint.config)
    return OVERHEAD_BYTES + int(4.2 * sum(math.prod(shape) for shape in shapes.values()))


def available_bytes() -> int | None:
    """Return the memory that a process of this machine or container can take."""
    found = [size for name, size in read_memory_sizes().items() if name == "MemAvailable"]
    with suppress(OSError, ValueError):  # of a container, by the cgroup of version 2
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        found.append(limit - int((group / "memory.current").read_text()))
    return min(found, default=None)


# --------------------------------------------------------------------------- after the export


def prove_export(checkpoint: CheckpointRef, out: Path, dtype: torch.dtype, adapter: bool) -> str:
    """Compare an exported directory with the run; write `PROOF_FILE` into it.

    Args:
        checkpoint: that was exported.
        out: the exported directory.
        dtype: dtype of the export.
        adapter: the directory is an adapter.

    Returns:
        A message for the user.

    Raises:
        ProofFailed: with each reason; the file has them, too.
    """
    checkpoint = drop_mtp(checkpoint)
    has_chat = (checkpoint.run_dir / TEMPLATE_FILE).is_file()
    text_format = load_chat_format(checkpoint)
    chat_format = load_chat_format(checkpoint, "auto") if has_chat else text_format
    samples = draw_samples(checkpoint, chat_format)
    texts, conversations = encode_samples(text_format, chat_format)
    tokenizer, _ = load_tokenizer(checkpoint.run_dir / "tokenizer.json")
    request = {
        "directory": str(out),
        "has_scores": checkpoint.has_score_head,
        "base": find_adapter_base(checkpoint) if adapter else "",
        "sequences": samples.sequences,
        "prompts": samples.prompts,
        "texts": list(texts),
        "conversations": [messages for messages, _ in conversations],
        "variables": dict(checkpoint.job.data.chat_template_args),
        "max_tokens": samples.max_tokens,
        "rows": checkpoint.config.vocab_size,
        "vocab_size": min(checkpoint.config.vocab_size, required_vocab_size(tokenizer)),
    }
    answer, logits = ask_transformers(request)
    proof = Proof(checkpoint, samples)
    proof.versions |= answer["versions"]
    if error := answer.get("error"):
        proof.add("load", f"cannot be loaded: {error}")
    else:
        num_elements = None if adapter else answer["num_elements"]
        proof.check_loading(answer["loading"], num_elements, out, dtype)
        proof.check_texts(texts, conversations, answer)
        model = proof.check_logits(logits, dtype, adapter)
        if not checkpoint.has_score_head:
            ends, theirs = sorted(chat_format.end_tokens), sorted(answer["end_tokens"])
            proof.add(
                "end_tokens",
                "" if ends == theirs else f"stops at the tokens {theirs}, but weft at {ends}",
                tokens=theirs,
            )
            proof.check_continuations(answer["continuations"], model, chat_format)
    return proof.write(out, dtype)


def draw_samples(checkpoint: CheckpointRef, chat_format: ChatFormat) -> Samples:
    """Return sequences of the validation set; random tokens if there is none."""
    rows: list[tuple[list[int], list[bool]]] = []
    origin = "random tokens, because the run has not trained"
    if not checkpoint.job.data.has_validation:
        origin = "random tokens, because the run has no validation set"
    elif checkpoint_step(checkpoint.path) > 0:
        try:
            rows, origin = read_validation_rows(checkpoint), "the validation set of the run"
        except (WeftError, OSError):
            origin = "random tokens, because the run's validation set cannot be read"
    longest = min(MAX_LENGTH, checkpoint.config.max_seq_len)
    if checkpoint.has_score_head:  # conversations of several lengths, each with one score
        rows = [
            (tokens[: end + 1], targets[: end + 1])
            for tokens, targets in rows
            if any(targets)
            for end in [targets.index(True)]
        ]
    sequences = [tokens[:longest] for tokens, _ in rows[:NUM_SEQUENCES]]
    # In a conversation the prompt ends where the first answer begins.
    starts = [next((i for i, t in enumerate(targets) if t), 0) for _, targets in rows]
    prompts = [
        tokens[: start + 1 if start else TEXT_PROMPT]
        for (tokens, _), start in zip(rows, starts, strict=True)
    ]
    # weft drops the older half of a text that is longer.
    prompts = sorted((p for p in prompts if 2 * len(p) <= chat_format.max_context), key=len)
    if not sequences:
        generator = torch.Generator().manual_seed(0)
        size = min(checkpoint.config.vocab_size, required_vocab_size(chat_format.tokenizer))
        shape = (NUM_SEQUENCES, min(64, longest))
        sequences = torch.randint(0, size, shape, generator=generator).tolist()
        if checkpoint.has_score_head:  # an answer ends in no padding
            sequences = [[*ids[:-1], min(chat_format.end_tokens)] for ids in sequences]
    if checkpoint.has_score_head:
        return Samples(origin, sequences, [], 0)
    prompts = prompts[:NUM_PROMPTS] or [encode_prompt(SAMPLE_TEXTS[0], chat_format)]
    room = chat_format.max_context - max(map(len, prompts))
    return Samples(origin, sequences, prompts, max(1, min(MAX_NEW_TOKENS, room)))


def read_validation_rows(checkpoint: CheckpointRef) -> list[tuple[list[int], list[bool]]]:
    """Return tokens of validation sequences, and which of their targets are trained."""
    job = checkpoint.job
    path = prepare_eval_data(checkpoint, job, True, Console(quiet=True))
    mixture = build_mixture(
        open_dataset(path),
        "validation",
        job.train.seq_len,
        job.data,
        job.train.seed,
        checkpoint.has_score_head,
    )
    rows = []
    for batch in islice(evaluation_batches(mixture, 2 * NUM_SEQUENCES, 0, 1, 1), 2 * NUM_SEQUENCES):
        is_trained = batch.targets_BT != IGNORE_INDEX
        rows += list(zip(batch.tokens_BT.tolist(), is_trained.tolist(), strict=True))
    return rows


def encode_samples(
    text_format: ChatFormat, chat_format: ChatFormat
) -> tuple[dict[str, list[int]], list[tuple[list[dict[str, str]], list[int]]]]:
    """Return weft's token ids of texts and conversations."""
    texts = {text: encode_prompt(text, text_format) for text in SAMPLE_TEXTS}
    conversations = []
    for messages in SAMPLE_CONVERSATIONS if chat_format.encoder is not None else ():
        assert chat_format.encoder is not None
        with suppress(InvalidConversation):  # such as of a template without a system prompt
            conversations.append((messages, chat_format.encoder.encode_prompt(messages)))
    return texts, conversations


def ask_transformers(request: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the answer of a process that loads the directory, and its logits."""
    with tempfile.TemporaryDirectory(prefix="weft-proof-") as name:
        paths = [Path(name) / "request.json", Path(name) / "answer.json"]
        paths[0].write_text(json.dumps(request), "utf-8")
        command = [sys.executable, "-m", "weft.conversion.exported_model", *map(str, paths)]
        # The CPU only: a GPU rounds otherwise, and may be too small.
        environment = os.environ | WITHOUT_GPUS | {"TOKENIZERS_PARALLELISM": "false"}
        package = str(Path(__file__).parents[2])
        search = filter(None, (package, os.environ.get("PYTHONPATH", "")))
        environment["PYTHONPATH"] = os.pathsep.join(search)
        process = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", check=False
        )
        if process.returncode or not paths[1].is_file():
            lines = process.stderr.strip().splitlines()[-1:] or ["no message"]
            status = process.returncode
            ended = f"was killed by signal {-status}" if status < 0 else f"ended with {status}"
            text = f"the process that loads the export {ended}: {lines[0]}"
            return {"versions": {}, "error": text}, {}
        answer: dict[str, Any] = json.loads(paths[1].read_text("utf-8"))
        logits = {} if "error" in answer else torch.load(paths[1].with_name(LOGITS))
    return answer, logits


class Proof:
    """Checks of an exported directory and their results.

    Args:
        checkpoint: that was exported.
        samples: inputs of the comparison.
    """

    def __init__(self, checkpoint: CheckpointRef, samples: Samples) -> None:
        self._checkpoint, self._samples = checkpoint, samples
        self._reasons: list[str] = []
        self._checks: dict[str, dict[str, Any]] = {}
        self._bound = self._difference = 0.0
        self.versions: dict[str, str] = {
            "weft": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        }

    def add(self, name: str, reason: str, **figures: Any) -> None:
        """Add the result of a check; ``reason`` is empty if it passes."""
        self._reasons += [reason] if reason else []
        self._checks[name] = {"passed": not reason, **({"reason": reason} if reason else figures)}

    def check_loading(
        self,
        loading: Mapping[str, Sequence[str]],
        num_elements: int | None,
        out: Path,
        dtype: torch.dtype,
    ) -> None:
        """Account for every tensor of the files.

        Args:
            loading: names that transformers or PEFT misses, does not expect, or cannot fit.
            num_elements: elements of the loaded model; None: of an adapter.
            out: the exported directory.
            dtype: dtype of the export.
        """
        stored = {
            name: entry
            for path in sorted(out.glob("*.safetensors"))
            for name, entry in read_file_contents(path).tensors.items()
        }
        wrong = [
            f"{kind.partition('_')[0]}: {names[0]}" for kind, names in loading.items() if names
        ]
        reason = f"has tensors that the loaded model does not use as they are ({'; '.join(wrong)})"
        count = sum(math.prod(entry.shape) for entry in stored.values())
        if not wrong and num_elements not in (None, count):
            reason = f"has {count:,} elements, but the loaded model {num_elements:,}"
            wrong = [reason]
        if not wrong:
            known = list_hf_tensors(self._checkpoint.family, self._checkpoint.config)
            for name, entry in stored.items():
                expected = (known[name].dtype if name in known else None) or dtype
                if entry.dtype != expected:
                    reason = f"has {name} in {entry.dtype}, not {expected}"
                    wrong = [reason]
        dtypes = sorted({str(entry.dtype).removeprefix("torch.") for entry in stored.values()})
        figures = {"tensors": len(stored), "elements": count, "dtypes": dtypes}
        self.add("tensors", reason if wrong else "", **figures)

    def check_texts(
        self,
        texts: Mapping[str, list[int]],
        conversations: Sequence[tuple[list[dict[str, str]], list[int]]],
        answer: Mapping[str, Any],
    ) -> None:
        """Compare token ids of texts, and of rendered conversations."""
        reason = ""
        for (text, ours), theirs in zip(texts.items(), answer["texts"], strict=True):
            if ours != theirs and not reason:
                reason = f"has a tokenizer that gives {text!r} the ids {theirs[:8]}..., not "
                reason += f"{ours[:8]}..."
        self.add("tokenizer", reason, texts=len(texts))
        reason = ""
        for (messages, ours), theirs in zip(conversations, answer["conversations"], strict=True):
            if ours != theirs and not reason:
                roles = ", ".join(message["role"] for message in messages)
                shown = theirs if isinstance(theirs, str) else f"other ids: {theirs[:8]}..."
                reason = f"renders a conversation ({roles}) with {shown}"
        self.add("chat_template", reason, conversations=len(conversations))

    def check_logits(
        self, theirs: Mapping[str, Tensor], dtype: torch.dtype, adapter: bool
    ) -> LanguageModel:
        """Compare logits; return weft's model with the weights of the files."""
        checkpoint, sequences = self._checkpoint, self._samples.sequences
        cpu = torch.device("cpu")
        base = find_base_checkpoint(checkpoint)
        model = make_language_model(load_unsharded(checkpoint, cpu), checkpoint)
        original = compute_logits(model, sequences)
        largest = max(float(each.abs().max()) for each in original)
        self._bound = BOUND * largest
        figures: dict[str, Any] = {"largest_logit": largest, "bound": self._bound}
        reasons: list[str] = []
        if base is not None and not adapter:
            plain = checkpoint.family.build(checkpoint.config)
            store_weights(plain, open_merged(checkpoint, base))
            model = make_language_model(plain, checkpoint)
            sensitive = measure_sensitivity(model, sequences, compute_logits(model, sequences))
            merged = compare(compute_logits(model, sequences), original, sensitive, self._bound)
            figures["merged_difference"] = merged.difference
            reasons += [f"merging the adapters {merged.reason}"] if merged.reason else []
        if dtype != torch.float32:
            round_weights(model.module, checkpoint, dtype, adapter)
        ours = compute_logits(model, sequences)
        figures["rounding_difference"] = max(
            float((a - b).abs().max()) for a, b in zip(ours, original, strict=True)
        )
        if any(theirs[str(i)].shape != each.shape for i, each in enumerate(ours)):
            shapes = tuple(theirs["0"].shape), tuple(ours[0].shape)
            self.add("logits", f"computes logits of shape {shapes[0]}, not {shapes[1]}")
            return model
        sensitive = measure_sensitivity(model, sequences, ours)
        answers = [theirs[str(i)] for i in range(len(ours))]
        result = compare(answers, ours, sensitive, self._bound)
        self._difference = result.difference
        figures |= {
            "difference": result.difference,
            "positions": sum(len(each) for each in ours),
            "undecided_positions": result.undecided,
        }
        reasons += [result.reason] if result.reason else []
        if reasons:
            self._reasons += reasons
            self._checks["logits"] = {"passed": False, "reason": "; ".join(reasons), **figures}
        else:
            self.add("logits", "", **figures)
        return model

    def check_continuations(
        self, theirs: Sequence[list[int]], model: LanguageModel, chat_format: ChatFormat
    ) -> None:
        """Compare greedy texts up to their end token."""
        reasons, figures = [], []
        for prompt, other in zip(self._samples.prompts, theirs, strict=True):
            sequence = make_sequence("", [*prompt], chat_format, 0)
            limit = self._samples.max_tokens
            sampling = Sampling(max_tokens=limit, temperature=0.0, top_k=0)
            for _ in generate(model, chat_format, [sequence], sampling):
                pass
            own = sequence.ids[len(prompt) :]
            has_ended = bool(other) and other[-1] in chat_format.end_tokens
            tokens = other[:-1] if has_ended else other
            figure: dict[str, Any] = {"tokens": len(own), "ends": sequence.finish_reason == "end"}
            if tokens != own or has_ended != figure["ends"]:
                equal = next(
                    (i for i, (a, b) in enumerate(zip(own, tokens, strict=False)) if a != b),
                    min(len(own), len(tokens)),
                )
                gap = self._find_gap(model, [*prompt, *own[:equal]])
                figure |= {"equal_tokens": equal, "gap": gap}
                if gap > 2 * self._bound:
                    reasons.append(
                        f"continues a prompt of {len(prompt)} tokens otherwise than weft from its "
                        f"token {equal + 1} on, where the likeliest token leads by {gap:.2g}"
                    )
            figures.append(figure)
        self.add("greedy", "; ".join(reasons), prompts=figures)

    @staticmethod
    def _find_gap(model: LanguageModel, ids: list[int]) -> float:
        """Return the difference of the two largest logits of the next token."""
        last = compute_logits(model, [ids])[0][-1].topk(2).values
        return float(last[0] - last[1])

    def write(self, out: Path, dtype: torch.dtype) -> str:
        """Write `PROOF_FILE`; return a message, or raise `ProofFailed` with the reasons."""
        tree = {
            "passed": not self._reasons,
            "step": checkpoint_step(self._checkpoint.path),
            "dtype": str(dtype).removeprefix("torch."),
            "sequences": {"origin": self._samples.origin, "count": len(self._samples.sequences)},
            "checks": self._checks,
            "versions": self.versions,
        }
        (out / PROOF_FILE).unlink(missing_ok=True)
        write_json(out / PROOF_FILE, tree)
        versions = ", ".join(
            f"{name} {self.versions[name]}"
            for name in ("transformers", "peft")
            if name in self.versions
        )
        if self._reasons:
            reasons = "".join(f"\n  it {reason}" for reason in self._reasons)
            raise ProofFailed(
                f"{out}: the export is not what the run is, by {versions or 'transformers'}:"
                f"{reasons}\n  {out / PROOF_FILE} has the figures."
            )
        outputs, greedy = "scores", ""
        if not self._checkpoint.has_score_head:
            prompts = self._checks["greedy"]["prompts"]
            lengths = " and ".join(str(each["tokens"]) for each in prompts)
            ends = sum(each["ends"] for each in prompts)
            outputs, greedy = "logits", f"greedy texts of {lengths} tokens are equal, {ends} of "
            greedy += f"{len(prompts)} to an end token; "
        return (
            f"proved with {versions}: {outputs} differ by {self._difference:.1e} (bound "
            f"{self._bound:.1e}) on {self._samples.origin}; {greedy}all "
            f"{self._checks['tensors']['tensors']} tensors are used. See {out / PROOF_FILE}"
        )


# --------------------------------------------------------------------------- weft's model


def make_language_model(module: nn.Module, checkpoint: CheckpointRef) -> LanguageModel:
    """Wrap a module of this process."""
    return LanguageModel(module, checkpoint.family, checkpoint.config, None)


@torch.no_grad()
def store_weights(module: nn.Module, weights: Mapping[str, Weight]) -> None:
    """Copy weights into the module of the same names."""
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    for name, weight in weights.items():
        if name in tensors:
            tensors[name].copy_(torch.cat([*weight.read()]).view_as(tensors[name]))


@torch.no_grad()
def round_weights(
    module: nn.Module, checkpoint: CheckpointRef, dtype: torch.dtype, adapter: bool
) -> None:
    """Round a module's weights as in the files; of an adapter, only its own."""
    tensors = list_hf_tensors(checkpoint.family, checkpoint.config).values()
    exact = {name for tensor in tensors if tensor.dtype is not None for name in tensor.names}
    for name, param in module.named_parameters():
        if name not in exact and (".lora_" in name or not adapter):
            param.copy_(param.to(dtype))


def compute_logits(model: LanguageModel, sequences: Sequence[list[int]]) -> list[Tensor]:
    """Return the logits [T, V] of each sequence, or its score [1, 1]."""
    results = []
    for ids in sequences:
        indices = torch.arange(len(ids))
        if getattr(model.config, "score_head", False):
            indices = indices[-1:]
        results.append(model.logits(torch.tensor([ids]), torch.zeros_like(indices), indices, None))
    return results


def measure_sensitivity(
    model: LanguageModel, sequences: Sequence[list[int]], logits: Sequence[Tensor]
) -> list[Tensor]:
    """Return how far small random changes of the embeddings move the logits: [T] each."""
    generator = torch.Generator().manual_seed(0)

    def perturb(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        signs = torch.randint(0, 2, output.shape, generator=generator) * 2 - 1
        return output * (1 + PERTURBATION * signs)

    hook = model.module.get_submodule("embed_tokens").register_forward_hook(perturb)
    results = [torch.zeros(len(each)) for each in logits]
    try:
        for _ in range(NUM_PERTURBED):
            for i, changed in enumerate(compute_logits(model, sequences)):
                moved = (changed - logits[i]).abs().amax(dim=-1)
                results[i] = torch.maximum(results[i], moved)
    finally:
        hook.remove()
    return results


class Comparison(NamedTuple):
    """Largest difference of logits, positions that decide nothing, and why it fails."""

    difference: float
    undecided: int
    reason: str


def compare(
    theirs: Sequence[Tensor], ours: Sequence[Tensor], sensitive: Sequence[Tensor], bound: float
) -> Comparison:
    """Compare logits where rounding does not decide them."""
    moved = torch.cat(
        [(a - b).abs().amax(dim=-1) for a, b in zip(theirs, ours, strict=True)]
    ).nan_to_num(math.inf)
    decides = torch.cat([*sensitive]) <= bound
    undecided = int((~decides).sum())
    if decides.float().mean() < MIN_DECIDING:
        text = f"cannot be compared: rounding alone moves the logits of {undecided} of "
        return Comparison(float(moved.max()), undecided, f"{text}{len(moved)} tokens")
    difference = float(moved[decides].max())
    reason = ""
    if not difference <= bound:
        reason = f"computes other logits: they differ by {difference:.2g}, more than {bound:.2g}"
    return Comparison(difference, undecided, reason)
