"""PyTorch's elastic agent, with our log files and our way of noticing failures."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from nanoscale.agent.host import Host
from nanoscale.runs.directory import RunDirectory

Look = Callable[[Sequence[BaseProcess]], bool]
"""Looks at the ranks' processes; False: none is left, and there is nothing more to look at."""

_MONITOR_S = 0.05
_RENDEZVOUS_TIMEOUT_S = 600


class RankLogs(LogsSpecs):
    """A file for each rank and stream, named by host and global rank."""

    def __init__(self, run: RunDirectory, host: Host) -> None:
        super().__init__()
        self._run = run
        self._host = host

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        self._run.attempt_logs(self._host.attempt).mkdir(parents=True, exist_ok=True)
        for environment in envs.values():
            environment["TORCHELASTIC_ERROR_FILE"] = ""  # ranks write their own
        return LogsDest(
            stdouts={local: self._path(env, "out") for local, env in envs.items()},
            stderrs={local: self._path(env, "err") for local, env in envs.items()},
            error_files=dict.fromkeys(envs, ""),
        )

    def _path(self, environment: dict[str, str], stream: Any) -> str:
        rank = int(environment["RANK"])
        return str(self._run.log(self._host.attempt, self._host.name, rank, stream))

    @property
    def root_log_dir(self) -> str:
        return str(self._run.logs)


class WatchingAgent(LocalElasticAgent):
    """An elastic agent that lets us look at the ranks before it does.

    Its own way with a failed rank is SIGTERM to the others and up to 30 s of patience, and it does
    not say which failed first.
    """

    def __init__(self, spec: WorkerSpec, logs: RankLogs, look: Look) -> None:
        super().__init__(spec, logs_specs=logs, start_method="forkserver")
        self._look = look

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self._pcontext is not None
        if not self._look(self._pcontext._pc.processes):  # type: ignore[attr-defined]
            return RunResult(state=WorkerState.FAILED)
        result: RunResult = super()._monitor_workers(worker_group)
        return result


def elastic_agent(
    run: RunDirectory,
    host: Host,
    entrypoint: Callable[..., Any],
    arguments: tuple[Any, ...],
    look: Look,
) -> WatchingAgent:
    """The agent that starts `entrypoint(*arguments)` once for each rank of this host."""
    # Nobody sends this signal, so our own handlers stay in place.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGRTMAX"
    rendezvous = StaticTCPRendezvous(
        master_addr=host.master_addr,
        master_port=host.master_port,
        rank=host.node_rank,
        world_size=host.nodes,
        run_id=f"{run.name}-{host.attempt}",
        timeout=_RENDEZVOUS_TIMEOUT_S,
    )
    spec = WorkerSpec(
        role="rank",
        local_world_size=len(host.ranks),
        rdzv_handler=rendezvous,
        entrypoint=entrypoint,
        args=arguments,
        max_restarts=0,
        monitor_interval=_MONITOR_S,
    )
    return WatchingAgent(spec, RankLogs(run, host), look)
