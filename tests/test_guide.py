"""Every command in docs/guide.md prints the output that the guide quotes.

``python -m tests.test_guide`` writes the current output into the guide, whose text may then need
an update.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import tempfile
from pathlib import Path

import pytest

from weft.cli.main import main

GUIDE = Path(__file__).parent.parent / "docs" / "guide.md"
QUOTE = re.compile(r"^```\n\$ weft (.*)\n((?:.*\n)*?)```$", re.MULTILINE)
QUOTED = QUOTE.findall(GUIDE.read_text("utf-8"))


def run_and_capture(command: str, out: Path) -> str:
    """Run a command and return its output without progress lines."""
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        assert main([*shlex.split(command), "--out", str(out)]) == 0
    output = [line for line in stream.getvalue().splitlines(keepends=True) if line.strip()]
    return "".join(line for line in output if not re.match(r"plan \d+ of |all runs are in ", line))


def test_guide_quotes_commands() -> None:
    assert len(QUOTED) > 8
    assert all(command.startswith("compare ") for command, _ in QUOTED)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("command", "answer"), QUOTED, ids=[command for command, _ in QUOTED])
def test_guide_command_prints_the_quoted_output(command: str, answer: str, tmp_path: Path) -> None:
    assert run_and_capture(command, tmp_path / "out").splitlines() == answer.splitlines()


def rewrite() -> None:
    text = GUIDE.read_text("utf-8")
    for command, answer in QUOTED:
        with tempfile.TemporaryDirectory() as directory:
            output = run_and_capture(command, Path(directory) / "out")
        print(f"{'same   ' if output == answer else 'changed'} {command}", flush=True)
        text = text.replace(f"$ weft {command}\n{answer}```", f"$ weft {command}\n{output}```")
        GUIDE.write_text(text, "utf-8")


if __name__ == "__main__":
    rewrite()
