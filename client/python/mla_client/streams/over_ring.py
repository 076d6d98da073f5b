"""The stream of steps over a command ring.

The stream has no thread of its own: a caller that waits for a reply takes completions, for itself
and others. Threading: any thread. One mutex guards what is in flight; no caller holds it while it
waits.

Threads that wait stand in a queue, and the first one takes completions for all. A thread joins it
inside a `try` and leaves it by a single call in the `finally`: an interrupt cannot come between.
"""

from __future__ import annotations

import itertools
import struct
import threading
import time
from typing import Any, Callable, Dict, List, Optional

from google.protobuf.message import DecodeError

from mla_client import errors, wire
from mla_client.base import gates, process
from mla_client.gen import attention_pb2
from mla_client.shm import ring
from mla_client.shm.handshake import REPLY_SLOT_BYTES
from mla_client.shm.shared_memory import Placement, SharedMemory
from mla_client.streams import stream
from mla_client.types import AttendArgs, Geometry, Timings

SHARED_BYTES = 32  # of the place of tails in a message, at most


class _RingRequest(stream.Request):
    """A request on a ring. Its fields are the stream's, under its mutex."""

    __slots__ = ("_owner", "body", "tag", "sent", "done", "error", "reply", "finish", "blocks",
                 "stream")

    def __init__(self, owner: "RingStream", body: str, tag: int, blocks: List[int]) -> None:
        self._owner = owner
        self.body = body      # of the request, and of its reply unless that is an error
        self.tag = tag
        self.blocks = blocks  # of the arena, given back with the reply
        self.stream: Optional[int] = None  # of tensors in device memory: what writes them
        self.sent = time.monotonic()
        self.done = False
        self.error: Optional[errors.MlaError] = None
        self.reply: Any = None
        # Takes the outputs of an attend that succeeded; None for messages.
        self.finish: Optional[Callable[[Timings], None]] = None

    def ready(self) -> bool:
        return self._owner.looked_for(self)

    def wait(self, deadline: float) -> Any:
        self._owner.wait_for(self, deadline)
        if self.error is not None:
            raise self.error.again()
        return self.reply

    def take_message(self, message: Optional[bytes]) -> None:
        """Sets reply or error from a message of the server's."""
        try:
            self.reply = attention_pb2.AttendStreamReply.FromString(message or b"")
            stream.check_body(self.reply, self.body)
            if self.finish is not None:  # its outputs have not been written
                raise errors.DataLoss("the ring completed an attend with a message")
        except DecodeError:
            self.error = errors.DataLoss("the ring's reply is not an AttendStreamReply")
        except errors.MlaError as error:
            self.error = error.again()


class RingStream(stream.StepStream):
    """A stream of steps over one command ring."""

    transport = "ring"

    def __init__(self, memory: SharedMemory, message_bytes: int,
                 on_boot_id: Callable[[int], None], spin_s: float = 0.0) -> None:
        """REQUIRES: memory.ring_entries > 0 and not ring.WHY_NOT. `spin_s`: how long a waiter looks
        at the ring before it sleeps. It holds the interpreter's lock during that time."""
        self.memory: SharedMemory = memory
        self.message_bytes = message_bytes
        self._home = process.Home()
        self._ring = ring.Ring(memory, spin_s)
        self._on_boot_id = on_boot_id
        self._mutex = threading.RLock()
        self._queue: Dict[object, None] = {}  # of threads that wait for completions, in their order
        self._changed = gates.Gates()  # for the waiting threads that are not the first
        self._broken: Optional[errors.MlaError] = None
        self._in_flight: Dict[int, _RingRequest] = {}
        self._tags = itertools.count(1)

    @property
    def broken(self) -> Optional[errors.MlaError]:
        if self._home.left:
            return self._home.error()
        if self._broken is None and not self._ring.connected():
            return errors.Unavailable("the shared memory has ended")
        return self._broken

    # --- Sending

    def attend(self, step_id: int, args: AttendArgs, chunk: wire.Chunk, geometry: Geometry,
               assembler: wire.ResultAssembler, deadline: float) -> stream.Request:
        self._home.check_copy()
        memory, tag = self.memory, next(self._tags)
        timeout_us = stream.timeout_us(args.timeout_s)
        try:
            placed: Placement = self._with_room(lambda: memory.place(args, chunk, geometry),
                                                deadline)
            request = _RingRequest(self, "attend", tag, placed.blocks)
            request.finish = lambda timings: assembler.put(chunk, placed.o, placed.lse, timings,
                                                            placed.lists)
            flags = (ring.HAS_KV * chunk.has_kv | ring.WANT_LSE * args.want_lse
                     | (ring.SELECTS if args.selects else ring.HAS_LISTS * (args.lists is not None))
                     | ring.WANT_LISTS * (args.wanted_lists > 0)
                     | ring.FP8_KV * bool(args.kv_parts) | ring.ON_DEVICE * placed.on_device)
            if placed.on_device and args.out is not None:
                request.stream = args.out.stream
            self._submit(request, deadline, ring.ATTEND, args.profile, flags,
                         args.q_dtype | args.o_dtype << 4,
                         tag, step_id, args.layer, args.row_begin + chunk.row_begin,
                         chunk.rows, args.head_offset + chunk.head_begin,
                         wire.message_heads(args, chunk.heads, geometry),
                         timeout_us, placed.in_offset, placed.out_offset)
        except errors.MlaError:
            raise
        except BaseException as error:
            self.fail(stream.interrupted(error))
            raise
        return request

    def ask(self, deadline: float, reply_bytes: int = 0, tails: bytes = b"",
            **body: Any) -> stream.Request:
        self._home.check()
        room = reply_bytes if reply_bytes > REPLY_SLOT_BYTES else 0
        tag = next(self._tags)
        header = attention_pb2.AttendStreamRequest(tag=tag, **body)
        (name,) = body
        header_bytes = header.ByteSize() + (SHARED_BYTES if tails else 0)
        try:
            blocks = self._with_room(
                lambda: self.memory.allocate(header_bytes + room,
                                             *([len(tails)] if tails else [])),
                deadline)
            if tails:
                self.memory.map[blocks[1]:blocks[1] + len(tails)] = tails
                header.shared.in_offset, header.shared.in_length = blocks[1], len(tails)
            message, offset = header.SerializeToString(), blocks[0]
            size = len(message)
            self.memory.map[offset:offset + size] = message
            request = _RingRequest(self, name, tag, blocks)
            self._submit(request, deadline, ring.MESSAGE, 0, 0, 0, tag, 0, 0, 0, size, 0, room, 0,
                         offset, offset + size if room else 0)
        except errors.MlaError:
            raise
        except BaseException as error:
            self.fail(stream.interrupted(error))
            raise
        return request

    def _submit(self, request: _RingRequest, deadline: float, *fields: int) -> None:
        """Publishes an entry of those fields (SUBMISSION) once there is a slot for it."""
        try:
            while not self._publish(request, fields):
                self._take_until(lambda: not self._ring.full(), deadline, stream.no_room)
        except errors.MlaError:
            self._give_back(request)
            raise

    def _publish(self, request: _RingRequest, fields: Any) -> bool:
        """The same if there is a slot."""
        with self._mutex:
            if self._broken is not None:
                raise self._broken.again()
            if self._ring.full():
                return False
            if request.stream is not None:
                self._ring.record(request.stream)
            self._in_flight[request.tag] = request
            try:
                self._ring.submit(*fields)
            except struct.error as error:
                del self._in_flight[request.tag]
                raise errors.InvalidArgument(f"attend: {error}") from error
        return True

    def _with_room(self, attempt: Callable[[], Any], deadline: float) -> Any:
        """Calls `attempt` until it has taken memory, and returns what it returned. Takes
        completions between the calls, because they free memory."""
        while True:
            seen = self.memory.freed
            taken = attempt()
            if taken is not None:
                return taken
            if self.memory.exhausted(seen):
                raise stream.does_not_fit()
            if self._broken is not None:
                raise self._broken.again()
            if self._in_flight:
                self._take_until(lambda: self.memory.freed != seen, deadline, stream.no_room)
            # Otherwise another thread is about to send what it has placed.
            elif not self.memory.wait_for_room(seen, deadline):
                raise stream.no_room()

    # --- Waiting

    def wait_for(self, request: _RingRequest, deadline: float) -> None:
        """Returns once the request is done. DeadlineExceeded."""
        self._home.check_copy()
        while not request.done:
            self._take_until(lambda: request.done, deadline, stream.no_reply)
            if self._broken is not None and not request.done:
                raise self._broken.again()

    def looked_for(self, request: _RingRequest) -> bool:
        """Takes the completions that have come. True if `wait_for` would return, or raise, at once.
        """
        if self._home.left:
            return True
        try:
            self._take_until(lambda: request.done, 0.0, stream.no_reply)
        except errors.DeadlineExceeded:
            return False
        return True

    def _take_until(self, enough: Callable[[], bool], deadline: float,
                    late: Callable[[], errors.MlaError]) -> None:
        """Takes completions until `enough()`, or lets the thread do it that has come first. Returns
        as well when the stream has broken. Raises `late()` at the deadline."""
        queue, token = self._queue, object()
        try:
            queue[token] = None
            while not enough() and self._broken is None:
                if tuple(queue)[0] is token:
                    self._poll(deadline, late)
                elif not self._changed.wait(lambda: tuple(queue)[0] is token or enough()
                                            or self._broken is not None, deadline):
                    raise late()
        finally:
            queue.pop(token, None)
            if queue:
                self._changed.open()

    def _poll(self, deadline: float, late: Callable[[], errors.MlaError]) -> None:
        """Takes one completion. REQUIRES: no other thread does."""
        try:
            there = self._ring.wait(deadline)
        except errors.MlaError as error:
            self.fail(error.again())
            return
        if not there:
            raise late()
        try:
            with self._mutex:
                self._finish(self._ring.take())
            if len(self._queue) > 1:
                self._changed.open()
        except BaseException as error:
            self.fail(stream.interrupted(error))
            raise

    def _finish(self, completion: ring.Completion) -> None:
        """REQUIRES: the mutex."""
        self._on_boot_id(completion.boot_id)
        request = self._in_flight.get(completion.tag)
        if request is None:
            self.fail(errors.DataLoss("the ring completed a request that was never made"))
            return
        if completion.kind == ring.MESSAGE:
            request.take_message(completion.message)
        elif completion.kind == ring.ATTEND and request.finish is not None:
            request.finish(Timings(
                int((time.monotonic() - request.sent) * 1e6), completion.queue_us,
                completion.plan_us, completion.kernel_us, completion.write_us,
                completion.launch_requests, completion.launch_layers, completion.launch_clients,
                bool(completion.flags & ring.PLAN_REUSED)))
        else:
            request.error = errors.DataLoss(
                f"the ring completed {request.body} with an entry of kind {completion.kind}")
        self._give_back(request)
        request.finish = None
        request.done = True
        del self._in_flight[completion.tag]

    def _give_back(self, request: _RingRequest) -> None:
        if request.blocks:  # none if the tensors are the caller's buffers
            self.memory.free(request.blocks)
            request.blocks = []

    # --- The end

    def fail(self, error: errors.MlaError) -> None:
        """Every request still waiting ends with that error. Memory that they lie in is not used
        again: the server may still be writing there."""
        with self._mutex:
            if self._broken is None:
                self._broken = error
            self.memory.disconnect()
            for request in self._in_flight.values():
                request.error = self._broken
                request.finish = None
                request.done = True
            self._in_flight.clear()
        self._changed.open()

    def close(self) -> None:
        if self._home.left:
            return
        deadline = time.monotonic() + stream.CLOSE_TIMEOUT_S
        try:
            self._take_until(lambda: not self._in_flight, deadline, stream.no_reply)
        except errors.DeadlineExceeded:
            pass  # the server is told all the same
        if self._broken is None:
            self.memory.close(stream.CLOSE_TIMEOUT_S)
            self.fail(errors.Unavailable("the Attend stream was closed"))

    def cancel(self) -> None:
        if self._home.left:
            return
        self.fail(errors.Cancelled("the Attend stream was cancelled"))
        self._ring.wake_waiter()
