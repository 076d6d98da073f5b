"""Masks, made once a forward pass by the function that the attention implementation registered."""

import torch

from transformers.registry import GeneralInterface


def causal_mask_function(batch_idx, head_idx, q_idx, kv_idx):
    """Which keys a query sees."""
    return kv_idx <= q_idx


def eager_mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0,
               mask_function=causal_mask_function, attention_mask=None, dtype=torch.float32,
               **kwargs):
    """Added to scores: [batch, 1, queries, keys]."""
    queries = torch.arange(q_length)[:, None] + q_offset
    seen = mask_function(0, 0, queries, torch.arange(kv_length) + kv_offset)
    seen = seen.expand(batch_size, 1, q_length, kv_length)
    if attention_mask is not None:
        seen = seen & attention_mask[:, None, None, :kv_length]
    return torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)


class AttentionMaskInterface(GeneralInterface):
    """Mask functions by name."""

    _global_mapping = {"eager": eager_mask}


ALL_MASK_ATTENTION_FUNCTIONS = AttentionMaskInterface()


def create_causal_mask(config, inputs_embeds, attention_mask, past_key_values, position_ids=None):
    """The mask of a pass. Nothing is made for an implementation without a mask function."""
    if attention_mask is not None and attention_mask.ndim == 4:
        return attention_mask
    if config._attn_implementation not in ALL_MASK_ATTENTION_FUNCTIONS._global_mapping:
        return None
    if attention_mask is not None:
        attention_mask = attention_mask.to(device=inputs_embeds.device, dtype=torch.bool)
    q_length = inputs_embeds.shape[1]
    kv_length, kv_offset, q_offset = q_length, 0, 0
    if past_key_values is not None:
        q_offset = past_key_values.get_query_offset(0)
        kv_length, kv_offset = past_key_values.get_mask_sizes(q_length, 0)
    return ALL_MASK_ATTENTION_FUNCTIONS[config._attn_implementation](
        batch_size=inputs_embeds.shape[0], q_length=q_length, kv_length=kv_length,
        q_offset=q_offset, kv_offset=kv_offset, mask_function=causal_mask_function,
        attention_mask=attention_mask, allow_is_causal_skip=True, dtype=inputs_embeds.dtype,
        config=config, use_vmap=False, device=inputs_embeds.device)
