"""The examples of the pages run on simulated nodes: their paths exist where they arrive."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from botocore.session import Session

from tests import pages
from tests.aws import moto_server, variables
from tests.submission.simulated_node import (
    Node,
    job_paths,
    missing_requirement,
    read_artefact,
    run_node,
)
from weft.cli.main import build_parser, main
from weft.config.reader import read_job
from weft.config.schema import Job
from weft.submission.job_request import standalone_recipe
from weft.submission.submit import build_request
from weft.training.machine import detect_machine

DOCS = pages.ROOT / "docs"
requires_root = pytest.mark.skipif(bool(missing_requirement()), reason=missing_requirement())
pytestmark = [pytest.mark.slow, pytest.mark.system, requires_root]


# Pages with launch examples.
LAUNCH_PAGES = (
    "kubernetes",
    "sagemaker",
    "skypilot",
    "slurm",
    "hyperpod",
    "cookbook/slurm",
    "aws-first-day",
)


def launch_lines(page: str) -> list[str]:
    """Return the launch commands of a page, as dry runs."""
    text = (DOCS / f"{page}.md").read_text("utf-8").replace("\\\n", " ")
    lines = re.findall(r"^(?:\$ )?(weft launch .*?)\s*(?:#.*)?$", text, re.MULTILINE)
    dry = [line if "--dry-run" in line else f"{line} --dry-run" for line in lines]
    return list(dict.fromkeys(dry))


EXAMPLES = [(page, line) for page in LAUNCH_PAGES for line in launch_lines(page)]


@pytest.fixture(scope="module")
def store() -> Iterator[Mapping[str, str]]:
    """Yield the environment of an object store with the buckets of the pages."""
    with moto_server() as port:
        yield variables(port)


def put_object(store: Mapping[str, str]) -> Any:
    client = Session().create_client(
        "s3",
        region_name="us-east-1",
        endpoint_url=store["AWS_ENDPOINT_URL"],
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )

    def put(url: str, content: str) -> None:
        bucket, _, key = url.removeprefix("s3://").partition("/")
        client.create_bucket(Bucket=bucket)
        client.put_object(Bucket=bucket, Key=key, Body=content.encode())

    return put


def render(page: str, line: str, directory: Path) -> tuple[Node, Job]:
    """Return the node that the artefact of a dry run makes, and the recipe of the reader."""
    for name in ["slurm"] * (page == "hyperpod") + [page]:  # which continues the page of Slurm
        pages.write_files((DOCS / f"{name}.md").read_text("utf-8"), directory)
    if page == "aws-first-day":
        script = pages.ROOT / "scripts" / "aws_first_day.sh"
        steps = ["role", "image", "network", "filesystem", "recipe"]
        command = ["bash", script, "--dry-run", *steps]
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(directory)}
        done = subprocess.run(
            command, cwd=directory, env=environment, capture_output=True, text=True, check=True
        )
        (directory / "mine.toml").write_text(done.stdout[done.stdout.index("extends =") :])
    words = shlex.split(line)[1:]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = main(words)
    assert status == 0
    options = build_parser().parse_args(words)
    request = build_request(options.on, options.recipe, options.overrides, [], detect_machine)
    node = read_artefact(options.on, output.getvalue())
    if options.on == "sagemaker":
        # The recipe is uploaded when the job is submitted.
        recipe = standalone_recipe(request)
        assert recipe is not None
        node = replace(node, files={**node.files, "/opt/ml/input/data/recipe/recipe.toml": recipe})
    return node, request.job


@pytest.fixture
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter the directory of the machine that submits, which has no tools of a cluster."""
    directory = tmp_path / "laptop"
    (directory / "bin").mkdir(parents=True)
    for name in ("bash", "git"):
        (directory / "bin" / name).symlink_to(f"/usr/bin/{name}")
    monkeypatch.setenv("PATH", str(directory / "bin"))
    monkeypatch.chdir(directory)
    return directory


def run(
    node: Node,
    job: Job,
    tmp_path: Path,
    laptop: Path,
    store: Mapping[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> subprocess.CompletedProcess[str]:
    monkeypatch.setenv("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
    work = tmp_path / "work"
    work.mkdir()
    return run_node(node, job, work, laptop, put_object(store), store)


def test_pages_of_all_clusters_have_examples() -> None:
    assert {line.split("--on ")[1].split()[0] for _, line in EXAMPLES} == {
        "kubernetes",
        "sagemaker",
        "skypilot",
        "slurm",
    }
    assert {page for page, _ in EXAMPLES} == {*LAUNCH_PAGES}


@pytest.mark.parametrize(("page", "line"), EXAMPLES)
def test_example_of_a_page_runs_on_its_node(
    page: str,
    line: str,
    tmp_path: Path,
    laptop: Path,
    store: Mapping[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node, job = render(page, line, laptop)
    assert dict(job_paths(job)) or "demo" in line
    done = run(node, job, tmp_path, laptop, store, monkeypatch)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tokens" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("page", "mount", "message"),
    [
        ("kubernetes", "/shared", 'data.path="/shared/web/" does not exist'),
        ("kubernetes", "/runs", "run.dir=/runs/mine is in no mount"),
        (
            "sagemaker",
            "/opt/ml/input/data/fsx",
            "checkpoint.dir=/fsx/runs/mine/checkpoints is in no",
        ),
        ("skypilot", "/models", 'tokenizer="/models/Llama-3.1-8B/tokenizer.json" does not exist'),
        ("slurm", "/fsx", 'data.path="/fsx/web/" does not exist'),
    ],
)
def test_example_without_one_mount_fails(
    page: str,
    mount: str,
    message: str,
    tmp_path: Path,
    laptop: Path,
    store: Mapping[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The simulation finds a path that the artefact does not bring."""
    node, job = render(page, launch_lines(page)[0], laptop)
    assert mount in node.mounts
    less = replace(node, mounts=[path for path in node.mounts if path != mount])
    done = run(less, job, tmp_path, laptop, store, monkeypatch)
    assert done.returncode != 0
    assert message in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("old", "new"),
    [("/fsx/data:/data,", ""), ('"/data/web/"', '"/fsx/data/web/"')],
    ids=["no mount", "path of the node"],
)
def test_container_on_slurm_has_its_mounts_alone(
    old: str,
    new: str,
    tmp_path: Path,
    laptop: Path,
    store: Mapping[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (line,) = (line for line in launch_lines("slurm") if "container.toml" in line)
    node, job = render("slurm", line, laptop)
    shell, option, script = node.command
    assert script.count(old) == 1
    less = replace(node, command=[shell, option, script.replace(old, new)])
    done = run(less, job, tmp_path, laptop, store, monkeypatch)
    assert done.returncode != 0
    path = new.strip('"') or "/data/web/"
    assert f'data.path="{path}" does not exist' in done.stdout + done.stderr


def test_path_of_the_laptop_does_not_exist_on_a_node(
    tmp_path: Path, laptop: Path, store: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path is right where the command is typed, and nowhere else."""
    (laptop / "texts").mkdir()
    (laptop / "texts" / "a.txt").write_text("one text\n" * 500)
    node = Node(["weft", "train", "demo", "--data.path", str(laptop / "texts")], ["/runs"])
    job, _, _ = read_job("demo", [])
    done = run(node, job, tmp_path, laptop, store, monkeypatch)
    assert done.returncode != 0
    assert f'data.path="{laptop}/texts" does not exist' in done.stderr
    assert (laptop / "texts" / "a.txt").exists()
