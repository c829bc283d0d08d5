"""Several sources in fixed shares: exact at every position, and computed from the position alone."""

from __future__ import annotations

import numpy as np
import pytest

from nanoscale.data.loader import Loader, Mixture
from nanoscale.data.sampler import due
from nanoscale.data.samples import Split
from nanoscale.data.tokens.files import open_tokens
from tests.support.token_files import write_indexed

SEQ = 4
WEIGHTS = [[1.0], [0.7, 0.3], [1, 1, 1], [0.9, 0.05, 0.03, 0.02], [5, 1e-4, 2], [1 / 3, 1e-6, 0.2]]


def shares_of(weights: list[float]) -> np.ndarray:
    return np.array(weights) / np.sum(weights)


def one_by_one(weights: list[float], count: int) -> list[tuple[int, int]]:
    """Return the same by a queue: the source that is due first, from the first sample on."""
    shares = shares_of(weights).tolist()
    given, found = [0] * len(shares), []
    for _ in range(count):
        times = [(n + 0.5) / share for n, share in zip(given, shares, strict=True)]
        source = times.index(min(times))
        found.append((source, given[source]))
        given[source] += 1
    return found


@pytest.mark.parametrize("weights", [[1.0], [0.75, 0.25], [1, 1, 1, 1], [0.7, 0.3], [5, 0.01, 2]])
def test_samples_come_in_the_order_in_which_they_fall_due(weights: list[float]) -> None:
    sources, numbers = due(shares_of(weights), 0, 2000)
    assert list(zip(sources.tolist(), numbers.tolist(), strict=True)) == one_by_one(weights, 2000)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("start", [0, 1, 17, 4096, 10**7, 10**12])
def test_any_window_shows_the_same(weights: list[float], start: int) -> None:
    shares = shares_of(weights)
    whole = np.stack(due(shares, start, start + 500))
    for at in (0, 1, 3, 250, 499):
        np.testing.assert_array_equal(np.stack(due(shares, start + at, start + 500)), whole[:, at:])


@pytest.mark.parametrize("weights", WEIGHTS)
def test_every_share_is_kept_at_every_moment(weights: list[float]) -> None:
    shares = shares_of(weights)
    sources, numbers = due(shares, 0, 20_000)
    bound = (1 + len(shares) * shares) / 2
    for number, share in enumerate(shares):
        given = np.cumsum(sources == number)
        assert np.abs(given - share * np.arange(1, 20_001)).max() <= bound[number]
        np.testing.assert_array_equal(numbers[sources == number], np.arange(given[-1]))


@pytest.fixture
def loaders(tmp_path) -> list[Loader]:
    """Create loaders of three sources whose tokens show their source."""
    made = []
    for number, count in enumerate((400, 90, 30)):
        write_indexed(tmp_path / str(number), [np.arange(count) + 1000 * number], np.int32)
        tokens = open_tokens("megatron", tmp_path / str(number))
        made.append(Loader.from_file(tokens, Split(0, count), SEQ, 3, 10**6))
    return made


@pytest.mark.parametrize(("dp", "micro"), [(1, 12), (1, 4), (2, 3), (4, 1), (12, 1)])
@pytest.mark.parametrize("consumed", [0, 12, 30, 10**9])
def test_every_layout_trains_on_the_same_samples(loaders, dp, micro, consumed):
    weights = [0.5, 0.3, 0.2]
    expected = [
        loaders[source].batch([loaders[source].order(np.array([number]))[0]]).inputs[0]
        for source, number in zip(*due(shares_of(weights), consumed, consumed + 24), strict=True)
    ]
    for step in range(2):
        mixtures = [Mixture(loaders, weights) for _ in range(dp)]
        seen = [
            row
            for rank, mixture in enumerate(mixtures)
            for batch in mixture.micro_batches(consumed + 12 * step, 12, rank, dp, micro)
            for row in batch.inputs
        ]
        np.testing.assert_array_equal(seen, expected[12 * step : 12 * step + 12])


@pytest.mark.parametrize(("dp", "micro"), [(1, 12), (2, 3)])
def test_weights_change_with_a_phase(loaders, dp, micro):
    """Every source continues where it was; a source can come late."""
    changes = [(30, [0.0, 1.0, 3.0]), (66, [1.0, 1.0, 1.0])]
    expected, counts = [], [0, 0, 0]
    for weights, start, stop in (
        ([2.0, 1.0, 0.0], 0, 30),
        (changes[0][1], 30, 66),
        (changes[1][1], 66, 96),
    ):
        for source in due(shares_of(weights), 0, stop - start)[0]:
            number = loaders[source].order(np.array([counts[source]]))[0]
            expected.append(loaders[source].batch([number]).inputs[0])
            counts[source] += 1
    for step in (0, 2, 1, 5, 7):
        mixtures = [Mixture(loaders, [2.0, 1.0, 0.0], changes) for _ in range(dp)]
        seen = [
            row
            for rank, mixture in enumerate(mixtures)
            for batch in mixture.micro_batches(12 * step, 12, rank, dp, micro)
            for row in batch.inputs
        ]
        np.testing.assert_array_equal(seen, expected[12 * step : 12 * step + 12])


def test_a_phase_begins_at_its_step_after_a_rollback(loaders):
    """Skipped samples are of the phase in which they were skipped."""
    mixture = Mixture(loaders, [1.0, 0.0, 0.0], [(24, [0.0, 1.0, 0.0])])
    assert mixture.find(np.arange(40))[0].tolist() == [0] * 24 + [1] * 16
    next(mixture.micro_batches(12, 12, 0, 1, 12))  # numbers of later steps are computed with it
    mixture.skip(12)
    assert mixture.find(np.arange(48))[0].tolist() == [0] * 36 + [1] * 12
    batches = [next(mixture.micro_batches(first, 12, 0, 1, 12)) for first in (24, 36)]
    assert [(batch.inputs // 1000).max() for batch in batches] == [0, 1]


def test_an_epoch_of_each_source_has_each_sample_once(loaders):
    mixture = Mixture(loaders, [1, 1, 1])
    batches = [next(mixture.micro_batches(12 * i, 12, 0, 1, 12)) for i in range(25)]
    rows = np.concatenate([batch.inputs for batch in batches])
    for number, loader in enumerate(loaders):
        first = rows[rows[:, 0] // 1000 == number][: len(loader), 0] - 1000 * number
        assert sorted(first) == [SEQ * i for i in range(len(loader))]
