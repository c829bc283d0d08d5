"""The upload of a run's checkpoints in a thread of rank 0: no failure of it delays or ends the training."""

import shlex
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

from nanoscale.checkpoint.remote import RemoteCheckpoints
from nanoscale.checkpoint.store import DamagedCheckpointError, StoredCheckpoint, list_checkpoints
from nanoscale.common.object_storage import first_line
from nanoscale.runs import events, fence
from nanoscale.runs.directory import RunDirectory

CLOSE_S = {"completed": 300.0, "stopped": 60.0, "failed": 0.0}
"""The longest wait for uploads at the end of a training, by outcome, s: half of the default
`launcher.collective_timeout_s` and of `launcher.stop_grace_s`."""
_LONGEST_PAUSE_S = 60.0


class Uploader:
    """A thread that uploads all checkpoints on disk, the newest first, and repeats what fails."""

    def __init__(self, workspace: Path, address: str) -> None:
        self._workspace, self._address = workspace, address
        self._run_directory = RunDirectory(workspace.parents[1])
        self._done: set[int] = set()
        self._failures, self._closing, self._wake = 0, False, Event()
        self.current: int | None = None
        """The step that is being uploaded, which must not be deleted meanwhile."""
        self._thread = Thread(target=self._run, name="upload", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Look for a new checkpoint."""
        self._wake.set()

    def close(self, outcome: str) -> None:
        """Wait for the uploads, within the limit of the outcome, and report what is missing."""
        self._closing = True
        self._wake.set()
        self._thread.join(CLOSE_S[outcome])
        if self._thread.is_alive() and outcome != "failed":
            names = ", ".join(stored.path.name for stored in self._pending())
            command = f"nanoscale resume {shlex.quote(str(self._run_directory.path))}"
            self._report(
                f"not uploaded within {CLOSE_S[outcome]:g} s: {names}; to upload: {command}"
            )

    def _run(self) -> None:
        with suppress(fence.FencedError):  # the ranks find out by themselves
            while True:
                self._wake.clear()
                pending = self._pending()
                if pending:
                    pause_s = self._try(pending[-1])
                elif self._closing:
                    return
                if not pending or pause_s:
                    self._wake.wait(pause_s if pending else None)

    def _pending(self) -> list[StoredCheckpoint]:
        stored = list_checkpoints(self._workspace.parent)
        return [checkpoint for checkpoint in stored if checkpoint.step not in self._done]

    def _try(self, stored: StoredCheckpoint) -> float:
        """Upload a checkpoint; return the pause before it is repeated, s; 0 if it is not."""
        self.current = stored.step
        try:
            remote = RemoteCheckpoints(self._address, self._run_directory.name)
            if remote.upload(stored.path, lambda: fence.require(self._workspace)):
                self._report(f"{stored.path.name} uploaded to {self._address}", step=stored.step)
            remote.withdraw_after(list_checkpoints(self._workspace.parent)[-1].step)
            self._failures = 0
        except fence.FencedError:
            raise
        except Exception as error:
            if not stored.path.exists():  # deleted, as a newer one has replaced it
                return 0.0
            problem = f"{stored.path.name} was not uploaded ({first_line(error)})"
            if not isinstance(error, DamagedCheckpointError):
                self._failures += 1
                pause_s = min(2.0**self._failures / 2, _LONGEST_PAUSE_S)
                self._report(f"{problem}; the next attempt is in {pause_s:g} s", step=stored.step)
                return pause_s
            self._report(f"{problem}: it is damaged", step=stored.step)
        finally:
            self.current = None
        self._done.add(stored.step)
        return 0.0

    def _report(self, message: str, **fields: int) -> None:
        fence.require(self._workspace)
        events.append(self._run_directory, "upload", message, **fields)
