"""The life of one rank in a simulated world: build, load, steps, evaluation, checkpoint, stop, resume."""

import gc
import pickle
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from nanoscale.backends.base import Engine, StepResult
from nanoscale.backends.native import NativeEngine
from nanoscale.backends.optimizer import plain_tensors
from nanoscale.checkpoint.flat import FlatShard
from nanoscale.checkpoint.sharded import Description, describe
from nanoscale.config.layout import coordinates
from nanoscale.config.optimizers import rule_of
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.data.samples import AnswerSamples
from nanoscale.parallel.kernel_choice import set_kernels
from nanoscale.rehearse.kinds import repeated_batches
from nanoscale.rehearse.played import compiled, cuda
from nanoscale.rehearse.played.allocator import MemoryHistory
from nanoscale.rehearse.played.collectives import identity
from nanoscale.rehearse.played.cuda import Gpu
from nanoscale.rehearse.played.device_memory import TensorKind
from nanoscale.rehearse.played.record import PLAYED_BATCHES, RankRecord, Wait, is_own
from nanoscale.rehearse.played.repeats import Repeats
from nanoscale.rehearse.played.world import World, played
from nanoscale.rehearse.rehearsed_job import Disk, EqualSamples, ignore, shortened, training_of
from nanoscale.runs.rank_context import StopFlag
from nanoscale.train import teacher
from nanoscale.train.agreement import Agreement
from nanoscale.train.checkpointing import make_callbacks
from nanoscale.train.job import load_initial_weights
from nanoscale.train.loop import Training

_POINTS = 1500
"""The most points of a timeline."""


def play(
    config: ResolvedConfig,
    rank: int,
    steps: int,
    gpu: Gpu | None,
    snapshot: Path | None = None,
    *,
    every_batch: bool = False,
) -> RankRecord:
    """Return the record of one rank of a job, which also holds an error of the code.

    Args:
        snapshot: the file to write with the history of the GPU's memory, for which no pass of a pipeline is
            repeated.
        every_batch: play all micro batches of a step.
    """
    record, began = RankRecord(rank), time.process_time()
    try:
        with world_of(config, record, gpu) as world:
            if snapshot is not None:
                world.history = MemoryHistory(world.allocator)
                every_batch |= config.parallel.pp > 1
            record.repeated = 0 if every_batch else repeated_batches(config)
            if record.repeated and config.parallel.pp > 1:
                Repeats(world).patch()
            try:
                _live(config, world, steps)
            finally:
                record.waits = [Wait(*key, times) for key, times in world.waits.items()]
                record.reserved = world.allocator.reserved
                record.timeline = _thinned(record.timeline)
                if snapshot is not None and world.history is not None:
                    snapshot.write_bytes(pickle.dumps(world.history.snapshot()))
    except Exception as error:
        record.error = told(error)
    record.seconds = time.process_time() - began
    return record


def told(error: BaseException) -> str:
    """Return an exception and its causes, with nanoscale's own frames and the innermost."""
    whole = cause = traceback.TracebackException.from_exception(error)
    while cause is not None:
        outer = [frame for frame in cause.stack[:-1] if is_own(frame.filename)]
        cause.stack = traceback.StackSummary.from_list([*outer, *cause.stack[-1:]])
        cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
    return "".join(whole.format())


@contextmanager
def world_of(config: ResolvedConfig, record: RankRecord, gpu: Gpu | None) -> Iterator[World]:
    """Run as the record's rank of a job until the `with` block ends, on a CPU if `gpu` is None."""
    devices = gpu.devices if gpu is not None else config.world_size
    device = torch.device("cpu") if gpu is None else torch.device("cuda", record.rank % devices)
    parallel, own = config.parallel, coordinates(record.rank, config.parallel)
    columns = parallel.tp // parallel.expert_tp  # ranks of tp that belong to ep
    place = (own.dp * parallel.cp + own.cp) * columns + own.tp % columns
    experts = place % parallel.ep, parallel.ep
    with identity(record.rank, config, devices), played(device, gpu, experts, record) as world:
        set_kernels(config)
        if rule_of(config.optimizer).quantized and gpu is not None:
            cuda.update_in_place(world.patches)
        yield world


def build(config: ResolvedConfig, world: World) -> NativeEngine:
    """Build the engine of the rank, with hooks that report its phases to the world."""
    engine = NativeEngine(config, world.device)
    world.section = "between steps"
    _watch(engine, world)
    return engine


def _live(config: ResolvedConfig, world: World, steps: int) -> None:
    config, disk = shortened(config, steps), Disk()
    disk.patch(world.patches, lambda: world.during("checkpoint thread"))
    _train(config, world)
    if disk.tensors is not None:
        gc.collect()  # frees the trained engine, whose objects refer to each other
        with world.during("build"):
            engine = build(config, world)
        with world.during("resume"):
            world.record.findings += of_resuming(disk.tensors, resume(engine))


def _train(config: ResolvedConfig, world: World) -> None:
    engine, record = build(config, world), world.record
    record.findings += of_optimizer(engine)
    record.notes += of_shards(engine)
    with world.during("load"):
        load_initial_weights(engine, config, ignore)
    training, samples = training_of(config, engine, record.rank)
    run = Path(world.patches.enter_context(TemporaryDirectory(prefix="nanoscale-rehearse-")))
    # Set after the writer of checkpoints is made, which has no checkpoint for `on_checkpoint`.
    training.callbacks = make_callbacks(config, run, record.rank, engine)
    if config.train.needs_reference:
        with world.during("reference"):
            teacher._likelihoods(engine, cast(AnswerSamples, samples))
    _watch_loop(training, samples, world)
    training.run(Agreement(StopFlag()))
    record.compiler += compiled.breaks()
    record.kernels = compiled.machine_code(world.kernels)
    record.findings += of_gradients(engine) + of_growth(record.after)
    record.notes += of_filled(engine)
    record.findings += of_growth(record.host_after, "in host memory")
    with world.during("checkpoint"):
        sizes = [_bytes(value) for value in engine.state().values()]
        record.checkpoint = {"tensors": len(sizes), "bytes": sum(sizes)}


def resume(engine: Engine) -> Description:
    """Resume in a new engine from a checkpoint without numbers; return the tensors that it needs."""
    if engine.config.lora.rank:  # the checkpoint has only the adapters
        load_initial_weights(engine, engine.config, ignore)
    state = engine.empty_state()
    engine.load_state(state)
    return describe(state)


def _watch_loop(training: Training, samples: EqualSamples, world: World) -> None:
    """Report the sections of the training loop to the world: its steps, logs, evaluations and checkpoints."""

    def advance(plain: Callable[[], StepResult]) -> StepResult:
        step, previous = training.progress.step + 1, training.last
        world.record.operations = 0
        timed = world.timed() if step == training.config.train.steps else nullcontext()
        compiled.recompilations(step)
        with world.during(f"step {step}"), _played_batches(samples, world, training.engine), timed:
            result = plain()
        world.record.compiler += compiled.recompilations(step)
        world.forget_expired()
        # The loop holds the previous result until this one is returned.
        values = (
            () if previous is None else (previous.loss_sum, previous.grad_norm, previous.tokens)
        )
        held = sum(world.bytes_of(value) for value in values if isinstance(value, Tensor))
        world.record.after.append(world.live - held)
        world.record.host_after.append(world.host_live)
        return result

    def within(section: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with world.during(section):
                return act(*args, **options)

        return call

    loop: Any = training
    loop.advance = partial(advance, training.advance)
    loop.log = within("log", training.log)
    loop.evaluator.evaluate = within("evaluation", training.evaluator.evaluate)
    loop.save = within("checkpoint", training.save)


@contextmanager
def _played_batches(samples: EqualSamples, world: World, engine: Engine) -> Iterator[None]:
    """Play PLAYED_BATCHES of a step: the first, one that stands for all in the middle, and the last.

    A pipeline stage holds several micro batches at once, which `played.repeats` handles.
    """
    batches, repeated = samples.batches, world.record.repeated
    if engine.config.parallel.pp > 1 or not repeated:
        yield
        return
    (stage,) = engine.stages.values()
    repeats = iter([1, repeated + 1, 1])
    hook = stage.register_forward_pre_hook(lambda *_: world.begin_batch(next(repeats)))
    samples.batches = batches[:PLAYED_BATCHES]
    try:
        yield
    finally:
        hook.remove()
        samples.batches, world.repeat = batches, 1


def _watch(engine: NativeEngine, world: World) -> None:
    """Report to the world when the update begins and ends, which block runs, and the kinds of tensors."""
    optimizer = engine._torch_optimizer()

    def before(*_: Any) -> None:
        world.updating = True
        _set_kinds(optimizer, world)

    def after(*_: Any) -> None:
        _set_kinds(optimizer, world)
        world.updating = False

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    for stage in engine.stages.values():
        stage.register_forward_pre_hook(lambda *_: _set_kinds(optimizer, world))
        for number, block in stage.layers.items():
            name = f"layers.{number}"
            block.register_forward_pre_hook(lambda *_, name=name: world.begin_block(name))


def _set_kinds(optimizer: torch.optim.Optimizer, world: World) -> None:
    """Set the kinds of the parameters, their gradients and their optimizer states."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            kinds = [(parameter, TensorKind.WEIGHTS), (parameter.grad, TensorKind.GRADIENTS)]
            states = optimizer.state.get(parameter, {}).values()
            for tensor, kind in [*kinds, *((state, TensorKind.OPTIMIZER) for state in states)]:
                if isinstance(tensor, Tensor):
                    for plain in _plain_tensors(tensor):
                        world.set_kind(plain.untyped_storage()._cdata, kind)


def _plain_tensors(tensor: Any) -> list[Tensor]:
    """Return the plain tensors of this rank that a DTensor or a tensor of another class consists of."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    return [tensor] if type(tensor).__name__ == "FakeTensor" else plain_tensors(tensor)


def _bytes(value: Tensor) -> int:
    if isinstance(value, FlatShard):
        return value.count * value.dtype.itemsize
    return sum(plain.nbytes for plain in _plain_tensors(value))


def _thinned(values: list[int]) -> list[int]:
    """Return the maxima of at most _POINTS intervals of equal length."""
    size = -(-len(values) // _POINTS)
    return [max(values[at : at + size]) for at in range(0, len(values), size)] if size else []


_SHOWN = 3


def of_optimizer(engine: NativeEngine) -> list[str]:
    """Report trained parameters that no optimizer updates."""
    groups = engine._torch_optimizer().param_groups
    updated = {id(parameter) for group in groups for parameter in group["params"]}
    left = [name for name, p in engine.parameters() if id(p) not in updated]
    return [f"no optimizer updates {_shown(left)}"] if left else []


def of_gradients(engine: NativeEngine) -> list[str]:
    """Report parameters that keep their gradients after a step."""
    kept = [name for name, p in engine.parameters() if p.grad is not None]
    return [f"gradients are kept after the step: {_shown(kept)}"] if kept else []


def of_filled(engine: NativeEngine) -> list[str]:
    """Report parameters whose gradients are zeros in place of missing ones."""
    filled = {id(parameter) for parameter in engine.filled}
    names = [name for name, p in engine.parameters() if id(p) in filled]
    return [f"no gradient reaches {_shown(names)}: zeros are taken"] if names else []


def of_growth(after: list[int], where: str = "on the device") -> list[str]:
    """Report memory that grows with the last step. The first step makes the optimizer's states."""
    if len(after) < 2 or after[-1] <= after[-2]:
        return []
    more = after[-1] - after[-2]
    return [f"a step leaves {more:,} bytes more than it found {where}: memory leaks"]


def of_resuming(written: Description, needed: Description) -> list[str]:
    """Report tensors that differ between a checkpoint and what a resumed run needs."""
    other = [name for name in sorted({*written, *needed}) if written.get(name) != needed.get(name)]
    return [f"a checkpoint cannot be resumed from: {_shown(other)}"] if other else []


def of_shards(engine: NativeEngine) -> list[str]:
    """Report parameters whose rows do not divide evenly among the ranks that shard them."""
    uneven = []
    for name, parameter in engine.parameters():
        if isinstance(parameter, DTensor):
            size, mesh = parameter.shape, parameter.device_mesh.shape
            for ranks, placement in zip(mesh, parameter.placements, strict=True):
                if isinstance(placement, Shard) and size[placement.dim] % ranks:
                    uneven.append(f"{name} ({size[placement.dim]} rows over {ranks} ranks)")
    return [f"uneven shards, so some ranks hold more: {_shown(uneven)}"] if uneven else []


def _shown(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
