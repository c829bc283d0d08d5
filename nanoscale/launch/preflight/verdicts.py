"""The results of checks of hosts, and their combination for many hosts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nanoscale.config.optimizers import rounds, rule_of
from nanoscale.config.schema import Config
from nanoscale.launch.fleet.connections import Member
from nanoscale.processes.messages import Message
from nanoscale.runs.failure import TORCH_BUILDS

_HOSTS_NAMED = 3
"""The most hosts that are named; more are counted."""
_HOST = "HOST"
"""The placeholder for each host's name in a text about several."""
_ADDRESS = re.compile(r"\S+(?= port \d+\b)")


@dataclass(frozen=True)
class Verdict:
    """The result of one check of one host."""

    host: str
    check: str
    good: bool
    text: str
    """The finding; `{}` is the place of the amount."""
    remedy: str = ""
    amount: float | None = None
    needed: bool = True
    """True if no job should start before it is good."""

    @property
    def finding(self) -> str:
        return _with_amounts(self.text, [self.amount])


class CheckRow(NamedTuple):
    """A check of a host with its result; it gives no verdict if both findings are empty."""

    check: str
    bad: str
    """The finding if there is a problem; empty if there is none."""
    remedy: str
    good: str = ""
    """The finding if there is no problem."""
    needed: bool = True
    amount: float | None = None


@dataclass(frozen=True)
class EqualVerdicts:
    """Verdicts that are equal for several hosts."""

    hosts: list[str]
    check: str
    good: bool
    finding: str
    remedy: str

    @classmethod
    def of(cls, verdicts: Sequence[Verdict]) -> EqualVerdicts:
        first, amounts = verdicts[0], [it.amount for it in verdicts]
        text, remedy = first.text, first.remedy
        if len(verdicts) > 1:
            text, remedy = (_anonymous(it, first.host) for it in (text, remedy))
        finding = _with_amounts(text, amounts)
        return cls([it.host for it in verdicts], first.check, first.good, finding, remedy)


def grouped(verdicts: Iterable[Verdict]) -> list[EqualVerdicts]:
    """Group verdicts that differ only in the host, its name in their texts, and an amount."""
    groups: dict[tuple[str, bool, str, str], list[Verdict]] = {}
    for verdict in verdicts:
        text = _anonymous(verdict.text, verdict.host)
        remedy = "" if verdict.good else _anonymous(verdict.remedy, verdict.host)
        groups.setdefault((verdict.check, verdict.good, text, remedy), []).append(verdict)
    return [EqualVerdicts.of(group) for group in groups.values()]


def join_names(hosts: Sequence[str]) -> str:
    """Join names: `n1`, `n1 and n2`, `n1, n2 and 14 more`."""
    if len(hosts) <= _HOSTS_NAMED:
        return " and ".join(filter(None, [", ".join(hosts[:-1]), *hosts[-1:]]))
    return f"{', '.join(hosts[: _HOSTS_NAMED - 1])} and {len(hosts) - _HOSTS_NAMED + 1} more"


def _anonymous(text: str, host: str) -> str:
    """Remove the host's name, and the address that ssh resolved for it."""
    text = _ADDRESS.sub(_HOST, text)
    if host not in text:
        return text
    return re.sub(rf"(?<![\w-]){re.escape(host)}(?![\w-])", _HOST, text)


def _with_amounts(text: str, amounts: Sequence[float | None]) -> str:
    values = [f"{amount:,.1f}" for amount in sorted(a for a in amounts if a is not None)]
    if not values:
        return text
    span = values[0] if values[0] == values[-1] else f"{values[0]} to {values[-1]}"
    return text.replace("{}", span)


def gpu_software(config: Config, member: Member, facts: Message) -> Iterator[CheckRow]:
    """Judge if the ranks' torch can use the GPUs of a host, and compile for them."""
    software = facts["gpu_software"]
    if config.launcher.device == "cpu" or software is None or software["torch"] is None:
        return
    problem, remedy = torch_problem(software, facts, member)
    build, driver = software["torch"], software["driver_cuda"]
    limit = f"; the driver supports CUDA {_version(driver)}" if driver else ""
    good = f"torch {build['version']} is built for CUDA {build['cuda']}{limit}"
    yield CheckRow("CUDA", problem, f"{remedy}, or launcher.device=cpu", good)
    yield _links(software["links"], software["fabric"])
    for lack, help_text in software["infiniband"]:
        yield CheckRow("InfiniBand", lack, help_text, needed=False)
    if not problem:
        yield from _compiler(config, facts)


def torch_problem(software: Message, facts: Message, member: Member) -> tuple[str, str]:
    """Return why the torch there cannot use the GPUs, and the remedy; both empty if it can."""
    build, driver = software["torch"], software["driver_cuda"]
    torch = f"torch {build['version']}"
    if build["cuda"] is None:
        for_driver = f" for CUDA {driver[0]}" if driver else ""
        problem = f"{torch} is built without CUDA and cannot use the GPUs"
        return problem, f"install a build of torch{for_driver} there ({TORCH_BUILDS})"
    # Within a major version of CUDA each driver supports each build (NVIDIA: minor version compatibility).
    if driver and driver[0] < int(build["cuda"].partition(".")[0]):
        driver_text = (
            f"the GPU driver {facts['versions']['driver']} supports CUDA {_version(driver)}"
        )
        problem = f"{driver_text}, and {torch} is built for CUDA {build['cuda']}"
        alternative = f"install a build of torch for CUDA {driver[0]} there ({TORCH_BUILDS})"
        return problem, f"update the driver, or {alternative}"
    architectures = build["architectures"]
    gpus = list(zip(facts["devices"]["names"], software["capabilities"], strict=False))
    unsupported = [gpu for gpu in gpus if not has_kernels(architectures, gpu[1])]
    if unsupported and len(gpus) - len(unsupported) < member.host.slots:
        kinds = sorted({f"{name} (sm_{major}{minor})" for name, (major, minor) in unsupported})
        kernels_text = f"it has kernels for {', '.join(architectures)}"
        problem = f"{torch} has no kernels for {' and '.join(kinds)}: {kernels_text}"
        return problem, f"install a build of torch there that has them ({TORCH_BUILDS})"
    return "", ""


def _links(links: Sequence[Sequence[int]], fabric: Sequence[str]) -> CheckRow:
    """Judge the links of a host's GPUs: a lost NVLink, or lanes of PCIe that are not in use."""
    most = max((active for active, *_ in links), default=0)
    fewer = [number for number, (active, *_) in enumerate(links) if active < most]
    narrow = [number for number, (_, lanes, whole, _) in enumerate(links) if lanes < whole]
    problems = [f"GPU {number} has {links[number][0]} NVLinks, others {most}" for number in fewer]
    problems += [f"GPU {it} uses {links[it][1]} of {links[it][2]} lanes of PCIe" for it in narrow]
    ports = Counter(fabric)
    words = [f"{most} NVLinks a GPU"] if most else []
    words += [f"PCIe {links[0][3]} x{links[0][2]}"] if links else []
    words += [name if "RDMA" in name else f"{n} × {name}" for name, n in ports.items()]
    remedy = "look at `nvidia-smi topo -m`, `nvidia-smi nvlink -s` and `dmesg` there"
    return CheckRow("links", "; ".join(problems), remedy, ", ".join(words), needed=False)


def _version(numbers: Sequence[int]) -> str:
    return ".".join(map(str, numbers))


def has_kernels(architectures: Sequence[str], capability: Sequence[int]) -> bool:
    """True if code for one of the architectures runs on a GPU of this capability, or none is known.

    Compiled code (sm_…) runs on GPUs of its major version from its minor version on, PTX (compute_…) on all
    newer ones; with the suffix `a`, each on its own capability alone, and with `f` within its major version.
    """
    return not architectures or any(_runs(name, tuple(capability)) for name in architectures)


def _runs(architecture: str, capability: tuple[int, ...]) -> bool:
    kind, _, number = architecture.partition("_")
    digits = number.rstrip("af")
    target = (int(digits[:-1]), int(digits[-1]))
    if number.endswith("a"):
        return capability == target
    newer = capability >= target
    return newer and (capability[0] == target[0] or (kind == "compute" and number == digits))


def _compiler(config: Config, facts: Message) -> Iterator[CheckRow]:
    """Judge if Triton can compile, if the job compiles. A compile that is `auto` is not resolved yet."""
    settings, alternatives = [], []
    if config.backend.name == "native" and config.backend.compile != "off":
        settings.append(f"backend.compile={config.backend.compile}")
        alternatives.append("backend.compile=off")
    compiles_update = rule_of(config.optimizer).compiled
    if compiles_update:
        settings.append(f"optimizer.name={config.optimizer.name}")
        alternatives.append("optimizer=adamw")
    if rounds(config.optimizer, config.precision):
        compiles_update = True
        settings.append("an update with stochastic rounding")
        alternatives.append("precision=bf16 optimizer.moments_dtype=params")
    if not settings:
        return
    problem, remedy = compile_problem(facts)
    bad = f"{problem}, which {' and '.join(settings)} needs" if problem else ""
    good = f"{facts['gpu_software']['compiler']['path']} builds what Triton needs"
    needed = config.backend.compile == "on" or compiles_update
    yield CheckRow("compiler", bad, f"{remedy}; or {' '.join(alternatives)}", good, needed)


def compile_problem(facts: Message) -> tuple[str, str]:
    """Return why Triton cannot compile kernels there, and the remedy; both empty if it can."""
    compiler = facts["gpu_software"]["compiler"]
    setting = "launcher.env.CC=/path/to/gcc"
    if "triton" not in facts["optional_packages"]:
        return "no Triton", "install torch there again, with the packages that it depends on"
    if compiler["path"] is None:
        return f"no C compiler ({compiler['problem']})", f"install gcc there, or name it: {setting}"
    if "Python.h" in compiler["problem"]:
        packages = "python3-dev, or python3-devel"
        return f"no Python.h for {compiler['path']}", f"install Python's headers there ({packages})"
    if compiler["problem"]:
        text = f"no C compiler that works ({compiler['path']}: {compiler['problem']})"
        return text, f"fix it, or name another: {setting}"
    return "", ""
