"""Run a command of ``weft``, and turn its errors into messages and an exit status.

Each module ``*_command`` has one command, and each ``*_commands`` a few close ones: the function
``add_NAME`` adds the command to the parser, and ``run_NAME`` runs it with its options.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable
from textwrap import indent
from typing import NoReturn

import weft
from weft.cli.chat_command import add_chat
from weft.cli.checkpoint_commands import add_export, add_import, add_rollback
from weft.cli.command_parser import CommandParser, Commands
from weft.cli.compare_command import add_compare
from weft.cli.completion_command import add_completion
from weft.cli.data_commands import add_data
from weft.cli.doctor_command import add_doctor
from weft.cli.evaluate_command import add_evaluate
from weft.cli.generate_command import add_generate
from weft.cli.help_command import add_help
from weft.cli.launch_commands import add_job, add_launch
from weft.cli.plan_command import add_plan
from weft.cli.recipe_command import add_recipe
from weft.cli.recipes_command import add_recipes
from weft.cli.run_commands import add_diff, add_hang, add_report
from weft.cli.schema_command import add_schema
from weft.cli.train_command import add_train
from weft.cli.verify_command import add_verify
from weft.config.errors import InvalidConfig, WeftError
from weft.config.escaping import escaping_stream, is_one_line
from weft.config.exit_statuses import FAILED, INTERRUPTED, USAGE_ERROR
from weft.config.files import describe_cause
from weft.version import __version__

GROUPS: dict[str, tuple[Callable[[Commands], None], ...]] = {
    "Train": (add_train, add_launch, add_job),
    "Before a run": (
        add_recipes,
        add_recipe,
        add_plan,
        add_verify,
        add_compare,
        add_data,
        add_doctor,
    ),
    "Use a model": (add_chat, add_generate, add_evaluate, add_import, add_export),
    "Explain and repair a run": (add_report, add_diff, add_hang, add_rollback),
    "Help": (add_help, add_completion, add_schema),
}

# Errors of the machine's files rather than of weft; any other OSError shows its traceback.
MACHINE_ERRORS = {errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.EIO}
MACHINE_ERRORS |= {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE, errno.EMFILE}


def build_parser() -> CommandParser:
    """Return the parser of all commands, in the order of the help."""
    parser = CommandParser(prog="weft", description=weft.__doc__)
    parser.add_argument("--version", action="version", version=f"weft {__version__}")
    commands = parser.add_commands()
    for title, functions in GROUPS.items():
        for add in functions:
            add(commands)
        earlier = {name for names in parser.groups.values() for name in names}
        parser.groups[title] = [name for name in commands.choices if name not in earlier]
    return parser


was_interrupted = threading.Event()


def interrupt(number: int, frame: object) -> NoReturn:
    """Handle a signal as Ctrl-C; a library may replace the exception."""
    was_interrupted.set()
    raise KeyboardInterrupt


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    if sys.stdout is None:  # closed by the parent process; the ranks inherit it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.set_inheritable(1, True)
        sys.stdout = os.fdopen(1, "w")
    sys.stdout, sys.stderr = escaping_stream(sys.stdout), escaping_stream(sys.stderr)
    try:
        directory = os.getcwd()
    except FileNotFoundError:
        print("weft: the working directory has been removed", file=sys.stderr)
        return USAGE_ERROR
    if not is_one_line(directory):
        rule = "has control characters, or bytes that are not UTF-8, in its path"
        print(f"weft: the working directory {directory!a} {rule}", file=sys.stderr)
        print("  start weft in another directory, or rename this one", file=sys.stderr)
        return USAGE_ERROR
    if directory not in sys.path:
        sys.path.append(directory)  # for the user's module:attribute
    is_rank = "RANK" in os.environ  # which its launcher ends
    words = sys.argv[1:] if argv is None else argv
    if argv is None and not is_rank and words[:1] != ["train"]:
        # As Ctrl-C, so that a command deletes its incomplete files.  'weft train' has handlers of
        # its own; until it installs them, SIGTERM must end it with a status that is requeued.
        signal.signal(signal.SIGTERM, interrupt)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
            signal.signal(signal.SIGINT, interrupt)
    try:
        parser = build_parser()
        if not words:
            parser.print_help()
            return 0
        options = parser.parse_args(words, argparse.Namespace(words=words, parser=parser))
        return options.function(options) or 0
    except InvalidConfig as error:
        number = len(error.errors)
        print(f"weft: {number} problem{'s' * (number != 1)}, nothing was started:", file=sys.stderr)
        print(indent(str(error), "  "), file=sys.stderr)
        return USAGE_ERROR
    except WeftError as error:
        print(f"weft: {error}", file=sys.stderr)
        return FAILED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # as in 'weft ... | head'
        return FAILED
    except OSError as error:
        if error.errno not in MACHINE_ERRORS or not error.filename:
            raise
        print(f"weft: {error.filename}: {describe_cause(error)}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        if not is_rank:
            print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception:
        if not was_interrupted.is_set():
            raise
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
