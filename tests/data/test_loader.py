"""The samples that a rank sees at each step."""

from __future__ import annotations

import numpy as np
import pytest

from nanoscale.common.errors import UserError
from nanoscale.data.batch import Batch
from nanoscale.data.loader import Loader, split_tokens
from nanoscale.data.sampler import sample_indices
from nanoscale.data.samples import Split
from nanoscale.data.tokens.files import TokenFile, open_tokens
from tests.support.token_files import write_indexed

SEQ = 8


def tokens_of(tmp_path, lengths: list[int]) -> TokenFile:
    """Documents of these lengths; each token is its own place in the file."""
    ends = np.cumsum(lengths)
    write_indexed(tmp_path / "tokens", map(np.arange, ends - lengths, ends), np.int32)
    return open_tokens("megatron", tmp_path / "tokens")


def loader_of(tmp_path, count: int, *, start=0, seed=3, vocab=10**6) -> Loader:
    tokens = tokens_of(tmp_path, [start + count])
    return Loader.from_file(tokens, Split(start, start + count), SEQ, seed, vocab)


def rows(batch: Batch) -> np.ndarray:
    """Inputs, and after them the last target: the others must be the inputs moved by one."""
    assert np.array_equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    return np.concatenate([batch.inputs, batch.targets[:, -1:]], axis=1)


@pytest.mark.parametrize(
    ("lengths", "fraction", "border", "within"),
    [
        ([50, 30, 10, 10], 0.1, 90, False),
        ([50, 30, 10, 10], 0.11, 80, False),  # the last document alone would be too little
        ([50, 30, 10, 10], 0.2, 80, False),
        ([50, 30, 10, 10], 0.3, 50, False),
        ([50, 30, 10, 10], 0.05, 90, False),
        ([50, 30, 10, 10], 0.04, 96, True),  # more than twice the requested share
        ([50, 30, 10, 10], 0.0, 100, False),
        ([100], 0.02, 98, True),
        ([10, 90], 0.1, 90, True),
        ([10, 0, 90, 0], 0.9, 10, False),
        ([100], 0.9, 10, True),
    ],
)
def test_validation_has_the_last_documents(tmp_path, lengths, fraction, border, within):
    train, valid = split_tokens(tokens_of(tmp_path, lengths), fraction)
    assert (train.start, train.stop, valid.start, valid.stop) == (0, border, border, 100)
    assert train.within_document is within


def test_samples_are_neighbors_that_share_a_token(tmp_path):
    loader = loader_of(tmp_path, 3 * SEQ + 1, start=5)
    assert len(loader) == 3
    batch = rows(loader.batch([2, 0]))
    assert batch.dtype == np.int64
    assert batch.tolist() == [list(range(21, 30)), list(range(5, 14))]
    assert len(loader_of(tmp_path, 3 * SEQ)) == 2
    assert len(loader_of(tmp_path, SEQ + 1)) == 1
    with pytest.raises(IndexError):
        loader.batch([3])


def test_a_batch_is_the_callers_own(tmp_path):
    loader = loader_of(tmp_path, 100)
    loader.batch([0]).inputs[:] = 0
    assert rows(loader.batch([0])).tolist() == [list(range(9))]


LAYOUTS = [(dp, micro) for dp in (1, 2, 4) for micro in (1, 2, 3, 6) if 24 // dp % micro == 0]


@pytest.mark.parametrize(("dp", "micro"), LAYOUTS)
@pytest.mark.parametrize("consumed", [0, 24, 100, 10**12])
def test_every_layout_trains_on_the_same_samples(tmp_path, dp, micro, consumed):
    loader = loader_of(tmp_path, 1000)
    seen = []
    for rank in range(dp):
        batches = list(loader.micro_batches(consumed, 24, rank, dp, micro))
        assert [batch.inputs.shape for batch in batches] == [(micro, SEQ)] * (24 // dp // micro)
        seen += [row for batch in batches for row in rows(batch).tolist()]
    positions = np.arange(consumed, consumed + 24)
    wanted = rows(loader.batch(sample_indices(3, positions, len(loader)))).tolist()
    assert sorted(seen) == sorted(wanted)


@pytest.mark.parametrize("layout", [(24, 0, 5, 1), (24, 0, 2, 5), (24, 2, 2, 1), (24, -1, 2, 1)])
def test_batches_that_do_not_divide_are_refused(tmp_path, layout):
    with pytest.raises(ValueError, match="does not divide"):
        list(loader_of(tmp_path, 1000).micro_batches(0, *layout))


@pytest.mark.parametrize("dp", [1, 2, 3, 4])
@pytest.mark.parametrize("micro", [1, 2, 3, 8])
@pytest.mark.parametrize(("asked", "count"), [(1, 1), (7, 7), (8, 8), (99, 12)])
def test_an_evaluation_counts_each_sample_once_in_every_layout(tmp_path, dp, micro, asked, count):
    loader = loader_of(tmp_path, 12 * SEQ + 1)
    assert loader.evaluated(asked) == count
    lengths, counted = set(), []
    for rank in range(dp):
        batches = list(loader.valid_batches(asked, rank, dp, micro))
        lengths.add(len(batches))
        for batch, some in batches:
            assert batch.inputs.shape == (micro, SEQ)
            counted += (batch.inputs[:some, 0] // SEQ).tolist()
    assert len(lengths) == 1  # as many forward passes on every rank
    assert sorted(counted) == list(range(count))


def test_too_few_tokens_for_a_sample(tmp_path):
    with pytest.raises(UserError, match="needs 9 tokens, and .* has only 8") as caught:
        loader_of(tmp_path, SEQ)
    assert caught.value.kind == "data"
    assert caught.value.violations[0].suggestions == ("train.seq_len=7",)


def test_a_token_outside_the_vocabulary_is_found_by_the_batch_that_holds_it(tmp_path):
    loader = loader_of(tmp_path, 100, vocab=50)
    loader.batch([0])
    with pytest.raises(UserError, match=r"tokens\.bin holds token 56") as caught:
        loader.batch([0, 6])
    assert caught.value.violations[0].key == "model.vocab"
    write_indexed(tmp_path / "negative", [[1, 2, -3, 4, 5, 6, 7, 8, 9]], np.int32)
    tokens = open_tokens("megatron", tmp_path / "negative")
    with pytest.raises(UserError, match="holds token -3"):
        Loader.from_file(tokens, Split(0, 9), SEQ, 0, 50).batch([0])
