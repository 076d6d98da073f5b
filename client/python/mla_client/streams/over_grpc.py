"""The stream of steps over gRPC."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Tuple, TypeVar

import grpc
import numpy as np

from mla_client import errors, wire
from mla_client.base import gates, process
from mla_client.connection.channels import Channels
from mla_client.gen import attention_pb2
from mla_client.shm.shared_memory import SharedMemory
from mla_client.streams import stream
from mla_client.types import AttendArgs, DType, Geometry

_Room = TypeVar("_Room")
# Does something with a reply and the time of its arrival.
_Finish = Callable[[Any, float], None]

_METHOD = "/mla.v1.Attention/Attend"


class _GrpcRequest(stream.Request):
    """A request on an AttendStream."""

    __slots__ = ("_home", "_done", "body", "size", "arrive", "_finish", "_reply", "_received",
                 "_error")

    def __init__(self, home: process.Home, body: str, size: int = 0,
                 arrive: Optional[_Finish] = None, finish: Optional[_Finish] = None) -> None:
        """`arrive` is called with every reply as soon as it has come. `finish` is called with a
        reply that is not an error, on the thread that waits for it."""
        self._home = home
        self._done = gates.Latch()
        self.body = body  # of the request, and of its reply unless that is an error
        self.size = size  # of its bytes in flight
        self.arrive = arrive
        self._finish = finish
        self._reply: Any = None
        self._received = 0.0
        self._error: Optional[errors.MlaError] = None

    def complete(self, reply: Any, received: float, error: Optional[errors.MlaError]) -> None:
        """Lets waiters have the reply, or the error."""
        self._reply, self._received, self._error = reply, received, error
        self._done.open()

    def ready(self) -> bool:
        return self._home.left or self._done.wait(0.0)

    def wait(self, deadline: float) -> Any:
        self._home.check_copy()
        if not self._done.wait(deadline):
            raise stream.no_reply()
        if self._error is not None:
            raise self._error.again()
        stream.check_body(self._reply, self.body)
        finish = self._finish
        if finish is not None:
            finish(self._reply, self._received)
            self._finish = None
        return self._reply


class AttendStream(stream.StepStream):
    """A bidirectional gRPC stream and the thread that reads it. With `memory` the tensors lie there
    and the messages say where; without, they travel in the messages."""

    def __init__(self, channels: Channels, metadata: Tuple[Tuple[str, str], ...],
                 inflight_bytes: int, message_bytes: int, on_boot_id: Callable[[int], None],
                 memory: Optional[SharedMemory] = None) -> None:
        self.transport = "inline" if memory is None else "shm"
        self.message_bytes = message_bytes
        self.memory = memory
        self._home = process.Home()
        self._broken: Optional[errors.MlaError] = None
        self._on_boot_id = on_boot_id
        self._inflight = stream.InflightBytes(inflight_bytes)
        self._outbox: "queue.SimpleQueue[Optional[bytes]]" = queue.SimpleQueue()
        self._lock = threading.RLock()
        self._pending: Dict[int, _GrpcRequest] = {}
        self._next_tag = 1
        self._held = contextlib.ExitStack()
        channel = self._held.enter_context(channels.stream())
        call = channel.stream_stream(
            _METHOD, request_serializer=bytes, response_deserializer=self._take)
        self._call: Any = call(iter(self._outbox.get, None), metadata=metadata)
        process.leave_at_fork(self)
        self._reader = threading.Thread(target=self._read, name="mla-attend", daemon=True)
        self._reader.start()

    @property
    def broken(self) -> Optional[errors.MlaError]:
        if self._home.left:
            return self._home.error()
        memory = self.memory
        if self._broken is None and memory is not None and not memory.connected():
            return errors.Unavailable("the shared memory has ended")
        return self._broken

    # --- Sending

    def attend(self, step_id: int, args: AttendArgs, chunk: wire.Chunk, geometry: Geometry,
               assembler: wire.ResultAssembler, deadline: float) -> stream.Request:
        self._home.check_copy()
        header = attention_pb2.AttendStreamRequest(attend=attention_pb2.Attend(
            step_id=step_id, layer=args.layer, row_begin=args.row_begin + chunk.row_begin,
            row_count=chunk.rows, head_offset=args.head_offset + chunk.head_begin,
            num_heads=wire.message_heads(args, chunk.heads, geometry), profile=args.profile,
            has_kv=chunk.has_kv, want_lse=args.want_lse,
            q_dtype=args.q_dtype, o_dtype=args.o_dtype,
            timeout_us=stream.timeout_us(args.timeout_s),
            kv_row_dtype=DType.F8_E4M3 if args.kv_parts else 0,
            lists=_lists_of(args), want_lists=args.wanted_lists > 0))
        memory = self.memory
        if memory is not None:
            try:
                return self._attend_shared(memory, header, args, chunk, geometry, assembler,
                                           deadline)
            except errors.MlaError:
                raise
            except BaseException as error:
                self.fail(stream.interrupted(error))
                raise
        parts = wire.request_parts(args, chunk)
        sent = time.monotonic()

        def finish(reply: Any, received: float) -> None:
            try:
                assembler.add(chunk, reply.payload,
                              stream.timings_of(reply.timings, received - sent))
            except ValueError as error:
                raise errors.DataLoss(str(error)) from error

        request = _GrpcRequest(self._home, "attend", sum(part.nbytes for part in parts),
                               finish=finish)
        self._send(header, parts, request, deadline)
        return request

    def _attend_shared(self, memory: SharedMemory, header: Any, args: AttendArgs, chunk: wire.Chunk,
                       geometry: Geometry, assembler: wire.ResultAssembler,
                       deadline: float) -> stream.Request:
        placement = self._with_room(memory, lambda: memory.place(args, chunk, geometry), deadline)
        shared = header.shared
        shared.handle = memory.handle
        shared.in_offset, shared.in_length = placement.in_offset, placement.in_length
        shared.out_offset, shared.out_length = placement.out_offset, placement.out_length
        sent = time.monotonic()

        # As soon as the reply is there: the room is wanted by calls whose sender does not wait yet.
        def arrive(reply: Any, received: float) -> None:
            try:
                if reply.WhichOneof("body") == "attend":
                    assembler.put(chunk, placement.o, placement.lse,
                                  stream.timings_of(reply.timings, received - sent),
                                  placement.lists)
            finally:
                memory.unplace(placement)

        request = _GrpcRequest(self._home, "attend", arrive=arrive)
        try:
            self._send(header, [], request, deadline)
        except errors.MlaError:
            memory.unplace(placement)
            raise
        return request

    def _with_room(self, memory: SharedMemory, attempt: Callable[[], Optional[_Room]],
                   deadline: float) -> _Room:
        """Calls `attempt` until it has taken memory, and returns what it returned. Waits for
        replies between the calls, because they free memory."""
        while True:
            if self._broken is not None:
                raise self._broken.again()
            seen = memory.freed
            taken = attempt()
            if taken is not None:
                return taken
            if memory.exhausted(seen):
                raise stream.does_not_fit()
            if not memory.wait_for_room(seen, deadline):
                raise stream.no_room()

    def ask(self, deadline: float, reply_bytes: int = 0, tails: bytes = b"",
            **body: Any) -> stream.Request:
        self._home.check()
        header = attention_pb2.AttendStreamRequest(**body)
        (name,) = body
        memory = self.memory
        if memory is None or not tails:
            parts = [np.frombuffer(tails, np.uint8)] if tails else []
            request = _GrpcRequest(self._home, name, len(tails))
            self._send(header, parts, request, deadline)
            return request
        try:
            return self._ask_shared(memory, header, name, tails, deadline)
        except errors.MlaError:
            raise
        except BaseException as error:
            self.fail(stream.interrupted(error))
            raise

    def _ask_shared(self, memory: SharedMemory, header: Any, name: str, tails: bytes,
                    deadline: float) -> stream.Request:
        size, allocate, free = len(tails), memory.allocate, memory.free
        blocks = self._with_room(memory, lambda: allocate(size), deadline)
        memory.map[blocks[0]:blocks[0] + size] = tails
        header.shared.handle = memory.handle
        header.shared.in_offset, header.shared.in_length = blocks[0], size
        request = _GrpcRequest(self._home, name, arrive=lambda *_: free(blocks))
        try:
            self._send(header, [], request, deadline)
        except errors.MlaError:
            free(blocks)
            raise
        return request

    def _send(self, header: Any, parts: List[Any], request: _GrpcRequest, deadline: float) -> None:
        """Queues a message."""
        while not self._queue(header, parts, request):
            self._inflight.wait(request.size, deadline)

    def _queue(self, header: Any, parts: List[Any], request: _GrpcRequest) -> bool:
        """Queues a message, if there is room. The tag is taken in the same critical section, so
        that requests travel in the order in which this was called."""
        try:
            with self._lock:
                if self._broken is not None:
                    raise self._broken.again()
                if not self._inflight.take(request.size):
                    return False
                header.tag = self._next_tag
                self._next_tag += 1
                self._pending[header.tag] = request
                self._outbox.put(wire.frame(header.SerializeToString(), parts))
        except errors.MlaError:
            raise
        except BaseException as error:
            self.fail(stream.interrupted(error))
            raise
        return True

    # --- The end

    def close(self) -> None:
        if self._home.left:
            return
        self._outbox.put(None)
        self._reader.join(timeout=stream.CLOSE_TIMEOUT_S)
        self._cancel_call()

    def cancel(self) -> None:
        if self._home.left:
            return
        self._cancel_call()
        self._outbox.put(None)

    def fail(self, error: errors.MlaError) -> None:
        self._end(error)
        self._cancel_call()

    def leave(self) -> None:
        """In a child that was forked: the call is the parent's."""
        call = self._call
        if call is not None:
            process.keep(call)

    def _cancel_call(self) -> None:
        call = self._call
        if call is not None:  # it has not ended
            call.cancel()

    def _take(self, message: bytes) -> int:
        """Completes the request that a reply is for; returns its tag. gRPC calls this as soon as
        the message is there, on a thread of its own, so that the waiter is woken without a detour
        through the thread that reads the stream. An exception raised here ends the stream."""
        received = time.monotonic()
        reply = attention_pb2.AttendStreamReply.FromString(message)
        self._on_boot_id(reply.boot_id)
        with self._lock:
            request = self._pending.pop(reply.tag, None)
        if request is not None:
            self._inflight.release(request.size)
            error: Optional[errors.MlaError] = None
            try:
                if request.arrive is not None:
                    request.arrive(reply, received)
            except Exception as failure:  # the waiter's to see, not gRPC's
                error = errors.Internal(f"the reply was not taken over: {failure}")
            request.complete(reply, received, error)
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
        except Exception as failure:  # unknown, and still the end for everything that waits
            error = errors.Internal(f"the Attend stream cannot be read: {failure}")
        finally:
            self._call = None
            self._end(error)
            self._held.close()

    def _end(self, error: errors.MlaError) -> None:
        """Every request still waiting ends with the stream's own error. Memory that they lie in is
        not used again: the server may still be writing there."""
        with self._lock:
            if self._broken is None:
                self._broken = error
            error = self._broken
            pending, self._pending = self._pending, {}
        self._outbox.put(None)
        memory, self.memory = self.memory, None  # gRPC may hold this object for a while
        if memory is not None:
            memory.disconnect()
        for request in pending.values():
            self._inflight.release(request.size)
            request.complete(None, 0.0, error)


def _lists_of(args: AttendArgs) -> int:
    """How index lists come, as the contract numbers it."""
    if args.lists is None:
        return attention_pb2.INDEX_LISTS_UNSPECIFIED
    # These lists have top_k entries.
    return (attention_pb2.INDEX_LISTS_SERVER if args.selects
            else attention_pb2.INDEX_LISTS_FIXED)
