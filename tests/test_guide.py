"""Every command that docs/guide.md quotes still says what is quoted there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from weft.cli import main

GUIDE = Path(__file__).parent.parent / "docs" / "guide.md"
QUOTED = re.findall(r"^```\n\$ weft (.*)\n((?:.*\n)*?)```$", GUIDE.read_text(), re.MULTILINE)


def test_commands_are_quoted() -> None:
    assert len(QUOTED) > 8
    assert all(command.startswith("compare ") for command, _ in QUOTED)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("command", "answer"), QUOTED, ids=[command for command, _ in QUOTED])
def test_a_command_says_what_is_quoted(
    command: str, answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*shlex.split(command), "--out", str(tmp_path / "out")]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line]
    kept = [line for line in said if not re.match(r"plan \d+ of |everything is in ", line)]
    assert kept == answer.splitlines()
