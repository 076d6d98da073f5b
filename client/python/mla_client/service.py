"""The objects that a worker handles: Model, Sequence, Step, over any Service.

`Client` (a server) and `LocalReference` (numpy, in this process) implement Service,
so code written against one runs on the other.

Threading: a Service may be shared by threads; a Sequence or a Step belongs to one thread at a time,
except that `Step.attend` and `Step.attend_async` may be called from several.
"""

from __future__ import annotations

import abc
import operator
import secrets
from typing import Any, List, Optional, Sequence as Seq, Tuple

import numpy as np
import numpy.typing as npt

from mla_client import errors, wire
from mla_client.shm import device as device_memory
from mla_client.types import (AttendArgs, AttendResult, Buffers, DType, ModelSpec, Prefix,
                              PrefixMatch, Profile, SequenceState, WeightsStatus)


class AttendFuture(abc.ABC):
    """The result of a call under way."""

    @abc.abstractmethod
    def result(self) -> AttendResult:
        """Waits until the call is done or its deadline has passed. Raises MlaError."""


class Service(abc.ABC):
    """What a Model, a Sequence and a Step need. Users call the methods of those instead."""

    timeout_s: float

    @abc.abstractmethod
    def _register(self, spec: ModelSpec, lease_ms: int, kv_scales: Seq[float],
                  sinks: Seq[float]) -> Tuple[ModelSpec, int]:
        """Returns the spec in force and the bytes of a page group."""

    @abc.abstractmethod
    def _unregister(self, model_id: str) -> None: ...

    @abc.abstractmethod
    def _upload_scales(self, model_id: str, scales: Seq[float]) -> None: ...

    @abc.abstractmethod
    def _upload(self, spec: ModelSpec, layer: int, head_begin: int, w_uk: npt.NDArray,
                w_uv: npt.NDArray) -> WeightsStatus: ...

    @abc.abstractmethod
    def _open(self, model_id: str, request_id: str, lease_ms: int,
              prefix: Optional[Prefix]) -> Tuple[SequenceState, PrefixMatch]: ...

    @abc.abstractmethod
    def _match(self, sequence_id: int, epoch: int, first_row: int,
               prefix: Prefix) -> Tuple[SequenceState, PrefixMatch]: ...

    @abc.abstractmethod
    def _fork(self, sequence_id: int, epoch: int, length: Optional[int], request_id: str,
              lease_ms: int) -> SequenceState: ...

    @abc.abstractmethod
    def _truncate(self, sequence_id: int, length: int, epoch: int) -> Tuple[int, int]:
        """Returns (epoch, length)."""

    @abc.abstractmethod
    def _release(self, sequence_ids: List[int]) -> List[int]:
        """Returns the ids that were not there."""

    @abc.abstractmethod
    def _get(self, sequence_ids: List[int]) -> Tuple[List[SequenceState], List[int]]: ...

    @abc.abstractmethod
    def _begin(self, step: "Step") -> Any:
        """Returns a handle that the other step calls get."""

    @abc.abstractmethod
    def _attend(self, step: "Step", args: AttendArgs) -> AttendFuture: ...

    @abc.abstractmethod
    def _end(self, step: "Step", committed: Optional[List[int]]) -> List[int]:
        """Returns the new lengths."""

    @abc.abstractmethod
    def _abort(self, step: "Step") -> None: ...

    def _shared_memory(self, stream: Any) -> Any:
        """The SharedMemory of a stream (None: of the service's own), or None if it has none."""
        return None

    def register_model(self, spec: ModelSpec, *, lease_ms: int = 0,
                       kv_scales: Seq[float] = (), sinks: Any = ()) -> "Model":
        """Registers a model; repeating it with equal contents succeeds. With `lease_ms` > 0 it goes
        when for so long nothing has named it and no sequence of it was open; 0: as the server is
        configured, by default never.

        `kv_scales`, one a layer, belong to kv_format "fp8_tensor": a stored value is its e4m3 code
        times the scale of its layer. `Model.upload_scales` may bring them later.

        `sinks` [layers, heads] belong to attention "sparse_v4": logits whose value is zero; -inf:
        none. Without them there are none."""
        sinks = np.asarray(sinks, np.float32)
        heads = (spec.layers, spec.geometry.num_heads)
        if sinks.size and sinks.shape != heads:
            raise errors.InvalidArgument(f"sinks: got shape {sinks.shape}, must be {heads}")
        in_force, page_group_bytes = self._register(spec, lease_ms, kv_scales,
                                                    sinks.reshape(-1).tolist())
        return Model(self, in_force, page_group_bytes)

    def step(self, rows: Seq[Tuple["Sequence", int]], *, participants: int = 1, lease_ms: int = 0,
             step_id: Optional[int] = None, stream: Any = None) -> "Step":
        """A step that adds `rows` rows to each sequence; use it in a `with` block.

        Tensor-parallel ranks each make the same step, with the same `step_id`, on streams of their
        own (`Client.open_stream`), all with `participants` set.
        """
        return Step(self, rows, participants, lease_ms, step_id, stream)

    def buffers(self, model: "Model", rows: int, profile: Profile = Profile.EXPANDED, *,
                heads: Optional[int] = None, kv: bool = True, want_lse: bool = False,
                dtype: DType = DType.BF16, o_dtype: DType = DType.BF16,
                stream: Any = None, device: str = "cpu") -> Buffers:
        """Memory for the tensors of `rows` rows and `heads` heads (default: all), in which they are
        used where they lie instead of being copied, if the stream has shared memory and room there;
        ordinary arrays otherwise. `dtype` and `o_dtype` decide what the arrays are made of.
        `device="cuda"` or "hip": on the server's GPU (`connect`'s device_bytes), else Unavailable.
        """
        geometry = model.spec.geometry
        profile, dtype, o_dtype = Profile(profile), DType(dtype), wire.output_dtype(o_dtype)
        if dtype == DType.F8_E4M3:
            raise errors.InvalidArgument("buffers.dtype: got F8_E4M3, must be BF16 or F32")
        heads = geometry.num_heads if heads is None else heads
        if profile == Profile.APPEND_ONLY:
            heads, want_lse = 0, False
        if rows < 1 or (heads < 1 and profile != Profile.APPEND_ONLY):
            raise errors.InvalidArgument(f"buffers: got {rows} rows, {heads} heads")
        memory = self._shared_memory(stream)
        row_dim = model.spec.sent_row_dim if kv else 0
        shape = geometry, profile, rows, heads, row_dim, want_lse, dtype, o_dtype
        made = device_memory.buffers_in(memory, device, shape)
        if made:
            return made
        computes = profile != Profile.APPEND_ONLY
        return Buffers(
            np.empty((rows, row_dim), dtype.numpy) if kv else None,
            np.empty((rows, heads, geometry.q_dim(profile)), dtype.numpy) if computes else None,
            np.empty((rows, heads, geometry.o_dim(profile)), o_dtype.numpy) if computes else None,
            np.empty((rows, heads), np.float32) if want_lse else None, dtype)


class Model:
    """A registered model."""

    def __init__(self, service: Service, spec: ModelSpec, page_group_bytes: int) -> None:
        self.service = service
        self.spec = spec                          # as in force: with the page size filled in
        self.page_group_bytes = page_group_bytes  # the unit of KV allocation

    def __repr__(self) -> str:
        return f"<Model {self.spec.model_id!r}, {self.spec.layers} layers>"

    def upload_scales(self, scales: Seq[float]) -> None:
        """Sets the scales of kv_format "fp8_tensor", one a layer. Equal ones may be sent again,
        others while no sequence of the model is open: else AlreadyExists."""
        self.service._upload_scales(self.spec.model_id, scales)

    def upload_weights(self, layer: int, w_uk: npt.NDArray, w_uv: npt.NDArray,
                       head_begin: int = 0) -> WeightsStatus:
        """Uploads W_UK [heads, nope, lora] and W_UV [heads, lora, v] of one layer.

        float arrays are rounded to bf16; uint16 arrays are bf16 patterns. Both must cover the same
        heads, beginning at `head_begin`. Repeating an upload succeeds; other values for heads that
        are there already are AlreadyExists. EXPANDED is served once every layer and head is there.
        """
        geometry = self.spec.geometry
        w_uk, w_uv = np.asarray(w_uk), np.asarray(w_uv)
        heads = len(w_uk) if w_uk.ndim else 0
        wire.check_number("layer", layer)
        wire.check_number("head_begin", head_begin)
        for name, array, shape in (
                ("w_uk", w_uk, (heads, geometry.nope_dim, geometry.kv_lora_rank)),
                ("w_uv", w_uv, (heads, geometry.kv_lora_rank, geometry.v_dim))):
            if array.shape != shape:
                raise errors.InvalidArgument(f"{name}: got shape {array.shape}, must be {shape}")
        return self.service._upload(self.spec, layer, head_begin, w_uk, w_uv)

    def open_sequence(self, *, request_id: str = "", lease_ms: int = 0,
                      prefix: Optional[Prefix] = None) -> "Sequence":
        """Opens a sequence. A repeated `request_id` returns the sequence it opened.

        With `prefix` it starts with as many of these rows as the prefix cache has; `matched` and
        `length` tell how many. It is empty otherwise."""
        wire.check_number("lease_ms", lease_ms)
        # A request id of our own makes the retries of the transport safe.
        state, matched = self.service._open(
            self.spec.model_id, request_id or secrets.token_hex(16), lease_ms, prefix)
        sequence = Sequence(self, state)
        sequence.matched = matched
        return sequence

    def unregister(self) -> None:
        """Forgets the model. FailedPrecondition while sequences of it are open."""
        self.service._unregister(self.spec.model_id)


class Sequence:
    """One token stream with its rows in the KV cache; released at the end of a `with` block."""

    def __init__(self, model: Model, state: SequenceState) -> None:
        self.model = model
        self.id = state.sequence_id
        self.epoch = state.epoch    # advanced by truncate
        self.length = state.length  # committed rows
        self.matched = PrefixMatch()  # the last time that rows were asked of the prefix cache
        self.released = False

    def __repr__(self) -> str:
        state = ", released" if self.released else ""
        return f"<Sequence {self.id:#x}, {self.length} rows, epoch {self.epoch}{state}>"

    def __enter__(self) -> "Sequence":
        return self

    def __exit__(self, *exc_info: Any) -> None:
        if not self.released:
            try:
                self.release()
            except errors.MlaError:
                # The lease frees it; an error of the block, if any, matters more.
                if exc_info[0] is None:
                    raise

    def fork(self, length: Optional[int] = None, *, request_id: str = "",
             lease_ms: int = 0) -> "Sequence":
        """A new sequence that shares the first `length` rows (default: all), copy-on-write."""
        if length is not None:
            wire.check_number("length", length, wire.LARGEST_POSITION)
        wire.check_number("lease_ms", lease_ms)
        state = self.model.service._fork(self.id, self.epoch, length,
                                         request_id or secrets.token_hex(16), lease_ms)
        return Sequence(self.model, state)

    def match(self, prefix: Prefix, first_row: int = 0) -> PrefixMatch:
        """Says what the rows from `first_row` on stand for, those that are committed and those to
        come, and adds behind the committed ones what the prefix cache has of the rest. What was
        said of committed rows before must stay: else FailedPrecondition."""
        wire.check_number("first_row", first_row, wire.LARGEST_POSITION)
        state, self.matched = self.model.service._match(self.id, self.epoch, first_row, prefix)
        self.length = state.length
        return self.matched

    def truncate(self, length: int) -> None:
        """Drops the rows from `length` on and starts a new epoch."""
        wire.check_number("length", length, wire.LARGEST_POSITION)
        self.epoch, self.length = self.model.service._truncate(self.id, length, self.epoch)

    def release(self) -> None:
        """Frees the sequence; a step that holds it is aborted. A second call does nothing."""
        if not self.released:
            self.released = True
            self.model.service._release([self.id])

    def refresh(self) -> SequenceState:
        """Asks the service, and takes over epoch and length. NotFound if it is gone."""
        found, _ = self.model.service._get([self.id])
        if not found:
            raise errors.NotFound(f"sequence {self.id:#x}: released, expired or never opened")
        self.epoch, self.length = found[0].epoch, found[0].length
        return found[0]


class Step:
    """Rows that are added to sequences, layer by layer, and committed together.

    The rows of a step are those of its sequences concatenated in order. A `with` block begins the
    step; leaving it commits all rows unless `end` or `abort` was called inside, and an exception
    aborts it.
    """

    def __init__(self, service: Service, rows: Seq[Tuple[Sequence, int]], participants: int,
                 lease_ms: int, step_id: Optional[int], stream: Any) -> None:
        if not rows:
            raise errors.InvalidArgument("step: needs at least one sequence")
        if any(sequence.model.spec != rows[0][0].model.spec for sequence, _ in rows):
            raise errors.InvalidArgument("step: all sequences must be of one model")
        for index, (_, count) in enumerate(rows):
            wire.check_number(f"step.rows[{index}]", count)
        wire.check_number("step.participants", participants)
        wire.check_number("step.lease_ms", lease_ms)
        wire.check_number("step.step_id", step_id or 0, wire.LARGEST_POSITION)
        self.service = service
        self.model = rows[0][0].model
        self.sequences = [sequence for sequence, _ in rows]
        self.rows = [count for _, count in rows]
        self.total_rows = sum(self.rows)
        self.participants = participants
        self.lease_ms = lease_ms
        self.step_id = secrets.randbits(63) if step_id is None else step_id
        self.stream = stream
        self.open = False
        self._handle: Any = None

    def __repr__(self) -> str:
        return (f"<Step {self.step_id:#x}, {self.total_rows} rows, "
                f"{'open' if self.open else 'not open'}>")

    def __enter__(self) -> "Step":
        return self.begin()

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        if not self.open:
            return
        if kind is None:
            self.end()
            return
        try:
            self.abort()
        except errors.MlaError:
            pass  # the exception that is under way says more; the step's lease ends the rest

    def begin(self) -> "Step":
        """Reserves pages for all rows of all layers, or fails as a whole."""
        self._handle = self.service._begin(self)
        self.open = True
        return self

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
        """As `attend_async`, with its options, where row i attends to the positions of `lists[i]`
        alone: of its own sequence, from 0 to its own. -1 is none, and one that is repeated counts
        once; a row without a position has output 0 and lse -inf.

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

        With kv come the `entries` [n, row dim] that these rows make whole at the layer, in their
        order (`ModelSpec.entry_ends` counts them): entry c with position (c + 1) * ratio - 1. A row
        attends to all that are whole, or to those of `lists[i]`, as in `attend_sparse_async`. The
        output has row dim elements; the log-sum-exp is without the sink."""
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

        q [n, heads, q dim] and kv [n, row dim], where a model with an indexer has its index keys
        behind the rows, are float arrays, or uint16 arrays of bf16 patterns; `dtype` is what
        travels. With DType.F8_E4M3 queries do as 8-bit floats (half the bytes, each value off by up
        to 1/16 of itself; capability "fp8_wire") and KV rows as bf16, unless `kv_row_dtype` is
        DType.F8_E4M3, which may stand beside any dtype. Row ranges of a layer must be sent in
        order, and exactly one of the head slices of a row range brings its kv. With APPEND_ONLY q
        is None.

        With `out` (see `Service.buffers`) the outputs are written there, in its types, and its kv
        and q may be passed as kv and q. After DeadlineExceeded they may still be in use. `lists`:
        see `attend_sparse_async`; `index` and `want_lists`: see `attend_indexed_async`; `entries`:
        see `attend_window_async`.
        """
        self._check_begun("attend")
        geometry = self.model.spec.geometry
        q, kv = _values(q), _values(kv)
        device_memory.check_call(q, kv, out, lists, self.model.spec)
        given = kv if q is None else q
        if given is None:
            raise errors.InvalidArgument("attend: needs q, kv or both")
        rows = len(given) if given.ndim else 0
        heads = 0 if q is None else (q.shape[1] if q.ndim == 3 else 0)
        if (q is None) != (profile == Profile.APPEND_ONLY):
            raise errors.InvalidArgument(f"attend.q: with {Profile(profile).name} it is "
                                         f"{'missing' if q is None else 'not allowed'}")
        if q is not None:
            wire.check_shape("attend.q", q, (rows, heads, geometry.q_dim(profile)))
        if kv is not None:
            wire.check_shape("attend.kv", kv, (rows, self.model.spec.sent_row_dim))
        wire.check_number("attend.layer", layer)
        wire.check_number("attend.row_begin", row_begin)
        wire.check_number("attend.head_offset", head_offset)
        if out is not None:
            wire.check_shape("attend.out.o", out.o,
                             None if q is None else (rows, heads, geometry.o_dim(profile)))
            want_lse = out.lse is not None
            dtype = dtype if dtype == DType.F8_E4M3 else out.dtype
            o_dtype = DType.BF16 if out.o is None or out.o.dtype == np.uint16 else DType.F32
        if index is not None and lists is not None:
            raise errors.InvalidArgument("attend.lists: not beside index queries")
        base = DType.BF16 if dtype == DType.F8_E4M3 else DType(dtype)  # what the server decodes to
        spec, inputs = self.model.spec, lists
        if lists is not None:
            inputs = wire.index_lists(lists, rows, spec)
        elif index is not None:
            inputs = wire.index_inputs(*index, rows, spec, base)
        q_parts = geometry.q_parts(profile) if dtype == DType.F8_E4M3 and q is not None else ()
        kv_parts = wire.kv_parts(kv_row_dtype, base, spec)
        ends = None
        if spec.window > 0 or entries is not None:
            of_step = spec.entry_ends(layer, [s.length for s in self.sequences], self.rows)
            kv, ends = wire.with_entries(spec, kv, wire.floats(entries),
                                         of_step[row_begin:row_begin + rows + 1], kv_parts)
        args = AttendArgs(layer, Profile(profile), row_begin, rows, head_offset, heads,
                          q, kv, want_lse, base, wire.output_dtype(o_dtype),
                          self.service.timeout_s if timeout_s is None else timeout_s, out,
                          inputs, index is not None,
                          spec.top_k if want_lists and index is not None else 0,
                          q_parts, kv_parts if kv is not None else (), ends)
        return self.service._attend(self, args)

    def end(self, committed: Optional[Seq[int]] = None) -> List[int]:
        """Commits the first `committed` rows of each sequence (default: all); returns lengths."""
        self._check_begun("end")
        # Arrays are sequences, too, though they have no truth value.
        kept = None if committed is None else [operator.index(count) for count in committed]
        for index, count in enumerate(kept or []):
            wire.check_number(f"end.committed[{index}]", count)
        lengths = self.service._end(self, kept)
        self.open = False
        for sequence, length in zip(self.sequences, lengths):
            sequence.length = length
        return lengths

    def abort(self) -> None:
        """Drops the step; the sequences are as they were before it."""
        self._check_begun("abort")
        self.open = False
        self.service._abort(self)

    def _check_begun(self, what: str) -> None:
        if self._handle is None:
            raise errors.FailedPrecondition(
                f"{what}: the step has not begun: use it in a `with` block, or call begin()")


def _values(array: Optional[npt.NDArray]) -> Optional[npt.NDArray]:
    """What lies in the memory of a device stays as it is."""
    return array if isinstance(array, device_memory.DeviceArray) else wire.floats(array)
