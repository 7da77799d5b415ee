"""Checks by formulas: what comes of data, arithmetic, checkpoints, export and inference, by hand.

Each is a function that runs in ranks, and calls `expect` with the module of weft that it takes to
be at fault if the expectation does not hold.
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
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import chat as chats
from tests.oracle import (
    NONE,
    Rows,
    Updates,
    answers_of,
    build_theirs,
    decays,
    draw_corpus,
    grad_of,
    logits_of,
    losses_of,
    rate,
    theirs_of,
)
from tests.small import Overrides, small_job
from weft.checkpoint.load import load_checkpoint
from weft.checkpoint.manager import CheckpointManager
from weft.checkpoint.manifest import list_checkpoints
from weft.checkpoint.state_dict import model_state, optimizer_state, trainable_parameters
from weft.config.errors import WeftError
from weft.config.schema import DataSection, Job, LoraSection, to_toml
from weft.data.dataset import open_dataset
from weft.data.loader import (
    IGNORE_INDEX,
    Loader,
    Mixture,
    Prefetcher,
    TokenChunks,
    build_mixture,
    evaluation_batches,
)
from weft.data.order import MixtureSampler, sample_index
from weft.data.packing import pack_best_fit
from weft.data.token_store import TokenStream
from weft.models import load_family, resolve_model
from weft.optim.optimizer import clip_grads_with_norm, compute_grad_norm, set_learning_rate
from weft.plan.resolve import Machine, Plan, resolve
from weft.tools.local_ranks import run_ranks
from weft.train.setup import Built, Rank, build

FIXTURES = "WEFT_MUTATION_FIXTURES"


class Unexpected(Exception):
    """A number is not what it has to be."""

    def __init__(self, text: str, module: str) -> None:
        super().__init__(text, module)


def expect(holds: Any, text: str, module: str) -> None:
    """Raise `Unexpected` unless it holds."""
    if not holds:
        raise Unexpected(text, module)


def near(ours: float, theirs: float, relative: float = 1e-9) -> bool:
    """Whether two numbers are equal to rounding."""
    return abs(ours - theirs) <= relative * max(abs(theirs), 1e-30)


CHECKS: dict[str, Callable[[str, float], Any]] = {}
SOURCES: dict[str, str] = {}


def check(name: str, ranks: int = 1) -> Callable[[Any], Any]:
    """Make a function, which is called in ranks, a check of this name."""

    def register(function: Any) -> Any:
        def find(precision: str, timeout: float) -> Any:
            from tests.mutation.battery import Finding, _tail, frame_of

            try:
                found = run_ranks(_caught, ranks, function.__name__, timeout=timeout)
            except WeftError as error:
                return Finding(f"raised: {_tail(error)}", frame_of(str(error)))
            return next((Finding(*each) for each in found if each), None)

        CHECKS[name] = find
        SOURCES[name] = inspect.getsource(function)
        return function

    return register


def _caught(name: str) -> Any:
    try:
        globals()[name]()
    except Unexpected as error:
        return error.args
    return None


def fixtures(folder: Path) -> None:
    """What checks need that the faults are not to be in: a prepared text."""
    from tests.conftest import make_store, make_text

    if (folder / "store").exists():
        return
    with tempfile.TemporaryDirectory(dir=folder) as text:
        made = make_store(make_text(Path(text)), folder / "cache")
    with suppress(FileExistsError):  # somebody else has made the same
        (folder / "store").symlink_to(made)


def store_path() -> Path:
    """The prepared text."""
    return Path(os.environ[FIXTURES]).resolve() / "store"


# --------------------------------------------------------------------------- data


@check("order of data")
def check_order() -> None:
    module = "data/order.py"
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
    places = np.arange(3 * 10_007)
    owner, before = turns.assign(places)
    for source, share in enumerate(shares):
        mine = before[owner == source]
        expect(near(len(mine) / len(places), share, 1e-3), "shares of a mixture", module)
        expect(np.array_equal(mine, np.arange(len(mine))), "turns of a source", module)
        for first in range(0, 10_000, 500):
            part = (owner[first : first + 500] == source).mean()
            expect(abs(part - share) < 0.02, "a source comes in lumps", module)


def _windows(tokens: int, seq_len: int, low: int, high: int, seed: int) -> TokenChunks:
    stream = np.random.default_rng(seed).integers(low, high, tokens)
    return TokenChunks(TokenStream([stream]), seq_len, "documents", low)


@check("global batches")
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
                        here = torch.cat((batch.tokens_BT, batch.targets_BT), 1).tolist()
                        rows += here
                        if batch.sources_B is not None:
                            told = (batch.tokens_BT[:, 0] >= 100).long()
                            expect((told == batch.sources_B).all(), "sources of rows", module)
                expect(len(rows) == 12, f"{len(rows)} rows of 12", module)
                expect(max(sizes) <= micro, "a microbatch is too large", module)
                first = known.setdefault(consumed, rows)
                expect(rows == first, f"rows on {groups} x {dp} ranks are others", module)
        flat = [tuple(row) for consumed in (0, 12, 24, 36) for row in known[consumed]]
        expect(len(set(flat)) == len(flat), "a row comes twice", module)
    loader = Loader(Mixture(sources[:1]), 7, 12, 0, 1, 3)
    seen = [
        r
        for c in range(0, 204, 12)
        for b in loader.get_microbatches(c)
        for r in b.tokens_BT.tolist()
    ]
    every = {
        tuple(sources[0].stream.read_windows(np.array([10 * n]), 10)[0].tolist()) for n in range(69)
    }
    expect({tuple(row) for row in seen[:69]} == every, "an epoch is not whole", module)
    walking = Loader(mixture, 7, 12, 1, 3, 2)
    for consumed in range(0, 120, 12):
        fresh = Loader(mixture, 7, 12, 1, 3, 2).get_microbatches(consumed)
        pairs = zip(walking.get_microbatches(consumed), fresh, strict=True)
        same = all(torch.equal(a.tokens_BT, b.tokens_BT) for a, b in pairs)
        expect(same, "batches after others are others", module)
    ahead = Prefetcher(loader, torch.device("cpu"), use_thread=True)
    for consumed in (0, 12, 24, 0, 12):
        mine, theirs = ahead.get_microbatches(consumed, 0, 1), loader.get_microbatches(consumed)
        same = all(torch.equal(a.tokens_BT, b.tokens_BT) for a, b in zip(mine, theirs, strict=True))
        expect(same, "batches made ahead are others", module)
    ahead.close()


@check("rows of an evaluation")
def check_evaluation_rows() -> None:
    module = "data/loader.py"
    mixture = Mixture([_windows(430, 10, 0, 100, 1), _windows(230, 10, 100, 200, 2)], (0.75, 0.25))
    lengths = [42, 22]
    for dp, micro, wanted in itertools.product((1, 2, 3), (1, 2, 4), (5, 8, 16)):
        every = [list(evaluation_batches(mixture, wanted, rank, dp, micro)) for rank in range(dp)]
        expect(len({len(batches) for batches in every}) == 1, "numbers of batches differ", module)
        shapes = {batch.tokens_BT.shape for batches in every for batch in batches}
        expect(len(shapes) == 1, "shapes differ", module)
        rows = [
            tuple(row.tolist())
            for batches in every
            for batch in batches
            for row, targets in zip(batch.tokens_BT, batch.targets_BT, strict=True)
            if (targets != IGNORE_INDEX).any()
        ]
        expected = []
        for source, share in enumerate((0.75, 0.25)):
            count = max(1, round(wanted * share))
            chosen = [n * lengths[source] // count for n in range(count)]
            stream: Any = mixture.sources[source]
            expected += [
                tuple(stream.stream.read_windows(np.array([10 * n]), 10)[0].tolist())
                for n in chosen
            ]
        # Of 5 the shares are 3.75 and 1.25.
        expect(rows == expected, f"{wanted} rows over {dp} ranks", module)


@check("token streams")
def check_streams() -> None:
    module = "data/token_store.py"
    pieces = [np.arange(0, 7), np.arange(7, 8), np.arange(8, 40), np.arange(40, 45)]
    stream = TokenStream(pieces)
    expect(len(stream) == 45, "its length", module)
    for length in (1, 3, 9):
        starts = np.arange(0, 45 - length + 1)
        found = stream.read_windows(starts, length)
        expect((found == starts[:, None] + np.arange(length)).all(), "a window", module)
    expect(stream.find(8).tolist() == [8], "where a token stands", module)
    expect(stream.count_nonzero() == 44, "how many are not 0", module)


@check("token files of others")
def check_token_files() -> None:
    from weft.data.foreign_tokens import Span, read_chunks, read_headers, split_tokens
    from weft.data.source_files import stat_local_file

    module = "data/foreign_tokens.py"
    random = np.random.default_rng(0)
    documents = [random.integers(1, 200, random.integers(2, 30)) for _ in range(40)]
    ended = [np.append(document, 0) for document in documents]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        for name, given, order in (
            ("plain", ended, range(40)),
            ("bare", documents, range(40)),
            ("shuffled", documents, [*range(1, 40, 2), *range(0, 40, 2)]),
        ):
            places, data = {}, b""
            for n in order:
                places[n] = len(data)
                data += given[n].astype("<u2").tobytes()
            (path / f"{name}.bin").write_bytes(data)
            sizes = np.array([len(each) for each in given], "<i4")
            pointers = np.array([places[n] for n in range(40)], "<i8")
            head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 40, 41)
            index = sizes.tobytes() + pointers.tobytes() + np.arange(41, dtype="<i8").tobytes()
            (path / f"{name}.idx").write_bytes(head + index)
        flat = np.concatenate(ended)
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
                here = [tokens for _, tokens in read_chunks(Span(source, begin, end), None)]
                whole = np.concatenate(documents if name in ("bare", "shuffled") else ended)
                expect(np.array_equal(np.concatenate(here), whole[begin:end]), name, module)
            train, held = split_tokens([source], 0, 0.2)
            cut = train[0].end
            expect(held[0].begin == cut and held[0].end == source.tokens, "the split", module)
            expect(abs(cut / source.tokens - 0.8) < 0.08, "how much is held out", module)
            ends = np.cumsum([len(d) for d in (documents if source.tokens < len(flat) else ended)])
            expect(cut in ends, "a document is cut by the split", module)


@check("packing")
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
        # Best fit by hand, decreasing: as few rows.
        room: list[int] = []
        for length in sorted(lengths, reverse=True):
            fits = [r for r in room if r >= length]
            if fits:
                room.remove(min(fits))
                room.append(min(fits) - length)
            else:
                room.append(32 - length)
        left = sorted(32 - lengths[row].sum() for row in rows)
        expect(left == sorted(room), f"{len(rows)} rows, best fit has {len(room)}", module)
    # Conversations that are too long: left out, or cut at their end.
    corpus = draw_corpus("chat", 40, 100, 30, 3)
    with tempfile.TemporaryDirectory() as folder:
        store = corpus.write(Path(folder), 100, 8)
        train = corpus.part(8, False)
        long = {i for i, d in enumerate(train.documents) if len(d) - 1 > 16}
        for what in ("skip", "truncate"):
            section = DataSection.model_validate({"format": "chat", "overlong": what})
            from weft.data.packing import pack_split

            rows_found = pack_split(store, "train", 16, section, 0)
            sizes = sorted(rows_found.lengths.tolist())
            kept = [
                min(16, len(d) - 1)
                for i, d in enumerate(train.documents)
                if i not in long or (what == "truncate" and train.learned[i][1:17].any())
            ]
            expect(sizes == sorted(kept), f"lengths with {what}", module)
        pairs = draw_corpus("preferences", 40, 100, 12, 3)
        store = pairs.write(Path(folder), 100, 8)
        section = DataSection.model_validate({"format": "preferences", "overlong": "skip"})
        rows_found = pack_split(store, "train", 16, section, 0)
        pieces = pairs.part(8, False).documents
        both = [len(a) + len(b) - 2 for a, b in zip(pieces[::2], pieces[1::2], strict=True)]
        expect(len(rows_found) == sum(size <= 16 for size in both), "pairs left out", module)
        expect(
            (rows_found.document_order[1::2] - rows_found.document_order[::2] == 1).all(),
            "order",
            module,
        )


@check("conversations")
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
    with tempfile.TemporaryDirectory() as folder:
        for name, spans in expected.items():
            home = Path(folder) / name
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
            found = []
            for split in ("train", "validation"):
                stream, learned = store.tokens(split), store.loss_mask(split)  # type: ignore[arg-type]
                begin = 0
                for end, _, line in store.index(split).tolist():  # type: ignore[arg-type]
                    at = np.array([begin])
                    ids = stream.read_windows(at, end - begin)[0]
                    assert learned is not None
                    marks = learned.read_windows(at, end - begin)[0].astype(bool)
                    found.append((line, ids, marks))
                    begin = end
            expect(len(found) == len(lines), "conversations are lost", "data/conversations.py")
            wanted = {1: spans, 2: spans[:1]}
            for line, ids, marks in found:
                if line not in wanted:
                    continue
                edges = np.flatnonzero(np.diff(np.concatenate(([0], marks, [0]))))
                texts = [
                    known.decode(ids[a:b].tolist(), skip_special_tokens=False)
                    for a, b in zip(edges[::2], edges[1::2], strict=True)
                ]
                expect(texts == wanted[line], f"{name}: {texts} are learned", module)


# --------------------------------------------------------------------------- arithmetic


@check("arithmetic of models")
def check_arithmetic() -> None:
    from weft.monitor.step_record import StepRecord, device_hours
    from weft.plan.lora_plan import training_cost

    for kind, fields, module in (
        ("llama", {"tied_embeddings": True}, "models/llama.py"),
        ("llama", {"tied_embeddings": False}, "models/llama.py"),
        ("qwen3", {"head_dim": 10, "tied_embeddings": False}, "models/qwen3.py"),
        (
            "moe",
            {
                "head_dim": 10,
                "num_experts": 5,
                "active_experts": 2,
                "expert_dim": 12,
                "shared_experts": 1,
                "dense_layers": 1,
                "tied_embeddings": False,
            },
            "models/moe.py",
        ),
    ):
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
        preset = next(iter(family.presets))
        config: Any
        config, problems = resolve_model(kind, preset, sizes | fields)
        assert not problems, problems
        with torch.device("meta"):
            model = family.build(config)
        shapes = {name: p.shape for name, p in model.named_parameters()}
        count = sum(shape.numel() for shape in shapes.values())
        expect(family.num_params(config) == count, f"parameters of {kind}", module)
        matrices = {n: s for n, s in shapes.items() if len(s) > 1 and n != "embed_tokens.weight"}
        active = 0.0
        for name, shape in matrices.items():
            share = 1.0
            if ".experts." in name:
                share = config.active_experts / config.num_experts
            active += shape.numel() * share
        active += config.vocab_size * config.dim * config.tied_embeddings
        attention = 12 * 3 * 4 * config.head_dim * 64
        flops = 6 * active + attention
        expect(near(family.flops_per_token(config, 64), flops), f"FLOPs of {kind}", module)
        if family.num_active_params is not None:
            idle = sum(
                shape.numel() * (1 - config.active_experts / config.num_experts)
                for name, shape in matrices.items()
                if ".experts." in name
            )
            expect(near(family.num_active_params(config), count - idle), "active", module)
        for name in shapes:
            expect(
                family.has_weight_decay(name)
                == decays(name, torch.empty(shapes[name], device="meta")),
                f"weight decay of {name}",
                "models/llama.py",
            )
        if kind == "llama":
            section = LoraSection.model_validate({"rank": 3, "targets": ["q_proj", "up_proj"]})
            found = training_cost(section, config, family, 64)
            adapters = sum(
                3 * (shape[0] + shape[1])
                for name, shape in matrices.items()
                if "q_proj" in name or "up_proj" in name
            )
            expect(found.params == adapters, "parameters of adapters", "plan/lora_plan.py")
            frozen = 4 * active + attention + 6 * adapters
            expect(near(found.flops_per_token, frozen), "FLOPs with adapters", "plan/lora_plan.py")
            half = 4 * active + attention * 32 / 64 + 6 * adapters
            expect(near(found.causal_flops_per_token, half), "half of them", "plan/lora_plan.py")
    record = StepRecord.of(
        tokens_per_step=1000,
        times=(0.5, 0.1),
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
        seconds={"productive": 3.0, "saving": 1.0},
    )
    module = "monitor/step_record.py"
    expect(near(record.tokens_per_second, 2000), "tokens per second", module)
    expect(near(record.tokens_per_second_per_device, 500), "of a device", module)
    expect(near(record.tflops_per_device, 3.0), "TFLOP/s", module)
    expect(near(record.mfu or 0, 0.3), "MFU", module)
    expect(near(record.mfu_causal or 0, 0.25), "causal MFU", module)
    expect(near(record.goodput, 0.75), "goodput", "monitor/goodput.py")
    expect(near(device_hours(8, 1e6), 8 * 1000 / 3600), "device hours", module)


@check("cut of stages")
def check_stages() -> None:
    from weft.plan.stages import partition, split_into_stages

    module = "plan/stages.py"
    random = np.random.default_rng(0)
    for trial in range(12):
        units, stages = int(random.integers(3, 8)), int(random.integers(1, 4))
        seconds, state, kept = (random.integers(0, 9, units).astype(float) for _ in range(3))
        flight = random.integers(1, 5, stages).tolist()
        every = []
        for cuts in itertools.combinations(range(1, units), stages - 1):
            ends = [0, *cuts, units]
            ranges = [range(a, b) for a, b in itertools.pairwise(ends)]
            time = [sum(seconds[i] for i in r) for r in ranges]
            memory = [
                sum(state[i] for i in r) + n * sum(kept[i] for i in r)
                for r, n in zip(ranges, flight, strict=True)
            ]
            even = sum(t * t for t in time)
            every.append((max(time), max(memory), even, ranges))
        for objective in ("speed", "memory"):
            found = partition(seconds.tolist(), state.tolist(), kept.tolist(), flight, objective)  # type: ignore[arg-type]
            swap = objective == "memory"
            cost = {tuple(r): ((m, t, e) if swap else (t, m, e)) for t, m, e, r in every}
            expect(cost[tuple(found)] == min(cost.values()), f"{objective} {trial}", module)
    family = load_family("llama")
    config: Any = resolve_model("llama", "toy", {"num_layers": 6})[0]
    assert family.unit_costs is not None
    cut = split_into_stages(family.unit_costs(config, 64), [3, 2, 1], 64, 16.0, layers=[1, 3, 2])
    ends = [(stage.first_unit, stage.end_unit, stage.num_blocks) for stage in cut]
    expect(ends == [(0, 2, 1), (2, 5, 3), (5, 8, 2)], f"stages of given blocks: {ends}", module)


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


def _train(folder: Path, *more: tuple[str, str]) -> Job:
    from tests.small import train_rank

    every = [*LOOP, ("run.dir", str(folder)), *more]
    train_rank(every, str(store_path()))
    return small_job(*every)


def _records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


DTYPES = {"float32": np.float32, "bfloat16": None, "int64": np.int64}


def read_by_hand(path: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint, by its table of contents and nothing of weft's."""
    told = json.loads((path / "manifest.json").read_bytes())
    files = [(path / each["name"]).read_bytes() for each in told["files"]]
    found = {}
    for name, entry in told["tensors"].items():
        whole = np.zeros(entry["shape"], DTYPES[entry["dtype"]])
        for offsets, sizes, file, position in entry["shards"]:
            count = math.prod(sizes)
            part = np.frombuffer(files[file], whole.dtype, count, position).reshape(sizes)
            box = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
            whole[box] = part
        found[name] = torch.from_numpy(whole.copy())
    return found


@check("the training loop")
def check_loop() -> None:
    """Four steps of `weft train` against the oracle, with what it records and saves."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        job = _train(folder)
        plan = resolve(job, Machine("cpu", devices=1, world_size=1))
        built = build(job, plan, Rank(0, 0, 1, torch.device("cpu")))
        model = build_theirs("llama", plan.model)
        params = {n: p.detach().clone() for n, p in trainable_parameters(built.parts)}
        with torch.no_grad():
            for n, p in params.items():
                theirs_of(model, n).copy_(p)
        text = open_dataset(store_path())
        mixture = build_mixture(text, "train", job.train.seq_len, job.data, job.train.seed)
        held = build_mixture(text, "validation", job.train.seq_len, job.data, job.train.seed)
        updates = Updates(params, job)
        records = _records(folder)
        expect([r["step"] for r in records] == [1, 2, 3, 4], "steps", "train/metric_logger.py")
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
            module = "train/loop.py"
            expect(near(record["loss"], loss.item(), 1e-4), f"loss of step {step}", module)
            expect(near(record["lr"], rate(step, job)), f"rate of step {step}", module)
            grads = {n: grad_of(model, n).clone() for n in params}
            norm = updates.step(step, grads)
            expect(near(record["grad_norm"], norm, 1e-3), f"norm of step {step}", module)
            of_layers = math.sqrt(
                sum(v * v for k, v in record.items() if k.startswith("grad_norm/"))
            )
            expect(near(of_layers, norm, 1e-3), "norms of layers", "monitor/layer_grad_norms.py")
            block = math.sqrt(
                sum(float(g.square().sum()) for n, g in grads.items() if n.startswith("layers.1."))
            )
            expect(
                near(record["grad_norm/layers.1"], block, 1e-3),
                "a layer's norm",
                "monitor/layer_grad_norms.py",
            )
            with torch.no_grad():
                for n, p in updates.params.items():
                    theirs_of(model, n).copy_(p)
            if "eval_loss" in record:
                found = list(evaluation_batches(held, job.train.eval_sequences, 0, 1, 100))
                tokens = torch.cat([b.tokens_BT for b in found])
                rows = Rows(
                    tokens,
                    torch.cat([b.targets_BT for b in found]),
                    torch.zeros_like(tokens),
                    torch.arange(tokens.shape[1]).expand_as(tokens),
                )
                with torch.no_grad():
                    there = (rows.targets != NONE).sum()
                    expected = (losses_of(model, rows).sum() / there).item()
                expect(near(record["eval_loss"], expected, 1e-4), "evaluation", "train/step.py")
        told_tokens = [record["tokens"] for record in records]
        expected_tokens = [step * size * job.train.seq_len for step in (1, 2, 3, 4)]
        expect(told_tokens == expected_tokens, "tokens", "train/metric_logger.py")
        expect(
            [("eval_loss" in r) for r in records] == [False, True, False, True],
            "steps that are evaluated",
            "train/metric_logger.py",
        )
        saved = list_checkpoints(folder / "checkpoints")
        expect(
            [p.name for p in saved] == ["step-00000002", "step-00000004"],
            "what is saved",
            "checkpoint/save_schedule.py",
        )
        state = read_by_hand(saved[-1])
        for n, p in updates.params.items():
            way = float((p.detach() - params[n]).norm())
            off = float((state[f"model.{n}"] - p.detach()).norm())
            expect(off < 0.02 * way, f"{n} is off by {off / way:.1e} of its way", "train/loop.py")
            expect(int(state[f"optim.{n}.step"]) == 4, "the optimizer's steps", "train/loop.py")
        told = json.loads((saved[-1] / "manifest.json").read_bytes())
        expect((told["step"], told["samples"]) == (4, 4 * size), "position", "train/state.py")


@check("resumed runs")
def check_resume() -> None:
    """Two steps, and two more after a restart, are the four of a run without it."""
    with tempfile.TemporaryDirectory() as name:
        straight, cut = Path(name) / "straight", Path(name) / "cut"
        _train(straight)
        shutil.copytree(straight, cut)
        shutil.rmtree(cut / "checkpoints" / "step-00000004")
        _train(cut)
        fields = ("step", "loss", "grad_norm", "lr", "tokens")
        ours, theirs = ([[r[f] for f in fields] for r in _records(f)] for f in (cut, straight))
        expect(ours == theirs, f"records: {ours[-1]} and {theirs[-1]}", "train/state.py")
        a, b = (read_by_hand(f / "checkpoints" / "step-00000004") for f in (cut, straight))
        for n in b:
            expect(torch.equal(a[n], b[n]), f"{n} is another", "checkpoint/load.py")


@check("resumed mixtures", ranks=2)
def check_mixture_loop() -> None:
    """Losses of sources: their mean by what was read is the loss."""
    from tests.small import train_rank

    rank = dist.get_rank()
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder, src=0)
    home = Path(folder[0])
    try:
        if rank == 0:
            (home / "mixture").mkdir()
            listed = [
                {"name": name, "share": share, "store": str(store_path())}
                for name, share in (("a", 0.7), ("b", 0.3))
            ]
            (home / "mixture" / "mixture.json").write_text(json.dumps(listed))
            shutil.copy(store_path() / "tokenizer.json", home / "mixture")
        dist.barrier()
        keys = [
            *LOOP,
            ("run.dir", str(home / "run")),
            ("parallel.dp_shard", "2"),
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
                near(record["grad_norm"], of_layers, 1e-4),
                "norms of layers",
                "monitor/layer_grad_norms.py",
            )
            rate_told = record["tokens_per_second"] * record["step_seconds"]
            expect(
                near(rate_told, size * job.train.seq_len), "tokens per second", "plan/resolve.py"
            )
            expect(
                near(record["loss"], mean, 1e-4), "losses of sources", "monitor/source_losses.py"
            )
        last = _records(home / "run")[-1]
        mean = 0.7 * last["eval_loss/a"] + 0.3 * last["eval_loss/b"]
        expect(near(last["eval_loss"], mean, 1e-6), "evaluation", "monitor/source_losses.py")
    finally:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(home)


@check("references", ranks=2)
def check_references() -> None:
    """Log-probabilities under the initial model, on two ranks."""
    from weft.data.dataset import Dataset, Source
    from weft.data.loader import Pairs
    from weft.train.reference_logprobs import log_probs

    job = small_job(
        ("run.dir", "/nonexistent"),
        ("parallel.dp_shard", "2"),
        ("train.objective", "dpo"),
        ("data.format", "preferences"),
        ("model.tied_embeddings", "false"),
    )
    rank = dist.get_rank()
    plan = resolve(job, Machine("cpu", devices=2, world_size=2))
    built = build(job, plan, Rank(rank, rank, 2, torch.device("cpu")))
    corpus = draw_corpus("preferences", 30, 500, 14, 3)
    with tempfile.TemporaryDirectory() as folder:
        text = Dataset(Path(folder), (Source("one", 1.0, corpus.write(Path(folder), 500, 8)),))
        [pairs] = build_mixture(text, "train", job.train.seq_len, job.data, 0).sources
        assert isinstance(pairs, Pairs)
        found = log_probs(built.engine, pairs, plan, built.mesh)
        batch = pairs.get_batch(np.arange(len(pairs)))
    model = build_theirs("llama", plan.model)
    with torch.no_grad():
        for n, p in trainable_parameters(built.parts):
            theirs_of(model, n).copy_(_all(p))
        assert batch.documents_BT is not None
        assert batch.positions_BT is not None
        rows = Rows(batch.tokens_BT, batch.targets_BT, batch.documents_BT, batch.positions_BT)
        expected = answers_of(losses_of(model, rows), rows)
    off = float((found - expected).abs().max())
    expect(off < 1e-3, f"references are off by {off}", "train/reference_logprobs.py")


@check("rounded moments")
def check_moments() -> None:
    """In bfloat16 a second moment comes down again, on average, as in float32."""
    from weft.optim.lean import LowPrecisionAdamW

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
        expect(near(second, exact, 0.01), f"second moment {second}, not {exact}", "optim/lean.py")


@check("norms of long tensors")
def check_norms() -> None:
    generator = torch.Generator().manual_seed(0)
    param = nn.Parameter(torch.zeros(2000, 1000))
    param.grad = torch.randn(param.shape, generator=generator)
    norm, own = compute_grad_norm([param])
    exact = float(param.grad.double().norm())
    for found in (norm, own):
        expect(near(float(found), exact, 1e-6), f"{found}, not {exact}", "parallel/dtensor.py")


@check("moments of eight bits")
def check_packed_moments() -> None:
    """They are right on average, beside smaller and larger ones, and alike on any layout."""
    from weft.optim import lean

    module = "optim/lean.py"
    generator = torch.Generator().manual_seed(0)
    spread = torch.logspace(-9, -1, 32 * 4).view(1, -1)  # two decades within a block
    exact = spread * (1 + torch.rand((1, 32 * 4), generator=generator))
    second, first = torch.zeros(exact.shape), torch.zeros(exact.shape)
    limit = lean._max_ratio(0.9, 0.95)
    steps, worst = 400, 0.0
    for _ in range(steps):
        chances = [
            torch.randint(1 << 16, exact.shape, generator=generator, dtype=torch.int32)
            for _ in range(2)
        ]
        codes = torch.zeros(exact.shape, dtype=torch.uint8)
        ranges = torch.zeros((1, 4), dtype=torch.int16)
        lean.pack_second(exact.square(), chances[0], codes, ranges)
        found = lean.unpack_second(codes, ranges)
        worst = max(worst, float((found / exact.square() - 1).abs().max()))
        signed = torch.zeros(exact.shape, dtype=torch.int8)
        lean.pack_first(-0.3 * exact, found.sqrt(), limit, chances[1], signed)
        second += found / steps
        first += lean.unpack_first(signed, found.sqrt(), limit) / steps
    expect(worst < 0.15, f"a second moment is off by {worst:.2f} of itself", module)
    off = float((second / exact.square() - 1).abs().max())
    expect(off < 0.02, f"the mean of second moments is off by {off:.3f}", module)
    off = float((first / (-0.3 * exact) - 1).abs().max())
    expect(off < 0.02, f"the mean of first moments is off by {off:.3f}", module)
    # What is small beside what is large, seen once: an update is that of AdamW.
    param, rare, other = (nn.Parameter(torch.zeros(2, 64)) for _ in range(3))
    grad = torch.full((2, 64), 2e-5)
    grad[:, ::32] = 1e-1
    groups: list[dict[str, Any]] = [
        {"params": [each], "weight_decay": 0.0, "low_precision": each is param}
        for each in (param, rare, other)
    ]
    packed = lean.LowPrecisionAdamW(
        groups[:2], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, state_dtype="8bit"
    )
    plain = torch.optim.AdamW([other], weight_decay=0.0, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    for step in range(6):
        for each in (param, rare, other):
            each.grad = grad.clone() * (0.5 + step)
        packed.step()
        plain.step()
    off = float((param / other - 1).detach().abs().max())
    expect(off < 0.1, f"an update is off by {off:.2f} of itself", module)
    off = float((rare / other - 1).detach().abs().max())
    expect(off < 1e-5, f"moments that are not to be packed are off by {off:.1e}", module)
    # The same on a whole parameter and on its two halves.
    whole = _packed_step((0, 0), slice(0, 4))
    halves = torch.cat([_packed_step((r, 0), slice(r, r + 2)) for r in (0, 2)])
    expect(torch.equal(whole, halves), "a moment depends on the layout", module)


def _packed_step(offsets: tuple[int, int], rows: slice) -> Tensor:
    """Codes of some rows of a parameter after an update."""
    from weft.optim import lean

    grad = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))[rows]
    first = torch.zeros(grad.shape, dtype=torch.int8)
    second = torch.zeros(grad.shape, dtype=torch.uint8)
    ranges = torch.zeros((len(grad), 2), dtype=torch.int16)
    lean._update_packed(
        torch.zeros_like(grad),
        grad,
        first,
        second,
        ranges,
        torch.zeros(()),
        torch.zeros(()),
        torch.tensor(1e-3),
        0.9,
        0.95,
        1e-8,
        0.0,
        torch.tensor(3, dtype=torch.int32),
        offsets,
        (4, 64),
    )
    return torch.cat([first.int(), second.int()], dim=1)


@check("statistics of layers", ranks=2)
def check_statistics() -> None:
    """Of two ranks what one has: counts, means, and roots of mean squares."""
    from weft.monitor.layer_stats import read_statistics
    from weft.train.setup import open_statistics

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, src=0)
    try:
        keys = [
            ("run.dir", folder[0]),
            ("parallel.tp", "2"),
            ("model.tied_embeddings", "false"),
            ("debug.layer_stats_steps", "1"),
        ]
        job = small_job(*keys)
        plan = resolve(job, Machine("cpu", devices=2, world_size=2))
        built = build(job, plan, Rank(dist.get_rank(), dist.get_rank(), 2, torch.device("cpu")))
        statistics = open_statistics(job, plan, built.mesh, built.parts)
        statistics.back_to(0, print)
        text = open_dataset(store_path())
        mixture = build_mixture(text, "train", job.train.seq_len, job.data, job.train.seed)
        batches = Loader(mixture, 0, 8, 0, 1, plan.microbatch_size).get_microbatches(0)
        with statistics.forward(1, [len(b.tokens_BT) for b in batches]):
            built.engine.forward_backward(batches)
        statistics.gradients(1)
        statistics.parameters(1)
        statistics.close()
        params = {
            n: (p.full_tensor(), p.grad.full_tensor())  # type: ignore[union-attr,operator]
            for n, p in trainable_parameters(built.parts)
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
        rows = {(r["kind"], r["name"]): r for r in read_statistics(Path(folder[0]))}
        whole = {("activation", "layers.0"): outs["layers.0"]}
        whole |= {("parameter", n): p.double() for n, (p, _) in params.items()}
        whole |= {("gradient", n): g.double() for n, (_, g) in params.items()}
        for key, value in whole.items():
            row, rms = rows[key], float(value.square().mean().sqrt())
            same = row["count"] == value.numel() and near(row["rms"], rms, 1e-4)
            same &= abs(row["mean"] - float(value.mean())) < 1e-3 * rms
            same &= near(row["most"], float(value.abs().max()), 1e-4)
            expect(same, f"statistics of {key}", "monitor/layer_stats.py")
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0])


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
    return job, plan, build(job, plan, Rank(rank, rank, world, torch.device("cpu")))


def _state(built: Built) -> dict[str, Tensor]:
    state = model_state(built.parts) | optimizer_state(built.parts, built.optimizer)
    return {n: _all(t).detach().clone() for n, t in state.items()}


def _all(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def _step(job: Job, plan: Plan, built: Built, number: int) -> float:
    """One optimizer step; the loss."""
    mixture = build_mixture(open_dataset(store_path()), "train", job.train.seq_len, job.data, 0)
    loader = Loader(mixture, 0, 12, built.mesh.dp_rank, plan.dp_size, plan.microbatch_size)
    loss = built.engine.forward_backward(loader.get_microbatches(12 * number))
    dist.all_reduce(loss)
    params = [p for _, p in trainable_parameters(built.parts)]
    stages = built.mesh.get_group("pp") if plan.pp > 1 else None
    norm, _ = compute_grad_norm(params, stages)
    clip_grads_with_norm(params, norm, 1.0)
    set_learning_rate(built.optimizer, 0.01)
    built.optimizer.step()
    built.engine.balance.reduce_loads()
    built.engine.balance.step()
    built.optimizer.zero_grad()
    return loss.item()


def save_layout(folder: str, overrides: Overrides) -> dict[str, Any]:
    """Two steps, a checkpoint, and one more step; what the state was, and the loss."""
    job, plan, built = _built(overrides)
    for number in range(2):
        _step(job, plan, built, number)
    saver = CheckpointManager(Path(folder), 2, async_save=True)
    state = _state(built)
    saver.save(built.parts, built.optimizer, {"step": 2, "samples": 24})
    params = [param for part in built.parts for param in part.parameters()]
    for param in params:  # what is saved is what was there then
        param.data.mul_(2.0)
    saver.wait()
    for param in params:
        param.data.div_(2.0)
    loss = _step(job, plan, built, 2)
    return {"state": state, "loss": loss, "after": _state(built)}


def load_layout(folder: str, overrides: Overrides) -> dict[str, Any]:
    """The same from the checkpoint."""
    job, plan, built = _built(overrides)
    load_checkpoint(list_checkpoints(Path(folder))[-1], built.parts, built.optimizer)
    state = _state(built)
    loss = _step(job, plan, built, 2)
    return {"state": state, "loss": loss, "after": _state(built)}


def _world(overrides: Overrides) -> int:
    axes = ("dp_shard", "dp_replicate", "tp", "pp", "cp")
    return math.prod(int(v) for k, v in overrides if k.removeprefix("parallel.") in axes)


def _find_between(source: Overrides, target: Overrides) -> Callable[[str, float], Any]:
    def find(precision: str, timeout: float) -> Any:
        from tests.mutation.battery import Finding, _tail, frame_of

        with tempfile.TemporaryDirectory() as folder:
            try:
                saved = run_ranks(save_layout, _world(source), folder, source, timeout=timeout)
                loaded = run_ranks(load_layout, _world(target), folder, target, timeout=timeout)
            except WeftError as error:
                return Finding(f"raised: {_tail(error)}", frame_of(str(error)))
            try:
                _compare_states(Path(folder), saved, loaded)
            except Unexpected as error:
                return Finding(*error.args)
        return None

    return find


def _compare_states(folder: Path, saved: list[Any], loaded: list[Any]) -> None:
    before = {n: t for rank in saved for n, t in rank["state"].items()}
    on_disk = read_by_hand(list_checkpoints(folder)[-1])
    expect(on_disk.keys() == before.keys(), "what is saved", "checkpoint/state_dict.py")
    for n, t in before.items():
        expect(torch.equal(on_disk[n], t), f"{n} on the disk", "checkpoint/shard_files.py")
    for rank in loaded:
        for n, t in rank["state"].items():
            expect(torch.equal(before[n], t), f"{n} as it was loaded", "checkpoint/load.py")
    there = {n for rank in loaded for n in rank["state"]}
    expect(there == before.keys(), "what is loaded", "checkpoint/state_dict.py")
    expect(near(loaded[0]["loss"], saved[0]["loss"], 1e-5), "the loss", "checkpoint/load.py")
    after = {n: t for rank in saved for n, t in rank["after"].items()}
    for rank in loaded:
        for n, t in rank["after"].items():
            if not n.startswith("model."):
                continue
            way = float((after[n] - before[n]).norm())
            off = float((t - after[n]).norm())
            expect(off <= 0.05 * way + 1e-7, f"{n} after the next step", "checkpoint/load.py")


for _source, _target in FROM_TO:
    _keys = [k.partition(".")[2] + v for k, v in _source if k != "model.preset"]
    _name = f"checkpoint: {' '.join(_keys) or 'one'}"
    CHECKS[_name] = _find_between(_source, _target)
    _functions = (save_layout, load_layout, _compare_states, _step)
    SOURCES[_name] = f"{_source}{_target}{[inspect.getsource(each) for each in _functions]}"


@check("unfinished checkpoints")
def check_unfinished() -> None:
    """Until it is whole, a checkpoint is not there under its name."""
    from weft.checkpoint import manager as store

    commit, seen = store._commit, []

    def watched(temporary: Path, final: Path, *rest: Any) -> None:
        seen.append(final.exists())
        commit(temporary, final, *rest)

    store._commit = watched
    _, _, built = _built([])
    with tempfile.TemporaryDirectory() as name:
        saver = CheckpointManager(Path(name), 2)
        saver.save(built.parts, built.optimizer, {"step": 1, "samples": 12})
        saver.wait()
    expect(seen == [False], "half a checkpoint has its name", "checkpoint/manager.py")


@check("damaged checkpoints")
def check_damage() -> None:
    """Whatever bit is another, it is not loaded."""
    job, plan, built = _built([])
    _step(job, plan, built, 0)
    with tempfile.TemporaryDirectory() as name:
        saver = CheckpointManager(Path(name), 3)
        for step in (1, 2, 3, 4):
            saver.save(built.parts, built.optimizer, {"step": step, "samples": 12})
            saver.wait()
        kept = [path.name for path in list_checkpoints(Path(name))]
        expect(
            kept == [f"step-0000000{n}" for n in (2, 3, 4)],
            f"kept: {kept}",
            "checkpoint/manager.py",
        )
        path = list_checkpoints(Path(name))[-1]
        shard = path / "shard-00000.bin"
        whole = bytearray(shard.read_bytes())
        manifest = json.loads((path / "manifest.json").read_bytes())

        def refused(what: str, module: str, says: str = "") -> None:
            try:
                load_checkpoint(path, built.parts, built.optimizer)
            except WeftError as error:
                expect(says in str(error), f"{what}: {error}", module)
                return
            raise Unexpected(f"{what} is loaded", module)

        random = np.random.default_rng(0)
        for at in [0, len(whole) - 1, *random.integers(0, len(whole), 6).tolist()]:
            for bit in (0, 7):
                whole[at] ^= 1 << bit
                shard.write_bytes(whole)
                refused("a flipped bit", "checkpoint/fingerprint.py", "hash")
                whole[at] ^= 1 << bit
        # Exchanged elements and rows, of a matrix: the same numbers in other places.
        entry = manifest["tensors"]["model.layers.0.mlp.up_proj.weight"]
        [[_, sizes, _, position]] = entry["shards"]
        row = 4 * sizes[1]
        for size, at in ((4, position), (row, position)):
            first, second = whole[at : at + size], whole[at + size : at + 2 * size]
            whole[at : at + size], whole[at + size : at + 2 * size] = second, first
            shard.write_bytes(whole)
            refused(f"{size} bytes that are exchanged", "checkpoint/fingerprint.py", "hash")
            whole[at : at + size], whole[at + size : at + 2 * size] = first, second
        shard.write_bytes(whole[:-4])
        refused("a file that is cut off", "checkpoint/shard_files.py")
        shard.write_bytes(whole + b"abcd")
        refused("a file that is too long", "checkpoint/shard_files.py")
        shard.write_bytes(whole)
        load_checkpoint(path, built.parts, built.optimizer)
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


# --------------------------------------------------------------------------- models for others


@check("export, import and adapters")
def check_export() -> None:
    """What transformers and PEFT load computes what the checkpoint's numbers do."""
    from transformers import AutoModelForCausalLM

    from weft.tools.hf_convert import export_checkpoint, import_model
    from weft.tools.inference_model import find_checkpoint, load_unsharded

    tokens = torch.arange(48).view(2, 24) * 7 % 512
    rows = Rows(tokens, tokens, torch.zeros_like(tokens), torch.arange(24).expand_as(tokens))
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        keys = [
            ("model.rope_scaling", "true"),
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
        expect(off < 1e-5, f"imported logits are off by {off}", "tools/hf_convert.py")
        # Adapters to what was imported.
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
        expect((tuned - expected).abs().max() > 0.02, "adapters do nothing", "parallel/lora.py")
        export_checkpoint(home / "again", home / "merged", "float32", "5GB", silent)
        merged = AutoModelForCausalLM.from_pretrained(home / "merged", dtype=torch.float32)
        with torch.no_grad():
            off = (merged(tokens).logits - tuned).abs().max() / tuned.abs().max()
        expect(off < 1e-5, f"merged logits are off by {off}", "tools/peft_export.py")
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
        expect(off < 1e-5, f"PEFT's logits are off by {off}", "tools/peft_export.py")


@check("generated text")
def check_generate() -> None:
    """Greedy and with a cache, what the plain model finds by itself; sampling by formulas."""
    from tests.asked import random_run
    from weft.tools.generate import (
        GeneratedSequence,
        Sampling,
        generate,
        load_chat_format,
        make_sequences,
        sample_token,
    )
    from weft.tools.inference_model import find_checkpoint, load_local_model

    module = "tools/generate.py"
    with tempfile.TemporaryDirectory() as name:
        folder = random_run(Path(name) / "run", store_path())
        found = find_checkpoint(folder)
        plan_model = found.config
        speech = replace(load_chat_format(found), end_tokens=frozenset())
        state = read_by_hand(found.path)
        known = build_theirs("llama", plan_model)
        with torch.no_grad():
            for n, value in state.items():
                theirs_of(known, n.removeprefix("model.")).copy_(value)
        prompts = ["def f(", "import os\nclass A", "x"]
        for cached in (True, False):
            model = load_local_model(found, torch.device("cpu"))
            sampling = Sampling(max_tokens=8, temperature=0.0)
            rows = make_sequences(prompts, speech, sampling)
            for _ in generate(model, speech, rows, sampling, cached=cached):
                pass
            for row in rows:
                ids = list(row.ids[: row.prompt_length])
                for _ in range(8):
                    with torch.no_grad():
                        logits = known(torch.tensor([ids])).logits[0, -1]
                    ids.append(int(logits[: speech.tokenizer.get_vocab_size()].argmax()))
                blame = "models/kv_cache.py" if cached else "tools/inference_model.py"
                expect(list(row.ids) == ids, f"greedy tokens, cached {cached}", blame)
    torch.manual_seed(0)
    logits = torch.randn(50)
    row = GeneratedSequence("", [3, 7, 7], 0, torch.Generator().manual_seed(0), "")

    def shares(**options: Any) -> Tensor:
        sampling = Sampling(**{"top_k": 0, "temperature": 1.0} | options)
        drawn = torch.tensor([sample_token(logits, row, sampling) for _ in range(3000)])
        return torch.bincount(drawn, minlength=50) / 3000

    plain = logits.softmax(0)
    ranked = logits.argsort(descending=True)
    by_k = torch.zeros(50)
    by_k[ranked[:5]] = logits[ranked[:5]].softmax(0)
    ahead = plain[ranked].cumsum(0) - plain[ranked]
    few = ranked[ahead < 0.6]
    by_p = torch.zeros(50)
    by_p[few] = plain[few] / plain[few].sum()
    likely = plain >= 0.2 * plain.max()
    by_min = torch.where(likely, plain, 0.0) / plain[likely].sum()
    seen = logits.clone()
    for i in (3, 7):
        seen[i] = logits[i] / 3 if logits[i] > 0 else logits[i] * 3
    for what, options, expected in (
        ("plain", {}, plain),
        ("temperature", {"temperature": 0.5}, (logits / 0.5).softmax(0)),
        ("top k", {"top_k": 5}, by_k),
        ("top p", {"top_p": 0.6}, by_p),
        ("min p", {"min_p": 0.2}, by_min),
        ("repetition", {"repetition_penalty": 3.0}, seen.softmax(0)),
    ):
        off = (shares(**options) - expected).abs().sum()
        allowed = 2.5 * (expected * (1 - expected) / 3000).sqrt().sum()
        expect(off <= allowed + 1e-6, f"{what}: shares are off by {off:.3f}", module)


@check("losses of text")
def check_losses() -> None:
    """`weft evaluate`: of all held-out tokens by hand, and bits per byte."""
    from tests.asked import random_run
    from weft.tools.evaluate import ALL_SEQUENCES, evaluate_sources
    from weft.tools.inference_model import find_checkpoint, plan_inference

    module = "tools/evaluate.py"
    with tempfile.TemporaryDirectory() as name:
        folder = random_run(Path(name) / "run", store_path())
        found = find_checkpoint(folder)
        state = read_by_hand(found.path)
        known = build_theirs("llama", found.config)
        with torch.no_grad():
            for n, value in state.items():
                theirs_of(known, n.removeprefix("model.")).copy_(value)
        text = open_dataset(store_path())
        store = text.sources[0].store
        stream = store.tokens("validation")
        tokens = stream.read_windows(np.array([0]), len(stream))[0]
        for packing in ("windows", "documents"):
            allowed = ("data.", "train.")
            job, plan = plan_inference(
                found, [("data.packing", packing)], [], allowed, for_generation=False
            )
            rank = Rank(0, 0, 1, torch.device("cpu"))
            [loss] = evaluate_sources(
                found, job, plan, text, ALL_SEQUENCES, rank, False, lambda progress: None
            )
            told = loss.to_dict()
            count = (len(tokens) - 1) // 32 * 32
            inputs = torch.from_numpy(tokens[:count].reshape(-1, 32))
            targets = torch.from_numpy(tokens[1 : count + 1].reshape(-1, 32)).clone()
            documents = torch.zeros_like(inputs)
            if packing == "documents":
                ended = (inputs == store.manifest.separator).long()
                documents = ended.cumsum(1) - ended
                targets[ended.bool()] = NONE
            rows = Rows(inputs, targets, documents, torch.arange(32).expand_as(inputs))
            with torch.no_grad():
                parts = [
                    losses_of(known, Rows(*(c[i : i + 64] for c in rows))).sum()
                    for i in range(0, len(inputs), 64)
                ]
            mean = float(sum(parts)) / int((targets != NONE).sum())
            expect(near(told["nats_per_token"], mean, 1e-4), f"nats, {packing}", module)
            split = store.manifest.validation
            predicted = split.tokens - (split.documents if packing == "documents" else 1)
            expect(told["tokens"] == predicted, "tokens that are predicted", module)
            expect(near(told["perplexity"], math.exp(mean), 1e-3), "perplexity", module)
            bits = mean * predicted / split.bytes / math.log(2)
            expect(near(told["bits_per_byte"], bits, 1e-3), "bits per byte", module)
