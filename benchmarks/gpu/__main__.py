"""Run parts of the benchmark; `benchmarks.gpu` says how."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks import gpu
from benchmarks.gpu import wheels

TINY_S = 8.0
"""The least seconds of a row of a toy model."""


def main() -> None:
    began = time.monotonic()
    wheels.install_missing()
    # They import packages that may have been missing until now.
    from benchmarks.gpu.parts import MACHINE, PARTS, Bench
    from benchmarks.gpu.predictions import newest
    from benchmarks.gpu.session import CLOSING_S, Session
    from benchmarks.gpu.table import ratios, render

    arguments = parse(tuple(PARTS))
    if arguments.tiny:
        os.environ["OMP_NUM_THREADS"] = "1"
    if arguments.show:
        print(render([json.loads(Path(file).read_text()) for file in arguments.show]))
        return
    folder = Path(arguments.out or os.environ.get("OUT") or wheels.ROOT / "benchmarks" / "results")
    folder.mkdir(parents=True, exist_ok=True)
    day = time.strftime("%Y-%m-%d")
    name = "-".join([day, "gpu", *(["tiny"] if arguments.tiny else []), *arguments.parts])
    with tempfile.TemporaryDirectory() as runs:
        session = Session(began + 60 * arguments.minutes - CLOSING_S, folder / name)
        session.about["date"] = day
        bench = Bench(session, Path(runs), arguments.tiny)
        chosen = [it for part in arguments.parts for it in PARTS[part]]
        for one in (MACHINE, *sorted(chosen, key=lambda it: it.peer)):
            row = session.measure(
                one.what,
                partial(one.act, bench),
                limit_s=one.limit_s or arguments.limit,
                needed_s=min(one.needed_s, TINY_S) if arguments.tiny else one.needed_s,
            )
            if one is MACHINE:
                if "why" in row:
                    sys.exit("\n".join(["nothing can be measured here", *row.get("log", ())]))
                session.about |= {name: row[name] for name in ("device", "driver", "versions")}
                session.predictions = newest(row["device"])
    session.about["seconds"] = round(time.monotonic() - began)
    session.save()
    for name, ratio in ratios(session.rows):
        print(f"{name:52}{ratio:6.3f}")
    print(f"{session.about['seconds']} s; figures are in {session.results}.json and .txt")


def parse(parts: tuple[str, ...]) -> argparse.Namespace:
    summary, *_, details = gpu.__doc__.split("\n\n")
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=summary, epilog=details)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(parts))
    parser.add_argument("--minutes", type=float, default=14.0, help="for the whole call (14)")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds of a training (180)")
    parser.add_argument("--tiny", action="store_true", help="toy models on the CPU: a dry run")
    parser.add_argument("--out", help="folder of the figures")
    parser.add_argument("--show", nargs="+", metavar="FILE", help="print files of figures as one")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(parts):
        parser.error(f"unknown part {', '.join(sorted(unknown))}; choose from {', '.join(parts)}")
    if not arguments.parts and not arguments.show:
        parser.error(f"name the parts to measure: {', '.join(parts)}")
    return arguments


if __name__ == "__main__":
    main()
