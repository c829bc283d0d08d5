"""Sizes of the model whose products a device computes slowly, and what larger sizes would take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from nanoscale.config.resolved import ResolvedConfig
from nanoscale.plan.hardware.hardware import Hardware
from nanoscale.plan.time.step import step_time

_MULTIPLES = (64, 128)
"""Columns of a matrix that fill the tiles in which devices compute."""
_LEAST_GAIN = 1e-3
"""The share of a step below which a gain is not mentioned."""


@dataclass(frozen=True, slots=True)
class Padding:
    """A size that misses the multiples, and the larger size with the fastest step."""

    key: str
    size: int
    padded: int
    gain: float
    """The share of the step's time that the larger size would save."""


def paddings(config: ResolvedConfig, hardware: Hardware) -> Iterator[Padding]:
    """Yield each size that makes a step slower than a larger size would.

    Pretrained models keep their sizes, and CPUs have no tiles.
    """
    if config.model.init_from is not None or hardware.multiprocessors == 1:
        return
    now = step_time(config, hardware).seconds
    for name, ranks in (("hidden", 1), ("ffn", config.parallel.tp), ("vocab", config.parallel.tp)):
        size = getattr(config.model, name)
        larger = {-(-size // (ranks * each)) * ranks * each for each in _MULTIPLES} - {size}
        models = {padded: replace(config.model, **{name: padded}) for padded in larger}
        times = {
            padded: step_time(replace(config, model=model), hardware).seconds
            for padded, model in models.items()
        }
        best = min(times, key=times.__getitem__, default=None)
        if best is not None and times[best] < now * (1 - _LEAST_GAIN):
            yield Padding(f"model.{name}", size, best, 1 - times[best] / now)
