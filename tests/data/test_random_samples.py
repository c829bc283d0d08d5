"""Random tokens: the same in every layout, uniform, without a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nanoscale.config.schema import Data, Train
from nanoscale.data import Dataset, open_data
from nanoscale.data.batch import Batch

VOCAB, SEQ_LEN = 1000, 32
BATCH = 8


def opened(seed: int = 3) -> Dataset:
    return open_data(Data(source="random"), Train(seq_len=SEQ_LEN, seed=seed), VOCAB)


def step(dataset: Dataset, number: int, dp: int = 1, micro_batch: int = BATCH) -> Batch:
    """Return the global batch of a step, from all ranks."""
    parts = [
        batch
        for rank in range(dp)
        for batch in dataset.train.micro_batches(number * BATCH, BATCH, rank, dp, micro_batch)
    ]
    return Batch.concatenate(parts)


@pytest.mark.parametrize(("dp", "micro_batch"), [(2, 4), (4, 1)])
def test_a_step_has_the_same_tokens_in_every_layout(dp: int, micro_batch: int) -> None:
    for number in (0, 1, 10**6):
        found = step(opened(), number, dp, micro_batch)
        assert np.array_equal(found.inputs, step(opened(), number).inputs)
        assert np.array_equal(found.inputs[:, 1:], found.targets[:, :-1])


def test_steps_seeds_and_held_out_samples_have_other_tokens() -> None:
    dataset = opened()
    rows = [*step(dataset, 0).inputs, *step(dataset, 1).inputs, *step(opened(4), 0).inputs]
    rows += [*dataset.valid[0].loader.batch(range(BATCH)).inputs, *dataset.train.batch([0]).inputs]
    assert len({row.tobytes() for row in rows}) == len(rows)


def test_tokens_are_uniform_over_the_vocabulary() -> None:
    counts = np.bincount(opened().train.batch(range(10_000)).inputs.reshape(-1), minlength=VOCAB)
    assert len(counts) == VOCAB
    expected = counts.sum() / VOCAB
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_squared - (VOCAB - 1)) < 4 * np.sqrt(2 * VOCAB)


def test_no_file_is_read_or_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOSCALE_CACHE", str(tmp_path / "cache"))
    dataset = opened()
    assert len(dataset.train.batch([0])) == 1
    assert not list(tmp_path.iterdir())
    assert dataset.tokenizer is None
    assert dataset.fingerprint == opened().fingerprint != opened(4).fingerprint
