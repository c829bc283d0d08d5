"""Text in files to tokens on disk: what `nanoscale data prepare` does."""

from nanoscale.data.prepare.run import Request, prepare

__all__ = ["Request", "prepare"]
