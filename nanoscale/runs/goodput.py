"""The goodput of a run: the name of each second from its first attempt's beginning to its end or now.

It follows from events.jsonl and metrics.jsonl.
"""

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
    "training": "training of steps in the run's history",
    "starting": "starts",
    "saving": "saves",
    "waiting": "waits for data",
    "evaluating": "evaluations",
    "lost": "steps that were trained again",
    "repairing": "repairs after failures",
    "queued": "time between attempts after a regular stop",
}
_LEAVING = "leaving"
"""The name until the next event shows whether the run ended (starting) or another attempt followed (queued)."""
_BEGINS = {
    events.ATTEMPT: "starting",
    "running": "training",
    "rollback": "repairing",
    "restart": "repairing",
    "failure": "repairing",
    "hosts": "repairing",
    "end": _LEAVING,
}
"""The names of the seconds after an event, by its kind."""


@dataclass
class Goodput:
    """The seconds of a run by name, and lost and repairing seconds by the failure that caused them."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(NAMES, 0.0))
    causes: dict[str, float] = field(default_factory=dict)

    def document(self) -> Object:
        """Return the seconds, the share that trained, and a sentence with the largest losses."""
        wall_s = sum(self.seconds.values())
        share = self.seconds["training"] / (wall_s or 1.0)
        losses = {text: self.seconds[name] for name, text in NAMES.items() if name != "training"}
        # What no failure caused is of steps that a resume from an older checkpoint trained again.
        losses[NAMES["lost"]] += losses.pop(NAMES["repairing"]) - sum(self.causes.values())
        largest = sorted((losses | self.causes).items(), key=lambda it: -it[1])[:6]
        largest = [it for it in largest if it[1] >= 5e-4 * wall_s]  # 0.05 % are not worth a word
        text = ", ".join(f"{duration(seconds)} of {what}" for what, seconds in largest)
        sentence = f"{share:.1%} of {duration(wall_s)} trained" + (text and f"; lost: {text}")
        about = {"share": share, "wall_s": wall_s, "sentence": sentence}
        return about | {"seconds": self.seconds, "causes": self.causes}


def goodput(run: RunDirectory) -> Goodput | None:
    """Return the goodput of a run; None before its first attempt. Raises UserError if a file is damaged."""
    recorded, records, now = events.read(run), metrics.read(run), status.read(run)
    timeline = _Timeline(records)
    for event in recorded:
        timeline.add(event)
    if not timeline.name:
        return None
    if lock.owner(run) is not None:
        return timeline.finish(time.time())
    if now.state in status.ENDED and now.ended is not None:
        return timeline.finish(now.ended)
    # Its launcher was killed: its last heartbeat ends what is known.
    known = [recorded[-1]["time"], *(it.get("time") or 0.0 for it in records[-1:])]
    return timeline.finish(max(*known, lock.last_beat(run) or 0.0))


class _Timeline:
    """The seconds of a run so far, event by event."""

    def __init__(self, records: list[Object]) -> None:
        self.name, self._since, self._last = "", 0.0, 0.0
        self._records, self._result, self._cause = records, Goodput(), ""
        self._resumed = 0
        """The step after which the present attempt trains."""
        self._trained: list[tuple[float, float]] = []
        """Times from and to which steps of the history were trained; `_saved` and `_starts` are of it too."""
        self._saved: list[Object] = []
        self._starts: list[int] = []

    def add(self, event: Object) -> None:
        kind, at = event["kind"], event["time"]
        if kind == "checkpoint":
            self._saved.append(event)
        elif kind == events.ATTEMPT:
            self._resumed, heard = 0, event.get("heard")
            # Nobody recorded the end of the attempt before.
            if self.name in ("starting", "training") or (
                self.name == _LEAVING and heard is not None
            ):
                self._cause = "a launcher that was killed"
                self._begin("queued" if heard is None else "repairing", max(self._last, heard or 0))
        elif kind in ("resumed", "rollback"):
            self._resumed = event.get("step", 0)
        if kind in ("restart", "failure", "rollback", "hosts"):
            self._cause = event.get("cause") or event["message"]
        elif kind == "end":
            self._cause = ""
        if kind in _BEGINS and (self.name or kind in (events.ATTEMPT, "running")):
            self._begin(_BEGINS[kind], event.get("since") or at)
        if kind == "running":
            self._forget_later_steps(at)
        self._last = at

    def finish(self, end: float) -> Goodput:
        """Return the goodput of a run that ended, or is known, until `end`."""
        self._begin("", end)
        parts = dict.fromkeys(("starting", "saving", "waiting", "evaluating"), 0.0)
        parts["saving"] = sum(event.get("stall_s") or 0.0 for event in self._saved)
        steady, firsts, previous = [], [], 0
        for record in self._records:
            step, own_s = record["step"], own_time(record)
            starts = [start for start in self._starts if previous <= start < step]
            steps, previous = step - max([previous, *starts]), step
            parts["evaluating"] += record.get("eval_time_s") or 0.0
            parts["waiting"] += steps * ((record.get("step_time_s") or 0.0) - own_s)
            firsts += [(steps, own_s)] if starts else []
            steady += [] if starts else [own_s]
        if steady:  # the first steps compile and allocate
            usual = median(steady)
            parts["starting"] += sum(steps * max(0.0, own_s - usual) for steps, own_s in firsts)
        left = sum(end - start for start, end in self._trained)
        for name, seconds in parts.items():
            self._result.seconds[name] += min(left, seconds)
            left -= min(left, seconds)
        self._result.seconds["training"] = left
        return self._result

    def _begin(self, name: str, at: float) -> None:
        """Give the seconds until `at` to the present name, and later ones to another."""
        at, present = max(at, self._since), self.name
        if present == "training":
            self._trained.append((self._since, at))
        elif present:
            if present == _LEAVING:
                present = "queued" if name == "starting" else "starting"
            self._count(present, at - self._since)
        self.name, self._since = name, at

    def _count(self, name: str, seconds: float) -> None:
        self._result.seconds[name] += seconds
        if name in ("lost", "repairing") and self._cause:
            causes = self._result.causes
            causes[self._cause] = causes.get(self._cause, 0.0) + seconds

    def _forget_later_steps(self, now: float) -> None:
        """Count what was trained after the resumed step as lost."""
        step, reached = self._resumed, min(now, self._time_of(self._resumed))
        kept = [(start, min(end, reached)) for start, end in self._trained if start < reached]
        self._count(
            "lost",
            sum(end - start for start, end in self._trained)
            - sum(end - start for start, end in kept),
        )
        self._trained = kept
        self._saved = [event for event in self._saved if event.get("step", 0) <= step]
        self._starts = [*(start for start in self._starts if start <= step), step]

    def _time_of(self, step: int) -> float:
        """Return the time at which the training continued after a step."""
        ends = [
            it["time"] + (step - it["step"]) * (it.get("step_time_s") or 0.0)
            for it in self._records
            if it["step"] <= step and it.get("time")
        ]
        ends += [
            it["time"] - (it.get("seconds") or 0.0) + (it.get("stall_s") or 0.0)
            for it in self._saved
            if it.get("step") == step
        ]
        return ends[-1] if step and ends else -math.inf


def own_time(record: Object) -> float:
    """Return the seconds of a logged step without its wait for data."""
    return float(record.get("step_time_s") or 0.0) * (1.0 - float(record.get("data_wait") or 0.0))


class Tally:
    """The goodput of a run while it trains, from its earlier attempts and each logged step."""

    def __init__(self, run: RunDirectory, step: int) -> None:
        """Begin with what is known of a run that continues after `step`."""
        self._began, self._trained, self._step = time.time(), 0.0, step
        with suppress(UserError):  # a damaged file of earlier attempts
            seconds = known.seconds if (known := goodput(run)) else {}
            self._began -= sum(seconds.values())
            self._trained = seconds.get("training", 0.0)
        self._first: tuple[int, float] | None = None

    def add(self, record: Object) -> float:
        """Return the share of the time that trained, from 0 to 1, with a further logged step."""
        steps, own_s = int(record["step"]) - self._step, own_time(record)
        self._step, self._first = record["step"], self._first or (steps, own_s)
        self._trained += steps * own_s
        in_start = self._first[0] * max(0.0, self._first[1] - own_s)
        elapsed = max(float(record["time"]) - self._began, 1e-9)
        return min(1.0, (self._trained - in_start) / elapsed)
