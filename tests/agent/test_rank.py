"""Ranks of a host: their start, rendezvous with other hosts and end, without a launcher."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from functools import partial

import pytest
import torch
import torch.distributed as dist

from nanoscale.agent.attempt import attempt
from nanoscale.agent.link import Link
from nanoscale.agent.rank import record_fork_server_failure
from nanoscale.config.schema import Launcher, Run
from nanoscale.processes.messages import Unpacker
from nanoscale.processes.network import ReservedPort
from nanoscale.runs.job_messages import Ended, Failing, HostRanks, LaunchOrder
from tests.support import ranks  # noqa: F401 - whose fork server starts these ranks as well
from tests.support.jobs import make_run
from tests.support.recipes import complete

LIMIT_S = 60.0


def sum_ranks(context, outcome="completed"):
    dist.init_process_group("gloo")
    total = torch.tensor(context.rank + 1)
    dist.all_reduce(total)
    (context.run.path / f"sum-{context.rank}").write_text(str(int(total)))
    dist.destroy_process_group()
    return outcome


def vanish(context):
    """End rank 1 like a library that calls exit(0)."""
    if context.rank == 1:
        os._exit(0)
    return "completed"


@pytest.fixture
def run(tmp_path):
    launcher = Launcher(device="cpu", threads=1)
    return make_run(complete(run=Run(root=str(tmp_path)), launcher=launcher))


class Hosts:
    """Agents in threads of this process, each the agent of a host with two ranks."""

    def __init__(self, run, nodes, meet_s=LIMIT_S):
        self.nodes = nodes
        self.order_for = partial(
            LaunchOrder, run=str(run.path), lost_after_s=LIMIT_S, meet_s=meet_s
        )
        self.port = ReservedPort()
        self.stores = []
        self.links = []

    def attempt(self, node, job):
        """Run the ranks of a host; return its last message."""
        reader, writer = os.pipe()
        orders = os.open(os.devnull, os.O_RDONLY)
        link = Link(orders, writer)
        self.links.append(link)
        host = HostRanks(
            name=f"n{node}",
            node_rank=node,
            nodes=self.nodes,
            ranks=(2 * node, 2 * node + 1),
            world_size=2 * self.nodes,
            master_addr="127.0.0.1",
            master_port=self.port.number,
            attempt=1,
        )
        order = self.order_for(host)
        ended: list[Ended] = []
        killer = threading.Thread(target=_kill_after_failure, args=(link, reader, ended))
        killer.start()
        self.stores.append(attempt(link, order, job))
        killer.join(LIMIT_S)
        return ended[0]

    def close(self):
        self.port.close()
        for store in filter(None, self.stores):
            store.kill()
            store.join()
        for link in self.links:  # which removes the files of all agents of this process
            link.close()


def _kill_after_failure(link, reader, ended):
    """React to failures like the launcher, until the attempt has ended."""
    unpacker = Unpacker()
    while not ended:
        for message in unpacker.feed(os.read(reader, 1 << 16)):
            if message["kind"] == Failing.kind:
                link.killed_attempt = 1
            if message["kind"] == Ended.kind:
                ended.append(Ended.read(message))


@pytest.fixture
def hosts(run, request):
    hosts = Hosts(run, *getattr(request, "param", (1,)))
    yield hosts
    hosts.close()


def test_the_agent_needs_no_torch():
    program = (
        "import pkgutil, sys, nanoscale.agent as room\n"
        "for module in pkgutil.iter_modules(room.__path__, 'nanoscale.agent.'):\n"
        "    'fork_server' in module.name or 'main__' in module.name or __import__(module.name)\n"
        "print(*{'torch', 'numpy', 'deepspeed'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


@pytest.mark.parametrize("outcome", ["completed", "stopped"])
def test_ranks_meet_and_return(hosts, run, outcome):
    ended = hosts.attempt(0, partial(sum_ranks, outcome=outcome))
    assert (ended.outcome, ended.failures) == (outcome, ())
    assert [(run.path / f"sum-{rank}").read_text() for rank in (0, 1)] == ["3", "3"]


def test_a_rank_that_exits_with_0_before_its_job_returns_has_failed(hosts):
    ended = hosts.attempt(0, vanish)
    assert ended.outcome == "killed"
    ((rank, code),) = [(failure.rank, failure.exit_code) for failure in ended.failures]
    assert (rank, code) == (1, 0)


def test_an_import_that_ends_the_fork_server_is_the_cause(hosts, monkeypatch):
    def start_store(_host):
        monkeypatch.setenv("NANOSCALE_SCRATCH", str(hosts.links[-1].scratch))
        record_fork_server_failure(RuntimeError("libtorch"))
        raise EOFError

    monkeypatch.setattr("nanoscale.agent.attempt.start_store", start_store)
    (failure,) = hosts.attempt(0, sum_ranks).failures
    assert (failure.kind, failure.host, failure.message) == ("agent", "n0", "libtorch")


@pytest.mark.parametrize("hosts", [(2,)], indirect=True)
def test_ranks_of_two_hosts_meet(hosts, run):
    results = {}
    first = threading.Thread(target=lambda: results.update({0: hosts.attempt(0, sum_ranks)}))
    first.start()
    results[1] = hosts.attempt(1, sum_ranks)
    first.join(LIMIT_S)
    assert [results[node].outcome for node in (0, 1)] == ["completed"] * 2
    assert {(run.path / f"sum-{rank}").read_text() for rank in range(4)} == {"10"}


@pytest.mark.parametrize("hosts", [(2, 0.2)], indirect=True)
def test_a_host_that_never_comes_is_missed_by_the_agent_and_not_by_a_rank(hosts):
    ended = hosts.attempt(0, sum_ranks)
    assert ended.outcome == "killed"
    assert {(failure.rank, failure.host) for failure in ended.failures} == {(None, "n0")}
    assert "timeout" in ended.failures[0].message.lower()
