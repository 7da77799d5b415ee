from __future__ import annotations

import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.cluster.requests import format_problems, request
from tests.cluster.requests import own_recipe as a_recipe
from weft.cluster.scheduler import (
    INTEGER_PATTERN,
    Option,
    build_command,
    build_script,
    check_name,
    check_options,
    parse_duration,
    run_cli,
    standalone_recipe,
    to_yaml,
)
from weft.config.errors import WeftError
from weft.config.reader import read_job


def test_seconds_of_a_duration_are_parsed() -> None:
    assert parse_duration("1-02:03:04") == 93784
    assert parse_duration("48:00:00") == 172800
    for text in ("90", "1:00", "00:60:00", "1-", "-1:00:00"):
        with pytest.raises(ValueError, match="must be D-HH:MM:SS or HH:MM:SS"):
            parse_duration(text)


def test_common_problems_several_mistakes_are_reported_at_once() -> None:
    launch_request = request(
        ("launch.time_limit", "soon"), options={"buckte": "b", "role": "a b", "disk": "x"}
    )
    known = {
        "bucket": Option("where to"),
        "role": Option("who"),
        "disk": Option("", INTEGER_PATTERN, "no"),
    }
    text = format_problems(check_options(launch_request, known, ["bucket"], r"\w+"))
    assert (
        "launch.options.buckte=\"b\" is not an option of this cluster. Did you mean 'bucket'?"
        in text
    )
    assert "launch.options.bucket is missing. Give --launch.options bucket=...: where to" in text
    assert "launch.options.role" in text
    assert 'launch.options.disk="x" no' in text
    assert "launch.time_limit" in text


def test_command_has_the_words_of_the_request() -> None:
    launch_request = request(
        ("train.steps", "5"), ("run.dir", "here"), ("launch.image", "i"), nodes=(2, 4)
    )
    assert build_command(launch_request, "r.toml", {"run.dir": "/runs/x"}) == [
        *("weft", "train", "r.toml", "--train.steps", "5"),
        *("--run.dir", "/runs/x", "--run.nodes", "2:4"),
    ]


def test_script_runs_the_command(tmp_path: Path) -> None:
    """Quotes in the words are escaped."""
    words = ["printf", "%s\n", "it's", "--a", "b c", "--d", '[{e = "$f"}]']
    text = build_script(["cd /", "x=1"], words)
    completed = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True)
    assert completed.stdout.splitlines() == words[2:]
    assert (
        subprocess.run(["bash", "-c", build_script(["false"], words)], check=False).returncode == 1
    )


def test_own_recipe_is_self_contained(tmp_path: Path) -> None:
    """The copy has all values except those of the submitting machine."""
    assert standalone_recipe(request()) is None
    recipe = a_recipe(tmp_path)
    text = standalone_recipe(request(recipe=recipe))
    assert text is not None
    (tmp_path / "alone.toml").write_text(text)
    job, _, problems = read_job(str(tmp_path / "alone.toml"))
    before, _, _ = read_job(recipe)
    assert not problems
    assert job.train == before.train
    assert job.data == before.data
    assert (job.run.dir, job.launch.image) == ("auto", "auto")


def test_yaml_round_trip_is_exact_and_readable() -> None:
    documents = [{"b": "x\ny\n", "a": ["1", 2, {"c": "yes"}]}, {"d": None}]
    text = to_yaml(documents, "two\nlines")
    assert text.startswith("# two\n# lines\nb: |\n  x\n  y\na:\n- '1'\n- 2\n")
    assert list(yaml.safe_load_all(text)) == documents


@pytest.mark.system
def test_tool_missing_or_failing_is_reported() -> None:
    with pytest.raises(WeftError, match=r"no-such-tool is not installed.*; get it"):
        run_cli("no-such-tool", "get", remedy="get it")
    with pytest.raises(WeftError, match=r"ls /no/such/place: .*[Nn]o such file"):
        run_cli("ls", "/no/such/place", remedy="")


def test_own_recipe_with_overrides_is_the_effective_job(tmp_path: Path) -> None:
    """Overrides replace the values of the recipe."""
    recipe = a_recipe(tmp_path)
    Path(recipe).write_text(
        'extends = "demo"\n[run]\ncluster = "2x8xH100"\nnodes = 2\n[train]\nsteps = 7\n'
    )
    overrides = [("run.cluster", "4x4xH200"), ("train.steps", "9"), ("model.dim", "64")]
    launch_request = request(*overrides, recipe=recipe, nodes=(4, 4))
    text = standalone_recipe(launch_request)
    assert text is not None
    tree = tomllib.loads(text)
    assert tree["run"] == {"cluster": "4x4xH200"}
    assert tree["train"]["steps"] == 9
    assert tree["model"]["dim"] == 64


@pytest.mark.parametrize("name", ["My_Run", "a--b", "x" * 41, "run.1"])
def test_check_name_directory_that_would_be_renamed_is_refused(name: str) -> None:
    launch_request = request()
    renamed = replace(
        launch_request, run_dir=launch_request.run_dir.with_name(name), name="renamed"
    )
    assert "Use another --run.dir, such as /fsx/renamed" in format_problems(
        list(check_name(renamed, "there"))
    )
    assert list(check_name(launch_request, "there")) == []
