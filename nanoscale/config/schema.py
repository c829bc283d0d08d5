"""Every key of a configuration: its type, default, unit and meaning. The project's vocabulary.

The reference documentation, `config ls` and `config explain` are generated from this file, and no
key exists that is not declared here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from nanoscale.config.objectives import ANSWERS, EVALUATED, PAIRED

Auto = Literal["auto"]
"""A value that nanoscale or its plan chooses."""


def key(
    default: Any,
    meaning: str,
    *,
    unit: str = "",
    at_least: float | None = None,
    at_most: float | None = None,
    scaled: Literal["no", "decimal", "binary"] = "no",
    executes: bool | str = False,
    path: bool = False,
    planned: bool = False,
) -> Any:
    """Declare a key. The bounds are inclusive.

    `scaled` lets an integer be written as `1e3`, `32k`, `5M`, `2G` or `1T`: powers of 1000 if decimal, powers
    of 1024 if binary, as in a context of 32k tokens.

    `executes` marks a key whose value is code or a program, or an argument or variable of one: nanoscale asks
    for confirmation before such a key of another user's run folder takes effect (`runs/trust.py`). The name of
    another key means that it does so only while that key is true.

    `path` marks a key whose texts name files or folders: they may hold environment variables, as in
    `${oc.env:DATA}/tokens`.

    `planned` marks a key that may be `auto`: the plan's search chooses its value (`plan/search/choice.py`).
    """
    metadata = {
        "meaning": meaning,
        "unit": unit,
        "at_least": at_least,
        "at_most": at_most,
        "scaled": scaled,
        "executes": executes,
        "path": path,
        "planned": planned,
    }
    if isinstance(default, (list, dict)):
        # Mutable defaults have no hash; a section still has one, from its other keys.
        return field(default_factory=default.copy, hash=False, metadata=metadata)
    return field(default=default, metadata=metadata)


def optional(meaning: str, **about: Any) -> Any:
    """Declare a key that is null unless it is set."""
    return key(None, meaning, **about)


@dataclass(frozen=True)
class Run:
    """One job in its run directory."""

    name: str | None = optional(
        "name of the run and of its directory; null: the recipe's name and the time"
    )
    root: str = key("runs", "folder that holds the run directories", path=True)
    tags: list[str] = key([], "words that name what belongs together; trackers show them")
    from_run: str | None = optional(
        "run, by its name or folder, whose weights this new one begins with, at step 1 and with the first data"
    )
    from_step: int | None = optional(
        "from_run: the step of the checkpoint; null: the newest, which is recorded", at_least=1
    )
    from_optimizer: bool = key(
        False, "from_run: take its weights of the last step and the optimizer's moments too"
    )


@dataclass(frozen=True)
class RopeScaling:
    """A scaling of the rotary frequencies beyond the original context."""

    factor: float = key(8.0, "ratio of the extended context to the original one", at_least=1)
    low_freq_factor: float = key(
        1.0, "llama3: wavelengths above original/low are scaled by the whole factor"
    )
    high_freq_factor: float = key(4.0, "llama3: wavelengths below original/high are not scaled")
    original_seq_len: int = key(
        8192, "context before the scaling", unit="tokens", at_least=1, scaled="binary"
    )
    kind: Literal["llama3", "linear", "dynamic", "yarn", "longrope"] = key(
        "llama3",
        "llama3: by wavelength, as in Llama 3.1 · linear: all by factor · dynamic: none up to max_seq_len · "
        "yarn: by rotations in the original context · longrope: by a list of factors",
    )
    beta_fast: float = key(32.0, "yarn: frequencies of more rotations are not scaled", at_least=0)
    beta_slow: float = key(
        1.0, "yarn: frequencies of fewer rotations are scaled by factor", at_least=0
    )
    truncate: bool = key(True, "yarn: the two limits are whole numbers of frequencies")
    attention_factor: float = key(
        1.0, "yarn, longrope: factor of the rotated queries and of the rotated keys", at_least=0
    )
    short_factor: list[float] = key(
        [], "longrope: divisor of each frequency in sequences of at most original_seq_len"
    )
    long_factor: list[float] = key([], "longrope: divisor of each frequency in longer sequences")


@dataclass(frozen=True)
class Model:
    """The shape of a decoder-only transformer; the families differ in these keys only."""

    source: Literal["own", "hf", "hooks"] = key(
        "own",
        "which code runs; own: nanoscale's transformer, shaped by the other keys · hf: the class of "
        "transformers, by its config.json · hooks: model() of hooks.path",
    )
    name: str = key(
        "custom",
        "name in tables and logs; hf: folder of a model, or its name at Hugging Face",
        executes="model.trust_remote_code",
        path=True,
    )
    layers: int = key(8, "transformer blocks", at_least=1, at_most=10_000)
    hidden: int = key(64, "width of the residual stream", at_least=1)
    heads: int = key(8, "query heads", at_least=1)
    kv_heads: int | None = optional("key and value heads; null: as many as heads", at_least=1)
    head_dim: int | None = optional("width of a head; null: hidden / heads", at_least=1)
    kv_rank: int | None = optional(
        "width of the latent that keys and values are computed from (MLA, as in DeepSeek-V3); null: no latent",
        at_least=1,
    )
    q_rank: int | None = optional(
        "kv_rank: width of the latent that queries are computed from; null: no latent", at_least=1
    )
    rope_head_dim: int = key(
        64,
        "kv_rank: numbers of a head that are rotated; all heads share the keys' rotated numbers",
        at_least=2,
    )
    v_head_dim: int | None = optional(
        "kv_rank: width of a head's values; null: head_dim", at_least=1
    )
    ffn: int = key(
        128, "inner width of the feed-forward block; with experts, of each expert", at_least=1
    )
    experts: int = key(0, "number of experts (MoE); 0: a dense feed-forward block", at_least=0)
    experts_per_token: int = key(2, "with experts: number of experts per token", at_least=1)
    normalize_experts: bool = key(
        True,
        "with experts: the weights of a token's experts add up to 1; false: they are the router's softmax, as "
        "in Qwen2-MoE",
    )
    shared_ffn: int = key(
        0,
        "with experts: inner width of a feed-forward block that every token uses in addition; 0: none",
        at_least=0,
    )
    shared_gate: bool = key(
        False,
        "shared_ffn: the sigmoid of a product with the token scales its result, as in Qwen2-MoE",
    )
    router: Literal["softmax", "sigmoid"] = key(
        "softmax",
        "with experts: function from products to scores; sigmoid: as in DeepSeek-V3, whose files hold a bias "
        "of the choice",
    )
    expert_scale: float = key(
        1.0, "with experts: factor of the weights of a token's experts", at_least=0
    )
    expert_groups: int = key(
        1,
        "with experts: groups of experts; a token chooses groups by their two best scores",
        at_least=1,
    )
    expert_groups_per_token: int = key(
        1, "expert_groups: groups from which a token chooses its experts", at_least=1
    )
    dense_layers: int = key(
        0, "with experts: first layers that have a dense feed-forward block instead", at_least=0
    )
    dense_ffn: int = key(128, "dense_layers: inner width of their feed-forward block", at_least=1)
    balance: Literal["none", "bias", "aux"] = key(
        "none",
        "with experts: method that balances their loads; bias: after every step, experts with "
        "less than the mean load get a higher routing bias; aux: an auxiliary loss per sequence",
    )
    balance_rate: float = key(
        1e-3,
        "bias: change of a routing bias per step, in units of the router's scores; aux: weight of the loss",
        at_least=0,
    )
    vocab: int = key(320, "rows of the embedding", unit="tokens", at_least=2)
    max_seq_len: int = key(
        2048, "longest sequence that the model allows", unit="tokens", at_least=1, scaled="binary"
    )
    norm: Literal["rmsnorm", "rmsnorm1p", "layernorm"] = key(
        "rmsnorm", "normalization; rmsnorm1p: RMSNorm whose weights are added to 1, as in Gemma"
    )
    norm_position: Literal["before", "after", "both"] = key(
        "before", "norms before attention and feed-forward, after them (OLMo-2), or both (Gemma 2)"
    )
    norm_eps: float = key(1e-5, "added to the variance", at_least=0)
    mlp: Literal["swiglu", "swiglu-clamped", "geglu", "gelu"] = key(
        "swiglu",
        "feed-forward block: gated by SiLU, by SiLU within bounds as in gpt-oss, or by GELU (tanh), or two "
        "matrices",
    )
    position: Literal["rope", "learned"] = key("rope", "encoding of positions")
    rope_theta: float = key(500000.0, "base of the rotary frequencies", at_least=1)
    rope_scaling: RopeScaling | None = optional("long-context scaling; null: none")
    rope_theta_local: float | None = optional(
        "base of the layers with a window, which are not scaled; null: rope_theta, scaled",
        at_least=1,
    )
    rope_fraction: float = key(1.0, "share of each head that is rotated", at_least=0, at_most=1)
    rope_pairs: Literal["halves", "neighbors"] = key(
        "halves", "numbers that rotate together: of the two halves, or neighbors, as in GLM-4"
    )
    rope_skip: int = key(
        0, "every n-th layer has no positions, as in SmolLM3; 0: none", unit="layers", at_least=0
    )
    bias: bool = key(False, "biases in the linear layers, experts and routers")
    qkv_bias: bool = key(False, "biases of queries, keys and values only, as in Qwen2")
    qk_norm: bool = key(
        False, "RMSNorm of each head's queries and keys before they are rotated, as in Qwen3"
    )
    qk_norm_whole: bool = key(
        False, "qk_norm: over all heads at once, with a weight for each number, as in OLMo-2"
    )
    attention_scale: float | None = optional(
        "factor of attention's scores; null: 1/√head_dim", at_least=0
    )
    attention_softcap: float | None = optional(
        "bound c of attention's scores, as c · tanh(score / c); null: none", at_least=1e-3
    )
    attention_sinks: bool = key(
        False, "a learned score of each head that takes a part of attention, as in gpt-oss"
    )
    logit_softcap: float | None = optional(
        "bound c of the logits, as c · tanh(logit / c); null: none", at_least=1e-3
    )
    embed_scale: float = key(1.0, "factor of the embedding's rows", at_least=0)
    residual_scale: float = key(1.0, "factor of what a block adds to the stream", at_least=0)
    logit_scale: float = key(1.0, "factor of the logits", at_least=0)
    sliding_window: int | None = optional(
        "tokens that attention covers, the current one included; null: all",
        unit="tokens",
        at_least=1,
    )
    full_attention_every: int = key(
        0,
        "sliding_window: every n-th layer attends to all tokens, as in Gemma (2, 6); 0: none",
        unit="layers",
        at_least=0,
    )
    tie_embeddings: bool = key(False, "output head shares the embedding's weights")
    init_std: float = key(0.02, "standard deviation of initial weights", at_least=0)
    init_from: str | None = optional(
        "folder or hub name of a Hugging Face model whose weights and shape to start from, or a run, by its "
        "name or folder, which becomes run.from_run; null: random weights",
        path=True,
    )
    trust_remote_code: bool = key(
        False, "hf: run the Python code that comes with the model", executes=True
    )
    hf_config: dict[str, Any] = key(
        {},
        "hf: config.json of model.name; a value that is set here wins over the file's",
        executes="model.trust_remote_code",
    )
    parameters: int | None = optional(
        "hf, hooks: number of parameters, counted before the launch; null: not counted yet",
        at_least=1,
    )
    kept_tensors: int = key(
        0,
        "tensors of init_from that are not trained, as of towers for images, counted before the launch: "
        "exports copy them",
        at_least=0,
    )

    def has_window(self, layer: int) -> bool:
        """Return True if attention of a layer is limited to `sliding_window`."""
        every = self.full_attention_every
        return self.sliding_window is not None and not (every and (layer + 1) % every == 0)

    def has_rotation(self, layer: int) -> bool:
        """Return True if a layer rotates queries and keys."""
        return self.position == "rope" and not (
            self.rope_skip and (layer + 1) % self.rope_skip == 0
        )

    def is_windowed(self, seq_len: int) -> bool:
        """Return True if `sliding_window` limits attention for sequences of this length."""
        return self.has_window(0) and seq_len > (self.sliding_window or 0)

    def of_layer(self, layer: int) -> Model:
        """Return the shape of a layer's block: dense in the first `dense_layers`."""
        return self.dense if layer < self.dense_layers else self

    @property
    def dense(self) -> Model:
        """The shape of the blocks without experts."""
        return replace(
            self, experts=0, shared_ffn=0, shared_gate=False, ffn=self.dense_ffn, dense_layers=0
        )

    @property
    def has_choice_bias(self) -> bool:
        """True if a bias of the experts' choice belongs to the weights."""
        return bool(self.experts) and (self.balance == "bias" or self.router == "sigmoid")

    @property
    def rotated_width(self) -> int:
        """Numbers of a head that are rotated."""
        return self.rope_head_dim if self.kv_rank else int(self.head_width * self.rope_fraction)

    @property
    def is_gated(self) -> bool:
        """True if the feed-forward block multiplies by an activated gate."""
        return self.mlp != "gelu"

    @property
    def head_width(self) -> int:
        """Width of a head, set or computed."""
        return self.head_dim or self.hidden // self.heads

    @property
    def value_width(self) -> int:
        """Width of a head's values, set or computed."""
        return self.v_head_dim or self.head_width

    @property
    def kv_head_count(self) -> int:
        """Key and value heads, set or computed."""
        return self.kv_heads or self.heads

    @property
    def q_width(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.kv_head_count * self.head_width


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters next to the blocks' linear layers; they alone are trained (arXiv:2106.09685)."""

    rank: int = key(
        0,
        "rows of A and columns of B in W + scale · B·A; 0: no adapters, all weights are trained",
        at_least=0,
    )
    alpha: float = key(16.0, "scale of the adapters: alpha/rank", at_least=0)
    rslora: bool = key(False, "scale adapters by alpha/√rank, so that larger ranks learn as fast")
    dora: bool = key(
        False,
        "also train the length of each row of W + scale · B·A, starting with W's length (arXiv:2402.09353)",
    )
    base: Literal["whole", "nf4"] = key(
        "whole",
        "frozen weights of the blocks' linear layers; nf4: in 4 bits, whole on each rank (QLoRA)",
    )
    targets: list[str] | None = optional(
        "layers with an adapter: wq wk wv wo gate up down, or with model=hf their names there; null: all "
        "linear layers, with experts of nanoscale's own model attention's"
    )

    init_from: str | None = optional(
        "PEFT folder whose adapters are the initial ones; model.init_from=FOLDER sets it, and rank, alpha, "
        "rslora, dora and targets; null: random A, and B = 0",
        path=True,
    )

    @property
    def scale(self) -> float:
        """The factor of B·A (rsLoRA: Kalajdzievski 2023, arXiv:2312.03732, section 3)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


Schedule = Literal[
    "gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zero-bubble", "zbv", "dualpipev"
]


@dataclass(frozen=True)
class Parallel:
    """The layout: world size = dp · tp · pp · cp, tp varying fastest, then cp, then dp, then pp."""

    @property
    def expert_tp(self) -> int:
        """The number of ranks that divide the width of each expert."""
        return 1 if self.ep_over_tp else self.tp

    @property
    def data_ep(self) -> int:
        """The number of ranks of dp and cp with the same place in tp that have different experts."""
        return self.ep * self.expert_tp // self.tp

    dp: int | Auto = key(
        "auto", "data-parallel degree; auto: what the other degrees leave", at_least=1
    )
    dp_replicate: int = key(
        1,
        "copies of the sharded model (HSDP); dp = dp_replicate · dp_shard",
        at_least=1,
        planned=True,
    )
    tp: int = key(1, "tensor-parallel degree", at_least=1, planned=True)
    pp: int = key(
        1, "pipeline-parallel degree; each rank has virtual_stages stages", at_least=1, planned=True
    )
    cp: int = key(1, "context-parallel degree", at_least=1, planned=True)
    ep: int = key(
        1,
        "expert-parallel degree: ranks of dp (within one replica) and cp that divide the experts",
        at_least=1,
        planned=True,
    )
    ep_over_tp: bool = key(
        False,
        "with tp: ranks of tp divide whole experts too, as ranks of ep, in place of each expert's width",
        planned=True,
    )
    sequence_parallel: bool = key(
        True,
        "with tp: also divide the sequence outside the tensor-parallel layers (norms, residual stream); "
        "model=hf has false",
    )
    tp_overlap: bool = key(
        False,
        "with tp on GPUs of one host with NVLink: run collectives during products (symmetric memory)",
    )
    cp_method: Literal["ring", "ulysses"] = key(
        "ring",
        "with cp: ring passes keys and values around; ulysses exchanges heads for the sequence",
        planned=True,
    )
    schedule: Schedule = key(
        "1f1b",
        "with pp: the order of forward and backward passes; zero-bubble is interleaved",
        planned=True,
    )
    virtual_stages: int | Auto = key(
        "auto",
        "stages per pipeline rank: 1 with gpipe and 1f1b, 2 with zbv and dualpipev, any number "
        "with the other schedules; auto: 1 or 2",
        at_least=1,
    )
    layers_per_stage: list[int] | None = optional(
        "blocks of every (virtual) stage, in order; the first and the last may have 0; null: divided by cost",
        at_least=0,
    )
    activation_checkpointing: Literal["none", "full", "selective"] = key(
        "none",
        "what to recompute in the backward pass: nothing · blocks · all except matrix products",
        planned=True,
    )
    activation_memory: float | None = optional(
        "share of the device's memory without states and work space that stored activations may fill: the "
        "plan chooses what is recomputed; null: the keys set it",
        at_least=0.01,
        at_most=1,
    )
    checkpoint_every: int = key(
        1,
        "activation_checkpointing=full or selective: recompute every k-th block only",
        at_least=1,
        planned=True,
    )
    selective_keep: Literal["core-attention", "attention", "matmuls", "every-2nd-matmul"] = key(
        "matmuls",
        "activation_checkpointing=selective: store results of attention · and sums over tp · and products",
        planned=True,
    )
    offload_activations: bool = key(
        False, "store activations in host memory until the backward pass"
    )


@dataclass(frozen=True)
class Precision:
    """The floating-point types of weights, products and gradients."""

    params: Literal["fp32", "fp64", "bf16"] = key(
        "fp32",
        "dtype of the master weights and optimizer states; bf16: no master weights, and updates are rounded "
        "stochastically",
    )
    compute: Literal["auto", "fp32", "bf16", "fp16", "fp64"] = key(
        "auto",
        "compute dtype of matrix products and activations; auto: bf16 on GPUs "
        "that have it, fp16 "
        "on older ones, fp32 on CPUs",
    )
    reduce: Literal["fp32", "bf16", "fp16", "fp64"] = key(
        "fp32", "dtype in which gradients are reduced across ranks"
    )
    tf32: bool | Auto = key(
        "auto",
        "fp32 on a GPU: round the factors of products to TF32's 10 bits of mantissa, which is several times "
        "faster; auto: where the GPU has it",
    )
    deterministic: bool = key(
        False,
        "compute the same bits again in the same layout: only operations that repeat exactly, without cuDNN's "
        "attention, NVLink SHARP and kernels chosen by timings; slower on GPUs",
    )
    fp8: bool = key(False, "compute the blocks' linear layers in 8 bits (torchao, H100 or newer)")
    fp8_recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8", "nvfp4"] = key(
        "tensorwise",
        "fp8: one scale per matrix (fastest) · per row (more accurate) · per row, with weight "
        "gradients in the compute dtype (most accurate) · per 32 numbers (MXFP8; B200 or newer) · "
        "per 16 numbers of 4 bits (NVFP4; B200 or newer)",
    )
    loss_scale: float = key(65536.0, "fp16: initial loss scale", at_least=1)
    loss_scale_window: int = key(
        2000,
        "fp16: steps without an overflow after which the scale doubles",
        unit="steps",
        at_least=1,
    )


@dataclass(frozen=True)
class Zero:
    """The sharding over data-parallel ranks, and its offload."""

    stage: Literal[0, 1, 2, 3] = key(
        0, "0 nothing (DDP) · 1 optimizer states · 2 + gradients · 3 + parameters", planned=True
    )
    offload_optimizer: Literal["none", "cpu", "nvme"] = key(
        "none",
        "where optimizer states are stored and updated; native: cpu, with offload_param · deepspeed: also "
        "alone, and nvme with stage 3",
    )
    offload_param: Literal["none", "cpu", "nvme"] = key(
        "none", "stage 3: where the parameter shards are stored; nvme: deepspeed"
    )
    nvme_path: str | None = optional("deepspeed: folder for states offloaded to nvme", path=True)
    hpz: int = key(
        1,
        "deepspeed, stage 3: ranks of a second, closer sharding of parameters (ZeRO++); 1: none",
        at_least=1,
    )
    quantized_weights: bool = key(
        False, "deepspeed, stage 3: gather parameters in 8 bits (ZeRO++), on GPUs"
    )
    quantized_gradients: bool = key(
        False, "deepspeed, stage 3: reduce gradients in 4 bits (ZeRO++), on GPUs"
    )
    prefetch: int = key(
        1,
        "native, stage 3: blocks whose parameters are gathered before they are needed",
        at_least=1,
    )


@dataclass(frozen=True)
class Backend:
    """The engine that trains."""

    name: Literal["native", "deepspeed"] = key(
        "native", "native: PyTorch's own parts · deepspeed: DeepSpeed's engine"
    )
    compile: Literal["auto", "on", "off"] = key(
        "off", "torch.compile of every block; auto: on a GPU, if the layout allows it"
    )
    attention: Literal["auto", "cudnn", "flash", "math"] = key(
        "auto",
        "attention kernel; auto: PyTorch's choice (cuDNN on Hopper and Blackwell, flash on "
        "Ampere) · math: separate operations, for any mask and dtype, with the most memory",
    )
    empty_cache: int = key(
        0,
        "steps after which torch's unused memory returns to the device, against fragmentation; 0: never",
        unit="steps",
        at_least=0,
    )
    overlap_comm: Literal["auto", "on", "off"] = key(
        "auto", "deepspeed: overlap gradient reduction with the backward pass; auto: with stage 3"
    )
    reduce_bucket: int = key(
        500_000_000,
        "deepspeed: gradients reduced in one call",
        unit="elements",
        at_least=1,
        scaled="decimal",
    )
    allgather_bucket: int = key(
        500_000_000,
        "deepspeed, stages 1 and 2: parameters gathered in one call",
        unit="elements",
        at_least=2,
        scaled="decimal",
    )
    prefetch_bucket: int = key(
        50_000_000,
        "deepspeed, stage 3: parameters gathered ahead of their use",
        unit="elements",
        at_least=0,
        scaled="decimal",
    )
    extra: dict[str, Any] = key(
        {},
        "deepspeed: further settings of its JSON that have no key here; merged last",
        executes=True,
    )


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with values of their own: an entry of `optimizer.groups`."""

    match: str = key("", "pattern of names in the whole model, in which `*` stands for any text")
    lr_factor: float = key(1.0, "multiple of the learning rate", at_least=0)
    weight_decay: float | None = optional("weight decay; null: as without the group", at_least=0)


@dataclass(frozen=True)
class Optimizer:
    """The update rule. Biases and normalization weights are never decayed."""

    name: Literal[
        "adamw", "sgd", "adamw8bit", "lion", "muon", "schedule-free", "adafactor", "hooks"
    ] = key(
        "adamw",
        "adamw · sgd with momentum · adamw with 8-bit moments (torchao) · lion · muon for the matrices of "
        "blocks, with adamw for the rest · schedule-free adamw · adafactor without momentum, with almost no "
        "state · optimizer() of hooks.path",
    )
    lr: float = key(3e-4, "peak learning rate", at_least=0)
    weight_decay: float = key(0.1, "decoupled, except L2 for sgd", at_least=0)
    beta1: float = key(
        0.9, "adamw: decay of the first moment; lion: of the direction", at_least=0, at_most=1
    )
    beta2: float = key(
        0.95, "adamw: decay of the second moment; lion: of the moment", at_least=0, at_most=1
    )
    eps: float = key(1e-8, "adamw: term added to the root of the second moment", at_least=0)
    momentum: float = key(0.9, "sgd and muon: momentum", at_least=0, at_most=1)
    moments_dtype: Literal["params", "bf16"] = key(
        "params", "adamw: dtype of its moments, the weights' dtype or bf16 with stochastic rounding"
    )
    ema_decay: float | None = optional(
        "decay of an exponential moving average of the weights in each step, which is evaluated and exported "
        "in their place; null: none",
        at_least=0,
        at_most=1,
    )
    groups: dict[str, ParameterGroup] = key(
        {},
        "parameters with values of their own, each NAME: {match, lr_factor, weight_decay}; match is a pattern "
        "of names such as *norm*, and the first group that matches counts",
    )
    qk_clip: float | None = optional(
        "largest attention score: after a step, heads with a larger one get smaller weights of queries and "
        "keys, as in Kimi K2 (100); null: no limit",
        at_least=1e-3,
    )
    clip_norm: float | None = key(
        1.0, "largest global gradient norm; null: no clipping", at_least=0
    )


@dataclass(frozen=True)
class Scheduler:
    """The learning rate over the steps, as a multiple of optimizer.lr."""

    name: Literal["cosine", "linear", "constant", "wsd", "inverse-sqrt", "piecewise"] = key(
        "cosine",
        "decay after the warm-up; wsd: warm-up, stable, decay · inverse-sqrt: with 1/√step · piecewise: "
        "linear between the lr of train.phases",
    )
    warmup_steps: int = key(
        0,
        "steps of linear warm-up; a recipe's number that is above train.steps becomes a tenth of them",
        unit="steps",
        at_least=0,
        scaled="decimal",
    )
    decay_steps: int | None = optional(
        "wsd: steps of the final decay; null: a tenth of all", unit="steps", at_least=0
    )
    min_ratio: float = key(0.1, "final learning rate / peak learning rate", at_least=0, at_most=1)
    warmup: float | None = optional(
        "warm-up: below 1 a share of the steps, from 1 on steps, as warmup_steps; null: warmup_steps",
        at_least=0,
    )


@dataclass(frozen=True)
class DataSource:
    """One source of tokens: an entry of `data.mixture`."""

    path: str | None = optional("its files, as in data.path", path=True)
    weight: float | None = optional("its share; null: by its size, as for all others", at_least=0)
    valid_path: str | None = optional("its validation files, as in data.valid_path", path=True)


@dataclass(frozen=True)
class Data:
    """The training data and its tokenizer."""

    source: Literal["stdlib", "megatron", "datatrove", "npy", "random", "hooks"] = key(
        "stdlib",
        "stdlib: the running Python's own source code · megatron: a .bin/.idx, or a folder of "
        "`nanoscale data prepare` · datatrove: a .ds · npy: raw tokens, as of OLMo, or numpy.save · "
        "random: tokens drawn from train.seed, without files · hooks: data() of hooks.path",
    )
    path: str | None = optional(
        "megatron: path of the .bin and .idx, without the ending, or of a prepared folder, which also "
        "says valid_path and tokenizer, or a file of texts or chats · datatrove, npy: path of the file",
        path=True,
    )
    valid_path: str | None = optional(
        "validation files, in the format of path; then nothing of path is held out", path=True
    )
    mixture: dict[str, DataSource] = key(
        {},
        "data mixture: several sources instead of path, each NAME: {path, weight, valid_path}; a "
        "weight is the source's share of the samples; without weights, shares follow the sizes",
        path=True,
    )
    tokenizer: str = key(
        "byte",
        "byte · bpe (trained on the corpus) · path of a tokenizer.json or a .model, to print samples",
        path=True,
    )
    bpe_vocab: int = key(4096, "tokens of a trained BPE, at most", unit="tokens", at_least=257)
    valid_fraction: float = key(
        0.02, "share of the tokens held out, whole documents from the end", at_least=0, at_most=0.9
    )
    eos: int | None = optional(
        "npy: id of the token that ends a document, which the file does not say", at_least=0
    )
    packing: Literal["stream", "whole"] = key(
        "stream",
        "stream: documents follow each other, cut every train.seq_len · whole: each document "
        "stays in one sequence, and the rest of a sequence is padded",
    )
    document_mask: bool = key(
        False,
        "attention stays within a document, and positions restart with each; always true with packing=whole",
    )
    document_length: int | None = optional(
        "document_mask: length of documents that plan and rehearsal assume; null: train.seq_len",
        unit="tokens",
        at_least=1,
    )
    loss_on: Literal["auto", "all", "answers"] = key(
        "auto",
        "tokens with a loss: all, or the answers of chats · auto: answers if path marks them, as "
        "`nanoscale data prepare --chat` does",
    )
    cache_dir: str | None = optional(
        "folder of prepared corpora; null: nanoscale/ in the user's cache folder", path=True
    )
    prepare_cores: int | None = optional(
        "cores of the launcher's host that prepare large texts beside the training; null: a quarter",
        at_least=1,
    )


@dataclass(frozen=True)
class Checkpoint:
    """The saving and keeping of checkpoints."""

    every: int = key(
        0, "steps between checkpoints; 0: no checkpoints by steps", unit="steps", at_least=0
    )
    every_minutes: float | None = key(
        15.0,
        "time since the start or the last checkpoint after which one is saved, in addition to "
        "every; 0 or null: no checkpoints by time",
        unit="min",
        at_least=0,
    )
    memory_every: int | Auto = key(
        0,
        "steps between checkpoints in the memory of the hosts, from which launcher.max_restarts continues; "
        "0: none · auto: the number that loses least time by the plan and launcher.mtbf_hours, 0 if the "
        "interval on disk loses less",
        unit="steps",
        at_least=0,
    )
    keep_last: int | None = key(
        2,
        "number of newest checkpoints to keep; null: all, except that only the newest saved by time is kept",
        at_least=1,
    )
    keep_every: int | None = optional(
        "also keep checkpoints of steps that are a multiple of this", unit="steps", at_least=1
    )
    keep_best: int = key(
        0,
        "also keep the checkpoints with the lowest evaluation losses, this many; an evaluation that is one of "
        "them saves one. 0: none",
        at_least=0,
    )
    best_metric: str = key(
        "eval_loss",
        "metric that checkpoint.keep_best compares: eval_loss, eval_accuracy of classify, eval_preferred or "
        "eval_margin of answers, or eval_tasks/TASK/METRIC of train.eval_tasks",
    )
    asynchronous: bool = key(
        False,
        "copy the state to host memory and write it while the training continues; after a crash "
        "during the write, the previous checkpoint remains",
    )
    upload: str | None = optional(
        "address below which checkpoints are uploaded during the training: s3://bucket/prefix, "
        "gs://bucket/prefix or file:///folder; resume fetches the newest one if the disk has none"
    )
    at_end: bool = key(True, "save when the training completes")
    at_stop: bool = key(True, "save when asked to stop (Ctrl-C, SIGTERM)")


@dataclass(frozen=True)
class Peaks:
    """The maker's peaks of dense matrix products, without sparsity; null: not supported in that type."""

    fp64: float | None = optional("peak in fp64", unit="TFLOP/s", at_least=0.001)
    fp32: float | None = optional("peak in fp32, not TF32", unit="TFLOP/s", at_least=0.001)
    tf32: float | None = optional(
        "peak in TF32; null: the peak in fp32", unit="TFLOP/s", at_least=0.001
    )
    fp16: float | None = optional("peak in fp16", unit="TFLOP/s", at_least=0.001)
    bf16: float | None = optional("peak in bf16", unit="TFLOP/s", at_least=0.001)
    fp8: float | None = optional("peak in 8 bits", unit="TFLOP/s", at_least=0.001)
    nvfp4: float | None = optional("peak in NVFP4", unit="TFLOP/s", at_least=0.001)


@dataclass(frozen=True)
class Reached:
    """The speed of the maker's libraries, hot and with random numbers; null: a usual share of the peak."""

    matmul: float | None = optional(
        "share of the peak that large products reach in 16 bits or more", at_least=0.001
    )
    matmul_fp8: float | None = optional(
        "share of the peak that large products reach in 8 bits", at_least=0.001
    )
    attention: float | None = optional(
        "share of the 16-bit peak that FlashAttention reaches forward with long sequences",
        at_least=0.001,
    )
    attention_cudnn: float | None = optional(
        "the same for cuDNN's attention; null: PyTorch does not choose it", at_least=0.001
    )
    memory: float | None = optional(
        "share of the memory bandwidth that element-wise kernels reach", at_least=0.001
    )
    intra_host: float | None = optional(
        "share of intra_host_gbs that collectives reach", at_least=0.001
    )
    inter_host: float | None = optional(
        "share of inter_host_gbs that collectives reach", at_least=0.001
    )


@dataclass(frozen=True)
class Cluster:
    """The hardware; what is null is looked up by the device's name."""

    device: str | None = optional(
        "option of this group or your own name; null: the devices of this machine"
    )
    recognised: list[str] = key([], "names that drivers report for this device, without its maker")
    devices_per_host: int | None = optional("devices in a host", at_least=1)
    hosts: int | None = optional("number of hosts; null: as many as the layout needs", at_least=1)
    island: int | None = optional(
        "devices that the fast links join; null: the devices of a host", at_least=1
    )
    pod: int | None = optional(
        "hosts that the network joins at inter_host_gbs; null: all of them", at_least=1
    )
    memory_gib: float | None = optional(
        "memory of a device, as torch sees it", unit="GiB", at_least=0.001
    )
    context_gib: float | None = optional(
        "device memory that CUDA, libraries and NCCL use outside torch's allocator",
        unit="GiB",
        at_least=0,
    )
    memory_gbs: float | None = optional(
        "bandwidth of a device's memory", unit="GB/s", at_least=0.001
    )
    multiprocessors: int | None = optional(
        "multiprocessors of a device; each computes one tile of a product at a time", at_least=1
    )
    compute_capability: float | None = optional(
        "CUDA's compute capability, such as 9.0; null: 9.0, or no CUDA device", at_least=1
    )
    peak_tflops: float | None = optional(
        "dense peak of one device at the trained precision; null: from peaks",
        unit="TFLOP/s",
        at_least=0.001,
    )
    peaks: Peaks = field(default_factory=Peaks)
    reached: Reached = field(default_factory=Reached)
    intra_host_gbs: float | None = optional(
        "bandwidth of the fast links (NVLink, xGMI, PCIe), per device and direction",
        unit="GB/s",
        at_least=0.001,
    )
    intra_host_us: float | None = optional(
        "latency of a step over the fast links", unit="µs", at_least=0
    )
    inter_host_gbs: float | None = optional(
        "bandwidth of the network between hosts, per device and direction",
        unit="GB/s",
        at_least=0.001,
    )
    inter_host_us: float | None = optional(
        "latency of a step over the network", unit="µs", at_least=0
    )
    inter_pod_gbs: float | None = optional(
        "bandwidth of the network between pods, per device and direction; null: as between hosts",
        unit="GB/s",
        at_least=0.001,
    )
    host_link_gbs: float | None = optional(
        "bandwidth of the link to host memory, per device and direction",
        unit="GB/s",
        at_least=0.001,
    )
    host_memory_gib: float | None = optional("memory of a host", unit="GiB", at_least=0.001)
    host_memory_gbs: float | None = optional(
        "bandwidth of a host's memory", unit="GB/s", at_least=0.001
    )
    price: float | None = optional(
        "price of a device per hour, in any currency; null: no costs are shown", at_least=0
    )
    reference: list[str] = key(
        [], "overrides of cluster with which `plan` plans a recipe where there is no GPU"
    )
    efficiency: str | None = optional(
        "file of efficiencies learned by `nanoscale plan --calibrate`; null: the assumed ones",
        path=True,
    )
    python: str | None = optional(
        "Python interpreter on the other hosts, with nanoscale installed; null: the path of this one",
        executes=True,
        path=True,
    )


BatchName = Literal["slurm", "pbs", "lsf"]
"""The batch systems, each a class of `nanoscale/launch/batch/`."""
LauncherName = Literal["local", "ssh", "pdsh", BatchName, "env", "kubernetes", "skypilot"]


@dataclass(frozen=True)
class BatchOptions:
    """The settings that all batch systems have."""

    account: str | None = optional("account or project to charge")
    time: str | None = optional("time limit: minutes, H:MM:SS or D-HH:MM:SS, in quotes")
    setup: list[str] = key(
        [], "shell lines to run first in the batch script, as in `module load`", executes=True
    )
    directives: list[str] = key(
        [],
        "further options of sbatch (as in `--mail-type=END`), qsub or bsub (`-m ae`)",
        executes=True,
    )
    signal_before_s: int = key(
        120, "time before the limit at which to save and stop", unit="s", at_least=0
    )
    max_requeues: int = key(
        10, "how often a job stopped by its time limit is queued again automatically", at_least=0
    )


@dataclass(frozen=True)
class BatchSettings(BatchOptions):
    """The settings of launcher=pbs and lsf; null or empty: the site's default."""

    queue: str | None = optional("queue")
    resources: str | None = optional(
        "resources of a node: pbs, as in `ncpus=64:ngpus=8`; lsf, the value of -gpu"
    )


@dataclass(frozen=True)
class Slurm(BatchOptions):
    """The settings of launcher=slurm; null or empty: the site's default."""

    partition: str | None = optional("partition, or several with commas")
    qos: str | None = optional("quality of service")
    exclusive: bool = key(True, "use nodes exclusively")
    constraint: str | None = optional("features that the nodes must have")
    gpus: str | None = optional(
        "value of --gpus-per-node, as in `h100:8`; null: launcher.devices on cuda"
    )


@dataclass(frozen=True)
class Launcher:
    """The start of the ranks: hosts, devices and time limits."""

    name: LauncherName = key(
        "local",
        "local: on this machine · ssh, pdsh: on the hosts of a hostfile · slurm: by SLURM · pbs, lsf: on the "
        "hosts of a job of PBS or LSF, through ssh · env: in the processes "
        "that another program has started, each with RANK and WORLD_SIZE · kubernetes, skypilot: "
        "`nanoscale submit` writes a file for them",
    )
    device: Literal["auto", "cpu", "cuda"] = key(
        "auto", "auto: cuda where there is a GPU, and on other hosts"
    )
    devices: int | Auto = key(
        "auto",
        "ranks on a host; auto: every GPU or slot, or what the layout needs on cpu",
        at_least=1,
    )
    threads: int | Auto = key(
        "auto", "CPU threads per rank; auto: the cores divided among the ranks", at_least=1
    )
    hostfile: str | None = optional(
        "file of hosts, each line `HOST slots=N`; implies launcher=ssh unless a launcher is chosen",
        executes=True,
        path=True,
    )
    include: str | None = optional(
        "use these hosts or slots only: `h1@h2:0,2`, without users, IPv6 in brackets"
    )
    exclude: str | None = optional("use all hosts and slots but these: `h1@h2:0,2`")
    exclude_file: str | None = optional("file of hosts that are never used, one a line", path=True)
    nodes: int | str | None = optional(
        "hosts to use: N, the first of the hostfile; or 'MIN:MAX', an elastic job that continues "
        "while MIN hosts are left; null: all"
    )
    master_addr: str | None = optional(
        "address at which the other hosts reach the first; null: its name in the hostfile"
    )
    master_port: int | Auto = key(
        "auto", "rendezvous port on the first host; auto: a free one", at_least=1, at_most=65535
    )
    max_restarts: int = key(
        0, "automatic restarts from the newest checkpoint after a failure", at_least=0
    )
    exclude_stragglers: float | None = optional(
        "least slowdown by a host at which an elastic job on CPUs leaves it out, as 1.3; null: never",
        at_least=1,
    )
    mtbf_hours: float = key(
        5700.0, "mean time between failures of one host, for plans", unit="h", at_least=0.001
    )
    notify: str | None = optional(
        "name of the environment variable with the http address that gets each change of the run's state, as "
        "SLACK_WEBHOOK; null: nobody"
    )
    notice: str | None = optional(
        "source of a notice that a host will be taken away, upon which the run saves and stops: aws, gcp, "
        "azure, a file that appears, or a URL that answers 200 with a body; null: none"
    )
    stop_grace_s: float = key(
        120.0, "time for a clean stop before all processes are killed", unit="s", at_least=0
    )
    lost_after_s: float = key(
        5.0,
        "time after which a host or launcher without a heartbeat, or a stopped rank, counts as lost",
        unit="s",
        at_least=1,
    )
    connect_timeout_s: float = key(
        20.0, "time limit for the first answer of a host", unit="s", at_least=1
    )
    collective_timeout_s: float = key(
        600.0, "time limit of a collective operation", unit="s", at_least=1
    )
    preflight: bool = key(True, "check every host before the launch")
    pass_env: list[str] = key(
        [],
        "further environment variables to forward to the other hosts: names, or prefixes with `*`",
        executes=True,
    )
    env: dict[str, Any] = key({}, "environment variables to set for the ranks", executes=True)
    container: str | None = optional(
        "image that agents and ranks run in; null: none", executes=True, path=True
    )
    container_runtime: Literal["auto", "pyxis", "docker", "apptainer"] = key(
        "auto", "program that runs the image on hosts; auto: pyxis with slurm, otherwise docker"
    )
    container_mounts: list[str] = key(
        [],
        "folders to mount in the image, each HOST:INSIDE; kubernetes: claims, each CLAIM:INSIDE",
        executes=True,
        path=True,
    )
    ssh_args: list[str] = key([], "further arguments of ssh, as in `-p`, `2222`", executes=True)
    slurm: Slurm = field(default_factory=Slurm)
    batch: BatchSettings = field(default_factory=BatchSettings)


@dataclass(frozen=True)
class Logger:
    """The outputs of metrics besides metrics.jsonl."""

    tensorboard: Literal["auto", "on", "off"] = key(
        "off", "write TensorBoard event files; auto: if it is installed"
    )
    csv: bool = key(False, "write metrics.csv, a table with one row per logged step")
    wandb: Literal["off", "online", "offline"] = key(
        "off", "Weights & Biases; offline: only write its files, which `wandb sync` uploads later"
    )
    mlflow: Literal["off", "on"] = key("off", "record in MLflow")
    mlflow_uri: str | None = optional(
        "MLflow's server or database; null: MLFLOW_TRACKING_URI, else the file mlflow.db in run.root",
        path=True,
    )
    project: str = key("nanoscale", "the project in Weights & Biases and the experiment in MLflow")
    wandb_entity: str | None = optional(
        "the user or team in Weights & Biases; null: the default of the API key"
    )


@dataclass(frozen=True)
class Profile:
    """The profiling of some steps, into the run's profile/ folder."""

    steps: int | str | list[int] | None = optional(
        "steps to record: 10, '10-12' (inclusive) or [10,20], counted over the whole run; each "
        "range is one trace of torch.profiler, on a GPU with a memory snapshot; null: none",
        unit="steps",
        at_least=1,
    )
    ranks: list[int] = key([0], "ranks to record", at_least=0)


@dataclass(frozen=True)
class StopWhen:
    """The end of a training before its last step, judged at each evaluation and after each step."""

    patience: int = key(
        0,
        "evaluations in a row without a lower loss after which the training completes; 0: no limit",
        unit="evaluations",
        at_least=0,
    )
    min_delta: float = key(0.0, "a loss counts as lower if it is so by more than this", at_least=0)
    eval_loss: float | None = optional(
        "the training completes when the evaluation loss is at most this; null: no limit"
    )
    last_step: int | None = optional(
        "the training completes after this step, and the learning rate's schedule still ends at train.steps; "
        "null: no limit",
        unit="steps",
        at_least=1,
    )


@dataclass(frozen=True)
class PhaseSettings:
    """Some steps of a training, with values of their own: an entry of `train.phases`."""

    until: int | None = optional("its last step; null in the last phase", scaled="decimal")
    until_tokens: int | None = optional(
        "tokens after which it ends, in place of until", at_least=1, scaled="decimal"
    )
    lr: float | None = optional("piecewise: multiple of the peak rate at its end", at_least=0)
    global_batch: int | None = optional("null: train.global_batch", scaled="decimal")
    seq_len: int | None = optional("null: train.seq_len", unit="tokens", scaled="binary")
    weights: dict[str, float] | None = optional("weights of the sources; null: of data.mixture")


@dataclass(frozen=True)
class Train:
    """The length, the batches and the intervals of the training."""

    steps: int | None = optional(
        "optimizer steps; null: from train.tokens or train.epochs",
        unit="steps",
        at_least=1,
        at_most=10**12,
        scaled="decimal",
    )
    tokens: int | None = optional(
        "tokens to train on, rounded up to whole steps; excludes train.steps",
        unit="tokens",
        at_least=1,
        at_most=10**18,
        scaled="decimal",
    )
    epochs: float | None = optional(
        "how often the samples of one file are seen, rounded up to whole steps; excludes train.steps and "
        "train.tokens. On a small file a recipe's global_batch is halved until there are 10 steps",
        unit="epochs",
        at_least=0,
        at_most=10**6,
    )
    global_batch: int = key(
        8,
        "samples per optimizer step; with an objective of pairs sequences, two of each pair",
        unit="samples",
        at_least=1,
        at_most=10**6,
        scaled="decimal",
    )
    micro_batch: int | Auto = key(
        "auto",
        "samples per rank and forward pass; auto: the most that fit by the plan, with at least "
        "90 %, and that leave enough micro batches for all stages of a pipeline",
        unit="samples",
        at_least=1,
    )
    seq_len: int = key(
        64, "tokens per sample", unit="tokens", at_least=1, at_most=2**30, scaled="binary"
    )
    phases: dict[str, PhaseSettings] = key(
        {},
        "phases in their order, each NAME: {until or until_tokens, lr, global_batch, seq_len, weights}: "
        "from a step on, another batch, shorter sequences, other weights of the sources",
    )
    seed: int = key(0, "seed of the initial weights and of the order of samples", at_least=0)
    log_every: int = key(1, "steps between logged steps", unit="steps", at_least=1)
    eval_every: int = key(
        0, "steps between evaluations on the validation split; 0: never", unit="steps", at_least=0
    )
    eval_samples: int = key(
        64, "validation samples per evaluation", unit="samples", at_least=1, scaled="decimal"
    )
    eval_tasks: list[str] = key(
        [],
        "lm-eval tasks that every evaluation runs as well; tasks that score given answers, or whole texts",
    )
    eval_tasks_dir: str | None = optional(
        "folder with more tasks for train.eval_tasks, which may have code", executes=True
    )
    eval_tasks_limit: int | None = optional(
        "documents of each task per evaluation; null: all", at_least=1
    )
    gc_every: int = key(
        50,
        "steps between collections of Python's garbage, in which all ranks pause at once; 0: Python decides "
        "on each rank alone",
        unit="steps",
        at_least=0,
    )
    statistics_every: int = key(
        0,
        "steps between statistics of each layer, in statistics.jsonl: norms of weights and gradients, sizes of "
        "activations, the largest attention score; 0: none",
        unit="steps",
        at_least=0,
    )
    stop_when: StopWhen = field(default_factory=StopWhen)
    on_spike: Literal["note", "stop", "rollback"] = key(
        "note",
        "after a loss far above the last ones: note it and continue, stop the run, or go back to the "
        "checkpoint before it and skip the batches since then",
    )
    objective: Literal[
        "next-token", "masked", "dpo", "orpo", "kto", "distill", "hooks", "classify"
    ] = key(
        "next-token",
        "what the loss is of; next-token: of every token · masked: of hidden tokens, by an encoder (model=hf) "
        "· dpo: of pairs of a chosen and a rejected answer, compared with the initial weights · orpo: of such "
        "pairs, without a reference · kto: of single answers, good or bad, compared with the initial weights "
        "· distill: of all tokens and the likely ones of train.teacher · hooks: of every token, by loss() of "
        "hooks.path · classify: of a text's label (model=hf)",
    )
    teacher: str | None = optional(
        "distill: folder or hub name of a Hugging Face model whose likely tokens are stored before step 1",
        path=True,
    )
    distill_top_k: int = key(
        64,
        "distill: tokens of the teacher that are stored at each position",
        unit="tokens",
        at_least=1,
    )
    distill_weight: float = key(
        0.5,
        "distill: weight of the teacher; 0: only cross-entropy, 1: only the teacher",
        at_least=0,
        at_most=1,
    )
    distill_temperature: float = key(
        1.0, "distill: divisor of the logits of teacher and student", at_least=0.01, at_most=1000
    )
    preference_beta: float = key(
        0.1,
        "dpo, kto: strength of the reference · orpo: weight of the odds ratio beside the chosen answer's loss",
        at_least=0,
    )
    desirable_weight: float = key(1.0, "kto: weight of the losses of good answers", at_least=0)
    undesirable_weight: float = key(1.0, "kto: weight of the losses of bad answers", at_least=0)
    mask_share: float = key(
        0.15,
        "masked: share of the tokens that are predicted; 8 of 10 are hidden, 1 is another token, 1 stays",
        at_least=0.001,
        at_most=1,
    )
    mask_token: int | None = optional(
        "masked: the id of the token that hides others, as 103 of BERT", at_least=0
    )
    z_loss: float = key(
        0.0,
        "weight of the squared logarithm of the softmax's denominator, only in the gradients; PaLM: 1e-4",
        at_least=0,
    )
    sample_prompt: str | None = key(
        "", "text that a sample after the training continues; null: none"
    )
    sample_tokens: int = key(
        0, "length of the sample after the training; 0: no sample", unit="tokens", at_least=0
    )
    labels: int | None = optional("classify: the number of classes", at_least=2)

    @property
    def is_paired(self) -> bool:
        """True if samples are pairs of rows."""
        return self.objective in PAIRED

    @property
    def is_of_answers(self) -> bool:
        """True if the loss is of whole answers: of pairs, or of good and bad ones."""
        return self.objective in ANSWERS

    @property
    def has_whole_documents(self) -> bool:
        """True if each document has a row of its own."""
        return self.is_of_answers or self.objective == "classify"

    @property
    def rows_of_sample(self) -> int:
        """The rows of a batch that belong together."""
        return 2 if self.is_paired else 1

    @property
    def is_masked(self) -> bool:
        """True if hidden tokens are predicted from both sides."""
        return self.objective == "masked"

    @property
    def is_distilled(self) -> bool:
        """True if tokens have the most likely tokens of a teacher in addition to their targets."""
        return self.objective == "distill"

    @property
    def needs_reference(self) -> bool:
        """True if the loss compares with the likelihoods by the initial weights."""
        return self.objective in ("dpo", "kto")

    @property
    def evaluated(self) -> tuple[str, ...]:
        """The metrics of every evaluation, without metrics of tasks."""
        return ("eval_loss", *EVALUATED.get(self.objective, ()))


@dataclass(frozen=True)
class Guard:
    """The detection of wrong computation while a run trains."""

    every: int | None = optional(
        "steps between comparisons of tensors that several ranks hold equally, in addition to one before each "
        "checkpoint; null: only before checkpoints; 0: never",
        unit="steps",
        at_least=0,
    )


@dataclass(frozen=True)
class Hooks:
    """Own code in the place of nanoscale's: a model, a loss, an optimizer, data, and what follows a step."""

    path: str | None = optional(
        "Python file with functions of these names; a run keeps a copy; null: none",
        executes=True,
        path=True,
    )
    sha256: str | None = optional(
        "path: the digest that it must have, in hexadecimal digits; null: any, which is recorded",
        executes=True,
    )
    settings: dict[str, Any] = key(
        {}, "values for your own functions, which read them as config.hooks.settings", executes=True
    )


@dataclass(frozen=True)
class Config:
    """A whole job."""

    run: Run = field(default_factory=Run)
    model: Model = field(default_factory=Model)
    lora: Lora = field(default_factory=Lora)
    parallel: Parallel = field(default_factory=Parallel)
    precision: Precision = field(default_factory=Precision)
    zero: Zero = field(default_factory=Zero)
    backend: Backend = field(default_factory=Backend)
    optimizer: Optimizer = field(default_factory=Optimizer)
    scheduler: Scheduler = field(default_factory=Scheduler)
    data: Data = field(default_factory=Data)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    cluster: Cluster = field(default_factory=Cluster)
    launcher: Launcher = field(default_factory=Launcher)
    logger: Logger = field(default_factory=Logger)
    train: Train = field(default_factory=Train)
    profile: Profile = field(default_factory=Profile)
    guard: Guard = field(default_factory=Guard)
    hooks: Hooks = field(default_factory=Hooks)
