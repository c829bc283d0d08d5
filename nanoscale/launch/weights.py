"""What a training begins with is looked at before anything is written: `model.init_from`."""

from __future__ import annotations

from dataclasses import replace

from nanoscale.checkpoint.pretrained import find
from nanoscale.checkpoint.tensor_files import BadFileError
from nanoscale.config.compose import Composed
from nanoscale.config.pretrained import KEY, NoSuchModelError, is_folder, locate
from nanoscale.config.report import refuse
from nanoscale.config.schema import Config
from nanoscale.errors import Violation


def with_weights(composed: Composed, config: Config, *, fetch: bool) -> Config:
    """The same with the folder of `model.init_from`, whose files hold what the model needs.

    Headers are read, not the weights. `fetch`: a name's are fetched from the hub; else they are not looked at.

    Raises:
        UserError: a file or tensor is missing, damaged or of another shape.
    """
    asked = config.model.init_from
    if asked is None or not (fetch or is_folder(asked)):
        return config
    try:
        folder = locate(asked, weights=True)
        find(folder, config.model)
    except (NoSuchModelError, BadFileError) as error:
        refuse([Violation(KEY, asked, composed.source(KEY), str(error))], kind="model")
    return replace(config, model=replace(config.model, init_from=str(folder)))
