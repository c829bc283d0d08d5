"""Tokenizing chunks of text, in this process or in a pool.

Processes and not the threads of the tokenizers library: parsing JSON and copying the tokens into Python then
run on all cores too, and no cache is shared between them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nanoscale.data.prepare.chat import ChatTokenizer
from nanoscale.data.prepare.chunks import Chunk
from nanoscale.data.prepare.encode import Encoded, Reading, encode
from nanoscale.data.prepare.renderer import Renderer
from nanoscale.data.tokens.tokenizer import ByteTokenizer, Tokenizer, load

_THREADS = "TOKENIZERS_PARALLELISM"


@dataclass(frozen=True)
class Setup:
    """The settings that every process gets once."""

    reading: Reading
    tokenizer: Path | None
    """A tokenizer.json; None for bytes."""
    dtype: np.dtype[Any]

    def load(self) -> Callable[[Chunk], Encoded]:
        """Return the function that tokenizes a chunk, for a process of its own."""
        os.environ[_THREADS] = "false"
        tokenizer = self.open()
        return lambda chunk: encode(chunk, self.reading, tokenizer, self.dtype)

    def open(self) -> Tokenizer | ChatTokenizer:
        """Return the tokenizer."""
        if self.reading.template is not None:
            return ChatTokenizer(
                self.tokenizer, Renderer(self.reading.template, self.reading.field)
            )
        return load(self.tokenizer) if self.tokenizer else ByteTokenizer()


def encode_here(
    chunks: Iterator[Chunk], setup: Setup, stop: threading.Event
) -> Generator[tuple[Chunk, Encoded], None, None]:
    """Tokenize in this process alone, with the results of a pool."""
    tokenizer = setup.open()
    previous = os.environ.get(_THREADS)
    os.environ[_THREADS] = "false"
    try:
        for chunk in chunks:
            if stop.is_set():
                raise KeyboardInterrupt
            yield chunk, encode(chunk, setup.reading, tokenizer, setup.dtype)
    finally:
        if previous is None:
            del os.environ[_THREADS]
        else:
            os.environ[_THREADS] = previous
        if isinstance(tokenizer, ChatTokenizer):
            tokenizer.renderer.close()
