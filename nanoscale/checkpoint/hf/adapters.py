"""Checkpoints of a training with `lora`: they hold the adapters; the frozen weights are in
`model.init_from`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nanoscale.checkpoint.hf.load import differences, find, fingerprint, read_parts, refuse_all
from nanoscale.checkpoint.hf.names import TensorPosition, hf_positions, shapes
from nanoscale.checkpoint.store import DamagedCheckpointError, list_checkpoints
from nanoscale.common.errors import UserError, Violation
from nanoscale.common.json_text import Json
from nanoscale.config import model_math
from nanoscale.config.hf import peft
from nanoscale.config.hf.safetensors_headers import BadFileError, Stored, read_header
from nanoscale.config.hf.text_part import module_prefix, read_config
from nanoscale.config.parameters import Shape
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Lora

if TYPE_CHECKING:
    from torch import Tensor

    from nanoscale.checkpoint.reader import Reader

_KEY = "model.init_from"


def require_same_base(config: ResolvedConfig, base: str | None, manifest: Json) -> None:
    """Raise a UserError unless `base` is the fingerprint of the weights that the adapters belong to."""
    if manifest.get("base") != base:
        folder = config.model.init_from
        message = "does not have the weights that the adapters of this run were trained for"
        raise UserError(
            "model", f"{_KEY}={folder} {message}", [Violation(_KEY, folder, "", message)]
        )


def require_base(config: ResolvedConfig, checkpoints: Path) -> None:
    """Compare the folder of the frozen weights with a run's newest checkpoint, if it has any.

    Raises:
        UserError: files are missing, damaged, or of another model.
    """
    for stored in reversed(list_checkpoints(checkpoints)):
        with suppress(DamagedCheckpointError):  # it will be skipped
            require_base_of(config, stored.manifest, f"{_KEY}=/where/it/is/now")
            return


def require_base_of(config: ResolvedConfig, manifest: Json, advice: str) -> None:
    """Compare the folder of the frozen weights with one checkpoint; `advice` is the advice if it has moved."""
    folder = str(config.model.init_from)
    try:
        if not Path(folder).is_dir():
            raise BadFileError("does not exist")
        base = fingerprint(Path(folder), config.model)
    except BadFileError as error:
        message = f"{error}, and its weights are needed together with the trained adapters"
        raise unusable_base(config, message, advice) from error
    require_same_base(config, base, manifest)


def unusable_base(config: ResolvedConfig, message: str, advice: str) -> UserError:
    """Return the error of a folder of `model.init_from` that is needed again."""
    folder = config.model.init_from
    violation = Violation(_KEY, folder, "", message, (advice,))
    return UserError("model", f"{_KEY}={folder}: {message}", [violation])


def is_adapted(config: ResolvedConfig, name: str) -> bool:
    """True if one of our parameters has adapters."""
    module, _, kind = name.rpartition(".")
    _, _, module_in_block = module.rpartition("layers.")[2].partition(".")
    adapted = model_math.adapted_layers(config.model, config.lora).values()
    return kind == "weight" and module_in_block in adapted


def find_adapters(folder: Path, config: ResolvedConfig) -> dict[str, tuple[Stored, Shape]]:
    """Return the tensors of a PEFT folder by the names of our adapters, with their shapes. Reads a header only.

    Raises:
        BadFileError: the file is damaged, or holds other adapters.
    """
    stored, rank = read_header(folder / peft.WEIGHTS), config.lora.rank
    tensors: dict[str, tuple[Stored, Shape]] = {}
    names = set()
    for name, position in base_matrices(config).items():
        outputs, inputs = shapes(config.model)[f"{name}.weight"]
        kinds: dict[str, Shape] = {"a": (rank, inputs), "b": (outputs, rank)}
        if config.lora.dora:
            kinds["magnitude"] = (outputs,)
        for kind, shape in kinds.items():
            peft_key = peft_name(position, kind)
            names.add(peft_key)
            if peft_key not in stored:
                raise BadFileError(f"{peft.WEIGHTS} has no {peft_key}")
            refuse_all(differences({peft_key: stored[peft_key]}, {peft_key: shape}))
            tensors[f"{name}.adapter.{kind}"] = stored[peft_key], shape
    if more := sorted(stored.keys() - names):
        raise BadFileError(f"{peft.WEIGHTS} has {more[0]}, which is not an adapter of this model")
    return tensors


def base_matrices(config: ResolvedConfig) -> dict[str, TensorPosition]:
    """Return the positions in the base model of the matrices with adapters, by our names of their modules.

    Their names are those in transformers' class of the folder, as PEFT expects.
    """
    positions = hf_positions(config.model, base_family(config))
    modules = model_math.adapted_layers(config.model, config.lora).values()
    names = [f"layers.{n}.{module}" for n in range(config.model.layers) for module in modules]
    matrices = {name: positions[f"{name}.weight"][0] for name in names}
    prefix = module_prefix(Path(str(config.model.init_from)))
    if prefix is None:
        return matrices
    return {
        name: replace(it, name=prefix + it.name.removeprefix("model."))
        for name, it in matrices.items()
    }


def peft_name(position: TensorPosition, kind: str) -> str:
    """Return PEFT's name of `a`, `b` or `magnitude` of the matrix at a position."""
    suffix = {"a": "A.weight", "b": "B.weight", "magnitude": "magnitude_vector"}[kind]
    return f"base_model.model.{position.name.removesuffix('.weight')}.lora_{suffix}"


def base_family(config: ResolvedConfig) -> str:
    """Return the family of the base model; several may have the same shape and other names."""
    return str(read_config(Path(str(config.model.init_from)))["model_type"])


def load_adapters(folder: Path, config: ResolvedConfig, state: dict[str, Tensor]) -> None:
    """Fill the adapters among the tensors of `Engine.state`, in place. Errors as of `find_adapters`."""
    read_parts(
        [
            (stored, TensorPosition(stored.name), shape, state[f"model.{name}"])
            for name, (stored, shape) in find_adapters(folder, config).items()
            if f"model.{name}" in state
        ]
    )


def with_adapter(lora: Lora, reader: Reader, name: str, weight: Tensor) -> Tensor:
    """Return a weight, by its name in the checkpoint, with its adapter, in fp32 or better; unchanged if it has
    none."""
    import torch

    adapter = f"{name.removesuffix('.weight')}.adapter"
    if f"{adapter}.a" not in reader.tensors:
        return weight
    outputs, inputs = weight.shape
    a = reader.weights(f"{adapter}.a", (lora.rank, inputs))
    b = reader.weights(f"{adapter}.b", (outputs, lora.rank))
    dtype = torch.promote_types(torch.promote_types(weight.dtype, torch.float32), a.dtype)
    a, b = (matrix.to(weight.device, dtype) for matrix in (a, b))
    merged = torch.addmm(weight.to(dtype), b, a, alpha=lora.scale)
    if lora.dora:
        magnitude = reader.weights(f"{adapter}.magnitude", (outputs,)).to(a)
        merged *= (magnitude / torch.linalg.vector_norm(merged, dim=1)).unsqueeze(1)
    return merged


def merging(config: ResolvedConfig, reader: Reader) -> Callable[[str], Tensor]:
    """Return the function that reads one of our parameters, whole: W + scale · B·A, with DoRA's magnitudes.

    It computes in fp32 or better.
    """
    import torch

    base = find(Path(str(config.model.init_from)), config.model)
    sizes = shapes(config.model)

    def merged(name: str) -> Tensor:
        size, stored = sizes[name], base[name]
        kind = "float64" if stored[0][1].dtype == "F64" else "float32"
        whole = torch.empty(size, dtype=getattr(torch, kind))
        read_parts([(tensor, position, size, whole) for position, tensor in stored])
        return with_adapter(config.lora, reader, f"model.{name}", whole)

    return merged
