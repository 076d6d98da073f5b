"""The attention backend: queries before absorption and new rows go to the server, outputs come
back. SGLang's layers hand both to `prepare_prefill_qkv`, a method that they look for."""

from __future__ import annotations

import math
from typing import Any, List, Optional, Tuple

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
    AttnForwardMethod)

from mla_client import errors
from mla_client.serving.layers import SCALE_TOLERANCE
from mla_client.sglang import NAME
from mla_client.sglang.runtime import runtime


def _expanded(attn: Any, forward_batch: Any) -> Any:
    """The forward method of DeepSeek's layers, which otherwise would absorb the queries of
    decoding."""
    return AttnForwardMethod.MHA


class RemoteMlaBackend(AttentionBackend):
    """The attention backend of one model runner."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        runtime.start(runner)
        self._handed: Optional[Tuple[int, torch.Tensor]] = None  # a layer and its new rows
        AttentionBackendRegistry.register(NAME, _expanded)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Begins a pass."""
        if in_capture:
            raise errors.Unimplemented("CUDA graphs: turn them off")
        self._handed = None
        rids = forward_batch.rids
        if forward_batch.forward_mode.is_idle() or not rids:
            runtime.begin([], [])  # a pass of SGLang's own making, or an idle rank's
            return
        runtime.begin(rids, _rows(forward_batch, len(rids)))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        raise errors.Unimplemented("CUDA graphs: turn them off")

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1  # of requests that pad a batch

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        return self.get_cuda_graph_seq_len_fill_value()  # it is asked for on a CPU

    def prepare_prefill_qkv(self, *, q: torch.Tensor, q_pe: torch.Tensor, kv_a: torch.Tensor,
                            k_pe: torch.Tensor, positions: torch.Tensor, layer: Any,
                            forward_batch: Any) -> Tuple[torch.Tensor, None, None]:
        """q [rows, heads, nope + rope], its rotated part q_pe, the normed latents kv_a [rows,
        lora] and the keys to rotate, k_pe [rows, 1, rope] -> the queries; nothing is expanded."""
        _check(layer)
        if layer.rotary_emb is not None:
            q_pe, k_pe = layer.rotary_emb(positions, q_pe, k_pe)
        q[..., layer.qk_nope_head_dim:] = q_pe
        rows = torch.cat((kv_a, k_pe.reshape(len(kv_a), -1).to(kv_a)), dim=-1)
        self._handed = layer.layer_id, rows
        return q, None, None

    def forward_decode(self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any,
                       save_kv_cache: bool = True, **kwargs: Any) -> torch.Tensor:
        return self._attend(q, layer, **kwargs)

    def forward_extend(self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any,
                       save_kv_cache: bool = True, **kwargs: Any) -> torch.Tensor:
        return self._attend(q, layer, **kwargs)

    def _attend(self, q: torch.Tensor, layer: Any, **others: Any) -> torch.Tensor:
        handed, self._handed = self._handed, None
        if handed is None or handed[0] != layer.layer_id or others:
            raise errors.Unimplemented(
                f"layer {layer.layer_id}: attention that is not DeepSeek's MLA {sorted(others)}")
        return runtime.attend(layer.layer_id, q, handed[1])


def _check(layer: Any) -> None:
    """Unimplemented for a layer that is not as the model was registered."""
    spec = runtime.spec
    assert spec is not None
    geometry, attention = spec.geometry, layer.attn_mha
    shape = layer.kv_lora_rank, attention.qk_head_dim, attention.v_head_dim
    must = geometry.kv_lora_rank, geometry.nope_dim + geometry.rope_dim, geometry.v_dim
    if shape != must or attention.logit_cap or not math.isclose(
            attention.scaling, spec.softmax_scale, rel_tol=SCALE_TOLERANCE):
        raise errors.Unimplemented(
            f"layer {layer.layer_id}: (latent, key, value) are {shape}, scale {attention.scaling}, "
            f"cap {attention.logit_cap}; must be {must}, {spec.softmax_scale}, 0")


def _rows(batch: Any, requests: int) -> List[Tuple[int, int]]:
    """For each request of a batch: its rows before the batch, and its rows in it. Entries after the
    requests are padding."""
    if batch.forward_mode.is_decode():
        lengths = batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu
        return [(length - 1, 1) for length in lengths.tolist()[:requests]]
    if batch.forward_mode not in (ForwardMode.EXTEND, ForwardMode.MIXED):
        raise errors.Unimplemented(f"batches of mode {batch.forward_mode.name}")
    return list(zip(batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu))[:requests]
