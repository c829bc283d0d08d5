"""Compare the planned tokens/s with published measurements: `python -m benchmarks.plan.published_speed`.

Each row becomes the nearest configuration of ours; `NOTES` lists settings without an equivalent. No torch is
needed. With `--calibrate` three factors (matmul, attention, overlap) are fitted for all devices together on
the sources in `FITTED`, and the error on the others is shown beside it.
"""

from __future__ import annotations

import argparse
import csv
import re
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, Literal

from benchmarks.plan.software import MEGATRON, TORCH_WHOLELOSS
from nanoscale.config.resolved import ResolvedConfig, resolved
from nanoscale.config.schema import (
    Backend,
    Cluster,
    Config,
    Model,
    Parallel,
    Peaks,
    Precision,
    Reached,
    Train,
    Zero,
)
from nanoscale.plan.hardware.hardware import NANOSCALE, Hardware, Software, hardware_of
from nanoscale.plan.time.step import step_time

OLDER_RUNS = Path(__file__).with_name("older_runs.csv")
"""Published figures, one row a run; what a source does not state is empty."""
NOTES = """\
How rows were read:
  MPT         eager, FSDP with bf16 gradients, GPT-like with tied embeddings; the first FlashAttention in
              Triton, which the second outruns 1.8 times (arXiv:2307.08691, section 4.1)
  Megatron    fused element-wise kernels, taken as compiled; in 2021 and 2022 attention was unfused, which is
              46 TFLOP/s on an A100 (Azure's AI benchmarking guide), and selective recomputed its core only
              2022 and later products sum gradients, and backward collectives run beside them; B200's context
              parallelism is Ulysses', as SimuMax's guide says (cp_comm_type a2a)
  torchtitan  H100s of 96 GB are limited to 500 of 700 W and have 2.4 TB/s (arXiv:2410.06511): the clock follows
              the cube root of the power; RMSNorm is composed of single operations where it is not compiled;
              ours has no asynchronous tp, and no 8-bit products with tp, which are computed here all the same
The shares of conf/cluster are others' measurements of single operations, chosen among (8192³ or the mean of two
sizes, which of two attention kernels) with this table in view: it is not a blind test.
"""
_FIRST_FLASH = {"a100-80": 0.62 / 1.8, "a100-40": 0.62 / 1.8, "h100-sxm": 0.35 / 1.8}
"""Shares of the peak: FlashAttention-2's over the middle of "1.3 to 2.5 times" (its paper, arXiv:2307.08691,
section 4.1, over the Triton implementation that MPT used)."""
FITTED = ("A100 80GB with", "H100 80GB BF16")
"""Parts or endings of the names of sources that --calibrate uses."""

RECOMPUTATION: dict[str, tuple[Literal["none", "full", "selective"], int]] = {
    "": ("none", 1),
    "none": ("none", 1),
    "full": ("full", 1),
    "selective": ("selective", 1),
    "selective-op": ("selective", 1),
    "selective-layer": ("full", 2),
    "selective+SP": ("none", 1),
}
"""Our names of what the rows recompute, and of every how many blocks."""


@dataclass(frozen=True)
class Row:
    """One measurement."""

    source: str
    label: str
    config: ResolvedConfig
    software: Software
    measured: float
    """tokens/s a GPU."""


def read() -> list[Row]:
    """Return all rows."""
    with OLDER_RUNS.open(newline="", encoding="utf-8") as file:
        return [_row(raw) for raw in csv.DictReader(file)]


def _row(raw: dict[str, str]) -> Row:
    model, parallel, train = _model(raw), _parallel(raw), _train(raw)
    config = resolved(
        Config(
            model=model,
            parallel=parallel,
            train=train,
            precision=_precision(raw),
            zero=Zero(stage=_stage(raw["zero_or_fsdp"])),
            backend=Backend(compile="on" if _fused(raw) else "off", attention=_attention(raw)),
            cluster=_cluster(raw),
        )
    )
    layout = " ".join(f"{k}{raw[k]}" for k in ("tp", "pp", "cp", "dp") if raw[k] not in ("", "1"))
    how = f"{raw['act_ckpt']} {raw['precision']}"
    label = f"{raw['model']} {raw['gpu']} s{train.seq_len} {layout} mb{train.micro_batch} {how}"
    return Row(raw["source"], label, config, _software(raw), _measured(raw, model))


def _attention(raw: dict[str, str]) -> Literal["cudnn", "flash"]:
    """Return the software's kernel: cuDNN's in Transformer Engine of 2025, else FlashAttention."""
    return "cudnn" if "SimuMax" in raw["source"] else "flash"


def _software(raw: dict[str, str]) -> Software:
    """Return the record of the row's software; Megatron-LM of 2021, and MPT's, computed as this engine does."""
    if "Korthikanti" in raw["source"] or "SimuMax" in raw["source"]:
        return replace(MEGATRON, hidden_tp="backward")  # without NeMo's userbuffers
    return TORCH_WHOLELOSS if "torchtitan" in raw["source"] else NANOSCALE


def _number(text: str, usual: int) -> int:
    return int(float(text)) if text else usual


def _model(raw: dict[str, str]) -> Model:
    llama = raw["model"].startswith("llama")
    heads = int(raw["heads"])
    return Model(
        name=raw["model"],
        layers=int(raw["layers"]),
        hidden=int(raw["hidden"]),
        heads=heads,
        kv_heads=_number(raw["kv_heads"], heads),
        head_dim=int(raw["hidden"]) // heads,
        ffn=int(raw["ffn"]),
        vocab=_number(raw["vocab"], 51200),
        mlp="swiglu" if llama else "gelu",
        norm="rmsnorm" if llama else "layernorm",
        position="rope" if llama else "learned",
        bias=raw["model"].startswith("gpt"),
        tie_embeddings=not llama,
    )


def _parallel(raw: dict[str, str]) -> Parallel:
    tp, pp, cp = (_number(raw[name], 1) for name in ("tp", "pp", "cp"))
    virtual = _number(raw["vp"], 1)
    if pp > 1 and "Interleaved" in raw["source"]:
        virtual = 2
    mode, every = RECOMPUTATION[raw["act_ckpt"]]
    old = "SC21" in raw["source"] or (raw["act_ckpt"] == "full" and "Korthikanti" in raw["source"])
    return Parallel(
        dp=int(raw["dp"]),
        tp=tp,
        pp=pp,
        cp=cp,
        cp_method="ulysses" if "SimuMax" in raw["source"] else "ring",
        sequence_parallel=not old,
        schedule="interleaved-1f1b" if virtual > 1 else "1f1b",
        virtual_stages=virtual if pp > 1 else 1,
        activation_checkpointing=mode,
        checkpoint_every=every,
        selective_keep="every-2nd-matmul" if mode == "selective" else "matmuls",
    )


def _train(raw: dict[str, str]) -> Train:
    dp = int(raw["dp"])
    stated = re.search(r"local batch (\d+)", raw["source"])
    local = int(stated.group(1)) if stated else _number(raw["mbs"], 1)
    # torchtitan cuts a local batch into as many micro batches as there are stages.
    stages = _number(raw["pp"], 1) * (2 if "Interleaved" in raw["source"] else 1)
    micro = _number(raw["mbs"], local // stages if stated else 1)
    usual = dp * local
    batch = _number(raw["gbs"], usual)
    return Train(
        global_batch=batch // (micro * dp) * micro * dp,
        micro_batch=micro,
        seq_len=int(raw["seq"]),
        steps=1,
    )


def _precision(raw: dict[str, str]) -> Precision:
    kind = raw["precision"]
    return Precision(
        compute="fp16" if kind == "fp16" else "bf16",
        reduce="bf16" if "mosaicml" in raw["source"] else "fp32",
        fp8="fp8" in kind,
    )


def _fused(raw: dict[str, str]) -> bool:
    megatron = any(name in raw["source"] for name in ("Megatron", "Korthikanti"))
    return megatron or "compile" in raw["precision"] or "fp8" in raw["precision"]


def _stage(text: str) -> Any:
    if "SHARD_GRAD_OP" in text:
        return 2
    if "FSDP" in text:
        return 3
    return int(text[-1]) if text.startswith("ZeRO") else 0


def _cluster(raw: dict[str, str]) -> Cluster:
    name = raw["gpu"]
    if name.startswith(("H100-96GB", "H100-95GB")):
        clock = (500 / 700) ** (1 / 3)
        peaks = Peaks(bf16=989.4 * clock, fp8=1978.9 * clock)
        return Cluster(device="h100-sxm", memory_gib=94.0, memory_gbs=2400.0, peaks=peaks)
    device = {
        "A100-80GB": "a100-80",
        "A100-40GB": "a100-40",
        "H100-80GB": "h100-sxm",
        "B200": "b200",
    }[name]
    if "SC21" in raw["source"] or "Korthikanti" in raw["source"]:
        return Cluster(device=device, reached=Reached(attention=46 / 312))
    if "mosaicml" in raw["source"]:
        return Cluster(device=device, reached=Reached(attention=_FIRST_FLASH[device]))
    return Cluster(device=device)


def _measured(raw: dict[str, str], model: Model) -> float:
    if raw["tokens_per_s_per_gpu"]:
        return float(raw["tokens_per_s_per_gpu"])
    # SC21: Narayanan et al. 2021, arXiv:2104.04473, equation 3: with the recomputed forward pass.
    h, seq = model.hidden, int(raw["seq"])
    flops = 96 * model.layers * h * h * (1 + seq / (6 * h) + model.vocab / (16 * model.layers * h))
    return float(raw["tflops_per_gpu"]) * 1e12 / flops


def predict(rows: Iterable[Row], **efficiencies: float) -> list[float]:
    """Return tokens/s a GPU of each row; efficiencies are factors on the device's own."""
    found, known = [], {}
    for row in rows:
        key = repr((row.config.cluster, row.config.precision))
        if key not in known:
            known[key] = _scaled(hardware_of(row.config), efficiencies)
        found.append(step_time(row.config, known[key], software=row.software).tokens_per_s_per_gpu)
    return found


def _scaled(hardware: Hardware, factors: dict[str, float]) -> Hardware:
    if not factors:
        return hardware
    own = hardware.efficiency
    return replace(
        hardware, efficiency=replace(own, **{k: getattr(own, k) * f for k, f in factors.items()})
    )


def is_fitted(row: Row) -> bool:
    return row.source.endswith(FITTED) or FITTED[0] in row.source


def errors(rows: list[Row], predicted: list[float]) -> list[float]:
    return [p / row.measured - 1 for row, p in zip(rows, predicted, strict=True)]


def table(rows: list[Row], predicted: list[float], each: bool) -> None:
    by_source: dict[str, list[float]] = defaultdict(list)
    for row, guess, error in zip(rows, predicted, errors(rows, predicted), strict=True):
        by_source[row.source].append(error)
        if each:
            print(f"{row.label:78} {row.measured:10.1f} {guess:10.1f} {error:+7.1%}")
    print(f"\n{'rows':>4} {'mean':>6} {'bias':>7} {'max':>7}  source")
    every = [error for some in by_source.values() for error in some]
    for source, some in [*by_source.items(), ("all", every)]:
        worst = max(some, key=abs)
        print(
            f"{len(some):4} {mean(map(abs, some)):6.1%} {mean(some):+7.1%} {worst:+7.1%}  {source[:100]}"
        )


def calibrate(rows: list[Row]) -> dict[str, float]:
    """Return the factors on the assumed efficiencies with the least mean error, by descent along one at a
    time."""
    factors = {"matmul": 1.0, "attention": 1.0, "overlap": 1.0}

    def loss() -> float:
        return mean(map(abs, errors(rows, predict(rows, **factors))))

    best, step = loss(), 0.16
    while step > 0.01:
        before = best
        for name in factors:
            for direction in (1 + step, 1 / (1 + step)):
                kept = factors[name]
                factors[name] = kept * direction
                now = loss()
                best, factors[name] = (now, factors[name]) if now < best else (best, kept)
        if best >= before - 1e-5:
            step /= 2
    return factors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", action="store_true", help="every row")
    parser.add_argument(
        "--calibrate", action="store_true", help="fit on some sources, report on the others"
    )
    options = parser.parse_args()
    rows = read()
    print(NOTES)
    table(rows, predict(rows), options.rows)
    row = rows[-1]
    hardware, began = hardware_of(row.config), time.perf_counter()
    for _ in range(1000):
        step_time(row.config, hardware)
    print(f"\n{(time.perf_counter() - began) * 1e3:.0f} µs a prediction, warm")
    if options.calibrate:
        fitted = [row for row in rows if is_fitted(row)]
        others = [row for row in rows if row not in fitted]
        factors = calibrate(fitted)
        print("\nfitted on", ", ".join(FITTED), ":", {k: round(v, 3) for k, v in factors.items()})
        for name, some in (("fitted", fitted), ("held out", others)):
            was, now = (mean(map(abs, errors(some, predict(some, **f)))) for f in ({}, factors))
            print(f"{name:9} {len(some):4} rows: {was:.1%} as assumed, {now:.1%} as fitted")


if __name__ == "__main__":
    main()
