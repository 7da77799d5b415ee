"""Runs without training: a checkpoint of random weights, in milliseconds."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

import weft
from tests.small import Overrides, small_job
from weft.checkpoint.manifest import checkpoint_path
from weft.checkpoint.weight_files import Weight, write_weights_checkpoint
from weft.config.schema import replace
from weft.config.writer import to_toml
from weft.models import load_family
from weft.models.hf_mapping import param_shapes
from weft.planning.model_config import resolve_model


def random_run(directory: Path, store: Path, *overrides: tuple[str, str]) -> Path:
    """Create a run directory with one checkpoint."""
    all_overrides: Overrides = [
        ("model.tied_embeddings", "false"),
        *overrides,
        ("run.dir", str(directory)),
    ]
    job = replace(small_job(*all_overrides), data={"path": str(store)})
    config, errors = resolve_model(job.model.kind, job.model.preset, job.model.overrides())
    assert not errors
    generator = torch.Generator().manual_seed(1)

    def random_rows(name: str, shape: torch.Size) -> Iterator[torch.Tensor]:
        if name.endswith("norm.weight"):
            yield torch.full(shape, 1.5)
        else:
            yield 0.3 * torch.randn(shape, generator=generator)

    weights = {
        name: Weight(shape, partial(random_rows, name, shape))
        for name, shape in param_shapes(load_family(job.model.kind), config).items()
    }
    manifest = {"step": 0, "samples": 0, "mesh": {}, "weft": weft.__version__, "torch": ""}
    directory.mkdir()
    write_weights_checkpoint(
        checkpoint_path(directory / "checkpoints", 0), weights, manifest, lambda completed: None
    )
    (directory / "job.toml").write_text(to_toml(job, "demo", job))
    shutil.copy(store / "tokenizer.json", directory)
    return directory
