"""Build and register the device ``hostdev``."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

SOURCE = Path(__file__).with_name("device.cpp")
NAME = "hostdev"
ROOT = Path(__file__).parent.parent.parent


def torch_directory() -> Path:
    """Return the directory of torch without importing it."""
    spec = importlib.util.find_spec("torch")
    return Path(str(spec and spec.origin)).parent


def build() -> Path:
    """Compile `device.cpp` for the installed torch, once, and return the library."""
    torch, python = torch_directory(), sysconfig.get_paths()["include"]
    content = SOURCE.read_bytes() + (torch / "version.py").read_bytes() + sys.version.encode()
    name = hashlib.sha256(content).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft" / NAME
    library = cache / name / f"{NAME}_library.so"
    if not library.is_file():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as directory:
            made = Path(directory) / library.name
            includes = [torch / "include", torch / "include/torch/csrc/api/include", python]
            command = [os.environ.get("CXX", "g++"), "-O1", "-std=c++20", "-fPIC", "-shared"]
            command += ["-fvisibility=hidden", f"-DTORCH_EXTENSION_NAME={NAME}_library"]
            command += [*(f"-I{path}" for path in includes), str(SOURCE), "-o", str(made)]
            command += [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"]
            subprocess.run(command, check=True, timeout=600)
            made.replace(library)
    return library


def entry_point(directory: Path) -> dict[str, str]:
    """Write the entry point of a package that registers the device; return the environment."""
    build()
    info = directory / f"{NAME}-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n")
    text = f"[torch.backends]\n{NAME} = tests.accelerator.device:register\n"
    (info / "entry_points.txt").write_text(text)
    path = os.pathsep.join([str(directory), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path.strip(os.pathsep)}


def register() -> None:
    """Register the device in this process, before anything uses an accelerator."""
    import torch
    import torch.distributed as dist

    spec = importlib.util.spec_from_file_location(f"{NAME}_library", build())
    assert spec is not None
    assert spec.loader is not None
    library: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module(library))
    torch.utils.generate_methods_for_privateuse1_backend()

    def create_backend(store: Any, rank: int, size: int, timeout: Any) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_default_device()]
        options._timeout = timeout
        return library.wrap_gloo(dist.ProcessGroupGloo(store, rank, size, options))

    dist.Backend.register_backend("hostccl", create_backend, devices=[NAME])


def _device_module(library: Any) -> ModuleType:
    """Return ``torch.hostdev``: the functions that PyTorch expects of a device's module."""
    import torch

    module: Any = ModuleType(f"torch.{NAME}")

    def index_of(device: Any = None) -> int:
        index = torch.device(NAME, device).index if isinstance(device, int) else None
        if device is not None and not isinstance(device, int):
            index = torch.device(device).index
        return torch.accelerator.current_device_index() if index is None else index

    def stream(device: Any = None, priority: int = 0, **options: Any) -> torch.Stream:
        return torch.Stream(torch.device(NAME, index_of(device)), priority=priority, **options)

    functions: dict[str, Any] = {
        "is_available": lambda: library.device_count() > 0,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": library.device_count,
        "current_device": torch.accelerator.current_device_index,
        "set_device": lambda device: torch.accelerator.set_device_index(index_of(device)),
        "get_device_name": lambda device=None: "Host Device",
        "synchronize": lambda device=None: None,
        "Stream": stream,
        "Event": lambda **options: torch.Event(NAME, **options),
        "current_stream": lambda device=None: torch.accelerator.current_stream(index_of(device)),
        "stream": lambda stream: stream,
        "manual_seed": lambda seed: library.default_generator(index_of()).manual_seed(seed),
        "manual_seed_all": lambda seed: [
            library.default_generator(i).manual_seed(seed) for i in range(library.device_count())
        ],
        "get_rng_state": lambda device=NAME: library.default_generator(
            index_of(device)
        ).get_state(),
        "set_rng_state": lambda state, device=NAME: library.default_generator(
            index_of(device)
        ).set_state(state),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module
