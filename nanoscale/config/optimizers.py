"""The optimizers: a row for each, which rules, plans, rehearsals, backends and checkpoints read.

`nanoscale/backends/optimizer.py` builds them; the schema has their names and keys. This file imports no torch.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from nanoscale.config.schema import Optimizer, ParameterGroup, Precision

MUON_ITERATIONS = 5
"""Newton and Schulz's iterations of an update of Muon (Jordan et al. 2024)."""
MUON_AT_ONCE = 1 << 27
"""The most elements of matrices that a rank orthogonalizes after one exchange (256 MiB in bf16), if no single
parameter has more."""
AVERAGE = "average"
"""The name of an average of weights in the state of its parameter, and in checkpoints."""
ROUNDED_AT_ONCE = 1 << 18
"""Elements that a stochastically rounded update has in fp32 at a time on CPUs: they stay in the cache."""
KEYS = ("beta1", "beta2", "eps", "momentum")
"""The keys of `optimizer` that not every update reads."""


@dataclass(frozen=True)
class UpdateRule:
    """A row of the table: what an optimizer reads, keeps and needs."""

    keys: tuple[str, ...]
    """The members of KEYS that it reads."""
    moments: tuple[str, ...]
    """The names of its moments in checkpoints; each has the shape and the dtype of its parameter."""
    passes: float
    """Reads and writes of tensors of the parameter's size in an update."""
    moments_in_blocks: tuple[str, ...] | None = None
    """The names of the moments of the matrices of blocks; None: `moments`."""
    averages: bool = False
    """True if the result is an average of the weights."""
    momentum_key: str | None = None
    """A key that is 0 if there are no moments."""
    quantized: bool = False
    """True if its moments are 8-bit codes, with an fp32 scale for every 256. A checkpoint has them in fp32."""
    compiled: bool = False
    """True if its update is compiled on GPUs."""
    copies: float = 0.0
    """The tensors that an update that is not compiled allocates, relative to the parameter."""
    rounded: bool = False
    """True if its moments and weights may be kept in bf16, rounded stochastically."""
    package: str | None = None
    """The optional package that has it."""
    deepspeed: bool = True
    """True if DeepSpeed's flat shards can be updated with it."""
    other_names: tuple[str, ...] = ()
    """Its names in DeepSpeed's, Hugging Face's and other configurations, in lower case."""


OPTIMIZERS = {
    "adamw": UpdateRule(
        keys=("beta1", "beta2", "eps"),
        moments=("exp_avg", "exp_avg_sq"),
        passes=7.0,  # reads parameter, gradient and both moments, and writes all but the gradient
        rounded=True,
        other_names=(
            *("adam", "fusedadam", "adamw_torch", "adamw_torch_fused", "adamw_hf"),
            *("paged_adamw_32bit", "paged_adamw"),
        ),
    ),
    "adamw8bit": UpdateRule(
        keys=("beta1", "beta2", "eps"),
        moments=("exp_avg", "exp_avg_sq"),
        passes=5.0,
        quantized=True,
        compiled=True,
        package="torchao",
        deepspeed=False,
        other_names=(
            "adamw_bnb_8bit",
            "adamw_8bit",
            "paged_adamw_8bit",
            "adamw_torch_8bit",
            "ao_adamw_8bit",
        ),
    ),
    "lion": UpdateRule(
        keys=("beta1", "beta2"),
        moments=("exp_avg",),
        passes=5.0,
        copies=4.0,
        compiled=True,
        other_names=("fusedlion", "lion_32bit"),
    ),
    "muon": UpdateRule(
        keys=("beta1", "beta2", "eps", "momentum"),
        moments=("exp_avg", "exp_avg_sq"),
        moments_in_blocks=("momentum_buffer",),
        passes=9.0,  # momentum 4, direction 1, update 4
        copies=1.0,
        deepspeed=False,
        other_names=("muonadamw", "muon_adamw"),
    ),
    "adafactor": UpdateRule(
        keys=(),
        moments=(),
        passes=14.0,  # squares 3, their sums 2, the update twice 6, decay and update 3
        copies=2.0,
        deepspeed=False,
        other_names=("adafactor_torch",),
    ),
    "schedule-free": UpdateRule(
        keys=("beta1", "beta2", "eps"),
        moments=("exp_avg_sq",),
        averages=True,
        passes=7.0,  # reads four tensors, and writes all but the gradient
        copies=6.0,
        compiled=True,
        deepspeed=False,
        other_names=("schedule_free_adamw", "adamwschedulefree"),
    ),
    "hooks": UpdateRule(  # planned as adamw
        keys=("beta1", "beta2", "eps", "momentum"),
        moments=("exp_avg", "exp_avg_sq"),
        passes=7.0,
        deepspeed=False,
    ),
    "sgd": UpdateRule(
        keys=("momentum",),
        moments=("momentum_buffer",),
        passes=5.0,
        momentum_key="momentum",
        copies=3.0,
        compiled=True,
    ),
}
"""The rows by the value of `optimizer.name`."""


def group_of(name: str, optimizer: Optimizer) -> ParameterGroup | None:
    """Return the first group of a job that a parameter is in."""
    return next((it for it in optimizer.groups.values() if fnmatchcase(name, it.match)), None)


def rule_of(optimizer: Optimizer) -> UpdateRule:
    return OPTIMIZERS[optimizer.name]


def keeps_average(optimizer: Optimizer) -> bool:
    """Return True if a job has an average of its weights, which is evaluated and exported in place of them."""
    return optimizer.ema_decay is not None or rule_of(optimizer).averages


def rounds(optimizer: Optimizer, precision: Precision) -> bool:
    """Return True if an update rounds moments or weights to bf16."""
    return "bf16" in (optimizer.moments_dtype, precision.params)


def optimizers_with(key: str) -> tuple[str, ...]:
    """Return the optimizers that read a key of KEYS."""
    return tuple(name for name, rule in OPTIMIZERS.items() if key in rule.keys)


def moments_of(optimizer: Optimizer, *, in_blocks: bool = False) -> tuple[str, ...]:
    """Return the names of the moments that a job's optimizer keeps, of the matrices of blocks or of others."""
    rule = rule_of(optimizer)
    is_off = rule.momentum_key is not None and getattr(optimizer, rule.momentum_key) == 0
    of_blocks = rule.moments_in_blocks if in_blocks else None
    return () if is_off else rule.moments if of_blocks is None else of_blocks


def by_other_name(name: str) -> str | None:
    """Return the optimizer that other software calls `name`; None if it is not an optimizer here."""
    name = name.lower()
    return next((own for own, it in OPTIMIZERS.items() if name in (own, *it.other_names)), None)
