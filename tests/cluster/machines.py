"""Several machines on this one: namespaces of the kernel, joined by a bridge.

A machine is a process, its init, with a PID, network, mount, UTS (host name) and IPC namespace of its own. All
that runs on the machine runs in these namespaces. No namespace has a name: each lives as long as its init, and
inits ask the kernel to be killed when the tests' process dies (PDEATHSIG). So nothing is left on this machine,
even after a SIGKILL, and two test runs at once never meet: each has its own bridge, in a network namespace that
no route leads to. The tests' process is on none of these machines: what needs their network is started by
`run_in`.

What a machine has of its own: an address (10.77.0.0/24, and fd77::/64 where the kernel has IPv6), host name,
/etc/hosts with the names of all, /proc, /sys, /run, /dev/shm, boot identity, and what `make_private` gives it.
The rest of the file system is this machine's and shared by all, locks of files included, as on a cluster with a
perfect file server. Clocks are shared too.

Pitfalls:

- A child that was put into a PID namespace from outside keeps that namespace's init from dying until its parent
  has waited for it. So `power_off` reaps what `run_in` started.
- `nsenter --pid` forks, and a signal to it never reaches the program. Here the calling thread takes on the PID
  namespace for its children before it forks; `Popen.pid` is the program's own.
- The kernel of a machine that loses its power sends nothing; a killed process's kernel closes its connections.
  So the bridge's port is shut first, and the next boot has a new network namespace: the old one still holds
  connections that would say goodbye once the link is back.
- Shutting a port (`bridge link set … state 0`) leaves the carrier on; `ip link set … down` would be noticed at
  the other end.
- `ip netns exec` mounts a new /sys and so hides the control groups, which slurmd looks for; here they are put
  back.
- An init that does not reap leaves every orphan behind as a zombie. With SIGCHLD ignored the kernel reaps;
  dash's `trap '' CHLD` does not outlive its `exec`, `env --ignore-signal` does.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

CLONE_NEWPID = 0x20000000
SHUT, FORWARDING = 0, 3
"""States of a bridge's port."""
LIMIT_S = 300.0
"""Seconds; only a system that is stuck takes longer, however busy the machine is."""

_libc = ctypes.CDLL(None, use_errno=True)

_BOOT = """
set -e
mount -t tmpfs -o mode=755 tmpfs /run
mkdir /run/sshd /run/munge /run/lock /run/cgroup
mount --rbind /sys/fs/cgroup /run/cgroup
mount -t sysfs sysfs /sys
mount --rbind /run/cgroup /sys/fs/cgroup
mount -t proc proc /proc
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount --bind {folder}/boot_id /proc/sys/kernel/random/boot_id
mount --bind {hosts} /etc/hosts
hostname {name}
ip link set lo up
echo booted
exec env --ignore-signal=CHLD sleep infinity >/dev/null 2>&1
"""

_SWITCH = """
set -e
ip link add switch type bridge forward_delay 0 mcast_snooping 0
ip link set switch up
echo switching
exec sleep infinity >/dev/null 2>&1
"""


_SHARE = """
import ctypes, os, subprocess, sys
OPEN_TREE, MOVE_MOUNT, CLONE, FROM_EMPTY_PATH, HERE = 428, 429, 1, 4, -100
path, size, *inits = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)

def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

first, *others = [os.open(f"/proc/{init}/ns/mnt", os.O_RDONLY) for init in inits]
check(libc.setns(first, 0))
subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=777", "tmpfs", path], check=True)
for other in others:
    check(libc.setns(first, 0))
    copy = check(libc.syscall(OPEN_TREE, HERE, path.encode(), CLONE))
    check(libc.setns(other, 0))
    check(libc.syscall(MOVE_MOUNT, copy, b"", HERE, path.encode(), FROM_EMPTY_PATH))
"""
"""Another machine cannot bind a mount of the first, but a copy of it can be carried there."""


class Machine:
    """A machine: its name, its disk, and its init while it is on."""

    def __init__(self, name: str, number: int, folder: Path) -> None:
        self.name = name
        self.number = number
        self.folder = folder
        self.address = f"10.77.0.{number}"
        self.address6 = f"fd77::{number:x}"
        self.private: list[Path] = []
        self.init: subprocess.Popen[str] | None = None
        self.services: dict[subprocess.Popen[Any], Path] = {}
        """The machine's services, with their logs."""
        self.started: list[subprocess.Popen[Any]] = []

    def namespace(self, kind: str) -> str:
        assert self.init is not None, f"{self.name} is off"
        return f"/proc/{self.init.pid}/ns/{kind}"


class Machines:
    """The machines `names`, all on, from `with` to its end.

    Must be entered in a thread that lives as long: the kernel takes its end for the end of the tests' process.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder = folder.resolve()
        self.names = tuple(names)
        self._machines = {
            name: Machine(name, number, self.folder / name) for number, name in enumerate(names, 1)
        }
        self._switch: subprocess.Popen[str] | None = None

    def __enter__(self) -> Any:
        try:
            self._prepare()
            self._switch = _start_switch()
            for name in self.names:
                self._boot(self._machines[name])
            for name in self.names:
                self._connect(self._machines[name])
            self._start_services(self.names)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Turn everything off. All namespaces, links and mounts go with the processes."""
        for machine in self._machines.values():
            _kill(machine)
        if self._switch is not None:
            self._switch.kill()
            self._switch.wait()
            self._switch = None

    # -- inside the machines --

    def run_in(self, node: str, argv: Sequence[object], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on a machine. Options are Popen's; `pid` is the program's, signals reach it."""
        machine = self._machines[node]
        enter = [
            "nsenter",
            *(f"--{kind}={machine.namespace(file)}" for kind, file in _ENTERED),
            "env",
            f"--chdir={options.pop('cwd', None) or Path.cwd()}",
            "--default-signal",
        ]
        with _children_in(machine.namespace("pid")):
            process = subprocess.Popen([*enter, *map(str, argv)], **options)
        machine.started.append(process)
        return process

    def call(
        self, node: str, argv: Sequence[object], *, limit_s: float = LIMIT_S, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a machine to its end; return its output."""
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = self.run_in(node, argv, text=True, **(pipes | options))
        try:
            out, err = process.communicate(timeout=limit_s)
        except BaseException:
            process.kill()
            process.communicate()
            raise
        return subprocess.CompletedProcess(list(map(str, argv)), process.returncode, out, err)

    def processes(self, *nodes: str) -> dict[int, str]:
        """Return the processes on machines, on all if none is named, besides their inits and services.

        Pids are this machine's; values are command lines.
        """
        of_nodes = self.processes_by_node(*nodes).values()
        return {pid: line for found in of_nodes for pid, line in found.items()}

    def processes_by_node(self, *nodes: str) -> dict[str, dict[int, str]]:
        """Return the same by the names of those machines that are on."""
        on = [m for m in self._machines.values() if m.init and m.name in (nodes or self.names)]
        own = {m.init.pid for m in on} | {service.pid for m in on for service in m.services}
        names = {Path(machine.namespace("pid")).stat().st_ino: machine.name for machine in on}
        found: dict[str, dict[int, str]] = {machine.name: {} for machine in on}
        for pid in psutil.pids():
            with suppress(psutil.Error, OSError):
                name = names.get(os.stat(f"/proc/{pid}/ns/pid").st_ino)  # noqa: PTH116 - in every poll
                if name is None or pid in own:
                    continue
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    found[name][pid] = shlex.join(process.cmdline())
        return found

    def address(self, node: str) -> str:
        return self._machines[node].address

    def address6(self, node: str) -> str:
        return self._machines[node].address6

    def is_on(self, node: str) -> bool:
        return self._machines[node].init is not None

    def make_private(self, path: Path) -> dict[str, Path]:
        """Give every machine a folder of its own at `path`; where each of them is seen from here.

        They outlive a loss of power, as a disk does.
        """
        path.mkdir(parents=True, exist_ok=True)
        for machine in self._machines.values():
            machine.private.append(path)
            _on_disk(machine, path).mkdir(parents=True)
            if machine.init is not None:
                self._mount_private(machine, path)
        return {name: _on_disk(machine, path) for name, machine in self._machines.items()}

    def share_memory(self, path: Path, size: str) -> None:
        """Mount one small file system in memory at `path` of every machine that is on; `size` as in `64m`.

        A machine that loses its power loses the mount too. From here it is seen at `seen_from`.
        """
        path.mkdir(parents=True, exist_ok=True)
        inits = [str(m.init.pid) for m in self._machines.values() if m.init is not None]
        _check([sys.executable, "-c", _SHARE, str(path), size, *inits])

    def seen_from(self, node: str, path: Path) -> Path:
        """Return the path of a machine's path on this machine."""
        init = self._machines[node].init
        assert init is not None, f"{node} is off"
        return Path(f"/proc/{init.pid}/root") / path.relative_to("/")

    # -- what happens to machines --

    def power_off(self, node: str) -> None:
        """Kill everything on it at once, without sending a packet."""
        self.partition(node)
        _kill(self._machines[node])
        wait_until(lambda: self._remove_port(node), f"end of {node}'s link")

    def power_on(self, node: str) -> None:
        """Boot it again: new processes, the old address, name and disk."""
        assert not self.is_on(node), f"{node} is on"
        machine = self._machines[node]
        self._boot(machine)
        self._connect(machine)
        self._start_services([node])

    def partition(self, node: str) -> None:
        """Its packets are dropped in both directions; it lives on and is not told."""
        self._set_port(node, SHUT)

    def heal(self, node: str) -> None:
        self._set_port(node, FORWARDING)

    def restore(self) -> None:
        """Everything on, connected, and idle, for the next test."""
        self._bring_back()
        self._end_processes()

    # -- for those who build on this --

    def _prepare(self) -> None:
        """Write what machines need before they boot."""
        self.folder.mkdir(parents=True, exist_ok=True)
        names = [f"{m.address} {m.name}" for m in self._machines.values()]
        local = ["127.0.0.1 localhost", "::1 localhost ip6-localhost"]
        (self.folder / "hosts").write_text("\n".join([*local, *names]) + "\n")
        for machine in self._machines.values():
            machine.folder.mkdir()

    def _start_services(self, nodes: Sequence[str]) -> None:
        """Start what these machines run from their boot on."""

    def _serve(
        self, node: str, argv: Sequence[object], log: str, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a service in the foreground, with its output in the machine's file `log`."""
        machine = self._machines[node]
        with (machine.folder / log).open("wb") as out:
            options = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out} | options
            service = self.run_in(node, argv, start_new_session=True, cwd="/", **options)
        machine.services[service] = machine.folder / log
        return service

    def _await_services(self, condition: Callable[[], Any], what: str) -> None:
        """Wait until services are ready, or one of them has ended."""

        def ready() -> Any:
            for machine in self._machines.values():
                for service, log in machine.services.items():
                    assert service.poll() is None, f"{machine.name}: {log.read_text()[-2000:]}"
            return condition()

        wait_until(ready, what)

    def _end_service(self, node: str, service: subprocess.Popen[Any]) -> None:
        service.kill()
        service.wait()
        del self._machines[node].services[service]

    # -- the making of machines --

    def _boot(self, machine: Machine) -> None:
        (machine.folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
        hosts = self.folder / "hosts"
        words = {"folder": machine.folder, "hosts": hosts, "name": machine.name}
        script = _BOOT.format(**{key: shlex.quote(str(word)) for key, word in words.items()})
        unshare = ["unshare", "--net", "--uts", "--ipc", "--mount", "--propagation", "slave"]
        with _children_in(None):
            machine.init = _start_bound_to_us([*unshare, "sh", "-c", script])
        _await_word(machine.init, "booted")
        for path in machine.private:
            self._mount_private(machine, path)

    def _connect(self, machine: Machine) -> None:
        """Join its interface to the bridge. Its hardware address stays: others remember it."""
        assert machine.init is not None
        hardware = f"02:00:00:00:00:{machine.number:02x}"
        self._switch_ip(
            f"link add dev {machine.name} type veth"
            f" peer name eth0 address {hardware} netns {machine.init.pid}",
            f"link set dev {machine.name} master switch up",
        )
        commands = [f"addr add {machine.address}/24 dev eth0", "link set dev eth0 up"]
        if Path("/proc/sys/net/ipv6").exists():
            commands.append(f"addr add {machine.address6}/64 dev eth0 nodad")
        _ip(machine.namespace("net"), *commands)

    def _mount_private(self, machine: Machine, path: Path) -> None:
        done = self.call(machine.name, ["mount", "--bind", _on_disk(machine, path), path])
        assert done.returncode == 0, done.stderr

    def _set_port(self, node: str, state: int) -> None:
        command = ["bridge", "link", "set", "dev", node, "state", str(state)]
        _check([*self._in_switch(), *command])

    def _remove_port(self, node: str) -> bool:
        """Remove a port; True once it is removed, which the kernel does too when nothing keeps the other
        end."""
        command = [*self._in_switch(), "ip", "link", "del", "dev", node]
        done = subprocess.run(command, capture_output=True, text=True)
        return "Cannot find device" in done.stderr

    def _switch_ip(self, *commands: str) -> None:
        assert self._switch is not None
        _ip(f"/proc/{self._switch.pid}/ns/net", *commands)

    def _in_switch(self) -> list[str]:
        assert self._switch is not None
        return ["nsenter", f"--net=/proc/{self._switch.pid}/ns/net"]

    def _bring_back(self) -> None:
        for node in self.names:
            if self.is_on(node):
                self.heal(node)
            else:
                self.power_on(node)

    def _end_processes(self) -> None:
        def ended() -> bool:
            running = self.processes()
            for pid in running:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for machine in self._machines.values():
                machine.started = [process for process in machine.started if process.poll() is None]
            return not running

        wait_until(ended, "end of what ran on the machines")


def wait_until(condition: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
    """Wait for a condition to hold; return its result. It is asked ever less often, as it may cost a process.

    Raises:
        AssertionError: it did not hold within the limit.
    """
    deadline, pause = time.monotonic() + limit_s, 0.02
    while not (found := condition()):
        assert time.monotonic() < deadline, f"no {what} within {limit_s:g} s"
        time.sleep(pause)
        pause = min(0.2, 1.3 * pause)
    return found


_ENTERED = (("net", "net"), ("uts", "uts"), ("ipc", "ipc"), ("mount", "mnt"))


@contextmanager
def _children_in(namespace: str | None) -> Iterator[None]:
    """Start this thread's children in a PID namespace: an existing one, or with None a new one."""
    own = os.open("/proc/thread-self/ns/pid", os.O_RDONLY)
    try:
        if namespace is None:
            _system(_libc.unshare(CLONE_NEWPID))
        else:
            target = os.open(namespace, os.O_RDONLY)
            try:
                _system(_libc.setns(target, CLONE_NEWPID))
            finally:
                os.close(target)
        try:
            yield
        finally:
            _system(_libc.setns(own, CLONE_NEWPID))
    finally:
        os.close(own)


def _system(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _start_switch() -> subprocess.Popen[str]:
    """Start a network namespace with only a bridge."""
    switch = _start_bound_to_us(["unshare", "--net", "sh", "-c", _SWITCH])
    _await_word(switch, "switching")
    return switch


def _start_bound_to_us(argv: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _await_word(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    with process.stdout as stdout:
        text = stdout.read()
    assert text.strip() == word, f"a machine did not come up: {text}"


def _kill(machine: Machine) -> None:
    """Kill its init, with which the kernel kills the rest, and wait for the end of it all."""
    if machine.init is None:
        return
    machine.init.kill()

    def gone() -> bool:
        for process in machine.started:
            process.poll()
        return machine.init.poll() is not None

    wait_until(gone, f"end of {machine.name}")
    machine.init = None
    machine.services.clear()
    machine.started.clear()


def _on_disk(machine: Machine, path: Path) -> Path:
    return machine.folder / "disk" / path.relative_to("/")


def _ip(namespace: str, *commands: str) -> None:
    _check(["nsenter", f"--net={namespace}", "ip", "-batch", "-"], input="\n".join(commands))


def _check(argv: Sequence[str], **options: Any) -> None:
    done = subprocess.run(argv, text=True, capture_output=True, **options)
    assert done.returncode == 0, f"{shlex.join(argv)}: {done.stdout}{done.stderr}"
