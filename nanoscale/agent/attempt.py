"""One attempt on this host: its ranks from their start until none is left."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from nanoscale import worker
from nanoscale.agent.host import Host, available_gib, oom_kills
from nanoscale.agent.link import Link
from nanoscale.agent.network import interface_towards, is_loopback
from nanoscale.processes.messages import Message
from nanoscale.runs.directory import RunDirectory, read_json, write_json
from nanoscale.runs.failure import Evidence, RankFailure
from nanoscale.worker import Job

_MEET_S = 600.0

if TYPE_CHECKING:
    from nanoscale.agent.elastic import WatchingAgent
    from nanoscale.agent.watch import Watch


def attempt(link: Link, order: Message, job: Job | str) -> object:
    """Run the ranks that the launcher orders, and tell it how they ended.

    Args:
        job: what each rank does, or its name in worker.JOBS.

    Returns:
        what must live until the ranks of all hosts have ended: on the first host, the store they meet at.
    """
    host, run = Host.of(order), _run_directory(link, order)
    killed_before = oom_kills()
    link.is_starting = True
    failures: list[RankFailure] = []
    elastic = None
    try:
        if link.killed_attempt >= host.attempt:
            outcome = "killed"
        else:
            elastic, watch = _agent(link, host, run, order, job)
            outcome = _run_ranks(elastic, watch)
            failures += watch.failures.values()
    except Exception as error:
        traceback.print_exc()
        failures.append(RankFailure.of(error, rank=None, local_rank=None, host=host.name))
        outcome = "failed"
    link.is_starting = False
    evidence = Evidence(oom_kills() - killed_before, available_gib())
    link.send(
        "ended",
        attempt=host.attempt,
        outcome=outcome,
        failures=[asdict(failure) for failure in failures],
        evidence=asdict(evidence),
        result=_result(run),
    )
    return elastic


def be_rank(run_dir: Path, job: Job | str) -> str:
    """What a copy of the fork server does.

    After a failure the process ends at once: what is left to destroy could wait for lost peers.
    """
    try:
        return worker.main(run_dir, job)
    except BaseException as error:
        with suppress(OSError):  # a full disk takes no traceback
            traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(worker.exit_code(error))


def _run_directory(link: Link, order: Message) -> RunDirectory:
    """That of the run; a job that is of no run has one that nobody but this host sees."""
    if order["run"] is not None:
        return RunDirectory(Path(order["run"]))
    own = RunDirectory(link.scratch / f"run-{order['attempt']}")
    own.path.mkdir()
    own.config.write_text(order["config"], encoding="utf-8")
    write_json(own.task, order["task"])
    return own


def _result(run: RunDirectory) -> object:
    """What the job has left for the launcher; None where it left nothing."""
    try:
        return read_json(run.result)
    except (OSError, ValueError):
        return None


def _agent(
    link: Link, host: Host, run: RunDirectory, order: Message, job: Job | str
) -> tuple[WatchingAgent, Watch]:
    from nanoscale.agent.elastic import elastic_agent
    from nanoscale.agent.logs import RankLogs
    from nanoscale.agent.watch import Watch

    logs = RankLogs(link, host, _environment(host), run if order.get("writes_logs") else None)
    watch = Watch(link, host, logs, order["patience_s"])
    meet_s = order.get("meet_s", _MEET_S)
    return elastic_agent(host, be_rank, (run.path, job), logs, watch.look, meet_s), watch


def _run_ranks(elastic: WatchingAgent, watch: Watch) -> str:
    """`completed`, `stopped`, `failed` or `killed`."""
    result = elastic.run()
    watch.close()
    if watch.killed:
        return "killed"
    if result.is_failed():
        return "failed"
    return "stopped" if "stopped" in result.return_values.values() else "completed"


def _environment(host: Host) -> dict[str, str]:
    """What the ranks of this attempt have to know beside what the elastic agent tells them."""
    identity = {"NANOSCALE_HOST": host.name, "NANOSCALE_ATTEMPT": str(host.attempt)}
    chosen = {}
    interface = interface_towards(host.master_addr)
    if interface is not None:
        chosen["GLOO_SOCKET_IFNAME"] = interface  # works where the host's name leads nowhere
        if is_loopback(host.master_addr):
            chosen["NCCL_SOCKET_IFNAME"] = f"={interface}"  # by itself NCCL avoids the loopback
    return identity | {name: way for name, way in chosen.items() if name not in os.environ}
