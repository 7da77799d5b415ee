"""Rows of conversations as other programs write them, and the audit of what training ignores."""

from __future__ import annotations

import csv
import json
import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.chat import CHATML, LLAMA, MARKED, message, write_lines, write_tokenizer
from tests.chat_templates import Model, call
from tests.data.test_chat import section, tokens_of
from weft.config.errors import InvalidConfig
from weft.data.chat_rows import Example, InvalidConversation, RowFormat, parse_line
from weft.data.dataset import open_dataset
from weft.data.inspect import inspect_dataset
from weft.data.prepare import prepare_data
from weft.data.token_store import SPLITS, Store

ASK, ANSWER = message("user", "a?"), message("assistant", "b")


def parse(row: object, **options: Any) -> list[Example]:
    return parse_line(json.dumps(row).encode(), RowFormat(**options))


# --------------------------------------------------------------------------- forms


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"conversations": [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b"}]}, {}),
        ({"conversations": [ASK, ANSWER], "id": 7}, {}),
        ({"prompt": [ASK], "completion": [ANSWER]}, {}),
        ({"prompt": "a?", "completion": [ANSWER]}, {}),
        ({"question": "a?", "answer": "b"}, {}),
        ({"instruction": "a?", "response": "b", "system": ""}, {}),
        ({"messages": json.dumps([ASK, ANSWER])}, {}),
        ({"q": "a?", "a": "b"}, {"fields": {"prompt": "q", "response": "a"}}),
        ({"chat": {"turns": [ASK, ANSWER]}}, {"fields": {"messages": "chat.turns"}}),
        (
            {"dialog": [{"by": "client", "said": "a?"}, {"by": "agent", "said": "b"}]},
            {
                "fields": {"messages": "dialog", "role": "by", "content": "said"},
                "roles": {"client": "user", "agent": "assistant"},
            },
        ),
    ],
)
def test_row_in_the_form_of_another_program_is_the_same_example(
    row: dict[str, Any], options: dict[str, Any]
) -> None:
    [example] = parse(row, **options)
    assert example.messages == [ASK, ANSWER]
    assert example.trained_turns == [1]


def test_row_of_llama_factory_has_history_system_and_tools() -> None:
    row = {"instruction": "c", "input": "d", "output": "e", "history": [["a", "b"]], "system": "s"}
    [example] = parse(row)
    assert [m["content"] for m in example.messages] == ["s", "a", "b", "c\n\nd", "e"]
    assert example.trained_turns == [2, 4]
    row = {
        "conversations": [
            {"from": "human", "value": "a?"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "b"},
        ],
        "system": "s",
        "tools": '[{"name": "f"}]',
    }
    [example] = parse(row)
    assert [m["role"] for m in example.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    function = {"name": "f", "arguments": {"x": 1}}
    assert example.messages[2]["tool_calls"] == [{"type": "function", "function": function}]
    assert example.tools == [{"name": "f"}]


def test_row_of_sharegpt_preferences_is_a_pair() -> None:
    row = {
        "conversations": [{"from": "human", "value": "a?"}],
        "chosen": {"from": "gpt", "value": "b"},
        "rejected": {"from": "gpt", "value": "c"},
    }
    chosen, rejected = parse(row, preferences=True)
    assert [m["content"] for m in chosen.messages] == ["a?", "b"]
    assert [m["content"] for m in rejected.messages] == ["a?", "c"]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [ASK, ANSWER | {"weight": 0}, ASK, ANSWER]}, [3]),
        ({"messages": [ASK, ANSWER | {"train": False}, ASK, ANSWER | {"weight": 1}]}, [3]),
        ({"messages": [ASK, ANSWER], "weight": 0}, None),
        ({"messages": [ASK, ANSWER | {"weight": 0}]}, None),
        ({"messages": [ASK, ANSWER], "train": True, "weight": 1.0}, [1]),
    ],
)
def test_row_that_says_what_not_to_train_is_followed(
    row: dict[str, Any], expected: list[int] | None
) -> None:
    examples = parse(row)
    assert [example.trained_turns for example in examples] == (
        [] if expected is None else [expected]
    )
    assert all("weight" not in m and "train" not in m for e in examples for m in e.messages)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [ASK, ANSWER | {"weight": 0.25}, ASK, ANSWER]}, [0.25, 1]),
        ({"messages": [ASK, ANSWER, ASK, ANSWER | {"weight": 0}], "weight": 0.5}, [0.5]),
        ({"messages": [ASK, ANSWER | {"weight": 0.5}, ASK, ANSWER], "weight": 0.5}, [0.25, 0.5]),
        ({"messages": [ASK, ANSWER], "weight": "0.5"}, [0.5]),  # of CSV
        ({"messages": [ASK, ANSWER], "weight": ""}, [1]),
        ({"messages": [ASK | {"weight": 0.5}, ANSWER]}, [1]),
    ],
)
def test_row_with_weights_has_the_product_of_row_and_message(
    row: dict[str, Any], expected: list[float]
) -> None:
    [example] = parse(row)
    assert [example.weight_of(turn) for turn in example.trained_turns] == expected
    assert example.has_fractions == (set(expected) != {1})


@pytest.mark.parametrize(
    ("row", "what", "options"),
    [
        ({"dialog": [ASK, ANSWER]}, r"it has dialog; .*--data.fields messages=dialog", {}),
        ({"q": "a", "a": "b", "n": 1}, r"it has q, a, n; .*prompt=q,response=a", {}),
        ({"messages": [{"who": "x", "content": "b"}]}, r"no role; it has who.*role=who", {}),
        ({"messages": [{"role": "user", "said": "b"}]}, r"no content; .*content=said", {}),
        ({"messages": [message("client", "b")]}, r"data.roles, such as client=user", {}),
        ({"prompt": "a", "completion": "b", "label": False}, "label false", {}),
        (
            {"prompt": "a", "completion": "b", "label": True},
            "an answer with a label .KTO.; use data.format=unpaired and train.objective=kto",
            {"preferences": True},
        ),
        ({"messages": [ASK, ANSWER | {"weight": 2}]}, "message 2 has the weight 2", {}),
        ({"messages": [ASK, ANSWER], "weight": -0.5}, "the row has the weight -0.5, which is", {}),
        ({"messages": [ASK, ANSWER], "weight": math.nan}, "the weight nan, which is not", {}),
        ({"messages": [ASK, ANSWER], "weight": "low"}, "the weight 'low', which is not", {}),
        ({"messages": [ASK, ANSWER], "weight": True}, "the weight True, which is not", {}),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c", "weight": 0.5},
            "a preference compares answers as a whole",
            {"preferences": True},
        ),
        ({"messages": [ASK, ANSWER | {"train": 1}]}, "neither true nor false", {}),
        (
            {"prompt": "Q: a", "chosen": "Q: a b", "rejected": "Q: a c"},
            "repeat the prompt",
            {"preferences": True},
        ),
        (
            {"messages": [message("user", [{"type": "image"}]), ANSWER]},
            "not text, but has image: weft trains text",
            {},
        ),
        ({"instruction": "a", "output": "b", "history": ["c"]}, "history is not a list", {}),
    ],
)
def test_row_that_is_refused_says_what_it_has(
    row: dict[str, Any], what: str, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidConversation, match=what):
        parse(row, **options)


# --------------------------------------------------------------------------- files


@pytest.mark.parametrize("template", [CHATML, MARKED, "qwen3"])
def test_weights_of_messages_are_those_of_their_tokens(template: str, tmp_path: Path) -> None:
    """One pass, generation blocks, and one example per turn give the same weights of answers."""
    rows: list[dict[str, Any]] = [
        {
            "messages": [
                *(message("user", f"a{i}?"), ANSWER | {"weight": 0.25}),
                *(message("user", "b?"), message("assistant", "d")),
            ]
        }
        for i in range(6)
    ]
    rows[3]["weight"] = 0.5
    tokenizer = (
        Model(template, tmp_path / "model").write()
        if template == "qwen3"
        else write_tokenizer(tmp_path / "model", template)
    )
    file = write_lines(tmp_path / "a.jsonl", rows)
    store = prepared(file, tokenizer, tmp_path / "cache")
    found = []
    for split in SPLITS:
        tokens, mask, weights = (
            store.tokens(split),
            store.loss_mask(split),
            store.weights(split),
        )
        assert mask is not None
        assert weights is not None
        assert len(weights) == len(tokens)
        [ids], [learned] = (s.read_windows(np.array([0]), len(tokens)) for s in (tokens, mask))
        assert ((weights > 0) == (learned == 1)).all()
        for letter in "bd":
            token = store.tokenizer().encode(letter).ids[-1]
            found += [(letter, w) for w in weights[(ids == token) & (learned == 1)].tolist()]
    assert Counter(found) == {("b", 0.25): 5, ("d", 1.0): 5, ("b", 0.125): 1, ("d", 0.5): 1}
    shown = list(inspect_dataset(open_dataset(store.path), 6))
    assert any("]]*0.25" in line for line in shown)


def test_weights_of_joined_answers_must_be_equal(tmp_path: Path) -> None:
    """A template that joins answers in a row gives them one weight."""
    encoder = Model("gemma4", tmp_path).encoder()
    messages = [ASK, ANSWER, message("assistant", "d")]
    [rendered] = encoder.render(Example(messages, None, 0, (1, 0.5, 0.5)))
    assert rendered.weights == (0.5,)
    with pytest.raises(InvalidConversation, match="2 to 3 have different weights"):
        encoder.render(Example(messages, None, 0, (1, 0.5, 0.25)))


def test_rows_without_fractions_have_no_file_of_weights(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "model", CHATML)
    rows = [{"messages": [message("user", f"a{i}?"), ANSWER | {"weight": 1}]} for i in range(6)]
    rows.append({"messages": [ASK, ANSWER | {"weight": 0}, ASK, ANSWER]})
    store = prepared(write_lines(tmp_path / "a.jsonl", rows), tokenizer, tmp_path / "cache")
    assert store.weights("train") is None
    assert not list(store.path.glob("*.weights"))


def prepared(path: Path, tokenizer: Path, cache: Path, **keys: Any) -> Store:
    store: Store = prepare_data(section(path, tokenizer, **keys), cache).sources[0].store
    return store


def all_tokens(store: Store) -> list[tuple[int, ...]]:
    return sorted(tokens_of(store, "train") + tokens_of(store, "validation"))


def test_rows_of_an_array_and_of_csv_are_those_of_lines(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "model", CHATML)
    rows = [{"instruction": f'what\nis {i}, "it"?', "output": f"it is {i}"} for i in range(20)]
    lines = write_lines(tmp_path / "a.jsonl", rows)
    (tmp_path / "b.json").write_text(json.dumps(rows, indent=2), "utf-8")
    (tmp_path / "lines.json").write_bytes(lines.read_bytes())
    for name, delimiter in (("c.csv", ","), ("d.tsv", "\t")):
        with (tmp_path / name).open("w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, ["instruction", "output"], delimiter=delimiter)
            writer.writeheader()
            writer.writerows(rows)
    expected = all_tokens(prepared(lines, tokenizer, tmp_path / "cache"))
    assert len(expected) == 20
    for name in ("b.json", "lines.json", "c.csv", "d.tsv"):
        assert all_tokens(prepared(tmp_path / name, tokenizer, tmp_path / "cache")) == expected


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("a.json", '[{"prompt": "a", "response": "b"}, {"prompt"', r"a\.json:2: is not JSON"),
        ("a.json", '[{"prompt": "a", "response": "b"}', r"a\.json:2: the array has no end"),
        ("a.csv", "prompt,response\na,b\nc\n", r"a\.csv:3: has another number of fields"),
        ("a.csv", 'prompt,response\na,"b\n', r"a\.csv:2: is not CSV"),
    ],
)
def test_damaged_array_or_csv_is_refused_with_its_place(
    name: str, text: str, what: str, tmp_path: Path
) -> None:
    tokenizer = write_tokenizer(tmp_path / "model", CHATML)
    (tmp_path / name).write_text(text, "utf-8")
    with pytest.raises(InvalidConfig, match=what):
        prepared(tmp_path / name, tokenizer, tmp_path / "cache")


def random_tree(rng: random.Random, depth: int) -> dict[str, Any]:
    """Return an object of texts and, below them, objects."""
    texts = {f"t{i}": "".join(rng.choices("abc ", k=5)) for i in range(rng.randint(1, 3))}
    objects = {
        f"o{i}": random_tree(rng, depth - 1) for i in range(rng.randint(0, 2) if depth else 0)
    }
    return texts | objects


def random_part(rng: random.Random, tree: dict[str, Any]) -> dict[str, Any]:
    """Return an object without some of its fields, at every level."""
    return {
        name: random_part(rng, value) if isinstance(value, dict) else value
        for name, value in tree.items()
        if rng.random() < 0.6
    }


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_parquet_are_those_of_lines_at_every_level(seed: int, tmp_path: Path) -> None:
    """A struct has the fields of all rows: those of other rows are null, and must not be shown."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = random.Random(seed)
    tokenizer = write_tokenizer(tmp_path / "model", LLAMA)
    tree, rows = random_tree(rng, 3), []
    for number in range(30):
        # The first has all fields, so that the columns have their order.
        arguments, parameters = (random_part(rng, tree) if number else tree for _ in range(2))
        function = {"name": "lookup", "parameters": parameters}
        row: dict[str, Any] = {"messages": [ASK, call(arguments), message("tool", "4"), ANSWER]}
        if not number or rng.random() < 0.7:
            row["tools"] = [{"type": "function", "function": function}]
        rows.append(row)
    lines = write_lines(tmp_path / "a.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=7)
    expected, read = (
        all_tokens(prepared(path, tokenizer, tmp_path / "cache"))
        for path in (lines, tmp_path / "a.parquet")
    )
    assert len(expected) == 30
    assert read == expected


def test_lines_with_one_reason_are_shown_once(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "model", CHATML)
    rows: list[Any] = [{"q": "a", "in": "", "a": str(i)} for i in range(50)]
    file = write_lines(tmp_path / "a.jsonl", [*rows, 3, *("x" * i for i in range(20))])
    with pytest.raises(InvalidConfig) as caught:
        prepared(file, tokenizer, tmp_path / "cache")
    text = str(caught.value)
    assert text.count("a.jsonl:") == 2
    assert "a.jsonl:1: has no messages" in text
    assert "prompt=q,response=a (49 more such lines)" in text
    assert "a.jsonl:51: is not a JSON object (20 more such lines)" in text


# --------------------------------------------------------------------------- audit


def notes(store: Store) -> str:
    return "\n".join(store.manifest.notes)


def with_rows(change: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"messages": [message("user", f"{i}?"), message("assistant", f"it is {i}")]}
        for i in range(8)
    ]
    return [*rows[:4], change(1), *rows[4:], change(2)]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda i: {"prompt": f"a{i}", "response": "b", "id": i}, "id of 2 rows has no effect"),
        (lambda i: {"prompt": f"a{i}", "response": "b", "weight": 0}, "2 rows say not to train"),
        (lambda i: {"prompt": f"a{i}", "response": ""}, "2 rows have an empty answer"),
        (lambda i: {"prompt": "a", "response": "b"}, "1 rows are equal to an earlier row"),
        (
            lambda i: {
                "messages": [message("developer", f"d{i}"), ASK, ANSWER | {"reasoning": "r"}]
            },
            "the chat template ignores reasoning of 2 rows",
        ),
    ],
)
def test_audit_says_what_has_no_effect_once(
    change: Callable[[int], dict[str, Any]], expected: str, tmp_path: Path
) -> None:
    tokenizer = write_tokenizer(tmp_path / "model", CHATML)
    file = write_lines(tmp_path / "a.jsonl", with_rows(change))
    found = notes(prepared(file, tokenizer, tmp_path / "cache"))
    assert expected in found
    if "equal" not in expected:
        assert "the first is a.jsonl:5" in found


@pytest.mark.parametrize("kind", ["parquet", "feather", "stream", "saved"])
def test_audit_names_the_columns_of_a_table_that_are_not_read(kind: str, tmp_path: Path) -> None:
    """From the schema; also columns of null, but not those that data.fields maps."""
    pa = pytest.importorskip("pyarrow")
    rows = [
        {"id": i, "n": None, "chat": {"turns": [message("user", f"a{i}?"), ANSWER]}, "tools": None}
        for i in range(8)
    ]
    table, data = pa.Table.from_pylist(rows), tmp_path / "data"
    if kind == "saved":
        pytest.importorskip("datasets").Dataset(table).save_to_disk(str(data))
    else:
        data.mkdir()
        for name in "ab":
            write_table(kind, table if name == "b" else table.drop(["id", "n"]), data / name)
    tokenizer = write_tokenizer(tmp_path / "model", CHATML)
    fields = {"messages": "chat.turns"}
    found = notes(prepared(data, tokenizer, tmp_path / "cache", fields=fields))
    first = "data" if kind == "saved" else {"parquet": "b.parquet"}.get(kind, "b.arrow")
    assert "the columns id, n have no effect; the first file with such a column is" in found
    assert f"is {first}" in found
    assert "chat" not in found.replace("chat template", "")


def write_table(kind: str, table: Any, path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if kind == "parquet":
        pq.write_table(table, path.with_suffix(".parquet"))
        return
    new = pa.ipc.new_file if kind == "feather" else pa.ipc.new_stream
    with new(str(path.with_suffix(".arrow")), table.schema) as writer:
        writer.write_table(table)


def test_audit_of_published_templates_finds_what_they_ignore(tmp_path: Path) -> None:
    rows: list[Any] = with_rows(
        lambda i: {"messages": [message("developer", f"be brief {i}"), ASK, ANSWER]}
    )
    file = write_lines(tmp_path / "a.jsonl", rows)
    qwen = Model("qwen3", tmp_path / "qwen").write()
    found = notes(prepared(file, qwen, tmp_path / "cache"))
    assert "the chat template ignores developer content of 2 rows; the first is a.jsonl:5" in found
    assert "data.roles developer=system" in found
    assert "10 answers have no reasoning" in found
    silent = prepared(
        file, qwen, tmp_path / "cache", roles={"developer": "system"}, train_empty_reasoning=False
    )
    assert "ignores" not in notes(silent)


@pytest.mark.parametrize("name", ["llama3", "phi3", "lfm2"])
def test_answer_that_the_template_leaves_out_is_refused(name: str, tmp_path: Path) -> None:
    file = write_lines(
        tmp_path / "a.jsonl",
        with_rows(
            lambda i: {"messages": [ASK, call({"who": f"p{i}"}), message("tool", "x"), ANSWER]}
        ),
    )
    with pytest.raises(InvalidConfig, match=r"a\.jsonl:5: the chat template ignores tool_calls"):
        prepared(file, Model(name, tmp_path / name).write(), tmp_path / "cache")


def test_tool_arguments_as_json_text_are_decoded_with_a_note(tmp_path: Path) -> None:
    rows = with_rows(
        lambda i: {"messages": [ASK, call('{"who": "p"}'), message("tool", "x"), ANSWER]}
    )
    tokenizer = Model("qwen2_5", tmp_path / "qwen").write()
    store = prepared(write_lines(tmp_path / "a.jsonl", rows), tokenizer, tmp_path / "cache")
    assert "the tool calls of 2 rows have their arguments as JSON text" in notes(store)
    texts = [
        store.tokenizer().decode(list(tokens), skip_special_tokens=False)
        for tokens in all_tokens(store)
    ]
    assert sum('"arguments": {"who": "p"}' in text for text in texts) == 2


def test_template_arguments_and_named_templates_are_used(tmp_path: Path) -> None:
    source = "{{ mood }}{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    source += "{% if add_generation_prompt %}<assistant>{% endif %}"
    tokenizer = write_tokenizer(tmp_path / "model", source)
    rows = with_rows(
        lambda i: (
            {"messages": [ASK, ANSWER], "tools": [{"name": "f"}]}
            if i == 1
            else {"prompt": "a", "response": "c"}
        )
    )
    file = write_lines(tmp_path / "a.jsonl", rows)
    store = prepared(file, tokenizer, tmp_path / "cache", chat_template_args={"mood": "calm"})
    decode = store.tokenizer().decode
    texts = [decode(list(tokens), skip_special_tokens=False) for tokens in all_tokens(store)]
    assert all(text.startswith("calm<user>") for text in texts)
    # As current transformers saves named templates.
    (tmp_path / "model/chat_template.jinja").write_text(source)
    named = tmp_path / "model/additional_chat_templates"
    named.mkdir()
    (named / "tool_use.jinja").write_text("tools " + source)
    other = prepared(file, tokenizer, tmp_path / "cache")
    texts = [decode(list(tokens), skip_special_tokens=False) for tokens in all_tokens(other)]
    assert sum(text.startswith("tools ") for text in texts) == 1


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "a", "completion": "b", "label": True}, [("b", True)]),
        ({"prompt": "a", "completion": "b", "label": 0}, [("b", False)]),
        ({"prompt": "a", "completion": "b", "label": "False"}, [("b", False)]),
        ({"prompt": [ASK], "completion": [ANSWER], "label": False}, [("b", False)]),
        # The answer of a conversation is its last turn.
        ({"messages": [ASK, message("assistant", "x"), ASK, ANSWER], "label": True}, [("b", True)]),
        # A preference is two answers.
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, [("b", True), ("c", False)]),
    ],
)
def test_unpaired_row_is_read(row: dict[str, Any], expected: list[tuple[str, bool]]) -> None:
    examples = parse(row, unpaired=True)
    found = []
    for example in examples:
        assert example.label is not None
        [turn] = example.trained_turns
        found.append((example.messages[turn]["content"], example.label))
    assert found == expected


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": "a", "completion": "b", "good": "yes"}, "neither a label .*label=prompt"),
        ({"prompt": "a", "completion": "b", "label": 2}, "the label 2, which is neither"),
        ({"prompt": "a", "completion": "b", "label": "maybe"}, "the label 'maybe', which"),
        ({"prompt": "a", "completion": "b", "label": True, "weight": 0.5}, "compares answers"),
    ],
)
def test_unpaired_row_without_a_label_is_refused(row: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidConversation, match=what):
        parse(row, unpaired=True)
