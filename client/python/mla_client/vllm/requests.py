"""Requests of vLLM, without vLLM: which rows of a pass belong to which of them.

The scheduler's side turns its output into a plan that travels to the worker, whose side puts the
requests into the order in which their rows lie in the batch.
"""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any, Dict, List, Optional, Sequence as Seq, Tuple

from mla_client import errors
from mla_client.service import Service
from mla_client.service.passes import Scheduled
from mla_client.types import Prefix, SequenceState


@dataclasses.dataclass(frozen=True)
class Planned(Scheduled):
    """A request in a pass, with what names it in the batch."""

    first_block: int = 0  # of the engine's pages


@dataclasses.dataclass(frozen=True)
class PassPlan:
    """A pass, and the requests that have ended or lost their pages."""

    scheduled: Tuple[Planned, ...] = ()
    gone: Tuple[str, ...] = ()
    said: Dict[str, Prefix] = dataclasses.field(default_factory=dict)  # of rows of those gone

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


class Prefixes:
    """The scheduler's side of the server's prefix cache. A match is a reservation: a request that
    may be scheduled gets its sequence at once, with the rows that were found, and the worker
    takes it over with the plan. Its client has the `client_id` of the worker's."""

    def __init__(self, service: Service, model_id: str, salt: str) -> None:
        self._service = service
        self._model_id = model_id
        self._salt = salt
        self._waiting: Dict[str, SequenceState] = {}  # of requests that are not scheduled yet
        self._salts: Dict[str, str] = {}  # of requests whose rows may be shared

    def matched(self, request: str, tokens: Seq[int], salt: str) -> int:
        """Rows that are there for a request of these tokens; the same until it is scheduled."""
        known = self._waiting.get(request)
        if known is not None or len(tokens) < 2:
            return known.length if known is not None else 0
        salt = self._salt + salt
        try:
            state, _ = self._service._open(
                self._model_id, secrets.token_hex(16), 0,
                Prefix(list(tokens), salt=salt, max_rows=len(tokens) - 1))
        except (errors.ResourceExhausted, errors.Unavailable):
            # No room, or the server drains: the worker opens one that shares nothing, where it can.
            return 0
        self._waiting[request] = state
        self._salts[request] = salt
        return state.length

    def take(self, request: str) -> Optional[int]:
        """The sequence of a request that is scheduled now, for the worker."""
        state = self._waiting.pop(request, None)
        if state is None:
            return None
        self._service._hand_over(state.sequence_id)
        return state.sequence_id

    def ended(self, request: str, tokens: Seq[int]) -> Optional[Prefix]:
        """What the rows of a request stand for that has ended: all of its tokens but the last one,
        which no pass has had. None if they are not shared."""
        salt = self._salts.pop(request, None)
        if salt is None or len(tokens) < 2:
            return None
        return Prefix(list(tokens)[:-1], salt=salt)

    def close(self) -> None:
        """Releases what was not taken over."""
        for request in list(self._waiting):
            self.drop(request)

    def drop(self, request: str) -> None:
        """Releases what a request holds that will not be scheduled as it is."""
        state = self._waiting.pop(request, None)
        if state is not None:
            self._service._release([state.sequence_id])


class Planner:
    """The scheduler's side of passes."""

    def __init__(self) -> None:
        self.prefixes: Optional[Prefixes] = None
        self._first_block: Dict[str, int] = {}
        self._said: Dict[str, Prefix] = {}

    def end(self, request: str, tokens: Seq[int]) -> None:
        """A request has ended with these tokens; the next output names it."""
        prefix = self.prefixes.ended(request, tokens) if self.prefixes is not None else None
        if prefix is not None:
            self._said[request] = prefix

    def plan(self, output: Any) -> PassPlan:
        """Of a vllm.v1.core.sched.output.SchedulerOutput."""
        gone = {*output.finished_req_ids, *(output.preempted_req_ids or ())}
        for request in gone:
            self._first_block.pop(request, None)
            if self.prefixes is not None and request not in output.num_scheduled_tokens:
                self.prefixes.drop(request)
        said, self._said = self._said, {}
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
            tuple(Planned(request, computed[request], new,
                          self.prefixes.take(request) if self.prefixes is not None else None,
                          self._first_block[request])
                  for request, new in output.num_scheduled_tokens.items()),
            tuple(sorted(gone)), said)
