"""What one process of an engine has of a server: its link, its passes, and the exchange of their
tensors; and the requests of a process that is the scheduler, too."""

from __future__ import annotations

import itertools
import weakref
from typing import (Any, Callable, Dict, Generic, Iterable, List, Optional, Protocol, Sequence as
                    Seq, Set, Tuple, TypeVar)

from mla_client import errors
from mla_client.serving.admission import Admission
from mla_client.serving.layers import Weights
from mla_client.serving.link import Link
from mla_client.serving.options import Options
from mla_client.serving.passes import Passes
from mla_client.serving.plan import Pass, PassPlan, Ranks, Scheduled
from mla_client.serving.states import State
from mla_client.types import Geometry, ModelSpec

_Value = TypeVar("_Value")
_Exchange = TypeVar("_Exchange", bound="Exchanges")
KV_BYTES = 2  # of an element of a row that is not in one of the server's small formats


class Exchanges(Protocol):
    """What moves the tensors of a pass, in the engine's own library."""

    largest: int  # rows of the largest pass

    def release(self) -> None:
        """Gives the transport's memory back."""


class Worker(Generic[_Exchange]):
    """Belongs to one thread at a time. Made before the model is loaded: a server that is not there
    shows then."""

    def __init__(self, options: Options, ranks: Ranks = Ranks()) -> None:
        self.link = Link(options, ranks)
        self.limits = self.link.look()
        self.passes: Optional[Passes] = None
        self.exchange: Optional[_Exchange] = None
        self.spec: Optional[ModelSpec] = None
        self.made: Optional[Pass] = None  # the pass under way

    def rows_of_pool(self, row_dim: int, layers: int) -> int:
        """Rows of a model of so many layers that the server's pool has room for."""
        return int(self.limits.kv_cache_bytes) // (KV_BYTES * row_dim * layers)

    def start(self, spec: ModelSpec, weights: Callable[[int], Weights],
              exchange: Callable[[Passes], _Exchange], deferred: bool = False) -> None:
        """The weights are there: registers the model and uploads them. `deferred`: as of Passes."""
        self.spec = spec
        self.link.start(spec, weights)
        client = self.link.options.arguments["client_id"]
        self.passes = Passes(self.link, spec.layers, deferred=deferred,
                             name=f"{client}/{spec.model_id}")
        self.exchange = exchange(self.passes)

    def begin(self, plan: PassPlan, batch: Optional[Seq[Scheduled]] = None) -> Pass:
        """Begins the pass of a plan; `batch`: its requests in the order of the rows."""
        assert self.passes is not None
        self.made = self.passes.begin(plan.scheduled if batch is None else batch, plan.gone,
                                      plan.said, plan.number)
        return self.made

    def end(self, ahead: bool = False) -> None:
        """Ends the pass; none is under way then. `ahead`: as Passes.end."""
        assert self.passes is not None
        self.passes.end(ahead)
        self.made = None

    def check_turn(self, layer: int, rows: int) -> int:
        """The rows that the requests of the pass have; `rows`: those that a layer was given, of
        which more are padding. Internal if it is not this layer's turn, or rows are missing."""
        assert self.made is not None
        have = self.made.parts[-1].end
        if layer != self.made.layers or rows < have:
            raise errors.Internal(f"layer {layer} with {rows} rows: must be layer "
                                  f"{self.made.layers} with {have}")
        return have

    def counts(self) -> Dict[str, int]:
        """Counts so far: rows of the largest pass, passes, failed passes, drafts kept."""
        if self.exchange is None or self.passes is None:
            return {}
        return {"largest": self.exchange.largest, **self.passes.counts}

    def close(self) -> None:
        """Releases what the server has and ends the connection."""
        if self.passes is not None:
            self.passes.close()
        if self.exchange is not None:
            self.exchange.release()
        self.link.close()


class Group(Protocol):
    """Processes that decide alike."""

    rank_in_group: int

    def broadcast_object(self, value: Any, src: int) -> Any:
        """The value of rank `src`, on each."""

    def all_gather_object(self, value: Any) -> List[Any]:
        """The values of all."""


class Requests:
    """Requests of an engine whose scheduler and worker are one thread, by the engine's ids. Ranks
    that share heads have such a process each: the first one asks the server and tells the others.
    """

    def __init__(self, worker: Worker, admission: Optional[Admission],
                 group: Optional[Group] = None) -> None:
        """`admission`: of the first rank; `group`: None if there is one process."""
        self._worker = worker
        self._admission = admission
        self._group = group
        self._numbers = itertools.count()
        self._names: Dict[Any, str] = {}  # of requests here, by the engine's ids
        self._waiting: Set[str] = set()
        self._gone: Set[str] = set()      # of requests that have not been released

    def admit(self, rid: Any, owner: Any, tokens: Seq[int], salt: str, shareable: bool,
              finds: bool = True) -> int:
        """Rows that are there for a request, as of Admission.admit. `owner` is the engine's
        request: where it is dropped before it was scheduled, its reservation is given back."""
        name = self._named(rid, owner)
        rows = self.agreed(lambda: self._first.admit(name, tokens, salt, shareable, finds))
        self._waiting.discard(name)
        if rows is None:
            self._waiting.add(name)
        return rows or 0

    def waits(self, rid: Any) -> bool:
        """True for a request that the server has no room for now."""
        return self._names.get(rid) in self._waiting

    def freed(self, rid: Any, tokens: Seq[int]) -> None:
        """A request has ended, or was put back, with these tokens: its rows are released at once,
        and found by others that begin with the same ones."""
        name = self._names.get(rid)
        if name is None:
            return
        if self._admission is not None:
            self._admission.ended(name, tokens)
        self._gone.add(name)
        self._worker.begin(self._planned({}))
        self._worker.end()

    def begin(self, rids: Seq[Any], rows: Seq[Tuple[int, int]]) -> Pass:
        """Begins a pass with (computed, new) rows of each request, in this order."""
        unknown = [rid for rid in rids if rid not in self._names]
        if unknown:
            raise errors.Internal(f"requests {unknown} were not placed before their pass")
        return self._worker.begin(self._planned(
            {self._names[rid]: pair for rid, pair in zip(rids, rows)}))

    def lost(self, rids: Iterable[Any]) -> List[Any]:
        """Those of `rids` whose rows are lost on a rank: they begin again from nothing, and are
        returned until the engine leaves them out. All ranks ask for the same ones."""
        passes = self._worker.passes
        if passes is None:
            return []
        names = {rid: self._names[rid] for rid in rids if rid in self._names}
        told = passes.lost(names.values())
        if self._group is not None:
            passes.recall(name for part in self._group.all_gather_object(told) for name in part)
        return [rid for rid, name in names.items() if passes.state(name) == State.AGAIN]

    def leave(self, rid: Any) -> None:
        """The engine has a request whose rows are lost in no pass to come: it is put back, or
        fails."""
        assert self._worker.passes is not None
        self._worker.passes.leave(self._names[rid])

    @property
    def patient(self) -> bool:
        """True while requests whose rows are lost are to begin again."""
        return self.agreed(lambda: self._first.patient)

    @property
    def reason(self) -> str:
        """Why rows are lost."""
        passes = self._worker.passes
        return str(passes.last_error if passes is not None else "it is away")

    def agreed(self, make: Callable[[], _Value]) -> _Value:
        """Returns on all ranks what `make` returns on the first one."""
        return agreed(self._group, make)

    def close(self) -> None:
        """Releases what was not taken over, then closes the worker, which releases the model."""
        if self._admission is not None:
            self._admission.forget()
        self._worker.close()

    @property
    def _first(self) -> Admission:
        assert self._admission is not None  # asked on the first rank alone
        return self._admission

    def _named(self, rid: Any, owner: Any) -> str:
        """The name of a request, of which no other one has it; the engine's id may be used again.
        """
        name = getattr(owner, "mla_name", None)
        if name is None:
            name = f"{rid}#{next(self._numbers)}"
            owner.mla_name = name
            weakref.finalize(owner, self._gone.add, name).atexit = False
        self._names[rid] = name
        return name

    def _planned(self, rows: Dict[str, Tuple[int, int]]) -> PassPlan:
        gone, self._gone = self._gone, set()
        for rid in [rid for rid, name in self._names.items() if name in gone]:
            del self._names[rid]
        self._waiting -= gone
        return self.agreed(lambda: self._first.plan(rows, gone))


def agreed(group: Optional[Group], make: Callable[[], _Value]) -> _Value:
    """Returns on all processes of the group what `make` returns on its first one."""
    if group is None:
        return make()
    value = make() if group.rank_in_group == 0 else None
    return group.broadcast_object(value, src=0)
