"""The rules across keys: problems that no single key shows.

`check` applies all of them to a composed configuration, reports every violation at once with the nearest legal
values, and resolves keys that were left open (`auto`, null).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

from nanoscale.common.devices import Devices
from nanoscale.config.machines import Host
from nanoscale.config.rules.any_model import check_foreign
from nanoscale.config.rules.backends import check_backend
from nanoscale.config.rules.execution import check_attention, check_recomputation, resolve_compile
from nanoscale.config.rules.files import absolute, check_saving, resolve_data, resolve_run
from nanoscale.config.rules.launcher import resolve_launcher, resolve_ranks
from nanoscale.config.rules.layout import resolve_device, resolve_layout
from nanoscale.config.rules.lora import check_lora
from nanoscale.config.rules.model import resolve_model
from nanoscale.config.rules.moe import check_experts
from nanoscale.config.rules.numbers import (
    check_mask,
    check_optimizer,
    check_precision,
    resolve_precision,
)
from nanoscale.config.rules.pipeline import resolve_virtual_stages
from nanoscale.config.rules.profiling import check_profile
from nanoscale.config.rules.resolution import Case
from nanoscale.config.rules.training import resolve_scheduler, resolve_train
from nanoscale.config.rules.zero import check_zero
from nanoscale.config.schema import Config
from nanoscale.config.values.composed import Composed
from nanoscale.config.violations import refuse

__all__ = ["Devices", "Host", "check", "check_machines"]


def check(composed: Composed, devices: Devices, hosts: tuple[Host, ...] = ()) -> Config:
    """Apply every rule to the configuration and resolve keys that were left open.

    Args:
        composed: the request.
        devices: the devices of this machine.
        hosts: those of the hostfile or of SLURM, whose slots are then the world size; without any, all ranks
            are on this machine.

    Returns:
        the configuration with integers for `parallel.dp`, `parallel.virtual_stages`, `train.micro_batch`,
            `train.steps`, `model.kv_heads`, `model.head_dim`, and for `scheduler.decay_steps` if the schedule
            has a decay of its own; `launcher.device` is `cpu` or `cuda`, `backend.compile` is `on` or `off`,
            `precision.compute` a dtype and `precision.tf32` true or false; paths of data and of the hostfile
            are absolute. On this machine, `launcher.devices` and `launcher.threads` are integers; on hosts
            they stay as requested.

    Raises:
        UserError: with every violation; its kind is `layout`, `data`, `run` or `config`.
    """
    case, config = Case(composed, devices, hosts), composed.config
    launcher = resolve_launcher(case)
    check_foreign(case)
    if case.violations:  # the other rules depend on degrees that must change
        _refuse(case)
    model = resolve_model(case)
    layout = resolve_layout(case, model)
    precision = resolve_precision(case, layout.device)
    case.decide(precision=precision)
    check_experts(case, layout.dp)
    check_lora(case)
    virtual_stages = resolve_virtual_stages(case, model)
    check_recomputation(case)
    compiled = resolve_compile(case, layout.device)
    train = resolve_train(case, layout.dp)
    scheduler = resolve_scheduler(case, train)
    check_profile(case, train, layout.ranks)
    check_precision(case, layout.device)
    check_mask(case, layout.device)
    check_attention(case, layout.device)
    check_backend(case)
    check_zero(case, layout.device, layout.dp)
    check_optimizer(case)
    data = resolve_data(case)
    check_saving(case)
    run = resolve_run(case)
    if case.violations:
        _refuse(case)
    return replace(
        config,
        run=run,
        model=model,
        parallel=replace(config.parallel, dp=layout.dp, virtual_stages=virtual_stages),
        precision=precision,
        backend=replace(config.backend, compile=compiled),
        launcher=resolve_ranks(case, launcher, layout.device, layout.ranks),
        train=train,
        scheduler=scheduler,
        data=data,
    )


def check_machines(composed: Composed, devices: Devices, hosts: tuple[Host, ...] = ()) -> Config:
    """Check the keys about machines alone, for any kind of job.

    Returns:
        the configuration with the launcher, its device, and the folders resolved. On this machine
            `launcher.devices` is an integer.

    Raises:
        UserError: with every violation.
    """
    case, config = Case(composed, devices, hosts), composed.config
    launcher = replace(resolve_launcher(case), device=resolve_device(case))
    if launcher.devices == "auto" and not hosts:
        launcher = replace(launcher, devices=devices.count if launcher.device == "cuda" else 1)
    run = resolve_run(case)
    if case.violations:
        _refuse(case)
    data = replace(config.data, cache_dir=absolute(config.data.cache_dir))
    return replace(config, run=run, data=data, launcher=launcher)


def _refuse(case: Case) -> NoReturn:
    refuse(case.violations, kind=case.kinds.pop() if len(case.kinds) == 1 else "config")
