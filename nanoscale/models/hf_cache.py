"""The cache of a model of transformers, with the interface of `kv_cache.Cache`.

It holds what transformers' own code keeps of earlier tokens: keys and values, latents, recurrent states.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nanoscale.models.hf_model import HFModel
from nanoscale.models.kv_cache import without_cudnn_attention


class HFCache:
    """The cache of a whole model of transformers, for sequences of one length.

    If the model's code takes and returns none (Mamba, until transformers 5.23), all tokens are computed again.
    """

    def __init__(self, model: HFModel, batch: int) -> None:
        self._hf = model.hf
        self._tokens = torch.zeros(batch, 0, dtype=torch.long)
        """The tokens so far `[batch, seq]`."""
        self._cache: Any = None

    @torch.inference_mode()
    def logits(
        self, tokens: Tensor, counts: Tensor | None = None, *, last_only: bool = False
    ) -> Tensor:
        """Return logits as `kv_cache.Cache.logits`; all `counts` are equal."""
        self._tokens = torch.cat([self._tokens.to(tokens.device), tokens], dim=1)
        given = self._tokens if self._cache is None else tokens
        keep = int(last_only)  # 0 keeps all
        accepted = inspect.signature(self._hf.forward).parameters
        name = "cache" if "cache" in accepted else "past_key_values"  # until transformers 5.23
        options = {"use_cache": True, name: self._cache, "logits_to_keep": keep}
        options = {name: value for name, value in options.items() if name in accepted}
        with without_cudnn_attention():
            result = self._hf(input_ids=given, **options)
        self._cache = getattr(result, name, None) if name in accepted else None
        return result.logits[:, -1 if last_only else -tokens.shape[1] :]

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Drop all sequences except these."""
        chosen = torch.tensor(rows, device=self._tokens.device)
        self._tokens = self._tokens[chosen]
        if self._cache is not None:
            self._cache.reorder_cache(chosen)
