"""Tokenizing text files to disk: the work of `nanoscale data prepare`."""

from nanoscale.data.prepare.run import Request, prepare

__all__ = ["Request", "prepare"]
