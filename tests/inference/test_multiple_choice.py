"""Multiple choice: weft's scores equal lm_eval's with weft's model and with its export."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.random_runs import random_run
from tests.small import this_rank
from weft.cli.main import main
from weft.config.errors import InvalidConfig
from weft.conversion.hf_convert import export_checkpoint
from weft.inference.evaluate import compute_log_probs, encode_pair, read_task, score_task
from weft.inference.generate import load_chat_format
from weft.inference.inference_model import (
    find_checkpoint,
    load_local_model,
    load_model,
    plan_inference,
)

TASK = """
task: continue_it
dataset_path: json
dataset_kwargs:
  data_files:
    test: FILE
test_split: test
output_type: multiple_choice
doc_to_text: "{{begin}}"
doc_to_choice: "{{[first, second, third]}}"
doc_to_target: answer
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: acc_norm
    aggregation: mean
    higher_is_better: true
"""
WORDS = ["def", "import", "class", "return", "self", "lambda", "yield", "None", "for", "while"]
WORDS += ["try", "except", "with", "as", "pass"]


@pytest.fixture(scope="module")
def run(store_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_run(tmp_path_factory.mktemp("tasks") / "run", store_path)


@pytest.fixture(scope="module")
def task_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write forty questions with choices of several lengths; some contexts end in a space."""
    directory = tmp_path_factory.mktemp("task")
    lines = []
    for i in range(40):
        first, second, third = (WORDS[(i * k) % 15] for k in (2, 3, 7))
        begin = f"{WORDS[i % 15]} {WORDS[(i * 4) % 15]}" + " " * (i % 3 == 0)
        fields = {"first": first, "second": f"{second} {third}s", "third": third * 2}
        lines.append(json.dumps({"begin": begin, **fields, "answer": i % 3}))
    data = directory / "data.jsonl"
    data.write_text("\n".join(lines) + "\n")
    path = directory / "task.yaml"
    path.write_text(TASK.replace("FILE", str(data)))
    return path


def ours(run: Path, task_file: Path, fewshot: int | None = None) -> dict[str, Any]:
    checkpoint = find_checkpoint(run)
    model = load_local_model(checkpoint, torch.device("cpu"))
    task = read_task(task_file, fewshot)
    return asdict(score_task(task, model, load_chat_format(checkpoint), 8))


def harness_scores(model: Any, task_file: Path) -> dict[str, float]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    # Only this file: lm_eval takes seconds to list its thousands of tasks.
    tasks = TaskManager(include_path=str(task_file.parent), include_defaults=False)
    report = lm_eval.simple_evaluate(
        model=model, tasks=["continue_it"], task_manager=tasks, bootstrap_iters=0, log_samples=True
    )
    assert report is not None
    numbers = report["results"]["continue_it"]
    return {
        name: numbers[f"{name},none"]
        for name in ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr")
    } | {"logs": [[r[0][0] for r in s["resps"]] for s in report["samples"]["continue_it"]]}


@pytest.mark.slow
def test_score_equals_the_harness_and_transformers(
    run: Path, task_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    for name in ("HF_HOME", "HF_DATASETS_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from lm_eval.models.huggingface import HFLM

    from weft.inference.lm_eval_model import WeftLM

    scores = ours(run, task_file)
    assert 0.1 < scores["acc"] < 0.9
    assert scores["acc"] != scores["acc_norm"]
    export_checkpoint(run, tmp_path / "out", "float32", "5GB", lambda progress: None)
    lm = WeftLM(str(run), device="cpu", batch_size=3)
    hf = HFLM(pretrained=str(tmp_path / "out"), device="cpu", dtype="float32", batch_size=4)
    with_weft, theirs = harness_scores(lm, task_file), harness_scores(hf, task_file)
    for name in ("acc", "acc_norm"):
        assert scores[name] == with_weft[name] == theirs[name]
        assert scores[f"{name}_stderr"] == pytest.approx(_analytic(scores[name]))
    torch.testing.assert_close(
        torch.tensor(with_weft["logs"]), torch.tensor(theirs["logs"]), atol=1e-3, rtol=1e-4
    )

    text = "import os\nfor name in os.listdir('.'):\n    print(name)\n" * 4
    assert len(lm.tok_encode(text)) > lm.model.config.max_seq_len
    (full,) = lm.loglikelihood_rolling([make_instance("loglikelihood_rolling", text)])
    assert full == pytest.approx(
        hf.loglikelihood_rolling([make_instance("loglikelihood_rolling", text)])[0], rel=1e-5
    )
    options = {"until": [WORDS[3], "zz"], "max_gen_toks": 12, "do_sample": False}
    requests = [make_instance("generate_until", text, options) for text in ("def f(", "x = ")]
    # transformers prints an incomplete last character, weft omits it.
    theirs_until = [text.rstrip("\ufffd") for text in hf.generate_until(requests)]
    assert lm.generate_until(requests) == theirs_until


@pytest.mark.slow
@pytest.mark.parametrize(
    "lines",
    [
        "fewshot_split: test\n",
        "fewshot_split: test\nfewshot_config: {sampler: first_n}\n",
        'training_split: train\nfewshot_delimiter: " ## "\n',
    ],
)
def test_fewshot_contexts_equal_those_of_the_harness(
    run: Path, task_file: Path, lines: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    from weft.inference.lm_eval_model import WeftLM

    for name in ("HF_HOME", "HF_DATASETS_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = (task_file.parent / "data.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "test.jsonl").write_text("".join([*data[:10], *data[:2]]))  # with copies
    (tmp_path / "train.jsonl").write_text("".join(data[10:]))
    text = TASK.replace("FILE", f"{tmp_path}/test.jsonl\n    train: {tmp_path}/train.jsonl")
    (tmp_path / "task.yaml").write_text(text + lines)
    report = lm_eval.simple_evaluate(
        model=WeftLM(str(run), device="cpu", batch_size=8),
        tasks=["continue_it"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        num_fewshot=3,
        bootstrap_iters=0,
        log_samples=True,
    )
    assert report is not None
    theirs = [s["arguments"][0][0] for s in report["samples"]["continue_it"]]
    task = read_task(tmp_path / "task.yaml", 3)
    assert [question.context for question in task.questions] == theirs
    scores = ours(run, tmp_path / "task.yaml", 3)
    assert scores["fewshot"] == 3
    for name in ("acc", "acc_norm"):
        assert scores[name] == report["results"]["continue_it"][f"{name},none"]


def test_fewshot_examples_are_solved_and_never_the_question(task_file: Path) -> None:
    questions = read_task(task_file).questions
    task = read_task(task_file, 2)
    assert task == read_task(task_file, 2)
    for alone, question in zip(questions, task.questions, strict=True):
        *examples, last = question.context.split("\n\n")
        assert last == alone.context
        assert len(examples) == 2
        solved = f"{alone.context} {alone.choices[alone.gold]}"
        assert solved not in examples
    named = task_file.with_name("two.yaml")
    named.write_text(task_file.read_text() + "num_fewshot: 2\n")
    assert read_task(named).questions == task.questions
    assert read_task(named, 0).questions == questions
    with pytest.raises(InvalidConfig, match=r"needs 41 documents.*has 40\. Use at most 39"):
        read_task(task_file, 40)


@pytest.mark.slow
@pytest.mark.system
def test_documented_harness_command_runs_without_a_gpu(
    run: Path, task_file: Path, tmp_path: Path
) -> None:
    """The harness passes device cuda:0 if the command names none."""
    pytest.importorskip("lm_eval")
    text = (Path(__file__).parents[2] / "docs" / "evaluate.md").read_text("utf-8")
    (line,) = re.findall(r"^python -m (weft\.tools\.lm_eval_model .*)$", text, re.M)
    line = line.replace("runs/mine", str(run)).replace("arc_easy,hellaswag", "continue_it")
    words = [sys.executable, "-m", *line.split(), "--include_path", str(task_file.parent)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "acc_norm" in done.stdout


def test_device_of_the_harness_is_no_wish_without_a_gpu(run: Path) -> None:
    pytest.importorskip("lm_eval")
    from weft.inference.lm_eval_model import WeftLM

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert WeftLM(str(run), device="cuda:0").model.device.type == "cpu"


def make_instance(kind: Any, *arguments: Any) -> Any:
    from lm_eval.api.instance import Instance

    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def _analytic(share: float, count: int = 40) -> float:
    """Return the standard error of a share, with n - 1 as in lm_eval."""
    return float((share * (1 - share) / (count - 1)) ** 0.5)


def over_ranks(run: str, task: str) -> dict[str, Any]:
    checkpoint = find_checkpoint(Path(run))
    _job, plan = plan_inference(
        checkpoint, [("parallel.tp", "2")], [], ("parallel.",), for_generation=True
    )
    model = load_model(checkpoint, plan, this_rank())
    return asdict(score_task(read_task(Path(task)), model, load_chat_format(checkpoint), 16))


def test_score_with_a_sharded_vocabulary_is_the_same(run: Path, task_file: Path) -> None:
    for results in run_ranks(over_ranks, 2, str(run), str(task_file)):
        assert results == ours(run, task_file)


def test_log_probabilities_do_not_depend_on_the_batch(run: Path) -> None:
    checkpoint = find_checkpoint(run)
    model, chat_format = (
        load_local_model(checkpoint, torch.device("cpu")),
        load_chat_format(checkpoint),
    )
    pairs = [
        encode_pair(chat_format, a, b)
        for a, b in (("x =", " 1"), ("", "def f():"), ("for ", "i in"))
    ]
    assert pairs[1][0] == [chat_format.start_token]
    assert pairs[2][1] == chat_format.tokenizer.encode("for i in").ids[2:]  # the space moved
    pairs.append((list(range(100)), [5, 6]))  # longer than the model's context
    together = compute_log_probs(model, pairs, 4)
    for pair, (sum_, _) in zip(pairs, together, strict=True):
        assert compute_log_probs(model, [pair], 1)[0][0] == pytest.approx(sum_, rel=1e-4)
    tail = compute_log_probs(model, [(list(range(37, 100)), [5, 6])], 1)[0][0]
    assert together[3][0] == pytest.approx(tail, rel=1e-4)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("dataset_path: json", "dataset_path: allenai/ai2_arc"), "dataset_path"),
        (("task: continue_it", "group: some"), "task"),
        (("doc_to_target: answer", "doc_to_target: answer\nprocess_docs: x"), "process_docs"),
        (("doc_to_target: answer", "doc_to_target: !function utils.f"), "cannot be read"),
        (("multiple_choice", "generate_until"), "output_type"),
        (("metric: acc\n", "metric: f1\n"), "metric_list"),
        (("{{begin}}", "{{beginning}}"), "document 1: UndefinedError"),
        (("doc_to_target: answer", "doc_to_target: '7'"), "number 7 of 3 choices"),
        (("data.jsonl", "nowhere.jsonl"), "data_files"),
        (("aggregation: mean", "aggregation: median"), "metric_list.aggregation"),
        (("  data_files:", "  field: x\n  data_files:"), "dataset_kwargs.field"),
        (("[first, second, third]", "[first, '', third]"), "a choice is empty"),
        (("test_split: test", "test_split: other"), "data_files"),
        (("test_split: test", "test_split: [test]"), "data_files"),
        (("    test: ", "    test: 7  # "), "data_files=7 must"),
        (("dataset_kwargs:\n  data_files:", "dataset_kwargs: data\nother:"), "dataset_kwargs="),
        (("metric_list:\n  - metric", "metric_list: 3\nother:\n  - metric"), "metric_list=3 must"),
    ],
)
def test_read_task_unknown_fields_are_refused(
    change: tuple[str, str], expected: str, task_file: Path, tmp_path: Path
) -> None:
    text = task_file.read_text()
    assert change[0] in text
    path = tmp_path / "task.yaml"
    path.write_text(text.replace(*change))
    with pytest.raises(InvalidConfig) as caught:
        read_task(path)
    assert expected in str(caught.value)


def test_read_task_templates_run_in_a_sandbox(task_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "task.yaml"
    text = task_file.read_text()
    path.write_text(text.replace("{{begin}}", "{{begin.__class__.__mro__[1].__subclasses__()}}"))
    with pytest.raises(InvalidConfig, match="SecurityError"):
        read_task(path)


def test_evaluate_task_command_prints_the_scores(
    run: Path, task_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["evaluate", str(run), "--task", str(task_file), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["name"] == "continue_it"
    assert report["acc"] == ours(run, task_file)["acc"]
    assert main(["evaluate", str(run), "--task", str(task_file)]) == 0
    assert f"  acc             {report['acc']:.4f}\n" in capsys.readouterr().out
    assert os.listdir(tmp_path) == []


def test_read_task_digits_are_read_as_the_harness_does(tmp_path: Path) -> None:
    """Digits in a field are a choice, in a template its index; U+2028 does not end a line."""
    head = "task: t\ndataset_path: json\noutput_type: multiple_choice\ntest_split: test\n"
    head += "dataset_kwargs: {data_files: {test: data.jsonl}}\n"
    head += 'doc_to_text: "{{q}}"\ndoc_to_choice: "{{c}}"\n'
    (tmp_path / "data.jsonl").write_text('{"q": "a\u2028b", "c": ["1", "0"], "a": "0"}\n', "utf-8")
    for target, gold in (("a", 1), ("'{{a}}'", 0)):
        (tmp_path / "task.yaml").write_text(f"{head}doc_to_target: {target}\n")
        (question,) = read_task(tmp_path / "task.yaml").questions
        assert (question.context, question.gold) == ("a\u2028b", gold)


def test_lm_eval_request_longer_than_the_context_is_cut(run: Path) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    from weft.inference.lm_eval_model import WeftLM

    lm = WeftLM(str(run), device="cpu")
    contexts = ["def " * 40, "import " * 20 + "def " * 20]
    assert lm.tok_encode(contexts[0])[-16:] == lm.tok_encode(contexts[1])[-16:]
    requests = [
        Instance("generate_until", {}, (context, {"max_gen_toks": 8}), 0) for context in contexts
    ]
    assert len(set(lm.generate_until(requests))) == 2  # the model reads the beginning, too
    lm.chat_format = replace(lm.chat_format, max_context=16)
    assert len(set(lm.generate_until(requests))) == 1
