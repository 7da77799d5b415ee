"""Checks of a container image for ``weft doctor --image``.

The checks are about software and need no network: a build machine has neither the GPUs nor the
adapters of a node.  A missing part that only some clusters need is a warning or a note that names
them.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, distributions, requires, version
from pathlib import Path

from weft.doctor.device_checks import check_nccl
from weft.doctor.network_checks import check_copies
from weft.doctor.node_checks import check_shm
from weft.doctor.node_facts import Adapter, Facts, Finding, bad, note, ok, warning
from weft.doctor.probes import run_tool
from weft.doctor.variable_checks import check_variables
from weft.monitor.nvml import minimum_driver
from weft.version import parse_version, untested_versions

# NCCL and libfabric load these libraries by name.
PLUGIN, CUDA_RUNTIME = "libnccl-net.so", "libcudart.so"
# Libraries of NVIDIA's driver, which the container runtime mounts on a node.
DRIVER_LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")
# Extras whose absence stops some jobs: the jobs.
EXTRA_USES = {
    "s3": "s3:// in data.path or checkpoint.dir; SageMaker and SkyPilot keep checkpoints there",
    "data": "Parquet and Arrow files, .zst, and data sets of Hugging Face",
}
# Directories that weft's entry point on SageMaker creates as links to mounted file systems.
MOUNT_POINTS = ("/fsx", "/efs")


@dataclass(frozen=True)
class Image:
    """Facts about an image; an empty string or tuple means that there is none."""

    nccl: str = ""  # version of the package that torch requires
    plugin: str = ""  # path at which NCCL finds its plug-in for EFA
    unresolved: tuple[str, ...] = ()  # libraries that the plug-in needs and that are missing
    cuda_runtime: str = ""  # path at which libfabric finds libcudart.so
    providers: str = ""  # output of fi_info -l
    missing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # packages by extra
    compiler: str = ""
    has_python_headers: bool = False
    command: str = ""  # path of weft
    python: str = ""  # version of weft that the program python imports
    shell: str = ""  # path of bash
    private: tuple[str, ...] = ()  # directories and programs that other users cannot use
    user: str = ""  # name of this user; empty: the user has none
    temporary: str = ""
    home: str = ""  # if a cache can be written in it
    mount_points: tuple[str, ...] = ()


def collect_image(environment: Mapping[str, str]) -> Image:
    """Collect the facts of this image.

    ``environment`` has the library path, and the places of caches.
    """
    plugin = find_library(PLUGIN, environment)
    command = shutil.which("weft") or ""
    user = temporary = ""
    with suppress(OSError, KeyError):
        user = getpass.getuser()
    with suppress(OSError):  # no directory is writable
        temporary = tempfile.gettempdir()
    cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    # Without an import of torch, which may fail.
    versions = {(each.metadata["Name"] or ""): each.version for each in distributions()}
    nccl = [number for name, number in versions.items() if name.startswith("nvidia-nccl-cu")]
    return Image(
        nccl=next(iter(nccl), ""),
        plugin=plugin,
        unresolved=find_unresolved(run_tool("ldd", plugin)) if plugin else (),
        cuda_runtime=find_library(CUDA_RUNTIME, environment),
        providers=run_tool("fi_info", "-l"),
        missing=find_missing_packages(requires("weft") or []),
        compiler=next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), ""),
        has_python_headers=Path(sysconfig.get_path("include"), "Python.h").is_file(),
        command=command,
        python=run_tool("python", "-c", "import weft; print(weft.__version__)").strip(),
        shell=shutil.which("bash") or "",
        private=tuple(find_private_paths([command, sys.executable])),
        user=user,
        temporary=temporary,
        home=str(cache) if os.access(existing, os.W_OK) else "",
        mount_points=tuple(path for path in MOUNT_POINTS if Path(path).is_dir()),
    )


def find_library(name: str, environment: Mapping[str, str]) -> str:
    """Return the path at which the dynamic linker finds a library; empty: nowhere."""
    for directory in filter(None, environment.get("LD_LIBRARY_PATH", "").split(":")):
        if (path := Path(directory, name)).exists():
            return str(path)
    # Users other than root lack sbin in their path on Debian.
    cache = run_tool("ldconfig", "-p") or run_tool("/sbin/ldconfig", "-p")
    match = re.search(rf"^\s*{re.escape(name)} \(.*=> (.+)$", cache, re.MULTILINE)
    return match[1] if match else ""


def find_unresolved(ldd: str) -> tuple[str, ...]:
    """Return the libraries that ldd does not find, without those of the driver."""
    names = re.findall(r"^\s*(\S+) => not found", ldd, re.MULTILINE)
    # A symbol version that a library lacks: "... version `EFA_1.4' not found (required by ...)".
    names += re.findall(r"version `(\S+)' not found", ldd)
    return tuple(dict.fromkeys(name for name in names if name not in DRIVER_LIBRARIES))


def find_missing_packages(requirements: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the packages that are not installed, by weft's extra that requires them."""
    results: dict[str, tuple[str, ...]] = {}
    for requirement in requirements:
        match = re.match(r"([\w.-]+).*; .*extra == ['\"]([\w-]+)['\"]", requirement)
        if match and match[2] not in ("dev", "docs"):
            name, extra = match.groups()
            results.setdefault(extra, ())
            try:
                version(name)
            except PackageNotFoundError:
                results[extra] += (name,)
    return results


def find_private_paths(programs: Sequence[str]) -> Iterator[str]:
    """Yield the programs, and directories above them, that other users cannot use."""
    seen: set[Path] = set()
    for program in filter(None, programs):
        for path in (Path(program), Path(program).resolve()):
            for part in (*reversed(path.parents), path):
                if part not in seen and not part.stat().st_mode & 0o001:
                    yield str(part)
                seen.add(part)


# --------------------------------------------------------------------------- checks


def check_image(facts: Facts, image: Image) -> list[Finding]:
    """Check an image; return the findings, each with the name of its check."""
    if image.plugin:  # the checks of variables depend on the network that the image is made for
        facts = replace(facts, adapters=facts.adapters or (Adapter("efa", driver="efa"),))
    release = replace(facts.measured, nccl=parse_version(image.nccl))
    results: dict[str, Iterator[Finding]] = {
        "torch": _check_torch(facts, image),
        "nccl": check_nccl(replace(facts, measured=release)),
        "plug-in (EFA)": _check_plugin(facts, image),
        "libfabric (EFA)": _check_libfabric(facts, image),
        "copies (EFA)": check_copies(facts),
        "extras": _check_extras(image),
        "compiler": _check_compiler(image),
        "command": _check_command(image),
        "user": _check_user(image),
        "mount points (SageMaker)": _check_mount_points(image),
        "variables": check_variables(facts),
        "shared memory": _check_shm(facts),
    }
    return [replace(finding, check=name) for name, found in results.items() for finding in found]


def _check_torch(facts: Facts, image: Image) -> Iterator[Finding]:
    for observation, remedy in untested_versions(facts.torch, facts.python):
        yield warning(observation, remedy)
    observation = f"torch {facts.torch or 'is missing'}, Python {facts.python}"
    if not facts.cuda:
        observation += ", built without CUDA" if facts.torch else ""
        yield bad(observation, "pip install torch, from an index with CUDA builds")
        return
    driver = next(iter(minimum_driver(facts.cuda)), None)
    observation += f", CUDA {facts.cuda}, NCCL {image.nccl or '?'}"
    yield ok(f"{observation}; the node needs NVIDIA's driver {driver or '?'} or newer")


def _check_plugin(facts: Facts, image: Image) -> Iterator[Finding]:
    """Check NCCL's plug-in for EFA, without which NCCL silently uses TCP."""
    if not image.plugin and not facts.ofi_plugin:
        remedy = "install EFA's software as in docker/Dockerfile, unless the image is not for AWS"
        yield warning("no aws-ofi-nccl: NCCL uses TCP between instances of AWS", remedy)
    elif not image.plugin:
        directory = facts.ofi_plugin_paths[0] if facts.ofi_plugin_paths else "its directory"
        observation = (
            f"aws-ofi-nccl is in {directory}, but NCCL does not find {PLUGIN}: it uses TCP"
        )
        remedy = f"echo {directory} >/etc/ld.so.conf.d/efa.conf && ldconfig"
        yield bad(observation, remedy)
    elif image.unresolved:
        observation = f"{image.plugin} lacks {', '.join(image.unresolved)}: NCCL uses TCP"
        yield bad(observation, "install it: libhwloc15, or all of EFA's software in this stage")
    else:
        yield ok(f"aws-ofi-nccl {facts.ofi_plugin or '?'}: {image.plugin}")


def _check_libfabric(facts: Facts, image: Image) -> Iterator[Finding]:
    """Check libfabric's provider for EFA, and its access to GPU memory."""
    if not image.plugin and not facts.ofi_plugin:
        return
    installer = f", EFA installer {facts.efa_installer}" if facts.efa_installer else ""
    if not image.providers:
        remedy = "add /opt/amazon/efa/bin to PATH, and install EFA's software there"
        yield warning("no fi_info, so libfabric's providers are unknown", remedy)
    elif not re.search(r"^efa:", image.providers, re.MULTILINE):
        remedy = "use libfabric of the EFA installer, and remove others"
        yield bad("libfabric has no provider efa: NCCL uses TCP", remedy)
    else:
        fabric = re.search(r"libfabric: (\S+)", facts.libfabric)
        yield ok(f"libfabric {fabric[1] if fabric else '?'} with the provider efa{installer}")
    if facts.cuda and not image.cuda_runtime:
        observation = f"libfabric does not find {CUDA_RUNTIME}: no GPUDirect RDMA, so NCCL uses TCP"
        release = "-".join(facts.cuda.split(".")[:2])
        yield bad(observation, f"apt-get install cuda-cudart-dev-{release} && ldconfig")


def _check_extras(image: Image) -> Iterator[Finding]:
    complete = [extra for extra, names in image.missing.items() if not names]
    absent = [extra for extra, names in image.missing.items() if names]
    for extra, use in EXTRA_USES.items():
        if extra in absent:
            names = ", ".join(image.missing[extra])
            yield warning(f"no {extra} ({names} missing): {use}", f"pip install 'weft[{extra}]'")
    others = [extra for extra in absent if extra not in EXTRA_USES]
    observation = f"with {', '.join(complete) or 'none'}"
    yield ok(observation + (f"; without {', '.join(others)}" if others else ""))


def _check_compiler(image: Image) -> Iterator[Finding]:
    lacking = [] if image.compiler else ["a C compiler"]
    lacking += [] if image.has_python_headers else ["Python's headers"]
    if lacking:
        observation = f"no {' and no '.join(lacking)}: torch.compile and Triton fail"
        yield warning(observation, "apt-get install build-essential python3-dev")
    else:
        yield ok(f"{image.compiler}, with Python's headers")


def _check_command(image: Image) -> Iterator[Finding]:
    """Check that every user of the image can start weft, and that jobs can start bash."""
    if not image.shell:
        yield bad("no bash, with which jobs start", "apt-get install bash")
    if not image.python:
        remedy = "put the environment of weft first into PATH"
        yield warning("python does not import weft: SageMaker starts weft with python -m", remedy)
    if not image.command:
        yield bad("weft is not on the PATH", "ENV PATH=/opt/weft/bin:$PATH, or where it is")
    elif image.private:
        observation = f"only the owner may use {', '.join(image.private)}"
        remedy = "install outside /root: Pyxis, Apptainer and most pods run as another user"
        yield warning(observation, remedy)
    else:
        yield ok(f"{image.command}, for every user")


def _check_user(image: Image) -> Iterator[Finding]:
    if not image.temporary:
        yield bad("no writable directory for temporary files", "mount one, and set TMPDIR")
    observation = f"{image.user or 'a user without a name'}, temporary files in {image.temporary}"
    if not image.home:
        remedy = "set XDG_CACHE_HOME and HF_HOME to a writable directory, or data.cache_dir"
        yield note(f"{observation}; the cache in the home directory is not writable", remedy)
    elif image.temporary:
        yield ok(f"{observation}, cache in {image.home}")


def _check_mount_points(image: Image) -> Iterator[Finding]:
    if image.mount_points:
        names = ", ".join(image.mount_points)
        observation = f"the image has {names}: a job that mounts a file system there is refused"
        yield warning(observation, f"rmdir {' '.join(image.mount_points)}")


def _check_shm(facts: Facts) -> Iterator[Finding]:
    """Note a small /dev/shm: the cluster sets its size, and not the image."""
    for finding in check_shm(facts):
        yield finding if finding.severity == "ok" else replace(finding, severity="note")
