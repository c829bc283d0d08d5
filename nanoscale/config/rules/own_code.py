"""The rules on own code: each part that a configuration chooses is defined, and each defined part is used."""

from pathlib import Path

from nanoscale.config.objectives import ANSWERS
from nanoscale.config.reference import declared, value_of
from nanoscale.config.rules.resolution import Resolution
from nanoscale.config.rules.rule import of_kind, only_with, other_than, refused
from nanoscale.config.values import hooks
from nanoscale.config.violations import nearest, override

_OWN = "hooks"
_LOSS, _OPTIMIZER, _DATA = ({hooks.CHOSEN_BY[name]: _OWN} for name in ("loss", "optimizer", "data"))
RULES = of_kind("config",
    *(only_with(f"hooks.{name}", {"hooks.path": other_than(None)})
        for name in ("sha256", "settings")),
    refused("train.z_loss", {**_LOSS, "train.z_loss": other_than(0.0)},
        "is a part of nanoscale's own loss, and train.objective=hooks has another", "train.z_loss=0"),
    refused("optimizer.ema_decay", {**_OPTIMIZER, "optimizer.ema_decay": other_than(None)},
        "is kept in states of nanoscale's own optimizers, and optimizer=hooks has others",
        "optimizer.ema_decay=null", "optimizer=adamw"),
    refused("precision.compute", {**_OPTIMIZER, "precision.compute": "fp16"},
        "may skip the first steps, and the states of optimizer=hooks are not known before its first update",
        "precision=bf16", "optimizer=adamw"),
    refused("train.sample_tokens", {**_DATA, "train.sample_tokens": bool},
        "needs a tokenizer to write a text, and data.source=hooks has none", "train.sample_tokens=0"),
    refused("train.objective", {**_DATA, "train.objective": ("masked", "classify", *ANSWERS)},
        "makes samples of tokens in files, and data() of hooks.path makes its own",
        "train.objective=next-token"),
)  # fmt: skip


def check_hooks(resolution: Resolution) -> None:
    """Check that the file of hooks defines what the configuration chooses, and nothing that is left unused."""
    config = resolution.config
    chosen = {name: key for name, key in hooks.CHOSEN_BY.items() if value_of(config, key) == _OWN}
    if config.hooks.path is None:
        for name, key in chosen.items():
            usual = override(key, declared()[key].default)
            message = f"needs hooks.path, a file that defines {_call(name)}"
            resolution.refuse(key, message, usual, "hooks.path=FILE.py")
        return
    names = hooks.read(Path(config.hooks.path)).names
    for name, key in hooks.CHOSEN_BY.items():
        if name in chosen and name not in names:
            usual = override(key, declared()[key].default)
            message = f"defines no {_call(name)}, which {key}=hooks needs"
            resolution.refuse("hooks.path", message, usual)
        elif name in names and name not in chosen:
            message = f"defines {name}(), which would be ignored"
            group = {"model.source": "model", "optimizer.name": "optimizer", "data.source": "data"}
            resolution.refuse("hooks.path", message, override(group.get(key, key), _OWN))
    for name, count in names.items():
        wanted = hooks.PARAMETERS.get(name)
        if wanted is None and name.startswith("on_"):
            near = [f"{it}()" for it in nearest(name, hooks.PARAMETERS)] or ["another name"]
            message = f"defines {name}(), which is never called: {' or '.join(near)}?"
            resolution.refuse("hooks.path", message)
        elif wanted is not None and count not in (None, len(wanted)):
            message = f"defines {name}() with another number of parameters than {_call(name)}"
            resolution.refuse("hooks.path", message)


def _call(name: str) -> str:
    return f"{name}({', '.join(hooks.PARAMETERS[name])})"
