"""Conversations: transformers' token ids, and loss on the assistant's tokens only."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from tests.chat import (
    CHATML,
    LLAMA,
    MARKED,
    MISTRAL,
    REASONING,
    TEMPLATES,
    TURNS,
    message,
    write_lines,
    write_tokenizer,
)
from weft.cli.main import main
from weft.config.errors import InvalidConfig
from weft.config.schema import DataSection
from weft.data.chat import ChatEncoder, EncodedConversation, make_chat_encoder
from weft.data.chat_rows import Example, InvalidConversation, RowFormat, parse_line
from weft.data.chat_template import ChatTemplate, load_chat_template
from weft.data.dataset import Dataset, open_dataset
from weft.data.inspect import inspect_dataset
from weft.data.prepare import check_chat, prepare_data
from weft.data.token_store import SplitName, Store

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"a": "<b>&'"}}}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}

CONVERSATIONS = {
    "turns": TURNS,
    "system": [message("system", "Be <brief> & 'kind'."), *TURNS[2:]],
    "special": [message("user", "say <|im_end|> and </s>"), message("assistant", "<|eot_id|> ok")],
}


def section(path: Path | str, tokenizer: Path, **extra: Any) -> DataSection:
    values = {"path": str(path), "tokenizer": str(tokenizer), "format": "chat"} | extra
    return DataSection.model_validate(values)


def writer(tokenizer: Path, **extra: Any) -> ChatEncoder:
    chosen = section(Path("x"), tokenizer, **extra)
    return make_chat_encoder(chosen, load_chat_template(chosen))


def encode(of: ChatEncoder, example: Example) -> EncodedConversation:
    [result] = of.encode(of.render(example))
    return result


def pieces(of: ChatEncoder, result: EncodedConversation) -> list[tuple[str, int]]:
    """Return every token with its loss mask."""
    names = [of.tokenizer.id_to_token(token) for token in result.tokens.tolist()]
    return list(zip(names, result.loss_mask.astype(int).tolist(), strict=True))


def trained_text(of: ChatEncoder, result: EncodedConversation) -> list[str]:
    """Return the text of each run of trained tokens."""
    edges = np.flatnonzero(np.diff(result.loss_mask.astype(int), prepend=0, append=0)).reshape(
        -1, 2
    )
    return [
        of.tokenizer.decode(result.tokens[a:b].tolist(), skip_special_tokens=False)
        for a, b in edges
    ]


# --------------------------------------------------------------------------- equal tokens


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_chat_token_ids_equal_those_of_transformers(
    name: str, conversation: str, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    if (name, conversation) == ("mistral", "system"):
        pytest.skip("this template refuses it")
    theirs = AutoTokenizer.from_pretrained(write_tokenizer(tmp_path, TEMPLATES[name]).parent)
    ours = writer(tmp_path / "tokenizer.json")
    messages = CONVERSATIONS[conversation]
    result = encode(ours, Example(messages, None, 0))
    expected = theirs.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=name == "marked"
    )
    assert result.tokens.tolist() == expected["input_ids"]
    if name == "marked" and conversation != "turns":
        # Turns begin with blanks here.  A byte-level tokenizer assigns blanks to no token, so
        # transformers omits them from the mask.
        assert result.loss_mask.astype(int).tolist() == expected["assistant_masks"]


def test_chat_tools_and_calls_equal_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = write_tokenizer(tmp_path, LLAMA)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    messages = [TURNS[0], CALL, message("tool", "4"), message("assistant", "It is 4.")]
    [example] = parse_line(
        json.dumps({"messages": messages, "tools": [TOOL]}).encode(), RowFormat()
    )
    ours = writer(tokenizer)
    result = encode(ours, example)
    assert result.tokens.tolist() == theirs.apply_chat_template(messages, tools=[TOOL])["input_ids"]
    assert trained_text(ours, result) == ['{\n "name": "add"\n}<|eot_id|>', "It is 4.<|eot_id|>"]


# --------------------------------------------------------------------------- loss mask


def test_chat_mask_is_right_for_each_token(tmp_path: Path) -> None:
    ours = writer(write_tokenizer(tmp_path, CHATML))
    result = encode(ours, Example([message("user", "it?"), message("assistant", "it is")], None, 0))
    names = pieces(ours, result)
    answer = names.index(("<|im_start|>", 0), names.index(("?", 0)))
    assert names[answer:] == [
        ("<|im_start|>", 0),
        *((piece, 0) for piece in ("as", "s", "i", "s", "t", "an", "t")),
        ("Ċ", 0),
        ("it", 1),
        ("Ġis", 1),
        ("<|im_end|>", 1),
        ("Ċ", 0),
    ]
    assert not any(mask for _, mask in names[:answer])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", ["It is 4.<|eot_id|>", "There it is 4, too.\nReally\t 你好 🙂<|eot_id|>"]),
        (
            "chatml",
            ["  It is 4.\n\n  <|im_end|>", "There it is 4, too.\nReally\t 你好 🙂<|im_end|>"],
        ),
        ("mistral", [" It is 4.</s>", " There it is 4, too.\nReally\t 你好 🙂</s>"]),
        (
            "marked",
            ["  It is 4.\n\n  <|im_end|>", "There it is 4, too.\nReally\t 你好 🙂<|im_end|>"],
        ),
    ],
)
def test_chat_loss_mask_covers_the_assistant_turns(
    name: str, expected: list[str], tmp_path: Path
) -> None:
    ours = writer(write_tokenizer(tmp_path, TEMPLATES[name]))
    assert trained_text(ours, encode(ours, Example(TURNS, None, 0))) == expected
    # In a preference pair, only the text after the prompt.
    assert trained_text(ours, encode(ours, Example(TURNS, None, 3))) == expected[1:]


def test_chat_template_with_and_without_marks_learns_the_same(tmp_path: Path) -> None:
    unmarked = MARKED.replace("{% generation %}", "").replace("{%- endgeneration %}", "")
    marked, cut = (
        writer(write_tokenizer(tmp_path / str(i), text))
        for i, text in enumerate((MARKED, unmarked))
    )
    for messages in CONVERSATIONS.values():
        a, b = (encode(item, Example(messages, None, 0)) for item in (marked, cut))
        assert a.tokens.tolist() == b.tokens.tolist()
        assert a.loss_mask.tolist() == b.loss_mask.tolist()


def test_chat_turns_that_a_later_one_changes_are_examples_of_their_own(tmp_path: Path) -> None:
    ours = writer(write_tokenizer(tmp_path, REASONING))
    thought = message("assistant", "4", reasoning="two and two")
    one = parse_line(json.dumps({"messages": [TURNS[0], thought]}).encode(), RowFormat())[0]
    assert trained_text(ours, encode(ours, one)) == ["<think>two and two</think>4<|im_end|>"]
    two = parse_line(
        json.dumps({"messages": [TURNS[0], thought, *TURNS[2:]]}).encode(), RowFormat()
    )[0]
    first, second = ours.encode(ours.render(two))
    assert trained_text(ours, first) == ["<think>two and two</think>4<|im_end|>"]
    [trained] = trained_text(ours, second)
    assert trained == TURNS[3]["content"] + "<|im_end|>"
    history = ours.tokenizer.decode(second.tokens.tolist(), skip_special_tokens=False)
    assert "<|im_start|>assistant\n4<|im_end|>" in history
    last = writer(tmp_path / "tokenizer.json", train_turns="last")
    [only] = last.encode(last.render(two))
    assert trained_text(last, only) == [trained]


# --------------------------------------------------------------------------- lines


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": "a?", "response": "b"},
        {"prompt": "a?", "completion": "b"},
        {"instruction": "a?", "output": "b", "input": ""},
        {"messages": [message("user", "a?"), message("assistant", "b", name=None)]},
    ],
)
def test_chat_prompt_and_answer_pairs_are_conversations(line: dict[str, Any]) -> None:
    expected = [message("user", "a?"), message("assistant", "b")]
    assert parse_line(json.dumps(line).encode(), RowFormat()) == [Example(expected, None, 0)]


def test_chat_surrogate_pairs_become_one_character() -> None:
    [example] = parse_line(rb'{"prompt": "\ud83d\ude42", "response": "x"}', RowFormat())
    assert example.messages[0]["content"] == "\U0001f642"


def test_chat_system_and_input_fields_are_read() -> None:
    line = {"system": "s", "instruction": "a", "input": "i", "output": "b"}
    [example] = parse_line(json.dumps(line).encode(), RowFormat())
    assert [m["content"] for m in example.messages] == ["s", "a\n\ni", "b"]


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": "a?", "chosen": "b", "rejected": "c"},
        {
            "prompt": [message("user", "a?")],
            "chosen": [message("assistant", "b")],
            "rejected": [message("assistant", "c")],
        },
        {
            "chosen": [message("user", "a?"), message("assistant", "b")],
            "rejected": [message("user", "a?"), message("assistant", "c")],
        },
        {
            "prompt": "a?",  # repeated, as in ultrafeedback_binarized
            "chosen": [message("user", "a?"), message("assistant", "b")],
            "rejected": [message("user", "a?"), message("assistant", "c")],
        },
        {
            "prompt": [message("user", "a?")],
            "chosen": [message("user", "a?"), message("assistant", "b")],
            "rejected": [message("user", "a?"), message("assistant", "c")],
        },
        {"instruction": "a?", "input": "", "chosen": "b", "rejected": "c"},
    ],
)
def test_chat_preferences_give_two_answers(line: dict[str, Any]) -> None:
    chosen, rejected = parse_line(json.dumps(line).encode(), RowFormat(preferences=True))
    assert chosen == Example([message("user", "a?"), message("assistant", "b")], None, 1)
    assert rejected == Example([message("user", "a?"), message("assistant", "c")], None, 1)


def test_chat_parts_are_one_text_unless_the_template_reads_them(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    [example] = parse_line(
        json.dumps({"messages": [message("user", parts), TURNS[1]]}).encode(), RowFormat()
    )
    plain = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}"
    reads = (
        "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
    )
    for source, expected in ((plain, "<user>one\ntwo"), (reads, "<user>onetwo")):
        template = ChatTemplate({"default": source}, {}, "test")
        assert template.render(example.messages[:1], None, False) == expected
    image = [*parts, {"type": "image_url", "image_url": {"url": "x"}}]
    for content in (image, ["one"], [{"type": "text"}], {"type": "text", "text": "one"}):
        line = json.dumps({"messages": [message("user", content), TURNS[1]]}).encode()
        with pytest.raises(InvalidConversation, match="the content of message 1 is not text"):
            parse_line(line, RowFormat())


def test_chat_preferences_have_system_and_input() -> None:
    for line in (
        {"system": "s", "instruction": "a", "input": "i", "chosen": "b", "rejected": "c"},
        {
            "system": "s",
            "chosen": [message("user", "a\n\ni"), message("assistant", "b")],
            "rejected": [message("user", "a\n\ni"), message("assistant", "c")],
        },
    ):
        for example, answer in zip(
            parse_line(json.dumps(line).encode(), RowFormat(preferences=True)), "bc", strict=True
        ):
            assert [m["content"] for m in example.messages] == ["s", "a\n\ni", answer]
            assert example.loss_start == 2


BAD = {
    '{"messages": [': "is not JSON",
    "[1]": "is not a JSON object",
    '{"text": "x"}': "has no messages",
    '{"messages": []}': "empty conversation",
    '{"messages": [{"content": "x"}]}': "message 1 has no role",
    '{"messages": [{"role": "wizard", "content": "x"}]}': "the role 'wizard'",
    '{"messages": [{"role": "assistant"}]}': "message 1 has no content",
    '{"messages": [{"role": "user", "content": "x"}]}': "no assistant turn",
    '{"messages": [7]}': "message 1 is not a JSON object",
    '{"prompt": 3, "response": "x"}': "prompt is not a string",
    '{"prompt": "a", "chosen": "x", "rejected": "y"}': "use data.format=preferences",
    r'{"prompt": "\ud83d", "response": "x"}': "has a lone surrogate",
    "\udcff": "is not UTF-8",
}


def test_chat_each_bad_line_is_reported_with_its_location(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "model", LLAMA)
    good = json.dumps({"messages": TURNS})
    text = "\n".join([good, "", *BAD, good])
    (tmp_path / "bad.jsonl").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InvalidConfig) as caught:
        prepare_data(section(tmp_path / "bad.jsonl", tokenizer), tmp_path / "cache")
    [error] = caught.value.errors
    lines = error.rule.splitlines()
    assert lines[0] == f"has {len(BAD)} lines that are not conversations:"
    for number, (line, what) in enumerate(list(BAD.items())[:10], 3):
        assert lines[number - 2].startswith(f"  bad.jsonl:{number}: "), line
        assert what in lines[number - 2]
    assert lines[-1] == "  and 3 more"
    for line, what in BAD.items():
        with pytest.raises(InvalidConversation, match=what):
            parse_line(line.encode("utf-8", "surrogateescape"), RowFormat())
    assert not list((tmp_path / "cache").rglob("*.bin*"))


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ({"prompt": "a", "chosen": "b"}, "has no rejected"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are equal"),
        ({"prompt": 1, "chosen": "b", "rejected": "c"}, "prompt is neither"),
        ({"prompt": "a", "chosen": 1, "rejected": "c"}, "chosen or rejected is neither"),
        ({"prompt": "a", "chosen": [TURNS[0]], "rejected": "c"}, "no assistant turn"),
        ({"topic": "a", "chosen": "b", "rejected": "c"}, "neither a prompt nor answers"),
        ({"chosen": [], "rejected": "c"}, "neither a prompt nor answers"),
        ({"prompt": [], "chosen": [], "rejected": "c"}, "empty conversation"),
        (
            {
                "prompt": [message("system", "s"), message("user", "a")],
                "chosen": [message("user", "a"), message("assistant", "b")],
                "rejected": [message("user", "a"), message("assistant", "c")],
            },
            "not with prompt",
        ),
        (
            {
                "chosen": [message("user", "a"), message("assistant", "b")],
                "rejected": [message("user", "A"), message("assistant", "c")],
            },
            "equal user turns",
        ),
    ],
)
def test_chat_bad_preferences_are_refused(line: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidConversation, match=what):
        parse_line(json.dumps(line).encode(), RowFormat(preferences=True))


def test_chat_pair_that_the_template_makes_equal_is_refused(tmp_path: Path) -> None:
    """The template strips the answers."""
    tokenizer = write_tokenizer(tmp_path / "model", LLAMA)
    pairs = [{"prompt": "a", "chosen": "b", "rejected": x} for x in ("c", "b ")]
    file = write_lines(tmp_path / "pairs.jsonl", pairs)
    with pytest.raises(InvalidConfig, match=r"pairs\.jsonl:2: chosen and rejected are equal after"):
        prepare_data(section(file, tokenizer, format="preferences"), tmp_path / "cache")


def test_chat_error_raised_by_a_template_has_its_location(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "model", MISTRAL)
    file = write_lines(tmp_path / "a.jsonl", [{"messages": TURNS}, {"messages": TURNS[1:]}])
    with pytest.raises(InvalidConfig, match=r"a\.jsonl:2: .*must alternate") as caught:
        prepare_data(section(file, tokenizer), tmp_path / "cache")
    assert "tokenizer_config.json" in caught.value.errors[0].remedy
    files = {f.name for f in (tmp_path / "cache").rglob("*") if f.is_file()}
    assert files == {"lock", "tokenizer.json", "document_tokens.json"}


def test_chat_template_runs_in_a_sandbox(tmp_path: Path) -> None:
    text = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    ours = writer(write_tokenizer(tmp_path, text))
    with pytest.raises(InvalidConversation, match=r"unsafe"):
        ours.render(Example(TURNS, None, 0))
    ours = writer(write_tokenizer(tmp_path / "b", "{{ messages.append(1) }}"))
    with pytest.raises(InvalidConversation, match=r"not safely|unsafe"):
        ours.render(Example(TURNS, None, 0))


def test_load_template_finds_each_source(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path, "in the config")
    source = load_chat_template(section(Path("x"), tokenizer)).sources
    assert source == {"default": "in the config"}
    several = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    write_tokenizer(tmp_path, "", chat_template=several)
    template = load_chat_template(section(Path("x"), tokenizer))
    assert template.sources == {"default": "d", "tool_use": "t"}
    assert template.render(TURNS[:1], [TOOL], False) == "t"
    (tmp_path / "huggingface").mkdir()
    (tmp_path / "huggingface/chat_template.jinja").write_text("of the import")
    assert load_chat_template(section(Path("x"), tokenizer)).sources == {"default": "of the import"}
    (tmp_path / "chat_template.jinja").write_text("beside")
    assert load_chat_template(section(Path("x"), tokenizer)).sources == {"default": "beside"}
    (tmp_path / "mine.jinja").write_text("mine")
    chosen = section(Path("x"), tokenizer, chat_template=str(tmp_path / "mine.jinja"))
    assert load_chat_template(chosen).sources == {"default": "mine"}


@pytest.mark.parametrize(
    ("changes", "key", "rule"),
    [
        ({"tokenizer": "train"}, "data.tokenizer", "is only for text"),
        ({"chat_template": "/nowhere.jinja"}, "data.chat_template", "does not exist"),
        ({"path": "python-stdlib"}, "data.path", "holds no conversations"),
        ({"path": "hf://:config"}, "data.path", "is not the name of a dataset"),
        ({"path": "/nowhere.jsonl"}, "data.path", "does not exist"),
    ],
)
def test_chat_mistakes_in_keys_are_found_before_reading(
    changes: dict[str, str], key: str, rule: str, tmp_path: Path
) -> None:
    tokenizer = write_tokenizer(tmp_path, LLAMA)
    file = write_lines(tmp_path / "a.jsonl", [{"messages": TURNS}])
    assert check_chat(section(file, tokenizer)) == []
    chosen = section(file, tokenizer).model_copy(update=changes)
    [error] = check_chat(chosen)
    assert error.key == key
    assert rule in error.rule


def test_chat_mistakes_in_a_mixture_name_its_key(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path, LLAMA)
    file = write_lines(tmp_path / "a.jsonl", [{"messages": TURNS}])
    mixed = {"mixture": {"/nowhere.jsonl": 1.0, str(file): 1.0, "python-stdlib": 1.0}}
    errors = check_chat(section("python-stdlib", tokenizer, **mixed))
    assert [(p.key, p.value) for p in errors] == [
        ("data.mixture", "/nowhere.jsonl"),
        ("data.mixture", "python-stdlib"),
    ]


@pytest.mark.parametrize(
    ("template", "rule"),
    [("{% if %}", "is not a chat template: line 1"), ("", "neither chat_template.jinja nor")],
)
def test_chat_without_a_template_is_refused(template: str, rule: str, tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "m", template)
    file = write_lines(tmp_path / "a.jsonl", [{"messages": TURNS}])
    [error] = check_chat(section(file, tokenizer))
    assert (error.key, rule in error.rule) == ("data.chat_template", True)


# --------------------------------------------------------------------------- the store


def conversation(number: int) -> dict[str, Any]:
    question = message("user", f"it is what {number}?")
    return {"messages": [question, message("assistant", f"it is {number}")]}


def test_prepare_conversations_store_is_complete(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "model", LLAMA)
    lines = [conversation(i) for i in range(60)]
    (tmp_path / "data").mkdir()
    write_lines(tmp_path / "data/a.jsonl", [*lines[:20], lines[3]])
    packed = "".join(json.dumps(line) + "\n" for line in lines[20:40]).encode()
    (tmp_path / "data/b.jsonl.gz").write_bytes(gzip.compress(packed))
    packed = "".join(json.dumps(line) + "\n" for line in lines[40:]).encode()
    (tmp_path / "data/c.jsonl.zst").write_bytes(zstandard.compress(packed))
    (tmp_path / "data/README.md").write_text("not a conversation")
    chosen = section(tmp_path / "data", tokenizer, validation_fraction=0.1)
    text = prepare_data(chosen, tmp_path / "cache")
    store = text.sources[0].store
    assert store.manifest.kind == "chat"
    assert store.manifest.files == ["a.jsonl", "b.jsonl.gz", "c.jsonl.zst"]
    ours, observed = writer(tokenizer), {}
    for split in ("train", "validation"):
        begin = 0
        stream, loss_mask = store.tokens(split), store.loss_mask(split)
        assert loss_mask is not None
        for end, file, line in store.index(split).tolist():
            at = np.array([begin])
            tokens, mask = (s.read_windows(at, end - begin)[0] for s in (stream, loss_mask))
            expected = lines[[0, 20, 40][file] + line - 1] if (file, line) != (0, 21) else lines[3]
            result = encode(ours, Example(expected["messages"], None, 0))
            assert tokens.tolist() == result.tokens.tolist()
            assert mask.tolist() == result.loss_mask.astype(int).tolist()
            observed[file, line] = split
            begin = end
        assert begin == len(stream) == len(loss_mask)
    assert len(observed) == 61
    assert list(observed.values()).count("validation") in (6, 7)
    assert observed[0, 4] == observed[0, 21]  # copies are on one side

    # The second call uses the cache; a separate store gives the same.
    before = {file: file.stat().st_mtime_ns for file in store.path.iterdir()}
    second_run = prepare_data(chosen, tmp_path / "cache")
    assert second_run.fingerprint == text.fingerprint == open_dataset(store.path).fingerprint
    assert {file: file.stat().st_mtime_ns for file in store.path.iterdir()} == before
    own = prepare_data(section(store.path, tokenizer), tmp_path / "other")
    assert own.fingerprint == text.fingerprint
    # Another template gives another store.
    (tmp_path / "t.jinja").write_text(CHATML)
    other = prepare_data(
        chosen.model_copy(update={"chat_template": str(tmp_path / "t.jinja")}), tmp_path / "cache"
    )
    assert other.fingerprint != text.fingerprint
    # The loss mask is part of the content.
    file = store.path / "train-00000.learned"
    file.write_bytes(b"\1" * file.stat().st_size)
    with pytest.raises(InvalidConfig, match=r"train-00000\.learned is damaged"):
        prepare_data(section(store.path, tokenizer), tmp_path / "other")


def test_data_inspect_shows_trained_tokens(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "model", MARKED)
    file = write_lines(tmp_path / "a.jsonl", [conversation(i) for i in range(10)])
    text = prepare_data(section(file, tokenizer), tmp_path / "cache")
    lines = list(inspect_dataset(text, 2))
    assert any("tokens per document" in line for line in lines)
    [at] = [i for i, line in enumerate(lines) if line == "-- a.jsonl:1"]
    output = (
        "<|im_start|>user\nit is what 0?<|im_end|>\n<|im_start|>assistant\n[[it is 0<|im_end|>]]\n"
    )
    assert lines[at + 1] == output
    assert sum(line.startswith("-- ") for line in lines) == 2


def test_data_inspect_takes_the_tokenizer_of_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Model, data and nothing else; the page marks what is trained."""
    model = write_tokenizer(tmp_path / "model", CHATML).parent
    (model / "config.json").write_text("{}")
    rows = [{"question": f"<b>{i}</b>?", "answer": f"it is {i} & more"} for i in range(10)]
    file = write_lines(tmp_path / "a.jsonl", rows)
    words = ["data", "inspect", "lora", "--model.path", str(model), "--data.path", str(file)]
    words += ["--data.cache_dir", str(tmp_path / "cache"), "--html", str(tmp_path / "a.html")]
    assert main(words) == 0
    assert "[[it is 0 & more<|im_end|>]]" in capsys.readouterr().out
    page = (tmp_path / "a.html").read_text("utf-8")
    assert "&lt;b&gt;0&lt;/b&gt;?" in page
    assert "<mark>it is 0 &amp; more&lt;|im_end|&gt;</mark>" in page
    assert main([*words[:-1], str(tmp_path / "nowhere" / "a.html")]) == 2


def test_chat_unreadable_files_are_reported(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "model", MARKED)
    jsonl = "".join(json.dumps(conversation(i)) + "\n" for i in range(100)).encode()
    squeezed, packed = gzip.compress(jsonl), zstandard.compress(jsonl)
    for name, data, rule in (
        ("a.jsonl.gz", squeezed[: len(squeezed) // 2], "the compressed file is truncated"),
        ("b.jsonl.gz", b"no gzip", r"b\.jsonl\.gz:1: the compressed file is damaged"),
        ("c.jsonl.zst", b"no zstd", r"c\.jsonl\.zst:1: the compressed file is damaged"),
        ("d.jsonl.zst", packed[:-3], "the compressed file is truncated"),
        (
            "e.jsonl.zst",
            packed + packed[:5],
            r"e\.jsonl\.zst:101: the compressed file is truncated",
        ),
        ("f.jsonl", jsonl.decode().encode("utf-16"), "the file is UTF-16"),
        ("g.jsonl", b'{"messages": "' + b"x" * (50 << 20) + b'"}', "messages is not a list"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InvalidConfig, match=rule):
            prepare_data(section(tmp_path / name, tokenizer), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    marked = b"\xef\xbb\xbf" + jsonl.replace(b"\n", b"\n\n")
    (tmp_path / "h.jsonl.zst").write_bytes(zstandard.compress(marked) + packed)
    text = prepare_data(section(tmp_path / "h.jsonl.zst", tokenizer), tmp_path / "cache")
    index = [line for split in ("train", "validation") for line in lines_of(text, split)]
    assert sorted(index) == sorted([*range(1, 201, 2), *range(201, 301)])


def lines_of(text: Dataset, split: SplitName) -> list[int]:
    store = text.sources[0].store
    return [int(line) for line in store.index(split)[:, 2]]


def test_chat_each_file_format_gives_the_same_conversations(tmp_path: Path) -> None:
    """Sources are tables, a local substitute for a hub dataset, globs and an object store."""
    import datasets
    import fsspec
    import pyarrow as pa
    import pyarrow.parquet as pq

    tokenizer = write_tokenizer(tmp_path / "model", MARKED)
    rows = [conversation(i) | {"id": i} for i in range(40)]
    rows[7]["messages"].append(message("user", "and?"))  # longer than the others
    rows[7]["messages"].append(message("assistant", "nothing"))
    directory = tmp_path / "lines"
    directory.mkdir()
    write_lines(directory / "a.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=7)
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    [arrow] = (tmp_path / "saved").glob("*.arrow")
    (tmp_path / "hub").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "hub/train.parquet")
    with fsspec.open("memory://bucket/chat/a.jsonl.gz", "wb") as file:
        file.write(gzip.compress((directory / "a.jsonl").read_bytes()))

    stores = {}
    for path in (
        str(directory / "a.jsonl"),
        str(directory / "*.jsonl"),
        str(tmp_path / "a.parquet"),
        str(tmp_path / "saved"),
        str(arrow),
        f"hf://{tmp_path / 'hub'}",
        "memory://bucket/chat",
        "memory://bucket/*/a.jsonl.gz",
    ):
        chosen = section(path, tokenizer, validation_fraction=0.1)
        assert check_chat(chosen) == []
        stores[path] = prepare_data(chosen, tmp_path / "cache").sources[0].store
    # A table row is a different text than a line, so the validation split may differ; the union is
    # equal.
    everything = {
        tuple(sorted(tokens_of(store, "train") + tokens_of(store, "validation")))
        for store in stores.values()
    }
    assert len(everything) == 1
    assert all(len(tokens_of(store, "validation")) == 4 for store in stores.values())


def tokens_of(store: Store, split: SplitName) -> list[tuple[int, ...]]:
    ends = store.index(split)[:, 0].tolist()
    result = store.tokens(split).read_windows(np.array([0]), ends[-1])[0].tolist()
    return [tuple(result[begin:end]) for begin, end in pairwise([0, *ends])]


def test_chat_tables_without_conversations_are_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    tokenizer = write_tokenizer(tmp_path / "model", MARKED)
    chosen = section(tmp_path / "a.parquet", tokenizer)
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "a.parquet")
    with pytest.raises(InvalidConfig, match=r"has no column 'messages' or .*it has text"):
        prepare_data(chosen, tmp_path / "cache")
    pq.write_table(pa.table({"prompt": ["a", "b"]}), tmp_path / "a.parquet")
    with pytest.raises(InvalidConfig, match=r"a\.parquet:1: has no messages"):
        prepare_data(chosen, tmp_path / "cache")
    rows = [{"messages": [{"role": "user", "content": b"\xff"}]}] * 2
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(InvalidConfig, match=r"a\.parquet:1: is not JSON-serializable: .*bytes"):
        prepare_data(chosen, tmp_path / "cache")
    prompts = pa.array([b"good", b"a\xffb"]).view(pa.string())
    pq.write_table(pa.table({"prompt": prompts, "response": ["a", "b"]}), tmp_path / "a.parquet")
    with pytest.raises(InvalidConfig, match=r"a line .*:\n  a\.parquet:2: is not UTF-8 \(byte 1"):
        prepare_data(chosen, tmp_path / "cache")


def test_chat_too_few_conversations_are_refused(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "model", LLAMA)
    file = write_lines(tmp_path / "a.jsonl", [conversation(1)] * 3)
    with pytest.raises(InvalidConfig, match="fewer than two"):
        prepare_data(section(file, tokenizer), tmp_path / "cache")
