"""Evaluation of a checkpoint on validation data: the job of `nanoscale eval`, which changes nothing."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from nanoscale.backends.base import Engine
from nanoscale.checkpoint.hf.adapters import require_same_base
from nanoscale.checkpoint.store import StoredCheckpoint
from nanoscale.common.errors import UserError
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.values.hooks import function
from nanoscale.data.batch import IGNORED
from nanoscale.data.dataset import Dataset, Validation, open_data
from nanoscale.data.loader import Loader
from nanoscale.data.tokens.tokenizer import Tokenizer
from nanoscale.parallel import process_group
from nanoscale.runs.directory import RunDirectory, read_json, write_json
from nanoscale.runs.rank_context import RankContext
from nanoscale.train.evaluations import validate
from nanoscale.train.job import base_fingerprint, load_initial_weights, load_weights, make_engine
from nanoscale.train.teacher import set_references

T = TypeVar("T")
_PRINT_EVERY_S = 1.0
_DECODE_TOKENS = 1 << 16
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
    data.require_counted(task["samples"], "--samples ")
    timeout_s = config.launcher.collective_timeout_s
    process_group.join(context.world_size, device, timeout_s, even_alone=config.offloads)
    engine = make_engine(config, device)
    references, step = context.run.references, 0
    if task["checkpoint"] is None:
        load_initial_weights(engine, config, lambda *_, **__: None)
    else:
        stored = StoredCheckpoint(Path(task["checkpoint"]), task["step"])
        if config.lora.rank:  # the checkpoint has only the adapters
            load_initial_weights(engine, config, lambda *_, **__: None)
            require_same_base(config, base_fingerprint(config), stored.manifest)
        load_weights(engine, stored)
        references, step = RunDirectory(stored.path.parents[1]).references, stored.step
    set_references(references, engine, data, step, lambda *_, **__: None)
    results = [_evaluate(context, engine, split, task["samples"]) for split in data.valid]
    if context.rank == 0:
        for split, figures in zip(data.valid, results, strict=True):
            tokenizer = None if config.train.has_whole_documents else data.tokenizer
            samples = figures["samples"]
            figures["bytes"] = tokenizer and count_bytes(split.loader, samples, tokenizer)
        write_json(context.run.result, {"data": data.description, "parts": results})
    process_group.leave()
    return "completed"


def open_validation(config: ResolvedConfig) -> Dataset:
    """Open the data of a configuration, with its held-out samples.

    Raises:
        UserError: it holds out less than a sample's tokens.
    """
    train = replace(config.train, sample_tokens=0)  # a tokenizer is useful, but not needed
    own = function(config, "data")
    data = open_data(config.data, train, config.model.vocab, own)
    if data.valid:
        return data
    try:  # without eval_every a too small split was not reported until now
        return open_data(config.data, replace(train, eval_every=1), config.model.vocab, own)
    except UserError as error:
        needless = "train.eval_every=0"
        violations = [
            replace(it, suggestions=tuple(text for text in it.suggestions if text != needless))
            for it in error.violations
        ]
        raise UserError(error.kind, f"no samples are held out: {error}", violations) from error


def _evaluate(
    context: RankContext, engine: Engine, split: Validation, requested: int | None
) -> dict[str, Any]:
    """Evaluate the samples of one source."""
    config, samples = context.config, split.samples_of(requested)
    batches = split.loader.valid_batches(
        samples, engine.coordinates.dp, config.parallel.dp, config.train.micro_batch
    )
    count = -(-samples // (config.parallel.dp * config.train.micro_batch))
    start = time.perf_counter()
    loss_sum, tokens = validate(
        engine, _print_progress(batches, count) if context.rank == 0 else batches
    )
    return {
        "name": split.name,
        "share": split.share,
        "loss_sum": loss_sum,
        "tokens": tokens,
        "samples": samples,
        "seconds": time.perf_counter() - start,
        **engine.preferences(),
    }


def count_bytes(valid: Loader, samples: int, tokenizer: Tokenizer) -> int:
    """Count the bytes of text of the predicted tokens of a split's first samples."""
    targets = (valid.batch([number]).targets[0] for number in range(samples))
    rows = (row[row != IGNORED] for row in targets)
    return sum(
        len(tokenizer.decode(chunk).encode()) for chunk in _document_chunks(rows, tokenizer.eos)
    )


def _document_chunks(rows: Iterable[np.ndarray], eos: int) -> Iterator[list[int]]:
    """Yield tokens in chunks, cut at the ends of documents, or at the most tokens."""
    buffer: list[int] = []
    for row in rows:
        buffer += row.tolist()
        if len(buffer) > _DECODE_TOKENS:
            end = len(buffer) - (buffer[::-1].index(eos) if eos in buffer else 0)
            yield buffer[:end]
            buffer = buffer[end:]
    yield buffer


def _print_progress(batches: Iterable[T], count: int) -> Iterator[T]:
    """Yield the batches, and print the progress on standard output."""
    last_print = 0.0
    for number, batch in enumerate(batches, 1):
        if time.monotonic() - last_print > _PRINT_EVERY_S:
            last_print = time.monotonic()
            print(f"{number:,} of {count:,} batches", flush=True)
        yield batch
