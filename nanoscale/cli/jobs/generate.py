"""`nanoscale generate`: text from a checkpoint, as it is written."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.output import DONE, print_json, show_error
from nanoscale.common import display
from nanoscale.common.errors import UserError, Violation
from nanoscale.common.json_text import Json
from nanoscale.common.units import duration
from nanoscale.config.violations import refuse

if TYPE_CHECKING:
    from nanoscale.generate.conversation import ChatFormat, Conversation
    from nanoscale.generate.replicas import RunAll
    from nanoscale.generate.weights import Opened
    from nanoscale.generate.writing import Wish, Written

_WHY_EMPTY = {
    "end": "the model ended the text at once",
    "stop": "it began with a text of --stop",
    "length": "the model wrote only white space (--max-tokens)",
    "context": "the model's context is full",
}
_NEW = "/new"
"""The line that begins a new conversation."""


def generate(
    model: opt.Model,
    prompt: str | None = opt.of_prompts("Continue this text", shown="standard input"),
    prompts: Path | None = opt.of_prompts(
        'Read a prompt from each line (or "prompt" of .jsonl); print JSON lines', metavar="FILE"
    ),
    out: Path | None = opt.of_prompts(
        "Write the results of --prompts to this file", metavar="FILE"
    ),
    max_tokens: int = opt.of_sampling("Limit the answer to this number of tokens", default=256),
    temperature: float | None = opt.of_sampling(
        "Divide the logits by this; 0 takes the most likely token", shown="0.7"
    ),
    top_k: int | None = opt.of_sampling("Draw from this number of most likely tokens", shown="all"),
    top_p: float | None = opt.of_sampling(
        "Draw from the fewest tokens with this total probability", shown="1"
    ),
    seed: int | None = opt.of_sampling("Draw the same text for the same seed", shown="a new one"),
    beams: int | None = opt.of_sampling(
        "Find the likeliest of N texts in place of drawing one", metavar="N", min=2
    ),
    stop: list[str] | None = opt.of_sampling(
        "End the answer before this text; may be repeated", metavar="TEXT"
    ),
    chat: bool | None = opt.of_prompts(
        "Use the model's chat template, and remember the conversation",
        "--chat/--no-chat",
        shown="--chat after training on chats",
    ),
    step: opt.Step = None,
    device: opt.Device = None,
    num_gpus: int | None = opt.option(
        "Use N devices of this machine for --prompts",
        metavar="N",
        shown="all GPUs",
        min=1,
        group="Model",
    ),
    dtype: opt.ComputeDtype = None,
    tokenizer: opt.Tokenizer = None,
    as_json: opt.AsJson = False,
) -> int:
    """Generate text from a run or a Hugging Face model.

    The prompt is an option, lines of a file, or standard input; standard output has the text and nothing else.
    On a terminal without --prompt, the command asks for prompts: Ctrl-C ends an answer, Ctrl-D the command.
    """
    drawing = {"--temperature": temperature, "--top-k": top_k, "--top-p": top_p, "--seed": seed}
    opt.refuse_unused(
        (beams is not None, "draws a text, and --beams searches the likeliest", drawing)
    )
    temperature = 0.7 if temperature is None else temperature
    _check(max_tokens, temperature, top_k, top_p, stop or [])
    _check_ways(prompt, prompts, out, as_json)
    opt.refuse_several({"--device": device, "--num-gpus": num_gpus})
    one = "is for --prompts; one text is written on one device"
    opt.refuse_unused((prompts is None, one, {"--num-gpus": num_gpus}))
    records = _records(prompt, prompts)
    if records is None and (as_json or not sys.stdout.isatty()):
        raise UserError("usage", "there is no prompt: give --prompt, --prompts or standard input")

    calm_threads()
    from nanoscale.generate.conversation import conversing
    from nanoscale.generate.replicas import replicated
    from nanoscale.generate.sampling import Sampling
    from nanoscale.generate.weights import find_devices, open_model
    from nanoscale.generate.writing import Wish

    devices = find_devices(device, num_gpus, several=prompts is not None)
    options: Json = {"step": step, "dtype": dtype, "tokenizer": tokenizer}
    opened = open_model(model, **options, device=devices[0], weights=len(devices) == 1)
    first = random.randrange(2**31) if seed is None else seed
    sampling = Sampling(temperature, top_k, top_p)
    wish = Wish(sampling, max_tokens, tuple(stop or ()), first, beams or 1)
    chats = opened.on_chats if chat is None else chat
    with conversing(opened) if chats else nullcontext() as template:
        if template is not None:
            opened, wish = template.ending(wish)
        writer = Writer(opened, wish, template)
        if records is None:
            writer.talk()
        elif prompts is None:
            writer.answer_one(records[0]["prompt"], as_json)
        else:
            questions = [writer.encoded(record["prompt"]) for record in records]  # errors first
            with replicated(model, options, opened, devices) as run_all:
                writer.answer_all(records, questions, run_all, out, as_json)
    return DONE


def calm_threads() -> None:
    """Limit how long torch's threads spin, before it is loaded: a busy core slows a token twentyfold."""
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}.intersection(os.environ):
        os.environ["GOMP_SPINCOUNT"] = "1000"


# --- request --------------------------------------------------------------------------------------


def _check(
    max_tokens: int, temperature: float, top_k: int | None, top_p: float | None, stops: list[str]
) -> None:
    """Raise a UserError with every number that makes no sense."""
    laws = [
        ("--max-tokens", max_tokens, max_tokens >= 1, "must be at least 1", "--max-tokens 1"),
        ("--temperature", temperature, 0 <= temperature < 1e6, "must be 0 or more", "--temperature 0"),
        ("--top-k", top_k, top_k is None or top_k >= 1, "must be at least 1", "--top-k 1"),
        ("--top-p", top_p, top_p is None or 0 < top_p <= 1, "must be above 0 and at most 1", "--top-p 0.9"),
        ("--stop", "", all(stops), "must be a text", "--stop TEXT"),
    ]  # fmt: skip
    wrong = [
        Violation(option, value, "command line", message, (instead,))
        for option, value, good, message, instead in laws
        if not good
    ]
    if wrong:
        refuse(wrong, "usage")


def _check_ways(prompt: str | None, prompts: Path | None, out: Path | None, as_json: bool) -> None:
    opt.refuse_several({"--prompt": prompt, "--prompts": prompts})
    lines = "is for the JSON lines of --prompts, without --json"
    opt.refuse_unused((prompts is None or as_json, lines, {"--out": out}))
    if out is None:
        return
    if out.exists():
        raise UserError("usage", f"--out {out} already exists; name another file")
    if not out.absolute().parent.is_dir():
        raise UserError("usage", f"--out {out}: there is no folder {out.absolute().parent}")


def _records(prompt: str | None, prompts: Path | None) -> list[Json] | None:
    """Return the prompts; None if the user is to be asked."""
    from nanoscale.generate.prompts import read_prompts

    if prompts is not None:
        return read_prompts(prompts)
    if prompt is None and sys.stdin.isatty():
        return None
    source = "standard input" if prompt is None else "--prompt"
    try:
        text = (
            sys.stdin.read().removeprefix("\ufeff").removesuffix("\n") if prompt is None else prompt
        )
        text.encode()  # a word of a command line, and standard input, may hold other bytes
    except UnicodeError as error:
        raise UserError("usage", f"{source} is not UTF-8") from error
    return [{"prompt": text}]


# --- answers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Writer:
    """A model that answers prompts, and shows its answers."""

    opened: Opened
    wish: Wish
    template: ChatFormat | None
    """The form of conversations; None: a prompt is text to continue."""

    def encoded(self, prompt: str, conversation: Conversation | None = None) -> list[int]:
        """Return the tokens of a prompt; in a chat without a conversation, it begins one."""
        from nanoscale.generate.conversation import Conversation
        from nanoscale.generate.writing import encode

        if self.template is None:
            return encode(self.opened, prompt)
        return self.template.encode((conversation or Conversation()).ask(prompt))

    def answer_one(self, prompt: str, as_json: bool) -> None:
        from nanoscale.generate.writing import Written

        tokens, written = self.encoded(prompt), Written()
        began = time.perf_counter()
        try:
            self.stream(tokens, written, shown=not as_json)
        except KeyboardInterrupt:
            if not as_json:
                display.show()
            raise
        seconds = time.perf_counter() - began
        if as_json:
            answer = {"prompt": prompt, **self.document(written), "seconds": seconds}
            print_json({**self.about(), **answer})
        self.say_end(written, seconds)

    def answer_all(
        self, records: list[Json], questions: list[list[int]], run_all: RunAll,
        out: Path | None, as_json: bool,
    ) -> None:  # fmt: skip
        """Answer every prompt with the same seed, so that its answer does not depend on the others."""
        from nanoscale.generate.writing import batches

        began, results = time.perf_counter(), list[Json]()
        remaining = iter(records)
        with _results(out) as file:
            for texts in run_all(batches(self.opened, questions, self.wish)):
                for written in texts:
                    results.append(next(remaining) | self.document(written))
                    if not as_json:
                        file.write(f"{json.dumps(results[-1], ensure_ascii=False)}\n")
                        file.flush()
                if sys.stderr.isatty() and not file.isatty():
                    display.progress(f"{len(results)} of {len(records)} prompts")
        if as_json:
            print_json({**self.about(), "results": results})
        if sys.stderr.isatty():
            display.note()
        _say_speed(sum(one["tokens"] for one in results), time.perf_counter() - began)

    def talk(self) -> None:
        """Ask for prompts on the terminal until the user ends the command."""
        from nanoscale.generate.conversation import Conversation

        with suppress(ImportError):
            import readline  # noqa: F401 - lets `input` edit lines

        keys = "Ctrl-C ends an answer, Ctrl-D ends"
        new = f", {_NEW} begins a new conversation" if self.template is not None else ""
        display.note(f"{self.opened.source}; {keys}{new}")
        conversation, writer = Conversation(), self
        while True:
            try:
                prompt = input("> ")
            except EOFError:
                display.show()
                return
            except KeyboardInterrupt:
                display.show()
                continue
            if self.template is not None and prompt.strip() == _NEW:
                conversation.forget()
            elif prompt.strip():
                writer._reply(prompt, conversation)
                writer = replace(writer, wish=replace(writer.wish, seed=writer.wish.seed + 1))

    def _reply(self, prompt: str, conversation: Conversation) -> None:
        """Answer in a conversation, which remembers it; also an answer that Ctrl-C ends."""
        from nanoscale.generate.writing import Written

        began, written = time.perf_counter(), Written()
        try:
            self.stream(self.encoded(prompt, conversation), written, shown=True)
            self.say_end(written, time.perf_counter() - began)
        except KeyboardInterrupt:
            display.show()
        except UserError as error:
            show_error(error, as_json=False)
            if conversation.has_begun:
                display.note(f"{_NEW} begins a new conversation")
        if written.text.strip():
            conversation.remember(prompt, written.text.strip())

    def stream(self, tokens: list[int], written: Written, *, shown: bool) -> None:
        """Write an answer; if `shown`, print it as it comes, in a chat without leading white space."""
        from nanoscale.generate.writing import write

        begun = self.template is None
        for text in write(self.opened, tokens, self.wish, written):
            new = text if begun else text.lstrip()
            begun = begun or bool(new)
            if shown and new:
                display.show(new, end="")
        if shown and not written.text.endswith("\n"):
            display.show()

    def about(self) -> Json:
        """Return the values that the document of one and of several answers have in common."""
        chat = self.template is not None
        return {"model": self.opened.source, "seed": self.wish.seed, "chat": chat}

    def document(self, written: Written) -> Json:
        return {
            "text": written.text if self.template is None else written.text.strip(),
            "finish": written.finish,
            "prompt_tokens": written.prompt_tokens,
            "tokens": len(written.tokens),
        }

    def say_end(self, written: Written, seconds: float) -> None:
        from nanoscale.generate.writing import CONTEXT

        context, known = self.opened.context, self.opened.trained_len
        if not written.text.strip():
            display.note(
                f"note: the answer is empty: {_WHY_EMPTY.get(written.finish, 'it was interrupted')}"
            )
        if written.finish == CONTEXT:
            display.note(f"note: it ends at {context:,} tokens, the model's longest context")
        length = written.prompt_tokens + len(written.tokens)
        if known is not None and length > known:
            display.note(f"note: {length:,} tokens, and it was trained on samples of {known:,}")
        _say_speed(len(written.tokens), seconds)


@contextmanager
def _results(out: Path | None) -> Iterator[TextIO]:
    if out is None:
        yield sys.stdout
        return
    try:
        file = out.open("x", encoding="utf-8")
    except OSError as error:
        raise UserError("usage", f"--out {out}: {error.strerror}") from error
    with file:
        yield file


def _say_speed(tokens: int, seconds: float) -> None:
    if sys.stderr.isatty() and seconds > 0:
        display.note(f"{tokens:,} tokens in {duration(seconds)}, {tokens / seconds:,.1f} tokens/s")
