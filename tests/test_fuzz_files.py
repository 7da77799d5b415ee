"""Files with random bytes changed: weft reads each, or refuses it with a clear error.

Run directories are in tests/monitor/test_garbled.py, checkpoints in tests/checkpoint/test_fuzz.py,
text, prepared tokens and chat templates in tests/data/test_hostile.py.
"""

from __future__ import annotations

import json
import pickle
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.conversion.test_hf_convert import tiny_dir
from tests.data.test_hostile import mutated
from tests.fuzz import FuzzResult, FuzzSettings, Outcome, read_log
from tests.garbled import another_json, binary, nested, nested_objects, wrong_types
from tests.small import small_job
from weft.comparison.experiment import COMPARISON, comparison_record, open_comparison
from weft.comparison.trials import TrialResult
from weft.comparison.variants import Variant
from weft.config.errors import ConfigErrors, InvalidConfig, WeftError
from weft.config.files import read_json
from weft.config.reader import read_job
from weft.conversion.hf_import import import_model
from weft.data.prepared_cache import read_scans, write_scans
from weft.inference.evaluate import read_task
from weft.inference.generate import read_prompts
from weft.planning.devices import BUILTIN_CLUSTERS, read_clusters
from weft.records.run_cost import LAUNCH_FILE
from weft.submission.submit import SubmittedJob
from weft.supervision.hang import parse_flight_recorder

MUTATIONS = 60  # of each file
MANY = 1000  # in the slow tier

RECIPE = """
extends = "demo"
[model]
num_layers = 3
[parallel]
tp = 2
reshard_after_forward = "always"
[optim]
lr = 3e-4
[run]
dir = "runs/mine"
"""
DEVICES = """
[devices.H101]
like = "H100"
memory_gib = 94
[networks.mine]
bandwidth = 25e9
achieved = { 2 = 0.92, 64 = 0.85 }
latency = 6e-6
"""
TASK = """
task: mine
dataset_path: json
dataset_kwargs:
  data_files:
    test: questions.jsonl
test_split: test
output_type: multiple_choice
doc_to_text: "{{begin}}"
doc_to_choice: "{{[first, second]}}"
doc_to_target: answer
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
QUESTION = {"begin": "one", "first": "two", "second": "three", "answer": 0}
VARIANTS = [Variant("demo", "demo", small_job(), None)]
DUMP = {
    "entries": [
        {
            "is_p2p": False,
            "collective_seq_id": 3,
            "p2p_seq_id": 0,
            "profiling_name": "nccl:all_reduce",
            "retired": False,
            "state": "scheduled",
            "process_group": ["0", "default"],
            "input_sizes": [[2, 3]],
        }
    ],
    "pg_config": {"0": {"ranks": "[0, 1]"}},
}


def read_recipe_file(path: Path) -> None:
    _, _, errors = read_job(str(path), [])
    assert all(str(error) for error in errors)


def read_device_file(path: Path) -> None:
    read_clusters(BUILTIN_CLUSTERS, path)


def read_prompt_file(path: Path) -> None:
    errors = ConfigErrors()
    read_prompts(path, errors, chat=True)
    assert all(str(error) for error in errors)


def read_launch_record(path: Path) -> None:
    SubmittedJob.load(path.parent)


def read_dump(path: Path) -> None:
    parse_flight_recorder(0, path.read_bytes())


def read_fuzz_log(path: Path) -> None:
    for tried in read_log(path, FuzzSettings(seed=7)):
        assert tried.job.seed == 7


def read_comparison_file(path: Path) -> None:
    open_comparison(path.parent, VARIANTS)


def read_table(path: Path) -> None:
    (path.parent / "questions.jsonl").write_text(json.dumps(QUESTION) + "\n")
    read_task(path)


def read_questions(path: Path) -> None:
    (path.parent / "task.yaml").write_text(TASK)
    read_task(path.parent / "task.yaml")


TRIED = FuzzResult(FuzzSettings(seed=7).draw(0), Outcome("agreed"))
TEXTS: dict[str, tuple[Callable[[Path], object], str | bytes]] = {
    "recipe.toml": (read_recipe_file, RECIPE),
    "clusters.toml": (read_device_file, DEVICES),
    "prompts.jsonl": (read_prompt_file, '{"prompt": "Once"}\n"upon"\n'),
    "task.yaml": (read_table, TASK),
    "questions.jsonl": (read_questions, json.dumps(QUESTION) + "\n" + json.dumps(QUESTION)),
    LAUNCH_FILE: (read_launch_record, json.dumps({"on": "slurm", "id": "17", "time": 1.0})),
    "flight-rank-0": (read_dump, pickle.dumps(DUMP)),
    "verify-fuzz-7.jsonl": (read_fuzz_log, json.dumps(asdict(TRIED)) + "\n"),
    COMPARISON: (
        read_comparison_file,
        json.dumps(comparison_record(VARIANTS, [TrialResult(0, 1, 0, "", 3.0)], [1])),
    ),
    "some.json": (read_json, json.dumps({"a": [1, {"b": None}], "c": "text"})),
}
SPOILING = (binary, nested, nested_objects, another_json, wrong_types)


def corrupt(path: Path, data: bytes, rng: random.Random) -> None:
    """Write the file with changed bytes or, one time in four, with other content."""
    path.write_bytes(data)
    if rng.random() < 0.25 and path.suffix in (".toml", ".json", ".jsonl"):
        rng.choice(SPOILING)(path, rng)
    else:
        path.write_bytes(mutated(data, rng))


def is_read(read: Callable[[Path], object], path: Path) -> bool:
    """Return False if the file is refused with an error for users."""
    try:
        read(path)
    except (InvalidConfig, WeftError):
        return False
    return True


def check_reader(name: str, directory: Path, count: int, seed: object) -> None:
    read, text = TEXTS[name]
    data, path = text.encode() if isinstance(text, str) else text, directory / name
    path.write_bytes(data)
    assert is_read(read, path), "the sound file is refused"
    rng = random.Random(f"{name} {seed}")
    for number in range(count):
        corrupt(path, data, rng)
        try:
            is_read(read, path)
        except Exception as error:
            error.add_note(f"file {number} of seed {seed}: {path.read_bytes()[:2000]!r}")
            raise


@pytest.mark.parametrize("name", TEXTS)
def test_reader_changed_bytes_are_read_or_refused(name: str, tmp_path: Path) -> None:
    check_reader(name, tmp_path, MUTATIONS, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXTS)
def test_reader_many_changed_bytes_are_read_or_refused(name: str, tmp_path: Path) -> None:
    check_reader(name, tmp_path, MANY, random.randrange(10**9))


# Files that an import reads; bytes before this offset change (weights: in the header).
IMPORTED = {"config.json": 4000, "model.safetensors": 900, "tokenizer.json": 4000}
EXTRA = {
    "generation_config.json": {"eos_token_id": [2, 3], "bos_token_id": 1},
    "tokenizer_config.json": {"eos_token": "<|endoftext|>", "chat_template": "{{ messages }}"},
}


def check_import(name: str, store: Path, directory: Path, count: int, seed: object) -> None:
    source = tiny_dir(directory / "hf", store / "tokenizer.json")
    for extra, tree in EXTRA.items():
        (source / extra).write_text(json.dumps(tree))
    path = source / name
    data, rng = path.read_bytes(), random.Random(f"{name} {seed}")
    results = []
    for number in range(count):
        first = data[: IMPORTED.get(name, 4000)]
        path.write_bytes(mutated(first, rng) + data[len(first) :])
        try:
            results.append(
                is_read(lambda path: import_model(path.parent, directory / "run", str), path)
            )
        except Exception as error:
            error.add_note(f"file {number} of seed {seed}: {path.read_bytes()[:2000]!r}")
            raise
        if results[-1]:
            shutil.rmtree(directory / "run")
        assert sorted(path.name for path in directory.iterdir()) == ["hf"]  # no incomplete run
    assert False in results


@pytest.mark.parametrize("name", [*IMPORTED, *EXTRA])
def test_import_changed_bytes_are_read_or_refused(
    name: str, store_path: Path, tmp_path: Path
) -> None:
    check_import(name, store_path, tmp_path, 25, 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*IMPORTED, *EXTRA])
def test_import_many_changed_bytes_are_read_or_refused(
    name: str, store_path: Path, tmp_path: Path
) -> None:
    check_import(name, store_path, tmp_path, 300, random.randrange(10**9))


def test_scans_changed_bytes_are_not_believed(tmp_path: Path) -> None:
    path, value = tmp_path / "scans" / "a.json", [["3f", [0, 4096], 17, None]]
    assert read_scans(path) is None
    write_scans(path, value)
    assert read_scans(path) == value
    data, rng = path.read_bytes(), random.Random(0)
    for _ in range(200):
        path.write_bytes(mutated(data, rng))
        assert read_scans(path) in (None, value)
