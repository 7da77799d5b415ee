"""The tables of the pages for people who come from other programs: `weft plan` takes each row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from weft.config.errors import InvalidConfig
from weft.config.schema import keys
from weft.models.decoder_config import DecoderConfig
from weft.planning.plan import Machine
from weft.planning.plan_text import plan_recipe

COOKBOOK = Path(__file__).parent.parent / "docs" / "cookbook"
SPAN = re.compile(r"`([a-z_]+\.[a-z_0-9]+) = ([^`]+)`((?:; `\"[^`]+\"`)*)")
DEVICES = {"from-deepspeed": 8, "from-megatron": 16, "from-smp": 32}
EVERY = {*keys(), *(f"model.{name}" for name in DecoderConfig.model_fields)}


def rows_of(page: str) -> list[tuple[str, list[dict[str, str]]]]:
    """Return the right-hand cell of each row, with the keys of each of its alternatives."""
    rows = []
    for line in (COOKBOOK / f"{page}.md").read_text("utf-8").splitlines():
        if line.startswith("| ") and not line.startswith("|---"):
            cell = line.rstrip(" |").rpartition(" | ")[2]
            spans = [(k, v, re.findall(r'`("[^`]+")`', more)) for k, v, more in SPAN.findall(cell)]
            number = max([1 + len(more) for *_, more in spans], default=0)
            cases = [
                {k: [v, *more][min(n, len(more))].strip('"') for k, v, more in spans}
                for n in range(number)
            ]
            rows.append((cell, cases))
    return rows


ROWS = [
    pytest.param(page, case, id=f"{page}-{' '.join(f'{k}={v}' for k, v in case.items())}")
    for page in DEVICES
    for _, cases in rows_of(page)
    for case in cases
]


def no_machine(_: object) -> Machine:
    raise AssertionError("--cluster replaces this machine")


def plan(devices: int, case: dict[str, str]) -> None:
    overrides = {"run.cluster": f"{max(1, devices // 8)}x{min(8, devices)}xH100"}
    overrides |= {"train.global_batch_size": "64", "train.microbatch_size": "1"}
    has_experts = any(key in ("parallel.ep", "model.balance_rate") for key in case)
    overrides |= {"model.kind": "moe", "model.preset": "toy-moe"} if has_experts else {}
    # Matrices of the demo are too small for float8.
    overrides |= {"model.preset": "8b"} if "precision.float8" in case else {}
    plan_recipe("demo", [*(overrides | case).items()], [], None, no_machine)


@pytest.mark.parametrize(("page", "case"), ROWS)
def test_row_of_a_page_is_accepted_by_plan(page: str, case: dict[str, str]) -> None:
    plan(DEVICES[page], case)


@pytest.mark.parametrize("page", DEVICES)
def test_page_names_only_keys_that_exist(page: str) -> None:
    text = (COOKBOOK / f"{page}.md").read_text("utf-8")
    sections = {key.partition(".")[0] for key in EVERY}
    # A name of the other program may begin like a section.
    spans = re.findall(r"`([a-z_]+)\.([a-z_0-9]+)(?: = [^`]*)?`", text)
    named = {f"{section}.{last}" for section, last in spans if section in sections}
    assert named - EVERY == set()
    assert len(rows_of(page)) > 10


def test_row_that_is_wrong_is_refused() -> None:
    with pytest.raises(InvalidConfig):
        plan(8, {"parallel.dp_shard": "4", "parallel.dp_replicate": "4"})
