"""The worker's side: passes of an engine as steps of a service, whatever becomes of the server.

`begin` does not raise errors of the server. It marks each part that cannot be sent. If a request
has no rows before this pass, the worker has all its keys and can compute the rows itself. The
outputs of other requests are invalid, and the engine begins these requests again from nothing.
"""

from __future__ import annotations

import hashlib
import logging
import time
from types import MappingProxyType
from typing import Dict, Iterable, List, Mapping, Optional, Sequence as Seq, Set, Tuple

import numpy.typing as npt

from mla_client import errors
from mla_client.service import Model, Sequence, Step
from mla_client.serving.faults import FAILURES, Fault
from mla_client.serving.layers import rotations_of
from mla_client.serving.link import Link, Room
from mla_client.serving.plan import How, Part, Pass, Repeated, Scheduled
from mla_client.serving.states import Event, Request, State, move_all
from mla_client.types import Prefix

LOG = logging.getLogger("mla_client")
STEP_LEASE_MS = 30_000
# A rank waits so long for the one that began the last step to end it.
RANKS_WAIT_S = 5.0
RANKS_PAUSE_S = 0.0005
# A pass of which nothing is sent and nothing counts takes at least this long.
AWAY_PAUSE_S = 0.05


class Passes:
    """Requests by name, and the passes that have not ended. Belongs to one thread at a time."""

    def __init__(self, link: Link, layers: int, *, deferred: bool = False, name: str = "",
                 lease_ms: int = STEP_LEASE_MS, drops_newest: bool = True) -> None:
        """`layers`: of this process. `deferred`: a pass ends when a later one says how many of its
        rows were right. `name`: of the engine, equal on all its ranks and no other's."""
        self._link = link
        self._layers = layers
        self._deferred = deferred
        self._name = name
        self._lease_ms = lease_ms
        self._drops_newest = drops_newest
        self._requests: Dict[str, Request] = {}
        self._open: List[Pass] = []
        self._ending: List[Tuple[Pass, List[int]]] = []  # whose ends are not answered yet
        self._smooth = False  # the last chained pass was good
        self._repeated: Optional[Repeated] = None  # the last pass
        self._room = Room(link, self._failed)
        self._generation = link.generation if link.client is not None else 0
        # False where a worker cannot compute a part by itself, though it has all keys of it.
        self.computes_locally = True
        # False where the engine keeps the first token of a request even if the request is lost in
        # the pass that made it. Then such a pass must be known to be good layer by layer.
        self.drops_first_tokens = True
        # The rotations of all positions, [positions, rope_dim]; None unless PROJECTED is used.
        self.rotations: Optional[npt.NDArray] = None
        self.last_error: Optional[errors.MlaError] = None
        self.counts = {"passes": 0, "failed": 0, "drafts_kept": 0}

    @property
    def current(self) -> Optional[Pass]:
        """The pass under way; None: it has ended, or none has begun."""
        return self._open[-1] if self._open else None

    def length(self, request: str) -> Optional[int]:
        """Rows of a request that are committed; None: it has no sequence."""
        found = self._requests.get(request)
        return found.length if found is not None and found.sequence is not None else None

    def state(self, request: str) -> State:
        """Where a request stands."""
        found = self._requests.get(request)
        return found.state if found is not None else State.NEW

    def begin(self, scheduled: Seq[Scheduled], gone: Iterable[str] = (),
              said: Mapping[str, Prefix] = MappingProxyType({}), number: int = 0) -> Pass:
        """Ends the pass before, if it has not ended, releases the requests that are gone and begins
        a pass with rows of `scheduled`, in this order. `said`: what the rows of requests that are
        gone stand for, by which others find them. `number`: of the pass, equal on all ranks."""
        if self._ending:
            self.settle()
        if self._repeated is not None and not (gone or said or self._open):
            once_more = self._repeat(self._repeated, scheduled, number)
            if once_more is not None:
                return once_more
        self._repeated = None
        computed = {each.request: each.computed for each in scheduled}
        if len(computed) != len(scheduled):
            raise errors.Internal(f"pass {number}: a request is in it twice: "
                                  f"{[each.request for each in scheduled]}")
        self._finish(computed)
        for name, prefix in said.items():
            self._say(name, prefix)
        self.release(gone)
        parts, begin = [], 0
        for request, before, new, _, _ in scheduled:
            parts.append(Part(request, begin, begin + new, before))
            begin += new
        model_pass = Pass(number, parts)
        model_pass.may_chain = self.drops_first_tokens or 0 not in computed.values()
        self._open.append(model_pass)
        self.counts["passes"] += 1
        for again in (True, False):  # the connection may be one to a server that has restarted
            self._try(model_pass, scheduled)
            if self._link.client is not None or not again:
                break
        model_pass.given_up = any(part.how != How.SENT for part in model_pass.parts)
        if model_pass.step is None and any(part.how == How.VOID for part in model_pass.parts):
            time.sleep(AWAY_PAUSE_S)  # the engine would begin them again as fast as it can
        return model_pass

    def fail(self, model_pass: Pass, error: Exception) -> None:
        """A layer of the pass has failed: from this layer on its rows are not sent."""
        fault = self._failed(error)
        self._smooth = False
        self._repeated = None
        self.counts["failed"] += 1
        LOG.warning("mla: pass %d failed at layer %d: %s", model_pass.number, model_pass.layers,
                    error)
        step, model_pass.step = model_pass.step, None
        if fault != Fault.AWAY and step is not None and model_pass.leads:
            self._abort(step)
        for part in model_pass.sent():
            self._give_up(part, model_pass.chained)
            model_pass.given_up = True

    def layer_done(self, model_pass: Pass) -> bool:
        """A layer has its outputs. Returns True if that was the last one of this process."""
        model_pass.layers += 1
        return model_pass.layers == self._layers

    def end(self, ahead: bool = False) -> None:
        """Keeps all rows of the pass, unless passes end with later ones. Outputs of chained calls
        are good, or their requests lost, once this has returned. With `ahead` that is so once
        `settle` has returned: the end of a pass whose calls were chained is not waited for.

        A pass of several ranks ends as the next one begins: the others may still have its last
        layer before them, and the next pass needs what all of them gave."""
        if not self._deferred and self._link.ranks.size == 1:
            repeated = self._repeated
            if repeated is not None and self._open and repeated.ends(self._open, self._layers):
                self._end_repeated(repeated)
            else:
                self._finish({}, ahead)
            if not ahead:
                self.settle()
            return
        model_pass = self.current
        if model_pass is not None and model_pass.step is not None and model_pass.chained:
            try:
                model_pass.step.collect()
            except FAILURES as error:
                self.fail(model_pass, error)

    @property
    def ending(self) -> bool:
        """True while `settle` has something to wait for."""
        return bool(self._ending)

    def settle(self) -> None:
        """Waits for ends that went ahead."""
        ending, self._ending = self._ending, []
        for model_pass, kept in ending:
            assert model_pass.step is not None
            try:
                model_pass.step.finish()
            except FAILURES as error:
                self.fail(model_pass, error)
                continue
            self._note_ended(model_pass, kept)

    def lost(self, among: Optional[Iterable[str]] = None) -> List[str]:
        """Requests that the engine must begin again from nothing, each once; `among`: of these."""
        self.settle()
        if among is None:  # after each pass, of all requests
            return [name for name, request in self._requests.items()
                    if request.state is State.LOST and request.tell()]
        return [name for name in among
                if name in self._requests and self._requests[name].tell()]

    def recall(self, names: Iterable[str]) -> None:
        """Requests that the engine begins again because another rank has lost their rows."""
        self._repeated = None
        for name in names:
            self._drop(self._requests.setdefault(name, Request(name)).recall())

    def leave(self, name: str) -> None:
        """The engine has a request that it is to begin again in no pass to come."""
        self._requests[name].move(Event.LEAVE)

    def release(self, names: Iterable[str]) -> None:
        """Requests that have ended, or lost their pages."""
        for name in names:
            self._repeated = None
            request = self._requests.pop(name, None)
            if request is not None:
                self._drop(request.release())

    def close(self) -> None:
        """Releases all sequences; open steps go with them."""
        self._open.clear()
        self.settle()
        self.release(tuple(self._requests))

    # --- Beginning

    def _repeat(self, repeated: Repeated, scheduled: Seq[Scheduled], number: int
                ) -> Optional[Pass]:
        """Begins the pass of before once more, with the rows that follow; None: it is another pass,
        or cannot go ahead."""
        if (not self._smooth or not repeated.followed_by(scheduled)
                or self._model() is not repeated.model or not repeated.begin(self._room.take)):
            return None
        repeated.made.number = number
        self._open.append(repeated.made)
        self.counts["passes"] += 1
        return repeated.made

    def _try(self, model_pass: Pass, scheduled: Seq[Scheduled]) -> None:
        """Gives the requests their sequences and begins the step with all that have theirs."""
        model, requests = self._model(), self._requests
        for each, part in zip(scheduled, model_pass.parts):
            part.how = How.SENT
            request = requests.get(each.request)
            # Most requests have gone on by the rows of the pass before, and no call is needed.
            if (request is None or request.state is not State.READY or each.sequence is not None
                    or request.turn != each.turn or not each.computed
                    or request.length != each.computed) and not self._ready(
                        each, model if self._link.client is not None else None):
                self._give_up(part)
        self._start(model_pass)

    def _model(self) -> Optional[Model]:
        """The model; None: the server is away. Requests of another connection are lost."""
        try:
            model = self._link.model()
        except errors.MlaError as error:
            self.last_error = error
            model = None
        if self._generation != self._link.generation or model is None:
            for request in self._requests.values():
                request.lose()  # with its connection, or its server
            if model is not None:
                self._sweep()
                self._generation = self._link.generation
        return model

    def _sweep(self) -> None:
        """Releases what an earlier connection of this engine has left on the server."""
        if not self._generation or not self._link.ranks.sends_rows:
            return
        try:
            left = [one.sequence_id for one in self._link.client.sequences()]
            if left:
                self._link.client._release(left)
        except FAILURES as error:
            self._failed(error)

    def _ready(self, each: Scheduled, model: Optional[Model]) -> bool:
        """Returns true if the request's sequence has exactly the right rows."""
        request = self._requests.get(each.request)
        if request is None:
            request = self._requests[each.request] = Request(each.request)
        try:
            if each.computed == 0 or each.sequence is not None:
                return model is not None and request.may_open and self._opened(request, each, model)
            if request.state != State.READY or request.turn != each.turn:
                self._lose(each.request)
                return False
            if request.length > each.computed:
                request.truncate(each.computed, self._link.ranks.size)
        except FAILURES as error:
            self._failed(error)
            LOG.warning("mla: request %s goes without the server: %s", each.request, error)
            self._lose(each.request)
            return False
        if request.length != each.computed:
            self._lose(each.request)
            return False
        return True

    def _opened(self, request: Request, each: Scheduled, model: Model) -> bool:
        """Gives the request a sequence: the one that was opened for it, or a new one. Ranks name it
        alike, so that they get the same one."""
        sequence: Optional[Sequence] = None
        if each.sequence is not None:
            try:
                sequence = model.adopt_sequence(each.sequence)
            except errors.NotFound:
                pass  # its server has ended: another one does as well, if it had no rows
        if sequence is None and each.computed == 0:
            name = f"{self._name}/{each.request}/{each.turn}"
            sequence = model.open_sequence(
                request_id=hashlib.sha256(name.encode()).hexdigest()[:32] if self._name else "")
            if sequence.length:  # of an engine that had the same name
                raise errors.AlreadyExists(f"request {name}: its sequence has rows already")
        if sequence is None:
            self._lose(each.request)
            return False
        self._drop(request.open(sequence, each.turn))
        if sequence.length > each.computed:
            request.truncate(each.computed, self._link.ranks.size)
        return sequence.length == each.computed

    def _start(self, model_pass: Pass) -> None:
        """Begins the step with the parts that are ready. If the server lacks room, the newest
        request goes on without the server, so that the others can use it."""
        while parts := model_pass.sent():
            requests = [self._requests[part.request] for part in parts]
            entries: List[Tuple[Sequence, int]] = []
            for request, part in zip(requests, parts):
                assert request.sequence is not None
                entries.append((request.sequence, part.end - part.begin))
            try:
                model_pass.step = self._began(model_pass, entries)
            except FAILURES as error:
                self._not_begun(model_pass, error)
                continue
            move_all(requests, Event.BEGIN)
            return

    def _began(self, model_pass: Pass, entries: List[Tuple[Sequence, int]]) -> Step:
        """The step, which ranks begin together: the first one leads it. One that comes before
        the last step has ended waits for that."""
        size = self._link.ranks.size
        number = None
        if size > 1:
            text = f"{self._name}/{model_pass.number}/{len(entries)}"
            number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
        deadline = time.monotonic() + RANKS_WAIT_S
        while True:
            steps = self._link.fleet or entries[0][0].model.service
            rotations = (None if self.rotations is None
                         else rotations_of(self.rotations, model_pass.sent()))
            step = steps.step(entries, participants=size, step_id=number, lease_ms=self._lease_ms,
                              rotations=rotations)
            try:
                step.begin(self._goes_ahead(model_pass, entries))
                model_pass.leads = step.joined <= 1
                return step
            except errors.FailedPrecondition as error:
                waits = error.detail.reason in ("in_step", "position_mismatch", "step_ending")
                if size == 1 or not waits or time.monotonic() > deadline:
                    raise
            time.sleep(RANKS_PAUSE_S)

    def _goes_ahead(self, model_pass: Pass, entries: List[Tuple[Sequence, int]]) -> bool:
        """Returns true if the answer to the begin need not be waited for. A refusal would lose all
        requests of the pass, so there must be room, and the last pass was good."""
        if (not self._smooth or not self._may_go_ahead()
                or any(part.computed == 0 for part in model_pass.parts)):
            return False
        return self._room.take(entries[0][0].model, [sequence.length for sequence, _ in entries],
                               [rows for _, rows in entries])

    def _may_go_ahead(self) -> bool:
        """Returns true if begins of this engine may go ahead at all."""
        return (self._link.ranks.size == 1 and self._link.fleet is None
                and not self._link.options.arguments.get("follow_moves"))

    def _not_begun(self, model_pass: Pass, error: Exception) -> None:
        """Decides which parts go without the server: the newest one if the server lacks room, else
        the lost ones, in the worst case all."""
        fault = self._failed(error)
        self._smooth = False
        self.counts["failed"] += 1
        parts = model_pass.sent()
        if fault == Fault.NO_ROOM:
            parts = [parts[-1]] if self._drops_newest else parts
        elif fault == Fault.LOST:
            parts = [part for part in parts
                     if self._requests[part.request].differs()] or parts
        LOG.warning("mla: pass %d: %d of %d requests go without the server: %s", model_pass.number,
                    len(parts), len(model_pass.parts), error)
        for part in parts:
            self._give_up(part)

    # --- Failing

    def _failed(self, error: Exception) -> Fault:
        """Takes note of what a call has raised."""
        if not isinstance(error, errors.MlaError):
            error = errors.Unavailable(str(error))
        self.last_error = error
        return self._link.failed(error)

    def _lose(self, name: str) -> None:
        """The rows of a request are of no use any more."""
        self._drop(self._requests[name].lose())

    def _give_up(self, part: Part, void: bool = False) -> None:
        """Decides what to do with rows that are not sent. `void`: outputs of earlier layers are
        invalid, too."""
        self._lose(part.request)
        request = self._requests[part.request]
        if part.computed == 0 and not void and self.computes_locally and request.may_open:
            # The outputs are right all the same: the engine is told when rows are missed.
            part.how = How.LOCAL
            request.move(Event.COMPUTE)
        else:
            part.how = How.VOID
            request.miss()

    def _drop(self, sequence: Optional[Sequence]) -> None:
        """Gives a sequence back; one rank does it for all. Its lease does it if this fails."""
        if sequence is None or sequence.released:
            return
        try:
            if self._link.ranks.sends_rows and self._link.client is not None:
                sequence.release()
            else:
                sequence.hand_over()
        except FAILURES as error:
            self._failed(error)

    # --- Ending

    def _finish(self, computed: Mapping[str, int], ahead: bool = False) -> None:
        """Ends the passes before, of which the rows below `computed` stay; requests that it does
        not name keep theirs."""
        self.settle()
        passes, self._open = self._open, []
        for model_pass in passes:
            if model_pass.step is None:
                continue
            parts = model_pass.sent()
            kept = [part.end - part.begin for part in parts]
            if computed:
                kept = [min(max(computed.get(part.request, part.computed + count) - part.computed,
                                0), count) for part, count in zip(parts, kept)]
            if self._deferred:  # one token of each request is not a draft
                self.counts["drafts_kept"] += sum(
                    max(0, count - 1) for part, count in zip(parts, kept) if part.computed)
            try:
                self._commit(model_pass, kept, ahead)
            except FAILURES as error:
                self.fail(model_pass, error)

    def _end_repeated(self, repeated: Repeated) -> None:
        self._open.clear()
        try:
            repeated.step.end_ahead()
            self._ending.append((repeated.made, repeated.rows))
        except FAILURES as error:
            self.fail(repeated.made, error)

    def _commit(self, model_pass: Pass, kept: List[int], ahead: bool) -> None:
        step = model_pass.step
        assert step is not None
        if model_pass.layers < self._layers:
            raise errors.Internal(f"pass {model_pass.number} ended after {model_pass.layers} of "
                                  f"{self._layers} layers")
        if not model_pass.leads:
            for part, count in zip(model_pass.sent(), kept):
                sequence = self._requests[part.request].sequence
                assert sequence is not None
                sequence.length += count
        elif any(kept) and model_pass.chained and (ahead or self._may_go_ahead()):
            step.end_ahead(None if kept == step.rows else kept)
            self._ending.append((model_pass, kept))
            return
        elif any(kept):
            step.end(None if kept == step.rows else kept)
        else:
            step.abort()
        self._note_ended(model_pass, kept)

    def _note_ended(self, model_pass: Pass, kept: List[int]) -> None:
        self._smooth = model_pass.chained
        repeated = self._repeated
        if repeated is not None and kept is repeated.rows:
            repeated.note_ended()
            return
        move_all([self._requests[part.request] for part in model_pass.sent()],
                 Event.COMMIT if any(kept) else Event.ABORT)
        if not self._deferred and self.rotations is None and self._may_go_ahead():
            self._repeated = Repeated.of(model_pass, kept, self._requests)

    def _abort(self, step: Step) -> None:
        try:
            if step.open:
                step.abort()
        except FAILURES as error:
            self._failed(error)

    def _say(self, name: str, prefix: Prefix) -> None:
        request = self._requests.get(name)
        if request is None or not self._link.ranks.sends_rows:
            return
        try:
            request.say(prefix)
        except FAILURES as error:
            self._failed(error)  # then they are not found
