"""`python -m nanoscale.agent`; `--connect HOST:PORT KEY_FILE` where its standard streams are not its own."""

import atexit
import os
import sys
from pathlib import Path

from nanoscale.agent.link import Link
from nanoscale.agent.main import main


def _link(arguments: list[str]) -> Link:
    match arguments:
        case []:
            return Link.over_standard_streams()
        case ["--connect", address, key_file]:
            return Link.over_network(address, Path(key_file))
    sys.exit("usage: python -m nanoscale.agent [--connect HOST:PORT KEY_FILE]")


if __name__ == "__main__":
    code = main(_link(sys.argv[1:]))
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # taking torch apart module by module would cost half a second
