"""The layer that takes the place of vLLM's: queries and new rows go to the server, outputs come
back."""

from __future__ import annotations

import torch
from vllm.config import CacheConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.mla import MLAModules, MultiHeadLatentAttentionWrapper
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.utils.torch_utils import _encode_layer_name
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from mla_client import errors
from mla_client.types import Geometry
from mla_client.vllm.runtime import runtime


class RemoteMLAAttention(MLAAttention):
    """Attention by the server. The engine keeps pages of one byte a token, so that its scheduler,
    its block tables and its metadata stay as they are."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if self.use_sparse:
            raise errors.Unimplemented(
                "sparse attention, for which this layer sends no index lists")

    def process_weights_after_loading(self, act_dtype: torch.dtype):
        super().process_weights_after_loading(act_dtype)
        if not hasattr(self, "W_UK_T"):
            raise errors.Unimplemented("quantised products of W_UK and W_UV: turn AITER's off")
        geometry = Geometry(self.num_heads, self.kv_lora_rank, self.qk_rope_head_dim,
                            self.qk_nope_head_dim, self.v_head_dim)
        runtime.add(self.layer_name, geometry, self.scale, self.W_UK_T, self.W_UV)
        del self.W_UK_T, self.W_UV

    def get_kv_cache_spec(self, vllm_config):
        return MLAAttentionSpec(block_size=vllm_config.cache_config.block_size, num_kv_heads=1,
                                head_size=1, dtype=torch.uint8)

    def forward(self, q: torch.Tensor, kv_c_normed: torch.Tensor, k_pe: torch.Tensor,
                output_shape: torch.Size | None = None) -> torch.Tensor:
        output = torch.empty(output_shape, dtype=q.dtype, device=q.device)
        if not self.use_direct_call:  # at this op compiled graphs are split
            torch.ops.vllm.unified_mla_attention_with_output(
                q, kv_c_normed, k_pe, output, _encode_layer_name(self.layer_name))
            return output
        metadata = get_forward_context().attn_metadata
        if isinstance(metadata, list):
            metadata = metadata[0]
        if isinstance(metadata, dict):
            metadata = metadata[self.layer_name]
        return self.forward_impl(q, kv_c_normed, k_pe, self.kv_cache, metadata, output)

    def forward_impl(self, q: torch.Tensor, k_c_normed: torch.Tensor, k_pe: torch.Tensor,
                     kv_cache: torch.Tensor, attn_metadata, output: torch.Tensor,
                     output_scale: torch.Tensor | None = None,
                     output_block_scale: torch.Tensor | None = None,
                     quant_group_size: int | None = None, quant_scale_ue8m0: bool | None = None,
                     quant_col_major: bool | None = None,
                     quant_tma_aligned: bool | None = None) -> torch.Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise errors.Unimplemented("quantised outputs of attention: turn that fusion off")
        o = None
        if attn_metadata is not None:
            rows = attn_metadata.num_actual_tokens
            kv = torch.cat((k_c_normed[:rows], k_pe[:rows].flatten(1)), dim=-1)
            o = runtime.attend(self.layer_name, q[:rows], kv)
        if o is None:
            return output.fill_(0)
        output[:rows].copy_(o.flatten(1))
        return output


class RemoteMlaWrapper(MultiHeadLatentAttentionWrapper):
    """vLLM's wrapper, around that attention."""

    def __init__(self, hidden_size: int, num_heads: int, scale: float, qk_nope_head_dim: int,
                 qk_rope_head_dim: int, v_head_dim: int, q_lora_rank: int | None,
                 kv_lora_rank: int, mla_modules: MLAModules,
                 cache_config: CacheConfig | None = None,
                 quant_config: QuantizationConfig | None = None, prefix: str = "",
                 skip_topk: bool = False) -> None:
        PluggableLayer.__init__(self)
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.qk_head_dim = qk_nope_head_dim + qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.q_lora_rank = q_lora_rank
        self.kv_lora_rank = kv_lora_rank
        self.prefix = prefix
        self.skip_topk = skip_topk
        for name in ("fused_qkv_a_proj", "kv_a_proj_with_mqa", "q_a_layernorm", "q_b_proj",
                     "q_proj", "kv_a_layernorm", "kv_b_proj", "rotary_emb", "o_proj", "indexer",
                     "is_sparse"):
            setattr(self, name, getattr(mla_modules, name))
        self.indexer_rope_emb = mla_modules.indexer_rotary_emb
        self.mla_attn = RemoteMLAAttention(
            num_heads=num_heads, scale=scale, qk_nope_head_dim=qk_nope_head_dim,
            qk_rope_head_dim=qk_rope_head_dim, v_head_dim=v_head_dim, q_lora_rank=q_lora_rank,
            kv_lora_rank=kv_lora_rank, kv_b_proj=self.kv_b_proj, cache_config=cache_config,
            quant_config=quant_config, prefix=f"{prefix}.attn", use_sparse=self.is_sparse,
            indexer=self.indexer)
