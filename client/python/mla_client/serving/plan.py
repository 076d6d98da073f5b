"""Plans of passes, which an engine's scheduler sends to its workers: plain values that can travel
between processes. And a worker's passes under way."""

from __future__ import annotations

import dataclasses
import enum
from typing import Dict, List, NamedTuple, Optional, Tuple

from mla_client import errors
from mla_client.service import Step
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
