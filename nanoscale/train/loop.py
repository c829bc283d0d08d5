"""The training loop: read it from top to bottom."""

from __future__ import annotations

import gc
import math
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoscale.backends.base import Engine, StepResult
from nanoscale.backends.native import NativeEngine
from nanoscale.checkpoint import configuration, store
from nanoscale.checkpoint.saver import Saved, Saver
from nanoscale.checkpoint.staging import State
from nanoscale.common.errors import UserError
from nanoscale.common.units import duration
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schedulers import lr_factor
from nanoscale.config.training_phases import phase_at
from nanoscale.data.batch import Batch
from nanoscale.data.dataset import Dataset, Validation
from nanoscale.data.loader import Prefetched, SampleSource
from nanoscale.metrics.health import Health
from nanoscale.metrics.meter import Meter, peak_memory_gib
from nanoscale.metrics.sinks import Sink
from nanoscale.metrics.trace import DATA, STEP
from nanoscale.parallel import process_group
from nanoscale.runs import fence, jsonlines
from nanoscale.runs.directory import RunDirectory, checkpoint_path
from nanoscale.runs.metrics import RISING
from nanoscale.runs.position import NOW
from nanoscale.train.agreement import Agreement
from nanoscale.train.callbacks import Callbacks
from nanoscale.train.evaluations import Evaluations
from nanoscale.train.guard import require_equal_replicas
from nanoscale.train.layer_statistics import LayerStatistics
from nanoscale.train.profile import Recorder
from nanoscale.train.stability import LossSpikeError, Spikes, require_finite
from nanoscale.train.stragglers import Stragglers
from nanoscale.train.task_scores import TaskScores

Write = Callable[[State, dict[str, Any]], Saved | None]
"""A function that writes a state, or begins to; it returns a checkpoint that is complete by then."""
Note = Callable[..., None]
"""A function that records an event of the run, from rank 0 only: `note(kind, message, **fields)`."""


@dataclass
class Progress:
    """The progress of the training: the state to resume from, besides tensors."""

    step: int = 0
    consumed_samples: int = 0
    base: str | None = None
    """The fingerprint of the frozen weights with lora, which no checkpoint holds."""
    evaluations: Evaluations = field(default_factory=Evaluations)
    spikes: Spikes = field(default_factory=Spikes)


@dataclass
class Training:
    """One rank's view of a run while it trains."""

    workspace: Path
    config: ResolvedConfig
    engine: Engine
    data: Dataset
    progress: Progress
    rank: int
    meter: Meter
    sinks: list[Sink]
    note: Note
    recorder: Recorder = field(default_factory=Recorder.disabled)
    hosts: Sequence[str] = ()
    """The host of each rank; empty: late ranks are not looked for."""
    callbacks: Callbacks = field(default_factory=Callbacks)

    def __post_init__(self) -> None:
        on_gpu = self.engine.device.type == "cuda"
        self.samples: SampleSource = Prefetched(self.data.train) if on_gpu else self.data.train
        self.saved_step = self.compared_step = self.progress.step
        self.last: StepResult | None = None
        self.logged: dict[str, Any] | None = None
        self.samples_since_log = 0
        self.statistics: LayerStatistics | None = None
        if self.config.train.statistics_every:
            assert isinstance(self.engine, NativeEngine), "the rules refuse the others"
            self.statistics = LayerStatistics(self.engine)
        self.saver = Saver(self.workspace, self.config.checkpoint, self.rank)
        self.engine.before_update(self.saver.hold)
        peers = len(self.hosts) // self.config.parallel.pp
        stages = [range(first, first + peers) for first in range(0, len(self.hosts), max(1, peers))]
        self.tasks: TaskScores | None = None
        if self.config.train.eval_tasks:
            self.tasks = TaskScores(self.engine, self.config)
        self.stragglers = Stragglers(stages, self.hosts)
        self.health = Health(self.engine.device.index if on_gpu else None)

    def run(self, agreement: Agreement) -> str:
        """Train until the last step or until asked to stop: "completed" or "stopped"."""
        try:
            with python_garbage_kept() if self.config.train.gc_every else nullcontext():
                return self._train(agreement)
        except BaseException:
            with suppress(Exception):  # the checkpoint in progress is of an earlier step
                self.report_saved(self.saver.finish())
            raise

    def _train(self, agreement: Agreement) -> str:
        while self.progress.step < self.config.train.steps and self.reason_to_stop() is None:
            self.report_saved(self.saver.finished())
            self.recorder.before(self.progress.step + 1)
            self.meter.begin()  # the wait for a slower host's answer is a part of the step
            if self.progress.step and is_due(self.progress.step, self.config.train.gc_every):
                gc.collect(1)  # the oldest objects live as long as the training
            if agreement.stops(self.saver.failed):
                return self.leave_early()
            with self.recorder.labeled(STEP):
                result = self.advance()
            step = self.progress.step
            evaluates = is_due(step, self.config.train.eval_every)
            by_step = is_due(step, self.config.checkpoint.every)
            saves = by_step or agreement.save_is_due
            if self.is_logged(step) or saves:
                result.grad_norm.item()  # so that queued work counts as the step's
            if is_due(step, self.config.guard.every or 0):
                self.compare_replicas()
            self.meter.end()
            self.logged = None
            if self.is_logged(step) and self.log(result, evaluates):
                by_step = saves = True
            self.callbacks.call("on_step_end", step, metrics=self.logged)
            if evaluates:
                self.callbacks.call("on_evaluation", step, metrics=self.logged)
            if saves:
                self.save(self.saver.begin, by_time=not by_step)
                agreement.saved()
        if reason := self.reason_to_stop():
            self.note("enough", f"the training ends at step {self.progress.step}: {reason}")
        self.recorder.end(self.progress.step + 1)
        self.report_saved(self.saver.finish())
        if self.config.checkpoint.at_end:
            self.save(self.saver.write)
        return "completed"

    def advance(self) -> StepResult:
        """Run one optimizer step."""
        step = self.progress.step + 1
        NOW.begin(step)
        phase = phase_at(self.config.train, step)
        micro_batches = self.samples.micro_batches(
            self.progress.consumed_samples,
            phase.global_batch,
            self.engine.dp_rank,
            self.config.parallel.dp,
            self.config.train.micro_batch,
        )
        with self.recorder.labeled(DATA):
            batches = [batch.cut(phase.seq_len) for batch in micro_batches]
        statistics = self.statistics if is_due(step, self.config.train.statistics_every) else None
        with statistics.watching() if statistics is not None else nullcontext():
            self.last = self.engine.train_step(batches, self.learning_rate(step))
        if statistics is not None:
            found = statistics.read(self.last.grad_norm.item())
            if self.rank == 0:
                fence.require(self.workspace)
                run = RunDirectory(self.workspace.parents[1])
                jsonlines.append(run.statistics, {"step": step, "modules": found})
        self.progress.step = step
        self.progress.consumed_samples += phase.global_batch
        self.samples_since_log += phase.global_batch
        return self.last

    def learning_rate(self, step: int) -> float:
        factor = lr_factor(self.config.scheduler, step, self.config.train)
        return self.config.optimizer.lr * factor

    def reason_to_stop(self) -> str | None:
        """Return why `train.stop_when` ends the training now; None: it continues."""
        limit = self.config.train.stop_when.last_step
        if limit is not None and self.progress.step >= limit:
            return f"train.stop_when.last_step={limit}"
        return self.progress.evaluations.reason_to_stop(self.config.train.stop_when)

    def is_logged(self, step: int) -> bool:
        """True if the metrics of a step are due; those of the last step before a stop are logged as well."""
        train = self.config.train
        dues = (train.log_every, train.eval_every, train.steps, train.stop_when.last_step or 0)
        return any(is_due(step, every) for every in dues)

    def log(self, result: StepResult, evaluates: bool) -> bool:
        """Gather one step's metrics from all ranks and write them; True if its checkpoint is to be kept as one
        of the best.

        Raises:
            NonFiniteError: the loss or the gradient norm is not finite.
            LossSpikeError: the loss has jumped, and `train.on_spike` is stop or rollback.
        """
        loss_sum, memory = result.loss_sum.item(), peak_memory_gib(self.engine.device)
        local_figures = [loss_sum, memory, self.meter.own_time(), *self.health.read()]
        all_figures = process_group.gather_numbers(local_figures)
        healths = all_figures[:, 3:].tolist()
        record: dict[str, Any] = {
            "step": self.progress.step,
            "loss": all_figures[:, 0].sum().item() / float(result.tokens),
            "grad_norm": result.grad_norm.item(),
            "lr": self.learning_rate(self.progress.step),
            "tokens": self.progress.consumed_samples * self.config.train.seq_len,
            **self.meter.read(self.samples_since_log),
            **self.engine.figures(),
            "memory_gib": all_figures[:, 1].max().item(),
            **self.health.metrics(healths),
            "time": time.time(),
        }
        self.samples_since_log = 0
        rising: list[str] = []
        if evaluates:
            figures, rising = self.evaluate()
            record |= figures
        self.logged = record
        for sink in self.sinks:
            sink.write(record)
        require_finite(record["step"], loss=record["loss"])
        self.require_finite_gradients(result)
        own_times = all_figures[:, 2].tolist()
        late = self.stragglers.add(record["step"], own_times, record["step_time_s"])
        if late is not None:
            self.note("straggler", late)
        for fault in self.health.warnings(healths, self.hosts):
            self.note("health", fault)
        if jump := self.progress.spikes.add(record["loss"]):
            self.report_jump(f"{jump} (step {record['step']})")
        if not evaluates:
            return False
        metric = self.config.checkpoint.best_metric
        if metric not in record:
            raise UserError(
                "config", f"checkpoint.best_metric={metric}: lm_eval has not computed it"
            )
        return self.progress.evaluations.add(
            self.progress.step,
            record["eval_loss"],
            self.config.checkpoint.keep_best,
            self.config.train.stop_when.min_delta,
            rank=-record[metric] if metric in (*rising, *RISING) else record[metric],
        )

    def report_jump(self, jump: str) -> None:
        """Note a jump of the loss, and keep the checkpoints from before it.

        Raises:
            LossSpikeError: `train.on_spike` is stop or rollback.
        """
        self.report_saved(self.saver.finish())
        if self.rank == 0:
            stored = store.list_checkpoints(self.workspace.parent)
            self.progress.spikes.steps = [checkpoint.step for checkpoint in stored]
        self.note("spike", f"{jump}; the checkpoints from before it are kept")
        if (reaction := self.config.train.on_spike) != "note":
            raise LossSpikeError(f"{jump}; train.on_spike={reaction}")

    def require_finite_gradients(self, result: StepResult) -> None:
        """Raise a NonFiniteError, unless the step was skipped because of the loss scale."""
        if not result.skipped or self.engine.scale_is_exhausted:
            require_finite(self.progress.step, grad_norm=result.grad_norm.item())

    def evaluate(self) -> tuple[dict[str, float], list[str]]:
        """Return the mean loss of the validation samples, of each source if there are several, and the metrics
        of tasks; and the names of the metrics that are better if higher."""
        with self.engine.averaged():
            tasks, rising = self.tasks.compute() if self.tasks is not None else ({}, [])
            losses = {split.name: self.evaluate_on(split) for split in self.data.valid}
        figures = {f"eval_{name}": value for name, value in self.engine.preferences().items()}
        mean = sum(split.share * losses[split.name] for split in self.data.valid)
        by_source = {f"eval_loss/{name}": loss for name, loss in losses.items() if name}
        return {"eval_loss": mean, **by_source, **figures, **tasks}, rising

    def evaluate_on(self, split: Validation) -> float:
        batches = split.loader.valid_batches(
            split.samples_of(self.config.train.eval_samples),
            self.engine.dp_rank,
            self.config.parallel.dp,
            self.config.train.micro_batch,
        )
        loss_sum, tokens = validate(self.engine, batches)
        return loss_sum / tokens if tokens else math.nan  # which counts as no loss at all

    def leave_early(self) -> str:
        self.recorder.end(self.progress.step + 1)
        self.report_saved(self.saver.finish())
        self.note("stopping", f"asked to stop after step {self.progress.step}")
        if self.last is not None and not self.is_logged(self.progress.step):
            self.log(self.last, evaluates=False)
        if self.config.checkpoint.at_stop:
            self.save(self.saver.write)
        return "stopped"

    def close_sinks(self, outcome: str) -> None:
        """Close the outputs of metrics, wait for uploads; an error here hides no failure of the training."""
        for sink in self.sinks:
            with suppress(Exception) if outcome == "failed" else nullcontext():
                sink.close(outcome)
        with suppress(Exception) if outcome == "failed" else nullcontext():
            self.saver.close(outcome)

    def save(self, write: Write, by_time: bool = False) -> None:
        """Write a checkpoint of this step, unless there is one; old ones are deleted.

        `by_time`: it is saved only because of `checkpoint.every_minutes`.

        Raises:
            NonFiniteError: the step's gradients were not finite, so its weights are useless.
            ReplicaError: ranks differ in tensors that must be equal.
            OSError: this checkpoint, or the previous one, could not be written.
            FencedError: the run has continued without this rank's attempt.
        """
        if self.last is None or self.saved_step == self.progress.step:
            return
        self.require_finite_gradients(self.last)
        if self.config.guard.every != 0:
            self.compare_replicas()
        for sink in self.sinks:
            sink.flush()
        manifest = {
            "step": self.progress.step,
            "consumed_samples": self.progress.consumed_samples,
            "tokens": self.progress.consumed_samples * self.config.train.seq_len,
            "data": self.data.fingerprint,
            **self.progress.evaluations.in_manifest(self.progress.step),
            **self.progress.spikes.in_manifest(),
            **({"base": self.progress.base} if self.progress.base else {}),
            "world_size": self.config.world_size,
            "time": time.time(),
            **({store.BY_TIME: True} if by_time else {}),
            configuration.IN_MANIFEST: configuration.values(self.config),
        }
        self.report_saved(self.saver.finish())
        self.report_saved(write(self.engine.state(), manifest))
        self.saved_step = self.progress.step

    def compare_replicas(self) -> None:
        """Raise an error on every rank if ranks differ in what they hold equally, once a step."""
        if self.compared_step != self.progress.step:
            require_equal_replicas(self.engine, self.progress.step)
            self.compared_step = self.progress.step

    def report_saved(self, saved: Saved | None) -> None:
        if saved is None:
            return
        message = f"{saved.path.name} saved in {duration(saved.seconds)}"
        if saved.stall_s < saved.seconds:
            message += f", of which the training waited {duration(saved.stall_s)}"
        self.note(
            "checkpoint", message, step=saved.step, seconds=saved.seconds, stall_s=saved.stall_s
        )
        self.callbacks.call("on_checkpoint", saved.step, checkpoint=saved.path)
        for step, reason in saved.undeleted.items():
            path = checkpoint_path(saved.path.parent, step)
            self.note(
                "undeleted",
                f"{path.name} is no longer needed and could not be deleted ({reason}); the training "
                f"continues. To delete it: rm -r {shlex.quote(str(path))}",
                step=step,
            )


def validate(engine: Engine, batches: Iterable[tuple[Batch, int]]) -> tuple[float, int]:
    """Return the sum of the losses of all ranks' batches and the number of their tokens; see
    `Engine.evaluate`."""
    total = process_group.gather_numbers(list(engine.evaluate(batches))).sum(dim=0)
    return total[0].item(), int(total[1].item())


@contextmanager
def python_garbage_kept() -> Iterator[None]:
    """Keep Python from collecting garbage by itself within the body."""
    was_enabled = gc.isenabled()
    gc.disable()
    gc.collect()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def is_due(step: int, every: int) -> bool:
    """True if an action that happens every `every` steps, or never (0), is due after this step."""
    return every > 0 and step % every == 0
