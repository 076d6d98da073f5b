"""Doubles of the parts of SGLang that the adapter meets, with their signatures
(sglang_signatures.py).

`install()` puts them where `import sglang` finds them. They keep what the adapter hands over; the
attention that they compute is none.
"""

import dataclasses
import enum
from typing import Any, Optional

import torch
from tests import library_doubles
from torch import nn

ATTENTION_BACKENDS = {}
ATTENTION_BACKEND_CHOICES = ["triton"]


def register_attention_backend(name):
    def decorate(function):
        ATTENTION_BACKENDS[name] = function
        return function
    return decorate


def add_attention_backend_choices(choices):
    ATTENTION_BACKEND_CHOICES.extend(choices)


class ForwardMode(enum.IntEnum):
    """Of a batch."""

    EXTEND = enum.auto()
    DECODE = enum.auto()
    MIXED = enum.auto()
    IDLE = enum.auto()
    TARGET_VERIFY = enum.auto()
    DRAFT_EXTEND_V2 = enum.auto()
    PREBUILT = enum.auto()
    SPLIT_PREFILL = enum.auto()
    DLLM_EXTEND = enum.auto()

    def is_decode(self):
        return self == ForwardMode.DECODE

    def is_idle(self):
        return self == ForwardMode.IDLE


@dataclasses.dataclass
class ForwardBatch:
    """A pass."""

    forward_mode: ForwardMode
    batch_size: int
    input_ids: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    out_cache_loc: torch.Tensor
    seq_lens_sum: int
    seq_lens_cpu: Optional[torch.Tensor] = None
    rids: Optional[list] = None
    positions: Any = None
    extend_seq_lens: Optional[torch.Tensor] = None
    extend_prefix_lens: Optional[torch.Tensor] = None


@dataclasses.dataclass
class ServerArgs:
    """What an engine was started with."""

    model_path: str
    tp_size: int = 1
    pp_size: int = 1
    enable_dp_attention: bool = False
    disable_radix_cache: bool = False
    disable_overlap_schedule: bool = False
    speculative_algorithm: Optional[str] = None
    cuda_graph_config: Any = None
    enable_two_batch_overlap: bool = False
    enable_pdmux: bool = False
    disaggregation_mode: str = "null"
    kv_cache_dtype: str = "auto"


class AttentionBackend:
    """The base of backends."""

    prefill_attention_backend_str = decode_attention_backend_str = None

    def init_forward_metadata(self, forward_batch):
        self.init_forward_metadata_out_graph(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False): ...

    def init_forward_metadata_in_graph(self, forward_batch): ...

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        raise NotImplementedError

    def get_cuda_graph_seq_len_fill_value(self):
        raise NotImplementedError

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        if forward_batch.forward_mode.is_idle():
            return q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        does = (self.forward_decode if forward_batch.forward_mode.is_decode()
                else self.forward_extend)
        return does(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        raise NotImplementedError

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        raise NotImplementedError


class RadixAttention(nn.Module):
    """What a layer calls for its attention. `backend` stands for the one of the forward context."""

    backend: Any = None

    def __init__(self, num_heads, head_dim, scaling, num_kv_heads, layer_id, logit_cap=0.0,
                 v_head_dim=-1, sliding_window_size=-1, is_cross_attention=False,
                 pos_encoding_mode="NONE", logit_capping_method="tanh", quant_config=None,
                 attn_type=None, use_irope=False, prefix=""):
        super().__init__()
        self.tp_q_head_num, self.tp_k_head_num, self.tp_v_head_num = (
            num_heads, num_kv_heads, num_kv_heads)
        self.head_dim = self.qk_head_dim = head_dim
        self.v_head_dim = v_head_dim if v_head_dim != -1 else head_dim
        self.scaling, self.layer_id, self.logit_cap = scaling, layer_id, logit_cap

    def forward(self, q, k, v, forward_batch, save_kv_cache=True, **kwargs):
        if "k_rope" not in kwargs:
            k = k.view(-1, self.tp_k_head_num, self.qk_head_dim)
            v = v.view(-1, self.tp_v_head_num, self.v_head_dim)
        else:
            k = k.view(-1, self.tp_k_head_num, self.v_head_dim)
        return RadixAttention.backend.forward(q, k, v, self, forward_batch, save_kv_cache, **kwargs)


class ReqToTokenPool:
    """Slots of requests; number 0 is for padding."""

    def __init__(self, size, max_context_len, device, enable_memory_saver):
        self.free_slots = list(range(1, size + 1))

    def alloc(self, reqs):
        for req in reqs:
            if req.req_pool_idx is None:
                req.req_pool_idx, self.free_slots = self.free_slots[0], self.free_slots[1:]
        return [req.req_pool_idx for req in reqs]

    def free(self, req):
        self.free_slots.append(req.req_pool_idx)
        req.req_pool_idx = None


class AttnForwardMethod(enum.IntEnum):
    """How DeepSeek's layers compute a batch."""

    MHA = enum.auto()
    MLA = enum.auto()


class AttentionBackendRegistry:
    """Of the functions that choose it, by backend."""

    _handlers = {"triton": lambda attn, forward_batch: AttnForwardMethod.MHA}

    @classmethod
    def register(cls, backend_name, handler_func):
        cls._handlers[backend_name] = handler_func

    @classmethod
    def get_handler(cls, backend_name):
        return cls._handlers.get(backend_name, cls._handlers["triton"])


DEEPSEEK = "sglang.srt.models.deepseek_common"
MODULES = {
    "sglang.srt.layers.attention.attention_registry": {
        "ATTENTION_BACKENDS": ATTENTION_BACKENDS,
        "register_attention_backend": register_attention_backend},
    "sglang.srt.layers.attention.base_attn_backend": {"AttentionBackend": AttentionBackend},
    "sglang.srt.layers.radix_attention": {"RadixAttention": RadixAttention},
    "sglang.srt.mem_cache.memory_pool": {"ReqToTokenPool": ReqToTokenPool},
    "sglang.srt.model_executor.forward_batch_info": {"ForwardBatch": ForwardBatch,
                                                     "ForwardMode": ForwardMode},
    f"{DEEPSEEK}.attention_backend_handler": {"AttentionBackendRegistry": AttentionBackendRegistry},
    f"{DEEPSEEK}.attention_forward_methods.forward_methods": {
        "AttnForwardMethod": AttnForwardMethod},
    "sglang.srt.server_args": {"ATTENTION_BACKEND_CHOICES": ATTENTION_BACKEND_CHOICES,
                               "ServerArgs": ServerArgs,
                               "add_attention_backend_choices": add_attention_backend_choices},
}


def install():
    """Makes them importable."""
    library_doubles.install(MODULES)
