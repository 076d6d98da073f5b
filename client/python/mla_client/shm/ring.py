"""The command ring: steps that travel through shared memory instead of gRPC.

Submissions and completions are 64-byte entries in slots; the writer fills an entry and publishes it
by storing its sequence word last. fence.py says when plain stores are enough for that. A side that
sleeps says so in its waiter flag, and only then does the other pay for a wake-up.

There is no thread here: a caller that waits for a reply takes completions, for itself and others.
Threading: any thread; one mutex.
"""

from __future__ import annotations

import itertools
import struct
import threading
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional

from google.protobuf.message import DecodeError

from mla_client import errors, stream, wire
from mla_client.gen import attention_pb2
from mla_client.shm import fence, futex
from mla_client.shm.shared_memory import (ENTRY_BYTES, REPLY_SLOT_BYTES, RING_HEADER_BYTES,
                                          Placement, SharedMemory)
from mla_client.types import AttendArgs, Geometry, Timings

# Entries behind their sequence word; proto/wire/ring_layout.h names the fields in this order.
SUBMISSION = struct.Struct("<BBBBQQIIIIIIQQ")
COMPLETION = struct.Struct("<BBHQQIIIIIIQII")
_TAG = 4  # its index among the fields of both
SHARED_BYTES = 32  # of the place of tails in a message, at most
ATTEND, MESSAGE = 1, 2
HAS_KV, WANT_LSE, HAS_LISTS, SELECTS, WANT_LISTS, FP8_KV, ON_DEVICE = 1, 2, 4, 8, 16, 32, 64
PLAN_REUSED = 1
# 4-byte words of the header; the 8-byte word COMPLETIONS_TAKEN counts 8-byte words.
SUBMIT_DOORBELL, SERVER_WAITS = 16, 17
COMPLETE_DOORBELL, CLIENT_WAITS = 32, 33
COMPLETIONS_TAKEN = 24
CLOSED = 64
# A sleeper looks at the connection at least this often.
LONGEST_SLEEP_S = 0.1
SPINS_A_CLOCK = 16

# Why this machine cannot use a ring; empty: it can.
WHY_NOT = fence.WHY_NOT or futex.WHY_NOT


class Completion(NamedTuple):
    """One entry, taken from the ring."""

    kind: int
    flags: int
    launch_layers: int
    tag: int
    boot_id: int
    queue_us: int
    plan_us: int
    kernel_us: int
    write_us: int
    launch_requests: int
    launch_clients: int
    message: Optional[bytes]  # of MESSAGE; None too if it lies outside the region


class Ring:
    """The client's end. Threading: `submit` from one thread at a time, `take` and `wait` from one
    at a time."""

    def __init__(self, memory: SharedMemory, spin_s: float) -> None:
        self._memory = memory
        self._spin_s = spin_s
        self._map = memoryview(memory.map)
        self._words = self._map.cast("I")
        self._longs = self._map.cast("Q")
        self.entries = memory.ring_entries
        self._mask = self.entries - 1
        self._completions = RING_HEADER_BYTES + self.entries * ENTRY_BYTES
        self._submitted = 0
        self._taken = 0  # as the server has been told

    def full(self) -> bool:
        """True if as many requests as there are entries have completions that were not taken."""
        return self._submitted - self._taken >= self.entries

    def record(self, stream: int) -> None:
        """Has the entry that is submitted next wait for what the GPU's stream has been given."""
        assert self._memory.device is not None
        self._memory.device.record(self._submitted & self._mask, stream)

    def submit(self, *fields: int) -> None:
        """Publishes an entry and wakes the server if it sleeps. REQUIRES: not full()."""
        at = RING_HEADER_BYTES + (self._submitted & self._mask) * ENTRY_BYTES
        SUBMISSION.pack_into(self._map, at + 4, *fields)
        fence.ordered()
        self._submitted += 1
        words = self._words
        words[at >> 2] = self._submitted & 0xFFFFFFFF
        fence.full()
        if words[SERVER_WAITS]:
            words[SUBMIT_DOORBELL] = (words[SUBMIT_DOORBELL] + 1) & 0xFFFFFFFF
            futex.wake(self._memory.address + 4 * SUBMIT_DOORBELL)

    def ready(self) -> bool:
        """True if there is a completion to take."""
        at = self._completions + (self._taken & self._mask) * ENTRY_BYTES
        return self._words[at >> 2] == (self._taken + 1) & 0xFFFFFFFF

    def take(self) -> Completion:
        """The next completion; its slots may be written again afterwards. REQUIRES: ready()."""
        fence.ordered()
        at = self._completions + (self._taken & self._mask) * ENTRY_BYTES
        fields = COMPLETION.unpack_from(self._map, at + 4)
        message = None
        if fields[0] == MESSAGE:
            offset, length = fields[11], fields[12]
            if offset <= len(self._map) and length <= len(self._map) - offset:
                message = bytes(self._map[offset:offset + length])
        fence.ordered()
        self._longs[COMPLETIONS_TAKEN] = self._taken + 1
        self._taken += 1
        return Completion._make((*fields[:11], message))

    def connected(self) -> bool:
        """False once the server has ended the ring or the connection is gone."""
        return not self._words[CLOSED] and self._memory.connected()

    def wait(self, deadline: float) -> bool:
        """Waits for a completion: spins, then sleeps. False at the deadline; Unavailable when the
        connection has ended and nothing is left to take."""
        if self.ready():
            return True
        if self._spin():
            return True
        words = self._words
        while True:
            doorbell = words[COMPLETE_DOORBELL]
            words[CLIENT_WAITS] = 1
            fence.full()
            left = deadline - time.monotonic()
            try:
                if not self.ready() and left > 0 and not self._memory.ended:
                    futex.wait(self._memory.address + 4 * COMPLETE_DOORBELL, doorbell,
                               min(left, LONGEST_SLEEP_S))
            finally:
                words[CLIENT_WAITS] = 0
            if self.ready():
                return True
            # What was completed before the end can still be taken, so this comes last.
            if not self.connected() and not self.ready():
                raise errors.Unavailable("the shared memory has ended")
            if left <= 0:
                return False

    def _spin(self) -> bool:
        if self._spin_s <= 0:
            return False
        at = (self._completions + (self._taken & self._mask) * ENTRY_BYTES) >> 2
        wanted = (self._taken + 1) & 0xFFFFFFFF
        words, clock = self._words, time.monotonic
        end = clock() + self._spin_s
        while clock() < end:
            for _ in range(SPINS_A_CLOCK):
                if words[at] == wanted:
                    return True
        return False

    def wake_waiter(self) -> None:
        """Makes a sleeping `wait` look at the connection."""
        self._words[COMPLETE_DOORBELL] = (self._words[COMPLETE_DOORBELL] + 1) & 0xFFFFFFFF
        futex.wake(self._memory.address + 4 * COMPLETE_DOORBELL)


class _RingRequest(stream.Request):
    """A request on a ring. Its fields are the stream's, under its mutex."""

    __slots__ = ("_owner", "sent", "done", "error", "reply", "finish", "blocks", "stream")

    def __init__(self, owner: "RingStream", blocks: List[int]) -> None:
        self._owner = owner
        self.blocks = blocks  # of the arena, given back with the reply
        self.stream: Optional[int] = None  # of tensors in device memory: what writes them
        self.sent = time.monotonic()
        self.done = False
        self.error: Optional[errors.MlaError] = None
        self.reply: Any = None
        # Takes the outputs of an attend that succeeded; None for messages.
        self.finish: Optional[Callable[[Timings], None]] = None

    def wait(self, deadline: float) -> Any:
        if not self.done:
            self._owner.wait_for(self, deadline)
        if self.error is not None:
            raise self.error.again()
        return self.reply


def _parse(message: Optional[bytes]) -> Any:
    """The AttendStreamReply that these bytes are, or None."""
    try:
        reply = attention_pb2.AttendStreamReply.FromString(message or b"")
    except DecodeError:
        return None
    return reply if reply.WhichOneof("body") is not None else None


class RingStream(stream.StepStream):
    """A stream of steps over one command ring."""

    transport = "ring"

    def __init__(self, memory: SharedMemory, message_bytes: int,
                 on_boot_id: Callable[[int], None], spin_s: float = 0.0) -> None:
        """REQUIRES: memory.ring_entries > 0 and not WHY_NOT. `spin_s`: how long a waiter looks at
        the ring before it sleeps; it takes the interpreter's lock meanwhile."""
        self.memory: SharedMemory = memory
        self.message_bytes = message_bytes
        self._ring = Ring(memory, spin_s)
        self._on_boot_id = on_boot_id
        self._mutex = threading.Lock()
        self._changed = threading.Condition(self._mutex)
        self._waiting = 0  # threads that wait for _changed
        self._broken: Optional[errors.MlaError] = None
        self._polling = False
        self._in_flight: Dict[int, _RingRequest] = {}
        self._tags = itertools.count(1)

    @property
    def broken(self) -> Optional[errors.MlaError]:
        if self._broken is None and not self._ring.connected():
            return errors.Unavailable("the shared memory has ended")
        return self._broken

    # --- Sending

    def attend(self, step_id: int, args: AttendArgs, chunk: wire.Chunk, geometry: Geometry,
               assembler: wire.ResultAssembler, deadline: float) -> stream.Request:
        memory = self.memory
        placed: Placement = self._with_room(lambda: memory.place(args, chunk, geometry), deadline)
        request = _RingRequest(self, placed.blocks)
        request.finish = lambda timings: assembler.put(chunk, placed.o, placed.lse, timings,
                                                        placed.lists)
        flags = (HAS_KV * chunk.has_kv | WANT_LSE * args.want_lse
                 | (SELECTS if args.selects else HAS_LISTS * (args.lists is not None))
                 | WANT_LISTS * (args.wanted_lists > 0) | FP8_KV * bool(args.kv_parts)
                 | ON_DEVICE * placed.on_device)
        if placed.on_device and args.out is not None:
            request.stream = args.out.stream
        self._submit(request, deadline, ATTEND, args.profile, flags,
                     args.q_dtype | args.o_dtype << 4,
                     next(self._tags), step_id, args.layer, args.row_begin + chunk.row_begin,
                     chunk.rows, args.head_offset + chunk.head_begin, chunk.heads,
                     stream.timeout_us(args.timeout_s), placed.in_offset, placed.out_offset)
        return request

    def ask(self, deadline: float, reply_bytes: int = 0, tails: bytes = b"",
            **body: Any) -> stream.Request:
        room = reply_bytes if reply_bytes > REPLY_SLOT_BYTES else 0
        tag = next(self._tags)
        header = attention_pb2.AttendStreamRequest(tag=tag, **body)
        most = header.ByteSize() + (SHARED_BYTES if tails else 0)
        blocks = self._with_room(
            lambda: self.memory.allocate(most + room, *([len(tails)] if tails else [])), deadline)
        if tails:
            self.memory.map[blocks[1]:blocks[1] + len(tails)] = tails
            header.shared.in_offset, header.shared.in_length = blocks[1], len(tails)
        message, offset = header.SerializeToString(), blocks[0]
        size = len(message)
        self.memory.map[offset:offset + size] = message
        request = _RingRequest(self, blocks)
        self._submit(request, deadline, MESSAGE, 0, 0, 0, tag, 0, 0, 0, size, 0, room, 0,
                     offset, offset + size if room else 0)
        return request

    def _submit(self, request: "_RingRequest", deadline: float, *fields: int) -> None:
        """Publishes an entry of those fields (SUBMISSION) once there is a slot for it."""
        try:
            with self._mutex:
                while True:
                    if self._broken is not None:
                        raise self._broken.again()
                    if not self._ring.full():
                        break
                    self._take_one(deadline, stream.no_room)
                if request.stream is not None:
                    self._ring.record(request.stream)
                self._ring.submit(*fields)
                self._in_flight[fields[_TAG]] = request
        except BaseException:
            self._give_back(request)
            raise

    def _with_room(self, attempt: Callable[[], Any], deadline: float) -> Any:
        """What `attempt` takes from the memory; completions make room for it."""
        while True:
            seen = self.memory.freed
            taken = attempt()
            if taken is not None:
                return taken
            if self.memory.exhausted(seen):
                raise stream.does_not_fit()
            with self._mutex:
                if self._broken is not None:
                    raise self._broken.again()
                under_way = bool(self._in_flight)
                if under_way and self.memory.freed == seen:
                    self._take_one(deadline, stream.no_room)
            # Otherwise another thread is about to send what it has placed.
            if not under_way and not self.memory.wait_for_room(seen, deadline):
                raise stream.no_room()

    # --- Waiting

    def wait_for(self, request: _RingRequest, deadline: float) -> None:
        """Returns once the request is done. DeadlineExceeded."""
        with self._mutex:
            while not request.done:
                self._take_one(deadline, stream.no_reply)

    def _take_one(self, deadline: float, late: Callable[[], errors.MlaError]) -> None:
        """Takes one completion, or waits for another thread that is about to. REQUIRES: the mutex;
        it is given up in between. Raises `late()` at the deadline."""
        if self._polling:
            self._waiting += 1
            try:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise late()
            finally:
                self._waiting -= 1
            return
        self._polling = True
        self._mutex.release()
        completion: Optional[Completion] = None
        failure: Optional[errors.MlaError] = None
        try:
            if self._ring.wait(deadline):
                completion = self._ring.take()
        except errors.MlaError as error:
            failure = error.again()
        finally:
            self._mutex.acquire()
            self._polling = False
            if self._waiting:
                self._changed.notify_all()
        if failure is not None:
            self._fail(failure)
        elif completion is not None:
            self._finish(completion)
        else:
            raise late()

    def _finish(self, completion: Completion) -> None:
        """REQUIRES: the mutex."""
        self._on_boot_id(completion.boot_id)
        request = self._in_flight.pop(completion.tag, None)
        if request is None:
            self._fail(errors.DataLoss("the ring completed a request that was never made"))
            return
        if completion.kind == MESSAGE:
            request.reply = _parse(completion.message)
            if request.reply is None:
                request.error = errors.DataLoss("the ring's reply is not an AttendStreamReply")
            elif request.reply.WhichOneof("body") == "error":
                request.error = stream.error_of(request.reply.error)
        elif request.finish is not None:
            request.finish(Timings(
                int((time.monotonic() - request.sent) * 1e6), completion.queue_us,
                completion.plan_us, completion.kernel_us, completion.write_us,
                completion.launch_requests, completion.launch_layers, completion.launch_clients,
                bool(completion.flags & PLAN_REUSED)))
        self._give_back(request)
        request.finish = None
        request.done = True

    def _give_back(self, request: _RingRequest) -> None:
        if request.blocks:  # none if the tensors are the caller's buffers
            self.memory.free(request.blocks)
            request.blocks = []

    # --- The end

    def _fail(self, error: errors.MlaError) -> None:
        """Every request still waiting ends with that error. Memory that they lie in is not used
        again: the server may still be writing there. REQUIRES: the mutex."""
        if self._broken is None:
            self._broken = error
        self.memory.disconnect()
        for request in self._in_flight.values():
            request.error = self._broken
            request.finish = None
            request.done = True
        self._in_flight.clear()
        self._changed.notify_all()

    def close(self) -> None:
        deadline = time.monotonic() + stream.CLOSE_TIMEOUT_S
        with self._mutex:
            try:
                while self._in_flight:
                    self._take_one(deadline, stream.no_reply)
            except errors.DeadlineExceeded:
                pass  # the server is told all the same
            if self._broken is None:
                self.memory.close(stream.CLOSE_TIMEOUT_S)
                self._fail(errors.Unavailable("the Attend stream was closed"))

    def cancel(self) -> None:
        with self._mutex:
            self._fail(errors.Cancelled("the Attend stream was cancelled"))
        self._ring.wake_waiter()
