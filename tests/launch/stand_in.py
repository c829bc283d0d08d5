"""`nanoscale train` and its agent with one of the jobs in jobs.py in the place of the training.

python stand_in.py launch JOB RUN_ROOT RANKS GRACE_S
python stand_in.py agent JOB RUN_DIR
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path


def launch(job: str, root: str, ranks: str, grace_s: str) -> int:
    from nanoscale.cli import attempt as cli
    from nanoscale.config.compose import Composed
    from nanoscale.config.rules import Devices
    from nanoscale.config.schema import Config, Launcher, Parallel, Run, Train
    from nanoscale.ports import ReservedPort
    from nanoscale.launch.prepare import Request, new_run
    from nanoscale.launch.signals import Signals

    config = Config(
        run=Run(name="run", root=root),
        parallel=Parallel(dp=int(ranks)),
        launcher=Launcher(device="cpu", devices=int(ranks), threads=1, stop_grace_s=float(grace_s)),
        train=Train(steps=5, micro_batch=1),
    )
    request = Request(Composed(config, {}, None, ()), config, Devices("cpu", 2))
    real = cli.plan_local

    def plan(*arguments):
        made = real(*arguments)
        (host,) = made.hosts
        command = (sys.executable, "-P", __file__, "agent", job, str(request.run.path))
        return replace(made, hosts=(replace(host, command=command),))

    cli.plan_local = plan
    with ReservedPort() as port, Signals() as signals, new_run(request) as run:
        return cli.attempt(run, config, 1, port, signals, as_json=False)


def agent(job: str, run_dir: str) -> int:
    import jobs

    from nanoscale.agent.main import main

    return main(Path(run_dir), getattr(jobs, job))


if __name__ == "__main__":
    from nanoscale.errors import UserError

    try:
        code = {"launch": launch, "agent": agent}[sys.argv[1]](*sys.argv[2:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    sys.exit(code)
