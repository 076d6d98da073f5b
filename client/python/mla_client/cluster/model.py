"""A model of a cluster: registered on each server where sequences of it come."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Sequence as Seq, Tuple

import numpy.typing as npt

from mla_client import errors, wire
from mla_client.cluster.owners import AWAY
from mla_client.service import Model, Sequence
from mla_client.types import ModelSpec, Prefix, WeightsStatus

if TYPE_CHECKING:
    from mla_client.cluster.client import ClusterClient
    from mla_client.cluster.owners import Owner


class ClusterModel(Model):
    """A model on the servers of a cluster. It keeps references to uploaded arrays for servers that
    get the model later, so the arrays must not change. `Client.connect(on_peer=...)` reads the
    weights again instead."""

    def __init__(self, cluster: "ClusterClient", asked: ModelSpec, registered: Model, lease_ms: int,
                 extras: Dict[str, Any]) -> None:
        """`asked`: the spec before a server has filled it in. `registered`: as that server has
        it."""
        service: Any = cluster
        super().__init__(service, registered.spec, registered.page_group_bytes)
        self.asked = asked
        self.lease_ms = lease_ms
        self.extras = extras  # of the registration
        # By what they are about: a repeat takes the place of the one before.
        self.uploads: Dict[Tuple[Any, ...], Callable[[Model], Any]] = {}
        self._cluster = cluster

    def rows_of(self, prefix: Optional[Prefix]) -> int:
        """Rows of whole pages that a prefix is about."""
        if prefix is None:
            return 0
        page = self.spec.page_size
        rows = len(prefix.page_keys) * page or len(prefix.token_ids) // page * page
        return rows if prefix.max_rows is None else min(rows, prefix.max_rows // page * page)

    def bytes_of(self, rows: int) -> int:
        """Returns the bytes that `rows` rows take in a pool."""
        return -(-max(0, rows) // self.spec.page_size) * self.page_group_bytes

    def open_sequence(self, *, request_id: str = "", lease_ms: int = 0,
                      prefix: Optional[Prefix] = None, last: str = "") -> Sequence:
        """As Model's, on the server where it costs least (docs/cluster.md). `last`: the address of
        the server that had the conversation before ("": what this client remembers)."""
        wire.check_number("lease_ms", lease_ms)
        return self._cluster.open_sequence(self, request_id or secrets.token_hex(16), lease_ms,
                                           prefix, last)

    def adopt_sequence(self, sequence_id: int) -> Sequence:
        """As Model's, from whichever server has it."""
        return self._cluster.adopt(self, sequence_id)

    def upload_weights(self, layer: int, w_uk: npt.NDArray, w_uv: npt.NDArray,
                       head_begin: int = 0) -> WeightsStatus:
        """As Model's, to all servers that have the model; the last one's status."""
        status: WeightsStatus = self._upload(
            ("weights", layer, head_begin),
            lambda there: there.upload_weights(layer, w_uk, w_uv, head_begin))
        return status

    def upload_projected(self, layer: int, w_uq: npt.NDArray, w_o: npt.NDArray,
                         head_begin: int = 0, *, w_uq_scales: Optional[npt.NDArray] = None,
                         w_o_scales: Optional[npt.NDArray] = None) -> WeightsStatus:
        """As Model's, to all servers that have the model; the last one's status."""
        status: WeightsStatus = self._upload(
            ("projected", layer, head_begin),
            lambda there: there.upload_projected(layer, w_uq, w_o, head_begin,
                                                 w_uq_scales=w_uq_scales, w_o_scales=w_o_scales))
        return status

    def upload_scales(self, scales: Seq[float]) -> None:
        """As Model's, to all servers that have the model."""
        self._upload(("scales",), lambda there: there.upload_scales(scales))

    def upload_sinks(self, sinks: Any, layer_begin: int = 0, head_begin: int = 0) -> List[int]:
        """As Model's, to all servers that have the model."""
        missing: List[int] = self._upload(
            ("sinks", layer_begin, head_begin),
            lambda there: there.upload_sinks(sinks, layer_begin, head_begin))
        return missing

    def unregister(self) -> None:
        """Forgets the model on all servers. FailedPrecondition while sequences of it are open."""
        self._cluster._unregister(self.spec.model_id)

    def merged(self, lease_ms: int, extras: Dict[str, Any]) -> Tuple[int, Dict[str, Any]]:
        """The lease and the extras after a repeat: servers keep what the repeat does not set."""
        return lease_ms or self.lease_ms, {**self.extras, **extras}

    def take_uploads(self, former: "ClusterModel", extras: Dict[str, Any]) -> None:
        """Takes over what was uploaded for the registration before, except scales and sinks in
        whose place this one sets others."""
        self.uploads = former.uploads
        parts = {"kv_scales": "scales", "sinks": "sinks"}
        named = [parts[name] for name in extras]
        for about in [about for about in self.uploads if about[0] in named]:
            del self.uploads[about]

    def renew_elsewhere(self, done: "Owner", lease_ms: int, extras: Dict[str, Any]) -> None:
        """Repeats the registration, with what the call has set, on the servers that have the model,
        except for `done`. Raises the first error of a server that answers, after all were asked."""
        first: Optional[errors.MlaError] = None
        for owner in self._cluster._used():
            if owner is done or not owner.has_model(self.spec.model_id):
                continue
            try:
                owner.reach(lambda on: on.renew(self.spec, lease_ms, extras,
                                                (self.lease_ms, self.extras)))
            except AWAY as error:
                owner.failed(error)
                owner.forget_model(self.spec.model_id)  # it gets all of it when it is used again
            except errors.MlaError as error:
                first = first or error
        if first is not None:
            raise first

    def replay(self, there: Model) -> None:
        """Uploads to one server what was uploaded so far."""
        for upload in list(self.uploads.values()):
            upload(there)

    def _upload(self, about: Tuple[Any, ...], upload: Callable[[Model], Any]) -> Any:
        answer, done, last = None, 0, None
        for owner in self._cluster._used():
            try:
                answer = upload(owner.model(self.spec, self.lease_ms, self.extras))
                done += 1
            except AWAY as error:
                owner.failed(error)
                owner.drop()  # with the next connection it gets all of them
                last = error
        if not done:
            raise last or errors.Unavailable("no server has the model")
        self.uploads[about] = upload
        return answer
