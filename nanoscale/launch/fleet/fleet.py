"""The agents of all hosts: their start, the messages from and to them, and their certain end."""

from __future__ import annotations

import math
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from nanoscale.config.machines import Host
from nanoscale.config.schema import Config
from nanoscale.launch.fleet.agent_output import AgentOutput
from nanoscale.launch.fleet.connections import MORE_OPEN_FILES, Connections, KeyFile, Member
from nanoscale.launch.fleet.processes import adopt_orphans
from nanoscale.launch.transport.connection_errors import explain
from nanoscale.launch.transport.transport import transport_of
from nanoscale.processes import scratch
from nanoscale.processes.messages import BEAT, BEAT_S, MARK, TRAINING, Message
from nanoscale.processes.proc import allow_open_files
from nanoscale.runs.directory import check_root
from nanoscale.runs.failure import agent_failure

_FILES_A_HOST = 4
_EXIT_S = 5.0
"""Seconds for agents to exit regularly before they are killed."""
_RESCUE_S = 600.0
"""The same if they copy checkpoints in memory to the disk."""
_LAST_OUTPUT_S = 2.0
"""Seconds for the process of a broken connection to print the reason."""
_CHECK_S = 0.1
"""Seconds between two checks of all hosts, however much output some of them send."""
_STALL_S = 1.5
SUSPENDED = "the launcher was suspended"


class Fleet:
    """A fleet of agents, one on every host when entered; none remains afterwards.

    Args:
        hosts: the hosts; with launcher=local, one host that is this machine.
        root: the folder of runs, which all hosts must see.

    Raises:
        UserError: `root` cannot be written to, and other hosts would look for a file there.
    """

    join_every_s = 30.0
    """Seconds between two attempts to reach an absent host while others run."""

    def __init__(self, config: Config, hosts: Sequence[Host], root: Path) -> None:
        self._config = config
        self._launcher = config.launcher
        self._root = root
        parents = (root.absolute(), *root.absolute().parents)
        existing = next(path for path in parents if path.is_dir())
        self._key_file = KeyFile(existing / f".nanoscale-{uuid.uuid4().hex}")
        self._mark = uuid.uuid4().hex
        self._preparation: Message = {"environment": {}}
        """The common request to all hosts."""
        self.memory_key = secrets.token_hex(32) if config.checkpoint.memory_every else None
        """The key of the agents' servers of checkpoints in memory; None: there are none."""
        self.rescue: list[int] | None = None
        """The lost hosts, if agents copy checkpoints in memory to the disk at their exit; None: they do not."""
        self.lost_nodes: list[int] = []
        """The hosts that the newest attempt has lost, by their numbers in it."""
        self.report: Callable[[str], None] = lambda _: None
        """A function that is called once with each reason why no command can be started for an absent host."""
        self._reported = set[str]()
        self._suspended = -math.inf
        """The time at which this launcher continued after a pause in which its agents ended."""
        self._last_check = time.monotonic()
        self._closing = threading.Event()
        self.transport = transport_of(config)
        self.members = [Member(host) for host in hosts]
        self.output = AgentOutput(self.transport, self.members)

    # --- beginning and end --------------------------------------------------------------------------

    def __enter__(self) -> Fleet:
        if not self.transport.is_local:
            check_root(self._root)
        allow_open_files(_FILES_A_HOST * len(self.members) + 256)
        count = len(self.members)
        self._connections = Connections(self.transport, self._key_file, count, self._mark)
        adopt_orphans()
        try:
            self.connect(self.members)
        except BaseException:
            self.__exit__()
            raise
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        try:
            self._quit_agents()
        finally:  # also after another Ctrl-C
            self._connections.close()
            if self.transport.is_local:
                scratch.remove_stale()  # an agent that was killed while it started has no process that would
            self._key_file.remove()
            adopt_orphans(False)

    def _quit_agents(self) -> None:
        """Let idle agents exit by themselves: they remove their files."""
        present = [it for it in self.members if it.is_present and it.facts is not None]
        self.send(present, "quit", rescue=self.rescue)
        deadline = time.monotonic() + (_EXIT_S if self.rescue is None else _RESCUE_S)
        while present and time.monotonic() < deadline:
            self.poll(0.1)
            while present and self._has_left(present[-1]):
                present.pop()
        for member in self.members:
            if member.is_present and not member.said_bye:
                self._connections.end_orphans(member)

    def _has_left(self, member: Member) -> bool:
        ended = member.said_bye  # if another program has started it
        if member.process is not None:
            ended = member.process.exit_code() is not None
        if not self.transport.is_reverse:
            return not member.is_present or (ended and member.closed_at is not None)  # all is read
        if ended or not member.is_present:
            return True
        # The command that started its agent may wait for another one that is lost.
        return member.said_bye and any(not other.is_present for other in self.members)

    # --- connecting -----------------------------------------------------------------------------------

    def connect(self, members: Sequence[Member]) -> None:
        """Start the agents of these hosts, again where one was lost."""
        if not self.transport.is_local:
            self._key_file.write()
        for member in members:
            member.reset(self._mark if self.transport.is_local else uuid.uuid4().hex)
        self._connections.start(members)

    def join(self, members: Sequence[Member], every_s: float | None = None) -> None:
        """Try to reach absent hosts; call it often, between `poll`s.

        Args:
            every_s: seconds between two attempts to reach a host; None: `join_every_s`, for a running attempt.
        """
        now, limit_s = time.monotonic(), self._launcher.connect_timeout_s
        every_s = self.join_every_s if every_s is None else every_s
        due = [it for it in members if not it.is_present and now - it.tried > every_s]
        try:
            if due:
                self.connect(due)
        except OSError as error:  # the file that hosts look for cannot be opened
            for member in due:
                text = f"its agent cannot be started: {error}"
                member.tried, member.lost = now, agent_failure(member.name, text, MORE_OPEN_FILES)
        for member in due:
            if member.lost is not None and member.lost.diagnosis not in self._reported:
                self._reported.add(member.lost.diagnosis)
                self.report(f"{member.name}: {member.lost.diagnosis}; {member.lost.remedy}")
            member.is_joining = True
            self._prepare(member)
        for member in (it for it in self.members if it.is_joining):
            if member.is_present and member.facts is None and now - member.tried > limit_s:
                self._mark_lost(member, *self._explain(member, None, limit_s))
            member.is_joining = member.is_present and member.facts is None
            if not member.is_joining:
                self._remove_key_file()

    def _remove_key_file(self) -> None:
        """Remove the file that shows whether hosts see the folder of runs, once all have looked."""
        if not any(member.is_joining for member in self.members):
            self._key_file.remove()

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
            "memory_key": self.memory_key,
            "has_peers": len(self.members) > 1,
            "lost_nodes": self.lost_nodes,
        }
        if not self.transport.is_local:
            self._key_file.write()
        for member in self.members:
            if not member.is_joining:
                member.facts = None
                self._prepare(member)

    def _prepare(self, member: Member) -> None:
        """Send the order, unless the agent has yet to connect."""
        host_variables = {MARK: member.mark}
        if member.host.devices is not None:
            host_variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, member.host.devices))
        port = self._launcher.master_port
        environment = {**self._preparation["environment"], **host_variables}
        self.send(
            [member],
            "prepare",
            **{**self._preparation, "environment": environment},
            slots=member.host.slots,
            lost_after_s=None if self.transport.is_local else self._launcher.lost_after_s,
            root=str(self._key_file.path.parent),
            probe=self._key_file.path.name,
            master_port=None if port == "auto" else port,
            time=time.time(),
        )

    @property
    def master_addr(self) -> str:
        """The address of the first host for the others."""
        present = (it for it in self.members if it.is_present and not it.is_joining)
        first = next(present, self.members[0])
        return self._launcher.master_addr or self.transport.address_of(first.host)

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
                for member in filter(_is_pending, waiting):
                    self._mark_lost(member, *self._explain(member, None, limit_s))
            self.poll(0.1)
            while waiting and not _is_pending(waiting[-1]):
                waiting.pop()
        self._remove_key_file()

    # --- messages -------------------------------------------------------------------------------------

    def send(self, members: Iterable[Member], kind: str, **content: Any) -> None:
        for member in members:
            if member.sender is not None:
                member.sender.send({"kind": kind, **content})

    def poll(self, timeout: float) -> list[tuple[Member, Message]]:
        """Return new messages, after at most this wait; lost members are marked."""
        messages: list[tuple[Member, Message]] = []
        for source, carries_messages, data in self._connections.poll(timeout):
            if not isinstance(source, Member) or not carries_messages:
                self.output.note(source, data)
            elif not data:
                source.closed_at = time.monotonic()
            else:
                messages += self._read_messages(source, data)
        for member in self._connections.accept(self.members):
            self._prepare(member)
        if time.monotonic() - self._last_check > _CHECK_S:
            self._check_losses()
            self._last_check = time.monotonic()
        return messages

    def _read_messages(self, member: Member, data: bytes) -> list[tuple[Member, Message]]:
        member.last_heard, member.answered = time.monotonic(), True
        news = []
        for message in member.unpacker.feed(data):
            if isinstance(message, str):
                self.output.note(member, message.encode() + b"\n")
            elif message["kind"] == "hello":
                member.nanoscale = str(message.get("nanoscale", "of an unknown version"))
            elif message["kind"] == "facts":
                member.facts = {**message, "heard_at": time.time()}
            elif message["kind"] == "bye":
                member.said_bye = True
            elif message["kind"] != "beat":
                news.append((member, message))
        return news

    def _beat(self) -> None:
        while not self._closing.wait(BEAT_S):
            for member in self.members:
                sender = member.sender
                if sender is not None:
                    sender.send(BEAT)

    # --- losses ---------------------------------------------------------------------------------------

    def _check_losses(self) -> None:
        now = time.monotonic()
        pause_s = now - self._last_check
        if pause_s > _STALL_S:  # the launcher was suspended, not the agents
            for member in self.members:
                member.last_heard = max(member.last_heard, now)
        limit = self._launcher.lost_after_s
        if pause_s > limit and not self.transport.is_local:
            self._suspended = now
        for member in self.members:
            if not member.is_present or member.said_bye:
                continue
            code = member.exit_code
            if self.transport.is_reverse and code is not None and member.sender is None:
                member.closed_at = member.closed_at or now  # it will not connect any more
            if member.closed_at is not None:
                if code is not None or now - member.closed_at > _LAST_OUTPUT_S:
                    self.output.note(member, self._connections.drain(member))
                    self._mark_lost(member, *self._explain(member, code))
            elif member.facts and not self.transport.is_local and now - member.last_heard > limit:
                text = f"no heartbeat for {limit:g} s (launcher.lost_after_s)"
                remedy = "check that it is up, and check the network between it and the launcher"
                self._mark_lost(member, f"the host stopped responding: {text}", remedy)

    def _mark_lost(self, member: Member, diagnosis: str, remedy: str) -> None:
        member.lost = agent_failure(member.name, diagnosis, remedy, member.exit_code)
        self._connections.hang_up(member)
        self._connections.end_orphans(member)

    def give_up(self, member: Member) -> None:
        """Give up a host whose agent does not follow orders."""
        self._mark_lost(
            member, "the agent did not terminate its ranks when asked to", "look at its log"
        )

    def _explain(self, member: Member, code: int | None, limit_s: float = 0.0) -> tuple[str, str]:
        if time.monotonic() - self._suspended < _EXIT_S:
            text = f"{SUSPENDED} for more than {self._launcher.lost_after_s:g} s (launcher.lost_after_s)"
            return text, "find out what stopped it; the agents had ended the job by then"
        output = member.output.decode(errors="replace")
        return explain(member.host, self.transport, code, output, limit_s)


def _is_pending(member: Member) -> bool:
    return member.is_present and member.facts is None and not member.is_joining
