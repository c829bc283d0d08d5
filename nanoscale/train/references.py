"""The reference of an objective of pairs: log-likelihoods by the initial weights, computed once and stored."""

from __future__ import annotations

import io
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
import torch.distributed as dist

from nanoscale.backends.base import Engine
from nanoscale.common.errors import UserError
from nanoscale.config.objectives import needs_reference
from nanoscale.data.dataset import Dataset
from nanoscale.data.samples import Pairs
from nanoscale.parallel import process_group
from nanoscale.runs.directory import write_atomically
from nanoscale.runs.events import Note


def set_references(file: Path, engine: Engine, data: Dataset, step: int, note: Note) -> None:
    """Give the pairs of a job the likelihoods in the run's file, which is written before the first step.

    Every rank calls it, before the first step with the initial weights.

    Raises:
        UserError: the file is missing after the first step, or it is of other pairs.
    """
    if not needs_reference(engine.config.train):
        return
    every = data.pairs()
    stored = process_group.broadcast(lambda: _read(file, data.fingerprint))
    if stored is None:
        if step:
            raise UserError(
                "data", f"{file} is missing: it holds what the initial weights gave to the pairs"
            )
        note("reference", f"the initial weights read {sum(map(len, every)):,} pairs once")
        stored = np.concatenate([_likelihoods(engine, pairs) for pairs in every])
        if process_group.rank() == 0:
            buffer = io.BytesIO()
            np.savez(buffer, likelihoods=stored, data=np.array(data.fingerprint))
            write_atomically(file, buffer.getvalue())
    if len(stored) != sum(map(len, every)):
        raise UserError("data", f"{file} is of {len(stored):,} pairs, and others fit here")
    for pairs in every:
        pairs.references, stored = stored[: len(pairs)], stored[len(pairs) :]


def _read(file: Path, fingerprint: str) -> np.ndarray | None:
    if not file.is_file():
        return None
    try:
        with np.load(file) as found:
            likelihoods: np.ndarray = found["likelihoods"]
            is_same = str(found["data"]) == fingerprint
    except (OSError, ValueError, EOFError, KeyError, BadZipFile) as error:
        raise UserError("data", f"{file} cannot be read: {error}") from error
    if not is_same:
        raise UserError("data", f"{file} is of other data: its pairs are not those of this job")
    return likelihoods


def _likelihoods(engine: Engine, pairs: Pairs) -> np.ndarray:
    """Compute fp64 [pairs, 2] over all ranks."""
    parallel, at = engine.config.parallel, engine.coordinates
    each = engine.config.train.micro_batch // 2
    firsts = range(at.dp * each, len(pairs) + at.dp * each, parallel.dp * each)
    numbers = np.concatenate([np.arange(first, first + each) for first in firsts])
    rows = (numbers % len(pairs)).reshape(-1, each).tolist()
    batches = (pairs.batch(row) for row in rows)
    likelihoods = engine.log_likelihoods(batches).reshape(-1, 2)
    result = torch.zeros(len(pairs), 2, dtype=torch.float64)
    if at.tp == at.cp == 0:
        inside = torch.from_numpy(numbers < len(pairs))
        result[torch.from_numpy(numbers)[inside]] = likelihoods[inside]
    total = result.to(engine.device)
    if dist.is_initialized():
        dist.all_reduce(total)
    return np.asarray(total.cpu())
