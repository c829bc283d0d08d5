"""A run from its first attempt through its restarts, until all of its processes have ended."""

import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial

from nanoscale.common.json_text import Json
from nanoscale.common.units import counted, listed
from nanoscale.config.schema import Config
from nanoscale.launch.fleet.connections import Member
from nanoscale.launch.fleet.fleet import Fleet
from nanoscale.launch.fleet.signals import Signals
from nanoscale.launch.lifecycle.attempt import FAILED, Attempt, Outcome, View, asked_outcome
from nanoscale.launch.lifecycle.command import LaunchPlan, agent_environment, plan_launch
from nanoscale.launch.lifecycle.data_preparation import preparing_rest
from nanoscale.launch.lifecycle.host_choice import HostChoice
from nanoscale.launch.lifecycle.memory_source import newest_in_memory, pair
from nanoscale.launch.lifecycle.notification import Notifier
from nanoscale.launch.request import Request
from nanoscale.runs import events, failure, fence, status
from nanoscale.runs.directory import STREAMS, write_json
from nanoscale.runs.failure import Failure
from nanoscale.runs.lock import RunLock

_SHORTEST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_POLL_S = 0.1
_RETRY_S = 2.0
"""Seconds between two attempts to reach a host for which the run waits."""
_MOST_EMPTY_LOGS = 1024
_CHANGE = "changes of hosts"
_MOST_STARTS = 3
"""Attempts that continue from one state in memory; the state itself may be the cause of their failures."""


@dataclass
class Supervisor:
    """The supervision of a run to its end. The fleet's hosts have sent their facts."""

    lock: RunLock
    hosts: HostChoice
    signals: Signals
    view: View

    def __post_init__(self) -> None:
        self.run, self.fleet = self.lock.run, self.hosts.fleet
        note = partial(events.append, self.run, "note")
        self.newly_leaving = set[str]()
        """Hosts of the newest attempt that will be taken away."""
        self.fleet.report = note
        self.notifier = Notifier(self.config.launcher, self.run, note)
        self.memory_step = 0
        """The step of the newest state in memory from which an attempt has continued."""
        self.starts: Counter[tuple[int, int]] = Counter()
        """The number of attempts that continued from each state in memory."""

    def supervise(self, number: int) -> Outcome:
        """Run attempt `number`, and further ones as launcher.max_restarts allows.

        Raises:
            TakenOverError: another launcher holds the run now.
        """
        try:
            outcome = self._attempts(number)
        except BaseException:
            self._conclude(Outcome("failed", FAILED))
            raise
        return self._conclude(outcome)

    @property
    def config(self) -> Config:
        """The configuration of the newest attempt."""
        return self.hosts.request.config

    def _attempts(self, number: int) -> Outcome:
        restarts_left = self.config.launcher.max_restarts
        pause = _SHORTEST_PAUSE_S
        while True:
            outcome = self._attempt(number)
            is_preempted = outcome.state == "preempted"
            is_change = is_preempted and bool(self.hosts.change) and not self.newly_leaving
            cause = outcome.failure
            is_lost = self.hosts.is_elastic and cause is not None and cause.rank is None
            has_trained = self.view.running or is_lost  # or the job is not the reason
            has_failed = outcome.exit_code == FAILED
            is_left = is_preempted and self.newly_leaving and self.hosts.remaining()
            restarts = has_failed and restarts_left and not self.hosts.lacks_host()
            continues = is_change or is_left or restarts
            if is_change and self.signals.first is None:
                self._prepare()
            if not continues or self.signals.first is not None:
                return asked_outcome(self.run, self.signals) if is_change else outcome
            number += 1
            if is_change:
                continue
            self.hosts.change = None
            pause = _SHORTEST_PAUSE_S if has_trained else min(2 * pause, _LONGEST_PAUSE_S)
            restarts_left -= has_failed
            self._record_restart(outcome, restarts_left)
            self.hosts.leave_out_faulty(outcome.failure)
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
        ended, members = time.time(), self.hosts.choose(number)
        request = self.hosts.request
        plan = plan_launch(request.config, self.run, number, request.hosts, members[0].port)
        self._begin(plan)
        self.view.begin(plan, request.config.train.steps)
        can_start = all(it.is_present for it in members)  # else no rank is started
        memory = self._memory(members) if self.fleet.memory_key and can_start else None
        if self.hosts.change is not None:
            self._record_change(memory, ended)
        with preparing_rest(request.config.data, partial(events.append, self.run, "data")) as texts:
            attempt = Attempt(
                self.lock, plan, members, self.fleet, self.config.launcher, self.signals, self.view, memory,
                self.hosts.is_outdone, texts,
            )  # fmt: skip
            outcome = attempt.execute()
        self.newly_leaving = attempt.noticed - self.hosts.noticed
        self.hosts.noticed |= attempt.noticed
        return outcome

    def _memory(self, members: Sequence[Member]) -> Json:
        """Return the state in memory to continue from, if it is the newest, and the hosts' peers."""
        address_of = self.fleet.transport.address_of
        present = [member for member in self.fleet.members if member.is_present]
        report = partial(events.append, self.run, "memory")
        refused = {state for state, count in self.starts.items() if count >= _MOST_STARTS}
        source = newest_in_memory(present, address_of, refused, self.run.memory, report)
        if source is not None and source.step < max(self.run.checkpoint_steps(), default=0):
            source = None
        if source is None or source.folder is None:
            shutil.rmtree(self.run.memory, ignore_errors=True)
        if source is not None:
            self.starts[source.attempt, source.count] += 1
            self.memory_step = source.step
            names = ", ".join(peer.host for peer in source.peers)
            places = [f"the memory of {names}" if names else "", source.folder or ""]
            text = f"continuing from step {source.step} in {listed([*filter(None, places)])}"
            events.append(self.run, "memory", text, step=source.step)
        return {"source": source and asdict(source), "peers": pair(members, address_of)}

    # --- hosts before an attempt ----------------------------------------------------------------------

    def _wait_for_hosts(self) -> None:
        """Wait until a layout fits the hosts of an elastic job, or a signal comes."""
        judged: list[str] | None = None
        while self.hosts.is_elastic and self.signals.first is None:
            self.hosts.read_excluded()
            names = [it.name for it in self.hosts.remaining()]
            if names != judged and self.hosts.fitting() is not None:
                return
            if judged is None:
                text = "no layout fits the hosts that are left: waiting for another one; Ctrl-C ends the run"
                events.append(self.run, "waiting", text)
            judged = names
            absent = [it for it in self.fleet.members if it.name not in self.hosts.unusable]
            self.fleet.join(absent, _RETRY_S)  # no attempt runs that this could disturb
            self.fleet.poll(_POLL_S)
            self.view.poll()

    def _reconnect(self) -> None:
        unusable = self.hosts.unusable
        away = [it for it in self.fleet.members if not it.is_present and it.name not in unusable]
        if self.hosts.is_elastic:
            for member in away:  # they join beside the next attempt, or while the run waits
                member.tried = -math.inf
        elif away:
            self.fleet.connect(away)
        self._prepare()

    def _prepare(self) -> None:
        """Let the hosts prepare; an elastic job does not wait long for a host that is down."""
        limit_s = self.config.launcher.lost_after_s if self.hosts.is_elastic else None
        self.fleet.lost_nodes = self._lost_nodes
        prepare(self.fleet, self.hosts.request, self.signals, limit_s)

    @property
    def _lost_nodes(self) -> list[int]:
        """The hosts of the newest attempt, by their numbers in it, that are lost or have yet to answer."""
        hosts = enumerate(self.hosts.members)
        return [node for node, it in hosts if it.facts is None or not it.is_present]

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

    def _record_change(self, memory: Json | None, since: float) -> None:
        assert self.hosts.change is not None
        (who, gain), self.hosts.change = self.hosts.change, None
        steps = [*self.run.checkpoint_steps(), 0]
        if memory and memory["source"]:
            steps.append(memory["source"]["step"])
        hosts = counted(len(self.hosts.members), "host")
        text = f"{who} with {hosts} from step {max(steps)} ({gain})"
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
        about: Json = {"attempt": plan.attempt, "world_size": plan.world_size}
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
        on_disk = max(self.run.checkpoint_steps(), default=0)
        # Ranks that stop for a change of hosts do not save on disk.
        is_behind = bool(self.hosts.change) or self.memory_step > on_disk
        # After an error that the training itself has raised, the newest state may be its cause.
        if self.fleet.memory_key and (is_behind or (cause is not None and not cause.exception)):
            self.fleet.rescue = self._lost_nodes
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


def _of_cause(cause: Failure | None) -> Json:
    """Return the fields of an event that say when a failure was, and where."""
    if cause is None:
        return {}
    kind = cause.diagnosis.partition(" (")[0]  # free memory and the like differ each time
    return {"since": cause.time, "host": cause.host, "cause": f"{cause.host} ({kind})"}


def prepare(fleet: Fleet, request: Request, signals: Signals, limit_s: float | None = None) -> None:
    """Let the hosts prepare and send their facts, until all have answered or are lost, or a signal comes."""
    config = request.config
    environment = agent_environment(config, config.world_size, os.environ)
    fleet.prepare(environment, will_launch=True)
    fleet.gather(limit_s, lambda: signals.first is not None)
