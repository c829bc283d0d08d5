"""The command `nanoscale train` and its agent with one of the jobs in jobs.py in place of the training.

python stand_in.py launch JOB RUN_ROOT RANKS GRACE_S
python stand_in.py agent JOB
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def launch(job: str, root: str, ranks: str, grace_s: str) -> int:
    from nanoscale.cli.jobs import launching as cli
    from nanoscale.config.resolved import resolved
    from nanoscale.config.rules import Devices
    from nanoscale.config.schema import Config, Launcher, Parallel, Run, Train
    from nanoscale.config.values.provenance import Composed
    from nanoscale.launch.fleet.signals import Signals
    from nanoscale.launch.lifecycle.prepare import new_run
    from nanoscale.launch.request import Request
    from nanoscale.launch.transport.transport import Local

    config = resolved(
        Config(
            run=Run(name="run", root=root),
            parallel=Parallel(dp=int(ranks), virtual_stages=1),
            launcher=Launcher(
                device="cpu",
                devices=int(ranks),
                threads=1,
                stop_grace_s=float(grace_s),
                max_restarts=int(os.environ.get("TEST_RESTARTS", "0")),
                lost_after_s=60.0,
            ),
            train=Train(steps=5, micro_batch=1),
        )
    )
    request = Request(Composed(config, {}, None, ()), config, Devices("cpu", 2))
    command = (sys.executable, "-P", __file__, "agent", job)
    Local.commands = lambda *_: [command]
    with Signals() as signals, cli.ready_fleet(request, signals) as fleet, new_run(request) as lock:
        return cli.follow(lock, request, 1, fleet, signals, sys.stdout).exit_code


def agent(job: str) -> NoReturn:
    import jobs

    from nanoscale.agent.__main__ import end
    from nanoscale.agent.link import Link
    from nanoscale.agent.main import main

    end(main(Link.over_standard_streams(), getattr(jobs, job)))


if __name__ == "__main__":
    from nanoscale.common.errors import UserError
    from nanoscale.runs.lock import TakenOverError

    try:
        code = {"launch": launch, "agent": agent}[sys.argv[1]](*sys.argv[2:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 1 if isinstance(error, TakenOverError) else 2
    sys.exit(code)
