"""The likelihoods of other weights that a loss reads, computed once and stored in the run.

A distillation reads its teacher's most likely tokens, and some objectives answers' likelihoods by the initial
weights.

`teacher/tokens.bin` has a record `[seq, k, 2]` for each sample of the training: log-probabilities and ids.
`teacher/index.npz` has the keys of the records' samples, in their order.
"""

import gc
import io
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
import torch.distributed as dist

from nanoscale.backends.base import Engine
from nanoscale.backends.native import NativeEngine
from nanoscale.checkpoint.hf.load import fingerprint
from nanoscale.common.errors import UserError
from nanoscale.config.hf.shape import read_shape
from nanoscale.config.resolved import ResolvedConfig, ResolvedParallel
from nanoscale.config.schema import Backend, Lora, Optimizer, Zero
from nanoscale.config.training_phases import samples_after
from nanoscale.data.batch import Batch
from nanoscale.data.dataset import Dataset
from nanoscale.data.loader import Loader, Mixture
from nanoscale.data.parts import Parts
from nanoscale.data.samples import AnswerSamples
from nanoscale.metrics.meter import forget_peak_memory
from nanoscale.parallel import process_group
from nanoscale.runs.directory import write_atomically
from nanoscale.runs.events import Note

_TOKENS_AT_ONCE = 8192
"""Tokens of a rank's forward pass, if a sample is not longer."""
_SOURCE = 1 << 48
"""The key of a sample is source · _SOURCE + number."""


def set_teacher(
    folder: Path, config: ResolvedConfig, device: torch.device, data: Dataset, note: Note
) -> None:
    """Give the training samples the teacher's tokens; tokens that the run has not stored yet are computed.

    Every rank calls it, before the model takes memory.

    Raises:
        UserError: the stored tokens are damaged, or of other data or of another teacher.
    """
    if not config.train.is_distilled:
        return
    assert not isinstance(data.train, Parts), "the rules refuse them"
    loaders = data.train.loaders if isinstance(data.train, Mixture) else [data.train]
    model, file = Path(config.train.teacher or ""), folder / "tokens.bin"
    shape = (config.train.seq_len, config.train.distill_top_k, 2)
    dtype = np.dtype("float64" if config.precision.params == "fp64" else "float32")
    about = [data.fingerprint, fingerprint(model, read_shape(model)), f"{shape} {dtype}"]
    wrong = "is of other data or of another teacher than this job"
    index = folder / "index.npz"
    keys = process_group.broadcast(lambda: _read(index, "keys", "about", about, wrong))
    keys = np.zeros(0, dtype=np.int64) if keys is None else keys
    missing = np.setdiff1d(_needed(config, data.train), keys)
    if len(missing):
        note("teacher", f"{model} reads {len(missing):,} samples once")
        folder.mkdir(exist_ok=True)
        with file.open("ab") as opened:
            if process_group.rank() == 0:
                opened.truncate(len(keys) * int(np.prod(shape)) * dtype.itemsize)
            for records in _compute(
                _make_engine(config, device, model), loaders, missing, shape[1]
            ):
                if process_group.rank() == 0:
                    opened.write(records.astype(dtype).tobytes())
        gc.collect()
        forget_peak_memory(device)
        keys = np.concatenate([keys, missing])
        if process_group.rank() == 0:
            _write(index, keys=keys, about=np.array(about))
        process_group.gather(None)  # no rank reads before all is written
    stored = np.memmap(file, dtype, "r", shape=(len(keys), *shape))
    for source, loader in enumerate(loaders):
        loader.references = partial(_look_up, stored, keys, np.argsort(keys), source)


def _look_up(
    stored: np.ndarray, keys: np.ndarray, order: np.ndarray, source: int, numbers: list[int]
) -> np.ndarray:
    rows = np.searchsorted(keys, source * _SOURCE + np.array(numbers), sorter=order)
    return np.asarray(stored[order[rows]], dtype=np.float64)


def _needed(config: ResolvedConfig, train: Loader | Mixture) -> np.ndarray:
    """Return the keys of all samples of the training."""
    positions = np.arange(samples_after(config.train, config.train.steps))
    if isinstance(train, Loader):
        return np.unique(train.order(positions))
    sources, numbers = train.find(positions)
    return np.unique(sources * _SOURCE + numbers)


def _read(file: Path, name: str, key: str, expected: object, wrong: str) -> np.ndarray | None:
    """Return an array of a file; None if there is no file.

    Raises:
        UserError: the file cannot be read, or is `wrong`, since `key` does not hold what is expected.
    """
    if not file.is_file():
        return None
    try:
        with np.load(file) as stored:
            array: np.ndarray = stored[name]
            is_same = stored[key].tolist() == expected
    except (OSError, ValueError, EOFError, KeyError, BadZipFile) as error:
        raise UserError("data", f"{file} cannot be read: {error}") from error
    if not is_same:
        raise UserError("data", f"{file} {wrong}")
    return array


def _write(file: Path, **arrays: np.ndarray) -> None:
    np.savez(buffer := io.BytesIO(), **arrays)  # type: ignore[arg-type]
    write_atomically(file, buffer.getvalue())


def _compute(
    engine: NativeEngine, loaders: list[Loader], keys: np.ndarray, k: int
) -> Iterator[np.ndarray]:
    """Compute the records of samples, in their order, on all ranks; every rank gets all of them."""
    ranks, each = process_group.world_size(), engine.config.train.micro_batch
    for start in range(0, len(keys), each * ranks):
        first = start + process_group.rank() * each
        local = keys[np.arange(first, first + each) % len(keys)].tolist()
        rows = [loaders[key // _SOURCE].batch([key % _SOURCE]) for key in local]
        computed = [engine.top_tokens(Batch.concatenate(rows), k)]
        if dist.is_initialized():
            by_rank = [torch.empty_like(computed[0]) for _ in range(ranks)]
            dist.all_gather(by_rank, computed[0])
            computed = by_rank
        yield torch.cat(computed)[: len(keys) - start].cpu().numpy()


def _make_engine(config: ResolvedConfig, device: torch.device, folder: Path) -> NativeEngine:
    """Create the teacher with its weights, sharded over all ranks by ZeRO 3, whatever the job's layout."""
    ranks, each = config.world_size, max(1, _TOKENS_AT_ONCE // config.train.seq_len)
    train = replace(config.train, objective="next-token", micro_batch=each, phases={})
    changed = replace(
        config,
        model=read_shape(folder),
        lora=Lora(),
        parallel=ResolvedParallel(dp=ranks, virtual_stages=1),
        precision=replace(config.precision, fp8=False),
        zero=Zero(stage=3 if ranks > 1 else 0),
        backend=Backend(attention=config.backend.attention),
        optimizer=Optimizer(),
        train=replace(train, global_batch=each * ranks),
    )
    engine = NativeEngine(changed, device)
    engine.load_pretrained(folder)
    return engine


def set_references(file: Path, engine: Engine, data: Dataset, step: int, note: Note) -> None:
    """Give the answers of a job the likelihoods in the run's file, which is written before the first step.

    Every rank calls it, before the first step with the initial weights.

    Raises:
        UserError: the file is missing after the first step, or it is of other answers.
    """
    if not engine.config.train.needs_reference:
        return
    every = data.answers()
    wrong = "is of other data: its answers are not those of this job"
    stored = process_group.broadcast(
        lambda: _read(file, "likelihoods", "data", data.fingerprint, wrong)
    )
    if stored is None:
        if step:
            raise UserError(
                "data", f"{file} is missing: it holds what the initial weights gave to the answers"
            )
        samples = "pairs" if engine.config.train.is_paired else "answers"
        note("reference", f"the initial weights read {sum(map(len, every)):,} {samples} once")
        stored = np.concatenate([_likelihoods(engine, answers) for answers in every])
        if process_group.rank() == 0:
            _write(file, likelihoods=stored, data=np.array(data.fingerprint))
    if len(stored) != sum(map(len, every)):
        raise UserError("data", f"{file} is of {len(stored):,} samples, and others fit here")
    for answers in every:
        answers.references, stored = stored[: len(answers)], stored[len(answers) :]


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
