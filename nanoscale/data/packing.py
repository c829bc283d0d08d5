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
    different, counts = np.unique(lengths, return_counts=True)
    sequences = _Sequences(room)
    found = np.empty(len(lengths), dtype=np.int64)
    begin = 0
    for length, count in zip(different[::-1].tolist(), counts[::-1].tolist(), strict=True):
        found[longest_first[begin : begin + count]] = sequences.place(length, count)
        begin += count
    return _by_first_document(found, sequences.number)


class _Sequences:
    """Sequences by their remaining room."""

    def __init__(self, room: int) -> None:
        self.number = 0
        self._room = room
        self._rooms: list[int] = []
        """The different remaining rooms, rising."""
        self._with: dict[int, list[np.ndarray]] = {}
        """The numbers of the sequences with each of these rooms."""

    def place(self, length: int, count: int) -> np.ndarray:
        """Choose sequences for `count` documents of one length: int64 [count]."""
        placed: list[np.ndarray] = []
        while count:
            room, numbers = self._best(length, count)
            each = room // length
            taken, rest = np.split(numbers, [-(-count // each)])
            self._add(room, rest)
            here = np.repeat(taken, each)[:count]
            in_last = len(here) - each * (len(taken) - 1)
            self._add(room - each * length, taken[:-1])
            self._add(room - in_last * length, taken[-1:])
            placed.append(here)
            count -= len(here)
        return np.concatenate(placed)

    def _best(self, length: int, count: int) -> tuple[int, np.ndarray]:
        """Return the fullest sequences that fit such a document, and their room; new ones if none fits."""
        place = bisect_left(self._rooms, length)
        if place < len(self._rooms):
            room = self._rooms.pop(place)
            return room, np.concatenate(self._with.pop(room))
        first = self.number
        self.number += -(-count // (self._room // length))
        return self._room, np.arange(first, self.number)

    def _add(self, room: int, numbers: np.ndarray) -> None:
        if room == 0 or len(numbers) == 0:
            return
        if room not in self._with:
            insort(self._rooms, room)
            self._with[room] = []
        self._with[room].append(numbers)


def _by_first_document(found: np.ndarray, number: int) -> np.ndarray:
    first = np.empty(number, dtype=np.int64)
    first[found[::-1]] = np.arange(len(found))[::-1]  # the first document is written last
    rank = np.empty(number, dtype=np.int64)
    rank[np.argsort(first)] = np.arange(number)
    return rank[found]
