"""A run from its first attempt through its restarts, until all of its processes have ended."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import time
from collections import Counter, deque
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
from nanoscale.launch.hosts.hosts import read_hostfile
from nanoscale.launch.lifecycle.attempt import FAILED, Attempt, Outcome, View, asked_outcome
from nanoscale.launch.lifecycle.command import LaunchPlan, agent_environment, plan_launch
from nanoscale.launch.lifecycle.data_preparation import preparing_rest
from nanoscale.launch.lifecycle.memory_source import newest_in_memory, pair
from nanoscale.launch.lifecycle.notification import Notifier
from nanoscale.launch.lifecycle.prepare import replace_configuration
from nanoscale.launch.preflight.preflight import obstacle
from nanoscale.launch.request import Request, check_request
from nanoscale.plan.predict import predict
from nanoscale.processes.messages import Message
from nanoscale.runs import events, failure, fence, status
from nanoscale.runs.directory import STREAMS, RunDirectory, write_json
from nanoscale.runs.failure import Failure, agent_failure
from nanoscale.runs.lock import RunLock

_SHORTEST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_POLL_S = 0.1
_RETRY_S = 2.0
"""Seconds between two attempts to reach a host for which the run waits."""
_MOST_EMPTY_LOGS = 1024
_CHANGE = "changes of hosts"
_DIVERGED = "nanoscale.train.stability."
"""The module of the exceptions of a training that diverges, for which its host is not the cause."""
_CAUSES, _CAUSES_S = 3, 3600.0
"""A host with two of this many newest failures, less than these seconds apart, is left out."""
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
        self.members: list[Member] = []
        """The hosts of the newest attempt."""
        self.used = set[str]()
        """The hosts of all attempts."""
        self.checked: dict[str, tuple[Message, str | None]] = {}
        """The facts of hosts that were checked beside an attempt, and why they cannot be used."""
        self.causes: deque[Failure] = deque(maxlen=_CAUSES)
        self.reports = events.follow(self.run)
        self.reports.poll()
        self.faults: dict[str, str] = {}
        self.slow: dict[str, float] = {}
        """The slow hosts of the newest attempt, and the ratio of their time in a step to their peers' time."""
        self.left_out = set[str]()
        """Hosts that are used only if too few others are left."""
        self.judged: tuple[list[str], dict[str, float]] | None = None
        """The hosts, and slow hosts, from which the newest attempt would not gain."""
        self.change: tuple[str, str] | None = None
        """The reason why the attempt stops for a change of hosts, and the planned gain."""
        self.requests: dict[tuple[Host, ...], Request] = {}
        if self._is_elastic:
            with suppress(UserError):  # the hostfile has changed
                every = read_hostfile(self.request.composed, spares=True)
                names = {member.name for member in self.fleet.members}
                self.fleet.members += [_spare(it) for it in every if it.address not in names]
        self.notifier = Notifier(self.request.config.launcher, self.run, note)
        self.memory_step = 0
        """The step of the newest state in memory from which an attempt has continued."""
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
            is_preempted = outcome.state == "preempted"
            is_change = is_preempted and bool(self.change) and not self.newly_leaving
            cause = outcome.failure
            is_lost = self._is_elastic and cause is not None and cause.rank is None
            has_trained = self.view.running or is_lost  # or the job is not the reason
            has_failed = outcome.exit_code == FAILED
            is_left = is_preempted and self.newly_leaving and self._remaining()
            continues = is_change or is_left or (has_failed and restarts_left)
            if is_change and self.signals.first is None:
                prepare(self.fleet, self.request, self.signals, self._lost_after_s)
            if not continues or self.signals.first is not None:
                return asked_outcome(self.run, self.signals) if is_change else outcome
            number += 1
            if is_change:
                continue
            self.change = None
            pause = _SHORTEST_PAUSE_S if has_trained else min(2 * pause, _LONGEST_PAUSE_S)
            restarts_left -= has_failed
            self._record_restart(outcome, restarts_left)
            self._leave_out_faulty(outcome.failure)
            deadline = time.monotonic() + (0.0 if has_trained else pause)
            while time.monotonic() < deadline and self.signals.first is None:
                self.fleet.poll(_POLL_S)
                self.view.poll()
            if self.signals.first is None:
                self._reconnect()
                if has_failed or restarts_left:
                    self._wait_for_hosts()
            if self.signals.first is not None:
                return outcome

    def _attempt(self, number: int) -> Outcome:
        self.lock.require()
        ended, members = time.time(), self._members(number)
        self._read_reports()
        self.members, self.judged, self.slow = members, None, {}
        request = self.request
        plan = plan_launch(request.config, self.run, number, request.hosts, members[0].port)
        self._begin(plan)
        self.view.begin(plan, request.config.train.steps)
        launcher = request.config.launcher
        memory = self._memory(members) if self.fleet.memory_key else None
        if self.change is not None:
            self._record_change(memory, ended)
        self.used |= set(map(_name, members))
        attempt = Attempt(
            self.lock, plan, members, self.fleet, launcher, self.signals, self.view, memory,
            self._is_outdone,
        )  # fmt: skip
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
        source = newest_in_memory(present, address_of, refused, self.run.memory)
        if source is not None and source.step < max(self.run.checkpoint_steps(), default=0):
            source = None
        if source is None or source.folder is None:
            shutil.rmtree(self.run.memory, ignore_errors=True)
        if source is not None:
            self.starts[source.attempt, source.count] += 1
            self.memory_step = source.step
            names = filter(None, (*(peer.host for peer in source.peers), source.folder))
            text = f"continuing from step {source.step} in the memory of {', '.join(names)}"
            events.append(self.run, "memory", text, step=source.step)
        return {"source": source and asdict(source), "peers": pair(members, address_of)}

    # --- hosts of an attempt --------------------------------------------------------------------------

    def _members(self, number: int) -> list[Member]:
        """Return the hosts of this attempt; an elastic job continues without lost ones."""
        if (fitting := self._fitting()) is not None:
            members, request = fitting
            self._adopt(request, number)
            return members
        hosts = self.request.hosts
        return [it for it in self.fleet.members if it.host in hosts] or self.fleet.members

    def _fitting(self) -> tuple[list[Member], Request] | None:
        """Return the most hosts that a layout fits, and the request for them; None if there are too few."""
        present, (least, most) = self._remaining(), self._range
        for count in range(min(len(present), most), least - 1, -1):
            members = present[:count]
            with suppress(UserError):  # the layout does not fit this number
                return members, self._request_for([member.host for member in members])
        return None

    def _remaining(self) -> list[Member]:
        """List the hosts with which an elastic job can continue; empty if it is not elastic, or needs more."""
        present = [it for it in self.fleet.members if it.is_present and self._may_join(it)]
        trusted = [it for it in present if it.name not in self.left_out]
        enough = (it for it in (trusted, present) if len(it) >= self._range[0])
        return next(enough, []) if self._is_elastic else []

    def _leave_out_faulty(self, cause: Failure | None) -> None:
        """Leave out a host with two of the newest failures, and hosts with faulty GPUs, if enough remain."""
        self._read_reports()
        reasons = dict(self.faults)
        if cause is not None and not cause.exception.startswith(_DIVERGED):
            self.causes.append(cause)
            causes = (it for it in self.causes if it.host == cause.host)
            if sum(cause.time - it.time < _CAUSES_S for it in causes) > 1:
                reasons[cause.host] = f"2 of the last {_CAUSES} failures began there"
        for host, reason in reasons.items():
            if self._can_spare(host):
                self._leave_out(host, reason)

    def _read_reports(self) -> None:
        for event in self.reports.poll():
            match event:
                case {"kind": "health", "host": str(host), "message": str(message)}:
                    self.faults[host] = message
                case {"kind": "straggler", "host": str(host), "ratio": float(ratio)}:
                    self.slow[host] = ratio

    def _can_spare(self, host: str) -> bool:
        """True if a host is not left out yet, and enough others remain."""
        others = {it.name for it in self._remaining()} - self.left_out - {host}
        return host not in self.left_out and len(others) >= self._range[0]

    def _leave_out(self, host: str, reason: str) -> None:
        self.left_out.add(host)
        text = (
            f"{host} is left out of later attempts: {reason}. To use it again, stop the run and type "
            f"nanoscale resume {shlex.quote(self.run.reference)}"
        )
        events.append(self.run, "left out", text, host=host)

    def _wait_for_hosts(self) -> None:
        """Wait until a layout fits the hosts of an elastic job, or a signal comes."""
        judged: list[str] | None = None
        while self._is_elastic and self.signals.first is None:
            names = [it.name for it in self._remaining()]
            if names != judged and self._fitting() is not None:
                return
            if judged is None:
                text = "no layout fits the hosts that are left: waiting for another one; Ctrl-C ends the run"
                events.append(self.run, "waiting", text)
            judged = names
            absent = [it for it in self.fleet.members if it.name not in self.leaving]
            self.fleet.join(absent, _RETRY_S)  # no attempt runs that this could disturb
            self.fleet.poll(_POLL_S)
            self.view.poll()

    def _may_join(self, member: Member) -> bool:
        """True if a host may be used; a host that had no part in the newest attempt is checked first."""
        if member.name in self.leaving or member.is_joining:
            return False
        facts = member.facts
        if not self.members or facts is None or member.name in map(_name, self.members):
            return True
        if self.checked.get(member.name, (None, None))[0] is not facts:
            reason = obstacle(member, self.members, self.request.config)
            self.checked[member.name] = facts, reason
            if reason is not None:
                events.append(self.run, "note", f"{member.name} cannot be used: {reason}")
        return self.checked[member.name][1] is None

    def _is_outdone(self) -> bool:
        """True if the plan gains without a slow host, or from further hosts, which are connected meanwhile."""
        if not self._is_elastic:
            return False
        self._read_reports()
        if len(self.members) - len(self._slow_hosts()) < self._range[1]:
            # A host of this attempt that is lost just now is reached only after the attempt's end. One that is
            # left out is reached too: it is there when a further host is lost.
            busy = self.leaving.union(map(_name, self.members))
            self.fleet.join([it for it in self.fleet.members if it.name not in busy])
        judged = [it.name for it in self._remaining()], dict(self.slow)
        if judged == self.judged:
            return False
        self.judged = judged
        if self._is_slowed():
            return True
        if (fitting := self._fitting()) is None:
            return False
        members, request = fitting
        gain = _gain(self.request, request)
        if len(members) <= len(self.members) or gain <= 0:
            return False
        new = {it.name for it in members} - set(map(_name, self.members))
        who = [f"{it} is back" if it in self.used else f"{it} joins" for it in sorted(new)]
        self.change = f"{listed(who)}: continuing", f"{100 * gain:+.0f} % planned"
        return True

    def _is_slowed(self) -> bool:
        """True if the plan gains without a slow host, which is left out from now on."""
        for host, ratio in self._slow_hosts().items():
            if not self._can_spare(host):
                continue
            self.left_out.add(host)
            fitting = self._fitting()
            gain = ratio * (1 + _gain(self.request, fitting[1])) - 1 if fitting else 0.0
            if gain > 0:
                self._leave_out(host, f"its ranks take {ratio:.2f} times as long as their peers")
                self.change = f"{host} is slow: continuing", f"{100 * gain:+.0f} % planned"
                return True
            self.left_out.remove(host)
        return False

    def _slow_hosts(self) -> dict[str, float]:
        """Return the hosts that are slow enough to be left out; a host beyond the most may replace one."""
        least = self.request.config.launcher.exclude_stragglers or math.inf
        return {host: ratio for host, ratio in self.slow.items() if ratio >= least}

    @property
    def _is_elastic(self) -> bool:
        return elastic(self.request.config.launcher.nodes)

    @property
    def _range(self) -> tuple[int, int]:
        """The fewest and the most hosts."""
        return node_range(self.request.config.launcher.nodes) or (1, 1)

    def _request_for(self, hosts: Sequence[Host]) -> Request:
        """Return the request for other hosts. Raises UserError if the layout does not fit them."""
        before, key = self.request, tuple(hosts)
        if key == before.hosts:
            return before
        if key not in self.requests:
            request = check_request(
                before.composed, devices=before.devices, hosts=key, repeats=before.repeats
            )
            # The name and the folder of the weights were found before the first launch.
            config = replace(request.config, run=before.config.run, model=before.config.model)
            self.requests[key] = replace(request, config=config)
        return self.requests[key]

    def _adopt(self, request: Request, number: int) -> None:
        """Continue with the configuration for other hosts than before."""
        if request is not self.request:
            self.requests[self.request.hosts] = self.request
            self.request = request
            replace_configuration(self.run, request, number - 1)

    def _reconnect(self) -> None:
        away = [
            it for it in self.fleet.members if not it.is_present and it.name not in self.leaving
        ]
        if self._is_elastic:  # they join beside the next attempt, or while the run waits for hosts
            for member in away:
                member.tried = -math.inf
        elif away:
            self.fleet.connect(away)
        prepare(self.fleet, self.request, self.signals, self._lost_after_s)

    @property
    def _lost_after_s(self) -> float | None:
        """The longest wait for hosts: an elastic job does not wait long for a host that is down."""
        return self.request.config.launcher.lost_after_s if self._is_elastic else None

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

    def _record_change(self, memory: dict[str, Any] | None, since: float) -> None:
        assert self.change is not None
        (who, gain), self.change = self.change, None
        steps = [*self.run.checkpoint_steps(), 0]
        if memory and memory["source"]:
            steps.append(memory["source"]["step"])
        text = f"{who} with {counted(len(self.members), 'host')} from step {max(steps)} ({gain})"
        events.append(self.run, "hosts", text, step=max(steps), since=since, cause=_CHANGE)

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
        # Ranks that stop for a change of hosts do not save on disk.
        is_behind = bool(self.change) or self.memory_step > max(
            self.run.checkpoint_steps(), default=0
        )
        # After an error that the training itself has raised, the newest state may be its cause.
        if self.fleet.memory_key and (is_behind or (cause is not None and not cause.exception)):
            lost = [node for node, it in enumerate(self.members) if not it.is_present]
            self.fleet.rescue = lost
        elif cause is None:  # the disk has the newest state
            shutil.rmtree(self.run.memory, ignore_errors=True)
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


def _name(member: Member) -> str:
    return member.name


def _spare(host: Host) -> Member:
    """Return a host beyond the most that the job uses, which is not connected yet."""
    return Member(host, lost=agent_failure(host.address, "it is a spare host"))


def _gain(before: Request, after: Request) -> float:
    """Return by how much a request has more planned tokens/s than another; without plans, more hosts."""
    try:
        old, new = predict(before.config), predict(after.config)
    except UserError:  # the hardware is unknown
        return len(after.hosts) / max(1, len(before.hosts)) - 1
    return old.time.seconds / new.time.seconds - 1 if new.fits or not old.fits else -1.0


def _of_cause(cause: Failure | None) -> dict[str, Any]:
    """Return the fields of an event that say when a failure was, and where."""
    if cause is None:
        return {}
    return {"since": cause.time, "host": cause.host, "cause": f"{cause.host} ({cause.diagnosis})"}


def prepare(fleet: Fleet, request: Request, signals: Signals, limit_s: float | None = None) -> None:
    """Let the hosts prepare and send their facts, until all have answered or are lost, or a signal comes."""
    config = request.config
    environment = agent_environment(config, config.world_size, os.environ)
    fleet.prepare(environment, will_launch=True)
    fleet.gather(limit_s, lambda: signals.first is not None)
