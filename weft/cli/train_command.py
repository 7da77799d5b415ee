"""``weft train``."""

from __future__ import annotations

import argparse
import os
import sys

from weft.cli.command_parser import RECIPE_HELP, Commands, add_command
from weft.cli.help_command import list_keys
from weft.config.errors import InvalidConfig
from weft.config.exit_statuses import FAILED, USAGE_ERROR


def add_train(commands: Commands) -> None:
    """Add ``weft train``."""
    summary = "Train a model: start its ranks here, or run as one rank of torchrun, Slurm or MPI."
    text = f"{summary}\n\n{list_keys()}"
    add = add_command(commands, "train", run_train, text).add_argument
    add("recipe", metavar="RECIPE", help=RECIPE_HELP)
    text = "make the checks of a start, except of tokens and downloads; print the plan"
    add("--dry-run", action="store_true", help=text)
    add("--json", action="store_true", help="with --dry-run: print the plan as one JSON object")
    text = "start even if memory is predicted not to suffice, or the tokenizer not to fit"
    add("--force", action="store_true", help=text)


def run_train(options: argparse.Namespace) -> int:
    """Check the configuration, prepare the data, and run the ranks."""
    if "RANK" not in os.environ:  # the launcher reports what torch's C++ warns about
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from weft.conversion.adapter_path import adopt_paths
    from weft.monitor.process import exit_process
    from weft.monitor.terminal import quiet_console
    from weft.preparation.environment import is_log_node
    from weft.preparation.job_checks import prepare_job
    from weft.preparation.secrets import resolve_secrets
    from weft.supervision.rank_exit import TrainingFailed
    from weft.supervision.start import start_training, train_rank
    from weft.training.machine import is_launched_rank

    resolve_secrets()
    if options.json and not options.dry_run:
        options.errors.add("--json", "needs --dry-run", "add --dry-run", value=True)
    base, plan = prepare_job(options.recipe, options.overrides, options.errors, adopt_paths)
    if options.dry_run:
        from weft.conversion.model_import import imports_model
        from weft.planning.plan_text import describe_plan
        from weft.supervision.start import check_start
        from weft.training.machine import detect_machine

        _, warning, source = check_start(plan, options.force, download=False)
        has_weights = source is not None or not imports_model(plan)
        machine = detect_machine(plan.job.run)
        name = options.recipe
        print(plan.to_json() if options.json else describe_plan(plan, machine, name))
        if warning:
            print(f"warning: {warning}", file=sys.stderr)
        print("not checked: the tokens of the data, which the start prepares", file=sys.stderr)
        if not has_weights:
            text = f"not checked: the weights of {plan.job.model.path}, which the start downloads"
            print(text, file=sys.stderr)
        return 0
    if is_launched_rank():
        try:
            status = train_rank(base, plan, options.recipe, options.force)
        except BaseException as error:  # it is in the rank's report
            status = USAGE_ERROR if isinstance(error, InvalidConfig) else FAILED
        exit_process(status)
    console = quiet_console(sys.stdout, quiet=not is_log_node(os.environ))
    try:
        return start_training(base, plan, options.recipe, console, options.force)
    except TrainingFailed as failure:
        print(f"weft: {failure}", file=sys.stderr)
        return failure.status
