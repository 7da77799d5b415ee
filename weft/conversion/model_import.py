"""Import the weights of ``model.path`` into a run, before its ranks start.

The import is that of ``weft import``: a checkpoint of step 0, and the model's tokenizer and chat
template.  One process imports, under a lock; after an interruption the next start imports again.  A
run that has a checkpoint never reads ``model.path`` again.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from weft.checkpoint.manifest import list_checkpoints
from weft.checkpoint.weight_files import Weight, open_weights
from weft.config.errors import ConfigError, ConfigErrors, InvalidConfig
from weft.config.files import expand_path
from weft.config.locks import hold_lock
from weft.config.schema import POSITION_KEYS, ModelSection, replace
from weft.config.storage import is_remote
from weft.conversion.adapter_path import locate_adapter
from weft.conversion.hf_convert import COMPANION_FILES, path_exists
from weft.conversion.hf_import import (
    ModelSource,
    add_adapter,
    grow_source,
    open_hf_source,
    write_imported,
)
from weft.conversion.hf_weights import zeros_weight
from weft.conversion.peft_export import open_merged
from weft.conversion.peft_import import open_adapter
from weft.data.document_tokens import IMPORTED_DIR
from weft.data.prepare import show_progress
from weft.data.token_store import TEMPLATE_FILE, TOKENIZER_CONFIG_FILE
from weft.inference.inference_model import find_base_checkpoint, find_checkpoint, is_mtp_weight
from weft.models.hf_mapping import SCORE_HEAD, TRAINING_KEYS, param_shapes
from weft.parallel.initialization import init_params
from weft.planning.model_config import (
    NO_MTP,
    expand_preset,
    locate_model,
    model_name,
    resolve_section,
    with_rows,
)
from weft.planning.plan import Plan
from weft.planning.vocabulary import new_tokens
from weft.training.state import checkpoint_dir

SCORE = "score.weight"


def imports_model(plan: Plan) -> bool:
    """Return True if the start of a run imports the weights of ``model.path``."""
    home = checkpoint_dir(plan.job.checkpoint, plan.run_path)
    return bool(plan.job.model.path) and not list_checkpoints(home)


def open_source(plan: Plan, force: bool = False) -> ModelSource | None:
    """Open the model that a run imports; None if there is none to import.

    ``force``: accept a tokenizer that is far smaller than the vocabulary of the model.

    Raises:
        InvalidConfig: with every reason why the import is impossible.
    """
    if not imports_model(plan):
        return None
    path, home = plan.job.model.path, checkpoint_dir(plan.job.checkpoint, plan.run_path)
    errors = ConfigErrors()
    directory = locate_model(path, with_weights=True)
    with_mtp = plan.job.model.overrides().get("mtp_layers") != 0
    if (directory / "job.toml").is_file():
        source: ModelSource | None = _open_run(directory, path, with_mtp)
    else:
        source = open_hf_source(directory, path, force, errors, with_mtp)
    errors.raise_any()
    assert source is not None
    tokens = new_tokens(plan.job.data)
    source = source._replace(new_tokens=tokens if any(tokens) else None)
    if isinstance(rows := plan.job.model.overrides().get("vocab_size"), int):
        source = grow_source(source, with_rows(source.section, rows))
    if plan.lora.path:
        directory = locate_adapter(plan.lora.path)
        adapter = open_adapter(directory, plan.family, plan.model, errors)
        errors.raise_any()
        assert adapter is not None
        if any(getattr(plan.lora, name) != each for name, each in adapter.section.items()):
            rule = "is not the adapter of this run any more: its configuration has changed"
            errors.add("lora.path", rule, "use another run.dir", value=plan.lora.path)
        source = add_adapter(source, adapter, plan.lora)
        if Path(plan.job.data.tokenizer) == (file := directory.absolute() / "tokenizer.json"):
            source = source._replace(
                files={**source.files, "tokenizer.json": file}, new_tokens=tokens
            )
    beside = [*TRAINING_KEYS, *POSITION_KEYS]  # may differ from the source's
    if plan.has_score_head:
        beside += SCORE_HEAD
        source = _with_score_head(source, plan)
    chosen = {k: v for k, v in plan.job.model.overrides().items() if k in beside}
    section = ModelSection.model_validate(source.section.model_dump() | chosen)
    notes = (source.note, *_describe_positions(source.section, section))
    source = source._replace(
        section=section,
        weights=_with_loads(source.weights, plan),
        note="\n".join(filter(None, notes)),
    )
    if section.overrides() != plan.job.model.overrides():
        rule = "is not the model of this run any more: its configuration has changed"
        errors.add("model.path", rule, "use another run.dir", value=path)
    if not is_remote(home):
        above = next(parent for parent in (home, *home.parents) if parent.exists())
        if (free := shutil.disk_usage(above).free) < source.num_bytes:
            rule = f"needs {source.num_bytes:,} bytes, but its disk has only {free:,} free"
            errors.add("run.dir", rule, "use another disk, or free space", value=plan.run_dir)
    errors.raise_any()
    return source._replace(name=model_name(path))


def _describe_positions(read: ModelSection, used: ModelSection) -> list[str]:
    """Return a sentence for each key of positions that differs from the model's.

    The user sets such a key, or the model has changed since the run was planned, perhaps on another
    machine.  A job does not say which, so the import names both values.
    """
    before, after = resolve_section(read)[0], resolve_section(used)[0]
    if before is None or after is None:
        return []
    pairs = [(k, getattr(before, k, None), getattr(after, k, None)) for k in POSITION_KEYS]
    return [
        f"model.{key} is {chosen} in this run and {own} in the model"
        for key, own, chosen in pairs
        if chosen != own
    ]


def _with_score_head(source: ModelSource, plan: Plan) -> ModelSource:
    """Return the source with a score head, maybe a new one, in place of its lm_head."""
    if SCORE in source.weights:
        return source
    weights = {name: w for name, w in source.weights.items() if not name.startswith("lm_head.")}
    head = torch.empty(1, plan.model.dim)
    init_params([(SCORE, head)], plan.seed, lambda name: plan.family.get_init(name, plan.model))
    weights[SCORE] = Weight(head.shape, lambda first=0, stop=None: iter((head[first:stop],)))
    note = "the score head is new, with random weights"
    return source._replace(
        weights=weights,
        num_bytes=4 * sum(weight.shape.numel() for weight in weights.values()),
        note="\n".join(filter(None, (source.note, note))),
    )


def _with_loads(weights: dict[str, Weight], plan: Plan) -> dict[str, Weight]:
    """Return the weights with zeros as the loads of routers with a global loss."""
    shapes = param_shapes(plan.family, plan.model).items()
    loads = {n: zeros_weight(shape) for n, shape in shapes if n.endswith(".excess_load")}
    return {n: w for n, w in weights.items() if not n.endswith(".excess_load")} | loads


def _open_run(run_dir: Path, path: str, with_mtp: bool) -> ModelSource:
    """Open the newest checkpoint of a weft run, with its adapters merged.

    ``with_mtp``: with its layers of multi-token prediction.

    Raises:
        InvalidConfig: if the run has no checkpoint.
    """
    checkpoint = find_checkpoint(run_dir)
    base = find_base_checkpoint(checkpoint)
    weights = open_merged(checkpoint, base) if base else open_weights(checkpoint.path)
    names = ["tokenizer.json", TEMPLATE_FILE, TOKENIZER_CONFIG_FILE]
    names += [f"{IMPORTED_DIR}/{name}" for name in COMPANION_FILES]
    section = expand_preset(checkpoint.job).model.model_copy(update={"path": path})
    if not with_mtp:
        section = ModelSection.model_validate(section.model_dump() | NO_MTP)
        weights = {n: w for n, w in weights.items() if not is_mtp_weight(n, checkpoint.config)}
    num_bytes = 4 * sum(weight.shape.numel() for weight in weights.values())
    files = {name: run_dir / name for name in names if path_exists(run_dir / name)}
    return ModelSource(run_dir.name, section, weights, num_bytes, ["F32"], files, "")


def import_source(plan: Plan, source: ModelSource | None, console: Console) -> Plan:
    """Import a source of `open_source`; return the plan of the imported run.

    Processes of several nodes may call this at once: one imports.
    """
    if source is None:
        return plan
    job, run_dir = plan.job, plan.run_path
    tokenizer = run_dir / "tokenizer.json"
    if Path(job.data.tokenizer) == source.files["tokenizer.json"].absolute():
        job = replace(job, data={"tokenizer": str(tokenizer)})
    else:  # the run's own tokenizer takes the place of the model's
        given = {"tokenizer.json": expand_path(job.data.tokenizer)}
        source = source._replace(files={**source.files, **given})
    home = checkpoint_dir(job.checkpoint, run_dir)

    def wait() -> None:
        console.print("waiting for another process that imports the model")

    with hold_lock(run_dir / ".import", wait), show_progress(console) as show:
        if not list_checkpoints(home):
            write_imported(run_dir, home, source, job, show)
            note = f"\n{source.note}" if source.note else ""
            text = f"imported {job.model.path}: {source.summary}{note}"
            console.print(text, soft_wrap=True, markup=False)
    return dataclasses.replace(plan, job=job)


def import_on_rank_0(
    plan: Plan, console: Console, group: dist.ProcessGroup, force: bool = False
) -> Plan:
    """Import the model on rank 0 of ranks that another launcher started; a collective."""
    result: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            plan = import_source(plan, open_source(plan, force), console)
        except InvalidConfig as error:
            result = [error.errors]
    dist.broadcast_object_list(result, 0, group=group)
    if result[0]:
        errors: list[ConfigError] = result[0]
        raise InvalidConfig(errors)
    return plan
