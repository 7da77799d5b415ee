"""The process of `weft.api.child`: ``python -m weft.api CONNECTION PARENT``."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection

from weft.config.errors import WeftError
from weft.config.escaping import escaping_stream
from weft.config.exit_statuses import INTERRUPTED
from weft.monitor.process import die_with_parent, exit_process
from weft.monitor.signals import STOP_SIGNALS


def main() -> None:
    """Call the function that the parent names, and send the result."""
    die_with_parent(int(sys.argv[2]))
    sys.stdout, sys.stderr = escaping_stream(sys.stdout), escaping_stream(sys.stderr)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.default_int_handler)
    connection = Connection(int(sys.argv[1]))
    answer: tuple[str, object]
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        function, args = connection.recv()
        sys.path.append(os.getcwd())  # for module:attribute names, as in weft.cli.main
        from weft.api import tasks

        answer = ("result", getattr(tasks, function)(*args))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        answer = ("exit", INTERRUPTED)
    except SystemExit as exit:
        answer = ("exit", exit.code)
    except WeftError as error:
        answer = ("error", error)
    except Exception:
        answer = ("error", WeftError(f"unexpected error\n{traceback.format_exc()}"))
    connection.send(answer)
    exit_process(0)


if __name__ == "__main__":
    main()
