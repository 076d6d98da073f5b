"""Attention functions for the model: in this process, through a service, and wrong on purpose."""

from __future__ import annotations

import dataclasses
from typing import Any, List, Optional, Sequence, Tuple

import corpus
import mla_client
import numpy as np
from model import Array, Attention, Model

E4M3_LARGEST = 448.0
# Text that the scales of fp8_tensor are taken from, and the room left for other text.
SCALE_BYTES, SCALE_ROOM = 512, 2.0


def local_attention(model: Model, past: Optional[List[Array]] = None,
                    kept: Optional[List[Array]] = None) -> Attention:
    """Causal attention in float32, keys and values expanded, over the rows of this call.

    The textbook form on the unrounded latents: it shares no code with the client or the server.
    `past` holds the KV rows of earlier positions by layer; this call's rows are appended to `kept`.
    """
    scale = np.float32(model.config.softmax_scale)
    lora = model.config.kv_lora

    def attend(layer: int, q_nope: Array, q_rope: Array, row: Array) -> Array:
        weights = model.layers[layer]
        if kept is not None:
            kept.append(row)
        before = 0 if past is None else len(past[layer])
        keys = row if past is None else np.concatenate([past[layer], row])
        latent, k_rope = keys[:, :lora], keys[:, lora:]
        hidden = np.arange(len(keys)) > np.arange(before, len(keys))[:, None]
        out = np.empty((len(row), model.config.heads, model.config.v), np.float32)
        for head in range(model.config.heads):
            k_nope = latent @ weights.w_uk[head].T
            scores = (q_nope[:, head] @ k_nope.T + q_rope[:, head] @ k_rope.T) * scale
            scores[hidden] = -np.inf
            scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
            out[:, head] = (scores @ (latent @ weights.w_uv[head])) / scores.sum(
                axis=-1, keepdims=True)
        return out

    return attend


def zeroed(model: Model) -> Attention:
    """A negative control: attention that returns nothing."""
    shape = (model.config.heads, model.config.v)
    return lambda layer, q_nope, q_rope, row: np.zeros((len(row), *shape), np.float32)


def shifted(model: Model) -> Attention:
    """A negative control: every row gets the output of the row before it."""
    right = local_attention(model)
    return lambda layer, q_nope, q_rope, row: np.roll(right(layer, q_nope, q_rope, row), 1, axis=0)


def per_head(x: Array, matrices: Array) -> Array:
    """x [rows, heads, a] times matrices [heads, a, b], head by head."""
    return np.matmul(x.transpose(1, 0, 2), matrices).transpose(1, 0, 2)


class StepAttention:
    """Attention of one step of a service; collects where the time went."""

    def __init__(self, model: Model, step: mla_client.Step, profile: mla_client.Profile,
                 dtype: mla_client.DType = mla_client.DType.BF16):
        """`dtype` is the type of queries as sent. Rows and outputs have it too, except that they
        are bf16 if queries have 8 bits."""
        self._model = model
        self._step = step
        self._profile = profile
        self._dtype = dtype
        in_8_bits = dtype == mla_client.DType.F8_E4M3
        self._o_dtype = mla_client.DType.BF16 if in_8_bits else dtype
        self.timings: List[mla_client.Timings] = []
        self.chosen: Optional[Array] = None

    def __call__(self, layer: int, q_nope: Array, q_rope: Array, row: Array) -> Array:
        return self.attend(layer, q_nope, q_rope, row)

    def attend(self, layer: int, q_nope: Array, q_rope: Array, row: Array,
               lists: Optional[Sequence[Any]] = None,
               index: Optional[Tuple[Array, Array]] = None) -> Array:
        """Attention of one layer. With `lists` it is sparse attention to the listed positions of
        each row; with `index` (queries and head weights) to the positions that the service's
        indexer chooses: `row` then ends with index keys, and `chosen` has the lists afterwards."""
        weights = self._model.layers[layer]
        if self._profile == mla_client.Profile.ABSORBED:
            q_nope = per_head(q_nope, weights.w_uk)
        q = np.concatenate([q_nope, q_rope], axis=-1)
        result = self._step.attend_async(layer, q, row, self._profile, dtype=self._dtype,
                                         o_dtype=self._o_dtype, lists=lists, index=index,
                                         want_lists=index is not None).result()
        self.chosen = result.lists
        self.timings += result.timings
        if self._profile == mla_client.Profile.ABSORBED:
            return per_head(result.o, weights.w_uv)
        return result.o


def spec_of(model: Model, name: str, kv_format: str, top_k: int = 0,
            index_dim: int = 0, fp8_compute: str = "") -> mla_client.ModelSpec:
    """The model as a service must know it; with `top_k` its attention is sparse, with `index_dim`
    the service has the indexer."""
    c = model.config
    return mla_client.ModelSpec(
        name, mla_client.Geometry(c.heads, c.kv_lora, c.rope, c.nope, c.v), c.layers,
        c.softmax_scale, kv_format=kv_format, fp8_compute=fp8_compute,
        attention="sparse_v32" if top_k else "", top_k=top_k,
        index_heads=c.heads if index_dim else 0, index_dim=index_dim)


def register_projected(service: mla_client.Service, model: Model, name: str) -> mla_client.Model:
    """As `register`, with all projections on the service, which rotates the queries."""
    c = model.config
    spec = spec_of(model, name, "bf16")
    spec = dataclasses.replace(spec, rope_layout="interleaved", geometry=dataclasses.replace(
        spec.geometry, q_lora_rank=c.q_lora, hidden_size=c.hidden))
    registered = service.register_model(spec)
    for layer, weights in enumerate(model.layers):
        registered.upload_weights(layer, weights.w_uk, weights.w_uv)
        registered.upload_projected(layer, weights.q_up.T.reshape(c.heads, -1, c.q_lora),
                                    weights.out.T)
    return registered


def layer_scales(model: Model) -> List[float]:
    """Scales of fp8_tensor, one a layer, from the rows of a text: e4m3's largest number stands for
    SCALE_ROOM times their largest magnitude."""
    rows: List[Array] = []
    text = corpus.split()[0][:SCALE_BYTES].astype(np.int64)
    model.forward(text, np.arange(len(text)), local_attention(model, kept=rows))
    return [float(np.abs(layer).max()) * SCALE_ROOM / E4M3_LARGEST for layer in rows]


def register(service: mla_client.Service, model: Model, name: str,
             kv_format: str = "bf16", top_k: int = 0, index_dim: int = 0,
             fp8_compute: str = "") -> mla_client.Model:
    """Registers the model with a service and uploads W_UK and W_UV of every layer."""
    registered = service.register_model(
        spec_of(model, name, kv_format, top_k, index_dim, fp8_compute),
        kv_scales=layer_scales(model) if kv_format == "fp8_tensor" else ())
    status: Optional[mla_client.WeightsStatus] = None
    for layer, weights in enumerate(model.layers):
        status = registered.upload_weights(layer, weights.w_uk, weights.w_uv)
    if status is None or not status.complete:
        raise RuntimeError(f"weights are not complete: {status}")
    return registered
