"""The entry of `python -m nanoscale.agent`: serve the launcher over the standard streams.

With `--connect HOST:PORT KEY_FILE`, connect to it instead, if the standard streams are not the agent's own.
With `--join FILE SECONDS serve`, connect to the launcher that a file names (`processes/session.py`), and with
`wait` in the place of `serve` only wait for its end.
With `--end-orphans MARK`, end the processes that a lost agent has left here.
"""

import atexit
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

from nanoscale.agent.link import Link
from nanoscale.agent.main import main
from nanoscale.processes.lifeline import end_orphans
from nanoscale.processes.proc import end_with_parent
from nanoscale.processes.session import LONGER_S, LOST_S, STALE_S, Follower, Session

_POLL_S, _PAUSE_S = 0.2, 1.0
_LOST = 1
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def join(path: Path, limit_s: float, *, serves: bool) -> int:
    """Serve the launcher that the file of a session names, or only wait; return the launcher's exit code.

    The launcher decides when the job ends: it learns of signals through the agent.

    Args:
        limit_s: seconds to wait for the launcher.
    """
    agent: subprocess.Popen[bytes] | None = None
    session: Session | None = None

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if session is None:  # there is no launcher that could decide
            sys.exit(128 + number)
        if agent is not None:
            with suppress(OSError):
                agent.send_signal(number)

    for each in _PASSED_ON:
        signal.signal(each, pass_on)
    follower, deadline = Follower(path), time.monotonic() + limit_s
    tried = Session()
    while time.monotonic() < deadline:
        is_alone = agent is not None and agent.poll() is not None  # its launcher may be dead
        joined, session = session is not None, follower.read(LOST_S if is_alone else STALE_S)
        if session is None and joined:
            break
        if session is not None:
            deadline = time.monotonic() + STALE_S
            if session.exit_code is not None:
                time.sleep(LONGER_S)  # the launcher ends first, with its own words
                return session.exit_code
            code = 0 if agent is None else agent.poll()
            starts = code not in (None, 0) or (code == 0 and session != tried)
            if serves and session.addresses and starts:
                time.sleep(_PAUSE_S if code else 0)
                tried = session
                command = [sys.executable, "-P", "-m", "nanoscale.agent", "--connect"]
                agent = subprocess.Popen(
                    [*command, session.addresses, session.key_file],
                    preexec_fn=partial(end_with_parent, signal.SIGKILL),  # this is all of its host
                )
        time.sleep(_POLL_S)
    return _LOST


def _serve(arguments: list[str]) -> int:
    match arguments:
        case []:
            return main(Link.over_standard_streams())
        case ["--connect", address, key_file]:
            try:
                link = Link.over_network(address, Path(key_file))
            except OSError as error:
                sys.exit(
                    f"nanoscale.agent: cannot connect back to the launcher at {address}: {error}"
                )
            return main(link)
        case ["--join", file, limit_s, way]:
            return join(Path(file), float(limit_s), serves=way == "serve")
        case ["--end-orphans", mark]:
            return 1 if end_orphans(mark) else 0
    ways = "--connect HOST:PORT KEY_FILE | --join FILE SECONDS serve|wait | --end-orphans MARK"
    sys.exit(f"usage: python -m nanoscale.agent [{ways}]")


def end(code: int) -> NoReturn:
    """Exit at once: destroying the remaining objects takes time."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    end(_serve(sys.argv[1:]))
