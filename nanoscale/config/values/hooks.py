"""A Python file of the user's own code: `hooks.path`.

The launcher reads it and runs nothing of it. Only the ranks run it, and only with the digest that the launch
has recorded.
"""

import ast
import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from nanoscale.common.errors import UserError
from nanoscale.config.schema import Config

CHOSEN_BY = {
    "model": "model.source",
    "loss": "train.objective",
    "optimizer": "optimizer.name",
    "data": "data.source",
}
"""The functions that take the place of a part of nanoscale, and the key that is `hooks` to choose each."""
PARAMETERS = {
    "model": ("config",),
    "loss": ("logits", "targets", "config"),
    "optimizer": ("groups", "config"),
    "data": ("config", "split"),
    "on_step_end": ("moment",),
    "on_evaluation": ("moment",),
    "on_checkpoint": ("moment",),
}
"""The parameters of each function that is called if the file defines it."""
_MOST_BYTES = 1 << 20
_MODULE = "nanoscale_hooks"


class HookError(Exception):
    """The file cannot be read, or is not Python."""


@dataclass(frozen=True)
class HookFile:
    """The content of a file of hooks."""

    text: bytes
    sha256: str
    names: dict[str, int | None]
    """The public names that it defines, with the number of parameters of a function; None: not known."""


def file_name(sha256: str) -> str:
    """Return the name of a file's copy in run directories, which may keep several versions."""
    return f"hooks-{sha256[:12]}.py"


def read(path: Path) -> HookFile:
    """Read a file, and find what it defines without running it.

    Raises:
        HookError: it is missing, too large, or not Python.
    """
    try:
        if not path.is_file():
            raise HookError("there is no such file")
        with path.open("rb") as stream:
            text = stream.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise HookError("is larger than 1 MiB")
        names = dict(_names(ast.parse(text)))
    except OSError as error:
        raise HookError(f"cannot be read: {error.strerror}") from error
    except SyntaxError as error:
        what = f"is not Python: {error.msg}, in line {error.lineno}"
        if error.msg.startswith("(unicode error)"):
            what = f"is not UTF-8, in line {error.lineno}: its first line can name another encoding"
        raise HookError(what) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise HookError(f"is not Python: {error}") from error
    return HookFile(text, hashlib.sha256(text).hexdigest(), names)


def _names(tree: ast.Module) -> list[tuple[str, int | None]]:
    found: list[tuple[str, int | None]] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            given = [*node.args.posonlyargs, *node.args.args]
            found.append((node.name, None if node.args.vararg else len(given)))
        elif isinstance(node, ast.AsyncFunctionDef | ast.ClassDef):
            found.append((node.name, None))
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            found += [(name, None) for name in names]
        elif isinstance(node, ast.ImportFrom):
            found += [(alias.asname or alias.name, None) for alias in node.names]
    return [(name, count) for name, count in found if not name.startswith("_")]


def function(config: Config, name: str) -> Callable[..., Any] | None:
    """Return a function of the job's file, which gets the configuration; None if there is none.

    Raises:
        UserError: the file has changed since the launch.
    """
    hooks = config.hooks
    found = None if hooks.path is None else getattr(_run(hooks.path, hooks.sha256), name, None)
    return partial(found, config=config) if found and "config" in PARAMETERS[name] else found


@cache
def _run(path: str, sha256: str | None) -> ModuleType:
    text = Path(path).read_bytes()
    if hashlib.sha256(text).hexdigest() != sha256:
        raise UserError("hooks", f"{path} has changed since the launch")
    module = sys.modules[_MODULE] = ModuleType(_MODULE)
    module.__file__ = path
    exec(compile(text, path, "exec"), module.__dict__)
    return module
