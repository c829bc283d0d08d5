"""Configurations and machines for the tests of the planner, built without asking Hydra."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from typing import Any

from nanoscale.config.composing.compose import compose
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Cluster, Config, Model, Parallel, Precision, Train
from nanoscale.plan.hardware.hardware import Hardware, hardware_of
from tests.support.recipes import complete

BF16 = Precision(compute="bf16")


@cache
def model(name: str) -> Model:
    shape = compose([f"model={name}"]).config.model
    return replace(shape, head_dim=shape.head_width)


def job(name: str = "llama-8b", device: str = "h100-sxm", **keys: Any) -> ResolvedConfig:
    """Return a resolved configuration; a key belongs to train or parallel, whichever has it."""
    train = Train(global_batch=16, micro_batch=1, seq_len=8192, steps=1)
    layout = Parallel(dp=8, virtual_stages=1)
    of_train = {field.name for field in fields(Train)} & keys.keys()
    of_layout = {field.name for field in fields(Parallel)} & keys.keys()
    rest = keys.keys() - of_train - of_layout
    return complete(
        train=replace(train, **{key: keys[key] for key in of_train}),
        parallel=replace(layout, **{key: keys[key] for key in of_layout}),
        **{
            "model": model(name),
            "precision": BF16,
            "cluster": Cluster(device=device),
            **{key: keys[key] for key in rest},
        },
    )


def changed(hardware: Hardware, **values: Any) -> Hardware:
    """Other hardware; what belongs to its efficiency goes there."""
    inner = {field.name for field in fields(hardware.efficiency)} & values.keys()
    efficiency = replace(hardware.efficiency, **{key: values.pop(key) for key in inner})
    return replace(hardware, efficiency=efficiency, **values)


@cache
def machine(device: str = "h100-sxm") -> Hardware:
    old = ("v100", "v100-16", "t4")
    precision = Precision(compute="fp16") if device in old else BF16
    return hardware_of(Config(cluster=Cluster(device=device), precision=precision))
