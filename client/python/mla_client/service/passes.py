"""Passes of a serving engine as steps: its requests have a sequence each.

What the adapters of engines have in common. An engine says of every pass which requests have rows
in it, in their order, and how many of each request's tokens are right already.
"""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import Dict, Iterable, List, Mapping, Optional, Sequence as Seq

from mla_client import errors
from mla_client.service import Model, Sequence, Step
from mla_client.types import Prefix


@dataclasses.dataclass(frozen=True)
class Scheduled:
    """A request in a pass."""

    request: str
    computed: int  # tokens before this pass that are right
    new: int       # tokens in it
    # Id of a sequence that was opened and handed over for it, which takes the place of its own.
    sequence: Optional[int] = None


@dataclasses.dataclass
class _Open:
    """A step that has not ended."""

    step: Step
    requests: List[Scheduled]  # in its order
    layers: int = 0            # that are done


class Passes:
    """Sequences by request, and the step of the pass under way. Belongs to one thread at a time."""

    def __init__(self, model: Model, lease_ms: int) -> None:
        self._model = model
        self._lease_ms = lease_ms
        self._sequences: Dict[str, Sequence] = {}
        self._open: Optional[_Open] = None

    @property
    def step(self) -> Optional[Step]:
        """Of the pass under way; None: it has ended, or is without requests."""
        return self._open.step if self._open is not None else None

    @property
    def layers_done(self) -> int:
        """Of the pass under way."""
        return self._open.layers if self._open is not None else 0

    def length(self, request: str) -> Optional[int]:
        """Rows of a request that are committed; None: it has no sequence."""
        sequence = self._sequences.get(request)
        return sequence.length if sequence is not None else None

    def begin(self, requests: Seq[Scheduled], gone: Iterable[str] = (),
              said: Mapping[str, Prefix] = MappingProxyType({})) -> None:
        """Ends the pass before, if it has not ended, releases the requests that are gone and begins
        a pass with rows of `requests`, in this order. `said`: what the rows of requests that are
        gone stand for, by which others find them."""
        self._end({each.request: each.computed for each in requests})
        for name, prefix in said.items():
            self._say(name, prefix)
        self.release(gone)
        for each in requests:
            if each.sequence is not None:
                self.release([each.request])
                try:
                    self._sequences[each.request] = self._model.adopt_sequence(each.sequence)
                except errors.NotFound:
                    if each.computed:
                        raise
                    # It had no rows, and its server has ended: another one does as well.
        entries = [(self._ready(each), each.new) for each in requests]
        if entries:
            step = self._model.service.step(entries, lease_ms=self._lease_ms).begin()
            self._open = _Open(step, list(requests))

    def layer_done(self) -> bool:
        """A layer has its outputs. Returns whether that was the last one of the pass."""
        if self._open is None:
            return False
        self._open.layers += 1
        return self._open.layers == self._model.spec.layers

    def end(self) -> None:
        """Keeps all rows of the pass: without drafts each of them is right."""
        self._end({})

    def release(self, requests: Iterable[str]) -> None:
        """Requests that have ended, or lost their pages."""
        for request in requests:
            sequence = self._sequences.pop(request, None)
            if sequence is not None:
                sequence.release()

    def close(self) -> None:
        """Releases all sequences; an open step goes with them."""
        self._open = None
        self.release(tuple(self._sequences))

    def _say(self, request: str, prefix: Prefix) -> None:
        sequence = self._sequences.get(request)
        if sequence is None or sequence.length == 0:
            return
        try:  # of the rows that it has: a match would add those that follow elsewhere
            sequence.match(dataclasses.replace(
                prefix, token_ids=prefix.token_ids[:sequence.length]))
        except errors.MlaError:
            pass  # then they are not found

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
