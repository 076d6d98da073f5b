"""Requests of SGLang as sequences of a service, without SGLang.

A request has an id and, while it runs, a slot of the engine's pool of requests. An attention
backend is told of passes alone: that a request has ended, or was put back, is seen by its slot,
which is free or another's.
"""

from __future__ import annotations

import threading
from typing import Callable, Dict, Iterable, Optional, Sequence as Seq, Set

from mla_client import errors
from mla_client.service import Model, Step
from mla_client.service.passes import Passes, Scheduled

STEP_LEASE_MS = 30_000
# An engine without work has no passes: so often its slots are looked at all the same.
LOOK_S = 5.0


class Requests:
    """The passes of one engine. `free_slots` lists the slots that no request has. A thread of its
    own releases requests that have ended while there are no passes."""

    def __init__(self, model: Model, free_slots: Callable[[], Iterable[int]]) -> None:
        self._passes = Passes(model, STEP_LEASE_MS)
        self._free_slots = free_slots
        self._slots: Dict[str, int] = {}
        self._empty = False  # the pass under way is without requests
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, args=(LOOK_S,),
                                        name="mla-requests", daemon=True)
        self._thread.start()

    def begin(self, scheduled: Seq[Scheduled], slots: Seq[int]) -> None:
        """Begins a pass with rows of these requests, in this order, each in its slot."""
        names = [each.request for each in scheduled]
        if not len(names) == len(set(names)) == len(slots) == len(set(slots)):
            raise errors.FailedPrecondition(
                f"requests {names} in slots {list(slots)}: each needs an id and a slot of its own")
        with self._lock:
            self._empty = False
            gone = self._gone(dict(zip(slots, names)))
            for each, slot in zip(scheduled, slots):
                self._check(each, slot, gone)
            self._slots.update(zip(names, slots))
            self._passes.begin(scheduled, gone)
            for name in gone.difference(names):
                del self._slots[name]

    def begin_empty(self) -> None:
        """Begins a pass of the engine's own, to warm up or to measure: it stores no rows."""
        with self._lock:
            if self._slots:
                raise errors.FailedPrecondition(
                    f"a pass without ids of its requests, while {len(self._slots)} are running")
            self._passes.begin(())
            self._empty = True

    def step_at(self, layer: int, rows: int) -> Optional[Step]:
        """The step in which a layer attends with so many rows; None: the pass is an empty one."""
        if self._empty:
            return None
        step = self._passes.step
        if step is None or layer != self._passes.layers_done:
            raise errors.FailedPrecondition(
                f"layer {layer}: must be {self._passes.layers_done} of a pass that has begun")
        if rows != step.total_rows:
            raise errors.FailedPrecondition(
                f"layer {layer}: got {rows} rows, must be the {step.total_rows} of the requests")
        return step

    def layer_done(self) -> None:
        """A layer has its outputs; with the last one the pass ends."""
        with self._lock:
            if self._passes.layer_done():
                self._passes.end()

    def close(self) -> None:
        """Releases all sequences and ends the thread."""
        self._closed.set()
        self._thread.join()
        with self._lock:
            self._slots.clear()
            self._passes.close()

    def _check(self, each: Scheduled, slot: int, gone: Set[str]) -> None:
        """FailedPrecondition unless the server has exactly the rows that the engine counts. A
        request that starts with none begins again, if it had some."""
        name, known = each.request, self._slots.get(each.request)
        if name not in gone and known not in (None, slot):
            raise errors.FailedPrecondition(f"request {name}: in slot {slot}, and in {known}")
        length = 0 if name in gone else self._passes.length(name) or 0
        if each.computed not in (0, length):
            raise errors.FailedPrecondition(
                f"request {name}: {each.computed} tokens are computed for the engine, {length} on "
                "the server: turn its radix cache off")

    def _gone(self, taken: Dict[int, str]) -> Set[str]:
        """Requests whose slot is free, or `taken` by another one."""
        free = set(self._free_slots())
        return {name for name, slot in self._slots.items()
                if slot in free or taken.get(slot, name) != name}

    def _look(self, look_s: float) -> None:
        while not self._closed.wait(look_s):
            with self._lock:
                for name in self._gone({}):
                    del self._slots[name]
                    try:
                        self._passes.release([name])
                    except errors.MlaError:
                        pass  # its lease is renewed no longer
