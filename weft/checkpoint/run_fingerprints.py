"""Fingerprints of the files that a model needs beside its checkpoints.

The weights alone are no model: its tokenizer, its chat template, and the keys of its architecture
are in other files of the run directory.  Each checkpoint's manifest has the fingerprints of these
files, and they are compared wherever a checkpoint is read.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

import xxhash

from weft.checkpoint.manifest import DamagedCheckpoint, list_checkpoints, read_manifest
from weft.config.errors import ConfigError
from weft.config.run_paths import JOB_FILE
from weft.config.schema import Job
from weft.data.document_tokens import IMPORTED_DIR, RECORD_FILE
from weft.data.token_store import TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from weft.models.hf_mapping import TRAINING_KEYS
from weft.planning.model_config import resolve_section

# Files that weft writes at each start of a run, from its data.
DATA_FILES = (TOKENIZER_FILE, TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, RECORD_FILE)
REFERENCES = "references-*.npy"  # only training reads them: see `weft.training.reference_logprobs`
MODEL, ADAPTERS = f"{JOB_FILE} [model]", f"{JOB_FILE} [lora]"
# Keys of [lora] that change what the trained adapters compute.
ADAPTER_KEYS = ("rank", "alpha", "rank_stabilized", "targets", "dora")


def fingerprint_run(run_dir: Path, job: Job, has_trained: bool) -> dict[str, str]:
    """Return the fingerprints of a run's files, and of sections of its job, by name.

    Args:
        run_dir: the run directory.
        job: its job.
        has_trained: include the adapters' section, which may change before the first step.
    """
    paths = [
        *(run_dir / name for name in DATA_FILES),
        *sorted((run_dir / IMPORTED_DIR).glob("*")),
        *sorted(run_dir.glob(REFERENCES)),
    ]
    files = {str(path.relative_to(run_dir)): path for path in paths if path.is_file()}
    found = {name: hash_content(path.read_bytes()) for name, path in files.items()}
    return found | _fingerprint_job(job, has_trained)


def recorded_fingerprints(directory: Path) -> dict[str, str]:
    """Return the fingerprints in the newest intact manifest; empty without any."""
    for path in reversed(list_checkpoints(directory)):
        try:
            return dict(read_manifest(path).get("run_files", {}))
        except DamagedCheckpoint:
            continue  # loading reports it
    return {}


def check_run_files(
    checkpoint: Path, run_dir: Path, job: Job, to_train: bool = False
) -> list[ConfigError]:
    """Compare a run's files with the fingerprints in a checkpoint's manifest.

    Args:
        checkpoint: the checkpoint; an earlier version of weft wrote no fingerprints into it.
        run_dir: the run directory.
        job: content of its job.toml.
        to_train: training reads the files: it writes those of `DATA_FILES` that are missing.

    Returns:
        An error for each file that is missing or has changed.

    Raises:
        CheckpointError: if the manifest cannot be read.
    """
    recorded: Mapping[str, str] = read_manifest(checkpoint).get("run_files", {})
    sections = _fingerprint_job(job, has_trained=True)
    errors = []
    for name, fingerprint in recorded.items():
        if name in (MODEL, ADAPTERS):
            if sections.get(name, fingerprint) != fingerprint:
                section = name.removeprefix(JOB_FILE).strip()
                rule = f"was saved with other keys in {section} of {run_dir / JOB_FILE}"
                errors.append(ConfigError("checkpoint", str(checkpoint), rule, "restore that file"))
            continue
        file = run_dir / name
        if Path(name).match(REFERENCES):
            continue
        if not file.is_file():
            if to_train and _is_written(file, name, job):
                continue
            rule = f"was saved with {file}, which is missing"
        elif hash_content(file.read_bytes()) != fingerprint:
            rule = f"was saved with another {file}: its content has changed"
        else:
            continue
        remedy = "; or ".join(_remedies(file, name, fingerprint, job))
        errors.append(ConfigError("checkpoint", str(checkpoint), rule, remedy))
    return errors


def _remedies(file: Path, name: str, fingerprint: str, job: Job) -> Iterator[str]:
    """Yield ways to get the file back."""
    sources = [Path(job.model.path) / file.name] if job.model.path else []
    if name == TOKENIZER_FILE:
        sources.append(Path(job.data.tokenizer))
    for source in sources:
        if source != file and source.is_file() and hash_content(source.read_bytes()) == fingerprint:
            yield f"copy it from its source: {shlex.join(['cp', str(source), str(file)])}"
            return
    yield "restore the file from a backup or from a copy of the run"
    if _is_written(file, name, job):
        command = shlex.join(["weft", "train", str(file.parent)])
        first = "delete it, and " if file.exists() else ""
        yield f"{first}{command} writes it from the data again"


def _is_written(file: Path, name: str, job: Job) -> bool:
    """Return True if training writes the file from the run's data."""
    return name in DATA_FILES and Path(job.data.tokenizer) != file


def _fingerprint_job(job: Job, has_trained: bool) -> dict[str, str]:
    """Return the fingerprints of the keys that change what the weights compute.

    Keys with their defaults do not count, so that a new key changes no fingerprint.
    """
    config, errors = resolve_section(job.model)
    if config is None or errors:
        return {}
    values = config.model_dump(mode="json", exclude_defaults=True, exclude={*TRAINING_KEYS})
    found = {MODEL: _hash_json([job.model.kind, values])}
    if has_trained:
        adapters = {name: getattr(job.lora, name) for name in ADAPTER_KEYS}
        tables = {"modules_to_save": job.lora.modules_to_save, "token_ids": job.lora.token_ids}
        adapters |= {name: value for name, value in tables.items() if value}
        found[ADAPTERS] = _hash_json(adapters if job.lora.has_adapters else {})
    return found


def _hash_json(value: object) -> str:
    return hash_content(json.dumps(value, sort_keys=True).encode())


def hash_content(content: bytes) -> str:
    """Return the fingerprint of a file's content."""
    return xxhash.xxh3_128_hexdigest(content)
