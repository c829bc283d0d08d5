"""Holding what the hosts say of themselves against what the job needs of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from nanoscale.channel import Message
from nanoscale.config.schema import Config
from nanoscale.errors import UserError, Violation
from nanoscale.launch.fleet import Fleet, Member

_MOST_SKEW_S = 5.0
_LEAST_ROOT_GIB = 1.0
_LEAST_MEMORY_GIB = 1.0


@dataclass(frozen=True)
class Verdict:
    """What one look at one host came to."""

    host: str
    check: str
    good: bool
    finding: str
    remedy: str = ""


def require_ready(fleet: Fleet, config: Config) -> None:
    """Raise a UserError that lists everything by which the hosts that answered cannot do the job."""
    violations = [
        Violation(
            verdict.check,
            None,
            verdict.host,
            f"{verdict.host}: {verdict.finding}",
            (verdict.remedy,),
        )
        for verdict in judge(fleet, config)
        if not verdict.good
    ]
    if violations:
        raise UserError("hosts", "the hosts are not ready for this job", violations)


def judge(fleet: Fleet, config: Config) -> Iterator[Verdict]:
    """Everything that was looked at, host by host."""
    there = [member for member in fleet.members if member.is_there and member.facts is not None]
    looks: list[Callable[..., Iterator[Verdict]]] = [_versions, _devices, _root, _memory, _clock]
    if len(there) > 1:
        looks.append(_network)
    for member in there:
        for look in looks:
            yield from look(member, _facts(member), there, config)
    if there:
        yield from _port(there[0], config)


def _facts(member: Member) -> Message:
    assert member.facts is not None
    return member.facts


def _versions(
    member: Member, facts: Message, there: Sequence[Member], config: Config
) -> Iterator[Verdict]:
    for name, version in facts["versions"].items():
        if name == "deepspeed" and config.backend.name != "deepspeed":
            continue
        usual = Counter(_facts(other)["versions"][name] for other in there).most_common(1)[0][0]
        finding = f"{name} {version or 'is missing'}"
        if version == usual:
            yield Verdict(member.name, name, True, finding)
        else:
            elsewhere = f", and on most hosts {usual or 'there is none'}"
            yield Verdict(
                member.name, name, False, finding + elsewhere, f"install {name} {usual} there"
            )


def _devices(
    member: Member, facts: Message, _: Sequence[Member], config: Config
) -> Iterator[Verdict]:
    found, wanted = facts["devices"], member.host.slots
    if config.launcher.device == "cpu":
        yield Verdict(member.name, "devices", True, f"{found['cores']} cores for {wanted} ranks")
        return
    chosen = member.host.devices
    needed = max(chosen) + 1 if chosen else wanted
    count = found["count"] if found["kind"] == "cuda" else 0
    finding = f"{count} GPUs for {wanted} slots"
    if chosen:
        finding += f" ({', '.join(map(str, chosen))})"
    where = f" at {member.host.source}" if member.host.source else ""
    remedy = f"slots={count}{where}" if count else "launcher.device=cpu, or leave the host out"
    yield Verdict(member.name, "devices", count >= needed, finding, remedy)


def _root(member: Member, facts: Message, _: Sequence[Member], config: Config) -> Iterator[Verdict]:
    if config.launcher.name == "local":
        return
    root = facts["root"]
    elsewhere = "run.root=FOLDER on a file system that every host mounts at the same path"
    if not root["visible"]:
        finding = f"does not see the folder of runs ({config.run.root}) of the launcher"
        yield Verdict(member.name, "run.root", False, finding, elsewhere)
    elif not root["writable"]:
        finding = f"may not write in the folder of runs ({config.run.root})"
        yield Verdict(member.name, "run.root", False, finding, elsewhere)
    else:
        free = root["free_gib"] or 0.0
        finding = f"sees the folder of runs, {free:.1f} GiB free there"
        yield Verdict(member.name, "run.root", free > _LEAST_ROOT_GIB, finding, "free some space")


def _memory(
    member: Member, facts: Message, _: Sequence[Member], _config: Config
) -> Iterator[Verdict]:
    free = facts["memory_gib"]
    if free is not None:
        finding = f"{free:.1f} GiB of host memory free"
        yield Verdict(member.name, "memory", free > _LEAST_MEMORY_GIB, finding, "end what uses it")


def _clock(
    member: Member, facts: Message, _: Sequence[Member], _config: Config
) -> Iterator[Verdict]:
    skew = skew_s(facts)
    finding = f"clock {skew:+.2f} s from the launcher's"
    good = abs(skew) < _MOST_SKEW_S
    yield Verdict(member.name, "clock", good, finding, "let a time service (NTP) set it")


def _network(
    member: Member, facts: Message, there: Sequence[Member], config: Config
) -> Iterator[Verdict]:
    network, first = facts["network"], there[0]
    target = config.launcher.master_addr or first.name
    remedy = "launcher.master_addr=ADDRESS, one at which every host reaches the first"
    if not network["master"]:
        finding = f"finds no address for {target}, where the ranks are to meet"
        yield Verdict(member.name, "network", False, finding, remedy)
    elif member is first and not network["is_master"]:
        finding = (
            f"{target} leads to {', '.join(network['master'])}, which is none of its addresses"
        )
        yield Verdict(member.name, "network", False, finding, remedy)
    elif member is not first and network["is_master"]:
        finding = f"takes {target} for itself ({', '.join(network['master'])})"
        yield Verdict(member.name, "network", False, finding, remedy)
    else:
        finding = f"reaches {target} over {network['interface']}"
        good = network["interface"] is not None
        yield Verdict(member.name, "network", good, finding, remedy)


def _port(first: Member, config: Config) -> Iterator[Verdict]:
    port = _facts(first)["port"]
    wanted = config.launcher.master_port
    if port is None:
        finding = f"port {wanted} is in use (port taken)"
        remedy = "launcher.master_port=auto, or another number"
        yield Verdict(first.name, "port", False, finding, remedy)
    else:
        yield Verdict(first.name, "port", True, f"port {port} is free")


def skew_s(facts: Message) -> float:
    """How far a host's clock is from the launcher's, seconds; 0 where the question's journey explains it."""
    between = (facts["asked_at"] + facts["heard_at"]) / 2
    latest, earliest = facts["time"] - facts["heard_at"], facts["time"] - facts["asked_at"]
    if latest <= 0 <= earliest:
        return 0.0  # what is left is the journey
    return float(facts["time"] - between)
