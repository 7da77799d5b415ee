"""Variants, their order, and real runs: killed, crashed, resumed and extended."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.commands import WEFT, run_weft
from tests.conftest import make_once
from tests.small import SMALL, Overrides
from tests.test_cli import rejected
from weft.cli.main import main
from weft.comparison.experiment import failure_reason, trial_order
from weft.comparison.trials import trial_seed
from weft.comparison.variants import (
    Variant,
    parse_vary,
    prepare_variant,
    read_variants,
    split_values,
)
from weft.config.errors import ConfigErrors, InvalidConfig
from weft.config.exit_statuses import REQUEUE
from weft.config.files import write_json
from weft.config.reader import read_job
from weft.planning.plan import Plan


def toml(path: Path, store: Path, *changes: tuple[str, Any]) -> str:
    """Write a recipe of the small model; return its path."""
    pairs: list[tuple[str, Any]] = [*SMALL, ("data.path", str(store)), ("run.nproc_per_node", "1")]
    job, _, errors = read_job("demo", [*pairs, *changes])
    assert not errors
    path.write_text(tomli_w.dumps(job.model_dump(mode="json")))
    return str(path)


def slow(seconds: float, rank: int = 0) -> tuple[str, str]:
    """Return an override that adds a sleep to every step."""
    fault = f'{{site="forward_backward", kind="slow", seconds={seconds}, times=1000, rank={rank}}}'
    return ("resilience.faults", f"[{fault}]")


# --------------------------------------------------------------------------- variants


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("1,2", ["1", "2"]),
        ("[1,2],[2,1]", ["[1,2]", "[2,1]"]),
        ("[{a=1,b=[2,3]},{c=4}], []", ["[{a=1,b=[2,3]},{c=4}]", "[]"]),
        ("'a,b',c", ["a,b", "c"]),
        ('["a,b"],"c"', ['["a,b"]', "c"]),
        ("one", ["one"]),
        ("it's,hers", ["it's", "hers"]),
        ("a,,b", ["a", "", "b"]),
    ],
)
def test_split_values_brackets_and_quotes_are_not_split(text: str, parts: list[str]) -> None:
    assert split_values(text) == parts


def test_parse_vary_mistakes_are_problems() -> None:
    errors = ConfigErrors()
    for text in ("parallel.tp", "parallel.tp=", "parallel.tp=1,,2", "parallel.tp=1,2,1"):
        assert parse_vary(text, errors) == []
    assert [error.value for error in errors][3] == "parallel.tp=1,2,1"
    assert parse_vary("train.global-batch-size=4,8", errors) == [
        ("train.global_batch_size", ["4", "8"])
    ]
    assert len(errors) == 4


def variants(*arguments: Any, overrides: Overrides = []) -> list[Variant]:  # noqa: B006
    recipes, *vary = arguments
    all_overrides = [("run.device", "cpu"), ("run.nproc_per_node", "2"), *overrides]

    def read(recipe: str, overrides: Overrides) -> Plan:
        return prepare_variant("runs", recipe, overrides)

    return read_variants(recipes, vary, all_overrides, [], read)


def test_variants_labels_name_what_changed() -> None:
    result = variants(
        ["demo"], ("parallel.tp", ["1", "2"]), ("activation_checkpoint.mode", ["none", "full"])
    )
    assert [item.label for item in result] == [
        "tp=1, activation_checkpoint=none",
        "tp=1, activation_checkpoint=full",
        "tp=2, activation_checkpoint=none",
        "tp=2, activation_checkpoint=full",
    ]
    assert [item.job.parallel.tp for item in result] == [1, 1, 2, 2]
    assert all(item.job.checkpoint.interval == 0 for item in result)
    two = variants(["demo"], ("train.steps", ["5", "6"]), ("compile.enable", ["false", "true"]))
    assert two[3].label == "steps=6, compile=true"
    assert [variant.label for variant in variants(["demo", "demo"])] == ["demo", "demo (2)"]
    named = variants(["demo", "demo"], overrides=[("checkpoint.interval", "5")])
    assert named[0].job.checkpoint.interval == 5


def test_variants_invalid_one_is_a_row_all_invalid_raise() -> None:
    result = variants(["demo"], ("parallel.tp", ["1", "3", "x"]))
    assert [item.plan is None for item in result] == [False, True, True]
    assert "does not divide" in result[1].errors[0]
    assert result[2].errors[0].startswith('parallel.tp="x" must be a whole number')
    with pytest.raises(InvalidConfig) as caught:
        variants(["demo"], ("parallel.tpp", ["1", "2"]))
    assert [error.key for error in caught.value.errors] == ["parallel.tpp"] * 2


def test_compare_all_mistakes_are_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    lines = rejected(
        capsys,
        *["compare", "demo", "dmeo", "--repeat", "0", "--margin", "much", "--price", "-1"],
        *["--cluster", "2x8xh100", "--vary", "optim.lr", "--run.dir", "x", "--train.stepz", "3"],
        *["--vary", "train.seed=1,2", "--train.seed", "3"],
    )
    keys = [line.split("=")[0].split()[0] for line in lines]
    assert {*keys} >= {
        *["--repeat", "--margin", "--price", "--cluster", "--vary", "run.dir", "train.seed"],
        "recipe",
    }
    assert any("Did you mean 'demo'?" in line for line in lines)
    twice = ["--vary", "train.seed=1,2", "--vary", "train.seed=3,4"]
    (line,) = rejected(capsys, "compare", "demo", *twice)
    assert line.startswith("train.seed is given more than once")
    (line,) = rejected(capsys, "compare", "demo")
    assert line.startswith("RECIPE is the only variant")
    (line,) = rejected(capsys, "compare", "demo", "--vary", "train.seed=1,2", "--train.stepz", "3")
    assert line.startswith("train.stepz=3 is not a known key")


def test_compare_under_torchrun_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    (line,) = rejected(capsys, "compare", "demo", "--vary", "train.seed=1,2")
    assert "Run it outside torchrun" in line


def test_compare_without_scipy_fails_before_any_trial(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    command = ["compare", "demo", "--vary", "train.seed=1,2", "--out", str(tmp_path / "out")]
    assert main(command) == 1
    assert "comparing runs needs SciPy: pip install 'weft[compare]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_compare_directory_with_other_files_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "letters.txt").write_text("dear")
    command = ["compare", "demo", "--vary", "train.seed=1,2", "--out", str(tmp_path)]
    (line,) = rejected(capsys, *command)
    assert "neither empty nor the directory of a comparison" in line
    assert [path.name for path in tmp_path.iterdir()] == ["letters.txt"]
    for damaged in ('{"compared": [', "[]", "7"):
        (tmp_path / "comparison.json").write_text(damaged)
        (line,) = rejected(capsys, *command)
        assert "neither empty nor the directory of a comparison" in line
    (tmp_path / "comparison.json").write_text('{"verdict": []}')
    (line,) = rejected(capsys, *command)
    assert "holds a comparison made with --plan-only" in line


def test_order_alternates_and_seeds_are_paired() -> None:
    assert trial_order([0, 1, 2], 3) == [
        *[(1, 0), (1, 1), (1, 2)],
        *[(2, 2), (2, 1), (2, 0)],
        *[(3, 0), (3, 1), (3, 2)],
    ]
    same = variants(["demo"], ("parallel.tp", ["1", "2"]), overrides=[("train.seed", "7")])
    assert [[trial_seed(same, v, r) for r in (1, 2, 3)] for v in (0, 1)] == [[7, 8, 9]] * 2
    other = variants(["demo"], ("train.seed", ["1", "2"]))
    seeds = [trial_seed(other, v, r) for v in (0, 1) for r in (1, 2, 3)]
    assert len(set(seeds)) == 6


def test_failure_reason_of_a_trial_is_its_last_error() -> None:
    output = "step 1\nweft: rank 0 failed: KeyError: 3\n  | Traceback\n  log: x\n"
    assert failure_reason(1, output) == "rank 0 failed: KeyError: 3"
    output = "weft: 2 problems, nothing was started:\n  a=1 is bad. Use 2.\n  b=2 is worse.\n"
    assert failure_reason(2, output) == "a=1 is bad. Use 2. b=2 is worse."
    assert failure_reason(-9, "") == "ended with signal SIGKILL"


# --------------------------------------------------------------------------- real runs


def start(command: list[str], directory: Path) -> subprocess.Popen[str]:
    """Start ``weft compare`` in a directory; its output is appended to ``output``."""
    with (directory / "output").open("a") as file:
        return subprocess.Popen(
            [*WEFT, "compare", *command], cwd=directory, stdout=file, stderr=file, text=True
        )


def finish(command: list[str], directory: Path) -> tuple[int, dict[str, Any]]:
    """Run ``weft compare``; return its exit status and ``comparison.json``."""
    status = start(command, directory).wait(timeout=400)
    return status, json.loads((directory / "out/comparison.json").read_text())


def wait_for_text(path: Path, text: str, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not path.is_file() or text not in path.read_text():
        assert process.poll() is None, "it ended before"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def stamps(directory: Path, pattern: str) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(directory.glob(pattern))}


def no_ranks_in(directory: Path) -> bool:
    """Return True if no process of a run below a directory is left."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(directory) in entry.read_text():
                return False
        except OSError:
            continue
    return True


def compare_once(directory: Path, store: Path) -> None:
    """Compare four variants, of which one crashes and one is invalid."""
    same = [("train.steps", "12"), ("resilience.max_restarts_per_hour", "0")]
    crash = '[{site="gradients", kind="raise", passing=3}]'
    recipes = [
        toml(directory / "plain.toml", store, *same, slow(0.1)),
        toml(directory / "seed.toml", store, *same, slow(0.1), ("train.seed", "5")),
        toml(directory / "crash.toml", store, *same, ("resilience.faults", crash)),
        toml(directory / "wrong.toml", store, *same, ("parallel.tp", "3")),
    ]
    command = [*map(os.path.basename, recipes), "--out", "out", "--price", "2"]
    completed = run_weft([*WEFT, "compare", *command, "--repeat", "1"], directory)
    (directory / "output").write_text(completed.stdout + completed.stderr)
    (directory / "status").write_text(str(completed.returncode))


@pytest.fixture(scope="module")
def first_comparison(
    store_path: Path, shared_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Return a copy of a comparison with one repeat, which the workers of this run share."""
    shared = make_once(shared_dir / "compared", lambda path: compare_once(path, store_path))
    directory = tmp_path_factory.mktemp("once")
    shutil.copytree(shared, directory, dirs_exist_ok=True)
    recipes = [f"{name}.toml" for name in ("plain", "seed", "crash", "wrong")]
    return {
        "directory": directory,
        "recipes": [str(directory / name) for name in recipes],
        "command": [*recipes, "--out", "out", "--price", "2"],
        "status": int((directory / "status").read_text()),
        "found": json.loads((directory / "out/comparison.json").read_text()),
    }


@pytest.fixture(scope="module")
def second_comparison(first_comparison: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Add a second repeat, kill the comparison, interrupt it with Ctrl-C, and resume."""
    directory = first_comparison["directory"]
    command = [*first_comparison["command"], "--repeat", "2"]
    before = stamps(directory, "out/1-plain-repeat-1/**/*")
    process = start(command, directory)
    wait_for_text(directory / "out/2-seed-repeat-2/metrics.jsonl", '"step": 3', process)
    process.kill()
    process.wait()
    process = start(command, directory)
    wait_for_text(directory / "out/2-seed-repeat-2/metrics.jsonl", '"step": 6', process)
    process.send_signal(signal.SIGINT)
    stopped = process.wait(timeout=60)
    status, result = finish(command, directory)
    after = stamps(directory, "out/1-plain-repeat-1/**/*")
    stamped = {"before": before, "after": after}
    yield first_comparison | {"stopped": stopped, "status": status, "found": result} | stamped
    assert no_ranks_in(directory)


pytestmark = pytest.mark.timeout(600, method="signal")


@pytest.mark.slow
def test_compare_resumed_does_not_repeat_finished_trials(
    second_comparison: dict[str, Any],
) -> None:
    assert second_comparison["before"] == second_comparison["after"] != {}
    assert (second_comparison["directory"] / "output").read_text().count("plain, repeat 1") == 1


def test_compare_one_run_each_gives_no_verdict(first_comparison: dict[str, Any]) -> None:
    result = first_comparison["found"]
    assert first_comparison["status"] == 0
    (sentence,) = result["verdict"]
    # A seed has no speed, so the verdict is about the loss alone.
    assert re.fullmatch(r"seed's validation loss was \S+ % \(one pair: no verdict\)", sentence)
    (comparison,) = result["comparisons"]
    assert comparison["speed"]["interval"] is comparison["loss"]["interval"] is None
    trials = [variant["trials"] for variant in result["variants"]]
    assert [len(subset) for subset in trials] == [1, 1, 0, 0]
    (trial,) = trials[1]
    assert trial["tokens"] == 12 * 8 * 32
    assert (trial["records"], trial["warm_up"]) == (10, 2)
    assert trial["step_seconds"] > 0.1


def test_compare_crash_and_invalid_variant_are_rows(first_comparison: dict[str, Any]) -> None:
    wrong, crash = sorted(
        first_comparison["found"]["failures"], key=lambda line: line.startswith("crash")
    )
    assert wrong.startswith("wrong: cannot be run: parallel.tp=3 does not divide")
    assert "crash: repeat 1 failed: rank 0 failed: RuntimeError: injected fault" in crash
    log = first_comparison["directory"] / crash.rpartition("log: ")[2]
    assert "injected fault" in log.read_text()


def test_compare_directory_collects_what_has_finished(
    first_comparison: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The directory of a comparison, also one that was killed, trains and plans nothing."""
    out = tmp_path / "out"
    shutil.copytree(first_comparison["directory"] / "out", out)
    before = stamps(out, "*-repeat-1/**/*")
    record = json.loads((out / "comparison.json").read_text())
    assert main(["compare", str(out)]) == 0
    again = json.loads((out / "comparison.json").read_text())
    for key in ("verdict", "failures", "ended", "looks", "compared", "settings"):
        assert again[key] == record[key] or key == "failures", key
    assert [line.partition("; log")[0] for line in again["failures"]] == [
        line.partition("; log")[0] for line in record["failures"]
    ]
    # A process that is killed leaves finished trials without a result.
    write_json(out / "comparison.json", record | {"ended": [], "looks": []})
    assert main(["compare", str(out), "--price", "3", "--margin", "0.1"]) == 0
    again = json.loads((out / "comparison.json").read_text())
    assert again["verdict"] == record["verdict"]
    assert {(each["variant"], each["status"]) for each in again["ended"]} == {
        (0, 0),
        (1, 0),
        (2, 1),
    }
    assert again["looks"] == [2]
    assert (again["settings"]["price"], again["settings"]["margin"]) == (3, 0.1)
    assert stamps(out, "*-repeat-1/**/*") == before
    capsys.readouterr()
    lines = rejected(capsys, "compare", str(out), "--repeat", "2", "--optim.lr", "1")
    assert [line.partition(" is not possible")[0] for line in lines] == [
        '--repeat="2"',
        '--optim.lr="1"',
    ]


def test_compare_directory_of_another_comparison_is_refused(
    first_comparison: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    recipes = first_comparison["recipes"]
    out = ["--out", str(first_comparison["directory"] / "out")]
    (line,) = rejected(capsys, "compare", *recipes, *out, "--train.steps", "7")
    assert "holds another comparison: train.steps of plain was 12, and is 7" in line
    (line,) = rejected(capsys, "compare", *recipes[:2], *out)
    assert "holds another comparison: of plain; seed; crash; wrong" in line


@pytest.mark.slow
def test_compare_interrupted_asks_to_be_requeued(second_comparison: dict[str, Any]) -> None:
    assert second_comparison["stopped"] == REQUEUE
    assert (
        "the same command resumes the trial"
        in (second_comparison["directory"] / "output").read_text()
    )


@pytest.mark.slow
def test_compare_more_repeats_add_runs(
    first_comparison: dict[str, Any], second_comparison: dict[str, Any]
) -> None:
    result = second_comparison["found"]
    trials = {variant["label"]: variant["trials"] for variant in result["variants"]}
    assert [trial["seed"] for trial in trials["plain"]] == [0, 6]  # only the seeds differ
    assert [trial["seed"] for trial in trials["seed"]] == [5, 11]
    assert trials["plain"][0] == first_comparison["found"]["variants"][0]["trials"][0]
    # In the second repeat the interrupted trial runs first.
    runs = [
        (second_comparison["directory"] / f"out/{name}-repeat-2/job.toml").stat().st_mtime
        for name in ("2-seed", "1-plain")
    ]
    assert runs == sorted(runs)
    (comparison,) = result["comparisons"]
    assert comparison["pairs"] == 2
    assert comparison["speed"]["interval"] is not None
    assert comparison["loss"]["answer"] in ("equivalent", "undecided")
    assert len(result["looks"]) == 2
    assert any("2 verdicts were given" in note for note in result["notes"])


@pytest.mark.slow
def test_compare_nothing_left_to_run_same_verdict(
    second_comparison: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With `--json`; only the crashed trial runs again."""
    monkeypatch.chdir(second_comparison["directory"])
    assert main(["compare", *second_comparison["command"], "--repeat", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == second_comparison["found"]["verdict"]


# --------------------------------------------------------------------------- verdicts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fast", "slower", "repeats", "room"),
    [(2.0, 2.1, 4, 0.02), (0.3, 3.0, 3, 2.0)],
    ids=["5 percent", "tenfold"],
)
def test_compare_planted_slowdown_is_found(
    fast: float, slower: float, repeats: int, room: float, store_path: Path, tmp_path: Path
) -> None:
    """Sleeps dominate the step time; a busy machine may make steps longer by ``room``."""
    steps = ("train.steps", "6")
    recipes = [
        toml(tmp_path / "fast.toml", store_path, steps, slow(fast)),
        toml(tmp_path / "slow.toml", store_path, steps, slow(slower)),
    ]
    status, result = finish([*recipes, "--out", "out", "--repeat", str(repeats)], tmp_path)
    assert status == 0
    (comparison,) = result["comparisons"]
    assert comparison["loss"]["answer"] == "equivalent"  # bitwise equal
    assert comparison["loss"]["differences"] == [0.0] * repeats
    for variant, sleep in zip(result["variants"], (fast, slower), strict=True):
        seconds = [trial["step_seconds"] for trial in variant["trials"]]
        assert min(seconds) > sleep
        if max(seconds) > (1 + room) * sleep:
            pytest.skip(f"the machine is too busy: steps of {sleep} s took {max(seconds):.3g} s")
    assert comparison["speed"]["answer"] == "slower", result["verdict"]
    low, _, high = comparison["speed"]["percent"]
    assert low - 1 < 100 * (fast / slower - 1) < high + 1
    assert result["verdict"][0].startswith("slow is ")
    assert "% slower than fast (95 % interval" in result["verdict"][0]


@pytest.mark.slow
def test_compare_recipe_with_itself_finds_no_difference(store_path: Path, tmp_path: Path) -> None:
    """Runs that differ only in their seeds get no verdict.

    A false difference in speed has a probability of 1 in 20, so three in a row are a defect.  A
    difference in loss is never claimed, because seeds decide it.
    """
    recipe = toml(tmp_path / "mine.toml", store_path, ("train.steps", "10"), slow(0.5))
    command = [recipe, "--vary", "train.seed=1,2", "--out", "out"]
    for _ in range(3):
        status, result = finish(command, tmp_path)
        assert status == 0
        (comparison,) = result["comparisons"]
        assert comparison["loss"]["answer"] in ("equivalent", "undecided")
        if comparison["speed"]["answer"] == "no difference found":
            assert "speed" not in result["verdict"][0]  # a seed does not change it
            break
        os.rename(tmp_path / "out", tmp_path / f"out-{time.monotonic()}")
    else:
        pytest.fail("found a difference three times where there is none")
