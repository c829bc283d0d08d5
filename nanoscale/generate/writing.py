"""A model that writes: tokens one after another, given as text as soon as that is certain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from nanoscale.common.errors import UserError, Violation
from nanoscale.generate.sampling import Sampling, choose
from nanoscale.generate.text import Characters, Ending
from nanoscale.generate.weights import Opened
from nanoscale.models.cache import Cache

END, STOP, LENGTH, CONTEXT, INTERRUPTED = "end", "stop", "length", "context", "interrupted"


@dataclass(frozen=True)
class Wish:
    """What is to be written after a prompt."""

    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 256
    stops: tuple[str, ...] = ()
    seed: int = 0


@dataclass
class Written:
    """What was written; it grows while `write` goes on."""

    prompt: str
    text: str = ""
    prompt_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    finish: str = INTERRUPTED
    """`end`: the model ended the text · `stop`: a word to stop at · `length`: enough tokens · `context`: the
    model can look at no more · `interrupted`"""


def encode(opened: Opened, text: str) -> list[int]:
    """The ids of a prompt, with what stands before every text.

    Raises:
        UserError: they are more than the model can look at, or ids that it has not.
    """
    tokens = [*opened.before, *opened.tokenizer.encode(text)]
    tokens = tokens or [opened.start]  # after nothing at all nothing can be predicted
    if max(tokens) >= opened.model.shape.vocab:
        what = (
            f"holds token {max(tokens)}, and the model's ids lie in [0, {opened.model.shape.vocab})"
        )
        raise UserError("usage", f"the prompt {what}: its tokenizer is another model's")
    if len(tokens) >= opened.context:
        what = f"has {len(tokens):,} tokens, and the model looks at {opened.context:,}"
        found = Violation("--prompt", text, "", f"{what}, the answer's among them")
        raise UserError("usage", f"the prompt {what}, the answer's among them", [found])
    return tokens


def write(opened: Opened, prompt: Sequence[int], wish: Wish, written: Written) -> Iterator[str]:
    """Text that follows a prompt, piece by piece; all of it, and why it ended, in `written`.

    Raises:
        NotFiniteError: the model's logits are not numbers.
    """
    generator = torch.Generator().manual_seed(wish.seed)
    room = min(opened.context, len(prompt) + wish.max_tokens)
    cache = Cache(opened.model, 1, room)
    characters, ending = Characters(opened.tokenizer.decode, prompt), Ending(wish.stops)
    written.prompt_tokens = len(prompt)
    new = list(prompt)
    reason = ""
    while not reason:
        ids = torch.tensor([new], device=opened.device)
        logits = cache.logits(ids, last_only=True)[0, -1, : opened.vocab]
        new = [choose(logits, wish.sampling, generator)]
        reason = _take(new[0], opened, wish, written)
        piece = "" if reason == END else ending.add(characters.add(new[0]))
        if reason and not ending.reached:
            piece += ending.add(characters.rest()) + ending.rest()
        if ending.reached:
            reason = STOP
        written.text += piece
        if reason:
            written.finish = reason
        if piece:
            yield piece


def _take(token: int, opened: Opened, wish: Wish, written: Written) -> str:
    """Note a token; why it is the last one, or ""."""
    if token in opened.ends:
        return END
    written.tokens.append(token)
    if len(written.tokens) == wish.max_tokens:
        return LENGTH
    full = written.prompt_tokens + len(written.tokens) >= opened.context
    return CONTEXT if full else ""
