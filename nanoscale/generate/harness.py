"""The interface between our models and EleutherAI's lm-evaluation-harness (`lm_eval`).

`Answers` needs nothing of that library: its requests are objects whose `args` are tuples. The library calls it
through a class that is created only if the library is installed.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from nanoscale.common.errors import UserError, Violation
from nanoscale.common.versions import install_command
from nanoscale.generate.sampling import Sampling
from nanoscale.generate.weights import Opened
from nanoscale.generate.writing import Wish, Written, write
from nanoscale.models.kv_cache import Cache

_LOGITS = 1 << 26
"""The most logits of a batch."""
_KNOWN = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}
"""The settings of a task for generated text that we support."""
_LONGEST = 256
"""Tokens of a text if the task does not bound it."""

Scored = tuple[float, bool]
"""The log-probability, and True if every token was the most likely one."""


class HarnessRequest(Protocol):
    @property
    def args(self) -> tuple[Any, ...]: ...


class Answers:
    """A model's answers to the three kinds of requests."""

    def __init__(self, opened: Opened, note: Callable[[int, int], None] = lambda *_: None) -> None:
        """Answer with a model; `note` is called with the numbers of finished and of all requests."""
        self.opened = opened
        self.note = note

    def loglikelihood(self, requests: Sequence[HarnessRequest], **_: Any) -> list[Scored]:
        """Score the continuation of each (context, continuation)."""
        return self._score([self._pair(*request.args) for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[HarnessRequest], **_: Any) -> list[float]:
        """Score each whole text, (text,); long texts go window by window, each token once."""
        windows = [list(self._windows(*request.args)) for request in requests]
        scored = iter(self._score([window for found in windows for window in found]))
        return [sum(next(scored)[0] for _ in found) for found in windows]

    def generate_until(self, requests: Sequence[HarnessRequest], **_: Any) -> list[str]:
        """Generate the text after the context of each (context, settings)."""
        texts = []
        for request in requests:
            texts.append(self._generate(*request.args))
            self.note(len(texts), len(requests))
        return texts

    # --- tokens ---------------------------------------------------------------------------------------

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the ids of both. As in the library, a context's last spaces belong to the continuation."""
        bare = context.rstrip()
        continuation = context[len(bare) :] + continuation
        encode = self.opened.tokenizer.encode
        both, first = encode(bare + continuation), encode(bare)
        before = self.opened.before if context else ()
        return [*before, *both[: len(first)]] or [self.opened.start], both[len(first) :]

    def _windows(self, text: str) -> Iterator[tuple[list[int], list[int]]]:
        """Yield parts to predict, each as long as the model's context, and the tokens before them.

        Tokens that a model's own tokenizer adds are predicted too, as in the library: `<s>` after `<s>`.
        """
        opened, size = self.opened, self.opened.context
        tokens = [opened.start, *opened.added, *opened.tokenizer.encode(text)]
        for start in range(1, len(tokens), size):
            end = min(start + size, len(tokens))
            yield tokens[max(0, end - size - 1) : start], tokens[start:end]

    # --- figures --------------------------------------------------------------------------------------

    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Scored]:
        """Score pairs, the longest first, so that a lack of memory shows at once."""
        order = sorted(range(len(pairs)), key=lambda n: -sum(map(len, pairs[n])))
        found: dict[int, Scored] = {}
        for batch in self._batches(order, pairs):
            scored = self._score_batch([pairs[number] for number in batch])
            found |= dict(zip(batch, scored, strict=True))
            self.note(len(found), len(pairs))
        return [found[number] for number in range(len(pairs))]

    def _batches(
        self, order: Sequence[int], pairs: Sequence[tuple[list[int], list[int]]]
    ) -> Iterator[Sequence[int]]:
        start = 0
        while start < len(order):
            length = min(sum(map(len, pairs[order[start]])), self.opened.context)
            count = max(1, _LOGITS // (length * self.opened.model.shape.vocab))
            yield order[start : start + count]
            start += count

    def _score_batch(self, pairs: Sequence[tuple[list[int], list[int]]]) -> Iterator[Scored]:
        """Score one batch; shorter sequences are padded at the end, which no earlier position sees."""
        rows = [(context + wanted)[-self.opened.context - 1 :] for context, wanted in pairs]
        length = max(map(len, rows)) - 1
        inputs = torch.zeros(len(rows), length, dtype=torch.long)
        for line, row in zip(inputs, rows, strict=True):
            line[: len(row) - 1] = torch.tensor(row[:-1])
        cache = Cache(self.opened.model, len(rows), length)
        logits = cache.logits(inputs.to(self.opened.device))
        for line, row, (_, wanted) in zip(logits, rows, pairs, strict=True):
            count = min(len(wanted), len(row) - 1)
            yield _scored(line[len(row) - 1 - count : len(row) - 1], row[len(row) - count :])

    def _generate(self, context: str, wanted: dict[str, Any]) -> str:
        unknown = sorted(wanted.keys() - _KNOWN)
        if unknown:
            what = f"asks for text with {', '.join(unknown)}; supported are {', '.join(sorted(_KNOWN))}"
            raise UserError("usage", f"a task {what}")
        until = wanted.get("until") or []
        longest = min(wanted.get("max_gen_toks", _LONGEST), self.opened.context - 1)
        warm = wanted.get("do_sample", False) or "do_sample" not in wanted
        sampling = Sampling(
            float(wanted.get("temperature", 0.0)) if warm else 0.0,
            wanted.get("top_k"),
            wanted.get("top_p"),
        )
        stops = tuple([until] if isinstance(until, str) else until)
        room = self.opened.context - longest
        prompt = [*self.opened.before, *self.opened.tokenizer.encode(context)][-room:]
        prompt = prompt or [self.opened.start]
        written = Written(context)
        for _ in write(self.opened, prompt, Wish(sampling, longest, stops), written):
            pass
        return written.text


def _scored(logits: Tensor, wanted: Sequence[int]) -> Scored:
    """Return the score of the tokens `[n]` that follow each position of logits `[n, vocab]`."""
    tokens = torch.tensor(wanted, dtype=torch.long, device=logits.device)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    greedy = bool((wide.argmax(-1) == tokens).all())
    return wide.gather(1, tokens[:, None]).sum().item(), greedy


# --- the library ----------------------------------------------------------------------------------


def require_library() -> None:
    """Raise a UserError if lm_eval is not installed."""
    from importlib.util import find_spec

    if find_spec("lm_eval") is None:
        found = Violation(
            "--tasks", None, "", "needs the package lm-eval", (install_command("lm-eval"),)
        )
        raise UserError(
            "usage", "--tasks needs the package lm-eval, which is not installed", [found]
        )


def evaluate_tasks(
    answers: Answers,
    tasks: Sequence[str],
    limit: int | None,
    few_shot: int | None,
    folder: Path | None,
) -> dict[str, Any]:
    """Return the result of `lm_eval.simple_evaluate` for these tasks.

    Args:
        tasks: their names; `*` stands for any letters.
        limit: documents of each task.
        few_shot: examples before each question; None: the task's default.
        folder: the folder of more tasks, by name.

    Raises:
        UserError: the library is not installed, or lacks such a task or its data.
    """
    require_library()
    import lm_eval
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    class Model(Answers, LM):  # type: ignore[misc]
        """The class that the library requires."""

        def __init__(self) -> None:
            LM.__init__(self)
            Answers.__init__(self, answers.opened, answers.note)

    manager = TaskManager(include_path=str(folder) if folder else None)
    for task in tasks:
        if not manager.match_tasks([task]):
            raise _no_task(task, tasks, manager.all_tasks)
    try:
        found: dict[str, Any] = lm_eval.simple_evaluate(
            model=Model(),
            tasks=manager.match_tasks(list(tasks)),
            num_fewshot=few_shot,
            limit=limit,
            task_manager=manager,
            log_samples=False,
        )
    except OSError as error:  # errors of the hub, the network and the file system
        raise UserError("data", f"--tasks {','.join(tasks)}: lm_eval: {error}") from error
    return found


def _no_task(task: str, tasks: Sequence[str], names: Iterable[str]) -> UserError:
    import difflib

    close = difflib.get_close_matches(task, list(names), n=3)
    lists = [",".join(name if it == task else it for it in tasks) for name in close]
    instead = tuple(f"--tasks {shlex.quote(text)}" for text in lists)
    found = Violation("--tasks", task, "command line", "lm_eval has no such task", instead)
    return UserError("usage", f"--tasks {task}: lm_eval has no such task", [found])
