"""The modules that the fork server of the test ranks loads once."""

# ruff: noqa: F401
import gc
import os

os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is loaded

import deepspeed
import pytest
import torch._dynamo.variables  # with the first step, were it not here: more than a second in each rank
import torch._functorch._aot_autograd.runtime_wrappers
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.optim
from transformers import (
    AutoModelForCausalLM,
    BertForSequenceClassification,
    FalconForCausalLM,
    GPT2LMHeadModel,
    GPTNeoXForCausalLM,
    LlamaForSequenceClassification,
    Qwen3ForCausalLM,
)

import nanoscale.backends.deepspeed
import nanoscale.backends.native
import nanoscale.train.job
import tests.support.jobs
import tests.support.reference

gc.collect()
gc.freeze()  # objects made so far stay: no rank searches them for garbage, or writes to their pages
