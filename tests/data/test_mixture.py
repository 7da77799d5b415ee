"""Mixtures of several sources: sampling order, batches and preparation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.data.test_loader import SEPARATOR, equal, join, make_stream
from weft.config.errors import InvalidConfig
from weft.config.reader import read_job
from weft.config.schema import DataSection
from weft.data.dataset import open_dataset
from weft.data.loader import (
    IGNORE_INDEX,
    ROUND_SIZE,
    Batch,
    Loader,
    Mixture,
    MixtureSampler,
    TokenChunks,
    apportion,
    evaluation_batches,
    sample_index,
)
from weft.data.mixture import derive_source_names
from weft.data.prepare import prepare_data, prepare_store
from weft.data.token_store import TokenStream
from weft.preparation.job_checks import prepare_job

# ------------------------------------------------------------------ sampling


@pytest.mark.parametrize("shares", [[1.0], [0.7, 0.3], [0.5, 0.25, 0.249, 0.001], [1 / 9] * 9])
def test_mixture_each_range_of_samples_has_each_share(shares: list[float]) -> None:
    positions = np.arange(3 * ROUND_SIZE + 77)
    owner, before = MixtureSampler(shares).assign(positions)
    for source, share in enumerate(shares):
        mask = owner == source
        # The samples of a source are in order.
        assert before[mask].tolist() == list(range(mask.sum()))
        counts = np.concatenate(([0], np.cumsum(mask)))
        for width in (8, 64, 1000, ROUND_SIZE):
            result = counts[width:] - counts[:-width]
            assert abs(result - share * width).max() <= 4
        assert abs(mask.sum() - share * len(positions)) <= 4


def test_mixture_single_position_is_assigned_equally() -> None:
    turns = MixtureSampler([0.6, 0.4])
    positions = np.array([0, 5, ROUND_SIZE - 1, ROUND_SIZE, 10**9])
    owner, before = turns.assign(positions)
    single = [turns.assign(np.array([position])) for position in positions]
    assert [int(o[0]) for o, _ in single] == owner.tolist()
    assert [int(b[0]) for _, b in single] == before.tolist()
    assert before[-1] + turns.assign(positions[-1:])[1] >= 0


def test_mixture_order_is_frozen() -> None:
    # Runs resume by this order, so it may never change.
    owner, before = MixtureSampler([0.7, 0.3]).assign(np.arange(12))
    assert owner.tolist() == [0, 0, 0, 1, 0, 0, 1, 0, 1, 0, 0, 1]
    assert before.tolist() == [0, 1, 2, 0, 3, 4, 1, 5, 2, 6, 7, 3]


def test_mixture_parts_sum_to_the_whole() -> None:
    generator = np.random.default_rng(0)
    for _ in range(300):
        shares = generator.random(generator.integers(1, 20)) ** 4 + 1e-9
        full = int(generator.integers(len(shares), 200))
        result = apportion(shares.tolist(), full)
        assert result.sum() == full
        assert result.min() >= 1
        expected = shares / shares.sum() * full
        # Counts differ from the shares by at most one, except for the smallest sources.
        assert (result - expected).max() <= 1
    assert apportion([0.7, 0.2, 0.1], 10).tolist() == [7, 2, 1]
    for shares, full in (([1.0, 1.0], 1), ([1.0, 0.0], 5), ([1.0, float("nan")], 5)):
        with pytest.raises(ValueError, match="cannot be divided"):
            apportion(shares, full)


# ------------------------------------------------------------------ batches


def mixture(packing: str = "documents") -> Mixture:
    """Return three sources whose tokens identify their source."""
    streams = [
        TokenStream([np.where(ids == SEPARATOR, SEPARATOR, ids + 10_000 * source)])
        for source, size in enumerate((700, 90, 300))
        for ids in [make_stream(size, source).read_windows(np.array([0]), size)[0]]
    ]
    windows = [TokenChunks(stream, 8, packing, SEPARATOR) for stream in streams]  # type: ignore[arg-type]
    return Mixture(windows, [0.5, 0.2, 0.3])


def loader(of: Mixture, dp_rank: int = 0, dp_size: int = 1, microbatch: int = 24) -> Loader:
    return Loader(of, 1, 24, dp_rank, dp_size, microbatch)


@pytest.mark.parametrize("packing", ["windows", "documents"])
def test_mixture_source_is_read_as_if_alone(packing: str) -> None:
    of = mixture(packing)
    batches = [batch for c in range(0, 24 * 20, 24) for batch in loader(of).get_microbatches(c)]
    together = Batch._make(join(batches))  # type: ignore[arg-type]
    assert together.sources_B is not None
    for source, single in enumerate(of.sources):
        mask = together.sources_B == source
        order = sample_index(np.arange(int(mask.sum())), len(single), seed=1)
        expected = single.get_batch(order)
        for ours, theirs in zip(together[:4], expected[:4], strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or ours[mask].equal(theirs)  # type: ignore[arg-type]
    # The small source was repeated several times, each time completely.
    [times] = np.unique(sample_index(np.arange(4 * 11), 11, seed=1), return_counts=True)[1:]
    assert set(times.tolist()) == {4}


@pytest.mark.parametrize(("dp_size", "microbatch"), [(2, 5), (4, 6), (8, 1)])
def test_mixture_ranks_cut_the_same_batches(dp_size: int, microbatch: int) -> None:
    for consumed in (0, 24, 24 * 417):
        full = loader(mixture()).get_microbatches(consumed)
        ranks = [
            loader(mixture(), r, dp_size, microbatch).get_microbatches(consumed)
            for r in range(dp_size)
        ]
        assert equal(join(full), join([batch for rank in ranks for batch in rank]))


def test_mixture_evaluation_has_each_share() -> None:
    for dp_size in (1, 3):
        ranks = [list(evaluation_batches(mixture(), 20, r, dp_size, 4)) for r in range(dp_size)]
        assert len({tuple(b.tokens_BT.shape for b in rank) for rank in ranks}) == 1
        all_items = Batch._make(join([batch for rank in ranks for batch in rank]))  # type: ignore[arg-type]
        assert all_items.sources_B is not None
        counted = (all_items.targets_BT != IGNORE_INDEX).any(1)
        assert all_items.sources_B[counted].bincount().tolist() == [10, 4, 6]
        for source in range(3):
            tokens_BT = all_items.tokens_BT[counted & (all_items.sources_B == source)]
            inside = tokens_BT[tokens_BT != SEPARATOR]
            assert ((inside > 10_000 * source) & (inside <= 10_000 * (source + 1))).all()
    # Each source has at least one sample, and at most all of its samples.
    [batch] = evaluation_batches(mixture(), 1, 0, 1, 100)
    assert batch.sources_B is not None
    assert batch.sources_B.tolist() == [0, 1, 2]
    [batch] = evaluation_batches(mixture(), 10_000, 0, 1, 10_000)
    assert batch.sources_B is not None
    assert batch.sources_B.bincount().tolist() == [87, 11, 37]


# ------------------------------------------------------------------ preparing


@pytest.fixture
def texts(tmp_path: Path) -> tuple[Path, Path]:
    web, code = tmp_path / "web.txt", tmp_path / "code"
    web.write_text("".join(f"page {n} says hello\n" for n in range(2000)), "utf-8")
    code.mkdir()
    (code / "a.py").write_text("".join(f"def f{n}(): return {n}\n" for n in range(1000)), "utf-8")
    return web, code


def section(texts: tuple[Path, Path], **larger: object) -> DataSection:
    weights = dict(zip(map(str, texts), (3.0, 1.0), strict=True))
    return DataSection.model_validate({"mixture": weights, "vocab_size": 300, **larger})


def test_prepare_mixture_has_each_source(texts: tuple[Path, Path], tmp_path: Path) -> None:
    messages: list[str] = []
    result = prepare_data(section(texts), tmp_path / "c", lambda p: messages.append(p.message))
    assert [(s.name, s.share) for s in result.sources] == [("web", 0.75), ("code", 0.25)]
    hashes = {s.store.manifest.tokenizer_hash for s in result.sources}
    assert len(hashes) == 1  # trained on both
    assert (result.path / "tokenizer.json").is_file()
    assert messages.count("training the tokenizer") == 1
    tokenizer = result.sources[1].store.tokenizer()
    for source, begins in zip(result.sources, ("page", "def f"), strict=True):
        ids = source.store.tokens("train").read_windows(np.array([0]), 20)[0]
        assert tokenizer.decode(ids.tolist()).startswith(begins)
    assert open_dataset(result.path) == result
    # Nothing is prepared again; other weights give another dataset.
    messages.clear()
    second_run = prepare_data(section(texts), tmp_path / "c", lambda p: messages.append(p.message))
    assert second_run == result
    assert messages == []
    one, other = (str(path) for path in texts)
    larger = prepare_data(section(texts, mixture={one: 1.0, other: 1.0}), tmp_path / "c")
    assert larger.fingerprint != result.fingerprint
    assert result.unigram_entropy_nats == pytest.approx(
        sum(s.share * s.store.manifest.unigram_entropy_nats for s in result.sources)
    )


def test_mixture_shared_tokenizer_does_not_depend_on_earlier_runs(
    texts: tuple[Path, Path], tmp_path: Path
) -> None:
    """The validation split determines the training text, and so the tokenizer."""
    prepare_data(section(texts, validation_fraction=0.4), tmp_path / "c")
    second = prepare_data(section(texts, validation_fraction=0.01), tmp_path / "c")
    single = prepare_data(section(texts, validation_fraction=0.01), tmp_path / "d")
    assert second.fingerprint == single.fingerprint


def test_mixture_store_brings_its_tokenizer(texts: tuple[Path, Path], tmp_path: Path) -> None:
    web = prepare_store(DataSection(path=str(texts[0]), vocab_size=280), tmp_path / "c").path
    result = prepare_data(section((web, texts[1])), tmp_path / "c")
    assert {s.store.manifest.vocab_size for s in result.sources} == {280}
    code = prepare_store(DataSection(path=str(texts[1]), vocab_size=290), tmp_path / "c").path
    with pytest.raises(InvalidConfig, match="was prepared with another"):
        prepare_data(section((web, code)), tmp_path / "c")


def test_mixture_mistakes_of_all_sources_are_reported_at_once(
    texts: tuple[Path, Path], tmp_path: Path
) -> None:
    nowhere = tmp_path / "nowhere"
    texts[0].write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidConfig) as caught:
        prepare_data(section((texts[0], nowhere)), tmp_path / "c")
    assert [error.key for error in caught.value.errors] == ["data.mixture"] * 2
    assert not (tmp_path / "c" / "mixtures").exists()


def test_mixture_names_are_shortened() -> None:
    assert derive_source_names(["a/web.jsonl.gz", "b/code/", "python-stdlib"]) == [
        "web",
        "code",
        "python-stdlib",
    ]
    assert derive_source_names(["a/x.txt", "b/x.txt", "y"]) == ["a/x.txt", "b/x.txt", "y"]


# ------------------------------------------------------------------ the key


def test_mixture_on_the_command_line_is_parsed(tmp_path: Path) -> None:
    for text in ("web.txt=0.7,a=b/c=2", '{"web.txt" = 0.7, "a=b/c" = 2}'):
        job, _, errors = read_job("demo", [("data.mixture", text)])
        assert not errors
        assert job.data.mixture == {"web.txt": 0.7, "a=b/c": 2.0}
    file = tmp_path / "r.toml"
    file.write_text('extends = "demo"\n[data.mixture]\n"web.txt" = 1\n"x" = 3\n', "utf-8")
    assert read_job(str(file))[0].data.mixture == {"web.txt": 1.0, "x": 3.0}
    for text in ("web.txt", "web.txt=0", "web.txt=-1", "web.txt=much", "a=1,b=nan"):
        [error] = read_job("demo", [("data.mixture", text)])[2]
        assert error.key == "data.mixture"


def test_mixture_beside_data_path_is_refused(texts: tuple[Path, Path]) -> None:
    web, code = map(str, texts)
    larger = [("data.mixture", f"{web}=1,{code}=1,/nowhere/x=1"), ("data.path", web)]
    with pytest.raises(InvalidConfig) as caught:
        prepare_job("demo", larger)
    result = [(p.key, p.value) for p in caught.value.errors]
    assert ("data.path", web) in result
    assert ("data.mixture", "/nowhere/x") in result
