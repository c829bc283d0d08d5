"""Diagnosis of an unreachable agent from the output of its connection."""

import re
import shlex
from collections.abc import Sequence

from nanoscale.config.machines import Host
from nanoscale.launch.transport.transport import Local, Transport
from nanoscale.runs.failure import signal_name

SHARED_ROOT = (
    "run.root=FOLDER on a file system that every host mounts at the same path; "
    "move a run that exists already there"
)
"""The remedy if a host does not see the folder of runs; `resume` accepts no run.root."""

_CAUSES = (
    (
        "run.root",
        r"does not see the launcher's folder of runs",
        "it does not see the folder of runs",
        SHARED_ROOT,
    ),
    (
        "network",
        r"no answer from the launcher at",
        "it cannot connect back to the launcher",
        "look for a firewall between them, or use launcher=ssh",
    ),
    (
        "ssh",
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|Host key verification failed|host key is known",
        "its ssh host key has changed, or was never accepted",
        "make sure that it is the right machine, then `ssh-keygen -R {known_host}` and `{ssh} {name}` once",
    ),
    (
        "ssh",
        r"Permission denied|Too many authentication failures",
        "ssh is refused (permission denied)",
        "`{ssh} -o BatchMode=yes {name} true` must work: put your key into its authorized_keys",
    ),
    (
        "ssh",
        r"Could not resolve hostname|Name or service not known",
        "its name does not resolve to an address",
        "correct the name in the hostfile, or add it to DNS or /etc/hosts",
    ),
    (
        "ssh",
        r"Connection refused",
        "host unreachable: it refuses the connection, so no ssh server listens there",
        "start sshd there, or give its port: 'launcher.ssh_args=[-pPORT]'",
    ),
    (
        "ssh",
        r"timed out|No route to host|Network is unreachable|Host is down|not responding|Broken pipe"
        r"|Connection reset|Connection closed|lost connection",
        "host unreachable: there is no route to it, or it is switched off",
        "check that it is up, or {leave_out}",
    ),
    (
        "interpreter",
        r"No module named '?nanoscale",
        "the Python there has no nanoscale",
        "install nanoscale there, or {another_python}",
    ),
    (
        "interpreter",
        r"No module named",
        "the Python there lacks a module",
        "install the same versions there, or {another_python}",
    ),
    (
        "interpreter",
        r"No such file or directory|not found|cannot execute|Exec format error",
        "the Python interpreter does not exist there",
        "{another_python}",
    ),
)

_NOISE = re.compile(r"warn|^\[W\d+", re.IGNORECASE)
_LOST = "the agent, which supervises the ranks, was lost"


def check_of(diagnosis: str, transport: Transport) -> str:
    """Return the check that a diagnosis of `explain` belongs to; the connection by default."""
    beginnings = [(check, beginning) for check, _, beginning, _ in _CAUSES]
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
        "another_python": transport.python_remedy,
    }
    for _check, pattern, diagnosis, remedy in _CAUSES:
        match = re.search(pattern, output, re.IGNORECASE)
        if match:
            before, after = output[: match.start()], output[match.start() :]
            line = (before.rpartition("\n")[2] + after.partition("\n")[0]).strip(" @\r")[:300]
            return f"{diagnosis} ({line})", remedy.format(**names)
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
