"""Steps: rows that are added to sequences, layer by layer."""

from __future__ import annotations

import operator
import secrets
import time
from typing import TYPE_CHECKING, Any, Callable, List, Mapping, Optional, Sequence as Seq, Tuple

import numpy as np
import numpy.typing as npt

from mla_client import arrays, errors, wire
from mla_client.base import deadlines
from mla_client.service import projected
from mla_client.service.gathering import gather
from mla_client.shm import device as device_memory
from mla_client.types import AttendArgs, AttendResult, Buffers, DType, Geometry, ModelSpec, Profile

if TYPE_CHECKING:
    from mla_client.service import AttendFuture, Sequence, Service


class Step:
    """Rows that are added to sequences, layer by layer, and committed together.

    The rows of a step are the rows of its sequences, concatenated in order. A `with` block begins
    the step; leaving it commits all rows unless `end` or `abort` was called inside, and an
    exception aborts it.
    """

    def __init__(self, service: Service, rows: Seq[Tuple[Sequence, int]], participants: int,
                 lease_ms: int, step_id: Optional[int], stream: Any,
                 rotations: Optional[npt.NDArray] = None) -> None:
        if not rows:
            raise errors.InvalidArgument("step: needs at least one sequence")
        spec = rows[0][0].model.spec
        for one, _ in rows:
            if one.model.spec is not spec and one.model.spec != spec:
                raise errors.InvalidArgument("step: all sequences must be of one model")
        self.rows = [count for _, count in rows]
        wire.check_numbers("step.rows", self.rows)
        wire.check_number("step.participants", participants)
        wire.check_number("step.lease_ms", lease_ms)
        wire.check_number("step.step_id", step_id or 0, wire.LARGEST_POSITION)
        self.service = service
        self.model = rows[0][0].model
        self.sequences = [sequence for sequence, _ in rows]
        self.total_rows = sum(self.rows)
        self.rotations = projected.rotations_of(spec, rotations, self.total_rows)
        self.participants = participants
        self.lease_ms = lease_ms
        self.step_id = secrets.randbits(63) if step_id is None else step_id
        self.stream = stream
        self.open = False
        self.joined = 1  # participants when this one came; the first, and it alone, ends the step
        self._handle: Any = None
        self._chains: List[Any] = []
        # `finish` has ended it with all rows; its end keeps all; its begin was a call of the chain.
        self._whole = self._keeps_all = self._by_chain = False
        self._beginning: Optional[Callable[[], None]] = None  # these wait for answers to a begin
        self._ending: Optional[Callable[[], List[int]]] = None  # and an end that went ahead

    def __repr__(self) -> str:
        return (f"<Step {self.step_id:#x}, {self.total_rows} rows, "
                f"{'open' if self.open else 'not open'}>")

    def __enter__(self) -> Step:
        try:
            self.begin()
        except errors.MlaError:
            raise
        except BaseException:  # an interrupt: no `with` block will end the step
            self._give_up()
            raise
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        try:
            if not self.open:
                return
            if kind is None:
                self.end()
                return
            try:
                self.abort()
            except errors.MlaError:
                pass  # the exception that is under way says more; the step's lease ends the rest
        except BaseException:  # nothing else will end the step
            self._give_up()
            raise

    def begin(self, ahead: bool = False) -> Step:
        """Begins the step: the server reserves pages for all rows of all layers, or fails as a
        whole. After an interrupt (Ctrl-C) it is not open: if it had begun, it ends soon.

        With `ahead` it does not wait for the answer where calls can be chained: `collect`, `end` or
        `finish` raises a refusal, and the step's calls have failed then. Sequences that have moved
        to another server are not followed."""
        try:
            if not (ahead and self._begin_ahead()):
                self._begin()
        except errors.MlaError:
            raise
        except BaseException:  # an interrupt, which may have come after the step had begun
            self._give_up()
            raise
        return self

    def go_on(self) -> bool:
        """Becomes the step that follows this one, which `finish` has ended with all of its rows: as
        many rows again of the same sequences. It begins as with `begin(ahead=True)`, in a fraction
        of the time, and has the chain of this one. Returns False if it has not begun."""
        whole, self._whole = self._whole, False
        if not (whole and len(self._chains) == 1 and self.service._go_on(self)):
            return False
        self.open = self._by_chain = True
        return True

    def _give_up(self) -> None:
        """It is not open any more, or soon is not: nothing is known of the server's side."""
        self.open = False
        self.service._give_up(self)

    def _begin_ahead(self) -> bool:
        """Returns true if the begin is under way."""
        if self.participants > 1:
            return False
        self.service = self.sequences[0].model.service
        sent = self.service._begin_ahead(self)
        if sent is None:
            return False
        self._handle, self._beginning = sent
        self.open = True
        return True

    def _settle(self) -> None:
        """Waits for the answer to a begin that went ahead."""
        wait, self._beginning = self._beginning, None
        if wait is None:
            return
        try:
            wait()
        except errors.MlaError:
            self.open = False
            raise

    def _begin(self) -> None:
        deadline = time.monotonic() + self.service.timeout_s
        while not self.open:
            if not self._at_service(deadline):
                continue
            try:
                self._handle = self.service._begin(self)
                self.open = True
            except errors.MlaError as error:
                if isinstance(error, errors.DeadlineExceeded):
                    self.service._give_up(self)  # it may still begin
                if not self._follows:
                    raise  # its stream is of the server that they have left
                self.service._follow(self.sequences, error, deadline)

    @property
    def _follows(self) -> bool:
        """True if it looks for sequences that have moved."""
        return self.stream is None

    def _apart(self) -> bool:
        """Returns true if a sequence is at another server than the step."""
        return any(one.model.service is not self.service for one in self.sequences)

    def _at_service(self, deadline: float) -> bool:
        """Returns true if the sequences are at the step's server. Otherwise gathers them."""
        if self.stream is not None:
            return True
        self.service = self.sequences[0].model.service  # they may have moved since
        if not self._apart():
            return True
        gather(self.sequences, deadline)
        return False

    def chain(self, out: Buffers, profile: Profile = Profile.EXPANDED, *,
              head_offset: int = 0) -> Any:
        """Returns an object that makes calls with the tensors of `out`, for which a GPU's stream
        waits and no thread. Call its `attend(layer, stream)` for one layer after another; `stream`
        is a handle like `torch.cuda.Stream.cuda_stream`. Put the work that writes kv and q on the
        stream before the call, and the work that reads o after it. The outputs are known to be good
        once `end` or `collect` has returned; until then no result of them may leave the worker.

        None where calls can not be chained: without the C library (mla_client.native), or with
        buffers in memory for which the server or the GPU's driver offers none. All calls of a
        stream of steps that are under way are chained, on one GPU stream, or none is."""
        self._check_begun("chain")
        chain = self.service._chain(self, out, profile, head_offset)
        if chain is not None:
            self._chains.append(chain)
        return chain

    def replay(self, captured: Any, graph_exec: int, gpu_stream: int) -> None:
        """Sends the calls that a graph has captured (`Service.capture`), as calls of this step.
        Launch `graph_exec` next, once, on that stream: the handle of an instance of the graph, as
        `torch.cuda.CUDAGraph.raw_cuda_graph_exec` gives it. The graph itself, whose nodes change
        with each launch, must still be there. It must not be launched if this raises.
        As for a chain, `end` or `collect` says whether the outputs are good."""
        self._check_begun("replay")
        captured.replay(self.step_id, graph_exec, gpu_stream)
        if captured not in self._chains:
            self._chains.append(captured)

    def collect(self) -> None:
        """Waits for all chained calls so far. Raises the error of the first that has failed."""
        first: Optional[errors.MlaError] = None
        for wait in (self._settle, *(chain.collect for chain in self._chains)):
            try:
                wait()
            except errors.MlaError as error:
                first = first or error
        if first is not None:
            raise first

    def attend(self, layer: int, q: Optional[npt.NDArray], kv: Optional[npt.NDArray] = None,
               profile: Profile = Profile.EXPANDED, *, row_begin: int = 0, head_offset: int = 0,
               want_lse: bool = False, dtype: DType = DType.BF16, o_dtype: DType = DType.BF16,
               kv_row_dtype: Optional[DType] = None, timeout_s: Optional[float] = None,
               out: Optional[Buffers] = None) -> AttendResult:
        """Stores KV rows and computes attention at one layer; see `attend_async`."""
        return self.attend_async(layer, q, kv, profile, row_begin=row_begin,
                                 head_offset=head_offset, want_lse=want_lse, dtype=dtype,
                                 o_dtype=o_dtype, kv_row_dtype=kv_row_dtype,
                                 timeout_s=timeout_s, out=out).result()

    def attend_sparse(self, layer: int, q: npt.NDArray, lists: Any,
                      kv: Optional[npt.NDArray] = None, profile: Profile = Profile.EXPANDED,
                      **options: Any) -> AttendResult:
        """Stores KV rows and computes sparse attention; see `attend_sparse_async`."""
        return self.attend_sparse_async(layer, q, lists, kv, profile, **options).result()

    def attend_sparse_async(self, layer: int, q: npt.NDArray, lists: Any,
                            kv: Optional[npt.NDArray] = None,
                            profile: Profile = Profile.EXPANDED, **options: Any) -> AttendFuture:
        """As `attend_async`, with its options, except that row i attends only to the positions of
        `lists[i]`: positions of its own sequence, from 0 to its own. -1 is padding, and a repeated
        position counts once; a row without positions has output 0 and lse -inf.

        `lists` is an array [n, width] or n arrays of any length, none longer than the model's
        top_k. It is copied.
        """
        return self.attend_async(layer, q, kv, profile, lists=lists, **options)

    def attend_indexed(self, layer: int, q: npt.NDArray, index_queries: npt.NDArray,
                       head_weights: npt.NDArray, kv: Optional[npt.NDArray] = None,
                       profile: Profile = Profile.EXPANDED, *, want_lists: bool = False,
                       **options: Any) -> AttendResult:
        """Stores KV rows and computes sparse attention; see `attend_indexed_async`."""
        return self.attend_indexed_async(layer, q, index_queries, head_weights, kv, profile,
                                         want_lists=want_lists, **options).result()

    def attend_indexed_async(self, layer: int, q: npt.NDArray, index_queries: npt.NDArray,
                             head_weights: npt.NDArray, kv: Optional[npt.NDArray] = None,
                             profile: Profile = Profile.EXPANDED, *, want_lists: bool = False,
                             **options: Any) -> AttendFuture:
        """As `attend_async`, with its options, where the server's indexer chooses what each row
        attends to: the top_k positions s that it sees of largest
        sum(head_weights * relu(index_queries @ key[s])), of equal ones the lower.

        `index_queries` [n, index_heads, index_dim] travel as `dtype`, `head_weights`
        [n, index_heads] as float32. With `want_lists` the result has the lists."""
        return self.attend_async(layer, q, kv, profile, index=(index_queries, head_weights),
                                 want_lists=want_lists, **options)

    def attend_window(self, layer: int, q: npt.NDArray, kv: Optional[npt.NDArray] = None,
                      entries: Optional[npt.NDArray] = None, lists: Any = None,
                      **options: Any) -> AttendResult:
        """Stores KV rows and entries, and attends to the window; see `attend_window_async`."""
        return self.attend_window_async(layer, q, kv, entries, lists, **options).result()

    def attend_window_async(self, layer: int, q: npt.NDArray, kv: Optional[npt.NDArray] = None,
                            entries: Optional[npt.NDArray] = None, lists: Any = None,
                            **options: Any) -> AttendFuture:
        """As `attend_async` in ABSORBED, with its options, for models with "sparse_v4": the row at
        position p attends to the last `window` rows up to its own, to entries and to its heads'
        sinks.

        With kv come the `entries` [n, row dim] that these rows complete at the layer, in order
        (`ModelSpec.entry_ends` counts them): entry c with position (c + 1) * ratio - 1. A row
        attends to all complete entries, or to the entries of `lists[i]`, as in
        `attend_sparse_async`. The output has row dim elements; the log-sum-exp is without the sink.
        """
        return self.attend_async(layer, q, kv, Profile.ABSORBED, lists=lists, entries=entries,
                                 **options)

    def attend_async(self, layer: int, q: Optional[npt.NDArray], kv: Optional[npt.NDArray] = None,
                     profile: Profile = Profile.EXPANDED, *, row_begin: int = 0,
                     head_offset: int = 0, want_lse: bool = False, dtype: DType = DType.BF16,
                     o_dtype: DType = DType.BF16, kv_row_dtype: Optional[DType] = None,
                     timeout_s: Optional[float] = None, out: Optional[Buffers] = None,
                     lists: Any = None, index: Optional[Tuple[npt.NDArray, npt.NDArray]] = None,
                     want_lists: bool = False, entries: Optional[npt.NDArray] = None
                     ) -> AttendFuture:
        """Sends rows [row_begin, row_begin + n) of the step at `layer` and returns a future.

        q [n, heads, q dim], or [n, q_lora_rank] for PROJECTED, and kv [n, row dim] are float
        arrays, or uint16 arrays of bf16 patterns.
        In a model with an indexer, kv has the index keys after the rows. `dtype` is the type as
        sent. With DType.F8_E4M3 queries are sent as 8-bit floats (half the bytes, each value off by
        up to 1/16 of itself; capability "fp8_wire"). KV rows are then sent as bf16, unless
        `kv_row_dtype` is DType.F8_E4M3, which may be combined with any dtype. Row ranges of a layer
        must be sent in order, and exactly one of the head slices of a row range brings its kv. With
        APPEND_ONLY q must be None.

        With `out` (see `Service.buffers`) the outputs are written there, in its types, and its kv
        and q may be passed as kv and q. After DeadlineExceeded they may still be in use. `lists`:
        see `attend_sparse_async`; `index` and `want_lists`: see `attend_indexed_async`; `entries`:
        see `attend_window_async`.
        """
        self._check_begun("attend")
        geometry = self.model.spec.geometry
        q, kv = _values("attend.q", q), _values("attend.kv", kv)
        rows_alone = profile == Profile.PROJECTED
        if rows_alone and q is not None and q.ndim == 2:
            q = q[:, None]  # as one head
        device_memory.check_call(q, kv, out, lists, self.model.spec)
        given = kv if q is None else q
        if given is None:
            raise errors.InvalidArgument("attend: needs q, kv or both")
        rows = len(given) if given.ndim else 0
        heads = 0 if q is None else (q.shape[1] if q.ndim == 3 else 0)
        _check_queries(geometry, Profile(profile), q, rows, heads)
        if rows_alone:
            projected.check_call(want_lse, head_offset, dtype)
        if kv is not None:
            wire.check_shape("attend.kv", kv, (rows, self.model.spec.sent_row_dim))
        for field, number, count in (("layer", layer, 0), ("row_begin", row_begin, rows),
                                     ("head_offset", head_offset, heads)):
            wire.check_number("attend." + field, number, wire.LARGEST - count)
        if out is not None:
            wire.check_shape("attend.out.o", out.o,
                             None if q is None else (rows, heads, geometry.o_dim(profile)))
            want_lse = out.lse is not None
            dtype = dtype if dtype == DType.F8_E4M3 else out.dtype
            o_dtype = DType.BF16 if out.o is None or out.o.dtype == np.uint16 else DType.F32
        # Type after decoding on the server.
        base = DType.BF16 if dtype == DType.F8_E4M3 else DType(dtype)
        spec, inputs = self.model.spec, _inputs(lists, index, rows, self.model.spec, base)
        if timeout_s is None:
            timeout_s = self.service.timeout_s
        q_parts = geometry.q_parts(profile) if dtype == DType.F8_E4M3 and q is not None else ()
        kv_parts = wire.kv_parts(kv_row_dtype, base, spec)
        ends = None
        if spec.window > 0 or entries is not None:
            of_step = spec.entry_ends(layer, [s.length for s in self.sequences], self.rows)
            kv, ends = wire.with_entries(spec, kv, arrays.floats("attend.entries", entries),
                                         of_step[row_begin:row_begin + rows + 1], kv_parts)
        args = AttendArgs(layer, Profile(profile), row_begin, rows, head_offset, heads,
                          q, kv, want_lse, base, wire.output_dtype(o_dtype),
                          deadlines.checked("attend.timeout_s", timeout_s), out, inputs,
                          index is not None,
                          spec.top_k if want_lists and index is not None else 0,
                          q_parts, kv_parts if kv is not None else (), ends)
        return self.service._attend(self, args)

    def end(self, committed: Optional[Seq[int]] = None, *,
            tails: Optional[Mapping[int, bytes]] = None) -> List[int]:
        """Commits the first `committed` rows of each sequence (None: all); returns lengths.

        `tails`, of sequences by their place in the step: bytes of the model's `tail_bytes` each,
        for the lengths that this commits. They replace earlier tails (Sequence.read_tail). If the
        server has no room for them (ResourceExhausted), the step stays open and may be ended
        without them.

        It follows chained calls without waiting for them. If one of them failed, it raises the
        error of the first, whether the step was committed or not.

        After an interrupt (Ctrl-C) the rows may be committed or dropped: Sequence.refresh tells."""
        self._check_begun("end")
        try:
            return self._end(committed, tails or {})
        except (errors.MlaError, TypeError):
            raise
        except BaseException:  # an interrupt, which may have come before the end was sent
            self._give_up()
            raise

    def end_ahead(self, committed: Optional[Seq[int]] = None) -> None:
        """Ends the step like `end`, without waiting for the answer where calls can be chained.
        `finish` waits for it; until then the sequences' lengths are those of before, and nothing
        else may be done with the sequences."""
        self._check_begun("end")
        try:
            self._keeps_all = committed is None
            if self._by_chain and self._keeps_all:
                self._chains[0].end()  # which checks the lengths
                self._ending = lambda: [sequence.length + rows for sequence, rows in zip(
                    self.sequences, self.rows)]
            else:
                self._ending = self.service._end_ahead(self, self._counts(committed))
            if self._ending is None:
                self._end(committed, {})
        except errors.MlaError:
            raise
        except BaseException:  # an interrupt, which may have come before the end was sent
            self._give_up()
            raise
        self.open = False

    def finish(self) -> None:
        """Waits for the end that went ahead, and all calls before it. Raises the error of the first
        call that has failed, whether the step was committed or not."""
        wait, self._ending = self._ending, None
        lengths: Optional[List[int]] = None
        failure: Optional[errors.MlaError] = None
        try:
            lengths = wait() if wait is not None else None
        except errors.MlaError as error:
            failure = error
        self.collect()  # a call that has failed says more
        if failure is not None:
            raise failure
        for sequence, length in zip(self.sequences, lengths or []):
            sequence.length = length
        self._whole = lengths is not None and self._keeps_all

    def _counts(self, committed: Optional[Seq[int]]) -> Optional[List[int]]:
        # Arrays are sequences too, but have no truth value.
        kept = None if committed is None else [_count(count) for count in committed]
        if kept is not None and len(kept) != len(self.rows):
            raise errors.InvalidArgument(
                f"end.committed: got {len(kept)} counts, must be {len(self.rows)}, one for each "
                "sequence, or None", errors.ErrorDetail(
                    field="end.committed", got=str(len(kept)), limit=str(len(self.rows))))
        wire.check_numbers("end.committed", kept or [])
        return kept

    def _end(self, committed: Optional[Seq[int]], tails: Mapping[int, bytes]) -> List[int]:
        kept = self._counts(committed)
        sent = sorted(tails.items())
        tail_bytes = self.model.spec.tail_bytes
        for place, tail in sent:
            if not 0 <= place < len(self.rows) or len(tail) != tail_bytes or not tail_bytes:
                raise errors.InvalidArgument(
                    f"end.tails: got {len(tail)} bytes for sequence {place}, must be {tail_bytes} "
                    f"for one of 0..{len(self.rows) - 1}")
        try:
            lengths = self.service._end(self, kept, sent)
        except errors.MlaError:
            self.collect()  # a call that has failed says more
            raise
        self.open = False
        self.collect()
        for sequence, length in zip(self.sequences, lengths):
            sequence.length = length
        return lengths

    def abort(self) -> None:
        """Drops the step; the sequences are as they were before it."""
        self._check_begun("abort")
        try:
            self._settle()
        except errors.MlaError:
            return  # it never began
        self.open = False
        self.service._abort(self)

    def _check_begun(self, what: str) -> None:
        if self._handle is None:
            raise errors.FailedPrecondition(
                f"{what}: the step has not begun: use it in a `with` block, or call begin()")


def _inputs(lists: Any, index: Optional[Tuple[npt.NDArray, npt.NDArray]], rows: int,
            spec: ModelSpec, base: DType) -> Optional[npt.NDArray]:
    """Index lists as sent, or the inputs of the server's indexer."""
    if index is None:
        return None if lists is None else wire.index_lists(lists, rows, spec)
    if lists is not None:
        raise errors.InvalidArgument("attend.lists: not together with index queries")
    return wire.index_inputs(*index, rows, spec, base)


def _count(count: Any) -> int:
    """A number of rows: neither a part of one nor a mask."""
    if isinstance(count, (bool, np.bool_)):
        raise errors.InvalidArgument("end.committed: got truth values, must be counts of rows")
    return operator.index(count)


def _check_queries(geometry: Geometry, profile: Profile, q: Optional[npt.NDArray], rows: int,
                   heads: int) -> None:
    """Refuses queries that are missing, not allowed or of another shape."""
    if (q is None) != (profile == Profile.APPEND_ONLY):
        raise errors.InvalidArgument(f"attend.q: with {profile.name} it is "
                                     f"{'missing' if q is None else 'not allowed'}")
    if q is not None:
        heads = 1 if profile == Profile.PROJECTED else heads
        wire.check_shape("attend.q", q, (rows, heads, geometry.q_dim(profile)))


def _values(name: str, array: Optional[npt.NDArray]) -> Optional[npt.NDArray]:
    """Tensors in device memory stay unchanged."""
    return array if isinstance(array, device_memory.DeviceArray) else arrays.floats(name, array)
