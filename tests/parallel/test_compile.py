"""Compiled blocks: layouts, activation checkpointing modes, one compilation."""

from __future__ import annotations

import functools
import io
import os
import re
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.harness import run_ranks
from tests.parallel.test_layouts import check_any
from tests.small import SMALL, loader_of, plan_here, small_job, this_rank
from weft.data.dataset import open_dataset
from weft.models.decoder import Decoder
from weft.models.families import gemma3
from weft.models.families.llama import PRESETS
from weft.models.layers import NUM_COMPILED_VARIANTS
from weft.monitor.terminal import quiet_console
from weft.parallel.compile import (
    NO_GRAPH_CAPTURED,
    CompileLog,
    apply_compile,
    describe_graph_break,
    find_cache_dir,
)
from weft.parallel.dtensor import to_local
from weft.training.loop import train
from weft.training.setup import build

WEFT = [sys.executable, "-m", "weft"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "layout",
    [
        "activation_checkpoint.mode=full",
        "dp_shard2 activation_checkpoint.mode=selective",
        "dp_shard2 activation_checkpoint.mode=budget",
        "dp_shard2 activation_checkpoint.offload=true",
        "tp2 activation_checkpoint.mode=selective",
        "tp2 activation_checkpoint.mode=full",
        "cp2 activation_checkpoint.mode=full",
        "cp2 cp_method=ulysses activation_checkpoint.mode=full",
        "cp2 activation_checkpoint.mode=selective",
        "cp2 tp2 activation_checkpoint.mode=selective activation_checkpoint.every_n_layers=2",
        "cp2 tp2 activation_checkpoint.mode=full",
        "cp2 pp2 activation_checkpoint.mode=full activation_checkpoint.every_n_layers=2",
        "dp_shard2 model.kind=moe model.preset=toy-moe ep=2 activation_checkpoint.mode=full",
        "dp_shard2 model.kind=moe model.preset=toy-moe ep=2 activation_checkpoint.mode=selective",
        pytest.param(
            "pp2 pipeline.schedule=InterleavedZeroBubble model.kind=moe model.preset=toy-moe "
            "activation_checkpoint.mode=selective",
            id="zero bubble, moe, selective",
        ),
        "pp2 activation_checkpoint.mode=selective activation_checkpoint.every_n_layers=2",
        "dp_shard2 tp2 activation_checkpoint.mode=selective activation_checkpoint.offload=true",
    ],
)
def test_compile_any_layout_equals_one_process(layout: str, store_path: Path) -> None:
    check_any(f"{layout} compile.enable=true", store=store_path)


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("seen")
        return x * 2


def test_compile_graph_break_is_reported(tmp_path: Path) -> None:
    block = Broken()
    apply_compile([block], str(tmp_path))
    with pytest.raises(Exception, match="print") as caught:
        block(torch.ones(3))
    assert "print" in describe_graph_break(caught.value)
    assert "test_compile.py" in describe_graph_break(caught.value)
    assert describe_graph_break(ValueError("no")) == ""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compile_all_blocks_and_later_starts_compile_once(store_path: Path, tmp_path: Path) -> None:
    """Six blocks compile as fast as one, and the second start uses the cache of the first."""

    def compile_seconds(run: str, layers: int) -> list[float]:
        pairs = [
            *SMALL,
            ("run.dir", run),
            ("run.nproc_per_node", "1"),
            ("data.path", str(store_path)),
            ("model.num_layers", str(layers)),
            ("train.steps", "2"),
            ("activation_checkpoint.mode", "full"),
            ("compile.enable", "true"),
            ("compile.cache_dir", str(tmp_path / "cache")),
        ]
        words = [word for key, value in pairs for word in (f"--{key}", value)]
        completed = subprocess.run(
            [*WEFT, "train", "demo", *words], cwd=tmp_path, capture_output=True, text=True
        )
        assert completed.returncode == 0, completed.stderr
        # The loss of an evaluation has other shapes.
        assert not re.search(r"of a block.*again", completed.stdout)
        return [
            float(s) for s in re.findall(r"(?m)pass of a block in ([\d.]+) s$", completed.stdout)
        ]

    first, deep, cached = (
        compile_seconds(run, layers) for run, layers in (("a", 1), ("b", 6), ("c", 6))
    )
    assert len(first) == 2
    # A backward pass that is in the cache is not logged.
    assert max(len(deep), len(cached)) <= 2
    assert sum(cached) < 0.7 * sum(first)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compile_blocks_share_a_graph(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The C++ compiler for inductor on a CPU takes ten seconds."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    model = Decoder(PRESETS["toy"].model_copy(update={"num_layers": 4}))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    messages: list[str] = []
    compile_log = CompileLog(messages.append, enabled=True)
    apply_compile(list(model.layers.values()), str(tmp_path))
    with torch._dynamo.config.patch(suppress_errors=False), torch.no_grad():
        model(torch.zeros(1, 8, dtype=torch.int64))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    compile_log.check(list(model.layers.values()))
    assert not any(NO_GRAPH_CAPTURED in message for message in messages)


def test_compile_training_evaluation_and_prompts_have_enough_variants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of two kinds, with and without gradients, for batches of several sizes."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = Decoder(gemma3.PRESETS["toy"])
    with torch._dynamo.config.patch(recompile_limit=8):  # torch's own
        apply_compile(list(model.layers.values()), str(tmp_path))
        for batch_size, length, trains in product((2, 1), (32, 33, 7), (True, False)):
            with torch.set_grad_enabled(trains):
                model(torch.zeros(batch_size, length, dtype=torch.int64))
    assert 8 < torch._dynamo.utils.counters["stats"]["unique_graphs"] < NUM_COMPILED_VARIANTS


def test_compile_cache_is_of_the_user_and_of_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert find_cache_dir("~/code") == Path.home() / "code"
    path = find_cache_dir("auto")
    assert path.parent == tmp_path
    assert path.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    (tmp_path / f"weft-compile-{os.getuid()}").mkdir()  # by another user
    assert not find_cache_dir("auto").is_relative_to(tmp_path)


def train_with_cp(store: str, directory: str, disabled: bool) -> str:
    """Return the terminal output of a run with compiled blocks, whose graphs break."""
    layout = [
        ("parallel.cp", "2"),
        ("activation_checkpoint.mode", "full"),
        ("compile.enable", "true"),
    ]
    job = small_job(("run.dir", directory), ("train.steps", "2"), *layout)
    output = io.StringIO()
    with torch._dynamo.config.patch(disable=disabled):
        train(plan_here(job), open_dataset(store), this_rank(), quiet_console(output))
    return output.getvalue()


@pytest.mark.parametrize("disabled", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_compile_blocks_not_captured_warns_once(
    disabled: bool, store_path: Path, tmp_path: Path
) -> None:
    """Without fullgraph, as in context parallelism, torch.compile itself reports nothing."""
    run_dir = str(tmp_path / "run")
    output, _ = run_ranks(train_with_cp, 2, str(store_path), run_dir, disabled, timeout=200)
    assert output.count(f"warning: {NO_GRAPH_CAPTURED}") == disabled


def saved_bytes(store: str, cache_dir: str, mode: str) -> int:
    """Return the bytes that compiled blocks under context parallelism save."""
    torch._dynamo.reset()
    job = small_job(
        ("parallel.cp", "2"),
        ("compile.enable", "true"),
        ("compile.cache_dir", cache_dir),
        ("activation_checkpoint.mode", mode),
        ("activation_checkpoint.recompute_every_n_matmuls", "1"),
    )
    plan = plan_here(job)
    built = build(plan, this_rank())
    params = [p for part in built.model_parts for p in part.parameters()]
    weights = {to_local(param).untyped_storage()._cdata for param in params}
    saved: dict[int, int] = {}

    def record(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    batches = loader_of(job, plan, store, built.mesh).get_microbatches(0)
    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        built.train_step.forward_backward(batches)
    return sum(saved.values())


def saved_bytes_by_mode(store: str, cache_dir: str) -> list[int]:
    return [saved_bytes(store, cache_dir, mode) for mode in ("none", "selective", "none")]


@pytest.mark.slow  # half a minute of compiling
def test_compile_parts_save_what_selective_checkpointing_selects(
    store_path: Path, tmp_path: Path
) -> None:
    """With the compiled code of another mode in the cache, too."""
    args = str(store_path), str(tmp_path)
    (none, selective, again), _ = run_ranks(saved_bytes_by_mode, 2, *args, timeout=200)
    assert selective < 0.8 * none  # the head saves as much in both
    assert again == none
