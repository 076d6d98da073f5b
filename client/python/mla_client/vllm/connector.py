"""The KV connector: tells the worker which rows of a pass belong to which request, and when
requests end. No pages are copied: they lie on the server from the first."""

from __future__ import annotations

import dataclasses
from typing import Any, List, Optional

from vllm.distributed.kv_transfer.kv_connector.v1.base import (KVConnectorBase_V1,
                                                               KVConnectorMetadata,
                                                               KVConnectorRole)

import mla_client
from mla_client import errors
from mla_client.vllm.requests import PassPlan, Planner, Prefixes
from mla_client.vllm.runtime import runtime

LEASE_MS = 60_000


@dataclasses.dataclass
class PlanMetadata(KVConnectorMetadata):
    """A plan on its way to the worker."""

    plan: PassPlan


def _check(config: Any) -> None:
    """Unimplemented for what the engine must not do beside a server."""
    parallel = config.parallel_config
    for bad, what in (
            (parallel.tensor_parallel_size > 1, "tensor parallelism"),
            (parallel.pipeline_parallel_size > 1, "pipeline parallelism"),
            (parallel.decode_context_parallel_size > 1, "decode context parallelism"),
            (config.cache_config.enable_prefix_caching, "prefix caching of the engine"),
            (config.scheduler_config.async_scheduling, "asynchronous scheduling"),
            (config.cache_config.cache_dtype not in ("auto", "bfloat16"), "a quantised KV cache")):
        if bad:
            raise errors.Unimplemented(f"{what}: turn it off")


def _shareable(request: Any) -> bool:
    """Whether the rows of a request follow from its tokens and salt alone, and none of them must be
    computed for what the request asks for."""
    return (request.lora_request is None and not request.mm_features
            and request.prompt_embeds is None and not request.resumable
            and not request.skip_reading_prefix_cache)


class MlaServerConnector(KVConnectorBase_V1):
    """Of both roles. extra_config: `target`, and optionally `model_id`, `prefix_cache` (default:
    true) and what else mla_client.Client.connect takes."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _check(vllm_config)
        self._planner = Planner()
        self._client: Optional[mla_client.Client] = None  # of the scheduler
        self._deferred = vllm_config.speculative_config is not None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return True

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # --- Worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        options, model_id, _ = self._options()
        runtime.start(lambda: mla_client.Client.connect(**options), model_id)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        blocks, rows = _batch(forward_context.attn_metadata)
        assert runtime.passes is not None, "register_kv_caches was not called"
        plan = self._get_connector_metadata().plan
        runtime.passes.begin(plan.in_order(blocks, rows), plan.gone, plan.said)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any,
                      **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        if not self._deferred and runtime.passes is not None:
            runtime.passes.end()

    def shutdown(self) -> None:
        if self.role == KVConnectorRole.WORKER:
            runtime.close()
        elif self._client is not None and self._planner.prefixes is not None:
            self._planner.prefixes.close()
            self._client.close()
            self._planner.prefixes = self._client = None

    def _options(self) -> tuple[dict[str, Any], str, bool]:
        """Of both roles' clients, which have one name, in which leases are renewed; the model's id;
        whether prefixes are shared."""
        config = self._kv_transfer_config
        options: dict[str, Any] = {"lease_ms": LEASE_MS, "client_id": f"vllm-{config.engine_id}",
                                   **config.kv_connector_extra_config}
        model_id = options.pop("model_id", "") or self._vllm_config.model_config.model
        return options, model_id, options.pop("prefix_cache", True)

    # --- Scheduler

    def get_num_new_matched_tokens(self, request: Any,
                                   num_computed_tokens: int) -> tuple[int, bool]:
        if num_computed_tokens > 0 or not _shareable(request):
            return 0, False
        if self._planner.prefixes is None:
            options, model_id, shares = self._options()
            if not shares:
                return 0, False
            model = self._vllm_config.model_config
            self._client = mla_client.Client.connect(**options)
            self._planner.prefixes = Prefixes(
                self._client, model_id,
                f"{model.model}@{model.revision} {model.dtype} {model.quantization} ")
        return self._planner.prefixes.matched(request.request_id, request.all_token_ids,
                                              request.cache_salt or ""), False

    def request_finished(self, request: Any,
                         block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._planner.end(request.request_id, request.all_token_ids)
        return False, None

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        return

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return PlanMetadata(self._planner.plan(scheduler_output))


def _batch(metadata: Any) -> tuple[List[int], List[int]]:
    """First page and rows of each request of a pass, in the order of its rows: requests that
    decode, then the others."""
    if isinstance(metadata, list):
        metadata = metadata[0]
    if isinstance(metadata, dict):
        metadata = next(iter(metadata.values()), None)
    if metadata is None:  # a pass without tokens
        return [], []
    blocks: List[int] = []
    for part, count in ((metadata.decode, metadata.num_decodes),
                        (metadata.prefill, metadata.num_prefills)):
        if count:
            blocks += part.block_table[:count, 0].tolist()
    begins = metadata.query_start_loc[:len(blocks) + 1].tolist()
    return blocks, [end - begin for begin, end in zip(begins, begins[1:])]
