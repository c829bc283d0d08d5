"""Samples of random tokens, for measurements of speed without files."""

from __future__ import annotations

import numpy as np

from nanoscale.data.batch import Batch

ENDLESS = 1 << 40
"""Samples of an epoch, which no run reaches."""
HELD_OUT = 1 << 10
"""Samples that are held out."""


class RandomSamples:
    """Samples of independent tokens, uniform over the vocabulary.

    A sample follows from the seed, its split and its number alone, whatever rank reads it.
    """

    def __init__(self, split: int, count: int, seq_len: int, seed: int, vocab: int) -> None:
        self._split = split
        self._count = count
        self._seq_len = seq_len
        self._seed = seed
        self._vocab = vocab

    def __len__(self) -> int:
        return self._count

    def batch(self, numbers: list[int]) -> Batch:
        """Return samples by number, a row each."""
        rows = [
            self._generator(number).integers(self._vocab, size=self._seq_len + 1)
            for number in numbers
        ]
        return Batch.of_rows(np.array(rows, dtype=np.int64).reshape(-1, self._seq_len + 1))

    def _generator(self, number: int) -> np.random.Generator:
        """Return the generator of one sample; Philox counts in the lowest of the four words."""
        counter = np.array([0, number, self._split, 0], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=self._seed, counter=counter))
