"""The training loop of a rehearsed job, with equal samples and without files of checkpoints."""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from nanoscale.backends.base import Engine
from nanoscale.checkpoint import saver, sharded, staging, store
from nanoscale.checkpoint.hf import load
from nanoscale.checkpoint.sharded import Description, describe
from nanoscale.config.dtypes import DTYPES
from nanoscale.config.hf.safetensors_headers import Stored
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Guard
from nanoscale.data.batch import Batch
from nanoscale.data.dataset import Dataset, Validation
from nanoscale.metrics.meter import Meter
from nanoscale.parallel import process_group
from nanoscale.rehearse.played.patches import Patches
from nanoscale.train import layer_statistics
from nanoscale.train.checkpointing import Progress
from nanoscale.train.loop import Training


@dataclass
class Disk:
    """The tensors of the last checkpoint of a rehearsed job, which is not written to a file."""

    tensors: Description | None = None
    """Shape and dtype of each of this rank's tensors; None before the first checkpoint."""

    def patch(
        self, patches: Patches, during: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        """Describe checkpoints instead of writing them, and read only the headers of weights.

        Args:
            during: a context that is entered while a checkpoint is written in the background.
        """

        def at_once(act: Callable[[], Any]) -> Future[Any]:
            outcome: Future[Any] = Future()
            with during():  # the memory of a thread would not be counted
                outcome.set_result(act())
            return outcome

        def saving(save: Callable[..., Path]) -> Callable[..., Path]:
            def call(workspace: Path, state: dict[str, Tensor], *about: Any) -> Path:
                self.tensors = describe(state)
                return save(workspace, state, *about)

            return call

        patches.wrap(sharded, "save", saving)
        patches.replace(sharded, "_prepare", ignore)
        patches.replace(sharded, "_written_by", lambda *_: [])
        patches.replace(dcp, "save", ignore)
        patches.replace(store, "publish", ignore)
        patches.replace(store, "sum_files", lambda _: {})
        patches.replace(store, "prune", lambda *_: store.Pruned([], {}))
        patches.replace(process_group, "gather", _gather)
        patches.replace(process_group, "broadcast", _broadcast)
        patches.replace(saver.Saver, "prepare", ignore)  # the only save follows the last step
        for module in (saver, staging):
            patches.replace(module, "in_thread", at_once)
        patches.replace(load, "read_part", _without_numbers)
        patches.replace(layer_statistics, "_append", ignore)


def _gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather a byte in place of an object, whose size may differ between ranks."""
    if dist.is_initialized():
        byte = torch.zeros(1, dtype=torch.uint8)
        dist.all_gather([byte.clone() for _ in range(dist.get_world_size())], byte, group)
    return [value] * process_group.world_size()


def _broadcast(read: Callable[[], Any], group: dist.ProcessGroup | None = None) -> Any:
    """Broadcast a byte in place of what `read` returns, which is the same on every rank here."""
    if dist.is_initialized():
        dist.broadcast(torch.zeros(1, dtype=torch.uint8), 0, group)
    return read()


def _without_numbers(_: Any, tensor: Stored, slices: tuple[slice, ...]) -> Tensor:
    """Return an empty tensor with the shape and dtype of a slice of a file's tensor."""
    shape = tensor.shape
    sizes = [len(range(*each.indices(size))) for each, size in zip(slices, shape, strict=False)]
    dtype = torch.bfloat16 if tensor.scales else _BY_SAFETENSORS[tensor.dtype]
    return torch.empty([*sizes, *shape[len(sizes) :]], dtype=dtype)


_BY_SAFETENSORS = {
    dtype.safetensors_name: getattr(torch, dtype.torch_name) for dtype in DTYPES.values()
}


def shortened(config: ResolvedConfig, steps: int) -> ResolvedConfig:
    """Return the configuration with `steps` steps. Evaluation and checkpoint, if any, follow the last.

    Replicas are not compared, because simulated tensors have no bits.
    """
    train, checkpoint = config.train, config.checkpoint
    saves = checkpoint.every > 0 or bool(checkpoint.every_minutes)
    every = steps if train.eval_every else 0
    one_batch = config.parallel.dp * train.micro_batch
    train = replace(train, steps=steps, log_every=steps, eval_every=every, eval_samples=one_batch)
    train = replace(train, eval_tasks=[], eval_tasks_dir=None, eval_tasks_limit=None)
    checkpoint = replace(
        checkpoint,
        best_metric="eval_loss",
        every=steps if saves else 0,
        every_minutes=None,
        upload=None,
    )
    return replace(config, train=train, checkpoint=checkpoint, guard=Guard(every=0))


class EqualSamples:
    """Samples that are all token 0."""

    def __init__(self, config: ResolvedConfig) -> None:
        rows = np.zeros((config.train.micro_batch, config.train.seq_len + 1), dtype=np.int64)
        one = Batch.of_rows(rows)
        if config.data.document_mask:
            length = config.data.document_length or config.train.seq_len
            numbers = np.arange(config.train.seq_len) // length
            documents = np.broadcast_to(numbers, one.inputs.shape)
            one = Batch(one.inputs, one.targets, documents)
        if config.train.is_of_answers:
            one = replace(one, references=np.zeros((len(one), 2)))
            self.rows = config.train.rows_of_sample
        if config.train.objective == "kto":
            one = replace(one, unmatched=one)
        self._valid = one
        if config.train.is_distilled:
            shape = (*one.inputs.shape, config.train.distill_top_k, 2)
            one = replace(one, references=np.zeros(shape))
        self._dp = config.parallel.dp
        self.batches = [one] * config.accumulation
        """The micro batches of every step."""

    def are_ready(self, end: int) -> bool:
        return True

    def micro_batches(self, *_: int) -> list[Batch]:
        return self.batches

    def valid_batches(self, *_: int) -> list[tuple[Batch, int]]:
        return [(self._valid, len(self._valid))]

    def evaluated(self, samples: int) -> int:
        return samples

    def __len__(self) -> int:
        """Return the samples of answers in a micro batch of all ranks."""
        return len(self.batches[0]) // self.rows * self._dp

    def batch(self, _: list[int]) -> Batch:
        return self.batches[0]


def training_of(config: ResolvedConfig, engine: Engine, rank: int) -> tuple[Training, EqualSamples]:
    """Return the training loop of a rank and its samples; `config` is a `shortened` one."""
    samples: Any = EqualSamples(config)
    training = Training(
        workspace=Path(),
        config=config,
        engine=engine,
        data=Dataset(None, samples, (Validation("", 1.0, samples),), "", "equal samples"),
        progress=Progress(),
        rank=rank,
        meter=Meter(config, config.world_size, engine.device),
        sinks=[],
        note=ignore,
    )
    return training, samples


def ignore(*_: Any, **__: Any) -> None:
    """Record no event."""
