"""The agents of all hosts: their start, the messages from and to them, and their certain end."""

from __future__ import annotations

import os
import selectors
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from nanoscale.config.machines import Host
from nanoscale.config.schema import Config
from nanoscale.launch.fleet.member import Member
from nanoscale.launch.fleet.orphan_cleanup import Sweeps
from nanoscale.launch.fleet.processes import Process, adopt_orphans, end_all
from nanoscale.launch.fleet.reverse_connection import Callbacks
from nanoscale.launch.transport.connection_errors import explain
from nanoscale.launch.transport.transport import transport_of
from nanoscale.processes import scratch
from nanoscale.processes.limits import allow_open_files
from nanoscale.processes.messages import BEAT, BEAT_S, MARK, TRAINING, Message, Sender, Unpacker
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.failure import agent_failure

_READ_BYTES = 1 << 20
_FILES_A_HOST = 4
_FAREWELL_S = 5.0
"""Seconds for agents to exit regularly before they are killed."""
_LAST_WORDS_S = 2.0
"""Seconds for the process of a broken connection to explain itself."""
_LOOK_S = 0.1
"""Seconds between two checks of all hosts, however much output some of them send."""
_STALL_S = 1.5
_KEPT_BYTES = 1 << 16


class Fleet:
    """A fleet of agents, one on every host when entered; none remains afterwards.

    Args:
        hosts: the hosts; with launcher=local, one host that is this machine.
        root: the folder of runs, which all hosts must see.
    """

    def __init__(self, config: Config, hosts: Sequence[Host], root: Path) -> None:
        self._config = config
        self._launcher = config.launcher
        self.transport = transport_of(config)
        self._root = existing(root)
        self._probe = f".nanoscale-{uuid.uuid4().hex}"
        self._key = os.urandom(32)
        self._mark = uuid.uuid4().hex
        self._selector = selectors.DefaultSelector()
        self._callbacks: Callbacks | None = None
        self._preparation: Message = {"environment": {}}
        """The common request to all hosts."""
        self._processes: list[Process] = []
        """All processes that were ever started."""
        self._sweeps = Sweeps(self.transport, {MARK: self._mark})
        self._logs: tuple[RunDirectory, int] | None = None
        self.left_behind: list[int] = []
        """Processes of this machine that could not be ended."""
        self._looked = time.monotonic()
        self._closing = threading.Event()
        commands = self.transport.commands(hosts)
        self.members = [Member(h, c) for h, c in zip(hosts, commands, strict=True)]

    # --- beginning and end --------------------------------------------------------------------------

    def __enter__(self) -> Fleet:
        adopt_orphans()
        allow_open_files(_FILES_A_HOST * len(self.members) + 256)
        try:
            if self.transport.is_reverse:
                self._callbacks = Callbacks(self._key, len(self.members))
                self._selector.register(self._callbacks, selectors.EVENT_READ, (None, "calls"))
            self.connect(self.members)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.set()
        self._take_leave()
        self._sweeps.finish()
        if self.transport.leaves_session:
            self.left_behind = end_all([process.pid for process in self._processes], self._mark)
        for process in self._processes:
            # srun's other process reports its end to SLURM, so that the tasks end.
            process.kill(alone=self.transport.is_reverse)
        for process in self._processes:
            process.reap()
        if self._callbacks is not None:
            self._callbacks.close()
        self._selector.close()
        if self.transport.is_local:
            scratch.remove_stale()  # an agent that was killed while it started has no process that would
        self._hide_probe()
        adopt_orphans(False)

    def _take_leave(self) -> None:
        """Let idle agents exit by themselves: they remove their files."""
        present = [m for m in self.members if m.is_there and m.facts is not None]
        self.tell(present, "quit")
        deadline = time.monotonic() + _FAREWELL_S
        while present and time.monotonic() < deadline:
            self.poll(0.1)
            while present and self._has_left(present[-1]):
                present.pop()
        for member in self.members:
            if member.is_there and not member.said_bye:
                self._sweep(member)

    def _has_left(self, member: Member) -> bool:
        gone = member.process is not None and member.process.exit_code() is not None
        if not self.transport.is_reverse:
            return not member.is_there or (gone and member.closed_at is not None)  # all is read
        # The command that started its agent may wait for another one that is lost.
        alone = any(not other.is_there for other in self.members)
        return gone or not member.is_there or (alone and member.said_bye)

    def _sweep(self, member: Member) -> None:
        """End processes that its agent may have left; there are none if it never answered."""
        if member.answered:
            self._sweeps.begin(member.host, member.mark)

    # --- connecting -----------------------------------------------------------------------------------

    def connect(self, members: Sequence[Member]) -> None:
        """Start the agents of these hosts, again where one was lost."""
        self._sweeps.finish()
        self._show_probe()
        for member in members:
            member.lost, member.facts, member.closed_at, member.code = None, None, None, None
            member.said_bye, member.answered, member.words = False, False, b""
            member.unpacker, member.heard = Unpacker(), time.monotonic()
            member.mark = self._mark if self.transport.is_local else uuid.uuid4().hex
        if self._callbacks is not None:
            self._start_all(members)
            return
        for member in members:
            self._start(member)

    def _start(self, member: Member) -> None:
        if member.process is not None:
            self._hang_up(member)
            member.process.kill()
        environment = {**self.transport.environment(os.environ), MARK: self._mark}
        try:
            member.process = Process(member.command, environment)
        except OSError as error:
            member.lost = agent_failure(
                member.name, f"{member.command[0]} cannot be started: {error}", "install it"
            )
            return
        self._processes.append(member.process)
        member.sender = Sender(member.process.stdin.fileno())
        self._selector.register(member.process.stdout, selectors.EVENT_READ, (member, "messages"))
        self._selector.register(member.process.stderr, selectors.EVENT_READ, (member, "words"))

    def _start_all(self, members: Sequence[Member]) -> None:
        assert self._callbacks is not None
        hosts, key_file = [member.host for member in members], str(self._root / self._probe)
        addresses = self._callbacks.addresses(hosts)
        commands = self.transport.commands(hosts, addresses, key_file)
        groups: dict[tuple[str, ...], list[Member]] = {}
        for member, command in zip(members, commands, strict=True):
            groups.setdefault(command, []).append(member)
        for command, group in groups.items():
            self._start_group(group, command)

    def _start_group(self, members: Sequence[Member], command: Sequence[str]) -> None:
        environment = {**self.transport.environment(os.environ), MARK: self._mark}
        try:
            process = Process(command, environment)
        except OSError as error:
            for member in members:
                member.lost = agent_failure(
                    member.name, f"{command[0]} cannot be started: {error}", "install it"
                )
            return
        self._processes.append(process)
        for member in members:
            self._hang_up(member)
            member.process = process
        for stream in (process.stdout, process.stderr):
            self._selector.register(stream, selectors.EVENT_READ, (None, "words"))

    def prepare(
        self, environment: dict[str, str], *, will_launch: bool, job: str = TRAINING
    ) -> None:
        """Request the facts of every connected host, and let it prepare.

        Args:
            environment: additional variables of its ranks.
            job: the ranks' job, one of worker.JOBS.
        """
        self._preparation = {
            "environment": environment,
            "will_launch": will_launch,
            "job": job,
            "cache_dir": self._config.data.cache_dir,
            "master_addr": self.master_addr,
        }
        for member in self.members:
            member.facts = None
            self._prepare(member)

    def _prepare(self, member: Member) -> None:
        """Send the order, unless the agent has yet to connect."""
        own = {MARK: member.mark}
        if member.host.devices is not None:
            own["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, member.host.devices))
        port = self._launcher.master_port
        self.tell(
            [member],
            "prepare",
            **{**self._preparation, "environment": {**self._preparation["environment"], **own}},
            slots=member.host.slots,
            silence_s=None if self.transport.is_local else self._launcher.lost_after_s,
            root=str(self._root),
            probe=self._probe,
            master_port=None if port == "auto" else port,
            time=time.time(),
        )

    @property
    def master_addr(self) -> str:
        """The address of the first host for the others."""
        given = self._launcher.master_addr
        first = next((m for m in self.members if m.is_there), self.members[0])
        return given or self.transport.address_of(first.host)

    def gather(
        self, limit_s: float | None = None, given_up: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait until every host has answered or is lost, or until `given_up` returns True.

        Args:
            limit_s: the longest wait; None: launcher.connect_timeout_s.
        """
        limit_s = limit_s or self._launcher.connect_timeout_s
        deadline = time.monotonic() + limit_s
        waiting = list(self.members)
        while waiting and not given_up():
            if time.monotonic() > deadline:
                for member in filter(_has_yet_to_answer, waiting):
                    self._lose(member, *self._explain(member, None, limit_s))
            self.poll(0.1)
            while waiting and not _has_yet_to_answer(waiting[-1]):
                waiting.pop()
        self._hide_probe()

    # --- talking --------------------------------------------------------------------------------------

    def tell(self, members: Iterable[Member], kind: str, **content: Any) -> None:
        for member in members:
            if member.sender is not None:
                member.sender.send({"kind": kind, **content})

    def write_logs_to(self, run: RunDirectory, attempt: int) -> None:
        """Write the agents' output to this attempt's logs from now on."""
        run.attempt_logs(attempt).mkdir(parents=True, exist_ok=True)
        first, self._logs = self._logs is None, (run, attempt)
        for member in self.members if first else ():
            self._write(member.name, member.words)

    def write_no_logs(self) -> None:
        """Keep the agents' output for an error's text only."""
        self._logs = None

    @property
    def common_log(self) -> str | None:
        """The name of the log that all agents share, if one command has started them."""
        return self._launcher.name if self.transport.is_reverse else None

    def poll(self, timeout: float) -> list[tuple[Member, Message]]:
        """Return new messages, after at most this wait; lost members are marked."""
        news: list[tuple[Member, Message]] = []
        for key, _ in self._selector.select(timeout):
            member, what = key.data
            if what == "calls":
                continue  # `_welcome` serves them
            data = _read(key.fd)
            if not data:
                self._selector.unregister(key.fileobj)
            if what == "words":
                self._note(member, data)
            elif not data:
                member.closed_at = time.monotonic()
            else:
                news += self._heard(member, data)
        self._welcome()
        if time.monotonic() - self._looked > _LOOK_S:
            self._look_for_losses()
            self._looked = time.monotonic()
        return news

    def _heard(self, member: Member, data: bytes) -> list[tuple[Member, Message]]:
        member.heard, member.answered = time.monotonic(), True
        news = []
        for message in member.unpacker.feed(data):
            if isinstance(message, str):
                self._note(member, message.encode() + b"\n")
            elif message["kind"] == "hello":
                member.nanoscale = str(message.get("nanoscale", "of an unknown version"))
            elif message["kind"] == "facts":
                member.facts = {**message, "heard_at": time.time()}
            elif message["kind"] == "bye":
                member.said_bye = True
            elif message["kind"] != "beat":
                news.append((member, message))
        return news

    def _welcome(self) -> None:
        """Accept agents that have connected."""
        if self._callbacks is None:
            return
        for caller in self._callbacks.new():
            waiting = [m for m in self.members if m.sender is None and m.is_there]
            member = caller.find(waiting)
            if member is None:
                caller.close()
                continue
            member.socket = caller.socket
            member.sender = Sender(caller.socket.fileno())
            member.heard = time.monotonic()
            self._selector.register(caller.socket, selectors.EVENT_READ, (member, "messages"))
            self._prepare(member)

    def _look_for_losses(self) -> None:
        now = time.monotonic()
        if now - self._looked > _STALL_S:  # the launcher was suspended, not the agents
            for member in self.members:
                member.heard = max(member.heard, now)
        limit = self._launcher.lost_after_s
        for member in self.members:
            if not member.is_there or member.said_bye:
                continue
            code = _code(member)
            if self.transport.is_reverse and code is not None and member.sender is None:
                member.closed_at = member.closed_at or now  # it will not connect any more
            if member.closed_at is not None:
                if code is not None or now - member.closed_at > _LAST_WORDS_S:
                    self._drain(member)
                    self._lose(member, *self._explain(member, code))
            elif (
                member.facts is not None
                and not self.transport.is_local
                and now - member.heard > limit
            ):
                self._lose(
                    member,
                    f"the host fell silent: nothing was heard of it for {limit:g} s (launcher.lost_after_s)",
                    "look whether it is up, and at the network between it and the launcher",
                )

    def _drain(self, member: Member) -> None:
        """Read the rest of the standard error of a process that has ended."""
        if member.process is None or self.transport.is_reverse:
            return
        with suppress(KeyError, ValueError):
            self._selector.unregister(member.process.stderr)
        os.set_blocking(member.process.stderr.fileno(), False)
        with suppress(BlockingIOError):
            while data := os.read(member.process.stderr.fileno(), _READ_BYTES):
                self._note(member, data)

    def _lose(self, member: Member, diagnosis: str, remedy: str) -> None:
        member.lost = agent_failure(member.name, diagnosis, remedy, _code(member))
        self._hang_up(member)
        self._sweep(member)

    def give_up(self, member: Member) -> None:
        """Give up a host whose agent does not follow orders."""
        self._lose(member, "the agent did not end its ranks when it was told to", "look at its log")

    def _hang_up(self, member: Member) -> None:
        """Close the connection, upon which the agent ends everything on its host."""
        if member.sender is not None:
            member.sender.close()
        member.sender = None
        if member.socket is not None:
            with suppress(KeyError, ValueError):
                self._selector.unregister(member.socket)
            member.socket.close()
            member.socket = None
        if member.process is None or self.transport.is_reverse:
            return
        for stream in (member.process.stdout, member.process.stderr):
            with suppress(KeyError, ValueError):
                self._selector.unregister(stream)
        with suppress(OSError):
            member.process.stdin.close()

    def _explain(self, member: Member, code: int | None, limit_s: float = 0.0) -> tuple[str, str]:
        words = member.words.decode(errors="replace")
        return explain(member.host, self.transport, code, words, limit_s)

    def _note(self, member: Member | None, data: bytes) -> None:
        """Store the output of an agent, or of the command that started all of them."""
        if member is not None:
            member.words = (member.words + data)[-_KEPT_BYTES:]
        else:
            self._assign(data)
        self._write(member.name if member is not None else str(self.common_log), data)

    def _assign(self, data: bytes) -> None:
        """Assign each host's lines to its member; both pdsh and srun prefix them with the host."""
        for line in data.splitlines(keepends=True):
            labels = line.split()[:2]
            for number, member in enumerate(self.members):
                prefix = f"{self.transport.label(number, member.host)}:".encode()
                if prefix in labels:
                    words = line.removeprefix(prefix + b" ")
                    member.words = (member.words + words)[-_KEPT_BYTES:]
            name, code = self.transport.exit_code(line) or (None, None)
            for member in self.members:
                if member.name == name:
                    member.code = code

    def _write(self, log: str, data: bytes) -> None:
        if self._logs is None or not data:
            return
        run, attempt = self._logs
        with suppress(OSError), run.agent_log(attempt, log).open("ab") as file:
            file.write(data)

    def _show_probe(self) -> None:
        """Write a file by which hosts check that they see the folder of runs; only its owner may read it."""
        if self.transport.is_local:
            return
        handle = os.open(self._root / self._probe, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.write(handle, self._key)
        finally:
            os.close(handle)

    def _hide_probe(self) -> None:
        (self._root / self._probe).unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._closing.wait(BEAT_S):
            for member in self.members:
                sender = member.sender
                if sender is not None:
                    sender.send(BEAT)


def _has_yet_to_answer(member: Member) -> bool:
    return member.is_there and member.facts is None


def _code(member: Member) -> int | None:
    """Return the exit code of the command that started a member's agent; None while it runs."""
    if member.code is not None or member.process is None:
        return member.code
    return member.process.exit_code()


def _read(descriptor: int) -> bytes:
    """Read available bytes; empty if the connection has ended, in whatever way."""
    with suppress(OSError):
        return os.read(descriptor, _READ_BYTES)
    return b""


def existing(folder: Path) -> Path:
    """Return the folder, or its nearest existing parent."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())
