"""Metrics of a training job in CloudWatch, from the lines it prints; dashboard.

SageMaker searches each printed line with a regular expression per metric, whose first group is the
value.  The expressions follow from the format of the lines in `weft.monitor.terminal`, so that they
change with it.  A metric has the name and the unit that it has in metrics.jsonl.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.config.errors import WeftError
from weft.config.files import read_json
from weft.monitor.terminal import EVAL_LINE, STEP_LINE

NUMBER = "([-+.e0-9]+)"  # not nan or inf, which CloudWatch does not store
STEP = "step [0-9]+/[0-9]+.*  "  # a metric of a step's line is between two spaces
NAMESPACE = "/aws/sagemaker/TrainingJobs"
# Of each host, by SageMaker itself, in percent.
HOST_METRICS = (
    *("GPUUtilization", "GPUMemoryUtilization", "CPUUtilization", "MemoryUtilization"),
    "DiskUtilization",
)
WIDTH, HEIGHT = 12, 6  # of a widget; a dashboard is 24 wide
MAX_METRICS = 500  # of a widget
PERIOD = 60  # seconds, the shortest of SageMaker's metrics

FIELD = re.compile(r"\{(\w+):[^}]*\}")


def metric_definitions(objective_metrics: Sequence[str]) -> list[dict[str, str]]:
    """Return the ``MetricDefinitions`` of a run, with the metrics of its objective."""
    texts = STEP_LINE.split("  ") + [f"{name} {{{name}:}}" for name in objective_metrics]
    patterns = {"step": f"step {NUMBER}/[0-9]+  "}
    patterns |= {FIELD.findall(text)[0]: f"{STEP}{FIELD.sub(NUMBER, text)}  " for text in texts}
    patterns["eval_loss"] = FIELD.sub(NUMBER, EVAL_LINE.replace("{step}", "[0-9]+"))
    return [{"Name": name, "Regex": pattern} for name, pattern in patterns.items()]


def make_dashboard(
    job_name: str, region: str | None, metrics: Sequence[str], num_hosts: int
) -> dict[str, Any]:
    """Return the body of a dashboard of a training job, for PutDashboard.

    Args:
        job_name: name of the training job.
        region: its region; None: that of the dashboard.
        metrics: names of its metric definitions.
        num_hosts: number of its instances.
    """
    hosts = [f"{job_name}/algo-{number}" for number in range(1, num_hosts + 1)][:MAX_METRICS]
    graphs: dict[str, list[list[str]]] = {}
    for name in metrics:
        title = "loss" if name == "eval_loss" else name
        graphs.setdefault(title, []).append([NAMESPACE, name, "TrainingJobName", job_name])
    for name in HOST_METRICS:
        graphs[f"{name} of each host"] = [[NAMESPACE, name, "Host", host] for host in hosts]
    return {
        "widgets": [
            {
                "type": "metric",
                "x": WIDTH * (number % 2),
                "y": HEIGHT * (number // 2),
                "width": WIDTH,
                "height": HEIGHT,
                "properties": {
                    "title": title,
                    "metrics": rows,
                    "view": "timeSeries",
                    "stat": "Average",
                    "period": PERIOD,
                    **({"region": region} if region else {}),
                },
            }
            for number, (title, rows) in enumerate(graphs.items())
        ]
    }


def read_dashboard(request_file: Path, job_name: str, region: str | None) -> str:
    """Return the dashboard of a submitted request as JSON.

    Raises:
        WeftError: if the file of the request is missing or damaged.
    """
    try:
        body = read_json(request_file)
        names = [item["Name"] for item in body["AlgorithmSpecification"]["MetricDefinitions"]]
        num_hosts = int(body["ResourceConfig"].get("InstanceCount") or 1)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        rule = "is not the request of a training job that weft launch has submitted"
        raise WeftError(f"{request_file} {rule}: {type(error).__name__}") from error
    return json.dumps(make_dashboard(job_name, region, names, num_hosts), indent=2)
