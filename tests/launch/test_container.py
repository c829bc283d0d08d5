"""Commands of agents that run in an image."""

from __future__ import annotations

from typing import Any

import pytest

from nanoscale.config.schema import Config, Launcher, Run
from nanoscale.launch.transport.container import container_prefix, srun_options

IMAGE = "image with $(blanks).sqsh"


def config(name: Any = "slurm", device: Any = "cuda", **wanted: Any) -> Config:
    launcher = Launcher(name=name, device=device, devices=8, **wanted)
    return Config(run=Run(name="x", root="/shared/runs"), launcher=launcher)


@pytest.mark.parametrize("name", ["slurm", "ssh"])
def test_without_a_container_nothing_is_added(name: str) -> None:
    assert srun_options(config(name)) == container_prefix(config(name)) == []


def test_pyxis_runs_the_image_and_sees_the_runs() -> None:
    asked = config(container=IMAGE, container_mounts=["/data:/data", "/a:/b:ro"])
    assert container_prefix(asked) == []
    assert srun_options(asked) == [
        f"--container-image={IMAGE}",
        "--container-mounts=/shared/runs:/shared/runs,/data:/data,/a:/b:ro",
    ]


@pytest.mark.parametrize("name", ["slurm", "ssh"])
def test_apptainer_stands_before_the_agent(name: str) -> None:
    asked = config(
        name, container=IMAGE, container_runtime="apptainer", container_mounts=["/x:/shared/runs"]
    )
    assert srun_options(asked) == []
    assert container_prefix(asked) == [
        "apptainer", "exec", "--nv", "--bind", "/x:/shared/runs", IMAGE
    ]  # fmt: skip
    assert "--nv" not in container_prefix(
        config(name, "cpu", container="i", container_runtime="apptainer")
    )


def test_docker_is_the_host_with_other_files() -> None:
    words = container_prefix(config("ssh", container=IMAGE, container_mounts=["/data:/data"]))
    assert words[:4] == ["docker", "run", "--rm", "--interactive"] and words[-1] == IMAGE
    assert {"--network=host", "--ipc=host", "--pid=host", "--gpus=all"} < set(words)
    mounts = [words[n + 1] for n, word in enumerate(words) if word == "--volume"]
    assert mounts == ["/shared/runs:/shared/runs", "/data:/data"]
    assert "--gpus=all" not in container_prefix(config("ssh", "cpu", container=IMAGE))
