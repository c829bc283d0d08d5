"""The entry of `python -m nanoscale.agent`: serve the launcher over the standard streams.

With `--connect HOST:PORT KEY_FILE`, connect to it instead, if the standard streams are not the agent's own.
With `--join FILE SECONDS serve`, connect to the launcher that a file names (`processes/session.py`), and with
`wait` in the place of `serve` only wait for its end.
With `--end-orphans MARK`, end the processes that a lost agent has left here.
"""

import atexit
import os
import sys
from pathlib import Path
from typing import NoReturn

from nanoscale.agent.join import join
from nanoscale.agent.link import Link
from nanoscale.agent.main import main
from nanoscale.processes.lifeline import end_orphans


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
