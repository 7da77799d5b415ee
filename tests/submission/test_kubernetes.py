"""Manifests for Kubernetes; validation by Kubeflow's models needs weft[kubernetes]."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.submission.requests import fake_tool, format_errors, own_recipe, request
from weft.config.errors import WeftError
from weft.preparation.environment import detect_environment
from weft.submission import kubernetes, submit
from weft.submission.job_request import is_active

LAUNCH = {"mounts": "/runs=pvc:shared"}
IMAGE = ("launch.image", "registry/weft:1")


def documents(text: str) -> dict[str, Any]:
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def job_of(result: dict[str, Any]) -> dict[str, Any]:
    """Return the spec of the Indexed Job of either kind."""
    if "JobSet" in result:
        spec = result["JobSet"]["spec"]
    else:
        spec = result["TrainingRuntime"]["spec"]["template"]["spec"]
    [job] = spec["replicatedJobs"]
    assert job["name"] == "node"
    return dict(job["template"]["spec"])


def pod_of(result: dict[str, Any]) -> dict[str, Any]:
    return dict(job_of(result)["template"]["spec"])


REQUESTS = {
    "cpu": request(IMAGE, launch=LAUNCH | {"cpus": "4", "memory": "16"}),
    "gpu": request(IMAGE, ("train.steps", "5"), launch=LAUNCH, nodes=(4, 4), devices=8),
    "efa": request(
        IMAGE,
        ("launch.setup", "ulimit -l unlimited"),
        launch=LAUNCH | {"network": "efa:32", "namespace": "train", "role": "trainer"},
        nodes=(2, 2),
        devices=8,
    ),
    "elastic": request(IMAGE, launch=LAUNCH, nodes=(2, 4), devices=8),
}
KINDS = {
    name: request(IMAGE, launch=LAUNCH | {"kind": name}, nodes=(2, 4), devices=8)
    for name in ("trainjob", "jobset")
}


@pytest.mark.parametrize("name", [*REQUESTS, *KINDS])
def test_manifest_is_valid_for_the_kubernetes_models(name: str) -> None:
    pytest.importorskip("kubeflow_trainer_api", reason="needs weft[kubernetes]")
    launch_request = (REQUESTS | KINDS)[name]
    assert kubernetes.find_errors(launch_request) == []
    assert kubernetes.check(kubernetes.render(launch_request)) == []


def test_manifest_with_mistakes_is_refused_by_the_models(tmp_path: Path) -> None:
    pytest.importorskip("kubeflow_trainer_api", reason="needs weft[kubernetes]")
    launch_request = request(IMAGE, launch=LAUNCH, recipe=own_recipe(tmp_path), nodes=(2, 2))
    text = kubernetes.render(launch_request)
    assert kubernetes.check(text) == []
    [wrong] = kubernetes.check(text.replace("restartPolicy:", "restartPolice:"))
    assert "no field" in wrong
    assert wrong.endswith("restartPolice")
    assert kubernetes.check(text.replace("backoffLimit: 6", "backoffLimit: six"))
    assert kubernetes.check(text.replace("action: FailJob", "action: Explode"))
    assert "is not one of" in kubernetes.check(text.replace("kind: TrainJob", "kind: TrianJob"))[0]


def test_trainjob_manifest_has_the_requested_values() -> None:
    result = documents(kubernetes.render(REQUESTS["gpu"]))
    assert result["TrainJob"]["spec"] == {
        "runtimeRef": {
            "apiGroup": "trainer.kubeflow.org",
            "kind": "TrainingRuntime",
            "name": "small-run",
        },
        "trainer": {"numNodes": 4},
    }
    assert result["TrainingRuntime"]["spec"]["mlPolicy"] == {"numNodes": 4, "torch": {}}
    pod = pod_of(result)
    [container] = pod["containers"]
    assert container["command"] == [
        *("weft", "train", "demo", "--train.steps", "5"),
        *("--run.cluster", "4x8xH100", "--run.dir", "/runs/small-run"),
    ]
    gpus = {"nvidia.com/gpu": "8"}
    assert container["resources"] == {"requests": gpus, "limits": gpus}
    shm = {"name": "shm", "emptyDir": {"medium": "Memory"}}
    runs = {"name": "runs", "persistentVolumeClaim": {"claimName": "shared"}}
    assert pod["volumes"] == [shm, runs]
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert pod["terminationGracePeriodSeconds"] == 600


def test_manifest_pod_failure_policy_follows_exit_statuses() -> None:
    job = job_of(documents(kubernetes.render(REQUESTS["gpu"])))
    rules = job["podFailurePolicy"]["rules"]
    by_status = {
        status: rule["action"]
        for rule in rules
        if "onExitCodes" in rule
        for status in rule["onExitCodes"]["values"]
    }
    assert by_status == {75: "Ignore", 1: "FailJob", 2: "FailJob"}
    assert job["activeDeadlineSeconds"] == 86400
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # a pod failure policy needs Never


def test_manifest_for_efa_requests_adapters() -> None:
    result = documents(kubernetes.render(REQUESTS["efa"]))
    pod = pod_of(result)
    [container] = pod["containers"]
    limits = {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "32"}
    assert container["resources"] == {"requests": limits, "limits": limits}
    assert container["env"] == [{"name": "FI_EFA_USE_HUGE_PAGE", "value": "0"}]
    assert container["command"][:2] == ["bash", "-c"]
    assert container["command"][2].startswith("set -e\nulimit -l unlimited\nexec weft train demo")
    assert result["TrainJob"]["metadata"]["namespace"] == "train"
    assert pod["serviceAccountName"] == "trainer"


def test_manifest_requests_nearly_the_whole_node_of_a_known_type() -> None:
    launch = LAUNCH | {"instance_type": "p5.48xlarge"}
    requested = request(IMAGE, launch=launch, nodes=(2, 2), devices=8)
    [container] = pod_of(documents(kubernetes.render(requested)))["containers"]
    assert container["resources"]["requests"] == {
        "cpu": "183",
        "memory": "1844Gi",
        "nvidia.com/gpu": "8",
        "vpc.amazonaws.com/efa": "32",
    }
    assert container["resources"]["limits"] == container["resources"]["requests"]
    assert list(kubernetes.find_warnings(requested)) == []
    unknown = request(IMAGE, launch=LAUNCH, devices=8)
    [warning] = kubernetes.find_warnings(unknown)
    assert "launch.cpus and launch.memory are not given" in warning


PLACED = {
    "queue": "team-a",
    "priority": "high",
    "topology": "required:topology.k8s.aws/network-node-layer-3",
    "node_labels": "sagemaker.amazonaws.com/node-health-status=Schedulable,zone=a|b",
    "tolerations": "nvidia.com/gpu,team=a",
    "exclude": "node-7",
    "pull_secrets": "registry",
    "labels": "project=llm",
    "env": "NCCL_DEBUG=INFO",
    "secrets": "HF_TOKEN=k8s-secret:hf/token",
    "mounts": "/runs=pvc:shared/runs,/fsx=pvc:shared,/nvme=host:/mnt/k8s-disks/0,/opt/m=image",
}


@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
def test_manifest_places_the_pods(kind: str) -> None:
    requested = request(IMAGE, launch=PLACED | {"kind": kind}, nodes=(2, 2), devices=8)
    assert kubernetes.find_errors(requested) == []
    text = kubernetes.render(requested)
    assert kubernetes.check(text) == []
    result = documents(text)
    top = result["JobSet" if kind == "jobset" else "TrainJob"]
    assert top["metadata"]["labels"] == {
        "project": "llm",
        "kueue.x-k8s.io/queue-name": "team-a",
        "kueue.x-k8s.io/priority-class": "high",
    }
    assert top["spec"]["suspend"] is True
    template = job_of(result)["template"]
    assert template["metadata"] == {
        "labels": {"project": "llm"},
        "annotations": {
            "kueue.x-k8s.io/podset-required-topology": "topology.k8s.aws/network-node-layer-3"
        },
    }
    pod = template["spec"]
    affinity = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert affinity["nodeSelectorTerms"][0]["matchExpressions"] == [
        {
            "key": "sagemaker.amazonaws.com/node-health-status",
            "operator": "In",
            "values": ["Schedulable"],
        },
        {"key": "zone", "operator": "In", "values": ["a", "b"]},
        {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["node-7"]},
    ]
    assert pod["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists"},
        {"key": "team", "operator": "Equal", "value": "a"},
    ]
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    [container] = pod["containers"]
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert set(mounts) == {"/dev/shm", "/runs", "/fsx", "/nvme"}
    assert mounts["/runs"]["subPath"] == "runs"
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounts["/nvme"]["name"]]["hostPath"] == {"path": "/mnt/k8s-disks/0"}
    assert volumes[mounts["/fsx"]["name"]]["persistentVolumeClaim"] == {"claimName": "shared"}
    secret = {"secretKeyRef": {"name": "hf", "key": "token"}}
    assert {"name": "HF_TOKEN", "valueFrom": secret} in container["env"]
    assert {"name": "NCCL_DEBUG", "value": "INFO"} in container["env"]


def ended_pod(node: str, status: int, message: str, time: str) -> dict[str, Any]:
    end = {"exitCode": status, "message": message, "finishedAt": time}
    states = [{"name": "node", "state": {"terminated": end}}]
    return {"status": {"phase": "Failed", "containerStatuses": states}, "spec": {"nodeName": node}}


@pytest.mark.system
@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
def test_resume_uses_other_nodes_than_the_unhealthy_ones(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The status of a failed job is the first pod's own reason."""
    pods = [
        ended_pod(
            "node-c", 3, "step 4\nweft: rank 3 hangs\n  in all_reduce", "2026-01-01T02:00:00Z"
        ),
        ended_pod("node-b", 69, "weft: GPU 3 has errors", "2026-01-01T01:00:00Z"),
        ended_pod("node-a", 75, "weft: saved", "2026-01-01T00:00:00Z"),
    ]
    (tmp_path / "pods").write_text(json.dumps({"items": pods}))
    failed = [{"type": "Failed", "status": "True", "message": "BackoffLimitExceeded"}]
    (tmp_path / "job").write_text(json.dumps({"status": {"conditions": failed}}))
    body = f"""\
case "$*" in
  *"get pods"*) cat {tmp_path}/pods;;
  *"get {kind}"*) cat {tmp_path}/job;;
esac"""
    calls = fake_tool(tmp_path, monkeypatch, "kubectl", body)
    requested = request(IMAGE, launch=PLACED | {"kind": kind}, nodes=(2, 2), devices=8)
    path = tmp_path / "launch.yaml"
    path.write_text(kubernetes.render(requested))
    before = documents(path.read_text())
    id = f"/{kind}/small-run"
    assert kubernetes.status(id) == "failed: node-b: GPU 3 has errors"
    assert kubernetes.resubmit(path, id) == id
    assert "will not use node-b" in capsys.readouterr().out
    commands = calls.read_text().splitlines()
    assert commands[-1] == f"apply -f {path}"
    assert f"delete {kind} small-run --ignore-not-found" in commands
    after = documents(path.read_text())
    affinity = pod_of(after)["affinity"]["nodeAffinity"]
    [term] = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"][-1]["values"] == ["node-7", "node-b"]
    assert kubernetes.check(path.read_text()) == []
    term["matchExpressions"][-1]["values"] = ["node-7"]
    assert after == before


def test_manifest_on_cpus_requests_no_gpus() -> None:
    text = kubernetes.render(REQUESTS["cpu"])
    assert "nvidia" not in text
    # Equal requests and limits of cores and memory make the QoS class Guaranteed.
    nearly_all = {"cpu": "4", "memory": "16Gi"}
    assert pod_of(documents(text))["containers"][0]["resources"] == {
        "requests": nearly_all,
        "limits": nearly_all,
    }


def test_manifest_with_a_range_of_nodes_is_elastic() -> None:
    for kind, requested in KINDS.items():
        result = documents(kubernetes.render(requested))
        words = pod_of(result)["containers"][0]["command"]
        assert words[-2:] == ["--run.nodes", "2:4"], kind
    job = job_of(documents(kubernetes.render(KINDS["jobset"])))
    assert (job["completions"], job["parallelism"]) == (4, 4)


def test_jobset_pods_find_each_other() -> None:
    """The environment of the pods gives hosts and ranks to the resolver."""
    launch_request = request(IMAGE, launch=LAUNCH | {"kind": "jobset"}, nodes=(2, 2))
    env = pod_of(documents(kubernetes.render(launch_request)))["containers"][0]["env"]
    around = {item["name"]: item.get("value", "1") for item in env}
    environment = detect_environment(around | {"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert (environment.source, environment.nodes) == ("kubernetes", "2")
    assert environment.rendezvous == "small-run-node-0-0.small-run:29400"
    rank = next(item for item in env if item["name"] == "PET_NODE_RANK")
    path = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert rank["valueFrom"] == {"fieldRef": {"fieldPath": path}}


def test_manifest_carries_a_local_recipe(tmp_path: Path) -> None:
    launch_request = request(IMAGE, launch=LAUNCH, recipe=own_recipe(tmp_path))
    result = documents(kubernetes.render(launch_request))
    assert "steps = 7" in result["ConfigMap"]["data"]["recipe.toml"]
    [container] = pod_of(result)["containers"]
    assert container["command"][:3] == ["weft", "train", "/etc/weft/recipe.toml"]
    assert {"name": "recipe", "mountPath": "/etc/weft"} in container["volumeMounts"]


def test_problems_each_mistake_is_reported() -> None:
    text = format_errors(
        kubernetes.find_errors(request(launch={"network": "x", "options": "gpu=8", "role": "A b"}))
    )
    for part in ("launch.mounts./runs is missing", "image", "network", "role", "options.gpu"):
        assert part in text


def test_problems_name_with_a_leading_digit_is_refused() -> None:
    launch_request = replace(REQUESTS["cpu"], name="405b")
    assert "must begin with a letter" in format_errors(kubernetes.find_errors(launch_request))


@pytest.mark.system
def test_submit_calls_kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pods = {
        "items": [
            {"status": {"phase": "Running"}, "spec": {"nodeName": "node-b"}},
            {"status": {"phase": "Pending"}, "spec": {}},
        ]
    }
    (tmp_path / "pods").write_text(json.dumps(pods))
    (tmp_path / "job").write_text('{"status": {}}')
    body = f"""\
case "$*" in
  *"get pods"*) cat {tmp_path}/pods;;
  *"get trainjob"*"-o json"*) cat {tmp_path}/job;;
  *logs*) echo '[pod/x] a'; echo '[pod/x] b';;
esac"""
    calls = fake_tool(tmp_path, monkeypatch, "kubectl", body)
    id = kubernetes.submit(tmp_path / "run.yaml", REQUESTS["efa"])
    assert id == "train/trainjob/small-run"
    assert kubernetes.status(id) == "running: 1 of 2 pods, on node-b"
    failed = [{"type": "Failed", "status": "True", "message": "no luck"}]
    (tmp_path / "job").write_text(json.dumps({"status": {"conditions": failed}}))
    assert kubernetes.status(id) == "failed: no luck"
    assert list(kubernetes.logs(id, Path(), follow=True)) == ["[pod/x] a", "[pod/x] b"]
    assert "600 s to save" in kubernetes.cancel(id)
    (tmp_path / "job").write_text("")  # kubectl prints nothing with --ignore-not-found
    assert not is_active(missing := kubernetes.status(id)), missing
    commands = calls.read_text().splitlines()
    label = "-l jobset.sigs.k8s.io/jobset-name=small-run"
    assert commands[:2] == [
        "--namespace=train get trainjob small-run --ignore-not-found -o name",
        f"--namespace=train apply -f {tmp_path}/run.yaml",
    ]
    assert (
        f"--namespace=train logs {label} --prefix --tail=-1 --follow --max-log-requests=1000"
        in commands
    )
    for what in ("trainjob small-run", "trainingruntime small-run", "configmap small-run-recipe"):
        assert f"--namespace=train delete {what} --wait=false --ignore-not-found" in commands


@pytest.mark.system
def test_submit_existing_object_is_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_tool(tmp_path, monkeypatch, "kubectl", "echo trainjob/small-run")
    with pytest.raises(WeftError, match="trainjob small-run already exists"):
        kubernetes.submit(tmp_path / "run.yaml", REQUESTS["gpu"])
    assert calls.read_text().count("\n") == 1


@pytest.mark.system
def test_submit_failure_deletes_the_created_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = 'case "$*" in apply*) echo admission denied it >&2; exit 1;; esac'
    calls = fake_tool(tmp_path, monkeypatch, "kubectl", body)
    with pytest.raises(WeftError, match="admission denied it"):
        kubernetes.submit(tmp_path / "run.yaml", REQUESTS["gpu"])
    last = calls.read_text().splitlines()[-1]
    assert last == f"delete --ignore-not-found --wait=false -f {tmp_path}/run.yaml"


@pytest.mark.parametrize("cluster", ["kubernetes", "skypilot", "sagemaker"])
def test_problems_directory_that_the_cluster_would_rename_is_refused(cluster: str) -> None:
    """Else two run directories could silently become one on the nodes."""
    module = submit.get_cluster(cluster)
    requested = replace(request(IMAGE, launch=LAUNCH), run_dir=Path("/fsx/Small_Run"))
    expected = "Use another --run.dir, such as /fsx/small-run"
    assert expected in format_errors(module.find_errors(requested))
    assert expected not in format_errors(module.find_errors(request(IMAGE, launch=LAUNCH)))


def test_render_names_the_run_directory() -> None:
    head = kubernetes.render(REQUESTS["gpu"]).splitlines()[:2]
    assert head[0].endswith("its directory is /runs/small-run in the pods.")
    assert head[1].startswith("# /fsx/small-run on the submitting machine")


@pytest.mark.parametrize(
    "value",
    [
        "x\ny: z",
        "'; touch pwned; '",
        "$(touch pwned)",
        "# x",
        "&a *b",
        "{{ name }}",
        "\x85😀\u2028",
    ],
)
def test_render_of_a_hostile_value_keeps_it_one_word(value: str) -> None:
    """The value reads back unchanged, with and without a shell around the command."""
    for setup in ([], [("launch.setup", "cd .")]):
        launch_request = request(IMAGE, *setup, launch=LAUNCH)
        launch_request = replace(
            launch_request, overrides={**launch_request.overrides, "data.text_field": value}
        )
        [container] = pod_of(documents(kubernetes.render(launch_request)))["containers"]
        words = container["command"]
        if setup:
            assert words[:2] == ["bash", "-c"]
            shell = words[2].replace("exec weft", "printf '%s\\0' weft")
            out = subprocess.run(["bash", "-c", shell], capture_output=True, check=True).stdout
            words = out.decode().split("\0")[:-1]
        assert words[-2:] == ["--data.text_field", value]
