"""The execution of a job on its hosts, of a run's attempt or of a one-shot job: one state machine for both."""

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from nanoscale.common.json_text import Json
from nanoscale.config.composing.frozen import dump
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.rules import Host
from nanoscale.launch.fleet.connections import Member
from nanoscale.launch.fleet.fleet import Fleet
from nanoscale.launch.lifecycle import command
from nanoscale.launch.preflight.preflight import require_ready, skew_s
from nanoscale.processes.messages import Message
from nanoscale.runs import job_messages
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.failure import (
    Evidence,
    RankFailure,
    diagnose,
    diagnoses,
    first_cause,
    is_consequence,
    user_error,
)
from nanoscale.runs.position import Position
from nanoscale.runs.tail import LineSplitter

_POLL_S = 0.1
_CAUSE_GRACE_S = 1.5
"""Seconds to wait for a better explanation while ranks only report that they lost another one."""
_KILL_S = 10.0
"""Seconds for an agent to end its ranks before it is ended itself."""


@dataclass
class JobExecution:
    """The ranks of a job, from the order to start them until all have ended."""

    fleet: Fleet
    plan: command.LaunchPlan
    members: Sequence[Member]
    """The members in the order of the plan's hosts."""
    order_for: Callable[[job_messages.HostRanks], job_messages.LaunchOrder]
    """A function that returns the order to launch these ranks."""
    on_poll: Callable[[], None] = lambda: None
    """A function that is called after each wait for messages, before they are handled."""
    on_message: Callable[[Member, Message], None] = lambda _member, _message: None
    """A function that is called with each message that is about output, a signal or a notice."""
    limit_s: float | None = None
    """Seconds for the whole job; None: any time."""
    outcomes: dict[str, str] = field(default_factory=dict)
    """The results of each host's ranks, by host."""
    failures: dict[tuple[str, int | None], RankFailure] = field(default_factory=dict)
    evidence: dict[str, Evidence] = field(default_factory=dict)
    positions: dict[int, Position] = field(default_factory=dict)
    """The positions of ranks when they lost another one, or before they were ended."""
    result: Message | None = None
    """The result that the first rank left; None if there is none."""
    answered: set[str] = field(default_factory=set)
    """Hosts that have answered the last question for positions."""
    late: list[str] = field(default_factory=list)
    """Hosts whose ranks were still running at the time limit."""
    failing_since: float | None = None
    killing_since: float | None = None

    def run(self) -> None:
        """Start the ranks and follow them until all have ended. One lost host prevents the start."""
        diagnoses()
        self._note_lost()
        if self.failures:
            self.outcomes = {member.name: "never started" for member in self.members}
        else:
            self._launch()
        start = time.monotonic()
        while not self.is_over:
            messages = self.fleet.poll(_POLL_S)
            self.on_poll()
            for member, message in messages:
                self._receive(member, message)
            self._note_lost()
            self._end_at_limit(start)
            self._end_after_failure()
            self._give_up_stragglers()

    def ask(self) -> None:
        """Ask all hosts for the positions of their ranks."""
        self.positions, self.answered = {}, set()
        self.fleet.send(self.members, "ask", attempt=self.plan.attempt)

    def kill(self, *, stacks: bool = False) -> None:
        """Order all agents to end their ranks at once."""
        self.killing_since = time.monotonic()
        self.fleet.send(self.members, "kill", attempt=self.plan.attempt, stacks=stacks)

    def abandon(self) -> None:
        """Close the connections, upon which agents exit; in its rendezvous an agent follows no order."""
        for member in self.members:
            self.fleet.give_up(member)
        deadline = time.monotonic() + _KILL_S
        commands = [member.process for member in self.members if member.process is not None]
        while any(it.exit_code() is None for it in commands) and time.monotonic() < deadline:
            self.fleet.poll(_POLL_S)

    @property
    def is_over(self) -> bool:
        return not self._unfinished()

    def first_cause(self) -> tuple[RankFailure, str, str]:
        """Return the failure that the others follow from, its diagnosis and the remedy."""
        cause = first_cause(list(self.failures.values()))
        return cause, *diagnose(cause, self.evidence.get(cause.host, Evidence()))

    # --- messages -------------------------------------------------------------------------------------

    def _launch(self) -> None:
        for number, (member, host) in enumerate(zip(self.members, self.plan.hosts, strict=True)):
            ranks = job_messages.HostRanks(
                name=host.host,
                node_rank=number,
                nodes=len(self.plan.hosts),
                ranks=host.ranks,
                world_size=self.plan.world_size,
                master_addr=self.plan.master_addr,
                master_port=self.plan.master_port,
                attempt=self.plan.attempt,
            )
            self.fleet.send([member], **job_messages.message_of(self.order_for(ranks)))

    def _receive(self, member: Member, message: Message) -> None:
        if message["kind"] in ("output", "signal", "notice"):
            self.on_message(member, message)
        elif message.get("attempt") != self.plan.attempt:
            pass  # belongs to an attempt that was given up
        elif message["kind"] == job_messages.Failing.kind:
            self._add(member, job_messages.Failing.read(message).failures)
        elif message["kind"] == job_messages.Answered.kind:
            self.positions |= job_messages.Answered.read(message).positions
            self.answered.add(member.name)
        elif message["kind"] == job_messages.Ended.kind:
            ended = job_messages.Ended.read(message)
            self.outcomes[member.name] = ended.outcome
            self.evidence[member.name] = ended.evidence
            self.result = self.result or ended.result
            self.positions |= ended.positions
            self._add(member, ended.failures)

    def _add(self, member: Member, failures: Sequence[RankFailure]) -> None:
        skew = skew_s(member.facts) if member.facts is not None else 0.0
        for failure in failures:
            key = (failure.host, failure.rank)
            recorded = self.failures.get(key)
            # The kill reaches ranks one after another. Until it has reached all, a rank can lose a killed one.
            lost = self.failing_since is None and is_consequence(failure)
            by_kill = lost or failure.kind in ("ended", "stopped")
            after_kill = self.killing_since is not None and recorded is None and by_kill
            if not after_kill:
                self.failures[key] = replace(failure, time=failure.time - skew)
                if failure.rank is not None and failure.position is not None:
                    self.positions[failure.rank] = Position(**failure.position)
        if self.failures and self.failing_since is None:
            self.failing_since = time.monotonic()

    def _note_lost(self) -> None:
        for member in self._unfinished():
            if member.lost is not None:
                self.outcomes[member.name] = "lost"
                if self.killing_since is None:
                    self.failures[member.name, None] = member.lost
                    self.failing_since = self.failing_since or time.monotonic()

    def _unfinished(self) -> list[Member]:
        return [member for member in self.members if member.name not in self.outcomes]

    # --- the end --------------------------------------------------------------------------------------

    def _end_at_limit(self, start: float) -> None:
        if self.limit_s is None or self.failing_since is not None or self.killing_since is not None:
            return
        if time.monotonic() - start > self.limit_s:
            self.late = [member.name for member in self._unfinished()]
            self.kill()

    def _end_after_failure(self) -> None:
        """End the job once the first cause is known, or no better explanation can come."""
        if self.failing_since is None or self.killing_since is not None:
            return
        failures = list(self.failures.values())
        waited = time.monotonic() - self.failing_since > _CAUSE_GRACE_S
        all_failed = sum(one.rank is not None for one in failures) == self.plan.world_size
        if waited or all_failed or not all(map(is_consequence, failures)):
            self.kill(stacks=waited)

    def _give_up_stragglers(self) -> None:
        if self.killing_since is None or time.monotonic() - self.killing_since < _KILL_S:
            return
        for member in self._unfinished():
            self.outcomes[member.name] = "lost"
            self.fleet.give_up(member)


NO_RUN = RunDirectory(Path("/"))
"""A run directory in the place of a run's, which is neither read nor written."""


class OneShotJobError(Exception):
    """An internal failure of the job; the text says where, why and what to do."""


def run_one_shot_job(
    job: str,
    config: ResolvedConfig,
    hosts: tuple[Host, ...],
    task: Json,
    on_line: Callable[[str], None],
) -> Json:
    """Run a job in the layout of a configuration, and return the first rank's result.

    Args:
        job: its name in worker.JOBS.
        config: resolved.
        hosts: the hosts of the hostfile or of SLURM; none: this machine alone.
        task: the job's task.
        on_line: called with each line that the first rank prints.

    Raises:
        UserError: the hosts are not ready, or a rank found an error in the request.
        OneShotJobError: it failed otherwise.
    """
    with one_shot_jobs(job, config, hosts) as run:
        return run(config, task, on_line)


@contextmanager
def one_shot_jobs(
    job: str, config: ResolvedConfig, hosts: tuple[Host, ...] = ()
) -> Iterator[Callable[..., Json]]:
    """Provide a function that runs one such job after another, with the same agents.

    Its arguments are the job's configuration, task, and the function for its lines. Without hosts, jobs may
    have other numbers of ranks than `config`.
    """
    fixed = hosts or (command.local_host(config.world_size),)
    with Fleet(config, fixed, Path(config.run.root).absolute()) as fleet:
        numbers = itertools.count(1)

        def run(own: ResolvedConfig, task: Json, on_line: Callable[[str], None]) -> Json:
            fleet.prepare(
                command.agent_environment(own, own.world_size, os.environ),
                will_launch=True,
                job=job,
            )
            fleet.gather()
            if own.launcher.preflight:
                require_ready(fleet, own)
            port, number = fleet.members[0].port, next(numbers)
            plan = command.plan_launch(own, NO_RUN, number, hosts, port)
            return _result(execute(fleet, fleet.members, plan, own, job, task, on_line))

        yield run


def execute(
    fleet: Fleet,
    members: Sequence[Member],
    plan: command.LaunchPlan,
    config: ResolvedConfig,
    job: str,
    task: Json | None = None,
    on_line: Callable[[str], None] = lambda _: None,
    limit_s: float | None = None,
) -> JobExecution:
    """Run a job on these hosts, whose agents have prepared it. If this raises, all of its processes have ended.

    Args:
        config: the configuration of the ranks.
        limit_s: seconds for the whole job, and for the rendezvous a quarter of it; None: any time.
    """
    lines = LineSplitter()

    def on_message(_: Member, message: Message) -> None:
        if message["kind"] == "output" and (message["rank"], message["stream"]) == (0, "out"):
            for line in lines.feed(message["carried"]):
                on_line(line.decode(errors="replace"))

    meet_s = job_messages.RENDEZVOUS_S if limit_s is None else limit_s / 4
    order_for = partial(
        job_messages.LaunchOrder,
        run=None,
        lost_after_s=limit_s or meet_s,
        meet_s=meet_s,
        job=job,
        config=dump(config),
        task=task,
    )
    execution = JobExecution(
        fleet, plan, members, order_for, on_message=on_message, limit_s=limit_s
    )
    try:
        execution.run()
    except BaseException:
        execution.abandon()
        raise
    return execution


def _result(execution: JobExecution) -> Json:
    failures = list(execution.failures.values())
    if execution.result is not None and not failures:
        return execution.result
    if not failures:
        raise OneShotJobError("the ranks ended without a result and without a reason")
    error = next((error for failure in failures if (error := user_error(failure))), None)
    if error is not None:
        raise error
    cause, diagnosis, remedy = execution.first_cause()
    lines = [f"{cause.source} on {cause.host} failed: {diagnosis}"]
    lines += [f"  remedy: {remedy}"] if remedy else []
    raise OneShotJobError("\n".join([*lines, cause.traceback.rstrip()]).rstrip())
