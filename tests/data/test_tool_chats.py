"""Conversations with tools, thoughts and answers that are not learned: the tokens of transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from tokenizers import AddedToken
from tokenizers import Tokenizer as Native
from transformers import AutoTokenizer

from nanoscale.common.errors import UserError
from nanoscale.data.tokens.tokenizer import train_bpe
from tests.data.test_chat import marked, write_chats, write_config
from tests.data.texts import prepared, texts

JSON_BLOCKS = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}
{% if m.role == 'assistant' %}<|im_start|>assistant
{% generation %}{% if m.content %}{{ m.content }}{% endif %}
{% for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>{% endgeneration %}
{% elif m.role == 'tool' %}<|im_start|>user
<result>{{ m.content }}</result><|im_end|>{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>{% endif %}

{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PYTHON_TAG = """{{ bos_token }}{% if tools is not none %}<|head|>system<|body|>
Environment: ipython. {{ tools | tojson(indent=2) }}<|turn|>{% endif %}{% for m in messages %}
<|head|>{{ 'ipython' if m.role == 'tool' else m.role }}<|body|>
{% if m.role != 'assistant' %}{{ m.content | trim }}<|turn|>{% else %}{% generation %}
{% if m.tool_calls is defined %}<|python|>{{ m.tool_calls[0].function.name }}(
{% for name, value in m.tool_calls[0].function.arguments.items() %}{{ name }}={{ value | tojson }}
{% endfor %})<|more|>{% else %}{{ m.content }}<|turn|>{% endif %}{% endgeneration %}{% endif %}
{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|body|>
{% endif %}"""
BRACKETS = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}
{% if tools and loop.index0 == 1 %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}
[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}[RESULTS]{"id": "{{ m.tool_call_id }}",
"content": {{ m.content }}}[/RESULTS]{% elif m.role == 'assistant' %}{% generation %}
{% if m.tool_calls %}[CALLS][{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}]
{% else %}{{ m.content }}{% endif %}{{ eos_token }}{% endgeneration %}
{% elif m.role != 'system' %}{{ raise_exception('the role ' + m.role + ' is unknown') }}
{% endif %}{% endfor %}"""
CHANNELS = """{% macro turn(m, last) %}{% if m.thinking and (last or m.tool_calls) %}
<|channel|>analysis<|body|>{{ m.thinking }}<|end|><|head|>assistant{% endif %}
{% if m.tool_calls %} to={{ m.tool_calls[0].function.name }}<|channel|>commentary<|body|>
{{ m.tool_calls[0].function.arguments }}<|call|>{% else %}<|channel|>final<|body|>{{ m.content }}
{{ '<|return|>' if last else '<|end|>' }}{% endif %}{% endmacro %}
{% set ns = namespace(name='') %}
<|head|>system<|body|>{% if tools %}{{ tools[0].function.name }}{% endif %}<|end|>
{% for m in messages %}{% if m.role == 'assistant' %}<|head|>assistant
{% if m.tool_calls %}{% set ns.name = m.tool_calls[0].function.name %}{% endif %}
{% generation %}{{ turn(m, loop.last) }}{% endgeneration %}{% elif m.role == 'tool' %}
<|head|>{{ ns.name }} to=assistant<|body|>{{ m.content | tojson }}<|end|>{% else %}
<|head|>{{ m.role }}<|body|>{{ m.content }}<|end|>{% endif %}{% endfor %}
{% if add_generation_prompt %}<|head|>assistant
{% endif %}"""
OPEN_THOUGHT = """{{ bos_token }}{% set ns = namespace(last=-1) %}
{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{% for tool in tools or [] %}<tool>{{ tool.function | tojson }}</tool>{% endfor %}
{% for m in messages %}{% if m.role != 'assistant' %}<|head|>{{ m.role }}<|body|>{{ m.content }}{% else %}
<|head|>assistant<|body|>{% if loop.index0 > ns.last and m.reasoning_content %}<think>
{% generation %}{{ m.reasoning_content }}</think>{{ m.content or '' }}
{% for c in m.tool_calls %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>
{% endfor %}
{{ eos_token }}{% endgeneration %}{% else %}{% generation %}{{ m.content or '' }}
{% for c in m.tool_calls %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>
{% endfor %}
{{ eos_token }}{% endgeneration %}{% endif %}{% endif %}{% endfor %}
{% if add_generation_prompt %}<|head|>assistant<|body|><think>
{% endif %}"""
TEMPLATES = {
    "JSON blocks": JSON_BLOCKS,
    "python tag": PYTHON_TAG,
    "brackets": BRACKETS,
    "channels": CHANNELS,
    "open thought": OPEN_THOUGHT,
}
SPECIAL = "<|im_start|> <|im_end|> <|head|> <|body|> <|turn|> <|more|> <|end|> <|call|> <|return|>"

WEATHER = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TOOLS = [{"type": "function", "function": WEATHER}]
CALL: dict[str, Any] = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Köln"}},
}
ASKED: list[dict[str, Any]] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Rain in Köln?"},
    {"role": "assistant", "content": None, "reasoning_content": "I ask.\n", "tool_calls": [CALL]},
    {"role": "tool", "content": "17", "tool_call_id": "call00001", "name": "weather"},
]
ANSWERED: list[dict[str, Any]] = [
    *ASKED,
    {"role": "assistant", "content": "<b>No</b>.", "reasoning_content": "17 is dry.\n"},
]
CONVERSATIONS = [
    ANSWERED,
    [*ANSWERED, {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "It is dry."}],
    [*ANSWERED, {"role": "user", "content": "And now?"}, *ASKED[2:], {**ANSWERED[-1], "content": "Yes."}],
    [{"role": role, "content": "Hi"} for role in ("system", "user", "assistant")],
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    train_bpe(texts(50), 320, folder / "tokenizer.json")
    native = Native.from_file(str(folder / "tokenizer.json"))
    native.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL.split()])
    native.save(str(folder / "tokenizer.json"))
    return folder


def prepare(folder: Path, model: Path, template: str, records: list[Any]) -> list[Any]:
    """Return the tokens and marks of JSON records."""
    write_config(model, template)
    source = write_chats(folder / "a.jsonl", records)
    prepared(folder / "out", source, tokenizer=str(model), kind="chat", field="messages")
    return marked(folder / "out")


def as_text(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation with the arguments of tool calls as JSON texts."""
    text = json.dumps(CALL["function"]["arguments"], ensure_ascii=False)
    call = {**CALL, "function": {"name": "weather", "arguments": text}}
    return [m | ({"tool_calls": [call]} if "tool_calls" in m else {}) for m in conversation]


@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_and_answers_are_those_of_transformers(
    tmp_path: Path, model: Path, name: str
) -> None:
    """The answers are the blocks of templates, also without these; tools and arguments may be JSON texts."""
    template = TEMPLATES[name]
    write_config(model, template)
    theirs = AutoTokenizer.from_pretrained(model)
    wanted = []
    for messages in CONVERSATIONS:
        if name == "channels":  # it joins the arguments to text
            messages = as_text(messages)
        encoded = theirs.apply_chat_template(
            messages, tools=TOOLS, return_dict=True, return_assistant_tokens_mask=True
        )
        wanted.append((encoded["input_ids"], encoded["assistant_masks"]))
        assert 0 < sum(encoded["assistant_masks"]) < len(encoded["input_ids"])
    records: list[Any] = [{"messages": messages, "tools": TOOLS} for messages in CONVERSATIONS]
    in_text = [
        {"messages": as_text(messages), "tools": json.dumps(TOOLS)} for messages in CONVERSATIONS
    ]
    without_blocks = re.sub("{% (end)?generation %}", "{# #}", template)
    for number, (own, chats) in enumerate([(template, records), (without_blocks, in_text)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = prepare(folder, model, own, chats)
        for ours, expected, messages in zip(found, wanted, CONVERSATIONS, strict=True):
            assert theirs.decode(ours[0]) == theirs.decode(expected[0])
            assert tuple(map(list, ours)) == expected, (number, messages)


def learned(folder: Path, model: Path, template: str, records: list[Any]) -> list[str]:
    """Return the text that is learned of each record."""
    native = Native.from_file(str(model / "tokenizer.json"))
    return [
        native.decode(
            [token for token, mark in zip(*chat, strict=True) if mark], skip_special_tokens=False
        )
        for chat in prepare(folder, model, template, records)
    ]


@pytest.mark.parametrize("switch", [{"weight": 0}, {"train": False}])
@pytest.mark.parametrize("blocks", [True, False])
def test_answers_that_are_switched_off_are_not_learned(
    tmp_path: Path, model: Path, switch: dict[str, Any], blocks: bool
) -> None:
    template = JSON_BLOCKS if blocks else re.sub("{% (end)?generation %}", "{# #}", JSON_BLOCKS)
    chat = [m | (switch if "tool_calls" in m else {"weight": 1}) for m in CONVERSATIONS[1]]
    (text,) = learned(tmp_path, model, template, [{"messages": chat}])
    assert text == "<b>No</b>.<|im_end|>It is dry.<|im_end|>"


def test_tables_and_other_forms_of_tools_are_the_same_chats(tmp_path: Path, model: Path) -> None:
    """Tables fill missing fields with null, and many datasets store JSON text."""
    day = {
        "name": "day",
        "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
    }
    tools = [*TOOLS, {"type": "function", "function": day}]
    chat = {"messages": [ASKED[1], ASKED[2], ASKED[3], ANSWERED[-1]], "tools": tools}
    shared = [
        {"from": "human", "value": ASKED[1]["content"]},
        {"from": "function_call", "value": json.dumps(CALL["function"])},
        {"from": "observation", "value": "17"},
        {"from": "gpt", "value": ANSWERED[-1]["content"]},
    ]
    (wanted,) = prepare(tmp_path, model, JSON_BLOCKS, [chat])
    forms = {
        "structs": chat,
        "texts": chat | {"tools": json.dumps(tools)},
        "a text for each": chat | {"tools": list(map(json.dumps, tools))},
        "calls": chat
        | {
            "messages": [
                m | {"tool_calls": json.dumps(m.get("tool_calls", []))} for m in chat["messages"]
            ]
        },
        "messages": {name: json.dumps(value) for name, value in chat.items()},
        "shared": {"messages": shared, "tools": json.dumps(tools)},
    }
    for name, record in forms.items():
        table = tmp_path / f"{name}.parquet"
        parquet.write_table(pa.Table.from_pylist([record]), table)
        prepared(tmp_path / name, table, tokenizer=str(model), kind="chat", field="messages")
        assert marked(tmp_path / name) == [wanted], name


def test_a_pair_has_tools_and_the_template_gets_variables(tmp_path: Path, model: Path) -> None:
    template = "{{ tools | length }}{{ mood }}" + BRACKETS
    record: dict[str, Any] = {
        "chosen": ANSWERED[1:],
        "rejected": [*ASKED[1:], {"role": "assistant", "content": "Yes"}],
    }
    record |= {"tools": TOOLS, "chat_template_kwargs": {"mood": "calm"}}
    write_config(model, template)
    source = write_chats(tmp_path / "a.jsonl", [record])
    settings = {"tokenizer": str(model), "kind": "pairs", "field": "messages"}
    prepared(tmp_path / "out", source, **settings)
    native = Native.from_file(str(model / "tokenizer.json"))
    for (ids, marks), answer in zip(marked(tmp_path / "out"), ("<b>No</b>.", "Yes"), strict=True):
        assert native.decode(ids).startswith("1calm")
        assert (
            native.decode([i for i, mark in zip(ids, marks, strict=True) if mark]).strip() == answer
        )


@pytest.mark.parametrize(
    ("role", "message"),
    [
        ("developer", "by the chat template: the role developer is unknown"),
        ("usr", "message 1 has the unknown role `usr`; did you mean `user`?"),
        ("owl", "message 1 has the unknown role `owl`"),
    ],
)
def test_an_unknown_role_is_a_bad_record(
    tmp_path: Path, model: Path, role: str, message: str
) -> None:
    """A template may refuse it, write it as any other, or leave the message out."""
    odd = [{"role": role, "content": "Hu"}, *ANSWERED]
    with pytest.raises(UserError, match=re.escape(message)):
        prepare(tmp_path, model, BRACKETS, [{"messages": odd}])
