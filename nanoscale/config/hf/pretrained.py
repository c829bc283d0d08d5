"""`model.init_from`: where the folder of a Hugging Face model is, and how its shape enters a configuration."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from nanoscale.common.errors import Violation
from nanoscale.config.hf.hub import asking, is_name, missing_path, similar_paths, why_not
from nanoscale.config.hf.shape import (
    HEAD,
    UnsupportedError,
    has_own_head,
    read_config,
    read_shape,
    require_causal,
)
from nanoscale.config.schema import Model
from nanoscale.config.violations import override, refuse, shown

if TYPE_CHECKING:
    from nanoscale.config.values.composed import Composed

KEY = "model.init_from"
_MODEL_BY_HAND = re.compile(r"\+*model=")
_TRAINING = ("balance", "balance_rate")
"""keys of a mixture of experts that no folder speaks of: they shape no weight"""
_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""what is fetched of a model by its name"""


@dataclass(frozen=True)
class Pretrained:
    """A model to begin with."""

    folder: Path
    shape: Model


class NoSuchModelError(Exception):
    """There is no such folder, and no such name can be had; the text says why."""


def is_folder(asked: str) -> bool:
    """Whether a folder is meant, not a name at the hub."""
    return Path(asked).expanduser().is_dir() or not is_name(asked)


def absolute_name(asked: str) -> str:
    """A folder by a path that means the same everywhere; a name at the hub as it is."""
    return str(Path(asked).expanduser().absolute()) if is_folder(asked) else asked


def locate(asked: str, *, weights: bool) -> Path:
    """The folder; what a name stands for is taken from the hub's cache, or fetched.

    Args:
        asked: a path, or a name such as `Qwen/Qwen3-0.6B`; HF_HOME, HF_HUB_OFFLINE and HF_TOKEN hold.
        weights: whether they are wanted too, or config.json alone.

    Raises:
        NoSuchModelError: it is neither here nor there.
    """
    path = Path(asked).expanduser()
    if path.is_dir():
        return path.absolute()
    if (why := missing_path(asked)) is not None:
        raise NoSuchModelError(why)
    with asking(asked) as cache_only:
        from huggingface_hub import hf_hub_download, snapshot_download

        try:
            if weights:
                patterns = list(_FILES)
                found = snapshot_download(
                    asked, allow_patterns=patterns, local_files_only=cache_only
                )
                return Path(found)
            found = hf_hub_download(asked, "config.json", local_files_only=cache_only)
            return Path(found).parent
        except Exception as error:  # the network's, the hub's, the file system's
            what = f"is no folder here, and the hub does not give it: {why_not(error)}"
            raise NoSuchModelError(what) from error


def refuse_model(composed: Composed, key: str, asked: str | None, error: Exception) -> NoReturn:
    """Raise a UserError for the key that names a model, with folders of similar names to type."""
    similar = similar_paths(asked) if asked and isinstance(error, NoSuchModelError) else []
    instead = tuple(override(key, path) for path in similar)
    if asked and isinstance(error, UnsupportedError) and _has_hf_code(asked):
        instead = (f"model=hf {override('model.name', asked)}",)
    refuse([Violation(key, asked, composed.source(key), str(error), instead)], kind="model")


def _has_hf_code(asked: str) -> bool:
    """Whether a model of another family is one that model=hf trains."""
    try:
        require_causal(read_config(locate(asked, weights=False)))
    except (NoSuchModelError, UnsupportedError):
        return False
    return True


def read(composed: Composed) -> Pretrained:
    """What `model.init_from` names.

    Raises:
        UserError: it names nothing, or a model of another family.
    """
    asked = composed.config.model.init_from
    assert asked is not None
    try:
        folder = locate(asked, weights=False)
        shape = read_shape(folder)
        if not is_folder(asked):  # the cache's folder has the name of a commit
            shape = replace(shape, name=asked.rpartition("/")[2])
        return Pretrained(folder, shape)
    except (NoSuchModelError, UnsupportedError) as error:
        refuse_model(composed, KEY, asked, error)


def take_shape(composed: Composed, found: Pretrained) -> dict[str, Any]:
    """The values of the model's keys: those of the folder, but for what may be said beside it.

    Raises:
        UserError: with every key that was said and is not the folder's.
    """
    asked, theirs = composed.config.model, found.shape
    values: dict[str, Any] = {}
    violations = []
    for name in (field.name for field in fields(Model) if field.name != "init_from"):
        mine, given = getattr(asked, name), getattr(theirs, name)
        if name in _TRAINING and theirs.experts:
            given = mine
        values[name] = given
        if mine == given or not _said(composed, name):
            continue
        if _is_free(name, mine, theirs):
            values[name] = mine
        else:
            violations.append(_conflict(composed, found.folder, name, mine, given))
    if violations:
        refuse(violations, kind="model")
    return values


def _said(composed: Composed, name: str) -> bool:
    """Whether somebody set a key who ranks no lower than whoever set `model.init_from`.

    A recipe's model gives way to a command line's folder, as it does to a command line's model.
    """
    said = composed.asked_for
    if composed.by_hand(KEY) and not any(map(_MODEL_BY_HAND.match, composed.words)):
        said = composed.by_hand
    keys = [key for key in composed.history if f"{key}.".startswith(f"model.{name}.")]
    return any(map(said, keys))


def _is_free(name: str, mine: Any, theirs: Model) -> bool:
    """What the weights fit all the same. A head of its own begins as the embedding that it was tied to."""
    if name in ("kv_heads", "head_dim"):
        return mine is None
    if name == "max_seq_len":
        return theirs.position == "rope"
    return name in ("name", "init_std") or (name == "tie_embeddings" and not mine)


def _conflict(composed: Composed, folder: Path, name: str, mine: Any, given: Any) -> Violation:
    key = f"model.{name}"
    source = next(
        composed.source(k) for k in reversed(composed.history) if f"{k}.".startswith(f"{key}.")
    )
    is_section = hasattr(given or mine, "__dataclass_fields__")
    value, other = ("…", "otherwise") if is_section else (mine, shown(given))
    message = f"is {other} in {folder}/config.json, which {KEY} takes the shape from"
    if name == "tie_embeddings" and has_own_head(folder):
        message = (
            f"is not possible: {folder} holds an embedding and a head of other values ({HEAD})"
        )
    by_hand = composed.by_hand(key) and not is_section
    return Violation(key, value, source, message, (override(key, given) if by_hand else "~model",))
