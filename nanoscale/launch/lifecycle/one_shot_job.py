"""A one-shot job without a run: the agents use folders of their own, and return the first rank's result."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoscale.config.composing.frozen import dump
from nanoscale.config.derive import derive
from nanoscale.config.rules import Host
from nanoscale.config.schema import Config
from nanoscale.launch.fleet.fleet import Fleet
from nanoscale.launch.fleet.member import Member
from nanoscale.launch.lifecycle.command import LaunchPlan, here, passed_on, plan_launch
from nanoscale.launch.preflight.preflight import require_ready
from nanoscale.processes.messages import Message
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.failure import Evidence, RankFailure, diagnose, first_cause, user_error
from nanoscale.runs.tail import LineSplitter

_MEET_S = 600.0
_CAUSE_S = 1.5
_KILL_S = 10.0
_LOOK_S = 0.1


@dataclass
class Errand:
    """A one-shot job in progress."""

    fleet: Fleet
    members: Sequence[Member]
    plan: LaunchPlan
    config: str
    """The configuration as the ranks read it."""
    job: str
    """Its name in worker.JOBS."""
    meet_s: float
    """Seconds for the rendezvous of ranks."""
    limit_s: float | None = None
    """Seconds for the whole job."""
    task: dict[str, Any] | None = None
    """The ranks' task beside the configuration."""
    heed: Callable[[str], None] = lambda _: None
    """A function that is called with each line that the first rank prints."""
    lines: LineSplitter = field(default_factory=LineSplitter)
    ended: set[str] = field(default_factory=set)
    failures: dict[tuple[str, int | None], RankFailure] = field(default_factory=dict)
    evidence: dict[str, Evidence] = field(default_factory=dict)
    result: dict[str, Any] | None = None
    killing_since: float | None = None
    failing_since: float | None = None
    late: list[str] = field(default_factory=list)
    """Hosts whose ranks were still running at the time limit."""

    def run(self) -> None:
        """Run the job; if this raises, all of its processes have ended."""
        try:
            self._go()
        except BaseException:
            self._abandon()
            raise

    def _go(self) -> None:
        """Launch, receive messages until all have ended, and end ranks after a failure or the time limit."""
        self._launch()
        began = time.monotonic()
        while self._waiting():
            for member, message in self.fleet.poll(_LOOK_S):
                self._take(member, message)
            now = time.monotonic()
            if self.killing_since is not None:
                self._mind_stragglers(now)
            elif self.failing_since is not None and now - self.failing_since > _CAUSE_S:
                self._kill()
            elif self.limit_s is not None and now - began > self.limit_s:
                self.late = [member.name for member in self._waiting()]
                self._kill()

    def _kill(self) -> None:
        self.killing_since = time.monotonic()
        self.fleet.tell(self.members, "kill", attempt=1, stacks=False)

    def _abandon(self) -> None:
        """End it at once. An agent in its rendezvous follows no order, but exits with its connection."""
        for member in self.members:
            self.fleet.give_up(member)
        deadline = time.monotonic() + _KILL_S
        while any(map(_is_connected, self.members)) and time.monotonic() < deadline:
            self.fleet.poll(_LOOK_S)

    def _launch(self) -> None:
        for number, (member, host) in enumerate(zip(self.members, self.plan.hosts, strict=True)):
            self.fleet.tell(
                [member],
                "launch",
                job=self.job,
                run=None,
                config=self.config,
                task=self.task,
                attempt=1,
                name=host.host,
                node_rank=number,
                nodes=len(self.plan.hosts),
                ranks=host.ranks,
                world_size=self.plan.world_size,
                master_addr=self.plan.master_addr,
                master_port=self.plan.master_port,
                patience_s=self.limit_s or self.meet_s,
                meet_s=self.meet_s,
            )

    def _waiting(self) -> list[Member]:
        for member in self.members:
            if member.lost is not None and member.name not in self.ended:
                self.ended.add(member.name)
                if self.killing_since is None:
                    self._add([member.lost])
        return [member for member in self.members if member.name not in self.ended]

    def _take(self, member: Member, message: Message) -> None:
        if message["kind"] == "output" and (message["rank"], message["stream"]) == (0, "out"):
            for line in self.lines.feed(message["carried"]):
                self.heed(line.decode(errors="replace"))
        if message["kind"] == "ended":
            self.ended.add(member.name)
            self.evidence[member.name] = Evidence(**message["evidence"])
            self.result = self.result or message["result"]
        if message["kind"] in ("failing", "ended") and self.killing_since is None:
            self._add([RankFailure(**failure) for failure in message["failures"]])

    def _add(self, failures: Sequence[RankFailure]) -> None:
        for failure in failures:
            self.failures.setdefault((failure.host, failure.rank), failure)
        if self.failures:
            self.failing_since = self.failing_since or time.monotonic()

    def _mind_stragglers(self, now: float) -> None:
        assert self.killing_since is not None
        for member in self._waiting() if now - self.killing_since > _KILL_S else ():
            self.fleet.give_up(member)


def _is_connected(member: Member) -> bool:
    return member.process is not None and member.process.exit_code() is None


class ErrandError(Exception):
    """An internal failure of the job; the text says where, why and what to do."""


def run_errand(
    job: str,
    config: Config,
    hosts: tuple[Host, ...],
    task: dict[str, Any],
    heed: Callable[[str], None],
) -> dict[str, Any]:
    """Run a job in the layout of a configuration, and return the first rank's result.

    Args:
        job: its name in worker.JOBS.
        config: resolved.
        hosts: those of the hostfile or of SLURM; none: this machine alone.
        task: the job's task.
        heed: called with the first rank's output.

    Raises:
        UserError: the hosts are not ready, or a rank found an error in the request.
        ErrandError: it failed otherwise.
    """
    hosts = hosts or (here(config),)
    world = derive(config).world_size
    nowhere = RunDirectory(Path("/"))
    plan = plan_launch(config, nowhere, 1, world, hosts)
    with Fleet(config, hosts, Path(config.run.root).absolute()) as fleet:
        fleet.prepare(passed_on(config, plan, os.environ), will_launch=True, job=job)
        fleet.gather()
        if config.launcher.preflight:
            require_ready(fleet, config)
        facts = fleet.members[0].facts
        port = facts["port"] if facts is not None else None
        plan = plan_launch(config, nowhere, 1, world, hosts, port)
        errand = Errand(
            fleet, fleet.members, plan, dump(config), job, _MEET_S, task=task, heed=heed
        )
        errand.run()
    return _result(errand)


def _result(errand: Errand) -> dict[str, Any]:
    if errand.result is not None and not errand.failures:
        return errand.result
    if not errand.failures:
        raise ErrandError("the ranks ended, and none said why")
    failures = list(errand.failures.values())
    error = next((found for one in failures if (found := user_error(one))), None)
    if error is not None:
        raise error
    cause = first_cause(failures)
    diagnosis, remedy = diagnose(cause, errand.evidence.get(cause.host, Evidence()))
    who = "the agent" if cause.rank is None else f"rank {cause.rank}"
    lines = [f"{who} on {cause.host} failed: {diagnosis}"]
    lines += [f"  remedy: {remedy}"] if remedy else []
    raise ErrandError("\n".join([*lines, cause.traceback.rstrip()]).rstrip())
