"""Everything that people read uses today's words and names (docs/glossary.md), no retired one."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest

from weft.cli.main import build_parser
from weft.config.schema import SECTIONS

ROOT = Path(__file__).parent.parent

# Code that still has retired words, and is not scanned.
NOT_YET: tuple[str, ...] = ()

# Retired in all text: pattern, and the word to use.  A blank also matches a line break.
WORDS = {
    "told|tells?|telling": "report, log, print, show or know",
    "go(?:es|ing)? on|gone on|went on": "resume or continue",
    "whatever": "any",
    "of (?:its|their|one's) own": "its own ..., or separate",
    "by (?:itself|themselves)": "alone",
    "besides": "also, or except",
    "what there is|what it takes": "a noun",
    "(?:stands?|standing|stood) still": "hang",
    "at odds": "mismatched",
    "held[- ]out|hold[- ]?out": "validation",
    "look(?:s|ed|ing)? at": "inspect",
    "hand(?:s|ed|ing)? in": "submit",
    "lets? go|letting go": "release",
    "(?:is|are|was|were) no numbers?": "NaN or Inf",
    "folders?": "directory",
}

# Retired keys of the configuration.
KEYS = {
    "run.workers": "run.nproc_per_node",
    "data.field": "data.text_field",
    "data.holdout": "data.validation_fraction",
    "data.too_long": "data.overlong",
    "data.cache": "data.cache_dir",
    "train.global_batch": "train.global_batch_size",
    "train.microbatch": "train.microbatch_size",
    "train.canonical": "train.world_size_invariant",
    "optim.kind": "optim.name",
    "optim.states": "optim.state_dtype",
    "parallel.schedule": "pipeline.schedule",
    "parallel.context": "parallel.cp_method",
    "parallel.context_balance": "parallel.cp_load_balance",
    "parallel.placement": "parallel.mesh_order",
    "parallel.prefetch": "parallel.fsdp_prefetch",
    "parallel.persist_below": "parallel.param_persistence_threshold",
    "pipeline.optimize": "pipeline.balance",
    "pipeline.layers": "pipeline.layers_per_stage",
    "precision.compute": "precision.compute_dtype",
    "precision.reduce": "precision.reduce_dtype",
    "precision.float8_skip": "precision.float8_exclude",
    "compile.cache": "compile.cache_dir",
    "checkpoint.background": "checkpoint.async_save",
    "checkpoint.keep": "checkpoint.keep_latest",
    "checkpoint.local": "checkpoint.local_dir",
    "resilience.anomaly": "resilience.on_anomaly",
    "resilience.anomaly_limit": "resilience.max_anomalies",
    "resilience.restarts": "resilience.max_restarts_per_hour",
    "debug.statistics": "debug.layer_stats_steps",
    "launch.time": "launch.time_limit",
    "[remat]": "[activation_checkpoint]",
    "[observe]": "[monitor]",
}

# Retired metrics.
METRICS = {
    "expected_memory_gib": "predicted_memory_gib",
    "expected_step_seconds": "predicted_step_seconds",
    "slow_rank": "straggler_rank",
    "slow_ratio": "straggler_slowdown",
    "expert_load": "moe_max_load",
    "source_eval_losses": "eval_loss/<source>",
}

# Retired commands, and sections of keys: patterns.
COMMANDS = {
    r"weft debug(?: \w+)?": "weft diff or weft hang",
    r"weft launch (?:status|logs|stop)": "weft job status, logs or cancel",
    r"remat\.\w+": "activation_checkpoint....",
    r"observe\.\w+": "monitor....",
}

# Retired names of modules.
MODULES = {
    "where": "environment",
    "position": "state",
    "timetable": "pipeline_schedule",
    "predict": "estimate",
    "again": "respawn",
    "preparing": "its caller",
    "twin": "plan_to_analytic",
    "expand": "extrapolate",
    "work": "trace_to_cost",
    "pictures": "charts",
    "sections": "report_sections",
}

# Retired names of classes, functions and methods; a leading underscore is ignored.
NAMES = {
    "Where": "ClusterEnvironment",
    "Position": "TrainState",
    "Engine": "TrainStep",
    "Journal": "EventLog",
    "Recorder": "MetricLogger",
    "Ledger": "StepTimer",
    "Clock": "StepTimer",
    "Spans": "StepTimer",
    "Wishes": "RankConsensus",
    "Watch": "AnomalyDetector",
    "Trial": "StepResult",
    "Alone": "SingleReplica",
    "Groups": "ReplicaGroups",
    "Saver": "CheckpointManager",
    "Saves": "CheckpointSchedule",
    "Ahead": "Prefetcher",
    "Windows": "TokenChunks",
    "Turns": "MixtureSampler",
    "Text": "Dataset",
    "Odd": "IncompleteTail",
    "Degrees": "ParallelDims",
    "NotAlike": "HeterogeneousLayers",
    "Recording": "Trace",
    "Exchange": "AllToAll",
    "Copy": "CopyToTP",
    "Add": "ReduceFromTP",
    "Counterpart": "HFMapping",
    "Split": "TensorParallelSpec",
    "Spread": "Unpermute",
    "LeanAdamW": "LowPrecisionAdamW",
    "Meeting": "RendezvousHandler",
    "Sick": "UnhealthyNode",
    "Stopped": "Requeue",
    "Speech": "ChatFormat",
    "Found": "CheckpointRef, SourceRef or SearchResult",
    "Judged": "ComparisonResult",
    "Ended": "TrialResult",
    "History": "RunReader",
    "Guarded": "BackgroundTracker",
    "Means": "RunningMean",
    "Statistics": "LayerStats",
    "Problem": "ConfigError",
    "InvalidJob": "InvalidConfig",
    "find": "detect_environment",
    "placed": "apply_environment",
    "speaks": "is_log_node",
    "home_of": "checkpoint_dir",
    "base_of": "base_checkpoint",
    "tells": "owns_loss",
    "told": "loss_and_norm",
    "forget": "reset_metrics",
    "in_order": "forward_backward_invariant",
    "compute": "forward_backward",
    "update": "optimizer_step",
    "drop": "zero_grad",
    "rare_garbage": "manual_gc",
    "naming": "error_context",
    "at": "fault_point",
    "reach": "fault_point",
    "arm": "install_faults",
    "look_at_gradients": "record_grad_norms",
    "due": "is_due",
    "open_at": "open",
    "ask": "post",
    "answer": "wait",
    "examine": "check",
    "meet": "sync",
    "leads": "is_leader",
    "takes_over": "became_leader",
    "place": "index",
    "take": "acquire_lease",
    "wants_again": "should_retry",
    "stall_seconds": "blocking_seconds",
    "set_aside": "quarantine",
    "due_on_nodes": "is_local_due",
    "keep_local": "save_local",
    "learned": "loss_mask",
    "each": "parallel_map",
    "most_kept": "max_in_flight",
    "find_way": "resolve_batch",
    "way": "batch_plan",
    "known": "spec",
    "replaced": "patch_attribute",
    "hide_exchanges": "enable_async_tp",
    "greet_others_only": "skip_self_p2p_init",
    "take_parts_outside": "materialize_local_weights",
    "keep": "prune_to_stage",
    "without_head": "enable_fused_loss",
    "decays": "has_weight_decay",
    "step_unless": "masked_step",
    "how_to_go_on": "resume_hint",
    "at_odds": "find_mismatched_collectives",
    "look": "collect_facts",
    "lay_out": "plan_inference",
    "tamper": "corrupt",
    "spreads": "rank_stats",
    "wants": "is_active",
    "some": "truncate_list",
    "either": "format_choices",
    "near": "nearest_divisors",
    "parts": "model_parts",
    "say": "log",
    "pieces": "chunks",
    "extents": "row_groups",
    "units": "files",
}

# Retired parts of names.
PARTS = {"told": "reported", "tells": "reports", "folder": "dir", "folders": "dirs"}

# Definitions whose retired name is right for another thing.
EXCEPTIONS = {
    ("weft/data/token_store.py", "Split"): "the train or validation split of a dataset",
    ("weft/plan/plan.py", "units"): "a pipeline stage consists of units: blocks, embedding, head",
    ("weft/tools/trials.py", "Trial"): "a trial of an experiment",
}

# Literals with a retired word that nobody reads.
LITERALS = {
    ("weft/monitor/faults.py", "tell"): "a fault site, which drills and recipes name",
    ("weft/train/metric_logger.py", "tell"): "the same site",
}

# Lines that quote a name of another project.
QUOTED = {'torchtitan = "checkpoint.folder"'}

OPENINGS = ("What", "Which", "Who", "Whether", "Where", "How", "Of", "By", "Inside")

PATTERNS = [
    *((rf"\b(?:{word})\b".replace(" ", r"\s+"), use) for word, use in WORDS.items()),
    *((rf"(?<![\w./-])(?:{text})(?!\w)", use) for text, use in COMMANDS.items()),
    *((rf"(?<![\w./-]){re.escape(text)}(?!\w)", use) for text, use in (KEYS | METRICS).items()),
]
USES = [use for _, use in PATTERNS]
RETIRED = re.compile("|".join(f"({pattern})" for pattern, _ in PATTERNS), re.IGNORECASE)

PROSE = {
    "README": ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "AGENTS.md", "llms.txt"),
    "docs": tuple(
        f"docs/{path}"
        for path in (
            "*.md",
            "reference/*.md",
            "cookbook/*.md",
            "course/*.md",
            "*.py",
            "course/*.py",
        )
    ),
    "decisions": ("docs/decisions/*.md",),
    "toml": ("weft/**/*.toml",),
}
TEST_DIRECTORIES = sorted(
    {path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/**/*.py")}
    | {"benchmarks"}
)
# Parts of names in tests and benchmarks; the package's own names are in NAMES.
DIALECT = {"told", "tells", "tell", "folder", "folders", "sick", "said", "says", "asked", "kept"}
PACKAGES = sorted(path.parent.name for path in ROOT.glob("weft/**/__init__.py"))


class Passage(NamedTuple):
    """Text of a file from a line on."""

    file: str
    line: int
    text: str


class Definition(NamedTuple):
    """A module, class or function; ``use``: today's name if its name is retired."""

    file: str
    line: int
    name: str
    doc: str
    use: str | None


def is_scanned(file: str) -> bool:
    return not file.startswith(NOT_YET)


def python_files(package: str) -> list[Path]:
    paths = sorted(path for path in ROOT.glob("weft/**/*.py") if path.parent.name == package)
    return [path for path in paths if is_scanned(path.relative_to(ROOT).as_posix())]


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def strings(path: Path) -> Iterator[Passage]:
    """Docstrings and other literals."""
    file = path.relative_to(ROOT).as_posix()
    for node in ast.walk(parse(path)):
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            continue
        if (file, node.value) not in LITERALS:
            yield Passage(file, node.lineno, node.value)


def comments(path: Path) -> Iterator[Passage]:
    """Comments; adjacent lines are one passage."""
    file, source = path.relative_to(ROOT).as_posix(), path.read_text("utf-8")
    lines: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if lines and token.start[0] != lines[-1][0] + 1:
                yield join_comments(file, lines)
                lines = []
            lines.append((token.start[0], token.string.removeprefix("#")))
    if lines:
        yield join_comments(file, lines)


def join_comments(file: str, comments: list[tuple[int, str]]) -> Passage:
    return Passage(file, comments[0][0], "\n".join(text for _, text in comments))


def definitions(path: Path) -> Iterator[Definition]:
    file, tree = path.relative_to(ROOT).as_posix(), parse(path)
    module = path.parent.name if path.stem == "__init__" else path.stem
    yield Definition(file, 1, module, ast.get_docstring(tree) or "", MODULES.get(module))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            parts = node.name.lower().split("_")
            use = NAMES.get(node.name.lstrip("_"), next(filter(None, map(PARTS.get, parts)), None))
            yield Definition(file, node.lineno, node.name, ast.get_docstring(node) or "", use)


def retired_words(passage: Passage) -> list[str]:
    """``file:line: 'word' (use ...): text`` for each retired word of a passage."""
    lines = passage.text.splitlines()
    results = []
    for match in RETIRED.finditer(passage.text):
        index = passage.text.count("\n", 0, match.start())
        use = USES[(match.lastindex or 1) - 1]
        location = f"{passage.file}:{passage.line + index}"
        results.append(f"{location}: {match[0]!r} (use {use}): {lines[index].strip()[:120]}")
    return results


def report(result: list[str]) -> str:
    return "\n" + "\n".join(result)


@pytest.mark.parametrize("group", PROSE)
def test_prose_has_no_retired_word(group: str) -> None:
    paths = [path for pattern in PROSE[group] for path in sorted(ROOT.glob(pattern))]
    assert paths
    # A page quotes code, which has to change first.
    quotable = {
        line.strip()
        for path in ROOT.glob("weft/**/*.py")
        if not is_scanned(path.relative_to(ROOT).as_posix())
        for line in path.read_text("utf-8").splitlines()
    } | QUOTED
    results = []
    for path in paths:
        lines = path.read_text("utf-8").splitlines()
        text = "\n".join("" if line.strip() in quotable else line for line in lines)
        results += retired_words(Passage(path.relative_to(ROOT).as_posix(), 1, text))
    assert not results, report(results)


@pytest.mark.parametrize("package", PACKAGES)
def test_source_has_no_retired_word(package: str) -> None:
    result = [
        text
        for path in python_files(package)
        for passage in chain(strings(path), comments(path))
        for text in retired_words(passage)
    ]
    assert not result, report(result)


@pytest.mark.parametrize("directory", TEST_DIRECTORIES)
def test_tests_and_benchmarks_are_in_plain_words(directory: str) -> None:
    """Only their comments, docstrings and names: their data may be anything."""
    results = []
    for path in sorted((ROOT / directory).glob("*.py")):
        passages = [Passage(file, line, doc) for file, line, _, doc, _ in definitions(path)]
        for passage in chain(passages, comments(path)):
            results += retired_words(passage)
        for file, line, name, doc, _ in definitions(path):
            parts = set(name.lower().split("_"))
            if parts & DIALECT:
                results.append(f"{file}:{line}: the name {name!r}")
            if doc.split(" ")[0] in OPENINGS:
                results.append(f"{file}:{line}: {doc.splitlines()[0]}")
    assert not results, report(results)


def test_help_of_keys_has_no_retired_word() -> None:
    results = []
    for name, section in SECTIONS.items():
        for key, field in section.model_fields.items():
            assert field.description, f"{name}.{key} has no help"
            results += retired_words(Passage(f"help of {name}.{key}", 1, field.description))
    assert not results, report(results)


def test_help_of_commands_has_no_retired_word() -> None:
    result, remaining = [], [build_parser()]
    while remaining:
        command = remaining.pop()
        result += retired_words(Passage(f"{command.prog} --help", 1, command.format_help()))
        for action in command._actions:
            if isinstance(action.choices, dict):
                remaining += action.choices.values()
    assert not result, report(result)


@pytest.mark.parametrize("package", PACKAGES)
def test_definition_has_no_retired_name(package: str) -> None:
    result = [
        f"{file}:{line}: {name!r} (use {use})"
        for path in python_files(package)
        for file, line, name, _, use in definitions(path)
        if use and (file, name) not in EXCEPTIONS
    ]
    assert not result, report(result)


def documented_arguments(doc: str) -> set[str]:
    """Return the names in the section ``Args`` of a docstring."""
    section = re.search(r"^Args:\n((?:    .*\n|\n)*)", doc + "\n", re.MULTILINE)
    lines = re.findall(
        r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*):", section[1] if section else "", re.MULTILINE
    )
    return {name.lstrip("*") for line in lines for name in line.split(", ")}


@pytest.mark.parametrize("package", PACKAGES)
def test_docstring_documents_only_arguments_that_exist(package: str) -> None:
    results = []
    for path in python_files(package):
        for node in ast.walk(parse(path)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            arguments = {arg.arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg)}
            extra = documented_arguments(ast.get_docstring(node) or "") - arguments
            results += [
                f"{path}:{node.lineno}: {node.name} has no argument {name}" for name in extra
            ]
    assert not results, report(results)


def test_exceptions_are_still_used() -> None:
    defined = {
        (file, name)
        for path in {ROOT / file for file, _ in EXCEPTIONS}
        for file, _, name, _, _ in definitions(path)
    }
    assert set(EXCEPTIONS) - defined == set()
    assert all(f'"{text}"' in (ROOT / file).read_text("utf-8") for file, text in LITERALS)


@pytest.mark.parametrize("package", PACKAGES)
def test_docstring_opens_with_a_short_sentence(package: str) -> None:
    """At most 80 characters, and no clause such as "What ..." in place of a verb or noun."""
    results = []
    for path in python_files(package):
        for file, line, _, doc, _ in definitions(path):
            first = doc.partition("\n")[0]
            if len(first) > 80 or first.split(" ")[0] in OPENINGS:
                results.append(f"{file}:{line}: {len(first)} characters: {first}")
    assert not results, report(results)
