"""Values of options: types for argparse, and checks that add to a list of errors."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from weft.config.errors import ConfigErrors, WeftError

MAX_TOKENS = 10**18
TOKEN_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
DURATION_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def count(text: str) -> int:
    """Parse an integer of at least 0."""
    if not text.isdecimal() or int(text[:20]) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 0")
    return int(text)


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    if (number := count(text)) == 0:
        raise argparse.ArgumentTypeError("0 is not an integer of at least 1")
    return number


def step_or_best(text: str) -> int | str:
    """Parse the step of a checkpoint, or best."""
    if text == "best":
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a step nor 'best'")
    return count(text)


def add_step(add: Callable[..., object]) -> None:
    """Add the option that selects a checkpoint of a run."""
    text = "step of the checkpoint, or best: that with the best value of checkpoint.best (default: "
    add("--step", type=step_or_best, help=text + "the newest)")


def not_negative(text: str) -> float:
    """Parse a number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def local_path(text: str) -> Path:
    """Parse the path of a file or directory of this machine; it need not exist."""
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is a URL; name a local path")
    if "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} contains a null character")
    path = Path(text)
    try:
        if path.is_dir():
            os.stat(path / ".")  # fails if files in it cannot be opened
    except OSError as error:
        from weft.config.files import describe_cause

        reason = describe_cause(error)
        raise argparse.ArgumentTypeError(f"{text!r} cannot be opened: {reason}") from error
    return path


def directory(text: str) -> Path:
    """Parse a directory, or the URL of an object store."""
    from weft.config.storage import open_directory

    if "://" not in text:
        return local_path(text)
    return open_directory(text)


def model_location(text: str) -> str | Path:
    """Parse a model: a name on the Hub, a directory, or the URL of an object store."""
    from weft.planning.model_config import HUB_NAME

    if HUB_NAME.fullmatch(text) and not Path(text).exists():
        return text
    return directory(text)


def run_path(text: str) -> Path:
    """Parse a run directory, which its job.toml may name, or a checkpoint."""
    from weft.config.run_paths import run_directory

    return run_directory(local_path(text))


def parse_integer(name: str, text: str, low: int, high: int, errors: ConfigErrors) -> int:
    """Parse an option's integer; if it is not in [low, high], add an error."""
    if text.isdecimal() and len(text) < 10 and low <= int(text) <= high:
        return int(text)
    errors.add(name, f"must be an integer between {low} and {high}", value=text)
    return low


def parse_tokens(text: str, errors: ConfigErrors) -> int:
    """Parse the number of tokens of a run, such as 15T; if it is none, add an error."""
    scale = TOKEN_UNITS.get(text[-1:].upper(), 1)
    value = _parse_number(text if scale == 1 else text[:-1]) * scale
    if not 1 <= value <= MAX_TOKENS:
        rule, remedy = "is not a number of tokens", "write it as 15T, 300B or 1.5e12"
        errors.add("--tokens", rule, remedy, value=text)
        return 1
    return round(value)


def parse_duration(name: str, text: str, errors: ConfigErrors) -> float:
    """Parse a time, such as 3h, into seconds; if it is none, add an error."""
    seconds = _parse_number(text[:-1]) * DURATION_UNITS.get(text[-1:], 0)
    if not 0 < seconds < float("inf"):
        rule, remedy = "is not a time with its unit", "write it as 30m, 3h or 2d"
        errors.add(name, rule, remedy, value=text)
        return 1.0
    return seconds


def parse_days(text: str, errors: ConfigErrors) -> float:
    """Parse the days of a run; if it is no number above 0, add an error."""
    days = _parse_number(text)
    if not 0 < days < float("inf"):
        errors.add("--days", "is not a number of days above 0", "write it as 30", value=text)
        return 1.0
    return days


def _parse_number(text: str) -> float:
    """Parse a decimal number; return NaN for anything else."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def check_file(option: str, path: Path, errors: ConfigErrors) -> None:
    """Add an error to ``errors`` if an option's file cannot be created."""
    if not path.parent.is_dir():
        rule, remedy = "is in a directory that does not exist", "create the directory first"
        errors.add(option, rule, remedy, value=str(path))
    elif path.is_dir():
        errors.add(option, "is a directory", "name a file in it", value=str(path))
    elif path.exists() and not path.is_file():
        errors.add(option, "is a pipe or a device", "name a file", value=str(path))


def write_file(path: Path, content: str | bytes) -> None:
    """Write the file of an option atomically.

    Raises:
        WeftError: if the file cannot be written.
    """
    from weft.config.files import replace_bytes

    try:
        replace_bytes(path, content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise WeftError(f"{path}: cannot be written: {error.strerror}") from error
