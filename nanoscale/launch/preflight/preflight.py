"""The comparison of the hosts' facts with the needs of the job."""

import ipaddress
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from nanoscale.common.errors import UserError, Violation
from nanoscale.common.object_storage import PACKAGES
from nanoscale.common.units import GIB, byte_size, counted, listed, share
from nanoscale.common.versions import versions
from nanoscale.config.optimizers import rule_of
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.rules.numbers import lacks_bf16
from nanoscale.config.schema import Config
from nanoscale.launch.fleet.connections import Member
from nanoscale.launch.fleet.fleet import Fleet
from nanoscale.launch.preflight.verdicts import CheckRow, Verdict, gpu_software, grouped, join_names
from nanoscale.launch.transport.connection_errors import SHARED_ROOT, check_of
from nanoscale.launch.transport.transport import Transport, transport_of
from nanoscale.plan.memory.states import shared_memory_bytes
from nanoscale.plan.saving import plan_saving
from nanoscale.processes.messages import Message
from nanoscale.runs.memory_order import LESS_SHARED_MEMORY

_MOST_SKEW_S = 5.0
_LEAST_GIB = {"memory": 1.0, "run.root": 1.0, "cache": 0.5, "compile cache": 0.25, "/dev/shm": 0.25}
_COMPARED = ("nanoscale", "python", "torch", "deepspeed")
"""Checks that compare versions."""
_LEAST_GPU_SHARE = 0.9
"""The least free share of a GPU's memory; a driver uses less than the rest."""


def require_ready(fleet: Fleet, config: Config) -> None:
    """Raise a UserError that lists every reason why the hosts cannot run the job.

    Lost hosts are listed next to the others. Lost hosts alone are not an error of the request: the attempt
    fails by them, or continues without them.
    """
    failed = _failed(fleet.members, config)
    lost = {member.name for member in fleet.members if not member.is_present}
    if all(verdict.host in lost for verdict in failed):
        return
    violations = [
        Violation("", None, join_names(group.hosts), group.finding, remedy=group.remedy)
        for group in grouped(failed)
    ]
    raise UserError("hosts", "the hosts are not ready for this job", violations)


def obstacle(member: Member, others: Sequence[Member], config: Config) -> str | None:
    """Return the first reason why a host cannot run the job together with others; None if there is none."""
    if not config.launcher.preflight:
        return None
    bad = (it.finding for it in _failed([*others, member], config) if it.host == member.name)
    return next(bad, None)


def mixed_versions(members: Sequence[Member], config: Config) -> str | None:
    """Return one line on hosts whose versions differ from the others', for a launch without these checks.

    None if there are none.
    """
    failed = [it for it in _failed(members, config) if it.check in _COMPARED]
    if not failed:
        return None
    hosts = "; ".join(
        f"{join_names(group.hosts)} {'has' if len(group.hosts) == 1 else 'have'} {group.finding}"
        for group in grouped(failed)
    )
    return f"versions differ, which launcher.preflight=false allows: {hosts}"


def judge(members: Sequence[Member], config: Config) -> list[Verdict]:
    """Return all verdicts, host by host. Unknown facts give no verdict."""
    hosts = _Hosts(members, config)
    return [verdict for member in members for verdict in _verdicts(hosts, member)]


def _failed(members: Sequence[Member], config: Config) -> list[Verdict]:
    return [it for it in judge(members, config) if not it.good and it.needed]


def can_compute(verdict: Verdict) -> bool:
    """True if the verdict lets its host compute with others; a job needs folders as well."""
    is_folder = verdict.check in ("run.root", "cache", "compile cache")
    return verdict.good or not verdict.needed or is_folder


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
        """The facts of the hosts that have answered."""
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


def _verdicts(hosts: _Hosts, member: Member) -> Iterator[Verdict]:
    facts = member.facts
    if member.lost is not None:
        check = check_of(member.lost.diagnosis, hosts.transport)
        yield Verdict(member.name, check, False, member.lost.diagnosis, member.lost.remedy)
        if member.nanoscale not in (None, hosts.launcher_versions["nanoscale"]):
            yield _nanoscale(hosts, member, member.nanoscale)  # it may not have understood us
    elif facts is not None:
        if not hosts.transport.is_local:
            yield Verdict(member.name, hosts.transport.check, True, "answers")
        yield Verdict(member.name, "interpreter", True, facts["executable"])
        yield _nanoscale(hosts, member, facts["versions"]["nanoscale"])
        for name in ("python", "torch", "deepspeed", "driver"):
            yield _version(hosts, member, name, facts["versions"].get(name))
        if member.name in hosts.comparable:  # otherwise other facts may have another meaning
            yield from _packages(hosts, member, facts)
            for check, bad, remedy, good, needed, amount in _rows(hosts, member, facts):
                if text := bad or good:
                    yield Verdict(member.name, check, not bad, text, remedy, amount, needed)


def _rows(hosts: _Hosts, member: Member, facts: Message) -> Iterator[CheckRow]:
    yield from _devices(hosts, member, facts)
    yield from gpu_software(hosts.config, member, facts)
    yield CheckRow("precision", _number_types(hosts, facts["devices"]["names"]), "precision=fp16")
    yield from _resources(hosts, facts)
    yield from _shared_memory(hosts, member, facts)
    yield from _network(hosts, member, facts)
    yield from _locks(hosts, facts)


# --- host and software ----------------------------------------------------------------------------


def _nanoscale(hosts: _Hosts, member: Member, version: str | None) -> Verdict:
    launcher_version = hosts.launcher_versions["nanoscale"]
    good, text = version == launcher_version, f"nanoscale {version}"
    if not good:
        text += f", and {launcher_version} is the launcher's"
    remedy = f"install the launcher's nanoscale there, or {hosts.transport.python_remedy}"
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
        remedy = hosts.transport.python_remedy
    else:
        remedy = f"install {label} {usual} there" if usual else f"install {label}"
    if usual is None and version is not None:
        remedy = f"install it on the others too, or remove {label} there"
    return Verdict(member.name, name, good, text, remedy, needed=matters)


def _packages(hosts: _Hosts, member: Member, facts: Message) -> Iterator[Verdict]:
    """Check the packages that this configuration needs; only rank 0 writes metrics."""
    config = hosts.config
    logger, writes = config.logger, member.name == hosts.first
    storage = PACKAGES.get((config.checkpoint.upload or "").partition(":")[0], "fsspec")
    own, optimizer = (
        rule_of(config.optimizer).package or "",
        f"optimizer.name={config.optimizer.name}",
    )
    rows = (
        (writes and logger.tensorboard == "on", "TensorBoard", "logger.tensorboard=on", "logger=none"),
        (writes and logger.wandb != "off", "wandb", f"logger.wandb={logger.wandb}", "logger.wandb=off"),
        (writes and logger.mlflow == "on", "MLflow", "logger.mlflow=on", "logger.mlflow=off"),
        # torch brings fsspec
        (writes and storage != "fsspec", storage, "checkpoint.upload", "checkpoint.upload=null"),
        (own, own, optimizer, "optimizer=adamw"),
        (config.precision.fp8 and not own, "torchao", "precision.fp8=true", "precision=bf16"),
        (config.lora.base == "nf4", "torchao", "lora.base=nf4", "lora.base=whole"),
        (config.model.source == "hf", "transformers", "model=hf", "a model of nanoscale's own"),
    )  # fmt: skip
    for name, setting, alternative in (row for is_needed, *row in rows if is_needed):
        package = name.lower()
        installed = package in facts["optional_packages"]
        text = f"{name} is installed" if installed else f"no {name}, which {setting} needs"
        remedy = f"install {name} there, or {alternative}"
        yield Verdict(member.name, package, installed, text, remedy)


def _minor(version: str | None) -> str:
    return ".".join((version or "").split(".")[:2])


# --- devices ---------------------------------------------------------------------------------------


def _devices(hosts: _Hosts, member: Member, facts: Message) -> Iterator[CheckRow]:
    """Check that GPUs are there, work, and equal the others; a job may differ on purpose."""
    devices, slots = facts["devices"], member.host.slots
    on_cpu = hosts.config.launcher.device == "cpu"
    names, problem = devices["names"], facts["gpu_problem"]
    if on_cpu:
        ranks_text = f" for {slots} ranks" if slots > 1 else ""
        yield CheckRow("devices", "", "", f"{counted(devices['cores'], 'CPU core')}{ranks_text}")
    else:
        count = devices["count"] if devices["kind"] == "cuda" else 0
        chosen = ", ".join(map(str, member.host.devices or ()))
        chosen_text = f", which are to be {chosen}" if chosen else ""
        text = f"{counted(count, 'GPU')} for {counted(slots, 'slot')}{chosen_text}"
        bad = text if count < slots else ""
        yield CheckRow("devices", bad, _devices_remedy(hosts, member, count), text)
    bad = "" if problem is None else f"the GPU driver does not answer: {problem}"
    remedy = "look at `nvidia-smi` and `dmesg` there; after an update of the driver, restart"
    yield CheckRow("GPUs", bad, remedy, needed=False)
    if on_cpu or not names:
        return
    text = " and ".join(f"{count} × {name}" for name, count in Counter(names).items())
    bad = "" if tuple(names) == hosts.most_common_gpus else f"{text}, unlike most hosts"
    remedy = "the slowest host sets the speed: leave it out, or use hosts with equal GPUs"
    yield CheckRow("GPUs", bad, remedy, text, needed=False)
    in_use = ", ".join(
        f"{number} ({share(int(GIB * (total - free)), int(GIB * total))})"
        for number, (free, total) in enumerate(facts["gpu_memory_gib"])
        if free < _LEAST_GPU_SHARE * total
    )
    bad = f"memory of GPU {in_use} is in use" if in_use else ""
    yield CheckRow(
        "GPU memory", bad, "`nvidia-smi` there shows by whom", "GPU memory is free", needed=False
    )


def _devices_remedy(hosts: _Hosts, member: Member, count: int) -> str:
    if member.host.devices:
        return "choose others that `nvidia-smi` lists there, with --include or --exclude"
    if not count:
        exclusion = hosts.transport.exclusion_remedy(member.host)
        return f"look at `nvidia-smi` there; or launcher.device=cpu, or {exclusion}"
    if member.host.source:
        return f"slots={count} at {member.host.source}"
    return f"launcher.devices={count}"


def _number_types(hosts: _Hosts, names: Sequence[str]) -> str:
    """Return which GPUs lack bf16 if the job uses it; otherwise PyTorch emulates it, slowly."""
    config = hosts.config
    if config.launcher.device == "cpu" or config.precision.compute != "bf16":
        return ""
    without_bf16 = sorted(set(filter(lacks_bf16, names)))
    return f"{listed(without_bf16)} has no bf16" if without_bf16 else ""


# --- memory and folders -----------------------------------------------------------------------------


def _resources(hosts: _Hosts, facts: Message) -> Iterator[CheckRow]:
    """Check memory, and the folders of runs, and of the prepared corpus and its vocabulary."""
    local, prepares = hosts.transport.is_local, hosts.config.data.source == "stdlib"
    root, cache = facts["root"], facts["cache"]
    runs = f"the folder of runs ({root['path']})"
    prepared = f"the folder of prepared data ({cache['path']})"
    elsewhere = "run.root=FOLDER, where FOLDER is writable there" if local else SHARED_ROOT
    yield from _free("memory", facts["memory_gib"], "of host memory free", "end what uses it")
    if not root["visible"] and not local:
        yield CheckRow("run.root", f"does not see {runs} of the launcher", SHARED_ROOT)
    elif root["problem"] is not None:
        yield CheckRow("run.root", f"cannot write in {runs}: {root['problem']}", elsewhere)
    else:
        remedy = "free some space, or start the run with run.root=FOLDER on another disk"
        most = math.inf
        if isinstance(hosts.config, ResolvedConfig):  # checkpoints, logs and metrics
            most = plan_saving(hosts.config, None).needed / GIB + 1 / 64
        yield from _free("run.root", root["free_gib"], f"free in {runs}", remedy, most_gib=most)
    key = "data.cache_dir=FOLDER"
    yield from _folder("cache", cache, prepared, key, prepares)
    code, compiles = facts["compile_cache"], hosts.config.backend.compile == "on"
    key = "launcher.env.TORCHINDUCTOR_CACHE_DIR=FOLDER"
    yield from _folder(
        "compile cache", code, f"the folder of compiled code ({code['path']})", key, compiles
    )


def _folder(check: str, fact: Message, name: str, key: str, needed: bool) -> Iterator[CheckRow]:
    """Check that a folder, which a key can move, is writable and has room."""
    if fact["problem"] is not None:
        text = f"cannot write in {name}: {fact['problem']}"
        yield CheckRow(check, text, key, needed=needed)
    else:
        remedy = f"free some space, or {key} on another disk"
        yield from _free(check, fact["free_gib"], f"free in {name}", remedy, needed=needed)


def _shared_memory(hosts: _Hosts, member: Member, facts: Message) -> Iterator[CheckRow]:
    """Check /dev/shm, where checkpoints in memory must have room."""
    config, size = hosts.config, 16
    least = 0.0
    if isinstance(config, ResolvedConfig):
        ranks = min(member.host.slots, config.world_size)
        least = shared_memory_bytes(config, ranks) / GIB
        size = max(size, math.ceil(least + _LEAST_GIB["/dev/shm"]))
    remedy = f"give its container more, as in `docker run --shm-size={size}g`; or remove old files"
    if least:
        remedy += f"; {LESS_SHARED_MEMORY}"
    what = "of shared memory free (/dev/shm)"
    free = facts["shared_memory_gib"]
    yield from _free("/dev/shm", free, what, remedy, needed=least > 0, least_gib=least)


def _free(
    check: str, free: float | None, resource: str, remedy: str, *, needed: bool = True,
    least_gib: float = 0.0, most_gib: float = math.inf,
) -> Iterator[CheckRow]:  # fmt: skip
    if free is not None:
        least = max(min(_LEAST_GIB[check], most_gib), least_gib)
        unit, amount = ("GiB", free) if free >= 1 else ("MiB", 1024 * free)
        text = f"{{}} {unit} {resource}"
        bad = f"only {text}; {byte_size(least * GIB)} needed" if free < least else ""
        yield CheckRow(check, bad, remedy, text, needed, amount)


def _locks(hosts: _Hosts, facts: Message) -> Iterator[CheckRow]:
    """Report stale locks, if there are any."""
    needed = hosts.config.backend.name == "deepspeed"
    for path in facts["stale_locks"]:
        text = f"{path} was left by a compilation that has ended; the next one would wait for it forever"
        yield CheckRow("locks", text, f"rm -- {shlex.quote(path)}", needed=needed)


# --- clock and network -------------------------------------------------------------------------------


def _network(hosts: _Hosts, member: Member, facts: Message) -> Iterator[CheckRow]:
    """Check the clock, that no two hosts are one machine, and the rendezvous: address, interfaces, port."""
    network, on_gpus = facts["network"], hosts.config.launcher.device == "cuda"
    if not hosts.transport.is_local:
        skew = skew_s(facts)
        text = f"clock is {{}} s {'ahead of' if skew > 0 else 'behind'} the launcher's"
        bad = text if abs(skew) >= _MOST_SKEW_S else ""
        good = text if skew else "clock agrees with the launcher's"
        remedy = "let a time service (NTP, chrony) set it"
        yield CheckRow("clock", bad, remedy, good, amount=abs(skew) or None)
    if len(hosts.members) > 1:
        same = hosts.first_on_machine[facts["machine"]]
        bad = f"is the same machine as {same}" if same != member.name else ""
        yield CheckRow("machine", bad, "leave one of them out", needed=on_gpus)
        remedy = "launcher.master_addr=ADDRESS, an address at which every host reaches the first"
        good = f"meets the others over {network['interface']}"
        yield CheckRow("network", _wrong_address(hosts, member, network), remedy, good)
        yield from _interfaces(network, on_gpus=on_gpus)
    if member.name == hosts.first:
        port = facts["port"]
        text = f"port {hosts.config.launcher.master_port} is taken: something listens there already"
        remedy = "launcher.master_port=auto, or another number"
        good = f"port {port} is free for the rendezvous"
        yield CheckRow("port", text if port is None else "", remedy, good)


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


def _interfaces(network: Message, *, on_gpus: bool) -> Iterator[CheckRow]:
    """Check the chosen network interfaces, if any."""
    interfaces = sorted(set(network["addresses"].values()))
    for name, chosen in network["chosen"].items():
        text = f"{name}={chosen}"
        misfit = f"{text} fits none of its interfaces ({', '.join(interfaces)})"
        bad = "" if _matches_interface(name, chosen, interfaces) else misfit
        remedy = f"unset {name}, or name an interface that all hosts have"
        yield CheckRow("interface", bad, remedy, text, name.startswith("GLOO") or on_gpus)


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
