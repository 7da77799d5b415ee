"""A model, its tokenizer and its data in a bucket: moto's S3, and SageMaker's real entry point."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import aws
from tests.conversion.test_peft_import import write_model
from tests.harness import ROOT
from tests.submission.test_sagemaker import IMAGE, LAUNCH
from weft.config.errors import InvalidConfig
from weft.config.reader import read_job
from weft.config.remote_files import fetch_beside, fetch_files
from weft.config.storage import open_directory
from weft.data.prepare import prepare_store
from weft.planning.plan import Machine
from weft.submission import sagemaker
from weft.submission.submit import build_preparation, build_request, submit

pytest.importorskip("s3fs", reason="needs weft[s3]")
pytestmark = [
    pytest.mark.skipif(bool(aws.missing()), reason=f"needs {', '.join(aws.missing())} (pip)"),
    pytest.mark.timeout(300),
]
CPUS = Machine("cpu", 2)
TEMPLATE = """\
{%- for message in messages %}{{ message.role }}: {{ message.content }}<|endoftext|>{% endfor -%}
{%- if add_generation_prompt %}assistant: {% endif -%}
"""


@pytest.fixture
def bucket(moto_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A bucket of this test, and a cache of this test."""
    for name, value in aws.variables(moto_port).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    name = re.sub("[^a-z0-9]+", "-", tmp_path.name.lower()).strip("-")
    with sagemaker.connect_aws(aws.REGION) as connect:
        connect("s3").create_bucket(Bucket=name)
        yield open_directory(f"s3://{name}")


def upload(directory: Path, target: Any) -> str:
    for file in sorted(directory.iterdir()):
        (target / file.name).write_bytes(file.read_bytes())
    return str(target)


@pytest.fixture
def model(bucket: Any, store_path: Path, tmp_path: Path) -> str:
    """The URL of a Hugging Face directory."""
    local = write_model(tmp_path / "local-model", store_path)
    (local / "chat_template.jinja").write_text(TEMPLATE)
    return upload(local, bucket / "models" / "tiny")


# --------------------------------------------------------------------------- files of a bucket


def test_fetch_copies_a_changed_file_only(bucket: Any, tmp_path: Path) -> None:
    (bucket / "m" / "config.json").write_bytes(b"{}")
    (bucket / "m" / "model.safetensors").write_bytes(b"12")
    url = f"{bucket}m"
    directory = fetch_files(url, ["*.json"], "model.path")
    assert sorted(os.listdir(directory)) == [".lock", ".versions.json", "config.json"]
    first = (directory / "config.json").stat().st_mtime_ns
    assert fetch_files(url, ["*.json"], "model.path") == directory
    assert (directory / "config.json").stat().st_mtime_ns == first
    (bucket / "m" / "config.json").write_bytes(b"[]")
    fetch_files(url, ["*.json", "*.safetensors"], "model.path")
    assert (directory / "config.json").read_bytes() == b"[]"
    assert (directory / "model.safetensors").read_bytes() == b"12"


def test_fetch_removes_only_copies_of_files_that_are_gone(bucket: Any) -> None:
    """A tokenizer and a template of one directory are fetched by different patterns."""
    for name in ("tokenizer.json", "chats.txt", "old.json"):
        (bucket / "m" / name).write_bytes(b"{}")
    url = f"{bucket}m"
    template = fetch_beside(f"{url}/chats.txt", ["*.json"], "data.chat_template")
    directory = fetch_files(url, ["*.json"], "model.path")
    assert template.is_file()
    (bucket / "m" / "old.json").unlink()
    fetch_files(url, ["*.json"], "model.path")
    assert {"tokenizer.json", "chats.txt"} <= set(os.listdir(directory))
    assert "old.json" not in os.listdir(directory)


def test_fetch_of_nothing_is_refused(bucket: Any) -> None:
    (bucket / "m" / "other.txt").write_bytes(b"")
    for name, rule in (("no", "does not exist"), ("m", "has none of the files")):
        with pytest.raises(InvalidConfig, match=rule):
            fetch_files(f"{bucket}{name}", ["*.json"], "model.path")


# --------------------------------------------------------------------------- requests


def request_errors(on: str, *overrides: tuple[str, str]) -> str:
    with pytest.raises(InvalidConfig) as refusal:
        build_request(on, "lora", overrides, (), lambda _: CPUS)
    return str(refusal.value)


def test_launch_model_of_the_nodes_is_read_from_its_config(
    store_path: Path, tmp_path: Path
) -> None:
    """The configuration is enough to plan; the nodes read the model itself."""
    local = write_model(tmp_path / "copy", store_path)
    (local / "model.safetensors").unlink()
    keys = [
        *(IMAGE, ("run.device", "cpu"), ("model.path", "/models/tiny"), ("launch.cpus", "4")),
        *(("launch.mounts", "/runs=pvc:runs,/models=pvc:models"), ("launch.memory", "8")),
        *(("data.path", "/models/chats.jsonl"), ("run.dir", "runs/mine")),
    ]
    assert "give --model.config VALUE: a copy of its config.json" in request_errors(
        "kubernetes", *keys
    )
    given = ("model.config", str(local / "config.json"))
    request = build_request("kubernetes", "lora", [*keys, given], (), lambda _: CPUS)
    assert request.overrides["model.path"] == "/models/tiny"
    assert "model.config" not in request.overrides


def test_launch_uploads_the_tokenizer_that_only_this_machine_has(
    bucket: Any, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the files beside it, and nothing is uploaded before the launch."""
    Path("chats.jinja").write_text("{{ messages }}")
    shutil.copytree(tmp_path / "local-model", "tok")
    keys = [
        *(IMAGE, ("run.device", "cpu"), ("model.path", model), ("run.dir", "runs/mine")),
        *(("data.tokenizer", "tok/tokenizer.json"), ("data.chat_template", "chats.jinja")),
        *(("launch.mounts", "/runs=pvc:runs"), ("data.path", f"{bucket}chats.jsonl")),
    ]
    text = request_errors("kubernetes", *keys)
    assert text.count("Give --launch.bucket VALUE") == 2
    assert 'data.tokenizer="tok/tokenizer.json" is a file of this machine' in text
    keys.append(("launch.bucket", f"{bucket}"))
    request = build_request("kubernetes", "lora", keys, (), lambda _: CPUS)
    home = f"{bucket}weft/mine/files"
    assert request.overrides["data.tokenizer"] == f"{home}/tokenizer/tokenizer.json"
    assert request.overrides["data.chat_template"] == f"{home}/chat_template/chats.jinja"
    assert f"{home}/tokenizer/config.json" in request.uploads
    assert not (bucket / "weft").exists()
    tool = tmp_path / "bin" / "kubectl"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    submit("kubernetes", request, "kind: x")
    stored = open_directory(f"{home}/tokenizer/tokenizer.json").read_bytes()
    assert stored == Path("tok/tokenizer.json").read_bytes()


# --------------------------------------------------------------------------- whole jobs


def run_containers(
    body: dict[str, Any], hosts: list[str], directory: Path
) -> list[tuple[int, str]]:
    """Run the entry point in the containers of a request; return statuses and outputs."""
    processes = []
    for host in hosts:
        base = directory / host / "opt ml"
        config = base / "input/config"
        config.mkdir(parents=True)
        resources = {"hosts": hosts, "current_host": host}
        (config / "resourceconfig.json").write_text(json.dumps(resources))
        parameters = json.dumps(body["HyperParameters"]).replace("/opt/ml", str(base))
        (config / "hyperparameters.json").write_text(parameters)
        channels: dict[str, Any] = {}
        for channel in body.get("InputDataConfig", []):
            uri = channel["DataSource"]["S3DataSource"]["S3Uri"]
            channels[channel["ChannelName"]] = {}
            target = base / "input/data" / channel["ChannelName"]
            target.mkdir(parents=True)
            for item in open_directory(uri.rstrip("/")).iterdir():
                (target / item.name).write_bytes(item.read_bytes())
        (config / "inputdataconfig.json").write_text(json.dumps(channels))
        environment = os.environ | {
            "SAGEMAKER_BASE_DIR": str(base),
            "PYTHONPATH": str(ROOT),
            "XDG_CACHE_HOME": str(directory / host / "cache of the node"),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            **body.get("Environment", {}),
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "weft.submission.sagemaker_entry"],
                env=environment,
                cwd=base,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(each.returncode, text) for each, text in zip(processes, outputs, strict=True)]


@pytest.mark.slow
def test_data_prepare_on_sagemaker_is_divided_among_the_hosts(
    bucket: Any, model: str, tmp_path: Path
) -> None:
    """All hosts read the data at their address, so that they prepare the same store."""
    (tmp_path / "texts").mkdir()
    for part in range(4):
        rows = [json.dumps({"text": f"def f{n}_{part}(x): return x\n" * 20}) for n in range(300)]
        (tmp_path / f"texts/{part}.jsonl").write_text("\n".join(rows))
    upload(tmp_path / "texts", bucket / "texts")
    keys = [(f"launch.{name}", value) for name, value in LAUNCH.items() if name != "bucket"]
    keys += [IMAGE, ("launch.bucket", f"{bucket}"), ("data.path", f"{bucket}texts/")]
    keys += [
        ("data.tokenizer", "local-model/tokenizer.json"),
        ("launch.instance_type", "ml.c5.xlarge"),
    ]
    keys += [("data.cache_dir", f"{bucket}tokens")]
    job, _, errors = read_job("demo", keys)
    assert not errors
    request = build_preparation("sagemaker", "demo", keys, job, 2)
    text = sagemaker.render(request)
    assert sagemaker.check(text) == []
    body = json.loads(text)
    assert body["HyperParameters"]["data.path"] == f"{bucket}texts/"
    assert "InputDataConfig" not in body
    submit("sagemaker", request, text)
    results = run_containers(body, ["algo-1", "algo-2"], tmp_path)
    assert [status for status, _ in results] == [0, 0], "\n".join(out for _, out in results)
    [store] = [manifest.parent for manifest in (bucket / "tokens").rglob("store.json")]
    local = job.data.model_copy(update={"tokenizer": str(tmp_path / "local-model/tokenizer.json")})
    alone = prepare_store(local, tmp_path / "alone")
    names = sorted(path.name for path in alone.path.glob("*.bin"))
    assert len(names) >= 2
    for name in ("store.json", *names):
        assert (store / name).read_bytes() == (alone.path / name).read_bytes()


@pytest.mark.slow
def test_lora_from_s3_trains_in_the_container_of_sagemaker(
    bucket: Any, model: str, tmp_path: Path
) -> None:
    """Model, tokenizer and data are in S3; the request alone says what the container gets."""
    (tmp_path / "texts").mkdir()
    rows = [
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": f"define f{number}"},
                    {"role": "assistant", "content": f"def f{number}(x): return x + {number}"},
                ]
            }
        )
        for number in range(200)
    ]
    (tmp_path / "texts/a.jsonl").write_text("\n".join(rows))
    upload(tmp_path / "texts", bucket / "texts")
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        f"""extends = "lora"
[model]
path = "{model}"
[data]
path = "{bucket}texts/"
[train]
steps = 4
seq_len = 64
global_batch_size = 4
[lora]
rank = 4
"""
    )
    keys = [(f"launch.{name}", value) for name, value in LAUNCH.items() if name != "bucket"]
    keys += [IMAGE, ("launch.bucket", f"{bucket}"), ("run.device", "cpu"), ("run.dir", "runs/mine")]
    keys += [("run.nproc_per_node", "1")]
    keys[1] = ("launch.instance_type", "ml.c5.xlarge")
    request = build_request("sagemaker", str(recipe), keys, (), lambda _: CPUS)
    text = sagemaker.render(request)
    assert sagemaker.check(text) == []
    job = submit("sagemaker", request, text)
    assert job.status() == "completed"  # moto's jobs are complete at once
    body = json.loads(text)

    [(status, output)] = run_containers(body, ["algo-1"], tmp_path)
    assert status == 0, output
    assert "step 4/4" in output
    base = tmp_path / "algo-1/opt ml"
    assert {"config.json", "model.safetensors"} <= set(os.listdir(base / "model"))
    assert not (base / "output/failure").exists()
