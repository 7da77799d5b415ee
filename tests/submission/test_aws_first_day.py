"""The first day on AWS: its script, its policies and the commands of the pages.

Each ``aws`` command is checked against botocore's models, and the script's run against moto.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from botocore.session import Session

from tests import aws_cli, pages
from tests.aws import moto_server, variables
from weft.cli.main import main

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "aws_first_day.sh"
POLICIES = ROOT / "docs" / "aws"
PAGES = sorted((ROOT / "docs").glob("*.md"))
ACCOUNT = "123456789012"
STEPS = re.findall(r"^#   ([a-z]+) {2,}", SCRIPT.read_text("utf-8"), re.MULTILINE)
# moto has neither these operations nor quotas of SageMaker.
ANSWERS = {
    "fsx.CreateDataRepositoryAssociation": {
        "Association": {"AssociationId": "dra-0123456789abcdef0"}
    },
    "fsx.DescribeDataRepositoryAssociations": {"Associations": [{"Lifecycle": "AVAILABLE"}]},
}


@pytest.fixture(scope="module")
def aws() -> Iterator[Mapping[str, str]]:
    """Yield the environment of AWS's clients for moto's server."""
    with moto_server() as port:
        yield variables(port)


def run_script(
    directory: Path, *words: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *words],
        cwd=directory,
        env={"PATH": f"{directory}/bin:/usr/bin:/bin", **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )


def aws_lines(text: str) -> list[list[str]]:
    """Return the words of each command of ``aws`` in a shell script."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="\n|;&()")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, "#"
    commands: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("\n|;&()"):
            commands.append([])
        else:
            commands[-1].append(word)
    return [words[1:] for words in commands if words[:1] == ["aws"]]


def problems(commands: list[list[str]]) -> list[str]:
    results = []
    for words in commands:
        try:
            aws_cli.parse(words)
        except aws_cli.UsageError as error:
            results.append(f"{shlex.join(words)}: {error}")
    return results


def test_script_passes_shellcheck() -> None:
    command = [Path(sys.executable).parent / "shellcheck", SCRIPT]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stdout


def test_script_dry_run_prints_commands_that_the_models_accept(tmp_path: Path) -> None:
    completed = run_script(tmp_path, "--dry-run", *STEPS)
    assert completed.returncode == 0, completed.stderr
    commands = aws_lines(completed.stdout)
    assert problems(commands) == []
    used = {" ".join(words[:2]) for words in commands}
    source = SCRIPT.read_text("utf-8").replace("\\\n", " ")
    assert set(re.findall(r"\baws ([a-z0-9-]+ [a-z-]+)", source)) == used | {
        "s3api head-bucket",
        "s3 rb",
    }
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("ec2 create-vpcs", "no operation"),
        ("ec2 create-vpc --cidr-blok 10.0.0.0/16", "--cidr-blok"),
        ("fsx create-file-system --storage-capacity 1200", "SubnetIds is missing"),
        (
            "fsx create-file-system --file-system-type LUSTRE --subnet-ids subnet-1",
            "does not match",
        ),
        ("fsx describe-file-systems --file-system-ids fs-XYZ", "does not match"),
        ("sagemaker list-training-jobs --status-equals Running", "is not one of"),
        ("iam create-role --role-name weft", "AssumeRolePolicyDocument is missing"),
        ("s3 sync a s3://b --deleted", "unknown option"),
    ],
)
def test_check_of_commands_finds_mistakes(command: str, error: str) -> None:
    (problem,) = problems([command.split()])
    assert error in problem


def test_commands_of_all_pages_are_those_of_the_models() -> None:
    commands = []
    for page in PAGES:
        text = page.read_text("utf-8").replace("\\\n", " ")
        lines = re.findall(r"^(?:\$ )?((?:\w+=\$\()?aws .*)$", text, re.MULTILINE)
        commands += [words for line in lines for words in aws_lines(line)]
        # A command in a sentence may be incomplete.
        for line in re.findall(r"`aws ([^`]* --[^`]*)`", text.replace("\n", " ")):
            aws_cli.check_names(line.split())
    assert problems(commands) == []
    assert len(commands) >= 10


def test_page_has_a_claim_of_its_volume(tmp_path: Path) -> None:
    pages.write_files((ROOT / "docs" / "aws-first-day.md").read_text("utf-8"), tmp_path)
    volume, claim = yaml.safe_load_all((tmp_path / "fsx.yaml").read_text())
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    assert claim["spec"]["storageClassName"] == volume["spec"]["storageClassName"] == ""
    assert claim["spec"]["resources"]["requests"] == volume["spec"]["capacity"]
    assert claim["spec"]["accessModes"] == volume["spec"]["accessModes"] == ["ReadWriteMany"]
    csi = volume["spec"]["csi"]
    assert csi["volumeAttributes"]["dnsname"].startswith(f"{csi['volumeHandle']}.fsx.")


# --------------------------------------------------------------------------- on moto


@pytest.fixture
def machine(tmp_path: Path, aws: Mapping[str, str]) -> dict[str, str]:
    """Give a directory with the programs that the script calls; return the environment."""
    (tmp_path / "bin").mkdir()
    programs = {
        "aws": f'exec {sys.executable} -m tests.aws_cli "$@"',
        "docker": f'echo "$@" >>{tmp_path}/docker; [ "$1" != login ] || cat >/dev/null',
    }
    for name, body in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return {
        **aws,
        "PYTHONPATH": str(ROOT),
        "AWS_CLI_LOG": str(tmp_path / "log"),
        "AWS_CLI_ANSWERS": json.dumps(ANSWERS),
        "POLL_SECONDS": "0",
        "HOME": str(tmp_path),
    }


def calls(directory: Path) -> list[str]:
    log = directory / "log"
    lines = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return [f"{service}.{name}" for service, name, _ in map(json.loads, lines)]


def client(name: str, environment: Mapping[str, str]) -> Any:
    session = Session()
    return session.create_client(
        name,
        region_name="us-east-1",
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_script_makes_an_account_ready_and_removes_all(
    tmp_path: Path, machine: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data" / "web").mkdir(parents=True)
    (tmp_path / "data" / "web" / "a.jsonl").write_text('{"text": "one"}\n')
    steps = ["bucket", "role", "image", "network", "filesystem", "data", "recipe"]
    # moto does not know the image, because the fake docker pushes nothing.
    images = {"ecr.DescribeImages": {"imageDetails": [{"imageTags": ["x"], "imageSizeInBytes": 7}]}}
    machine["AWS_CLI_ANSWERS"] = json.dumps(ANSWERS | images)
    made = run_script(tmp_path, *steps, environment=machine)
    assert made.returncode == 0, made.stderr
    first = calls(tmp_path)
    assert "fsx.CreateFileSystem" in first
    bucket = f"weft-{ACCOUNT}-us-east-1"
    s3 = client("s3", machine)
    (item,) = s3.list_objects_v2(Bucket=bucket)["Contents"]
    assert item["Key"] == "data/web/a.jsonl"

    # The network is what EFA and FSx need.
    ec2 = client("ec2", machine)
    (group,) = ec2.describe_security_groups(GroupNames=["weft"])["SecurityGroups"]
    for rules in (group["IpPermissions"], group["IpPermissionsEgress"]):
        pairs = [
            pair
            for rule in rules
            for pair in rule["UserIdGroupPairs"]
            if rule["IpProtocol"] == "-1"
        ]
        assert [pair["GroupId"] for pair in pairs] == [group["GroupId"]]
    (endpoint,) = ec2.describe_vpc_endpoints()["VpcEndpoints"]
    assert (endpoint["VpcId"], endpoint["VpcEndpointType"]) == (group["VpcId"], "Gateway")
    assert endpoint["RouteTableIds"]

    # The role's policy has no placeholder left.
    policy = client("iam", machine).get_role_policy(RoleName="weft", PolicyName="job")
    assert not re.search("ACCOUNT|REGION|BUCKET|NAME", json.dumps(policy["PolicyDocument"]))

    # A job can be made of the recipe.
    monkeypatch.chdir(tmp_path)
    words = ["launch", "mine.toml", "--run.dir", "runs/mine", "--on", "sagemaker"]
    assert main([*words, "--run.cluster", "2x8xH100", "--dry-run"]) == 0

    # The same steps again make nothing new.
    again = run_script(tmp_path, *steps, environment=machine)
    assert again.returncode == 0, again.stderr
    second = calls(tmp_path)
    assert [call for call in second if ".Create" in call or "Authorize" in call] == []

    removed = run_script(tmp_path, "teardown", environment=machine | {"DELETE_BUCKET": "yes"})
    assert removed.returncode == 0, removed.stderr
    assert client("fsx", machine).describe_file_systems()["FileSystems"] == []
    assert [v["VpcId"] for v in ec2.describe_vpcs()["Vpcs"] if not v["IsDefault"]] == []
    assert client("ecr", machine).describe_repositories()["repositories"] == []
    assert client("iam", machine).list_roles()["Roles"] == []
    assert s3.list_buckets()["Buckets"] == []
    assert not (tmp_path / "weft-aws.env").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_script_continues_after_a_step_that_failed(tmp_path: Path, machine: dict[str, str]) -> None:
    missing = run_script(tmp_path, "filesystem", environment=machine)
    assert missing.returncode != 0
    assert "run the step network first" in missing.stderr
    failed = {"fsx.DescribeDataRepositoryAssociations": {"Associations": [{"Lifecycle": "FAILED"}]}}
    broken = machine | {"AWS_CLI_ANSWERS": json.dumps(ANSWERS | failed)}
    stopped = run_script(tmp_path, "network", "filesystem", environment=broken)
    assert stopped.returncode == 1
    assert "is FAILED, not AVAILABLE" in stopped.stderr
    calls(tmp_path)
    resumed = run_script(tmp_path, "network", "filesystem", environment=machine)
    assert resumed.returncode == 0, resumed.stderr
    assert [call for call in calls(tmp_path) if ".Create" in call] == []
    assert run_script(tmp_path, "teardown", environment=machine).returncode == 0


def test_script_refuses_an_unknown_step(tmp_path: Path) -> None:
    completed = run_script(tmp_path, "--dry-run", "bucket", "no-such-step")
    assert completed.returncode == 2
    assert completed.stdout == ""
    assert "no step no-such-step" in completed.stderr


# --------------------------------------------------------------------------- policies


def fill(text: str) -> str:
    values = {"ACCOUNT": ACCOUNT, "REGION": "us-east-1", "BUCKET": "my-bucket", "NAME": "weft"}
    for name, value in values.items():
        text = text.replace(name, value)
    return text


@pytest.mark.slow
def test_policies_have_actions_and_resources_that_exist(tmp_path: Path) -> None:
    """cfn-lint knows the actions of each service, and the form of policies and ARNs."""
    documents = {
        name: json.loads(fill((POLICIES / f"{name}-policy.json").read_text("utf-8")))
        for name in ("job", "launch")
    }
    documents["wrong"] = json.loads(json.dumps(documents["job"]))
    documents["wrong"]["Statement"][0]["Action"] = ["s3:GetObjekt"]
    resources = {
        name: {"Type": "AWS::IAM::ManagedPolicy", "Properties": {"PolicyDocument": document}}
        for name, document in documents.items()
    }
    (tmp_path / "template.json").write_text(json.dumps({"Resources": resources}))
    command = [Path(sys.executable).parent / "cfn-lint", "-f", "json", tmp_path / "template.json"]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    (fault,) = json.loads(completed.stdout)
    assert fault["Location"]["Path"][1] == "wrong"
    assert "getobjekt" in fault["Message"]


def set_authorization(environment: Mapping[str, str], requests: int) -> None:
    """Let moto check policies after this number of requests; a huge number turns it off."""
    url = f"{environment['AWS_ENDPOINT_URL']}/moto-api/reset-auth"
    headers = {"Content-Type": "text/plain"}
    request = urllib.request.Request(url, str(requests).encode(), headers, method="POST")
    urllib.request.urlopen(request).read()


def make_user(aws: Mapping[str, str], name: str, lacking: str, user: str) -> Mapping[str, str]:
    """Make a user with a policy of docs/aws less one action; return its environment."""
    policy = json.loads(fill((POLICIES / f"{name}-policy.json").read_text("utf-8")))
    for statement in policy["Statement"]:
        actions = statement["Action"]
        if "s3" not in str(actions):
            statement["Resource"] = "*"  # moto knows only the resources of S3
        every = [actions] if isinstance(actions, str) else actions
        statement["Action"] = [action for action in every if action != lacking]
    iam = client("iam", aws)
    iam.create_user(UserName=user)
    iam.put_user_policy(UserName=user, PolicyName=name, PolicyDocument=json.dumps(policy))
    key = iam.create_access_key(UserName=user)["AccessKey"]
    keys = {
        "AWS_ACCESS_KEY_ID": key["AccessKeyId"],
        "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"],
    }
    client("s3", aws).create_bucket(Bucket="my-bucket")
    return {**aws, **keys}


@contextlib.contextmanager
def authorization(aws: Mapping[str, str]) -> Iterator[None]:
    """Let moto check the policies of users."""
    set_authorization(aws, 0)
    try:
        yield
    finally:
        set_authorization(aws, 10**9)


@pytest.mark.system
@pytest.mark.parametrize("lacking", ["", "sagemaker:CreateTrainingJob", "s3:PutObject"])
def test_launch_policy_suffices_to_submit_a_job_and_to_see_its_status(
    lacking: str,
    aws: Mapping[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """moto refuses a request whose action the user's policy does not allow."""
    user = f"user-{lacking.replace(':', '-').lower() or 'all'}"
    for name, value in make_user(aws, "launch", lacking, user).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(
        'extends = "demo"\n[launch]\nimage = "i"\n'
        f'role = "arn:aws:iam::{ACCOUNT}:role/weft"\ninstance_type = "ml.g5.xlarge"\n'
        'bucket = "s3://my-bucket"\nregion = "us-east-1"\n'
    )
    run_dir = f"runs/{user}"[:40]
    with authorization(aws):
        words = ["launch", "mine.toml", "--run.dir", run_dir, "--on", "sagemaker"]
        status = main([*words, "--run.cluster", "1x1xA10G"])
        output = capsys.readouterr()
        assert (status == 0) == (not lacking), output.err
        if lacking:
            assert "not authorized" in output.err or "AccessDenied" in output.err
        else:
            assert main(["job", "status", run_dir]) == 0
            assert "completed" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("lacking", ["", "s3:PutObject", "s3:GetObject"])
def test_job_policy_suffices_for_checkpoints_in_the_bucket(
    lacking: str, aws: Mapping[str, str], tmp_path: Path
) -> None:
    """weft doctor writes, reads and removes objects as checkpoints do."""
    environment = make_user(aws, "job", lacking, f"job-{lacking.replace(':', '-') or 'all'}")
    source = (
        "from weft.doctor.probes import probe_store\n"
        "print(probe_store('checkpoint.dir', 's3://my-bucket/runs', 1 << 20).error)"
    )
    with authorization(aws):
        done = subprocess.run(
            [sys.executable, "-c", source],
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
            | dict(environment),
            capture_output=True,
            text=True,
            check=False,
        )
    assert (done.stdout.strip() == "") == (not lacking), done.stdout + done.stderr
