"""Refuses configurations with which answers would be wrong, and names everything that rows depend
on."""

from __future__ import annotations

import json
from typing import Any

from sglang.srt.runtime_context import get_exec

from mla_client.serving import refuse, salt_of_rows
from mla_client.sglang import NAME, plugin


def check(runner: Any) -> None:
    """Raises Unimplemented for options that would give wrong answers with a server."""
    args = runner.server_args
    graphs, missing = get_exec().graph.cuda_graph_config, plugin.hooks_missing()
    refuse([
        (not runner.use_mla_backend, "attention that is not MLA"),
        (runner.is_draft_worker or args.speculative_algorithm is not None,
         "speculative decoding: rows of drafts would be taken for right ones; turn it off"),
        (args.pp_size > 1, "pipeline parallelism: turn it off"),
        (args.dcp_size > 1 or args.attn_cp_size > 1,
         "context parallelism: the rows lie on the server, once; turn it off"),
        (graphs.decode.backend != "disabled" or graphs.prefill.backend != "disabled",
         "CUDA graphs: a pass calls the server; use --disable-cuda-graph"),
        (args.enable_two_batch_overlap or args.enable_single_batch_overlap,
         "overlap of batches: two passes would be under way at a time; turn it off"),
        (args.enable_pdmux or args.disaggregation_mode != "null",
         "prefill apart from decoding: the rows lie on the server for both; turn it off"),
        (args.enable_hierarchical_cache or args.enable_lmcache or args.enable_hisparse,
         "a second cache of rows: they are on the server; turn it off"),
        (args.enable_streaming_session,
         "streaming sessions: they keep rows between requests; turn them off"),
        (args.kv_cache_dtype not in ("auto", "bfloat16", "bf16"),
         "a quantised KV cache: say how the server keeps rows when it registers the model"),
        ({runner.prefill_attention_backend_str, runner.decode_attention_backend_str} != {NAME},
         "another backend for prefill or decoding"),
        (missing, f"SGLang has put no hook around {', '.join(missing)}"),
    ])


def shareable(req: Any) -> bool:
    """True if the rows of a request follow from its tokens, its salt and its extra key alone."""
    return (req.lora_id is None and req.multimodal_inputs is None and req.input_embeds is None
            and req.positional_embed_overrides is None and req.session is None)


def salt(runner: Any, version: str) -> str:
    """A salt of everything that changes a row's value, except the tokens."""
    args, config = runner.server_args, runner.model_config
    return salt_of_rows(
        "sglang", version, args.model_path, config.hf_text_config, device=args.device,
        dtype=str(config.dtype), revision=args.revision, quantization=str(config.quantization),
        overrides=args.json_model_override_args,
        kernels=[args.moe_runner_backend, args.fp8_gemm_runner_backend,
                 args.enable_deterministic_inference, args.enable_torch_compile],
        parallel=[args.ep_size, args.enable_dp_attention])


def salt_of_request(req: Any) -> str:
    """A salt of the keys that keep requests apart."""
    return json.dumps([req.extra_key, req.cache_salt])
