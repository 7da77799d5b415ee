"""Chat templates in the harness: requests and scores equal its ``hf`` model of the export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conversion.test_tuned_chats import write_model
from tests.inference.test_multiple_choice import TASK, make_instance
from weft.cli.main import main
from weft.data.chat_rows import InvalidConversation

pytest.importorskip("lm_eval")

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " what is it? "},
    {"role": "assistant", "content": "it is what it is"},
    {"role": "user", "content": "and there?"},
]


@pytest.fixture(scope="module", params=["qwen3", "llama3", "gemma"])
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Return weft's model of an imported run, and the harness's of its export."""
    from lm_eval.models.huggingface import HFLM

    from weft.inference.lm_eval_model import WeftLM

    home = tmp_path_factory.mktemp("chat")
    write_model(request.param, home / "model")
    assert main(["import", str(home / "model"), str(home / "run")]) == 0
    assert main(["export", str(home / "run"), str(home / "out"), "--dtype", "float32"]) == 0
    hf = HFLM(pretrained=str(home / "out"), device="cpu", dtype="float32", batch_size=4)
    return WeftLM(str(home / "run"), device="cpu", batch_size=3), hf


@pytest.mark.slow
def test_rendered_chats_equal_those_of_transformers(pair: tuple[Any, Any]) -> None:
    ours, theirs = pair
    for chat in (CHAT[1:], CHAT, CHAT[1:2]):
        assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat)
        text = ours.apply_chat_template(chat)
        assert ours.tok_encode(text) == theirs.tok_encode(text)
    for end in ("it is", "it is ", " so "):
        continued = [*CHAT[1:], {"role": "assistant", "content": end}]
        assert ours.apply_chat_template(continued, False) == theirs.apply_chat_template(
            continued, False
        )
    assert ours.chat_template(True) == theirs.chat_template(True)
    assert ours.tokenizer_name


@pytest.mark.slow
@pytest.mark.parametrize("fewshot", [0, 2])
def test_chat_scores_equal_those_of_the_export(
    pair: tuple[Any, Any], fewshot: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As lm_eval --apply_chat_template --fewshot_as_multiturn --system_instruction."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    for name in ("HF_HOME", "HF_DATASETS_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rows = [
        {
            "begin": f"what is {n}?",
            "first": "it",
            "second": "that",
            "third": f"is {n}",
            "answer": n % 3,
        }
        for n in range(8)
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "task.yaml").write_text(TASK.replace("FILE", str(data)))
    reports = []
    for model in pair:
        tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
        report = lm_eval.simple_evaluate(
            model=model,
            tasks=["continue_it"],
            task_manager=tasks,
            num_fewshot=fewshot,
            apply_chat_template=True,
            fewshot_as_multiturn=bool(fewshot),
            system_instruction="Be brief.",
            bootstrap_iters=0,
            log_samples=True,
        )
        assert report is not None
        reports.append(report["samples"]["continue_it"])
    requests = [[sample["arguments"] for sample in samples] for samples in reports]
    assert requests[0] == requests[1]
    scores = [torch.tensor([[r[0][0] for r in s["resps"]] for s in samples]) for samples in reports]
    torch.testing.assert_close(scores[0], scores[1], atol=1e-3, rtol=1e-4)
    text = pair[0].apply_chat_template(CHAT[1:2])
    options = {"until": ["zz"], "max_gen_toks": 12, "do_sample": False}
    requests = [make_instance("generate_until", text, options)]
    theirs = [answer.rstrip("\ufffd") for answer in pair[1].generate_until(requests)]
    assert pair[0].generate_until(requests) == theirs


def test_run_without_a_template_is_refused(store_path: Path, tmp_path: Path) -> None:
    from tests.random_runs import random_run
    from weft.config.errors import InvalidConfig
    from weft.inference.lm_eval_model import WeftLM

    lm = WeftLM(str(random_run(tmp_path / "run", store_path)), device="cpu")
    with pytest.raises(InvalidConfig, match=r"data\.chat_template"):
        lm.apply_chat_template(CHAT)
    assert lm.chat_template(False) is None


@pytest.mark.slow
def test_template_that_rejects_a_system_message_gets_none(tmp_path: Path) -> None:
    from weft.inference.lm_eval_model import WeftLM

    write_model("gemma", tmp_path / "model")
    assert main(["import", str(tmp_path / "model"), str(tmp_path / "run")]) == 0
    lm = WeftLM(str(tmp_path / "run"), device="cpu")
    assert lm.apply_chat_template(CHAT[:2]) == lm.apply_chat_template(CHAT[1:2])
    with pytest.raises(InvalidConversation):
        lm.apply_chat_template([CHAT[1], CHAT[3]])
