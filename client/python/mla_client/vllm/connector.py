"""The KV connector: tells the worker which rows of a pass belong to which request, and when
requests end; and the engine which requests wait, and which begin again. No pages are copied: they
lie on the server from the first."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, Collection, Dict, Iterable, List, Optional

from vllm.distributed import kv_events
from vllm.distributed.kv_transfer.kv_connector.v1.base import (KVConnectorBase_V1,
                                                               KVConnectorMetadata,
                                                               KVConnectorRole)
from vllm.version import __version__

from mla_client.pages.block_events import BlockEvent, Removed, Stored
from mla_client.serving import Admission, BatchPlan, Given, Link, Planner, Policy
from mla_client.vllm import checks
from mla_client.vllm.plugin import release
from mla_client.vllm.runtime import runtime

LOG = logging.getLogger("mla_client")


@dataclasses.dataclass
class PlanMetadata(KVConnectorMetadata):
    """A plan on its way to the worker."""

    plan: BatchPlan


def _never_again(config: Any) -> bool:
    """True where requests that have lost rows cannot begin again. The second model runner keeps
    even dropped tokens on the device. Release 0.25.1 does not drop the tokens of a pass that was
    under way."""
    return bool(getattr(config, "use_v2_model_runner", False)) or (
        config.scheduler_config.async_scheduling and release().note == "pages")


def _given(output: Any) -> List[Given]:
    """What a vllm.v1.core.sched.output.SchedulerOutput says of each request."""
    rows: Dict[str, int] = output.num_scheduled_tokens
    given = {new.req_id: Given(new.req_id, new.num_computed_tokens, rows.get(new.req_id, 0),
                               tuple(new.block_ids[0]), begins=True)
             for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    resumed = cached.resumed_req_ids
    for name, blocks, computed in zip(cached.req_ids, cached.new_block_ids,
                                      cached.num_computed_tokens):
        given[name] = Given(name, computed, rows.get(name, 0), tuple(blocks[0]) if blocks else (),
                            name in resumed)
    ordered = [given.pop(name) for name in rows if name in given]
    ordered.extend(given.values())
    return ordered


# vLLM's word for the memory that rows lie in first; routers weigh blocks by it.
MEDIUM = "GPU"


def _published(event: BlockEvent) -> Any:
    """The event in vLLM's own structure, whose fields differ by release."""
    if isinstance(event, Stored):
        fields = {"block_hashes": list(event.hashes), "parent_block_hash": event.parent,
                  "token_ids": list(event.tokens), "block_size": event.block_size,
                  "lora_id": None, "medium": MEDIUM, "lora_name": None}
        return _filled(kv_events.BlockStored, fields)
    if isinstance(event, Removed):
        return _filled(kv_events.BlockRemoved,
                       {"block_hashes": list(event.hashes), "medium": MEDIUM})
    return kv_events.AllBlocksCleared()


def _filled(structure: Any, fields: Dict[str, Any]) -> Any:
    return structure(**{name: value for name, value in fields.items()
                        if name in structure.__struct_fields__})


class MlaServerConnector(KVConnectorBase_V1):
    """The connector of both roles. extra_config: see mla_client.serving.Options."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        checks.check(vllm_config)
        self._requests: Dict[str, Any] = {}  # of the scheduler, by name
        self._again: List[Any] = []  # that miss the next pass
        self._planner: Optional[Planner] = None
        if role == KVConnectorRole.SCHEDULER:
            self._plan_for(vllm_config)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return True

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def _plan_for(self, config: Any) -> None:
        """Prepares the scheduler's side. The server finds prefixes, because the engine's own pages
        hold no rows. Lost requests begin again."""
        config.cache_config.enable_prefix_caching = False
        options = checks.options_of(config)
        speculative = config.speculative_config
        ahead = config.scheduler_config.async_scheduling and speculative is not None
        events = getattr(config, "kv_events_config", None)
        admission = Admission(Link(options), checks.salt(config, __version__),
                              # The keys of an indexer are not with the rows that are found.
                              options.prefix_cache and not checks.top_k_of(config),
                              opens=config.parallel_config.pipeline_parallel_size == 1,
                              follows=True,
                              tells=events is not None and events.enable_kv_cache_events)
        self._planner = Planner(
            admission, config.cache_config.block_size,
            2 * (1 + speculative.num_speculative_tokens) if ahead else 0)
        config.kv_transfer_config.kv_load_failure_policy = Policy(
            "recompute", lambda: not _never_again(config) and admission.patient)

    # --- Worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        runtime.start()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, PlanMetadata)
        runtime.bind(connector_metadata.plan)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        runtime.bind(None)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return  # a pass begins at its first layer

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any,
                      **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        runtime.finish()

    def get_block_ids_with_load_errors(self) -> Collection[int]:
        return runtime.lost_blocks()

    def shutdown(self) -> None:
        if self.role == KVConnectorRole.WORKER:
            runtime.close()
        elif self._planner is not None:
            self._planner.admission.close()
            self._planner = None

    # --- Scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int
                                   ) -> tuple[Optional[int], bool]:
        assert self._planner is not None
        self._requests[request.request_id] = request
        if num_computed_tokens > 0:
            return 0, False
        rows = self._planner.admission.admit(request.request_id, request.all_token_ids,
                                             request.cache_salt or "",
                                             checks.shareable(request), checks.finds(request))
        return rows, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        return

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        assert self._planner is not None
        for request in self._again:  # none of them is in this pass
            request.num_computed_tokens = 0
        self._again.clear()
        output, cached = scheduler_output, scheduler_output.scheduled_cached_reqs
        plan: Optional[BatchPlan] = None
        if not (output.scheduled_new_reqs or output.finished_req_ids or output.preempted_req_ids
                or cached.resumed_req_ids):
            plan = self._planner.again(output.num_scheduled_tokens, cached.req_ids,
                                       cached.num_computed_tokens, cached.new_block_ids)
        return PlanMetadata(plan or self._planner.plan(_given(output), {
            *output.finished_req_ids, *(output.preempted_req_ids or ())}))

    def update_connector_output(self, connector_output: Any) -> None:
        """Requests that begin again: what of them is under way counts for nothing."""
        lost = connector_output.invalid_block_ids
        if not lost or self._planner is None:
            return
        for name in self._planner.held(lost, self._requests):
            if self._requests[name].num_computed_tokens == 0:
                self._begin_again(self._requests[name])

    def request_finished(self, request: Any, block_ids: list[int]
                         ) -> tuple[bool, dict[str, Any] | None]:
        self._requests.pop(request.request_id, None)
        if self._planner is not None:
            admission = self._planner.admission
            if admission.error is not None and request.status.name == "FINISHED_ERROR":
                LOG.error("mla: request %s fails: %s", request.request_id, admission.error)
            admission.ended(request.request_id, request.all_token_ids)
        return False, None

    def take_events(self) -> Iterable[Any]:
        """What vLLM publishes for routers, by `--kv-events-config`, in its own structures."""
        if self._planner is None:
            return ()
        return [_published(event) for event in self._planner.admission.block_events()]

    def _begin_again(self, request: Any) -> None:
        """With asynchronous scheduling a pass of the request is under way. Its tokens are dropped
        like the tokens of a preempted request. A worker has the latest tokens only on its device,
        and gets them again only with a request that has missed a pass. So this request misses the
        next one, as if it had nothing left to compute."""
        if not self._vllm_config.scheduler_config.async_scheduling:
            return
        request.num_output_placeholders = 0
        request.spec_token_ids = []
        request.num_stale_output_tokens = request.num_in_flight_tokens
        request.drop_stale_output = True
        request.num_computed_tokens = request.num_tokens
        self._again.append(request)
