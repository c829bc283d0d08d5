"""A file of prompts. Imports no torch."""

from pathlib import Path

from nanoscale.common.errors import UserError
from nanoscale.common.json_text import Json, parse

PROMPT = "prompt"


def read_prompts(file: Path) -> list[Json]:
    """Read records with at least `prompt`: one per line of a .jsonl file, otherwise one per line that is not
    empty.

    Raises:
        UserError: the file is missing, not UTF-8, or empty; a line is not a JSON object with a text `prompt`.
    """
    try:
        lines = file.expanduser().read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise UserError("usage", f"--prompts {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError("usage", f"--prompts {file}: is not UTF-8 at byte {error.start}") from error
    numbered = [(n, line.removesuffix("\r")) for n, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UserError("usage", f"--prompts {file}: holds no prompt")
    if file.suffix == ".jsonl":
        return [_record(file, number, line) for number, line in numbered]
    return [{PROMPT: line} for _, line in numbered]


def _record(file: Path, number: int, line: str) -> Json:
    try:
        record = parse(line)
    except ValueError as error:
        raise UserError("usage", f"{file}:{number}: is not JSON: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get(PROMPT), str):
        what = f'is not a JSON object with a text "{PROMPT}"'
        raise UserError("usage", f"{file}:{number}: {what}")
    return record
