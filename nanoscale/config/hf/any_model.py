"""The source `model=hf`: a language model with transformers' code, described by its config.json.

The configuration holds the whole config.json, so that a run no longer needs the file, and in addition the
sizes that the rules and the tables need. Nothing here imports transformers: another process checks, before a
launch, whether it supports the model.
"""

from collections.abc import Iterator
from dataclasses import fields

from nanoscale.common.errors import Violation
from nanoscale.common.json_text import Json
from nanoscale.config import reference
from nanoscale.config.hf import pretrained
from nanoscale.config.hf.families import UnsupportedError
from nanoscale.config.hf.pretrained import NoSuchModelError, locate, refuse_model
from nanoscale.config.hf.shape import as_classifier, require_causal
from nanoscale.config.hf.text_part import read_config
from nanoscale.config.schema import Model
from nanoscale.config.values.provenance import Composed
from nanoscale.config.violations import override, refuse, shown

KEY = "model.name"

_NAMES = {
    "layers": "layers_block_type num_hidden_layers n_layer n_layers num_layers",
    "hidden": "hidden_size n_embd d_model",
    "heads": "num_attention_heads n_head n_heads num_heads",
    "kv_heads": "num_key_value_heads num_kv_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size n_inner ffn_dim ffn_hidden_size",
    "vocab": "vocab_size",
    "max_seq_len": "max_position_embeddings n_positions max_seq_len n_ctx",
}
SIZES = {key: names.split() for key, names in _NAMES.items()}
"""Our keys, and their names in config.json."""
_OWN_WORDS = [
    "source",
    "name",
    "init_from",
    "trust_remote_code",
    "hf_config",
    "parameters",
    "kept_tensors",
]
"""Keys of the model that have a meaning here."""


def take(composed: Composed, *, frozen: bool) -> tuple[str, Json]:
    """Return the source of the shape, and the values of the model's keys.

    Args:
        frozen: True for the configuration of a run, which holds config.json already.

    Raises:
        UserError: there is no such model, it does not predict the next token, or it contradicts keys that were
            set in addition.
    """
    model = composed.config.model
    name = model.name or model.init_from or ""
    try:
        source, document = composed.source("model.hf_config"), model.hf_config
        if not frozen:
            if not name:
                what = "model=hf needs a folder, or a name at Hugging Face: model.name=…"
                raise NoSuchModelError(what)
            folder = locate(name, weights=False)
            source = str(folder / "config.json")
            document = reference.merged(read_config(folder), document)
        if composed.config.train.objective == "classify":
            document = as_classifier(document, composed.config.train.labels or 2)
        require_causal(document, or_masked=True)
        document = {name: it for name, it in document.items() if name != "quantization_config"}
    except (NoSuchModelError, UnsupportedError) as error:
        refuse_model(composed, KEY if model.name else pretrained.KEY, name, error)
    known = sizes(document)
    values = {name: getattr(Model(), name) for name in _shape_keys()}
    values |= _sizes(composed, known, kept=frozen)
    if violations := list(_conflicts(composed, values, known, document, source)):
        refuse(violations, kind="model")
    return source, values | {"hf_config": document, "name": name}


def sizes(document: Json) -> Json:
    """Return our keys that config.json defines."""
    values = {}
    for key, names in SIZES.items():
        counts = [len(it) if isinstance(it, list) else it for it in map(document.get, names)]
        numbers = [it for it in counts if type(it) is int]
        if numbers and numbers[0] > 0:
            values[key] = numbers[0]
    if isinstance(document.get("tie_word_embeddings"), bool):
        values["tie_embeddings"] = document["tie_word_embeddings"]
    return values


def _shape_keys() -> list[str]:
    return [field.name for field in fields(Model) if field.name not in _OWN_WORDS]


def _sizes(composed: Composed, known: Json, *, kept: bool) -> Json:
    """Return the sizes from config.json, else values that were set or that a run has `kept`, else the least."""
    model = composed.config.model
    least = {"layers": 1, "hidden": 1, "heads": 1, "ffn": 1}
    configured = {name: getattr(model, name) for name in SIZES if kept or _is_set(composed, name)}
    if "vocab" not in known and "vocab" not in configured:
        message = (
            "config.json has no vocab_size: set the number of rows of its embedding, model.vocab=…"
        )
        composed.refuse(KEY, message, kind="model")
    return least | {"max_seq_len": composed.config.train.seq_len} | configured | known


def _conflicts(
    composed: Composed, values: Json, known: Json, document: Json, source: str
) -> Iterator[Violation]:
    """Yield keys that were set, but differ from config.json or mean nothing here."""
    for name in _shape_keys():
        wanted, given = getattr(composed.config.model, name), values[name]
        if wanted == given or wanted is None or not _is_set(composed, name):
            continue
        key, instead = f"model.{name}", tuple[str, ...]()
        if name in known:
            message = f"is {shown(given)} in {source}"
            names = SIZES.get(name, ("tie_word_embeddings",))
            within = next(it for it in names if it in document)
            instead = (override(key, given),)
            if not isinstance(document[within], list):
                instead += (override(f"model.hf_config.{within}", wanted),)
        else:
            message = "shapes nanoscale's own transformer, and model=hf would ignore it"
        shown_value = wanted if key in reference.declared() else "…"
        source_of_key = composed.source(composed.within(key)[-1])
        yield Violation(key, shown_value, source_of_key, message, instead)


def _is_set(composed: Composed, name: str) -> bool:
    """True if a key was set with at least the precedence of the choice of the model.

    A model named on the command line replaces a recipe's shape.
    """
    chosen_by_hand = composed.by_hand(KEY) or "model=hf" in composed.words
    was_set = composed.by_hand if chosen_by_hand else composed.asked_for
    return any(map(was_set, composed.within(f"model.{name}")))
