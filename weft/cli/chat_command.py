r"""Chat with a trained model in the terminal.

The model answers with the chat template of the run, and remembers the conversation.  A model
without a chat template continues the text instead.

  weft chat runs/tuned
  weft chat runs/tuned --system 'You are a pirate.' --temperature 0.5
  printf 'What is 2 + 2?\nAnd times 3?\n' | weft chat runs/tuned --temperature 0

If stdin is not a terminal, each line is a prompt.  Answers go to stdout, all else to stderr.

commands in the chat:
  /reset          forget the conversation, except the system prompt
  /system TEXT    set the system prompt; without TEXT remove it
  /save FILE      write the conversation as JSON, a line that data.format=chat reads
  /help           list the commands
  /exit           end, as Ctrl-D
  //TEXT          a prompt that begins with /
Ctrl-C stops the answer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from weft.cli.command_parser import Commands, add_command
from weft.cli.generate_command import add_sampling, read_sampling, write_backslashes
from weft.cli.option_values import add_step, run_path
from weft.config.errors import ConfigErrors, InvalidConfig
from weft.config.escaping import raw_stream
from weft.config.files import expand_path
from weft.config.run_paths import absolute_dir

if TYPE_CHECKING:
    from weft.inference.text_model import ChatSession, TextModel
    from weft.training.setup import Rank

PROMPT = "> "


def add_chat(commands: Commands) -> None:
    """Add ``weft chat``."""
    parser = add_command(commands, "chat", run_chat, __doc__)
    parser.add_argument(
        "checkpoint", type=run_path, help="run directory, or directory of a checkpoint"
    )
    add_step(parser.add_argument)
    parser.add_argument("--system", default="", metavar="TEXT", help="system prompt")
    add_sampling(parser)


def run_chat(options: argparse.Namespace) -> int:
    """Read prompts, and stream the model's answers."""
    from weft.inference.inference_model import find_checkpoint, load_model, plan_inference
    from weft.inference.text_model import ChatSession, TextModel
    from weft.supervision.local_ranks import run_on_all_ranks

    errors: ConfigErrors = options.errors
    sampling = read_sampling(options, errors)
    write_backslashes(sys.stdout)
    checkpoint = find_checkpoint(absolute_dir(options.checkpoint), options.step)
    allowed = ["precision.compute_dtype", "run.device", "data.chat_template"]
    job, plan = plan_inference(checkpoint, options.overrides, errors, allowed, for_generation=True)
    template = dict(options.overrides).get("data.chat_template", "auto")

    def run(rank: Rank) -> None:
        model = TextModel(
            load_model(checkpoint, plan, rank), checkpoint, template, job.data.chat_template_args
        )
        session = ChatSession(model, sampling)
        show_start(model)
        if options.system:
            run_command(session, f"/system {options.system}")
        chat(session)

    return run_on_all_ranks(plan, options.words, run)


def show_start(model: TextModel) -> None:
    """Print the model, and that it continues text if it has no chat template."""
    from weft.checkpoint.manifest import checkpoint_step

    checkpoint = model.checkpoint
    notice(f"{checkpoint.run_dir}, step {checkpoint_step(checkpoint.path)}; /help lists commands")
    if model.chat_format is None:
        notice("the model has no chat template: it continues your text instead of answering")


def notice(text: str) -> None:
    """Print a line that is no answer."""
    print(text, file=sys.stderr, flush=True)


def chat(session: ChatSession) -> None:
    """Answer prompts until the end of the input."""
    # A file or pipe gets the generated text unescaped.
    out = sys.stdout if sys.stdout.isatty() else raw_stream(sys.stdout)
    for line in read_lines():
        if line.startswith("/") and not line.startswith("//"):
            if not run_command(session, line):
                return
            continue
        if not line.strip():
            continue
        try:
            for text in session.stream_answer(line.removeprefix("/")):
                print(text, end="", file=out, flush=True)
        except KeyboardInterrupt:
            notice(" (stopped)")
        except InvalidConfig as error:
            notice(f"weft: {error}")
        else:
            print(file=out, flush=True)


def read_lines() -> Iterator[str]:
    """Yield the lines of stdin, with a prompt and a history on a terminal."""
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield line.rstrip("\r\n")
        return
    with suppress(ImportError):
        import readline  # noqa: F401 - input() then edits lines
    while True:
        try:
            yield input(PROMPT)
        except KeyboardInterrupt:
            notice("\nCtrl-D or /exit ends the chat")
        except EOFError:
            notice("")
            return


def run_command(session: ChatSession, line: str) -> bool:
    """Run a command of the chat; return False if it ends the chat."""
    name, _, argument = line.partition(" ")
    argument = argument.strip()
    if name == "/exit":
        return False
    if name == "/reset":
        session.reset()
        notice("the conversation is empty")
    elif name == "/system" and session.is_chat:
        session.set_system(argument)
        notice("the system prompt is set" if argument else "the system prompt is removed")
    elif name == "/system":
        notice("weft: the model has no chat template, so it has no system prompt")
    elif name == "/save" and argument:
        try:
            session.save(expand_path(argument))
            notice(f"saved to {argument}")
        except OSError as error:
            notice(f"weft: {argument} cannot be written: {error}")
    elif name == "/save":
        notice("weft: write /save FILE")
    else:
        _, _, commands = (__doc__ or "").partition("commands in the chat:\n")
        if name != "/help":
            notice(f"weft: {name} is not a command")
        notice(commands.rstrip())
    return True
