"""A request: the overrides and options of a command, checked against the machines."""

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from nanoscale.common.devices import detect
from nanoscale.common.errors import UserError
from nanoscale.common.json_text import Json
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.rules import Devices, Host, check
from nanoscale.config.values.provenance import Composed, Setting
from nanoscale.launch.preflight.by_library import check_extra, check_tasks
from nanoscale.launch.transport.transport import read_hosts
from nanoscale.plan.hardware.hardware import hardware_of
from nanoscale.plan.predict import with_fitting_micro_batch
from nanoscale.plan.saving import SavingPlan, plan_saving, with_memory_interval
from nanoscale.plan.search.choice import SOURCE, LayoutChoice, with_chosen_layout
from nanoscale.runs.directory import RunDirectory


@dataclass(frozen=True)
class Request:
    """A job that may be started, with the configuration as requested and as resolved."""

    composed: Composed
    config: ResolvedConfig
    """The resolved one, with the name of its run."""
    devices: Devices
    repeats: Path | None = None
    """The frozen configuration that it was made from."""
    hosts: tuple[Host, ...] = ()
    """The hosts of the hostfile or of SLURM; none if all ranks are simply on this machine."""
    choice: LayoutChoice | None = None
    """The layout that the plan chose; None if the request left nothing of it to the plan."""
    plan: Json | None = None
    """The content of plan.json: the prediction; None if there is none."""
    program: Json | None = None
    """The content of program.json: the rehearsal; None if there is none."""

    @property
    def run(self) -> RunDirectory:
        """The run's directory, which may not exist yet."""
        return RunDirectory(Path(self.config.run.root).absolute() / str(self.config.run.name))

    @property
    def saving(self) -> SavingPlan:
        """The plan of the job's checkpoints and their disk space."""
        present = len(self.run.checkpoint_steps())
        if self.plan is None:
            return plan_saving(self.config, None, present)
        times = (self.plan["checkpoints"][key] for key in ("memory_save_s", "between_failures_s"))
        return plan_saving(self.config, self.plan["step_time_s"], present, *times)


def check_request(
    composed: Composed,
    *,
    devices: Devices | None = None,
    hosts: tuple[Host, ...] | None = None,
    repeats: Path | None = None,
) -> Request:
    """Check a composed configuration against the rules, the machines and the backend's own judge.

    Args:
        composed: the configuration as the user asked for it.
        devices: the devices of a host; None: this machine's devices.
        hosts: the hosts of the job; None: from the hostfile or from SLURM.
        repeats: the frozen configuration that it was made from.

    Raises:
        UserError: with everything that is wrong.
    """
    devices = detect() if devices is None else devices
    hosts = read_hosts(composed) if hosts is None else hosts
    composed, choice = with_chosen_layout(composed, devices, hosts)
    config = check(composed, devices, hosts)
    with suppress(UserError):  # of hardware that the plan does not know
        if composed.config.train.micro_batch == "auto":
            config = with_fitting_micro_batch(config, hardware_of(config))
        if composed.config.checkpoint.memory_every == "auto":
            config = with_memory_interval(config, hardware_of(config))
            key = "checkpoint.memory_every"
            setting = Setting(config.checkpoint.memory_every, SOURCE)
            history = {**composed.history, key: [*composed.history[key], setting]}
            composed = replace(composed, history=history)
    check_extra(composed, config)
    check_tasks(composed, config)
    return Request(composed, config, devices, repeats=repeats, hosts=hosts, choice=choice)
