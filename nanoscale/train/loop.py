"""The training loop: read it from top to bottom."""

import gc
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nanoscale.backends.base import Engine, StepResult
from nanoscale.backends.native import NativeEngine
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.training_phases import lr_factor, phase_at, samples_after
from nanoscale.data.dataset import Dataset
from nanoscale.data.loader import Mixture, Prefetched, SampleSource
from nanoscale.metrics.meter import Meter
from nanoscale.metrics.sinks import Sink
from nanoscale.metrics.trace import DATA, STEP
from nanoscale.models.initialization import parameter_seed
from nanoscale.runs.events import Note
from nanoscale.runs.goodput import Tally
from nanoscale.runs.position import NOW
from nanoscale.train.agreement import Agreement
from nanoscale.train.checkpointing import Callbacks, CheckpointWriter, Progress
from nanoscale.train.evaluations import Evaluator
from nanoscale.train.layer_statistics import LayerStatistics
from nanoscale.train.profile import Recorder
from nanoscale.train.stability import LossSpikeError, count_zeros, require_finite
from nanoscale.train.step_log import StepLog

_WAIT_S = 0.2
_LONG_WAIT_S = 5.0
"""Seconds for which a step may wait for data without a note."""


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
    before: CheckpointWriter | None = None
    """The writer of checkpoints of the training before a rollback."""
    tally: Tally | None = None

    def __post_init__(self) -> None:
        config, engine, progress, train = self.config, self.engine, self.progress, self.data.train
        if isinstance(train, Mixture):
            train.skip(progress.consumed_samples - samples_after(config.train, progress.step))
        self.last: StepResult | None = None
        self.logged: dict[str, Any] | None = None
        self.zero_norms = 0
        self.waiting_since: float | None = None
        # A GPU must not wait for the next samples. On a CPU, a thread would take its cores.
        self.samples: SampleSource = Prefetched(train) if engine.device.type == "cuda" else train
        self.statistics: LayerStatistics | None = None
        if config.train.statistics_every:
            assert isinstance(engine, NativeEngine), "the rules refuse the others"
            self.statistics = LayerStatistics(engine)
        self.evaluator = Evaluator(engine, self.data.valid)
        self.step_log = StepLog(engine, progress, self.meter, self.note, self.hosts)
        self.checkpoints = CheckpointWriter(
            self.workspace, config, engine, self.data.fingerprint, progress, self.rank, self.note,
            self.callbacks, self.before,
        )  # fmt: skip

    def run(self, agreement: Agreement) -> str:
        """Train until the last step or until asked to stop: "completed" or "stopped"."""
        collects = gc.isenabled()
        if self.config.train.gc_every:
            gc.disable()
            gc.collect()  # once in full: collections during the training skip the oldest objects
        try:
            return self.advance_to_end(agreement)
        except BaseException:
            with suppress(Exception):  # the checkpoint in progress is of an earlier step
                self.checkpoints.finish()
            raise
        finally:
            if collects:
                gc.enable()

    def advance_to_end(self, agreement: Agreement) -> str:
        """Run steps until the last one or until asked to stop, as `run` does after it has set up Python."""
        checkpoint, guard, train = self.config.checkpoint, self.config.guard, self.config.train
        while self.progress.step < train.steps and self.reason_to_stop() is None:
            # A checkpoint that is complete by now belongs to an earlier step, so it is reported first.
            self.checkpoints.report(self.checkpoints.saver.finished())
            self.recorder.before(self.progress.step + 1)
            self.meter.begin()  # the wait for a slower host's answer is a part of the step
            if self.progress.step and is_due(self.progress.step, train.gc_every):
                gc.collect(1)  # the oldest objects live as long as the training
            # All ranks stop before the same step: a rank that stopped alone would leave the others waiting.
            if agreement.stops(self.checkpoints.saver.failed, not self.samples_are_ready()):
                return self.leave_early(agreement.moves)
            if agreement.lacks_data:
                self.wait_for_data()
                continue
            with self.recorder.labeled(STEP):
                result = self.advance()
            step = self.progress.step
            if is_due(step, self.config.backend.empty_cache):
                torch.cuda.empty_cache()
            evaluates = is_due(step, train.eval_every)
            by_step = is_due(step, checkpoint.every)
            saves = by_step or agreement.save_is_due
            if self.is_logged(step) or saves:
                result.grad_norm.item()  # so that queued work counts as the step's
            # Replicas are compared before the step is logged or saved, so that neither shows wrong weights.
            if is_due(step, guard.every or 0):
                self.checkpoints.compare_replicas()
            self.meter.end(step)  # logging, evaluating and saving do not count as time of the step
            self.logged = None
            if self.is_logged(step) and self.log(result, evaluates):
                by_step = saves = True
            # The user's functions are called after the log, because they get its metrics.
            self.callbacks.call("on_step_end", step, metrics=self.logged)
            if evaluates:
                self.callbacks.call("on_evaluation", step, metrics=self.logged)
            # Saved last: the manifest holds the evaluation and the jumps that the log has found.
            if saves:
                self.save(waits=False, by_time=not by_step)
                agreement.saved()
            if is_due(step, checkpoint.memory_every):
                self.checkpoints.remember()
            if not result.skipped:  # its update would have made the moments
                self.checkpoints.prepare()
        if reason := self.reason_to_stop():
            self.note("enough", f"the training ends at step {self.progress.step}: {reason}")
        self.recorder.end(self.progress.step + 1)
        self.checkpoints.finish()
        if checkpoint.at_end:
            self.save(waits=True)
        return "completed"

    def samples_are_ready(self) -> bool:
        """True if the samples of the next two steps can be read; the second's answer comes after the first."""
        step, train = self.progress.step, self.config.train
        coming = sum(phase_at(train, step + ahead).global_batch for ahead in (1, 2))
        return self.samples.are_ready(self.progress.consumed_samples + coming)

    def wait_for_data(self) -> None:
        """Wait a moment, as a part of the next step's time, since texts are prepared beside the training."""
        if self.waiting_since is None:
            self.waiting_since = time.monotonic()
        elif time.monotonic() - self.waiting_since > _LONG_WAIT_S:
            self.note("data", f"step {self.progress.step + 1} waits for data: texts are prepared more slowly "
                "than the training reads them")  # fmt: skip
            self.waiting_since = float("inf")
        if not self.samples_are_ready():
            time.sleep(_WAIT_S)
        self.meter.end_wait()

    def advance(self) -> StepResult:
        """Run one optimizer step."""
        step = self.progress.step + 1
        self.waiting_since = None
        NOW.begin(step)  # first, so that a rank that hangs while it reads data reports this step
        phase = phase_at(self.config.train, step)
        # The samples follow from the number consumed, so a resumed run in any layout continues with the next.
        micro_batches = self.samples.micro_batches(
            self.progress.consumed_samples,
            phase.global_batch,
            self.engine.coordinates.dp,
            self.config.parallel.dp,
            self.config.train.micro_batch,
        )
        with self.recorder.labeled(DATA):
            batches = [batch.cut(phase.seq_len) for batch in micro_batches]
        statistics = self.statistics if is_due(step, self.config.train.statistics_every) else None
        with statistics.watching() if statistics is not None else nullcontext():
            rate = self.learning_rate(step)
            if self.config.precision.fp8_recipe == "nvfp4":  # roundings repeat after a resume
                torch.manual_seed(parameter_seed(self.config.train.seed, f"{step} {self.rank}"))
            self.last = self.engine.train_step(batches, rate, logged=self.is_logged(step))
        if statistics is not None:
            statistics.write(self.workspace, self.rank, step, self.last.grad_norm.item())
        # Counted after the update: after an error in it, the step is one that was not done.
        self.progress.step = step
        self.progress.consumed_samples += phase.global_batch
        return self.last

    def learning_rate(self, step: int) -> float:
        config = self.config
        return config.optimizer.lr * lr_factor(config.scheduler, step, config.train)

    def reason_to_stop(self) -> str | None:
        """Return why `train.stop_when` ends the training now; None: it continues."""
        limit = self.config.train.stop_when.last_step
        if limit is not None and self.progress.step >= limit:
            return f"train.stop_when.last_step={limit}"
        return self.progress.evaluations.reason_to_stop(self.config.train.stop_when)

    def is_logged(self, step: int) -> bool:
        """True if the metrics of a step are due, also in the first and in the last step before a stop."""
        train = self.config.train
        dues = (train.log_every, train.eval_every, train.steps, train.stop_when.last_step or 0)
        return step == 1 or any(is_due(step, every) for every in dues)

    def log(self, result: StepResult, evaluates: bool) -> bool:
        """Gather one step's metrics from all ranks and write them; True if its checkpoint is to be kept as one
        of the best.

        Raises:
            NonFiniteError: the loss or the gradient norm is not finite.
            LossSpikeError: the loss has jumped, and `train.on_spike` is stop or rollback.
            ZeroGradientError: the gradient norm stays 0.
        """
        # The time and memory of the steps are read before the evaluation, which needs its own.
        record = self.step_log.gather(result, self.learning_rate(self.progress.step))
        if evaluates:
            start = time.monotonic()
            record |= self.evaluator.evaluate()
            record["eval_time_s"] = time.monotonic() - start
        if self.tally is not None:
            record["goodput"] = self.tally.add(record)
        self.logged = record
        # Written before it is judged: the metrics of a run that diverged end with the step that did.
        for sink in self.sinks:
            sink.write(record)
        require_finite(record["step"], loss=record["loss"])
        self.require_finite_gradients(result)
        step, loss, norm = (record[name] for name in ("step", "loss", "grad_norm"))
        self.zero_norms = count_zeros(self.zero_norms, step, loss, norm)
        if self.zero_norms == 1:
            self.note("zero gradient", f"no gradient reaches the weights in step {step}")
        elif not loss and not norm:
            self.note("zero gradient", f"no token of step {step} has a loss, so its loss is 0")
        self.step_log.warn(record)
        if jump := self.progress.spikes.add(record["loss"]):
            jump = f"{jump} (step {record['step']})"
            self.checkpoints.keep_before_jump(jump)
            if (reaction := self.config.train.on_spike) != "note":
                raise LossSpikeError(f"{jump}; train.on_spike={reaction}")
        # The record of evaluations comes last: the loss of a step that raised decides nothing.
        rising = self.evaluator.rising
        return evaluates and self.progress.evaluations.add(record, self.config, rising)

    def require_finite_gradients(self, result: StepResult) -> None:
        """Raise a NonFiniteError, unless the step was skipped because of the loss scale."""
        scaling = self.engine.scaling
        if not result.skipped or scaling is None or scaling.exhausted:
            require_finite(self.progress.step, grad_norm=result.grad_norm.item())

    def save(self, *, waits: bool, by_time: bool = False) -> None:
        """Write a checkpoint of this step, unless there is one; arguments and errors as in `CheckpointWriter`.

        Raises:
            NonFiniteError: the step's gradients were not finite, so its weights are useless.
            ReplicaError: ranks differ in tensors that must be equal.
        """
        if self.last is None or self.checkpoints.saved_step == self.progress.step:
            return
        # A run resumes from its newest checkpoint, so weights that are known to be wrong are never saved.
        self.require_finite_gradients(self.last)
        if self.config.guard.every != 0:
            self.checkpoints.compare_replicas()
        # A resumed run continues metrics.jsonl after this step, so its lines are on the disk first.
        for sink in self.sinks:
            sink.flush()
        self.checkpoints.save(waits=waits, by_time=by_time)

    def leave_early(self, moves: bool) -> str:
        """Save and stop; in the hosts' memory if it can, and if the training continues with other hosts."""
        self.recorder.end(self.progress.step + 1)
        self.checkpoints.finish()
        self.note("stopping", f"asked to stop after step {self.progress.step}")
        # The last step is logged even if it is not due, so that the metrics end where the training stops.
        if self.last is not None and not self.is_logged(self.progress.step):
            self.log(self.last, evaluates=False)
        if moves and self.checkpoints.memory is not None:
            self.checkpoints.remember()
            self.checkpoints.memory.settle()
        elif moves or self.config.checkpoint.at_stop:
            self.save(waits=True)
        return "stopped"

    def close_sinks(self, outcome: str) -> None:
        """Close the outputs of metrics, wait for uploads; an error here hides no failure of the training."""
        for close in [sink.close for sink in self.sinks] + [self.checkpoints.saver.close]:
            with suppress(Exception) if outcome == "failed" else nullcontext():
                close(outcome)


def is_due(step: int, every: int) -> bool:
    """True if an action that happens every `every` steps, or never (0), is due after this step."""
    return every > 0 and step % every == 0
