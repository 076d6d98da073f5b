"""The stream of steps over a ring of the C library, whose calls a GPU's stream may wait for.

Waits leave the interpreter's lock to other threads, and return to Python every so often, so that
signals are handled.
Threading: any thread.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any, Callable, Dict, List, Optional

import numpy as np
from google.protobuf.message import DecodeError

from mla_client import errors, native, wire
from mla_client.base import process
from mla_client.gen import attention_pb2
from mla_client.shm import ring
from mla_client.shm.native_memory import NativeMemory
from mla_client.shm.shared_memory import Placement
from mla_client.streams import stream
from mla_client.streams.chains import LONGEST_WAIT_MS, Captured, Chain
from mla_client.types import AttendArgs, Buffers, DType, Geometry, Profile, Timings

CHAINED = 128


class _NativeRequest(stream.Request):
    """A request under way, and the handle of the library's, which is freed with it."""

    __slots__ = ("_owner", "_handle", "_lock", "body", "sent", "blocks", "finish", "done", "reply",
                 "error")

    def __init__(self, owner: "NativeStream", handle: Any, body: str, blocks: List[int],
                 finish: Optional[Callable[[Timings], None]] = None) -> None:
        self._owner = owner
        self._handle = handle
        self._lock = threading.Lock()  # of who takes the reply
        self.body = body
        self.sent = time.monotonic()
        self.blocks = blocks  # of the arena, given back with the reply
        self.finish = finish  # takes the outputs of an attend that succeeded
        self.done = False
        self.reply: Any = None
        self.error: Optional[errors.MlaError] = None

    def __del__(self) -> None:
        if not self._owner.memory._home.left:
            self._owner.memory.lib.mla_request_free(self._handle)

    def ready(self) -> bool:
        return self._owner.memory._home.left or self.settle(0.0)

    def wait(self, deadline: float) -> Any:
        while not self.settle(deadline):
            if time.monotonic() >= deadline:
                raise stream.no_reply()
        if self.error is not None:
            raise self.error.again()
        return self.reply

    def settle(self, deadline: float) -> bool:
        """Takes the reply if it comes within a short time. Returns true once it was taken."""
        if self.done:
            return True
        memory = self._owner.memory
        left = min(max(int((deadline - time.monotonic()) * 1e3) + 1, 0), LONGEST_WAIT_MS)
        pointer = ctypes.c_void_p()
        code = memory.lib.mla_request_wait(self._handle, left, ctypes.byref(pointer))
        error: Optional[errors.MlaError] = None
        if code:
            waits = (code == native.DEADLINE_EXCEEDED
                     and memory.lib.mla_error_reason(pointer) == native.NO_REPLY_YET)
            error = memory.lib.error(pointer)
            if waits:
                return False
        try:
            with self._lock:
                if not self.done:
                    self._take(error)
                    self.done = True
                    self._owner.settled(self)
        except BaseException as interrupt:
            self._owner.fail(stream.interrupted(interrupt))
            raise
        return True

    def _take(self, error: Optional[errors.MlaError]) -> None:
        if error is not None:
            self.error = self._owner.why(error)
            return
        try:
            if self.body == "attend":
                if self.finish is not None:
                    self.finish(self._times())
            else:
                self._read()
        except errors.MlaError as failure:
            self.error = failure.again()
        except DecodeError:
            self.error = errors.DataLoss("the ring's reply is not an AttendStreamReply")

    def _read(self) -> None:
        size = ctypes.c_size_t()
        at = self._owner.memory.lib.mla_request_reply(self._handle, ctypes.byref(size))
        self.reply = attention_pb2.AttendStreamReply.FromString(ctypes.string_at(at, size.value))
        stream.check_body(self.reply, self.body)

    def _times(self) -> Timings:
        times = native.sized(native.Times)
        self._owner.memory.lib.mla_request_times(self._handle, ctypes.byref(times))
        return Timings(int((time.monotonic() - self.sent) * 1e6), times.queue_us, times.plan_us,
                       times.kernel_us, times.write_us, times.launch_requests,
                       times.launch_layers, times.launch_clients, bool(times.plan_reused))


class NativeStream(stream.StepStream):
    """A stream of steps over one ring of the library's."""

    transport = "ring"
    chains = True

    def __init__(self, memory: NativeMemory, message_bytes: int,
                 on_boot_id: Callable[[int], None]) -> None:
        self.memory: NativeMemory = memory
        self.transport = memory.transport
        self.message_bytes = message_bytes
        self._home = process.Home()
        self._on_boot_id = on_boot_id
        self.ended: Optional[errors.MlaError] = None  # why it can not be used any more
        self._lock = threading.Lock()
        self._in_flight: Dict[int, _NativeRequest] = {}  # whose replies make room

    @property
    def broken(self) -> Optional[errors.MlaError]:
        if self._home.left:
            return self._home.error()
        return self.ended or self.memory.state()

    # --- Sending

    def attend(self, step_id: int, args: AttendArgs, chunk: wire.Chunk, geometry: Geometry,
               assembler: wire.ResultAssembler, deadline: float) -> stream.Request:
        self._home.check_copy()
        memory = self.memory
        try:
            placed: Placement = self._with_room(lambda: memory.place(args, chunk, geometry),
                                                deadline)
            flags = (ring.HAS_KV * chunk.has_kv | ring.WANT_LSE * args.want_lse
                     | (ring.SELECTS if args.selects else ring.HAS_LISTS * (args.lists is not None))
                     | ring.WANT_LISTS * (args.wanted_lists > 0)
                     | ring.FP8_KV * bool(args.kv_parts) | ring.ON_DEVICE * placed.on_device)
            entry = _entry(step_id, args.layer, args.row_begin + chunk.row_begin, chunk.rows,
                           args.head_offset + chunk.head_begin,
                           wire.message_heads(args, chunk.heads, geometry),
                           timeout_us=stream.timeout_us(args.timeout_s), profile=args.profile,
                           flags=flags, q_dtype=args.q_dtype, o_dtype=args.o_dtype,
                           in_offset=placed.in_offset, out_offset=placed.out_offset)
            if memory.travels:
                entry.in_bytes, entry.out_bytes = placed.in_length, placed.out_length
            if placed.on_device and args.out is not None:
                entry.stream = args.out.stream or None
            try:
                handle = self.send(lambda room_ms, out, error: memory.lib.mla_ring_attend(
                    memory.ring, ctypes.byref(entry), room_ms, out, error), deadline)
            except errors.MlaError:
                memory.unplace(placed)
                raise
            request = _NativeRequest(
                self, handle, "attend", placed.blocks, lambda timings: assembler.put(
                    chunk, placed.o, placed.lse, timings, placed.lists))
            self._note(request)
        except errors.MlaError:
            raise
        except BaseException as error:
            self.fail(stream.interrupted(error))
            raise
        return request

    def ask(self, deadline: float, reply_bytes: int = 0, tails: bytes = b"",
            **body: Any) -> stream.Request:
        self._home.check()
        (name,) = body
        message = attention_pb2.AttendStreamRequest(**body).SerializeToString()
        memory = self.memory
        try:
            handle = self.send(lambda room_ms, out, error: memory.lib.mla_ring_message(
                memory.ring, message, len(message), tails or None, len(tails), room_ms, out,
                error), deadline)
            request = _NativeRequest(self, handle, name, [])
            self._note(request)
        except errors.MlaError:
            raise
        except BaseException as error:
            self.fail(stream.interrupted(error))
            raise
        return request

    def chain(self, step_id: int, out: Buffers, profile: Profile, head_offset: int,
              timeout_s: float) -> Optional[Chain]:
        """Calls with these buffers that are chained; None: they can not be."""
        entry = self._chained_entry(step_id, out, profile, head_offset)
        return None if entry is None else Chain(self, entry, timeout_s)

    def capture(self, out: Buffers, profile: Profile, head_offset: int, timeout_s: float
                ) -> Optional[Captured]:
        """Such calls in a graph."""
        entry = self._chained_entry(0, out, profile, head_offset)
        return None if entry is None else Captured(self, entry, timeout_s)

    def _chained_entry(self, step_id: int, out: Buffers, profile: Profile, head_offset: int
                       ) -> Optional[native.Entry]:
        memory, place = self.memory, out.place
        if place is None or place.memory is not memory or out.q is None or out.o is None:
            return None
        if not (memory.chains_on_device if place.on_device else memory.chains_in_memory):
            return None
        flags = (ring.HAS_KV * (out.kv is not None) | ring.WANT_LSE * (out.lse is not None)
                 | ring.ON_DEVICE * place.on_device | CHAINED)
        o_dtype = DType.BF16 if out.o.dtype == np.uint16 else DType.F32
        return _entry(step_id, 0, 0, out.q.shape[0], head_offset, out.heads, profile=profile,
                      flags=flags, q_dtype=out.dtype, o_dtype=o_dtype,
                      in_offset=place.in_offset, out_offset=place.out_offset)

    def send(self, call: Callable[[int, Any, Any], int], deadline: float) -> Any:
        """The handle of a request that `call` (milliseconds for room, where to put the handle, and
        the error) sends."""
        handle, error = ctypes.c_void_p(), ctypes.c_void_p()
        room_ms = 0
        while True:
            if self.ended is not None:
                raise self.ended.again()
            code = call(room_ms, ctypes.byref(handle), ctypes.byref(error))
            if not code:
                return handle
            self.check_room(error)
            if time.monotonic() >= deadline:
                raise stream.no_room()
            room_ms = LONGEST_WAIT_MS

    def check_room(self, error: Any) -> None:
        """Raises what a call has failed with, which is freed, unless it only lacked room."""
        code = self.memory.lib.mla_error_code(error)
        failure = self.memory.lib.error(error)
        if code != native.DEADLINE_EXCEEDED or self.memory.state() is not None:
            raise failure

    def _with_room(self, attempt: Callable[[], Any], deadline: float) -> Any:
        """Calls `attempt` until it has taken memory, and returns what it returned. Waits for
        replies between the calls, because they free memory."""
        while True:
            seen = self.memory.freed
            taken = attempt()
            if taken is not None:
                return taken
            if self.memory.exhausted(seen):
                raise stream.does_not_fit()
            if self.ended is not None:
                raise self.ended.again()
            first = next(iter(tuple(self._in_flight.values())), None)
            if first is not None:
                first.settle(deadline)
            elif not self.memory.wait_for_room(seen, min(deadline, time.monotonic() + 0.1)):
                pass  # another thread is about to send what it has placed
            if time.monotonic() >= deadline:
                raise stream.no_room()

    def _note(self, request: _NativeRequest) -> None:
        with self._lock:
            self._in_flight[id(request)] = request

    def why(self, error: errors.MlaError) -> errors.MlaError:
        """Why a request has failed: where the stream has ended, for that reason."""
        return self.ended or error

    def settled(self, request: _NativeRequest) -> None:
        """Its reply was taken."""
        with self._lock:
            self._in_flight.pop(id(request), None)
        if request.blocks and not isinstance(request.error, errors.Unavailable):
            self.memory.free(request.blocks)
            request.blocks = []

    # --- The end

    def fail(self, error: errors.MlaError) -> None:
        with self._lock:
            if self.ended is None:
                self.ended = error
            self._in_flight.clear()
        self.memory.disconnect()

    def close(self) -> None:
        if self._home.left:
            return
        if self.ended is None:
            self.memory.close(stream.CLOSE_TIMEOUT_S)
            self.fail(errors.Unavailable("the Attend stream was closed"))

    def cancel(self) -> None:
        if self._home.left:
            return
        self.fail(errors.Cancelled("the Attend stream was cancelled"))


def _entry(step_id: int, layer: int, row_begin: int, rows: int, head_offset: int, heads: int,
           **others: Any) -> native.Entry:
    entry: native.Entry = native.sized(
        native.Entry, step_id=step_id, layer=layer, row_begin=row_begin, row_count=rows,
        head_offset=head_offset, num_heads=heads, **others)
    return entry
