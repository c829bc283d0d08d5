"""The log messages of torchao's import."""

from __future__ import annotations

import logging


def silence_missing_extensions() -> None:
    """Drop torchao's warnings about compiled extensions of its own that do not load.

    They are for other GPUs or another CUDA than here; nanoscale uses none of them. To be called before
    torchao is imported.
    """
    logging.getLogger("torchao").addFilter(_is_not_a_load_failure)


def _is_not_a_load_failure(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Failed to load ")
