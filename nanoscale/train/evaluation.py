"""Evaluation of a checkpoint on validation data: the job of `nanoscale eval`, which changes nothing."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from nanoscale.backends.base import Engine
from nanoscale.checkpoint import sharded
from nanoscale.checkpoint.hf.adapters import require_same_base
from nanoscale.checkpoint.store import StoredCheckpoint
from nanoscale.common.errors import UserError, Violation
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.data.batch import IGNORED
from nanoscale.data.dataset import Dataset, Validation, open_data
from nanoscale.data.loader import Loader
from nanoscale.data.tokenizer import Tokenizer
from nanoscale.parallel import process_group
from nanoscale.runs.directory import read_json, write_json
from nanoscale.train.job import base_of, begin, make_engine
from nanoscale.train.loop import samples_of, validate

if TYPE_CHECKING:
    from nanoscale.runs.rank_context import RankContext

_WEIGHTS = ("model.", "balance.")
"""Prefixes of a training's state that the model computes with."""
T = TypeVar("T")
_SAID_EVERY_S = 1.0
_DECODED = 1 << 16
"""Tokens that are decoded at once."""


def run(context: RankContext) -> str:
    """Evaluate, and write the figures to the first rank's result.

    The task holds `checkpoint`, the path and step of one, or null for the weights of `model.init_from`; and
    `samples` of all sources together, null for all of their splits.

    Raises:
        UserError: the data or the checkpoint do not fit the configuration.
    """
    config, task = context.config, read_json(context.run.task)
    device = process_group.local_device(config.launcher.device)
    data = open_validation(config)
    process_group.join(context.world_size, device, config.launcher.collective_timeout_s)
    engine = make_engine(config, device)
    if task["checkpoint"] is None:
        begin(engine, config, lambda *_, **__: None)
    else:
        stored = StoredCheckpoint(Path(task["checkpoint"]), task["step"])
        if config.lora.rank:  # the checkpoint has only the adapters
            begin(engine, config, lambda *_, **__: None)
            require_same_base(config, base_of(config, context.rank), stored.manifest)
        load_weights(engine, stored)
    found = [_evaluate(context, engine, part, task["samples"]) for part in data.valid]
    if context.rank == 0:
        for part, figures in zip(data.valid, found, strict=True):
            known = data.tokenizer
            samples = figures["samples"]
            figures["bytes"] = known and count_bytes(part.loader, samples, known)
        write_json(context.run.result, {"data": data.description, "parts": found})
    process_group.leave()
    return "completed"


def open_validation(config: ResolvedConfig) -> Dataset:
    """Open the data of a configuration, with its held-out samples.

    Raises:
        UserError: it holds out less than a sample's tokens.
    """
    train = replace(config.train, sample_tokens=0)  # a tokenizer is useful, but not needed
    data = open_data(config.data, train, config.model.vocab)
    if data.valid:
        return data
    try:  # without eval_every a too small split was not reported until now
        return open_data(config.data, replace(train, eval_every=1), config.model.vocab)
    except UserError as error:
        violations = [_to_evaluate(it) for it in error.violations]
        raise UserError(error.kind, f"no samples are held out: {error}", violations) from error


def _to_evaluate(wrong: Violation) -> Violation:
    """Return the violation without the advice not to evaluate."""
    ways = tuple(text for text in wrong.suggestions if text != "train.eval_every=0")
    return replace(wrong, suggestions=ways)


def _evaluate(
    context: RankContext, engine: Engine, part: Validation, asked: int | None
) -> dict[str, Any]:
    """Evaluate the samples of one source."""
    loader, config = part.loader, context.config
    wanted = len(loader) if asked is None else samples_of(part, asked)
    samples = loader.evaluated(wanted)
    batches = loader.valid_batches(
        samples, engine.dp_rank, config.parallel.dp, config.train.micro_batch
    )
    count = -(-samples // (config.parallel.dp * config.train.micro_batch))
    began = time.perf_counter()
    loss_sum, tokens = validate(engine, _told(batches, count) if context.rank == 0 else batches)
    return {
        "name": part.name,
        "share": part.share,
        "loss_sum": loss_sum,
        "tokens": tokens,
        "samples": samples,
        "seconds": time.perf_counter() - began,
    }


def load_weights(engine: Engine, stored: StoredCheckpoint) -> None:
    """Load the model's tensors of a checkpoint, without the optimizer's states.

    Raises:
        UserError: it is damaged, or of another model.
    """
    state = engine.state()
    wanted = {name: value for name, value in state.items() if name.startswith(_WEIGHTS)}
    sharded.load_weights(stored, wanted)
    engine.take(state)


def count_bytes(valid: Loader, samples: int, tokenizer: Tokenizer) -> int:
    """Count the bytes of text of the predicted tokens of a split's first samples."""
    targets = (valid.batch([number]).targets[0] for number in range(samples))
    rows = (row[row != IGNORED] for row in targets)
    return sum(len(tokenizer.decode(part).encode()) for part in _parts(rows, tokenizer.eos))


def _parts(rows: Iterable[np.ndarray], end: int) -> Iterator[list[int]]:
    """Yield tokens in chunks, cut at the ends of documents, or at the most tokens."""
    held: list[int] = []
    for row in rows:
        held += row.tolist()
        if len(held) > _DECODED:
            cut = _last(held, end) + 1 or len(held)
            yield held[:cut]
            held = held[cut:]
    yield held


def _last(tokens: list[int], token: int) -> int:
    """Return the last position of a token; -1 if it does not occur."""
    return next((n for n in range(len(tokens) - 1, -1, -1) if tokens[n] == token), -1)


def _told(batches: Iterable[T], count: int) -> Iterator[T]:
    """Yield the batches, and print the progress on standard output."""
    last = 0.0
    for number, batch in enumerate(batches, 1):
        if time.monotonic() - last > _SAID_EVERY_S:
            last = time.monotonic()
            print(f"{number:,} of {count:,} batches", flush=True)
        yield batch
