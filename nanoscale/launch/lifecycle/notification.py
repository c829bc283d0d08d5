"""Notifications: each change of a run's state, posted to an address of the user."""

import json
import os
import socket
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from urllib.error import HTTPError

from nanoscale.common.errors import UserError
from nanoscale.config.schema import Launcher
from nanoscale.runs import metrics
from nanoscale.runs.directory import RunDirectory

_LIMIT_S = 10.0
"""The time for one message, and for all messages on their way when the launcher ends."""
_FIRST_CHARACTERS = 2000


class Notifier:
    """A sender of messages, one after another, that never delays or ends the run.

    Args:
        note: called with a sentence if a message could not be delivered.
    """

    def __init__(self, launcher: Launcher, run: RunDirectory, note: Callable[[str], None]) -> None:
        self._address = os.environ.get(launcher.notify or "", "")
        self._run, self._note = run, note
        self._last: Thread | None = None

    def send(self, state: str, message: str, exit_code: int | None = None) -> None:
        """Send a message, after the previous ones; do nothing without an address."""
        if not self._address:
            return
        last = None
        with suppress(UserError):  # a damaged file
            last = metrics.last(self._run)
        about = {
            "text": f"{self._run.name} {state}: {message}"[:_FIRST_CHARACTERS],
            "run": self._run.name,
            "path": str(self._run.path),
            "host": socket.gethostname(),
            "state": state,
            "message": message,
            "step": last["step"] if last else 0,
            "exit_code": exit_code,
            "time": time.time(),
        }
        self._last = Thread(target=self._post, args=(about, self._last), daemon=True)
        self._last.start()

    def finish(self) -> None:
        """Wait for the messages that are on their way, for a limited time."""
        if self._last is not None:
            self._last.join(_LIMIT_S)

    def _post(self, about: dict[str, object], previous: Thread | None) -> None:
        if previous is not None:
            previous.join()
        data, headers = json.dumps(about).encode(), {"Content-Type": "application/json"}
        try:
            request = urllib.request.Request(self._address, data, headers)
            with urllib.request.urlopen(request, timeout=_LIMIT_S):
                pass
        except Exception as error:  # its text may have parts of the address, which may be a secret
            why = _reason(error)
            self._note(f"the message that the run is {about['state']} was not delivered: {why}")


def _reason(error: BaseException) -> str:
    """Return why a message was not delivered, without a part of the address."""
    if isinstance(error, HTTPError):
        return f"the server answered {error.code}"
    inner = getattr(error, "reason", error)
    return getattr(inner, "strerror", None) or type(inner).__name__
