"""Samples: windows of a stream of tokens on disk, packed whole documents, or random tokens."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from nanoscale.common.errors import UserError
from nanoscale.config.schema import Train
from nanoscale.config.token_files import BAD, PACKED_TOGETHER, Sequences
from nanoscale.data.batch import IGNORED, Batch
from nanoscale.data.tokens.files import TokenFile

Check = Callable[[np.ndarray], None]
"""A check that raises if one of these tokens, int64, is outside the model's vocabulary."""


@dataclass(frozen=True)
class Split:
    """A range of a file's tokens."""

    start: int
    stop: int
    within_document: bool = False
    """True if the border to the other split lies within a document."""

    def __len__(self) -> int:
        return self.stop - self.start


class Samples(Protocol):
    """The samples of one split by number; `len` is their number."""

    def __len__(self) -> int: ...

    def batch(self, numbers: list[int]) -> Batch: ...


@dataclass(frozen=True)
class SplitTokens:
    """The tokens from which the samples of a split are made."""

    file: TokenFile
    split: Split
    seq_len: int
    answers: np.ndarray | None
    """uint8 [tokens] of the file: nonzero for tokens that have a loss. None: all of them."""
    check: Check

    def targets(self, start: int, stop: int) -> np.ndarray:
        """Return the file's tokens [start, stop), with IGNORED in place of tokens without a loss."""
        tokens = self.file.tokens[start:stop].astype(np.int64)
        if self.answers is None:
            return tokens
        return np.where(self.answers[start:stop] != 0, tokens, IGNORED)

    def check_both(self, inputs: np.ndarray, targets: np.ndarray) -> None:
        self.check(inputs)
        self.check(np.where(targets == IGNORED, 0, targets))


class TokenStream:
    """The tokens of a split in windows: sample i is [i·seq_len, (i + 1)·seq_len + 1).

    Neighbors share one token: the last target of one is the first input of the next. Documents follow each
    other without padding. With `document_mask` attention stays within documents, and the last token of a
    document predicts nothing.
    """

    def __init__(self, source: SplitTokens, document_mask: bool) -> None:
        self._source = source
        self._document_mask = document_mask
        self._seq_len, split = source.seq_len, source.split
        self._tokens = source.file.tokens[split.start : split.stop]
        self._answers = None if source.answers is None else source.answers[split.start : split.stop]

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._seq_len

    def batch(self, numbers: list[int]) -> Batch:
        windows = self._windows(self._tokens, numbers, np.int64)
        self._source.check(windows)
        batch = Batch.of_rows(windows)
        if self._answers is None and not self._document_mask:
            return batch
        targets = batch.targets.copy()  # inputs and targets share memory
        if self._answers is not None:
            answers = self._windows(self._answers, numbers, np.uint8)
            targets[answers[:, 1:] == 0] = IGNORED
        if not self._document_mask:
            return Batch(batch.inputs, targets)
        documents = np.array([self._documents(number) for number in numbers])
        documents = documents.reshape(-1, self._seq_len + 1)
        targets[documents[:, 1:] != documents[:, :-1]] = IGNORED
        return Batch(batch.inputs, targets, documents[:, :-1])

    def _windows(self, values: np.ndarray, numbers: list[int], dtype: type) -> np.ndarray:
        windows: np.ndarray = np.empty((len(numbers), self._seq_len + 1), dtype=dtype)
        for row, number in zip(windows, numbers, strict=True):
            # a slice, since numpy gathers windows token by token
            row[:] = values[number * self._seq_len :][: self._seq_len + 1]
        return windows

    def _documents(self, number: int) -> np.ndarray:
        """Return the document numbers of a sample's tokens, from 0: int64 [seq_len + 1]."""
        file, start = self._source.file, self._source.split.start + number * self._seq_len
        is_first: np.ndarray = np.zeros(self._seq_len + 1, dtype=np.int64)
        first, last = (file.index.document_at(start + offset) for offset in (0, self._seq_len))
        if last > first:
            starts = file.document_starts(first + 1, last) - start
            np.add.at(is_first, starts, 1)
        return is_first.cumsum()


class Packed:
    """Whole documents side by side, in the order of `pack`; the rest of a row is padding without a
    loss.

    A document of n tokens takes n − 1 positions, since its last one predicts nothing. Longer documents are cut
    into chunks of a full row and a remainder. Padding is a document of its own.
    """

    def __init__(self, source: SplitTokens) -> None:
        self._source = source
        file, split, seq_len = source.file, source.split, source.seq_len
        starts, lengths, chunk_counts = [], [], []
        for window in range(0, len(file), PACKED_TOGETHER):
            boundaries = file.document_starts(window, min(window + PACKED_TOGETHER, len(file)))
            start, length = _document_chunks(boundaries.clip(split.start, split.stop), seq_len)
            row = pack(length, seq_len)
            order = np.argsort(row, kind="stable")
            starts.append(start[order])
            lengths.append(length[order].astype(np.int32))
            chunk_counts.append(np.bincount(row))
        self._starts, self._lengths = np.concatenate(starts), np.concatenate(lengths)
        self._rows = np.concatenate(([0], *chunk_counts)).cumsum()
        """The first chunk of each row, and the end of the last row's: int64 [rows + 1]."""

    def __len__(self) -> int:
        return len(self._rows) - 1

    def batch(self, numbers: list[int]) -> Batch:
        shape = len(numbers), self._source.seq_len
        inputs, targets = np.zeros(shape, dtype=np.int64), np.full(shape, IGNORED)
        documents = np.empty(shape, dtype=np.int64)
        for row, number in enumerate(numbers):
            position = 0
            first, end = self._rows[number], self._rows[number + 1]
            for document, chunk in enumerate(range(first, end)):
                start = int(self._starts[chunk])
                stop = start + int(self._lengths[chunk])
                positions = slice(position, position + stop - start)
                inputs[row, positions] = self._source.file.tokens[start:stop]
                targets[row, positions] = self._source.targets(start + 1, stop + 1)
                documents[row, positions] = document
                position = positions.stop
            documents[row, position:] = end - first
        self._source.check_both(inputs, targets)
        return Batch(inputs, targets, documents)


class AnswerSamples:
    """Documents that are answers to questions, a row each with padding at its end: pairs of a chosen and a
    rejected one, or with `rows` of 1 single ones, whose marks say whether they are good or bad.

    Samples with a document that is longer than a row, or that has no token with a loss, are left out.
    """

    def __init__(self, source: SplitTokens, rows: int = 2) -> None:
        self._source, self.rows = source, rows
        split, starts = source.split, source.file.document_starts(0, len(source.file))
        borders = np.stack([starts[i : len(starts) - rows + i : rows] for i in range(rows + 1)], 1)
        inside = (borders[:, 0] >= split.start) & (borders[:, -1] <= split.stop)
        fits = (np.diff(borders, axis=1) <= source.seq_len + 1).all(1)
        counted = inside & fits
        for sample in counted.nonzero()[0]:
            targets = [source.targets(start + 1, stop) for start, stop in pairwise(borders[sample])]
            counted[sample] = all((each != IGNORED).any() for each in targets)
        self._borders = borders[counted]
        """The starts of the documents of each sample, and its end: int64 [samples, rows + 1]."""
        self.left_out = int((inside & ~counted).sum())
        """The number of samples that are left out."""
        self.references: np.ndarray = np.zeros((len(self._borders), 2))
        """The log-likelihoods by the reference model: of both answers of each pair, or of a question with its
        answer and with another: fp64 [samples, 2]."""
        self._signs = np.array([[1.0, -1.0]]).repeat(len(self._borders), 0)
        if rows == 1:
            self._rate()

    def _rate(self) -> None:
        """Read which answers are good, and choose for each question an answer to another one."""
        assert self._source.answers is not None, "the rules require them"
        self._first = np.empty(len(self._borders), dtype=np.int64)
        """The first token of each answer."""
        questions = []
        for sample, (start, stop) in enumerate(self._borders):
            marks = self._source.answers[start:stop]
            self._first[sample] = start + 1 + int((marks[1:] != 0).argmax())
            self._signs[sample] = -1.0 if marks.max() == BAD else 1.0
            questions.append(self._source.file.tokens[start : self._first[sample]].tobytes())
        self._signs = self._signs[:, :1]
        count, self._other = len(questions), np.arange(len(questions)) - 1
        """The number of the sample before, whose question differs if any does."""
        for sample in [*range(count)] * 2:  # twice: the last samples come before the first
            before = (sample - 1) % count
            is_same = questions[before] == questions[sample]
            self._other[sample] = self._other[before] % count if is_same else before

    def __len__(self) -> int:
        return len(self._borders)

    def batch(self, numbers: list[int]) -> Batch:
        spans = [[each] for number in numbers for each in pairwise(self._borders[number])]
        batch = self._rows(spans, self.references[numbers, : self.rows], self._signs[numbers])
        if self.rows == 2:
            return batch
        starts, ends, first = *self._borders.T, self._first
        both = zip(numbers, self._other[numbers], strict=True)
        swapped = [[(starts[it], first[it]), (first[other], ends[other])] for it, other in both]
        signs = np.zeros((len(numbers), 1))
        return replace(batch, unmatched=self._rows(swapped, self.references[numbers, 1:], signs))

    def _rows(
        self, rows: list[list[tuple[int, int]]], references: np.ndarray, signs: np.ndarray
    ) -> Batch:
        """Return rows of one or two spans of the file each; a row that is too long is cut at its end."""
        source, seq_len = self._source, self._source.seq_len
        inputs = np.zeros((len(rows), seq_len), dtype=np.int64)
        targets = np.full((len(rows), seq_len), IGNORED)
        for row, spans in enumerate(rows):
            tokens = np.concatenate([source.file.tokens[start:stop] for start, stop in spans])
            learned = np.concatenate([source.targets(start, stop) for start, stop in spans])
            if len(spans) > 1:
                learned[: spans[0][1] - spans[0][0]] = IGNORED
            count = min(len(tokens) - 1, seq_len)
            inputs[row, :count], targets[row, :count] = tokens[:count], learned[1 : count + 1]
        source.check_both(inputs, targets)
        answers = np.stack([references.flatten(), signs.flatten()], 1)
        return Batch(inputs, targets, references=answers)


class Labeled:
    """Texts with labels, a row each with padding at its end: the label is the target of the text's last token.

    A document is a text and its label. Longer texts are cut; a token with which all texts end, as [SEP], stays.
    """

    def __init__(self, source: SplitTokens, labels: int) -> None:
        self._source = source
        file, split = source.file, source.split
        starts = file.document_starts(0, len(file))
        starts, ends = starts[:-1], starts[1:] - 1
        counted = (ends > starts) & (starts >= split.start) & (ends < split.stop)
        self._starts, self._ends = starts[counted], ends[counted]
        self.cut = int((self._ends - self._starts > source.seq_len).sum())
        last, held = (file.tokens[self._ends - each] for each in (1, 0))
        self._keeps_last = bool((last == last[:1]).all())
        if held.max(initial=0) >= labels:
            raise UserError("data", f"{file.path} holds label {held.max()}: train.labels={labels}")

    def __len__(self) -> int:
        return len(self._starts)

    def batch(self, numbers: list[int]) -> Batch:
        shape = len(numbers), self._source.seq_len
        inputs, targets = np.zeros(shape, dtype=np.int64), np.full(shape, IGNORED)
        tokens = self._source.file.tokens
        for row, number in enumerate(numbers):
            start, end = self._starts[number], self._ends[number]
            count = min(end - start, shape[1])
            inputs[row, :count] = tokens[start : start + count]
            if self._keeps_last:
                inputs[row, count - 1] = tokens[end - 1]
            targets[row, count - 1] = tokens[end]
        self._source.check(inputs)
        return Batch(inputs, targets)


def _document_chunks(boundaries: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the start and the number of inputs of each chunk; documents lie between the borders."""
    inputs = np.diff(boundaries) - 1
    has_target = inputs > 0
    inputs, starts = inputs[has_target], boundaries[:-1][has_target]
    counts = -(-inputs // seq_len)
    document = np.repeat(np.arange(len(inputs)), counts)
    offsets = (np.arange(len(document)) - (counts.cumsum() - counts)[document]) * seq_len
    return starts[document] + offsets, np.minimum(inputs[document] - offsets, seq_len)


def pack(lengths: np.ndarray, room: int) -> np.ndarray:
    """Return the sequence of each document: int64, in the shape of `lengths`, which lie in [1, room].

    Best-fit decreasing, as in Ding et al. 2024, arXiv:2404.10830, section 3: the longest document first, each
    into the fullest sequence that still has room for it. Documents of one length are placed together: the best
    sequence for one of them is the best for the next, as long as it has room. So the work grows with the number
    of different lengths, and hardly with the number of documents. Sequences are numbered in the order of their
    first documents. Equal lengths give equal sequences.
    """
    longest_first = np.argsort(-lengths, kind="stable")
    distinct_lengths, counts = np.unique(lengths, return_counts=True)
    sequences = Sequences(room)
    sequence_of = np.empty(len(lengths), dtype=np.int64)
    start = 0
    for length, count in zip(distinct_lengths[::-1].tolist(), counts[::-1].tolist(), strict=True):
        sequence_of[longest_first[start : start + count]] = sequences.place(length, count)
        start += count
    first_document = np.empty(sequences.number, dtype=np.int64)
    first_document[sequence_of[::-1]] = np.arange(len(sequence_of))[
        ::-1
    ]  # the first is written last
    return first_document.argsort().argsort()[sequence_of]


ENDLESS = 1 << 40
"""Samples of an epoch, which no run reaches."""
HELD_OUT = 1 << 10
"""Samples that are held out."""


class Masked:
    """Samples with some tokens hidden, to be predicted from both sides.

    Of the chosen tokens, 8 of 10 become the mask's token, 1 another token, and 1 stays. The choice follows from
    the seed and the sample's number alone. Source: Devlin et al. 2019, arXiv:1810.04805, section 3.1.
    """

    def __init__(self, samples: Samples, train: Train, vocab: int) -> None:
        assert train.mask_token is not None, "the rules require it"
        self._samples, self._seed, self._vocab = samples, train.seed, vocab
        self._share, self._token = train.mask_share, train.mask_token

    def __len__(self) -> int:
        return len(self._samples)

    def batch(self, numbers: list[int]) -> Batch:
        """Return samples by number, a row each."""
        inputs = self._samples.batch(numbers).inputs
        hidden, targets = np.empty_like(inputs), np.empty_like(inputs)
        for row, number in enumerate(numbers):
            dice = np.random.default_rng([self._seed, number])
            chosen, kind = dice.random(inputs.shape[1]) < self._share, dice.random(inputs.shape[1])
            others = np.asarray(dice.integers(self._vocab, size=inputs.shape[1]))
            targets[row] = np.where(chosen, inputs[row], IGNORED)
            shown = np.where(kind < 0.9, inputs[row], others)
            hidden[row] = np.where(chosen, np.where(kind < 0.8, self._token, shown), inputs[row])
        return Batch(hidden, targets)


@dataclass(frozen=True)
class OwnSamples:
    """Samples of the user's own data: a sequence of token ids `[seq_len + 1]`, or of inputs and targets
    `[seq_len]` each, in which -100 is a target without a loss."""

    sequence: Sequence[Any]
    seq_len: int
    vocab: int

    def __len__(self) -> int:
        return len(self.sequence)

    def batch(self, numbers: list[int]) -> Batch:
        """Return samples by number, a row each.

        Raises:
            UserError: one has another length, or a token outside the vocabulary.
        """
        rows = [self._row(number) for number in numbers]
        inputs, targets = (
            np.array(each, dtype=np.int64).reshape(-1, self.seq_len)
            for each in ([row[0] for row in rows], [row[1] for row in rows])
        )
        return Batch(inputs, targets)

    def digest(self) -> str:
        """Return a digest of the number of samples, and of the first and the last ones."""
        count, digest = len(self), hashlib.sha256(str(len(self)).encode())
        for number in sorted({*range(min(count, 8)), *range(max(0, count - 8), count)}):
            for part in self._row(number):
                digest.update(part.tobytes())
        return digest.hexdigest()

    def _row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        sample, length = self.sequence[number], self.seq_len
        if isinstance(sample, tuple):
            inputs, targets = (np.asarray(part, dtype=np.int64) for part in sample)
        else:
            tokens = np.asarray(sample, dtype=np.int64)
            inputs, targets = tokens[:-1], tokens[1:]
        tokens = np.concatenate([inputs, targets[targets != IGNORED]])
        if inputs.shape != (length,) or targets.shape != (length,):
            wrong = f"{list(inputs.shape)} inputs and {list(targets.shape)} targets, and train.seq_len={length}"
        elif tokens.min() < 0 or tokens.max() >= self.vocab:
            wrong = f"a token that is not below model.vocab={self.vocab}"
        else:
            return inputs, targets
        raise UserError("data", f"sample {number} of data() in hooks.path has {wrong}")


@dataclass(frozen=True)
class RandomSamples:
    """Samples of independent tokens, uniform over the vocabulary.

    A sample follows from the seed, its split and its number alone, whatever rank reads it.
    """

    split: int
    count: int
    seq_len: int
    seed: int
    vocab: int
    labels: int | None = None

    def __len__(self) -> int:
        return self.count

    def batch(self, numbers: list[int]) -> Batch:
        """Return samples by number, a row each."""
        rows = np.empty((len(numbers), self.seq_len + 1), dtype=np.int64)
        for row, number in zip(rows, numbers, strict=True):
            # Philox counts in the lowest of the four words.
            counter = np.array([0, number, self.split, 0], dtype=np.uint64)
            generator = np.random.Generator(np.random.Philox(key=self.seed, counter=counter))
            row[:] = generator.integers(self.vocab, size=self.seq_len + 1)
        batch = Batch.of_rows(rows)
        if self.labels is None:
            return batch
        is_last = np.arange(self.seq_len) == self.seq_len - 1
        return Batch(batch.inputs, np.where(is_last, batch.targets % self.labels, IGNORED))
