"""The training job of a rank, from joining the process group to leaving it."""

import os
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nanoscale.backends.base import Engine
from nanoscale.backends.native import NativeEngine
from nanoscale.checkpoint import memory_reader, sharded, store
from nanoscale.checkpoint.hf.adapters import require_same_base
from nanoscale.checkpoint.hf.load import fingerprint
from nanoscale.checkpoint.store import StoredCheckpoint
from nanoscale.common.errors import LostPeerError, UserError, Violation
from nanoscale.config.hf.safetensors_headers import BadFileError
from nanoscale.config.model_math import describe_adapters, recomputed_factor
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.values.hooks import function
from nanoscale.data.dataset import Dataset, open_data
from nanoscale.data.loader import Prefetched
from nanoscale.data.parts import Parts
from nanoscale.metrics import waits
from nanoscale.metrics.meter import Meter
from nanoscale.metrics.sinks import open_sinks
from nanoscale.metrics.trackers import Subject
from nanoscale.parallel import process_group
from nanoscale.parallel.kernel_choice import kernels_in_use
from nanoscale.parallel.newest_flash import use_newest_flash
from nanoscale.processes.proc import ranges
from nanoscale.runs import events, fence, lock
from nanoscale.runs.directory import RunDirectory, read_json, write_json
from nanoscale.runs.documents import read_document
from nanoscale.runs.events import Note
from nanoscale.runs.goodput import Tally
from nanoscale.runs.memory_order import read_order as memory_order
from nanoscale.runs.rank_context import RankContext
from nanoscale.train.agreement import Agreement
from nanoscale.train.checkpointing import CheckpointWriter, Progress, make_callbacks
from nanoscale.train.evaluations import Evaluations, sample
from nanoscale.train.loop import Training
from nanoscale.train.non_finite import MOST_STEPS, find_cause, on_ranks
from nanoscale.train.profile import Recorder
from nanoscale.train.stability import ADVICE, LossSpikeError, NonFiniteError, Spikes
from nanoscale.train.teacher import set_references, set_teacher

NOT_REPEATED = (
    "all results of modules were finite when the steps were repeated: a device or its memory has made an "
    "error, or the computation does not repeat exactly"
)
_ROLLBACKS = 3
"""The most times that a run returns to the same checkpoint, with other samples each time."""
_WEIGHTS = ("model.", "balance.")
"""Prefixes of a training's state that the model computes with."""


def run(context: RankContext) -> str:
    """Train one run to its end, or until asked to stop: "completed" or "stopped".

    Raises:
        UserError: the data or the checkpoints do not fit the configuration.
        NonFiniteError: the training has diverged.
        LossSpikeError: the loss has jumped, and `train.on_spike=stop`, or no rollback helps.
        OSError: a checkpoint could not be written.
        FencedError: the run has continued without this rank's attempt.
    """
    config = context.config
    device = process_group.local_device(config.launcher.device)
    data = open_data(config.data, config.train, config.model.vocab, function(config, "data"))
    if config.train.eval_every:
        data.require_counted(config.train.eval_samples, "train.eval_samples=")
    timeout_s = config.launcher.collective_timeout_s
    process_group.join(context.world_size, device, timeout_s, even_alone=config.offloads)
    if device.type == "cpu" and context.world_size > 1:
        waits.measure()
    if context.attempt == 0 and context.rank == 0:  # started by torchrun, which knows no runs
        lock.refuse_if_held(context.run)
        fence.begin(context.run, 0)
    set_teacher(context.run.teacher, config, device, data, make_note(context))
    engine = make_engine(config, device)
    progress = recall(context, engine, data) or restore(context, engine, data)
    save_every_s = 60 * (config.checkpoint.every_minutes or 0)
    agreement = Agreement(context.stop, save_every_s, isinstance(data.train, Parts))
    record_environment(context, device)
    if config.lora.rank:
        make_note(context)("adapters", f"training {describe_adapters(config)}")
    set_references(context.run.references, engine, data, progress.step, make_note(context))
    training = make_training(context, engine, data, progress)
    rollbacks: Counter[int] = Counter()
    while True:
        try:
            outcome = training.run(agreement)
            break
        except BaseException as error:
            training.close_sinks("failed")
            if isinstance(error, NonFiniteError):
                explain(context, training, data, error)
            if not isinstance(error, LossSpikeError) or config.train.on_spike != "rollback":
                raise
            if isinstance(training.samples, Prefetched):
                training.samples.close()
            if (memory := training.checkpoints.memory) is not None:
                memory.forget()
            progress = roll_back(context, training, data, error, rollbacks)
            training = make_training(context, engine, data, progress, training.checkpoints)
    agreement.close()
    training.close_sinks(outcome)
    if outcome == "completed" and config.train.sample_tokens > 0:
        show_sample(training, data)
    training.note("end", outcome, outcome=outcome, step=progress.step)
    process_group.leave()
    return outcome


def make_training(
    context: RankContext,
    engine: Engine,
    data: Dataset,
    progress: Progress,
    before: CheckpointWriter | None = None,
) -> Training:
    """Open the outputs of a training that continues from a state of progress.

    Args:
        before: the writer of checkpoints of the training before a rollback.
    """
    config, device, note = context.config, engine.device, make_note(context)
    subject, plan = Subject(context.run, config, context.workspace, context.attempt), None
    with suppress(OSError, UserError):
        plan = read_document(context.run.plan)
    note("running", f"training from step {progress.step + 1}", data=data.description)
    return Training(
        workspace=context.workspace,
        config=config,
        engine=engine,
        data=data,
        progress=progress,
        rank=context.rank,
        meter=Meter(config, context.world_size, device, recomputed_factor(config, plan)),
        sinks=[] if context.rank else open_sinks(subject, progress.step),
        tally=None if context.rank else Tally(context.run, progress.step),
        note=note,
        recorder=Recorder(context.run.profile, config.profile, context.rank, device, note),
        hosts=process_group.gather(context.host),
        callbacks=make_callbacks(config, context.run.path, context.rank, engine),
        before=before,
    )


def roll_back(
    context: RankContext,
    training: Training,
    data: Dataset,
    spike: LossSpikeError,
    rollbacks: Counter[int],
) -> Progress:
    """Load the newest checkpoint from before a jump of the loss; the samples since then are skipped.

    Checkpoints of the steps that are trained again are deleted. `rollbacks` counts them by the step to which
    they went.

    Raises:
        LossSpikeError: there is no such checkpoint, or the loss has jumped too often after it.
    """
    now, log_every = training.progress, context.config.train.log_every
    stored = process_group.broadcast(lambda: store.list_checkpoints(context.run.checkpoints))
    # The jump began in one of the steps since the last logged loss.
    before = [it for it in stored if it.step <= now.step - log_every]
    if not before:
        raise LossSpikeError(f"{spike}, and there is no checkpoint from before it") from spike
    last = before[-1]
    rollbacks[last.step] += 1
    if rollbacks[last.step] > _ROLLBACKS:
        message = f"{spike}, and the loss has jumped {_ROLLBACKS} times after {last.path.name}"
        raise LossSpikeError(message) from spike
    if context.rank == 0:
        store.delete(context.workspace, [it for it in stored if it.step > last.step])
        store.point_latest(context.workspace, last.path)
    progress = restore(context, training.engine, data)
    first, end = progress.consumed_samples, now.consumed_samples
    progress.consumed_samples = end
    progress.spikes = Spikes(recent=now.spikes.recent)
    make_note(context)(
        "rollback",
        f"{spike}: back to {last.path.name}, and samples {first:,} to {end - 1:,} are skipped",
        step=last.step,
        spike_step=now.step,
        skipped_samples=[first, end],
    )
    return progress


def explain(context: RankContext, training: Training, data: Dataset, error: NonFiniteError) -> None:
    """Add to an error the first result that was not finite, and its ranks. The steps since the last checkpoint
    are repeated to find it.

    Raises:
        LostPeerError: other ranks have caused it.
    """
    config, engine, last_step = context.config, training.engine, training.progress.step
    assert training.last is not None
    is_finite = bool(training.last.loss_sum.isfinite())
    sums = process_group.gather((engine.coordinates.dp, is_finite))
    # Ranks with the same samples share a loss, and the last stage of a pipeline alone knows it.
    wrong = {dp_rank for dp_rank, is_finite in sums if not is_finite}
    ranks = [rank for rank, (dp_rank, _) in enumerate(sums) if dp_rank in wrong]
    samples = f"; the loss is not finite{where}" if ranks and (where := on_ranks(ranks)) else ""
    stored = process_group.broadcast(lambda: store.list_checkpoints(context.run.checkpoints))
    first = stored[-1].step if stored else 0
    # The loss scale of fp16 depends on the steps before, and overflows are usual.
    is_exact = config.precision.compute != "fp16"
    if not isinstance(engine, NativeEngine) or not is_exact or last_step - first > MOST_STEPS:
        error.args = (f"{error}{samples}",)
    else:
        text = f"step {first + 1} to {last_step} once more, to find the first result that is not finite"
        make_note(context)("repeat", text)
        if not stored:
            engine.reinitialize(engine.device)
        training.progress = restore(context, engine, data)
        if cause := find_cause(training, last_step):
            text, ranks = cause
            error.args = (f"{text}. {error}",)
        else:
            figures = str(error).removesuffix(ADVICE)
            error.args = (f"{figures}{samples}; {NOT_REPEATED}",)
    if ranks and context.rank not in ranks:
        raise LostPeerError(f"a peer was lost: {error}") from error


def make_engine(config: ResolvedConfig, device: torch.device) -> Engine:
    use_newest_flash(config, device)
    if config.backend.name == "deepspeed":
        from nanoscale.backends.deepspeed.engine import DeepSpeedEngine

        return DeepSpeedEngine(config, device)
    return NativeEngine(config, device)


def restore(context: RankContext, engine: Engine, data: Dataset) -> Progress:
    """Load the newest complete checkpoint of the run, if it has any.

    Raises:
        UserError: none of them is complete, or they are of another model or other data; or a launcher holds
            the run.
    """
    note = make_note(context)
    if not process_group.broadcast(lambda: store.list_checkpoints(context.run.checkpoints)):
        config = context.config
        if config.run.from_run is None or config.lora.rank:  # else all would be overwritten
            load_initial_weights(engine, config, note)
        base = base_fingerprint(config)
        if config.lora.init_from is not None:
            engine.load_adapters(Path(config.lora.init_from))
            note("loaded", f"adapters read from {config.lora.init_from}")
        if config.run.from_run is not None:
            begin_from(Path(config.run.from_run), engine, config, base, note)
        return Progress(base=base)
    if context.config.lora.rank:  # the checkpoint has only the adapters
        load_initial_weights(engine, context.config, note)
    state = engine.empty_state()
    manifest = sharded.load_newest(context.workspace, state, partial(note, "fallback"))
    assert manifest is not None, "an unreadable one raises"
    engine.load_state(state)
    return resumed(context, manifest, data, f"step-{manifest['step']:08d}")


def recall(context: RankContext, engine: Engine, data: Dataset) -> Progress | None:
    """Load the state in the hosts' memory from which this attempt is to continue; None if there is none."""
    order = memory_order() if context.config.checkpoint.memory_every else None
    if order is None or order.source is None:
        return None
    if context.config.lora.rank:  # the state has only the adapters
        load_initial_weights(engine, context.config, make_note(context))
    state = engine.empty_state()
    manifest = memory_reader.load(order, order.source, state)
    engine.load_state(state)
    return resumed(context, manifest, data, f"step {manifest['step']} in memory")


def resumed(context: RankContext, manifest: dict[str, Any], data: Dataset, where: str) -> Progress:
    """Return the progress of a state that was loaded.

    Raises:
        UserError: it was trained on other data, or on another base model.
    """
    if manifest["data"] != data.fingerprint:
        raise UserError(
            "data",
            f"{where} was trained on other tokens than those of "
            f"{data.description}; a resumed run must continue with the same sources and weights",
        )
    base = None
    if context.config.lora.rank:
        base = base_fingerprint(context.config)
        require_same_base(context.config, base, manifest)
    step, consumed = manifest["step"], manifest["consumed_samples"]
    text = f"resumed from {where}"
    make_note(context)("resumed", text, step=step, consumed_samples=consumed)
    spikes = Spikes(**manifest.get(store.BEFORE_SPIKE, {}))
    return Progress(step, consumed, base, Evaluations.from_manifest(manifest), spikes)


def begin_from(
    folder: Path, engine: Engine, config: ResolvedConfig, base: str | None, note: Note
) -> None:
    """Load the weights of another run, and its optimizer's moments if the configuration says so.

    Raises:
        UserError: the checkpoint is gone, damaged, or of another model or optimizer.
    """
    step = config.run.from_step
    assert step is not None, "the launch has recorded it"
    stored = StoredCheckpoint(RunDirectory(folder).checkpoint(step), step)
    sharded.require_whole(stored)
    if config.lora.rank:
        require_same_base(config, base, stored.manifest)
    if config.run.from_optimizer:
        state = engine.empty_state()
        sharded.load(stored, state)
        engine.load_state(state)
    else:
        load_weights(engine, stored)
    what = "weights and moments" if config.run.from_optimizer else "weights"
    note("begun", f"{what} read from {stored.path}", step=step)


def load_initial_weights(engine: Engine, config: ResolvedConfig, note: Note) -> None:
    """Load the model's initial weights, unless they are random.

    Raises:
        UserError: the folder is missing, or has changed since the launch.
    """
    folder = config.model.init_from
    if folder is None:
        return
    try:
        engine.load_pretrained(Path(folder))
    except BadFileError as error:
        violation = Violation("model.init_from", folder, "", str(error))
        raise UserError("model", f"model.init_from={folder}: {error}", [violation]) from error
    note("loaded", f"weights read from {folder}")


def load_weights(engine: Engine, stored: StoredCheckpoint) -> None:
    """Load the model's tensors of a checkpoint, without the optimizer's states.

    Raises:
        UserError: it is damaged, or of another model.
    """
    state = engine.state()
    weights = {name: value for name, value in state.items() if name.startswith(_WEIGHTS)}
    sharded.load_weights(stored, weights)
    engine.load_state(state)


def base_fingerprint(config: ResolvedConfig) -> str | None:
    """Return, with lora, the fingerprint of the loaded base model of the adapters."""
    folder = config.model.init_from
    if not config.lora.rank or folder is None:
        return None
    return process_group.broadcast(lambda: fingerprint(Path(folder), config.model))


def show_sample(training: Training, data: Dataset) -> None:
    train = training.config.train
    prompt, length = train.sample_prompt, train.sample_tokens
    if data.tokenizer is None or prompt is None:
        return
    with training.engine.averaged():
        text = sample(training.engine, data.tokenizer, prompt, length, train.seq_len, train.seed)
    training.note("sample", "a sample of the trained model", text=text)


def record_environment(context: RankContext, device: torch.device) -> None:
    """Record rank 0's attention kernel and the CPU cores of each rank with a GPU in environment.json."""
    path, cores = context.run.environment, {}
    if device.type == "cuda":
        cores = {"rank_cores": process_group.gather(ranges(os.sched_getaffinity(0)))}
    if context.rank == 0 and path.is_file():
        fence.require(context.workspace)
        kernels = kernels_in_use(context.config, device)
        write_json(path, {**read_json(path), "kernels": kernels, **cores})


def make_note(context: RankContext) -> Note:
    def note(kind: str, message: str, **fields: Any) -> None:
        if context.rank == 0:
            fence.require(context.workspace)
            events.append(context.run, kind, message, **fields)

    return note
