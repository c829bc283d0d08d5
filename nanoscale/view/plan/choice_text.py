"""The sentence about a layout that the plan chose."""

from nanoscale.common.units import counted
from nanoscale.plan.predict import SURE, Prediction, filled_share
from nanoscale.plan.search.choice import SIMPLER, SLOWEST, LayoutChoice
from nanoscale.view.job_text import layout_of

EVEN = 5e-4
"""The share of the time below which two layouts are as fast."""


def choice_line(choice: LayoutChoice) -> str:
    """Return what was chosen and why, in one line."""
    plan, result = choice.plan, choice.result
    devices = f"{choice.world} × {plan.hardware.device}"
    if choice.is_assumed:
        devices += " (the recipe's reference: type cluster=NAME if the hosts have other devices)"
    chosen, considered = layout_of(plan.config), counted(result.considered, "layout")
    bound = plan.config.parallel.activation_memory
    if bound is not None:
        filled = filled_share(plan.memory, plan.capacity)
        part = f"at most {bound:.0%} of the memory that states and work space leave"
        if filled > bound:
            return f"no layout stores activations in {part}, on {devices}; {chosen} comes closest"
    if not plan.fits:
        return f"none of the {considered} considered fits {devices}; {chosen} comes closest"
    sure = [found.time.seconds for found in result.ranked if found.may_be_chosen]
    why = f"of the {considered} considered, the one that most probably fits"
    if sure:
        near = "" if plan.time.seconds < (1 + EVEN) * min(sure) else f"within {SIMPLER:.0%} of "
        what = f"fits with a probability of {SURE:.0%} or more"
        if bound is not None:
            what = f"stores activations in {part} (it fills {filled:.0%})"
        why = f"{near}the fastest of {considered} considered that {what}"
    speed = f"{plan.time.tokens_per_s_per_gpu:,.0f} tokens/s per device"
    return f"{chosen}: {why}, on {devices}, with {speed}{_runner_up(choice)}"


def _runner_up(choice: LayoutChoice) -> str:
    """Describe the fastest layout with other degrees or another ZeRO stage."""
    chosen = choice.plan
    others = (plan for plan in choice.result.ranked if _degrees(plan) != _degrees(chosen))
    other = min(others, key=lambda plan: plan.time.seconds, default=None)
    if other is None:
        return ""
    slower = other.time.seconds / chosen.time.seconds - 1
    if slower > SLOWEST - 1:  # the search leaves out some of these
        return f"; no other degrees are within {SLOWEST - 1:.0%} of it"
    if abs(slower) < EVEN:
        return f"; {layout_of(other.config)} is as fast"
    if slower < 0:
        why = f"and fits with a probability of {other.fits_probability:.0%}"
        if other.may_be_chosen:
            why = f"but needs more axes of parallelism, which {SIMPLER:.0%} does not outweigh"
        return f"; {layout_of(other.config)} would be {-slower:.1%} faster {why}"
    return f"; {layout_of(other.config)} is {slower:.1%} slower"


def _degrees(plan: Prediction) -> tuple[int, ...]:
    layout = plan.config.parallel
    experts = layout.ep, layout.ep_over_tp
    return (layout.dp_replicate, layout.tp, layout.pp, layout.cp, *experts, plan.config.zero.stage)
