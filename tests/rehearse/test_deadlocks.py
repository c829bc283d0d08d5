"""Ranks whose collectives agree, and which would wait for each other forever."""

from __future__ import annotations

from nanoscale.rehearse.compare import mismatches
from nanoscale.rehearse.played.record import HOST, Call, RankRecord, StreamEvent

SEND = Call("send", 0, 32, "float32", 1, "step 1", 1, "", "loop.py:1")
RECEIVE = SEND._replace(kind="recv_", line="loop.py:2")
REDUCE = Call("allreduce_", 0, 1024, "float32", None, "step 1", 1, "", "loop.py:3", "sum")
TEXT = (
    "a deadlock: rank 0 waits for rank 1 in send of 32 B float32 in step 1 at loop.py:1; "
    "rank 1 waits for rank 0 in send of 32 B float32 in step 1 at loop.py:1"
)


def pair(calls: list[Call], peers: list[Call], events: str, others: str) -> list[str]:
    """Return what is found of two ranks, whose events are written as in `events_of`."""
    peers = [call._replace(peer=0 if call.peer == 1 else call.peer) for call in peers]
    first = RankRecord(0, [[0, 1]], calls, events_of(events))
    return mismatches([first, RankRecord(1, [[0, 1]], peers, events_of(others))])


def events_of(text: str) -> list[StreamEvent]:
    """Return events: `c0` and `w0` begin call 0 and wait for it, on stream 0; a digit before is the stream."""
    events = []
    for word in text.split():
        stream = int(word[0]) if word[0].isdigit() else HOST if word[0] == "h" else 0
        what = {"c": "call", "w": "wait", "a": "after", "h": "after"}[word.lstrip("0123456789")[0]]
        events.append(StreamEvent(stream, what, int(word[-1])))
    return events


def test_two_ranks_that_both_send_first() -> None:
    both = [SEND, RECEIVE]
    assert pair(both, both, "c0 w0 c1 w1", "c0 w0 c1 w1") == [TEXT]
    assert pair(both, both, "c0 c1 w0 w1", "c0 c1 w0 w1") == []
    assert pair(both, [RECEIVE, SEND], "c0 w0 c1 w1", "c0 w0 c1 w1") == []


def test_a_collective_between_a_send_and_its_receive() -> None:
    found = pair([REDUCE, SEND], [RECEIVE, REDUCE], "c0 w0 c1 w1", "c0 w0 c1 w1")
    assert found[0].startswith("a deadlock: rank 0 waits for rank 1 in allreduce of 1 KiB")
    assert pair([REDUCE, SEND], [RECEIVE, REDUCE], "c0 c1 w1 w0", "c0 w0 c1 w1") == []


def test_streams_wait_by_themselves_and_for_each_other() -> None:
    both = [SEND, RECEIVE]
    assert pair(both, both, "c0 w0 1c1 1w1", "c0 w0 1c1 1w1") == []
    assert pair(both, both, "c0 w0 1a1 1c1 1w1", "c0 w0 1a1 1c1 1w1") == [TEXT]


def test_the_host_holds_up_all_streams() -> None:
    both = [SEND, RECEIVE]
    assert pair(both, both, "c0 w0 h1 1c1 1w1", "c0 w0 h1 1c1 1w1") == [TEXT]


def test_a_circle_over_two_axes() -> None:
    """Ranks 0 and 3 begin with tp, ranks 1 and 2 with dp."""
    calls = [REDUCE, REDUCE._replace(group=1)]
    groups = [[[0, 1], [0, 2]], [[0, 1], [1, 3]], [[2, 3], [0, 2]], [[2, 3], [1, 3]]]

    def found(order: dict[int, str]) -> list[str]:
        events = (events_of(order.get(rank, "c0 w0 c1 w1")) for rank in range(4))
        records = zip(range(4), groups, events, strict=True)
        return mismatches([RankRecord(rank, own, calls, its) for rank, own, its in records])

    assert found({}) == []
    (text,) = found(dict.fromkeys((1, 2), "c1 w1 c0 w0"))
    assert text.startswith("a deadlock: rank 0 waits for rank 1 in allreduce")


def test_a_rank_that_was_not_played_is_waited_for_by_nobody() -> None:
    record = RankRecord(0, [[0, 1]], [SEND, RECEIVE], events_of("c0 w0 c1 w1"))
    assert mismatches([record]) == []
