"""The cleanup of processes that hosts may still have of a job whose agent was lost: in parallel, and
briefly."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress

from nanoscale.config.machines import Host
from nanoscale.launch.fleet.processes import Process
from nanoscale.launch.transport.transport import Transport

_LIMIT_S = 3.0
"""Seconds; a host that is off or unreachable would never answer, and its agent exits by itself."""
_PAUSE_S = 0.02


class Sweeps:
    """Short commands over the job's own transport.

    Args:
        environment: the commands' variables in addition to the launcher's.
    """

    def __init__(self, transport: Transport, environment: Mapping[str, str]) -> None:
        self._transport = transport
        self._environment = environment
        self._going_on: list[tuple[Process, float]] = []

    def begin(self, host: Host, mark: str) -> None:
        """End all processes with the mark on a host, if it answers."""
        command = self._transport.cleanup_command(host, mark)
        if command is None:
            return
        environment = {**self._transport.environment(os.environ), **self._environment}
        with suppress(OSError):
            self._going_on.append((Process(command, environment), time.monotonic() + _LIMIT_S))

    def finish(self) -> None:
        """Wait for the running commands, and give up those that take too long."""
        for process, deadline in self._going_on:
            while process.exit_code() is None and time.monotonic() < deadline:
                time.sleep(_PAUSE_S)
            process.kill()
            process.reap()
        self._going_on.clear()
