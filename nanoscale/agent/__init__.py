"""The agent of a host: starts the ranks there, minds them and says how they ended."""
