"""The supervision of a run, without hosts; tests/cluster/test_restarts.py restarts real ones."""

from __future__ import annotations

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
from nanoscale.launch.lifecycle.prepare import new_run
from nanoscale.launch.lifecycle.supervisor import Supervisor
from nanoscale.launch.request import check_request
from nanoscale.runs import events
from tests.support.recipes import changed

HOSTS = (Host("n1", 2), Host("n2", 2))
NONE: Any = None


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
        supervisor = Supervisor(lock, request, NONE, NONE, NONE)
        supervisor._adopt(supervisor._request_for(HOSTS[:1]), 2)
        resolved = supervisor.request.config
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
    fleet, view = (
        SimpleNamespace(memory_key=None, members=[Member(it) for it in HOSTS]),
        Mock(running=True),
    )
    with new_run(request) as lock:
        supervisor = Supervisor(lock, request, fleet, SimpleNamespace(first=None), view)
        started: list[list[str]] = []

        def attempt(number: int) -> Outcome:
            started.append([member.name for member in supervisor._members(number)])
            supervisor.newly_leaving = {"n1"} - supervisor.leaving
            supervisor.leaving |= supervisor.newly_leaving
            return Outcome("completed", 0) if number == 2 else Outcome("preempted", 75)

        monkeypatch.setattr(supervisor, "_attempt", attempt)
        monkeypatch.setattr(supervisor, "_reconnect", lambda: None)
        assert supervisor._attempts(1).state == ends and started == attempts
        restart = events.last(lock.run, "restart")
        assert (restart is not None) == (ends == "completed")
        assert restart is None or "n1 will be taken away" in restart["message"]
