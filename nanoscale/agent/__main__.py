"""`python -m nanoscale.agent RUN_DIR`."""

import sys

from nanoscale.agent.main import main

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m nanoscale.agent RUN_DIR")
    sys.exit(main(sys.argv[1]))
