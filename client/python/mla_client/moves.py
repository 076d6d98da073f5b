"""Going on with sequences that a drain has moved to another server.

A server that drains moves sequences one after another; each keeps its id and its rows, and gets
another epoch. A caller that asks for one is told where it is, or to ask again while it may be
moving.
"""

from __future__ import annotations

import abc
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Sequence as Seq, Tuple

from mla_client import errors
from mla_client.connection.leases import LeaseRenewer
from mla_client.gen import sequence_pb2
from mla_client.messages import only_of
from mla_client.service import Model, Sequence, Service
from mla_client.service.gathering import gather
from mla_client.types import ModelSpec, SequenceState

# Servers that a sequence may have moved to, one after another, since its client asked last.
MOST_MOVES = 3


class Moves:
    """Keeps the servers to which a client's sequences have moved, and the connections to them.
    Thread-safe; a Sequence still belongs to one thread at a time.
    """

    def __init__(self, connect: Callable[[str], "Following"],
                 on_peer: Optional[Callable[[Model], None]] = None) -> None:
        """`connect` makes a client of the server at HOST:PORT, as the same tenant and with the same
        client_id; it is closed with this. `on_peer` gets each model before a sequence of it is
        used there for the first time."""
        self._connect = connect
        self._on_peer = on_peer
        self._lock = threading.Lock()  # also while one thread connects, and others wait for it
        self._clients: Dict[str, "Following"] = {}
        self._models: Dict[Tuple[str, str], Model] = {}
        self._prepare: Dict[str, Callable[[Model], None]] = {}  # by model id
        self._closed = False
        self.last_peer = ""  # the server to which sequences have moved last

    def client_of(self, peer: str) -> "Following":
        """Returns the client of the server at HOST:PORT."""
        with self._lock:
            if self._closed:
                raise errors.Unavailable("the client is closed")
            client = self._clients.get(peer)
            if client is None:
                client = self._clients[peer] = self._connect(peer)
                if client._moves is not None:
                    client._moves._prepare = self._prepare  # they may move on from there
            self.last_peer = peer
            return client

    def prepare(self, model_id: str, prepare: Callable[[Model], None]) -> None:
        """As `on_peer`, of one model, and before it."""
        self._prepare[model_id] = prepare

    def model_of(self, peer: str, model: Model) -> Model:
        """Returns the model as that server has it, which came with the sequences."""
        client = self.client_of(peer)
        with self._lock:
            there = self._models.get((peer, model.spec.model_id))
        if there is not None:
            return there
        spec = model.spec
        if spec.model_id not in (known.model_id for known in client.models()):
            # This client does not know the further arguments of the registration.
            if spec.attention == "sparse_v4" or spec.kv_format == "fp8_tensor":
                raise errors.FailedPrecondition(
                    f"model {spec.model_id}: {peer} does not have it, and its sinks or scales are "
                    "not known to this client: register it there")
            client._register(spec, 0, (), ())
        there = Model(client, model.spec, model.page_group_bytes)
        for prepare in (self._prepare.get(model.spec.model_id), self._on_peer):
            if prepare is not None:
                prepare(there)
        with self._lock:
            return self._models.setdefault((peer, model.spec.model_id), there)

    def follow(self, sequence: Sequence, peer: str) -> None:
        """Makes the sequence one of that server's, or of the one to which that server has moved it
        since. FailedPrecondition if it was changed by another client before it moved."""
        for move in range(MOST_MOVES):
            try:
                model, there = self._attach(peer, sequence)
                break
            except errors.NotFound as error:
                detail = error.detail
                if detail.reason != "moved" or not detail.peer or move + 1 == MOST_MOVES:
                    raise
                peer = detail.peer
        if there.length != sequence.length:
            raise errors.FailedPrecondition(
                f"sequence {sequence.id:#x} has moved to {peer} with {there.length} rows, not "
                f"{sequence.length}: another client has changed it before",
                errors.ErrorDetail(field="sequence_id", reason="changed_meanwhile", peer=peer))
        sequence.model, sequence.epoch = model, there.epoch

    def _attach(self, peer: str, sequence: Sequence) -> Tuple[Model, Sequence]:
        """The sequence as that server has it. A connection to it may be to the process that was
        there before: servers are upgraded one after another."""
        try:
            model = self.model_of(peer, sequence.model)
            return model, self.client_of(peer).attach(model, sequence.id)
        except (errors.ServerRestarted, errors.AnotherServer) as error:
            self.forget(peer, error)
        model = self.model_of(peer, sequence.model)
        return model, self.client_of(peer).attach(model, sequence.id)

    def forget(self, peer: str, error: errors.MlaError) -> None:
        """Drops a connection because, as the error says, another process answers there now."""
        with self._lock:
            client = self._clients.pop(peer, None)
            for key in [one for one in self._models if one[0] == peer]:
                del self._models[key]
        if client is not None:
            client.close()

    def close(self) -> None:
        """Closes the connections."""
        with self._lock:
            self._closed = True
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.close()


class Following(Service):
    """Lets a Client follow sequences that have moved to another server; it does nothing until
    `_moves` is set (Client.connect(follow_moves=...)).
    """

    _call: Callable[..., Any]
    _sequences: Any
    _renewer: LeaseRenewer
    _closed: threading.Event
    _moves: Optional[Moves] = None

    @abc.abstractmethod
    def models(self) -> List[ModelSpec]:
        """Returns the tenant's models."""

    @abc.abstractmethod
    def attach(self, model: Model, sequence_id: int, *, lease_ms: int = 0) -> Sequence:
        """Returns a sequence that is already open."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the connection."""

    @property
    def _last_peer(self) -> str:
        """The server to ask for sequences of a server that has ended after a drain, or ""."""
        return self._moves.last_peer if self._moves is not None else ""

    def _moved(self, sequence_ids: List[int]) -> List[Tuple[int, str]]:
        """The moved ones among them, and the servers that have them. A server that has ended after
        a drain does not answer, or another process does: its sequences may be where others have
        moved."""
        try:
            reply = self._call(self._sequences.Get,
                               sequence_pb2.GetRequest(sequence_ids=sequence_ids))
        except (errors.Unavailable, errors.ServerRestarted):
            if not self._last_peer:
                raise
            return [(sequence_id, self._last_peer) for sequence_id in sequence_ids]
        return [(one.sequence_id, one.peer) for one in reply.moved
                if one.sequence_id in sequence_ids]

    def _found(self, sequence_id: int) -> SequenceState:
        return only_of(self._call(self._sequences.Get,
                                  sequence_pb2.GetRequest(sequence_ids=[sequence_id])), sequence_id)

    def _look(self, sequence: Sequence) -> None:
        if self._moves is None:
            return
        for _, peer in self._moved([sequence.id]):
            self._moves.follow(sequence, peer)
            self._renewer.drop([sequence.id])

    def _follow(self, sequences: Seq[Sequence], error: errors.MlaError, deadline: float) -> None:
        detail = error.detail
        if self._moves is None:
            raise error
        if detail.reason == "draining" and not detail.peer:
            if self._begin_again(sequences):
                return
            pause = detail.retry_after_ms / 1e3
            late = pause <= 0 or time.monotonic() + pause >= deadline
            if late or self._closed.wait(pause):
                raise error
        elif ((detail.reason == "moved" and detail.peer)
              or (isinstance(error, (errors.Unavailable, errors.NotFound)) and self._last_peer)):
            try:
                gather(sequences, deadline)
            except errors.NotFound as absent:
                raise error from absent  # they have not moved: the server has lost them
            if all(one.model.service is self for one in sequences):
                raise error
        else:
            raise error

    def _begin_again(self, sequences: Seq[Sequence]) -> bool:
        """Sequences without rows do not move: opens others for them where new ones may be opened.
        Returns true if there were any."""
        empty = [one for one in sequences if one.length == 0 and one.model.service is self]
        for one in empty:
            there = one.model.open_sequence()
            one.model.service._release([one.id])
            one.model, one.id, one.epoch = there.model, there.id, there.epoch
        return bool(empty)

    def _prepare_moved(self, model_id: str, prepare: Callable[[Model], None]) -> None:
        if self._moves is not None:
            self._moves.prepare(model_id, prepare)

    def _elsewhere(self, model: Model, error: errors.MlaError) -> Model:
        # A server that has ended does not answer, or a process without its models does.
        ended = (isinstance(error, (errors.Unavailable, errors.ServerRestarted))
                 or error.detail.reason == "model_not_found")
        peer = error.detail.peer or (self._last_peer if ended else "")
        if self._moves is None or not peer:
            raise error
        return self._moves.model_of(peer, model)

    def _release_moved(self, absent: List[int]) -> List[int]:
        """Releases sequences that have moved; returns the others."""
        if absent and self._moves is not None:
            for sequence_id, peer in self._moved(absent):
                if not self._moves.client_of(peer)._release([sequence_id]):
                    absent.remove(sequence_id)
        return absent

    def _close_moves(self) -> None:
        if self._moves is not None:
            self._moves.close()
