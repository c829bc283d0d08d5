"""The plan of a job's checkpoints: their times, their sizes, and the disk space they need."""

import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from nanoscale.common.errors import UserError, Violation
from nanoscale.common.units import byte_size
from nanoscale.config.machines import NOTICE_S
from nanoscale.config.resolved import ResolvedCheckpoint, ResolvedConfig
from nanoscale.plan.hardware.hardware import Hardware
from nanoscale.plan.memory.states import checkpoint_bytes, host_bytes, sends_copies
from nanoscale.plan.predict import predicted_step, ranks_of_host

COPY_BANDWIDTH = 3e9
"""B/s of a host that copies checkpoints in memory to another host. They go over TCP sockets; this is assumed,
not measured."""


@dataclass(frozen=True)
class SavingPlan:
    """The checkpoints of a job, and their need of disk space."""

    config: ResolvedCheckpoint
    restarts: int
    """Launcher.max_restarts."""
    steps: int
    """Steps of the whole training."""
    evaluations: int
    """Evaluations of the whole training."""
    minutes_in_steps: int | None
    """Checkpoint.every_minutes in steps, by the predicted time of one; None: unknown, or not saved by time."""
    bytes: int
    """The size of one checkpoint; 0: unknown."""
    root: str
    """The folder of runs."""
    free: int | None
    """Free bytes of its disk, seen from this machine; None: unknown."""
    present: int = 0
    """Existing checkpoints of the run."""
    notice_s: float | None = None
    """Seconds that the notice of a cloud leaves for a save after two steps; None: unknown, or not set."""
    step_s: float | None = None
    """Seconds of a step; None: unknown."""
    memory_save_s: float | None = None
    """Seconds of a save into the memory of the hosts; None: unknown."""
    is_on_one_host: bool = False
    """True if no other host can keep the checkpoints in memory."""
    between_failures_s: float | None = None
    """Seconds between two failures of the job, by launcher.mtbf_hours; None: unknown."""

    @property
    def during(self) -> bool:
        """True if checkpoints are saved before the training ends."""
        return bool(self.config.every or self.config.every_minutes or self.config.keep_best)

    @property
    def most(self) -> int:
        """The most checkpoints of the run on the disk at the same time, including one that is being written."""
        return self._most(being_written=1)

    @property
    def needed(self) -> int:
        """Bytes of checkpoints beyond the existing ones of the run."""
        return max(1, self.most - self.present) * self.bytes

    @property
    def needed_after(self) -> int:
        """Bytes of the checkpoints that remain after the training, beyond the existing ones of the run."""
        return max(0, self._remaining - self.present) * self.bytes

    @property
    def needed_while_saving(self) -> int:
        """Bytes of a checkpoint that is being written while all remaining checkpoints exist already."""
        if not self.saves:
            return 0
        return (replace(self, present=0)._most(being_written=1) - self._remaining) * self.bytes

    @property
    def _remaining(self) -> int:
        """The checkpoints of the whole training that remain after it."""
        if not (self.during or self.config.at_end):
            return 0
        return replace(self, present=0)._most(being_written=0)

    def _most(self, being_written: int) -> int:
        saving = self.config
        by_number = self.steps // saving.every if saving.every else 0
        by_number += self.evaluations if saving.keep_best else 0
        if saving.keep_last is None:
            kept = self.present + by_number + 1
        else:
            kept = saving.keep_last + (self.steps // saving.keep_every if saving.keep_every else 0)
            kept += saving.keep_best
        if saving.every_minutes and self.minutes_in_steps is None:
            return max(self.present, kept + being_written)
        by_time = self.steps // self.minutes_in_steps if self.minutes_in_steps else 0
        saved = self.present + by_number + by_time + 1
        return max(self.present, min(kept + being_written, saved))

    @property
    def saves(self) -> bool:
        """True if any checkpoint is saved, at a stop by the user included."""
        return self.during or self.config.at_end or self.config.at_stop

    @property
    def memory_stall_share(self) -> float | None:
        """The share of the time in which steps wait for saves into memory; None: unknown, or not set."""
        if not (self.config.memory_every and self.step_s and self.memory_save_s):
            return None
        stall_s = max(0.0, self.memory_save_s - self.step_s)
        return stall_s / (stall_s + self.config.memory_every * self.step_s)

    @property
    def disk_loss_s(self) -> float | None:
        """Seconds that are lost on average when a restart reads the disk: half an interval; None: unknown."""
        saving, step_s = self.config, self.step_s or 0.0
        intervals = 60 * (saving.every_minutes or 0.0), saving.every * step_s
        shortest = min(filter(None, intervals), default=None)
        return shortest and min(shortest, self.steps * step_s or math.inf) / 2

    @property
    def lost_share(self) -> float | None:
        """The share of the time that saves into memory and repeated steps take; None: unknown, or no restarts.

        The time to start again is not in it: the plan does not know how long a compilation takes.
        """
        memory_loss_s = self.config.memory_every * (self.step_s or 0.0) / 2
        lost_s = min(filter(None, (memory_loss_s, self.disk_loss_s)), default=None)
        if lost_s is None or self.between_failures_s is None or not self.restarts:
            return None
        return (self.memory_stall_share or 0.0) + min(1.0, lost_s / self.between_failures_s)

    @property
    def failure_probability(self) -> float | None:
        """The probability that a failure ends the training early; None: unknown, or the job restarts."""
        if self.restarts or not (self.step_s and self.between_failures_s):
            return None
        return -math.expm1(-self.steps * self.step_s / self.between_failures_s)

    def require_disk(self) -> None:
        """Raise a UserError of kind `plan` if the disk has no room for a single checkpoint."""
        if self.free is None or not self.saves or self.bytes <= self.free:
            return
        sizes = f"{byte_size(self.bytes)}, and {byte_size(self.free)} are free in {self.root}"
        message = f"a checkpoint takes {sizes}"
        remedy = "free some space, or keep the run on another disk, or save no checkpoints"
        elsewhere = () if self.present else ("run.root=FOLDER",)
        advice = (*elsewhere, "checkpoint=none")
        violation = Violation("run.root", self.root, "", message, advice, remedy)
        raise UserError("plan", f"{message}. Continue with --force", [violation])


def with_memory_interval(config: ResolvedConfig, hardware: Hardware) -> ResolvedConfig:
    """Return the configuration with the interval of checkpoints in memory that loses least time.

    It is T = √(2·stall/λ) for λ failures of the job in a second (Young 1974, Daly 2006), and λT of the time is
    lost. An interval D on disk loses λD/2 of it: if that is less, nothing is saved in memory.
    """
    step_s = predicted_step(config, hardware)
    stall_s = max(0.0, memory_save_s(config, hardware) - step_s)
    optimum_s = math.sqrt(2 * stall_s * between_failures_s(config, hardware))
    saving = config.checkpoint
    intervals = filter(None, (60 * (saving.every_minutes or 0.0), saving.every * step_s))
    gains = optimum_s < min(intervals, default=math.inf) / 2
    memory_every = max(1, round(optimum_s / step_s)) if gains else 0
    return replace(config, checkpoint=replace(saving, memory_every=memory_every))


def between_failures_s(config: ResolvedConfig, hardware: Hardware) -> float:
    """Return the seconds between two failures of any of the job's hosts."""
    hosts = -(-config.world_size // ranks_of_host(config, hardware))
    return 3600 * config.launcher.mtbf_hours / hosts


def memory_save_s(config: ResolvedConfig, hardware: Hardware) -> float:
    """Return the seconds of a save into the memory of the hosts, copies to other hosts included.

    It stalls the training for what exceeds a step: it is complete before the next step's update.
    """
    ranks = ranks_of_host(config, hardware)
    size = host_bytes(config, ranks)
    seconds = size / (ranks * hardware.host_bandwidth)
    if sends_copies(config, ranks):
        network = ranks * hardware.inter_bandwidth * hardware.efficiency.inter_host
        seconds += size / min(network, COPY_BANDWIDTH)
    return seconds


def plan_saving(
    config: ResolvedConfig,
    step_s: float | None,
    present: int = 0,
    save_s: float | None = None,
    failures_s: float | None = None,
) -> SavingPlan:
    """Plan the checkpoints of a configuration whose run has the `present` ones. Times are the seconds of a
    step, of a save into the memory of the hosts, and between two failures of the job; None: unknown."""
    minutes = config.checkpoint.every_minutes
    root = Path(config.run.root).absolute()
    notice_s = NOTICE_S.get(config.launcher.notice or "")
    return SavingPlan(
        config=config.checkpoint,
        restarts=config.launcher.max_restarts,
        steps=config.train.steps,
        evaluations=config.train.steps // config.train.eval_every if config.train.eval_every else 0,
        minutes_in_steps=max(1, round(60 * minutes / step_s)) if minutes and step_s else None,
        bytes=checkpoint_bytes(config),
        root=str(root),
        free=_free_bytes(root),
        present=present,
        notice_s=notice_s - 2 * step_s if notice_s and step_s else None,
        step_s=step_s,
        memory_save_s=save_s,
        # a job on one host fails as often as the host
        is_on_one_host=failures_s == 3600 * config.launcher.mtbf_hours,
        between_failures_s=failures_s,
    )


def _free_bytes(root: Path) -> int | None:
    existing = next(path for path in (root, *root.parents) if path.exists())
    try:
        usage = shutil.disk_usage(existing)
    except OSError:
        return None
    return usage.free if usage.total else None  # /proc and the like are not disks
