"""Validation of DeepSpeed settings by DeepSpeed's own class, in a separate process.

`python -m nanoscale.backends.deepspeed.validate < settings.json` prints a JSON list of problems, each a
`[path, message, names known at this path]`. The launcher calls it for `backend.extra`, since it never imports
torch itself.
"""

import json
import sys
from typing import Any

import torch


class RecordedSettings(dict[str, Any]):
    """A configuration that records which of its keys were read: DeepSpeed ignores all others."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # `deepspeed.initialize` reads these before the class is created.
        self.names = {"sequence_parallel_size", "data_parallel_size", "tensor_parallel"}

    def get(self, key: str, default: Any = None) -> Any:
        self.names.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.names.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.names.add(str(key))
        return super().__contains__(key)


def find_problems(settings: dict[str, Any]) -> list[tuple[str, str, list[str]]]:
    from deepspeed.runtime.config import DeepSpeedConfig
    from pydantic import ValidationError

    recorded = RecordedSettings(settings)
    try:
        DeepSpeedConfig(recorded)
    except ValidationError as error:
        return [
            (".".join(map(str, problem["loc"])), f"{text} ({error.title})", [])
            for problem in error.errors()
            for text in [problem["msg"].removeprefix("Value error, ")]
        ]
    except Exception as error:
        return [("", str(error), [])]
    return [
        (name, "is not a setting of DeepSpeed, which would ignore it", sorted(recorded.names))
        for name in recorded
        if name not in recorded.names
    ]


def main() -> None:
    from nanoscale.backends.deepspeed.import_library import load_quietly

    load_quietly(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    json.dump(find_problems(json.load(sys.stdin)), sys.stdout)


if __name__ == "__main__":
    main()
