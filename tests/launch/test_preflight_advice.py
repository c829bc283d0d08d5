"""Overrides that a preflight check advises are typed back, and the same check is then passed."""

from __future__ import annotations

import re
import shlex

import pytest

from nanoscale.common.devices import Devices
from nanoscale.config.rules import check
from nanoscale.config.schema import Config
from nanoscale.launch.fleet.connections import Member
from nanoscale.launch.preflight.preflight import judge
from tests.launch.test_preflight import change, members
from tests.support.recipes import changed

GPUS = Devices("cuda", 8, ("H200",) * 8)
SSH = ("launcher.name=ssh", "launcher.device=cuda")
V100 = ["Tesla V100-SXM2-32GB"] * 8
OLD_TORCH: dict[str, object] = {"version": "2.13.0+cpu", "cuda": None, "architectures": []}
NO_CC = {"path": None, "problem": "no gcc or clang"}
OVERRIDE = re.compile(r"'[a-z]+\.[^']+'|\b[a-z]+(?:\.[a-zA-Z_]+)*=[\w./-]+")
"""an override within a sentence"""

CASES: list[tuple[str, str, object, str, tuple[str, ...]]] = [
    ("a GPU without bf16", "devices.names", V100, "precision", ("precision=bf16",)),
    ("torch without CUDA", "gpu_software.torch", OLD_TORCH, "CUDA", ()),
    ("no compiler", "gpu_software.compiler", NO_CC, "compiler", ("backend.compile=on",)),
    ("no compiler", "gpu_software.compiler", NO_CC, "compiler", ("optimizer=adamw8bit",)),
    ("no TensorBoard", "optional_packages", ["triton"], "tensorboard", ("logger=tensorboard",)),
    ("no torchao", "optional_packages", ["triton"], "torchao", ("optimizer=adamw8bit",)),
    ("no torchao", "optional_packages", ["triton"], "torchao", ("precision=fp8",)),
    ("no GPU", "devices", {"kind": "cpu", "count": 0, "names": [], "cores": 8}, "devices", ()),
]
"""the fault, the fact of a host that shows it, the check that finds it, and the job's overrides"""
FACTS: list[tuple[str, object, str, tuple[str, ...]]] = [
    ("root.problem", "read-only", "run.root", ()),
    ("root.visible", False, "run.root", ()),
    ("root.free_gib", 0.0, "run.root", ()),
    ("cache.problem", "read-only", "cache", ()),
    ("cache.free_gib", 0.0, "cache", ()),
    ("compile_cache.problem", "read-only", "compile cache", ("backend.compile=on",)),
    ("network.found", [], "network", ()),
    ("network.found", ["127.0.0.1"], "network", ()),
    ("port", None, "port", ("launcher.master_port=5000",)),
    ("versions.nanoscale", "0.0.9 (x)", "nanoscale", ()),
    ("versions.python", "3.10.1", "python", ()),
]
"""facts that another folder, address or interpreter changes: their overrides are accepted as they are"""


def job(*words: str) -> Config:
    """A job on the hosts of `members`, as it was typed."""
    return changed(*SSH, *words).config


def the_remedy(them: list[Member], config: Config, name: str) -> str:
    (verdict,) = [it for it in judge(them, config) if it.check == name and not it.good]
    return verdict.remedy


def typed(words: tuple[str, ...], remedy: str) -> list[tuple[str, ...]]:
    """Return the job's words with each override of a remedy in place of the one that it replaces."""
    found = [word for text in OVERRIDE.findall(remedy) for word in shlex.split(text)]
    groups = [{word.partition("=")[0].partition(".")[0]} for word in found]
    kept = [
        tuple(it for it in words if it.partition("=")[0].partition(".")[0] not in group)
        for group in groups
    ]
    return [(*rest, word) for rest, word in zip(kept, found, strict=True)]


@pytest.mark.parametrize(("_name", "fact", "value", "name", "words"), CASES)
def test_the_check_is_passed_with_what_it_advises(
    _name: str, fact: str, value: object, name: str, words: tuple[str, ...]
) -> None:
    them = members(1)
    change(them[0], fact, value)
    lines = typed(words, the_remedy(them, job(*words), name))
    others = [line for line in lines if not line[-1].startswith("launcher.env.CC=")]
    assert others
    for line in others:
        assert all(it.good for it in judge(them, job(*line)) if it.check == name), line
    for line in lines:
        on = Devices("cpu", 8) if "launcher.device=cpu" in line else GPUS
        check(changed("launcher.name=local", *line), on)


@pytest.mark.parametrize(("fact", "value", "name", "words"), FACTS)
def test_an_override_for_a_host_is_accepted(
    fact: str, value: object, name: str, words: tuple[str, ...]
) -> None:
    them = members(3)
    change(them[0 if fact == "port" else 1], fact, value)
    lines = typed((), the_remedy(them, job(*words), name))
    assert lines
    for (word,) in lines:
        changed(word)
