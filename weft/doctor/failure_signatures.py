"""Recognize known failures of NCCL on EFA by logs, versions and facts.

``failure_signatures.toml`` lists them with their causes and remedies.  ``weft doctor --logs``, the
check of versions in ``weft doctor`` and the message of a failed run use the same list.
"""

from __future__ import annotations

import operator
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from weft.config.files import open_regular
from weft.doctor.nccl_log import NcclLog, parse_nccl_log
from weft.doctor.node_facts import Facts
from weft.planning.instance_types import find_instance_type
from weft.version import parse_version

# Bytes of a log to read, half at its start, where NCCL names its network, half at its end.
MAX_BYTES = 8 << 20
MAX_EXCERPT = 160  # characters of the line that matched
RANK_HEADER = re.compile(r"^--- [\d-]+ [\d:]+ rank \d+ on ", re.MULTILINE)
LIMITS: Mapping[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "<": operator.lt,
    ">": operator.gt,
}


@dataclass(frozen=True)
class Signature:
    """A known failure; ``failure_signatures.toml`` explains the fields."""

    name: str
    cause: str
    remedy: str
    source: str
    pattern: str = ""
    nccl: str = ""
    plugin: str = ""
    libfabric: str = ""
    installer: str = ""
    network: str = ""
    instance: str = ""
    facts: tuple[str, ...] = ()

    @property
    def needs_log(self) -> bool:
        """True if only a log can show the failure."""
        return bool(self.pattern or self.network) or "few_devices" in self.facts


# Facts by the names in ``failure_signatures.toml``.
FACTS: Mapping[str, Callable[[Facts, NcclLog], bool]] = {
    "efa": lambda facts, log: facts.has_efa or log.provider == "efa",
    "efa_expected": lambda facts, log: (
        facts.has_efa or bool(log.plugin) or find_instance_type(facts.instance_type) is not None
    ),
    "few_devices": lambda facts, log: (
        log.provider == "efa" and 0 < log.nics < expected_devices(facts)
    ),
    "cuda_compat": lambda facts, log: bool(facts.cuda_compat),
    "nvswitch": lambda facts, log: bool(re.match(r"(ml\.)?p[45]", facts.instance_type)),
    "sagemaker_toolkit": lambda facts, log: facts.is_sagemaker_toolkit,
}


def expected_devices(facts: Facts) -> int:
    """Return the number of EFA devices that the node should have; 0: unknown."""
    instance = find_instance_type(facts.instance_type)
    return instance.efa if instance else sum(a.driver == "efa" for a in facts.adapters)


@cache
def load_signatures() -> Sequence[Signature]:
    """Return all failures, special ones first."""
    text = Path(__file__).with_name("failure_signatures.toml").read_text("utf-8")
    rows = tomllib.loads(text)["signatures"]
    return [Signature(**row | {"facts": tuple(row.get("facts", ()))}) for row in rows]


def match_version(version: str, limits: str) -> bool:
    """Return True if a version is known and within limits such as '>=2.19, <2.28.9'."""
    own = parse_version(version)
    return bool(own) and all(
        LIMITS[match[1]](own, parse_version(match[2]))
        for match in re.finditer(r"([<>]=?)\s*([\d.]+)", limits)
    )


def find_signatures(text: str, facts: Facts, log: NcclLog | None = None) -> dict[Signature, str]:
    """Return the failures of a log and a machine, with the line that shows each.

    Args:
        text: log of one process; empty: only facts count.
        facts: the machine that wrote the log.
        log: the network in ``text``, if it is parsed already.
    """
    log = log or parse_nccl_log(text)
    versions = {
        "nccl": log.nccl or ".".join(map(str, facts.measured.nccl)),
        "plugin": log.plugin or facts.ofi_plugin,
        "libfabric": log.libfabric or facts.libfabric,
        "installer": facts.efa_installer,
    }
    found: dict[Signature, str] = {}
    for signature in load_signatures():
        limits = {name: getattr(signature, name) for name in versions if getattr(signature, name)}
        match = re.search(signature.pattern, text) if signature.pattern else None
        if (
            (match or not signature.pattern)
            and all(match_version(versions[name], limit) for name, limit in limits.items())
            and signature.network in ("", log.network)
            and re.fullmatch(signature.instance or ".*", facts.instance_type.removeprefix("ml."))
            and all(FACTS[name](facts, log) for name in signature.facts)
            and signature.name not in {other.name for other in found}
        ):
            found[signature] = _line_of(text, match) if match else ""
    if len(found) > 1:  # the general failure explains nothing that a special one does not
        found = {s: line for s, line in found.items() if s.name != "no-efa-device"}
    return found


def _line_of(text: str, match: re.Match[str]) -> str:
    start = text.rfind("\n", 0, match.start()) + 1
    end = text.find("\n", match.start())
    line = text[start : end if end >= 0 else len(text)].strip()
    return line if len(line) <= MAX_EXCERPT else f"...{line[-MAX_EXCERPT:]}"


# --------------------------------------------------------------------------- logs


def read_log(path: Path) -> str:
    """Return a log, from the start of the newest process; empty if it is not readable."""
    with suppress(OSError), open_regular(path) as file:
        content = file.read(MAX_BYTES // 2)
        file.seek(max(len(content), path.stat().st_size - MAX_BYTES // 2))
        text = (content + file.read()).decode("utf-8", "replace")
        starts = [match.start() for match in RANK_HEADER.finditer(text)]
        return text[starts[-1] :] if starts else text
    return ""


def find_logs(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the files, and the logs of run directories, in the order of their names."""
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        home = path / "logs" if (path / "logs").is_dir() else path
        yield from sorted(p for p in home.iterdir() if p.suffix in (".log", ".err", ".out", ".txt"))
        if home != path:
            yield from sorted(path.glob("slurm-*.out"))


def explain_failure_logs(texts: Iterable[str], facts: Facts) -> list[str]:
    """Return lines that name the known failures in the logs of a failed run."""
    found: dict[str, Signature] = {}
    for text in texts:
        for signature in find_signatures(text, facts):
            found.setdefault(signature.name, signature)
    lines: list[str] = []
    for name, signature in found.items():
        lines += [f"known failure ({name}): {signature.cause}", f"  -> {signature.remedy}"]
    return lines
