"""SageMaker jobs on loopback: started by Amazon's toolkit, and as a plain container.

The toolkit is not a dependency of weft. Install it into a separate directory and set the
variable (`scripts/drill.sh sagemaker` does both):

    pip install --no-deps --target DIR -r tests/submission/sagemaker-toolkit.txt
    WEFT_SAGEMAKER_TOOLKIT=DIR pytest tests/submission/test_sagemaker_entry.py
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.harness import ROOT
from tests.small import SMALL, records
from weft.checkpoint.manifest import checkpoint_step, list_checkpoints
from weft.config.errors import InvalidConfig, WeftError
from weft.config.reader import read_job
from weft.submission.sagemaker_entry import (
    Container,
    clean_environment,
    describe_root_cause,
    detect_container,
    parse_arguments,
    parse_toolkit_value,
    prepare_arguments,
    read_hyperparameters,
    train_arguments,
    write_failure,
)
from weft.submission.sagemaker_storage import DEFAULT_MOUNTS, check_mounts, link_mounts

TOOLKIT = os.environ.get("WEFT_SAGEMAKER_TOOLKIT", "")
HAVE_TOOLKIT = bool(TOOLKIT) or importlib.util.find_spec("sagemaker_training") is not None
PORT = 7777  # the toolkit has no other port
HOSTS = ["127.0.0.1", "localhost"]
TRAIN = """\
from weft.submission.sagemaker_entry import main

if __name__ == "__main__":
    main()
"""
SMALL_HYPERPARAMETERS: dict[str, Any] = {key: value for key, value in SMALL if value} | {
    "recipe": "demo",
    "monitor.trackers": [],
    "checkpoint.interval": 10,
}


def configure(
    base: Path,
    host: str,
    hosts: list[str],
    parameters: dict[str, Any],
    channels: dict[str, Path] | None = None,
) -> None:
    """Write the files that SageMaker puts into a container before it starts."""
    directory = base / "input/config"
    for path in (directory, base / "model", base / "output", base / "checkpoints"):
        path.mkdir(parents=True, exist_ok=True)
    resources = {
        "current_host": host,
        "hosts": hosts,
        "network_interface_name": "lo",
        "current_instance_type": "ml.c5.xlarge",
        "current_group_name": "homogeneousCluster",
        "instance_groups": [
            {
                "instance_group_name": "homogeneousCluster",
                "instance_type": "ml.c5.xlarge",
                "hosts": hosts,
            }
        ],
    }
    values = {name: json.dumps(value) for name, value in parameters.items()}
    data: dict[str, Any] = {name: {"TrainingInputMode": "File"} for name in channels or {}}
    for file, content in (
        ("resourceconfig", resources),
        ("hyperparameters", values),
        ("inputdataconfig", data),
    ):
        (directory / f"{file}.json").write_text(json.dumps(content))
    for name, source in (channels or {}).items():
        location = base / "input/data" / name
        location.parent.mkdir(parents=True, exist_ok=True)
        if not location.exists():
            location.symlink_to(source)


# --------------------------------------------------------------------------- command line


def single_container(base: Path, **channels: Path) -> Container:
    return Container(("algo-1",), "algo-1", channels, base, base / "model", base / "output/failure")


def pairs(words: list[str]) -> dict[str, str]:
    return dict(zip(words[1::2], words[2::2], strict=True))


def test_entry_values_written_by_the_toolkit_are_read() -> None:
    arguments = [
        "--recipe",
        "demo",
        "--parallel.dp_shard",
        "2",
        "--activation_checkpoint.x",
        "True",
    ]
    assert parse_arguments(arguments) == [
        ("recipe", "demo"),
        ("parallel.dp_shard", "2"),
        ("activation_checkpoint.x", "true"),
    ]
    assert parse_toolkit_value("['tensorboard', 'a:b']") == '["tensorboard", "a:b"]'
    assert (
        parse_toolkit_value("[{'kind': 'raise', 'rank': 1}]") == '[{"kind" = "raise", "rank" = 1}]'
    )
    assert parse_toolkit_value("web/=0.7,code/=0.3") == "web/=0.7,code/=0.3"
    assert parse_toolkit_value("[not python") == "[not python"


def test_entry_word_without_a_value_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="--b is not --key value"):
        parse_arguments(["--a", "1", "--b"])
    with pytest.raises(InvalidConfig, match="-k is not --key value"):
        parse_arguments(["-k", "1"])


def test_entry_defaults_come_from_sagemaker(tmp_path: Path) -> None:
    container = single_container(tmp_path, training=tmp_path / "data")
    words, job = train_arguments(
        [("recipe", "demo"), ("train.steps", "5"), ("monitor.trackers", "")], container
    )
    assert job.monitor.trackers == ()
    assert (words[0], job.run.dir) == ("demo", f"{tmp_path}/checkpoints")
    assert pairs(words) == {
        "--train.steps": "5",
        "--monitor.trackers": "",
        "--data.path": f"{tmp_path}/data",
        "--run.dir": f"{tmp_path}/checkpoints",
    }


def test_entry_empty_text_is_a_value_and_null_is_the_default(tmp_path: Path) -> None:
    """The toolkit passes None and the empty text alike, and both mean the default."""
    path = tmp_path / "input/config/hyperparameters.json"
    path.parent.mkdir(parents=True)
    values = {"recipe": "demo", "monitor.trackers": "", "train.seed": "null", "data.path": '""'}
    path.write_text(json.dumps(values))
    assert read_hyperparameters(tmp_path) == [
        ("recipe", "demo"),
        ("monitor.trackers", ""),
        ("data.path", ""),
    ]
    assert parse_arguments(["--recipe", "demo", "--train.seed", ""]) == [("recipe", "demo")]


def test_entry_given_values_override_defaults(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('extends = "demo"\n[run]\ndir = "/fsx/run"\n')
    container = single_container(tmp_path, training=tmp_path / "data")
    overrides = [("recipe", str(recipe)), ("data.path", "s3://bucket/web")]
    assert pairs(train_arguments(overrides, container)[0]) == {"--data.path": "s3://bucket/web"}


def test_entry_without_a_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"recipe is missing. Set the hyperparameter recipe"):
        train_arguments([("train.steps", "5")], single_container(tmp_path))


@pytest.mark.parametrize("make", [train_arguments, prepare_arguments])
def test_entry_without_the_channel_or_file_of_the_recipe_names_it(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    two = replace(single_container(tmp_path), hosts=("algo-1", "algo-2"))
    recipe = two.base / "input" / "data" / "recipe" / "recipe.toml"
    with pytest.raises(InvalidConfig) as caught:
        make([("recipe", str(recipe))], two)
    assert f'recipe="{recipe}" does not exist: the job has no channel recipe' in str(caught.value)
    assert "checkpoint.dir" not in str(caught.value)
    two = replace(two, channels={"recipe": recipe.parent})
    with pytest.raises(InvalidConfig, match="the channel recipe has no such file"):
        make([("recipe", str(recipe))], two)
    recipe.parent.mkdir(parents=True)
    recipe.write_text("[")
    with pytest.raises(InvalidConfig, match="cannot be read as TOML"):
        make([("recipe", str(recipe))], two)


def test_entry_several_hosts_need_a_shared_checkpoint_dir(tmp_path: Path) -> None:
    two = Container(("a", "b"), "a", {}, tmp_path, tmp_path / "model", tmp_path / "failure")
    with pytest.raises(InvalidConfig, match=r"checkpoint\.dir=.*is not shared by the 2 hosts"):
        train_arguments([("recipe", "demo")], two)
    overrides = [("recipe", "demo"), ("checkpoint.dir", "s3://bucket/run")]
    assert pairs(train_arguments(overrides, two)[0])["--checkpoint.dir"] == "s3://bucket/run"


def test_entry_configuration_files_equal_the_variables(tmp_path: Path) -> None:
    parameters = {"recipe": "demo", "debug.deterministic": True, "sagemaker_program": "train.py"}
    configure(tmp_path, "algo-2", ["algo-2", "algo-1"], parameters, {"training": tmp_path})
    base = {"SAGEMAKER_BASE_DIR": str(tmp_path)}
    result = detect_container(base)
    assert (result.hosts, result.host) == (("algo-1", "algo-2"), "algo-2")
    assert read_hyperparameters(tmp_path) == [("recipe", "demo"), ("debug.deterministic", "true")]
    assert result == detect_container(
        base
        | {
            "SM_HOSTS": '["algo-1", "algo-2"]',
            "SM_CURRENT_HOST": "algo-2",
            "SM_CHANNEL_TRAINING": f"{tmp_path}/input/data/training",
            "SM_MODEL_DIR": f"{tmp_path}/model",
            "SM_OUTPUT_DIR": f"{tmp_path}/output",
        }
    )
    with pytest.raises(WeftError, match="this is not a SageMaker training job"):
        detect_container({"SAGEMAKER_BASE_DIR": str(tmp_path / "nowhere")})


def test_entry_harmful_exports_of_the_toolkit_are_removed() -> None:
    toolkit = {"NCCL_IB_DISABLE": "1", "RDMAV_FORK_SAFE": "1", "FI_PROVIDER": "efa"}
    assert clean_environment(toolkit) == (toolkit, [])  # variables that the user set are unchanged
    remaining, harmful = clean_environment(toolkit | {"SM_TRAINING_ENV": "{}"})
    assert remaining == {"FI_PROVIDER": "efa", "SM_TRAINING_ENV": "{}"}
    assert harmful == ["NCCL_IB_DISABLE", "RDMAV_FORK_SAFE"]


def test_entry_failure_file_begins_with_the_first_cause(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for rank, when, kind in ((0, 11.0, "RuntimeError"), (1, 10.0, "MemoryError"), (2, 1.0, "Old")):
        report = {"rank": rank, "time": when, "kind": kind, "message": "m", "traceback": "t"}
        report |= {"is_expected": False, "transient": True, "where": ""}
        (tmp_path / f"logs/rank-{rank}.error.json").write_text(json.dumps(report))
    assert describe_root_cause(tmp_path, 1, ["a warning\n"], 5.0).startswith(
        "rank 1: MemoryError: m\n\nt"
    )
    assert describe_root_cause(tmp_path, 1, ["last word\n"], 20.0) == "last word"
    assert describe_root_cause(tmp_path, 1, [], 20.0) == "weft train exited with status 1"
    tail = ["x\n", "weft: rank 1 failed: SIGKILL: killed\n", "  log: l\n"]
    assert describe_root_cause(tmp_path, 1, tail, 5.0).startswith("weft: rank 1 failed: SIGKILL")
    assert "killed by SIGKILL, possibly" in describe_root_cause(tmp_path, -9, [], 5.0)
    (tmp_path / "unhealthy-nodes").mkdir()
    (tmp_path / "unhealthy-nodes/algo-1").write_text("disk: 1 GB free\n")
    expected = "unhealthy node algo-1: disk: 1 GB free"
    assert describe_root_cause(tmp_path, 69, [], 5.0) == expected
    assert "run the same job to resume" in describe_root_cause(tmp_path, 75, [], 5.0)
    failure = tmp_path / "output/failure"
    write_failure(failure, "first")
    write_failure(failure, "second")
    assert failure.read_text() == "first"


# --------------------------------------------------------------------------- file systems


def mountinfo(**types: tuple[Path, str]) -> str:
    """Return the content of /proc/self/mountinfo with these mounts."""
    lines = ["1 0 0:1 / / rw - overlay overlay rw"]
    for number, (path, kind) in enumerate(types.values(), 2):
        point = str(path).replace(" ", "\\040")
        lines.append(f"{number} 1 0:{number} / {point} rw shared:1 - {kind} server:/x rw,flock")
    return "\n".join(lines)


@pytest.fixture
def fsx(tmp_path: Path) -> Path:
    channel = tmp_path / "opt ml/input/data/fsx"
    channel.mkdir(parents=True)
    return channel


def test_entry_links_file_systems_to_their_channels(fsx: Path, tmp_path: Path) -> None:
    efs = fsx.with_name("efs")
    efs.mkdir()
    mounts = mountinfo(fsx=(fsx, "lustre"), efs=(efs, "nfs4"))
    for _ in range(2):  # another rank, or a restart
        assert (
            link_mounts(DEFAULT_MOUNTS, {"fsx": fsx, "efs": efs, "web": fsx}, mounts, tmp_path)
            == []
        )
    assert (tmp_path / "fsx").readlink() == fsx
    assert (tmp_path / "efs").readlink() == efs
    assert not (tmp_path / "web").exists()


def test_entry_channel_of_another_type_is_refused(fsx: Path, tmp_path: Path) -> None:
    """An S3 channel named fsx, or a file system of the wrong FileSystemType."""
    for mounts, kind in ((mountinfo(), "overlay"), (mountinfo(fsx=(fsx, "nfs4")), "nfs4")):
        [error] = link_mounts(DEFAULT_MOUNTS, {"fsx": fsx}, mounts, tmp_path)
        assert str(error).startswith(
            f"channel fsx is not FSx for Lustre, but of type {kind}. Mount"
        )
        assert "--launch.mounts./fsx fsx:fs-" in error.remedy
    assert not (tmp_path / "fsx").exists()


def test_entry_directory_of_the_image_is_refused(fsx: Path, tmp_path: Path) -> None:
    """Training would write to the container's disk."""
    (tmp_path / "fsx").mkdir()
    mounts = mountinfo(fsx=(fsx, "lustre"))
    [error] = link_mounts(DEFAULT_MOUNTS, {"fsx": fsx}, mounts, tmp_path)
    assert "remove /fsx from the image: it hides the channel fsx" in error.remedy
    own = mounts + "\n" + mountinfo(fsx=(tmp_path / "fsx", "lustre"))
    assert (
        link_mounts(DEFAULT_MOUNTS, {"fsx": fsx}, own, tmp_path) == []
    )  # the image mounts it itself


def test_entry_links_a_prefix_of_s3_to_its_directory(tmp_path: Path) -> None:
    """An S3 channel has no type of its own, so only a directory of the image is refused."""
    channel = tmp_path / "channel"
    channel.mkdir()
    mounts, channels = {"data-web": ("s3", "/data/web")}, {"data-web": channel}
    assert link_mounts(mounts, channels, mountinfo(), tmp_path) == []
    assert (tmp_path / "data/web").resolve() == channel
    (tmp_path / "data/web").unlink()
    (tmp_path / "data/web").mkdir()
    [error] = link_mounts(mounts, channels, mountinfo(), tmp_path)
    assert "remove /data/web from the image" in error.remedy


def test_entry_link_that_cannot_be_made_is_reported(fsx: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    [error] = link_mounts(
        DEFAULT_MOUNTS, {"fsx": fsx}, mountinfo(fsx=(fsx, "lustre")), tmp_path / "file"
    )
    assert "File exists" in error.rule
    assert error.remedy.endswith("RUN ln -s /opt/ml/input/data/fsx /fsx")


def test_entry_path_below_an_absent_mount_is_refused(fsx: Path, tmp_path: Path) -> None:
    overrides = [("checkpoint.dir", "/fsx/run"), ("data.tokenizer", "/efs/tokenizer.json")]
    job, _, _ = read_job("demo", overrides)
    errors = check_mounts(DEFAULT_MOUNTS, job, mountinfo(), tmp_path)
    assert [(error.key, error.value) for error in errors] == [
        ("checkpoint.dir", "/fsx/run"),
        ("data.tokenizer", "/efs/tokenizer.json"),
    ]
    assert errors[1].rule == "is below /efs, which is not EFS, but of type overlay"
    (tmp_path / "fsx").symlink_to(fsx)
    errors = check_mounts(DEFAULT_MOUNTS, job, mountinfo(fsx=(fsx, "lustre")), tmp_path)
    assert [error.key for error in errors] == ["data.tokenizer"]


# --------------------------------------------------------------------------- whole jobs


def environment(base: Path, **extra: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (TOOLKIT, str(ROOT))))
    return os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": path,
        "SAGEMAKER_BASE_DIR": str(base),
        "GLOO_SOCKET_IFNAME": "lo",
        **extra,
    }


def as_container(base: Path) -> subprocess.Popen[str]:
    """The container's first process is weft's."""
    return subprocess.Popen(
        [sys.executable, "-m", "weft.submission.sagemaker_entry"],
        env=environment(base),
        cwd=base,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def as_toolkit(base: Path, source: Path) -> subprocess.Popen[str]:
    """The container's first process is the toolkit's, which starts torchrun."""
    (source / "train.py").parent.mkdir(exist_ok=True)
    (source / "train.py").write_text(TRAIN)
    return subprocess.Popen(
        [sys.executable, "-m", "sagemaker_training.cli.train"],
        env=environment(
            base,
            SAGEMAKER_TRAINING_MODULE="sagemaker_pytorch_container.training:main",
            TRAINING_JOB_NAME="test",
            AWS_DEFAULT_REGION="us-east-1",
            OMP_NUM_THREADS="1",
        ),
        cwd=base,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def toolkit_parameters(source: Path, **extra: Any) -> dict[str, Any]:
    return {
        "sagemaker_program": "train.py",
        "sagemaker_submit_directory": str(source),
        "sagemaker_torch_distributed_enabled": True,
        "sagemaker_instance_type": "ml.c5.xlarge",
        "sagemaker_distribution_instance_groups": ["homogeneousCluster"],
        "sagemaker_container_log_level": 20,
        **SMALL_HYPERPARAMETERS,
        **extra,
    }


def wait_for_all(
    processes: list[subprocess.Popen[str]], seconds: float = 240
) -> list[tuple[int, str]]:
    try:
        outputs = [process.communicate(timeout=seconds)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, text) for process, text in zip(processes, outputs, strict=True)]


needs_toolkit = pytest.mark.skipif(
    not HAVE_TOOLKIT, reason="needs Amazon's training toolkit: see this file's head"
)
whole_job = pytest.mark.timeout(600, method="signal")


@pytest.fixture
def free_port() -> Iterator[None]:
    """Reserve the port for one test at a time, over all test processes."""
    with (Path(tempfile.gettempdir()) / f"weft-tests-port-{PORT}").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", PORT))
            except OSError:
                pytest.skip(f"somebody uses port {PORT}, which the toolkit has fixed")
        yield


@needs_toolkit
@whole_job
@pytest.mark.slow
@pytest.mark.usefixtures("free_port")
def test_entry_two_hosts_by_the_toolkit_train(text_dir: Path, tmp_path: Path) -> None:
    """Data comes from the channel, checkpoints are shared, and the first host exports."""
    from transformers import AutoModelForCausalLM

    shared = tmp_path / "fsx"
    cache = {"data.cache_dir": str(tmp_path / "cache"), "checkpoint.dir": str(shared)}
    bases = [tmp_path / "one", tmp_path / "two"]
    processes = []
    for base, host in zip(bases, HOSTS, strict=True):
        parameters = toolkit_parameters(tmp_path / "source", **cache)
        configure(base, host, HOSTS, parameters, {"training": text_dir})
        processes.append(as_toolkit(base, tmp_path / "source"))
    for status, output in wait_for_all(processes):
        assert status == 0, output
    assert [checkpoint_step(path) for path in list_checkpoints(shared)] == [10, 20]
    assert records(bases[0] / "checkpoints")[-1]["step"] == 20
    assert "data.path" in (bases[0] / "checkpoints/job.toml").read_text()
    assert [(base / "output/success").exists() for base in bases] == [True, True]
    assert [(base / "output/failure").exists() for base in bases] == [False, False]
    model = AutoModelForCausalLM.from_pretrained(bases[0] / "model")
    assert model.config.hidden_size == 32
    assert (bases[0] / "model/tokenizer.json").exists()
    assert not list((bases[1] / "model").glob("*"))


@needs_toolkit
@whole_job
@pytest.mark.slow
@pytest.mark.usefixtures("free_port")
def test_entry_crash_by_the_toolkit_is_reported(store_path: Path, tmp_path: Path) -> None:
    """The failure file begins with the error of the failed rank."""
    fault = [{"kind": "raise", "rank": 1, "passing": 5}]
    extra = {"resilience.faults": fault, "data.path": str(store_path)}
    extra |= {"checkpoint.dir": str(tmp_path / "fsx")}
    bases = [tmp_path / "one", tmp_path / "two"]
    processes = []
    for base, host in zip(bases, HOSTS, strict=True):
        configure(base, host, HOSTS, toolkit_parameters(tmp_path / "source", **extra))
        processes.append(as_toolkit(base, tmp_path / "source"))
    statuses = [status for status, _ in wait_for_all(processes)]
    assert all(statuses)
    text = (bases[1] / "output/failure").read_text()
    assert text.startswith("rank 1: RuntimeError: injected fault"), text
    assert "Traceback" in text
    assert not (bases[0] / "model/config.json").exists()


@needs_toolkit
@whole_job
@pytest.mark.slow
@pytest.mark.usefixtures("free_port")
def test_entry_restarted_job_resumes(store_path: Path, tmp_path: Path) -> None:
    """Only the checkpoint directory survives the loss of a container."""
    first, second_run = tmp_path / "first", tmp_path / "again"
    fault = [{"kind": "kill", "rank": 0, "passing": 15}]
    extra = {"data.path": str(store_path), "resilience.faults": fault}
    configure(first, "127.0.0.1", HOSTS[:1], toolkit_parameters(tmp_path / "source", **extra))
    [(status, output)] = wait_for_all([as_toolkit(first, tmp_path / "source")])
    assert status != 0
    assert "killed by SIGKILL" in (first / "output/failure").read_text(), output
    shutil.copytree(first / "checkpoints", second_run / "checkpoints")
    extra["resilience.faults"] = []
    configure(second_run, "127.0.0.1", HOSTS[:1], toolkit_parameters(tmp_path / "source", **extra))
    [(status, output)] = wait_for_all([as_toolkit(second_run, tmp_path / "source")])
    assert status == 0, output
    steps = [record["step"] for record in records(second_run / "checkpoints")]
    assert steps[-1] == 20
    assert (second_run / "model/config.json").exists()


@whole_job
@pytest.mark.slow
@pytest.mark.usefixtures("free_port")
def test_entry_two_containers_train(store_path: Path, tmp_path: Path) -> None:
    """weft is the first process of each container, and they find each other."""
    bases = [tmp_path / "one", tmp_path / "two"]
    processes = []
    parameters = SMALL_HYPERPARAMETERS | {"data.path": str(store_path), "run.nproc_per_node": 1}
    parameters |= {"checkpoint.dir": str(tmp_path / "fsx")}
    for base, host in zip(bases, HOSTS, strict=True):
        configure(base, host, HOSTS, parameters)
        processes.append(as_container(base))
    for status, output in wait_for_all(processes):
        assert status == 0, output
    assert len(list((tmp_path / "fsx/step-00000020").glob("shard-*.safetensors"))) == 2
    assert (bases[0] / "model/model.safetensors").exists()
    assert not list((bases[1] / "model").glob("*"))


@whole_job
@pytest.mark.slow
def test_entry_stopped_container_resumes(store_path: Path, tmp_path: Path) -> None:
    """SageMaker sends SIGTERM to the first process of a container, which saves."""
    parameters = SMALL_HYPERPARAMETERS | {"data.path": str(store_path), "run.nproc_per_node": 2}
    parameters |= {"train.steps": 3000, "checkpoint.interval": 0}
    configure(tmp_path, "algo-1", ["algo-1"], parameters)
    process = as_container(tmp_path)
    metrics, deadline = tmp_path / "checkpoints/metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") > 5):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    [(status, output)] = wait_for_all([process])
    assert status == 75, output
    assert (tmp_path / "output/failure").read_text().startswith("saved a checkpoint and stopped")
    step = checkpoint_step(list_checkpoints(tmp_path / "checkpoints/checkpoints")[-1])
    assert 0 < step < 3000
    (tmp_path / "output/failure").unlink()
    parameters |= {"train.steps": step + 5}
    configure(tmp_path, "algo-1", ["algo-1"], parameters)
    [(status, output)] = wait_for_all([as_container(tmp_path)])
    assert status == 0, output
    assert f"resuming from {tmp_path}/checkpoints/checkpoints/step-{step:08}" in output
    assert records(tmp_path / "checkpoints")[-1]["step"] == step + 5
    assert (tmp_path / "model/model.safetensors").exists()


# The root directory of a container: /opt/ml is its own, and /fsx does not exist.  The channel is a
# mount, of which the kernel's list says that it is Lustre, because no Lustre client is here.
CONTAINER = """\
set -e
cd {root}
for name in /* /opt/*; do
    case $name in /fsx|/opt|/opt/ml) continue;; esac
    if [ -L "$name" ]; then cp -P "$name" ".$name"
    elif [ -d "$name" ]; then mkdir -p ".$name"; mount --rbind "$name" ".$name"
    fi
done
mkdir -p opt/ml/input/data/fsx
mount --bind {shared} opt/ml/input/data/fsx
lustre='s|\\( /opt/ml/input/data/fsx .* - \\)[^ ]*|\\1lustre|'
sed "s| {root}| |; $lustre" /proc/self/mountinfo > {root}.mounts
mount --bind {root}.mounts {root}/proc/$$/mountinfo
exec chroot {root} {python} -m weft.submission.sagemaker_entry
"""


@pytest.fixture
def container_root(tmp_path: Path) -> Path:
    """A directory for the root of a container, where mounts are possible."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the permission to mount: unshare -m")
    root = tmp_path / "root"
    root.mkdir()
    return root


@whole_job
@pytest.mark.slow
@pytest.mark.parametrize("is_mounted", [True, False])
def test_entry_container_with_fsx_trains(
    store_path: Path, container_root: Path, tmp_path: Path, is_mounted: bool
) -> None:
    """Data, cache and checkpoints are on the channel, by the paths that they have elsewhere."""
    shared = tmp_path / "shared"
    shutil.copytree(store_path, shared / "store")
    base = container_root / "opt/ml"
    parameters = SMALL_HYPERPARAMETERS | {
        "data.path": "/fsx/store",
        "checkpoint.dir": "/fsx/run/checkpoints",
        "run.nproc_per_node": 1,
    }
    configure(base, "algo-1", ["algo-1"], parameters)
    channel = {"fsx": {"TrainingInputMode": "File"}} if is_mounted else {}
    (base / "input/config/inputdataconfig.json").write_text(json.dumps(channel))
    script = CONTAINER.format(root=container_root, shared=shared, python=sys.executable)
    process = subprocess.Popen(
        ["unshare", "-m", "--propagation", "private", "sh", "-c", script],
        env={**environment(base), "SAGEMAKER_BASE_DIR": "/opt/ml"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    [(status, output)] = wait_for_all([process], 500)
    if is_mounted:
        assert status == 0, output
        assert (container_root / "fsx").readlink() == Path("/opt/ml/input/data/fsx")
        steps = [checkpoint_step(path) for path in list_checkpoints(shared / "run/checkpoints")]
        assert steps == [10, 20]
        assert (base / "model/model.safetensors").exists()
    else:
        assert status == 2, output
        text = (base / "output/failure").read_text()
        assert 'data.path="/fsx/store" is below /fsx, which is not FSx for Lustre' in text
        assert 'checkpoint.dir="/fsx/run/checkpoints" is below /fsx' in text
        assert not (shared / "run").exists()
    assert not Path("/fsx").exists()
