"""Bytes per parameter: weights, compute copy, gradients, optimizer states.

Sources: Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054), section 3.1; 8-bit states: Dettmers et al. 2022,
arXiv:2110.02861.
"""

from __future__ import annotations

from dataclasses import dataclass

from nanoscale.config.dtypes import DTYPES
from nanoscale.config.optimizers import moments_of, rule_of
from nanoscale.config.schema import Optimizer, Precision

QUANTIZED = 1 + 4 / 256
"""Bytes of an 8-bit moment, with an fp32 scale for every 256 of them."""


@dataclass(frozen=True, slots=True)
class BytesPerParameter:
    """The memory of one parameter without sharding, in bytes."""

    weights: float
    """The weights that the optimizer updates: fp32 master weights if there is a compute copy."""
    copy: float
    """The compute copy, if the weights themselves have another dtype."""
    gradients: float
    optimizer: float
    """Moments; master weights count as weights."""


def moments(optimizer: Optimizer, params: int) -> float:
    """Return the bytes per parameter of the optimizer's states, if a parameter has `params` bytes."""
    width = QUANTIZED if rule_of(optimizer).quantized else params
    return float(width * len(moments_of(optimizer)))


def bytes_per_parameter(precision: Precision, optimizer: Optimizer) -> BytesPerParameter:
    """Return the bytes per parameter of one of our jobs: gradients end in the dtype of the weights, in either
    backend."""
    params, compute = DTYPES[precision.params].bytes, DTYPES[precision.compute].bytes
    return BytesPerParameter(
        weights=params,
        copy=compute if compute != params else 0,
        gradients=params,
        optimizer=moments(optimizer, params),
    )
