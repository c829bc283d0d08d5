"""Files for Kubernetes and SkyPilot: as their schemas say, and their commands train."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from nanoscale.cli.main import run as nanoscale
from nanoscale.processes.network import addresses, is_loopback
from nanoscale.runs import metrics
from nanoscale.runs.directory import RunDirectory

LIMIT_S = 120.0
TEXT, WHOLE = {"type": "string"}, {"type": "integer"}


def closed(required: str, **properties: Any) -> dict[str, Any]:
    """Return the schema of an object with no other properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def items(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema}


POD = closed(
    "containers",
    restartPolicy={"enum": ["Never", "OnFailure"]},
    terminationGracePeriodSeconds=WHOLE,
    containers=items(
        closed(
            "name",
            name=TEXT,
            image=TEXT,
            command=items(TEXT),
            env=items(
                closed(
                    "name",
                    name=TEXT,
                    value=TEXT,
                    valueFrom=closed("", fieldRef=closed("fieldPath", fieldPath=TEXT)),
                )
            ),
            volumeMounts=items(closed("name mountPath", name=TEXT, mountPath=TEXT)),
            resources=closed("", limits={"type": "object", "additionalProperties": TEXT}),
        )
    ),
    volumes=items(
        closed(
            "name",
            name=TEXT,
            persistentVolumeClaim=closed("claimName", claimName=TEXT),
            emptyDir=closed("", medium=TEXT),
        )
    ),
)
JOBSET = closed(
    "apiVersion kind metadata spec",
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=closed("name", name={"pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}),
    spec=closed(
        "replicatedJobs",
        failurePolicy=closed("", maxRestarts=WHOLE),
        replicatedJobs=items(
            closed(
                "name template",
                name=TEXT,
                replicas=WHOLE,
                template=closed(
                    "",
                    spec=closed(
                        "template",
                        completionMode={"enum": ["NonIndexed", "Indexed"]},
                        parallelism=WHOLE,
                        completions=WHOLE,
                        backoffLimit=WHOLE,
                        template=closed("", spec=POD),
                    ),
                ),
            )
        ),
    ),
)
"""The parts of JobSet's published definition (version v1alpha2) and of a pod's that a file may use."""
TASK = closed(
    "",
    name=TEXT,
    num_nodes=WHOLE,
    run=TEXT,
    resources=closed(
        "",
        accelerators={
            "type": "object",
            "maxProperties": 1,
            "additionalProperties": {"type": "number"},
        },
        image_id=TEXT,
    ),
)
"""The parts of SkyPilot's published schema of a task."""
SMALL = ["recipe=debug", "model.layers=2", "launcher.device=cpu", "train.steps=3", "run.name=r"]
TWO = ["launcher.nodes=2", "launcher.devices=1", "launcher.connect_timeout_s=60"]


def written(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert nanoscale(["submit", *words, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert nanoscale(["submit", *words, "--dry-run", "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert yaml.safe_load(text) == document
    return document


def own_address() -> str:
    """Return an address at which other hosts would reach this one."""
    found = [it for it in addresses() if ":" not in it and not is_loopback(it)]
    if not found:
        pytest.skip("this machine has no address but that of the loopback")
    return found[0]


def train_together(folder: Path, scripts: list[str], environments: list[dict[str, str]]) -> None:
    """Run the scripts of all hosts here, with `nanoscale` as this interpreter's."""
    ours = f"{sys.executable} -m nanoscale"
    source = {"PYTHONPATH": str(Path(__file__).parents[2])}
    processes = [
        subprocess.Popen(
            ["bash", "-ec", script.replace("nanoscale", ours, 1)],
            cwd=folder,
            env={**os.environ, **source, **environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for script, environment in zip(scripts, environments, strict=True)
    ]
    for process in processes:
        _, said = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, said.decode()
    last = metrics.last(RunDirectory(folder / "runs" / "r"))
    assert last is not None and last["step"] == 3


@pytest.mark.slow
def test_the_pods_of_a_jobset_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    mounts = [f"launcher.container_mounts=[claim:{tmp_path}]", f"run.root={tmp_path}/runs"]
    words = ["launcher=kubernetes", *SMALL, *TWO, "launcher.container=image", *mounts]
    document = written(capsys, *words)
    jsonschema.validate(document, JOBSET)
    job = document["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert job["parallelism"] == job["completions"] == 2 and "resources" not in container
    given = {it["name"]: it.get("value") for it in container["env"]}
    assert given["WORLD_SIZE"] == "2" and given["MASTER_ADDR"] == "r-hosts-0-0.r"
    command = shlex.join(container["command"])
    environments = [
        {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": own_address()}
        for number in range(2)
    ]
    train_together(tmp_path, [command] * 2, environments)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_nodes_of_a_task_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    document = written(capsys, "launcher=skypilot", "cluster=cpu", *SMALL, *TWO)
    jsonschema.validate(document, TASK)
    environments = [
        {
            "SKYPILOT_NODE_RANK": str(number),
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NODE_IPS": f"{own_address()}\n192.0.2.1",
        }
        for number in range(2)
    ]
    train_together(tmp_path, [document["run"]] * 2, environments)


def test_what_a_file_lacks_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["recipe=debug", "launcher=kubernetes", "launcher.devices=8", "run.name=r"]
    for _ in range(2):  # the image, and then the claim
        assert nanoscale(["submit", *words, "--dry-run"]) == 2
        line = capsys.readouterr().err.partition("type instead: ")[2].splitlines()[0]
        words += shlex.split(line)
    jsonschema.validate(written(capsys, *words, "launcher.max_restarts=3"), JOBSET)
    words = ["recipe=debug", "launcher=skypilot", "launcher.devices=8", "run.name=r"]
    assert nanoscale(["submit", *words, "--dry-run"]) == 2
    line = capsys.readouterr().err.partition("type instead: ")[2].splitlines()[0]
    task = written(capsys, *words, *shlex.split(line), "launcher.container=me/image")
    jsonschema.validate(task, TASK)
    assert task["resources"] == {"accelerators": {"H100": 8}, "image_id": "docker:me/image"}
    assert nanoscale(["submit", *words]) == 2 and "--dry-run" in capsys.readouterr().err
    assert nanoscale(["train", *words]) == 2
    assert "is for `nanoscale submit --dry-run`" in capsys.readouterr().err


def test_mounts_and_words_are_those_of_kubernetes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["launcher=kubernetes", *SMALL, *TWO, "launcher.container=image", "run.root=/runs"]
    words.append("run.tags=['$(HOME) of $HOME']")
    mounts = "launcher.container_mounts=[shm:/data,shm:/runs,b.c:/more]"
    document = written(capsys, *words, mounts)
    pod = document["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    volumes = {
        it["name"]: it.get("persistentVolumeClaim", {}).get("claimName") for it in pod["volumes"]
    }
    (container,) = pod["containers"]
    mounted = [(volumes[it["name"]], it["mountPath"]) for it in container["volumeMounts"]]
    assert mounted == [("shm", "/data"), ("shm", "/runs"), ("b.c", "/more"), (None, "/dev/shm")]
    assert "run.tags=['$$(HOME) of $HOME']" in container["command"]
    for wrong in ("Claim_1:/runs", "a:/runs,b:/runs", "a:/runs,b:/dev/shm", "a:/runs,b:data"):
        assert (
            nanoscale(["submit", *words, f"launcher.container_mounts=[{wrong}]", "--dry-run"]) == 2
        )
        assert "launcher.container_mounts" in capsys.readouterr().err
