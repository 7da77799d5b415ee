"""The Python interface: ``import weft; weft.train("demo", {"train.steps": 20})``.

Each function does what the command of its name does (`weft.cli`), with Python values for options.
Mistakes raise `InvalidConfig` with every reason; other failures raise another `WeftError`.

``weft`` imports this module at the first use of a function, and functions import torch themselves.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast, overload

from weft.api.child import run_in_child
from weft.api.overrides import encode_overrides
from weft.api.results import Comparison, PlanResult, VerifyResult
from weft.api.runs import HtmlPage, RunHandle
from weft.api.tasks import CompareRequest, TrainRequest, VerifyRequest
from weft.cluster import UNHEALTHY
from weft.cluster.rank_exit import TrainingFailed
from weft.config.errors import ConfigError, ConfigErrors, InvalidConfig, WeftError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from weft.cluster.submit import SubmittedJob
    from weft.tools.generate import Prompt, Sampling
    from weft.tools.text_model import TextModel

__all__ = [
    "Comparison",
    "HtmlPage",
    "InvalidConfig",
    "PlanResult",
    "RunHandle",
    "TrainingFailed",
    "VerifyResult",
    "WeftError",
    "compare",
    "generate",
    "launch",
    "load_model",
    "load_text_model",
    "open_run",
    "plan",
    "train",
    "verify",
]

Overrides = Mapping[str, object]
Conversation = list[dict[str, Any]]  # messages, each with role and content


class GenerateOptions(TypedDict, total=False):
    """Options of `generate`, by name."""

    chat: bool
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    stop: Sequence[str]
    seed: int
    batch: int
    device: str | torch.device | None


def train(
    recipe: str | os.PathLike[str], overrides: Overrides | None = None, *, force: bool = False
) -> RunHandle:
    """Train a model, or resume the run of the same recipe and overrides.

    As ``weft train``, it starts the ranks of this machine, or is one rank of torchrun, Slurm or
    MPI.  It needs no ``__main__`` guard.  Ctrl-C, or the interruption of a notebook's cell, ends
    the run after a checkpoint and then raises KeyboardInterrupt; a second one ends it at once.

    Args:
        recipe: name of a shipped recipe, or path of a TOML file.
        overrides: values by key: ``{"train.steps": 20}``; the same keys as ``weft train --help``.
        force: start even if the plan predicts that memory does not suffice.

    Returns:
        The run: losses, metrics, checkpoints, report, and the reason why it ended.

    Raises:
        InvalidConfig: with every mistake, before anything starts.
        TrainingFailed: if a rank failed; the message has the cause and the path of the log.
    """
    errors = ConfigErrors()
    pairs = encode_overrides(overrides, errors)
    request = TrainRequest(os.fspath(recipe), pairs, list(errors), force)
    run_dir, status = run_in_child("train_recipe", request)
    if status == UNHEALTHY:
        raise TrainingFailed("this node failed its check before the start", status)
    return RunHandle(run_dir)


def plan(
    recipe: str | os.PathLike[str],
    overrides: Overrides | None = None,
    cluster: str | None = None,
) -> PlanResult:
    """Predict memory and step time of a recipe, on any cluster, without a GPU.

    Args:
        recipe: name of a shipped recipe, or path of a TOML file.
        overrides: values by key.
        cluster: ``NODESxDEVICESxNAME``, such as ``64x8xH100``, or ``local``; default:
            ``run.cluster``.

    Returns:
        The plan and its forecast; prints as the page of ``weft plan``.

    Raises:
        InvalidConfig: with every reason why there is no plan.
    """
    from weft.estimate.advice import advise
    from weft.estimate.cost import device_spec
    from weft.estimate.forecast import forecast
    from weft.estimate.forecast_text import render_plan
    from weft.plan.plan_text import plan_recipe
    from weft.tools.adapter_path import adopt_paths
    from weft.train.machine import detect_machine

    errors, name = ConfigErrors(), os.fspath(recipe)
    pairs = encode_overrides(overrides, errors)
    planned, machine = plan_recipe(name, pairs, errors, cluster, detect_machine, adopt=adopt_paths)
    device = device_spec(planned, machine)
    prediction = forecast(planned, machine, device, cached=True)
    advice = [] if device is None else advise(planned, machine, device, prediction, cached=True)
    text = render_plan(planned, machine, name, prediction, advice)
    return PlanResult(planned, prediction, text, name, machine)


def verify(
    recipe: str | os.PathLike[str],
    overrides: Overrides | None = None,
    *,
    ranks: int = 8,
    steps: int = 3,
    resume_layout: Overrides | None = None,
) -> VerifyResult:
    """Verify that a layout computes the same gradients as one process.

    Args:
        recipe: name of a shipped recipe, or path of a TOML file; weft shrinks it to test size.
        overrides: values by key: ``{"parallel.tp": 2}``.
        ranks: maximum number of processes, at least 2.
        steps: optimizer steps.
        resume_layout: keys of a second layout that resumes from a checkpoint of the first.

    Returns:
        ``holds`` and the numbers; prints as the report of ``weft verify``.

    Raises:
        InvalidConfig: with every mistake in the recipe, the overrides and the layout.
        WeftError: if a rank failed.
    """
    from weft.plan.resolve import MAX_CPU_RANKS

    errors = ConfigErrors()
    pairs = encode_overrides(overrides, errors)
    resume = encode_overrides(resume_layout, errors)
    for key, value, low, high in (("ranks", ranks, 2, MAX_CPU_RANKS), ("steps", steps, 1, 1000)):
        if not low <= value <= high:
            errors.add(key, f"must be an integer between {low} and {high}", value=value)
    request = VerifyRequest(os.fspath(recipe), pairs, list(errors), resume, ranks, steps)
    result: VerifyResult = run_in_child("verify_recipe", request)
    return result


def compare(
    recipes: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    overrides: Overrides | None = None,
    *,
    vary: Mapping[str, Sequence[object]] | None = None,
    repeats: int = 3,
    margin: str = "0.5%",
    price: float | None = None,
    out: str | os.PathLike[str] | None = None,
    plan_only: bool = False,
    cluster: str | None = None,
) -> Comparison:
    """Compare variants of a recipe by repeated runs, or by their plans.

    The same call resumes an interrupted comparison, and a higher ``repeats`` adds runs.

    Args:
        recipes: one recipe or several.
        overrides: values by key, for all variants.
        vary: values of a key, one variant each: ``{"optim.lr": [1e-3, 3e-3]}``; every combination
            if there are several keys.
        repeats: runs of each variant.
        margin: largest loss difference that counts as equivalent, in % or nats.
        price: of a device-hour, for the cost of a billion tokens.
        out: directory of the runs; default: ``runs/compare-...``.
        plan_only: compare predictions, run nothing.
        cluster: with ``plan_only``: see `plan`.

    Returns:
        The verdict and all numbers; prints as ``weft compare`` does.

    Raises:
        InvalidConfig: with every mistake in the arguments.
    """
    errors = ConfigErrors()
    pairs = encode_overrides(overrides, errors)
    varied = [
        (key, [text for value in values for _, text in encode_overrides({key: value}, errors)])
        for key, values in (vary or {}).items()
    ]
    if repeats < 1:
        errors.add("repeats", "must be at least 1", value=repeats)
    if cluster and not plan_only:
        rule = "needs plan_only, because runs use this machine"
        errors.add("cluster", rule, "set plan_only=True", value=cluster)
    names = [recipes] if isinstance(recipes, str | os.PathLike) else recipes
    request = CompareRequest(
        recipes=[os.fspath(name) for name in names],
        vary=varied,
        overrides=pairs,
        errors=list(errors),
        repeats=repeats,
        margin=margin,
        price=price,
        out=None if out is None else os.fspath(out),
        plan_only=plan_only,
        cluster=cluster,
    )
    result: Comparison = run_in_child("compare_recipes", request)
    return result


def launch(
    recipe: str | os.PathLike[str], overrides: Overrides | None = None, *, on: str
) -> SubmittedJob:
    """Submit a run to a cluster, as ``weft launch``.

    Args:
        recipe: name of a shipped recipe, or path of a TOML file.
        overrides: values by key, also of the section ``launch``.
        on: kind of cluster: slurm, kubernetes, sagemaker or skypilot.

    Returns:
        The job, with the methods ``status``, ``is_active``, ``logs`` and ``cancel``.  ``weft job``
        has the same for the run directory on this machine, which keeps the job's id.

    Raises:
        InvalidConfig: with every mistake, before anything is submitted.
        WeftError: if the cluster refuses the job.
    """
    from weft.cluster.launch_warnings import print_warnings
    from weft.cluster.submit import build_request, check_text, get_cluster, submit
    from weft.train.machine import detect_machine

    errors = ConfigErrors()
    pairs = encode_overrides(overrides, errors)
    request = build_request(on, os.fspath(recipe), pairs, errors, detect_machine)
    text = get_cluster(on).render(request)
    print_warnings(on, request)
    check_text(on, text)
    return submit(on, request, text)


def load_model(
    path: RunHandle | str | os.PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> nn.Module:
    """Load a model as a plain PyTorch module.

    Args:
        path: a run or its directory, for its newest checkpoint; the directory of a checkpoint; a
            Hugging Face directory, which may be ``s3://bucket/model``; or ``org/name`` on the Hub.
        dtype: of the parameters, such as ``bfloat16``; default: float32.
        device: such as ``cpu`` or ``cuda:1``; default: a GPU if there is one.

    Returns:
        The module in evaluation mode: token ids ``[B, T]`` to logits ``[B, T, V]``.

    Raises:
        InvalidConfig: if there is no model, or weft does not support it.
    """
    import torch

    from weft.tools.load_module import load_module

    errors = ConfigErrors()
    parsed = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if parsed is not None and not (isinstance(parsed, torch.dtype) and parsed.is_floating_point):
        parsed = None
    if parsed is None and dtype is not None:
        errors.add("dtype", "is not a floating dtype", "use float32 or bfloat16", value=str(dtype))
    errors.raise_any()
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    location = path.path if isinstance(path, RunHandle) else path
    return load_module(os.fspath(location), parsed, torch.device(chosen))


def load_text_model(
    run: RunHandle | str | os.PathLike[str],
    device: str | torch.device | None = None,
    *,
    chat_template: str | os.PathLike[str] = "auto",
) -> TextModel:
    """Load a trained model with its tokenizer and chat template, to generate texts.

    Args:
        run: a run or its directory, for its newest checkpoint; or the directory of a checkpoint.
        device: such as ``cpu`` or ``cuda:1``; default: a GPU if there is one.
        chat_template: path of a chat template; auto: the run's.

    Returns:
        The model: ``model.module`` is the PyTorch module, ``model.stream(prompt)`` yields text.

    Raises:
        InvalidConfig: if there is no checkpoint, or no such template.
    """
    import torch

    from weft.tools.text_model import load_text_model

    path = run.path if isinstance(run, RunHandle) else Path(run)
    chosen = None if device is None else torch.device(device)
    return load_text_model(path, chosen, os.fspath(chat_template))


@overload
def generate(
    model: TextModel | RunHandle | str | os.PathLike[str],
    prompt: str | Conversation = "",
    **options: Unpack[GenerateOptions],
) -> str: ...
@overload
def generate(
    model: TextModel | RunHandle | str | os.PathLike[str],
    prompt: list[str],
    **options: Unpack[GenerateOptions],
) -> list[str]: ...


def generate(
    model: TextModel | RunHandle | str | os.PathLike[str],
    prompt: str | Conversation | list[str] = "",
    *,
    chat: bool = False,
    max_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 50,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: Sequence[str] = (),
    seed: int = 0,
    batch: int = 8,
    device: str | torch.device | None = None,
) -> str | list[str]:
    """Continue a text, or answer a conversation.

    Args:
        model: a model of `load_text_model`, which several calls can share; or what that takes.
        prompt: a text, a list of texts, or the messages of a conversation:
            ``[{"role": "user", "content": "What is 2 + 2?"}]``.
        chat: format each text as the message of a user.
        max_tokens: maximum new tokens.
        temperature: of sampling; 0: greedy.
        top_k: sample from the k most likely tokens; 0: off.
        top_p: nucleus sampling; 1: off.
        min_p: minimum probability relative to the most likely token; 0: off.
        repetition_penalty: 1: off.
        stop: texts that end the answer and are not part of it.
        seed: of the first prompt; each further prompt has the next one.
        batch: prompts at a time.
        device: see `load_text_model`; for a loaded model it must be None.

    Returns:
        The new text, without the prompt; a list for a list of prompts.

    Raises:
        InvalidConfig: if there is no checkpoint or no chat template, or an option is invalid.
    """
    from weft.tools.generate import Sampling
    from weft.tools.text_model import TextModel

    sampling = Sampling(
        max_tokens=max_tokens,
        repetition_penalty=repetition_penalty,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        seed=seed,
    )
    check_sampling(sampling, batch)
    if isinstance(model, TextModel):
        if device is not None:
            rule, remedy = "is for a run that is not loaded yet", "give it to load_text_model"
            raise InvalidConfig([ConfigError("device", str(device), rule, remedy)])
    else:
        model = load_text_model(model, device)
    is_list = isinstance(prompt, list) and all(isinstance(text, str) for text in prompt)
    is_conversation = isinstance(prompt, list) and not is_list
    prompts = cast("list[Prompt]", prompt if is_list else [prompt])
    results = model.complete(prompts, sampling, chat or is_conversation, batch)
    texts = [result.text for result in results]
    return texts if is_list else texts[0]


def check_sampling(sampling: Sampling, batch: int) -> None:
    """Check the options of `generate`.

    Raises:
        InvalidConfig: with every option that is invalid.
    """
    errors = ConfigErrors()
    numbers = {k: v for k, v in vars(sampling).items() if isinstance(v, int | float)}
    for name, value in numbers.items():
        if not 0 <= value < float("inf"):
            errors.add(name, "is not a number of at least 0", value=value)
    if batch < 1:
        errors.add("batch", "is not a number of at least 1", value=batch)
    for error in sampling.errors():
        name = error.key.removeprefix("--").replace("-", "_")
        errors.add(name, error.rule, error.remedy, value=error.value)
    errors.raise_any()


def open_run(run_dir: str | os.PathLike[str]) -> RunHandle:
    """Open a run directory: metrics, events, job, plan, checkpoints, report.

    Args:
        run_dir: the run directory; the run may be training.

    Raises:
        InvalidConfig: if it is not a run directory.
    """
    return RunHandle(run_dir)
