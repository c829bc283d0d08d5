"""The samples of texts that are prepared beside the training (`prepare.by_parts`)."""

from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np

from nanoscale.common.errors import UserError
from nanoscale.common.json_text import parse
from nanoscale.config.token_files import ALL_PARTS
from nanoscale.config.token_formats import part_of
from nanoscale.data.batch import Batch
from nanoscale.data.loader import gathered
from nanoscale.data.sampler import PrecomputedSamples, sample_indices
from nanoscale.data.samples import Samples

_LARGEST_WINDOW = 16
"""Parts whose samples are shuffled together; the first windows are smaller, so that training starts soon."""


class Parts:
    """Samples window by window: windows of 1, 1, 2, 4, 8 and then always 16 neighboring parts.

    The samples of a window have a new order in every epoch. A sample follows from the seed, the parts and its
    position alone, so a training that waits for parts has the same samples as one that does not.
    """

    def __init__(self, folder: Path, open_part: Callable[[Path], Samples], seed: int) -> None:
        self._folder, self._seed = folder, seed
        self._open = lru_cache(2 * _LARGEST_WINDOW)(lambda part: open_part(part_of(folder, part)))
        self._sizes: list[int] = []
        """Samples of each part of the windows that are known."""
        self._windows: list[tuple[int, int]] = []
        """The first part and the first sample of each of these windows."""
        self._samples = 0
        self._is_all = False
        self._ahead = PrecomputedSamples(self.find, 1, ahead=1)

    def are_ready(self, end: int) -> bool:
        """True if all parts that hold the samples before this position are prepared.

        Raises:
            UserError: they hold no sample, or are damaged.
        """
        while not self._is_all and self._samples < end:
            if not self._add_window():
                return False
        if self._samples == 0:
            raise UserError("data", f"{self._folder} holds no sample of train.seq_len tokens")
        return True

    def micro_batches(
        self, consumed: int, global_batch: int, dp_rank: int, dp: int, micro_batch: int
    ) -> Iterator[Batch]:
        """Yield batches like `Loader.micro_batches`.

        Raises:
            UserError: a part is not prepared yet.
        """
        if not self.are_ready(consumed + global_batch):
            raise UserError(
                "data", f"part {len(self._sizes)} of {self._folder} is not prepared yet"
            )
        numbers = self._ahead.micro_batches(consumed, global_batch, dp_rank, dp, micro_batch)
        for parts, samples in numbers:
            yield gathered(self._open, parts, samples)

    def find(self, positions: np.ndarray) -> np.ndarray:
        """Return parts and the numbers of their samples: int64 `[2, *positions.shape]`."""
        flat = positions.reshape(-1)
        epochs, offsets = np.divmod(flat, self._samples) if self._is_all else (0 * flat, flat)
        result = np.empty((2, len(flat)), dtype=np.int64)
        starts = np.array([start for _, start in self._windows])
        windows = np.searchsorted(starts, offsets, side="right") - 1
        for window in np.unique(windows).tolist():
            inside = windows == window
            first, start = self._windows[window]
            last = self._windows[window + 1][0] if window + 1 < len(starts) else len(self._sizes)
            ends = np.cumsum(self._sizes[first:last])
            orders = epochs[inside] * ends[-1] + offsets[inside] - start
            indices = sample_indices(self._seed, orders, int(ends[-1]))
            parts = np.searchsorted(ends, indices, side="right")
            begins = np.concatenate(([0], ends[:-1]))
            result[:, inside] = parts + first, indices - begins[parts]
        return result.reshape(2, *positions.shape)

    def _add_window(self) -> bool:
        """Add the next window if its parts are prepared; True if it was added, or if there is none."""
        first = len(self._sizes)
        size = max(1, min(first, _LARGEST_WINDOW))
        whole = self._folder / ALL_PARTS
        if not part_of(self._folder, first + size - 1).is_dir():
            if not whole.is_file():
                return False
            # Not more than a window: a shared disk may show this file before the window's last part.
            size = min(size, int(parse(whole.read_bytes())["parts"]) - first)
            self._is_all = size == 0
            if self._is_all:
                return True
        sizes = [len(self._open(first + number)) for number in range(size)]
        if sum(sizes):
            self._windows.append((first, self._samples))
        self._sizes += sizes
        self._samples += sum(sizes)
        return True
