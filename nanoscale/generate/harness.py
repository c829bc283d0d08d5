"""The interface between our models and EleutherAI's lm-evaluation-harness (`lm_eval`).

`Answers` needs nothing of that library: its requests are objects whose `args` are tuples. The library calls it
through a class that is created only if the library is installed.
"""

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from nanoscale.common.errors import UserError, Violation
from nanoscale.common.json_text import Json
from nanoscale.common.versions import missing
from nanoscale.generate.conversation import ChatFormat
from nanoscale.generate.replicas import BatchWork, RunAll, run_here
from nanoscale.generate.sampling import Sampling
from nanoscale.generate.weights import Opened
from nanoscale.generate.writing import Wish, batches

_LOGITS = 1 << 26
"""The most logits of a batch."""
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""The names of the most tokens of a text, as in the library: the first one that is set counts."""
_KNOWN = {"until", *_LENGTHS, "do_sample", "temperature", "top_k", "top_p"}
"""The settings of a task for generated text that we support."""
_LONGEST = 256
"""Tokens of a text if the task does not bound it."""

Scored = tuple[float, bool]
"""The log-probability, and True if every token was the most likely one."""


class HarnessRequest(Protocol):
    @property
    def args(self) -> tuple[Any, ...]: ...


Pair = tuple[list[int], list[int]]
"""The tokens of a context and of its continuation."""


@dataclass(frozen=True)
class ScoringBatch:
    """Pairs that are scored together."""

    pairs: Sequence[Pair]

    def run(self, opened: Opened) -> list[Scored]:
        """Return the scores; shorter sequences are padded at the end, which no earlier position sees."""
        rows = self.rows(opened.context)
        length = max(len(row) for row, _ in rows) - 1
        inputs = torch.zeros(len(rows), length, dtype=torch.long)
        for line, (row, _) in zip(inputs, rows, strict=True):
            line[: len(row) - 1] = torch.tensor(row[:-1])
        logits = opened.cache(len(rows), length).logits(inputs.to(opened.device))
        return [
            _scored(line[len(row) - 1 - count : len(row) - 1], row[len(row) - count :])
            for line, (row, count) in zip(logits, rows, strict=True)
        ]

    def rows(self, context: int) -> list[tuple[list[int], int]]:
        """Return the tokens of each pair, as many as the model's context, and the number of scored ones."""
        rows = [(before + wanted)[-context - 1 :] for before, wanted in self.pairs]
        counts = (len(wanted) for _, wanted in self.pairs)
        return [(row, min(count, len(row) - 1)) for row, count in zip(rows, counts, strict=True)]


class Answers:
    """A model's answers to the three kinds of requests."""

    def __init__(
        self,
        opened: Opened,
        note: Callable[[int, int], None] = lambda *_: None,
        run_all: RunAll | None = None,
    ) -> None:
        """Answer with a model; `note` is called with the numbers of finished and of all requests.

        `run_all` runs batches of requests, by default with `opened`, which needs no weights otherwise.
        """
        self.opened = opened
        self.note = note
        self.run_all = run_all or run_here(opened)
        self.encode, self.before = opened.tokenizer.encode, opened.before

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
        asked = [self._wanted(*request.args) for request in requests]
        groups: dict[Wish, list[int]] = {}
        for number, (_prompt, wish) in enumerate(asked):
            groups.setdefault(wish, []).append(number)
        work = (
            batch
            for wish, group in groups.items()
            for batch in batches(self.opened, [asked[number][0] for number in group], wish)
        )
        order = [number for group in groups.values() for number in group]
        return [written.text for written in self._in_order(work, order)]

    # --- tokens ---------------------------------------------------------------------------------------

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the ids of both, as in the library.

        A context's last spaces belong to the continuation. Its ids are the whole text's ids without as
        many of the first as the context alone has ids.

        Raises:
            UserError: the continuation has no ids, or more than the model's context.
        """
        bare = context.rstrip()
        continuation = context[len(bare) :] + continuation
        both, first = self.encode(bare + continuation), self.encode(bare)
        before = self.before if context else ()
        scored = both[len(first) :]
        if not 0 < len(scored) <= self.opened.context:
            what = f"the answer {continuation!r} has {len(scored)} tokens of its own"
            limit = f"1 to {self.opened.context:,} can be scored"
            raise UserError(
                "data", f"a task cannot be scored: {what} after {bare[-40:]!r}; {limit}"
            )
        return [*before, *first] or [self.opened.start], scored

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

    def _score(self, pairs: Sequence[Pair]) -> list[Scored]:
        """Score pairs, the longest first, so that a lack of memory shows at once."""
        order = sorted(range(len(pairs)), key=lambda n: -sum(map(len, pairs[n])))
        return self._in_order(self._batches([pairs[number] for number in order]), order)

    def _in_order(self, work: Iterable[BatchWork[list[Any]]], order: Sequence[int]) -> list[Any]:
        """Run batches of requests, which follow each other in this order; return the results by number."""
        results: dict[int, Any] = {}
        for finished in self.run_all(work):
            results |= zip(order[len(results) :], finished, strict=False)
            self.note(len(results), len(order))
        return [results[number] for number in range(len(order))]

    def _batches(self, pairs: Sequence[Pair]) -> Iterator[ScoringBatch]:
        start = 0
        while start < len(pairs):
            length = min(sum(map(len, pairs[start])), self.opened.context)
            count = max(1, _LOGITS // (length * self.opened.model.shape.vocab))
            yield ScoringBatch(pairs[start : start + count])
            start += count

    def _wanted(self, question: str, wanted: Json) -> tuple[list[int], Wish]:
        """Return the tokens of a question, and the settings of the text after it."""
        unknown = sorted(wanted.keys() - _KNOWN)
        if unknown:
            what = f"asks for text with {', '.join(unknown)}; supported are {', '.join(sorted(_KNOWN))}"
            raise UserError("usage", f"a task {what}")
        until = wanted.get("until") or []
        lengths = [int(wanted[name]) for name in _LENGTHS if wanted.get(name) is not None]
        context = self.opened.context
        if lengths and lengths[0] >= context:
            what = f"{lengths[0]:,} tokens of text, and the model's context has {context:,}"
            raise UserError("data", f"a task asks for {what}: no token of the question is left")
        longest = min([*lengths, _LONGEST][0], context - 1)
        warm = wanted.get("do_sample", False) or "do_sample" not in wanted
        sampling = Sampling(
            float(wanted.get("temperature", 0.0)) if warm else 0.0,
            wanted.get("top_k"),
            wanted.get("top_p"),
        )
        stops = tuple([until] if isinstance(until, str) else until)
        room = context - longest
        prompt = [*self.before, *self.encode(question)][-room:]
        return prompt or [self.opened.start], Wish(sampling, longest, stops)


def _scored(logits: Tensor, wanted: Sequence[int]) -> Scored:
    """Return the score of the tokens `[n]` that follow each position of logits `[n, vocab]`."""
    tokens = torch.tensor(wanted, dtype=torch.long, device=logits.device)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    greedy = bool((wide.argmax(-1) == tokens).all())
    return wide.gather(1, tokens[:, None]).sum().item(), greedy


# --- the library ----------------------------------------------------------------------------------


def require_library() -> None:
    """Raise a UserError if lm_eval is not installed."""
    if what := missing("lm_eval"):
        raise UserError("usage", f"--tasks needs {what}")


def evaluate_tasks(
    answers: Answers,
    tasks: Sequence[str],
    limit: int | None,
    few_shot: int | None,
    folder: Path | None,
    *,
    errors: bool = True,
    chat: ChatFormat | None = None,
) -> Json:
    """Return the result of `lm_eval.simple_evaluate` for these tasks.

    Args:
        tasks: their names; `*` stands for any letters.
        limit: documents of each task.
        few_shot: examples before each question; None: the task's default.
        folder: the folder of more tasks, by name.
        errors: estimate standard errors by resampling too, which starts processes.
        chat: the chat template of all questions; None: questions are plain texts.

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
            Answers.__init__(self, answers.opened, answers.note, answers.run_all)
            if chat is not None:  # its template writes what precedes a text
                self.encode, self.before = chat.tokens, ()
                self.opened, _ = chat.ending(Wish())

        tokenizer_name = answers.opened.source

        def apply_chat_template(
            self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
        ) -> str:
            """Return the text of a question; without a prompt, its last message begins the answer."""
            assert chat is not None
            if add_generation_prompt:
                return chat.text(chat_history)
            return chat.text(chat_history[:-1]) + chat_history[-1]["content"]

    manager = TaskManager(include_path=str(folder) if folder else None)
    for task in tasks:
        if not manager.match_tasks([task]):
            raise _no_task(task, tasks, manager.all_tasks)
    try:
        results: Json = lm_eval.simple_evaluate(
            model=Model(),
            tasks=manager.match_tasks(list(tasks)),
            num_fewshot=few_shot,
            limit=limit,
            task_manager=manager,
            log_samples=False,
            apply_chat_template=chat is not None,
            bootstrap_iters=100_000 if errors else 0,
        )
    except OSError as error:  # errors of the hub, the network and the file system
        raise UserError("data", f"--tasks {','.join(tasks)}: lm_eval: {error}") from error
    return results


def _no_task(task: str, tasks: Sequence[str], names: Iterable[str]) -> UserError:
    import difflib

    close = difflib.get_close_matches(task, list(names), n=3)
    lists = [",".join(name if it == task else it for it in tasks) for name in close]
    instead = tuple(f"--tasks {shlex.quote(text)}" for text in lists)
    violation = Violation("--tasks", task, "command line", "lm_eval has no such task", instead)
    return UserError("usage", f"--tasks {task}: lm_eval has no such task", [violation])
