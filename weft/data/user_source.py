"""Documents that a function of the user's makes: ``data.path = "module:function"``.

The function takes nothing and gives rows in the same order every time: texts, or mappings with the
fields that ``data.text_field`` and its like name.  Its file belongs to the identity of what is prepared;
what it reads elsewhere does not, and is taken to stay as it is.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_hexdigest

from weft.config.errors import ConfigError, InvalidConfig, suggest
from weft.config.reader import lookup
from weft.data.source_files import File

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def is_own(path: str) -> bool:
    """Whether a path is a function's name; a file that is called like one goes first."""
    return _NAME.fullmatch(path) is not None and not Path(path).exists()


def own_set(path: str) -> File:
    """The function, as a file, whose version is the content of the one that it is written in.

    Raises:
        InvalidConfig: it cannot be imported, or is no function.
    """
    function = _function(path)
    try:
        source = inspect.getsourcefile(function)
    except TypeError:  # not written by itself, as a partial; or built in
        source = getattr(sys.modules[path.partition(":")[0]], "__file__", None)
    content = Path(source).read_bytes() if source else b""
    return File(path, path, 0, xxh3_128_hexdigest(content))


def own_rows(file: File, columns: Sequence[str], after: int = 0) -> Iterator[dict[str, Any]]:
    """Those of the columns that there are, of the rows after the first ``after`` ones.

    Raises:
        InvalidConfig: what the function raises, or a row that is neither text nor a mapping.
    """
    number = 0
    try:
        rows: Iterable[Any] = _function(file.path)()
        for number, row in enumerate(rows, 1):
            if number <= after:
                continue
            if isinstance(row, str):
                yield {columns[0]: row}
                continue
            if not isinstance(row, Mapping):
                rule = f"row {number}: is a {type(row).__name__}, neither text nor a mapping"
                raise InvalidConfig([ConfigError("data.path", file.path, rule)])
            present = {name: row[name] for name in columns if name in row}
            if not present:
                rule = f"row {number}: has no field {' or '.join(map(repr, columns))}"
                remedy = suggest(columns[0], list(row))
                raise InvalidConfig([ConfigError("data.path", file.path, rule, remedy)])
            yield present
    except InvalidConfig:
        raise
    except Exception as error:  # whatever the user's function raises
        rule = f"after row {number}: {type(error).__name__}: {error}"
        raise InvalidConfig(
            [ConfigError("data.path", file.path, rule, "mend the function")]
        ) from error


def _function(path: str) -> Any:
    try:
        found: Any = lookup(path, {})
    except LookupError as error:
        rule, remedy = str(error), "its folder must be the current one, or on PYTHONPATH"
        raise InvalidConfig([ConfigError("data.path", path, rule, remedy)]) from error
    if not callable(found):
        raise InvalidConfig([ConfigError("data.path", path, "is no function")])
    return found
