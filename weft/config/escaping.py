"""Text for terminals, with control characters escaped.

weft prints paths, names of tensors, lines of data and messages of other programs.  Control
characters in them could move the cursor, change the title of the terminal, or hide text.  So all
output of a weft process passes `escape_controls`, in one of two places: `escaping_stream` wraps
stdout and stderr, and the console of `weft.monitor.terminal` escapes all but its cursor movements.
"""

from __future__ import annotations

import re
from typing import Any, TextIO, cast

# C0 without tab and newline, DEL, C1, separators of lines, marks that turn the direction of text,
# and halves of surrogate pairs, which stand for bytes that are not UTF-8.
CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def escape_controls(text: str) -> str:
    r"""Escape control characters except tab and newline, as ``\x1b`` or ``\u202e``."""
    return CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def is_one_line(text: str) -> bool:
    """Return True if ``text`` is valid UTF-8 without control characters."""
    return escape_controls(text) == text and "\n" not in text and "\t" not in text


class EscapingStream:
    """A text stream that escapes control characters, and otherwise behaves as ``raw``."""

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        """Write ``text`` escaped; return its length."""
        self.raw.write(escape_controls(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write every line escaped."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def escaping_stream(stream: TextIO) -> TextIO:
    """Wrap ``stream`` to escape control characters, unless it already does."""
    if isinstance(stream, EscapingStream):
        return cast(TextIO, stream)
    return cast(TextIO, EscapingStream(stream))


def raw_stream(stream: TextIO) -> TextIO:
    """Return the stream that `escaping_stream` wrapped, for moving the cursor."""
    return stream.raw if isinstance(stream, EscapingStream) else stream
