"""The pipeline's requirements of PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch.torch_version import TorchVersion

from nanoscale.common.errors import UserError
from nanoscale.parallel.pipeline import MULTI, SINGLE, _require_torch


@pytest.mark.parametrize("schedule", sorted({*SINGLE, *MULTI}))
@pytest.mark.parametrize(("version", "splits"), [("2.12.1+cu130", False), ("2.13.0", True)])
def test_backward_passes_are_split_where_torch_can(
    monkeypatch: pytest.MonkeyPatch, schedule: str, version: str, splits: bool
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    if splits or schedule not in ("zero-bubble", "zbv", "dualpipev"):
        _require_torch(schedule)
        return
    with pytest.raises(UserError, match=f"schedule={schedule} needs torch 2.13 or newer"):
        _require_torch(schedule)
