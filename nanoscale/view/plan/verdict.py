"""The decision about a launch: the job fits, or these changes make it fit."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from nanoscale.common.devices import Devices
from nanoscale.common.errors import UserError, Violation
from nanoscale.common.units import counted, share
from nanoscale.config.reference import value_of
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.values.provenance import Composed
from nanoscale.plan.hardware.hardware import Hardware
from nanoscale.plan.predict import SURE, Prediction
from nanoscale.plan.search.candidates import SearchSpace
from nanoscale.plan.search.choice import search_space, to_type
from nanoscale.plan.search.search import search
from nanoscale.view.plan.prediction import verdict

PROPOSALS = 3


def require_fit(composed: Composed, plan: Prediction, devices: Devices) -> None:
    """Require that a job fits.

    Raises:
        UserError: it does not fit; of kind `plan`, with the nearest overrides that fit; the command exits with
            3.
    """
    if plan.fits:
        return
    rehearsed = plan.decisive
    margin = rehearsed.total / plan.worst.total if rehearsed is not None else 1.0
    proposed = proposals(composed, plan, devices, max(1.0, margin))
    remedy = "" if proposed else f"; {would_take(composed, plan, devices)}"
    raise UserError("plan", f"{verdict(plan)}{remedy}. Continue with --force", proposed)


def proposals(
    composed: Composed, plan: Prediction, devices: Devices, margin: float = 1.0
) -> list[Violation]:
    """Return what the nearest fitting layouts would take, with the overrides to type.

    Args:
        margin: fit also with so many times the planned memory.
    """
    violations = []
    for near in nearest(composed, plan, devices, margin):
        sizes = share(near.worst.total, near.capacity)
        gain = f"would take {sizes} at {near.time.tokens_per_s_per_gpu:,.0f} tokens/s per device"
        overrides = " ".join(to_type(composed, near.config))
        violations.append(Violation("", None, "plan", gain, (overrides,)))
    return violations


def nearest(
    composed: Composed, plan: Prediction, devices: Devices, margin: float = 1.0
) -> list[Prediction]:
    """Return fitting layouts, sorted by the number of changes, then by time."""
    ranked = search(_space(composed, plan, devices), plan.hardware).ranked
    by_changes = sorted(
        (near for near in ranked if near.worst.total * margin <= near.capacity),
        key=lambda near: (len(to_type(composed, near.config)), near.time.seconds),
    )
    return list(_different(composed, by_changes))[:PROPOSALS]


def remedy(composed: Composed, plan: Prediction, devices: Devices) -> str:
    """Return in one sentence what makes a job fit: other keys on its devices, or else other devices."""
    for near in proposals(composed, plan, devices):
        return f"type {near.suggestions[0]}, which {near.message}"
    return would_take(composed, plan, devices)


def would_take(composed: Composed, plan: Prediction, devices: Devices) -> str:
    """Return in one sentence what a job would take that no layout of its devices fits."""
    space, ways = _space(composed, plan, devices), []
    base, hardware = space.base, plan.hardware
    batch, train = base.train.global_batch, base.train
    if batch % space.world:
        whole = -(-batch // space.world) * space.world
        divisible = replace(base, train=replace(train, global_batch=whole))
        if _fits(replace(space, base=divisible), hardware):
            devices_text = counted(space.world, "device")
            ways.append(
                f"train.global_batch={whole} ({batch:,} is not divisible by {devices_text})"
            )
    for factor in (2**n for n in range(1, 12)):
        world = space.world * factor
        if _fits(replace(space, world=world), hardware):
            hosts = -(-world // hardware.devices_per_host)
            on = f"{counted(hosts, 'host')} of {hardware.devices_per_host}"
            ways.append(f"{counted(world, 'device')} ({on})")
            break
    for override, changed in _changes(base):
        if _fits(replace(space, base=changed), hardware):
            ways.append(override)
    if base.backend.name == "native" and base.optimizer.name == "adamw" and not base.lora.rank:
        offloading = replace(base, backend=replace(base.backend, name="deepspeed", compile="off"))
        best = search(replace(space, base=offloading), hardware).best
        if best is not None:
            keys = ("zero.offload_optimizer", "zero.offload_param")
            offloads = [f"{key}=cpu" for key in keys if value_of(best.config, key) == "cpu"]
            stage = f"zero.stage={best.config.zero.stage}"
            ways.append(" ".join(["backend=deepspeed", stage, *offloads]))
    if not ways:
        return f"no layout of these devices fits, nor of {world:,}; it would take larger devices or hosts"
    return f"no layout of these devices fits; it would take {' or '.join(ways)}"


def _changes(base: ResolvedConfig) -> Iterator[tuple[str, ResolvedConfig]]:
    """Yield overrides that need less memory on the same devices, with the configuration that they lead to."""
    if base.checkpoint.asynchronous:
        saving = replace(base.checkpoint, asynchronous=False)
        yield "checkpoint.asynchronous=false", replace(base, checkpoint=saving)
    if base.checkpoint.memory_every:
        saving = replace(base.checkpoint, memory_every=0)
        yield "checkpoint.memory_every=0", replace(base, checkpoint=saving)
    if base.backend.name != "native":
        return
    if base.optimizer.name == "adamw" and not base.lora.rank:
        in_8_bits = replace(base.optimizer, name="adamw8bit")
        yield "optimizer=adamw8bit", replace(base, optimizer=in_8_bits)
    if not base.parallel.offload_activations:
        offloading = replace(base.parallel, offload_activations=True)
        yield "parallel.offload_activations=true", replace(base, parallel=offloading)
    if base.model.init_from is not None and not base.lora.rank:
        yield "lora.rank=16", replace(base, lora=replace(base.lora, rank=16))


def _fits(space: SearchSpace, hardware: Hardware) -> bool:
    return any(plan.fits_probability >= SURE for plan in search(space, hardware).ranked)


def _space(composed: Composed, plan: Prediction, devices: Devices) -> SearchSpace:
    """Return every layout of all devices of all hosts, as one machine.

    SLURM's nodes may have other devices than this host.
    """
    world = plan.config.world_size
    kind: Literal["cpu", "cuda"] = "cpu" if plan.config.launcher.device == "cpu" else "cuda"
    enough = replace(devices, kind=kind, count=max(devices.count, world))
    space = search_space(composed, enough, plan.hardware, world)
    layout = replace(space.base.parallel, activation_memory=None)
    return replace(space, base=replace(space.base, parallel=layout), held=frozenset())


def _different(composed: Composed, ranked: list[Prediction]) -> Iterator[Prediction]:
    """Yield one layout for each set of changed keys: other values of the same keys are left out."""
    seen: set[frozenset[str]] = set()
    for plan in ranked:
        words = to_type(composed, plan.config)
        keys = frozenset(word.strip("'").partition("=")[0] for word in words)
        if words and not any(known <= keys for known in seen):
            seen.add(keys)
            yield plan
