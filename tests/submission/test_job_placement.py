"""Keys of ``[launch]``: mounts, paths, secrets and patches, for every kind of cluster."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.harness import ROOT
from tests.submission.requests import format_errors, request
from weft.cli.main import main
from weft.config.errors import InvalidConfig
from weft.config.reader import read_job
from weft.config.schema import LaunchSection
from weft.preparation.secrets import resolve_secrets
from weft.submission import job_placement, kubernetes, sagemaker, skypilot, slurm
from weft.submission.job_placement import (
    Mount,
    check_job_paths,
    find_local_modules,
    find_unused_keys,
    merge_fields,
)
from weft.submission.submit import CLUSTERS, get_cluster

IMAGE = ("launch.image", "registry/weft:1")


def test_tables_name_the_clusters_and_every_key_has_a_user() -> None:
    tables = (job_placement.SUPPORTED, job_placement.MOUNT_SOURCES, job_placement.SECRET_SOURCES)
    for table in tables:
        assert set(table) == set(CLUSTERS)
    used = {*job_placement.COMMON.split()}
    for names in job_placement.SUPPORTED.values():
        assert set(names.split()) <= set(LaunchSection.model_fields)
        used |= set(names.split())
    assert set(LaunchSection.model_fields) == used
    page = (ROOT / "docs/placement.md").read_text("utf-8")
    for names in job_placement.SUPPORTED.values():
        assert [name for name in names.split() if f"`{name}`" not in page] == []


def test_placement_finds_the_innermost_mount() -> None:
    launch = {"mounts": "/fsx=pvc:a,/fsx/models=pvc:b/llama,/opt=image"}
    placement = request(launch=launch).placement
    found = {path: placement.find_mount(path) for path in ("/fsx/x", "/fsx/models/y", "/fsxx")}
    assert [mount and mount.source for mount in found.values()] == ["a", "b/llama", None]


@pytest.mark.parametrize("on", ["kubernetes", "sagemaker", "skypilot"])
def test_path_without_a_mount_is_refused_on_every_cluster(
    on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a relative path, which only this machine has; the cache of a node may be its own."""
    monkeypatch.chdir(tmp_path)
    Path("tokenizer.json").write_text("{}")
    paths = [
        *(("data.path", "/fsx/web"), ("data.tokenizer", "tokenizer.json")),
        *(
            ("model.path", "org/name"),
            ("data.cache_dir", "/scratch"),
            ("checkpoint.dir", "s3://b/c"),
        ),
    ]
    errors = check_job_paths(on, request(IMAGE, *paths).job)
    assert [error.key for error in errors] == ["data.path", "data.tokenizer"]
    assert "give --launch.mounts./fsx VALUE: " in errors[0].remedy
    mounted = request(IMAGE, *paths[:1], *paths[2:], launch={"mounts": "/fsx=image"}).job
    assert check_job_paths(on, mounted) == []


def test_path_on_slurm_needs_a_mount_only_in_a_container() -> None:
    path = ("data.path", "/fsx/web")
    assert check_job_paths("slurm", request(path).job) == []
    assert [e.key for e in check_job_paths("slurm", request(IMAGE, path).job)] == ["data.path"]


def test_module_of_this_directory_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes do not have it; on Slurm without an image the job starts in this directory."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").touch()
    job = request(
        IMAGE, ("data.path", "mine:texts"), ("monitor.trackers", "weft.x:y,mine:Tracker")
    ).job
    warnings = list(find_local_modules("kubernetes", job))
    assert [each.partition(" is in")[0] for each in warnings] == [
        "data.path=mine:texts",
        "monitor.trackers=mine:Tracker",
    ]
    assert list(find_local_modules("slurm", request(("data.path", "mine:texts")).job)) == []


def test_run_directory_below_a_mount_is_the_one_of_the_nodes() -> None:
    """Else it is /runs/NAME, and this machine only has the record of the launch."""
    assert request(launch={"mounts": "/fsx=pvc:a"}).node_run_dir == "/fsx/small-run"
    assert request(launch={"mounts": "/fsx=image"}).node_run_dir == "/runs/small-run"
    assert request().node_run_dir == "/runs/small-run"


def test_unused_key_is_a_warning_with_the_clusters_that_use_it() -> None:
    launch = request(launch={"queue": "gpu", "spot": "true"}).job.launch
    [warning] = find_unused_keys("slurm", launch)
    assert warning == (
        "launch.spot has no effect on slurm. Remove it; it is for sagemaker or skypilot."
    )


# --------------------------------------------------------------------------- secrets

SECRET = "hf_0123456789"  # a value, which must be in no message


COMMANDS = {
    "train": ["train", "demo", "--train.steps", "1"],
    "plan": ["plan", "demo", "--json"],
    "verify": ["verify", "demo"],
    "compare": ["compare", "demo", "--vary", "train.seed=1,2"],
    "prepare": ["data", "prepare", "demo"],
    **{on: ["launch", "demo", "--on", on, "--dry-run"] for on in CLUSTERS},
}
WAYS = {  # of writing a secret, and the name that a message may show
    "table": ["--launch.secrets", f"HF_TOKEN={SECRET}"],
    "entry": ["--launch.secrets.HF_TOKEN", SECRET],
    "padding": ["--launch.secrets", f"HF_TOKEN={SECRET}=="],
    "json": ["--launch.secrets", json.dumps({"A": 3, "HF_TOKEN": SECRET})],
    "no name": ["--launch.secrets", SECRET],
    "comma": ["--launch.secrets", f"HF_TOKEN=env:HF_TOKEN,{SECRET}"],
    "misspelled": ["--launch.secret", f"HF_TOKEN={SECRET}"],
    "misspelled entry": ["--launch.secret.HF_TOKEN", SECRET],
    "no section": ["--secrets", f"HF_TOKEN={SECRET}"],
}


@pytest.mark.parametrize(
    ("command", "way"),
    [*((name, "table") for name in COMMANDS), *(("plan", way) for way in WAYS if way != "table")],
)
def test_secret_as_a_value_is_refused_by_every_command_without_showing_it(
    command: str,
    way: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*COMMANDS[command], *WAYS[way]]) == 2
    output = "".join(capsys.readouterr())
    assert "secret" in output
    assert "(not shown)" in output
    assert SECRET not in output
    assert not list(tmp_path.iterdir())


def test_recipe_with_a_secret_is_refused_without_showing_it(tmp_path: Path) -> None:
    for line in (f'secrets = {{A = "{SECRET}"}}', f'secrets = "{SECRET}"', f'secret = "{SECRET}"'):
        (tmp_path / "recipe.toml").write_text(f'extends = "demo"\n[launch]\n{line}\n')
        [error] = read_job(str(tmp_path / "recipe.toml"))[2]
        assert "launch.secret" in str(error)
        assert SECRET not in str(error)


def test_variable_with_an_equals_sign_in_its_value_keeps_its_name() -> None:
    job, _, errors = read_job("demo", [("launch.env", "OPTIONS=a=b,C=1")])
    assert not errors
    assert job.launch.env == {"OPTIONS": "a=b", "C": "1"}


def test_secrets_are_references_in_every_artefact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    aws = "secretsmanager:prod/hf#token"
    texts = [
        kubernetes.render(request(IMAGE, launch={"secrets": "HF_TOKEN=k8s-secret:hf/token"})),
        skypilot.render(
            request(IMAGE, launch={"secrets": "HF_TOKEN=env:HF_TOKEN", "bucket": "s3://bucket"})
        ),
        sagemaker.render(
            request(
                *(IMAGE, ("launch.instance_type", "ml.c5.xlarge"), ("launch.bucket", "s3://abc")),
                launch={"secrets": f"HF_TOKEN={aws}"},
            )
        ),
        slurm.render(request(launch={"secrets": "HF_TOKEN=env:HF_TOKEN"})),
    ]
    for text in texts:
        assert SECRET not in text
        assert "HF_TOKEN" in text
    assert "secretKeyRef" in texts[0]
    assert yaml.safe_load(texts[1])["secrets"] == {"HF_TOKEN": None}
    assert json.loads(texts[2])["Environment"]["WEFT_SECRETS"] == '{"HF_TOKEN":"prod/hf#token"}'


def test_resolve_secrets_keeps_what_is_set() -> None:
    """A rank inherits the value that its node has read."""
    environment = {"WEFT_SECRETS": '{"HF_TOKEN":"prod/hf"}', "HF_TOKEN": SECRET}
    resolve_secrets(environment)
    assert environment == {"HF_TOKEN": SECRET}


KEYS = {
    "kubernetes": {"mounts": "/runs=pvc:runs"},
    "sagemaker": {
        "bucket": "s3://abc",
        "role": "arn:aws:iam::123456789012:role/r",
        "instance_type": "ml.p5.48xlarge",
    },
    "skypilot": {"bucket": "s3://abc"},
    "slurm": {},
}
SOURCES = {"kubernetes": "pvc:a", "sagemaker": "s3://abc/a", "skypilot": "s3://abc"}


POD_PATCH = """
kind: TrainingRuntime
spec: {{template: {{spec: {{replicatedJobs: [
  {{name: node, template: {{spec: {{template: {{spec: {{{}}}}}}}}}}}]}}}}}}
"""


def launch_errors(on: str, **launch: str) -> str:
    mounts = ",".join(filter(None, (KEYS[on].get("mounts"), launch.pop("mounts", ""))))
    keys = KEYS[on] | launch | ({"mounts": mounts} if mounts else {})
    return format_errors(get_cluster(on).find_errors(request(IMAGE, launch=keys)))


@pytest.mark.parametrize("on", ["kubernetes", "sagemaker", "skypilot", "slurm"])
def test_mount_that_hides_what_the_job_needs_is_refused(on: str) -> None:
    source = SOURCES.get(on, "host:/a")
    for path in ("/dev/shm", "/etc/weft", "/usr", "/usr/lib", "/opt/weft", "/proc/x", "/var"):
        assert "would hide a directory that the job needs" in launch_errors(
            on, mounts=f"{path}={source}"
        )
        assert launch_errors(on, mounts=f"{path}=image") == ""  # nothing is mounted
    for path in ("/data", "/usr/local/data", "/home", "/opt/models", "/runs2", "/etc/models"):
        assert launch_errors(on, mounts=f"{path}={source}") == ""
    shared = launch_errors(on, mounts=f"/tmp={source}")
    assert ("share their temporary files" in shared) == (on != "slurm")


def test_mounts_have_different_names_that_every_cluster_accepts() -> None:
    paths = ["/shm", "/recipe", "/agent", "/training", "/train", "/data", "/a/b", "/a-b", "/A/b"]
    paths += ["/a/_b", "/daten/\u00fc", "/\u00fc", f"/{'a' * 64}", f"/{'a' * 65}", f"/{'a' * 63}"]
    names = [Mount(path, "pvc", "a").name for path in paths]
    assert len({*names, "shm", "recipe", "agent", "training", "train"}) == len(names) + 5
    assert all(re.fullmatch("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name) for name in names)
    assert (Mount("/data", "pvc", "a").name, Mount("/a/b", "pvc", "a").name) == ("data", "a-b")
    for on, source in SOURCES.items():
        assert launch_errors(on, mounts=",".join(f"{path}={source}" for path in paths)) == ""


def test_mount_that_the_cluster_would_refuse_is_refused() -> None:
    assert "would hide" in launch_errors("sagemaker", mounts="/opt/ml/model=s3://abc/a")
    assert "would hide" in launch_errors("kubernetes", mounts="/opt/ml/input/config=pvc:a")
    assert "has ':'" in launch_errors("kubernetes", mounts="/a:b=pvc:a")
    assert "another entry mounts" in launch_errors("kubernetes", mounts="/a=pvc:a,/a/=pvc:b")
    for source in ("pvc:a/../b", "pvc:a//b", "host:/a/../b"):
        assert "launch.mounts./a" in launch_errors("kubernetes", mounts=f"/a={source}")


@pytest.mark.parametrize("on", ["kubernetes", "sagemaker", "skypilot", "slurm"])
def test_secret_in_a_visible_variable_is_refused_without_showing_it(on: str) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MLFLOW_PASSWORD"):
        text = launch_errors(on, env=f"{name}=0123456789abcdef")
        assert f"launch.env.{name}" in text
        assert "give it by launch.secrets, with a reference: " in text
        assert "0123456789" not in text
    for line in (f"export A={SECRET}", "HF_TOKEN='0123456789' x", "git clone https://a:b@c/d"):
        text = launch_errors(on, setup=line)
        assert text.startswith('launch.setup="(not shown)" has a secret that everybody')
    env = "TOKENIZERS_PARALLELISM=false,AWS_TOKEN_FILE=/var/run/a/token,EOS_TOKEN=</s>,A=s3://a:b"
    lines = 'export HF_TOKEN=$(cat /run/secrets/hf); export WANDB_API_KEY="$KEY"; a https://a:$B@c'
    assert launch_errors(on, env=env, setup=lines) == ""


def test_secret_that_is_also_in_the_environment_is_not_shown() -> None:
    launch = {"env": f"A={SECRET}", "secrets": "A=secretsmanager:a"}
    text = launch_errors("kubernetes", **launch)
    assert "is also in launch.secrets" in text
    assert SECRET not in text


def test_toleration_may_have_an_effect() -> None:
    taints = "a/gpu,b=true,c:NoExecute,d=x:NoSchedule"
    launch = {"tolerations": taints, "mounts": "/runs=pvc:a"}
    text = kubernetes.render(request(IMAGE, launch=launch))
    runtime = next(yaml.safe_load_all(text))
    [job] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert job["template"]["spec"]["template"]["spec"]["tolerations"] == [
        {"key": "a/gpu", "operator": "Exists"},
        {"key": "b", "operator": "Equal", "value": "true"},
        {"key": "c", "operator": "Exists", "effect": "NoExecute"},
        {"key": "d", "operator": "Equal", "value": "x", "effect": "NoSchedule"},
    ]
    for taint in ("a:Never", "a=b c", "a=b:c"):
        assert "must be KEY[=VALUE][:EFFECT]" in launch_errors("kubernetes", tolerations=taint)


def test_value_that_kubernetes_would_refuse_is_refused(tmp_path: Path) -> None:
    for launch in (
        *({"labels": "a=b c"}, {"labels": "a b=c"}, {"labels": f"a={'b' * 64}"}),
        *({"node_labels": "a=b|c d"}, {"exclude": "bad node"}, {"exclude": "@no-file"}),
        *({"cpus": "0"}, {"memory": "0.0"}),
    ):
        assert f"launch.{next(iter(launch))}" in launch_errors("kubernetes", **launch)
    assert launch_errors("kubernetes", labels="a/b=c", node_labels="a=b|c", cpus="0.5") == ""
    assert "launch.priority" in launch_errors("kubernetes", priority="high")
    assert launch_errors("kubernetes", priority="high", queue="team") == ""
    file = tmp_path / "nodes"
    file.write_text("n7 # slow\n")
    launch = {"exclude": f"n1,@{file}", "mounts": "/runs=pvc:a"}
    assert "n1\n" in (text := kubernetes.render(request(IMAGE, launch=launch)))
    assert "- n7\n" in text


def test_channel_of_s3_is_a_directory_and_not_every_name_with_its_prefix() -> None:
    for path, uri in (
        ("s3://abc/web", "s3://abc/web/"),
        ("s3://abc/web/", "s3://abc/web/"),
        ("s3://abc/web-v1.5", "s3://abc/web-v1.5/"),
        ("s3://abc/chats.jsonl.zst", "s3://abc/chats.jsonl.zst"),
    ):
        launch = KEYS["sagemaker"] | {"mounts": "/models=s3://abc/models"}
        body = json.loads(sagemaker.render(request(IMAGE, ("data.path", path), launch=launch)))
        channels = {
            each["ChannelName"]: each["DataSource"]["S3DataSource"]["S3Uri"]
            for each in body["InputDataConfig"]
        }
        assert channels == {"training": uri, "models": "s3://abc/models/"}


@pytest.mark.parametrize("on", CLUSTERS)
def test_mistyped_template_of_this_machine_is_refused(
    on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("right.jinja").write_text("x")
    wrong = request(("data.chat_template", "wrong.jinja"), ("data.tokenizer", "t/tokenizer.json"))
    errors = check_job_paths(on, wrong.job)
    assert [error.key for error in errors] == ["data.tokenizer", "data.chat_template"]
    assert {error.rule for error in errors} == {"does not exist on this machine"}
    assert check_job_paths(on, request(("data.chat_template", "chatml")).job) == []
    assert check_job_paths("slurm", request(("data.chat_template", "right.jinja")).job) == []


@pytest.mark.parametrize("on", ["kubernetes", "sagemaker", "skypilot"])
def test_image_that_is_no_reference_is_refused(on: str) -> None:
    for image in ("https://registry.io/weft:1", "my image:1", "docker:registry.io/weft:1"):
        keys = KEYS[on] | {"image": image}
        text = format_errors(get_cluster(on).find_errors(request(launch=keys)))
        assert f'launch.image="{image}" must be REGISTRY/NAME:TAG' in text


@pytest.mark.parametrize("on", ["kubernetes", "sagemaker", "skypilot"])
def test_instance_type_with_too_few_gpus_is_refused(on: str) -> None:
    launch = KEYS[on] | {"instance_type": "ml.g5.12xlarge"}
    if on == "sagemaker":
        launch |= {"instance_type": "ml.p5.48xlarge+ml.g5.12xlarge"}
    text = format_errors(get_cluster(on).find_errors(request(IMAGE, launch=launch, devices=8)))
    assert 'launch.instance_type="ml.g5.12xlarge" has 4 GPUs, and run.cluster=1x8xH100' in text
    fits = format_errors(get_cluster(on).find_errors(request(IMAGE, launch=launch, devices=4)))
    assert "launch.instance_type" not in fits


def test_pod_larger_than_its_instance_type_is_refused() -> None:
    for key, value in (("cpus", "192"), ("memory", "4096"), ("network", "efa:64")):
        launch = {"instance_type": "p5.48xlarge", key: value}
        assert launch_errors("kubernetes", **launch).startswith(f"launch.{key}=")
    fitting = {"instance_type": "p5.48xlarge", "cpus": "190", "network": "efa:32"}
    assert launch_errors("kubernetes", **fitting) == ""


def test_pod_with_some_gpus_of_a_node_gets_its_share() -> None:
    launch = KEYS["kubernetes"] | {"instance_type": "p5.48xlarge", "network": "tcp"}
    sizes = [
        kubernetes._resources(request(IMAGE, launch=launch, devices=n))["limits"] for n in (8, 2)
    ]
    assert sizes == [
        {"cpu": "183", "memory": "1844Gi", "nvidia.com/gpu": "8"},
        {"cpu": "45", "memory": "461Gi", "nvidia.com/gpu": "2"},
    ]


def test_reserved_instances_are_no_spot_instances() -> None:
    plan = "arn:aws:sagemaker:us-east-1:123456789012:training-plan/x"
    assert "launch.reservation" in launch_errors("sagemaker", reservation=plan, spot="true")
    assert launch_errors("sagemaker", reservation=plan) == ""


def test_region_of_skypilot_needs_a_cloud_or_the_form_of_aws() -> None:
    assert 'launch.region="gcp" must be a region of AWS' in launch_errors("skypilot", region="gcp")
    for region in ("us-east-1", "us-gov-west-1", "gcp/us-central1"):
        assert "launch.region" not in launch_errors("skypilot", region=region)


def test_node_name_with_a_blank_is_refused_on_slurm() -> None:
    assert "launch.exclude" in launch_errors("slurm", exclude="n 1")
    assert launch_errors("slurm", exclude="n[1-3],@file") == ""


# --------------------------------------------------------------------------- patch


def test_patch_merges_objects_and_named_items() -> None:
    given = {"a": {"b": 1, "c": 2}, "l": [{"name": "x", "v": 1}, {"name": "y"}], "p": [1, 2]}
    patch = {"a": {"b": None, "d": {"e": 3, "f": None}}, "l": [{"name": "x", "w": 2}], "p": [3]}
    assert merge_fields(given, patch) == {
        "a": {"c": 2, "d": {"e": 3}},
        "l": [{"name": "x", "v": 1, "w": 2}, {"name": "y"}],
        "p": [3],
    }


def test_patch_of_a_manifest_changes_the_object_of_its_kind(tmp_path: Path) -> None:
    """The example of the page."""
    page = (ROOT / "docs/placement.md").read_text("utf-8")
    file = tmp_path / "patch.yaml"
    file.write_text(page.partition("```yaml\n")[2].partition("```")[0])
    launch = {"mounts": "/runs=pvc:shared", "patch": str(file)}
    runtime = next(yaml.safe_load_all(kubernetes.render(request(IMAGE, launch=launch))))
    [job] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    assert pod["hostNetwork"] is True
    assert pod["containers"][0]["image"] == "registry/weft:1"
    assert "securityContext" in pod["containers"][0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: TrianJob", "has a document of kind TrianJob, which the manifest does not have"),
        ("- a", "has a document that is not an object"),
        (
            "spec: {}",
            "without the kind of the object that it changes. Write 'kind: TrainingRuntime",
        ),
        ("a: [", "is not valid YAML"),
        (None, "cannot be read: No such file"),
    ],
)
def test_patch_with_a_mistake_is_refused(text: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "patch.yaml"
    if text is not None:
        file.write_text(text)
    launch = {"mounts": "/runs=pvc:shared", "patch": str(file)}
    with pytest.raises(InvalidConfig, match=message):
        kubernetes.render(request(IMAGE, launch=launch))


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "has no field"),
        ("# comments only\n", "has no field"),
        ("---\n", "is not an object"),
        ("weft: 1\nkind: Pod\n", "does not have"),
        (POD_PATCH.format("containers: [{name: trainer, securityContext: {}}]"), "trainer, which"),
        (POD_PATCH.format("initContainers: [{name: sidecar}]"), "sidecar, which has no image"),
    ],
)
def test_patch_that_changes_nothing_or_adds_half_a_container_is_refused(
    text: str, rule: str, tmp_path: Path
) -> None:
    file = tmp_path / "patch.yaml"
    file.write_text(text)
    with pytest.raises(InvalidConfig) as caught:
        kubernetes.render(request(IMAGE, launch=KEYS["kubernetes"] | {"patch": str(file)}))
    assert rule in str(caught.value)


def test_patch_may_add_a_container_with_an_image(tmp_path: Path) -> None:
    file = tmp_path / "patch.yaml"
    file.write_text(POD_PATCH.format("containers: [{name: sidecar, image: a/b:1}]"))
    text = kubernetes.render(request(IMAGE, launch=KEYS["kubernetes"] | {"patch": str(file)}))
    assert "a/b:1" in text
