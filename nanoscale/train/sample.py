"""A text sampled from the model after the training."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from nanoscale.data.tokens.tokenizer import Tokenizer
from nanoscale.models.kv_cache import without_cudnn_attention

TEMPERATURE = 0.7


def uncompiled() -> AbstractContextManager[Any]:
    """Run compiled blocks as they were written: a compilation takes longer than the sample."""
    context: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return context


class NextToken(Protocol):
    def next_token_logits(self, tokens: list[int]) -> Tensor: ...


def sample(
    engine: NextToken, tokenizer: Tokenizer, prompt: str, length: int, context: int, seed: int
) -> str:
    """Return the prompt and its continuation: `length` tokens, fewer if a document ends.

    Every rank must call this at the same time; all draw the same tokens. `context` is the longest sequence
    that the model was trained on.
    """
    generator = torch.Generator().manual_seed(seed)
    prompt_tokens = tokenizer.encode(prompt)
    tokens = [tokenizer.eos, *prompt_tokens]
    # No early exit at a document's end: ranks that disagreed would wait for each other forever.
    for _ in range(length):
        with without_cudnn_attention(), uncompiled():
            logits = engine.next_token_logits(tokens[-context:])
        probability = torch.softmax(logits.cpu()[: tokenizer.vocab_size] / TEMPERATURE, dim=0)
        tokens.append(int(torch.multinomial(probability, 1, generator=generator)))
    generated = tokens[1:]
    return tokenizer.decode(
        generated[: generated.index(tokenizer.eos)] if tokenizer.eos in generated else generated
    )
