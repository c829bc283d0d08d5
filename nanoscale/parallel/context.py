"""Context parallelism: attention over a sequence that is divided over ranks, by one of two methods.

| method | a rank holds | communicated | limits the degree |
|---|---|---|---|
| ring | two chunks, mirrored about the middle | keys and values, from rank to rank | sequence / 2 |
| ulysses | one contiguous part | heads for sequence and back, all to all | key and value heads |

A core takes this rank's q `[batch, heads, seq, head_dim]` and k, v `[batch, kv_heads, seq, head_dim]` and
returns `[batch, heads, seq, head_dim]`, causal over the whole sequence. The rest of the model works on single
tokens and needs only their `positions`. Documents may end anywhere in the whole sequence.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce, all_to_all_single_autograd

from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Model
from nanoscale.models.attention import AttentionSpan, CausalAttention, Mask, pad_heads
from nanoscale.models.attention_kernels import choose_kernel, has_cudnn
from nanoscale.models.hf_model import HFModel
from nanoscale.models.mixers.pieces import Division
from nanoscale.models.moe import Router
from nanoscale.models.transformer import Attention, LatentAttention, Transformer
from nanoscale.parallel.ring import ring_attention
from nanoscale.parallel.sequence_parallel import ResidualStream


def positions(method: str, seq: int, rank: int, degree: int, device: torch.device) -> Tensor:
    """Return the positions of a rank's `seq` tokens in the whole sequence: int64 `[seq]`."""
    if method == "ulysses":
        return torch.arange(rank * seq, (rank + 1) * seq, device=device)
    assert method == "ring", method
    assert seq % 2 == 0, f"a rank of the ring holds two chunks, and {seq} tokens are not"
    chunk = torch.arange(seq // 2, device=device)
    mirrored = 2 * degree - 1 - rank
    return torch.cat((chunk + rank * len(chunk), chunk + mirrored * len(chunk)))


def apply(model: Transformer, config: ResolvedConfig, group: dist.ProcessGroup, rank: int) -> None:
    """Divide the sequence over the ranks of a group, in place."""
    method, degree = config.parallel.cp_method, config.parallel.cp
    model.sequence_length = lambda seq: seq * degree
    model.token_positions = lambda seq, device: positions(method, seq, rank, degree, device)
    if isinstance(model, HFModel):
        model.attend_with(make_core(method, group, config.model))
        model.division = make_division(method, group, rank, degree)
    for module in model.modules():
        if isinstance(module, Attention | LatentAttention):
            module.core = make_core(method, group, config.model)
        if isinstance(module, Router):
            module.sum_over_sequence = _summed_also(module.sum_over_sequence, group)
    if model.objective is not None:
        model.objective.sum_over_sequence = partial(all_reduce, reduceOp="sum", group=group)
        model.objective.counts_values = rank == 0


def make_division(method: str, group: dist.ProcessGroup, rank: int, degree: int) -> Division:
    """Return the numbers of the pieces of rows that a rank has, and the gathering of all pieces."""
    pieces, cpu = 2 if method == "ring" else 1, torch.device("cpu")
    numbers = [positions(method, pieces, it, degree, cpu) for it in range(degree)]
    order = torch.cat(numbers).argsort().tolist()
    ranks = ResidualStream(group.group_name, degree, divided=True)

    def gather(local: Tensor) -> list[Tensor]:
        by_rank = ranks.gather(local.flatten(1)).unflatten(1, local.shape[1:]).unbind()
        return [by_rank[index] for index in order]

    return Division(numbers[rank].tolist(), gather)


def _summed_also(over_tp: Callable[[Tensor], Tensor], group: dist.ProcessGroup) -> Any:
    return lambda counts: all_reduce(over_tp(counts), "sum", group)


def make_core(method: str, group: dist.ProcessGroup, shape: Model) -> nn.Module:
    return RingAttention(group, shape) if method == "ring" else UlyssesAttention(group, shape)


class RingAttention(CausalAttention):
    """Ring attention: keys and values pass every rank while it computes with the previous ones (see `ring`).

    Layers with a window receive only the tokens that it reaches.
    """

    def __init__(self, group: dist.ProcessGroup, shape: Model) -> None:
        super().__init__(shape)
        self.group, self.cudnn = group, has_cudnn()

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask = None,
        *,
        sinks: Tensor | None = None,
        sees_all: bool = False,
        softcap: float | None = None,
    ) -> Tensor:
        assert not sees_all, "a KV cache has whole sequences"
        softcap = self.softcap if softcap is None else softcap
        head_dim, capped = q.shape[-1], softcap is not None
        ends, longest, window = None, 0, None
        if isinstance(mask, AttentionSpan) or capped:
            length = q.shape[2] * dist.get_world_size(self.group)
            whole = AttentionSpan.whole(len(q), length, q.device)
            span = mask if isinstance(mask, AttentionSpan) else whole
            ends, longest, window = span.ends(len(q), length), span.longest, span.window
        limited = ends is not None
        kernel = choose_kernel(q, self.cuda_flash, limited=limited, capped=capped, cudnn=self.cudnn)
        q, k, v = pad_heads(kernel, q, k, v)
        settings = self.group, kernel, head_dim**-0.5, softcap, window, longest
        out = ring_attention(q, k, v, ends, sinks, *settings)
        return out[..., :head_dim]


class UlyssesAttention(CausalAttention):
    """Ulysses attention: a rank has a share of the heads over the whole sequence (Jacobs et al. 2023,
    arXiv:2309.14509)."""

    def __init__(self, group: dist.ProcessGroup, shape: Model) -> None:
        super().__init__(shape)
        self.group = group

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask = None,
        *,
        sinks: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        degree = dist.get_world_size(self.group)
        assert q.shape[1] % degree == k.shape[1] % degree == 0, "heads are divided over the ranks"
        q, k, v = (_exchange(x, 1, 2, self.group) for x in (q, k, v))
        if sinks is not None:
            sinks = sinks.chunk(degree)[dist.get_rank(self.group)]
        out = super().forward(q, k, v, mask, sinks=sinks, **options)
        return _exchange(out, 2, 1, self.group)


def _exchange(x: Tensor, divided: int, whole: int, group: dist.ProcessGroup) -> Tensor:
    """Divide one dimension over the ranks and gather another."""
    chunks = torch.cat(x.chunk(dist.get_world_size(group), dim=divided))
    chunks = all_to_all_single_autograd(chunks, None, None, group)
    return torch.cat(chunks.split(len(x)), dim=whole)
