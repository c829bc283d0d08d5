"""The output of `nanoscale runs logs`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from nanoscale.common import display
from nanoscale.runs.tail import LineTail

_LOOK_S = 0.1


def print_logs(list_files: Callable[[], Iterable[Path]], goes_on: Callable[[], bool]) -> bool:
    """Print the files, each line with its host and rank, until a run ends; return False without files."""
    tails: dict[Path, LineTail] = {}
    while True:
        more = goes_on()
        for path in list_files():
            _print_lines(path, tails.setdefault(path, LineTail(path)), last=not more)
        if not more:
            return bool(tails)
        time.sleep(_LOOK_S)


def _print_lines(path: Path, tail: LineTail, last: bool) -> None:
    host, ranks, rank = path.stem.rpartition(".rank-")
    prefix = f"{host}:{rank} │ ".encode() if ranks else b""
    for lines in tail.batches():
        display.content(b"".join(prefix + line.rstrip() + b"\n" for line in lines))
    if last and (rest := tail.take_remainder()):
        display.content(prefix + rest.rstrip() + b"\n")
