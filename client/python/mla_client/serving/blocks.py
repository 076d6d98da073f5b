"""Which rows of a batch are whose, in engines whose workers know blocks and no names.

The scheduler says which blocks a request writes to in a pass; a batch says in which slots its rows
lie. No two requests write to one block.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import itertools
from typing import (Any, Callable, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional,
                    Sequence as Seq, Set, Tuple)

from mla_client import errors
from mla_client.serving.admission import Admission
from mla_client.serving.plan import PassPlan, Scheduled


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """A pass on its way to the workers, with what names its requests in the batch."""

    plan: PassPlan
    blocks: Dict[int, str]  # that get new rows, and whose they are
    first: Dict[str, int]   # the first block of each request
    # Requests and new rows. Equal in two passes in a row: then their batches have one order.
    key: Tuple[Tuple[str, int], ...]

    def first_of(self, names: Iterable[str]) -> set:
        """The first blocks of those of the requests that are in this pass."""
        return {self.first[name] for name in names if name in self.first}

    def in_order(self, blocks: Seq[int], rows: Seq[int],
                 computed: Optional[Seq[int]] = None) -> List[Scheduled]:
        """The planned requests in the order of the batch. `blocks` holds the block that the batch
        writes the first row of each request to, and `rows` its number of rows. `computed`: the
        computed rows of each request by the batch, for plans made while drafts were under way."""
        by_name = {each.request: each for each in self.plan.scheduled}
        names = [self.blocks.get(block) for block in blocks]
        batch = [by_name[name] for name in names if name is not None]
        if len(set(names)) != len(by_name) or len(batch) != len(by_name) or [
                each.new for each in batch] != list(rows):
            raise errors.Internal(f"the batch has {list(rows)} rows in blocks {list(blocks)}, "
                                  f"the plan {self.plan.scheduled} in {self.blocks}")
        if computed is None:
            return batch
        return [each if each.computed == 0 else each._replace(computed=right)
                for each, right in zip(batch, computed)]


class Orders:
    """The order of the batch under way. While passes are alike it is the last one's, so that no
    copy from a device is waited for."""

    def __init__(self) -> None:
        self._key: Any = None
        # In the plan, of the requests in the order of the batch; empty: the plan has that order.
        self._places: List[int] = []

    def of(self, plan: BatchPlan, rows: Seq[int], read: Callable[[], Seq[int]],
           computed: Optional[Seq[int]] = None) -> Seq[Scheduled]:
        """As BatchPlan.in_order; `read` gives the blocks."""
        key, scheduled = plan.key, plan.plan.scheduled
        if key == self._key and computed is None:
            return [scheduled[place] for place in self._places] if self._places else scheduled
        batch = plan.in_order(read(), rows, computed)
        places = {each.request: place for place, each in enumerate(scheduled)}
        order = [places[each.request] for each in batch]
        self._key, self._places = key, order if order != [*range(len(order))] else []
        return batch


class Given(NamedTuple):
    """What a scheduler has decided about one request of a pass."""

    request: str
    computed: int  # tokens before this pass that are right
    new: int       # tokens in it
    blocks: Tuple[int, ...] = ()  # in addition to those that it has
    begins: bool = False          # with `blocks` alone: it is new, or has lost those that it had


class _Last:
    """The last plan in columns, for one that differs from it by the rows alone."""

    def __init__(self, batch_plan: BatchPlan) -> None:
        names, computed, new, _, turns = zip(*batch_plan.plan.scheduled)
        self.names: List[str] = list(names)
        self.new: List[int] = list(new)
        self.turns: Tuple[int, ...] = turns
        self.next: List[int] = [before + count for before, count in zip(computed, new)]
        self.written, self.first, self.key = batch_plan.blocks, batch_plan.first, batch_plan.key


class Planner:
    """The scheduler's side: blocks by request, and plans."""

    def __init__(self, admission: Admission, block_size: int, drafts: int = 0) -> None:
        """`drafts`: tokens by which the counts of a plan may be too high."""
        self.admission = admission
        self._block_size = block_size
        self._drafts = drafts
        self._blocks: Dict[str, List[int]] = {}
        self._last: Optional[_Last] = None

    def plan(self, given: Seq[Given], gone: Iterable[str]) -> BatchPlan:
        """The plan of a pass of these requests; those of `gone` have ended or lost their blocks."""
        departed = set(gone)
        for request in departed:
            self._blocks.pop(request, None)
        rows: Dict[str, Tuple[int, int]] = {}
        written: Dict[int, str] = {}
        first: Dict[str, int] = {}
        size, drafts = self._block_size, self._drafts
        for request, computed, new, blocks, begins in given:
            held = None if begins else self._blocks.get(request)
            if held is None:
                held = self._blocks[request] = []
            held.extend(blocks)
            if not new:
                continue
            rows[request] = computed, new
            first[request] = held[0]
            end = (computed + new - 1) // size
            for block in held[max(0, computed - drafts) // size:end + 1]:
                written[block] = request
        batch_plan = BatchPlan(self.admission.plan(rows, departed), written, first,
                               tuple([(request, new) for request, (_, new) in rows.items()]))
        self._last = _Last(batch_plan) if rows and not self._drafts else None
        return batch_plan

    def again(self, rows: Mapping[str, int], requests: Seq[str], computed: Seq[int],
              blocks: Seq[Any]) -> Optional[BatchPlan]:
        """The plan of a pass of the last one's `requests`, each with its (new) `rows`, `computed`
        rows before it and groups of `blocks` in addition, or None. Returns None if it differs by
        more than that: then `plan` makes it."""
        last, names = self._last, list(rows)
        if (last is None or names != last.names or requests != names or computed != last.next
                or list(rows.values()) != last.new):
            return None
        number = self.admission.again(names)
        if number is None:
            return None
        for name, added in zip(names, blocks):
            if added:
                self._blocks[name].extend(added[0])
        size, written = self._block_size, {}
        for name, before, new in zip(names, computed, last.new):
            place = before % size
            if not place or place + new > size:
                for block in self._blocks[name][before // size:(before + new - 1) // size + 1]:
                    written[block] = name
        if written:  # blocks that no row was written to before; the others may stay
            last.written = {**last.written, **written}
        scheduled = tuple(map(Scheduled._make, zip(
            names, computed, last.new, itertools.repeat(None), last.turns)))
        last.next = [before + new for before, new in zip(computed, last.new)]
        return BatchPlan(PassPlan(number, scheduled), last.written, last.first, last.key)

    def held(self, blocks: Iterable[int], names: Mapping[str, Any]) -> List[str]:
        """Those of the requests whose first block is one of `blocks`."""
        wanted = set(blocks)
        return [name for name, held in self._blocks.items()
                if held and held[0] in wanted and name in names]


class LostBlocks(collections.abc.Set):
    """Blocks that are looked for when they are asked for the first time. A copy that travels to
    another process is a plain set. Belongs to one thread at a time."""

    def __init__(self, find: Callable[[], Set[int]]) -> None:
        self._find: Optional[Callable[[], Set[int]]] = find
        self._found: Set[int] = set()

    def _blocks(self) -> Set[int]:
        find, self._find = self._find, None
        if find is not None:
            self._found = find()
        return self._found

    @classmethod
    def _from_iterable(cls, it: Any) -> Set[int]:
        return set(it)

    def __contains__(self, block: object) -> bool:
        return block in self._blocks()

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks())

    def __len__(self) -> int:
        return len(self._blocks())

    def __reduce__(self) -> Tuple[Any, ...]:
        return set, (list(self._blocks()),)

    def __repr__(self) -> str:
        return repr(self._blocks())
