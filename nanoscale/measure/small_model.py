"""A small random model of a type of transformers, saved as publishers do, with what transformers ignores.

`python -m nanoscale.measure.small_model < request.json` writes it: the launcher never imports transformers. A
request is the `type`, its config.json as `document` or null for the usual one, and the `folder` to write; the
answer, the last line, is the `problem` or null with the number of `parameters` and the version of transformers.
"""

import json
import sys

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

from nanoscale.common.json_text import Json
from nanoscale.config.schema import Model
from nanoscale.config.translation.miniature import small_hf_model
from nanoscale.config.violations import nearest
from nanoscale.models.hf_model import build, named_tensors

_MOST_PARAMETERS = 5_000_000
_HEADS, _ROPE = {"head_dim": 128}, {"rope_theta": 1e4, "rope_type": "default"}
_LACKING: dict[str, Json] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_head": 64, "mamba_n_heads": 16},
    **dict.fromkeys(("hunyuan_v1_dense", "ministral"), _HEADS),
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2, **_HEADS},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp_text": {"indexer_budget": 8, "indexer_compress_ratio": 2, "indexer_head_dim": 16}
    | {"indexer_kv_heads": 1, "indexer_n_heads": 2},
}
"""Settings that the usual configuration of a type lacks, or has only for a model without its parts."""


def answer(request: Json) -> Json:
    """Save the model, and answer a request."""
    family, document = request["type"], request["document"]
    if family not in CAUSAL:
        problem = "is not a model_type of a causal language model of transformers"
        return {"problem": problem, "instead": nearest(family, CAUSAL)}
    if document is None:
        document = json.loads(transformers.CONFIG_MAPPING[family]().to_json_string())
        document |= _LACKING.get(family, {})
    shape = small_hf_model(Model(source="hf", name=family, hf_config=document))
    try:
        count = sum(parameter.numel() for parameter in build(shape).parameters())
        if count > _MOST_PARAMETERS:
            raise ValueError(f"with the sizes that are known here it has {count:,} parameters")
        torch.manual_seed(0)
        model = build(shape, real=True)
        model.init_weights()
    except Exception as error:  # errors of transformers, and of a model's own code
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return {"problem": f"transformers cannot build a small one: {reason[:300]}"}
    with torch.no_grad():
        for _, tensor in named_tensors(model):
            if tensor.is_floating_point() and tensor.ndim == 1:
                tensor += 0.3 * torch.randn_like(tensor)
    model.save_pretrained(request["folder"])
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    names = [it.replace("\\", "") for it in ignored if it.endswith((".", "*")) and "(" not in it]
    kept = {f"{name.strip('^.*')}.norm.weight": torch.arange(3.0) for name in names}
    file = f"{request['folder']}/model.safetensors"
    save_file(load_file(file) | kept, file, {"format": "pt"})
    return {"problem": None, "parameters": count, "transformers": transformers.__version__}


if __name__ == "__main__":
    print(json.dumps(answer(json.load(sys.stdin))))
