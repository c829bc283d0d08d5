"""Diagnosis of an unreachable agent from the output of its connection, by `connection_errors.yaml`."""

import re
import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from nanoscale.config.machines import Host
from nanoscale.config.values.yaml_file import read
from nanoscale.launch.transport.transport import Local, Transport
from nanoscale.runs.failure import signal_name

SHARED_ROOT = (
    "run.root=FOLDER on a file system that every host mounts at the same path; "
    "move a run that exists already there"
)
"""The remedy if a host does not see the folder of runs; `resume` accepts no run.root."""

_NOISE = re.compile(r"warn|^\[W\d+", re.IGNORECASE)
_LOST = "the agent, which supervises the ranks, was lost"


@cache
def _causes() -> list[dict[str, str]]:
    causes: list[dict[str, str]] = read(Path(__file__).with_suffix(".yaml")).content["causes"]
    return causes


def check_of(diagnosis: str, transport: Transport) -> str:
    """Return the check that a diagnosis of `explain` belongs to; the connection by default."""
    beginnings = [(cause["check"], cause["diagnosis"]) for cause in _causes()]
    beginnings.append((Local.check, _LOST))
    labels = (check for check, beginning in beginnings if diagnosis.startswith(beginning))
    return next(labels, transport.check)


def explain(
    host: Host, transport: Transport, code: int | None, output: str, limit_s: float
) -> tuple[str, str]:
    """Return diagnosis and remedy.

    Args:
        transport: the one that lost the host.
        code: the exit code of the connecting command; None: it still runs, or there was none.
        output: its output.
        limit_s: how long the launcher waited for an answer.
    """
    user, separator, _ = host.name.rpartition("@")
    ssh_args = transport.config.launcher.ssh_args
    names = {
        "known_host": shlex.quote(_known_host(host, ssh_args)),
        "ssh": shlex.join(["ssh", *ssh_args]),
        "name": shlex.quote(f"{user}{separator}{host.address}"),
        "leave_out": transport.exclusion_remedy(host),
        "shared_root": SHARED_ROOT,
        "another_python": transport.python_remedy,
    }
    for cause in _causes():
        match = re.search(cause["pattern"], output, re.IGNORECASE)
        if match:
            before, after = output[: match.start()], output[match.start() :]
            line = (before.rpartition("\n")[2] + after.partition("\n")[0]).strip(" @\r")[:300]
            return f"{cause['diagnosis']} ({line})", cause["remedy"].format(**names)
    if code is None:
        return (
            f"host unreachable: it did not answer within {limit_s:g} s (launcher.connect_timeout_s)",
            f"check that it is up, or {names['leave_out']}",
        )
    name = signal_name(code)
    ending = f"it was killed by {name}" if name else f"it ended with code {code}"
    last = _last_line(output)
    return (
        f"{_LOST}: {ending}" + (f" ({last})" if last else ""),
        "its log shows what it did last; if memory ran out, use less of it",
    )


def _known_host(host: Host, ssh_args: Sequence[str]) -> str:
    """Return the name under which ssh keeps a host's key: with its port if that is not 22."""
    port = re.search(r"(?:^|\0)(?:-p|-o\0?port[ =])\0?([0-9]+)", "\0".join(ssh_args), re.IGNORECASE)
    if port is None or int(port[1]) == 22:
        return host.address
    return f"[{host.address}]:{port[1]}"


def _last_line(text: str) -> str:
    """Return the last line of the output, without routine messages of Python and torch."""
    lines = [line.strip() for line in text.splitlines() if not _NOISE.search(line)]
    return next((line[:300] for line in reversed(lines) if line), "")
