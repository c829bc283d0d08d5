"""Bytes per parameter: weights, compute copy, gradients, optimizer states.

Sources: Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054), section 3.1; 8-bit states: Dettmers et al. 2022,
arXiv:2110.02861.
"""

from __future__ import annotations

from dataclasses import dataclass

from nanoscale.config.dtypes import DTYPES
from nanoscale.config.optimizers import keeps_average, moments_of, rule_of
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
    in_blocks: float
    """The moments of matrices of blocks."""
    frozen: float
    """A weight that is not trained, in the compute dtype."""

    def moments(self, numel: int, in_blocks: int) -> int:
        """Return the bytes of the moments of `numel` parameters, with `in_blocks` in matrices of blocks."""
        return int(self.optimizer * (numel - in_blocks) + self.in_blocks * in_blocks)


def moments(optimizer: Optimizer, params: int, *, in_blocks: bool = False) -> float:
    """Return the bytes of the moments of a parameter of `params` bytes, in a matrix of a block or elsewhere."""
    kept = len(moments_of(optimizer, in_blocks=in_blocks))
    return moment_width(optimizer, params) * kept + average_width(optimizer, params)


def moment_width(optimizer: Optimizer, params: int) -> float:
    """Return the bytes of one moment of a parameter of `params` bytes."""
    if rule_of(optimizer).quantized:
        return QUANTIZED
    return float(DTYPES["bf16"].bytes if optimizer.moments_dtype == "bf16" else params)


def average_width(optimizer: Optimizer, params: int) -> int:
    """Return the bytes of the average of a parameter of `params` bytes; 0 if the job keeps none."""
    return max(params, DTYPES["fp32"].bytes) if keeps_average(optimizer) else 0


def bytes_per_parameter(precision: Precision, optimizer: Optimizer) -> BytesPerParameter:
    """Return the bytes per parameter of a job. Gradients for the optimizer have the dtype of the weights."""
    params, compute = DTYPES[precision.params].bytes, DTYPES[precision.compute].bytes
    return BytesPerParameter(
        weights=params,
        copy=compute if compute != params else 0,
        gradients=params,
        optimizer=moments(optimizer, params),
        in_blocks=moments(optimizer, params, in_blocks=True),
        frozen=compute,
    )
