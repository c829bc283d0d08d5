"""The choice of PyTorch's kernels for products and attention on a rank.

They are set for the whole process, before anything is compiled: a choice within a block would be traced with
it, and autograd's threads would not see it.
"""

import os
from typing import Any

import torch

from nanoscale.config.resolved import ResolvedConfig
from nanoscale.models.attention_kernels import (
    choose_kernel,
    has_cuda_flash,
    has_cudnn,
    takes_narrow_values,
)
from nanoscale.parallel.fsdp import TORCH_DTYPES

_SWITCHES = {
    "cudnn": torch.backends.cuda.enable_cudnn_sdp,
    "flash": torch.backends.cuda.enable_flash_sdp,
    "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
    "math": torch.backends.cuda.enable_math_sdp,
}
"""PyTorch's attention kernels; flash and math also have one for CPUs."""
_NAMES = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
"""Names by their numbers in torch.nn.attention.SDPBackend."""


def set_kernels(config: ResolvedConfig) -> None:
    """Enable the kernels that the configuration selects, for this process."""
    if config.precision.tf32 is True:
        torch.set_float32_matmul_precision("high")
    if config.backend.attention != "auto":
        for name, enable in _SWITCHES.items():
            enable(name == config.backend.attention)
    if config.precision.deterministic:
        # cuBLAS and NCCL read these when they start; NVLink's switches add in any order.
        os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_NVLS_ENABLE": "0"}
        torch.backends.cuda.enable_cudnn_sdp(False)  # its backward pass adds in any order
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # Without sequence parallelism the ranks of a tp group compute the same residual stream and gradients of
    # norms, which must stay equal bit for bit; the compiler would choose kernels by its own timings.
    parallel = config.parallel
    replicas = parallel.tp > 1 and not parallel.sequence_parallel
    if config.precision.deterministic or (replicas and config.backend.compile == "on"):
        from torch._inductor import config as inductor

        inductor.deterministic = True


def kernels_in_use(config: ResolvedConfig, device: torch.device) -> dict[str, Any]:
    """Return the attention kernel of this rank, an installed FlashAttention that is used, and cuDNN's version;
    None if unknown or none.

    PyTorch's own choice is determined with a sample of the blocks' shape.
    """
    return {
        "attention": _attention_kernel(config, device),
        "flash": torch.nn.attention.current_flash_attention_impl(),
        "cudnn": torch.backends.cudnn.version(),
    }


def _attention_kernel(config: ResolvedConfig, device: torch.device) -> str | None:
    model, layout, data = config.model, config.parallel, config.data
    if model.source != "own":
        return None  # transformers chooses it
    head_dim = model.head_width
    dtype = TORCH_DTYPES[config.precision.compute]
    ring = layout.cp > 1 and layout.cp_method == "ring"
    capped = model.attention_softcap is not None
    limited = data.document_mask or model.attention_sinks or capped
    if ring or limited:
        one = torch.empty(0, head_dim, dtype=dtype, device=device)
        cudnn = ring and has_cudnn()
        return choose_kernel(one, has_cuda_flash(), limited=limited, capped=capped, cudnn=cudnn)
    seq, head_shards = config.train.seq_len, layout.tp * layout.cp

    def sample(heads: int, width: int = head_dim) -> torch.Tensor:
        shape = (1, heads // head_shards, seq, width)
        return torch.empty(shape, dtype=dtype, device=device, requires_grad=True)

    narrow = layout.cp == 1 and takes_narrow_values(head_dim, model.value_width)
    q, k = sample(model.heads), sample(model.kv_head_count)
    v = sample(model.kv_head_count, model.value_width if narrow else head_dim)
    grouped = q.shape[1] != k.shape[1]
    chosen = torch._fused_sdp_choice(q, k, v, None, 0.0, True, scale=None, enable_gqa=grouped)
    return _NAMES.get(chosen)
