"""The figures of a logged step: gathered from all ranks, and searched for slow ranks and faulty GPUs.

Ranks and hosts that arrive late at the collectives of every step show in each rank's time without waiting.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import Any

from nanoscale.backends.base import Engine, StepResult
from nanoscale.common.units import duration, listed
from nanoscale.metrics.health import Health
from nanoscale.metrics.meter import Meter, peak_memory_gib
from nanoscale.parallel import process_group
from nanoscale.runs.events import Note
from nanoscale.train.checkpointing import Progress


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


_RECORDS, _LAST = 20, 16
"""The logged steps that are looked at, and in how many of them a rank must be the last of its peers."""
_LEAST, _LEAST_S = 0.05, 0.002
"""The least that a late rank is behind the others: this share of the time of a step, and seconds."""
_OF_LATEST = 0.5
"""The least that others are behind, as a share of the latest: it changes when others compute at the same time,
and so how fast they are. In a pipeline, a rank of another stage than the latest was named for this."""


@dataclass
class Stragglers:
    """The detection of ranks, or hosts, that are the last of their peers in nearly every logged step."""

    stages: Sequence[Sequence[int]]
    """The ranks of each stage of the pipeline, which do the same work."""
    hosts: Sequence[str]
    """The host of each rank."""
    least: float = inf
    """The least ratio with which a rank or host that was reported is reported again."""
    _records: deque[tuple[int, list[float], float]] = field(
        default_factory=lambda: deque(maxlen=_RECORDS)
    )
    _bounds: dict[str, float] = field(default_factory=dict)

    def add(self, step: int, seconds: list[float], step_s: float) -> tuple[str, str, float] | None:
        """Take the seconds of a step for which each rank did not wait, and of the whole step; return a sentence
        about late ranks, and the host and the ratio of the latest one that is reported now."""
        self._records.append((step, seconds, step_s))
        if len(self._records) < _RECORDS:
            return None
        late: dict[str, tuple[float, float, str]] = {}
        for ranks in self.stages:
            by_host: dict[str, list[int]] = {}
            for rank in ranks:
                by_host.setdefault(self.hosts[rank], []).append(rank)
            is_spread = max(map(len, by_host.values())) > 1
            hosts = self._late(by_host) if is_spread else {}
            by_rank = {f"rank {it} on {self.hosts[it]}": [it] for it in ranks}
            late |= hosts or self._late(by_rank)
        latest = max(late.values(), default=(0.0,))[0]
        late = {name: it for name, it in late.items() if it[0] >= _OF_LATEST * latest}
        new = {name: it for name, it in late.items() if it[1] >= self._bounds.get(name, 1.0)}
        self._bounds |= {name: max(self.least, 1.1 * ratio) for name, (_, ratio, _) in new.items()}
        if not new:
            return None
        verb, behind = "arrives" if len(late) == 1 else "arrive", duration(max(late.values())[0])
        text = (
            f"{listed(sorted(late))} {verb} {behind} late in every step since step "
            f"{self._records[0][0]}, and the others wait"
        )
        _, ratio, host = max(new.values())
        return text, host, ratio

    def _late(self, groups: Mapping[str, Sequence[int]]) -> dict[str, tuple[float, float, str]]:
        """Return the group whose first rank is later than the first ranks of all others: the seconds behind
        their median, the ratio of its own time to theirs, and its host."""
        if len(groups) < 2:
            return {}
        firsts = [
            {name: min(seconds[rank] for rank in ranks) for name, ranks in groups.items()}
            for _, seconds, _ in self._records
        ]
        lasts = [max(one, key=one.__getitem__) for one in firsts]
        last = max(groups, key=lasts.count)
        if lasts.count(last) < _LAST:
            return {}
        behind = median(one.pop(last) - median(one.values()) for one in firsts)
        usual = median(median(one.values()) for one in firsts)
        if behind <= max(_LEAST_S, _LEAST * median(step_s for *_, step_s in self._records)):
            return {}
        return {last: (behind, 1 + behind / max(usual, _LEAST_S), self.hosts[groups[last][0]])}
