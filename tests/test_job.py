"""Job: read, override, write back; and the schema of its keys."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from weft.cli.main import build_parser
from weft.config.reader import RECIPES, read_job, recipe_names
from weft.config.schema import SECTIONS, Job, difference, flatten, keys, replace, steps_of
from weft.config.writer import schema, to_toml


def read(recipe: str, *overrides: tuple[str, str]) -> Job:
    job, _, errors = read_job(recipe, overrides)
    assert errors == []
    return job


def test_extends_chains_and_overrides_win(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "base.toml").write_text(
        'extends = "demo"\n[train]\nsteps = 7\nseed = 3\n[model]\ndim = 64\n'
    )
    (tmp_path / "sub/mine.toml").write_text(
        'extends = "../base.toml"\n[train]\nseed = 4\n[data]\npath = "x"\n'
    )
    job = read(str(tmp_path / "sub/mine.toml"), ("train.seed", "5"), ("model.dim", "128"))
    assert (job.train.steps, job.train.seed, job.data.path) == (7, 5, "x")
    assert job.model.overrides() == {"dim": 128}
    assert job.optim.lr == read("demo").optim.lr


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("monitor.layer_grad_norms", "false", False),
        ("monitor.layer_grad_norms", "true", True),
        ("monitor.trackers", "wandb, mine:sink", ["wandb", "mine:sink"]),
        ("monitor.trackers", '["wandb"]', ["wandb"]),
        ("monitor.trackers", "", []),
        ("pipeline.layers_per_stage", "3,4,4,3", [3, 4, 4, 3]),
        ("optim.lr", "1e-4", 1e-4),
        ("optim.lr", "1", 1.0),
        ("run.nproc_per_node", "3", 3),
        ("run.nproc_per_node", "auto", "auto"),
        ("run.dir", "123", "123"),
        ("data.path", "true", "true"),
        ("train.microbatch_size", "auto", "auto"),
    ],
)
def test_text_is_read_by_the_type_of_its_key(key: str, text: str, value: object) -> None:
    result = flatten(read("demo", (key, text)))[key]
    assert result == value
    assert type(result) is type(value)


def test_epochs_and_steps_the_later_choice_replaces_the_earlier(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('extends = "demo"\n[train]\nepochs = 3.0\n')
    assert (read("demo").train.steps, read("demo").train.known_steps) == (220, 220)
    assert read(str(mine)).train.model_dump() | {"steps": "auto", "epochs": 3.0} == (
        read(str(mine)).train.model_dump()
    )
    assert read(str(mine)).train.known_steps == 0
    job = read(str(mine), ("train.steps", "7"))
    assert (job.train.steps, job.train.epochs) == (7, 0.0)
    job = read("demo", ("train.epochs", "2"))
    assert (job.train.steps, job.train.epochs) == ("auto", 2.0)
    assert read("demo", ("train.epochs", "0")).train.steps == 220
    assert Job().train.known_steps == 1000


def test_data_mixture_and_path_the_later_choice_replaces_the_earlier(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('extends = "demo"\n[data.mixture]\n"a.txt" = 0.5\n"b.txt" = 0.5\n')
    data = read(str(mine)).data
    assert (data.path, data.sources) == (Job().data.path, ("a.txt", "b.txt"))
    assert read("demo", ("data.mixture", "a.txt=1")).data.sources == ("a.txt",)
    assert read(str(mine), ("data.path", "c.txt")).data.sources == ("c.txt",)
    both = read("demo", ("data.path", "c.txt"), ("data.mixture", "a.txt=1"))
    assert (both.data.path, both.data.sources) == ("c.txt", ("a.txt",))  # an error of the run


def test_model_path_replaces_the_model_keys_of_the_recipe(tmp_path: Path) -> None:
    job = read("llama3-8b-lora", ("model.path", "mine"))
    assert job.model.model_dump() == Job().model.model_dump() | {"path": "mine"}
    both = read("demo", ("model.path", "mine"), ("model.num_layers", "3"))
    assert (both.model.path, both.model.overrides()) == ("mine", {"num_layers": 3})


def test_an_entry_of_a_table_is_added_to_the_table(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('extends = "demo"\n[launch.options]\npartition = "gpu"\n')
    words = ["train", str(recipe), "--launch.options.gres-flags", "none", "--data.mixture.a-b/c=2"]
    options = build_parser().parse_args(words)
    job, _, errors = read_job(str(recipe), options.overrides)
    assert not errors
    assert job.launch.options == {"partition": "gpu", "gres-flags": "none"}
    assert job.data.mixture == {"a-b/c": 2.0}
    assert read_job("demo", [("data.mixture.a", "x")])[2][0].key == "data.mixture"
    groups = read_job("demo", [("optim.groups", '[{params = ["norm.*"], lr = 0.0}]')])[2]
    assert groups[0].rule.startswith("[0].lr is not one of params, lr_mult, ")
    assert read_job("demo", [("launch.image.a", "x")])[2][0].rule == "is not a known key"


def test_values_of_a_table_of_text_may_be_numbers_and_lists() -> None:
    words = "NCCL_NVLS_ENABLE=0, NCCL_IB_HCA=mlx5_0,mlx5_1,X=a=b"
    assert read("demo", ("launch.env", words), ("launch.env.NCCL_IB_TC", "106")).launch.env == {
        **{"NCCL_NVLS_ENABLE": "0", "NCCL_IB_HCA": "mlx5_0,mlx5_1", "X": "a=b"},
        "NCCL_IB_TC": "106",
    }
    assert read("demo", ("launch.env", ""), ("launch.labels.a", "1")).launch.labels == {"a": "1"}
    (error,) = read_job("demo", [("launch.env", "NCCL_DEBUG")])[2]
    assert str(error).startswith('launch.env="NCCL_DEBUG" must be NAME=VALUE.')


def test_number_in_a_table_of_text_names_the_entry_and_its_quotes(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('extends = "demo"\n[launch.env]\nA = 0\nB = "1"\nC = true\n')
    job, _, errors = read_job(str(recipe), [])
    assert [error.key for error in errors] == ["launch.env.A", "launch.env.C"]
    assert 'Use A = "0", in quotes.' in str(errors[0])
    assert 'C = "true"' in str(errors[1])
    assert job.launch.env == {}


def test_the_last_override_wins_and_a_bad_one_leaves_the_default() -> None:
    assert read("demo", ("train.steps", "1"), ("train.steps", "2")).train.steps == 2
    job, _, errors = read_job("demo", [("train.steps", "x")])
    assert job.train.steps == Job().train.steps
    assert [error.key for error in errors] == ["train.steps"]


@pytest.mark.parametrize("recipe", recipe_names())
def test_job_toml_is_complete(recipe: str, tmp_path: Path) -> None:
    """The written job reads back equal without the recipe, and lists its differences."""
    changes = [("train.steps", "9"), ("model.dim", "64"), ("data.path", 'a "quoted" \\ path')]
    job, base, errors = read_job(recipe, changes)
    assert errors == []
    path = tmp_path / "job.toml"
    path.write_text(to_toml(job, recipe, base))
    assert read(str(path)) == replace(job, run={"dir": str(tmp_path)})
    replaced = {"train.epochs"} if base.train.epochs else set()
    replaced |= {"model.path"} if base.model.path else set()
    assert set(difference(job, base)) == {name for name, _ in changes} | replaced
    text = path.read_text()
    assert all(f"# {name}: " in text for name, _ in changes)
    written = tomllib.loads(text)
    assert all(key in written[section] for section, _, key in (n.partition(".") for n in keys()))


def test_sections_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Job().train.steps = 3  # type: ignore[misc]


def test_every_key_has_a_description() -> None:
    for section in SECTIONS.values():
        for name, field in section.model_fields.items():
            assert field.description, name


def test_the_shipped_schema_is_current() -> None:
    """`make schema` updates the file, which accepts only keys of shipped recipes."""
    command = [sys.executable, "-m", "weft", "schema"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert (RECIPES / "recipe.schema.json").read_text() == printed
    tree = json.loads(printed)
    assert set(tree["properties"]) == {"extends", *SECTIONS}
    assert tree["additionalProperties"] is False
    assert "num_layers" in tree["$defs"]["ModelSection"]["properties"]
    assert schema()["$defs"]["TrainSection"]["additionalProperties"] is False


def test_every_key_is_read_somewhere() -> None:
    """A key that no code reads would have no effect."""
    root = Path(__file__).parent.parent / "weft"
    code = "\n".join(p.read_text() for p in root.rglob("*.py") if p.name != "schema.py")
    for name in keys():
        section, key = name.split(".")
        read_as = [f"{section}.{key}", f"section.{key}"]
        assert any(text in code for text in read_as), name


def test_step_ranges_are_parsed() -> None:
    assert steps_of("") == []
    assert steps_of("7, 20-30") == [range(7, 8), range(20, 31)]
    for text in ("x", "5-", "-5", "1,,2", "9-3", "0", "1.5", "0-3"):
        with pytest.raises(ValueError, match="must be steps"):
            steps_of(text)
    _, _, errors = read_job("demo", [("debug.layer_stats_steps", "5-")])
    (error,) = errors
    assert (error.key, error.rule) == (
        "debug.layer_stats_steps",
        "must be steps such as 7 or 7,20-30",
    )


def test_read_job_odd_values_are_refused_without_a_crash() -> None:
    nested = "[" * 250 + "]" * 250
    for name, text in (("lora.targets", "[2024-01-01]"), ("data.mixture", nested)):
        _, _, errors = read_job("demo", [(name, text)])
        assert [error.key for error in errors] == [name]
