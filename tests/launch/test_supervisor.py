"""The supervision of a run, without hosts; tests/cluster/test_restarts.py restarts real ones."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from nanoscale.common.devices import Devices
from nanoscale.config.composing.frozen import load
from nanoscale.config.machines import Host
from nanoscale.config.rules import check
from nanoscale.launch.fleet.connections import Member
from nanoscale.launch.lifecycle.attempt import Outcome
from nanoscale.launch.lifecycle.host_choice import HostChoice
from nanoscale.launch.lifecycle.prepare import new_run
from nanoscale.launch.lifecycle.supervisor import Supervisor
from nanoscale.launch.request import check_request
from nanoscale.runs import events
from nanoscale.runs.failure import agent_failure, digest
from tests.support.recipes import changed

HOSTS = (Host("n1", 2), Host("n2", 2))
LOST = agent_failure("n1", "it was lost")


@contextmanager
def elastic_supervisor(count: int, *overrides: str) -> Iterator[Supervisor]:
    """Supervise a job for two or three of this many hosts, without agents."""
    Path("hosts").write_text("".join(f"n{number} slots=2\n" for number in range(1, count + 1)))
    composed = changed(
        "run.name=x", "launcher=ssh", "launcher.hostfile=hosts", "launcher.nodes=2:3",
        "launcher.device=cpu", "train.global_batch=24", "train.micro_batch=auto", *overrides,
    )  # fmt: skip
    request = check_request(composed, devices=Devices("cpu", 2))
    fleet = Mock(memory_key=None, members=[Member(it) for it in request.hosts])
    with new_run(request) as lock:
        hosts = HostChoice(lock.run, fleet, request)
        yield Supervisor(lock, hosts, SimpleNamespace(first=None), Mock(running=True))


@pytest.mark.slow
def test_an_elastic_job_fits_its_micro_batch_to_the_remaining_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    composed = changed(
        "run.name=x", "cluster=h100-sxm", "launcher=ssh", "launcher.hostfile=hosts", "launcher.nodes=1:2",
        "model=llama-1b", "train.seq_len=8k", "train.global_batch=64", "train.micro_batch=auto",
        "precision=bf16",
    )  # fmt: skip
    cpu = Devices("cpu", 2)
    request = check_request(composed, devices=cpu, hosts=HOSTS)
    model = replace(request.config.model, init_from="/weights")
    request = replace(request, config=replace(request.config, model=model))
    with new_run(request) as lock:
        fleet: Any = Mock(members=[Member(HOSTS[0])])
        hosts = HostChoice(lock.run, fleet, request)
        hosts.choose(2)
        resolved = hosts.request.config
        assert load(lock.run.config) == resolved and resolved.parallel.dp == 2
    alone = check_request(composed, devices=cpu, hosts=HOSTS[:1]).config.train.micro_batch
    assert resolved.train.micro_batch == alone < check(composed, cpu, HOSTS[:1]).train.micro_batch
    assert resolved.model.init_from == "/weights"


@pytest.mark.parametrize(
    ("nodes", "attempts", "ends"),
    [("1:2", [["n1", "n2"], ["n2"]], "completed"), ("2:2", [["n1", "n2"]], "preempted")],
)
def test_a_job_continues_without_a_noticed_host_if_it_is_elastic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: str, attempts: list[Any], ends: str
) -> None:
    """`launcher.max_restarts` is 0: a notice does not count as a failure."""
    monkeypatch.chdir(tmp_path)
    composed = changed(
        "run.name=x", "launcher=ssh", "launcher.hostfile=hosts", "launcher.notice=aws",
        f"launcher.nodes={nodes}", "train.global_batch=8", "train.micro_batch=auto",
    )  # fmt: skip
    request = check_request(composed, devices=Devices("cpu", 2), hosts=HOSTS)
    fleet: Any = SimpleNamespace(memory_key=None, members=[Member(it) for it in HOSTS])
    view = Mock(running=True)
    with new_run(request) as lock:
        supervisor = Supervisor(
            lock, HostChoice(lock.run, fleet, request), SimpleNamespace(first=None), view
        )
        started: list[list[str]] = []

        def attempt(number: int) -> Outcome:
            started.append([member.name for member in supervisor.hosts.choose(number)])
            supervisor.newly_leaving = {"n1"} - supervisor.hosts.noticed
            supervisor.hosts.noticed |= supervisor.newly_leaving
            return Outcome("completed", 0) if number == 2 else Outcome("preempted", 75)

        monkeypatch.setattr(supervisor, "_attempt", attempt)
        monkeypatch.setattr(supervisor, "_reconnect", lambda: None)
        assert supervisor._attempts(1).state == ends and started == attempts
        restart = events.last(lock.run, "restart")
        assert (restart is not None) == (ends == "completed")
        assert restart is None or "n1 will be taken away" in restart["message"]


def test_a_fixed_job_continues_from_memory_once_a_lost_host_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """n1 is away for more attempts than may continue from one state; no rank is started in them."""
    monkeypatch.chdir(tmp_path)
    hosts = (*HOSTS, Host("n3", 2))
    composed = changed(
        "run.name=x", "launcher=ssh", "launcher.hostfile=hosts", "launcher.max_restarts=9",
        "checkpoint.memory_every=1", "launcher.device=cpu", "train.global_batch=24",
    )  # fmt: skip
    request = check_request(composed, devices=Devices("cpu", 2), hosts=hosts)
    kept = [
        {"attempt": 1, "count": 4, "step": 5, "node": 1, "nodes": 3, "ranks": 1, "covers": covers}
        for covers in ([0, 1], [2])
    ]
    members = [
        Member(it, facts={"machine": it.address, "port": 1, "memory": about})
        for it, files in zip(hosts, [[], kept[:1], kept[1:]], strict=True)
        for about in [{"port": 7, "kept": files, "damaged": [], "switch": ""}]
    ]
    facts, members[0].facts, members[0].lost = members[0].facts, None, LOST
    fleet: Any = Mock(memory_key="00", members=members)
    fleet.transport.address_of = lambda host: host.address
    fleet.output.write_to = lambda run, number: run.attempt_logs(number).mkdir(parents=True)
    orders: list[Any] = []

    def attempt(*arguments: Any) -> Any:
        orders.append(arguments[7])
        outcome = Outcome("failed", 1) if members[0].lost else Outcome("completed", 0)
        return Mock(execute=lambda: outcome, noticed=set())

    def reconnect() -> None:
        if len(orders) == 5:
            members[0].facts, members[0].lost = facts, None

    monkeypatch.setattr("nanoscale.launch.lifecycle.supervisor.Attempt", attempt)
    with new_run(request) as lock:
        supervisor = Supervisor(
            lock,
            HostChoice(lock.run, fleet, request),
            SimpleNamespace(first=None),
            Mock(running=True),
        )
        monkeypatch.setattr(supervisor, "_reconnect", reconnect)
        assert supervisor._attempts(1).state == "completed"
    assert orders[:5] == [None] * 5 and len(orders) == 6
    assert orders[5]["source"]["step"] == 5
    assert [it["host"] for it in orders[5]["peers"]] == ["n2", "n3", "n1"]


def test_a_host_that_failed_twice_is_left_out_while_enough_others_remain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """n1 has two of three failures within an hour, and n3 a faulty GPU: two must remain, so n3 is used."""
    monkeypatch.chdir(tmp_path)
    with elastic_supervisor(4) as supervisor:

        def names() -> list[str]:
            return [it.name for it in supervisor.hosts.choose(1)]

        assert names() == ["n1", "n2", "n3"] and not supervisor.fleet.members[3].is_present

        def fail(host: str, at: float, exception: str = "", diagnosis: str = "") -> None:
            about = {"exception": exception, "diagnosis": diagnosis}
            cause: Any = SimpleNamespace(host=host, time=at, **about)
            supervisor.hosts.leave_out_faulty(cause)

        for at in (0, 1):
            fail("n2", at, "nanoscale.train.stability.NonFiniteError")
            fail("n2", at, diagnosis="the launcher was suspended for 10 s, upon which …")
        for host, at in [("n1", 0), ("n1", 4000), ("n2", 4001), ("n3", 4002), ("n1", 4003)]:
            fail(host, at)
            assert names() == ["n1", "n2", "n3"]
        fail("n1", 4004)
        assert names() == ["n2", "n3"]
        events.append(supervisor.run, "health", "the GPU of rank 4 on n3 reports Xid 79", host="n3")
        supervisor.hosts.leave_out_faulty(None)
        assert names() == ["n2", "n3"]
        left_out = events.last(supervisor.run, "left out")
        assert left_out is not None
        assert left_out["message"] == (
            "n1 is left out of later attempts: 2 of the last 3 failures began there. To use it again, stop the "
            f"run and type nanoscale resume {supervisor.run.reference}"
        )
        supervisor.fleet.members[2].lost = LOST
        assert names() == ["n1", "n2"]


def test_an_attempt_uses_no_host_that_is_excluded_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """n4 is excluded before the launch, and allowed later. A file that is wrong changes nothing."""
    monkeypatch.chdir(tmp_path)
    file = Path("bad")
    file.write_text("n4")
    with elastic_supervisor(4, "launcher.exclude_file=bad") as supervisor:

        def names() -> list[str]:
            return [it.name for it in supervisor.hosts.choose(1)]

        assert names() == ["n1", "n2", "n3"]
        assert not supervisor.hosts.is_outdone() and supervisor.hosts.unusable == {"n4"}
        supervisor.fleet.members[3].lost = None
        for text, expected in (
            ("n1", ["n2", "n3", "n4"]),
            ("n1, n2", ["n2", "n3", "n4"]),
            ("", ["n1", "n2", "n3"]),
        ):
            file.write_text(text)
            assert names() == expected
        assert events.last(supervisor.run, "note")["message"].startswith("the excluded hosts stay")  # type: ignore[index]


def test_a_fixed_job_does_not_restart_on_an_excluded_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad").write_text("")
    composed = changed(
        "run.name=x", "launcher=ssh", "launcher.hostfile=hosts", "launcher.exclude_file=bad",
        "launcher.max_restarts=9", "launcher.device=cpu", "train.global_batch=8",
    )  # fmt: skip
    request = check_request(composed, devices=Devices("cpu", 2), hosts=HOSTS)
    fleet: Any = SimpleNamespace(memory_key=None, members=[Member(it) for it in HOSTS])
    with new_run(request) as lock:
        choice = HostChoice(lock.run, fleet, request)
        supervisor = Supervisor(lock, choice, SimpleNamespace(first=None), Mock(running=True))
        attempts: list[int] = []

        def attempt(number: int) -> Outcome:
            choice.choose(number)
            attempts.append(number)
            Path("bad").write_text("n2" if number == 2 else "n7")
            return Outcome("failed", 1)

        monkeypatch.setattr(supervisor, "_attempt", attempt)
        monkeypatch.setattr(supervisor, "_reconnect", lambda: None)
        assert supervisor._attempts(1).exit_code == 1 and attempts == [1, 2]
        left_out = events.last(lock.run, "left out")
        assert left_out is not None and "names n2: the job does not restart" in left_out["message"]


def test_a_run_waits_for_a_host_if_too_few_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    polls = 0

    def poll(_: float) -> None:
        nonlocal polls
        polls += 1
        second.lost = LOST if polls < 2 else None

    with elastic_supervisor(3) as supervisor:
        first, second, _ = supervisor.fleet.members
        first.lost = second.lost = LOST
        monkeypatch.setattr(supervisor.fleet, "poll", poll)
        supervisor._wait_for_hosts()
        assert [it.name for it in supervisor.hosts.choose(1)] == ["n2", "n3"] and polls == 2
        waiting = [it for it in events.read(supervisor.run) if it["kind"] == "waiting"]
        assert len(waiting) == 1 and "Ctrl-C ends the run" in waiting[0]["message"]


def test_hosts_join_beside_an_attempt_unless_it_uses_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """n1 is lost just now: the attempt must see it. n3 is left out, and connected for the next loss."""
    monkeypatch.chdir(tmp_path)
    with elastic_supervisor(3) as supervisor:
        first, second, third = supervisor.fleet.members
        supervisor.hosts.members = [first, second]
        first.lost = third.lost = LOST
        supervisor.hosts.left_out = {"n3"}
        assert not supervisor.hosts.is_outdone()
        assert supervisor.fleet.join.call_args.args == ([third],)  # type: ignore[attr-defined]


def test_a_spare_host_is_connected_once_a_host_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could replace the slow one: MIN hosts are needed, and all MAX are used."""
    monkeypatch.chdir(tmp_path)
    with elastic_supervisor(4, "launcher.exclude_stragglers=1.3") as supervisor:
        supervisor.hosts.choose(1)
        join: Any = supervisor.fleet.join
        for ratio, names in [(1.2, []), (1.4, ["n4"])]:
            events.append(supervisor.run, "straggler", "n2 arrives late", host="n2", ratio=ratio)
            supervisor.hosts.is_outdone()
            assert [it.name for call in join.call_args_list for it in call.args[0]] == names


def test_a_signal_during_a_change_of_hosts_keeps_the_state_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes when the ranks have stopped without a save on disk, before the next attempt."""
    monkeypatch.chdir(tmp_path)
    with elastic_supervisor(3) as supervisor:
        supervisor.fleet.memory_key = b"key"
        supervisor.hosts.change = "n2 is slow: continuing", "+7% planned"

        def prepare(*_: object) -> None:
            supervisor.signals.first = signal.SIGINT

        monkeypatch.setattr(supervisor, "_attempt", lambda _: Outcome("preempted", 75))
        monkeypatch.setattr("nanoscale.launch.lifecycle.supervisor.prepare", prepare)
        outcome = supervisor.supervise(1)
        assert (outcome.state, outcome.exit_code) == ("stopped", 130)
        assert supervisor.fleet.rescue == []


def test_a_signal_while_a_lost_host_is_reached_keeps_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are asked to keep their copies of it before the wait, and at the end."""
    monkeypatch.chdir(tmp_path)
    with elastic_supervisor(3) as supervisor:
        first, *others = supervisor.fleet.members
        supervisor.hosts.members = [first, *others]
        for member in others:  # n1 is reached just now, and has yet to answer
            member.facts = {}
        supervisor.fleet.memory_key = b"key"
        failed = Outcome("failed", 1, digest(supervisor.run, 1, [LOST], {}))

        def prepare(fleet: Any, *_: object) -> None:
            assert fleet.lost_nodes == [0]
            supervisor.signals.first = signal.SIGINT

        monkeypatch.setattr(supervisor, "_attempts", lambda _: supervisor._reconnect() or failed)
        monkeypatch.setattr("nanoscale.launch.lifecycle.supervisor.prepare", prepare)
        assert supervisor.supervise(1) is failed
        assert supervisor.fleet.rescue == [0]


def test_a_slow_host_is_left_out_if_the_plan_gains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three hosts need 1.5 times as long for a step."""
    monkeypatch.chdir(tmp_path)

    def predicted(config: Any) -> Any:
        return SimpleNamespace(time=SimpleNamespace(seconds=6 / config.parallel.dp), fits=True)

    monkeypatch.setattr("nanoscale.launch.lifecycle.host_choice.predict", predicted)
    for least, ratio, is_left_out in [(1.3, 1.4, False), (1.7, 1.6, False), (1.3, 1.6, True)]:
        overrides = f"launcher.exclude_stragglers={least}", f"run.name={least}-{ratio}"
        with elastic_supervisor(3, *overrides) as supervisor:
            supervisor.hosts.choose(1)
            assert not supervisor.hosts.is_outdone()
            events.append(supervisor.run, "straggler", "n2 arrives late", host="n2", ratio=ratio)
            assert supervisor.hosts.is_outdone() == is_left_out
            remaining = [it.name for it in supervisor.hosts.choose(2)]
            assert remaining == (["n1", "n3"] if is_left_out else ["n1", "n2", "n3"])
            assert supervisor.hosts.change == (
                ("n2 is slow: continuing", "+7% planned") if is_left_out else None
            )
            assert (events.last(supervisor.run, "left out") is not None) == is_left_out
