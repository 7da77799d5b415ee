"""Packing of documents into sequences: none lost, none cut, little padding."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.chat import LLAMA, message, write_lines, write_tokenizer
from weft.config.schema import DataSection
from weft.data.chat import ChatEncoder
from weft.data.chat_rows import RowFormat, parse_line
from weft.data.chat_template import load_chat_template
from weft.data.conversations import check_conversations
from weft.data.dataset import Dataset, open_dataset
from weft.data.inspect import describe_packing, inspect_dataset
from weft.data.loader import (
    IGNORE_INDEX,
    Batch,
    LabeledAnswers,
    Loader,
    Mixture,
    Pairs,
    build_mixture,
)
from weft.data.packing import pack_best_fit, pack_split, swap_answers
from weft.data.prepare import prepare_data


def rows_of(lengths: np.ndarray[Any, Any], capacity: int, seed: int = 0) -> list[list[int]]:
    order, firsts = pack_best_fit(lengths, capacity, seed)
    return [order[a:b].tolist() for a, b in pairwise(firsts)]


# --------------------------------------------------------------------------- best fit


@pytest.mark.parametrize("capacity", [1, 7, 100])
@pytest.mark.parametrize("count", [0, 1, 500])
def test_packing_each_document_is_in_one_row(capacity: int, count: int) -> None:
    lengths = np.random.default_rng(0).integers(1, capacity + 1, count)
    rows = rows_of(lengths, capacity)
    assert sorted(document for row in rows for document in row) == list(range(count))
    assert all(0 < lengths[row].sum() <= capacity for row in rows)


def test_packing_is_best_fit_decreasing() -> None:
    """Compare with the definition, which tries every row."""
    for seed in range(20):
        lengths = np.random.default_rng(seed).integers(1, 31, 60)
        rooms: list[int] = []
        for length in sorted(lengths.tolist(), reverse=True):
            fitting = [room for room in rooms if room >= length]
            if fitting:
                rooms[rooms.index(min(fitting))] -= length
            else:
                rooms.append(30 - length)
        result = [30 - lengths[row].sum() for row in rows_of(lengths, 30)]
        assert sorted(result) == sorted(rooms)


def test_packing_rows_depend_on_the_seed_only() -> None:
    lengths = np.random.default_rng(0).integers(1, 30, 300)
    assert rows_of(lengths, 64) == rows_of(lengths.copy(), 64)
    assert rows_of(lengths, 64) != rows_of(lengths, 64, seed=1)
    assert len(rows_of(lengths, 64)) == len(rows_of(lengths, 64, seed=1))


def test_packing_many_documents_is_quick_and_tight() -> None:
    lengths = np.random.default_rng(0).lognormal(5.5, 1, 200_000).astype(int).clip(1, 4096)
    start_time = time.perf_counter()
    order, firsts = pack_best_fit(lengths, 4096, 0)
    assert time.perf_counter() - start_time < 20  # 0.5 s on a quiet core
    assert lengths.sum() / (4096 * (len(firsts) - 1)) > 0.999
    assert len(order) == len(lengths)


# --------------------------------------------------------------------------- rows


def section(path: Path, tokenizer: Path, **extra: Any) -> DataSection:
    values = {"path": str(path), "tokenizer": str(tokenizer), "format": "chat"} | extra
    return DataSection.model_validate(values)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("chat")
    write_tokenizer(directory / "model", LLAMA)
    lines = []
    for i in range(40):
        turns = [message("user", "it? " * (i % 7 + 1)), message("assistant", "is " * (i % 5 + 1))]
        lines.append({"messages": turns * (i % 3 + 1)})
    write_lines(directory / "chat.jsonl", lines)
    pairs = [
        {"prompt": "it " * (i % 5), "chosen": "is it " * (i + 1), "rejected": "was"}
        for i in range(12)
    ]
    write_lines(directory / "pairs.jsonl", pairs)
    answers = [
        {"prompt": "it " * (i % 5), "completion": "is it " * (i + 1), "label": i % 3 > 0}
        for i in range(12)
    ]
    write_lines(directory / "answers.jsonl", answers)
    return directory


def open_prepared(data_dir: Path, name: str, **extra: Any) -> tuple[Dataset, DataSection]:
    chosen = section(data_dir / name, data_dir / "model/tokenizer.json", **extra)
    return prepare_data(chosen, data_dir / "cache"), chosen


def full_batch(mixture: Mixture) -> Batch:
    [samples] = mixture.sources
    return samples.get_batch(np.arange(len(samples)))


def documents(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """Return tokens and targets of each document in a batch, without padding."""
    results = []
    assert batch.documents_BT is not None
    for tokens, targets, of in zip(*batch[:3], strict=True):
        for number in range(int(of.max()) + 1):
            mask = of == number
            if (targets[mask] != IGNORE_INDEX).any():
                results.append((tokens[mask].tolist(), targets[mask].tolist()))
    return results


def test_packing_rows_hold_each_conversation_once(data_dir: Path) -> None:
    text, chosen = open_prepared(data_dir, "chat.jsonl")
    batch = full_batch(build_mixture(text, "train", 160, chosen, 3))
    store = text.sources[0].store
    stream, loss_mask = store.tokens("train"), store.loss_mask("train")
    assert loss_mask is not None
    begin, expected = 0, []
    for end in store.index("train")[:, 0].tolist():
        at, size = np.array([begin]), end - begin
        tokens, mask = stream.read_windows(at, size)[0], loss_mask.read_windows(at, size)[0]
        targets = np.where(mask[1:] == 1, tokens[1:], IGNORE_INDEX)
        expected.append((tokens[:-1].tolist(), targets.tolist()))
        begin = end
    assert sorted(documents(batch)) == sorted(expected)
    # Positions count from 0 in each document; no document is split.
    assert batch.documents_BT is not None
    assert batch.positions_BT is not None
    for of, positions in zip(batch.documents_BT, batch.positions_BT, strict=True):
        assert (of.diff() >= 0).all()
        for number in range(int(of.max()) + 1):
            count = int((of == number).sum())
            assert positions[of == number].tolist() == list(range(count))


def test_packing_line_has_the_correct_numbers(data_dir: Path) -> None:
    text, chosen = open_prepared(data_dir, "chat.jsonl")
    store = text.sources[0].store
    rows = pack_split(store, "train", 160, chosen, 0)
    batch = full_batch(build_mixture(text, "train", 160, chosen, 0))
    used = sum(len(tokens) for tokens, _ in documents(batch))
    assert rows.fill_fraction(160) == pytest.approx(used / (160 * len(rows)))
    assert rows.fill_fraction(160) > 0.9
    line = describe_packing(store, 160, chosen, 0)
    assert f"in {len(rows)} sequences of 160, {rows.fill_fraction(160):.1%} full" in line
    targets = sum((batch.targets_BT != IGNORE_INDEX).sum(1)).item()  # type: ignore[union-attr]
    assert f"{targets / store.manifest.train.tokens:.0%} are trained on" in line


def test_packing_too_long_conversation_is_reported_by_file_and_line(data_dir: Path) -> None:
    text, chosen = open_prepared(data_dir, "chat.jsonl")
    store = text.sources[0].store
    [error] = check_conversations(store, 100, chosen)
    assert error.key == "train.seq_len"
    writer = ChatEncoder(chosen.tokenizer, load_chat_template(chosen))
    lines = (data_dir / "chat.jsonl").read_bytes().splitlines()
    long = {}
    for number, line in enumerate(lines, 1):
        [example] = parse_line(line, RowFormat())
        [result] = writer.encode(writer.render(example))
        if len(result.tokens) > 101:
            long[number] = len(result.tokens) - 1
    number, size = next(iter(long.items()))
    assert f"{len(long)} conversations:\n  chat.jsonl:{number}: {size} tokens\n" in error.rule
    assert f"use {max(long.values())}" in error.remedy
    assert check_conversations(store, max(long.values()), chosen) == []

    skip = chosen.model_copy(update={"overlong": "skip"})
    assert check_conversations(store, 100, skip) == []
    index = store.index("train")
    local = [line for _, _, line in index.tolist() if line in long]
    rows = pack_split(store, "train", 100, skip, 0)
    assert (rows.num_skipped, rows.num_truncated) == (len(local), 0)
    assert len(rows.document_order) == len(index) - len(local)
    assert f"; {len(local)} too long and skipped" in describe_packing(store, 100, skip, 0)

    truncate = chosen.model_copy(update={"overlong": "truncate"})
    rows = pack_split(store, "train", 100, truncate, 0)
    assert (rows.num_skipped, rows.num_truncated) == (0, len(local))
    assert len(rows.document_order) == len(index)
    batch = full_batch(build_mixture(text, "train", 100, truncate, 0))
    assert sum(len(tokens) == 100 for tokens, _ in documents(batch)) >= len(local)
    [error] = check_conversations(store, 5, skip)
    assert "all" in error.rule


def test_packing_store_of_another_format_is_refused(data_dir: Path) -> None:
    text, chosen = open_prepared(data_dir, "chat.jsonl")
    store = text.sources[0].store
    [error] = check_conversations(store, 1024, DataSection(path=str(store.path)))
    assert (error.key, error.remedy) == ("data.format", "use chat")
    assert check_conversations(store, 1024, chosen) == []


def test_packing_pairs_share_rows_and_stay_together(data_dir: Path) -> None:
    text, chosen = open_prepared(data_dir, "pairs.jsonl", format="preferences")
    mixture = build_mixture(text, "train", 128, chosen, 0)
    [pairs] = mixture.sources
    assert isinstance(pairs, Pairs)
    batch = full_batch(mixture)
    store, order = text.sources[0].store, pairs.packed.packed.document_order
    num_pairs = store.manifest.train.documents // 2
    assert sorted(order.tolist()) == list(range(2 * num_pairs))
    assert pairs.num_groups == num_pairs > 1.5 * len(batch.tokens_BT)
    assert pairs.packed.packed.fill_fraction(128) > 0.7
    rows = [
        (row, place, pair)
        for row in range(len(pairs))
        for place, pair in enumerate(order[slice(*pairs.packed.packed.offsets[row : row + 2])][::2])
    ]
    assert max(place for _, place, _ in rows) == pairs.width - 1 > 0
    writer = ChatEncoder(chosen.tokenizer, load_chat_template(chosen))
    lines = (data_dir / "pairs.jsonl").read_bytes().splitlines()
    for row, place, document in rows:
        number = int(store.index("train")[document, 2])
        examples = parse_line(lines[number - 1], RowFormat(preferences=True))
        for answer, result in enumerate(
            writer.encode([each for e in examples for each in writer.render(e)])
        ):
            assert batch.documents_BT is not None
            mask = batch.documents_BT[row] == 2 * place + answer
            assert batch.tokens_BT[row, mask].tolist() == result.tokens[:-1].tolist()
            targets = np.where(result.loss_mask, result.tokens, IGNORE_INDEX)[1:]
            assert batch.targets_BT[row, mask].tolist() == targets.tolist()
    [error] = check_conversations(store, 60, chosen)
    assert "pairs" in error.rule
    skip = chosen.model_copy(update={"overlong": "skip"})
    packed = pack_split(store, "train", 60, skip, 0)
    assert packed.num_skipped == num_pairs - len(packed.document_order) // 2 > 0
    [error] = check_conversations(store, 60, chosen.model_copy(update={"overlong": "truncate"}))
    assert error.key == "data.overlong"


def test_packing_labeled_answers_have_an_answer_to_another_prompt(data_dir: Path) -> None:
    """The swapped conversation is what the template would write."""
    text, chosen = open_prepared(data_dir, "answers.jsonl", format="unpaired")
    store, mixture = text.sources[0].store, build_mixture(text, "train", 64, chosen, 0)
    [samples] = mixture.sources
    assert isinstance(samples, LabeledAnswers)
    batch = full_batch(mixture)
    assert batch.labels_BP is not None
    assert batch.documents_BT is not None
    swapped = batch.with_swapped_answers()
    assert swapped.documents_BT is not None
    writer = ChatEncoder(chosen.tokenizer, load_chat_template(chosen))
    rows = [json.loads(line) for line in (data_dir / "answers.jsonl").read_bytes().splitlines()]
    numbers = (store.index("train")[:, 2] - 1).tolist()  # lines of the documents
    packed, found = samples.packed.packed, []
    for sample in range(len(samples)):
        documents = packed.documents_of(sample).tolist()
        for place, document in enumerate(documents):
            found.append(document)
            row, other = rows[numbers[document]], rows[numbers[document - 1]]
            assert batch.labels_BP[sample, place] == row["label"]
            for each, answer in ((batch, row), (swapped, other)):
                line = {"prompt": row["prompt"], "response": answer["completion"]}
                [example] = parse_line(json.dumps(line).encode(), RowFormat())
                [result] = writer.encode(writer.render(example))
                size = 64 - int((each.documents_BT[sample] < place).sum())  # type: ignore[operator]
                mask = each.documents_BT[sample] == place  # type: ignore[index]
                assert each.tokens_BT[sample, mask].tolist() == result.tokens[:-1].tolist()[:size]
                targets = np.where(result.loss_mask, result.tokens, IGNORE_INDEX)[1:]
                assert each.targets_BT[sample, mask].tolist() == targets.tolist()[:size]
    assert sorted(found) == list(range(len(numbers)))
    shown = [line for line in inspect_dataset(text, 3) if line.startswith("-- ")]
    labels = [rows[int(re.search(r":(\d+) ", line)[1]) - 1]["label"] for line in shown]  # type: ignore[index]
    assert [line.endswith("(good)") for line in shown] == labels
    assert samples.width > 1
    skip = chosen.model_copy(update={"overlong": "skip"})
    assert 0 < pack_split(store, "train", 40, skip, 0).num_skipped < len(numbers)
    [error] = check_conversations(store, 64, chosen.model_copy(update={"overlong": "truncate"}))
    assert error.key == "data.overlong"


def test_packing_two_answers_of_a_line_get_those_of_the_line_before(data_dir: Path) -> None:
    """They have the same prompt, so the answer of one is no other answer of the other."""
    text, _ = open_prepared(data_dir, "pairs.jsonl", format="unpaired")
    store = text.sources[0].store
    partners, count = swap_answers(store, "train").partners, store.manifest.train.documents
    assert partners.tolist() == [(n - 2) % count for n in range(count)]
    assert store.labels("train").tolist() == [1, 0] * (count // 2)


def test_packing_without_a_pair_that_fits_has_no_sequence(data_dir: Path) -> None:
    text, chosen = open_prepared(data_dir, "pairs.jsonl", format="preferences")
    [pairs] = build_mixture(text, "validation", 4, chosen, 0).sources
    assert isinstance(pairs, Pairs)
    assert (len(pairs), pairs.width) == (0, 0)


def test_packing_each_pair_carries_its_references(data_dir: Path) -> None:
    text, chosen = open_prepared(data_dir, "pairs.jsonl", format="preferences")
    [pairs] = build_mixture(text, "train", 128, chosen, 0).sources
    assert isinstance(pairs, Pairs)
    known = torch.arange(1, 1 + 2.0 * pairs.num_groups).view(-1, 2)
    order, offsets = pairs.packed.packed.document_order, pairs.packed.packed.offsets
    loader = Loader(
        Mixture([replace(pairs, references=known)]),
        seed=0,
        global_batch_size=len(pairs),
        dp_rank=0,
        dp_size=1,
        microbatch_size=2,
    )
    plain = full_batch(Mixture([pairs]))
    for batch in loader.get_microbatches(0):
        assert batch.references_BP2 is not None
        for row, references in zip(batch.tokens_BT, batch.references_BP2, strict=True):
            [number] = (plain.tokens_BT == row).all(1).nonzero()[0].tolist()
            own = known[order[offsets[number] : offsets[number + 1] : 2] // 2]
            assert references[: len(own)].tolist() == own.tolist()
            assert not references[len(own) :].any()


# --------------------------------------------------------------------------- text, and mixtures


def test_packing_best_fit_cuts_only_documents_longer_than_a_row(text_dir: Path) -> None:
    chosen = DataSection(path=str(text_dir), vocab_size=512, packing="best_fit")
    text = prepare_data(chosen, text_dir.parent / "best-fit")
    mixture = build_mixture(text, "train", 512, chosen, 0)
    store = text.sources[0].store
    stream = store.tokens("train")
    tokens = stream.read_windows(np.array([0]), len(stream))[0]
    batch = full_batch(mixture)
    targets = batch.targets_BT[batch.targets_BT != IGNORE_INDEX]
    # Every token except the first is a target once: the separator before it starts a document.
    ends = np.flatnonzero(tokens == store.manifest.separator)
    assert np.array_equal(np.sort(targets.numpy()), np.sort(tokens[1:]))
    assert len(ends) == store.manifest.train.documents
    longest = max(np.diff(ends, prepend=-1))
    full = full_batch(build_mixture(text, "train", int(longest), chosen, 0))
    assert full.documents_BT is not None
    result = documents(full)
    assert len(result) == len(ends)
    starts = [store.manifest.separator, tokens[0]]
    assert {inputs[0] for inputs, _ in result} <= set(starts)
    assert "full" in describe_packing(store, 512, chosen, 0)


def test_packing_mixture_of_text_and_conversations_is_read(data_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_text("it is what it is\n" * 300)
    tokenizer = data_dir / "model/tokenizer.json"
    plain = DataSection(path=str(tmp_path / "plain.txt"), tokenizer=str(tokenizer))
    store = prepare_data(plain, tmp_path / "cache").sources[0].store
    mixed = DataSection.model_validate(
        {
            "mixture": {str(data_dir / "chat.jsonl"): 3, str(store.path): 1},
            "tokenizer": str(tokenizer),
            "format": "chat",
        }
    )
    text = prepare_data(mixed, tmp_path / "cache")
    assert open_dataset(text.path) == text
    assert [source.store.manifest.kind for source in text.sources] == ["chat", "text"]
    mixture = build_mixture(text, "train", 160, mixed, 0)
    batch = mixture.get_batch(np.array([0, 1, 0]), np.array([0, 2, 1]))
    assert batch.sources_B is not None
    assert batch.sources_B.tolist() == [0, 1, 0]
    assert batch.documents_BT is not None
    single = mixture.sources[0].get_batch(np.array([0, 1]))
    for ours, theirs in zip(batch[:4], single[:4], strict=True):
        assert torch.equal(ours[[0, 2]], theirs)  # type: ignore[index]


def test_packing_one_store_serves_each_row_length(data_dir: Path) -> None:
    text, _ = open_prepared(data_dir, "chat.jsonl")
    assert open_prepared(data_dir, "chat.jsonl", overlong="skip")[0].path == text.path
    assert open_prepared(data_dir, "chat.jsonl", validation_fraction=0.2)[0].path != text.path


def test_documents_of_one_length_are_placed_as_one_by_one() -> None:
    random = np.random.default_rng(5)
    for seed in range(60):
        capacity = int(random.integers(1, 60))
        longest = max(1, capacity // int(random.integers(1, 6)))
        lengths = random.integers(1, longest + 1, int(random.integers(0, 120)))
        order, offsets = pack_best_fit(lengths, capacity, seed)
        found = [order[a:b].tolist() for a, b in pairwise(offsets)]
        assert found == pack_one_by_one(lengths, capacity, seed)


def pack_one_by_one(lengths: Any, capacity: int, seed: int) -> list[list[int]]:
    """Pack each document into the sequence that it fills best, the last of several equal ones."""
    shuffled = np.random.default_rng([seed, len(lengths)]).permutation(len(lengths))
    sequences: list[list[int]] = []
    with_space: dict[int, list[int]] = {}
    for document in shuffled[np.argsort(-lengths[shuffled], kind="stable")].tolist():
        length = int(lengths[document])
        if spaces := [space for space, found in with_space.items() if found and space >= length]:
            space = min(spaces)
            number = with_space[space].pop()
        else:
            space, number = capacity, len(sequences)
            sequences.append([])
        sequences[number].append(document)
        with_space.setdefault(space - length, []).append(number)
        with_space.pop(0, None)
    return sequences
