"""The run directory: where each thing of a run lies, and how it is written there."""

from __future__ import annotations

import difflib
import itertools
import json
import os
import re
import shlex
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nanoscale.common.errors import UserError, Violation
from nanoscale.config.violations import override

Stream = Literal["out", "err"]
STREAMS: tuple[Stream, ...] = ("out", "err")

DEFAULT_ROOT = Path("runs")
ARRAY = ".array"
"""how the name of the folder ends that runs of an array share"""
SIGNATURE = "signature"
_CHECKPOINT = re.compile(r"step-(\d{8,})")
_ATTEMPT = re.compile(r"attempt-(\d+)")
_LONGEST_NAME = 200
_counter = itertools.count()


@dataclass(frozen=True)
class RunDirectory:
    """One run's folder; `path` is absolute."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def deepspeed(self) -> Path:
        return self.path / "deepspeed.json"

    @property
    def provenance(self) -> Path:
        return self.path / "provenance.json"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def launch(self) -> Path:
        return self.path / "launch.json"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def status(self) -> Path:
        return self.path / "status.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def submission(self) -> Path:
        return self.path / "slurm.json"

    @property
    def script(self) -> Path:
        return self.path / "submit.sbatch"

    @property
    def failure(self) -> Path:
        return self.path / "failure.json"

    @property
    def task(self) -> Path:
        """What such a job is told beside the configuration."""
        return self.path / "task.json"

    @property
    def result(self) -> Path:
        """What a job that is no training, and of no run, has found out."""
        return self.path / "result.json"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def signature(self) -> Path:
        """By which its user's own launches know the run; see trust.py."""
        return self.path / SIGNATURE

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def workspace(self, attempt: int) -> Path:
        """Where an attempt prepares what it changes in `checkpoints/`; see fence.py."""
        return self.checkpoints / f".attempt-{attempt}"

    @property
    def latest(self) -> Path:
        return self.checkpoints / "latest"

    @property
    def profile(self) -> Path:
        """Traces of the steps that `profile.steps` chose."""
        return self.path / "profile"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def reference(self) -> str:
        """The shortest thing to type for it in the current folder."""
        if self.path.parent == _absolute(DEFAULT_ROOT):
            return self.name
        here = _absolute(Path())
        return str(self.path.relative_to(here) if self.path.is_relative_to(here) else self.path)

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    def checkpoint_steps(self) -> list[int]:
        """Steps that a checkpoint was published of, in order; whether it is whole is not looked at."""
        found = (_CHECKPOINT.fullmatch(path.name) for path in self.checkpoints.glob("step-*"))
        return sorted(int(match[1]) for match in found if match)

    def last_attempt(self) -> int:
        """The number of the newest attempt that has logs; 0 before the first."""
        found = (_ATTEMPT.fullmatch(path.name) for path in self.logs.glob("attempt-*"))
        return max((int(match[1]) for match in found if match), default=0)

    def attempt_config(self, attempt: int) -> Path:
        """Where the configuration of an earlier attempt is kept when a later one changed it."""
        return self.path / f"config.attempt-{attempt}.yaml"

    def attempt_logs(self, attempt: int) -> Path:
        return self.logs / f"attempt-{attempt}"

    def log(self, attempt: int, host: str, rank: int, stream: Stream) -> Path:
        """What a rank prints in an attempt; `rank` is the global one."""
        return self.attempt_logs(attempt) / f"{host}.rank-{rank}.{stream}"

    def agent_log(self, attempt: int, host: str) -> Path:
        """What the agent of a host prints in an attempt."""
        return self.attempt_logs(attempt) / f"{host}.agent.log"

    def rank_failure(self, attempt: int, host: str, rank: int) -> Path:
        """Where a rank writes why it failed."""
        return self.attempt_logs(attempt) / f"{host}.rank-{rank}.failure.json"

    @classmethod
    def create(cls, root: Path, name: str) -> RunDirectory:
        """Make the folder of a new run.

        Raises:
            UserError: the name is taken or unusable, or the root cannot be written to.
        """
        with cls.build(root, name):
            pass
        return cls(_absolute(root) / name)

    @classmethod
    @contextmanager
    def build(cls, root: Path, name: str) -> Iterator[RunDirectory]:
        """Fill the folder of a new run aside; it appears under its name when the block ends well.

        Nothing is left of it when the block raises, the root included if it was not there before.

        Raises:
            UserError: the name is taken or unusable, or the root cannot be written to.
        """
        root = _absolute(root)
        check_name(name)
        check_free(root, name)
        made = _missing_parents(root)
        aside = root / f".{name}.{uuid.uuid4().hex[:8]}"
        try:
            with _explained(root):
                root.mkdir(parents=True, exist_ok=True)
                aside.mkdir()
                (aside / "logs").mkdir()
                (aside / "checkpoints").mkdir()
                (aside / "lock").touch()
            yield cls(aside)
            try:
                aside.rename(root / name)
            except OSError as error:
                check_free(root, name)  # somebody was faster
                raise _unwritable(root, error) from error
            _fsync_folder(root)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            for folder in made:
                with suppress(OSError):
                    folder.rmdir()
            raise

    @classmethod
    def open(cls, path: Path | str, root: Path = DEFAULT_ROOT) -> RunDirectory:
        """An existing run, by its path or by its name under `root`.

        Raises:
            UserError: there is no run directory there.
        """
        for candidate in (Path(path), root / path):
            run = cls(_absolute(candidate))
            if run.config.is_file():
                return run
        raise _no_such_run(str(path), root)

    @classmethod
    def all(cls, root: Path = DEFAULT_ROOT) -> list[RunDirectory]:
        """Every run under `root`, the oldest first; none where there is no such folder."""
        root = _absolute(root)
        if not root.is_dir():
            return []
        runs = [cls(path) for path in root.iterdir() if not path.name.startswith(".")]
        runs = [run for run in runs if run.config.is_file()]
        return sorted(runs, key=lambda run: (_created(run), run.name))


def check_name(name: str) -> None:
    """Raise a UserError where `name` cannot be the name of a folder that is easy to type."""
    legal = "".join("-" if char in "/\\" or not char.isprintable() else char for char in name)
    legal = legal.lstrip(".-").strip()
    while len(legal.encode()) > _LONGEST_NAME:
        legal = legal[:-1]
    if name and name == legal:
        return
    law = (
        f"names a folder: at most {_LONGEST_NAME} bytes, no slash and no control character, "
        "no dot or dash in front"
    )
    suggestions = (override("run.name", legal),) if legal else ()
    raise UserError(
        "run",
        f"{name!r} cannot name a run",
        [Violation("run.name", name, "", law, suggestions)],
    )


def check_free(root: Path, name: str) -> None:
    """Raise a UserError where a run of that name exists already."""
    root = _absolute(root)
    if not os.path.lexists(root / name):
        return
    resume = (shlex.join(["nanoscale", "resume", str(root / name)]),)
    is_run = RunDirectory(root / name).config.is_file()
    raise UserError(
        "run",
        f"the run {name!r} exists already in {root}",
        [
            Violation(
                "run.name",
                name,
                "",
                "a new run never overwrites an old one",
                (override("run.name", free_name(root, name)), *(resume if is_run else ())),
            )
        ],
    )


def check_root(root: Path) -> None:
    """Raise a UserError where no run can be created under `root`. Writes nothing."""
    root = _absolute(root)
    existing = next(p for p in (root, *root.parents) if os.path.lexists(p))
    if not existing.is_dir():
        raise _unwritable(root, NotADirectoryError(20, f"{existing} is not a directory"))
    problem = write_problem(existing)
    if problem is not None:
        raise _unwritable(root, OSError(0, f"cannot write in {existing}: {problem}"))


def write_problem(folder: Path) -> str | None:
    """Return why nothing can be written in a folder; None if it can.

    It is tried with a file that no one sees: permissions alone do not tell of quotas and file servers.
    """
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".nanoscale-", buffering=0) as file:
            file.write(b"\n")
    except OSError as error:
        return error.strerror or str(error)
    return None


def free_name(root: Path, name: str) -> str:
    """`name`, or the first of name-2, name-3, … that no run under `root` has, no longer than a name may be."""
    root = _absolute(root)
    return next(n for n in _numbered(name) if not os.path.lexists(root / n))


def _numbered(name: str, room: int = 0) -> Iterator[str]:
    """Yield `name`, name-2, name-3, …, and leave `room` bytes for what is put behind it."""
    yield name
    for number in itertools.count(2):
        end = f"-{number}"
        kept = name.encode()[: _LONGEST_NAME - room - len(end)].decode(errors="ignore")
        yield f"{kept}{end}"


def free_names(root: Path, shared: str, count: int) -> str:
    """`shared`, or the first of shared-2, … under which `count` numbered runs and their folder fit."""
    root = _absolute(root)
    ends = [ARRAY, *(f"-{number}" for number in range(count))]
    candidates = _numbered(shared, room=len(f"-{count}"))
    return next(
        one for one in candidates if not any(os.path.lexists(f"{root / one}{end}") for end in ends)
    )


@contextmanager
def taken_back(root: Path) -> Iterator[list[Path]]:
    """Remove the folders that the block lists if it raises, and `root` if it was not there before."""
    made = _missing_parents(_absolute(root))
    folders: list[Path] = []
    try:
        yield folders
    except BaseException:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        for parent in made:
            with suppress(OSError):
                parent.rmdir()
        raise


def write_atomically(path: Path, text: str | bytes, folder: Path | None = None) -> None:
    """Write a file so that readers and a crash see the whole old one or the whole new one.

    It is written beside `path` first, or in `folder`, and renamed.
    """
    data = text.encode() if isinstance(text, str) else text
    aside = (folder or path.parent) / f".{path.name}.{os.getpid()}-{next(_counter)}"
    try:
        with aside.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    _fsync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write one JSON document atomically."""
    write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Read one JSON document.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not JSON.
    """
    return json.loads(path.read_text(encoding="utf-8"))


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))  # noqa: PTH100 - Path.absolute() keeps the "..", resolve() follows links


def _fsync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _missing_parents(root: Path) -> list[Path]:
    return [path for path in (root, *root.parents) if not path.exists()]


@contextmanager
def _explained(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _unwritable(root, error) from error


def _unwritable(root: Path, error: OSError) -> UserError:
    return UserError(
        "run",
        f"no run can be created in {root}: {error.strerror or error}",
        [
            Violation(
                "run.root",
                str(root),
                "",
                "must be a folder that can be written to",
                ("run.root=FOLDER",),
            )
        ],
    )


def _no_such_run(path: str, root: Path) -> UserError:
    names = [run.name for run in RunDirectory.all(root)]
    close = difflib.get_close_matches(Path(path).name, names, n=3)
    where = _absolute(Path(path)) if os.sep in path else _absolute(root / path)
    what = "is not a run directory" if where.exists() else "does not exist"
    return UserError(
        "run",
        f"no run {path!r}: {where} {what}",
        [
            Violation(
                "RUN",
                path,
                "command line",
                "must be a run directory, or the name of one in the folder of runs",
                tuple(map(shlex.quote, close)) or ("nanoscale runs ls",),
            )
        ],
    )


def _created(run: RunDirectory) -> float:
    try:
        created = read_json(run.status)["created"]
        return float(created)
    except (OSError, ValueError, KeyError, TypeError):
        return run.config.stat().st_mtime
