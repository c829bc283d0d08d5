"""The planner compared with published measurements, as assumed and calibrated: `make bench-plan`.

    python -m benchmarks.plan [--no-save]

Every source is held out once: its devices' efficiencies are calibrated, as by `nanoscale plan --calibrate`, on
the other sources of the same device, first with the same software, then on all, and the errors on its
own rows are compared. Memory has nothing to calibrate. The table, without the rows, is stored under
benchmarks/results/.
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

from benchmarks.plan import published_memory, published_speed
from nanoscale.plan.calibration import NOTHING, Calibration, Observation, calibrate, predicted
from nanoscale.plan.hardware.hardware import Hardware, hardware_of

RESULTS = Path(__file__).resolve().parents[1] / "results"
NAMES = {
    "A100 40GB": "llm-foundry, A100 40 GB",
    "A100 80GB": "llm-foundry, A100 80 GB",
    "H100 80GB BF16 (Large": "llm-foundry, H100, many GPUs",
    "H100 80GB BF16": "llm-foundry, H100",
    "H100 80GB FP8": "llm-foundry, H100, fp8",
    "SC21": "Megatron-LM, SC21",
    "Korthikanti": "Megatron-LM, Korthikanti et al.",
    "202412": "torchtitan, 2024-12",
    "torchtitan": "torchtitan, 2024-08",
    "SimuMax": "Megatron-LM, SimuMax",
}
"""Software and other marks of sources, by parts of their names; the first match counts."""
MOST_ROWS = 24
"""The most rows of a source that are used for calibration, evenly picked, so that none dominates."""


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
class Learned:
    """A source, predicted with efficiencies calibrated on others."""

    errors: Errors
    rows: int
    """The number of rows used for calibration."""
    factor: float
    """Factors on the assumed efficiencies."""


@dataclass(frozen=True)
class Speed:
    """A source, held out; null if there is nothing to calibrate on."""

    source: str
    device: str
    assumed: Errors
    same_software: Learned | None
    any_software: Learned | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-save", action="store_true", help="only print the table")
    options = parser.parse_args()
    observed = observations()
    speeds = [held_out(observed, source) for source in observed]
    memory = memory_errors()
    text = render(speeds, memory)
    print(text)
    if not options.no_save:
        save(speeds, memory, text)


def observations() -> dict[str, list[Observation]]:
    """Return the rows of the table, by source."""
    machines: dict[str, Hardware] = {}
    found = defaultdict[str, list[Observation]](list)
    for row in published_speed.read():
        machine = repr((row.config.cluster, row.config.precision))
        if machine not in machines:
            machines[machine] = hardware_of(row.config)
        seconds = row.config.tokens_per_step / (row.measured * row.config.world_size)
        found[name_of(row.source)].append(
            Observation(row.label, row.config, machines[machine], seconds)
        )
    return dict(found)


def name_of(source: str) -> str:
    return next(name for part, name in NAMES.items() if part in source)


def held_out(observed: dict[str, list[Observation]], source: str) -> Speed:
    """Return a source's errors as assumed, and as calibrated on the others of its device."""
    mine = observed[source]
    device = mine[0].hardware.device
    others = [name for name in observed if name != source]
    same = [name for name in others if software(name) == software(source)]
    return Speed(
        source,
        device,
        Errors.of(off(mine, NOTHING)),
        *(
            learned(mine, [row for name in some for row in evenly(observed[name])])
            for some in (same, others)
        ),
    )


def learned(mine: list[Observation], rows: list[Observation]) -> Learned | None:
    rows = [row for row in rows if row.hardware.device == mine[0].hardware.device]
    if not rows:
        return None
    found = calibrate(rows)
    return Learned(Errors.of(off(mine, found)), len(rows), found.factor)


def software(source: str) -> str:
    return source.partition(",")[0]


def evenly(rows: list[Observation]) -> list[Observation]:
    count = min(MOST_ROWS, len(rows))
    return [rows[place * len(rows) // count] for place in range(count)]


def off(rows: list[Observation], learned: Calibration) -> list[float]:
    """Return predicted over measured tokens/s, less 1."""
    return [row.seconds / predicted(row, learned) - 1 for row in rows]


def memory_errors() -> dict[str, Errors]:
    """Return the errors of each source that states its memory."""
    by_source = defaultdict[str, list[float]](list)
    for one in published_memory.compare():
        by_source[one.source].append(one.error)
    return {source: Errors.of(errors) for source, errors in by_source.items()}


def render(speeds: list[Speed], memory: dict[str, Errors]) -> str:
    width = max(len(speed.source) for speed in speeds)
    head = f"{'tokens/s of':{width}} {'device':8} {'rows':>4}  {'as assumed':>14}"
    lines = [f"{head}  {'learned from the same software':>30}  {'from any software':>30}"]
    for speed in speeds:
        columns = [taught(one) for one in (speed.same_software, speed.any_software)]
        known = f"{speed.source:{width}} {speed.device:8} {speed.assumed.rows:4}  {shown(speed.assumed)}"
        lines.append(f"{known}  {'  '.join(columns)}")
    lines.append(f"{'all':{width}} {'':8} {total(speeds)}")
    lines += ["", f"{'memory of':{width}} {'':8} {'rows':>4}"]
    for source, errors in memory.items():
        lines.append(f"{source:{width}} {'':8} {errors.rows:4}  {shown(errors)}")
    lines += ["", "mean error, and the largest: above 0, more is promised than was measured"]
    for how in ("same_software", "any_software"):
        lines += verdict(speeds, how)
    return "\n".join(line.rstrip() for line in lines)


def shown(errors: Errors) -> str:
    return f"{errors.mean:6.1%} {errors.worst:+7.1%}"


def taught(one: Learned | None) -> str:
    return (
        f"{'nothing to learn from':>30}"
        if one is None
        else f"{shown(one.errors)} of {one.rows:4} rows   "
    )


def total(speeds: list[Speed]) -> str:
    rows = sum(speed.assumed.rows for speed in speeds)
    return (
        f"{rows:4}  {sum(speed.assumed.mean * speed.assumed.rows for speed in speeds) / rows:6.1%}"
    )


def verdict(speeds: list[Speed], how: str) -> list[str]:
    """Return a summary of all rows that could be held out, and the sources that calibration makes worse."""
    held = [(speed, one) for speed in speeds if (one := getattr(speed, how)) is not None]
    if not held:
        return []
    rows = sum(speed.assumed.rows for speed, _ in held)
    before, after = (
        sum(errors.mean * errors.rows for errors in some) / rows
        for some in ([speed.assumed for speed, _ in held], [one.errors for _, one in held])
    )
    worse = [
        f"  worse with {speed.source}: {speed.assumed.mean:.1%} as assumed, {one.errors.mean:.1%} learned"
        for speed, one in held
        if one.errors.mean > speed.assumed.mean
    ]
    what = f"learned from {how.replace('_', ' ')}"
    return [f"{what}: {rows} rows, {before:.1%} as assumed, {after:.1%} learned", *worse]


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
