"""The figures of a logged step: gathered from all ranks, and searched for slow ranks and faulty GPUs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from nanoscale.backends.base import Engine, StepResult
from nanoscale.metrics.health import Health
from nanoscale.metrics.meter import Meter, peak_memory_gib
from nanoscale.parallel import process_group
from nanoscale.runs.events import Note
from nanoscale.train.checkpointing import Progress
from nanoscale.train.stragglers import Stragglers


@dataclass
class StepLog:
    """The figures of the last logged step, and what earlier steps have shown of ranks and GPUs."""

    engine: Engine
    progress: Progress
    meter: Meter
    note: Note
    hosts: Sequence[str]

    def __post_init__(self) -> None:
        device = self.engine.device
        self.health = Health(device.index if device.type == "cuda" else None)
        peers = len(self.hosts) // self.engine.config.parallel.pp
        stages = [range(first, first + peers) for first in range(0, len(self.hosts), max(1, peers))]
        least = self.engine.config.launcher.exclude_stragglers or inf
        self.stragglers = Stragglers(stages, self.hosts, least)
        self._logged_samples = self.progress.consumed_samples
        self._skipped = 0.0

    def gather(self, result: StepResult, lr: float) -> dict[str, Any]:
        """Return the record of a step, from the figures of all ranks since the last. Every rank calls it."""
        local_figures = [result.loss_sum.item(), peak_memory_gib(self.engine.device)]
        local_figures += [self.meter.own_time(), *self.health.read()]
        all_figures = process_group.gather_numbers(local_figures)
        self._own_times, self._healths = all_figures[:, 2].tolist(), all_figures[:, 3:].tolist()
        consumed = self.progress.consumed_samples
        samples, self._logged_samples = consumed - self._logged_samples, consumed
        return {
            "step": self.progress.step,
            "loss": all_figures[:, 0].sum().item() / float(result.tokens),
            "grad_norm": result.grad_norm.item(),
            "lr": lr,
            "tokens": consumed * self.engine.config.train.seq_len,
            **self.meter.read(samples),
            **self.engine.figures(),
            "memory_gib": all_figures[:, 1].max().item(),
            **self.health.metrics(self._healths),
            "time": time.time(),
        }

    def warn(self, record: dict[str, Any]) -> None:
        """Record an event for each rank that has become slow and each GPU that has become faulty."""
        late = self.stragglers.add(record["step"], self._own_times, record["step_time_s"])
        if late is not None:
            text, host, ratio = late
            self.note("straggler", text, host=host, ratio=ratio)
        skipped = record.get("skipped_steps", 0.0)
        if skipped > self._skipped and "loss_scale" not in record:
            count = f"{skipped - self._skipped:.0f} of the steps up to {record['step']}"
            self.note(
                "skipped", f"{count} had gradients that are not finite, and changed no weights"
            )
            self._skipped = skipped
        for host, fault in self.health.warnings(self._healths, self.hosts):
            self.note("health", fault, host=host)
