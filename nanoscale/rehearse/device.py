"""The devices of a rehearsed job, as its configuration describes them. Torch-free."""

from __future__ import annotations

from typing import Any

from nanoscale.common.errors import Violation
from nanoscale.config.hardware.data_sheets import described
from nanoscale.config.resolved import ResolvedConfig


def why_unplayable(config: ResolvedConfig) -> Violation | None:
    """Return why a job cannot be rehearsed; None if it can."""
    if config.model.source == "hf" and config.launcher.device != "cpu":
        return Violation("model", "hf", "", "transformers' models are not rehearsed on GPUs")
    if config.backend.name == "deepspeed":
        what = (
            "DeepSpeed's own extensions need the devices, so only the native backend is rehearsed"
        )
        return Violation("backend", "deepspeed", "", what, ("backend=native",))
    return None


def device_of(config: ResolvedConfig) -> tuple[dict[str, Any] | None, int]:
    """Return the description of the job's GPUs, and the bytes of each that are not PyTorch's; None for CPUs."""
    if config.launcher.device == "cpu":
        return None, 0
    cluster = described(config)
    assert cluster.memory_gib is not None and cluster.devices_per_host is not None
    name = cluster.recognised[0] if cluster.recognised else cluster.device
    gpu = {
        "name": f"NVIDIA {name}",
        "memory": int(cluster.memory_gib * 2**30),
        "devices": cluster.devices_per_host,
        "capability": divmod(round(10 * (cluster.compute_capability or 9.0)), 10),
    }
    return gpu, int((cluster.context_gib or 0.0) * 2**30)
