"""The training that a budget of money, device hours or days is enough for."""

import math
import re
from dataclasses import replace

from nanoscale.common.errors import Violation
from nanoscale.config.reference import declared
from nanoscale.config.violations import refuse
from nanoscale.plan.predict import Prediction

_FORM = re.compile(r"(\d+(?:\.\d*)?|\.\d+) ?([hd]|[A-Za-z]{3})")
_FORMS = ("--budget 20000EUR", "--budget 2000h", "--budget 14d")


def within_budget(text: str, plan: Prediction) -> Prediction:
    """Return the plan of the training with the most steps that a budget is enough for.

    Args:
        text: money in `cluster.price`'s currency (20000EUR), device hours (2000h) or days of the job (14d).

    Raises:
        UserError: the text has another form, money has no price, or it is not enough for one step, or for too
            many.
    """
    match = _FORM.fullmatch(text)
    if match is None or not float(match[1]):
        message = "must be an amount of money, of device hours (h) or of days of the job (d)"
        refuse([Violation("--budget", text, "", message, _FORMS)], "usage")
    amount, unit = float(match[1]), match[2]
    one = _with_steps(plan, 1).training
    per_step = {"h": one.device_hours, "d": one.hours / 24}.get(unit, one.cost)
    if not per_step:
        message = f"--budget {text} needs the price of a device for an hour in {unit}"
        price = plan.hardware.price
        refuse([Violation("cluster.price", price, "", message, ("cluster.price=2.5",))])
    steps = int(amount / per_step * (1 + 1e-12))  # 0.3 h are 3 steps of 0.1 h
    if not steps:
        least = f"--budget {math.ceil(per_step * 1000) / 1000:.10g}{unit}"
        refuse([Violation("--budget", text, "", "is not enough for one step", (least,))], "usage")
    if (most := declared()["train.steps"].at_most) is not None and steps > most:
        message = f"is enough for more than the {most:,} steps that a training may have"
        refuse([Violation("--budget", text, "", message)], "usage")
    return _with_steps(plan, steps)


def _with_steps(plan: Prediction, steps: int) -> Prediction:
    config = plan.config
    return replace(plan, config=replace(config, train=replace(config.train, steps=steps)))
