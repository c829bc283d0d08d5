"""Bytes per parameter: weights, compute copy, gradients, optimizer states.

The same arithmetic serves the textbook's cases and every rank of a real layout. Source of the accounting:
Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054), section 3.1; 8-bit states: Dettmers et al. 2022,
arXiv:2110.02861.
"""

from __future__ import annotations

from dataclasses import dataclass

from nanoscale.config.optimizers import moments_of, rule_of
from nanoscale.config.schema import Optimizer, Precision

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of one number of a dtype."""
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

    @property
    def training(self) -> float:
        return self.weights + self.copy + self.gradients + self.optimizer

    @property
    def inference(self) -> float:
        """Bytes per parameter of the same model for inference, loaded as it is trained."""
        return self.weights + self.copy

    def zero(self, stage: int, ranks: int) -> float:
        """Return the bytes per parameter on one of `ranks` in a stage of ZeRO, as the paper defines it (its
        figure 1).

        There, fp32 master weights count as optimizer states, and stage 3 shards the weights that are computed
        with.
        """
        computed, updated = (self.copy, self.weights) if self.copy else (self.weights, 0.0)
        states = (updated + self.optimizer) / (ranks if stage >= 1 else 1)
        gradients = self.gradients / (ranks if stage >= 2 else 1)
        return computed / (ranks if stage == 3 else 1) + gradients + states


def moments(optimizer: Optimizer, params: int) -> float:
    """Return the bytes per parameter of the optimizer's states, if a parameter has `params` bytes."""
    width = QUANTIZED if rule_of(optimizer).quantized else params
    return float(width * len(moments_of(optimizer)))


def bytes_per_parameter(precision: Precision, optimizer: Optimizer) -> BytesPerParameter:
    """Return the bytes per parameter of one of our jobs: gradients end in the dtype of the weights, in either
    backend."""
    params, compute = BYTES[precision.params], BYTES[precision.compute]
    return BytesPerParameter(
        weights=params,
        copy=compute if compute != params else 0,
        gradients=params,
        optimizer=moments(optimizer, params),
    )


def textbook(
    *, weights: float, masters: float = 0, gradients: float, optimizer: float
) -> BytesPerParameter:
    """Return a textbook's case: `weights` are computed with; `masters` are updated if they differ."""
    if masters:
        return BytesPerParameter(masters, weights, gradients, optimizer)
    return BytesPerParameter(weights, 0, gradients, optimizer)
