"""The comparison of what ranks do together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nanoscale.rehearse.compare import mismatches
from nanoscale.rehearse.played.record import Call, RankRecord

REDUCE = Call("allreduce_", 0, 1024, "float32", None, "step 1", 1, "", "loop.py:1")
GATHER = REDUCE._replace(kind="_allgather_base_", bytes=2048)
SEND = REDUCE._replace(kind="send", peer=1)
RECEIVE = REDUCE._replace(kind="recv_", peer=0)


def pair(first: list[Call], second: list[Call], groups: list[list[int]] | None = None) -> list[str]:
    groups = groups or [[0, 1]]
    return mismatches([RankRecord(0, groups, first), RankRecord(1, groups, second)])


def test_ranks_that_do_the_same_agree() -> None:
    assert pair([REDUCE, GATHER], [REDUCE, GATHER]) == []
    assert pair([SEND], [RECEIVE]) == []


@pytest.mark.parametrize(
    "other",
    [
        [GATHER, REDUCE],
        [REDUCE],
        [REDUCE, GATHER._replace(bytes=4096)],
        [REDUCE, GATHER._replace(dtype="bfloat16")],
        [REDUCE, GATHER._replace(repeat=2)],
        [REDUCE._replace(reduction="max"), GATHER],
        [REDUCE, GATHER, GATHER],
    ],
    ids=["order", "skipped", "size", "type", "repeated", "reduction", "one too many"],
)
def test_a_collective_that_differs_is_named(other: list[Call]) -> None:
    (found,) = pair([REDUCE, GATHER], other)
    assert "ranks 0 and 1 share differs" in found
    assert "loop.py:1" in found


@pytest.mark.parametrize("splits", [([8, 8], [8, 24]), ([8, 24], [8, 8])], ids=["less", "more"])
def test_an_all_to_all_of_other_splits(splits: tuple[list[int], list[int]]) -> None:
    sent, awaited = splits
    first = REDUCE._replace(kind="all_to_all_single", sent=sent, received=[8, 16], bytes=32)
    other = first._replace(
        sent=[16, 0], received=[sent[1], 0], bytes=16
    )  # each rank has its own sizes
    assert pair([first], [other]) == []
    (found,) = pair([first], [other._replace(received=[awaited[1], 0])])
    assert f"of which {sent[1]} B are for rank 1, which awaits {awaited[1]} B" in found
    (found,) = pair([first], [other._replace(sent=[8, 8])])
    assert "of which 8 B are for rank 0, which awaits 16 B" in found


def test_an_order_across_two_groups_that_both_ranks_share() -> None:
    other = REDUCE._replace(group=1)
    groups = [[0, 1], [0, 1, 2, 3]]
    assert pair([REDUCE, other], [REDUCE, other], groups) == []
    assert len(pair([REDUCE, other], [other, REDUCE], groups)) == 1


@pytest.mark.parametrize(
    ("sent", "awaited", "text"),
    [
        ([SEND, SEND], [RECEIVE], "sends 2 messages to rank 1, which awaits 1"),
        ([SEND], [RECEIVE._replace(bytes=7)], "1 KiB float32 are sent and 7 B float32 awaited"),
        ([], [RECEIVE], "sends 0 messages to rank 1, which awaits 1"),
    ],
)
def test_a_message_that_nobody_awaits(sent: list[Call], awaited: list[Call], text: str) -> None:
    (found,) = pair(sent, awaited)
    assert text in found


def test_a_ring_of_which_two_ranks_are_played() -> None:
    ring = [[0, 1, 2, 3]]
    first = RankRecord(0, ring, [SEND._replace(peer=1), RECEIVE._replace(peer=3)])
    last = RankRecord(3, ring, [SEND._replace(peer=0), RECEIVE._replace(peer=2)])
    assert mismatches([first, last], lambda _: True) == []
    less = replace(last, calls=[SEND._replace(peer=0)])
    assert "rank 2 sends 1 messages" in mismatches([first, less], lambda _: True)[0]
