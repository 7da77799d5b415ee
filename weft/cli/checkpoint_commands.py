"""``weft rollback``, ``weft export`` and ``weft import``: commands on checkpoints."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from weft.cli.command_parser import Commands, add_command
from weft.cli.option_values import (
    add_step,
    directory,
    local_path,
    model_location,
    run_path,
    step_or_best,
)
from weft.config.errors import ConfigErrors, InvalidConfig
from weft.config.formatting import display_path
from weft.config.run_paths import absolute_dir


def add_rollback(commands: Commands) -> None:
    """Add ``weft rollback``."""
    add = add_command(commands, "rollback", run_rollback, takes_keys=False).add_argument
    add("run", metavar="RUN", type=run_path, help="run directory")
    text = "step of the checkpoint, or best (checkpoint.best); 0: from the beginning"
    add("step", type=step_or_best, help=text)


def add_export(commands: Commands) -> None:
    """Add ``weft export``."""
    add = add_command(commands, "export", run_export, takes_keys=False).add_argument
    add("checkpoint", type=run_path, help="run directory, or directory of a checkpoint")
    add("out", metavar="OUT", type=directory, help="new directory, or s3://bucket/prefix")
    add_step(add)
    text = "float32, bfloat16 or float16 (default: the imported model's, else float32)"
    add("--dtype", default="", help=text)
    add("--max-shard", default="5GB", help="maximum file size (default: 5GB)")
    text = "export only the adapters of a LoRA run, as PEFT does"
    add("--adapter", action="store_true", help=text)
    text = "load the export with transformers (and PEFT) in another process, compare it with the "
    text += "run, and write weft-proof.json into it; exit status 1 if they differ"
    add("--prove", action="store_true", help=text)


def add_import(commands: Commands) -> None:
    """Add ``weft import``."""
    add = add_command(commands, "import", run_import, takes_keys=False).add_argument
    text = "name on the Hugging Face Hub; or directory or s3://bucket/prefix with config.json, "
    text += "safetensors and tokenizer.json; or of an adapter that PEFT wrote"
    add("source", metavar="MODEL", type=model_location, help=text)
    add("run_dir", metavar="RUN_DIR", type=local_path, help="new run directory")
    text = "accept a tokenizer far smaller than the model's vocabulary"
    add("--force", action="store_true", help=text)
    text = "base model of an adapter (default: that which the adapter names)"
    add("--base", metavar="MODEL", default="", help=text)
    text = "directory with config.json and tokenizer.json of a model in the format of "
    text += "torch.distributed.checkpoint, as TorchTitan writes it"
    add("--assets", metavar="DIRECTORY", type=local_path, help=text)
    text = "leave out the layers of multi-token prediction"
    add("--no-mtp", action="store_true", help=text)


def run_rollback(options: argparse.Namespace) -> None:
    """Resume a run from an earlier checkpoint.

    later checkpoints no longer count; weft deletes them when the run has passed them
    """
    print(roll_back(absolute_dir(options.run), options.step))


def roll_back(run_dir: Path, step: int | str) -> str:
    """Make a run resume from an earlier step, or its best one; return a message.

    Raises:
        InvalidConfig: if it is not a run, has no such checkpoint, is being trained, or has its
            checkpoints in the directory of another run.
    """
    from weft.checkpoint.best import select_checkpoint
    from weft.checkpoint.manifest import checkpoint_step, list_checkpoints
    from weft.checkpoint.owner import owner_errors
    from weft.checkpoint.rollback import drop_later_checkpoints
    from weft.config.locks import lock_directory, run_dir_in_use
    from weft.records.run_reader import read_run_job
    from weft.training.state import checkpoint_dir

    job = read_run_job(run_dir)
    home = checkpoint_dir(job.checkpoint, run_dir)
    if errors := owner_errors(home, run_dir):
        raise InvalidConfig(errors)
    with lock_directory(run_dir, run_dir_in_use(run_dir)):
        if isinstance(step, str):
            best = select_checkpoint(list_checkpoints(home), step, job.checkpoint)
            step = checkpoint_step(best)
        dropped = drop_later_checkpoints(home, step)
    newest = list_checkpoints(home)[-1:]
    target = f"to resume from {newest[0]}" if newest else "to start from step 1"
    command = f"weft train {shlex.quote(display_path(run_dir))}"
    return f"dropped the checkpoints of steps {dropped}; run {command} {target}"


def run_export(options: argparse.Namespace) -> None:
    """Export a checkpoint as a Hugging Face model directory."""
    from weft.conversion.hf_convert import export_checkpoint
    from weft.data.prepare import show_progress
    from weft.monitor.terminal import quiet_console

    console = quiet_console(sys.stdout)
    with show_progress(console) as show:
        paths = (absolute_dir(options.checkpoint), options.out.absolute())
        sizes = (options.dtype, options.max_shard)
        flags = (options.adapter, options.prove)
        summary = export_checkpoint(*paths, *sizes, show, *flags, step=options.step)
    console.print(summary, soft_wrap=True)


def run_import(options: argparse.Namespace) -> None:
    """Import a Hugging Face model, or an adapter, as a run, to train it further."""
    from weft.checkpoint.distributed_checkpoint import is_distributed_checkpoint
    from weft.config.storage import is_remote
    from weft.conversion.adapter_path import locate_import
    from weft.conversion.dcp_import import convert_checkpoint
    from weft.conversion.hf_convert import check_out
    from weft.conversion.hf_import import import_model
    from weft.data.prepare import show_progress
    from weft.monitor.terminal import quiet_console
    from weft.planning.model_config import locate_model
    from weft.planning.tokenizer_conversion import with_tokenizer

    source = options.source
    if isinstance(source, str):
        source = locate_model(source, with_weights=True, key="MODEL")
    elif not is_remote(source):
        source = with_tokenizer(source, "MODEL", str(source))
    console, errors, path = quiet_console(sys.stdout), ConfigErrors(), ""
    with ExitStack() as stack:
        if not is_remote(source) and is_distributed_checkpoint(source):
            run_dir, path = options.run_dir.absolute(), str(source.absolute())
            check_out(errors, "run_dir", run_dir, 0)
            errors.raise_any()
            above = next(parent for parent in run_dir.parents if parent.exists())
            temporary = tempfile.TemporaryDirectory(prefix=".import-", dir=above)
            converted = Path(stack.enter_context(temporary))
            convert_checkpoint(source, options.assets, converted)
            source = converted
        elif options.assets:
            rule = "is for a directory of torch.distributed.checkpoint"
            errors.add("--assets", rule, "remove it", value=str(options.assets))
            errors.raise_any()
        model, adapter = locate_import(source.absolute(), options.base)
        show = stack.enter_context(show_progress(console))
        paths = (model.absolute(), options.run_dir.absolute())
        summary = import_model(*paths, show, options.force, not options.no_mtp, adapter, path)
    recipe = shlex.quote(str(options.run_dir / "job.toml"))
    command = f"weft train {recipe} --data.path FILE_OR_DIRECTORY"
    console.print(f"{summary}\nnext:  {command}", soft_wrap=True)
