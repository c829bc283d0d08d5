"""The software that a plan is made for, nanoscale or other software in `benchmarks.plan.software`, and the
hardware of a job, in SI units, from the `cluster` section and the data sheets of `conf/cluster`.

There is one table of devices, the YAML files of the group, which planner and launcher read. A user's own key
replaces the table's; a device that is in no file must be described completely.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

from nanoscale.common.errors import UserError
from nanoscale.common.json_text import parse
from nanoscale.config.hardware import data_sheets
from nanoscale.config.schema import Cluster, Config, Precision

DTENSOR_S = 150e-6
"""Seconds of the host for an operation on DTensors: 100 to 190 µs were seen in PyTorch 2.6 to 2.9, where a few
µs suffice for plain tensors."""


@dataclass(frozen=True, slots=True, eq=False)
class Software:
    """The properties of a training engine that memory and time depend on. Compared by identity."""

    name: str
    composed_norm: bool = False
    """True if RMSNorm without a compiler consists of single operations in fp32 (PyTorch before 2.9)."""
    fused: bool = False
    """True if element-wise operations between products are fused kernels, compiled or not."""
    sums_in_products: bool = False
    """True if products add their gradients to fp32 sums themselves (Megatron-LM's
    gradient_accumulation_fusion)."""
    hidden_tp: Literal["none", "scatters", "backward", "both"] = "none"
    """The passes in which the collectives of tp run in parallel with products; scatters: the scatters of the
    backward pass do, during the products for weights, in compiled blocks (`parallel.compile`)."""
    dtensor: bool = False
    """True if tp and FSDP compute on DTensors. An operation costs the host `DTENSOR_S`. tp copies the tensors
    that it gathers or reduces, because the sequence is not their first dimension."""
    narrow_gathers: bool = False
    """True if tp gathers the inputs of 8-bit products in 8 bits, with tensor-wise scales."""
    torchao: bool = False
    """True for 8-bit products by torchao (`backends.low_bits`). Data parallelism gathers weights in 8 bits
    (`config.layout.narrow_weights`). Scales of experts are row-wise in fp8, and the backward pass casts their
    operands from 16 bits again."""
    cast_bytes: float = 6
    """Bytes moved for each number that is cast to 8 bits: read for the maximum, read again, written row-major
    and column-major. Transformer Engine takes the maximum from earlier steps and fuses half of its casts."""
    copies: Literal["expert", "rank", "host"] = "expert"
    """The copies of a token that are sent: one for each of its experts, one for each rank that has any of them,
    or one for each such host and from there to its ranks (DeepEP, arXiv:2412.19437, section 3.2.2)."""
    hidden_ep: float = 0.0
    """The share of the exchanges of an MoE's tokens that another micro batch's computation hides."""
    grouped: float = 0.5
    """The rate of the products of several experts in one kernel over one product's. 0.5 is 300 TFLOP/s on an
    H100 at 2,048 rows of an expert; PyTorch's has 242 with permutations (VeOmni, pull request 460)."""
    host_s: float = 0.0
    """Seconds of the host for a pass of an MoE's block; 0: as its kernels are counted."""
    distributed_optimizer: bool = False
    """True for Megatron-LM's distributed optimizer. Weights in the compute dtype and gradients in fp32 are
    unsharded, master weights and moments are sharded."""


NANOSCALE = Software("nanoscale", hidden_tp="scatters", copies="rank", torchao=True)


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Reached shares of the maker's figures, and quantities that no data sheet has.

    The first six are a device's own if `cluster.reached` has them.
    """

    matmul: float = 0.70
    """The share of the peak that large products in 16 bits or more reach."""
    matmul_fp8: float = 0.60
    """The share of the peak that large products in 8 bits reach."""
    attention: float = 0.45
    """The share of the 16-bit peak that FlashAttention reaches forward."""
    cudnn: float = 1.0
    """The rate of cuDNN's attention over FlashAttention's, on devices for which PyTorch prefers it."""
    memory: float = 0.85
    """The share of the memory's bandwidth that element-wise work reaches."""
    intra_host: float = 0.77
    """The share of the fast links' bandwidth that collectives reach."""
    inter_host: float = 0.85
    """The share of the network's bandwidth that collectives reach."""
    overlap: float = 0.82
    """Seconds that computation loses for each second in which the device both computes and copies, because both
    use multiprocessors and memory. Fitted to 152 published steps (`benchmarks.plan`: sources in `FITTED` and
    the building half). Lee et al. 2025 (arXiv:2507.03114) measured 0.61 of the collectives, which also wait."""
    jitter: float = 0.012
    """The standard deviation of a host's step time, as a share of it; a step waits for the slowest host."""
    eager_s: float = 6e-6
    """Seconds to start an operation from Python."""
    compiled_s: float = 3e-6
    """Seconds to start a kernel of compiled code."""


@dataclass(frozen=True, slots=True, eq=False)
class Hardware:
    """One device, its host and its network. Compared by identity, which makes it a cheap key of caches."""

    device: str
    devices_per_host: int
    hosts: int | None
    """The number of hosts; None: as many as the layout needs."""
    island: int
    """Devices joined by fast links."""
    pod: int | None
    """Devices whose hosts share a network at full speed; None: all."""
    memory_gib: float
    """A device's memory, as torch sees it, GiB."""
    context_gib: float
    """The part of it that is allocated outside of torch's allocator, GiB."""
    memory_bandwidth: float
    """B/s."""
    multiprocessors: int
    peaks: dict[str, float]
    """Dense peak by dtype, FLOP/s."""
    intra_bandwidth: float
    """The fast links of a device in one direction, B/s."""
    intra_latency: float
    """The latency of a step, s."""
    inter_bandwidth: float
    """The network of a device in one direction, B/s."""
    inter_latency: float
    """The latency of a step, s."""
    pod_bandwidth: float
    """The network of a device between pods in one direction, B/s."""
    host_bandwidth: float
    """The link between a device and its host's memory in one direction, B/s."""
    host_memory_gib: float
    """The memory of a host, GiB."""
    host_memory_bandwidth: float
    """The bandwidth of a host's memory, B/s."""
    price: float | None
    """The price of a device for an hour."""
    efficiency: Efficiency

    def peak(self, precision: Precision) -> float:
        """Return the FLOP/s at the trained precision."""
        return self.peaks[data_sheets.kind(precision)]


def hardware_of(config: Config) -> Hardware:
    """Return the hardware of `config.cluster`, completed from the table, for a job that is predicted.

    Raises:
        UserError: the device is unknown, is not described completely, or lacks the trained dtype, or the
            job is not predicted.
    """
    hardware = described_hardware(config)
    unpredicted = ""
    if config.model.source == "hooks":
        unpredicted = "model=hooks: memory and time of such a model"
    elif config.lora.rank and config.backend.name == "deepspeed":
        unpredicted = (
            f"lora.rank={config.lora.rank}: memory and time of training adapters with DeepSpeed"
        )
    if unpredicted:
        without = "are not predicted; `nanoscale train` launches it without a plan"
        raise data_sheets.UnknownHardwareError("config", f"{unpredicted} {without}")
    return hardware


def described_hardware(config: Config) -> Hardware:
    """Return the hardware of `config.cluster`, completed from the table.

    Raises:
        UserError: the device is unknown, is not described completely, or lacks the trained dtype.
    """
    cluster = data_sheets.described(config)
    missing = [f"cluster.{name}" for name in _NEEDED if getattr(cluster, name) is None]
    if missing:
        name = cluster.device or "the device"
        raise UserError(
            "config",
            f"{name} is in no file of the group cluster, and these keys of it are null: "
            f"{', '.join(missing)}. Set them, or choose a known device: {data_sheets.known_overrides()}",
        )
    peaks = {name: value * 1e12 for name, value in data_sheets.known_peaks(cluster).items()}
    trained = data_sheets.kind(config.precision)
    if trained == "tf32" and "fp32" in peaks:
        peaks.setdefault("tf32", peaks["fp32"])
    if cluster.peak_tflops is not None:
        peaks[trained] = cluster.peak_tflops * 1e12
    for computed in (trained, data_sheets.wide_kind(config.precision)):
        if computed not in peaks and computed != "auto":  # that is resolved for the devices, later
            ways = [f"precision={name}" for name in peaks if name not in ("tf32", trained)]
            ways.append(f"cluster.peaks.{computed}=TFLOP/s")
            raise data_sheets.UnknownHardwareError(
                "config",
                f"cluster.peaks.{computed} is null: {cluster.device} has no known peak in {computed}. "
                f"Type {' or '.join(ways)}",
            )
    return _in_si(cluster, peaks, _efficiency(cluster))


_NEEDED = ("memory_gib", "memory_gbs")
"""Keys that a device without a file needs in addition to a peak. The others are assumed: 8 devices in a host
(`described`) and, in `_in_si`, 128 multiprocessors, links of PCIe 4.0 x16 and a network of 50 Gb/s for each."""


def _in_si(cluster: Cluster, peaks: dict[str, float], efficiency: Efficiency) -> Hardware:
    def number(name: str, usual: float = 0.0) -> float:
        value = getattr(cluster, name)
        return usual if value is None else float(value)

    per_host = cluster.devices_per_host
    assert per_host is not None
    island, between_hosts = cluster.island or per_host, number("inter_host_gbs", 6.25)
    return Hardware(
        device=cluster.device or "unnamed",
        devices_per_host=per_host,
        hosts=cluster.hosts,
        island=island,
        pod=max(island, per_host * cluster.pod) if cluster.pod else None,
        memory_gib=number("memory_gib"),
        context_gib=number("context_gib", 1.0),
        memory_bandwidth=number("memory_gbs") * 1e9,
        multiprocessors=cluster.multiprocessors or 128,
        peaks=peaks,
        intra_bandwidth=number("intra_host_gbs", 32.0) * 1e9,
        intra_latency=number("intra_host_us", 3.4) * 1e-6,
        inter_bandwidth=between_hosts * 1e9,
        inter_latency=number("inter_host_us", 14.0) * 1e-6,
        pod_bandwidth=number("inter_pod_gbs", between_hosts) * 1e9,
        host_bandwidth=number("host_link_gbs", 32.0) * 1e9,
        host_memory_gib=number("host_memory_gib", 256.0),
        host_memory_bandwidth=number("host_memory_gbs", 200.0) * 1e9,
        price=cluster.price,
        efficiency=efficiency,
    )


def _efficiency(cluster: Cluster) -> Efficiency:
    """Return the efficiencies: the defaults, replaced by the device's, replaced by measured ones."""
    reached = cluster.reached
    own = {field.name: getattr(reached, field.name) for field in fields(reached)}
    cudnn = own.pop("attention_cudnn")
    if cudnn is not None:
        own["cudnn"] = cudnn / (reached.attention or Efficiency().attention)
    usual = replace(
        Efficiency(), **{name: value for name, value in own.items() if value is not None}
    )
    if cluster.efficiency is None:
        return usual
    return replace(usual, **_measured(cluster.efficiency, cluster.device))


def _measured(path: str, device: str | None) -> dict[str, float]:
    """Read the result of `plan --calibrate`.

    It holds `{"efficiency": {"matmul": 0.71}, "device": "h100-sxm"}`; other keys are for people.
    """

    def error(why: str) -> UserError:
        remedy = "Type cluster.efficiency=null to use the assumed ones"
        return UserError("config", f"cluster.efficiency={path} {why}. {remedy}")

    try:
        content = parse(Path(path).read_text("utf-8"))
        values = {name: float(value) for name, value in content["efficiency"].items()}
        of = content.get("device", device)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as cause:
        example = '{"efficiency": {"matmul": 0.7}}'
        raise error(f"is not a file of efficiencies ({cause}); it holds {example}") from None
    if of != device:
        raise error(f"was learned on {of}, and the device is {device}")
    known = {field.name for field in fields(Efficiency)}
    wrong = sorted(name for name in values if name not in known or not 0 < values[name] < 10)
    if wrong:
        why = f"holds {', '.join(wrong)}, which is not an efficiency or not above 0"
        raise error(f"{why}; known are {', '.join(sorted(known))}")
    return values
