"""Loading DeepSpeed for the right device."""

import os
import warnings
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist


def load_deepspeed(device: torch.device) -> Any:
    """Return the package, ready to be initialized. The rank must have joined the process group, if there are
    others."""
    deepspeed = load_quietly(device)
    if not dist.is_initialized():  # it needs a process group, even of one rank
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    return deepspeed


def load_quietly(device: torch.device) -> Any:
    """Import the package without probing for other devices and without compiling unused code."""
    os.environ.setdefault("LOCAL_RANK", "0")
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    if device.type == "cpu":
        # It checks whether the CPU is fast in fp16; PyTorch supports fp16 on every CPU.
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    # It calls some collectives by names that PyTorch has renamed, which users cannot change.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # It would compile an all-reduce for inference on CPUs before the first step.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _load_muon_uncompiled()
    return deepspeed


def _load_muon_uncompiled() -> None:
    """Load an optimizer that ZeRO imports, without compiling it, which would load the compiler.

    That would take 1.4 s of every rank's start.
    """
    from deepspeed.runtime import compiler

    original = compiler.compile
    compiler.compile = lambda *_, **__: lambda function: function
    try:
        with suppress(ImportError):  # a DeepSpeed that has none
            import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        compiler.compile = original
