"""Text from a trained model, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import nn

from weft.checkpoint.manifest import checkpoint_step, checkpoints, read_manifest
from weft.checkpoint.store import load, load_frozen
from weft.data.tokenizer import load_tokenizer, separator_id
from weft.job import InvalidJob, Job, Problem, read_job
from weft.models import load_family, resolve_model
from weft.parallel.lora import apply_lora
from weft.train.setup import home_of


class Found(NamedTuple):
    """A committed checkpoint, and the run that it belongs to."""

    path: Path
    run: Path
    job: Job
    config: Any  # of the model's family


def find_checkpoint(path: Path) -> Found:
    """The checkpoint at ``path``: a run's folder, of which the newest is taken, or one checkpoint.

    Raises:
        InvalidJob: if there is none.
    """
    is_run = (path / "job.toml").is_file()
    folder = path if is_run else path.parent.parent
    found = [path]
    if (folder / "job.toml").is_file():
        job, _, problems = read_job(str(folder / "job.toml"))
        if is_run:
            found = checkpoints(home_of(job.checkpoint.dir, path))[-1:]
    if (
        not (folder / "job.toml").is_file()
        or not found
        or not (found[0] / "manifest.json").is_file()
    ):
        rule = "is neither the folder of a run with a checkpoint nor a checkpoint in one"
        raise InvalidJob([Problem("checkpoint", str(path), rule, "train first: weft train demo")])
    config, more = resolve_model(job.model.kind, job.model.preset, job.model.overrides())
    if problems or more:
        raise InvalidJob(problems + more)
    return Found(found[0], folder, job, config)


def base_of(found: Found) -> Path | None:
    """The checkpoint that has a LoRA run's frozen weights; None if its own has all.

    Raises:
        InvalidJob: if there is none.
    """
    if not found.job.lora.rank or checkpoint_step(found.path) == 0:
        return None
    name = read_manifest(found.path).get("base", "")
    base = found.path.with_name(name or "none")
    if not name or not (base / "manifest.json").is_file():
        rule = f"has adapters to {f'{name}, which is not there' if name else 'random weights'}"
        remedy = "put it back" if name else "start from weights: weft import makes a run of them"
        raise InvalidJob([Problem("checkpoint", str(found.path), rule, remedy)])
    return base


def load_checkpoint(path: Path, device: torch.device) -> tuple[nn.Module, Tokenizer, int]:
    """A model, its tokenizer and the longest row it was trained on, in tokens.

    Args:
        path: see `find_checkpoint`.

    Raises:
        InvalidJob: if there is none.
    """
    found = find_checkpoint(path)
    family, base = load_family(found.job.model.kind), base_of(found)
    with torch.device("meta"):
        model = family.build(found.config)
        if base is not None:
            apply_lora(model, family.blocks(model), found.job.lora, torch.float32)
    model.to_empty(device=device)
    if base is not None:
        load_frozen(base, [model])
    load(found.path, [model], optimizer=None)
    tokenizer, _ = load_tokenizer(found.run / "tokenizer.json")
    return model.eval(), tokenizer, found.job.train.seq_len


@torch.no_grad()
def generate(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_tokens: int,
    context: int,
    temperature: float,
    top_k: int,
    seed: int,
) -> Iterator[str]:
    """Pieces of text that continue ``prompt``, until the separator or ``max_tokens``.

    Args:
        context: tokens that the model sees at most: the newest ones.
        temperature: 0 takes the likeliest token each time.
        top_k: sample among that many likeliest tokens; 0: among all.
    """
    device = next(model.parameters()).device
    random = torch.Generator(device).manual_seed(seed)
    separator = separator_id(tokenizer, "tokenizer.json")
    # A document begins after a separator: that is how the model has seen it in training.
    ids = [separator, *tokenizer.encode(prompt, add_special_tokens=False).ids]
    shown = tokenizer.decode(ids[1:])
    for _ in range(max_tokens):
        tokens_BT = torch.tensor([ids[-context:]], device=device)
        logits_V = model(tokens_BT)[0, -1].float()
        # The model's vocabulary may be larger than the tokenizer's.
        logits_V = logits_V[: tokenizer.get_vocab_size()]
        if temperature == 0:
            chosen = int(logits_V.argmax())
        else:
            values, indices = logits_V.topk(min(top_k or len(logits_V), len(logits_V)))
            probabilities = torch.softmax((values - values.max()) / temperature, dim=-1)
            chosen = int(indices[torch.multinomial(probabilities, 1, generator=random)])
        if chosen == separator:
            return
        ids.append(chosen)
        # A character may span tokens: show text once it is whole.
        text = tokenizer.decode(ids[1:])
        if not text.endswith("\ufffd"):
            yield text[len(shown) :]
            shown = text
