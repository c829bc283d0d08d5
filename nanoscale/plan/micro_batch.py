"""The micro batch of `train.micro_batch=auto`."""

from __future__ import annotations

from dataclasses import replace

from nanoscale.common.errors import UserError
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.stages import takes
from nanoscale.plan.hardware.hardware import hardware_of
from nanoscale.plan.predict import SURE, predict


def with_fitting_micro_batch(config: ResolvedConfig) -> ResolvedConfig:
    """Return the configuration with the largest micro batch, up to its own, that fits with at least `SURE`.

    If none does, return it with the smallest. On hardware that no plan knows, the micro batch stays.
    """
    try:
        hardware = hardware_of(config)
    except UserError:
        return config
    layout, train = config.parallel, config.train
    samples = train.global_batch // layout.dp
    for size in range(train.micro_batch, 0, -1):
        if samples % size or not takes(layout.schedule, layout.pp, samples // size):
            continue
        config = replace(config, train=replace(train, micro_batch=size))
        if predict(config, hardware).fits_probability >= SURE:
            break
    return config
