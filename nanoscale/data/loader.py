"""Batches of samples: the tokens of each rank and step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np

from nanoscale.common.errors import UserError, Violation
from nanoscale.config.data.token_sources import training_end
from nanoscale.data.batch import Batch
from nanoscale.data.sampler import sample_indices
from nanoscale.data.samples import Packed, Samples, Split, TokenFile, TokenStream

_AHEAD = 1024
"""Samples of a rank whose numbers are computed in one call."""
_WINDOW = 1 << 20
"""The widest range of all ranks' samples that such a call covers."""


def split_tokens(tokens: TokenFile, valid_fraction: float) -> tuple[Split, Split]:
    """Divide a file into training and validation tokens; see `training_end`."""
    total = len(tokens.tokens)
    boundary, within_document = training_end(
        total, valid_fraction, lambda token: tokens.document_start(tokens.document_at(token))
    )
    return Split(0, boundary, within_document), Split(boundary, total, within_document)


class PrecomputedSamples:
    """A rank's samples of one step, computed for many steps at once, since the overhead of a call dominates."""

    def __init__(self, find: Callable[[np.ndarray], np.ndarray]) -> None:
        """`find`: a function from int64 positions `[…]` of the order to the samples there, `[*, …]`."""
        self._find = find
        self._layout = (0, 0, 0)
        self._consumed = 0
        self._samples_ahead = np.empty((0, 0), dtype=np.int64)

    def step(self, consumed: int, global_batch: int, dp_rank: int, share: int) -> np.ndarray:
        """Return the samples at the `share` positions of this rank, `[*, share]`."""
        layout = (global_batch, dp_rank, share)
        step, remainder = divmod(consumed - self._consumed, global_batch)
        if self._layout != layout or remainder or not 0 <= step < self._samples_ahead.shape[-2]:
            step_count = max(1, min(_AHEAD // share, _WINDOW // global_batch))
            steps = consumed + global_batch * np.arange(step_count)
            positions = steps[:, None] + dp_rank * share + np.arange(share)
            self._layout, self._consumed, self._samples_ahead = (
                layout,
                consumed,
                self._find(positions),
            )
            step = 0
        samples: np.ndarray = self._samples_ahead[..., step, :]
        return samples


def rows_of_rank(global_batch: int, dp_rank: int, dp: int, micro_batch: int) -> int:
    """Return a data-parallel rank's samples of an optimizer step, in whole micro batches."""
    share, remainder = divmod(global_batch, dp)
    if remainder or share % micro_batch or not 0 <= dp_rank < dp:
        raise ValueError(f"{global_batch=} does not divide into {dp=} times {micro_batch=}")
    return share


@dataclass(frozen=True)
class Form:
    """The way tokens become samples; see `Data`."""

    packing: Literal["stream", "whole"] = "stream"
    document_mask: bool = False
    answers: np.ndarray | None = None
    """uint8 [tokens] of the file: nonzero for tokens that have a loss. None: all of them."""


class Loader:
    """The samples of one split, in a new order in every epoch."""

    def __init__(self, samples: Samples, seed: int) -> None:
        self._samples = samples
        self._seed = seed
        self._ahead = PrecomputedSamples(self.order)

    @classmethod
    def from_file(
        cls,
        tokens: TokenFile,
        split: Split,
        seq_len: int,
        seed: int,
        vocab: int,
        form: Form = Form(),
    ) -> Self:
        """Load a split of a token file; raises UserError if it is smaller than one sample.

        Reading raises UserError for a token outside the model's vocabulary.
        """

        def check(tokens_read: np.ndarray) -> None:
            # viewed as unsigned, a negative id is a large one
            if tokens_read.size and tokens_read.view(np.uint64).max() >= vocab:
                raise outside_vocabulary(tokens, tokens_read, vocab)

        samples: Samples
        if form.packing == "whole":
            samples = Packed(tokens, split, seq_len, form.answers, check)
        else:
            mask, answers = form.document_mask, form.answers
            samples = TokenStream(tokens, split, seq_len, mask, answers, check)
        if len(samples) < 1:
            raise too_small(tokens, split, seq_len if form.packing == "stream" else 1)
        return cls(samples, seed)

    def __len__(self) -> int:
        """Return the number of samples in the split, which is one epoch."""
        return len(self._samples)

    def batch(self, indices: Any) -> Batch:
        """Return samples by number, a row each."""
        numbers = np.asarray(indices).tolist()
        for number in numbers:
            if not 0 <= number < len(self):
                raise IndexError(number)
        return self._samples.batch(numbers)

    def micro_batches(
        self, consumed: int, global_batch: int, dp_rank: int, dp: int, micro_batch: int
    ) -> Iterator[Batch]:
        """Yield one optimizer step's share of a data-parallel rank: micro_batch rows each.

        `consumed` counts the samples that all ranks together have trained on. Over all ranks the samples are
        those at positions [consumed, consumed + global_batch) of the order, for any `dp` and `micro_batch`;
        each rank has a contiguous share of them.
        """
        share = rows_of_rank(global_batch, dp_rank, dp, micro_batch)
        indices = self._ahead.step(consumed, global_batch, dp_rank, share)
        for start in range(0, share, micro_batch):
            yield self.batch(indices[start : start + micro_batch])

    def order(self, positions: np.ndarray) -> np.ndarray:
        """Return the samples at these positions of the split's endless order."""
        return sample_indices(self._seed, positions, len(self))

    def valid_batches(
        self, samples: int, dp_rank: int, dp: int, micro_batch: int
    ) -> Iterator[tuple[Batch, int]]:
        """Yield the first samples of the split, divided over ranks: (micro_batch rows, n).

        The first n rows count, perhaps none; the others only fill the batch. Every rank yields equally many
        batches of one shape, as collectives in the forward pass need. Over all ranks the rows that count are
        the first `evaluated(samples)` samples, once each.
        """
        count = self.evaluated(samples)
        for start in range(0, count, dp * micro_batch):
            first_row = start + dp_rank * micro_batch
            rows = np.arange(first_row, first_row + micro_batch)
            yield self.batch(rows % count), int((rows < count).sum())

    def evaluated(self, samples: int) -> int:
        """Return the number of samples in an evaluation of `samples`; fewer if the split is smaller."""
        return min(samples, len(self))


def too_small(tokens: TokenFile, split: Split, seq_len: int) -> UserError:
    """Return the error for a split without one sample."""
    what = f"a sample needs {seq_len + 1} tokens, and {tokens.path} has only {len(split)}"
    suggestions = (f"train.seq_len={len(split) - 1}",) if len(split) > 1 else ()
    violation = Violation("train.seq_len", seq_len, "", what, suggestions)
    return UserError("data", f"too few tokens: {what}", [violation])


def outside_vocabulary(tokens: TokenFile, tokens_read: np.ndarray, vocab: int) -> UserError:
    """Return the error for tokens outside the model's vocabulary."""
    token = int(tokens_read.min()) if tokens_read.min() < 0 else int(tokens_read.max())
    what = f"{tokens.path} holds token {token}, and the model's ids are in [0, {vocab})"
    suggestions = (f"model.vocab={token + 1}",) if token >= vocab else ()
    violation = Violation("model.vocab", vocab, "", what, suggestions)
    return UserError("data", f"model.vocab={vocab}: {what}", [violation])
