"""Numbers of the code that Inductor writes for a GPU, run on a CPU and compared with eager blocks in fp64."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from tests.support import interpreted, jobs, layouts
from tests.support.ranks import LIMIT_S
from tests.support.rows import exhaustive, usual_rows

FAMILIES: dict[str, Any] = {
    "Llama": (jobs.SHAPE, [0]),
    "gpt-oss": (layouts.GPT_OSS, [0]),
    "MoE": (layouts.MOE, [0]),
    "GPT-2": (layouts.GPT2, [0]),
    "Qwen2": (layouts.QWEN2, [0]),
    "Qwen3": (layouts.QWEN3, [0]),
    "Gemma, with a window and without": (layouts.GEMMA, [0, 1]),
    "OLMo 2": (layouts.OLMO2, [0]),
    "GLM-4": (layouts.GLM4, [0]),
    "MLA": (layouts.MLA, [0]),
    "SmolLM3, rotated and not": (layouts.SMOLLM3, [0, 1]),
    "DeepSeek-V3, dense and with groups of experts": (layouts.GROUPED, [0, 1]),
    "shared experts with a gate": (layouts.SHARED, [0]),
}
"""Shapes and the numbers of the blocks."""
BOUND = 1e-5


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    pytest.importorskip("triton")
    with interpreted.process() as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize("family", usual_rows(FAMILIES, ["Llama", "gpt-oss", "MoE"]))
def test_blocks_compiled_for_a_gpu_compute_what_eager_ones_compute(
    process: ProcessPoolExecutor, family: Any
) -> None:
    shape, blocks = family
    compared = process.submit(interpreted.differences, shape, blocks)
    differences, kernels = compared.result(LIMIT_S)
    assert len(kernels) >= 8 * len(blocks)  # of both passes
    assert max(differences.values()) < BOUND, differences


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        exhaustive(("32.0, tl.float32", "33.0, tl.float32"), "output", name="a mean over 33"),
        exhaustive(("tl.sigmoid(", "tl.exp("), "input", name="a derivative"),
    ],
)
def test_a_wrong_kernel_is_seen(
    process: ProcessPoolExecutor, change: tuple[str, str], wrong: str
) -> None:
    shape, blocks = FAMILIES["Llama"]
    planted = process.submit(interpreted.differences, shape, blocks, change)
    differences, _ = planted.result(LIMIT_S)
    assert differences[wrong] > 100 * BOUND, differences
    assert wrong == "output" or differences["output"] < BOUND
