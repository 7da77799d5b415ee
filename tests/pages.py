"""Run the commands of a page of docs/ in order, and compare their output with what the page quotes.

On a page that runs, a code block is one of:

- a file: its first line has a language and a name, as in ``toml mine.toml``;
- commands: no language; each command begins with ``$ ``, and the lines below it quote its output;
- output without its command: ``text``.

A comment at the end of a command has a meaning: ``# needs GPUs`` says why the command is only
parsed here, ``# exit status 1`` which status is expected.  A quoted line must occur in the output,
in order; ``...`` stands for any text, and one number for any other, since times and rounding differ
between machines.  The commands of `EXACT` print the same on every machine, so their numbers count.

``python -m tests.pages PAGE`` prints each command with its real output, to be quoted.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.cli.main import build_parser
from weft.data.stories import stories
from weft.data.tokenizer_training import train_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDS = re.compile(r"  # needs (.+)$")
STATUS = re.compile(r"  # (?:.*; )?exit status (\d)$")
NUMBER = re.compile(r"(?<![A-Za-z])[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?")
EXACT = re.compile(r"weft plan |weft compare .*--plan-only")


class Command(NamedTuple):
    """A command of a page, with what the page says about it."""

    line: str
    quoted: list[str]
    needs: str
    status: int


def commands_of(text: str) -> list[Command]:
    commands: list[Command] = []
    for info, block in BLOCK.findall(text):
        if info:
            continue
        assert block.startswith("$ "), f"no command, and no language such as text: {block}"
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                needs, status = NEEDS.search(line), STATUS.search(line)
                plain = re.sub(r"  +# .*$", "", line[2:]).strip()
                about = (needs[1] if needs else "", int(status[1]) if status else 0)
                commands.append(Command(plain, [], *about))
            elif line.strip():
                commands[-1].quoted.append(line.strip())
    return commands


def write_files(text: str, directory: Path) -> None:
    """Write the files that the page shows."""
    for info, block in BLOCK.findall(text):
        _, _, name = info.partition(" ")
        if name:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(block, "utf-8")


# --------------------------------------------------------------------------- inputs

CAPITALS = {"France": "Paris", "Peru": "Lima", "Japan": "Tokyo", "Kenya": "Nairobi"}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HUB_MODELS = {"Qwen/Qwen3-0.6B": "Qwen3", "meta-llama/Llama-3.2-1B-Instruct": "Llama"}


def chats() -> list[list[dict[str, str]]]:
    return [
        [
            {"role": "user", "content": f"Question {number}: the capital of {country}?"},
            {"role": "assistant", "content": capital},
        ]
        for number in range(40)
        for country, capital in CAPITALS.items()
    ]


def build_tokenizer(
    texts: Iterable[str], special: Sequence[str], end: str, template: str
) -> PreTrainedTokenizerFast:
    """Train a tokenizer of transformers with a chat template."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    tokenizer = train_tokenizer(texts, 320)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, chat_template=template
    )


def tiny_model(family: str, tokenizer: PreTrainedTokenizerFast, **sizes: Any) -> PreTrainedModel:
    """Return a tiny model of transformers with random weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        eos_token_id=tokenizer.eos_token_id,
        **sizes,
    )
    model: PreTrainedModel = getattr(transformers, f"{family}ForCausalLM")(config)
    return model


def write_inputs(directory: Path, hub: Path) -> None:
    """Write the files that a reader of the pages has, and tiny models in place of the Hub's."""
    (directory / "texts").mkdir()
    iterator = stories()
    for number in range(20):
        text = "\n".join(next(iterator) for _ in range(30))
        (directory / "texts" / f"{number:02}.txt").write_text(text, "utf-8")
    (directory / "my-book.txt").write_text("\n".join(next(iterator) for _ in range(600)), "utf-8")
    rows: dict[str, list[Any]] = {
        "chats.jsonl": [{"messages": chat} for chat in chats()],
        "pairs.jsonl": [
            {"prompt": ask["content"], "chosen": answer["content"], "rejected": "Oslo"}
            for ask, answer in chats()
        ],
        "answers.jsonl": [
            {"prompt": ask["content"], "completion": text, "label": text != "Oslo"}
            for ask, answer in chats()
            for text in (answer["content"], "Oslo")
        ],
    }
    for name, values in rows.items():
        lines = "".join(json.dumps(value) + "\n" for value in values)
        (directory / name).write_text(lines, "utf-8")
    texts = (message["content"] for chat in chats() for message in chat)
    tokenizer = build_tokenizer(texts, SPECIAL, "<|im_end|>", TEMPLATE)
    sizes = {"max_position_embeddings": 1024, "tie_word_embeddings": True}
    for name, family in HUB_MODELS.items():
        repository, commit = hub / f"models--{name.replace('/', '--')}", "0" * 40
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(commit)
        for part in (tokenizer, tiny_model(family, tokenizer, **sizes)):
            part.save_pretrained(repository / "snapshots" / commit)


# --------------------------------------------------------------------------- runs


def environment(directory: Path, hub: Path) -> dict[str, str]:
    """Return the environment of a reader in ``directory``: weft of this clone, its own cache."""
    # The commands of a reader's machine, without those of a cluster.
    bin_dir = directory / ".bin"
    bin_dir.mkdir()
    for name in ("bash", "cat", "head", "ls", "tail", "uname"):
        program = shutil.which(name)
        assert program is not None
        (bin_dir / name).symlink_to(program)
    own = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{bin_dir}",
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(directory / ".cache"),
        "HF_HUB_CACHE": str(hub),
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "100",
    }
    return os.environ | own


def start(line: str, directory: Path, variables: dict[str, str]) -> subprocess.Popen[str]:
    """Start a command as a shell would, with its errors in its output."""
    return subprocess.Popen(
        ["bash", "-c", line],
        cwd=directory,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(line: str, directory: Path, variables: dict[str, str], status: int = 0) -> str:
    """Run a command; return its output, and check its status."""
    with start(line, directory, variables) as process:
        try:
            output, _ = process.communicate(timeout=600)
        finally:
            process.kill()
    output = output.replace(str(directory.resolve()), "/home/me/work")
    assert process.returncode == status, f"{line}\n{output}"
    return output


def _simplify(line: str, exact: bool) -> str:
    """Return a line with single spaces, and ``#`` in place of each number unless ``exact``."""
    words = " ".join(line.split())
    return words if exact else NUMBER.sub("#", words)


def find_missing(command: Command, output: str) -> str | None:
    """Return the first quoted line that the output does not have where it should, or None."""
    exact = EXACT.search(command.line) is not None
    lines = iter([_simplify(line, exact) for line in output.splitlines()])
    for quoted in command.quoted:
        if quoted == "...":
            continue
        pattern = re.escape(_simplify(quoted, exact)).replace(re.escape("..."), ".*")
        if not any(re.fullmatch(pattern, line) for line in lines):
            return quoted
    return None


def prepare(path: Path, directory: Path) -> tuple[list[Command], dict[str, str]]:
    """Write the files of a page into a directory; return its commands and their environment."""
    text, hub = path.read_text("utf-8"), directory / ".hub"
    write_inputs(directory, hub)
    write_files(text, directory)
    commands = commands_of(text)
    assert commands, f"{path} has no commands"
    return commands, environment(directory, hub)


def check_page(path: Path, directory: Path) -> dict[str, str]:
    """Run a page in an empty directory, and fail at the first command that does not hold.

    Returns the output of each command.
    """
    commands, variables = prepare(path, directory)
    outputs = {}
    for command in commands:
        if command.needs:
            check_parses(command.line)
            continue
        output = run(command.line, directory, variables, command.status)
        missing = find_missing(command, output)
        assert missing is None, f"{command.line}\nhas no line\n  {missing}\nin\n{output}"
        outputs[command.line] = output
    return outputs


def check_parses(line: str) -> None:
    """Check that weft knows the words of a command that cannot run here."""
    words = shlex.split(line)
    if words[0] == "weft":
        options = build_parser().parse_args(words[1:])
        assert getattr(options, "errors", []) == []


def show(path: Path) -> None:
    """Print each command of a page with its output and seconds."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        commands, variables = prepare(path, directory)
        for command in commands:
            print(f"$ {command.line}", flush=True)
            if command.needs:
                print(f"  (needs {command.needs})")
                continue
            begin = time.monotonic()
            try:
                output = run(command.line, directory, variables, command.status)
            except AssertionError as error:
                print(error)
                break
            print(output, f"  ({time.monotonic() - begin:.1f} s)")
            if missing := find_missing(command, output):
                print(f"  MISSING: {missing}")


if __name__ == "__main__":
    show(Path(sys.argv[1]))
