"""Batches of work for a model, on one device or on a copy of it for each device."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from nanoscale.common.errors import UserError
from nanoscale.generate.weights import Opened, open_model
from nanoscale.processes.pool import LostProcessError, Pool

Result = TypeVar("Result", covariant=True)


class BatchWork(Protocol[Result]):
    """Work that is computed together, on one device; it can be pickled."""

    def run(self, opened: Opened) -> Result:
        """Compute it with a model."""


RunAll = Callable[[Iterable[BatchWork[Any]]], Iterator[Any]]
"""A function that yields the results of batches, in order."""


def run_here(opened: Opened) -> RunAll:
    """Return the function that runs batches with this model."""
    return lambda batches: (batch.run(opened) for batch in batches)


@contextmanager
def replicated(
    name: str, options: dict[str, Any], opened: Opened, devices: Sequence[str]
) -> Iterator[RunAll]:
    """Provide the function that runs batches on all devices.

    The results do not depend on the number of devices: which prompts share a batch does not.

    Args:
        name, options: the arguments of `open_model`, except the device.
        opened: what they have opened; with several devices, it needs no weights.

    Raises:
        UserError: a process found an error in the request, or was killed.
    """
    if len(devices) == 1:
        yield run_here(opened)
        return
    threads = max(1, torch.get_num_threads() // len(devices))
    exact = {**options, "step": opened.step}  # a run may save a newer one meanwhile
    setups = [_Replica(name, {**exact, "device": device}, threads) for device in devices]
    with Pool[BatchWork[Any], Any](setups) as pool:
        try:
            yield lambda batches: (result for _, result in pool.map(batches))
        except LostProcessError as error:
            what = f"a process of {len(devices)} ended by {error}"
            advice = "if memory ran out, use fewer devices: --num-gpus N"
            raise UserError("usage", f"{what}; {advice}") from error


@dataclass(frozen=True)
class _Replica:
    """A process with the model."""

    name: str
    options: dict[str, Any]
    threads: int

    def load(self) -> Callable[[BatchWork[Any]], Any]:
        torch.set_num_threads(self.threads)
        opened = open_model(self.name, **self.options)
        return lambda batch: batch.run(opened)
