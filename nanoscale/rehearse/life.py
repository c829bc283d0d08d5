"""The life of one rank in a world that is played: build, steps, evaluation, what a checkpoint holds, stop."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from nanoscale.backends.native import NativeEngine
from nanoscale.checkpoint.flat import FlatShard
from nanoscale.config.layout import coordinates
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.data.batch import Batch
from nanoscale.parallel.kernel_choice import set_kernels
from nanoscale.rehearse import findings
from nanoscale.rehearse.played import kernels
from nanoscale.rehearse.played.cuda import Gpu
from nanoscale.rehearse.played.record import RankRecord
from nanoscale.rehearse.played.world import World, identity, played

_POINTS = 1500
"""Points of a timeline."""


def play(config: ResolvedConfig, rank: int, steps: int, gpu: Gpu | None) -> RankRecord:
    """Live through one rank of a job; an error of the code is in the record."""
    record, began = RankRecord(rank), time.process_time()
    try:
        with world_of(config, rank, gpu) as world:
            try:
                _live(config, world, steps, record)
            finally:
                _write_down(world, record)
    except Exception:
        record.error = traceback.format_exc()
    record.seconds = time.process_time() - began
    return record


@contextmanager
def world_of(config: ResolvedConfig, rank: int, gpu: Gpu | None) -> Iterator[World]:
    """Be one rank of a job, on a GPU or, with None, on a CPU."""
    devices = gpu.devices if gpu is not None else config.world_size
    device = torch.device("cpu") if gpu is None else torch.device("cuda", rank % devices)
    parallel, at = config.parallel, coordinates(rank, config.parallel)
    experts = (at.dp * parallel.cp + at.cp) % parallel.ep, parallel.ep
    with identity(rank, config.world_size, devices), played(device, gpu, experts) as world:
        set_kernels(config)
        if config.optimizer.name == "adamw8bit" and gpu is not None:
            kernels.update_in_place(world.patches)
        yield world


def build(config: ResolvedConfig, world: World) -> NativeEngine:
    """Build the engine of the rank, and watch its phases."""
    engine = NativeEngine(config, world.device)
    world.built, world.section = True, "between steps"
    _watch(engine, world)
    return engine


def _live(config: ResolvedConfig, world: World, steps: int, record: RankRecord) -> None:
    engine = build(config, world)
    record.findings += findings.of_optimizer(engine)
    record.notes += findings.of_shards(engine)
    for step in range(1, steps + 1):
        world.keeps_timeline = step == steps
        with world.part(f"step {step}"), _played_batches(config, world, engine) as batches:
            engine.train_step(batches, config.optimizer.lr)
        world.keeps_timeline = False
        world.forget_expired()
        record.after.append(world.live)
    record.findings += findings.of_gradients(engine) + findings.of_growth(record.after)
    if config.train.eval_every:
        with world.part("evaluation"):
            engine.evaluate([(micro_batches(config)[0], config.train.micro_batch)])
    with world.part("checkpoint"):
        record.checkpoint = _checkpointed(engine.state())


@contextmanager
def _played_batches(
    config: ResolvedConfig, world: World, engine: NativeEngine
) -> Iterator[list[Batch]]:
    """Provide the micro batches of a step: the first, one for all in the middle, and the last.

    A pipeline runs several at once, so all of its micro batches are played.
    """
    whole = micro_batches(config)
    if config.parallel.pp > 1 or len(whole) <= 3:
        yield whole
        return
    (part,) = engine.stages.values()
    repeats = iter([1, len(whole) - 2, 1])
    hook = part.register_forward_pre_hook(lambda *_: setattr(world, "repeat", next(repeats)))
    try:
        yield whole[:3]
    finally:
        hook.remove()
        world.repeat = 1


def micro_batches(config: ResolvedConfig) -> list[Batch]:
    """Return the micro batches of a step, of token 0."""
    rows = np.zeros((config.train.micro_batch, config.train.seq_len + 1), dtype=np.int64)
    one = Batch.of_rows(rows)
    if config.data.document_mask:
        one = Batch(one.inputs, one.targets, np.zeros_like(one.inputs))
    return [one] * config.accumulation


def _watch(engine: NativeEngine, world: World) -> None:
    """Tell the world when the update begins and ends, which block runs, and what its tensors are for."""
    optimizer = engine._torch_optimizer()

    def before(*_: Any) -> None:
        world.updating = True
        _name_tensors(optimizer, world)

    def after(*_: Any) -> None:
        _name_tensors(optimizer, world)
        world.updating = False

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    for part in engine.stages.values():
        part.register_forward_pre_hook(lambda *_: _name_tensors(optimizer, world))
        for number, block in part.layers.items():
            block.register_forward_pre_hook(_setting(world, f"layers.{number}"))


def _setting(world: World, name: str) -> Callable[..., None]:
    def set_block(*_: Any) -> None:
        world.block = name

    return set_block


def _name_tensors(optimizer: torch.optim.Optimizer, world: World) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            _name(parameter, "weights", world)
            if parameter.grad is not None:
                _name(parameter.grad, "gradients", world)
            for moment in optimizer.state.get(parameter, {}).values():
                if isinstance(moment, Tensor):
                    _name(moment, "optimizer", world)


def _name(tensor: Tensor, kind: str, world: World) -> None:
    for part in _parts(tensor):
        world.is_of_kind(part, kind)


def _parts(tensor: Any) -> list[Tensor]:
    """Return the plain tensors of this rank that make up a tensor."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    if hasattr(tensor, "__tensor_flatten__") and type(tensor).__name__ != "FakeTensor":
        return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [tensor]


def _checkpointed(state: dict[str, Tensor]) -> dict[str, int]:
    sizes = [_bytes(value) for value in state.values()]
    return {"tensors": len(sizes), "bytes": sum(sizes)}


def _bytes(value: Tensor) -> int:
    if isinstance(value, FlatShard):
        return value.count * value.dtype.itemsize
    return sum(part.nbytes for part in _parts(value))


def _write_down(world: World, record: RankRecord) -> None:
    record.groups, record.calls = world.groups, world.calls
    record.waits, record.phases = world.recorded_waits(), world.phases
    record.reserved = world.allocator.reserved
    record.host_peak = world.host_peak
    record.timeline = _thinned(world.timeline)


def _thinned(values: list[int]) -> list[int]:
    """Return at most _POINTS values: the largest of each stretch."""
    size = -(-len(values) // _POINTS)
    return [max(values[at : at + size]) for at in range(0, len(values), size)] if size else []
