"""The batch script: its options for SLURM, and a launcher that receives SLURM's signals."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

from nanoscale.common.errors import UserError, Violation
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.values.forms import elastic
from nanoscale.launch.transport.transport import source_path
from nanoscale.runs.directory import RunDirectory

_PLAIN = re.compile(r"[\w./:,=@+%^*\[\]-]+", re.ASCII)
"""Values that sbatch reads unchanged."""

_INSTEAD_OF_GPUS = ("gpus", "gpus-per-node", "gpus-per-task", "gres")

LISTEN = """\
# SLURM sends USR1 before the time limit; `nanoscale runs stop` and scancel send TERM.
# The launcher saves and stops on either, and ends with code 75, or 130 after `nanoscale runs stop`.
export NANOSCALE_BATCH=$SLURM_JOB_ID # tells runs that this job forwards signals
heard=
launcher=
pass_on() {
    heard=${heard:-$1}
    interrupted=yes
    [ -z "$launcher" ] || kill -s "$1" "$launcher"
}
trap 'pass_on USR1' USR1
trap 'pass_on TERM' TERM
"""

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

REQUEUE = """\
# If SLURM preempts the nodes with a grace time, it signals only the agents.
preempted() {
    scontrol show job "$SLURM_JOB_ID" | grep -q '^ *PreemptEligibleTime=.* PreemptTime=[0-9]'
}
if [ "$code" = 75 ] && { [ "$heard" = USR1 ] || { [ -z "$heard" ] && preempted; }; }; then
    if [ "${SLURM_RESTART_COUNT:-0}" -lt "$max_requeues" ]; then
        echo "the job is queued again and will resume the run"
        scontrol requeue "$SLURM_JOB_ID"
    else
        echo "the job was queued again $max_requeues times already; it is not queued again"
    fi
fi
exit "$code"
"""

_CHOOSE = """\
mapfile -t runs < {runs}
run=${{runs[$SLURM_ARRAY_TASK_ID]}}
"""


def batch_script(config: ResolvedConfig, run: RunDirectory) -> str:
    """Return the script of one run.

    Args:
        config: checked, with the number of ranks on a node in `launcher.devices`.

    Raises:
        UserError: a path cannot be written into it.
    """
    output = f"{_pattern(run.logs)}/slurm-%j.out"
    options = _options(config, run.name, output)
    return _script(config, options, "", shlex.quote(str(run.path)))


def array_script(
    config: ResolvedConfig, folder: Path, name: str, count: int, at_once: int | None = None
) -> str:
    """Return one script for several runs with the same request to SLURM; `folder` holds it and the list of
    runs.

    Args:
        config: that of any of the runs.
        at_once: how many of them may run at the same time.
    """
    output = f"{_pattern(folder)}/slurm-%A_%a.out"
    limit = "" if at_once is None else f"%{at_once}"
    options = [*_options(config, name, output), ("array", f"0-{count - 1}{limit}")]
    choose = _CHOOSE.format(runs=shlex.quote(str(runs_list(folder))))
    return _script(config, options, choose, '"$run"')


def runs_list(folder: Path) -> Path:
    """Return the file in the folder of an array that lists one run directory per line."""
    return folder / "runs"


Option = tuple[str, str | None]
"""Name and value of an option of sbatch; None: it takes no value."""


def _script(config: ResolvedConfig, options: list[Option], choose: str, run: str) -> str:
    settings = config.launcher.slurm
    # Anybody who can change the run's config.yaml can change this script as well.
    launcher = shlex.join([config.cluster.python or sys.executable, "-P", "-m", "nanoscale"])
    launch = f"{launcher} resume --trust {run} &\n"
    exports, path = "", source_path({})
    if config.cluster.python is None and path is not None:
        exports = f"export PYTHONPATH={shlex.quote(path)}${{PYTHONPATH:+:$PYTHONPATH}}\n"
    sections = [
        "#!/bin/bash\n" + "".join(f"#SBATCH {_directive(*option)}\n" for option in options),
        "# Written by `nanoscale submit`. Submitted again with sbatch, it continues where the run stopped.\n",
        LISTEN,
        "".join(f"{line}\n" for line in settings.setup),
        choose,
        exports,
        launch + FOLLOW,
        f"max_requeues={settings.max_requeues}\n{REQUEUE}",
    ]
    return "\n".join(section for section in sections if section)


def _options(config: ResolvedConfig, name: str, output: str) -> list[Option]:
    """Return the options for SLURM, in the order of the script."""
    launcher, settings = config.launcher, config.launcher.slurm
    assert isinstance(launcher.devices, int)
    directives = [_split(directive) for directive in settings.directives]
    options: list[Option] = [
        ("job-name", name),
        ("output", output),
        ("open-mode", "append"),
        ("nodes", str(launcher.nodes or 1).replace(":", "-")),
        ("ntasks-per-node", "1"),
    ]
    if not any(option in _INSTEAD_OF_GPUS for option, _ in directives):
        gpus = str(launcher.devices) if launcher.device == "cuda" else None
        options += _optional("gpus-per-node", settings.gpus or gpus)
    if elastic(launcher.nodes):
        options.append(("no-kill", None))  # the job continues with the remaining nodes
    if settings.exclusive:
        options.append(("exclusive", None))
        if not any(option.startswith("mem") for option, _ in directives):
            options.append(("mem", "0"))  # all of a node, not the site's default
    elif isinstance(launcher.threads, int):
        options.append(("cpus-per-task", str(launcher.devices * launcher.threads)))
    for option in ("partition", "account", "qos", "time", "constraint"):
        options += _optional(option, getattr(settings, option))
    options.append(("requeue", None))
    if settings.signal_before_s:
        options.append(("signal", f"B:USR1@{settings.signal_before_s}"))
    return options + directives


def _optional(option: str, value: str | None) -> list[Option]:
    return [] if value is None else [(option, value)]


def _split(directive: str) -> Option:
    name, equals, value = directive.removeprefix("--").partition("=")
    return name, value if equals else None


def _directive(option: str, value: str | None) -> str:
    """Format an option for sbatch: no shell, but quotes, backslashes within them, and comments."""
    if value is None:
        return f"--{option}"
    assert value.isprintable(), f"the rules let a control character pass in --{option}"
    if _PLAIN.fullmatch(value):
        return f"--{option}={value}"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'--{option}="{escaped}"'


def _pattern(folder: Path) -> str:
    """Escape a folder for a file name pattern of SLURM, in which % begins a placeholder."""
    text = str(folder)
    if text.isprintable() and "\\" not in text:
        return text.replace("%", "%%")
    message = (
        "holds what jobs print; SLURM cannot write to a path with a backslash or control character"
    )
    violation = Violation("run.root", os.fspath(folder), "", message, ("run.root=/…",))
    raise UserError("run", "SLURM cannot write there", [violation])
