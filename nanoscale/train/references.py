"""The reference of an objective: answers' likelihoods by the initial weights, computed once and stored."""

from __future__ import annotations

import io
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
import torch.distributed as dist

from nanoscale.backends.base import Engine
from nanoscale.common.errors import UserError
from nanoscale.config.objectives import is_paired, needs_reference
from nanoscale.data.dataset import Dataset
from nanoscale.data.samples import AnswerSamples
from nanoscale.parallel import process_group
from nanoscale.runs.directory import write_atomically
from nanoscale.runs.events import Note


def set_references(file: Path, engine: Engine, data: Dataset, step: int, note: Note) -> None:
    """Give the answers of a job the likelihoods in the run's file, which is written before the first step.

    Every rank calls it, before the first step with the initial weights.

    Raises:
        UserError: the file is missing after the first step, or it is of other answers.
    """
    if not needs_reference(engine.config.train):
        return
    every = data.answers()
    stored = process_group.broadcast(lambda: _read(file, data.fingerprint))
    if stored is None:
        if step:
            raise UserError(
                "data", f"{file} is missing: it holds what the initial weights gave to the answers"
            )
        samples = "pairs" if is_paired(engine.config.train) else "answers"
        note("reference", f"the initial weights read {sum(map(len, every)):,} {samples} once")
        stored = np.concatenate([_likelihoods(engine, answers) for answers in every])
        if process_group.rank() == 0:
            buffer = io.BytesIO()
            np.savez(buffer, likelihoods=stored, data=np.array(data.fingerprint))
            write_atomically(file, buffer.getvalue())
    if len(stored) != sum(map(len, every)):
        raise UserError("data", f"{file} is of {len(stored):,} samples, and others fit here")
    for answers in every:
        answers.references, stored = stored[: len(answers)], stored[len(answers) :]


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
        raise UserError("data", f"{file} is of other data: its answers are not those of this job")
    return likelihoods


def _likelihoods(engine: Engine, answers: AnswerSamples) -> np.ndarray:
    """Compute fp64 [samples, 2] over all ranks."""
    parallel, at = engine.config.parallel, engine.coordinates
    each = engine.config.train.micro_batch // answers.rows
    firsts = range(at.dp * each, len(answers) + at.dp * each, parallel.dp * each)
    numbers = np.concatenate([np.arange(first, first + each) for first in firsts])
    rows = (numbers % len(answers)).reshape(-1, each).tolist()
    batches = (answers.batch(row) for row in rows)
    likelihoods = engine.log_likelihoods(batches).reshape(-1, answers.rows)
    if answers.rows == 1:
        unmatched = (answers.batch(row).unmatched for row in rows)
        others = engine.log_likelihoods(filter(None, unmatched))
        likelihoods = torch.cat([likelihoods, others[:, None]], 1)
    result = torch.zeros(len(answers), 2, dtype=torch.float64)
    if at.tp == at.cp == 0:
        inside = torch.from_numpy(numbers < len(answers))
        result[torch.from_numpy(numbers)[inside]] = likelihoods[inside]
    total = result.to(engine.device)
    if dist.is_initialized():
        dist.all_reduce(total)
    return np.asarray(total.cpu())
