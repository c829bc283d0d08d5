"""Batches of samples: the tokens of each rank and step, of one source or of a data mixture."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, Self

import numpy as np

from nanoscale.common.errors import UserError, Violation
from nanoscale.config.schema import Train
from nanoscale.config.token_files import training_end
from nanoscale.data import samples as token_samples
from nanoscale.data.batch import Batch
from nanoscale.data.sampler import PrecomputedSamples, due, sample_indices, taken
from nanoscale.data.tokens.files import TokenFile


def split_tokens(
    tokens: TokenFile, valid_fraction: float
) -> tuple[token_samples.Split, token_samples.Split]:
    """Divide a file into training and validation tokens; see `training_end`."""
    total = len(tokens.tokens)
    boundary, within_document = training_end(tokens.index, valid_fraction)
    return token_samples.Split(0, boundary, within_document), token_samples.Split(
        boundary, total, within_document
    )


@dataclass(frozen=True)
class Form:
    """The way tokens become samples; see `Data`."""

    packing: Literal["stream", "whole", "answers"] = "stream"
    """answers: each document in a row of its own, for an objective of answers."""
    document_mask: bool = False
    answers: np.ndarray | None = None
    """uint8 [tokens] of the file: nonzero for tokens that have a loss. None: all of them."""
    masked: Train | None = None
    """The settings of hidden tokens; None: no token is hidden."""
    labels: int = 0
    """The number of classes of documents that are texts with labels; 0: other documents."""
    rows: int = 1
    """The rows of a sample."""


def samples_of(
    tokens: TokenFile, split: token_samples.Split, seq_len: int, vocab: int, form: Form
) -> token_samples.Samples:
    """Return the samples of a split of a token file, perhaps none.

    Reading raises UserError for a token outside the model's vocabulary.
    """

    def check(tokens_read: np.ndarray) -> None:
        # viewed as unsigned, a negative id is a large one
        if tokens_read.size and tokens_read.view(np.uint64).max() >= vocab:
            raise outside_vocabulary(tokens, tokens_read, vocab)

    samples: token_samples.Samples
    source = token_samples.SplitTokens(tokens, split, seq_len, form.answers, check)
    if form.labels:
        samples = token_samples.Labeled(source, form.labels)
    elif form.packing == "whole":
        samples = token_samples.Packed(source)
    elif form.packing == "answers":
        samples = token_samples.AnswerSamples(source, form.rows)
    else:
        samples = token_samples.TokenStream(source, form.document_mask)
    return token_samples.Masked(samples, form.masked, vocab) if form.masked else samples


class SampleSource(Protocol):
    """Samples that follow, at every step, from the number of samples consumed before, as in a `Loader`."""

    def are_ready(self, end: int) -> bool:
        """True if the samples before this position can be read now, as always if all files are complete."""
        return True

    def micro_batches(
        self, consumed: int, global_batch: int, dp_rank: int, dp: int, micro_batch: int
    ) -> Iterable[Batch]: ...


class Loader(SampleSource):
    """The samples of one split, in a new order in every epoch."""

    def __init__(self, samples: token_samples.Samples, seed: int) -> None:
        self._samples = samples
        self._seed = seed
        self.has_answers = isinstance(samples, token_samples.AnswerSamples)
        self.rows = samples.rows if isinstance(samples, token_samples.AnswerSamples) else 1
        """The rows of a batch that a sample takes."""
        self.cut = samples.cut if isinstance(samples, token_samples.Labeled) else 0
        """The number of texts with labels that are cut at the end of a row."""
        self.references: Callable[[list[int]], np.ndarray] | None = None
        """A function from the numbers of samples to a teacher's tokens, as in `Batch`; None: no teacher."""
        self._ahead = PrecomputedSamples(self.order, self.rows)

    @classmethod
    def from_file(
        cls,
        tokens: TokenFile,
        split: token_samples.Split,
        seq_len: int,
        seed: int,
        vocab: int,
        form: Form = Form(),
    ) -> Self:
        """Load a split of a token file; raises UserError if it holds no sample.

        Reading raises UserError for a token outside the model's vocabulary.
        """
        samples = samples_of(tokens, split, seq_len, vocab, form)
        if len(samples) < 1 and form.packing == "answers":
            sample = "pair with answers" if form.rows == 2 else "question with its answer"
            what = f"{tokens.path} has no {sample} in at most {seq_len + 1} tokens"
            longer = (f"train.seq_len={2 * seq_len}",)
            violation = Violation("train.seq_len", seq_len, "", what, longer)
            raise UserError("data", f"no answers: {what}", [violation])
        if len(samples) < 1:
            raise too_small(tokens, split, seq_len if form.packing == "stream" else 1)
        return cls(samples, seed)

    def __len__(self) -> int:
        """Return the number of samples in the split, which is one epoch."""
        return len(self._samples)

    @property
    def answers(self) -> token_samples.AnswerSamples:
        """The answers of a job with an objective of answers."""
        assert isinstance(self._samples, token_samples.AnswerSamples)
        return self._samples

    def batch(self, indices: Any) -> Batch:
        """Return samples by number, a row each, or two for a pair."""
        numbers = np.asarray(indices).tolist()
        for number in numbers:
            if not 0 <= number < len(self):
                raise IndexError(number)
        batch = self._samples.batch(numbers)
        if self.references is None:
            return batch
        return replace(batch, references=self.references(numbers))

    def micro_batches(
        self, consumed: int, global_batch: int, dp_rank: int, dp: int, micro_batch: int
    ) -> Iterator[Batch]:
        """Yield one optimizer step's share of a data-parallel rank: micro_batch rows each.

        `consumed` counts the rows that all ranks together have trained on. All ranks together get
        the rows at positions [consumed, consumed + global_batch) of the order, for any `dp` and `micro_batch`.
        Each rank has a contiguous share of them.
        """
        numbers = self._ahead.micro_batches(consumed, global_batch, dp_rank, dp, micro_batch)
        yield from map(self.batch, numbers)

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
        count, micro_batch = self.evaluated(samples), micro_batch // self.rows
        for start in range(0, count, dp * micro_batch):
            first = start + dp_rank * micro_batch
            numbers = np.arange(first, first + micro_batch)
            yield self.batch(numbers % count), int((numbers < count).sum()) * self.rows

    def evaluated(self, samples: int) -> int:
        """Return the number of samples in an evaluation of `samples`; fewer if the split is smaller."""
        return min(samples, len(self))

    def first_counted(self) -> int | None:
        """Return the number of the first sample with a token that has a loss; None if no sample has one."""
        return next((number for number in range(len(self)) if self.batch([number]).counted()), None)


class Mixture(SampleSource):
    """A data mixture: samples of several loaders, in constant shares at every moment of a phase (`due`).

    Each loader has its own order and repeats epoch after epoch. A sample follows from its position alone, so
    the whole state is, as with one source, the number of samples consumed.
    """

    def __init__(
        self,
        loaders: Sequence[Loader],
        weights: Sequence[float],
        changes: Sequence[tuple[int, Sequence[float]]] = (),
    ) -> None:
        """Weights may have any sum. `changes`: first samples of phases with their weights, in order."""
        self.loaders = list(loaders)
        self.shares = _shares(weights)
        self._phases = [_MixturePhase(0, self.shares, np.zeros(len(weights), dtype=np.int64))]
        for first, new_weights in changes:
            last = self._phases[-1]
            before = last.before + taken(last.shares, first - last.first)
            self._phases.append(_MixturePhase(first, _shares(new_weights), before))
        self.skip(0)

    def skip(self, rows: int) -> None:
        """Begin phases this many rows later, which rollbacks have skipped: phases are of steps."""
        each = self.loaders[0].rows
        self._skipped = max(0, rows // each)
        self._ahead = PrecomputedSamples(self.find, each)

    def micro_batches(
        self, consumed: int, global_batch: int, dp_rank: int, dp: int, micro_batch: int
    ) -> Iterator[Batch]:
        """Yield batches like `Loader.micro_batches`."""
        numbers = self._ahead.micro_batches(consumed, global_batch, dp_rank, dp, micro_batch)
        each = self.loaders[0].rows
        for sources, samples in numbers:
            yield gathered(lambda source: self.loaders[source], sources, samples, each)

    def find(self, positions: np.ndarray) -> np.ndarray:
        """Return sources and the numbers of their samples: int64 `[2, *positions.shape]`."""
        result = np.empty((2, *positions.shape), dtype=np.int64)
        of_steps = (positions - self._skipped).clip(0)
        ends = [*(phase.first for phase in self._phases[1:]), np.inf]
        for phase, end in zip(self._phases, ends, strict=True):
            inside = (of_steps >= phase.first) & (of_steps < end)
            if not inside.any():
                continue
            offsets = positions[inside] - phase.first
            first = int(offsets.min())
            sources, numbers = due(phase.shares, first, int(offsets.max()) + 1)
            found = np.stack([sources, numbers + phase.before[sources]])
            result[:, inside] = found[:, offsets - first]
        for number, loader in enumerate(self.loaders):
            from_source = result[0] == number
            result[1, from_source] = loader.order(result[1, from_source])
        return result


def gathered(
    open_source: Callable[[int], Any], sources: np.ndarray, samples: np.ndarray, rows: int = 1
) -> Batch:
    """Return the samples with these numbers of these sources in order, `rows` rows of the batch each."""
    used = np.unique(sources).tolist()
    positions = [(sources == source).nonzero()[0] for source in used]
    batches = [
        open_source(source).batch(samples[at].tolist())
        for source, at in zip(used, positions, strict=True)
    ]
    inverse = np.argsort(np.concatenate(positions))
    inverse = (rows * inverse[:, None] + np.arange(rows)).flatten()
    return Batch.concatenate(batches).take(inverse)


@dataclass(frozen=True)
class _MixturePhase:
    first: int
    """The number of samples before it."""
    shares: np.ndarray
    before: np.ndarray
    """The samples of each source before it."""


def _shares(weights: Sequence[float]) -> np.ndarray:
    return np.asarray(weights, dtype=np.float64) / np.sum(weights)


class Prefetched:
    """The same samples at the same steps, read by a thread while a GPU computes the step before.

    An error while reading is raised when the samples are requested. On a CPU this gains nothing: reading would
    take time from the core that computes.
    """

    def __init__(self, source: SampleSource) -> None:
        self._source = source
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._expected: tuple[int, ...] = ()
        self._coming: Future[list[Batch]] | None = None

    def micro_batches(
        self, consumed: int, global_batch: int, dp_rank: int, dp: int, micro_batch: int
    ) -> list[Batch]:
        layout = (global_batch, dp_rank, dp, micro_batch)
        future = self._coming
        if future is None or self._expected != (consumed, *layout):
            future = self._reader.submit(self._read, consumed, *layout)
        batches = future.result()
        following = consumed + global_batch
        self._expected, self._coming = (following, *layout), None
        if self._source.are_ready(following + global_batch):
            self._coming = self._reader.submit(self._read, *self._expected)
        return batches

    def are_ready(self, end: int) -> bool:
        """True if the samples before this position can be read now."""
        return self._source.are_ready(end)

    def close(self) -> None:
        """Wait until the thread reads no more: its source may have another reader after a rollback."""
        self._reader.shutdown(cancel_futures=True)

    def _read(self, *step: int) -> list[Batch]:
        return list(self._source.micro_batches(*step))


def too_small(tokens: TokenFile, split: token_samples.Split, seq_len: int) -> UserError:
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
