"""Files that the user names: none is replaced unless `--overwrite` is given, and each is written completely."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path

from nanoscale.common.errors import UserError, Violation


def require_writable(
    option: str, file: Path, *, overwrite: bool, is_own: Callable[[Path], bool] | None = None
) -> None:
    """Refuse a file that exists already or cannot be written, before anything is computed.

    Args:
        is_own: returns True for a file that this command wrote itself, which it may replace.

    Raises:
        UserError: the file exists, is a folder, or its folder is not writable.
    """
    if file.is_dir() or not file.parent.is_dir():
        raise UserError("usage", f"{file} cannot be written: name a file in a folder that exists")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UserError("usage", f"{file} cannot be written: no permission")
    if overwrite or not file.is_file() or (is_own is not None and is_own(file)):
        return  # a device or a pipe, as /dev/stdout, loses nothing
    instead = ("--overwrite", f"{option} {shlex.quote(_free(file))}")
    found = Violation(option, str(file), "command line", "the file already exists", instead)
    raise UserError("usage", f"{option} {file}: the file already exists", [found])


def write_file(option: str, file: Path, text: str, *, overwrite: bool) -> None:
    """Write a file that `require_writable` has admitted, completely or not at all, in UTF-8.

    Raises:
        UserError: the file exists by now, or cannot be written there.
        OSError: the disk is full or failing.
    """
    from nanoscale.runs.directory import write_atomically

    require_writable(option, file, overwrite=overwrite)
    try:
        if file.exists() and not file.is_file():
            with file.open("w", encoding="utf-8") as stream:
                stream.write(text)
        else:
            write_atomically(file.resolve(), text)  # the target of a link, not the link
    except (FileNotFoundError, PermissionError) as error:  # /proc, which takes no files
        raise UserError("usage", f"{option} {file}: {error.strerror}") from error


def _free(file: Path) -> str:
    """Return an unused name similar to the file's."""
    number = 2
    while (other := file.with_stem(f"{file.stem}-{number}")).exists():
        number += 1
    return str(other)
