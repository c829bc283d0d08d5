"""Findings of torch.compile in a job's blocks, made by compiling the blocks of a small job on this CPU.

Dynamo traces the same code for a few narrow blocks, with real tensors and a process group without other ranks.
No code is generated. A graph break is an error of `fullgraph=True`, and a second compilation after the second
step an error of `error_on_recompile`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit, RecompileError, Unsupported

from nanoscale.backends.native import NativeEngine
from nanoscale.common.errors import UserError
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.training_phases import phases_of
from nanoscale.config.translation.miniature import miniature
from nanoscale.rehearse.played.collectives import identity
from nanoscale.rehearse.played.patches import Patches
from nanoscale.rehearse.played.record import PACKAGE
from nanoscale.rehearse.rehearsed_job import EqualSamples

_LINE = re.compile(r'File "([^"]+)", line (\d+)')


def compiler_findings(config: ResolvedConfig) -> list[str]:
    """Return a sentence for the first graph break, or for each reason to compile again after step 2."""
    if config.backend.compile != "on" or config.backend.name != "native":
        return []
    try:
        small, _ = miniature(config, Path("conform"))
    except UserError as error:
        return [f"whether the compiler can trace the blocks was not tried: {error}"]
    # One stage has all blocks: a stage alone would wait for activations that no other stage sends.
    layout = replace(small.parallel, pp=1, virtual_stages=1, layers_per_stage=None)
    compiled = replace(small.backend, compile="on")
    small = replace(small, parallel=layout, backend=compiled)
    traced = partial(torch.compile, backend="aot_eager", fullgraph=True)
    with Patches() as patches, identity(0, small, small.world_size):
        patches.replace(torch, "compile", traced)
        patches.replace(torch._dynamo.config, "error_on_recompile", False)
        try:
            return list(_recompilations(config, small))
        except FailOnRecompileLimitHit as error:
            return [f"the compiler compiles blocks again in every step: {_guard(error)}"]
        except Unsupported as error:
            return [f"the compiler breaks a block in two {_reason(error)}"]
        finally:
            torch._dynamo.reset()


def _recompilations(config: ResolvedConfig, small: ResolvedConfig) -> Iterator[str]:
    """Train some steps of the small job; yield where its blocks are compiled again."""
    engine, batches = NativeEngine(small, torch.device("cpu")), EqualSamples(small).batches
    half = [batch.cut(small.train.seq_len // 2) for batch in batches]
    lengths = {phase.seq_len for phase in phases_of(config.train)}

    def evaluate() -> object:
        return engine.evaluate([(batches[0], len(batches[0]))])

    later: list[tuple[bool, str, Callable[[], object]]] = [
        (True, "in every step", lambda: engine.train_step(batches, 1e-3)),
        (len(lengths) > 1, "for a phase of another length", lambda: engine.train_step(half, 1e-3)),
        (config.train.eval_every > 0, "for every evaluation", evaluate),
    ]
    for _ in range(2):
        engine.train_step(batches, 1e-3)
    evaluate()  # which compiles a block for the forward pass alone
    for is_due, when, act in later:
        torch._dynamo.config.error_on_recompile = is_due
        if is_due:
            try:
                act()
            except RecompileError as error:
                yield f"the compiler compiles blocks again {when}: {_guard(error)}"


def _reason(error: Exception) -> str:
    """Return the line of the job's own code that the compiler cannot trace, and why."""
    text = str(error)
    places = [(file, line) for file, line in _LINE.findall(text) if "/torch/" not in file]
    file, line = places[-1] if places else ("?", "?")
    explanation = re.search(r"Explanation: (.+)", text)
    why = explanation[1] if explanation else text.splitlines()[0]
    return f"at {file.removeprefix(PACKAGE).lstrip('/')}:{line}: {why.strip()}"


def _guard(error: Exception) -> str:
    """Return the guard that failed."""
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip()]
    at = next((number for number, line in enumerate(lines) if "triggered by" in line), 0)
    return lines[min(at + 1, len(lines) - 1)]
