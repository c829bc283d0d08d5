"""Linear recurrences with decay in chunks: Mamba 2's, the gated delta rule, and Kimi's delta attention.

A state S `[key, value]` passes from token to token, and starts with zeros in every document:
S_t = exp(decay_t) S_{t-1} + k_t u_tᵀ, out_t = S_tᵀ q_t. Mamba 2 writes u_t = v_t (Dao & Gu 2024,
arXiv:2405.21060). The delta rule writes u_t = rate_t (v_t - (exp(decay_t) S_{t-1})ᵀ k_t) (Yang et al. 2024,
arXiv:2412.06464), with one decay for each head, or one for each channel of its keys (Kimi Team 2025,
arXiv:2510.26692).
"""

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 64
"""The tokens of a chunk, a power of 2: pairs of tokens within a chunk are computed by matrix products."""


def recur(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    documents: Tensor,
    state: Tensor | None = None,
    *,
    rate: Tensor | None = None,
    chunk: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the outputs `[rows, seq, heads, value]` and the state after the last token.

    Memory grows with the sequence and not with its square. All exponents are at most 0.

    Args:
        q, k: `[rows, seq, groups, key]`; neighboring heads of a group share them.
        v: `[rows, seq, heads, value]`.
        decay: logarithms, at most 0: `[rows, seq, heads, 1 or key]`.
        documents: integers `[rows, seq]`, which differ for neighboring documents.
        state: the state of the first token's document before it, `[rows, heads, key, value]`; None: zeros.
            It may have more columns, for which v is 0.
        rate: the rates of the delta rule, `[rows, seq, heads]`; None: u_t = v_t.
        chunk: the tokens of a chunk, a power of 2; 0: CHUNK.
    """
    chunk, (rows, seq, groups) = chunk or CHUNK, k.shape[:3]
    heads, padding = v.shape[2], -seq % chunk

    def chunks(x: Tensor) -> Tensor:  # [chunks, rows, groups, heads of a group, chunk, width]
        x = F.pad(x, (0, 0, 0, 0, 0, padding)).unflatten(1, (-1, chunk))
        return x.unflatten(3, (groups, -1)).permute(1, 0, 3, 4, 2, 5)

    q, k, v, total = chunks(q), chunks(k), chunks(v), chunks(decay).cumsum(-2)
    enters, leaves, kept, same = _visibility(documents, chunk)
    since_start = total.exp() * enters
    reads, writes = q * since_start, k * (total[..., -1:, :] - total).exp() * leaves
    keeps = (total[..., -1:, :].exp() * kept).mT
    scores, corrects = _pairs(q, k, total) * same, None
    if rate is not None:
        rates = chunks(rate.unsqueeze(-1))
        targets = torch.cat((v, k * since_start), -1) * rates
        matrix = _pairs(k, k, total) * same * rates
        solved = torch.linalg.solve_triangular(matrix, targets, upper=False, unitriangular=True)
        v, corrects = solved.split((v.shape[-1], k.shape[-1]), -1)
    if state is None:
        state = v.new_zeros(rows, heads, k.shape[-1], v.shape[-1])
    v = F.pad(v, (0, state.shape[-1] - v.shape[-1]))
    state, outputs = state.to(v.dtype).unflatten(1, (groups, -1)), []
    # Unbinding keeps the backward pass linear: the gradient of an index is as large as all chunks.
    corrections = [None] * len(v) if corrects is None else corrects.unbind()
    by_chunk = zip(
        *(x.unbind() for x in (reads, scores, writes, keeps, v)), corrections, strict=True
    )
    for read, score, write, keep, written, correction in by_chunk:
        written = written if correction is None else written - correction @ state
        outputs.append(read @ state + score @ written)
        state = keep * state + write.mT @ written
    out = torch.stack(outputs, 1).permute(0, 1, 4, 2, 3, 5).reshape(rows, -1, heads, v.shape[-1])
    return out[:, :seq], state.flatten(1, 2)


def _visibility(documents: Tensor, chunk: int) -> tuple[Tensor, ...]:
    """Return the tokens of each chunk that read the state before it, the tokens that write to the state after,
    True if the second state keeps the first, and the pairs of tokens of one document."""
    padding = documents[:, -1:].expand(-1, -documents.shape[1] % chunk)
    numbers = torch.cat((documents, padding), 1).unflatten(1, (-1, chunk)).transpose(0, 1)
    numbers = numbers[:, :, None, None, :, None]
    last = numbers[..., -1:, :]
    before = torch.cat((numbers[:1, ..., :1, :], last[:-1]))
    return numbers == before, numbers == last, before == last, (numbers == numbers.mT).tril()


def _pairs(a: Tensor, b: Tensor, total: Tensor) -> Tensor:
    """Return Σ a_ic b_jc exp(total_ic - total_jc) over channels c, for tokens j ≤ i of each chunk."""
    size = a.shape[-2]
    if total.shape[-1] == 1:
        later = torch.ones(size, size, dtype=torch.bool, device=a.device).triu(1)
        return (a @ b.mT) * (total - total.mT).masked_fill(later, -torch.inf).exp()
    # Neighboring blocks are joined, whose pairs meet at the last token of the first block.
    pairs = (a * b).sum(-1).expand(total.shape[:-1])[..., None, None]
    for length in (2**i for i in range(size.bit_length() - 1)):
        halves = [x.unflatten(-2, (-1, 2, length)).unbind(-3) for x in (a, b, total)]
        (_, second), (first, _), (before, after) = halves
        edge = before[..., -1:, :]
        across = (second * (after - edge).exp()) @ (first * (edge - before).exp()).mT
        upper, lower = pairs.unflatten(-3, (-1, 2)).unbind(-3)
        upper = torch.cat((upper, torch.zeros_like(across)), -1)
        pairs = torch.cat((upper, torch.cat((across, lower), -1)), -2)
    return pairs.squeeze(-3)
