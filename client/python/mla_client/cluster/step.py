"""A step over sequences of several servers: a sub-step on each of them.

Sequences are independent, so there is nothing to agree on between owners. Where an owner fails, its
rows fail and no others; what the others have computed and committed counts.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence as Seq, Tuple

import numpy as np
import numpy.typing as npt

from mla_client import arrays, errors
from mla_client.service import AttendFuture, Sequence, Service
from mla_client.service.gathering import APART
from mla_client.service.step import Step
from mla_client.shm import device as device_memory
from mla_client.types import AttendResult, Buffers, DType, Profile

# How often a step is divided again among servers, as drains move its sequences.
MOST_DIVISIONS = 4


class OwnersFailed(errors.Aborted):
    """Some owners of a step have failed, and others have not. `failed` maps each sequence of a
    failed owner to the owner's error. After attend, `result` has the outputs, with NaN in the
    rows of failed owners. After end, `lengths` has each sequence's length now, and None for
    sequences of failed owners until `Sequence.refresh` asks again."""

    def __init__(self, failed: Mapping[Sequence, errors.MlaError],
                 result: Optional[AttendResult] = None,
                 lengths: Optional[List[Optional[int]]] = None) -> None:
        owners = sorted({str(error) for error in failed.values()})
        super().__init__(
            f"the owners of {len(failed)} of the step's sequences have failed: "
            f"{'; '.join(owners)}", errors.ErrorDetail(field="sequences", got=str(len(failed)),
                                                       reason="owners_failed"))
        self.failed = dict(failed)
        self.result = result
        self.lengths = lengths

    def again(self) -> "OwnersFailed":
        return OwnersFailed(self.failed, self.result, self.lengths)


class _OwnersStep(Step):
    """A sub-step, which stays with its owner: where sequences have left that, the whole step is
    divided again, because their new server may have part in it."""

    @property
    def _follows(self) -> bool:
        return True

    def _at_service(self, deadline: float) -> bool:
        if not self._apart():
            return True
        raise errors.FailedPrecondition("step: a drain has moved sequences of it",
                                        errors.ErrorDetail(field="sequences", reason=APART))


class _Part:
    """The sub-step of one owner."""

    def __init__(self, step: Step, places: List[int], rows: npt.NDArray[np.int64]) -> None:
        self.step = step
        self.places = places  # of its sequences in the whole step
        self.rows = rows      # of the whole step, ascending
        self.error: Optional[errors.MlaError] = None

    def within(self, begin: int, count: int) -> Tuple[int, int]:
        """Its own rows that lie in [begin, begin + count) of the whole step."""
        first, last = np.searchsorted(self.rows, [begin, begin + count])
        return int(first), int(last)


class _Sent(NamedTuple):
    part: _Part
    at: npt.NDArray[np.int64]        # rows of the result
    future: Optional[AttendFuture]   # None: it could not be sent


class _Whole(AttendFuture):
    """The results of the owners as one."""

    def __init__(self, step: "ClusterStep", rows: int, shapes: "_Shapes", sent: List[_Sent]
                 ) -> None:
        self._step = step
        self._rows = rows
        self._shapes = shapes
        self._sent = sent
        self._result: Optional[AttendResult] = None

    def result(self) -> AttendResult:
        if self._result is None:
            self._result = self._gather()
        self._step.raise_failed(self._result)
        return self._result

    def done(self) -> bool:
        return self._result is not None or all(
            future is None or part.error is not None or future.done()
            for part, _, future in self._sent)

    def _gather(self) -> AttendResult:
        o, lse, lists = self._shapes.arrays(self._rows)
        timings: List[Any] = []
        for part, indices, future in self._sent:
            try:
                if future is None or part.error is not None:
                    raise part.error or errors.Aborted("the owner has failed")
                got = future.result()
            except errors.MlaError as error:
                self._step.fail(part, error)
                for array in (o, lse):
                    if array is not None:
                        array[indices] = _nothing(array)
                if lists is not None:
                    lists[indices] = -1
                continue
            for array, values in ((o, got.o), (lse, got.lse), (lists, got.lists)):
                if array is not None and values is not None:
                    array[indices] = _as(array, values)
            timings.extend(got.timings)
        return AttendResult(o, lse, timings, lists)


class _Shapes(NamedTuple):
    """Shapes of the outputs of one call."""

    o: Optional[Tuple[int, ...]]  # heads, o dim; in PROJECTED the latter alone
    heads: Optional[int]          # of the log-sum-exp
    top_k: int                    # of returned lists; 0: none
    out: Optional[Buffers]

    def arrays(self, rows: int) -> Tuple[Optional[npt.NDArray], Optional[npt.NDArray],
                                         Optional[npt.NDArray]]:
        if self.out is not None:
            o = self.out.o
            if o is not None and self.o is not None and o.ndim > 1 + len(self.o):
                o = o.squeeze(1)  # buffers of PROJECTED have one head
            return o, self.out.lse, None
        return (None if self.o is None else np.empty((rows, *self.o), np.float32),
                None if self.heads is None else np.empty((rows, self.heads), np.float32),
                np.empty((rows, self.top_k), np.int32) if self.top_k else None)


def _nothing(array: npt.NDArray) -> Any:
    """NaN in the array's type, in which uint16 are patterns of bf16."""
    return 0x7FC0 if array.dtype == np.uint16 else np.nan


def _as(array: npt.NDArray, values: npt.NDArray) -> npt.NDArray:
    if array.dtype == np.uint16 and values.dtype != np.uint16:
        from mla_client.bf16 import to_bf16
        return to_bf16(values)
    return values


class ClusterStep(Step):
    """Has the methods of Step, and is used like one. Made by `Cluster.step` where sequences have
    several owners.

    With `partial`, calls do not raise where some owners fail and others do not: `failed` says whose
    rows are NaN and stay uncommitted. Without it they raise OwnersFailed, which says the same."""

    def __init__(self, service: Service, rows: Seq[Tuple[Sequence, int]], participants: int,
                 lease_ms: int, step_id: Optional[int], stream_of: Callable[[Service], Any],
                 partial: bool, rotations: Optional[npt.NDArray] = None) -> None:
        super().__init__(service, rows, participants, lease_ms, step_id, None, rotations)
        self.partial = partial
        self._participants = participants
        self._lease_ms = lease_ms
        self._stream_of = stream_of
        self._divide()

    def _divide(self) -> None:
        """Makes the sub-steps of the servers that have the sequences now."""
        self.failed: Dict[Sequence, errors.MlaError] = {}
        self._told = 0
        ends = np.cumsum([0, *self.rows])
        owners: Dict[int, List[int]] = {}
        for place, sequence in enumerate(self.sequences):
            owners.setdefault(id(sequence.model.service), []).append(place)
        self._parts: List[_Part] = []
        for places in owners.values():
            owner = self.sequences[places[0]].model.service
            some = [(self.sequences[place], self.rows[place]) for place in places]
            own = np.concatenate([np.arange(ends[place], ends[place + 1])
                                  for place in places]).astype(np.int64)
            step = _OwnersStep(owner, some, self._participants, self._lease_ms, self.step_id,
                               self._stream_of(owner),
                               None if self.rotations is None else self.rotations[own])
            self._parts.append(_Part(step, places, own))

    @property
    def owners(self) -> int:
        """Servers that have part in it."""
        return len(self._parts)

    def begin(self, ahead: bool = False) -> "ClusterStep":
        """Begins the sub-steps. Where any fails and not `partial`, the others are aborted. Always
        waits for the answers. Sequences that a drain has moved are followed."""
        for division in range(MOST_DIVISIONS):
            self._begin_parts()
            if division + 1 == MOST_DIVISIONS or not any(
                    error.detail.reason == APART for error in self.failed.values()):
                break
            self._abort_others()
            self._divide()
        self.open = any(part.step.open for part in self._parts)
        self._handle = self if self.open else None
        if not self.open or (self.failed and not self.partial):
            self._abort_others()
            self.open = False
            raise OwnersFailed(self.failed)
        self.joined = max(part.step.joined for part in self._parts if part.error is None)
        return self

    def _begin_parts(self) -> None:
        for part in self._parts:
            try:
                part.step.begin()
            except errors.MlaError as error:
                self.fail(part, error)
            except BaseException:
                self._abort_others()
                raise

    def chain(self, out: Buffers, profile: Profile = Profile.EXPANDED, *,
              head_offset: int = 0) -> Any:
        """None: a GPU's stream waits for the words of one server."""
        return None

    def attend_async(self, layer: int, q: Optional[npt.NDArray], kv: Optional[npt.NDArray] = None,
                     profile: Profile = Profile.EXPANDED, *, row_begin: int = 0,
                     want_lse: bool = False, out: Optional[Buffers] = None, lists: Any = None,
                     index: Optional[Tuple[npt.NDArray, npt.NDArray]] = None,
                     want_lists: bool = False, entries: Optional[npt.NDArray] = None,
                     **options: Any) -> AttendFuture:
        """As Step's, with its options; the rows of each owner go there."""
        self._check_begun("attend")
        given = kv if q is None else q
        if given is None:
            raise errors.InvalidArgument("attend: needs q, kv or both")
        rows = len(given)
        if row_begin < 0 or row_begin + rows > self.total_rows:
            raise errors.InvalidArgument(
                f"attend.row_begin: got rows {row_begin}..{row_begin + rows}, must be within the "
                f"step's {self.total_rows}")
        if lists is not None and len(lists) != rows:
            raise errors.InvalidArgument(f"attend.lists: got {len(lists)} lists for {rows} rows")
        spec = self.model.spec
        if isinstance(given, device_memory.DeviceArray):
            raise errors.InvalidArgument("attend.out: memory of a GPU belongs to one server, and "
                                         f"the step has {self.owners}")
        if out is not None:  # as the buffers are made; the owners' own outputs are copied there
            if options.get("dtype") != DType.F8_E4M3:
                options["dtype"] = out.dtype
            options["o_dtype"] = (DType.BF16 if out.o is None or out.o.dtype == np.uint16
                                  else DType.F32)
        ends = (spec.entry_ends(layer, [one.length for one in self.sequences], self.rows)
                if entries is not None else None)
        sent: List[_Sent] = []
        for part in self._parts:
            first, last = part.within(row_begin, rows)
            if first == last:
                continue
            indices = part.rows[first:last] - row_begin
            if part.error is not None:
                sent.append(_Sent(part, indices, None))
                continue
            own = None
            if entries is not None and ends is not None:
                some = [np.arange(ends[row], ends[row + 1]) - ends[row_begin]
                        for row in part.rows[first:last]]
                own = arrays.floats("attend.entries", entries)[np.concatenate(some)]
            try:
                future: Optional[AttendFuture] = part.step.attend_async(
                    layer, _rows(q, indices), _rows(kv, indices), profile, row_begin=first,
                    want_lse=want_lse or (out is not None and out.lse is not None),
                    lists=None if lists is None else [lists[row] for row in indices],
                    index=None if index is None else (index[0][indices], index[1][indices]),
                    want_lists=want_lists, entries=own, **options)
            except errors.InvalidArgument:
                raise  # the call itself is wrong, for every owner
            except errors.MlaError as error:
                self.fail(part, error)
                future = None
            sent.append(_Sent(part, indices, future))
        heads = None if q is None else q.shape[1]
        o_dim = spec.geometry.o_dim(profile)
        o_shape: Tuple[int, ...] = () if profile == Profile.PROJECTED else (heads or 0,)
        shapes = _Shapes(None if heads is None else (*o_shape, o_dim),
                         heads if want_lse else None,
                         spec.top_k if want_lists and index is not None else 0, out)
        return _Whole(self, rows, shapes, sent)

    def end(self, committed: Optional[Seq[int]] = None, *,
            tails: Optional[Mapping[int, bytes]] = None) -> List[int]:
        """Commits each owner's rows; with `partial`, the lengths of sequences whose owner has
        failed are those before the step, as far as is known here."""
        self._check_begun("end")
        if committed is not None and len(committed) != len(self.rows):
            raise errors.InvalidArgument(
                f"end.committed: got {len(committed)} counts, must be {len(self.rows)}")
        lengths: List[Optional[int]] = [None] * len(self.sequences)
        for part in self._parts:
            if part.error is not None:
                continue
            kept = None if committed is None else [committed[place] for place in part.places]
            own = {index: tails[place] for index, place in enumerate(part.places)
                   if tails and place in tails}
            try:
                for place, length in zip(part.places, part.step.end(kept, tails=own or None)):
                    lengths[place] = length
            except errors.InvalidArgument:
                raise
            except errors.MlaError as error:
                self.fail(part, error)
        self.open = False
        if self.failed and not self.partial and self._told < len(self.failed):
            self._told = len(self.failed)
            raise OwnersFailed(self.failed, lengths=lengths)
        return [sequence.length if length is None else length
                for sequence, length in zip(self.sequences, lengths)]

    def abort(self) -> None:
        """Drops all sub-steps."""
        self._check_begun("abort")
        self.open = False
        self._abort_others()

    def fail(self, part: _Part, error: errors.MlaError) -> None:
        """An owner has failed: its rows count for nothing from now on."""
        if part.error is not None:
            return
        part.error = error
        for place in part.places:
            self.failed[self.sequences[place]] = error
        if part.step.open:
            part.step.open = False
            part.step.service._give_up(part.step)

    def raise_failed(self, result: AttendResult) -> None:
        """Raises OwnersFailed once for each failure that the caller was not told of."""
        if len(self.failed) == len(self.sequences):
            self.open = False
            raise OwnersFailed(self.failed, result)
        if not self.partial and self._told < len(self.failed):
            self._told = len(self.failed)
            raise OwnersFailed(self.failed, result)

    def _abort_others(self) -> None:
        for part in self._parts:
            if part.step.open:
                try:
                    part.step.abort()
                except errors.MlaError:
                    pass  # its lease ends it


class OwnedStep(Step):
    """A step of one owner. If a drain moves its sequences to several servers before it has begun,
    it becomes a ClusterStep."""

    def __init__(self, service: Service, rows: Seq[Tuple[Sequence, int]], participants: int,
                 lease_ms: int, step_id: Optional[int], stream_of: Callable[[Service], Any],
                 partial: bool, rotations: Optional[npt.NDArray] = None) -> None:
        super().__init__(service, rows, participants, lease_ms, step_id, stream_of(service),
                         rotations)
        self._made_of = (rows, participants, lease_ms, step_id, stream_of, partial, rotations)

    def begin(self, ahead: bool = False) -> Step:
        try:
            return super().begin(ahead)
        except errors.FailedPrecondition as error:
            if error.detail.reason != APART:
                raise
        made_of = self._made_of
        self.__class__ = ClusterStep  # type: ignore[assignment]
        self.__init__(self.sequences[0].model.service, *made_of)  # type: ignore[misc]
        return self.begin()


def _rows(array: Optional[npt.NDArray], indices: npt.NDArray[np.int64]) -> Optional[npt.NDArray]:
    if array is None:
        return None
    if len(indices) and indices[-1] - indices[0] + 1 == len(indices):
        # As a view: owners' rows mostly lie together.
        return array[int(indices[0]):int(indices[-1]) + 1]
    return array[indices]
