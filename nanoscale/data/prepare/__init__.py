"""Tokenizing text files to disk: the work of `nanoscale data prepare`, and of the embedded corpus."""

from nanoscale.data.prepare.preparation import PreparationRequest, prepare

__all__ = ["PreparationRequest", "prepare"]
