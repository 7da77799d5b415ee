"""Control characters in what is printed: shown, never obeyed.

Paths, names of tensors, lines of data and messages of other programs reach the terminal inside of
weft's own sentences.  A terminal obeys some of what they may contain: it moves the cursor, changes
its title, or hides what was written.  So everything that a process of weft prints passes
`escape_controls`, in one of two places: `escaping_stream` around stdout and stderr, and the console
of `weft.monitor.terminal`, whose own cursor movements pass it by.
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
    r"""Return ``text`` with control characters as ``\x1b`` or ``\u202e``; tab and newline stay."""
    return CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def is_one_line(text: str) -> bool:
    """Return True if ``text`` has neither control characters nor bytes that are not UTF-8."""
    return escape_controls(text) == text and "\n" not in text and "\t" not in text


class EscapingStream:
    """A text stream that escapes control characters; in all else it is the stream ``raw``."""

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        """Write ``text`` escaped; return how many characters of it were taken."""
        self.raw.write(escape_controls(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write every line escaped."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def escaping_stream(stream: TextIO) -> TextIO:
    """Wrap ``stream`` so that it escapes control characters; once is enough."""
    if isinstance(stream, EscapingStream):
        return cast(TextIO, stream)
    return cast(TextIO, EscapingStream(stream))


def raw_stream(stream: TextIO) -> TextIO:
    """Return the stream under `escaping_stream`, for weft's own movements of the cursor."""
    return stream.raw if isinstance(stream, EscapingStream) else stream
