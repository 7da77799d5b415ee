"""Kubernetes: a Kubeflow TrainJob (Trainer v2), a JobSet, or a HyperPodPyTorchJob.

The first two create an Indexed Job whose pods run ``weft train``, one per node.
`weft.preparation.environment` detects the rank of a pod from ``PET_*`` variables, which Kubeflow
sets for a TrainJob, and this module for a JobSet.  A TrainJob gets its own TrainingRuntime, which
has the relevant settings: shared memory, the volume, the time to save, and the exit statuses that
restart a pod.

The pods of a HyperPodPyTorchJob run HyperPod's elastic agent, which starts the ranks when the
operator tells it to: see docs/hyperpod.md.

``kubeflow_trainer_api``, the published models of the first two, validates the manifest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from weft.config.errors import ConfigErrors, WeftError
from weft.config.exit_statuses import REQUEUE, UNHEALTHY
from weft.config.files import expand_path, replace_text
from weft.planning.instance_types import find_instance_type
from weft.preparation.environment import PORT
from weft.submission.hyperpod import hang_rule
from weft.submission.job_placement import Mount, check_placement, read_excluded
from weft.submission.job_request import (
    RUN_DIR,
    JobRequest,
    build_script,
    check_duration,
    check_instance_types,
    check_name,
    format_command,
    render_manifest,
    run_cli,
    standalone_recipe,
    stream_cli,
    to_yaml,
    warn_unchecked,
)

FILE_SUFFIX = ".yaml"
REMEDY = "see https://kubernetes.io/docs/tasks/tools"
# Time for the ranks to finish a step and save after Kubernetes ends a pod.
GRACE_SECONDS = 600
# Restarts after a lost, unhealthy or hung pod (not status 0, 1, 2 or 75, and no disruption).
MAX_LOST_NODES = 6
INSTANCE_LABEL, HOST_LABEL = "node.kubernetes.io/instance-type", "kubernetes.io/hostname"
QUEUE_LABEL, PRIORITY_LABEL = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
TOPOLOGY_ANNOTATION = "kueue.x-k8s.io/podset-{}-topology"
HEALTH_LABEL = "sagemaker.amazonaws.com/node-health-status"  # of nodes of HyperPod
# The agent reports to the operator, which starts the ranks again.  It counts restarts by the hour
# (`resilience.max_restarts_per_hour`), after them all pods; this is the limit of the whole job.
MAX_RANK_RESTARTS = 1000
# Names of the kinds as resources, and the label that their pods have.
RESOURCES = {"hyperpod": "hyperpodpytorchjob"}
POD_LABELS = {"hyperpodpytorchjob": "HPJob"}


def find_errors(request: JobRequest) -> ConfigErrors:
    """Return the configuration errors of a request."""
    launch = request.job.launch
    errors = check_placement("kubernetes", request.job, [])
    errors += check_duration(launch.time_limit) + check_instance_types(request)
    errors += _check_size(request)
    if request.trains and request.node_run_dir.startswith("/runs/"):
        errors += check_name(request, f"{request.node_run_dir} in the pods")
        if request.placement.find_mount("/runs") is None:
            rule = "is missing: the pods need a directory for the run"
            remedy = (
                "give --launch.mounts./runs VALUE: pvc:CLAIM, a PersistentVolumeClaim that all "
            )
            errors.add("launch.mounts./runs", rule, remedy + "nodes can write (ReadWriteMany)")
    if request.name[:1].isdigit():
        rule = f"names the run {request.name}, but a name in Kubernetes must begin with a letter"
        remedy = (
            f"use another --run.dir, such as {request.run_dir.with_name(f'run-{request.name}')}"
        )
        errors.add("run.dir", rule, remedy, value=str(request.run_dir))
    if launch.kind == "hyperpod" and request.job.resilience.time_limit:
        rule = "makes the operator of HyperPod restart the ranks when they have saved and exited"
        errors.add("resilience.time_limit", rule, "use 0, and launch.time_limit")
    for key in ("topology", "priority"):
        if getattr(launch, key) and not launch.queue:
            rule = "needs Kueue, which places the pods of its queues"
            errors.add(f"launch.{key}", rule, "give --launch.queue VALUE, or remove it")
    for name in request.placement.exclude_files:
        if not expand_path(name).is_file():
            rule = f"names the file {name}, which does not exist"
            errors.add("launch.exclude", rule, "use a file of this machine, or host names")
    if launch.image == "auto":
        rule = "is not possible: neither Kubernetes nor Kubeflow has an image with weft"
        remedy = "give --launch.image VALUE, an image with weft: see docs/kubernetes.md"
        errors.add("launch.image", rule, remedy)
    return errors


def _check_size(request: JobRequest) -> ConfigErrors:
    """Check that a node of ``launch.instance_type`` can have the pod."""
    launch, errors = request.job.launch, ConfigErrors(request.job)
    instance = find_instance_type(launch.instance_type)
    if instance is None:
        return errors
    for key, limit, noun in (
        ("cpus", instance.cpus, "cores"),
        ("memory", instance.memory_gib, "GiB"),
    ):
        text = str(getattr(launch, key))
        if text.replace(".", "", 1).isdigit() and float(text) >= limit:
            rule = f"is not less than the {limit} {noun} of {launch.instance_type}, of which "
            rule += "Kubernetes itself needs some: no node could have the pod"
            errors.add(f"launch.{key}", rule, f"use at most {limit - max(2, limit // 20)}")
    if (count := launch.network.removeprefix("efa:")).isdigit() and int(count) > instance.efa:
        rule = f"is more than the {instance.efa} EFA devices of {launch.instance_type}"
        errors.add("launch.network", rule, f"use efa:{instance.efa}")
    return errors


def find_warnings(request: JobRequest) -> Iterator[str]:
    """Yield a warning if the pods are of a low QoS class."""
    missing = [
        f"launch.{name}"
        for name, amount in zip(("cpus", "memory"), _node_size(request), strict=True)
        if not amount
    ]
    remedy = "Set launch.instance_type, or give nearly all cores and GiB of a node."
    if type_name := request.job.launch.instance_type:
        remedy = f"weft does not know the size of {type_name}: give nearly all cores and GiB of it."
    if missing:
        yield (
            f"{' and '.join(missing)} are not given, so the pods are not of the QoS class "
            f"Guaranteed, and Kubernetes evicts them first if a node lacks memory. {remedy}"
        )


def render(request: JobRequest) -> str:
    """Return the manifest: the recipe unless it is a shipped one, and the job."""
    launch, placement, recipe = request.job.launch, request.placement, standalone_recipe(request)
    plan = request.plan
    ranks = plan.local_world_size if plan else request.devices or 1
    min_nodes, max_nodes = request.nodes
    words = request.command(
        request.recipe if recipe is None else "/etc/weft/recipe.toml",
        **({RUN_DIR: request.node_run_dir} if request.trains else {}),
    )
    if launch.kind == "hyperpod":
        words = ["bash", "-c", _agent_script(request, ranks, words)]
    elif launch.setup:
        script = build_script(launch.setup, format_command(words, "  ")) + "\n"
        words = ["bash", "-c", script]
    queue = {QUEUE_LABEL: launch.queue, PRIORITY_LABEL: launch.priority}
    mode, _, level = str(launch.topology).partition(":")
    # libfabric's huge pages would need a separate limit, and they fail after a fork.
    env = ({"FI_EFA_USE_HUGE_PAGE": "0"} if placement.efa else {}) | request.environment
    secrets = placement.references("k8s-secret")
    space = f" -n {launch.namespace}" if launch.namespace else ""
    return render_manifest(
        "kubernetes.yaml.j2",
        request,
        f"{request.node_run_dir} in the pods" if request.trains else request.job.data.cache_dir,
        f"kubectl apply{space} -f FILE",
        kind=launch.kind,
        recipe=recipe,
        command=words,
        labels=launch.labels,
        pull_secrets=launch.pull_secrets,
        job_labels={**launch.labels, **{label: each for label, each in queue.items() if each}},
        annotations={TOPOLOGY_ANNOTATION.format(mode): level} if level else {},
        node_terms=list(_node_terms(request)),
        tolerations=[_tolerate(taint) for taint in launch.tolerations],
        env=env,
        secrets={name: reference.split("/", 1) for name, reference in secrets.items()},
        volumes=[_volume(mount) for mount in placement.mounts if mount.kind != "image"],
        resources=_resources(request),
        ranks=str(ranks),
        node_counts=list(plan.node_counts if plan else range(min_nodes, max_nodes + 1)),
        log_rules=[hang_rule(request.job)],
        max_restarts_per_hour=request.job.resilience.max_restarts_per_hour,
        nodes=str(max_nodes) if min_nodes == max_nodes else f"{min_nodes}:{max_nodes}",
        max_nodes=max_nodes,
        seconds=request.time_limit_seconds,
        GRACE_SECONDS=GRACE_SECONDS,
        MAX_LOST_NODES=MAX_LOST_NODES,
        MAX_RANK_RESTARTS=MAX_RANK_RESTARTS,
        PORT=PORT,
    )


def _agent_script(request: JobRequest, ranks: int, words: Sequence[str]) -> str:
    """Return the shell script of a pod that runs HyperPod's elastic agent.

    The agent is the first process of the container, so that it gets the SIGTERM before the pod
    ends.  It gives the ranks less time than the pod has.  It reads the output of the ranks from
    files.
    """
    agent = [
        *("hyperpodrun", "--nnodes", '"$NNODES"', "--nproc-per-node", str(ranks)),
        *("--tee", "3", "--log-dir", "/tmp/hyperpod", "--shutdown-timeout"),
        *(str(GRACE_SECONDS - 30), "-m"),
    ]
    # The operator sets the variable, and gives the real number to the agent when it starts.
    setup = [*request.job.launch.setup, f'export NNODES="${{NNODES:-{request.nodes[1]}}}"']
    command = f"{' '.join(agent)} \\\n  {format_command(words, '  ')}"
    return build_script(setup, command) + "\n"


def _volume(mount: Mount) -> tuple[Mount, str, str]:
    """Return a mount, its claim (empty: a directory of the host), and its directory."""
    if mount.kind == "host":
        return mount, "", mount.source
    claim, _, directory = mount.source.partition("/")
    return mount, claim, directory


def _node_terms(request: JobRequest) -> Iterator[dict[str, Any]]:
    """Yield the conditions that a node must meet."""
    launch, placement = request.job.launch, request.placement
    labels = {**launch.node_labels}
    if launch.kind == "hyperpod":
        labels.setdefault(HEALTH_LABEL, "Schedulable")
    if launch.instance_type:
        labels.setdefault(INSTANCE_LABEL, launch.instance_type)
    for label, value in labels.items():
        yield {"key": label, "operator": "In", "values": value.split("|")}
    if excluded := read_excluded(placement):
        yield {"key": HOST_LABEL, "operator": "NotIn", "values": excluded}


def _tolerate(taint: str) -> dict[str, str]:
    """Return the toleration of a taint, KEY[=VALUE][:EFFECT]."""
    taint, _, effect = taint.partition(":")
    key, has_value, value = taint.partition("=")
    fields = {"operator": "Equal", "value": value} if has_value else {"operator": "Exists"}
    return {"key": key} | fields | ({"effect": effect} if effect else {})


def _resources(request: JobRequest) -> dict[str, Any]:
    """Return the resources of a pod, whose requests equal its limits."""
    cpus, memory = _node_size(request)
    amounts = {
        "cpu": cpus,
        "memory": memory and f"{memory}Gi",
        "nvidia.com/gpu": request.devices,
        "vpc.amazonaws.com/efa": request.placement.efa,
    }
    limits = {name: str(amount) for name, amount in amounts.items() if amount}
    return {"requests": limits, "limits": limits} if limits else {}


def _node_size(request: JobRequest) -> tuple[str, str]:
    """Return cores and GiB of a pod; empty: unknown.

    By default nearly the whole node: the rest is for the system and the pods of daemons.  A pod
    with some of the GPUs of a node gets its share.
    """
    launch = request.job.launch
    instance = find_instance_type(launch.instance_type)
    cpus = gib = 0
    if instance and request.devices:  # a CPU job may share its nodes
        share = request.devices / instance.gpus if instance.gpus else 1.0
        cpus = int((instance.cpus - max(2, instance.cpus // 20)) * share)
        gib = int((instance.memory_gib - max(8, instance.memory_gib // 10)) * share)
    return str(launch.cpus or cpus or ""), str(launch.memory or gib or "")


# --------------------------------------------------------------------------- checking


def check(text: str) -> list[str]:
    """Return the errors of a manifest, including fields that the models do not have."""
    import yaml

    try:
        from kubeflow_trainer_api import models
    except ImportError:
        return warn_unchecked("the published models", "pip install 'weft[kubernetes]'")
    kinds = {
        "TrainJob": models.TrainerV1alpha1TrainJob,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
        "JobSet": models.JobsetV1alpha2JobSet,
        "ConfigMap": models.IoK8sApiCoreV1ConfigMap,
        # Its own fields have no published models.
        "HyperPodPyTorchJob": models.IoK8sApiCoreV1PodTemplateSpec,
    }
    errors = []
    for document in yaml.safe_load_all(text):
        kind = document.get("kind") if isinstance(document, dict) else None
        if kind not in kinds:
            errors.append(f"kind {kind}: is not one of {', '.join(kinds)}")
            continue
        parts = [document]
        if kind == "HyperPodPyTorchJob":
            parts = [spec.get("template") for spec in document["spec"]["replicaSpecs"]]
        for part in parts:
            try:
                parsed = kinds[kind].from_dict(part).to_dict()
            except ValueError as error:  # of pydantic
                errors.append(f"{kind}: {error}")
                continue
            paths = _find_dropped_fields(part, parsed, "")
            errors += [f"{kind}: no field {path}" for path in paths]
    return errors


def _find_dropped_fields(given: Any, parsed: Any, path: str) -> Iterator[str]:
    """Yield the paths of the fields in ``given`` that the models do not have."""
    if isinstance(given, dict) and isinstance(parsed, dict):
        for name, value in given.items():
            if name not in parsed:
                yield f"{path}.{name}"
            else:
                yield from _find_dropped_fields(value, parsed[name], f"{path}.{name}")
    elif isinstance(given, list) and isinstance(parsed, list):
        for number, (value, parsed_value) in enumerate(zip(given, parsed, strict=False)):
            yield from _find_dropped_fields(value, parsed_value, f"{path}[{number}]")


# --------------------------------------------------------------------------- cluster


def submit(path: Path, request: JobRequest) -> str:
    """Submit the manifest; return NAMESPACE/KIND/NAME (no NAMESPACE: kubectl's own)."""
    launch = request.job.launch
    space, kind = launch.namespace, RESOURCES.get(launch.kind, launch.kind)
    if _kubectl(space, "get", kind, request.name, "--ignore-not-found", "-o", "name").strip():
        remedy = "use weft job cancel, kubectl delete, or another --run.dir"
        raise WeftError(f"{kind} {request.name} already exists; {remedy}")
    try:
        _kubectl(space, "apply", "-f", str(path))
    except WeftError:  # kubectl may have created some of the objects
        with suppress(WeftError):
            _kubectl(space, "delete", "--ignore-not-found", "--wait=false", "-f", str(path))
        raise
    return f"{space}/{kind}/{request.name}"


def status(id: str) -> str:
    """Return one line: 'waiting...', 'running...' with nodes, or how the job ended."""
    space, kind, name = id.split("/")
    output = _kubectl(space, "get", kind, name, "--ignore-not-found", "-o", "json")
    if not output.strip():
        return f"ended: {kind} {name} has been deleted"
    conditions = json.loads(output).get("status", {}).get("conditions", [])
    for condition in (c for c in conditions if c["status"] == "True"):
        if condition["type"] in ("Complete", "Completed"):
            return "complete"
        message = condition.get("message") or condition.get("reason", "")
        if condition["type"] == "Failed":
            causes = [f"{pod.node}: {pod.message}" for pod in _ended_pods(space, kind, name)]
            return f"failed: {causes[0] if causes else message}"
        if condition["type"] == "Suspended":
            return f"waiting: suspended: {message}"
    pods = _list_pods(space, kind, name)
    running = [pod for pod in pods if pod["status"].get("phase") == "Running"]
    if not running:
        return f"waiting: {len(pods)} pods, none of them running"
    nodes = sorted(pod["spec"].get("nodeName", "?") for pod in running)
    return f"running: {len(running)} of {len(pods)} pods, on {', '.join(nodes)}"


def _list_pods(space: str, kind: str, name: str) -> list[dict[str, Any]]:
    output = _kubectl(space, "get", "pods", "-l", _pod_selector(kind, name), "-o", "json")
    pods: list[dict[str, Any]] = json.loads(output or '{"items": []}')["items"]
    return pods


class EndedPod(NamedTuple):
    """A pod whose container has ended: node, exit status, and last message."""

    node: str
    status: int
    message: str


def _ended_pods(space: str, kind: str, name: str) -> list[EndedPod]:
    """Return the failed pods in the order of their ends."""
    found = []
    for pod in _list_pods(space, kind, name):
        for container in pod["status"].get("containerStatuses", []):
            end = container.get("state", {}).get("terminated") or {}
            status = int(end.get("exitCode", 0))
            if status in (0, REQUEUE):
                continue
            # The last lines of the output; weft's own message is the last that it begins.
            lines = str(end.get("message", "")).strip().splitlines()
            starts = [number for number, line in enumerate(lines) if line.startswith("weft: ")]
            text = " ".join(lines[starts[-1] :] if starts else lines[-1:])
            node = pod["spec"].get("nodeName", "?")
            message = text.removeprefix("weft: ") or f"exit status {status}"
            found.append((str(end.get("finishedAt", "")), EndedPod(node, status, message)))
    return [pod for _, pod in sorted(found)]


def resubmit(path: Path, id: str) -> str:
    """Create the job again, away from unhealthy nodes; return its id."""
    import yaml

    space, kind, name = id.split("/")
    unhealthy = {pod.node for pod in _ended_pods(space, kind, name) if pod.status == UNHEALTHY}
    documents = list(yaml.safe_load_all(path.read_text("utf-8")))
    if unhealthy:
        for pod in (pod for document in documents for pod in _find_pods(document)):
            _exclude_nodes(pod, unhealthy)
        head = [line[2:] for line in path.read_text("utf-8").splitlines() if line.startswith("# ")]
        replace_text(path, to_yaml(documents, "\n".join(head)))
        print(f"weft: the job will not use {', '.join(sorted(unhealthy))}: unhealthy")
    _delete_job(space, kind, name)
    _kubectl(space, "apply", "-f", str(path))
    return id


def _find_pods(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield the specifications of pods in a document."""
    if isinstance(tree, dict):
        if "containers" in tree:
            yield tree
        for value in tree.values():
            yield from _find_pods(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _find_pods(value)


def _exclude_nodes(pod: dict[str, Any], nodes: set[str]) -> None:
    """Add nodes to those that a pod must not get."""
    path = ("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
    place: dict[str, Any] = pod
    for name in path:
        place = place.setdefault(name, {})
    terms = place.setdefault("nodeSelectorTerms", [{"matchExpressions": []}])
    for term in terms:
        rules = term.setdefault("matchExpressions", [])
        known = [r for r in rules if (r["key"], r["operator"]) == (HOST_LABEL, "NotIn")]
        if known:
            known[0]["values"] = sorted({*known[0]["values"], *nodes})
        else:
            rules.append({"key": HOST_LABEL, "operator": "NotIn", "values": sorted(nodes)})


def logs(id: str, run_dir: Path, follow: bool) -> Iterator[str]:
    """Yield the lines that the job has printed, each after the name of its pod."""
    space, kind, name = id.split("/")
    # kubectl's default limit is 5 pods.
    options = ["--follow", "--max-log-requests=1000"] if follow else []
    words = ["logs", "-l", _pod_selector(kind, name), "--prefix", "--tail=-1", *options]
    return stream_cli("kubectl", *_namespace_option(space), *words, remedy=REMEDY)


def cancel(id: str) -> str:
    """Delete the job, whose pods save and end; return a message."""
    space, kind, name = id.split("/")
    _delete_job(space, kind, name, "--wait=false")
    recipe = f"{name}-recipe"
    _kubectl(space, "delete", "configmap", recipe, "--wait=false", "--ignore-not-found")
    grace = f"its pods have {GRACE_SECONDS} s to save a checkpoint"
    return f"deleted {kind} {name}: {grace}; /runs/{name} remains"


def _delete_job(space: str, kind: str, name: str, *options: str) -> None:
    for object_kind in (kind, "trainingruntime") if kind == "trainjob" else (kind,):
        _kubectl(space, "delete", object_kind, name, *options, "--ignore-not-found")


def _kubectl(namespace: str, *words: str) -> str:
    return run_cli("kubectl", *_namespace_option(namespace), *words, remedy=REMEDY)


def _namespace_option(namespace: str) -> list[str]:
    return [f"--namespace={namespace}"] if namespace else []


def _pod_selector(kind: str, name: str) -> str:
    return f"{POD_LABELS.get(kind, 'jobset.sigs.k8s.io/jobset-name')}={name}"
