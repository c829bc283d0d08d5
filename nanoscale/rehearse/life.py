"""The life of one rank in a world that is played: build, load, steps, evaluation, checkpoint, stop, resume."""

from __future__ import annotations

import gc
import pickle
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from nanoscale.backends.base import Engine, StepResult
from nanoscale.backends.native import NativeEngine
from nanoscale.checkpoint.flat import FlatShard
from nanoscale.checkpoint.sharded import Description, describe
from nanoscale.config.layout import coordinates
from nanoscale.config.optimizers import rule_of
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.parallel.kernel_choice import set_kernels
from nanoscale.rehearse import findings
from nanoscale.rehearse.played import kernels
from nanoscale.rehearse.played.allocator import MemoryHistory
from nanoscale.rehearse.played.cuda import Gpu
from nanoscale.rehearse.played.record import RankRecord
from nanoscale.rehearse.played.world import World, identity, played
from nanoscale.rehearse.rehearsed_job import Disk, EqualSamples, ignore, shortened, training_of
from nanoscale.runs.rank_context import StopFlag
from nanoscale.train.agreement import Agreement
from nanoscale.train.job import load_initial_weights
from nanoscale.train.loop import Training

_POINTS = 1500
"""Points of a timeline."""


def play(
    config: ResolvedConfig, rank: int, steps: int, gpu: Gpu | None, snapshot: Path | None = None
) -> RankRecord:
    """Live through one rank of a job; an error of the code is in the record.

    Args:
        snapshot: the file to write for the history of the GPU's memory.
    """
    record, began = RankRecord(rank), time.process_time()
    try:
        with world_of(config, rank, gpu) as world:
            if snapshot is not None:
                world.history = MemoryHistory(world.allocator)
            try:
                _live(config, world, steps, record)
            finally:
                _write_down(world, record)
                if snapshot is not None and world.history is not None:
                    snapshot.write_bytes(pickle.dumps(world.history.snapshot()))
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
        if rule_of(config.optimizer).compiled and gpu is not None:
            kernels.update_in_place(world.patches)
        yield world


def build(config: ResolvedConfig, world: World) -> NativeEngine:
    """Build the engine of the rank, and watch its phases."""
    world.built = False
    engine = NativeEngine(config, world.device)
    world.built, world.section = True, "between steps"
    _watch(engine, world)
    return engine


def _live(config: ResolvedConfig, world: World, steps: int, record: RankRecord) -> None:
    config, disk = shortened(config, steps), Disk()
    disk.patch(world.patches, lambda: world.part("checkpoint thread"))
    _train(config, world, record)
    if disk.tensors is not None:
        gc.collect()  # what has been trained is in circles of references
        with world.part("build"):
            engine = build(config, world)
        with world.part("resume"):
            record.findings += findings.of_resuming(disk.tensors, resume(engine))


def _train(config: ResolvedConfig, world: World, record: RankRecord) -> None:
    engine = build(config, world)
    record.findings += findings.of_optimizer(engine)
    record.notes += findings.of_shards(engine)
    with world.part("load"):
        load_initial_weights(engine, config, ignore)
    training, samples = training_of(config, engine, record.rank)
    _name_parts(training, samples, world, record)
    training.run(Agreement(StopFlag()))
    record.findings += findings.of_gradients(engine) + findings.of_growth(record.after)
    with world.part("checkpoint"):
        record.checkpoint = _checkpointed(engine.state())


def resume(engine: Engine) -> Description:
    """Resume in a new engine from a checkpoint without numbers; return the tensors that it needs."""
    state = engine.empty_state()
    engine.load_state(state)
    if engine.config.lora.rank:  # the checkpoint has only the adapters
        load_initial_weights(engine, engine.config, ignore)
    return describe(state)


def _name_parts(
    training: Training, samples: EqualSamples, world: World, record: RankRecord
) -> None:
    """Name the part of the life that each step of the loop is."""

    def advance(plain: Callable[[], StepResult]) -> StepResult:
        step, previous = training.progress.step + 1, training.last
        world.keeps_timeline = step == training.config.train.steps
        with world.part(f"step {step}"), _played_batches(samples, world, training.engine):
            result = plain()
        world.keeps_timeline = False
        world.forget_expired()
        # the loop holds the previous result until this one is returned
        record.after.append(world.live - _held_by(previous, world))
        return result

    loop: Any = training
    loop.advance = partial(advance, training.advance)
    for name, part in (("log", "log"), ("evaluate", "evaluation"), ("save", "checkpoint")):
        setattr(loop, name, _within(world, part, getattr(loop, name)))


def _held_by(result: StepResult | None, world: World) -> int:
    """Return the bytes of a step's result on the device."""
    if result is None:
        return 0
    values = (result.loss_sum, result.grad_norm, result.tokens)
    return sum(world.bytes_of(value) for value in values if isinstance(value, Tensor))


def _within(world: World, part: str, act: Callable[..., Any]) -> Callable[..., Any]:
    def within(*args: Any, **options: Any) -> Any:
        with world.part(part):
            return act(*args, **options)

    return within


@contextmanager
def _played_batches(samples: EqualSamples, world: World, engine: Engine) -> Iterator[None]:
    """Play of a step's micro batches the first, one for all in the middle, and the last.

    A pipeline runs several at once, so all of its micro batches are played.
    """
    whole = samples.batches
    if engine.config.parallel.pp > 1 or len(whole) <= 3:
        yield
        return
    (part,) = engine.stages.values()
    repeats = iter([1, len(whole) - 2, 1])
    hook = part.register_forward_pre_hook(lambda *_: setattr(world, "repeat", next(repeats)))
    samples.batches = whole[:3]
    try:
        yield
    finally:
        hook.remove()
        samples.batches, world.repeat = whole, 1


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
