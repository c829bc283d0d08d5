"""Rehearsals of a configuration: for `nanoscale rehearse`, and before `train` and `submit`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from nanoscale.cli.common.output import saying
from nanoscale.common.errors import UserError, Violation

if TYPE_CHECKING:
    from nanoscale.config.schema import Config


def rehearsed(config: Config, ranks: str, steps: int) -> dict[str, Any]:
    """Return the result of a rehearsal, from the cache if the same code has played it before.

    Args:
        config: resolved.
        ranks: `distinct`, `all`, or numbers.

    Raises:
        UserError: the request is wrong.
    """
    from nanoscale.rehearse import run
    from nanoscale.rehearse.document import document, failed

    _refuse_deepspeed(config)
    played = _played_ranks(config, ranks)
    gpu, context = device_of(config)
    name = run.digest(config, gpu, sorted(played), steps)
    result = run.known(name)
    if result is None:
        with saying() as say:
            records = run.rehearse(config, gpu, list(played), steps, say)
        result = document(config, records, played, steps, gpu, context)
        if not failed(result):
            run.keep(name, result)
    return result


def device_of(config: Config) -> tuple[dict[str, Any] | None, int]:
    """Return the description of the job's GPUs, and the bytes of each that are not PyTorch's; None for CPUs."""
    from nanoscale.config.hardware.data_sheets import described

    if config.launcher.device == "cpu":
        return None, 0
    cluster = described(config)
    assert cluster.memory_gib is not None and cluster.devices_per_host is not None
    name = cluster.recognised[0] if cluster.recognised else cluster.device
    gpu = {
        "name": f"NVIDIA {name}",
        "memory": int(cluster.memory_gib * 2**30),
        "devices": cluster.devices_per_host,
        "capability": _CAPABILITIES.get(cluster.device or "", (9, 0)),
    }
    return gpu, int((cluster.context_gib or 0.0) * 2**30)


_CAPABILITIES = {
    "v100": (7, 0),
    "a100-40": (8, 0),
    "a100-80": (8, 0),
    "b200": (10, 0),
    "gb200": (10, 0),
}
"""CUDA's compute capability of devices that are not of Hopper's generation."""


def _refuse_deepspeed(config: Config) -> None:
    if config.backend.name == "deepspeed":
        what = (
            "DeepSpeed's own extensions need the devices, so only the native backend is rehearsed"
        )
        wrong = Violation("backend", "deepspeed", "", what, ("backend=native",))
        raise UserError("config", what, [wrong])


def _played_ranks(config: Config, asked: str) -> dict[int, int]:
    """Return the ranks to play, and how many each stands for.

    Raises:
        UserError: there are no such ranks.
    """
    from nanoscale.config.derive import derive
    from nanoscale.rehearse.kinds import distinct_ranks

    world = derive(config).world_size
    if asked == "distinct":
        return distinct_ranks(config)
    if asked == "all":
        return dict.fromkeys(range(world), 1)
    if not re.fullmatch(r"\d+(,\d+)*", asked):
        what = f"--ranks {asked}: is neither distinct nor all nor numbers such as 0,8"
        found = Violation("--ranks", asked, "command line", what, ("--ranks distinct", "--ranks 0"))
        raise UserError("usage", what, [found])
    numbers = sorted({int(number) for number in asked.split(",")})
    if numbers[-1] >= world:
        what = f"--ranks {asked}: the job has the ranks 0 to {world - 1}"
        found = Violation("--ranks", asked, "command line", what, ("--ranks distinct",))
        raise UserError("usage", what, [found])
    return dict.fromkeys(numbers, 1)
