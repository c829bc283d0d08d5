"""What a launch would do, for people and as a document."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from nanoscale.config.derive import Derived
from nanoscale.config.schema import Parallel
from nanoscale.launch.command import LaunchPlan
from nanoscale.launch.layout import coordinates
from nanoscale.runs.directory import RunDirectory

if TYPE_CHECKING:
    from rich.console import Console

_MOST_RANKS = 64
"""more rows than this would only push the rest off the screen"""


def document(
    plan: LaunchPlan, derived: Derived, parameters: int, run: RunDirectory
) -> dict[str, Any]:
    """`train --dry-run --json`."""
    return {
        "world_size": plan.world_size,
        "hosts": [
            {
                "host": host.host,
                "slots": host.slots,
                "ranks": list(host.ranks),
                "command": list(host.command),
            }
            for host in plan.hosts
        ],
        "master_addr": plan.master_addr,
        "master_port": plan.master_port,
        "environment": plan.environment,
        "derived": derived_values(derived, parameters),
        "run_dir": str(run.path),
    }


def derived_values(derived: Derived, parameters: int) -> dict[str, int]:
    """The numbers that follow from the configuration."""
    values = asdict(derived)
    del values["world_size"]
    return {**values, "parameters": parameters}


def print_plan(
    console: Console,
    plan: LaunchPlan,
    parallel: Parallel,
    derived: Derived,
    parameters: int,
    run: RunDirectory,
) -> None:
    """`train --dry-run`."""
    from rich.table import Table

    values = Table("", "", title="job", title_justify="left", show_header=False)
    units = {
        "parameters": "",
        "global_batch": "samples",
        "micro_batch": "samples a rank",
        "accumulation": "forward passes a step",
        "tokens_per_step": "tokens",
        "steps": "",
    }
    numbers = derived_values(derived, parameters)
    values.add_row("run directory", str(run.path))
    for name, unit in units.items():
        values.add_row(name.replace("_", " "), f"{numbers[name]:,} {unit}".rstrip())
    console.print(values)

    ranks = Table("rank", "host", "local rank", "pp", "dp", "cp", "tp")
    ranks.title, ranks.title_justify = "ranks", "left"
    places = [
        (rank, host.host, local) for host in plan.hosts for local, rank in enumerate(host.ranks)
    ]
    for rank, host, local in places[:_MOST_RANKS]:
        at = coordinates(rank, parallel)
        ranks.add_row(*map(str, (rank, host, local, at.pp, at.dp, at.cp, at.tp)))
    console.print(ranks)
    if len(places) > _MOST_RANKS:
        console.print(f"… and {len(places) - _MOST_RANKS} more ranks; --json lists all of them")

    console.print("\nenvironment, on top of what is inherited")
    for name, value in plan.environment.items():
        console.print(f"  {name}={shlex.quote(value)}", markup=False, soft_wrap=True)
    console.print(f"\nthe ranks meet at {plan.master_addr}:{plan.master_port}")
    console.print("\ncommands")
    for entry in plan.hosts:
        line = f"  {entry.host}: {shlex.join(entry.command)}"
        console.print(line, markup=False, soft_wrap=True)
    console.print("\nnothing was written or started")
