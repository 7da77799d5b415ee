"""Plan published models on usual GPUs, and write the pages of docs/models/.

    python benchmarks/model_pages.py [--again] [PAGE ...]
    python benchmarks/model_pages.py --write        only write the pages from recorded results

For each model, cluster and way of training, the first settings of `LADDER` that fit are recorded:
memory and time by a traced step, as ``weft plan`` predicts them.  The last, which need least, are
tried before the others, which need far more.  Settings whose weights and optimizer states alone
exceed the memory are not traced.
benchmarks/model_pages.json has the results.  An interrupted run continues from it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from weft import __version__  # noqa: E402
from weft.config.files import write_json  # noqa: E402
from weft.config.reader import read_job  # noqa: E402
from weft.estimate.cost import device_spec  # noqa: E402
from weft.estimate.forecast import forecast  # noqa: E402
from weft.models import FAMILIES  # noqa: E402
from weft.planning.plan import Machine  # noqa: E402
from weft.planning.plan_text import plan_recipe  # noqa: E402

RESULTS = Path(__file__).with_suffix(".json")
PAGES_DIR = ROOT / "docs" / "models"
Json = dict[str, Any]


class Model(NamedTuple):
    """A published model.

    Attributes:
        title: its name for people.
        hub: its name on the Hugging Face Hub, or "" if only its text model is trained.
        kind, preset: of weft.
        full, lora: recipes that tune it; "": none.
        recipes: others that train it, or its shape, on their own cluster.
        directory: name or directory of the weights, if it is not ``hub``.
        remark: what weft does with them.
    """

    title: str
    hub: str
    kind: str
    preset: str
    full: str
    lora: str
    recipes: tuple[str, ...] = ()
    directory: str = ""
    remark: str = ""


def dense(title: str, hub: str, kind: str, preset: str, *recipes: str) -> Model:
    """Return a model of a size without recipes of that size; Qwen3's tune it."""
    return Model(title, hub, kind, preset, "qwen3-8b-finetune", "qwen3-8b-lora", recipes)


TEXT_MODEL = (
    "The published files are of a multi-modal model. weft reads its text model, and exports it "
    "alone: see [Models](../models.md#import-and-export)."
)
FLOAT8 = (
    "The published files are in float8 with a scale per block. weft reads the values that they "
    "stand for; the export is in bfloat16."
)


def gemma3(size: str, full: str, lora: str) -> Model:
    """Return a multi-modal Gemma 3."""
    title, preset = f"Gemma 3 {size}", size.lower()
    hub = f"google/gemma-3-{preset}-it"
    return Model(title, "", "gemma3", preset, full, lora, (), hub, TEXT_MODEL)


def qwen2_5(size: str) -> Model:
    """Return a Qwen2.5."""
    return dense(f"Qwen2.5 {size}", f"Qwen/Qwen2.5-{size}-Instruct", "qwen2", size.lower())


def olmo(title: str, hub: str, kind: str, preset: str, *recipes: str) -> Model:
    """Return an OLMo."""
    return dense(f"OLMo {title}", f"allenai/{hub}-Instruct", kind, preset, *recipes)


def qwen3(size: str, full: str = "", lora: str = "") -> Model:
    """Return a dense Qwen3."""
    hub, preset = f"Qwen/Qwen3-{size}", size.lower()
    full, lora = full or "qwen3-8b-finetune", lora or "qwen3-8b-lora"
    return Model(f"Qwen3 {size}", hub, "qwen3", preset, full, lora)


def llama(title: str, hub: str, preset: str, *recipes: str) -> Model:
    """Return a Llama 3."""
    full = f"llama3-{preset}-finetune" if preset in ("1b", "3b") else "llama3-3b-finetune"
    lora = f"llama3-{preset}-lora" if preset in ("3b", "70b") else "llama3-3b-lora"
    return Model(title, f"meta-llama/{hub}", "llama", preset, full, lora, recipes)


def gpt_oss(size: str, *recipes: str) -> Model:
    """Return a gpt-oss."""
    full, lora = f"gpt-oss-{size}-finetune", f"gpt-oss-{size}-lora"
    title, hub = f"gpt-oss {size.upper()}", f"openai/gpt-oss-{size}"
    return Model(title, hub, "gpt_oss", size, full, lora, recipes)


QWEN2_5_SIZES = ("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B")
# Pages: title, models.
PAGES: dict[str, tuple[str, list[Model]]] = {
    "llama": (
        "Llama 3",
        [
            llama("Llama 3.2 1B", "Llama-3.2-1B-Instruct", "1b", "llama3-1b"),
            llama("Llama 3.2 3B", "Llama-3.2-3B-Instruct", "3b", "llama3-3b"),
            llama("Llama 3.1 8B", "Llama-3.1-8B-Instruct", "8b", "llama3-8b-8gpu", "llama3-8b"),
            llama("Llama 3.3 70B", "Llama-3.3-70B-Instruct", "70b", "llama3-70b"),
            llama("Llama 3.1 405B", "Llama-3.1-405B-Instruct", "405b", "llama3-405b"),
        ],
    ),
    "qwen3": (
        "Qwen3",
        [
            qwen3("0.6B", full="qwen3-0.6b-finetune"),
            qwen3("1.7B"),
            qwen3("4B", full="qwen3-4b-finetune", lora="qwen3-4b-lora"),
            qwen3("8B"),
            qwen3("14B", full="qwen3-14b-finetune", lora="qwen3-14b-lora"),
            qwen3("32B", full="qwen3-32b-finetune", lora="qwen3-32b-lora"),
            Model(
                "Qwen3 30B-A3B",
                "Qwen/Qwen3-30B-A3B",
                "qwen3_moe",
                "30b-a3b",
                "qwen3-30b-a3b-finetune",
                "qwen3-30b-a3b-lora",
                ("qwen3-30b-a3b",),
            ),
            Model(
                "Qwen3 235B-A22B",
                "Qwen/Qwen3-235B-A22B",
                "qwen3_moe",
                "235b-a22b",
                "qwen3-30b-a3b-finetune",
                "qwen3-30b-a3b-lora",
                ("qwen3-235b-a22b",),
            ),
        ],
    ),
    "qwen2.5": ("Qwen2.5", [*map(qwen2_5, QWEN2_5_SIZES)]),
    "gemma3": (
        "Gemma 3",
        [
            dense("Gemma 3 1B", "google/gemma-3-1b-it", "gemma3", "1b"),
            gemma3("4B", "gemma3-12b-finetune", "gemma3-4b-lora"),
            gemma3("12B", "gemma3-12b-finetune", "gemma3-4b-lora"),
            gemma3("27B", "gemma3-12b-finetune", "gemma3-27b-lora"),
        ],
    ),
    "gpt-oss": (
        "gpt-oss",
        [
            gpt_oss("20b"),
            gpt_oss("120b", "gpt-oss-120b-finetune"),
        ],
    ),
    "olmo": (
        "OLMo",
        [
            olmo("2 1B", "OLMo-2-0425-1B", "olmo2", "1b"),
            olmo("2 7B", "OLMo-2-1124-7B", "olmo2", "7b", "olmo2-7b"),
            olmo("2 13B", "OLMo-2-1124-13B", "olmo2", "13b"),
            olmo("2 32B", "OLMo-2-0325-32B", "olmo2", "32b"),
            olmo("3 7B", "Olmo-3-7B", "olmo3", "7b", "olmo3-7b"),
            olmo("3.1 32B", "Olmo-3.1-32B", "olmo3", "32b"),
        ],
    ),
    "others": (
        "Mistral, Mixtral, Phi, SmolLM and DeepSeek",
        [
            dense("Mistral 7B", "mistralai/Mistral-7B-Instruct-v0.3", "mistral", "7b-v0.3"),
            dense("Mistral NeMo 12B", "mistralai/Mistral-Nemo-Base-2407", "mistral", "nemo-12b"),
            dense("Phi-4", "microsoft/phi-4", "phi3", "4"),
            dense("SmolLM3 3B", "HuggingFaceTB/SmolLM3-3B", "smollm3", "3b"),
            Model(
                "Mixtral 8x7B",
                "mistralai/Mixtral-8x7B-Instruct-v0.1",
                "mixtral",
                "8x7b",
                "qwen3-30b-a3b-finetune",
                "qwen3-30b-a3b-lora",
            ),
            Model(
                "DeepSeek-V3",
                "deepseek-ai/DeepSeek-V3",
                "deepseek_v3",
                "671b",
                "",
                "",
                ("deepseek-v3-671b-lora", "deepseek-v3-671b"),
                "deepseek-ai/DeepSeek-V3",
                FLOAT8,
            ),
        ],
    ),
}

CLUSTERS = ("1x1xRTX-4090", "1x1xH100", "1x8xH100", "4x8xH100", "16x8xH100")
WAYS = ("QLoRA", "LoRA", "full")
CAPACITY = {"RTX-4090": 24e9, "H100": 80e9}  # bytes, for the first look only
# Bytes of a parameter in weights, gradients and optimizer states.
STATE_BYTES = {"QLoRA": 0.55, "LoRA": 2.0, "full": 12.0}
LADDER: list[dict[str, str]] = [
    {"activation_checkpoint.mode": "none", "train.microbatch_size": "1"},
    {"activation_checkpoint.mode": "selective", "train.microbatch_size": "4"},
    {"activation_checkpoint.mode": "selective", "train.microbatch_size": "1"},
    {"activation_checkpoint.mode": "full", "train.microbatch_size": "4"},
    {"activation_checkpoint.mode": "full", "train.microbatch_size": "1"},
]
LEAN = 0.6  # of the memory: settings that need more leave no room for faster ones
LAST = {"full": {**LADDER[-1], "optim.state_dtype": "bfloat16"}}


def num_ranks(cluster: str) -> int:
    """Return the number of GPUs of a cluster."""
    nodes, devices, _ = cluster.split("x", 2)
    return int(nodes) * int(devices)


def is_wanted(model: Model, cluster: str, way: str) -> bool:
    """Return True if a row is worth its time: neither hopeless nor far larger than needed."""
    if not (model.full if way == "full" else model.lora):
        return False
    family = FAMILIES[model.kind]
    params, ranks = family.num_params(family.presets[model.preset]), num_ranks(cluster)
    capacity = CAPACITY[cluster.rpartition("x")[2]]
    states = STATE_BYTES[way] * params
    if way == "LoRA" and ranks > 8 and states / 8 < 0.95 * capacity:
        return False  # one server suffices
    if ranks > 1 and states / (ranks / 8 if ranks > 8 else 1) < 0.4 * capacity:
        return False  # fewer GPUs suffice
    if way == "QLoRA" and (ranks > 1 or STATE_BYTES["LoRA"] * params < 0.5 * capacity):
        return False  # LoRA suffices
    return states / ranks < 0.95 * capacity


def candidates(model: Model, cluster: str, way: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield recipe and overrides, fastest first."""
    recipe = model.full if way == "full" else model.lora
    job = read_job(recipe)[0]
    ranks = num_ranks(cluster)
    is_routed = bool(getattr(FAMILIES[model.kind].presets[model.preset], "num_experts", 0))
    for step in [*LADDER, *([LAST[way]] if way in LAST else [])]:
        if is_routed and step["activation_checkpoint.mode"] == "selective":
            continue  # is refused with compile.enable
        if ranks == 1 and step["train.microbatch_size"] == "4":
            continue  # gains little on one GPU
        if ranks > 1 and step["activation_checkpoint.mode"] == "none":
            continue
        batch = max(job.train.global_batch_size, ranks * int(step["train.microbatch_size"]))
        wanted = {
            "model.kind": model.kind,
            "model.preset": model.preset,
            "lora.quantize": "nf4" if way == "QLoRA" else job.lora.quantize,
            "train.global_batch_size": str(batch),
            "parallel.ep": "8" if is_routed and ranks > 1 else "1",
            **step,
        }
        known = {
            "model.kind": job.model.kind,
            "model.preset": job.model.preset,
            "lora.quantize": job.lora.quantize,
            "train.global_batch_size": str(job.train.global_batch_size),
            "parallel.ep": str(job.parallel.ep),
            "activation_checkpoint.mode": job.activation_checkpoint.mode,
            "train.microbatch_size": str(job.train.microbatch_size),
            "optim.state_dtype": job.optim.state_dtype,
        }
        yield recipe, {key: value for key, value in wanted.items() if known[key] != value}


def predict(recipe: str, overrides: dict[str, str], cluster: str | None) -> Json:
    """Plan a recipe by a traced step; return the figures of a row."""
    plan, machine = plan_recipe(
        recipe, list(overrides.items()), [], cluster, lambda section: Machine("cpu", 1)
    )
    result = forecast(plan, machine, device_spec(plan, machine))
    assert result.step_seconds
    assert result.time_breakdown
    bound, share = max(result.time_breakdown.items(), key=lambda item: item[1])
    return {
        "cluster": cluster or plan.job.run.cluster,
        "recipe": recipe,
        "overrides": overrides,
        "fits": result.fits,
        "memory_gib": round(result.needed_bytes / 2**30, 1),
        "step_seconds": round(result.step_seconds, 3),
        "tokens_per_second": round(plan.tokens_per_step / result.step_seconds),
        "mfu": round(result.mfu or 0, 3),
        "bound": bound,
        "share": round(share / result.step_seconds, 2),
        "error": result.error,
        "run_seconds": round(result.run_seconds or 0),
    }


def run(names: list[str], again: bool) -> None:
    """Record the rows of pages; without ``again`` only those of models without rows."""
    record = read_results()
    record |= {"torch": torch.__version__, "weft": __version__}
    for name in names:
        if again or any(model.title not in record["rows"] for model in PAGES[name][1]):
            record["dates"][name] = datetime.date.today().isoformat()
        for model in PAGES[name][1]:
            if model.title in record["rows"] and not again:
                continue
            rows = [row for row in predict_model(model) if row]
            record["rows"][model.title] = rows
            write_json(RESULTS, record, indent=1)


def predict_model(model: Model) -> Iterator[Json]:
    """Yield the rows of a model."""
    for cluster in CLUSTERS:
        for way in WAYS:
            if not is_wanted(model, cluster, way):
                continue
            if row := predict_row(model, cluster, way):
                yield with_own_recipe(model, row)
    for recipe in model.recipes:
        began = time.monotonic()
        row = {"way": way_of(recipe), **predict(recipe, {}, None)}
        report(model, row, time.monotonic() - began)
        yield row


def way_of(recipe: str) -> str:
    """Return how a recipe trains."""
    job = read_job(recipe)[0]
    return "LoRA" if job.lora.rank else "full" if job.train.epochs else "pre-train"


def predict_row(model: Model, cluster: str, way: str) -> Json | None:
    """Return the row of the fastest settings that fit, or None."""

    def attempt(recipe: str, overrides: dict[str, str]) -> Json:
        began = time.monotonic()
        row = {"way": way, **predict(recipe, overrides, cluster)}
        report(model, row, time.monotonic() - began)
        return row

    steps = list(candidates(model, cluster, way))
    *faster, leanest = (step for step in steps if "optim.state_dtype" not in step[1])
    row = attempt(*leanest)
    if not row["fits"]:
        row = attempt(*steps[-1]) if steps[-1] != leanest else row
        return row if row["fits"] else None
    capacity = CAPACITY[cluster.rpartition("x")[2]] / 1e9
    for step in faster if row["memory_gib"] < LEAN * capacity else []:
        if (other := attempt(*step))["fits"]:
            return other
    return row


def with_own_recipe(model: Model, row: Json) -> Json:
    """Return the row of the recipe without overrides, if it is for this row and faster."""
    job = read_job(row["recipe"])[0]
    is_own = (job.model.kind, job.model.preset) == (model.kind, model.preset)
    if not is_own or job.run.cluster != row["cluster"] or row["way"] == "QLoRA":
        return row
    other = {"way": row["way"], **predict(row["recipe"], {}, None)}
    is_faster = other["tokens_per_second"] > row["tokens_per_second"]
    return other if other["fits"] and is_faster else row


def report(model: Model, row: Json, seconds: float) -> None:
    """Print the progress."""
    fits = "fits" if row["fits"] else "does not fit"
    text = f"{row['memory_gib']} GiB {fits}, MFU {row['mfu']}"
    print(
        f"{model.title}: {row['way']} on {row['cluster']}: {text} [{seconds:.0f} s]"
        f" {row['overrides']}",
        flush=True,
    )


def read_results() -> Json:
    """Return the record: versions, the date of each page, and the rows by model."""
    record: Json = {"dates": {}, "rows": {}}
    if RESULTS.exists():
        record = json.loads(RESULTS.read_text("utf-8"))
    return record


# --------------------------------------------------------------------------- the pages

BOUNDS = {
    "compute": "compute",
    "host": "host overhead",
    "bubble": "pipeline bubble",
}


def command_of(row: Json) -> str:
    """Return recipe and overrides of a row as words of a command."""
    return " ".join([row["recipe"], *(f"--{k} {v}" for k, v in row["overrides"].items())])


def describe_cluster(cluster: str) -> str:
    """Return a cluster for people: ``32 x 8 H100``."""
    nodes, devices, device = cluster.split("x", 2)
    device = device.replace("-", " ")
    if int(nodes) * int(devices) == 1:
        return f"1 {device}"
    return f"{devices} {device}" if nodes == "1" else f"{nodes} x {devices} {device}"


def duration(seconds: float) -> str:
    """Return a duration with one unit."""
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * unit:
            return (
                f"{seconds / unit:,.1f} {name}"
                if seconds < 10 * unit
                else (f"{seconds / unit:,.0f} {name}")
            )
    return f"{seconds:.0f} s"


COLUMNS = "GPUs, training, recipe and keys, GiB per GPU, tokens/s, 10 M tokens, MFU, bound by"


def table(rows: list[Json]) -> Iterator[str]:
    """Yield the lines of a model's table."""
    names = COLUMNS.split(", ")
    yield f"| {' | '.join(names)} |"
    yield "|---" * len(names) + "|"
    for row in rows:
        cells = [
            describe_cluster(row["cluster"]),
            row["way"],
            f"`{command_of(row)}`",
            f"{row['memory_gib']}",
            f"{row['tokens_per_second']:,}",
            duration(1e7 / row["tokens_per_second"]),
            f"{row['mfu']:.0%}",
            f"{BOUNDS.get(row['bound'], row['bound'])} {row['share']:.0%}",
        ]
        yield f"| {' | '.join(cells)} |"


def commands(model: Model, rows: list[Json]) -> Iterator[str]:
    """Yield the block of commands of a model, for its smallest row that tunes it."""
    tuning = [row for row in rows if row["way"] != "pre-train"]
    yield "```"
    if not tuning:
        yield from (f"$ weft plan {command_of(row)}" for row in rows)
    for row in tuning[:1]:
        words, run_dir = command_of(row), "runs/" + model.title.lower().replace(" ", "-")
        data = f"--data.path chats.jsonl --run.dir {run_dir}"
        yield f"$ weft plan {words} --cluster {row['cluster']}"
        yield f"$ weft train {words} --model.path {model.directory or model.hub} {data}"
        yield f"$ weft generate {run_dir} --chat --prompt 'What is 2 + 2?'"
        yield f"$ weft export {run_dir} out"
    yield from ("```", "")


def section(model: Model, rows: list[Json]) -> Iterator[str]:
    """Yield the lines of a model."""
    family = FAMILIES[model.kind]
    config: Any = family.presets[model.preset]
    billions = family.num_params(config) / 1e9
    where = f"`{model.hub}`" if model.hub else "Its text model"
    yield from (f"## {model.title}", "")
    yield (
        f'{where}: {billions:.2f} billion parameters, `model.kind = "{model.kind}"`, '
        f'`model.preset = "{model.preset}"`.'
    )
    yield ""
    yield from table(rows)
    yield ""
    yield from commands(model, rows)
    if model.remark:
        yield from (model.remark, "")


HEAD = """# {title}

This page lists GPUs that train {title}, with the command, memory and speed of each. The figures are
predictions of the planner, not measurements. `python benchmarks/model_pages.py` made them on {date}
with weft {weft} and PyTorch {torch}, by a traced step of each row. [The planner](../planner.md)
describes its errors: 25 % of the time on a GPU that was not calibrated, 50 % with experts.

The words of a row work after `weft train`, and after `weft plan` with `--cluster`. These settings
were tried in turn: no recomputation with microbatches of one sequence (on one GPU), selective with
four and one, full with four and one. If the last need more than 60 % of the memory, the others were
not tried; *full* has optimizer states in bfloat16 as a last resort. On the cluster of its recipe, a
model also has the recipe's own settings, if these are faster. Not all rows were computed.

*full* trains all weights, *LoRA* adapters of rank 16, *QLoRA* the same on weights in 4 bits. Tuning
has sequences of 4,096 tokens. *10 M tokens* is the time for so many tokens. `chats.jsonl` has
[conversations](../fine-tuning.md#conversations).

"""


def page(name: str, record: Json) -> str:
    """Return the text of a page."""
    title, models = PAGES[name]
    text = HEAD.format(title=title, date=record["dates"][name], **record)
    lines = [line for model in models for line in section(model, record["rows"][model.title])]
    return text + "\n".join(lines).rstrip() + "\n"


INDEX = """# Models on your GPUs

This page shows which GPUs train each published model, and how. The pages behind the names have the
command, memory and speed. All are predictions of [the planner](../planner.md), made from {first} to
{last} with weft {weft} and PyTorch {torch}; none was measured.

*full*: all weights; *LoRA*: adapters of rank 16; *QLoRA*: the same on weights in 4 bits. Sequences
have 4,096 tokens. An empty cell does not mean that a model needs more GPUs: not all were computed.

"""


def index(record: Json) -> str:
    """Return the text of the page that lists all models."""
    lines = [
        f"| model | {' | '.join(map(describe_cluster, CLUSTERS))} | also planned |",
        "|---" * (2 + len(CLUSTERS)) + "|",
    ]
    for name, (_, models) in PAGES.items():
        for model in models:
            found: set[str] = set()  # what fits on fewer GPUs fits on more
            cells = [f"[{model.title}]({name}.md#{anchor(model.title)})"]
            for cluster in CLUSTERS:
                rows = record["rows"][model.title]
                found |= {row["way"] for row in rows if row["cluster"] == cluster}
                cells.append(", ".join(way for way in WAYS if way in found))
            others = [
                f"{row['way']}: {describe_cluster(row['cluster'])}"
                for row in record["rows"][model.title]
                if row["way"] == "pre-train" or row["cluster"] not in CLUSTERS
            ]
            cells.append(", ".join(others))
            lines.append(f"| {' | '.join(cells)} |")
    names = "\n".join(PAGES)
    toctree = f"```{{toctree}}\n:hidden:\n\n{names}\n```\n"
    dates = sorted(record["dates"].values())
    return (
        INDEX.format(first=dates[0], last=dates[-1], **record) + "\n".join(lines) + f"\n\n{toctree}"
    )


def anchor(title: str) -> str:
    """Return the anchor of a heading, as GitHub and MyST make it."""
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def write_pages() -> None:
    """Write the pages, if all models have rows."""
    record = read_results()
    if missing := [
        m.title for _, ms in PAGES.values() for m in ms if m.title not in record["rows"]
    ]:
        print(f"no pages are written: no rows of {', '.join(missing)}")
        return
    for name in PAGES:
        (PAGES_DIR / f"{name}.md").write_text(page(name, record), "utf-8")
    (PAGES_DIR / "index.md").write_text(index(record), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("pages", nargs="*", default=list(PAGES))
    parser.add_argument("--again", action="store_true", help="repeat models that have rows")
    parser.add_argument("--write", action="store_true", help="only write the pages")
    options = parser.parse_args()
    if not options.write:
        run(options.pages, options.again)
    write_pages()


if __name__ == "__main__":
    main()
