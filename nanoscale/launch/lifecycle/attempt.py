"""One attempt of a run: from the order to start its ranks until all have ended."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from nanoscale.config.schema import Launcher
from nanoscale.launch.fleet.fleet import Fleet
from nanoscale.launch.fleet.member import Member
from nanoscale.launch.fleet.signals import Signals
from nanoscale.launch.lifecycle.command import LaunchPlan
from nanoscale.launch.preflight.preflight import skew_s
from nanoscale.processes.messages import Message
from nanoscale.runs import events, failure, status
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.failure import (
    Evidence,
    Failure,
    RankFailure,
    absent_ranks,
    agent_failure,
    is_consequence,
    waited_in_vain,
)
from nanoscale.runs.lock import RunLock
from nanoscale.runs.status import State

DONE, FAILED, WRONG, PREEMPTED, INTERRUPTED = 0, 1, 2, 75, 130

_LOOK_S = 0.1
_CAUSE_GRACE_S = 1.5
"""Seconds to wait for a better explanation while ranks only report that they lost another one."""
_KILL_S = 10.0
"""Seconds for an agent to end its ranks before it is ended itself."""


class View(Protocol):
    """A display of a running attempt."""

    running: bool
    """True once the ranks of the attempt have begun to train."""

    def begin(self, plan: LaunchPlan, steps: int) -> None:
        """Show that a new attempt starts."""

    def poll(self) -> None:
        """Show everything new."""

    def wrote(self, host: str, rank: int) -> None:
        """Note that the standard output of a rank has grown."""


@dataclass(frozen=True)
class Outcome:
    """The end of an attempt."""

    state: State
    exit_code: int
    failure: Failure | None = None


_STOPPED = Outcome("stopped", INTERRUPTED)


@dataclass
class Attempt:
    """One attempt: its state, and the reactions to it."""

    lock: RunLock
    plan: LaunchPlan
    members: Sequence[Member]
    """The members in the order of the plan's hosts."""
    fleet: Fleet
    launcher: Launcher
    signals: Signals
    view: View
    outcomes: dict[str, str] = field(default_factory=dict)
    """The results of each host's ranks, by host."""
    failures: dict[tuple[str, int | None], RankFailure] = field(default_factory=dict)
    evidence: dict[str, Evidence] = field(default_factory=dict)
    failing_since: float | None = None
    stopping_since: float | None = None
    killing_since: float | None = None
    forced: str | None = None
    """The reason why it was ended by force; None otherwise."""

    @property
    def run(self) -> RunDirectory:
        return self.lock.run

    def go(self) -> Outcome:
        """Start the ranks, follow them and pass on the user's signals, until all have ended.

        Raises:
            TakenOverError: another launcher holds the run now.
        """
        self._notice_lost()
        if not self.failures:
            self._launch()
        else:
            self.outcomes = {member.name: "never started" for member in self.members}
        was_running, next_look = False, 0.0
        while not self._is_over():
            news = self.fleet.poll(_LOOK_S)
            self._mind_lock()
            for member, message in news:
                self._take(member, message)
            self._notice_lost()
            if time.monotonic() >= next_look:  # however many messages come
                self.view.poll()
                next_look = time.monotonic() + _LOOK_S
            if self.view.running and not was_running:
                was_running = True
                status.write(self.run, status.read(self.run).running())
            self._mind_signals()
            self._mind_failures()
            self._mind_stragglers()
        self.view.poll()
        return self._judge()

    # --- messages -------------------------------------------------------------------------------------

    def _take(self, member: Member, message: Message) -> None:
        if message["kind"] == "signal":
            self.signals.hear(message["number"])
        elif message["kind"] == "output":
            self._log(member, message)
        elif message.get("attempt") != self.plan.attempt:
            pass  # belongs to an attempt that was given up
        elif message["kind"] == "failing":
            self._add(member, message["failures"])
        elif message["kind"] == "ended":
            self.outcomes[member.name] = message["outcome"]
            self.evidence[member.name] = Evidence(**message["evidence"])
            self._add(member, message["failures"])

    def _log(self, member: Member, message: Message) -> None:
        """Write a rank's output into its log, unless the rank has written it there itself."""
        if "carried" in message:
            path = self.run.log(self.plan.attempt, member.name, message["rank"], message["stream"])
            with suppress(OSError), path.open("ab") as log:
                log.write(message["carried"])
        if message["stream"] == "out":
            self.view.wrote(member.name, message["rank"])

    def _add(self, member: Member, documents: Sequence[Message]) -> None:
        skew = skew_s(member.facts) if member.facts is not None else 0.0
        for document in documents:
            found = RankFailure(**document)
            key = (found.host, found.rank)
            known = self.failures.get(key)
            after_kill = self.killing_since is not None and known is None and not found.type
            if not after_kill:
                self.failures[key] = replace(found, time=found.time - skew)
        if self.failures and self.failing_since is None:
            self.failing_since = time.monotonic()

    def _notice_lost(self) -> None:
        for member in self.members:
            if member.lost is not None and member.name not in self.outcomes:
                self.outcomes[member.name] = "lost"
                if self.killing_since is None:
                    self.failures[member.name, None] = member.lost
                    self.failing_since = self.failing_since or time.monotonic()

    def _is_over(self) -> bool:
        return all(member.name in self.outcomes for member in self.members)

    # --- reactions ------------------------------------------------------------------------------------

    def _launch(self) -> None:
        for number, (member, host) in enumerate(zip(self.members, self.plan.hosts, strict=True)):
            self.fleet.tell(
                [member],
                "launch",
                run=str(self.run.path),
                attempt=self.plan.attempt,
                name=host.host,
                node_rank=number,
                nodes=len(self.plan.hosts),
                ranks=host.ranks,
                world_size=self.plan.world_size,
                master_addr=self.plan.master_addr,
                master_port=self.plan.master_port,
                patience_s=self.launcher.lost_after_s,
                writes_logs=self.launcher.name == "local",  # elsewhere the run's folder may be slow
            )

    def _mind_lock(self) -> None:
        """End the ranks and write nothing more if another launcher holds the run now."""
        if self.lock.lost:
            self.fleet.write_no_logs()
            self._kill()
            self.lock.require()

    def _mind_signals(self) -> None:
        if self.signals.suspended:
            self.signals.suspended = False
            why = "Ctrl-Z is not heeded: the ranks would take a suspended launcher for lost"
            events.append(self.run, "note", why)
        if self.signals.first is None or self.killing_since is not None:
            return
        if self.stopping_since is None:
            self.stopping_since = time.monotonic()
            self._pass_on(self.signals.first)
        elif self.signals.insists:
            self._force("it was ended by force, as asked")
        elif time.monotonic() - self.stopping_since > self.launcher.stop_grace_s:
            limit = self.launcher.stop_grace_s
            self._force(f"it did not stop within {limit:g} s (launcher.stop_grace_s)")

    def _pass_on(self, number: signal.Signals) -> None:
        if not self.view.running:
            self._kill()  # there is nothing to save
            return
        self.fleet.tell(self.members, "stop", attempt=self.plan.attempt)
        events.append(
            self.run,
            "signal",
            f"{number.name}: stopping after the current step; Ctrl-C again to kill",
            signal=number.name,
        )

    def _force(self, why: str) -> None:
        self.forced = why
        self._kill()

    def _mind_failures(self) -> None:
        """End the job once the first cause is known, or no better explanation can come."""
        if self.failing_since is None or self.killing_since is not None:
            return
        found = list(self.failures.values())
        waited = time.monotonic() - self.failing_since > _CAUSE_GRACE_S
        everybody = len([f for f in found if f.rank is not None]) == self.plan.world_size
        if waited or everybody or not all(map(is_consequence, found)):
            self._kill(stacks=waited)

    def _kill(self, *, stacks: bool = False) -> None:
        self.killing_since = time.monotonic()
        self.fleet.tell(self.members, "kill", attempt=self.plan.attempt, stacks=stacks)

    def _mind_stragglers(self) -> None:
        if self.killing_since is None or time.monotonic() - self.killing_since < _KILL_S:
            return
        for member in self.members:
            if member.name not in self.outcomes:
                self.outcomes[member.name] = "lost"
                self.fleet.give_up(member)

    # --- outcome --------------------------------------------------------------------------------------

    def _judge(self) -> Outcome:
        asked = self.signals.first
        if not self.failures:
            if set(self.outcomes.values()) == {"completed"}:
                return Outcome("completed", DONE)
            if (self.forced is None and asked is not None) or "stopped" in self.outcomes.values():
                by_user = asked is signal.SIGINT or events.stop_requested(self.run)
                return _STOPPED if by_user else Outcome("preempted", PREEMPTED)
        if self.forced is not None and asked is signal.SIGINT:
            return _STOPPED
        return self._failed()

    def _failed(self) -> Outcome:
        found = list(self.failures.values())
        if self.forced is not None:
            first = self.plan.hosts[0]
            late = RankFailure(first.ranks[0], 0, first.host, time.time())
            found = [replace(late, diagnosis=self.forced, remedy="a larger launcher.stop_grace_s")]
        elif waited_in_vain(found) and (silent := self._silent()):
            limit = self.launcher.collective_timeout_s
            found.append(absent_ranks(silent, limit))
        elif not found:
            host = self.plan.hosts[0].host
            found = [agent_failure(host, "the ranks ended, and none said why", "look at the logs")]
        cause = failure.digest(
            self.run, self.plan.attempt, found, self.evidence, self.fleet.common_log
        )
        with suppress(OSError):
            failure.write(self.run, cause)
        return Outcome("failed", WRONG if cause.user_error else FAILED, cause)

    def _silent(self) -> list[RankFailure]:
        """List the ranks that did not fail."""
        failed = {found.rank for found in self.failures.values()}
        return [
            RankFailure(rank, local, host.host, time.time())
            for host in self.plan.hosts
            for local, rank in enumerate(host.ranks)
            if rank not in failed
        ]
