"""NVIDIA's own tests of a node: the diagnostic of DCGM, and nccl-tests."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from weft.doctor.node_facts import DcgmResult
from weft.monitor.process import run_with_limit

DCGM_SECONDS = 600.0  # level 2 takes about two minutes
# Where AWS's images have them, outside of the path.
NCCL_TESTS_DIRS = ("/opt/nccl-tests/build", "/opt/amazon/nccl-tests/build")
NCCL_TESTS_SECONDS, NCCL_TESTS_BYTES = 60.0, 1 << 29


# --------------------------------------------------------------------------- DCGM


def run_dcgm() -> tuple[tuple[DcgmResult, ...], str]:
    """Run level 2 of DCGM's diagnostic on all GPUs of the node.

    Returns:
        The results, and why there are none; both are empty without DCGM.
    """
    if shutil.which("dcgmi") is None:
        return (), ""
    status, output = run_with_limit(["dcgmi", "diag", "--run", "2", "--json"], DCGM_SECONDS)
    if status is None:
        return (), f"no result within {DCGM_SECONDS:.0f} s"
    try:
        report = json.JSONDecoder().raw_decode(output[output.index("{") :])[0]
    except ValueError:
        return (), output.strip().partition("\n")[0] or f"status {status}"
    body = report.get("DCGM Diagnostic") or report.get("DCGM GPU Diagnostic") or {}
    return tuple(parse_dcgm(body)), body.get("runtime_error", "")


def parse_dcgm(body: Mapping[str, Any]) -> Iterator[DcgmResult]:
    """Yield the results of ``dcgmi diag --json``, of DCGM 3 or 4.

    A result of DCGM 3 has ``gpu_ids``, one of DCGM 4 ``entity_id``.  Warnings are texts, or objects
    with a text and a severity.
    """
    for category in body.get("test_categories") or []:
        for test in filter(None, category.get("tests") or []):
            for result in test.get("results") or []:
                names = (result.get(name) for name in ("entity_id", "gpu_ids", "gpu_id"))
                gpus = next((str(name) for name in names if name is not None), "")
                warnings = result.get("warnings") or []
                found = warnings if isinstance(warnings, list) else [warnings]
                texts = [w["warning"] if isinstance(w, Mapping) else str(w) for w in found]
                severities = [w.get("error_severity", 0) for w in found if isinstance(w, Mapping)]
                status = str(result.get("status", "")).capitalize()
                severity = severities[0] if severities else 0
                yield DcgmResult(test["name"], gpus, status, "; ".join(texts), severity)


# --------------------------------------------------------------------------- nccl-tests


def run_all_reduce(gpus: int) -> tuple[float, bool] | None:
    """Return bus bandwidth and correctness of an all-reduce over this node's GPUs.

    The program uses torch's NCCL if its own is linked dynamically.

    Returns:
        Bytes/s, and True if all sums are right; None without nccl-tests, or if it fails.
    """
    path = os.pathsep.join([os.environ.get("PATH", ""), *NCCL_TESTS_DIRS])
    if (program := shutil.which("all_reduce_perf", path=path)) is None:
        return None
    size = str(NCCL_TESTS_BYTES)
    command = ["env", f"LD_LIBRARY_PATH={library_path()}", program]
    command += ["--minbytes", size, "--maxbytes", size, "--ngpus", str(gpus)]
    return parse_nccl_test(run_with_limit(command, NCCL_TESTS_SECONDS)[1])


def library_path() -> str:
    """Return the library path with torch's NCCL before all others."""
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec else None
    own = [str(Path(folder, "nccl", "lib")) for folder in folders or []]
    return os.pathsep.join([*own, os.environ.get("LD_LIBRARY_PATH", "")])


def parse_nccl_test(output: str) -> tuple[float, bool] | None:
    """Return average bus bandwidth in bytes/s, and True if no value was wrong."""
    rate = re.search(r"^# Avg bus bandwidth\s*: ([\d.e+-]+)", output, re.MULTILINE)
    wrong = re.search(r"^# Out of bounds values : \d+ (OK|FAILED)", output, re.MULTILINE)
    return (float(rate[1]) * 1e9, wrong[1] == "OK") if rate and wrong else None
