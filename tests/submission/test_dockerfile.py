"""docker/Dockerfile: it is well formed, its versions are those of weft, and the pages use it.

``python -m tests.submission.test_dockerfile`` copies it into docs/image.md.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatch
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.doctor.test_image_checks import build_library
from tests.doctor.test_nccl_log import P5
from tests.doctor.test_node_checks import MEASURED
from weft.doctor.failure_signatures import find_signatures
from weft.version import parse_version

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
PAGE = ROOT / "docs" / "image.md"
TOOLS = Path(sys.executable).parent
BLOCK = re.compile(r"(<!-- dockerfile: begin .*? -->\n).*?(<!-- dockerfile: end -->)", re.DOTALL)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile and their arguments, without comments."""
    lines = DOCKERFILE.read_text("utf-8").splitlines(keepends=True)
    text = "".join(line for line in lines if not line.startswith("#")).replace("\\\n", " ")
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in text.split("\n") if line]


def arguments() -> dict[str, str]:
    """Return the default of each build argument."""
    return dict(text.split("=", 1) for name, text in instructions() if name == "ARG")


def pins() -> dict[str, str]:
    """Return the exact versions of constraints.txt by normalized name."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pairs = [line.split("==") for line in lines if "==" in line]
    return {normalize(name): version for name, version in pairs}


def normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_dockerfile_passes_hadolint_and_shellcheck() -> None:
    command = [TOOLS / "hadolint", "--failure-threshold", "style", DOCKERFILE]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stdout


def test_hadolint_finds_a_fault_of_the_shell(tmp_path: Path) -> None:
    """The linter of the test above sees inside of RUN."""
    text = (
        DOCKERFILE.read_text("utf-8")
        .replace('"/opt/amazon/ofi-nccl/lib/$(', "/$(")
        .replace('-linux-gnu"', "")
    )
    (tmp_path / "Dockerfile").write_text(text)
    command = [TOOLS / "hadolint", tmp_path / "Dockerfile"]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "SC2046" in completed.stdout
    assert completed.returncode == 1


def test_dockerfile_has_the_versions_of_weft() -> None:
    torch = pins()["torch"]
    text, values = DOCKERFILE.read_text("utf-8"), arguments()
    assert f"torch {torch}" in text
    # Ubuntu 24.04 has Python 3.12.
    assert values["CUDA_IMAGE"].endswith("-ubuntu24.04")
    assert "Programming Language :: Python :: 3.12" in PROJECT["classifiers"]
    cuda = re.search(r"cuda-toolkit ([\d.]+)", text)
    assert cuda
    assert values["CUDA_IMAGE"].startswith(f"nvidia/cuda:{cuda[1]}-base")
    assert f"cuda-cudart-dev-{'-'.join(cuda[1].split('.')[:2])} " in text
    assert "latest" not in text
    # Where torch has no requirements of CUDA (this machine), nothing can be compared.
    for requirement in requires("torch") or []:
        if match := re.match(r"(cuda-toolkit|nvidia-nccl-cu13).*==([\d.]+)", requirement):
            assert match[2] in text


def test_dockerfile_has_no_versions_that_fail_together() -> None:
    match = re.search(
        r"aws-ofi-nccl ([\d.]+), which Amazon tested with NCCL ([\d.]+)",
        DOCKERFILE.read_text("utf-8"),
    )
    assert match
    plugin, nccl = match.groups()
    facts = replace(
        P5,
        ofi_plugin=f"{plugin}.0",
        efa_installer=arguments()["EFA_INSTALLER"],
        measured=replace(MEASURED, nccl=parse_version(nccl)),
    )
    assert [s.name for s in find_signatures("", facts) if not s.needs_log] == []


def required_packages(extras: list[str]) -> Iterator[str]:
    """Yield the packages that weft with these extras requires, as far as they are installed."""
    optional = PROJECT["optional-dependencies"]
    todo = [*PROJECT["dependencies"], *(text for extra in extras for text in optional[extra])]
    seen: set[str] = set()
    image = {"python_version": "3.12", "python_full_version": "3.12.3", "sys_platform": "linux"}
    while todo:
        requirement = Requirement(todo.pop())
        name = normalize(requirement.name)
        if requirement.marker and not requirement.marker.evaluate(image | {"extra": ""}):
            continue
        if name not in seen:
            seen.add(name)
            yield name
            # The wheels of torch name the exact versions of NVIDIA's packages.
            todo += requires(name) or [] if name != "torch" else []


def test_dockerfile_installs_exact_versions_only() -> None:
    extras = arguments()["EXTRAS"].split(",")
    unpinned = set(required_packages(extras)) - set(pins())
    assert unpinned == set()
    installs = [text for name, text in instructions() if name == "RUN" and "pip install" in text]
    assert len(installs) == 2
    assert all("--constraint /src/constraints.txt" in text for text in installs)


def is_ignored(path: Path) -> bool:
    """Return True if .dockerignore excludes a path from the context; the last match counts."""
    result = False
    for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines():
        pattern = line.removeprefix("!").removeprefix("**/")
        if line and not line.startswith("#"):
            names = path.parts if "**/" in line else [str(p) for p in (path, *path.parents)]
            if any(fnmatch(name, pattern) for name in names if name != "."):
                result = not line.startswith("!")
    return result


def test_context_has_what_the_dockerfile_copies_and_the_package_needs(tmp_path: Path) -> None:
    sources = [text.split()[:-1] for name, text in instructions() if name == "COPY"]
    copied = [Path(source) for group in sources for source in group]
    for source in copied:
        assert (ROOT / source).exists()
        assert not is_ignored(source)
    assert not is_ignored(Path("weft/planning/clusters.toml"))
    assert is_ignored(Path("weft/planning/__pycache__"))
    for other in (".git", "runs", "tests", "docs", ".venv"):
        assert is_ignored(Path(other))
    # The package of the context has all files that git has.
    listed = subprocess.run(
        ["git", "ls-files", "weft"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    assert [name for name in listed if is_ignored(Path(name))] == []
    assert {PROJECT["readme"], *PROJECT["license-files"]} <= {str(path) for path in copied}


# The libraries of the image, each with the target of its symbolic link.
LIBRARIES = {
    "libnccl-net-ofi.so": "",
    "libnccl-net.so": "",
    "libfabric.so.1.31": "",
    "libfabric.so.1": "libfabric.so.1.31",
    "libcudart.so.13.0.96": "",
    "libcudart.so.13": "libcudart.so.13.0.96",
    "libcudart.so": "libcudart.so.13",
}


@pytest.mark.parametrize(
    ("libraries", "passes"),
    [
        (LIBRARIES, True),
        ({name: link for name, link in LIBRARIES.items() if name != "libnccl-net.so"}, False),
        ({name: link for name, link in LIBRARIES.items() if "libfabric" not in name}, False),
        # A base image for running has no libcudart.so.
        ({name: link for name, link in LIBRARIES.items() if name != "libcudart.so"}, False),
        # Before aws-ofi-nccl 1.17 (its pull request 993): ldconfig does not list such a link.
        (LIBRARIES | {"libnccl-net.so": "libnccl-net-ofi.so"}, False),
    ],
)
def test_check_of_libraries_accepts_only_what_nccl_can_load(
    libraries: dict[str, str], passes: bool, tmp_path: Path
) -> None:
    """The step of the Dockerfile, with the real ldconfig and libraries in a directory."""
    (step,) = (text for name, text in instructions() if "libnccl-net.so " in text)
    directory = tmp_path / "lib"
    directory.mkdir()
    for name, link in libraries.items():
        if link:
            (directory / name).symlink_to(link)
        else:
            soname = re.sub(r"(\.so(\.\d+)?).*", r"\1", name)
            build_library(directory / name, f"-Wl,-soname,{soname}")
    (tmp_path / "conf").write_text(f"{directory}\n")
    ldconfig = shutil.which("ldconfig", path=f"{os.environ['PATH']}:/sbin:/usr/sbin")
    assert ldconfig
    cache = [ldconfig, "-C", str(tmp_path / "cache")]
    subprocess.run([*cache, "-X", "-f", str(tmp_path / "conf")], check=True, capture_output=True)
    function = f'ldconfig() {{ {" ".join(cache)} "$@"; }}; '
    completed = subprocess.run(
        ["bash", "-o", "pipefail", "-c", function + step.replace("/tmp/", f"{tmp_path}/")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (completed.returncode == 0) == passes, completed.stderr
    assert (f"=> {directory}/libcudart.so\n" in completed.stdout) == passes


def quote_dockerfile() -> str:
    """Return docs/image.md with the Dockerfile of today."""
    text = DOCKERFILE.read_text("utf-8")
    block = f"```dockerfile\n{text}```\n"
    return BLOCK.sub(lambda match: match[1] + block + match[2], PAGE.read_text("utf-8"))


def test_page_quotes_the_dockerfile() -> None:
    assert PAGE.read_text("utf-8") == quote_dockerfile()


def test_no_other_page_has_a_dockerfile() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    texts = {str(p.relative_to(ROOT)): p.read_text("utf-8") for p in pages if p != PAGE}
    # An image on top of it is another matter.
    base = re.compile(r"^FROM (?!weft$)|```dockerfile\n(?!FROM weft$)", re.MULTILINE)
    own = [name for name, text in texts.items() if base.search(text)]
    assert own == []
    for name in ("kubernetes", "sagemaker", "skypilot", "slurm", "hyperpod", "efa"):
        assert "(image.md" in texts[f"docs/{name}.md"], name


if __name__ == "__main__":
    PAGE.write_text(quote_dockerfile(), "utf-8")
