"""Compare the plan with published runs whose whole layout is stated, by software, GPU, precision and layout.

    python -m benchmarks.plan.published_runs [--rows] [--half building|checking] [--of-2026]
        [--page docs/planner-errors.md]

The rows are divided in two before any error is looked at. The planner is changed with the building half in
view; the checking half only shows whether the changes carry over to other sources, sizes and devices:

- building: NVIDIA's dgxc-benchmarking (20 rows), torchtitan's asynchronous tp (6), KempnerForge's 7B on at
  most 8 GPUs (7), torchao's float8nocompile (6, with memory);
- checking: KempnerForge's 13B and 70B, and its 7B on more GPUs (7), torchao's other documents, with MI300X (9,
  with memory).

One setting is assumed, which the source does not state: one sequence a micro batch in torchao's
float8nocompile.

Runs of 2026 have a file of their own (`runs_of_2026.csv`): every layout of pre-training that a configuration
of ours describes, in its newest release. Other rows are counted by reason (`rows_not_compared.csv`). A hash
of model, GPU and engine chooses a run's half. Layouts and CUDA graphs that a source does not state come from
its public recipe, and `mxfp8` is planned as fp8 with larger casts. Modules that are computed again, blocks in
host memory, the types of moments (`memory.…` in the overrides, `Recipe`) and the layers of stages come from
there too. Four things are assumed: DeepSeek-V3 in Megatron-Bridge has one more layer, which predicts a
further token; the first of the 4 layers of SimuMax's models is dense; xtuner's runs of Megatron-LM are in
bf16, on an H100 with links of 200 GB/s (H800); GPT-OSS 20B in NeMo AutoModel has ep 8.

KempnerForge's memory is shown nowhere: its weights and moments are in bf16, and its gradients are whole between
micro batches.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.plan.megatron_memory import SCALED, Recipe
from benchmarks.plan.software import predict, record
from nanoscale.common.units import GIB
from nanoscale.config.composing.compose import compose
from nanoscale.config.model_math import parameters
from nanoscale.config.resolved import resolved
from nanoscale.config.schema import (
    Backend,
    Cluster,
    Config,
    Launcher,
    Model,
    Parallel,
    Precision,
    Train,
    Zero,
)
from nanoscale.plan.hardware.hardware import Software
from nanoscale.plan.predict import SURE, Prediction

RUNS = Path(__file__).with_name("published_runs.csv")
"""Published figures, one row a run; `overrides` says how its machine and recipe differ from the cluster's."""
RUNS_OF_2026 = Path(__file__).with_name("runs_of_2026.csv")
NOT_COMPARED = Path(__file__).with_name("rows_not_compared.csv")
"""Why other rows of the same sources are not compared, and how many they are."""
BUILDING = ("dgxc-", "tt-", "kf-01", "kf-02", "kf-03", "kf-04", "kf-05", "kf-06", "kf-07", "ao-nocompile",
            "ao-compile")  # fmt: skip
"""Beginnings of the names of the rows in the building half; all others are for checking."""
OTHER_BYTES = ("kf-",)
"""Rows whose memory has no equivalent: weights and moments in bf16, gradients whole between micro batches."""
MEMORY, STAGES = "memory.", "stages"
"""The beginning of the overrides that belong to `Recipe`, and the override with the layers of each stage."""
BLACKWELL = ("b200", "b300", "gb200", "gb300")
"""GPUs whose products in 8 bits read a weight in both orders, so that one copy of it is kept."""
Row = dict[str, str]
HEAD = "| group | rows | mean error | bias | largest |\n|---|---|---|---|---|"
PAGE = """# Errors of the planner

`python -m benchmarks.plan.published_runs --page docs/planner-errors.md` writes
this page. It compares [the planner](planner.md) with published runs whose whole layout is stated, by
software (a record of `benchmarks/plan/software.py`), GPU, precision and layout. Only the errors of the building
half were used to change the planner. The bias is the mean of the errors with their signs: below zero, the
plan is too fast, or its memory is too small.

Memory of Megatron-LM is what Transformer Engine saves (`benchmarks/plan/megatron_memory.py`): inputs of
products in 8 bits, without what the modules of a public recipe compute again. A recipe's settings of memory
are `memory.…` in `runs_of_2026.csv`.

For runs of 2026, the newest release of every layout of pre-training counts, and a hash of model, GPU and
engine chooses the half. `mxfp8` is planned as fp8 whose casts move 4.06 bytes a number in place of 3 (16 bits
read, two orders of 8 bits and their scales written: counted, not fitted), and `nvfp4` by the peaks of its
makers, fp8's share of them and casts of 5.1 bytes a number, in all blocks: nothing is fitted to its rows. The
name of a mixture's record tells how its engine runs: `alltoall` (one copy of a token for each of its experts;
otherwise one for each host, as with DeepEP and HybridEP), `overlap` (exchanges during the computation of
another micro batch), `router-graphs` (CUDA graphs of attention, router and preparation), `graphs` (CUDA graphs
of whole steps). `fsdp` is Megatron's FSDP.

The checking half is not quite blind. After its errors had been seen, these settings were corrected by their
sources: prime-rl (eager, whole logits), GPT-OSS 20B in NeMo AutoModel (ep 8), what NeMo AutoModel computes
again, and gradients that Megatron-Bridge reduces in bf16. Three things were counted, not fitted, with these
rows in view: the factor of tp on the host's time, the norms of Qwen3's queries and keys in eager PyTorch,
which move as much for each number as the stream's norms (dense 6.5 to 6.0 %), and the casts of `mxfp8` (6.0 to
5.9 %). FlashAttention-2's rate on B200 was assumed (0.15 of the peak) and is 0.175 now, by kernels that two
other projects measured, looked for because two runs were planned 12 to 13 % too slow (dense 5.6 to 3.2 %).
NeMo AutoModel's 70B was in both halves, once with a wrong record; now it is in the building half only.

`Efficiency.overlap` stays 0.82, as fitted to 152 published steps. MPT's 113 of them hide another error: if
their products have 0.88 of the rate on H100 and 1.04 on A100, 0.61 to 0.66 fits best (152 rows: 5.2 to 4.0
%), but with 0.66 the older checking rows get worse (7.4 to 8.3 %; dense of 2026: 5.99 to 5.92 %):
KempnerForge's and MI300X's, planned too fast already, get faster. Four other measures of hidden time (without
a ring's latency, whole collectives, half of both, bytes of memory) fit worse with
shares up to 0.95; a smaller share for groups that span hosts, which would suit
NeMo AutoModel's 70B (it needs 0.33), plans machines with smaller islands as faster.

Largest errors left: an 8B model on GB300 (4 to 6 % too fast), of which only the checking half has rows; NCCL's
all-to-all between hosts over EFA is planned too fast (runs of AWS), because small messages have no rate of
their own; gpt-oss in Megatron-Bridge is planned too fast, and Qwen3-235B in bf16 on GB200 and GB300 too slow,
for reasons that are not known; Llama 3 405B in NVFP4 on GB300 is planned 14 % too fast.
"""
REFUSALS = """## Runs of 2026 that are planned as not fitting

All of them ran. `fits` is false below a probability of 50 %.

| half | rows | `fits` is false | probability below 10 % |
|---|---|---|---|
"""
REASONS = """## Runs of 2026 that are not compared

| reason | rows |
|---|---|
"""


@dataclass(frozen=True)
class Comparison:
    """A row and its prediction."""

    row: Row
    plan: Prediction

    @property
    def half(self) -> str:
        row = self.row
        building = row["id"].startswith(BUILDING)
        if row["id"].startswith("26-"):
            engine = row["software"].partition("-")[0]
            name = f"{row['model']} {row['gpu']} {engine}"
            building = hashlib.sha256(name.encode()).digest()[0] % 2 == 0
        return "building" if building else "checking"

    @property
    def time_error(self) -> float:
        """The relative error of a step's time: above 0, the plan is too slow."""
        return float(self.row["tok_s_gpu"]) / self.plan.time.tokens_per_s_per_gpu - 1

    @property
    def memory_error(self) -> float | None:
        """The relative error of the memory; None if the row states none, or has no equivalent."""
        if not self.row["mem_gib"] or self.row["id"].startswith(OTHER_BYTES):
            return None
        return self.memory_gib / float(self.row["mem_gib"]) - 1

    @property
    def memory_gib(self) -> float:
        """The planned memory of the row's kind, GiB."""
        worst = self.plan.worst
        return (worst.allocated if self.row["mem_kind"] == "allocated" else worst.reserved) / GIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--half", choices=("building", "checking"), help="only this half")
    parser.add_argument("--of-2026", action="store_true", help="the rows of 2026")
    parser.add_argument("--page", type=Path, help="write the page of the documentation")
    options = parser.parse_args()
    if options.of_2026:
        print(refusals(compare(RUNS_OF_2026)))
    if options.page is not None:
        options.page.write_text(page(compare(), compare(RUNS_OF_2026)), encoding="utf-8")
    compared = compare(RUNS_OF_2026 if options.of_2026 else RUNS)
    every = [one for one in compared if options.half in (None, one.half)]
    if options.rows:
        for one in every:
            print(line(one))
    for half in ("building", "checking"):
        some = [one for one in every if one.half == half]
        if some:
            print(f"\n{half}: error of a step's time, above 0: planned too slow")
            print(table(some, lambda one: one.time_error))
            sized = [one for one in some if one.memory_error is not None]
            if sized:
                print(f"\n{half}: error of the memory")
                print(table(sized, lambda one: one.memory_error))


@cache
def compare(file: Path = RUNS) -> tuple[Comparison, ...]:
    """Plan every row of a file."""
    return tuple(
        Comparison(row, predict(resolved(config_of(row)), software_of(row), recipe_of(row)))
        for row in read(file)
    )


def read(path: Path = RUNS) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def line(one: Comparison) -> str:
    row = one.row
    memory = one.memory_error
    shown = (
        ""
        if memory is None
        else f"  {one.memory_gib:6.1f} of {row['mem_gib']:>6} GiB {memory:+7.1%}"
    )
    return (
        f"{one.half:8} {row['id']:36} {float(row['tok_s_gpu']):8.1f} "
        f"{one.plan.time.tokens_per_s_per_gpu:8.1f} {one.time_error:+7.1%}{shown}"
    )


def page(every: Sequence[Comparison], of_2026: Sequence[Comparison]) -> str:
    """Return the page of the documentation: errors of both halves, by group, and what is not compared."""
    tables = [
        f"## {what}, {half} half\n\n{HEAD}\n{rows}\n"
        for some, what, error in (
            (of_2026, "Runs of 2026: time of a step", _time_error),
            (of_2026, "Runs of 2026: memory", _memory_error),
            (every, "Time of a step", _time_error),
            (every, "Memory", _memory_error),
        )
        for half in ("checking", "building")
        if (rows := _markdown([one for one in some if one.half == half], error))
    ]
    reasons = "\n".join(f"| {row['reason']} | {row['rows']} |" for row in read(NOT_COMPARED))
    return "\n".join([PAGE, refusals(of_2026), *tables, REASONS + reasons + "\n"])


def refusals(of_2026: Sequence[Comparison]) -> str:
    """Return the table of runs that are planned as not fitting, although they ran."""
    lines = [REFUSALS]
    for half in ("checking", "building"):
        some = [one.plan for one in of_2026 if one.half == half]
        no = sum(not plan.fits for plan in some)
        sure = sum(plan.fits_probability < 1 - SURE for plan in some)
        lines.append(
            f"| {half} | {len(some)} | {no} ({no / len(some):.0%}) | {sure} ({sure / len(some):.0%}) |\n"
        )
    for one in of_2026:
        if not one.plan.fits:
            planned = f"{one.plan.worst.total / GIB:.0f} of {one.plan.capacity / GIB:.0f} GiB"
            lines.append(
                f"\n- {one.half} half, {one.row['id'].removeprefix('26-')}: {planned} are planned, "
                f"probability that it fits {one.plan.fits_probability:.0%}"
            )
    return "".join(lines) + "\n"


def _time_error(one: Comparison) -> float | None:
    return one.time_error


def _memory_error(one: Comparison) -> float | None:
    return one.memory_error


def _markdown(some: Sequence[Comparison], error: Callable[[Comparison], float | None]) -> str:
    known = [one for one in some if error(one) is not None]
    return "\n".join(
        f"| {name} | {len(errors)} | {mean(map(abs, errors)):.1%} | {mean(errors):+.1%} | "
        f"{max(errors, key=abs):+.1%} |"
        for name, errors in grouped(known, error).items()
    )


def table(some: Sequence[Comparison], error: Callable[[Comparison], float | None]) -> str:
    """Return rows, mean error, bias and largest error of each group."""
    head = f"{'':28} {'rows':>4} {'mean':>6} {'bias':>7} {'largest':>7}"
    lines = [
        f"{name:28} {len(errors):4} {mean(map(abs, errors)):6.1%} {mean(errors):+7.1%} "
        f"{max(errors, key=abs):+7.1%}"
        for name, errors in grouped(some, error).items()
    ]
    return "\n".join([head, *lines])


def grouped(
    some: Sequence[Comparison], error: Callable[[Comparison], float | None]
) -> dict[str, list[float]]:
    """Return the errors by software, GPU, precision and layout, and of all rows, which come last."""
    groups: dict[str, list[float]] = defaultdict(list)
    for one in some:
        value = error(one)
        assert value is not None
        row = one.row
        for name in (
            f"software {row['software']}",
            f"GPU {row['gpu']}",
            precision_of(row),
            layout_of(row),
            f"family {family_of(one)}",
            "all",
        ):
            groups[name].append(value)
    order = sorted(groups, key=lambda name: (name == "all", name))
    return {name: groups[name] for name in order}


def family_of(one: Comparison) -> str:
    model = one.plan.config.model
    latent = " with latent attention" if model.kv_rank else ""
    return f"experts{latent}" if model.experts else "dense"


def precision_of(row: Row) -> str:
    recipe = " rowwise" if "rowwise" in row["overrides"] else ""
    return f"precision {row['precision']}{recipe}"


def layout_of(row: Row) -> str:
    axes = [axis for axis in ("tp", "pp", "cp", "ep") if int(row[axis]) > 1]
    return f"layout {' · '.join(axes) or ('dp' if int(row['dp']) > 1 else 'one GPU')}"


def software_of(row: Row) -> Software:
    return record(row["software"], row["precision"])


def config_of(row: Row) -> Config:
    """Return the row's job as one of ours."""
    dp, pp, virtual = int(row["dp"]), int(row["pp"]), int(row["vp"])
    model = model_of(row["model"])
    mode = {"selective-op": "selective", "every2": "full"}.get(row["recompute"], row["recompute"])
    micro_batch, seq_len = int(row["mbs"]), int(row["seq"])
    layout: dict[str, Any] = {
        "dp": dp,
        "tp": int(row["tp"]),
        "pp": pp,
        "cp": int(row["cp"]),
        "ep": int(row["ep"]),
        "schedule": "interleaved-1f1b" if virtual > 1 else "1f1b",
        "virtual_stages": virtual,
        "layers_per_stage": stages_of(row, model.layers) if pp > 1 else None,
        "activation_checkpointing": mode,
        "checkpoint_every": 2 if row["recompute"] == "every2" else 1,
        "selective_keep": "every-2nd-matmul" if mode == "selective" else "matmuls",
    }
    stage: Any = int(row["zero"])
    overrides = dict(item.split("=") for item in row["overrides"].split())
    overrides = {key: it for key, it in overrides.items() if not key.startswith((MEMORY, STAGES))}
    layout["ep_over_tp"] = overrides.pop("parallel.ep_over_tp", "") == "true"
    narrow: Any = "nvfp4" if row["precision"] == "nvfp4" else "tensorwise"
    precision = Precision(compute="bf16", fp8="fp" in row["precision"], fp8_recipe=narrow)
    for key in ("reduce", "params"):
        if dtype := overrides.pop(f"precision.{key}", None):
            precision = replace(precision, **{key: dtype})  # type: ignore[arg-type]
    attention: Any = overrides.pop("backend.attention", "auto")
    if recipe := overrides.pop("precision.fp8_recipe", None):
        precision = replace(precision, fp8_recipe=recipe)  # type: ignore[arg-type]
    return Config(
        model=model,
        parallel=Parallel(**layout),
        precision=precision,
        zero=Zero(stage=stage),
        backend=Backend(compile="on" if row["compile"] == "on" else "off", attention=attention),
        launcher=Launcher(device="cuda"),
        cluster=cluster_of(row["gpu"], overrides),
        train=Train(
            global_batch=int(row["gbs"]) // (micro_batch * dp) * micro_batch * dp,
            micro_batch=micro_batch,
            seq_len=seq_len,
            steps=1,
        ),
    )


def stages_of(row: Row, layers: int) -> list[int]:
    """Return the layers of each stage of a pipeline: the row's own (4*15+1), or equal stages.

    If the layers are not divisible, Megatron-LM counts embedding and head as a layer each
    (`account_for_embedding_in_pipeline_split`).
    """
    stages = int(row["pp"]) * int(row["vp"])
    for item in row["overrides"].split():
        if item.startswith(f"{STAGES}="):
            stated = [(part + "*1").split("*")[:2] for part in item.partition("=")[2].split("+")]
            return [int(count) for count, times in stated for _ in range(int(times))]
    least, more = divmod(layers, stages)
    if more and (layers + 2) % stages == 0 and row["software"].startswith("megatron"):
        least = (layers + 2) // stages
        return [least - 1, *[least] * (stages - 2), least - 1]
    return [least + (stage < more) for stage in range(stages)]


def recipe_of(row: Row) -> Recipe:
    """Return what the row's public recipe says of memory."""
    items = (item.split("=") for item in row["overrides"].split() if item.startswith(MEMORY))
    said = {key.removeprefix(MEMORY): value for key, value in items}
    narrow = row["precision"] == "fp8" and row["gpu"] in BLACKWELL
    return Recipe(
        recompute=frozenset(filter(None, said.get("recompute", "").split("+"))),
        recomputed_layers=int(said.get("recomputed_layers", 0)),
        host_layers=int(said.get("host_layers", 0)),
        moments=float(said.get("moments", 8)),
        weights=float(said["weights"]) if "weights" in said else 1 if narrow else None,
        fp8_attention="fp8_attention" in said,
        scaled=1 / 2 + 1 / 16 if row["precision"] == "nvfp4" else SCALED,
        plain_experts=row["software"].startswith("automodel"),
        loss_in_place="Megatron-Bridge@" in row["source"],
    )


def cluster_of(device: str, overrides: dict[str, str]) -> Cluster:
    cluster = Cluster(device=device)
    for key, value in overrides.items():
        name, _, dtype = key.removeprefix("cluster.").partition(".")
        number: Any = int(value) if name == "devices_per_host" else float(value)
        if dtype:
            number = replace(cluster.peaks, **{dtype: number})
        cluster = replace(cluster, **{name: number})
    return cluster


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v3-mtp": ("deepseek-v3", {"layers": 62}),
    "deepseek-v3-4L": ("deepseek-v3", {"layers": 4, "dense_layers": 1}),
    "deepseek-v2-4L": (
        "deepseek-v3",
        {"layers": 4, "dense_layers": 1, "hidden": 5120, "ffn": 1536, "experts": 160,
         "experts_per_token": 6, "shared_ffn": 3072, "dense_ffn": 12288, "vocab": 102400,
         "expert_groups_per_token": 3},
    ),
    "kimi-k2": (
        "deepseek-v3",
        {"heads": 64, "experts": 384, "dense_layers": 1, "vocab": 163840, "expert_groups": 1,
         "expert_groups_per_token": 1},
    ),
    "qwen3-235b-a22b": ("qwen3-30b-a3b", {"layers": 94, "hidden": 4096, "heads": 64, "ffn": 1536}),
    "gpt-oss-120b": ("gpt-oss-20b", {"layers": 36, "experts": 128}),
}  # fmt: skip
"""Models by another model and what differs, from their published configurations."""


@cache
def model_of(name: str) -> Model:
    """Return the model's shape.

    Sources: "The Llama 3 Herd of Models" (arXiv:2407.21783), table 3; Brown et al. 2020 (arXiv:2005.14165),
    table 2.1; KempnerForge, benchmarks/mfu_scaling (a factor of 1.3 on SwiGLU's 8/3 of the width).
    """
    if name == "gpt3-175b":
        return Model(layers=96, hidden=12288, heads=96, kv_heads=96, head_dim=128, ffn=49152, vocab=51200,
                     max_seq_len=2048, norm="layernorm", mlp="gelu", position="learned", bias=True,
                     tie_embeddings=False)  # fmt: skip
    if name in OTHERS:
        other = OTHERS[name]
        return replace(compose([f"model={other[0]}"]).config.model, **other[1])
    if name.startswith(("qwen3", "gpt-oss", "deepseek")):
        return compose([f"model={name}"]).config.model
    size = re.match(r"(?:llama3|kf)-(\d+)b", name)
    assert size is not None, name
    same = {"7": "8", "13": "8"}.get(size[1], size[1])
    model = compose([f"model=llama-{same}b"]).config.model
    if size[1] == "13":
        model = replace(model, layers=40, hidden=5120, heads=40, ffn=17920)
        assert round(parameters(model) / 1e7) == 1484, parameters(model)
    if layers := re.search(r"-(\d+)L$", name):
        model = replace(model, layers=int(layers[1]))
    return model


if __name__ == "__main__":
    main()
