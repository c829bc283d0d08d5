"""The phases of a training: other batches, lengths of sequences, sources and rates from a step on.

The schedules of the learning rate have a row each, which rules, translations and the training read.

Everything follows from the configuration and the number of a step, so a run resumes exactly in any layout.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from nanoscale.config.schema import PhaseSettings, Scheduler, Train


@dataclass(frozen=True)
class TrainingPhase:
    """Steps with the same batch, length of sequences and sources."""

    name: str
    first: int
    """The number of steps before it."""
    last: float
    """The number of its last step; infinite for the last phase."""
    first_sample: int
    """The number of samples before it."""
    global_batch: int
    seq_len: int
    lr: float
    """The multiple of the peak rate at its end, with `scheduler.name=piecewise`."""
    weights: dict[str, float] | None
    """The weights of the sources of the data mixture; None: the weights in `data`."""


def phases_of(train: Train) -> list[TrainingPhase]:
    """Return the phases in their order; one for a training without `train.phases`."""
    phases: list[TrainingPhase] = []
    first = first_sample = 0
    for name, entry in (train.phases or {"": PhaseSettings()}).items():
        batch = entry.global_batch or train.global_batch
        last: float = math.inf if entry.until is None else entry.until
        if entry.until_tokens is not None:
            left = entry.until_tokens - first_sample * train.seq_len
            last = first + max(1, math.ceil(left / (batch * train.seq_len)))
        lr, seq_len = 1.0 if entry.lr is None else entry.lr, entry.seq_len or train.seq_len
        phase = TrainingPhase(name, first, last, first_sample, batch, seq_len, lr, entry.weights)
        phases.append(phase)
        if last != math.inf:
            first_sample += (int(last) - first) * batch
            first = int(last)
    return phases


def phase_at(train: Train, step: int) -> TrainingPhase:
    """Return the phase of a step, of 1, 2, …"""
    return next(phase for phase in phases_of(train) if step <= phase.last)


def samples_after(train: Train, steps: int) -> int:
    """Return the samples of the first steps."""
    phase = phase_at(train, max(1, steps))
    return phase.first_sample + (steps - phase.first) * phase.global_batch


def steps_for(train: Train, samples: float) -> int:
    """Return the first number of steps with at least this many samples."""
    phase = [it for it in phases_of(train) if it.first_sample < samples or it.first == 0][-1]
    return phase.first + math.ceil((samples - phase.first_sample) / phase.global_batch)


def piecewise(train: Train, step: int) -> float:
    """Return the multiple of the peak rate: linear in each phase, from the end of the one before to its own."""
    phase = phase_at(train, step)
    before = [it.lr for it in phases_of(train) if it.last <= phase.first]
    start = before[-1] if before else phase.lr
    last = min(phase.last, train.steps or step)
    return start + (phase.lr - start) * (step - phase.first) / max(1, last - phase.first)


@dataclass(frozen=True)
class DecayRule:
    """A row of the table: the decay after the warm-up."""

    decay: Callable[[float], float] = lambda _: 0.0
    """A function from the share of the decay's steps that are done to the share of the fall to the minimum."""
    factor: Callable[[Scheduler, int, Train], float] | None = None
    """The multiple of the peak rate after the warm-up, if it depends on more than that share."""
    has_own_steps: bool = False
    """True if the decay takes the last `scheduler.decay_steps` steps, after a stable phase, not all steps."""


def _inverse_sqrt(scheduler: Scheduler, step: int, _: Train) -> float:
    """Return √(warmup_steps / step) (Vaswani et al. 2017, arXiv:1706.03762, section 5.3)."""
    return max(scheduler.min_ratio, math.sqrt(max(1, scheduler.warmup_steps) / step))


PIECEWISE = "piecewise"
SCHEDULERS = {
    # Loshchilov & Hutter 2017, arXiv:1608.03983, eq. 5, without restarts
    "cosine": DecayRule(lambda progress: (1 - math.cos(math.pi * progress)) / 2),
    "linear": DecayRule(lambda progress: progress),
    "constant": DecayRule(lambda _: 0.0),
    # Hu et al. 2024, arXiv:2404.06395, section 4
    "wsd": DecayRule(lambda progress: progress, has_own_steps=True),
    "inverse-sqrt": DecayRule(factor=_inverse_sqrt),
    PIECEWISE: DecayRule(factor=lambda _, step, train: piecewise(train, step)),
}


def lr_factor(scheduler: Scheduler, step: int, train: Train) -> float:
    """Return the multiple of the peak rate for the update that ends `step`, of 1 … `train.steps`.

    The linear warm-up reaches the peak at `warmup_steps`. A decay reaches `min_ratio` at `train.steps`.
    """
    steps, start = train.steps or step, scheduler.warmup_steps
    rule = SCHEDULERS[scheduler.name]
    if step <= start:
        return step / start
    if rule.factor is not None:
        return rule.factor(scheduler, step, train)
    if rule.has_own_steps:
        assert scheduler.decay_steps is not None, "the launcher freezes a number"
        start = max(start, steps - scheduler.decay_steps)
    progress = max(0, step - start) / max(1, steps - start)
    return 1 - (1 - scheduler.min_ratio) * rule.decay(progress)
