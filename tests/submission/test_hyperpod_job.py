"""The HyperPodPyTorchJob of `launch.kind = hyperpod`, checked against the model of Amazon's CLI."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.small import small_job
from tests.submission.hyperpod_operator import RULES
from tests.submission.requests import fake_tool, format_errors, own_recipe, request
from weft.planning.plan import Machine
from weft.submission import kubernetes
from weft.submission.hyperpod import hang_rule
from weft.submission.submit import build_request

jsonschema = pytest.importorskip("jsonschema")
SCHEMA = json.loads(Path(__file__).with_name("hyperpod_pytorch_job.json").read_text("utf-8"))
LAUNCH = {"mounts": "/runs=pvc:shared", "image": "registry/weft:1", "kind": "hyperpod"}
FULL = LAUNCH | {
    "network": "efa:32",
    "namespace": "hyperpod-ns-a",
    "queue": "hyperpod-ns-a-localqueue",
    "priority": "high-priority",
    "topology": "preferred:topology.k8s.aws/network-node-layer-3",
    "role": "trainer",
    "pull_secrets": "registry",
    "secrets": "HF_TOKEN=k8s-secret:hugging-face/token",
    "env": "NCCL_DEBUG=WARN",
    "cpus": "180",
    "memory": "1900",
    "tolerations": "nvidia.com/gpu",
    "exclude": "hyperpod-i-1",
    "instance_type": "ml.p5.48xlarge",
    "labels": "team=a",
    "setup": "ulimit -l unlimited",
    "time_limit": "12:00:00",
}


def manifest(launch: Mapping[str, str] = LAUNCH, **options: Any) -> dict[str, Any]:
    """Return the checked object of a request."""
    launch_request = request(launch=launch, **({"nodes": (2, 2), "devices": 8} | options))
    assert not kubernetes.find_errors(launch_request)
    text = kubernetes.render(launch_request)
    assert kubernetes.check(text) == []
    (result,) = (d for d in yaml.safe_load_all(text) if d["kind"] == "HyperPodPyTorchJob")
    assert result["apiVersion"] == "sagemaker.amazonaws.com/v1"
    jsonschema.validate(result["spec"], SCHEMA)
    return dict(result)


def script_of(result: dict[str, Any]) -> str:
    (replicas,) = result["spec"]["replicaSpecs"]
    (container,) = replicas["template"]["spec"]["containers"]
    bash, option, script = container["command"]
    assert (bash, option) == ("bash", "-c")
    return str(script)


def test_job_has_the_placement_of_the_other_kinds() -> None:
    result = manifest(FULL)
    assert result["metadata"]["labels"] == {
        "kueue.x-k8s.io/queue-name": "hyperpod-ns-a-localqueue",
        "kueue.x-k8s.io/priority-class": "high-priority",
        "team": "a",
    }
    spec = result["spec"]
    assert spec["nprocPerNode"] == "8"
    (replicas,) = spec["replicaSpecs"]
    assert (replicas["replicas"], "maxReplicas" in replicas, "elasticPolicy" in spec) == (
        2,
        False,
        False,
    )
    template = replicas["template"]
    assert list(template["metadata"]["annotations"]) == ["kueue.x-k8s.io/podset-preferred-topology"]
    pod = template["spec"]
    terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    keys = [term["key"] for term in terms["nodeSelectorTerms"][0]["matchExpressions"]]
    assert "sagemaker.amazonaws.com/node-health-status" in keys
    (container,) = pod["containers"]
    assert container["ports"] == [{"containerPort": 8080}]
    assert container["resources"]["limits"] == {
        "cpu": "180",
        "memory": "1900Gi",
        "nvidia.com/gpu": "8",
        "vpc.amazonaws.com/efa": "32",
    }
    assert spec["runPolicy"]["activeDeadlineSeconds"] == 12 * 3600
    assert spec["runPolicy"]["logMonitoringConfiguration"] == [hang_rule(small_job())]


def test_command_is_the_agent_as_the_first_process() -> None:
    result = manifest(FULL)
    first, second, third, *rest = script_of(result).splitlines()
    assert (first, second) == ("set -e", "ulimit -l unlimited")
    assert third == 'export NNODES="${NNODES:-2}"'
    assert rest[0].startswith('exec hyperpodrun --nnodes "$NNODES" --nproc-per-node 8 ')
    grace = result["spec"]["replicaSpecs"][0]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert f"--shutdown-timeout {grace - 30} " in rest[0]


def planned_spec(*overrides: tuple[str, str]) -> dict[str, Any]:
    """Return the spec of a job on CPU nodes with two cores, as ``weft launch`` plans it."""
    pairs = [(f"launch.{name}", value) for name, value in LAUNCH.items()]
    pairs += [("run.device", "cpu"), ("run.dir", "runs/small-run"), *overrides]
    requested = build_request("kubernetes", "demo", pairs, [], lambda run: Machine("cpu", 2))
    result = yaml.safe_load(kubernetes.render(requested))
    jsonschema.validate(result["spec"], SCHEMA)
    return dict(result)


def test_ranks_of_a_node_follow_from_the_plan() -> None:
    """The agent starts them, so the manifest has their number, also without GPUs."""
    result = planned_spec(("run.nodes", "2"))
    assert result["spec"]["nprocPerNode"] == "2"
    assert "--nproc-per-node 2 " in script_of(result)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ("24", {"replicaIncrementStep": 1}),
        ("8", {"replicaDiscreteValues": [2, 4]}),  # 3 nodes do not divide the batch
    ],
)
def test_elastic_job_has_the_node_counts_of_the_plan(batch: str, expected: dict[str, Any]) -> None:
    result = planned_spec(("run.nodes", "2:4"), ("train.global_batch_size", batch))
    bounds = {"minReplicas": 2, "maxReplicas": 4, "gracefulShutdownTimeoutInSeconds": 600}
    assert result["spec"]["elasticPolicy"] == bounds | expected
    (replicas,) = result["spec"]["replicaSpecs"]
    assert (replicas["replicas"], replicas["maxReplicas"]) == (2, 4)


def test_recipe_of_the_user_is_in_a_config_map(tmp_path: Path) -> None:
    result = manifest(recipe=own_recipe(tmp_path))
    assert "-m \\\n  weft train /etc/weft/recipe.toml" in script_of(result)


def test_time_limit_of_the_ranks_is_refused() -> None:
    limited = request(("resilience.time_limit", "60"), launch=LAUNCH)
    text = format_errors(kubernetes.find_errors(limited))
    assert "resilience.time_limit=60.0 makes the operator of HyperPod restart the ranks" in text
    assert "launch.time_limit" in text


def test_page_has_the_rule_of_the_manifest() -> None:
    assert RULES["hang"] == hang_rule(small_job())


def test_patch_adds_the_other_rules_of_the_page(tmp_path: Path) -> None:
    rules = [rule for name, rule in RULES.items() if name != "hang"]
    policy = {"logMonitoringConfiguration": rules}
    patch = {"kind": "HyperPodPyTorchJob", "spec": {"runPolicy": policy}}
    (tmp_path / "patch.yaml").write_text(yaml.safe_dump(patch))
    launch_request = request(launch=LAUNCH | {"patch": str(tmp_path / "patch.yaml")})
    spec = yaml.safe_load(kubernetes.render(launch_request))["spec"]
    merged = spec["runPolicy"]["logMonitoringConfiguration"]
    assert [rule["name"] for rule in merged] == list(RULES)
    assert spec["runPolicy"]["cleanPodPolicy"] == "All"


@pytest.mark.parametrize(
    ("overrides", "seconds"),
    [
        ([("monitor.log_interval", "100")], 12000),
        ([("monitor.log_interval", "10"), ("resilience.step_timeout", "900")], 9000),
        ([("monitor.log_interval", "10"), ("resilience.step_timeout", "5")], 3600),
    ],
)
def test_hang_rule_waits_longer_than_steps_may_take(
    overrides: list[tuple[str, str]], seconds: int
) -> None:
    assert hang_rule(small_job(*overrides))["expectedRecurringFrequencyInSeconds"] == seconds


def test_mistake_in_the_pod_is_refused_before_submission() -> None:
    pytest.importorskip("kubeflow_trainer_api", reason="needs weft[kubernetes]")
    text = kubernetes.render(request(launch=LAUNCH))
    assert kubernetes.check(text) == []
    (error,) = kubernetes.check(text.replace("volumeMounts:", "volumeMount:"))
    assert error == "HyperPodPyTorchJob: no field .spec.containers[0].volumeMount"


def test_schema_refuses_what_the_operator_would_refuse() -> None:
    spec = manifest()["spec"]
    for wrong in (
        spec | {"nprocPerNode": 8},
        spec | {"runPolicy": {"restartPolicy": {"maxFullJobRestarts": 1}}},
        spec | {"elasticPolice": {}},
        spec | {"replicaSpecs": [{"replicas": 2}]},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, SCHEMA)


@pytest.mark.system
def test_job_is_watched_by_kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pods").write_text('{"items": []}')
    (tmp_path / "job").write_text('{"status": {}}')
    body = f"""\
case "$*" in
  *"get pods"*) cat {tmp_path}/pods;;
  *"get hyperpodpytorchjob"*"-o json"*) cat {tmp_path}/job;;
  *logs*) echo '[pod/x] a';;
esac"""
    calls = fake_tool(tmp_path, monkeypatch, "kubectl", body)
    id = kubernetes.submit(tmp_path / "run.yaml", request(launch=FULL))
    assert id == "hyperpod-ns-a/hyperpodpytorchjob/small-run"
    assert kubernetes.status(id) == "waiting: 0 pods, none of them running"
    conditions = [
        {"type": "Created", "status": "True"},
        {"type": "Completed", "status": "True"},
    ]
    (tmp_path / "job").write_text(json.dumps({"status": {"conditions": conditions}}))
    assert kubernetes.status(id) == "complete"
    assert list(kubernetes.logs(id, Path(), follow=False)) == ["[pod/x] a"]
    assert "600 s to save" in kubernetes.cancel(id)
    commands = calls.read_text()
    assert "logs -l HPJob=small-run --prefix" in commands
    assert "get pods -l HPJob=small-run" in commands
    assert "delete hyperpodpytorchjob small-run --wait=false" in commands
    assert "trainingruntime" not in commands
