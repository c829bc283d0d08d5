"""Experiment trackers: Weights & Biases and MLflow, as sinks of a run's metrics.

A tracker has one run of its own for all attempts of a run here; trackers.json keeps its identity and the last
step that it has received. It works in a thread: a slow or failing tracker delays no training and ends none.
"""

import json
import logging
import os
import queue
import re
import shlex
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from nanoscale.common.credentials import without_credentials
from nanoscale.config.reference import flat
from nanoscale.config.schema import Config
from nanoscale.runs import events, fence, jsonlines, status
from nanoscale.runs.changes import current_tags
from nanoscale.runs.directory import RunDirectory, read_json, write_atomically

Record = dict[str, Any]
CLOSE_S = {"completed": 60.0, "stopped": 10.0, "failed": 3.0}
"""The time that the end of a training waits for its trackers, by outcome, s: a failure is reported after it."""
START_S = 60.0
"""The time that a tracker's server may take to answer at the start, s."""
_FILE = Lock()
"""Held while trackers.json changes: each tracker has a thread."""
_QUEUE_LENGTH = 100_000
"""The most records that wait for a tracker."""
_NOT_SENT = ("launcher.env", "launcher.pass_env", "launcher.slurm.setup", "launcher.batch.setup")
"""Keys whose values are the environment's, and may be secrets."""
_MLFLOW_TEXT = 6000
"""MLflow's limit of a parameter's characters."""
_MLFLOW_STATUS = {"completed": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_MLFLOW_BATCH = 100
"""MLflow's limit of the parameters in a request."""


@dataclass
class TrackerState:
    """The content of trackers.json for one tracker."""

    id: str | None = None
    """The tracker's own name of its run; None before there is one."""
    step: int = 0
    """The last step that it has received."""


@dataclass(frozen=True)
class Subject:
    """The run that is tracked."""

    run: RunDirectory
    config: Config
    workspace: Path
    """The folder of the run's attempt."""
    attempt: int

    @property
    def user_tags(self) -> list[str]:
        """The user's own tags."""
        return current_tags(self.run, self.config.run.tags)

    @property
    def tags(self) -> dict[str, str]:
        """Tags by name: the run and its source."""
        environment: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            environment = read_json(self.run.environment)
        tags = {
            "nanoscale.run": str(self.run.path),
            "nanoscale.attempt": str(self.attempt),
            "nanoscale.version": str(environment.get("nanoscale", "")),
            "torch.version": str(environment.get("packages", {}).get("torch", "")),
            "host": str(environment.get("host", "")),
        }
        return {name: value for name, value in tags.items() if value}

    def values(self) -> dict[str, Any]:
        """Return the configuration as nested mappings, without values that may be secrets."""
        values = asdict(self.config)
        for key in _NOT_SENT:
            *sections, leaf = key.split(".")
            section = values
            for name in sections:
                section = section[name]
            section.pop(leaf)
        return values


@dataclass
class Background:
    """A tracker in a thread of its own. Its first failure is an event of the run, and it receives no more.

    Steps before the resumed one that the tracker has not received are sent from metrics.jsonl.
    """

    name: str
    subject: Subject
    tracker: "Wandb | MLflow"
    first: int
    """The step from which the training continues; earlier ones are in metrics.jsonl."""
    _queue: queue.Queue[Callable[[], None] | None] = field(
        default_factory=lambda: queue.Queue(_QUEUE_LENGTH)
    )
    _failed: bool = False
    _outcome: str = "failed"
    _sent: int = 0

    def __post_init__(self) -> None:
        self._thread = Thread(target=self._run, name=f"tracker {self.name}", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        self._put(lambda: self._send(record))

    def flush(self) -> None:
        """Note how far the tracker has come, without waiting for it: metrics.jsonl survives a crash."""
        self._put(self._save_state)

    def close(self, outcome: str) -> None:
        self._outcome = outcome
        self._put(None)
        self._thread.join(CLOSE_S[outcome])
        if self._thread.is_alive():
            self._report(
                f"was still sending {CLOSE_S[outcome]:.0f} s after the training; "
                "the steps that are missing there are in metrics.jsonl"
            )

    def _put(self, task: Callable[[], None] | None) -> None:
        if self._failed:
            return
        try:
            self._queue.put_nowait(task)
        except queue.Full:
            self._failed = True
            self._report(
                f"cannot keep up: {_QUEUE_LENGTH:,} steps wait for it. It receives no more of this attempt"
            )

    def _run(self) -> None:
        try:
            self._state = TrackerState(**_states(self.subject.run).get(self.name, {}))
            self._sent = self.tracker.open(self._state)
            self._save_state()
            address = without_credentials(self.tracker.address())
            events.append(self.subject.run, "tracker", f"{self.name}: {address}")
            for record in jsonlines.read(self.subject.run.metrics):
                if record["step"] <= self.first:
                    self._send(record)
            while (task := self._queue.get()) is not None:
                task()
            self._save_state()
            self.tracker.close(self._outcome)
        except fence.FencedError:
            self._failed = True  # the ranks find out by themselves
        except Exception as error:
            self._failed = True
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            self._report(f"failed ({first}); the training continues without it")

    def _send(self, record: Record) -> None:
        if record["step"] > self._sent:
            self.tracker.write(record)
            self._sent = record["step"]

    def _save_state(self) -> None:
        """Keep the identity and the position of the tracker's run in trackers.json."""
        self._state.step = self._sent
        fence.require(self.subject.workspace)
        run = self.subject.run
        with _FILE:
            states = _states(run) | {self.name: asdict(self._state)}
            text = f"{json.dumps(states, indent=2)}\n"
            write_atomically(run.trackers, text, self.subject.workspace)

    def _report(self, problem: str) -> None:
        with suppress(OSError):
            text = without_credentials(f"{self.name} {problem}")
            events.append(self.subject.run, "tracker", text)


class Wandb:
    """Weights & Biases, online or offline; its files are in the run folder's `wandb/`."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject

    def open(self, state: TrackerState) -> int:
        """Begin or continue the tracker's run, set `state.id`, and return the last step that it has."""
        import wandb

        run, logger = self._subject.run, self._subject.config.logger
        state.id = state.id or uuid.uuid4().hex[:16]
        self._run = wandb.init(
            mode="offline" if logger.wandb == "offline" else "online",
            dir=str(run.path),
            project=logger.project,
            entity=logger.wandb_entity,
            id=state.id,
            resume="allow",
            name=run.name,
            tags=self._subject.user_tags,
            config=self._subject.values() | {"provenance": self._subject.tags},
            allow_val_change=True,
            settings=wandb.Settings(
                console="off",  # the logs of the ranks are in the run folder
                silent=True,
                disable_git=True,  # the address of a remote may hold a password
                disable_code=True,
                x_save_requirements=False,
                init_timeout=START_S,
            ),
        )
        return max(state.step, self._run.step - 1)

    def write(self, record: Record) -> None:
        self._run.log(_figures(record), step=record["step"])

    def close(self, outcome: str) -> None:
        self._run.finish(exit_code=int(outcome == "failed"))

    def address(self) -> str:
        if self._subject.config.logger.wandb == "offline":
            folder = shlex.quote(str(Path(self._run.dir).parent))
            return f"offline; to upload it: wandb sync {folder}"
        return str(self._run.url)


_ORIGIN = "nanoscale.origin"


class MLflow:
    """MLflow: a tracking server, or an SQLite file next to the runs."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject

    def open(self, state: TrackerState) -> int:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
        from mlflow import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        subject = self._subject
        self._uri = mlflow_uri(subject.config, subject.run)
        self._client = MlflowClient(tracking_uri=self._uri)
        if state.id is None:
            origin = self._origin().replace("'", "''")
            wanted = f"tags.`{_ORIGIN}` = '{origin}'"
            begun = self._client.search_runs([self._experiment()], wanted, max_results=1)
            state.id = str(begun[0].info.run_id) if begun else None
        if state.id is None:
            state.id = self._client.create_run(
                self._experiment(), run_name=subject.run.name, tags={_ORIGIN: self._origin()}
            ).info.run_id
        else:
            self._client.update_run(state.id, status="RUNNING")
        self._id = state.id
        self._describe()
        steps = [metric.step for metric in self._client.get_metric_history(self._id, "loss")]
        return max([state.step, *steps])

    def _origin(self) -> str:
        """Return the value of a tag. It identifies the run if a kill came before its number was written."""
        run = self._subject.run
        return f"{run.path} {status.read(run).created}"

    def _experiment(self) -> str:
        name = self._subject.config.logger.project
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            return str(experiment.experiment_id)
        from mlflow.exceptions import MlflowException

        try:
            return str(self._client.create_experiment(name))
        except MlflowException:  # another run has just created it
            experiment = self._client.get_experiment_by_name(name)
            if experiment is None:
                raise
            return str(experiment.experiment_id)

    def _describe(self) -> None:
        """Send the configuration; a parameter that has changed since the first attempt becomes a tag."""
        from mlflow.entities import Param, RunTag

        parameters = {
            name: str(value)[:_MLFLOW_TEXT] for name, value in flat(self._subject.values()).items()
        }
        stored = self._client.get_run(self._id).data.params
        new = [Param(name, value) for name, value in parameters.items() if name not in stored]
        tags = self._subject.tags | dict.fromkeys(self._subject.user_tags, "true")
        tags |= {
            f"resumed.{name}": value
            for name, value in parameters.items()
            if stored.get(name, value) != value
        }
        for first in range(0, len(new), _MLFLOW_BATCH):
            self._client.log_batch(self._id, params=new[first : first + _MLFLOW_BATCH])
        self._client.log_batch(self._id, tags=[RunTag(*pair) for pair in tags.items()])

    def write(self, record: Record) -> None:
        from mlflow.entities import Metric

        timestamp_ms = int(record.get("time", time.time()) * 1000)
        figures = _figures(record).items()
        self._client.log_batch(
            self._id,
            metrics=[Metric(name, value, timestamp_ms, record["step"]) for name, value in figures],
        )

    def close(self, outcome: str) -> None:
        self._client.set_terminated(self._id, _MLFLOW_STATUS[outcome])

    def address(self) -> str:
        return f"run {self._id} in {re.sub('//[^/@]*@', '//', self._uri)}"  # without a password


TRACKERS: dict[str, type[Wandb | MLflow]] = {"wandb": Wandb, "mlflow": MLflow}
"""The trackers by their keys of `logger`, whose value "off" leaves a tracker out."""


def open_trackers(subject: Subject, step: int) -> list[Background]:
    """Open the trackers of a run's configuration, for a training that continues after `step`."""
    return [
        Background(name, subject, tracker(subject), step)
        for name, tracker in TRACKERS.items()
        if getattr(subject.config.logger, name) != "off"
    ]


def mlflow_uri(config: Config, run: RunDirectory) -> str:
    """Return where MLflow records: `logger.mlflow_uri`, MLFLOW_TRACKING_URI, or a file next to the runs."""
    configured = config.logger.mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI")
    return configured or f"sqlite:///{run.path.parent / 'mlflow.db'}"


def _figures(record: Record) -> dict[str, float]:
    """Return the figures of a record that trackers draw."""
    return {
        name: float(value)
        for name, value in record.items()
        if name not in ("step", "time") and isinstance(value, (int, float))
    }


def _states(run: RunDirectory) -> dict[str, Any]:
    """Return the content of trackers.json, by tracker."""
    try:
        content = read_json(run.trackers)
    except FileNotFoundError:
        return {}
    return content if isinstance(content, dict) else {}
