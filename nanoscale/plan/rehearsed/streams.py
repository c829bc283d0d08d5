"""The time of a step that was rehearsed: the events of the streams of all played ranks, played with times.

The host issues the events of a rank in order, and a stream begins each as soon as it is issued and the one
before has ended. A collective begins once all its played ranks have begun it, and after the one before it in
the same group. Ranks that were not played are as fast as played ones.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanoscale.plan.rehearsed.costs import Call, PlayedCosts

HOST = -1
"""The stream of events for which the host waits, as in a rehearsal's record."""
_MESSAGES = ("send", "recv_")
Seconds = defaultdict[Any, float]


def _seconds() -> Seconds:
    return defaultdict(float)


@dataclass(frozen=True)
class _Segment:
    """Operations that a stream computes one after another."""

    issued: float
    """Seconds of the host to start them."""
    computed: float
    """Seconds of the device, if all are issued before it begins."""
    bounded: float
    """Seconds until the last ends, from the moment at which the host starts the first, on an idle device."""


@dataclass
class Slice:
    """Something that takes time on one stream, for a trace."""

    stream: str
    begin: float
    end: float
    name: str
    detail: str = ""


@dataclass
class RankTime:
    """The time of one rank's step, seconds."""

    rank: int
    seconds: float = 0.0
    computed: float = 0.0
    """Seconds of the default stream's operations."""
    host_gaps: float = 0.0
    """Seconds in which the default stream waits for the host to issue an operation."""
    exposed: Seconds = field(default_factory=_seconds)
    """Seconds in which the default stream, or the host, waits for a collective, or for another stream that
    waits for one; by axis and line of code."""
    communicated: Seconds = field(default_factory=_seconds)
    """Seconds of collectives, hidden or not, by axis."""
    slowed: float = 0.0
    """Seconds by which hidden collectives slow down the computation."""
    operations: Seconds = field(default_factory=_seconds)
    """Seconds of the default stream's operations, by work."""
    counts: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    slices: list[Slice] = field(default_factory=list)


class _Meeting:
    """A collective or message, which all of its played ranks must begin."""

    def __init__(self, number: int, group: Any) -> None:
        self.number, self.group = number, group
        self.calls: dict[int, Call] = {}
        """The call of each played rank."""
        self.ready: dict[int, tuple[float, int]] = {}
        """The time at which each rank is ready, and the number of equal micro batches of its call."""
        self.end: float | None = None


class _Rank:
    """One rank's events on their way through the step."""

    def __init__(
        self,
        rank: int,
        streams: Mapping[str, Any],
        costs: PlayedCosts,
        axes: Mapping[tuple[int, ...], str],
        traced: bool,
        meetings: dict[Any, _Meeting],
    ) -> None:
        self.time = RankTime(rank)
        self.events: Sequence[Sequence[Any]] = streams["events"]
        self.calls: Sequence[Call] = streams["calls"]
        self.works = [tuple(work) for work in streams["works"]]
        self._meetings: list[_Meeting] = []
        for key, call in zip(_keys(rank, self.calls), self.calls, strict=True):
            meeting = meetings.setdefault(key, _Meeting(len(meetings), key[0]))
            meeting.calls[rank] = call
            self._meetings.append(meeting)
        self._costs, self._axes, self._traced = costs, axes, traced
        self._seconds = [costs.seconds(work) for work in self.works]
        self._parts: Sequence[Sequence[int]] = streams["segments"]
        self._segments = [self._segment(segment) for segment in self._parts]
        self.stream_times: dict[int, float] = defaultdict(float)
        self._awaited: dict[int, Call] = {}
        """The collective that each stream has waited for last."""
        self.done = {-1: 0.0}
        """The time at which each event that has passed has ended."""
        self.queues: dict[int, deque[int]] = defaultdict(deque)
        self.begun: list[_Meeting] = []
        """The meetings that the last `advance` began."""
        self._until: dict[int, int] = {}
        """The event that each stream but the default one has waited for last."""
        self._issue: list[tuple[int, float]] = []
        """For each event, the last wait of the host before it, and the host's seconds since then."""
        self._repeats: list[int] = []
        self._batches: list[tuple[int, float]] = []
        last, since, repeat = -1, 0.0, 1
        for at, (stream, what, of) in enumerate(self.events):
            self.queues[stream].append(at)
            repeat = of if what == "batch" and of else repeat
            self._repeats.append(repeat)
            self._issue.append((last, since))
            if what == "work":
                since += self._segments[of].issued
            elif what == "call":
                since += costs.call_start
            if stream == HOST:
                last, since = at, 0.0
        self.final_host = last, since

    def _segment(self, segment: Sequence[int]) -> _Segment:
        start, end = self._costs.host_start, 0.0
        for number, work in enumerate(segment, 1):
            end = max(end, number * start) + self._seconds[work]
        return _Segment(len(segment) * start, sum(self._seconds[it] for it in segment), end)

    def host_time(self, at: int) -> float | None:
        """Return the time at which the host issues an event; None if it has not got there."""
        before, since = self._issue[at]
        return self.done[before] + since if before in self.done else None

    def advance(self) -> bool:
        """Let events pass until every stream waits; True if one has passed."""
        before, self.begun = len(self.done), []
        for stream, queue in self.queues.items():
            if self._until.get(stream, -1) in self.done:
                while queue and self._passes(stream, queue[0]):
                    queue.popleft()
        return len(self.done) > before

    def _passes(self, stream: int, at: int) -> bool:
        issued = self.host_time(at)
        if issued is None:
            return False
        _, what, of = self.events[at]
        now, weight = max(self.stream_times[stream], issued), self._repeats[at]
        gap = weight * (now - self.stream_times[stream])
        if what == "work":
            now = self._compute(stream, of, issued, weight)
        elif what == "call":
            self._meetings[of].ready[self.time.rank] = now, weight
            self.begun.append(self._meetings[of])
        elif what == "wait":
            end = self._meetings[of].end
            if end is None:
                return False
            self._awaited[stream] = self.calls[of]
            if stream in (0, HOST):
                self._expose(self.calls[of], now, end, weight)
            now = max(now, end)
        elif what == "after":
            if of not in self.done:
                if stream:
                    self._until[stream] = of
                return False
            call = self._awaited.get(self.events[of][0])
            if stream == 0 and call is not None:
                self._expose(call, now, self.done[of], weight)
            now = max(now, self.done[of])
        elif what == "batch" and of:
            self._batches.append((of, max(now, issued)))
        if what != "work" and stream == 0:
            self.time.host_gaps += gap
        self.stream_times[stream] = self.done[at] = now
        return True

    def _expose(self, call: Call, begin: float, end: float, weight: int) -> None:
        """Count the seconds in which the default stream or the host waits for a collective."""
        if end > begin:
            axis = self._axes[tuple(call["ranks"])]
            self.time.exposed[axis, call["line"]] += weight * (end - begin)
            self.time.slowed -= weight * (end - begin) * self._costs.slowdown(call)
            self.time.slices.append(Slice("waits", begin, end, f"waits for {axis}", call["line"]))

    def _compute(self, stream: int, number: int, issued: float, weight: int) -> float:
        segment, begin = self._segments[number], self.stream_times[stream]
        end = max(begin + segment.computed, issued + segment.bounded)
        if stream == 0:
            self.time.computed += weight * segment.computed
            self.time.host_gaps += weight * (end - segment.computed - begin)
            for work in self._parts[number]:
                self.time.operations[self.works[work]] += weight * self._seconds[work]
                self.time.counts[self.works[work]] += weight
        if self._traced:
            self._trace(stream, self._parts[number], begin, issued)
        return end

    def _trace(self, stream: int, segment: Sequence[int], end: float, issued: float) -> None:
        for number, work in enumerate(segment, 1):
            begin = max(end, issued + number * self._costs.host_start)
            end = begin + self._seconds[work]
            name, detail = self.works[work][1], ", ".join(map(str, self.works[work][2:]))
            self.time.slices.append(Slice(f"stream {stream}", begin, end, name, detail))

    def finish(self) -> None:
        """Set the seconds of the step: a micro batch that stands for several takes its time for each."""
        last, since = self.final_host
        host = since + self.done[last]
        end = max([host, *self.stream_times.values()])
        self.time.host_gaps += max(0.0, end - max([0.0, *self.stream_times.values()]))
        ends = [at for _, at in self._batches[1:]]
        for (repeat, begin), until in zip(self._batches, [*ends, end], strict=False):
            end += (repeat - 1) * (until - begin)
        self.time.slowed = max(0.0, self.time.slowed)
        self.time.seconds = end + self.time.slowed


def _keys(rank: int, calls: Sequence[Call]) -> Iterator[Any]:
    """Yield what is equal on all ranks of a collective: its ranks and its number among theirs."""
    counts: Counter[Any] = Counter()
    for call in calls:
        ranks: tuple[Any, ...] = tuple(call["ranks"])
        if call["kind"] in _MESSAGES and call["peer"] is not None:
            peer = ranks[call["peer"]]
            ranks = ("message", rank, peer) if call["kind"] == "send" else ("message", peer, rank)
        counts[ranks] += 1
        yield ranks, counts[ranks]


def simulate(
    streams: Mapping[str, Mapping[str, Any]],
    costs: PlayedCosts,
    axes: Mapping[tuple[int, ...], str],
    *,
    traced: bool = False,
) -> list[RankTime]:
    """Return the time of the last step of each played rank.

    Args:
        streams: the events by rank, as in a rehearsal's document.
        axes: the name of each group of ranks.
        traced: True to keep the slices of all streams.
    """
    meetings: dict[Any, _Meeting] = {}
    ranks = {
        int(number): _Rank(int(number), each, costs, axes, traced, meetings)
        for number, each in streams.items()
    }
    free: dict[Any, float] = defaultdict(float)
    moved = True
    while moved:
        moved = sum(rank.advance() for rank in ranks.values()) > 0
        begun = {meeting for rank in ranks.values() for meeting in rank.begun}
        for meeting in sorted(begun, key=lambda it: it.number):
            if len(meeting.ready) < len(meeting.calls):
                continue
            call = next(iter(meeting.calls.values()))
            begin = max(free[meeting.group], *(at for at, _ in meeting.ready.values()))
            meeting.end = free[meeting.group] = begin + costs.call(call)
            axis, slowdown = axes[tuple(call["ranks"])], costs.slowdown(call)
            name = f"{call['kind'].strip('_')} {axis}"
            for number, (_, weight) in meeting.ready.items():
                time = ranks[number].time
                time.communicated[axis] += weight * (meeting.end - begin)
                time.slowed += weight * (meeting.end - begin) * slowdown
                time.slices.append(
                    Slice(f"communication {axis}", begin, meeting.end, name, call["line"])
                )
            moved = True
    for rank in ranks.values():
        rank.finish()
    return [rank.time for rank in ranks.values()]
