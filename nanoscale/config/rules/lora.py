"""Rules of adapters (`lora`): their purpose, and the layers that support them."""

from __future__ import annotations

from nanoscale.common.units import listed
from nanoscale.config.lora import ATTENTION, FEED_FORWARD, available
from nanoscale.config.rules.resolution import Resolution, Rule
from nanoscale.config.violations import nearest, override

_OFF = "lora.rank=0"
_THEIRS = dict(zip(("q_proj", "k_proj", "v_proj", "o_proj"), ATTENTION, strict=True)) | {
    f"{name}_proj": name for name in FEED_FORWARD
}
"""The layers' names at Hugging Face."""


def check_lora(resolution: Resolution) -> None:
    config = resolution.config
    if not config.lora.rank:
        for key in ("lora.alpha", "lora.targets"):
            on = "lora.rank=16" if config.model.init_from else None
            resolution.refuse_idle("config", key, _OFF, on)
        return
    if config.model.init_from is None:
        message = "trains only adapters, and model.init_from names no base model"
        resolution.refuse("config", "lora.rank", message, "model.init_from=/path/to/model", _OFF)
    if config.lora.alpha == 0:
        message = "scales the adapters: with 0 nothing is trained"
        resolution.refuse("config", "lora.alpha", message, f"lora.alpha={2 * config.lora.rank}")
    if config.precision.fp8:
        message = "multiplies in torchao's layers, which do not support adapters"
        resolution.refuse("config", "precision.fp8", message, "precision=bf16", _OFF)
    if config.lora.targets is not None:
        _check_targets(resolution, config.lora.targets)


RULES = (
    Rule(
        "zero.offload_param",
        ("zero.offload_param", "backend.name", "lora.rank"),
        lambda config: (
            not (
                config.lora.rank
                and config.backend.name == "deepspeed"
                and config.zero.offload_param == "nvme"
            )
        ),
        lambda _: "keeps frozen weights on a disk, and a model cannot be loaded there",
        lambda _: ["zero.offload_param=cpu", _OFF],
    ),
)


def _check_targets(resolution: Resolution, targets: list[str]) -> None:
    model = resolution.config.model
    there = available(model)
    if not targets:
        message = "names no layer: nothing would be trained"
        resolution.refuse("config", "lora.targets", message, "lora.targets=null")
    absent = [name for name in targets if name not in there]
    if absent:
        why = f"a block here has {listed(list(there))}"
        if model.experts and any(name in FEED_FORWARD for name in absent):
            why += ", and experts have no adapters"
        named = [_THEIRS.get(name, name) for name in targets]
        meant = [name if name in there else "".join(nearest(name, there)[:1]) for name in named]
        kept = list(dict.fromkeys(name for name in meant if name))
        message = f"names {listed(absent)}, and {why}"
        fewer = override("lora.targets", kept) if kept else None
        resolution.refuse("config", "lora.targets", message, fewer, "lora.targets=null")
    elif len(set(targets)) < len(targets):
        once = override("lora.targets", list(dict.fromkeys(targets)))
        resolution.refuse("config", "lora.targets", "names a layer twice", once)
