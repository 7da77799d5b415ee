"""Several texts as one: whose turn it is, the batches, and how they are prepared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.data.test_loader import SEPARATOR, equal, join, make_stream
from weft.config.errors import InvalidConfig
from weft.config.reader import read_job
from weft.config.schema import DataSection
from weft.data.dataset import derive_source_names, open_dataset
from weft.data.loader import IGNORE_INDEX, Batch, Loader, Mixture, TokenChunks, evaluation_batches
from weft.data.order import ROUND_SIZE, MixtureSampler, apportion, sample_index
from weft.data.prepare import prepare_data, prepare_store
from weft.data.token_store import TokenStream
from weft.train.job_checks import prepare_job

# ------------------------------------------------------------------ turns


@pytest.mark.parametrize("shares", [[1.0], [0.7, 0.3], [0.5, 0.25, 0.249, 0.001], [1 / 9] * 9])
def test_mixture_each_stretch_has_each_share(shares: list[float]) -> None:
    places = np.arange(3 * ROUND_SIZE + 77)
    owner, before = MixtureSampler(shares).assign(places)
    for source, share in enumerate(shares):
        mine = owner == source
        # A source's samples come one after the other.
        assert before[mine].tolist() == list(range(mine.sum()))
        counts = np.concatenate(([0], np.cumsum(mine)))
        for width in (8, 64, 1000, ROUND_SIZE):
            found = counts[width:] - counts[:-width]
            assert abs(found - share * width).max() <= 4
        assert abs(mine.sum() - share * len(places)) <= 4


def test_mixture_place_looked_up_alone_is_the_same() -> None:
    turns = MixtureSampler([0.6, 0.4])
    places = np.array([0, 5, ROUND_SIZE - 1, ROUND_SIZE, 10**9])
    owner, before = turns.assign(places)
    alone = [turns.assign(np.array([place])) for place in places]
    assert [int(o[0]) for o, _ in alone] == owner.tolist()
    assert [int(b[0]) for _, b in alone] == before.tolist()
    assert before[-1] + turns.assign(places[-1:])[1] >= 0


def test_mixture_turns_for_a_seed_are_frozen() -> None:
    # Runs resume by them, so they may never change.
    owner, before = MixtureSampler([0.7, 0.3]).assign(np.arange(12))
    assert owner.tolist() == [0, 0, 0, 1, 0, 0, 1, 0, 1, 0, 0, 1]
    assert before.tolist() == [0, 1, 2, 0, 3, 4, 1, 5, 2, 6, 7, 3]


def test_mixture_parts_sum_to_the_whole() -> None:
    generator = np.random.default_rng(0)
    for _ in range(300):
        shares = generator.random(generator.integers(1, 20)) ** 4 + 1e-9
        whole = int(generator.integers(len(shares), 200))
        found = apportion(shares.tolist(), whole)
        assert found.sum() == whole
        assert found.min() >= 1
        wanted = shares / shares.sum() * whole
        # One more or less than the share, but for what the smallest ones need.
        assert (found - wanted).max() <= 1
    assert apportion([0.7, 0.2, 0.1], 10).tolist() == [7, 2, 1]
    for shares, whole in (([1.0, 1.0], 1), ([1.0, 0.0], 5), ([1.0, float("nan")], 5)):
        with pytest.raises(ValueError, match="cannot be divided"):
            apportion(shares, whole)


# ------------------------------------------------------------------ batches


def mixture(packing: str = "documents") -> Mixture:
    """Three sources, whose tokens tell which they are from."""
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
    for source, alone in enumerate(of.sources):
        mine = together.sources_B == source
        order = sample_index(np.arange(int(mine.sum())), len(alone), seed=1)
        expected = alone.get_batch(order)
        for ours, theirs in zip(together[:4], expected[:4], strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or ours[mine].equal(theirs)  # type: ignore[arg-type]
    # The small one was seen several times over, each time all of it.
    [times] = np.unique(sample_index(np.arange(4 * 11), 11, seed=1), return_counts=True)[1:]
    assert set(times.tolist()) == {4}


@pytest.mark.parametrize(("dp_size", "microbatch"), [(2, 5), (4, 6), (8, 1)])
def test_mixture_ranks_cut_the_same_batches(dp_size: int, microbatch: int) -> None:
    for consumed in (0, 24, 24 * 417):
        whole = loader(mixture()).get_microbatches(consumed)
        ranks = [
            loader(mixture(), r, dp_size, microbatch).get_microbatches(consumed)
            for r in range(dp_size)
        ]
        assert equal(join(whole), join([batch for rank in ranks for batch in rank]))


def test_mixture_evaluation_has_each_share() -> None:
    for dp_size in (1, 3):
        ranks = [list(evaluation_batches(mixture(), 20, r, dp_size, 4)) for r in range(dp_size)]
        assert len({tuple(b.tokens_BT.shape for b in rank) for rank in ranks}) == 1
        every = Batch._make(join([batch for rank in ranks for batch in rank]))  # type: ignore[arg-type]
        assert every.sources_B is not None
        counted = (every.targets_BT != IGNORE_INDEX).any(1)
        assert every.sources_B[counted].bincount().tolist() == [10, 4, 6]
        for source in range(3):
            tokens_BT = every.tokens_BT[counted & (every.sources_B == source)]
            inside = tokens_BT[tokens_BT != SEPARATOR]
            assert ((inside > 10_000 * source) & (inside <= 10_000 * (source + 1))).all()
    # At least one of each, and never more than there are.
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


def section(texts: tuple[Path, Path], **more: object) -> DataSection:
    weights = dict(zip(map(str, texts), (3.0, 1.0), strict=True))
    return DataSection.model_validate({"mixture": weights, "vocab_size": 300, **more})


def test_prepare_mixture_has_each_source(texts: tuple[Path, Path], tmp_path: Path) -> None:
    said: list[str] = []
    found = prepare_data(section(texts), tmp_path / "c", lambda p: said.append(p.message))
    assert [(s.name, s.share) for s in found.sources] == [("web", 0.75), ("code", 0.25)]
    hashes = {s.store.manifest.tokenizer_hash for s in found.sources}
    assert len(hashes) == 1  # trained on both
    assert (found.path / "tokenizer.json").is_file()
    assert said.count("training the tokenizer") == 1
    tokenizer = found.sources[1].store.tokenizer()
    for source, begins in zip(found.sources, ("page", "def f"), strict=True):
        ids = source.store.tokens("train").read_windows(np.array([0]), 20)[0]
        assert tokenizer.decode(ids.tolist()).startswith(begins)
    assert open_dataset(found.path) == found
    # All of it is there already, and other weights are another run.
    said.clear()
    again = prepare_data(section(texts), tmp_path / "c", lambda p: said.append(p.message))
    assert again == found
    assert said == []
    one, other = (str(path) for path in texts)
    more = prepare_data(section(texts, mixture={one: 1.0, other: 1.0}), tmp_path / "c")
    assert more.fingerprint != found.fingerprint
    assert found.unigram_entropy_nats == pytest.approx(
        sum(s.share * s.store.manifest.unigram_entropy_nats for s in found.sources)
    )


def test_mixture_shared_tokenizer_does_not_depend_on_earlier_runs(
    texts: tuple[Path, Path], tmp_path: Path
) -> None:
    """What is held out decides what it learns from, so it decides the tokenizer."""
    prepare_data(section(texts, validation_fraction=0.4), tmp_path / "c")
    second = prepare_data(section(texts, validation_fraction=0.01), tmp_path / "c")
    alone = prepare_data(section(texts, validation_fraction=0.01), tmp_path / "d")
    assert second.fingerprint == alone.fingerprint


def test_mixture_store_brings_its_tokenizer(texts: tuple[Path, Path], tmp_path: Path) -> None:
    web = prepare_store(DataSection(path=str(texts[0]), vocab_size=280), tmp_path / "c").path
    found = prepare_data(section((web, texts[1])), tmp_path / "c")
    assert {s.store.manifest.vocab_size for s in found.sources} == {280}
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
    assert [problem.key for problem in caught.value.problems] == ["data.mixture"] * 2
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
        job, _, problems = read_job("demo", [("data.mixture", text)])
        assert not problems
        assert job.data.mixture == {"web.txt": 0.7, "a=b/c": 2.0}
    file = tmp_path / "r.toml"
    file.write_text('extends = "demo"\n[data.mixture]\n"web.txt" = 1\n"x" = 3\n', "utf-8")
    assert read_job(str(file))[0].data.mixture == {"web.txt": 1.0, "x": 3.0}
    for text in ("web.txt", "web.txt=0", "web.txt=-1", "web.txt=much", "a=1,b=nan"):
        [problem] = read_job("demo", [("data.mixture", text)])[2]
        assert problem.key == "data.mixture"


def test_mixture_beside_data_path_is_refused(texts: tuple[Path, Path]) -> None:
    web, code = map(str, texts)
    more = [("data.mixture", f"{web}=1,{code}=1,/nowhere/x=1"), ("data.path", web)]
    with pytest.raises(InvalidConfig) as caught:
        prepare_job("demo", more)
    found = [(p.key, p.value) for p in caught.value.problems]
    assert ("data.path", web) in found
    assert ("data.mixture", "/nowhere/x") in found
