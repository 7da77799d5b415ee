"""What weft offers in place of a name that it does not know."""

from __future__ import annotations

import re

import pytest

from weft.config.errors import find_misspelled, suggest
from weft.config.peer_names import load_peer_answers
from weft.config.reader import nearest_key, recipe_names
from weft.config.schema import SECTIONS, keys
from weft.models import FAMILIES
from weft.monitor.faults import SITES
from weft.monitor.trackers import SINKS
from weft.optim.optimizer import OPTIMIZERS, SCHEDULES
from weft.planning.devices import load_clusters
from weft.planning.pipeline_schedule import SCHEDULES as PIPELINE_SCHEDULES


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("train.stesp", "train.steps"),
        ("train.step", "train.steps"),
        ("train.sqe_len", "train.seq_len"),
        ("train.seqlen", "train.seq_len"),
        ("seq_ln", "train.seq_len"),
        ("data.tokeniser", "data.tokenizer"),
        ("parralel.tp", "parallel.tp"),
        ("train.globl_batch_size", "train.global_batch_size"),
        ("optim.wieght_decay", "optim.weight_decay"),
        ("optim.grad_norm_max", "optim.max_grad_norm"),
        ("checkpoint.intervall", "checkpoint.interval"),
        ("train.tp", "parallel.tp"),
    ],
)
def test_nearest_key_misspelled_name_is_offered_its_key(typed: str, meant: str) -> None:
    assert nearest_key(typed) == f"did you mean {meant!r}?"


def test_nearest_key_misspelled_name_of_another_project_is_offered_the_key() -> None:
    advice = nearest_key("gradient_acumulation_steps")
    assert advice.startswith("did you mean 'gradient_accumulation_steps'? Set train.global_batch")
    advice = nearest_key("--train.sequence_lenght")
    assert advice == "did you mean 'sequence_length'? Use train.seq_len"


@pytest.mark.parametrize(
    "name",
    [
        "optim.max_lr_ratio",
        "optim.beta3",
        "parallel.dp",
        "parallel.sp",
        "train.eval_batches",
        "train.precision",
        "data.packed",
        "monitor.report_interval",
        "train.microbatch_seed",
    ],
)
def test_nearest_key_another_thing_is_offered_no_key(name: str) -> None:
    assert "did you mean" not in nearest_key(name)


@pytest.mark.parametrize(
    "name",
    [
        "--rampup-batch-size",
        "checkpoint.keep_every",
        "train.eval_tasks",
        "monitor.gradient_histogram",
        "model.attention_dropout",
    ],
)
def test_nearest_key_feature_that_weft_lacks_is_named_as_such(name: str) -> None:
    assert nearest_key(name).startswith("Not supported"), name


def test_nearest_key_answers_belong_to_no_key() -> None:
    """A name in the table of missing features is not the name of a key of its section."""
    known = set(keys())
    for name in load_peer_answers():
        assert name not in known
        section, dot, _ = name.partition(".")
        assert not dot or section in SECTIONS, name


def name_tables() -> dict[str, list[str]]:
    by_section = {
        section: [key for key in keys() if key.startswith(f"{section}.")] for section in SECTIONS
    }
    return by_section | {
        "recipes": recipe_names(),
        "sections": list(SECTIONS),
        "families": [name for name in FAMILIES if name != "mixtral"],  # one letter from mistral
        "devices": list(load_clusters()[0]),
        "optimizers": list(OPTIMIZERS),
        "schedules": list(SCHEDULES),
        "pipeline schedules": list(PIPELINE_SCHEDULES),
        "trackers": list(SINKS),
        "fault sites": list(SITES),
    }


@pytest.mark.parametrize("table", name_tables())
def test_find_misspelled_known_name_is_never_offered_for_another(table: str) -> None:
    """If weft lacked one of its own names, it would not offer another of them."""
    names = name_tables()[table]
    offers = {name: find_misspelled(name, [n for n in names if n != name]) for name in names}
    assert {name: offer for name, offer in offers.items() if offer} == {}


def test_find_misspelled_swapped_letters_of_any_key_are_recognized() -> None:
    """Two letters swapped in a word of at least five letters: the key is found, or none is."""
    found = total = 0
    for key in keys():
        section, _, last = key.partition(".")
        inside = [other for other in keys() if other.startswith(f"{section}.")]
        for match in re.finditer("[a-z]{5,}", last):
            middle = match.start() + len(match[0]) // 2
            swapped = last[: middle - 1] + last[middle] + last[middle - 1] + last[middle + 1 :]
            if swapped == last:
                continue
            offer = find_misspelled(f"{section}.{swapped}", inside)
            assert offer in ("", key), (swapped, offer)
            found, total = found + (offer == key), total + 1
    assert found > 0.95 * total > 100


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("adam", ["adamw", "muon"]),
        ("DualPipe", ["1F1B", "DualPipeV"]),
        ("H20", ["H100", "H200"]),
        ("cosine_with_restarts", ["cosine", "linear"]),
        ("llama3-7b", ["llama3-70b", "llama3-8b"]),
    ],
)
def test_suggest_similar_name_of_another_thing_lists_all(name: str, known: list[str]) -> None:
    assert suggest(name, known) == f"use one of {', '.join(known)}"
