"""Control characters in untrusted text do not reach a terminal."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.harness import ROOT
from weft.cli.main import main
from weft.config.escaping import (
    EscapingStream,
    escape_controls,
    escaping_stream,
    is_one_line,
    raw_stream,
)
from weft.data.prepare import show_progress
from weft.data.prepared_cache import Progress
from weft.monitor.terminal import quiet_console

TITLE = "\x1b]0;owned\x07"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TITLE, r"\x1b]0;owned\x07"),
        ("a\rb\x7f\x9b2J", r"a\rb\x7f\x9b2J"),
        ("\u202egnp.exe\u2066\u2028", r"\u202egnp.exe\u2066\u2028"),
        ("caf\udce9", r"caf\udce9"),
        ("tab\tand\nnewline, ünïcode 漢字", "tab\tand\nnewline, ünïcode 漢字"),
    ],
)
def test_escape_controls_escapes_control_characters(text: str, message: str) -> None:
    assert escape_controls(text) == message


def test_is_one_line_with_controls_is_false() -> None:
    assert is_one_line("/data/ünï code/x")
    assert not any(map(is_one_line, ("a\nb", "a\tb", "a\x1bb", "a\x85b", "a\udcffb")))


def test_escaping_stream_over_a_stream_escapes_once_and_can_be_lifted() -> None:
    raw = io.StringIO()
    stream = escaping_stream(escaping_stream(raw))
    print(TITLE, file=stream)
    stream.writelines([TITLE, "\n"])
    print(TITLE, file=raw_stream(stream))
    assert raw.getvalue() == r"\x1b]0;owned\x07" + "\n" + r"\x1b]0;owned\x07" + f"\n{TITLE}\n"
    assert isinstance(stream, EscapingStream)
    assert raw_stream(raw) is raw


def test_quiet_console_on_a_terminal_prints_controls_escaped() -> None:
    written = io.StringIO()
    console = quiet_console(escaping_stream(written))
    console.print(f"resuming from {TITLE}", soft_wrap=True)
    assert written.getvalue() == "resuming from \\x1b]0;owned\\x07\n"


def test_progress_bar_of_a_hostile_name_is_escaped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Brackets must not be parsed as rich's markup: an unmatched closing tag would raise."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    outside, inside = os.openpty()
    with open(inside, "w", encoding="utf-8") as terminal:
        with show_progress(quiet_console(terminal)) as show:
            show(Progress(f"reading [/x] {TITLE}.txt", 1, 2))
            time.sleep(0.3)  # the bar is drawn ten times a second
        written = os.read(outside, 100_000).decode()
    os.close(outside)
    assert r"reading [/x] \x1b]0;owned\x07.txt" in written


@pytest.mark.parametrize(
    "words",
    [
        ["train", "demo", f"--model.{TITLE}", "3"],
        ["train", f"{TITLE}.toml"],
        ["train", "demo", "--data.path", f"/nowhere/{TITLE}"],
        [TITLE],
        ["report", f"/nowhere/{TITLE}"],
        ["generate", f"/nowhere/{TITLE}"],
        ["hang", f"/nowhere/{TITLE}"],
        ["job", "status", f"/nowhere/{TITLE}"],
        ["export", f"/nowhere/{TITLE}", "out"],
    ],
)
def test_command_with_a_hostile_word_prints_it_escaped(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with suppress(SystemExit):  # argparse's
        assert main(words) != 0
    captured = capsys.readouterr()
    output = captured.out + captured.err
    assert "owned" in output
    assert "\x1b" not in output
    assert "\x07" not in output


@pytest.mark.parametrize("name", [b"a\nb", b"a\x1bb", b"a\xffb"])
def test_command_in_a_hostile_directory_is_refused_in_a_sentence(
    name: bytes, tmp_path: Path
) -> None:
    directory = os.path.join(os.fsencode(tmp_path), name)
    os.mkdir(directory)
    completed = subprocess.run(
        [sys.executable, "-m", "weft", "train", "demo", "--dry-run"],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=False,
    )
    assert completed.returncode == 2
    output = completed.stderr.decode("ascii")
    assert "the working directory" in output
    assert "Traceback" not in output
