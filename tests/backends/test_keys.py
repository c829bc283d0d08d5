"""Law 5: for every key that concerns a backend, the engine reads the value, or the rules limit it."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoscale.config import reference
from nanoscale.config.deepspeed import deepspeed_settings
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.rules.backends import OUTSIDE, table
from nanoscale.config.schema import Backend, Lora, Optimizer, Precision, RopeScaling, Zero
from nanoscale.data.batch import Batch
from nanoscale.parallel import process_group
from nanoscale.parallel.kernel_choice import set_kernels
from nanoscale.train.job import make_engine
from tests.support import hf_models
from tests.support.jobs import SHAPE, make_config, write_tokens
from tests.support.layouts import GPT2, GROUPED, MLA, MOE
from tests.support.ranks import run_ranks

NAMES = {
    "backend.empty_cache",
    "model.name",
    "backend.name",
    "model.sliding_window",
    "model.parameters",
    "lora.init_from",
    "parallel.activation_memory",
}
"""The key of the training loop, a name, the engine's choice, a limit of sequences that a rule applies, a count,
a folder that the training job reads, and a bound in whose place the plan freezes a choice."""

ROPE = replace(SHAPE, rope_scaling=RopeScaling(factor=2.0))
YARN = replace(SHAPE, rope_scaling=RopeScaling(2.0, kind="yarn", attention_factor=1.1))
FACTORS = [1.0] * (SHAPE.head_width // 2)
LONGROPE = RopeScaling(2.0, kind="longrope", short_factor=FACTORS, long_factor=FACTORS)
JOBS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    # make_config's arguments, whole sections
    ({"model": ROPE}, {}),
    ({"model": YARN}, {}),
    ({"model": replace(SHAPE, rope_scaling=LONGROPE)}, {}),
    ({"model": replace(SHAPE, rope_scaling=replace(LONGROPE, original_seq_len=4))}, {}),
    ({"model": GPT2}, {"optimizer": Optimizer("sgd", 1e-2)}),
    ({"model": MOE}, {}),
    ({"model": GROUPED}, {}),
    ({"model": MLA}, {}),
    ({"parallel": {"pp": 2}}, {"zero": Zero(1)}),
    ({"parallel": {"tp": 2, "sequence_parallel": False}}, {}),
    ({"parallel": {"cp": 2}, "lora": Lora(rank=2, targets=["wq"])}, {}),
    ({"dp": 2, "stage": 3}, {"zero": Zero(3)}),
    ({"parallel": {"activation_checkpointing": "full"}}, {}),
    ({"parallel": {"activation_checkpointing": "selective"}}, {}),
    ({}, {"precision": Precision("fp32", "fp16", "fp32"), "zero": Zero(2)}),
]
ONLY_DEEPSPEED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"stage": 3}, {"zero": Zero(3, "cpu", "cpu")})
]
ONLY_NATIVE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"dp": 2, "stage": 2, "dp_replicate": 2}, {}),
    ({}, {"precision": Precision("fp32", "bf16", "fp32", fp8=True)}),
    ({"parallel": {"cp": 2}, "lora": Lora(rank=2, targets=["wq"], dora=True)}, {}),
]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["native", "deepspeed"])
def test_every_key_is_read_or_refused(tmp_path: Path, backend: str) -> None:
    write_tokens(tmp_path)
    read: set[str] = set()
    hf_models.save("gpt_neox", tmp_path / "hf")
    theirs = {"model": hf_models.shape_of(tmp_path / "hf", loaded=False)}
    for arguments, sections in [*JOBS, (theirs, {})] + (
        ONLY_NATIVE if backend == "native" else ONLY_DEEPSPEED
    ):
        config = make_config(tmp_path, **{"precision": "fp32"} | arguments)
        config = replace(config, **sections, backend=Backend(name=backend))  # type: ignore[arg-type]
        world = config.parallel.dp * config.parallel.tp * config.parallel.pp * config.parallel.cp
        read |= run_ranks(keys_read, world, config)[0]
    if backend == "deepspeed":  # a disk needs a library that not every machine has
        disk = replace(config, zero=Zero(3, "nvme", "nvme", "/fast"))
        deepspeed_settings(watched(disk, "", read))
    words = {row[0]: row[1 + (backend == "deepspeed")] for row in table()}
    # Where a key holds in some stages only, it must be read there.
    limited = {key for key, text in words.items() if text != "yes" and not text.startswith("with ")}
    concerned = {key for key in reference.declared() if key.partition(".")[0] not in OUTSIDE}
    if "precision.fp8" in limited:
        limited.add("precision.fp8_recipe")  # which is refused without it
    forgotten = concerned - read - limited - NAMES
    assert not forgotten


def keys_read(rank: int, config: ResolvedConfig) -> set[str]:
    """Return the keys that an engine reads from its creation to the end of one step."""
    process_group.join(config.world_size, torch.device("cpu"), 120.0)
    seen: set[str] = set()
    config = watched(config, "", seen)
    set_kernels(config)
    engine = make_engine(config, torch.device("cpu"))
    micro = torch.randint(
        0, 60, (engine.config.train.micro_batch, config.train.seq_len + 1)
    ).numpy()
    engine.train_step([Batch.of_rows(micro)] * engine.config.accumulation, lr=1e-3)
    return seen


def watched(section: Any, prefix: str, seen: set[str]) -> Any:
    """Return a copy of a section that records the keys that were read."""
    names = {field.name for field in fields(section)}

    def ask(self: Any, name: str) -> Any:
        if name in names:
            seen.add(f"{prefix}{name}")
        return object.__getattribute__(self, name)

    kind = type(type(section).__name__, (type(section),), {"__getattribute__": ask})
    values = {name: object.__getattribute__(section, name) for name in names}
    inner = {
        name: watched(value, f"{prefix}{name}.", seen) if is_dataclass(value) else value
        for name, value in values.items()
    }
    made: Any = object.__new__(kind)
    for name, value in inner.items():
        object.__setattr__(made, name, value)
    return made
