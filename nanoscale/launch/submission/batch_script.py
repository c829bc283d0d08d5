"""The batch script: options for the batch system, and a launcher that receives its signals."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from nanoscale.config.resolved import ResolvedConfig
from nanoscale.launch.batch.slurm import SlurmSystem
from nanoscale.launch.batch.system import BatchSystem
from nanoscale.launch.batch.systems import SYSTEMS
from nanoscale.launch.transport.transport import source_path
from nanoscale.runs.directory import RunDirectory

FOLLOW = """\
launcher=$!
if [ "$heard" ]; then
    sleep 1 # the launcher cannot receive signals before it has started
    kill -s "$heard" "$launcher"
fi
while :; do
    interrupted=
    code=0
    wait "$launcher" || code=$?
    [ "$interrupted" ] || break
done
# A launcher that has not installed its handlers yet is killed by the signal. If bash itself receives
# the signal at that moment, it has no exit code of its child.
case "$heard$code" in
USR1138 | TERM143 | USR1-1 | TERM-1) code=75 ;;
esac
"""

_CHOOSE = """\
mapfile -t runs < {runs}
run=${{runs[$SLURM_ARRAY_TASK_ID]}}
"""


def batch_script(config: ResolvedConfig, run: RunDirectory, changes: Sequence[str] = ()) -> str:
    """Return the script of one run.

    Args:
        config: checked, with the number of ranks on a node in `launcher.devices`.
        changes: overrides of a run that is resumed.

    Raises:
        UserError: a path cannot be written into it.
    """
    system = SYSTEMS[config.launcher.name]
    options = system.options(config, run.name, run.logs)
    path = shlex.quote(str(run.path))
    return _script(config, system, options, run.logs, path, changes=changes)


def array_script(
    config: ResolvedConfig, folder: Path, name: str, count: int, at_once: int | None = None
) -> str:
    """Return one script for several runs with the same request to SLURM; `folder` holds it and the list of
    runs.

    Args:
        config: the configuration of any of the runs.
        at_once: how many of them may run at the same time.
    """
    limit = "" if at_once is None else f"%{at_once}"
    options = SlurmSystem().options(config, name, folder, f"0-{count - 1}{limit}")
    choose = _CHOOSE.format(runs=shlex.quote(str(runs_list(folder))))
    return _script(config, SlurmSystem(), options, folder, '"$run"', choose)


def runs_list(folder: Path) -> Path:
    """Return the file in the folder of an array that lists one run directory per line."""
    return folder / "runs"


def _script(
    config: ResolvedConfig, system: BatchSystem, options: list[str], logs: Path, run: str,
    choose: str = "", changes: Sequence[str] = (),
) -> str:  # fmt: skip
    settings = config.launcher.slurm if system.name == "slurm" else config.launcher.batch
    # Anybody who can change the run's config.yaml can change this script as well.
    python = shlex.join([config.cluster.python or sys.executable, "-P"])
    # `run` is quoted, or a variable of the script.
    launch = " ".join(
        [python, "-m nanoscale resume --trust", run, *map(shlex.quote, changes), "&\n"]
    )
    exports, path = "", source_path({})
    if config.cluster.python is None and path is not None:
        exports = f"export PYTHONPATH={shlex.quote(path)}${{PYTHONPATH:+:$PYTHONPATH}}\n"
    command = system.commands[0].partition(" -")[0]  # without options: `flux batch`
    remark = f"Submitted again with {command}, it continues where the run stopped."
    sections = [
        "#!/bin/bash\n" + "".join(f"{system.directive}{option}\n" for option in options),
        f"# Written by `nanoscale submit`. {remark}\n",
        system.listening(config, logs),
        "".join(f"{line}\n" for line in settings.setup),
        choose,
        exports,
        launch + FOLLOW,
        system.requeueing(config, python, run),
    ]
    return "\n".join(section for section in sections if section)
