"""Chat templates that need too much: refused in one line, without harm to the preparation's process."""

from __future__ import annotations

import json
import re
import resource
from pathlib import Path

import pytest

from nanoscale.cli.main import run as nanoscale
from nanoscale.data.prepare import render
from nanoscale.data.prepare.chat import Renderer
from nanoscale.data.prepare.render import Chat, Template

CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
MEMORY = "needs more than 256 MiB of memory"
TIME = "takes more than 0.4 s of processor time"
SIZE = "becomes .* characters by the chat template; at most"
TEMPLATES = {
    "{{ 'a' * 2000000000 }}": MEMORY,
    "{{ 'a' * 1000000 }}{% for m in messages %}{{ m.content }}{% endfor %}": SIZE,
    "{{ messages[0]['content'] | center(2000000000) }}": MEMORY,
    "{% set ns = namespace(x='abcdefgh') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}"
    "{% endfor %}{{ ns.x }}": MEMORY,
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": TIME,
    "{{ 9 ** (9 ** 9) }}": TIME,
    "{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}": "maximum recursion depth",
}


@pytest.fixture
def less_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The real program with a shorter limit, to wait less."""
    file = tmp_path / "render.py"
    source = Path(render.__file__).read_text()
    assert "SECONDS, SECONDS_A_MIB = 10.0, 10.0" in source
    file.write_text(source.replace("SECONDS, SECONDS_A_MIB = 10.0", "SECONDS, SECONDS_A_MIB = 0.4"))
    monkeypatch.setattr(render, "__file__", str(file))
    monkeypatch.setattr(render, "SECONDS", 0.4)


def write(folder: Path, template: str, chats: int = 1) -> list[str]:
    (folder / "chats.jsonl").write_text(f"{json.dumps(CHAT)}\n" * chats)
    (folder / "t.jinja").write_text(template)
    words = ["data", "prepare", str(folder / "chats.jsonl"), "--out", str(folder / "out"), "--chat"]
    return [
        *words,
        "--tokenizer",
        "byte",
        "--workers",
        "1",
        "--chat-template",
        str(folder / "t.jinja"),
    ]


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda text: text[:40])
def test_a_template_that_takes_too_much_is_refused_in_one_line(
    template: str, less_time: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert nanoscale(write(tmp_path, template)) == 2
    printed = capsys.readouterr()
    first, *_ = printed.err.splitlines()
    assert first.startswith("error: ") and "Traceback" not in printed.err
    assert re.search(TEMPLATES[template], first), first
    assert not (tmp_path / "out").exists()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


BAD_FOR_ONE = (
    "{% if messages[0]['content'] == 'bomb' %}{{ 'a' * 2000000000 }}{% endif %}"
    "{% for m in messages %}{{ m['content'] }}{% endfor %}"
)


def test_one_record_that_takes_too_much_leaves_the_others_as_they_are() -> None:
    bomb = {"messages": [{**CHAT["messages"][0], "content": "bomb"}, CHAT["messages"][1]]}
    records = [json.dumps(one).encode() for one in (CHAT, bomb, CHAT)]
    renderer = Renderer(Template(BAD_FOR_ONE, (), ()), "messages")
    try:
        first, second, third = renderer.render(records)
    finally:
        renderer.close()
    assert first == third == Chat("hiho", ((2, 4),))
    assert MEMORY in str(second)


def test_large_records_have_more_room() -> None:
    record = {
        "messages": [{**CHAT["messages"][0], "content": "é" * (16 << 20)}, CHAT["messages"][1]]
    }
    renderer = Renderer(Template(BAD_FOR_ONE, (), ()), "messages")
    try:
        (chat,) = renderer.render([json.dumps(record, ensure_ascii=False).encode()])
    finally:
        renderer.close()
    assert isinstance(chat, Chat) and len(chat.text) == (16 << 20) + 2
