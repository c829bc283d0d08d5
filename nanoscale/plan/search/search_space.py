"""The step from a user's request to a search space, and from a result to overrides and a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import asdict, replace
from typing import Any

from nanoscale.common.devices import Devices
from nanoscale.config.layout import ACTIVATION_MEMORY, usual_virtual_stages
from nanoscale.config.reference import value_of, with_values
from nanoscale.config.rules import check
from nanoscale.config.schema import Config
from nanoscale.config.values.provenance import DEFAULT, Composed
from nanoscale.config.violations import override
from nanoscale.plan.hardware.hardware import Hardware
from nanoscale.plan.search.candidates import SearchSpace

SEARCHED = (
    "parallel.dp_replicate",
    "parallel.tp",
    "parallel.pp",
    "parallel.cp",
    "parallel.cp_method",
    "parallel.ep",
    "parallel.ep_over_tp",
    "parallel.sequence_parallel",
    "parallel.schedule",
    "parallel.virtual_stages",
    "parallel.layers_per_stage",
    "parallel.activation_checkpointing",
    "parallel.checkpoint_every",
    "parallel.selective_keep",
    "zero.stage",
    "zero.offload_optimizer",
    "zero.offload_param",
    "zero.nvme_path",
    "train.micro_batch",
    "backend.compile",
)
"""Keys that a search sets. dp follows from the other degrees."""
_FOLLOWS = ("parallel.sequence_parallel", "parallel.layers_per_stage", "backend.compile")
"""Keys that a search sets and whose values follow from other keys."""


def search_space(
    composed: Composed, devices: Devices, hardware: Hardware, world: int | None = None
) -> SearchSpace:
    """Return the search space: every layout of all the devices, with the keys set on the command line held.

    Raises:
        UserError: a setting other than the layout breaks a rule.
    """
    held = frozenset(
        key
        for key in SEARCHED
        if key not in _FOLLOWS
        and composed.by_hand(key)
        and value_of(composed.config, key) != "auto"
    )
    open_keys = frozenset({"parallel.dp", *SEARCHED}) - held - {"backend.compile"}
    plain = Config()
    neutral = with_values(composed.config, {key: value_of(plain, key) for key in open_keys})
    if world:  # of several hosts; launcher.devices counts for each of them
        neutral = with_values(neutral, {"launcher.devices": "auto"})
    base = check(replace(composed, config=neutral), devices, searched=open_keys)
    world = world or devices.count
    threads = composed.config.launcher.threads
    each = max(1, devices.cores // world) if threads == "auto" else threads
    return SearchSpace(
        base=replace(base, launcher=replace(base.launcher, devices=world, threads=each)),
        world=world,
        island=hardware.island,
        held=held,
        resets_compile=composed.config.backend.compile == "auto",
    )


def to_type(composed: Composed, chosen: Config) -> list[str]:
    """Return the overrides that lead from the request to the chosen layout."""
    left = composed.left_to_plan - composed.opened.keys()
    in_option = {
        key
        for key in left
        if key.startswith("parallel.")
        and not composed.by_hand(key)
        and composed.source(key) != DEFAULT
    }
    words = ["parallel=dp"] if in_option else []  # in place of parallel=auto
    if composed.config.backend.name != chosen.backend.name:
        words.append(override("backend.name", chosen.backend.name))
    return [*words, *_changes(composed.config, chosen, left - in_option)]


def recipe_of(composed: Composed, chosen: Config) -> str:
    """Return a recipe of the job in the chosen layout: every value that differs from the default."""
    from nanoscale.config.composing.compose import compose
    from nanoscale.config.values.yaml_file import to_yaml

    usual = asdict(compose([]).config)
    asked = with_values(composed.config, {ACTIVATION_MEMORY: None})
    changed = [typed.strip("'").partition("=")[0] for typed in _changes(asked, chosen)]
    asked = with_values(asked, {key: value_of(chosen, key) for key in changed})
    overrides = " ".join(to_type(composed, chosen))
    values = _without(asdict(asked), usual)
    values.get("run", {}).pop("name", None)
    return (
        f"# As found by `nanoscale plan --search`: {overrides or 'the request'}\n{to_yaml(values)}"
    )


def _without(values: dict[str, Any], usual: dict[str, Any]) -> dict[str, Any]:
    """Return the values that differ from the usual ones, section by section."""
    different: dict[str, Any] = {}
    for key, new in values.items():
        old = usual.get(key)
        if isinstance(new, dict) and isinstance(old, dict):
            inner = _without(new, old)
            if inner:
                different[key] = inner
        elif new != old:
            different[key] = new
    return different


def _changes(asked: Config, chosen: Config, always: Set[str] = frozenset()) -> Iterator[str]:
    layout = chosen.parallel
    usual = {
        "parallel.virtual_stages": usual_virtual_stages(layout.schedule) if layout.pp > 1 else 1,
        "backend.compile": chosen.backend.compile,
    }
    if asked.parallel.activation_memory is not None:
        yield override(ACTIVATION_MEMORY, None)
    if asked.parallel.dp not in ("auto", layout.dp):
        yield override("parallel.dp", layout.dp)
    for key in SEARCHED:
        before, after = value_of(asked, key), value_of(chosen, key)
        follows = before == "auto" and usual.get(key) == after
        if (before != after and not follows) or key in always:
            yield override(key, after)
