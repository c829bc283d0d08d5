"""Rules of the launcher: the machines of the ranks, the keys of each launcher, the ranks' environment, and
the settings of batch systems, each of which must fit in one line of a batch script."""

import os
import re
import socket
from dataclasses import replace
from functools import partial
from typing import Literal, get_args

from nanoscale.common.units import listed
from nanoscale.config import machines, reference, schema
from nanoscale.config.composing.interpolation import SECRET
from nanoscale.config.machines import NOTICE_S
from nanoscale.config.rules.data import absolute
from nanoscale.config.rules.resolution import Resolution
from nanoscale.config.values import forms
from nanoscale.config.values.provenance import Composed
from nanoscale.config.violations import override

BATCH_NAMES: tuple[str, ...] = get_args(schema.BatchName)
_BATCH = tuple(name for name in BATCH_NAMES if name != "slurm")
"""The launchers that read `launcher.batch`."""
_CONCERNS: dict[str, tuple[str, ...]] = {
    "launcher.hostfile": ("ssh", "pdsh"),
    "launcher.include": ("ssh", "pdsh"),
    "launcher.exclude": ("ssh", "pdsh"),
    "launcher.exclude_file": ("ssh", "pdsh", *BATCH_NAMES),
    "launcher.nodes": ("ssh", "pdsh", *BATCH_NAMES, "kubernetes", "skypilot"),
    "launcher.container": ("ssh", "pdsh", *BATCH_NAMES, "kubernetes", "skypilot"),
    "launcher.container_mounts": ("ssh", "pdsh", *BATCH_NAMES, "kubernetes"),
    "launcher.container_runtime": ("ssh", "pdsh", *BATCH_NAMES),
    "launcher.master_addr": ("ssh", "pdsh", *BATCH_NAMES),
    "launcher.ssh_args": ("ssh", "pdsh", *_BATCH),
    "cluster.python": ("ssh", "pdsh", *BATCH_NAMES),
    **{f"launcher.slurm.{name}": ("slurm",) for name in reference.members(schema.Slurm)},
    **{f"launcher.batch.{name}": _BATCH for name in reference.members(schema.BatchSettings)},
}
"""Keys that only some launchers use."""

_MAY_BE_ZERO = {
    f"cluster.{name}" for name in ("context_gib", "intra_host_us", "inter_host_us", "price")
}
"""Hardware figures that may be 0; the others are divisors."""


def resolve_launcher(resolution: Resolution) -> schema.Launcher:
    """Return the launcher with its name, and the hostfile with an absolute path."""
    _check_concerns(resolution)
    _check_nodes(resolution)
    _check_master(resolution)
    _check_cluster(resolution)
    check_environment(resolution)
    launcher = resolution.config.launcher
    _check_settings(resolution, "launcher.slurm", launcher.slurm, "--", "long option of sbatch")
    _check_settings(resolution, "launcher.batch", launcher.batch, "-", "option")
    _check_container(resolution)
    hostfile, exclude_file = absolute(launcher.hostfile), absolute(launcher.exclude_file)
    return replace(launcher, name=_name(resolution), hostfile=hostfile, exclude_file=exclude_file)


def resolve_ranks(
    resolution: Resolution, launcher: schema.Launcher, device: Literal["cpu", "cuda"], ranks: int
) -> schema.Launcher:
    """Return the launcher with this machine's ranks; elsewhere every host divides its own cores."""
    if resolution.hosts and launcher.name != "local":
        return replace(launcher, device=device)
    threads = launcher.threads
    if threads == "auto":
        threads = max(1, resolution.devices.cores // ranks)
    return replace(launcher, device=device, devices=ranks, threads=threads)


def requested_launcher(composed: Composed) -> str:
    """Return the requested launcher: a hostfile implies ssh, unless another one was requested."""
    launcher = composed.config.launcher
    unsaid = launcher.name == "local" and not composed.asked_for("launcher.name")
    return "ssh" if unsaid and launcher.hostfile is not None else launcher.name


def _name(resolution: Resolution) -> schema.LauncherName:
    """Return the launcher's name: a hostfile of this machine alone needs no ssh, unless it was requested."""
    asked = resolution.config.launcher.name
    if asked == requested_launcher(resolution.composed):
        return asked
    if resolution.remote or not resolution.hosts:
        return "ssh"
    if len(resolution.hosts) > 1:
        names = listed([f"{host.name} ({host.source})" for host in resolution.hosts])
        one = f"{resolution.hosts[0].name} slots={resolution.slots}"
        message = (
            f"names this machine {len(resolution.hosts)} times, as {names}: one line is enough"
        )
        resolution.refuse("launcher.hostfile", message, one, "launcher.name=ssh")
    return "local"


def _check_concerns(resolution: Resolution) -> None:
    launcher, way = resolution.config.launcher, requested_launcher(resolution.composed)
    if way in ("ssh", "pdsh") and launcher.hostfile is None:
        file = "a file with a line `HOST slots=N` for each host"
        message = f"is needed by launcher.name={way}: {file}"
        resolution.refuse("launcher.hostfile", message, "--hostfile hosts", "launcher.name=local")
    if way == "env" and resolution.config.run.name is None:
        why = "the same command, started again, continues the run"
        message = f"is needed by launcher.name=env: {why}"
        resolution.refuse("run.name", message, "run.name=first")
    for key, ways in _CONCERNS.items():
        if way not in ways:
            others = "--hostfile hosts" if launcher.hostfile is None else "launcher.name=ssh"
            instead = others if "ssh" in ways and way == "local" else None
            for_batch = f"launcher.name={ways[0]}" if set(ways) < {*BATCH_NAMES} else None
            resolution.refuse_idle(key, f"launcher.name={way}", instead, for_batch)
    if way == "pdsh" and any(len(word.split()) != 1 for word in launcher.ssh_args):
        message = "cannot hold an argument with a space, at which pdsh would split it"
        resolution.refuse("launcher.ssh_args", message, "launcher.name=ssh")


def _check_container(resolution: Resolution) -> None:
    launcher, key = resolution.config.launcher, "launcher.container_mounts"
    if launcher.container is not None and not is_line(launcher.container):
        message = "must be one line of printable characters"
        resolution.refuse("launcher.container", message, "launcher.container=null")
    if launcher.container is None:
        for name in (key, "launcher.container_runtime"):
            resolution.refuse_idle(name, "launcher.container=null")
    elif launcher.container_runtime == "pyxis" and launcher.name != "slurm":
        message = "is a part of SLURM"
        resolution.refuse("launcher.container_runtime", message, "launcher.container_runtime=auto")
    for mount in launcher.container_mounts:
        if not is_line(mount) or not all(mount.partition(":")) or "," in mount:
            message = f"holds {mount!r}; a mount is HOST:INSIDE, without commas"
            resolution.refuse(key, message, override(key, ["/data:/data"]))


def _check_nodes(resolution: Resolution) -> None:
    wrong = forms.nodes_violation(resolution.composed)
    if wrong is not None:
        resolution.add("config", wrong)
    count, dp = resolution.config.launcher.nodes, resolution.config.parallel.dp
    if forms.elastic(count) and dp != "auto":
        message = f"must be auto with launcher.nodes={count}: it follows from the number of remaining hosts"
        most = str(count).partition(":")[2]
        advice = "parallel.dp=auto", f"launcher.nodes={most}"
        resolution.refuse("parallel.dp", message, *advice, kind="layout")


def check_stragglers(resolution: Resolution, device: str) -> None:
    """Refuse to leave out slow hosts of a job that is not elastic, and advise to make it elastic."""
    nodes, dp = resolution.config.launcher.nodes, resolution.config.parallel.dp
    _, most = forms.node_range(nodes) or (1, len(resolution.hosts))
    range_override = f"launcher.nodes={most - 1}:{most}{' parallel.dp=auto' * (dp != 'auto')}"
    if device == "cpu" and not forms.elastic(nodes):
        advice = override("launcher.nodes", nodes), range_override if most > 1 else None
        resolution.refuse_idle("launcher.exclude_stragglers", *advice)


def _check_master(resolution: Resolution) -> None:
    """Check the master address: the other hosts must reach the first one under this name."""
    key, given = "launcher.master_addr", resolution.config.launcher.master_addr
    if given is not None:
        problem = machines.problem(given) or ("holds a user" if "@" in given else "")
        if problem:
            address = machines.address(given)
            fits = address != given and not machines.problem(address)
            resolution.refuse(key, problem, f"{key}={address}" if fits else f"{key}=null")
        return
    first, *others = resolution.hosts or (None,)
    if first is not None and others and resolution.remote and machines.is_loopback(first.name):
        message = (
            f"is needed: {first.name} ({first.source}), where the ranks meet, means another "
            f"machine on every other host"
        )
        resolution.refuse(key, message, f"{key}={socket.gethostname()}")


def _check_cluster(resolution: Resolution) -> None:
    cluster = resolution.config.cluster
    for name, key in reference.declared().items():
        above = name.startswith("cluster.") and key.at_least == 0 and name not in _MAY_BE_ZERO
        if above and reference.value_of(resolution.config, name) == 0:
            resolution.refuse(name, "must be above 0", f"{name}=null")
    python = cluster.python
    if python is not None and not (python.isprintable() and python.strip("- ")):
        message = "is not the path of an interpreter"
        resolution.refuse("cluster.python", message, "cluster.python=null")


# --- environment of the ranks ---------------------------------------------------------------------

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NOTICE = re.compile(r"/|https?://")
_PASSED = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\*?")
_OURS = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|(TORCHELASTIC|NANOSCALE)_.*"
)
"""Variables that define a rank's identity."""


def check_environment(resolution: Resolution) -> None:
    """Check `launcher.env` and `launcher.pass_env`."""
    for name, value in resolution.config.launcher.env.items():
        # Not the value: it may be a secret.
        refuse = partial(resolution.refuse_value, f"launcher.env.{name}", None)
        if not _NAME.fullmatch(name):
            refuse(
                "is not the name of a variable: letters, digits and underscores, not starting with a digit"
            )
        elif _OURS.fullmatch(name):
            refuse("is set by the launcher for every rank")
        elif name == "OMP_NUM_THREADS":
            refuse("is set by launcher.threads", f"launcher.threads={value}")
        elif SECRET.search(name):
            message = (
                "looks like a secret, and would be written to the run directory; set it in your shell "
                "and pass it on"
            )
            refuse(message, f"'launcher.pass_env=[{name}]'")
        if not isinstance(value, (str, int, float)):
            refuse("must be a text, a number, true or false")
        elif isinstance(value, str) and "\0" in value:
            refuse("holds a NUL character, which no variable can")
    notify = resolution.config.launcher.notify
    if notify is not None and not os.environ.get(notify, "").startswith(("http://", "https://")):
        message = "is not set to an address that begins with http:// or https://"
        resolution.refuse("launcher.notify", message, "launcher.notify=null")
    notice = resolution.config.launcher.notice
    if notice is not None and not (notice in NOTICE_S or _NOTICE.match(notice)):
        message = f"must be {', '.join(NOTICE_S)}, the full path of a file, or an http address"
        resolution.refuse("launcher.notice", message, *(f"launcher.notice={it}" for it in NOTICE_S))
    for entry in resolution.config.launcher.pass_env:
        if not _PASSED.fullmatch(entry):
            what = "which is neither a variable's name nor its beginning with `*`"
            message = f"holds {entry!r}, {what}"
            resolution.refuse("launcher.pass_env", message, "'launcher.pass_env=[WANDB_*]'")


# --- batch systems ----------------------------------------------------------------------------------------

_TIME = re.compile(
    r"(?P<minutes>[0-9]+)"
    r"|(?P<h>[0-9]+):(?P<m>[0-5]?[0-9]):(?P<s>[0-5]?[0-9])"
    r"|(?P<days>[0-9]+)-(?P<dh>[01]?[0-9]|2[0-3])(:(?P<dm>[0-5]?[0-9])(:(?P<ds>[0-5]?[0-9]))?)?"
)
_SHORT_TIME = re.compile(r"([0-9]+):([0-9]+)")
_LONG_TIME = re.compile(
    r"(?:([0-9]+) ?d[a-z]*)?,? ?(?:([0-9]+) ?h[a-z]*)?,? ?(?:([0-9]+) ?m[a-z]*)?", re.IGNORECASE
)
"""Days, hours and minutes with their units, as in `1d12h` and `8 hours`."""
_OPTION = re.compile(r"--([a-z-]+)")
_KEYS = {
    "account": "launcher.slurm.account",
    "constraint": "launcher.slurm.constraint",
    "exclusive": "launcher.slurm.exclusive",
    "gpus-per-node": "launcher.slurm.gpus",
    "job-name": "run.name",
    "nodes": "launcher.nodes",
    "ntasks": "launcher.nodes",
    "partition": "launcher.slurm.partition",
    "qos": "launcher.slurm.qos",
    "signal": "launcher.slurm.signal_before_s",
    "time": "launcher.slurm.time",
}
"""Options of sbatch that a key replaces."""
_OUR_OPTIONS = (
    "array", "no-requeue", "ntasks-per-node", "open-mode", "output", "parsable", "requeue",
    "test-only", "wait", "wrap",
)  # fmt: skip
"""Options of sbatch by which a run is followed and resumed."""
_LINES = ("partition", "account", "qos", "constraint", "gpus", "queue", "resources")


def time_limit_s(text: str | None) -> int | None:
    """Return the seconds of a time limit: minutes, H:MM:SS or D-HH[:MM[:SS]]; None if it is invalid."""
    parts = _TIME.fullmatch(text or "")
    if parts is None:
        return None
    values = {name: int(part or 0) for name, part in parts.groupdict().items()}
    hours = values["days"] * 24 + values["dh"] + values["h"]
    minutes = hours * 60 + values["dm"] + values["m"] + values["minutes"]
    return minutes * 60 + values["ds"] + values["s"]


def _check_settings(
    resolution: Resolution, section: str, settings: schema.BatchOptions, dashes: str, what: str
) -> None:
    for name in _LINES:
        value = getattr(settings, name, None)
        if value is not None and not is_line(value):
            key = f"{section}.{name}"
            resolution.refuse(key, "must be one line of printable characters", f"{key}=null")
    key, given = f"{section}.directives", settings.directives
    wrong = [text for text in given if not text.startswith(dashes) or not is_line(text)]
    if wrong:
        corrected = ",".join(f'"{dashes}{text.lstrip("- ")}"' for text in given if is_line(text))
        message = f"holds {wrong[0]!r}; each is one {what}, beginning with `{dashes}`"
        resolution.refuse(key, message, f"'{key}=[{corrected}]'" if corrected else None)
    for text in given:
        option = _OPTION.match(text)
        name, value = option[1] if option else "", text.partition("=")[2]
        if name in _KEYS:
            message = f"holds --{name}, for which nanoscale has a key"
            resolution.refuse(key, message, f"{_KEYS[name]}={value or '…'}")
        elif name in _OUR_OPTIONS:
            resolution.refuse(key, f"holds --{name}, which nanoscale sets itself", None)
    if settings.time is None:
        return
    key, text = f"{section}.time", settings.time
    limit, before = time_limit_s(text), settings.signal_before_s
    if limit is None:
        message, meant = "must be minutes, H:MM:SS or D-HH:MM:SS", ["1:30:00", "2-00:00:00"]
        if short := _SHORT_TIME.fullmatch(text):
            # SLURM reads `1:30` as minutes and seconds, people as hours and minutes.
            first, second = int(short[1]), int(short[2])
            meant = [f"{first}:{second:02}:00", f"0:{first:02}:{second:02}"]
        if (long := _LONG_TIME.fullmatch(text)) and text:
            days, hours, minutes = (int(part or 0) for part in long.groups())
            hours, minutes = divmod((days * 24 + hours) * 60 + minutes, 60)
            meant = [f"{hours}:{minutes:02}:00"]
        resolution.refuse(key, message, *(f"{key}={time}" for time in meant))
    elif limit == 0:
        resolution.refuse(key, "must be above 0", f"{key}=null")
    elif before >= limit:
        message = f"is not shorter than the time limit, {limit} s ({key}={text})"
        shorter = f"{section}.signal_before_s={limit // 2}"
        resolution.refuse(f"{section}.signal_before_s", message, shorter)


def is_line(text: str) -> bool:
    return text.isprintable() and text.strip() != ""
