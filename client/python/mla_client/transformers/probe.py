"""Checks that the adapter fits the installed transformers: tried with a tiny model."""

from __future__ import annotations

from typing import Any, Dict, Set

import torch
import transformers

from mla_client import errors, serving
from mla_client.local import LocalReference
from mla_client.serving import Release
from mla_client.transformers.attachment import STEP_LEASE_MS, attach_checked, cache_name

# From the first release whose models cache latents to the newest one that was tested.
RELEASES = (Release((5, 17), (5, 24)),)
# The largest difference of logits, which are about 1, between the library's own attention and this
# package's, both in float32.
TOLERANCE = 1e-3
_TINY = {
    "vocab_size": 16, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 4,
    "max_position_embeddings": 64, "initializer_range": 0.3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}
_DENSE: Dict[str, Any] = {"num_hidden_layers": 2, "intermediate_size": 32}
_INDEXER: Dict[str, Any] = {"mlp_layer_types": ["dense", "dense"], "index_topk": 2,
                            "index_n_heads": 2, "index_head_dim": 16}
_BY_TYPE = {
    "deepseek_v2": {**_DENSE, "first_k_dense_replace": 2},
    "deepseek_v3": {**_DENSE, "first_k_dense_replace": 2},
    "glm4_moe_lite": {**_DENSE, "mlp_layer_types": ["dense", "dense"]},
    "longcat_flash": {"num_layers": 1, "ffn_hidden_size": 32, "expert_ffn_hidden_size": 32,
                      "n_routed_experts": 3, "zero_expert_num": 1, "moe_topk": 2, "head_dim": 8},
    "youtu": dict(_DENSE),
    "deepseek_v32": {**_DENSE, **_INDEXER},
    "glm_moe_dsa": {**_DENSE, **_INDEXER, "indexer_types": ["full", "shared"]},
}
# Classes of models, with and without low-rank queries, and projections on the server.
_passed: Set[Any] = set()


def check_version() -> None:
    """Unimplemented if transformers is not one of the tested releases."""
    serving.check_version("transformers", transformers.__version__, RELEASES)


def check_library(model: Any, projected: bool = False) -> None:
    """Computes a few tokens with a tiny random model of the same class, by the library's attention
    and through this package with a LocalReference, and compares them. Once a class and process."""
    check_version()
    low_rank = model.config.q_lora_rank is not None
    if (type(model), low_rank, projected) in _passed:
        return
    kind = model.config.model_type
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(1)
            config = type(model.config)(**_TINY, **_BY_TYPE[kind],
                                        q_lora_rank=8 if low_rank else None)
            tiny = type(model)(config).to(device="cpu", dtype=torch.float32).eval()
            tiny.set_attn_implementation("eager")
            right = _outputs(tiny)
            with attach_checked(tiny, LocalReference(exact=True), "probe", "", 0, STEP_LEASE_MS,
                                projected, "bf16" if projected else ""):
                got = _outputs(tiny)
    except errors.MlaError:
        raise
    except Exception as error:
        raise errors.Unimplemented(
            f"transformers {transformers.__version__} does not fit: a tiny {kind} model failed "
            f"with {type(error).__name__}: {error}") from error
    difference = float((got - right).abs().max())
    if not difference < TOLERANCE:
        raise errors.Unimplemented(
            f"transformers {transformers.__version__} does not fit: a tiny {kind} model differs by "
            f"{difference:.3g} from its own attention, at most {TOLERANCE}")
    _passed.add((type(model), low_rank, projected))


def _outputs(model: Any) -> torch.Tensor:
    """Outputs at real positions for three tokens, for two tokens after padding, and for one more
    token each."""
    tokens = torch.tensor([[3, 1, 4], [0, 5, 9]])
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    positions = torch.tensor([[0, 1, 2], [0, 0, 1]])
    first = model(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=True)
    mask = torch.cat((mask, torch.ones(2, 1, dtype=mask.dtype)), dim=1)
    name = cache_name(model)
    last = model(input_ids=torch.tensor([[2], [6]]), attention_mask=mask,
                 position_ids=positions[:, -1:] + 1, use_cache=True,
                 **{name: getattr(first, name)})
    return torch.cat((first[0][0], first[0][1, 1:], last[0][:, 0]))
