"""Bytes a parameter: weights, the copy that is computed with, gradients, optimizer states.

This one arithmetic serves the textbook's cases and every rank of a real layout. Source of the accounting:
Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054), section 3.1; 8-bit states: Dettmers et al. 2022,
arXiv:2110.02861.
"""

from __future__ import annotations

from dataclasses import dataclass

from nanoscale.config.schema import Optimizer, Precision

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""of one number of a type"""
QUANTISED = 2 * (1 + 4 / 256)
"""two moments of 8 bits, each with an fp32 scale for every 256 of them"""


@dataclass(frozen=True, slots=True)
class BytesPerParameter:
    """What one parameter costs where nothing is sharded, in bytes."""

    weights: float
    """what the optimizer updates: masters, where a narrower copy is computed with"""
    copy: float
    """what is computed with, where that is not the weights themselves"""
    gradients: float
    optimizer: float
    """moments; masters are among the weights"""

    @property
    def training(self) -> float:
        return self.weights + self.copy + self.gradients + self.optimizer

    @property
    def inference(self) -> float:
        """Of the same model, loaded as it is trained."""
        return self.weights + self.copy

    def zero(self, stage: int, ranks: int) -> float:
        """Bytes a parameter of one of `ranks` under a stage of ZeRO, as the paper defines it (its figure 1).

        Masters count as optimizer states there; weights that are computed with are taken apart in stage 3.
        """
        computed, updated = (self.copy, self.weights) if self.copy else (self.weights, 0.0)
        states = (updated + self.optimizer) / (ranks if stage >= 1 else 1)
        gradients = self.gradients / (ranks if stage >= 2 else 1)
        return computed / (ranks if stage == 3 else 1) + gradients + states


def moments(optimizer: Optimizer, params: int) -> float:
    """Bytes a parameter of the optimizer's states, where parameters have `params` bytes."""
    if optimizer.name == "sgd":
        return float(params if optimizer.momentum else 0)
    return QUANTISED if optimizer.name == "adamw8bit" else 2.0 * params


def bytes_per_parameter(precision: Precision, optimizer: Optimizer) -> BytesPerParameter:
    """Of a job of ours: gradients end in the type of the weights, in either backend."""
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
    """A textbook's case: `weights` are computed with, `masters` are what is updated where they differ."""
    if masters:
        return BytesPerParameter(masters, weights, gradients, optimizer)
    return BytesPerParameter(weights, 0, gradients, optimizer)
