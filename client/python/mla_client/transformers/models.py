"""Facts about a transformers model that the adapter needs, read from its modules."""

from __future__ import annotations

import hashlib
from typing import Any, List, Tuple

import numpy as np
import numpy.typing as npt
import torch

from mla_client import errors
from mla_client.service import Model, Service
from mla_client.types import Geometry, ModelSpec

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


def attention_modules(model: Any) -> List[Any]:
    """The modules that call the attention function, by layer. Unimplemented if the model is of no
    supported kind."""
    kind = getattr(model.config, "model_type", "")
    if kind not in MODEL_TYPES:
        reason = REASONS.get(kind, "it is not known to keep latents in the cache")
        raise errors.Unimplemented(
            f"model_type {kind!r}: {reason}; supported: {', '.join(MODEL_TYPES)}")
    modules = [module for module in model.modules()
               if hasattr(module, "kv_b_proj") and hasattr(module, "layer_idx")]
    modules.sort(key=lambda module: module.layer_idx)
    if not modules or [module.layer_idx for module in modules] != list(range(len(modules))):
        raise errors.Unimplemented(
            f"{kind}: attention layers {[module.layer_idx for module in modules]}, must be "
            "numbered from 0")
    return modules


def geometry_of(modules: List[Any]) -> Tuple[Geometry, float]:
    """Geometry and softmax scale, which all layers must share."""
    found = {(Geometry(module.num_heads, module.kv_lora_rank, module.qk_rope_head_dim,
                       module.qk_nope_head_dim, module.v_head_dim), float(module.scaling))
             for module in modules}
    if len(found) > 1:
        raise errors.Unimplemented(
            f"layers differ in dimensions or scale: {sorted(map(str, found))}")
    return found.pop()


def weights_of(module: Any, geometry: Geometry) -> Tuple[npt.NDArray, npt.NDArray]:
    """W_UK [heads, nope, lora] and W_UV [heads, lora, v] of a layer, float32.

    Unimplemented where `kv_b_proj` holds anything but the plain matrix: a quantised one, or a slice
    of the heads under tensor parallelism.
    """
    weight = module.kv_b_proj.weight
    rows = geometry.num_heads * (geometry.nope_dim + geometry.v_dim)
    if getattr(module.kv_b_proj, "bias", None) is not None:
        raise errors.Unimplemented("kv_b_proj: it has a bias, which the server does not add")
    if (tuple(weight.shape) != (rows, geometry.kv_lora_rank) or weight.is_meta
            or weight.dtype not in (torch.float32, torch.bfloat16, torch.float16)):
        raise errors.Unimplemented(
            f"kv_b_proj: got {weight.dtype} {tuple(weight.shape)} on {weight.device}, must be the "
            f"plain matrix {(rows, geometry.kv_lora_rank)}: neither quantised nor split")
    matrix = weight.detach().to(device="cpu", dtype=torch.float32).numpy()
    matrix = matrix.reshape(geometry.num_heads, geometry.nope_dim + geometry.v_dim, -1)
    return (np.ascontiguousarray(matrix[:, :geometry.nope_dim]),
            np.ascontiguousarray(matrix[:, geometry.nope_dim:].transpose(0, 2, 1)))


def register(service: Service, model: Any, modules: List[Any], model_id: str, kv_format: str,
             page_size: int) -> Model:
    """Registers the model and uploads its weights. Without an id it gets one that follows from its
    weights, so that workers of the same checkpoint share a model."""
    geometry, scale = geometry_of(modules)
    if not model_id:
        digest = hashlib.sha256()
        for module in modules:
            for part in weights_of(module, geometry):
                digest.update(part.data)
        model_id = f"{model.config.model_type}-{digest.hexdigest()[:16]}"
    sparse = {}
    if model.config.model_type in SPARSE_TYPES:
        sparse = {"attention": "sparse_v32", "top_k": model.config.index_topk}
    registered = service.register_model(ModelSpec(
        model_id, geometry, len(modules), scale, page_size, kv_format=kv_format, **sparse))

    def upload(to: Model) -> None:
        complete = False
        for layer, module in enumerate(modules):
            complete = to.upload_weights(layer, *weights_of(module, geometry)).complete
        if not complete:
            raise errors.Internal(f"model {model_id}: weights are not complete after their upload")

    upload(registered)
    service._prepare_moved(model_id, upload)
    return registered
