"""Statements about the tests are true."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import LONGEST_FIRST
from tests.support.schedule import APART, QUEUES

TESTS = Path(__file__).parents[1]


def test_files_that_are_scheduled_apart_exist() -> None:
    for file in (*QUEUES, *APART):
        assert (TESTS.parent / file).exists(), file
    for room in LONGEST_FIRST:
        assert (TESTS / room).is_dir(), room


def test_the_map_has_every_room_and_every_helper() -> None:
    page = (TESTS / "README.md").read_text()
    rooms = [path.parent.name for path in TESTS.glob("*/__init__.py")]
    helpers = [path.name for path in (TESTS / "support").glob("[a-z]*.py")]
    missing = [name for name in (*rooms, *helpers) if f"`{name}`" not in page]
    assert missing == []
