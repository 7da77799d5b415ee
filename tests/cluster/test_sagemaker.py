"""Training job requests are valid for botocore's model; a fake service on loopback."""

from __future__ import annotations

import http.server
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.requests import format_errors, own_recipe, request
from weft.cluster import sagemaker
from weft.cluster.sagemaker_entry import Container, train_arguments
from weft.config.errors import WeftError

pytest.importorskip("botocore", reason="needs weft[sagemaker]")

IMAGE = ("launch.image", "1.dkr.ecr.us-east-1.amazonaws.com/weft:1")
OPTIONS = {
    "role": "arn:aws:iam::123456789012:role/trainer",
    "instance_type": "ml.p5.48xlarge",
    "bucket": "my-bucket",
}
REQUESTS = {
    "one": request(IMAGE, ("train.steps", "5"), options=OPTIONS, devices=8),
    "two": request(
        IMAGE,
        ("launch.time_limit", "2-00:00:00"),
        options=OPTIONS
        | {"spot": "true", "subnets": "subnet-a1+subnet-b2", "security_groups": "sg-1"},
        nodes=(2, 2),
        devices=8,
    ),
    "data": request(IMAGE, ("data.path", "s3://texts/web/"), options=OPTIONS, devices=8),
    "cpu": request(IMAGE, options=OPTIONS | {"instance_type": "ml.c5.xlarge"}),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_request_is_valid_for_the_service_model(name: str) -> None:
    assert sagemaker.find_errors(REQUESTS[name]) == []
    assert sagemaker.check(sagemaker.render(REQUESTS[name])) == []


def test_request_with_mistakes_is_refused_by_the_model() -> None:
    right = json.loads(sagemaker.render(REQUESTS["two"]))

    def wrong(**changes: Any) -> str:
        return "\n".join(sagemaker.check(json.dumps(right | changes)))

    assert "Unknown parameter" in wrong(RolArn="x")
    assert "Missing required parameter" in "\n".join(
        sagemaker.check(json.dumps({k: v for k, v in right.items() if k != "RoleArn"}))
    )
    assert ".RoleArn: " in wrong(RoleArn="arn:aws:iam::1:user/somebody-or-other")
    assert ".HyperParameters: length 101 exceeds 100" in wrong(
        HyperParameters={str(number): "" for number in range(101)}
    )
    assert ".HyperParameters.a: length 2501" in wrong(HyperParameters={"a": "x" * 2501})
    resources = right["ResourceConfig"] | {"InstanceType": "ml.p99.xlarge"}
    assert "'ml.p99.xlarge' is not one of" in wrong(ResourceConfig=resources)
    assert sagemaker.check("{")[0].startswith("the request is not valid JSON")


def test_request_has_the_requested_values() -> None:
    payload = json.loads(sagemaker.render(REQUESTS["one"]))
    assert re.fullmatch(r"small-run-\d{6}-\d{6}", payload.pop("TrainingJobName"))
    home = "s3://my-bucket/weft/small-run"
    assert payload == {
        "RoleArn": OPTIONS["role"],
        "AlgorithmSpecification": {
            "TrainingImage": IMAGE[1],
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["python", "-m", "weft.cluster.sagemaker_entry"],
        },
        "HyperParameters": {"recipe": "demo", "train.steps": "5"},
        "ResourceConfig": {
            "InstanceType": "ml.p5.48xlarge",
            "InstanceCount": 1,
            "VolumeSizeInGB": 100,
        },
        "OutputDataConfig": {"S3OutputPath": f"{home}/output"},
        "CheckpointConfig": {"S3Uri": f"{home}/run", "LocalPath": "/opt/ml/checkpoints"},
        "StoppingCondition": {"MaxRuntimeInSeconds": 86400},
    }


def test_request_for_spot_instances_has_checkpoints() -> None:
    payload = json.loads(sagemaker.render(REQUESTS["two"]))
    checkpoints = "s3://my-bucket/weft/small-run/checkpoints"
    assert payload["HyperParameters"]["checkpoint.dir"] == checkpoints
    assert payload["EnableManagedSpotTraining"] is True
    times = {"MaxRuntimeInSeconds": 172800, "MaxWaitTimeInSeconds": 345600}
    assert payload["StoppingCondition"] == times
    vpc = {"Subnets": ["subnet-a1", "subnet-b2"], "SecurityGroupIds": ["sg-1"]}
    assert payload["VpcConfig"] == vpc


def test_request_hyperparameters_make_the_same_job() -> None:
    """The entry point turns hyperparameters back into the words of the command."""
    parameters = json.loads(sagemaker.render(REQUESTS["two"]))["HyperParameters"]
    base = Path("/opt/ml")
    host = Container(("algo-1", "algo-2"), "algo-2", {}, base, base, base)
    words, run_dir = train_arguments(list(parameters.items()), host)
    assert dict(zip(words[1::2], words[2::2], strict=True)) == {
        "--checkpoint.dir": "s3://my-bucket/weft/small-run/checkpoints",
        "--run.dir": "/opt/ml/checkpoints",
    }
    assert run_dir == Path("/opt/ml/checkpoints")


def test_request_data_become_a_channel_unless_a_pattern() -> None:
    payload = json.loads(sagemaker.render(REQUESTS["data"]))
    [channel] = payload["InputDataConfig"]
    assert channel["ChannelName"] == "training"
    assert channel["DataSource"]["S3DataSource"]["S3Uri"] == "s3://texts/web/"
    assert payload["HyperParameters"]["data.path"] == "/opt/ml/input/data/training"
    pattern = request(IMAGE, ("data.path", "s3://texts/*.jsonl"), options=OPTIONS)
    payload = json.loads(sagemaker.render(pattern))
    assert "InputDataConfig" not in payload
    assert payload["HyperParameters"]["data.path"] == "s3://texts/*.jsonl"


def test_request_setup_runs_before_training(tmp_path: Path) -> None:
    payload = json.loads(
        sagemaker.render(request(IMAGE, ("launch.setup", "pip install x"), options=OPTIONS))
    )
    entry = payload["AlgorithmSpecification"]["ContainerEntrypoint"]
    assert entry[:2] == ["bash", "-c"]
    assert entry[2] == "set -e\npip install x\nexec python -m weft.cluster.sagemaker_entry"


def test_request_mistake_is_reported_for_its_own_key() -> None:
    launch_request = request(
        IMAGE,
        options=OPTIONS | {"spot": "true", "wait": "2-00:00:00"},
    )
    launch = launch_request.job.launch.model_copy(update={"time_limit": "soon"})
    launch_request = replace(
        launch_request, job=launch_request.job.model_copy(update={"launch": launch})
    )
    assert [error.key for error in sagemaker.find_errors(launch_request)] == ["launch.time_limit"]


def test_request_each_mistake_is_reported() -> None:
    options = {"spot": "yes", "volume": "big", "wait": "1", "subnets": "a", "gpu": "8"}
    text = format_errors(sagemaker.find_errors(request(options=options, nodes=(1, 2))))
    for part in ("role is missing", "instance_type", "bucket", "spot", "volume", "wait"):
        assert f"launch.options.{part}" in text
    for part in ("security_groups", "run.nodes", "launch.image", "gpu"):
        assert part in text


# --------------------------------------------------------------------------- the service


class Service(http.server.ThreadingHTTPServer):
    """A service that records requests, and returns prepared answers per operation."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, Any]] = []
        self.answers: dict[str, list[tuple[int, dict[str, Any]]]] = {}


class Handler(http.server.BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        operation = self.headers["X-Amz-Target"].partition(".")[2]
        self.server.requests.append((operation, json.loads(body)))
        answers = self.server.answers[operation]
        code, answer = answers.pop(0) if len(answers) > 1 else answers[0]
        self.answer(code, json.dumps(answer).encode())

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append((f"PUT {self.path}", body.decode()))
        self.answer(200, b"")

    def answer(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Service]:
    with Service() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        monkeypatch.delenv("AWS_PROFILE", raising=False)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


ARN = "arn:aws:sagemaker:us-east-1:123456789012:training-job/small-run-1"


def test_submit_creates_a_training_job(service: Service, tmp_path: Path) -> None:
    service.answers["CreateTrainingJob"] = [(200, {"TrainingJobArn": ARN})]
    options = OPTIONS | {"region": "us-east-1"}
    launch_request = request(IMAGE, options=options, recipe=own_recipe(tmp_path))
    path = tmp_path / "launch.json"
    path.write_text(sagemaker.render(launch_request))
    assert sagemaker.submit(path, launch_request) == ARN
    (put, recipe), (operation, body) = service.requests
    assert put == "PUT /my-bucket/weft/small-run/recipe/recipe.toml"
    assert "steps = 7" in recipe
    assert (operation, body) == ("CreateTrainingJob", json.loads(path.read_text()))
    assert body["HyperParameters"]["recipe"] == "/opt/ml/input/data/recipe/recipe.toml"
    assert body["InputDataConfig"][0]["ChannelName"] == "recipe"


def test_submit_refusal_of_the_service_is_reported(service: Service, tmp_path: Path) -> None:
    refused = {"__type": "ResourceInUse", "message": "names must be unique"}
    service.answers["CreateTrainingJob"] = [(400, refused)]
    launch_request = request(IMAGE, options=OPTIONS | {"region": "us-east-1"})
    path = tmp_path / "launch.json"
    path.write_text(sagemaker.render(launch_request))
    with pytest.raises(WeftError, match=r"AWS: .*names must be unique"):
        sagemaker.submit(path, launch_request)


def test_submit_without_a_region_is_refused(
    service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    path = tmp_path / "launch.json"
    path.write_text(sagemaker.render(REQUESTS["one"]))
    with pytest.raises(WeftError, match="AWS: You must specify a region"):
        sagemaker.submit(path, REQUESTS["one"])


def job(state: str, **extra: Any) -> tuple[int, dict[str, Any]]:
    resources = {"InstanceType": "ml.p5.48xlarge", "InstanceCount": 2, "VolumeSizeInGB": 1}
    return 200, {"TrainingJobStatus": state, "ResourceConfig": resources, **extra}


def test_status_of_a_job_is_described(service: Service) -> None:
    for answer, line in (
        (job("InProgress", SecondaryStatus="Starting"), "waiting for 2 ml.p5.48xlarge: Starting"),
        (job("InProgress", SecondaryStatus="Training"), "running on 2 ml.p5.48xlarge: Training"),
        (job("Stopped", SecondaryStatus="Stopped"), "stopped"),
        (
            job("Failed", FailureReason="rank 1: OutOfMemoryError"),
            "failed: rank 1: OutOfMemoryError",
        ),
    ):
        service.answers["DescribeTrainingJob"] = [answer]
        assert sagemaker.status(ARN) == line
    assert service.requests[-1] == ("DescribeTrainingJob", {"TrainingJobName": "small-run-1"})
    service.answers["StopTrainingJob"] = [(200, {})]
    assert "two minutes to save" in sagemaker.cancel(ARN)
    assert service.requests[-1] == ("StopTrainingJob", {"TrainingJobName": "small-run-1"})


def test_logs_are_followed_to_the_end(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sagemaker, "POLL_SECONDS", 0.01)

    def event(host: str, time: int, line: str) -> dict[str, Any]:
        stream = f"small-run-1/{host}-1700000000"
        number = f"{host}-{time}-{line}"
        return {"logStreamName": stream, "timestamp": time, "message": line, "eventId": number}

    def page(*events: dict[str, Any], **token: str) -> tuple[int, dict[str, Any]]:
        return 200, {"events": events, **token}

    none = (400, {"__type": "ResourceNotFoundException", "message": "no group"})
    a, b = event("algo-1", 100_000, "a"), event("algo-1", 100_000, "b")
    late, c = event("algo-2", 99_000, "late"), event("algo-1", 100_001, "c")
    service.answers = {
        "DescribeTrainingJob": [job("InProgress"), job("InProgress"), job("Completed")],
        "FilterLogEvents": [none, page(a, nextToken="t"), page(b), page(late, a, b, c)],
    }
    lines = ["algo-1: a", "algo-1: b", "algo-2: late", "algo-1: c"]
    assert list(sagemaker.logs(ARN, Path(), follow=True)) == lines
    queries = [query for operation, query in service.requests if operation == "FilterLogEvents"]
    assert {query["logStreamNamePrefix"] for query in queries} == {"small-run-1/"}
    assert [query["startTime"] for query in queries] == [0, 0, 0, 40_000]
