"""Streams that carry steps to a server: what they have in common, and the one over gRPC.

A step belongs to the stream that began it and dies with it. Requests go out in order; replies come
in as they complete and are paired by tag. `ring.RingStream` is the other implementation.
"""

from __future__ import annotations

import abc
import concurrent.futures
import queue
import threading
import time
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple, TypeVar

import grpc
import numpy as np

from mla_client import errors, wire
from mla_client.gen import attention_pb2
from mla_client.shm.shared_memory import Placement, SharedMemory
from mla_client.types import AttendArgs, DType, Geometry, Profile, Timings

_Room = TypeVar("_Room")

_METHOD = "/mla.v1.Attention/Attend"
CLOSE_TIMEOUT_S = 2.0


class Request(abc.ABC):
    """A request under way."""

    @abc.abstractmethod
    def wait(self, deadline: float) -> Any:
        """Waits for the reply: an AttendStreamReply, or None for an attend, whose outputs are where
        they belong then. Raises MlaError for an error reply, at the deadline (`time.monotonic`) or
        when the stream has ended."""


class StepStream(abc.ABC):
    """A stream of steps. Thread safe.

    When it breaks, every unanswered request fails and `broken` says why; the owner opens another.
    """

    transport: str       # "inline", "shm" or "ring"
    message_bytes: int   # attend calls are split so that no message carries more than that
    memory: Optional[SharedMemory] = None

    @property
    @abc.abstractmethod
    def broken(self) -> Optional[errors.MlaError]:
        """Why it can no longer be used; None while it can."""

    @abc.abstractmethod
    def attend(self, step_id: int, args: AttendArgs, chunk: wire.Chunk, geometry: Geometry,
               assembler: wire.ResultAssembler, deadline: float) -> Request:
        """Sends one chunk of an attend call; its outputs and timings go to `assembler`. Waits for
        room first; DeadlineExceeded if there is none in time."""

    @abc.abstractmethod
    def ask(self, deadline: float, reply_bytes: int = 0, tails: bytes = b"",
            **body: Any) -> Request:
        """Sends a request of the stepping protocol that carries no tensor: the one field of
        AttendStreamRequest's `body` that is given. The reply has at most `reply_bytes` bytes; 0: it
        is short. `tails`: of an end_step."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends it in order; what is open on it is aborted by the server."""

    @abc.abstractmethod
    def cancel(self) -> None:
        """Cancels it at once."""

    def chunks(self, args: AttendArgs, geometry: Geometry) -> Iterator[wire.Chunk]:
        """The chunks of an attend call. ValueError if one row of one head is too large."""
        place = args.out.place if args.out is not None else None
        if place is not None and place.memory is self.memory:
            # Its outputs are one piece of this stream's memory, whatever their size.
            heads = 0 if args.profile == Profile.APPEND_ONLY else args.num_heads
            return iter([wire.Chunk(0, args.rows, 0, heads, args.kv is not None)])
        return wire.chunks(args, geometry, self.message_bytes)


class InflightBytes:
    """Bounds the bytes that were sent and not yet answered, so that a producer that runs ahead is
    paused here and not in a growing queue. One message is always let through."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._changed = threading.Condition()

    def acquire(self, size: int, deadline: float) -> None:
        """Waits for room. Raises DeadlineExceeded."""
        with self._changed:
            while self._used and self._used + size > self._limit:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise no_room()
                self._changed.wait(left)
            self._used += size

    def release(self, size: int) -> None:
        """Returns room."""
        with self._changed:
            self._used -= size
            self._changed.notify_all()


class _Pending(NamedTuple):
    """What the reader of a stream does with a reply."""

    future: concurrent.futures.Future
    size: int                                      # of its bytes in flight
    finish: Optional[Callable[[Any, float], None]]  # given the reply and its time; errors excepted


class _GrpcRequest(Request):
    """A request on an AttendStream."""

    def __init__(self, future: concurrent.futures.Future,
                 finish: Optional[Callable[[Any, float], None]]) -> None:
        self._future = future
        self._finish = finish  # what is left to do with the reply on the waiter's thread

    def wait(self, deadline: float) -> Any:
        try:
            reply, received = self._future.result(max(0.0, deadline - time.monotonic()))
        except concurrent.futures.TimeoutError:
            raise no_reply() from None
        except errors.MlaError as error:
            raise error.again() from None
        if reply.WhichOneof("body") == "error":
            raise error_of(reply.error)
        finish, self._finish = self._finish, None
        if finish is not None:
            finish(reply, received)
        return reply


class AttendStream(StepStream):
    """A bidirectional gRPC stream and the thread that reads it. With `memory` the tensors lie there
    and the messages say where; without, they travel in the messages."""

    def __init__(self, channel: grpc.Channel, metadata: Tuple[Tuple[str, str], ...],
                 inflight_bytes: int, message_bytes: int, on_boot_id: Callable[[int], None],
                 memory: Optional[SharedMemory] = None) -> None:
        self.transport = "inline" if memory is None else "shm"
        self.message_bytes = message_bytes
        self.memory = memory
        self._broken: Optional[errors.MlaError] = None
        self._on_boot_id = on_boot_id
        self._inflight = InflightBytes(inflight_bytes)
        self._outbox: "queue.SimpleQueue[Optional[bytes]]" = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending: Dict[int, _Pending] = {}
        self._next_tag = 1
        call = channel.stream_stream(
            _METHOD, request_serializer=bytes, response_deserializer=self._take)
        self._call: Any = call(iter(self._outbox.get, None), metadata=metadata)
        self._reader = threading.Thread(target=self._read, name="mla-attend", daemon=True)
        self._reader.start()

    @property
    def broken(self) -> Optional[errors.MlaError]:
        memory = self.memory
        if self._broken is None and memory is not None and not memory.connected():
            return errors.Unavailable("the shared memory has ended")
        return self._broken

    def attend(self, step_id: int, args: AttendArgs, chunk: wire.Chunk, geometry: Geometry,
               assembler: wire.ResultAssembler, deadline: float) -> Request:
        header = attention_pb2.AttendStreamRequest(attend=attention_pb2.Attend(
            step_id=step_id, layer=args.layer, row_begin=args.row_begin + chunk.row_begin,
            row_count=chunk.rows, head_offset=args.head_offset + chunk.head_begin,
            num_heads=chunk.heads, profile=args.profile, has_kv=chunk.has_kv,
            want_lse=args.want_lse,
            q_dtype=args.q_dtype, o_dtype=args.o_dtype, timeout_us=timeout_us(args.timeout_s),
            kv_row_dtype=DType.F8_E4M3 if args.kv_parts else 0,
            lists=_lists_of(args), want_lists=args.wanted_lists > 0))
        memory = self.memory
        if memory is not None:
            return self._attend_shared(memory, header, args, chunk, geometry, assembler, deadline)
        parts = wire.request_parts(args, chunk)
        sent = time.monotonic()

        def finish(reply: Any, received: float) -> None:
            try:
                assembler.add(chunk, reply.payload, timings_of(reply.timings, received - sent))
            except ValueError as error:
                raise errors.Internal(str(error)) from error

        future = self._send(header, parts, sum(part.nbytes for part in parts), None, deadline)
        return _GrpcRequest(future, finish)

    def _attend_shared(self, memory: SharedMemory, header: Any, args: AttendArgs, chunk: wire.Chunk,
                       geometry: Geometry, assembler: wire.ResultAssembler,
                       deadline: float) -> Request:
        placement = self._with_room(memory, lambda: memory.place(args, chunk, geometry), deadline)
        shared = header.shared
        shared.handle = memory.handle
        shared.in_offset, shared.in_length = placement.in_offset, placement.in_length
        shared.out_offset, shared.out_length = placement.out_offset, placement.out_length
        sent = time.monotonic()

        # As soon as the reply is there: the room is wanted by calls whose sender does not wait yet.
        def finish(reply: Any, received: float) -> None:
            try:
                if reply.WhichOneof("body") != "error":
                    assembler.put(chunk, placement.o, placement.lse,
                                  timings_of(reply.timings, received - sent), placement.lists)
            finally:
                memory.unplace(placement)

        try:
            return _GrpcRequest(self._send(header, [], 0, finish, deadline), None)
        except BaseException:
            memory.unplace(placement)
            raise

    def _with_room(self, memory: SharedMemory, attempt: Callable[[], Optional[_Room]],
                   deadline: float) -> _Room:
        """What `attempt` takes of the memory. Waits for room there, which replies make."""
        while True:
            if self._broken is not None:
                raise self._broken.again()
            seen = memory.freed
            taken = attempt()
            if taken is not None:
                return taken
            if memory.exhausted(seen):
                raise does_not_fit()
            if not memory.wait_for_room(seen, deadline):
                raise no_room()

    def ask(self, deadline: float, reply_bytes: int = 0, tails: bytes = b"",
            **body: Any) -> Request:
        header = attention_pb2.AttendStreamRequest(**body)
        memory = self.memory
        if memory is None or not tails:
            parts = [np.frombuffer(tails, np.uint8)] if tails else []
            return _GrpcRequest(self._send(header, parts, len(tails), None, deadline), None)
        size = len(tails)
        allocate, free = memory.allocate, memory.free
        blocks = self._with_room(memory, lambda: allocate(size), deadline)
        memory.map[blocks[0]:blocks[0] + size] = tails
        header.shared.handle = memory.handle
        header.shared.in_offset, header.shared.in_length = blocks[0], size
        try:
            return _GrpcRequest(self._send(header, [], 0, lambda *_: free(blocks), deadline), None)
        except BaseException:
            free(blocks)
            raise

    def _send(self, header: Any, parts: List[Any], size: int,
              finish: Optional[Callable[[Any, float], None]],
              deadline: float) -> concurrent.futures.Future:
        """Queues a message. The tag is taken in the same critical section, so that requests travel
        in the order in which this was called."""
        self._inflight.acquire(size, deadline)
        future: concurrent.futures.Future = concurrent.futures.Future()
        with self._lock:
            if self._broken is not None:
                self._inflight.release(size)
                raise self._broken.again()
            header.tag = self._next_tag
            self._next_tag += 1
            self._pending[header.tag] = _Pending(future, size, finish)
            self._outbox.put(wire.frame(header.SerializeToString(), parts))
        return future

    def close(self) -> None:
        self._outbox.put(None)
        self._reader.join(timeout=CLOSE_TIMEOUT_S)
        self._cancel_call()

    def cancel(self) -> None:
        self._cancel_call()
        self._outbox.put(None)

    def _cancel_call(self) -> None:
        call = self._call
        if call is not None:  # it has not ended
            call.cancel()

    def _take(self, message: bytes) -> int:
        """Completes the request that a reply is for; returns its tag. gRPC calls this as soon as
        the message is there, on a thread of its own: the waiter is woken without a detour through
        the thread that reads the stream."""
        received = time.monotonic()
        reply = attention_pb2.AttendStreamReply.FromString(message)
        self._on_boot_id(reply.boot_id)
        with self._lock:
            pending = self._pending.pop(reply.tag, None)
        if pending is not None:
            self._inflight.release(pending.size)
            try:
                if pending.finish is not None:
                    pending.finish(reply, received)
                pending.future.set_result((reply, received))
            except Exception as error:  # the waiter's to see, not gRPC's
                pending.future.set_exception(error)
        return reply.tag

    def _read(self) -> None:
        """Keeps replies coming, and sees the end."""
        error: errors.MlaError = errors.Unavailable("the Attend stream was closed")
        try:
            for _ in self._call:
                pass
        except grpc.RpcError as rpc_error:
            # The error is the call itself, which leads to this object: it must not lead back.
            error = errors.from_rpc(rpc_error.with_traceback(None))
        finally:
            self._call = None
            self._fail(error)

    def _fail(self, error: errors.MlaError) -> None:
        """Every request still waiting ends with the stream's own error. Memory that they lie in is
        not used again: the server may still be writing there."""
        with self._lock:
            self._broken = error
            pending, self._pending = self._pending, {}
        self._outbox.put(None)
        memory, self.memory = self.memory, None  # gRPC may hold this object for a while
        if memory is not None:
            memory.disconnect()
        for entry in pending.values():
            self._inflight.release(entry.size)
            entry.future.set_exception(error.again())


def _lists_of(args: AttendArgs) -> int:
    """How index lists come, as the contract numbers it."""
    if args.lists is None:
        return attention_pb2.INDEX_LISTS_UNSPECIFIED
    # Of top_k entries.
    return (attention_pb2.INDEX_LISTS_SERVER if args.selects
            else attention_pb2.INDEX_LISTS_FIXED)


def timeout_us(timeout_s: float) -> int:
    """A deadline as the contract carries it; 0 would mean none."""
    return max(1, min(int(timeout_s * 1e6), 2**32 - 1))


def timings_of(timings: Any, round_trip_s: float) -> Timings:
    """Timings of an mla.v1.Timings."""
    return Timings(int(round_trip_s * 1e6), timings.queue_us, timings.plan_us, timings.kernel_us,
                   timings.write_us, timings.launch_requests, timings.launch_layers,
                   timings.launch_clients, timings.plan_reused)


def error_of(error: Any) -> errors.MlaError:
    """The exception of an mla.v1.StepError."""
    return errors.from_code(error.code, error.message, errors.ErrorDetail.from_proto(error.detail),
                            error.step_aborted)


def no_reply() -> errors.DeadlineExceeded:
    """A request was not answered in time."""
    return errors.DeadlineExceeded("no reply before the deadline")


def no_room() -> errors.DeadlineExceeded:
    """A request could not be sent in time."""
    return errors.DeadlineExceeded("attend: no room in the stream before the deadline: earlier "
                                   "requests are unanswered")


def does_not_fit() -> errors.ResourceExhausted:
    """A request cannot be sent at all."""
    return errors.ResourceExhausted("attend: the tensors do not fit into the shared memory: "
                                    "buffers hold the rest of it, or `shared_bytes` is too small")
