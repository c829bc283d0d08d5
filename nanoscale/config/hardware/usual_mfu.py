"""The MFU that published runs of dense models reach on GPUs, by size and dtype, to compare another with."""

from __future__ import annotations

import math

from nanoscale.config.hardware.data_sheets import kind
from nanoscale.config.model_math import parameters
from nanoscale.config.schema import Config

_16_BITS = ((1e9, 0.38, 0.53), (4e9, 0.37, 0.60), (20e9, 0.29, 0.56), (math.inf, 0.32, 0.56))
_8_BITS = ((20e9, 0.13, 0.29), (math.inf, 0.10, 0.43))
"""Parameters up to which a line holds, and between which MFUs eight of ten runs are: 289 runs in 16 bits and 40
in 8 bits on A100, H100, H200, B200 and MI300X, of llm-foundry's scaling tables, Korthikanti et al. 2022
(arXiv:2205.05198), SimuMax, torchtitan, torchao, KempnerForge and NVIDIA's dgxc-benchmarking."""


def usual_mfu(config: Config) -> tuple[float, float] | None:
    """Return the lowest and highest usual MFU; None for mixtures of experts and for other dtypes."""
    bits = {"bf16": _16_BITS, "fp16": _16_BITS, "fp8": _8_BITS}.get(kind(config.precision))
    if bits is None or config.model.experts or config.model.source == "hf":
        return None
    size = parameters(config.model)
    return next((low, high) for most, low, high in bits if size <= most)


def usual_mfu_text(usual: tuple[float, float] | None) -> str | None:
    """Return the sentence about the usual MFU."""
    if usual is None:
        return None
    return f"published runs of this size and dtype reach an MFU of {usual[0]:.0%} to {usual[1]:.0%}"
