"""Agents of local jobs as copies of the test's process, for tests of what jobs compute.

An agent starts as a new program otherwise, and its fork server loads torch for seconds. Here both are forks:
the agent is one of the test's process, which is its launcher and has torch loaded, and the fork server one of
the agent. Each has the parent, the session, the process group and the environment in /proc that it would have.
Tests of how processes start use real agents.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import importlib
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver, process, resource_tracker, util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import pytest

from nanoscale.launch.fleet import processes
from nanoscale.launch.transport.transport import AGENT
from nanoscale.processes import scratch
from nanoscale.processes.messages import MARK


@pytest.fixture(autouse=True, scope="module")
def loaded_agents() -> Iterator[None]:
    """Import this fixture into a file of tests, or a conftest.py, whose launchers run in the test's process."""
    with pytest.MonkeyPatch.context() as patches:
        loaded = SimpleNamespace(Popen=_start, PIPE=subprocess.PIPE)
        patches.setattr(processes, "subprocess", loaded)
        yield


def _start(command: Sequence[str], env: Mapping[str, str], **kwargs: Any) -> Any:
    if tuple(command) != (sys.executable, *AGENT):
        return subprocess.Popen(command, env=env, **kwargs)
    for module in ("torch._dynamo", "nanoscale.train.job"):  # as the agents of a job load them
        importlib.import_module(module)
    return LoadedAgent(env)


class LoadedAgent:
    """An agent that is a copy of this process, with the part of `Popen` that launchers use."""

    def __init__(self, env: Mapping[str, str]) -> None:
        (stdin, to_agent), (from_agent, stdout), (errors, stderr) = os.pipe(), os.pipe(), os.pipe()
        self.pid = _fork(lambda: _serve(env, (stdin, stdout, stderr)))
        for descriptor in (stdin, stdout, stderr):
            os.close(descriptor)
        self.stdin = os.fdopen(to_agent, "wb")
        self.stdout, self.stderr = os.fdopen(from_agent, "rb"), os.fdopen(errors, "rb")

    def wait(self) -> None:
        os.waitpid(self.pid, 0)


def _fork(act: Callable[[], None]) -> int:
    """Run a function in a copy of this process, without what belongs to this one; return its number."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(1)
    return pid


def _serve(env: Mapping[str, str], streams: tuple[int, int, int]) -> NoReturn:
    os.setsid()
    _keep_only(streams)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for stream in streams:
        os.close(stream)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    sys.__stderr__ = sys.stderr
    os.environ.clear()
    os.environ.update(env)
    _show_environment(env)
    sys.modules["__main__"] = ModuleType("__main__")  # which ranks would import, were it pytest
    sys.argv = [sys.argv[0]]
    atexit._clear()
    vars(util)["_finalizer_registry"].clear()
    scratch._own_folders.clear()
    _forget_processes()
    _clear_caches()
    util.spawnv_passfds = _fork_server
    runpy.run_module("nanoscale.agent", run_name="__main__")
    raise AssertionError("the agent exits by itself")


def _fork_server(_: str, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """Start a fork server in place of `multiprocessing.util.spawnv_passfds`, which starts it as a program."""
    if "multiprocessing.forkserver" not in arguments[-1]:
        return _spawn(_, arguments, descriptors)

    def serve() -> None:
        _keep_only(descriptors)
        _forget_processes()
        sys.modules.pop("nanoscale.agent.fork_server", None)  # its import prepares this process
        exec(arguments[-1])

    return _fork(serve)


_spawn = util.spawnv_passfds


def _keep_only(descriptors: Sequence[int]) -> None:
    """Forget the other files, except the standard streams, and handle signals as a new program does.

    Objects of this process may still write to the files, or close them: their numbers stay in use.
    """
    faulthandler.disable()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in [int(file.name) for file in Path("/proc/self/fd").iterdir()]:
        if descriptor > 2 and descriptor not in (*descriptors, null):
            os.dup2(null, descriptor, inheritable=False)
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE}:
        if signal.getsignal(number) not in (signal.SIG_DFL, None):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _forget_processes() -> None:
    """Let multiprocessing start its own server, tracker and folder in this copy."""
    server: Any = forkserver._forkserver
    tracker: Any = resource_tracker._resource_tracker
    processes_of_this: Any = process
    server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None
    server._lock, tracker._lock = threading.Lock(), threading.RLock()
    tracker._fd = tracker._pid = None
    processes_of_this._children.clear()
    processes_of_this.current_process()._config.pop("tempdir", None)


def _clear_caches() -> None:
    """Forget what nanoscale's functions have returned to the launcher, such as files that they have read."""
    for name, module in list(sys.modules.items()):
        for value in list(vars(module).values()) if name.startswith("nanoscale.") else ():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


def _show_environment(env: Mapping[str, str]) -> None:
    """Write variables, the job's mark first, where /proc shows this process's environment."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    first = {MARK: env[MARK]} if MARK in env else {}
    block = b"".join(
        os.fsencode(f"{name}={value}\0") for name, value in (first | dict(env)).items()
    )
    ctypes.memmove(start, block.ljust(end - start, b"\0")[: end - start - 1] + b"\0", end - start)
