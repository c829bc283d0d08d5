"""The one error that is the user's to fix: shown in one piece, exit code 2, no traceback."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Violation:
    """One thing that is wrong with a request."""

    key: str
    """the configuration key, option or file that is wrong; "" where there is none"""
    value: object
    """what it was set to"""
    source: str
    """where that value came from: `recipes/mine.yaml:12`, `command line`, `default`"""
    message: str
    """the law that it breaks, as a sentence without the key"""
    suggestions: tuple[str, ...] = ()
    """what to type instead, each ready to paste"""
    remedy: str = ""
    """what to do, where it is more than something to type"""
    typed: str = ""
    """the value as it was typed, where that is another text than the value's own"""


@dataclass
class UserError(Exception):
    """The request is wrong; nothing was started or written."""

    kind: str
    """`config`, `usage`, `layout`, `data`, `run`, `checkpoint`, or `plan` where it does not fit"""
    message: str
    violations: list[Violation] = field(default_factory=list)

    def __str__(self) -> str:
        return self.message
