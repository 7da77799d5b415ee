"""Start tokens of documents: as the model's own tokenizer adds them, in training and everywhere."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from tests.random_runs import random_run
from tests.small import small_job
from weft.config.errors import InvalidConfig
from weft.config.schema import DataSection
from weft.conversion.hf_convert import export_checkpoint
from weft.data.dataset import dataset_from_store
from weft.data.document_tokens import RECORD_FILE, format_record
from weft.data.inspect import summarize_dataset
from weft.data.loader import IGNORE_INDEX, TokenChunks, build_mixture
from weft.data.prepare import prepare_data, prepare_store
from weft.data.token_store import Store, TokenStream, open_store
from weft.data.tokenizer_training import train_tokenizer
from weft.inference.evaluate import encode_pair
from weft.inference.generate import load_chat_format
from weft.inference.inference_model import find_checkpoint
from weft.planning.plan import Machine
from weft.planning.resolve import resolve
from weft.preparation.job_checks import _check_start_tokens

TEXTS = [f"text number {n}, of some words\n" * (1 + n % 7) for n in range(40)]
SPECIAL = ("</s>", "<s>", "[gMASK]", "<sop>")
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


def make_bpe() -> Tokenizer:
    """Return a byte-level BPE tokenizer that adds nothing to a text."""
    tree = json.loads(train_tokenizer(TEXTS, 300).to_str())
    tree |= {"post_processor": None, "added_tokens": []}
    tree["model"]["vocab"]["filler"] = tree["model"]["vocab"].pop("<|endoftext|>")
    tokenizer = Tokenizer.from_str(json.dumps(tree))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    return tokenizer


def make_sentencepiece() -> Tokenizer:
    """Return a Unigram tokenizer as converted from sentencepiece."""
    pieces = ["<unk>", *SPECIAL, *sorted({*"".join(TEXTS), "\u2581"}), "\u2581text", "\u2581words"]
    tokenizer = Tokenizer(models.Unigram([(p, -float(n)) for n, p in enumerate(pieces)], 0, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    return tokenizer


def add_template(tokenizer: Tokenizer, single: str) -> Any:
    names = sorted({piece for piece in single.split() if piece != "$A"})
    pairs = [(name, tokenizer.token_to_id(name)) for name in names]
    return processors.TemplateProcessing(single, f"{single} $B", pairs)


# Post-processors of published tokenizers, and the tokens that they put before a text.
KINDS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "none": (lambda t: None, ()),
    "byte level, as Qwen": (lambda t: processors.ByteLevel(trim_offsets=False), ()),
    "template with bos, as Gemma": (lambda t: add_template(t, "<s> $A"), ("<s>",)),
    "template with bos and eos": (lambda t: add_template(t, "<s> $A </s>"), ("<s>",)),
    "template with eos, as T5": (lambda t: add_template(t, "$A </s>"), ()),
    "template with two, as GLM": (lambda t: add_template(t, "[gMASK] <sop> $A"), SPECIAL[2:]),
    "the separator, as OPT": (lambda t: add_template(t, "</s> $A"), ("</s>",)),
    "sequence, as Llama 3": (
        lambda t: processors.Sequence([processors.ByteLevel(), add_template(t, "<s> $A")]),
        ("<s>",),
    ),
    "Roberta": (
        lambda t: processors.RobertaProcessing(("</s>", t.token_to_id("</s>")), ("<s>", 257)),
        ("<s>",),
    ),
}


def write_texts(directory: Path, form: str) -> str:
    directory.mkdir(parents=True)
    if form == "jsonl":
        lines = [json.dumps({"text": text}) for text in TEXTS]
        (directory / "data.jsonl").write_text("\n".join(lines))
        return str(directory / "data.jsonl")
    for number, text in enumerate(TEXTS):
        (directory / f"{number}.txt").write_text(text)
    return str(directory)


def write_tokenizer(directory: Path, tokenizer: Tokenizer, **config: Any) -> str:
    directory.mkdir(parents=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMES, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return str(directory / "tokenizer.json")


def all_tokens(store: Store) -> list[int]:
    streams = [store.tokens("train"), store.tokens("validation")]
    return [t for s in streams for t in s.read_windows(np.array([0]), len(s))[0].tolist()]


def split_at(tokens: list[int], separator: int) -> list[list[int]]:
    """Return the documents of a stream, each with the separator at its end."""
    documents: list[list[int]] = [[]]
    for token in tokens:
        documents[-1].append(token)
        if token == separator:
            documents.append([])
    assert not documents.pop()
    return documents


@pytest.mark.parametrize("make", [make_bpe, make_sentencepiece])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["jsonl", "files"])
def test_prepare_document_has_the_ids_of_its_own_tokenizer(
    form: str, kind: str, make: Any, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = make()
    process, start = KINDS[kind]
    if kind == "Roberta":
        bos = ("<s>", tokenizer.token_to_id("<s>"))
        processor: Any = processors.RobertaProcessing(("</s>", tokenizer.token_to_id("</s>")), bos)
    else:
        processor = process(tokenizer)
    if processor is not None:
        tokenizer.post_processor = processor
    path = write_tokenizer(tmp_path / "model", tokenizer)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model", local_files_only=True)
    section = DataSection(path=write_texts(tmp_path / "text", form), tokenizer=path)
    store = prepare_store(section, tmp_path / "cache")
    separator = store.manifest.separator
    assert separator == tokenizer.token_to_id("</s>")
    expected = []
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        ids += [separator] * (ids[-1] != separator)
        expected.append(ids[1:] if ids[0] == separator else ids)  # of the document before
    assert sorted(split_at(all_tokens(store), separator)) == sorted(expected)
    assert store.manifest.start_tokens == [tokenizer.token_to_id(name) for name in start]


def prepare(tmp_path: Path, name: str, single: str, **changes: Any) -> tuple[Store, Tokenizer]:
    tokenizer = make_bpe()
    if single:
        tokenizer.post_processor = add_template(tokenizer, single)
    config = changes.pop("config", {})
    path = write_tokenizer(tmp_path / name / "model", tokenizer, **config)
    text = write_texts(tmp_path / name / "text", "jsonl")
    section = DataSection.model_validate({"path": text, "tokenizer": path, **changes})
    return prepare_store(section, tmp_path / "cache"), tokenizer


@pytest.mark.parametrize(
    ("single", "start_token", "start"),
    [
        ("<s> $A", "auto", ["<s>"]),
        ("<s> $A", True, ["<s>"]),
        ("<s> $A", False, []),
        ("", "auto", []),
        ("", True, ["<s>"]),  # that of tokenizer_config.json
        ("", False, []),
    ],
)
def test_prepare_start_token_key_decides(
    single: str, start_token: Any, start: list[str], tmp_path: Path
) -> None:
    store, tokenizer = prepare(tmp_path, "a", single, start_token=start_token)
    ids = [tokenizer.token_to_id(name) for name in start]
    assert store.manifest.start_tokens == ids
    documents = split_at(all_tokens(store), store.manifest.separator)
    assert len(documents) == len(TEXTS)
    bos = tokenizer.token_to_id("<s>")
    assert all(d[: len(ids)] == ids and (d[0] == bos) == bool(ids) for d in documents)


def test_prepare_start_token_that_no_file_names_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"data\.start_token=true needs a start token"):
        prepare(tmp_path, "a", "", start_token=True, config={"bos_token": None})


def test_prepare_other_start_token_is_another_store(tmp_path: Path) -> None:
    prepare(tmp_path, "a", "<s> $A")
    text, cache = str(tmp_path / "a/text/data.jsonl"), tmp_path / "cache"
    section = DataSection(path=text, tokenizer=str(tmp_path / "a/model/tokenizer.json"))
    stores = [
        prepare_store(section.model_copy(update={"start_token": value}), cache)
        for value in ("auto", True, False)
    ]
    assert stores[0].path == stores[1].path != stores[2].path
    assert stores[0].fingerprint != stores[2].fingerprint
    # The prepared store is not changed by the key.
    given = section.model_copy(update={"path": str(stores[0].path)})
    assert prepare_store(given, cache).path == stores[0].path
    with pytest.raises(InvalidConfig, match=r"start_token=false does not match the store"):
        prepare_store(given.model_copy(update={"start_token": False}), cache)
    # Nor mixed with documents that begin otherwise.
    mixture = {str(stores[0].path): 1.0, str(stores[2].path): 1.0}
    mixed = DataSection.model_validate({"mixture": mixture, "tokenizer": section.tokenizer})
    with pytest.raises(InvalidConfig, match="whose documents begin with tokens"):
        prepare_data(mixed, cache)


@pytest.mark.parametrize(
    ("single", "flag", "rule"),
    [("", True, "adds no start token"), ("<s> $A", False, 'adds "<s>"'), ("<s> $A", True, "")],
)
def test_summarize_dataset_contradicting_flag_is_noted(
    single: str, flag: bool, rule: str, tmp_path: Path
) -> None:
    config = {"add_bos_token": flag}
    store, _ = prepare(tmp_path, "a", single, config=config)
    section = DataSection(path=str(store.path))
    text = "\n".join(summarize_dataset(prepare_data(section, tmp_path / "cache")))
    assert ("add_bos_token" in text) == bool(rule)
    assert rule in text


def documents_of(samples: Any) -> list[list[int]]:
    """Return the tokens of each document in all samples, with its last target."""
    batch, documents = samples.get_batch(np.arange(len(samples))), []
    for tokens, targets, numbers in zip(*batch[:3], strict=True):
        for number in range(int(numbers.max()) + 1):
            inside = numbers == number
            if (targets[inside] != IGNORE_INDEX).any():
                last = int(targets[inside][-1])
                documents.append([*tokens[inside].tolist(), *[last] * (last != IGNORE_INDEX)])
    return documents


@pytest.mark.parametrize("single", ["<s> $A", "</s> $A", ""])
@pytest.mark.parametrize("packing", ["documents", "best_fit"])
def test_packing_documents_begin_with_the_start_token(
    packing: str, single: str, tmp_path: Path
) -> None:
    store, tokenizer = prepare(tmp_path, "a", single)
    section = DataSection.model_validate({"path": str(store.path), "packing": packing})
    dataset = prepare_data(section, tmp_path / "cache")
    [samples] = build_mixture(dataset, "train", 400, section, 0).sources
    documents = documents_of(samples)
    start, separator = store.manifest.start_tokens, store.manifest.separator
    plain = {tuple(tokenizer.encode(t, add_special_tokens=False).ids) for t in TEXTS}
    first, complete = all_tokens(store)[0], 0
    for document in documents:
        begins = document[0] == start[0] if start else True
        assert begins or document[0] == first or packing == "documents"  # or a window's start
        complete += tuple(document[len(start) : -1]) in plain and document[-1] == separator
    assert complete >= 25  # of 38; windows split some, and omit the last


def test_token_chunks_every_token_is_a_target_if_separators_start_documents() -> None:
    stream = TokenStream([np.array([0, 5, 6, 0, 7, 8, 9, 0, 0, 4, 0, 3])])
    batch = TokenChunks(stream, 11, "documents", 0, True).get_batch(np.array([0]))
    assert batch.targets_BT.tolist() == [[5, 6, 0, 7, 8, 9, 0, 0, 4, 0, 3]]
    assert batch.documents_BT is not None
    assert batch.positions_BT is not None
    assert batch.documents_BT.tolist() == [[0, 0, 0, 1, 1, 1, 1, 2, 3, 3, 4]]
    assert batch.positions_BT.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0, 0, 1, 0]]


@pytest.mark.parametrize("has_start", [True, False])
@pytest.mark.parametrize("single", ["<s> $A", ""])
def test_prepare_foreign_tokens_that_begin_otherwise_are_noted(
    single: str, has_start: bool, tmp_path: Path
) -> None:
    tokenizer = make_bpe()
    if single:
        tokenizer.post_processor = add_template(tokenizer, single)
    path = write_tokenizer(tmp_path / "model", tokenizer)
    bos, eos = (tokenizer.token_to_id(name) for name in ("<s>", "</s>"))
    plain = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    tokens = [t for ids in plain for t in [*[bos] * has_start, *ids, eos]]
    np.array(tokens, np.uint16).tofile(tmp_path / "tokens.bin")
    section = DataSection(path=str(tmp_path / "tokens.bin"), tokenizer=path)
    store = prepare_store(section, tmp_path / "cache")
    assert sorted(all_tokens(store)) == sorted(tokens)
    assert store.manifest.start_tokens == [bos] * has_start
    differs = has_start != bool(single)
    assert ["begin with" in note for note in store.manifest.notes] == [True] * differs


@pytest.mark.parametrize("start", [[], ["<s>"], ["</s>"], None])
@pytest.mark.parametrize("single", ["", "<s> $A"])
def test_load_chat_format_prompt_begins_as_recorded(
    single: str, start: list[str] | None, store_path: Path, tmp_path: Path
) -> None:
    tokenizer = make_bpe()
    if single:
        tokenizer.post_processor = add_template(tokenizer, single)
    run = random_run(tmp_path / "run", store_path)
    write_tokenizer(run / "huggingface", tokenizer)
    (run / "huggingface/config.json").write_text("{}")
    tokenizer.save(str(run / "tokenizer.json"))
    ids = None if start is None else [tokenizer.token_to_id(name) for name in start]
    separator = tokenizer.token_to_id("</s>")
    (run / RECORD_FILE).write_text(format_record(separator, ids))
    chat_format = load_chat_format(find_checkpoint(run))
    expected = [tokenizer.token_to_id("<s>")] if ids is None and single else ids or []
    plain = tokenizer.encode("words", add_special_tokens=False).ids
    assert chat_format.tokenizer.encode("words").ids == [*expected, *plain]
    assert encode_pair(chat_format, "words", " x")[0] == [*expected, *plain]
    assert encode_pair(chat_format, "", "words")[0] == (expected or [chat_format.start_token])


@pytest.mark.parametrize(
    ("packing", "old", "new", "remedy"),
    [
        # Of an older weft, without a start token in the tokens.
        ("windows", {"starts_documents": True}, [0], ""),
        ("documents", {"starts_documents": True}, [0], "Use false"),
        ("windows", {"starts_documents": False}, [7], "Use false"),
        ("windows", {"start_tokens": [7]}, [], "Use auto or true"),
        ("windows", {"start_tokens": [0]}, [], ""),  # the separator is there in any case
        ("best_fit", {"start_tokens": [7]}, [7], ""),
        ("windows", {"start_tokens": None}, [7], ""),  # of conversations
        ("windows", {}, [7], ""),
    ],
)
def test_check_start_tokens_other_than_recorded_are_refused(
    packing: str, old: dict[str, Any], new: list[int], remedy: str, store_path: Path, tmp_path: Path
) -> None:
    store = open_store(store_path)
    plan = resolve(
        small_job(("data.packing", packing), ("run.dir", str(tmp_path))),
        Machine("cpu", 2, world_size=1),
    )
    changed = replace(store.manifest, separator=0, start_tokens=new)
    dataset = dataset_from_store(replace(store, manifest=changed))
    if old:
        (tmp_path / RECORD_FILE).write_text(json.dumps({"separator": 0, **old}))
    error = _check_start_tokens(plan, dataset, tmp_path / "step-00000002")
    assert (error is not None) == bool(remedy)
    assert error is None or remedy in str(error)


@pytest.mark.parametrize("start", [[], ["<s>"], ["</s>"]])
def test_export_run_of_text_begins_texts_as_recorded(
    start: list[str], store_path: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    run = random_run(tmp_path / "run", store_path)
    tokenizer = make_bpe()
    tokenizer.post_processor = add_template(tokenizer, "<s> $A")
    tokenizer.save(str(run / "tokenizer.json"))
    (run / "tokenizer_config.json").write_text(json.dumps(NAMES))
    ids = [tokenizer.token_to_id(name) for name in start]
    (run / RECORD_FILE).write_text(format_record(tokenizer.token_to_id("</s>"), ids))
    export_checkpoint(run, tmp_path / "out", "float32", "5GB", lambda _: None)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    plain = tokenizer.encode("words", add_special_tokens=False).ids
    assert theirs("words")["input_ids"] == [*ids, *plain]
