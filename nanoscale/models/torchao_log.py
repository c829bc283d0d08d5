"""The log messages of torchao's import."""

import logging


def silence_torchao() -> None:
    """Drop torchao's warnings about compiled extensions of its own that do not load, and torch's about its use
    of torch.

    They are for other GPUs or another CUDA than here; nanoscale uses none of them. To be called before
    torchao, or transformers, which imports it, is imported.
    """
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return not message.startswith("Failed to load ") and "is an Enum subclass" not in message
