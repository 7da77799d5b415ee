"""Run every command in the pages about laptops and clusters.

A command whose comment lists requirements is checked as far as possible without them. Other
commands run unchanged. Recipes on a page have the name that its commands use.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.cluster.conftest import WEFT
from tests.harness import ROOT
from weft.cli.main import build_parser, main
from weft.config.reader import read_job

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDS = re.compile(r"  # needs (.+)$")


def commands_of(page: str, directory: Path) -> list[tuple[list[str], str]]:
    """Return the words and requirements of each command; write the page's recipe."""
    blocks = BLOCK.findall((ROOT / "docs" / f"{page}.md").read_text("utf-8"))
    for text in (text for kind, text in blocks if kind == "toml"):
        (directory / "mine.toml").write_text(text)
    results = []
    for kind, text in blocks:
        # Skip blocks that begin with '$ ': they contain printed output.
        for line in text.splitlines() if not kind and not text.startswith("$ ") else []:
            needs = NEEDS.search(line)
            if words := shlex.split(line, comments=True):
                results.append((words, needs[1] if needs else ""))
    assert results
    return results


@pytest.mark.system
@pytest.mark.parametrize("page", ["slurm", "kubernetes", "sagemaker", "skypilot"])
def test_page_of_a_cluster_commands_succeed(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # No cluster is available for a submission; another test runs SkyPilot's check.
    bin = tmp_path / "bin"
    bin.mkdir()
    (bin / "bash").symlink_to("/bin/bash")
    monkeypatch.setenv("PATH", str(bin))
    requested = 0
    for words, needs in commands_of(page, tmp_path):
        if words[0] == "srun":
            assert needs
            continue
        if words[:2] == ["weft", "job"]:
            assert needs
            continue
        assert words[:2] == ["weft", "launch"]
        assert ("--dry-run" in words) != bool(needs)
        assert main([*words[1:], *["--dry-run"] * ("--dry-run" not in words)]) == 0
        requested += 1
    assert requested >= 2
    assert {path.name for path in tmp_path.iterdir()} <= {"bin", "mine.toml"}


def test_page_of_a_gpu_machine_names_existing_recipes_and_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    planned = 0
    for words, needs in commands_of("gpu-node", tmp_path):
        assert words[0] == "weft"
        if not needs or words[1] == "train":
            options = build_parser().parse_args(words[1:])
            assert options.errors == []
            recipes = options.recipes if words[1] == "compare" else [options.recipe]
            for recipe in recipes:
                _, _, errors = read_job(recipe, options.overrides)
                assert errors == []
            planned += not needs
    assert planned >= 3


@pytest.mark.slow
def test_page_of_a_gpu_machine_plans_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words, needs in commands_of("gpu-node", tmp_path):
        if not needs:
            assert main(words[1:]) == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_page_of_a_laptop_commands_succeed(tmp_path: Path) -> None:
    """Run the commands in order, with only the files of the page."""
    library = Path(sysconfig.get_paths()["stdlib"])
    book = (path.read_text("utf-8") for path in sorted(library.glob("[a-d]*.py")))
    (tmp_path / "my-book.txt").write_text("".join(book))
    for words, needs in commands_of("laptop", tmp_path):
        assert not needs
        completed = subprocess.run(
            [*WEFT, *words[1:]], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        expected = 1 if words[1] == "diff" else 0
        assert completed.returncode == expected, f"{words}: {completed.stdout}{completed.stderr}"
    assert (tmp_path / "runs" / "mine" / "report.html").is_file()
