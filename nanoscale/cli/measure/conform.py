"""`nanoscale conform`: the job made small, in its layout and in one process, compared in fp64 on this CPU."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.described_machines import on_described_hosts, planned_hosts
from nanoscale.cli.common.output import DONE, FAILED, answer, saying
from nanoscale.cli.common.rehearsal import compared
from nanoscale.cli.common.request import HOSTS, CommandLine, request_job, requesting
from nanoscale.common import display
from nanoscale.common.errors import UserError, refuse_option
from nanoscale.view.conformity_text import card_cells, card_lines, sentences

if TYPE_CHECKING:
    from nanoscale.config.resolved import ResolvedConfig
    from nanoscale.launch.request import Request

_MODEL = (
    "model=hf",
    "data=npy",
    "data.eos=0",
    "train.seq_len=16",
    "train.steps=4",
    "train.sample_tokens=0",
)
_RANKS = ("launcher.device=cpu", "launcher.devices=2")
_ROWS = {
    "dp, ZeRO 3": ("parallel.dp=2", "zero=stage3"),
    "documents": ("launcher.devices=1", "data.document_mask=true"),
    "tp": ("parallel.tp=2",),
    "pp": ("parallel.pp=2",),
    "cp, ring": ("parallel.cp=2", "parallel.cp_method=ring"),
    "cp, ulysses": ("parallel.cp=2", "parallel.cp_method=ulysses"),
    "ep": ("parallel.dp=2", "parallel.ep=2"),
    "recomputation": ("parallel.dp=2", "parallel.activation_checkpointing=full"),
    "LoRA": ("parallel.dp=2", "lora.rank=2"),
    "export": ("launcher.devices=1",),
}
"""The rows of a card, and the overrides of their jobs."""


@requesting("config", "config_dir", *HOSTS, "trust")
def conform(
    line: CommandLine,
    compiled: bool = opt.flag(
        "Compare compiled blocks with blocks that are not, in fp32", "--compile"
    ),
    card: str | None = opt.option(
        "Compare a small model of transformers in every layout", metavar="TYPE|DIR"
    ),
    as_json: opt.AsJson = False,
) -> int:
    """Compare a job's layout with one process, in fp64 on this CPU.

    The job is made small: few narrow blocks of the same kinds, and degrees of at most 4. It trains four steps
    in its layout and in one process. Losses, gradient norms, each parameter's gradients and updates, and an
    evaluation are compared, also after a resume in both. Your own code (hooks) takes part. The exit code is 1
    if something differs. With --card, the job is a small random model of transformers, of a `model_type` or of
    the kind of a folder's model, in one layout after another.
    """
    from nanoscale.launch.preflight.by_library import with_weights

    line = on_described_hosts(line)
    if card is not None:
        opt.refuse_several({"--card": card, "--compile": compiled})
        made = _card(line, card)
        answer(as_json, made, lambda it: display.show("\n".join(card_lines(it))))
        return DONE if made["equal"] else FAILED
    request = _request(line)
    config = request.config
    if config.model.source == "hf":  # transformers knows what it cannot divide
        config = with_weights(request.composed, config, fetch=False)
    result = compared(config, compiled=compiled)
    if result is None:
        return FAILED
    answer(as_json, result, lambda it: display.show("\n".join(sentences(it))))
    return DONE if result["equal"] else FAILED


def _request(line: CommandLine, *first: str, last: tuple[str, ...] = ()) -> Request:
    """Return the request of a line with more overrides."""
    from nanoscale.plan.hardware.planned_devices import planned_devices

    line = replace(line, overrides=[*first, *(line.overrides or ()), *last])
    return request_job(line, devices=planned_devices, hosts=planned_hosts)


def _card(line: CommandLine, name: str) -> dict[str, Any]:
    """Return the card of a type or of the model in a folder.

    Raises:
        UserError: there is no such type or folder, or an override is wrong.
    """
    from nanoscale.common.versions import versions
    from nanoscale.config.hf.families import UnsupportedError
    from nanoscale.config.hf.pretrained import NoSuchModelError, locate
    from nanoscale.config.hf.text_part import read_config
    from nanoscale.config.model_math import experts
    from nanoscale.config.translation.miniature import miniature
    from nanoscale.launch.lifecycle.small_job import card
    from nanoscale.launch.preflight.by_library import save_small_model

    document, family = None, name
    try:
        if "/" in name or Path(name).exists():
            document = read_config(locate(name, weights=False))
            family = str(document.get("model_type"))
    except (NoSuchModelError, UnsupportedError) as error:
        refuse_option("--card", name, str(error))
    with saying() as say, TemporaryDirectory(prefix="nanoscale-model-") as folder:
        saved = save_small_model(family, document, Path(folder))
        if saved["problem"] is not None:
            advice = (f"--card {it}" for it in saved.get("instead", ()))
            refuse_option("--card", name, saved["problem"], *advice)
        tokens = Path(folder, "tokens.npy")  # the small jobs have random ones
        tokens.write_bytes(bytes(4096))
        first = (*_MODEL, f"data.path={tokens}", f"model.name={folder}")
        base = _request(line, *first).config.model
        rows: dict[str, ResolvedConfig] = {}
        refused = {} if experts(base) else {"ep": "the model has no experts"}
        for row in _ROWS.keys() - refused:
            try:
                config = _request(line, *first, last=_ROWS[row]).config
                rows[row], _ = miniature(config, Path(folder))
            except UserError as error:
                refused[row] = "; ".join(it.message for it in error.violations) or error.message
        if "export" in rows:  # in the sizes of the folder's weights
            rows["export"] = replace(rows["export"], model=replace(base, init_from=folder))
        results = card(rows, say) | {row: {"refused": why} for row, why in refused.items()}
    cells = card_cells({row: results[row] for row in _ROWS})
    return {
        "model": name,
        "type": family,
        "parameters": saved["parameters"],
        "date": str(date.today()),
        "versions": {**versions(), "transformers": saved["transformers"]},
        "equal": all(cell["outcome"] in ("equal", "refused") for cell in cells.values()),
        "rows": cells,
    }
