"""Rules by which HyperPod's elastic agent reads the output of a run.

They are entries of ``runPolicy.logMonitoringConfiguration`` in a HyperPodPyTorchJob; the page
docs/hyperpod.md has others.  The agent matches each line that the first rank of its node prints
with ``logPattern``, from the beginning of the line.  If a rule is broken, it reports a fault, and
the operator restarts the ranks of all nodes.  The operator is written in Go, whose regular
expressions have no lookahead.
"""

from __future__ import annotations

from typing import Any

from weft.config.schema import Job

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
    seconds = max(MIN_SECONDS, round(step * job.monitor.log_interval))
    return {
        "name": "hang",
        "logPattern": ".*step [0-9]+/[0-9]+  loss ",
        "expectedStartCutOffInSeconds": START_SECONDS,
        "expectedRecurringFrequencyInSeconds": seconds,
    }
