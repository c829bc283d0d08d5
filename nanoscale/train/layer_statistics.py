"""Statistics of each layer at one step: norms of weights and gradients, sizes of activations and scores."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nanoscale.backends.gradients import local_tensor
from nanoscale.backends.native import NativeEngine
from nanoscale.backends.qk_clip import largest_scores
from nanoscale.models.moe import is_recomputed
from nanoscale.runs import fence, jsonlines
from nanoscale.runs.directory import RunDirectory

WEIGHT, GRADIENT, ACTIVATION, COUNT = range(4)
"""The columns of sums over all ranks: squares, and the number of activations."""
LARGEST, SCORE = range(2)
"""The columns of maxima over all ranks."""


class LayerStatistics:
    """A watcher of a rank's layers, which costs nothing in steps that it does not watch."""

    def __init__(self, engine: NativeEngine) -> None:
        self._engine = engine
        layers = [f"layers.{number}" for number in range(engine.config.model.layers)]
        names = ["embed", "positions", *layers, "norm", "head"]
        self._rows = {name: i for i, name in enumerate(names)}
        self._watches = False
        engine.before_update(self._read_parameters)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the step in the body. Compiled blocks are not compiled in it: their insides are watched."""
        size, device = len(self._rows), self._engine.device
        self._sums = torch.zeros(size, 4, dtype=torch.float64, device=device)
        self._maxima = torch.full((size, 2), -math.inf, dtype=torch.float64, device=device)
        hooks = list(self._hooks())
        self._watches = True
        try:
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            self._watches = False
            for hook in hooks:
                hook.remove()

    def write(self, workspace: Path, rank: int, step: int, grad_norm: float) -> None:
        """Append the statistics of the watched step to the run's file.

        By module, they are `weight_norm`, `grad_norm`, and of layers the root mean square and the largest size
        of what they return, and the largest score of their attention.

        Every rank calls it. `grad_norm` is the whole model's before clipping; null stands for what is
        not known.
        """
        if dist.is_initialized():
            dist.all_reduce(self._sums)
            dist.all_reduce(self._maxima, dist.ReduceOp.MAX)
        columns = torch.cat(
            (self._sums, self._maxima), dim=1
        ).tolist()  # the only wait for the device
        clipped = math.sqrt(sum(row[GRADIENT] for row in columns))
        factor = grad_norm / clipped if clipped else math.nan
        found: dict[str, dict[str, float | None]] = {}
        for name, row in zip(self._rows, columns, strict=True):
            weight, gradient, activation, count, largest, score = row
            values = {
                "weight_norm": math.sqrt(weight),
                "grad_norm": math.sqrt(gradient) * factor,
                "rms": math.sqrt(activation / count) if count else math.nan,
                "largest": largest,
                "score": score,
            }
            if weight or gradient:  # else the model has no such module
                found[name] = {key: it if math.isfinite(it) else None for key, it in values.items()}
        if rank == 0:
            _append(workspace, {"step": step, "modules": found})

    @torch.no_grad()
    def _read_parameters(self) -> None:
        if not self._watches:
            return
        replicas = {name: len(ranks) for name, ranks, _ in self._engine.replicated()}
        for name, parameter in self._engine.parameters():
            parts = name.split(".")
            row = self._rows[".".join(parts[:2]) if parts[0] == "layers" else parts[0]]
            for column, value in ((WEIGHT, parameter), (GRADIENT, parameter.grad)):
                if value is not None:
                    square = local_tensor(value).double().square().sum()
                    self._sums[row, column] += square / replicas[name]

    def _hooks(self) -> Iterator[Any]:
        for stage in self._engine.stages.values():
            for number, layer in stage.layers.items():
                row = self._rows[f"layers.{number}"]
                if number == "0":
                    yield layer.register_forward_pre_hook(self._read_embedding)
                yield layer.register_forward_hook(partial(self._read_result, row))
                if self._engine.config.parallel.cp == 1:  # else no rank has all keys
                    core = layer.get_submodule("attention.core")
                    yield core.register_forward_pre_hook(partial(self._read_scores, row))

    def _read_embedding(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._read_result(self._rows["embed"], layer, (), inputs[0])

    @torch.no_grad()
    def _read_result(self, row: int, _: nn.Module, inputs: tuple[Any, ...], result: Tensor) -> None:
        if is_recomputed():
            return
        values = local_tensor(result).double()
        self._sums[row, ACTIVATION] += values.square().sum()
        self._sums[row, COUNT] += values.numel()
        self._maxima[row, LARGEST] = torch.maximum(self._maxima[row, LARGEST], values.abs().max())

    @torch.no_grad()
    def _read_scores(self, row: int, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        if is_recomputed():
            return
        q, k, _v, mask = inputs
        largest = largest_scores(q, k, mask).max()
        self._maxima[row, SCORE] = torch.maximum(self._maxima[row, SCORE], largest)


def _append(workspace: Path, record: dict[str, Any]) -> None:  # a rehearsal replaces it
    fence.require(workspace)
    jsonlines.append(RunDirectory(workspace.parents[1]).statistics, record)
