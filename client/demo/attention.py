"""Attention functions for the model: in this process, through a service, and wrong on purpose."""

from __future__ import annotations

from typing import List, Optional

import mla_client
import numpy as np
from model import Array, Attention, Model


def local_attention(model: Model) -> Attention:
    """Causal attention over the rows of this call alone, in float32, keys and values expanded.

    The textbook form on the unrounded latents: it shares no code with the client or the server.
    """
    scale = np.float32(model.config.softmax_scale)
    lora = model.config.kv_lora

    def attend(layer: int, q_nope: Array, q_rope: Array, row: Array) -> Array:
        weights = model.layers[layer]
        latent, k_rope = row[:, :lora], row[:, lora:]
        hidden = np.triu(np.ones((len(row), len(row)), bool), 1)
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


class StepAttention:
    """Attention of one step of a service; collects where the time went."""

    def __init__(self, model: Model, step: mla_client.Step, profile: mla_client.Profile):
        self._model = model
        self._step = step
        self._profile = profile
        self.timings: List[mla_client.Timings] = []

    def __call__(self, layer: int, q_nope: Array, q_rope: Array, row: Array) -> Array:
        weights = self._model.layers[layer]
        if self._profile == mla_client.Profile.ABSORBED:
            q_nope = np.einsum("nhd,hdl->nhl", q_nope, weights.w_uk, optimize=True)
        q = np.concatenate([q_nope, q_rope], axis=-1)
        result = self._step.attend(layer, q, row, self._profile)
        self.timings += result.timings
        if self._profile == mla_client.Profile.ABSORBED:
            return np.einsum("nhl,hlv->nhv", result.o, weights.w_uv, optimize=True)
        return result.o


def register(service: mla_client.Service, model: Model, name: str) -> mla_client.Model:
    """Registers the model with a service and uploads W_UK and W_UV of every layer."""
    c = model.config
    spec = mla_client.ModelSpec(
        name, mla_client.Geometry(c.heads, c.kv_lora, c.rope, c.nope, c.v), c.layers,
        c.softmax_scale)
    registered = service.register_model(spec)
    status: Optional[mla_client.WeightsStatus] = None
    for layer, weights in enumerate(model.layers):
        status = registered.upload_weights(layer, weights.w_uk, weights.w_uv)
    if status is None or not status.complete:
        raise RuntimeError(f"weights are not complete: {status}")
    return registered
