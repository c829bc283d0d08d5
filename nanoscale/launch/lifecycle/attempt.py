"""One attempt of a run: the execution of its ranks, the user's signals, and its outcome."""

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from nanoscale.common.errors import UserError
from nanoscale.common.units import duration
from nanoscale.config.schema import Launcher
from nanoscale.launch.fleet.connections import Member
from nanoscale.launch.fleet.fleet import Fleet
from nanoscale.launch.fleet.signals import Signals
from nanoscale.launch.lifecycle.command import LaunchPlan
from nanoscale.launch.lifecycle.data_preparation import RestOfTexts
from nanoscale.launch.lifecycle.job_execution import JobExecution
from nanoscale.processes.messages import Message
from nanoscale.runs import events, failure, status
from nanoscale.runs.directory import RunDirectory, write_json
from nanoscale.runs.failure import Failure, RankFailure
from nanoscale.runs.job_messages import RENDEZVOUS_S, LaunchOrder
from nanoscale.runs.lock import RunLock
from nanoscale.runs.position import different_collectives, suspects
from nanoscale.runs.status import State

DONE, FAILED, WRONG, PREEMPTED, INTERRUPTED = 0, 1, 2, 75, 130

_POLL_S = 0.1
_QUESTION_S, _ANSWER_S = 1.0, 5.0
"""Seconds between two looks for a question of `runs explain`, and for its answer."""


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


def asked_outcome(run: RunDirectory, signals: Signals) -> Outcome:
    """Return the outcome of ranks that have stopped because they were asked to."""
    by_user = signals.first is signal.SIGINT or events.stop_requested(run)
    return _STOPPED if by_user else Outcome("preempted", PREEMPTED)


@dataclass
class Attempt:
    """One attempt of a run: an execution, and what it records and shows of it."""

    lock: RunLock
    plan: LaunchPlan
    members: Sequence[Member]
    """The members in the order of the plan's hosts."""
    fleet: Fleet
    launcher: Launcher
    signals: Signals
    view: View
    memory: dict[str, Any] | None = None
    """The `memory` of the orders to launch."""
    wants_other_hosts: Callable[[], bool] = lambda: False
    """A function that returns True if the training is to stop for a change of hosts; called often."""
    texts: RestOfTexts | None = None
    """The preparation of texts beside the training, if some are left; its failure ends the attempt."""
    moving_since: float | None = None
    """The time when the ranks were asked to stop for a change of hosts."""
    stopping_since: float | None = None
    forced: str | None = None
    """The reason why it was ended by force; None otherwise."""
    was_running: bool = False
    next_poll: float = 0.0
    next_question: float = 0.0
    noticed: set[str] = field(default_factory=set)
    """Hosts that will be taken away."""
    asked_since: float | None = None
    """The time of the question of `runs explain` that is not answered yet."""

    def __post_init__(self) -> None:
        self.run = self.lock.run
        self._record = partial(events.append, self.run)
        order_for = partial(
            LaunchOrder,
            run=str(self.run.path),
            lost_after_s=self.launcher.lost_after_s,
            notice=self.launcher.notice,
            memory=self.memory,
            writes_logs=self.fleet.transport.is_local,  # elsewhere the run's folder may be slow
        )
        self.execution = JobExecution(
            self.fleet, self.plan, self.members, order_for, self._on_poll, self._on_message
        )

    def execute(self) -> Outcome:
        """Start the ranks, follow them and pass on the user's signals, until all have ended.

        Raises:
            TakenOverError: another launcher holds the run now.
        """
        self.execution.run()
        self.view.poll()
        return self._judge()

    # --- between two waits for messages ---------------------------------------------------------------

    def _on_poll(self) -> None:
        if self.lock.lost:  # another launcher holds the run: end the ranks and write nothing more
            self.fleet.output.logs = None
            self.execution.kill()
            self.lock.require()
        if time.monotonic() >= self.next_poll:  # however many messages come
            self.view.poll()
            self.next_poll = time.monotonic() + _POLL_S
        if self.view.running and not self.was_running:
            self.was_running = True
            with suppress(OSError):  # as in `_record`
                status.write(self.run, status.read(self.run).running())
        with suppress(OSError):
            self._explain()
        self._handle_signals()

    def _explain(self) -> None:
        """Ask the ranks for their positions if `runs explain` wants them, and pass on the answers."""
        now = time.monotonic()
        if self.asked_since is not None:
            everybody = len(self.execution.answered) == len(self.members)
            if everybody or now - self.asked_since > _ANSWER_S:
                self.asked_since = None
                known = {str(rank): asdict(it) for rank, it in self.execution.positions.items()}
                write_json(self.run.positions, known)
        elif now >= self.next_question:
            self.next_question = now + _QUESTION_S
            if self.run.question.exists():
                self.run.question.unlink()
                self.asked_since = now
                self.execution.ask()

    def _on_message(self, member: Member, message: Message) -> None:
        """Record a signal that the host received, or write output that the rank has not written itself."""
        if message["kind"] == "signal":
            self.signals.record(message["number"])
            return
        if message["kind"] == "notice":
            self._notice(member, message)
            return
        if "carried" in message:
            path = self.run.log(self.plan.attempt, member.name, message["rank"], message["stream"])
            with suppress(OSError), path.open("ab") as log:
                log.write(message["carried"])
        if message["stream"] == "out":
            self.view.wrote(member.name, message["rank"])

    def _notice(self, member: Member, message: Message) -> None:
        """Record that a host will be taken away, upon which the attempt stops."""
        source, seconds = f"launcher.notice={message['source']}", message.get("seconds")
        if problem := message.get("problem"):
            self._record("note", f"{member.name} cannot read {source}: {problem}")
        elif member.name not in self.noticed:
            self.noticed.add(member.name)
            when = "" if seconds is None else f" in {duration(seconds)}"
            about = {"host": member.name, "source": message["source"], "seconds": seconds}
            self._record("notice", f"{member.name} will be taken away{when} ({source})", **about)

    def _handle_signals(self) -> None:
        if self.signals.suspended:
            self.signals.suspended = False
            message = "Ctrl-Z is ignored: the ranks would treat a suspended launcher as lost"
            self._record("note", message)
        reason = self.signals.first.name if self.signals.first else "notice" if self.noticed else ""
        reason = reason or self._texts_problem
        if self.execution.killing_since is not None:
            return
        if not reason:
            self._move()
        elif self.stopping_since is None:
            self.stopping_since = time.monotonic()
            self._forward(reason)
        elif self.signals.kill_requested:
            self._force("it was killed, as requested")
        else:
            self._end_late(self.stopping_since)

    def _move(self) -> None:
        """Let the ranks stop at the next step if the training is to continue with other hosts."""
        if self.moving_since is not None:
            self._end_late(self.moving_since)
        elif self.was_running and not self.execution.failures and self.wants_other_hosts():
            self.moving_since = time.monotonic()
            self.fleet.send(self.members, "move", attempt=self.plan.attempt)

    def _end_late(self, since: float) -> None:
        limit = self.launcher.stop_grace_s
        if time.monotonic() - since > limit:
            self._force(f"it did not stop within {limit:g} s (launcher.stop_grace_s)")

    def _forward(self, reason: str) -> None:
        self.view.poll()  # the ranks may have begun to train just now
        if not self.view.running:
            self.execution.kill()  # there is nothing to save
            self._record("signal", f"{reason}: stopping before the first step", signal=reason)
            return
        self.fleet.send(self.members, "stop", attempt=self.plan.attempt)
        message = f"{reason}: stopping after the current step; Ctrl-C again to kill"
        self._record("signal", message, signal=reason)

    def _force(self, reason: str) -> None:
        self.forced = reason
        self.execution.kill(stacks=not self.signals.kill_requested)

    # --- outcome --------------------------------------------------------------------------------------

    def _judge(self) -> Outcome:
        first_signal, outcomes = self.signals.first, set(self.execution.outcomes.values())
        is_asked = first_signal is not None or bool(self.noticed or self.moving_since)
        if not self.execution.failures:
            if outcomes == {"completed"}:
                return Outcome("completed", DONE)
            if self._texts_problem and not is_asked:
                return self._failed()
            if (self.forced is None and is_asked) or "stopped" in outcomes:
                return asked_outcome(self.run, self.signals)
        if self.forced is not None and first_signal is signal.SIGINT:
            self._record("end", self.forced)
            return _STOPPED
        failures = self.execution.failures
        if any(host in self.noticed for host, rank in failures if rank is None) and all(
            failure.is_consequence(it) or (rank is None and host in self.noticed)
            for (host, rank), it in failures.items()
        ):  # the host was taken away before the end of the save
            return Outcome("preempted", PREEMPTED)
        return self._failed()

    def _failed(self) -> Outcome:
        failures = list(self.execution.failures.values())
        if self._texts_problem and not (failures and self.forced is None):
            failures = [self._lacking_texts()]
        elif self.forced is not None:
            failures = [self._forced(self.forced)]
        elif not failures:
            host = self.plan.hosts[0].host
            failures = [
                failure.agent_failure(host, "the ranks ended without a reason", "look at the logs")
            ]
        elif all(map(failure.is_consequence, failures)):
            failures += self._unreported_cause(failures)
        evidence, log = self.execution.evidence, self.fleet.output.common_log
        cause = failure.digest(self.run, self.plan.attempt, failures, evidence, log)
        with suppress(OSError):
            failure.write(self.run, cause)
        return Outcome("failed", WRONG if cause.user_error else FAILED, cause)

    @property
    def _texts_problem(self) -> str:
        """The reason why the rest of the texts cannot be prepared; "" if the user has asked for the end."""
        return self.texts.problem if self.texts is not None and self.signals.first is None else ""

    def _lacking_texts(self) -> RankFailure:
        """Return the failure of a training whose texts cannot be prepared; the launcher's host is the first."""
        assert self.texts is not None
        host, texts = self.plan.hosts[0].host, self.texts
        if texts.is_request:
            error = UserError("data", texts.problem)
            return RankFailure.of(error, host=host)
        remedy = "free space on the disk of the cache (NANOSCALE_CACHE), or memory of the host"
        return failure.agent_failure(host, texts.problem, remedy)

    def _forced(self, reason: str) -> RankFailure:
        """Return the failure of the rank that kept the others from stopping, or of the first one."""
        suspected = self._suspects()
        if suspected and len(suspected) < self.plan.world_size:
            late = failure.absent_ranks(suspected, self.execution.positions, reason)
        else:
            host = self.plan.hosts[0]
            late = RankFailure("forced", host.ranks[0], 0, host.host, diagnosis=reason)
        return replace(late, kind="forced", remedy="a larger launcher.stop_grace_s")

    def _unreported_cause(self, failures: Sequence[RankFailure]) -> list[RankFailure]:
        """Return the cause that no rank reported: ranks that hang, or that wait in different collectives."""
        silent, known = self._silent_ranks(), self.execution.positions
        if silent and all(one.kind == "rendezvous" for one in failures):
            return [failure.absent_hosts(silent, RENDEZVOUS_S)]
        if suspected := self._suspects():
            limit = self.launcher.collective_timeout_s
            waited = f"the others waited for {limit:g} s (launcher.collective_timeout_s)"
            return [failure.absent_ranks(suspected, known, waited)]
        mismatched = [it.rank for it in failures if it.kind == "mismatched" and it.rank is not None]
        aborted = sorted(set(mismatched) - known.keys())
        if difference := different_collectives(known, aborted):
            rank, text = difference
            remedy = "a rank took another branch, or has other shapes, than the others: compare the lines"
            odd = next(it for it in [*failures, *silent] if it.rank == rank)
            return [replace(odd, kind="absent", diagnosis=text, remedy=remedy)]
        return []

    def _suspects(self) -> list[RankFailure]:
        """List the ranks that did not fail and wait for no other one."""
        silent = {it.rank: it for it in self._silent_ranks() if it.rank is not None}
        return [silent[rank] for rank in suspects(self.execution.positions, silent)]

    def _silent_ranks(self) -> list[RankFailure]:
        """List the ranks that did not fail."""
        failed = {it.rank for it in self.execution.failures.values()}
        return [
            RankFailure("absent", rank, local, host.host)
            for host in self.plan.hosts
            for local, rank in enumerate(host.ranks)
            if rank not in failed
        ]
