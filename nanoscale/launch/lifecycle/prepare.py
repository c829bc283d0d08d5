"""Preparing a run directory for a launch from a checked configuration."""

import importlib.metadata
import platform
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import nanoscale
from nanoscale.checkpoint.configuration import record_changes
from nanoscale.common.devices import cores
from nanoscale.common.errors import UserError, Violation
from nanoscale.common.json_text import Json
from nanoscale.config.composing.frozen import dump
from nanoscale.config.composing.interpolation import variables
from nanoscale.config.deepspeed import deepspeed_settings
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.rules import Devices
from nanoscale.config.values.hooks import file_name, read
from nanoscale.config.values.provenance import Composed
from nanoscale.config.violations import override
from nanoscale.launch.request import Request
from nanoscale.runs import status, trust
from nanoscale.runs.changes import TAGS_KEY
from nanoscale.runs.directory import (
    RunDirectory,
    check_free,
    check_name,
    check_root,
    free_name,
    free_names,
    write_atomically,
    write_json,
)
from nanoscale.runs.lock import RunLock, owner

_PACKAGES = (
    "torch", "numpy", "tokenizers", "hydra-core", "omegaconf", "pyyaml", "xxhash", "deepspeed",
)  # fmt: skip


def name_run(composed: Composed, config: ResolvedConfig, *, repeats: bool) -> ResolvedConfig:
    """Name the run: the requested name, or an unused one.

    Args:
        repeats: True for the configuration of another run; its name is only a prefix.
    """
    name, is_requested = _wanted_name(composed, config, repeats=repeats)
    if not is_requested:
        name = free_name(Path(config.run.root), name)
    return replace(config, run=replace(config.run, name=name))


def _wanted_name(composed: Composed, config: ResolvedConfig, *, repeats: bool) -> tuple[str, bool]:
    """Return the name for a run, and False if any unused name that begins so will do."""
    name = config.run.name
    if name is None:
        return f"{composed.recipe or 'run'}-{time.strftime('%Y%m%d-%H%M%S')}", False
    return name, not repeats or composed.by_hand("run.name")


def check_new_run(config: ResolvedConfig) -> None:
    """Check that a named run can be created. Writes nothing.

    Raises:
        UserError: the name is used or invalid, or no run can be created under run.root.
    """
    root, name = Path(config.run.root), str(config.run.name)
    check_root(root)
    check_name(name)
    check_free(root, name, is_running=owner(RunDirectory(root / name)) is not None)


def name_runs(requests: Sequence[Request]) -> tuple[str, list[Request]]:
    """Name the runs of an array: a shared name, requested or unused, and a number."""
    first, named = requests[0], []
    repeats = first.repeats is not None
    shared_name, is_requested = _wanted_name(first.composed, first.config, repeats=repeats)
    if not is_requested:
        shared_name = free_names(Path(first.config.run.root), shared_name, len(requests))
    for number, request in enumerate(requests):
        run = replace(request.config.run, name=f"{shared_name}-{number}")
        named.append(replace(request, config=replace(request.config, run=run)))
    return shared_name, named


def check_new_runs(requests: Sequence[Request], shared: str) -> None:
    """Check that the runs of an array can be created. Writes nothing.

    Raises:
        UserError: the shared name is used or invalid, or no run can be created under run.root.
    """
    first = requests[0]
    root = Path(first.config.run.root)
    check_root(root)
    check_name(f"{shared}-{len(requests)}")
    free = free_names(root, shared, len(requests))
    if free != shared:
        source, suggestion = first.composed.source("run.name"), override("run.name", free)
        rule = "a new run never overwrites an old one"
        violation = Violation("run.name", shared, source, rule, (suggestion,))
        message = f"runs named {shared!r} exist already in {root.absolute()}"
        raise UserError("run", message, [violation])


@contextmanager
def new_run(request: Request) -> Iterator[RunLock]:
    """Create the run directory, completely or not at all, and hold its lock until the block ends.

    Raises:
        UserError: the name is used by now, or the root cannot be written to.
    """
    run = request.run
    with ExitStack() as stack:
        with RunDirectory.build(run.path.parent, run.name) as new_directory:
            lock = stack.enter_context(RunLock(run, new_directory.path))
            write_configuration(new_directory, request, run.path)
            write_json(new_directory.environment, environment(request.devices))
            if request.plan is not None:
                write_json(new_directory.plan, request.plan)
            if request.program is not None:
                write_json(new_directory.program, request.program)
            status.write(new_directory, status.prepared())
        yield lock


def _frozen(request: Request, run: Path) -> tuple[ResolvedConfig, str]:
    """Return the configuration and config.yaml of a run at `run`, in which the file of hooks is its copy."""
    config, hooks = request.config, request.config.hooks
    if hooks.path is not None:
        copy = str(run / file_name(str(hooks.sha256)))
        config = replace(config, hooks=replace(hooks, path=copy))
    return config, dump(config, request.composed.requested)


def write_configuration(run: RunDirectory, request: Request, home: Path | None = None) -> None:
    """Freeze the configuration of the ranks, the source of each value, and the file of hooks.

    Args:
        home: the run's later place.

    Raises:
        UserError: the file of hooks has changed since it was checked.
    """
    hooks = request.config.hooks
    if hooks.path is not None:
        found = read(Path(hooks.path))
        if found.sha256 != hooks.sha256:
            raise UserError("hooks", f"{hooks.path} has changed while the launch was prepared")
        write_atomically(run.path / file_name(found.sha256), found.text.decode())
    config, text = _frozen(request, home or run.path)
    write_atomically(run.config, text)
    write_json(run.provenance, provenance(request.composed))
    if request.config.backend.name == "deepspeed":
        write_json(run.deepspeed, deepspeed_settings(request.config))
    trust.sign(run.path, trust.executed(config))


def replace_configuration(run: RunDirectory, request: Request, last_attempt: int) -> None:
    """Freeze the configuration of a further attempt and its plan; the previous one is kept if it differs."""
    write_json(run.environment, environment(request.devices))
    record_changes(run, request.config, request.composed.by_hand_around)
    if request.composed.by_hand(TAGS_KEY):
        run.tags.unlink(missing_ok=True)
    previous = run.config.read_text("utf-8")
    config, text = _frozen(request, run.path)
    if text != previous:
        write_atomically(run.attempt_config(last_attempt), previous)
        write_configuration(run, request)
        run.plan.unlink(missing_ok=True)
        run.program.unlink(missing_ok=True)
    trust.sign(run.path, trust.executed(config))  # also if another user's was trusted unchanged
    if request.plan is not None:
        write_json(run.plan, request.plan)
    if request.program is not None:
        write_json(run.program, request.program)


def provenance(composed: Composed) -> Json:
    """Return the content of provenance.json: every key's value and source, and the values that it replaced."""
    return {
        key: {
            **_provenance_entry(key, settings[-1]),
            "overrode": [_provenance_entry(key, setting) for setting in reversed(settings[:-1])],
        }
        for key, settings in composed.history.items()
    }


def environment(devices: Devices) -> Json:
    """Return the content of environment.json: the devices and the versions of the run's start."""
    import psutil

    packages = {}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return {
        "nanoscale": nanoscale.__version__,
        "python": platform.python_version(),
        "packages": packages,
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cores": cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 3),
        "device": devices.kind,
        "gpus": list(devices.names),
        "executable": sys.executable,
        "time": time.time(),
    }


def _provenance_entry(key: str, setting: Any) -> Json:
    entry = asdict(setting)
    if names := variables(key, entry["value"]):
        entry["environment"] = names
    if not isinstance(entry["value"], (str, int, float, bool, list, type(None))):
        entry["value"] = str(entry["value"])
    return entry
