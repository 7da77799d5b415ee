"""Every remedy is followed: the next attempt does not fail on that advice.

`tests.remedies` reads what a remedy proposes and makes the change.  The fast part follows one error
of many rules, and all of a few hundred random jobs; the slow part draws thousands.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.harness import run_ranks
from tests.job_space import candidate_values
from tests.planning.test_plan_warnings import CASES
from tests.remedies import (
    Change,
    Follower,
    Overrides,
    apply_change,
    plan_errors,
    proposed_changes,
    random_overrides,
    record_sites,
)
from tests.small import SMALL, small_job, train_rank
from weft.cli.main import main
from weft.config.errors import ConfigError, InvalidConfig
from weft.config.files import write_json
from weft.config.reader import read_job
from weft.config.writer import to_toml
from weft.estimate.cost import device_spec
from weft.estimate.forecast import forecast
from weft.estimate.memory_check import memory_error
from weft.models import FAMILIES
from weft.models.hf_mapping import get_hf_mapping, param_shapes, to_hf_config
from weft.planning.model_config import resolve_section
from weft.planning.needs import key_facts, list_keys
from weft.planning.plan import Machine
from weft.planning.resolve import resolve_nodes
from weft.preparation.job_checks import prepare_job
from weft.submission.submit import build_request, check_text, get_cluster

MACHINES = {
    "cpu": Machine("cpu", devices=8, memory_bytes=64 << 30),
    "node": Machine(
        "cuda",
        devices=8,
        device_name="H100",
        memory_bytes=80 << 30,
        peer_access=True,
        capability=(9, 0),
    ),
    "launched": Machine(
        "cuda", devices=8, memory_bytes=80 << 30, world_size=16, local_world_size=8
    ),
}
OWN_MODEL = ("demo", "moe-demo", "llama3-8b", "llama3-70b", "qwen3-30b-a3b")
ANY_MODEL = ("pretrain", "chat", "dpo", "lora", "qlora", "reward")
LAYOUT_KEYS = ("tp", "pp", "cp", "ep", "dp_shard", "dp_replicate")


def write_model(directory: Path, tokenizer: Path, **fields: object) -> Path:
    """Write a Hugging Face directory of random weights."""
    family = FAMILIES["llama"]
    directory.mkdir()
    overrides = [(f"model.{name}", str(value)) for name, value in fields.items()]
    config, _ = resolve_section(small_job(("model.tied_embeddings", "false"), *overrides).model)
    torch.manual_seed(7)
    hf_name = get_hf_mapping(family).hf_name
    tensors = {
        hf_name(name): 0.05 * torch.randn(shape)
        for name, shape in param_shapes(family, config).items()
    }
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    write_json(directory / "config.json", to_hf_config(family, config, "float32"))
    shutil.copy(tokenizer, directory / "tokenizer.json")
    return directory


@pytest.fixture
def model(store_path: Path, tmp_path: Path) -> Path:
    return write_model(tmp_path / "Tiny", store_path / "tokenizer.json")


def follow_random(seed: int, seconds: float, jobs: int, model: Path) -> Follower:
    """Follow the remedies of random jobs, for at most ``seconds``."""
    rng, follower = random.Random(seed), Follower(lambda recipe, overrides: [])
    end = time.monotonic() + seconds
    for _ in range(jobs):
        if time.monotonic() > end:
            break
        machine = MACHINES[rng.choice(list(MACHINES))]

        def attempt(
            recipe: str, overrides: Overrides, machine: Machine = machine
        ) -> list[ConfigError]:
            is_cpu = ("run.device", "cpu") in overrides
            return plan_errors(recipe, overrides, MACHINES["cpu"] if is_cpu else machine)

        follower.attempt = attempt
        recipe = rng.choice([*OWN_MODEL, *OWN_MODEL, *ANY_MODEL])
        overrides = random_overrides(rng, rng.choice([1, 1, 2, 2, 3, 4]))
        if rng.random() < 0.5:
            key = rng.choice([*(f"parallel.{name}" for name in LAYOUT_KEYS), "run.nproc_per_node"])
            overrides = apply_change(overrides, {key: rng.choice("1234568")})
        if recipe in ANY_MODEL:
            overrides = apply_change(overrides, {"model.path": str(model), "train.epochs": None})
        follower.provoke(recipe, overrides)
    return follower


def test_remedies_of_random_jobs_are_followed(model: Path) -> None:
    follower = follow_random(seed=5, seconds=20, jobs=150, model=model)
    assert not follower.failed, "\n".join(follower.failed.values())
    assert follower.followed > 50


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_remedies_of_many_random_jobs_are_followed(seed: int, model: Path) -> None:
    sites: set[tuple[str, int]] = set()
    with contextmanager(record_sites)(sites):
        follower = follow_random(seed, seconds=90, jobs=10_000, model=model)
    assert not follower.failed, "\n".join(follower.failed.values())
    assert follower.followed > 300
    assert len(sites) > 60


# Overrides with other warnings than those of keys without effect.
SMALL_FLOAT8 = "precision.float8_small=true precision.float8"
ASYNC_TP = f"parallel.tp=2 parallel.async_tp=true compile.enable=true {SMALL_FLOAT8}"
WARNED = f"""
train.steps=10 optim.warmup_steps=20
train.steps=10 optim.warmup_steps=10
train.microbatch_size=32
parallel.pp=2 train.microbatch_size=32 pipeline.schedule=GPipe
parallel.pp=2 pipeline.schedule=InterleavedZeroBubble train.world_size_invariant=true
activation_checkpoint.offload=true activation_checkpoint.offload_prefetch=5
activation_checkpoint.offload=true model.num_layers=1
model.kind=moe model.preset=toy-moe parallel.ep=2 parallel.ep_dispatch=padded
model.kind=mixtral model.preset=toy model.balance_rate=0.01
lora.rank=4 {SMALL_FLOAT8}=rowwise_with_gw_hp
lora.rank=4 model.kind=moe model.preset=toy-moe model.balance_rate=0.01
model.kind=moe model.preset=toy-moe precision.float8=rowwise
parallel.pp=2 pipeline.schedule=InterleavedZeroBubble {SMALL_FLOAT8}=rowwise
""".strip().splitlines()
WARNED_ON_GPUS = f"""
run.nodes=2 run.rendezvous=h:1 parallel.tp=16 model.num_heads=16 model.num_kv_heads=16
run.nproc_per_node=8 {SMALL_FLOAT8}=rowwise
{ASYNC_TP}=rowwise
{ASYNC_TP}=tensorwise precision.float8_exclude=*.q_proj
""".strip().splitlines()


def follow_warnings(recipe: str) -> Follower:
    """Follow the remedies of every warning; report those of them that lead to any error."""
    cases = [(f"{idle} {key}", machine) for key, idle, machine, *_ in CASES]
    cases += [(text, 2 if "pp=2" in text or "ep=2" in text else 1) for text in WARNED]
    cases += [(text, MACHINES["node"]) for text in WARNED_ON_GPUS]
    follower = Follower(lambda recipe, overrides: [], any_key=True)
    for text, machine in cases:
        given = {"train.steps": "1000", "train.global_batch_size": "16"}
        given |= dict(word.partition("=")[::2] for word in text.split())
        if isinstance(machine, int):
            given["run.nproc_per_node"] = str(machine)
            used = MACHINES["cpu"]
        elif machine.world_size == 1:
            given["run.nproc_per_node"] = "1"
            used = MACHINES["node"]
        else:
            used = machine

        def attempt(
            recipe: str, overrides: Overrides, machine: Machine = used
        ) -> list[ConfigError]:
            return plan_errors(recipe, overrides, machine, with_warnings=True)

        follower.attempt = attempt
        follower.provoke(recipe, tuple(given.items()))
    return follower


@pytest.mark.parametrize("recipe", ["demo", pytest.param("moe-demo", marks=pytest.mark.slow)])
def test_remedies_of_warnings_are_followed(recipe: str) -> None:
    follower = follow_warnings(recipe)
    assert not follower.failed, "\n".join(follower.failed.values())
    assert follower.followed > 80


@pytest.mark.parametrize(
    ("remedy", "changes"),
    [
        ("use 6 or 9, or run.nproc_per_node=1 or 2", [6, 9, "run.nproc_per_node=1", "=2"]),
        ("use at most 64, or --model.max_seq_len 256", [64, "model.max_seq_len=256"]),
        ("use 1, 2, 4, 5, ..., 32, 40 or 50", [1, 2, 4, 5, 32, 40, 50]),
        (
            "use compile.enable=true, or activation_checkpoint.mode=full",
            ["compile.enable=true", "activation_checkpoint.mode=full"],
        ),
        ("remove it", [None]),
        ("set model.num_experts, or leave it out", [None]),
        ("use parallel.tp above 1", []),
        ("give more text", []),
    ],
)
def test_proposed_changes_are_read(remedy: str, changes: list[object]) -> None:
    expected: list[Change] = []
    for change in changes:
        key, equals, value = str(change).partition("=")
        if equals:
            name = key or next(iter(expected[-1]))
            expected.append({name: value})
        else:
            expected.append({"train.x_y": None if change is None else str(change)})
    assert proposed_changes(ConfigError("train.x_y", 5, "is wrong", remedy)) == expected


# --------------------------------------------------------------------------- clusters

SLURM, KUBERNETES = "launch.time_limit=12:00:00", "launch.image=i launch.mounts./runs=pvc:c"
SAGEMAKER = (
    "launch.image=123456789012.dkr.ecr.us-east-1.amazonaws.com/weft:1 launch.bucket=s3://abc "
    "launch.role=arn:aws:iam::123456789012:role/r launch.instance_type=ml.c5.xlarge"
)
SKYPILOT = "launch.image=i launch.bucket=s3://abc"
VPC = "launch.subnets=subnet-1a launch.security_groups=sg-1a"
FSX = "launch.mounts./fsx=fsx:fs-0123456789abcdef0:/x"
# What a cluster refuses.
REFUSED_LAUNCHES = {
    "slurm": [
        *("launch.time_limit=1:00", "launch.time_limit=0:00:00", "launch.topology=near"),
        *("launch.queue=a launch.options.partition=b", "launch.cpus=many", "launch.memory=1TB"),
        *(f"launch.options.{name}=3" for name in ("nodes", "ntasks", "time", "array", "Part", "x")),
        *("launch.secrets.A=hf_x", "launch.secrets.A=k8s-secret:a/b", "launch.env.1A=x"),
    ],
    "kubernetes": [
        *("", f"{KUBERNETES} launch.network=efa", f"{KUBERNETES} launch.role=A_b"),
        *(f"{KUBERNETES} run.dir=runs/{name}" for name in ("My_Run", "9run", "a_" * 40)),
        *(f"{KUBERNETES} launch.options.{each}" for each in ("role=a", "clam=x", "foo=1")),
        *(f"{KUBERNETES} data.path={each}" for each in ("/fsx/web", "/a")),
        *(f"{KUBERNETES} launch.mounts./data={each}" for each in ("a", "pvc:A_", "s3://abc")),
        *(f"{KUBERNETES} launch.secrets.A={each}" for each in ("x", "env:A", "k8s-secret:a")),
        *(f"{KUBERNETES} launch.topology={each}" for each in ("near", "required:a")),
        f"{KUBERNETES} launch.patch=no-file.yaml",
    ],
    "sagemaker": [
        *("", f"{SAGEMAKER} run.nodes=1:2", f"{SAGEMAKER} launch.time_limit=30-00:00:00"),
        f"{SAGEMAKER} run.dir=runs/My_Run",
        f"{SAGEMAKER} data.path=/fsx/data",
        f"{SAGEMAKER} data.path=/fsx/data {FSX}",
        f"{SAGEMAKER} launch.instance_type=ml.c5.xlarge+ml.m5.large launch.spot=true",
        *(
            f"{SAGEMAKER} launch.{each}"
            for each in (
                *("instance_type=ml.c5.xlarg", "instance_type=ml.c5.xlarge+ml.c5.xlarge"),
                *(
                    "instance_type=c5",
                    "options.retries=31",
                    "options.role=arn:aws:iam::123456789012:role/r",
                ),
                *("subnets=subnet-1a", "security_groups=sg-1a", "subnets=a", "region=mars"),
                *("reservation=x", "role=me", "bucket=abc", "bucket=s3://A", "secrets.A=env:A"),
                *("mounts./fsx=fsx:fs-1:/a", "mounts./efs=efs:x", f"mounts./e=efs:fs-01 {VPC}"),
                *("mounts./fsx=pvc:fsx", "mounts./=image", "mounts.fsx=image"),
            )
        ),
    ],
    "skypilot": [
        *("", f"{SKYPILOT} run.nodes=1:2", f"{SKYPILOT} run.dir=runs/My_Run"),
        *(
            f"{SKYPILOT} launch.{each}"
            for each in ("bucket=x", "options.a=1", "cpus=a", "memory=big", "secrets.A=env:B")
        ),
    ],
    "slum": [""],
}
EXAMPLES = {
    "launch.image": "i",
    "launch.setup": "pip install weft",
    "launch.queue": "q",
    "launch.mounts./runs": "pvc:c",
    "launch.role": "arn:aws:iam::123456789012:role/r",
    "launch.instance_type": "ml.c5.xlarge",
    "launch.bucket": "s3://abc",
    "launch.subnets": "subnet-1a",
    "launch.security_groups": "sg-1a",
}


def launch_errors(on: str, overrides: Overrides) -> list[ConfigError]:
    given = [("run.device", "cpu"), *overrides]
    try:
        request = build_request(on, "demo", given, (), lambda _: Machine("cpu", 2))
        check_text(on, get_cluster(on).render(request))
    except InvalidConfig as invalid:
        return invalid.errors
    return []


def test_remedies_of_launches_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    follower = Follower(launch_errors)
    for on, cases in REFUSED_LAUNCHES.items():
        examples = EXAMPLES | {"launch.role": "sa"} if on == "kubernetes" else EXAMPLES
        mount = {"kubernetes": "pvc:c", "skypilot": "s3://abc"}.get(on, "image")
        # A path that no mount has: its first directory.
        follower.examples = examples | {f"launch.mounts.{d}": mount for d in ("/fsx", "/a")}
        for case in cases:
            words = tuple(word.partition("=")[::2] for word in case.split())
            assert follower.provoke(on, words), case
    assert not follower.failed, "\n".join(follower.failed.values())
    assert follower.followed > 50


# --------------------------------------------------------------------------- memory

TOO_LARGE = [
    ("demo", "train.microbatch_size=32", 2.0),
    ("demo", "", 1.0),
    ("demo", "lora.rank=4", 1.0),
    ("demo", "optim.name=muon", 1.0),
    ("demo", "parallel.pp=2 model.num_layers=4", 1.0),
    ("moe-demo", "train.microbatch_size=32", 2.0),
]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "text", "gib"), TOO_LARGE)
def test_remedies_of_too_little_memory_are_followed(recipe: str, text: str, gib: float) -> None:
    """Each is accepted, and lowers the predicted memory until the run fits."""
    machine = Machine("cpu", devices=8, memory_bytes=int(gib * 2**30))
    needed: list[int] = []

    def attempt(recipe: str, overrides: Overrides) -> list[ConfigError]:
        job, base, errors = read_job(recipe, overrides)
        try:
            errors.raise_any()
            plan = resolve_nodes(job, machine, recipe, base)
        except InvalidConfig as invalid:
            return invalid.errors
        prediction = forecast(plan, machine, device_spec(plan, machine))
        needed.append(prediction.needed_bytes)
        return [] if prediction.fits else [memory_error(plan, machine, prediction)]

    follower = Follower(attempt, any_key=True)
    given = f"run.nproc_per_node=2 train.global_batch_size=64 {text}"
    errors = follower.provoke(recipe, tuple(word.partition("=")[::2] for word in given.split()))
    assert [error.key for error in errors] == ["memory"]
    assert not follower.failed, "\n".join(follower.failed.values())
    assert follower.followed
    assert max(needed[1:]) < needed[0]


# --------------------------------------------------------------------------- resume

FIXED_KEYS = [
    key
    for key in list_keys()
    if (key_facts(key).on_resume in ("fixed", "weights") or key.startswith("train."))
    # These need other data or several keys, or name another model.
    and key not in ("data.format", "train.objective", "model.path", "model.kind", "model.kv_rank")
    and candidate_values(key)
]
CHANGED = [
    *(((key, value),) for key in FIXED_KEYS for value in candidate_values(key)[:1]),
    (("model.kind", "moe"), ("model.preset", "toy-moe")),
    (("optim.groups", '[{params=["*q_proj*"],lr_mult=2.0}]'),),
    (("checkpoint.dir", "elsewhere"),),
]


def follow_resumes(run: Path, store: Path, changes: list[Overrides]) -> Follower:
    """Follow the remedies of a run that is resumed with changed keys."""
    paths = ("run.dir", str(run)), ("data.path", str(store)), ("run.nproc_per_node", "1")
    train = [*SMALL, ("checkpoint.interval", "2"), ("train.steps", "3"), *paths]
    run_ranks(train_rank, 1, train, str(store))
    job = small_job(*train)
    (run / "job.toml").write_text(to_toml(job, "demo", job))

    def attempt(recipe: str, overrides: Overrides) -> list[ConfigError]:
        try:
            prepare_job(recipe, list({**dict(train), **dict(overrides)}.items()))
        except InvalidConfig as invalid:
            return invalid.errors
        return []

    assert attempt("demo", ()) == []
    follower = Follower(attempt, any_key=True, examples={"run.dir": str(run.parent / "other")})
    for overrides in changes:
        follower.provoke("demo", overrides)
    return follower


def test_remedies_of_a_resume_with_a_changed_key_are_followed(
    tmp_path: Path, store_path: Path
) -> None:
    follower = follow_resumes(tmp_path / "run", store_path, CHANGED[::12] + CHANGED[-3:])
    assert not follower.failed, "\n".join(follower.failed.values())
    assert follower.followed > 8


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize("damage", ["tokenizer changed", "tokenizer missing", "all checkpoints"])
def test_commands_of_a_refused_run_directory_are_followed(
    damage: str, tmp_path: Path, store_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The commands in the message are run as they are; then the refused command works."""
    run = tmp_path / "run"
    keys = [*SMALL, ("train.steps", "4"), ("checkpoint.interval", "2"), ("run.dir", str(run))]
    keys += [("run.nproc_per_node", "1"), ("data.path", str(store_path))]
    train = ["train", "demo", *(word for key, value in keys for word in (f"--{key}", value))]
    assert main(train) == 0
    refused = train
    if damage == "all checkpoints":
        for manifest in run.glob("checkpoints/step-*/manifest.json"):
            manifest.write_text("{")
    else:
        refused = ["generate", str(run), "hello", "--max-tokens", "2"]
        tokenizer = run / "tokenizer.json"
        tokenizer.unlink() if damage == "tokenizer missing" else tokenizer.write_text("{}")
    capfd.readouterr()
    assert main(refused) != 0
    message = capfd.readouterr().err
    if "delete it, and" in message:
        (run / "tokenizer.json").unlink()
    commands = re.findall(rf"weft ((?:train|rollback) {re.escape(str(run))}(?: \d+)?)", message)
    assert len(set(commands)) == 1, message
    assert main(commands[0].split()) == 0
    assert main(refused) == 0


@pytest.mark.slow
def test_remedies_of_a_resume_with_any_changed_key_are_followed(
    tmp_path: Path, store_path: Path
) -> None:
    follower = follow_resumes(tmp_path / "run", store_path, CHANGED)
    assert not follower.failed, "\n".join(follower.failed.values())
    assert follower.followed > 80


# --------------------------------------------------------------------------- model.path


def start_errors(*overrides: tuple[str, str]) -> list[ConfigError]:
    try:
        prepare_job("pretrain", list(overrides))
    except InvalidConfig as invalid:
        return invalid.errors
    return []


def given(model: Path, tmp_path: Path, *more: tuple[str, str]) -> Overrides:
    (tmp_path / "text.txt").write_text("one two three. " * 2000)
    paths = ("data.path", str(tmp_path / "text.txt")), ("run.dir", str(tmp_path / "run"))
    return (("model.path", str(model)), *paths, ("run.nproc_per_node", "1"), *more)


def test_model_path_longer_context_is_accepted_as_its_remedy_says(
    model: Path, tmp_path: Path
) -> None:
    overrides = given(model, tmp_path, ("train.seq_len", "128"))
    [error] = start_errors(*overrides)
    assert str(error) == (
        "train.seq_len=128 exceeds max_seq_len=64 of Tiny. Use at most 64, or "
        "--model.max_seq_len 128."
    )
    assert start_errors(*overrides, ("model.max_seq_len", "128")) == []
    assert start_errors(*given(model, tmp_path, ("train.seq_len", "64"))) == []


def test_model_path_of_a_recipe_is_kept_beside_a_longer_context(
    model: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(f'extends = "pretrain"\n[model]\npath = "{model}"\n')
    job, _, errors = read_job(
        str(recipe), [("model.max_seq_len", "128"), ("model.mtp_layers", "0")]
    )
    assert not errors
    assert job.model.path == str(model)


def test_model_path_larger_tokenizers_are_accepted(model: Path, tmp_path: Path) -> None:
    """The model grows: see tests/conversion/test_vocabulary_growth.py."""
    small = write_model(tmp_path / "Small", model / "tokenizer.json", vocab_size=256)
    assert start_errors(*given(small, tmp_path)) == []
    larger = json.loads((model / "tokenizer.json").read_text())
    vocab = larger["model"]["vocab"]
    vocab |= {f"word-{i}": len(vocab) + i for i in range(300)}
    (tmp_path / "larger.json").write_text(json.dumps(larger))
    assert (
        start_errors(*given(model, tmp_path, ("data.tokenizer", f"{tmp_path}/larger.json"))) == []
    )


def test_model_path_other_sizes_are_refused_and_removing_them_works(
    model: Path, tmp_path: Path
) -> None:
    more = ("model.dim", "64"), ("model.vocab_size", "1024"), ("model.rope_theta", "1e6")
    errors = start_errors(*given(model, tmp_path, *more))
    assert [error.key for error in errors] == ["model.dim"]
    assert errors[0].remedy.startswith("remove it")
    assert start_errors(*given(model, tmp_path, *more[1:])) == []


def test_model_path_scaling_that_the_family_lacks_is_refused(tmp_path: Path, model: Path) -> None:
    more = ("model.rope_scaling", "dynamic"), ("model.rope_original_context", "32")
    errors = start_errors(*given(model, tmp_path, *more))
    assert {error.key for error in errors} == {f"{name}" for name, _ in more}
    assert all(error.remedy == "remove it" for error in errors)


@pytest.mark.slow
@pytest.mark.parametrize(
    "positions",
    [
        {"max_seq_len": "128"},
        {"max_seq_len": "128", "rope_theta": "1000000"},
        {
            "max_seq_len": "128",
            "rope_scaling": "yarn",
            "rope_factor": "2",
            "rope_original_context": "64",
        },
        {"max_seq_len": "128", "rope_scaling": "linear", "rope_factor": "2"},
    ],
)
def test_model_path_longer_context_trains_and_exports_as_transformers_reads(
    positions: dict[str, str], model: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    more = [(f"model.{name}", value) for name, value in positions.items()]
    overrides = given(
        model,
        tmp_path,
        *more,
        ("train.seq_len", "128"),
        ("train.epochs", "0"),
        ("train.steps", "2"),
        ("train.global_batch_size", "4"),
        ("monitor.report", "false"),
    )
    words = [word for key, value in overrides for word in (f"--{key}", value)]
    assert main(["train", "pretrain", *words]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["max_position_embeddings"] == 128
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    from weft.api import load_model

    ours = load_model(tmp_path / "run", device="cpu")
    tokens = torch.randint(0, 256, (2, 128), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)
