"""What a forward pass takes: tokens, what they should predict, and where documents begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

IGNORED = -100
"""a target that no loss is wanted for: PyTorch's own number"""


@dataclass(frozen=True)
class Batch:
    """Rows of tokens on the host."""

    inputs: np.ndarray
    """int64 [rows, seq]"""
    targets: np.ndarray
    """int64 [rows, seq]: the token that follows, or IGNORED"""
    documents: np.ndarray | None = None
    """int64 [rows, seq]: the number of each token's document within its row, rising from left to right; None:
    attention goes over the whole row"""

    def __len__(self) -> int:
        return len(self.inputs)

    @classmethod
    def of_rows(cls, tokens: np.ndarray) -> Self:
        """Of int64 [rows, seq + 1], where every token but the last of a row predicts the one after it."""
        return cls(tokens[:, :-1], tokens[:, 1:])

    @classmethod
    def concatenate(cls, batches: Sequence[Self]) -> Self:
        """The rows of several batches, which are alike: all of them tell documents apart, or none."""
        documents = [batch.documents for batch in batches if batch.documents is not None]
        if len(documents) not in (0, len(batches)):
            raise ValueError("some of these batches tell documents apart, and others do not")
        return cls(
            np.concatenate([batch.inputs for batch in batches]),
            np.concatenate([batch.targets for batch in batches]),
            np.concatenate(documents) if documents else None,
        )

    def take(self, rows: np.ndarray) -> Self:
        """Some of the rows, in this order."""
        documents = None if self.documents is None else self.documents[rows]
        return type(self)(self.inputs[rows], self.targets[rows], documents)

    def counted(self) -> int:
        """How many tokens have a loss."""
        return int(np.count_nonzero(self.targets != IGNORED))
