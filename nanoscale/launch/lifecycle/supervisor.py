"""A run from its first attempt through its restarts, until all of its processes have ended."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from nanoscale.common.errors import UserError
from nanoscale.common.units import counted, listed
from nanoscale.config.machines import Host
from nanoscale.config.values.forms import elastic, node_range
from nanoscale.launch.fleet.connections import Member
from nanoscale.launch.fleet.fleet import Fleet
from nanoscale.launch.fleet.signals import Signals
from nanoscale.launch.lifecycle.attempt import FAILED, Attempt, Outcome, View
from nanoscale.launch.lifecycle.command import LaunchPlan, agent_environment, plan_launch
from nanoscale.launch.lifecycle.data_preparation import preparing_rest
from nanoscale.launch.lifecycle.memory_source import newest_in_memory, pair
from nanoscale.launch.lifecycle.notification import Notifier
from nanoscale.launch.lifecycle.prepare import replace_configuration
from nanoscale.launch.request import Request, check_request
from nanoscale.runs import events, failure, fence, status
from nanoscale.runs.directory import STREAMS, RunDirectory, write_json
from nanoscale.runs.failure import Failure
from nanoscale.runs.lock import RunLock

_SHORTEST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_POLL_S = 0.1
_MOST_EMPTY_LOGS = 1024
_MOST_STARTS = 3
"""Attempts that continue from one state in memory; the state itself may be the cause of their failures."""


@dataclass
class Supervisor:
    """The supervision of a run to its end. The fleet's hosts have sent their facts."""

    lock: RunLock
    request: Request
    fleet: Fleet
    signals: Signals
    view: View

    def __post_init__(self) -> None:
        note = partial(events.append, self.run, "note")
        self.leaving = self.newly_leaving = set[str]()  # hosts that will be taken away
        self.notifier = Notifier(self.request.config.launcher, self.run, note)
        self.starts: Counter[tuple[int, int]] = Counter()
        """The number of attempts that continued from each state in memory."""

    def supervise(self, number: int) -> Outcome:
        """Run attempt `number`, and further ones as launcher.max_restarts allows.

        Raises:
            TakenOverError: another launcher holds the run now.
        """
        note = partial(events.append, self.run, "data")
        try:
            with preparing_rest(self.request.config.data, note):
                outcome = self._attempts(number)
        except BaseException:
            self._conclude(Outcome("failed", FAILED))
            raise
        return self._conclude(outcome)

    @property
    def run(self) -> RunDirectory:
        return self.lock.run

    def _attempts(self, number: int) -> Outcome:
        restarts_left = self.request.config.launcher.max_restarts
        pause = _SHORTEST_PAUSE_S
        while True:
            outcome = self._attempt(number)
            has_trained = self.view.running
            has_failed = outcome.exit_code == FAILED
            is_left = outcome.state == "preempted" and self.newly_leaving and self._remaining()
            if not (is_left or (has_failed and restarts_left)) or self.signals.first is not None:
                return outcome
            pause = _SHORTEST_PAUSE_S if has_trained else min(2 * pause, _LONGEST_PAUSE_S)
            restarts_left, number = restarts_left - has_failed, number + 1
            self._record_restart(outcome, restarts_left)
            deadline = time.monotonic() + (0.0 if has_trained else pause)
            while time.monotonic() < deadline and self.signals.first is None:
                self.fleet.poll(_POLL_S)
                self.view.poll()
            if self.signals.first is None:
                self._reconnect()
            if self.signals.first is not None:
                return outcome

    def _attempt(self, number: int) -> Outcome:
        self.lock.require()
        members = self._members(number)
        request = self.request
        plan = plan_launch(request.config, self.run, number, request.hosts, members[0].port)
        self._begin(plan)
        self.view.begin(plan, request.config.train.steps)
        launcher = request.config.launcher
        memory = self._memory(members) if self.fleet.memory_key else None
        attempt = Attempt(
            self.lock, plan, members, self.fleet, launcher, self.signals, self.view, memory
        )
        outcome = attempt.execute()
        self.newly_leaving = attempt.noticed - self.leaving
        self.leaving |= attempt.noticed
        return outcome

    def _memory(self, members: Sequence[Member]) -> dict[str, Any]:
        """Return the state in memory to continue from, if it is the newest, and the hosts' peers."""
        address_of = self.fleet.transport.address_of
        present = [member for member in self.fleet.members if member.is_present]
        for member in present:
            for damage in ((member.facts or {}).get("memory") or {}).get("damaged", ()):
                events.append(self.run, "memory", f"{member.name}: {damage}; it is not used")
        refused = {state for state, count in self.starts.items() if count >= _MOST_STARTS}
        source = newest_in_memory(present, address_of, refused)
        if source is not None and source.step < max(self.run.checkpoint_steps(), default=0):
            source = None
        if source is not None:
            self.starts[source.attempt, source.count] += 1
            names = ", ".join(peer.host for peer in source.peers)
            text = f"continuing from step {source.step} in the memory of {names}"
            events.append(self.run, "memory", text, step=source.step)
        return {"source": source and asdict(source), "peers": pair(members, address_of)}

    # --- hosts of an attempt --------------------------------------------------------------------------

    def _members(self, number: int) -> list[Member]:
        """Return the hosts of this attempt; an elastic job continues without lost ones."""
        present = self._remaining()
        least, _ = node_range(self.request.config.launcher.nodes) or (1, 1)
        for count in range(len(present), least - 1, -1):
            members = present[:count]
            try:
                self._resolve_for([member.host for member in members], number)
            except UserError:
                continue  # the layout does not fit this number
            return members
        return self.fleet.members

    def _remaining(self) -> list[Member]:
        """List the hosts with which an elastic job can continue; empty if it is not elastic, or needs more."""
        nodes, members = self.request.config.launcher.nodes, self.fleet.members
        least, _ = node_range(nodes) or (1, 1)
        present = [it for it in members if it.is_present and it.name not in self.leaving]
        return present if elastic(nodes) and len(present) >= least else []

    def _resolve_for(self, hosts: Sequence[Host], number: int) -> None:
        """Resolve the configuration for other hosts than before."""
        if tuple(hosts) == self.request.hosts:
            return
        before = self.request
        request = check_request(
            before.composed, devices=before.devices, hosts=tuple(hosts), repeats=before.repeats
        )
        # The name and the folder of the weights were found before the first launch.
        config = replace(request.config, run=before.config.run, model=before.config.model)
        self.request = replace(request, config=config)
        replace_configuration(self.run, self.request, number - 1)

    def _reconnect(self) -> None:
        away = [it for it in self.fleet.members if not it.is_present]
        lost = [member for member in away if member.name not in self.leaving]
        if lost:
            self.fleet.connect(lost)
        launcher = self.request.config.launcher
        # An elastic job does not wait long for a host that is down.
        lost_after_s = launcher.lost_after_s if elastic(launcher.nodes) else None
        prepare(self.fleet, self.request, self.signals, lost_after_s)

    # --- records --------------------------------------------------------------------------------------

    def _record_restart(self, outcome: Outcome, restarts_left: int) -> None:
        cause = outcome.failure
        reason = cause.sentence if cause is not None else "it failed"
        if outcome.state == "preempted":
            reason = f"{listed(sorted(self.newly_leaving))} will be taken away"
        more = counted(restarts_left, "more restart") if restarts_left else "no more restart"
        start = "step 1: no checkpoint was saved"
        if steps := self.run.checkpoint_steps():
            start = f"the checkpoint of step {steps[-1]}"
        if self.fleet.memory_key:
            start = f"memory, or else from {start}"
        text = f"{reason}; starting again from {start} ({more} after this)"
        self.notifier.send("restarting", text)
        events.append(self.run, "restart", text, left=restarts_left, **_of_cause(cause))
        self.view.poll()

    def _begin(self, plan: LaunchPlan) -> None:
        self.fleet.output.write_to(self.run, plan.attempt)
        fence.begin(self.run, plan.attempt)
        self._make_logs(plan)
        status.write(self.run, status.read(self.run).starting(plan.attempt))
        write_json(self.run.launch, plan.document())
        if self.run.failure.exists():
            logs = self.run.attempt_logs(max(1, plan.attempt - 1))
            logs.mkdir(parents=True, exist_ok=True)
            self.run.failure.rename(logs / self.run.failure.name)
        names = ", ".join(host.host for host in plan.hosts)
        message = f"attempt {plan.attempt}: {counted(plan.world_size, 'rank')} on {names}"
        self.notifier.send("starting", message)
        about: dict[str, Any] = {"attempt": plan.attempt, "world_size": plan.world_size}
        if self.lock.heard is not None:  # the launcher before this one was killed
            about["heard"], self.lock.heard = self.lock.heard, None
        events.append(self.run, events.ATTEMPT, message, **about)

    def _make_logs(self, plan: LaunchPlan) -> None:
        """Create empty files, so that readers find them; for very many ranks only of ranks that print."""
        if plan.world_size > _MOST_EMPTY_LOGS:
            return
        for host in plan.hosts:
            for rank in host.ranks:
                for stream in STREAMS:
                    self.run.log(plan.attempt, host.host, rank, stream).touch()

    def _conclude(self, outcome: Outcome) -> Outcome:
        self.lock.require()
        cause = outcome.failure
        with suppress(OSError):
            fence.end(self.run)
        with suppress(OSError):  # a full disk must not hide the outcome from the user
            if cause is not None:
                if not self.run.failure.exists():  # the disk was full before the fence's end
                    failure.write(self.run, cause)
                about = {"rank": cause.rank, **_of_cause(cause)}
                events.append(self.run, "failure", cause.sentence, **about)
            status.write(self.run, status.read(self.run).ending(outcome.state, outcome.exit_code))
        why = cause.sentence if cause is not None else f"exit code {outcome.exit_code}"
        self.notifier.send(outcome.state, why, outcome.exit_code)
        self.notifier.finish()
        return outcome


def _of_cause(cause: Failure | None) -> dict[str, Any]:
    """Return the fields of an event that say when a failure was, and where."""
    if cause is None:
        return {}
    return {"since": cause.time, "host": cause.host, "cause": f"{cause.host} ({cause.diagnosis})"}


def prepare(
    fleet: Fleet,
    request: Request,
    signals: Signals,
    limit_s: float | None = None,
) -> None:
    """Let the hosts prepare and send their facts, until all have answered or are lost, or a signal comes."""
    config = request.config
    environment = agent_environment(config, config.world_size, os.environ)
    fleet.prepare(environment, will_launch=True)
    fleet.gather(limit_s, lambda: signals.first is not None)
