"""Events of cached rows, and the reasons why matches have missed."""

from __future__ import annotations

import contextlib
import enum
from typing import Any, Callable, Iterator, List, NamedTuple, Optional, Tuple

import grpc

from mla_client import errors, messages
from mla_client.base import process
from mla_client.connection.channels import Channels
from mla_client.gen import cache_pb2, cache_pb2_grpc

class EventKind(enum.IntEnum):
    """The kinds of events. Newer servers may send kinds that are not named here."""

    STORED = 1    # rows of a page can be found from now on
    EVICTED = 2   # dropped because their room was needed
    DROPPED = 3   # dropped with all rows of the model: it has gone, or its scales changed
    EXPIRED = 4   # a sequence's lease ran out
    RESTORED = 5  # a sequence was opened from its checkpoint, or a page is in the pool again
    DEMOTED = 6   # a page has left the pool, and can still be found
    DAMAGED = 7   # a copy of a page had changed, and was dropped
    PREEMPTED = 8  # a sequence was taken from its client: evicted by an operator, or handed over


class CacheEvent(NamedTuple):
    """One event. A number that does not follow the one before means that events are missing."""

    number: int
    kind: int         # an EventKind, if it is known
    model_id: str
    sequence_id: int  # 0: not about a sequence
    first_row: int
    rows: int
    key: bytes        # for a whole page, else empty
    parent: bytes
    unix_ms: int
    tenant: str = ""  # with all_tenants


class CacheMiss(NamedTuple):
    """A match that has not found all rows that it asked for."""

    model_id: str
    sequence_id: int
    first_row: int
    rows_asked: int
    rows_found: int
    end: str  # absent, diverged, evicted or deferred, as PrefixMatch.end
    unix_ms: int
    tenant: str = ""  # with all_tenants


class EventWatch(Iterator[List[CacheEvent]]):
    """Lists of events as they happen. `close`, from any thread, ends it: StopIteration then.
    Belongs to the process that made it."""

    def __init__(self, call: Any, boot_id: int, held: contextlib.ExitStack) -> None:
        """`held` is closed with it."""
        self._call = call
        self._boot_id = boot_id
        self._held = held
        self._home = process.Home()
        self._closed = False
        process.leave_at_fork(self)

    def __next__(self) -> List[CacheEvent]:
        self._home.check()
        if self._closed:
            raise StopIteration
        try:
            reply = next(self._call)
        except StopIteration:
            self.close()
            raise
        except grpc.RpcError as rpc_error:
            if self._closed:
                raise StopIteration from None
            self.close()
            raise errors.from_rpc(rpc_error) from rpc_error
        if reply.boot_id != self._boot_id:
            self.close()
            raise errors.ServerRestarted("the server restarted: its events begin again")
        return [CacheEvent(event.number, event.kind, event.model_id, event.sequence_id,
                           event.first_row, event.rows, event.key, event.parent, event.unix_ms,
                           event.tenant) for event in reply.events]

    def close(self) -> None:
        """Ends the watch; repeating it does nothing."""
        if self._home.left or self._closed:
            return
        self._closed = True
        self._call.cancel()
        self._held.close()

    def leave(self) -> None:
        """In a child that was forked: the call is the parent's."""
        process.keep(self._call)


class Events:
    """The calls for events, mixed into Client."""

    boot_id: int
    _cache: Any
    _channels: Channels
    _metadata: Tuple[Tuple[str, str], ...]
    _call: Callable[..., Any]
    _home: process.Home

    def watch_events(self, after: Optional[int] = None, *,
                     all_tenants: bool = False) -> EventWatch:
        """Yields lists of the tenant's events after number `after`, as they happen; the first ones
        are events that the server still knows. None: from now on. The first list comes at once, and
        may be empty. Close the iterator to end the watch. ServerRestarted when another server
        answers. Operators may see events of all tenants, each with its own numbers; `after` is 0 or
        None then.
        """
        self._home.check()
        request = cache_pb2.WatchEventsRequest(all_tenants=all_tenants)
        if after is not None:
            request.after = after
        held = contextlib.ExitStack()
        stub = cache_pb2_grpc.CacheStub(held.enter_context(self._channels.stream()))
        return EventWatch(stub.WatchEvents(request, metadata=self._metadata), self.boot_id, held)

    def explain(self, most: int = 0, *, all_tenants: bool = False) -> List[CacheMiss]:
        """Returns the tenant's latest matches that have missed, the latest first; operators may see
        those of all tenants. `most`: 0 means 100.
        """
        reply = self._call(self._cache.Explain, cache_pb2.ExplainRequest(
            most=most, all_tenants=all_tenants))
        return [CacheMiss(miss.model_id, miss.sequence_id, miss.first_row, miss.rows_asked,
                          miss.rows_found, messages.name_of(miss.end, messages.MATCH_ENDS),
                          miss.unix_ms, miss.tenant) for miss in reply.misses]
