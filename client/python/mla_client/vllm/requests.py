"""Requests of an engine as sequences of a service, without vLLM.

The scheduler's side turns its output into a plan that travels to the worker. The worker's side
begins a step for a pass, in the order in which the rows of its requests lie in the batch, and ends
it: at once, or, when drafts are verified, with the next plan, which says how many tokens were
right.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Optional, Sequence as Seq, Tuple

from mla_client import errors
from mla_client.service import Model, Sequence, Step


@dataclasses.dataclass(frozen=True)
class Scheduled:
    """A request in a pass."""

    request: str
    first_block: int  # of the engine's pages: names the request in the batch
    computed: int     # tokens before this pass that are right
    new: int          # tokens in it


@dataclasses.dataclass(frozen=True)
class PassPlan:
    """A pass, and the requests that have ended or lost their pages."""

    scheduled: Tuple[Scheduled, ...] = ()
    gone: Tuple[str, ...] = ()


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
            tuple(Scheduled(request, self._first_block[request], computed[request], new)
                  for request, new in output.num_scheduled_tokens.items()),
            tuple(sorted(gone)))


@dataclasses.dataclass
class _Open:
    """A step that has not ended."""

    step: Step
    requests: List[Scheduled]  # in its order
    layers: int = 0            # that are done


class Rows:
    """The worker's side. Belongs to one thread."""

    def __init__(self, model: Model, lease_ms: int) -> None:
        self._model = model
        self._lease_ms = lease_ms
        self._sequences: Dict[str, Sequence] = {}
        self._open: Optional[_Open] = None

    @property
    def step(self) -> Optional[Step]:
        """Of the pass under way; None: it is one without requests, to warm up or to measure."""
        return self._open.step if self._open is not None else None

    def begin(self, plan: PassPlan, first_blocks: Seq[int], rows: Seq[int]) -> None:
        """Begins a pass. `first_blocks` and `rows` are those of the batch, request by request in
        the order of its rows."""
        self._end({each.request: each.computed for each in plan.scheduled})
        self._release(plan.gone)
        by_block = {each.first_block: each for each in plan.scheduled}
        if len(by_block) != len(plan.scheduled):
            raise errors.FailedPrecondition("two requests have the same first page: turn prefix "
                                            "caching of the engine off")
        batch = [by_block.get(block) for block in first_blocks]
        if [each and each.new for each in batch] != list(rows) or len(batch) != len(by_block):
            raise errors.Internal(f"the batch has {list(rows)} rows of pages {list(first_blocks)}, "
                                  f"the plan {plan.scheduled}")
        requests = [each for each in batch if each is not None]
        entries = [(self._ready(each), each.new) for each in requests]
        if entries:
            step = self._model.service.step(entries, lease_ms=self._lease_ms).begin()
            self._open = _Open(step, requests)

    def layer_done(self) -> None:
        """A layer has its outputs."""
        if self._open is not None:
            self._open.layers += 1

    def end(self) -> None:
        """Keeps all rows of the pass: without drafts each of them is right."""
        self._end({})

    def close(self) -> None:
        """Releases all sequences; an open step goes with them."""
        self._open = None
        self._release(tuple(self._sequences))

    def _ready(self, request: Scheduled) -> Sequence:
        """The sequence of a request, with the rows that are right."""
        sequence = self._sequences.get(request.request)
        if sequence is None:
            sequence = self._sequences[request.request] = self._model.open_sequence()
        if sequence.length > request.computed:  # a refused draft, or it begins again
            sequence.truncate(request.computed)
        if sequence.length < request.computed:
            raise errors.FailedPrecondition(
                f"request {request.request}: {request.computed} tokens are computed for the "
                f"engine, {sequence.length} on the server: turn prefix caching of the engine off")
        return sequence

    def _end(self, computed: Dict[str, int]) -> None:
        """Ends the step of the last pass, of which the rows below `computed` stay; requests that it
        does not name keep theirs."""
        opened, self._open = self._open, None
        if opened is None:
            return
        if opened.layers < self._model.spec.layers:
            opened.step.abort()
            raise errors.FailedPrecondition(
                f"the last pass ended after {opened.layers} of {self._model.spec.layers} layers")
        kept = [min(max(computed.get(each.request, each.computed + each.new) - each.computed, 0),
                    each.new) for each in opened.requests]
        if any(kept):
            opened.step.end(kept)
        else:
            opened.step.abort()

    def _release(self, requests: Tuple[str, ...]) -> None:
        for request in requests:
            sequence = self._sequences.pop(request, None)
            if sequence is not None:
                sequence.release()
