"""Refuses configurations with which answers would be wrong, and names everything that rows depend
on."""

from __future__ import annotations

from typing import Any

from mla_client import errors
from mla_client.serving import Options, Ranks, refuse, salt_of_rows
from mla_client.vllm.plugin import release


def check(config: Any) -> None:
    """Raises Unimplemented for options that would give wrong answers with a server."""
    parallel, lora = config.parallel_config, config.lora_config
    refuse([
        (getattr(parallel, "prefill_context_parallel_size", 1) > 1, "prefill context parallelism: "
         "a rank has rows of which others need the attention"),
        (getattr(parallel, "decode_context_parallel_size", 1) > 1, "decode context parallelism: "
         "the rows lie on the server, once"),
        (bool(getattr(parallel, "enable_dbo", False)), "dual-batch overlap: two passes of one "
         "request would be under way at a time"),
        (config.cache_config.cache_dtype not in ("auto", "bfloat16", "float16"),
         "a quantised KV cache: say how the server keeps rows when it registers the model"),
        (bool(getattr(config.kv_transfer_config, "kv_connector", "") != "MlaServerConnector"),
         "--attention-backend CUSTOM without the KV connector MlaServerConnector: rows of a pass "
         "could not be told apart"),
        (lora is not None and "kv_b_proj" in (lora.target_modules or ("kv_b_proj",)),
         "LoRA of kv_b_proj, of which the server has the base model's: name the modules that "
         "adapters change, without this one (--lora-target-modules)"),
        (top_k_of(config) and parallel.pipeline_parallel_size > 1, "pipeline parallelism of a "
         "model whose indexer chooses positions: a later stage may need lists of an earlier one"),
    ])
    if options_of(config).projected:
        _check_projected(config)


def _check_projected(config: Any) -> None:
    """As check, where the server has W_UQ and W_O, too."""
    lora = config.lora_config
    theirs = {"q_b_proj", "q_proj", "o_proj"}
    changed = theirs if lora is None else theirs.intersection(lora.target_modules or theirs)
    refuse([
        (release().note == "pages", "projected: this release of vLLM was not tried with it; "
         "use 0.29 or later"),
        (config.parallel_config.tensor_parallel_size > 1, "projected with tensor parallelism: a "
         "rank has the projections of its own heads, and the server's products take all heads; use "
         "--data-parallel-size, or leave it off"),
        (top_k_of(config), "projected for a model whose indexer chooses positions: its queries are "
         "absorbed by the worker"),
        (lora is not None and changed, f"projected with LoRA of {', '.join(sorted(changed))}, of "
         "which the server has the base model's: name the modules that adapters change, without "
         "these (--lora-target-modules)"),
    ])


def top_k_of(config: Any) -> int:
    """The positions that the model's indexer chooses for each row; 0: a row attends to all."""
    return int(getattr(config.model_config.hf_text_config, "index_topk", None) or 0)


def options_of(config: Any) -> Options:
    """The options in --kv-transfer-config. Both roles have one `client_id`, in which leases are
    renewed."""
    transfer = config.kv_transfer_config
    if transfer is None:
        raise errors.Unimplemented("--attention-backend CUSTOM without --kv-transfer-config")
    stages = config.parallel_config.pipeline_parallel_size
    options = Options.of(transfer.kv_connector_extra_config, config.model_config.model,
                         f"vllm-{transfer.engine_id}")
    return options if stages == 1 else options.of_stage(stage_of(config), stages)


def ranks_of(config: Any) -> Ranks:
    """The place of this process among the processes that share heads."""
    parallel = config.parallel_config
    return Ranks(parallel.rank % parallel.tensor_parallel_size, parallel.tensor_parallel_size)


def stage_of(config: Any) -> int:
    """The pipeline stage of this process; the scheduler's is the first."""
    parallel = config.parallel_config
    return (parallel.rank // parallel.tensor_parallel_size) % parallel.pipeline_parallel_size


def shareable(request: Any) -> bool:
    """True if the rows of a request follow from its tokens and salt alone."""
    return (request.lora_request is None and not request.mm_features
            and request.prompt_embeds is None and not getattr(request, "resumable", False))


def finds(request: Any) -> bool:
    """True if none of a request's rows must be computed for what it asks for."""
    return not getattr(request, "skip_reading_prefix_cache", False)


def salt(config: Any, version: str) -> str:
    """A salt of everything that changes a row's value, except the tokens."""
    model, compilation = config.model_config, config.compilation_config
    return salt_of_rows(
        "vllm", version, model.model, model.hf_text_config,
        device=getattr(config.device_config, "device_type", ""), mode=str(compilation.mode),
        custom_ops=list(compilation.custom_ops), backend=str(compilation.backend),
        ops=str(getattr(getattr(config, "kernel_config", None), "ir_op_priority", "")),
        dtype=str(model.dtype), revision=model.revision,
        quantization=str(model.quantization), overrides=str(getattr(model, "hf_overrides", None)),
        experts=bool(config.parallel_config.enable_expert_parallel))
