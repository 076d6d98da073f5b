"""The attention function and the mask function, registered with transformers by name."""

from __future__ import annotations

import math
from typing import Any, Callable, Optional, Tuple

import torch
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function
from transformers.modeling_utils import AttentionInterface

from mla_client import errors
from mla_client.transformers import cache

NAME = "mla_server"


def attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
              attention_mask: Optional[torch.Tensor], scaling: Optional[float] = None,
              dropout: float = 0.0, **kwargs: Any) -> Tuple[torch.Tensor, None]:
    """Attention of a layer over the rows that the server has: query [batch, heads, new, nope +
    rope] -> [batch, new, heads, v]. `key` and `value`, the new rows expanded, are not needed."""
    rows, kv = cache.take(module.layer_idx)
    if query.requires_grad:
        raise errors.Unimplemented("no gradients pass through a server: use torch.no_grad()")
    if dropout:
        raise errors.Unimplemented("attention dropout: call model.eval()")
    spec = rows.model.spec
    if scaling is None or not math.isclose(scaling, spec.softmax_scale, rel_tol=1e-5):
        raise errors.Unimplemented(f"softmax scale: got {scaling}, the model was registered with "
                                   f"{spec.softmax_scale}")
    if module.layer_idx == 0:
        if attention_mask is not None and attention_mask.ndim != 2:
            raise errors.Unimplemented(
                f"attention_mask: got {tuple(attention_mask.shape)}, must be [batch, positions]: a "
                "row sees all rows before it")
        rows.begin(query.shape[0], query.shape[2], attention_mask)
    forward = rows.forward
    if forward is None or forward.layers != module.layer_idx:
        raise errors.FailedPrecondition(
            f"attention of layer {module.layer_idx}: layers must come in order, once a pass")
    o = rows.exchange.attend(forward, module.layer_idx, query, kv)
    rows.batch.layer_done(forward)
    return o, None


def mask(batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0,
         mask_function: Callable = causal_mask_function,
         attention_mask: Optional[torch.Tensor] = None, **kwargs: Any) -> Optional[torch.Tensor]:
    """Hands the padding mask [batch, positions] through to the attention function; None: every
    position is real."""
    if mask_function is not causal_mask_function:
        raise errors.Unimplemented("attention that is not causal, and packed sequences")
    if attention_mask is not None and attention_mask.shape[-1] != kv_length:
        raise errors.InvalidArgument(f"attention_mask: got {tuple(attention_mask.shape)}, must be "
                                     f"{(batch_size, kv_length)}")
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return attention_mask


def register() -> None:
    """Makes both known to transformers as NAME. Repeating is harmless."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
