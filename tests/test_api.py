"""The Python interface: types, overrides, errors, signals, and the pages that show it."""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import math
import os
import pkgutil
import re
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch.distributed as dist

import weft
from tests.chat import CHATML
from tests.commands import fork_commands
from tests.harness import run_ranks
from tests.random_runs import random_run
from tests.small import SMALL
from weft.api.overrides import encode_overrides
from weft.cli.main import main
from weft.config.errors import ConfigErrors
from weft.config.reader import read_job

ROOT = Path(__file__).parent.parent
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
TINY: dict[str, object] = {
    **{key: json.loads(text) for key, text in SMALL if re.fullmatch(r"\d+|true|false", text)},
    "monitor.trackers": [],
    "train.steps": 3,
    "run.nproc_per_node": 1,
}


def run_script(code: str, directory: Path, *command: str) -> subprocess.CompletedProcess[str]:
    script = directory / "script.py"
    script.write_text(code, "utf-8")
    words = [*(command or [sys.executable]), str(script)]
    return subprocess.run(
        words, cwd=directory, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )


# --------------------------------------------------------------------------- names


def test_import_weft_imports_nothing_else() -> None:
    probe = "import sys, weft; print([m for m in sys.modules if m.startswith('weft.')], "
    probe += "{'torch', 'numpy', 'pydantic', 'typing'} & (sys.modules.keys() - before))"
    code = f"import sys; before = set(sys.modules); {probe}"
    result = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert result.stdout == "['weft.version'] set()\n"


def test_names_of_the_interface_are_those_of_its_module_and_of_no_package() -> None:
    packages = {module.name for module in pkgutil.iter_modules(weft.__path__)}
    assert packages.isdisjoint(weft.__all__)
    assert all(getattr(weft, name) is getattr(weft.api, name) for name in weft.__all__)
    assert set(weft.__all__) <= set(dir(weft))
    assert not hasattr(weft, "trian")


def test_stub_of_weft_has_every_name() -> None:
    stub = (ROOT / "weft" / "__init__.pyi").read_text("utf-8")
    assert set(re.findall(r"import \w+ as (\w+)", stub)) == set(weft.__all__)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_types_of_the_interface_pass_mypy(tmp_path: Path) -> None:
    right = """
import weft
import weft.training.loop
run = weft.train("demo", {"train.steps": 20, "run.dir": "x"})
loss: float | None = run.loss
fits: bool | None = weft.plan("demo", cluster="1x8xH100").forecast.fits
text: str = weft.generate(run, "class ", temperature=0)
texts: list[str] = weft.generate(weft.load_text_model("x", "cpu"), ["a", "b"])
holds: bool = weft.verify("demo", {"parallel.tp": 2}, ranks=2).holds
try:
    weft.compare("demo", vary={"optim.lr": [1e-3, 3e-3]}).report().save("x.html")
except weft.TrainingFailed as error:
    print(error.log)
"""
    wrong = (
        'import weft\nweft.train(3)\nweft.plan("demo", clstr="x")\nweft.generate("x", tempe=1)\n'
    )
    (tmp_path / "right.py").write_text(right)
    (tmp_path / "wrong.py").write_text(wrong)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    result = subprocess.run(
        [*command, str(tmp_path / "right.py"), str(tmp_path / "wrong.py")],
        cwd=ROOT,
        env=ENVIRONMENT | {"MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    places = set(re.findall(r"(right|wrong)\.py:(\d+): error", result.stdout))
    assert places == {("wrong", "2"), ("wrong", "3"), ("wrong", "4")}, result.stdout


# --------------------------------------------------------------------------- overrides


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("train.steps", 20, 20),
        ("optim.lr", 1e-5, 1e-5),
        ("compile.enable", True, True),
        ("run.dir", Path("a b"), "a b"),
        ("data.path", "C, D = [1]", "C, D = [1]"),
        ("monitor.trackers", ["jsonl"], ("jsonl",)),
        ("monitor.trackers", [], ()),
        ("data.mixture", {"a=b.txt": 0.5, "c": 1}, {"a=b.txt": 0.5, "c": 1}),
        ("parallel.dp_shard", "auto", "auto"),
        ("parallel.dp_shard", 2, 2),
        ("train.steps", math.prod([2, 3]), 6),
    ],
)
def test_override_reaches_the_job(key: str, value: object, expected: object) -> None:
    errors = ConfigErrors()
    job, _, job_errors = read_job("demo", encode_overrides({key: value}, errors))
    section, _, name = key.partition(".")
    assert (errors, job_errors) == ([], [])
    assert getattr(getattr(job, section), name) == expected


def test_override_of_a_nested_mapping_is_that_of_its_keys() -> None:
    nested = {"optim": {"lr": 1e-3, "schedule": "cosine"}, "model": {"num_layers": 2}}
    flat = {"optim.lr": 1e-3, "optim.schedule": "cosine", "model.num_layers": 2}
    errors = ConfigErrors()
    assert encode_overrides(nested, errors) == encode_overrides(flat, errors)
    job, _, job_errors = read_job("demo", encode_overrides(nested, errors))
    assert (errors, job_errors, job.optim.lr) == ([], [], 1e-3)


def test_override_keeps_strings_of_untyped_keys() -> None:
    pairs = encode_overrides({"model.name": "8", "model.size": 8, "model.x": [1, "a"]}, [])
    job, _, _ = read_job("demo", pairs)
    values = job.model.overrides()
    assert (values["name"], values["size"], values["x"]) == ("8", 8, [1, "a"])


def test_override_of_numpy_and_torch_numbers() -> None:
    import numpy as np
    import torch

    values = {"optim.lr": np.float32(0.5), "train.steps": torch.tensor(7)}
    assert encode_overrides(values, []) == [("optim.lr", "0.5"), ("train.steps", "7")]


@pytest.mark.system
def test_train_reports_every_mistake_at_once(tmp_path: Path) -> None:
    with pytest.raises(weft.InvalidConfig) as info:
        weft.train("demo", {"train.stps": 3, "optim.lr": None, "train.seed": "x"})
    assert {error.key for error in info.value.errors} == {"train.stps", "optim.lr", "train.seed"}
    with pytest.raises(weft.InvalidConfig, match="is not a known recipe"):
        weft.plan("dmeo")


# --------------------------------------------------------------------------- runs


def train_tiny(directory: Path, store: Path) -> tuple[str, str]:
    """Call ``weft.train`` in this rank; return the text of its result, and what it printed."""
    dist.destroy_process_group()
    fork_commands()
    os.environ["FORCE_COLOR"] = "1"  # as ipykernel sets it
    with redirect_stdout(io.StringIO()) as out:
        run = weft.train("demo", TINY | {"data.path": store, "run.dir": directory})
    return repr(run), out.getvalue()


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, store_path: Path
) -> tuple[weft.api.RunHandle, str]:
    """Return a run that ``weft.train`` trained, and the captured output."""
    directory = tmp_path_factory.mktemp("api") / "run"
    [(text, out)] = run_ranks(train_tiny, 1, directory, store_path, timeout=200)
    run = weft.open_run(directory)
    assert text == repr(run)
    return run, out


@pytest.mark.system
def test_train_returns_the_run_and_forwards_its_output(
    trained: tuple[weft.api.RunHandle, str],
) -> None:
    run, out = trained
    assert (run.step, run.state, run.exit_reason) == (3, "finished", "all 3 steps are done")
    assert len(re.findall(r"^step \d/3 ", out, re.MULTILINE)) == 3
    assert "\x1b" not in out
    assert f"trained 3 steps, {run.metrics['tokens'].iloc[-1]:,} tokens" in out
    assert run.metrics["loss"].iloc[-1] == run.loss
    assert run.job.train.steps == 3
    assert run.plan["num_steps"] == 3
    assert [event.kind for event in run.events][-1] == "end"
    assert [path.name for path in run.checkpoints] == ["step-00000003"]
    assert repr(run).startswith(f"<run {run.path}: finished at step 3 of 3, loss ")


@pytest.mark.system
def test_run_without_pandas_has_a_list_of_dicts(
    trained: tuple[weft.api.RunHandle, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = trained
    table = run.metrics
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    rows = run.metrics
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[-1]["loss"] == table["loss"].iloc[-1]
    assert "eval_loss" not in rows[0]


@pytest.mark.system
def test_run_report_is_shown_inline_and_saved(
    trained: tuple[weft.api.RunHandle, str], tmp_path: Path
) -> None:
    page = trained[0].report()
    assert "<iframe srcdoc=" in page._repr_html_()
    assert page.save(tmp_path / "page.html").read_bytes() == page.content
    assert b"<html" in page.content


def test_open_run_of_no_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(weft.InvalidConfig, match="is not a run directory"):
        weft.open_run(tmp_path)


# --------------------------------------------------------------------------- text


@pytest.fixture(scope="module")
def random_path(store_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_run(tmp_path_factory.mktemp("runs") / "random", store_path)


def test_generate_equals_the_command(random_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = weft.load_text_model(random_path, "cpu")
    texts = weft.generate(model, ["class ", "def "], max_tokens=6, seed=3)
    command = ["generate", str(random_path), "class ", "--max-tokens", "6", "--seed", "3", "def "]
    assert main([*command, "--run.device", "cpu", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert texts == [line["text"] for line in lines]
    assert weft.generate(random_path, "class ", max_tokens=6, seed=3, device="cpu") == texts[0]
    assert "".join(model.stream("class ")) == weft.generate(model, "class ")
    assert model.config.num_layers == 2
    assert model.tokenizer.get_vocab_size() > 0
    assert not model.module.training


def test_generate_answers_a_conversation(random_path: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(CHATML)
    model = weft.load_text_model(random_path, "cpu", chat_template=template)
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    answer = weft.generate(model, messages, max_tokens=6)
    assert answer == weft.generate(model, "What is 2 + 2?", chat=True, max_tokens=6)
    assert answer != weft.generate(model, "What is 2 + 2?", max_tokens=6)


def test_generate_reports_every_mistake(random_path: Path) -> None:
    model = weft.load_text_model(random_path, "cpu")
    with pytest.raises(weft.InvalidConfig) as info:
        weft.generate(model, "x", temperature=-1, top_p=2, batch=0)
    assert {error.key for error in info.value.errors} == {"temperature", "top_p", "batch"}
    with pytest.raises(weft.InvalidConfig, match="chat_template"):
        weft.generate(model, "x", chat=True)
    with pytest.raises(weft.InvalidConfig, match="load_text_model"):
        weft.generate(model, "x", device="cpu")
    with pytest.raises(weft.InvalidConfig, match="neither a run directory"):
        weft.load_text_model(random_path / "logs")


# --------------------------------------------------------------------------- plans


def test_plan_equals_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    result = weft.plan("demo", {"parallel.tp": 2}, cluster="1x2xH100")
    words = ["plan", "demo", "--parallel.tp", "2", "--cluster", "1x2xH100"]
    assert main(words) == 0
    assert capsys.readouterr().out == f"{result}\n"
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == result.to_dict()
    assert (result.plan.tp, result.forecast.fits) == (2, True)
    assert b"<html" in result.report().content


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(600)
def test_verify_holds(tmp_path: Path) -> None:
    result = weft.verify("demo", {"parallel.tp": 2}, ranks=2, steps=1)
    assert result.holds
    assert str(result).splitlines()[-1] == f"passed: {result.reason}"
    assert len(result.record["steps"]) == 1
    with pytest.raises(weft.InvalidConfig, match="ranks=1 must be an integer"):
        weft.verify("demo", ranks=1)


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(600)
def test_compare_runs_and_plans(
    tmp_path: Path, store_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = {key: value for key, value in TINY.items() if key != "train.steps"}
    overrides |= {"data.path": store_path, "train.steps": 6, "train.eval_interval": 6}
    vary = {"optim.lr": [1e-3, 1e-2]}
    result = weft.compare("demo", overrides, vary=vary, repeats=2, out=tmp_path / "runs")
    assert "trial 4 of 4" in capsys.readouterr().out
    assert [variant["label"] for variant in result.record["variants"]] == ["lr=0.001", "lr=0.01"]
    assert str(result).splitlines()[0] == result.verdict[0]
    assert b"<html" in result.report().content
    planned = weft.compare("demo", vary={"parallel.tp": [1, 2]}, plan_only=True, cluster="1x2xH100")
    assert planned.path is None
    assert len(planned.record["variants"]) == 2
    with pytest.raises(weft.InvalidConfig, match="is the only variant"):
        weft.compare("demo")


# --------------------------------------------------------------------------- processes


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(600)
def test_failed_training_raises_with_the_log(tmp_path: Path, store_path: Path) -> None:
    faults = [{"site": "step", "kind": "raise", "passing": 2}]
    overrides = TINY | {
        "data.path": store_path,
        "run.dir": tmp_path / "run",
        "resilience.faults": faults,
        "resilience.max_restarts_per_hour": 0,
    }
    with pytest.raises(weft.TrainingFailed, match="rank 0 failed") as info:
        weft.train("demo", overrides)
    assert info.value.log == tmp_path / "run" / "logs" / "rank-0.log"
    assert f"log: {info.value.log}" in str(info.value)
    assert info.value.log.is_file()
    assert weft.open_run(tmp_path / "run").state == "failed"


INTERRUPTED = """
import os, signal, sys, threading, time
import weft
overrides = {OVERRIDES!r}
def interrupt():
    while not (os.path.exists("run/metrics.jsonl") and os.path.getsize("run/metrics.jsonl")):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.{SIGNAL})
threading.Thread(target=interrupt, daemon=True).start()
try:
    weft.train("demo", overrides)
except KeyboardInterrupt:
    run = weft.open_run("run")
    print("interrupted", run.state, len(run.checkpoints), run.step < 2000)
    overrides["train.steps"] = run.step + 1
    print("resumed", weft.train("demo", overrides).state)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "status", "lines"),
    [
        ("SIGINT", 0, ["interrupted stopped 1 True", "resumed finished"]),
        ("SIGTERM", 75, []),
    ],
)
def test_stop_signal_saves_first(
    name: str, status: int, lines: list[str], tmp_path: Path, store_path: Path
) -> None:
    """The script has no guard of ``__main__``."""
    overrides = TINY | {"train.steps": 2000, "run.dir": "run", "data.path": str(store_path)}
    code = INTERRUPTED.replace("{OVERRIDES!r}", repr(overrides)).replace("{SIGNAL}", name)
    result = run_script(code, tmp_path)
    assert result.returncode == status, result.stdout + result.stderr
    assert "stopped; run the same command to resume from" in result.stdout
    assert all(f"\n{line}\n" in result.stdout for line in lines), result.stdout
    assert len(weft.open_run(tmp_path / "run").checkpoints) >= 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_train_in_torchrun_trains_as_ranks(tmp_path: Path, store_path: Path) -> None:
    overrides = TINY | {"run.nproc_per_node": 2, "run.dir": "run", "data.path": str(store_path)}
    code = f"import os, weft\nrun = weft.train('demo', {overrides!r})\n"
    code += "print(f'rank {os.environ[\"RANK\"]} of the script: {run.state} {run.step}')"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    result = run_script(code, tmp_path, *torchrun, "--nproc-per-node", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    for rank in range(2):
        assert f"rank {rank} of the script: finished 3" in result.stdout
    assert weft.open_run(tmp_path / "run").plan["world_size"] == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_examples_of_the_page_run(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "python.md").read_text("utf-8")
    examples = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(examples) >= 8
    result = run_script("\n".join(examples), tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "train.stps is not a known key" in result.stdout
    assert (tmp_path / "report.html").is_file()


# --------------------------------------------------------------------------- notebooks


def test_notebook_is_stored_without_outputs() -> None:
    notebook = json.loads((ROOT / "docs" / "notebook.ipynb").read_text("utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(code) >= 8
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(900)
def test_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    import nbformat

    notebook = nbformat.read(ROOT / "docs" / "notebook.ipynb", 4)
    resources = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(notebook, timeout=600, resources=resources)
    cells = [cell for cell in client.execute().cells if cell["cell_type"] == "code"]
    first = cells[0]["outputs"]
    progress = [output for output in first if output["output_type"] == "display_data"]
    assert [output["data"]["text/plain"].split("  ")[0] for output in progress] == ["step 20/20"]
    assert len(first) < 12
    assert not any("\x1b" in output.get("text", "") for output in first)
    pages = [str(output.get("data", {}).get("text/html")) for c in cells for output in c["outputs"]]
    assert sum(page.startswith("<iframe srcdoc=") for page in pages) == 1


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(300)
def test_interrupted_cell_saves_first(
    tmp_path: Path, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    from jupyter_client.manager import start_new_kernel

    manager, kernel = start_new_kernel(cwd=str(tmp_path))
    try:
        overrides = TINY | {"train.steps": 2000, "run.dir": "run", "data.path": str(store_path)}
        message = kernel.execute(f"import weft\nweft.train('demo', {overrides!r})")
        until = time.monotonic() + 200
        while not (tmp_path / "run" / "metrics.jsonl").exists():
            assert time.monotonic() < until
            time.sleep(0.1)
        manager.interrupt_kernel()
        reply = kernel.get_shell_msg(timeout=100)
        while reply["parent_header"].get("msg_id") != message:
            reply = kernel.get_shell_msg(timeout=60)
        assert reply["content"]["ename"] == "KeyboardInterrupt"
        assert len(weft.open_run(tmp_path / "run").checkpoints) == 1
    finally:
        kernel.stop_channels()
        manager.shutdown_kernel(now=True)
