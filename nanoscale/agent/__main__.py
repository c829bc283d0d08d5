"""`python -m nanoscale.agent RUN_DIR`."""

import atexit
import os
import sys

from nanoscale.agent.main import main

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m nanoscale.agent RUN_DIR")
    code = main(sys.argv[1])
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # taking torch apart module by module would cost half a second
