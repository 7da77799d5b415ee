"""Run the commands of the pages about clusters and GPU machines, as far as possible here.

A command whose comment lists requirements is checked without them: see `tests.pages`.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests import pages
from weft.cli.main import build_parser, main
from weft.config.reader import read_job


def commands_of(page: str, directory: Path) -> list[tuple[list[str], str]]:
    """Write the files of a page; return the words and requirements of each command."""
    text = (pages.ROOT / "docs" / f"{page}.md").read_text("utf-8")
    pages.write_files(text, directory)
    commands = [(shlex.split(c.line), c.needs) for c in pages.commands_of(text) if not c.quoted]
    assert commands
    return commands


@pytest.mark.system
@pytest.mark.parametrize("page", ["slurm", "kubernetes", "hyperpod", "sagemaker", "skypilot"])
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
        if words[0] != "weft" or words[1] == "job":
            assert needs
            continue
        assert words[:2] == ["weft", "launch"]
        assert ("--dry-run" in words) != bool(needs)
        assert main([*words[1:], *["--dry-run"] * ("--dry-run" not in words)]) == 0
        requested += 1
    assert requested >= 2
    assert {path.name for path in tmp_path.iterdir()} <= {
        "bin",
        "container.toml",
        "mine.toml",
        "eks.toml",
        "patch.yaml",
    }


def test_page_of_a_gpu_machine_names_existing_recipes_and_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    planned = 0
    for words, needs in commands_of("gpu-node", tmp_path):
        if words[0] != "weft":
            assert needs
            continue
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
