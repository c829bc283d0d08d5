"""Names of Trainer, Megatron, torchtitan, DeepSpeed and torchrun, and their equivalents here.

A name is looked up whole (`training.local_batch_size`), then without its sections (`local_batch_size`), in any
spelling of dashes, underscores and capitals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from nanoscale.config.optimizers import OPTIMIZERS


@dataclass(frozen=True)
class Equivalent:
    """The equivalent of one name of another trainer: one of `keys`, `overrides` and `commands`."""

    keys: tuple[str, ...] = ()
    """Keys that take the same value; several if trainers differ in the meaning of the name."""
    overrides: Mapping[str, str] = field(default_factory=dict)
    """Value in lower case → its overrides; "" stands for every other value."""
    commands: tuple[str, ...] = ()
    """The command to run, if no override means the same."""
    note: str = ""
    """The difference from here; empty if there is none."""

    @property
    def about(self) -> tuple[str, ...]:
        """The keys and sections to read about, for `config explain`."""
        explained = "nanoscale config explain "
        words = [word for text in self.overrides.values() for word in text.split()]
        names = [*self.keys, *(word.partition("=")[0] for word in words)]
        names += [it.removeprefix(explained) for it in self.commands if it.startswith(explained)]
        return tuple(dict.fromkeys(names))


def equivalent(name: str) -> Equivalent | None:
    """Return the equivalent of a name of another trainer; None for a name that is not in the table."""
    table = _by_spelling()
    whole = _spelling(name)
    while whole and whole not in table:
        whole = whole.partition(".")[2]
    return table.get(whole)


def names() -> tuple[str, ...]:
    """Return every name in the table, in its trainer's spelling."""
    return tuple(name for line in EQUIVALENTS for name in line.split())


@cache
def _by_spelling() -> dict[str, Equivalent]:
    return {
        _spelling(name): meaning for line, meaning in EQUIVALENTS.items() for name in line.split()
    }


def _spelling(name: str) -> str:
    return name.strip("-+~").lower().replace("-", "").replace("_", "")


def _keys(*keys: str, note: str = "") -> Equivalent:
    return Equivalent(keys=keys, note=note)


def _either(note: str = "", **overrides: str) -> Equivalent:
    return Equivalent(overrides=overrides, note=note)


def _switch(on: str, off: str, note: str = "") -> Equivalent:
    return Equivalent(overrides={"true": on, "false": off, "1": on, "0": off}, note=note)


def _always(override: str, note: str = "") -> Equivalent:
    return Equivalent(overrides={"": override}, note=note)


def _see(key: str, note: str) -> Equivalent:
    return Equivalent(commands=(f"nanoscale config explain {key}",), note=note)


_FULL, _NONE = "parallel.activation_checkpointing=full", "parallel.activation_checkpointing=none"
_ACCUMULATION = "follows here from train.global_batch / (train.micro_batch · data-parallel degree)"
_PREPARED = "is prepared once, by `nanoscale data prepare`; then data=megatron data.path=FOLDER"

EQUIVALENTS: dict[str, Equivalent] = {
    # batches and length
    "batch_size": _keys("train.global_batch", "train.micro_batch"),
    "train_batch_size global_batch_size": _keys("train.global_batch"),
    "per_device_train_batch_size per_gpu_train_batch_size micro_batch_size device_batch_size "
    "local_batch_size train_micro_batch_size_per_gpu micro_bsz": _keys("train.micro_batch"),
    "per_device_eval_batch_size eval_batch_size": _see(
        "train.eval_samples", "is train.micro_batch here, as in training"
    ),
    "gradient_accumulation_steps accumulate_grad_batches grad_accum_steps": _see(
        "train.global_batch", _ACCUMULATION
    ),
    "max_steps train_iters num_train_steps total_steps total_num_steps max_iters num_steps": _keys(
        "train.steps"
    ),
    "num_train_epochs max_epochs num_epochs epochs": _keys("train.epochs"),
    "train_samples": _see("train.steps", "is given in steps: samples / train.global_batch"),
    "max_tokens total_tokens train_tokens": _keys("train.tokens"),
    "seq_length seq_len sequence_length max_seq_length block_size context_length model_max_length "
    "cutoff_len": _keys("train.seq_len"),
    # optimizer and schedule
    "learning_rate lr max_lr base_lr peak_lr optimizer.params.lr": _keys("optimizer.lr"),
    "optimizer.params.weight_decay wd": _keys("optimizer.weight_decay"),
    "adam_beta1": _keys("optimizer.beta1"),
    "adam_beta2": _keys("optimizer.beta2"),
    "optimizer.params.betas betas": _see(
        "optimizer.beta1", "is two keys here: optimizer.beta1 and optimizer.beta2"
    ),
    "adam_epsilon adam_eps optimizer.params.eps": _keys("optimizer.eps"),
    "sgd_momentum": _keys("optimizer.momentum"),
    "max_grad_norm gradient_clipping clip_grad max_norm gradient_clip_val grad_clip "
    "clip_grad_norm": _keys("optimizer.clip_norm"),
    "optim optimizer.type optimizer_type": _either(
        **{
            name: f"optimizer={own}"
            for own, rule in OPTIMIZERS.items()
            for name in (own, *rule.other_names)
        }
    ),
    "lr_scheduler_type lr_decay_style lr_scheduler.decay_type lr_scheduler scheduler.type": _either(
        cosine="scheduler=cosine",
        linear="scheduler=linear",
        constant="scheduler=constant",
        constant_with_warmup="scheduler=constant",
        warmup_stable_decay="scheduler=wsd",
        wsd="scheduler=wsd",
        warmuplr="scheduler=constant",
        warmupdecaylr="scheduler=linear",
        warmupcosinelr="scheduler=cosine",
    ),
    "warmup_steps warmup num_warmup_steps lr_warmup_iters lr_warmup_steps warmup_num_steps "
    "warmup_iters": _keys("scheduler.warmup_steps"),
    "warmup_ratio lr_warmup_fraction": _see(
        "scheduler.warmup_steps", "is given in steps here: scheduler.warmup_steps"
    ),
    "lr_wsd_decay_iters num_decay_steps": _keys("scheduler.decay_steps"),
    "decay_ratio lr_decay_iters lr_decay_samples": _see(
        "scheduler.decay_steps",
        "is the end of the training, or with scheduler=wsd scheduler.decay_steps",
    ),
    "min_lr_factor min_lr_ratio min_lr_rate": _keys("scheduler.min_ratio"),
    "min_lr": _see("scheduler.min_ratio", "is a share of optimizer.lr here: scheduler.min_ratio"),
    # precision
    "bf16 use_bf16 bf16.enabled": _switch("precision=bf16", "precision=fp32"),
    "fp16 use_fp16 fp16.enabled": _switch("precision=fp16", "precision=fp32"),
    "fp8 fp8_format enable_fp8": Equivalent(
        overrides={
            "true": "precision=fp8",
            "hybrid": "precision=fp8",
            "e4m3": "precision=fp8",
            "false": "precision.fp8=false",
        }
    ),
    "mixed_precision mixed_precision_param torch_dtype dtype params_dtype": _either(
        auto="precision=auto",
        bf16="precision=bf16",
        bfloat16="precision=bf16",
        fp16="precision=fp16",
        float16="precision=fp16",
        fp8="precision=fp8",
        fp32="precision=fp32",
        float32="precision=fp32",
        no="precision=fp32",
    ),
    "mixed_precision_reduce": _either(
        float32="precision.reduce=fp32", bfloat16="precision.reduce=bf16"
    ),
    "tf32 allow_tf32": _keys("precision.tf32"),
    "initial_loss_scale": _keys("precision.loss_scale"),
    "initial_scale_power": _see("precision.loss_scale", "is 2 to that power: precision.loss_scale"),
    "loss_scale_window": _keys("precision.loss_scale_window"),
    # layout
    "tensor_parallel_size tensor_model_parallel_size tensor_parallel_degree tp_size tp_degree "
    "autotp_size": _keys("parallel.tp"),
    "pipeline_parallel_size pipeline_model_parallel_size pipeline_parallel_degree pp_size pp_degree "
    "pipeline.stages": _keys("parallel.pp"),
    "context_parallel_size context_parallel_degree cp_size cp_degree sequence_parallel_size "
    "ulysses_sequence_parallel_size": _keys("parallel.cp"),
    "expert_model_parallel_size expert_parallel_size expert_parallel_degree ep_size ep_degree": _keys(
        "parallel.ep"
    ),
    "data_parallel_size dp_size dp_degree": _keys("parallel.dp"),
    "data_parallel_replicate_degree dp_replicate_size": _keys("parallel.dp_replicate"),
    "data_parallel_shard_degree dp_shard_size": _see(
        "parallel.dp_replicate", "is parallel.dp / parallel.dp_replicate here"
    ),
    "num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank": _see(
        "parallel.virtual_stages", "is counted in stages of a rank here: parallel.virtual_stages"
    ),
    "pipeline_parallel_schedule pp_schedule": Equivalent(
        overrides={
            "1f1b": "parallel.schedule=1f1b",
            "gpipe": "parallel.schedule=gpipe",
            "interleaved1f1b": "parallel.schedule=interleaved-1f1b",
            "loopedbfs": "parallel.schedule=looped-bfs",
            "interleavedzerobubble": "parallel.schedule=zero-bubble",
            "zbvzerobubble": "parallel.schedule=zbv",
            "dualpipev": "parallel.schedule=dualpipev",
        }
    ),
    "sequence_parallel enable_sequence_parallel": _keys("parallel.sequence_parallel"),
    "fsdp use_fsdp use_torch_fsdp2 fsdp2 fully_shard": Equivalent(
        overrides={
            "": "zero=stage3",
            "shard_grad_op": "zero=stage2",
            "no_shard": "zero=stage0",
            "hybrid_shard": "zero=stage3 parallel.dp_replicate=2",
            "false": "zero=stage0",
        }
    ),
    "ddp use_ddp": _switch("zero=stage0", "zero=stage3"),
    "fsdp_reshard_after_forward": Equivalent(
        overrides={
            "always": "zero=stage3",
            "true": "zero=stage3",
            "never": "zero=stage2",
            "false": "zero=stage2",
            "default": "zero=stage3",
        }
    ),
    "use_distributed_optimizer zero1": _switch("zero=stage1", "zero=stage0"),
    "gradient_checkpointing gradient_checkpointing_enable use_gradient_checkpointing "
    "recompute": _switch(_FULL, _NONE),
    "recompute_granularity activation_checkpoint.mode ac_mode": _either(
        full=_FULL, selective="parallel.activation_checkpointing=selective", none=_NONE
    ),
    "recompute_activations": _switch("parallel.activation_checkpointing=selective", _NONE),
    "enable_cpu_offload activation_offload": _keys("parallel.offload_activations"),
    # ZeRO, as in DeepSpeed's JSON
    "deepspeed deepspeed_config use_deepspeed": _always(
        "backend=deepspeed",
        note="is a backend here; its JSON is made from our keys and backend.extra",
    ),
    "zero_optimization.stage zero_stage": _keys("zero.stage"),
    "offload_optimizer.device offload_optimizer_device": _keys("zero.offload_optimizer"),
    "offload_param.device offload_param_device": _keys("zero.offload_param"),
    "cpu_offload": _switch("zero=stage2-offload", "zero.offload_optimizer=none"),
    "offload_optimizer.nvme_path offload_param.nvme_path": _keys("zero.nvme_path"),
    "reduce_bucket_size": _keys("backend.reduce_bucket"),
    "allgather_bucket_size": _keys("backend.allgather_bucket"),
    "stage3_prefetch_bucket_size": _keys("backend.prefetch_bucket"),
    "zero_optimization.overlap_comm": _switch(
        "backend.overlap_comm=on", "backend.overlap_comm=off"
    ),
    "zero_hpz_partition_size": _keys("zero.hpz"),
    "zero_quantized_weights": _keys("zero.quantized_weights"),
    "zero_quantized_gradients": _keys("zero.quantized_gradients"),
    # model
    "num_layers num_hidden_layers n_layer n_layers": _keys("model.layers"),
    "hidden_size n_embd d_model dim": _keys("model.hidden"),
    "num_attention_heads num_heads n_head n_heads": _keys("model.heads"),
    "num_query_groups num_key_value_heads n_kv_heads": _keys("model.kv_heads"),
    "kv_channels": _keys("model.head_dim"),
    "ffn_hidden_size intermediate_size": _keys("model.ffn"),
    "vocab_size padded_vocab_size": _keys("model.vocab"),
    "max_position_embeddings": _keys("model.max_seq_len"),
    "norm_epsilon rms_norm_eps layer_norm_epsilon": _keys("model.norm_eps"),
    "rotary_base": _keys("model.rope_theta"),
    "init_method_std initializer_range": _keys("model.init_std"),
    "tie_word_embeddings": _keys("model.tie_embeddings"),
    "untie_embeddings_and_output_weights": _switch(
        "model.tie_embeddings=false", "model.tie_embeddings=true"
    ),
    "num_experts num_local_experts": _keys("model.experts"),
    "moe_router_topk num_experts_per_tok": _keys("model.experts_per_token"),
    "moe_aux_loss_coeff router_aux_loss_coef": _keys("model.balance_rate"),
    "moe_router_load_balancing_type": _either(
        aux_loss="model.balance=aux", seq_aux_loss="model.balance=aux", none="model.balance=none"
    ),
    "model_name_or_path pretrained_model_name_or_path initial_load_path pretrained_checkpoint "
    "base_model": _keys("model.init_from"),
    "lora_r lora_rank": _keys("lora.rank"),
    "lora_alpha": _keys("lora.alpha"),
    "target_modules lora_target_modules": _see(
        "lora.targets", "is lora.targets here, with names of its own: wq wk wv wo gate up down"
    ),
    # data
    "data_path train_data_path": _keys("data.path", note="is read with data=megatron"),
    "valid_data_path": _keys("data.valid_path"),
    "dataset dataset_name dataset_path train_file data_files": Equivalent(
        commands=("nanoscale data prepare --help",), note=_PREPARED
    ),
    "tokenizer_name tokenizer_model tokenizer_name_or_path tokenizer_path": _keys("data.tokenizer"),
    "packing sample_packing": _switch("data.packing=whole", "data.packing=stream"),
    "reset_attention_mask": _keys("data.document_mask"),
    # saving, logging, evaluating
    "output_dir save_dir dump_folder default_root_dir checkpoint.folder": _keys("run.root"),
    "run_name wandb_exp_name experiment_name job_name": _keys("run.name"),
    "save_steps save_interval checkpoint.interval ckpt_interval": _keys("checkpoint.every"),
    "save_total_limit keep_latest_k": _keys("checkpoint.keep_last"),
    "async_save": _keys("checkpoint.asynchronous"),
    "async_mode": Equivalent(
        overrides={"disabled": "checkpoint.asynchronous=false", "": "checkpoint.asynchronous=true"}
    ),
    "resume resume_from_checkpoint resume_from load_checkpoint": Equivalent(
        commands=("nanoscale resume --help",),
        note="is a command here: nanoscale resume RUN continues from a run's newest checkpoint",
    ),
    "logging_steps log_interval log_freq steps_per_print log_every_n_steps": _keys(
        "train.log_every"
    ),
    "eval_steps eval_interval validation.freq val_check_interval eval_freq": _keys(
        "train.eval_every"
    ),
    "eval_iters": _see("train.eval_samples", "is given in samples here: train.eval_samples"),
    "report_to": _either(tensorboard="logger=tensorboard", none="logger=none"),
    "tensorboard_dir logging_dir tensorboard.output_path": _always(
        "logger=tensorboard", note="is tensorboard/ in the run directory"
    ),
    "enable_tensorboard tensorboard.enabled": _switch("logger=tensorboard", "logger=none"),
    "torch_compile compile.enable use_compile": _switch(
        "backend.compile=on", "backend.compile=off"
    ),
    "enable_profiling profile_freq profile_step_start": _see(
        "profile.steps", "is profile.steps here: which steps are recorded"
    ),
    # launching
    "nproc_per_node num_gpus gpus_per_node devices_per_node n_gpus ntasks_per_node": _keys(
        "launcher.devices"
    ),
    "nnodes num_nodes": _keys("launcher.nodes"),
    "ddp_timeout train_timeout_seconds init_timeout_seconds": _keys(
        "launcher.collective_timeout_s"
    ),
    "distributed_timeout_minutes": _see(
        "launcher.collective_timeout_s", "is given in seconds: launcher.collective_timeout_s"
    ),
    "world_size": _see("parallel.dp", "follows from the devices and the degrees of parallel"),
    "use_cpu no_cuda cpu": _switch("launcher.device=cpu", "launcher.device=cuda"),
    "job.config_file config_name config_file": _keys("recipe"),
}
"""Names, several separated by spaces, and their equivalents here."""
