"""Facts about a transformers model that the adapter needs, read from its modules."""

from __future__ import annotations

from typing import Any, Tuple

import torch

from mla_client import errors
from mla_client.service import Model, Service
from mla_client.serving import Layers, refuse
from mla_client.serving.layers import Pair, Weights, id_of, split, upload, weights_of
from mla_client.types import Geometry

# Values of config.model_type. All these models pass normed latents and rotated keys to the cache.
MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "youtu",
               "deepseek_v32", "glm_moe_dsa")
# Of these, the types whose attention layers also run with projections on the server.
PROJECTED_TYPES = ("deepseek_v3",)
# An indexer in these models chooses positions for each row.
SPARSE_TYPES = ("deepseek_v32", "glm_moe_dsa")
# Types of the family that are refused, and why.
REASONS = {
    "kimi_linear": "layers of linear attention lie between those with latents",
    "minicpm3": "the server's GPU kernels need kv_lora_rank 512 and rope_dim 64",
    "mistral4": "the server's GPU kernels need kv_lora_rank 512",
}


def layers_of(model: Any, projected: bool = False) -> Layers:
    """The modules that call the attention function. Unimplemented if the model is of no supported
    kind, or its layers differ. With `projected` their geometry has the projections."""
    kind = getattr(model.config, "model_type", "")
    if kind not in MODEL_TYPES:
        reason = REASONS.get(kind, "it is not known to keep latents in the cache")
        raise errors.Unimplemented(
            f"model_type {kind!r}: {reason}; supported: {', '.join(MODEL_TYPES)}")
    if projected and (kind not in PROJECTED_TYPES or model.config.q_lora_rank is None):
        raise errors.Unimplemented(
            f"projected: model_type {kind!r} with q_lora_rank {model.config.q_lora_rank}; "
            f"supported: {', '.join(PROJECTED_TYPES)} with low-rank queries")
    layers = Layers()
    for module in model.modules():
        if hasattr(module, "kv_b_proj") and hasattr(module, "layer_idx"):
            layers.add(f"{kind}, layer {module.layer_idx}", module.layer_idx,
                       Geometry(module.num_heads, module.kv_lora_rank, module.qk_rope_head_dim,
                                module.qk_nope_head_dim, module.v_head_dim,
                                q_lora_rank=module.q_lora_rank if projected else 0,
                                hidden_size=model.config.hidden_size if projected else 0),
                       float(module.scaling), module)
    layers.check_whole()
    return layers


def pair_of(module: Any, geometry: Geometry) -> Pair:
    """W_UK [heads, nope, lora] and W_UV [heads, lora, v] of a layer.

    Unimplemented where `kv_b_proj` holds anything but the plain matrix: a quantised one, or a slice
    of the heads under tensor parallelism.
    """
    return split(_matrix_of(module, "kv_b_proj"), geometry)


def _matrix_of(module: Any, name: str) -> torch.Tensor:
    """The weight of a projection, [out, in]. Unimplemented as pair_of."""
    projection = getattr(module, name)
    weight: torch.Tensor = projection.weight
    refuse([(getattr(projection, "bias", None) is not None,
             f"{name}: it has a bias, which the server does not add"),
            (weight.is_meta or weight.dtype not in (torch.float32, torch.bfloat16, torch.float16),
             f"{name}: got {weight.dtype} on {weight.device}, must be the plain matrix: neither "
             "quantised nor split")])
    return weight


def projections_of(module: Any, geometry: Geometry) -> Tuple[torch.Tensor, torch.Tensor]:
    """W_UQ [heads, nope + rope, q_lora] and W_O [hidden, heads, v] of a layer.

    The rotated part of keys leaves transformers' rotation in halves. So that queries have the same
    order, the rows of an interleaved W_UQ are put in halves here."""
    heads, rope = geometry.num_heads, geometry.rope_dim
    w_uq, w_o = _matrix_of(module, "q_b_proj"), _matrix_of(module, "o_proj")
    want = (heads * (geometry.nope_dim + rope), geometry.q_lora_rank), (
        geometry.hidden_size, heads * geometry.v_dim)
    if (tuple(w_uq.shape), tuple(w_o.shape)) != want:
        raise errors.Unimplemented(
            f"q_b_proj, o_proj: got {tuple(w_uq.shape)} and {tuple(w_o.shape)}, must be the plain "
            f"matrices {want}: neither quantised nor split")
    w_uq = w_uq.detach().reshape(heads, -1, geometry.q_lora_rank)
    if module.config.rope_interleave:
        order = torch.arange(rope, device=w_uq.device).view(-1, 2).t().reshape(-1)
        w_uq = torch.cat((w_uq[:, :geometry.nope_dim],
                          w_uq[:, geometry.nope_dim:][:, order]), dim=1)
    return w_uq, w_o.detach().reshape(geometry.hidden_size, heads, geometry.v_dim)


def uploaded_of(module: Any, geometry: Geometry) -> Weights:
    """What the server gets of a layer: the pair, and with projections W_UQ and W_O."""
    pair = pair_of(module, geometry)
    return (*pair, *projections_of(module, geometry)) if geometry.q_lora_rank else pair


def register(service: Service, model: Any, layers: Layers, model_id: str, kv_format: str,
             page_size: int) -> Model:
    """Registers the model and uploads its weights. Without an id it gets one that follows from its
    weights, so that workers of the same checkpoint share a model."""
    weights = weights_of(layers.in_order(), lambda module: uploaded_of(module, layers.geometry))
    if not model_id:
        model_id = id_of(model.config.model_type, map(weights, range(len(layers))))
    sparse = {}
    if model.config.model_type in SPARSE_TYPES:
        sparse = {"attention": "sparse_v32", "top_k": model.config.index_topk}
    registered = service.register_model(
        layers.spec(model_id, page_size=page_size, kv_format=kv_format,
                    rope_layout="halves" if layers.geometry.q_lora_rank else "", **sparse))

    def prepare(to: Model) -> None:
        upload(to, weights)
    prepare(registered)
    service._prepare_moved(model_id, prepare)
    return registered
