"""Train large language models with PyTorch, on one CPU or hundreds of GPUs."""

# `__init__.pyi` has the types.  Every import of weft runs this file, so it imports nothing heavy:
# a name of the Python interface is imported from `weft.api` when it is first used.

import importlib
import sys
from types import ModuleType

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

_PACKAGES = ("train", "plan")  # functions of the interface that are packages, too


def __getattr__(name: str) -> object:
    """Import a name of the Python interface."""
    if name not in __all__:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    if name in _PACKAGES:
        return importlib.import_module(f"weft.{name}")
    value = getattr(importlib.import_module("weft.api"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the names of the interface, also those that are not imported yet."""
    return sorted({*globals(), *__all__})


class CallablePackage(ModuleType):
    """A package that can be called, as the function of `weft.api` with its name."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Call the function."""
        return self._function(*args, **kwargs)

    @property
    def _function(self):  # type: ignore[no-untyped-def] # __init__.pyi has the types
        return getattr(importlib.import_module("weft.api"), self.__name__.removeprefix("weft."))

    @property
    def __signature__(self):  # type: ignore[no-untyped-def]
        """Signature of the function, for editors and notebooks."""
        return importlib.import_module("inspect").signature(self._function)


def make_callable(package: str) -> None:
    """Make the package ``weft.train`` or ``weft.plan`` a function, too."""
    sys.modules[package].__class__ = CallablePackage
