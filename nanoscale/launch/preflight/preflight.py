"""The comparison of the hosts' facts with the needs of the job."""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from nanoscale.common.errors import UserError, Violation
from nanoscale.common.units import GIB, counted, listed, share
from nanoscale.common.versions import versions
from nanoscale.config.optimizers import rule_of
from nanoscale.config.rules.numbers import lacks_bf16
from nanoscale.config.schema import Config
from nanoscale.launch.fleet.connections import Member
from nanoscale.launch.fleet.fleet import Fleet
from nanoscale.launch.preflight.verdicts import (
    EqualVerdicts,
    Verdict,
    gpu_software,
    grouped,
    join_names,
)
from nanoscale.launch.transport.connection_errors import SHARED_ROOT, check_of
from nanoscale.launch.transport.transport import Transport, transport_of
from nanoscale.processes.messages import Message

_MOST_SKEW_S = 5.0
_LEAST_GIB = {"memory": 1.0, "run.root": 1.0, "cache": 0.5, "/dev/shm": 0.25}
_COMPARED = ("nanoscale", "python", "torch", "deepspeed")
"""Checks that compare versions."""
_LEAST_GPU_SHARE = 0.9
"""The least free share of a GPU's memory; a driver uses less than the rest."""


def require_ready(fleet: Fleet, config: Config) -> None:
    """Raise a UserError that lists every reason why the hosts cannot run the job.

    Lost hosts are listed next to the others. Lost hosts alone are not an error of the request: the attempt
    fails by them, or continues without them.
    """
    failed = [
        verdict for verdict in judge(fleet.members, config) if not verdict.good and verdict.needed
    ]
    lost = {member.name for member in fleet.members if not member.is_present}
    if all(verdict.host in lost for verdict in failed):
        return
    violations = [
        Violation("", None, join_names(group.hosts), group.finding, remedy=group.remedy)
        for group in grouped(failed)
    ]
    raise UserError("hosts", "the hosts are not ready for this job", violations)


def mixed_versions(members: Sequence[Member], config: Config) -> str | None:
    """Return one line on hosts whose versions differ from the others', for a launch without these checks.

    None if there are none.
    """
    verdicts = judge(members, config)
    failed = [
        verdict
        for verdict in verdicts
        if not verdict.good and verdict.needed and verdict.check in _COMPARED
    ]
    if not failed:
        return None
    hosts = "; ".join(f"{_hosts_and_verb(group)} {group.finding}" for group in grouped(failed))
    return f"versions differ, which launcher.preflight=false allows: {hosts}"


def _hosts_and_verb(group: EqualVerdicts) -> str:
    return f"{join_names(group.hosts)} {'has' if len(group.hosts) == 1 else 'have'}"


def judge(members: Sequence[Member], config: Config) -> list[Verdict]:
    """Return all verdicts, host by host. Unknown facts give no verdict."""
    all_hosts = _Hosts(members, config)
    verdicts: list[Verdict] = []
    for member in members:
        for check in _checks_of(all_hosts, member):
            verdicts += check(all_hosts, member, member.facts or {})
    return verdicts


def can_compute(verdict: Verdict) -> bool:
    """True if the verdict lets its host compute with others; a job needs folders as well."""
    return verdict.good or not verdict.needed or verdict.check in ("run.root", "cache")


def skew_s(facts: Message) -> float:
    """Return the difference of a host's clock from the launcher's, seconds; 0 if the message's delay explains
    it.

    The request's way takes long, as an agent has to start first. The answer's way takes next to nothing.
    """
    latest, earliest = facts["time"] - facts["heard_at"], facts["time"] - facts["asked_at"]
    return 0.0 if latest <= 0 <= earliest else float(latest)


@dataclass(frozen=True)
class _Hosts:
    """All hosts, and the common inputs of the checks."""

    members: Sequence[Member]
    config: Config

    @cached_property
    def transport(self) -> Transport:
        return transport_of(self.config)

    @cached_property
    def present(self) -> dict[str, Message]:
        """The facts of those that have answered."""
        return {
            member.name: member.facts
            for member in self.members
            if member.is_present and member.facts is not None
        }

    @cached_property
    def comparable(self) -> dict[str, Message]:
        """The facts of the hosts with our version of nanoscale, whose messages we understand."""
        own_version = self.launcher_versions["nanoscale"]
        return {
            name: facts
            for name, facts in self.present.items()
            if facts["versions"]["nanoscale"] == own_version
        }

    @cached_property
    def launcher_versions(self) -> dict[str, str | None]:
        """The launcher's versions."""
        return versions()

    @cached_property
    def first(self) -> str | None:
        """The host of the rendezvous."""
        return next(iter(self.present), None)

    @cached_property
    def addresses_of_first(self) -> set[str]:
        first = self.comparable.get(self.first or "")
        return set(first["network"]["addresses"]) if first is not None else set()

    @cached_property
    def most_common(self) -> dict[str, tuple[str | None, list[str]]]:
        """The most common version of each program and the hosts that have it; ties go to the first host."""
        hosts_by_version: dict[str, dict[str | None, list[str]]] = {}
        for host, facts in self.present.items():
            for name, version in facts["versions"].items():
                hosts_by_version.setdefault(name, {}).setdefault(version, []).append(host)
        return {
            name: max(hosts.items(), key=lambda entry: len(entry[1]))
            for name, hosts in hosts_by_version.items()
        }

    @cached_property
    def most_common_gpus(self) -> tuple[str, ...]:
        kinds = Counter(tuple(facts["devices"]["names"]) for facts in self.comparable.values())
        return kinds.most_common(1)[0][0]

    @cached_property
    def first_on_machine(self) -> dict[str, str]:
        """The first host of each machine."""
        names: dict[str, str] = {}
        for host, facts in self.comparable.items():
            names.setdefault(facts["machine"], host)
        return names


_Check = Callable[[_Hosts, Member, Message], Iterator[Verdict]]


def _checks_of(hosts: _Hosts, member: Member) -> Sequence[_Check]:
    if not member.is_present:
        return [_lost]
    if member.facts is None:
        return []
    if member.name not in hosts.comparable:
        return [_reached, _versions]  # other facts may have another meaning
    checks = [
        _reached,
        _versions,
        _packages,
        _devices,
        _gpus,
        _gpu_software,
        _number_types,
        _memory,
        _root,
        _cache,
        _shared_memory,
    ]
    if not hosts.transport.is_local:
        checks.append(_clock)
    if len(hosts.members) > 1:
        checks += [_machine, _network, _sockets]
    if member.name == hosts.first:
        checks.append(_port)
    return [*checks, _locks]


# --- host and software ----------------------------------------------------------------------------


def _lost(hosts: _Hosts, member: Member, _facts: Message) -> Iterator[Verdict]:
    assert member.lost is not None
    check = check_of(member.lost.diagnosis, hosts.transport)
    yield Verdict(member.name, check, False, member.lost.diagnosis, member.lost.remedy)
    if member.nanoscale not in (None, hosts.launcher_versions["nanoscale"]):
        yield _nanoscale(hosts, member, member.nanoscale)  # it may not have understood us


def _reached(hosts: _Hosts, member: Member, facts: Message) -> Iterator[Verdict]:
    if not hosts.transport.is_local:
        yield Verdict(member.name, hosts.transport.check, True, "answers")
    yield Verdict(member.name, "interpreter", True, facts["executable"])


def _versions(hosts: _Hosts, member: Member, facts: Message) -> Iterator[Verdict]:
    yield _nanoscale(hosts, member, facts["versions"]["nanoscale"])
    for name in ("python", "torch", "deepspeed", "driver"):
        yield _version(hosts, member, name, facts["versions"].get(name))


def _nanoscale(hosts: _Hosts, member: Member, version: str | None) -> Verdict:
    launcher_version, another_python = (
        hosts.launcher_versions["nanoscale"],
        hosts.transport.python_remedy(member.host),
    )
    good, text = version == launcher_version, f"nanoscale {version}"
    if not good:
        text += f", and {launcher_version} is the launcher's"
    remedy = f"install the launcher's nanoscale there, or {another_python}"
    return Verdict(member.name, "nanoscale", good, text, remedy)


def _version(hosts: _Hosts, member: Member, name: str, version: str | None) -> Verdict:
    usual, usual_hosts = hosts.most_common.get(name, (None, []))
    label = {"python": "Python", "driver": "GPU driver"}.get(name, name)
    text = f"{label} {version}" if version else f"no {label}"
    matters = name == "torch" or (name == "deepspeed" and hosts.config.backend.name == name)
    good = version == usual and (version is not None or not matters)
    if version != usual:
        text += f", and {usual or 'none'} on {join_names(usual_hosts)}"
    if name == "python":
        # The last number does not affect the exchange between ranks.
        matters = _minor(version) != _minor(usual)
        remedy = hosts.transport.python_remedy(member.host)
    else:
        remedy = f"install {label} {usual} there" if usual else f"install {label}"
    if usual is None and version is not None:
        remedy = f"install it on the others too, or remove {label} there"
    return Verdict(member.name, name, good, text, remedy, needed=matters)


def _packages(hosts: _Hosts, member: Member, facts: Message) -> Iterator[Verdict]:
    """Check the packages that this configuration needs; only rank 0 writes metrics."""
    config = hosts.config
    needed = []
    if config.logger.tensorboard == "on" and member.name == hosts.first:
        needed.append(("tensorboard", "TensorBoard", "logger.tensorboard=on", "logger=none"))
    if config.logger.wandb != "off" and member.name == hosts.first:
        setting = f"logger.wandb={config.logger.wandb}"
        needed.append(("wandb", "wandb", setting, "logger.wandb=off"))
    if config.logger.mlflow == "on" and member.name == hosts.first:
        needed.append(("mlflow", "MLflow", "logger.mlflow=on", "logger.mlflow=off"))
    if package := rule_of(config.optimizer).package:
        setting = f"optimizer.name={config.optimizer.name}"
        needed.append((package, package, setting, "optimizer=adamw"))
    elif config.precision.fp8:
        needed.append(("torchao", "torchao", "precision.fp8=true", "precision=bf16"))
    if config.model.source == "hf":
        needed.append(("transformers", "transformers", "model=hf", "a model of nanoscale's own"))
    for package, name, setting, alternative in needed:
        installed = package in facts["optional_packages"]
        text = f"{name} is installed" if installed else f"no {name}, which {setting} needs"
        remedy = f"install {name} there, or {alternative}"
        yield Verdict(member.name, package, installed, text, remedy)


def _minor(version: str | None) -> str:
    return ".".join((version or "").split(".")[:2])


# --- devices ---------------------------------------------------------------------------------------


def _devices(hosts: _Hosts, member: Member, facts: Message) -> Iterator[Verdict]:
    devices, slots = facts["devices"], member.host.slots
    if hosts.config.launcher.device == "cpu":
        ranks_text = f" for {slots} ranks" if slots > 1 else ""
        yield Verdict(
            member.name, "devices", True, f"{counted(devices['cores'], 'CPU core')}{ranks_text}"
        )
        return
    count = devices["count"] if devices["kind"] == "cuda" else 0
    chosen = member.host.devices
    chosen_text = f", which are to be {', '.join(map(str, chosen))}" if chosen else ""
    text = f"{counted(count, 'GPU')} for {counted(slots, 'slot')}{chosen_text}"
    yield Verdict(
        member.name, "devices", count >= slots, text, _devices_remedy(hosts, member, count)
    )


def _devices_remedy(hosts: _Hosts, member: Member, count: int) -> str:
    if not count:
        exclusion = hosts.transport.exclusion_remedy(member.host)
        return f"look at `nvidia-smi` there; or launcher.device=cpu, or {exclusion}"
    if member.host.devices:
        return "choose others with --include or --exclude"
    if member.host.source:
        return f"slots={count} at {member.host.source}"
    return f"launcher.devices={count}"


def _gpus(hosts: _Hosts, member: Member, facts: Message) -> Iterator[Verdict]:
    """Check that GPUs work and equal the others; a job may differ on purpose."""
    if facts["gpu_problem"] is not None:
        text = f"the GPU driver does not answer: {facts['gpu_problem']}"
        remedy = "look at `nvidia-smi` and `dmesg` there; after an update of the driver, restart"
        yield Verdict(member.name, "GPUs", False, text, remedy, needed=False)
    names = tuple(facts["devices"]["names"])
    if hosts.config.launcher.device == "cpu" or not names:
        return
    are_usual = names == hosts.most_common_gpus
    gpus_text = " and ".join(f"{count} × {name}" for name, count in Counter(names).items())
    text = gpus_text if are_usual else f"{gpus_text}, unlike most hosts"
    remedy = "the slowest host sets the speed: leave it out, or use hosts with equal GPUs"
    yield Verdict(member.name, "GPUs", are_usual, text, remedy, needed=False)
    in_use = [
        f"{number} ({share(int(GIB * (total - free)), int(GIB * total))})"
        for number, (free, total) in enumerate(facts["gpu_memory_gib"])
        if free < _LEAST_GPU_SHARE * total
    ]
    text = f"memory of GPU {', '.join(in_use)} is in use" if in_use else "GPU memory is free"
    remedy = "`nvidia-smi` there shows by whom"
    yield Verdict(member.name, "GPU memory", not in_use, text, remedy, needed=False)


def _gpu_software(hosts: _Hosts, member: Member, facts: Message) -> Iterator[Verdict]:
    """Judge the software between the GPUs and the ranks."""
    yield from gpu_software(hosts.config, member, facts)


def _number_types(hosts: _Hosts, member: Member, facts: Message) -> Iterator[Verdict]:
    """Check that the GPUs have bf16 if the job uses it; otherwise PyTorch emulates it, slowly."""
    config, names = hosts.config, facts["devices"]["names"]
    if config.launcher.device == "cpu" or config.precision.compute != "bf16":
        return
    if without_bf16 := sorted(set(filter(lacks_bf16, names))):
        yield Verdict(
            member.name, "precision", False, f"{listed(without_bf16)} has no bf16", "precision=fp16"
        )


def _memory(_: _Hosts, member: Member, facts: Message) -> Iterator[Verdict]:
    free = facts["memory_gib"]
    if free is not None:
        yield _free_space(member, "memory", free, "of host memory free", "end what uses it")


def _free_space(
    member: Member, check: str, free: float, resource: str, remedy: str, *, needed: bool = True
) -> Verdict:
    least = _LEAST_GIB[check]
    good = free >= least
    text = f"{{}} GiB {resource}" if good else f"only {{}} GiB {resource}; {least:g} is the minimum"
    return Verdict(member.name, check, good, text, remedy, amount=free, needed=needed)


# --- folders --------------------------------------------------------------------------------------


def _root(hosts: _Hosts, member: Member, facts: Message) -> Iterator[Verdict]:
    root = facts["root"]
    folder = f"the folder of runs ({root['path']})"
    local = hosts.transport.is_local
    if not root["visible"] and not local:
        text = f"does not see {folder} of the launcher"
        yield Verdict(member.name, "run.root", False, text, SHARED_ROOT)
    elif root["problem"] is not None:
        text = f"cannot write in {folder}: {root['problem']}"
        remedy = "run.root=FOLDER, where FOLDER is writable there" if local else SHARED_ROOT
        yield Verdict(member.name, "run.root", False, text, remedy)
    elif root["free_gib"] is not None:
        what = f"free in {folder}"
        remedy = "free some space, or start the run with run.root=FOLDER on another disk"
        yield _free_space(member, "run.root", root["free_gib"], what, remedy)


def _cache(hosts: _Hosts, member: Member, facts: Message) -> Iterator[Verdict]:
    """Check the folder of the prepared corpus, and of the vocabulary trained on it."""
    cache, needed = facts["cache"], hosts.config.data.source == "stdlib"
    folder = f"the folder of prepared data ({cache['path']})"
    remedy = "data.cache_dir=FOLDER"
    if cache["problem"] is not None:
        text = f"cannot write in {folder}: {cache['problem']}"
        yield Verdict(member.name, "cache", False, text, remedy, needed=needed)
    elif cache["free_gib"] is not None:
        remedy = f"free some space, or {remedy} on another disk"
        yield _free_space(
            member, "cache", cache["free_gib"], f"free in {folder}", remedy, needed=needed
        )


def _shared_memory(_: _Hosts, member: Member, facts: Message) -> Iterator[Verdict]:
    free = facts["shared_memory_gib"]
    if free is not None:
        what = "of shared memory free (/dev/shm)"
        remedy = "give its container more, as in `docker run --shm-size=16g`; or remove old files"
        yield _free_space(member, "/dev/shm", free, what, remedy, needed=False)


def _locks(hosts: _Hosts, member: Member, facts: Message) -> Iterator[Verdict]:
    """Report stale locks, if there are any."""
    needed = hosts.config.backend.name == "deepspeed"
    for path in facts["stale_locks"]:
        text = f"{path} was left by a compilation that has ended; the next one would wait for it forever"
        yield Verdict(
            member.name, "locks", False, text, f"rm -- {shlex.quote(path)}", needed=needed
        )


# --- clock and network -------------------------------------------------------------------------------


def _clock(_: _Hosts, member: Member, facts: Message) -> Iterator[Verdict]:
    skew = skew_s(facts)
    if not skew:
        yield Verdict(member.name, "clock", True, "clock agrees with the launcher's")
        return
    text = f"clock is {{}} s {'ahead of' if skew > 0 else 'behind'} the launcher's"
    good = abs(skew) < _MOST_SKEW_S
    remedy = "let a time service (NTP, chrony) set it"
    yield Verdict(member.name, "clock", good, text, remedy, amount=abs(skew))


def _machine(hosts: _Hosts, member: Member, facts: Message) -> Iterator[Verdict]:
    """Report two hosts that are one machine: they would use the same devices."""
    same = hosts.first_on_machine[facts["machine"]]
    if same != member.name:
        text, remedy = f"is the same machine as {same}", "leave one of them out"
        needed = hosts.config.launcher.device == "cuda"
        yield Verdict(member.name, "machine", False, text, remedy, needed=needed)


def _network(hosts: _Hosts, member: Member, facts: Message) -> Iterator[Verdict]:
    """Check that the address of the rendezvous resolves, and is the same for all."""
    problem = _wrong_address(hosts, member, facts["network"])
    if problem:
        remedy = "launcher.master_addr=ADDRESS, an address at which every host reaches the first"
        yield Verdict(member.name, "network", False, problem, remedy)
    else:
        text = f"meets the others over {facts['network']['interface']}"
        yield Verdict(member.name, "network", True, text)


def _wrong_address(hosts: _Hosts, member: Member, network: Message) -> str:
    """Return the problem of a host's address of the rendezvous; empty if there is none."""
    target, addresses = network["asked_for"], network["found"]
    resolution = f"{target} resolves to {' and '.join(addresses)}"
    if not addresses:
        return f"cannot resolve {target}, where the ranks meet"
    if ipaddress.ip_address(addresses[0]).is_loopback:  # the first is the one in use
        return f"{resolution} there, which no other host can reach (look at /etc/hosts)"
    if network["interface"] is None:
        return f"{resolution}, and there is no route to it"
    if target != (hosts.config.launcher.master_addr or hosts.first):
        return ""  # the rendezvous was at a host that is lost
    if not hosts.addresses_of_first or hosts.addresses_of_first.intersection(addresses):
        return ""
    owner = "its addresses" if member.name == hosts.first else f"the addresses of {hosts.first}"
    return f"{resolution}, which is not one of {owner}"


def _sockets(hosts: _Hosts, member: Member, facts: Message) -> Iterator[Verdict]:
    """Check the chosen network interfaces, if any."""
    interfaces = sorted(set(facts["network"]["addresses"].values()))
    for name, chosen in facts["network"]["chosen"].items():
        good = _matches_interface(name, chosen, interfaces)
        text = f"{name}={chosen}"
        if not good:
            text += f" fits none of its interfaces ({', '.join(interfaces)})"
        remedy = f"unset {name}, or name an interface that all hosts have"
        needed = name.startswith("GLOO") or hosts.config.launcher.device == "cuda"
        yield Verdict(member.name, "interface", good, text, remedy, needed=needed)


def _matches_interface(name: str, chosen: str, interfaces: Sequence[str]) -> bool:
    """True if an interface matches: gloo takes names, NCCL prefixes; `=` means names, `^` all others."""
    names = re.split(r" *, *", chosen.lstrip("^="))
    if name.startswith("GLOO"):
        return set(names) <= set(interfaces)
    exact = chosen.lstrip("^").startswith("=")
    matching = {
        interface
        for interface in interfaces
        if (interface in names if exact else interface.startswith(tuple(names)))
    }
    return bool(set(interfaces) - matching if chosen.startswith("^") else matching)


def _port(hosts: _Hosts, member: Member, facts: Message) -> Iterator[Verdict]:
    port = facts["port"]
    if port is None:
        requested = hosts.config.launcher.master_port
        text = f"port {requested} is taken: something listens there already"
        remedy = "launcher.master_port=auto, or another number"
        yield Verdict(member.name, "port", False, text, remedy)
    else:
        yield Verdict(member.name, "port", True, f"port {port} is free for the rendezvous")
