"""Hyper-parameter sweeps: many runs of one command line, each with other values."""
