"""Every key of a configuration: its type, default, unit and meaning. The project's vocabulary.

The reference documentation, `config ls` and `config explain` are generated from this file, and no
key exists that is not declared here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


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
) -> Any:
    """Declare a key. The bounds are inclusive.

    `scaled` lets an integer be written as `1e3`, `32k`, `5M`, `2G` or `1T`: powers of 1000 if decimal, powers
    of 1024 if binary, as in a context of 32k tokens.

    `executes` marks a key whose value is code or a program, or an argument or variable of one: nanoscale asks
    for confirmation before such a key of another user's run folder takes effect (`runs/trust.py`). The name of
    another key means that it does so only while that key is true.

    `path` marks a key whose texts name files or folders: they may hold environment variables, as in
    `${oc.env:DATA}/tokens`.
    """
    metadata = {
        "meaning": meaning,
        "unit": unit,
        "at_least": at_least,
        "at_most": at_most,
        "scaled": scaled,
        "executes": executes,
        "path": path,
    }
    if isinstance(default, (list, dict)):
        # Mutable defaults have no hash; a section still has one, from its other keys.
        return field(default_factory=default.copy, hash=False, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Run:
    """One job in its run directory."""

    name: str | None = key(
        None, "name of the run and of its directory; null: the recipe's name and the time"
    )
    root: str = key("runs", "folder that holds the run directories", path=True)
    tags: list[str] = key([], "words that name what belongs together; trackers show them")


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of the rotary frequencies beyond the original context."""

    factor: float = key(8.0, "how much longer the context has become", at_least=1)
    low_freq_factor: float = key(1.0, "wavelengths above original/low are stretched in full")
    high_freq_factor: float = key(4.0, "wavelengths below original/high are left alone")
    original_seq_len: int = key(8192, "context before the stretching", unit="tokens", at_least=1)


@dataclass(frozen=True)
class Model:
    """The shape of a decoder-only transformer; the families differ in these keys only."""

    source: Literal["own", "hf"] = key(
        "own",
        "whose code it is; own: the transformer that the other keys shape · hf: transformers', by config.json",
    )
    name: str = key(
        "custom",
        "what to call it in tables and logs; hf: folder of a model, or its name at Hugging Face",
        executes="model.trust_remote_code",
        path=True,
    )
    layers: int = key(8, "transformer blocks", at_least=1)
    hidden: int = key(64, "width of the residual stream", at_least=1)
    heads: int = key(8, "query heads", at_least=1)
    kv_heads: int | None = key(None, "key and value heads; null: as many as heads", at_least=1)
    head_dim: int | None = key(None, "width of a head; null: hidden / heads", at_least=1)
    ffn: int = key(128, "width inside the feed-forward block, of each expert", at_least=1)
    experts: int = key(
        0,
        "feed-forward blocks of which each token takes some (mixture of experts); 0: one for all",
        at_least=0,
    )
    experts_per_token: int = key(2, "with experts: how many of them a token takes", at_least=1)
    balance: Literal["none", "bias", "aux"] = key(
        "none",
        "with experts: what keeps their loads alike; bias: after every step, those with less than the "
        "mean are preferred a little more; aux: a further loss of each sequence",
    )
    balance_rate: float = key(
        1e-3,
        "bias: how far a step moves a preference, in units of the router's softmax; aux: weight of the loss",
        at_least=0,
    )
    vocab: int = key(320, "rows of the embedding", unit="tokens", at_least=2)
    max_seq_len: int = key(
        2048, "longest sequence the model admits", unit="tokens", at_least=1, scaled="binary"
    )
    norm: Literal["rmsnorm", "layernorm"] = key("rmsnorm", "normalisation before each block")
    norm_eps: float = key(1e-5, "added to the variance", at_least=0)
    mlp: Literal["swiglu", "gelu"] = key("swiglu", "feed-forward block: gated, or two matrices")
    position: Literal["rope", "learned"] = key("rope", "how positions enter")
    rope_theta: float = key(500000.0, "base of the rotary frequencies", at_least=1)
    rope_scaling: RopeScaling | None = key(None, "Llama 3.1's long-context scaling; null: none")
    bias: bool = key(False, "biases in the linear layers")
    qkv_bias: bool = key(False, "biases of queries, keys and values alone, as in Qwen2")
    qk_norm: bool = key(
        False, "RMSNorm of each head's queries and keys before they are rotated, as in Qwen3"
    )
    sliding_window: int | None = key(
        None,
        "tokens that attention looks back, itself among them; null: all. Longer sequences are refused",
        unit="tokens",
        at_least=1,
    )
    tie_embeddings: bool = key(False, "output head shares the embedding's weights")
    init_std: float = key(0.02, "standard deviation of initial weights", at_least=0)
    init_from: str | None = key(
        None,
        "folder of a Hugging Face model, or its name there: its weights and its shape to begin with; null: "
        "random weights",
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
    parameters: int | None = key(
        None, "hf: how many it has, counted before the launch; null: not counted yet", at_least=1
    )


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters beside the blocks' linear layers; they alone are trained (arXiv:2106.09685)."""

    rank: int = key(
        0, "rows of A and columns of B in W + alpha/rank · B·A; 0: none, all is trained", at_least=0
    )
    alpha: float = key(16.0, "what the adapters count, as alpha/rank", at_least=0)
    targets: list[str] | None = key(
        None, "layers that have one: wq wk wv wo gate up down; null: all, with experts attention's"
    )


@dataclass(frozen=True)
class Parallel:
    """The layout: world size = dp · tp · pp · cp, tp varying fastest, then cp, then dp, then pp."""

    dp: int | Literal["auto"] = key("auto", "data-parallel degree; auto: what is left", at_least=1)
    dp_replicate: int = key(
        1, "copies of the sharded model (HSDP); dp = dp_replicate · dp_shard", at_least=1
    )
    tp: int = key(1, "tensor-parallel degree", at_least=1)
    pp: int = key(1, "pipeline-parallel degree; each rank has virtual_stages stages", at_least=1)
    cp: int = key(1, "context-parallel degree", at_least=1)
    ep: int = key(
        1,
        "expert-parallel degree: ranks of dp (one copy's) and cp that share the experts out",
        at_least=1,
    )
    sequence_parallel: bool = key(
        True, "with tp: also divide the sequence between the blocks (norms, residual stream)"
    )
    cp_method: Literal["ring", "ulysses"] = key(
        "ring", "with cp: keys and values go round, or heads change places with the sequence"
    )
    schedule: Literal[
        "gpipe",
        "1f1b",
        "interleaved-1f1b",
        "looped-bfs",
        "zero-bubble",
        "zbv",
        "dualpipev",
    ] = key("1f1b", "with pp: the order of forward and backward passes; zero-bubble is interleaved")
    virtual_stages: int | Literal["auto"] = key(
        "auto",
        "stages a pipeline rank: 1 with gpipe and 1f1b, 2 with zbv and dualpipev, any number with the "
        "others; auto: 1 or 2",
        at_least=1,
    )
    layers_per_stage: list[int] | None = key(
        None, "blocks of every (virtual) stage, in order; null: divided by cost", at_least=1
    )
    activation_checkpointing: Literal["none", "full", "selective", "sqrt"] = key(
        "none",
        "recompute in the backward pass: nothing · blocks · all but matrix products · "
        "in √layers groups of blocks",
    )
    checkpoint_every: int = key(
        1, "activation_checkpointing=full: recompute every k-th block only", at_least=1
    )
    selective_keep: Literal["attention", "matmuls", "every-2nd-matmul"] = key(
        "matmuls", "activation_checkpointing=selective: which products' results are kept"
    )
    offload_activations: bool = key(
        False, "keep what the backward pass needs in host memory meanwhile"
    )


@dataclass(frozen=True)
class Precision:
    """The floating-point types of weights, products and gradients."""

    params: Literal["fp32", "fp64"] = key("fp32", "master weights and optimizer states")
    compute: Literal["auto", "fp32", "bf16", "fp16", "fp64"] = key(
        "auto",
        "matrix products and activations; auto: bf16 on GPUs that have it, fp16 on older ones, fp32 on CPUs",
    )
    reduce: Literal["fp32", "bf16", "fp16", "fp64"] = key(
        "fp32", "gradients on their way across ranks"
    )
    tf32: bool | Literal["auto"] = key(
        "auto",
        "fp32 on a GPU: round the factors of products to TF32's 10 bits of mantissa, which is several times "
        "faster; auto: where the GPU has it",
    )
    fp8: bool = key(
        False, "products of the blocks' linear layers in 8 bits (torchao, H100 or newer)"
    )
    fp8_recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = key(
        "tensorwise",
        "fp8: a scale for a whole matrix, the fastest · for each row, more accurate · the same with the "
        "gradients of weights in compute, the most accurate",
    )
    loss_scale: float = key(65536.0, "fp16: what the loss is multiplied with at first", at_least=1)
    loss_scale_window: int = key(
        2000,
        "fp16: steps without an overflow after which the scale doubles",
        unit="steps",
        at_least=1,
    )


@dataclass(frozen=True)
class Zero:
    """The sharding over data-parallel ranks, and its offload; all keys but the stage are DeepSpeed's."""

    stage: Literal[0, 1, 2, 3] = key(
        0, "0 nothing (DDP) · 1 optimizer states · 2 + gradients · 3 + parameters"
    )
    offload_optimizer: Literal["none", "cpu", "nvme"] = key(
        "none", "deepspeed: where optimizer states lie and are updated; nvme with stage 3"
    )
    offload_param: Literal["none", "cpu", "nvme"] = key(
        "none", "deepspeed, stage 3: where shards of parameters wait"
    )
    nvme_path: str | None = key(None, "deepspeed: folder for what is offloaded to nvme", path=True)
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


@dataclass(frozen=True)
class Backend:
    """The engine that trains."""

    name: Literal["native", "deepspeed"] = key(
        "native", "native: PyTorch's own parts · deepspeed: DeepSpeed's engine"
    )
    compile: Literal["auto", "on", "off"] = key(
        "off", "torch.compile of every block; auto: on a GPU, where the layout admits it"
    )
    attention: Literal["auto", "cudnn", "flash", "math"] = key(
        "auto",
        "kernel of attention; auto: PyTorch's choice, cuDNN on Hopper and Blackwell, flash on Ampere · "
        "math: single operations, which take any mask and type and most memory",
    )
    overlap_comm: Literal["auto", "on", "off"] = key(
        "auto", "deepspeed: reduce gradients while others are computed; auto: with stage 3"
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
        "deepspeed: settings of its own JSON that no key here stands for; merged in last",
        executes=True,
    )


@dataclass(frozen=True)
class Optimizer:
    """The update rule. Biases and normalisation weights are never decayed."""

    name: Literal["adamw", "sgd", "adamw8bit"] = key(
        "adamw", "adamw · sgd with momentum · adamw with 8-bit moments (torchao)"
    )
    lr: float = key(3e-4, "peak learning rate", at_least=0)
    weight_decay: float = key(0.1, "decoupled for adamw, L2 for sgd", at_least=0)
    beta1: float = key(0.9, "adamw: decay of the first moment", at_least=0, at_most=1)
    beta2: float = key(0.95, "adamw: decay of the second moment", at_least=0, at_most=1)
    eps: float = key(1e-8, "adamw: added to the root of the second moment", at_least=0)
    momentum: float = key(0.9, "sgd: momentum", at_least=0, at_most=1)
    clip_norm: float | None = key(
        1.0, "largest global gradient norm; null: no clipping", at_least=0
    )


@dataclass(frozen=True)
class Scheduler:
    """The learning rate over the steps, as a multiple of optimizer.lr."""

    name: Literal["cosine", "linear", "constant", "wsd"] = key(
        "cosine", "shape after the warm-up; wsd: warm-up, stable, decay"
    )
    warmup_steps: int = key(
        0, "steps of linear warm-up", unit="steps", at_least=0, scaled="decimal"
    )
    decay_steps: int | None = key(
        None, "wsd: steps of the final decay; null: a tenth of all", unit="steps", at_least=0
    )
    min_ratio: float = key(0.1, "last rate over peak rate", at_least=0, at_most=1)


@dataclass(frozen=True)
class Data:
    """The training data and its tokenizer."""

    source: Literal["stdlib", "megatron", "datatrove"] = key(
        "stdlib",
        "stdlib: the running Python's own source code · megatron: a .bin/.idx, or a folder of "
        "`nanoscale data prepare` · datatrove: a .ds",
    )
    path: str | None = key(
        None,
        "megatron: path of the .bin and .idx, without the ending, or of a prepared folder, which also "
        "says valid_path and tokenizer · datatrove: path of the .ds",
        path=True,
    )
    valid_path: str | None = key(
        None, "files like those of path to validate on; then nothing of path is held out", path=True
    )
    mixture: dict[str, Any] = key(
        {},
        "several sources in place of path, by names of yours, each {path, weight, valid_path}: a weight is "
        "its part of the samples; none at all: as the sources are large",
        path=True,
    )
    tokenizer: str = key(
        "byte",
        "byte · bpe (trained on the corpus) · path of a tokenizer.json, to print samples",
        path=True,
    )
    bpe_vocab: int = key(4096, "tokens of a trained BPE, at most", unit="tokens", at_least=257)
    valid_fraction: float = key(
        0.02, "share of the tokens held out, whole documents from the end", at_least=0, at_most=0.9
    )
    packing: Literal["stream", "whole"] = key(
        "stream",
        "stream: documents follow each other, cut every train.seq_len · whole: each lies in one sequence, "
        "and what is left of a sequence is padded",
    )
    document_mask: bool = key(
        False,
        "attention stays within a document, and positions begin again with each; always so with packing=whole",
    )
    loss_on: Literal["auto", "all", "answers"] = key(
        "auto",
        "all tokens, or the answers of chats · auto: answers where path has them marked, as "
        "`nanoscale data prepare --chat` does",
    )
    cache_dir: str | None = key(
        None, "folder of prepared corpora; null: nanoscale/ in the user's cache folder", path=True
    )


@dataclass(frozen=True)
class Checkpoint:
    """The saving and keeping of checkpoints."""

    every: int = key(
        0, "steps between checkpoints; 0: none by the number of steps", unit="steps", at_least=0
    )
    every_minutes: float | None = key(
        15.0,
        "save when this long has passed since the start or the last checkpoint, beside those of every; "
        "0 or null: none by time",
        unit="min",
        at_least=0,
    )
    keep_last: int | None = key(
        2,
        "newest checkpoints to keep; null: all, but of those saved by time only the newest",
        at_least=1,
    )
    keep_every: int | None = key(
        None, "also keep every step that is a multiple of this", unit="steps", at_least=1
    )
    keep_best: int = key(
        0,
        "also keep the checkpoints with the lowest evaluation losses, this many; an evaluation that is one of "
        "them saves one. 0: none",
        at_least=0,
    )
    asynchronous: bool = key(
        False,
        "copy the state to host memory, and write it while the training goes on; a crash meanwhile leaves the "
        "checkpoint before",
    )
    at_end: bool = key(True, "save when the training completes")
    at_stop: bool = key(True, "save when asked to stop (Ctrl-C, SIGTERM)")


@dataclass(frozen=True)
class Peaks:
    """The maker's peaks of dense matrix products, without sparsity; null: not supported in that type."""

    fp64: float | None = key(None, "peak in fp64", unit="TFLOP/s", at_least=0)
    fp32: float | None = key(None, "peak in fp32, not TF32", unit="TFLOP/s", at_least=0)
    tf32: float | None = key(None, "peak in TF32; null: that of fp32", unit="TFLOP/s", at_least=0)
    fp16: float | None = key(None, "peak in fp16", unit="TFLOP/s", at_least=0)
    bf16: float | None = key(None, "peak in bf16", unit="TFLOP/s", at_least=0)
    fp8: float | None = key(None, "peak in 8 bits", unit="TFLOP/s", at_least=0)


@dataclass(frozen=True)
class Reached:
    """The speed of the maker's libraries, hot and with random numbers; null: a usual share of the peak."""

    matmul: float | None = key(None, "of the peak, large products in 16 bits or wider", at_least=0)
    matmul_fp8: float | None = key(None, "of the peak, large products in 8 bits", at_least=0)
    attention: float | None = key(
        None, "of the 16-bit peak, FlashAttention forward with long sequences", at_least=0
    )
    attention_cudnn: float | None = key(
        None, "the same of cuDNN's attention; null: PyTorch does not choose it", at_least=0
    )
    memory: float | None = key(None, "of the memory's bandwidth, element-wise work", at_least=0)
    intra_host: float | None = key(None, "of intra_host_gbs, collectives", at_least=0)
    inter_host: float | None = key(None, "of inter_host_gbs, collectives", at_least=0)


@dataclass(frozen=True)
class Cluster:
    """The hardware; what is null is looked up by the device's name."""

    device: str | None = key(
        None, "an option of this group or a name of your own; null: what this machine has"
    )
    recognised: list[str] = key([], "parts of the names that drivers give to this device")
    devices_per_host: int | None = key(None, "devices in a host", at_least=1)
    hosts: int | None = key(None, "hosts there are; null: as many as the layout needs", at_least=1)
    island: int | None = key(
        None, "devices that the fast links join; null: those of a host", at_least=1
    )
    memory_gib: float | None = key(
        None, "memory of a device, as torch sees it", unit="GiB", at_least=0
    )
    context_gib: float | None = key(
        None,
        "what CUDA, libraries and NCCL take of it outside of torch's allocator",
        unit="GiB",
        at_least=0,
    )
    memory_gbs: float | None = key(None, "bandwidth of a device's memory", unit="GB/s", at_least=0)
    multiprocessors: int | None = key(
        None, "units of a device that each work on one tile of a product", at_least=1
    )
    peak_tflops: float | None = key(
        None,
        "dense peak of one device at the trained precision; null: from peaks",
        unit="TFLOP/s",
        at_least=0,
    )
    peaks: Peaks = field(default_factory=Peaks)
    reached: Reached = field(default_factory=Reached)
    intra_host_gbs: float | None = key(
        None, "fast links (NVLink, xGMI, PCIe), a device and direction", unit="GB/s", at_least=0
    )
    intra_host_us: float | None = key(
        None, "latency of a step over the fast links", unit="µs", at_least=0
    )
    inter_host_gbs: float | None = key(
        None, "network between hosts, a device and direction", unit="GB/s", at_least=0
    )
    inter_host_us: float | None = key(
        None, "latency of a step over the network", unit="µs", at_least=0
    )
    host_link_gbs: float | None = key(
        None, "link to the host's memory, a device and direction", unit="GB/s", at_least=0
    )
    host_memory_gib: float | None = key(None, "memory of a host", unit="GiB", at_least=0)
    host_memory_gbs: float | None = key(
        None, "bandwidth of a host's memory", unit="GB/s", at_least=0
    )
    price: float | None = key(
        None, "of a device for an hour, in any currency; null: no costs are shown", at_least=0
    )
    efficiency: str | None = key(
        None,
        "file of efficiencies that `nanoscale plan --calibrate` has learned; null: those assumed",
        path=True,
    )
    python: str | None = key(
        None,
        "interpreter on the other hosts, with nanoscale installed; null: the path of this one",
        executes=True,
        path=True,
    )
    pythons: dict[str, Any] = key(
        {}, "interpreters of single hosts, by their names, before python", executes=True, path=True
    )


@dataclass(frozen=True)
class Slurm:
    """The settings of launcher=slurm; null or empty: the site's default."""

    partition: str | None = key(None, "partition, or several with commas")
    account: str | None = key(None, "account to charge")
    qos: str | None = key(None, "quality of service")
    time: str | None = key(None, "time limit: minutes, H:MM:SS or D-HH:MM:SS, in quotes")
    exclusive: bool = key(True, "share no node with other jobs")
    constraint: str | None = key(None, "features that the nodes must have")
    gpus: str | None = key(
        None, "what to ask for in --gpus-per-node, as in `h100:8`; null: launcher.devices on cuda"
    )
    container: str | None = key(None, "image that the agents run in", executes=True, path=True)
    container_runtime: Literal["pyxis", "apptainer"] = key("pyxis", "what runs the image")
    container_mounts: list[str] = key(
        [], "folders to mount in the container, each HOST:INSIDE", executes=True, path=True
    )
    setup: list[str] = key(
        [], "shell lines to run first in the batch script, as in `module load`", executes=True
    )
    directives: list[str] = key(
        [], "further options of sbatch, each as in `--mail-type=END`", executes=True
    )
    signal_before_s: int = key(
        120, "how long before the time limit to save and stop", unit="s", at_least=0
    )
    max_requeues: int = key(
        10, "how often a job that was stopped by its time limit queues again by itself", at_least=0
    )


@dataclass(frozen=True)
class Launcher:
    """The start of the ranks: hosts, devices and time limits."""

    name: Literal["local", "ssh", "pdsh", "slurm"] = key(
        "local", "local: on this machine · ssh, pdsh: on the hosts of a hostfile · slurm: by SLURM"
    )
    device: Literal["auto", "cpu", "cuda"] = key(
        "auto", "auto: cuda where there is a GPU, and on other hosts"
    )
    devices: int | Literal["auto"] = key(
        "auto",
        "ranks on a host; auto: every GPU or slot, or what the layout needs on cpu",
        at_least=1,
    )
    threads: int | Literal["auto"] = key(
        "auto", "CPU threads a rank; auto: the cores, divided", at_least=1
    )
    hostfile: str | None = key(
        None,
        "file of hosts, each line `HOST slots=N`; it means ssh where no launcher was chosen",
        executes=True,
        path=True,
    )
    include: str | None = key(
        None, "use these hosts or slots only: `h1@h2:0,2`, without users, IPv6 in brackets"
    )
    exclude: str | None = key(None, "use all hosts and slots but these: `h1@h2:0,2`")
    nodes: int | str | None = key(
        None,
        "hosts to use: N, the first of the hostfile; or 'MIN:MAX', an elastic job that goes on while MIN "
        "are left; null: all",
    )
    master_addr: str | None = key(
        None, "address at which the other hosts reach the first; null: its name in the hostfile"
    )
    master_port: int | Literal["auto"] = key(
        "auto", "port on the first host to meet at; auto: a free one", at_least=1, at_most=65535
    )
    max_restarts: int = key(
        0, "how often to go on from the newest checkpoint by itself after a failure", at_least=0
    )
    stop_grace_s: float = key(
        120.0, "time for a clean stop before everything is killed", unit="s", at_least=0
    )
    lost_after_s: float = key(
        5.0, "silence after which a host, or a rank that was stopped, is lost", unit="s", at_least=1
    )
    connect_timeout_s: float = key(20.0, "time for a host to answer at first", unit="s", at_least=1)
    collective_timeout_s: float = key(
        600.0, "time that ranks wait for each other in a collective operation", unit="s", at_least=1
    )
    preflight: bool = key(True, "look at every host before the launch")
    pass_env: list[str] = key(
        [],
        "further variables to pass on to the other hosts: names, or beginnings with `*`",
        executes=True,
    )
    env: dict[str, Any] = key({}, "variables to set for the ranks, by name", executes=True)
    ssh_args: list[str] = key([], "further arguments of ssh, as in `-p`, `2222`", executes=True)
    slurm: Slurm = field(default_factory=Slurm)


@dataclass(frozen=True)
class Logger:
    """The outputs of metrics besides metrics.jsonl."""

    tensorboard: Literal["auto", "on", "off"] = key("off", "auto: on if it is installed")
    csv: bool = key(False, "write metrics.csv, a table with one row per logged step")
    wandb: Literal["off", "online", "offline"] = key(
        "off",
        "Weights & Biases; offline: only write its files, which `wandb sync` uploads later",
    )
    mlflow: Literal["off", "on"] = key("off", "record in MLflow")
    mlflow_uri: str | None = key(
        None,
        "MLflow's server or database; null: MLFLOW_TRACKING_URI, else the file mlflow.db in run.root",
        path=True,
    )
    project: str = key("nanoscale", "the project in Weights & Biases and the experiment in MLflow")
    wandb_entity: str | None = key(
        None, "the user or team in Weights & Biases; null: the default of the API key"
    )


@dataclass(frozen=True)
class Profile:
    """The profiling of some steps, into the run's profile/ folder."""

    steps: int | str | list[int] | None = key(
        None,
        "which: 10, '10-12' (both ends too) or [10,20], counted in the whole run; each series of steps is one "
        "trace of torch.profiler, on a GPU with a snapshot of its memory; null: none",
        unit="steps",
        at_least=1,
    )
    ranks: list[int] = key([0], "ranks that are recorded", at_least=0)


@dataclass(frozen=True)
class StopWhen:
    """The end of a training before its last step, judged at each evaluation."""

    patience: int = key(
        0,
        "evaluations in a row without a lower loss after which the training completes; 0: no limit",
        unit="evaluations",
        at_least=0,
    )
    min_delta: float = key(0.0, "a loss counts as lower if it is so by more than this", at_least=0)
    eval_loss: float | None = key(
        None, "the training completes when the evaluation loss is at most this; null: no limit"
    )


@dataclass(frozen=True)
class Train:
    """The length, the batches and the intervals of the training."""

    steps: int | None = key(
        None,
        "optimizer steps; null: from train.tokens",
        unit="steps",
        at_least=1,
        scaled="decimal",
    )
    tokens: int | None = key(
        None,
        "tokens to train on, rounded up to whole steps; excludes train.steps",
        unit="tokens",
        at_least=1,
        scaled="decimal",
    )
    global_batch: int = key(
        8, "samples an optimizer step", unit="samples", at_least=1, scaled="decimal"
    )
    micro_batch: int | Literal["auto"] = key(
        "auto",
        "samples a rank a forward pass; auto: no accumulation, or with pp as many micro batches as keep "
        "every stage busy",
        unit="samples",
        at_least=1,
    )
    seq_len: int = key(64, "tokens a sample", unit="tokens", at_least=1, scaled="binary")
    seed: int = key(0, "of the initial weights and of the order of samples", at_least=0)
    log_every: int = key(1, "steps between logged steps", unit="steps", at_least=1)
    eval_every: int = key(
        0, "steps between evaluations on the validation split; 0: never", unit="steps", at_least=0
    )
    eval_samples: int = key(
        64, "validation samples an evaluation", unit="samples", at_least=1, scaled="decimal"
    )
    stop_when: StopWhen = field(default_factory=StopWhen)
    sample_prompt: str = key("", "what the sample after the training continues")
    sample_tokens: int = key(
        0, "length of the sample after the training; 0: none", unit="tokens", at_least=0
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
