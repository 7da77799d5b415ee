"""Write the files of a run directory before its ranks start."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from weft.checkpoint.manifest import CheckpointError, list_checkpoints, read_manifest
from weft.checkpoint.owner import write_owner
from weft.config.files import replace_bytes, replace_text
from weft.config.locks import unwritable_error
from weft.config.reader import find_recipe, read_job
from weft.config.run_paths import portable
from weft.config.schema import DataSection, Job, replace
from weft.config.storage import remove
from weft.config.writer import to_toml
from weft.data.dataset import Dataset
from weft.data.document_tokens import IMPORTED_DIR, RECORD_FILE, format_record
from weft.data.token_store import TEMPLATE_FILE, TOKENIZER_CONFIG_FILE
from weft.monitor.device_memory import RunPrediction, save_prediction
from weft.monitor.event_log import note_event
from weft.planning.plan import Plan
from weft.preparation.job_checks import describe_changes
from weft.training.early_stopping import read_early_stop
from weft.training.state import checkpoint_dir


def write_run_files(
    plan: Plan, base: Job, recipe: str, dataset: Dataset, prediction: RunPrediction | None
) -> str:
    """Write a run's job, tokenizer and prediction, and finish interrupted deletions.

    The files of a complete run stay as they are: they say what it was trained with.  Only the
    directory of its checkpoints may change, which every command reads from ``job.toml``.

    Returns:
        The keys that changed since the last start: see `describe_changes`.
    """
    job, run_dir = plan.job, plan.run_path
    path, home = run_dir / "job.toml", checkpoint_dir(job.checkpoint, run_dir)
    step = intact_checkpoint_step(list_checkpoints(home)[-1:])
    try:
        # Of a process that was killed after the last save.
        for leftover in home.glob(".tmp-step-*-deleted"):
            with suppress(FileNotFoundError):  # another node deletes it, too
                remove(leftover)
        if path.exists() and (step >= plan.num_steps or read_early_stop(home, job)):
            _write_data_files(run_dir, job.data, dataset, only_missing=True)
            _record_checkpoint_dir(job, recipe, run_dir)
            return ""
        if changes := describe_changes(run_dir, job):
            note_event(run_dir, "change", step, changes.removeprefix("; "))
        # A run that is started from its own job.toml keeps the differences recorded there.
        own = find_recipe(recipe)
        is_own_recipe = own is not None and path.exists() and path.samefile(own)
        earlier = path.read_text("utf-8-sig") if is_own_recipe else ""
        stored, stored_base = portable(job, run_dir), portable(base, run_dir)
        replace_text(path, to_toml(stored, recipe, stored_base, earlier))
        if not job.resilience.has_replica_groups:
            write_owner(home, run_dir, plan.world_size > plan.local_world_size)
        _write_data_files(run_dir, job.data, dataset)
        save_prediction(prediction, run_dir)
    except OSError as error:
        raise unwritable_error(run_dir, error) from error
    return changes


def _record_checkpoint_dir(job: Job, recipe: str, run_dir: Path) -> None:
    """Change only ``checkpoint.dir`` in the ``job.toml`` of a run."""
    path, home = run_dir / "job.toml", checkpoint_dir(job.checkpoint, run_dir)
    old, _, errors = read_job(str(path))
    if errors or str(checkpoint_dir(old.checkpoint, run_dir)) == str(home):
        return
    before, place = portable(old, run_dir), portable(job, run_dir).checkpoint.dir
    stored = replace(before, checkpoint={"dir": place})
    replace_text(path, to_toml(stored, recipe, before, path.read_text("utf-8-sig")))
    if not job.resilience.has_replica_groups:
        write_owner(home, run_dir)


def _write_data_files(
    run_dir: Path, data: DataSection, dataset: Dataset, only_missing: bool = False
) -> None:
    """Write the files of the tokenizer from the data into a run directory."""
    start = dataset.start_tokens
    is_imported = (run_dir / IMPORTED_DIR).is_dir()
    if start == [] and not is_imported and not data.keeps_documents:
        start = [dataset.separator]  # all that the model has seen before a document
    files = {
        "tokenizer.json": (dataset.path / "tokenizer.json").read_bytes(),
        RECORD_FILE: format_record(dataset.separator, start).encode(),
    }
    for source in dataset.sources:
        for name in (TEMPLATE_FILE, TOKENIZER_CONFIG_FILE):
            if (file := source.store.path / name).is_file():
                files[name] = file.read_bytes()
    for name, content in files.items():
        if not (only_missing and (run_dir / name).exists()):
            replace_bytes(run_dir / name, content)


def intact_checkpoint_step(newest: list[Path]) -> int:
    """Return the step of the newest checkpoint; 0: none, or a damaged manifest."""
    try:
        return int(read_manifest(newest[0])["step"]) if newest else 0
    except CheckpointError:
        return 0  # the ranks report the damage when they load it
