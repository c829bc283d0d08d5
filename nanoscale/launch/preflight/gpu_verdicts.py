"""Verdicts on the software between a host's GPUs and its ranks. Pure: they follow from the host's facts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nanoscale.config.schema import Config
from nanoscale.launch.fleet.connections import Member
from nanoscale.launch.preflight.verdicts import Verdict
from nanoscale.processes.messages import Message
from nanoscale.runs.failure import TORCH_BUILDS


def gpu_software(config: Config, member: Member, facts: Message) -> Iterator[Verdict]:
    """Judge if the ranks' torch can use the GPUs of a host, and compile for them."""
    software = facts["gpu_software"]
    if config.launcher.device == "cpu" or software is None or software["torch"] is None:
        return
    problem, remedy = torch_problem(software, facts, member)
    if problem:
        yield Verdict(member.name, "CUDA", False, problem, f"{remedy}, or launcher.device=cpu")
        return
    build, driver = software["torch"], software["driver_cuda"]
    limit = f"; the driver supports CUDA {_version(driver)}" if driver else ""
    text = f"torch {build['version']} is built for CUDA {build['cuda']}{limit}"
    yield Verdict(member.name, "CUDA", True, text)
    yield from _compiler(config, member, facts)


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


def _compiler(config: Config, member: Member, facts: Message) -> Iterator[Verdict]:
    """Judge if Triton can compile, if the job compiles. A compile that is `auto` is not resolved yet."""
    settings, alternatives = [], []
    if config.backend.name == "native" and config.backend.compile != "off":
        settings.append(f"backend.compile={config.backend.compile}")
        alternatives.append("backend.compile=off")
    if config.optimizer.name == "adamw8bit":
        settings.append("optimizer.name=adamw8bit")
        alternatives.append("optimizer=adamw")
    if not settings:
        return
    problem, remedy = compile_problem(facts)
    if problem:
        text = f"{problem}, which {' and '.join(settings)} needs"
        remedy = f"{remedy}; or {' '.join(alternatives)}"
        needed = config.backend.compile == "on" or config.optimizer.name == "adamw8bit"
        yield Verdict(member.name, "compiler", False, text, remedy, needed=needed)
    else:
        path = facts["gpu_software"]["compiler"]["path"]
        yield Verdict(member.name, "compiler", True, f"{path} builds what Triton needs")


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
