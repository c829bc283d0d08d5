"""The regret of choosing by the plan: of the layouts that others published for one job, it takes the one
that it predicts to be the fastest.

    python -m benchmarks.plan.choices

Layouts are of one job if source, software, model, devices, length of the sequence and precision are the same.
Dispatchers, CUDA graphs and Megatron's FSDP are chosen like layouts. The regret is the share of the highest
measured speed that the taken layout loses.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain
from statistics import mean

from benchmarks.plan import published_runs, published_speed
from benchmarks.plan.software import WORDS
from nanoscale.config.resolved import ResolvedConfig

_WORDS = re.compile(f"(-({'|'.join(WORDS)}))+$")
NEAR = 0.05
"""A regret that is small enough."""


@dataclass(frozen=True)
class Layout:
    """A published layout: what was measured and what the plan predicts, both in tokens/s a GPU."""

    config: ResolvedConfig
    software: str
    """The name of its record."""
    measured: float
    planned: float


@dataclass(frozen=True)
class Choice:
    """A job that was published with several layouts."""

    job: tuple[str, ...]
    layouts: list[Layout]

    @property
    def regret(self) -> float:
        taken = max(self.layouts, key=lambda layout: layout.planned)
        return 1 - taken.measured / max(layout.measured for layout in self.layouts)


def choices() -> list[Choice]:
    jobs: dict[tuple[str, ...], list[Layout]] = defaultdict(list)
    rows = published_speed.read()
    for row, planned in zip(rows, published_speed.predict(rows), strict=True):
        job = _job(row.source, row.software.name, row.config)
        jobs[job].append(Layout(row.config, row.software.name, row.measured, planned))
    runs = (
        published_runs.compare(file) for file in (published_runs.RUNS, published_runs.RUNS_OF_2026)
    )
    for one in chain.from_iterable(runs):
        config, software = one.plan.config, one.row["software"]
        job = _job(_source(one.row), _WORDS.sub("", software), config, one.row["precision"])
        speed = one.plan.time.tokens_per_s_per_gpu
        jobs[job].append(Layout(config, software, float(one.row["tok_s_gpu"]), speed))
    return [Choice(job, layouts) for job, layouts in jobs.items() if _differ(layouts)]


def _source(row: published_runs.Row) -> str:
    """Return the source; of runs of 2026, repository and release, because some have a file for each run."""
    source = row["source"]
    if not row["id"].startswith("26-"):
        return source
    return " ".join([source.partition(" ")[0], *re.findall(r"NeMo [\d.]+", source)])


def _job(
    source: str, software: str, config: ResolvedConfig, precision: str = ""
) -> tuple[str, ...]:
    train = config.train
    numbers = (config.world_size, train.seq_len)
    described = (config.model, config.cluster, config.precision, config.backend.compile)
    return (source, software, precision, *map(str, (*numbers, *described)))


def _differ(layouts: list[Layout]) -> bool:
    return (
        len(
            {
                repr(
                    (
                        layout.software,
                        layout.config.parallel,
                        layout.config.zero,
                        layout.config.train,
                    )
                )
                for layout in layouts
            }
        )
        > 1
    )


def main() -> None:
    found = choices()
    for choice in found:
        model, world = choice.layouts[0].config.model.name, choice.layouts[0].config.world_size
        print(
            f"{choice.regret:6.1%} of {len(choice.layouts)} layouts, {model} on {world}: {choice.job[0]}"
        )
    regrets = [choice.regret for choice in found]
    best = sum(regret == 0 for regret in regrets)
    near = sum(regret <= NEAR for regret in regrets)
    sizes = f"{near} within {NEAR:.0%} of it; mean regret {mean(regrets):.1%}, largest {max(regrets):.1%}"
    print(f"{len(found)} jobs: {best} with the fastest layout; {sizes}")


if __name__ == "__main__":
    main()
