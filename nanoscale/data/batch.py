"""The input of a forward pass: tokens, their targets, and the borders of documents."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

IGNORED = -100
"""A target without a loss; PyTorch's own default for `ignore_index`."""


@dataclass(frozen=True)
class Batch:
    """Rows of tokens on the host."""

    inputs: np.ndarray
    """int64 [rows, seq]."""
    targets: np.ndarray
    """int64 [rows, seq]: the next token, or IGNORED."""
    documents: np.ndarray | None = None
    """int64 [rows, seq]: the number of each token's document within its row, rising from left to right. None:
    attention covers the whole row."""
    references: np.ndarray | None = None
    """fp64 [rows, 2]: if rows are answers, the log-likelihood of each by the reference model, and its sign: 1
    for a chosen or good one, -1 for a rejected or bad one. Or fp64 [rows, seq, k, 2]: the log-probabilities and
    the ids of the k most likely tokens of a teacher. None: neither."""
    unmatched: Self | None = None
    """The same questions with answers to others, for an objective that compares with these."""

    def __len__(self) -> int:
        return len(self.inputs)

    @classmethod
    def of_rows(cls, tokens: np.ndarray) -> Self:
        """Split int64 [rows, seq + 1] into inputs and targets; each token but a row's last predicts the next
        one."""
        return cls(tokens[:, :-1], tokens[:, 1:])

    @classmethod
    def concatenate(cls, batches: Sequence[Self]) -> Self:
        """Join the rows of several batches. Either all of them have `documents`, or none has."""
        documents = [batch.documents for batch in batches if batch.documents is not None]
        if len(documents) not in (0, len(batches)):
            raise ValueError("some of these batches mark their documents, and others do not")
        references = [batch.references for batch in batches if batch.references is not None]
        unmatched = [batch.unmatched for batch in batches if batch.unmatched is not None]
        return cls(
            np.concatenate([batch.inputs for batch in batches]),
            np.concatenate([batch.targets for batch in batches]),
            np.concatenate(documents) if documents else None,
            np.concatenate(references) if references else None,
            cls.concatenate(unmatched) if unmatched else None,
        )

    def take(self, rows: np.ndarray) -> Self:
        """Return these rows, in this order."""
        return self._changed(lambda array: array[rows])

    def cut(self, length: int) -> Self:
        """Return the same tokens in rows of at most this length, which divides the present length."""
        if length >= self.inputs.shape[1]:
            return self
        return self._changed(lambda array: array.reshape(-1, length, *array.shape[2:]))

    def trimmed(self, multiple: int) -> Self:
        """Return the rows up to the last column with a loss, rounded up to a multiple of this length."""
        columns = (self.targets != IGNORED).any(axis=0).nonzero()[0]
        length = -(-(int(columns.max(initial=0)) + 1) // multiple) * multiple
        return self._changed(lambda array: array[:, :length])

    def _changed(self, change: Callable[[np.ndarray], np.ndarray]) -> Self:
        parts: dict[str, Any] = {
            name: part for name, part in vars(self).items() if part is not None
        }
        for name, part in parts.items():
            parts[name] = part._changed(change) if name == "unmatched" else change(part)
        return replace(self, **parts)

    def ends(self) -> np.ndarray | None:
        """Return the ends of the documents of each row, int32 [rows, documents], or None without documents.

        Rows with fewer documents repeat their last end.
        """
        if self.documents is None:
            return None
        rows, seq = self.documents.shape
        row, at = np.nonzero(np.diff(self.documents, axis=1, append=-1))
        counts = np.bincount(row, minlength=rows)
        ends = np.full((rows, counts.max(initial=1)), seq, dtype=np.int32)
        ends[np.arange(ends.shape[1]) < counts[:, None]] = at + 1
        return ends

    def counted(self, rows: int = 1) -> int:
        """Return the number of tokens that have a loss, or of samples of answers with so many `rows`."""
        if self.references is not None and self.references.ndim == 2:
            return len(self) // rows
        return int(np.count_nonzero(self.targets != IGNORED))
