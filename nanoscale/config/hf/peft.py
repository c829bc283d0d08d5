"""Folders of adapters that PEFT has written: their settings, in place of a model in `model.init_from`."""

from pathlib import Path

from nanoscale.common.errors import reason
from nanoscale.common.json_text import Json, parse
from nanoscale.config.hf.families import UnsupportedError
from nanoscale.config.violations import shown

SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LAYERS = {
    "q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo",
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down",
}  # fmt: skip
"""Our names of the layers with adapters, by the names of most families."""
_USUAL: Json = {
    "peft_type": "LORA", "bias": "none", "modules_to_save": None, "fan_in_fan_out": False,
    "rank_pattern": {}, "alpha_pattern": {}, "layers_to_transform": None, "trainable_token_indices": None,
}  # fmt: skip
"""Settings with one supported value."""


def adapter_folder(asked: str | None) -> Path | None:
    """Return the folder of adapters that `model.init_from` names; None if it names something else."""
    folder = Path(str(asked)).expanduser()
    return folder.absolute() if (folder / SETTINGS).is_file() else None


def read_settings(folder: Path) -> tuple[str, Json]:
    """Return the base model of adapters, and the keys of `lora`.

    Raises:
        UnsupportedError: they are of another kind, or of layers that have none here.
    """
    try:
        settings = parse((folder / SETTINGS).read_bytes())
        base, targets = settings["base_model_name_or_path"], settings["target_modules"]
        values = {"rank": settings["r"], "alpha": float(settings["lora_alpha"])}
        names = [str(name).rpartition(".")[2] for name in targets]
    except OSError as error:
        raise UnsupportedError(f"{SETTINGS} cannot be read: {reason(error)}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UnsupportedError(f"{SETTINGS} is not one of PEFT's: {error!r}") from error
    for name, usual in _USUAL.items():
        if settings.get(name, usual) not in (usual, None):
            raise UnsupportedError(f"{SETTINGS}: {name}={shown(settings[name])} is not supported")
    if isinstance(targets, str) or any(name not in LAYERS for name in names):
        what = f"target_modules={shown(targets)}: not all of them are known"
        raise UnsupportedError(f"{SETTINGS}: {what}")
    if not isinstance(base, str) or not base:
        raise UnsupportedError(f"{SETTINGS} names no base_model_name_or_path")
    order = list(LAYERS.values())
    chosen = sorted({LAYERS[name] for name in names}, key=order.index)
    flags = {name: bool(settings.get(f"use_{name}")) for name in ("rslora", "dora")}
    return base, values | flags | {"targets": chosen}
