"""The trials of a sweep, started as launchers of their own and followed until all have ended."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from nanoscale.launch.fleet.signals import Signals
from nanoscale.sweep.samplers import Source
from nanoscale.sweep.space import Space
from nanoscale.sweep.sweep import ENDED, Settings, Sweep, Trial

_LOOK_S = 0.2
_LOOK_AT_METRICS_S = 2.0
_PR_SET_PDEATHSIG = 1

Show = Callable[[Sequence[Trial], bool], None]
"""A function that shows the trials; True if the state of one has changed."""


@dataclass
class Runner:
    """The processes of a sweep on this machine."""

    sweep: Sweep
    settings: Settings
    space: Space
    source: Source
    trials: list[Trial]
    at_once: int
    devices: Sequence[Sequence[int]]
    """GPUs of each trial that runs at the same time; empty on CPUs and on several hosts."""
    show: Show
    arguments: Sequence[str] = ()
    """Options of each trial's command line, as `--force`."""
    again: bool = False
    """True to resume failed trials once more."""
    _active: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _places: dict[str, int] = field(default_factory=dict)
    _done: set[str] = field(default_factory=set)
    """Trials that this process does not start again."""
    _looked: float = 0.0

    def run(self, signals: Signals) -> bool:
        """Run all trials; False if a signal came before the last has ended."""
        stopped = False
        self._settle()
        while True:
            changed = self._collect()
            if signals.first is not None and not stopped:
                stopped = True
                for process in self._active.values():
                    process.terminate()
            if not stopped:
                changed |= self._start()
                changed |= self._prune()
            self.show(self.trials, changed)
            if not self._active and (stopped or not changed):
                return not stopped
            time.sleep(_LOOK_S)

    def _settle(self) -> None:
        """Tell the source of trials that ended when no process of a sweep followed them."""
        for trial in self.trials:
            state = self.sweep.state(trial)
            if state in ENDED and not (self.again and state == "failed"):
                self._done.add(trial.name)
                self.source.ended(trial, state)

    def _start(self) -> bool:
        """Start trials while there is room; True if one was started."""
        started = False
        while len(self._active) < self.at_once:
            trial = self._next()
            if trial is None:
                break
            started = True
            place = min(set(range(self.at_once)) - set(self._places.values()))
            self._places[trial.name] = place
            self._active[trial.name] = self._launch(trial, place)
        return started

    def _next(self) -> Trial | None:
        """Return a trial that has not ended, or a new one."""
        for trial in self.trials:
            if trial.name not in self._done and trial.name not in self._active:
                return trial
        new = self.source.next(self.trials)
        if new is not None:
            self.trials.append(new)
            self.sweep.write(self.settings, self.trials)
        return new

    def _launch(self, trial: Trial, place: int) -> subprocess.Popen[bytes]:
        """Start a trial's launcher, or resume its run. It receives SIGTERM when this process dies."""
        run = self.sweep.run(trial)
        if run.config.exists():
            words = ["resume", str(run.path), *self.arguments]
        else:
            words = ["train", *self.space.words(trial.values)]
            words += [
                f"run.name={_quoted(trial.name)}",
                f"run.root={_quoted(str(self.sweep.runs))}",
            ]
            words += ["--config-dir", self.settings.config_dir] if self.settings.config_dir else []
            words += self.arguments
        with self.sweep.log(trial).open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "nanoscale", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(self.devices[place] if self.devices else None),
                start_new_session=True,  # Ctrl-C is for this process, which tells the trials
                preexec_fn=_stop_with_parent,
            )

    def _collect(self) -> bool:
        """Take note of trials that have ended; True if one has."""
        ended = [name for name, process in self._active.items() if process.poll() is not None]
        for name in ended:
            del self._active[name], self._places[name]
            trial = next(one for one in self.trials if one.name == name)
            self._done.add(name)
            state = self.sweep.state(trial)
            if state in ENDED:  # a sampler's interrupted trial stays open until it is resumed
                self.source.ended(trial, state)
        return bool(ended)

    def _prune(self) -> bool:
        """Stop trials that the pruner gives up; True if there is one."""
        if time.monotonic() - self._looked < _LOOK_AT_METRICS_S:
            return False
        self._looked = time.monotonic()
        pruned = False
        for number, trial in enumerate(self.trials):
            if trial.name in self._active and not trial.pruned and self.source.hopeless(trial):
                self.trials[number] = replace(trial, pruned=True)
                self.sweep.write(self.settings, self.trials)
                self._active[trial.name].terminate()
                pruned = True
        return pruned


def _environment(devices: Sequence[int] | None) -> Mapping[str, str]:
    if devices is None:
        return os.environ
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = [visible[it] if len(visible) > it and visible[it] else str(it) for it in devices]
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(names)}


def _stop_with_parent() -> None:
    """Receive SIGTERM, on which a launcher saves and stops, when the sweep's process dies (Linux: prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _quoted(text: str) -> str:
    """Return a text as a value in Hydra's grammar."""
    from nanoscale.config.violations import quoted

    return quoted(text)


def log_tail(path: Path, lines: int) -> list[str]:
    """Return the last lines of a trial's log."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
    except OSError:
        return []
