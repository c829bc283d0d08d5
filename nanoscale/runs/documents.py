"""JSON files of a run directory, read into their types: a damaged one is a UserError that names it."""

import types
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from nanoscale.common.errors import UserError, Violation
from nanoscale.common.json_text import parse

T = TypeVar("T")


def read_document(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds one mapping.

    Raises:
        FileNotFoundError: there is no such file.
        UserError: it cannot be read, or holds something else.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise damaged(path, f"cannot be read: {error.strerror}") from error
    if not data.strip():
        raise damaged(path, "is empty")
    try:
        value = parse(data)
    except ValueError as error:
        raise damaged(path, "is not JSON") from error
    if not isinstance(value, dict):
        raise damaged(path, "is not a mapping")
    return value


def read_record(kind: type[T], path: Path) -> T:
    """Read a JSON file that holds the fields of a dataclass; unknown names are ignored.

    Raises:
        FileNotFoundError: there is no such file.
        UserError: it is damaged, or a field is missing or of another type.
    """
    values = read_document(path)
    hints, present = _hints(cast("Any", kind)), {}
    for field in fields(cast("Any", kind)):
        if field.name in values:
            hint, value = hints[field.name], values[field.name]
            if not fits_type(hint, value):
                raise damaged(path, f"has a `{field.name}` of another type than expected")
            present[field.name] = tuple(value) if get_origin(hint) is tuple else value
        elif field.default is MISSING and field.default_factory is MISSING:
            raise damaged(path, f"has no `{field.name}`")
    return kind(**present)


_hints = cache(get_type_hints)


def damaged(path: Path, problem: str) -> UserError:
    """Return the error for a file of a run that nanoscale did not write in this form."""
    return UserError("run", f"{path} {problem}", [Violation(path.name, None, "", problem)])


def fits_type(hint: Any, value: object) -> bool:
    """True if a JSON value matches a type annotation."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(fits_type(choice, value) for choice in arguments)
    if origin is Literal:
        return value in arguments
    if origin is tuple:
        return isinstance(value, list) and all(fits_type(arguments[0], item) for item in value)
    if hint in (int, float):
        numbers = (int, float) if hint is float else int
        return isinstance(value, numbers) and not isinstance(value, bool)
    return isinstance(value, origin or hint)
