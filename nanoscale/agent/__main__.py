"""`python -m nanoscale.agent`: serve the launcher over the standard streams.

With `--connect ADDRESSES KEY_FILE`, call it back where the standard streams are not the agent's own. With
`--sweep MARK`, end what an agent that is lost has left here.
"""

import atexit
import os
import sys
from pathlib import Path

from nanoscale.agent.link import Link
from nanoscale.agent.main import main
from nanoscale.agent.sweep import sweep


def _serve(arguments: list[str]) -> int:
    match arguments:
        case []:
            return main(Link.over_standard_streams())
        case ["--connect", addresses, key_file]:
            return main(Link.over_network(addresses, Path(key_file)))
        case ["--sweep", mark]:
            return 1 if sweep(mark) else 0
    sys.exit("usage: python -m nanoscale.agent [--connect ADDRESSES KEY_FILE | --sweep MARK]")


if __name__ == "__main__":
    code = _serve(sys.argv[1:])
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # taking torch apart module by module would cost half a second
