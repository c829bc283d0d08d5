from __future__ import annotations

import pytest

from nanoscale.config.rules import Host
from nanoscale.config.schema import Launcher
from nanoscale.launch.transport.connection_errors import explain

NOISE = """[W1121 21:45:03.8 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved.
/usr/lib/python3/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 4 leaked objects
  warnings.warn('resource_tracker: There appear to be %d '
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "code 1"),
        (NOISE, "code 1"),
        (f"MemoryError\n{NOISE}", "code 1 (MemoryError)"),
        (f"{NOISE}\nquota exceeded for me\n\n", "code 1 (quota exceeded for me)"),
    ],
)
def test_the_last_words_of_an_agent_are_told_but_no_noise(words: str, said: str) -> None:
    diagnosis, _ = explain(Host("me@n1", 1), Launcher(name="ssh"), 1, words, 20.0)
    assert diagnosis.endswith(f"it ended with {said}")
