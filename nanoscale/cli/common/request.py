"""The request of a command line, checked and planned: one call for each command, with what differs."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoscale.cli.common import options as opt
from nanoscale.cli.common import rehearsal
from nanoscale.cli.common.output import DONE, error_document, exit_code, show_error
from nanoscale.cli.common.trust import require_trust
from nanoscale.common import display
from nanoscale.common.errors import UserError
from nanoscale.common.units import counted
from nanoscale.config.reference import value_of
from nanoscale.config.violations import override

if TYPE_CHECKING:
    from nanoscale.config.composing.compose import Setting
    from nanoscale.config.rules import Devices, Host
    from nanoscale.config.values.provenance import Composed
    from nanoscale.launch.request import Request

_Verb = Callable[..., int | None]
HOSTS = ("hostfile", "include", "exclude", "num_nodes", "num_gpus")
LAUNCH = (*HOSTS, "no_preflight", "trust")
_DECLARED = {
    "overrides": opt.Overrides,
    "config": opt.ConfigFile,
    "config_dir": opt.ConfigDir,
    "hostfile": opt.Hostfile,
    "include": opt.Include,
    "exclude": opt.Exclude,
    "num_nodes": opt.NumNodes,
    "num_gpus": opt.NumGpus,
    "no_preflight": opt.NoPreflight,
    "trust": opt.Trust,
}
"""The arguments and options that make a command line's request."""


@dataclass(frozen=True)
class CommandLine:
    """The configuration that a command line requests."""

    overrides: Sequence[str] | None = None
    config_file: Path | None = None
    """A frozen configuration to start from."""
    config_dir: Path | None = None
    options: Mapping[str, Setting] = field(default_factory=dict)
    """Keys that options set."""
    trust: bool = False
    """True to run the code and programs that another user's frozen configuration names, without asking."""
    one_of_many: bool = False
    """True in the first of the processes that another program has started for launcher=env."""

    @property
    def changes(self) -> list[str]:
        """The overrides, and the options as overrides."""
        chosen = (override(key, setting.value) for key, setting in self.options.items())
        return [*(self.overrides or ()), *shlex.split(" ".join(chosen))]

    def compose(self, check: Callable[[Composed], object] | None = None) -> Composed:
        """Compose the configuration; addresses of data are replaced by the paths of the fetched files, and text
        files that data.path names by their tokens.

        Args:
            check: as of `tokens_of_texts`.

        Raises:
            UserError: with every mistake in overrides and files.
        """
        from nanoscale.cli.common.fetched import fetched_data
        from nanoscale.cli.common.text_preparation import tokens_of_texts

        words = tuple(self.overrides or ())
        composed = self._compose(words, self.options)
        local: dict[str, Setting] = {}
        of_texts = () if self.config_file else (partial(tokens_of_texts, check=check),)
        for replace_paths in (fetched_data, *of_texts):
            if replaced := replace_paths(composed):
                local |= replaced
                others = [word for word in words if word.partition("=")[0] not in local]
                composed = self._compose(others, {**self.options, **local})
        return replace(composed, words=words)

    def compose_settings(self) -> Composed:
        """Compose the configuration as it is written, and fetch nothing."""
        return self._compose(tuple(self.overrides or ()), self.options)

    def _compose(self, words: Sequence[str], options: Mapping[str, Setting]) -> Composed:
        from nanoscale.config.composing.compose import compose

        return compose(
            words, config_dir=self.config_dir, config_file=self.config_file, options=options
        )

    def require_startable(self) -> None:
        """Require that this process may start the job: it is the only launcher, and the file is trusted.

        Raises:
            UserError: another program starts this command many times, or nobody trusts the file.
        """
        from nanoscale.launch.batch.allocation import require_one_launcher

        if not self.one_of_many:
            require_one_launcher()
        self.require_trusted()

    def require_trusted(self, *, launched: bool = True) -> None:
        """Ask before code is run that a file of another user names.

        Raises:
            UserError: nobody can be asked, or the answer is no.
        """
        if self.config_file is not None:
            require_trust(self.config_file, self.compose, trust=self.trust, launched=launched)


def requesting(*names: str) -> Callable[[_Verb], _Verb]:
    """Return the decorator of a verb with OVERRIDES and these options: it gets them as its parameter `line`."""

    def decorate(verb: _Verb) -> _Verb:
        @wraps(verb)
        def run(**given: Any) -> int | None:
            made = {name: given.pop(name) for name in ("overrides", *names)}
            files = made.pop("config", None), made.pop("config_dir", None)
            trust = made.pop("trust", False)
            line = CommandLine(made.pop("overrides"), *files, opt.as_settings(**made), trust)
            return verb(**given, line=line)

        parameters: list[inspect.Parameter] = []
        for each in inspect.signature(verb, eval_str=True).parameters.values():
            expanded = ("overrides", *names) if each.name == "line" else ()
            parameters += [
                each.replace(
                    name=name,
                    annotation=_DECLARED[name],
                    default=False if name in ("no_preflight", "trust") else None,
                )
                for name in expanded
            ] or [each]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


class Refusals:
    """The errors of a request that is complete enough to be shown nevertheless.

    Args:
        postponed: keep the errors for `show` (a dry run) instead of raising them.
    """

    def __init__(self, *, postponed: bool = False) -> None:
        self.postponed = postponed
        self._errors: list[UserError] = []

    @contextmanager
    def gather(self) -> Iterator[None]:
        """Keep a UserError of the block if errors are postponed."""
        try:
            yield
        except UserError as error:
            if not self.postponed:
                raise
            self._errors.append(error)

    def document(self) -> dict[str, Any]:
        """Return the error of the launch for `--json`; empty if it would begin."""
        return {"error": error_document(self._errors[0])} if self._errors else {}

    def show(self) -> int:
        """Write the errors to standard error; return the exit code that the launch would have."""
        for error in self._errors:
            show_error(error, as_json=False)
        return exit_code(self._errors[0]) if self._errors else DONE


def request_job(
    line: CommandLine,
    *,
    starts: bool = True,
    verify: Callable[[Composed], None] | None = None,
    devices: Callable[[Composed], Devices] | None = None,
    hosts: Callable[[Composed], tuple[Host, ...]] | None = None,
) -> Request:
    """Return a command line's request, checked against the rules and the machines.

    Args:
        starts: False for a command that starts no process.
        verify: a check before the rules' checks.
        devices: returns the devices of a host; None: this machine's devices.
        hosts: returns the hosts of the job; None: from the hostfile or from SLURM.

    Raises:
        UserError: with everything that is wrong.
    """
    from nanoscale.launch.request import check_request
    from nanoscale.launch.transport.transport import transport_of

    if starts:
        line.require_startable()
    else:
        line.require_trusted(launched=False)

    def checked_on_machines(composed: Composed) -> Request:
        return check_request(
            composed,
            devices=devices and devices(composed),
            hosts=None if hosts is None else hosts(composed),
            repeats=line.config_file,
        )

    composed = line.compose(checked_on_machines)
    if starts and not line.one_of_many and composed.config.launcher.name == "env":
        raise UserError("usage", "launcher=env is for `nanoscale train` alone")
    if verify is not None:
        verify(composed)
    checked = checked_on_machines(composed)
    if starts and (idle := transport_of(checked.config).idle_machines()):
        display.note(idle)
    return checked


def _other_machine(request: Request) -> str | None:
    """Return this machine's devices, if all ranks run here and the described devices are others."""
    from nanoscale.config.hardware.data_sheets import CPU, recognise

    device, here = request.config.cluster.device, request.devices
    if device is None or request.hosts:
        return None
    if request.config.launcher.device == "cpu":
        return None if device == CPU else counted(here.cores, "CPU core")
    known = {recognise(name) for name in here.names}
    return None if {device, None} & known else " and ".join(sorted(set(here.names)))


def _note_shortened(request: Request) -> None:
    """Say which values of a packaged recipe are smaller in this job: it is short, or its data is small."""
    for key in ("train.global_batch", "train.seq_len", "scheduler.warmup_steps"):
        settings = request.composed.history.get(key, [])
        recipes = [it.value for it in settings if it.source.startswith("nanoscale/recipes/")]
        value = value_of(request.config, key)
        if recipes and not request.composed.by_user(key) and value < recipes[-1]:
            display.note(f"the recipe's {key}={recipes[-1]} is shortened to {value} for this job")


def request_new_run(
    line: CommandLine, refusals: Refusals | None = None, *, force: bool = False,
    rehearse: bool = False, fetch: bool = True, saves: bool = True, continues: bool = False,
    verify: Callable[[Composed], None] | None = None,
) -> Request:  # fmt: skip
    """Return the request of a new run with its name, its initial weights and its plan.

    Args:
        refusals: the receiver of errors that do not prevent a dry run; None: raise.
        force: launch a job that does not fit.
        rehearse: rehearse the job in any case.
        fetch: True to download the weights of a model that is given by its name.
        saves: True if the disk must have room for the job's checkpoints.
        continues: True if the run may exist.
        verify: a check before the rules' checks.
    """
    from nanoscale.launch.lifecycle.continuation import check_uploaded
    from nanoscale.launch.lifecycle.prepare import check_new_run, name_run
    from nanoscale.launch.preflight.by_library import with_weights

    refusals = refusals or Refusals()
    checked = request_job(line, verify=verify)
    _note_shortened(checked)
    composed, launcher = checked.composed, checked.config.launcher
    is_for_gpus = composed.config.cluster.reference and launcher.device == "cpu"
    if is_for_gpus and composed.config.launcher.device == "auto" and not checked.hosts:
        display.note("there is no GPU here, so this job would train on the CPU of this machine")
    if (other := _other_machine(checked)) is not None:
        named_device = f"cluster.device={composed.config.cluster.device}"
        display.note(
            f"this machine ({other}) is not the one that {named_device} names, and the plan is "
            f"for its ranks there. `nanoscale plan` with the same words plans the whole cluster"
        )
    named = name_run(composed, checked.config, repeats=checked.repeats is not None)
    with refusals.gather():
        if not (continues and (Path(named.run.root) / str(named.run.name)).is_dir()):
            check_new_run(named)
            if saves:
                check_uploaded(composed, named)
    weighed = replace(checked, config=with_weights(composed, named, fetch=fetch))
    request_with_plan = planned(weighed, refusals, force=force, rehearse=rehearse)
    if saves:
        require_disk(request_with_plan, refusals, force=force)
    return request_with_plan


def planned(
    request: Request, refusals: Refusals, *, force: bool, rehearse: bool = False
) -> Request:
    """Return the request with its plan and its rehearsal, if it may be launched.

    If the plan cannot decide whether the job fits, a rehearsal does. A request has no plan if its devices are
    not known here.

    Args:
        force: launch a job that does not fit.
        rehearse: rehearse the job in any case.

    Raises:
        UserError: of kind `plan`, it does not fit; of kind `rehearsal`, the code of a rank fails or ranks
            disagree; or `cluster` names unknown hardware.
    """
    from nanoscale.config.hardware.data_sheets import UnknownHardwareError
    from nanoscale.plan.predict import predict
    from nanoscale.rehearse.rehearsals import known_of
    from nanoscale.view.plan.prediction import document
    from nanoscale.view.plan.verdict import require_fit

    try:
        plan = predict(request.config)
    except UnknownHardwareError as error:
        if rehearse:
            raise
        display.note(f"not planned: {error}")
        return request
    program = known_of(request.config)
    with refusals.gather():
        if program is None and (rehearse or (not force and rehearsal.must_decide(plan))):
            program = rehearsal.rehearsal_of_launch(request.config, asked=rehearse)
        plan = rehearsal.with_memory(plan, program)
        if not force:
            require_fit(request.composed, plan, request.devices)
    return replace(request, plan=document(plan, request.choice), program=program)


def require_disk(request: Request, refusals: Refusals, *, force: bool) -> None:
    """Require that the disk has room for the job's checkpoints.

    Raises:
        UserError: of kind `plan`, there is no room for a single one, and `force` is not set.
    """
    if not force:
        with refusals.gather():
            request.saving.require_disk()
