"""The run directory: the paths of a run's files, and atomic writing of them."""

from __future__ import annotations

import difflib
import errno
import hashlib
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
from typing import Any, Literal, TextIO

from nanoscale.common.errors import UserError, Violation
from nanoscale.common.json_text import parse
from nanoscale.config.values.forms import LONGEST, RULE, legal_name
from nanoscale.config.violations import override

Stream = Literal["out", "err"]
STREAMS: tuple[Stream, ...] = ("out", "err")

DEFAULT_ROOT = Path("runs")
ARRAY = ".array"
"""The ending of the name of the folder that runs of an array share."""
SIGNATURE = "signature"
_CHECKPOINT = re.compile(r"step-(\d{8,})")
_ATTEMPT = re.compile(r"attempt-(\d+)")


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def checkpoint_folders(folder: Path) -> list[tuple[int, Path]]:
    """List the published checkpoints of a folder with their steps, in order, without checking them."""
    matches = ((_CHECKPOINT.fullmatch(path.name), path) for path in folder.glob("step-*"))
    return sorted((int(match[1]), path) for match, path in matches if match and path.is_dir())


class _Entry:
    """A file or folder of a run directory, as a path."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDirectory, _: object = None) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunDirectory:
    """One run's folder; `path` is absolute."""

    path: Path

    config = _Entry("config.yaml")
    deepspeed = _Entry("deepspeed.json")
    provenance = _Entry("provenance.json")
    plan = _Entry("plan.json")
    program = _Entry("program.json")
    launch = _Entry("launch.json")
    environment = _Entry("environment.json")
    status = _Entry("status.json")
    references = _Entry("references.npz")
    """The log-likelihoods of pairs of answers by the initial weights; see train/teacher.py."""
    teacher = _Entry("teacher")
    """The most likely tokens of `train.teacher`; see train/teacher.py."""
    metrics = _Entry("metrics.jsonl")
    statistics = _Entry("statistics.jsonl")
    """The statistics of each layer at some steps; see train/layer_statistics.py."""
    metrics_csv = _Entry("metrics.csv")
    tags = _Entry("tags.json")
    """The tags that replace run.tags; see changes.py."""
    trackers = _Entry("trackers.json")
    events = _Entry("events.jsonl")
    submission = _Entry("slurm.json")
    script = _Entry("submit.sbatch")
    failure = _Entry("failure.json")
    question = _Entry("positions.request")
    """The request of `runs explain`, which the launcher removes and answers with `positions`."""
    positions = _Entry("positions.json")
    task = _Entry("task.json")
    """The task of such a job in addition to the configuration."""
    result = _Entry("result.json")
    """The result of a job that is not a training and belongs to no run."""
    lock = _Entry("lock")
    signature = _Entry(SIGNATURE)
    """The signature by which a user's own launches recognize the run; see trust.py."""
    logs = _Entry("logs")
    checkpoints = _Entry("checkpoints")
    latest = _Entry("checkpoints/latest")
    memory = _Entry("memory")
    """Checkpoints in memory that agents have copied to the disk when they exited."""
    profile = _Entry("profile")
    """Traces of the steps that `profile.steps` selects."""
    report = _Entry("report.html")

    @property
    def name(self) -> str:
        return self.path.name

    def workspace(self, attempt: int) -> Path:
        """Return the folder in which an attempt prepares its changes of `checkpoints/`; see fence.py."""
        return self.checkpoints / f".attempt-{attempt}"

    @property
    def reference(self) -> str:
        """The shortest argument for this run in the current folder."""
        if self.path.parent == _absolute(DEFAULT_ROOT):
            return self.name
        here = _absolute(Path())
        return str(self.path.relative_to(here) if self.path.is_relative_to(here) else self.path)

    def checkpoint(self, step: int) -> Path:
        return checkpoint_path(self.checkpoints, step)

    def checkpoint_steps(self) -> list[int]:
        """List the steps of published checkpoints, in order, without checking them."""
        return [step for step, _ in checkpoint_folders(self.checkpoints)]

    def last_attempt(self) -> int:
        """Return the number of the newest attempt that has logs; 0 before the first."""
        matches = (_ATTEMPT.fullmatch(path.name) for path in self.logs.glob("attempt-*"))
        return max((int(match[1]) for match in matches if match), default=0)

    def attempt_config(self, attempt: int) -> Path:
        """Return the copy of an earlier attempt's configuration that a later one changed."""
        return self.path / f"config.attempt-{attempt}.yaml"

    def attempt_logs(self, attempt: int) -> Path:
        return self.logs / f"attempt-{attempt}"

    def log(self, attempt: int, host: str, rank: int, stream: Stream) -> Path:
        """Return the log of a rank's output in an attempt; `rank` is the global one."""
        return self.attempt_logs(attempt) / f"{host}.rank-{rank}.{stream}"

    def log_files(self, attempt: int | None, rank: int | None, stream: Stream | None) -> list[Path]:
        """List the log files of an attempt, the last if None, by rank, then host, then stream."""
        attempt = self.last_attempt() if attempt is None else attempt
        files = []
        for path in self.attempt_logs(attempt).glob("*.rank-*"):
            who, _, kind = path.name.rpartition(".")
            host, _, number = who.rpartition(".rank-")
            wanted = kind in STREAMS and stream in (None, kind)
            if wanted and number.isdecimal() and rank in (None, int(number)):
                files.append((int(number), host, kind != "out", path))
        return [path for *_, path in sorted(files)]

    def agent_log(self, attempt: int, host: str) -> Path:
        return self.attempt_logs(attempt) / f"{host}.agent.log"

    def rank_failure(self, attempt: int, host: str, rank: int) -> Path:
        """Return the file in which a rank reports its failure."""
        return self.attempt_logs(attempt) / f"{host}.rank-{rank}.failure.json"

    @classmethod
    @contextmanager
    def build(cls, root: Path, name: str) -> Iterator[RunDirectory]:
        """Fill the folder of a new run in a temporary place; it gets its name when the block succeeds.

        If the block raises, nothing remains, including a root that did not exist before.

        Raises:
            UserError: the name is used or invalid, or the root cannot be written to.
        """
        root = _absolute(root)
        check_name(name)
        check_free(root, name)
        temporary = root / f".{name}.{uuid.uuid4().hex[:8]}"
        with removed_on_error(root) as folders:
            folders.append(temporary)
            try:
                root.mkdir(parents=True, exist_ok=True)
                temporary.mkdir()
                (temporary / "logs").mkdir()
                (temporary / "checkpoints").mkdir()
                (temporary / "lock").touch()
            except OSError as error:
                raise _unwritable(root, error) from error
            yield cls(temporary)
            try:
                temporary.rename(root / name)
            except OSError as error:
                check_free(root, name, is_running=True)  # another process was faster
                raise _unwritable(root, error) from error
            sync_folder(root)

    @classmethod
    def open(cls, path: Path | str, root: Path = DEFAULT_ROOT) -> RunDirectory:
        """Open an existing run, by its path or by its name under `root`.

        Raises:
            UserError: there is no run directory.
        """
        for candidate in (Path(path), root / path):
            run = cls(_absolute(candidate))
            if run.config.is_file():
                return run
        raise _no_such_run(str(path), root)

    @classmethod
    def all(cls, root: Path = DEFAULT_ROOT) -> list[RunDirectory]:
        """List every run under `root`, the oldest first; empty if there is no such folder."""
        root = _absolute(root)
        if not root.is_dir():
            return []
        runs = [cls(path) for path in root.iterdir() if not path.name.startswith(".")]
        runs = [run for run in runs if _is_run(run)]
        return sorted(runs, key=lambda run: (_created(run), run.name))


def check_name(name: str) -> None:
    """Raise a UserError if `name` cannot be the name of a folder that is easy to type."""
    legal = legal_name(name)
    if name and name == legal:
        return
    suggestions = (override("run.name", legal),) if legal else ()
    violation = Violation("run.name", name, "", RULE, suggestions)
    raise UserError("run", f"{name!r} cannot name a run", [violation])


def check_free(root: Path, name: str, *, is_running: bool = False) -> None:
    """Raise a UserError if a run of that name exists already; `is_running` decides the advice."""
    root = _absolute(root)
    if not os.path.lexists(root / name):
        return
    run = RunDirectory(root / name)
    resume = "submit --resume" if run.submission.exists() else "resume"
    verbs = ["runs watch", "runs stop"] if is_running else [resume] * run.config.is_file()
    commands = (f"nanoscale {verb} {shlex.quote(str(run.path))}" for verb in verbs)
    suggestions = (override("run.name", free_name(root, name)), *commands)
    rule = f"a new run never overwrites {'a running' if is_running else 'an old'} one"
    violation = Violation("run.name", name, "", rule, suggestions)
    raise UserError("run", f"the run {name!r} exists already in {root}", [violation])


def check_root(root: Path) -> None:
    """Raise a UserError if no run can be created under `root`. Writes nothing."""
    root = _absolute(root)
    existing = next(path for path in (root, *root.parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise _unwritable(root, NotADirectoryError(20, f"{existing} is not a directory"))
    problem = write_problem(existing)
    if problem is not None:
        raise _unwritable(root, OSError(0, f"cannot write in {existing}: {problem}"))


def write_problem(folder: Path) -> str | None:
    """Return why a folder is not writable; None if it is.

    It writes a hidden file: permissions alone do not show quotas and problems of file servers.
    """
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".nanoscale-", buffering=0) as file:
            file.write(b"\n")
    except OSError as error:
        return error.strerror or str(error)
    return None


def free_name(root: Path, name: str) -> str:
    """Return `name`, or the first of name-2, name-3, … that no run under `root` has, within the longest
    name."""
    root = _absolute(root)
    return next(candidate for candidate in _numbered(name) if not os.path.lexists(root / candidate))


def _numbered(name: str, suffix_bytes: int = 0) -> Iterator[str]:
    """Yield `name`, name-2, name-3, …, and leave `suffix_bytes` bytes for a suffix."""
    yield name
    for number in itertools.count(2):
        end = f"-{number}"
        shortened = name.encode()[: LONGEST - suffix_bytes - len(end)].decode(errors="ignore")
        yield f"{shortened}{end}"


def path_of_damaged(path: Path) -> Path:
    """Return a free name next to `path` for its damaged content."""
    names = _numbered(f"damaged-{path.name}")
    return next(free for name in names if not (free := path.with_name(name)).exists())


def free_names(root: Path, shared: str, count: int) -> str:
    """Return `shared`, or the first of shared-2, … under which `count` numbered runs and their folder fit."""
    root = _absolute(root)
    suffixes = [ARRAY, *(f"-{number}" for number in range(count))]
    candidates = _numbered(shared, suffix_bytes=len(f"-{count}"))
    return next(
        candidate
        for candidate in candidates
        if not any(os.path.lexists(f"{root / candidate}{end}") for end in suffixes)
    )


@contextmanager
def removed_on_error(root: Path) -> Iterator[list[Path]]:
    """Remove the folders that the block lists if it raises, and `root` if it did not exist before."""
    root = _absolute(root)
    created = [path for path in (root, *root.parents) if not path.exists()]
    folders: list[Path] = []
    try:
        yield folders
    except BaseException:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        for parent in created:
            with suppress(OSError):
                parent.rmdir()
        raise


def write_atomically(
    path: Path, text: str | bytes, folder: Path | None = None, *, durable: bool = True
) -> None:
    """Write a file so that readers and a crash see either the whole old one or the whole new one.

    It is written next to `path` first, or in `folder`, and renamed. If it is not `durable`, it may be lost by a
    crash, and waits for no disk that is busy or hangs.
    """
    data = text.encode() if isinstance(text, str) else text
    temporary = (folder or path.parent) / f".{path.name}.{uuid.uuid4().hex[:8]}"
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def no_follow(path: str | Path, flags: int) -> int:
    """Open a file of a run folder, and no link: in a stranger's folder it could lead to any file of the user.

    Raises:
        OSError: it is a link, among others.
    """
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def open_to_append(path: Path, newline: str | None = None) -> TextIO:
    """Open a text file of a run folder to append to it. Errors as of `no_follow`."""
    handle = no_follow(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    return os.fdopen(handle, "a", encoding="utf-8", newline=newline)


def sync_folder(folder: Path) -> None:
    """Make renames within a folder durable, where the file system can."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(handle)


def file_sum(path: Path) -> str:
    """Return the XXH3-128 sum of a file."""
    import xxhash

    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    text = f"{json.dumps(value, indent=2, ensure_ascii=False)}\n"
    write_atomically(path, text, durable=durable)


def read_json(path: Path) -> Any:
    """Read one JSON document.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not JSON.
    """
    return parse(path.read_text("utf-8"))


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))  # noqa: PTH100 - Path.absolute() keeps the "..", resolve() follows links


def _unwritable(root: Path, error: OSError) -> UserError:
    rule, suggestions = "must be a folder that can be written to", ("run.root=FOLDER",)
    violation = Violation("run.root", str(root), "", rule, suggestions)
    message = f"no run can be created in {root}: {error.strerror or error}"
    return UserError("run", message, [violation])


def _no_such_run(path: str, root: Path) -> UserError:
    names = [run.name for run in RunDirectory.all(root)]
    close = difflib.get_close_matches(Path(path).name, names, n=3)
    path_tried = _absolute(Path(path)) if os.sep in path else _absolute(root / path)
    what = "is not a run directory" if path_tried.exists() else "does not exist"
    suggestions = tuple(map(shlex.quote, close)) or ("nanoscale runs ls",)
    rule = "must be a run directory, or the name of one in the folder of runs"
    violation = Violation("RUN", path, "command line", rule, suggestions)
    return UserError("run", f"no run {path!r}: {path_tried} {what}", [violation])


def _is_run(run: RunDirectory) -> bool:
    """True for a run, and for a folder that this user may not look into: it may be one."""
    try:
        return run.config.is_file()
    except OSError:
        return True


def _created(run: RunDirectory) -> float:
    with suppress(OSError, ValueError, KeyError, TypeError):
        return float(read_json(run.status)["created"])
    with suppress(OSError):
        return run.config.stat().st_mtime
    return run.path.lstat().st_mtime
