"""FlashAttention 3 or 4 in place of PyTorch's FlashAttention 2, where one is installed and computes the same.

PyTorch's operations for documents, windows, sinks and blocks of a ring run FlashAttention 2. An installed
package can take their place in a process (`torch.nn.attention.activate_flash_attention_impl`). The head sizes,
windows and backward passes that it has differ from version to version, so a trial with the job's shapes
decides.
"""

import warnings
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import attention

from nanoscale.config.resolved import ResolvedConfig
from nanoscale.models.attention import pad_heads
from nanoscale.models.attention_kernels import KERNELS, Attended, Limits, Pairs, has_cuda_flash
from nanoscale.parallel.fsdp import TORCH_DTYPES

_NEWER = {
    "FA3": ((9,), ("flash_attn_interface",)),
    "FA4": ((9, 10), ("flash_attn", "flash_attn.cute")),
}
"""Newer versions, the fastest first: the major compute capabilities on which they are faster, and packages."""
_STARTS, _LONGEST = (0, 70, 70, 300, 384), 230
_TOLERANCE = 2**-5
"""Share of the largest number by which results in 16 bits may differ."""


def use_newest_flash(config: ResolvedConfig, device: torch.device) -> None:
    """Activate the fastest installed FlashAttention that passes a trial; warn about one that does not.

    A deterministic job keeps FlashAttention 2, and its order of sums.
    """
    chosen, dtype = config.backend.attention, TORCH_DTYPES[config.precision.compute]
    if config.precision.deterministic or chosen not in ("auto", "flash") or dtype.itemsize != 2:
        return
    if not has_cuda_flash() or attention.current_flash_attention_impl():
        return
    expected: list[Tensor] = []
    for name, (majors, packages) in _NEWER.items():
        try:
            if torch.cuda.get_device_capability()[0] not in majors or not all(
                map(find_spec, packages)
            ):
                continue
            expected = expected or _results(config, device, dtype)
            attention.activate_flash_attention_impl(name)
            for found, right in zip(_results(config, device, dtype), expected, strict=True):
                largest = right[right.isfinite()].abs().max().item()
                torch.testing.assert_close(found, right, rtol=0, atol=_TOLERANCE * largest)
        except Exception as error:  # whatever a package raises, training can do without it
            attention.restore_flash_attention_impl(False)
            warnings.warn(f"{name} is installed, but fails a trial: {error}", stacklevel=2)
        else:
            return


def _results(config: ResolvedConfig, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Return the results and gradients of attention with the job's heads and window, as layers call it."""
    model, generator = config.model, torch.Generator().manual_seed(0)
    queries = torch.tensor(_STARTS, dtype=torch.int32, device=device)
    keys = queries.clone()
    keys[1] = 0  # documents of a ring's block may have no keys
    rows, width = _STARTS[-1], model.head_width

    def draw_two(heads: int) -> tuple[Tensor, ...]:
        two = torch.randn(2, 1, heads, rows, width, generator=generator)
        return pad_heads("flash-cuda", *two.to(device, dtype))

    (q, grad), (k, v) = draw_two(model.heads), draw_two(model.kv_head_count)
    kernel, results = KERNELS["flash-cuda"], []
    windows = dict.fromkeys((None, model.sliding_window))
    causal = [None, *(Limits(queries, queries, _LONGEST, it) for it in windows)]  # None: whole rows
    for limits in [*causal, Limits(queries, keys, _LONGEST)]:
        pairs = Pairs(limits is None or limits.keys is queries, width**-0.5, limits)
        out, lse = kernel.forward(q, k, v, pairs)
        # A ring gives the log-sum-exp of all its keys.
        whole = Attended(q, k, v, out, lse.nan_to_num(neginf=0.0))
        results += [out, lse, *kernel.backward(grad, whole, pairs)]
    return results
