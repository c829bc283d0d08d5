"""The launcher's part in checkpoints in memory: the state to continue from, and who keeps whose copies."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nanoscale.config.machines import Host
from nanoscale.launch.fleet.connections import Member
from nanoscale.runs.memory_order import MemoryPeer, MemorySource, checked_files

AddressOf = Callable[[Host], str]
"""A function that returns the address at which other hosts reach a host."""


def newest_in_memory(
    members: Sequence[Member],
    address_of: AddressOf,
    refused: set[tuple[int, int]],
    copied: Path | None = None,
) -> MemorySource | None:
    """Return the newest state of which the hosts keep every part; None if there is none.

    Args:
        refused: attempt and count of states from which no step could be trained.
        copied: a folder of states that agents have copied to the disk.
    """
    nodes: dict[tuple[int, int], set[int]] = defaultdict(set)
    totals: dict[tuple[int, int], int] = {}
    steps: dict[tuple[int, int], int] = {}
    holders: dict[tuple[int, int], list[Member]] = defaultdict(list)
    on_disk = checked_files(copied)[0] if copied is not None else []
    for member, kept in [*((it, _facts(it).get("kept", ())) for it in members), (None, on_disk)]:
        by_node: dict[tuple[int, int, int], list[dict[str, Any]]] = defaultdict(list)
        for about in kept:
            by_node[about["attempt"], about["count"], about["node"]].append(about)
        for (attempt, count, _), files in by_node.items():
            state, first = (attempt, count), files[0]
            totals[state], steps[state] = first["nodes"], first["step"]
            if member is not None and member not in holders[state]:
                holders[state].append(member)
            if len(files) == first["ranks"]:
                nodes[state].update(first["covers"])
    complete = [it for it in nodes if len(nodes[it]) == totals[it] and it not in refused]
    if not complete:
        return None
    attempt, count = max(complete)
    peers = tuple(_peer(it, address_of) for it in holders[attempt, count])
    is_copied = any((it["attempt"], it["count"]) == (attempt, count) for it in on_disk)
    folder = str(copied) if is_copied else None
    return MemorySource(attempt, count, steps[attempt, count], peers, folder)


def pair(members: Sequence[Member], address_of: AddressOf) -> list[dict[str, Any] | None]:
    """Return, for each host, the one that keeps its copies: never the same machine, and another switch if
    possible; None for a host without a partner."""
    machines = [str(it.facts["machine"]) if it.facts else it.name for it in members]
    switches = [
        _facts(it).get("switch") or machine for it, machine in zip(members, machines, strict=True)
    ]
    for groups in (switches, machines):
        largest = max(Counter(groups).values())
        if 2 * largest <= len(members):
            # In the order of groups, the host so many positions later is in another group.
            order = sorted(range(len(members)), key=lambda node: (groups[node], node))
            partners = {
                node: order[(position + largest) % len(order)]
                for position, node in enumerate(order)
            }
            return [
                asdict(_peer(members[partners[node]], address_of)) for node in range(len(members))
            ]
    return [_other(node, members, machines, address_of) for node in range(len(members))]


def _other(
    node: int, members: Sequence[Member], machines: Sequence[str], address_of: AddressOf
) -> dict[str, Any] | None:
    others = (
        it for it, machine in zip(members, machines, strict=True) if machine != machines[node]
    )
    other = next(others, None)
    return None if other is None else asdict(_peer(other, address_of))


def _facts(member: Member) -> dict[str, Any]:
    return (member.facts or {}).get("memory") or {}


def _peer(member: Member, address_of: AddressOf) -> MemoryPeer:
    return MemoryPeer(member.name, address_of(member.host), _facts(member)["port"])
