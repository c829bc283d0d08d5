"""Tests of the command line, run in this process or as a program."""

import pytest

Capsys = pytest.CaptureFixture[str]
