"""The image that agents and ranks run in: `launcher.container`."""

import os
from collections.abc import Iterator
from pathlib import Path

from nanoscale.config.schema import Config


def runtime(config: Config) -> str | None:
    """Return the program that runs the image; None without an image."""
    launcher = config.launcher
    if launcher.container is None or launcher.container_runtime != "auto":
        return None if launcher.container is None else launcher.container_runtime
    return "pyxis" if launcher.name == "slurm" else "docker"


def srun_options(config: Config) -> list[str]:
    """Return the options of srun that run the agents in the image (pyxis)."""
    if runtime(config) != "pyxis":
        return []
    mounts = ",".join(_mounts(config))
    return [f"--container-image={config.launcher.container}", f"--container-mounts={mounts}"]


def container_prefix(config: Config) -> list[str]:
    """Return the prefix of the command of an agent that runs in the image; its processes end with it."""
    image, way = str(config.launcher.container), runtime(config)
    if way not in ("docker", "apptainer"):
        return []
    is_docker, on_gpu = way == "docker", config.launcher.device == "cuda"
    option = "--volume" if is_docker else "--bind"
    folders = [word for mount in _mounts(config) for word in (option, mount)]
    gpus = ["--gpus=all" if is_docker else "--nv"] if on_gpu else []
    host = ["--network=host", "--ipc=host", "--pid=host", f"--user={os.getuid()}:{os.getgid()}"]
    command = ["docker", "run", "--rm", "--interactive", *host] if is_docker else [way, "exec"]
    return [*command, *gpus, *folders, image]


def _mounts(config: Config) -> Iterator[str]:
    """Yield the configured mounts, and before them the folder of runs if they lack it."""
    configured = config.launcher.container_mounts
    root = str(Path(config.run.root).absolute())
    if root not in [mount.split(":")[1] for mount in configured if ":" in mount]:
        yield f"{root}:{root}"
    yield from configured
