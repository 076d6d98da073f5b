"""Hints for cached rows, each answered with what became of it.

    client.hint(HintKind.PIN, sequence, ttl_ms=60_000)         # while a tool runs
    client.hint(HintKind.PREFETCH, (model, Prefix(tokens)))    # before its worker asks
"""

from __future__ import annotations

import enum
from typing import Any, Callable, NamedTuple, Tuple, Union

from mla_client.gen import cache_pb2
from mla_client.messages import prefix_to_proto
from mla_client.service import Model, Sequence
from mla_client.types import Prefix


class HintKind(enum.IntEnum):
    """The kinds of hints."""

    PIN = 1       # stays in the pool for ttl_ms; 0 ends the pin
    RETAIN = 2    # goes later than others: `priority` times it is passed over
    PREFETCH = 3  # comes back from slower tiers
    DEMOTE = 4    # makes room: goes to a slower tier


class HintOutcome(enum.IntEnum):
    """The result of a hint. Newer servers may send outcomes that are not named here."""

    ACCEPTED = 1  # for all rows
    CLIPPED = 2   # done for some of the rows
    DEFERRED = 3  # some are on their way: see `rows_deferred`
    REFUSED = 4   # for none


class HintAnswer(NamedTuple):
    """The server's answer to a hint."""

    outcome: int        # a HintOutcome, if it is known
    rows: int           # rows that the hint named
    rows_done: int
    rows_deferred: int  # on their way between tiers
    # The reason if fewer rows were done than named: "absent" (not cached), "pins_exhausted",
    # "in_use", "no_room", "no_tiers"; or empty.
    reason: str


class Hints:
    """The call for hints, mixed into Client."""

    _cache: Any
    _call: Callable[..., Any]

    def hint(self, kind: int, target: Union[Sequence, Tuple[Model, Prefix]], *, ttl_ms: int = 0,
             priority: int = 0) -> HintAnswer:
        """Gives a hint about the cached rows of a sequence, as far as they were declared, or of a
        prefix. `ttl_ms` is for PIN; `priority` is for RETAIN, 0 to 3. Never waits for rows to move.
        """
        request = cache_pb2.HintRequest(kind=kind, ttl_ms=ttl_ms, priority=priority)
        if isinstance(target, Sequence):
            request.sequence_id, request.expected_epoch = target.id, target.epoch
        else:
            request.model_id = target[0].spec.model_id
            request.prefix.CopyFrom(prefix_to_proto(target[1]))
        reply = self._call(self._cache.Hint, request)
        return HintAnswer(reply.outcome, reply.rows, reply.rows_done, reply.rows_deferred,
                          reply.reason)
