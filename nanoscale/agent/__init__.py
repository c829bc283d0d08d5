"""The agent of a host: it starts the ranks there, watches them and reports how they ended."""
