from __future__ import annotations

import pytest

from nanoscale.common import devices

A, B, C = ("H200", "GPU-aaaa1111"), ("H200", "GPU-bbbb2222"), ("L4", "GPU-cccc3333")


@pytest.mark.parametrize(
    ("setting", "left"),
    [
        (None, [A, B, C]),
        ("0,1,2", [A, B, C]),
        ("2, 0", [C, A]),
        ("", []),
        ("-1", []),
        ("1,-1,0", [B]),
        ("0,9,1", [A]),
        ("0,0", [A]),
        ("GPU-bbbb,GPU-aaaa1111", [B, A]),
        ("GPU-zzzz,0", []),
        ("MIG-1,MIG-2", [("H200 MIG", "MIG-1"), ("H200 MIG", "MIG-2")]),
    ],
)
def test_the_setting_is_read_as_cuda_reads_it(setting, left):
    assert devices.visible([A, B, C], setting) == left


def test_gpus_come_before_the_cpu(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "_gpus", lambda: [A, C])
    cores = devices.cores()
    assert devices.detect() == devices.Devices("cuda", 2, ("H200", "L4"), cores)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices.detect() == devices.Devices("cpu", cores, cores=cores)


def test_a_containers_quota_limits_the_cores(monkeypatch):
    monkeypatch.setattr(devices, "_quota", lambda: 0.5)
    assert devices.cores() == 1
    monkeypatch.setattr(devices, "_quota", lambda: float("inf"))
    assert devices.cores() >= 1
