"""Adapters as PEFT reads them: `adapter_model.safetensors` and `adapter_config.json`.

Where Hugging Face's matrix joins several of ours (Phi-3, GLM-4, GPT-2), their adapters become one of a larger
rank: the matrices A below each other, and the matrices B in blocks along the diagonal.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from nanoscale.checkpoint.hf.adapters import base_family, base_matrices, peft_name, require_base_of
from nanoscale.checkpoint.hf.export import Exported, new_folder
from nanoscale.checkpoint.hf.load import find
from nanoscale.checkpoint.hf.names import TensorPosition, shapes
from nanoscale.checkpoint.hf.safetensors_files import write_json
from nanoscale.checkpoint.reader import Reader
from nanoscale.checkpoint.store import StoredCheckpoint
from nanoscale.config.dtypes import DTYPES
from nanoscale.config.hf import peft
from nanoscale.config.hf.safetensors_headers import Stored
from nanoscale.config.hf.text_part import module_prefix
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.data import vocabulary
from nanoscale.models.hf_model import PREFIX
from nanoscale.models.initialization import ADAPTER


def export_adapters(
    stored: StoredCheckpoint, config: ResolvedConfig, out: Path, dtype: str
) -> Exported:
    """Write the adapters of a checkpoint, without their base model.

    Raises:
        UserError: the base model has changed, `out` exists, or the disk is full.
    """
    from safetensors.torch import save_file

    require_base_of(config, stored.manifest, "--base /where/it/is/now")
    tensors, ranks = _tensors(stored, config)
    kind = getattr(torch, DTYPES[dtype].torch_name)
    tensors = {name: value.to(kind).contiguous() for name, value in tensors.items()}
    size = sum(value.nbytes for value in tensors.values())
    with new_folder(out, size) as folder:
        vocabulary.write(folder, config)
        save_file(tensors, folder / peft.WEIGHTS, {"format": "pt"})
        settings = _settings(config, ranks)
        if module_prefix(
            Path(str(config.model.init_from))
        ):  # towers have modules of the same names
            modules = {name.rpartition(".lora_")[0] for name in tensors}
            names = sorted(name.removeprefix("base_model.model.") for name in modules)
            settings["target_modules"] = names
        write_json(folder / peft.SETTINGS, settings)
    has_tokenizer = (out / "tokenizer.json").exists() or (out / "tokenizer.model").exists()
    return Exported(out, stored.step, dtype, [peft.WEIGHTS], size, has_tokenizer, 0.0)


def _settings(config: ResolvedConfig, ranks: dict[str, int]) -> dict[str, Any]:
    """Return adapter_config.json; `ranks` are the modules' ranks by their names in a block."""
    lora = config.lora
    larger = {name: rank for name, rank in ranks.items() if rank != lora.rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.model.init_from,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": base_family(config) == "gpt2",
        "target_modules": sorted(ranks),
        "rank_pattern": larger,
        "alpha_pattern": {
            name: lora.alpha * (rank / lora.rank) ** (0.5 if lora.rslora else 1.0)
            for name, rank in larger.items()
        },
    }


def _tensors(
    stored: StoredCheckpoint, config: ResolvedConfig
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return the adapters of the base model's matrices by PEFT's names, and the rank of each kind of matrix."""
    if config.model.source == "hf":
        return _foreign_tensors(stored, config)
    rank, reader, sizes = config.lora.rank, Reader(stored.path), shapes(config.model)
    base = find(Path(str(config.model.init_from)), config.model)
    joined = defaultdict(list)
    for name, position in base_matrices(config).items():
        joined[position.name].append((name, position))
    tensors, ranks = {}, {}
    for matrix, parts in joined.items():
        matrices_a, matrices_b = [], []
        position, in_base = base[f"{parts[0][0]}.weight"][0]
        magnitudes = _row_norms(in_base, position.transposed) if config.lora.dora else None
        for name, position in parts:
            outputs, inputs = sizes[f"{name}.weight"]
            matrices_a.append(reader.read(f"model.{name}.adapter.a", (rank, inputs)))
            b = torch.zeros(position.before + outputs + position.after, rank)
            b[position.before :][:outputs] = reader.read(f"model.{name}.adapter.b", (outputs, rank))
            matrices_b.append(b)
            if magnitudes is not None:
                magnitude = reader.read(f"model.{name}.adapter.magnitude", (outputs,))
                magnitudes[position.before :][:outputs] = magnitude
        tensors[peft_name(parts[0][1], "a")] = torch.cat(matrices_a)
        tensors[peft_name(parts[0][1], "b")] = torch.cat(matrices_b, dim=1)
        if magnitudes is not None:
            tensors[peft_name(parts[0][1], "magnitude")] = magnitudes
        number = parts[0][0].split(".")[1]
        ranks[matrix.partition(f".{number}.")[2].removesuffix(".weight")] = rank * len(parts)
    return tensors, ranks


def _foreign_tensors(
    stored: StoredCheckpoint, config: ResolvedConfig
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return the same of a model of transformers, whose names are PEFT's."""
    reader, tensors, ranks = Reader(stored.path), {}, {}
    prefix = module_prefix(Path(str(config.model.init_from)))
    for name, about in stored.manifest["tensors"].items():
        module, is_adapter, kind = name.removeprefix(f"model.{PREFIX}").partition(ADAPTER)
        if is_adapter and name.startswith("model."):
            module = prefix + module.removeprefix("model.") if prefix else module
            value = reader.weights(name, tuple(about["shape"]))
            tensors[peft_name(TensorPosition(module), kind)] = value
            ranks[module] = config.lora.rank
    return tensors, ranks


def _row_norms(stored: Stored, transposed: bool) -> Tensor:
    """Return the norms of the rows of a matrix of the base model. Adapters may change a part of the matrix."""
    with safe_open(stored.file, "pt") as opened:
        matrix = opened.get_tensor(stored.name).float()
    return torch.linalg.vector_norm(matrix, dim=0 if transposed else 1)
