"""``weft recipe``."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from weft.cli.command_parser import Commands, add_command
from weft.cli.option_values import check_file, write_file
from weft.config.errors import ConfigErrors

SUMMARY = "Translate a configuration of another program into a recipe."
HELP = """\
Translate a configuration of TorchTitan, Megatron-LM, DeepSpeed, SMP, axolotl or TRL.

FILE is a TOML of TorchTitan (2024 to 0.2.2; later ones are Python programs); a shell script, an
arguments file or a test's model_config.yaml of Megatron-LM; a YAML of axolotl; a YAML of
LLaMA-Factory, with its dataset_info.json; a ds_config.json of DeepSpeed; the parameters of
SageMaker's model parallelism library v2 as JSON; TrainingArguments, SFTConfig, DPOConfig,
KTOConfig, ORPOConfig or CPOConfig as YAML or JSON; or the config.json of a model.

The recipe's comments say where each key comes from, what was ignored and why, and what weft lacks
with what to use instead.  The same list goes to stderr, without what was ignored.

  weft recipe from llama3_8b.toml --cluster 8x8xH100 -o mine.toml
  weft recipe from train_llama3_8b.sh > mine.toml
  weft plan mine.toml"""


def add_recipe(commands: Commands) -> None:
    """Add ``weft recipe from``."""
    group = commands.add_parser("recipe", help=SUMMARY, description=SUMMARY).add_commands()
    parser = add_command(group, "from", run_recipe_from, HELP, takes_keys=False)
    add = parser.add_argument
    add("file", metavar="FILE", type=Path, help="configuration of another program")
    add("-o", "--output", metavar="FILE", type=Path, help="write the recipe here, not to stdout")
    text = "hardware of the run, such as 8x8xH100: the batch of some programs follows from it"
    add("--cluster", metavar="NxMxNAME", default="", help=text)


def run_recipe_from(options: argparse.Namespace) -> None:
    """Translate one file."""
    from weft.conversion.recipe_translation import (
        parse_cluster_size,
        summarize,
        translate_file,
        write_recipe,
    )

    errors = ConfigErrors()
    cluster = None
    if options.output:
        check_file("--output", options.output, errors)
    if options.cluster:
        with errors.collect():
            cluster = parse_cluster_size(options.cluster)
    errors.raise_any()
    translation = translate_file(options.file, cluster)
    text = write_recipe(translation, options.file.name)
    if options.output:
        write_file(options.output, text)
    else:
        print(text, end="")
    for line in summarize(translation):
        print(line, file=sys.stderr)
    if options.output:
        print(f"next: weft plan {shlex.quote(str(options.output))}", file=sys.stderr)
