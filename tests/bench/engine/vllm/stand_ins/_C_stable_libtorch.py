"""Stands for vLLM's compiled operations, of which modules look up names when they are imported or
built. None of them is called with attention on a server, with dense layers, unquantised weights
and `custom_ops=["none"]`, but for the one that graphs need."""

import torch

LIBRARY = torch.library.Library("_C", "FRAGMENT")
NAMES = (
    "silu_and_mul", "silu_and_mul_quant", "silu_and_mul_per_block_quant", "mul_and_silu",
    "rms_norm", "fused_add_rms_norm", "fused_qk_norm_rope", "rotary_embedding",
    "static_scaled_fp8_quant", "dynamic_scaled_fp8_quant", "dynamic_per_token_scaled_fp8_quant",
    "rms_norm_static_fp8_quant", "fused_add_rms_norm_static_fp8_quant",
    "rms_norm_dynamic_per_token_quant", "rms_norm_per_block_quant")
PARTS = ("_C", "_moe_C", "_C_cache_ops")
for name in NAMES:
    LIBRARY.define(f"{name}(Tensor x) -> Tensor")

_found = torch._ops._OpNamespace.__getattr__


def _or_unsupported(self, wanted):
    """Modules ask at import whether a kernel is supported: none is."""
    try:
        return _found(self, wanted)
    except AttributeError:
        if wanted == "weak_ref_tensor":  # which keeps no memory; this one does
            return lambda tensor: tensor
        if "support" in wanted and self.name in PARTS:
            return lambda *args, **kwargs: False
        raise


torch._ops._OpNamespace.__getattr__ = _or_unsupported
