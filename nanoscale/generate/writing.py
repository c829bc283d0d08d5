"""Generation: tokens one after another, returned as text as soon as it is certain."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from nanoscale.common.errors import UserError
from nanoscale.generate.sampling import NotFiniteError, Sampling, choose
from nanoscale.generate.weights import Opened

END, STOP, LENGTH, CONTEXT, INTERRUPTED = "end", "stop", "length", "context", "interrupted"

_MOST_ROWS, _MOST_TOKENS, _MOST_CACHE = 64, 1 << 14, 1 << 31
"""The limits of a batch: its prompts, their tokens with padding, and the bytes of its KV cache."""


@dataclass(frozen=True)
class Wish:
    """The settings of one generation."""

    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 256
    stops: tuple[str, ...] = ()
    seed: int = 0
    beams: int = 1
    """Above 1, the likeliest text among so many is searched, and nothing is drawn."""


@dataclass
class Written:
    """The generated text; it grows while `write` runs."""

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
    require_room(opened, tokens, "prompt")
    return tokens


def require_room(opened: Opened, tokens: Sequence[int], kind: str) -> None:
    """Raise a UserError if the tokens of a prompt or conversation exceed the model's context or vocabulary."""
    vocab = opened.model.shape.vocab
    if max(tokens) >= vocab:
        what = f"holds token {max(tokens)}, and the model's ids are in [0, {vocab})"
        raise UserError("usage", f"the {kind} {what}: its tokenizer belongs to another model")
    if len(tokens) >= opened.context:
        what = f"has {len(tokens):,} tokens, and the model's context is {opened.context:,}"
        raise UserError("usage", f"the {kind} {what}, including the answer")


def write(opened: Opened, prompt: Sequence[int], wish: Wish, written: Written) -> Iterator[str]:
    """Yield the text that follows a prompt; `written` collects all of it, and the reason of its end.

    Raises:
        UserError: the model's logits are not numbers.
    """
    for _, text in _grow(opened, [prompt], wish, [written]):
        if text:
            yield text


@dataclass(frozen=True)
class WritingBatch:
    """Prompts that are answered together, each with the same seed."""

    prompts: Sequence[Sequence[int]]
    wish: Wish
    ends: frozenset[int]
    """Tokens that end a text."""

    def run(self, opened: Opened) -> list[Written]:
        """Return the texts. Raises: see `write`."""
        written = [Written() for _ in self.prompts]
        for _ in _grow(replace(opened, ends=self.ends), self.prompts, self.wish, written):
            pass
        return written


def batches(opened: Opened, prompts: Sequence[Sequence[int]], wish: Wish) -> Iterator[WritingBatch]:
    """Yield the prompts in batches, in their order. The batches do not depend on the devices."""
    shape, parameter = opened.model.shape, next(opened.model.parameters())
    cached = 2 * shape.layers * shape.kv_head_count * shape.head_width * parameter.element_size()
    first, longest = 0, 0
    for number, prompt in enumerate(prompts):
        longest = max(longest, len(prompt))
        count, room = number - first + 1, min(opened.context, longest + wish.max_tokens)
        full = count > _MOST_ROWS or count * longest > _MOST_TOKENS
        full |= shape.source == "hf" and len(prompt) != len(prompts[first])  # see `HFCache`
        if number > first and (full or count * room * cached > _MOST_CACHE):
            yield WritingBatch(prompts[first:number], wish, opened.ends)
            first, longest = number, len(prompt)
    if prompts:
        yield WritingBatch(prompts[first:], wish, opened.ends)


def _grow(
    opened: Opened, prompts: Sequence[Sequence[int]], wish: Wish, written: Sequence[Written]
) -> Iterator[tuple[int, str]]:
    """Yield the number of a prompt and its next text, which may be empty; token by token."""
    rows = [
        _Row(opened, number, prompt, wish, written[number]) for number, prompt in enumerate(prompts)
    ]
    if wish.beams > 1:
        for row in rows:
            found = iter(_search(opened, row.new, wish))
            while not row.ended:  # a stop text may come before the last token
                yield row.number, row.take(next(found))
        return
    room = min(opened.context, max(map(len, prompts)) + wish.max_tokens)
    cache = opened.cache(len(rows), room)
    while rows:
        counts = torch.tensor([len(row.new) for row in rows])
        ids = torch.zeros(len(rows), int(counts.max()), dtype=torch.long)
        for line, row in zip(ids, rows, strict=True):
            line[: len(row.new)] = torch.tensor(row.new)
        logits = cache.logits(ids.to(opened.device), counts, last_only=True)[:, -1, : opened.vocab]
        try:
            tokens = choose(logits, wish.sampling, [row.generator for row in rows])
        except NotFiniteError:
            raise _not_finite(opened) from None
        for row, token in zip(rows, tokens, strict=True):
            yield row.number, row.take(token)
        active = [place for place, row in enumerate(rows) if not row.ended]
        if 0 < len(active) < len(rows):
            cache.keep(active)
        rows = [rows[place] for place in active]


def _search(opened: Opened, prompt: Sequence[int], wish: Wish) -> list[int]:
    """Return the tokens of the likeliest text among `wish.beams` that are extended together.

    A score is the log-likelihood over the number of tokens, the end token included, as in transformers
    (length_penalty=1, early_stopping=False). So many texts are extended until as many have ended, of which none
    is less likely than the likeliest of the others.
    """
    room = min(opened.context - len(prompt), wish.max_tokens)
    cache = opened.cache(wish.beams, len(prompt) + room)
    scores = torch.full((wish.beams, 1), -torch.inf, dtype=torch.float64)
    scores[0] = 0.0  # all begin with the same text, so only one of them counts
    texts: list[list[int]] = [[]] * wish.beams
    new, ended = [list(prompt)] * wish.beams, list[tuple[float, list[int]]]()
    for length in range(1, room + 1):
        counts = torch.tensor([len(tokens) for tokens in new])
        logits = cache.logits(torch.tensor(new).to(opened.device), counts, last_only=True)
        logits = logits[:, -1, : opened.vocab].cpu().double()
        if not logits.isfinite().all():
            raise _not_finite(opened)
        totals = (scores + logits.log_softmax(-1)).flatten()
        best = totals.topk(min(2 * wish.beams, len(totals)))
        running: list[tuple[float, int]] = []
        for rank, (score, place) in enumerate(zip(*(it.tolist() for it in best), strict=True)):
            parent, token = divmod(place, opened.vocab)
            if token not in opened.ends:
                running.append((score, place))
            elif rank < wish.beams:
                ended.append((score / length, [*texts[parent], token]))
        running, ended = running[: wish.beams], sorted(ended, reverse=True)[: wish.beams]
        parents, tokens = zip(*(divmod(place, opened.vocab) for _, place in running), strict=True)
        texts = [[*texts[parent], token] for parent, token in zip(parents, tokens, strict=True)]
        if len(ended) == wish.beams and ended[-1][0] >= running[0][0] / length:
            return ended[0][1]
        scores = torch.tensor([[score] for score, _ in running], dtype=torch.float64)
        cache.keep(parents)
        new = [[token] for token in tokens]
    ended += [(score / room, text) for (score, _), text in zip(running, texts, strict=True)]
    return max(ended)[1]


class _Row:
    """One text of a batch."""

    def __init__(
        self, opened: Opened, number: int, prompt: Sequence[int], wish: Wish, written: Written
    ) -> None:
        self.number = number
        self.new = list(prompt)
        """The tokens that the model has not seen yet."""
        self.ended = False
        self.generator = torch.Generator().manual_seed(wish.seed)
        self._opened, self._wish, self._written = opened, wish, written
        self._characters = Characters(opened.tokenizer.decode, prompt)
        self._ending = Ending(wish.stops)
        written.prompt_tokens = len(prompt)

    def take(self, token: int) -> str:
        """Add a token and return the text that it completes."""
        self.new = [token]
        reason = self._record(token)
        text = "" if reason == END else self._ending.add(self._characters.add(token))
        if reason and not self._ending.reached:
            text += self._ending.add(self._characters.rest()) + self._ending.rest()
        if self._ending.reached:
            reason = STOP
        self._written.text += text
        if reason:
            self._written.finish, self.ended = reason, True
        return text

    def _record(self, token: int) -> str:
        """Record a token; return the reason if it is the last one, or ""."""
        if token in self._opened.ends:
            return END
        written = self._written
        written.tokens.append(token)
        if len(written.tokens) == self._wish.max_tokens:
            return LENGTH
        full = written.prompt_tokens + len(written.tokens) >= self._opened.context
        return CONTEXT if full else ""


def _not_finite(opened: Opened) -> UserError:
    return UserError(
        "checkpoint",
        f"{opened.source}: the model's logits are not finite; its training has diverged, "
        "or --dtype has too small a range for it",
    )


_UNKNOWN = "\ufffd"
"""The replacement for bytes that are not a character, or not yet one."""
_CONTEXT = 8
"""Tokens before the decoded ones: in some tokenizers they decide about a leading space."""
_LONGEST = 64
"""Tokens that are decoded together before older ones are dropped."""


class Characters:
    """A decoder that returns text as soon as its characters are complete: a token may be a part of a
    character.

    The returned texts, with `rest`, make the text of the tokens after the prompt.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int]) -> None:
        self._decode = decode
        self._tokens = list(prompt[-_CONTEXT:])
        self._given = len(decode(self._tokens))

    def add(self, token: int) -> str:
        """Return the new text of this token."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        certain = text.rstrip(_UNKNOWN)  # later tokens may complete a character
        new = certain[self._given :]
        self._given = max(self._given, len(certain))
        if certain == text and len(self._tokens) > _LONGEST:
            self._tokens = self._tokens[-_CONTEXT:]
            self._given = len(self._decode(self._tokens))
        return new

    def rest(self) -> str:
        """Return the bytes that never became a character."""
        return self._decode(self._tokens)[self._given :]


class Ending:
    """A filter that passes text up to the first stop word; a possible beginning of one is withheld."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.reached = False

    def add(self, text: str) -> str:
        """Return the text that may be shown."""
        text = self._held + text
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.reached, self._held = True, ""
            return text[: min(places)]
        length = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - length :]
        return text[: len(text) - length]

    def rest(self) -> str:
        """Return the text that was withheld."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `stop`."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)
