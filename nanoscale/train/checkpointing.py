"""The checkpoints of a training: the progress that a manifest holds, and the events of saved ones.

Replicas are compared by sums over the bits of tensors that the layout keeps equal on several ranks.
"""

from __future__ import annotations

import shlex
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nanoscale.backends.base import Engine
from nanoscale.checkpoint import configuration, store
from nanoscale.checkpoint.memory_writer import MemoryWriter
from nanoscale.checkpoint.saver import Saved, Saver
from nanoscale.common.errors import LostPeerError
from nanoscale.common.units import counted, duration, numbered
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.values.hooks import PARAMETERS, function
from nanoscale.parallel import process_group
from nanoscale.runs.directory import checkpoint_path
from nanoscale.runs.events import Note
from nanoscale.runs.memory_order import read_order as memory_order
from nanoscale.train.evaluations import Evaluations
from nanoscale.train.stability import Spikes


@dataclass
class Progress:
    """The progress of the training: the state to resume from, besides tensors."""

    step: int = 0
    consumed_samples: int = 0
    base: str | None = None
    """The fingerprint of the frozen weights with lora, which no checkpoint holds."""
    evaluations: Evaluations = field(default_factory=Evaluations)
    spikes: Spikes = field(default_factory=Spikes)


@dataclass
class CheckpointWriter:
    """A writer of a training's checkpoints; all ranks call each of its methods at the same steps."""

    workspace: Path
    config: ResolvedConfig
    engine: Engine
    data: str
    """The fingerprint of the data."""
    progress: Progress
    rank: int
    note: Note
    callbacks: Callbacks
    before: CheckpointWriter | None = None
    """The writer of the training before a rollback, whose buffers stay."""

    def __post_init__(self) -> None:
        before, self.before = self.before, None
        if before is None:
            self.saver = Saver(self.workspace, self.config.checkpoint, self.rank)
            self.engine.before_update(self.saver.hold)
            self.memory = self._memory_writer()
        else:
            self.saver, self.memory = before.saver, before.memory
            self.saver.open()
        self.saved_step = self.compared_step = self.progress.step
        self.remembered_step = 0

    def _memory_writer(self) -> MemoryWriter | None:
        if not self.config.checkpoint.memory_every or not (order := memory_order()):
            return None
        writer = MemoryWriter(order, self.rank, partial(self.note, "memory"))
        self.engine.before_update(writer.hold)
        self.engine.before_norm = writer.settle
        return writer

    def prepare(self) -> None:
        """Begin to allocate what the first checkpoints need, while the training continues."""
        self.saver.prepare(self.engine.state)
        if self.memory is not None:
            self.memory.prepare(self.engine.state)

    def save(self, *, waits: bool, by_time: bool) -> None:
        """Write a checkpoint of this step; old ones are deleted.

        Args:
            waits: True if the training waits until it is complete.
            by_time: True if it is saved only because of `checkpoint.every_minutes`.

        Raises:
            OSError: this checkpoint, or the previous one, could not be written.
            FencedError: the run has continued without this rank's attempt.
        """
        progress = self.progress
        manifest = {
            **self._progress(),
            "world_size": self.config.world_size,
            "time": time.time(),
            **({store.BY_TIME: True} if by_time else {}),
            configuration.IN_MANIFEST: configuration.values(self.config),
        }
        self.finish()
        write = self.saver.write if waits else self.saver.begin
        self.report(write(self.engine.state(), manifest))
        self.saved_step = progress.step

    def remember(self) -> None:
        """Write a checkpoint of this step into the hosts' memory, while the training continues.

        Raises:
            SharedMemoryError: the shared memory is too small.
        """
        if self.memory is not None and self.remembered_step != self.progress.step:
            self.memory.begin(self.engine.state(), self._progress())
            self.remembered_step = self.progress.step

    def _progress(self) -> dict[str, Any]:
        progress = self.progress
        return {
            "step": progress.step,
            "consumed_samples": progress.consumed_samples,
            "tokens": progress.consumed_samples * self.config.train.seq_len,
            "data": self.data,
            **progress.evaluations.in_manifest(progress.step),
            **progress.spikes.in_manifest(),
            **({"base": progress.base} if progress.base else {}),
        }

    def finish(self) -> None:
        """Wait for the checkpoint in progress, and report it."""
        self.report(self.saver.finish())

    def report(self, saved: Saved | None) -> None:
        """Record the events of a complete checkpoint, if there is one, and call the user's function."""
        if saved is None:
            return
        message = f"{saved.path.name} saved in {duration(saved.seconds)}"
        if saved.stall_s < saved.seconds:
            message += f", of which the training waited {duration(saved.stall_s)}"
        self.note(
            "checkpoint", message, step=saved.step, seconds=saved.seconds, stall_s=saved.stall_s
        )
        self.callbacks.call("on_checkpoint", saved.step, checkpoint=saved.path)
        for step, reason in saved.undeleted.items():
            path = checkpoint_path(saved.path.parent, step)
            self.note(
                "undeleted",
                f"{path.name} is no longer needed and could not be deleted ({reason}); the training "
                f"continues. To delete it: rm -r {shlex.quote(str(path))}",
                step=step,
            )

    def keep_before_jump(self, jump: str) -> None:
        """Record a jump of the loss, and keep the checkpoints from before it."""
        self.finish()
        if self.rank == 0:
            stored = store.list_checkpoints(self.workspace.parent)
            self.progress.spikes.steps = [checkpoint.step for checkpoint in stored]
        self.note("spike", f"{jump}; the checkpoints from before it are kept")

    def compare_replicas(self) -> None:
        """Raise an error on every rank if ranks differ in what they hold equally, once a step."""
        if self.compared_step != self.progress.step:
            require_equal_replicas(self.engine, self.progress.step)
            self.compared_step = self.progress.step


_SETS = 8
"""The most sets of ranks that a rank shares tensors with: divided by tp or not, of experts or not, replicas of
shards or all ranks with shards."""
_CHUNK = {"cpu": 1 << 16, "cuda": 1 << 22}
"""The integers that are summed at once. Each needs 8 bytes for a moment; on a CPU all fit in the cache."""


class ReplicaError(RuntimeError):
    """This rank has other bits than its replicas: a device, its memory or the code has made an error."""


@torch.no_grad()
def require_equal_replicas(engine: Engine, step: int) -> None:
    """Compare this rank's tensors with its replicas' tensors; every rank calls it after the same step.

    Raises:
        ReplicaError: this rank differs, or one of two replicas does.
        LostPeerError: another rank differs.
    """
    if process_group.world_size() == 1:
        return
    sets: dict[tuple[int, ...], list[tuple[str, Tensor]]] = defaultdict(list)
    replicated = [*engine.replicated()]
    if engine.balance is not None:  # all ranks of a stage have the biases of its routers
        peers = process_group.world_size() // engine.config.parallel.pp
        first = engine.coordinates.pp * peers
        stage, biases = tuple(range(first, first + peers)), engine.balance.state().items()
        replicated += [(f"balance.{name}", stage, [bias]) for name, bias in biases]
    for name, ranks, tensors in replicated:
        if len(ranks) > 1:
            sets[ranks] += [(name, part) for tensor in tensors for part in _sums(tensor)]
    assert len(sets) <= _SETS
    digests = [_weighted_sum(torch.stack([part for _, part in sums])) for sums in sets.values()]
    totals = torch.stack(digests).tolist() if digests else []  # the only wait for the device
    # Ranks that share a set have the same parameters, so a set has the same index on all of its ranks.
    row = [value for ranks, total in zip(sets, totals, strict=True) for value in (ranks[0], total)]
    row += [-1, 0] * (_SETS - len(sets))
    differing = _differing(process_group.gather_numbers(row, torch.int64).tolist())
    if differing is None:
        return
    index, wrong, members = differing
    local = list(sets.values())[index] if process_group.rank() in members else []
    by_rank = process_group.gather([(name, part.item()) for name, part in local])
    compared = zip(*(by_rank[member] for member in members), strict=True)
    first = next(same[0][0] for same in compared if len(set(same)) > 1)
    text = f"{_named(wrong, members)} at step {step}; the first parameter that differs is {first}"
    if process_group.rank() in wrong:
        raise ReplicaError(text)
    raise LostPeerError(f"a peer was lost: {text}")


def _differing(rows: list[list[int]]) -> tuple[int, list[int], list[int]] | None:
    """Return a set of ranks that do not agree: its index, the ranks that differ from the majority, and all its
    ranks. Return None if all sets agree. Without a majority, all ranks of the set differ.

    Args:
        rows: for each rank, the first rank of each of its sets, followed by the digest of that set.
    """
    for index in range(_SETS):
        sets: dict[int, dict[int, int]] = defaultdict(dict)
        for rank, row in enumerate(rows):
            sets[row[2 * index]][rank] = row[2 * index + 1]
        for digests in sets.values():  # the set of -1 has equal digests
            common, count = Counter(digests.values()).most_common(1)[0]
            if count < len(digests):
                majority = 2 * count > len(digests)
                wrong = [r for r, digest in digests.items() if not majority or digest != common]
                return index, wrong, list(digests)
    return None


def _named(wrong: list[int], members: list[int]) -> str:
    text = f"{numbered('rank', wrong)} differ{'s' * (len(wrong) == 1)}"
    if others := len(members) - len(wrong):
        return f"{text} from the {counted(others, 'other replica')} of the same tensors"
    return f"{text} in tensors that must be equal"


def _sums(tensor: Tensor) -> Iterator[Tensor]:
    """Yield 64 bits of each chunk of a plain tensor. One flipped bit always changes them."""
    # A view of one element keeps a stride that is not 1, so it is set here.
    bits = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    if bits.storage_offset() % 4:
        bits = bits.clone()
    whole = bits.numel() // 4 * 4
    for words in (bits[:whole].view(torch.int32), bits[whole:]):
        chunks = words.split(_CHUNK[tensor.device.type])
        yield from (_weighted_sum(chunk) for chunk in chunks if len(chunk))


def _weighted_sum(integers: Tensor) -> Tensor:
    """Return the sum of the integers of a chunk, modulo 2 ** 64, each times an odd number of its position."""
    return (integers * _weights(integers.device)[: len(integers)]).sum()


@cache
def _weights(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    count = _CHUNK[device.type]
    return (torch.randint(2**62, (count,), generator=generator) * 2 + 1).to(device)


@dataclass(frozen=True)
class StepMoment:
    """The state of the training when a callback is called, on every rank."""

    step: int
    """The optimizer steps of the run until now."""
    rank: int
    config: ResolvedConfig
    run: Path
    """The run directory."""
    modules: list[nn.Module]
    """This rank's stages of the model, with parameters in the layout's shards."""
    metrics: Mapping[str, Any] | None = None
    """The line of metrics.jsonl, in steps that are logged; after an evaluation with its losses."""
    checkpoint: Path | None = None
    """on_checkpoint: the complete checkpoint."""


@dataclass(frozen=True)
class Callbacks:
    """The functions of a job by their names; each is called by all ranks at the same point."""

    functions: dict[str, Callable[[StepMoment], Any]] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    """The values of a moment that stay."""

    def call(self, name: str, step: int, **values: Any) -> None:
        """Call a function if the job has it."""
        if name in self.functions:
            self.functions[name](StepMoment(step, **self.about, **values))


def make_callbacks(config: ResolvedConfig, run: Path, rank: int, engine: Engine) -> Callbacks:
    """Return the callbacks of a rank."""
    names = [name for name in PARAMETERS if name.startswith("on_")]
    functions = {name: it for name in names if (it := function(config, name)) is not None}
    modules = list(engine.stages.values())
    return Callbacks(functions, {"rank": rank, "config": config, "run": run, "modules": modules})
