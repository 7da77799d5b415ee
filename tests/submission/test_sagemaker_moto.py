"""Jobs are submitted to a real server, and the page's example in Python runs against it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import aws
from tests.harness import ROOT
from tests.submission.requests import own_recipe, request
from tests.submission.test_sagemaker import IMAGE, LAUNCH
from weft.cli.main import main
from weft.config.errors import InvalidConfig
from weft.submission import sagemaker

pytest.importorskip("botocore", reason="needs weft[sagemaker]")
pytestmark = [
    pytest.mark.skipif(bool(aws.missing()), reason=f"needs {', '.join(aws.missing())} (pip)"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    with aws.moto_server() as port:
        yield port


@pytest.fixture
def client(server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    for name, value in aws.variables(server).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    with sagemaker.connect_aws(aws.REGION) as connect:
        yield connect


@pytest.fixture
def network(client: Callable[[str], Any]) -> tuple[str, str]:
    """A subnet and a security group."""
    ec2 = client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.0.0/24")["Subnet"]["SubnetId"]
    group = ec2.create_security_group(GroupName="g", Description="g", VpcId=vpc)["GroupId"]
    return subnet, group


def test_job_with_file_systems_is_created(
    client: Callable[[str], Any], network: tuple[str, str], tmp_path: Path
) -> None:
    """The service gives back what the options say, and the recipe is in the bucket."""
    subnet, group = network
    client("s3").create_bucket(Bucket="my-bucket")
    created = client("fsx").create_file_system(
        FileSystemType="LUSTRE", StorageCapacity=1200, SubnetIds=[subnet]
    )
    fsx = created["FileSystem"]["FileSystemId"]
    mount = created["FileSystem"].get("LustreConfiguration", {}).get("MountName", "abcdefgh")
    efs = client("efs").create_file_system()["FileSystemId"]
    client("efs").create_mount_target(FileSystemId=efs, SubnetId=subnet)
    storage = {"mounts": f"/fsx=fsx:{fsx}:/{mount},/efs=efs:{efs}:/"}
    job = request(
        IMAGE,
        ("data.path", "/fsx/texts"),
        ("data.tokenizer", "/efs/tokenizer.json"),
        ("checkpoint.dir", "/fsx/run"),
        launch=LAUNCH | storage | {"subnets": subnet, "security_groups": group},
        recipe=own_recipe(tmp_path),
        nodes=(2, 2),
    )
    assert sagemaker.find_errors(job) == []
    path = tmp_path / "launch.json"
    path.write_text(sagemaker.render(job))
    id = sagemaker.submit(path, job)
    stored = client("s3").get_object(Bucket="my-bucket", Key="weft/small-run/recipe/recipe.toml")
    assert "/efs/tokenizer.json" in stored["Body"].read().decode()
    sent = json.loads(path.read_text())
    described = client("sagemaker").describe_training_job(TrainingJobName=sent["TrainingJobName"])
    assert described["TrainingJobArn"] == id
    for name, value in sent.items():
        if name != "AlgorithmSpecification" and name in described:
            assert described[name] == value, name
    channels = {c["ChannelName"]: c["DataSource"] for c in described["InputDataConfig"]}
    source = channels["fsx"]["FileSystemDataSource"]
    assert source == {
        "FileSystemId": fsx,
        "FileSystemAccessMode": "rw",
        "FileSystemType": "FSxLustre",
        "DirectoryPath": f"/{mount}",
    }
    assert channels["efs"]["FileSystemDataSource"]["FileSystemAccessMode"] == "ro"
    assert sagemaker.status(id) == "completed"
    # After its time limit, under another name and with the same checkpoints.
    sent["TrainingJobName"] = "small-run-260101-000000"
    path.write_text(json.dumps(sent))
    again = sagemaker.resubmit(path, id)
    resent = json.loads(path.read_text())
    assert again != id
    assert resent.pop("TrainingJobName") != sent.pop("TrainingJobName")
    assert resent == sent


def test_job_with_file_systems_that_do_not_exist_is_refused(
    client: Callable[[str], Any], network: tuple[str, str], tmp_path: Path
) -> None:
    """Nothing is submitted, and both are reported at once."""
    subnet, group = network
    storage = {"mounts": "/fsx=fsx:fs-0123456789abcdef0:/abcdefgh,/efs=efs:fs-01234567:/"}
    job = request(
        IMAGE,
        ("data.path", "/fsx/texts"),
        ("data.tokenizer", "/efs/tokenizer.json"),
        launch=LAUNCH | storage | {"subnets": f"{subnet},subnet-0", "security_groups": group},
    )
    path = tmp_path / "launch.json"
    path.write_text(sagemaker.render(job))
    with pytest.raises(InvalidConfig) as caught:
        sagemaker.submit(path, job)
    keys = [error.key for error in caught.value.errors]
    assert keys == ["launch.subnets", "launch.mounts./fsx", "launch.mounts./efs"]
    jobs = client("sagemaker").list_training_jobs()["TrainingJobSummaries"]
    name = json.loads(path.read_text())["TrainingJobName"]
    assert name not in [job["TrainingJobName"] for job in jobs]


def test_example_of_the_page_runs(
    client: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The block that submits a job from a notebook, with the page's recipe without its FSx."""
    page = (ROOT / "docs/sagemaker.md").read_text("utf-8")
    section = page.partition("## Notebooks")[2].partition("\n## ")[0]
    submit, read = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    keys = "\n".join(f'{name} = "{value}"' for name, value in LAUNCH.items())
    image = f'[launch]\nimage = "{IMAGE[1]}"\n{keys}\n'
    (tmp_path / "mine.toml").write_text(
        f'extends = "demo"\n{image}[train]\nglobal_batch_size = 16\n'
    )
    s3 = client("s3")
    s3.create_bucket(Bucket="my-bucket")
    row = {"step": 1, "loss": 2.5, "eval_loss": None, "tokens_per_second": 10}
    body = json.dumps(row).encode()
    s3.put_object(Bucket="my-bucket", Key="weft/mine/run/metrics.jsonl", Body=body)
    scope: dict[str, Any] = {}
    exec(submit, scope)
    assert scope["job"].status() == "completed"
    assert (tmp_path / "runs/mine/launch.json").exists()
    capsys.readouterr()
    assert main(["job", "dashboard", "runs/mine"]) == 0
    dashboard = capsys.readouterr().out
    cloudwatch = client("cloudwatch")
    created = cloudwatch.put_dashboard(DashboardName="mine", DashboardBody=dashboard)
    assert not created.get("DashboardValidationMessages")
    assert cloudwatch.get_dashboard(DashboardName="mine")["DashboardBody"] == dashboard
    exec(read, scope)
    assert scope["metrics"]["loss"].tolist() == [2.5]
