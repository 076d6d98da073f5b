"""Doubles of the parts of vLLM that the adapter meets, with their signatures (vllm_signatures.py).

`install()` puts them where `import vllm` finds them. They keep what the adapter hands over; the
attention that they compute is none.
"""

import dataclasses
import enum
import types
from typing import Any, Optional

import torch
from tests import library_doubles
from torch import nn

op_registry, op_registry_oot = {}, {}
# What a runner sets for a pass, and what layers add themselves to.
forward_context = types.SimpleNamespace(attn_metadata=None, slot_mapping={})
static_forward_context = {}


class PluggableLayer(nn.Module):
    """A layer that a plugin may replace."""

    def __new__(cls, *args, **kwargs):
        return super().__new__(op_registry_oot.get(cls.__name__, cls))

    @classmethod
    def register(cls, name):
        def decorate(layer):
            op_registry[name] = layer
            return layer
        return decorate

    @classmethod
    def register_oot(cls, _decorated_layer_cls=None, name=None):
        assert name not in op_registry_oot
        op_registry_oot[name] = _decorated_layer_cls
        return _decorated_layer_cls


class MLAAttention(nn.Module):
    """Attention over the engine's own pages."""

    def __init__(self, num_heads, scale, qk_nope_head_dim, qk_rope_head_dim, v_head_dim,
                 q_lora_rank, kv_lora_rank, kv_b_proj, cache_config=None, quant_config=None,
                 prefix="", attn_backend=None, use_sparse=False, indexer=None,
                 topk_indices_buffer=None, **extra_impl_args):
        super().__init__()
        self.num_heads, self.scale = num_heads, scale
        self.qk_nope_head_dim, self.qk_rope_head_dim = qk_nope_head_dim, qk_rope_head_dim
        self.v_head_dim, self.kv_lora_rank = v_head_dim, kv_lora_rank
        self.kv_b_proj, self.layer_name, self.use_sparse = kv_b_proj, prefix, use_sparse
        self.use_direct_call = True
        self.kv_cache = torch.tensor([])
        static_forward_context[prefix] = self

    def forward(self, q, kv_c_normed, k_pe, output_shape=None):
        raise AssertionError("the engine's own attention was called")

    def forward_impl(self, q, k_c_normed, k_pe, kv_cache, attn_metadata, output,
                     output_scale=None, output_block_scale=None, quant_group_size=None,
                     quant_scale_ue8m0=None, quant_col_major=None, quant_tma_aligned=None):
        raise AssertionError("the engine's own attention was called")

    def process_weights_after_loading(self, act_dtype):
        weight = self.kv_b_proj.weight.T.reshape(self.kv_lora_rank, self.num_heads, -1)
        w_uk, w_uv = weight.split((self.qk_nope_head_dim, self.v_head_dim), dim=-1)
        self.W_UV, self.W_UK_T = w_uv.transpose(0, 1), w_uk.permute(1, 2, 0)

    def get_kv_cache_spec(self, vllm_config):
        raise AssertionError("the engine's own pages were asked for")


@dataclasses.dataclass
class MLAModules:
    """Modules of a layer."""

    kv_a_layernorm: Any
    kv_b_proj: Any
    rotary_emb: Any
    o_proj: Any
    fused_qkv_a_proj: Any
    kv_a_proj_with_mqa: Any
    q_a_layernorm: Any
    q_b_proj: Any
    q_proj: Any
    indexer: Any
    is_sparse: bool
    topk_indices_buffer: Any
    indexer_rotary_emb: Any = None


@PluggableLayer.register("multi_head_latent_attention")
class MultiHeadLatentAttentionWrapper(PluggableLayer):
    """Hidden states in, hidden states out."""

    def __init__(self, hidden_size, num_heads, scale, qk_nope_head_dim, qk_rope_head_dim,
                 v_head_dim, q_lora_rank, kv_lora_rank, mla_modules, cache_config=None,
                 quant_config=None, prefix="", skip_topk=False):
        super().__init__()
        raise AssertionError("the engine's own layer was built")

    def forward(self, positions, hidden_states, llama_4_scaling=None):
        if self.q_lora_rank is not None:
            q_c, kv = self.fused_qkv_a_proj(hidden_states)[0].split(
                (self.q_lora_rank, self.kv_lora_rank + self.qk_rope_head_dim), dim=-1)
            q = self.q_b_proj(self.q_a_layernorm(q_c))[0]
        else:
            kv = self.kv_a_proj_with_mqa(hidden_states)[0]
            q = self.q_proj(hidden_states)[0]
        kv_c, k_pe = kv.split((self.kv_lora_rank, self.qk_rope_head_dim), dim=-1)
        q = q.view(-1, self.num_heads, self.qk_head_dim)
        q_pe, k_pe = self.rotary_emb(positions, q[..., self.qk_nope_head_dim:], k_pe[:, None])
        q = torch.cat((q[..., :self.qk_nope_head_dim], q_pe), dim=-1)
        out = self.mla_attn(
            q, self.kv_a_layernorm(kv_c), k_pe,
            output_shape=(hidden_states.shape[0], self.num_heads * self.v_head_dim))
        return self.o_proj(out)[0]


@dataclasses.dataclass(frozen=True)
class MLAAttentionSpec:
    """Pages of a layer."""

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype


class KVConnectorRole(enum.Enum):
    """Where a connector is."""

    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata:
    """From the scheduler's connector to the worker's."""


class KVConnectorBase_V1:  # noqa: N801 (vLLM's name)
    """The base of connectors."""

    def __init__(self, vllm_config, role, kv_cache_config):
        self._vllm_config, self._role, self._connector_metadata = vllm_config, role, None
        self._kv_transfer_config = vllm_config.kv_transfer_config

    @property
    def role(self):
        return self._role

    def bind_connector_metadata(self, connector_metadata):
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self):
        self._connector_metadata = None

    def _get_connector_metadata(self):
        assert self._connector_metadata is not None
        return self._connector_metadata

    def register_kv_caches(self, kv_caches): ...

    def start_load_kv(self, forward_context, **kwargs): ...

    def wait_for_layer_load(self, layer_name): ...

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): ...

    def wait_for_save(self): ...

    def shutdown(self): ...

    def get_num_new_matched_tokens(self, request, num_computed_tokens): ...

    def update_state_after_alloc(self, request, blocks, num_external_tokens): ...

    def build_connector_meta(self, scheduler_output): ...

    def request_finished(self, request, block_ids):
        return False, None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config):
        return False


@dataclasses.dataclass
class NewRequestData:
    """A request that is scheduled for the first time."""

    req_id: str
    prompt_token_ids: Any
    mm_features: Any
    sampling_params: Any
    pooling_params: Any
    block_ids: Any
    num_computed_tokens: int
    lora_request: Any
    prompt_embeds: Any = None
    prefill_token_ids: Any = None


@dataclasses.dataclass
class CachedRequestData:
    """Requests that were scheduled before."""

    req_ids: list
    resumed_req_ids: set
    new_token_ids: list
    all_token_ids: dict
    new_block_ids: list
    num_computed_tokens: list
    num_output_tokens: list


@dataclasses.dataclass
class SchedulerOutput:
    """A pass."""

    scheduled_new_reqs: list
    scheduled_cached_reqs: Any
    num_scheduled_tokens: dict
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: dict
    scheduled_encoder_inputs: dict
    num_common_prefix_blocks: list
    finished_req_ids: set
    free_encoder_mm_hashes: list
    preempted_req_ids: Optional[set] = None
    pending_structured_output_tokens: bool = False
    kv_connector_metadata: Any = None
    ec_connector_metadata: Any = None


class Opaque:
    """A type that only annotations name."""


MODULES = {
    "vllm.config": {"CacheConfig": Opaque},
    "vllm.forward_context": {"get_forward_context": lambda: forward_context},
    "vllm.model_executor.custom_op": {"PluggableLayer": PluggableLayer,
                                      "op_registry_oot": op_registry_oot},
    "vllm.model_executor.layers.attention.mla_attention": {"MLAAttention": MLAAttention},
    "vllm.model_executor.layers.mla": {
        "MLAModules": MLAModules,
        "MultiHeadLatentAttentionWrapper": MultiHeadLatentAttentionWrapper},
    "vllm.model_executor.layers.quantization": {"QuantizationConfig": Opaque},
    "vllm.utils.torch_utils": {"_encode_layer_name": str},
    "vllm.v1.kv_cache_interface": {"MLAAttentionSpec": MLAAttentionSpec},
    "vllm.v1.core.sched.output": {"NewRequestData": NewRequestData,
                                  "CachedRequestData": CachedRequestData,
                                  "SchedulerOutput": SchedulerOutput},
    "vllm.distributed.kv_transfer.kv_connector.v1.base": {
        "KVConnectorBase_V1": KVConnectorBase_V1, "KVConnectorMetadata": KVConnectorMetadata,
        "KVConnectorRole": KVConnectorRole},
}


def install():
    """Makes them importable."""
    library_doubles.install(MODULES)
