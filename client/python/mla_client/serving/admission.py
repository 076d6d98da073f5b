"""The scheduler's side: which requests the server has room for, which of their rows it has
already, and what a pass is to be.

A match is a reservation: a request that may be scheduled gets its sequence at once, with the rows
that were found, and the worker takes it over with the plan. Its client has the `client_id` of the
worker's."""

from __future__ import annotations

import dataclasses
import secrets
import time
from typing import (Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence as Seq,
                    Tuple)

from mla_client import errors
from mla_client.pages.block_events import BlockEvent, BlockEvents
from mla_client.serving.faults import FAILURES, Fault
from mla_client.serving.link import Link, free_groups
from mla_client.serving.plan import PassPlan, Scheduled
from mla_client.service import Model
from mla_client.types import Prefix, SequenceState

# So long the server's room is taken to be what it was.
ROOM_S = 0.02
# So long a request waits at least that found no room.
WAIT_S = 0.05
# Bits of the numbers of passes and turns that no other run of an engine has.
RUN_BITS = 40


@dataclasses.dataclass
class _Waiting:
    """A request that is not scheduled yet."""

    state: Optional[SequenceState]  # None: the worker opens one
    until: float = 0.0              # not before this it is tried again


@dataclasses.dataclass
class _Pair:
    """What a request is known to share with a prompt under way."""

    pages: int = 0       # the first of both that are equal
    ends: bool = False   # the next page of both differs


@dataclasses.dataclass
class _Promise:
    """An admitted request whose prompt is not stored yet."""

    need: int                     # rows that it will have
    have: int                     # rows that are stored
    tokens: Seq[int] = ()         # of a prompt that others may begin with
    salt: str = ""
    # By name of a request that waits. An engine asks for each of them before every pass, and a
    # comparison of two long prompts takes milliseconds.
    pairs: Dict[str, _Pair] = dataclasses.field(default_factory=dict)

    def shared(self, request: str, tokens: Seq[int], salt: str, page: int) -> int:
        """Rows of whole pages that a request of these tokens could take of it. Pages that were
        compared for this request before are not compared again, so its tokens may only grow."""
        if salt != self.salt:
            return 0
        most = min(len(self.tokens), len(tokens) - 1) // page
        pair = self.pairs.setdefault(request, _Pair())
        while not pair.ends and pair.pages < most:
            begin, end = pair.pages * page, (pair.pages + 1) * page
            if list(self.tokens[begin:end]) == list(tokens[begin:end]):
                pair.pages += 1
            else:
                pair.ends = True
        return pair.pages * page


class Admission:
    """Belongs to one thread at a time."""

    def __init__(self, link: Link, salt: str, shares: bool = True, opens: bool = True,
                 now: Callable[[], float] = time.monotonic, follows: bool = False,
                 tells: bool = False) -> None:
        """`opens`: False where the workers have more than one model, and open sequences of each.
        `follows`: a request waits for rows that it shares with one whose prompt is under way;
        for engines that ask again before each pass. `tells`: what becomes of cached rows is kept
        for `block_events`."""
        self._link = link
        self._salt = salt
        self._shares = shares and opens
        self._opens = opens
        self._follows = follows
        self._tells = tells and self._shares
        self._events: Optional[BlockEvents] = None
        self._now = now
        self._waiting: Dict[str, _Waiting] = {}
        self._salts: Dict[str, str] = {}    # of requests whose rows may be shared
        self._said: Dict[str, Prefix] = {}  # of requests that have ended since the last plan
        self._promised: Dict[str, _Promise] = {}
        self._turns: Dict[str, int] = {}
        self._turn = secrets.randbits(RUN_BITS) << 20
        self._number = secrets.randbits(RUN_BITS) << 20
        self._free = (-1.0, 0)  # when it was asked, and rows
        self.counts = {"asked": 0, "found": 0, "waits": 0, "follows": 0}

    def admit(self, request: str, tokens: Seq[int], salt: str = "", shareable: bool = True,
              finds: bool = True) -> Optional[int]:
        """Rows that are there for a request of these tokens; the same until it is scheduled. None:
        it is to wait, as the server has no room for it now or is away. `shareable`: its rows follow
        from tokens and salt alone. `finds`: it may begin with rows that are there."""
        known = self._waiting.get(request)
        if known is not None and known.state is not None:
            return known.state.length
        if known is not None and self._now() < known.until:
            return None
        for again in (True, False):  # the connection may be one to a server that has restarted
            try:
                return self._admitted(request, tokens, salt, shareable, finds)
            except errors.MlaError as error:
                fault = self._link.failed(error)
                if fault == Fault.AWAY and again:
                    continue
                if fault == Fault.NO_ROOM or (fault == Fault.AWAY and self._link.patient):
                    self._wait(request)
                    return None
        # The worker registers the model, or finds out what is wrong.
        self._waiting.pop(request, None)
        return 0

    def take(self, request: str) -> Optional[int]:
        """The sequence of a request that is scheduled now, for the worker."""
        waiting = self._waiting.pop(request, None)
        if waiting is None or waiting.state is None:
            return None
        if self._link.client is not None:
            self._link.client._hand_over(waiting.state.sequence_id)
        return waiting.state.sequence_id

    def ended(self, request: str, tokens: Seq[int]) -> None:
        """A request has ended with these tokens; the next plan says what its rows stand for: all of
        its tokens but the last one, which no pass has had."""
        salt = self._salts.pop(request, None)
        if salt is not None and len(tokens) > 1:
            self._said[request] = Prefix(list(tokens)[:-1], salt=salt)
        if self._events is not None:
            self._events.ended(request, list(tokens)[:-1])

    def plan(self, rows: Mapping[str, Tuple[int, int]], gone: Iterable[str]) -> PassPlan:
        """The plan of a pass. `rows` gives (computed, new) for each request, in the order of the
        pass; the requests of `gone` have ended or lost their pages."""
        departed = tuple(sorted(set(gone)))
        for request in departed:
            self._promised.pop(request, None)
            self._forget_pairs(request)
            self._turns.pop(request, None)
            if request not in rows:
                self._forget(request)
        scheduled = []
        for request, (computed, new) in rows.items():
            sequence = self.take(request) if request in self._waiting else None
            turn = self._turns.get(request)
            if computed == 0 or sequence is not None or turn is None:
                self._turn += 1
                turn = self._turns[request] = self._turn
            if request in self._promised:
                self._promised[request].have = computed
                if computed + 1 >= self._promised[request].need:
                    del self._promised[request]
            scheduled.append(Scheduled(request, computed, new, sequence, turn))
        said, self._said = self._said, {}
        self._number += 1
        return PassPlan(self._number, tuple(scheduled), departed, said)

    def again(self, requests: Iterable[str]) -> Optional[int]:
        """The number of a plan with the same requests as the last one, from which nothing but the
        rows differs; None: `plan` has more to say."""
        if self._said or not self._promised.keys().isdisjoint(requests):
            return None
        self._number += 1
        return self._number

    @property
    def patient(self) -> bool:
        """True while requests that have lost their rows are to begin again; False once the server
        has been away for too long, as far as can be seen now."""
        try:
            self._link.model().service.stats()  # type: ignore[attr-defined]
        except errors.MlaError as error:
            self._link.failed(error)
        return self._link.patient

    @property
    def error(self) -> Optional[errors.MlaError]:
        """Why the server is away, if it is."""
        return self._link.error

    def block_events(self) -> List[BlockEvent]:
        """What has become of cached rows since it was called last, for routers of requests: only of
        requests without a salt of their own, because routers go by tokens alone."""
        return self._events.take() if self._events is not None else []

    def forget(self) -> None:
        """Releases what was not taken over."""
        for request in list(self._waiting):
            self._forget(request)

    def close(self) -> None:
        """As `forget`, and ends the connection."""
        self.forget()
        if self._events is not None:
            self._events.close()
        self._link.close()

    def _admitted(self, request: str, tokens: Seq[int], salt: str, shareable: bool, finds: bool
                  ) -> Optional[int]:
        model = self._link.model()
        need = len(tokens) + 1
        prefix, shares = None, self._shares and shareable
        if shares and finds and len(tokens) > 1:
            if self._follows and any(promise.shared(request, tokens, salt, model.spec.page_size)
                                     > promise.have for promise in self._promised.values()):
                self.counts["follows"] += 1
                return None
            prefix = Prefix(list(tokens), salt=self._salt + salt, max_rows=len(tokens) - 1)
        if prefix is None and need > self._room(model):
            self._wait(request)
            return None
        if not self._opens:
            self._promised[request] = _Promise(need, 0)
            return 0
        state, matched = model.service._open(model.spec.model_id, secrets.token_hex(16), 0, prefix)
        self._free = -1.0, 0  # rows that were found are not free any more
        if need - state.length > self._room(model):
            model.service._release([state.sequence_id])
            self._wait(request)
            return None
        self.counts["asked"] += len(tokens) - 1 if prefix is not None else 0
        self.counts["found"] += state.length
        self._waiting[request] = _Waiting(state)
        self._forget_pairs(request)
        self._promised[request] = _Promise(need, state.length, tuple(tokens) if shares else (),
                                           salt)
        if shares:
            self._salts[request] = self._salt + salt
        if self._tells and prefix is not None and not salt:
            self._tell(model).admitted(self._link.client, request, state.sequence_id, tokens,
                                       state.length, matched.end)
        return state.length

    def _tell(self, model: Model) -> BlockEvents:
        """Events of the model as it is registered now."""
        if self._events is None or self._events.model_id != model.spec.model_id or (
                self._events.block_size != model.spec.page_size):
            if self._events is not None:
                self._events.close()
            self._events = BlockEvents(model.spec.model_id, model.spec.page_size)
        return self._events

    def _room(self, model: Model) -> int:
        """Rows that the pool has room for beyond what was promised."""
        asked, rows = self._free
        if self._now() - asked > ROOM_S:
            stats = model.service.stats()  # type: ignore[attr-defined]
            rows = free_groups(stats, model) * model.spec.page_size
            self._free = self._now(), rows
        page = model.spec.page_size
        promised = sum(-(-one.need // page) - -(-one.have // page)
                       for one in self._promised.values())
        return rows - promised * page

    def _forget_pairs(self, request: str) -> None:
        """The request does not wait any longer, and another one may come under its name."""
        for promise in self._promised.values():
            promise.pairs.pop(request, None)

    def _wait(self, request: str) -> None:
        self.counts["waits"] += 1
        self._waiting[request] = _Waiting(None, self._now() + WAIT_S)

    def _forget(self, request: str) -> None:
        """Releases what a request holds that will not be scheduled as it is."""
        waiting = self._waiting.pop(request, None)
        self._salts.pop(request, None)
        if waiting is None or waiting.state is None or self._link.client is None:
            return
        try:
            self._link.client._release([waiting.state.sequence_id])
        except FAILURES:
            pass  # its lease does it


class _Verdict:
    """What a question is answered with, each time it is asked."""

    def __init__(self, answer: Callable[[], bool]) -> None:
        self._answer = answer

    def __bool__(self) -> bool:
        return self._answer()


class Policy(str):
    """The name of a policy that an engine compares with `name` once, when it starts. What it gets
    for an answer holds only as long as `answer` does."""

    def __new__(cls, name: str, answer: Callable[[], bool]) -> "Policy":
        made = super().__new__(cls, name)
        made._name, made._verdict = str(name), _Verdict(answer)  # type: ignore[attr-defined]
        return made

    def __eq__(self, other: object) -> Any:
        return self._verdict if other == self._name else False  # type: ignore[attr-defined]

    __hash__ = str.__hash__
