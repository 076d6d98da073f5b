"""The attention backend: absorbed queries and new rows go to the server, latent outputs come
back."""

from __future__ import annotations

import json
import math
import os
from typing import Any, Dict, List, Tuple

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
    AttnForwardMethod)

import mla_client
from mla_client import errors
from mla_client.pytorch import Sender
from mla_client.service.passes import Scheduled
from mla_client.sglang.plugin import NAME
from mla_client.sglang.requests import Requests
from mla_client.types import Geometry, ModelSpec, Profile

# JSON: `target`, and optionally `model_id` and what else mla_client.Client.connect takes.
OPTIONS = "MLA_SGLANG"
LEASE_MS = 60_000
# Two float32 of one scale that were computed on different ways.
SCALE_TOLERANCE = 1e-5


def _check(runner: Any) -> None:
    """Unimplemented for what the engine must not do beside a server."""
    args = runner.server_args
    graphs = args.cuda_graph_config
    for bad, what in (
            (not runner.use_mla_backend, "attention that is not MLA"),
            (runner.is_draft_worker or args.speculative_algorithm is not None,
             "speculative decoding"),
            (args.tp_size > 1, "tensor parallelism"),
            (args.pp_size > 1, "pipeline parallelism"),
            (args.enable_dp_attention, "data-parallel attention"),
            (not args.disable_radix_cache, "the radix cache"),
            (not args.disable_overlap_schedule, "the overlap scheduler"),
            (graphs.decode.backend != "disabled", "CUDA graphs of decoding"),
            (graphs.prefill.backend != "disabled", "CUDA graphs of prefill"),
            (args.enable_two_batch_overlap, "two-batch overlap"),
            (args.enable_pdmux or args.disaggregation_mode != "null",
             "prefill apart from decoding"),
            (args.kv_cache_dtype not in ("auto", "bfloat16", "bf16"), "a quantised KV cache"),
            ({runner.prefill_attention_backend_str, runner.decode_attention_backend_str}
             != {NAME}, "another backend for prefill or decoding")):
        if bad:
            raise errors.Unimplemented(f"{what}: turn it off")


def _options() -> Dict[str, Any]:
    try:
        given = json.loads(os.environ.get(OPTIONS, ""))
    except ValueError:
        given = None
    if not isinstance(given, dict) or "target" not in given:
        raise errors.InvalidArgument(f'{OPTIONS} of the environment: must be JSON like '
                                     '{"target": "unix:/run/mla/mla.sock"}')
    return given


def _spec(config: Any, model_id: str) -> ModelSpec:
    geometry = Geometry(config.num_attention_heads, config.kv_lora_rank, config.qk_rope_head_dim,
                        config.qk_nope_head_dim, config.v_head_dim)
    return ModelSpec(model_id, geometry, config.num_hidden_layers, config.scaling)


def _absorbed(attn: Any, forward_batch: Any) -> Any:
    """Of DeepSeek's layers, which else expand the keys of prompts."""
    return AttnForwardMethod.MLA


class RemoteMlaBackend(AttentionBackend):
    """Of one model runner. The engine's own KV pool stays and is not written."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        _check(runner)
        options: Dict[str, Any] = {"lease_ms": LEASE_MS, **_options()}
        model_id = options.pop("model_id", "") or runner.model_config.model_path
        self._service = mla_client.Client.connect(**options)
        model = self._service.register_model(_spec(runner.model_config, model_id))
        self._model = model.spec
        self._sender = Sender(Profile.ABSORBED)
        self._requests = Requests(model, lambda: runner.req_to_token_pool.free_slots)
        AttentionBackendRegistry.register(NAME, _absorbed)

    def close(self) -> None:
        """Releases what the server has and ends the connection."""
        self._requests.close()
        self._sender.release()
        self._service.close()

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Begins a pass."""
        if in_capture:
            raise errors.Unimplemented("CUDA graphs: turn them off")
        if forward_batch.forward_mode.is_idle():
            return
        if forward_batch.rids is None:  # a batch of SGLang's own making
            self._requests.begin_empty()
            return
        computed, new = _rows(forward_batch)
        self._requests.begin([Scheduled(*each) for each in zip(forward_batch.rids, computed, new)],
                             forward_batch.req_pool_indices.tolist())

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        raise errors.Unimplemented("CUDA graphs: turn them off")

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1  # of batches to warm up with

    def forward_decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any,
                       forward_batch: Any, save_kv_cache: bool = True,
                       **kwargs: Any) -> torch.Tensor:
        return self._attend(q, k, layer, save_kv_cache, **kwargs)

    def forward_extend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any,
                       forward_batch: Any, save_kv_cache: bool = True,
                       **kwargs: Any) -> torch.Tensor:
        return self._attend(q, k, layer, save_kv_cache, **kwargs)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, layer: Any, save_kv_cache: bool,
                q_rope: Any = None, k_rope: Any = None, **others: Any) -> torch.Tensor:
        """Rows of q, q_rope, k and k_rope are flat or by heads, as the model has them: the latent
        part, with the rotated part behind it or apart."""
        geometry = self._model.geometry
        others = {name: value for name, value in others.items() if value is not None}
        if others or not save_kv_cache:
            raise errors.Unimplemented(f"attention with {sorted(others) or 'rows kept elsewhere'}")
        shape = layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim, layer.v_head_dim
        must = geometry.num_heads, 1, geometry.row_dim, geometry.kv_lora_rank
        if shape != must or layer.logit_cap or not math.isclose(
                layer.scaling, self._model.softmax_scale, rel_tol=SCALE_TOLERANCE):
            raise errors.Unimplemented(
                f"layer {layer.layer_id}: (query heads, KV heads, key, value) are {shape}, scale "
                f"{layer.scaling}, cap {layer.logit_cap}; must be {must}, "
                f"{self._model.softmax_scale}, 0")
        rows = len(q)
        step = self._requests.step_at(layer.layer_id, rows)
        if step is None:
            return q.new_zeros(rows, geometry.num_heads * geometry.kv_lora_rank)
        q, k = q.reshape(rows, geometry.num_heads, -1), k.reshape(rows, -1)
        if q_rope is not None:
            q = torch.cat((q, q_rope.reshape(rows, geometry.num_heads, -1)), dim=-1)
            k = torch.cat((k, k_rope.reshape(rows, -1)), dim=-1)
        o = self._sender.attend(step, layer.layer_id, q, k)
        self._requests.layer_done()
        return o.flatten(1)


def _rows(batch: Any) -> Tuple[List[int], List[int]]:
    """Of each request of a batch: rows before it, and in it."""
    if batch.forward_mode.is_decode():
        lengths = batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu
        return [length - 1 for length in lengths.tolist()], [1] * len(lengths)
    if batch.forward_mode not in (ForwardMode.EXTEND, ForwardMode.MIXED):
        raise errors.Unimplemented(f"batches of mode {batch.forward_mode.name}")
    return batch.extend_prefix_lens.tolist(), batch.extend_seq_lens.tolist()
