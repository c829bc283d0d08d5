"""Chats tokenized like transformers does, and their answers by the template."""

from __future__ import annotations

import datetime
import decimal
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from tokenizers import AddedToken
from tokenizers import Tokenizer as Native
from transformers import AutoTokenizer

from nanoscale.cli.main import run as nanoscale
from nanoscale.common.devices import Devices
from nanoscale.common.errors import UserError
from nanoscale.config.composing.compose import compose
from nanoscale.config.rules import check
from nanoscale.data import open_data
from nanoscale.data.batch import IGNORED
from nanoscale.data.inspect import inspect
from nanoscale.data.prepare import chunks
from nanoscale.data.prepare.render import RecordError, Template
from nanoscale.data.tokens.files import open_tokens
from nanoscale.data.tokens.tokenizer import train_bpe
from tests.data.texts import WORDS, Interrupter, every_file, prepared, texts

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}
{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
INSTRUCT = """{{ bos_token }}{% for m in messages %}
{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% elif m.role == 'assistant' %}
{% generation %} {{ m.content | trim }}{{ eos_token }}{% endgeneration %}
{% else %}{{ raise_exception('only users and assistants here') }}{% endif %}{% endfor %}"""
LLAMA = """{{ bos_token }}{% for m in messages %}
<|start|>{{ m.role }}<|end|>

{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}{{ eos_token }}{% endgeneration %}
{% else %}{{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}
{% if add_generation_prompt %}<|start|>assistant<|end|>

{% endif %}"""
THINKING = """{% set ns = namespace(last=0) %}
{% for m in messages if m.role == 'user' %}{% set ns.last = messages.index(m) %}{% endfor %}
{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role != 'assistant' %}{{ m.content }}<|im_end|>{% else %}{% generation %}
{% set parts = m.content.split('</think>') %}
{% if loop.index0 > ns.last %}<think>
{{ parts[0].split('<think>')[-1].strip() if parts | length > 1 else '' }}
</think>

{% endif %}{{ parts[-1].lstrip() }}<|im_end|>{% endgeneration %}{% endif %}

{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Thoughts of answers before the last question are left out."""
FORGETFUL = (
    """{% for m in messages[-2:] %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"""
)
CONTENT_ONLY = """{% for m in messages %}<|im_start|>{{ m.role }}: {% if m.role == 'assistant' %}
So {% generation %}{{ m.content }}.{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"""
TEMPLATES = {
    "chatml": CHATML,
    "instruct": INSTRUCT,
    "llama": LLAMA,
    "thinking": THINKING,
    "content": CONTENT_ONLY,
}
END = "<|im_end|>"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tokenizer with special tokens of turns, as a model's folder has it."""
    folder = tmp_path_factory.mktemp("model")
    train_bpe(texts(50), 320, folder / "tokenizer.json")
    native = Native.from_file(str(folder / "tokenizer.json"))
    native.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", END)])
    native.save(str(folder / "tokenizer.json"))
    write_config(folder, CHATML)
    return folder


@pytest.fixture
def settings(model) -> dict[str, Any]:
    return {"tokenizer": str(model), "kind": "chat", "field": "messages"}


def write_config(folder: Path, template: str | None) -> None:
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    about |= {"bos_token": "<|endoftext|>", "chat_template": template}  # type: ignore[dict-item]
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def chats(count: int, seed: int = 0) -> list[list[dict[str, str]]]:
    """Conversations of one to three questions with their answers."""
    dice = np.random.default_rng(seed)

    def words() -> str:
        return " ".join(dice.choice(WORDS, dice.integers(1, 30)))

    return [
        [
            {"role": role, "content": words()}
            for _ in range(dice.integers(1, 4))
            for role in ("user", "assistant")
        ]
        for _ in range(count)
    ]


def write_chats(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def of_messages(conversations: list[Any]) -> list[dict[str, Any]]:
    return [{"id": 1, "messages": messages} for messages in conversations]


def marked(folder: Path, name: str = "tokens") -> list[tuple[list[int], list[int]]]:
    """Return each chat's tokens, and the marks of answers."""
    file = open_tokens("megatron", folder / name)
    answers = np.fromfile(folder / f"{name}.answers", np.uint8)
    assert len(answers) == len(file.tokens)
    starts = list(file.document_starts(0, len(file)))
    return [
        (file[number].tolist(), answers[starts[number] : starts[number + 1]].tolist())
        for number in range(len(file))
    ]


@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_and_answers_are_those_of_transformers(tmp_path, model, name):
    """Both by the template's blocks around answers, and without these where they hold a whole answer."""
    (tmp_path / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    conversations = chats(40)
    for messages in conversations[:20] if name == "thinking" else ():
        for message in messages[1::2]:
            message["content"] = f"<think>\nI {message['content']}\n</think>\n\nYes"
    for messages in conversations[20:30] if name == "thinking" else ():
        messages[1]["content"] = ""  # as in a message that only calls tools
    source = write_chats(tmp_path / "a.jsonl", of_messages(conversations))
    template = TEMPLATES[name]
    write_config(tmp_path, template)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    without_blocks = re.sub("{% (end)?generation %}", "{# #}", template)
    for number, ours in enumerate((template, without_blocks)[: 1 if name == "content" else 2]):
        write_config(tmp_path, ours)
        out = tmp_path / f"out-{number}"
        manifest = prepared(out, source, tokenizer=str(tmp_path), kind="chat", field="messages")
        found = marked(out)
        assert len(found) == 40
        for messages, (ids, answers) in zip(conversations, found, strict=True):
            wanted = theirs.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            assert ids == wanted["input_ids"]
            assert answers == wanted["assistant_masks"]
        assert manifest["train"]["answers"] == sum(sum(answers) for _, answers in found) > 100
        again = AutoTokenizer.from_pretrained(out)  # the folder is a tokenizer with its template
        assert again.apply_chat_template(conversations[0], tokenize=False) == (
            theirs.apply_chat_template(conversations[0], tokenize=False)
        )


def test_without_a_template_a_plain_one_is_taken_and_bytes_can_be_tokens(tmp_path):
    chat = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]
    chat += [{"from": "human", "value": "Ü?"}, {"from": "gpt", "value": "é"}]
    source = write_chats(tmp_path / "a.jsonl", [{"conversations": chat}])
    prepared(tmp_path / "out", source, kind="chat", field="messages")
    ((ids, answers),) = marked(tmp_path / "out")
    wanted = [*b"User: Hi\n\nAssistant: Yes", 256, *b"\n\nUser: "]
    wanted += [*"Ü?\n\nAssistant: é".encode(), 256, *b"\n\n"]
    assert ids == wanted
    learned = [token for token, is_answer in zip(ids, answers, strict=True) if is_answer]
    assert learned == [*b" Yes", 256, *" é".encode(), 256]


@pytest.mark.slow
def test_parquet_and_any_number_of_workers_make_the_same_bytes(tmp_path, settings, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK", 3000)
    conversations = chats(90)
    write_chats(tmp_path / "a.jsonl", of_messages(conversations))
    parquet.write_table(pa.table({"messages": conversations}), tmp_path / "a.parquet")
    settings["validation"] = 0.2
    prepared(tmp_path / "one", tmp_path / "a.jsonl", **settings)
    prepared(tmp_path / "two", tmp_path / "a.jsonl", workers=2, **settings)
    assert every_file(tmp_path / "one") == every_file(tmp_path / "two")
    prepared(tmp_path / "table", tmp_path / "a.parquet", **settings)
    for name in ("tokens", "valid"):
        assert marked(tmp_path / "table", name) == marked(tmp_path / "one", name)

    with pytest.raises(KeyboardInterrupt):
        prepared(tmp_path / "cut", tmp_path / "a.jsonl", watcher=Interrupter(3), **settings)
    with pytest.raises(UserError, match="other settings: --chat-template"):
        prepared(tmp_path / "cut", tmp_path / "a.jsonl", **settings | {"kind": "text"})
    prepared(tmp_path / "cut", tmp_path / "a.jsonl", **settings)
    assert every_file(tmp_path / "cut") == every_file(tmp_path / "one")


USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Yes"}
TEXT = {"type": "text", "text": "What is this?"}
BAD = {
    "no field": ({"text": "x"}, "has no field 'messages' (--field); its fields: text"),
    "no messages": ({"messages": []}, "has no list of messages, or an empty one"),
    "no object": ({"messages": ["Hi"]}, "message 1 is not an object with a role and a content"),
    "role": ({"messages": [{"content": "?"}, ANSWER]}, "message 1 has no role"),
    "unlearned": ({"messages": [USER, ANSWER | {"weight": 0}]}, "has no answer that is learned"),
    "weight": ({"messages": [USER, ANSWER | {"weight": 0.5}]}, "message 2 has the weight 0.5, not 0 or 1"),
    "tools": ({"messages": [USER, ANSWER], "tools": '{"name"'}, "its 'tools' are not a list of objects"),
    "call": ({"messages": [USER, ANSWER | {"tool_calls": [{"id": 1}]}]}, "2 has a tool call without a"),
    "variable": ({"messages": [USER, ANSWER], "tools": [{"name": END}]}, f"special token {END}"),
    "no answer": ({"messages": [USER]}, "has no answer: no message is an assistant's"),
    "first": ({"messages": [ANSWER]}, "begins with an answer"),
    "content": ({"messages": [USER, {"role": "assistant", "content": None}]}, "message 2 has a content"),
    "image": ({"messages": [{"role": "user", "content": [TEXT, {"type": "image_url"}]}, ANSWER]},
        "has an image in message 1: only texts are trained"),
    "video": ({"messages": [USER, ANSWER, {"role": "user", "content": [{"type": "video"}]}]},
        "has a video in message 3: only texts are trained"),
    "audio": ({"prompt": [{"role": "user", "content": [{"type": "input_audio"}]}], "completion": [ANSWER]},
        "has audio in message 1: only texts are trained"),
    "images": ({"messages": [USER, ANSWER], "images": ["a.png"]},
        "has images in its field 'images': only texts are trained"),
    "half a pair": ({"prompt": "Hi"}, "has no field 'messages' (--field); its fields: prompt"),
    "two forms": ({"prompt": "Hi", "completion": [ANSWER]}, "message 2 has a content"),
    "input": ({"instruction": "Hi", "input": 3, "output": "a"}, "its field 'input' is not text"),
    "hidden": ({"messages": [USER, ANSWER | {"parts": [{"a": {END: 1}}]}]}, f"special token {END}"),
    "forged": ({"messages": [{"role": "user", "content": f"a{END}b"}, ANSWER]}, f"special token {END}"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_chat_is_named_and_can_be_left_out(tmp_path, settings, case):
    record, message = BAD[case]
    source = write_chats(tmp_path / "a.jsonl", [*of_messages(chats(3)), record])
    with pytest.raises(UserError) as caught:
        prepared(tmp_path / "out", source, **settings)
    (found,) = caught.value.violations
    assert found.key == f"{source}:4"
    assert message in found.message
    assert not (tmp_path / "out").exists()
    manifest = prepared(tmp_path / "out", source, skip_bad=True, **settings)
    assert (manifest["train"]["documents"], manifest["bad"]) == (3, 1)


def test_a_template_that_rewrites_what_was_said_is_refused(tmp_path, settings):
    template = tmp_path / "forgetful.jinja"
    template.write_text(FORGETFUL)
    other = {"role": "user", "content": "Why?"}
    source = write_chats(tmp_path / "a.jsonl", of_messages([[USER, ANSWER, other, ANSWER]]))
    with pytest.raises(UserError, match="no certain position"):
        prepared(tmp_path / "out", source, chat_template=template, **settings)
    template.write_text("{% for %}")
    with pytest.raises(UserError, match="is not a Jinja template: line 1"):
        prepared(tmp_path / "out", source, chat_template=template, **settings)


def test_the_prepared_folder_is_learned_from_by_its_answers_alone(tmp_path, model, capsys):
    source = write_chats(tmp_path / "a.jsonl", of_messages(chats(60)))
    words = ["--chat", "--tokenizer", str(model), "--validation", "0.2"]
    assert nanoscale(["data", "prepare", str(source), "--out", str(tmp_path / "out"), *words]) == 0
    assert "of the tokens are learned" in capsys.readouterr().out
    words = ["recipe=debug", "data=megatron", f"data.path={tmp_path / 'out'}", "data.packing=whole"]
    config = check(compose([*words, "model.vocab=384"]), Devices("cpu", 1))
    assert (config.data.loss_on, config.data.document_mask) == ("answers", True)
    opened = open_data(config.data, config.train, 384)
    for loader, name in ((opened.train, "tokens"), (opened.valid[0].loader, "valid")):
        batch = loader.batch(range(len(loader)))
        learned = sorted(batch.targets[batch.targets != IGNORED].tolist())
        pairs = [
            pair for chat in marked(tmp_path / "out", name) for pair in zip(*chat, strict=True)
        ]
        assert learned == sorted(token for token, is_answer in pairs if is_answer)
    everything = check(compose([*words, "model.vocab=384", "data.loss_on=all"]), Devices("cpu", 1))
    other = open_data(everything.data, everything.train, 384)
    assert other.fingerprint != opened.fingerprint
    assert "loss on answers" in opened.description
    found = inspect(str(tmp_path / "out"), None, None, 1)
    (sample,) = found["splits"]["train"]["samples"]
    assert sample["text"].startswith("<|im_start|>user\n")
    assert f"{END}⟧\n" in sample["text"]
    (tmp_path / "out" / "tokens.answers").write_bytes(b"\1")
    with pytest.raises(UserError, match="marks 1 tokens"):
        open_data(config.data, config.train, 384)


def test_what_packing_does_not_go_with_is_refused(tmp_path):
    words = ["recipe=debug", "data.packing=whole"]
    for more, key, instead in (
        (["data.document_mask=false"], "data.document_mask", "data.packing=stream"),
        (["data.loss_on=answers"], "data.loss_on", "data.loss_on=all"),
    ):
        with pytest.raises(UserError) as caught:
            check(compose([*words, *more]), Devices("cpu", 1))
        (found,) = caught.value.violations
        assert found.key == key
        assert instead in found.suggestions
    config = check(
        compose([*words, "parallel.cp=2", "parallel.cp_method=ulysses"]), Devices("cpu", 1)
    )
    assert config.data.document_mask


def test_values_that_json_has_no_type_for_are_texts_for_the_template(tmp_path, settings):
    values = {
        "at": datetime.datetime(2024, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
        "on": datetime.date(2024, 1, 2),
        "took": datetime.timedelta(seconds=90),
        "price": decimal.Decimal("1.50"),
        "name": "Grüße".encode(),
    }
    texts_ = ["2024-01-02T03:04:05+00:00", "2024-01-02", "0:01:30", "1.50", "Grüße"]
    template = tmp_path / "all.jinja"
    fields = " ".join("{{ m['%s'] }}" % name for name in values)  # noqa: UP031
    template.write_text("{% for m in messages %}" + fields + "{{ m.content }}{% endfor %}")
    settings |= {"chat_template": template}
    as_text = dict(zip(values, texts_, strict=True))
    for name, more in (("table", values), ("text", as_text)):
        chat = [message | more for message in (USER, ANSWER)]
        source = tmp_path / f"{name}.parquet"
        parquet.write_table(pa.table({"messages": [chat]}), source)
        prepared(tmp_path / name, source, **settings)
    assert marked(tmp_path / "table") == marked(tmp_path / "text")
    picture = [message | as_text | {"picture": b"\xff\xd8"} for message in (USER, ANSWER)]
    parquet.write_table(pa.table({"messages": [picture]}), tmp_path / "picture.parquet")
    prepared(tmp_path / "unused", tmp_path / "picture.parquet", **settings)
    assert marked(tmp_path / "unused") == marked(tmp_path / "text")
    template.write_text("{% for m in messages %}{{ m.content }}{{ m.picture }}{% endfor %}")
    with pytest.raises(UserError, match="half of a surrogate pair"):
        prepared(tmp_path / "used", tmp_path / "picture.parquet", **settings)


PAIRS = {
    "prompt and completion": (
        {"prompt": "How many?", "completion": "Four.", "id": 1},
        [("user", "How many?"), ("assistant", "Four.")],
    ),
    "lists of messages": (
        {
            "prompt": [
                {"role": "system", "content": "Be short."},
                {"role": "user", "content": "Why?"},
            ],
            "completion": [{"role": "assistant", "content": "So."}],
        },
        [("system", "Be short."), ("user", "Why?"), ("assistant", "So.")],
    ),
    "alpaca": (
        {"instruction": "Add.", "input": "1 and 2", "output": "3"},
        [("user", "Add.\n\n1 and 2"), ("assistant", "3")],
    ),
    "alpaca without input": (
        {"instruction": "Greet.", "input": "", "output": "Hello."},
        [("user", "Greet."), ("assistant", "Hello.")],
    ),
    "nested": (
        {
            "data": {
                "chat": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            }
        },
        [("user", "a"), ("assistant", "b")],
    ),
}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", PAIRS)
def test_questions_with_answers_are_the_same_as_chats(tmp_path, settings, name, kind):
    record, messages = PAIRS[name]
    chat = [{"role": role, "content": content} for role, content in messages]
    usual = write_chats(tmp_path / "usual.jsonl", of_messages([chat]))
    file = tmp_path / f"records.{kind}"
    if kind == "jsonl":
        write_chats(file, [record])
    else:
        parquet.write_table(pa.Table.from_pylist([record]), file)
    prepared(tmp_path / "a", usual, **settings)
    settings["field"] = "data.chat" if name == "nested" else "messages"
    prepared(tmp_path / "b", file, **settings)
    assert marked(tmp_path / "a") == marked(tmp_path / "b")


SPECIAL = ("[gMASK]", "<|user|>", "<|assistant|>", "<|end|>", "</think>")


def turns_template(header: str = "<|ROLE|>", end: str = "") -> Template:
    """Return a template whose turns begin with a header and a line break, and end with a text."""
    role, asked = header.replace("ROLE", "{{ m.role }}"), header.replace("ROLE", "assistant")
    turns = f"{{% for m in messages %}}{role}\n{{{{ m.content }}}}{end}{{% endfor %}}"
    asks = f"{{% if add_generation_prompt %}}{asked}\n{{% endif %}}"
    return Template(f"[gMASK]{turns}{asks}{{# </think> #}}", (), SPECIAL)


@pytest.mark.parametrize(
    ("template", "ending"),
    [
        (turns_template(), "<|user|>"),  # as GLM's
        (turns_template(end="\n"), "\n<|user|>"),
        (turns_template(end="<|end|>"), "<|end|>"),
        (turns_template(header="ROLE:", end=" "), " "),  # nothing ends it
    ],
)
def test_every_answer_learns_its_end(template: Template, ending: str) -> None:
    """If the next message's first token ends an answer, the last answer gets it too."""
    turns = [{"role": it, "content": text} for text in ("1", "2") for it in ("user", "assistant")]
    chat = template.chat(turns)
    assert [chat.text[begin:end] for begin, end in chat.answers] == [f"1{ending}", f"2{ending}"]
    assert chat.text.endswith(f"2{ending}")


def test_a_thought_may_have_the_tags_that_the_template_reads() -> None:
    template = turns_template()
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "a</think>2"}]
    template.refuse_special(turns)
    for wrong in ("a<|user|>2", "<|end|>"):
        with pytest.raises(RecordError, match="has the special token"):
            template.refuse_special([turns[0], turns[1] | {"content": wrong}])
    with pytest.raises(RecordError, match="has the special token </think>"):
        template.refuse_special([turns[0] | {"content": "</think>"}, turns[1]])


def test_an_answer_that_the_template_does_not_write_is_a_bad_record() -> None:
    """Templates of models of images expect lists."""
    source = turns_template(end="<|end|>").source
    parts = "{% for part in m.content %}{{ part.text }}{% endfor %}"
    template = Template(source.replace("{{ m.content }}", parts), (), SPECIAL)
    with pytest.raises(RecordError, match="message 2 that the chat template does not write"):
        template.chat([{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}])
