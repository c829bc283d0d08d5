"""Rehearsals as the launcher starts them: the process that plays ranks, and the cache. Torch-free."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

import nanoscale
from nanoscale.common.cache_folder import cache_path
from nanoscale.common.devices import cores
from nanoscale.common.errors import UserError
from nanoscale.config.composing.frozen import dump
from nanoscale.config.hardware.data_sheets import UnknownHardwareError
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Config
from nanoscale.rehearse.kinds import distinct_ranks
from nanoscale.rehearse.played.record import RankRecord
from nanoscale.rehearse.tasks import Task, device_of, record_file
from nanoscale.runs.directory import read_json, write_json

STEPS = 2
"""The steps of a rehearsal: the first one makes the optimizer's states."""
_BLOCK_S = 0.04
"""Seconds of processor time to play a block's forward and backward pass, measured with Llama 8B and 70B."""
_SHARE = 0.8
"""The share of this machine's free memory that ranks may use."""
_END_S = 10.0


def digest(config: Config, gpu: dict[str, Any] | None, ranks: list[int], steps: int) -> str:
    """Return the name of a rehearsal in the cache: equal for equal configurations and equal code."""
    names = [json.dumps([_shaping(config), gpu, ranks, steps], sort_keys=True), sys.version]
    names.append(importlib.metadata.version("torch"))
    found = hashlib.blake2b("\n".join(names).encode(), digest_size=16)
    for file in sorted(Path(nanoscale.__file__).parent.rglob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()


def _shaping(config: Config) -> dict[str, Any]:
    """Return the values that decide what ranks do; others decide numbers, places or times."""
    train, data, checkpoint = config.train, config.data, config.checkpoint
    saves = checkpoint.every > 0 or bool(checkpoint.every_minutes)
    optimizer = config.optimizer
    zeros = optimizer.momentum, optimizer.weight_decay  # what an update leaves out if they are 0
    sections = ("model", "parallel", "precision", "zero", "backend", "lora")
    return {
        **{name: asdict(getattr(config, name)) for name in sections},
        "optimizer": [optimizer.name, optimizer.clip_norm, *map(bool, zeros)],
        "train": [train.global_batch, train.micro_batch, train.seq_len, train.eval_every > 0],
        "data": [data.document_mask, data.packing, data.loss_on],
        "checkpoint": [
            *(saves, checkpoint.asynchronous, checkpoint.at_end, bool(checkpoint.keep_best)),
        ],
        "device": config.launcher.device,
    }


def cached(name: str) -> Path:
    """Return the file of a rehearsal in the cache."""
    return cache_path(None) / "rehearsals" / f"{name}.json"


def known(name: str) -> dict[str, Any] | None:
    """Return the document of a rehearsal in the cache; None if there is none."""
    with suppress(OSError, ValueError):
        document: dict[str, Any] = read_json(cached(name))
        return document
    return None


def known_of(config: ResolvedConfig) -> dict[str, Any] | None:
    """Return the document of the present code's rehearsal of a job on its hardware; None if there is none."""
    try:
        gpu, _ = device_of(config)
    except UnknownHardwareError:
        return None
    return known(digest(config, gpu, sorted(distinct_ranks(config)), STEPS))


def estimated_seconds(config: ResolvedConfig) -> float:
    """Return about how long the rehearsal of a job takes on this machine, for its longest ranks."""
    layout, kinds = config.parallel, len(distinct_ranks(config))
    # Without a pipeline, the micro batches in the middle of a step are played once.
    micro_batches = config.accumulation if layout.pp > 1 else min(3, config.accumulation)
    passes = STEPS * micro_batches * config.model.layers / layout.pp
    return _BLOCK_S * passes * -(-kinds // cores())


def keep(name: str, document: dict[str, Any]) -> None:
    """Write the document of a rehearsal into the cache; errors of a full or read-only disk are ignored."""
    with suppress(OSError):
        cached(name).parent.mkdir(parents=True, exist_ok=True)
        write_json(cached(name), document)


def rehearse(
    config: Config,
    gpu: dict[str, Any] | None,
    ranks: list[int],
    steps: int,
    progress: Callable[[str], None],
    snapshots: Path | None = None,
) -> list[RankRecord]:
    """Play ranks in processes of their own, and return their records in this order.

    Args:
        snapshots: the folder for the history of each rank's GPU.

    Raises:
        UserError: the process that plays them could not do so.
    """
    with tempfile.TemporaryDirectory(prefix="nanoscale-rehearse-") as name:
        folder = Path(name)
        (folder / "config.yaml").write_text(dump(config), encoding="utf-8")
        free = int(_SHARE * psutil.virtual_memory().available)
        Task(ranks, steps, gpu, min(cores(), len(ranks)), free, snapshots is not None).write(folder)
        progress("loading torch …")
        with _process(folder) as process:
            assert process.stdout is not None
            for number, _ in enumerate(process.stdout, 1):
                progress(f"{number} of {len(ranks)} ranks rehearsed …")
            code = process.wait()
        if code != 0:
            lines = (
                (folder / "errors")
                .read_text(encoding="utf-8", errors="replace")
                .strip()
                .splitlines()
            )
            raise UserError(
                "rehearse", f"the rehearsal itself failed: {lines[-1] if lines else code}"
            )
        if snapshots is not None:
            snapshots.mkdir(exist_ok=True)
            for file in folder.glob("*.pickle"):
                shutil.move(file, snapshots / file.name)
        return [RankRecord.of_json(read_json(record_file(folder, rank))) for rank in ranks]


@contextmanager
def _process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start the process that plays ranks, in a group of its own; none of the group outlives the block."""
    command = [sys.executable, "-m", "nanoscale.rehearse", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with (folder / "errors").open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            encoding="utf-8",
            env=environment,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
