"""The state machine of a job, decided by messages and lost hosts, here without any process."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from nanoscale.config.rules import Host
from nanoscale.config.schema import Config
from nanoscale.config.values import yaml_file
from nanoscale.launch.fleet.connections import Member
from nanoscale.launch.lifecycle.command import HostPlan, LaunchPlan
from nanoscale.launch.lifecycle.job_execution import JobExecution, execute
from nanoscale.runs import failure
from nanoscale.runs.failure import Evidence, RankFailure, agent_failure
from nanoscale.runs.job_messages import Ended, Failing, LaunchOrder, message_of

PLAN = LaunchPlan(
    1, 2, (HostPlan("a", 1, (0,), ("x",)), HostPlan("b", 1, (1,), ("x",))), "a", 1, {}, ()
)
ENDED = message_of(Ended(1, "killed"))


class Fleet:
    """A fleet whose agents answer one message between two polls; an order to kill ends them."""

    def __init__(self, *messages: tuple[str, dict[str, Any]]) -> None:
        self.members = [Member(Host(name, 1)) for name in ("a", "b")]
        self.messages = list(messages)
        self.told: list[str] = []

    def send(self, members: list[Member], kind: str, **content: Any) -> None:
        self.told.append(kind)
        if kind == "kill":
            self.messages += [(member.name, ENDED) for member in members]

    def poll(self, _timeout: float) -> list[tuple[Member, dict[str, Any]]]:
        if not self.messages:
            return []
        name, message = self.messages.pop(0)
        if "raise" in message:
            raise message["raise"]
        return [(member, message) for member in self.members if member.name == name]

    def give_up(self, member: Member) -> None:
        self.told.append(f"give up {member.name}")


def execution(fleet: Any, **options: Any) -> JobExecution:
    return JobExecution(
        fleet, PLAN, fleet.members, partial(LaunchOrder, run=None, lost_after_s=1.0), **options
    )


def test_a_host_that_is_lost_before_the_start_prevents_it() -> None:
    fleet = Fleet()
    fleet.members[1].lost = agent_failure("b", "no route")
    job = execution(fleet)
    job.run()
    assert fleet.told == [] and set(job.outcomes.values()) == {"never started"}
    assert [failure.host for failure in job.failures.values()] == ["b"]


def test_a_failure_is_diagnosed_also_if_the_disk_of_nanoscale_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failure.diagnoses.cache_clear()
    execution(Fleet(("a", ENDED), ("b", ENDED))).run()
    monkeypatch.setattr(yaml_file, "read", None)
    diagnosis, _ = failure.diagnose(RankFailure("ended", 0, 0, "a", 1.0, exit_code=-11), Evidence())
    assert "segmentation fault" in diagnosis


def test_the_time_limit_ends_all_ranks_and_names_the_late_hosts() -> None:
    fleet = Fleet(("a", {**ENDED, "outcome": "completed", "result": {"loss": 1}}))
    job = execution(fleet, limit_s=0.0)
    job.run()
    assert fleet.told == ["launch", "launch", "kill"]
    assert job.late == ["b"] and job.failures == {} and job.result == {"loss": 1}


def test_messages_of_an_earlier_attempt_are_ignored() -> None:
    fleet = Fleet(
        ("a", {**ENDED, "attempt": 0, "outcome": "failed", "result": {"loss": 0}}),
        ("a", {**ENDED, "outcome": "completed", "result": {"loss": 1}}),
        ("b", {**ENDED, "outcome": "completed", "result": None}),
    )
    job = execution(fleet)
    job.run()
    assert job.outcomes == {"a": "completed", "b": "completed"} and job.result == {"loss": 1}


def test_a_one_shot_job_returns_lines_of_the_first_rank_and_ends_once_the_cause_is_known() -> None:
    error = RankFailure.of(ValueError("x"), rank=1, local_rank=0, host="b")
    output = {"kind": "output", "rank": 0, "stream": "out"}
    failing = message_of(Failing(1, (error,)))
    fleet: Any = Fleet(
        ("a", {**output, "carried": b"one\ntw"}),
        ("a", {**output, "stream": "err", "carried": b"noise\n"}),
        ("b", {**output, "rank": 1, "carried": b"of another rank\n"}),
        ("a", {**output, "carried": b"o\n"}),
        ("b", failing),
    )
    lines: list[str] = []
    job = execute(fleet, fleet.members, PLAN, Config(), "bench", on_line=lines.append)
    assert lines == ["one", "two"]
    assert [failure.rank for failure in job.failures.values()] == [1]
    assert fleet.told == ["launch", "launch", "kill"]


def test_an_interrupt_gives_up_all_hosts_of_a_one_shot_job() -> None:
    fleet: Any = Fleet(("a", {"raise": KeyboardInterrupt()}))
    fleet.members[0].process = SimpleNamespace(exit_code=lambda: 0)
    with pytest.raises(KeyboardInterrupt):
        execute(fleet, fleet.members, PLAN, Config(), "bench")
    assert fleet.told[-2:] == ["give up a", "give up b"]
