"""The fewest nodes for a deadline, and the smallest machine: full traces of the neighbors agree."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from weft.cli.main import main
from weft.config.errors import InvalidConfig
from weft.config.formatting import format_value
from weft.estimate.cost import device_spec
from weft.estimate.forecast import Forecast, forecast
from weft.estimate.machine_size import (
    SAVING,
    Estimates,
    Planner,
    fewest_nodes,
    smallest_machine,
)
from weft.estimate.whole_run import count_steps, predict_whole_run
from weft.planning.devices import Cluster, parse_cluster
from weft.planning.plan import Machine, Plan
from weft.planning.plan_text import plan_recipe

DAY = 86400.0
TOKENS = 10**11

# A Llama of 0.2 billion parameters; a trace takes half a second.
SMALL = {
    "model.num_layers": "3",
    "model.dim": "1024",
    "model.num_heads": "8",
    "model.num_kv_heads": "4",
    "model.ffn_dim": "4096",
    "model.vocab_size": "32768",
    "model.max_seq_len": "8192",
    "model.tied_embeddings": "false",
    "train.seq_len": "4096",
    "train.global_batch_size": "24",
    "train.microbatch_size": "1",
    "train.eval_interval": "0",
}


# Its sequences are longer; its matrices are larger.
LONG = {
    "model.num_layers": "12",
    "model.max_seq_len": "32768",
    "train.seq_len": "32768",
    "train.global_batch_size": "4",
}
WIDE = {"model.dim": "4096", "model.ffn_dim": "16384", "train.global_batch_size": "4"}


def planner_of(recipe: str, overrides: Mapping[str, str]) -> Planner:
    def plan_on(cluster: Cluster, change: Mapping[str, object]) -> tuple[Plan, Machine]:
        words = overrides | {key: format_value(value) for key, value in change.items()}
        machine = Machine("cpu", devices=1)
        return plan_recipe(recipe, [*words.items()], (), str(cluster), lambda run: machine, True)

    return plan_on


def trace(planner: Planner, cluster: Cluster, change: Mapping[str, object]) -> Forecast:
    plan, machine = planner(cluster, change)
    return forecast(plan, machine, device_spec(plan, machine), cached=True)


@pytest.fixture(autouse=True, scope="module")
def shared_traces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep traces from one test to the next."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("traces")))
        yield


def elapsed(
    planner: Planner, cluster: Cluster, tokens: int = TOKENS, mtbf: float | None = None
) -> float:
    """Return the seconds of a run by a full trace."""
    prediction = trace(planner, cluster, {})
    plan = replace(prediction.plan, num_steps=count_steps(prediction.plan, tokens))
    run = predict_whole_run(plan, prediction.step_seconds, (1.0, 1.0), mtbf)
    assert run is not None
    return run.elapsed.expected


def check_in_time(planner: Planner, cluster: Cluster, deadline: float, tokens: int) -> int:
    """Compare the answer with full traces of it and of the next smaller one; return the nodes."""
    sized = fewest_nodes(cluster, planner, deadline, tokens)
    count = sized.cluster.num_nodes
    assert sized.cluster == replace(cluster, num_nodes=count)
    assert elapsed(planner, sized.cluster, tokens) <= deadline
    for smaller in range(count - 1, 0, -1):
        try:
            slower = elapsed(planner, replace(cluster, num_nodes=smaller), tokens)
        except InvalidConfig:
            continue
        assert slower > deadline
        assert f"{smaller:,} take" in sized.reason
        break
    else:
        assert "allows no fewer" in sized.reason
    return count


# --------------------------------------------------------------------------- in time


@pytest.mark.parametrize("ratio", [pytest.param(0.6, marks=pytest.mark.slow), 1.001, 0.999])
def test_fewest_nodes_suffice_and_the_next_smaller_number_does_not(ratio: float) -> None:
    cluster, planner = parse_cluster("2x4xH100"), planner_of("demo", SMALL)
    exact = elapsed(planner, replace(cluster, num_nodes=3))
    count = check_in_time(planner, cluster, ratio * exact, TOKENS)
    assert count == {0.6: 6, 1.001: 3, 0.999: 6}[ratio]


@pytest.mark.parametrize("factor", [2.0, None])
def test_fewest_nodes_do_not_depend_on_the_estimates(
    monkeypatch: pytest.MonkeyPatch, factor: float | None
) -> None:
    cluster, planner = parse_cluster("2x4xH100"), planner_of("demo", SMALL)
    deadline = 1.001 * elapsed(planner, replace(cluster, num_nodes=3))
    exact = Estimates._estimate

    def wrong(self: Estimates, plan: Plan, machine: Machine) -> tuple[float, float] | None:
        result = exact(self, plan, machine)
        return None if factor is None or result is None else (factor * result[0], result[1])

    monkeypatch.setattr(Estimates, "_estimate", wrong)
    assert fewest_nodes(cluster, planner, deadline, TOKENS).cluster.num_nodes == 3


def test_fewest_nodes_with_failures_are_more_and_fail_as_often_per_node() -> None:
    cluster, planner = parse_cluster("2x4xH100"), planner_of("demo", SMALL)
    three = replace(cluster, num_nodes=3)
    deadline = 1.001 * elapsed(planner, three)
    sized = fewest_nodes(cluster, planner, deadline, TOKENS, mtbf=7200.0)
    assert sized.cluster.num_nodes == 6
    assert sized.mtbf == 2400.0
    late = elapsed(planner, three, mtbf=4800.0)
    sized = fewest_nodes(cluster, planner, 1.001 * late, TOKENS, mtbf=7200.0)
    assert sized.cluster.num_nodes == 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fewest_nodes_that_fit_are_more_than_those_in_time() -> None:
    keys = WIDE | {"model.num_layers": "6"}
    cluster, planner = parse_cluster("1x1xRTX-4090"), planner_of("demo", SMALL | keys)
    sized = fewest_nodes(cluster, planner, 1e5 * DAY, TOKENS)
    assert sized.cluster.num_nodes == 2
    assert " and fit; 1 do not fit; a batch of 4 sequences allows no fewer" in sized.reason


@pytest.mark.parametrize(
    ("cluster", "keys", "days", "tokens", "text"),
    [
        ("8xH100", {}, 1e-4, TOKENS, "3 nodes of 8 H100 take"),
        ("1x8xH100", {"train.global_batch_size": "4"}, 30, TOKENS, "Use 8, or a --cluster of 1, 2"),
        ("2x4xCPU", {}, 30, TOKENS, "needs a device of known speed"),
    ],
)
def test_fewest_nodes_without_an_answer_say_why(
    cluster: str, keys: dict[str, str], days: float, tokens: int, text: str
) -> None:
    with pytest.raises(InvalidConfig, match=text):
        fewest_nodes(parse_cluster(cluster), planner_of("demo", SMALL | keys), days * DAY, tokens)


def test_fewest_nodes_too_short_a_deadline_has_a_remedy_that_works() -> None:
    cluster, planner = parse_cluster("8xH100"), planner_of("demo", SMALL)
    with pytest.raises(InvalidConfig) as error:
        fewest_nodes(cluster, planner, 60.0, 100 * TOKENS)
    days = error.value.errors[0].remedy.split()[2].rstrip(",")
    assert fewest_nodes(cluster, planner, float(days) * DAY, 100 * TOKENS).cluster.num_nodes == 3


@pytest.mark.parametrize(("mtbf", "text"), [(600.0, "take"), (0.3, "never end")])
def test_fewest_nodes_with_too_many_failures_name_the_mtbf(mtbf: float, text: str) -> None:
    cluster, planner = parse_cluster("8xH100"), planner_of("demo", SMALL)
    with pytest.raises(InvalidConfig, match=f"{text}.* with a failure every") as error:
        fewest_nodes(cluster, planner, 60.0, TOKENS, mtbf)
    assert error.value.errors[0].remedy.startswith("give --mtbf of a job on 1x8xH100, or use ")
    assert "nan" not in str(error.value)


# --------------------------------------------------------------------------- to fit


def check_smallest(planner: Planner, cluster: Cluster) -> tuple[int, dict[str, Any]]:
    """Compare the answer with full traces of smaller machines; return its ranks and change."""
    sized = smallest_machine(cluster, planner)
    assert trace(planner, sized.cluster, sized.change).fits
    assert sized.plan == planner(sized.cluster, sized.change)[0]
    ranks = sized.cluster.world_size
    milder = SAVING[: SAVING.index(sized.change)]
    assert not any(_fits(planner, sized.cluster, change) for change in milder)
    local = cluster.devices_per_node
    if ranks > 1:
        part = ranks // 2 if ranks <= local else local
        nodes = 1 if ranks <= 2 * local else sized.cluster.num_nodes - 1
        smaller = replace(cluster, num_nodes=nodes, devices_per_node=part)
        assert not any(_fits(planner, smaller, change) for change in SAVING)
    return ranks, sized.change


def _fits(planner: Planner, cluster: Cluster, change: Mapping[str, object]) -> bool:
    try:
        return bool(trace(planner, cluster, change).fits)
    except InvalidConfig:
        return False


@pytest.mark.parametrize(
    ("keys", "ranks", "change"),
    [
        ({}, 1, SAVING[0]),
        ({"train.microbatch_size": "24", "model.num_layers": "6"}, 1, SAVING[1]),
        pytest.param(LONG, 1, SAVING[2], marks=pytest.mark.slow),
        pytest.param(WIDE | {"model.num_layers": "12"}, 2, SAVING[3], marks=pytest.mark.slow),
    ],
)
def test_smallest_machine_fits_and_no_smaller_one_does(
    keys: dict[str, str], ranks: int, change: dict[str, Any]
) -> None:
    planner = planner_of("demo", SMALL | keys)
    assert check_smallest(planner, parse_cluster("4xRTX-4090")) == (ranks, change)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_smallest_machine_skips_sizes_that_the_rules_refuse() -> None:
    keys = WIDE | {"model.num_layers": "12", "train.global_batch_size": "3"}
    sized = smallest_machine(parse_cluster("6xRTX-4090"), planner_of("demo", SMALL | keys))
    assert sized.cluster.world_size == 3


def test_smallest_machine_of_a_wrong_recipe_says_what_is_wrong() -> None:
    planner = planner_of("demo", SMALL | {"train.seq_len": "9999999"})
    with pytest.raises(InvalidConfig, match=r"train\.seq_len=9999999"):
        smallest_machine(parse_cluster("4xRTX-4090"), planner)


def test_smallest_machine_that_does_not_exist_says_why() -> None:
    keys = WIDE | {"model.num_layers": "24", "train.global_batch_size": "2"}
    with pytest.raises(InvalidConfig, match="finds no machine of RTX 4090") as error:
        smallest_machine(parse_cluster("2xRTX-4090"), planner_of("demo", SMALL | keys))
    assert "smaller train.global_batch_size or train.seq_len" in error.value.errors[0].remedy


# --------------------------------------------------------------------------- the command


def test_plan_days_prints_the_plan_of_its_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for key, value in SMALL.items() for word in (f"--{key}", value)]
    words += ["--cluster", "4xH100", "--tokens", "100B"]
    assert main(["plan", "demo", *words, "--days", "0.5", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["size"]["cluster"] == f"{tree['world_size'] // 4}x4xH100"
    assert tree["whole_run"]["seconds"]["expected"] <= 0.5 * DAY
    assert main(["plan", "demo", *words, "--smallest"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1 H100: the fewest on which the recipe fits\n--cluster 1x1xH100\n\n")


def test_plan_size_mistakes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*words: str) -> list[str]:
        assert main(["plan", "demo", *words]) == 2
        lines = capsys.readouterr().err.splitlines()[1:]
        return [line.strip() for line in lines]

    assert refused("--days", "30") == ["--days needs a cluster. Add --cluster, such as 8xH100."]
    (line,) = refused("--smallest")
    assert line == "--smallest needs a cluster. Add --cluster, such as 8xH100."
    for text in ("0", "-1", "x", "inf", "nan"):
        (line,) = refused(f"--days={text}", "--cluster", "8xH100")
        assert line == f'--days="{text}" is not a number of days above 0. Write it as 30.'
    (line,) = refused("--days", "30", "--cluster", "8xH100", "--train.epochs", "1")
    assert line.endswith("needs the length of the run. Add --tokens, such as --tokens 15T.")


# --------------------------------------------------------------------------- shipped recipes


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("recipe", "cluster", "days", "tokens"),
    [
        ("llama3-8b", "8xH100", 30, 10**12),
        ("qwen3-30b-a3b", "8xB200", 20, 10**12),
        ("llama3-70b", "8xH200", 60, 10**12),
        ("olmo2-7b", "8xA100", 90, 10**12),
    ],
)
def test_fewest_nodes_of_recipes(recipe: str, cluster: str, days: float, tokens: int) -> None:
    check_in_time(planner_of(recipe, {}), parse_cluster(cluster), days * DAY, tokens)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("recipe", "cluster"),
    [
        ("llama3-8b", "8xH100"),
        ("llama3-8b-lora", "8xRTX-4090"),
        ("qwen3-8b-lora", "8xA100-40GB"),
        ("gemma3-12b-finetune", "8xH100"),
        ("qwen3-30b-a3b-lora", "8xA100-40GB"),
        ("llama3-70b-lora", "8xL40S"),
    ],
)
def test_smallest_machine_of_recipes(recipe: str, cluster: str) -> None:
    planner = planner_of(recipe, {"train.global_batch_size": "32"})  # fewer microbatches to trace
    check_smallest(planner, parse_cluster(cluster))
