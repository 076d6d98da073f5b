"""The attention backend: every row is one of a prompt to MLAAttention.forward_impl, which then
hands over the queries before absorption and the new latent rows.

Where an indexer chooses positions, every row is one of a decode instead: the queries are absorbed,
and the new rows lie in the engine's pages, of which only they are read.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, List, Optional

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import (AttentionBackend, AttentionMetadata,
                                       AttentionMetadataBuilder, MLAAttentionImpl)

from mla_client import errors
from mla_client.types import Geometry
from mla_client.vllm import checks
from mla_client.vllm.runtime import runtime


@dataclasses.dataclass
class Metadata(AttentionMetadata):
    """The fields that MLAAttention.forward_impl reads, and the request that each row belongs to."""

    num_actual_tokens: int
    num_reqs: int
    num_prefills: int
    slots: torch.Tensor          # [rows], of the engine's pages
    rows: List[int]              # of each request, in the order of the batch
    block_size: int
    computed: Optional[List[int]]  # of each request, where the plan's count may be too high
    query_start_loc: torch.Tensor
    max_query_len: int
    max_seq_len: int
    prefill: Any
    num_decodes: int = 0
    num_decode_tokens: int = 0   # every row goes to forward_mha
    decode: Any = None
    causal: bool = True

    def blocks(self) -> List[int]:
        """The block that each request writes its first row to. Waits for the device."""
        begins, begin = [], 0
        for count in self.rows:
            begins.append(begin)
            begin += count
        places = torch.tensor(begins, dtype=torch.int64, device=self.slots.device)
        return (self.slots[places] // self.block_size).tolist()


class Builder(AttentionMetadataBuilder[Metadata]):
    """CUDA graphs: piecewise, as the base says; no reordering of the batch."""

    def __init__(self, kv_cache_spec: Any, layer_names: List[str], vllm_config: Any, device: Any,
                 **others: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._block_size = vllm_config.cache_config.block_size
        self._drafts_ahead = (vllm_config.speculative_config is not None
                              and vllm_config.scheduler_config.async_scheduling)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False,
              **others: Any) -> Metadata:
        m = common_attn_metadata
        begins = m.query_start_loc_cpu[:m.num_reqs + 1]
        rows = [count for count in (begins[1:] - begins[:-1]).tolist() if count]
        computed = None
        if self._drafts_ahead and runtime.plan is not None:
            lengths = m.seq_lens[:len(rows)].tolist()  # waits for the device
            computed = [length - count for length, count in zip(lengths, rows)]
        return Metadata(
            m.num_actual_tokens, m.num_reqs, m.num_reqs, m.slot_mapping, rows, self._block_size,
            computed, m.query_start_loc, m.max_query_len, m.max_seq_len,
            SimpleNamespace(block_table=m.block_table_tensor, chunked_context=None,
                            use_dense_mha=False, max_query_len=m.max_query_len))


class Impl(MLAAttentionImpl[Metadata]):
    """The attention of one layer."""

    supports_pcp = False
    supports_dcp = False
    is_sparse = False

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int,
                 alibi_slopes: Any, sliding_window: Any, kv_cache_dtype: str, logits_soft_cap: Any,
                 attn_type: str, kv_sharing_target_layer_name: Any, *, kv_lora_rank: int,
                 qk_nope_head_dim: int, qk_rope_head_dim: int, v_head_dim: int, kv_b_proj: Any,
                 q_lora_rank: Optional[int] = None, **others: Any) -> None:
        for value, what in ((alibi_slopes, "slopes"), (sliding_window, "a window"),
                            (logits_soft_cap, "a cap"),
                            (kv_sharing_target_layer_name, "rows of another layer")):
            if value:
                raise errors.Unimplemented(f"attention with {what}")
        runtime.prepare(get_current_vllm_config())
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads, kv_cache_dtype
        self.kv_lora_rank = kv_lora_rank
        geometry = Geometry(num_heads, kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim, v_head_dim)
        if runtime.projected:
            hidden = int(get_current_vllm_config().model_config.hf_text_config.hidden_size)
            # Without low-rank queries a layer makes them of hidden states.
            geometry = dataclasses.replace(geometry, q_lora_rank=q_lora_rank or hidden,
                                           hidden_size=hidden)
        # LinearBase keeps its name: "model.layers.3.self_attn.kv_b_proj".
        self._number = runtime.add(kv_b_proj.prefix, geometry, self.scale, kv_b_proj)

    def add_projections(self, layer: Any) -> bool:
        """Called by the layer around this one, which is a ProjectedLayer. Returns true if the
        server has its projections: then it hands over low-rank queries, and gets hidden states."""
        if not runtime.projected:
            return False
        runtime.add_projections(self._number, layer)
        return True

    def do_kv_cache_update(self, kv_c_normed: torch.Tensor, k_pe: torch.Tensor,
                           kv_cache: torch.Tensor, slot_mapping: torch.Tensor, *args: Any,
                           **kwargs: Any) -> None:
        """The rows go to the server with the queries."""

    def forward_mha(self, q: torch.Tensor, kv_c_normed: torch.Tensor, k_pe: torch.Tensor,
                    kv_c_and_k_pe_cache: Any, attn_metadata: Metadata, k_scale: Any,
                    output: torch.Tensor, output_scale: Any = None) -> None:
        if output_scale is not None:
            raise errors.Unimplemented("quantised outputs of attention: turn that fusion off")
        runtime.attend(self._number, q, (kv_c_normed, k_pe), attn_metadata, output)

    def forward_mqa(self, *args: Any, **kwargs: Any) -> Any:
        raise errors.Internal("no row is one of a decode here")

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False


class SparseImpl(Impl):
    """The attention of one layer whose rows each attend to the positions of a list."""

    is_sparse = True
    supports_dense_mha_prefill = False  # every row goes to forward_mqa
    masked_mha_available = False

    def __init__(self, *args: Any, topk_indices_buffer: torch.Tensor, **others: Any) -> None:
        super().__init__(*args, **others)
        self._chosen = topk_indices_buffer  # [rows, top_k], of the last indexer that ran; -1: none

    def record_logical_topk_ready(self) -> None:
        """The buffer has the lists of this layer's rows."""

    def do_kv_cache_update(self, kv_c_normed: torch.Tensor, k_pe: torch.Tensor,
                           kv_cache: torch.Tensor, slot_mapping: torch.Tensor, *args: Any,
                           **kwargs: Any) -> None:
        """Puts the rows where forward_mqa finds them; some models do that themselves."""
        if kv_cache.numel():
            slots = slot_mapping.flatten()
            rows = torch.cat((kv_c_normed, k_pe.flatten(1)), dim=-1)[:len(slots)]
            real = slots >= 0  # those of padding are not
            kv_cache.view(-1, kv_cache.shape[-1])[slots[real]] = rows[real].to(kv_cache.dtype)

    def forward_mqa(self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Metadata,
                    layer: Any) -> Any:
        """q [rows, heads, lora + rope], or its two parts -> outputs [rows, heads, lora]."""
        if not isinstance(q, torch.Tensor):
            q = torch.cat(q, dim=-1)
        pages = kv_c_and_k_pe_cache.view(-1, kv_c_and_k_pe_cache.shape[-1])
        output = q.new_empty(len(q), q.shape[1], self.kv_lora_rank)
        runtime.attend(self._number, q, pages[attn_metadata.slots[:len(q)]].to(q.dtype),
                       attn_metadata, output, self._chosen[:len(q)])
        return output, None


class MlaServerBackend(AttentionBackend):
    """`--attention-backend CUSTOM`."""

    supported_dtypes = [torch.bfloat16, torch.float16, torch.float32]
    supported_kv_cache_dtypes = ["auto", "bfloat16", "float16"]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def is_sparse(cls) -> bool:
        return checks.top_k_of(get_current_vllm_config()) > 0

    @classmethod
    def get_impl_cls(cls) -> type:
        return SparseImpl if cls.is_sparse() else Impl

    @staticmethod
    def get_builder_cls() -> type:
        return Builder

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # a step says how many rows it has before it has them

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int,
                           cache_dtype_str: str = "auto", **others: Any) -> tuple:
        return num_blocks, block_size, head_size  # asked for by 0.25.1

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """A byte a token or a few: the block manager stays as it is, memory is not needed. Pages
        that rows are read from stay as they are."""
        if runtime.top_k:
            return spec
        return dataclasses.replace(spec, head_size=runtime.token_bytes(spec.block_size),
                                   dtype=torch.uint8)
