"""The usual MFU, against the published runs that it sums up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from statistics import median

import pytest

from benchmarks.plan.published_runs import read
from nanoscale.config.hardware.data_sheets import usual_mfu, usual_mfu_text
from nanoscale.config.model_math import parameters
from nanoscale.config.schema import Precision
from tests.plan.machines import job

PEAKS = {"h100-sxm": 989.4e12, "h200": 989.4e12, "mi300x": 1307.4e12}


@pytest.mark.parametrize(
    ("model", "precision", "usual"),
    [
        ("llama-1b", Precision(compute="bf16"), (0.37, 0.60)),
        ("llama-8b", Precision(compute="fp16"), (0.29, 0.56)),
        ("llama-405b", Precision(compute="bf16"), (0.32, 0.56)),
        ("llama-8b", Precision(compute="bf16", fp8=True), (0.13, 0.29)),
        ("llama-8b", Precision(), None),
        ("mixtral-8x7b", Precision(compute="bf16"), None),
    ],
)
def test_it_depends_on_size_and_dtype(model, precision, usual) -> None:
    assert usual_mfu(job(model, precision=precision)) == usual


def test_it_is_said_in_words() -> None:
    text = usual_mfu_text(usual_mfu(job("llama-8b")))
    assert text == "published runs of this size and dtype reach an MFU of 29% to 56%"
    assert usual_mfu_text(None) is None
    assert usual_mfu_text((0.29, 0.56), 0.56) == text
    assert str(usual_mfu_text((0.29, 0.56), 0.6)).endswith(
        "this plan is above them, so expect less"
    )


def test_the_medians_of_published_runs_are_usual() -> None:
    groups: dict[tuple[float, float], list[float]] = defaultdict(list)
    for mfu, usual in published():
        groups[usual].append(mfu)
    assert sum(map(len, groups.values())) > 30
    assert all(low < median(group) < high for (low, high), group in groups.items())


def published() -> Iterator[tuple[float, tuple[float, float]]]:
    """Yield the MFU of runs of whole Llama 3 models, and the usual one."""
    for row in read():
        name = row["model"].replace("llama3", "llama")
        if name not in ("llama-8b", "llama-70b", "llama-405b") or row["gpu"] not in PEAKS:
            continue
        fp8 = row["precision"] == "fp8"
        config = job(name, precision=Precision(compute="bf16", fp8=fp8))
        usual = usual_mfu(config)
        assert usual is not None
        shape = config.model
        width = shape.heads * (shape.head_dim or 0)
        products = parameters(shape) - shape.vocab * shape.hidden
        flops = 6 * products + 12 * shape.layers * width * int(row["seq"])
        peak = PEAKS[row["gpu"]] * (2 if fp8 else 1)
        yield float(row["tok_s_gpu"]) * flops / peak, usual
