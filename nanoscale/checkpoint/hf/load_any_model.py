"""The files of a transformers model, compared with the model that transformers builds.

`python -m nanoscale.checkpoint.hf.load_any_model < request.json` answers whether it can be trained, in a
process of its own: the launcher calls it, since it never imports torch itself. A request is the keys of
`model` and the `folder` of its weights or null; the answer, the last line, is the `problem` or null, whether
it is one `of` the files or of the model, and the number of `parameters`.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoscale.checkpoint.hf.load import differences, read_parts, refuse_all
from nanoscale.checkpoint.hf.names import TensorPosition, is_buffer
from nanoscale.config.hf.safetensors_headers import BadFileError, Stored, are_equal, read_folder
from nanoscale.config.objectives import CLASSIFIER, made_for
from nanoscale.models import hf_attention
from nanoscale.models.hf_model import PREFIX, build, require_stages, tied_parameters, tp_styles

if TYPE_CHECKING:
    from torch import Tensor


_MESSAGE_CHARACTERS = 300
"""The most characters of another program's message."""


def find(folder: Path, model: Any) -> dict[str, Stored]:
    """Locate each parameter of transformers' model, by its name there.

    Raises:
        BadFileError: files or tensors are missing, of other shapes, stored in another form than in
            transformers, or more than there are parameters.
    """
    file_tensors = read_folder(folder)
    stored, unknown, tied = _match_names(file_tensors, model)
    needed = {name: tuple(value.shape) for name, value in model.named_parameters()}
    missing = [name for name in needed if name not in stored]
    problems = [f"{name} is missing" for name in missing if not is_head(name, model)]
    problems += differences({name: stored[name] for name in needed if name in stored}, needed)
    problems += [f"{name} is not one of its parameters" for name in unknown]
    problems += [
        f"{tensor.name} differs from {stored[name].name}, to which its config.json ties it: "
        f"transformers ties only equal tensors; model.hf_config.tie_word_embeddings=false trains both"
        for name, tensor in tied
        if name in stored and not are_equal(tensor, stored[name])
    ]
    refuse_all(problems)
    return stored


def load(folder: Path, model: Any, state: dict[str, Tensor]) -> None:
    """Fill the parameters among the tensors of `Engine.state`, in place; memory: one rank's shard of a tensor.

    Raises:
        BadFileError: a tensor that this rank needs is missing, or a file is damaged.
    """
    stored, *_ = _match_names(read_folder(folder), model)
    local_keys = {name: key for name in _names(model) if (key := f"model.{PREFIX}{name}") in state}
    missing = [name for name in local_keys if name not in stored]
    refuse_all([f"{name} is missing" for name in missing if not is_head(name, model)])
    local_keys = {name: key for name, key in local_keys.items() if name in stored}
    shapes = {name: tuple(state[key].shape) for name, key in local_keys.items()}
    refuse_all(differences({name: stored[name] for name in local_keys}, shapes))
    requests = [
        (stored[name], TensorPosition(stored[name].name), shapes[name], state[key])
        for name, key in local_keys.items()
    ]
    read_parts(requests)


def _match_names(
    file_tensors: dict[str, Stored], model: Any
) -> tuple[dict[str, Stored], list[str], list[tuple[str, Stored]]]:
    """Return the file's tensors by the names of their parameters, and the names of tensors that are not
    parameters.

    The third value lists tensors of tied parameters, each with the parameter's first name.

    Raises:
        BadFileError: transformers makes a parameter of several tensors, or several parameters of one.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    names, aliases = _names(model), tied_parameters(model)
    known_names: dict[str, Any] = dict.fromkeys([*names, *aliases], True)
    changes = get_model_conversion_mapping(model)
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    renamings: Any = [change for change in changes if not isinstance(change, WeightConverter)]
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()  # without a warning
    stored, unknown, tied = {}, [], []
    for name, tensor in file_tensors.items():
        if name in names:
            stored[name] = tensor
            continue
        changed, converted = rename_source_key(
            name, renamings, converters, model.base_model_prefix, known_names
        )
        if converted is not None:
            raise BadFileError(
                f"{name} is stored in a form that transformers converts on loading ({changed}), "
                f"and only names may differ; model.init_from=null starts with random weights"
            )
        if changed in names:
            stored[changed] = tensor
        elif changed in aliases:
            stored.setdefault(aliases[changed], tensor)
            tied.append((aliases[changed], tensor))
        elif is_buffer(name) or is_head(name, model):
            continue
        elif not any(re.search(pattern, name) for pattern in ignored):
            unknown.append(name)
    return stored, unknown, tied


def is_head(name: str, model: Any) -> bool:
    """True if a weight is of a classifier's head, its pooler included, or of the head of another task."""
    if not type(model).__name__.endswith(CLASSIFIER):
        return False
    base = model.base_model_prefix
    children = {base, *(child for child, _ in model.get_submodule(base).named_children())}
    return name.split(".")[0] not in children or "pooler." in name


def _names(model: Any) -> set[str]:
    return {name for name, _ in model.named_parameters()}


# --- the launcher's question -----------------------------------------------------------------------


def judge(request: dict[str, Any]) -> dict[str, Any]:
    """Answer a request."""
    from nanoscale.config.schema import Model

    shape = Model(**request["model"])
    try:
        model = build(shape)
        problem = _objective_problem(model, made_for(shape.hf_config))
        if problem is None and request["folder"] is not None:
            find(Path(request["folder"]), model)
    except BadFileError as error:
        return {"problem": str(error), "of": "files"}
    # errors of transformers, of the model's own code, or of a missing package
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        why = f"transformers cannot build it: {reason[:_MESSAGE_CHARACTERS]}"
        return {"problem": why, "of": "model"}
    if request["tp"] > 1 and problem is None:
        try:
            tp_styles(model, request["tp"])
        except ValueError as error:
            return {"problem": f"cannot divide this model: {error}", "of": "tp"}
    if request["attention"] and problem is None:
        divided = request["attention"] == "parallel.cp"
        if why := hf_attention.problem(model, divided=divided):
            return {"problem": f"needs our attention, and {why}", "of": "attention"}
    if request["stages"] > 1 and problem is None:
        try:
            require_stages(model, shape)
        except ValueError as error:
            return {"problem": f"cannot divide this model: {error}", "of": "pp"}
    count = sum(parameter.numel() for parameter in model.parameters())
    ties = bool(tied_parameters(model))
    return {"problem": problem, "of": "model", "parameters": count, "tie_embeddings": ties}


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
