"""The folder of a sweep: its settings and trials. The states of the trials are in their run directories."""

import csv
import fcntl
import io
import itertools
import os
import shlex
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from nanoscale.common.errors import UserError, Violation
from nanoscale.common.json_text import Json
from nanoscale.processes.scratch import flock
from nanoscale.runs import lock, metrics, status, trust
from nanoscale.runs.directory import RunDirectory, read_json, write_atomically, write_json

Sampler = Literal["grid", "random", "tpe"]
Pruner = Literal["none", "median", "asha"]
ROOT = "sweeps"
"""The folder of sweeps, unless the user names another one."""
State = Literal["waiting", "queued", "running", "interrupted", "completed", "failed", "pruned"]
ENDED: tuple[State, ...] = ("completed", "failed", "pruned")


@dataclass(frozen=True)
class Trial:
    """One run of a sweep."""

    name: str
    values: dict[str, str]
    """The value of each key that differs, as it is typed."""
    pruned: bool = False
    """True if the sampler's pruner has ended it."""


@dataclass(frozen=True)
class Settings:
    """The request of a sweep, which never changes."""

    overrides: list[str]
    """The overrides as they were typed, and the overrides that the options of the launch set."""
    sampler: Sampler = "grid"
    trials: int | None = None
    """Trials of a sampler; None for a grid, which has all combinations."""
    pruner: Pruner = "none"
    metric: str = ""
    """The figure of metrics.jsonl that a sampler minimizes, or maximizes if it is better if higher; empty until
    the trials are checked."""
    seed: int = 0
    config_dir: str | None = None
    slurm: bool = False
    """True if the trials are an array of SLURM jobs."""


def _signed(settings: Settings) -> Json:
    return {"overrides": settings.overrides, "config_dir": settings.config_dir}


@dataclass(frozen=True)
class Sweep:
    """A sweep in its folder `sweeps/NAME`."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def file(self) -> Path:
        return self.path / "sweep.json"

    @property
    def runs(self) -> Path:
        """The folder of the trials' run directories."""
        return self.path / "runs"

    @property
    def storage(self) -> Path:
        """Optuna's database."""
        return self.path / "optuna.db"

    @property
    def resume_command(self) -> str:
        """The command line that runs what is missing, from this process's working directory."""
        default = self.path.parent == Path(ROOT).absolute()
        root = [] if default else ["--root", str(self.path.parent)]
        return shlex.join(["nanoscale", "sweep", "--resume", self.name, *root])

    def log(self, trial: Trial) -> Path:
        """Return the file with the output of a trial's launcher."""
        return self.path / "logs" / f"{trial.name}.log"

    def run(self, trial: Trial) -> RunDirectory:
        return RunDirectory(self.runs / trial.name)

    def create(self, settings: Settings, trials: Sequence[Trial]) -> None:
        """Write a new sweep's folder.

        Raises:
            UserError: the folder exists, or cannot be created.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir()
        except OSError as error:
            raise UserError("usage", f"{self.path}: {error.strerror}") from error
        for folder in ("runs", "logs"):
            (self.path / folder).mkdir()
        self.write(settings, trials)
        trust.sign(self.path, _signed(settings))

    def is_own(self, settings: Settings) -> bool:
        """True if this user made the sweep, with these overrides."""
        return trust.is_signed(self.path, _signed(settings))

    def write(self, settings: Settings, trials: Sequence[Trial]) -> None:
        write_json(
            self.file, {"settings": asdict(settings), "trials": [asdict(one) for one in trials]}
        )

    def read(self) -> tuple[Settings, list[Trial]]:
        """Read what the sweep was asked for and its trials so far.

        Raises:
            UserError: the sweep does not exist, or its file is damaged.
        """
        try:
            content = read_json(self.file)
            return Settings(**content["settings"]), [Trial(**one) for one in content["trials"]]
        except FileNotFoundError:
            others = sorted(path.parent.name for path in self.path.parent.glob("*/sweep.json"))
            message = f"is not a sweep{'; there are ' * bool(others)}{', '.join(others)}"
            advice = tuple(f"--resume {name}" for name in others[:3])
            violation = Violation("--resume", str(self.path), "command line", message, advice)
            raise UserError("usage", f"{self.path} {message}", [violation]) from None
        except (ValueError, TypeError, KeyError) as error:
            raise UserError("usage", f"{self.file} is damaged: {error}") from error

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the sweep for this process.

        Raises:
            UserError: another process holds it.
        """
        handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if not flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB):
                raise UserError("usage", f"another process runs the sweep {self.path}")
            yield
        finally:
            os.close(handle)

    def state(self, trial: Trial) -> State:
        """Return a trial's state, by its run directory."""
        run = self.run(trial)
        if not run.status.exists():
            return "waiting"
        recorded = status.read(run).state
        if lock.owner(run) is not None:
            return "running"
        if trial.pruned:
            return "pruned"
        return recorded if recorded in ("completed", "failed") else "interrupted"

    def row(self, trial: Trial, metric: str = "eval_loss", state: State | None = None) -> Json:
        """Return a trial's values, its state and its newest figures.

        Args:
            metric: a further figure.
            state: replaces the state in the run directory.
        """
        run = self.run(trial)
        last = metrics.last(run) or {}
        row = {
            "trial": trial.name,
            **trial.values,
            "state": state or self.state(trial),
            "step": last.get("step", 0),
            "loss": last.get("loss"),
            "eval_loss": (metrics.last(run, "eval_loss") or {}).get("eval_loss"),
            "tokens_per_s": last.get("tokens_per_s"),
            "memory_gib": last.get("memory_gib"),
        }
        return (
            row if metric in row else row | {metric: (metrics.last(run, metric) or {}).get(metric)}
        )

    def keep_table(self, rows: Sequence[Json]) -> None:
        """Write the table of all trials to results.csv."""
        if not rows:
            return
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(self.path / "results.csv", text.getvalue())


def free_name(name: str, names: Collection[str]) -> str:
    """Return a name for a trial that no other has: with a number if it is used."""
    numbered = (f"{name}-{number}" for number in itertools.count(2))
    return name if name not in names else next(it for it in numbered if it not in names)
