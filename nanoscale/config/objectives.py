"""The objectives of a training: a loss of single tokens, of answers, or of labels."""

from collections.abc import Mapping
from typing import Any

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
EVALUATED = {
    **dict.fromkeys(ANSWERS, ("eval_preferred", "eval_margin")),
    "classify": ("eval_accuracy",),
}
"""Metrics of each evaluation in addition to the loss, by the objective."""


def made_for(document: Mapping[str, Any]) -> str:
    """Return the `train.objective` that a model of transformers was made for: next-token, masked, classify."""
    ends = {"ForMaskedLM": "masked", CLASSIFIER: "classify"}
    classes = map(str, document.get("architectures") or ())
    return next((ends[end] for name in classes for end in ends if name.endswith(end)), "next-token")
