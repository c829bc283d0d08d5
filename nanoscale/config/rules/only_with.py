"""Keys that only have a meaning with certain values of other keys."""

from nanoscale.config.objectives import ANSWERS
from nanoscale.config.optimizers import KEYS, optimizers_with
from nanoscale.config.rules.rule import ignored, of_kind, only_with, other_than, refused, several

_MODE = "parallel.activation_checkpointing"
_STAGED = {"parallel.pp": several}
_ROUTED = {"model.experts": bool}
_ADAPTED = {"lora.rank": bool}
_OFFLOADS = ("zero.offload_optimizer", "zero.offload_param")
_SCALED = {"precision.compute": "fp16"}
_NVME = "zero.offload_optimizer={c.zero.offload_optimizer} and zero.offload_param={c.zero.offload_param}"

OF_LAYOUT = (
    only_with("parallel.sequence_parallel", {"parallel.tp": several}),
    only_with("parallel.tp_overlap",
        {"parallel.tp": several, "parallel.sequence_parallel": True, "backend.compile": ("auto", "on"),
         "precision.fp8": False}),
    only_with("parallel.cp_method", {"parallel.cp": several}),
    only_with("parallel.ep_over_tp",
        {"parallel.tp": several, "parallel.ep": several, "parallel.sequence_parallel": True}),
    only_with("zero.prefetch", {"zero.stage": 3, "parallel.pp": 1}),
    only_with("parallel.schedule", _STAGED),
    only_with("parallel.layers_per_stage", _STAGED),
    only_with("parallel.checkpoint_every", {_MODE: ("full", "selective")}, f"{_MODE}=full"),
    only_with("parallel.selective_keep", {_MODE: "selective"}, f"{_MODE}=selective"),
    *of_kind("config",
        refused("zero.nvme_path",
            {"backend.name": "deepspeed", "zero.nvme_path": other_than(None),
             **dict.fromkeys(_OFFLOADS, other_than("nvme"))},
            ignored(_NVME), "zero.nvme_path=null")),
)  # fmt: skip
OF_JOB = of_kind("config",
    *(only_with(f"model.{name}", _ROUTED)
        for name in ("experts_per_token", "normalize_experts", "router", "expert_scale", "expert_groups",
                     "shared_ffn", "dense_layers", "balance")),
    only_with("model.expert_groups_per_token", {"model.expert_groups": several}),
    only_with("model.dense_ffn", {"model.dense_layers": bool}),
    only_with("model.shared_gate", {"model.shared_ffn": bool}),
    only_with("model.balance_rate", {**_ROUTED, "model.balance": other_than("none")}),
    only_with("model.qkv_bias", {"model.bias": False}),
    *(only_with(f"model.{name}", {"model.kv_rank": other_than(None)})
        for name in ("q_rank", "rope_head_dim", "v_head_dim")),
    only_with("model.qk_norm_whole", {"model.qk_norm": True}),
    *(only_with(f"model.{name}", {"model.sliding_window": other_than(None)})
        for name in ("full_attention_every", "rope_theta_local")),
    *(only_with(f"model.{name}", {"model.position": "rope"})
        for name in ("rope_theta_local", "rope_fraction", "rope_pairs", "rope_skip")),
    *(only_with(f"lora.{name}", _ADAPTED, "lora.rank=16")
        for name in ("alpha", "rslora", "dora", "base", "targets", "init_from")),
    *(only_with(f"run.{name}", {"run.from_run": other_than(None)}) for name in ("from_step", "from_optimizer")),
    only_with("launcher.exclude_stragglers", {"launcher.device": "cpu"}),
    *(only_with(key, {"launcher.max_restarts": bool}, "launcher.max_restarts=100")
        for key in ("checkpoint.memory_every", "launcher.mtbf_hours")),
    only_with("train.preference_beta", {"train.objective": ANSWERS}),
    *(only_with(f"train.{name}_weight", {"train.objective": "kto"}) for name in ("desirable", "undesirable")),
    only_with("train.teacher", {"train.objective": "distill"}, "train.objective=distill"),
    *(only_with(f"train.distill_{name}", {"train.objective": "distill"})
        for name in ("top_k", "weight", "temperature")),
    *(only_with(f"train.{name}", {"train.objective": "masked"}) for name in ("mask_share", "mask_token")),
    only_with("train.labels", {"train.objective": "classify"}),
    refused("data.document_length",
        {"data.document_length": other_than(None), "data.document_mask": False, "data.packing": "stream"},
        "is of attention within documents", "data.document_mask=true", "data.document_length=null"),
    only_with("precision.loss_scale", _SCALED),
    only_with("precision.loss_scale_window", _SCALED),
    only_with("precision.fp8_recipe", {"precision.fp8": True}),
    *(only_with(f"optimizer.{name}", {"optimizer.name": (one, *others)}, f"optimizer={one}")
        for name in KEYS for one, *others in (optimizers_with(name),)),
)  # fmt: skip
OF_TEXT = of_kind("data",
    *(only_with(f"data.{name}", {"data.source": other_than("random", "hooks")}, "data=megatron")
        for name in ("tokenizer", "packing", "document_mask")),
)  # fmt: skip
OF_MODEL = of_kind("config",
    *(only_with(f"model.{name}", {"model.source": "hf"}, "model=hf")
        for name in ("trust_remote_code", "hf_config")),
    only_with("model.parameters", {"model.source": other_than("own")}, "model=hf"),
)  # fmt: skip
