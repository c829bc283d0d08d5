"""The examples under the help text of each command: the lines of `examples.txt` that begin with it."""

from pathlib import Path

LINES = Path(__file__).with_suffix(".txt").read_text("utf-8").splitlines()


def examples(command: str) -> list[str]:
    """Return lines that can be typed."""
    return [line for line in LINES if f"{line} ".startswith(f"nanoscale {command} ")]


def epilog(command: str) -> str:
    """Return the examples of a command as the end of its help text; `\\b` keeps their lines."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in examples(command))
