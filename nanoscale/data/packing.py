"""Packing of whole documents into sequences of one length.

Best-fit decreasing, as in Ding et al. 2024, arXiv:2404.10830, section 3: the longest document first, each into
the fullest sequence that still has room for it. Documents of one length are placed together: the best sequence
for one of them is the best for the next, as long as it has room. So the work grows with the number of
different lengths, and hardly with the number of documents.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np


def pack(lengths: np.ndarray, room: int) -> np.ndarray:
    """Return the sequence of each document: int64, in the shape of `lengths`, which lie in [1, room].

    Sequences are numbered in the order of their first documents. Equal lengths give equal sequences.
    """
    longest_first = np.argsort(-lengths, kind="stable")
    distinct_lengths, counts = np.unique(lengths, return_counts=True)
    sequences = _Sequences(room)
    sequence_of = np.empty(len(lengths), dtype=np.int64)
    start = 0
    for length, count in zip(distinct_lengths[::-1].tolist(), counts[::-1].tolist(), strict=True):
        sequence_of[longest_first[start : start + count]] = sequences.place(length, count)
        start += count
    return _by_first_document(sequence_of, sequences.number)


class _Sequences:
    """Sequences by their remaining room."""

    def __init__(self, room: int) -> None:
        self.number = 0
        self._room = room
        self._rooms: list[int] = []
        """The different remaining rooms, rising."""
        self._sequences_with: dict[int, list[np.ndarray]] = {}
        """The numbers of the sequences with each of these rooms."""

    def place(self, length: int, count: int) -> np.ndarray:
        """Choose sequences for `count` documents of one length: int64 [count]."""
        placements: list[np.ndarray] = []
        while count:
            room, numbers = self._best(length, count)
            documents_each = room // length
            used, unused = np.split(numbers, [-(-count // documents_each)])
            self._add(room, unused)
            chosen = np.repeat(used, documents_each)[:count]
            documents_in_last = len(chosen) - documents_each * (len(used) - 1)
            self._add(room - documents_each * length, used[:-1])
            self._add(room - documents_in_last * length, used[-1:])
            placements.append(chosen)
            count -= len(chosen)
        return np.concatenate(placements)

    def _best(self, length: int, count: int) -> tuple[int, np.ndarray]:
        """Return the fullest sequences that fit such a document, and their room; new ones if none fits."""
        index = bisect_left(self._rooms, length)
        if index < len(self._rooms):
            room = self._rooms.pop(index)
            return room, np.concatenate(self._sequences_with.pop(room))
        first = self.number
        self.number += -(-count // (self._room // length))
        return self._room, np.arange(first, self.number)

    def _add(self, room: int, numbers: np.ndarray) -> None:
        if room == 0 or len(numbers) == 0:
            return
        if room not in self._sequences_with:
            insort(self._rooms, room)
            self._sequences_with[room] = []
        self._sequences_with[room].append(numbers)


def _by_first_document(sequence_of: np.ndarray, number: int) -> np.ndarray:
    first_document = np.empty(number, dtype=np.int64)
    first_document[sequence_of[::-1]] = np.arange(len(sequence_of))[
        ::-1
    ]  # the first document is written last
    rank = np.empty(number, dtype=np.int64)
    rank[np.argsort(first_document)] = np.arange(number)
    return rank[sequence_of]
