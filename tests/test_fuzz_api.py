"""Wrong arguments of the Python interface: each raises an error of weft that names the argument."""

from __future__ import annotations

import inspect
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import weft
from weft import api
from weft.api import tasks
from weft.api.overrides import encode_overrides
from weft.config.errors import ConfigErrors
from weft.config.reader import read_job

FEW = 250
FUNCTIONS = ("train", "plan", "verify", "compare", "launch", "load_model", "load_text_model")
FUNCTIONS += ("generate", "open_run")
# A name that is no recipe, run or model, so that valid values of the others start nothing.
ARGUMENTS: dict[str, Any] = dict.fromkeys(
    ("recipe", "recipes", "path", "run", "run_dir"), "no-such"
)
ARGUMENTS |= {"model": "no-such", "on": "slurm", "plan_only": True}
VALUES: list[Any] = [None, 0, -1, 1.5, True, float("nan"), float("inf"), 10**30, "", "x" * 300]
VALUES += ["a\0b", "caf\udce9", "s3://x", b"none", Path("none"), Path("a\0b"), [], ["none"], [None]]
VALUES += [[1], {}, {"a": 1}, {1: 2}, {None: None}, (1, 2), {1, 2}, range(3), object(), len]
VALUES += [np.int64(3), np.float32(2), np.array([1, 2]), torch.tensor(2), torch.tensor([1, 2])]
VALUES += [torch.float32, {"optim": 3}, {"optim.lr": None}, {"optim": {"lr": object()}}]
VALUES += [{"optim.lr": torch.tensor([1.0, 2.0])}, {"optim.lr": len}, {b"optim.lr": 1}, iter([1])]
VALUES += [{"train.steps": 10**5000}, {"train.steps": 1 << 70}, {"train": {"steps": {}}}]
VALUES += [{"train.steps": float("nan")}, {"run.dir": Path("a\0b")}, {"run.dir": b"x"}, 10**5000]


@pytest.fixture(autouse=True)
def tasks_in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run what another process would run here, so that each call takes milliseconds."""

    def run(function: str, request: Any) -> Any:
        return getattr(tasks, function)(pickle.loads(pickle.dumps(request)))

    monkeypatch.setattr(api, "run_in_child", run)
    monkeypatch.chdir(tmp_path)


def list_calls() -> Iterator[tuple[str, str, Any]]:
    """Yield each function, argument and value."""
    for function in FUNCTIONS:
        for name in inspect.signature(getattr(api, function)).parameters:
            yield from ((function, name, value) for value in VALUES)


def find_problem(function: str, name: str, value: Any) -> str:
    """Call a function with one wrong value; return what is wrong with its error."""
    parameters = inspect.signature(getattr(api, function)).parameters
    arguments = {key: ARGUMENTS[key] for key in parameters if key in ARGUMENTS}
    try:
        getattr(api, function)(**arguments | {name: value})
    except weft.InvalidConfig as error:
        if not error.errors or len(str(error)) > 20_000:
            return f"{function} {name}: {error}"
    except weft.WeftError as error:
        return f"{function} {name}: {error}" if "Traceback" in str(error) else ""
    except Exception as error:
        return f"{function} {name}={type(value).__name__}: {type(error).__name__}: {error}"
    return ""


def test_functions_with_some_wrong_values_raise_errors_of_weft() -> None:
    calls = random.Random(0).sample([*list_calls()], FEW)
    assert [problem for call in calls if (problem := find_problem(*call))] == []


@pytest.mark.slow
def test_functions_with_each_wrong_value_raise_errors_of_weft() -> None:
    assert [problem for call in list_calls() if (problem := find_problem(*call))] == []


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        ("train", {"recipe": None}, "recipe=None must be a string or a path."),
        ("train", {"recipe": "demo", "force": "yes"}, "force='yes' must be True or False."),
        ("plan", {"recipe": "demo", "overrides": [1]}, "overrides=[1] is not a mapping."),
        ("plan", {"recipe": "demo", "cluster": "8xXX"}, 'cluster="8xXX" has an unknown device'),
        ("verify", {"recipe": "demo", "ranks": 2.5}, "ranks=2.5 must be an integer between 2"),
        ("compare", {"recipes": 3}, "recipes=3 must be a string or a path, or a list of them."),
        ("compare", {"recipes": "demo", "vary": {"optim.lr": 1}}, "no list of values for optim.lr"),
        ("compare", {"recipes": "demo", "margin": 5}, "margin=5 must be a string."),
        ("launch", {"recipe": "demo", "on": "slrm"}, 'on="slrm" is not a known cluster'),
        ("load_model", {"path": "x", "device": "gpu"}, "device='gpu' is not a device"),
        ("generate", {"model": "x", "max_tokens": -1}, "max_tokens=-1 must be an integer of at"),
        ("generate", {"model": "x", "prompt": 3}, "prompt=3 is neither a string"),
        ("generate", {"model": "x", "stop": [1]}, "stop=[1] must be a string or a list"),
    ],
)
def test_wrong_argument_is_named_with_its_value(
    function: str, arguments: dict[str, Any], expected: str
) -> None:
    with pytest.raises(weft.InvalidConfig) as raised:
        getattr(api, function)(**arguments)
    assert expected in str(raised.value)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("train.steps", np.int64(7), 7),
        ("optim.lr", np.array(0.5), 0.5),
        ("optim.lr", torch.tensor(0.5, requires_grad=True), 0.5),
        ("pipeline.layers_per_stage", np.array([1, 3]), (1, 3)),
        ("pipeline.layers_per_stage", torch.tensor([1, 3]), (1, 3)),
        ("run.dir", Path("a b"), "a b"),
        ("run.dir", np.str_("a"), "a"),
        ("compile.enable", np.bool_(True), True),
    ],
)
def test_override_of_another_library_is_its_value(
    key: str, value: object, expected: object
) -> None:
    errors = ConfigErrors()
    job, _, job_errors = read_job("demo", encode_overrides({key: value}, errors))
    section, _, name = key.partition(".")
    assert (errors, job_errors) == ([], [])
    assert getattr(getattr(job, section), name) == expected


def test_override_of_a_torch_dtype_is_its_name() -> None:
    job, _, errors = read_job(
        "demo", encode_overrides({"precision.compute_dtype": torch.bfloat16}, ConfigErrors())
    )
    assert (errors, job.precision.compute_dtype) == ([], "bfloat16")
