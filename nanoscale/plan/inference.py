"""The memory of `generate` and of `eval --tasks` on one device, in closed form.

Both load the weights in one dtype (`generate.weights`). A text is counted as a prompt that fills its length:
all its tokens go through the model together (`models.kv_cache`).
"""

from bisect import bisect_left
from dataclasses import dataclass

from nanoscale.config.model_math import parameters
from nanoscale.config.schema import Model


@dataclass(frozen=True, slots=True)
class InferenceMemory:
    """The memory of a model and its texts."""

    model: Model
    number: int
    """Bytes of a weight, a key or a value: 2 in bf16, 4 in fp32."""

    @property
    def weights(self) -> int:
        """Bytes of the parameters and of the routers' counters."""
        model = self.model
        return self.number * parameters(model) + 16 * model.layers * model.experts

    @property
    def token(self) -> int:
        """Bytes of the keys and values of a token."""
        return 2 * self.number * self.model.layers * self.model.kv_width

    def needed(self, command: str, texts: int, length: int) -> int:
        """Return the bytes of a batch of texts of the same length, in tokens."""
        tokens, vocab, number = texts * length, self.model.vocab, self.number
        in_fp32 = 4 if number < 4 else 0
        head = texts * vocab * (number + in_fp32)  # logits of the last token
        if command == "eval":  # logits of all tokens; their logarithms in fp32, text by text
            scores = length * vocab * (4 + in_fp32)
            head = tokens * vocab * number + max(scores, 2 * tokens * self.model.hidden * number)
        return self.weights + tokens * self.token + max(tokens * self._block() * number, head)

    def most(self, command: str, capacity: int, length: int | None = None) -> int:
        """Return the number of texts of this length that fit at once; None: the tokens of the longest text."""
        return bisect_left(
            range(1, 1 << 40),
            True,
            key=lambda n: self.needed(command, *((n, length) if length else (1, n))) > capacity,
        )

    def _block(self) -> int:
        """Count the numbers of a token that a block's forward pass holds at its peak, without the cache.

        The peak is in the rotation of queries, in attention, or in the feed-forward: the stream three or four
        times (embedded, before and after attention, normalized), and queries before, in and after rotation,
        or queries and attention's result, or of each expert the gate's activation, `up` and their product.
        """
        model = self.model
        inner = model.ffn * (3 if model.is_gated else 2)
        if model.experts:
            inner = model.experts_per_token * max(model.hidden + inner, 3 * model.hidden)
            inner = max(inner, 2 * model.hidden + 3 * model.shared_ffn)
        rotation = 3 * model.q_width + 2 * model.kv_width - model.hidden
        attention = 2 * model.q_width + 3 * model.kv_width + model.heads
        return 4 * model.hidden + model.head_width + max(rotation, attention, inner)
