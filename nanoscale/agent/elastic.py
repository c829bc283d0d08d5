"""PyTorch's elastic agent, with our log files and our way of noticing failures."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from typing import Any, Literal

from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from nanoscale.agent.host import Host
from nanoscale.agent.logs import RankLogs
from nanoscale.agent.network import is_loopback

Sight = Literal["well", "waiting", "over"]
"""of the ranks: nothing is wrong · something is, and the launcher decides · none is left"""

Look = Callable[[Sequence[BaseProcess]], Sight]

_MONITOR_S = 0.05


class WatchingAgent(LocalElasticAgent):
    """An elastic agent that lets us look at the ranks before it does.

    Its own way with a failed rank is SIGTERM to the others and up to 30 s of patience, it does not say which
    failed first, and other hosts' agents are not told. Here the launcher hears of it and decides for all hosts.
    """

    def __init__(self, spec: WorkerSpec, logs: RankLogs, look: Look) -> None:
        super().__init__(spec, logs_specs=logs, start_method="forkserver")
        self._look = look

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self._pcontext is not None
        sight = self._look(self._pcontext._pc.processes)  # type: ignore[attr-defined]
        if sight == "over":
            return RunResult(state=WorkerState.FAILED)
        if sight == "waiting":
            return RunResult(state=WorkerState.HEALTHY)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _exit_barrier(self) -> None:
        """The launcher knows when all hosts have ended; the store lives until then."""


def elastic_agent(
    host: Host,
    entrypoint: Callable[..., Any],
    arguments: tuple[Any, ...],
    logs: RankLogs,
    look: Look,
    meet_s: float,
) -> WatchingAgent:
    """The agent that starts `entrypoint(*arguments)` once for each rank of this host.

    Args:
        meet_s: how long the agents of all hosts wait for each other at first.
    """
    # Nobody sends this signal, so our own handlers stay in place.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGRTMAX"
    rendezvous = StaticTCPRendezvous(
        master_addr=host.master_addr,
        master_port=host.master_port,
        rank=host.node_rank,
        world_size=host.nodes,
        run_id=f"attempt-{host.attempt}",
        timeout=int(meet_s),
    )
    if is_loopback(host.master_addr):
        rendezvous._store = _loopback_store(host, meet_s)
    spec = WorkerSpec(
        role="rank",
        local_world_size=len(host.ranks),
        rdzv_handler=rendezvous,
        entrypoint=entrypoint,
        args=arguments,
        max_restarts=0,
        monitor_interval=_MONITOR_S,
    )
    return WatchingAgent(spec, logs, look)


def _loopback_store(host: Host, timeout_s: float) -> TCPStore:
    """Return the store of a job on one host. By itself TCPStore listens on all interfaces."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # our own reservation is there
    listener.bind((host.master_addr, host.master_port))
    return TCPStore(
        host.master_addr,
        host.master_port,
        host.nodes,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        multi_tenant=True,
        master_listen_fd=listener.detach(),  # the store closes it
    )
