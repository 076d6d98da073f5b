"""Plans of passes, which an engine's scheduler sends to its workers: plain values that can travel
between processes. And a worker's passes under way."""

from __future__ import annotations

import dataclasses
import enum
from typing import (Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence as Seq,
                    Tuple)

from mla_client import errors
from mla_client.service import Model, Step
from mla_client.serving.states import Event, Request, State, move_all
from mla_client.types import Prefix


class Scheduled(NamedTuple):
    """A request in a pass."""

    request: str
    computed: int  # tokens before this pass that are right
    new: int       # tokens in it
    # Id of a sequence that was opened and handed over for it, which takes the place of its own.
    sequence: Optional[int] = None
    turn: int = 0  # how often it has begun again from nothing


@dataclasses.dataclass(frozen=True)
class PassPlan:
    """A pass, and the requests that have ended or lost their pages."""

    number: int = 0  # of the pass, equal on all ranks; never used twice by one engine
    scheduled: Tuple[Scheduled, ...] = ()
    gone: Tuple[str, ...] = ()
    said: Dict[str, Prefix] = dataclasses.field(default_factory=dict)  # of rows of those gone


class How(enum.Enum):
    """The way in which a request's rows are computed at a layer."""

    SENT = "sent"    # the server computes them
    LOCAL = "local"  # the server has nothing of the request, and all its rows are in this pass
    VOID = "void"    # rows before this pass are missing: the outputs are invalid


@dataclasses.dataclass
class Part:
    """The rows [begin, end) of a pass, which are one request's."""

    request: str
    begin: int
    end: int
    computed: int
    how: How = How.SENT


@dataclasses.dataclass
class Pass:
    """A pass under way."""

    number: int
    parts: List[Part]
    step: Optional[Step] = None  # None: nothing is sent
    layers: int = 0              # that are done
    leads: bool = True           # this process began the step, and ends it
    may_chain: bool = True
    chained: bool = False        # whether its outputs are good is known at its end alone
    given_up: bool = False       # parts of it are not sent

    @property
    def whole(self) -> bool:
        """True if the step has all rows of the pass."""
        return self.step is not None and not self.given_up

    def sent(self) -> List[Part]:
        """The parts that the step has, in its order."""
        return [part for part in self.parts if part.how == How.SENT]


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The place of a process among the processes that share the heads of a layer."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise errors.InvalidArgument(f"ranks: got rank {self.rank} of {self.size}")

    @property
    def sends_rows(self) -> bool:
        """True for the one rank that brings the KV rows for all."""
        return self.rank == 0

    def heads(self, total: int) -> Tuple[int, int]:
        """The first head of this rank, and how many it has of `total`."""
        if total % self.size:
            raise errors.InvalidArgument(f"{total} heads cannot be shared by {self.size} ranks")
        count = total // self.size
        return self.rank * count, count


class Repeated:
    """A pass that has ended well, and may be followed by one with as many rows again of the same
    requests in the same order: most passes of an engine that decodes. All that such a pass needs is
    kept, because the rest of a pass costs time for each request. Belongs to one thread at a time.
    """

    def __init__(self, model_pass: Pass, step: Step, requests: List[Request], model: Model) -> None:
        """`model_pass` has `step`, with all rows of these requests."""
        self.made = model_pass
        self.step = step
        self.model = model
        self.rows = [part.end - part.begin for part in model_pass.parts]
        self._requests = requests
        # Columns of the pass that may follow, as zip makes them of `Scheduled`s.
        self._names = tuple(part.request for part in model_pass.parts)
        self._rows = tuple(self.rows)
        self._sequences = (None,) * len(requests)
        self._turns = tuple(request.turn for request in requests)
        self._lengths = tuple(request.length for request in requests)
        for part, length in zip(model_pass.parts, self._lengths):
            part.computed = length  # or more, in later passes

    @classmethod
    def of(cls, model_pass: Pass, kept: List[int], requests: Mapping[str, Request]
           ) -> Optional["Repeated"]:
        """A pass that has ended well with `kept` rows; None: none like it may follow."""
        repeatable = model_pass.chained and model_pass.may_chain and model_pass.whole
        if not repeatable or model_pass.step is None:
            return None
        own = [requests[part.request] for part in model_pass.parts]
        sequence = own[0].sequence
        if sequence is None or kept != [part.end - part.begin for part in model_pass.parts]:
            return None
        return cls(model_pass, model_pass.step, own, sequence.model)

    def followed_by(self, scheduled: Seq[Scheduled]) -> bool:
        """Returns true if these are such a pass."""
        return [*zip(*scheduled)] == [self._names, self._lengths, self._rows, self._sequences,
                                      self._turns]

    def begin(self, take: Callable[[Model, Iterable[int], Iterable[int]], bool]) -> bool:
        """Begins such a pass, as the Pass and the Step of before; `take`: Room.take. Returns False
        if that cannot be; then nothing was sent."""
        for request in self._requests:
            if request.state is not State.READY:
                return False
        if not take(self.model, self._lengths, self._rows) or not self.step.go_on():
            return False
        self.made.layers = 0
        move_all(self._requests, Event.BEGIN)
        return True

    def ends(self, under_way: List[Pass], layers: int) -> bool:
        """Returns true if this pass is the only one under way, and has done all of its layers."""
        model_pass = self.made
        return (len(under_way) == 1 and under_way[0] is model_pass and model_pass.chained
                and model_pass.layers == layers and model_pass.whole)

    def note_ended(self) -> None:
        """Such a pass has ended well, with all of its rows."""
        move_all(self._requests, Event.COMMIT)
        self._lengths = tuple([request.length for request in self._requests])
