"""The times, the sizes and the number of a job's checkpoints, in sentences."""

from dataclasses import asdict, replace
from typing import Any

from nanoscale.common.units import byte_size, counted, duration, listed
from nanoscale.plan.saving import SavingPlan


def document(saving: SavingPlan) -> dict[str, Any]:
    """Return the entry `checkpoints` of `plan --json` and `train --dry-run --json`; sizes are in bytes."""
    return {
        **asdict(saving.config),
        "every_minutes_in_steps": saving.minutes_in_steps,
        "bytes": saving.bytes or None,
        "most_at_once": saving.most if saving.saves else 0,
        "needed_bytes": saving.needed if saving.bytes and saving.saves else None,
        "free_bytes": saving.free,
        "memory_save_s": saving.memory_save_s,
        "memory_stall_share": saving.memory_stall_share,
        "disk_loss_s": saving.disk_loss_s,
        "between_failures_s": saving.between_failures_s,
        "lost_share": saving.lost_share,
        "root": saving.root,
        "warnings": warnings(saving),
    }


def saving_lines(saving: SavingPlan) -> list[str]:
    """Return the plan of checkpoints as lines to show, warnings included."""
    lines = [f"{topic}: {sentence}" for topic, sentence in sentences(saving).items()]
    return [*lines, *warning_lines(saving)]


def warning_lines(saving: SavingPlan) -> list[str]:
    return [f"warning: {warning}" for warning in warnings(saving)]


def sentences(saving: SavingPlan) -> dict[str, str]:
    """Describe, by topic, the checkpoints (times, size, number), the disk space, and what a failure costs."""
    when = _times(saving)
    if not when or not saving.bytes:
        return {"checkpoints": listed(when) if when else "none is saved", **_failure(saving)}
    notice, left_s = "", saving.notice_s or 0.0
    if left_s > 0 and saving.config.at_stop:
        rate = byte_size(saving.bytes / left_s)
        notice = f"; one fits into the notice ({duration(left_s)} after two steps) at {rate}/s"
    free = "" if saving.free is None else f", {byte_size(saving.free)} free in {saving.root}"
    return {
        "checkpoints": f"{listed(when)}; {byte_size(saving.bytes)} each, {_kept(saving)}{notice}",
        "disk": f"{byte_size(saving.needed)} needed{free}{_rates(saving)}",
        **_failure(saving),
    }


def _rates(saving: SavingPlan) -> str:
    """Return the rates at which saves on disk take little time and uploads keep up: no rate is known."""
    if not saving.disk_loss_s:
        return ""
    rate = saving.bytes / saving.disk_loss_s / 2  # an interval is twice the mean loss
    needs = {
        f"saves take 1% of the time at {byte_size(99 * rate)}/s": not saving.config.asynchronous,
        f"uploads by one host need {byte_size(rate)}/s": saving.config.upload,
    }
    return "".join(f"; {need}" for need, applies in needs.items() if applies)


def summary(saving: SavingPlan) -> str:
    """Return the size and the times of checkpoints in a few words."""
    when = _times(replace(saving, minutes_in_steps=None))
    size = f" of {byte_size(saving.bytes)}" if saving.bytes else ""
    every = saving.config.memory_every
    memory = f"; in memory every {_steps(every)}" if every else ""
    return (f"checkpoints{size} {listed(when)}" if when else "no checkpoints") + memory


def _times(saving: SavingPlan) -> list[str]:
    settings = saving.config
    when = [f"every {_steps(settings.every)}"] if settings.every else []
    when += [_by_time(saving)] if settings.every_minutes else []
    when += ["after the best evaluations"] if settings.keep_best else []
    when += ["at the end"] if settings.at_end else []
    return [*when, *(["when it is stopped"] if settings.at_stop else [])]


def warnings(saving: SavingPlan) -> list[str]:
    """List the warnings about a full disk or restarts without a checkpoint."""
    warnings = []
    if saving.free is not None and saving.saves and saving.needed > saving.free:
        fewer = {None: " or checkpoint.keep_last=2", 1: ""}
        instead = fewer.get(saving.config.keep_last, " or checkpoint.keep_last=1")
        warnings.append(
            f"checkpoints will fill the disk: up to {saving.most} are kept or being written, which needs "
            f"{byte_size(saving.needed)}, and {byte_size(saving.free)} are free in {saving.root}. Free some "
            f"space, or set run.root=FOLDER{instead}"
        )
    if saving.notice_s is not None and (saving.notice_s <= 0 or not saving.config.at_stop):
        why = "two steps take longer" if saving.config.at_stop else "checkpoint.at_stop=false"
        warnings.append(f"nothing is saved after a notice (launcher.notice): {why}")
    if saving.restarts and not saving.during:
        warnings.append(
            f"with launcher.max_restarts={saving.restarts} the training would restart from step 1: no "
            "checkpoint is saved before the end. Set checkpoint.every_minutes=15"
        )
    return warnings


def _by_time(saving: SavingPlan) -> str:
    text = f"every {saving.config.every_minutes:g} min"
    if saving.minutes_in_steps is None:
        return text
    if saving.minutes_in_steps >= saving.steps:
        return f"{text} (the plan expects the training to take less)"
    return f"{text} (about every {_steps(saving.minutes_in_steps)})"


def _failure(saving: SavingPlan) -> dict[str, str]:
    """Return what a failure costs; nothing if it is unknown, or unlikely and the job does not restart."""
    if (ends := saving.failure_probability or 0.0) >= 0.01:
        often = f"with a probability of {ends:.0%} (launcher.mtbf_hours)"
        return {"failure": f"a failure ends the run early {often}: set launcher.max_restarts=3"}
    ways, every, loss_s = [], saving.config.memory_every, saving.disk_loss_s
    if every:
        stalls = saving.memory_stall_share
        stall = f"which stalls {stalls:.1%} of the time" if stalls else "without a stall"
        often = f"{_steps(every)}{'' if stalls is None else f', {stall}'}"
        most = counted(every, "step")
        most += f", {duration(every * saving.step_s)}" if saving.step_s else ""
        unless = "the host is lost" if saving.is_on_one_host else "two hosts are lost within them"
        ways = [
            f"a restart from memory loses at most {most} (saved every {often}), unless {unless}"
        ]
    if loss_s is not None:
        ways.append(f"a restart from disk loses {duration(loss_s)} on average")
    if saving.lost_share is not None and saving.between_failures_s is not None:
        often = duration(saving.between_failures_s)
        lost = f"{saving.lost_share:.2%}" if saving.lost_share >= 1e-4 else "less than 0.01%"
        ways.append(
            f"with a failure every {often} (launcher.mtbf_hours), {'saves in memory and ' * bool(every)}"
            f"repeated steps take {lost} of the time, without the restarts themselves"
        )
    return {"failure": "; ".join(ways)} if saving.restarts and ways else {}


def _steps(every: int) -> str:
    return "step" if every == 1 else f"{every:,} steps"


def _kept(saving: SavingPlan) -> str:
    settings = saving.config
    if settings.keep_last is None:
        return "all are kept, but of those saved by time only the newest"
    newest = f"the newest {settings.keep_last} are kept"
    newest = "the newest is kept" if settings.keep_last == 1 else newest
    every = f", every {settings.keep_every:,}th step" if settings.keep_every else ""
    if not settings.keep_best:
        return newest + every.replace(", ", ", and ", 1)
    best = "the best" if settings.keep_best == 1 else f"the best {settings.keep_best}"
    metric = "evaluation loss" if settings.best_metric == "eval_loss" else settings.best_metric
    return f"{newest}{every}, and {best} by {metric}"
