"""Cached rows as the blocks of tokens that routers of requests know.

A router such as llm-d or Dynamo sends a request to the engine that has most of its prompt. It
learns that from an engine's events: blocks of tokens were stored, or removed. The server knows
pages by keys that say nothing of tokens; the engine knows the tokens of its requests. BlockEvents
joins both:

    events = BlockEvents("model", 64)
    events.admitted(client, "request", 77, tokens, found=128, end="absent")
    events.ended("request", all_tokens)
    for event in events.take(): ...            # Stored, Removed or Cleared, in order

A block is a page of the server. Its hash stands for its tokens and all before them, and is the same
in every engine.
"""

from __future__ import annotations

import collections
import hashlib
import logging
import threading
from typing import Any, Deque, Dict, List, NamedTuple, Optional, Sequence as Seq, Tuple, Union

import numpy as np

from mla_client import errors
from mla_client.pages.events import CacheEvent, EventKind

LOG = logging.getLogger("mla_client")
# Blocks that are published; the oldest are withdrawn for more.
MOST_BLOCKS = 1 << 20
# Requests whose tokens are kept after their end, until the server has told of their pages.
MOST_ENDED = 1024
# Events that wait for `take`. With more of them the watch ends, and all blocks are withdrawn.
MOST_HEARD = 1 << 16
# The server's first word on a watch, without which nothing of it is known.
FIRST_S = 1.0
HASH_BYTES = 8
# Ends of a match after which the rows that follow are not there.
ENDS = ("absent", "diverged", "evicted")


class Stored(NamedTuple):
    """Blocks that follow each other, whose rows can be found from now on."""

    hashes: Tuple[int, ...]
    parent: Optional[int]  # hash of the block before the first one; None: there is none
    tokens: Tuple[int, ...]
    block_size: int


class Removed(NamedTuple):
    """Blocks whose rows cannot be found any more."""

    hashes: Tuple[int, ...]


class Cleared(NamedTuple):
    """None of the blocks so far counts any more."""


BlockEvent = Union[Stored, Removed, Cleared]


class _Request:
    """A request's tokens, and the digests of its whole blocks as far as they were needed."""

    def __init__(self, sequence_id: int, tokens: Seq[int], block_size: int) -> None:
        self.sequence_id = sequence_id
        self.block_size = block_size
        self.tokens = np.asarray(list(tokens), dtype="<u4")
        self._digests: List[bytes] = []

    def grow(self, tokens: Seq[int]) -> None:
        """All tokens that it has now; the first ones stay as they were."""
        self.tokens = np.asarray(list(tokens), dtype="<u4")

    @property
    def blocks(self) -> int:
        """Whole blocks."""
        return len(self.tokens) // self.block_size

    def block(self, place: int) -> Tuple[int, ...]:
        """Tokens of a block."""
        begin = place * self.block_size
        return tuple(int(token) for token in self.tokens[begin:begin + self.block_size])

    def hash(self, place: int) -> int:
        """Stands for the tokens up to the end of a block."""
        while len(self._digests) <= place:
            begin = len(self._digests) * self.block_size
            last = self._digests[-1] if self._digests else b""
            self._digests.append(hashlib.blake2b(
                last + self.tokens[begin:begin + self.block_size].tobytes(),
                digest_size=16).digest())
        return int.from_bytes(self._digests[place][:HASH_BYTES], "big")


class _Watch:
    """What one server tells, in a thread of its own."""

    def __init__(self, client: Any, heard: "Deque[Tuple[_Watch, Optional[CacheEvent]]]") -> None:
        """`client`: of one server. Appends its events to `heard`, and None at the end. MlaError if
        the server tells nothing."""
        self.client = client
        self.last = 0  # number of the last event; 0: none has come yet
        self._heard = heard
        self._events = client.watch_events()
        self._begun = threading.Event()
        threading.Thread(target=self._run, name="mla-blocks", daemon=True).start()
        self._begun.wait(FIRST_S)

    def close(self) -> None:
        """Ends it."""
        self._events.close()

    def _run(self) -> None:
        try:
            for events in self._events:
                self._begun.set()
                if len(self._heard) + len(events) > MOST_HEARD:
                    break  # no thread takes them
                self._heard.extend([(self, event) for event in events])
        except errors.MlaError as error:
            LOG.info("mla: the events of a server have ended: %s", error)
        self._begun.set()
        self._heard.append((self, None))


class BlockEvents:
    """Belongs to one thread at a time."""

    def __init__(self, model_id: str, block_size: int) -> None:
        """`block_size`: rows of a page of the model."""
        self.model_id = model_id
        self.block_size = block_size
        self._heard: Deque[Tuple[_Watch, Optional[CacheEvent]]] = collections.deque()
        self._watches: Dict[int, Optional[_Watch]] = {}  # by client; None: it tells nothing
        self._clients: Dict[int, Any] = {}  # which are kept, so that ids stay theirs
        self._requests: Dict[str, _Request] = {}  # under way
        self._sequences: "collections.OrderedDict[int, _Request]" = collections.OrderedDict()
        self._ended: Deque[int] = collections.deque()
        # Hashes of published blocks, the oldest first, with the server's key if it is known.
        self._there: "collections.OrderedDict[int, Any]" = collections.OrderedDict()
        self._hashes: Dict[Tuple[int, bytes], int] = {}  # by client and key
        # An engine of this name and address may have published blocks before: they are gone.
        self._out: List[BlockEvent] = [Cleared()]

    def admitted(self, client: Any, request: str, sequence_id: int, tokens: Seq[int],
                 found: int, end: str) -> None:
        """A request's sequence was opened with a prefix of `tokens`, of which `found` rows were
        there; `end` as PrefixMatch.end. `client`: that of a server, or of a cluster."""
        self._listen(client)
        self.ended(request, None)
        entry = _Request(sequence_id, tokens, self.block_size)
        self._requests[request] = entry
        self._sequences[sequence_id] = entry
        blocks = found // self.block_size
        if end in ENDS:
            # A prompt's last row is always computed, so nothing was asked of its block.
            self._gone([entry.hash(place) for place
                        in range(blocks, (len(tokens) - 1) // self.block_size)])
        self._stored(entry, blocks)

    def ended(self, request: str, tokens: Optional[Seq[int]]) -> None:
        """A request has ended with these tokens, which the server will be told; None: without."""
        known = self._requests.pop(request, None)
        if known is None:
            return
        if tokens is not None:
            known.grow(tokens)
        self._ended.append(known.sequence_id)
        while len(self._ended) > MOST_ENDED:
            self._sequences.pop(self._ended.popleft(), None)

    def take(self) -> List[BlockEvent]:
        """What has happened since it was called last, in this order."""
        while self._heard:
            watch, event = self._heard.popleft()
            if self._watches.get(id(watch.client)) is not watch:
                continue  # it was closed
            if event is None:
                self._forget(watch)
            else:
                self._happened(watch, event)
        out, self._out = self._out, []
        return out

    def close(self) -> None:
        """Ends the watches; another request begins them again."""
        for watch in self._watches.values():
            if watch is not None:
                watch.close()
        self._watches.clear()
        self._clients.clear()

    def _listen(self, client: Any) -> None:
        """Watches the server, or all servers of a cluster that are connected."""
        owners = getattr(client, "owners", None)
        for one in [client] if owners is None else [owner.connected for owner in owners.all()]:
            if one is None or id(one) in self._watches:
                continue
            self._clients[id(one)] = one
            self._watches[id(one)] = None
            try:
                self._watches[id(one)] = _Watch(one, self._heard)
            except errors.MlaError as error:
                LOG.warning("mla: no events of cached rows for routers: %s", error)

    def _forget(self, watch: _Watch) -> None:
        """A server has gone, or its events have: its blocks are not known apart from others'."""
        watch.close()
        del self._watches[id(watch.client)]
        del self._clients[id(watch.client)]
        self._clear()

    def _happened(self, watch: _Watch, event: CacheEvent) -> None:
        if watch.last and event.number != watch.last + 1:
            LOG.warning("mla: events %d to %d of the server were missed", watch.last + 1,
                        event.number - 1)
            self._clear()
        watch.last = event.number
        if event.kind == EventKind.DROPPED:
            self._clear()
        elif event.kind in (EventKind.EVICTED, EventKind.DAMAGED) and event.key:
            found = self._hashes.pop((id(watch.client), event.key), None)
            if found is not None:
                self._gone([found])
        elif event.kind == EventKind.STORED and event.key and event.model_id == self.model_id:
            request = self._sequences.get(event.sequence_id)
            place = event.first_row // self.block_size
            if request is None or place >= request.blocks or event.rows != self.block_size:
                return
            self._stored(request, place + 1)
            self._hashes[id(watch.client), event.key] = request.hash(place)
            self._there[request.hash(place)] = (id(watch.client), event.key)

    def _stored(self, request: _Request, blocks: int) -> None:
        """The first blocks of a request are there."""
        for place in range(blocks):
            name = request.hash(place)
            if name in self._there:
                continue
            self._there[name] = None
            parent = request.hash(place - 1) if place > 0 else None
            last = self._out[-1] if self._out else None
            if isinstance(last, Stored) and last.hashes[-1] == parent:
                self._out[-1] = last._replace(hashes=(*last.hashes, name),
                                              tokens=(*last.tokens, *request.block(place)))
            else:
                self._out.append(Stored((name,), parent, request.block(place), self.block_size))
        while len(self._there) > MOST_BLOCKS:
            self._gone([next(iter(self._there))])

    def _gone(self, names: Seq[int]) -> None:
        """Blocks are not there, as far as they were published."""
        gone = [name for name in names if name in self._there]
        for name in gone:
            self._hashes.pop(self._there.pop(name) or (0, b""), None)
        last = self._out[-1] if self._out else None
        if isinstance(last, Removed) and gone:
            self._out[-1] = Removed((*last.hashes, *gone))
        elif gone:
            self._out.append(Removed(tuple(gone)))

    def _clear(self) -> None:
        """Nothing is known of any block."""
        self._there.clear()
        self._hashes.clear()
        if not self._out or self._out[-1] != Cleared():
            self._out = [Cleared()]
