"""Jobs of these tests start from a process that has torch loaded."""

from tests.support.loaded_agents import loaded_agents  # noqa: F401 - a fixture
