"""Check the arguments of the Python interface.

Each function returns a value of the type that its caller needs.  For a value that cannot be one it
adds an error and returns a substitute, so that all mistakes are in one `InvalidConfig`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from weft.config.errors import ConfigErrors, InvalidConfig
from weft.config.files import describe_cause
from weft.config.formatting import to_python

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

MAX_COUNT = 2**63 - 1
MAX_SHOWN = 60  # characters of a value in a message


@dataclass(frozen=True)
class ShownValue:
    """The text of an object that an error names; unlike the object, it can be pickled."""

    text: str

    def __str__(self) -> str:
        return self.text


def show_value(value: object) -> ShownValue:
    """Return a short text of any object, in one line."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # of the object's own code, or a number with too many digits
        text = f"<{type(value).__name__}>"
    return ShownValue(text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}...")


@contextmanager
def argument_names() -> Iterator[None]:
    """Name arguments in errors as in Python: max_tokens, not --max-tokens."""
    try:
        yield
    except InvalidConfig as invalid:
        errors = [
            replace(error, key=error.key[2:].replace("-", "_"))
            if error.key.startswith("--")
            else error
            for error in invalid.errors
        ]
        raise InvalidConfig(errors) from invalid.__cause__


def read_text(name: str, value: object, errors: ConfigErrors) -> str:
    """Return a string."""
    if isinstance(value, str):
        return str(value)
    errors.add(name, "must be a string", value=show_value(value))
    return ""


def read_path(name: str, value: object, errors: ConfigErrors) -> str:
    """Return a path, URL or name."""
    try:
        path = os.fspath(value)  # type: ignore[call-overload]
    except TypeError:
        path = None
    if not isinstance(path, str) or not path:
        rule = "is empty" if path == "" else "must be a string or a path"
        errors.add(name, rule, value=show_value(value))
        return ""
    try:
        os.stat(path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:  # too long, or with a null character
        reason = describe_cause(error) if isinstance(error, OSError) else str(error)
        errors.add(name, f"cannot be opened: {reason}", value=show_value(path))
    return path


def read_paths(name: str, value: object, errors: ConfigErrors) -> list[str]:
    """Return one path or several as a list."""
    if isinstance(value, str | os.PathLike):
        return [read_path(name, value, errors)]
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [read_path(name, item, errors) for item in value]
    rule = "must be a string or a path, or a list of them"
    errors.add(name, rule, value=show_value(value))
    return []


def read_integer(name: str, value: object, low: int, high: int, errors: ConfigErrors) -> int:
    """Return an integer of a range."""
    number = to_python(value)
    if isinstance(number, int) and not isinstance(number, bool) and low <= number <= high:
        return number
    span = f"of at least {low}" if high >= MAX_COUNT else f"between {low} and {high}"
    errors.add(name, f"must be an integer {span}", value=show_value(number))
    return low


def read_step(name: str, value: object, errors: ConfigErrors) -> int | str:
    """Return the step of a checkpoint, or best."""
    number = to_python(value)
    if number == "best":
        return "best"
    if type(number) is int and number >= 0:
        return number
    errors.add(name, "is neither a step nor 'best'", value=show_value(number))
    return 0


def read_number(name: str, value: object, errors: ConfigErrors) -> float:
    """Return a finite number of at least 0."""
    number = to_python(value)
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if is_number and 0 <= number <= 2**63:
        return float(number)
    errors.add(name, "is not a number of at least 0", value=show_value(number))
    return 0.0


def read_flag(name: str, value: object, errors: ConfigErrors) -> bool:
    """Return True or False."""
    flag = to_python(value)
    if isinstance(flag, bool):
        return flag
    errors.add(name, "must be True or False", value=show_value(value))
    return False


def read_optional(
    read: Callable[[str, object, ConfigErrors], T], name: str, value: object, errors: ConfigErrors
) -> T | None:
    """Return None for None, else what ``read`` returns."""
    return None if value is None else read(name, value, errors)


def read_texts(name: str, value: object, errors: ConfigErrors) -> tuple[str, ...]:
    """Return one string or several as a tuple."""
    if isinstance(value, str):
        return (str(value),)
    if isinstance(value, Sequence) and all(isinstance(text, str) for text in value):
        return tuple(value)
    errors.add(name, "must be a string or a list of strings", value=show_value(value))
    return ()


def read_device(name: str, value: object, errors: ConfigErrors) -> torch.device:
    """Return a device of this machine."""
    import torch

    given = to_python(value)
    try:
        if isinstance(given, bool | bytes):
            raise TypeError
        device = torch.device(given)
        torch.empty(0, device=device)
    except Exception:  # PyTorch raises errors of many types
        rule = "is not a device of this machine"
        remedy = "use cpu, or the name of an accelerator of this machine"
        errors.add(name, rule, remedy, value=show_value(value))
        return torch.device("cpu")
    return device
