"""Documents from a Python function of the user: ``data.path = "module:function"``.

The function takes no arguments and returns rows, in the same order in every call: texts, or
mappings with the fields that keys such as ``data.text_field`` name.  The cache key of the prepared
data includes the function's source file, but not the data that the function reads.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_hexdigest

from weft.config.errors import ConfigError, InvalidConfig, lookup, suggest
from weft.data.source_files import File

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def is_user_function(path: str) -> bool:
    """Return True if a path is a function name, and no file has this name."""
    return _NAME.fullmatch(path) is not None and not Path(path).exists()


def user_function_file(path: str) -> File:
    """Return the function as a file, whose version is a hash of its source file.

    Raises:
        InvalidConfig: the function cannot be imported, or is not callable.
    """
    function = _load_function(path)
    try:
        source = inspect.getsourcefile(function)
    except TypeError:  # such as a partial or a builtin
        source = getattr(sys.modules[path.partition(":")[0]], "__file__", None)
    content = Path(source).read_bytes() if source else b""
    return File(path, path, 0, xxh3_128_hexdigest(content))


def read_user_rows(
    file: File, columns: Sequence[str], skip_rows: int = 0
) -> Iterator[dict[str, Any]]:
    """Yield rows after the first ``skip_rows``, with the columns that exist.

    Raises:
        InvalidConfig: the function raises, or a row is neither text nor a mapping.
    """
    number = 0
    try:
        rows: Iterable[Any] = _load_function(file.path)()
        for number, row in enumerate(rows, 1):
            if number <= skip_rows:
                continue
            if isinstance(row, str):
                yield {columns[0]: row}
                continue
            if not isinstance(row, Mapping):
                rule = f"yields a {type(row).__name__} as row {number}, neither text nor a mapping"
                raise InvalidConfig([ConfigError("data.path", file.path, rule)])
            present = {name: row[name] for name in columns if name in row}
            if not present:
                rule = f"yields row {number} without a field {' or '.join(map(repr, columns))}"
                remedy = suggest(columns[0], list(row))
                raise InvalidConfig([ConfigError("data.path", file.path, rule, remedy)])
            yield present
    except InvalidConfig:
        raise
    except Exception as error:  # any type
        rule = f"raises after row {number}: {type(error).__name__}: {error}"
        raise InvalidConfig(
            [ConfigError("data.path", file.path, rule, "fix the function")]
        ) from error


def _load_function(path: str) -> Any:
    try:
        function: Any = lookup(path, {})
    except LookupError as error:
        rule, remedy = str(error), "run in the directory of the module, or add it to PYTHONPATH"
        raise InvalidConfig([ConfigError("data.path", path, rule, remedy)]) from error
    if not callable(function):
        raise InvalidConfig([ConfigError("data.path", path, "is not a function")])
    return function
