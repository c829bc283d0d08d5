"""Generation: tokens one after another, returned as text as soon as it is certain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from nanoscale.common.errors import UserError, Violation
from nanoscale.generate.growing_text import Characters, Ending
from nanoscale.generate.sampling import Sampling, choose
from nanoscale.generate.weights import Opened
from nanoscale.models.kv_cache import Cache

END, STOP, LENGTH, CONTEXT, INTERRUPTED = "end", "stop", "length", "context", "interrupted"


@dataclass(frozen=True)
class Wish:
    """The settings of one generation."""

    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 256
    stops: tuple[str, ...] = ()
    seed: int = 0


@dataclass
class Written:
    """The generated text; it grows while `write` runs."""

    prompt: str
    text: str = ""
    prompt_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    finish: str = INTERRUPTED
    """`end`: the model ended the text · `stop`: a stop word · `length`: `max_tokens` is reached · `context`:
    the model's context is full · `interrupted`."""


def encode(opened: Opened, text: str) -> list[int]:
    """Return the ids of a prompt, with the tokens that precede every text.

    Raises:
        UserError: they exceed the model's context, or its vocabulary.
    """
    tokens = [*opened.before, *opened.tokenizer.encode(text)]
    tokens = tokens or [opened.start]  # an empty input predicts nothing
    if max(tokens) >= opened.model.shape.vocab:
        what = (
            f"holds token {max(tokens)}, and the model's ids are in [0, {opened.model.shape.vocab})"
        )
        raise UserError("usage", f"the prompt {what}: its tokenizer belongs to another model")
    if len(tokens) >= opened.context:
        what = f"has {len(tokens):,} tokens, and the model's context is {opened.context:,}"
        found = Violation("--prompt", text, "", f"{what}, including the answer")
        raise UserError("usage", f"the prompt {what}, including the answer", [found])
    return tokens


def write(opened: Opened, prompt: Sequence[int], wish: Wish, written: Written) -> Iterator[str]:
    """Yield the text that follows a prompt; `written` collects all of it, and the reason of its end.

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
    """Record a token; return the reason if it is the last one, or ""."""
    if token in opened.ends:
        return END
    written.tokens.append(token)
    if len(written.tokens) == wish.max_tokens:
        return LENGTH
    full = written.prompt_tokens + len(written.tokens) >= opened.context
    return CONTEXT if full else ""
