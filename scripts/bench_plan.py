"""The planner held against published measurements, as assumed and calibrated: `make bench-plan`.

    python -m scripts.bench_plan [PUBLISHED_MEASUREMENTS.CSV] [--no-save]

Every source is held out once: what its devices reach is learned, as `nanoscale plan --calibrate` learns it,
from the other sources of the same device, and both predictions of its own rows stand side by side. Memory has
nothing to calibrate. The table is kept under benchmarks/results/, without the rows.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

from nanoscale.config.derive import derive
from nanoscale.plan.calibration import NOTHING, Calibration, Observation, calibrate, predicted
from nanoscale.plan.hardware import Hardware, hardware_of
from scripts import plan_memory, plan_time

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
NAMES = {
    "A100 40GB": "MPT, llm-foundry, A100 40 GB",
    "A100 80GB": "MPT, llm-foundry, A100 80 GB",
    "H100 80GB BF16 (Large": "MPT, llm-foundry, H100, many GPUs",
    "H100 80GB BF16": "MPT, llm-foundry, H100",
    "H100 80GB FP8": "MPT, llm-foundry, H100, fp8",
    "SC21": "Megatron-LM, SC21",
    "Korthikanti": "Megatron-LM, Korthikanti et al.",
    "202412": "torchtitan, 2024-12",
    "torchtitan": "torchtitan, 2024-08",
    "SimuMax": "Megatron-LM, SimuMax",
}
"""what a source is called, by what its name holds; the first that fits"""
MOST_ROWS = 24
"""of a source that are learned from, evenly picked: none drowns the others"""


@dataclass(frozen=True)
class Errors:
    """Relative errors of some rows."""

    rows: int
    mean: float
    worst: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> Errors:
        return cls(len(errors), mean(map(abs, errors)), max(errors, key=abs))


@dataclass(frozen=True)
class Speed:
    """A source, held out."""

    source: str
    device: str
    assumed: Errors
    calibrated: Errors | None
    """None where no other source has the device"""
    learned_from: int
    """rows"""
    efficiency: dict[str, float]
    """factors on what was assumed"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("csv", nargs="?", type=Path, default=plan_time.DEFAULT)
    parser.add_argument("--no-save", action="store_true", help="only print the table")
    options = parser.parse_args()
    if not options.csv.is_file():
        print(f"skipped: there is no {options.csv.name} in {options.csv.parent.resolve()}")
        return
    observed = observations(options.csv)
    speeds = [held_out(observed, source) for source in observed]
    memory = memory_errors(options.csv)
    text = render(speeds, memory)
    print(text)
    if not options.no_save:
        save(speeds, memory, text)


def observations(path: Path) -> dict[str, list[Observation]]:
    """What can be read of the table, by source."""
    machines: dict[str, Hardware] = {}
    found = defaultdict[str, list[Observation]](list)
    for row in plan_time.read(path)[0]:
        machine = repr((row.config.cluster, row.config.precision))
        if machine not in machines:
            machines[machine] = hardware_of(row.config)
        sizes = derive(row.config)
        seconds = sizes.tokens_per_step / (row.measured * sizes.world_size)
        found[name_of(row.source)].append(
            Observation(row.label, row.config, machines[machine], seconds)
        )
    return dict(found)


def name_of(source: str) -> str:
    return next(name for part, name in NAMES.items() if part in source)


def held_out(observed: dict[str, list[Observation]], source: str) -> Speed:
    """A source as assumed, and as learned from the others of its device."""
    mine = observed[source]
    device = mine[0].hardware.device
    others = [
        row
        for name, rows in observed.items()
        if name != source
        for row in evenly(rows)
        if row.hardware.device == device
    ]
    if not others:
        return Speed(source, device, Errors.of(off(mine, NOTHING)), None, 0, {})
    learned = calibrate(others)
    return Speed(
        source,
        device,
        Errors.of(off(mine, NOTHING)),
        Errors.of(off(mine, learned)),
        len(others),
        learned.factors,
    )


def evenly(rows: list[Observation]) -> list[Observation]:
    count = min(MOST_ROWS, len(rows))
    return [rows[place * len(rows) // count] for place in range(count)]


def off(rows: list[Observation], learned: Calibration) -> list[float]:
    """Predicted over measured tokens/s, less 1."""
    return [row.seconds / predicted(row, learned) - 1 for row in rows]


def memory_errors(path: Path) -> dict[str, Errors]:
    """Of each source that states its memory."""
    by_source = defaultdict[str, list[float]](list)
    for one in plan_memory.compare(path):
        by_source[one.source].append(one.error)
    return {source: Errors.of(errors) for source, errors in by_source.items()}


def render(speeds: list[Speed], memory: dict[str, Errors]) -> str:
    width = max(len(speed.source) for speed in speeds)
    lines = [
        f"{'tokens/s of':{width}} {'device':8} {'rows':>4}  {'as assumed':>14}  {'calibrated':>14}  "
        "learned from"
    ]
    for speed in speeds:
        calibrated, how = f"{'':>14}", "no other source has this device"
        if speed.calibrated is not None:
            factors = ", ".join(f"{name} {factor:.2f}" for name, factor in speed.efficiency.items())
            calibrated, how = shown(speed.calibrated), f"{speed.learned_from} rows: {factors}"
        rows = speed.assumed.rows
        lines.append(
            f"{speed.source:{width}} {speed.device:8} {rows:4}  {shown(speed.assumed)}  {calibrated}  {how}"
        )
    held = [speed for speed in speeds if speed.calibrated is not None]
    for name, some in (("all", speeds), ("those held out", held)):
        lines.append(f"{name:{width}} {'':8} {total(some)}")
    lines += ["", f"{'memory of':{width}} {'':8} {'rows':>4}  {'':>14}"]
    for source, errors in memory.items():
        lines.append(f"{source:{width}} {'':8} {errors.rows:4}  {shown(errors)}")
    lines += ["", *verdict(held)]
    return "\n".join(lines)


def shown(errors: Errors) -> str:
    """Mean size, and the largest error with its sign: above 0, the plan promises too much."""
    return f"{errors.mean:6.1%} {errors.worst:+7.1%}"


def total(speeds: list[Speed]) -> str:
    rows = sum(speed.assumed.rows for speed in speeds)
    means = [sum(speed.assumed.mean * speed.assumed.rows for speed in speeds) / rows]
    if all(speed.calibrated is not None for speed in speeds):
        means.append(
            sum(s.calibrated.mean * s.calibrated.rows for s in speeds if s.calibrated) / rows
        )
    return f"{rows:4}  " + "          ".join(f"{value:6.1%}" for value in means)


def verdict(held: list[Speed]) -> list[str]:
    """Plainly, where calibration makes it worse."""
    worse = [
        f"  {speed.source}: {speed.assumed.mean:.1%} as assumed, {speed.calibrated.mean:.1%} calibrated"
        for speed in held
        if speed.calibrated is not None and speed.calibrated.mean > speed.assumed.mean
    ]
    return [
        "worse calibrated than as assumed:"
        if worse
        else "nowhere worse calibrated than as assumed",
        *worse,
    ]


def save(speeds: list[Speed], memory: dict[str, Errors], text: str) -> None:
    day = time.strftime("%Y-%m-%d")
    about = {
        "date": day,
        "python": platform.python_version(),
        "tokens_per_s": [asdict(speed) for speed in speeds],
        "memory": {source: asdict(errors) for source, errors in memory.items()},
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{day}-plan.json").write_text(json.dumps(about, indent=1) + "\n")
    (RESULTS / f"{day}-plan.txt").write_text(text + "\n")


if __name__ == "__main__":
    main()
