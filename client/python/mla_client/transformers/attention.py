"""Attention functions and mask functions, registered with transformers by name."""

from __future__ import annotations

import math
from typing import Any, Callable, Optional, Tuple

import torch
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from mla_client import errors
from mla_client.serving.batch import Forward
from mla_client.transformers import cache

# Names for models: of dense attention, and for models that choose positions for each row.
NAMES = NAME, SPARSE_NAME = "mla_server", "mla_server_sparse"


def attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
              attention_mask: Optional[torch.Tensor], scaling: Optional[float] = None,
              dropout: float = 0.0, **kwargs: Any) -> Tuple[torch.Tensor, None]:
    """Attention of a layer over the rows that the server has: query [batch, heads, new, nope +
    rope] -> [batch, new, heads, v]. `key` and `value`, the new rows expanded, are not needed."""
    check_mask(attention_mask)
    return _attend(module, query, attention_mask, scaling, dropout), None


def check_mask(attention_mask: Optional[torch.Tensor]) -> None:
    """Unimplemented if it is no padding mask."""
    if attention_mask is not None and attention_mask.ndim != 2:
        raise errors.Unimplemented(
            f"attention_mask: got {tuple(attention_mask.shape)}, must be [batch, positions]: a row "
            "sees all rows before it")


def sparse_attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor,
                     value: torch.Tensor, attention_mask: Optional[torch.Tensor],
                     scaling: Optional[float] = None, dropout: float = 0.0,
                     indices: Optional[torch.Tensor] = None, **kwargs: Any
                     ) -> Tuple[torch.Tensor, None]:
    """As `attention`, for models whose indexer chooses positions: `indices` [batch, new, width] has
    them; only positions that `attention_mask` [batch, 1, new, positions] lets the row see count."""
    if (attention_mask is None or attention_mask.ndim != 4 or attention_mask.dtype != torch.bool
            or indices is None):
        raise errors.Unimplemented("sparse attention without a mask, or without chosen positions: "
                                   "this release of transformers hands over others")
    sees = attention_mask[:, 0]
    real = sees[:, -1]  # the last row sees every position that is not padding
    places = real.cumsum(-1) - 1
    chosen = indices.long()
    rows = places[:, None].expand(-1, chosen.shape[1], -1).gather(-1, chosen)
    lists = torch.where(sees.gather(-1, chosen), rows, -1)
    return _attend(module, query, None if bool(real.all()) else real, scaling, dropout, lists), None


def _attend(module: torch.nn.Module, query: torch.Tensor, real: Optional[torch.Tensor],
            scaling: Optional[float], dropout: float, lists: Optional[torch.Tensor] = None
            ) -> torch.Tensor:
    """`real` [batch, positions] is false at padding; None: without padding."""
    rows, kv = cache.take(module.layer_idx)
    forward = begun(module, rows, query, query.shape[2], real, scaling, dropout)
    o = rows.exchange.attend(forward, module.layer_idx, query, kv, lists)
    rows.batch.layer_done(forward)
    return o


def begun(module: torch.nn.Module, rows: cache.Rows, query: torch.Tensor, new: int,
          real: Optional[torch.Tensor], scaling: Optional[float], dropout: float,
          rotations: Optional[torch.Tensor] = None) -> Forward:
    """The pass that a layer belongs to, which the first layer begins; `new` positions a row."""
    if query.requires_grad:
        raise errors.Unimplemented("no gradients pass through a server: use torch.no_grad()")
    if dropout:
        raise errors.Unimplemented("attention dropout: call model.eval()")
    spec = rows.model.spec
    if scaling is None or not math.isclose(scaling, spec.softmax_scale, rel_tol=1e-5):
        raise errors.Unimplemented(f"softmax scale: got {scaling}, the model was registered with "
                                   f"{spec.softmax_scale}")
    if module.layer_idx == 0:
        rows.begin(query.shape[0], new, real, rotations)
    forward = rows.forward
    if forward is None or forward.layers != module.layer_idx:
        raise errors.FailedPrecondition(
            f"attention of layer {module.layer_idx}: layers must come in order, once a pass")
    return forward


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


def sparse_mask(*args: Any, mask_function: Callable = causal_mask_function, **kwargs: Any
                ) -> Optional[torch.Tensor]:
    """The positions that each row sees, [batch, 1, new, positions], bool: the model's indexer needs
    it."""
    if mask_function is not causal_mask_function:
        raise errors.Unimplemented("attention that is not causal, and packed sequences")
    return sdpa_mask(*args, mask_function=mask_function,
                     **{**kwargs, "allow_is_causal_skip": False})


def register() -> None:
    """Makes all these functions known to transformers. Repeating is harmless."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    AttentionInterface.register(SPARSE_NAME, sparse_attention)
    AttentionMaskInterface.register(SPARSE_NAME, sparse_mask)
