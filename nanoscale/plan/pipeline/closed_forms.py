"""The idle time of pipeline schedules in closed form, for a search through thousands of layouts.

The forms hold for stages of equal cost. There are pp ranks with v stages each, and m micro batches. One micro
batch needs in one stage f seconds for the forward pass, i for the gradients of inputs, w for the gradients of
weights, and b = i + w. A transfer to another rank takes t seconds. Tests compare each form with the simulation.
Where the two differ, the simulation is right.
"""

from dataclasses import dataclass

from nanoscale.config.layout import takes
from nanoscale.plan.pipeline.orders import round_length


@dataclass(frozen=True, slots=True)
class _Step:
    """The symbols of the formulas."""

    pp: int
    v: int
    m: int
    f: float
    i: float
    w: float
    t: float

    @property
    def b(self) -> float:
        return self.i + self.w

    @property
    def round(self) -> int:
        return round_length(self.pp, self.m)

    @property
    def busy(self) -> float:
        return self.v * self.m * (self.f + self.b)


def bubble(
    schedule: str,
    pp: int,
    virtual_stages: int,
    micro_batches: int,
    forward: float = 1.0,
    backward_input: float = 1.0,
    backward_weight: float = 1.0,
    transfer: float = 0.0,
) -> float:
    """Return the seconds of a step in which a rank waits: during the fill, the drain and exposed transfers.

    The forms are exact without transfers. For gpipe, 1f1b and looped-bfs they are exact with transfers too.
    The exception are too few micro batches to keep a rank busy: fewer than pp (zero-bubble with several stages
    a rank), or fewer than 2·pp - 1 (zbv). For w ≤ f ≤ i a simulated step is never shorter. It is at most 8 %
    longer with too few micro batches, 10 % with t = f / 2, and 2 % with t = f / 10.
    """
    assert takes(schedule, pp, micro_batches), "config.rules refuses it"
    if pp == 1:
        return 0.0
    step = _Step(
        pp, virtual_stages, micro_batches, forward, backward_input, backward_weight, transfer
    )
    return _FORMS[schedule](step)


def _gpipe(s: _Step) -> float:
    """Return the bubble of Huang et al. 2019, 2.3: (pp - 1) / (m + pp - 1) of the step. A rank requests every
    input and waits for it."""
    return (s.pp - 1) * (s.f + s.b) + 2 * (s.m + s.pp - 2) * s.t


def _1f1b(s: _Step) -> float:
    """Return the bubble of Narayanan et al. 2021, 2.2.1, also for gpipe. Sends of one direction overlap
    receives of the other direction."""
    exposed = s.m + 1 if s.pp == 2 else 2 * (s.m + s.pp - 2) - 1
    return (s.pp - 1) * (s.f + s.b) + exposed * s.t


def _interleaved_1f1b(s: _Step) -> float:
    """Return the bubble of Narayanan et al. 2021, 2.2.2: as many passes as in 1f1b, each through a v-th of the
    rank's blocks."""
    return _in_turns(s, s.round)


def _looped_bfs(s: _Step) -> float:
    """Return the bubble of Lamy-Poirier 2022, 3.2: the interleaved one, with turns of all micro batches."""
    return _in_turns(s, s.m)


def _in_turns(s: _Step, length: int) -> float:
    """Return the bubble if `length` micro batches pass through each stage of a rank in turn.

    The first micro batch of a turn has passed all ranks after pp passes and transfers. If the turn takes less
    time, the rank waits.
    """
    late_forward = max(0.0, s.pp * (s.f + s.t) - length * s.f)
    late_backward = max(0.0, s.pp * (s.b + s.t) - length * s.b)
    return (s.pp - 1) * (s.f + s.b + 2 * s.t) + (s.v - 1) * (late_forward + late_backward)


def _zero_bubble(s: _Step) -> float:
    """Return the bubble of ZB-H1 in Qi et al. 2023, table 1: (pp - 1)(f + i - w). Gradients of weights fill at
    most the waiting time."""
    full = (s.pp - 1) * (s.f + s.i) - (min(s.m, s.pp) - 1) * min(s.f, s.i, s.w)
    full += (2 * (s.pp - 1) + 2 * max(0, min(s.m - 2, s.pp - 1))) * s.t
    full += (s.v - 1) * max(0.0, s.pp * s.t - max(0, s.round - s.pp) * (s.f + s.b))
    if s.m >= s.pp or s.v == 1:
        return full
    through = s.v * s.pp * (s.f + s.i) + (s.m - 1) * (s.f + s.i) + s.w
    return max(full, through + 2 * (s.v * s.pp - 1) * s.t - s.busy)


def _zbv(s: _Step) -> float:
    """Return the longest path through the order of torch's ZB-V; (pp - 1)·f without transfers if f = i = w.

    Qi et al. 2023, section 6, treat only f = i = w. A path consists of the rank's own work and a number of
    further f, i and w. These numbers were read off the simulation.
    """
    n = s.pp - 1
    full = max(
        2 * n * (s.i - s.w),
        n * s.i,
        s.i + (n - 1) * s.w,
        s.f + (n - 1) * s.w,
        2 * n * s.f - n * s.i - s.w,
        (2 * n - 1) * s.f - (n - 1) * s.i,
        2 * n * (s.f - s.w) - s.w,
        (2 * n - 1) * s.f + s.i - 2 * n * s.w,
    )
    full += (5 * s.pp - 7) * s.t
    if s.m >= 2 * s.pp - 1:
        return full
    turns = (s.m - 1) * (max(s.f, s.i) + s.i + 2 * s.w) + 2 * s.w
    through = 2 * s.pp * (s.f + s.i) + turns + 4 * (s.pp - 1) * s.t
    return max(full, through - s.busy)


def _dualpipev(s: _Step) -> float:
    """Return the bubble of DualPipe on a V. torch runs the forward and the backward pass of a pair in sequence.

    DeepSeek-V3, table 2, gives (pp/2 - 1)(f&b + b - 3w), where a pair f&b takes less than f + b. A pair sends
    when both passes are done, so most transfers are exposed.
    """
    n = s.pp - 1
    idle = n * max(0.0, s.i - s.w) + max(2 * n * s.f, (n - 1) * s.f + n * s.i)
    return idle + 2 * (s.m - -(-s.m // s.pp) + n - 1) * s.t


_FORMS = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "interleaved-1f1b": _interleaved_1f1b,
    "looped-bfs": _looped_bfs,
    "zero-bubble": _zero_bubble,
    "zbv": _zbv,
    "dualpipev": _dualpipev,
}
