"""The plan, the machine and the epochs of a run, in its directory."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from weft.config.accelerators import GPU
from weft.config.files import write_json
from weft.config.schema import RunSection
from weft.data.dataset import Dataset
from weft.data.loader import Mixture
from weft.planning.plan import Plan
from weft.training.machine import detect_machine, device_names, find_accelerator
from weft.version import PACKAGE_DIR, __version__


def write_plan(run_dir: Path, plan: Plan) -> None:
    """Write ``plan.json``, and ``environment.json`` with software and hardware."""
    run_dir.mkdir(parents=True, exist_ok=True)
    values = json.loads(plan.to_json())
    del values["run_dir"]  # the directory may be moved
    write_json(run_dir / "plan.json", values, indent=2)
    environment: dict[str, Any] = {
        "weft": __version__,
        "torch": torch.__version__,
        GPU: getattr(torch.version, GPU, None),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "devices": device_names(),
        "memory_gib": _memory_gib(plan.device),
        "git": git_commit(),
    }
    write_json(run_dir / "environment.json", environment, indent=2)


def _memory_gib(device: str) -> float | None:
    """Return the memory of one accelerator or of the host; None if there is none."""
    if device not in ("cpu", find_accelerator()):
        return None
    return (detect_machine(RunSection(device=device)).memory_bytes or 0) / 2**30


def git_commit() -> str | None:
    """Return the commit of weft's checkout, with '-dirty' if it has changes.

    None if weft is installed as a package, or git is not available.
    """
    checkout = PACKAGE_DIR.parent
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return result.stdout.strip() or None


# Up to this number of epochs, repeated data are worth nearly as much as new data: Muennighoff et
# al., "Scaling Data-Constrained Language Models", arXiv:2305.16264.
MAX_EPOCHS = 4.0


def count_epochs(
    plan: Plan, dataset: Dataset, mixture: Mixture
) -> Iterator[tuple[str, int, float]]:
    """Yield each source's name, number of sequences, and epochs in the whole run.

    Args:
        plan: the plan of the run.
        dataset: its dataset.
        mixture: the training sequences of the dataset.
    """
    num_needed = plan.num_steps * plan.global_batch_size
    for source, sequences in zip(dataset.sources, mixture.sources, strict=True):
        name = source.name if dataset.shares else Path(source.store.manifest.source).name
        yield name, len(sequences), source.share * num_needed / max(1, len(sequences))


def epoch_warnings(plan: Plan, dataset: Dataset, mixture: Mixture) -> Iterator[str]:
    """Yield a warning for every source with more than `MAX_EPOCHS` epochs."""
    has_epochs = bool(plan.job.train.epochs)
    length = "train.epochs" if has_epochs else "train.steps or train.global_batch_size"
    for name, count, epochs in count_epochs(plan, dataset, mixture):
        if epochs > MAX_EPOCHS:
            yield (
                f"the run sees {name} {epochs:,.1f} times (epochs): it has {count:,} sequences of "
                f"{plan.seq_len:,} tokens, and {epochs * count:,.0f} are trained on. From "
                f"about {MAX_EPOCHS:g} epochs on repeated data teach less and less. Use more "
                f"text, a smaller {length}"
                + (", or a smaller weight in data.mixture." if dataset.shares else ".")
            )
