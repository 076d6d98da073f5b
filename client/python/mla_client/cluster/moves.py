"""Sequences that a drain has moved between servers of a cluster: what Client does with
`follow_moves`, over the connections that the cluster's client has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable

from mla_client import errors
from mla_client.moves import Moves
from mla_client.service import Model

if TYPE_CHECKING:
    from mla_client.cluster.client import ClusterClient


class ClusterMoves(Moves):
    """Moves of sequences over the connection to one server."""

    def __init__(self, cluster: "ClusterClient") -> None:
        super().__init__(self._none)
        self._cluster = cluster

    @staticmethod
    def _none(peer: str) -> Any:
        raise errors.Internal(f"a connection to {peer} that is not one of the cluster's")

    def client_of(self, peer: str) -> Any:
        return self._cluster.owners.at(peer).client

    def prepare(self, model_id: str, prepare: Callable[[Model], None]) -> None:
        self._cluster._prepare_moved(model_id, prepare)

    def model_of(self, peer: str, model: Model) -> Model:
        return model_there(self._cluster, peer, model)

    def forget(self, peer: str, error: errors.MlaError) -> None:
        self._cluster.owners.at(peer).failed(error)

    def close(self) -> None:
        """The connections are the cluster's."""


def model_there(cluster: "ClusterClient", address: str, model: Model) -> Model:
    """A model as a server has it, to which a sequence of it has moved. A server that drains
    registers nothing, and has the model all the same: it came with the sequence."""
    owner = cluster.owners.at(address)
    known = cluster.models_known.get(model.spec.model_id)
    try:
        if known is None or known.spec != model.spec:
            return owner.model(model.spec, 0, {})
        return cluster.model_at(address, known)
    except errors.Unavailable as error:
        if error.detail.reason != "draining":
            raise
        return Model(owner.client, model.spec, model.page_group_bytes)
