"""Small models with multi-head latent attention, one class for all members of the family."""

import dataclasses
import types
from typing import List, Optional

import torch
from torch import nn

from transformers.cache_utils import DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel


@dataclasses.dataclass
class DeepseekV3Config:
    """Of a model; fields as in the library, as far as they are used."""

    model_type = "deepseek_v3"

    vocab_size: int = 64
    hidden_size: int = 64
    intermediate_size: int = 64
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    q_lora_rank: Optional[int] = 32
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    first_k_dense_replace: int = 3
    max_position_embeddings: int = 4096
    initializer_range: float = 0.3
    rope_parameters: Optional[dict] = None
    pad_token_id: Optional[int] = None
    bos_token_id: Optional[int] = None
    eos_token_id: Optional[int] = None
    use_cache: bool = True

    _attn_implementation = "eager"


class DeepseekV2Config(DeepseekV3Config):
    """Of DeepSeek V2."""

    model_type = "deepseek_v2"


@dataclasses.dataclass
class Glm4MoeLiteConfig(DeepseekV3Config):
    """Of GLM 4 MoE Lite, whose heads have other widths."""

    model_type = "glm4_moe_lite"

    qk_nope_head_dim: int = 192
    v_head_dim: int = 256
    mlp_layer_types: Optional[List[str]] = None


class YoutuConfig(DeepseekV3Config):
    """Of Youtu."""

    model_type = "youtu"


@dataclasses.dataclass
class LongcatFlashConfig(DeepseekV3Config):
    """Of LongCat Flash: two attentions a layer."""

    model_type = "longcat_flash"

    num_layers: int = 2
    head_dim: int = 64
    ffn_hidden_size: int = 64
    expert_ffn_hidden_size: int = 64
    n_routed_experts: int = 2
    zero_expert_num: int = 1
    moe_topk: int = 1

    def __post_init__(self):
        self.num_hidden_layers = 2 * self.num_layers


class RmsNorm(nn.Module):
    """Root mean square, with a weight."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def rotated(x, positions):
    """Rotary positions; x [batch, heads, rows, rope], positions [batch, rows]."""
    half = x.shape[-1] // 2
    angle = positions[:, None, :, None] * 10000.0 ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    out = (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin())
    return torch.cat(out, dim=-1).to(x.dtype)


def eager_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Attention over keys and values of all heads."""
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(dim=-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class MlaAttention(nn.Module):
    """Latents and rotated keys go through the cache; what it returns is expanded."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.num_heads = config.num_attention_heads
        self.kv_lora_rank, self.v_head_dim = config.kv_lora_rank, config.v_head_dim
        self.qk_nope_head_dim = config.qk_nope_head_dim
        self.qk_rope_head_dim = config.qk_rope_head_dim
        self.qk_head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        self.scaling = self.qk_head_dim ** -0.5
        wide = self.num_heads * self.qk_head_dim
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(config.hidden_size, wide, bias=False)
        else:
            self.q_a_proj = nn.Linear(config.hidden_size, config.q_lora_rank, bias=False)
            self.q_a_layernorm = RmsNorm(config.q_lora_rank)
            self.q_b_proj = nn.Linear(config.q_lora_rank, wide, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(
            config.hidden_size, self.kv_lora_rank + self.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RmsNorm(self.kv_lora_rank)
        self.kv_b_proj = nn.Linear(
            self.kv_lora_rank, self.num_heads * (self.qk_nope_head_dim + self.v_head_dim),
            bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.v_head_dim, config.hidden_size, bias=False)

    def expand_kv(self, kv_nope, k_rot):
        batch, _, rows, _ = kv_nope.shape
        expanded = self.kv_b_proj(kv_nope).view(batch, rows, self.num_heads, -1).transpose(1, 2)
        k_nope, value = expanded.split((self.qk_nope_head_dim, self.v_head_dim), dim=-1)
        return torch.cat((k_nope, k_rot.expand(-1, self.num_heads, -1, -1)), dim=-1), value

    def forward(self, hidden_states, position_embeddings, attention_mask, past_key_values=None,
                **kwargs):
        batch, rows = hidden_states.shape[:2]
        if self.config.q_lora_rank is None:
            q = self.q_proj(hidden_states)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        q = q.view(batch, rows, -1, self.qk_head_dim).transpose(1, 2)
        q_pass, q_rot = q.split((self.qk_nope_head_dim, self.qk_rope_head_dim), dim=-1)
        kv = self.kv_a_proj_with_mqa(hidden_states)[:, None]
        kv_nope, k_rot = kv.split((self.kv_lora_rank, self.qk_rope_head_dim), dim=-1)
        kv_nope = self.kv_a_layernorm(kv_nope)
        q_rot, k_rot = (rotated(x, position_embeddings) for x in (q_rot, k_rot))
        if past_key_values is not None:
            kv_nope, k_rot = past_key_values.update(kv_nope, k_rot, self.layer_idx)
        query = torch.cat((q_pass, q_rot), dim=-1)
        key, value = self.expand_kv(kv_nope, k_rot)
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention)
        out, weights = interface(self, query, key, value, attention_mask, dropout=0.0,
                                 scaling=self.scaling, **kwargs)
        return self.o_proj(out.reshape(batch, rows, -1).contiguous()), weights


class Block(nn.Module):
    """Attention and a feed-forward block."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.self_attn = MlaAttention(config, layer_idx)
        self.input_layernorm = RmsNorm(config.hidden_size)
        self.post_attention_layernorm = RmsNorm(config.hidden_size)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x, **kwargs):
        x = x + self.self_attn(hidden_states=self.input_layernorm(x), **kwargs)[0]
        return x + self.down(torch.tanh(self.up(self.post_attention_layernorm(x))))


class CausalLM(PreTrainedModel, GenerationMixin):
    """Embedding, blocks, head."""

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Block(config, i) for i in range(config.num_hidden_layers)])
        self.norm = RmsNorm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features ** -0.5)
        for layer in self.layers:  # so that attention is peaked
            for name in ("q_proj", "q_b_proj"):
                if hasattr(layer.self_attn, name):
                    getattr(layer.self_attn, name).weight.data *= 2

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None,
                inputs_embeds=None, labels=None, use_cache=None, logits_to_keep=0, **kwargs):
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if past_key_values is None and (self.config.use_cache if use_cache is None else use_cache):
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            seen = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = torch.arange(x.shape[1])[None] + seen
        mask = create_causal_mask(config=self.config, inputs_embeds=x,
                                  attention_mask=attention_mask, past_key_values=past_key_values,
                                  position_ids=position_ids)
        for layer in self.layers:
            x = layer(x, attention_mask=mask, position_embeddings=position_ids,
                      position_ids=position_ids, past_key_values=past_key_values,
                      use_cache=use_cache, **kwargs)
        logits = self.lm_head(self.norm(x)[:, slice(-logits_to_keep, None)])
        return Output(logits, past_key_values)


class Output(types.SimpleNamespace):
    """Logits and the cache; [0] are the logits."""

    def __init__(self, logits, past_key_values):
        super().__init__(logits=logits, past_key_values=past_key_values)

    def __getitem__(self, index):
        return (self.logits, self.past_key_values)[index]


class DeepseekV2ForCausalLM(CausalLM):
    """DeepSeek V2."""


class DeepseekV3ForCausalLM(CausalLM):
    """DeepSeek V3."""


class Glm4MoeLiteForCausalLM(CausalLM):
    """GLM 4 MoE Lite."""


class YoutuForCausalLM(CausalLM):
    """Youtu."""


class LongcatFlashForCausalLM(CausalLM):
    """LongCat Flash."""
