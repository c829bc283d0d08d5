"""The result of `nanoscale conform` in sentences."""

from collections.abc import Iterator
from math import isfinite

from nanoscale.common.json_text import Json
from nanoscale.common.units import listed

_EXACT = 1e-6
"""A factor this near to a whole number, or to 1 divided by one, is that number."""
_MOST = 64
_WHAT = {
    "loss": "the loss",
    "gradient": "the gradient of {parameter}",
    "grad_norm": "the gradient norm",
    "update": "the update of {parameter}",
    "metric": "the logged {parameter}",
}
_PHASES = {
    "loss": "the forward pass, or a mean over the tokens of one rank or micro batch",
    "gradient": "the backward pass, or the reduction of gradients",
    "grad_norm": "the norm over all ranks; each gradient is equal",
    "update": "the optimizer; the gradients are equal",
    "metric": "the evaluation, or what the log gathers from the ranks; losses, gradients and updates are equal",
}
_COMPILED = {"loss": "the forward pass of compiled blocks", "gradient": "their backward pass"}
_BETWEEN = (
    "the code between the steps, such as a callback, the evaluation or a checkpoint: the step before is equal, "
    "so weights, buffers or modes changed after it, or a parameter that begins as 0 has no effect before it"
)


def sentences(result: Json) -> Iterator[str]:
    """Yield the sentences for people; the last one says what the comparison cannot show."""
    name, saved = layout_name(result), result["saved_step"]
    other = "the layout without torch.compile" if result["compiled"] else "one process"
    runs = {
        name: result,
        "resumed in the layout": result["restored"],
        "resumed in one process": result["resumed"],
    }
    for run, compared in runs.items():
        if compared is None:
            continue
        where = f" from step {saved}" if compared is not result else ""
        if (first := compared["first_difference"]) is not None:
            yield f"{run}{where}: differs from {other}. {_difference(first, result, other)}"
        else:
            yield f"{run}{where}: equal to {compared['largest']:.0e}"
    for finding in result["findings"]:
        yield f"{name}: {finding}"
    left_out = result["left_out"]
    lacks = f", and the small job lacks {listed(left_out)}" if left_out else ""
    steps = f"of {result['steps']} steps"
    compared = f"and update {steps}, samples, an evaluation, a checkpoint and metrics of callbacks, in fp64"
    not_run = "compiled blocks, large sizes, data files, checkpoints in memory, rollbacks, exports, DeepSpeed"
    if result["compiled"]:
        compared = f"{steps} and an evaluation, with compiled blocks and without, in fp32"
        not_run = "large sizes, the job's optimizer, and what is compared without --compile"
    yield (
        f"Compared: losses, gradient norms, each gradient {compared} on this CPU. "
        f"Not run: GPU kernels, lower precision, {not_run}{lacks}"
    )


def layout_name(result: Json) -> str:
    """Return the small job's layout, as in `dp 2 · tp 2, ZeRO 3`."""
    degrees = " · ".join(f"{axis} {degree}" for axis, degree in result["layout"].items())
    compiled = ", compiled" if result.get("compiled") else ""
    return f"{degrees or 'one rank'}, ZeRO {result['zero_stage']}{compiled}"


def _difference(first: Json, result: Json, other: str) -> str:
    where = _PHASES[first["what"]]
    if result["compiled"]:
        where = _COMPILED.get(first["what"], where)
    elif first["what"] == "loss" and first["step"] > first["begin"]:
        where = _BETWEEN
    elif first["step"] == first["begin"] > 1:
        where = "what the checkpoint lacks, or what is lost while it is loaded"
    text = f"In step {first['step']}, {_named(first, other)}: look at {where}"
    if not result["compiled"]:
        text += _meaning(first["factor"], result["layout"], result["micro_batches"])
    if then := first.get("then"):
        text += f". In the same step, {_named(then, other)}"
    return text


def _named(difference: Json, other: str) -> str:
    what = _WHAT[difference["what"]].format(parameter=difference["parameter"])
    factor = difference["factor"]
    if factor == 0:
        reached = (
            "no gradient reaches this parameter" if "gradient" in what else "nothing reaches it"
        )
        return f"{what} is 0 in the layout, so {reached}"
    if factor is None or abs(factor - 1) <= _EXACT:
        return f"{what} differs by {difference['relative']:.2g} of its size"
    if not isfinite(factor):
        return f"{what} is not a finite number in the layout"
    number, is_inverse = _whole(factor)
    shown = f"{'1/' * is_inverse}{number}" if number else f"{factor:.6g}"
    return f"{what} is {shown} times as large as in {other}"


def _whole(factor: float | None) -> tuple[int, bool]:
    """Return the whole number that a factor is, or its inverse, and True for the inverse; 0: it is neither."""
    for value, is_inverse in ((factor, False), (1 / factor, True)) if factor else ():
        if isfinite(value) and abs(value - round(value)) <= _EXACT * abs(value) < _EXACT * _MOST:
            return round(value), is_inverse
    return 0, False


def _meaning(factor: float | None, degrees: dict[str, int], micro_batches: int) -> str:
    """Return the sentence on a factor that a missing or repeated reduction explains."""
    number, is_inverse = _whole(factor)
    if number < 2:
        return ""
    axes = [axis for axis, degree in degrees.items() if degree == number]
    names = [f"the degree of {listed(axes)}"] if axes else []
    names += ["the number of micro batches"] if number == micro_batches else []
    over = f"{number} ranks" if axes or not names else f"{number} micro batches"
    named = f" ({' or '.join(names)})" if names else ""
    if is_inverse:
        return f". A sum over {over} is missing, or a division by {number} is done twice{named}"
    return f". A sum over {over} is done twice, or a division by {number} is missing{named}"


# --- the card of a model --------------------------------------------------------------------------


def card_cells(results: dict[str, Json]) -> dict[str, Json]:
    """Return the outcome of each row, its largest difference or None, and its sentence or None.

    The last row is about the resumes of all layouts in one process.
    """
    cells = {row: _cell(result) for row, result in results.items()}
    resumed = [it["largest"] for row in results.values() if (it := row.get("resumed"))]
    cells["resume elsewhere"] = _outcome("unverified", "no layout has been resumed")
    if resumed:
        cells["resume elsewhere"] = _outcome("differs", "a layout above says how")
    if resumed and None not in resumed:
        cells["resume elsewhere"] = _outcome("equal", largest=max(resumed))
    return cells


def _cell(result: Json) -> Json:
    for outcome in ("refused", "failed"):
        if outcome in result:
            lines = [it for it in result[outcome].splitlines() if not it.startswith(" ")]
            return _outcome(outcome, ": ".join(dict.fromkeys([lines[0], lines[-1]])))
    if result["equal"]:
        return _outcome("equal", largest=result["largest"])
    *compared, _ = sentences(result)
    return _outcome("differs", " ".join(it for it in compared if ": equal to " not in it))


def _outcome(name: str, message: str | None = None, largest: float | None = None) -> Json:
    return {"outcome": name, "largest": largest, "message": message}


def card_lines(card: Json) -> Iterator[str]:
    """Yield a line for each row of a card."""
    yield (
        f"{card['model']}: a small random model of type {card['type']} with {card['parameters']:,} parameters, "
        "and the largest relative differences from one process in fp64"
    )
    for row, cell in card["rows"].items():
        shown = f"{cell['largest']:.0e}" if cell["outcome"] == "equal" else cell["outcome"]
        yield f"  {row:18}{shown}{': ' * bool(cell['message'])}{cell['message'] or ''}"
