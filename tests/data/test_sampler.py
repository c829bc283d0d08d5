"""The order of samples: a permutation each epoch, the same on every machine, forever."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from nanoscale.data.sampler import sample_indices

SIZES = [1, 2, 3, 5, 31, 32, 33, 63, 64, 65, 100, 255, 256, 257, 1000, 4095, 4096, 4097, 65537]


def epoch(seed: int, number: int, n: int) -> np.ndarray:
    return sample_indices(seed, np.arange(number * n, (number + 1) * n), n)


@pytest.mark.parametrize("n", SIZES)
def test_every_epoch_holds_every_sample_once(n):
    for seed, number in ((0, 0), (0, 1), (12345, 7)):
        assert np.array_equal(np.sort(epoch(seed, number, n)), np.arange(n))


def test_the_order_never_changes():
    """The values are recorded: a run that resumes with a later version keeps its order."""
    assert sample_indices(0, range(10), 10).tolist() == [1, 0, 2, 5, 6, 3, 8, 4, 7, 9]
    assert sample_indices(1, range(10), 10).tolist() == [4, 0, 1, 6, 3, 7, 5, 2, 9, 8]
    assert sample_indices(0, range(10, 20), 10).tolist() == [7, 0, 9, 1, 8, 4, 6, 5, 2, 3]
    assert sample_indices(42, [0, 1, 2, 1 << 41], 1 << 40).tolist() == [
        535354719581,
        1027958680871,
        893386030209,
        102262910083,
    ]
    assert sample_indices((1 << 64) - 1, [(1 << 61) + 5], (1 << 61) + 3).tolist() == [
        467395301192141864
    ]


def test_it_is_the_network_that_the_documentation_describes():
    """The same permutation in Python's own integers, which do not overflow."""
    word, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def mix(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & word
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & word
        return x ^ (x >> 31)

    def index(seed, position, n):
        number, value = divmod(position, n)
        key = mix((number + mix((seed + golden) & word)) & word)
        half = max(3, ((n - 1).bit_length() + 1) // 2)
        while True:
            left, right = value >> half, value & ((1 << half) - 1)
            for i in range(1, 9):
                inner = mix((key + i * golden) & word)
                left, right = right, left ^ (mix((inner + right) & word) & ((1 << half) - 1))
            value = left << half | right
            if value < n:
                return value

    # the mixer's first outputs for the state 0, as published with SplitMix64
    assert [mix(i * golden & word) for i in (1, 2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    for seed, position, n in ((0, 0, 1), (3, 17, 10), (9, 1 << 50, 12345), (1, 1, (1 << 61) + 1)):
        assert sample_indices(seed, position, n) == index(seed, position, n)


def test_seeds_and_epochs_have_orders_of_their_own():
    orders = [epoch(seed, number, 500) for seed in range(4) for number in range(4)]
    for i, one in enumerate(orders):
        for other in orders[i + 1 :]:
            assert (one == other).sum() < 12  # one is expected, by chance
    # epoch 1 of a seed is not epoch 0 of the next
    assert not np.array_equal(epoch(0, 1, 500), epoch(1, 0, 500))


def test_any_slice_is_the_same_whoever_asks():
    whole = sample_indices(5, np.arange(0, 300), 77)
    assert np.array_equal(sample_indices(5, np.arange(100, 200), 77), whole[100:200])
    assert sample_indices(5, 123, 77) == whole[123]
    table = np.arange(300).reshape(30, 10)
    assert np.array_equal(sample_indices(5, table, 77), whole.reshape(30, 10))


@pytest.mark.parametrize("n", [3, 4, 5])
def test_every_order_is_equally_likely(n):
    epochs = 30_000
    orders = sample_indices(11, np.arange(epochs * n), n).reshape(epochs, n)
    _, counts = np.unique(orders, axis=0, return_counts=True)
    possible = {3: 6, 4: 24, 5: 120}[n]
    assert len(counts) == possible
    expected = epochs / possible
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = possible - 1
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)


def test_it_looks_random():
    n = 20_000
    order = epoch(3, 0, n).astype(float)
    places = np.arange(n)
    bound = 4 / np.sqrt(n)
    assert abs(np.corrcoef(places, order)[0, 1]) < bound
    for lag in (1, 2, 3, 64):
        assert abs(np.corrcoef(order[:-lag], order[lag:])[0, 1]) < bound
    # steps between neighbors: a permutation has every step about equally often
    steps = np.bincount(((np.diff(order) % n) // (n / 100)).astype(int), minlength=100)
    expected = (n - 1) / 100
    assert ((steps - expected) ** 2 / expected).sum() < 99 + 5 * np.sqrt(2 * 99)
    # parity and low bits do not repeat
    assert abs((order[:-1] % 2 == order[1:] % 2).mean() - 0.5) < 2 * bound


@pytest.mark.parametrize("n", [10, 10**6, 1 << 40, (1 << 62) - 1])
def test_memory_does_not_grow_with_the_corpus(n):
    tracemalloc.start()
    found = sample_indices(1, np.arange(64), n)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000
    assert ((found >= 0) & (found < n)).all()
    assert len(set(found.tolist())) == min(64, n)


def test_no_samples_is_an_error():
    for n in (0, -1, 1 << 62):
        with pytest.raises(ValueError, match="cannot order"):
            sample_indices(0, [0], n)
