"""What the fork server of the test ranks loads once."""

# ruff: noqa: F401
import os

os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is loaded

import deepspeed
import torch.distributed.checkpoint
import torch.distributed.fsdp

import nanoscale.train.job
