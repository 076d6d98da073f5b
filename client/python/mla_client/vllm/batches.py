"""Which rows of a batch are whose, without vLLM and torch.

The scheduler says which blocks a request writes to in a pass; a batch says in which slots its rows
lie. No two requests write to one block.
"""

from __future__ import annotations

import collections.abc
import dataclasses
from typing import (Any, Callable, Dict, Iterator, List, Optional, Sequence as Seq, Set, Tuple)

from mla_client import errors
from mla_client.serving import Admission, PassPlan, Scheduled


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """A pass on its way to the workers, with what names its requests in the batch."""

    plan: PassPlan
    blocks: Dict[int, str]  # that get new rows, and whose they are
    first: Dict[str, int]   # the first block of each request

    def key(self) -> Tuple[Tuple[str, int], ...]:
        """Equal in two passes in a row: then their batches have one order."""
        return tuple((each.request, each.new) for each in self.plan.scheduled)

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
        return [each if each.computed == 0 else dataclasses.replace(each, computed=right)
                for each, right in zip(batch, computed)]


class Orders:
    """The order of the batch under way. While passes are alike it is the last one's, so that no
    copy from a device is waited for."""

    def __init__(self) -> None:
        self._key: Any = None
        self._order: List[str] = []

    def of(self, plan: BatchPlan, rows: Seq[int], read: Callable[[], Seq[int]],
           computed: Optional[Seq[int]] = None) -> List[Scheduled]:
        """As BatchPlan.in_order; `read` gives the blocks."""
        key = plan.key()
        if key == self._key and computed is None:
            by_name = {each.request: each for each in plan.plan.scheduled}
            return [by_name[name] for name in self._order]
        batch = plan.in_order(read(), rows, computed)
        self._key, self._order = key, [each.request for each in batch]
        return batch


class Planner:
    """The scheduler's side: blocks by request, and plans."""

    def __init__(self, admission: Admission, block_size: int, drafts: int = 0) -> None:
        """`drafts`: tokens by which the counts of a plan may be too high."""
        self.admission = admission
        self._block_size = block_size
        self._drafts = drafts
        self._blocks: Dict[str, List[int]] = {}

    def plan(self, output: Any) -> BatchPlan:
        """The plan of a vllm.v1.core.sched.output.SchedulerOutput."""
        gone = {*output.finished_req_ids, *(output.preempted_req_ids or ())}
        for request in gone:
            self._blocks.pop(request, None)
        computed: Dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            self._blocks[new.req_id] = list(new.block_ids[0])
            computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for index, request in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[index]
            if request in cached.resumed_req_ids:
                self._blocks[request] = []
            if blocks is not None:
                self._blocks.setdefault(request, []).extend(blocks[0])
            computed[request] = cached.num_computed_tokens[index]
        rows = {request: (computed[request], new)
                for request, new in output.num_scheduled_tokens.items()}
        written: Dict[int, str] = {}
        for request, (before, new) in rows.items():
            begin = max(0, before - self._drafts) // self._block_size
            end = (before + new - 1) // self._block_size
            for block in self._blocks[request][begin:end + 1]:
                written[block] = request
        plan = self.admission.plan(rows, gone)
        return BatchPlan(plan, written, {request: self._blocks[request][0] for request in rows})

    def first_blocks(self) -> Dict[str, int]:
        """The first block of every request that has some."""
        return {request: blocks[0] for request, blocks in self._blocks.items() if blocks}


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
