"""``weft chat``: history, context, stopped answers, commands, and real terminals."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.chat import CHATML
from tests.random_runs import random_run
from weft.cli.main import main
from weft.config.errors import InvalidConfig
from weft.inference.generate import Sampling, encode_prompt
from weft.inference.text_model import ChatSession, TextModel, load_text_model

ROOT = Path(__file__).parent.parent.parent
SHORT = Sampling(max_tokens=5, temperature=0)


@pytest.fixture(scope="module")
def run_dir(store_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run whose chat template refuses the word 'refused'."""
    run = random_run(tmp_path_factory.mktemp("runs") / "chat", store_path)
    refuse = "{% for m in messages if 'refused' in m.content %}{{ raise_exception('no') }}"
    refuse += "{% endfor %}{% if mood is defined %}{{ raise_exception(mood) }}{% endif %}"
    (run / "chat_template.jinja").write_text(refuse + CHATML)
    return run


@pytest.fixture
def model(run_dir: Path) -> TextModel:
    return load_text_model(run_dir, torch.device("cpu"))


def test_chat_remembers_the_conversation(model: TextModel) -> None:
    session = ChatSession(model, SHORT)
    session.set_system("Be brief.")
    answers = ["".join(session.stream_answer(text)) for text in ("one", "two")]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}]
    (first,) = model.complete([messages], SHORT, is_chat=True)
    messages.append({"role": "assistant", "content": answers[0]})
    messages.append({"role": "user", "content": "two"})
    (second,) = model.complete([messages], SHORT, is_chat=True)
    assert answers == [first.text, second.text]
    assert session.messages == [*messages, {"role": "assistant", "content": answers[1]}]
    session.reset()
    assert session.messages == messages[:1]
    session.set_system("")
    assert session.messages == []


def test_generate_gives_variables_to_the_template(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", str(run_dir), "--chat", "one", "--max-tokens", "2"]
    assert main(words) == 0
    assert main([*words, "--data.chat_template_args", "mood=the mood"]) == 2
    assert "the mood" in capsys.readouterr().err


def test_chat_seed_counts_up(model: TextModel) -> None:
    session = ChatSession(model, Sampling(max_tokens=20, temperature=2.0, seed=4))
    first = "".join(session.stream_answer("x"))
    session.reset()
    assert first != "".join(session.stream_answer("x"))


def test_chat_beyond_the_context_drops_the_oldest_answers(model: TextModel) -> None:
    assert model.chat_format is not None
    session = ChatSession(model, replace(SHORT, max_tokens=0))
    session.set_system("system")
    for number in range(6):
        session.messages.append({"role": "user", "content": f"question {number}"})
        session.messages.append({"role": "assistant", "content": f"answer {number}"})
    session.messages.append({"role": "user", "content": "last"})
    length = len(encode_prompt(session.messages, model.chat_format))
    model.chat_format = replace(model.chat_format, max_context=length - 1)
    seen = session._recent_messages()
    assert [message["content"] for message in seen[:2]] == ["system", "question 1"]
    model.chat_format = replace(model.chat_format, max_context=2)
    assert [message["content"] for message in session._recent_messages()] == ["system", "last"]
    assert len(session.messages) == 14  # /save has all


def test_stopped_answer_stays_in_the_conversation(model: TextModel) -> None:
    session = ChatSession(model, replace(SHORT, max_tokens=50))
    answer = session.stream_answer("x")
    start = next(answer)
    answer.close()
    assert session.messages[1] == {"role": "assistant", "content": start}
    answer = ChatSession(model, SHORT).stream_answer("x")
    answer.close()  # before it began


def test_refused_message_leaves_the_conversation(model: TextModel) -> None:
    session = ChatSession(model, SHORT)
    list(session.stream_answer("x"))
    before = list(session.messages)
    with pytest.raises(InvalidConfig, match="cannot format the prompt"):
        list(session.stream_answer("refused"))
    assert session.messages == before


def chat(monkeypatch: pytest.MonkeyPatch, run: Path, text: str, *words: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    options = ["--max-tokens", "5", "--temperature", "0", "--run.device", "cpu"]
    return main(["chat", str(run), *options, *words])


def test_chat_command_answers_each_line(
    run_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "saved.jsonl"
    lines = ["one", "", "//two", "refused", f"/save {path}", "/save", "/nonsense", "/reset"]
    lines += ["/system Be brief.", "one", f"/save {tmp_path}/none/x", "/exit", "three"]
    assert chat(monkeypatch, run_dir, "\n".join(lines) + "\n") == 0
    out, err = capsys.readouterr()
    messages = json.loads(path.read_text("utf-8"))["messages"]
    assert [m["content"] for m in messages if m["role"] == "user"] == ["one", "/two"]
    answers = [m["content"] for m in messages if m["role"] == "assistant"]
    assert out.startswith(f"{answers[0]}\n{answers[1]}\n")
    assert "no chat template" not in err
    for text in ("cannot format", "write /save FILE", "/nonsense is not a command", "is empty"):
        assert text in err
    assert "cannot be written" in err
    command = ["generate", str(run_dir), "one", "--chat", "--max-tokens", "5", "--temperature"]
    assert main([*command, "0", "--run.device", "cpu"]) == 0
    assert capsys.readouterr().out == f"{answers[0]}\n"


def test_chat_command_without_template_continues_text(
    run_dir: Path,
    store_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = random_run(tmp_path / "plain", store_path)
    assert chat(monkeypatch, run, f"class \n/system x\ndef \n/save {tmp_path}/text") == 0
    out, err = capsys.readouterr()
    assert err.count("it continues your text instead of answering") == 1
    assert "has no system prompt" in err
    text = (tmp_path / "text").read_text("utf-8")
    first = out.split("\n")[0]
    assert text.startswith(f"class {first}\ndef ")
    with pytest.raises(SystemExit):
        chat(monkeypatch, run, "", "--top-k", "x")
    assert chat(monkeypatch, run, "", "--parallel.tp", "2", "--top-p", "3") == 2
    err = capsys.readouterr().err
    assert "parallel.tp" in err
    assert "--top-p" in err


class Screen:
    """The output of a terminal, which a test reads step by step."""

    def __init__(self, terminal: int) -> None:
        self._terminal, self._text = terminal, ""

    def wait_for(self, text: str, seconds: float = 100) -> None:
        """Read until ``text`` appears; drop the output up to its end."""
        until = time.monotonic() + seconds
        while text not in self._text:
            assert select.select([self._terminal], [], [], until - time.monotonic())[0], self._text
            self._text += os.read(self._terminal, 4096).decode("utf-8", "replace")
        self._text = self._text.partition(text)[2]


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(300)
def test_chat_on_a_terminal_stops_an_answer_and_ends(run_dir: Path) -> None:
    """Ctrl-C during an answer, Ctrl-C at the prompt, Ctrl-D."""
    terminal, there = pty.openpty()
    command = [sys.executable, "-m", "weft", "chat", str(run_dir), "--run.device", "cpu"]
    process = subprocess.Popen(
        [*command, "--max-tokens", "100000"],
        stdin=there,
        stdout=there,
        stderr=there,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm"},
        start_new_session=True,
    )
    os.close(there)
    screen = Screen(terminal)
    try:
        screen.wait_for("> ")
        os.write(terminal, b"hello\n")
        screen.wait_for("hello\r\n")
        select.select([terminal], [], [], 60)  # until the answer begins
        process.send_signal(signal.SIGINT)
        screen.wait_for("(stopped)")
        screen.wait_for("> ")
        time.sleep(1)  # `input` loses a signal between its prompt and its read
        process.send_signal(signal.SIGINT)
        screen.wait_for("Ctrl-D or /exit ends the chat")
        screen.wait_for("> ")
        os.write(terminal, b"\x04")
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
