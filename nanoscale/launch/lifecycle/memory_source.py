"""The launcher's part in checkpoints in memory: the state to continue from, and who keeps whose copies."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from nanoscale.common.json_text import Json
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
    report: Callable[[str], None] = lambda _: None,
) -> MemorySource | None:
    """Return the newest state whose parts are all in the memory of the hosts; None if no state is complete.

    Args:
        refused: states from which no step could be trained, each by its attempt and its count.
        copied: a folder of states that agents have copied to the disk.
        report: a function that is called with a sentence for each damaged file.
    """
    nodes: dict[tuple[int, int], set[int]] = defaultdict(set)
    totals: dict[tuple[int, int], int] = {}
    steps: dict[tuple[int, int], int] = {}
    holders: dict[tuple[int, int], list[Member]] = defaultdict(list)
    on_disk, damaged = checked_files(copied) if copied is not None else ([], [])
    reports = [(it.name, _facts(it).get("damaged", ())) for it in members]
    for where, sentences in [*reports, (str(copied), damaged)]:
        for sentence in sentences:
            report(f"{where}: {sentence}; it is not used")
    for member, kept in [*((it, _facts(it).get("kept", ())) for it in members), (None, on_disk)]:
        by_node: dict[tuple[int, int, int], list[Json]] = defaultdict(list)
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
    return MemorySource(
        attempt, count, steps[attempt, count], peers, str(copied) if is_copied else None
    )


def pair(members: Sequence[Member], address_of: AddressOf) -> list[Json | None]:
    """Return, for each host, the one that keeps its copies: never the same machine, and another switch if
    possible; None for a host without a partner, and for one that has sent no facts."""
    keepers = [node for node, it in enumerate(members) if "port" in _facts(it)]
    machines = {node: str((members[node].facts or {})["machine"]) for node in keepers}
    switches = {node: _facts(members[node])["switch"] or machines[node] for node in keepers}
    partners: dict[int, int | None] = _partners(switches) or _partners(machines)
    for node in keepers:
        others = (it for it in keepers if machines[it] != machines[node])
        partners.setdefault(node, next(others, None))
    peers = [partners.get(node) for node in range(len(members))]
    return [None if it is None else asdict(_peer(members[it], address_of)) for it in peers]


def _partners(groups: dict[int, str]) -> dict[int, int | None]:
    """Return, for each host, one of another group; empty if one group has more than half of the hosts."""
    largest = max(Counter(groups.values()).values(), default=0)
    if 2 * largest > len(groups):
        return {}
    # In the order of groups, the host so many positions later is in another group.
    order = sorted(groups, key=lambda node: (groups[node], node))
    return {node: order[(at + largest) % len(order)] for at, node in enumerate(order)}


def _facts(member: Member) -> Json:
    return (member.facts or {}).get("memory") or {}


def _peer(member: Member, address_of: AddressOf) -> MemoryPeer:
    return MemoryPeer(member.name, address_of(member.host), _facts(member)["port"])
