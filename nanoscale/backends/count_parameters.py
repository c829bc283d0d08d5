"""The number of parameters of the user's own model, for the launcher, which runs no code of hooks itself.

`python -m nanoscale.backends.count_parameters` reads the path of a configuration, as JSON, and answers with the
number, or with a sentence on what is wrong, in the last line.
"""

import json
import sys
from pathlib import Path

from nanoscale.backends.base import make_stage
from nanoscale.config.composing.frozen import load


def judge(path: str) -> int | str:
    """Answer a question; errors of the user's code become a sentence."""
    try:
        model = make_stage(load(Path(path)), 0)
    except Exception as error:
        reason = " ".join(str(error).split()) or "no reason"
        return f"model() fails with {type(error).__name__}: {reason[:300]}"
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    print(json.dumps(judge(json.load(sys.stdin))))
