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
    """Bytes of one parameter without sharding."""

    weights: float
    """The weights that the optimizer updates: fp32 master weights if there is a compute copy."""
    copy: float
    """The copy in the compute dtype; 0 if the weights have the compute dtype."""
    gradients: float
    optimizer: float
    """The optimizer's moments, without master weights."""


def moments(optimizer: Optimizer, params: int) -> float:
    """Return the bytes of the optimizer's moments of one parameter, which itself has `params` bytes."""
    width = QUANTIZED if rule_of(optimizer).quantized else params
    return float(width * len(moments_of(optimizer)))


def bytes_per_parameter(precision: Precision, optimizer: Optimizer) -> BytesPerParameter:
    """Return the bytes per parameter of a job. Gradients for the optimizer have the dtype of the weights."""
    params, compute = DTYPES[precision.params].bytes, DTYPES[precision.compute].bytes
    return BytesPerParameter(
        weights=params,
        copy=compute if compute != params else 0,
        gradients=params,
        optimizer=moments(optimizer, params),
    )
