"""Files of prompts."""

from __future__ import annotations

import pytest

from nanoscale.generate.prompts import read_prompts


@pytest.mark.parametrize(
    ("name", "text"), [("a.txt", "To be\nor not\n"), ("a.jsonl", '{"prompt": "To be"}\n')]
)
def test_a_byte_order_mark_is_no_part_of_the_first_prompt(name, text, tmp_path):
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert read_prompts(tmp_path / name)[0] == {"prompt": "To be"}
