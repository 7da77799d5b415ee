"""`weft launch --vary`: scripts, refusals and submission without a cluster, then a real Slurm."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests import slurm
from tests.slurm import Slurm, wait_until
from tests.submission.slurm_jobs import Launcher
from weft.cli.main import main
from weft.comparison.experiment import load_comparison
from weft.config.reader import read_job
from weft.submission.slurm import format_tasks

ON_CPU = ["--on", "slurm", "--run.device", "cpu"]
VARY = ["--vary", "optim.lr=1e-3,3e-3"]
IMAGE = ["--run.cluster", "1x8xH100", "--launch.image", "weft:1", "--data.path", "s3://b/text"]
IMAGE += ["--data.tokenizer", "org/name", "--train.steps", "100", *VARY, "--repeat", "2"]


@pytest.fixture(autouse=True)
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hide an installed Slurm; return the directory of programs."""
    monkeypatch.chdir(tmp_path)
    bin = tmp_path / "bin"
    bin.mkdir()
    monkeypatch.setenv("PATH", f"{bin}:/bin")
    for name in ("sbatch", "scontrol", "scancel", "srun"):
        write_tool(bin / name, "exit 1")
    write_tool(bin / "sbatch", "echo Unable to contact slurm controller >&2; exit 1")
    return bin


def write_tool(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


def launch(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    try:
        result = main(["launch", "demo", *words]) or 0
    except SystemExit as error:
        result = int(error.code or 0)
    text = capsys.readouterr()
    assert result == status, text.out + text.err
    return text.out + text.err


def scripts(text: str) -> list[str]:
    """Return the batch scripts of the output."""
    return [f"#!/bin/bash{part}" for part in text.split("#!/bin/bash")[1:]]


# --------------------------------------------------------------------------- scripts


@pytest.mark.parametrize(
    ("numbers", "limit", "text"),
    [([1, 2, 3], 0, "1-3"), ([2], 0, "2"), ([1, 4], 0, "1,4"), ([1, 2, 3], 2, "1-3%2")],
)
def test_format_tasks_ranges_and_limit(numbers: list[int], limit: int, text: str) -> None:
    assert format_tasks(numbers, limit) == text


@pytest.mark.parametrize("setup", [[], ["--launch.setup", "['export A=\"it is\"']"]])
def test_launch_vary_each_task_trains_its_trial(
    capsys: pytest.CaptureFixture[str], tools: Path, tmp_path: Path, setup: list[str]
) -> None:
    """Run the array's script with a stand-in for srun, once per task."""
    out = str(tmp_path / "my runs/lr")
    words = [*ON_CPU, *VARY, "--repeat", "2", "--out", out, "--dry-run", *setup]
    array, summary = scripts(launch(capsys, *words))
    assert "#SBATCH --array=1-4\n" in array
    write_tool(tools / "srun", 'while [[ $1 == --* ]]; do shift; done; exec "$@"')
    write_tool(tools / "weft", f"printf '%s\\n' \"$@\" >>{tmp_path}/calls; exit ${{STATUS:-0}}")
    write_tool(tools / "scontrol", f'echo "$@" >>{tmp_path}/calls')

    def run(script: str, **variables: str) -> list[str]:
        (tmp_path / "calls").unlink(missing_ok=True)
        environment = {"PATH": f"{tools}:/usr/bin:/bin", "SLURM_JOB_ID": "9"} | variables
        subprocess.run(["bash"], input=script, text=True, env=environment, check=False, cwd="/")
        return (tmp_path / "calls").read_text().splitlines()

    expected = [("1-lr-1e-3", 1, 0), ("2-lr-3e-3", 1, 0), ("2-lr-3e-3", 2, 1), ("1-lr-1e-3", 2, 1)]
    for number, (variant, repeat, seed) in enumerate(expected, 1):
        task = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": str(number)}
        calls = run(array, **task)
        directory = f"{out}/{variant}-repeat-{repeat}"
        assert calls[:2] == ["train", f"{out}/{variant}.toml"]
        assert calls[2:] == ["--run.dir", directory, "--train.seed", str(seed)]
        # The last task has the array's own id in SLURM_JOB_ID.
        assert run(array, STATUS="75", **task)[-1] == f"requeue 7_{number}"
        assert Path(directory, "requeue/starts").is_file()
    assert run(summary) == ["compare", out]
    assert run(summary, STATUS="1") == ["compare", out]  # fewer than two variants: no requeue


def test_launch_vary_an_array_per_set_of_resources(capsys: pytest.CaptureFixture[str]) -> None:
    out = launch(
        capsys,
        *(*ON_CPU, *VARY, "--vary", "launch.queue=a,b", "--repeat", "1", "--dry-run"),
        *("--max-running", "1", "--launch.options", "account=me,gres=none"),
    )
    first, second, summary = scripts(out)
    assert ("#SBATCH --partition=a\n" in first, "#SBATCH --partition=b\n" in second) == (True, True)
    assert ("--array=1,3%1\n" in first, "--array=2,4%1\n" in second) == (True, True)
    assert {"--account=me", "--partition=a", "--time=00:30:00"} <= {*re.findall(r"--\S+", summary)}
    assert "gres" not in summary


def test_launch_vary_container_has_the_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--launch.image", "/i.sif", "--out", "/fsx/lr", "--dry-run"]
    array, summary = scripts(launch(capsys, *ON_CPU, *VARY, *words))
    assert "apptainer exec --bind /fsx/lr:/fsx/lr /i.sif" in array
    assert "recipe.toml" not in array + summary


def test_launch_vary_on_other_clusters_is_a_job_per_trial(
    capsys: pytest.CaptureFixture[str],
) -> None:
    mount = ["--launch.mounts", '{"/runs"="pvc:claim"}']
    out = launch(capsys, *IMAGE, "--on", "kubernetes", *mount, "--out", "/fsx/lr", "--dry-run")
    documents = [each for each in yaml.safe_load_all(out.partition("4 trials: about")[0]) if each]
    names = [each["metadata"]["name"] for each in documents if each["kind"] == "TrainJob"]
    assert names == ["lr-1-1", "lr-2-1", "lr-2-2", "lr-1-2"]
    assert [out.count(f"/runs/{name}\n") > 0 for name in names] == [True] * 4
    assert "4 trials: about" in out
    assert "The pods write the runs to /runs, where this machine cannot read them." in out
    given = re.search(r"Give --launch.mounts (\S+)=pvc:CLAIM", out)
    assert given is not None
    out = launch(
        capsys,
        *(*IMAGE, "--on", "kubernetes", "--launch.mounts", f'{{"{given[1]}"="pvc:claim"}}'),
        *("--out", "/fsx/lr", "--dry-run"),
    )
    assert "The pods write" not in out
    assert given[1] == "/fsx"
    assert "/fsx/lr/2-lr-3e-3-repeat-2\n" in out


def test_launch_vary_on_sagemaker_names_the_copies(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["--launch.bucket", "s3://mine/x", "--launch.role", "arn:aws:iam::123456789012:role/r"]
    keys += ["--launch.instance_type", "ml.p5.48xlarge"]
    out = launch(capsys, *IMAGE, *keys, "--on", "sagemaker", "--out", "lr", "--dry-run")
    directory = Path("lr").absolute()
    for index, label, repeat in ((1, "lr-1e-3", 2), (2, "lr-3e-3", 1)):
        run = f"{directory}/{index}-{label}-repeat-{repeat}"
        source = f"s3://mine/x/weft/lr-{index}-{repeat}"
        assert f"aws s3 sync {source} {run} --exclude 'checkpoints/*'\n" in out
        assert f'"S3Uri": "{source}' in out


# --------------------------------------------------------------------------- refusals


def test_launch_vary_all_mistakes_at_once_and_nothing_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--vary", "parallel.tp=1,3", "--vary", "launch.time_limit=01:00:00,02:00:00"]
    words += ["--repeat", "x", "--run.dir", "y", "--optim.lrr", "1", "--max-running", "2"]
    text = launch(capsys, "--on", "kubernetes", "--run.device", "cpu", *words, status=2)
    for message in (
        '--repeat="x" must be an integer',
        "--max-running=2 is for job arrays, which only Slurm has",
        "run.dir cannot be set, because the comparison sets it for each trial",
        "optim.lrr=1 is not a known key",
        "train.seq_len=256 is not divisible by tp=3 ranks",
        "launch.time_limit cannot be compared, because the steps of a trial do not depend on it",
        "launch.mounts./runs is missing",
    ):
        assert message in text
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


def test_launch_options_of_trials_need_vary(capsys: pytest.CaptureFixture[str]) -> None:
    text = launch(capsys, *ON_CPU, "--repeat", "2", "--out", "x", status=2)
    assert text.count("is for trials of a comparison. Add --vary KEY=VALUE,VALUE") == 2


def test_launch_vary_name_that_a_cluster_refuses_is_that_of_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*IMAGE, "--on", "kubernetes", "--launch.mounts", '{"/runs"="pvc:claim"}']
    text = launch(capsys, *words, "--out", "My_Runs", "--dry-run", status=2)
    remedy = re.search(r"--out=.*use another --out, such as (\S+)", text, re.IGNORECASE)
    assert remedy is not None
    launch(capsys, *words, "--out", remedy[1], "--dry-run")


def test_compare_on_this_machine_refuses_keys_of_launch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["compare", "demo", "--vary", "launch.queue=a,b"]) == 2
    assert "compare its values on a cluster, with weft launch" in capsys.readouterr().err.lower()


# --------------------------------------------------------------------------- submission


@pytest.fixture
def fake_slurm(tools: Path, tmp_path: Path) -> Path:
    """Stand-ins for sbatch and scontrol; return the file of the calls.

    ``states`` has the states of jobs by id; other jobs are unknown.
    """
    calls = tmp_path / "calls"
    calls.touch()
    write_tool(
        tools / "sbatch",
        f"""[[ $1 != --test-only ]] || exit 0
echo sbatch "${{@:2}}" >>{calls}
[[ $* != *launch-2.sh ]] || [[ -e {tmp_path}/allowed ]] || {{ echo no more jobs >&2; exit 1; }}
grep -c sbatch {calls}""",
    )
    write_tool(
        tools / "scontrol",
        f"""state=$(grep "^$3 " {tmp_path}/states 2>/dev/null) ||
    {{ echo "Job $3 not found" >&2; exit 1; }}
echo "JobId=$3 JobState=${{state#* }} Reason=None ExitCode=0:0\"""",
    )
    write_tool(tools / "scancel", f"echo scancel $@ >>{calls}")
    return calls


def write_run(run: Path, step: int, *kinds: str) -> None:
    """Write the records of a trial of 20 steps."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "job.toml").write_text("[train]\nsteps = 20\n")
    (run / "metrics.jsonl").write_text(f'{{"step": {step}, "time": 1.0}}\n')
    events = [{"step": step, "time": 1.0, "kind": kind, "text": f"a {kind}"} for kind in kinds]
    (run / "events.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in events))


def test_launch_vary_again_submits_only_missing_trials(
    capsys: pytest.CaptureFixture[str], fake_slurm: Path, tmp_path: Path
) -> None:
    words = [*ON_CPU, *VARY, "--repeat", "2", "--out", "lr", "--train.steps", "20"]
    words += ["--launch.options", "account=me"]
    out = launch(capsys, *words)
    home = Path("lr").absolute()
    array, summary = fake_slurm.read_text().splitlines()
    assert array == f"sbatch --array=1-4 {home}/launch.sh"
    assert summary == f"sbatch {home}/compare.sh"  # no job is active in this test
    assert f"next: weft job status {home}, weft compare {home}" in out
    # The recipe of a variant is complete.
    job, _, errors = read_job(str(home / "2-lr-3e-3.toml"))
    assert (job.optim.lr, job.train.steps, job.monitor.report, errors) == (3e-3, 20, False, [])
    record = json.loads((home / "2-lr-3e-3-repeat-2/launch.json").read_text())
    assert (record["id"], record["file"]) == ("1_3", "../launch.sh")

    # Tasks 1 and 2 have ended at the last step: 1 after its last checkpoint, 2 before it.
    write_run(home / "1-lr-1e-3-repeat-1", 20, "start", "end")
    write_run(home / "2-lr-3e-3-repeat-1", 20, "start", "stop")
    (tmp_path / "states").write_text("1_3 RUNNING\n1_4 FAILED\n2 PENDING\n")
    assert main(["job", "status", "lr"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "2-lr-3e-3-repeat-2: slurm job 1_3: running on None"
    assert lines[4] == "weft compare, after all trials: slurm job 2: waiting: pending, None"
    fake_slurm.write_text("sbatch\n" * 9)
    assert "2 of 4 trials have finished, or have an active job" in launch(capsys, *words)
    assert fake_slurm.read_text().split("\n")[9:-1] == [
        f"sbatch --array=2,4 {home}/launch.sh",
        "scancel 2",  # its list of jobs is old
        f"sbatch --dependency=afterany:1 {home}/compare.sh",
    ]
    # More repeats add trials; fewer do not take any away.
    (tmp_path / "states").write_text("1_3 RUNNING\n10_2 RUNNING\n10_4 RUNNING\n")
    assert "4 of 6 trials" in launch(capsys, *words, "--repeat", "3", "--dry-run")
    # Another comparison is refused before anything is submitted.
    text = launch(capsys, *words, "--optim.beta1", "0.8", status=2)
    assert "holds another comparison: optim.beta1 of lr=1e-3 was 0.9, and is 0.8" in text
    # Another limit or account is the same comparison.
    launch(capsys, *words, "--launch.time_limit", "01:00:00", "--dry-run")


def test_launch_vary_failed_submission_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], fake_slurm: Path, tmp_path: Path
) -> None:
    words = [*ON_CPU, "--vary", "launch.queue=a,b", "--repeat", "1", "--out", "lr"]
    text = launch(capsys, *words, status=1)
    assert "no more jobs" in text
    assert "1 of 2 trials were submitted. Run the same command again to submit the others" in text
    assert "compare.sh" not in fake_slurm.read_text()
    (tmp_path / "allowed").touch()
    (tmp_path / "states").write_text("1_1 RUNNING\n")
    fake_slurm.write_text("sbatch\n" * 4)
    text = launch(capsys, *words)
    assert "submitted slurm job 5: 2-queue-b-repeat-1" in text
    assert text.count("submitted") == 2  # and the summary
    # The other way: cancel the trials that were submitted.
    (tmp_path / "states").write_text("1_1 PENDING\n5_2 PENDING\n6 PENDING\n")
    fake_slurm.write_text("")
    main(["job", "cancel", "lr"])
    assert fake_slurm.read_text().splitlines() == ["scancel 6", "scancel 5_2", "scancel 1_1"]
    capsys.readouterr()
    # Resume: each trial from the script that it had.
    (tmp_path / "states").write_text("")
    fake_slurm.write_text("")
    main(["job", "resume", "lr"])
    home = Path("lr").absolute()
    assert fake_slurm.read_text().splitlines() == [
        f"sbatch --array=1 {home}/launch.sh",
        f"sbatch --array=2 {home}/launch-2.sh",
        f"sbatch {home}/compare.sh",
    ]
    capsys.readouterr()
    main(["job", "resume", "lr/2-queue-b-repeat-1"])
    assert "submitted slurm job 4_2" in capsys.readouterr().out
    record = json.loads((home / "2-queue-b-repeat-1/launch.json").read_text())
    assert (record["file"], record["log"]) == ("../launch-2.sh", "../slurm-4_2.out")


def test_collect_names_what_has_not_finished(
    capsys: pytest.CaptureFixture[str], fake_slurm: Path
) -> None:
    launch(capsys, *ON_CPU, *VARY, "--repeat", "2", "--out", "lr", "--train.steps", "20")
    home = Path("lr")
    write_run(home / "1-lr-1e-3-repeat-1", 12, "start")
    write_run(home / "2-lr-3e-3-repeat-1", 3, "start", "failure")
    message = "weft: 1 problem, nothing was started:\n  data.path is wrong.\nsrun: error: exit 2\n"
    (home / "slurm-1_3.out").write_text(message)
    assert main(["compare", "lr"]) == 1
    out = capsys.readouterr().out
    assert "no trial has finished, so there is nothing to compare" in out
    assert "lr=1e-3: repeat 1 has not finished: step 12 of 20; see 'weft job status" in out
    assert "lr=3e-3: repeat 1 failed: a failure; see" in out
    assert "lr=3e-3: repeat 2 failed: data.path is wrong.; log: lr/slurm-1_3.out" in out
    assert "lr=1e-3: repeat 2 has not started; see 'weft job status lr/1-lr-1e-3-repeat-2'" in out
    variants, results, settings, looks = load_comparison(home)
    assert [variant.label for variant in variants] == ["lr=1e-3", "lr=3e-3"]
    assert ([result.status for result in results], settings.repeats, looks) == ([1, 1], 2, [])


# --------------------------------------------------------------------------- a real Slurm


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    with slurm.cluster() as created:
        yield created


@pytest.fixture
def launcher(cluster: Slurm, tmp_path: Path, store_path: Path) -> Iterator[Launcher]:
    (tmp_path / "real").mkdir()
    created = Launcher(cluster, tmp_path / "real", store_path)
    created.environment["PATH"] = f"{created.directory}/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    yield created
    cluster.run("/usr/bin/scancel", "--user=root")
    wait_until(cluster.free, "that the nodes are free")


@pytest.mark.slow
@pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing() or "-")
@pytest.mark.timeout(900, method="signal")
def test_launch_vary_on_slurm_ends_in_the_report(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last task, which has the array's own job id, is requeued and resumes."""
    monkeypatch.setenv("PATH", launcher.environment["PATH"])
    words = list(launcher.words)
    at = words.index("--run.dir")
    del words[at : at + 2]
    command = ["launch", "demo", "--on", "slurm", *words, "--vary", "optim.lr=1e-3,4e-3"]
    command += ["--repeat", "2", "--out", "lr", "--train.steps", "20", "--monitor.log_interval=1"]
    out = launcher.weft(*command)
    array = re.search(r"submitted slurm job (\d+): 1-lr-1e-3-repeat-1", out)
    assert array is not None
    launcher.finish_soon()
    wait_until(lambda: "_4: running" in launcher.weft("job", "status", "lr"), "task 4", 240)
    (launcher.directory / "hurry").unlink()
    launcher.run = launcher.directory / "lr/1-lr-1e-3-repeat-2"
    launcher.wait_for_step(2)
    launcher.cluster.run("scancel", "--signal=TERM", f"{array[1]}_4")
    log = launcher.directory / f"lr/slurm-{array[1]}_4.out"
    wait_until(lambda: f"requeuing job {array[1]}_4" in log.read_text(), "the requeue", 120)
    launcher.finish_soon()

    def status() -> str:
        return launcher.weft("job", "status", "lr")

    wait_until(lambda: re.search("after all trials: .*: ended", status()), "the report", 300)
    text = status()
    assert text.count("ended: completed") == 5, text
    assert "resuming from" in log.read_text()
    record = json.loads((launcher.directory / "lr/comparison.json").read_text())
    assert (len(record["ended"]), record["failures"], record["looks"]) == (4, [], [4])
    assert "lr=4e-3's validation loss" in record["verdict"][0] or "neither" in record["verdict"][0]
    assert (launcher.directory / "lr/report.html").is_file()
    assert "4 of 4 trials have finished" in launcher.weft(*command)
    assert shlex.join(["--array=1-4"]) in (launcher.directory / "lr/launch.sh").read_text()
