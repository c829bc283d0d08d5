"""Conversations with a model, in its own chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from nanoscale.common.errors import UserError
from nanoscale.data.prepare.chat import PLAIN, ChatTokenizer, Renderer, find_template
from nanoscale.data.prepare.render import Chat, RecordError
from nanoscale.data.tokens.tokenizer import FileTokenizer
from nanoscale.generate.weights import Opened
from nanoscale.generate.writing import Wish, require_room

Message = dict[str, str]
_ANSWER, _QUESTION = "wxyzanswerzyxw", "wxyzquestionzyxw"
"""Texts whose positions show what a template writes between an answer and the next question."""


@contextmanager
def conversing(opened: Opened, *, required: bool = False) -> Iterator[ChatFormat]:
    """Provide the chat template of a model, which runs in a process of its own.

    Raises:
        UserError: it is not a template, or the model has none and `required` is True.
    """
    given = opened.tokenizer
    path = given.path if isinstance(given, FileTokenizer) else None
    source = find_template(given, opened.template)
    if required and source.source == PLAIN and not opened.on_chats:
        what = f"{opened.source} has no chat template: leave out --apply-chat-template"
        raise UserError("usage", what)
    renderer = Renderer(source, "messages", asks=True)
    try:
        yield ChatFormat(ChatTokenizer(path, renderer), source.special, opened)
    finally:
        renderer.close()


@dataclass(frozen=True)
class ChatFormat:
    """A model's chat template, with its tokenizer."""

    tokenizer: ChatTokenizer
    special: Sequence[str]
    opened: Opened

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a conversation up to the answer that follows it.

        Raises:
            UserError: the template refuses the messages, or they exceed the model's context.
        """
        tokens = self.tokens(self.text(messages))
        require_room(self.opened, tokens, "conversation")
        return tokens

    def text(self, messages: Sequence[Message]) -> str:
        """Return a conversation up to the answer that follows it, as a text."""
        try:
            return self._render(messages)
        except RecordError as error:
            raise UserError("usage", f"the conversation {error}") from error

    def ending(self, wish: Wish) -> tuple[Opened, Wish]:
        """Return the model and the settings with which an answer ends where the turn does.

        The template ends a turn with a special token, or else with the text before the next question.
        """
        dialogue = [_user(_QUESTION), _assistant(_ANSWER), _user(_QUESTION)]
        try:
            text = self._render(dialogue)
        except RecordError:  # a template may refuse such texts; the end of a document remains
            return self.opened, wish
        between = text.partition(_ANSWER)[2].partition(_QUESTION)[0]
        first = [one for one in self.special if between.strip().startswith(one)]
        if first:
            ends = self.opened.ends | {self.tokens(max(first, key=len))[0]}
            return replace(self.opened, ends=ends), wish
        stops = (*wish.stops, between) if between.strip() else wish.stops
        return self.opened, replace(wish, stops=stops)

    def _render(self, messages: Sequence[Message]) -> str:
        record = json.dumps({"messages": messages}).encode()
        (outcome,) = self.tokenizer.renderer.render([record])
        if isinstance(outcome, RecordError):
            raise outcome
        return outcome.text

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a rendered text, in which special tokens keep their meaning."""
        ((ids, _),) = self.tokenizer.encode([Chat(text, ())])
        found: list[int] = ids.tolist()
        return found


class Conversation:
    """The messages so far."""

    def __init__(self) -> None:
        self._messages: list[Message] = []

    @property
    def has_begun(self) -> bool:
        """True if there is something to forget."""
        return bool(self._messages)

    def ask(self, question: str) -> list[Message]:
        """Return the messages with a question, which is remembered only with its answer."""
        return [*self._messages, _user(question)]

    def remember(self, question: str, answer: str) -> None:
        self._messages += [_user(question), _assistant(answer)]

    def forget(self) -> None:
        self._messages.clear()


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}
