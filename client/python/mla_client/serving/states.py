"""The states of a request on its way through an engine, and the moves between them.

    NEW ------open------> READY <--commit/abort-- STEPPING
     |                      |  ------begin------>    |
     |                      +---------lose-----------+
     +-----lose-----> LOST <+
                      |  ^ |
                      |  | +--compute--> LOCAL --open (from nothing)--> READY
                      |  +----miss-------+
                      +--tell--> AGAIN ---------open (from nothing)--> READY
                                   +----leave--> OUT
    any ---release---> ENDED

A move that is not in the table is a bug of an adapter or of an engine, and is refused by name."""

from __future__ import annotations

import dataclasses
import enum
from typing import Dict, Iterable, Optional, Tuple

from mla_client import errors
from mla_client.service import Sequence
from mla_client.serving.faults import FAILURES
from mla_client.types import Prefix


class _Member(enum.Enum):
    """Members are found by themselves. Hashing an enum's member by its name, as enums do, would
    call a function of Python's twice for each move."""

    __hash__ = object.__hash__


class State(_Member):
    """Where a request stands."""

    NEW = "new"            # the server has nothing of it
    READY = "ready"        # it has a sequence, whose committed rows count
    STEPPING = "stepping"  # its sequence is in an open step
    LOST = "lost"          # rows that the engine counts are missing, and it does not know it yet
    LOCAL = "local"        # its first rows were computed by the worker, and are not missed yet
    AGAIN = "again"        # it must begin from nothing: the engine knows, but has it in passes
    OUT = "out"            # it is in no pass to come: the engine puts it back, or fails it
    ENDED = "ended"        # released


class Event(_Member):
    """An event in the life of a request."""

    OPEN = "open"
    BEGIN = "begin"
    COMMIT = "commit"
    ABORT = "abort"
    LOSE = "lose"
    COMPUTE = "compute"
    MISS = "miss"
    TELL = "tell"
    LEAVE = "leave"
    RELEASE = "release"


MOVES: Dict[Tuple[State, Event], State] = {
    (State.NEW, Event.OPEN): State.READY,
    (State.NEW, Event.LOSE): State.LOST,
    (State.READY, Event.OPEN): State.READY,  # a fresh sequence takes the place of the old one
    (State.READY, Event.BEGIN): State.STEPPING,
    (State.READY, Event.LOSE): State.LOST,
    (State.STEPPING, Event.COMMIT): State.READY,
    (State.STEPPING, Event.ABORT): State.READY,
    (State.STEPPING, Event.LOSE): State.LOST,
    (State.LOST, Event.OPEN): State.READY,
    (State.LOST, Event.COMPUTE): State.LOCAL,
    (State.LOST, Event.TELL): State.AGAIN,
    (State.LOCAL, Event.OPEN): State.READY,
    (State.LOCAL, Event.COMPUTE): State.LOCAL,
    (State.LOCAL, Event.MISS): State.LOST,
    (State.AGAIN, Event.OPEN): State.READY,
    (State.AGAIN, Event.COMPUTE): State.LOCAL,
    (State.AGAIN, Event.LEAVE): State.OUT,
    **{(state, Event.RELEASE): State.ENDED for state in State if state != State.ENDED},
}
# Nothing of the request is on the server, and its sequence is gone.
WITHOUT_ROWS = frozenset({State.LOST, State.LOCAL, State.AGAIN, State.OUT})


class Request:
    """A request as a worker knows it. Belongs to one thread at a time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = State.NEW
        self.sequence: Optional[Sequence] = None
        self.turn = 0          # how often it has begun again from nothing

    def __repr__(self) -> str:
        return f"<Request {self.name!r}, {self.state.value}, turn {self.turn}>"

    @property
    def length(self) -> int:
        """Committed rows on the server."""
        return self.sequence.length if self.sequence is not None else 0

    @property
    def may_open(self) -> bool:
        """True if a pass may begin it from nothing; False once the engine has left it out."""
        return self.state != State.OUT

    def truncate(self, length: int, ranks: int) -> None:
        """Cuts rows that were not right. If there are several ranks, one of them does it and the
        others find it done."""
        assert self.sequence is not None
        if ranks == 1:
            self.sequence.truncate(length)
            return
        try:
            self.sequence.truncate(length)
        except errors.FailedPrecondition:
            self.sequence.refresh()

    def differs(self) -> bool:
        """Returns true if the sequence on the server is not as it is known here."""
        before = self.length
        try:
            assert self.sequence is not None
            return bool(self.sequence.refresh().in_step) or self.length != before
        except FAILURES:
            return True

    def say(self, prefix: Prefix) -> None:
        """Tells the server what the rows stand for, by which others find them."""
        if self.sequence is None or self.state != State.READY or not self.length:
            return
        # Only the rows that it has, because a match would add rows that follow in other sequences.
        self.sequence.match(dataclasses.replace(prefix, token_ids=prefix.token_ids[:self.length]))

    def move(self, event: Event) -> None:
        """Internal for a move that the table does not have."""
        after = MOVES.get((self.state, event))
        if after is None:
            raise errors.Internal(
                f"request {self.name}: {event.value} while it is {self.state.value}")
        self.state = after

    def open(self, sequence: Sequence, turn: int) -> Optional[Sequence]:
        """Takes a sequence for the rows to come; returns the one before, to be released."""
        self.move(Event.OPEN)
        before, self.sequence = self.sequence, sequence
        self.turn = turn
        return before

    def lose(self) -> Optional[Sequence]:
        """The rows are gone, or cannot be used; returns the sequence, to be released. Has no effect
        on a request without rows."""
        if self.state in WITHOUT_ROWS:
            return None
        self.move(Event.LOSE)
        before, self.sequence = self.sequence, None
        return before

    def miss(self) -> None:
        """A pass needs rows that are not there."""
        if self.state == State.LOCAL:
            self.move(Event.MISS)

    def tell(self) -> bool:
        """Returns true if the engine does not know yet that it must begin again; then it does."""
        if self.state is not State.LOST:
            return False
        self.move(Event.TELL)
        return True

    def recall(self) -> Optional[Sequence]:
        """It begins again because another rank has lost its rows; returns the sequence, to be
        released."""
        before = self.lose()
        self.miss()
        self.tell()
        return before

    def release(self) -> Optional[Sequence]:
        """The engine has no more use for it; returns the sequence, to be released."""
        self.move(Event.RELEASE)
        before, self.sequence = self.sequence, None
        return before


def move_all(requests: Iterable[Request], event: Event) -> None:
    """As Request.move of each."""
    for request in requests:
        request.move(event)
