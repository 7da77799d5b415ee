"""Nodes of Kubernetes: a Kubeflow TrainJob (Trainer v2), or a JobSet.

Both come to the same: an Indexed Job whose pods run ``weft train``, one a node, with ``PET_*`` in
their environment, from which `weft.train.environment` knows who they are.  Kubeflow sets those of a
TrainJob, and here they are set for a JobSet.  A TrainJob refers to a runtime; it gets one of its
own, because what matters is in there: shared memory, the volume, the time to save, and which exit
statuses start a pod again.

Validated by ``kubeflow_trainer_api``, the published models of both interfaces.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.cluster import FAILED, MISTAKE, REQUEUE
from weft.cluster.scheduler import (
    RUN_DIR,
    WHOLE,
    Option,
    check_name,
    command,
    common_problems,
    lines_of,
    own_recipe,
    script,
    seconds,
    to_yaml,
    tool,
    unchecked,
)
from weft.cluster.submit import Request
from weft.config.errors import ConfigError, WeftError
from weft.train.environment import PORT

ENDING = ".yaml"
KINDS = ("trainjob", "jobset")
OPTIONS = {
    "kind": Option(
        "trainjob (Kubeflow Trainer v2) or jobset", "|".join(KINDS), "must be trainjob or jobset"
    ),
    "claim": Option("PersistentVolumeClaim that all nodes share (ReadWriteMany), mounted at /runs"),
    "namespace": Option("where to; kubectl's own, if not given"),
    "cpu": Option("cores of a node"),
    "memory": Option("of a node: 64Gi"),
    "efa": Option("EFA devices of a node: 32 of a p5.48xlarge", WHOLE, "must be a whole number"),
    "account": Option("service account of the pods"),
}
REMEDY = "see https://kubernetes.io/docs/tasks/tools"
# What ranks have to finish a step and save, after a pod was told to end.
GRACE_SECONDS = 600
# Pods that ended otherwise than by 0, 1, 2, 75 or a disruption: lost, unfit or hung.
LOST_NODES = 6


def problems(request: Request) -> list[ConfigError]:
    """What cannot be asked for here."""
    found = common_problems(request, OPTIONS, ["claim"], r"[A-Za-z0-9][A-Za-z0-9_.\-]*")
    found += check_name(request, f"/runs/{request.name} in the claim")
    if request.name[:1].isdigit():
        rule = f"names the run {request.name}, and what Kubernetes runs begins with a letter"
        found.append(ConfigError("run.dir", str(request.run_dir), rule, "use another --run.dir"))
    if request.job.launch.image == "auto":
        rule = "Kubernetes has no default image, and Kubeflow's has no weft in it"
        found.append(ConfigError("launch.image", "auto", rule, "name one; docs/kubernetes.md"))
    return found


def render(request: Request) -> str:
    """The documents: the recipe unless it is a shipped one, and what runs it."""
    options = request.job.launch.options
    recipe = own_recipe(request)
    documents: list[dict[str, Any]] = []
    if recipe is not None:
        documents.append(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": _metadata(request, f"{request.name}-recipe"),
                "data": {"recipe.toml": recipe},
            }
        )
    if options.get("kind", KINDS[0]) == "jobset":
        documents.append(_jobset(request, recipe is not None))
    else:
        documents += _trainjob(request, recipe is not None)
    space = f" -n {options['namespace']}" if "namespace" in options else ""
    head = (
        f"The nodes of the run {request.name}; its folder is /runs/{request.name} in the claim.\n"
    )
    head += f"It is not in {request.run_dir} of this machine, which has the record of this launch."
    return to_yaml(documents, f"{head}\nkubectl apply{space} -f FILE")


def _metadata(request: Request, name: str) -> dict[str, Any]:
    space = request.job.launch.options.get("namespace")
    return {"name": name} | ({"namespace": space} if space else {})


def _trainjob(request: Request, recipe: bool) -> list[dict[str, Any]]:
    job = {
        "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
        "spec": _job(request, recipe, []),
    }
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": _metadata(request, request.name)
        | {"labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": request.nodes[1], "torch": {}},
            "template": {"spec": {"replicatedJobs": [{"name": "node", "template": job}]}},
        },
    }
    train = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(request, request.name),
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "TrainingRuntime",
                "name": request.name,
            },
            "trainer": {"numNodes": request.nodes[1]},
        },
    }
    return [runtime, train]


def _jobset(request: Request, recipe: bool) -> dict[str, Any]:
    least, most = request.nodes
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    environment: list[dict[str, Any]] = [
        {"name": "PET_NNODES", "value": str(most) if least == most else f"{least}:{most}"},
        {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": index}}},
        # Of a JobSet's pods: JOBSET-JOB-NUMBER-INDEX, in the subdomain JOBSET.
        {"name": "PET_MASTER_ADDR", "value": f"{request.name}-node-0-0.{request.name}"},
        {"name": "PET_MASTER_PORT", "value": str(PORT)},
    ]
    spec = {"completions": most, "parallelism": most} | _job(request, recipe, environment)
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(request, request.name),
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": spec}}],
        },
    }


def _job(request: Request, recipe: bool, environment: list[dict[str, Any]]) -> dict[str, Any]:
    """The spec of the Indexed Job, a pod a node."""
    launch = request.job.launch
    words = command(
        request,
        "/etc/weft/recipe.toml" if recipe else request.words[2],
        {RUN_DIR: f"/runs/{request.name}"},
    )
    shm: dict[str, Any] = {"name": "shm", "emptyDir": {"medium": "Memory"}}
    claim = {"claimName": launch.options["claim"]}
    volumes = [shm, {"name": "runs", "persistentVolumeClaim": claim}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "runs", "mountPath": "/runs"}]
    if recipe:
        volumes.append({"name": "recipe", "configMap": {"name": f"{request.name}-recipe"}})
        mounts.append({"name": "recipe", "mountPath": "/etc/weft"})
    limits = {name: value for name, value in launch.options.items() if name in ("cpu", "memory")}
    if request.devices:
        limits["nvidia.com/gpu"] = str(request.devices)
    if "efa" in launch.options:
        limits["vpc.amazonaws.com/efa"] = launch.options["efa"]
        # libfabric's huge pages would have to be asked for, too; and they fail after a fork.
        environment = [*environment, {"name": "FI_EFA_USE_HUGE_PAGE", "value": "0"}]
    container: dict[str, Any] = {
        "name": "node",
        "image": launch.image,
        "command": ["bash", "-c", script(launch.setup, words)] if launch.setup else words,
    }
    if environment:
        container["env"] = environment
    if limits:
        container["resources"] = {"limits": limits}
    container["volumeMounts"] = mounts
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
    }
    if "account" in launch.options:
        pod["serviceAccountName"] = launch.options["account"]
    ends = {"containerName": "node", "operator": "In"}
    return {
        "activeDeadlineSeconds": seconds(launch.time_limit),
        "backoffLimit": LOST_NODES,
        "podFailurePolicy": {
            "rules": [
                # Evicted, preempted: another one comes, and the run goes on.
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
                {"action": "Ignore", "onExitCodes": ends | {"values": [REQUEUE]}},
                {"action": "FailJob", "onExitCodes": ends | {"values": [FAILED, MISTAKE]}},
            ]
        },
        "template": {"spec": pod | {"containers": [container], "volumes": volumes}},
    }


# --------------------------------------------------------------------------- checking


def check(text: str) -> list[str]:
    """What is wrong by the published models, unknown fields included."""
    import yaml

    try:
        from kubeflow_trainer_api import models
    except ImportError:
        return unchecked("the published models", "pip install 'weft[kubernetes]'")
    kinds = {
        "TrainJob": models.TrainerV1alpha1TrainJob,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
        "JobSet": models.JobsetV1alpha2JobSet,
        "ConfigMap": models.IoK8sApiCoreV1ConfigMap,
    }
    found = []
    for document in yaml.safe_load_all(text):
        kind = document.get("kind") if isinstance(document, dict) else None
        if kind not in kinds:
            found.append(f"kind {kind}: is none of {', '.join(kinds)}")
            continue
        try:
            read = kinds[kind].from_dict(document).to_dict()
        except ValueError as error:  # pydantic's
            found.append(f"{kind}: {error}")
            continue
        found += [f"{kind}: no field {path}" for path in _lost(document, read, "")]
    return found


def _lost(given: Any, read: Any, path: str) -> Iterator[str]:
    """Where in ``given`` is what the models did not take over."""
    if isinstance(given, dict) and isinstance(read, dict):
        for name, value in given.items():
            if name not in read:
                yield f"{path}.{name}"
            else:
                yield from _lost(value, read[name], f"{path}.{name}")
    elif isinstance(given, list) and isinstance(read, list):
        for number, (one, other) in enumerate(zip(given, read, strict=False)):
            yield from _lost(one, other, f"{path}[{number}]")


# --------------------------------------------------------------------------- a cluster


def submit(path: Path, request: Request) -> str:
    """Hand the file in; NAMESPACE/KIND/NAME, the namespace empty if it is kubectl's own."""
    options = request.job.launch.options
    space, kind = options.get("namespace", ""), options.get("kind", KINDS[0])
    if _kubectl(space, "get", kind, request.name, "--ignore-not-found", "-o", "name").strip():
        rule = f"there is a {kind} {request.name} already"
        raise WeftError(f"{rule}: weft launch stop, kubectl delete, or another --run.dir")
    try:
        _kubectl(space, "apply", "-f", str(path))
    except WeftError:  # of several documents some may have been taken
        with suppress(WeftError):
            _kubectl(space, "delete", "--ignore-not-found", "--wait=false", "-f", str(path))
        raise
    return f"{space}/{kind}/{request.name}"


def status(id: str) -> str:
    """One line that begins with 'waiting' or 'running' (on which nodes), or how it ended."""
    space, kind, name = id.split("/")
    told = _kubectl(space, "get", kind, name, "--ignore-not-found", "-o", "json")
    if not told.strip():
        return f"ended: there is no {kind} {name} any more"
    found = json.loads(told)
    true = [c for c in found.get("status", {}).get("conditions", []) if c["status"] == "True"]
    for condition in true:
        if condition["type"] in ("Complete", "Completed"):
            return "complete"
        said = condition.get("message") or condition.get("reason", "")
        if condition["type"] == "Failed":
            return f"failed: {said}"
        if condition["type"] == "Suspended":
            return f"waiting: suspended: {said}"
    pods = json.loads(_kubectl(space, "get", "pods", "-l", _pods(name), "-o", "json"))["items"]
    running = [pod for pod in pods if pod["status"].get("phase") == "Running"]
    if not running:
        return f"waiting: {len(pods)} pods, none of which runs"
    nodes = sorted(pod["spec"].get("nodeName", "?") for pod in running)
    return f"running: {len(running)} of {len(pods)} pods, on {', '.join(nodes)}"


def logs(id: str, follow: bool) -> Iterator[str]:
    """Lines that the job has printed, each after its pod's name."""
    space, _, name = id.split("/")
    words = ["kubectl", *_space(space), "logs", "-l", _pods(name), "--prefix", "--tail=-1"]
    # As many as there may be nodes: kubectl's own limit is 5.
    more = ["--follow", "--max-log-requests=1000"] if follow else []
    return lines_of(*words, *more, remedy=REMEDY)


def stop(id: str) -> str:
    """Have it save and end."""
    space, kind, name = id.split("/")
    for what in (kind, "trainingruntime") if kind == "trainjob" else (kind,):
        _kubectl(space, "delete", what, name, "--wait=false", "--ignore-not-found")
    recipe = f"{name}-recipe"
    _kubectl(space, "delete", "configmap", recipe, "--wait=false", "--ignore-not-found")
    return f"deleted {kind} {name}: its pods have {GRACE_SECONDS} s to save; /runs/{name} stays"


def _kubectl(namespace: str, *words: str) -> str:
    return tool("kubectl", *_space(namespace), *words, remedy=REMEDY)


def _space(namespace: str) -> list[str]:
    return [f"--namespace={namespace}"] if namespace else []


def _pods(name: str) -> str:
    return f"jobset.sigs.k8s.io/jobset-name={name}"
