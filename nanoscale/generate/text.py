"""Text that grows token by token: what of it is certain, and where it is to end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_UNKNOWN = "\ufffd"
"""what stands for bytes that are no character, or not yet"""
_CONTEXT = 8
"""tokens before those decoded: in some tokenizers they decide whether a space stands in front"""
_LONGEST = 64
"""tokens that are decoded together before the older ones are let go"""


class Characters:
    """Gives what tokens say as soon as it is whole: a token may be a part of a character.

    All that was given, with `rest`, is the text that the tokens have after the prompt's.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int]) -> None:
        self._decode = decode
        self._tokens = list(prompt[-_CONTEXT:])
        self._given = len(decode(self._tokens))

    def add(self, token: int) -> str:
        """What is new with this token."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        certain = text.rstrip(_UNKNOWN)  # what comes may make a character of it
        new = certain[self._given :]
        self._given = max(self._given, len(certain))
        if certain == text and len(self._tokens) > _LONGEST:
            self._tokens = self._tokens[-_CONTEXT:]
            self._given = len(self._decode(self._tokens))
        return new

    def rest(self) -> str:
        """What will not become a character any more."""
        return self._decode(self._tokens)[self._given :]


class Ending:
    """Gives text up to the first of some words; what may be the beginning of one waits."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.reached = False

    def add(self, text: str) -> str:
        """What of it may be shown."""
        text = self._held + text
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.reached, self._held = True, ""
            return text[: min(places)]
        length = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - length :]
        return text[: len(text) - length]

    def rest(self) -> str:
        """What waited in vain."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """How much of the end of `text` is a beginning of `stop`."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)
