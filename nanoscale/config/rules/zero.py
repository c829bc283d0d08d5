"""Rules of DeepSpeed's offload and of ZeRO++."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from nanoscale.config.rules.resolution import Resolution, near_divisors


def check_zero(resolution: Resolution, device: Literal["cpu", "cuda"], dp: int) -> None:
    if resolution.config.backend.name != "deepspeed":
        return
    _check_nvme(resolution)
    _check_zero_plus(resolution, device, dp)


def _check_nvme(resolution: Resolution) -> None:
    zero = resolution.config.zero
    offloaded = [
        f"zero.{name}"
        for name in ("offload_optimizer", "offload_param")
        if getattr(zero, name) == "nvme"
    ]
    if not offloaded:
        resolution.refuse_idle("config", "zero.nvme_path", "offloaded states")
        return
    if zero.offload_optimizer == "nvme" and zero.stage != 3:
        message = "is for zero.stage=3; the lower stages offload to host memory"
        resolution.refuse(
            "layout",
            "zero.offload_optimizer",
            message,
            "zero.offload_optimizer=cpu zero.nvme_path=null",
            "zero.stage=3",
        )
    if zero.nvme_path is None:
        message = f"is needed by {' and '.join(offloaded)}: a folder on a fast disk"
        resolution.refuse("config", "zero.nvme_path", message, "zero.nvme_path=/local_nvme")
    elif resolution.remote:
        return  # a folder of each host, which only the host can check
    elif not Path(zero.nvme_path).is_dir() or not os.access(zero.nvme_path, os.W_OK):
        resolution.refuse("config", "zero.nvme_path", "is not a writable folder")


def _check_zero_plus(resolution: Resolution, device: Literal["cpu", "cuda"], dp: int) -> None:
    zero = resolution.config.zero
    if dp % zero.hpz:
        message = f"must divide parallel.dp, which is {dp}"
        resolution.refuse(
            "layout", "zero.hpz", message, *(f"zero.hpz={n}" for n in near_divisors(dp, zero.hpz))
        )
    for name in ("quantized_weights", "quantized_gradients"):
        if getattr(zero, name) and device == "cpu":
            message = "needs GPU kernels, and launcher.device is cpu"
            resolution.refuse("config", f"zero.{name}", message, f"zero.{name}=false")
