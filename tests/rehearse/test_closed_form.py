"""The closed form of the plan compared with rehearsals on GPUs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest

from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Lora
from nanoscale.plan.memory.peak import rank_memory
from nanoscale.rehearse.life import play
from nanoscale.rehearse.played.cuda import Gpu
from tests.support.layouts import OFFLOADED
from tests.support.measured_memory import (
    ADAPTERS,
    GPT2,
    GPT_OSS,
    MIXTURE,
    SHAPE,
    Row,
    config_of,
    recomputed,
    vocabulary,
)
from tests.support.ranks import run_ranks
from tests.support.rows import exhaustive, usual_rows

BOUND = 0.02
"""The largest relative error; models of two blocks show what only the first one does."""
H100 = Gpu("NVIDIA H100", 80 << 30, 8, (9, 0))
LARGE = replace(SHAPE, hidden=4096, head_dim=512, ffn=16384, layers=4)
"""Two matrices of a feed-forward network have MUON_AT_ONCE elements."""
LORA_OF_ATTENTION = Lora(rank=8, targets=["wq", "wv"])


def on_gpus(row: Row) -> ResolvedConfig:
    config = config_of(row)
    return replace(config, launcher=replace(config.launcher, device="cuda"))


def in_fp8(config: ResolvedConfig) -> ResolvedConfig:
    return replace(config, precision=replace(config.precision, fp8=True))


ROWS = {
    "GPT-2, fp32": on_gpus(Row("", shape=GPT2)),
    "dp 2, stage 3, full": on_gpus(Row("", {"dp": 2} | recomputed("full"), 3)),
    "dp 2, stage 2, large tied vocabulary, few tokens": on_gpus(
        Row("", {"dp": 2}, 2, 1, shape=vocabulary(16 * 2**10, tie_embeddings=True), seq=32)
    ),
    "Muon, dp 2, stage 3": on_gpus(Row("", {"dp": 2}, 3, 1, optimizer="muon")),
    "bf16 without masters, dp 2, stage 3": on_gpus(Row("", {"dp": 2}, 3, precision="bf16-pure")),
    "packed documents, bf16": on_gpus(
        Row("", micro_batch=2, global_batch=8, seq=512, precision="bf16", documents=True)
    ),
    "packed documents, GPT-2, fp32, full": on_gpus(
        Row("", recomputed("full"), 0, 2, shape=GPT2, global_batch=8, seq=512, documents=True)
    ),
    **{
        f"GPT-2, fp32, {keep}": on_gpus(
            Row("", recomputed("selective", selective_keep=keep), shape=GPT2)
        )
        for keep in ("attention", "every-2nd-matmul")
    },
    **{
        f"tp 2, bf16, {keep}": on_gpus(
            Row("", {"tp": 2} | recomputed("selective", selective_keep=keep), precision="bf16")
        )
        for keep in ("matmuls", "attention", "core-attention")
    },
    "experts in fp8, dp 2, stage 3": in_fp8(
        on_gpus(Row("", {"dp": 2}, 3, precision="bf16", shape=MIXTURE))
    ),
    "kept experts in fp8, dp 2, stage 2": in_fp8(
        on_gpus(Row("", {"dp": 2} | recomputed("full"), 2, 1, precision="bf16", shape=MIXTURE))
    ),
    "kept experts in fp8, one process": in_fp8(
        on_gpus(Row("", micro_batch=1, precision="bf16", shape=MIXTURE))
    ),
    "LoRA, bf16": on_gpus(Row("", precision="bf16", lora=ADAPTERS)),
    "LoRA of attention, bf16": on_gpus(Row("", precision="bf16", lora=LORA_OF_ATTENTION)),
    "LoRA, bf16, selective": on_gpus(
        Row("", recomputed("selective"), precision="bf16", lora=ADAPTERS)
    ),
    "LoRA, dp 2, stage 2, bf16": on_gpus(Row("", {"dp": 2}, 2, precision="bf16", lora=ADAPTERS)),
    "LoRA, dp 2, stage 3, bf16": on_gpus(Row("", {"dp": 2}, 3, precision="bf16", lora=ADAPTERS)),
    **{
        f"every 2nd of {layers} blocks selective, dp 2, stage 2, bf16": on_gpus(
            Row(
                "",
                {"dp": 2} | recomputed("selective", checkpoint_every=2),
                2,
                precision="bf16",
                shape=replace(SHAPE, layers=layers),
            )
        )
        for layers in (3, 4)
    },
    "gpt-oss, bf16, selective": on_gpus(
        Row("", recomputed("selective"), 0, 2, precision="bf16", shape=GPT_OSS)
    ),
    "experts larger than the head, dp 2, stage 3": on_gpus(
        Row("", {"dp": 2}, 3, 1, shape=replace(MIXTURE, layers=6, ffn=1024), seq=32)
    ),
}
for name, degrees, rows in (
    ("dp 4, stage 3, full", {"dp": 4}, 1),
    ("dp 4, ep 2, in halves, stage 3, full", {"dp": 4, "ep": 2}, 2),
):
    shape = replace(MIXTURE, layers=3, ffn=4096)
    kept = degrees | recomputed("full")
    ROWS[f"large experts in bf16, {name}"] = on_gpus(
        Row("", kept, 3, rows, "bf16", shape=shape, global_batch=4 * rows, seq=32)
    )
for name, degrees, changes in (
    ("offloaded, dp 2, bf16", {"dp": 2}, {"precision": "bf16"}),
    ("offloaded, one process, full", recomputed("full"), {}),
):
    ROWS[name] = replace(on_gpus(Row("", degrees, 3, **changes)), zero=OFFLOADED)
USUAL = (
    "offloaded, dp 2, bf16",
    "dp 2, stage 2, large tied vocabulary, few tokens",
    "GPT-2, fp32, attention",
    "LoRA, dp 2, stage 3, bf16",
    "gpt-oss, bf16, selective",
    "large experts in bf16, dp 4, ep 2, in halves, stage 3, full",
)


@pytest.mark.slow
@pytest.mark.parametrize("config", usual_rows(ROWS, USUAL))
def test_the_plan_is_near_the_rehearsal(config: ResolvedConfig) -> None:
    (peak,) = run_ranks(_peak_of_steps, 1, config)
    (planned,) = rank_memory(config, context_bytes=0)
    assert planned.allocated == pytest.approx(peak, rel=BOUND)


@pytest.mark.slow
def test_a_compiled_job_is_rehearsed_as_one_that_is_not() -> None:
    """The loss of compiled jobs, played as single operations, held twice as much."""
    degrees = {"dp": 2} | recomputed("full")
    usual = on_gpus(Row("", degrees, 3, precision="bf16", shape=vocabulary(16 * 2**10)))
    compiled = replace(usual, backend=replace(usual.backend, compile="on"))
    eager, fused = (run_ranks(_peak_of_steps, 1, config)[0] for config in (usual, compiled))
    assert 0.8 * eager < fused <= eager  # what its blocks fuse takes no memory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("degrees", "stage"), [({"dp": 2}, 3), exhaustive({}, 0), exhaustive({"dp": 2}, 0)]
)
def test_muon_needs_memory_for_two_of_several_exchanges(
    degrees: dict[str, int], stage: int
) -> None:
    row = Row("", degrees, stage, 1, optimizer="muon", global_batch=2, shape=LARGE)
    config = on_gpus(row)
    (peak,) = run_ranks(_peak_of_steps, 1, config, {"update"})
    (planned,) = rank_memory(config, context_bytes=0)
    (update,) = [phase for phase in planned.phases.phases if phase.name == "update"]
    assert update.allocated == pytest.approx(peak, rel=BOUND)


def _peak_of_steps(
    _rank: int, config: ResolvedConfig, names: Collection[str] = ("forward", "backward", "update")
) -> int:
    record = play(config, 0, 2, H100)
    assert not record.error, record.error
    names = {*names} & record.phases.keys()
    return max(record.phases[name].peak for name in names)
