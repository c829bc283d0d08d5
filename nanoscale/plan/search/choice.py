"""The step from a user's request to a search space, and from a result to overrides, a recipe and a choice.

The layout of a job whose keys are `auto` is the fastest layout of the search that surely fits its devices.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from nanoscale.common.devices import Devices, detect
from nanoscale.config.hardware.data_sheets import UnknownHardwareError
from nanoscale.config.layout import ACTIVATION_MEMORY, RECOMPUTATION_KEYS, usual_virtual_stages
from nanoscale.config.machines import Host
from nanoscale.config.reference import AUTO, declared, value_of, with_values
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.rules import check
from nanoscale.config.schema import Config
from nanoscale.config.values.provenance import DEFAULT, Composed, Setting
from nanoscale.config.violations import override
from nanoscale.plan.hardware.hardware import Hardware, hardware_of
from nanoscale.plan.predict import Prediction
from nanoscale.plan.search.candidates import SearchSpace
from nanoscale.plan.search.search import SearchResult, axes, search

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
    is_foreign = composed.config.model.source == "hf"
    chosen = {key for key in SEARCHED if composed.by_hand(key) or (is_foreign and key in _DIVIDING)}
    held = frozenset(key for key in chosen if value_of(composed.config, key) != AUTO) - {*_FOLLOWS}
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


SOURCE = "chosen by the plan"
"""The source of a chosen value."""
UNPLANNED = "safest on unknown devices"
"""The source of a value on devices that the plan does not know."""
SIMPLER = 0.01
"""The share of the time that a choice gives away for a layout with fewer axes, which is less than the
prediction's error."""
SLOWEST = 1.1
"""A choice leaves out layouts that cannot be as fast as this many times the step of another one."""
_DEGREES = frozenset({"parallel.tp", "parallel.pp", "parallel.cp"})
_STAGE = "zero.stage"
_DP = "parallel.dp"
_DIVIDING = frozenset(f"parallel.{axis}" for axis in ("tp", "pp", "cp", "ep"))
"""Keys of transformers' models that the search keeps: only transformers knows what divides them."""
_MAY_FOLLOW = (*_FOLLOWS, "parallel.checkpoint_every", "zero.nvme_path")
"""Keys that the search may change together with the chosen ones, unless the command line set them."""


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """The layout that the plan chose."""

    plan: Prediction
    result: SearchResult
    world: int
    is_assumed: bool
    """True if the hosts' devices were not named, so the recipe's reference devices are assumed."""


def with_chosen_layout(
    composed: Composed, devices: Devices, hosts: Sequence[Host]
) -> tuple[Composed, LayoutChoice | None]:
    """Return the request with a value for each key that is `auto`, and the choice.

    There is no choice, and the keys have their defaults, on a single CPU rank, on unknown hardware, and if no
    layout is legal; `check` then says which rule is broken. On unknown hardware, several ranks shard all
    states (ZeRO stage 3), and the micro batch is 1.

    Args:
        composed: the request.
        devices: the devices of this machine.
        hosts: the hosts of the job; none if all ranks are on this machine.

    Raises:
        UserError: a setting other than the layout breaks a rule.
    """
    left = composed.left_to_plan
    if not left:
        return composed, None
    is_first = not composed.opened  # a stage that an earlier choice left alone is the user's
    # With parallel=auto the stage is open too, also if published degrees replace all of its own.
    settings = [one for key in _DEGREES for one in composed.history.get(key, ())]
    was_open = any(one.value == AUTO for one in settings)
    if was_open and is_first and not composed.asked_for(_STAGE):
        left |= {_STAGE}
    composed = _without_choice(replace(composed, left_to_plan=left))
    space, hardware, is_assumed = _space(composed, devices, hosts)
    is_bounded = space.base.parallel.activation_memory is not None
    if space.world == 1 and space.base.launcher.device == "cpu" and not is_bounded:
        return composed, None
    if hardware is None:
        # the values that need least memory without tp and pp
        safest: dict[str, object] = {_STAGE: 3} if _STAGE in left and space.world > 1 else {}
        if is_bounded:
            safest |= {RECOMPUTATION_KEYS[0]: "full", ACTIVATION_MEMORY: None}
        if composed.config.train.micro_batch == AUTO:
            safest["train.micro_batch"] = composed.config.train.rows_of_sample
        return _with_values(composed, safest, UNPLANNED), None
    result = search(space, hardware, slowest=SLOWEST)
    plan = _choice(result)
    if plan is None:
        return composed, None
    layout = replace(plan.config.parallel, activation_memory=None)  # the choice is in its place
    chosen = replace(plan.config, parallel=layout)
    return _with_choice(composed, chosen), LayoutChoice(plan, result, space.world, is_assumed)


def _without_choice(composed: Composed) -> Composed:
    """Return the request before an earlier choice: an elastic job chooses again for other hosts."""
    left, opened = composed.left_to_plan, composed.opened
    chosen = (key for key in opened if key not in left and composed.source(key) == SOURCE)
    values = {key: declared()[key].default for key in left} | {key: opened[key] for key in chosen}
    return replace(composed, config=with_values(composed.config, values))


def _space(
    composed: Composed, devices: Devices, hosts: Sequence[Host]
) -> tuple[SearchSpace, Hardware | None, bool]:
    """Return the layouts of all ranks that the request has, and their hardware as `_hardware` does."""
    config, left = composed.config, composed.left_to_plan
    is_open = {key for key in SEARCHED if key in left or value_of(config, key) == AUTO}
    follows = {key for key in _MAY_FOLLOW if not composed.by_hand(key)}
    free = replace(composed, config=with_values(config, {"parallel.dp": AUTO}))
    base = check(free, devices, tuple(hosts), searched=frozenset({_DP, *is_open, *follows}))
    world, held = base.world_size, frozenset(SEARCHED) - is_open - follows
    base = replace(base, launcher=replace(base.launcher, devices=world))
    if base.model.source == "hf":
        held |= _DIVIDING
    if (dp := config.parallel.dp) != "auto":
        held |= {_DP}
        base = replace(base, parallel=replace(base.parallel, dp=dp))
    hardware, is_assumed = _hardware(base)
    slots = {host.slots for host in hosts}
    if hardware is not None and len(slots) == 1:  # maybe not all devices of a host
        used = slots.pop()
        hardware = replace(hardware, devices_per_host=used, island=min(hardware.island, used))
    island = hardware.island if hardware is not None else world
    space = SearchSpace(base, world, island, held, config.backend.compile == AUTO)
    return space, hardware, is_assumed


def _hardware(base: ResolvedConfig) -> tuple[Hardware | None, bool]:
    """Return the devices of the job, and True if they are assumed; None if they are unknown.

    If the devices of other hosts were not named, the recipe's reference devices are assumed.
    """
    with suppress(UnknownHardwareError):
        return hardware_of(base), False
    names = [word.partition("=")[2] for word in base.cluster.reference if word[:8] == "cluster="]
    if base.cluster.device is None and detect().kind == "cpu" and names:
        cluster = replace(base.cluster, device=names[0])
        with suppress(UnknownHardwareError):
            return hardware_of(replace(base, cluster=cluster)), True
    return None, False


def _choice(result: SearchResult) -> Prediction | None:
    """Return the fastest layout that may be chosen, or an almost as fast one with fewer axes.

    If no layout does, return the one that most probably fits, or the one that is closest to fitting.
    """
    sure = [plan for plan in result.ranked if plan.may_be_chosen]
    if not sure:
        return max(result.ranked, key=lambda plan: plan.fits_probability, default=result.nearest)
    fastest = min(plan.time.seconds for plan in sure)
    close = [plan for plan in sure if plan.time.seconds <= fastest * (1 + SIMPLER)]
    return min(close, key=lambda plan: (axes(plan), plan.time.seconds))


def _with_choice(composed: Composed, chosen: ResolvedConfig) -> Composed:
    """Return the request with the chosen values, and their source."""
    keys = [
        key
        for key in (*SEARCHED, ACTIVATION_MEMORY)
        if key in composed.left_to_plan or value_of(composed.config, key) != value_of(chosen, key)
    ]
    opened = {key: value_of(composed.config, key) for key in keys}
    changed = _with_values(composed, {key: value_of(chosen, key) for key in keys}, SOURCE)
    return replace(changed, opened={**composed.opened, **opened})


def _with_values(composed: Composed, values: Mapping[str, object], source: str) -> Composed:
    history = dict(composed.history)
    for key, value in values.items():
        history[key] = [*history.get(key, ()), Setting(value, source)]
    config = with_values(composed.config, values)
    return replace(composed, config=config, history=history)
