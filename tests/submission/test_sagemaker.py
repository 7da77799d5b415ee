"""Training job requests are valid for botocore's model; a fake service on loopback."""

from __future__ import annotations

import http.server
import json
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest

from tests.submission.requests import format_errors, own_recipe, request
from weft.config.errors import InvalidConfig, WeftError
from weft.monitor.cloudwatch import metric_definitions
from weft.submission import sagemaker
from weft.submission.job_placement import check_job_paths
from weft.submission.job_request import JobRequest
from weft.submission.sagemaker_entry import Container, train_arguments
from weft.submission.sagemaker_request import request_shape, to_python
from weft.submission.sagemaker_storage import verify_file_systems

pytest.importorskip("botocore", reason="needs weft[sagemaker]")

IMAGE = ("launch.image", "1.dkr.ecr.us-east-1.amazonaws.com/weft:1")
LAUNCH = {
    "role": "arn:aws:iam::123456789012:role/trainer",
    "instance_type": "ml.p5.48xlarge",
    "bucket": "s3://my-bucket",
}
FSX = "fsx:fs-0123456789abcdef0:/abcdefgh"
VPC = {"subnets": "subnet-a1", "security_groups": "sg-1"}
REQUESTS = {
    "one": request(IMAGE, ("train.steps", "5"), launch=LAUNCH, devices=8),
    "two": request(
        IMAGE,
        ("launch.time_limit", "2-00:00:00"),
        launch=LAUNCH
        | {"spot": "true", "subnets": "subnet-a1,subnet-b2", "security_groups": "sg-1"},
        nodes=(2, 2),
        devices=8,
    ),
    "data": request(IMAGE, ("data.path", "s3://texts/web/"), launch=LAUNCH, devices=8),
    "cpu": request(IMAGE, launch=LAUNCH | {"instance_type": "ml.c5.xlarge"}),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_request_is_valid_for_the_service_model(name: str) -> None:
    assert sagemaker.find_errors(REQUESTS[name]) == []
    assert sagemaker.check(sagemaker.render(REQUESTS[name])) == []


MODEL_MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown field": ({"RolArn": "x"}, r"RolArn is unknown to the installed botocore\. Update it"),
    "missing field": ({"RoleArn": None}, r"RoleArn is missing\. It comes from launch.role"),
    "type": ({"HyperParameters": {"a": 5}}, r"HyperParameters\.a=5 must be text"),
    "job name": (
        {"TrainingJobName": "x" * 64},
        r"TrainingJobName=\"x{60}\.\.\.\" has 64 characters, but must have at most 63\. "
        r"It comes from run\.dir: end it in a short name",
    ),
    "job name pattern": (
        {"TrainingJobName": "a_b"},
        r"Name=\"a_b\" does not have the form",
    ),
    "role": (
        {"RoleArn": "arn:aws:iam::1:user/somebody-or-other"},
        r"RoleArn=.* does not have the form .* It comes from launch.role: use arn:aws:iam",
    ),
    "image": (
        {"AlgorithmSpecification.TrainingImage": "i" * 256},
        r"must have at most 255\. It comes from launch\.image",
    ),
    "setup": (
        {"AlgorithmSpecification.ContainerEntrypoint": ["bash", "-c", "x" * 257]},
        r"ContainerEntrypoint\[2\]=.* at most 256\. It comes from launch\.setup: put its lines",
    ),
    "metrics": (
        {"AlgorithmSpecification.MetricDefinitions": [{"Name": "a", "Regex": "b"}] * 41},
        r"has 41 items, but must have at most 40",
    ),
    "hyperparameters": (
        {"HyperParameters": {str(number): "" for number in range(101)}},
        r"has 101 items, but must have at most 100\. It comes from the command line: put keys into",
    ),
    "hyperparameter": (
        {"HyperParameters": {"a": "x" * 2501}},
        r"HyperParameters\.a=.* has 2,501 characters, but must have at most 2,500",
    ),
    "instance type": (
        {"ResourceConfig.InstanceType": "ml.p5.48xlrge"},
        r"InstanceType=\"ml.p5.48xlrge\" is not a value that SageMaker accepts\. It comes from "
        r"launch.instance_type: did you mean 'ml.p5.48xlarge'\?",
    ),
    "keep alive": (
        {"ResourceConfig.KeepAlivePeriodInSeconds": 21601},
        r"KeepAlivePeriodInSeconds=21601 must be at most 21,600\. It comes from launch\.patch",
    ),
    "plan": (
        {"ResourceConfig.TrainingPlanArn": "arn:aws:sagemaker:us-east-1:123456789012:plan/mine-1"},
        r"TrainingPlanArn=.* It comes from launch\.reservation",
    ),
    "retries": (
        {"RetryStrategy": {"MaximumRetryAttempts": 31}},
        r"MaximumRetryAttempts=31 must be at most 30\. It comes from launch\.patch",
    ),
    "pending": (
        {"StoppingCondition.MaxPendingTimeInSeconds": 60},
        r"=60 must be at least 1,800\. It comes from launch\.patch",
    ),
    "file system": (
        {
            "InputDataConfig": [
                {
                    "ChannelName": "fsx",
                    "DataSource": {
                        "FileSystemDataSource": {
                            "FileSystemId": "vol-12345678",
                            "FileSystemAccessMode": "rx",
                            "FileSystemType": "FSxLustre",
                            "DirectoryPath": "/x",
                        }
                    },
                }
            ]
        },
        r"FileSystemId=\"vol-12345678\" does not have the form .*launch\.mounts(.|\n)*"
        r"FileSystemAccessMode=\"rx\" is not a value .*did you mean 'rw'|use one of ro, rw",
    ),
    "security groups": (
        {"VpcConfig.SecurityGroupIds": ["sg-1"] * 6},
        r"has 6 items, but must have at most 5\. It comes from launch\.security_groups",
    ),
    "subnet": (
        {"VpcConfig.Subnets": ["subnet_a"]},
        r"Subnets\[0\]=\"subnet_a\" does not have .* launch\.subnets: use up to 16 IDs",
    ),
    "tags": (
        {"Tags": [{"Key": f"k{number}", "Value": ""} for number in range(51)]},
        r"Tags=.* must have at most 50\. It comes from launch\.labels",
    ),
    "tag characters": ({"Tags": [{"Key": "a{b}", "Value": ""}]}, r"Tags\[0\]\.Key=\"a\{b\}\""),
    "key": (
        {"OutputDataConfig.KmsKeyId": "my key"},
        r"OutputDataConfig\.KmsKeyId=\"my key\" does not have .* launch\.bucket",
    ),
    "bucket": (
        {"OutputDataConfig.S3OutputPath": "my-bucket"},
        r"S3OutputPath=\"my-bucket\" does not have .* It comes from launch\.bucket",
    ),
    "time": ({"StoppingCondition.MaxRuntimeInSeconds": 0}, r"=0 must be at least 1\. .*time_limit"),
}


@pytest.mark.parametrize("name", MODEL_MISTAKES)
def test_request_with_a_mistake_is_refused_by_the_model(name: str) -> None:
    changes, message = MODEL_MISTAKES[name]
    body = json.loads(sagemaker.render(REQUESTS["two"]))
    for path, value in changes.items():
        *parents, last = path.split(".")
        place = body
        for parent in parents:
            place = place[parent]
        place[last] = value
        if value is None:
            del place[last]
    assert re.search(message, "\n".join(sagemaker.check(json.dumps(body))))


def test_request_that_is_no_json_is_refused() -> None:
    assert sagemaker.check("{")[0].startswith("the request is not valid JSON")
    assert sagemaker.check("[]") == ['request="[]" must be an object. It comes from launch.patch.']


def test_patterns_of_the_model_are_those_of_python() -> None:
    """Each pattern of the request compiles, and none is skipped."""
    seen: set[str] = set()

    def visit(shape: Any) -> None:
        if shape.name in seen:
            return
        seen.add(shape.name)
        if pattern := shape.metadata.get("pattern"):
            re.compile(to_python(pattern))
        members = getattr(shape, "members", {}).values() if shape.type_name == "structure" else ()
        for name in ("member", "key", "value"):
            members = (*members, *([getattr(shape, name)] if hasattr(shape, name) else []))
        for member in members:
            visit(member)

    visit(request_shape())
    assert len(seen) > 100
    assert re.fullmatch(
        to_python(request_shape().members["Tags"].member.members["Key"].metadata["pattern"]),
        "größe:1/a=b",
    )


KEY_MISTAKES: dict[str, tuple[dict[str, str], str]] = {
    "role": ({"role": "trainer"}, 'role="trainer" must be the ARN of a role. Use arn:aws:iam::'),
    "instance type": ({"instance_type": "ml.p5.48xlrge"}, "Did you mean 'ml.p5.48xlarge'?"),
    "instance form": (
        {"instance_type": "p5.48xlarge"},
        "must be one to five instance types. Use",
    ),
    "instances": (
        {
            "instance_type": "+".join(f"ml.c5.{size}xlarge" for size in ("", 2, 4, 9, 18))
            + "+ml.m5.xlarge"
        },
        "must be one to five instance types",
    ),
    "instance twice": ({"instance_type": "ml.p5.48xlarge+ml.p5.48xlarge"}, "names a type twice"),
    "bucket": ({"bucket": "mine"}, "must be s3://BUCKET or s3://BUCKET/PREFIX"),
    "region": ({"region": "virginia"}, 'region="virginia" must be a region. Use us-east-1'),
    "plan": (
        {"reservation": "arn:aws:sagemaker:us-east-1:123456789012:plan/mine"},
        "must be the ARN of a training plan. Use the TrainingPlanArn of 'aws sagemaker list",
    ),
    "types spot": (
        {"instance_type": "ml.p5.48xlarge+ml.p5e.48xlarge", "spot": "true"},
        "must be a single type with spot nodes",
    ),
    "subnet": ({"subnets": "vpc-1", "security_groups": "sg-1"}, "must be IDs of subnets"),
    "subnets alone": ({"subnets": "subnet-1"}, "must be given together with security_groups"),
    "options": ({"options": "role=x"}, "is an option of Slurm's sbatch only. Use launch.role=x"),
    "fsx id": ({"mounts": "/fsx=fsx:vol-0123456789:/abc"}, "must be fsx:fs-ID:/MOUNT_NAME"),
    "fsx without a mount name": (
        {"mounts": "/fsx=fsx:fs-0123456789abcdef0:/"},
        "'aws fsx describe-file-systems' shows the ID as FileSystemId, and the mount name as "
        "LustreConfiguration.MountName",
    ),
    "fsx without a VPC": ({"mounts": f"/fsx={FSX}"}, "requires subnets and security_groups"),
    "efs": ({"mounts": "/efs=efs:fs-01234567"} | VPC, "must be efs:fs-ID:/, or efs:fs-ID:/DIR"),
    "claim": ({"mounts": "/fsx=pvc:fsx"}, "is not a source that sagemaker mounts. Use fsx:fs-ID"),
    "secret of a shell": (
        {"secrets": "HF_TOKEN=env:HF_TOKEN"},
        "is a reference that sagemaker cannot read. Use secretsmanager:ID",
    ),
}


@pytest.mark.parametrize("name", KEY_MISTAKES)
def test_key_with_a_mistake_is_refused(name: str) -> None:
    keys, message = KEY_MISTAKES[name]
    text = format_errors(sagemaker.find_errors(request(IMAGE, launch=LAUNCH | keys)))
    assert message in text
    assert text.startswith("launch.")
    assert "hf_abcdef" not in text


def test_key_that_is_right_reaches_the_request(tmp_path: Path) -> None:
    plan = "arn:aws:sagemaker:us-east-1:123456789012:training-plan/mine"
    kms = "arn:aws:kms:us-east-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"
    patch = tmp_path / "patch.yaml"
    patch.write_text(
        "ResourceConfig: {KeepAlivePeriodInSeconds: 21600}\n"
        "StoppingCondition: {MaxPendingTimeInSeconds: 86400}\n"
        "RetryStrategy: {MaximumRetryAttempts: 30}\n"
        f"OutputDataConfig: {{KmsKeyId: '{kms}'}}\n"
        "InputDataConfig: [{ChannelName: training, InputMode: File}]\n"
    )
    keys = {
        "instance_type": "ml.p5.48xlarge+ml.p5e.48xlarge",
        "reservation": plan,
        "labels": "team=nlp,project=llm:1",
        "disk": "500",
        "env": "NCCL_DEBUG=INFO",
        "secrets": "HF_TOKEN=secretsmanager:prod/hf#token",
        "patch": str(patch),
    }
    body = render_checked(IMAGE, ("data.path", "s3://texts/web/"), launch=keys)
    assert body["ResourceConfig"] == {
        "InstanceCount": 1,
        "InstancePreferences": [
            {"InstanceType": "ml.p5.48xlarge", "TrainingPlanArns": [plan]},
            {"InstanceType": "ml.p5e.48xlarge"},
        ],
        "VolumeSizeInGB": 500,
        "KeepAlivePeriodInSeconds": 21600,
    }
    assert body["StoppingCondition"]["MaxPendingTimeInSeconds"] == 86400
    assert body["RetryStrategy"] == {"MaximumRetryAttempts": 30}
    assert body["OutputDataConfig"]["KmsKeyId"] == kms
    tags = {"team": "nlp", "project": "llm:1"}
    assert body["Tags"] == [{"Key": name, "Value": value} for name, value in tags.items()]
    assert body["InputDataConfig"][0]["InputMode"] == "File"
    assert body["InputDataConfig"][0]["DataSource"]["S3DataSource"]["S3Uri"] == "s3://texts/web/"
    assert body["Environment"] == {
        "NCCL_DEBUG": "INFO",
        "WEFT_SECRETS": '{"HF_TOKEN":"prod/hf#token"}',
    }


def render_checked(*overrides: tuple[str, str], **arguments: Any) -> dict[str, Any]:
    """Return a request that passes all checks."""
    arguments["launch"] = LAUNCH | arguments["launch"]
    checked = request(*overrides, **arguments)
    assert sagemaker.find_errors(checked) == []
    text = sagemaker.render(checked)
    assert sagemaker.check(text) == []
    return dict(json.loads(text))


def test_file_systems_become_channels() -> None:
    """A file system is mounted read-write if the job writes below it."""
    efs = "efs:fs-01234567:/"
    paths = [("data.path", "/fsx/texts/*.jsonl"), ("data.tokenizer", "/efs/tokenizer.json")]
    keys = {"mounts": f"/fsx={FSX}/team,/efs={efs}"} | VPC

    def modes(*more: tuple[str, str]) -> dict[str, str]:
        body = render_checked(IMAGE, *paths, *more, launch=keys, nodes=(2, 2))
        sources = {
            channel["ChannelName"]: channel["DataSource"]["FileSystemDataSource"]
            for channel in body["InputDataConfig"]
        }
        assert sources["fsx"]["FileSystemType"] == "FSxLustre"
        assert sources["fsx"]["FileSystemId"] == "fs-0123456789abcdef0"
        assert sources["fsx"]["DirectoryPath"] == "/abcdefgh/team"
        assert sources["efs"]["FileSystemType"] == "EFS"
        assert sources["efs"]["DirectoryPath"] == "/"
        assert body["HyperParameters"]["data.path"] == "/fsx/texts/*.jsonl"
        return {name: source["FileSystemAccessMode"] for name, source in sources.items()}

    assert modes() == {"fsx": "ro", "efs": "ro"}
    assert modes(("checkpoint.dir", "/fsx/runs/1")) == {"fsx": "rw", "efs": "ro"}
    assert modes(("data.cache_dir", "/efs/cache")) == {"fsx": "ro", "efs": "rw"}
    elsewhere = ("checkpoint.dir", "s3://b/c")
    assert modes(("run.dir", "/fsx/runs/1"), elsewhere)["fsx"] == "ro"  # weft replaces run.dir


def test_path_that_no_mount_has_is_refused() -> None:
    """Every key with such a path is reported, also sources of a mixture."""
    overrides = (
        ("data.mixture", "/fsx/web/=0.5,/efs/code/=0.5"),
        ("data.tokenizer", "/fsx/tokenizer.json"),
        ("checkpoint.dir", "/fsx/run"),
        ("model.path", "/fsxx/model"),
        ("data.cache_dir", "/scratch/cache"),  # each node may have its own
    )
    job = request(IMAGE, *overrides, launch=LAUNCH | {"mounts": f"/fsx={FSX}"} | VPC).job
    errors = check_job_paths("sagemaker", job)
    refused = [("model.path", "/fsxx/model"), ("data.mixture", "/efs/code/")]
    assert [(error.key, error.value) for error in errors] == refused
    assert "give --launch.mounts./efs VALUE: fsx:fs-ID:/MOUNT_NAME or efs:" in errors[1].remedy


def test_setup_with_a_path_that_does_not_exist_yet_is_refused() -> None:
    """The entry point makes the link /fsx after the lines of launch.setup."""
    keys = LAUNCH | VPC | {"mounts": f"/fsx={FSX}"}
    wrong = request(IMAGE, ("launch.setup", "source /fsx/env.sh"), launch=keys)
    assert "use /opt/ml/input/data/fsx" in format_errors(sagemaker.find_errors(wrong)).lower()
    right = ("launch.setup", "source /opt/ml/input/data/fsx/env.sh")
    assert sagemaker.find_errors(request(IMAGE, right, launch=keys)) == []


def test_check_without_botocore_warns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The options are still checked; only a submission needs it."""
    for name in ("botocore", "botocore.session", "botocore.exceptions"):
        monkeypatch.setitem(sys.modules, name, None)
    request_shape.cache_clear()
    assert sagemaker.find_errors(REQUESTS["one"]) == []
    wrong = request(IMAGE, launch=LAUNCH | {"role": "me"})
    assert "must be the ARN" in format_errors(sagemaker.find_errors(wrong))
    path = tmp_path / "launch.json"
    path.write_text(sagemaker.render(REQUESTS["one"]))
    assert sagemaker.check(path.read_text()) == []
    assert "pip install 'weft[sagemaker]'" in capsys.readouterr().err
    with pytest.raises(WeftError, match="SageMaker requires botocore: pip install"):
        sagemaker.submit(path, REQUESTS["one"])


def test_request_has_the_requested_values() -> None:
    payload = json.loads(sagemaker.render(REQUESTS["one"]))
    assert re.fullmatch(r"small-run-\d{6}-\d{6}", payload.pop("TrainingJobName"))
    home = "s3://my-bucket/weft/small-run"
    assert payload == {
        "RoleArn": LAUNCH["role"],
        "AlgorithmSpecification": {
            "TrainingImage": IMAGE[1],
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["python", "-m", "weft.submission.sagemaker_entry"],
            "MetricDefinitions": metric_definitions(
                sagemaker.objective_metrics(REQUESTS["one"].job)
            ),
        },
        "HyperParameters": {
            "recipe": "demo",
            "train.steps": "5",
            "run.cluster": "1x8xH100",
        },
        "InfraCheckConfig": {"EnableInfraCheck": True},
        "ResourceConfig": {
            "InstanceType": "ml.p5.48xlarge",
            "InstanceCount": 1,
            "VolumeSizeInGB": 100,
        },
        "OutputDataConfig": {"S3OutputPath": f"{home}/output"},
        "CheckpointConfig": {"S3Uri": f"{home}/run", "LocalPath": "/opt/ml/checkpoints"},
        "StoppingCondition": {"MaxRuntimeInSeconds": 86400},
        "TensorBoardOutputConfig": {
            "S3OutputPath": f"{home}/tensorboard",
            "LocalPath": "/opt/ml/checkpoints/tensorboard",
        },
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
    words, job = train_arguments(list(parameters.items()), host)
    assert dict(zip(words[1::2], words[2::2], strict=True)) == {
        "--run.cluster": "2x8xH100",
        "--checkpoint.dir": "s3://my-bucket/weft/small-run/checkpoints",
        "--run.dir": "/opt/ml/checkpoints",
    }
    assert job.run.dir == "/opt/ml/checkpoints"


def test_request_data_become_a_channel_unless_a_pattern() -> None:
    payload = json.loads(sagemaker.render(REQUESTS["data"]))
    [channel] = payload["InputDataConfig"]
    assert channel["ChannelName"] == "training"
    assert channel["DataSource"]["S3DataSource"]["S3Uri"] == "s3://texts/web/"
    assert payload["HyperParameters"]["data.path"] == "/opt/ml/input/data/training"
    pattern = request(IMAGE, ("data.path", "s3://texts/*.jsonl"), launch=LAUNCH)
    payload = json.loads(sagemaker.render(pattern))
    assert "InputDataConfig" not in payload
    assert payload["HyperParameters"]["data.path"] == "s3://texts/*.jsonl"


def test_request_setup_runs_before_training(tmp_path: Path) -> None:
    payload = json.loads(
        sagemaker.render(request(IMAGE, ("launch.setup", "pip install x"), launch=LAUNCH))
    )
    entry = payload["AlgorithmSpecification"]["ContainerEntrypoint"]
    assert entry[:2] == ["bash", "-c"]
    assert entry[2] == "set -e\npip install x\nexec python -m weft.submission.sagemaker_entry"


def test_request_mistake_is_reported_for_its_own_key() -> None:
    launch_request = request(
        IMAGE,
        launch=LAUNCH | {"spot": "true"},
    )
    launch = launch_request.job.launch.model_copy(update={"time_limit": "soon"})
    launch_request = replace(
        launch_request, job=launch_request.job.model_copy(update={"launch": launch})
    )
    assert [error.key for error in sagemaker.find_errors(launch_request)] == ["launch.time_limit"]


def test_request_each_mistake_is_reported() -> None:
    keys = {"region": "a", "subnets": "a", "options": "gpu=8"}
    text = format_errors(sagemaker.find_errors(request(launch=keys, nodes=(1, 2))))
    parts = ("role is missing", "instance_type", "bucket", "region", "subnets", "options.gpu")
    for part in parts:
        assert f"launch.{part}" in text
    for part in ("security_groups", "run.nodes", "launch.image", "gpu"):
        assert part in text


# --------------------------------------------------------------------------- the service


class Service(http.server.ThreadingHTTPServer):
    """A service that records requests, and returns prepared answers per operation."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, Any]] = []
        self.answers: dict[str, list[tuple[int, dict[str, Any] | str]]] = {}


class Handler(http.server.BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if "X-Amz-Target" in self.headers:
            operation = self.headers["X-Amz-Target"].partition(".")[2]
            self.server.requests.append((operation, json.loads(body)))
        else:  # EC2, with XML
            query = dict(parse_qsl(body))
            operation = query["Action"]
            self.server.requests.append((operation, query))
        answers = self.server.answers[operation]
        code, answer = answers.pop(0) if len(answers) > 1 else answers[0]
        self.answer(code, (answer if isinstance(answer, str) else json.dumps(answer)).encode())

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
    keys = LAUNCH | {"region": "us-east-1"}
    launch_request = request(IMAGE, launch=keys, recipe=own_recipe(tmp_path))
    path = tmp_path / "launch.json"
    path.write_text(sagemaker.render(launch_request))
    assert sagemaker.submit(path, launch_request) == ARN
    (put, recipe), (operation, body) = service.requests
    assert put == "PUT /my-bucket/weft/small-run/recipe/recipe.toml"
    assert "steps = 7" in recipe
    assert (operation, body) == ("CreateTrainingJob", json.loads(path.read_text()))
    assert body["HyperParameters"]["recipe"] == "/opt/ml/input/data/recipe/recipe.toml"
    assert body["InputDataConfig"][0]["ChannelName"] == "recipe"


SUBNETS = "<R><subnetSet><item><vpcId>vpc-1</vpcId></item></subnetSet></R>"


def fsx_request() -> JobRequest:
    keys = LAUNCH | VPC | {"mounts": f"/fsx={FSX}", "region": "us-east-1"}
    return request(IMAGE, ("data.path", "/fsx/web"), launch=keys)


@pytest.mark.parametrize("is_right", [True, False])
def test_submit_verifies_the_file_system(service: Service, tmp_path: Path, is_right: bool) -> None:
    name, vpc = ("abcdefgh", "vpc-1") if is_right else ("zyxwvuts", "vpc-2")
    answer = {"FileSystems": [{"VpcId": vpc, "LustreConfiguration": {"MountName": name}}]}
    service.answers = {
        "DescribeSubnets": [(200, SUBNETS)],
        "DescribeFileSystems": [(200, answer)],
        "CreateTrainingJob": [(200, {"TrainingJobArn": ARN})],
    }
    path = tmp_path / "launch.json"
    path.write_text(sagemaker.render(fsx_request()))
    if is_right:
        assert sagemaker.submit(path, fsx_request()) == ARN
    else:
        with pytest.raises(InvalidConfig) as caught:
            sagemaker.submit(path, fsx_request())
        first, second = (error.rule for error in caught.value.errors)
        assert "the mount name of fs-0123456789abcdef0, which is zyxwvuts" in first
        assert second == "is in vpc-2, but launch.subnets are in vpc-1"
    asked = [operation for operation, _ in service.requests]
    assert asked[:2] == ["DescribeSubnets", "DescribeFileSystems"]
    assert ("CreateTrainingJob" in asked) == is_right


def test_submit_file_system_of_another_type_is_refused(service: Service, tmp_path: Path) -> None:
    answer = {"FileSystems": [{"VpcId": "vpc-1", "FileSystemType": "ONTAP"}]}
    service.answers = {
        "DescribeSubnets": [(200, SUBNETS)],
        "DescribeFileSystems": [(200, answer)],
    }
    path = tmp_path / "launch.json"
    path.write_text(sagemaker.render(fsx_request()))
    with pytest.raises(InvalidConfig, match="is a file system of type ONTAP, not Lustre"):
        sagemaker.submit(path, fsx_request())


def test_service_that_is_not_reached_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    """In a VPC without an endpoint of the service a connection times out."""
    from botocore.exceptions import ConnectTimeoutError

    class Unreachable:
        def describe_subnets(self, **_: Any) -> None:
            raise ConnectTimeoutError(endpoint_url="https://ec2.us-east-1.amazonaws.com")

        describe_file_systems = describe_subnets

    assert not verify_file_systems(lambda service: Unreachable(), fsx_request())
    first, second = capsys.readouterr().err.splitlines()
    assert "launch.subnets was not verified: Connect timeout on endpoint" in first
    assert "launch.mounts./fsx was not verified" in second


def test_submit_without_permission_to_verify_warns(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    denied = "<R><Errors><Error><Code>UnauthorizedOperation</Code></Error></Errors></R>"
    service.answers = {
        "DescribeSubnets": [(403, denied)],
        "DescribeFileSystems": [(400, {"__type": "AccessDeniedException", "message": "no"})],
        "CreateTrainingJob": [(200, {"TrainingJobArn": ARN})],
    }
    path = tmp_path / "launch.json"
    path.write_text(sagemaker.render(fsx_request()))
    assert sagemaker.submit(path, fsx_request()) == ARN
    warnings = capsys.readouterr().err.splitlines()
    assert warnings == [
        "weft: launch.subnets was not verified: AWS denies ec2:DescribeSubnets",
        "weft: launch.mounts./fsx was not verified: AWS denies fsx:DescribeFileSystems",
    ]


def test_submit_refusal_of_the_service_is_reported(service: Service, tmp_path: Path) -> None:
    refused = {"__type": "ResourceInUse", "message": "names must be unique"}
    service.answers["CreateTrainingJob"] = [(400, refused)]
    launch_request = request(IMAGE, launch=LAUNCH | {"region": "us-east-1"})
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


def job(state: str, **extra: Any) -> tuple[int, dict[str, Any] | str]:
    resources = {"InstanceType": "ml.p5.48xlarge", "InstanceCount": 2, "VolumeSizeInGB": 1}
    return 200, {"TrainingJobStatus": state, "ResourceConfig": resources} | extra


def several(selected: str = "") -> dict[str, Any]:
    """Return the fields of a job with two types of instances, of which one is selected or none."""
    types = ("ml.p5.48xlarge", "ml.p4d.24xlarge")
    resources: dict[str, Any] = {
        "InstancePreferences": [{"InstanceType": name} for name in types],
        "InstanceCount": 2,
        "VolumeSizeInGB": 1,
    }
    if selected:
        resources |= {"SelectedInstanceType": selected, "SelectedInstanceCount": 2}
    return {"ResourceConfig": resources}


def test_status_of_a_job_is_described(service: Service) -> None:
    for answer, line in (
        (job("InProgress", SecondaryStatus="Starting"), "waiting for 2 ml.p5.48xlarge: Starting"),
        (job("InProgress", SecondaryStatus="Training"), "running on 2 ml.p5.48xlarge: Training"),
        (
            job("InProgress", SecondaryStatus="Starting", **several()),
            "waiting for 2 ml.p5.48xlarge or ml.p4d.24xlarge: Starting",
        ),
        (
            job("InProgress", SecondaryStatus="Training", **several("ml.p4d.24xlarge")),
            "running on 2 ml.p4d.24xlarge: Training",
        ),
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

    def page(*events: dict[str, Any], **token: str) -> tuple[int, dict[str, Any] | str]:
        return 200, {"events": events, **token}

    none: tuple[int, dict[str, Any] | str] = (
        400,
        {"__type": "ResourceNotFoundException", "message": "no group"},
    )
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
