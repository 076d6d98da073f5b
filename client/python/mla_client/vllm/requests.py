"""Requests of vLLM, without vLLM: which rows of a pass belong to which of them.

The scheduler's side turns its output into a plan that travels to the worker, whose side puts the
requests into the order in which their rows lie in the batch.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Sequence as Seq, Tuple

from mla_client import errors
from mla_client.service.passes import Scheduled


@dataclasses.dataclass(frozen=True)
class Planned(Scheduled):
    """A request in a pass, with what names it in the batch."""

    first_block: int  # of the engine's pages


@dataclasses.dataclass(frozen=True)
class PassPlan:
    """A pass, and the requests that have ended or lost their pages."""

    scheduled: Tuple[Planned, ...] = ()
    gone: Tuple[str, ...] = ()

    def in_order(self, first_blocks: Seq[int], rows: Seq[int]) -> List[Planned]:
        """Its requests as the batch has them, whose first pages and rows these are, request by
        request."""
        by_block = {each.first_block: each for each in self.scheduled}
        if len(by_block) != len(self.scheduled):
            raise errors.FailedPrecondition("two requests have the same first page: turn prefix "
                                            "caching of the engine off")
        batch = [by_block[block] for block in first_blocks if block in by_block]
        if len(first_blocks) != len(batch) or len(batch) != len(by_block) or [
                each.new for each in batch] != list(rows):
            raise errors.Internal(f"the batch has {list(rows)} rows of pages {list(first_blocks)}, "
                                  f"the plan {self.scheduled}")
        return batch


class Planner:
    """The scheduler's side."""

    def __init__(self) -> None:
        self._first_block: Dict[str, int] = {}

    def plan(self, output: Any) -> PassPlan:
        """Of a vllm.v1.core.sched.output.SchedulerOutput."""
        gone = {*output.finished_req_ids, *(output.preempted_req_ids or ())}
        for request in gone:
            self._first_block.pop(request, None)
        computed: Dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            self._first_block[new.req_id] = new.block_ids[0][0]
            computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for index, request in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[index]
            if request in cached.resumed_req_ids and blocks is not None:
                self._first_block[request] = blocks[0][0]
            computed[request] = cached.num_computed_tokens[index]
        return PassPlan(
            tuple(Planned(request, computed[request], new, self._first_block[request])
                  for request, new in output.num_scheduled_tokens.items()),
            tuple(sorted(gone)))
