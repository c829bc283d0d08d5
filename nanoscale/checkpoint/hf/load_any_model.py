"""The files of a transformers model, compared with the model that transformers builds.

`python -m nanoscale.checkpoint.hf.load_any_model < request.json` answers whether it can be trained, in a
process of its own: the launcher calls it, since it never imports torch itself. A request is the keys of
`model` and the `folder` of its weights or null; the answer, the last line, is the `problem` or null, whether
it is one `of` the files or of the model, and the numbers of `parameters` and of `kept_tensors`.
"""

import json
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoscale.checkpoint.hf.conversions import RecordedTensor, converted, file_tensors
from nanoscale.checkpoint.hf.load import boxes, count_kept, differing_shapes, refuse_all, unreadable
from nanoscale.checkpoint.hf.load import load as load_own
from nanoscale.checkpoint.hf.names import is_buffer
from nanoscale.config.hf.safetensors_headers import BadFileError, Shapes, Stored, are_equal
from nanoscale.config.objectives import CLASSIFIER, made_for
from nanoscale.config.schema import Model
from nanoscale.models import hf_attention
from nanoscale.models.hf_model import (
    PREFIX,
    blocks,
    build,
    count_parameters,
    named_tensors,
    require_experts,
    require_stages,
    tied_parameters,
    tp_styles,
)
from nanoscale.models.lora import linear_layers

_MESSAGE_CHARACTERS = 300
"""The most characters of another program's message."""


def find(folder: Path, model: Any) -> dict[str, RecordedTensor]:
    """Locate each parameter and persistent buffer of transformers' model, by its name there.

    Raises:
        BadFileError: files or tensors are missing, of other shapes, converted by transformers in a way that
            is not computed here, or more than the model has.
    """
    stored, unknown, tied = _match_names(folder, model, ExitStack())
    needed = {name: tuple(value.shape) for name, value in named_tensors(model)}
    missing = [name for name in needed if name not in stored]
    problems = [f"{name} is missing" for name in missing if not is_head(name, model)]
    problems += _differences(stored, needed)
    problems += [f"{name} is not one of its parameters" for name in unknown]
    problems += [
        f"{tensor.name} differs from {stored[name].sources[0].name}, to which its config.json ties it: "
        f"transformers ties only equal tensors; model.hf_config.tie_word_embeddings=false trains both"
        for name, tensor in tied
        if not are_equal(tensor, stored[name].sources[0])
    ]
    refuse_all(problems)
    return stored


def load(folder: Path, shape: Model, state: dict[str, Tensor]) -> None:
    """Fill the parameters and buffers among the tensors of `Engine.state`, in place, of our models too; memory:
    one rank's shard of a tensor.

    Raises:
        BadFileError: a tensor that this rank needs is missing, or a file is damaged.
    """
    if shape.source == "own":
        load_own(folder, shape, state)
        return
    model = build(shape)  # the engine's own may be divided
    with ExitStack() as files, torch.no_grad():
        stored, *_ = _match_names(folder, model, files)
        names = [name for name, _ in named_tensors(model)]
        local_keys = {name: key for name in names if (key := f"model.{PREFIX}{name}") in state}
        missing = [name for name in local_keys if name not in stored]
        refuse_all([f"{name} is missing" for name in missing if not is_head(name, model)])
        shapes = {name: tuple(state[key].shape) for name, key in local_keys.items()}
        refuse_all(_differences(stored, shapes))
        for name in filter(stored.__contains__, shapes):
            for box, memory in boxes(state[local_keys[name]]):
                stored[name].fill(memory, box.offsets)


def _differences(stored: dict[str, RecordedTensor], needed: Shapes) -> list[str]:
    used = {name: stored[name] for name in needed if name in stored}
    problems = differing_shapes({name: tensor.shape for name, tensor in used.items()}, needed)
    return problems + unreadable(it for tensor in used.values() for it in tensor.sources)


def _match_names(
    folder: Path, model: Any, files: ExitStack
) -> tuple[dict[str, RecordedTensor], list[str], list[tuple[str, Stored]]]:
    """Return the model's tensors by name, made of the files', and the names of tensors that it lacks.

    The third value lists tensors of tied parameters, each with the parameter's first name.
    """
    aliases = tied_parameters(model)
    known_names = {name for name, _ in named_tensors(model)} | {*aliases}
    stored, lacking = converted(file_tensors(folder, files), model, known_names)
    tied = []
    for alias in sorted(aliases.keys() & stored.keys()):
        tensor = stored.pop(alias)
        tied.append((aliases[alias], tensor.sources[0]))
        stored.setdefault(aliases[alias], tensor)
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()  # without a warning
    unknown = [
        name
        for name, changed in lacking.items()
        if not is_buffer(name)
        and not is_head(name, model)
        and not any(re.search(pattern, it) for pattern in ignored for it in (name, changed))
    ]
    return stored, unknown, tied


def is_head(name: str, model: Any) -> bool:
    """True if a weight is of a classifier's head, its pooler included, or of the head of another task."""
    if not type(model).__name__.endswith(CLASSIFIER):
        return False
    base = model.base_model_prefix
    children = {base, *(child for child, _ in model.get_submodule(base).named_children())}
    return name.split(".")[0] not in children or "pooler." in name


# --- the launcher's question -----------------------------------------------------------------------


def judge(request: dict[str, Any]) -> dict[str, Any]:
    """Answer a request."""
    shape, kept = Model(**request["model"]), 0
    try:
        model = build(shape)
        objective = made_for(shape.hf_config)
        problem = _objective_problem(model, objective)
        if problem is None and request["folder"] is not None:
            folder = Path(request["folder"])
            used = find(folder, model)
            if objective == "next-token":
                kept = count_kept(folder, (it for each in used.values() for it in each.sources))
    except BadFileError as error:
        return {"problem": str(error), "of": "files"}
    # errors of transformers, of the model's own code, or of a missing package
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        why = f"transformers cannot build it: {reason[:_MESSAGE_CHARACTERS]}"
        return {"problem": why, "of": "model"}
    if request["attention"] and problem is None and (why := hf_attention.problem(model)):
        return {"problem": f"needs our attention, and {why}", "of": "attention"}
    if "targets" in request and problem is None and (why := _without(model, request["targets"])):
        return {"problem": why, "of": "lora"}
    checks: dict[str, Callable[[int], object]] = {
        "tp": lambda tp: tp_styles(model, tp),
        "pp": lambda _: require_stages(model, shape),
        "ep": lambda ep: require_experts(model, ep),
    }
    for axis, check in checks.items():
        try:
            if request[axis] > 1 and problem is None:
                check(request[axis])
        except ValueError as error:
            return {"problem": f"cannot divide this model: {error}", "of": axis}
    ties = bool(tied_parameters(model))
    found = {"parameters": count_parameters(model), "tie_embeddings": ties, "kept_tensors": kept}
    return {"problem": problem, "of": "model"} | found


def _without(model: Any, targets: list[str] | None) -> str:
    """Return which of the layers that adapters are for the blocks lack; empty if they have them."""
    found = {
        name.rpartition(".")[2]
        for block in blocks(model).values()
        for name in linear_layers(block, None)
    }
    if not found:
        return "adds adapters to linear layers, and the blocks of this model have none"
    absent = sorted({*(targets or ())} - found)
    return f"names {absent[0]}, and a block has {', '.join(sorted(found))}" if absent else ""


def _objective_problem(model: Any, objective: str) -> str | None:
    """Return why its objective would not train it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    if objective == "classify" and model.config.pad_token_id is None:
        return "config.json has no pad_token_id: model.hf_config.pad_token_id=0 pads with token 0"
    family, is_decoder = model.config.model_type, getattr(model.config, "is_decoder", False)
    if objective == "next-token" and family in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not is_decoder:
        return f"model_type={family} sees the tokens that it must predict, unless is_decoder=true"
    return None


def main() -> None:
    print(json.dumps(judge(json.load(sys.stdin))))


if __name__ == "__main__":
    main()
