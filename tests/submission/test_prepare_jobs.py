"""Jobs of ``weft data prepare --on``: nodes without GPUs that run the command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from weft.cli.main import main

BUCKET = ["s3://bucket/web", "--data.cache_dir", "s3://bucket/tokens"]


def render(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["data", "prepare", *BUCKET, "--dry-run", *options]) == 0
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_slurm_job_runs_the_command_on_each_node_without_gpus(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.submission.slurm.check", lambda text: [])  # of this host's Slurm
    script = render(capsys, "--on", "slurm", "--workers", "8", "--launch.queue", "cpu")
    assert "#SBATCH --nodes=8\n" in script
    assert "#SBATCH --partition=cpu\n" in script
    assert "gpus" not in script
    command = re.search(r"weft data prepare demo((?: \\\n +--\S+ \S+)+)", script)
    assert command is not None
    assert command[1].split()[1::3] == ["--data.path", "--data.cache_dir"]


def test_kubernetes_job_runs_the_command_in_each_pod_and_needs_no_claim(
    capsys: pytest.CaptureFixture[str],
) -> None:
    yaml = pytest.importorskip("yaml")
    text = render(capsys, "--on", "kubernetes", "--workers", "4", "--launch.image", "weft:1")
    [runtime, job] = list(yaml.safe_load_all(text))
    assert job["kind"] == "TrainJob"
    assert runtime["spec"]["mlPolicy"]["numNodes"] == 4
    spec = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    [container] = spec["template"]["spec"]["containers"]
    assert container["command"][:4] == ["weft", "data", "prepare", "demo"]
    assert container["command"][4:] == ["--data.path", *BUCKET]
    assert "resources" not in container


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["web.jsonl", "--on", "slurm"], 'data.cache_dir="auto" is not in an object store'),
        ([*BUCKET, "--dry-run"], "--dry-run has nothing to print. Add --on slurm or"),
        (["data", *BUCKET[1:], "--on", "kubernetes"], "launch.image"),
    ],
)
def test_job_that_could_not_prepare_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["data", "prepare", *arguments]) == 2
    assert message in capsys.readouterr().err


LAUNCH = ["launch", "demo", "--dry-run", "--run.dir", "runs/x", "--run.nodes", "4"]


@pytest.mark.parametrize(
    ("cache", "is_warned"),
    [("auto", True), ("/data/cache", False), ("s3://bucket/tokens", False)],
)
def test_launch_warns_if_each_node_would_tokenize_all_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cache: str, is_warned: bool
) -> None:
    pytest.importorskip("yaml")
    with (tmp_path / "web.txt").open("wb") as file:
        file.truncate(2_000_000_000)
    words = [*LAUNCH, "--on", "kubernetes", "--launch.image", "weft:1", "--data.path"]
    words += [str(tmp_path / "web.txt"), "--run.cluster", "4x8xH100", "--data.cache_dir", cache]
    for path in ("/data", "/runs"):
        words += [f"--launch.mounts.{path}", "pvc:claim"]
    words += [f"--launch.mounts./{tmp_path.parts[1]}", f"host:/{tmp_path.parts[1]}"]
    assert main(words) == 0
    warnings = capsys.readouterr().err
    assert ("is on the disk of each node" in warnings) == is_warned
    if is_warned:
        assert (
            "each of the 4 nodes tokenizes all the data. The 4 nodes read 16.0 GB instead of 4.0 GB"
            in warnings
        )
        assert "the GPUs wait about 0.2 GPU-hours, at 2.9 MB/s per core, measured" in warnings
        assert "Use --data.cache_dir s3://BUCKET/PATH" in warnings
