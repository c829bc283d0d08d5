"""The outcome of an attempt, and the time of its end: decided by messages, here without any process."""

from __future__ import annotations

import os
import signal
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from nanoscale.common.errors import LostPeerError
from nanoscale.config.rules import Host
from nanoscale.config.schema import Config, Launcher
from nanoscale.launch.fleet.connections import Member
from nanoscale.launch.fleet.signals import Signals
from nanoscale.launch.lifecycle.attempt import Attempt
from nanoscale.launch.lifecycle.command import HostPlan, LaunchPlan
from nanoscale.launch.transport.transport import transport_of
from nanoscale.runs import events, failure
from nanoscale.runs.failure import RankFailure, agent_failure, ended_rank
from nanoscale.runs.job_messages import Ended, Failing, message_of
from nanoscale.runs.position import Position
from tests.support.runs import create_run

HOSTS = (HostPlan("a", 2, (0, 1), ("x",)), HostPlan("b", 2, (2, 3), ("x",)))
PLAN = LaunchPlan(1, 4, HOSTS, "a", 1, {}, ())
INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
LOST = LostPeerError("a peer was lost")
LATE = RuntimeError(
    "[/gloo/gloo/transport/tcp/pair.cc:1] Timed out waiting 1000ms for recv operation to complete"
)


class Fleet:
    """A fleet that records its orders."""

    output = SimpleNamespace(common_log=None)

    def __init__(self, name="ssh"):
        self.told = []
        self.transport = transport_of(Config(launcher=Launcher(name=name)))

    def send(self, members, kind, **content):
        self.told.append((kind, [member.name for member in members], content))


@pytest.fixture
def attempt(tmp_path):
    run = create_run(tmp_path, "x")
    members = [Member(Host(name, 2)) for name in ("a", "b")]
    view = SimpleNamespace(running=True)
    lock = SimpleNamespace(run=run, lost=False)
    return Attempt(lock, PLAN, members, Fleet(), Launcher(), Signals(), view)


def ended(attempt, host, outcome, *failures):
    member = next(member for member in attempt.members if member.name == host)
    attempt.execution._receive(member, message_of(Ended(1, outcome, failures)))


def failing(attempt, host, *failures):
    member = next(member for member in attempt.members if member.name == host)
    attempt.execution._receive(member, message_of(Failing(1, failures)))
    attempt.execution._end_after_failure()


def raised(error, rank, host, time=None):
    found = RankFailure.of(error, rank=rank, local_rank=0, host=host)
    return found if time is None else RankFailure(**(asdict(found) | {"time": time}))


def kills(attempt):
    return [content for kind, _, content in attempt.fleet.told if kind == "kill"]


@pytest.mark.parametrize(
    ("outcomes", "asked", "forced", "state", "exit_code"),
    [
        (("completed", "completed"), None, None, "completed", 0),
        (("completed", "completed"), INT, None, "completed", 0),
        (("stopped", "stopped"), INT, None, "stopped", 130),
        (("stopped", "stopped"), TERM, None, "preempted", 75),
        (("stopped", "completed"), HUP, None, "preempted", 75),
        (("stopped", "stopped"), None, None, "preempted", 75),
        (("killed", "killed"), INT, None, "stopped", 130),  # there was nothing to save yet
        (("killed", "killed"), INT, "by force", "stopped", 130),
        (("killed", "killed"), TERM, "by force", "failed", 1),
        (("killed", "killed"), None, None, "failed", 1),
    ],
)
def test_what_the_ends_of_all_hosts_come_to(attempt, outcomes, asked, forced, state, exit_code):
    for host, outcome in zip(("a", "b"), outcomes, strict=True):
        ended(attempt, host, outcome)
    assert attempt.execution.is_over
    attempt.signals.first, attempt.forced = asked, forced
    outcome = attempt._judge()
    assert (outcome.state, outcome.exit_code) == (state, exit_code)
    assert (outcome.failure is not None) == (state == "failed")
    assert attempt.run.failure.exists() == (state == "failed")
    # The ranks did not record this end themselves.
    assert bool(events.last(attempt.run, "end")) == (forced is not None and state == "stopped")


@pytest.mark.parametrize("number", [TERM, signal.SIGUSR1])
def test_what_runs_stop_ended_is_stopped_and_not_preempted(attempt, number):
    """`nanoscale runs stop` was typed in this attempt, and not in an earlier one."""
    for host in ("a", "b"):
        ended(attempt, host, "stopped")
    attempt.signals.first = number
    events.append(attempt.run, "stop", "")
    events.append(attempt.run, "attempt", "")
    assert attempt._judge().state == "preempted"
    events.append(attempt.run, "stop", "")
    outcome = attempt._judge()
    assert (outcome.state, outcome.exit_code) == ("stopped", 130)


@pytest.mark.parametrize("name", ["local", "ssh", "pdsh", "slurm"])
def test_only_the_ranks_of_this_machine_write_their_logs(attempt, name):
    attempt = replace(attempt, fleet=Fleet(name))
    attempt.execution._launch()
    orders = [content for kind, _, content in attempt.fleet.told if kind == "launch"]
    assert [order["writes_logs"] for order in orders] == [name == "local"] * 2


def test_output_is_written_unless_the_rank_has_written_it(attempt):
    wrote = []
    attempt.view.wrote = lambda *rank: wrote.append(rank)
    attempt.run.attempt_logs(1).mkdir()
    output = {"kind": "output", "rank": 2, "stream": "out"}
    for message in (output, {**output, "carried": b"a"}, {**output, "carried": b"b"}, output):
        attempt.execution._receive(attempt.members[1], message)
    assert attempt.run.log(1, "b", 2, "out").read_bytes() == b"ab"
    attempt.execution._receive(attempt.members[1], {**output, "stream": "err", "carried": b"c"})
    assert attempt.run.log(1, "b", 2, "err").read_bytes() == b"c"
    assert wrote == [("b", 2)] * 4


def test_a_cause_ends_the_job_at_once_and_is_the_one_that_is_told(attempt):
    failing(attempt, "b", raised(LOST, 3, "b", 1.0))
    assert kills(attempt) == []
    failing(attempt, "a", raised(ValueError("wave"), 1, "a", 2.0))
    assert kills(attempt) == [{"attempt": 1, "stacks": False}]
    ended(attempt, "a", "killed", raised(ValueError("wave"), 1, "a", 2.0))
    ended(attempt, "b", "killed", raised(LOST, 3, "b", 1.0))
    cause = attempt._judge().failure
    assert (cause.rank, cause.host, cause.exception) == (1, "a", "ValueError")
    assert cause.also_failed == (3,)
    assert failure.read(attempt.run) == cause


def test_consequences_alone_end_it_after_a_grace_with_stacks(attempt, monkeypatch):
    failing(attempt, "b", raised(LOST, 3, "b"))
    attempt.execution.failing_since -= 10
    attempt.execution._end_after_failure()
    assert kills(attempt) == [{"attempt": 1, "stacks": True}]


def test_ranks_that_did_not_arrive_are_named(attempt):
    failing(attempt, "a", raised(LATE, 0, "a"), raised(LATE, 1, "a"))
    failing(attempt, "b", raised(LATE, 3, "b"))
    attempt.execution.outcomes = {"a": "killed", "b": "killed"}
    cause = attempt._judge().failure
    assert (cause.rank, cause.host) == (2, "b")
    assert "rank 2 did not arrive" in cause.diagnosis
    assert cause.log == "logs/attempt-1/b.rank-2.err"


@pytest.mark.parametrize(
    ("sizes", "aborted", "rank"),
    [
        ({0: 12, 1: 24, 3: 12}, [2], 1),  # rank 2 aborts because of what rank 1 sends
        ({0: 12, 2: 12, 3: 12}, [1], 1),  # all others agree
        ({0: 12, 1: 12, 2: 24, 3: 12}, [], 2),
    ],
)
def test_the_rank_with_another_collective_is_named_and_not_its_victim(
    attempt, sizes, aborted, rank
):
    for of, size in sizes.items():
        at = asdict(Position(3, {}, True, "x.py:1 in f", call=f"all_gather of {size} B"))
        lost = replace(raised(LOST, of, "ab"[of // 2]), position=at)
        failing(attempt, lost.host, lost)
    for of in aborted:
        host = "ab"[of // 2]
        message = "24 vs 12. Is there a distributed collective mismatch in your code?"
        log = attempt.run.path / "err"
        log.write_text(f"what(): {message}\nFatal Python error: Aborted\n\nThread 1:\n")
        failing(attempt, host, ended_rank(of, 0, host, -6, log))
    attempt.execution.outcomes = {"a": "killed", "b": "killed"}
    cause = attempt._judge().failure
    assert (cause.rank, cause.also_failed) == (rank, tuple({0, 1, 2, 3} - {rank}))
    assert "different collectives" in cause.diagnosis and "all_gather of 12 B" in cause.diagnosis


def test_a_host_that_misses_the_rendezvous_is_named_with_its_own_limit(attempt):
    late = [
        RankFailure.of(LATE, rank=rank, local_rank=0, host="a", kind="rendezvous")
        for rank in (0, 1)
    ]
    failing(attempt, "a", *late)
    attempt.execution.outcomes = {"a": "killed", "b": "killed"}
    cause = attempt._judge().failure
    assert (cause.rank, cause.host) == (None, "b")
    assert cause.diagnosis == "b did not arrive at the rendezvous; the others waited for 600 s"


def test_the_rank_that_keeps_a_job_from_stopping_is_named_with_its_stack(attempt):
    waiting = Position(4, {}, True, "train/loop.py:1 in log")
    hung = Position(
        4, {"g": {"axis": "tp", "ranks": [2, 3], "issued": 1}}, False, "x.py:2 in f", stack="s"
    )
    attempt.execution.positions = {0: waiting, 1: waiting, 2: hung, 3: waiting}
    attempt.signals.first, attempt.forced = TERM, "it did not stop within 120 s"
    attempt.execution.outcomes = {"a": "killed", "b": "killed"}
    cause = attempt._judge().failure
    assert (cause.rank, cause.traceback) == (2, "s")
    assert "it did not stop within 120 s. Rank 2: in step 4, at x.py:2 in f" in cause.diagnosis


def test_a_lost_host_is_a_cause(attempt):
    attempt.members[1].lost = agent_failure("b", "the host stopped responding")
    failing(attempt, "a", raised(LOST, 0, "a"))
    attempt.execution._note_lost()
    attempt.execution._end_after_failure()
    assert kills(attempt)
    ended(attempt, "a", "killed", raised(LOST, 0, "a"))
    assert attempt.execution.is_over
    cause = attempt._judge().failure
    assert (cause.host, cause.rank, cause.diagnosis) == ("b", None, "the host stopped responding")


def test_what_dies_by_our_own_hand_is_no_failure(attempt):
    failing(attempt, "a", raised(ValueError("x"), 0, "a"))
    killed = RankFailure("ended", 3, 1, "b", 1.0, exit_code=-9)
    ended(attempt, "b", "killed", killed)
    assert [found.rank for found in attempt.execution.failures.values()] == [0]


def test_a_rank_that_loses_one_that_was_killed_has_not_failed(attempt):
    """Ctrl-C before the first step reaches the hosts one after another."""
    attempt.signals.first = INT
    attempt.execution.kill()
    ended(attempt, "a", "killed")
    ended(attempt, "b", "killed", raised(LOST, 2, "b"))
    assert attempt._judge().exit_code == 130


def test_times_of_hosts_are_compared_on_the_launchers_clock(attempt):
    attempt.members[0].facts = {"asked_at": 100.0, "time": 1100.5, "heard_at": 101.0}
    failing(attempt, "a", raised(ValueError("second"), 0, "a", 1200.0))
    failing(attempt, "b", raised(ValueError("first"), 2, "b", 150.0))
    assert attempt._judge().failure.message == "first"


def test_a_host_that_does_not_end_its_ranks_is_given_up(attempt):
    given_up = []
    attempt.fleet.give_up = lambda member: given_up.append(member.name)
    attempt.execution.kill()
    ended(attempt, "a", "killed")
    attempt.execution.killing_since -= 100
    attempt.execution._give_up_stragglers()
    assert given_up == ["b"] and attempt.execution.is_over


def test_signals_are_remembered_and_handlers_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (signals.first, signals.kill_requested) == (signal.SIGTERM, False)
        os.kill(os.getpid(), signal.SIGINT)
        assert (signals.first, signals.kill_requested) == (signal.SIGTERM, True)
    assert signal.getsignal(signal.SIGTERM) == before


def test_ctrl_z_does_not_suspend_and_is_answered(attempt):
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGTSTP)
        assert signals.first is None and signals.suspended
        attempt.signals = signals
        attempt._handle_signals()
        assert not signals.suspended and attempt.execution.killing_since is None
    assert "Ctrl-Z" in events.read(attempt.run)[-1]["message"]


def test_a_signal_just_after_the_first_step_stops_and_does_not_kill(attempt):
    """The display learns of the training from the events, which it reads ten times a second."""
    attempt.view.running = False
    attempt.view.poll = lambda: setattr(attempt.view, "running", True)
    attempt.signals.first = INT
    attempt._handle_signals()
    assert [kind for kind, _, _ in attempt.fleet.told] == ["stop"]


def test_ranks_save_and_stop_also_if_nothing_can_be_recorded(attempt):
    attempt.run.events.mkdir()  # as on a full disk
    attempt.run.status.mkdir()
    attempt.view.poll = lambda: None
    attempt.signals.first, attempt.signals.suspended = TERM, True
    attempt._on_poll()
    assert [kind for kind, _, _ in attempt.fleet.told] == ["stop"]
    for host in ("a", "b"):
        ended(attempt, host, "stopped")
    assert attempt._judge().state == "preempted"


def test_what_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.first is None
    finally:
        signal.signal(signal.SIGHUP, before)


def notice(attempt, **about):
    message = {"kind": "notice", "source": "aws", **about}
    attempt.execution._receive(attempt.members[1], message)
    attempt.view.poll = lambda: None
    attempt._handle_signals()


def test_a_notice_stops_the_attempt_which_is_preempted(attempt):
    notice(attempt, problem="URLError: no route to host")
    assert not attempt.fleet.told and "no route" in events.last(attempt.run, "note")["message"]
    for _ in range(2):  # the agent repeats it
        notice(attempt, seconds=120.0)
    assert [kind for kind, _, _ in attempt.fleet.told] == ["stop"]
    (recorded,) = [it for it in events.read(attempt.run) if it["kind"] == "notice"]
    assert (recorded["host"], recorded["source"], recorded["seconds"]) == ("b", "aws", 120.0)
    for host in ("a", "b"):
        ended(attempt, host, "stopped")
    assert (attempt._judge().state, attempt._judge().exit_code) == ("preempted", 75)


@pytest.mark.parametrize(("bug", "state"), [(False, "preempted"), (True, "failed")])
def test_a_host_that_is_taken_away_before_the_save_ends_is_no_failure(attempt, bug, state):
    notice(attempt, seconds=0.0)
    attempt.members[1].lost = agent_failure("b", "no heartbeat")
    attempt.execution._note_lost()
    error = ValueError("a bug") if bug else LOST
    ended(attempt, "a", "failed", raised(error, 0, "a"))
    assert attempt._judge().state == state


def test_a_notice_before_the_first_step_leaves_nothing_to_save(attempt):
    attempt.view.running = False
    notice(attempt, seconds=None)
    assert kills(attempt)
    for host in ("a", "b"):
        ended(attempt, host, "killed")
    assert attempt._judge().state == "preempted"
