"""Rules of the layout: devices, and the axes dp, tp and cp. Those of pp are in `pipeline`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from nanoscale.config.composing import nodes
from nanoscale.config.rules.hosts import check_slots, first_hosts, refuse_degree, slots_of
from nanoscale.config.rules.pipeline import without_pipeline
from nanoscale.config.rules.resolution import (
    Resolution,
    counted,
    divisors,
    listed,
    near_divisors,
    near_multiples,
)
from nanoscale.config.schema import Model

_PADDING = 128
"""The padding of vocabularies, a multiple of which suits the tiles of a GPU's products."""


@dataclass(frozen=True)
class Layout:
    """The resolved degrees."""

    device: Literal["cpu", "cuda"]
    dp: int
    ranks: int
    """The world size."""


def resolve_layout(resolution: Resolution, model: Model) -> Layout:
    """Check the axes against the devices and the model."""
    device = resolve_device(resolution)
    dp, ranks = (
        _degrees_on_hosts(resolution, device) if resolution.hosts else _degrees(resolution, device)
    )
    _replicas(resolution, dp)
    # If tp must change, it implies nothing for the sequence.
    tp = resolution.config.parallel.tp if _tensor(resolution, model) else 1
    shares = tp if resolution.config.parallel.sequence_parallel else 1
    _context(resolution, model, shares)
    _sequence(resolution, shares)
    return Layout(device, dp, ranks)


def resolve_device(resolution: Resolution) -> Literal["cpu", "cuda"]:
    """Return the device type of the ranks."""
    asked = resolution.config.launcher.device
    if asked == "auto":
        return "cuda" if resolution.remote else resolution.devices.kind
    if asked == "cuda" and resolution.devices.kind != "cuda" and not resolution.remote:
        resolution.refuse(
            "layout", "launcher.device", "is set, and this host has no GPU", "launcher.device=cpu"
        )
    return asked


# --- degrees --------------------------------------------------------------------------------------


def _degrees(resolution: Resolution, device: Literal["cpu", "cuda"]) -> tuple[int, int]:
    """Return the data-parallel degree and the ranks, on this machine."""
    layout, asked = resolution.config.parallel, resolution.config.launcher.devices
    limit = (
        resolution.devices.count if device == "cuda" and resolution.devices.kind == "cuda" else None
    )
    if limit is not None and asked != "auto" and asked > limit:
        message = f"is more than the {counted(limit, 'GPU')} of this host"
        fewer, cpu = f"launcher.devices={limit}", "launcher.device=cpu"
        resolution.refuse("layout", "launcher.devices", message, fewer, cpu)
    copy = layout.tp * layout.pp * layout.cp
    if layout.dp != "auto":
        _fixed_degrees(resolution, layout.dp, copy, limit)
        return layout.dp, layout.dp * copy
    there = asked if asked != "auto" else limit
    if there is None:
        return layout.dp_replicate, layout.dp_replicate * copy
    exact, on_cpu = asked != "auto", resolution.devices.kind == "cpu"
    if there < copy or (exact and there % copy):
        devices = "launcher.devices" if exact else "the GPUs of this host"
        more = f"launcher.devices={copy}" if exact and on_cpu else None
        instead = more if exact else "launcher.device=cpu"
        _too_large(resolution, copy, there, devices, instead, exact=exact)
    dp = max(1, there // copy)
    return dp, dp * copy


def _degrees_on_hosts(resolution: Resolution, device: Literal["cpu", "cuda"]) -> tuple[int, int]:
    """Return the same for given hosts: every slot is a rank."""
    layout, there = resolution.config.parallel, resolution.slots
    check_slots(resolution, device)
    copy = layout.tp * layout.pp * layout.cp
    open_ended = layout.dp == "auto" or nodes.elastic(resolution.config.launcher.nodes)
    dp = max(1, there // copy) if open_ended else layout.dp
    assert isinstance(dp, int)
    if there % copy:
        fewer = first_hosts(resolution, lambda slots: slots % copy == 0)
        _too_large(resolution, copy, there, slots_of(resolution), fewer, exact=True)
    elif dp * copy != there:
        refuse_degree(resolution, dp, copy)
    return dp, dp * copy


def _too_large(
    resolution: Resolution, copy: int, there: int, devices: str, instead: str | None, *, exact: bool
) -> None:
    """Refuse a layout of which one copy does not fit the devices; `exact`: all devices must be used."""
    layout = resolution.config.parallel
    axis = max(("tp", "pp", "cp"), key=lambda name: getattr(layout, name))
    degree = getattr(layout, axis)
    rest = copy // degree
    # A divisor of the degree keeps all other divisibilities of the degree.
    fits = [
        n for n in divisors(degree) if n * rest <= there and (not exact or there % (n * rest) == 0)
    ]
    resolution.refuse(
        "layout",
        f"parallel.{axis}",
        f"makes tp·pp·cp = {copy} ranks for one copy of the model; {devices} = {there} is not a "
        f"multiple of that",
        _with_degree(resolution, axis, fits[-1]) if fits else "parallel=dp",
        instead,
    )


def _fixed_degrees(resolution: Resolution, dp: int, copy: int, limit: int | None) -> None:
    layout, asked = resolution.config.parallel, resolution.config.launcher.devices
    world = dp * copy
    product = f"dp·tp·pp·cp = {dp}·{layout.tp}·{layout.pp}·{layout.cp} = {world} ranks"
    if asked != "auto" and asked != world:
        resolution.refuse(
            "layout",
            "parallel.dp",
            f"makes {product}, and launcher.devices={asked} ({resolution.composed.source('launcher.devices')})"
            " must be the same number",
            f"launcher.devices={world}",
            f"parallel.dp={asked // copy}" if asked % copy == 0 else None,
        )
    if asked == "auto" and limit is not None and world > limit:
        resolution.refuse(
            "layout",
            "parallel.dp",
            f"makes {product}, and this host has {counted(limit, 'GPU')}",
            f"parallel.dp={limit // copy}" if limit >= copy else None,
            "launcher.device=cpu",
        )


def _replicas(resolution: Resolution, dp: int) -> None:
    replicas = resolution.config.parallel.dp_replicate
    if dp % replicas:
        resolution.refuse(
            "layout",
            "parallel.dp_replicate",
            f"must divide parallel.dp, which is {dp}",
            *(f"parallel.dp_replicate={n}" for n in near_divisors(dp, replicas)),
        )
    if replicas > 1 and resolution.config.zero.stage == 0:
        resolution.refuse(
            "layout",
            "parallel.dp_replicate",
            "replicates a sharded model, and zero.stage=0 shards nothing",
            "zero.stage=3",
            "parallel.dp_replicate=1",
        )


# --- divisibility ---------------------------------------------------------------------------------


def _tensor(resolution: Resolution, model: Model) -> bool:
    """True if tp divides the blocks; their rows can be padded."""
    tp = resolution.config.parallel.tp
    if tp == 1:
        resolution.refuse_idle("layout", "parallel.sequence_parallel", "parallel.tp=1")
        return True
    kv_heads = model.kv_heads or model.heads
    parts = {"model.heads": model.heads, "model.kv_heads": kv_heads, "model.ffn": model.ffn}
    loaded = model.init_from is not None  # then no rows can be added
    rows = [number for _, number, _ in _rows(model)] if loaded else []
    common = math.gcd(*parts.values(), *rows)
    broken = [f"{key}={number}" for key, number in parts.items() if number % tp]
    if broken:
        why = "a rank holds whole heads, of keys and values too, and an equal share of the block"
        near = (_with_degree(resolution, "tp", n) for n in near_divisors(common, tp))
        resolution.refuse("layout", "parallel.tp", f"must divide {listed(broken)}: {why}", *near)
        return False
    for key, number, what in _rows(model):
        if number % tp:
            smaller = near_divisors(math.gcd(common, number), tp)[0]
            more = f"unused rows may be added (no {what} uses them)"
            if loaded:
                more = "a loaded model (model.init_from) keeps its number of rows"
            resolution.refuse(
                "layout",
                key,
                f"must be a multiple of parallel.tp={tp}, which divides its rows; {more}",
                None if loaded else f"{key}={_padded(key, number, tp)}",
                _with_degree(resolution, "tp", smaller),
            )
    return True


def _rows(model: Model) -> list[tuple[str, int, str]]:
    """List the tables whose rows tp divides: they can be padded without harm."""
    vocabulary = ("model.vocab", model.vocab, "token")
    positions = ("model.max_seq_len", model.max_seq_len, "position")
    return [vocabulary, positions] if model.position == "learned" else [vocabulary]


def _padded(key: str, number: int, tp: int) -> int:
    step = math.lcm(_PADDING, tp) if key == "model.vocab" else tp
    return -(-number // step) * step


def _with_degree(resolution: Resolution, axis: str, degree: int) -> str:
    """Return the override of an axis, with those that it requires."""
    layout, model = resolution.config.parallel, resolution.config.model
    if axis == "pp" and degree == 1:
        return without_pipeline(resolution)
    words = [f"parallel.{axis}={degree}"]
    if axis == "tp":
        words += [f"{k}={_padded(k, n, degree)}" for k, n, _ in _rows(model) if n % degree]
        if degree == 1 and not layout.sequence_parallel:
            words.append("parallel.sequence_parallel=true")
    if axis == "cp" and degree == 1 and layout.cp_method != "ring":
        words.append("parallel.cp_method=ring")
    return " ".join(words)


def _context(resolution: Resolution, model: Model, shares: int) -> None:
    layout, length = resolution.config.parallel, resolution.config.train.seq_len
    if layout.cp == 1:
        resolution.refuse_idle("layout", "parallel.cp_method", "parallel.cp=1")
        return
    data = resolution.config.data
    if layout.cp_method == "ring" and (data.document_mask or data.packing == "whole"):
        key = "data.packing" if data.packing == "whole" else "data.document_mask"
        resolution.refuse(
            "layout",
            key,
            "keeps attention within documents by a mask, which parallel.cp_method=ring does not "
            "support: it sees keys and values in chunks",
            "parallel.cp_method=ulysses",
            _with_degree(resolution, "cp", 1),
        )
    heads, kv_heads = model.heads, model.kv_heads or model.heads
    if layout.cp_method != "ulysses" or heads % layout.tp or kv_heads % layout.tp:
        return
    own, own_kv = heads // layout.tp, kv_heads // layout.tp
    common = math.gcd(own, own_kv)
    if common % layout.cp:
        fits = length % _multiple_of(layout.cp, shares, ring=True) == 0
        smaller = near_divisors(common, layout.cp)[0]
        resolution.refuse(
            "layout",
            "parallel.cp",
            f"must divide the heads of a rank where parallel.cp_method=ulysses: heads/tp = {own} and "
            f"kv_heads/tp = {own_kv}",
            "parallel.cp_method=ring" if fits else None,
            _with_degree(resolution, "cp", smaller),
        )


def _multiple_of(cp: int, shares: int, *, ring: bool) -> int:
    """Return the divisor that the sequence length needs; a ring's rank has one early and one late chunk."""
    return cp * math.lcm(2 if ring and cp > 1 else 1, shares)


def _sequence(resolution: Resolution, shares: int) -> None:
    """Check the sequence length; `shares` is the number of parts into which tp divides the sequence of a
    rank."""
    layout, length = resolution.config.parallel, resolution.config.train.seq_len
    ring = layout.cp_method == "ring"
    step = _multiple_of(layout.cp, shares, ring=ring)
    if length % step == 0:
        return
    why = []
    if layout.cp > 1:
        pieces = "two chunks" if ring else "one chunk"
        why.append(f"cp={layout.cp} gives every rank {pieces} ({layout.cp_method})")
    if shares > 1:
        why.append(f"tp={shares} divides it again (sequence_parallel)")
    longest = resolution.config.model.max_seq_len
    lengths = [n for n in near_multiples(step, length) if n <= longest]
    whole = length % _multiple_of(layout.cp, 1, ring=ring) == 0
    resolution.refuse(
        "layout",
        "train.seq_len",
        f"must be a multiple of {step}: {listed(why)}",
        *(f"train.seq_len={n}" for n in lengths),
        "parallel.sequence_parallel=false" if whole else None,
        None if lengths else f"train.seq_len={step} model.max_seq_len={step}",
    )
