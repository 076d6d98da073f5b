"""The attention layer with W_UQ and W_O on the server: from normed queries to hidden states.

vLLM makes it in the place of its own MultiHeadLatentAttentionWrapper, which it lets others replace
by name (PluggableLayer.register_oot). Without `projected` it is that layer.
"""

from __future__ import annotations

from typing import Any, List, Optional

import numpy as np
import numpy.typing as npt
import torch
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper

from mla_client import errors
from mla_client.serving import refuse
from mla_client.types import Geometry

# The largest difference between a rotation by the layer and by its table, of elements of about 1:
# what rounding to bf16 makes.
ROTATION_ERROR = 0.05


class ProjectedLayer(MultiHeadLatentAttentionWrapper):
    """Takes the place of the wrapper. Its inputs and outputs are the same."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        add = getattr(self.mla_attn.impl, "add_projections", None)  # of this package's backend
        self._projected = add is not None and add(self)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor,
                llama_4_scaling: Optional[torch.Tensor] = None) -> torch.Tensor:
        if not self._projected:
            found: torch.Tensor = super().forward(positions, hidden_states, llama_4_scaling)
            return found
        if llama_4_scaling is not None or positions.ndim != 1:
            raise errors.Unimplemented("projected: queries that are scaled by their positions, and "
                                       "positions of several axes")
        if self.q_lora_rank is not None:
            queries, latents = self.fused_qkv_a_proj(hidden_states)[0].split(
                [self.q_lora_rank, self.kv_lora_rank + self.qk_rope_head_dim], dim=-1)
            queries = self.q_a_layernorm(queries)
        else:
            queries, latents = hidden_states, self.kv_a_proj_with_mqa(hidden_states)[0]
        rows, key = latents.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        rows, key = self.kv_a_layernorm(rows), key.unsqueeze(1)
        # It rotates two tensors, maybe in place; the server rotates the queries.
        _, key = self.rotary_emb(positions, key.clone(), key)
        return self.mla_attn(queries.unsqueeze(1), rows, key,
                             output_shape=(hidden_states.shape[0], self.hidden_size))


class Projections:
    """A layer's own projections, which its worker keeps for rows that it computes by itself."""

    def __init__(self, layer: Any, geometry: Geometry) -> None:
        self.geometry = geometry
        self.q_proj = layer.q_b_proj if layer.q_lora_rank is not None else layer.q_proj
        self.o_proj = layer.o_proj
        self.rotary = layer.rotary_emb
        refuse([
            (self.rotary is None, "projected: a layer without rotated positions"),
            (getattr(layer, "g_proj", None) is not None,
             "projected: a gate between attention and o_proj, which the server does not have"),
            (layer.dcp_q_replicate, "projected: queries that several ranks have alike"),
        ])

    @property
    def layout(self) -> str:
        """ModelSpec.rope_layout."""
        return "halves" if self.rotary.is_neox_style else "interleaved"

    def table(self, positions: int) -> npt.NDArray[np.float32]:
        """Cosines and then sines of at least so many positions, [positions, rope]. Unimplemented if
        the layer does not rotate by them."""
        whole = self.rotary.cos_sin_cache
        rope = self.geometry.rope_dim
        if whole.ndim != 2 or (self.rotary.rotary_dim, whole.shape[1]) != (rope, rope) or (
                len(whole) < positions):
            raise errors.Unimplemented(
                f"projected: {type(self.rotary).__name__} has cosines and sines "
                f"{tuple(whole.shape)}, must be [positions, {rope}] of at least {positions}")
        places = torch.linspace(0, len(whole) - 1, 5, device=whole.device).long()
        given = torch.linspace(-1, 1, 5 * rope, dtype=self.rotary.dtype,
                               device=whole.device).view(5, 1, rope)
        want = self._rotated(given, whole[places].float()).float()
        _, got = self.rotary(places, given.clone(), given.clone())
        error = float((got.float() - want).abs().max())
        if not error < ROTATION_ERROR:
            raise errors.Unimplemented(
                f"projected: {type(self.rotary).__name__} rotates otherwise than its cosines and "
                f"sines say, by up to {error:.3g}")
        return whole.float().cpu().numpy()

    def queries(self, given: torch.Tensor) -> torch.Tensor:
        """As of pytorch.exchange.Projections."""
        own = self.geometry
        found = self.q_proj(given)[0].view(len(given), own.num_heads, -1)
        turned = self._rotated(found[..., own.nope_dim:], self.rotary.cos_sin_cache[:len(given)])
        return torch.cat((found[..., :own.nope_dim], turned.to(found.dtype)), dim=-1)

    def hiddens(self, outputs: torch.Tensor) -> torch.Tensor:
        """As of pytorch.exchange.Projections."""
        found: torch.Tensor = self.o_proj(outputs.flatten(1))[0]
        return found

    def _rotated(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """x [rows, any, rope] by the rows of the table [rows, rope], in float32."""
        cosines, sines = table.float()[:, None].chunk(2, dim=-1)
        pairs = x.float()
        if self.rotary.is_neox_style:
            first, second = pairs.chunk(2, dim=-1)
        else:
            first, second = pairs[..., ::2], pairs[..., 1::2]
        turned = first * cosines - second * sines, first * sines + second * cosines
        if self.rotary.is_neox_style:
            return torch.cat(turned, dim=-1)
        return torch.stack(turned, dim=-1).flatten(-2)


def whole(layers: List[Optional[Projections]]) -> List[Projections]:
    """The projections of all layers, whose rows are rotated by the table of the first one.
    Unimplemented if some layer has none, or others."""
    projections = [one for one in layers if one is not None]
    if len(projections) < len(layers):
        raise errors.Unimplemented(
            "projected: the model's attention layers are none that vLLM lets others replace "
            "(MultiHeadLatentAttentionWrapper), or the platform has layers of its own")
    first = projections[0]
    for one in projections[1:]:
        if one.rotary is not first.rotary and not (
                one.layout == first.layout
                and torch.equal(one.rotary.cos_sin_cache, first.rotary.cos_sin_cache)):
            raise errors.Unimplemented("projected: layers that rotate in different ways")
    return projections
