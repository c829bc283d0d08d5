"""Files that start the processes of a job elsewhere: a JobSet of Kubernetes, and a task of SkyPilot.

Each pod or node is a host, whose one process has the ranks of its GPUs (`launcher=env`). Sources: the API of
JobSet, version v1alpha2 (https://jobset.sigs.k8s.io), and SkyPilot's task YAML (https://docs.skypilot.co).
"""

import re
import shlex
from pathlib import PurePosixPath

from nanoscale.common.json_text import Json
from nanoscale.launch.request import Request

_DECIDED = (
    "launcher",
    "launcher.name",
    "launcher.nodes",
    "launcher.devices",
    "run.name",
    "run.root",
)
"""The keys that the file decides."""
_SHM = "/dev/shm"
_CLAIM = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
"""The name of an object of Kubernetes."""
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def render(request: Request) -> Json:
    """Return the file for the launcher of the request.

    Raises:
        UserError: a setting is missing that the file needs.
    """
    make = {"kubernetes": _jobset, "skypilot": _task}[request.config.launcher.name]
    return make(request, len(request.hosts), request.hosts[0].slots)


def _command(request: Request, slots: int) -> list[str]:
    def stays(word: str) -> bool:
        key = word.partition("=")[0]
        return key not in _DECIDED and not key.startswith("launcher.container")

    run = request.config.run
    decided = [f"launcher.devices={slots}", f"run.name={run.name}", f"run.root={run.root}"]
    words = filter(stays, request.composed.words)
    return ["nanoscale", "train", *words, "launcher=env", *decided]


def _name(request: Request) -> str:
    """Return the run's name as the DNS label that both require, which begins with a letter."""
    label = re.sub(r"[^a-z0-9]+", "-", str(request.config.run.name).lower())[:40].strip("-")
    return label if label[:1].isalpha() else f"run-{label}".strip("-")


def _claims(request: Request) -> list[tuple[str, str]]:
    """Return the persistent volume claims of a pod and their folders; refuse a job that a pod cannot run."""
    launcher = request.config.launcher
    key, is_set = "launcher.container", launcher.container is not None
    _require(request, key, is_set, "is needed by a pod", f"{key}=IMAGE")
    mounts = [mount.rpartition(":") for mount in launcher.container_mounts]
    claims = [(claim, path) for claim, _, path in mounts]
    root = PurePosixPath(request.config.run.root)
    holds_runs = any(root.is_relative_to(path) for _, path in claims)
    message = f"has no CLAIM:FOLDER of a persistent volume that holds run.root={root}"
    advice = "'launcher.container_mounts=[runs:/runs]' run.root=/runs"
    _require(request, "launcher.container_mounts", holds_runs, message, advice)
    for claim, path in claims:
        is_name = _CLAIM.fullmatch(claim) is not None
        message = (
            f"has {claim!r}, which cannot name a claim: Kubernetes takes a-z, 0-9, `-` and `.`"
        )
        _require(request, "launcher.container_mounts", is_name, message, advice)
        is_free = path.startswith("/") and [it for _, it in (*claims, ("", _SHM))].count(path) == 1
        message = f"mounts {path!r}, which must be a folder from / on and the place of one claim"
        _require(request, "launcher.container_mounts", is_free, message, advice)
    return claims


def _jobset(request: Request, hosts: int, slots: int) -> Json:
    launcher, name = request.config.launcher, _name(request)
    claims = _claims(request)
    variables: list[Json] = [
        {"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
        {"name": "WORLD_SIZE", "value": str(hosts)},
        {"name": "MASTER_ADDR", "value": f"{name}-hosts-0-0.{name}"},
    ]
    names = {
        claim: f"claim-{number}"
        for number, claim in enumerate(dict.fromkeys(it for it, _ in claims))
    }
    folders = [*((names[claim], path) for claim, path in claims), ("shm", _SHM)]
    container: Json = {
        "name": "nanoscale",
        "image": launcher.container,
        # Kubernetes replaces $(NAME) in a command; the doubled sign stands for one
        "command": [word.replace("$(", "$$(") for word in _command(request, slots)],
        "env": variables,
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in folders],
    }
    if launcher.device != "cpu":
        container["resources"] = {"limits": {"nvidia.com/gpu": str(slots)}}
    volumes: list[Json] = [
        {"name": volume, "persistentVolumeClaim": {"claimName": claim}}
        for claim, volume in names.items()
    ]
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(launcher.stop_grace_s),
        "containers": [container],
        "volumes": [*volumes, {"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    job = {
        "completionMode": "Indexed",
        "parallelism": hosts,
        "completions": hosts,
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": {"maxRestarts": launcher.max_restarts},
            "replicatedJobs": [{"name": "hosts", "replicas": 1, "template": {"spec": job}}],
        },
    }


def _task(request: Request, hosts: int, slots: int) -> Json:
    config = request.config
    is_known = config.cluster.device is not None
    _require(request, "cluster.device", is_known, "is needed by a task", "cluster=h100-sxm")
    kind, _, memory = str(config.cluster.device).partition("-")
    accelerator = kind.upper() + (f"-{memory}GB" if memory.isdecimal() and kind == "a100" else "")
    image = config.launcher.container
    resources: Json = {"accelerators": {accelerator: slots}}
    lines = [
        "export RANK=$SKYPILOT_NODE_RANK WORLD_SIZE=$SKYPILOT_NUM_NODES",
        'export MASTER_ADDR=$(echo "$SKYPILOT_NODE_IPS" | head -n1)',
        shlex.join(_command(request, slots)),
    ]
    return {
        "name": _name(request),
        "num_nodes": hosts,
        "resources": resources | ({"image_id": f"docker:{image}"} if image else {}),
        "run": "\n".join(lines) + "\n",
    }


def _require(request: Request, key: str, is_met: bool, message: str, advice: str) -> None:
    if not is_met:
        request.composed.refuse(key, message, advice)
