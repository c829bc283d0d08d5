"""The comparison of the collectives of ranks. Ranks that call different collectives hang. Torch-free.

Ranks that would wait for each other forever are found by playing their events against each other: a collective
ends once every played member has begun it, and a message once both ranks have. A send waits for its receiver,
as gloo's does, and as NCCL's does if its buffers are full. Streams of a GPU wait independently.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations, zip_longest
from typing import NamedTuple

from nanoscale.common.units import byte_size
from nanoscale.rehearse.played.record import HOST, MESSAGES, Call, RankRecord, StreamEvent

_ALL_PAIRS = 64
"""The most ranks for which every pair is compared."""


def mismatches(
    records: Sequence[RankRecord], is_ring: Callable[[Sequence[int]], bool] = lambda _: False
) -> list[str]:
    """Return every difference between ranks that would hang or corrupt the job, as sentences.

    Two ranks must call the collectives of all groups that they share in the same order, with equal kind, size,
    dtype, root and reduction. The receiver of every message must wait for it. No ranks may wait in a circle.

    Args:
        is_ring: returns True for the members of a group in which every rank sends on what it receives.
    """
    good = [record for record in records if not record.error]
    pairs: Iterable[tuple[RankRecord, RankRecord]] = combinations(good, 2)
    if len(good) > _ALL_PAIRS:
        pairs = _adjacent(good)
    differences = filter(None, (_first_difference(first, second) for first, second in pairs))
    found = [*dict.fromkeys(differences), *_lost_messages(good, is_ring)]
    return found or deadlock(good)


def compared_groups(records: Sequence[RankRecord]) -> tuple[int, int]:
    """Return in how many groups of the played ranks two members were played without an error, and the number of
    groups."""
    good = {record.rank for record in records if not record.error}
    groups = {tuple(group) for record in records for group in record.groups if len(group) > 1}
    return sum(len(good.intersection(group)) > 1 for group in groups), len(groups)


def _adjacent(records: Sequence[RankRecord]) -> Iterator[tuple[RankRecord, RankRecord]]:
    """Yield each rank with the first played rank of each of its groups."""
    by_rank = {record.rank: record for record in records}
    for record in records:
        firsts = {
            next((member for member in group if member in by_rank), record.rank)
            for group in record.groups
        }
        yield from ((by_rank[first], record) for first in sorted(firsts) if first < record.rank)


def _first_difference(first: RankRecord, second: RankRecord) -> str | None:
    groups = {tuple(group) for group in first.groups} & {tuple(group) for group in second.groups}
    shared = {group for group in groups if {first.rank, second.rank} <= {*group}}
    if not shared:
        return None
    both = zip_longest(_collectives(first, shared), _collectives(second, shared))
    for number, (one, other) in enumerate(both, 1):
        differs = (
            f"collective {number} that ranks {first.rank} and {second.rank} share differs: rank "
        )
        if _meaning(first, one) != _meaning(second, other):
            others = f"rank {second.rank} {_described(second, other)}"
            return f"{differs}{first.rank} {_described(first, one)}, {others}"
        if one and other and one.sent:
            pairs = ((first, one, second, other), (second, other, first, one))
            if text := next(filter(None, (_unequal_split(*pair) for pair in pairs)), None):
                return differs + text
    return None


def _unequal_split(
    sender: RankRecord, call: Call, receiver: RankRecord, answer: Call
) -> str | None:
    """Return the bytes that one rank sends and another one awaits in an all-to-all if they differ."""
    members = sender.groups[call.group]
    sent = call.sent[members.index(receiver.rank)]
    awaited = answer.received[members.index(sender.rank)]
    if sent == awaited:
        return None
    parts = f"{byte_size(sent)} are for rank {receiver.rank}, which awaits {byte_size(awaited)}"
    return f"{sender.rank} {_described(sender, call)}, of which {parts}"


def _collectives(record: RankRecord, groups: set[tuple[int, ...]]) -> list[Call]:
    numbers = {at for at, group in enumerate(record.groups) if tuple(group) in groups}
    return [call for call in record.calls if call.group in numbers and call.kind not in MESSAGES]


def _meaning(record: RankRecord, call: Call | None) -> object:
    return call and (tuple(record.groups[call.group]), call.signature, call.repeat)


def _described(record: RankRecord, call: Call | None) -> str:
    if call is None:
        return "asks for no more"
    members = record.groups[call.group]
    return (
        f"asks for {_named(call, members)} of {byte_size(call.bytes)} {call.dtype} among {len(members)} "
        f"ranks ({_shortened(members)}) in {call.phase} at {call.line}"
    )


def _named(call: Call, members: Sequence[int]) -> str:
    """Return the name of a collective, with its reduction or root."""
    reduction = f" ({call.reduction})" if call.reduction else ""
    root = f" with root {members[call.peer]}" if call.peer is not None else ""
    return f"{call.kind.strip('_')}{reduction}{root}"


def _shortened(members: Sequence[int]) -> str:
    shown = ", ".join(map(str, members[:4]))
    return shown if len(members) <= 4 else f"{shown}, …"


Letter = tuple[int, str]
"""Bytes and dtype of a message."""
Members = tuple[int, ...]
Way = tuple[int, int, Members]
"""Sender, receiver and their group."""
Letters = dict[Way, list[Letter]]


def _lost_messages(
    records: Sequence[RankRecord], is_ring: Callable[[Sequence[int]], bool]
) -> Iterator[str]:
    played = {record.rank for record in records}
    sent, awaited = _messages(records)
    for sender, receiver, members in sorted({*sent, *awaited}):
        way = (sender, receiver, members)
        if {sender, receiver} <= played and sent[way] != awaited[way]:
            yield _difference(sender, receiver, sent[way], awaited[way])
    for members in sorted({way[2] for way in (*sent, *awaited)}):
        played_members = [rank for rank in members if rank in played]
        if len(played_members) < len(members) and is_ring(members):
            yield from _broken_ring(members, played_members, sent, awaited)


def _messages(records: Sequence[RankRecord]) -> tuple[Letters, Letters]:
    sent: Letters = defaultdict(list)
    awaited: Letters = defaultdict(list)
    for record in records:
        for call in record.calls:
            if call.kind in MESSAGES:
                members = tuple(record.groups[call.group])
                assert call.peer is not None
                peer, letters = members[call.peer], [(call.bytes, call.dtype)] * call.repeat
                if call.kind == "send":
                    sent[record.rank, peer, members] += letters
                else:
                    awaited[peer, record.rank, members] += letters
    return sent, awaited


def _broken_ring(
    members: Members, played: Sequence[int], sent: Letters, awaited: Letters
) -> Iterator[str]:
    """Yield differences in a ring if only some of its ranks were played: each sends on what it receives."""
    usual: list[Letter] | None = None
    for rank in played:
        at = members.index(rank)
        after, before = members[(at + 1) % len(members)], members[at - 1]
        out, into = sent[rank, after, members], awaited[before, rank, members]
        usual = out if usual is None else usual
        if out != usual:
            yield _difference(rank, after, out, usual)
        elif into != usual:
            yield _difference(before, rank, usual, into)


def _difference(sender: int, receiver: int, sent: list[Letter], awaited: list[Letter]) -> str:
    if len(sent) != len(awaited):
        return f"rank {sender} sends {len(sent)} messages to rank {receiver}, which awaits {len(awaited)}"
    number, (one, other) = next(
        (n, pair) for n, pair in enumerate(zip(sent, awaited, strict=True), 1) if pair[0] != pair[1]
    )
    return (
        f"message {number} from rank {sender} to rank {receiver}: {byte_size(one[0])} {one[1]} are sent and "
        f"{byte_size(other[0])} {other[1]} awaited"
    )


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
    return f"a deadlock: {'; '.join(parts)}"
