"""Checks by formulas: data, arithmetic, checkpoints, export and inference.

A check is a function that runs in ranks. It calls `expect` with the module of weft that is
faulty if the condition does not hold. The name of a check begins with its stage in the battery.
"""

from __future__ import annotations

import inspect
import itertools
import json
import math
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import chat as chats
from tests.oracle import (
    NONE,
    Rows,
    Updates,
    draw_corpus,
    has_weight_decay,
    log_probs_of,
    logits_of,
    losses_of,
    rate,
)
from tests.oracle_models import build_theirs, grad_of, theirs_of
from tests.small import Overrides, small_job
from weft.checkpoint.load import load_checkpoint
from weft.checkpoint.manager import CheckpointManager
from weft.checkpoint.manifest import list_checkpoints
from weft.checkpoint.state_dict import model_state, optimizer_state, trainable_parameters
from weft.config.axes import AXES
from weft.config.errors import WeftError, lookup
from weft.config.schema import DataSection, Job, LoraSection
from weft.config.writer import to_toml
from weft.data.dataset import Dataset, Source, open_dataset
from weft.data.loader import (
    IGNORE_INDEX,
    LOOKUP_POSITIONS,
    Loader,
    Mixture,
    MixtureSampler,
    Pairs,
    Prefetcher,
    TokenChunks,
    build_mixture,
    evaluation_batches,
    sample_index,
)
from weft.data.packing import pack_best_fit
from weft.data.token_store import TokenStream
from weft.models import load_family
from weft.optim.optimizer import clip_scale, compute_grad_norm, masked_step, set_learning_rate
from weft.planning.model_config import resolve_model
from weft.planning.plan import Machine, Plan
from weft.planning.resolve import resolve
from weft.supervision.local_ranks import run_ranks
from weft.training.setup import Built, Rank, build

FIXTURES = "WEFT_MUTATION_FIXTURES"


class Unexpected(Exception):
    """An expectation of a check does not hold."""

    def __init__(self, text: str, module: str) -> None:
        super().__init__(f"{text} <{module}>")


def expect(holds: Any, text: str, module: str) -> None:
    """Raise `Unexpected` unless the condition holds."""
    if not holds:
        raise Unexpected(text, module)


def is_close(ours: float, theirs: float, relative: float = 1e-9) -> bool:
    """Return True if two numbers are equal up to rounding."""
    return abs(ours - theirs) <= relative * max(abs(theirs), 1e-30)


CHECKS: dict[str, Callable[[str, float], Any]] = {}
SOURCES: dict[str, str] = {}


def check(name: str, ranks: int = 1) -> Callable[[Any], Any]:
    """Register a function, which runs in ranks, as a check."""

    def register(function: Any) -> Any:
        def find(precision: str, timeout: float) -> Any:
            from tests.mutation.battery import read_failure

            try:
                run_ranks(_call, ranks, function.__name__, timeout=timeout)
            except WeftError as error:
                return read_failure(error)
            return None

        CHECKS[name] = find
        SOURCES[name] = inspect.getsource(function)
        return function

    return register


def _call(name: str) -> None:
    globals()[name]()


def fixtures(directory: Path) -> None:
    """Prepare the text without the fault."""
    from tests.conftest import make_store, make_text

    if (directory / "store").exists():
        return
    with tempfile.TemporaryDirectory(dir=directory) as text:
        created = make_store(make_text(Path(text)), directory / "cache")
    with suppress(FileExistsError):  # another process has created the same
        (directory / "store").symlink_to(created)


def store_path() -> Path:
    """Return the path of the prepared text."""
    return Path(os.environ[FIXTURES]).resolve() / "store"


# --------------------------------------------------------------------------- data


@check("unit: order of data")
def check_order() -> None:
    module = "data/loader.py"
    for count in (1, 2, 37, 1000):
        epochs = [sample_index(np.arange(e * count, (e + 1) * count), count, 3) for e in range(3)]
        for epoch in epochs:
            expect(sorted(epoch.tolist()) == list(range(count)), "no permutation", module)
        if count >= 37:
            expect((epochs[0] != epochs[1]).any(), "epochs are in one order", module)
            expect((epochs[1] != epochs[2]).any(), "epochs are in one order", module)
            other = sample_index(np.arange(count), count, 4)
            expect((epochs[0] != other).any(), "the seed does not matter", module)
            drift = abs(np.corrcoef(epochs[0], np.arange(count))[0, 1])
            expect(drift < 4 / math.sqrt(count), "the order is not random", module)
    shares = (0.5, 0.3, 0.2)
    turns = MixtureSampler(shares)
    positions = np.arange(3 * 10_007)
    owner, before = turns.assign(positions)
    for source, share in enumerate(shares):
        local = before[owner == source]
        expect(is_close(len(local) / len(positions), share, 1e-3), "shares of a mixture", module)
        expect(np.array_equal(local, np.arange(len(local))), "turns of a source", module)
        for first in range(0, 10_000, 500):
            part = (owner[first : first + 500] == source).mean()
            expect(abs(part - share) < 0.02, "a source comes in lumps", module)


def _windows(tokens: int, seq_len: int, low: int, high: int, seed: int) -> TokenChunks:
    stream = np.random.default_rng(seed).integers(low, high, tokens)
    return TokenChunks(TokenStream([stream]), seq_len, "documents", low)


@check("unit: global batches")
def check_loader() -> None:
    module = "data/loader.py"
    sources = [_windows(700, 10, 0, 100, 1), _windows(500, 10, 100, 200, 2)]
    for mixture in (Mixture(sources[:1]), Mixture(sources, (0.75, 0.25))):
        known: dict[int, list[list[int]]] = {}
        for dp, micro, groups in itertools.product((1, 2, 3), (1, 2, 5), (1, 2)):
            for consumed in (0, 12, 24, 600, 36):
                rows, sizes = [], []
                for group, rank in itertools.product(range(groups), range(dp)):
                    loader = Loader(mixture, 7, 12, rank, dp, micro)
                    batches = loader.get_microbatches(consumed, group, groups)
                    sizes += [len(batch.tokens_BT) for batch in batches]
                    for batch in batches:
                        sample_rows = torch.cat((batch.tokens_BT, batch.targets_BT), 1).tolist()
                        rows += sample_rows
                        if batch.sources_B is not None:
                            first_half = (batch.tokens_BT[:, 0] >= 100).long()
                            expect((first_half == batch.sources_B).all(), "sources of rows", module)
                expect(len(rows) == 12, f"{len(rows)} rows of 12", module)
                expect(max(sizes) <= micro, "a microbatch is too large", module)
                first = known.setdefault(consumed, rows)
                expect(rows == first, f"rows on {groups} x {dp} ranks are others", module)
        for dp, consumed in itertools.product((1, 2, 3), (0, 12, 24)):
            ranks = [Loader(mixture, 7, 12, rank, dp, 1, is_strided=True) for rank in range(dp)]
            in_turn = zip(*(loader.get_microbatches(consumed) for loader in ranks), strict=True)
            rows = [
                torch.cat((batch.tokens_BT, batch.targets_BT), 1)[0].tolist()
                for microbatch in in_turn
                for batch in microbatch
            ]
            expect(rows == known[consumed], f"rows of {dp} ranks in turn are others", module)
        flat = [tuple(row) for consumed in (0, 12, 24, 36) for row in known[consumed]]
        expect(len(set(flat)) == len(flat), "a row comes twice", module)
    loader = Loader(Mixture(sources[:1]), 7, 12, 0, 1, 3)
    observed = [
        r
        for c in range(0, 204, 12)
        for b in loader.get_microbatches(c)
        for r in b.tokens_BT.tolist()
    ]
    all_names = {
        tuple(sources[0].stream.read_windows(np.array([10 * n]), 10)[0].tolist()) for n in range(69)
    }
    expect({tuple(row) for row in observed[:69]} == all_names, "an epoch is not whole", module)
    walking = Loader(mixture, 7, 12, 1, 3, 2)
    for consumed in range(0, 120, 12):
        fresh = Loader(mixture, 7, 12, 1, 3, 2).get_microbatches(consumed)
        pairs = zip(walking.get_microbatches(consumed), fresh, strict=True)
        same = all(torch.equal(a.tokens_BT, b.tokens_BT) for a, b in pairs)
        expect(same, "batches after others are others", module)
    lookups = 0
    find_samples = Loader._find_samples

    def count_lookups(*args: Any) -> Any:
        nonlocal lookups
        lookups += 1
        return find_samples(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loader, "_find_samples", count_lookups)
        walking, steps = Loader(mixture, 7, 12, 1, 3, 2), LOOKUP_POSITIONS // 4
        for consumed in range(0, 12 * steps, 12):
            walking.get_microbatches(consumed)
    expect(lookups == 1, f"{lookups} lookups for {steps} steps, not one", module)
    ahead = Prefetcher(loader, torch.device("cpu"), use_thread=True)
    for consumed in (0, 12, 24, 0, 12):
        own, theirs = ahead.get_microbatches(consumed, 0, 1), loader.get_microbatches(consumed)
        same = all(torch.equal(a.tokens_BT, b.tokens_BT) for a, b in zip(own, theirs, strict=True))
        expect(same, "batches made ahead are others", module)
    ahead.close()


@check("unit: rows of an evaluation")
def check_evaluation_rows() -> None:
    module = "data/loader.py"
    mixture = Mixture([_windows(430, 10, 0, 100, 1), _windows(230, 10, 100, 200, 2)], (0.75, 0.25))
    lengths = [42, 22]
    for dp, micro, target in itertools.product((1, 2, 3), (1, 2, 4), (5, 8, 16)):
        results = [list(evaluation_batches(mixture, target, rank, dp, micro)) for rank in range(dp)]
        expect(len({len(batches) for batches in results}) == 1, "numbers of batches differ", module)
        shapes = {batch.tokens_BT.shape for batches in results for batch in batches}
        expect(len(shapes) == 1, "shapes differ", module)
        rows = [
            tuple(row.tolist())
            for batches in results
            for batch in batches
            for row, targets in zip(batch.tokens_BT, batch.targets_BT, strict=True)
            if (targets != IGNORE_INDEX).any()
        ]
        expected = []
        for source, share in enumerate((0.75, 0.25)):
            count = max(1, round(target * share))
            chosen = [n * lengths[source] // count for n in range(count)]
            stream: Any = mixture.sources[source]
            expected += [
                tuple(stream.stream.read_windows(np.array([10 * n]), 10)[0].tolist())
                for n in chosen
            ]
        # 5 sequences are shared as 3.75 and 1.25.
        expect(rows == expected, f"{target} rows over {dp} ranks", module)


@check("unit: token streams")
def check_streams() -> None:
    module = "data/token_store.py"
    pieces = [np.arange(0, 7), np.arange(7, 8), np.arange(8, 40), np.arange(40, 45)]
    stream = TokenStream(pieces)
    expect(len(stream) == 45, "its length", module)
    for length in (1, 3, 9, 35):
        starts = np.arange(0, 45 - length + 1)
        result = stream.read_windows(starts, length)
        expect((result == starts[:, None] + np.arange(length)).all(), "a window", module)
    expect(stream.find_token(8).tolist() == [8], "where a token stands", module)
    expect(stream.count_nonzero() == 44, "how many are not 0", module)


@check("unit: token files of others")
def check_token_files() -> None:
    from weft.data.foreign_tokens import Span, read_chunks, read_headers, split_tokens
    from weft.data.source import stat_local_file

    module = "data/foreign_tokens.py"
    random = np.random.default_rng(0)
    documents = [random.integers(1, 200, random.integers(2, 30)) for _ in range(40)]
    results = [np.append(document, 0) for document in documents]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        for name, inputs, order in (
            ("plain", results, range(40)),
            ("bare", documents, range(40)),
            ("shuffled", documents, [*range(1, 40, 2), *range(0, 40, 2)]),
        ):
            positions, data = {}, b""
            for n in order:
                positions[n] = len(data)
                data += inputs[n].astype("<u2").tobytes()
            (path / f"{name}.bin").write_bytes(data)
            sizes = np.array([len(item) for item in inputs], "<i4")
            pointers = np.array([positions[n] for n in range(40)], "<i8")
            head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 40, 41)
            index = sizes.tobytes() + pointers.tobytes() + np.arange(41, dtype="<i8").tobytes()
            (path / f"{name}.idx").write_bytes(head + index)
        flat = np.concatenate(results)
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, len(flat)
        (path / "llmc.bin").write_bytes(header.tobytes() + flat.astype("<u2").tobytes())
        (path / "nano.bin").write_bytes(flat.astype("<u2").tobytes())
        for name in ("plain", "bare", "shuffled", "llmc", "nano"):
            file = path / f"{name}.bin"
            [source] = read_headers([stat_local_file(file, file.name)])
            expect(source.tokens == len(flat) - 40 * (name in ("bare", "shuffled")), name, module)
            parts = [tokens for _, tokens in read_chunks(Span(source, 0, source.tokens), 0)]
            expect(np.array_equal(np.concatenate(parts), flat), f"tokens of {name}", module)
            for begin, end in ((3, 50), (60, 200)):
                local = [tokens for _, tokens in read_chunks(Span(source, begin, end), None)]
                full = np.concatenate(documents if name in ("bare", "shuffled") else results)
                expect(np.array_equal(np.concatenate(local), full[begin:end]), name, module)
            train, held = split_tokens([source], 0, 0.2)
            cut = train[0].end
            expect(held[0].begin == cut and held[0].end == source.tokens, "the split", module)
            expect(abs(cut / source.tokens - 0.8) < 0.08, "how much is held out", module)
            ends = np.cumsum(
                [len(d) for d in (documents if source.tokens < len(flat) else results)]
            )
            expect(cut in ends, "a document is cut by the split", module)


@check("unit: packing")
def check_packing() -> None:
    module = "data/packing.py"
    random = np.random.default_rng(0)
    for seed in range(4):
        lengths = random.integers(1, 33, 200)
        order, firsts = pack_best_fit(lengths, 32, seed)
        expect(sorted(order.tolist()) == list(range(200)), "a document is lost", module)
        rows = [order[a:b] for a, b in itertools.pairwise(firsts)]
        expect(all(lengths[row].sum() <= 32 for row in rows), "a row is too full", module)
        expect(sum(map(len, rows)) == 200, "rows do not hold all", module)
        # Compare with a plain best-fit-decreasing packing.
        room: list[int] = []
        for length in sorted(lengths, reverse=True):
            fits = [r for r in room if r >= length]
            if fits:
                room.remove(min(fits))
                room.append(min(fits) - length)
            else:
                room.append(32 - length)
        rest = sorted(32 - lengths[row].sum() for row in rows)
        expect(rest == sorted(room), f"{len(rows)} rows, best fit has {len(room)}", module)
    # Overlong conversations are left out, or truncated.
    corpus = draw_corpus("chat", 40, 100, 30, 3)
    with tempfile.TemporaryDirectory() as directory:
        store = corpus.write(Path(directory), 100, 8)
        train = corpus.part(8, False)
        long = {i for i, d in enumerate(train.documents) if len(d) - 1 > 16}
        for what in ("skip", "truncate"):
            section = DataSection.model_validate({"format": "chat", "overlong": what})
            from weft.data.packing import pack_split

            rows_found = pack_split(store, "train", 16, section, 0)
            sizes = sorted(rows_found.lengths.tolist())
            remaining = [
                min(16, len(d) - 1)
                for i, d in enumerate(train.documents)
                if i not in long or (what == "truncate" and train.learned[i][1:17].any())
            ]
            expect(sizes == sorted(remaining), f"lengths with {what}", module)
        pairs = draw_corpus("preferences", 40, 100, 12, 3)
        store = pairs.write(Path(directory), 100, 8)
        section = DataSection.model_validate({"format": "preferences", "overlong": "skip"})
        rows_found = pack_split(store, "train", 16, section, 0)
        pieces = pairs.part(8, False).documents
        both = [len(a) + len(b) - 2 for a, b in zip(pieces[::2], pieces[1::2], strict=True)]
        used = len(rows_found.document_order) // 2
        expect(used == sum(size <= 16 for size in both), "pairs left out", module)
        expect(
            (rows_found.document_order[1::2] - rows_found.document_order[::2] == 1).all(),
            "order",
            module,
        )
        text = Dataset(Path(directory), (Source("one", 1.0, store),))
        [samples] = build_mixture(text, "train", 16, section, 0).sources
        assert isinstance(samples, Pairs)
        references = torch.randn(samples.num_groups, 2)
        samples = replace(samples, references=references)
        chosen = random.permutation(len(samples))
        result = samples.get_batch(chosen).references_BP2
        assert result is not None
        order, offsets = samples.packed.packed.document_order, samples.packed.packed.offsets
        for row, number in enumerate(chosen.tolist()):
            own = references[order[offsets[number] : offsets[number + 1] : 2] // 2]
            same = torch.equal(result[row, : len(own)], own)
            expect(same, "references of pairs", "data/loader.py")


@check("unit: conversations")
def check_conversations() -> None:
    from weft.data.prepare import prepare_data

    module = "data/chat.py"
    turns = [
        chats.message("user", "it is"),
        chats.message("assistant", "what it was"),
        chats.message("user", "and there"),
        chats.message("assistant", "too and is"),
    ]
    expected = {
        "chatml": ["what it was<|im_end|>", "too and is<|im_end|>"],
        "marked": ["what it was<|im_end|>", "too and is<|im_end|>"],
        "llama": ["what it was<|eot_id|>", "too and is<|eot_id|>"],
        "mistral": [" what it was</s>", " too and is</s>"],
    }
    with tempfile.TemporaryDirectory() as directory:
        for name, spans in expected.items():
            home = Path(directory) / name
            tokenizer = chats.write_tokenizer(home, chats.TEMPLATES[name])
            lines = [{"messages": turns}, {"messages": turns[:2]}]
            lines += [
                {"messages": [chats.message("user", f"is {n}"), chats.message("assistant", "it")]}
                for n in range(6)
            ]
            file = chats.write_lines(home / "chat.jsonl", lines)
            values = {"path": str(file), "tokenizer": str(tokenizer), "format": "chat"}
            text = prepare_data(
                DataSection.model_validate(values | {"validation_fraction": 0.1}), home / "c"
            )
            store = text.sources[0].store
            known = chats.make_tokenizer()
            results = []
            for split in ("train", "validation"):
                stream, learned = store.tokens(split), store.loss_mask(split)  # type: ignore[arg-type]
                begin = 0
                for end, _, line in store.index(split).tolist():  # type: ignore[arg-type]
                    at = np.array([begin])
                    ids = stream.read_windows(at, end - begin)[0]
                    assert learned is not None
                    marks = learned.read_windows(at, end - begin)[0].astype(bool)
                    results.append((line, ids, marks))
                    begin = end
            expect(len(results) == len(lines), "conversations are lost", "data/conversations.py")
            target = {1: spans, 2: spans[:1]}
            for line, ids, marks in results:
                if line not in target:
                    continue
                edges = np.flatnonzero(np.diff(np.concatenate(([0], marks, [0]))))
                texts = [
                    known.decode(ids[a:b].tolist(), skip_special_tokens=False)
                    for a, b in zip(edges[::2], edges[1::2], strict=True)
                ]
                expect(texts == target[line], f"{name}: {texts} are learned", module)


# --------------------------------------------------------------------------- arithmetic


MODELS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"tied_embeddings": True}, "models/decoder.py"),
    ("llama", {"tied_embeddings": False}, "models/decoder.py"),
    ("qwen3", {"head_dim": 10, "tied_embeddings": False}, "models/decoder.py"),
    (
        "moe",
        {
            "head_dim": 10,
            "num_experts": 5,
            "active_experts": 2,
            "expert_dim": 12,
            "shared_experts": 1,
            "dense_layers": 1,
            "score": "sigmoid",
            "tied_embeddings": False,
        },
        "models/moe.py",
    ),
    (
        "llama",
        {
            "head_dim": 10,
            "norm_offset": True,
            "norm_position": "both",
            "activation": "gelu_tanh",
            "attention_scale": 0.25,
            "attention_softcap": 0.5,
            "embedding_scale": math.sqrt(24),
            "layer_pattern": "LG",
            "sliding_window": 7,
            "tied_embeddings": True,
        },
        "models/decoder.py",
    ),
    (
        "moe",
        {
            "num_kv_heads": 4,
            "head_dim": 10,
            "kv_rank": 12,
            "q_rank": 14,
            "rope_head_dim": 4,
            "value_head_dim": 8,
            "qk_norm": "none",
            "num_experts": 6,
            "active_experts": 2,
            "expert_dim": 12,
            "shared_experts": 2,
            "dense_layers": 1,
            "score": "sigmoid",
            "tied_embeddings": False,
        },
        "models/decoder.py",
    ),
    (
        "moe",
        {
            "head_dim": 10,
            "qk_norm": "unit",
            "layer_pattern": "LG",
            "attention_chunk": 7,
            "num_experts": 6,
            "expert_dim": 12,
            "shared_experts": 1,
            "expert_interval": 2,
            "dense_layers": 0,
            "score": "sigmoid",
            "tied_embeddings": False,
        },
        "models/decoder_config.py",
    ),
    (
        "moe",
        {
            "head_dim": 10,
            "qk_norm": "none",
            "qkv_bias": True,
            "out_bias": True,
            "attention_sinks": True,
            "num_experts": 5,
            "active_experts": 2,
            "expert_dim": 12,
            "expert_limit": 7.0,
            "expert_biases": True,
            "router_bias": True,
            "score_selected": True,
            "shared_experts": 0,
            "dense_layers": 0,
            "tied_embeddings": False,
        },
        "models/decoder.py",
    ),
]
MIXTURE = MODELS[3]


def _small_model(kind: str, fields: dict[str, Any]) -> tuple[Any, Any]:
    """Return a model family and a small configuration."""
    family = load_family(kind)
    sizes = {
        "num_layers": 3,
        "dim": 24,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_dim": 20,
        "vocab_size": 50,
        "max_seq_len": 64,
    }
    config, errors = resolve_model(kind, next(iter(family.presets)), sizes | fields)
    assert not errors, errors
    return family.of(config), config


@check("unit: arithmetic of models")
def check_arithmetic() -> None:
    from weft.monitor.step_record import StepRecord, device_hours
    from weft.monitor.step_timer import StepTimes
    from weft.planning.lora_plan import training_cost

    costs = "models/decoder_costs.py"
    for kind, fields, module in MODELS:
        family, config = _small_model(kind, fields)
        with torch.device("meta"):
            model = family.build(config)
        shapes = {name: p.shape for name, p in model.named_parameters()}
        count = sum(shape.numel() for shape in shapes.values())
        expect(family.num_params(config) == count, f"parameters of {kind}", costs)
        theirs = build_theirs(kind, config)
        for name, shape in shapes.items():
            try:
                same = theirs_of(theirs, name).shape == shape
            except AttributeError:
                same = False
            expect(same, f"the shape of {name}", module)
        theirs_count = sum(p.numel() for p in theirs.parameters())
        expect(theirs_count == count, f"parameters of transformers' {kind}", module)
        matrices = {
            name: shape
            for name, shape in shapes.items()
            if len(shape) > 1 and name.endswith(".weight") and name != "embed_tokens.weight"
        }
        active = 0.0
        for name, shape in matrices.items():
            share = 1.0
            if ".experts." in name:
                share = config.active_experts / config.num_experts
            active += shape.numel() * share
        active += config.vocab_size * config.dim * config.tied_embeddings
        local = fields.get("sliding_window") or fields.get("attention_chunk") or 64
        windows = [local if i % 2 == 0 else 64 for i in range(3)]
        widths = config.key_dim + fields.get("value_head_dim", config.key_dim)
        attention = 6 * sum(windows) * 4 * widths
        flops = 6 * active + attention
        expect(is_close(family.flops_per_token(config, 64), flops), f"FLOPs of {kind}", costs)
        if family.num_active_params is not None:
            idle = sum(
                shape.numel() * (1 - config.active_experts / config.num_experts)
                for name, shape in shapes.items()
                if ".experts." in name
            )
            expect(is_close(family.num_active_params(config), count - idle), "active", costs)
        for name in shapes:
            expect(
                family.has_weight_decay(name)
                == has_weight_decay(name, torch.empty(shapes[name], device="meta")),
                f"weight decay of {name}",
                "models/decoder.py",
            )
        if kind == "llama" and "sliding_window" not in fields:
            section = LoraSection.model_validate({"rank": 3, "targets": ["q_proj", "up_proj"]})
            result = training_cost(section, config, family, 64)
            adapters = sum(
                3 * (shape[0] + shape[1])
                for name, shape in matrices.items()
                if "q_proj" in name or "up_proj" in name
            )
            expect(
                result.trainable_params == adapters,
                "parameters of adapters",
                "planning/lora_plan.py",
            )
            frozen = 4 * active + attention + 6 * adapters
            expect(
                is_close(result.flops_per_token, frozen),
                "FLOPs with adapters",
                "planning/lora_plan.py",
            )
            half = 4 * active + attention * 32 / 64 + 6 * adapters
            expect(
                is_close(result.causal_flops_per_token, half),
                "half of them",
                "planning/lora_plan.py",
            )
        elif family.moe_layers is not None:
            targets = {"rank": 3, "targets": ["q_proj", "experts.up_proj"]}
            result = training_cost(LoraSection.model_validate(targets), config, family, 64)
            sums = {name: 3 * sum(shape[-2:]) for name, shape in matrices.items()}
            adapted = {
                name: 3 * sum(shape[-2:]) * (shape[0] if len(shape) == 3 else 1)
                for name, shape in matrices.items()
                if name.endswith((".q_proj.weight", ".experts.up_proj.weight"))
            }
            trained, module = sum(adapted.values()), "planning/lora_plan.py"
            expect(result.trainable_params == trained, f"adapters of {kind}", module)
            used = sum(
                sums[name] * (config.active_experts if ".experts." in name else 1)
                for name in adapted
            )
            flops = 4 * active + attention + 6 * used
            expect(is_close(result.flops_per_token, flops), f"FLOPs of adapters of {kind}", module)
    record = StepRecord.create(
        tokens_per_step=1000,
        times=StepTimes(0.5, 0.1, 0.0, 0.0),
        devices=4,
        flops_per_token=6e9,
        causal_flops_per_token=5e9,
        peak_flops=1e13,
        step=1,
        loss=1.0,
        grad_norm=1.0,
        lr=0.1,
        tokens=1000,
        memory_peak_gib=1.0,
        time_breakdown={"productive": 3.0, "saving": 1.0},
    )
    module = "monitor/step_record.py"
    expect(is_close(record.tokens_per_second, 2000), "tokens per second", module)
    expect(is_close(record.tokens_per_second_per_device, 500), "of a device", module)
    expect(is_close(record.tflops_per_device, 3.0), "TFLOP/s", module)
    expect(is_close(record.mfu or 0, 0.3), "MFU", module)
    expect(is_close(record.mfu_causal or 0, 0.25), "causal MFU", module)
    expect(is_close(record.goodput, 0.75), "goodput", "monitor/step_timer.py")
    expect(is_close(device_hours(8, 1e6), 8 * 1000 / 3600), "device hours", module)


@check("unit: rows of experts")
def check_expert_rows() -> None:
    """Check that an expert gets the tokens routed to it, in order."""
    torch.manual_seed(0)
    family, config = _small_model(*MIXTURE[:2])
    model = family.build(config)
    for param in model.parameters():
        nn.init.normal_(param, std=0.3)
    block = model.get_submodule("layers.1.mlp")
    x_BTD = torch.randn(2, 9, config.dim)
    rows, chosen = x_BTD.flatten(0, 1), torch.empty(0)
    outs: list[Tensor] = []

    def note_choice(m: Any, args: Any, out: Any) -> None:
        nonlocal chosen
        chosen = out[0]

    def compare_rows(m: Any, args: Any) -> None:
        expected = [rows[(chosen == e).any(1)] for e in range(config.num_experts)]
        sizes = [len(item) for item in expected]
        expect(args[1].tolist() == sizes, f"rows of experts: {sizes}", "models/moe.py")
        expect(torch.equal(args[0], torch.cat(expected)), "order of rows", "models/moe.py")
        weights = [
            {n: theirs_weight(n, e) for n in ("gate_proj", "up_proj", "down_proj")}
            for e in range(config.num_experts)
        ]
        outs.extend(
            (nn.functional.silu(x @ w["gate_proj"].T) * (x @ w["up_proj"].T)) @ w["down_proj"].T
            for x, w in zip(expected, weights, strict=True)
        )

    def theirs_weight(name: str, expert: int) -> Tensor:
        return block.get_parameter(f"experts.{name}.weight")[expert]

    def compare_outs(m: Any, args: Any, out: Tensor) -> None:
        off = float((out - torch.cat(outs)).abs().max())
        expect(off < 1e-4, f"what experts compute is off by {off}", "models/layers.py")

    block.get_submodule("router").register_forward_hook(note_choice)
    block.get_submodule("experts").register_forward_pre_hook(compare_rows)
    block.get_submodule("experts").register_forward_hook(compare_outs)
    with torch.no_grad():
        block(x_BTD)


@check("oracle: positions")
def check_positions() -> None:
    """Check that a model uses the given positions, with gaps and from any start."""
    generator = torch.Generator().manual_seed(0)
    for kind, fields, module in MODELS[1:3]:
        family, config = _small_model(kind, fields | {"rope_theta": 100.0})
        ours, theirs = family.build(config), build_theirs(kind, config)
        with torch.no_grad():
            for name, param in ours.named_parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.3)
                theirs_of(theirs, name).copy_(param)
            tokens = torch.randint(50, (3, 20), generator=generator)
            positions = torch.randint(1, 4, (3, 20), generator=generator).cumsum(1)
            rows = Rows(tokens, tokens, torch.zeros_like(tokens), positions)
            expected = logits_of(theirs, rows)
            off = float((ours(tokens, None, positions) - expected).abs().max())
        expect(off < 1e-4 * float(expected.abs().max()), f"logits are off by {off}", module)


@check("unit: cut of stages")
def check_stages() -> None:
    from weft.planning.stages import partition, split_into_stages

    module = "planning/stages.py"
    random = np.random.default_rng(0)
    for trial in range(12):
        units, stages = int(random.integers(3, 8)), int(random.integers(1, 4))
        seconds, state, remaining = (random.integers(0, 9, units).astype(float) for _ in range(3))
        flight = random.integers(1, 5, stages).tolist()
        schedules = []
        for cuts in itertools.combinations(range(1, units), stages - 1):
            ends = [0, *cuts, units]
            ranges = [range(a, b) for a, b in itertools.pairwise(ends)]
            time = [sum(seconds[i] for i in r) for r in ranges]
            memory = [
                sum(state[i] for i in r) + n * sum(remaining[i] for i in r)
                for r, n in zip(ranges, flight, strict=True)
            ]
            even = sum(t * t for t in time)
            schedules.append((max(time), max(memory), even, ranges))
        for objective in ("speed", "memory"):
            result = partition(
                seconds.tolist(), state.tolist(), remaining.tolist(), flight, objective
            )  # type: ignore[arg-type]
            swap = objective == "memory"
            cost = {tuple(r): ((m, t, e) if swap else (t, m, e)) for t, m, e, r in schedules}
            expect(cost[tuple(result)] == min(cost.values()), f"{objective} {trial}", module)
    family = load_family("llama")
    config: Any = resolve_model("llama", "toy", {"num_layers": 6})[0]
    assert family.unit_costs is not None
    cut = split_into_stages(
        family.unit_costs(config, 64), [3, 2, 1], 64, 16.0, layers_per_stage=[1, 3, 2]
    )
    ends = [(stage.first_unit, stage.end_unit, stage.num_blocks) for stage in cut]
    expect(ends == [(0, 2, 1), (2, 5, 3), (5, 8, 2)], f"stages of given blocks: {ends}", module)
    for kind, fields, _ in MODELS:
        if fields["tied_embeddings"]:
            continue
        family, config = _small_model(kind, fields)
        for units in (range(0, 2), range(2, 3), range(1, 4), range(3, 5)):
            with torch.device("meta"):
                model = family.build(config)
            blocks = {f"layers.{i}": i + 1 for i in range(3)}
            held = {"embed_tokens": 0, **blocks, "norm": 4, "lm_head": 4}
            expected = {
                name
                for name, _ in model.named_parameters()
                for part, unit in held.items()
                if name.startswith(f"{part}.") and unit in units
            }
            family.prune_to_stage(model, units)
            rest = {n for n, _ in model.named_parameters()}
            expect(rest == expected, f"units {units} of {kind}", "models/decoder.py")


# --------------------------------------------------------------------------- training

LOOP: Overrides = [
    ("train.steps", "4"),
    ("model.tied_embeddings", "false"),
    ("monitor.log_interval", "1"),
    ("monitor.layer_grad_norms", "true"),
    ("checkpoint.interval", "2"),
    ("checkpoint.keep_latest", "4"),
    ("optim.warmup_steps", "2"),
    ("optim.lr", "0.01"),
    ("train.eval_interval", "2"),
    ("optim.min_lr_ratio", "0.1"),
    ("optim.max_grad_norm", "0.1"),
]


def _train(directory: Path, *extra: tuple[str, str]) -> Job:
    from tests.small import train_rank

    all_overrides = [*LOOP, ("run.dir", str(directory)), *extra]
    train_rank(all_overrides, str(store_path()))
    return small_job(*all_overrides)


def _records(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


DTYPES = {"F32": np.float32, "BF16": None, "I64": np.int64}


def read_by_hand(path: Path) -> dict[str, Any]:
    """Read every tensor of a checkpoint from its manifest, without weft's code."""
    first_half = json.loads((path / "manifest.json").read_bytes())
    files = [(path / file["name"]).read_bytes() for file in first_half["files"]]
    results = {}
    for name, entry in first_half["tensors"].items():
        full = np.zeros(entry["shape"], DTYPES[entry["dtype"]])
        for offsets, sizes, file, position in entry["shards"]:
            count = math.prod(sizes)
            part = np.frombuffer(files[file], full.dtype, count, position).reshape(sizes)
            box = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
            full[box] = part
        results[name] = torch.from_numpy(full.copy())
    return results


@check("run: the training loop")
def check_loop() -> None:
    """Compare four steps of `weft train`, its records and its checkpoint with the oracle."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "run"
        job = _train(directory)
        plan = resolve(job, Machine("cpu", devices=1, world_size=1))
        built = build(plan, Rank(0, 0, 1, torch.device("cpu")))
        model = build_theirs("llama", plan.model)
        params = {n: p.detach().clone() for n, p in trainable_parameters(built.model_parts)}
        with torch.no_grad():
            for n, p in params.items():
                theirs_of(model, n).copy_(p)
        text = open_dataset(store_path())
        mixture = build_mixture(text, "train", job.train.seq_len, job.data, job.train.seed)
        held = build_mixture(text, "validation", job.train.seq_len, job.data, job.train.seed)
        updates = Updates(params, job)
        records = _records(directory)
        expect([r["step"] for r in records] == [1, 2, 3, 4], "steps", "training/metric_logger.py")
        size = job.train.global_batch_size
        for step, record in enumerate(records, 1):
            batches = Loader(mixture, job.train.seed, size, 0, 1, 3).get_microbatches(
                (step - 1) * size
            )
            tokens = torch.cat([b.tokens_BT for b in batches])
            rows = Rows(
                tokens,
                torch.cat([b.targets_BT for b in batches]),
                torch.zeros_like(tokens),
                torch.arange(tokens.shape[1]).expand_as(tokens),
            )
            model.zero_grad()
            loss = losses_of(model, rows).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            module = "training/loop.py"
            expect(is_close(record["loss"], loss.item(), 1e-4), f"loss of step {step}", module)
            expect(is_close(record["lr"], rate(step, job)), f"rate of step {step}", module)
            grads = {n: grad_of(model, n).clone() for n in params}
            norm = updates.step(step, grads)
            expect(is_close(record["grad_norm"], norm, 1e-3), f"norm of step {step}", module)
            of_layers = math.sqrt(
                sum(v * v for k, v in record.items() if k.startswith("grad_norm/"))
            )
            expect(is_close(of_layers, norm, 1e-3), "norms of layers", "monitor/layer_stats.py")
            block = math.sqrt(
                sum(float(g.square().sum()) for n, g in grads.items() if n.startswith("layers.1."))
            )
            expect(
                is_close(record["grad_norm/layers.1"], block, 1e-3),
                "a layer's norm",
                "monitor/layer_stats.py",
            )
            with torch.no_grad():
                for n, p in updates.params.items():
                    theirs_of(model, n).copy_(p)
            if "eval_loss" in record:
                result = list(evaluation_batches(held, job.train.eval_sequences, 0, 1, 100))
                tokens = torch.cat([b.tokens_BT for b in result])
                rows = Rows(
                    tokens,
                    torch.cat([b.targets_BT for b in result]),
                    torch.zeros_like(tokens),
                    torch.arange(tokens.shape[1]).expand_as(tokens),
                )
                with torch.no_grad():
                    mask = (rows.targets != NONE).sum()
                    expected = (losses_of(model, rows).sum() / mask).item()
                expect(
                    is_close(record["eval_loss"], expected, 1e-4), "evaluation", "training/step.py"
                )
        told_tokens = [record["tokens"] for record in records]
        expected_tokens = [step * size * job.train.seq_len for step in (1, 2, 3, 4)]
        expect(told_tokens == expected_tokens, "tokens", "training/metric_logger.py")
        expect(
            [("eval_loss" in r) for r in records] == [False, True, False, True],
            "steps that are evaluated",
            "training/metric_logger.py",
        )
        saved = list_checkpoints(directory / "checkpoints")
        expect(
            [p.name for p in saved] == ["step-00000002", "step-00000004"],
            "what is saved",
            "checkpoint/manager.py",
        )
        state = read_by_hand(saved[-1])
        all_names = {f"model.{n}" for n in params}
        all_names |= {f"optim.{n}.{k}" for n in params for k in ("step", "exp_avg", "exp_avg_sq")}
        lost = sorted(all_names ^ state.keys())[:3]
        expect(not lost, f"what is saved: {lost}", "checkpoint/state_dict.py")
        for n, p in updates.params.items():
            distance = float((p.detach() - params[n]).norm())
            off = float((state[f"model.{n}"] - p.detach()).norm())
            expect(
                off < 0.02 * distance,
                f"{n} is off by {off / distance:.1e} of its way",
                "training/loop.py",
            )
            expect(int(state[f"optim.{n}.step"]) == 4, "the optimizer's steps", "training/loop.py")
        first_half = json.loads((saved[-1] / "manifest.json").read_bytes())
        expect(
            (first_half["step"], first_half["samples"]) == (4, 4 * size),
            "position",
            "training/state.py",
        )


@check("resumed: runs")
def check_resume() -> None:
    """Check that two steps and two resumed steps equal four steps."""
    with tempfile.TemporaryDirectory() as name:
        straight, cut = Path(name) / "straight", Path(name) / "cut"
        _train(straight)
        shutil.copytree(straight, cut)
        shutil.rmtree(cut / "checkpoints" / "step-00000004")
        _train(cut)
        fields = ("step", "loss", "grad_norm", "lr", "tokens")
        ours, theirs = ([[r[f] for f in fields] for r in _records(f)] for f in (cut, straight))
        expect(ours == theirs, f"records: {ours[-1]} and {theirs[-1]}", "training/state.py")
        a, b = (read_by_hand(f / "checkpoints" / "step-00000004") for f in (cut, straight))
        for n in b:
            expect(torch.equal(a[n], b[n]), f"{n} is another", "checkpoint/load.py")


@check("resumed: mixtures", ranks=2)
def check_mixture_loop() -> None:
    """Check that the mean of source losses, weighted by tokens read, is the loss."""
    from tests.small import train_rank

    rank = dist.get_rank()
    directory = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(directory, src=0)
    home = Path(directory[0])
    try:
        if rank == 0:
            (home / "mixture").mkdir()
            listed = [
                {"name": name, "share": share, "store": str(store_path())}
                for name, share in (("a", 0.7), ("b", 0.3))
            ]
            (home / "mixture" / "mixture.json").write_text(json.dumps({"sources": listed}))
            shutil.copy(store_path() / "tokenizer.json", home / "mixture")
        dist.barrier()
        keys = [
            *LOOP,
            ("run.dir", str(home / "run")),
            ("parallel.dp_replicate", "2"),  # copies must count once in the norms of layers
            ("data.mixture", '{"a" = 0.7, "b" = 0.3}'),
            ("train.microbatch_size", "3"),
            ("train.steps", "2"),
            ("data.packing", "documents"),
        ]
        train_rank(keys, str(home / "mixture"))
        if rank:
            return
        job = small_job(*keys)
        text = open_dataset(home / "mixture")
        mixture = build_mixture(text, "train", job.train.seq_len, job.data, job.train.seed)
        for step, record in enumerate(_records(home / "run"), 1):
            size = job.train.global_batch_size
            [batch] = Loader(mixture, job.train.seed, size, 0, 1, size).get_microbatches(
                (step - 1) * size
            )
            counts = [
                int((batch.targets_BT[batch.sources_B == s] != IGNORE_INDEX).sum()) for s in (0, 1)
            ]
            losses = [record.get(f"loss/{n}", 0.0) for n in ("a", "b")]
            mean = sum(c * v for c, v in zip(counts, losses, strict=True)) / sum(counts)
            of_layers = math.sqrt(
                sum(v * v for k, v in record.items() if k.startswith("grad_norm/"))
            )
            expect(
                is_close(record["grad_norm"], of_layers, 1e-4),
                "norms of layers",
                "monitor/layer_stats.py",
            )
            rate_told = record["tokens_per_second"] * record["step_seconds"]
            expect(
                is_close(rate_told, size * job.train.seq_len),
                "tokens per second",
                "planning/resolve.py",
            )
            expect(
                is_close(record["loss"], mean, 1e-4),
                "losses of sources",
                "training/metric_logger.py",
            )
        last = _records(home / "run")[-1]
        mean = 0.7 * last["eval_loss/a"] + 0.3 * last["eval_loss/b"]
        expect(is_close(last["eval_loss"], mean, 1e-6), "evaluation", "training/metric_logger.py")
    finally:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(home)


@check("saved: references", ranks=2)
def check_references() -> None:
    """Check the log-probabilities of the initial model on two ranks."""
    from weft.data.loader import Pairs
    from weft.training.reference_logprobs import log_probs

    job = small_job(
        ("run.dir", "/nonexistent"),
        ("parallel.dp_shard", "2"),
        ("train.objective", "dpo"),
        ("data.format", "preferences"),
        ("model.tied_embeddings", "false"),
    )
    rank = dist.get_rank()
    plan = resolve(job, Machine("cpu", devices=2, world_size=2))
    built = build(plan, Rank(rank, rank, 2, torch.device("cpu")))
    corpus = draw_corpus("preferences", 30, 500, 14, 3)
    with tempfile.TemporaryDirectory() as directory:
        text = Dataset(
            Path(directory), (Source("one", 1.0, corpus.write(Path(directory), 500, 8)),)
        )
        [pairs] = build_mixture(text, "train", job.train.seq_len, job.data, 0).sources
        assert isinstance(pairs, Pairs)
        numbers = torch.from_numpy(pairs.packed.packed.document_order[::2] // 2)
        result = log_probs(built, pairs)[numbers]
        batch = pairs.get_batch(np.arange(len(pairs)))
    model = build_theirs("llama", plan.model)
    with torch.no_grad():
        for n, p in trainable_parameters(built.model_parts):
            theirs_of(model, n).copy_(_all(p))
        assert batch.documents_BT is not None
        assert batch.positions_BT is not None
        rows = Rows(batch.tokens_BT, batch.targets_BT, batch.documents_BT, batch.positions_BT)
        expected = log_probs_of(losses_of(model, rows), rows)
    off = float((result - expected).abs().max())
    expect(off < 1e-3, f"references are off by {off}", "training/reference_logprobs.py")


@check("unit: rounded moments")
def check_moments() -> None:
    """Check that a bfloat16 second moment decays on average as in float32."""
    from weft.optim.low_precision_adamw import LowPrecisionAdamW

    for beta2 in (0.999,):
        param = nn.Parameter(torch.zeros(4096))
        group: dict[str, Any] = {"params": [param], "weight_decay": 0.0}
        optimizer = LowPrecisionAdamW(
            [group], lr=1e-4, betas=(0.9, beta2), eps=1e-8, state_dtype="bfloat16"
        )
        for step in range(120):
            param.grad = torch.ones(4096) if step < 20 else torch.full((4096,), 1e-3)
            optimizer.step()
        second = float(optimizer.state[param]["exp_avg_sq"].float().mean())
        exact = (1 - beta2**20) * beta2**100
        expect(
            is_close(second, exact, 0.01),
            f"second moment {second}, not {exact}",
            "optim/low_precision_adamw.py",
        )


@check("unit: places of shards", ranks=4)
def check_shard_offsets() -> None:
    """Check offsets of shards on a tensor whose elements are their indices."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    from weft.parallel.dtensor import shard_offsets

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    sharded = [
        distribute_tensor(torch.arange(float(math.prod(shape))).view(shape), mesh, placements)
        for shape in ((7, 5), (8, 6), (3, 4))
        for placements in itertools.product((Replicate(), Shard(0), Shard(1)), repeat=2)
    ]
    linear = nn.Linear(6, 8, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.arange(48.0).view(8, 6))
    parallelize_module(linear, mesh["tp"], ColwiseParallel())
    fully_shard(linear, mesh=mesh["dp"])
    for tensor in [*sharded, linear.weight]:
        local: Any = tensor.to_local()  # type: ignore[operator]
        if not local.numel():
            continue
        first = [int(i) for i in np.unravel_index(int(local.flatten()[0]), tensor.shape)]
        result = shard_offsets(tensor)
        expect(result == first, f"a shard begins at {first}, not {result}", "parallel/dtensor.py")


@check("unit: norms of long tensors")
def check_norms() -> None:
    generator = torch.Generator().manual_seed(0)
    param = nn.Parameter(torch.zeros(2000, 1000))
    param.grad = torch.randn(param.shape, generator=generator)
    norm, own = compute_grad_norm([param])
    exact = float(param.grad.double().norm())
    for result in (norm, own):
        expect(
            is_close(float(result), exact, 1e-6), f"{result}, not {exact}", "parallel/dtensor.py"
        )


@check("unit: deferred weight gradients")
def check_weight_gradients() -> None:
    """Check gradients of two microbatches, computed later, and that nothing else stays."""
    from weft.models.moe import ExpertLinear
    from weft.parallel.weight_gradients import defer_weight_gradients

    module = "parallel/weight_gradients.py"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.SiLU(), nn.Linear(12, 8, bias=False))
    model.append(ExpertLinear(3, 8, 4))
    counts = torch.tensor([1, 4, 2])

    def run(x: Tensor) -> None:
        model[3](model[:3](x), counts).square().sum().backward()

    inputs = torch.randn(2, 7, 8)
    for x in inputs:
        run(x)
    weights = [model[0].weight, model[2].weight, model[3].weight]
    expected = [weight.grad for weight in weights]
    model.zero_grad()
    defer_weight_gradients(model)
    gradients: Any = model.weight_gradients
    expect(not model[0](inputs[0])._is_view(), "an output is a view", module)
    for deferred in (False, True):
        model.zero_grad()
        gradients.is_deferred = deferred
        halves = []
        for x in inputs:
            run(x)
            factors = [factor for _, product in gradients.pending for factor in product.args[:2]]
            expect(len(factors) == 6 * deferred, f"{len(factors)} factors are kept", module)
            expect(all(f.grad_fn is None for f in factors), "a factor has a graph", module)
            halves.append(gradients.collect())
        if deferred:
            expect(all(w.grad is None for w in weights), "nothing is deferred", module)
        for compute in halves:
            compute()
        for weight, wanted in zip(weights, expected, strict=True):
            same = weight.grad is not None and torch.allclose(weight.grad, wanted, atol=1e-5)
            expect(same, f"gradient, deferred {deferred}", module)
    with torch.autograd.set_detect_anomaly(True):
        run(inputs[0])
    expect(not gradients.pending, "anomaly mode defers", module)


@check("unit: moments of eight bits")
def check_packed_moments() -> None:
    """Check that 8-bit moments are right on average, within any block and on any layout."""
    from weft.optim import low_precision_adamw

    module = "optim/low_precision_adamw.py"
    generator = torch.Generator().manual_seed(0)
    spread = torch.logspace(-9, -1, 32 * 4).view(1, -1)  # a block spans two decades
    exact = spread * (1 + torch.rand((1, 32 * 4), generator=generator))
    second, first = torch.zeros(exact.shape), torch.zeros(exact.shape)
    limit = low_precision_adamw._max_ratio(0.9, 0.95)
    steps, worst = 400, 0.0
    for _ in range(steps):
        chances = [
            torch.randint(1 << 16, exact.shape, generator=generator, dtype=torch.int32)
            for _ in range(2)
        ]
        codes = torch.zeros(exact.shape, dtype=torch.uint8)
        ranges = torch.zeros((1, 4), dtype=torch.int16)
        low_precision_adamw.pack_second(exact.square(), chances[0], codes, ranges)
        result = low_precision_adamw.unpack_second(codes, ranges)
        worst = max(worst, float((result / exact.square() - 1).abs().max()))
        signed = torch.zeros(exact.shape, dtype=torch.int8)
        low_precision_adamw.pack_first(-0.3 * exact, result.sqrt(), limit, chances[1], signed)
        second += result / steps
        first += low_precision_adamw.unpack_first(signed, result.sqrt(), limit) / steps
    expect(worst < 0.15, f"a second moment is off by {worst:.2f} of itself", module)
    off = float((second / exact.square() - 1).abs().max())
    expect(off < 0.02, f"the mean of second moments is off by {off:.3f}", module)
    off = float((first / (-0.3 * exact) - 1).abs().max())
    expect(off < 0.02, f"the mean of first moments is off by {off:.3f}", module)
    # One small gradient next to a large one: the update equals AdamW's.
    param, rare, other = (nn.Parameter(torch.zeros(2, 64)) for _ in range(3))
    grad = torch.full((2, 64), 2e-5)
    grad[:, ::32] = 1e-1
    groups: list[dict[str, Any]] = [
        {"params": [each], "weight_decay": 0.0, "low_precision": each is param}
        for each in (param, rare, other)
    ]
    packed = low_precision_adamw.LowPrecisionAdamW(
        groups[:2], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, state_dtype="8bit"
    )
    plain = torch.optim.AdamW([other], weight_decay=0.0, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    for step in range(6):
        for tensor in (param, rare, other):
            tensor.grad = grad.clone() * (0.5 + step)
        packed.step()
        plain.step()
    off = float((param / other - 1).detach().abs().max())
    expect(off < 0.1, f"an update is off by {off:.2f} of itself", module)
    off = float((rare / other - 1).detach().abs().max())
    expect(off < 1e-5, f"moments that are not to be packed are off by {off:.1e}", module)
    # An unsharded parameter and its two halves have the same codes.
    full = _packed_step((0, 0), slice(0, 4))
    halves = torch.cat([_packed_step((r, 0), slice(r, r + 2)) for r in (0, 2)])
    expect(torch.equal(full, halves), "a moment depends on the layout", module)


def _packed_step(offsets: tuple[int, int], rows: slice) -> Tensor:
    """Return the codes of some rows of a parameter after an update."""
    from weft.optim import low_precision_adamw

    grad = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))[rows]
    first = torch.zeros(grad.shape, dtype=torch.int8)
    second = torch.zeros(grad.shape, dtype=torch.uint8)
    ranges = torch.zeros((len(grad), 2), dtype=torch.int16)
    tensors = low_precision_adamw.ParamTensors(
        torch.zeros_like(grad),
        grad,
        (first, second, ranges),
        torch.ones(()),
        low_precision_adamw.ShardPosition(torch.tensor(3, dtype=torch.int32), offsets, (4, 64)),
    )
    options = torch.tensor(False), torch.ones(()), torch.tensor(1e-3)
    low_precision_adamw.update_all(
        [tensors], low_precision_adamw.AdamWOptions(*options, 0.9, 0.95, 1e-8, 0.0)
    )
    return torch.cat([first.int(), second.int()], dim=1)


@check("unit: growing gradients")
def check_growing_gradients() -> None:
    """Check that 8-bit moments follow gradients that grow a thousandfold.

    All gradients are equal, so a block spans at most two octaves, with 64 steps each or more.  The
    bound is the sum of the possible rounding errors of both moments in each step.
    """
    from weft.optim import low_precision_adamw

    beta1, beta2, lr, limit = 0.9, 0.95, 1e-3, low_precision_adamw._max_ratio(0.9, 0.95)
    param, other = (nn.Parameter(torch.zeros(4, 64)) for _ in range(2))
    packed = low_precision_adamw.LowPrecisionAdamW(
        [{"params": [param]}], lr=lr, betas=(beta1, beta2), eps=1e-12, state_dtype="8bit"
    )
    plain = torch.optim.AdamW([other], lr=lr, betas=(beta1, beta2), eps=1e-12, weight_decay=0.0)
    first = second = first_off = second_off = bound = 0.0
    for step, size in enumerate((1e-6, 1e-3, 1.0, 1.0, 1e3, 1e3), 1):
        for tensor, optimizer in ((param, packed), (other, plain)):
            tensor.grad = torch.full((4, 64), size)
            optimizer.step()
        first, first_off = beta1 * first + (1 - beta1) * size, beta1 * first_off
        second, second_off = beta2 * second + (1 - beta2) * size**2, beta2 * second_off
        factor = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        least = math.sqrt(second - second_off)
        bound += factor * ((first + first_off) / least - first / math.sqrt(second))
        off = float((param - other).abs().max())
        expect(
            off <= bound + 1e-6 * lr,
            f"step {step}: off by {off}, not {bound}",
            "optim/low_precision_adamw.py",
        )
        second_off += (2 ** (1 / 64) - 1) * (second + second_off)
        root = math.sqrt(second + second_off)
        code = 127 * math.sqrt(min(1.0, first / root / limit)) + 1
        first_off += (2 * code + 1) / 127**2 * limit * root


@check("unit: rounded momentum")
def check_momentum() -> None:
    """Check Muon's direction, and that a momentum is rounded by its formula, on average exactly."""
    from weft.optim import low_precision_adamw
    from weft.optim.muon import orthogonalize
    from weft.optim.optimizer import build_muon

    module = "optim/low_precision_adamw.py"
    generator = torch.Generator().manual_seed(0)
    for dtype in ("float32", "bfloat16", "8bit"):
        param, stored = nn.Parameter(torch.zeros(40, 50)), torch.zeros(40, 50)
        group = {"params": [param], "names": ["w"], "weight_decay": 0.0, "matrices": True}
        section = small_job(("optim.name", "muon"), ("optim.state_dtype", dtype)).optim
        optimizer: Any = build_muon([group], section)
        for step in range(3):
            before = param.detach().clone()
            param.grad = torch.randn(40, 50, generator=generator) * 10.0**step
            optimizer.step()
            exact = 0.95 * stored + 0.05 * param.grad
            update = orthogonalize(0.95 * exact + 0.05 * param.grad)
            expected = before - section.lr * 0.2 * math.sqrt(50) * update
            off = float((param - expected).detach().abs().max())
            expect(off < 1e-4 * section.lr, f"{dtype}: a step is off by {off:.1e}", module)
            buffer = optimizer.state[param]["momentum_buffer"]
            stored = buffer.dequantize() if dtype == "8bit" else buffer.float().clone()
            limit = {"float32": 0.0, "bfloat16": 2**-7, "8bit": 0.026}[dtype]
            largest = exact.abs().amax()
            bound = limit * (largest if dtype == "8bit" else exact.abs()) + 1e-6 * largest
            expect(bool(((stored - exact).abs() <= bound).all()), f"{dtype}: off", module)
    values, mean = torch.randn(4, 50, generator=generator), torch.zeros(4, 50)
    for _ in range(400):
        bits = torch.randint(-(1 << 31), (1 << 31) - 1, (4, 50), dtype=torch.int32)
        moments = [torch.zeros(4, 50, dtype=torch.int8), torch.zeros(4, 2, dtype=torch.bfloat16)]
        low_precision_adamw.pack([values], bits, 1.0, moments)
        (result,) = low_precision_adamw.unpack(moments, 1.0)
        mean += result / 400
        again = [torch.zeros_like(each) for each in moments]
        to_nearest = torch.full_like(bits, low_precision_adamw.TO_NEAREST)
        low_precision_adamw.pack([result], to_nearest, 1.0, again)
        expect(
            torch.equal(low_precision_adamw.unpack(again, 1.0)[0], result),
            "packing is not exact",
            module,
        )
    off = float((mean - values).abs().max() / values.abs().max())
    expect(off < 0.002, f"the mean of a momentum is off by {off:.4f}", module)


@check("unit: parameter groups")
def check_parameter_groups() -> None:
    """Check the options of each parameter; the first group whose pattern matches decides."""
    from weft.optim.optimizer import build_adamw, build_optimizer, set_learning_rate

    module = "optim/optimizer.py"
    tables = (
        '[{params=["*.a", "b.*"], lr_mult=3, beta2=0.5}, {params=["*"], weight_decay=0.4, eps=0.1}]'
    )
    job = small_job(
        ("optim.groups", tables.replace('"*.a"', '"*norm*"').replace('"b.*"', '"*q_*"'))
    )
    section = job.optim.model_copy(update={"weight_decay": 0.2})
    names = ["x.norm", "layers.q_proj", "layers.k_proj", "q_norm.k"]
    params = {name: nn.Parameter(torch.zeros(2, 2)) for name in names}
    optimizer = build_optimizer(params.items(), section, build_adamw, lambda n: n != "x.norm", ())
    set_learning_rate(optimizer, 0.1)
    found = {n: group for group in optimizer.param_groups for n in group["names"]}
    for name in names:
        is_first = "norm" in name or "q_" in name
        decay = (0.0 if name == "x.norm" else 0.2) if is_first else 0.4
        expected = (0.3, decay, (0.9, 0.5), 1e-8) if is_first else (0.1, decay, (0.9, 0.95), 0.1)
        got = tuple(found[name][key] for key in ("lr", "weight_decay", "betas", "eps"))
        is_same = all(
            is_close(float(a), float(b), 1e-6)
            for a, b in zip(np.hstack(got), np.hstack(expected), strict=True)
        )
        expect(is_same, f"{name} has {got}, not {expected}", module)


@check("unit: Muon on replicas", ranks=4)
def check_muon_replicas() -> None:
    """Check that two replicas of two shards share the matrices, and send each part once."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from weft.optim.muon import orthogonalize
    from weft.optim.optimizer import build_muon

    module = "optim/muon.py"
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    layers = nn.Sequential(*(nn.Linear(6, 10, bias=False) for _ in range(8)))
    grads = [torch.randn(10, 6, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    fully_shard(layers, mesh=mesh)
    params: list[Any] = list(layers.parameters())
    before = [param.detach().full_tensor().clone() for param in params]
    for param, grad in zip(params, grads, strict=True):
        rows = slice(None, 5) if mesh["dp_shard"].get_local_rank() == 0 else slice(5, None)
        param.grad = param.detach().clone()
        param.grad.to_local().copy_(grad[rows])
    group = {"params": params, "weight_decay": 0.0, "matrices": True}
    section = small_job(("optim.name", "muon")).optim
    optimizer: Any = build_muon([group], section)
    optimizer.step()
    for param, old, grad in zip(params, before, grads, strict=True):
        update = orthogonalize(0.0975 * grad)
        expected = old - section.lr * 0.2 * math.sqrt(10) * update
        off = float((param.detach().full_tensor() - expected).abs().max())
        expect(off < 1e-3 * section.lr, f"a replicated matrix is off by {off:.1e}", module)
    (exchange,) = optimizer._exchanges
    expect(
        len(exchange.parts.owned) == 2,
        f"this rank has {len(exchange.parts.owned)} of 8 matrices",
        module,
    )
    crossing = [r for r, _ in exchange.parts.to_receive if r // 2 != dist.get_rank() // 2]
    expect(not crossing, f"ranks {crossing} of the other replica send", module)
    expect(len(exchange.parts.to_receive) == 4, "a part is sent twice", module)


@check("unit: skipped steps")
def check_skipped_steps() -> None:
    """Check that a step skipped because of nonfinite gradients changes no bit."""
    from weft.optim.optimizer import OPTIMIZERS, build_optimizer, masked_step

    for name, dtype, module in (
        ("adamw", "float32", "optim/optimizer.py"),
        ("adamw", "bfloat16", "optim/low_precision_adamw.py"),
        ("adamw", "8bit", "optim/low_precision_adamw.py"),
        ("muon", "float32", "optim/muon.py"),
        ("muon", "bfloat16", "optim/low_precision_adamw.py"),
        ("muon", "8bit", "optim/low_precision_adamw.py"),
    ):
        generator = torch.Generator().manual_seed(0)
        params = {
            n: nn.Parameter(torch.randn(shape, generator=generator))
            for n, shape in (("matrix", (8, 64)), ("table", (5, 64)), ("gain", (64,)))
        }
        optim = small_job(("optim.name", name), ("optim.state_dtype", dtype)).optim
        optimizer = build_optimizer(
            params.items(), optim, lookup(name, OPTIMIZERS), lambda n: True, {params["matrix"]}
        )

        def read_all(params_to_read: Any = params, optimizer: Any = optimizer) -> list[Tensor]:
            states = [v for p in params_to_read.values() for v in optimizer.state[p].values()]
            values = [*params_to_read.values(), *(v for v in states if isinstance(v, Tensor))]
            return [v.dequantize() if hasattr(v, "codes") else v.detach().clone() for v in values]

        for step in range(8):
            skipped = step % 2 == 1
            for param in params.values():
                param.grad = torch.randn(param.shape, generator=generator) * 10.0**step
                if skipped:
                    param.grad[..., 3] = math.inf
            before = read_all()
            masked_step(optimizer, torch.tensor(skipped))
            pairs = zip(before, read_all(), strict=False)  # moments do not exist before step 1
            same = [torch.equal(a, b) for a, b in pairs]
            expect(all(same) if skipped else not same[0], f"{name} {dtype}, step {step}", module)


@check("unit: sum in a fixed order", ranks=3)
def check_ordered_sum() -> None:
    """Check the bits of sums over microbatches and ranks, in two steps."""
    from weft.parallel.data_parallel import OrderedSum

    module, group = "parallel/data_parallel.py", dist.group.WORLD
    assert group is not None
    add = OrderedSum(group)
    torch.manual_seed(0)
    for _, size in itertools.product(range(2), (7, 9)):
        values_MRC = torch.randn(3, 3, size) * 10.0 ** torch.randint(-4, 4, (3, 3, size))
        expected_C = torch.zeros(size)
        for value_C in values_MRC.flatten(0, 1):
            expected_C = expected_C + value_C
        for microbatch, values_RC in enumerate(values_MRC):
            own_C = values_RC[dist.get_rank()].clone()
            add(own_C, microbatch == 2)
            result_C = expected_C if microbatch == 2 else torch.zeros(size)
            expect(torch.equal(own_C, result_C), f"{own_C.tolist()} is the sum", module)


@check("unit: gather in two stages", ranks=4)
def check_hierarchical_gather() -> None:
    """Check that a gather across nodes and then inside them equals an all-gather.

    An input inside the output must be at its rank's offset, else NCCL would overwrite it.
    """
    from torch.distributed.device_mesh import init_device_mesh

    from weft.parallel import hierarchical_gather

    module = "parallel/hierarchical_gather.py"
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    gather = hierarchical_gather.HierarchicalAllGather(mesh, 2)
    single, several, node = hierarchical_gather.all_gather, dist.all_gather, gather.intra_node

    def is_inside(part: Tensor, full: Tensor, at: int) -> bool:
        begin, end = full.data_ptr(), full.data_ptr() + full.nbytes
        return begin <= part.data_ptr() < end and part.data_ptr() != at

    def watch_single(out: Tensor, part: Tensor, group: Any, *args: Any, **keys: Any) -> Any:
        at = out.data_ptr() + dist.get_rank(group) * part.nbytes
        expect(not is_inside(part, out, at), "an input lies at another rank's place", module)
        return single(out, part, group, *args, **keys)

    def watch_several(outs: list[Tensor], part: Tensor, group: Any, *args: Any) -> Any:
        at = outs[dist.get_rank(group)].data_ptr()
        inside = any(is_inside(part, out, at) for out in outs)
        expect(not inside, "an input lies at another rank's place", module)
        return several(outs, part, group, *args)

    class Watched:
        """The group of a node; its gathers are methods of a class without attributes."""

        rank = node.rank

        def allgather_into_tensor_coalesced(self, outs: list[Tensor], parts: list[Tensor]) -> Any:
            for out, part in zip(outs, parts, strict=True):
                at = out.data_ptr() + self.rank() * part.nbytes
                expect(
                    not is_inside(part, out, at), "an input lies at another rank's place", module
                )
            return node.allgather_into_tensor_coalesced(outs, parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hierarchical_gather, "all_gather", watch_single)
        patch.setattr(dist, "all_gather", watch_several)
        patch.setattr(gather, "intra_node", Watched())
        for count, in_place, later in itertools.product((1, 7), (False, True), (False, True)):
            own = torch.arange(count) + 100.0 * dist.get_rank()
            out = torch.zeros(4 * count)
            part = own.clone()
            if in_place:
                part = out[dist.get_rank() * count :][:count]
                part.copy_(own)
            work = gather(out, part, mesh.get_group(), async_op=later)
            if work is not None:
                work.wait()
            expected = torch.cat([torch.arange(count) + 100.0 * n for n in range(4)])
            expect(torch.equal(out, expected), f"{out.tolist()} is gathered", module)


@check("saved: statistics of layers", ranks=2)
def check_statistics() -> None:
    """Check the merged counts, means and RMS of two ranks."""
    from weft.records.layer_comparison import read_statistics
    from weft.training.setup import open_layer_stats

    directory = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(directory, src=0)
    try:
        keys = [
            ("run.dir", directory[0]),
            ("parallel.tp", "2"),
            ("model.tied_embeddings", "false"),
            ("debug.layer_stats_steps", "1"),
        ]
        job = small_job(*keys)
        plan = resolve(job, Machine("cpu", devices=2, world_size=2))
        built = build(plan, Rank(dist.get_rank(), dist.get_rank(), 2, torch.device("cpu")))
        statistics = open_layer_stats(built)
        statistics.open(0, print)
        text = open_dataset(store_path())
        mixture = build_mixture(text, "train", job.train.seq_len, job.data, job.train.seed)
        batches = Loader(mixture, 0, 8, 0, 1, plan.microbatch_size).get_microbatches(0)
        with statistics.record_forward(1, [len(b.tokens_BT) for b in batches]):
            built.train_step.forward_backward(batches)
        statistics.record_gradients(1)
        statistics.record_parameters(1)
        statistics.close()
        params = {
            n: (p.full_tensor(), p.grad.full_tensor())  # type: ignore[union-attr,operator]
            for n, p in trainable_parameters(built.model_parts)
        }
        model = build_theirs("llama", plan.model)
        with torch.no_grad():
            for n, (p, _) in params.items():
                theirs_of(model, n).copy_(p)
        tokens = torch.cat([b.tokens_BT for b in batches])
        outs: dict[str, Tensor] = {}

        def hook(m: Any, args: Any, out: Any) -> None:
            outs["layers.0"] = (out[0] if isinstance(out, tuple) else out).double()

        model.get_submodule("model.layers.0").register_forward_hook(hook)
        with torch.no_grad():
            model(tokens)
        if dist.get_rank():
            return
        rows = {(r["kind"], r["name"]): r for r in read_statistics(Path(directory[0]))}
        full = {("activation", "layers.0"): outs["layers.0"]}
        full |= {("parameter", n): p.double() for n, (p, _) in params.items()}
        full |= {("gradient", n): g.double() for n, (_, g) in params.items()}
        for key, value in full.items():
            row, rms = rows[key], float(value.square().mean().sqrt())
            same = row["count"] == value.numel() and is_close(row["rms"], rms, 1e-4)
            same &= abs(row["mean"] - float(value.mean())) < 1e-3 * rms
            same &= is_close(row["max_abs"], float(value.abs().max()), 1e-4)
            expect(same, f"statistics of {key}", "monitor/layer_stats.py")
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(directory[0])


# --------------------------------------------------------------------------- checkpoints

SAVED: Overrides = [
    ("run.dir", "/nonexistent"),
    ("model.num_layers", "4"),
    ("model.tied_embeddings", "false"),
    ("data.packing", "documents"),
    ("train.global_batch_size", "12"),
    ("train.microbatch_size", "2"),
]
FROM_TO = [
    ([("parallel.dp_shard", "2"), ("parallel.tp", "2")], []),
    ([("parallel.pp", "2"), ("parallel.dp_shard", "2")], [("parallel.tp", "4")]),
    ([], [("parallel.dp_shard", "3")]),
    ([("optim.name", "muon"), ("parallel.dp_shard", "2")], [("optim.name", "muon")]),
    (
        [
            ("model.kind", "moe"),
            ("model.preset", "toy-moe"),
            ("model.head_dim", "8"),
            ("model.num_experts", "4"),
            ("model.expert_dim", "16"),
            ("parallel.dp_shard", "2"),
            ("parallel.ep", "2"),
        ],
        [
            ("model.kind", "moe"),
            ("model.preset", "toy-moe"),
            ("model.head_dim", "8"),
            ("model.num_experts", "4"),
            ("model.expert_dim", "16"),
            ("parallel.dp_replicate", "2"),
        ],
    ),
]


def _built(overrides: Overrides) -> tuple[Job, Plan, Built]:
    job = small_job(*SAVED, *overrides)
    world, rank = dist.get_world_size(), dist.get_rank()
    plan = resolve(job, Machine("cpu", devices=2, world_size=world))
    return job, plan, build(plan, Rank(rank, rank, world, torch.device("cpu")))


def _state(built: Built) -> dict[str, Tensor]:
    state = model_state(built.model_parts) | optimizer_state(built.model_parts, built.optimizer)
    return {n: _all(t).detach().clone() for n, t in state.items()}


@check("saved: replicas", ranks=4)
def check_replicas() -> None:
    """Check that a tensor is equal along its replica axes, with the expected copies."""
    from weft.checkpoint.state_dict import find_replica_axes

    for overrides in (
        [("parallel.dp_shard", "2"), ("parallel.dp_replicate", "2")],
        [("parallel.dp_shard", "2"), ("parallel.tp", "2")],
    ):
        job, plan, built = _built(overrides)
        _step(job, plan, built, 0)
        state = model_state(built.model_parts) | optimizer_state(built.model_parts, built.optimizer)
        for name, axes in find_replica_axes(built.model_parts, state).items():
            value: Any = state[name]
            local = (value.to_local() if hasattr(value, "to_local") else value).contiguous()
            for axis in axes:
                copies = [torch.empty_like(local) for _ in range(axis.size)]
                dist.all_gather(copies, local, group=axis.group)
                same = all(torch.equal(copy, local) for copy in copies)
                expect(same, f"replicas of {name} differ", "checkpoint/state_dict.py")
            total = torch.tensor(local.numel())
            dist.all_reduce(total)
            count = math.prod(axis.size for axis in axes)
            expect(
                count * value.numel() == int(total),
                f"{count} replicas of {name}",
                "checkpoint/state_dict.py",
            )


def _all(tensor: Any) -> Tensor:
    result: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return result


def _step(job: Job, plan: Plan, built: Built, number: int) -> float:
    """Run one optimizer step; return the loss."""
    mixture = build_mixture(open_dataset(store_path()), "train", job.train.seq_len, job.data, 0)
    loader = Loader(mixture, 0, 12, built.mesh.dp_rank, plan.dp_size, plan.microbatch_size)
    loss = built.train_step.forward_backward(loader.get_microbatches(12 * number))
    dist.all_reduce(loss)
    params = [p for _, p in trainable_parameters(built.model_parts)]
    stages = built.mesh.get_group("pp") if plan.pp > 1 else None
    norm, _ = compute_grad_norm(params, stages)
    set_learning_rate(built.optimizer, 0.01)
    masked_step(built.optimizer, torch.tensor(False), clip_scale(norm, 1.0))
    for hook in built.train_step.hooks:
        hook.reduce()
        hook.update(torch.tensor(False))
    built.optimizer.zero_grad()
    return loss.item()


def save_layout(directory: str, overrides: Overrides) -> dict[str, Any]:
    """Run two steps, save, run one step; return the saved state and the last loss."""
    job, plan, built = _built(overrides)
    for number in range(2):
        _step(job, plan, built, number)
    saver = CheckpointManager(Path(directory), 2, async_save=True)
    state = _state(built)
    saver.save(built.model_parts, built.optimizer, {"step": 2, "samples": 24})
    params = [param for part in built.model_parts for param in part.parameters()]
    for param in params:  # later changes must not affect the save
        param.data.mul_(2.0)
    saver.wait()
    for param in params:
        param.data.div_(2.0)
    loss = _step(job, plan, built, 2)
    return {"state": state, "loss": loss, "after": _state(built)}


def load_layout(directory: str, overrides: Overrides) -> dict[str, Any]:
    """Load the checkpoint; return the same values."""
    job, plan, built = _built(overrides)
    load_checkpoint(list_checkpoints(Path(directory))[-1], built.model_parts, built.optimizer)
    state = _state(built)
    loss = _step(job, plan, built, 2)
    return {"state": state, "loss": loss, "after": _state(built)}


def _world(overrides: Overrides) -> int:
    return math.prod(int(v) for k, v in overrides if k.removeprefix("parallel.") in AXES)


def _find_between(source: Overrides, target: Overrides) -> Callable[[str, float], Any]:
    def find(precision: str, timeout: float) -> Any:
        from tests.mutation.battery import read_failure

        with tempfile.TemporaryDirectory() as directory:
            try:
                saved = run_ranks(save_layout, _world(source), directory, source, timeout=timeout)
                loaded = run_ranks(load_layout, _world(target), directory, target, timeout=timeout)
                _compare_states(Path(directory), saved, loaded)
            except (WeftError, Unexpected) as error:
                return read_failure(error)
        return None

    return find


def _compare_states(directory: Path, saved: list[Any], loaded: list[Any]) -> None:
    before = {n: t for rank in saved for n, t in rank["state"].items()}
    on_disk = read_by_hand(list_checkpoints(directory)[-1])
    expect(on_disk.keys() == before.keys(), "what is saved", "checkpoint/state_dict.py")
    for n, t in before.items():
        expect(torch.equal(on_disk[n], t), f"{n} on the disk", "checkpoint/shard_files.py")
    for rank in loaded:
        for n, t in rank["state"].items():
            expect(torch.equal(before[n], t), f"{n} as it was loaded", "checkpoint/load.py")
    remote = {n for rank in loaded for n in rank["state"]}
    expect(remote == before.keys(), "what is loaded", "checkpoint/state_dict.py")
    expect(is_close(loaded[0]["loss"], saved[0]["loss"], 1e-5), "the loss", "checkpoint/load.py")
    after = {n: t for rank in saved for n, t in rank["after"].items()}
    for rank in loaded:
        for n, t in rank["after"].items():
            if not n.startswith("model."):
                continue
            distance = float((after[n] - before[n]).norm())
            off = float((t - after[n]).norm())
            expect(off <= 0.05 * distance + 1e-7, f"{n} after the next step", "checkpoint/load.py")


for _source, _target in FROM_TO:
    _keys = [k.partition(".")[2] + v for k, v in _source if k != "model.preset"]
    _name = f"saved: {' '.join(_keys) or 'one'}"
    CHECKS[_name] = _find_between(_source, _target)
    _functions = (save_layout, load_layout, _compare_states, _step)
    SOURCES[_name] = f"{_source}{_target}{[inspect.getsource(function) for function in _functions]}"


@check("saved: unfinished checkpoints")
def check_unfinished() -> None:
    """Check that an incomplete checkpoint is not visible under its name."""
    from weft.checkpoint import commit as store

    commit, observed = store._commit, []

    def watched(temporary: Path, final: Path, *rest: Any) -> None:
        observed.append(final.exists())
        commit(temporary, final, *rest)

    store._commit = watched
    _, _, built = _built([])
    with tempfile.TemporaryDirectory() as name:
        saver = CheckpointManager(Path(name), 2)
        saver.save(built.model_parts, built.optimizer, {"step": 1, "samples": 12})
        saver.wait()
    expect(observed == [False], "half a checkpoint has its name", "checkpoint/commit.py")


@check("saved: damaged checkpoints")
def check_damage() -> None:
    """Check that a checkpoint with any changed bit is refused."""
    job, plan, built = _built([])
    _step(job, plan, built, 0)
    with tempfile.TemporaryDirectory() as name:
        saver = CheckpointManager(Path(name), 3)
        for step in (1, 2, 3, 4):
            saver.save(built.model_parts, built.optimizer, {"step": step, "samples": 12})
            saver.wait()
        remaining = [path.name for path in list_checkpoints(Path(name))]
        expect(
            remaining == [f"step-0000000{n}" for n in (2, 3, 4)],
            f"kept: {remaining}",
            "checkpoint/commit.py",
        )
        path = list_checkpoints(Path(name))[-1]
        shard = path / "shard-00000.safetensors"
        full = bytearray(shard.read_bytes())
        manifest = json.loads((path / "manifest.json").read_bytes())

        def refused(what: str, module: str, says: str = "") -> None:
            try:
                load_checkpoint(path, built.model_parts, built.optimizer)
            except WeftError as error:
                expect(says in str(error), f"{what}: {error}", module)
                return
            raise Unexpected(f"{what} is loaded", module)

        random = np.random.default_rng(0)
        for at in [0, len(full) - 1, *random.integers(0, len(full), 6).tolist()]:
            for bit in (0, 7):
                full[at] ^= 1 << bit
                shard.write_bytes(full)
                refused("a flipped bit", "checkpoint/fingerprint.py", "hash")
                full[at] ^= 1 << bit
        # Swapped elements and rows of a matrix: the same numbers at other positions.
        entry = manifest["tensors"]["model.layers.0.mlp.up_proj.weight"]
        [[_, sizes, _, position]] = entry["shards"]
        row = 4 * sizes[1]
        for size, at in ((4, position), (row, position)):
            first, second = full[at : at + size], full[at + size : at + 2 * size]
            full[at : at + size], full[at + size : at + 2 * size] = second, first
            shard.write_bytes(full)
            refused(f"{size} bytes that are exchanged", "checkpoint/fingerprint.py", "hash")
            full[at : at + size], full[at + size : at + 2 * size] = first, second
        shard.write_bytes(full[:-4])
        refused("a file that is cut off", "checkpoint/shard_files.py")
        shard.write_bytes(full + b"abcd")
        refused("a file that is too long", "checkpoint/shard_files.py")
        shard.write_bytes(full)
        load_checkpoint(path, built.model_parts, built.optimizer)
        text = (path / "manifest.json").read_text()
        (path / "manifest.json").write_text(re.sub(r'("samples": *)12', r"\g<1>13", text))
        refused("a manifest that was changed", "checkpoint/manifest.py")
        names = ["model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.weight"]
        a, b = (manifest["tensors"][n]["shards"] for n in names)
        manifest["tensors"][names[0]]["shards"], manifest["tensors"][names[1]]["shards"] = b, a
        from weft.checkpoint.manifest import manifest_text

        manifest.pop("hash", None)
        (path / "manifest.json").write_text(manifest_text(manifest))
        refused("two tensors that are exchanged", "checkpoint/load.py")


# --------------------------------------------------------------------------- export, inference


@check("unit: files of transformers")
def check_files() -> None:
    """Check exported dtypes, which layers of EXAONE 4 have positions, and a router loss."""
    from tests.models import test_hf_mapping
    from weft.conversion.hf_weights import list_hf_tensors
    from weft.models import FAMILIES
    from weft.models.hf_mapping import from_hf_config, to_hf_config

    config: Any = FAMILIES["deepseek_v3"].presets["toy"]
    for name, tensor in list_hf_tensors(FAMILIES["deepseek_v3"], config).items():
        known = torch.float32 if name.endswith("e_score_correction_bias") else None
        expect(
            tensor.dtype == known, f"{name} has dtype {tensor.dtype}", "conversion/hf_weights.py"
        )
    family, module = FAMILIES["exaone4"], "models/hf_layers.py"
    for window, pattern in ((8, "N"), (None, "R")):
        tree = to_hf_config(family, family.presets["toy"], "float32")
        tree |= {"sliding_window": window, "layer_types": ["full_attention"] * 3}
        read, errors = from_hf_config(family, tree)
        expect(not errors and read.rope_pattern == pattern, f"positions at {window}", module)
        written = to_hf_config(family, read, "float32")
        expect(from_hf_config(family, written) == (read, []), f"writes {window}", module)
    try:
        test_hf_mapping.test_router_loss_of_a_config_is_that_of_transformers()
    except AssertionError as error:
        expect(False, f"a router loss: {error}", "models/hf_mapping.py")


@check("run: export, import and adapters")
def check_export() -> None:
    """Check that transformers and PEFT compute equal outputs from an export."""
    from transformers import AutoModelForCausalLM

    from weft.conversion.hf_convert import export_checkpoint
    from weft.conversion.hf_import import import_model
    from weft.inference.inference_model import find_checkpoint, load_unsharded

    tokens = torch.arange(48).view(2, 24) * 7 % 512
    rows = Rows(tokens, tokens, torch.zeros_like(tokens), torch.arange(24).expand_as(tokens))
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        keys = [
            ("model.rope_scaling", "llama3"),
            ("model.rope_theta", "500"),
            ("model.rope_original_context", "16"),
            ("model.dim", "64"),
            ("train.steps", "2"),
            ("train.eval_interval", "0"),
        ]
        job = _train(home / "run", *keys)
        (home / "run" / "job.toml").write_text(to_toml(job, "demo", job))
        shutil.copy(store_path() / "tokenizer.json", home / "run")
        state = read_by_hand(list_checkpoints(home / "run" / "checkpoints")[-1])
        plan = resolve(job, Machine("cpu", devices=1, world_size=1))
        known = build_theirs("llama", plan.model)
        with torch.no_grad():
            for n, value in state.items():
                if n.startswith("model."):
                    theirs_of(known, n.removeprefix("model.")).copy_(value)
            expected = logits_of(known, rows)
        silent: Any = lambda progress: None  # noqa: E731
        export_checkpoint(home / "run", home / "out", "float32", "5GB", silent)
        exported = AutoModelForCausalLM.from_pretrained(home / "out", dtype=torch.float32)
        with torch.no_grad():
            off = (exported(tokens).logits - expected).abs().max() / expected.abs().max()
        expect(off < 1e-5, f"exported logits are off by {off}", "models/hf_mapping.py")
        import_model(home / "out", home / "again", silent)
        ours = load_unsharded(find_checkpoint(home / "again"), torch.device("cpu")).eval()
        with torch.no_grad():
            off = (ours(tokens) - expected).abs().max() / expected.abs().max()
        expect(off < 1e-5, f"imported logits are off by {off}", "conversion/hf_convert.py")
        # Train adapters for the imported model.
        lora = [
            *keys,
            ("lora.rank", "4"),
            ("lora.alpha", "32"),
            ("model.ffn_dim", "64"),
            ("optim.warmup_steps", "0"),
            ("optim.lr", "0.05"),
            ("lora.quantize", "int8"),
            ("lora.rank_stabilized", "true"),
        ]
        lora = [pair for pair in lora if pair[0] != "model.ffn_dim"]
        job = _train(home / "again", *lora, ("run.dir", str(home / "again")))
        (home / "again" / "job.toml").write_text(to_toml(job, "demo", job))
        ours = load_unsharded(find_checkpoint(home / "again"), torch.device("cpu")).eval()
        with torch.no_grad():
            tuned = ours(tokens)
        expect(
            (tuned - expected).abs().max() > 0.02,
            "adapters do nothing",
            "parallel/lora/adapters.py",
        )
        export_checkpoint(home / "again", home / "merged", "float32", "5GB", silent)
        merged = AutoModelForCausalLM.from_pretrained(home / "merged", dtype=torch.float32)
        with torch.no_grad():
            off = (merged(tokens).logits - tuned).abs().max() / tuned.abs().max()
        expect(off < 1e-5, f"merged logits are off by {off}", "conversion/peft_export.py")
        from peft import PeftModel

        from tests.oracle import rounded

        export_checkpoint(home / "again", home / "adapter", "float32", "5GB", silent, adapter=True)
        with torch.no_grad():
            for n, p in exported.named_parameters():
                if "_proj" in n:
                    p.copy_(rounded(p, "int8"))
        other = PeftModel.from_pretrained(exported, str(home / "adapter")).eval()
        with torch.no_grad():
            off = (other(tokens).logits - tuned).abs().max() / tuned.abs().max()
        expect(off < 1e-5, f"PEFT's logits are off by {off}", "conversion/peft_export.py")


@check("run: adapters of experts")
def check_expert_adapters() -> None:
    """Compare experts' adapters with dense gradients, with PEFT, and with a fixed router."""
    from tests.conversion import test_peft_export as exports
    from tests.parallel.lora import test_expert_adapters as experts

    def run(module: str, function: Callable[..., Any], *args: Any) -> None:
        try:
            function(*args)
        except Exception as error:
            expect(False, f"{function.__name__}: {error}", module)

    module = "parallel/lora/adapters.py"
    run(module, experts.test_quantized_experts_equal_products_of_dequantized_matrices, "nf4")
    for case in (("gpt_oss", False), ("moe", True)):
        run(module, experts.test_adapter_gradients_follow_from_those_of_the_merged_weights, *case)
    run(module, experts._initial, [*experts.EXPERTS, ("model.expert_dim", "64")])
    keys = [*experts.EXPERTS, ("model.balance_rate", "0.01")]
    run("training/step.py", experts._bias_after_a_step, keys)
    with tempfile.TemporaryDirectory() as name:
        function = exports.test_base_of_adapters_has_the_load_balance_bias
        run("checkpoint/load.py", function, Path(name))
    for kind in ("gpt_oss", "llama4", "phi3", "qwen3_moe"):
        with tempfile.TemporaryDirectory() as name:
            home = Path(name)
            lora = {"rank": 3, "alpha": 5.0}
            run(
                "conversion/peft_export.py",
                exports.check,
                exports.write_run(kind, home, lora),
                home,
            )


@check("ranks: dropout and lengths of experts", ranks=2)
def check_expert_dropout() -> None:
    """Compare gradients of adapters in layouts that split tokens, experts or neither."""
    from tests.layouts import parse, size
    from tests.parallel.lora import test_expert_adapters as experts
    from tests.small import gradients

    for model, layouts in {
        "": ("tp2", "dp_shard2 ep=2", "tp2 etp=1 ep=2"),
        "model.mtp_layers=1": ("tp2",),
    }.items():
        job = [*experts.EXPERTS, *size("dp_shard2"), *parse(f"{experts.BOTH} {model}")[1]]

        def grads_of(layout: str, job: Overrides = job) -> dict[str, Tensor]:
            return gradients([*job, *parse(layout)[1]], str(store_path()))["grads"]

        def differences(layout: str, extra: str, grads_of: Any = grads_of) -> list[str]:
            grads, expected = grads_of(f"{layout} {extra}"), grads_of(f"dp_shard2 {extra}")
            return [
                f"{layout}: {name} by {off}"
                for name, grad in expected.items()
                if (off := float((grads[name] - grad).abs().max() / grad.abs().max().clamp(1e-9)))
                > 1e-4
            ]

        for layout in layouts:
            for text in differences(layout, "")[:1]:
                without = differences(layout, "lora.dropout=0")
                module = "expert_parallel" if without else "lora_dropout"
                expect(False, text, f"parallel/{module}.py")


@check("ranks: records of a step that starts again", ranks=2)
def check_records_of_last_pass() -> None:
    """Compare the largest attention logits with those of a step without an overflow."""
    from tests.layouts import parse
    from tests.parallel import test_expert_dispatch as dispatch

    keys = parse(f"{dispatch.BIASES} monitor.attention_logits=true debug.layer_stats_steps=1")[1]
    padded = parse("ep_dispatch=padded ep_capacity_factor=1")[1]
    jobs = [[*dispatch.MODEL, *keys, *extra] for extra in ([], padded)]
    (_, logits, _), (_, again, _) = dispatch.records_of_steps(jobs, str(store_path()))
    expect(torch.equal(logits, again), "logits of an overflow are recorded", "training/step.py")


@check("unit: largest attention logits")
def check_attention_logits() -> None:
    """Compare the logits with dense scores, and the scaled weights with the formula."""
    from tests.optim import test_qk_clip as clip

    module, models = "optim/qk_clip.py", [*clip.MODELS.values()]
    for error, difference, *_ in clip.formula_differences(models, str(store_path())):
        expect(error < 1e-5, "the largest logits", module)
        expect(difference < 1e-6, "the scaled weights", module)


@check("ranks: weights that follow from logits", ranks=2)
def check_clipped_layouts() -> None:
    from tests.layouts import parse
    from tests.optim import test_qk_clip as clip

    for layout in ("pp2", "cp2 cp_method=ulysses", "dp_shard2"):
        try:
            clip.check_formula([*clip.GROUPED, *parse(layout)[1]], str(store_path()))
        except Exception as error:
            expect(False, f"{layout}: {error}", "optim/qk_clip.py")


@check("run: clipped weights")
def check_clipped_run() -> None:
    """Check that the second step of a run has smaller logits than the first."""
    from tests.optim import test_qk_clip as clip
    from tests.small import records, train_rank

    with tempfile.TemporaryDirectory() as name:
        threshold = ("optim.qk_clip_threshold", "0.002")
        train_rank([*clip.FEW_STEPS, ("run.dir", name), threshold], str(store_path()))
        one, two = (record["max_attention_logit"] for record in records(Path(name)))
        expect(two < one / 2, f"logits of {two} after {one}", "training/loop.py")


@check("unit: sampling")
def check_sampling() -> None:
    """Compare token probabilities with transformers' logits processors, then check the draw."""
    from transformers.generation import logits_process as theirs

    from weft.inference.generate import GeneratedSequence, Sampling, sample_token

    module, size = "inference/generate.py", 40
    generator = torch.Generator().manual_seed(0)
    sequence = GeneratedSequence("", [3, 7, 7, 20, 31], 0, generator, "")

    def process(logits: Tensor, sampling: Sampling) -> Tensor:
        steps: list[Any] = [theirs.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)]
        if sampling.temperature:
            steps.append(theirs.TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            steps.append(theirs.TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            steps.append(theirs.TopPLogitsWarper(sampling.top_p))
        if sampling.min_p:
            steps.append(theirs.MinPLogitsWarper(sampling.min_p))
        ids, scores = torch.tensor([sequence.ids]), logits[None]
        for step in steps:
            scores = step(ids, scores)
        return scores[0]

    def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
        """Return each token's probability from every possible draw."""
        result, outcome, drawn = torch.zeros(size), 0, torch.empty(0)

        def draw(weights: Tensor, *args: Any, **keys: Any) -> Tensor:
            nonlocal drawn
            drawn = weights / weights.sum()
            return torch.tensor([outcome])

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "multinomial", draw)
            while outcome < max(1, len(drawn)):
                token = sample_token(logits, sequence, sampling)
                result[token] += drawn[outcome]
                outcome += 1
        return result

    choices: dict[str, tuple[Any, ...]] = {
        "repetition_penalty": (1.0, 1.5, 4.0, 0.7),
        "temperature": (1.0, 0.5, 2.0),
        "top_k": (0, 1, 6, 25),
        "top_p": (1.0, 0.95, 0.6, 0.1),
        "min_p": (0.0, 0.05, 0.4),
    }
    plain = {name: values[0] for name, values in choices.items()}
    item = [plain | {name: value} for name, values in choices.items() for value in values]
    random = np.random.default_rng(0)
    mixed = [{n: v[random.integers(len(v))] for n, v in choices.items()} for _ in range(80)]
    for options in item + mixed:
        logits = 2 * torch.randn(size, generator=generator)
        expected = process(logits, Sampling(**options)).softmax(0)
        off = float((probabilities(logits, Sampling(**options)) - expected).abs().max())
        expect(off < 1e-5, f"probabilities with {options} are off by {off:.2g}", module)
        greedy = Sampling(**options | {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0})
        best = int(process(logits, greedy).argmax())
        expect(sample_token(logits, sequence, greedy) == best, f"greedy with {options}", module)
    logits, draws = torch.linspace(-1.0, 1.0, 10), 4000
    sampling = Sampling(temperature=1.0, top_k=0)
    drawn = torch.tensor([sample_token(logits, sequence, sampling) for _ in range(draws)])
    expected = draws * logits.softmax(0)
    chi_square = float(((torch.bincount(drawn, minlength=10) - expected).square() / expected).sum())
    expect(chi_square < 9 + 5 * math.sqrt(2 * 9), f"chi-square of draws: {chi_square}", module)


@check("run: generated text")
def check_generate() -> None:
    """Check that greedy generation with a cache equals the plain model."""
    for name, overrides in GENERATE.items():
        _check_generate(name, overrides)


# Models whose new tokens see all earlier ones, a window, or their chunk.
GENERATE: dict[str, Overrides] = {
    "Llama": [],
    "Mistral": [
        ("model.kind", "mistral"),
        ("model.head_dim", "8"),
        ("model.layer_pattern", "L"),
        ("model.sliding_window", "5"),
    ],
    "Llama 4": [
        ("model.qk_norm", "unit"),
        ("model.layer_pattern", "LG"),
        ("model.attention_chunk", "6"),
        ("model.rope_interleaved", "true"),
        ("model.rope_pattern", "RN"),
        ("model.temperature_interval", "4"),
    ],
}


def _check_generate(model_name: str, overrides: Overrides) -> None:
    from tests.random_runs import random_run
    from weft.inference.generate import Sampling, generate, load_chat_format, make_sequences
    from weft.inference.inference_model import find_checkpoint, load_local_model

    with tempfile.TemporaryDirectory() as name:
        directory = random_run(Path(name) / "run", store_path(), *overrides)
        checkpoint = find_checkpoint(directory)
        plan_model = checkpoint.config
        chat_format = replace(load_chat_format(checkpoint), end_tokens=frozenset())
        state = read_by_hand(checkpoint.path)
        known = build_theirs(dict(overrides).get("model.kind", "llama"), plan_model)
        with torch.no_grad():
            for n, value in state.items():
                theirs_of(known, n.removeprefix("model.")).copy_(value)
        prompts = ["def f(", "import os\nclass A", "x"]
        for cached in (True, False):
            model = load_local_model(checkpoint, torch.device("cpu"))
            sampling = Sampling(max_tokens=8, temperature=0.0)
            rows = make_sequences(prompts, chat_format, sampling)
            for _ in generate(model, chat_format, rows, sampling, cached=cached):
                pass
            for row in rows:
                ids = list(row.ids[: row.prompt_length])
                for _ in range(8):
                    with torch.no_grad():
                        logits = known(torch.tensor([ids])).logits[0, -1]
                    ids.append(int(logits[: chat_format.tokenizer.get_vocab_size()].argmax()))
                blame = "models/kv_cache.py" if cached else "inference/inference_model.py"
                expect(
                    list(row.ids) == ids, f"greedy tokens of {model_name}, cached {cached}", blame
                )


@check("run: losses of text")
def check_losses() -> None:
    """Check `weft evaluate`: the loss of all validation tokens, and bits per byte."""
    from tests.random_runs import random_run
    from weft.inference.evaluate import ALL_SEQUENCES, evaluate_sources
    from weft.inference.inference_model import find_checkpoint, plan_inference

    module = "inference/evaluate.py"
    with tempfile.TemporaryDirectory() as name:
        directory = random_run(Path(name) / "run", store_path())
        checkpoint = find_checkpoint(directory)
        state = read_by_hand(checkpoint.path)
        known = build_theirs("llama", checkpoint.config)
        with torch.no_grad():
            for n, value in state.items():
                theirs_of(known, n.removeprefix("model.")).copy_(value)
        text = open_dataset(store_path())
        store = text.sources[0].store
        stream = store.tokens("validation")
        tokens = stream.read_windows(np.array([0]), len(stream))[0]
        for packing in ("windows", "documents"):
            allowed = ("data.", "train.")
            _job, plan = plan_inference(
                checkpoint, [("data.packing", packing)], [], allowed, for_generation=False
            )
            rank = Rank(0, 0, 1, torch.device("cpu"))
            [loss] = evaluate_sources(
                checkpoint, plan, text, ALL_SEQUENCES, rank, False, lambda progress: None
            )
            first_half = loss.to_dict()
            count = (len(tokens) - 1) // 32 * 32
            inputs = torch.from_numpy(tokens[:count].reshape(-1, 32))
            targets = torch.from_numpy(tokens[1 : count + 1].reshape(-1, 32)).clone()
            documents = torch.zeros_like(inputs)
            if packing == "documents":
                results = (inputs == store.manifest.separator).long()
                documents = results.cumsum(1) - results
                targets[results.bool()] = NONE
            rows = Rows(inputs, targets, documents, torch.arange(32).expand_as(inputs))
            with torch.no_grad():
                parts = [
                    losses_of(known, Rows(*(c[i : i + 64] for c in rows))).sum()
                    for i in range(0, len(inputs), 64)
                ]
            evaluated = int((targets != NONE).sum())
            mean = float(sum(parts)) / evaluated
            expect(is_close(first_half["nats_per_token"], mean, 1e-4), f"nats, {packing}", module)
            split = store.manifest.validation
            predicted = split.tokens - (split.documents if packing == "documents" else 1)
            expect(first_half["tokens"] == evaluated, "tokens that are predicted", module)
            expect(is_close(first_half["perplexity"], math.exp(mean), 1e-3), "perplexity", module)
            bits = mean * predicted / split.bytes / math.log(2)
            expect(is_close(first_half["bits_per_byte"], bits, 1e-3), "bits per byte", module)
