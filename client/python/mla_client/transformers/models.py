"""Facts about a transformers model that the adapter needs, read from its modules."""

from __future__ import annotations

from typing import Any

import torch

from mla_client import errors
from mla_client.service import Model, Service
from mla_client.serving import Layers, refuse
from mla_client.serving.layers import Pair, id_of, split, upload, weights_of
from mla_client.types import Geometry

# Values of config.model_type. All these models pass normed latents and rotated keys to the cache.
MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "youtu",
               "deepseek_v32", "glm_moe_dsa")
# An indexer in these models chooses positions for each row.
SPARSE_TYPES = ("deepseek_v32", "glm_moe_dsa")
# Types of the family that are refused, and why.
REASONS = {
    "kimi_linear": "layers of linear attention lie between those with latents",
    "minicpm3": "the server's GPU kernels need kv_lora_rank 512 and rope_dim 64",
    "mistral4": "the server's GPU kernels need kv_lora_rank 512",
}


def layers_of(model: Any) -> Layers:
    """The modules that call the attention function. Unimplemented if the model is of no supported
    kind, or its layers differ."""
    kind = getattr(model.config, "model_type", "")
    if kind not in MODEL_TYPES:
        reason = REASONS.get(kind, "it is not known to keep latents in the cache")
        raise errors.Unimplemented(
            f"model_type {kind!r}: {reason}; supported: {', '.join(MODEL_TYPES)}")
    layers = Layers()
    for module in model.modules():
        if hasattr(module, "kv_b_proj") and hasattr(module, "layer_idx"):
            layers.add(f"{kind}, layer {module.layer_idx}", module.layer_idx,
                       Geometry(module.num_heads, module.kv_lora_rank, module.qk_rope_head_dim,
                                module.qk_nope_head_dim, module.v_head_dim),
                       float(module.scaling), module)
    layers.check_whole()
    return layers


def pair_of(module: Any, geometry: Geometry) -> Pair:
    """W_UK [heads, nope, lora] and W_UV [heads, lora, v] of a layer.

    Unimplemented where `kv_b_proj` holds anything but the plain matrix: a quantised one, or a slice
    of the heads under tensor parallelism.
    """
    weight = module.kv_b_proj.weight
    refuse([(getattr(module.kv_b_proj, "bias", None) is not None,
             "kv_b_proj: it has a bias, which the server does not add"),
            (weight.is_meta or weight.dtype not in (torch.float32, torch.bfloat16, torch.float16),
             f"kv_b_proj: got {weight.dtype} on {weight.device}, must be the plain matrix: neither "
             "quantised nor split")])
    return split(weight, geometry)


def register(service: Service, model: Any, layers: Layers, model_id: str, kv_format: str,
             page_size: int) -> Model:
    """Registers the model and uploads its weights. Without an id it gets one that follows from its
    weights, so that workers of the same checkpoint share a model."""
    weights = weights_of(layers.in_order(), lambda module: pair_of(module, layers.geometry))
    if not model_id:
        model_id = id_of(model.config.model_type, map(weights, range(len(layers))))
    sparse = {}
    if model.config.model_type in SPARSE_TYPES:
        sparse = {"attention": "sparse_v32", "top_k": model.config.index_topk}
    registered = service.register_model(
        layers.spec(model_id, page_size=page_size, kv_format=kv_format, **sparse))
    upload(registered, weights)
    service._prepare_moved(model_id, lambda to: upload(to, weights))
    return registered
