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

from weft.api.arguments import (
    MAX_COUNT,
    argument_names,
    read_device,
    read_flag,
    read_integer,
    read_number,
    read_optional,
    read_path,
    read_paths,
    read_step,
    read_text,
    read_texts,
    show_value,
)
from weft.api.child import run_in_child
from weft.api.overrides import encode_overrides
from weft.api.results import Comparison, PlanResult, VerifyResult
from weft.api.runs import HtmlPage, RunHandle
from weft.api.tasks import CompareRequest, TrainRequest, VerifyRequest
from weft.config.errors import ConfigErrors, InvalidConfig, WeftError
from weft.config.exit_statuses import UNHEALTHY
from weft.config.formatting import to_python
from weft.supervision.rank_exit import TrainingFailed

if TYPE_CHECKING:
    import torch
    from torch import nn

    from weft.inference.generate import Prompt
    from weft.inference.text_model import TextModel
    from weft.submission.submit import SubmittedJob

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


@argument_names()
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
    name = read_path("recipe", recipe, errors)
    is_forced = read_flag("force", force, errors)
    errors.raise_any("recipe")
    pairs = encode_overrides(overrides, errors)
    request = TrainRequest(name, pairs, list(errors), is_forced)
    run_dir, status = run_in_child("train_recipe", request)
    if status == UNHEALTHY:
        raise TrainingFailed("this node failed its check before the start", status)
    return RunHandle(run_dir)


@argument_names()
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
    from weft.conversion.adapter_path import adopt_paths
    from weft.estimate.advice import advise
    from weft.estimate.cost import device_spec
    from weft.estimate.forecast import forecast
    from weft.estimate.forecast_text import render_plan
    from weft.planning.plan_text import plan_recipe
    from weft.training.machine import detect_machine

    errors = ConfigErrors()
    name = read_path("recipe", recipe, errors)
    devices = read_optional(read_text, "cluster", cluster, errors)
    errors.raise_any()
    pairs = encode_overrides(overrides, errors)
    planned, machine = plan_recipe(name, pairs, errors, devices, detect_machine, adopt=adopt_paths)
    device = device_spec(planned, machine)
    prediction = forecast(planned, machine, device, cached=True)
    advice = [] if device is None else advise(planned, machine, device, prediction, cached=True)
    text = render_plan(planned, machine, name, prediction, advice)
    return PlanResult(planned, prediction, text, name, machine)


@argument_names()
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
    from weft.planning.resolve import MAX_CPU_RANKS

    errors = ConfigErrors()
    name = read_path("recipe", recipe, errors)
    errors.raise_any()
    pairs = encode_overrides(overrides, errors)
    resume = encode_overrides(resume_layout, errors, "resume_layout")
    num_ranks = read_integer("ranks", ranks, 2, MAX_CPU_RANKS, errors)
    num_steps = read_integer("steps", steps, 1, 1000, errors)
    request = VerifyRequest(name, pairs, list(errors), resume, num_ranks, num_steps)
    result: VerifyResult = run_in_child("verify_recipe", request)
    return result


@argument_names()
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
    names = read_paths("recipes", recipes, errors)
    directory = read_optional(read_path, "out", out, errors)
    is_plan = read_flag("plan_only", plan_only, errors)
    devices = read_optional(read_text, "cluster", cluster, errors)
    if devices and not is_plan:
        rule = "needs plan_only, because runs use this machine"
        errors.add("cluster", rule, "set plan_only=True", value=devices)
    request = CompareRequest(
        recipes=names,
        vary=_encode_variants(vary, errors),
        overrides=encode_overrides(overrides, errors),
        errors=[],
        repeats=read_integer("repeats", repeats, 1, 1000, errors),
        margin=read_text("margin", margin, errors),
        price=read_optional(read_number, "price", price, errors),
        out=directory,
        plan_only=is_plan,
        cluster=devices,
    )
    errors.raise_any("recipes", "out", "margin")
    result: Comparison = run_in_child("compare_recipes", request._replace(errors=list(errors)))
    return result


def _encode_variants(vary: object, errors: ConfigErrors) -> list[tuple[str, list[str]]]:
    """Return the texts of the values of each key that varies."""
    if vary is None:
        return []
    if not isinstance(vary, Mapping):
        remedy = "use a mapping of lists, such as {'optim.lr': [1e-3, 3e-3]}"
        errors.add("vary", "is not a mapping", remedy, value=show_value(vary))
        return []
    variants = []
    for key, values in vary.items():
        values = to_python(values)
        if isinstance(values, list | tuple | range):
            texts = [text for v in values for _, text in encode_overrides({key: v}, errors, "vary")]
            variants.append((str(key), texts))
        else:
            rule, remedy = f"has no list of values for {key}", "use [1e-3, 3e-3]"
            errors.add("vary", rule, remedy, value=show_value(values))
    return variants


@argument_names()
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
    from weft.submission.launch_warnings import print_warnings
    from weft.submission.submit import build_request, check_text, get_cluster, submit
    from weft.training.machine import detect_machine

    errors = ConfigErrors()
    name, kind = read_path("recipe", recipe, errors), read_text("on", on, errors)
    errors.raise_any()
    pairs = encode_overrides(overrides, errors)
    request = build_request(kind, name, pairs, errors, detect_machine)
    text = get_cluster(kind).render(request)
    print_warnings(kind, request)
    check_text(kind, text)
    return submit(kind, request, text)


def load_model(
    path: RunHandle | str | os.PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    step: int | str | None = None,
) -> nn.Module:
    """Load a model as a plain PyTorch module.

    Args:
        path: a run or its directory, for its newest checkpoint; the directory of a checkpoint; a
            Hugging Face directory, which may be ``s3://bucket/model``; or ``org/name`` on the Hub.
        dtype: of the parameters, such as ``bfloat16``; default: float32.
        device: such as ``cpu`` or ``cuda:1``; default: an accelerator if there is one.
        step: of a run: step of the checkpoint, or ``best``; default: the newest one.

    Returns:
        The module in evaluation mode: token ids ``[B, T]`` to logits ``[B, T, V]``.

    Raises:
        InvalidConfig: if there is no model, or weft does not support it.
    """
    import torch

    from weft.conversion.load_module import load_module
    from weft.training.machine import default_device

    errors = ConfigErrors()
    location = read_path("path", path.path if isinstance(path, RunHandle) else path, errors)
    chosen = read_optional(read_device, "device", device, errors)
    parsed = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if parsed is not None and not (isinstance(parsed, torch.dtype) and parsed.is_floating_point):
        parsed = None
    if parsed is None and dtype is not None:
        errors.add(
            "dtype", "is not a floating dtype", "use float32 or bfloat16", value=show_value(dtype)
        )
    step = read_optional(read_step, "step", step, errors)
    errors.raise_any()
    return load_module(location, parsed, chosen or default_device(), step)


def load_text_model(
    run: RunHandle | str | os.PathLike[str],
    device: str | torch.device | None = None,
    *,
    chat_template: str | os.PathLike[str] = "auto",
    step: int | str | None = None,
) -> TextModel:
    """Load a trained model with its tokenizer and chat template, to generate texts.

    Args:
        run: a run or its directory, for its newest checkpoint; or the directory of a checkpoint.
        device: such as ``cpu`` or ``cuda:1``; default: an accelerator if there is one.
        chat_template: path of a chat template; auto: the run's.
        step: of a run: step of the checkpoint, or ``best``; default: the newest one.

    Returns:
        The model: ``model.module`` is the PyTorch module, ``model.stream(prompt)`` yields text.

    Raises:
        InvalidConfig: if there is no checkpoint, or no such template.
    """
    from weft.inference.text_model import load_text_model

    errors = ConfigErrors()
    path = read_path("run", run.path if isinstance(run, RunHandle) else run, errors)
    chosen = read_optional(read_device, "device", device, errors)
    template = read_path("chat_template", chat_template, errors)
    step = read_optional(read_step, "step", step, errors)
    errors.raise_any()
    return load_text_model(Path(path), chosen, template, step)


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


@argument_names()
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
    from weft.inference.generate import Sampling, is_conversation
    from weft.inference.text_model import TextModel

    errors = ConfigErrors()
    sampling = Sampling(
        max_tokens=read_integer("max_tokens", max_tokens, 0, MAX_COUNT, errors),
        repetition_penalty=read_number("repetition_penalty", repetition_penalty, errors),
        temperature=read_number("temperature", temperature, errors),
        top_k=read_integer("top_k", top_k, 0, MAX_COUNT, errors),
        top_p=read_number("top_p", top_p, errors),
        min_p=read_number("min_p", min_p, errors),
        stop=read_texts("stop", stop, errors),
        seed=read_integer("seed", seed, 0, MAX_COUNT, errors),
    )
    batch_size = read_integer("batch", batch, 1, MAX_COUNT, errors)
    is_chat = read_flag("chat", chat, errors)
    # Of values that have an error already, there is a second one under the command's name.
    known = {f"--{error.key.replace('_', '-')}" for error in errors}
    errors += [error for error in sampling.errors() if error.key not in known]
    if isinstance(model, TextModel) and device is not None:
        rule, remedy = "is for a run that is not loaded yet", "give it to load_text_model"
        errors.add("device", rule, remedy, value=show_value(device))
    is_list = isinstance(prompt, list) and all(isinstance(text, str) for text in prompt)
    is_chat = is_chat or is_conversation(prompt)
    if not (isinstance(prompt, str) or is_list or is_conversation(prompt)):
        rule = "is neither a string, nor a list of strings, nor a list of messages"
        remedy = "write a message as {'role': 'user', 'content': 'text'}"
        errors.add("prompt", rule, remedy, value=show_value(prompt))
    errors.raise_any()
    loaded = model if isinstance(model, TextModel) else load_text_model(model, device)
    prompts = cast("list[Prompt]", prompt if is_list else [prompt])
    results = loaded.complete(prompts, sampling, is_chat, batch_size)
    texts = [result.text for result in results]
    return texts if is_list else texts[0]


def open_run(run_dir: str | os.PathLike[str]) -> RunHandle:
    """Open a run directory: metrics, events, job, plan, checkpoints, report.

    Args:
        run_dir: the run directory; the run may be training.

    Raises:
        InvalidConfig: if it is not a run directory.
    """
    errors = ConfigErrors()
    path = read_path("run_dir", run_dir, errors)
    errors.raise_any()
    return RunHandle(path)
