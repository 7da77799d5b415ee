"""DCGM's diagnostic and nccl-tests, by their recorded output (nvidia_outputs/README.md)."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.doctor.test_node_checks import HEALTHY
from weft.doctor import nvidia_tests
from weft.doctor.device_checks import check_all_reduce, check_dcgm
from weft.doctor.doctor import has_all_gpus
from weft.doctor.node_facts import DcgmResult, Facts
from weft.doctor.nvidia_tests import parse_nccl_test, run_all_reduce, run_dcgm

OUTPUTS = Path(__file__).parent / "nvidia_outputs"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that installs a program, which prints a text and its arguments."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")

    def install(name: str, output: str, status: int = 0) -> Path:
        (directory / "output").write_text(output)
        lines = [
            "#!/bin/sh",
            f'echo "$@" > {directory}/arguments',
            f'echo "$LD_LIBRARY_PATH" > {directory}/library_path',
            f"cat {directory}/output",
            f"exit {status}",
        ]
        (directory / name).write_text("\n".join(lines) + "\n")
        (directory / name).chmod(0o755)
        return directory

    return install


def read(name: str) -> str:
    return (OUTPUTS / name).read_text()


# --------------------------------------------------------------------------- DCGM


@pytest.mark.system
def test_dcgm_4_setting_of_the_node_is_a_note(programs) -> None:
    directory = programs("dcgmi", read("dcgm-4.2.3-level-1.json"), 226)
    results, error = run_dcgm()
    assert (directory / "arguments").read_text() == "diag --run 2 --json\n"
    assert error == ""
    (result,) = results
    assert (result.test, result.gpus, result.status, result.severity) == (
        "software",
        "0",
        "Fail",
        5,
    )
    (finding,) = check_dcgm(Facts(dcgm=results))
    assert finding.severity == "note"
    assert finding.observation.startswith("software, GPU 0: Persistence Mode: Persistence mode for")


@pytest.mark.parametrize(
    ("severity", "expected"), [(2, "bad"), (6, "bad"), (3, "bad"), (0, "bad"), (1, "warning")]
)
def test_dcgm_failure_is_judged_by_its_severity(severity: int, expected: str) -> None:
    """The severities of dcgm_errors.h: 1 monitor, 2 isolate, 3 unknown, 6 reset."""
    results = (
        DcgmResult("memory", "2", "Fail", "x", severity),
        DcgmResult("memory", "3", "Pass"),
        DcgmResult("pcie", "2", "Pass"),
    )
    first, second = check_dcgm(Facts(dcgm=results))
    assert (first.severity, first.observation) == (expected, "memory, GPU 2: x")
    assert (second.severity, second.observation) == ("ok", "passed: pcie")


@pytest.mark.system
def test_dcgm_4_tests_that_pass_are_named(programs) -> None:
    test = json.loads(read("dcgm-4-diagnostic.json"))
    body = {"test_categories": [{"category": "Hardware", "tests": [test]}]}
    programs("dcgmi", json.dumps({"DCGM Diagnostic": body}))
    results, _ = run_dcgm()
    assert [result.gpus for result in results] == [str(n) for n in range(8)]
    assert {(result.status, result.message) for result in results} == {("Pass", "")}
    (finding,) = check_dcgm(Facts(dcgm=results))
    assert (finding.severity, finding.observation) == ("ok", "passed: diagnostic")


@pytest.mark.system
def test_dcgm_3_output_after_a_warning_is_read(programs) -> None:
    programs("dcgmi", read("dcgm-3.1.json"))
    results, error = run_dcgm()
    assert error == ""
    assert len(results) == 5 + 8
    assert results[0] == DcgmResult("Denylist", "0,1,2,3,4,5,6,7", "Pass")
    (finding,) = check_dcgm(Facts(dcgm=results))
    tests = (
        "Denylist, NVML Library, CUDA Main Library, Page Retirement/Row Remap, Inforom, software"
    )
    assert finding.observation == f"passed: {tests}"


@pytest.mark.system
def test_dcgm_without_host_engine_says_why(programs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is of dcgmi's source, Command.cpp."""
    text = "Error: unable to establish a connection to the specified host: localhost"
    programs("dcgmi", f"{text}\nError: Unable to connect to host engine.\n", 235)
    assert run_dcgm() == ((), text)
    (finding,) = check_dcgm(Facts(dcgm_error=text))
    assert (finding.severity, "systemctl start nvidia-dcgm" in finding.remedy) == ("note", True)
    error = {"DCGM Diagnostic": {"runtime_error": "the reason"}}
    programs("dcgmi", json.dumps(error), 226)
    assert run_dcgm() == ((), "the reason")
    monkeypatch.setattr(nvidia_tests, "DCGM_SECONDS", 0.2)
    directory = programs("dcgmi", "")
    (directory / "dcgmi").write_text("#!/bin/sh\nexec sleep 60\n")
    assert run_dcgm() == ((), "no result within 0 s")


def test_dcgm_not_installed_has_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert run_dcgm() == ((), "")
    assert list(check_dcgm(Facts())) == []


def test_dcgm_runs_only_if_the_job_has_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert has_all_gpus(HEALTHY)
    assert not has_all_gpus(replace(HEALTHY, device_files=16))  # the others are another job's
    assert not has_all_gpus(Facts())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert not has_all_gpus(HEALTHY)


# --------------------------------------------------------------------------- nccl-tests


@pytest.mark.parametrize(
    ("name", "rate"), [("nccl-tests-2.20-gb200.txt", 191.494e9), ("nccl-tests-h100.txt", 70.742e9)]
)
def test_nccl_test_rate_and_correctness_are_read(name: str, rate: float) -> None:
    assert parse_nccl_test(read(name)) == (pytest.approx(rate), True)
    wrong = read(name).replace("values : 0 OK", "values : 248 FAILED")  # as in nccl-tests #7
    assert parse_nccl_test(wrong) == (pytest.approx(rate), False)


@pytest.mark.parametrize("length", [0, 200, 900])
def test_nccl_test_that_was_cut_off_has_no_result(length: int) -> None:
    assert parse_nccl_test(read("nccl-tests-h100.txt")[:length]) is None


@pytest.mark.system
def test_all_reduce_is_measured_by_nccl_tests_with_the_nccl_of_torch(
    programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "site" / "nvidia" / "nccl" / "lib"
    packages.mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path / "site")
    directory = programs("all_reduce_perf", read("nccl-tests-2.20-gb200.txt"))
    assert run_all_reduce(4) == (pytest.approx(191.494e9), True)
    arguments = (directory / "arguments").read_text().split()
    assert arguments == ["--minbytes", "536870912", "--maxbytes", "536870912", "--ngpus", "4"]
    assert (directory / "library_path").read_text().startswith(f"{packages}:")


def test_all_reduce_without_nccl_tests_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(nvidia_tests, "NCCL_TESTS_DIRS", ())
    assert run_all_reduce(8) is None


def test_all_reduce_finding_names_nccl_tests() -> None:
    measured = replace(HEALTHY.measured, has_nccl_tests=True)
    (finding,) = check_all_reduce(replace(HEALTHY, measured=measured))
    assert "355 GB/s for each of 8 ranks (nccl-tests), 99% of" in finding.observation
