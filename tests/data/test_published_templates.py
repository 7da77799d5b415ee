"""Published chat templates: transformers' token ids, TRL's masks, and ends at which models stop."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.chat_templates import (
    CONVERSATIONS,
    PAGE,
    Model,
    Theirs,
    make_page,
    originals,
    parse,
    trained_texts,
    training,
)
from weft.data.chat_rows import Example, InvalidConversation
from weft.data.chat_template import ChatTemplate, strip_marks
from weft.data.chat_turns import Rendered


@pytest.mark.parametrize("name", originals())
def test_published_template_trains_what_inference_generates(name: str, tmp_path: Path) -> None:
    model = Model(name, tmp_path)
    encoder, theirs = model.encoder(), Theirs(model)
    for conversation in CONVERSATIONS:
        example = parse(conversation)
        expected = theirs.render_text(example.messages, example.tools, False)
        try:
            rendered = encoder.render(example)
        except InvalidConversation:
            assert expected is None, conversation  # transformers refuses it, too
            continue
        encoded = encoder.encode(rendered)
        for each in encoded:
            if name.startswith("deepseek") and conversation.startswith("tool call"):
                continue  # their template ends a single call with no end token, which weft says
            for text in trained_texts(encoder, each):
                last = encoder.tokenizer.encode(text.rstrip(), add_special_tokens=False).ids[-1]
                assert last in encoder.end_tokens, (conversation, text)
        if expected is None:
            continue  # weft gives such a template what it takes
        if len(rendered) == 1 and rendered[0].text.startswith(expected):
            ids = theirs.tokenizer(expected, add_special_tokens=False)["input_ids"]
            tokens = encoded[0].tokens.tolist()
            assert tokens[: len(ids)] == ids, conversation
            assert len(tokens) <= len(ids) + 1  # the end token of a template that writes none
            check_mask(model, theirs, conversation, rendered[0])
        else:
            check_turns(theirs, example, rendered)


@pytest.mark.parametrize("name", training())
def test_training_template_trains_what_transformers_marks(name: str, tmp_path: Path) -> None:
    model = Model(name, tmp_path)
    assert model.training_source is not None
    template = tmp_path / "training.jinja"
    template.write_text(model.training_source, "utf-8")
    encoder, theirs = model.encoder(chat_template=str(template)), Theirs(model)
    theirs.tokenizer.chat_template = model.training_source
    num_compared = 0
    for conversation in CONVERSATIONS:
        example = parse(conversation)
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        expected = theirs.render(example.messages, example.tools, **options)
        try:
            [encoded] = encoder.encode(encoder.render(example))
        except InvalidConversation:
            assert expected is None, conversation
            continue
        if expected is not None:
            assert encoded.tokens.tolist() == expected["input_ids"], conversation
            assert encoded.loss_mask.tolist() == [m == 1 for m in expected["assistant_masks"]]
            num_compared += 1
    assert num_compared >= 8


@pytest.mark.parametrize("name", ["cohere", "gemma3", "llama3_1", "phi3_5", "qwen2_5"])
def test_one_pass_trains_as_many_tokens_as_one_example_per_turn(name: str, tmp_path: Path) -> None:
    encoder = Model(name, tmp_path).encoder()
    example = parse("two turns")
    numbers = []
    for untrained in ((), (1,), (3,)):
        weights = tuple(float(n not in untrained) for n in range(len(example.messages)))
        [encoded] = encoder.encode(encoder.render(example._replace(weights=weights)))
        numbers.append(int(encoded.loss_mask.sum()))
    assert numbers[0] == numbers[1] + numbers[2]
    last = Model(name, tmp_path).encoder(train_turns="last")
    [encoded] = last.encode(last.render(example))
    assert int(encoded.loss_mask.sum()) == numbers[1]


def test_answer_that_no_user_asked_for_is_refused_if_the_template_needs_one(tmp_path: Path) -> None:
    encoder = Model("qwen3_5_think", tmp_path).encoder()
    messages = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(InvalidConversation, match="has no answer to a user"):
        encoder.render(Example(messages, None, 0))


def check_turns(theirs: Theirs, example: Example, rendered: list[Rendered]) -> None:
    """Check that each example is a generation prompt of transformers, then the whole answer."""
    turns = example.trained_turns[-len(rendered) :]
    if len(rendered) < len(example.trained_turns):
        assert len(rendered) == 1 or example.messages[0]["role"] == "assistant"
    for turn, each in zip(turns, rendered, strict=True):
        prompt = theirs.render_text(example.messages[:turn], example.tools, True)
        if prompt is None:
            continue
        begin = each.spans[0].start
        # The prompt may end with the beginning of a reasoning, or with blanks, that the answer has.
        shared = prompt[: prompt.rfind("<think>")] if "<think>" in prompt[begin - 10 :] else prompt
        assert each.text.startswith(shared.rstrip())
        content = example.messages[turn].get("content", "").rpartition("</think>")[2].strip()
        assert content in each.text[begin : each.spans[0].stop]


def check_mask(model: Model, theirs: Theirs, conversation: str, rendered: Rendered) -> None:
    """Compare the trained text with that of the training template, if it renders the same.

    TRL's templates also mark what inference does not generate: the header of the turn, or the
    reasoning that the generation prompt opens, and a newline after the end token.
    """
    source = model.training_source
    if source is None:
        return
    special = {
        name: token
        for name in ("bos_token", "eos_token")
        if (token := getattr(theirs.tokenizer, name)) is not None
    }
    template = ChatTemplate({"default": source}, special, "trl")
    example = parse(conversation)
    try:
        text, spans = strip_marks(template.render(example.messages, example.tools, False))
    except InvalidConversation:
        return
    if text != rendered.text or conversation == "empty answer":
        return
    stops = "|".join(re.escape(token) for token in (model.tokens.end, *model.tokens.stops))
    end = re.compile(rf"(?:(?:{stops})\s*)+\Z")
    marked, ours = (
        [
            content
            for span in join(text, every)
            if (content := end.sub("", text[span.start : span.stop]))
        ]
        for every in (spans, rendered.spans)
    )
    if conversation == "assistant first":  # the first turn has no prompt in some templates
        marked = marked[-len(ours) :]
    if conversation == "two answers in a row" and len(marked) == 1:  # with the header between them
        ours = ours[-1:]
    assert len(marked) == len(ours), conversation
    for theirs_text, our_text in zip(marked, ours, strict=True):
        short, long = sorted((theirs_text, our_text), key=len)
        assert long.endswith(short), conversation
        header = long.removesuffix(short)
        assert len(header) < 30 or conversation == "two answers in a row", header


def join(text: str, spans: list[range]) -> list[range]:
    """Return the spans; those with only blanks between them are one."""
    joined: list[range] = []
    for span in spans:
        if joined and not text[joined[-1].stop : span.start].strip():
            joined[-1] = range(joined[-1].start, span.stop)
        else:
            joined.append(span)
    return joined


def test_page_of_published_templates_is_current() -> None:
    assert PAGE.read_text("utf-8") == make_page()
