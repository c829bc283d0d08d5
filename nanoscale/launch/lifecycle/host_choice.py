"""The hosts of an elastic job's attempts: which ones are used, are left out, or would let the plan gain."""

import math
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from nanoscale.common.errors import UserError
from nanoscale.common.units import listed
from nanoscale.config.machines import Host, canonical
from nanoscale.config.values.excluded_hosts import excluded_hosts
from nanoscale.config.values.forms import elastic, node_range
from nanoscale.launch.batch.jobs import way_on
from nanoscale.launch.fleet.connections import Member
from nanoscale.launch.fleet.fleet import SUSPENDED, Fleet
from nanoscale.launch.hosts.hosts import read_hostfile
from nanoscale.launch.lifecycle.prepare import replace_configuration
from nanoscale.launch.preflight.preflight import obstacle
from nanoscale.launch.request import Request, check_request
from nanoscale.plan.predict import predict
from nanoscale.processes.messages import Message
from nanoscale.runs import events
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.failure import Failure, agent_failure
from nanoscale.runs.jsonlines import Tail

_DIVERGED = "nanoscale.train.stability."
"""The module of the exceptions of a training that diverges, for which its host is not the cause."""
_CAUSES, _CAUSES_S = 3, 3600.0
"""A host with two of this many newest failures, less than these seconds apart, is left out."""


@dataclass
class HostChoice:
    """The choice of hosts for the attempts of a run. Jobs that are not elastic use all of their hosts."""

    run: RunDirectory
    fleet: Fleet
    request: Request
    """The request for the hosts of the newest attempt."""

    def __post_init__(self) -> None:
        self.members: list[Member] = []
        """The hosts of the newest attempt."""
        self.noticed = set[str]()
        """Hosts that will be taken away."""
        self.excluded = set[str]()
        """Hosts that `launcher.exclude_file` names."""
        self.left_out = set[str]()
        """Hosts that are used only if too few others are left."""
        self.change: tuple[str, str] | None = None
        """The reason why the attempt stops for a change of hosts, and the planned gain."""
        self._used = set[str]()
        """The hosts of all attempts."""
        self._checked: dict[str, tuple[Message, str | None]] = {}
        """Hosts that were checked during an attempt: their facts, and why a host cannot be used."""
        self._causes: deque[Failure] = deque(maxlen=_CAUSES)
        self._reports = Tail(self.run.events)
        self._reports.poll()
        self._faults: dict[str, str] = {}
        self._slow: dict[str, float] = {}
        """The slow hosts of the newest attempt, and the ratio of their time in a step to their peers' time."""
        self._judged: tuple[list[str], dict[str, float]] | None = None
        """The last hosts and slow hosts for which a new attempt would not have been faster."""
        self._requests: dict[tuple[Host, ...], Request] = {}
        if self.is_elastic:
            with suppress(UserError):  # the hostfile has changed
                every = read_hostfile(self.request.composed, spares=True)
                names = {member.name for member in self.fleet.members}
                for host in every:
                    if host.address not in names:
                        lost = agent_failure(host.address, "it is a spare host")
                        self.fleet.members.append(Member(host, lost=lost))

    @property
    def is_elastic(self) -> bool:
        return elastic(self.request.config.launcher.nodes)

    @property
    def _range(self) -> tuple[int, int]:
        """The fewest and the most hosts."""
        return node_range(self.request.config.launcher.nodes) or (1, 1)

    def choose(self, number: int) -> list[Member]:
        """Choose the hosts of this attempt; an elastic job continues without lost ones."""
        self.read_excluded()
        if (fitting := self.fitting()) is not None:
            members, request = fitting
            if request is not self.request:
                self._requests[self.request.hosts] = self.request
                self.request = request
                replace_configuration(self.run, request, number - 1)
        else:
            hosts = self.request.hosts
            members = [it for it in self.fleet.members if it.host in hosts] or self.fleet.members
        self._read_reports()
        self.members, self._judged, self._slow = members, None, {}
        self._used |= self.names
        return members

    @property
    def names(self) -> set[str]:
        """The names of the hosts of the newest attempt."""
        return {it.name for it in self.members}

    @property
    def unusable(self) -> set[str]:
        """The names of hosts that no attempt may use now."""
        return self.noticed | self.excluded

    def read_excluded(self) -> None:
        """Read `launcher.exclude_file`; if that fails, the hosts that it named before stay excluded."""
        try:
            excluded = excluded_hosts(self.request.composed)
        except UserError as error:
            events.append(self.run, "note", f"the excluded hosts stay as they were: {error}")
        else:
            members = self.fleet.members
            self.excluded = {it.name for it in members if canonical(it.name) in excluded}

    def lacks_host(self) -> bool:
        """True if a host is excluded now that a job with a fixed number of hosts needs; an event says so."""
        self.read_excluded()
        if self.is_elastic or not (needed := sorted(self.names & self.excluded)):
            return False
        text = f"launcher.exclude_file names {listed(needed)}: the job does not restart there. "
        text += f"To continue with other hosts, type {way_on(self.run)}"
        events.append(self.run, "left out", text)
        return True

    def fitting(self) -> tuple[list[Member], Request] | None:
        """Return the most hosts that a layout fits, and the request for them; None if there are too few."""
        present, (least, most) = self.remaining(), self._range
        for count in range(min(len(present), most), least - 1, -1):
            members = present[:count]
            with suppress(UserError):  # the layout does not fit this number
                return members, self._request_for([member.host for member in members])
        return None

    def remaining(self) -> list[Member]:
        """List the hosts with which an elastic job can continue; empty if it is not elastic, or needs more."""
        present = [it for it in self.fleet.members if it.is_present and self._may_join(it)]
        trusted = [it for it in present if it.name not in self.left_out]
        enough = (it for it in (trusted, present) if len(it) >= self._range[0])
        return next(enough, []) if self.is_elastic else []

    def leave_out_faulty(self, cause: Failure | None) -> None:
        """Leave out a host with two of the newest failures, and hosts with faulty GPUs, if enough remain."""
        self._read_reports()
        reasons = dict(self._faults)
        is_own = cause is None or cause.diagnosis.startswith(SUSPENDED)  # no host is the cause
        if cause is not None and not is_own and not cause.exception.startswith(_DIVERGED):
            self._causes.append(cause)
            causes = (it for it in self._causes if it.host == cause.host)
            if sum(cause.time - it.time < _CAUSES_S for it in causes) > 1:
                reasons[cause.host] = f"2 of the last {_CAUSES} failures began there"
        for host, reason in reasons.items():
            if self._can_spare(host):
                self._leave_out(host, reason)

    def _read_reports(self) -> None:
        for event in self._reports.poll():
            match event:
                case {"kind": "health", "host": str(host), "message": str(message)}:
                    self._faults[host] = message
                case {"kind": "straggler", "host": str(host), "ratio": float(ratio)}:
                    self._slow[host] = ratio

    def _can_spare(self, host: str) -> bool:
        """True if a host is not left out yet, and enough others remain."""
        others = {it.name for it in self.remaining()} - self.left_out - {host}
        return host not in self.left_out and len(others) >= self._range[0]

    def _leave_out(self, host: str, reason: str) -> None:
        self.left_out.add(host)
        text = (
            f"{host} is left out of later attempts: {reason}. To use it again, stop the run and type "
            f"{way_on(self.run)}"
        )
        events.append(self.run, "left out", text, host=host)

    def _may_join(self, member: Member) -> bool:
        """True if a host may be used; a host that had no part in the newest attempt is checked first."""
        if member.name in self.unusable or member.is_joining:
            return False
        facts = member.facts
        if not self.members or facts is None or member.name in self.names:
            return True
        if self._checked.get(member.name, (None, None))[0] is not facts:
            reason = obstacle(member, self.members, self.request.config)
            self._checked[member.name] = facts, reason
            if reason is not None:
                events.append(self.run, "note", f"{member.name} cannot be used: {reason}")
        return self._checked[member.name][1] is None

    def is_outdone(self) -> bool:
        """True if the plan gains without a slow host, or from further hosts, which are connected meanwhile."""
        if not self.is_elastic:
            return False
        self._read_reports()
        if len(self.members) - len(self._slow_hosts()) < self._range[1]:
            # A host of this attempt that is lost just now is reached only after the attempt's end. One that is
            # left out is reached too: it is there when a further host is lost.
            busy = self.unusable | self.names
            self.fleet.join([it for it in self.fleet.members if it.name not in busy])
        judged = [it.name for it in self.remaining()], dict(self._slow)
        if judged == self._judged:
            return False
        self._judged = judged
        if self._is_slowed():
            return True
        if (fitting := self.fitting()) is None:
            return False
        members, request = fitting
        gain = _gain(self.request, request)
        if len(members) <= len(self.members) or gain <= 0:
            return False
        new = {it.name for it in members} - self.names
        who = [f"{it} is back" if it in self._used else f"{it} joins" for it in sorted(new)]
        self.change = f"{listed(who)}: continuing", f"{gain:+.0%} planned"
        return True

    def _is_slowed(self) -> bool:
        """True if the plan gains without a slow host, which is left out from now on."""
        for host, ratio in self._slow_hosts().items():
            if not self._can_spare(host):
                continue
            self.left_out.add(host)
            fitting = self.fitting()
            gain = ratio * (1 + _gain(self.request, fitting[1])) - 1 if fitting else 0.0
            if gain > 0:
                self._leave_out(host, f"its ranks take {ratio:.2f} times as long as their peers")
                self.change = f"{host} is slow: continuing", f"{gain:+.0%} planned"
                return True
            self.left_out.remove(host)
        return False

    def _slow_hosts(self) -> dict[str, float]:
        """Return the hosts that are slow enough to be left out; a host beyond the most may replace one."""
        least = self.request.config.launcher.exclude_stragglers or math.inf
        return {host: ratio for host, ratio in self._slow.items() if ratio >= least}

    def _request_for(self, hosts: Sequence[Host]) -> Request:
        """Return the request for other hosts. Raises UserError if the layout does not fit them."""
        before, key = self.request, tuple(hosts)
        if key == before.hosts:
            return before
        if key not in self._requests:
            request = check_request(
                before.composed, devices=before.devices, hosts=key, repeats=before.repeats
            )
            # The name and the folder of the weights were found before the first launch.
            config = replace(request.config, run=before.config.run, model=before.config.model)
            self._requests[key] = replace(request, config=config)
        return self._requests[key]


def _gain(before: Request, after: Request) -> float:
    """Return by how much a request has more planned tokens/s than another; without plans, more hosts."""
    try:
        old, new = predict(before.config), predict(after.config)
    except UserError:  # the hardware is unknown
        return len(after.hosts) / max(1, len(before.hosts)) - 1
    return old.time.seconds / new.time.seconds - 1 if new.fits or not old.fits else -1.0
