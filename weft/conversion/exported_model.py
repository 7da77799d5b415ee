"""Compute with an exported directory as its users do, in a separate process.

`weft.conversion.export_proof` writes the request and compares the answer with weft's own model.
Only transformers, and PEFT for adapters, read the directory here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LOGITS = "logits.pt"  # beside the answer: [T, V] of each sequence, float32


def load_model(request: dict[str, Any], answer: dict[str, Any]) -> Any:
    """Load the model in float32; list the tensors without a place or a value."""
    import transformers

    model_path = request["base"] or request["directory"]
    config = transformers.AutoConfig.from_pretrained(model_path)
    known: Any = transformers.AutoModelForCausalLM
    if request["has_scores"]:
        known = transformers.AutoModelForSequenceClassification
        if request["base"]:  # of an adapter; its padding is that of texts
            config.num_labels, config.pad_token_id = 1, None
    model_class = known._model_mapping[type(config)]
    # Lists of names about which transformers says nothing.
    for silent in ("_keys_to_ignore_on_load_unexpected", "_keys_to_ignore_on_load_missing"):
        setattr(model_class, silent, None)
    options: dict[str, Any] = {"dtype": torch.float32, "output_loading_info": True}
    if int(transformers.__version__.partition(".")[0]) >= 5:
        # Its kernel for experts refuses matrices of uneven widths on a CPU.
        options["experts_implementation"] = "eager"
    model, info = model_class.from_pretrained(model_path, config=config, **options)
    names = ("missing_keys", "unexpected_keys", "mismatched_keys")
    answer["loading"] = {name: sorted(map(str, info[name])) for name in names}
    if request["base"]:
        add_rows(model, request["rows"])
        model = load_adapter(model, request["directory"], answer)
    # Tied weights count once; copies that the model derives from its configuration do not count.
    state = model.state_dict(keep_vars=True).values()
    answer["num_elements"] = sum({id(each): each.numel() for each in state}.values())
    return model.eval()


def add_rows(model: Any, rows: int) -> None:
    """Resize a base model to the rows of the run; new ones are the mean.

    transformers adds noise to the mean, and so do programs that load the adapter.
    """
    old = model.get_input_embeddings().weight.shape[0]
    if rows <= old:
        return
    model.resize_token_embeddings(rows, mean_resizing=False)
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        table = layer.weight.data
        table[old:] = table[:old].double().mean(0).to(table.dtype)


def load_adapter(model: Any, directory: str, answer: dict[str, Any]) -> Any:
    """Add an adapter to its base model."""
    import warnings

    import peft
    from peft.utils import load_peft_weights, set_peft_model_state_dict

    answer["versions"]["peft"] = peft.__version__
    with warnings.catch_warnings():
        # PEFT looks for patterns in modules only, but applies them to parameters, too.
        warnings.filterwarnings("ignore", r".*pattern keys did not match any targeted module")
        model = peft.get_peft_model(model, peft.PeftConfig.from_pretrained(directory))
    result = set_peft_model_state_dict(model, load_peft_weights(directory, device="cpu"))
    answer["loading"] = {
        "missing_keys": sorted(name for name in result.missing_keys if "lora_" in name),
        "unexpected_keys": sorted(result.unexpected_keys),
        "mismatched_keys": [],
    }
    return model


def encode_texts(request: dict[str, Any], answer: dict[str, Any]) -> None:
    """Add the token ids of texts, and of conversations up to the next answer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(request["directory"])
    answer["texts"] = [list(tokenizer(text)["input_ids"]) for text in request["texts"]]
    answer["conversations"] = []
    for messages in request["conversations"]:
        try:
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True, **request["variables"]
            )["input_ids"]
        except Exception as error:  # a template raises any
            answer["conversations"].append(f"{type(error).__name__}: {error}")
        else:
            answer["conversations"].append(list(ids))


@torch.no_grad()
def compute(request: dict[str, Any], answer: dict[str, Any]) -> dict[str, Tensor]:
    """Return the logits of the sequences; add greedy continuations of prompts."""
    if request["has_scores"]:
        return compute_scores(request, answer)
    from transformers import GenerationConfig

    settings = GenerationConfig.from_pretrained(request["directory"])
    ends = settings.eos_token_id
    answer["end_tokens"] = [ends] if isinstance(ends, int) else list(ends or [])
    model = load_model(request, answer)
    logits = {}
    for i, ids in enumerate(request["sequences"]):
        logits[str(i)] = model(torch.tensor([ids])).logits[0].float().contiguous()
    vocab_size = logits["0"].shape[-1]
    greedy = GenerationConfig(
        do_sample=False,
        max_new_tokens=request["max_tokens"],
        eos_token_id=answer["end_tokens"] or None,
        pad_token_id=(answer["end_tokens"] or [0])[0],
        # Rows of the head that pad it to a rounder size are no tokens.
        suppress_tokens=[*range(request["vocab_size"], vocab_size)] or None,
    )
    answer["continuations"] = []
    for ids in request["prompts"]:
        prompt = torch.tensor([ids])
        out = model.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), generation_config=greedy
        )
        answer["continuations"].append(out[0, len(ids) :].tolist())
    return logits


@torch.no_grad()
def compute_scores(request: dict[str, Any], answer: dict[str, Any]) -> dict[str, Tensor]:
    """Return a reward model's score of each sequence, at its last token, [1, 1]."""
    model = load_model(request, answer)
    rows: list[list[int]] = request["sequences"]
    width, padding = max(map(len, rows)), model.config.pad_token_id
    if padding is None:  # then each row is computed alone
        scores = torch.cat([model(torch.tensor([ids])).logits for ids in rows])
    else:
        padded = torch.tensor([ids + [padding] * (width - len(ids)) for ids in rows])
        mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in rows])
        scores = model(padded, attention_mask=mask).logits
    return {str(i): score[None].float().contiguous() for i, score in enumerate(scores)}


def main(request_path: Path, answer_path: Path) -> None:
    """Answer a request; an error is an answer, too."""
    import transformers

    request = json.loads(request_path.read_text("utf-8"))
    answer: dict[str, Any] = {"versions": {"transformers": transformers.__version__}}
    try:
        encode_texts(request, answer)
        torch.save(compute(request, answer), answer_path.with_name(LOGITS))
    except Exception as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    answer_path.write_text(json.dumps(answer), "utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
