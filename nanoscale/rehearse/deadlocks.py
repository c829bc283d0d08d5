"""Ranks that would wait for each other forever: their events are played against each other. Torch-free.

A collective ends once every played member has begun it, and a message once both ranks have. A send waits for
its receiver, as gloo's does, and as NCCL's does if its buffers are full. Streams of a GPU wait independently.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nanoscale.common.units import byte_size
from nanoscale.rehearse.played.record import HOST, MESSAGES, Call, RankRecord, StreamEvent

_SHOWN = 4


class _Meeting(NamedTuple):
    """A collective or a message, which all of its ranks must begin."""

    ranks: tuple[int, ...]
    group: tuple[int, ...]
    number: int
    """Its number among the collectives of the same ranks in the same group."""


class _Rank:
    """The events of a rank that have not passed, by stream."""

    def __init__(self, record: RankRecord) -> None:
        self.record, self.meetings = record, list(_meetings(record))
        self._passed = {-1}
        self.streams: dict[int, deque[int]] = defaultdict(deque)
        self._host_before: list[int] = []
        """For each event the last one before it for which the host waits."""
        last = -1
        for at, event in enumerate(record.events):
            self.streams[event.stream].append(at)
            self._host_before.append(last)
            last = at if event.stream == HOST else last

    def next_event(self, stream: int) -> StreamEvent | None:
        """Return the next event of a stream; None if the host has not reached it, or there is none."""
        queue = self.streams[stream]
        reached = queue and self._host_before[queue[0]] in self._passed
        return self.record.events[queue[0]] if reached else None

    def advance(self, begun: dict[_Meeting, set[int]], played: set[int]) -> bool:
        """Let events pass until every stream waits; return whether one has."""
        before = len(self._passed)
        for stream, queue in self.streams.items():
            while (event := self.next_event(stream)) and self._may_pass(event, begun, played):
                if event.what == "call":
                    begun[self.meetings[event.of]].add(self.record.rank)
                self._passed.add(queue.popleft())
        return len(self._passed) > before

    def _may_pass(
        self, event: StreamEvent, begun: dict[_Meeting, set[int]], played: set[int]
    ) -> bool:
        if event.what == "wait":
            meeting = self.meetings[event.of]
            return begun[meeting].issuperset(played.intersection(meeting.ranks))
        return event.what in ("call", "work", "batch") or event.of in self._passed


def deadlock(records: Sequence[RankRecord]) -> list[str]:
    """Return a sentence if ranks would wait for each other forever, given that their collectives agree."""
    ranks = {record.rank: _Rank(record) for record in records}
    begun: dict[_Meeting, set[int]] = defaultdict(set)
    while any(rank.advance(begun, {*ranks}) for rank in ranks.values()):
        pass
    waiting: dict[int, tuple[Call, int]] = {}
    for number, rank in ranks.items():
        for event in map(rank.next_event, rank.streams):
            if event and event.what == "wait":
                meeting = rank.meetings[event.of]
                others = ranks.keys() & {*meeting.ranks} - begun[meeting]
                waiting[number] = rank.record.calls[event.of], min(others)
    return [_sentence(waiting)] if waiting else []


def _meetings(record: RankRecord) -> Iterator[_Meeting]:
    counts: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
    for call in record.calls:
        ranks = group = tuple(record.groups[call.group])
        if call.kind in MESSAGES and call.peer is not None:
            ends = record.rank, group[call.peer]
            ranks = ends if call.kind == "send" else ends[::-1]
            group = (-1, *group)  # other than a collective of the same two ranks
        counts[ranks, group] += 1
        yield _Meeting(ranks, group, counts[ranks, group])


def _sentence(waiting: dict[int, tuple[Call, int]]) -> str:
    """Return who waits in what for whom, along the circle of ranks."""
    circle: list[int] = []
    rank = min(waiting)
    while rank in waiting and rank not in circle:
        circle.append(rank)
        rank = waiting[rank][1]
    circle = circle[circle.index(rank) :] if rank in circle else circle
    parts = []
    for each in circle[:_SHOWN]:
        call, other = waiting[each]
        what = f"{call.kind.strip('_')} of {byte_size(call.bytes)} {call.dtype}"
        parts.append(f"rank {each} waits for rank {other} in {what} in {call.phase} at {call.line}")
    return "a deadlock: " + "; ".join(parts)
