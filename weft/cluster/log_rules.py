"""Rules by which the elastic agent of HyperPod reads the output of a run.

They are entries of ``runPolicy.logMonitoringConfiguration`` in a HyperPodPyTorchJob.  The agent
matches each line that the first rank of its node prints with ``logPattern``, from the beginning of
the line.  If a rule is broken, it reports a fault, and the operator restarts the ranks of all
nodes.  The operator is written in Go, whose regular expressions have no lookahead.
"""

from __future__ import annotations

from typing import Any

from weft.config.schema import Job

STEP = r".*step [0-9]+/[0-9]+  loss "
# The data may have to be downloaded and tokenized, and the model to be imported and compiled.
START_SECONDS = 4 * 3600
# An evaluation, a save, and the report are between two steps.
MIN_SECONDS, SECONDS_PER_STEP = 3600, 120


def hang_rule(job: Job) -> dict[str, Any]:
    """Return the rule that each node prints steps.

    weft's watchdog is faster, and names the rank and the collective.  The rule is for what the
    watchdog cannot end: a process that the kernel does not kill, or a node without processor time.
    """
    limit = job.resilience.step_timeout
    step = limit if isinstance(limit, float) and limit > 0 else SECONDS_PER_STEP
    return {
        "name": "hang",
        "logPattern": STEP,
        "expectedStartCutOffInSeconds": START_SECONDS,
        "expectedRecurringFrequencyInSeconds": max(
            MIN_SECONDS, round(step * job.monitor.log_interval)
        ),
    }


def throughput_rule(tokens_per_second: int, num_records: int = 10) -> dict[str, Any]:
    """Return the rule that some of the last records have this throughput.

    Args:
        tokens_per_second: of all ranks; the agent knows integers only.
        num_records: records in a row that are slower before it is a fault.
    """
    return {
        "name": "throughput",
        "logPattern": rf"{STEP}.*  ([0-9]+) tokens/s",
        "operator": "lt",
        "metricThreshold": tokens_per_second,
        "metricEvaluationDataPoints": num_records,
    }


# Faults that a run reports and survives, by `resilience.on_anomaly`.
NAN_RULE = {
    "name": "nan",
    "logPattern": r".*the (?:loss|gradient norm) is (?:nan|-?inf)",
    "faultOnMatch": True,
}
FAULT_RULE = {
    "name": "fault",
    "logPattern": r".*weft: rank [0-9]+ failed: ",
    "faultOnMatch": True,
}
