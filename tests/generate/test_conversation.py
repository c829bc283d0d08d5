"""Conversations, compared with the chat templates of transformers."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from nanoscale.cli.jobs import generate
from nanoscale.cli.main import run as nanoscale
from nanoscale.common.errors import UserError
from nanoscale.config.composing import frozen
from nanoscale.data.tokens.tokenizer import END, bytes_native
from nanoscale.generate.conversation import Conversation, conversing
from nanoscale.generate.harness import Answers
from nanoscale.generate.weights import open_model
from nanoscale.generate.writing import Wish
from tests.cli.test_generate import Typed
from tests.data.texts import prepared
from tests.support import hf_families
from tests.support.jobs import run_of_bytes

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_TOKEN = (
    "{% for m in messages %}{{ '### ' + m.role + ': ' + m.content + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}### assistant: {% endif %}"
)
IM_START, IM_END = 257, 258
GREEDY = ["--temperature", "0", "--max-tokens", "6"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a model of transformers whose tokenizer has the template CHATML."""
    settings = hf_families.COMMON | {"vocab_size": 260, "max_position_embeddings": 400}
    monkeypatch.setitem(hf_families.FAMILIES, "llama", ("Llama", settings))
    hf_families.save("llama", tmp_path)
    native = bytes_native()
    native.add_special_tokens(
        [AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")]
    )
    native.save(str(tmp_path / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "chat_template": CHATML,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    return tmp_path


def expected(folder: Path, *texts: str) -> list[int]:
    """Return the tokens of a conversation by transformers; questions and answers alternate."""
    from transformers import AutoTokenizer

    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def test_a_conversation_is_rendered_as_by_transformers(folder: Path) -> None:
    conversation = Conversation()
    with conversing(open_model(str(folder))) as template:
        assert template.encode(conversation.ask("Hi")) == expected(folder, "Hi")
        conversation.remember("Hi", "Yes?")
        assert template.encode(conversation.ask("Ü")) == expected(folder, "Hi", "Yes?", "Ü")
        conversation.forget()
        assert template.encode(conversation.ask("Hi")) == expected(folder, "Hi")
        with pytest.raises(UserError, match="special token <|im_end|>"):
            template.encode(conversation.ask("x<|im_end|>"))
        with pytest.raises(UserError, match="the model's context is 400"):
            template.encode(conversation.ask("x" * 400))


def test_an_answer_ends_where_the_turn_does(folder: Path) -> None:
    opened, wish = open_model(str(folder)), Wish()
    with conversing(opened) as template:
        ending, same = template.ending(wish)
    assert ending.ends == opened.ends | {IM_END} and same == wish
    (folder / "template").write_text(NO_TOKEN)
    with conversing(replace(opened, template=folder / "template")) as template:
        ending, changed = template.ending(Wish(stops=("x",)))
    assert ending.ends == opened.ends and changed.stops == ("x", "\n\n### user: ")


def test_the_conversation_is_remembered(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted answer is remembered as far as it came; /new forgets all."""
    typed = iter(["Hi", "Why?", "/new", "Hi", "x" * 400, "<|im_end|>", "Yes"])
    seen: list[tuple[list[int], set[int]]] = []
    answers: list[str] = []
    stream = generate.Writer.stream

    def line(_: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    def answer(writer: Any, tokens: list[int], written: Any, **how: Any) -> Any:
        seen.append((tokens, set(writer.opened.ends)))
        stream(writer, tokens, written, **how)
        answers.append(written.text.strip())
        if len(seen) == 1:
            raise KeyboardInterrupt
        return written

    monkeypatch.setattr("builtins.input", line)
    monkeypatch.setattr(generate.Writer, "stream", answer)
    monkeypatch.setattr(sys, "stdin", Typed())
    monkeypatch.setattr(sys, "stdout", Typed())
    assert nanoscale(["generate", str(folder), "--chat", *GREEDY]) == 0
    assert all(IM_END in ends for _, ends in seen)
    first, second, third, last = (tokens for tokens, _ in seen)
    assert first == third == expected(folder, "Hi") and answers[0]
    assert second == expected(folder, "Hi", answers[0], "Why?")
    assert last == expected(folder, "Hi", answers[2], "Yes")
    error = capsys.readouterr().err
    assert "the model's context is 400" in error and "special token <|im_end|>" in error


def test_questions_without_a_terminal(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def said(*words: str) -> Any:
        assert nanoscale(["generate", str(folder), *GREEDY, "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)

    plain, chat = said("--prompt", "Hi"), said("--prompt", "Hi", "--chat")
    assert (plain["chat"], chat["chat"]) == (False, True)
    assert chat["prompt_tokens"] == len(expected(folder, "Hi")) > plain["prompt_tokens"]
    (tmp_path / "p.txt").write_text("Hi\nWhy?\n")
    both = said("--prompts", str(tmp_path / "p.txt"), "--chat")["results"]
    assert [one["prompt"] for one in both] == ["Hi", "Why?"] and both[0]["text"] == chat["text"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi"))
    assert said("--chat")["text"] == chat["text"]


def test_it_is_the_default_after_training_on_chats(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The template is the one that the chats were prepared with."""
    source = tmp_path / "chats.jsonl"
    pair = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    source.write_text(json.dumps({"messages": pair}) + "\n")
    (tmp_path / "own.jinja").write_text(NO_TOKEN)
    prepared(
        tmp_path / "out", source, kind="chat", field="messages", tokenizer="byte",
        chat_template=tmp_path / "own.jinja",
    )  # fmt: skip
    run = run_of_bytes(tmp_path / "runs")
    config = frozen.load(run.config)
    data = replace(
        config.data, source="megatron", path=str(tmp_path / "out" / "tokens"), loss_on="answers"
    )
    run.config.write_text(frozen.dump(replace(config, data=data)))
    rendered = "### user: Hi\n\n### assistant: "
    for words, tokens in (([], len(rendered)), (["--no-chat"], 3)):
        assert (
            nanoscale(["generate", str(run.path), "--prompt", "Hi", "--json", *GREEDY, *words]) == 0
        )
        assert json.loads(capsys.readouterr().out)["prompt_tokens"] == tokens


def test_lm_eval_scores_the_prompts_of_the_template(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("lm_eval", reason="pip install lm-eval")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    (tmp_path / "rows.jsonl").write_text('{"q": "ab", "a": ["xy", "z"], "gold": 0}\n')
    (tmp_path / "tasks").mkdir()
    about = {
        "task": "mine", "dataset_path": "json", "test_split": "test", "output_type": "multiple_choice",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "doc_to_text": "{{q}}", "doc_to_choice": "{{a}}", "doc_to_target": "{{gold}}", "target_delimiter": "",
    }  # fmt: skip
    (tmp_path / "tasks" / "mine.yaml").write_text(json.dumps(about))
    seen: list[list[int]] = []

    def score(self: Answers, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        seen.extend(before + scored for before, scored in pairs)
        return [(-1.0, False) for _ in pairs]

    monkeypatch.setattr(Answers, "_score", score)
    words = [
        "eval",
        str(folder),
        "--tasks",
        "mine",
        "--tasks-dir",
        str(tmp_path / "tasks"),
        "--json",
    ]
    assert nanoscale([*words, "--apply-chat-template"]) == 0
    assert seen == [expected(folder, "ab") + list(answer) for answer in (b"xy", b"z")]
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    assert nanoscale([*words, "--apply-chat-template"]) == 2
    assert "has no chat template: leave out --apply-chat-template" in capsys.readouterr().err
