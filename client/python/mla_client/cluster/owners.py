"""The servers that a cluster client uses: their connections and models, and what they said last."""

from __future__ import annotations

import collections
import concurrent.futures
import hashlib
import struct
import threading
import time
import weakref
from typing import (Any, Callable, Dict, List, Mapping, Optional, Sequence as Seq, Tuple,
                    TypeVar)

import numpy as np

from mla_client import errors
from mla_client.cluster.members import Member
from mla_client.service import Model, Sequence
from mla_client.types import ModelSpec, Prefix, Probe, fill_of

# An answer to a probe that takes longer decides nothing: another server is as good.
PROBE_S = 0.25
# The first connection to a server, for a probe.
CONNECT_S = 2.0
# A server that has failed is asked again after so long, twice as long each time, at most.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
# Free memory that a probe reported is used for this long.
FRESH_S = 5.0
# Conversations that are remembered, and rows between two of their marks.
MOST_MARKS = 1 << 17
MARK_ROWS = 1024

# Errors after which another server may do better.
AWAY = (errors.Unavailable, errors.DeadlineExceeded, errors.ServerRestarted, errors.AnotherServer)

_Result = TypeVar("_Result")


class Owner:
    """A server. Thread-safe."""

    def __init__(self, address: str, connect: Callable[[], Any],
                 prepare: Callable[[Model], None], now: Callable[[], float]) -> None:
        self.address = address
        self._connect = connect
        self._prepare = prepare
        self._now = now
        self._lock = threading.Lock()  # one thread connects, others wait for it
        self._client: Any = None
        # Each with the spec that was asked for: servers fill in what it leaves open.
        self._models: Dict[str, Tuple[ModelSpec, Model]] = {}
        self._dropped: "weakref.WeakSet[Any]" = weakref.WeakSet()
        self._failures = 0
        self._until = 0.0
        self.last_probe: Optional[Probe] = None
        self.probed_at = -FRESH_S

    @property
    def client(self) -> Any:
        """The connection, made if there is none."""
        with self._lock:
            if self._client is None:
                self._client = self._connect()
                self._models = {}
            return self._client

    @property
    def connected(self) -> Any:
        """The connection, or None: nothing is waited for."""
        return self._client

    @property
    def well(self) -> bool:
        """False for a while after a failure."""
        return self._now() >= self._until

    def model(self, spec: ModelSpec, lease_ms: int, extras: Mapping[str, Any]) -> Model:
        """The model as this server has it, registered and prepared if it was not."""
        client = self.client
        asked, known = self._models.get(spec.model_id, (None, None))
        if known is not None and known.service is client and spec in (asked, known.spec):
            return known
        model: Model = client.register_model(spec, lease_ms=lease_ms, **extras)
        self._prepare(model)
        self._models[spec.model_id] = spec, model
        return model

    def renew(self, spec: ModelSpec, lease_ms: int, extras: Mapping[str, Any],
              newest: Tuple[int, Mapping[str, Any]]) -> Model:
        """Registers a model again, which renews its lease, with what the call has set. A server
        that had unregistered it gets the `newest` lease and extras, and all that was uploaded."""
        client = self.client
        _, known = self._models.get(spec.model_id, (None, None))
        if known is not None and known.service is client and (
                known.instance or _has_model(client, spec.model_id)):
            try:
                model: Model = client.register_model(spec, lease_ms=lease_ms, **extras)
            except (errors.Unavailable, errors.DeadlineExceeded) as error:
                if not error.detail.reason:  # no answer: it may have made it again, empty
                    self.forget_model(spec.model_id)
                raise
            if model.instance == known.instance:
                self._models[spec.model_id] = spec, model
                return model
        self.forget_model(spec.model_id)
        return self.model(spec, *newest)

    def open_sequence(self, terms: Tuple[ModelSpec, int, Mapping[str, Any]], request_id: str,
                      lease_ms: int, prefix: Optional[Prefix]) -> Sequence:
        """Opens a sequence of the model that `model(*terms)` returns."""
        sequence = self.model(*terms).open_sequence(request_id=request_id, lease_ms=lease_ms,
                                                    prefix=prefix)
        # A repeat of the registration may have found meanwhile that the server has made the model
        # again: the sequence is of that model, which is to have its uploads.
        self.model(*terms)
        return sequence

    def reach(self, act: Callable[["Owner"], _Result], model_id: str = "") -> _Result:
        """Calls `act` with this. Calls it again if another process answers than before, or the
        server has unregistered the model, which is then registered again."""
        again = True
        while True:
            try:
                result = act(self)
            except errors.NotFound as error:
                if error.detail.reason == "model_not_found" and model_id:
                    self.forget_model(model_id)
                elif not isinstance(error, (errors.ServerRestarted, errors.AnotherServer)):
                    raise
                if not again:
                    raise  # the caller says that it failed
                self.failed(error)
                again = False
            else:
                if not again:
                    self.reached()
                return result

    def has_model(self, model_id: str) -> bool:
        """Returns true if the model was registered here by this client."""
        return model_id in self._models

    def failed(self, error: errors.MlaError) -> None:
        """A call has failed. The connection ends if the error says that another process answers."""
        gone = isinstance(error, (errors.ServerRestarted, errors.AnotherServer))
        if gone or isinstance(error, (errors.Unavailable, errors.DeadlineExceeded)):
            self._until = self._now() + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** self._failures)
            self._failures = min(self._failures + 1, 16)
            self.last_probe = None
        if gone:
            self.drop()

    def answered(self, probe: Probe) -> None:
        """A probe has been answered."""
        self.last_probe, self.probed_at = probe, self._now()
        self.reached()

    def reached(self) -> None:
        """The server answers. After the next failure the pauses begin with the first one again."""
        self._failures, self._until = 0, 0.0

    def had(self, client: Any) -> bool:
        """Returns true for a connection to this server that was given up."""
        with self._lock:
            return client in self._dropped

    def forget_model(self, model_id: str) -> None:
        """It was unregistered."""
        self._models.pop(model_id, None)

    def drop(self, waits: bool = False) -> None:
        """Ends the connection; a later use makes another. Calls that wait for the server end at
        once, unless `waits`: then the server is told first."""
        with self._lock:
            client, self._client, self._models = self._client, None, {}
            if client is not None:
                self._dropped.add(client)
        if client is not None:
            try:
                if waits:
                    client.close()
                else:
                    client.give_up()
            except (errors.MlaError, ValueError):
                pass  # it was broken


class Marks:
    """Which server had a conversation last, by what its rows stand for. Bounded; thread-safe."""

    def __init__(self, most: int = MOST_MARKS) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._owners: "collections.OrderedDict[bytes, str]" = collections.OrderedDict()

    def remember(self, model_id: str, prefix: Prefix, address: str) -> None:
        """Rows that begin so are there now."""
        with self._lock:
            for mark in marks_of(model_id, prefix):
                self._owners[mark] = address
                self._owners.move_to_end(mark)
            while len(self._owners) > self._most:
                self._owners.popitem(last=False)

    def recall(self, model_id: str, prefix: Prefix) -> str:
        """The server that had the longest beginning; "": none is known."""
        marks = marks_of(model_id, prefix)
        with self._lock:
            return next((self._owners[mark] for mark in reversed(marks)
                         if mark in self._owners), "")


def marks_of(model_id: str, prefix: Prefix) -> List[bytes]:
    """Digests of the first MARK_ROWS rows, of twice as many, and so on; of a shorter prefix one of
    all. Where pages are named, of every MARK_ROWS / 64 names."""
    hasher = hashlib.blake2b(digest_size=16)
    for text in (model_id.encode(), prefix.salt.encode()):
        hasher.update(struct.pack("<I", len(text)) + text)
    if len(prefix.page_keys) > 0:
        parts: Seq[bytes] = prefix.page_keys
        step = MARK_ROWS // 64
    else:
        tokens = np.asarray(prefix.token_ids, dtype="<u4")
        parts, step = [tokens[at:at + MARK_ROWS].tobytes()
                       for at in range(0, len(tokens), MARK_ROWS)], 1
    if not parts:
        return []
    marks: List[bytes] = []
    for index, part in enumerate(parts):
        if index == len(parts) - 1 and len(prefix.page_keys) == 0 \
                and len(prefix.token_ids) % MARK_ROWS and marks:
            break  # what is left over is another one with the next turn
        hasher.update(bytes(part))
        if (index + 1) % step == 0:
            marks.append(hasher.copy().digest())
    return marks or [hasher.digest()]


class Owners:
    """All of them. Thread-safe."""

    def __init__(self, connect: Callable[[Member], Any], prepare: Callable[[Model], None], *,
                 now: Callable[[], float] = time.monotonic, threads: int = 8) -> None:
        """`connect` makes a client of a member. While a probe waits, `threads` threads connect to
        servers that have no connection yet. If `threads` is 0, the caller's thread connects."""
        self._connect = connect
        self._prepare = prepare
        self._now = now
        self._lock = threading.Lock()
        self._owners: Dict[str, Owner] = {}
        self._members: Dict[str, Member] = {}
        self._pool = concurrent.futures.ThreadPoolExecutor(
            threads, thread_name_prefix="mla-owners") if threads > 0 else None

    def know(self, members: Seq[Member]) -> None:
        """How members are connected to from now on."""
        with self._lock:
            for member in members:
                self._members[member.address] = member

    def at(self, address: str) -> Owner:
        """The server of an address, a member or not."""
        with self._lock:
            owner = self._owners.get(address)
            if owner is None:
                owner = Owner(address, lambda: self._connect(self._member(address)), self._prepare,
                              self._now)
                self._owners[address] = owner
            return owner

    def of(self, sequence: Sequence) -> Optional[Owner]:
        """The server that a sequence was on last."""
        return self.of_client(sequence.model.service)

    def of_client(self, client: Any) -> Optional[Owner]:
        """The server of a connection; None if that was given up."""
        return next((one for one in self.all() if one.connected is client), None)

    def before(self, sequence: Sequence) -> Optional[Owner]:
        """The server of a sequence whose connection was given up."""
        return next((one for one in self.all() if one.had(sequence.model.service)), None)

    def all(self) -> List[Owner]:
        """Returns the owners that were used."""
        with self._lock:
            return list(self._owners.values())

    def each(self, act: Callable[[Any], _Result]) -> Tuple[List[_Result],
                                                           Optional[errors.MlaError]]:
        """Calls `act` with the client of each connected server, at the same time unless this has no
        threads. Returns the results, and the first error: a server that is away stops no other."""
        results: List[_Result] = []
        failed: List[errors.MlaError] = []
        faults: List[Exception] = []

        def attempt(client: Any) -> None:
            try:
                results.append(act(client))
            except errors.MlaError as error:
                failed.append(error)
            except Exception as error:  # the caller gets it, in whichever thread it was raised
                faults.append(error)
        clients = [one for one in (owner.connected for owner in self.all()) if one is not None]
        if self._pool is None:
            list(map(attempt, clients))
        else:
            _at_once(attempt, clients)
        if faults:
            raise faults[0]
        return results, failed[0] if failed else None

    def probe(self, addresses: Seq[str], model_id: str, prefix: Prefix,
              timeout_s: float = PROBE_S) -> Dict[str, Optional[Probe]]:
        """Asks all of them at the same time. None for one that did not answer in time."""
        waiting: Dict[str, Callable[[], Probe]] = {}
        connecting: Dict[str, Any] = {}
        for address in addresses:
            owner = self.at(address)
            future = self._connecting(owner) if owner.connected is None else None
            if future is not None:
                connecting[address] = future
            else:
                self._begin(owner, model_id, prefix, timeout_s, waiting)
        if connecting:
            concurrent.futures.wait(connecting.values(), CONNECT_S)
        for address, made in connecting.items():
            if made.done():
                self._begin(self.at(address), model_id, prefix, timeout_s, waiting)
        answers: Dict[str, Optional[Probe]] = {address: None for address in addresses}
        for address, wait in waiting.items():
            owner = self.at(address)
            try:
                answers[address] = wait()
                owner.answered(answers[address] or Probe())
            except errors.MlaError as error:
                answers[address] = _without_probe(error)
                owner.failed(error)
        return answers

    def fills(self, members: Seq[Member]) -> Dict[str, float]:
        """How full members are, as far as it is known: by their latest probe, else by what they
        have announced."""
        known: Dict[str, float] = {}
        for member in members:
            owner = self._owners.get(member.address)
            probe = owner.last_probe if owner is not None else None
            if owner is not None and probe is not None and self._now() - owner.probed_at < FRESH_S:
                known[member.address] = probe.fill
            elif member.bytes_total > 0:
                known[member.address] = fill_of(member.bytes_free - member.bytes_cached,
                                                member.bytes_total)
        return known

    def close(self) -> None:
        """Ends all connections."""
        for owner in self.all():
            owner.drop(waits=True)
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    def _member(self, address: str) -> Member:
        with self._lock:
            return self._members.get(address) or Member.checked({"address": address})

    def _connecting(self, owner: Owner) -> Optional["concurrent.futures.Future[Any]"]:
        """Connects in another thread; None where there is none."""
        try:
            return self._pool.submit(lambda: owner.client) if self._pool is not None else None
        except RuntimeError:  # the process has no more threads, or the interpreter ends
            return None

    def _begin(self, owner: Owner, model_id: str, prefix: Prefix, timeout_s: float,
               waiting: Dict[str, Callable[[], Probe]]) -> None:
        try:
            waiting[owner.address] = owner.client._probe(model_id, prefix, timeout_s)
        except errors.MlaError as error:
            owner.failed(error)


def _at_once(act: Callable[[Any], None], clients: Seq[Any]) -> None:
    """Calls `act`, which raises nothing, with all of them. Uses threads of its own: those of a pool
    may be busy with servers that do not answer, and a forked child does not have them."""
    began: List[threading.Thread] = []
    for client in clients[1:]:
        thread = threading.Thread(target=act, args=(client,), name="mla-owners", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the process has no more threads, or the interpreter ends
            act(client)
        else:
            began.append(thread)
    if clients:
        act(clients[0])
    for thread in began:
        thread.join()


def _has_model(client: Any, model_id: str) -> bool:
    """Asks an older release, which does not tell a model that it has just made, and is empty, from
    one that was there. A lease that ends before the registration goes unnoticed."""
    try:
        client._probe(model_id, Prefix(), client.timeout_s)()
    except errors.NotFound as error:
        if error.detail.reason == "model_not_found":
            return False
        raise
    except errors.Unimplemented:
        pass  # an older release, which cannot be asked
    return True


def _without_probe(error: errors.MlaError) -> Optional[Probe]:
    """Returns the answer to assume for a healthy server that cannot be probed, because its release
    is older or it does not have the model yet. None: the server is not healthy."""
    if isinstance(error, (errors.Unimplemented, errors.NotFound)) and not isinstance(
            error, (errors.ServerRestarted, errors.AnotherServer)):
        return Probe(bytes_free=2**62, bytes_total=2**62)
    return None
