"""The goodput of a run: the name of each second from its first attempt's beginning to its end or now.

It follows from events.jsonl and metrics.jsonl. Nothing here is measured a second time.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median

from nanoscale.common.errors import UserError
from nanoscale.common.units import duration
from nanoscale.runs import events, lock, metrics, status
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.jsonlines import Object

NAMES = {
    "training": "training of steps that are in the run's history",
    "starting": "starts",
    "saving": "saves",
    "waiting": "waits for data",
    "evaluating": "evaluations",
    "lost": "steps that were trained again",
    "repairing": "repairs",
    "queued": "time between attempts after a regular stop",
}
"""The names of a run's seconds, and what the sentence says of them."""
_LEAVING = "leaving"
"""The name until the next event shows whether the run ended (starting) or another attempt followed (queued)."""
_BEGINS = {
    events.ATTEMPT: "starting",
    "running": "training",
    "rollback": "repairing",
    "restart": "repairing",
    "failure": "repairing",
    "end": _LEAVING,
}
"""Kinds of events after which the seconds have another name."""
_LONGEST_CAUSE = 60


@dataclass
class Cause:
    """A failure, and the seconds that it cost: repairs, and steps that were trained again."""

    text: str
    seconds: float = 0.0


@dataclass
class Goodput:
    """The seconds of a run by name; their sum is the wall time of the run."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(NAMES, 0.0))
    causes: list[Cause] = field(default_factory=list)

    @property
    def wall_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """The share of the wall time that trained, from 0 to 1."""
        return self.seconds["training"] / self.wall_s if self.wall_s else 0.0

    @property
    def sentence(self) -> str:
        """The share that trained, and what the other seconds were, the most first."""
        losses = {name: text for name, text in NAMES.items() if name != "training"}
        lost = [(self.seconds[name], text) for name, text in losses.items()]
        if self.causes:
            of_failures = sum(cause.seconds for cause in self.causes)
            others = self.seconds["lost"] + self.seconds["repairing"] - of_failures
            most = max(self.causes, key=lambda cause: cause.seconds).text
            count = f"{len(self.causes)} failures, the longest: " if len(self.causes) > 1 else ""
            lost = [pair for pair in lost if pair[1] not in (NAMES["lost"], NAMES["repairing"])]
            lost += [(of_failures, count + most), (others, NAMES["lost"])]
        shown = [pair for pair in sorted(lost, reverse=True) if pair[0] >= 5e-4 * self.wall_s]
        text = ", ".join(f"{duration(seconds)} of {what}" for seconds, what in shown)
        return f"{self.share:.1%} of {duration(self.wall_s)} trained" + (text and f"; lost: {text}")

    def document(self) -> Object:
        causes = [{"cause": cause.text, "seconds": cause.seconds} for cause in self.causes]
        about = {"share": self.share, "wall_s": self.wall_s, "seconds": self.seconds}
        return {**about, "causes": causes, "sentence": self.sentence}


def goodput(run: RunDirectory) -> Goodput | None:
    """Return the goodput of a run; None before its first attempt.

    Raises:
        UserError: events.jsonl or metrics.jsonl is damaged.
    """
    recorded, records = events.read(run), metrics.read(run)
    timeline = _Timeline(records)
    for event in recorded:
        timeline.add(event)
    if not timeline.name:
        return None
    now = status.read(run)
    if lock.owner(run) is not None:
        end = time.time()
    elif now.state in status.ENDED and now.ended is not None:
        end = now.ended
    else:  # its launcher was killed: its last heartbeat ends what is known
        known = [recorded[-1]["time"], *(it.get("time") or 0.0 for it in records[-1:])]
        end = max(*known, lock.last_beat(run) or 0.0)
    return timeline.finish(end)


class _Timeline:
    """The seconds of a run so far, event by event."""

    def __init__(self, records: list[Object]) -> None:
        self._records = records
        self._result = Goodput()
        self.name, self._since, self._last = "", 0.0, 0.0
        self._trained: list[tuple[float, float]] = []
        """Times from and to which steps were trained that are in the history."""
        self._saved: list[Object] = []
        self._starts: list[int] = []
        """Steps after which attempts started that are in the history."""
        self._resumed_step = 0

    def add(self, event: Object) -> None:
        kind, at = event["kind"], event["time"]
        if kind == "checkpoint":
            self._saved.append(event)
        elif kind == events.ATTEMPT:
            self._resumed_step = 0
            if self.name in ("starting", "training"):  # no end of the attempt before was recorded
                heard = event.get("heard")
                if heard is not None:
                    self._result.causes.append(Cause("the launcher, which was killed"))
                self._begin("queued" if heard is None else "repairing", max(self._last, heard or 0))
        elif kind in ("resumed", "rollback"):
            self._resumed_step = event.get("step", 0)
        if kind in ("restart", "failure", "rollback"):
            self._add_cause(event)
        if kind in _BEGINS and (self.name or kind in (events.ATTEMPT, "running")):
            self._begin(_BEGINS[kind], event.get("since") or at)
        if kind == "running":
            self._forget_after(self._resumed_step, at)
        self._last = at

    def finish(self, end: float) -> Goodput:
        """Return the goodput of a run that ended now, or is known until now."""
        self._begin("", end)
        left = sum(end - start for start, end in self._trained)
        steady = self._steady()
        parts = dict.fromkeys(("starting", "saving", "waiting", "evaluating"), 0.0)
        parts["saving"] = sum(event.get("stall_s") or 0.0 for event in self._saved)
        for record, steps, is_first in self._steps():
            parts["evaluating"] += record.get("eval_time_s") or 0.0
            parts["waiting"] += steps * waited(record)
            if is_first and steady is not None:  # the first steps compile and allocate
                parts["starting"] += max(0.0, steps * (own_time(record) - steady))
        for name, seconds in parts.items():
            self._result.seconds[name] += min(left, seconds)
            left -= min(left, seconds)
        self._result.seconds["training"] = left
        return self._result

    def _begin(self, name: str, at: float) -> None:
        """Give the seconds until `at` to the present name, and those from then on to another."""
        at = max(at, self._since)
        if self.name == "training":
            self._trained.append((self._since, at))
        elif self.name:
            present = self.name
            if present == _LEAVING:
                present = "queued" if name == "starting" else "starting"
            self._result.seconds[present] += at - self._since
            if present == "repairing" and self._result.causes:
                self._result.causes[-1].seconds += at - self._since
        self.name, self._since = name, at

    def _add_cause(self, event: Object) -> None:
        text = event.get("cause") or event["message"]
        if len(text) > _LONGEST_CAUSE:
            text = f"{text[: _LONGEST_CAUSE - 1]}…"
        self._result.causes.append(Cause(text))

    def _forget_after(self, step: int, now: float) -> None:
        """Count what was trained after a step as lost, since the training starts again from there."""
        reached = min(now, self._time_of(step))
        lost = sum(end - max(start, min(end, reached)) for start, end in self._trained)
        self._trained = [
            (start, min(end, reached)) for start, end in self._trained if start < reached
        ]
        self._saved = [event for event in self._saved if event.get("step", 0) <= step]
        self._starts = [*(start for start in self._starts if start <= step), step]
        self._result.seconds["lost"] += lost
        if self._result.causes:
            self._result.causes[-1].seconds += lost

    def _time_of(self, step: int) -> float:
        """Return the time at which the training continued after a step."""
        if not step:
            return -math.inf
        for event in reversed(self._saved):
            if event.get("step") == step:
                stall_s, took_s = (event.get(it) or 0.0 for it in ("stall_s", "seconds"))
                return float(event["time"] + stall_s - took_s)
        before = [it for it in self._records if it["step"] <= step and it.get("time")]
        if not before:
            return -math.inf
        missing = step - before[-1]["step"]
        return float(before[-1]["time"] + missing * (before[-1].get("step_time_s") or 0.0))

    def _steps(self) -> list[tuple[Object, int, bool]]:
        """Return each record with its number of steps, and whether they are the first after a start."""
        result, previous = [], 0
        for record in self._records:
            starts = [start for start in self._starts if previous <= start < record["step"]]
            result.append((record, record["step"] - max([previous, *starts]), bool(starts)))
            previous = record["step"]
        return result

    def _steady(self) -> float | None:
        """Return the median seconds of the steps that are not the first ones after a start."""
        times = [own_time(record) for record, _, is_first in self._steps() if not is_first]
        return median(times) if times else None


def waited(record: Object) -> float:
    """Return the seconds of a logged step in which the training waited for data."""
    return float(record.get("data_wait") or 0.0) * float(record.get("step_time_s") or 0.0)


def own_time(record: Object) -> float:
    """Return the seconds of a logged step without its wait for data."""
    return float(record.get("step_time_s") or 0.0) - waited(record)


class Tally:
    """The goodput of a run while it trains: what was known at the attempt's start, and each logged step."""

    def __init__(self, earlier: Goodput, step: int) -> None:
        self._begin = time.time() - earlier.wall_s
        self._trained, self._step = earlier.seconds["training"], step
        self._first: tuple[int, float] | None = None

    def add(self, record: Object) -> float:
        """Return the share of the time that trained, from 0 to 1, with a further logged step."""
        steps, seconds = int(record["step"]) - self._step, own_time(record)
        self._step, self._first = record["step"], self._first or (steps, seconds)
        self._trained += steps * seconds
        in_start = self._first[0] * max(0.0, self._first[1] - seconds)
        elapsed = max(float(record["time"]) - self._begin, 1e-9)
        return min(1.0, (self._trained - in_start) / elapsed)


def begin_tally(run: RunDirectory, step: int) -> Tally | None:
    """Begin the tally of a run that continues after `step`; None if a file of earlier attempts is damaged."""
    with suppress(UserError):
        earlier = goodput(run)
        return Tally(earlier, step) if earlier is not None else None
    return None
