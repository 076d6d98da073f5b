"""The rows of a batch that `generate()` drives, kept as sequences and steps of a service.

A batch has `batch` rows of one `length`, like a tensor. A mask says which positions of a row are
real and which are padding. Only real positions are sent. Rows with the same tokens up to now share
a sequence, which is forked when they differ: a prompt that is continued several times is computed
once, and reordering beams only moves labels.

A forward pass is a step. It ends when the next pass begins, when the cache is cropped (which keeps
a prefix of its rows), or after it has been idle for a while (`end_if_idle`).

numpy only: neither torch nor transformers.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from typing import Any, Dict, List, Optional, Protocol, Tuple

import numpy as np
import numpy.typing as npt

from mla_client import errors
from mla_client.service import Model, Sequence, Service, Step
from mla_client.serving.faults import FAILURES

Bools = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]


class Forward:
    """A forward pass: which of its rows are sent, and where their outputs belong.

    Rows are numbered in the flattened batch, `row * new + position`.
    """

    def __init__(self, begin: int, real: Bools, groups: Indices, heads: List[int]) -> None:
        """`begin`: positions before. real [batch, new]. groups [batch]: the sequence of each row.
        heads: for each sequence the first of its rows."""
        new = real.shape[1]
        flat = np.arange(real.size).reshape(real.shape)
        self.begin = begin
        self.new = new
        self.real = real
        self.sent = real[heads]                             # [sequences, new]
        self.take: Indices = flat[heads][self.sent]          # [rows sent], of the flattened batch
        number = np.cumsum(self.sent).reshape(self.sent.shape) - 1
        self.give: Indices = flat[real]                      # [outputs], of the flattened batch
        self.source: Indices = number[groups][real]          # [outputs], of the rows sent
        self.plain = len(self.take) == real.size             # every row is sent as it lies
        self.step: Optional[Step] = None                     # None: nothing to send
        self.stepped = np.flatnonzero(self.sent.any(axis=1))  # sequences that the step has
        self.layers = 0                                      # finished layers
        self.done_at = 0.0


class RemoteBatch:
    """Rows, sequences and the step of one cache. A lock makes `end_if_idle` and `release` safe
    while the generating thread runs; everything else belongs to that thread."""

    def __init__(self, model: Model, step_lease_ms: int) -> None:
        self._model = model
        self._lease_ms = step_lease_ms
        self._lock = threading.RLock()
        self._sequences: List[Sequence] = []
        self._group: Indices = np.zeros(0, np.int64)  # [batch]: the sequence of each row
        self._real: Bools = np.zeros((0, 0), bool)    # [batch, length]
        self._forward: Optional[Forward] = None
        self._failure: Optional[errors.MlaError] = None  # from a step that ended while idle

    @property
    def length(self) -> int:
        """Positions of every row, padding included."""
        return self._real.shape[1]

    @property
    def size(self) -> int:
        """Rows of the batch."""
        return len(self._group)

    @property
    def sequences(self) -> int:
        """Sequences on the server now."""
        return len(self._sequences)

    def begin(self, batch: int, new: int, mask: Optional[Bools] = None,
              tokens: Optional[npt.NDArray] = None,
              rotations: Optional[npt.NDArray] = None) -> Forward:
        """Begins a pass of `new` positions for each of `batch` rows.

        mask [batch, length + new] is true at real positions; None: all are real. tokens [batch,
        any] are the tokens of the rows, by which equal rows are found; None: no two rows are equal.
        rotations [batch * new, rope]: of all positions, for a model of PROJECTED.
        """
        with self._lock:
            self._settle()
            real = self._checked(batch, new, mask)
            if not self._sequences:
                self._sequences = [self._model.open_sequence()]
                self._group = np.zeros(batch, np.int64)
                self._real = np.zeros((batch, 0), bool)
            heads, groups = self._parted(real, tokens)
            self._branch(heads, groups)
            forward = Forward(self.length, real, groups, heads)
            entries = [(self._sequences[at], int(forward.sent[at].sum()))
                       for at in forward.stepped]
            if entries:
                if rotations is not None and not forward.plain:
                    rotations = rotations[forward.take]
                forward.step = self._model.service.step(entries, lease_ms=self._lease_ms,
                                                        rotations=rotations).begin()
            self._forward = forward
            return forward

    def layer_done(self, forward: Forward) -> None:
        """A layer of the pass has its outputs; after the last one its rows count."""
        with self._lock:
            forward.layers += 1
            if forward.layers == self._model.spec.layers:
                self._real = np.concatenate([self._real, forward.real], axis=1)
                forward.done_at = time.monotonic()

    def crop(self, remove: int) -> None:
        """Drops the last `-remove` positions of every row; `remove` > 0 is the length to keep, as
        transformers' older form has it."""
        with self._lock:
            keep = self.length + remove if remove <= 0 else min(remove, self.length)
            if keep < 0:
                raise errors.InvalidArgument(
                    f"crop: got {remove}, the cache has {self.length} positions")
            self._end(keep)
            self._real = self._real[:, :keep]
            for sequence, rows in zip(self._sequences, self._rows_of()):
                if sequence.length > rows:
                    sequence.truncate(rows)

    def select(self, rows: Indices) -> None:
        """The batch becomes these rows of the present one; rows may repeat. Sequences follow with
        the next pass."""
        with self._lock:
            self._group = self._group[rows]
            self._real = self._real[rows]

    def reset(self) -> None:
        """Empties the cache."""
        with self._lock:
            self._forward = self._failure = None  # a step goes with its sequences
            self._drop(self._sequences)
            self._sequences = []
            self._group = np.zeros(0, np.int64)
            self._real = np.zeros((0, 0), bool)

    def end_if_idle(self, idle_s: float) -> None:
        """Ends a finished step if it has been idle for this long; a failure is kept for the next
        call of the generating thread."""
        with self._lock:
            forward = self._forward
            if (forward is None or not self._finished(forward)
                    or time.monotonic() - forward.done_at < idle_s):
                return
            try:
                self._settle()
            except errors.MlaError as error:
                self._failure = error

    def _finished(self, forward: Forward) -> bool:
        return forward.layers == self._model.spec.layers

    def _settle(self) -> None:
        """Ends the step of the last pass."""
        self._end(self.length)

    def _end(self, keep: int) -> None:
        """Ends the step of the last pass, of which positions before `keep` stay."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure.again()
        forward = self._forward
        if forward is None:
            return
        if not self._finished(forward):
            raise errors.FailedPrecondition(
                f"the last forward pass ended after {forward.layers} of {self._model.spec.layers} "
                "layers: this cache cannot go on, begin a new one")
        self._forward = None
        if forward.step is None:
            return
        kept = forward.sent[forward.stepped, :max(0, keep - forward.begin)].sum(axis=1)
        if kept.any():
            forward.step.end(kept)
        else:
            forward.step.abort()

    def _rows_of(self) -> List[int]:
        """Rows that each sequence must have; sequences that no row of the batch uses keep theirs.
        """
        rows = [sequence.length for sequence in self._sequences]
        for row, group in enumerate(self._group):
            rows[group] = int(self._real[row].sum())
        return rows

    def _checked(self, batch: int, new: int, mask: Optional[Bools]) -> Bools:
        """The mask of the new positions [batch, new]."""
        if self._sequences and batch != len(self._group):
            raise errors.InvalidArgument(
                f"the batch has {batch} rows, the cache {len(self._group)}")
        if self._rows_of() != [sequence.length for sequence in self._sequences]:
            raise errors.FailedPrecondition(
                "the server has not kept the rows of the last pass: begin a new cache")
        if mask is None:
            mask = np.ones((batch, self.length + new), bool)
        if mask.shape != (batch, self.length + new):
            raise errors.InvalidArgument(
                f"attention_mask: got {mask.shape}, must be {(batch, self.length + new)}: the "
                f"cache has {self.length} positions and the pass {new}")
        if self._sequences and not np.array_equal(mask[:, :self.length], self._real):
            raise errors.Unimplemented(
                "attention_mask: it changes for positions that are in the cache already, which the "
                "server cannot mask any more")
        return mask[:, self.length:]

    def _parted(self, real: Bools, tokens: Optional[npt.NDArray]) -> Tuple[List[int], Indices]:
        """Rows that had one sequence and get the same stay together: the first row of each group,
        and the group of each row [batch]."""
        heads: List[int] = []
        groups = np.zeros(len(real), np.int64)
        known: Dict[Tuple, int] = {}
        for row, mask in enumerate(real):
            what = row if tokens is None else tokens[row].tobytes()
            key = (self._group[row], mask.tobytes(), what)
            groups[row] = known.setdefault(key, len(heads))
            if groups[row] == len(heads):
                heads.append(row)
        return heads, groups

    def _branch(self, heads: List[int], groups: Indices) -> None:
        """Gives each group its own sequence, and releases sequences that no row uses."""
        sequences: List[Sequence] = []
        branches: List[Sequence] = []
        try:
            for row in heads:
                sequence = self._sequences[self._group[row]]
                if sequence in sequences:
                    sequence = (sequence.fork() if sequence.length
                                else self._model.open_sequence())
                    branches.append(sequence)
                sequences.append(sequence)
        except errors.MlaError:
            self._drop(branches)
            raise
        left = [sequence for sequence in self._sequences if sequence not in sequences]
        self._sequences, self._group = sequences, groups
        self._drop(left)

    def _drop(self, sequences: List[Sequence]) -> None:
        """Releases sequences in one call of each server that has some."""
        ids: Dict[Service, List[int]] = {}
        for sequence in sequences:
            if not sequence.released:
                ids.setdefault(sequence.model.service, []).append(sequence.id)
            sequence.released = True
        for service, there in ids.items():
            service._release(there)


class Kept(Protocol):
    """What a Keeper watches over: the rows of one cache."""

    batch: RemoteBatch

    def release(self) -> None:
        """Releases the sequences on the server, and what else belongs to the cache."""


class Keeper:
    """A thread that releases caches which were dropped, and ends steps that nothing has
    followed."""

    def __init__(self, name: str, idle_s: float) -> None:
        self._idle_s = idle_s
        self._dropped: "queue.SimpleQueue[Optional[Kept]]" = queue.SimpleQueue()
        self._kept: "weakref.WeakSet[Kept]" = weakref.WeakSet()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def keep(self, cache: Any, rows: Kept) -> None:
        """Watches over the rows of a cache until the cache is dropped."""
        self._kept.add(rows)
        # The queue may be used from a finalizer, which runs at any point of any thread.
        weakref.finalize(cache, self._dropped.put, rows).atexit = False

    def close(self) -> None:
        """Releases all rows and ends the thread."""
        self._dropped.put(None)
        self._thread.join()
        for rows in list(self._kept):
            _release(rows)

    def _run(self) -> None:
        while True:
            try:
                dropped = self._dropped.get(timeout=self._idle_s / 2)
                if dropped is None:
                    return
                self._kept.discard(dropped)
                _release(dropped)
                del dropped
            except queue.Empty:
                pass
            for rows in list(self._kept):
                rows.batch.end_if_idle(self._idle_s)


def _release(rows: Kept) -> None:
    try:
        rows.release()
    except FAILURES:
        pass  # the client is closed or the server gone: the leases free the sequences
