"""Metrics of a training job in CloudWatch, read from the lines that it prints.

SageMaker searches each printed line with a regular expression per metric, whose first group is the
value.  The expressions follow from the format of the lines in `weft.monitor.terminal`, so that they
change with it.  A metric has the name and the unit that it has in metrics.jsonl.
"""

from __future__ import annotations

import re

from weft.config.schema import Job
from weft.monitor.terminal import EVAL_LINE, STEP_LINE

NUMBER = "([-+.e0-9]+)"  # not nan or inf, which CloudWatch does not store
STEP = "step [0-9]+/[0-9]+.*  "  # a metric of a step's line is between two spaces
FIELD = re.compile(r"\{(\w+):[^}]*\}")


def metric_definitions(job: Job) -> list[dict[str, str]]:
    """Return the ``MetricDefinitions`` of a run, also those of preferences."""
    from weft.train.loss import OBJECTIVES  # imports torch

    objective = OBJECTIVES.get(job.train.objective)  # a user's is not imported here
    metrics = objective(job.train).metrics if objective is not None else ()
    texts = STEP_LINE.split("  ") + [f"{name} {{{name}:}}" for name in metrics]
    patterns = {"step": f"step {NUMBER}/[0-9]+  "}
    patterns |= {FIELD.findall(text)[0]: f"{STEP}{FIELD.sub(NUMBER, text)}  " for text in texts}
    patterns["eval_loss"] = FIELD.sub(NUMBER, EVAL_LINE.replace("{step}", "[0-9]+"))
    return [{"Name": name, "Regex": pattern} for name, pattern in patterns.items()]
