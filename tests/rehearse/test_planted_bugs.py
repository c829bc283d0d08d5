"""Bugs that are planted into nanoscale's code, each of which a rehearsal must find."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nanoscale.backends import gradients
from nanoscale.backends import optimizer as optimizers
from nanoscale.backends.native import NativeEngine
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Checkpoint
from nanoscale.models import transformer
from nanoscale.models.attention_kernels import KERNELS, Pairs
from nanoscale.parallel import expert, fsdp, ring
from nanoscale.rehearse.compare import mismatches
from nanoscale.rehearse.kinds import played_ranks
from nanoscale.rehearse.life import play
from nanoscale.rehearse.played.cuda import Gpu
from nanoscale.rehearse.played.patches import Patches
from nanoscale.rehearse.played.record import RankRecord
from nanoscale.train.loop import Training
from tests.support.measured_memory import MIXTURE, SHAPE, Row, config_of
from tests.support.ranks import run_ranks
from tests.support.rows import usual_rows

H200 = Gpu(**json.loads(json.dumps(asdict(Gpu("NVIDIA H200", 140 << 30, 8)))))
"""A GPU in the form in which the process that plays ranks reads it."""
TINY = replace(SHAPE, layers=2, hidden=64, head_dim=8, ffn=96)
STAGES: dict[str, Any] = {"pp": 2, "tp": 2}
SHARDED: dict[str, Any] = {"dp": 2}
RING: dict[str, Any] = {"cp": 2}

Plant = Callable[[Patches, int], None]
"""A function that plants a bug into the code that rank N runs."""


def after(owner: Any, name: str, act: Callable[..., Any]) -> Plant:
    """Call `act(rank, result, *args)` after a function, whose result it replaces."""

    def plant(patches: Patches, rank: int) -> None:
        plain = getattr(owner, name)

        def changed(*args: Any, **kwargs: Any) -> Any:
            return act(rank, plain(*args, **kwargs), *args)

        patches.replace(owner, name, changed)

    return plant


def instead(owner: Any, name: str, act: Callable[..., Any]) -> Plant:
    """Call `act(rank, plain, *args)` in place of a function."""

    def plant(patches: Patches, rank: int) -> None:
        plain = getattr(owner, name)
        patches.replace(owner, name, lambda *args, **kw: act(rank, plain, *args, **kw))

    return plant


def in_norm(act: Callable[[int, torch.Tensor], Any]) -> Plant:
    """Act on a scalar of the device before every gradient norm."""

    def norm(rank: int, plain: Any, grads: Any) -> Any:
        act(rank, torch.zeros(2, device="cuda"))
        return plain(grads)

    return instead(gradients, "global_norm", norm)


def in_step(act: Callable[[int, NativeEngine, Any], Any]) -> Plant:
    """Act at the end of every step: rank, engine and result."""

    def step(rank: int, result: Any, engine: NativeEngine, *_: Any) -> Any:
        act(rank, engine, result)
        return result

    return after(NativeEngine, "train_step", step)


def in_block(act: Callable[[int, torch.Tensor], torch.Tensor]) -> Plant:
    """Change the result of every block."""
    return after(transformer.Block, "forward", lambda rank, hidden, *_: act(rank, hidden))


def waste_in_every_way(_: int, __: NativeEngine, result: Any) -> None:
    loss, zeros = result.loss_sum, torch.zeros(4, 2, device="cuda")
    loss.item()
    loss.cpu().numpy()
    torch.cuda.synchronize()
    print(f"{loss:.3f}", loss, file=io.StringIO())
    zeros[zeros > 0].sum()
    host = torch.ones(4)
    total = host.to("cuda") + host.cuda() + torch.as_tensor([1.0] * 4, device="cuda")
    assert (total + total.new_tensor([1.0] * 4)).tolist() == [1.0] * 4
    kept.extend(torch.zeros(1000, device=it) for it in ("cpu", "cuda"))


def send_one_more(rank: int, plain: Any, x: Any, receiving: Any, sending: Any, group: Any) -> Any:
    """Let rank 0 send the last rank a row less of the rows of experts, and itself a row more."""
    if rank == 0 and sending and len(x) == sum(sending):
        sending = [sending[0] + 1, *sending[1:-1], sending[-1] - 1]
    return plain(x, receiving, sending, group)


kept: list[Any] = []


def reduce_between_messages(rank: int, engine: NativeEngine, _: Any) -> None:
    group, x = engine.layout.pipeline, torch.zeros(8, device="cuda")
    if dist.get_group_rank(group, rank) == 0:
        dist.all_reduce(x)
        dist.send(x, group=group, group_dst=1)
    else:
        dist.recv(x, group=group, group_src=0)
        dist.all_reduce(x)


EXPERTS = {"dp": 2, "ep": 2}


@dataclass
class Bug:
    """A bug, and how it shows."""

    plant: Plant
    text: str
    """A part of what the rehearsal reports."""
    degrees: dict[str, Any] = field(default_factory=lambda: STAGES)
    stage: int = 0


BUGS = {
    "a wrong group": Bug(
        instead(
            gradients,
            "global_norm",
            lambda rank, plain, grads: plain(grads) if rank == 0 else _norm_over_two(grads),
        ),
        "ranks 0 and 2 share differs",
    ),
    "another root of a reduction": Bug(
        in_norm(lambda rank, x: dist.reduce(x, rank)), "with root 1", {"tp": 2}
    ),
    "a micro batch less on the last rank": Bug(
        instead(
            NativeEngine,
            "train_step",
            lambda rank, plain, engine, batches, *rest, **how: plain(
                engine, batches[: len(batches) - bool(rank)], *rest, **how
            ),
        ),
        "ranks 0 and 1 share differs",
        SHARDED,
        3,
    ),
    "a collective in the log of rank 0": Bug(
        after(
            Training,
            "log",
            lambda rank, *_: dist.all_reduce(torch.zeros(2, device="cuda")) if rank == 0 else None,
        ),
        "ranks 0 and 1 share differs",
        SHARDED,
    ),
    "rows of experts that another rank does not await": Bug(
        instead(expert, "start", send_one_more), "which awaits", EXPERTS
    ),
    "loads of experts that are not exchanged": Bug(
        instead(expert, "start", lambda _, plain, x, _receiving, *rest: plain(x, rest[0], *rest)),
        "rows of a tensor",
        EXPERTS,
    ),
    "an all-reduce between a send and its receive": Bug(
        in_step(reduce_between_messages),
        "a deadlock: rank 0 waits for rank 1 in allreduce",
        {"pp": 2},
    ),
    "a missing hop of the ring": Bug(
        instead(
            ring,
            "pass_keys",
            lambda rank, plain, q, k, v, *rest: (
                plain(q, k, v, *rest)
                if rank == 0
                else KERNELS["portable"].forward(q, k, v, Pairs(True, 1.0))
            ),
        ),
        "messages to rank",
        RING,
    ),
    "a tensor on the wrong device": Bug(
        in_block(lambda _, hidden: hidden + torch.ones(hidden.shape[-1])), "device", SHARDED
    ),
    "waits, copies and memory that grows in the step": Bug(
        in_step(waste_in_every_way),
        "item at|copy to the host at|torch.cuda.synchronize at|print at|nonzero at|copy from the host at"
        "|memory leaks|in host memory",
        SHARDED,
    ),
    "a parameter in no optimizer": Bug(
        after(optimizers, "make_optimizer", lambda _, optimizer, *__: _without_last(optimizer)),
        "no optimizer updates",
        SHARDED,
    ),
    "gradients kept over the step": Bug(
        instead(torch.optim.Optimizer, "zero_grad", lambda *_, **__: None),
        "gradients are kept after the step",
        SHARDED,
    ),
    "gradients that are never summed": Bug(
        instead(
            fsdp,
            "begin_micro_batch",
            lambda _, plain, model, stage, last: plain(model, stage, False),
        ),
        "no gradient reaches",
        SHARDED,
        1,
    ),
    "an uneven shard": Bug(lambda *_: None, "uneven shards", {"dp": 3}, 3),
    "a moment that a resumed run does not load": Bug(
        after(NativeEngine, "empty_state", lambda _, state, *__: without_last_moment(state)),
        "a checkpoint cannot be resumed from: optimizer.",
        SHARDED,
    ),
}


def without_last_moment(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    last = max(name for name in state if name.startswith("optimizer."))
    return {name: value for name, value in state.items() if name != last}


def _norm_over_two(grads: Any) -> torch.Tensor:
    square = gradients.square_norm(grads)
    dist.all_reduce(square, group=_pair())
    return square.sqrt()


def _pair() -> Any:
    """Return a group of tp, in place of all ranks."""
    return next(group for group in dist.distributed_c10d._world.pg_map if group.size() == 2)


def _without_last(optimizer: Any) -> Any:
    optimizer.param_groups[0]["params"].pop()
    return optimizer


def config(degrees: dict[str, Any], stage: int) -> ResolvedConfig:
    micro_batch = 2
    batch = micro_batch * degrees.get("dp", 1) * 2
    shape = replace(MIXTURE, layers=2) if "ep" in degrees else TINY
    row = Row("", degrees, stage, micro_batch, "bf16", shape, global_batch=batch)
    return replace(config_of(row), checkpoint=Checkpoint(every=1))


def rehearse(number: int, bug: str, config: ResolvedConfig, ranks: list[int]) -> RankRecord:
    with Patches() as patches:
        if bug:
            BUGS[bug].plant(patches, ranks[number])
        return play(config, ranks[number], 2, H200)


def reports(bug: str, config: ResolvedConfig) -> str:
    """Return all that a rehearsal reports as wrong or noteworthy."""
    ranks = list(played_ranks(config))
    records = run_ranks(rehearse, len(ranks), bug, config, ranks)
    lines = mismatches(records)
    for record in records:
        lines += [record.error, *record.findings, *record.notes]
        lines += [f"{wait.what} at" for wait in record.waits if wait.phase == "step 2"]
    return "\n".join(line for line in lines if line)


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str) -> None:
    found = reports(bug, config(BUGS[bug].degrees, BUGS[bug].stage))
    for text in BUGS[bug].text.split("|"):
        assert text in found
    assert (
        "copy" not in BUGS[bug].text or "Traceback" not in found
    )  # a wait is noted, and the rank continues


@pytest.mark.slow
@pytest.mark.parametrize(
    "degrees",
    usual_rows(
        {"stages": STAGES, "sharded": SHARDED, "ring": RING, "experts": EXPERTS},
        ("stages", "sharded", "experts"),
    ),
)
def test_nothing_is_found_without_a_bug(degrees: dict[str, Any]) -> None:
    waits = (
        ["copy to the host at"] * 2 if "ep" in degrees else []
    )  # each rank reads the rows of its experts
    assert reports("", config(degrees, 0)) == "\n".join(waits)
