"""Text that grows token by token: its certain part, and its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
