"""`weft hang` explains a planted hang: after the run, in a live run, across hosts."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.commands import Started
from tests.harness import RankError, run_ranks
from tests.supervision.test_launcher import run, start_and_wait
from tests.supervision.test_signals import start_and_wait_for_step, workers
from tests.supervision.test_watchdog import faults, rank_state
from weft.cli.main import main
from weft.config.errors import InvalidConfig
from weft.config.exit_statuses import HUNG
from weft.monitor.heartbeat import format_ranks, process_start_ticks
from weft.parallel.private import configure_flight_recorder
from weft.supervision.hang import inspect_run, parse_flight_recorder
from weft.supervision.watchdog import OpenCollective, RankState, diagnose_hang, write_evidence

pytestmark = pytest.mark.timeout(400, method="signal")  # so that fixtures tidy up

# gloo aborts on a mismatched collective of the same kind, but a broadcast waits.
SKIP = """
import torch, torch.distributed as dist
from weft.optim.optimizer import OPTIMIZERS

def build(groups, section):
    optimizer, steps = OPTIMIZERS["adamw"](groups, section), []
    def exchange(*arguments):
        steps.append(None)
        if len(steps) < 12 or dist.get_rank() != 1:
            dist.broadcast(torch.zeros(3), 1)
    optimizer.register_step_pre_hook(exchange)
    return optimizer
"""
SKIPPED = (
    r"the ranks call different collectives: "
    r"rank 0 waits in broadcast no\. (\d+) of dp_shard \(ranks 0, 1\) "
    r"\(step 12, updating the parameters\), .*; rank 1 skipped broadcast no\. \1 of dp_shard "
    r"\(ranks 0, 1\) \(its last one there was no\. \d+\), in which rank 0 waits\n"
)
OPTIONS = [
    "--train.steps",
    "100000",
    "--resilience.max_restarts_per_hour",
    "0",
    "--optim.name",
    "mine:build",
    "--checkpoint.async_save",  # a background save may be the last collective
    "false",
]


def explain_hang(directory: Path, *options: str) -> str:
    with redirect_stdout(io.StringIO()) as output:
        assert main(["hang", str(directory / "run"), *options]) == 0
    return output.getvalue()


def kill(process: subprocess.Popen[str] | Started) -> None:
    """Kill a run, so that its ranks record nothing."""
    ranks = workers(process)
    process.send_signal(signal.SIGKILL)
    if isinstance(process, Started):
        with pytest.raises(RankError, match="SIGKILL"):
            process.wait(timeout=60)
    else:
        process.wait(timeout=60)
    deadline = time.monotonic() + 60
    while any(process_start_ticks(rank) for rank in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def check_calls(result: dict[str, Any], number: int) -> None:
    """Check two ranks: the first waits in broadcast ``number``, the second is past it."""
    zero, one = result["ranks"]
    group = "dp_shard (ranks 0, 1)"
    assert zero["calls"] == [
        {"group": group, "number": number, "name": "broadcast", "sizes": [[3]], "ranks": [0, 1]}
    ]
    assert zero["done"][group] == one["done"][group] == number - 1
    assert zero["recent"][-1] == [group, number, "broadcast", [[3]], True]


@pytest.mark.slow
def test_hang_after_the_watchdog_names_a_skipped_collective(
    arguments: list[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(SKIP)
    completed = run([*arguments, *OPTIONS, "--resilience.step_timeout", "3"], tmp_path)
    assert completed.returncode == HUNG, completed.stderr
    output = explain_hang(tmp_path)
    assert re.match(SKIPPED, output), output
    assert (
        f"by the watchdog of {socket.gethostname()}: 2 of 2 ranks; the watchdog ended the run"
        in output
    )
    (own_rank,) = re.findall(
        r"^    (.*mine\.py:\d+ in exchange)$", output, re.MULTILINE
    )  # only the stack of rank 0
    assert (
        output.index("rank 0, step 12") < output.index(own_rank) < output.index("rank 1, step 12")
    )
    assert "run/logs/rank-1.log" in output
    assert "run the same command to resume from" in output

    (evidence,) = (tmp_path / "run/logs").glob("hang-*.json")
    explained = json.loads(evidence.read_text())
    assert explained["missing"] == [1]
    check_calls(explained, int(re.findall(r"broadcast no\. (\d+)", output)[0]))
    assert json.loads(explain_hang(tmp_path, "--json"))["missing"] == [1]


def test_hang_live_run_names_a_skipped_collective(arguments: list[str], tmp_path: Path) -> None:
    """Repeated commands work without a watchdog, and leave the run alive."""
    (tmp_path / "mine.py").write_text(SKIP)
    command = [*arguments, *OPTIONS, "--resilience.step_timeout", "0"]
    process = start_and_wait_for_step(command, tmp_path, 11)
    deadline = time.monotonic() + 120
    while not re.match(SKIPPED, output := explain_hang(tmp_path)):  # until the run reaches step 12
        assert time.monotonic() < deadline, output
    assert "observed now, in 2 of 2 ranks; none has made progress for" in output
    assert re.match(SKIPPED, explain_hang(tmp_path)), "the second time"
    (own_rank,) = re.findall(
        r"^    (.*mine\.py:\d+ in exchange)$", output, re.MULTILINE
    )  # only the stack of rank 0
    assert (
        output.index("rank 0, step 12") < output.index(own_rank) < output.index("rank 1, step 12")
    )
    answer = json.loads(explain_hang(tmp_path, "--json"))
    assert answer["missing"] == [1]
    check_calls(answer, int(re.findall(r"broadcast no\. (\d+)", output)[0]))

    # Rank 1 appears to be on another host, on which the command was run too.
    logs = tmp_path / "run/logs"
    (file,) = logs.glob("ranks-*.json")
    full = json.loads(file.read_text())
    other = {"time": time.time(), "host": "b", "world_size": 2, "ended": False}
    theirs = json.loads(explain_hang(tmp_path, "--json"))["ranks"][1]
    other["ranks"] = [{name: theirs[name] for name in RankState._fields}]
    file.write_text(json.dumps(full | {"ranks": full["ranks"][:1]}))
    output = explain_hang(tmp_path)
    assert "observed now, in 1 of 2 ranks" in output
    assert "the missing rank is on another host" in output
    assert "run this command on the other hosts, too" in output
    for age, result in ((0, True), (3600, False)):  # evidence of an hour ago is of another hang
        (logs / "hang-b.json").write_text(json.dumps(other | {"time": time.time() - age}))
        output = explain_hang(tmp_path)
        assert bool(re.match(SKIPPED, output)) == result, output
        assert ("by this command, on other hosts, in 2 of 2 ranks" in output) == result
    for remaining in logs.glob("hang-*.json"):
        remaining.unlink()
    file.write_text(json.dumps(full))
    assert "in exchange" in output
    assert "step_timeout is 0: the run hangs until you end it" in output
    assert process.poll() is None
    kill(process)
    output = explain_hang(tmp_path)
    assert output.startswith("no hang: the run was stopped or killed at step 11 of 100000\n")
    assert "resume from" in output


@pytest.mark.slow
def test_hang_slow_run_is_reported_as_making_progress(arguments: list[str], tmp_path: Path) -> None:
    fault = faults(site="step", kind="slow", rank=1, times=10**6, seconds=0.1)
    process = start_and_wait([*arguments, "--train.steps", "100000", *fault], tmp_path, 15)
    try:
        deadline = time.monotonic() + 60
        while "rank 1 is a straggler: " not in (output := explain_hang(tmp_path)):
            assert time.monotonic() < deadline, (
                output
            )  # on a busy machine the other rank is slow too
            time.sleep(1)
        assert re.match(r"no hang: the run makes progress, in steps? \d+", output)
    finally:
        kill(process)


def test_hang_directory_without_a_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["hang", str(tmp_path)]) == 2
    assert "is not a run directory. Use the directory that has" in capsys.readouterr().err


# --------------------------------------------------------------------------- parts


def hung_run(directory: Path) -> Path:
    """Create a run directory without any evidence."""
    (directory / "logs").mkdir()
    (directory / "job.toml").write_text("[train]\nsteps = 1000\n")
    return directory


def test_explain_without_evidence_reports_how_the_run_ended(tmp_path: Path) -> None:
    """All available evidence is reported."""
    run_ = hung_run(tmp_path)
    assert "no rank of this run has reached its first step" in str(inspect_run(run_))
    (run_ / "metrics.jsonl").write_text('{"step": 7, "loss": 1.0}\n')
    assert "the run was stopped or killed at step 7 of 1000" in str(inspect_run(run_))
    error = {"rank": 1, "time": 5.0, "kind": "OSError", "message": "no disk (in step 8)"}
    error |= {"is_expected": False, "transient": True, "traceback": "t", "where": "in step 8"}
    (run_ / "logs" / "rank-1.error.json").write_text(json.dumps(error))
    output = str(inspect_run(run_))
    assert "no hang: rank 1 failed: OSError: no disk (in step 8)" in output
    assert "logs/rank-1.log" in output
    (run_ / "metrics.jsonl").write_text('{"step": 1000, "loss": 1.0}\n')
    assert "the run is complete, at step 1000" in str(inspect_run(run_))


def test_explain_reused_process_id_is_not_a_rank(tmp_path: Path) -> None:
    run_ = hung_run(tmp_path)
    contact = [0, os.getpid(), "1", 0, 0, 0, 0, None]  # this process started later than that tick
    host = {"time": 1.0, "host": socket.gethostname(), "world_size": 1, "ranks": [contact]}
    (run_ / "logs" / f"ranks-{socket.gethostname()}.json").write_text(json.dumps(host))
    assert str(inspect_run(run_)).startswith("no hang: the run was stopped")


def rank_dump(
    rank: int, group: str, number: int, name: str, ranks: list[int], **changes: object
) -> RankState:
    """Return the state of a rank that waits in collective ``number``."""
    completed = {group: number - 1} | {key: int(str(value)) for key, value in changes.items()}
    call = OpenCollective(group, number, name, [[8]], ranks)
    return rank_state(rank, calls=[call], done=completed)


def test_explain_evidence_of_several_hosts_is_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On each host all ranks wait; merged evidence names the missing rank."""
    run_ = hung_run(tmp_path)
    all_ranks, distant = [0, 1, 2, 3], "pp (ranks 2, 3)"
    local = [rank_dump(rank, "all ranks", 42, "all_reduce", all_ranks) for rank in (0, 1)]
    remote = [
        rank_dump(2, "all ranks", 42, "all_reduce", all_ranks),
        rank_state(
            3,
            calls=[OpenCollective(distant, 9, "broadcast", [[8]], [2, 3])],
            done={"all ranks": 41, distant: 8},
        ),
    ]
    remote[1] = remote[1]._replace(step=8)
    for host, ranks in (("a", local), ("b", remote)):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        write_evidence(run_, ranks, 4, ended=True)
    assert {path.name for path in (run_ / "logs").iterdir()} == {"hang-a.json", "hang-b-2.json"}
    single = json.loads((run_ / "logs" / "hang-a.json").read_text())
    assert "the missing rank is on another host" in single["verdict"]
    explained = inspect_run(run_)
    assert explained.missing == [3]
    assert (
        "rank 3 skipped all_reduce no. 42 of all ranks (its last one there was no. 41), "
        "in which ranks 0-2 wait" in explained.verdict
    )
    assert "by the watchdogs of a, b: 4 of 4 ranks" in explained.source
    (run_ / "logs" / "hang-b-2.json").unlink()
    assert "no evidence of ranks 2, 3" in str(inspect_run(run_))


def test_verdict_rank_behind_has_not_skipped_a_collective() -> None:
    """A rank at a later step that calls another collective has skipped one."""
    zero = rank_dump(0, "all ranks", 42, "all_gather", [0, 1])._replace(step=8)
    one = rank_dump(1, "all ranks", 42, "broadcast", [0, 1])
    missing, sentence = diagnose_hang([zero, one], 2)
    assert missing == [0]
    assert "; rank 0 skipped broadcast no. 42 of all ranks" in sentence
    assert sentence.endswith("in which rank 1 waits")
    # No rank is further than the other, so none has skipped a collective.
    missing, sentence = diagnose_hang([zero._replace(step=7), one], 2)
    assert "went past" not in sentence


def dump_one() -> bytes:
    """Return torch's flight recorder dump of a rank that waits for another one."""
    from torch._C import _distributed_c10d as c10d

    dist.all_reduce(torch.zeros(2))
    group = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.zeros(3), group=group, async_op=True)
        # torch marks earlier calls as done a little after they return.
        for _ in range(100):
            data: bytes = c10d._dump_fr_trace(True, True, False)
            if len(parse_flight_recorder(0, data).calls or ()) == 1:
                break
            time.sleep(0.05)
    dist.barrier()
    if dist.get_rank() == 1:
        work, data = dist.all_reduce(torch.zeros(3), group=group, async_op=True), b""
    work.wait()
    return data


def test_explain_flight_recorder_dump_is_read(tmp_path: Path) -> None:
    data = run_ranks(dump_one, 2)[0]
    one = parse_flight_recorder(5, data)
    assert one.calls is not None
    assert [(call.group, call.number, call.name) for call in one.calls] == [
        ("group 1", 1, "all_reduce")  # gloo does not report the ranks
    ]
    run_ = hung_run(tmp_path)
    (run_ / "logs" / "flight-rank-0").write_bytes(data)
    explained = inspect_run(run_)
    assert "all_reduce no. 1 of group 1" in explained.verdict
    assert "by NCCL: 1 of 1 ranks" in explained.source


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch evil",)


@pytest.mark.parametrize(
    "data",
    [pickle.dumps(Evil()), b"", b"no pickle", pickle.dumps([1]), pickle.dumps({"a": 1})],
    ids=["a call", "empty", "text", "a list", "another dict"],
)
def test_seen_in_dump_hostile_pickle_runs_nothing(
    data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidConfig, match="is not a dump of torch's Flight Recorder"):
        parse_flight_recorder(0, data)
    assert not (tmp_path / "evil").exists()


def test_record_flights_keeps_variables_of_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT")
    for name in (*names, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "0")  # the old name of the first
    configure_flight_recorder("/run/logs/flight-rank-")
    assert "TORCH_FR_BUFFER_SIZE" not in os.environ
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == "/run/logs/flight-rank-"
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    for name in names:
        monkeypatch.delenv(name, raising=False)


def test_ranks_text_abbreviates_sequences() -> None:
    for ranks, text in (
        ([3], "rank 3"),
        ([0, 1], "ranks 0, 1"),
        ([4, 5, 6], "ranks 4-6"),
        ([0, 2, 4], "ranks 0, 2, 4"),
        ([0, 2, 4, 6, 8, 10], "ranks 0, 2, 4, ... 10"),
    ):
        assert format_ranks(ranks) == text
