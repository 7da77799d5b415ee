"""Let PyTorch believe in one CUDA device without memory, in this process.

`load_guard` comes first, before torch is imported; `fake_cuda` then is a context.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from unittest.mock import patch

if TYPE_CHECKING:
    from tests.fake_cuda.capture import StreamClock

SOURCE = Path(__file__).with_name("guard.cpp")
CAPABILITY = (9, 0)  # of a Hopper GPU
TORCH_LIBRARIES = ("libc10.so", "libtorch_cpu.so")


def torch_directory() -> Path:
    """Return the directory of torch without importing it."""
    spec = importlib.util.find_spec("torch")
    return Path(str(spec and spec.origin)).parent


def compile_guard() -> Path:
    """Compile `guard.cpp` for the installed torch, once, and return the library."""
    version = (torch_directory() / "version.py").read_bytes()
    name = hashlib.sha256(SOURCE.read_bytes() + version).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft" / "fake-cuda"
    library = cache / f"guard-{name}.so"
    if not library.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as directory:
            made = Path(directory) / "guard.so"
            include = torch_directory() / "include"
            options = ["-O1", "-std=c++20", "-fPIC", "-shared", f"-I{include}"]
            command = [os.environ.get("CXX", "g++"), *options, str(SOURCE), "-o", str(made)]
            subprocess.run(command, check=True, timeout=300)
            made.replace(library)
    return library


def load_guard() -> None:
    """Load the guard; torch must not have been imported."""
    assert "torch" not in sys.modules, "load the guard before torch is imported"
    library = compile_guard()
    libraries = torch_directory() / "lib"
    # The guard finds the symbols of these libraries only if they are global.
    for path in (*sorted(libraries.glob("libgomp*")), *map(libraries.joinpath, TORCH_LIBRARIES)):
        ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library)).install()


class Stream:
    """A stream on which nothing runs.

    Attributes:
        clock: receives the order of streams, if somebody counts it.
    """

    clock: ClassVar[StreamClock | None] = None

    def __init__(self, *args: Any, **options: Any) -> None:
        import torch

        self.device, self.device_index, self.stream_id = torch.device("cuda", 0), 0, 0
        self.device_type = 1  # CUDA, in c10/core/DeviceType.h; FSDP of torch 2.15 passes it on

    def wait_stream(self, stream: Any) -> None:
        """Note the order."""
        self.wait_event(Event().record(stream))

    def wait_event(self, event: Any) -> None:
        """Note the order."""
        if Stream.clock is not None:
            Stream.clock.wait(self, event.known)

    def record_event(self, event: Any = None) -> Event:
        """Return an event that has happened."""
        return (event or Event()).record(self)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: Any) -> None:
        pass


class Event:
    """An event that has happened."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.known: tuple[int, Counter[int]] = (0, Counter())

    def record(self, stream: Any = None) -> Event:
        """Note what the stream knows; return this event."""
        if (clock := Stream.clock) is not None:
            self.known = clock.record(stream or clock.current[-1])
        return self

    def wait(self, stream: Any = None) -> None:
        """Note the order."""
        if (clock := Stream.clock) is not None:
            clock.wait(stream or clock.current[-1], self.known)

    def query(self) -> bool:
        """Return True."""
        return True


def make_generator() -> Any:
    """Return the random state of the device, which nothing reads."""
    import torch

    class Generator(torch.Generator):
        """Inductor accepts only instances of torch's class."""

        device = torch.device("cuda", 0)

    for name in ("clone_state", "manual_seed", "get_state", "set_state"):
        setattr(Generator, name, lambda self, *args: self)
    for name in ("graphsafe_get_state", "graphsafe_set_state"):
        setattr(Generator, name, lambda self, *args: self)
    return Generator()


@contextmanager
def fake_cuda(mode: Any, count_wait: Callable[[], None]) -> Iterator[None]:
    """Replace what a step calls of ``torch.cuda``, and factories of CUDA tensors.

    Args:
        mode: the fake tensor mode, in which factories run if their device is "cuda".
        count_wait: called for each wait of the host.
    """
    import torch
    import torch.distributed as dist
    import torch.utils._device as constructors

    constructors._device_constructors()  # caches torch's own factories, before they are replaced
    main, state = Stream(), torch.zeros(0)

    def wait(*args: Any) -> None:
        count_wait()

    streams: list[Any] = [main] if Stream.clock is None else Stream.clock.current
    streams[:] = [main]

    @contextmanager
    def use_stream(stream: Any) -> Iterator[None]:
        streams.append(stream or streams[-1])
        try:
            yield
        finally:
            streams.pop()

    cuda: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "stream": use_stream,
        "current_stream": lambda *args: streams[-1],
        "default_stream": lambda *args: main,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "is_initialized": lambda: True,
        "set_device": lambda *args: None,
        "get_device_capability": lambda *args: CAPABILITY,
        "get_rng_state": lambda *args: state,
        "set_rng_state": lambda *args: None,
        "default_generators": (make_generator(),),
        "synchronize": wait,
    }
    no_mode = torch._C._TorchDispatchModeKey.FAKE

    def in_mode(factory: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **options: Any) -> Any:
            device = options.get("device")
            is_cuda = device is not None and torch.device(device).type == "cuda"
            if is_cuda and torch._C._get_dispatch_mode(no_mode) is None:
                with mode:
                    return factory(*args, **options)
            return factory(*args, **options)

        return make

    with ExitStack() as stack:
        for name, value in cuda.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        for kind in (Stream, Event):
            stack.enter_context(patch.object(kind, "synchronize", wait, create=True))
        for name in ("empty", "zeros", "ones", "full", "tensor", "arange", "empty_strided"):
            stack.enter_context(patch.object(torch, name, in_mode(getattr(torch, name))))
        for name in ("get_rng_state", "set_rng_state"):
            stack.enter_context(patch.object(torch, name, lambda *args: None))
        stack.enter_context(patch.object(dist, "is_nccl_available", lambda: True))
        yield
