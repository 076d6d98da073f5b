"""Attention layers whose projections the server has: from normed queries to hidden states."""

from __future__ import annotations

import functools
import sys
from typing import Any, List, Optional, Tuple

import torch

from mla_client import errors
from mla_client.transformers import attention, cache


def replace_forwards(model: Any) -> List[Any]:
    """Replaces the forward pass of every attention layer; returns the layers."""
    layers = [module for module in model.modules()
              if hasattr(module, "kv_b_proj") and hasattr(module, "layer_idx")]
    for layer in layers:
        layer.forward = functools.partial(_forward, layer)
    return layers


def restore_forwards(layers: List[Any]) -> None:
    """Gives layers the forward pass of their class back."""
    for layer in layers:
        layer.__dict__.pop("forward", None)


def _forward(module: Any, hidden_states: torch.Tensor,
             position_embeddings: Tuple[torch.Tensor, torch.Tensor],
             attention_mask: Optional[torch.Tensor] = None, **kwargs: Any
             ) -> Tuple[torch.Tensor, None]:
    """As DeepseekV3Attention.forward, up to the norms and the rotation of keys."""
    attention.check_mask(attention_mask)
    past = kwargs.get("past_key_values", kwargs.get("cache"))
    batch, new = hidden_states.shape[:2]
    queries = module.q_a_layernorm(module.q_a_proj(hidden_states))
    latents, key = module.kv_a_proj_with_mqa(hidden_states).split(
        [module.kv_lora_rank, module.qk_rope_head_dim], dim=-1)
    latents = module.kv_a_layernorm(latents).view(batch, 1, new, -1)
    cosines, sines = position_embeddings
    key = _rotated(module, key.reshape(batch, 1, new, -1), cosines, sines)
    if past is not None:
        past.update(latents, key, module.layer_idx)
    rows, kv = cache.take(module.layer_idx)
    pairs = module.qk_rope_head_dim // 2
    rotations = None
    if module.layer_idx == 0:
        # Both halves of the library's tables are equal: one angle a pair.
        each = torch.cat((cosines[..., :pairs], sines[..., :pairs]), dim=-1)
        rotations = each.expand(batch, -1, -1).reshape(batch * new, 2 * pairs)
    forward = attention.begun(module, rows, queries, new, attention_mask, module.scaling,
                              module.attention_dropout if module.training else 0.0, rotations)
    hidden = rows.exchange.attend_projected(forward, module.layer_idx, queries, kv)
    rows.batch.layer_done(forward)
    return hidden, None


def _rotated(module: Any, key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
             ) -> torch.Tensor:
    """Keys [batch, 1, new, rope], rotated by the library's own function; in halves."""
    name = ("apply_rotary_pos_emb_interleave" if module.config.rope_interleave
            else "apply_rotary_pos_emb")
    rotate = getattr(sys.modules[type(module).__module__], name, None)
    if rotate is None:
        raise errors.Unimplemented(f"{type(module).__name__}: this release of transformers has no "
                                   f"{name}")
    rotated: torch.Tensor = rotate(key, key, cosines, sines)[1]
    return rotated
