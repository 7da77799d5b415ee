"""The training loop.  Read this file first.

Every rank runs `train`.  There is no trainer object, and no callback but one that generates text:
`Run` (`weft.training.run`) lists the parts of a run.  `TrainState` is what a run saves beside
weights and optimizer state.

*Not stored.*  The learning rate follows from the step, and the batch from the number of consumed
samples, so a run that is killed resumes from its newest checkpoint with the same numbers.

*Collectives.*  Comments mark them: all ranks of a replica group must call them in the same order.
Votes, suspicions, anomalies, `Due` and the loss of a group decide which calls follow, so each of
them is equal on all of these ranks.  Without ``resilience.lighthouse`` a run is one replica group.

*Loss.*  `TrainStep` divides the summed loss of each microbatch by the number of target tokens of
the global batch, over all ranks and replica groups.  Losses and gradients are then summed, never
averaged.

*NaN and Inf.*  `optimizer_step` never applies a step whose loss or gradient norm is NaN or Inf: the
optimizer reads a flag on the device, so that no host waits.  What the run does then depends on
``resilience.on_anomaly``:

    stop     raise at the next logged step, before anything is recorded or saved; until then, steps
             with a finite loss and norm are applied
    skip     compute the step again; if it is bad again, count it without an update
    rewind   compute the step again; if it is bad again, load the newest checkpoint and skip the
             data since then

``skip`` and ``rewind`` treat a spike of loss or norm like a NaN, and the host waits for the
device in every step.  With ``stop`` it waits only to log a step, to evaluate, to save and to
compare replicas.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from rich.console import Console
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.checkpoint.best import FIELDS, add_evaluation, get_best_metric
from weft.checkpoint.final_save import FinalSave
from weft.checkpoint.fingerprint import compare_replicas
from weft.checkpoint.manifest import CheckpointError, run_on_rank_0
from weft.config.errors import WeftError
from weft.data.dataset import Dataset
from weft.data.loader import Batch
from weft.monitor.anomaly import Anomaly, StepResult, reduce_result
from weft.monitor.device_memory import is_out_of_memory, out_of_memory
from weft.monitor.faults import fault_point
from weft.monitor.signals import StopRequested, Votes
from weft.monitor.spans import span
from weft.monitor.step_timer import enter_phase
from weft.optim.optimizer import (
    clip_scale,
    compute_grad_norm,
    learning_rate,
    masked_step,
    set_learning_rate,
)
from weft.parallel.compile import describe_graph_break
from weft.planning.plan import Plan
from weft.training.early_stopping import add_evaluation_to_state, describe_early_stop
from weft.training.metric_logger import TrainingError, is_due
from weft.training.run import Generate, Run, open_run
from weft.training.setup import Rank
from weft.training.state import TrainState, resume
from weft.training.step import batch_to, validation_batches

# Errors of reading a batch, after which this rank can still compute.  Not RuntimeError, which torch
# and CUDA raise: it ends the run at once.
DATA_ERRORS = (OSError, WeftError, LookupError, ValueError)
GC_STEPS = 50  # steps between garbage collections, on all ranks at once


def train(
    plan: Plan, dataset: Dataset, rank: Rank, console: Console, generate: Generate | None = None
) -> bool:
    """Train until ``train.steps``, from the newest checkpoint if there is one.

    After a stop signal (SIGTERM, SIGUSR1, SIGINT) or ``resilience.time_limit`` the run saves the
    last complete step and ends: see `weft.monitor.signals`.  Rank 0 shows progress on ``console``.
    ``generate`` continues prompts at every evaluation.  Returns True if all steps are done, equal
    on all ranks.
    """
    # Opening the run may stop, too.
    with suppress(StopRequested), open_run(plan, dataset, rank, console, generate) as run:
        state, batches = run.initial_state, list[Batch]()
        state = evaluate_if_skipped(run, state)  # collective
        while not is_finished(run, state) and not run.consensus.should_stop():  # collective
            with error_context(run, state):
                try:
                    state = sync_replicas(run, state)  # collective; another group may be ahead
                except StopRequested:
                    break
                step, samples = state.step + 1, state.samples + plan.global_batch_size
                run.profiler.advance(step)  # collective when a profile ends

                batches, data_error = next_batch(run, state, batches)
                run.consensus.post(  # collective, in the background
                    retry_save=run.checkpoints.should_retry(),
                    is_saving=run.checkpoints.is_saving(),
                    has_no_data=data_error is not None,
                )
                result = forward_backward(run, step, batches)  # collective
                votes = run.consensus.wait()
                if not run.replicas.committed():  # collective
                    continue  # a replica group was lost: repeat the step with the others
                if votes.has_no_data:
                    end_without_data(run, state, data_error)  # collective; raises on that rank
                    return False
                if result is None:
                    break  # all ranks stop; the state is that of the step before

                anomaly = None
                if suspicion := run.anomalies.check(step, result):
                    # The same weights and batch again.  A hardware fault does not recur: then the
                    # second result counts.  Otherwise the anomaly says skip or rewind.
                    # A stop leaves both the computation and a rewind to the next start.
                    if run.consensus.should_stop():  # collective
                        break
                    first = result
                    result = forward_backward(run, step, batches)  # collective
                    if not run.replicas.committed():  # collective
                        continue
                    if result is None or run.consensus.is_stopping:
                        break
                    anomaly = run.anomalies.classify(suspicion, first, result)  # collective
                    run.metrics.log_anomaly(anomaly, step, range(state.samples, samples))
                if anomaly is not None and anomaly.action == "rewind":
                    # The step goes back, the samples do not: the data since then is skipped.
                    state = replace(load_newest_checkpoint(run), samples=samples)  # collective
                    continue

                due = find_due(run, step, votes)
                optimizer_step(run, step, result, anomaly, due)  # collective if logged
                anomaly_state = run.anomalies.state()
                state = replace(
                    state, step=step, samples=samples, anomaly_state=anomaly_state, evaluation={}
                )
                compare_weights(run, step, due)  # collective
                if due.log:
                    state = log_step(run, state, due)  # collective
                    due = save_if_best(run, state, due)  # collective
                if due.save or due.save_local:
                    save_step(run, state, due)  # collective
        save_last_step(run, state)  # collective
        return is_finished(run, state) and not run.consensus.is_stopping
    return False


def is_finished(run: Run, state: TrainState) -> bool:
    """Return True if all steps are done, or ``train.early_stopping`` ends the run."""
    return state.step >= run.plan.num_steps or bool(
        describe_early_stop(state.early_stopping, run.plan.job)
    )


def forward_backward(run: Run, step: int, batches: Sequence[Batch]) -> StepResult | None:
    """Compute loss and gradients of a step, summed over all ranks; a collective.

    It replaces gradients, losses by source, metrics and expert loads, so a step can be computed
    twice.  Only `optimizer_step` changes weights.

    Returns:
        None if all ranks stop, and abandon the step.  A pipeline, and one of several replica
        groups, for which the others wait, abandon no step before its end.
    """
    enter_phase("forward_backward")
    fault_point("forward_backward")
    zero_grad(run)
    train_step, sizes = run.built.train_step, [len(batch.tokens_BT) for batch in batches]
    has_groups = run.plan.job.resilience.has_replica_groups
    check_stop = None if has_groups else run.consensus.check_stop
    try:
        with run.layer_stats.record_forward(step, sizes), locate_nan(run, sizes):
            # Counts targets over all replica groups; sums gradients inside this one.
            loss = train_step.forward_backward(batches, run.replicas.sum, check_stop)
    except StopRequested:
        train_step.abandon()
        return None
    enter_phase("update")
    fault_point("gradients", (param.grad for param in run.params))
    place = run.replicas.index, run.replicas.count
    counts = chain.from_iterable(hook.reduce(*place) for hook in train_step.hooks)
    sums = [loss, train_step.loss_by_source, train_step.metrics, *counts]
    grads = (param.grad for param in run.params)
    run.replicas.sum(tensor for tensor in chain(sums, grads) if tensor is not None)  # in place
    with span("gradient norm"):
        norms = compute_grad_norm(run.params, run.built.pp_group)
    run.consensus.should_stop()  # `find_due` reads the answer
    return reduce_result(loss, *norms)


def locate_nan(run: Run, sizes: Sequence[int]) -> AbstractContextManager[None]:
    """Return a context that finds the layer of a NaN in backward, if asked to."""
    if not run.plan.job.debug.autograd_anomaly:
        return nullcontext()
    from weft.monitor.autograd_anomaly import trace_backward_nan

    return trace_backward_nan(run.layer_stats.layers, sizes)


def optimizer_step(
    run: Run, step: int, result: StepResult, anomaly: Anomaly | None, due: Due
) -> None:
    """Clip gradients and update weights, unless skipped."""
    optim, optimizer = run.plan.job.optim, run.built.optimizer
    run.metrics.record_grad_norms(step, due.log)
    lr = learning_rate(step, run.plan.num_steps, optim, run.built.lr_decay)
    set_learning_rate(optimizer, lr)
    if anomaly is None or anomaly.action != "skip":
        with span("optimizer"):
            is_bad = ~result.loss_and_norm.isfinite().all()  # the host does not know it yet
            masked_step(optimizer, is_bad, clip_scale(result.grad_norm, optim.max_grad_norm))
            for hook in run.built.train_step.hooks:
                hook.update(is_bad)
        run.metrics.add_step()
    run.metrics.complete_step(lr, result.loss_and_norm)
    zero_grad(run)
    run.layer_stats.record_parameters(step)
    run.timer.complete_step(step)
    run.compile_log.check(run.blocks)
    if step % GC_STEPS == 0:
        gc.collect(1)


class Due(NamedTuple):
    """Actions after a step; equal on all ranks of a replica group."""

    save: bool  # a checkpoint, by the leading replica group
    save_local: bool  # the same, into the local directories of the nodes
    evaluate: bool
    log: bool


def find_due(run: Run, step: int, votes: Votes) -> Due:
    """Return the actions after ``step``.

    A save, an evaluation and a stop imply logging.  `save_last_step` saves the last step.  A failed
    save is retried after the next step.  A local save waits for a save in progress.
    """
    is_leader = run.replicas.is_leader
    is_last = run.consensus.is_stopping or step == run.plan.num_steps
    save = not is_last and (votes.retry_save or run.schedule.is_due(step))
    save_local = not (is_last or votes.is_saving) and run.schedule.is_local_due(step)
    evaluate = run.validation_set is not None
    evaluate = evaluate and is_due(step, run.plan.job.train.eval_interval, run.plan.num_steps)
    log = is_last or (is_leader and (save or save_local)) or evaluate or run.metrics.is_due(step)
    return Due(is_leader and save, is_leader and save_local, evaluate, log)


def sync_replicas(run: Run, state: TrainState) -> TrainState:
    """Agree on the replica groups of the next step; return their newest state.

    Raises:
        StopRequested: on all ranks, if they stop while they wait for other groups.
    """
    state = run.replicas.sync(state, run.consensus.check_stop)
    if run.replicas.became_leader:
        run.checkpoints.acquire_lease(state.step)
    return state


def next_batch(
    run: Run, state: TrainState, last: list[Batch]
) -> tuple[list[Batch], Exception | None]:
    """Return this rank's microbatches of the next step, on its device.

    If they cannot be read, return the last batches and the error.  The other ranks compute the
    step, so this rank takes part in its collectives; then no rank applies it.  Raise the error
    instead in the first step, which has no last batch, and with replica groups, because the other
    groups apply the step and continue without this one.
    """
    enter_phase("data", step=state.step + 1)
    try:
        fault_point("step")
        batches = run.data.get_microbatches(state.samples, run.replicas.index, run.replicas.count)
        return [batch_to(batch, run.rank.device) for batch in batches], None
    except DATA_ERRORS as error:
        if not last or run.plan.job.resilience.has_replica_groups:
            raise
        return last, error


def zero_grad(run: Run) -> None:
    """Delete all gradients."""
    for param in run.params:
        param.grad = None


def compare_weights(run: Run, step: int, due: Due) -> None:
    """Compare copies of weights and optimizer state; a collective.

    Data-parallel copies are compared every ``resilience.replica_check`` steps and before every
    save, replica groups only at the interval.  An interval of 0 turns both off.
    """
    interval = run.plan.job.resilience.replica_check
    is_interval = interval > 0 and is_due(step, interval, run.plan.num_steps)
    if is_interval or (interval and due.save):
        compare_replicas(run.built.model_parts, run.built.optimizer)
    if is_interval:
        run.replicas.compare()


def log_step(run: Run, state: TrainState, due: Due) -> TrainState:
    """Record the step and evaluate, where due; return the state with it; a collective.

    Recording comes before a save, because it raises after a NaN or Inf.  A stop skips the
    evaluation, or abandons it.
    """
    texts: list[str] = []
    evaluate = None
    if due.evaluate and not run.consensus.is_stopping:
        evaluate = partial(evaluate_model, run, texts)
    evaluation = run.metrics.log(
        state, run.anomalies, run.replicas.count, evaluate, due.evaluate and evaluate is None
    )
    log_texts(run, state, texts)
    return add_evaluation_to_state(state, evaluation, run.plan.job)


def save_if_best(run: Run, state: TrainState, due: Due) -> Due:
    """Make a save due if the evaluation of this step is the best one; a collective.

    See ``checkpoint.best``.  The last step is saved anyway.
    """
    if not run.replicas.is_leader or not run.checkpoints.is_best(state.evaluation):
        return due
    metric = get_best_metric(run.plan.job.checkpoint)
    text = f"the best {metric.name} so far: {state.evaluation[metric.name]:.4g}"
    run.events.add("best", state.step, text)
    if due.save or run.consensus.is_stopping or is_finished(run, state):
        return due
    if run.plan.job.resilience.replica_check:
        compare_replicas(run.built.model_parts, run.built.optimizer)
    return due._replace(save=True)


def save_step(run: Run, state: TrainState, due: Due) -> None:
    """Save in the middle of a run; a collective.

    Of several replica groups, only the leader saves.
    """
    run.checkpoints.save(*saved_parts(run, state), persistent=due.save)
    run.anomalies.reset_rewinds()
    if due.save:
        blocking, writing = run.checkpoints.blocking_seconds, run.checkpoints.write_seconds
        run.schedule.record_save(state.step, blocking, writing, run.metrics.step_seconds)
        log_save(run, state)


def save_last_step(run: Run, state: TrainState) -> None:
    """Record and save the last complete step of this start; a collective.

    After a stop only what a save needs comes before it: the record of the step, and the comparison
    of replicas.
    """
    reason = run.consensus.stop_reason() if run.consensus.is_stopping else None
    began = time.time()
    saves = run.replicas.is_leader and state.step > 0
    if reason is not None:
        # Without a lease no step has begun: the state is still where it was loaded from.
        saves = saves and run.checkpoints.lease.epoch > 0
        run.log(f"{reason.text}: all ranks stop{f'; saving step {state.step}' if saves else ''}")
    zero_grad(run)
    if run.metrics.logged_step < state.step:
        run.metrics.log(state, run.anomalies, run.replicas.count, evaluate=None)
    if saves:
        if reason is not None and run.plan.job.resilience.replica_check:
            compare_replicas(run.built.model_parts, run.built.optimizer)
        if reason is not None and run.checkpoints.is_saving():
            run.log("the checkpoint before is still being written; the save waits for it")
        save_final(run, state)
        log_save(run, state)
    if reason is None:
        done = f"all {run.plan.num_steps} steps are done"
        if state.step < run.plan.num_steps:
            done = f"stopped early: {describe_early_stop(state.early_stopping, run.plan.job)}"
            run.log(f"step {state.step}: {done}")
        run.events.add("end", state.step, done)
        return
    now, waited = time.time(), run.checkpoints.waited_seconds if saves else 0.0
    end = f"{reason.text}: {'saved' if saves else 'stopped at'} step {state.step} "
    end += f"{now - reason.time:.2f} s after the request"
    if saves:
        end += f": {began - reason.time:.2f} s until all ranks stopped, "
        end += f"{waited:.2f} s until the checkpoint before was written, " if waited else ""
        end += f"{now - began - waited:.2f} s to save"
    run.log(end)
    run.events.add("stop", state.step, end)


def saved_parts(run: Run, state: TrainState) -> tuple[list[nn.Module], Optimizer, dict[str, Any]]:
    """Return the model parts, the optimizer and the manifest of a save."""
    state = replace(state, divergence_state=run.metrics.divergence_state())
    manifest = state.manifest(run.plan, run.dataset)
    return run.built.model_parts, run.built.optimizer, manifest


def save_final(run: Run, state: TrainState) -> None:
    """Save before the run ends; a collective.  See `weft.checkpoint.final_save`."""
    FinalSave(
        run.checkpoints,
        saved_parts(run, state),
        run.plan.job.checkpoint,
        run.plan.run_path,
        run.consensus.should_stop,
        lambda text: run.events.add("warning", state.step, text, warning=True),
    ).run()


def log_save(run: Run, state: TrainState) -> None:
    """Add the event of a persistent save."""
    text = f"the save blocked training for {run.checkpoints.blocking_seconds:.2g} s"
    run.events.add("checkpoint", state.step, text)


def evaluate_model(run: Run, texts: list[str]) -> float:
    """Return the mean validation loss; a collective.

    Args:
        run: the run.
        texts: receives the prompts of ``monitor.eval_prompts`` with their continuations.

    Raises:
        StopRequested: on all ranks, if they stop before the end.
    """
    train_step, count = run.built.train_step, run.plan.job.train.eval_sequences
    assert run.validation_set is not None, "nothing is evaluated without a validation set"
    batches = validation_batches(run.plan, run.validation_set, run.built.mesh, count)
    try:
        loss = train_step.evaluate(run.consensus.until_stop(batches))
        if run.generate is not None:
            texts += run.generate(train_step, run.consensus.check_stop)
    except StopRequested:
        train_step.abandon()
        raise
    return loss


def evaluate_if_skipped(run: Run, state: TrainState) -> TrainState:
    """Make up for an evaluation that a stop skipped after the last step; a collective.

    Its metrics are added to the state, and to the checkpoint of that step.
    """
    texts: list[str] = []
    with suppress(StopRequested):
        evaluate = partial(evaluate_model, run, texts)
        evaluation = run.metrics.log_skipped_evaluation(state.step, evaluate)
        log_texts(run, state, texts)
        if evaluation:
            state = add_evaluation_to_state(state, evaluation, run.plan.job)
            fields = {name: dict(getattr(state, name)) for name in FIELDS}
            home = run.checkpoints.lease.directory
            run_on_rank_0(
                lambda: add_evaluation(home, state.step, fields),
                f"{home}: the evaluation of step {state.step} could not be added",
            )
    return state


def log_texts(run: Run, state: TrainState, texts: list[str]) -> None:
    """Print continued prompts, and add them to the events."""
    for text in texts:
        run.events.add("generation", state.step, text)
        run.log(f"step {state.step}: {text}")


def load_newest_checkpoint(run: Run) -> TrainState:
    """Load the newest checkpoint in the middle of a run; a collective.

    The run continues on a new branch.

    Raises:
        CheckpointError: if there is none after step 0: skipping samples does not cure a failure of
            the first steps.
    """
    zero_grad(run)
    run.checkpoints.release_copies()
    home, local_dir = run.checkpoints.lease.directory, run.plan.job.checkpoint.local_dir
    model_parts, optimizer = run.built.model_parts, run.built.optimizer
    state = resume(home, local_dir, model_parts, optimizer, run.log, load_frozen=False)
    if state.step == 0:
        rule = "there is no checkpoint after step 0 to rewind to yet"
        raise CheckpointError(
            f"{home}: {rule}; try a lower --optim.lr, or --resilience.on_anomaly skip"
        )
    run.checkpoints.acquire_lease(state.step)
    run.anomalies.restore(state.anomaly_state)
    run.metrics.rewind(state)
    return state


def end_without_data(run: Run, state: TrainState, error: Exception | None) -> None:
    """Save before a step for which a rank has no data; that rank raises its error."""
    zero_grad(run)
    run.anomalies.wait()  # raises if an earlier step had a NaN or Inf
    if run.plan.job.resilience.replica_check:
        compare_replicas(run.built.model_parts, run.built.optimizer)
    text = f"a rank has no data for step {state.step + 1}: saving step {state.step}, then ending"
    run.events.add("warning", state.step, text, warning=True)
    save_final(run, state)
    run.events.add("stop", state.step, "stopped and saved")
    if error is not None:
        error.add_note(f"step {state.step} is saved")
        raise error


@contextmanager
def error_context(run: Run, state: TrainState) -> Iterator[None]:
    """Add the step to errors, and explain graph breaks and exhausted memory."""
    try:
        yield
    except Exception as error:
        where = f"in step {state.step + 1}"
        error.add_note(where)
        if reason := describe_graph_break(error):
            raise TrainingError(
                f"compile.enable=true: a block cannot be compiled as one graph: {reason}. Set "
                "compile.enable=false."
            ) from error
        if is_out_of_memory(error):
            states = (
                value for each in run.built.optimizer.state.values() for value in each.values()
            )
            held: dict[str, list[Tensor]] = {
                "parameters": [p for part in run.built.model_parts for p in part.parameters()],
                "gradients": [param.grad for param in run.params if param.grad is not None],
                "optimizer": [value for value in states if isinstance(value, Tensor)],
            }
            explained = out_of_memory(run.plan, run.rank.device, held, error)
            # The launcher restarts the ranks if earlier steps had enough memory.
            explained.transient = state.step > run.initial_state.step
            explained.add_note(where)
            raise explained from error
        raise
