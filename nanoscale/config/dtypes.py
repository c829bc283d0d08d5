"""The dtypes of weights, products and sums: a row for each, with its size and its names elsewhere."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Dtype:
    """A row of the table."""

    bytes: int
    """Bytes of a number."""
    torch_name: str
    """Its name in torch, and in Hugging Face's and DeepSpeed's settings."""
    safetensors_name: str


DTYPES = {
    "fp64": Dtype(8, "float64", "F64"),
    "fp32": Dtype(4, "float32", "F32"),
    "bf16": Dtype(2, "bfloat16", "BF16"),
    "fp16": Dtype(2, "float16", "F16"),
}


def fp8_tile(recipe: str) -> int:
    """Return the number of which the sizes of narrow products are multiples; 1 without a recipe."""
    return {"": 1, "mxfp8": 32, "nvfp4": 128}.get(recipe, 16)


def narrow_blocks(recipe: str, layers: int) -> int:
    """Return the number of blocks that multiply in 8 bits or 4: all, or with nvfp4 all but the last 15 %."""
    return max(1, layers * 17 // 20) if recipe == "nvfp4" else layers
