"""The objects that a worker handles: Model, Sequence, Step, over any Service.

`Client` (a server) and `LocalReference` (numpy, in this process) implement Service,
so code written against one runs on the other.

Threading: threads may share a Service. A Sequence or a Step belongs to one thread at a time, except
that several threads may call `Step.attend` and `Step.attend_async`.
"""

from __future__ import annotations

import abc
import dataclasses
import secrets
import time
from typing import Any, Callable, List, NamedTuple, Optional, Sequence as Seq, Tuple, TypeVar

import numpy as np
import numpy.typing as npt

from mla_client import arrays, errors, wire
from mla_client.service import projected
from mla_client.service.step import Step
from mla_client.shm import device as device_memory
from mla_client.types import (AttendArgs, AttendResult, Buffers, DType, ModelSpec, Prefix,
                              PrefixMatch, Profile, SequenceState, WeightsStatus)


_Result = TypeVar("_Result")


class Registered(NamedTuple):
    """What a service says of a model that it has registered: see Model."""

    spec: ModelSpec
    page_group_bytes: int
    instance: int = 0


class AttendFuture(abc.ABC):
    """The result of a call under way."""

    @abc.abstractmethod
    def result(self) -> AttendResult:
        """Waits until the call is done or its deadline has passed. Raises MlaError."""

    @abc.abstractmethod
    def done(self) -> bool:
        """Returns True if `result` would not wait any more. Takes replies that have come, and waits
        for none. Has no deadline; `result` has.
        """


class Service(abc.ABC):
    """The interface that a Model, a Sequence and a Step need. Users call the methods of those
    instead."""

    timeout_s: float
    # Sequences of a step that have moved to several servers are waited for until they are on one.
    _gathers = True

    @abc.abstractmethod
    def _register(self, spec: ModelSpec, lease_ms: int, kv_scales: Seq[float],
                  sinks: Seq[float]) -> "Registered": ...

    @abc.abstractmethod
    def _unregister(self, model_id: str) -> None: ...

    @abc.abstractmethod
    def _upload_scales(self, model_id: str, scales: Seq[float]) -> None: ...

    @abc.abstractmethod
    def _upload_sinks(self, spec: ModelSpec, layer_begin: int, head_begin: int,
                      sinks: npt.NDArray) -> List[int]:
        """`sinks` is [layers, heads], not empty. Returns the layers that still lack sinks."""

    @abc.abstractmethod
    def _upload(self, spec: ModelSpec, layer: int, head_begin: int, w_uk: npt.NDArray,
                w_uv: npt.NDArray) -> WeightsStatus: ...

    def _upload_projected(self, spec: ModelSpec, layer: int, head_begin: int,
                          weights: projected.ProjectedWeights) -> WeightsStatus:
        raise errors.Unimplemented("model.rope_layout: this service does not make queries")

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
    def _read_tail(self, sequence_id: int, epoch: int, tail_bytes: int) -> Tuple[int, bytes]:
        """Returns (position, tail) for a model whose tails have `tail_bytes` bytes."""

    @abc.abstractmethod
    def _release(self, sequence_ids: List[int]) -> List[int]:
        """Returns the ids that were not there."""

    @abc.abstractmethod
    def _get(self, sequence_ids: List[int]) -> Tuple[List[SequenceState], List[int]]: ...

    def _found(self, sequence_id: int) -> SequenceState:
        sequences, _ = self._get([sequence_id])
        if not sequences:
            raise errors.NotFound(f"sequence {sequence_id:#x}: released, expired or never opened")
        return sequences[0]

    def _adopt(self, sequence_id: int) -> SequenceState:
        """Keeps its lease from now on."""
        return self._found(sequence_id)

    def _hand_over(self, sequence_id: int) -> None:
        """Keeps its lease no longer."""

    def _follow(self, sequences: Seq["Sequence"], error: errors.MlaError,
                deadline: float) -> None:
        """A call that named these sequences has failed. Returns when it is to be repeated, by the
        service that they have then; else raises the error."""
        raise error

    def _look(self, sequence: "Sequence") -> None:
        """Makes the sequence one of the server that it has moved to, if it has."""

    def _prepare_moved(self, model_id: str, prepare: Callable[["Model"], None]) -> None:
        """Sets a function that prepares a model of this id on a server that its sequences have
        moved to."""

    def _elsewhere(self, model: "Model", error: errors.MlaError) -> "Model":
        """The model on the server to which the error of a call that names none of its sequences
        leads; else raises the error."""
        raise error

    @abc.abstractmethod
    def _begin(self, step: Step) -> Any:
        """Returns a handle that the other step calls get."""

    def _begin_ahead(self, step: Step) -> Optional[Tuple[Any, Callable[[], None]]]:
        """Sends the begin and does not wait. Returns the handle, and a function that waits for the
        answer and raises a refusal; None where calls are not chained, and nothing was sent."""
        return None

    def _go_on(self, step: Step) -> bool:
        """Begins the step that follows this one, of one participant, with as many rows again, and
        changes its id. `collect` waits for the answer. Returns False if it was not sent."""
        return False

    @abc.abstractmethod
    def _attend(self, step: Step, args: AttendArgs) -> AttendFuture: ...

    @abc.abstractmethod
    def _end(self, step: Step, committed: Optional[List[int]],
             tails: List[Tuple[int, bytes]]) -> List[int]:
        """Returns the new lengths. `tails`: with the place in the step, ascending."""

    def _end_ahead(self, step: Step, committed: Optional[List[int]]
                   ) -> Optional[Callable[[], List[int]]]:
        """Sends the end and does not wait. Returns a function that waits for the new lengths; None
        where calls are not chained, and nothing was sent."""
        return None

    @abc.abstractmethod
    def _abort(self, step: Step) -> None: ...

    def _give_up(self, step: Step) -> None:
        """Ends the step soon, without waiting: the caller does not know if the step is open, and
        does not need it."""

    def _chain(self, step: Step, out: Buffers, profile: Profile, head_offset: int) -> Any:
        """Calls with these buffers that a GPU's stream waits for; None: there are none here."""
        return None

    def _capture(self, out: Buffers, profile: Profile, head_offset: int, stream: Any) -> Any:
        """Calls with these buffers in a graph; None: there are none here."""
        return None

    def _shared_memory(self, stream: Any) -> Any:
        """The SharedMemory of a stream (None: the service's own), or None without shared memory."""
        return None

    def register_model(self, spec: ModelSpec, *, lease_ms: int = 0,
                       kv_scales: Seq[float] = (), sinks: Any = ()) -> "Model":
        """Registers a model; repeating it with equal contents succeeds. With `lease_ms` > 0 it is
        unregistered after this time without a call that names it and without an open sequence of
        it; 0: as the server is configured, by default never.

        `kv_scales`, one a layer, belong to kv_format "fp8_tensor": a stored value is its e4m3 code
        times the scale of its layer. `Model.upload_scales` may bring them later.

        `sinks` [layers, heads] are for attention "sparse_v4": logits whose value is zero; -inf
        means no sink. Without them the model has no sinks, or `Model.upload_sinks` brings them
        (`ModelSpec.needs_sinks`)."""
        sinks = arrays.numbers("sinks", sinks)
        kv_scales = arrays.numbers("kv_scales", kv_scales).tolist()
        heads = (spec.layers, spec.geometry.num_heads)
        if sinks.size and sinks.shape != heads:
            raise errors.InvalidArgument(f"sinks: got shape {sinks.shape}, must be {heads}")
        return Model(self, *self._register(spec, lease_ms, kv_scales, sinks.reshape(-1).tolist()))

    def step(self, rows: Seq[Tuple["Sequence", int]], *, participants: int = 1, lease_ms: int = 0,
             step_id: Optional[int] = None, stream: Any = None,
             rotations: Optional[npt.NDArray] = None) -> Step:
        """A step that adds `rows` rows to each sequence; use it in a `with` block.

        For PROJECTED, `rotations` [rows of the step, rope_dim] have the cosines [rope_dim / 2] and
        then the sines by which each row's queries are rotated, at all layers.

        Tensor-parallel ranks each make the same step, with the same `step_id`, on streams of their
        own (`Client.open_stream`), all with `participants` set.
        """
        return Step(self, rows, participants, lease_ms, step_id, stream, rotations)

    def capture(self, out: Buffers, profile: Profile = Profile.EXPANDED, *, head_offset: int = 0,
                stream: Any = None) -> Any:
        """Makes chained calls with the tensors of `out` for a graph of the GPU's runtime. Returns
        an object with `attend(layer, stream)`, like that of Step.chain, which is called while
        `stream` captures the graph. Nothing is sent then. Before each launch of the graph
        `Step.replay` sends all calls. The buffers must stay as long as the graph is used. None
        where calls can not be chained.
        """
        return self._capture(out, Profile(profile), head_offset, stream)

    def buffers(self, model: "Model", rows: int, profile: Profile = Profile.EXPANDED, *,
                heads: Optional[int] = None, kv: bool = True, want_lse: bool = False,
                dtype: DType = DType.BF16, o_dtype: DType = DType.BF16,
                stream: Any = None, device: str = "cpu") -> Buffers:
        """Returns memory for the tensors of `rows` rows and `heads` heads (default: all). If the
        stream has shared memory and room there, the tensors are used in place and not copied;
        otherwise these are ordinary arrays. `dtype` and `o_dtype` are the types of the arrays.
        `device="cuda"` or "hip": on the server's GPU (`connect`'s device_bytes), else Unavailable.
        """
        geometry = model.spec.geometry
        profile, dtype, o_dtype = Profile(profile), DType(dtype), wire.output_dtype(o_dtype)
        if dtype == DType.F8_E4M3:
            raise errors.InvalidArgument("buffers.dtype: got F8_E4M3, must be BF16 or F32")
        heads = geometry.num_heads if heads is None else heads
        if profile == Profile.PROJECTED:
            heads = 1
            if want_lse:
                raise errors.InvalidArgument("buffers: PROJECTED takes no want_lse")
        if profile == Profile.APPEND_ONLY:
            heads, want_lse = 0, False
        if rows < 1 or (heads < 1 and profile != Profile.APPEND_ONLY):
            raise errors.InvalidArgument(f"buffers: got {rows} rows, {heads} heads")
        memory = self._shared_memory(stream)
        row_dim = model.spec.sent_row_dim if kv else 0
        shape = geometry, profile, rows, heads, row_dim, want_lse, dtype, o_dtype
        buffers = device_memory.buffers_in(memory, device, shape)
        if buffers:
            if profile == Profile.PROJECTED:
                buffers.heads = geometry.num_heads
            return buffers
        computes = profile != Profile.APPEND_ONLY
        return Buffers(
            np.empty((rows, row_dim), dtype.numpy) if kv else None,
            np.empty((rows, heads, geometry.q_dim(profile)), dtype.numpy) if computes else None,
            np.empty((rows, heads, geometry.o_dim(profile)), o_dtype.numpy) if computes else None,
            np.empty((rows, heads), np.float32) if want_lse else None, dtype)


class Model:
    """A registered model."""

    def __init__(self, service: Service, spec: ModelSpec, page_group_bytes: int,
                 instance: int = 0) -> None:
        self.service = service
        self.spec = spec                          # as in force: with the page size filled in
        self.page_group_bytes = page_group_bytes  # the unit of KV allocation
        # Another number than before says that the server has made the model again, without what
        # was uploaded; 0: it does not say so.
        self.instance = instance

    def __repr__(self) -> str:
        return f"<Model {self.spec.model_id!r}, {self.spec.layers} layers>"

    def upload_scales(self, scales: Seq[float]) -> None:
        """Sets the scales of kv_format "fp8_tensor", one for each layer. Equal ones may be sent
        again, others while no sequence of the model is open: otherwise AlreadyExists.
        """
        self.service._upload_scales(self.spec.model_id, arrays.numbers("scales", scales).tolist())

    def upload_sinks(self, sinks: Any, layer_begin: int = 0, head_begin: int = 0) -> List[int]:
        """Sets sinks of attention "sparse_v4", [layers, heads], from `layer_begin` and `head_begin`
        on: for all heads, or for each rank's heads. Each is finite, or -inf for no sink. Values in
        force may be sent again, others while no sequence of the model is open: otherwise
        AlreadyExists. Returns the layers that still lack sinks (`ModelSpec.needs_sinks`)."""
        sinks = arrays.numbers("sinks", sinks)
        wire.check_number("layer_begin", layer_begin)
        wire.check_number("head_begin", head_begin)
        if sinks.ndim != 2 or not sinks.size:
            raise errors.InvalidArgument(f"sinks: got shape {sinks.shape}, must be [layers, heads]")
        return self.service._upload_sinks(self.spec, layer_begin, head_begin, sinks)

    def upload_weights(self, layer: int, w_uk: npt.NDArray, w_uv: npt.NDArray,
                       head_begin: int = 0) -> WeightsStatus:
        """Uploads W_UK [heads, nope, lora] and W_UV [heads, lora, v] of one layer.

        float arrays are rounded to bf16; uint16 arrays are bf16 patterns. Both must cover the same
        heads, beginning at `head_begin`. Repeating an upload succeeds; other values for heads that
        are there already are AlreadyExists. EXPANDED is served once every layer and head is there.
        """
        geometry = self.spec.geometry
        w_uk, w_uv = arrays.floats("w_uk", w_uk), arrays.floats("w_uv", w_uv)
        heads = len(w_uk) if w_uk.ndim else 0
        wire.check_number("layer", layer)
        wire.check_number("head_begin", head_begin)
        for name, array, shape in (
                ("w_uk", w_uk, (heads, geometry.nope_dim, geometry.kv_lora_rank)),
                ("w_uv", w_uv, (heads, geometry.kv_lora_rank, geometry.v_dim))):
            if array.shape != shape:
                raise errors.InvalidArgument(f"{name}: got shape {array.shape}, must be {shape}")
        return self.service._upload(self.spec, layer, head_begin, w_uk, w_uv)

    def upload_projected(self, layer: int, w_uq: npt.NDArray, w_o: npt.NDArray,
                         head_begin: int = 0, *, w_uq_scales: Optional[npt.NDArray] = None,
                         w_o_scales: Optional[npt.NDArray] = None) -> WeightsStatus:
        """Uploads W_UQ [heads, nope + rope, q_lora_rank] and W_O [hidden_size, heads, v] of one
        layer, which PROJECTED needs in addition to those of `upload_weights`. W_UQ is q_b_proj and
        W_O is o_proj of a checkpoint; W_O may be [hidden_size, heads * v].

        Arrays, heads and repeats are as in `upload_weights`. With scales both are uint8 codes of
        e4m3, and a weight is its code times the scale of its block of 128 x 128: `w_uq_scales`
        [ceil(all heads * (nope + rope) / 128), ceil(q_lora_rank / 128)] and `w_o_scales`
        [ceil(hidden_size / 128), ceil(all heads * v / 128)] are those of the matrices of all heads,
        as weight_scale_inv of a checkpoint has them."""
        geometry = self.spec.geometry
        wire.check_number("layer", layer)
        wire.check_number("head_begin", head_begin)
        weights = projected.weights_of(geometry, w_uq, w_o, w_uq_scales, w_o_scales)
        if head_begin + weights.heads > geometry.num_heads:
            raise errors.InvalidArgument(
                f"head_begin: got heads {head_begin}..{head_begin + weights.heads - 1}, must be "
                f"within 0..{geometry.num_heads - 1}")
        return self.service._upload_projected(self.spec, layer, head_begin, weights)

    def open_sequence(self, *, request_id: str = "", lease_ms: int = 0,
                      prefix: Optional[Prefix] = None) -> "Sequence":
        """Opens a sequence. A repeated `request_id` returns the sequence it opened.

        With `prefix` it starts with as many of these rows as the prefix cache has; `matched` and
        `length` tell how many. It is empty otherwise."""
        wire.check_number("lease_ms", lease_ms)
        if prefix is not None and prefix.max_rows is not None:
            wire.check_number("prefix.max_rows", prefix.max_rows, wire.LARGEST_POSITION)
        # A request id of our own makes the retries of the transport safe.
        request_id = request_id or secrets.token_hex(16)
        try:
            state, matched = self.service._open(self.spec.model_id, request_id, lease_ms, prefix)
        except (errors.Unavailable, errors.ServerRestarted, errors.NotFound) as error:
            return self.service._elsewhere(self, error).open_sequence(
                request_id=request_id, lease_ms=lease_ms, prefix=prefix)
        sequence = Sequence(self, state)
        sequence.matched = matched
        if prefix is not None and prefix.max_rows == 0:
            sequence._said = prefix
        return sequence

    def adopt_sequence(self, sequence_id: int) -> "Sequence":
        """Takes over a sequence that another client of the same `client_id` has opened and handed
        over; its lease is renewed in that name. NotFound if it is gone.
        """
        try:
            return Sequence(self, self.service._adopt(sequence_id))
        except (errors.NotFound, errors.Unavailable) as error:
            return self.service._elsewhere(self, error).adopt_sequence(sequence_id)

    def unregister(self) -> None:
        """Forgets the model. FailedPrecondition while sequences of it are open."""
        self.service._unregister(self.spec.model_id)


class Sequence:
    """One stream of tokens with its rows in the KV cache; released at the end of a `with` block."""

    def __init__(self, model: Model, state: SequenceState) -> None:
        self.model = model
        self.id = state.sequence_id
        self.epoch = state.epoch    # advanced by truncate
        self.length = state.length  # committed rows
        self.matched = PrefixMatch()  # the last time that rows were asked of the prefix cache
        self.released = False
        # Declared contents that the server was not told: it would append the cached rows among
        # them.
        self._said: Optional[Prefix] = None

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
        """Returns a new sequence that shares the first `length` rows (default: all), copy-on-write.
        """
        if length is not None:
            wire.check_number("length", length, wire.LARGEST_POSITION)
        wire.check_number("lease_ms", lease_ms)
        request_id = request_id or secrets.token_hex(16)
        state = self._call(lambda service: service._fork(self.id, self.epoch, length, request_id,
                                                         lease_ms))
        child = Sequence(self.model, state)
        child._said = self._said_first(child.length)
        return child

    def match(self, prefix: Prefix, first_row: int = 0) -> PrefixMatch:
        """Declares the contents of the rows from `first_row` on, committed and future ones, and
        appends the cached ones to the committed rows. Contents declared earlier for committed rows
        must stay, else FailedPrecondition."""
        wire.check_number("first_row", first_row, wire.LARGEST_POSITION)
        if self._said is not None and first_row > 0:
            prefix, first_row = self._said.followed_by(prefix, first_row, self.model.spec.page_size)
        if prefix.max_rows is not None and prefix.max_rows <= self.length:
            # A bound below the present length: the contract takes 0 for no bound.
            if self.length > 0:
                prefix = dataclasses.replace(prefix, max_rows=self.length)
            elif first_row == 0:
                self._said, self.matched = prefix, PrefixMatch()
                return self.matched
        state, self.matched = self._call(lambda service: service._match(
            self.id, self.epoch, first_row, prefix))
        self._said = None
        self.length = state.length
        return self.matched

    def truncate(self, length: int) -> None:
        """Drops the rows from `length` on and starts a new epoch."""
        wire.check_number("length", length, wire.LARGEST_POSITION)
        self.epoch, self.length = self._call(lambda service: service._truncate(
            self.id, length, self.epoch))
        self._said = self._said_first(length)

    def read_tail(self) -> Tuple[int, bytes]:
        """Returns the last tail that a step has left (Step.end), and the length to which it
        belongs. A worker that continues from there first truncates the sequence to that length.
        NotFound if none was stored, or if the sequence was truncated below it.
        """
        return self._call(lambda service: service._read_tail(self.id, self.epoch,
                                                             self.model.spec.tail_bytes))

    def hand_over(self) -> int:
        """Leaves the sequence to a caller of Model.adopt_sequence with the returned id: its lease
        is not renewed here any more, and the object must not be used.
        """
        self.released = True
        self.model.service._hand_over(self.id)
        return self.id

    def release(self) -> None:
        """Frees the sequence; a step that holds it is aborted. A second call does nothing."""
        if not self.released:
            self.released = True
            self.model.service._release([self.id])

    def refresh(self) -> SequenceState:
        """Asks the service for the sequence, and takes over its epoch and length. NotFound if it is
        gone.
        """
        self.model.service._look(self)
        state = self.model.service._found(self.id)
        self.epoch, self.length = state.epoch, state.length
        return state

    def _said_first(self, rows: int) -> Optional[Prefix]:
        return self._said and self._said.first(rows, self.model.spec.page_size)

    def _call(self, call: Callable[[Service], _Result]) -> _Result:
        """A call that names the sequence, by the service that has it."""
        deadline = time.monotonic() + self.model.service.timeout_s
        while True:
            service = self.model.service
            try:
                return call(service)
            except errors.MlaError as error:
                service._follow([self], error, deadline)
