"""Small models of transformers with random weights whose attention matters."""

from __future__ import annotations

from typing import Any, Tuple

import torch
import transformers

# Attention has the dimensions of the released models, and the rest is small. Experts are few and
# small, because rounding in the cache decides close choices between experts, and the resulting
# jumps would hide other differences.
_COMMON = {
    "vocab_size": 256, "hidden_size": 512, "num_attention_heads": 16, "num_key_value_heads": 16,
    "q_lora_rank": 192, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}
_DENSE = {"num_hidden_layers": 4, "intermediate_size": 1024}
_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
            "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
_MODELS = {
    "deepseek_v3": ("DeepseekV3", {**_DENSE, **_EXPERTS, "first_k_dense_replace": 1}),
    "deepseek_v2": ("DeepseekV2", {**_DENSE, **_EXPERTS, "first_k_dense_replace": 1,
                                   "q_lora_rank": None}),
    "glm4_moe_lite": ("Glm4MoeLite", {**_DENSE, **_EXPERTS, "qk_nope_head_dim": 192,
                                      "v_head_dim": 256,
                                      "mlp_layer_types": ["dense"] + 3 * ["sparse"]}),
    "youtu": ("Youtu", {**_DENSE, "tie_word_embeddings": False}),
    "longcat_flash": ("LongcatFlash", {"num_layers": 2, "ffn_hidden_size": 1024,
                                       "expert_ffn_hidden_size": 256, "n_routed_experts": 6,
                                       "zero_expert_num": 2, "moe_topk": 2, "head_dim": 64,
                                       "routed_scaling_factor": 0.2}),
}
# Number of positions that an indexer chooses; a row's context is longer.
_INDEXER = {"index_topk": 48, "index_n_heads": 8, "index_head_dim": 128,
            "mlp_layer_types": ["dense"] + 3 * ["sparse"]}
_MODELS |= {
    "deepseek_v32": ("DeepseekV32", {**_DENSE, **_EXPERTS, **_INDEXER}),
    "glm_moe_dsa": ("GlmMoeDsa", {**_DENSE, **_EXPERTS, **_INDEXER, "qk_nope_head_dim": 192,
                                  "v_head_dim": 256,
                                  "indexer_types": ["full", "shared", "full", "shared"]}),
}
TYPES = tuple(_MODELS)
# Standard deviations of weights, times the root of the inputs; 1 for all others. They make scores
# peaked and attention a large part of the residual stream.
_GAINS = {"q_proj": 1.2, "q_b_proj": 1.2, "kv_b_proj": 1.2, "o_proj": 2.0, "gate": 2.0,
          "classifier": 2.0, "experts": 0.3}


def build(kind: str, *, seed: int = 2, dtype: torch.dtype = torch.float32,
          device: str = "cpu", **changes: Any) -> Any:
    """A model for causal language modelling; `changes` are fields of its config."""
    name, own = _MODELS[kind]
    config = getattr(transformers, f"{name}Config")(**{**_COMMON, **own, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if weight.ndim > 1:
                fan_in = 1 if "embed_tokens" in path else weight.shape[-1]
                gain = next((gain for part, gain in _GAINS.items() if part in path.split(".")), 1.0)
                weight.normal_(std=gain * fan_in ** -0.5)
        if kind == "longcat_flash":  # no extra scales of queries and latents
            for module in model.modules():
                if hasattr(module, "mla_scale_kv_lora"):
                    module.mla_scale_q_lora = module.mla_scale_kv_lora = 1.0
    return model.to(device=device, dtype=dtype).eval()


def pair(kind: str, *, device: str = "cpu", **changes: Any) -> Tuple[Any, Any]:
    """A model with its own attention in plain PyTorch, and an assistant that often agrees with it,
    but not always."""
    model, assistant = (build(kind, device=device, **changes) for _ in range(2))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for weight in assistant.parameters():
            weight.add_(torch.randn_like(weight) * weight.std() * 0.02 if weight.ndim > 1 else 0)
    return model, assistant
