"""Separate documents: packed whole, and in the stream."""

from __future__ import annotations

import numpy as np
import pytest

from nanoscale.common.errors import UserError
from nanoscale.data.batch import IGNORED, Batch
from nanoscale.data.loader import Form, Loader
from nanoscale.data.samples import Split, pack
from nanoscale.data.tokens.files import TokenFile
from tests.data.test_loader import SEQ, tokens_of


def one_by_one(lengths: list[int], room: int) -> list[int]:
    """Return best-fit decreasing by its definition: the remaining room of each sequence, sorted."""
    left: list[int] = []
    for length in sorted(lengths, reverse=True):
        fits = [space for space in left if space >= length]
        if fits:
            left[left.index(min(fits))] -= length
        else:
            left.append(room - length)
    return sorted(left)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("room", [1, 7, 50])
def test_the_longest_goes_first_into_the_fullest(seed, room):
    lengths = np.random.default_rng(seed).integers(1, room + 1, 200)
    found = pack(lengths, room)
    left = room - np.bincount(found, lengths).astype(int)
    assert sorted(left) == one_by_one(lengths.tolist(), room)
    first = np.unique(found, return_index=True)[1]
    assert first.tolist() == sorted(first.tolist())


def packed(file: TokenFile, split: Split, answers: np.ndarray | None = None) -> Loader:
    return Loader.from_file(file, split, SEQ, 3, 10**6, Form("whole", True, answers))


LENGTHS = [3, 30, 1, 9, 2, 0, 8, 5, 17, 4, 1]


@pytest.mark.parametrize("split", [(0, 80), (10, 52), (33, 42)])
def test_every_token_that_follows_one_of_its_document_is_predicted_once(tmp_path, split):
    file = tokens_of(tmp_path, LENGTHS)  # a token is its own place
    loader = packed(file, Split(*split))
    batch = loader.batch(range(len(loader)))
    counted = batch.targets != IGNORED
    assert (batch.targets[counted] == batch.inputs[counted] + 1).all()
    ends = np.cumsum(LENGTHS).tolist()
    wanted = [place for place in range(split[0] + 1, split[1]) if place not in ends]
    assert sorted(batch.targets[counted].tolist()) == wanted
    document = np.searchsorted(ends, batch.inputs, side="right")
    assert batch.documents is not None
    for row in range(len(batch)):
        for number in np.unique(batch.documents[row]):
            here = batch.documents[row] == number
            assert len(set(document[row, here & counted[row]])) <= 1
            assert counted[row, here].all() or not counted[row, here].any()  # padding is separate
        assert (np.diff(batch.documents[row]) >= 0).all()
    assert np.array_equal(loader.batch([0]).inputs, packed(file, Split(*split)).batch([0]).inputs)


def test_only_answers_count(tmp_path):
    file = tokens_of(tmp_path, LENGTHS)
    answers = np.arange(80) % 3 == 0
    loader = packed(file, Split(0, 80), answers.astype(np.uint8))
    everything = packed(file, Split(0, 80)).batch(range(len(loader))).targets
    targets = loader.batch(range(len(loader))).targets
    assert np.array_equal(targets, np.where(answers[everything.clip(0)], everything, IGNORED))
    stream = Loader.from_file(
        file, Split(8, 80), SEQ, 3, 100, Form(answers=answers.astype(np.uint8))
    )
    batch = stream.batch([1])
    assert batch.inputs.tolist() == [list(range(16, 24))]
    assert batch.targets.tolist() == [[-100, 18, -100, -100, 21, -100, -100, 24]]
    assert batch.documents is None


def test_documents_of_the_stream_are_told_apart(tmp_path):
    file = tokens_of(tmp_path, LENGTHS)
    loader = Loader.from_file(file, Split(2, 80), SEQ, 3, 100, Form(document_mask=True))
    plain = Loader.from_file(file, Split(2, 80), SEQ, 3, 100)
    numbers = list(range(len(plain)))
    batch, stream = loader.batch(numbers), plain.batch(numbers)
    assert len(loader) == len(plain)
    assert np.array_equal(batch.inputs, stream.inputs)
    document = np.searchsorted(np.cumsum(LENGTHS), stream.inputs, side="right")
    assert np.array_equal(batch.documents, document - document[:, :1])
    of_targets = np.searchsorted(np.cumsum(LENGTHS), stream.targets, side="right")
    wanted = np.where(of_targets == document, stream.targets, IGNORED)
    assert np.array_equal(batch.targets, wanted)


def test_packed_samples_are_in_the_vocabulary_and_there(tmp_path):
    file = tokens_of(tmp_path, LENGTHS)
    with pytest.raises(UserError, match="holds token 78"):
        Loader.from_file(file, Split(60, 80), SEQ, 3, 78, Form("whole")).batch([0, 1, 2])
    with pytest.raises(UserError, match="too few tokens"):
        packed(file, Split(33, 34))


def test_batches_are_put_together_by_rows(tmp_path):
    loader = packed(tokens_of(tmp_path, LENGTHS), Split(0, 80))
    three = Batch.concatenate([loader.batch([2]), loader.batch([0, 1])])
    whole = loader.batch([2, 0, 1])
    for name in ("inputs", "targets", "documents"):
        assert np.array_equal(getattr(three, name), getattr(whole, name))
        assert np.array_equal(getattr(whole.take(np.array([1, 2, 0])), name),
                              getattr(loader.batch([0, 1, 2]), name))  # fmt: skip
    assert three.counted() == whole.counted() == int((whole.targets != IGNORED).sum())
    with pytest.raises(ValueError, match="others do not"):
        Batch.concatenate([whole, Batch(whole.inputs, whole.targets)])
