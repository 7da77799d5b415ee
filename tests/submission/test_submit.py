"""Submit to clusters, without a cluster."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.harness import ROOT
from tests.records.test_run_cost import WrittenRun
from tests.submission.requests import fake_tool, format_errors, own_recipe, request
from weft.cli.main import main
from weft.config.errors import ConfigError, InvalidConfig, WeftError
from weft.config.reader import read_job
from weft.config.schema import Job
from weft.planning.plan import Machine
from weft.records.run_cost import LAUNCH_FILE
from weft.submission import slurm
from weft.submission.job_request import (
    JobRequest,
    build_script,
    check_name,
    format_command,
    parse_duration,
    run_cli,
    standalone_recipe,
    to_yaml,
)
from weft.submission.submit import SubmittedJob, build_request

DOCS = ROOT / "docs" / "slurm.md"


@pytest.fixture(autouse=True)
def change_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the commands of an installed Slurm."""
    monkeypatch.chdir(tmp_path)
    bin = tmp_path / "bin"
    bin.mkdir()
    (bin / "bash").symlink_to("/bin/bash")
    monkeypatch.setenv("PATH", str(bin))


def launch(*words: str) -> int:
    return main(["launch", *words])


def job(*words: str) -> int:
    return main(["job", *words])


def script(*words: str, recipe: str = "demo") -> str:
    overrides = [(k.removeprefix("--"), v) for k, v in zip(words[::2], words[1::2], strict=True)]
    return slurm.render(build_request("slurm", recipe, overrides, (), lambda _: Machine("cpu", 2)))


def test_launch_several_mistakes_are_reported_at_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--nodes", "2", "--run.cluster", "2x8xH100", "--train.step", "5", "--optim.lr", "x"]
    extra = ["--launch.time_limit", "1 day", "--launch.image", "a/b"]
    options = ["--launch.options", "nodes=3,Partition=gpu,comment=a", "--parallel.tp", "3"]
    assert launch("demo", "--on", "slum", *words) == 2
    assert "Use one of kubernetes, sagemaker, skypilot, slurm." in capsys.readouterr().err
    assert launch("demo", "--on", "slurm", *words, *extra, *options) == 2
    message = capsys.readouterr().err
    for item in (
        "train.step=5 is not a known key",
        'optim.lr="x"',
        "train.seq_len=256 is not divisible by tp=3",
        'launch.time_limit="1 day" must be D-HH:MM:SS',
        'launch.options.nodes="3" is an option that weft sets. Remove it: run.nodes',
        "launch.options.Partition",
    ):
        assert item in message
    assert "launch.options.comment" not in message
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["demo"], "--on is missing. Use one of kubernetes"),
        (["dem", "--on", "slurm"], "is not a known recipe"),
        (["demo", "--on", "slurm"], "does not describe the nodes. Use --run.cluster"),
        (["demo", "--on", "slurm", "--run.cluster", "64x8"], "is not a cluster"),
        (["demo", "--on", "slurm", "--run.device", "cpu", "--nodes", "0"], "neither a number"),
    ],
)
def test_launch_each_mistake_is_reported(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(*words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("cluster", ["slurm", "kubernetes", "sagemaker", "skypilot"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "does not describe the nodes"),
        (["--run.cluster", "1x8xH100", "--parallel.tp", "3"], "is not divisible by tp=3"),
    ],
)
def test_launch_mistake_without_a_run_directory_is_reported_alone(
    cluster: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch("demo", "--on", cluster, *words) == 2
    output = capsys.readouterr().err
    assert message in output
    assert "run.dir" not in output


def test_submitted_job_damaged_record_is_reported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for text in ("{", "[]", "{}", '{"on": "lsf", "id": "7"}'):
        (tmp_path / "launch.json").write_text(text)
        assert job("status", ".") == 2
        assert "has a damaged launch.json" in capsys.readouterr().err


def test_submitted_job_of_a_copied_directory_is_the_originals_job(tmp_path: Path) -> None:
    """Status, logs and cancel of a copy must not act on the job of the original."""
    original, copy, moved = (tmp_path / name for name in ("original", "copy", "moved"))
    original.mkdir()
    record = {"on": "slurm", "id": "7", "run_dir": str(original)}
    (original / "launch.json").write_text(json.dumps(record))
    shutil.copytree(original, copy)
    assert SubmittedJob.load(original).id == "7"
    with pytest.raises(InvalidConfig, match=r"is a copy of .*original.* weft launch"):
        SubmittedJob.load(copy)
    original.rename(moved)
    assert SubmittedJob.load(moved).id == "7"


@pytest.mark.system
@pytest.mark.parametrize(
    ("line", "is_error"),
    [
        ("sbatch: fatal: Could not establish a configuration source", False),
        ("sbatch: error: Unable to contact slurm controller (connect failure)", False),
        ("sbatch: error: invalid partition specified: x", True),
    ],
)
def test_check_of_sbatch_without_a_cluster_is_a_warning(
    line: str,
    is_error: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A laptop may have Slurm's commands; a dry run works there."""
    fake_tool(tmp_path, monkeypatch, "sbatch", f"echo '{line}' >&2; exit 1")
    assert bool(slurm.check("#!/bin/bash")) == is_error
    assert ("not checked against the cluster" in capsys.readouterr().err) != is_error


@pytest.mark.system
def test_job_resume_submits_an_ended_job_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file in the run directory is submitted, with the user's changes."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "launch.sh").write_text("#!/bin/bash\n# changed\n")
    record = {"on": "slurm", "id": "7", "file": "launch.sh", "run_dir": str(run_dir)}
    (run_dir / "launch.json").write_text(json.dumps(record | {"price_per_gpu_hour": 2.5}))
    (tmp_path / "state").write_text("JobState=RUNNING NodeList=n1 Reason=None")
    fake_tool(tmp_path, monkeypatch, "scontrol", f"cat {tmp_path}/state")
    calls = fake_tool(tmp_path, monkeypatch, "sbatch", "echo 8")
    assert job("resume", str(run_dir)) == 2
    assert "has an active job 7: running on n1" in capsys.readouterr().err
    (tmp_path / "state").write_text("JobState=COMPLETED ExitCode=0:0 NodeList=n1 Reason=None")
    assert job("resume", str(run_dir)) == 2
    assert "has a job that has completed, 7: there is nothing to resume" in capsys.readouterr().err
    (tmp_path / "state").write_text("JobState=TIMEOUT ExitCode=75:0 NodeList=n1 Reason=None")
    assert job("resume", str(run_dir)) == 0
    assert "submitted slurm job 8" in capsys.readouterr().out
    assert f"--parsable {run_dir}/launch.sh" in calls.read_text()
    after = json.loads((run_dir / "launch.json").read_text())
    assert (after["id"], after["price_per_gpu_hour"]) == ("8", 2.5)
    (run_dir / "launch.sh").unlink()
    assert job("resume", str(run_dir)) == 2
    assert "has no launch.sh to submit again" in capsys.readouterr().err


@pytest.mark.system
def test_submit_without_slurm_commands_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A dry run works anywhere; a failed submission leaves no files."""
    words = ["demo", "--on", "slurm", "--run.device", "cpu"]
    assert launch(*words, "--dry-run") == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash\n#SBATCH --job-name=demo\n")
    assert launch(*words) == 1
    assert "sbatch is not installed, or not in $PATH; use a host of" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["bin"]


def test_script_has_the_requested_values(tmp_path: Path) -> None:
    words = ["--run.cluster", "4x2xH100", "--launch.time_limit", "12:00:00", "--train.steps", "7"]
    text = script(*words, "--launch.options", "partition=gpu,account=7,contiguous")
    directives, command = text.split("\n\n", 1)
    assert (
        directives
        == f"""\
#!/bin/bash
#SBATCH --job-name=demo
#SBATCH --chdir={tmp_path}
#SBATCH --output={tmp_path}/runs/demo/slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --nodes=4
#SBATCH --gpus-per-node=2
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --partition=gpu
#SBATCH --account=7
#SBATCH --contiguous"""
    )
    assert (
        f"""
srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=120 "${{auto_resume[@]}}" \\
    weft train demo \\
    --run.cluster 4x2xH100 \\
    --train.steps 7 \\
    --run.dir {tmp_path}/runs/demo
status=$?
"""
        in command
    )


@pytest.mark.parametrize(
    ("image", "runtime", "expected"),
    [
        ("nvcr.io/nvidia/pytorch:1", "pyxis", "nvcr.io#nvidia/pytorch:1"),
        ("docker://localhost:5000/weft", "pyxis", "localhost:5000#weft"),
        ("me@nvcr.io#org/weft:1", "pyxis", "me@nvcr.io#org/weft:1"),
        ("org/weft:1", "pyxis", "org/weft:1"),  # of Docker Hub
        ("ubuntu", "pyxis", "ubuntu"),
        ("/fsx/weft.sqsh", "pyxis", "/fsx/weft.sqsh"),
        ("/fsx/weft.sif", "auto", "/fsx/weft.sif"),
        ("nvcr.io/nvidia/pytorch:1", "apptainer", "docker://nvcr.io/nvidia/pytorch:1"),
        ("oras://ghcr.io/org/weft.sif", "apptainer", "oras://ghcr.io/org/weft.sif"),
    ],
)
def test_script_names_the_image_as_its_runtime_does(
    image: str, runtime: str, expected: str
) -> None:
    words = ["--launch.image", image, "--launch.container", runtime]
    text = script("--run.cluster", "2x8xH100", *words)
    command = text[text.index("\nsrun ") : text.index("weft train")].replace("\\\n", "")
    words = shlex.split(command)
    if "apptainer" in words:
        assert words[-6:-2] == ["apptainer", "exec", "--nv", "--bind"]
        assert words[-1] == expected
    else:
        assert f"--container-image={expected}" in words


def test_script_with_an_image_mounts_the_run_directory(tmp_path: Path) -> None:
    """A mount has it if the container sees it at the same path as the script, which is outside."""
    run = f"{tmp_path}/runs/demo"
    for source, mounts in {
        str(tmp_path): f"{tmp_path}:{tmp_path}",
        "/elsewhere": f"/elsewhere:{tmp_path},{run}:{run}",
    }.items():
        launch = ["--launch.image", "org/weft", "--launch.mounts", f"{tmp_path}=host:{source}"]
        text = script("--run.device", "cpu", "--run.dir", run, *launch)
        assert f" --container-mounts={mounts} " in text


def test_script_with_an_image_has_the_recipe_and_the_variables(tmp_path: Path) -> None:
    """The container has neither the recipe's file nor the Python packages of the host."""
    (tmp_path / "mine.toml").write_text('extends = "demo"\n[train]\nsteps = 7\n')
    launch = ["--launch.image", "org/weft", "--launch.env", "A=b", "--launch.secrets", "C=env:D"]
    words = ["--run.device", "cpu", "--run.dir", "run", *launch]
    text = script(*words, recipe="mine.toml")
    run = f"{tmp_path}/run"
    written = text[text.index("printf %s ") : text.index(f" >{run}/recipe.toml\n")]
    assert tomllib.loads(shlex.split(written)[2])["train"]["steps"] == 7
    assert f"weft train {run}/recipe.toml" in text
    assert " --container-env=A,C " in text
    assert "unset PYTHONPATH PYTHONHOME\nexport PYTHONNOUSERSITE=1\n" in text
    apptainer = script("--run.device", "cpu", *launch, "--launch.container", "apptainer")
    assert 'export APPTAINERENV_A="$A"\nexport APPTAINERENV_C="$C"\n' in apptainer
    assert "--nv" not in apptainer
    assert slurm.check(text) == slurm.check(apptainer) == []


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ({"image": "x.sif", "container": "pyxis"}, "cannot start a .sif file. Use apptainer"),
        ({"image": "i", "mounts": "/a:b=host:/a"}, "has ',' or ':', which separate mounts"),
        ({"image": "i", "srun_options": "container-image=x"}, "Remove it: launch.image sets it"),
        ({"srun_options": "ntasks-per-node=8"}, "is an option that weft sets. Remove it."),
        ({"srun_options": "Mpi=none"}, "is not a long option of srun"),
        ({"queue": "a", "options": "partition=b"}, "also given by launch.queue. Remove one"),
        ({"exclude": "a", "options": "exclude=b"}, "also given by launch.exclude. Remove one"),
    ],
)
def test_find_errors_of_slurm_names_the_remedy(launch: dict[str, str], message: str) -> None:
    assert message in format_errors(list(slurm.find_errors(request(launch=launch))))


def test_script_requests_memory_and_gpus_unless_other_options_do() -> None:
    def directives(launch: dict[str, str]) -> list[str]:
        words = [word for key, value in launch.items() for word in (f"--launch.{key}", value)]
        lines = script("--run.cluster", "1x8xH100", *words).splitlines()
        names = ("mem", "gpus", "gres", "exclusive", "cpus")
        found = (line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH"))
        return [line for line in found if line.startswith(names)]

    assert directives({}) == ["gpus-per-node=8", "exclusive", "mem=0"]
    assert directives({"memory": "64"}) == ["gpus-per-node=8", "exclusive", "mem=64G"]
    assert directives({"cpus": "4"}) == ["gpus-per-node=8", "cpus-per-task=4"]
    assert directives({"options": "gres=none,mem-per-cpu=2G"}) == [
        *("exclusive", "gres=none", "mem-per-cpu=2G")
    ]


def test_script_with_a_range_of_nodes_is_elastic() -> None:
    text = script("--run.nodes", "2:4", "--run.cluster", "4x2xH100")
    assert "#SBATCH --nodes=2-4\n" in text
    assert "#SBATCH --no-kill\n" in text
    assert "srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0 --no-kill " in text
    assert "    --run.nodes 2:4\n" in text


def test_script_for_part_of_a_node_requests_its_gpus() -> None:
    text = script("--run.device", "cpu", "--launch.options", "cpus-per-task=4,signal=USR1@60")
    assert "--exclusive" not in text
    assert "--gpus-per-node" not in text
    assert "#SBATCH --signal=USR1@60\n" in text
    assert "TERM" not in text
    assert " --cpus-per-task=4 " in text  # srun ignores the value of sbatch


def test_launch_keys_do_not_change_the_run(tmp_path: Path) -> None:
    text = script("--run.device", "cpu", "--launch.time_limit", "01:00:00")
    assert f"--run.dir {tmp_path}/runs/demo\n" in text
    assert "launch.time_limit" not in text


# Fake srun, scontrol and weft that record their arguments when bash runs a script.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
WEFT = """#!/bin/bash
printf '%s\\n' "$@" > "$FOLDER/words"
echo "$SAID" > "$FOLDER/said"
exit $ENDS
"""
SCONTROL = """#!/bin/bash
echo "$@" > "$FOLDER/requeued"
"""


@pytest.mark.parametrize("setup", ["", 'export SAID="it\'s $((40 + 2))"'])
@pytest.mark.parametrize("ends", [0, 1, 2, 75])
def test_script_runs_the_command_on_each_node(ends: int, setup: str, tmp_path: Path) -> None:
    odd = 'it\'s $HOME `x` "y" \\ *'
    words = ["--run.device", "cpu", "--run.dir", str(tmp_path / odd), "--data.text_field", odd]
    extra = ["--launch.setup", json.dumps([setup])] if setup else []
    text = script(*words, *extra)
    for name, what in (("srun", SRUN), ("weft", WEFT), ("scontrol", SCONTROL)):
        (tmp_path / "bin" / name).write_text(what)
        (tmp_path / "bin" / name).chmod(0o755)
    path = f"{tmp_path}/bin:/usr/bin:/bin"
    environment = {"PATH": path, "FOLDER": str(tmp_path), "ENDS": str(ends), "SLURM_JOB_ID": "7"}
    completed = subprocess.run(["bash"], input=text, text=True, env=environment, check=False)
    assert completed.returncode == ends
    pairs = ["--run.device", "cpu", "--run.dir", str(tmp_path / odd), "--data.text_field", odd]
    assert (tmp_path / "words").read_text().splitlines() == ["train", "demo", *pairs]
    assert (tmp_path / "said").read_text().strip() == ("it's 42" if setup else "")
    second_run = tmp_path / "requeued"
    assert (second_run.read_text() if second_run.exists() else "") == (
        "requeue 7\n" if ends in (1, 75) else ""
    )


def run_script(text: str, directory: Path) -> set[str]:
    """Run a batch script with fake commands that record calls; return the new files."""
    for name, what in (("srun", SRUN), ("weft", WEFT), ("scontrol", SCONTROL)):
        (directory / "bin" / name).write_text(what)
        (directory / "bin" / name).chmod(0o755)
    sandbox = directory / "sandbox"
    sandbox.mkdir()
    path = f"{directory}/bin:/usr/bin:/bin"
    environment = {"PATH": path, "FOLDER": str(sandbox), "ENDS": "0", "SLURM_JOB_ID": "7"}
    assert slurm.check(text) == []
    subprocess.run(
        ["bash"], input=text, text=True, env=environment, cwd=sandbox, timeout=20, check=True
    )
    return {path.name for path in sandbox.iterdir()}


HOSTILE = (
    "x\ntouch pwned\n",
    "x\rtouch pwned",
    "x'; touch pwned; '",
    'x"; touch pwned; "',
    "$(touch pwned)",
    "`touch pwned`",
    "x\n#SBATCH --wrap='touch pwned'",
    "\x1b]0;title\x07",
    "a\u2028touch pwned",
    "a\x85touch pwned",
    "; touch pwned #",
    "\\\ntouch pwned",
)
TEXT_KEYS = (
    "run.dir",
    "data.path",
    "data.text_field",
    "checkpoint.dir",
    "launch.options",
    "optim.name",
)


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("key", TEXT_KEYS)
def test_script_with_a_hostile_value_runs_nothing_else(
    key: str, value: str, tmp_path: Path
) -> None:
    """The value is refused, or is one word of the command."""
    inputs = f"comment={value}" if key == "launch.options" else value
    if not value.isprintable():
        with pytest.raises(InvalidConfig, match="control characters"):
            script("--run.device", "cpu", f"--{key}", inputs)
        return
    text = script("--run.device", "cpu", f"--{key}", inputs)
    assert run_script(text, tmp_path) == {"words", "said"}
    words = (tmp_path / "sandbox" / "words").read_text().splitlines()
    if key not in ("launch.options", "run.dir"):
        assert words[words.index(f"--{key}") + 1] == value


@pytest.mark.parametrize("value", HOSTILE)
def test_script_from_a_hostile_working_directory_runs_nothing_else(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / value
    directory.mkdir(parents=True)
    monkeypatch.chdir(directory)
    if not value.isprintable():
        with pytest.raises(InvalidConfig, match=r"working directory=.*control characters"):
            script("--run.device", "cpu")
        return
    text = script("--run.device", "cpu")
    assert run_script(text, tmp_path) == {"words", "said"}


def test_script_of_a_recipe_with_a_newline_in_its_name_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "a\ntouch pwned\n.toml"
    recipe.write_text('extends = "demo"\n')
    with pytest.raises(InvalidConfig, match=r"recipe=.*control characters"):
        script("--run.device", "cpu", recipe=str(recipe))


def test_render_of_a_directory_with_a_newline_raises(tmp_path: Path) -> None:
    """A newline in a request is never written to the script."""
    directory = tmp_path / "x\ntouch pwned"
    requested = JobRequest("x", "demo", {}, Job(), (1, 1), 0, directory)
    with pytest.raises(WeftError, match="does not fit into one line of a batch script"):
        slurm.render(requested)


def test_script_of_a_recipe_with_another_cluster_names_the_effective_one(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('extends = "demo"\n[run]\ncluster = "2x8xH100"\n')
    text = script("--run.cluster", "4x2xH200", recipe=str(recipe))
    assert "#SBATCH --nodes=4\n#SBATCH --gpus-per-node=2\n" in text
    command = text[text.index("weft train") : text.index("status=$?")]
    words = shlex.split(command.replace("\\\n", ""))
    pairs = [(k.removeprefix("--"), v) for k, v in zip(words[3::2], words[4::2], strict=True)]
    job, _, errors = read_job(str(recipe), pairs)
    assert errors == list[ConfigError]()
    assert job.run.cluster == "4x2xH200"


@pytest.mark.system
def test_script_in_the_documentation_is_current(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    quoted = re.findall(r"```\n\$ weft (.*)\n(#!(?:.*\n)*?)```", DOCS.read_text("utf-8"))
    ((command, text),) = quoted
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out.strip() == text.strip().replace("/home/me/work", str(tmp_path))


@pytest.mark.system
def test_script_refused_by_bash_is_reported() -> None:
    assert slurm.check("echo hello\n") == []
    (message,) = slurm.check("if true; then\n")[:1]
    assert "bash -n" in message


@pytest.mark.parametrize(
    ("status", "unhealthy", "options", "requested"),
    [
        (0, ["n1"], "", []),
        (2, ["n1"], "", []),
        (75, [], "", ["requeue 7"]),
        (137, ["n1"], "", ["requeue 7", "update JobId=7 ExcNodeList=n1"]),
        (69, ["n1", "n3"], "", ["requeue 7", "update JobId=7 ExcNodeList=n1,n3"]),
        (75, ["n1"], "exclude=n[5-6]", ["requeue 7", "update JobId=7 ExcNodeList=n1,n[5-6]"]),
    ],
)
def test_script_excludes_unhealthy_nodes(
    status: int, unhealthy: list[str], options: str, requested: list[str], tmp_path: Path
) -> None:
    """Run the script with fake Slurm commands."""
    words = ["--run.device", "cpu", "--resilience.preflight", "true", "--run.dir", "my run"]
    text = script(*words, *(["--launch.options", options] if options else []))
    for name in unhealthy:
        (tmp_path / "my run" / "unhealthy-nodes").mkdir(parents=True, exist_ok=True)
        (tmp_path / "my run" / "unhealthy-nodes" / name).touch()
    fakes = ['scontrol() { echo "$@"; }', f"srun() {{ return {status}; }}", "SLURM_JOB_ID=7"]
    completed = subprocess.run(
        ["/bin/bash"],
        input="\n".join([*fakes, text]),
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    announced = [f"weft: exit status {status}: requeuing job 7"] if requested else []
    assert (completed.returncode, completed.stdout.splitlines(), completed.stderr) == (
        status,
        announced + requested,
        "",
    )


def run_with_exclude_file(tmp_path: Path, listed: str, unhealthy: str, status: int) -> list[str]:
    """Run a script on n1 and n2 with a file of nodes; return what it prints."""
    (tmp_path / "nodes").write_text(listed)
    marker = f"mkdir -p run/unhealthy-nodes; echo 'gpu: lost' > run/unhealthy-nodes/{unhealthy}; "
    words = ["--launch.exclude", '["n9", "@nodes"]', "--resilience.preflight", "true"]
    text = script("--run.device", "cpu", "--run.dir", "run", *words)
    assert f"#SBATCH --exclude=n9{',n7' * ('n7 ' in listed)}" in text
    show = '[ "$1" != show ] || { printf "n1\\nn2\\n"; return; }; '
    fakes = [
        f'scontrol() {{ {show}echo "$@"; }}',
        f"srun() {{ echo trained; sleep 0.01; {marker if unhealthy else ''}return {status}; }}",
        "SLURM_JOB_ID=7",
    ]
    completed = subprocess.run(
        ["/bin/bash"],
        input="\n".join([*fakes, text]),
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.stderr == ""
    return completed.stdout.splitlines()


def test_script_adds_an_unhealthy_node_to_the_file(tmp_path: Path) -> None:
    printed = run_with_exclude_file(tmp_path, "n7 # 2026-01-02, x: y\n\n", "n1", 69)
    assert (printed[0], printed[-1]) == ("trained", "update JobId=7 ExcNodeList=n1,n7,n9")
    _, _, added = (tmp_path / "nodes").read_text().splitlines()
    assert re.fullmatch(r"n1 # \d{4}-\d\d-\d\d, run: gpu: lost", added)
    # A marker of an earlier start does not add a node that the user has removed.
    printed = run_with_exclude_file(tmp_path, "", "", 75)
    assert (printed[0], printed[-1]) == ("trained", "update JobId=7 ExcNodeList=n1,n9")
    assert (tmp_path / "nodes").read_text() == ""


def test_script_leaves_a_node_that_the_file_names_by_now(tmp_path: Path) -> None:
    printed = run_with_exclude_file(tmp_path, "n2 # later\nn21\n", "", 0)
    assert printed == [
        "weft: not used: n2 (" + str(tmp_path / "nodes") + ")",
        "weft: exit status 69: requeuing job 7",
        "requeue 7",
        "update JobId=7 ExcNodeList=n2,n21,n9",
    ]
    assert run_with_exclude_file(tmp_path, "n21\n", "", 0) == ["trained"]


def test_script_without_preflight_excludes_no_node() -> None:
    assert "ExcNodeList" not in script("--run.device", "cpu")


@pytest.mark.system
def test_launch_preflight_shorthand_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["demo", "--on", "slurm", "--preflight", "--run.device", "cpu", "--dry-run"]
    assert launch(*words) == 0
    message = capsys.readouterr().out
    assert "    --resilience.preflight true \\\n" in message
    assert "ExcNodeList" in message


@pytest.mark.parametrize("word", ["status", "logs", "cancel"])
def test_job_run_that_was_not_submitted_is_refused(
    word: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert job(word, str(tmp_path)) == 2
    assert "has no launch.json" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--dry-run", "--on=slurm", "--train.steps=5"])
def test_job_cancel_refuses_options_of_launch(
    option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option such as --dry-run must not seem to make 'cancel' harmless."""
    monkeypatch.setattr(SubmittedJob, "load", lambda directory: pytest.fail("it was looked for"))
    with pytest.raises(SystemExit):
        job("cancel", "run", option)
    assert option.partition("=")[0] in capsys.readouterr().err


# --------------------------------------------------------------------------- shared by clusters


def test_seconds_of_a_duration_are_parsed() -> None:
    assert parse_duration("1-02:03:04") == 93784
    assert parse_duration("48:00:00") == 172800
    for text in ("90", "1:00", "00:60:00", "1-", "-1:00:00"):
        with pytest.raises(ValueError, match="must be D-HH:MM:SS or HH:MM:SS"):
            parse_duration(text)


def test_command_has_the_words_of_the_request() -> None:
    launch_request = request(
        ("train.steps", "5"), ("run.dir", "here"), ("launch.image", "i"), nodes=(2, 4)
    )
    assert launch_request.command("r.toml", **{"run.dir": "/runs/x"}) == [
        *("weft", "train", "r.toml", "--train.steps", "5"),
        *("--run.dir", "/runs/x", "--run.nodes", "2:4"),
    ]


def test_script_runs_the_command(tmp_path: Path) -> None:
    """Quotes in the words are escaped."""
    words = ["/usr/bin/printf", "%s\n", "it's", "--a", "b c", "--d", '[{e = "$f"}]']
    text = build_script(["cd /", "x=1"], format_command(words, "  "))
    completed = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True)
    assert completed.stdout.splitlines() == words[2:]
    failing = build_script(["false"], format_command(words, "  "))
    assert subprocess.run(["bash", "-c", failing], check=False).returncode == 1


def test_own_recipe_is_self_contained(tmp_path: Path) -> None:
    """The copy has all values except those of the submitting machine."""
    assert standalone_recipe(request()) is None
    recipe = own_recipe(tmp_path)
    text = standalone_recipe(request(recipe=recipe))
    assert text is not None
    (tmp_path / "alone.toml").write_text(text)
    job, _, errors = read_job(str(tmp_path / "alone.toml"))
    before, _, _ = read_job(recipe)
    assert not errors
    assert job.train == before.train
    assert job.data == before.data
    assert (job.run.dir, job.launch.image) == ("auto", "auto")


def test_yaml_round_trip_is_exact_and_readable() -> None:
    documents = [{"b": "x\ny\n", "a": ["1", 2, {"c": "yes"}]}, {"d": None}]
    text = to_yaml(documents, "two\nlines")
    assert text.startswith("# two\n# lines\nb: |\n  x\n  y\na:\n- '1'\n- 2\n")
    assert list(yaml.safe_load_all(text)) == documents


@pytest.mark.system
def test_tool_missing_or_failing_is_reported() -> None:
    with pytest.raises(WeftError, match=r"no-such-tool is not installed.*; get it"):
        run_cli("no-such-tool", "get", remedy="get it")
    with pytest.raises(WeftError, match=r"bash /no/such/place: .*[Nn]o such file"):
        run_cli("bash", "/no/such/place", remedy="")


def test_own_recipe_with_overrides_is_the_effective_job(tmp_path: Path) -> None:
    """Overrides replace the values of the recipe."""
    recipe = own_recipe(tmp_path)
    Path(recipe).write_text(
        'extends = "demo"\n[run]\ncluster = "2x8xH100"\nnodes = 2\n[train]\nsteps = 7\n'
    )
    overrides = [("run.cluster", "4x4xH200"), ("train.steps", "9"), ("model.dim", "64")]
    launch_request = request(*overrides, recipe=recipe, nodes=(4, 4))
    text = standalone_recipe(launch_request)
    assert text is not None
    tree = tomllib.loads(text)
    assert tree["run"] == {"cluster": "4x4xH200"}
    assert tree["train"]["steps"] == 9
    assert tree["model"]["dim"] == 64


@pytest.mark.parametrize("name", ["My_Run", "a--b", "x" * 41, "run.1"])
def test_check_name_directory_that_would_be_renamed_is_refused(name: str) -> None:
    launch_request = request()
    renamed = replace(
        launch_request, run_dir=launch_request.run_dir.with_name(name), name="renamed"
    )
    assert "Use another --run.dir, such as /fsx/renamed" in format_errors(
        list(check_name(renamed, "there"))
    )
    assert list(check_name(launch_request, "there")) == []


def test_large_model_on_the_text_of_the_demo_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "demo", "--model.preset", "8b", "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert 'data.path="weft.data.stories:stories" is a text of about 10 MB for trials' in error


@pytest.mark.parametrize("command", ["launch", "train"])
def test_large_model_without_data_is_refused(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The data and the tokenizer of the demo would waste a cluster."""
    cluster = ["--on", "slurm", "--run.cluster", "4x8xH100"] if command == "launch" else []
    assert main([command, "llama3-8b", *cluster, "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert 'data.path="python-stdlib" is a text of about 10 MB for trials, too little' in error
    assert (
        'data.tokenizer="train" would train a tokenizer of 4,096 tokens, but the model has 128,256'
        in error
    )


def test_status_of_a_job_has_the_cost_of_all_its_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scontrol = tmp_path / "bin/scontrol"
    scontrol.write_text("#!/bin/bash\necho JobId=7 JobState=PENDING Reason=Priority Restarts=1\n")
    scontrol.chmod(0o755)
    run = WrittenRun(tmp_path, price=2.0)
    (tmp_path / LAUNCH_FILE).write_text('{"on": "slurm", "id": "7", "price_per_gpu_hour": 2.5}')
    status = "slurm job 7: waiting: pending, Priority, restarted 1 time\n"
    assert job("status", str(tmp_path)) == 0
    assert capsys.readouterr().out == status
    run.start(0, ranks=16)
    run.event(36_000, "stop", "SIGTERM: saved step 1")
    assert job("status", str(tmp_path)) == 0
    assert capsys.readouterr().out == f"{status}cost so far: 400.00 (160 GPU-hours at 2.5)\n"
