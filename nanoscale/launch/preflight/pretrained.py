"""The check of initial weights before anything is written: `model.init_from`, and `model=hf`."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import NoReturn

from nanoscale.checkpoint.hf.load import find
from nanoscale.common.errors import Violation
from nanoscale.config.hf import any_model
from nanoscale.config.hf.pretrained import KEY, NoSuchModelError, is_folder, locate, refuse_model
from nanoscale.config.hf.safetensors_headers import BadFileError
from nanoscale.config.hf.shape import HEAD, has_own_head
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.values.provenance import Composed
from nanoscale.config.violations import refuse


def with_weights(composed: Composed, config: ResolvedConfig, *, fetch: bool) -> ResolvedConfig:
    """Return the configuration with the folder of `model.init_from`, whose files hold what the model needs.

    Headers are read, not the weights. With `fetch`, a name's files are downloaded from the hub; else they are
    not checked.

    Raises:
        UserError: a file or tensor is missing, damaged or of another shape.
    """
    if config.model.source == "hf":
        return _with_hf_model(composed, config, fetch=fetch)
    init_from = config.model.init_from
    if init_from is None or not (fetch or is_folder(init_from)):
        return config
    try:
        folder = locate(init_from, weights=True)
        find(folder, config.model)
        if config.model.tie_embeddings and has_own_head(folder):
            _refuse_tied(composed, folder)
    except (NoSuchModelError, BadFileError) as error:
        refuse_model(composed, KEY, init_from, error)
    return replace(config, model=replace(config.model, init_from=str(folder)))


def _refuse_tied(composed: Composed, folder: Path) -> NoReturn:
    """Raise a UserError: files that were fetched after their config.json have a head of their own."""
    message = (
        f"must be false: {folder} has an embedding and a head ({HEAD}) with different values, and "
        f"transformers does not tie them either"
    )
    key = "model.tie_embeddings"
    violation = Violation(key, True, composed.source(key), message, (f"{key}=false",))
    refuse([violation], kind="model")


def _with_hf_model(composed: Composed, config: ResolvedConfig, *, fetch: bool) -> ResolvedConfig:
    """Return the configuration of a transformers model, with the number of its parameters.

    Only transformers can check it, in a process that takes seconds.
    """
    model, init_from = config.model, config.model.init_from
    try:
        is_needed = init_from is not None and (fetch or is_folder(init_from))
        folder = (
            str(locate(init_from, weights=True)) if init_from is not None and is_needed else None
        )
    except NoSuchModelError as error:
        refuse_model(composed, KEY, init_from, error)
    request = json.dumps({"model": asdict(model), "folder": folder})
    command = [sys.executable, "-m", "nanoscale.checkpoint.hf.load_any_model"]
    result = subprocess.run(
        command, input=request, capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    if result.returncode:
        last = "".join(result.stderr.strip().splitlines()[-1:])
        problem = f"cannot be checked: {last or 'transformers does not start'}"
        answer = {"problem": problem, "of": "model"}
    else:
        answer = json.loads(result.stdout.splitlines()[-1])
    if answer["problem"] is not None:
        has_code = "auto_map" in model.hf_config and not model.trust_remote_code
        code = "model.trust_remote_code=true runs the code that comes with it" if has_code else None
        key, value = (KEY, init_from) if answer["of"] == "files" else (any_model.KEY, model.name)
        text = "; ".join(filter(None, (answer["problem"], code)))
        refuse([Violation(key, value, composed.source(key), text)], kind="model")
    checked = replace(model, init_from=folder or init_from, parameters=answer["parameters"])
    return replace(config, model=checked)
