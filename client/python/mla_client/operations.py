"""Calls of operators: draining, bounds of tenants, lists of all sequences, eviction."""

from __future__ import annotations

import dataclasses
from typing import (Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence,
                    Tuple, Union)

from mla_client import errors, messages
from mla_client.gen import admin_pb2, sequence_pb2
from mla_client.types import SequenceState

# No server has a longer deadline of its own for a drain (server.drain_deadline_ms).
MOST_DRAIN_MS = 86_400_000
_PREFIX = "QUOTA_RESOURCE_"
_SOURCES = ("unspecified", "default", "configured", "runtime")  # by number in the contract


@dataclasses.dataclass(frozen=True)
class ResourceUsage:
    """A tenant's use of one resource, in the resource's unit."""

    used: int
    bound: int  # 2**63 - 1: no bound
    source: str  # origin of the bound: "default", "configured" or "runtime"
    refused: int  # requests, since the tenant was last idle


@dataclasses.dataclass(frozen=True)
class TenantQuota:
    """A tenant's use and bounds, by name of the resource ("kv_bytes", "sequences", ...)."""

    tenant: str
    weight: int
    resources: Dict[str, ResourceUsage]


def _usage(entries: Any) -> Dict[str, ResourceUsage]:
    return {entry.name: ResourceUsage(entry.used, entry.bound,
                                      messages.name_of(entry.source, _SOURCES), entry.refused)
            for entry in entries}


def _quota(message: Any) -> TenantQuota:
    return TenantQuota(message.tenant, message.weight, _usage(message.resources))


class Operations:
    """The calls of operators, mixed into Client. Any caller may ask for the `quota` of its own
    tenant; all other calls are for operators.
    """

    _admin: Any
    _sequences: Any

    def _call(self, method: Callable[..., Any], request: Any, *, idempotent: bool = True,
              requests: Optional[Callable[[], Iterator[Any]]] = None,
              timeout_s: Optional[float] = None) -> Any:
        raise NotImplementedError

    def drain(self, deadline_ms: int = 0, exit: bool = False,
              to: Union[str, Sequence[str]] = "") -> admin_pb2.DrainReply:
        """Makes the server refuse new work and wait for open steps until the deadline; 0: the
        server's own. The call itself may take that time, or the server's own however long it is,
        plus the client's timeout. `to` is the "HOST:PORT" of a server that gets the sequences, over
        TLS, or up to 16 of them: each sequence goes to the one with the most free bytes that takes
        it. A server without the capability "hand_over_many" uses only the first one. The reply says
        what became of each sequence.
        """
        peers = [to] if isinstance(to, str) else list(to)
        request = admin_pb2.DrainRequest(deadline_ms=deadline_ms, exit=exit,
                                         to=peers[0] if peers else "", also_to=peers[1:])
        longest_ms = deadline_ms or MOST_DRAIN_MS
        return self._call(self._admin.Drain, request, idempotent=False,
                          timeout_s=self.timeout_s + longest_ms / 1e3)  # type: ignore

    def cancel_drain(self) -> None:
        """Makes the server take new work again after a drain, or ends a drain that is under way."""
        self._call(self._admin.CancelDrain, admin_pb2.CancelDrainRequest(), idempotent=False)

    def quota(self, tenant: str = "") -> TenantQuota:
        """Returns use and bounds of one tenant; "": the caller's own."""
        reply = self._call(self._admin.GetQuota, admin_pb2.GetQuotaRequest(tenant=tenant))
        if len(reply.tenants) != 1:
            raise messages.wrong_answer("quota", "tenants", len(reply.tenants), 1)
        return _quota(reply.tenants[0])

    def quotas(self) -> Tuple[List[TenantQuota], Dict[str, ResourceUsage]]:
        """Returns the quotas of every tenant that uses something or has its own quota, and the use
        of all together.
        """
        reply = self._call(self._admin.GetQuota, admin_pb2.GetQuotaRequest(all=True))
        return [_quota(entry) for entry in reply.tenants], _usage(reply.server)

    def set_quota(self, tenant: str, bounds: Mapping[str, int], *, weight: int = 0,
                  reset: bool = False) -> TenantQuota:
        """Changes bounds of a tenant until the server ends, which keeps only its configuration.
        Other bounds stay as they are. `reset` first undoes all earlier calls for this tenant;
        `weight` 0 keeps it.
        """
        known = admin_pb2.QuotaResource.keys()
        unknown = [name for name in bounds if _PREFIX + name.upper() not in known]
        if unknown:
            names = ", ".join(key[len(_PREFIX):].lower() for key in known[1:])
            raise ValueError(f"bounds: got {unknown[0]!r}, must be one of {names}")
        request = admin_pb2.SetQuotaRequest(
            tenant=tenant, weight=weight, reset=reset,
            bounds=[admin_pb2.QuotaBound(
                resource=admin_pb2.QuotaResource.Value(_PREFIX + name.upper()), bound=bound)
                    for name, bound in bounds.items()])
        return _quota(self._call(self._admin.SetQuota, request).quota)

    def all_sequences(self, client_id: str = "") -> List[SequenceState]:
        """Returns the open sequences of all tenants, each with its tenant, ordered by id; with
        `client_id`, only those of clients with that id. It asks for one part after another, so
        sequences that are opened or end meanwhile may or may not be in the list. Unimplemented from
        servers without the capability "all_sequences".
        """
        info = self._call(self._admin.GetServerInfo, admin_pb2.GetServerInfoRequest())
        if "all_sequences" not in info.capabilities:
            # An older server does not know the field: it would list the caller's own as all.
            raise errors.Unimplemented(
                "all_tenants: the server lists only the caller's sequences")
        request = sequence_pb2.GetRequest(all_tenants=True, client_id=client_id)
        states: List[SequenceState] = []
        while True:
            reply = self._call(self._sequences.Get, request)
            states += [messages.state_of(entry) for entry in reply.sequences]
            if not reply.more:
                return states
            if not reply.sequences or reply.sequences[-1].sequence_id <= request.after:
                raise messages.wrong_answer("all_sequences", "more", "true",
                                            "true only after a part that goes on")
            request.after = reply.sequences[-1].sequence_id

    def evict_sequences(self, tenant: str, sequence_ids: Sequence[int] = (), *,
                        client_id: str = "", everything: bool = False) -> Tuple[int, List[int]]:
        """Releases sequences of any tenant: the given ones, all of one client, or all. Their open
        steps are aborted. Returns the number of released sequences, and the ids that were not
        found."""
        request = admin_pb2.EvictSequencesRequest(tenant=tenant, sequence_ids=sequence_ids,
                                                  client_id=client_id, all=everything)
        reply = self._call(self._admin.EvictSequences, request, idempotent=False)
        return reply.evicted, list(reply.not_found)

    def evict_model(self, tenant: str, model_id: str) -> int:
        """Releases all sequences of a model of any tenant and unregisters it; returns how many."""
        request = admin_pb2.EvictModelRequest(tenant=tenant, model_id=model_id)
        return self._call(self._admin.EvictModel, request, idempotent=False).evicted_sequences
