"""Run a function in its own process, as a command of the terminal would run.

``weft.train`` starts ranks, handles signals and sets environment variables; ``weft.verify`` forks.
None of that belongs into the process of a notebook or a user's program.  So both run in a new
interpreter, which does not import the user's main module: no ``__main__`` guard is needed.

*Output.*  The process writes to this process's terminal, if ``sys.stdout`` is it.  Otherwise (a
notebook, a redirected ``sys.stdout``) this process forwards the lines.  In a notebook, lines of
progress replace each other.

*Signals.*  The process is in its own session, so only this process can signal it.  This process
forwards stop signals, and handles them itself after the other one has ended: Ctrl-C first saves,
then raises KeyboardInterrupt.
"""

from __future__ import annotations

import codecs
import importlib
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby
from multiprocessing.connection import Connection, Pipe
from typing import IO, Any, TextIO

from weft.config.errors import WeftError
from weft.config.exit_statuses import INTERRUPTED, REQUEUE
from weft.monitor.process import PYTHON
from weft.monitor.signals import STOP_SIGNALS

PROGRESS = re.compile(r"step \d+/\d+  ")
# ipykernel sets them; then rich would draw a bar into the pipe.
COLOR_VARIABLES = ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE")


class Exited(WeftError):
    """The function ended its process with an exit status, without a result."""

    def __init__(self, status: int) -> None:
        is_stop = status in (REQUEUE, INTERRUPTED)
        reason = "was stopped; the same call resumes" if is_stop else f"ended with status {status}"
        super().__init__(f"the process {reason}")
        self.status = status


def run_in_child(function: str, *args: Any) -> Any:
    """Call a function of `weft.api.tasks` in a new process; return its result.

    Args:
        function: its name; only the new process imports it.
        *args: must pickle, as must the result.

    Raises:
        Exited: if the function ended the process.
        KeyboardInterrupt: after Ctrl-C, when the process has ended.
        Exception: what the function raised.
    """
    here, there = Pipe()
    # The process inherits the mask: it receives no stop signal before it handles them.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        with here, _start_process(there) as process, _forward_signals(process) as received:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            with suppress(ConnectionError):  # the process has died
                here.send((function, args))
            answer = _wait(process, here)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _handle_signals(received)
    kind, value = answer
    if kind == "result":
        return value
    raise value if kind == "error" else Exited(value)


@contextmanager
def _start_process(connection: Connection) -> Iterator[subprocess.Popen[bytes]]:
    """Start the process; kill it at the end, if it still runs."""
    is_terminal = _is_process_stream(sys.stdout, 1) and _is_process_stream(sys.stderr, 2)
    output = None if is_terminal else subprocess.PIPE
    dropped = () if is_terminal else COLOR_VARIABLES
    sys.stdout.flush()
    with connection:
        process = subprocess.Popen(
            [*PYTHON, "weft.api", str(connection.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={name: value for name, value in os.environ.items() if name not in dropped},
            pass_fds=[connection.fileno()],
            start_new_session=True,
        )
    with process:
        try:
            yield process
        finally:
            process.kill()


def _is_process_stream(stream: TextIO, number: int) -> bool:
    """Return True if a stream writes to this process's file descriptor."""
    try:
        return type(stream).__module__ == "_io" and stream.fileno() == number
    except (OSError, ValueError):
        return False


# --------------------------------------------------------------------------- signals


@contextmanager
def _forward_signals(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Forward stop signals to the process; yield the list of those received."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # Python handles signals in the main thread alone
        return

    def forward(number: int, frame: object) -> None:
        received.append(number)
        process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in STOP_SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _handle_signals(received: list[int]) -> None:
    """Handle the first signal as if it came now; by default it ends this process."""
    if not received:
        return
    number = received[0]
    if signal.getsignal(number) == signal.SIG_DFL:
        sys.exit(REQUEUE)  # as weft train does
    signal.raise_signal(number)  # by default SIGINT raises KeyboardInterrupt


# --------------------------------------------------------------------------- output


def _wait(process: subprocess.Popen[bytes], connection: Connection) -> tuple[str, Any]:
    """Forward the output of a process until it ends; return its answer."""
    write = _notebook_writer() or _write_text
    answer: tuple[str, Any] | None = None
    with selectors.DefaultSelector() as selector:
        for pipe, stream in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                reader = _LineReader(pipe, partial(write, stream))
                selector.register(pipe, selectors.EVENT_READ, reader)
        selector.register(connection, selectors.EVENT_READ)
        while selector.get_map():
            has_ended = process.poll() is not None
            ready = [key for key, _ in selector.select(0.2)]
            for key in ready:
                if isinstance(key.data, _LineReader):
                    is_open = key.data.read()
                else:
                    is_open, answer = False, _receive(connection)
                if not is_open:
                    selector.unregister(key.fileobj)
            if has_ended and not ready:
                break  # an orphan may keep the pipes open
    return answer or ("exit", process.wait())


def _receive(connection: Connection) -> tuple[str, Any] | None:
    try:
        answer: tuple[str, Any] = connection.recv()
    except EOFError:  # it was killed
        return None
    return answer


class _LineReader:
    """Reader of a pipe that does not block; writes complete lines elsewhere."""

    def __init__(self, pipe: IO[bytes], write: Callable[[str], None]) -> None:
        self._pipe, self._write, self._text = pipe, write, ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self) -> bool:
        """Read the text that has arrived; return False at the end."""
        data: bytes | None = self._pipe.read(1 << 16)
        if data is None:
            return True
        text = self._text + self._decoder.decode(data, not data)
        end = text.rfind("\n") + 1 if data else len(text)
        self._text = text[end:]
        if end:
            self._write(text[:end])
        return bool(data)


def _write_text(stream: TextIO, text: str) -> None:
    stream.write(text)
    stream.flush()


def _notebook_writer() -> Callable[[TextIO, str], None] | None:
    """Return a function that writes lines into a notebook's cell; None elsewhere."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if not hasattr(shell, "kernel"):
        return None
    display = importlib.import_module("IPython.display").display
    handle: Any = None

    def write(stream: TextIO, text: str) -> None:
        nonlocal handle
        lines = text.removesuffix("\n").split("\n")
        for is_progress, group in groupby(lines, lambda line: bool(PROGRESS.match(line))):
            *earlier, last = group
            if not is_progress:
                _write_text(stream, "\n".join([*earlier, last, ""]))
            elif handle is None:
                handle = display({"text/plain": last}, raw=True, display_id=True)
            else:
                handle.update({"text/plain": last}, raw=True)

    return write
