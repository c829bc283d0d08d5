"""DeepSpeed's own configuration, made from ours, for `config show --deepspeed` and for the ranks."""

from collections.abc import Mapping

from nanoscale.common.json_text import Json
from nanoscale.config.dtypes import DTYPES
from nanoscale.config.reference import flat, merged, value_of
from nanoscale.config.resolved import ResolvedConfig

_NO_LIMIT = 1e38
"""A limit of the gradient norm that never clips: DeepSpeed computes the norm only if there is a limit."""

SAME = {
    "train_batch_size": "train.global_batch",
    "train_micro_batch_size_per_gpu": "train.micro_batch",
    "gradient_clipping": "optimizer.clip_norm",
    "sequence_parallel_size": "parallel.cp",
    "zero_optimization.stage": "zero.stage",
    "zero_optimization.offload_optimizer.device": "zero.offload_optimizer",
    "zero_optimization.offload_optimizer.nvme_path": "zero.nvme_path",
    "zero_optimization.offload_param.device": "zero.offload_param",
    "zero_optimization.offload_param.nvme_path": "zero.nvme_path",
    "zero_optimization.reduce_bucket_size": "backend.reduce_bucket",
    "zero_optimization.allgather_bucket_size": "backend.allgather_bucket",
    "zero_optimization.stage3_prefetch_bucket_size": "backend.prefetch_bucket",
    "zero_optimization.zero_hpz_partition_size": "zero.hpz",
    "zero_optimization.zero_quantized_weights": "zero.quantized_weights",
    "zero_optimization.zero_quantized_gradients": "zero.quantized_gradients",
}
"""Settings with a key of the same meaning and unit, by their path in DeepSpeed's configuration. A JSON of
DeepSpeed is read and written by this table."""
STAGES = {
    "backend.overlap_comm": (1, 2, 3),
    "backend.reduce_bucket": (1, 2, 3),
    "backend.allgather_bucket": (1, 2),
    "backend.prefetch_bucket": (3,),
    "zero.hpz": (3,),
    "zero.quantized_weights": (3,),
    "zero.quantized_gradients": (3,),
}
"""Keys that DeepSpeed reads with some ZeRO stages only, with these stages."""

OWNED = SAME | {
    "gradient_accumulation_steps": "train.global_batch",
    "managed_gradient_accumulation": "train.global_batch",
    "optimizer": "optimizer.name",
    "scheduler": "scheduler.name",
    "bf16": "precision.compute",
    "fp16": "precision.compute",
    "torch_autocast": "precision.compute",
    "data_types": "precision.reduce",
    "communication_data_type": "precision.reduce",
    "seq_parallel_communication_data_type": "precision.reduce",
    "zero_optimization.overlap_comm": "backend.overlap_comm",
    "tensor_parallel": "parallel.tp",
    "data_parallel_size": "parallel.dp",
    "activation_checkpointing": "parallel.activation_checkpointing",
    "compile": "backend.compile",
}
"""Settings that a key of ours decides."""


def deepspeed_settings(config: ResolvedConfig) -> Json:
    """Return the configuration of DeepSpeed's engine for a resolved configuration, `backend.extra` merged in
    last."""
    settings: Json = {
        "train_micro_batch_size_per_gpu": config.train.micro_batch,
        "gradient_accumulation_steps": config.accumulation,
        "gradient_clipping": config.optimizer.clip_norm or _NO_LIMIT,
        # The optimizer is passed ready-made: PyTorch's, the same as the native backend's.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": _zero(config),
        **_precision(config),
    }
    return merged(settings, config.backend.extra)


def _zero(config: ResolvedConfig) -> Json:
    zero, overlap = config.zero, config.backend.overlap_comm
    settings: Json = {"stage": zero.stage}
    if zero.stage > 0:
        settings["overlap_comm"] = overlap == "on" or (overlap == "auto" and zero.stage == 3)
    for path, key in SAME.items():
        if zero.stage in STAGES.get(key, ()):
            settings[path.removeprefix("zero_optimization.")] = value_of(config, key)
    for name in ("offload_optimizer", "offload_param"):
        device = getattr(zero, name)
        if device != "none":
            settings[name] = {"device": device, "pin_memory": True}
        if device == "nvme":
            settings[name]["nvme_path"] = zero.nvme_path
    return settings


def _precision(config: ResolvedConfig) -> Json:
    precision = config.precision
    settings: Json = {"communication_data_type": precision.reduce}
    if precision.compute not in ("bf16", "fp16"):
        return settings
    if config.zero.stage == 0:
        # Its other optimizers for stage 0 sum gradients in the compute dtype.
        full = DTYPES[precision.compute].torch_name
        return settings | {"torch_autocast": {"enabled": True, "dtype": full}}
    settings["data_types"] = {"grad_accum_dtype": precision.reduce}
    if precision.compute == "bf16":
        # A step that is not finite ends the training, which is better than skipping steps silently.
        settings["bf16"] = {"enabled": True, "check_grad_overflow": False}
    else:
        # Constant for DeepSpeed and adapted by us: DeepSpeed halves the update of a step that doubles the
        # scale.
        settings["fp16"] = {"enabled": True, "loss_scale": 1.0}
    return settings


def owner(extra: Json) -> dict[str, str]:
    """Return the settings within `extra` that a key of ours decides, with that key."""
    return {path: OWNED[path] for path in flat(extra, stop=OWNED.__contains__) if path in OWNED}


def unowned(extra: Json, prefix: str = "") -> Json:
    """Return `extra` without the settings that a key of ours decides, and without mappings emptied by that."""
    rest: Json = {}
    for name, value in extra.items():
        nested = isinstance(value, Mapping) and value
        left = unowned(value, f"{prefix}{name}.") if nested else value
        if f"{prefix}{name}" not in OWNED and not (nested and not left):
            rest[name] = left
    return rest
