"""Train large language models with PyTorch, on one CPU or hundreds of GPUs."""

# `__init__.pyi` has the types.  Every import of weft runs this file, so it imports nothing heavy:
# a name of the Python interface is imported from `weft.api` when it is first used.

import importlib

from weft.version import __version__ as __version__

__all__ = [
    "InvalidConfig",
    "TrainingFailed",
    "WeftError",
    "compare",
    "generate",
    "launch",
    "load_model",
    "load_text_model",
    "open_run",
    "plan",
    "train",
    "verify",
]


def __getattr__(name: str) -> object:
    """Import a name of the Python interface."""
    if name not in __all__:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    value = getattr(importlib.import_module("weft.api"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the names of the interface, also those that are not imported yet."""
    return sorted({*globals(), *__all__})
