"""What the fork server of the test ranks loads once."""

# ruff: noqa: F401
import torch.distributed.checkpoint
import torch.distributed.fsdp

import nanoscale.train.job
