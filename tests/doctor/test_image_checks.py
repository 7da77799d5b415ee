"""`weft doctor --image`: real libraries and tools in directories, and recorded images."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.submission.requests import fake_tool
from weft.cli.main import main
from weft.config.exit_statuses import FAILED, USAGE_ERROR
from weft.doctor.image_checks import (
    PLUGIN,
    Image,
    check_image,
    collect_image,
    find_library,
    find_missing_packages,
    find_private_paths,
    find_unresolved,
)
from weft.doctor.node_facts import Facts, Finding
from weft.doctor.probes import run_tool

PLUGIN_PATH = "/opt/amazon/ofi-nccl/lib/libnccl-net.so"
# fi_info -l of the EFA installer's libfabric, shortened.
PROVIDERS = "efa:\n    version: 204.0\nshm:\n    version: 204.0\ntcp:\n    version: 204.0\n"
FACTS = Facts(
    torch="2.13.0+cu130",
    cuda="13.0",
    ofi_plugin="1.19.0",
    ofi_plugin_paths=("/opt/amazon/ofi-nccl/lib",),
    libfabric_paths=("/opt/amazon/efa/lib/libfabric.so.1.31.4",),
    libfabric="fi_info: 2.4.0amzn3.0\nlibfabric: 2.4.0amzn3.0\n",
    efa_installer="1.48.0",
    interfaces=("lo", "eth0"),
    shm=64 << 20,
    shm_free=64 << 20,
)
IMAGE = Image(
    nccl="2.29.7",
    plugin=PLUGIN_PATH,
    cuda_runtime="/usr/local/cuda/lib64/libcudart.so",
    providers=PROVIDERS,
    missing={"s3": (), "data": (), "wandb": ("wandb",)},
    compiler="/usr/bin/cc",
    has_python_headers=True,
    command="/opt/weft/bin/weft",
    python="0.1.0",
    shell="/usr/bin/bash",
    user="root",
    temporary="/tmp",
    home="/root/.cache",
)
NO_EFA_FACTS = {"ofi_plugin": "", "ofi_plugin_paths": (), "libfabric_paths": (), "libfabric": ""}


def graded(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(f.check, f.severity) for f in findings if f.severity not in ("ok", "note")]


def test_image_of_the_dockerfile_has_no_bad_finding() -> None:
    findings = check_image(FACTS, IMAGE)
    assert graded(findings) == []
    texts = {f.check: f.observation for f in findings}
    assert "CUDA 13.0, NCCL 2.29.7; the node needs NVIDIA's driver 580" in texts["torch"]
    assert texts["extras"] == "with s3, data; without wandb"
    assert ("shared memory", "note") in [(f.check, f.severity) for f in findings]


@pytest.mark.parametrize(
    ("facts", "image", "check", "severity", "text"),
    [
        ({"cuda": "", "torch": "2.13.0+cpu"}, {}, "torch", "bad", "without CUDA"),
        ({"torch": "", "cuda": ""}, {}, "torch", "bad", "is missing"),
        ({}, {"nccl": "2.28.3"}, "nccl", "warning", "2.28.3"),
        # Where the plug-in is not on the library path, and where it cannot be loaded.
        ({}, {"plugin": ""}, "plug-in (EFA)", "bad", "/opt/amazon/ofi-nccl/lib"),
        ({}, {"unresolved": ("libhwloc.so.15",)}, "plug-in (EFA)", "bad", "libhwloc.so.15"),
        (NO_EFA_FACTS, {"plugin": "", "providers": ""}, "plug-in (EFA)", "warning", "of AWS"),
        ({}, {"providers": "tcp:\n"}, "libfabric (EFA)", "bad", "no provider efa"),
        ({}, {"providers": ""}, "libfabric (EFA)", "warning", "no fi_info"),
        ({}, {"cuda_runtime": ""}, "libfabric (EFA)", "bad", "no GPUDirect RDMA"),
        ({"cuda_compat": ("/usr/local/cuda/compat/x",)}, {}, "copies (EFA)", "warning", "compat"),
        ({"ofi_plugin_paths": ("/a", "/b")}, {}, "copies (EFA)", "warning", "/a, /b"),
        ({}, {"missing": {"s3": ("s3fs",), "data": ()}}, "extras", "warning", "s3fs missing"),
        ({}, {"compiler": ""}, "compiler", "warning", "torch.compile"),
        ({}, {"has_python_headers": False}, "compiler", "warning", "headers"),
        ({}, {"command": ""}, "command", "bad", "PATH"),
        ({}, {"shell": ""}, "command", "bad", "bash"),
        ({}, {"python": ""}, "command", "warning", "SageMaker"),
        ({}, {"private": ("/root",)}, "command", "warning", "/root"),
        ({}, {"temporary": ""}, "user", "bad", "temporary"),
        ({}, {"mount_points": ("/fsx",)}, "mount points (SageMaker)", "warning", "/fsx"),
        # Variables are those of an image for EFA, although the build machine has no adapter.
        ({"variables": {"FI_PROVIDER": "tcp"}}, {}, "variables", "bad", "FI_PROVIDER=tcp"),
        ({"variables": {"NCCL_PROTO": "simple"}}, {}, "variables", "warning", "NCCL_PROTO"),
    ],
)
def test_image_with_one_fault_has_one_finding(
    facts: dict[str, object], image: dict[str, object], check: str, severity: str, text: str
) -> None:
    findings = check_image(replace(FACTS, **facts), replace(IMAGE, **image))  # type: ignore[arg-type]
    assert graded(findings) == [(check, severity)]
    (finding,) = (f for f in findings if f.severity == severity)
    assert text in finding.observation
    assert finding.remedy


def test_image_without_efa_needs_no_libfabric_and_no_cuda_runtime() -> None:
    facts = replace(FACTS, **NO_EFA_FACTS)  # type: ignore[arg-type]
    image = replace(IMAGE, plugin="", providers="", cuda_runtime="")
    assert graded(check_image(facts, image)) == [("plug-in (EFA)", "warning")]


# --------------------------------------------------------------------------- probes


def build_library(path: Path, *options: str) -> None:
    command = ["cc", "-shared", "-x", "c", "/dev/null", "-x", "none", "-o", str(path), *options]
    subprocess.run(command, check=True)


def test_find_unresolved_names_a_library_that_is_gone(tmp_path: Path) -> None:
    """As in an image that copies only /opt/amazon from another stage."""
    for name in ("libweft-test.so.15", "libcuda.so.1"):
        build_library(tmp_path / name, f"-Wl,-soname,{name}")
    plugin = tmp_path / "lib" / PLUGIN
    plugin.parent.mkdir()
    needed = [str(tmp_path / name) for name in ("libweft-test.so.15", "libcuda.so.1")]
    build_library(plugin, "-Wl,--no-as-needed", *needed, f"-Wl,-rpath,{tmp_path}")
    assert find_unresolved(run_tool("ldd", str(plugin))) == ()
    for name in needed:
        Path(name).unlink()
    assert find_unresolved(run_tool("ldd", str(plugin))) == ("libweft-test.so.15",)
    symbol = "libefa.so.1: version `EFA_1.4' not found (required by /opt/amazon/efa/lib/x)\n"
    assert find_unresolved(symbol) == ("EFA_1.4",)


def test_find_library_searches_the_library_path_and_then_the_cache(tmp_path: Path) -> None:
    assert find_library(PLUGIN, {}) == ""
    assert Path(find_library("libc.so.6", {})).is_file()
    build_library(tmp_path / PLUGIN)
    assert find_library(PLUGIN, {"LD_LIBRARY_PATH": f"/none::{tmp_path}"}) == str(tmp_path / PLUGIN)


def test_find_private_paths_names_directories_and_programs_of_the_owner(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    program = tmp_path / "home" / "bin" / "weft"
    program.parent.mkdir(parents=True)
    program.touch(0o755)
    assert not [path for path in find_private_paths([str(program)]) if str(tmp_path) in path]
    program.parent.parent.chmod(0o700)
    program.chmod(0o700)
    link = tmp_path / "weft"
    link.symlink_to(program)
    found = [path for path in find_private_paths([str(link)]) if path.startswith(f"{tmp_path}/")]
    assert found == [str(link), str(program.parent.parent), str(program)]


def test_find_missing_packages_groups_them_by_extra() -> None:
    requirements = [
        "torch>=2.11",
        'numpy>=1.26; extra == "s3"',
        "no-such-package[x]>=1; extra == 's3'",
        'pytest>=8; extra == "dev"',
        "pydantic; python_version >= '3.11' and extra == 'data'",
    ]
    assert find_missing_packages(requirements) == {"s3": ("no-such-package",), "data": ()}


def test_collect_image_reads_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tool(tmp_path, monkeypatch, "fi_info", "printf 'efa:\\n    version: 204.0\\n'")
    for name in ("weft", "python"):
        (tmp_path / "bin" / name).symlink_to(sys.executable)
    build_library(tmp_path / PLUGIN)
    environment = {"LD_LIBRARY_PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    image = collect_image(environment)
    assert image.plugin == str(tmp_path / PLUGIN)
    assert image.unresolved == ()
    assert image.providers == "efa:\n    version: 204.0\n"
    assert image.command == str(tmp_path / "bin" / "weft")
    assert image.missing["s3"] == ()
    assert image.home == str(tmp_path / "cache")


# --------------------------------------------------------------------------- command


@pytest.mark.system
def test_command_reports_this_machine_which_has_no_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}/usr/bin")
    assert main(["doctor", "--image", "--json"]) == FAILED
    report = json.loads(capsys.readouterr().out)
    by_check = {finding["check"]: finding for finding in report["findings"]}
    assert by_check["torch"]["severity"] == "bad"
    assert by_check["plug-in (EFA)"]["severity"] == "warning"
    assert by_check["extras"]["severity"] == "ok"
    assert not [*tmp_path.iterdir()]


def test_command_refuses_what_it_would_ignore(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["doctor", "llama3-8b", "--image", "--full", "--run.dir", "x"]
    assert main(words) == USAGE_ERROR
    error = capsys.readouterr().err
    for word in ("llama3-8b", "--full", "--run.dir"):
        assert f"{word} has no effect on --image. Remove it." in error
