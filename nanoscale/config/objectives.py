"""The objectives of a training: a loss of single tokens, of answers, or of labels."""

from collections.abc import Mapping
from typing import Any

from nanoscale.config.schema import Train

CLASSIFIER = "ForSequenceClassification"
"""The end of the names of transformers' models that classify."""
PAIRED = ("dpo", "orpo")
"""Objectives of pairs: each sample is a chosen answer and a rejected one, a row of the batch each."""
ANSWERS = (*PAIRED, "kto")
"""Objectives of answers: each sample is a pair of them, or one that is good or bad."""
RECORDS = {
    "pairs": '{"prompt": "…", "chosen": "…", "rejected": "…"}',
    "rated": '{"prompt": "…", "completion": "…", "label": true}',
    "labels": '{"text": "…", "label": 0}',
    "chat": '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}',
    "text": '{"text": "…"}',
}
"""A record of each kind of samples."""
_EVALUATED = {
    **dict.fromkeys(ANSWERS, ("eval_preferred", "eval_margin")),
    "classify": ("eval_accuracy",),
}


def is_paired(train: Train) -> bool:
    """True if samples are pairs of rows."""
    return train.objective in PAIRED


def is_of_answers(train: Train) -> bool:
    """True if the loss is of whole answers: of pairs, or of good and bad ones."""
    return train.objective in ANSWERS


def has_whole_documents(train: Train) -> bool:
    """True if each document has a row of its own."""
    return is_of_answers(train) or train.objective == "classify"


def rows_of_sample(train: Train) -> int:
    """Return the rows of a batch that belong together."""
    return 2 if is_paired(train) else 1


def is_masked(train: Train) -> bool:
    """True if hidden tokens are predicted from both sides."""
    return train.objective == "masked"


def is_distilled(train: Train) -> bool:
    """True if tokens have the most likely tokens of a teacher in addition to their targets."""
    return train.objective == "distill"


def needs_reference(train: Train) -> bool:
    """True if the loss compares with the likelihoods by the initial weights."""
    return train.objective in ("dpo", "kto")


def evaluated(train: Train) -> tuple[str, ...]:
    """Return the metrics of every evaluation, without metrics of tasks."""
    return ("eval_loss", *_EVALUATED.get(train.objective, ()))


def made_for(document: Mapping[str, Any]) -> str:
    """Return the `train.objective` that a model of transformers was made for: next-token, masked, classify."""
    ends = {"ForMaskedLM": "masked", CLASSIFIER: "classify"}
    classes = map(str, document.get("architectures") or ())
    return next((ends[end] for name in classes for end in ends if name.endswith(end)), "next-token")
