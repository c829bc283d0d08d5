"""Checkpoints in memory, as ranks, agents and the launcher know them. Imports no torch."""

import json
import mmap
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nanoscale.common.json_text import Json, parse
from nanoscale.processes.lifeline import MEMORY
from nanoscale.processes.peer_files import COMMITTED

_SUM_BYTES = 32
_NUMBERS = ("attempt", "count", "node", "nodes", "rank", "ranks", "step")
_MOST = 10**10
"""The largest believed number of them, and of samples."""
ORDER = "order"
"""The file in the agent's folder with its `MemoryOrder`."""

LESS_SHARED_MEMORY = (
    "or keep less there: optimizer.moments_dtype=bf16, or checkpoint.memory_every=0 (a larger interval "
    "needs as much)"
)


@dataclass(frozen=True)
class MemoryPeer:
    """A host that keeps copies of another one's ranks."""

    host: str
    address: str
    port: int
    """The port of its server; 0: a job on one host has none."""


@dataclass(frozen=True)
class MemorySource:
    """A complete state in memory from which an attempt continues."""

    attempt: int
    count: int
    """The number of the save in that attempt, from 0."""
    step: int
    peers: tuple[MemoryPeer, ...]
    """The hosts that hold parts of it."""
    folder: str | None = None
    """The folder of parts that agents have copied to the disk; None: there is none."""


@dataclass(frozen=True)
class MemoryOrder:
    """An agent's order to the ranks of its host."""

    folder: str
    key: str
    """The key of the job's servers, in hexadecimal digits."""
    attempt: int
    node: int
    """The number of this host in the attempt."""
    nodes: int
    ranks: int
    """The number of ranks of this host."""
    peer: MemoryPeer | None
    """The host to which copies go; None: there is no other one."""
    source: MemorySource | None
    """The state to continue from; None: the newest checkpoint on disk."""


def write_order(order: MemoryOrder) -> None:
    path = Path(order.folder) / ORDER
    path.touch(0o600)
    path.write_text(json.dumps(asdict(order)), "utf-8")


def read_order() -> MemoryOrder | None:
    """Return the order for this rank; None if it has no agent that keeps checkpoints in memory."""
    folder = os.environ.get(MEMORY)
    if folder is None or not (Path(folder) / ORDER).is_file():
        return None
    content = json.loads((Path(folder) / ORDER).read_text("utf-8"))
    content |= {"peer": peer_of(content["peer"]), "source": source_of(content["source"])}
    return MemoryOrder(**content)


def peer_of(content: Json | None) -> MemoryPeer | None:
    """Return a peer from JSON."""
    return None if content is None else MemoryPeer(**content)


def source_of(content: Json | None) -> MemorySource | None:
    """Return a source from JSON."""
    if content is None:
        return None
    return MemorySource(**{**content, "peers": tuple(MemoryPeer(**it) for it in content["peers"])})


def file_name(order: MemoryOrder, rank: int, slot: int) -> str:
    """Return the name of a file of a rank's tensors."""
    return f"{order.attempt}-{order.node}-{rank}-{slot}.data"


def checked_files(folder: Path) -> tuple[list[Json], list[str]]:
    """Return what is known of the ranks' files in a folder, and a sentence for each that has changed.

    Every byte is compared with its sum.
    """
    with ThreadPoolExecutor() as threads:
        checked = [*threads.map(_check, sorted(folder.glob(f"*{COMMITTED}")))]
    damaged = [it for it in checked if isinstance(it, str)]
    return [it for it in checked if isinstance(it, dict) and it], damaged


def committed_in(folder: Path) -> Iterator[tuple[Path, Json]]:
    """Yield the indexes of ranks' files in a folder, and what each says; damaged ones are left out."""
    for path in folder.glob(f"*{COMMITTED}"):
        with suppress(OSError, ValueError):
            yield path, read_index(read_regular(path))


def index_with_sum(text: str) -> bytes:
    """Return the content of an index, a JSON text, with the sum of all its bytes at its end."""
    content = text.encode()
    return content + _sum(content)


def read_index(content: bytes) -> Json:
    """Return what an index says. Raises a ValueError if its bytes differ from their sum."""
    text, stored_sum = content[:-_SUM_BYTES], content[-_SUM_BYTES:]
    if _sum(text) != stored_sum:
        raise ValueError("its bytes differ from their sum")
    document: Json = parse(text)
    return document


def read_regular(path: Path) -> bytes:
    """Return the content of a file. Raises an OSError for a FIFO, which would be waited for, or a device."""
    require_regular(path)
    return path.read_bytes()


def require_regular(path: Path) -> None:
    """Raise an OSError unless this is a regular file."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is not a regular file")


def _require_form(about: Json) -> None:
    """Raise a ValueError if an index lacks what a resume needs, or has numbers that no job has."""
    manifest = about["manifest"]
    numbers = {it: about[it] for it in _NUMBERS} | {"samples": manifest["consumed_samples"]}
    for name, value in numbers.items():
        if type(value) is not int or not 0 <= value <= _MOST:
            raise ValueError(f"`{name}` is {str(value)[:40]!r}, not a number up to {_MOST:,}")
    if manifest["step"] != about["step"] or not isinstance(manifest["data"], str):
        raise ValueError("its manifest is of another form than expected")
    if Path(about["file"]).name != about["file"]:
        raise ValueError("it names a file elsewhere")


def _sum(content: bytes | memoryview) -> bytes:
    import xxhash

    return xxhash.xxh3_128_hexdigest(content).encode()


def _check(path: Path) -> Json | str:
    """Return what a rank's file is, or a sentence if it cannot be used; nothing if it was removed."""
    try:
        return _checked(path)
    except FileNotFoundError:  # a rank has just removed it
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{path.name} cannot be read: {error}"


def _checked(path: Path) -> Json | str:
    about = read_index(read_regular(path))
    _require_form(about)
    del about["tensors"], about["manifest"]
    data: Any = b""
    if about["bytes"]:
        require_regular(path.parent / about["file"])
        with (path.parent / about["file"]).open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    content = memoryview(data)[: about["bytes"]]
    if len(content) < about["bytes"] or _sum(content) != about["sum"].encode():
        return f"rank {about['rank']} of step {about['step']}: the bytes in memory differ from their sum"
    return about
