"""Templates that do not end, fill the memory or are nested too deeply are refused."""

from __future__ import annotations

import resource
import signal
import time
from pathlib import Path

import pytest

from tests.chat import make_tokenizer
from weft.config.errors import InvalidConfig
from weft.config.schema import DataSection
from weft.data import render_limits
from weft.data.chat_template import ChatTemplate, load_chat_template
from weft.inference.evaluate import _render

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = (
    "{% set ns = namespace(x='abcdefgh') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
)


def load(directory: Path, template: str) -> ChatTemplate:
    directory.mkdir(exist_ok=True)
    make_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "t.jinja").write_text(template)
    section = DataSection(
        tokenizer=str(directory / "tokenizer.json"),
        format="chat",
        chat_template=str(directory / "t.jinja"),
    )
    return load_chat_template(section)


@pytest.mark.parametrize(
    ("template", "rule"),
    [
        (ENDLESS, "needs more than 0.2 seconds for one conversation"),
        ("{{ ('a b ' * 3000000)|wordwrap(3) }}", "needs more than 0.2 seconds"),
        ("{{ 'x' * 100000000000 }}", "needs more than 1 GiB of memory for one conversation"),
        ("{% set x = [0] * 10 ** 12 %}", "needs more than 1 GiB of memory"),
        ("{{ 'a'|center(9000000000) }}", "needs more than 1 GiB of memory"),
        (DOUBLING, "for one conversation"),  # either limit
        ("{% if 1 %}" * 2000 + "{% endif %}" * 2000, "is nested too deeply (RecursionError)"),
        ("{% for a in b %}" * 60 + "{% endfor %}" * 60, "is nested too deeply (SyntaxError)"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "is nested too deeply (RecursionError)"),
        ("{% for a in messages %}{{ a.content", "is not a chat template: line 1: unexpected end"),
        ('{{ b"abc" }}', "is not a chat template: line 1: expected token"),
    ],
)
def test_load_chat_template_hostile_template_is_refused(
    template: str, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render_limits, "MAX_SECONDS", 0.2)
    start = time.process_time()
    with pytest.raises(InvalidConfig) as caught:
        load(tmp_path, template)
    [error] = caught.value.errors
    assert error.key == "data.chat_template"
    assert str(tmp_path / "t.jinja") in str(error)
    assert rule in str(error)
    assert time.process_time() - start < 5
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_render_conversation_that_takes_too_long_is_no_error_of_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render_limits, "MAX_SECONDS", 0.2)
    late = f"{{% if messages[0].content == 'late' %}}{ENDLESS}{{% endif %}}fine"
    template = load(tmp_path, late)
    assert template.render([{"role": "user", "content": "x"}], None, True) == "fine"
    with pytest.raises(InvalidConfig, match="needs more than"):
        template.render([{"role": "user", "content": "late"}], None, True)


def test_render_task_template_that_does_not_end_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(render_limits, "MAX_SECONDS", 0.2)
    with pytest.raises(ValueError, match="a template needs more than"):
        _render(ENDLESS, {})
