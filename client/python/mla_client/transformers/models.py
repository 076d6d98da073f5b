"""Facts about a transformers model that the adapter needs, read from its modules."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch

from mla_client import errors
from mla_client.pytorch.codes import FLOAT8, codes_of, decoded
from mla_client.service import Model, Service
from mla_client.service.projected import BLOCK
from mla_client.serving import Layers, refuse
from mla_client.serving.layers import (Codes, Pair, Weights, id_of, projected_dtype_of, split,
                                       upload, weights_of)
from mla_client.types import Geometry

# Values of config.model_type. All these models pass normed latents and rotated keys to the cache.
MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "youtu",
               "deepseek_v32", "glm_moe_dsa")
# The attention layers of these types also run with projections on the server.
PROJECTED_TYPES = ("deepseek_v3",)
# An indexer in these models chooses positions for each row.
SPARSE_TYPES = ("deepseek_v32", "glm_moe_dsa")
# The dtypes of weights that are not quantised.
PLAIN = (torch.float32, torch.bfloat16, torch.float16)
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

    Unimplemented where `kv_b_proj` has neither the plain matrix nor the library's FP8: a matrix
    that is quantised otherwise, or a slice of the heads under tensor parallelism.
    """
    return split(_matrix_of(module, "kv_b_proj"), geometry)


def _checked(module: Any, name: str) -> Any:
    """A projection whose weight, [out, in], is plain or FP8. Unimplemented as pair_of."""
    projection = getattr(module, name)
    weight: torch.Tensor = projection.weight
    refuse([(getattr(projection, "bias", None) is not None,
             f"{name}: it has a bias, which the server does not add"),
            (weight.is_meta or weight.dtype not in PLAIN and not _is_fp8(projection),
             f"{name}: got {weight.dtype} on {weight.device}, must be the plain matrix or the "
             "library's FP8: neither quantised otherwise nor split")])
    return projection


def _is_fp8(projection: Any) -> bool:
    """True for the library's FP8Linear, unless it was dequantised as it was loaded."""
    return projection.weight.dtype in FLOAT8 and hasattr(projection, "weight_scale_inv")


def _matrix_of(module: Any, name: str) -> torch.Tensor:
    """The weight of a projection, [out, in]; bf16 if it is FP8. Unimplemented as pair_of."""
    projection = _checked(module, name)
    weight: torch.Tensor = projection.weight
    if _is_fp8(projection):
        return decoded(weight, projection.weight_scale_inv, projection.block_size)
    return weight.detach()


def _row_order(module: Any, geometry: Geometry) -> torch.Tensor:
    """The rows of `q_b_proj` in the order in which the server has them.

    The rotated part of keys leaves transformers' rotation in halves. So that queries have the same
    order, the rows of an interleaved W_UQ are put in halves."""
    rows = torch.arange(geometry.num_heads * (geometry.nope_dim + geometry.rope_dim))
    heads = rows.view(geometry.num_heads, -1)
    if module.config.rope_interleave:
        rotated = heads[:, geometry.nope_dim:]
        heads = torch.cat((heads[:, :geometry.nope_dim], rotated[:, ::2], rotated[:, 1::2]), dim=1)
    return heads.reshape(-1)


def _check_projections(module: Any, geometry: Geometry) -> None:
    """Unimplemented if `q_b_proj` or `o_proj` is no whole matrix of the layer, or as pair_of."""
    rows, columns = (geometry.num_heads * size for size in (
        geometry.nope_dim + geometry.rope_dim, geometry.v_dim))
    want = (rows, geometry.q_lora_rank), (geometry.hidden_size, columns)
    got = tuple(tuple(_checked(module, name).weight.shape) for name in ("q_b_proj", "o_proj"))
    if got != want:
        raise errors.Unimplemented(
            f"q_b_proj, o_proj: got {got[0]} and {got[1]}, must be the plain matrices {want}: "
            "neither quantised otherwise nor split")


def codes_in(module: Any, geometry: Geometry) -> Tuple[Optional[Tuple[Codes, Codes]], str]:
    """W_UQ and W_O of a layer as codes, in the shapes of projections_of. None and the reason if the
    server cannot hold them so. Unimplemented as projections_of."""
    _check_projections(module, geometry)
    matrices = []
    for name in ("q_b_proj", "o_proj"):
        projection = getattr(module, name)
        codes, reason = codes_of(projection.weight, getattr(projection, "weight_scale_inv", None),
                                 getattr(projection, "block_size", None))
        if codes is None:
            return None, f"{name}: {reason}"
        matrices.append(codes)
    w_uq, w_o = matrices
    order = _row_order(module, geometry).to(w_uq.codes.device)
    # A row keeps its scales, which the server looks up by where the row is.
    if not torch.equal(w_uq.scales[order // BLOCK], w_uq.scales[order.sort().values // BLOCK]):
        return None, "q_b_proj: pairs of rotated rows lie in blocks with different scales"
    return (Codes(w_uq.codes[order].view(geometry.num_heads, -1, geometry.q_lora_rank),
                  w_uq.scales),
            Codes(w_o.codes.reshape(geometry.hidden_size, geometry.num_heads, -1), w_o.scales)), ""


def projections_of(module: Any, geometry: Geometry) -> Tuple[Any, Any]:
    """W_UQ [heads, nope + rope, q_lora] and W_O [hidden, heads, v] of a layer; Codes if both can be
    codes. Unimplemented if one is no whole matrix, or as pair_of."""
    codes, _ = codes_in(module, geometry)
    if codes is not None:
        return codes
    w_uq, w_o = _matrix_of(module, "q_b_proj"), _matrix_of(module, "o_proj")
    return (w_uq[_row_order(module, geometry).to(w_uq.device)].view(
                geometry.num_heads, -1, geometry.q_lora_rank),
            w_o.reshape(geometry.hidden_size, geometry.num_heads, geometry.v_dim))


def uploaded_of(module: Any, geometry: Geometry) -> Weights:
    """What the server gets of a layer: the pair, and with projections W_UQ and W_O."""
    pair = pair_of(module, geometry)
    return (*pair, *projections_of(module, geometry)) if geometry.q_lora_rank else pair


def register(service: Service, model: Any, layers: Layers, model_id: str, kv_format: str,
             page_size: int, projected_dtype: str = "") -> Model:
    """Registers the model and uploads its weights. Without an id it gets one that follows from its
    weights, so that workers of the same checkpoint share a model. Unimplemented as uploaded_of."""
    for module in layers.in_order():  # before the server has a model that would lack weights
        _checked(module, "kv_b_proj")
        if layers.geometry.q_lora_rank:
            _check_projections(module, layers.geometry)
    weights = weights_of(layers.in_order(), lambda module: uploaded_of(module, layers.geometry))
    if not model_id:
        model_id = id_of(model.config.model_type, map(weights, range(len(layers))))
    more = {}
    if model.config.model_type in SPARSE_TYPES:
        more = {"attention": "sparse_v32", "top_k": model.config.index_topk}
    if layers.geometry.q_lora_rank:
        reasons = (codes_in(module, layers.geometry)[1] for module in layers.in_order())
        more = {"rope_layout": "halves", "projected_dtype": projected_dtype_of(
            projected_dtype, reasons, layers.geometry)}
    registered = service.register_model(
        layers.spec(model_id, page_size=page_size, kv_format=kv_format, **more))

    def prepare(to: Model) -> None:
        upload(to, weights)
    prepare(registered)
    service._prepare_moved(model_id, prepare)
    return registered
