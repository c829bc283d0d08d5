"""Single operations against published measurements and against counting by hand."""

from __future__ import annotations

from math import ceil

import pytest

from nanoscale.plan.time import operations
from nanoscale.plan.time.operations import attention, elementwise, product
from tests.plan.machines import changed, machine

IDEAL = {"matmul": 1.0, "memory": 1.0, "attention": 1.0}


@pytest.mark.parametrize(
    ("device", "kind", "m", "n", "k", "tflops"),
    [
        ("a100-80", "fp16", 1024, 1024, 1024, 119.4),
        ("a100-80", "fp16", 2048, 2048, 2048, 221.8),
        ("a100-80", "fp16", 4096, 4096, 4096, 228.0),
        ("a100-80", "fp16", 8192, 8192, 8192, 253.7),
        ("a100-80", "fp16", 6144, 12288, 12288, 250.8),
        ("a100-80", "fp16", 802816, 192, 768, 157.8),
        ("h100-sxm", "fp8", 2048, 2048, 2048, 1011.3),
        ("h100-sxm", "fp8", 4096, 4096, 4096, 1216.9),
        ("h100-sxm", "fp8", 8192, 8192, 8192, 1290.1),
        ("h100-sxm", "fp8", 802816, 192, 768, 663.8),
        ("gb200", "fp8", 2048, 2048, 2048, 1676.1),
        ("gb200", "fp8", 8192, 8192, 8192, 2848.0),
        ("mi300x", "fp8", 8192, 8192, 8192, 1159.2),
    ],
)
def test_products_as_fast_as_measured(device, kind, m, n, k, tflops):
    """Random numbers, hot devices: Azure's AI benchmarking guide, cuBLASLt and hipBLASLt."""
    seconds = product(machine(device), kind, m, n, k)
    assert 2 * m * n * k / seconds / 1e12 == pytest.approx(tflops, rel=0.125)


def test_a_product_with_one_row_takes_what_its_matrix_takes_to_read():
    hardware = changed(machine(), **IDEAL)
    seconds = product(hardware, "bf16", 1, 8192, 8192) - operations.FILL
    assert seconds == pytest.approx(2 * 8192**2 / hardware.memory_bandwidth, rel=1e-3)


def test_waves_are_those_of_dealing_tiles_one_by_one():
    """11 × 12 tiles fill 132 multiprocessors; a row of tiles more begins a second wave."""
    units = 132

    def rounds(m: int, n: int) -> int:
        busy = [0] * units
        for tile in range(ceil(m / 256) * ceil(n / 128)):
            busy[tile % units] += 1
        return max(busy)

    full = operations.waves(units, 11 * 256, 12 * 128)
    assert full == pytest.approx(rounds(11 * 256, 12 * 128)) == 1
    more = operations.waves(units, 12 * 256, 12 * 128)
    whole = rounds(12 * 256, 12 * 128) / (12 / 11)
    assert 1 < more <= min(whole, operations.SPLIT)


def test_few_tiles_leave_multiprocessors_idle():
    assert operations.waves(132, 128, 128) > 40
    assert operations.waves(132, 8192, 8192) < 1.1


@pytest.mark.parametrize(
    "shape", [(4096, 4096, 4096), (100, 4096, 300), (8192, 1024, 64), (1, 1, 1)]
)
@pytest.mark.parametrize("device", ["a100-80", "h100-sxm", "b200", "cpu"])
def test_nothing_beats_the_peak(shape, device):
    m, n, k = shape
    hardware = machine(device)
    assert 2 * m * n * k / product(hardware, "bf16", m, n, k) < hardware.peaks["bf16"]


@pytest.mark.parametrize("better", ["peaks", "memory_bandwidth", "matmul", "memory"])
def test_a_better_device_is_never_slower(better):
    slow = machine()
    if better == "peaks":
        fast = changed(slow, peaks={kind: 1.3 * peak for kind, peak in slow.peaks.items()})
    else:
        was = getattr(slow if hasattr(slow, better) else slow.efficiency, better)
        fast = changed(slow, **{better: 1.3 * was})
    for shape in ((64, 64, 64), (1, 8192, 8192), (4096, 4096, 4096), (8192, 8192, 128)):
        assert product(fast, "bf16", *shape) <= product(slow, "bf16", *shape)


@pytest.mark.parametrize(
    ("device", "head_dim", "tflops"),
    [("h100-sxm", 128, 327.9), ("h200", 128, 329.3), ("a100-80", 64, 179.5)],
)
def test_attention_as_fast_as_measured(device, head_dim, tflops):
    """FlashAttention-2 with batch 2 and sequence 8192: Azure's AI benchmarking guide."""
    seconds = attention(machine(device), "bf16", 2, 8192, 8192, 16, head_dim)
    flops = 4 * 2 * 16 * head_dim * 8192**2 / 2
    assert flops / seconds / 1e12 == pytest.approx(tflops, rel=0.08)


def test_a_causal_pass_computes_the_diagonals_tiles_whole():
    """Counted tile by tile: 128 queries by 128 keys, those above the diagonal skipped."""
    hardware = changed(machine(), attention=1.0)
    seq, tile = 4096, 128
    tiles = sum(row + 1 for row in range(seq // tile))
    flops = 64 * 4 * tile * tile * 128 * tiles
    rate = hardware.peaks["bf16"] * seq / (seq + 2 * tile)
    seconds = attention(hardware, "bf16", 1, seq, seq, 64, 128) - operations.FILL
    assert seconds == pytest.approx(flops / rate)


@pytest.mark.parametrize(
    ("seq", "heads", "share"),
    [(4096, 64, 0.8715), (4096, 128, 0.9967), (131072, 8, 1.0028), (131072, 16, 0.9888)],
)
def test_attention_of_cudnn_on_a_b200(seq, heads, share):
    """SimuMax, b200_bf16_ceperm.json: of 2250 TFLOP/s, the masked half counted as well."""
    seconds = attention(machine("b200"), "bf16", 1, seq, seq, heads, 128, kernel="cudnn")
    assert 4 * heads * 128 * seq**2 / seconds / 2250e12 == pytest.approx(share, rel=0.10)


def test_few_heads_take_as_long_as_twice_as_many():
    """4 heads of 4096 tokens took a B200 91 µs and 8 of them 98 (SimuMax): the longest tile decides."""
    four, eight, many = (
        attention(machine("b200"), "bf16", 1, 4096, 4096, heads, 128, kernel="cudnn")
        for heads in (4, 8, 64)
    )
    assert four == eight < many


@pytest.mark.parametrize("degree", [2, 8])
def test_a_ring_computes_what_one_device_would(degree):
    """Pairs of queries and keys, counted: the mirrored chunks give every rank an equal share."""
    hardware, seq = changed(machine(), attention=1.0), 2**20
    part = seq // degree
    own = attention(hardware, "bf16", 1, part, part, 8, 128)
    hop = attention(hardware, "bf16", 1, part, part // 2, 8, 128, causal=False)
    whole = attention(hardware, "bf16", 1, seq, seq, 8, 128)
    assert own + (degree - 1) * hop == pytest.approx(whole / degree, rel=0.01)


def test_products_of_llamas_blocks_on_a_b200():
    """SimuMax, b200_bf16_ceperm.json: shares of 2250 TFLOP/s, forward and of the gradients of inputs."""
    measured = {
        (4096, 10240, 8192): 0.645, (4096, 8192, 10240): 0.498, (4096, 57344, 8192): 0.487,
        (4096, 8192, 57344): 0.483, (4096, 8192, 28672): 0.485, (4096, 28672, 8192): 0.474,
        (4096, 128256, 8192): 0.487, (4096, 20480, 16384): 0.533, (4096, 16384, 16384): 0.510,
        (4096, 106496, 16384): 0.496, (4096, 16384, 106496): 0.512, (4096, 53248, 16384): 0.501,
    }  # fmt: skip
    errors = [
        2 * m * n * k / product(machine("b200"), "bf16", m, n, k) / 2250e12 / share - 1
        for (m, n, k), share in measured.items()
    ]
    assert abs(sum(errors) / len(errors)) < 0.05
    assert sorted(map(abs, errors))[len(errors) // 2] < 0.05


def test_elementwise_work_is_its_bytes():
    hardware = changed(machine(), memory=0.5)
    assert elementwise(hardware, 3.35e12) == pytest.approx(2.0)
