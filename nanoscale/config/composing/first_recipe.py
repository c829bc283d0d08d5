"""The recipe that `nanoscale init` writes, and the commands to type next.

Recipes for fine-tuning are the packaged ones of the same name, with the model and the data filled in.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from nanoscale.config.violations import override

Task = Literal[
    "pretrain", "finetune", "lora", "chat", "chat-lora", "qlora",
    "dpo", "orpo", "distill", "classify", "encoder",
]  # fmt: skip
TASKS: tuple[Task, ...] = get_args(Task)
_FLAGS: dict[Task, tuple[str, ...]] = {
    **dict.fromkeys(("chat", "chat-lora", "qlora"), ("--chat",)),
    **dict.fromkeys(("dpo", "orpo"), ("--pairs",)),
    "classify": ("--labels", "auto"),
}
"""The options of `data prepare` for the records of a task."""


@dataclass(frozen=True)
class FirstRecipe:
    """The content of a first recipe, checked."""

    task: Task
    model: str
    """A model of the group `model`, or the pretrained model: its folder or its name at Hugging Face."""
    vocab: int
    """Rows of the embedding; 0 for a pretrained model."""
    seq_len: int
    """Tokens of a sample; a recipe for a pretrained model has its own."""
    data: Path | None
    """Texts or conversations, or tokens; None: the embedded corpus."""
    prepared: bool
    """True if `data` holds tokens already, or is a file whose tokens the training makes."""
    teacher: str | None = None
    """The teacher of `distill`, as `model`."""

    def commands(self, target: Path) -> list[str]:
        """Return the commands to type, in this order, if the recipe is written to `target`."""
        path = str(target) if target.is_absolute() else f"./{target}"
        train = f"nanoscale train {override('recipe', path)}"
        run = f"{train} {override('run.name', target.stem)}"
        commands = [f"{train} --dry-run", run, f"nanoscale generate {shlex.quote(target.stem)}"]
        if self.prepared:
            return commands
        words = ["nanoscale", "data", "prepare", str(self.data), "--out", str(_tokens(target))]
        if self.task == "pretrain":
            words += ["--train-tokenizer", "--vocab-size", str(max(257, min(32768, self.vocab)))]
        else:
            words += ["--tokenizer", self.model]
        return [shlex.join([*words, *_FLAGS.get(self.task, ())]), *commands]

    def text(self, target: Path) -> str:
        """Return the recipe."""
        head = [
            f"# {about(self.task)}",
            *(f"#   {line}" for line in self.commands(target)),
            "# `nanoscale config explain KEY` explains a key; `nanoscale config ls` lists all of them.",
        ]
        path = self.data if self.prepared else _tokens(target)
        if self.task == "pretrain":
            embedded = "stdlib-bpe" if self.vocab >= 4096 else "stdlib"
            lines = [
                "defaults:",
                f"  - override /model: {self.model}",
                f"  - override /data: {'megatron' if self.data else embedded}",
                "  - override /checkpoint: periodic # every 15 minutes and at the end",
                *(["data:", f"  path: {json.dumps(str(path))}"] if self.data else []),
                "optimizer:",
                "  lr: 4e-4",
                "scheduler:",
                "  warmup_steps: 20",
                "train:",
                "  steps: 500 # the dry run says how many epochs these are, and how long they take",
                "  global_batch: 32 # samples of a step, on all devices together",
                f"  seq_len: {self.seq_len} # tokens of a sample",
                "  log_every: 10",
            ]
            return "\n".join([*head, *lines, ""])
        text = _packaged(self.task)
        body = text[text.index("defaults:") :]
        values = {"init_from": self.model, "path": str(path)}
        values |= {"teacher": self.teacher} if self.teacher else {}
        for key, value in values.items():
            before, after = re.split(rf"(?m)^  {key}: \S+(?: # needed.*)?", body)
            body = f"{before}  {key}: {json.dumps(value)}{after}"
        return "\n".join([*head, body])


def _tokens(target: Path) -> Path:
    return target.with_name(f"{target.stem}-tokens").absolute()


def about(task: Task) -> str:
    """Return what a task does, in a sentence."""
    own = "Train a model from random weights."
    return own if task == "pretrain" else _packaged(task).splitlines()[0].removeprefix("# ")


def _packaged(task: Task) -> str:
    from nanoscale.config.composing.library import packaged

    return (packaged()[1] / f"{task}.yaml").read_text(encoding="utf-8")
