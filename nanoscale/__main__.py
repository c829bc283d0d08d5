"""The command `nanoscale`, also as `python -m nanoscale`."""

import sys


def main() -> None:
    """Run the command line. Ctrl-C during the imports prints no traceback either."""
    try:
        from nanoscale.cli.main import main
    except KeyboardInterrupt:
        sys.exit(130)
    main()


if __name__ == "__main__":
    main()
