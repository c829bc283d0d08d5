"""Tokenizing text files to disk: the work of `nanoscale data prepare`."""

from nanoscale.data.prepare.run import PreparationRequest, prepare

__all__ = ["PreparationRequest", "prepare"]
