"""The trials of a sweep, started as launchers of their own and followed until all have ended."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest

from nanoscale.common.errors import UserError
from nanoscale.common.units import counted
from nanoscale.config.values.provenance import Composed
from nanoscale.config.violations import quoted
from nanoscale.launch.fleet.signals import Signals
from nanoscale.launch.lifecycle.attempt import DONE, INTERRUPTED, PREEMPTED
from nanoscale.launch.request import Request
from nanoscale.launch.transport.transport import read_hosts
from nanoscale.processes.proc import end_with_parent
from nanoscale.runs import failure
from nanoscale.sweep.samplers import Study
from nanoscale.sweep.space import Space
from nanoscale.sweep.sweep import ENDED, Settings, Sweep, Trial

_HOST_KEYS = {"launcher", "launcher.name", "launcher.hostfile", "launcher.include"}
_HOST_KEYS |= {"launcher.exclude", "launcher.exclude_file"}
"""Keys that select the hosts of a trial. If they differ between trials, so do the hosts to choose from."""


@dataclass(frozen=True)
class Slot:
    """The devices of one trial; without values, the devices that its configuration requests."""

    gpus: tuple[int, ...] | None = None
    """GPUs of this machine; None: all of them, or none."""
    include: str | None = None
    """The hosts and their devices, in the form of `--include`; None: all that the launcher's keys select."""


def slots_of(
    requests: Sequence[Request], composed: Composed, at_once: int | None, keys: Sequence[str]
) -> list[Slot]:
    """Return a slot for each of the trials that run at the same time.

    Args:
        requests: the requests of the trials that have not ended.
        composed: the configuration of one of them, before a slot was chosen for it.
        at_once: the requested number; None: as many as the devices allow, and one on this machine's CPU.
        keys: the keys that differ between trials.

    Raises:
        UserError: the machine or the hosts have no room for the requested number.
    """
    if not requests:
        return [Slot()]
    config = requests[0].config
    ranks = max(one.config.world_size for one in requests)
    if requests[0].hosts and config.launcher.name != "slurm" and _HOST_KEYS.isdisjoint(keys):
        slots = _host_slots(requests, composed)
        what = f"the hosts of {config.launcher.hostfile} have"
    elif not requests[0].hosts and config.launcher.device == "cuda":
        gpus = requests[0].devices.count
        firsts = range(0, max(1, gpus // ranks) * ranks, ranks)
        slots = [Slot(gpus=tuple(range(first, first + ranks))) for first in firsts]
        what = f"{counted(gpus, 'GPU')} have"
    else:
        return [Slot()] * (at_once or 1)
    if at_once is not None and at_once > len(slots):
        room = f"room for {counted(len(slots), 'trial')} of {counted(ranks, 'rank')}"
        raise UserError("usage", f"--at-once {at_once}: {what} {room}")
    return slots[:at_once]


def _host_slots(requests: Sequence[Request], composed: Composed) -> list[Slot]:
    """Return the groups of hosts, and of devices on them, that have as many as the largest trial needs."""
    launcher = replace(composed.config.launcher, nodes=None, devices="auto")
    hosts = read_hosts(replace(composed, config=replace(composed.config, launcher=launcher)))
    used = zip_longest(*([host.slots for host in one.hosts] for one in requests), fillvalue=0)
    needed = [max(counts) for counts in used]
    groups = [hosts[first : first + len(needed)] for first in range(0, len(hosts), len(needed))]
    slots = []
    for share in range(max(host.slots for host in hosts)):  # other hosts first, then their devices
        for group in groups:
            entries = []
            for host, count in zip(group, needed, strict=False):
                devices = host.used_devices[share * count : (share + 1) * count]
                entries += [host.entry(devices)] if len(devices) == count else []
            slots += [Slot(include="@".join(entries))] if len(entries) == len(needed) else []
    # A trial that needs all devices has the devices that its own keys select.
    return slots if len(slots) > 1 else [Slot()]


_POLL_S = 0.2
_PRUNE_S = 2.0
"""Seconds between two looks at the evaluations of running trials."""
_NOT_FAILED = (DONE, PREEMPTED, INTERRUPTED)
"""Exit codes of a launcher that has completed its run, or was stopped."""


Show = Callable[..., None]
"""A function that shows the trials: `changed` is True if the state of a trial has changed, and `stopping` while
all trials are being stopped."""


@dataclass
class Runner:
    """The processes of a sweep on this machine."""

    sweep: Sweep
    settings: Settings
    space: Space
    source: Study | None
    """The source of further trials; None for a grid, which has no further ones."""
    trials: list[Trial]
    slots: Sequence[Slot]
    """The devices of each trial that runs at the same time."""
    show: Show
    arguments: Sequence[str] = ()
    """Options of each trial's command line, as `--force`."""
    retry: bool = False
    """True to resume failed trials once more."""
    failed: set[str] = field(default_factory=set)
    """Trials whose launcher has failed in this process, or refused to start."""
    _active: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _slot_of: dict[str, int] = field(default_factory=dict)
    _lost: set[int] = field(default_factory=set)
    """Slots whose hosts do not answer."""
    _done: set[str] = field(default_factory=set)
    """Trials that this process does not start again."""
    _waits: bool = False
    """True if a trial is active that this process has not started."""
    _pruned_at: float = 0.0

    def run(self, signals: Signals) -> bool:
        """Run all trials; False if a signal came before the last has ended."""
        stopped = killed = False
        for trial in self.trials:  # record the ends that no process of a sweep has seen, too
            state = self.sweep.state(trial)
            if state in ENDED and not (self.retry and state == "failed"):
                self._done.add(trial.name)
                if self.source is not None:
                    self.source.ended(trial, state)
        while True:
            changed = self._collect()
            if signals.first is not None and not stopped:
                stopped = True
                self._signal(signal.SIGTERM)
            if signals.kill_requested and not killed:
                killed = True
                self._signal(signal.SIGINT)
            if not stopped:
                changed |= self._start()
                changed |= self._prune()
            self.show(self.trials, changed=changed, stopping=stopped)
            if not self._active and (stopped or not (changed or self._waits)):
                return not stopped
            time.sleep(_POLL_S)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._active.values():
            process.send_signal(number)

    def _start(self) -> bool:
        """Start trials while there is a free slot; True if one was started."""
        started = self._waits = False
        used = {*self._slot_of.values(), *self._lost}
        for number, slot in enumerate(self.slots):
            trial = self._next() if number not in used else None
            if trial is not None:
                started = True
                self.failed.discard(trial.name)
                self._slot_of[trial.name] = number
                self._active[trial.name] = self._launch(trial, slot)
        return started

    def _next(self) -> Trial | None:
        """Return a trial that has not ended, or a new one."""
        for trial in self.trials:
            if trial.name not in self._done and trial.name not in self._active:
                # An earlier sweep was killed, and its trial still saves a checkpoint.
                self._waits = self.sweep.state(trial) == "running"
                return None if self._waits else trial
        new = self.source.next(self.trials) if self.source is not None else None
        if new is not None:
            self.trials.append(new)
            self.sweep.write(self.settings, self.trials)
        return new

    def _launch(self, trial: Trial, slot: Slot) -> subprocess.Popen[bytes]:
        """Start a trial's launcher, or resume its run. It receives SIGTERM when this process dies."""
        run = self.sweep.run(trial)
        if run.config.exists():
            command = ["resume", str(run.path)]
        else:
            command = ["train", *self.space.overrides(trial.values)]
            command += [
                f"run.name={quoted(trial.name)}",
                f"run.root={quoted(str(self.sweep.runs))}",
            ]
            if self.settings.config_dir:
                command += ["--config-dir", self.settings.config_dir]
        if slot.include is not None:
            command += [f"launcher.include={quoted(slot.include)}", "launcher.exclude=null"]
        environment = dict(os.environ)
        if slot.gpus is not None:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            names = [
                visible[it] if len(visible) > it and visible[it] else str(it) for it in slot.gpus
            ]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(names)
        with self.sweep.log(trial).open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "nanoscale", *command, *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C is for this process, which stops the trials
                preexec_fn=partial(end_with_parent, signal.SIGTERM),  # it saves and stops
            )

    def _collect(self) -> bool:
        """Record the trials that have ended; True if one has."""
        ended = [name for name, process in self._active.items() if process.poll() is not None]
        for name in ended:
            exit_code, slot = self._active.pop(name).returncode, self._slot_of.pop(name)
            if exit_code not in _NOT_FAILED:
                self.failed.add(name)
            trial = next(one for one in self.trials if one.name == name)
            state = self.sweep.state(trial)
            if state == "failed" and self.slots[slot].include:
                cause = failure.read(self.sweep.run(trial))
                if cause is not None and cause.rank is None:  # a host did not answer, or was lost
                    self._lost.add(slot)  # the trial continues on other hosts, if there are any
                    continue
            self._done.add(name)
            # a sampler's interrupted trial stays open until it is resumed
            if state in ENDED and self.source is not None:
                self.source.ended(trial, state)
        return bool(ended)

    def _prune(self) -> bool:
        """Stop trials that the pruner gives up; True if there is one."""
        if self.source is None or time.monotonic() - self._pruned_at < _PRUNE_S:
            return False
        self._pruned_at = time.monotonic()
        pruned = False
        for number, trial in enumerate(self.trials):
            if trial.name in self._active and not trial.pruned and self.source.should_prune(trial):
                self.trials[number] = replace(trial, pruned=True)
                self.sweep.write(self.settings, self.trials)
                self._active[trial.name].terminate()
                pruned = True
        return pruned
