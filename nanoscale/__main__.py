"""`python -m nanoscale`."""

from nanoscale.cli.main import main

if __name__ == "__main__":
    main()
