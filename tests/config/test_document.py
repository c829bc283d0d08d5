"""YAML is data: content that is not a plain mapping is refused with its file and line."""

from __future__ import annotations

import pytest
import yaml

from nanoscale.common.errors import UserError
from nanoscale.config.values.yaml_file import parse, read, to_yaml


def refusal(text: str) -> str:
    with pytest.raises(UserError) as caught:
        parse(text, "x.yaml")
    assert caught.value.kind == "config"
    return str(caught.value)


def test_scalars_are_those_of_yaml_1_2():
    text = "a: on\nb: 1e-4\nc: 010\nd: 1:30\ne:\nf: True\ng: 2026-01-01\nh: .5\ni: '7'\nj: 32k\n"
    assert parse(text, "x").content == {
        "a": "on", "b": 1e-4, "c": 10, "d": "1:30", "e": None,
        "f": True, "g": "2026-01-01", "h": 0.5, "i": "7", "j": "32k",
    }  # fmt: skip


def test_every_key_and_item_knows_its_line():
    document = parse("defaults:\n- a\n- override /b: c\n\nmodel:\n  layers: 3\n", "x.yaml")
    assert document.lines["defaults.0"] == 2
    assert document.lines["model.layers"] == 6
    assert document.source("defaults.1.override /b") == "x.yaml:3"


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("a:\n\tb: 1", 2, "is not YAML: "),
        ("a: b: c", 1, "is not YAML: "),
        ("ok: 1\na: [1", 2, "is not YAML: "),
        ("a: 1\nb: 2\na: 3", 3, "`a` twice, first in line 1"),
        ("m:\n  a: 1\n  a: 2", 3, "twice"),
        ("- 1\n- 2", 1, "must hold `key: value`"),
        ("just a text", 1, "must hold `key: value`"),
        ("a: 1\n---\nb: 2", 2, "another document"),
        ("a: &x [*x]", 1, "contains itself"),
        ("a: &x {b: *x}", 1, "contains itself"),
        ("a: *nope", 1, "is not YAML: "),
        ("ok: 1\na: !!python/object/apply:os.system [ls]", 2, "tag"),
        ("a: !mine 1", 1, "tag"),
        ("a: !!int abc", 1, "tag"),
        ("? [a]\n: 1", 1, "list or a mapping as a key"),
        ("a: 1\nb: \x07", 2, "character that YAML does not allow"),
        ("a: " + "[" * 100_000, 1, "nest"),  # PyYAML 6.0.4 has a limit of its own
    ],
)
def test_what_is_no_plain_mapping_is_refused_with_its_line(text, line, reason):
    message = refusal(text)
    assert message.startswith(f"x.yaml:{line}: ")
    assert reason in message


def test_an_alias_bomb_is_refused_before_it_expands():
    bomb = "a0: &a0 [" + ",".join(["lol"] * 10) + "]\n"
    for level in range(1, 30):  # 10^30 values if it went off
        bomb += f"a{level}: &a{level} [" + ",".join([f"*a{level - 1}"] * 10) + "]\n"
    assert "through its aliases" in refusal(bomb)


def test_a_modest_alias_is_fine():
    content = parse("a: &x {b: 1}\nc: *x\n", "x").content
    assert content == {"a": {"b": 1}, "c": {"b": 1}}


def test_an_empty_file_is_an_empty_mapping():
    assert parse("# nothing yet\n", "x").content == {}


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(UserError, match="is a folder"):
        read(tmp_path)
    with pytest.raises(UserError, match="cannot be read"):
        read(tmp_path / "none.yaml")
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("a: 1\nb: ü\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin.yaml:2: is not UTF-8"):
        read(latin)
    huge = tmp_path / "huge.yaml"
    huge.write_text("a: " + "x" * (1 << 20))
    with pytest.raises(UserError, match="bytes"):
        read(huge)


@pytest.mark.parametrize(
    "text", ["on", "1e5", "010", "08", "~", "null", "", "1:30", "-", "a: b", "#x", "ü\n", "true"]
)
def test_texts_survive_being_written_and_read_by_either_version_of_yaml(text):
    written = to_yaml({"a": text, "b": 1e-5, "c": None})
    assert parse(written, "x").content == {"a": text, "b": 1e-5, "c": None}
    assert yaml.safe_load(written)["a"] == text
