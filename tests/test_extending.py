"""A user's model, optimizer, schedule and tracker, defined in one file that a recipe names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.harness import run_ranks
from tests.small import losses, plan_here, this_rank
from weft.config.reader import read_job
from weft.data.dataset import open_dataset
from weft.planning.model_config import resolve_model
from weft.planning.plan import Machine
from weft.planning.resolve import resolve
from weft.records.run_reader import RunReader
from weft.training.loop import train

LOCAL = """
import torch
from torch import nn
from weft.config.keys import Section, key
from weft.models import Family
from weft.models.family import Init

class Config(Section):
    width: int = key(16, "width of a token's vector")
    vocab_size: int = key(512, "token ids")
    max_seq_len: int = key(64, "longest row")

class Bigram(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.width)
        self.out = nn.Linear(config.width, config.vocab_size, bias=False)

    def forward(self, tokens_BT, documents_BT=None, positions_BT=None):
        return self.out(self.table(tokens_BT))

FAMILY = Family(
    config=Config,
    presets={"small": Config()},
    build=Bigram,
    check=lambda config: [],
    blocks=lambda model: [],
    get_init=lambda name, config: Init("truncated_normal", 0.1),
    has_weight_decay=lambda name: False,
    num_params=lambda config: 2 * config.width * config.vocab_size,
    flops_per_token=lambda config, seq_len: 6.0 * config.width * config.vocab_size,
)

def sgd(groups, optim):
    return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.beta1)

def constant(done, optim):
    return 1.0

class Lines:
    def __init__(self, folder, config, resumed_step):
        self.file = (folder / "lines.txt").open("a")
        print("from", resumed_step, "of", config["train.steps"], file=self.file)

    def write(self, record):
        print(record.step, record.loss, file=self.file)

    def close(self):
        self.file.close()
"""


def train_mine(recipe: str, directory: str, store: str) -> None:
    job, _, errors = read_job(recipe, [("run.dir", directory)])
    assert errors == []
    train(plan_here(job), open_dataset(Path(store)), this_rank(), Console(quiet=True))


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(LOCAL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    path = tmp_path / "mine.toml"
    path.write_text(
        'extends = "demo"\n'
        '[model]\nkind = "mine:FAMILY"\npreset = "small"\nwidth = 24\n'
        '[optim]\nname = "mine:sgd"\nschedule = "mine:constant"\nlr = 5.0\nwarmup_steps = 0\n'
        "[data]\nvocab_size = 512\n"
        "[train]\nsteps = 12\nseq_len = 32\nglobal_batch_size = 8\n"
        '[checkpoint]\ninterval = 4\n[monitor]\nlog_interval = 1\ntrackers = ["mine:Lines"]\n'
    )
    return path


def test_user_family_trains_the_same_on_two_ranks(
    recipe: Path, store_path: Path, tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    run_ranks(train_mine, 1, str(recipe), str(one), str(store_path))
    run_ranks(train_mine, 2, str(recipe), str(two), str(store_path))
    assert losses(one) == pytest.approx(losses(two), abs=1e-5)
    assert losses(one)[-1] < losses(one)[0] - 0.05
    first, *lines = (two / "lines.txt").read_text().splitlines()
    assert first == "from 0 of 12"
    assert [float(line.split()[1]) for line in lines] == losses(two)


def test_user_schedule_is_the_learning_rate(recipe: Path, store_path: Path, tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(
        "def steps(done, optim):\n    return 1.0 if done < 0.5 else 0.1\n"
    )
    text = recipe.read_text().replace('"mine:constant"', '"steps:steps"')
    recipe.write_text(text.replace("lr = 5.0", "lr = 3e-4\nmin_lr_ratio = 0.05"))
    run_ranks(train_mine, 1, str(recipe), str(tmp_path / "run"), str(store_path))
    rates = RunReader(tmp_path / "run").column("lr")
    assert rates == pytest.approx([3e-4] * 5 + [3e-5] * 7, rel=1e-6)


def test_plan_names_keys_that_act_on_user_components(recipe: Path) -> None:
    def warnings(*overrides: tuple[str, str]) -> str:
        job, _, errors = read_job(str(recipe), list(overrides))
        assert errors == []
        return "\n".join(resolve(job, Machine("cpu", 2, world_size=1)).warnings)

    text = warnings(("optim.warmup_steps", "3"))
    assert "only after 3 steps of linear warm-up" in text
    assert "weight_decay=0.1 in its parameter groups and gradients clipped" in text
    text = warnings(("optim.weight_decay", "0"), ("optim.max_grad_norm", "0"))
    assert "mine:" not in text


def test_user_family_mistakes_are_reported_like_those_of_weft(recipe: Path) -> None:
    config, errors = resolve_model("mine:FAMILY", "small", {"widht": 3, "vocab_size": "x"})
    assert config is None
    assert [str(error) for error in errors] == [
        'model.vocab_size="x" must be a whole number. Token ids (default 512).',
        "model.widht=3 is not a known key. Did you mean 'model.width'?",
    ]
