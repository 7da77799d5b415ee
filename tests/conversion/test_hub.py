"""Models of the Hub: a server on loopback, huggingface_hub's own client, and its errors."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import commands
from tests.conversion.test_hf_convert import assert_same_bits, of_model, tiny_dir, tiny_weights
from tests.hub import COMMIT, TOKEN
from tests.s3 import answers, die_with_parent, free_ports
from tests.small import newest_state

pytest.importorskip("huggingface_hub")
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def endpoint(store_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve org/tiny, and copies of it that are gated, private, and without weights."""
    home = tmp_path_factory.mktemp("hub")
    (home / "org").mkdir()
    tiny = tiny_dir(home / "org" / "tiny", store_path / "tokenizer.json")
    (tiny / "pytorch_model.bin").write_bytes(b"not downloaded")
    for name in ("gated", "private", "empty"):
        (shutil.copytree(tiny, home / "org" / name) / name).touch()
    (home / "org" / "empty" / "model.safetensors").unlink()
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "tests.hub", str(home), str(port)]
    with subprocess.Popen(command, cwd=ROOT, preexec_fn=die_with_parent) as server:
        until = time.monotonic() + 30
        while not is_open(port):
            assert time.monotonic() < until, "the server does not start"
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
        server.kill()


def is_open(port: int) -> bool:
    try:
        answers(port)
    except OSError:
        return False
    return True


def run_weft(directory: Path, endpoint: str, *words: str, code: int = 0, **variables: str) -> str:
    """Run weft with an empty cache of the Hub; return all that it prints, as one line."""
    cache = {"HF_ENDPOINT": endpoint, "HF_HOME": str(directory / "cache"), "NO_PROXY": "*"}
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("HF_")]:
            patch.delenv(name)
        # In a forked process that has not imported the Hub's client, which reads these variables.
        done = commands.run_weft([*commands.WEFT, *words], directory, **cache, **variables)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return " ".join((done.stdout + done.stderr).split())


def test_model_of_the_hub_is_imported_and_cached(endpoint: str, tmp_path: Path) -> None:
    run_weft(tmp_path, endpoint, "import", "org/tiny", "run")
    assert_same_bits(tiny_weights(), of_model(newest_state(tmp_path / "run")))
    cached = tmp_path / "cache" / "hub" / "models--org--tiny" / "snapshots" / COMMIT
    names = {path.name for path in cached.iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json"}
    run_weft(tmp_path, "http://127.0.0.1:9", "import", "org/tiny", "again", HF_HUB_OFFLINE="1")
    assert_same_bits(newest_state(tmp_path / "run"), newest_state(tmp_path / "again"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gated", "private"])
def test_gated_and_private_models_need_the_token(name: str, endpoint: str, tmp_path: Path) -> None:
    run_weft(tmp_path, endpoint, "import", f"hf://org/{name}", "run", HF_TOKEN=TOKEN)
    assert (tmp_path / "run" / "job.toml").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "name", "variables", "reason"),
    [
        ("import", "org/absent", {}, "RepositoryNotFoundError: 401"),
        ("import", "org/gated", {}, "GatedRepoError: 403"),
        ("train", "org/gated", {}, "GatedRepoError: 403"),
        ("import", "org/private", {"HF_TOKEN": "hf_wrong"}, "RepositoryNotFoundError: 401"),
        ("import", "org/empty", {}, "the Hub has no config.json and safetensors of it"),
        ("import", "org/tiny", {"HF_HUB_OFFLINE": "1"}, "LocalEntryNotFoundError"),
        ("import", "org/tiny", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "Connect"),
    ],
)
def test_model_that_the_hub_does_not_give_is_one_error(
    command: str, name: str, variables: dict[str, str], reason: str, endpoint: str, tmp_path: Path
) -> None:
    words = ["import", name, "run"]
    if command == "train":
        (tmp_path / "chat.jsonl").write_text('{"messages": []}\n')
        words = ["train", "lora", "--model.path", name, "--run.dir", "run"]
        words += ["--data.path", "chat.jsonl"]
    message = run_weft(tmp_path, endpoint, *words, code=2, **variables)
    assert "weft: 1 problem, nothing was started: " in message
    assert f'="{name}" is no directory, and cannot be downloaded from the Hub: ' in message
    assert reason in message
    assert "set HF_TOKEN" in message
    assert f"hf download {name} --local-dir DIRECTORY" in message
    assert "hf_wrong" not in message
    assert not (tmp_path / "run").exists()


def test_dry_run_names_the_weights_of_the_hub_as_not_checked(endpoint: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("one two three. " * 2000)
    words = ["train", "pretrain", "--data.path", "text.txt", "--run.nproc_per_node", "1"]
    line = "not checked: the weights of org/empty, which the start downloads"
    assert line in run_weft(tmp_path, endpoint, *words, "--model.path", "org/empty", "--dry-run")
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    shown = run_weft(tmp_path, endpoint, "train", "demo", "--dry-run")
    assert "not checked: the tokens" in shown
    assert "the weights of" not in shown


def test_plan_of_a_model_of_the_hub_downloads_only_its_configuration(
    endpoint: str, tmp_path: Path
) -> None:
    words = ["plan", "hf://org/empty", "--lora", "4", "--cluster", "2xA100"]
    shown = run_weft(tmp_path, endpoint, *words)
    assert shown.startswith("weft plan lora --model.path hf://org/empty --lora.rank 4 lora on 2")
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    message = run_weft(tmp_path, endpoint, "plan", "hf://org/absent", "--cluster", "A100", code=2)
    assert 'model.path="hf://org/absent" is no directory, and cannot be downloaded' in message
