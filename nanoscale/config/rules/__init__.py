"""The rules across keys: problems that no single key shows.

`check` applies all of them to a composed configuration, reports every violation at once with the nearest legal
values, and resolves keys that were left open (`auto`, null).
"""

from dataclasses import replace

from nanoscale.common.devices import Devices
from nanoscale.config.machines import Host
from nanoscale.config.resolved import ResolvedConfig, resolved
from nanoscale.config.rules import (
    backends,
    data,
    layout,
    model,
    numbers,
    only_with,
    own_code,
    pipeline,
    training,
)
from nanoscale.config.rules.devices import keeps_ranks, resolve_degrees, resolve_device
from nanoscale.config.rules.launcher import check_stragglers, resolve_launcher, resolve_ranks
from nanoscale.config.rules.resolution import Resolution
from nanoscale.config.rules.rule import Rule
from nanoscale.config.schema import Config
from nanoscale.config.values.provenance import Composed

__all__ = ["Devices", "Host", "check", "check_machines"]

RULES: tuple[Rule, ...] = (
    *model.FOREIGN,
    *only_with.OF_LAYOUT,
    *layout.RULES,
    *pipeline.RULES,
    *layout.EXECUTION,
    *training.RULES,
    *numbers.RULES,
    *backends.RULES,
    *model.EXPERTS,
    *model.ADAPTERS,
)
"""The rules of the layout, which `check` refuses with and the search of layouts enumerates with."""
JOB: tuple[Rule, ...] = (
    *training.JOB,
    *only_with.OF_JOB,
    *numbers.PRECISION,
    *numbers.ATTENTION,
    *numbers.OPTIMIZER,
    *backends.JOB,
    *training.SAVING,
    *own_code.RULES,
)
"""The rules of the other keys, with the length of the training resolved."""


def check(
    composed: Composed,
    devices: Devices,
    hosts: tuple[Host, ...] = (),
    searched: frozenset[str] = frozenset(),
) -> ResolvedConfig:
    """Apply every rule to the configuration and resolve keys that were left open.

    Args:
        composed: the request.
        devices: the devices of this machine.
        hosts: the hosts of the hostfile or of SLURM; their slots are the world size. Without any, all ranks
            are on this machine.
        searched: keys that a search of layouts sets later; rules of the layout that read them are left to it.

    Returns:
        the configuration with integers for `parallel.dp`, `parallel.virtual_stages`, `train.micro_batch`,
            `train.steps`, `checkpoint.memory_every`, `model.kv_heads`, `model.head_dim`, and for
            `scheduler.decay_steps` if the schedule has a decay of its own; `launcher.device` is `cpu` or
            `cuda`, `backend.compile` is `on` or `off`, `precision.compute` a dtype and `precision.tf32` true
            or false; paths of data and of the hostfile are absolute. On this machine, `launcher.devices` and
            `launcher.threads` are integers; on hosts they stay as requested.

    Raises:
        UserError: with every violation; its kind is `layout`, `data`, `run` or `config`.
    """
    composed = model.with_whole_stream(composed)
    every = (*model.SHAPE, *RULES, *only_with.OF_TEXT, *JOB)
    resolution, config = Resolution(composed, devices, hosts, every), composed.config
    launcher = resolve_launcher(resolution)
    # what a model with transformers' code supports, and its keys without one
    resolution.apply(only_with.OF_MODEL)
    if config.model.source == "hf":
        resolution.require("model.source", "transformers")
    resolution.apply(model.FOREIGN)
    resolution.refuse_all()  # the other rules depend on degrees that must change
    resolution.decide(model=model.resolve_model(resolution))
    device = resolve_device(resolution)
    check_stragglers(resolution, device)
    dp, ranks = resolve_degrees(resolution, device)
    fixed = bool(hosts) or config.launcher.devices != "auto"
    if fixed and config.parallel.dp != "auto" and not resolution.violations:
        resolution.rules = (*every, keeps_ranks(ranks))
    resolution.decide(parallel=replace(config.parallel, dp=dp))
    resolution.decide(launcher=replace(config.launcher, device=device))
    resolution.decide(precision=numbers.resolve_precision(resolution, device))
    resolution.apply(rule for rule in RULES if searched.isdisjoint(rule.reads))
    resolution.decide(data=data.resolve_data(resolution))
    resolution.decide(train=training.resolve_train(resolution))
    resolution.decide(scheduler=training.resolve_warmup(resolution))
    resolution.apply(JOB)
    training.check_profile(resolution, ranks)
    numbers.check_fp8(resolution)
    numbers.check_kernel(resolution)
    backends.check_backend(resolution)
    numbers.check_optimizer(resolution)
    training.check_loggers(resolution)
    own_code.check_hooks(resolution)
    run = training.resolve_run(resolution)
    resolution.refuse_all()
    launcher = resolve_ranks(resolution, launcher, device, ranks)
    final = replace(_choose(resolution, searched), run=run, launcher=launcher)
    return resolved(final)


def _choose(resolution: Resolution, searched: frozenset[str]) -> Config:
    """Return the configuration with what is `auto` until here: compilation, virtual stages, checkpoints in
    memory, the schedule's decay."""
    config = resolution.config
    parallel, backend, saving = config.parallel, config.backend, config.checkpoint
    if backend.compile == "auto":  # on GPUs, if no rule forbids it
        compiled = replace(config, backend=replace(backend, compile="on"))
        possible = all(rule.holds(compiled) for rule in RULES if "backend.compile" in rule.reads)
        backend = replace(
            backend, compile="on" if config.launcher.device == "cuda" and possible else "off"
        )
    is_open = not searched.isdisjoint(("parallel.pp", "parallel.schedule"))
    if parallel.virtual_stages == "auto" or not is_open:
        parallel = replace(parallel, virtual_stages=pipeline.virtual_stages(parallel))
    if saving.memory_every == "auto":
        saving = replace(saving, memory_every=1)  # until the plan chooses
    return replace(
        config,
        checkpoint=saving,
        parallel=parallel,
        backend=backend,
        scheduler=training.resolve_scheduler(config),
    )


def check_machines(composed: Composed, devices: Devices, hosts: tuple[Host, ...] = ()) -> Config:
    """Check the keys about machines alone, for any kind of job.

    Returns:
        the configuration with the launcher, its device, and the folders resolved. On this machine
            `launcher.devices` is an integer.

    Raises:
        UserError: with every violation.
    """
    resolution, config = Resolution(composed, devices, hosts), composed.config
    launcher = replace(resolve_launcher(resolution), device=resolve_device(resolution))
    if launcher.devices == "auto" and not hosts:
        launcher = replace(launcher, devices=devices.count if launcher.device == "cuda" else 1)
    run = training.resolve_run(resolution)
    resolution.refuse_all()
    section = replace(config.data, cache_dir=data.absolute(config.data.cache_dir))
    return replace(config, run=run, data=section, launcher=launcher)
