"""The model of `model.init_from`: its folder, and its shape in a configuration."""

import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn

from nanoscale.common.errors import Violation
from nanoscale.config.hf.families import UnsupportedError
from nanoscale.config.hf.hub import asking, is_name, missing_path, similar_paths, why_not
from nanoscale.config.hf.shape import has_own_head, read_shape, require_causal
from nanoscale.config.hf.text_part import HEAD, read_config
from nanoscale.config.schema import Model
from nanoscale.config.values.provenance import Composed
from nanoscale.config.violations import override, refuse, shown

KEY = "model.init_from"
_MODEL_BY_HAND = re.compile(r"\+*model=")
_TRAINING = ("balance", "balance_rate")
"""Keys of MoE that no folder defines: they do not affect the shape of weights."""
_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
"""The files that are downloaded for a model name."""


@dataclass(frozen=True)
class Pretrained:
    """A model to start from."""

    folder: Path
    shape: Model
    file: str = "config.json"
    """The file of the folder that says the shape."""


class NoSuchModelError(Exception):
    """No such folder exists, and no such name can be fetched; the text says why."""


def is_folder(asked: str) -> bool:
    """True if a folder is meant, not a name at the hub."""
    return Path(asked).expanduser().is_dir() or not is_name(asked)


def absolute_name(asked: str) -> str:
    """Return a folder by its absolute path, and a name at the hub unchanged."""
    return str(Path(asked).expanduser().absolute()) if is_folder(asked) else asked


def locate(asked: str, *, weights: bool) -> Path:
    """Return the model's folder; a name is resolved in the hub's cache, or fetched.

    Args:
        asked: a path, or a name such as `Qwen/Qwen3-0.6B`; HF_HOME, HF_HUB_OFFLINE and HF_TOKEN apply.
        weights: True if they are needed too, not only config.json.

    Raises:
        NoSuchModelError: it is neither here nor at the hub.
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
                found = snapshot_download(asked, allow_patterns=_FILES, local_files_only=cache_only)
                return Path(found)
            found = hf_hub_download(asked, "config.json", local_files_only=cache_only)
            return Path(found).parent
        except Exception as error:  # errors of the network, the hub and the file system
            what = f"is not a local folder, and the hub cannot provide it: {why_not(error)}"
            raise NoSuchModelError(what) from error


def refuse_model(composed: Composed, key: str, asked: str | None, error: Exception) -> NoReturn:
    """Raise a UserError for the key that names a model, with folders of similar names to type."""
    similar = similar_paths(asked) if asked and isinstance(error, NoSuchModelError) else []
    instead = tuple(override(key, path) for path in similar)
    if asked and isinstance(error, UnsupportedError) and _has_hf_code(asked):
        instead = (f"model=hf {override('model.name', asked)}",)
    refuse([Violation(key, asked, composed.source(key), str(error), instead)], kind="model")


def _has_hf_code(asked: str) -> bool:
    """True if model=hf can train a model of an unsupported family."""
    try:
        require_causal(read_config(locate(asked, weights=False)))
    except (NoSuchModelError, UnsupportedError):
        return False
    return True


def read(composed: Composed) -> Pretrained:
    """Read the model that `model.init_from` names.

    Raises:
        UserError: it names nothing, or a model of another family.
    """
    asked = composed.config.model.init_from
    assert asked is not None
    try:
        folder = locate(asked, weights=False)
        shape = read_shape(folder)
        if not is_folder(asked):  # the cache's folder is named after a commit
            shape = replace(shape, name=asked.rpartition("/")[2])
        return Pretrained(folder, shape)
    except (NoSuchModelError, UnsupportedError) as error:
        refuse_model(composed, KEY, asked, error)


def take_shape(composed: Composed, model: Pretrained) -> dict[str, Any]:
    """Return the values of the model's keys: the folder's, except for keys that may differ.

    Raises:
        UserError: with every key that was set and differs from the folder's.
    """
    asked, loaded = composed.config.model, model.shape
    values: dict[str, Any] = {}
    violations = []
    for name in (field.name for field in fields(Model) if field.name != "init_from"):
        wanted, given = getattr(asked, name), getattr(loaded, name)
        if name in _TRAINING and loaded.experts:
            given = wanted
        values[name] = given
        if wanted == given or not _is_set(composed, name):
            continue
        if _is_free(name, wanted, loaded):
            values[name] = wanted
        else:
            violations.append(_conflict(composed, model, name, wanted, given))
    if violations:
        refuse(violations, kind="model")
    return values


def _is_set(composed: Composed, name: str) -> bool:
    """True if a key was set with at least the precedence of `model.init_from`.

    A folder of the command line replaces a recipe's model, as a model of the command line does.
    """
    was_set = composed.asked_for
    if composed.by_hand(KEY) and not any(map(_MODEL_BY_HAND.match, composed.words)):
        was_set = composed.by_hand
    return any(map(was_set, composed.within(f"model.{name}")))


def _is_free(name: str, wanted: Any, loaded: Model) -> bool:
    """True if the weights fit another value too. An untied head starts as a copy of the tied embedding."""
    if name in ("kv_heads", "head_dim"):
        return wanted is None
    if name == "max_seq_len":
        return loaded.position == "rope"
    return name in ("name", "init_std") or (name == "tie_embeddings" and not wanted)


def _conflict(composed: Composed, base: Pretrained, name: str, asked: Any, given: Any) -> Violation:
    key, folder = f"model.{name}", base.folder
    source = composed.source(composed.within(key)[-1])
    is_section = hasattr(given or asked, "__dataclass_fields__")
    value, other = ("…", "otherwise") if is_section else (asked, shown(given))
    message = f"is {other} in {folder / base.file}, from which {KEY} takes the shape"
    if name == "tie_embeddings" and has_own_head(folder):
        message = f"is not possible: in {folder} the embedding and the head ({HEAD}) have different values"
    by_hand = composed.by_hand(key) and not is_section
    return Violation(key, value, source, message, (override(key, given) if by_hand else "~model",))
